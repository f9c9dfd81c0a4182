/* The local transport: shared memory
 *
 * Each rank owns one "part" of a communicator in shared memory and is the only one to write it:
 *
 *     part of rank r   | report | stage, channels | slot 0 | slot 1 | ... | slot Q-1 |
 *     slot s % Q       | progress = (s, stage) | call and pointers of operation s | payload |
 *
 * An operation is a ladder of stages. "To reach" a stage is to store it in one's slot (release); to
 * go on, a rank looks until all ranks have reached it (acquire). Stage 1 says what is being called;
 * when all are there and agree, one of four paths is taken, the same on every rank:
 *
 *     small    the data came along in the slots: every rank computes its own result, done
 *     direct   all buffers are in shared memory: rank r computes slice r of everybody's result and
 *              reaches stage 2; when all have, done. No copy, no temporary
 *     read     large buffers of the host's own, where the kernel lets ranks read each other's
 *              memory: rank r computes slice r of its own result and reaches stage 2; when all
 *              have, it reads the other slices from the ranks that computed them: stage 3, done
 *     copied   otherwise: chunk c goes into half c % 2 of one's stage, stage c + 2 is reached; when
 *              all have, every rank computes its own result from the stages
 *
 * All of them add in rank order in fp32 and round once, so the bits do not tell which one ran. With
 * emulated links there is one more stage, which a rank reaches when its transfer is due.
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

#define DTRAIN__SLOTS (2 * DTRAIN__WINDOW)
#define DTRAIN__CHUNK_BYTES ((size_t)128 << 10)   /* half a stage: two ranks' stages stay in L2 */
#define DTRAIN__READ_BYTES ((size_t)128 << 10)    /* buffers from this size on are read ... */
#define DTRAIN__SCRATCH_BYTES ((size_t)512 << 10) /* ... in blocks of all ranks that fit here */
#define DTRAIN__CELL_BYTES ((size_t)32 << 10)
#define DTRAIN__CELLS 4u
#define DTRAIN__STAGE_BITS 24 /* progress = sequence << 24 | stage */

/* Written by its rank only; 65 cache lines, so that slots spread over the sets of a cache. */
typedef struct dtrain__slot {
    uint64_t progress; /* atomic; only grows */
    dtrain__shown shown;
    char data[DTRAIN__SMALL_BYTES];
    const char *send;
    char *recv;
    uint64_t direct;   /* the other ranks can reach these buffers */
    uint64_t readable; /* this rank can read everybody's, and they can read these */
} dtrain__slot;

/* Messages of one ordered pair of ranks, cut in cells. head - tail cells are filled. */
typedef struct dtrain__cell {
    dtrain__shown shown; /* of the whole message */
    char line[DTRAIN__CACHE_LINE - sizeof(dtrain__shown)];
    char data[DTRAIN__CELL_BYTES];
} dtrain__cell;

typedef struct dtrain__channel {
    uint64_t head; /* atomic, the sender's */
    uint64_t head_line[7];
    uint64_t tail; /* atomic, the receiver's */
    uint64_t tail_line[7];
    dtrain__cell cells[DTRAIN__CELLS];
} dtrain__channel;

/* What one rank shows the others; all zero is the valid beginning. */
struct dtrain__part {
    dtrain__abort_record report; /* of the first part only: the communicator's failure */
    uint32_t departed;           /* atomic: ranks that have destroyed the communicator ... */
    uint32_t size;               /* ... out of so many */
    char *stage;                 /* 2 chunks, made when first needed */
    int64_t pid;                 /* of its rank, in whose private memory */
    const uint64_t *proof;       /* ... this address holds */
    uint64_t proof_value;        /* ... this number */
    dtrain__part *next;          /* among this rank's retired parts */
    dtrain__channel *channels[DTRAIN_MAX_RANKS]; /* atomic; to each rank, made by the first send */
    dtrain__slot slots[DTRAIN__SLOTS];
};

typedef struct dtrain__local_comm {
    dtrain__engine base;
    dtrain__part **parts; /* (size) */
    char *scratch;        /* made when first needed */
    uint64_t proof;       /* what others read to see that they can */
    bool reads;           /* this rank can read every rank's memory */
} dtrain__local_comm;

