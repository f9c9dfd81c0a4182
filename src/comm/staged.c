/* Device buffers: the staged backend
 *
 * Ranks that share a GPU, or have GPUs and no NCCL, meet in the local backend all the same: what is
 * in device memory is copied through page-locked shared memory on the way in and out.
 *
 *     compute stream  ..kernels | event            event wait | kernels..
 *     copy stream                 \ device -> image           / image -> device
 *     host                                     local operation
 *
 * Memory from dtrain_comm_alloc is device memory with a twin in the shared arena, its image at the
 * same offsets; other device memory gets an image of its operation's own. Operations enter the
 * local backend in the order they were started, each when its copy has landed. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/log.h"
#include "core/result.h"
#include "world/world_internal.h"
#include "comm/backend.h"
#include "comm/comm.h"
#include "comm/comm_internal.h"
#include "comm/local_internal.h"
#include "comm/staged_internal.h"
#include "device/backend.h"
#include "device/device.h"

enum { DTRAIN__COPYING_IN, DTRAIN__MEETING, DTRAIN__COPIED_OUT };

/* Page-locked memory that every rank of the machine can read. */
static dtrain_result dtrain__image_alloc(dtrain__staged_comm *comm, size_t bytes, char **out)
{
    void *memory;
    DTRAIN__TRY(comm->inner->ops->alloc(comm->inner, bytes, &memory));
    const size_t pages = dtrain__round_up(bytes ? bytes : 1, dtrain__page_bytes());
    const dtrain_result result = comm->device->ops->host_register(comm->device, memory, pages);
    if (result == DTRAIN_OK) *out = (char *)memory;
    else comm->inner->ops->free(comm->inner, memory, bytes);
    return result;
}

static void dtrain__image_free(dtrain__staged_comm *comm, char *memory, size_t bytes)
{
    if (!memory) return;
    comm->device->ops->host_unregister(comm->device, memory);
    comm->inner->ops->free(comm->inner, memory, bytes);
}

static dtrain_result dtrain__staged_alloc(dtrain_comm *base, size_t bytes, void **out)
{
    dtrain__staged_comm *comm = (dtrain__staged_comm *)base;
    const dtrain_allocator *allocator = &base->world->allocator;
    void *memory = NULL;
    dtrain__twin *twin =
        (dtrain__twin *)dtrain__alloc(allocator, 1, sizeof *twin, "communicator memory");
    if (!twin) return DTRAIN_ERROR_MEMORY;
    twin->bytes = bytes;
    dtrain_result result = comm->device->ops->alloc(comm->device, bytes, &memory);
    if (result == DTRAIN_OK) result = comm->device->ops->zero(comm->device, memory, bytes);
    if (result == DTRAIN_OK) result = dtrain__image_alloc(comm, bytes, &twin->image);
    if (result != DTRAIN_OK) {
        if (memory) comm->device->ops->free(comm->device, memory, bytes);
        dtrain__free(allocator, twin, 1, sizeof *twin);
        return result;
    }
    twin->device = (char *)memory;
    twin->next = comm->twins;
    comm->twins = twin;
    *out = memory;
    return DTRAIN_OK;
}

static void dtrain__staged_free(dtrain_comm *base, void *memory, size_t bytes)
{
    dtrain__staged_comm *comm = (dtrain__staged_comm *)base;
    (void)bytes; /* the twin knows */
    for (dtrain__twin **link = &comm->twins; *link; link = &(*link)->next) {
        dtrain__twin *twin = *link;
        if (twin->device != memory) continue;
        *link = twin->next;
        comm->device->ops->free(comm->device, memory, twin->bytes);
        dtrain__image_free(comm, twin->image, twin->bytes);
        dtrain__free(&base->world->allocator, twin, 1, sizeof *twin);
        return;
    }
}

/* ---- Images of an operation's buffers ---------------------------------------------------------*/

static char *dtrain__twin_image(const dtrain__staged_comm *comm, const void *memory)
{
    const uintptr_t at = (uintptr_t)memory;
    for (const dtrain__twin *twin = comm->twins; twin; twin = twin->next) {
        const uintptr_t begin = (uintptr_t)twin->device;
        if (at >= begin && at - begin < twin->bytes) return twin->image + (at - begin);
    }
    return NULL;
}

