/* Trainer
 *
 *     micro-batches: next_batch, loss, backward, finish | norm | optimizer | all-gather of 4 words
 *     |<----------------------- step time ------------------------------->|
 *
 * The all-gather carries every rank's loss and times. It comes last so that the times are whole,
 * and because all ranks then judge the same numbers: a loss that is not finite is the same error
 * on all of them. The parameters are safe without waiting for it: the norm of the averaged
 * gradient is the same everywhere, a NaN of any rank is in it, and then no rank updates or
 * publishes. With loss scaling that is a skipped step, unless a loss was not finite either.
 *
 * Whose time is it? A rank computes, or it is inside the communicator. A fast rank waits there for
 * a slow one, so a straggler shows in the others' exposed time, and in its own compute time
 * (step - exposed): that is what ranks are compared by. What ranks wait for each other in the
 * record's own all-gather is in no figure. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/log.h"
#include "core/result.h"
#include "world/world.h"
#include "world/world_internal.h"
#include "comm/comm.h"
#include "strategy/strategy.h"
#include "tape/tape.h"
#include "tape/tape_internal.h"
#include "optim/optim_internal.h"
#include "optim/optimizer.h"
#include "optim/scaler.h"
#include "train/trainer.h"
#include "train/trainer_internal.h"
#include "device/backend.h"
#include "device/device.h"

#define DTRAIN__WORDS_BYTES (DTRAIN__WORD_COUNT * sizeof(float))

#define DTRAIN__STREAM_DROPOUT (UINT64_C(0x64726f70) << 32) /* + rank: Philox stream of seeds */

/* A bit pattern instead of NAN: it survives -ffast-math. */
DTRAIN__PRIVATE double dtrain__nan(void)
{
    const uint64_t bits = UINT64_C(0x7ff8000000000000);
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* ---- a step without the host: what it needs
 *
 * A whole step is queued on the device before the host looks at any of its results. That is what
 * a graph can record:
 *
 *     pinned            device                                                      pinned
 *     inputs, scalars -> passes -> collectives -> norm -> clip, skip -> optimizer -> losses, norm
 *
 * Every number that changes from step to step is in `scalars`; every input comes through a feed. */

DTRAIN__PRIVATE float *dtrain__queue_norm(const dtrain__queue *queue)
{
    return (float *)(void *)(queue->scalars + 1);
}

static size_t dtrain__results_bytes(const dtrain_trainer *trainer)
{
    return ((size_t)trainer->desc.accumulation + 1) * sizeof(float);
}

static void dtrain__queue_destroy(dtrain_trainer *trainer)
{
    dtrain__queue *queue = trainer->queue;
    if (!queue) return;
    const dtrain_device_ops *ops = queue->device->ops;
    ops->synchronize(queue->device);
    if (queue->graph) ops->graph_destroy(queue->device, queue->graph);
    for (uint32_t m = 0; queue->feeds && m < trainer->desc.accumulation; m++)
        for (size_t i = 0; i < queue->feeds[m].count; i++)
            ops->host_free(queue->device, queue->feeds[m].items[i].pinned,
                           queue->feeds[m].items[i].bytes);
    if (queue->scalars) ops->free(queue->device, queue->scalars, 2 * sizeof *queue->scalars);
    if (queue->now) ops->host_free(queue->device, queue->now, sizeof *queue->now);
    if (queue->results)
        ops->host_free(queue->device, queue->results, dtrain__results_bytes(trainer));
    dtrain__free(&trainer->allocator, queue->feeds, trainer->desc.accumulation,
                 sizeof *queue->feeds);
    dtrain__free(&trainer->allocator, queue, 1, sizeof *queue);
    trainer->queue = NULL;
}

static dtrain_result dtrain__queue_check(const dtrain_trainer *trainer)
{
    const char *missing = NULL;
    dtrain_comm_info comm;
    dtrain_comm_query(trainer->comm, &comm);
    if (trainer->scaling)
        missing = "no loss scaling: whether to step is decided on the host; use DTRAIN_TAPE_BF16, "
                  "which needs no scale, or graph = false";
    else if (dtrain_world_device(trainer->world)->ops->host_memory)
        missing = "a device that can record (the CPU's cannot)";
    else if (!trainer->desc.next_batch) missing = "next_batch";
    else if (!trainer->desc.optimizer) missing = "an optimizer";
    else if (trainer->desc.optimizer->desc.variance_steps)
        missing = "an optimizer without variance_steps: what is recorded would never stop";
    else if (trainer->desc.strategy->desc.offload)
        missing = "everything on the device: an offloaded update runs on the host";
    else if (trainer->desc.strategy->shard_comm) missing = "a strategy of whole parameters";
    else if (trainer->desc.strategy->desc.compression)
        missing = "no compression: its first steps are not like the later ones";
    else if (trainer->desc.strategy->desc.missing_gradient == DTRAIN_MISSING_GRADIENT_ERROR)
        missing = "DTRAIN_MISSING_GRADIENT_ZERO: the other setting asks all ranks in every step";
    else if (trainer->ranks > 1 && strcmp(comm.backend, "nccl") != 0)
        missing = "collectives on the device (dtrain_nccl.h): those here go through the host";
    if (!missing) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED, "dtrain_trainer_create: graph needs %s", missing);
}

