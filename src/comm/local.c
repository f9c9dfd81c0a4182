/* The engine. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/log.h"
#include "core/result.h"
#include "world/world.h"
#include "world/world_internal.h"
#include "comm/backend.h"
#include "comm/comm.h"
#include "comm/comm_internal.h"
#include "comm/local_internal.h"

/* All ranks have shown what they call: they must agree; then the path follows from what they
 * showed. */
static dtrain_result dtrain__choose_path(dtrain__local_comm *comm, dtrain__local_work *work)
{
    const dtrain_collective *what = &work->what;
    const bool small = dtrain__is_small(what, comm->base.size);
    bool direct = true;
    for (int i = 0; i < comm->base.size; i++) {
        DTRAIN__TRY(dtrain__compare(comm, work, i));
        direct = direct && dtrain__slot_of(comm, i, work->sequence)->direct;
    }
    /* A rank that gave up has taken its buffers back; what it left in a slot is still good. */
    if (!small && dtrain__load(&comm->parts[0]->failure))
        return dtrain__local_fail(&comm->base, DTRAIN_OK, "");
    const size_t chunk = what->count ? dtrain__chunk_count(comm, what) : 1;
    if (small) work->final = 1;
    else if (direct) work->final = 2;
    else work->final = (uint32_t)((what->count + chunk - 1) / chunk) + 2;
    if (dtrain__node_ranks(comm->base.world)) dtrain__book_collective(comm, work);
    return DTRAIN_OK;
}

/* Moves one collective as far as it goes without waiting; true when it is done. */
static bool dtrain__collective_move(dtrain__local_comm *comm, dtrain__local_work *work,
                                    uint64_t oldest)
{
    const dtrain_collective *what = &work->what;
    if (work->stage == 0) {
        if (work->sequence - oldest >= DTRAIN__WINDOW) return false;
        dtrain__show(comm, work);
    }
    while (dtrain__all_reached(comm, work)) {
        if (!work->final) {
            if (work->sequence != comm->agreed + 1) return false; /* links carry in order */
            if (dtrain__choose_path(comm, work) != DTRAIN_OK) return false;
            comm->agreed = work->sequence;
            if (work->final == 1) dtrain__small_path(comm, work);
        }
        if (work->stage >= work->final) return !work->due_ns || dtrain__collective_due(comm, work);
        if (work->final == 2) {
            dtrain__direct_path(comm, work);
        } else {
            if (work->sequence != oldest) return false;
            if (work->stage > 1) dtrain__stage_out(comm, what, work->stage - 2);
            if (work->stage + 1 < work->final &&
                dtrain__stage_in(comm, what, work->stage - 1) != DTRAIN_OK)
                return false;
        }
        dtrain__reach(comm, work, work->stage + 1);
    }
    return false;
}

/* ---- Messages ---------------------------------------------------------------------------------*/

/* Messages between two ranks in one direction go one after the other. */
static bool dtrain__message_first(const dtrain__local_comm *comm, const dtrain__local_work *work)
{
    const dtrain__local_work *other = comm->queue;
    while (other != work &&
           (other->what.kind != work->what.kind || other->what.root != work->what.root))
        other = other->next;
    return other == work;
}

static dtrain__channel *dtrain__channel_of(const dtrain__local_comm *comm,
                                           const dtrain_collective *what)
{
    const int from = what->kind == DTRAIN_COLLECTIVE_SEND ? comm->base.rank : what->root;
    const int to = what->kind == DTRAIN_COLLECTIVE_SEND ? what->root : comm->base.rank;
    return dtrain__load(&comm->parts[from]->channels[to]);
}

/* The other side has to do something first. */
static bool dtrain__message_stuck(const dtrain__local_comm *comm, const dtrain__local_work *work)
{
    const dtrain_collective *what = &work->what;
    dtrain__channel *channel = dtrain__channel_of(comm, what);
    if (!channel) return what->kind == DTRAIN_COLLECTIVE_RECV;
    const uint64_t filled = dtrain__load(&channel->head) - dtrain__load(&channel->tail);
    if (work->sent) return filled != 0;
    return filled == (what->kind == DTRAIN_COLLECTIVE_SEND ? DTRAIN__CELLS : 0u);
}

