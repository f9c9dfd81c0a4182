/* Buffers in device memory: two hooks of the engine
 *
 * Ranks that share a GPU, or have GPUs and no NCCL, use a transport that moves host memory. Buffers
 * in device memory are copied to an image, which is page-locked host memory, and back:
 *
 *     compute stream  ..kernels | event            event wait | kernels..
 *     copy stream                 \ device -> image           / image -> device
 *     host                           copied_in: transport ..  copy_out
 *
 * A work keeps its image and events for the operations that use it later, so in the steady state
 * nothing is allocated. Operations are shown to other ranks in the order in which they were
 * started, each when its copy has ended. */

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

struct dtrain__bounce {
    dtrain_collective
        called; /* with the program's buffers; work->op.what has addresses in the image */
    dtrain_event *computed, *copied;
    char *image; /* page-locked, and mapped by the transport; it grows */
    size_t bytes;
};

static void dtrain__image_free(dtrain__engine *comm, dtrain__bounce *bounce)
{
    dtrain_device *device = comm->base.world->device;
    if (!bounce->image) return;
    if (device->ops->host_unregister) device->ops->host_unregister(device, bounce->image);
    comm->transport->unmap(&comm->base, bounce->image, bounce->bytes);
    bounce->image = NULL;
    bounce->bytes = 0;
}

/* Free what a work has for device memory. Nothing on the copy stream uses it any more. */
DTRAIN__PRIVATE void dtrain__bounce_free(dtrain__engine *comm, dtrain__work *work)
{
    dtrain_device *device = comm->base.world->device;
    dtrain__bounce *bounce = work->bounce;
    if (!bounce) return;
    dtrain__image_free(comm, bounce);
    if (bounce->computed) device->ops->event_destroy(device, bounce->computed);
    if (bounce->copied) device->ops->event_destroy(device, bounce->copied);
    dtrain__free(&comm->base.world->allocator, bounce, 1, sizeof *bounce);
    work->bounce = NULL;
}

static dtrain_result dtrain__bounce_make(dtrain__engine *comm, dtrain__work *work)
{
    dtrain_device *device = comm->base.world->device;
    work->bounce = (dtrain__bounce *)dtrain__alloc(&comm->base.world->allocator, 1,
                                                   sizeof *work->bounce, "an operation");
    if (!work->bounce) return DTRAIN_ERROR_MEMORY;
    dtrain_result result = DTRAIN__ORDER(device, event_create, &work->bounce->computed);
    if (result == DTRAIN_OK) result = DTRAIN__ORDER(device, event_create, &work->bounce->copied);
    if (result != DTRAIN_OK) dtrain__bounce_free(comm, work);
    return result;
}

/* Make the image larger, if it has to be. */
static dtrain_result dtrain__image_grow(dtrain__engine *comm, dtrain__bounce *bounce, size_t bytes)
{
    dtrain_device *device = comm->base.world->device;
    void *image;
    if (bytes <= bounce->bytes) return DTRAIN_OK;
    DTRAIN__TRY(device->ops->synchronize(device)); /* a copy from the old one may be queued */
    dtrain__image_free(comm, bounce);
    DTRAIN__TRY(comm->transport->map(&comm->base, bytes, &image));
    const dtrain_result locked =
        DTRAIN__ORDER(device, host_register, image, dtrain__round_up(bytes, dtrain__page_bytes()));
    if (locked != DTRAIN_OK) {
        comm->transport->unmap(&comm->base, image, bytes);
        return locked;
    }
    bounce->image = (char *)image;
    bounce->bytes = bytes;
    return DTRAIN_OK;
}

/* Replace the buffers of an operation that are in device memory by places in the image. Buffers
 * that overlap, in place, do so there too. */