static dtrain_result dtrain__queue_create(dtrain_trainer *trainer)
{
    void *memory;
    DTRAIN__TRY(dtrain__queue_check(trainer));
    dtrain__queue *queue = trainer->queue =
        (dtrain__queue *)dtrain__alloc(&trainer->allocator, 1, sizeof *queue, "a queued step");
    if (!queue) return DTRAIN_ERROR_MEMORY;
    dtrain_device *device = queue->device = dtrain_world_device(trainer->world);
    queue->feeds =
        (dtrain__feed *)dtrain__alloc(&trainer->allocator, trainer->desc.accumulation,
                                      sizeof *queue->feeds, "the inputs of a queued step");
    if (!queue->feeds) return DTRAIN_ERROR_MEMORY;
    DTRAIN__TRY(device->ops->alloc(device, 2 * sizeof *queue->scalars, &memory));
    queue->scalars = (dtrain_step_scalars *)memory;
    DTRAIN__TRY(device->ops->host_alloc(device, sizeof *queue->now, &memory));
    queue->now = (dtrain_step_scalars *)memory;
    DTRAIN__TRY(device->ops->host_alloc(device, dtrain__results_bytes(trainer), &memory));
    queue->results = (float *)memory;
    return DTRAIN_OK;
}

/* ---- creation ---------------------------------------------------------------------------------*/

static dtrain_result dtrain__trainer_alloc(dtrain_trainer *trainer)
{
    size_t ranks = (size_t)trainer->ranks;
    DTRAIN__TRY(dtrain_tape_create(trainer->world, trainer->desc.strategy, NULL, &trainer->tape));
    DTRAIN__TRY(dtrain_tape_checkpoint(trainer->tape, trainer->desc.checkpoint_every,
                                       trainer->desc.checkpoint_ops));
    trainer->words = (float *)dtrain__alloc(&trainer->allocator, ranks, DTRAIN__WORDS_BYTES,
                                            "a trainer's words");
    trainer->compute = (double *)dtrain__alloc(&trainer->allocator, ranks, sizeof *trainer->compute,
                                               "a trainer's times");
    trainer->named =
        (bool *)dtrain__alloc(&trainer->allocator, ranks, sizeof *trainer->named, "a trainer");
    return trainer->words && trainer->compute && trainer->named ? DTRAIN_OK : DTRAIN_ERROR_MEMORY;
}

static dtrain_result dtrain__check_trainer(const dtrain_trainer_desc *desc)
{
    const uint32_t flags = desc->tape_flags;
    if (!desc->strategy || !desc->loss)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_trainer_create: desc has no %s",
                           desc->strategy ? "loss" : "strategy");
    if (flags == 0 || flags == DTRAIN_TAPE_BF16 || flags == DTRAIN_TAPE_F16) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                       "dtrain_trainer_create: tape_flags is %#x, expected 0, DTRAIN_TAPE_BF16 or "
                       "DTRAIN_TAPE_F16",
                       flags);
}

