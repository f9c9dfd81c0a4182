/* nccl_mock.c: an NCCL for tests. Ranks are processes or threads of one machine; a communicator is a piece of
 * anonymous shared memory ("region") that the first rank makes and the others open through /proc, so that
 * nothing has a name and nothing can be left behind:
 *
 *     region | header | member 0 | ... | member n-1 | channel 0->0 | 0->1 | ... |
 *
 * Operations are steps in a stream of the device. As in NCCL,
 *     - a collective waits for all ranks, a send for its receive, and what is behind them in the stream too;
 *     - nothing compares what the ranks ask for: ranks that disagree wait for ever;
 *     - calls on a non-blocking communicator may answer ncclInProgress, and nothing is in the stream until
 *       ncclCommGetAsyncError has stopped saying so;
 *     - of a group, a second send to a rank starts when the first one and the receive beside it are done, and so do
 *       receives: NCCL puts the first send to and the first receive from every rank into one batch, the second ones
 *       into the next, and a channel takes one batch after the other. Whether batches to other ranks share a channel
 *       depends on the machine: here all do;
 *     - only ncclCommAbort ends an operation that does not complete;
 *     - a recorded operation holds a reference on its communicator until its graph is destroyed and no launch of
 *       it runs any more: ncclCommAbort, and the progress of ncclCommFinalize, wait for all of them;
 *     - ncclMemFree does not wait for the device.
 * Unlike NCCL it notices most misuse: see misuse(). */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif
#include "nccl_mock.h"
#include "dtrain.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { REGION_RANKS = 16, MEMBER_BYTES = 1 << 21, CHANNEL_BYTES = 1 << 16, MOST_IN_GROUP = 256 };

nccl_mock_controls nccl_mock;
nccl_mock_counts nccl_mock_count;

typedef enum { ALL_REDUCE = 1, REDUCE_SCATTER, ALL_GATHER, BROADCAST, REDUCE, SEND, RECV } kind_id;

/* ---- shared memory ---- */

typedef struct member {
    uint64_t posted,
        taken;         /* atomic: collectives whose input is in data; that have read all inputs */
    uint64_t print;    /* of the posted one: kind, count, type, operation, root */
    uint64_t recorded; /* of it: see operation */
    uint64_t split_posted[2], split_made[2];
    int split_color[2], split_key[2];
    ncclUniqueId split_id[2];
    char data[MEMBER_BYTES];
} member;

typedef struct channel {
    uint64_t posted, taken; /* atomic: messages */
    uint64_t print;
    char data[CHANNEL_BYTES];
} channel;

typedef struct region {
    int ranks;
    int joined; /* atomic */
    member members[REGION_RANKS];
    channel channels[REGION_RANKS][REGION_RANKS]; /* [from][to] */
} region;

typedef struct id_text {
    uint64_t magic;
    long pid;
    int fd;
} id_text;

/* ---- a communicator ---- */

typedef struct operation {
    ncclComm_t comm;
    kind_id kind;
    const void *send;
    void *recv;
    size_t count;
    ncclDataType_t type;
    int op, root; /* root or peer */
    cudaStream_t stream;
    bool begun, posted, done;
    int waited;
    int batch; /* in its group */
    uint64_t number;
    uint64_t
        recorded; /* 0: in no graph; else which of the communicator's recorded launches, from 1 */
    bool hangs;
} operation;

typedef struct group {
    int count;
    operation operations[MOST_IN_GROUP];
} group;

typedef enum { IDLE, JOINING, LAUNCHING, SPLITTING, FINALIZING } busy_id;

struct ncclComm {
    uint64_t magic;
    int rank, ranks, fd, device;
    region *shared;
    ncclComm_t next; /* of the splits made of this one, for abort: none share resources here */
    busy_id busy;
    int polls;
    uint32_t aborted; /* atomic: another thread sets it */
    int references;   /* atomic: recorded launches that graphs hold */
    uint64_t recorded;
    ncclResult_t async; /* ncclSuccess, or the error */
    bool finalized, blocking;
    int registered;
    uint64_t collectives, sent[REGION_RANKS], received[REGION_RANKS], splits;
    group pending; /* LAUNCHING */
    int split_color, split_key;
    ncclComm_t *split_out;
    int split_stage;
};

