/* Offload: shards in host memory
 *
 * PUT, GET and RETURN are steps of sharded buckets (steps.c): they copy a gradient shard to and
 * from host memory. host_settle waits for copies to the host; host_bring copies a value shard to
 * the device.
 *
 *     compute   .. backward 2 . reduce . backward 1 . reduce . backward 0 .... | finish
 *     down                            | put shard of 2       | put shard of 1 ...
 *     CPU                             (add it, in later micro-batches)          | norm | update
 *     up                                                                        | new values
 *
 * A copy to the host is queued after the kernels queued so far. Later kernels wait for it before
 * they overwrite the buffer that it reads (settle). The shard of a later micro-batch arrives in one
 * of two bounce buffers. It is added when the buffer is needed again, or at the end of backward. */

#include "core/platform_internal.h"
#include "device/device_internal.h"
#include "strategy/strategy_internal.h"
#include "strategy/steps_internal.h"

/* Order two streams: work queued on `later` from now on runs after work queued on `earlier`. */
DTRAIN__PRIVATE dtrain_result dtrain__stream_follow(dtrain_strategy *strategy, dtrain_stream *later,
                                                    dtrain_stream *earlier)
{
    dtrain_device *device = strategy->device;
    DTRAIN__TRY(DTRAIN__ORDER(device, event_record, strategy->offload.order, earlier));
    return DTRAIN__ORDER(device, event_wait, strategy->offload.order, later);
}

/* Wait on the host until copy number `turn`, 0 or 1, has reached host memory, or until the
 * deadline. The communicator reports dead ranks. */
DTRAIN__PRIVATE dtrain_result dtrain__update_await(const dtrain_strategy *strategy, size_t turn)
{
    dtrain_device *device = strategy->device;
    dtrain_event *event = strategy->offload.arrived[turn];
    dtrain__wait wait = dtrain__wait_begin();
    for (;;) {
        bool done = true;
        DTRAIN__TRY(DTRAIN__ORDER(device, event_query, event, &done));
        if (done) return DTRAIN_OK;
        if (device->while_waiting) DTRAIN__TRY(device->while_waiting(device->waiting_user));
        (void)dtrain__wait_turn(strategy->world, &wait);
        if (wait.waited_ns >= strategy->world->timeout_ns)
            return dtrain_fail(DTRAIN_ERROR_TIMEOUT,
                               "the device did not finish the work before a copy to the host in "
                               "%.1f s",
                               1e-9 * (double)strategy->world->timeout_ns);
    }
}

/* ---- A shard in host memory -------------------------------------------------------------------*/

/* Wait for the copy into bounce buffer i, and add it to its shard. */
static dtrain_result dtrain__bounce_add(dtrain_strategy *strategy, uint32_t i)
{
    dtrain__offload *offload = &strategy->offload;
    dtrain__bucket *bucket = offload->bounced[i];
    if (!bucket) return DTRAIN_OK;
    dtrain_add_args add = {bucket->shard_count, bucket->grad_shard, strategy->layout.bounce[i],
                           bucket->grad_shard,  DTRAIN_DTYPE_F32,   DTRAIN_DTYPE_F32};
    offload->bounced[i] = NULL;
    DTRAIN__TRY(dtrain__update_await(strategy, i));
    return offload->cpu->ops->add(offload->cpu, &add);
}

/* Queue grad_shard = result (device memory); with `add` grad_shard += result. */
static dtrain_result dtrain__host_put(dtrain_strategy *strategy, dtrain__bucket *bucket,
                                      const float *result, bool add)
{
    dtrain__offload *offload = &strategy->offload;
    dtrain_device *device = strategy->device;
    const uint32_t i = offload->next_bounce;
    const size_t bytes = (size_t)bucket->shard_count * sizeof(float);
    if (bytes == 0) return DTRAIN_OK;
    if (add) DTRAIN__TRY(dtrain__bounce_add(strategy, i));
    float *to = add ? strategy->layout.bounce[i] : bucket->grad_shard;
    DTRAIN__TRY(dtrain__stream_follow(strategy, offload->down, NULL));
    DTRAIN__TRY(device->ops->copy_async(device, to, result, bytes, DTRAIN_COPY_DEVICE_TO_HOST,
                                        offload->down));
    if (!add) return DTRAIN_OK;
    offload->bounced[i] = bucket;
    offload->next_bounce = 1 - i;
    return DTRAIN__ORDER(device, event_record, offload->arrived[i], offload->down);
}

/* PUT: copy the result of a backward to the shard in host memory, or add it there. */
DTRAIN__PRIVATE dtrain_result dtrain__host_put_begin(dtrain_strategy *strategy,
                                                     dtrain__bucket *bucket)
{
    if (!bucket->grad_on_host) return dtrain__keep_begin(strategy, bucket);
    return dtrain__host_put(strategy, bucket, dtrain__reduce_result(strategy, bucket),
                            strategy->accumulated);
}

/* GET: queue a copy of the shard, the sum of all micro-batches, back to the result. After the only
 * micro-batch of a step the result is still there. */
DTRAIN__PRIVATE dtrain_result dtrain__host_get_begin(dtrain_strategy *strategy,
                                                     dtrain__bucket *bucket)
{
    if (!bucket->grad_on_host || !strategy->accumulated) return DTRAIN_OK;
    for (uint32_t i = 0; i < 2; i++)
        if (strategy->offload.bounced[i] == bucket) DTRAIN__TRY(dtrain__bounce_add(strategy, i));
    return strategy->device->ops->copy_async(
        strategy->device, dtrain__reduce_result(strategy, bucket), bucket->grad_shard,
        (size_t)bucket->shard_count * sizeof(float), DTRAIN_COPY_HOST_TO_DEVICE, NULL);
}

