/* The micro-batches of a step over a pipeline
 *
 * A rank walks its schedule (parallel/runner.c) and runs passes of its own stages on the tape
 * (tape/stage.c):
 *
 *     before the schedule      fetch the first micro-batch; survey: what crosses from stage to
 *                              stage. In the first step agree on a full batch
 *     FORWARD                  fetch the micro-batch, once on each rank; run the loss
 *     BACKWARD, WEIGHT         from the loss or from gradients that came; behind the last
 *                              micro-batch parameters are ready, and reductions over the data axis
 *                              start inside of the bubble
 *     messages                 addresses of what crosses
 *     behind the schedule      weights of all micro-batches; dtrain_strategy_finish, once
 *
 * To the strategy the whole schedule is one backward. All ranks of a pipeline have the same data,
 * so that they agree without a message on which micro-batches have none, and on the weights of
 * those that have: every rank knows the targets. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/log.h"
#include "core/result.h"
#include "world/timeline.h"
#include "world/timeline_internal.h"
#include "comm/comm_internal.h"
#include "parallel/pipeline.h"
#include "parallel/schedule_internal.h"
#include "strategy/strategy.h"
#include "strategy/view_internal.h"
#include "tape/stage_internal.h"
#include "tape/tape.h"
#include "tape/tape_internal.h"
#include "optim/optim_internal.h"
#include "train/trainer.h"
#include "train/trainer_internal.h"

typedef struct dtrain__pipeline {
    dtrain_pipeline_schedule *schedule;
    int stages;
    int32_t *slots;         /* (chunks, micro_batches) */
    dtrain_tensor **losses; /* (slot_count) of the last stage's passes */
    float *read; /* page-locked (micro_batches): losses being copied; NULL: read at once */
    size_t slot_count;
    bool agreed; /* all ranks have the same full batch */
} dtrain__pipeline;

/* Return the slot of a micro-batch's pass of a stage; -1: no stage of this rank. */
static int32_t dtrain__line_slot(const dtrain_trainer *trainer, int stage, int32_t micro)
{
    const dtrain_pipeline_schedule *s = trainer->pipeline->schedule;
    if (stage < 0) return -1;
    const dtrain__place_of_stage place = dtrain__pipeline_place(s->kind, s->ranks, stage);
    if (place.rank != trainer->groups.pipeline_rank) return -1;
    return trainer->pipeline->slots[place.chunk * s->micro_batches + micro];
}

static int dtrain__line_stage(const dtrain_trainer *trainer, const dtrain_pipeline_action *action)
{
    return dtrain__action_stage(trainer->pipeline->schedule, trainer->groups.pipeline_rank, action);
}

/* Forget the step before. */
static void dtrain__line_reset(dtrain_trainer *trainer)
{
    dtrain__stage_reset(trainer->tape);
    memset(trainer->micros, 0, trainer->desc.micro_batches * sizeof *trainer->micros);
    for (uint32_t m = 0; m < trainer->desc.micro_batches; m++) trainer->micros[m].slot = -1;
}

/* ---- Passes -----------------------------------------------------------------------------------*/

/* Run the model's function, the loss or one of the host's own, in the pass that has begun. */
static dtrain_result dtrain__line_call(dtrain_trainer *trainer, dtrain_loss_fn function, void *user,
                                       int64_t count, dtrain_tensor **made)
{
    *made = function(trainer->tape, user);
    DTRAIN__TRY(dtrain__stage_end(trainer->tape));
    return dtrain__check_made(trainer, function, *made, count);
}

/* Run the function with all stages remote, to find which tensors cross, and check that the last
 * stage makes the tensor that it returns. Local. */
static dtrain_result dtrain__line_survey(dtrain_trainer *trainer, dtrain_loss_fn function,
                                         void *user, uint32_t flags, int64_t count,
                                         dtrain_tensor **made)
{
    const dtrain__stage_source none = {-1, -1};
    const int last = trainer->pipeline->stages - 1;
    dtrain__stage_reset(trainer->tape);
    DTRAIN__TRY(dtrain__stage_begin(trainer->tape, 0, 0, DTRAIN__SURVEY, none,
                                    trainer->desc.tape_flags | flags, 0));
    DTRAIN__TRY(dtrain__line_call(trainer, function, user, count, made));
    const int stage = ((const dtrain__tape_tensor *)*made)->stage;
    if (stage == last) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_USAGE,
                       "%s returned is of stage %d, and values are read from what the last one, "
                       "%d, makes; it should run all units of the model",
                       function == trainer->desc.loss ? "dtrain_trainer: what loss"
                                                      : "dtrain_trainer_forward: what forward",
                       stage, last);
}