enum { ALIVE = 0x6e63636c, DEAD = 0x64656164 };

static __thread group open_group;
static __thread int group_depth;
static __thread char last_error[200];
static uint32_t operation_count; /* launched by this process */

/* Ranks may be threads, and an abort always is in one. */
static void count(int *what, int by) { __atomic_add_fetch(what, by, __ATOMIC_RELAXED); }

static ncclResult_t misuse(const char *what)
{
    count(&nccl_mock_count.misuses, 1);
    fprintf(stderr, "nccl_mock: %s\n", what);
    snprintf(last_error, sizeof last_error, "%s", what);
    return ncclInvalidUsage;
}

static ncclResult_t complain(ncclResult_t result, const char *what)
{
    snprintf(last_error, sizeof last_error, "%s", what);
    return result;
}

static uint64_t load(const uint64_t *value) { return __atomic_load_n(value, __ATOMIC_ACQUIRE); }
static void store(uint64_t *to, uint64_t value) { __atomic_store_n(to, value, __ATOMIC_RELEASE); }

/* ---- versions, errors, ids ---- */

ncclResult_t ncclGetVersion(int *version)
{
    *version = nccl_mock.version ? nccl_mock.version : NCCL_VERSION_CODE;
    return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t result)
{
    switch (result) {
    case ncclSuccess: return "no error";
    case ncclUnhandledCudaError: return "unhandled cuda error";
    case ncclSystemError: return "unhandled system error";
    case ncclInternalError: return "internal error";
    case ncclInvalidArgument: return "invalid argument";
    case ncclInvalidUsage: return "invalid usage";
    case ncclRemoteError: return "remote process exited or there was a network error";
    case ncclInProgress: return "NCCL operation in progress";
    default: return "unknown result code";
    }
}

const char *ncclGetLastError(ncclComm_t comm)
{
    (void)comm;
    return last_error;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id)
{
    id_text text;
    if (nccl_mock.no_id) return complain(ncclSystemError, "Bootstrap : no socket interface found");
    memset(id, 0, sizeof *id);
    memset(&text, 0, sizeof text);
    text.magic = ALIVE;
    text.pid = (long)getpid();
    text.fd = memfd_create("nccl_mock", MFD_CLOEXEC);
    if (text.fd < 0 || ftruncate(text.fd, (off_t)sizeof(region)) != 0) return ncclSystemError;
    memcpy(id->internal, &text, sizeof text);
    return ncclSuccess;
}

/* ---- arithmetic: the obvious loops ---- */

static size_t type_bytes(ncclDataType_t type)
{
    switch (type) {
    case ncclInt64:
    case ncclFloat64: return 8;
    case ncclInt32:
    case ncclFloat32: return 4;
    case ncclFloat16:
    case ncclBfloat16: return 2;
    default: return 0;
    }
}

static float get_float(const void *from, size_t i, ncclDataType_t type)
{
    if (type == ncclFloat32) return ((const float *)from)[i];
    if (type == ncclBfloat16)
        return dtrain_half_to_f32(DTRAIN_DTYPE_BF16, ((const uint16_t *)from)[i]);
    return dtrain_half_to_f32(DTRAIN_DTYPE_F16, ((const uint16_t *)from)[i]);
}

static void put_float(void *to, size_t i, ncclDataType_t type, float value)
{
    if (type == ncclFloat32) ((float *)to)[i] = value;
    else if (type == ncclBfloat16)
        ((uint16_t *)to)[i] = dtrain_half_from_f32(DTRAIN_DTYPE_BF16, value);
    else ((uint16_t *)to)[i] = dtrain_half_from_f32(DTRAIN_DTYPE_F16, value);
}

static int64_t get_integer(const void *from, size_t i, ncclDataType_t type)
{
    return type == ncclInt32 ? ((const int32_t *)from)[i] : ((const int64_t *)from)[i];
}

static double join(int op, double a, double b)
{
    if (op == ncclSum) return a + b;
    if (op == ncclProd) return a * b;
    return (op == ncclMin) == (b < a) ? b : a;
}

