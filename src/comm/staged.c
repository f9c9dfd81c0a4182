/* Buffers in device memory: two hooks of the engine
 *
 * Ranks that share a GPU, or have GPUs and no NCCL, use a transport that moves host memory: what is
 * in device memory is copied through page-locked memory on the way in and out.
 *
 *     compute stream  ..kernels | event            event wait | kernels..
 *     copy stream                 \ device -> image           / image -> device
 *     host                           copied_in: transport ..  copy_out
 *
 * Memory from dtrain_comm_alloc is device memory with a twin that the transport has mapped, its
 * image at the same offsets; other device memory gets an image of its operation's own. Operations
 * are shown to other ranks in the order they were started, each when its copy has ended. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/result.h"
#include "world/world_internal.h"
#include "comm/backend.h"
#include "comm/comm.h"
#include "comm/comm_internal.h"
#include "comm/engine_internal.h"
#include "device/backend.h"
#include "device/device.h"
#include "device/device_internal.h"

typedef struct dtrain__twin {
    struct dtrain__twin *next;
    char *device, *image;
    size_t bytes;
} dtrain__twin;

/* What an operation on device memory holds from its start until its handle is given back. */
struct dtrain__bounce {
    struct dtrain__bounce *next, *next_made; /* among the idle; of all */
    dtrain_collective called;                /* the host's buffers; work->what has the images */
    dtrain_event *computed, *copied;
    char *image[2]; /* of buffers that have no twin: send, recv; they grow */
    size_t image_bytes[2];
};

struct dtrain__staging {
    dtrain_device *device;
    dtrain_stream *stream; /* of copies */
    dtrain__twin *twins;
    dtrain__bounce *idle, *made;
};

/* ---- Memory -----------------------------------------------------------------------------------*/

/* Map page-locked memory that the transport reaches without a copy. */
static dtrain_result dtrain__image_alloc(dtrain__engine *comm, size_t bytes, char **out)
{
    dtrain_device *device = comm->staging->device;
    void *memory;
    DTRAIN__TRY(comm->transport->map(comm, bytes, &memory));
    const size_t pages = dtrain__round_up(bytes ? bytes : 1, dtrain__page_bytes());
    const dtrain_result result = DTRAIN__ORDER(device, host_register, memory, pages);
    if (result == DTRAIN_OK) *out = (char *)memory;
    else comm->transport->unmap(comm, memory);
    return result;
}

static void dtrain__image_free(dtrain__engine *comm, char *memory)
{
    if (!memory) return;
    dtrain_device *device = comm->staging->device;
    if (device->ops->host_unregister) device->ops->host_unregister(device, memory);
    comm->transport->unmap(comm, memory);
}

DTRAIN__PRIVATE dtrain_result dtrain__twin_alloc(dtrain__engine *comm, size_t bytes, void **out)
{
    const dtrain_allocator *allocator = &comm->base.world->allocator;
    dtrain_device *device = comm->staging->device;
    void *memory = NULL;
    dtrain__twin *twin =
        (dtrain__twin *)dtrain__alloc(allocator, 1, sizeof *twin, "communicator memory");
    if (!twin) return DTRAIN_ERROR_MEMORY;
    twin->bytes = bytes;
    dtrain_result result = device->ops->alloc(device, bytes, &memory);
    if (result == DTRAIN_OK) result = device->ops->zero(device, memory, bytes);
    if (result == DTRAIN_OK) result = dtrain__image_alloc(comm, bytes, &twin->image);
    if (result != DTRAIN_OK) {
        if (memory) device->ops->free(device, memory, bytes);
        dtrain__free(allocator, twin, 1, sizeof *twin);
        return result;
    }
    twin->device = (char *)memory;
    twin->next = comm->staging->twins;
    comm->staging->twins = twin;
    *out = memory;
    return DTRAIN_OK;
}

DTRAIN__PRIVATE void dtrain__twin_free(dtrain__engine *comm, void *memory)
{
    dtrain_device *device = comm->staging->device;
    for (dtrain__twin **link = &comm->staging->twins; *link; link = &(*link)->next) {
        dtrain__twin *twin = *link;
        if (twin->device != memory) continue;
        *link = twin->next;
        device->ops->free(device, memory, twin->bytes);
        dtrain__image_free(comm, twin->image);
        dtrain__free(&comm->base.world->allocator, twin, 1, sizeof *twin);
        return;
    }
}

/* ---- Images of an operation's buffers ---------------------------------------------------------*/

static char *dtrain__twin_image(const dtrain__staging *staging, const void *memory)
{
    const uintptr_t at = (uintptr_t)memory;
    for (const dtrain__twin *twin = staging->twins; twin; twin = twin->next) {
        const uintptr_t begin = (uintptr_t)twin->device;
        if (at >= begin && at - begin < twin->bytes) return twin->image + (at - begin);
    }
    return NULL;
}