/* RETURN: copy the reduced result to the shard. */
DTRAIN__PRIVATE dtrain_result dtrain__host_return_begin(dtrain_strategy *strategy,
                                                        dtrain__bucket *bucket)
{
    if (!bucket->grad_on_host) return DTRAIN_OK;
    return dtrain__host_put(strategy, bucket, dtrain__reduce_result(strategy, bucket), false);
}

/* Make kernels queued from now on wait until the copies queued so far have read their buffers. At
 * the end of a backward first free all bounce buffers; after the last backward of a step also wait
 * until the shards are complete. */
DTRAIN__PRIVATE dtrain_result dtrain__host_settle(dtrain_strategy *strategy, bool over)
{
    dtrain__offload *offload = &strategy->offload;
    dtrain_device *device = strategy->device;
    for (uint32_t i = 0; i < 2 && over; i++) DTRAIN__TRY(dtrain__bounce_add(strategy, i));
    DTRAIN__TRY(dtrain__stream_follow(strategy, NULL, offload->down));
    if (!over || strategy->more) return DTRAIN_OK;
    DTRAIN__TRY(DTRAIN__ORDER(device, event_record, offload->arrived[0], offload->down));
    return dtrain__update_await(strategy, 0);
}

/* Queue a copy of a value shard to its place among the gathered values: after the kernels that use
 * the slot's previous unit, and before the collective. */
DTRAIN__PRIVATE dtrain_result dtrain__host_bring(dtrain_strategy *strategy, dtrain__bucket *bucket)
{
    return strategy->device->ops->copy_async(
        strategy->device, bucket->values + bucket->shard_first, bucket->value_shard,
        (size_t)bucket->shard_count * sizeof(float), DTRAIN_COPY_HOST_TO_DEVICE, NULL);
}

/* ---- Life -------------------------------------------------------------------------------------*/

/* Make the CPU device, streams and events, if anything is offloaded. */
DTRAIN__PRIVATE dtrain_result dtrain__offload_open(dtrain_strategy *strategy)
{
    dtrain__offload *offload = &strategy->offload;
    dtrain_device *device = strategy->device;
    dtrain_device_desc cpu;
    if (!strategy->desc.offload) return DTRAIN_OK;
    memset(&cpu, 0, sizeof cpu);
    cpu.thread_count = strategy->world->threads;
    cpu.oversubscribed = strategy->world->oversubscribed;
    cpu.allocator = strategy->allocator;
    DTRAIN__TRY(dtrain_device_create(dtrain__cpu_device_ops(), &cpu, &offload->cpu));
    DTRAIN__TRY(DTRAIN__ORDER(device, stream_create, false, &offload->down));
    DTRAIN__TRY(DTRAIN__ORDER(device, stream_create, false, &offload->up));
    DTRAIN__TRY(DTRAIN__ORDER(device, event_create, &offload->order));
    for (int i = 0; i < 2; i++)
        DTRAIN__TRY(DTRAIN__ORDER(device, event_create, &offload->arrived[i]));
    return DTRAIN_OK;
}

/* Wait, because queued copies use the memory that is freed next; then free. */
DTRAIN__PRIVATE void dtrain__offload_close(dtrain_strategy *strategy)
{
    dtrain__offload *offload = &strategy->offload;
    dtrain_device *device = strategy->device;
    if (!offload->cpu) return;
    device->ops->synchronize(device);
    for (int i = 0; i < 2; i++)
        if (offload->arrived[i]) device->ops->event_destroy(device, offload->arrived[i]);
    if (offload->order) device->ops->event_destroy(device, offload->order);
    if (offload->up) device->ops->stream_destroy(device, offload->up);
    if (offload->down) device->ops->stream_destroy(device, offload->down);
    dtrain_device_destroy(offload->cpu);
    offload->cpu = NULL;
}

/* ---- An update in host memory -----------------------------------------------------------------*/

DTRAIN__PRIVATE const dtrain__offload *dtrain__offload_of(const dtrain_strategy *strategy)
{
    return &strategy->offload;
}

/* Count the bytes of an optimizer's states of parameter i. With offload that includes a master copy
 * of values on the device. For gradients on the device *staging grows to the elements of one of the
 * two staging buffers: a piece of the gradients, or with `whole` all of them. */
DTRAIN__PRIVATE uint64_t dtrain__update_bytes(const dtrain__layout *layout, size_t i, size_t states,
                                              bool whole, int64_t *staging)
{
    const bool offload = layout->desc->offload != 0;
    int64_t offset, count;
    if (!layout->entries[i].trainable || !dtrain__piece(layout, i, &offset, &count)) return 0;
    const dtrain__bucket *bucket = layout->entries[i].bucket;
    const bool master = offload && !bucket->value_on_host;
    const int64_t padded = dtrain__padded(dtrain__words(layout, count));
    if (offload && !bucket->grad_on_host)
        *staging = dtrain__max(*staging, whole ? padded : dtrain__min(padded, DTRAIN__PIECE));
    return (uint64_t)padded * sizeof(float) * (states + (master ? 1 : 0));
}