/* to[0..count) = op over the members' inputs from element `first` on. */
static void reduce(const operation *o, size_t first, size_t count)
{
    const region *shared = o->comm->shared;
    const bool integer = o->type == ncclInt32 || o->type == ncclInt64;
    for (size_t i = 0; i < count && o->type == ncclFloat64; i++) {
        double sum = ((const double *)shared->members[0].data)[first + i];
        for (int r = 1; r < shared->ranks; r++)
            sum = join((int)o->op, sum, ((const double *)shared->members[r].data)[first + i]);
        ((double *)o->recv)[i] = sum;
    }
    for (size_t i = 0; i < count && o->type != ncclFloat64; i++) {
        float sum = 0;
        int64_t whole = 0;
        for (int r = 0; r < shared->ranks; r++) {
            const void *data = shared->members[r].data;
            const float x = integer ? 0 : get_float(data, first + i, o->type);
            const int64_t n = integer ? get_integer(data, first + i, o->type) : 0;
            switch (r ? o->op : -1) {
            case -1: sum = x, whole = n; break;
            case ncclSum: sum += x, whole = (int64_t)((uint64_t)whole + (uint64_t)n); break;
            case ncclProd: sum *= x, whole = (int64_t)((uint64_t)whole * (uint64_t)n); break;
            case ncclMin: sum = x < sum ? x : sum, whole = n < whole ? n : whole; break;
            default: sum = x > sum ? x : sum, whole = n > whole ? n : whole; break;
            }
        }
        if (!integer) put_float(o->recv, i, o->type, sum);
        else if (o->type == ncclInt32) ((int32_t *)o->recv)[i] = (int32_t)whole;
        else ((int64_t *)o->recv)[i] = whole;
    }
}

static void finish_collective(const operation *o)
{
    const region *shared = o->comm->shared;
    const size_t bytes = o->count * type_bytes(o->type);
    switch (o->kind) {
    case ALL_REDUCE: reduce(o, 0, o->count); break;
    case REDUCE_SCATTER: reduce(o, o->count * (size_t)o->comm->rank, o->count); break;
    case REDUCE:
        if (o->root == o->comm->rank) reduce(o, 0, o->count);
        break;
    case BROADCAST: memcpy(o->recv, shared->members[o->root].data, bytes); break;
    default:
        for (int r = 0; r < shared->ranks; r++)
            memcpy((char *)o->recv + (size_t)r * bytes, shared->members[r].data, bytes);
    }
}

/* ---- operations as steps ---- */

/* Ranks that ask for different things have different prints and never meet. */
static uint64_t print_of(const operation *o)
{
    uint64_t print = (uint64_t)(o->kind == RECV ? SEND : o->kind);
    print = print * 31 + o->count;
    print = print * 31 + (uint64_t)o->type;
    if (o->kind == SEND || o->kind == RECV) return print;
    return (print * 31 + (uint64_t)o->op) * 31 + (uint64_t)o->root;
}

static size_t sent_bytes(const operation *o)
{
    const size_t bytes = o->count * type_bytes(o->type);
    if (o->kind == RECV || (o->kind == BROADCAST && o->root != o->comm->rank)) return 0;
    return o->kind == REDUCE_SCATTER ? bytes * (size_t)o->comm->ranks : bytes;
}

static bool step_collective(operation *o)
{
    region *shared = o->comm->shared;
    member *mine = &shared->members[o->comm->rank];
    if (!o->posted) {
        for (int r = 0; r < shared->ranks; r++) /* nobody may still read the last input */
            if (load(&shared->members[r].taken) + 1 < o->number) return false;
        memcpy(mine->data, o->send, sent_bytes(o));
        mine->print = print_of(o);
        mine->recorded = o->recorded;
        store(&mine->posted, o->number);
        o->posted = true;
    }
    for (int r = 0; r < shared->ranks; r++) {
        if (load(&shared->members[r].posted) < o->number) return false;
        if (shared->members[r].print != mine->print) return false;
    }
    for (int r = 0; r < shared->ranks; r++)
        if (shared->members[r].recorded != mine->recorded)
            misuse("a collective was recorded anew, or run, by some ranks and replayed by others");
    finish_collective(o);
    store(&mine->taken, o->number);
    return true;
}

