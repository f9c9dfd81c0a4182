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

/* A micro-batch under way on this rank. */
typedef struct dtrain__flight {
    int32_t batch; /* slot of its first pass on this rank, with its inputs; -1: none has begun */
    bool fetched;
    bool joined;  /* this rank's data had ended */
    float loss;   /* on the rank of the last stage */
    float weight; /* that next_batch or the loss has set by dtrain_strategy_weight, else 1 */
    dtrain__samples samples; /* what the loss is a mean of ... */
    float valid[2];          /* ... and what it points to */
} dtrain__flight;

struct dtrain__pipeline {
    dtrain_pipeline_schedule *schedule;
    dtrain_comm *comm; /* the pipeline axis */
    int rank, stages;
    const dtrain__stage_map *map;
    dtrain__flight *flights; /* (micro_batches) */
    int32_t *slots;          /* (chunks, micro_batches) */
    dtrain_tensor **losses;  /* (slots) of the last stage's passes */
    float *read; /* page-locked (micro_batches): losses being copied; NULL: read at once */
    size_t slot_count;
    bool agreed;   /* all ranks have the same full batch */
    uint64_t seed; /* of the step under way */
};

/* Return where the slot of a pass of a chunk is noted. */
static int32_t *dtrain__slot_at(const dtrain__pipeline *line, int chunk, int micro)
{
    return &line->slots[(size_t)chunk * (size_t)line->schedule->micro_batches + (size_t)micro];
}

/* Find the slot of a neighbour stage's pass where that stage is on this rank too; false: it is on
 * another one. */
static bool dtrain__neighbour(const dtrain__pipeline *line, int stage, int micro, uint32_t *slot)
{
    const dtrain_pipeline_schedule *s = line->schedule;
    const dtrain__place_of_stage place = dtrain__pipeline_place(s->kind, s->ranks, stage);
    if (place.rank != line->rank) return false;
    *slot = (uint32_t)*dtrain__slot_at(line, place.chunk, micro);
    return true;
}

/* ---- Passes -----------------------------------------------------------------------------------*/

/* Note what the loss is a mean of; the tensor is gone when its slot is used again. */
static void dtrain__flight_note(dtrain__flight *flight, const dtrain_tensor *loss)
{
    flight->samples = ((const dtrain__tape_tensor *)loss)->samples;
    if (!flight->samples.valid) return;
    memcpy(flight->valid, flight->samples.valid, sizeof flight->valid);
    flight->samples.valid = flight->valid;
}

/* Check that the model's function, the loss or one of the host's own, has made something. */
static dtrain_result dtrain__line_made(const dtrain_trainer *trainer, dtrain_loss_fn function,
                                       const void *made)
{
    if (made) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_USAGE, "%s returned NULL",
                       function == trainer->desc.loss ? "dtrain_trainer_step: loss"
                                                      : "dtrain_trainer_forward: forward");
}

/* Run the model's function in the pass that has begun. */
static dtrain_result dtrain__line_pass(dtrain_trainer *trainer, dtrain_loss_fn function, void *user,
                                       dtrain_tensor **made)
{
    *made = function(trainer->tape, user);
    DTRAIN__TRY(dtrain__stage_end(trainer->tape));
    return dtrain__line_made(trainer, function, *made);
}

/* Fetch the next micro-batch, once on each rank. */
static dtrain_result dtrain__flight_fetch(dtrain_trainer *trainer, dtrain__flight *flight)
{
    if (flight->fetched) return DTRAIN_OK;
    DTRAIN__TRY(dtrain__trainer_fetch(trainer));
    flight->fetched = true;
    flight->joined = trainer->ended;
    return DTRAIN_OK;
}

