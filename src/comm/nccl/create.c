/* Create, split, destroy communicators
 *
 * A communicator is made in three steps: comm_make allocates the struct and its events, rendezvous
 * agrees on a unique id, comm_init creates NCCL's communicator. Every step that can fail on a
 * single rank comes before the agreement. So after it all ranks succeed, or all fail. */

#include "comm/nccl/nccl_internal.h"

/* Append a record to the list, as the newest one. */
DTRAIN_NCCL__PRIVATE dtrain_result dtrain_nccl__add_record(dtrain_nccl__comm *comm)
{
    dtrain_nccl__hub *hub = comm->hub;
    dtrain_nccl__record *record = (dtrain_nccl__record *)dtrain_nccl__alloc(hub, sizeof *record);
    if (!record) return DTRAIN_ERROR_MEMORY;
    const dtrain_result result = hub->device->ops->event_create(hub->device, &record->done);
    if (result != DTRAIN_OK) {
        dtrain_nccl__free(hub, record, sizeof *record);
        return result;
    }
    record->waited_for = true;
    *(comm->newest ? &comm->newest->next : &comm->oldest) = record;
    comm->newest = record;
    return DTRAIN_OK;
}

DTRAIN_NCCL__PRIVATE dtrain_result dtrain_nccl__comm_make(dtrain_nccl__hub *hub, int size, int rank,
                                                          const int *world_ranks, const char *name,
                                                          dtrain_nccl__comm **out)
{
    dtrain_nccl__comm *comm = (dtrain_nccl__comm *)dtrain_nccl__alloc(hub, sizeof *comm);
    dtrain_result result = DTRAIN_OK;
    *out = NULL;
    if (!comm) return DTRAIN_ERROR_MEMORY;
    comm->hub = hub;
    comm->lane = &hub->lanes[0];
    comm->base.ops = dtrain_nccl_comm_ops();
    comm->base.world = hub->world;
    comm->base.size = size;
    comm->base.rank = rank;
    snprintf(comm->name, sizeof comm->name, "%s", name);
    comm->next = hub->comms;
    hub->comms = comm;
    comm->base.world_ranks = (int *)dtrain_nccl__alloc(hub, (size_t)size * sizeof(int));
    if (!comm->base.world_ranks) result = DTRAIN_ERROR_MEMORY;
    for (int i = 0; i < size && result == DTRAIN_OK; i++)
        comm->base.world_ranks[i] = world_ranks ? world_ranks[i] : i;
    for (int i = 0; i < DTRAIN_NCCL_RECORDS && result == DTRAIN_OK; i++)
        result = dtrain_nccl__add_record(comm);
    if (result == DTRAIN_OK) *out = comm;
    else dtrain_nccl__comm_free(comm);
    return result;
}

/* Free a communicator. If a thread is still inside ncclCommAbort, it uses the struct, which then
 * stays allocated. */
DTRAIN_NCCL__PRIVATE void dtrain_nccl__comm_free(dtrain_nccl__comm *comm)
{
    dtrain_nccl__hub *hub = comm->hub;
    dtrain_nccl__comm **link = &hub->comms;
    while (*link != comm) link = &(*link)->next;
    *link = comm->next;
    while (comm->oldest) {
        dtrain_nccl__record *record = comm->oldest;
        comm->oldest = record->next;
        hub->device->ops->event_destroy(hub->device, record->done);
        dtrain_nccl__free(hub, record, sizeof *record);
    }
    dtrain_nccl__free(hub, comm->base.world_ranks, (size_t)comm->base.size * sizeof(int));
    if (!hub->stuck) dtrain_nccl__free(hub, comm, sizeof *comm);
}

DTRAIN_NCCL__PRIVATE dtrain_result dtrain_nccl__comm_init(dtrain_nccl__comm *comm,
                                                          const ncclUniqueId *id)
{
    dtrain_nccl__hub *hub = comm->hub;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    const ncclResult_t result =
        hub->nccl.CommInitRankConfig(&comm->nccl, comm->base.size, *id, comm->base.rank, &config);
    return dtrain_nccl__complete(hub, comm->nccl, result, "ncclCommInitRankConfig");
}