/* Host memory is its own image. */
static dtrain_result dtrain__image_of(dtrain__staged_comm *comm, dtrain__staged_work *work,
                                      int which, const void *memory, size_t bytes, char **out)
{
    const bool on_device = memory && comm->device->ops->is_device_memory(comm->device, memory);
    *out = on_device ? dtrain__twin_image(comm, memory) : (char *)(uintptr_t)memory;
    if (*out || !memory) return DTRAIN_OK;
    if (bytes > work->stage_bytes[which]) {
        /* a copy out of the smaller one may still be queued */
        DTRAIN__TRY(comm->device->ops->synchronize(comm->device));
        dtrain__image_free(comm, work->stage[which], work->stage_bytes[which]);
        work->stage[which] = NULL;
        work->stage_bytes[which] = 0;
        DTRAIN__TRY(dtrain__image_alloc(comm, bytes, &work->stage[which]));
        work->stage_bytes[which] = bytes;
    }
    *out = work->stage[which];
    return DTRAIN_OK;
}

/* In place, the smaller buffer lies inside the larger one: so must its image. */
static dtrain_result dtrain__images(dtrain__staged_comm *comm, dtrain__staged_work *work)
{
    const dtrain_collective *what = &work->what;
    const size_t unit = dtrain_dtype_bytes(what->dtype);
    const size_t send_bytes = dtrain__send_count(what, comm->base.size) * unit;
    const size_t recv_bytes = dtrain__recv_count(what, comm->base.size) * unit;
    const uintptr_t from = (uintptr_t)what->send, to = (uintptr_t)what->recv;
    char *send = NULL, *recv = NULL;
    if (what->recv && from >= to && from + send_bytes <= to + recv_bytes) {
        DTRAIN__TRY(dtrain__image_of(comm, work, 1, what->recv, recv_bytes, &recv));
        send = recv ? recv + (from - to) : NULL;
    } else if (what->send && to >= from && to + recv_bytes <= from + send_bytes) {
        DTRAIN__TRY(dtrain__image_of(comm, work, 0, what->send, send_bytes, &send));
        recv = send ? send + (to - from) : NULL;
    } else {
        DTRAIN__TRY(dtrain__image_of(comm, work, 0, what->send, send_bytes, &send));
        DTRAIN__TRY(dtrain__image_of(comm, work, 1, what->recv, recv_bytes, &recv));
    }
    work->image = *what;
    work->image.send = send;
    work->image.recv = recv;
    return DTRAIN_OK;
}

/* ---- Progress ---------------------------------------------------------------------------------*/

static bool dtrain__staged_reads(const dtrain_comm *comm, const dtrain_collective *what)
{
    if (what->kind == DTRAIN_COLLECTIVE_RECV || what->kind == DTRAIN_COLLECTIVE_BARRIER)
        return false;
    return what->kind != DTRAIN_COLLECTIVE_BROADCAST || what->root == comm->rank;
}
static bool dtrain__staged_writes(const dtrain_comm *comm, const dtrain_collective *what)
{
    if (what->kind == DTRAIN_COLLECTIVE_SEND || what->kind == DTRAIN_COLLECTIVE_BARRIER)
        return false;
    if (what->kind == DTRAIN_COLLECTIVE_BROADCAST) return what->root != comm->rank;
    return what->kind != DTRAIN_COLLECTIVE_REDUCE || what->root == comm->rank;
}

/* The copy stream takes its turn after everything that compute has queued so far. */
static dtrain_result dtrain__staged_copy_in(dtrain__staged_comm *comm, dtrain__staged_work *work)
{
    const dtrain_device_ops *ops = comm->device->ops;
    const size_t bytes =
        dtrain__send_count(&work->what, comm->base.size) * dtrain_dtype_bytes(work->what.dtype);
    DTRAIN__TRY(ops->event_record(comm->device, work->computed, NULL));
    DTRAIN__TRY(ops->event_wait(comm->device, work->computed, comm->stream));
    if (dtrain__staged_reads(&comm->base, &work->what) && work->image.send != work->what.send) {
        DTRAIN__TRY(ops->copy_async(comm->device, (void *)(uintptr_t)work->image.send,
                                    work->what.send, bytes, DTRAIN_COPY_DEVICE_TO_HOST,
                                    comm->stream));
        comm->base.info.staged_bytes += bytes;
    }
    return ops->event_record(comm->device, work->copied, comm->stream);
}