/* Host memory is its own image. */
static dtrain_result dtrain__image_of(dtrain__engine *comm, dtrain__bounce *bounce, int which,
                                      const void *memory, size_t bytes, char **out)
{
    dtrain_device *device = comm->staging->device;
    const bool on_device = memory && !dtrain__on_host(device, memory);
    *out = on_device ? dtrain__twin_image(comm->staging, memory) : (char *)(uintptr_t)memory;
    if (*out || !memory) return DTRAIN_OK;
    if (bytes > bounce->image_bytes[which]) {
        /* a copy out of the smaller one may still be queued */
        DTRAIN__TRY(device->ops->synchronize(device));
        dtrain__image_free(comm, bounce->image[which]);
        bounce->image[which] = NULL;
        bounce->image_bytes[which] = 0;
        DTRAIN__TRY(dtrain__image_alloc(comm, bytes, &bounce->image[which]));
        bounce->image_bytes[which] = bytes;
    }
    *out = bounce->image[which];
    return DTRAIN_OK;
}

/* Replace the buffers of an operation by their images. In place, the smaller buffer lies inside the
 * larger one: so must its image. */
static dtrain_result dtrain__images(dtrain__engine *comm, dtrain__work *work)
{
    dtrain__bounce *bounce = work->bounce;
    const dtrain_collective *what = &bounce->called;
    const size_t unit = dtrain_dtype_bytes(what->dtype);
    const size_t send_bytes = dtrain__send_count(what, comm->base.size) * unit;
    const size_t recv_bytes = dtrain__recv_count(what, comm->base.size) * unit;
    const uintptr_t from = (uintptr_t)what->send, to = (uintptr_t)what->recv;
    char *send = NULL, *recv = NULL;
    if (what->recv && from >= to && from + send_bytes <= to + recv_bytes) {
        DTRAIN__TRY(dtrain__image_of(comm, bounce, 1, what->recv, recv_bytes, &recv));
        send = recv ? recv + (from - to) : NULL;
    } else if (what->send && to >= from && to + recv_bytes <= from + send_bytes) {
        DTRAIN__TRY(dtrain__image_of(comm, bounce, 0, what->send, send_bytes, &send));
        recv = send ? send + (to - from) : NULL;
    } else {
        DTRAIN__TRY(dtrain__image_of(comm, bounce, 0, what->send, send_bytes, &send));
        DTRAIN__TRY(dtrain__image_of(comm, bounce, 1, what->recv, recv_bytes, &recv));
    }
    work->what.send = send;
    work->what.recv = recv;
    return DTRAIN_OK;
}

static void dtrain__bounce_destroy(dtrain__engine *comm, dtrain__bounce *bounce)
{
    dtrain_device *device = comm->staging->device;
    for (int i = 0; i < 2; i++) dtrain__image_free(comm, bounce->image[i]);
    if (bounce->computed) device->ops->event_destroy(device, bounce->computed);
    if (bounce->copied) device->ops->event_destroy(device, bounce->copied);
    dtrain__free(&comm->base.world->allocator, bounce, 1, sizeof *bounce);
}

static dtrain_result dtrain__bounce_take(dtrain__engine *comm, dtrain__bounce **out)
{
    dtrain__staging *staging = comm->staging;
    dtrain_device *device = staging->device;
    *out = staging->idle;
    if (*out) {
        staging->idle = (*out)->next;
        return DTRAIN_OK;
    }
    dtrain__bounce *bounce = (dtrain__bounce *)dtrain__alloc(&comm->base.world->allocator, 1,
                                                             sizeof *bounce, "an operation");
    if (!bounce) return DTRAIN_ERROR_MEMORY;
    if (DTRAIN__ORDER(device, event_create, &bounce->computed) != DTRAIN_OK ||
        DTRAIN__ORDER(device, event_create, &bounce->copied) != DTRAIN_OK) {
        dtrain__bounce_destroy(comm, bounce);
        return DTRAIN_ERROR_MEMORY;
    }
    bounce->next_made = staging->made;
    staging->made = bounce;
    *out = bounce;
    return DTRAIN_OK;
}

DTRAIN__PRIVATE void dtrain__bounce_return(dtrain__engine *comm, dtrain__work *work)
{
    work->bounce->next = comm->staging->idle;
    comm->staging->idle = work->bounce;
}

/* ---- Copies -----------------------------------------------------------------------------------*/

/* Whether this rank reads its send buffer, and whether it writes its recv buffer. */
static bool dtrain__gives(const dtrain_comm *comm, const dtrain_collective *what)
{
    if (what->kind == DTRAIN_COLLECTIVE_RECV || what->kind == DTRAIN_COLLECTIVE_BARRIER)
        return false;
    return what->kind != DTRAIN_COLLECTIVE_BROADCAST || what->root == comm->rank;
}
static bool dtrain__gets(const dtrain_comm *comm, const dtrain_collective *what)
{
    if (what->kind == DTRAIN_COLLECTIVE_SEND || what->kind == DTRAIN_COLLECTIVE_BARRIER)
        return false;
    if (what->kind == DTRAIN_COLLECTIVE_BROADCAST) return what->root != comm->rank;
    return what->kind != DTRAIN_COLLECTIVE_REDUCE || what->root == comm->rank;
}