/* Close a communicator. ncclCommFinalize waits for operations in flight and for graphs that hold
 * its collectives, so it is polled. Then ncclCommDestroy has nothing to wait for. */
static void dtrain_nccl__comm_close(dtrain_nccl__comm *comm)
{
    dtrain_nccl__hub *hub = comm->hub;
    for (dtrain_nccl__memory *m = hub->memory; m; m = m->next)
        if (m->comm == comm) dtrain_nccl__deregister(m);
    if (!comm->dead && comm->nccl) {
        dtrain_nccl__complete(
            hub, comm->nccl, hub->nccl.CommFinalize(comm->nccl),
            comm->captured ? "ncclCommFinalize, which waits until graphs with its operations are "
                             "destroyed"
                           : "ncclCommFinalize");
        if (!comm->dead) hub->nccl.CommDestroy(comm->nccl);
    }
    dtrain_nccl__comm_free(comm);
}

/* ---- Splits -----------------------------------------------------------------------------------*/

/* Run a collective of this file on host memory, and wait for it. */
static dtrain_result dtrain_nccl__gather(dtrain_nccl__comm *comm, uint32_t kind, const void *mine,
                                         void *all, size_t ints)
{
    const dtrain_collective what = {kind, DTRAIN_DTYPE_I32, 0, -1, ints, mine, all};
    dtrain_work *work;
    DTRAIN_NCCL_TRY(dtrain_nccl__start(&comm->base, &what, &work));
    return dtrain_nccl__wait(work);
}

#if DTRAIN_NCCL_HAS_SPLIT
/* Split by ncclCommSplit; a rank without a child takes part too. NCCL writes the new handle when
 * the call on the parent is complete, or when the parent is aborted. */
static dtrain_result dtrain_nccl__split_call(dtrain_nccl__hub *hub, ncclComm_t parent, int color,
                                             dtrain_nccl__comm *child, ncclConfig_t *config,
                                             const char *call)
{
    ncclComm_t none = NULL;
    const ncclResult_t result =
        hub->nccl.CommSplit(parent, child ? color : NCCL_SPLIT_NOCOLOR,
                            child ? child->base.rank : 0, child ? &child->nccl : &none, config);
    DTRAIN_NCCL_TRY(dtrain_nccl__complete(hub, parent, result, call));
    if (!child) return DTRAIN_OK;
    return dtrain_nccl__complete(hub, child->nccl, ncclInProgress, call);
}

static dtrain_result dtrain_nccl__split_native(dtrain_nccl__comm *parent, int color,
                                               dtrain_nccl__comm *child)
{
    return dtrain_nccl__split_call(parent->hub, parent->nccl, color, child, NULL,
                                   "dtrain_comm_split");
}

/* Split the world's communicator from the host's. They share no resources, so the world's can be
 * aborted. It is non-blocking, even if the host's is blocking. */
static dtrain_result dtrain_nccl__split_host(dtrain_nccl__hub *hub, dtrain_nccl__comm *comm)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    config.splitShare = 0;
    return dtrain_nccl__split_call(hub, hub->given->comm, 0, comm, &config,
                                   "ncclCommSplit of the host's communicator");
}
#else
/* Split without ncclCommSplit: the first rank of each color makes a unique id, and all ranks gather
 * the ids over the parent. */
