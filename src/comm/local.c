/* The local transport: shared memory
 *
 * Each rank owns one "part" of a communicator in shared memory and is the only one to write it:
 *
 *     part of rank r   | report | stage, channels | slot 0 | slot 1 | ... | slot Q-1 |
 *     slot s % Q       | progress = (s, stage) | call and buffers of operation s | small data |
 *
 * An operation has numbered stages. A rank that has done its share of a stage "reaches" it: it
 * stores the number in its slot (release). It goes on when all ranks have reached the stage
 * (acquire). At stage 1 a rank shows its call. When all have, and agree, all of them take the same
 * path:
 *
 *     small    the data came with the calls: every rank computes its own result, done
 *     direct   all buffers are in shared memory: rank r computes slice r of every rank's result, or
 *              takes what belongs to its own: stage 2, done. No temporary memory
 *     read     large buffers in private memory, where the kernel lets ranks read each other's: rank
 *              r computes slice r of its own result: stage 2. All-reduce: it takes the other slices
 *              from the ranks that computed them: stage 3, done
 *     copied   otherwise: chunk c goes into half c % 2 of this rank's stage buffer: stage c + 2.
 *              When all have reached it, every rank computes its own result from the buffers
 *
 * All paths add in rank order in fp32 and round once, so results have the same bits on each.
 *
 * Q = 2 W slots are enough, see comm/engine_internal.h. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/result.h"
#include "world/world.h"
#include "world/world_internal.h"
#include "comm/backend.h"
#include "comm/comm.h"
#include "comm/comm_internal.h"
#include "comm/engine_internal.h"
#include "device/backend.h"

#define DTRAIN__SLOTS (2 * DTRAIN_WINDOW)
#define DTRAIN__CHUNK_BYTES ((size_t)128 << 10)   /* half a stage: two ranks' stages stay in L2 */
#define DTRAIN__READ_BYTES ((size_t)128 << 10)    /* buffers from this size on are read ... */
#define DTRAIN__SCRATCH_BYTES ((size_t)512 << 10) /* ... in blocks of all ranks that fit here */
#define DTRAIN__CELL_BYTES ((size_t)32 << 10)
#define DTRAIN__CELLS 4u
#define DTRAIN__STAGE_BITS 24 /* progress = sequence << 24 | stage */

/* Written by its rank only; 65 cache lines, so that slots spread over the sets of a cache. */
typedef struct dtrain__slot {
    uint64_t progress; /* atomic; only grows */
    dtrain_call shown;
    char data[DTRAIN_SMALL_BYTES];
    const char *send;
    char *recv;
    uint64_t paths; /* bits of dtrain__path that its rank and these buffers allow */
} dtrain__slot;

/* Messages of one ordered pair of ranks. head - tail cells are filled: a message that does not fit
 * into all of them has one, which says where it lies, if the receiver can read it there: then it
 * comes without the sender, which may compute. Others are cut in cells. */
typedef struct dtrain__cell {
    dtrain_call shown; /* of the whole message */
    const char *lies;  /* NULL: the cell has the data */
    uint64_t path;     /* dtrain__path to it */
    char line[DTRAIN__CACHE_LINE - sizeof(dtrain_call) - 16];
    char data[DTRAIN__CELL_BYTES];
} dtrain__cell;

typedef struct dtrain__channel {
    uint64_t head; /* atomic, the sender's */
    uint64_t head_line[7];
    uint64_t tail; /* atomic, the receiver's */
    uint64_t tail_line[7];
    dtrain__cell cells[DTRAIN__CELLS];
} dtrain__channel;

/* The memory that one rank shows to the others; all zero is its valid beginning. */
struct dtrain__part {
    dtrain__abort_record report; /* of the first part only: the communicator's failure */
    uint32_t departed, size;     /* atomic: ranks that have destroyed the communicator; all */
    char *stage;                 /* buffer of 2 chunks, made when first needed */
    int64_t pid;                 /* of its rank, which has in private memory, */
    const uint64_t *proof;       /* at this address, */
    uint64_t proof_value;        /* this number: others read it to see that they can */
    uint32_t reads;              /* atomic: this rank can read every rank's memory; known when it
                                    has come to a collective */
    dtrain__part *next;          /* among this rank's retired parts */
    dtrain__channel *channels[DTRAIN_MAX_RANKS]; /* atomic; to each rank, made by the first send */
    dtrain__slot slots[DTRAIN__SLOTS];
};