static bool dtrain__message_crosses(const dtrain__local_comm *comm, const dtrain_collective *what)
{
    return dtrain__node_ranks(comm->base.world) &&
           dtrain__emulated_node(comm, what->root) != dtrain__emulated_node(comm, comm->base.rank);
}

/* The receiver knows when both sides were there and books for both. It takes the last cell when the
 * transfer is due, and a sender whose message does not fit into the channel waits for that; shorter
 * ones are copied and forgotten, as MPI's eager messages are. */
static bool dtrain__message_held(const dtrain__local_comm *comm, dtrain__local_work *work)
{
    const dtrain_world *world = comm->base.world;
    const dtrain_collective *what = &work->what;
    const size_t bytes = what->count * dtrain_dtype_bytes(what->dtype);
    if (what->kind == DTRAIN_COLLECTIVE_SEND || !dtrain__message_crosses(comm, what)) return false;
    if (!work->due_ns) {
        const dtrain__channel *channel = dtrain__channel_of(comm, what);
        const uint64_t sent = channel->cells[channel->tail % DTRAIN__CELLS].started_ns;
        const uint64_t start = sent > work->started_ns ? sent : work->started_ns;
        const uint64_t out = dtrain__book_lane(world, dtrain__emulated_node(comm, what->root),
                                               DTRAIN__LANE_OUT, start, (double)bytes);
        const uint64_t in = dtrain__book_lane(world, dtrain__emulated_node(comm, comm->base.rank),
                                              DTRAIN__LANE_IN, start, (double)bytes);
        work->due_ns = (out > in ? out : in) + dtrain__emulated_latency(world, 1);
    }
    return bytes - work->moved <= DTRAIN__CELL_BYTES && dtrain__now_ns() < work->due_ns;
}

static dtrain_result dtrain__channel_make(dtrain__local_comm *comm, int to)
{
    void *memory;
    if (dtrain__shared_alloc(comm->base.world, sizeof(dtrain__channel), &memory) != DTRAIN_OK)
        return dtrain__local_fail(&comm->base, DTRAIN_ERROR_MEMORY, dtrain_last_error());
    dtrain__store(&comm->parts[comm->base.rank]->channels[to], (dtrain__channel *)memory);
    return DTRAIN_OK;
}

static dtrain_result dtrain__message_differs(dtrain__local_comm *comm,
                                             const dtrain_collective *what,
                                             const dtrain__cell *cell)
{
    const int *world = comm->base.world_ranks;
    return dtrain__local_failf(
        comm, DTRAIN_ERROR_MISMATCH,
        "message differs: rank %d sent %s count %llu, rank %d receives %s count %zu",
        world[what->root], dtrain_dtype_name((dtrain_dtype)cell->dtype),
        (unsigned long long)cell->count, world[comm->base.rank], dtrain_dtype_name(what->dtype),
        what->count);
}

/* One cell further; an empty message is one empty cell. */
static dtrain_result dtrain__message_cell(dtrain__local_comm *comm, dtrain__local_work *work)
{
    const dtrain_collective *what = &work->what;
    dtrain__channel *channel = dtrain__channel_of(comm, what);
    const bool sends = what->kind == DTRAIN_COLLECTIVE_SEND;
    uint64_t *mine = sends ? &channel->head : &channel->tail;
    dtrain__cell *cell = &channel->cells[*mine % DTRAIN__CELLS];
    const size_t bytes = what->count * dtrain_dtype_bytes(what->dtype), rest = bytes - work->moved;
    const size_t length = rest < DTRAIN__CELL_BYTES ? rest : DTRAIN__CELL_BYTES;
    if (sends) {
        cell->count = what->count;
        cell->started_ns = work->started_ns;
        cell->dtype = (uint32_t)what->dtype;
        if (length) memcpy(cell->data, (const char *)what->send + work->moved, length);
    } else {
        if (cell->count != what->count || cell->dtype != (uint32_t)what->dtype)
            return dtrain__message_differs(comm, what, cell);
        if (length) memcpy((char *)what->recv + work->moved, cell->data, length);
    }
    dtrain__store(mine, *mine + 1);
    comm->base.info.staged_bytes += length;
    work->moved += length;
    work->sent = sends && work->moved == bytes && bytes > DTRAIN__CELLS * DTRAIN__CELL_BYTES &&
                 dtrain__message_crosses(comm, what);
    work->done = work->moved == bytes && !work->sent;
    return DTRAIN_OK;
}