typedef enum dtrain__path { DTRAIN__DIRECT, DTRAIN__READ, DTRAIN__COPIED } dtrain__path;

typedef struct dtrain__local_work {
    dtrain__work base;
    uint32_t stage, final; /* reached; final 0: the path is not chosen yet */
    dtrain__path path;
    int seen;     /* ranks below it have reached `stage` */
    size_t moved; /* messages: bytes */
    bool sent;    /* a long message to another node: all of it is in the channel */
} dtrain__local_work;

static dtrain__slot *dtrain__slot_of(const dtrain__engine *base, int rank, uint64_t sequence)
{
    const dtrain__local_comm *comm = (const dtrain__local_comm *)base;
    return &comm->parts[rank]->slots[sequence % DTRAIN__SLOTS];
}

/* ---- The ladder -------------------------------------------------------------------------------*/

static bool dtrain__reached(const dtrain__engine *comm, uint64_t sequence, uint32_t stage, int rank)
{
    const uint64_t goal = sequence << DTRAIN__STAGE_BITS | stage;
    return dtrain__load(&dtrain__slot_of(comm, rank, sequence)->progress) >= goal;
}

static bool dtrain__all_reached(const dtrain__engine *comm, dtrain__local_work *work)
{
    while (work->seen < comm->base.size &&
           dtrain__reached(comm, work->base.sequence, work->stage, work->seen))
        work->seen++;
    return work->seen == comm->base.size;
}

