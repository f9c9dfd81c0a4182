/* Starting and waiting for operations
 *
 *     start   the communication stream waits for the compute stream; host buffers are copied to
 *             bounce buffers; NCCL is called; host results are copied out; an event is recorded
 *     wait    the compute stream waits for this event; the host waits only for a host buffer
 *
 * NCCL skips empty operations. So a barrier, and a collective with a count of 0, become the sum of
 * one integer. */

#include "comm/nccl/nccl_internal.h"

/* Return the bytes that this rank sends or, if `received`, receives. */
static size_t dtrain_nccl__bytes(const dtrain_nccl__comm *comm, const dtrain_collective *what,
                                 bool received)
{
    const bool root = what->root == comm->base.rank;
    size_t slices = 1;
    switch (what->kind) {
    case DTRAIN_COLLECTIVE_REDUCE_SCATTER: slices = received ? 1 : (size_t)comm->base.size; break;
    case DTRAIN_COLLECTIVE_SPLIT:
    case DTRAIN_COLLECTIVE_ALL_GATHER: slices = received ? (size_t)comm->base.size : 1; break;
    case DTRAIN_COLLECTIVE_ALL_TO_ALL: slices = (size_t)comm->base.size; break;
    case DTRAIN_COLLECTIVE_BROADCAST: slices = root != received; break;
    case DTRAIN_COLLECTIVE_REDUCE: slices = root || !received; break;
    case DTRAIN_COLLECTIVE_SEND: slices = !received; break;
    case DTRAIN_COLLECTIVE_RECV: slices = received; break;
    default: break;
    }
    return what->count * dtrain_dtype_bytes(what->dtype) * slices;
}

/* ---- Staging ----------------------------------------------------------------------------------*/

/* Take a block of at least `bytes`. New blocks have a power of two of bytes, and stay until the
 * world ends: freeing device memory waits for kernels, which can wait for other ranks. */
static dtrain_result dtrain_nccl__take_block(dtrain_nccl__hub *hub, size_t bytes,
                                             dtrain_nccl__block **out)
{
    const dtrain_device_ops *ops = hub->device->ops;
    size_t room = 4096;
    for (dtrain_nccl__block **link = &hub->blocks; *link; link = &(*link)->next) {
        if ((*link)->bytes < bytes) continue;
        *out = *link;
        *link = (*link)->next;
        return DTRAIN_OK;
    }
    while (room < bytes) room *= 2;
    dtrain_nccl__block *block = (dtrain_nccl__block *)dtrain_nccl__alloc(hub, sizeof *block);
    if (!block) return DTRAIN_ERROR_MEMORY;
    block->bytes = room;
    dtrain_result result = ops->host_alloc(hub->device, room, &block->host);
    if (result == DTRAIN_OK) result = ops->alloc(hub->device, room, &block->device);
    if (result != DTRAIN_OK) {
        if (block->host) ops->host_free(hub->device, block->host, room);
        dtrain_nccl__free(hub, block, sizeof *block);
        return result;
    }
    *out = block;
    return DTRAIN_OK;
}

/* Return a block. The list is sorted by size, so take_block finds the smallest that fits. */
static void dtrain_nccl__give_block(dtrain_nccl__hub *hub, dtrain_nccl__block *block)
{
    dtrain_nccl__block **link = &hub->blocks;
    while (*link && (*link)->bytes < block->bytes) link = &(*link)->next;
    block->next = *link;
    *link = block;
}

/* Choose the buffers that are staged, and copy the send buffer in. The block is | send | recv |, or
 * both at one place for an in-place operation. */