typedef struct dtrain__local_comm {
    dtrain_comm base;
    dtrain__part **parts; /* (size) */
    char *scratch;        /* made when first needed */
    uint64_t proof;       /* see dtrain__part */
    bool reads;           /* as in this rank's part */
} dtrain__local_comm;

typedef enum dtrain__path { DTRAIN__COPIED = 0, DTRAIN__READ = 1, DTRAIN__DIRECT = 2 } dtrain__path;

typedef struct dtrain__local_work {
    dtrain_transport_work base;
    uint32_t stage, final; /* reached; final 0: the path is not chosen yet */
    dtrain__path path;
    int seen;     /* ranks below it have reached `stage` */
    size_t moved; /* messages: bytes that this side is done with */
    uint64_t end; /* a send that waits for the receiver: its cells are before this one */
} dtrain__local_work;

static dtrain__part *dtrain__part_at(const dtrain_comm *comm, int rank)
{
    return ((const dtrain__local_comm *)comm)->parts[rank];
}

static dtrain__slot *dtrain__slot_of(const dtrain_comm *comm, int rank, uint64_t sequence)
{
    return &dtrain__part_at(comm, rank)->slots[sequence % DTRAIN__SLOTS];
}

/* ---- Stages -----------------------------------------------------------------------------------*/

static bool dtrain__reached(const dtrain_comm *comm, uint64_t sequence, uint32_t stage, int rank)
{
    const uint64_t goal = sequence << DTRAIN__STAGE_BITS | stage;
    return dtrain__load(&dtrain__slot_of(comm, rank, sequence)->progress) >= goal;
}

static void dtrain__reach(const dtrain_comm *comm, dtrain__local_work *work, uint32_t stage)
{
    work->stage = stage;
    work->seen = 0;
    ++*comm->moves;
    dtrain__store(&dtrain__slot_of(comm, comm->rank, work->base.sequence)->progress,
                  work->base.sequence << DTRAIN__STAGE_BITS | stage);
}

/* ---- Reading another rank's memory ------------------------------------------------------------*/

#ifndef __cplusplus /* a C file that includes dtrain.h late has not asked for this prototype */
ssize_t process_vm_readv(pid_t pid, const struct iovec *to, unsigned long to_count,
                         const struct iovec *from, unsigned long from_count, unsigned long flags);
#endif

/* Copy memory of another rank's process; false with errno when the kernel refuses. */
static bool dtrain__read_memory(int64_t pid, const void *from, void *to, size_t bytes)
{
    for (size_t done = 0; done < bytes;) {
        struct iovec target = {(char *)to + done, bytes - done},
                     source = {(char *)(uintptr_t)from + done, bytes - done};
        const ssize_t got = process_vm_readv((pid_t)pid, &target, 1, &source, 1, 0);
        if (got <= 0) return false;
        done += (size_t)got;
    }
    return true;
}

/* Say whether the kernel can read these bytes of this rank: not where a driver mapped them. */
static bool dtrain__is_readable(const void *memory, size_t bytes)
{
    char byte;
    return !bytes || !memory ||
           (dtrain__read_memory(getpid(), memory, &byte, 1) &&
            dtrain__read_memory(getpid(), (const char *)memory + bytes - 1, &byte, 1));
}

/* Read another rank's bytes. False: that rank has ended, which the wait will report, or the
 * communicator has failed. */
static bool dtrain__fetch(dtrain_comm *comm, int rank, const char *from, char *to, size_t bytes)
{
    comm->info.staged_bytes += bytes;
    if (dtrain__read_memory(dtrain__part_at(comm, rank)->pid, from, to, bytes)) return true;
    if (errno != ESRCH)
        dtrain__engine_failf(comm, DTRAIN_ERROR_PEER,
                             "rank %d's buffer of %zu bytes cannot be read: %s; was it freed while "
                             "the operation was under way?",
                             comm->world_ranks[rank], bytes, strerror(errno));
    return false;
}