/* A send is done when it has been received: NCCL's larger ones are, and programs must not rely on less. */
static bool step_transfer(operation *o)
{
    region *shared = o->comm->shared;
    const size_t bytes = o->count * type_bytes(o->type);
    channel *way = o->kind == SEND ? &shared->channels[o->comm->rank][o->root]
                                   : &shared->channels[o->root][o->comm->rank];
    if (o->kind == RECV) {
        if (load(&way->posted) < o->number || way->print != print_of(o)) return false;
        memcpy(o->recv, way->data, bytes);
        store(&way->taken, o->number);
        return true;
    }
    if (!o->posted) {
        if (load(&way->taken) + 1 < o->number) return false;
        memcpy(way->data, o->send, bytes);
        way->print = print_of(o);
        store(&way->posted, o->number);
        o->posted = true;
    }
    return load(&way->taken) >= o->number;
}

static void begin(operation *o)
{
    const uint32_t at = __atomic_add_fetch(&operation_count, 1, __ATOMIC_RELAXED);
    ncclComm_t comm = o->comm;
    o->begun = true;
    if (o->kind == SEND) o->number = ++comm->sent[o->root];
    else if (o->kind == RECV) o->number = ++comm->received[o->root];
    else o->number = ++comm->collectives;
    o->hangs = (int)at == nccl_mock.hang_at || (int)at == nccl_mock.error_at;
    if ((int)at == nccl_mock.error_at) comm->async = nccl_mock.error;
    if ((int)at == nccl_mock.die_at) raise(SIGKILL);
}

static bool step_operation(operation *o)
{
    if (__atomic_load_n(&o->comm->aborted, __ATOMIC_ACQUIRE)) return true;
    if (!o->begun) begin(o);
    if (o->hangs || o->waited++ < nccl_mock.delay_steps) return false;
    return o->kind == SEND || o->kind == RECV ? step_transfer(o) : step_collective(o);
}

static bool step_group(void *state)
{
    group *all = (group *)state;
    bool done = true;
    for (int batch = 0, found = 1; found && done; batch++) {
        found = 0;
        for (int i = 0; i < all->count; i++) {
            operation *o = &all->operations[i];
            if (o->batch != batch) continue;
            if (!o->done) o->done = step_operation(o);
            done = done && o->done;
            found++;
        }
    }
    return done;
}

/* The n-th send to a rank and the n-th receive from one are in batch n. */
static void set_batches(group *all)
{
    for (int i = 0; i < all->count; i++) {
        operation *o = &all->operations[i];
        o->batch = 0;
        for (int j = 0; j < i && (o->kind == SEND || o->kind == RECV); j++)
            o->batch += all->operations[j].kind == o->kind && all->operations[j].root == o->root;
    }
}

static size_t group_bytes(const group *all)
{
    return offsetof(group, operations) + (size_t)all->count * sizeof all->operations[0];
}

static void drop_reference(void *comm)
{
    __atomic_sub_fetch(&((ncclComm_t)comm)->references, 1, __ATOMIC_ACQ_REL);
}

/* The device goes on by itself meanwhile. */
static bool is_referenced(ncclComm_t comm)
{
    if (__atomic_load_n(&comm->references, __ATOMIC_ACQUIRE) == 0) return false;
    nccl_mock_advance();
    return true;
}

static void launch(const group *all)
{
    const cudaStream_t stream = all->operations[0].stream;
    ncclComm_t comm = all->operations[0].comm;
    group own;
    memcpy(&own, all, group_bytes(all));
    set_batches(&own);
    count(&nccl_mock_count.launches, all->count);
    count(&nccl_mock_count.groups, 1);
    __atomic_add_fetch(&comm->references, 1, __ATOMIC_ACQ_REL);
    if (nccl_mock_retain(stream, drop_reference, comm)) {
        comm->recorded++;
        for (int i = 0; i < own.count; i++) own.operations[i].recorded = comm->recorded;
    } else drop_reference(comm);
    if (!nccl_mock_enqueue(stream, step_group, &own, group_bytes(&own)))
        misuse("the stream does not exist");
}

/* ---- calls on communicators ---- */