static dtrain_result dtrain_nccl__stage_in(dtrain_nccl__comm *comm, dtrain_nccl__work *work)
{
    dtrain_nccl__hub *hub = comm->hub;
    const dtrain_device_ops *ops = hub->device->ops;
    const dtrain_collective *what = &work->what;
    const size_t send_bytes = dtrain_nccl__bytes(comm, what, false);
    const size_t recv_bytes = dtrain_nccl__bytes(comm, what, true);
    const bool send_host = send_bytes && !ops->is_device_memory(hub->device, what->send);
    const bool recv_host = recv_bytes && !ops->is_device_memory(hub->device, what->recv);
    work->send = what->send;
    work->recv = what->recv;
    if (!send_host && !recv_host) return DTRAIN_OK;
    const size_t padded = (send_bytes + 255) / 256 * 256; /* NCCL prefers this alignment */
    const size_t recv_at = send_host && what->send != what->recv ? padded : 0;
    const size_t end =
        recv_host && recv_at + recv_bytes > send_bytes ? recv_at + recv_bytes : send_bytes;
    DTRAIN_NCCL_TRY(dtrain_nccl__take_block(hub, end, &work->block));
    char *device = (char *)work->block->device;
    if (send_host) {
        memcpy(work->block->host, what->send, send_bytes);
        DTRAIN_NCCL_TRY(ops->copy_async(hub->device, device, work->block->host, send_bytes,
                                        DTRAIN_COPY_HOST_TO_DEVICE, comm->lane->stream));
        work->send = device;
        if (what->kind == DTRAIN_COLLECTIVE_BROADCAST) work->recv = device; /* at the root */
    }
    if (recv_host) {
        work->recv = device + recv_at;
        work->host_recv = what->recv;
    }
    comm->base.info.staged_bytes += (send_host ? send_bytes : 0) + (recv_host ? recv_bytes : 0);
    return DTRAIN_OK;
}

/* Return the offset of the received bytes in the block; it is the same on device and host. */
static size_t dtrain_nccl__recv_at(const dtrain_nccl__work *work)
{
    return (size_t)((char *)work->recv - (char *)work->block->device);
}

/* Copy results out and record the event. NCCL's call is complete. */
static dtrain_result dtrain_nccl__close_work(dtrain_nccl__comm *comm, dtrain_nccl__work *work)
{
    dtrain_nccl__hub *hub = comm->hub;
    const dtrain_device_ops *ops = hub->device->ops;
    if (work->host_recv)
        DTRAIN_NCCL_TRY(ops->copy_async(hub->device,
                                        (char *)work->block->host + dtrain_nccl__recv_at(work),
                                        work->recv, dtrain_nccl__bytes(comm, &work->what, true),
                                        DTRAIN_COPY_DEVICE_TO_HOST, comm->lane->stream));
    DTRAIN_NCCL_TRY(ops->event_record(hub->device, work->record->done, comm->lane->stream));
    work->record->launched = true;
    return DTRAIN_OK;
}

/* ---- Handles and records ----------------------------------------------------------------------*/

static dtrain_nccl__work *dtrain_nccl__take_work(dtrain_nccl__comm *comm)
{
    dtrain_nccl__hub *hub = comm->hub;
    dtrain_nccl__work *work = hub->pool;
    if (work) {
        hub->pool = work->next;
        memset(work, 0, sizeof *work);
    } else {
        work = (dtrain_nccl__work *)dtrain_nccl__alloc(hub, sizeof *work);
        if (!work) return NULL;
    }
    work->base.comm = &comm->base;
    comm->base.in_flight++;
    comm->base.outstanding++;
    return work;
}

static void dtrain_nccl__mark_done(dtrain_nccl__work *work)
{
    if (!work->done) work->base.comm->in_flight--;
    work->done = true;
}

static void dtrain_nccl__give_work(dtrain_nccl__work *work)
{
    dtrain_nccl__hub *hub = ((dtrain_nccl__comm *)work->base.comm)->hub;
    dtrain_nccl__mark_done(work);
    work->base.comm->outstanding--;
    if (work->record) work->record->waited_for = true;
    if (work->block) dtrain_nccl__give_block(hub, work->block);
    work->next = hub->pool;
    hub->pool = work;
}

static dtrain_result dtrain_nccl__write_record(dtrain_nccl__comm *comm, dtrain_nccl__work *work,
                                               const dtrain_collective *what)
{
    const bool captured = dtrain_nccl__capturing(comm->hub);
    dtrain_nccl__record *record = comm->oldest;
    if (record->waited_for) { /* reuse it, as the newest */
        comm->newest->next = record;
        comm->newest = record;
        comm->oldest = record->next;
        record->next = NULL;
    } else DTRAIN_NCCL_TRY(dtrain_nccl__add_record(comm));
    record = comm->newest;
    record->waited_for = false;
    record->number =
        dtrain_nccl__is_point_to_point(what->kind) ? ++comm->point_to_point : ++comm->collectives;
    record->what = *what;
    record->launched = false;
    record->captured = captured;
    work->captured = captured;
    comm->captured = comm->captured || captured;
    work->record = record;
    return DTRAIN_OK;
}

