/* a step without the host: how it runs. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/log.h"
#include "core/result.h"
#include "world/world.h"
#include "comm/comm.h"
#include "strategy/strategy.h"
#include "strategy/strategy_internal.h"
#include "tape/tape.h"
#include "tape/tape_internal.h"
#include "optim/optim_internal.h"
#include "optim/optimizer.h"
#include "optim/scaler.h"
#include "train/trainer.h"
#include "train/trainer_internal.h"
#include "device/backend.h"
#include "device/device.h"

static dtrain_result dtrain__queue_micro(dtrain_trainer *trainer, uint32_t micro)
{
    const dtrain_trainer_desc *desc = &trainer->desc;
    dtrain__queue *queue = trainer->queue;
    dtrain__feed *feed = &queue->feeds[micro];
    DTRAIN__TRY(dtrain_strategy_accumulate(desc->strategy, micro + 1 < desc->accumulation));
    if (!feed->filled) DTRAIN__TRY(desc->next_batch(desc->user));
    feed->next = 0;
    trainer->tape->feed = feed;
    trainer->tape->scalars = queue->scalars;
    dtrain_result result =
        dtrain_tape_begin(trainer->tape, desc->tape_flags, dtrain__micro_seed(micro));
    dtrain_tensor *loss = NULL;
    if (result == DTRAIN_OK) {
        loss = desc->loss(trainer->tape, desc->user);
        result = dtrain_tape_backward(trainer->tape, loss, dtrain__backward_scale(trainer));
    }
    if (result == DTRAIN_OK) result = dtrain_strategy_finish(desc->strategy);
    trainer->tape->feed = NULL;
    trainer->tape->scalars = NULL;
    feed->filled = false;
    DTRAIN__TRY(result);
    return queue->device->ops->copy_async(queue->device, queue->results + micro, loss->data,
                                          sizeof(float), DTRAIN_COPY_DEVICE_TO_HOST, NULL);
}

/* The same calls in the same order whether the device runs or records them. */
static dtrain_result dtrain__queue_all(dtrain_trainer *trainer)
{
    const dtrain_trainer_desc *desc = &trainer->desc;
    dtrain__queue *queue = trainer->queue;
    dtrain_device *device = queue->device;
    dtrain_clip_args clip = {desc->strategy->sum_squares, desc->clip, queue->scalars,
                             dtrain__queue_norm(queue)};
    DTRAIN__TRY(device->ops->copy_async(device, queue->scalars, queue->now, sizeof *queue->now,
                                        DTRAIN_COPY_HOST_TO_DEVICE, NULL));
    for (uint32_t micro = 0; micro < desc->accumulation; micro++)
        DTRAIN__TRY(dtrain__queue_micro(trainer, micro));
    DTRAIN__TRY(dtrain__sum_squares(desc->strategy));
    DTRAIN__TRY(device->ops->clip(device, &clip));
    DTRAIN__TRY(dtrain__optimizer_run(desc->optimizer, queue->now, queue->scalars));
    return device->ops->copy_async(device, queue->results + desc->accumulation, clip.norm,
                                   sizeof(float), DTRAIN_COPY_DEVICE_TO_HOST, NULL);
}

/* From the second step on the inputs are known and can be fetched before anything is queued. False
 * in *same: targets are ignored in another number of places, and the recorded loss would divide by
 * the wrong count. */
static dtrain_result dtrain__queue_fill(dtrain_trainer *trainer, bool *same)
{
    *same = true;
    for (uint32_t micro = 0; micro < trainer->desc.accumulation; micro++) {
        dtrain__feed *feed = &trainer->queue->feeds[micro];
        DTRAIN__TRY(trainer->desc.next_batch(trainer->desc.user));
        for (size_t i = 0; i < feed->count; i++) {
            const dtrain__feed_item *item = &feed->items[i];
            memcpy(item->pinned, item->host, item->bytes);
            if (item->dtype == DTRAIN_DTYPE_I32 &&
                item->valid_count != dtrain__count_valid(item->host, (int64_t)item->bytes / 4))
                *same = false;
        }
        feed->filled = true;
    }
    return DTRAIN_OK;
}

/* Two steps run as they are queued: memory is allocated, kernels are chosen. The third is
 * recorded, and then it is run like those after it. */