static dtrain_result dtrain_nccl__split_native(dtrain_nccl__comm *parent, int color,
                                               dtrain_nccl__comm *child)
{
    dtrain_nccl__hub *hub = parent->hub;
    const size_t size = (size_t)parent->base.size, bytes = size * sizeof(ncclUniqueId);
    ncclUniqueId mine, *all = (ncclUniqueId *)dtrain_nccl__alloc(hub, bytes);
    dtrain_result result = all ? DTRAIN_OK : DTRAIN_ERROR_MEMORY;
    (void)color;
    memset(&mine, 0, sizeof mine);
    if (result == DTRAIN_OK && child && child->base.rank == 0) {
        const ncclResult_t made = hub->nccl.GetUniqueId(&mine);
        if (made != ncclSuccess)
            result = dtrain_nccl__fail_call(hub, parent->nccl, made, "ncclGetUniqueId");
    }
    if (result == DTRAIN_OK)
        result = dtrain_nccl__gather(parent, DTRAIN_COLLECTIVE_ALL_GATHER, &mine, all,
                                     sizeof mine / sizeof(int32_t));
    for (size_t i = 0; i < size && result == DTRAIN_OK && child; i++) {
        if (parent->base.world_ranks[i] != child->base.world_ranks[0]) continue;
        result = dtrain_nccl__comm_init(child, &all[i]);
        break;
    }
    dtrain_nccl__free(hub, all, bytes);
    return result;
}

/* Never called: dtrain_nccl__check_given refuses a communicator of the host. */
static dtrain_result dtrain_nccl__split_host(dtrain_nccl__hub *hub, dtrain_nccl__comm *comm)
{
    (void)hub;
    (void)comm;
    return DTRAIN_ERROR_UNSUPPORTED;
}
#endif

/* Split a communicator. Every rank gathers the color and key of all ranks. It sorts the ranks of
 * its color by key, then by rank (a stable insertion sort). */
static dtrain_result dtrain_nccl__split(dtrain_comm *base, int color, int key, dtrain_comm **out)
{
    dtrain_nccl__comm *parent = (dtrain_nccl__comm *)base, *child = NULL;
    dtrain_nccl__hub *hub = parent->hub;
    const int32_t mine[2] = {color < 0 ? -1 : color, key};
    int32_t all[DTRAIN_MAX_RANKS][2];
    int members[DTRAIN_MAX_RANKS], count = 0, rank = 0;
    char name[sizeof parent->name];
    *out = NULL;
    if (parent->dead) return dtrain_nccl__comm_error(parent);
    dtrain_result result = dtrain_nccl__gather(parent, DTRAIN_COLLECTIVE_SPLIT, mine, all, 2);
    for (int i = 0; i < base->size && color >= 0 && result == DTRAIN_OK; i++) {
        if (all[i][0] != color) continue;
        int at = count++;
        for (; at > 0 && all[members[at - 1]][1] > all[i][1]; at--) members[at] = members[at - 1];
        members[at] = i;
    }
    for (int i = 0; i < count; i++) {
        if (members[i] == base->rank) rank = i;
        members[i] = base->world_ranks[members[i]];
    }
    snprintf(name, sizeof name, "%.40s/%u.%d", parent->name, ++parent->split_count, color);
    if (count) result = dtrain_nccl__comm_make(hub, count, rank, members, name, &child);
    if (result == DTRAIN_OK) result = dtrain_nccl__split_native(parent, color, child);
    if (result == DTRAIN_OK) {
        *out = child ? &child->base : NULL;
        return DTRAIN_OK;
    }
    result = dtrain_nccl__fail(hub, result, "dtrain_comm_split: %s",
                               dtrain_nccl__strip_rank(hub, dtrain_last_error()));
    if (child) {
        dtrain_nccl__abort_one(child); /* the abort of the parent can have written its handle */
        dtrain_nccl__await_aborts(hub);
        dtrain_nccl__comm_free(child);
    }
    return result;
}

/* ---- Rendezvous ---------------------------------------------------------------------------------
 *
 * The ranks look for errors before they call NCCL together, where all would wait for a failed rank.
 * Each rank sends its NCCL version and its result so far, and the first rank also the unique id.
 * All ranks check the same records, and so come to the same result. (No two ranks of a node share a
 * device: the world has checked this before it chose NCCL.) */

#define DTRAIN_NCCL_HELLO 0x64744e33u /* "dtN3"; must change with the struct below */

typedef struct dtrain_nccl__hello {
    uint32_t magic;
    int32_t status; /* dtrain_result of this rank so far */
    uint32_t version;
    uint32_t split; /* 1: splits a communicator of the host */
    char error[320];
    ncclUniqueId id; /* used from rank 0 only */
} dtrain_nccl__hello;