/* A call is made on the device that the communicator was made on: it would set up another one otherwise. */
static void check_device(ncclComm_t comm, const char *call)
{
    int device = -1;
    char text[160];
    if (cudaGetDevice(&device) == cudaSuccess && device == comm->device) return;
    snprintf(text, sizeof text, "%s: the thread is on device %d, the communicator on %d", call,
             device, comm->device);
    misuse(text);
}

static ncclResult_t check(ncclComm_t comm, const char *call)
{
    char text[160];
    if (!comm || comm->magic != ALIVE) {
        snprintf(text, sizeof text, "%s: the communicator is NULL or has been destroyed", call);
        return misuse(text);
    }
    check_device(comm, call);
    if (comm->busy != IDLE) {
        snprintf(text, sizeof text, "%s: the communicator is still in progress", call);
        return misuse(text);
    }
    if (comm->finalized) {
        snprintf(text, sizeof text, "%s: the communicator has been finalized", call);
        return misuse(text);
    }
    return comm->async != ncclSuccess ? comm->async : ncclSuccess;
}

static ncclResult_t submit(ncclComm_t comm, const group *all)
{
    if (!nccl_mock.progress_polls || comm->blocking) {
        launch(all);
        return ncclSuccess;
    }
    memcpy(&comm->pending, all, group_bytes(all));
    comm->busy = LAUNCHING;
    comm->polls = nccl_mock.progress_polls;
    return ncclInProgress;
}

static ncclResult_t operate(operation o, const char *call)
{
    static int calls;
    group one;
    size_t in, out = o.count * type_bytes(o.type);
    const ncclResult_t usable = check(o.comm, call);
    if (usable != ncclSuccess) return usable;
    if (__atomic_add_fetch(&calls, 1, __ATOMIC_RELAXED) == nccl_mock.refuse_at)
        return complain(nccl_mock.error, "refused by the test");
    in = sent_bytes(&o);
    if (o.kind == ALL_GATHER) out *= (size_t)o.comm->ranks;
    if (o.kind == SEND || (o.kind == REDUCE && o.root != o.comm->rank)) out = 0;
    if (!type_bytes(o.type) || !o.count || o.root >= o.comm->ranks || in > MEMBER_BYTES)
        return complain(ncclInvalidArgument, "type, count or root");
    if ((o.kind == SEND || o.kind == RECV) && o.count * type_bytes(o.type) > CHANNEL_BYTES)
        return complain(ncclInvalidArgument, "message too long");
    if ((in && !nccl_mock_is_device_memory(o.send, in)) ||
        (out && !nccl_mock_is_device_memory(o.recv, out)))
        return misuse("a buffer is not memory of the device");
    if (!o.stream) return misuse("the compute stream is not for communication");
    one.count = 1;
    one.operations[0] = o;
    if (!group_depth) return submit(o.comm, &one);
    if (open_group.count == MOST_IN_GROUP) return misuse("too many operations in a group");
    open_group.operations[open_group.count++] = o;
    return ncclSuccess;
}

static operation make(kind_id kind, const void *send, void *recv, size_t count, ncclDataType_t type,
                      int op, int root, ncclComm_t comm, cudaStream_t stream)
{
    operation o;
    memset(&o, 0, sizeof o);
    o.kind = kind;
    o.send = send;
    o.recv = recv;
    o.count = count;
    o.type = type;
    o.op = op;
    o.root = root;
    o.comm = comm;
    o.stream = stream;
    return o;
}

ncclResult_t ncclAllReduce(const void *send, void *recv, size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream)
{
    return operate(make(ALL_REDUCE, send, recv, count, type, (int)op, 0, comm, stream),
                   "ncclAllReduce");
}
ncclResult_t ncclReduceScatter(const void *send, void *recv, size_t recvcount, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream)
{
    return operate(make(REDUCE_SCATTER, send, recv, recvcount, type, (int)op, 0, comm, stream),
                   "ncclReduceScatter");
}
ncclResult_t ncclAllGather(const void *send, void *recv, size_t sendcount, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream)
{
    return operate(make(ALL_GATHER, send, recv, sendcount, type, 0, 0, comm, stream),
                   "ncclAllGather");
}
ncclResult_t ncclBroadcast(const void *send, void *recv, size_t count, ncclDataType_t type,
                           int root, ncclComm_t comm, cudaStream_t stream)
{
    return operate(make(BROADCAST, send, recv, count, type, 0, root, comm, stream),
                   "ncclBroadcast");
}
ncclResult_t ncclReduce(const void *send, void *recv, size_t count, ncclDataType_t type,
                        ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream)
{
    return operate(make(REDUCE, send, recv, count, type, (int)op, root, comm, stream),
                   "ncclReduce");
}
ncclResult_t ncclSend(const void *send, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream)
{
    return operate(make(SEND, send, NULL, count, type, 0, peer, comm, stream), "ncclSend");
}
ncclResult_t ncclRecv(void *recv, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream)
{
    return operate(make(RECV, NULL, recv, count, type, 0, peer, comm, stream), "ncclRecv");
}