static dtrain_result dtrain__trainer_scaling(dtrain_trainer *trainer)
{
    dtrain_loss_scaler_desc *desc = &trainer->desc.loss_scaling;
    const bool given = desc->initial_scale != 0 || desc->growth_factor != 0 ||
                       desc->backoff_factor != 0 || desc->growth_interval || desc->hysteresis ||
                       desc->minimum_scale != 0;
    trainer->scaling = given || (trainer->desc.tape_flags & DTRAIN_TAPE_F16);
    if (!trainer->scaling) return DTRAIN_OK;
    DTRAIN__TRY(dtrain__check_scalable(trainer->desc.strategy, "dtrain_trainer_create",
                                       given ? "loss_scaling" : "DTRAIN_TAPE_F16"));
    if (!given) *desc = dtrain_loss_scaler_defaults();
    return dtrain_loss_scaler_init(&trainer->scaler, desc);
}

DTRAIN_API dtrain_result dtrain_trainer_create(dtrain_world *world, const dtrain_trainer_desc *desc,
                                               dtrain_trainer **out)
{
    if (!world || !desc || !out)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_trainer_create: world, desc or out is NULL");
    *out = NULL;
    DTRAIN__TRY(dtrain__check_trainer(desc));
    dtrain_allocator allocator = dtrain__resolve_allocator(dtrain_world_allocator(world));
    dtrain_trainer *trainer =
        (dtrain_trainer *)dtrain__alloc(&allocator, 1, sizeof *trainer, "a trainer");
    if (!trainer) return DTRAIN_ERROR_MEMORY;
    trainer->allocator = allocator;
    trainer->world = world;
    trainer->desc = *desc;
    if (trainer->desc.accumulation == 0) trainer->desc.accumulation = 1;
    trainer->comm = dtrain_strategy_comm(desc->strategy);
    trainer->rank = dtrain_comm_rank(trainer->comm);
    trainer->ranks = dtrain_comm_size(trainer->comm);
    trainer->slow_rank = -1;
    dtrain_result result = dtrain__trainer_alloc(trainer);
    if (result == DTRAIN_OK) result = dtrain__trainer_scaling(trainer);
    if (result == DTRAIN_OK && desc->graph) result = dtrain__queue_create(trainer);
    if (result != DTRAIN_OK) {
        dtrain_trainer_destroy(trainer);
        return result;
    }
    *out = trainer;
    return DTRAIN_OK;
}

DTRAIN_API void dtrain_trainer_destroy(dtrain_trainer *trainer)
{
    if (!trainer) return;
    dtrain_allocator allocator = trainer->allocator;
    size_t ranks = (size_t)trainer->ranks;
    dtrain__queue_destroy(trainer);
    dtrain_tape_destroy(trainer->tape);
    dtrain__free(&allocator, trainer->words, ranks, DTRAIN__WORDS_BYTES);
    dtrain__free(&allocator, trainer->compute, ranks, sizeof *trainer->compute);
    dtrain__free(&allocator, trainer->named, ranks, sizeof *trainer->named);
    dtrain__free(&allocator, trainer, 1, sizeof *trainer);
}

DTRAIN_API dtrain_tape *dtrain_trainer_tape(dtrain_trainer *trainer)
{
    return trainer ? trainer->tape : NULL;
}

/* ---- what ranks tell each other ---------------------------------------------------------------*/

/* This rank's words go into its slot; afterwards every rank has the same `words`. Gathered in
 * place, and nothing is allocated per step. */
DTRAIN__PRIVATE dtrain_result dtrain__trainer_exchange(dtrain_trainer *trainer, const float *own)
{
    float *slot = trainer->words + trainer->rank * DTRAIN__WORD_COUNT;
    memcpy(slot, own, DTRAIN__WORDS_BYTES);
    return dtrain_all_gather(trainer->comm, slot, trainer->words, DTRAIN__WORD_COUNT,
                             DTRAIN_DTYPE_F32, NULL);
}

DTRAIN__PRIVATE float dtrain__trainer_word(const dtrain_trainer *trainer, int rank, int word)
{
    return trainer->words[rank * DTRAIN__WORD_COUNT + word];
}

