/* A step without the host: recorded and replayed
 *
 * The host queues a whole step on the device before it looks at any result. A graph can record such
 * a step:
 *
 *     pinned            device                                                      pinned
 *     inputs, scalars -> passes -> collectives -> norm -> clip, skip -> optimizer -> losses, norm
 *
 * `scalars` has every number that changes from step to step. Every input comes through a feed, and
 * a feed of targets carries the count that divides their loss. So a step is recorded once, in the
 * same step on all ranks, because ranks must record a collective together. micro_batch.c runs the
 * micro-batches as in every step, and queues the copies of their losses instead of waiting for
 * them. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/result.h"
#include "world/world.h"
#include "comm/comm.h"
#include "strategy/strategy.h"
#include "strategy/view_internal.h"
#include "tape/tape.h"
#include "tape/view_internal.h"
#include "optim/optim_internal.h"
#include "train/trainer.h"
#include "train/trainer_internal.h"
#include "device/backend.h"
#include "device/device.h"

/* Return the weight of a micro-batch: if samples are counted, by its current inputs; otherwise the
 * weight that its backward had when it was queued. */
static float dtrain__queue_weight(const dtrain_trainer *trainer, uint32_t micro)
{
    const dtrain_strategy *strategy = trainer->desc.strategy;
    const dtrain__micro *queued = &trainer->micros[micro];
    if (!queued->samples.terms) return queued->weight;
    if (trainer->data_ranks == 1 && trainer->desc.micro_batches == 1)
        return dtrain__samples_count(&queued->samples) > 0;
    return dtrain__weight_of(strategy, &queued->samples);
}

/* Queue a whole step, by the same calls for a device that runs and one that records. */
static dtrain_result dtrain__queue_all(dtrain_trainer *trainer)
{
    const dtrain_trainer_desc *desc = &trainer->desc;
    dtrain__queue *queue = trainer->queue;
    dtrain_device *device = dtrain_world_device(trainer->world);
    bool empty;
    dtrain_clip_args clip;
    DTRAIN__TRY(device->ops->copy_async(device, queue->scalars, queue->now, sizeof *queue->now,
                                        DTRAIN_COPY_HOST_TO_DEVICE, NULL));
    const dtrain_result passes = dtrain__micro_batches(trainer);
    dtrain__pass_recorded(trainer->tape, NULL, NULL);
    DTRAIN__TRY(passes);
    memset(&clip, 0, sizeof clip);
    clip.max_norm = desc->clip;
    clip.scalars = queue->scalars;
    clip.norm = (float *)(void *)(queue->scalars + 1);
    clip.weight = dtrain__notes_of(desc->strategy)->counts;
    dtrain_result result =
        dtrain__queue_squares(desc->strategy, &clip.sum_squares, &clip.sum_count);
    if (result == DTRAIN_OK) result = device->ops->clip(device, &clip);
    if (result == DTRAIN_OK) result = dtrain__counts_settle(desc->strategy, &empty);
    if (result == DTRAIN_OK)
        result = dtrain__optimizer_update(desc->optimizer, queue->now->lr, 1, queue->scalars);
    if (result == DTRAIN_OK)
        result = device->ops->copy_async(device, queue->norm + 1, clip.weight, sizeof(float),
                                         DTRAIN_COPY_DEVICE_TO_HOST, NULL);
    if (result == DTRAIN_OK)
        result = device->ops->copy_async(device, queue->norm, clip.norm, sizeof(float),
                                         DTRAIN_COPY_DEVICE_TO_HOST, NULL);
    return dtrain__strategy_keep(desc->strategy, result);
}

/* Take one step. The first two steps run while they are queued: memory is allocated, kernels are
 * chosen. The third step is recorded, then replayed like later ones. An error discards the
 * recording.
 *
 * From the second step on the addresses of inputs are known: the batches of the whole step are
 * fetched before anything is queued. If one cannot be read, earlier ones stay filled, and the step
 * can be repeated. */
