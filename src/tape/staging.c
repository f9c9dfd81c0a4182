/* Page-locked staging of inputs
 *
 * On a device with memory of its own, inputs of a pass are copied into one page-locked block, from
 * where the device fetches them in the order of its work. The host goes on at once and may fill its
 * arrays with the next batch: it waits neither for what the device does before, nor for the upload.
 *
 *     host     batch -> block | forward is queued ...          next pass: is it uploaded?
 *     device   ... the step before | block -> input | forward ...
 *
 * The block is as large as the inputs of the largest pass so far. What has no room in it goes by a
 * copy that waits, which happens in the first pass. A pass that is replayed has a place for each
 * input instead (dtrain__feed). */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/result.h"
#include "tape/tape_internal.h"
#include "device/backend.h"
#include "device/device_internal.h"

#define DTRAIN__STAGING_ALIGN 256

/* Wait until uploads from the block are done, as they are once the pass's loss has been read. */
static dtrain_result dtrain__staging_await(dtrain_tape *tape)
{
    dtrain__staging *s = &tape->staging;
    bool done = true;
    if (s->used) DTRAIN__TRY(tape->device->ops->event_query(tape->device, s->uploaded, &done));
    return done ? DTRAIN_OK : tape->device->ops->synchronize(tape->device);
}

/* Make the block free for the next pass, and large enough for one like the last. */
DTRAIN__PRIVATE dtrain_result dtrain__staging_begin(dtrain_tape *tape)
{
    dtrain__staging *s = &tape->staging;
    dtrain_device *device = tape->device;
    if (tape->feed || (!s->used && !s->wanted)) return DTRAIN_OK;
    DTRAIN__TRY(dtrain__staging_await(tape));
    s->used = 0;
    if (s->wanted > s->bytes) {
        void *memory;
        dtrain__staging_free(tape);
        DTRAIN__TRY(device->ops->event_create(device, &s->uploaded));
        DTRAIN__TRY(device->ops->host_alloc(device, s->wanted, &memory));
        s->memory = (char *)memory;
        s->bytes = s->wanted;
    }
    s->wanted = 0;
    return DTRAIN_OK;
}

/* Copy an input to the device. The caller may reuse `from` on return. */
DTRAIN__PRIVATE dtrain_result dtrain__staging_upload(dtrain_tape *tape, void *to, const void *from,
                                                     size_t bytes)
{
    dtrain__staging *s = &tape->staging;
    dtrain_device *device = tape->device;
    const size_t room = dtrain__round_up(bytes, DTRAIN__STAGING_ALIGN);
    if (!device->ops->host_memory && device->ops->event_query) s->wanted += room;
    if (room > s->bytes - s->used)
        return device->ops->copy(device, to, from, bytes, DTRAIN_COPY_HOST_TO_DEVICE);
    char *place = s->memory + s->used;
    memcpy(place, from, bytes);
    s->used += room;
    DTRAIN__TRY(
        device->ops->copy_async(device, to, place, bytes, DTRAIN_COPY_HOST_TO_DEVICE, NULL));
    return device->ops->event_record(device, s->uploaded, NULL);
}

/* Free the block, after its uploads are done. */
DTRAIN__PRIVATE void dtrain__staging_free(dtrain_tape *tape)
{
    dtrain__staging *s = &tape->staging;
    dtrain__staging_await(tape);
    if (s->memory) tape->device->ops->host_free(tape->device, s->memory, s->bytes);
    if (s->uploaded) tape->device->ops->event_destroy(tape->device, s->uploaded);
    s->memory = NULL;
    s->uploaded = NULL;
    s->bytes = s->used = 0;
}