/* Run the function in the slot of a FORWARD. The slot of a micro-batch's first pass on this rank
 * keeps the inputs. */
static dtrain_result dtrain__line_pass(dtrain_trainer *trainer, dtrain_loss_fn function, void *user,
                                       uint32_t flags, int64_t count,
                                       const dtrain_pipeline_action *action, dtrain_tensor **made)
{
    const dtrain__pipeline *line = trainer->pipeline;
    const int32_t number = action->micro_batch, slot = action->slot;
    dtrain__micro *micro = &trainer->micros[number];
    const int stage = dtrain__line_stage(trainer, action);
    dtrain__stage_source source = {action->inbox, dtrain__line_slot(trainer, stage - 1, number)};
    const uint64_t seed =
        flags & DTRAIN_TAPE_NO_GRAD ? 0 : dtrain__pass_seed(trainer, (uint32_t)number);
    if (micro->slot < 0) micro->slot = slot;
    line->slots[action->chunk * line->schedule->micro_batches + number] = slot;
    DTRAIN__TRY(dtrain__stage_begin(trainer->tape, (uint32_t)slot, (uint32_t)micro->slot, stage,
                                    source, trainer->desc.tape_flags | flags, seed));
    return dtrain__line_call(trainer, function, user, count, made);
}

/* Fetch the next micro-batch, once on each rank. */
static dtrain_result dtrain__line_fetch(dtrain_trainer *trainer, dtrain__micro *micro)
{
    if (micro->fetched) return DTRAIN_OK;
    DTRAIN__TRY(dtrain__trainer_fetch(trainer));
    micro->fetched = true;
    micro->joined = trainer->ended;
    return DTRAIN_OK;
}

/* An error of the fetch fails the step on all ranks, which are in the middle of the schedule. */
static dtrain_result dtrain__line_forward(dtrain_trainer *trainer,
                                          const dtrain_pipeline_action *action)
{
    const dtrain_trainer_desc *desc = &trainer->desc;
    dtrain__micro *micro = &trainer->micros[action->micro_batch];
    const bool last = dtrain__line_stage(trainer, action) == trainer->pipeline->stages - 1;
    const bool first = micro->slot < 0;
    dtrain_tensor *loss;
    if (first) DTRAIN__TRY(dtrain__line_fetch(trainer, micro));
    if (micro->joined) return last ? dtrain__end_sums(desc->strategy, 0, true) : DTRAIN_OK;
    DTRAIN__TRY(dtrain__line_pass(trainer, desc->loss, desc->user, 0, 1, action, &loss));
    trainer->pipeline->losses[action->slot] = last ? loss : NULL;
    micro->samples = ((const dtrain__tape_tensor *)loss)->samples;
    if (micro->samples.valid) { /* the tensor is gone when its slot is used again */
        memcpy(micro->valid, micro->samples.valid, sizeof micro->valid);
        micro->samples.valid = micro->valid;
    }
    if (!desc->strategy) return DTRAIN_OK; /* a plan: nothing is weighed */
    if (first) micro->weight = dtrain__micro_weight(desc->strategy);
    return last ? dtrain__end_sums(desc->strategy, trainer->tape->pass.sums, false) : DTRAIN_OK;
}

static dtrain_result dtrain__line_backward(dtrain_trainer *trainer,
                                           const dtrain_pipeline_action *action)
{
    dtrain__pipeline *line = trainer->pipeline;
    dtrain_device *device = trainer->tape->device;
    const int32_t number = action->micro_batch;
    const bool more = (uint32_t)number + 1 < trainer->desc.micro_batches;
    const uint32_t slot = (uint32_t)action->slot;
    const dtrain_tensor *loss = line->losses[slot];
    DTRAIN__TRY(dtrain__stage_backward(trainer->tape, slot, line->losses[slot],
                                       dtrain__micro_scale(trainer), more,
                                       dtrain__pipeline_splits(line->schedule->kind)));
    const int32_t before =
        dtrain__line_slot(trainer, dtrain__line_stage(trainer, action) - 1, number);
    if (before >= 0) DTRAIN__TRY(dtrain__stage_seed(trainer->tape, (uint32_t)before, &slot));
    if (!loss) return DTRAIN_OK;
    if (!line->read)
        return dtrain_tensor_read(trainer->tape, loss, &trainer->micros[number].loss, NULL);
    return device->ops->copy_async(device, line->read + number, loss->data, sizeof(float),
                                   DTRAIN_COPY_DEVICE_TO_HOST, NULL);
}