/* ---- Calling NCCL -----------------------------------------------------------------------------*/

static ncclDataType_t dtrain_nccl__type(dtrain_dtype dtype)
{
    switch (dtype) {
    case DTRAIN_DTYPE_BF16: return ncclBfloat16;
    case DTRAIN_DTYPE_F16: return ncclFloat16;
    case DTRAIN_DTYPE_I32: return ncclInt32;
    case DTRAIN_DTYPE_I64: return ncclInt64;
    case DTRAIN_DTYPE_F64: return ncclFloat64;
    default: return ncclFloat32;
    }
}

static ncclRedOp_t dtrain_nccl__op(uint32_t op)
{
    switch (op) {
    case DTRAIN_REDUCE_MIN: return ncclMin;
    case DTRAIN_REDUCE_MAX: return ncclMax;
    case DTRAIN_REDUCE_PROD: return ncclProd;
    default: return ncclSum; /* also DTRAIN_REDUCE_MEAN, see dtrain_nccl__wait_steps */
    }
}

/* Call an all-to-all: a group with a send to and a receive from every rank. This includes the
 * rank's own slice, which NCCL copies on the device, in stream order. */
static ncclResult_t dtrain_nccl__all_to_all(dtrain_nccl__comm *comm, const dtrain_nccl__work *work)
{
    const dtrain_nccl__library *nccl = &comm->hub->nccl;
    const cudaStream_t stream = comm->lane->native;
    const ncclDataType_t type = dtrain_nccl__type(work->what.dtype);
    const size_t count = work->what.count, bytes = count * dtrain_dtype_bytes(work->what.dtype);
    const char *send = (const char *)work->send;
    char *recv = (char *)work->recv;
    ncclResult_t failed = ncclSuccess;
    nccl->GroupStart();
    for (int i = 0; i < 2 * comm->base.size && failed == ncclSuccess; i++) {
        const int r = i / 2;
        const size_t at = (size_t)r * bytes;
        const ncclResult_t result = i % 2
                                        ? nccl->Recv(recv + at, count, type, r, comm->nccl, stream)
                                        : nccl->Send(send + at, count, type, r, comm->nccl, stream);
        if (result != ncclInProgress) failed = result;
    }
    const ncclResult_t end = nccl->GroupEnd();
    return failed == ncclSuccess ? end : failed;
}

static ncclResult_t dtrain_nccl__call(dtrain_nccl__comm *comm, const dtrain_nccl__work *work)
{
    const dtrain_nccl__library *nccl = &comm->hub->nccl;
    const cudaStream_t stream = comm->lane->native;
    const dtrain_collective *what = &work->what;
    const ncclDataType_t type = dtrain_nccl__type(what->dtype);
    const ncclRedOp_t op = dtrain_nccl__op(what->op);
    const size_t count = what->count;
    const void *send = work->send;
    void *recv = work->recv;
    switch (what->kind) {
    case DTRAIN_COLLECTIVE_ALL_REDUCE:
        return nccl->AllReduce(send, recv, count, type, op, comm->nccl, stream);
    case DTRAIN_COLLECTIVE_REDUCE_SCATTER:
        return nccl->ReduceScatter(send, recv, count, type, op, comm->nccl, stream);
    case DTRAIN_COLLECTIVE_SPLIT:
    case DTRAIN_COLLECTIVE_ALL_GATHER:
        return nccl->AllGather(send, recv, count, type, comm->nccl, stream);
    case DTRAIN_COLLECTIVE_BROADCAST:
        return nccl->Broadcast(send, recv, count, type, what->root, comm->nccl, stream);
    case DTRAIN_COLLECTIVE_REDUCE:
        return nccl->Reduce(send, recv, count, type, op, what->root, comm->nccl, stream);
    case DTRAIN_COLLECTIVE_ALL_TO_ALL: return dtrain_nccl__all_to_all(comm, work);
    case DTRAIN_COLLECTIVE_SEND:
        return nccl->Send(send, count, type, what->root, comm->nccl, stream);
    case DTRAIN_COLLECTIVE_RECV:
        return nccl->Recv(recv, count, type, what->root, comm->nccl, stream);
    default: return ncclInvalidArgument;
    }
}