/* ---- Showing a call ---------------------------------------------------------------------------*/

/* Show a call, and which paths this rank's buffers allow. On the direct path other ranks read
 * `send`; they write `recv` where slices of a result are computed by different ranks. */
static void dtrain__local_show(dtrain_comm *comm, dtrain_transport_work *work)
{
    const dtrain_collective *what = &work->what;
    const dtrain__kind *kind = dtrain__kind_of(what->kind);
    dtrain__slot *slot = dtrain__slot_of(comm, comm->rank, work->sequence);
    (void)dtrain__write_shown(work, &slot->shown);
    slot->send = (const char *)what->send;
    slot->recv = (char *)what->recv;
    slot->paths = 0;
    if (!work->small) {
        const size_t send_bytes = dtrain__send_bytes(what, comm->size);
        const size_t recv_bytes = dtrain__recv_bytes(what, comm->size);
        const bool written = !kind->cuts && !kind->joins && dtrain__gets(what, comm->rank);
        const bool direct = dtrain__is_shared(comm->world, what->send, send_bytes) &&
                            (!written || dtrain__is_shared(comm->world, what->recv, recv_bytes));
        const bool read = ((const dtrain__local_comm *)comm)->reads &&
                          send_bytes >= DTRAIN__READ_BYTES &&
                          (direct || (dtrain__is_readable(what->send, send_bytes) &&
                                      dtrain__is_readable(what->recv, recv_bytes)));
        slot->paths = (direct ? (uint64_t)DTRAIN__DIRECT : 0) | (read ? (uint64_t)DTRAIN__READ : 0);
    }
    dtrain__reach(comm, (dtrain__local_work *)work, 1);
}

static const dtrain_call *dtrain__local_heard(const dtrain_comm *comm, uint64_t sequence, int rank)
{
    const dtrain__channel *channel =
        dtrain__load(&dtrain__part_at(comm, rank)->channels[comm->rank]);
    if (sequence)
        return dtrain__reached(comm, sequence, 1, rank)
                   ? &dtrain__slot_of(comm, rank, sequence)->shown
                   : NULL;
    if (!channel || dtrain__load(&channel->head) == channel->tail) return NULL;
    return &channel->cells[channel->tail % DTRAIN__CELLS].shown;
}

/* ---- The paths --------------------------------------------------------------------------------*/

/* Compute this rank's slice of a sum or broadcast from the inputs of all: on the direct path in
 * every rank's result, on the read path in its own, where the root of a reduce computes everything.
 * What is read comes in blocks that stay in a cache. In place, an all-reduce overwrites a slice
 * that no other rank reads. */
static bool dtrain__compute_slice(dtrain_comm *comm, const dtrain__local_work *work)
{
    dtrain__local_comm *local = (dtrain__local_comm *)comm;
    const dtrain_collective *what = &work->base.what;
    const dtrain__kind *kind = dtrain__kind_of(what->kind);
    const bool direct = work->path == DTRAIN__DIRECT;
    const int size = comm->size, rank = comm->rank;
    const size_t unit = dtrain_dtype_bytes(what->dtype);
    const char *in[DTRAIN_MAX_RANKS];
    char *out[DTRAIN_MAX_RANKS];
    size_t first, length, block, count;
    int outs = 0;
    dtrain__slice(what, size, rank, &first, &length);
    if (kind->rooted && !direct) {
        first = 0;
        length = what->root == rank ? what->count : 0;
    }
    if (!length) return true; /* and recv may be NULL */
    if (!direct && !local->scratch) {
        local->scratch = (char *)dtrain__alloc(&comm->world->allocator, DTRAIN__SCRATCH_BYTES, 1,
                                               "blocks of other ranks");
        if (!local->scratch) return dtrain__engine_ok(comm, DTRAIN_ERROR_MEMORY);
    }
    block = direct ? length
                   : DTRAIN__SCRATCH_BYTES / (size_t)size / DTRAIN__CACHE_LINE *
                         DTRAIN__CACHE_LINE / unit;
    for (int i = 0; i < size; i++)
        if (direct && !kind->cuts ? dtrain__gets(what, i) : i == rank)
            out[outs++] = dtrain__slot_of(comm, i, work->base.sequence)->recv +
                          (kind->cuts ? 0 : first * unit);
    for (size_t at = 0; at < length; at += count) {
        count = length - at < block ? length - at : block;
        for (int i = 0; i < size; i++) {
            in[i] = dtrain__slot_of(comm, i, work->base.sequence)->send + (first + at) * unit;
            if (direct || i == rank) continue;
            char *copy = local->scratch + (size_t)i * block * unit;
            if (!dtrain__fetch(comm, i, in[i], copy, count * unit)) return false;
            in[i] = copy;
        }
        dtrain__combine(what, kind->reduces ? in : in + what->root, kind->reduces ? size : 1, out,
                        outs, count);
        for (int i = 0; i < outs; i++) out[i] += count * unit;
    }
    return true;
}