ncclResult_t ncclGroupStart(void)
{
    group_depth++;
    return ncclSuccess;
}

/* One launch for each communicator in the group. */
ncclResult_t ncclGroupEnd(void)
{
    ncclResult_t result = ncclSuccess;
    if (!group_depth) return misuse("ncclGroupEnd without a start");
    if (--group_depth) return ncclSuccess;
    for (int i = 0; i < open_group.count; i++) {
        ncclComm_t comm = open_group.operations[i].comm;
        group part;
        if (!comm) continue;
        part.count = 0;
        for (int j = i; j < open_group.count; j++) {
            if (open_group.operations[j].comm != comm) continue;
            part.operations[part.count++] = open_group.operations[j];
            open_group.operations[j].comm = NULL;
        }
        if (submit(comm, &part) == ncclInProgress) result = ncclInProgress;
    }
    open_group.count = 0;
    return result;
}

/* ---- creation ---- */

ncclResult_t ncclCommInitRankConfig(ncclComm_t *out, int nranks, ncclUniqueId id, int rank,
                                    ncclConfig_t *config)
{
    id_text text;
    char path[64];
    ncclComm_t comm;
    memcpy(&text, id.internal, sizeof text);
    *out = NULL;
    if (!config || config->magic != 0xcafebeef || config->blocking != 0 ||
        config->version != NCCL_VERSION_CODE)
        return misuse("ncclCommInitRankConfig: config is not initialised, or blocking is not 0");
    if (text.magic != ALIVE || rank < 0 || rank >= nranks || nranks > REGION_RANKS)
        return complain(ncclInvalidArgument, "ncclCommInitRankConfig: bad id or rank");
    comm = (ncclComm_t)calloc(1, sizeof *comm);
    if (!comm) return ncclSystemError;
    snprintf(path, sizeof path, "/proc/%ld/fd/%d", text.pid, text.fd);
    comm->fd = rank == 0 ? text.fd : open(path, O_RDWR | O_CLOEXEC);
    if (comm->fd >= 0)
        comm->shared =
            (region *)mmap(NULL, sizeof(region), PROT_READ | PROT_WRITE, MAP_SHARED, comm->fd, 0);
    if (comm->fd < 0 || comm->shared == MAP_FAILED) {
        free(comm);
        return complain(ncclSystemError, "the rank that made the id is gone");
    }
    if (rank != 0) close(comm->fd);
    comm->magic = ALIVE;
    comm->rank = rank;
    comm->ranks = nranks;
    comm->shared->ranks = nranks;
    cudaGetDevice(&comm->device);
    comm->busy = JOINING;
    comm->polls = nccl_mock.progress_polls;
    if (!nccl_mock.no_join) __atomic_add_fetch(&comm->shared->joined, 1, __ATOMIC_ACQ_REL);
    count(&nccl_mock_count.comms, 1);
    *out = comm;
    return ncclInProgress;
}

/* A communicator as most hosts make theirs: calls on it return when they have taken effect. */
static ncclResult_t block(ncclComm_t comm, ncclResult_t result)
{
    const struct timespec moment = {0, 100000};
    while (result == ncclInProgress) {
        const ncclResult_t asked = ncclCommGetAsyncError(comm, &result);
        if (asked != ncclSuccess) return asked;
        if (result == ncclInProgress) nanosleep(&moment, NULL);
    }
    return result;
}