static dtrain_result dtrain__line_forward(dtrain_trainer *trainer,
                                          const dtrain_pipeline_action *action)
{
    const dtrain_trainer_desc *desc = &trainer->desc;
    dtrain__pipeline *line = trainer->pipeline;
    dtrain__flight *flight = &line->flights[action->micro_batch];
    const int stage = dtrain__action_stage(line->schedule, line->rank, action);
    const bool first = flight->batch < 0;
    dtrain__stage_source source = {action->inbox, -1};
    uint32_t before;
    if (first) { /* its first pass here; an error fails the step on all ranks, which are in the
                    middle of the schedule */
        flight->batch = action->slot;
        DTRAIN__TRY(dtrain__flight_fetch(trainer, flight));
    }
    const bool last = stage == line->stages - 1;
    if (flight->joined) return last ? dtrain__end_sums(desc->strategy, 0, true) : DTRAIN_OK;
    *dtrain__slot_at(line, action->chunk, action->micro_batch) = action->slot;
    if (stage && dtrain__neighbour(line, stage - 1, action->micro_batch, &before))
        source.slot = (int32_t)before;
    const uint64_t seed = line->seed + dtrain__micro_seed((uint32_t)action->micro_batch);
    DTRAIN__TRY(dtrain__stage_begin(trainer->tape, (uint32_t)action->slot, (uint32_t)flight->batch,
                                    stage, source, desc->tape_flags, seed));
    dtrain_tensor *loss;
    DTRAIN__TRY(dtrain__line_pass(trainer, desc->loss, desc->user, &loss));
    dtrain__flight_note(flight, loss);
    line->losses[action->slot] = last ? loss : NULL;
    if (!desc->strategy) return DTRAIN_OK; /* a plan: nothing is weighed */
    if (first) flight->weight = dtrain__micro_weight(desc->strategy);
    if (!last) return DTRAIN_OK;
    return dtrain__end_sums(desc->strategy, trainer->tape->pass.sums, false);
}

static dtrain_result dtrain__line_backward(dtrain_trainer *trainer,
                                           const dtrain_pipeline_action *action)
{
    dtrain__pipeline *line = trainer->pipeline;
    dtrain__flight *flight = &line->flights[action->micro_batch];
    const int stage = dtrain__action_stage(line->schedule, line->rank, action);
    const bool more = (uint32_t)action->micro_batch + 1 < trainer->desc.micro_batches;
    const uint32_t slot = (uint32_t)action->slot;
    uint32_t before;
    if (flight->joined) return DTRAIN_OK;
    DTRAIN__TRY(dtrain__stage_backward(trainer->tape, slot, line->losses[slot],
                                       dtrain__micro_scale(trainer), more,
                                       dtrain__pipeline_splits(line->schedule->kind)));
    if (stage && dtrain__neighbour(line, stage - 1, action->micro_batch, &before))
        DTRAIN__TRY(dtrain__stage_seed(trainer->tape, before, &slot));
    if (!line->losses[slot]) return DTRAIN_OK;
    if (!line->read)
        return dtrain_tensor_read(trainer->tape, line->losses[slot], &flight->loss, NULL);
    dtrain_device *device = trainer->tape->device;
    return device->ops->copy_async(device, line->read + action->micro_batch,
                                   line->losses[slot]->data, sizeof(float),
                                   DTRAIN_COPY_DEVICE_TO_HOST, NULL);
}

/* Wait once for the losses of all micro-batches: the host queues passes ahead of a GPU. */
static dtrain_result dtrain__line_read(const dtrain_trainer *trainer)
{
    dtrain__pipeline *line = trainer->pipeline;
    if (!line->read) return DTRAIN_OK;
    DTRAIN__TRY(trainer->tape->device->ops->synchronize(trainer->tape->device));
    for (uint32_t micro = 0; micro < trainer->desc.micro_batches; micro++)
        if (!line->flights[micro].joined) line->flights[micro].loss = line->read[micro];
    return DTRAIN_OK;
}