static dtrain_result dtrain__line_compute(void *user, const dtrain_pipeline_action *action)
{
    dtrain_trainer *trainer = (dtrain_trainer *)user;
    const bool joined = trainer->micros[action->micro_batch].joined;
    dtrain_result result = DTRAIN_OK;
    if (action->act == DTRAIN_PIPELINE_ACT_FORWARD) result = dtrain__line_forward(trainer, action);
    else if (action->act == DTRAIN_PIPELINE_ACT_BACKWARD && !joined)
        result = dtrain__line_backward(trainer, action);
    else if (action->act == DTRAIN_PIPELINE_ACT_WEIGHT && !joined)
        result = dtrain__stage_weights(trainer->tape, (uint32_t)action->slot);
    if (result != DTRAIN_OK || !trainer->desc.strategy) return result;
    return dtrain_strategy_weight(trainer->desc.strategy, 1); /* what the loss set was its own */
}

/* ---- Messages ---------------------------------------------------------------------------------*/

/* Say where part i of a message is. What is received gets its memory with the first part. Whether a
 * micro-batch has data is known from its forward on, on both sides of a gradient; what FORWARD
 * makes is received before, so that it is sent as zeros where there is none. */
static dtrain_result dtrain__line_part(void *user, const dtrain_pipeline_action *action, size_t i,
                                       dtrain_pipeline_part *part)
{
    dtrain_trainer *trainer = (dtrain_trainer *)user;
    dtrain_tape *tape = trainer->tape;
    const bool joined = trainer->micros[action->micro_batch].joined;
    const int stage = dtrain__line_stage(trainer, action);
    const bool receives = action->act == DTRAIN_PIPELINE_ACT_RECEIVE;
    const bool gradient = action->act == DTRAIN_PIPELINE_ACT_SEND_GRADIENT ||
                          action->act == DTRAIN_PIPELINE_ACT_RECEIVE_GRADIENT;
    const bool before = receives || action->act == DTRAIN_PIPELINE_ACT_SEND_GRADIENT;
    size_t crossing;
    if (joined && gradient) return DTRAIN_OK;
    if (receives && i == 0)
        DTRAIN__TRY(dtrain__stage_receive(tape, (uint32_t)action->inbox, stage));
    if (action->act == DTRAIN_PIPELINE_ACT_SEND_GRADIENT && i == 0)
        dtrain__stage_sent(tape, (uint32_t)action->slot);
    if (action->act == DTRAIN_PIPELINE_ACT_RECEIVE_GRADIENT && i == 0)
        DTRAIN__TRY(dtrain__stage_seed(tape, (uint32_t)action->slot, NULL));
    if (!dtrain__stage_item(tape, before ? stage - 1 : stage, gradient, i, &crossing))
        return DTRAIN_OK;
    const dtrain__crossing *c = &tape->stages->crossings[crossing];
    part->address = receives ? tape->stages->inboxes[action->inbox].received[crossing]
                    : joined ? dtrain__crossing_zeros(tape, crossing)
                             : dtrain__stage_data(tape, (uint32_t)action->slot, crossing, gradient);
    if (!part->address) return tape->error;
    part->count = (size_t)c->count;
    part->dtype = (dtrain_dtype)c->dtype;
    return DTRAIN_OK;
}

/* ---- A step -----------------------------------------------------------------------------------*/

/* Find which tensors cross between stages in this step: its batch may have another shape than the
 * last step's. Gradients cross as if only those parameters were frozen that create has compared. A
 * rank without further data sends what crossed before. All ranks of the axis have the same samples
 * and shapes, so each finds the same without an exchange; once, they agree on the unit. */
static dtrain_result dtrain__line_plan(dtrain_trainer *trainer)
{
    const dtrain_trainer_desc *desc = &trainer->desc;
    bool *agreed = &trainer->pipeline->agreed;
    dtrain_tensor *loss;
    DTRAIN__TRY(dtrain__line_fetch(trainer, trainer->micros));
    if (*agreed && trainer->micros->joined) return DTRAIN_OK;
    const dtrain_result result = dtrain__line_survey(trainer, desc->loss, desc->user, 0, 1, &loss);
    if (*agreed) return result;
    DTRAIN__TRY(dtrain__agree(trainer->groups.all, result));
    *agreed = true;
    return dtrain__agree_full_batch(desc->strategy,
                                    ((const dtrain__tape_tensor *)loss)->samples.terms);
}