static dtrain_result dtrain__image_take(dtrain__engine *comm, dtrain__work *work)
{
    dtrain_device *device = comm->base.world->device;
    dtrain_collective *what = &work->op.what;
    const uintptr_t from = (uintptr_t)what->send, to = (uintptr_t)what->recv;
    size_t send_bytes = 0, recv_bytes = 0, send_at = 0;
    if (what->send && !dtrain__on_host(device, what->send))
        send_bytes = dtrain__send_bytes(what, comm->base.size);
    if (what->recv && !dtrain__on_host(device, what->recv))
        recv_bytes = dtrain__recv_bytes(what, comm->base.size);
    size_t recv_at = dtrain__round_up(send_bytes, DTRAIN__CACHE_LINE);
    if (from < to + recv_bytes && to < from + send_bytes) {
        send_at = from > to ? from - to : 0;
        recv_at = to > from ? to - from : 0;
    }
    const size_t send_end = send_at + send_bytes, recv_end = recv_at + recv_bytes;
    DTRAIN__TRY(dtrain__image_grow(comm, work->bounce, send_end > recv_end ? send_end : recv_end));
    if (send_bytes) what->send = work->bounce->image + send_at;
    if (recv_bytes) what->recv = work->bounce->image + recv_at;
    return DTRAIN_OK;
}

/* Copy between a buffer and the image, on the copy stream, and then record `copied`. */
static dtrain_result dtrain__copy(dtrain__engine *comm, dtrain__bounce *bounce, void *to,
                                  const void *from, size_t bytes, dtrain_copy_kind kind)
{
    dtrain_device *device = comm->base.world->device;
    if (to != from) {
        comm->base.info.staged_bytes += bytes;
        DTRAIN__TRY(device->ops->copy_async(device, to, from, bytes, kind, comm->stream));
    }
    return DTRAIN__ORDER(device, event_record, bounce->copied, comm->stream);
}

/* Start the copy into the image, after everything that the compute stream has queued so far. */
DTRAIN__PRIVATE dtrain_result dtrain__copy_in(dtrain__engine *comm, dtrain__work *work)
{
    dtrain_device *device = comm->base.world->device;
    const dtrain_collective *what = &work->op.what;
    if (!work->bounce) DTRAIN__TRY(dtrain__bounce_make(comm, work));
    dtrain__bounce *bounce = work->bounce;
    bounce->called = *what;
    DTRAIN__TRY(dtrain__image_take(comm, work));
    DTRAIN__TRY(DTRAIN__ORDER(device, event_record, bounce->computed, NULL));
    DTRAIN__TRY(DTRAIN__ORDER(device, event_wait, bounce->computed, comm->stream));
    const bool gives = dtrain__gives(what, comm->base.rank);
    return dtrain__copy(comm, bounce, (void *)(uintptr_t)what->send,
                        gives ? bounce->called.send : what->send,
                        dtrain__send_bytes(what, comm->base.size), DTRAIN_COPY_DEVICE_TO_HOST);
}

/* Set *done to whether the copy into the image has ended. */
DTRAIN__PRIVATE dtrain_result dtrain__copied_in(dtrain__engine *comm, const dtrain__work *work,
                                                bool *done)
{
    dtrain_device *device = comm->base.world->device;
    *done = true;
    return DTRAIN__ORDER(device, event_query, work->bounce->copied, done);
}

/* Start the copy out of the image, when the transport is done. */
DTRAIN__PRIVATE dtrain_result dtrain__copy_out(dtrain__engine *comm, dtrain__work *work)
{
    const dtrain_collective *what = &work->op.what;
    const bool gets = dtrain__gets(what, comm->base.rank);
    return dtrain__copy(comm, work->bounce, gets ? work->bounce->called.recv : what->recv,
                        what->recv, dtrain__recv_bytes(what, comm->base.size),
                        DTRAIN_COPY_HOST_TO_DEVICE);
}

/* Let what the compute stream gets from now on wait for the copy out of the image. */
DTRAIN__PRIVATE dtrain_result dtrain__after_copy_out(dtrain__engine *comm, dtrain__work *work)
{
    dtrain_device *device = comm->base.world->device;
    return DTRAIN__ORDER(device, event_wait, work->bounce->copied, NULL);
}