static dtrain_result dtrain__line_compute(void *user, const dtrain_pipeline_action *action)
{
    dtrain_trainer *trainer = (dtrain_trainer *)user;
    dtrain_result result = DTRAIN_OK;
    if (action->act == DTRAIN_PIPELINE_ACT_FORWARD) result = dtrain__line_forward(trainer, action);
    else if (action->act == DTRAIN_PIPELINE_ACT_BACKWARD)
        result = dtrain__line_backward(trainer, action);
    else if (action->act == DTRAIN_PIPELINE_ACT_WEIGHT &&
             !trainer->pipeline->flights[action->micro_batch].joined)
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
    dtrain__pipeline *line = trainer->pipeline;
    dtrain_tape *tape = trainer->tape;
    dtrain__flight *flight = &line->flights[action->micro_batch];
    const int stage = dtrain__action_stage(line->schedule, line->rank, action);
    const bool receives = action->act == DTRAIN_PIPELINE_ACT_RECEIVE;
    const bool gradient = action->act == DTRAIN_PIPELINE_ACT_SEND_GRADIENT ||
                          action->act == DTRAIN_PIPELINE_ACT_RECEIVE_GRADIENT;
    const bool before = receives || action->act == DTRAIN_PIPELINE_ACT_SEND_GRADIENT;
    size_t crossing;
    if (flight->joined && gradient) return DTRAIN_OK;
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
                    : flight->joined
                        ? dtrain__crossing_zeros(tape, crossing)
                        : dtrain__stage_data(tape, (uint32_t)action->slot, crossing, gradient);
    if (!part->address) return tape->error;
    part->count = (size_t)c->count;
    part->dtype = (dtrain_dtype)c->dtype;
    return DTRAIN_OK;
}

/* ---- A step -----------------------------------------------------------------------------------*/

/* Run the model's function with all stages remote. Local. */
static dtrain_result dtrain__line_survey(dtrain_trainer *trainer, dtrain_loss_fn function,
                                         void *user, uint32_t flags,
                                         const dtrain__tape_tensor **made)
{
    const dtrain__stage_source none = {-1, -1};
    dtrain_tensor *tensor;
    dtrain__stage_reset(trainer->tape);
    DTRAIN__TRY(dtrain__stage_begin(trainer->tape, 0, 0, DTRAIN__SURVEY, none,
                                    trainer->desc.tape_flags | flags, 0));
    DTRAIN__TRY(dtrain__line_pass(trainer, function, user, &tensor));
    *made = (const dtrain__tape_tensor *)tensor;
    return DTRAIN_OK;
}

/* Check that what the model's function has made, and returned, is of the last stage. */
static dtrain_result dtrain__line_made_last(const dtrain_trainer *trainer, const char *what,
                                            const dtrain__tape_tensor *made)
{
    const int last = trainer->pipeline->stages - 1;
    if (made->stage == last) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_USAGE,
                       "%s returned is of stage %d, and values are read from what the last one, "
                       "%d, makes; it should run all units of the model",
                       what, (int)made->stage, last);
}

/* Run the loss with all stages remote, and check what it makes. Local. */
static dtrain_result dtrain__line_survey_loss(dtrain_trainer *trainer, void *user, uint32_t flags,
                                              const dtrain__tape_tensor **loss)
{
    DTRAIN__TRY(dtrain__line_survey(trainer, trainer->desc.loss, user, flags, loss));
    DTRAIN__TRY(dtrain__check_loss("dtrain_trainer", &(*loss)->tensor));
    return dtrain__line_made_last(trainer, "dtrain_trainer: what loss", *loss);
}

/* Find which tensors cross between stages in this step: its batch may have another shape than the
 * last step's. Gradients cross as if only those parameters were frozen that create has compared. A
 * rank without further data sends what crossed before. All ranks of the axis have the same samples
 * and shapes, so each finds the same without an exchange; once, they agree on the unit. */
static dtrain_result dtrain__line_plan(dtrain_trainer *trainer)
{
    dtrain__pipeline *line = trainer->pipeline;
    const dtrain__tape_tensor *loss = NULL;
    DTRAIN__TRY(dtrain__flight_fetch(trainer, &line->flights[0]));
    if (line->agreed && line->flights[0].joined) return DTRAIN_OK;
    const dtrain_result result = dtrain__line_survey_loss(trainer, trainer->desc.user, 0, &loss);
    if (line->agreed) return result;
    DTRAIN__TRY(dtrain__agree(trainer->groups.all, result));
    DTRAIN__TRY(dtrain__agree_full_batch(trainer->desc.strategy, loss->samples.terms));
    line->agreed = true;
    return DTRAIN_OK;
}

/* Weigh the micro-batches as if they had been backwards of their own, and finish. A gradient that
 * is missing ends the step on all ranks, and the next one can be taken. */
