/* Buffers in device memory: two hooks of the engine
 *
 * Ranks that share a GPU, or have GPUs without NCCL, use a transport that moves host memory.
 * Buffers in device memory are copied to an image in page-locked host memory, and back:
 *
 *     compute stream  ..kernels | event            event wait | kernels..
 *     copy stream                 \ device -> image           / image -> device
 *     host                           copied_in: transport ..  copy_out
 *
 * A work keeps its image and events for its later operations, so the steady state allocates
 * nothing. Operations are shown to other ranks in the order of their starts, each when its copy has
 * ended. */

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

static void dtrain__image_free(dtrain__engine *comm, dtrain__bounce *bounce)
{
    dtrain_device *device = comm->base.world->device;
    if (!bounce->image) return;
    if (device->ops->host_unregister) device->ops->host_unregister(device, bounce->image);
    comm->transport->unmap(&comm->base, bounce->image, bounce->bytes);
    bounce->image = NULL;
    bounce->bytes = 0;
}

/* Free the bounce buffer of a work, which no copy uses any more. */
DTRAIN__PRIVATE void dtrain__bounce_free(dtrain__engine *comm, dtrain__work *work)
{
    dtrain_device *device = comm->base.world->device;
    dtrain__image_free(comm, &work->bounce);
    if (work->bounce.computed) device->ops->event_destroy(device, work->bounce.computed);
    if (work->bounce.copied) device->ops->event_destroy(device, work->bounce.copied);
}

/* Copy between a buffer and the image on the copy stream, then record `copied`. */
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

/* Start the copy into the image, after all work that the compute stream has queued. Replace the
 * operation's buffers in device memory by places in the image. Buffers that overlap (in place) also
 * overlap in the image. */
DTRAIN__PRIVATE dtrain_result dtrain__copy_in(dtrain__engine *comm, dtrain__work *work)
{
    dtrain_device *device = comm->base.world->device;
    dtrain__bounce *bounce = &work->bounce;
    dtrain_collective *what = &work->op.what;
    const uintptr_t from = (uintptr_t)what->send, to = (uintptr_t)what->recv;
    size_t send_bytes = 0, recv_bytes = 0, send_at = 0;
    if (!bounce->computed) DTRAIN__TRY(DTRAIN__ORDER(device, event_create, &bounce->computed));
    if (!bounce->copied) DTRAIN__TRY(DTRAIN__ORDER(device, event_create, &bounce->copied));
    bounce->called = *what;
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
    const size_t bytes = send_end > recv_end ? send_end : recv_end;
    if (bytes > bounce->bytes) {
        void *image;
        DTRAIN__TRY(device->ops->synchronize(device)); /* a copy from the old image can be queued */
        dtrain__image_free(comm, bounce);
        DTRAIN__TRY(comm->transport->map(&comm->base, bytes, &image));
        const dtrain_result locked = DTRAIN__ORDER(device, host_register, image,
                                                   dtrain__round_up(bytes, dtrain__page_bytes()));
        if (locked != DTRAIN_OK) {
            comm->transport->unmap(&comm->base, image, bytes);
            return locked;
        }
        bounce->image = (char *)image;
        bounce->bytes = bytes;
    }
    if (send_bytes) what->send = bounce->image + send_at;
    if (recv_bytes) what->recv = bounce->image + recv_at;

    DTRAIN__TRY(DTRAIN__ORDER(device, event_record, bounce->computed, NULL));
    DTRAIN__TRY(DTRAIN__ORDER(device, event_wait, bounce->computed, comm->stream));
    const bool gives = dtrain__gives(what, comm->base.rank);
    return dtrain__copy(comm, bounce, (void *)(uintptr_t)what->send,
                        gives ? bounce->called.send : what->send,
                        dtrain__send_bytes(what, comm->base.size), DTRAIN_COPY_DEVICE_TO_HOST);
}

/* Return true while an operation waits for the copy into its image; a failed copy ends the wait. */
DTRAIN__PRIVATE bool dtrain__copying_in(dtrain__engine *comm, const dtrain__work *work)
{
    dtrain_device *device = comm->base.world->device;
    bool done = true;
    if (!comm->staged || work->state != DTRAIN__QUEUED) return false;
    (void)dtrain__engine_ok(&comm->base,
                            DTRAIN__ORDER(device, event_query, work->bounce.copied, &done));
    return !done;
}

/* Start the copy out of the image, after the transport is done. */
DTRAIN__PRIVATE dtrain_result dtrain__copy_out(dtrain__engine *comm, dtrain__work *work)
{
    const dtrain_collective *what = &work->op.what;
    const bool gets = dtrain__gets(what, comm->base.rank);
    return dtrain__copy(comm, &work->bounce, gets ? work->bounce.called.recv : what->recv,
                        what->recv, dtrain__recv_bytes(what, comm->base.size),
                        DTRAIN_COPY_HOST_TO_DEVICE);
}