/* Take from each rank what belongs into this rank's result as it is, the next rank's first, so that
 * not all read the same rank. */
static bool dtrain__take_pieces(dtrain_comm *comm, const dtrain__local_work *work)
{
    const dtrain_collective *what = &work->base.what;
    const dtrain__kind *kind = dtrain__kind_of(what->kind);
    const int size = comm->size, own = comm->rank;
    for (int turn = 1; turn <= size; turn++) {
        const int i = (own + turn) % size;
        const dtrain__slot *slot = dtrain__slot_of(comm, i, work->base.sequence);
        dtrain__transfer piece;
        if (!dtrain__transfer_of(what, size, !kind->cuts, i, own, &piece)) continue;
        if (kind->rooted) { /* a broadcast is read from the root alone */
            if (i != what->root) continue;
            piece.source = piece.target = 0;
            piece.bytes = dtrain__send_bytes(what, size);
        }
        const char *from = (kind->reduces ? slot->recv : slot->send) + piece.source;
        char *to = (char *)what->recv + piece.target;
        if (i != own && work->path == DTRAIN__READ) {
            if (!dtrain__fetch(comm, i, from, to, piece.bytes)) return false;
        } else if (from != to) {
            memcpy(to, from, piece.bytes);
        }
    }
    return true;
}

/* The copied path:
 *
 *     chunk c    copy in -> reach c + 2 -> all there -> pull -> copy c + 1 in -> reach c + 3
 *
 * Chunk c + 1 goes into the half that held chunk c - 1, which all ranks have pulled: they did so
 * before they reached stage c + 2. After the last stage, chunks + 2, all have pulled everything and
 * the next operation may use the buffers; so only the oldest one in flight uses them. */

static size_t dtrain__chunk_count(const dtrain_comm *comm, const dtrain_collective *what)
{
    const size_t pieces = dtrain__kind_of(what->kind)->cuts ? (size_t)comm->size : 1;
    return DTRAIN__CHUNK_BYTES / dtrain_dtype_bytes(what->dtype) / pieces;
}

/* Go to the next stage of the copied path: compute the chunk of this rank's result whose inputs all
 * ranks have copied (ranks that give nothing may have no buffer), and copy the next chunk of its
 * own input into its buffer: one piece, or one for each rank's slice. */