/* Exchange the records of all ranks (size), check them, and return the unique id. `prepared` is
 * this rank's result so far; after an error all ranks receive its sentence. */
static dtrain_result dtrain_nccl__rendezvous(dtrain_nccl__hub *hub, dtrain_result prepared,
                                             dtrain_nccl__hello *all, ncclUniqueId *id)
{
    dtrain_world *world = hub->world;
    dtrain_nccl__hello hello;
    const int size = dtrain_world_size(world);
    char first[24], other[24];
    memset(&hello, 0, sizeof hello);
    const dtrain_nccl_given *given = hub->given;
    if (given && given->id) memcpy(&hello.id, given->id, sizeof hello.id);
    else if (prepared == DTRAIN_OK && dtrain_world_rank(world) == 0 && !(given && given->comm)) {
        const ncclResult_t made = hub->nccl.GetUniqueId(&hello.id);
        prepared = dtrain_nccl__code(made);
        if (made != ncclSuccess)
            dtrain_fail(prepared,
                        "ncclGetUniqueId failed: %s; %s; is the network interface for NCCL up "
                        "(NCCL_SOCKET_IFNAME)?",
                        hub->nccl.GetErrorString(made), hub->nccl.GetLastError(NULL));
    }
    hello.magic = DTRAIN_NCCL_HELLO;
    hello.status = prepared;
    hello.version = hub->version;
    hello.split = given && given->comm;
    if (prepared != DTRAIN_OK)
        snprintf(hello.error, sizeof hello.error, "%s",
                 dtrain_nccl__strip_rank(hub, dtrain_last_error()));
    DTRAIN_NCCL_TRY(dtrain_world_all_gather(world, &hello, sizeof hello, all));
    for (int i = 0; i < size; i++) {
        if (all[i].magic != DTRAIN_NCCL_HELLO)
            return dtrain_fail(DTRAIN_ERROR_MISMATCH,
                               "rank %d of %d was built with another version of dtrain_nccl.h", i,
                               size);
        if (all[i].status != DTRAIN_OK)
            return dtrain_fail((dtrain_result)all[i].status, "on rank %d: %.*s", i,
                               (int)sizeof all[i].error, all[i].error);
    }
    for (int i = 1; i < size; i++)
        if (all[i].split != all[0].split)
            return dtrain_fail(DTRAIN_ERROR_MISMATCH,
                               "rank %d hands in a communicator of NCCL, and rank %d none: all do, "
                               "or none does",
                               all[0].split ? 0 : i, all[0].split ? i : 0);
    for (int i = 1; i < size; i++)
        if (all[i].version != all[0].version)
            return dtrain_fail(
                DTRAIN_ERROR_MISMATCH,
                "rank 0 runs NCCL %s and rank %d NCCL %s: they do not talk to each other; install "
                "the same version everywhere",
                dtrain_nccl__version_text(all[0].version, first), i,
                dtrain_nccl__version_text(all[i].version, other));
    *id = all[0].id;
    return DTRAIN_OK;
}

/* ---- The hub ----------------------------------------------------------------------------------*/

/* Check the NCCL objects of the host. */
static dtrain_result dtrain_nccl__check_given(dtrain_nccl__hub *hub)
{
    const dtrain_nccl_given *given = hub->given;
    const int size = dtrain_world_size(hub->world), rank = dtrain_world_rank(hub->world);
    int count = -1, user = -1, device = -1;
    if (!given || !given->comm) return DTRAIN_OK;
    if (given->id)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_nccl_given has a communicator and an id: hand in one of them");
    if (!DTRAIN_NCCL_HAS_SPLIT)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "this program was compiled with the header of an NCCL that cannot split "
                           "a communicator (before 2.18): hand in a unique id");
    if (hub->nccl.CommCount(given->comm, &count) != ncclSuccess ||
        hub->nccl.CommUserRank(given->comm, &user) != ncclSuccess ||
        hub->nccl.CommCuDevice(given->comm, &device) != ncclSuccess)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "the host's communicator cannot be used: %s",
                           hub->nccl.GetLastError(given->comm));
    if (count == size && user == rank && device == hub->device_index) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                       "the host's communicator has rank %d of %d on GPU %d, and joins as rank %d "
                       "of %d on GPU %d: hand in one of the members, in their order",
                       user, count, device, rank, size, hub->device_index);
}