/* Over ranks, in rank order: the same bits everywhere. */
DTRAIN__PRIVATE double dtrain__trainer_mean(const dtrain_trainer *trainer, int word)
{
    double sum = 0;
    for (int r = 0; r < trainer->ranks; r++) sum += (double)dtrain__trainer_word(trainer, r, word);
    return sum / trainer->ranks;
}

/* ---- one step ---------------------------------------------------------------------------------*/

/* Random numbers of dropout must differ between steps, micro-batches and ranks, and a run that is
 * repeated must repeat them. A pass uses the sum of both: the first changes from step to step, the
 * second is the same in all. */
DTRAIN__PRIVATE uint64_t dtrain__step_seed(const dtrain_trainer *trainer)
{
    uint32_t random[4];
    uint64_t stream = DTRAIN__STREAM_DROPOUT + (uint64_t)trainer->rank;
    dtrain_philox(trainer->desc.seed, stream, (uint64_t)trainer->step, random);
    return (uint64_t)random[1] << 32 | random[0];
}
DTRAIN__PRIVATE uint64_t dtrain__micro_seed(uint32_t micro)
{
    return UINT64_C(0x9e3779b97f4a7c15) * micro; /* an odd factor: no two are equal */
}

/* What the loss's gradient starts as. A power of two as scale changes no bit of the update. */
DTRAIN__PRIVATE float dtrain__backward_scale(const dtrain_trainer *trainer)
{
    const float scale = trainer->scaling ? trainer->scaler.scale : 1;
    return scale / (float)trainer->desc.accumulation;
}

/* One micro-batch. The loss is read after backward and finish: a device with a queue works through
 * all of it before the host waits. A tape error (a NULL tensor) comes out of backward. */
static dtrain_result dtrain__trainer_micro(dtrain_trainer *trainer, uint32_t micro,
                                           double *loss_sum)
{
    const dtrain_trainer_desc *desc = &trainer->desc;
    float loss = 0;
    DTRAIN__TRY(dtrain_strategy_accumulate(desc->strategy, micro + 1 < desc->accumulation));
    if (desc->next_batch) DTRAIN__TRY(desc->next_batch(desc->user));
    DTRAIN__TRY(dtrain_tape_begin(trainer->tape, desc->tape_flags,
                                  dtrain__step_seed(trainer) + dtrain__micro_seed(micro)));
    dtrain_tensor *tensor = desc->loss(trainer->tape, desc->user);
    DTRAIN__TRY(dtrain_tape_backward(trainer->tape, tensor, dtrain__backward_scale(trainer)));
    DTRAIN__TRY(dtrain_strategy_finish(desc->strategy));
    DTRAIN__TRY(dtrain_tensor_read(trainer->tape, tensor, &loss));
    *loss_sum += (double)loss;
    return DTRAIN_OK;
}

/* Micro-batches, norm, update. Fills loss, grad_norm and lr. */
DTRAIN__PRIVATE dtrain_result dtrain__trainer_update(dtrain_trainer *trainer,
                                                     dtrain_step_record *record)
{
    const dtrain_trainer_desc *desc = &trainer->desc;
    float norm = 0, scale = 1, lr = dtrain_schedule_lr(&desc->schedule, trainer->step);
    double loss_sum = 0;
    bool found_inf;
    for (uint32_t micro = 0; micro < desc->accumulation; micro++)
        DTRAIN__TRY(dtrain__trainer_micro(trainer, micro, &loss_sum));
    if (trainer->scaling)
        DTRAIN__TRY(dtrain_loss_scaler_unscale(&trainer->scaler, desc->strategy, desc->clip, &norm,
                                               &scale, &found_inf));
    else DTRAIN__TRY(dtrain_clip_grad_norm(desc->strategy, desc->clip, &norm, &scale));
    if (dtrain_is_finite(norm)) DTRAIN__TRY(dtrain_optimizer_step(desc->optimizer, lr, scale));
    record->loss = loss_sum / desc->accumulation;
    record->grad_norm = (double)norm;
    record->lr = (double)lr;
    return DTRAIN_OK;
}