static bool dtrain__next_chunk(dtrain_comm *comm, const dtrain__local_work *work)
{
    const dtrain_collective *what = &work->base.what;
    const bool cuts = dtrain__kind_of(what->kind)->cuts;
    const size_t unit = dtrain_dtype_bytes(what->dtype), chunk = dtrain__chunk_count(comm, what);
    const size_t slice = cuts ? (size_t)comm->rank * chunk : 0,
                 pieces = cuts ? (size_t)comm->size : 1;
    dtrain__part *part = dtrain__part_at(comm, comm->rank);
    const char *in[DTRAIN_MAX_RANKS];
    void *stage;
    if (work->stage > 1) {
        const size_t c = work->stage - 2, rest = what->count - c * chunk;
        for (int i = 0; i < comm->size; i++) {
            in[i] = dtrain__part_at(comm, i)->stage;
            if (in[i]) in[i] += c % 2 * DTRAIN__CHUNK_BYTES + slice * unit;
        }
        dtrain__pull(comm, what, in, c * chunk, rest < chunk ? rest : chunk);
    }
    if (work->stage + 1 >= work->final || !dtrain__gives(what, comm->rank)) return true;
    if (!part->stage) {
        if (dtrain__shared_alloc(comm->world, 2 * DTRAIN__CHUNK_BYTES, &stage) != DTRAIN_OK)
            return dtrain__engine_ok(comm, DTRAIN_ERROR_MEMORY);
        part->stage = (char *)stage;
    }
    const size_t c = work->stage - 1, rest = what->count - c * chunk;
    const size_t length = rest < chunk ? rest : chunk;
    char *half = part->stage + c % 2 * DTRAIN__CHUNK_BYTES;
    for (size_t i = 0; i < pieces; i++)
        memcpy(half + i * chunk * unit,
               (const char *)what->send + (i * what->count + c * chunk) * unit, length * unit);
    comm->info.staged_bytes += pieces * length * unit;
    return true;
}

/* ---- Messages ---------------------------------------------------------------------------------*/

static dtrain__channel *dtrain__channel_of(const dtrain_comm *comm, const dtrain_collective *what)
{
    const int from = what->kind == DTRAIN_COLLECTIVE_SEND ? comm->rank : what->root;
    const int to = what->kind == DTRAIN_COLLECTIVE_SEND ? what->root : comm->rank;
    return dtrain__load(&dtrain__part_at(comm, from)->channels[to]);
}

/* Say whether the other side has to act first. */
static bool dtrain__message_stuck(const dtrain_comm *comm, const dtrain__local_work *work)
{
    const bool sends = work->base.what.kind == DTRAIN_COLLECTIVE_SEND;
    const dtrain__channel *channel = dtrain__channel_of(comm, &work->base.what);
    if (!channel) return !sends;
    const uint64_t tail = dtrain__load(&channel->tail),
                   filled = dtrain__load(&channel->head) - tail;
    return work->base.posted ? tail < work->end : filled == (sends ? DTRAIN__CELLS : 0u);
}

/* Fill or empty cells, as far as it goes; an empty message is one empty cell. */
static bool dtrain__local_message(dtrain_comm *comm, dtrain__local_work *work)
{
    const dtrain_collective *what = &work->base.what;
    const size_t bytes = what->count * dtrain_dtype_bytes(what->dtype);
    const bool sends = what->kind == DTRAIN_COLLECTIVE_SEND;
    void *made;
    if (sends && !dtrain__channel_of(comm, what)) {
        if (dtrain__shared_alloc(comm->world, sizeof(dtrain__channel), &made) != DTRAIN_OK)
            return dtrain__engine_ok(comm, DTRAIN_ERROR_MEMORY);
        dtrain__store(&dtrain__part_at(comm, comm->rank)->channels[what->root],
                      (dtrain__channel *)made);
    }
    while (!dtrain__message_stuck(comm, work)) {
        if (work->base.posted) return true;
        dtrain__channel *channel = dtrain__channel_of(comm, what);
        uint64_t *mine = sends ? &channel->head : &channel->tail;
        dtrain__cell *cell = &channel->cells[*mine % DTRAIN__CELLS];
        const size_t rest = bytes - work->moved;
        size_t length = rest < DTRAIN__CELL_BYTES ? rest : DTRAIN__CELL_BYTES;
        if (!sends && !work->base.agreed) return false;

        /* The sender writes how the receiver comes to a message that is longer than the channel. */
        if (sends && work->moved == 0 && bytes > DTRAIN__CELLS * DTRAIN__CELL_BYTES) {
            if (dtrain__is_shared(comm->world, what->send, bytes)) work->path = DTRAIN__DIRECT;
            else if (dtrain__load(&dtrain__part_at(comm, what->root)->reads) &&
                     dtrain__is_readable(what->send, bytes))
                work->path = DTRAIN__READ;
        }
        if (sends) {
            cell->shown = work->base.call;
            cell->path = (uint64_t)work->path;
            cell->lies = work->path == DTRAIN__COPIED ? NULL : (const char *)what->send;
        }

        if (cell->lies) length = bytes;
        else comm->info.staged_bytes += length;
        if (sends && !cell->lies && length)
            memcpy(cell->data, (const char *)what->send + work->moved, length);
        if (!sends && cell->path != DTRAIN__READ && length)
            memcpy((char *)what->recv + work->moved, cell->lies ? cell->lies : cell->data, length);
        if (!sends && cell->path == DTRAIN__READ &&
            !dtrain__fetch(comm, what->root, cell->lies, (char *)what->recv, length))
            return false;
        work->moved += length;
        dtrain__store(mine, *mine + 1);
        ++*comm->moves;
        work->end = *mine;
        work->base.posted = sends && work->moved == bytes && cell->lies;
        if (work->moved == bytes && !work->base.posted) return true;
    }
    return false;
}