static dtrain_result dtrain__line_finish(dtrain_trainer *trainer)
{
    dtrain_strategy *strategy = trainer->desc.strategy;
    dtrain__pipeline *line = trainer->pipeline;
    const uint32_t micro_batches = trainer->desc.micro_batches;
    trainer->joined = 0;
    for (uint32_t micro = 0; micro < micro_batches; micro++) {
        const dtrain__flight *flight = &line->flights[micro];
        float weight = flight->joined ? 0 : flight->weight;
        trainer->joined += flight->joined;
        dtrain__weigh_micro(strategy, flight->joined ? NULL : &flight->samples,
                            micro + 1 < micro_batches, &weight);
        dtrain__trainer_add(trainer, micro, flight->loss, weight);
    }
    DTRAIN__TRY(dtrain_strategy_finish(strategy));
    bool over;
    if (trainer->joined < micro_batches) return DTRAIN_OK;
    return dtrain__strategy_keep(strategy, dtrain__counts_settle(strategy, &over));
}

/* ---- Evaluation, and other forward passes -----------------------------------------------------*/

/* Receive or send what crosses between two stages, and wait. */
static dtrain_result dtrain__line_carry(dtrain_trainer *trainer, int chunk, int stage, bool receive)
{
    const dtrain__pipeline *line = trainer->pipeline;
    const dtrain_pipeline_schedule *s = line->schedule;
    dtrain_tape *tape = trainer->tape;
    const int peer =
        dtrain__pipeline_place(s->kind, s->ranks, receive ? stage - 1 : stage + 1).rank;
    size_t crossing;
    for (size_t i = 0; dtrain__stage_item(tape, receive ? stage - 1 : stage, false, i, &crossing);
         i++) {
        const dtrain__crossing *c = &tape->stages->crossings[crossing];
        void *memory = receive ? tape->stages->inboxes[chunk].received[crossing]
                               : dtrain__stage_data(tape, (uint32_t)chunk, crossing, false);
        dtrain_work *work = NULL;
        const dtrain_dtype dtype = (dtrain_dtype)c->dtype;
        DTRAIN__TRY(receive
                        ? dtrain_recv(line->comm, memory, (size_t)c->count, dtype, peer, &work)
                        : dtrain_send(line->comm, memory, (size_t)c->count, dtype, peer, &work));
        DTRAIN__TRY(dtrain_work_wait(work));
    }
    return DTRAIN_OK;
}

/* Run the pass of one of this rank's stages, which are taken in their order: chunk c has slot c and
 * inbox c. */
static dtrain_result dtrain__line_run_stage(dtrain_trainer *trainer, dtrain_loss_fn function,
                                            void *user, int chunk, dtrain_tensor **made)
{
    const dtrain__pipeline *line = trainer->pipeline;
    const dtrain_pipeline_schedule *s = line->schedule;
    const int stage = dtrain_pipeline_stage(s->kind, s->ranks, s->chunks, line->rank, chunk);
    const uint32_t flags = trainer->desc.tape_flags | DTRAIN_TAPE_NO_GRAD;
    dtrain__stage_source source = {-1, -1};
    uint32_t slot;
    if (stage && dtrain__neighbour(line, stage - 1, 0, &slot)) source.slot = (int32_t)slot;
    else if (stage) source.inbox = chunk;
    if (source.inbox >= 0) {
        DTRAIN__TRY(dtrain__stage_receive(trainer->tape, (uint32_t)chunk, stage));
        DTRAIN__TRY(dtrain__line_carry(trainer, chunk, stage, true));
    }
    *dtrain__slot_at(line, chunk, 0) = chunk;
    DTRAIN__TRY(dtrain__stage_begin(trainer->tape, (uint32_t)chunk, 0, stage, source, flags, 0));
    const uint32_t span =
        dtrain__span_begin(trainer->world, DTRAIN_SPAN_FORWARD, "evaluate", DTRAIN__UNNUMBERED);
    const dtrain_result result = dtrain__line_pass(trainer, function, user, made);
    dtrain__span_end(trainer->world, span);
    DTRAIN__TRY(result);
    if (stage == line->stages - 1 || dtrain__neighbour(line, stage + 1, 0, &slot)) return DTRAIN_OK;
    return dtrain__line_carry(trainer, chunk, stage, false);
}