/* ---- Sends and receives -------------------------------------------------------------------------
 *
 * Sends and receives (messages) are collected until the program waits, tests, or starts a
 * collective; then they are launched in groups. The grouping decides whether ranks can hang. NCCL
 * runs a group in batches: the n-th send to and the n-th receive from a rank are in batch n, which
 * starts when batch n - 1 is done. An event is recorded after the whole group.
 *
 *     As many sends as receives are an exchange, and become one group. The n-th message from one
 *     rank to another is in batch n on both, in whatever order they start messages. So the batches
 *     end one after another on all ranks.
 *
 *     Other messages can run ahead. As one group, S1 S2 R1 would have the batches S1 + R1 and S2.
 *     S2 would wait for R1, but the peer can send R1 only after it has S2. So these messages are
 *     launched in their order, and a second send to, or receive from, a rank begins a new group. A
 *     group is then one batch. It ends in every program in which ranks could wait for each message
 *     before they start the next: in the order of such a run, both ranks have launched the first
 *     message that is not done.
 *
 * The schedules of pipelines are of the second kind; their runner tests every message. */

/* True if a message in the list from `first` to before `work` has its kind, peer and comm. */
static bool dtrain_nccl__repeats(const dtrain_nccl__work *first, const dtrain_nccl__work *work)
{
    for (; first != work; first = first->next)
        if (first->base.comm == work->base.comm && first->what.kind == work->what.kind &&
            first->what.root == work->what.root)
            return true;
    return false;
}

/* Launch a list of messages as one NCCL group. */
static dtrain_result dtrain_nccl__launch_group(dtrain_nccl__hub *hub, dtrain_nccl__work *first)
{
    ncclResult_t failed = ncclSuccess;
    ncclComm_t culprit = NULL;
    hub->nccl.GroupStart();
    for (dtrain_nccl__work *work = first; work && failed == ncclSuccess; work = work->next) {
        dtrain_nccl__comm *comm = (dtrain_nccl__comm *)work->base.comm;
        const ncclResult_t result = dtrain_nccl__call(comm, work);
        if (result == ncclSuccess || result == ncclInProgress) continue;
        failed = result;
        culprit = comm->nccl;
    }
    const ncclResult_t end = hub->nccl.GroupEnd();
    if (failed == ncclSuccess && end != ncclInProgress) failed = end;
    if (failed != ncclSuccess)
        return dtrain_nccl__fail_call(hub, culprit, failed, "a group of sends and receives");
    for (dtrain_nccl__work *work = first; work; work = work->next)
        DTRAIN_NCCL_TRY(dtrain_nccl__complete(hub, ((dtrain_nccl__comm *)work->base.comm)->nccl,
                                              end, "a group of sends and receives"));
    for (dtrain_nccl__work *work = first; work; work = work->next)
        DTRAIN_NCCL_TRY(dtrain_nccl__close_work((dtrain_nccl__comm *)work->base.comm, work));
    return DTRAIN_OK;
}

/* Launch all collected messages. */
DTRAIN_NCCL__PRIVATE dtrain_result dtrain_nccl__flush(dtrain_nccl__hub *hub)
{
    const bool exchange = hub->group_balance == 0;
    dtrain_nccl__work *work = hub->group;
    hub->group = NULL;
    hub->group_end = &hub->group;
    hub->group_balance = 0;
    while (work) {
        dtrain_nccl__work *const first = work, *last;
        do last = work, work = work->next;
        while (work && (exchange || !dtrain_nccl__repeats(first, work)));
        last->next = NULL;
        DTRAIN_NCCL_TRY(dtrain_nccl__launch_group(hub, first));
    }
    return DTRAIN_OK;
}

static dtrain_result dtrain_nccl__launch(dtrain_nccl__comm *comm, dtrain_nccl__work *work)
{
    dtrain_nccl__hub *hub = comm->hub;
    if (dtrain_nccl__is_point_to_point(work->what.kind)) {
        work->next = NULL;
        *hub->group_end = work;
        hub->group_end = &work->next;
        hub->group_balance += work->what.kind == DTRAIN_COLLECTIVE_SEND ? 1 : -1;
        return DTRAIN_OK;
    }
    DTRAIN_NCCL_TRY(dtrain_nccl__complete(hub, comm->nccl, dtrain_nccl__call(comm, work),
                                          dtrain_nccl__call_name(work->what.kind)));
    return dtrain_nccl__close_work(comm, work);
}