static bool dtrain__local_move(dtrain_comm *comm, dtrain_transport_work *base)
{
    dtrain__local_work *work = (dtrain__local_work *)base;
    const dtrain_collective *what = &base->what;
    const dtrain__kind *kind = dtrain__kind_of(what->kind);
    if (!base->sequence) return dtrain__local_message(comm, work);
    if (base->small) return true;
    if (!work->final) { /* choose the path from what all ranks have shown; all are at stage 1 */
        uint64_t paths = DTRAIN__DIRECT | DTRAIN__READ;
        for (int i = 0; i < comm->size; i++)
            paths &= dtrain__slot_of(comm, i, base->sequence)->paths;
        work->seen = comm->size;
        work->path = paths & DTRAIN__DIRECT ? DTRAIN__DIRECT
                     : paths                ? DTRAIN__READ
                                            : DTRAIN__COPIED;
        work->final =
            work->path == DTRAIN__READ && what->kind == DTRAIN_COLLECTIVE_ALL_REDUCE ? 3 : 2;
        const size_t chunk = dtrain__chunk_count(comm, what);
        if (work->path == DTRAIN__COPIED)
            work->final += (uint32_t)((what->count + chunk - 1) / chunk);
    }
    for (;;) {
        while (work->seen < comm->size &&
               dtrain__reached(comm, base->sequence, work->stage, work->seen))
            work->seen++;
        if (work->seen < comm->size) return false;
        if (work->stage >= work->final) return true;
        const bool computes =
            work->stage == 1 && (kind->reduces || (work->path == DTRAIN__DIRECT && !kind->joins));
        const bool moved = work->path == DTRAIN__COPIED
                               ? base->oldest && dtrain__next_chunk(comm, work)
                           : computes ? dtrain__compute_slice(comm, work)
                                      : dtrain__take_pieces(comm, work);
        if (!moved) return false;
        dtrain__reach(comm, work, work->stage + 1);
    }
}

static bool dtrain__local_lags(const dtrain_comm *comm, const dtrain_transport_work *base, int rank)
{
    const dtrain__local_work *work = (const dtrain__local_work *)base;
    if (!base->sequence) return dtrain__message_stuck(comm, work);
    return !dtrain__reached(comm, base->sequence, work->stage, rank);
}

/* ---- Memory, life -----------------------------------------------------------------------------*/

static dtrain_result dtrain__local_map(dtrain_comm *comm, size_t bytes, void **out)
{
    return dtrain__shared_alloc(comm->world, bytes, out);
}
static void dtrain__local_unmap(dtrain_comm *comm, void *memory, size_t bytes)
{
    (void)bytes;
    dtrain__shared_free(comm->world, memory);
}

/* Free retired parts: those of destroyed communicators that all members have left. */
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