/* Run all of this rank's stages. If one of them is the last stage, read its output. *made is the
 * output of the rank's last pass. */
static dtrain_result dtrain__line_forward_pass(dtrain_trainer *trainer, dtrain_loss_fn function,
                                               void *user, float *values, dtrain_tensor **made)
{
    const dtrain__pipeline *line = trainer->pipeline;
    const dtrain_pipeline_schedule *s = line->schedule;
    const int last = line->stages - 1;
    for (int chunk = 0; chunk < s->chunks; chunk++) {
        DTRAIN__TRY(dtrain__line_run_stage(trainer, function, user, chunk, made));
        if (dtrain_pipeline_stage(s->kind, s->ranks, s->chunks, line->rank, chunk) == last)
            DTRAIN__TRY(dtrain_tensor_read(trainer->tape, *made, values, NULL));
    }
    return DTRAIN_OK;
}

DTRAIN__PRIVATE dtrain_result dtrain__pipeline_evaluate(dtrain_trainer *trainer, void *user,
                                                        float *loss, dtrain__samples *samples)
{
    const dtrain__tape_tensor *surveyed;
    dtrain_tensor *made = NULL;
    DTRAIN__TRY(dtrain__line_survey_loss(trainer, user, DTRAIN_TAPE_NO_GRAD, &surveyed));
    DTRAIN__TRY(dtrain__line_forward_pass(trainer, trainer->desc.loss, user, loss, &made));
    *samples = ((const dtrain__tape_tensor *)made)->samples;
    return DTRAIN_OK;
}

/* Find what crosses in a forward pass of the host's own, and check what it makes. Local. */
static dtrain_result dtrain__line_survey_forward(dtrain_trainer *trainer, dtrain_loss_fn function,
                                                 void *user, int64_t count)
{
    const dtrain__tape_tensor *made;
    DTRAIN__TRY(dtrain__line_survey(trainer, function, user, DTRAIN_TAPE_NO_GRAD, &made));
    DTRAIN__TRY(dtrain__forward_made(&made->tensor, count));
    return dtrain__line_made_last(trainer, "dtrain_trainer_forward: what forward", made);
}

/* What crosses is found anew for each call, whose shapes may be others than those before. What is
 * refused then, on all ranks before anything is sent, does not stand. */
DTRAIN__PRIVATE dtrain_result dtrain__pipeline_forward(dtrain_trainer *trainer,
                                                       dtrain_loss_fn function, void *user,
                                                       float *values, int64_t count)
{
    dtrain__pipeline *line = trainer->pipeline;
    const dtrain_pipeline_schedule *s = line->schedule;
    dtrain_tensor *made;
    const int root = dtrain__pipeline_place(s->kind, s->ranks, line->stages - 1).rank;
    DTRAIN__TRY(dtrain__agree(trainer->groups.all,
                              dtrain__line_survey_forward(trainer, function, user, count)));
    DTRAIN__TRY(dtrain__strategy_keep(
        trainer->desc.strategy, dtrain__line_forward_pass(trainer, function, user, values, &made)));
    return dtrain__strategy_keep(
        trainer->desc.strategy,
        dtrain_broadcast(line->comm, values, (size_t)count, DTRAIN_DTYPE_F32, root, NULL));
}

/* ---- A step, and creation ---------------------------------------------------------------------*/

/* Forget the step before. */
static void dtrain__line_reset(dtrain_trainer *trainer)
{
    dtrain__pipeline *line = trainer->pipeline;
    dtrain__stage_reset(trainer->tape);
    for (uint32_t micro = 0; micro < trainer->desc.micro_batches; micro++) {
        memset(&line->flights[micro], 0, sizeof line->flights[micro]);
        line->flights[micro].batch = -1;
    }
}