/* Run the schedule, read the losses, weigh the micro-batches as if they had been backwards of their
 * own, and finish. A gradient that is missing ends the step on all ranks, and the next one can be
 * taken. */
DTRAIN__PRIVATE dtrain_result dtrain__pipeline_step(dtrain_trainer *trainer)
{
    dtrain__pipeline *line = trainer->pipeline;
    dtrain_strategy *strategy = trainer->desc.strategy;
    dtrain_device *device = trainer->tape->device;
    const uint32_t micro_batches = trainer->desc.micro_batches;
    const dtrain_pipeline_work work = {dtrain__line_compute, dtrain__line_part, trainer};
    uint32_t joined = 0;
    bool over;
    DTRAIN__TRY(dtrain__strategy_usable(strategy, "dtrain_trainer_step"));
    DTRAIN__TRY(dtrain_strategy_accumulate(strategy, false)); /* the schedule is one backward */
    dtrain__expect_schedule(strategy, micro_batches > 1);     /* other trainers', too */
    dtrain__line_reset(trainer);
    dtrain_result result = dtrain__line_plan(trainer);
    if (result == DTRAIN_OK)
        result = dtrain_pipeline_run(line->schedule, trainer->groups.pipeline, &work);
    if (result == DTRAIN_OK && line->read) result = device->ops->synchronize(device);
    DTRAIN__TRY(dtrain__strategy_keep(strategy, result));
    for (uint32_t m = 0; m < micro_batches; m++) {
        dtrain__micro *micro = &trainer->micros[m];
        joined += micro->joined;
        if (line->read && !micro->joined) micro->loss = line->read[m];
        dtrain__weigh_micro(strategy, micro->joined ? NULL : &micro->samples, m + 1 < micro_batches,
                            &micro->weight);
    }
    DTRAIN__TRY(dtrain_strategy_finish(strategy));
    if (joined < micro_batches) return DTRAIN_OK;
    return dtrain__strategy_keep(strategy, dtrain__counts_settle(strategy, &over));
}

/* Return the result of a step, and add to an error of a wait that this rank's data had ended in it:
 * where the others of its pipeline have more, they wait for messages that do not come, until the
 * deadline. */
DTRAIN__PRIVATE dtrain_result dtrain__pipeline_failed(const dtrain_trainer *trainer,
                                                      dtrain_result result)
{
    char text[DTRAIN__ERROR_BYTES];
    uint32_t micro = 0;
    if (!trainer->pipeline || (result != DTRAIN_ERROR_TIMEOUT && result != DTRAIN_ERROR_MISMATCH))
        return result;
    while (micro < trainer->desc.micro_batches && !trainer->micros[micro].joined) micro++;
    if (micro == trainer->desc.micro_batches) return result;
    snprintf(text, sizeof text, "%s", dtrain__bare(dtrain_last_error()));
    return dtrain_fail(result,
                       "the data of this rank had ended before micro-batch %u, and all ranks of a "
                       "pipeline must have the same samples: %s",
                       micro, text);
}

/* ---- Evaluation, and other forward passes -----------------------------------------------------*/

/* Receive or send the tensors that cross from or to a stage of another rank, and wait. */
static dtrain_result dtrain__line_carry(dtrain_trainer *trainer,
                                        const dtrain_pipeline_action *action, int stage)
{
    const dtrain_pipeline_schedule *s = trainer->pipeline->schedule;
    const int peer = dtrain__pipeline_place(s->kind, s->ranks, stage).rank;
    dtrain_comm *comm = trainer->groups.pipeline;
    for (size_t i = 0;; i++) {
        dtrain_pipeline_part part;
        dtrain_work *work = NULL;
        memset(&part, 0, sizeof part);
        DTRAIN__TRY(dtrain__line_part(trainer, action, i, &part));
        if (part.count == 0) return DTRAIN_OK;
        DTRAIN__TRY(action->act == DTRAIN_PIPELINE_ACT_RECEIVE
                        ? dtrain_recv(comm, part.address, part.count, part.dtype, peer, &work)
                        : dtrain_send(comm, part.address, part.count, part.dtype, peer, &work));
        DTRAIN__TRY(dtrain_work_wait(work));
    }
}