static void dtrain__reach(const dtrain__engine *comm, dtrain__local_work *work, uint32_t stage)
{
    work->stage = stage;
    work->seen = 0;
    comm->base.world->moves++;
    dtrain__store(&dtrain__slot_of(comm, comm->base.rank, work->base.sequence)->progress,
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

/* Say whether the kernel can read these bytes of this rank: not those that a driver has mapped. */
static bool dtrain__is_readable(const void *memory, size_t bytes)
{
    char byte;
    return !bytes || !memory ||
           (dtrain__read_memory(getpid(), memory, &byte, 1) &&
            dtrain__read_memory(getpid(), (const char *)memory + bytes - 1, &byte, 1));
}

/* Read a number at an address that every rank has published, and compare. A kernel can forbid it
 * (yama, seccomp), a rank in another namespace has another process under this number. */
static bool dtrain__reads_all(const dtrain__local_comm *comm)
{
    for (int i = 0; i < comm->base.base.size; i++) {
        const dtrain__part *part = comm->parts[i];
        uint64_t value = 0;
        if (!dtrain__read_memory(part->pid, part->proof, &value, sizeof value) ||
            value != part->proof_value)
            return false;
    }
    return true;
}

/* Take bytes that another rank has. False: that rank has ended, which the wait will report, or the
 * communicator has failed. */
static bool dtrain__fetch(dtrain__engine *comm, int rank, const char *from, char *to, size_t bytes)
{
    comm->base.info.staged_bytes += bytes;
    if (dtrain__read_memory(((dtrain__local_comm *)comm)->parts[rank]->pid, from, to, bytes))
        return true;
    if (errno != ESRCH)
        dtrain__engine_failf(comm, DTRAIN_ERROR_PEER,
                             "rank %d's buffer of %zu bytes cannot be read: %s; was it freed while "
                             "the operation was under way?",
                             comm->base.world_ranks[rank], bytes, strerror(errno));
    return false;
}

static void dtrain__local_show(dtrain__engine *comm, dtrain__work *work)
{
    const dtrain_collective *what = &work->what;
    const dtrain__kind *kind = dtrain__kind_of(what->kind);
    const dtrain_world *world = comm->base.world;
    dtrain__slot *slot = dtrain__slot_of(comm, comm->base.rank, work->sequence);
    (void)dtrain__write_shown(comm, work, &slot->shown);
    slot->send = (const char *)what->send;
    slot->recv = (char *)what->recv;
    /* what other ranks would touch on the direct path: results of a slice are written to all */
    slot->readable = !work->small && ((const dtrain__local_comm *)comm)->reads &&
                     dtrain__send_bytes(what, comm->base.size) >= DTRAIN__READ_BYTES;
    slot->direct =
        !work->small &&
        dtrain__is_shared(world, what->send, dtrain__send_bytes(what, comm->base.size)) &&
        (kind->cuts || kind->joins ||
         (what->kind == DTRAIN_COLLECTIVE_REDUCE && what->root != comm->base.rank) ||
         dtrain__is_shared(world, what->recv, dtrain__recv_bytes(what, comm->base.size)));
    if (slot->readable && !slot->direct)
        slot->readable =
            dtrain__is_readable(what->send, dtrain__send_bytes(what, comm->base.size)) &&
            dtrain__is_readable(what->recv, dtrain__recv_bytes(what, comm->base.size));
    dtrain__reach(comm, (dtrain__local_work *)work, 1);
}

static const dtrain__shown *dtrain__local_heard(const dtrain__engine *comm, uint64_t sequence,
                                                int rank)
{
    return dtrain__reached(comm, sequence, 1, rank) ? &dtrain__slot_of(comm, rank, sequence)->shown
                                                    : NULL;
}

/* ---- The paths --------------------------------------------------------------------------------*/

static void dtrain__direct_path(const dtrain__engine *comm, const dtrain__work *work)
{
    const dtrain_collective *what = &work->what;
    const dtrain__kind *kind = dtrain__kind_of(what->kind);
    const size_t unit = dtrain_dtype_bytes(what->dtype);
    const bool whole = kind->cuts || kind->joins; /* all of this rank's own result, or a slice */
    const char *in[DTRAIN_MAX_RANKS];
    char *out[DTRAIN_MAX_RANKS];
    size_t first, length;
    int outs = 0;
    dtrain__slice(what, comm->base.size, comm->base.rank, &first, &length);
    if (!kind->cuts && kind->joins) first = 0; /* all-gather: of what each one gives */
    for (int i = 0; i < comm->base.size; i++) {
        const dtrain__slot *slot = dtrain__slot_of(comm, i, work->sequence);
        in[i] = slot->send + first * unit;
        if (!whole && dtrain__gets(what, i)) out[outs++] = slot->recv + first * unit;
    }
    if (whole) dtrain__pull(&comm->base, what, in, 0, length);
    else if (kind->reduces) dtrain__combine(what, in, comm->base.size, out, outs, length);
    else dtrain__combine(what, in + what->root, 1, out, outs, length);
}

/* The read path, first half of a sum: compute slice `rank` of this rank's own result (the root of a
 * reduce computes everything) from blocks of the others' parts. A block of all of them stays in a
 * cache. An all-reduce in place overwrites a slice that no other rank reads. */
static bool dtrain__read_sum(dtrain__engine *comm, const dtrain__work *work)
{
    dtrain__local_comm *local = (dtrain__local_comm *)comm;
    const dtrain_collective *what = &work->what;
    const size_t unit = dtrain_dtype_bytes(what->dtype);
    const size_t block = DTRAIN__SCRATCH_BYTES / (size_t)comm->base.size / DTRAIN__CACHE_LINE *
                         DTRAIN__CACHE_LINE / unit;
    const char *in[DTRAIN_MAX_RANKS];
    size_t first, length;
    dtrain__slice(what, comm->base.size, comm->base.rank, &first, &length);
    if (what->kind == DTRAIN_COLLECTIVE_REDUCE) {
        first = 0;
        length = dtrain__gets(what, comm->base.rank) ? what->count : 0;
    }
    if (!length) return true; /* and recv may be NULL */
    if (!local->scratch) {
        local->scratch = (char *)dtrain__alloc(&comm->base.world->allocator, DTRAIN__SCRATCH_BYTES,
                                               1, "blocks of other ranks");
        if (!local->scratch) {
            (void)dtrain__engine_fail(&comm->base, DTRAIN_ERROR_MEMORY, dtrain_last_error());
            return false;
        }
    }
    char *out = (char *)what->recv + (dtrain__kind_of(what->kind)->cuts ? 0 : first * unit);
    for (size_t at = 0, count; at < length; at += count, out += count * unit) {
        count = length - at < block ? length - at : block;
        for (int i = 0; i < comm->base.size; i++) {
            const char *part = dtrain__slot_of(comm, i, work->sequence)->send + (first + at) * unit;
            char *copy = local->scratch + (size_t)i * block * unit;
            in[i] = i == comm->base.rank ? part : copy;
            if (i != comm->base.rank && !dtrain__fetch(comm, i, part, copy, count * unit))
                return false;
        }
        dtrain__combine(what, in, comm->base.size, &out, 1, count);
    }
    return true;
}

/* The read path, what is not added: read the pieces that others have to where they belong, the next
 * rank's first, so that not all read the same rank. */
static bool dtrain__read_pieces(dtrain__engine *comm, const dtrain__work *work)
{
    const dtrain_collective *what = &work->what;
    const dtrain__kind *kind = dtrain__kind_of(what->kind);
    const size_t unit = dtrain_dtype_bytes(what->dtype);
    const int size = comm->base.size, own = comm->base.rank;
    if (!dtrain__gets(what, own)) return true;
    for (int turn = 1; turn <= size; turn++) {
        const int i = (own + turn) % size;
        const dtrain__slot *slot = dtrain__slot_of(comm, i, work->sequence);
        size_t first, length;
        if (!dtrain__gives(what, i)) continue;
        dtrain__slice(what, size, i, &first, &length);
        if (kind->rooted) { /* broadcast */
            first = 0;
            length = what->count;
        }
        const char *from = kind->reduces ? slot->recv + first * unit
                           : kind->cuts  ? slot->send + (size_t)own * what->count * unit
                                         : slot->send;
        char *to = (char *)what->recv + first * unit;
        if (i != own) {
            if (!dtrain__fetch(comm, i, from, to, length * unit)) return false;
        } else if (from != to) {
            memcpy(to, from, length * unit);
        }
    }
    return true;
}

/* The copied path:
 *
 *     chunk c    copy in -> reach c + 2 -> all there -> pull -> copy c + 1 in -> reach c + 3
 *
 * Chunk c + 1 goes into the half that held chunk c - 1. All ranks have pulled that one: they
 * reached stage c + 2, which comes after their pull of c - 1. The last stage, chunks + 2, says that
 * all have pulled everything and the stages are free for the next operation, so only the oldest one
 * in flight uses them. */

static size_t dtrain__chunk_count(const dtrain__engine *comm, const dtrain_collective *what)
{
    const size_t pieces = dtrain__kind_of(what->kind)->cuts ? (size_t)comm->base.size : 1;
    return DTRAIN__CHUNK_BYTES / dtrain_dtype_bytes(what->dtype) / pieces;
}

/* Copy chunk c of this rank's input into its stage: one piece, or one for each rank's slice. */
static dtrain_result dtrain__chunk_in(dtrain__engine *comm, const dtrain_collective *what, size_t c)
{
    dtrain__part *part = ((dtrain__local_comm *)comm)->parts[comm->base.rank];
    const size_t unit = dtrain_dtype_bytes(what->dtype), chunk = dtrain__chunk_count(comm, what);
    const size_t rest = what->count - c * chunk, length = rest < chunk ? rest : chunk;
    const size_t pieces = dtrain__kind_of(what->kind)->cuts ? (size_t)comm->base.size : 1;
    if (!dtrain__gives(what, comm->base.rank)) return DTRAIN_OK;
    if (!part->stage) {
        void *stage;
        if (dtrain__shared_alloc(comm->base.world, 2 * DTRAIN__CHUNK_BYTES, &stage) != DTRAIN_OK)
            return dtrain__engine_fail(&comm->base, DTRAIN_ERROR_MEMORY, dtrain_last_error());
        part->stage = (char *)stage;
    }
    char *half = part->stage + c % 2 * DTRAIN__CHUNK_BYTES;
    for (size_t i = 0; i < pieces; i++)
        memcpy(half + i * chunk * unit,
               (const char *)what->send + (i * what->count + c * chunk) * unit, length * unit);
    comm->base.info.staged_bytes += pieces * length * unit;
    return DTRAIN_OK;
}

/* Compute chunk c of this rank's result from everybody's stage. */
static void dtrain__chunk_out(dtrain__engine *comm, const dtrain_collective *what, size_t c)
{
    const char *in[DTRAIN_MAX_RANKS];
    const size_t unit = dtrain_dtype_bytes(what->dtype), chunk = dtrain__chunk_count(comm, what);
    const size_t rest = what->count - c * chunk, length = rest < chunk ? rest : chunk;
    const size_t slice = dtrain__kind_of(what->kind)->cuts ? (size_t)comm->base.rank * chunk : 0;
    for (int i = 0; i < comm->base.size; i++) {
        /* NULL on ranks that give nothing */
        const char *stage = ((dtrain__local_comm *)comm)->parts[i]->stage;
        in[i] = stage ? stage + c % 2 * DTRAIN__CHUNK_BYTES + slice * unit : NULL;
    }
    dtrain__pull(&comm->base, what, in, c * chunk, length);
}

/* Choose the path from what all ranks have shown. All are at stage 1. */
static void dtrain__choose_path(const dtrain__engine *comm, dtrain__local_work *work)
{
    const dtrain_collective *what = &work->base.what;
    bool direct = true, readable = true;
    for (int i = 0; i < comm->base.size; i++) {
        const dtrain__slot *slot = dtrain__slot_of(comm, i, work->base.sequence);
        direct = direct && slot->direct;
        readable = readable && slot->readable;
    }
    work->seen = comm->base.size;
    work->path = direct ? DTRAIN__DIRECT : readable ? DTRAIN__READ : DTRAIN__COPIED;
    work->final = work->path == DTRAIN__READ && what->kind == DTRAIN_COLLECTIVE_ALL_REDUCE ? 3 : 2;
    if (work->path == DTRAIN__COPIED) {
        const size_t chunk = dtrain__chunk_count(comm, what);
        work->final += (uint32_t)((what->count + chunk - 1) / chunk);
    }
}

/* Do what follows the stage that all ranks have reached; false: it cannot be done now. */
static bool dtrain__climb(dtrain__engine *comm, dtrain__local_work *work, bool oldest)
{
    const dtrain_collective *what = &work->base.what;
    if (work->path == DTRAIN__DIRECT) {
        dtrain__direct_path(comm, &work->base);
        return true;
    }
    if (work->path == DTRAIN__READ)
        return work->stage == 1 && dtrain__kind_of(what->kind)->reduces
                   ? dtrain__read_sum(comm, &work->base)
                   : dtrain__read_pieces(comm, &work->base);
    if (!oldest) return false;
    if (work->stage > 1) dtrain__chunk_out(comm, what, work->stage - 2);
    return work->stage + 1 >= work->final ||
           dtrain__chunk_in(comm, what, work->stage - 1) == DTRAIN_OK;
}

static bool dtrain__local_move(dtrain__engine *comm, dtrain__work *base, bool oldest)
{
    dtrain__local_work *work = (dtrain__local_work *)base;
    if (base->small) return true;
    if (!work->final) dtrain__choose_path(comm, work);
    while (dtrain__all_reached(comm, work)) {
        if (work->stage >= work->final) return true;
        if (!dtrain__climb(comm, work, oldest)) return false;
        dtrain__reach(comm, work, work->stage + 1);
    }
    return false;
}

/* One stage more; a small operation was at its last one when it was shown. */
static bool dtrain__local_meet(dtrain__engine *comm, dtrain__work *base)
{
    dtrain__local_work *work = (dtrain__local_work *)base;
    const uint32_t last = base->small ? 2 : work->final + 1;
    if (work->stage < last) dtrain__reach(comm, work, last);
    return dtrain__all_reached(comm, work);
}

/* ---- Messages ---------------------------------------------------------------------------------*/

static dtrain__channel *dtrain__channel_of(const dtrain__engine *comm,
                                           const dtrain_collective *what)
{
    const int from = what->kind == DTRAIN_COLLECTIVE_SEND ? comm->base.rank : what->root;
    const int to = what->kind == DTRAIN_COLLECTIVE_SEND ? what->root : comm->base.rank;
    return dtrain__load(&((const dtrain__local_comm *)comm)->parts[from]->channels[to]);
}

/* The other side has to do something first. */
static bool dtrain__message_stuck(const dtrain__engine *comm, const dtrain__local_work *work)
{
    const dtrain_collective *what = &work->base.what;
    dtrain__channel *channel = dtrain__channel_of(comm, what);
    if (!channel) return what->kind == DTRAIN_COLLECTIVE_RECV;
    const uint64_t filled = dtrain__load(&channel->head) - dtrain__load(&channel->tail);
    if (work->sent) return filled != 0;
    return filled == (what->kind == DTRAIN_COLLECTIVE_SEND ? DTRAIN__CELLS : 0u);
}

static dtrain_result dtrain__channel_make(dtrain__engine *comm, int to)
{
    void *memory;
    if (dtrain__shared_alloc(comm->base.world, sizeof(dtrain__channel), &memory) != DTRAIN_OK)
        return dtrain__engine_fail(&comm->base, DTRAIN_ERROR_MEMORY, dtrain_last_error());
    dtrain__store(&((dtrain__local_comm *)comm)->parts[comm->base.rank]->channels[to],
                  (dtrain__channel *)memory);
    return DTRAIN_OK;
}

/* One cell further; an empty message is one empty cell. Returns false when it has to wait for an
 * emulated link, or has failed. */
static bool dtrain__message_cell(dtrain__engine *comm, dtrain__local_work *work)
{
    const dtrain_collective *what = &work->base.what;
    dtrain__channel *channel = dtrain__channel_of(comm, what);
    const bool sends = what->kind == DTRAIN_COLLECTIVE_SEND;
    uint64_t *mine = sends ? &channel->head : &channel->tail;
    dtrain__cell *cell = &channel->cells[*mine % DTRAIN__CELLS];
    const size_t bytes = what->count * dtrain_dtype_bytes(what->dtype), rest = bytes - work->moved;
    const size_t length = rest < DTRAIN__CELL_BYTES ? rest : DTRAIN__CELL_BYTES;
    if (sends) {
        cell->shown = work->base.shown;
        if (length) memcpy(cell->data, (const char *)what->send + work->moved, length);
    } else {
        if (!dtrain__message_due(comm, &work->base, cell->shown.started_ns) && length == rest)
            return false;
        if (!dtrain__message_agrees(comm, &work->base, &cell->shown)) return false;
        if (length) memcpy((char *)what->recv + work->moved, cell->data, length);
    }
    dtrain__store(mine, *mine + 1);
    comm->base.info.staged_bytes += length;
    comm->base.world->moves++;
    work->moved += length;
    work->sent = sends && work->moved == bytes && bytes > DTRAIN__CELLS * DTRAIN__CELL_BYTES &&
                 dtrain__message_crosses(comm, &work->base);
    return true;
}

static bool dtrain__local_message(dtrain__engine *comm, dtrain__work *base)
{
    dtrain__local_work *work = (dtrain__local_work *)base;
    const dtrain_collective *what = &base->what;
    const size_t bytes = what->count * dtrain_dtype_bytes(what->dtype);
    if (what->kind == DTRAIN_COLLECTIVE_SEND && !dtrain__channel_of(comm, what) &&
        dtrain__channel_make(comm, what->root) != DTRAIN_OK)
        return false;
    while (!dtrain__message_stuck(comm, work)) {
        if (work->sent) return true;
        if (!dtrain__message_cell(comm, work)) return false;
        if (work->moved == bytes && !work->sent) return true;
    }
    return false;
}

static bool dtrain__local_lags(const dtrain__engine *comm, const dtrain__work *base, int rank)
{
    const dtrain__local_work *work = (const dtrain__local_work *)base;
    if (!base->sequence) return dtrain__message_stuck(comm, work);
    return !dtrain__reached(comm, base->sequence, work->stage, rank);
}

/* ---- Memory, life -----------------------------------------------------------------------------*/

static dtrain_result dtrain__local_map(dtrain__engine *comm, size_t bytes, void **out)
{
    return dtrain__shared_alloc(comm->base.world, bytes, out);
}
static void dtrain__local_unmap(dtrain__engine *comm, void *memory, size_t bytes)
{
    (void)bytes;
    dtrain__shared_free(comm->base.world, memory);
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

/* The address of a half is that of its part. */
static dtrain_result dtrain__local_make(dtrain__engine *base, int64_t *address)
{
    dtrain__local_comm *comm = (dtrain__local_comm *)base;
    dtrain_world *world = base->base.world;
    void *part;
    dtrain__sweep_retired(world);
    comm->parts = (dtrain__part **)dtrain__alloc(&world->allocator, (size_t)base->base.size,
                                                 sizeof *comm->parts, "a table of ranks");
    if (!comm->parts) return DTRAIN_ERROR_MEMORY;
    DTRAIN__TRY(dtrain__shared_alloc(world, sizeof(dtrain__part), &part));
    dtrain__part *own = comm->parts[base->base.rank] = (dtrain__part *)part;
    own->size = (uint32_t)base->base.size;
    own->pid = getpid();
    own->proof = &comm->proof;
    own->proof_value = comm->proof = dtrain__now_ns() ^ (uint64_t)(uintptr_t)part;
#ifdef PR_SET_PTRACER /* where yama guards memory: the launcher's processes may read this one's */
    if (getppid() > 1) prctl(PR_SET_PTRACER, (unsigned long)getppid(), 0, 0, 0);
#endif
    *address = (int64_t)(intptr_t)part;
    return DTRAIN_OK;
}

static void dtrain__local_join(dtrain__engine *base, const int64_t *addresses)
{
    dtrain__local_comm *comm = (dtrain__local_comm *)base;
    for (int i = 0; i < base->base.size; i++)
        comm->parts[i] = (dtrain__part *)(intptr_t)addresses[i];
    comm->reads = dtrain__reads_all(comm);
    base->report = &comm->parts[0]->report;
}

/* Free private memory; a part that others know is left to those who may still read it. */
static void dtrain__local_release(dtrain__engine *base)
{
    dtrain__local_comm *comm = (dtrain__local_comm *)base;
    dtrain_world *world = base->base.world;
    if (!comm->parts) return;
    dtrain__part *part = comm->parts[base->base.rank];
    if (base->report) {
        part->next = world->retired;
        world->retired = part;
        for (int i = 0; i < base->base.size; i++) dtrain__fetch_add(&comm->parts[i]->departed, 1u);
        dtrain__sweep_retired(world);
    } else {
        dtrain__shared_free(world, part);
    }
    dtrain__free(&world->allocator, comm->scratch, DTRAIN__SCRATCH_BYTES, 1);
    dtrain__free(&world->allocator, comm->parts, (size_t)base->base.size, sizeof *comm->parts);
}

static const dtrain__transport dtrain__local_transport = {sizeof(dtrain__local_comm),
                                                          sizeof(dtrain__local_work),
                                                          0,
                                                          dtrain__local_show,
                                                          dtrain__local_heard,
                                                          dtrain__local_move,
                                                          dtrain__local_message,
                                                          dtrain__local_lags,
                                                          dtrain__local_map,
                                                          dtrain__local_unmap,
                                                          dtrain__local_make,
                                                          dtrain__local_join,
                                                          dtrain__local_release,
                                                          NULL,
                                                          dtrain__local_meet,
                                                          NULL};

static dtrain_result dtrain__local_create(dtrain_world *world, dtrain_comm **out);
static const dtrain_comm_ops dtrain__local_ops = DTRAIN__ENGINE_OPS("local", dtrain__local_create);
static const dtrain_comm_ops dtrain__staged_ops =
    DTRAIN__ENGINE_OPS("staged", dtrain__local_create);
DTRAIN__PRIVATE const dtrain_comm_ops *dtrain__local_comm_ops(void) { return &dtrain__local_ops; }

static dtrain_result dtrain__local_create(dtrain_world *world, dtrain_comm **out)
{
    if (!world->control->arenas)
        return dtrain_fail(
            DTRAIN_ERROR_UNSUPPORTED,
            "dtrain_launch: %d ranks on %d host%s share no memory%s%s%s, and the local "
            "communicator "
            "needs that; between hosts give one that crosses them: on GPUs NCCL (comm_ops, "
            "dtrain_nccl.h), one rank on each; on CPUs MPI (mpicc -DDTRAIN_USE_MPI)",
            world->size, world->node_count, world->node_count == 1 ? "" : "s",
            world->no_region[0] ? " (" : "", world->no_region, world->no_region[0] ? ")" : "");
    return dtrain__engine_create(
        world, world->device->ops->host_memory ? &dtrain__local_ops : &dtrain__staged_ops,
        &dtrain__local_transport, out);
}