DTRAIN__PRIVATE dtrain_result dtrain__pipeline_step(dtrain_trainer *trainer)
{
    dtrain__pipeline *line = trainer->pipeline;
    dtrain_strategy *strategy = trainer->desc.strategy;
    const dtrain_pipeline_work work = {dtrain__line_compute, dtrain__line_part, trainer};
    DTRAIN__TRY(dtrain__strategy_usable(strategy, "dtrain_trainer_step"));
    DTRAIN__TRY(dtrain_strategy_accumulate(strategy, false)); /* the schedule is one backward */
    dtrain__expect_schedule(strategy, trainer->desc.micro_batches > 1); /* other trainers', too */
    dtrain__line_reset(trainer);
    DTRAIN__TRY(dtrain__strategy_keep(strategy, dtrain__line_plan(trainer)));
    line->seed = dtrain__step_seed(trainer);
    DTRAIN__TRY(
        dtrain__strategy_keep(strategy, dtrain_pipeline_run(line->schedule, line->comm, &work)));
    DTRAIN__TRY(dtrain__strategy_keep(strategy, dtrain__line_read(trainer)));
    return dtrain__line_finish(trainer);
}

DTRAIN__PRIVATE dtrain_result dtrain__pipeline_failed(const dtrain_trainer *trainer,
                                                      dtrain_result result)
{
    const dtrain__pipeline *line = trainer->pipeline;
    char text[DTRAIN__ERROR_BYTES];
    uint32_t micro = 0;
    if (!line || (result != DTRAIN_ERROR_TIMEOUT && result != DTRAIN_ERROR_MISMATCH)) return result;
    while (micro < trainer->desc.micro_batches && !line->flights[micro].joined) micro++;
    if (micro == trainer->desc.micro_batches) return result;
    snprintf(text, sizeof text, "%s", dtrain__bare(dtrain_last_error()));
    return dtrain_fail(result,
                       "the data of this rank had ended before micro-batch %u, and all ranks of a "
                       "pipeline must have the same samples: %s",
                       micro, text);
}

DTRAIN__PRIVATE dtrain_result dtrain__pipeline_fetches(const dtrain_trainer *trainer,
                                                       const char *call, dtrain_batch_fn next_batch)
{
    if (!trainer->groups.pipeline || next_batch) return DTRAIN_OK;
    return dtrain_fail(
        DTRAIN_ERROR_UNSUPPORTED,
        "%s: a pipeline calls loss once for each of its stages and micro-batches, so "
        "that loss cannot fetch its batch itself; give next_batch",
        call);
}

/* Refuse what a pipeline cannot do yet. */
static dtrain_result dtrain__pipeline_allows(const dtrain_trainer *trainer)
{
    const char *const call = "dtrain_trainer_create";
    if (trainer->desc.graph)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "%s: graph with a pipeline of %d ranks: passes of several micro-batches "
                           "are under way, and a recorded step has one; use graph = false",
                           call, trainer->groups.pipeline_ranks);
    return dtrain__pipeline_fetches(trainer, call, trainer->desc.next_batch);
}

/* Allocate the tables of a schedule, and let the tape run its stages. */
static dtrain_result dtrain__pipeline_tables(dtrain_trainer *trainer, dtrain__pipeline *line)
{
    const dtrain_allocator *a = &trainer->allocator;
    const dtrain_pipeline_schedule *s = line->schedule;
    const size_t micros = (size_t)s->micro_batches;
    int slots, inboxes;
    dtrain__pipeline_room(s, line->rank, &slots, &inboxes);
    slots = (int)dtrain__max(slots, s->chunks); /* evaluation has one a chunk */
    inboxes = (int)dtrain__max(inboxes, s->chunks);
    line->slot_count = (size_t)slots;
    line->stages = s->ranks * s->chunks;
    line->flights =
        (dtrain__flight *)dtrain__alloc(a, micros, sizeof *line->flights, "micro-batches");
    line->slots = (int32_t *)dtrain__alloc(a, micros * (size_t)s->chunks, sizeof *line->slots,
                                           "slots of passes");
    line->losses =
        (dtrain_tensor **)dtrain__alloc(a, line->slot_count, sizeof *line->losses, "losses");
    if (!line->flights || !line->slots || !line->losses) return DTRAIN_ERROR_MEMORY;
    dtrain_device *device = trainer->tape->device;
    if (dtrain__pipeline_place(s->kind, s->ranks, line->stages - 1).rank == line->rank &&
        device->ops->event_query) { /* the host queues passes ahead of the device */
        void *memory;
        DTRAIN__TRY(device->ops->host_alloc(device, micros * sizeof *line->read, &memory));
        line->read = (float *)memory;
    }
    return dtrain__stages_create(trainer->tape, line->map->stages, line->map->here,
                                 line->map->units, line->map->unit_count, (uint32_t)slots,
                                 (uint32_t)inboxes);
}