/* Do every step that can fail on a single rank. A guest reads no environment. */
static dtrain_result dtrain_nccl__hub_prepare(dtrain_nccl__hub *hub)
{
    const dtrain_device_ops *ops = hub->device->ops;
    const char *order = hub->guest ? NULL : getenv("NCCL_LAUNCH_ORDER_IMPLICIT");
    if (ops->host_memory || !ops->stream_native)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "NCCL needs ranks on GPUs, and the device is \"%s\"; set device_ops to "
                           "dtrain_cuda_device_ops(), or leave comm_ops NULL",
                           ops->name);
    DTRAIN_NCCL_TRY(dtrain_nccl__load(&hub->nccl, &hub->version));
    const cudaError_t error = cudaGetDevice(&hub->device_index); /* NCCL uses this device too */
    if (error != cudaSuccess)
        return dtrain_fail(DTRAIN_ERROR_SYSTEM, "cudaGetDevice failed: %s",
                           cudaGetErrorString(error));
    DTRAIN_NCCL_TRY(dtrain_nccl__check_given(hub));
    DTRAIN_NCCL_TRY(ops->event_create(hub->device, &hub->ready));
    DTRAIN_NCCL_TRY(ops->event_create(hub->device, &hub->marks[0].event));
    /* True if kernels of different communicators start in the order of the host's launches. */
    const bool set = hub->given ? hub->given->launch_ordered : order && atoi(order) > 0;
    const bool ordered = hub->version >= 22600 && set;
    for (int i = 0; i < (ordered ? DTRAIN_NCCL__LANES : 1); i++) {
        dtrain_nccl__lane *lane = &hub->lanes[i];
        DTRAIN_NCCL_TRY(ops->stream_create(hub->device, true, &lane->stream));
        DTRAIN_NCCL_TRY(ops->event_create(hub->device, &hub->marks[1 + i].event));
        lane->native = (cudaStream_t)ops->stream_native(hub->device, lane->stream);
        hub->marks[1 + i].stream = lane->stream;
    }
    return DTRAIN_OK;
}

/* Close everything. Graphs that still exist are dropped: they can no longer run. while_waiting
 * stays set until all memory is free, because freeing can wait and needs the deadline. */
static void dtrain_nccl__hub_close(dtrain_nccl__hub *hub)
{
    const dtrain_device_ops *ops = hub->device->ops;
    hub->closing = true;
    if (hub->code == DTRAIN_OK) dtrain_nccl__flush(hub);
    dtrain_nccl__drop_graphs(hub);
    if (!hub->stuck) dtrain_nccl__await_aborts(hub);
    while (hub->comms) dtrain_nccl__comm_close(hub->comms);
    while (hub->memory) {
        dtrain_nccl__memory *memory = hub->memory;
        hub->memory = memory->next;
        dtrain_nccl__memory_drop(hub, memory);
    }
    while (hub->blocks) {
        dtrain_nccl__block *block = hub->blocks;
        hub->blocks = block->next;
        ops->host_free(hub->device, block->host, block->bytes);
        ops->free(hub->device, block->device, block->bytes);
        dtrain_nccl__free(hub, block, sizeof *block);
    }
    while (hub->pool) {
        dtrain_nccl__work *work = hub->pool;
        hub->pool = work->next;
        dtrain_nccl__free(hub, work, sizeof *work);
    }
    if (hub->device->waiting_user == hub) {
        hub->device->while_waiting = NULL;
        hub->device->waiting_user = NULL;
    }
    for (int i = 0; i < DTRAIN_NCCL__MARKS; i++)
        if (hub->marks[i].event) ops->event_destroy(hub->device, hub->marks[i].event);
    if (hub->ready) ops->event_destroy(hub->device, hub->ready);
    for (int i = 0; i < DTRAIN_NCCL__LANES; i++)
        if (hub->lanes[i].stream) ops->stream_destroy(hub->device, hub->lanes[i].stream);
    if (!hub->stuck) dtrain_nccl__free(hub, hub, sizeof *hub);
}