DTRAIN__PRIVATE dtrain_result dtrain__queue_step(dtrain_trainer *trainer,
                                                 dtrain_step_record *record)
{
    const dtrain_trainer_desc *desc = &trainer->desc;
    dtrain__queue *queue = trainer->queue;
    dtrain_device *device = dtrain_world_device(trainer->world);
    const float *norm = queue->norm;
    *queue->now = dtrain__recorded_scalars(desc->optimizer, (float)record->lr);
    queue->now->seed = dtrain__step_seed(trainer);
    for (uint32_t m = 0; queue->steps > 0 && m < desc->micro_batches; m++) {
        dtrain__feed *feed = &queue->feeds[m];
        if (!feed->filled) DTRAIN__TRY(dtrain__trainer_fetch(trainer));
        if (!feed->filled) DTRAIN__TRY(dtrain__feed_take(trainer->tape, feed));
    }
    for (uint32_t m = 0; queue->steps >= 2 && m < desc->micro_batches; m++)
        queue->now->weight += dtrain__queue_weight(trainer, m);
    if (queue->graph) (void)dtrain__count_flops(trainer->tape, queue->flops);
    else if (queue->steps < 2) DTRAIN__TRY(dtrain__queue_all(trainer));
    else {
        dtrain_graph *graph = NULL;
        char text[DTRAIN__ERROR_BYTES];
        const double flops = dtrain__count_flops(trainer->tape, 0);
        DTRAIN__TRY(device->ops->graph_begin(device));
        dtrain__notes_of(desc->strategy)->device_weight = &queue->scalars->weight;
        const dtrain_result result = dtrain__queue_all(trainer);
        dtrain__notes_of(desc->strategy)->device_weight = NULL;
        queue->flops = dtrain__count_flops(trainer->tape, 0) - flops;
        snprintf(text, sizeof text, "%s", dtrain_last_error());
        const dtrain_result ended = device->ops->graph_end(device, &graph);
        if (result != DTRAIN_OK) {
            if (graph) device->ops->graph_destroy(device, graph);
            return dtrain__set_last_error(result, text); /* graph_end can have changed it */
        }
        DTRAIN__TRY(ended);
        queue->graph = graph;
    }
    dtrain_result ran = queue->graph ? device->ops->graph_launch(device, queue->graph) : DTRAIN_OK;
    if (ran == DTRAIN_OK) ran = dtrain__losses_await(trainer);
    DTRAIN__TRY(dtrain__strategy_keep(desc->strategy, ran));
    queue->steps++;
    for (uint32_t m = 0; m < desc->micro_batches; m++) {
        queue->feeds[m].filled = false; /* the step has used its inputs */
        trainer->micros[m].weight = dtrain__queue_weight(trainer, m);
    }
    record->grad_norm = (double)*norm;
    if (dtrain__is_finite(*norm) && norm[1] > 0) dtrain__optimizer_count(desc->optimizer);
    return DTRAIN_OK;
}

/* ---- Creation ---------------------------------------------------------------------------------*/

/* Refuse settings that cannot be recorded, by name, and allocate the memory of a queued step. After
 * a failure queue_destroy frees it. */
DTRAIN__PRIVATE dtrain_result dtrain__queue_create(dtrain_trainer *trainer)
{
    const dtrain_strategy *strategy = trainer->desc.strategy;
    const uint32_t micro_batches = trainer->desc.micro_batches;
    dtrain_device *device = dtrain_world_device(trainer->world);
    const char *missing = NULL;
    void *memory;
    if (trainer->pipeline)
        missing = "no pipeline: passes of several micro-batches are under way, and a recorded step "
                  "has one; use graph = false";
    else if (trainer->scaling)
        missing = "no loss scaling: whether to step is decided on the host; use DTRAIN_TAPE_BF16, "
                  "which needs no scale, or graph = false";
    else if (!device->ops->graph_begin) missing = "a device that can record (the CPU's cannot)";
    else if (!trainer->desc.next_batch) missing = "next_batch";
    else if (!trainer->desc.optimizer) missing = "an optimizer";
    else if (dtrain__not_recordable(trainer->desc.optimizer))
        missing = dtrain__not_recordable(trainer->desc.optimizer);
    else if (dtrain__groups_of(strategy).copy && !dtrain__settings_of(strategy)->offload)
        missing = "a strategy of whole parameters";
    else missing = dtrain__unrecordable(strategy);
    if (missing)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED, "dtrain_trainer_create: graph needs %s",
                           missing);
    dtrain__queue *queue = trainer->queue =
        (dtrain__queue *)dtrain__alloc(&trainer->allocator, 1, sizeof *queue, "a queued step");
    if (!queue) return DTRAIN_ERROR_MEMORY;
    queue->feeds = (dtrain__feed *)dtrain__alloc(&trainer->allocator, micro_batches,
                                                 sizeof *queue->feeds, "a queued step's inputs");
    if (!queue->feeds) return DTRAIN_ERROR_MEMORY;
    DTRAIN__TRY(device->ops->alloc(device, 2 * sizeof *queue->scalars, &memory));
    queue->scalars = (dtrain_step_scalars *)memory;
    queue->pinned_bytes = sizeof *queue->now + ((size_t)micro_batches + 2) * sizeof(float);
    DTRAIN__TRY(device->ops->host_alloc(device, queue->pinned_bytes, &memory));
    queue->now = (dtrain_step_scalars *)memory;
    trainer->results = (float *)(void *)(queue->now + 1);
    queue->norm = trainer->results + micro_batches;
    return DTRAIN_OK;
}

/* Free the queue once the device is idle: it can still be replaying a failed step. */
DTRAIN__PRIVATE void dtrain__queue_destroy(dtrain_trainer *trainer)
{
    dtrain__queue *queue = trainer->queue;
    const uint32_t micro_batches = trainer->desc.micro_batches;
    if (!queue) return;
    dtrain_device *device = dtrain_world_device(trainer->world);
    device->ops->synchronize(device);
    if (queue->graph) device->ops->graph_destroy(device, queue->graph);
    for (uint32_t m = 0; queue->feeds && m < micro_batches; m++)
        dtrain__feed_free(device, &queue->feeds[m]);
    if (queue->scalars) device->ops->free(device, queue->scalars, 2 * sizeof *queue->scalars);
    if (queue->now) device->ops->host_free(device, queue->now, queue->pinned_bytes);
    dtrain__free(&trainer->allocator, queue->feeds, micro_batches, sizeof *queue->feeds);
    dtrain__free(&trainer->allocator, queue, 1, sizeof *queue);
}