ncclResult_t ncclCommInitRank(ncclComm_t *comm, int nranks, ncclUniqueId id, int rank)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    const ncclResult_t made = ncclCommInitRankConfig(comm, nranks, id, rank, &config);
    if (*comm) (*comm)->blocking = true;
    return block(*comm, made);
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int *size)
{
    *size = comm->ranks;
    return comm->magic == ALIVE ? ncclSuccess : misuse("ncclCommCount: no such communicator");
}
ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *device)
{
    *device = comm->device;
    return comm->magic == ALIVE ? ncclSuccess : misuse("ncclCommCuDevice: no such communicator");
}
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank)
{
    *rank = comm->rank;
    return comm->magic == ALIVE ? ncclSuccess : misuse("ncclCommUserRank: no such communicator");
}

#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 18, 1)
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *newcomm,
                           ncclConfig_t *config)
{
    const ncclResult_t usable = check(comm, "ncclCommSplit");
    if (usable != ncclSuccess) return usable;
    if (config ? config->blocking != 0 || config->splitShare != 0 : comm->blocking)
        return misuse("ncclCommSplit: a child that blocks, or shares with its parent");
    if (color < 0 && color != NCCL_SPLIT_NOCOLOR) return ncclInvalidArgument;
    count(&nccl_mock_count.native_splits, 1);
    comm->busy = SPLITTING;
    comm->polls = nccl_mock.progress_polls;
    comm->split_stage = 0;
    comm->split_color = color;
    comm->split_key = key;
    comm->split_out = newcomm;
    comm->splits++;
    return comm->blocking ? block(comm, ncclInProgress) : ncclInProgress;
}

/* Two stages: all post color and key; the first rank of a color posts an id. *newcomm is written at the very
 * end, as NCCL does. */
static void poll_split(ncclComm_t comm)
{
    region *shared = comm->shared;
    const size_t half = comm->splits % 2;
    member *mine = &shared->members[comm->rank];
    int first = -1, rank = 0, ranks = 0;
    if (comm->split_stage == 0) {
        mine->split_color[half] = comm->split_color;
        mine->split_key[half] = comm->split_key;
        store(&mine->split_posted[half], comm->splits);
        comm->split_stage = 1;
    }
    for (int r = 0; r < shared->ranks; r++)
        if (load(&shared->members[r].split_posted[half]) < comm->splits) return;
    for (int r = 0; r < shared->ranks; r++) {
        const member *other = &shared->members[r];
        const int key = other->split_key[half];
        if (other->split_color[half] != comm->split_color) continue;
        ranks++;
        if (key < comm->split_key || (key == comm->split_key && r < comm->rank)) rank++;
        if (first < 0 || key < shared->members[first].split_key[half]) first = r;
    }
    if (comm->split_color < 0) {
        comm->busy = IDLE;
        return;
    }
    if (first == comm->rank && comm->split_stage == 1) {
        ncclGetUniqueId(&mine->split_id[half]);
        store(&mine->split_made[half], comm->splits);
        comm->split_stage = 2;
    }
    if (load(&shared->members[first].split_made[half]) < comm->splits) return;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    const ncclResult_t made = ncclCommInitRankConfig(
        comm->split_out, ranks, shared->members[first].split_id[half], rank, &config);
    comm->busy = IDLE;
    if (made != ncclInProgress) comm->async = made;
}
#else
static void poll_split(ncclComm_t comm) { comm->busy = IDLE; }
#endif

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error)
{
    if (!comm || comm->magic != ALIVE) return misuse("ncclCommGetAsyncError: no such communicator");
    check_device(comm, "ncclCommGetAsyncError");
    const bool waits = comm->polls > 0 && comm->polls--;
    if (!waits && comm->busy == JOINING &&
        __atomic_load_n(&comm->shared->joined, __ATOMIC_ACQUIRE) >= comm->ranks) {
        comm->busy = IDLE;
        if (comm->rank == 0) close(comm->fd); /* all have it open */
        comm->fd = -1;
    }
    if (!waits && comm->busy == LAUNCHING) {
        comm->busy = IDLE;
        launch(&comm->pending);
    }
    if (!waits && comm->busy == SPLITTING) poll_split(comm);
    if (!waits && comm->busy == FINALIZING && !nccl_mock.stuck_finalize && !is_referenced(comm)) {
        comm->busy = IDLE;
        comm->finalized = true;
    }
    *error = comm->async != ncclSuccess ? comm->async
             : comm->busy != IDLE       ? ncclInProgress
                                        : ncclSuccess;
    return ncclSuccess;
}