/* Run this rank's stages in their order: chunk c has slot c and inbox c. If one of them is the last
 * stage, read its output. */
static dtrain_result dtrain__line_stages(dtrain_trainer *trainer, dtrain_loss_fn function,
                                         void *user, float *values, int64_t count,
                                         dtrain_tensor **made)
{
    const dtrain__pipeline *line = trainer->pipeline;
    memset(trainer->micros, 0, sizeof *trainer->micros);
    for (int32_t chunk = 0; chunk < line->schedule->chunks; chunk++) {
        dtrain_pipeline_action action = {DTRAIN_PIPELINE_ACT_RECEIVE, chunk, 0, -1, chunk, -1};
        const int stage = dtrain__line_stage(trainer, &action);
        if (stage && dtrain__line_slot(trainer, stage - 1, 0) < 0) {
            action.inbox = chunk;
            DTRAIN__TRY(dtrain__line_carry(trainer, &action, stage - 1));
        }
        const uint32_t span =
            dtrain__span_begin(trainer->world, DTRAIN_SPAN_FORWARD, "evaluate", DTRAIN__UNNUMBERED);
        const dtrain_result result =
            dtrain__line_pass(trainer, function, user, DTRAIN_TAPE_NO_GRAD, count, &action, made);
        dtrain__span_end(trainer->world, span);
        DTRAIN__TRY(result);
        if (stage == line->stages - 1)
            DTRAIN__TRY(dtrain_tensor_read(trainer->tape, *made, values, NULL));
        else if (dtrain__line_slot(trainer, stage + 1, 0) < 0) {
            action.act = DTRAIN_PIPELINE_ACT_SEND;
            DTRAIN__TRY(dtrain__line_carry(trainer, &action, stage + 1));
        }
    }
    return DTRAIN_OK;
}

/* Run a forward pass: of an evaluation (samples: what the loss is a mean over), or of the host's
 * own (samples NULL), whose values all ranks get. What crosses is found anew for each call:
 * shapes can differ from call to call. A refusal of the host's pass, on all ranks
 * before anything is sent, does not make the strategy fail. */
DTRAIN__PRIVATE dtrain_result dtrain__pipeline_forward(dtrain_trainer *trainer,
                                                       dtrain_loss_fn function, void *user,
                                                       float *values, int64_t count,
                                                       dtrain__samples *samples)
{
    const dtrain_pipeline_schedule *s = trainer->pipeline->schedule;
    dtrain_tensor *made = NULL;
    dtrain_result result =
        dtrain__line_survey(trainer, function, user, DTRAIN_TAPE_NO_GRAD, count, &made);
    if (!samples) result = dtrain__agree(trainer->groups.all, result);
    DTRAIN__TRY(result);
    result = dtrain__line_stages(trainer, function, user, values, count, &made);
    if (samples && result == DTRAIN_OK) *samples = ((const dtrain__tape_tensor *)made)->samples;
    else if (result == DTRAIN_OK)
        result = dtrain_broadcast(
            trainer->groups.pipeline, values, (size_t)count, DTRAIN_DTYPE_F32,
            dtrain__pipeline_place(s->kind, s->ranks, trainer->pipeline->stages - 1).rank, NULL);
    return dtrain__strategy_keep(trainer->desc.strategy, result);
}

/* ---- Creation ---------------------------------------------------------------------------------*/