static dtrain_result dtrain__queue_run(dtrain_trainer *trainer)
{
    dtrain__queue *queue = trainer->queue;
    dtrain_device *device = queue->device;
    bool same = true;
    if (queue->steps > 0) DTRAIN__TRY(dtrain__queue_fill(trainer, &same));
    if (queue->graph && !same) {
        device->ops->graph_destroy(device, queue->graph);
        queue->graph = NULL;
    }
    if (queue->steps < 2) return dtrain__queue_all(trainer);
    if (!queue->graph) {
        DTRAIN__TRY(device->ops->graph_begin(device));
        const dtrain_result result = dtrain__queue_all(trainer);
        const dtrain_result ended = device->ops->graph_end(device, &queue->graph);
        DTRAIN__TRY(result);
        DTRAIN__TRY(ended);
    }
    return device->ops->graph_launch(device, queue->graph);
}

static dtrain_result dtrain__queue_step(dtrain_trainer *trainer, dtrain_step_record *record)
{
    const dtrain_trainer_desc *desc = &trainer->desc;
    dtrain__queue *queue = trainer->queue;
    const float lr = dtrain_schedule_lr(&desc->schedule, trainer->step);
    double loss_sum = 0;
    *queue->now = dtrain__optimizer_scalars(desc->optimizer, lr, 1);
    queue->now->seed = dtrain__step_seed(trainer);
    DTRAIN__TRY(dtrain__queue_run(trainer));
    DTRAIN__TRY(queue->device->ops->synchronize(queue->device));
    queue->steps++;
    for (uint32_t micro = 0; micro < desc->accumulation; micro++)
        loss_sum += (double)queue->results[micro];
    record->loss = loss_sum / desc->accumulation;
    record->grad_norm = (double)queue->results[desc->accumulation];
    record->lr = (double)lr;
    if (dtrain_is_finite(queue->results[desc->accumulation])) desc->optimizer->step_count++;
    return DTRAIN_OK;
}

/* After the exchange: the same verdict on every rank. */
static dtrain_result dtrain__trainer_judge(const dtrain_trainer *trainer, float norm)
{
    const char *advice = "lower the learning rate, clip gradients or look at the data";
    for (int r = 0; r < trainer->ranks; r++) {
        float loss = dtrain__trainer_word(trainer, r, DTRAIN__WORD_LOSS);
        if (!dtrain_is_finite(loss))
            return dtrain_fail(DTRAIN_ERROR_NUMERIC,
                               "dtrain_trainer_step: at step %lld the loss of rank %d is %g: %s",
                               (long long)trainer->step, dtrain_comm_world_rank(trainer->comm, r),
                               (double)loss, advice);
    }
    if (!dtrain_is_finite(norm) && !trainer->scaling)
        return dtrain_fail(DTRAIN_ERROR_NUMERIC,
                           "dtrain_trainer_step: at step %lld the gradient's norm is %g although "
                           "every loss is finite: %s",
                           (long long)trainer->step, (double)norm, advice);
    return DTRAIN_OK;
}

/* After the verdict, and from the same numbers on every rank: all scales move alike. */
static dtrain_result dtrain__trainer_rescale(dtrain_trainer *trainer, dtrain_step_record *record)
{
    dtrain_loss_scaler *scaler = &trainer->scaler;
    if (!trainer->scaling) return DTRAIN_OK;
    record->loss_scale = (double)scaler->scale;
    DTRAIN__TRY(dtrain_loss_scaler_update(scaler, !dtrain_is_finite((float)record->grad_norm)));
    record->skipped_steps = scaler->skipped_steps;
    return DTRAIN_OK;
}

static double dtrain__trainer_compute(const dtrain_trainer *trainer, int rank)
{
    return (double)dtrain__trainer_word(trainer, rank, DTRAIN__WORD_STEP) -
           (double)dtrain__trainer_word(trainer, rank, DTRAIN__WORD_EXPOSED);
}

/* Finds the slowest rank and its score, and counts for how long it has been a straggler. Of an even
 * number of ranks the lower median counts: the mean of the middle two would keep one slow rank of
 * two below a score of 2 for ever. */
static void dtrain__straggler_count(dtrain_trainer *trainer, dtrain_step_record *record)
{
    int slowest = 0;
    for (int r = 0; r < trainer->ranks; r++) {
        double seconds = dtrain__trainer_compute(trainer, r);
        if (seconds > dtrain__trainer_compute(trainer, slowest)) slowest = r;
        int at = r; /* insertion sort: few ranks, and no allocation */
        for (; at > 0 && trainer->compute[at - 1] > seconds; at--)
            trainer->compute[at] = trainer->compute[at - 1];
        trainer->compute[at] = seconds;
    }
    double median = trainer->compute[(trainer->ranks - 1) / 2];
    double most = trainer->compute[trainer->ranks - 1];
    record->straggler_score = median > 0 ? most / median : 1;
    if (record->straggler_score <= DTRAIN__SLOW_SCORE) trainer->slow_steps = 0;
    else trainer->slow_steps = slowest == trainer->slow_rank ? trainer->slow_steps + 1 : 1;
    trainer->slow_rank = slowest;
}

