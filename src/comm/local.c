/* The local transport: shared memory
 *
 * Each rank owns one "part" of a communicator in shared memory, and only this rank writes to it:
 *
 *     part of rank r   | report | stage, channels | slot 0 | slot 1 | ... | slot Q-1 |
 *     slot s % Q       | progress = (s, stage) | call and buffers of operation s | small data |
 *
 * An operation has numbered stages. A rank that has done its work of a stage "reaches" the stage:
 * it stores the number in its slot (release). It continues when all ranks have reached the stage
 * (acquire). At stage 1 a rank shows its call. When all ranks have shown equal calls, all of them
 * take the same path:
 *
 *     small    the calls carry the data: every rank computes its own result, done
 *     direct   all buffers are in shared memory: rank r computes slice r of every rank's result, or
 *              copies its own result from the other ranks' buffers: stage 2, done. It needs no
 *              temporary memory
 *     copied   otherwise: data for other ranks goes through the stage buffers in chunks, one stage
 *              per step, see dtrain__next_step
 *
 * All paths add in rank order in fp32 and round once, so their results have the same bits.
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
#define DTRAIN__STAGE_BYTES ((size_t)2 << 20) /* below 1 MiB they stay in the readers' L2 */
#define DTRAIN__TRIED_BYTES ((size_t)16 << 10)
#define DTRAIN__FAR_BYTES ((size_t)4 << 20) /* larger slices do not stay in caches */
#define DTRAIN__CELL_BYTES ((size_t)32 << 10)
#define DTRAIN__CELLS 4u
#define DTRAIN__STAGE_BITS 24 /* progress = sequence << 24 | stage */

/* A call of one rank, written only by this rank. It takes 65 cache lines, so that slots spread over
 * the sets of a cache. */
typedef struct dtrain__slot {
    uint64_t progress; /* atomic; only grows */
    dtrain_call shown;
    char data[DTRAIN_SMALL_BYTES];
    const char *send;
    char *recv;
    bool direct; /* true if these buffers allow the direct path */
} dtrain__slot;

/* A channel carries the messages of one ordered pair of ranks; head - tail cells are filled. A
 * message is cut into cells. A longer message than all cells takes only one cell, with its address,
 * if the receiver can read it there: it then arrives while the sender computes. */
typedef struct dtrain__cell {
    dtrain_call shown;   /* of the whole message */
    const char *address; /* of the message; NULL if the cell has the data */
    uint64_t path;       /* dtrain__path to that address */
    char padding[DTRAIN__CACHE_LINE - sizeof(dtrain_call) - 16];
    char data[DTRAIN__CELL_BYTES];
} dtrain__cell;

typedef struct dtrain__channel {
    uint64_t head; /* atomic, written by the sender */
    uint64_t head_padding[7];
    uint64_t tail; /* atomic, written by the receiver */
    uint64_t tail_padding[7];
    dtrain__cell cells[DTRAIN__CELLS];
} dtrain__channel;

/* Shared memory that one rank writes and the other ranks read. It begins as zeros. */
struct dtrain__part {
    dtrain__abort_record report; /* the communicator's failure, in the first rank's part */
    uint32_t departed, size;     /* departed: atomic, ranks that destroyed the communicator */
    char *stage;                 /* buffer of the copied path, made when first needed */
    int64_t pid;                 /* process of this rank */
    const uint64_t *proof;       /* a number in this rank's private memory, */
    uint64_t proof_value;        /* and its value: a rank that reads it can read the memory */
    uint32_t reads;              /* atomic: 1 if this rank can read every rank's memory */
    dtrain__part *next;          /* among this rank's retired parts */
    dtrain__channel *channels[DTRAIN_MAX_RANKS]; /* atomic; to each rank, made by the first send */
    dtrain__slot slots[DTRAIN__SLOTS];
};