/* ---- Starting ---------------------------------------------------------------------------------*/

/* Do the steps of a start. After an error the caller fails the communicator. */
static dtrain_result dtrain_nccl__start_steps(dtrain_nccl__comm *comm,
                                              const dtrain_collective *what,
                                              dtrain_nccl__work *work)
{
    dtrain_nccl__hub *hub = comm->hub;
    const dtrain_device_ops *ops = hub->device->ops;
    const bool message = dtrain_nccl__is_point_to_point(what->kind);
    const bool tensor = comm->base.axis && strcmp(comm->base.axis, "tensor") == 0;
    dtrain_nccl__lane *const lane = &hub->lanes[tensor && comm->next && hub->lanes[1].stream];
    if (!message || lane != comm->lane) DTRAIN_NCCL_TRY(dtrain_nccl__flush(hub));
    /* A communicator can get its axis later than its first operations. Then the new lane waits
     * for the old one. */
    if (lane != comm->lane) {
        DTRAIN_NCCL_TRY(ops->event_record(hub->device, hub->ready, comm->lane->stream));
        DTRAIN_NCCL_TRY(ops->event_wait(hub->device, hub->ready, lane->stream));
        comm->lane = lane;
    }
    DTRAIN_NCCL_TRY(dtrain_nccl__write_record(comm, work, what));
    work->what = *what;
    if (what->count == 0) { /* send one integer of host memory instead */
        work->single = 1;
        work->what.count = 1;
        work->what.dtype = DTRAIN_DTYPE_I32;
        work->what.send = work->what.recv = &work->single;
    }
    if (what->count == 0 && !message) {
        work->what.kind = DTRAIN_COLLECTIVE_ALL_REDUCE;
        work->what.op = DTRAIN_REDUCE_SUM;
        work->what.root = -1;
    }
    DTRAIN_NCCL_TRY(ops->event_record(hub->device, hub->ready, NULL));
    DTRAIN_NCCL_TRY(ops->event_wait(hub->device, hub->ready, comm->lane->stream));
    DTRAIN_NCCL_TRY(dtrain_nccl__stage_in(comm, work));
    return dtrain_nccl__launch(comm, work);
}

DTRAIN_NCCL__PRIVATE dtrain_result dtrain_nccl__start(dtrain_comm *base,
                                                      const dtrain_collective *what,
                                                      dtrain_work **out)
{
    dtrain_nccl__comm *comm = (dtrain_nccl__comm *)base;
    dtrain_nccl__hub *hub = comm->hub;
    const char *call = dtrain_nccl__call_name(what->kind);
    const size_t unit = dtrain_dtype_bytes(what->dtype);
    *out = NULL;
    if (comm->dead) return dtrain_nccl__comm_error(comm);
    if (unit && what->count && ((uintptr_t)what->send | (uintptr_t)what->recv) % unit)
        return dtrain_nccl__fail(hub, DTRAIN_ERROR_ARGUMENT,
                                 "%s: NCCL needs buffers aligned to their elements of %zu bytes, "
                                 "these are at %p and %p",
                                 call, unit, what->send, what->recv);
    DTRAIN_NCCL_TRY(dtrain_nccl__poll(hub, call));
    dtrain_nccl__work *work = dtrain_nccl__take_work(comm);
    const dtrain_result result =
        work ? dtrain_nccl__start_steps(comm, what, work) : DTRAIN_ERROR_MEMORY;
    if (result == DTRAIN_OK) {
        *out = &work->base;
        return DTRAIN_OK;
    }
    if (work) dtrain_nccl__give_work(work);
    return dtrain_nccl__fail(hub, result, "%s: %s", call,
                             dtrain_nccl__strip_rank(hub, dtrain_last_error()));
}

/* ---- Ending -----------------------------------------------------------------------------------*/