static dtrain_result dtrain__staged_copy_out(dtrain__staged_comm *comm, dtrain__staged_work *work)
{
    const dtrain_device_ops *ops = comm->device->ops;
    const size_t bytes =
        dtrain__recv_count(&work->what, comm->base.size) * dtrain_dtype_bytes(work->what.dtype);
    if (dtrain__staged_writes(&comm->base, &work->what) && work->image.recv != work->what.recv) {
        DTRAIN__TRY(ops->copy_async(comm->device, work->what.recv, work->image.recv, bytes,
                                    DTRAIN_COPY_HOST_TO_DEVICE, comm->stream));
        comm->base.info.staged_bytes += bytes;
    }
    return ops->event_record(comm->device, work->copied, comm->stream);
}

/* Nothing in flight will be finished. */
static dtrain_result dtrain__staged_fail(dtrain_comm *base, dtrain_result code, const char *text)
{
    dtrain__staged_comm *comm = (dtrain__staged_comm *)base;
    comm->failed = true;
    comm->queue = NULL;
    base->in_flight = 0;
    return comm->inner->ops->fail(comm->inner, code, text);
}

static dtrain_result dtrain__staged_standing(dtrain__staged_comm *comm)
{
    return dtrain__staged_fail(&comm->base, DTRAIN_ERROR_PEER, "the communicator has failed");
}

/* Waits for the local operation (which knows whom to name when it takes too long) and starts the
 * way back; the work leaves the queue. */
static dtrain_result dtrain__staged_leave(dtrain__staged_comm *comm, dtrain__staged_work *work)
{
    dtrain__staged_work **link = &comm->queue;
    dtrain_work *inner = work->inner;
    work->inner = NULL;
    DTRAIN__TRY(comm->inner->ops->wait(inner));
    DTRAIN__TRY(dtrain__staged_copy_out(comm, work));
    while (*link != work) link = &(*link)->next;
    *link = work->next;
    work->state = DTRAIN__COPIED_OUT;
    comm->base.in_flight--;
    return DTRAIN_OK;
}

/* As far as one operation can go without waiting; *entered says whether the next may follow. */
static dtrain_result dtrain__staged_move(dtrain__staged_comm *comm, dtrain__staged_work *work,
                                         bool *entered)
{
    bool done;
    if (work->state == DTRAIN__COPYING_IN) {
        *entered = false;
        DTRAIN__TRY(comm->device->ops->event_query(comm->device, work->copied, &done));
        if (!done) return DTRAIN_OK;
        DTRAIN__TRY(comm->inner->ops->start(comm->inner, &work->image, &work->inner));
        work->state = DTRAIN__MEETING;
    }
    *entered = true;
    DTRAIN__TRY(comm->inner->ops->test(work->inner, &done));
    return done ? dtrain__staged_leave(comm, work) : DTRAIN_OK;
}

/* The first error ends all operations. */
static dtrain_result dtrain__staged_advance(dtrain__staged_comm *comm)
{
    bool entered = true;
    for (dtrain__staged_work *work = comm->queue, *next; work && entered; work = next) {
        next = work->next;
        const dtrain_result result = dtrain__staged_move(comm, work, &entered);
        if (result != DTRAIN_OK)
            return dtrain__staged_fail(&comm->base, result, dtrain_last_error());
    }
    return DTRAIN_OK;
}

static dtrain_result dtrain__staged_advance_all(dtrain__staged_comm *waiting)
{
    dtrain__staged_comm *comm = waiting->base.world->staged;
    for (; comm; comm = comm->next)
        if (comm != waiting && comm->queue) dtrain__staged_advance(comm); /* keeps its own error */
    return waiting->failed ? dtrain__staged_standing(waiting) : dtrain__staged_advance(waiting);
}

/* ---- Operations -------------------------------------------------------------------------------*/

static void dtrain__staged_work_destroy(dtrain__staged_comm *comm, dtrain__staged_work *work)
{
    const dtrain_device_ops *ops = comm->device->ops;
    for (int i = 0; i < 2; i++) dtrain__image_free(comm, work->stage[i], work->stage_bytes[i]);
    if (work->computed) ops->event_destroy(comm->device, work->computed);
    if (work->copied) ops->event_destroy(comm->device, work->copied);
    dtrain__free(&comm->base.world->allocator, work, 1, sizeof *work);
}