DTRAIN__PRIVATE dtrain_result dtrain__pipeline_create(dtrain_trainer *trainer,
                                                      const dtrain__stage_map *map,
                                                      const dtrain_pipeline_desc *desc)
{
    const dtrain_allocator *a = &trainer->allocator;
    const int rank = trainer->groups.pipeline_rank;
    const size_t micros = trainer->desc.micro_batches;
    dtrain_device *device = trainer->tape->device;
    int slots, inboxes;
    dtrain__pipeline *line = trainer->pipeline =
        (dtrain__pipeline *)dtrain__alloc(a, 1, sizeof *line, "a pipeline");
    if (!line) return DTRAIN_ERROR_MEMORY;
    DTRAIN__TRY(
        dtrain_pipeline_create(desc, trainer->groups.pipeline_ranks, (int)micros, &line->schedule));
    const dtrain_pipeline_schedule *s = line->schedule;
    dtrain__pipeline_room(s, rank, &slots, &inboxes);
    slots = (int)dtrain__max(slots, s->chunks); /* evaluation has one a chunk */
    inboxes = (int)dtrain__max(inboxes, s->chunks);
    line->slot_count = (size_t)slots;
    line->stages = s->ranks * s->chunks;
    line->slots = (int32_t *)dtrain__alloc(a, micros * (size_t)s->chunks, sizeof *line->slots,
                                           "slots of passes");
    line->losses =
        (dtrain_tensor **)dtrain__alloc(a, line->slot_count, sizeof *line->losses, "losses");
    if (!line->slots || !line->losses) return DTRAIN_ERROR_MEMORY;
    if (dtrain__pipeline_place(s->kind, s->ranks, line->stages - 1).rank == rank &&
        device->ops->event_query) { /* the host queues passes ahead of the device */
        void *memory;
        DTRAIN__TRY(device->ops->host_alloc(device, micros * sizeof *line->read, &memory));
        line->read = (float *)memory;
    }
    return dtrain__stages_create(trainer->tape, map->stages, map->here, map->units, map->unit_count,
                                 (uint32_t)slots, (uint32_t)inboxes);
}

DTRAIN__PRIVATE void dtrain__pipeline_destroy(dtrain_trainer *trainer)
{
    const dtrain_allocator *a = &trainer->allocator;
    const size_t micros = trainer->desc.micro_batches;
    dtrain__pipeline *line = trainer->pipeline;
    if (!line) return;
    if (line->read) {
        dtrain_device *device = dtrain_world_device(trainer->world);
        device->ops->synchronize(device); /* of a step that failed */
        device->ops->host_free(device, line->read, micros * sizeof *line->read);
    }
    if (line->slots)
        dtrain__free(a, line->slots, micros * (size_t)line->schedule->chunks, sizeof *line->slots);
    dtrain__free(a, line->losses, line->slot_count, sizeof *line->losses);
    dtrain_pipeline_destroy(line->schedule);
    dtrain__free(a, line, 1, sizeof *line);
}

/* Walk this rank's list without messages, on a tape of the plan device, which counts what a step
 * needs. Local. */
DTRAIN__PRIVATE dtrain_result dtrain__pipeline_plan(const dtrain_trainer_desc *desc,
                                                    const dtrain__strategy_plan *plan,
                                                    dtrain_tape *tape)
{
    dtrain_trainer rehearsal;
    dtrain_tensor *loss;
    if (!plan->stages)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "dtrain_trainer_plan: which stages of a pipeline this rank has is known "
                           "to a strategy; give desc one");
    memset(&rehearsal, 0, sizeof rehearsal);
    rehearsal.desc = *desc;
    rehearsal.desc.next_batch = NULL; /* what is in the buffers does not matter */
    rehearsal.desc.strategy = NULL;
    if (desc->micro_batches == 0) rehearsal.desc.micro_batches = 1;
    rehearsal.allocator = tape->allocator;
    rehearsal.groups = plan->groups;
    rehearsal.tape = tape;
    const size_t micros = rehearsal.desc.micro_batches;
    rehearsal.micros = (dtrain__micro *)dtrain__alloc(&tape->allocator, micros,
                                                      sizeof *rehearsal.micros, "micro-batches");
    dtrain_result result = rehearsal.micros ? DTRAIN_OK : DTRAIN_ERROR_MEMORY;
    if (result == DTRAIN_OK)
        result = dtrain__pipeline_create(&rehearsal, plan->stages, plan->pipeline);
    if (result == DTRAIN_OK)
        result = dtrain__line_survey(&rehearsal, desc->loss, desc->user, 0, 1, &loss);
    if (result == DTRAIN_OK) {
        const dtrain_pipeline_schedule *s = rehearsal.pipeline->schedule;
        const size_t *first = &s->first[plan->groups.pipeline_rank];
        dtrain__line_reset(&rehearsal);
        for (size_t i = first[0]; i < first[1] && result == DTRAIN_OK; i++) {
            dtrain_pipeline_part part;
            result = dtrain__is_message(&s->actions[i])
                         ? dtrain__line_part(&rehearsal, &s->actions[i], 0, &part)
                         : dtrain__line_compute(&rehearsal, &s->actions[i]);
        }
    }
    dtrain__pipeline_destroy(&rehearsal);
    dtrain__free(&tape->allocator, rehearsal.micros, micros, sizeof *rehearsal.micros);
    return result;
}