static dtrain_result dtrain__local_make(dtrain_comm *base, int64_t *address)
{
    dtrain__local_comm *comm = (dtrain__local_comm *)base;
    dtrain_world *world = base->world;
    void *part;
    if (!world->control->arenas)
        return dtrain_fail(
            DTRAIN_ERROR_UNSUPPORTED,
            "%d ranks on %d host%s share no memory%s%s%s, and the local communicator needs that; "
            "between hosts give one that crosses them: on GPUs NCCL (comm_ops, dtrain_nccl.h), one "
            "rank on each; on CPUs MPI (mpicc -DDTRAIN_USE_MPI; a guest: dtrain_world_join_mpi)",
            world->size, world->node_count, world->node_count == 1 ? "" : "s",
            world->no_region[0] ? " (" : "", world->no_region, world->no_region[0] ? ")" : "");
    dtrain__sweep_retired(world);
    comm->parts = (dtrain__part **)dtrain__alloc(&world->allocator, (size_t)base->size,
                                                 sizeof *comm->parts, "a table of ranks");
    if (!comm->parts) return DTRAIN_ERROR_MEMORY;
    DTRAIN__TRY(dtrain__shared_alloc(world, sizeof(dtrain__part), &part));
    dtrain__part *own = comm->parts[base->rank] = (dtrain__part *)part;
    own->size = (uint32_t)base->size;
    own->pid = getpid();
    own->proof = &comm->proof;
    own->proof_value = comm->proof = dtrain__now_ns() ^ (uint64_t)(uintptr_t)part;
#ifdef PR_SET_PTRACER /* where yama guards memory, let the launcher's processes read this one's */
    if (!world->guest && getppid() > 1) prctl(PR_SET_PTRACER, (unsigned long)getppid(), 0, 0, 0);
#endif
    *address = (int64_t)(intptr_t)part;
    return DTRAIN_OK;
}

/* Find out, too, whether this rank can read the memory of all: read each rank's proof, and compare.
 * A kernel can forbid it (yama, seccomp), and in another namespace the pid is that of another
 * process. */
static void *dtrain__local_join(dtrain_comm *base, const int64_t *addresses)
{
    dtrain__local_comm *comm = (dtrain__local_comm *)base;
    comm->reads = true;
    for (int i = 0; i < base->size; i++) {
        const dtrain__part *part = comm->parts[i] = (dtrain__part *)(intptr_t)addresses[i];
        uint64_t value = 0;
        comm->reads = comm->reads &&
                      dtrain__read_memory(part->pid, part->proof, &value, sizeof value) &&
                      value == part->proof_value;
    }
    dtrain__store(&comm->parts[base->rank]->reads, (uint32_t)comm->reads);
    return &comm->parts[0]->report;
}

/* Free this rank's private memory. Its part stays until every member has left, because others may
 * still read it. */
static void dtrain__local_release(dtrain_comm *base, bool joined)
{
    dtrain__local_comm *comm = (dtrain__local_comm *)base;
    dtrain_world *world = base->world;
    if (!comm->parts) return;
    dtrain__part *part = comm->parts[base->rank];
    if (joined) {
        part->next = world->retired;
        world->retired = part;
        for (int i = 0; i < base->size; i++) dtrain__fetch_add(&comm->parts[i]->departed, 1u);
        dtrain__sweep_retired(world);
    } else {
        dtrain__shared_free(world, part);
    }
    dtrain__free(&world->allocator, comm->scratch, DTRAIN__SCRATCH_BYTES, 1);
    dtrain__free(&world->allocator, comm->parts, (size_t)base->size, sizeof *comm->parts);
}

static const dtrain_transport_ops dtrain__local_transport = {sizeof(dtrain__local_comm),
                                                             sizeof(dtrain__local_work),
                                                             0,
                                                             dtrain__local_make,
                                                             dtrain__local_join,
                                                             dtrain__local_release,
                                                             dtrain__local_map,
                                                             dtrain__local_unmap,
                                                             dtrain__local_show,
                                                             dtrain__local_heard,
                                                             dtrain__local_move,
                                                             dtrain__local_lags,
                                                             NULL};

DTRAIN__PRIVATE const dtrain_comm_ops *dtrain__local_comm_ops(bool staged)
{
    static const dtrain_comm_ops ops[] = {DTRAIN__ENGINE_OPS("local", &dtrain__local_transport),
                                          DTRAIN__ENGINE_OPS("staged", &dtrain__local_transport)};
    return &ops[staged];
}