typedef struct dtrain__local_comm {
    dtrain_comm base;
    dtrain__part **parts; /* (size) */
    uint64_t proof;       /* see dtrain__part */
    uint32_t far_places;  /* number of next places written past the cache, see fill_place */
    size_t stage_end;     /* copied path: end of the last operation's last chunk */
} dtrain__local_comm;

typedef enum dtrain__path { DTRAIN__COPIED = 0, DTRAIN__READ = 1, DTRAIN__DIRECT = 2 } dtrain__path;

typedef struct dtrain__local_work {
    dtrain_transport_work base;
    uint32_t stage, final; /* stage: reached by this rank; final 0: the path is not chosen yet */
    dtrain__path path;
    int seen;             /* all ranks below this rank have reached `stage` */
    bool sliced;          /* copied path: ranks add up slices and exchange the sums */
    size_t bytes;         /* of a rank's slice if the call defines slices, else of the buffer */
    size_t place, places; /* bytes of a place, places of a chunk */
    size_t chunks, first; /* first: number of chunks before chunk 0 in the stage buffer */
    size_t fit;           /* number of chunks that fit into the stage buffer */
    size_t moved;         /* messages: bytes that this side has sent or received */
    uint64_t end;         /* a posted send: the head after its cells */
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

#ifndef __cplusplus /* hidden if system headers came before dtrain.h */
ssize_t process_vm_readv(pid_t pid, const struct iovec *to, unsigned long to_count,
                         const struct iovec *from, unsigned long from_count, unsigned long flags);
#endif

/* Copy memory of another rank's process; false and errno if the kernel refuses. */
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

/* Return true if the kernel can read these bytes of this rank; it cannot read a driver's memory. */
static bool dtrain__is_readable(const void *memory, size_t bytes)
{
    char byte;
    return !bytes || !memory ||
           (dtrain__read_memory(getpid(), memory, &byte, 1) &&
            dtrain__read_memory(getpid(), (const char *)memory + bytes - 1, &byte, 1));
}

/* Read another rank's bytes. Return false if that rank has ended, which the wait will report, or if
 * the communicator has failed. */
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

/* Show a call, and whether this rank's buffers allow the direct path: other ranks read `send`, and
 * write to `recv` if each rank computes a slice of the result. */
static void dtrain__local_show(dtrain_comm *comm, dtrain_transport_work *work)
{
    const dtrain_collective *what = &work->what;
    const dtrain__kind *kind = dtrain__kind_of(what->kind);
    dtrain__slot *slot = dtrain__slot_of(comm, comm->rank, work->sequence);
    slot->shown = work->call;
    if (work->small && work->send_bytes) { /* nobody else reads this rank's own slice */
        const size_t slice = kind->cuts ? work->send_bytes / (size_t)comm->size : 0;
        const size_t first = (size_t)comm->rank * slice, next = first + slice;
        memcpy(slot->data, what->send, first);
        memcpy(slot->data + next, (const char *)what->send + next, work->send_bytes - next);
    }
    slot->send = (const char *)what->send;
    slot->recv = (char *)what->recv;
    slot->direct = false;
    if (!work->small) {
        const size_t send_bytes = dtrain__send_bytes(what, comm->size);
        const size_t recv_bytes = dtrain__recv_bytes(what, comm->size);
        const bool written = !kind->cuts && !kind->joins && dtrain__gets(what, comm->rank);
        slot->direct = dtrain__is_shared(comm->world, what->send, send_bytes) &&
                       (!written || dtrain__is_shared(comm->world, what->recv, recv_bytes));
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

/* The direct path. For a sum or a broadcast, compute this rank's slice of every rank's result; in
 * place, an all-reduce overwrites a slice that no other rank reads. Otherwise copy this rank's
 * result from the other ranks' buffers, beginning with the next rank: so ranks do not all read from
 * the same rank. */
static void dtrain__make_direct(const dtrain_comm *comm, const dtrain__local_work *work)
{
    const dtrain_collective *what = &work->base.what;
    const dtrain__kind *kind = dtrain__kind_of(what->kind);
    const int size = comm->size, own = comm->rank;
    const size_t unit = dtrain_dtype_bytes(what->dtype);
    const char *in[DTRAIN_MAX_RANKS];
    char *out[DTRAIN_MAX_RANKS];
    size_t first, length;
    int outs = 0;
    dtrain__slice(what, size, own, &first, &length);
    for (int turn = 1; turn <= size; turn++) {
        const int i = (own + turn) % size;
        const dtrain__slot *slot = dtrain__slot_of(comm, i, work->base.sequence);
        dtrain__transfer piece;
        in[i] = slot->send + first * unit;
        if (!kind->joins && (kind->cuts ? i == own : dtrain__gets(what, i)))
            out[outs++] = slot->recv + (kind->cuts ? 0 : first * unit);
        if (!kind->joins || !dtrain__transfer_of(what, size, !kind->cuts, i, own, &piece)) continue;
        const char *from = slot->send + piece.source;
        char *to = (char *)what->recv + piece.target;
        if (from != to) dtrain__copy_lines(to, from, piece.bytes, false);
    }
    if (length && outs)
        dtrain__combine(what, kind->reduces ? in : in + what->root, kind->reduces ? size : 1, out,
                        outs, length);
}

/* The copied path moves an operation through the stage buffers in chunks. One step is one stage:
 *
 *     step s    chunk s        copy this rank's input for other ranks into the stage buffer
 *               chunk s - 1    add up this rank's slice, or take the other ranks' data
 *               chunk s - 2    all-reduce and reduce: take the slices that other ranks added up
 *
 * A chunk has one place, or one place for each rank's slice. A rank does not copy its own slice in:
 * the sum of an all-reduce or reduce goes to that place. In step s other ranks can still read
 * chunks s - 1 and s - 2, but no older chunk: all ranks have ended step s - 1. At the end of an
 * operation no rank waits: a rank can still read the last chunk when another rank fills the first
 * chunk of the next operation, so that chunk has another place. The second chunk is filled when all
 * ranks have taken step 0 of the next operation, because only the oldest operation in flight takes
 * steps. */

/* Cut an operation into chunks of nearly equal size. The stage buffer is a ring that has room for
 * four of the largest chunks. The first chunk lies after the chunks of the last operation or at the
 * beginning, and so not on that operation's last chunk. */
static void dtrain__cut_chunks(dtrain__local_comm *comm, dtrain__local_work *work)
{
    const dtrain_collective *what = &work->base.what;
    const dtrain__kind *kind = dtrain__kind_of(what->kind);
    const size_t size = (size_t)comm->base.size, line = DTRAIN__CACHE_LINE;
    work->sliced = kind->reduces && !kind->cuts;
    work->places = kind->reduces || kind->cuts ? size : 1;
    work->bytes = what->count * dtrain_dtype_bytes(what->dtype);
    const size_t most = DTRAIN__STAGE_BYTES / 4 / work->places / line * line;
    const size_t part = work->bytes / (work->sliced ? size : 1) + line;
    work->place = dtrain__round_up(part / (part / most + 1), line);
    work->chunks = (work->bytes - 1) / (work->place * (work->sliced ? size : 1)) + 1;
    const size_t chunk = work->place * work->places;
    work->fit = DTRAIN__STAGE_BYTES / chunk;
    work->first = (comm->stage_end + chunk - 1) / chunk % work->fit;
    comm->stage_end = ((work->first + work->chunks - 1) % work->fit + 1) * chunk;
    work->final = (uint32_t)work->chunks + (work->sliced ? 3 : 2);
}

/* Return place j of chunk c in the buffer of a rank; NULL if that rank sends nothing. */
static char *dtrain__place_of(const dtrain_comm *comm, const dtrain__local_work *work, int rank,
                              size_t c, int j)
{
    char *stage = dtrain__part_at(comm, rank)->stage;
    const size_t place = (work->first + c) % work->fit * work->places;
    return stage ? stage + (place + (work->places > 1 ? (size_t)j : 0)) * work->place : NULL;
}

/* Find the offset of slice j of chunk c in a program's buffer; return its bytes. */
static size_t dtrain__chunk_slice(const dtrain_comm *comm, const dtrain__local_work *work, size_t c,
                                  int j, size_t *at)
{
    *at = (work->sliced ? c * (size_t)comm->size + (size_t)j : c) * work->place;
    if (*at > work->bytes) *at = work->bytes;
    return work->bytes - *at < work->place ? work->bytes - *at : work->place;
}

/* Copy into a place whose cache lines are in the cache of the core that last read them. Cores that
 * share a cache get the lines back at once. Between two parts of a chip this runs at 2.3 GB/s
 * (Zen 4). There a write past the cache is ten times as fast, but readers then find the data in
 * memory, which takes twice as long as a shared cache. So the first bytes of a place are timed.
 * After a slow place, 64 places are written past the cache without a trial. A place that is too
 * short for a trial is always written past the cache. */
static void dtrain__fill_place(dtrain_comm *comm, char *place, const char *from, size_t bytes)
{
    dtrain__local_comm *local = (dtrain__local_comm *)comm;
    size_t tried = 0;
    if (local->far_places > 0) {
        local->far_places--;
    } else if (bytes >= DTRAIN__TRIED_BYTES) {
        const uint64_t begin = dtrain__now_ns();
        tried = DTRAIN__TRIED_BYTES;
        dtrain__copy_lines(place, from, tried, false);
        if ((dtrain__now_ns() - begin) * 5 > tried) local->far_places = 64; /* below 5 GB/s */
    }
    dtrain__copy_lines(place + tried, from + tried, bytes - tried, !tried || local->far_places > 0);
}

/* Add up this rank's slice of a chunk, or take this rank's data from the chunk. */
static void dtrain__use_chunk(dtrain_comm *comm, const dtrain__local_work *work, size_t c)
{
    const dtrain_collective *what = &work->base.what;
    const dtrain__kind *kind = dtrain__kind_of(what->kind);
    const bool gets = dtrain__gets(what, comm->rank);
    const int own = comm->rank;
    const char *in[DTRAIN_MAX_RANKS];
    size_t at;
    const size_t bytes = dtrain__chunk_slice(comm, work, c, own, &at);
    for (int i = 0; i < comm->size; i++) {
        const size_t slice = (size_t)i * work->bytes;
        in[i] = i == own ? (const char *)what->send + at + (kind->cuts ? slice : 0)
                         : dtrain__place_of(comm, work, i, c, own);
        if (kind->reduces || !gets || (kind->rooted && i != what->root)) continue;
        char *to = (char *)what->recv + at + (kind->joins ? slice : 0);
        if (in[i] != to) dtrain__copy_lines(to, in[i], bytes, work->bytes >= DTRAIN__FAR_BYTES);
    }
    if (!kind->reduces || !bytes) return;
    char *place = dtrain__place_of(comm, work, own, c, own);
    char *sum = gets ? (char *)what->recv + at : place;
    dtrain__combine(what, in, comm->size, &sum, 1, bytes / dtrain_dtype_bytes(what->dtype));
    if (work->sliced && !kind->rooted) dtrain__fill_place(comm, place, sum, bytes);
}

/* Take the next step of the copied path. */
static bool dtrain__next_step(dtrain_comm *comm, const dtrain__local_work *work)
{
    const dtrain_collective *what = &work->base.what;
    const bool cuts = dtrain__kind_of(what->kind)->cuts, gives = dtrain__gives(what, comm->rank);
    const size_t step = work->stage - 1;
    const int own = comm->rank;
    dtrain__part *part = dtrain__part_at(comm, own);
    size_t at, bytes;
    void *stage;
    if (gives && !part->stage) {
        if (dtrain__shared_alloc(comm->world, DTRAIN__STAGE_BYTES, &stage) != DTRAIN_OK)
            return dtrain__engine_ok(comm, DTRAIN_ERROR_MEMORY);
        part->stage = (char *)stage;
    }
    for (int j = 0; gives && step < work->chunks && j < (int)work->places; j++) {
        if (work->places > 1 && j == own) continue;
        bytes = dtrain__chunk_slice(comm, work, step, j, &at);
        dtrain__fill_place(comm, dtrain__place_of(comm, work, own, step, j),
                           (const char *)what->send + at + (cuts ? (size_t)j * work->bytes : 0),
                           bytes);
        comm->info.staged_bytes += bytes;
    }
    if (step >= 1 && step <= work->chunks) dtrain__use_chunk(comm, work, step - 1);
    for (int i = 0; step >= 2 && work->sliced && dtrain__gets(what, own) && i < comm->size; i++) {
        bytes = dtrain__chunk_slice(comm, work, step - 2, i, &at);
        if (i != own)
            dtrain__copy_lines((char *)what->recv + at,
                               dtrain__place_of(comm, work, i, step - 2, i), bytes, false);
    }
    return true;
}

/* ---- Messages ---------------------------------------------------------------------------------*/

static dtrain__channel *dtrain__channel_of(const dtrain_comm *comm, const dtrain_collective *what)
{
    const int from = what->kind == DTRAIN_COLLECTIVE_SEND ? comm->rank : what->root;
    const int to = what->kind == DTRAIN_COLLECTIVE_SEND ? what->root : comm->rank;
    return dtrain__load(&dtrain__part_at(comm, from)->channels[to]);
}

/* Return true if the other side has to act first. */
static bool dtrain__message_stuck(const dtrain_comm *comm, const dtrain__local_work *work)
{
    const bool sends = work->base.what.kind == DTRAIN_COLLECTIVE_SEND;
    const dtrain__channel *channel = dtrain__channel_of(comm, &work->base.what);
    if (!channel) return !sends;
    const uint64_t tail = dtrain__load(&channel->tail),
                   filled = dtrain__load(&channel->head) - tail;
    return work->base.posted ? tail < work->end : filled == (sends ? DTRAIN__CELLS : 0u);
}

/* Fill or empty cells until the other side has to act. An empty message takes one empty cell. */
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

        /* The sender chooses the path of a message that is longer than the channel. */
        if (sends && work->moved == 0 && bytes > DTRAIN__CELLS * DTRAIN__CELL_BYTES) {
            if (dtrain__is_shared(comm->world, what->send, bytes)) work->path = DTRAIN__DIRECT;
            else if (dtrain__load(&dtrain__part_at(comm, what->root)->reads) &&
                     dtrain__is_readable(what->send, bytes))
                work->path = DTRAIN__READ;
        }
        if (sends) {
            cell->shown = work->base.call;
            cell->path = (uint64_t)work->path;
            cell->address = work->path == DTRAIN__COPIED ? NULL : (const char *)what->send;
        }

        if (cell->address) length = bytes;
        else comm->info.staged_bytes += length;
        if (sends && !cell->address && length)
            memcpy(cell->data, (const char *)what->send + work->moved, length);
        if (!sends && cell->path != DTRAIN__READ && length)
            dtrain__copy_lines((char *)what->recv + work->moved,
                               cell->address ? cell->address : cell->data, length, false);
        if (!sends && cell->path == DTRAIN__READ &&
            !dtrain__fetch(comm, what->root, cell->address, (char *)what->recv, length))
            return false;
        work->moved += length;
        dtrain__store(mine, *mine + 1);
        ++*comm->moves;
        work->end = *mine;
        work->base.posted = sends && work->moved == bytes && cell->address;
        if (work->moved == bytes && !work->base.posted) return true;
    }
    return false;
}

static bool dtrain__local_move(dtrain_comm *comm, dtrain_transport_work *base)
{
    dtrain__local_work *work = (dtrain__local_work *)base;
    if (!base->sequence) return dtrain__local_message(comm, work);
    if (base->small) return true;
    if (!work->final) { /* choose the path: all ranks have shown their calls and are at stage 1 */
        work->seen = comm->size;
        work->path = DTRAIN__DIRECT;
        work->final = 2;
        for (int i = 0; i < comm->size; i++)
            if (!dtrain__slot_of(comm, i, base->sequence)->direct) work->path = DTRAIN__COPIED;
        if (work->path == DTRAIN__COPIED) dtrain__cut_chunks((dtrain__local_comm *)comm, work);
    }
    for (;;) {
        while (work->seen < comm->size &&
               dtrain__reached(comm, base->sequence, work->stage, work->seen))
            work->seen++;
        if (work->seen < comm->size) return false;
        if (work->stage >= work->final) return true;
        if (work->path == DTRAIN__DIRECT) dtrain__make_direct(comm, work);
        else if (!base->oldest || !dtrain__next_step(comm, work)) return false;
        dtrain__reach(comm, work, work->stage + 1);
        if (work->path == DTRAIN__COPIED && work->stage == work->final) return true;
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

/* Free the parts of destroyed communicators that all members have left. */
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
#ifdef PR_SET_PTRACER /* with yama: let the launcher's processes read this process's memory */
    if (!world->guest && getppid() > 1) prctl(PR_SET_PTRACER, (unsigned long)getppid(), 0, 0, 0);
#endif
    *address = (int64_t)(intptr_t)part;
    return DTRAIN_OK;
}

/* Store the parts of all ranks, and find out whether this rank can read the memory of all ranks:
 * read each rank's proof, and compare. A kernel can forbid it (yama, seccomp), and in another
 * namespace the pid can belong to another process. */
static void *dtrain__local_join(dtrain_comm *base, const int64_t *addresses)
{
    dtrain__local_comm *comm = (dtrain__local_comm *)base;
    bool reads = true;
    for (int i = 0; i < base->size; i++) {
        const dtrain__part *part = comm->parts[i] = (dtrain__part *)(intptr_t)addresses[i];
        uint64_t value = 0;
        reads = reads && dtrain__read_memory(part->pid, part->proof, &value, sizeof value) &&
                value == part->proof_value;
    }
    dtrain__store(&comm->parts[base->rank]->reads, (uint32_t)reads);
    return &comm->parts[0]->report;
}

/* Free this rank's private memory. Its part stays until every member has left, because other ranks
 * can still read it. */
static void dtrain__local_release(dtrain_comm *base, bool joined)
{
    dtrain__local_comm *comm = (dtrain__local_comm *)base;
    dtrain_world *world = base->world;
    if (!comm->parts) return;
    dtrain__part *part = comm->parts[base->rank];
    if (!joined) dtrain__shared_free(world, part);
    else {
        part->next = world->retired;
        world->retired = part;
        for (int i = 0; i < base->size; i++) dtrain__fetch_add(&comm->parts[i]->departed, 1u);
        dtrain__sweep_retired(world);
    }
    dtrain__free(&world->allocator, comm->parts, (size_t)base->size, sizeof *comm->parts);
}

/* clang-format off */
static const dtrain_transport_ops dtrain__local_transport = {
    sizeof(dtrain__local_comm), sizeof(dtrain__local_work), 0,
    dtrain__local_make, dtrain__local_join, dtrain__local_release, dtrain__local_map,
    dtrain__local_unmap, dtrain__local_show, dtrain__local_heard, dtrain__local_move,
    dtrain__local_lags, NULL};
/* clang-format on */

DTRAIN__PRIVATE const dtrain_comm_ops *dtrain__local_comm_ops(bool staged)
{
    static const dtrain_comm_ops ops[] = {DTRAIN__ENGINE_OPS("local", &dtrain__local_transport),
                                          DTRAIN__ENGINE_OPS("staged", &dtrain__local_transport)};
    return &ops[staged];
}