/* Create the world's communicator. If one rank fails, all ranks return an error and free
 * everything. */
static dtrain_result dtrain_nccl__create(dtrain_world *world, dtrain_comm **out)
{
    dtrain_world_info room[2]; /* the info of a newer dtrain.h can be larger */
    dtrain_nccl__comm *comm = NULL;
    ncclUniqueId id;
    *out = NULL;
    dtrain_world_query(world, room);
    const dtrain_world_info info = room[0];
    dtrain_nccl__hub *hub =
        (dtrain_nccl__hub *)info.allocator.alloc(info.allocator.user, sizeof *hub);
    if (!hub) return dtrain_fail(DTRAIN_ERROR_MEMORY, "no memory for the NCCL communicator");
    memset(hub, 0, sizeof *hub);
    hub->world = world;
    hub->device = dtrain_world_device(world);
    hub->allocator = info.allocator;
    hub->deadline = 1e-3 * (double)info.timeout_ms;
    hub->guest = info.guest;
    hub->given = (const dtrain_nccl_given *)info.comm_given;
    hub->group_end = &hub->group;
    dtrain_result result = dtrain_nccl__hub_prepare(hub);
    if (result == DTRAIN_OK)
        result = dtrain_nccl__comm_make(hub, dtrain_world_size(world), dtrain_world_rank(world),
                                        NULL, "world", &comm);
    const size_t bytes = sizeof(dtrain_nccl__hello) * (size_t)dtrain_world_size(world);
    dtrain_nccl__hello *all = (dtrain_nccl__hello *)dtrain_nccl__alloc(hub, bytes);
    result = all ? dtrain_nccl__rendezvous(hub, result, all, &id) : DTRAIN_ERROR_MEMORY;
    dtrain_nccl__free(hub, all, bytes);
    if (result == DTRAIN_OK) {
        hub->device->while_waiting = dtrain_nccl__watch;
        hub->device->waiting_user = hub;
        result = hub->given && hub->given->comm ? dtrain_nccl__split_host(hub, comm)
                                                : dtrain_nccl__comm_init(comm, &id);
    }
    hub->given = NULL;
    if (result != DTRAIN_OK) {
        dtrain_nccl__hub_close(hub);
        return result;
    }
    *out = &comm->base;
    return DTRAIN_OK;
}

/* Destroy a communicator. The world's is the oldest; destroying it destroys all others. */
static dtrain_result dtrain_nccl__destroy(dtrain_comm *base)
{
    dtrain_nccl__comm *comm = (dtrain_nccl__comm *)base;
    dtrain_nccl__hub *hub = comm->hub;
    const dtrain_result before = hub->code;
    const bool dead = comm->dead;
    if (!comm->next) {
        dtrain_nccl__hub_close(hub);
        return DTRAIN_OK;
    }
    dtrain_nccl__comm_close(comm);
    return dead || hub->code == before ? DTRAIN_OK : dtrain_nccl__hub_error(hub);
}

DTRAIN_API const dtrain_comm_ops *dtrain_nccl_comm_ops(void)
{
    static const dtrain_comm_ops ops = {DTRAIN_COMM_ABI,
                                        true,
                                        "nccl",
                                        dtrain_nccl__create,
                                        dtrain_nccl__start,
                                        dtrain_nccl__test,
                                        dtrain_nccl__wait,
                                        dtrain_nccl__alloc_entry,
                                        dtrain_nccl__free_entry,
                                        dtrain_nccl__split,
                                        dtrain_nccl__fail_entry,
                                        dtrain_nccl__destroy,
                                        NULL};
    return &ops;
}