static bool dtrain__message_move(dtrain__local_comm *comm, dtrain__local_work *work)
{
    if (!dtrain__message_first(comm, work)) return false;
    if (work->what.kind == DTRAIN_COLLECTIVE_SEND && !dtrain__channel_of(comm, &work->what) &&
        dtrain__channel_make(comm, work->what.root) != DTRAIN_OK)
        return false;
    while (!work->done && !dtrain__message_stuck(comm, work)) {
        if (work->sent) return true;
        if (dtrain__message_held(comm, work)) return false;
        if (dtrain__message_cell(comm, work) != DTRAIN_OK) return false;
    }
    return work->done;
}

/* ---- Start, test, wait ------------------------------------------------------------------------*/

/* Moves everything in flight, oldest first. The host's threads do all the work, here. */
static void dtrain__local_advance(dtrain__local_comm *comm)
{
    uint64_t oldest = 0; /* sequence of the first collective that is not done */
    dtrain__local_work **link = &comm->queue;
    while (*link) {
        dtrain__local_work *work = *link;
        if (!oldest) oldest = work->sequence;
        const bool done = work->sequence ? dtrain__collective_move(comm, work, oldest)
                                         : dtrain__message_move(comm, work);
        if (comm->failed) return;
        if (!done) {
            link = &work->next;
            continue;
        }
        work->done = true;
        *link = work->next;
        if (!*link) comm->queue_end = link;
        comm->base.in_flight--;
        if (oldest == work->sequence) oldest = 0;
    }
}

/* A rank that waits in one communicator keeps the others going: two ranks may wait for the same two
 * operations in opposite order, each in the communicator that the other one advances last. */
static void dtrain__local_advance_all(dtrain__local_comm *comm)
{
    dtrain__local_advance(comm);
    for (dtrain__local_comm *other = comm->base.world->locals; other; other = other->next) {
        if (other == comm || !other->queue) continue;
        dtrain__local_advance(other);
        if (!other->queue) dtrain__comm_landed(&other->base, dtrain__now_ns());
    }
}

/* The sequence number of a rank's latest collective, for messages. */
static uint64_t dtrain__last_sequence(const dtrain__local_comm *comm, int rank)
{
    uint64_t last = 0;
    for (uint32_t i = 0; i < DTRAIN__SLOTS; i++) {
        const uint64_t progress = dtrain__load(&comm->parts[rank]->slots[i].progress);
        if (progress >> DTRAIN__STAGE_BITS > last) last = progress >> DTRAIN__STAGE_BITS;
    }
    return last;
}

/* What keeps `work` from being done: an older collective, maybe. */
static const dtrain__local_work *dtrain__blocking(const dtrain__local_comm *comm,
                                                  const dtrain__local_work *work)
{
    const dtrain__local_work *first = work->sequence ? comm->queue : work;
    while (first != work && !first->sequence) first = first->next;
    return first;
}

static bool dtrain__waits_for(const dtrain__local_comm *comm, const dtrain__local_work *work,
                              int rank)
{
    if (work->sequence) return !dtrain__reached(comm, work, rank);
    return rank == work->what.root && dtrain__message_stuck(comm, work);
}

/* "collective #17 (all-reduce sum f32 count 4)"; sequence 0: a message. */
DTRAIN__PRIVATE void dtrain__name_work(const dtrain_collective *what, uint64_t sequence, char *text,
                                       size_t room)
{
    char name[80];
    dtrain__describe(what, name, sizeof name);
    if (!sequence) snprintf(text, room, "%s", name);
    else snprintf(text, room, "collective #%llu (%s)", (unsigned long long)sequence, name);
}