static dtrain_result dtrain__copy(dtrain__engine *comm, void *to, const void *from, size_t count,
                                  dtrain_dtype dtype, dtrain_copy_kind kind)
{
    const size_t bytes = count * dtrain_dtype_bytes(dtype);
    comm->base.info.staged_bytes += bytes;
    return comm->staging->device->ops->copy_async(comm->staging->device, to, from, bytes, kind,
                                                  comm->staging->stream);
}

/* Start the way in. The copy stream takes its turn after everything that compute has queued so
 * far. */
DTRAIN__PRIVATE dtrain_result dtrain__copy_in(dtrain__engine *comm, dtrain__work *work)
{
    const dtrain__staging *staging = comm->staging;
    DTRAIN__TRY(dtrain__bounce_take(comm, &work->bounce));
    dtrain__bounce *bounce = work->bounce;
    const dtrain_collective *called = &bounce->called;
    bounce->called = work->what;
    DTRAIN__TRY(dtrain__images(comm, work));
    DTRAIN__TRY(DTRAIN__ORDER(staging->device, event_record, bounce->computed, NULL));
    DTRAIN__TRY(DTRAIN__ORDER(staging->device, event_wait, bounce->computed, staging->stream));
    if (dtrain__gives(&comm->base, called) && work->what.send != called->send)
        DTRAIN__TRY(dtrain__copy(comm, (void *)(uintptr_t)work->what.send, called->send,
                                 dtrain__send_count(called, comm->base.size), called->dtype,
                                 DTRAIN_COPY_DEVICE_TO_HOST));
    return DTRAIN__ORDER(staging->device, event_record, bounce->copied, staging->stream);
}

DTRAIN__PRIVATE bool dtrain__copied_in(dtrain__engine *comm, const dtrain__work *work)
{
    dtrain_device *device = comm->staging->device;
    bool done = true;
    const dtrain_result result = DTRAIN__ORDER(device, event_query, work->bounce->copied, &done);
    if (result != DTRAIN_OK) (void)dtrain__engine_fail(&comm->base, result, dtrain_last_error());
    return done;
}

/* Start the way out, when the transport is done. */
DTRAIN__PRIVATE dtrain_result dtrain__copy_out(dtrain__engine *comm, dtrain__work *work)
{
    const dtrain__staging *staging = comm->staging;
    const dtrain_collective *called = &work->bounce->called;
    if (dtrain__gets(&comm->base, called) && work->what.recv != called->recv)
        DTRAIN__TRY(dtrain__copy(comm, called->recv, work->what.recv,
                                 dtrain__recv_count(called, comm->base.size), called->dtype,
                                 DTRAIN_COPY_HOST_TO_DEVICE));
    return DTRAIN__ORDER(staging->device, event_record, work->bounce->copied, staging->stream);
}

/* Let what compute queues from now on come after the way out. */
DTRAIN__PRIVATE dtrain_result dtrain__after_copy_out(dtrain__engine *comm, dtrain__work *work)
{
    dtrain_device *device = comm->staging->device;
    return DTRAIN__ORDER(device, event_wait, work->bounce->copied, NULL);
}

/* One rank: the copy, if any, is on the compute stream. */
DTRAIN__PRIVATE dtrain_result dtrain__staged_alone(dtrain__engine *comm,
                                                   const dtrain_collective *what)
{
    dtrain_device *device = comm->staging->device;
    const size_t bytes = what->count * dtrain_dtype_bytes(what->dtype);
    const bool from = !dtrain__on_host(device, what->send);
    const bool to = !dtrain__on_host(device, what->recv);
    if (!from && !to) memcpy(what->recv, what->send, bytes);
    if (!from && !to) return DTRAIN_OK;
    return device->ops->copy(device, what->recv, what->send, bytes,
                             from && to ? DTRAIN_COPY_DEVICE_TO_DEVICE
                             : from     ? DTRAIN_COPY_DEVICE_TO_HOST
                                        : DTRAIN_COPY_HOST_TO_DEVICE);
}

/* ---- Life -------------------------------------------------------------------------------------*/

DTRAIN__PRIVATE dtrain_result dtrain__staging_create(dtrain__engine *comm)
{
    dtrain_world *world = comm->base.world;
    dtrain__staging *staging =
        (dtrain__staging *)dtrain__alloc(&world->allocator, 1, sizeof *staging, "a communicator");
    if (!staging) return DTRAIN_ERROR_MEMORY;
    comm->staging = staging;
    staging->device = world->device;
    return DTRAIN__ORDER(world->device, stream_create, true, &staging->stream);
}

DTRAIN__PRIVATE void dtrain__staging_destroy(dtrain__engine *comm)
{
    dtrain__staging *staging = comm->staging;
    dtrain_device *device = staging->device;
    device->ops->synchronize(device); /* copies into memory that goes away */
    while (staging->made) {
        dtrain__bounce *bounce = staging->made;
        staging->made = bounce->next_made;
        dtrain__bounce_destroy(comm, bounce);
    }
    while (staging->twins) dtrain__twin_free(comm, staging->twins->device);
    if (staging->stream) device->ops->stream_destroy(device, staging->stream);
    dtrain__free(&comm->base.world->allocator, staging, 1, sizeof *staging);
    comm->staging = NULL;
}