/* Make a trainer's schedule and tables. */
static dtrain_result dtrain__pipeline_open(dtrain_trainer *trainer, const dtrain__stage_map *map,
                                           const dtrain_pipeline_desc *desc)
{
    dtrain__pipeline *line = trainer->pipeline =
        (dtrain__pipeline *)dtrain__alloc(&trainer->allocator, 1, sizeof *line, "a pipeline");
    if (!line) return DTRAIN_ERROR_MEMORY;
    line->comm = trainer->groups.pipeline;
    line->rank = trainer->groups.pipeline_rank;
    line->map = map;
    DTRAIN__TRY(dtrain_pipeline_create(desc, trainer->groups.pipeline_ranks,
                                       (int)trainer->desc.micro_batches, &line->schedule));
    return dtrain__pipeline_tables(trainer, line);
}

DTRAIN__PRIVATE dtrain_result dtrain__pipeline_create(dtrain_trainer *trainer)
{
    if (trainer->groups.pipeline_ranks == 1) return DTRAIN_OK;
    DTRAIN__TRY(dtrain__pipeline_allows(trainer));
    const dtrain_strategy *strategy = trainer->desc.strategy;
    return dtrain__pipeline_open(trainer, dtrain__stages_of(strategy),
                                 dtrain__settings_of(strategy)->pipeline);
}

/* Walk this rank's list without messages. */
static dtrain_result dtrain__pipeline_rehearse(dtrain_trainer *trainer)
{
    const dtrain__pipeline *line = trainer->pipeline;
    const dtrain_pipeline_schedule *s = line->schedule;
    const dtrain__tape_tensor *loss;
    DTRAIN__TRY(dtrain__line_survey(trainer, trainer->desc.loss, trainer->desc.user, 0, &loss));
    dtrain__line_reset(trainer);
    for (size_t i = s->first[line->rank]; i < s->first[line->rank + 1]; i++) {
        const dtrain_pipeline_action *action = &s->actions[i];
        dtrain_pipeline_part part;
        if (dtrain__is_message(action)) DTRAIN__TRY(dtrain__line_part(trainer, action, 0, &part));
        else DTRAIN__TRY(dtrain__line_compute(trainer, action));
    }
    return DTRAIN_OK;
}

/* Take a step on a tape of the plan device, which counts what it needs. Local. */
DTRAIN__PRIVATE dtrain_result dtrain__pipeline_plan(const dtrain_trainer_desc *desc,
                                                    const dtrain__strategy_plan *plan,
                                                    dtrain_tape *tape)
{
    dtrain_trainer rehearsal;
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
    dtrain_result result = dtrain__pipeline_open(&rehearsal, plan->stages, plan->pipeline);
    if (result == DTRAIN_OK) result = dtrain__pipeline_rehearse(&rehearsal);
    dtrain__pipeline_destroy(&rehearsal);
    return result;
}

DTRAIN__PRIVATE void dtrain__pipeline_destroy(dtrain_trainer *trainer)
{
    const dtrain_allocator *a = &trainer->allocator;
    dtrain__pipeline *line = trainer->pipeline;
    if (!line) return;
    if (line->schedule) {
        const size_t micros = (size_t)line->schedule->micro_batches;
        dtrain_device *device = line->read ? dtrain_world_device(trainer->world) : NULL;
        if (device) device->ops->synchronize(device); /* of a step that failed */
        if (device) device->ops->host_free(device, line->read, micros * sizeof *line->read);
        dtrain__free(a, line->flights, micros, sizeof *line->flights);
        dtrain__free(a, line->slots, micros * (size_t)line->schedule->chunks, sizeof *line->slots);
    }
    dtrain__free(a, line->losses, line->slot_count, sizeof *line->losses);
    dtrain_pipeline_destroy(line->schedule);
    dtrain__free(a, line, 1, sizeof *line);
}