/* The rarer checks of a wait: has another rank failed the communicator, called something else,
 * left? How it ended is read before its progress: what it did before leaving counts. */
static dtrain_result dtrain__local_trouble(dtrain__local_comm *comm,
                                           const dtrain__local_work *waited)
{
    const dtrain__local_work *work = dtrain__blocking(comm, waited);
    const int *world = comm->base.world_ranks;
    char name[128];
    if (dtrain__load(&comm->parts[0]->failure))
        return dtrain__local_fail(&comm->base, DTRAIN_OK, "");
    for (int i = 0; i < comm->base.size; i++) {
        const uint32_t how = dtrain__load(&comm->base.world->control->exits[world[i]].how);
        if (!dtrain__waits_for(comm, work, i)) {
            if (work->sequence && work->stage == 1) DTRAIN__TRY(dtrain__compare(comm, work, i));
            continue;
        }
        if (how != DTRAIN__LEFT) continue;
        dtrain__name_work(&work->what, work->sequence, name, sizeof name);
        return dtrain__local_failf(
            comm, DTRAIN_ERROR_PEER,
            "rank %d left (returned 0) after its collective #%llu while rank %d waits in %s",
            world[i], (unsigned long long)dtrain__last_sequence(comm, i), world[comm->base.rank],
            name);
    }
    return DTRAIN_OK;
}

static dtrain_result dtrain__local_timeout(dtrain__local_comm *comm,
                                           const dtrain__local_work *waited)
{
    const dtrain__local_work *work = dtrain__blocking(comm, waited);
    char name[128], list[200] = "";
    size_t used = 0;
    const dtrain_world *world = comm->base.world;
    const uint64_t now = dtrain__now_ns();
    dtrain__name_work(&work->what, work->sequence, name, sizeof name);
    if (work->due_ns > now)
        return dtrain__local_failf(
            comm, DTRAIN_ERROR_TIMEOUT,
            "%s: rank %d waited %.1f s, and its emulated link of %g Gb/s needs %.1f s more; raise "
            "timeout_ms",
            name, world->rank, 1e-9 * (double)world->timeout_ns,
            world->emulation.gigabits_per_second, 1e-9 * (double)(work->due_ns - now));
    for (int i = 0; i < comm->base.size && used + 48 < sizeof list; i++) {
        if (!dtrain__waits_for(comm, work, i)) continue;
        const unsigned long long last = (unsigned long long)dtrain__last_sequence(comm, i);
        used += (size_t)snprintf(
            list + used, sizeof list - used, "%srank %d (%s #%llu)", used ? ", " : "",
            comm->base.world_ranks[i],
            work->sequence && last >= work->sequence ? "stuck in" : "its last was", last);
    }
    return dtrain__local_failf(
        comm, DTRAIN_ERROR_TIMEOUT,
        "%s: rank %d waited %.1f s for %s; if they%s are only slow, raise timeout_ms", name,
        world->rank, 1e-9 * (double)world->timeout_ns, list,
        dtrain__node_ranks(world) ? " or the emulated links" : "");
}

static dtrain_result dtrain__local_more_works(dtrain__local_comm *comm)
{
    dtrain__work_block *block = (dtrain__work_block *)dtrain__alloc(
        &comm->base.world->allocator, 1, sizeof *block, "operations in flight");
    if (!block) return DTRAIN_ERROR_MEMORY;
    block->next = comm->blocks;
    comm->blocks = block;
    for (uint32_t i = 0; i < DTRAIN__WINDOW; i++) {
        block->works[i].next = comm->idle;
        comm->idle = &block->works[i];
    }
    return DTRAIN_OK;
}

static void dtrain__local_recycle(dtrain__local_comm *comm, dtrain__local_work *work)
{
    work->next = comm->idle;
    comm->idle = work;
    comm->base.outstanding--;
}