/* Names a lasting straggler, once. Every rank comes to the same end here, rank 0 says it. */
static void dtrain__straggler_warn(dtrain_trainer *trainer, const dtrain_step_record *record)
{
    if (trainer->slow_steps < DTRAIN__SLOW_STEPS || trainer->named[trainer->slow_rank]) return;
    trainer->named[trainer->slow_rank] = true;
    if (trainer->rank == 0)
        dtrain_log(trainer->world, DTRAIN_LOG_WARNING,
                   "rank %d is a straggler: it has computed more than twice as long as the median "
                   "rank for %d steps running (%.1f times in step %lld), and all ranks wait for it",
                   record->slowest_rank, DTRAIN__SLOW_STEPS, record->straggler_score,
                   (long long)record->step);
}

/* The rest of the record, from the words of all ranks. */
static void dtrain__trainer_record(dtrain_trainer *trainer, dtrain_step_record *record)
{
    double seconds = 0;
    for (int r = 0; r < trainer->ranks; r++) {
        double own = (double)dtrain__trainer_word(trainer, r, DTRAIN__WORD_STEP);
        if (own > seconds) seconds = own;
    }
    uint64_t tokens =
        (uint64_t)trainer->desc.tokens * trainer->desc.accumulation * (uint64_t)trainer->ranks;
    record->step = trainer->step;
    record->loss = dtrain__trainer_mean(trainer, DTRAIN__WORD_LOSS);
    record->val_loss = dtrain__nan();
    record->tokens = tokens * (uint64_t)(trainer->step + 1);
    record->tokens_per_second = seconds > 0 ? (double)tokens / seconds : 0;
    record->step_ms = 1e3 * seconds;
    record->comm_ms = 1e3 * dtrain__trainer_mean(trainer, DTRAIN__WORD_COMM);
    record->exposed_comm_ms = 1e3 * dtrain__trainer_mean(trainer, DTRAIN__WORD_EXPOSED);
    dtrain__straggler_count(trainer, record);
    record->slowest_rank = dtrain_comm_world_rank(trainer->comm, trainer->slow_rank);
}

DTRAIN_API dtrain_result dtrain_trainer_step(dtrain_trainer *trainer, dtrain_step_record *record)
{
    if (!trainer || !trainer->desc.optimizer)
        return dtrain_fail(DTRAIN_ERROR_USAGE, "dtrain_trainer_step: there is no %s",
                           trainer ? "optimizer: this trainer can only evaluate" : "trainer");
    dtrain_step_record full;
    dtrain_comm_info before, after;
    float own[DTRAIN__WORD_COUNT];
    memset(&full, 0, sizeof full);
    dtrain__strategy_comm_info(trainer->desc.strategy, &before);
    double start = dtrain_seconds();
    if (trainer->queue) DTRAIN__TRY(dtrain__queue_step(trainer, &full));
    else DTRAIN__TRY(dtrain__trainer_update(trainer, &full));
    own[DTRAIN__WORD_STEP] = (float)(dtrain_seconds() - start);
    dtrain__strategy_comm_info(trainer->desc.strategy, &after);

    /* Time inside can exceed time in flight by the cost of the calls: exposed stays a part. */
    double exposed = after.inside_seconds - before.inside_seconds;
    double flight = after.flight_seconds - before.flight_seconds;
    own[DTRAIN__WORD_LOSS] = (float)full.loss;
    own[DTRAIN__WORD_EXPOSED] = (float)exposed;
    own[DTRAIN__WORD_COMM] = (float)(flight > exposed ? flight : exposed);
    DTRAIN__TRY(dtrain__trainer_exchange(trainer, own));
    DTRAIN__TRY(dtrain__trainer_judge(trainer, (float)full.grad_norm));
    DTRAIN__TRY(dtrain__trainer_rescale(trainer, &full));

    full.comm_bytes = after.wire_bytes - before.wire_bytes;
    dtrain__trainer_record(trainer, &full);
    dtrain__straggler_warn(trainer, &full);
    trainer->step++;
    if (record) *record = full;
    return DTRAIN_OK;
}