static dtrain_result dtrain_nccl__wait_steps(dtrain_nccl__comm *comm, dtrain_nccl__work *work)
{
    dtrain_nccl__hub *hub = comm->hub;
    const dtrain_collective *what = &work->what;
    const size_t recv_bytes = dtrain_nccl__bytes(comm, what, true);
    DTRAIN_NCCL_TRY(dtrain_nccl__flush(hub));
    if (work->block)
        DTRAIN_NCCL_TRY(dtrain_nccl__await_event(hub, work->record,
                                                 dtrain_nccl__call_name(work->record->what.kind)));
    else DTRAIN_NCCL_TRY(hub->device->ops->event_wait(hub->device, work->record->done, NULL));
    if (work->host_recv)
        memcpy(work->host_recv, (char *)work->block->host + dtrain_nccl__recv_at(work), recv_bytes);
    if (what->op != DTRAIN_REDUCE_MEAN || comm->base.size == 1 || recv_bytes == 0) return DTRAIN_OK;

    /* Make the mean from the sum, on the host or on the compute stream, which already waits for the
     * sum. */
    const double scale = 1.0 / comm->base.size;
    for (size_t i = 0; i < what->count && work->host_recv; i++) {
        float *wide = (float *)what->recv + i;
        uint16_t *half = (uint16_t *)what->recv + i;
        if (what->dtype == DTRAIN_DTYPE_F64) ((double *)what->recv)[i] *= scale;
        else if (what->dtype == DTRAIN_DTYPE_F32) *wide *= (float)scale;
        else
            *half = dtrain_half_from_f32(what->dtype,
                                         dtrain_half_to_f32(what->dtype, *half) * (float)scale);
    }
    if (work->host_recv) return DTRAIN_OK;
    dtrain_axpby_args args;
    memset(&args, 0, sizeof args);
    args.count = (int64_t)what->count;
    args.a = scale;
    args.x = what->recv;
    args.y = what->recv;
    args.dtype = what->dtype;
    return hub->device->ops->axpby(hub->device, &args);
}

DTRAIN_NCCL__PRIVATE dtrain_result dtrain_nccl__wait(dtrain_work *base)
{
    dtrain_nccl__work *work = (dtrain_nccl__work *)base;
    dtrain_nccl__comm *comm = (dtrain_nccl__comm *)base->comm;
    dtrain_nccl__hub *hub = comm->hub;
    dtrain_result result = DTRAIN_OK;
    if (!comm->dead) {
        result = dtrain_nccl__wait_steps(comm, work);
        if (result != DTRAIN_OK)
            dtrain_nccl__fail(hub, result, "dtrain_work_wait: %s",
                              dtrain_nccl__strip_rank(hub, dtrain_last_error()));
    }
    const bool dead = comm->dead;
    dtrain_nccl__give_work(work);
    return dead ? dtrain_nccl__comm_error(comm) : DTRAIN_OK;
}

DTRAIN_NCCL__PRIVATE dtrain_result dtrain_nccl__test(dtrain_work *base, bool *done)
{
    dtrain_nccl__work *work = (dtrain_nccl__work *)base;
    dtrain_nccl__comm *comm = (dtrain_nccl__comm *)base->comm;
    dtrain_nccl__hub *hub = comm->hub;
    *done = true;
    if (comm->dead) return dtrain_nccl__comm_error(comm);
    DTRAIN_NCCL_TRY(dtrain_nccl__poll(hub, "dtrain_work_test"));
    DTRAIN_NCCL_TRY(dtrain_nccl__flush(hub));
    if (work->captured) return DTRAIN_OK; /* its event has no state; waiting orders the streams */
    if (hub->device->ops->event_query(hub->device, work->record->done, done) != DTRAIN_OK)
        return dtrain_nccl__fail(hub, DTRAIN_ERROR_SYSTEM, "dtrain_work_test: %s",
                                 dtrain_nccl__strip_rank(hub, dtrain_last_error()));
    if (*done) dtrain_nccl__mark_done(work);
    return DTRAIN_OK;
}

DTRAIN_NCCL__PRIVATE dtrain_result dtrain_nccl__fail_entry(dtrain_comm *base, dtrain_result code,
                                                           const char *text)
{
    dtrain_nccl__comm *comm = (dtrain_nccl__comm *)base;
    if (comm->dead) return dtrain_nccl__comm_error(comm);
    return dtrain_nccl__fail(comm->hub, code, "%s", dtrain_nccl__strip_rank(comm->hub, text));
}