static dtrain_result dtrain__local_start(dtrain_comm *base, const dtrain_collective *what,
                                         dtrain_work **out)
{
    dtrain__local_comm *comm = (dtrain__local_comm *)base;
    if (comm->failed) return dtrain__local_standing(comm);
    if (!comm->idle && dtrain__local_more_works(comm) != DTRAIN_OK)
        return dtrain__local_fail(base, DTRAIN_ERROR_MEMORY, dtrain_last_error());
    dtrain__local_work *work = comm->idle;
    comm->idle = work->next;
    memset(work, 0, sizeof *work);
    work->base.comm = base;
    work->what = *what;
    if (dtrain__node_ranks(base->world)) work->started_ns = dtrain__now_ns();
    if (what->kind != DTRAIN_COLLECTIVE_SEND && what->kind != DTRAIN_COLLECTIVE_RECV)
        work->sequence = ++comm->sequence;
    *comm->queue_end = work;
    comm->queue_end = &work->next;
    base->outstanding++;
    base->in_flight++;
    dtrain__local_advance(comm);
    *out = &work->base;
    if (!comm->failed) return DTRAIN_OK;
    dtrain__local_recycle(comm, work);
    return dtrain__local_standing(comm);
}

/* The rarer half of a wait, after dtrain__wait_poll said `turn`. A peer's death has a sentence
 * already, which becomes the communicator's. Before anything is given up, what the others did until
 * they failed or left is looked at once more: it may be all that was needed. */
static void dtrain__local_look(dtrain__local_comm *comm, const dtrain__local_work *work,
                               dtrain_result turn)
{
    if (turn != DTRAIN_OK || dtrain__load(&comm->parts[0]->failure)) dtrain__local_advance(comm);
    if (work->done || comm->failed) return;
    if (turn == DTRAIN_ERROR_PEER) (void)dtrain__local_fail(&comm->base, turn, dtrain_last_error());
    else if (dtrain__local_trouble(comm, work) == DTRAIN_OK && turn == DTRAIN_ERROR_TIMEOUT)
        (void)dtrain__local_timeout(comm, work);
}

static dtrain_result dtrain__local_wait(dtrain_work *base)
{
    dtrain__local_work *work = (dtrain__local_work *)base;
    dtrain__local_comm *comm = (dtrain__local_comm *)base->comm;
    dtrain__wait wait = dtrain__wait_begin();
    while (!work->done && !comm->failed) {
        dtrain__local_advance_all(comm);
        if (work->done || comm->failed) break;
        const dtrain_result turn = dtrain__node_ranks(comm->base.world)
                                       ? dtrain__emulated_turn(comm->base.world, &wait)
                                       : dtrain__wait_turn(comm->base.world, &wait);
        if (wait.polled) dtrain__local_look(comm, work, turn); /* may set failed */
    }
    const dtrain_result result = work->done ? DTRAIN_OK : dtrain__local_standing(comm);
    dtrain__local_recycle(comm, work);
    return result;
}

static dtrain_result dtrain__local_test(dtrain_work *base, bool *done)
{
    dtrain__local_work *work = (dtrain__local_work *)base;
    dtrain__local_comm *comm = (dtrain__local_comm *)base->comm;
    dtrain__wait wait = dtrain__wait_begin();
    if (!work->done && !comm->failed) dtrain__local_advance_all(comm);
    if (!work->done && !comm->failed)
        dtrain__local_look(comm, work, dtrain__wait_poll(comm->base.world, &wait));
    *done = work->done || comm->failed;
    return work->done || !comm->failed ? DTRAIN_OK : dtrain__local_standing(comm);
}

/* ---- Making and ending a communicator ---------------------------------------------------------*/

static dtrain_result dtrain__local_alloc(dtrain_comm *comm, size_t bytes, void **out)
{
    return dtrain__shared_alloc(comm->world, bytes, out);
}
static void dtrain__local_free(dtrain_comm *comm, void *memory, size_t bytes)
{
    (void)bytes;
    dtrain__shared_free(comm->world, memory);
}

