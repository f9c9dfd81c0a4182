/* Buffers in device memory: two hooks of the engine
 *
 * Ranks that share a GPU, or have GPUs and no NCCL, use a transport that moves host memory: what is
 * in device memory is copied through page-locked memory on the way in and out.
 *
 *     compute stream  ..kernels | event            event wait | kernels..
 *     copy stream                 \ device -> image           / image -> device
 *     host                           copied_in: transport ..  copy_out
 *
 * A work keeps its images and events for the operations that use it later, so in the steady state
 * nothing is allocated. Operations are shown to other ranks in the order they were started, each
 * when its copy has ended. */

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
    dtrain_collective called; /* the host's buffers; work->what has the images */
    dtrain_event *computed, *copied;
    char *image[2]; /* of send, recv: page-locked, and mapped by the transport; they grow */
    size_t image_bytes[2];
};

static void dtrain__image_free(dtrain__engine *comm, dtrain__bounce *bounce, int which)
{
    dtrain_device *device = comm->base.world->device;
    if (!bounce->image[which]) return;
    if (device->ops->host_unregister) device->ops->host_unregister(device, bounce->image[which]);
    comm->transport->unmap(comm, bounce->image[which], bounce->image_bytes[which]);
    bounce->image[which] = NULL;
    bounce->image_bytes[which] = 0;
}

/* Free what a work has for device memory. Nothing on the copy stream uses it any more. */
DTRAIN__PRIVATE void dtrain__bounce_free(dtrain__engine *comm, dtrain__work *work)
{
    dtrain_device *device = comm->base.world->device;
    dtrain__bounce *bounce = work->bounce;
    if (!bounce) return;
    for (int i = 0; i < 2; i++) dtrain__image_free(comm, bounce, i);
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

/* Find the image of a buffer. Host memory is its own one. */
static dtrain_result dtrain__image_of(dtrain__engine *comm, dtrain__bounce *bounce, int which,
                                      const void *memory, size_t bytes, char **out)
{
    dtrain_device *device = comm->base.world->device;
    *out = (char *)(uintptr_t)memory;
    if (!memory || dtrain__on_host(device, memory)) return DTRAIN_OK;
    if (bytes > bounce->image_bytes[which]) {
        void *image;
        /* a copy out of the smaller one may still be queued */
        DTRAIN__TRY(device->ops->synchronize(device));
        dtrain__image_free(comm, bounce, which);
        DTRAIN__TRY(comm->transport->map(comm, bytes, &image));
        const dtrain_result locked = DTRAIN__ORDER(device, host_register, image,
                                                   dtrain__round_up(bytes, dtrain__page_bytes()));
        if (locked != DTRAIN_OK) {
            comm->transport->unmap(comm, image, bytes);
            return locked;
        }
        bounce->image[which] = (char *)image;
        bounce->image_bytes[which] = bytes;
    }
    *out = bounce->image[which];
    return DTRAIN_OK;
}

/* Replace the buffers of an operation by their images. In place, the smaller buffer lies inside the
 * larger one: so must its image. */
static dtrain_result dtrain__images(dtrain__engine *comm, dtrain__work *work)
{
    const dtrain_collective *what = &work->bounce->called;
    const size_t send_bytes = dtrain__send_bytes(what, comm->base.size);
    const size_t recv_bytes = dtrain__recv_bytes(what, comm->base.size);
    const uintptr_t from = (uintptr_t)what->send, to = (uintptr_t)what->recv;
    const bool send_inside = to && from >= to && from + send_bytes <= to + recv_bytes;
    const bool recv_inside = from && to >= from && to + recv_bytes <= from + send_bytes;
    char *send = NULL, *recv = NULL;
    if (!what->count) return DTRAIN_OK;
    if (!send_inside)
        DTRAIN__TRY(dtrain__image_of(comm, work->bounce, 0, what->send, send_bytes, &send));
    if (send_inside || !recv_inside)
        DTRAIN__TRY(dtrain__image_of(comm, work->bounce, 1, what->recv, recv_bytes, &recv));
    work->what.send = send_inside ? recv + (from - to) : send;
    work->what.recv = recv_inside && !send_inside ? send + (to - from) : recv;
    return DTRAIN_OK;
}

/* Copy between a buffer and its image, in the order of the copy stream; `copied` is the end. */
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

/* Start the way in. The copy stream takes its turn after everything that compute has queued so
 * far. */
DTRAIN__PRIVATE dtrain_result dtrain__copy_in(dtrain__engine *comm, dtrain__work *work)
{
    dtrain_device *device = comm->base.world->device;
    const dtrain_collective *what = &work->what;
    if (!work->bounce) DTRAIN__TRY(dtrain__bounce_make(comm, work));
    dtrain__bounce *bounce = work->bounce;
    bounce->called = *what;
    DTRAIN__TRY(dtrain__images(comm, work));
    DTRAIN__TRY(DTRAIN__ORDER(device, event_record, bounce->computed, NULL));
    DTRAIN__TRY(DTRAIN__ORDER(device, event_wait, bounce->computed, comm->stream));
    const bool gives = dtrain__gives(what, comm->base.rank);
    return dtrain__copy(comm, bounce, (void *)(uintptr_t)what->send,
                        gives ? bounce->called.send : what->send,
                        dtrain__send_bytes(what, comm->base.size), DTRAIN_COPY_DEVICE_TO_HOST);
}

DTRAIN__PRIVATE bool dtrain__copied_in(dtrain__engine *comm, const dtrain__work *work)
{
    dtrain_device *device = comm->base.world->device;
    bool done = true;
    const dtrain_result result = DTRAIN__ORDER(device, event_query, work->bounce->copied, &done);
    if (result != DTRAIN_OK) (void)dtrain__engine_fail(&comm->base, result, dtrain_last_error());
    return done;
}

/* Start the way out, when the transport is done. */
DTRAIN__PRIVATE dtrain_result dtrain__copy_out(dtrain__engine *comm, dtrain__work *work)
{
    const dtrain_collective *what = &work->what;
    const bool gets = dtrain__gets(what, comm->base.rank);
    return dtrain__copy(comm, work->bounce, gets ? work->bounce->called.recv : what->recv,
                        what->recv, dtrain__recv_bytes(what, comm->base.size),
                        DTRAIN_COPY_HOST_TO_DEVICE);
}

/* Let what compute queues from now on come after the way out. */
DTRAIN__PRIVATE dtrain_result dtrain__after_copy_out(dtrain__engine *comm, dtrain__work *work)
{
    dtrain_device *device = comm->base.world->device;
    return DTRAIN__ORDER(device, event_wait, work->bounce->copied, NULL);
}