/* ---- the end ---- */

ncclResult_t ncclCommFinalize(ncclComm_t comm)
{
    const ncclResult_t usable = check(comm, "ncclCommFinalize");
    if (usable != ncclSuccess) return usable;
    comm->busy = FINALIZING;
    comm->polls = nccl_mock.progress_polls;
    count(&nccl_mock_count.finalized, 1);
    return ncclInProgress;
}

/* The struct is never freed: a stream may still hold operations of it, which see that it was aborted. */
static void let_go(ncclComm_t comm)
{
    __atomic_store_n(&comm->aborted, 1u, __ATOMIC_RELEASE);
    if (comm->busy == JOINING && comm->rank == 0) close(comm->fd);
    comm->magic = DEAD;
    count(&nccl_mock_count.comms, -1);
    count(&nccl_mock_count.registrations, -comm->registered);
}

static ncclComm_t graveyard; /* keeps them reachable for leak checkers */
static pthread_mutex_t graveyard_lock = PTHREAD_MUTEX_INITIALIZER;

static void bury(ncclComm_t comm)
{
    pthread_mutex_lock(&graveyard_lock);
    let_go(comm);
    comm->next = graveyard;
    graveyard = comm;
    pthread_mutex_unlock(&graveyard_lock);
}

ncclResult_t ncclCommDestroy(ncclComm_t comm)
{
    if (!comm || comm->magic != ALIVE) return misuse("ncclCommDestroy: no such communicator");
    check_device(comm, "ncclCommDestroy");
    if (!comm->finalized && !comm->blocking)
        return misuse("ncclCommDestroy before ncclCommFinalize has settled");
    if (comm->registered) misuse("ncclCommDestroy with registered memory");
    munmap(comm->shared, sizeof(region));
    bury(comm);
    return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm)
{
    const struct timespec minute = {60, 0}, moment = {0, 100000};
    if (!comm || comm->magic != ALIVE) return misuse("ncclCommAbort: no such communicator");
    check_device(comm, "ncclCommAbort");
    if (nccl_mock.stuck_abort) nanosleep(&minute, NULL);
    __atomic_store_n(&comm->aborted, 1u, __ATOMIC_RELEASE);
    while (is_referenced(comm)) nanosleep(&moment, NULL);
    count(&nccl_mock_count.aborts, 1);
    bury(comm);
    return ncclSuccess;
}

/* ---- memory ---- */

#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 19, 1)
ncclResult_t ncclMemAlloc(void **memory, size_t bytes)
{
    *memory = nccl_mock.no_memory ? NULL : nccl_mock_device_alloc(bytes);
    if (!*memory) return complain(ncclUnhandledCudaError, "out of memory");
    count(&nccl_mock_count.allocations, 1);
    return ncclSuccess;
}

ncclResult_t ncclMemFree(void *memory)
{
    if (!nccl_mock_is_idle()) misuse("ncclMemFree, which does not wait, while work is queued");
    nccl_mock_device_free(memory);
    count(&nccl_mock_count.allocations, -1);
    return ncclSuccess;
}

ncclResult_t ncclCommRegister(const ncclComm_t comm, void *memory, size_t bytes, void **handle)
{
    const ncclResult_t usable = check(comm, "ncclCommRegister");
    if (usable != ncclSuccess) return usable;
    if (!nccl_mock_is_device_memory(memory, bytes))
        return misuse("ncclCommRegister: not memory of the device");
    *handle = memory;
    comm->registered++;
    count(&nccl_mock_count.registrations, 1);
    return ncclSuccess;
}

ncclResult_t ncclCommDeregister(const ncclComm_t comm, void *handle)
{
    const ncclResult_t usable = check(comm, "ncclCommDeregister");
    if (usable != ncclSuccess) return usable;
    if (!handle) return misuse("ncclCommDeregister: no such handle");
    comm->registered--;
    count(&nccl_mock_count.registrations, -1);
    return ncclSuccess;
}
#endif