/* Private memory only; this rank's part is left to those who may still read it. */
static void dtrain__local_release(dtrain__local_comm *comm)
{
    const dtrain_allocator *allocator = &comm->base.world->allocator;
    const size_t size = (size_t)comm->base.size;
    dtrain__local_comm **link = &comm->base.world->locals;
    while (*link != comm) link = &(*link)->next;
    *link = comm->next;
    while (comm->blocks) {
        dtrain__work_block *block = comm->blocks;
        comm->blocks = block->next;
        dtrain__free(allocator, block, 1, sizeof *block);
    }
    dtrain__free(allocator, comm->parts, size, sizeof *comm->parts);
    dtrain__free(allocator, comm->base.world_ranks, size, sizeof *comm->base.world_ranks);
    dtrain__free(allocator, comm, 1, sizeof *comm);
}

/* The end of a rank. Operations in flight are dropped: nobody here waits for them any more, and
 * ranks that wait for this one learn that it left. */
DTRAIN__PRIVATE void dtrain__local_end(dtrain_world *world)
{
    while (world->locals) dtrain__local_release(world->locals);
}

/* A part outlives its rank's communicator while another member may still read its payloads. */
static void dtrain__sweep_retired(dtrain_world *world)
{
    dtrain__part **link = &world->retired;
    while (*link) {
        dtrain__part *part = *link;
        if (dtrain__load(&part->departed) < part->size) {
            link = &part->next;
            continue;
        }
        *link = part->next;
        for (int i = 0; i < DTRAIN_MAX_RANKS; i++) dtrain__shared_free(world, part->channels[i]);
        dtrain__shared_free(world, part->stage);
        dtrain__shared_free(world, part);
    }
}

static dtrain_result dtrain__local_destroy(dtrain_comm *base)
{
    dtrain__local_comm *comm = (dtrain__local_comm *)base;
    dtrain_world *world = base->world;
    dtrain__part *part = comm->parts[base->rank];
    part->next = world->retired;
    world->retired = part;
    for (int i = 0; i < base->size; i++) dtrain__fetch_add(&comm->parts[i]->departed, 1u);
    dtrain__local_release(comm);
    dtrain__sweep_retired(world);
    return DTRAIN_OK;
}

static dtrain_result dtrain__local_split(dtrain_comm *parent, int color, int key,
                                         dtrain_comm **out);

static const dtrain_comm_ops dtrain__local_ops = {DTRAIN_COMM_ABI,
                                                  false,
                                                  "local",
                                                  dtrain__local_world_comm,
                                                  dtrain__local_start,
                                                  dtrain__local_test,
                                                  dtrain__local_wait,
                                                  dtrain__local_alloc,
                                                  dtrain__local_free,
                                                  dtrain__local_split,
                                                  dtrain__local_fail,
                                                  dtrain__local_destroy};
DTRAIN__PRIVATE const dtrain_comm_ops *dtrain__local_comm_ops(void) { return &dtrain__local_ops; }

/* This rank's half of a communicator of `size` ranks; its part is made, the others' are not
 * known. */
static dtrain_result dtrain__local_make(dtrain_world *world, int size, int rank,
                                        dtrain__local_comm **out)
{
    const dtrain_allocator *allocator = &world->allocator;
    void *part = NULL;
    dtrain__sweep_retired(world);
    *out = (dtrain__local_comm *)dtrain__alloc(allocator, 1, sizeof **out, "a communicator");
    if (!*out) return DTRAIN_ERROR_MEMORY;
    dtrain__local_comm *comm = *out;
    comm->base.ops = &dtrain__local_ops;
    comm->base.world = world;
    comm->base.size = size;
    comm->base.rank = rank;
    comm->queue_end = &comm->queue;
    comm->next = world->locals;
    world->locals = comm;
    comm->base.world_ranks =
        (int *)dtrain__alloc(allocator, (size_t)size, sizeof(int), "a table of ranks");
    if (comm->base.world_ranks)
        comm->parts = (dtrain__part **)dtrain__alloc(allocator, (size_t)size, sizeof *comm->parts,
                                                     "a table of ranks");
    if (comm->parts && dtrain__local_more_works(comm) == DTRAIN_OK &&
        dtrain__shared_alloc(world, sizeof(dtrain__part), &part) == DTRAIN_OK) {
        comm->parts[rank] = (dtrain__part *)part;
        comm->parts[rank]->size = (uint32_t)size;
        return DTRAIN_OK;
    }
    dtrain__local_release(comm);
    *out = NULL;
    return DTRAIN_ERROR_MEMORY;
}