static dtrain__staged_work *dtrain__staged_work_make(dtrain__staged_comm *comm)
{
    const dtrain_device_ops *ops = comm->device->ops;
    dtrain__staged_work *work = (dtrain__staged_work *)dtrain__alloc(
        &comm->base.world->allocator, 1, sizeof *work, "an operation");
    if (!work) return NULL;
    work->base.comm = &comm->base;
    if (ops->event_create(comm->device, false, &work->computed) != DTRAIN_OK ||
        ops->event_create(comm->device, false, &work->copied) != DTRAIN_OK) {
        dtrain__staged_work_destroy(comm, work);
        return NULL;
    }
    work->next_made = comm->made;
    comm->made = work;
    return work;
}

static dtrain_result dtrain__staged_enqueue(dtrain__staged_comm *comm, dtrain__staged_work *work)
{
    dtrain__staged_work **link = &comm->queue;
    work->next = NULL;
    work->inner = NULL;
    work->state = DTRAIN__COPYING_IN;
    DTRAIN__TRY(dtrain__images(comm, work));
    DTRAIN__TRY(dtrain__staged_copy_in(comm, work));
    while (*link) link = &(*link)->next;
    *link = work;
    comm->base.in_flight++;
    return DTRAIN_OK;
}

/* One rank: the result is what it sends. There is no handle to wait for: the copy, if any, is on
 * the compute stream. */
static dtrain_result dtrain__staged_alone(dtrain__staged_comm *comm, const dtrain_collective *what,
                                          dtrain_work **out)
{
    dtrain_device *device = comm->device;
    const size_t bytes = what->count * dtrain_dtype_bytes(what->dtype);
    *out = NULL;
    if (what->send == what->recv || bytes == 0) return DTRAIN_OK;
    const bool from = device->ops->is_device_memory(device, what->send);
    const bool to = device->ops->is_device_memory(device, what->recv);
    if (!from && !to) memcpy(what->recv, what->send, bytes);
    if (!from && !to) return DTRAIN_OK;
    return device->ops->copy(device, what->recv, what->send, bytes,
                             from && to ? DTRAIN_COPY_DEVICE_TO_DEVICE
                             : from     ? DTRAIN_COPY_DEVICE_TO_HOST
                                        : DTRAIN_COPY_HOST_TO_DEVICE);
}

static dtrain_result dtrain__staged_start(dtrain_comm *base, const dtrain_collective *what,
                                          dtrain_work **out)
{
    dtrain__staged_comm *comm = (dtrain__staged_comm *)base;
    if (comm->failed) return dtrain__staged_standing(comm);
    if (base->size == 1) return dtrain__staged_alone(comm, what, out);
    dtrain__staged_work *work = comm->idle ? comm->idle : dtrain__staged_work_make(comm);
    if (!work) return dtrain__staged_fail(base, DTRAIN_ERROR_MEMORY, dtrain_last_error());
    if (work == comm->idle) comm->idle = work->next;
    work->what = *what;
    const dtrain_result result = dtrain__staged_enqueue(comm, work);
    if (result != DTRAIN_OK) {
        work->next = comm->idle;
        comm->idle = work;
        return dtrain__staged_fail(base, result, dtrain_last_error());
    }
    base->outstanding++;
    *out = &work->base;
    return DTRAIN_OK;
}

static dtrain_result dtrain__staged_arrive(dtrain__staged_comm *comm, dtrain__staged_work *work)
{
    dtrain__wait wait = dtrain__wait_begin();
    for (;;) {
        DTRAIN__TRY(dtrain__staged_advance_all(comm));
        if (work->state != DTRAIN__COPYING_IN) break;
        /* a dead rank is the local backend's to report */
        if (dtrain__wait_turn(comm->base.world, &wait) == DTRAIN_ERROR_TIMEOUT)
            return dtrain_fail(DTRAIN_ERROR_TIMEOUT,
                               "the device did not finish the work before a collective in %.1f s",
                               1e-9 * (double)comm->base.world->timeout_ns);
    }
    if (work->state == DTRAIN__MEETING) DTRAIN__TRY(dtrain__staged_leave(comm, work));
    return comm->device->ops->event_wait(comm->device, work->copied, NULL);
}