/* The first thing in each arena is the rank's part: nothing has to be exchanged, and zeroed memory
 * is a rank that has not started yet. */
DTRAIN__PRIVATE dtrain_result dtrain__local_world_comm(dtrain_world *world, dtrain_comm **out)
{
    dtrain__local_comm *comm;
    if (!world->control->arenas)
        return dtrain_fail(
            DTRAIN_ERROR_UNSUPPORTED,
            "dtrain_launch: %d ranks on %d host%s share no memory%s%s%s; the local communicator "
            "needs that, between hosts set comm_ops to one that crosses them: NCCL on GPUs",
            world->size, world->node_count, world->node_count == 1 ? "" : "s",
            world->no_region[0] ? " (" : "", world->no_region, world->no_region[0] ? ")" : "");
    DTRAIN__TRY(dtrain__local_make(world, world->size, world->rank, &comm));
    for (int i = 0; i < world->size; i++) {
        comm->base.world_ranks[i] = i;
        comm->parts[i] = (dtrain__part *)(void *)dtrain__arena(world->control, i);
    }
    *out = &comm->base;
    return DTRAIN_OK;
}

/* Ranks of `mine`'s color in the new order: by key, then by old rank. Writes their old ranks. */
DTRAIN__PRIVATE int dtrain__split_members(int64_t (*all)[2], int size, int mine, int *members)
{
    int count = 0;
    for (int i = 0; i < size; i++) {
        if (all[i][0] != all[mine][0]) continue;
        int at = count++;
        for (; at > 0 && all[members[at - 1]][1] > all[i][1]; at--) members[at] = members[at - 1];
        members[at] = i;
    }
    return count;
}

/* Two exchanges: colors and keys; then where each rank's part is, or that it has none, in which
 * case no rank gets a communicator: half a group would wait for ever. */
static dtrain_result dtrain__local_split(dtrain_comm *parent, int color, int key, dtrain_comm **out)
{
    int64_t mine[2] = {color < 0 ? -1 : color, key}, all[DTRAIN_MAX_RANKS][2],
            parts[DTRAIN_MAX_RANKS];
    int members[DTRAIN_MAX_RANKS], rank = 0, lacking = -1;
    dtrain__local_comm *comm = NULL;
    DTRAIN__TRY(
        dtrain__run(parent, DTRAIN_COLLECTIVE_SPLIT, mine, all, 2, DTRAIN_DTYPE_I64, 0, -1, NULL));
    const int size = dtrain__split_members(all, parent->size, parent->rank, members);
    while (members[rank] != parent->rank) rank++;
    if (color >= 0) (void)dtrain__local_make(parent->world, size, rank, &comm);
    int64_t part = color < 0 ? 1 : comm ? (int64_t)(intptr_t)comm->parts[rank] : 0;
    const dtrain_result shared = dtrain__run(parent, DTRAIN_COLLECTIVE_SPLIT, &part, parts, 1,
                                             DTRAIN_DTYPE_I64, 0, -1, NULL);
    for (int i = 0; i < parent->size && shared == DTRAIN_OK; i++)
        if (!parts[i]) lacking = i;
    if (shared != DTRAIN_OK || lacking >= 0) {
        if (comm) dtrain__shared_free(parent->world, comm->parts[rank]);
        if (comm) dtrain__local_release(comm);
        if (shared != DTRAIN_OK) return shared;
        return dtrain_fail(DTRAIN_ERROR_MEMORY,
                           "dtrain_comm_split: rank %d has no memory for its part",
                           parent->world_ranks[lacking]);
    }
    for (int i = 0; comm && i < size; i++) {
        comm->parts[i] = (dtrain__part *)(intptr_t)parts[members[i]];
        comm->base.world_ranks[i] = parent->world_ranks[members[i]];
    }
    *out = comm ? &comm->base : NULL;
    return DTRAIN_OK;
}