static dtrain_result dtrain__staged_wait(dtrain_work *base)
{
    dtrain__staged_work *work = (dtrain__staged_work *)base;
    dtrain__staged_comm *comm = (dtrain__staged_comm *)base->comm;
    dtrain_result result = dtrain__staged_arrive(comm, work);
    if (result != DTRAIN_OK) {
        result = dtrain__staged_fail(&comm->base, result, dtrain_last_error());
        if (work->inner) comm->inner->ops->wait(work->inner); /* gives the handle back */
    }
    work->inner = NULL;
    work->next = comm->idle;
    comm->idle = work;
    comm->base.outstanding--;
    return result;
}

static dtrain_result dtrain__staged_test(dtrain_work *base, bool *done)
{
    dtrain__staged_work *work = (dtrain__staged_work *)base;
    const dtrain_result result = dtrain__staged_advance_all((dtrain__staged_comm *)work->base.comm);
    *done = result != DTRAIN_OK || work->state == DTRAIN__COPIED_OUT;
    return result;
}

/* ---- Life -------------------------------------------------------------------------------------*/

DTRAIN__PRIVATE void dtrain__staged_release(dtrain__staged_comm *comm)
{
    dtrain_world *world = comm->base.world;
    const dtrain_allocator allocator = world->allocator;
    dtrain__staged_comm **link = &world->staged;
    comm->device->ops->synchronize(comm->device); /* copies into memory that goes away */
    while (*link != comm) link = &(*link)->next;
    *link = comm->next;
    while (comm->made) {
        dtrain__staged_work *work = comm->made;
        comm->made = work->next_made;
        dtrain__staged_work_destroy(comm, work);
    }
    while (comm->twins) dtrain__staged_free(&comm->base, comm->twins->device, comm->twins->bytes);
    if (comm->stream) comm->device->ops->stream_destroy(comm->device, comm->stream);
    dtrain__free(&allocator, comm, 1, sizeof *comm);
}

static dtrain_result dtrain__staged_destroy(dtrain_comm *base)
{
    dtrain_comm *inner = ((dtrain__staged_comm *)base)->inner;
    dtrain__staged_release((dtrain__staged_comm *)base);
    return inner->ops->destroy(inner);
}

static dtrain_result dtrain__staged_split(dtrain_comm *base, int color, int key, dtrain_comm **out);

static const dtrain_comm_ops dtrain__staged_ops = {DTRAIN_COMM_ABI,
                                                   false,
                                                   "staged",
                                                   dtrain__staged_create,
                                                   dtrain__staged_start,
                                                   dtrain__staged_test,
                                                   dtrain__staged_wait,
                                                   dtrain__staged_alloc,
                                                   dtrain__staged_free,
                                                   dtrain__staged_split,
                                                   dtrain__staged_fail,
                                                   dtrain__staged_destroy};

static dtrain_result dtrain__staged_wrap(dtrain_world *world, dtrain_comm *inner, dtrain_comm **out)
{
    dtrain__staged_comm *comm =
        (dtrain__staged_comm *)dtrain__alloc(&world->allocator, 1, sizeof *comm, "a communicator");
    if (!comm) return DTRAIN_ERROR_MEMORY;
    comm->base.ops = &dtrain__staged_ops;
    comm->base.world = world;
    comm->base.rank = inner->rank;
    comm->base.size = inner->size;
    comm->base.world_ranks = inner->world_ranks;
    comm->inner = inner;
    comm->device = world->device;
    comm->next = world->staged;
    world->staged = comm;
    const dtrain_result result =
        comm->device->ops->stream_create(comm->device, true, &comm->stream);
    if (result == DTRAIN_OK) *out = &comm->base;
    else dtrain__staged_release(comm);
    return result;
}

DTRAIN__PRIVATE dtrain_result dtrain__staged_create(dtrain_world *world, dtrain_comm **out)
{
    dtrain_comm *inner;
    DTRAIN__TRY(dtrain__local_world_comm(world, &inner));
    return dtrain__staged_wrap(world, inner, out);
}

static dtrain_result dtrain__staged_split(dtrain_comm *base, int color, int key, dtrain_comm **out)
{
    dtrain__staged_comm *comm = (dtrain__staged_comm *)base;
    dtrain_comm *inner;
    DTRAIN__TRY(comm->inner->ops->split(comm->inner, color, key, &inner));
    *out = NULL;
    return inner ? dtrain__staged_wrap(base->world, inner, out) : DTRAIN_OK;
}
