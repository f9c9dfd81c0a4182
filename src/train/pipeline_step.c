/* The micro-batches of a step over a pipeline
 *
 * A rank walks its schedule (parallel/runner.c) and runs passes of its own stages on the tape
 * (tape/stage.c):
 *
 *     before the schedule      fetch the first micro-batch; survey which tensors cross stages. In
 *                              the first step agree on a full batch
 *     FORWARD                  fetch the micro-batch, once on each rank; run the loss
 *     BACKWARD, WEIGHT         start from the loss or from received gradients; after the last
 *                              micro-batch parameters are ready, and reductions over the data axis
 *                              start inside the bubble
 *     messages                 addresses of the tensors that cross
 *     after the schedule       weights of all micro-batches; dtrain_strategy_finish, once
 *
 * The strategy sees the whole schedule as one backward. All ranks of a pipeline have the same data
 * and know the targets: without a message they agree which micro-batches have data, and on their
 * weights. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/log.h"
#include "core/result.h"
#include "world/timeline_internal.h"
#include "parallel/pipeline.h"
#include "parallel/schedule_internal.h"
#include "strategy/strategy.h"
#include "strategy/view_internal.h"
#include "tape/tape.h"
#include "tape/view_internal.h"
#include "train/trainer.h"
#include "train/trainer_internal.h"

typedef struct dtrain__pipeline {
    dtrain_pipeline_schedule *schedule;
    dtrain_pipeline_schedule *forward; /* schedule of one micro-batch without its backward */
    const dtrain__model_pass *pass;    /* current pass of all ranks */
    int last;                          /* last stage of the model */
    size_t result_bytes;               /* page-locked bytes of the trainer's results; 0: none */
    bool agreed;                       /* all ranks have the same full batch */
} dtrain__pipeline;

static int dtrain__line_stage(const dtrain_trainer *trainer, const dtrain_pipeline_action *action)
{
    return action->chunk * trainer->groups.pipeline_ranks + trainer->groups.pipeline_rank;
}

/* Forget earlier passes, and begin the passes of a step or an evaluation. */
static void dtrain__line_begin(dtrain_trainer *trainer, const dtrain__model_pass *pass)
{
    trainer->pipeline->pass = pass;
    dtrain__stage_reset(trainer->tape);
    memset(trainer->micros, 0, trainer->desc.micro_batches * sizeof *trainer->micros);
    for (uint32_t m = 0; m < trainer->desc.micro_batches; m++) trainer->micros[m].slot = -1;
}

/* ---- Passes -----------------------------------------------------------------------------------*/

/* Run the model's function in the pass that has begun. */
static dtrain_result dtrain__line_call(dtrain_trainer *trainer, dtrain_tensor **made)
{
    const dtrain__model_pass *pass = trainer->pipeline->pass;
    *made = pass->function(trainer->tape, pass->user);
    DTRAIN__TRY(dtrain__stage_end(trainer->tape));
    return dtrain__check_made(pass, *made);
}

/* Run the function with all stages remote, to find which tensors cross, and check that the last
 * stage makes the returned tensor. Local. */
static dtrain_result dtrain__line_survey(dtrain_trainer *trainer, dtrain_tensor **made)
{
    const dtrain__model_pass *pass = trainer->pipeline->pass;
    DTRAIN__TRY(dtrain__stage_begin(trainer->tape, 0, 0, DTRAIN__SURVEY, -1, pass->flags, 0));
    DTRAIN__TRY(dtrain__line_call(trainer, made));
    const int stage = dtrain__stage_of(*made);
    if (stage == trainer->pipeline->last) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_USAGE,
                       "%s: what %s returned is of stage %d, and values are read from what the "
                       "last one, %d, makes; it should run all units of the model",
                       pass->call, pass->own ? "forward" : "loss", stage, trainer->pipeline->last);
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

/* Run the function in the slot of a FORWARD. The slot of a micro-batch's first pass on this rank
 * keeps the inputs. An error of the fetch fails the step on all ranks: they are in the middle of
 * the schedule. */
static dtrain_result dtrain__line_forward(dtrain_trainer *trainer,
                                          const dtrain_pipeline_action *action)
{
    const dtrain__pipeline *line = trainer->pipeline;
    const dtrain__model_pass *pass = line->pass;
    dtrain_strategy *strategy = trainer->desc.strategy;
    const int32_t number = action->micro_batch, slot = action->slot;
    const int stage = dtrain__line_stage(trainer, action);
    const bool last = stage == line->last, trains = !(pass->flags & DTRAIN_TAPE_NO_GRAD);
    const uint64_t seed = trains ? dtrain__pass_seed(trainer, (uint32_t)number) : 0;
    dtrain__micro *micro = &trainer->micros[number];
    const bool first = micro->slot < 0;
    if (first) DTRAIN__TRY(dtrain__line_fetch(trainer, micro));
    if (micro->joined) return last ? dtrain__end_sums(strategy, 0, true) : DTRAIN_OK;
    if (first) micro->slot = slot;
    DTRAIN__TRY(dtrain__stage_begin(trainer->tape, (uint32_t)slot, (uint32_t)micro->slot, stage,
                                    action->inbox, pass->flags, seed));
    DTRAIN__TRY(dtrain__line_call(trainer, &micro->made));
    micro->samples = dtrain__samples_of(micro->made);
    if (micro->samples.valid) { /* the next pass in this slot reuses the tensor */
        memcpy(micro->valid, micro->samples.valid, sizeof micro->valid);
        micro->samples.valid = micro->valid;
    }
    if (!strategy) return DTRAIN_OK; /* a plan has no weights */
    if (first) micro->weight = dtrain__notes_of(strategy)->weight;
    if (last && trains) DTRAIN__TRY(dtrain__pass_end(trainer->tape));
    else if (last) DTRAIN__TRY(dtrain_tensor_read(trainer->tape, micro->made, pass->values, NULL));
    return dtrain_strategy_weight(strategy, 1); /* the loss's weight was for this micro-batch */
}

static dtrain_result dtrain__line_compute(void *user, const dtrain_pipeline_action *action)
{
    dtrain_trainer *trainer = (dtrain_trainer *)user;
    const int32_t number = action->micro_batch;
    const uint32_t slot = (uint32_t)action->slot;
    const dtrain__micro *micro = &trainer->micros[number];
    const int stage = dtrain__line_stage(trainer, action);
    if (action->act == DTRAIN_PIPELINE_ACT_FORWARD) return dtrain__line_forward(trainer, action);
    if (micro->joined) return DTRAIN_OK;
    if (action->act == DTRAIN_PIPELINE_ACT_WEIGHT)
        return dtrain__stage_weights(trainer->tape, slot);
    if (action->act != DTRAIN_PIPELINE_ACT_BACKWARD) return DTRAIN_OK;
    const bool more = (uint32_t)number + 1 < trainer->desc.micro_batches;
    dtrain_tensor *loss = stage == trainer->pipeline->last ? micro->made : NULL;
    DTRAIN__TRY(dtrain__stage_backward(trainer->tape, slot, loss, dtrain__micro_scale(trainer),
                                       more,
                                       trainer->pipeline->schedule->kind == DTRAIN_PIPELINE_ZB_H1));
    return loss ? dtrain__loss_read(trainer, (uint32_t)number, loss) : DTRAIN_OK;
}

/* Return the address of part i of a message. Both sides of a gradient know since the forward
 * whether a micro-batch has data. The receiver of an activation does not know it: a micro-batch
 * without data sends zeros. */
static dtrain_result dtrain__line_part(void *user, const dtrain_pipeline_action *action, size_t i,
                                       dtrain_pipeline_part *part)
{
    dtrain_trainer *trainer = (dtrain_trainer *)user;
    return dtrain__stage_part(trainer->tape, dtrain__line_stage(trainer, action), action,
                              trainer->micros[action->micro_batch].joined, i, part);
}

/* ---- A step -----------------------------------------------------------------------------------*/

/* Run the schedule, read the losses, weigh the micro-batches as separate backwards, and finish. A
 * missing gradient ends the step on all ranks, and the next step can be taken.
 *
 * Each step finds which tensors cross stages, because its batch can have another shape than the
 * last one. Gradients cross as if only the parameters that create has compared were frozen. A rank
 * without data sends tensors as in the step before. All ranks of the axis have the same samples and
 * shapes, so each finds the same tensors without an exchange; the first step agrees on a full
 * batch. */
DTRAIN__PRIVATE dtrain_result dtrain__pipeline_step(dtrain_trainer *trainer)
{
    dtrain__pipeline *line = trainer->pipeline;
    dtrain_strategy *strategy = trainer->desc.strategy;
    const dtrain__model_pass pass = dtrain__step_pass(&trainer->desc);
    const uint32_t micro_batches = trainer->desc.micro_batches;
    const dtrain_pipeline_work work = {dtrain__line_compute, dtrain__line_part, trainer};
    dtrain_tensor *loss;
    uint32_t joined = 0;
    bool over;
    DTRAIN__TRY(dtrain__strategy_usable(strategy, "dtrain_trainer_step"));
    DTRAIN__TRY(dtrain_strategy_accumulate(strategy, false));  /* the schedule is one backward */
    dtrain__notes_of(strategy)->pipelined = micro_batches > 1; /* other trainers have set theirs */
    dtrain__line_begin(trainer, &pass);
    dtrain_result result = dtrain__line_fetch(trainer, trainer->micros);
    if (result == DTRAIN_OK && !(line->agreed && trainer->micros->joined))
        result = dtrain__line_survey(trainer, &loss);
    if (!line->agreed) {
        result = dtrain__agree(trainer->groups.all, result);
        line->agreed = result == DTRAIN_OK;
        if (line->agreed)
            result = dtrain__agree_full_batch(strategy, dtrain__samples_of(loss).terms);
    }
    if (result == DTRAIN_OK)
        result = dtrain_pipeline_run(line->schedule, trainer->groups.pipeline, &work);
    if (result == DTRAIN_OK) result = dtrain__losses_await(trainer);
    DTRAIN__TRY(dtrain__strategy_keep(strategy, result));
    for (uint32_t m = 0; m < micro_batches; m++) {
        dtrain__micro *micro = &trainer->micros[m];
        joined += micro->joined;
        dtrain__weigh_micro(strategy, micro->joined ? NULL : &micro->samples, m + 1 < micro_batches,
                            &micro->weight);
    }
    DTRAIN__TRY(dtrain_strategy_finish(strategy));
    if (joined < micro_batches) return DTRAIN_OK;
    return dtrain__strategy_keep(strategy, dtrain__counts_settle(strategy, &over));
}

/* Return the result of a step. If this rank's data had ended in it, add that to the error of a
 * wait: ranks of its pipeline with more data wait for messages that never come, until the
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

/* Run a forward pass of an evaluation or of the program, whose values all ranks get: the forwards
 * of a schedule with one micro-batch. Each call finds which tensors cross stages: shapes can differ
 * from call to call. If all ranks refuse the program's pass before anything is sent, the strategy
 * does not fail. */
DTRAIN__PRIVATE dtrain_result dtrain__pipeline_forward(dtrain_trainer *trainer,
                                                       const dtrain__model_pass *pass)
{
    const dtrain_pipeline_work work = {dtrain__line_compute, dtrain__line_part, trainer};
    const dtrain_pipeline_schedule *s = trainer->pipeline->forward;
    dtrain_tensor *made;
    dtrain__line_begin(trainer, pass);
    trainer->micros->fetched = true; /* the caller has fetched it */
    dtrain_result result = dtrain__line_survey(trainer, &made);
    if (pass->own) result = dtrain__agree(trainer->groups.all, result);
    DTRAIN__TRY(result);
    result = dtrain_pipeline_run(s, trainer->groups.pipeline, &work);
    if (pass->own && result == DTRAIN_OK)
        result = dtrain_broadcast(trainer->groups.pipeline, pass->values, (size_t)pass->count,
                                  DTRAIN_DTYPE_F32, s->ranks - 1, NULL);
    return dtrain__strategy_keep(trainer->desc.strategy, result);
}

/* ---- Creation ---------------------------------------------------------------------------------*/

DTRAIN__PRIVATE dtrain_result dtrain__pipeline_create(dtrain_trainer *trainer,
                                                      const dtrain__stage_map *map,
                                                      const dtrain_pipeline_desc *desc)
{
    const dtrain_allocator *a = &trainer->allocator;
    const int ranks = trainer->groups.pipeline_ranks, rank = trainer->groups.pipeline_rank;
    const size_t micros = trainer->desc.micro_batches;
    dtrain_device *device =
        trainer->world ? dtrain_world_device(trainer->world) : NULL; /* a plan */
    int slots, inboxes;
    dtrain__pipeline *line = trainer->pipeline =
        (dtrain__pipeline *)dtrain__alloc(a, 1, sizeof *line, "a pipeline");
    if (!line) return DTRAIN_ERROR_MEMORY;
    DTRAIN__TRY(dtrain_pipeline_create(desc, ranks, (int)micros, &line->schedule));
    DTRAIN__TRY(dtrain_pipeline_create(desc, ranks, 1, &line->forward));
    dtrain_pipeline_schedule *f = line->forward;
    size_t kept = 0, at = 0;
    for (int r = 0; r < ranks; r++) { /* leave out backwards and their messages */
        const size_t end = f->first[r + 1];
        for (f->first[r] = kept; at < end; at++)
            if (f->actions[at].act == DTRAIN_PIPELINE_ACT_FORWARD ||
                f->actions[at].act == DTRAIN_PIPELINE_ACT_SEND ||
                f->actions[at].act == DTRAIN_PIPELINE_ACT_RECEIVE)
                f->actions[kept++] = f->actions[at];
    }
    f->first[ranks] = kept;
    dtrain__pipeline_room(line->schedule, rank, &slots, &inboxes);
    slots = (int)dtrain__max(slots, f->chunks); /* an evaluation has one per chunk */
    inboxes = (int)dtrain__max(inboxes, f->chunks);
    line->last = ranks * f->chunks - 1;
    if (rank == ranks - 1 && device &&
        device->ops->event_query) { /* the host queues passes ahead */
        void *memory;
        const size_t bytes = micros * sizeof *trainer->results;
        DTRAIN__TRY(device->ops->host_alloc(device, bytes, &memory));
        trainer->results = (float *)memory;
        line->result_bytes = bytes;
    }
    return dtrain__stages_create(trainer->tape, map, (uint32_t)slots, (uint32_t)inboxes);
}

DTRAIN__PRIVATE void dtrain__pipeline_destroy(dtrain_trainer *trainer)
{
    const dtrain_allocator *a = &trainer->allocator;
    dtrain__pipeline *line = trainer->pipeline;
    if (!line) return;
    if (line->result_bytes) {
        dtrain_device *device = dtrain_world_device(trainer->world);
        device->ops->synchronize(device); /* a failed step can still be running */
        device->ops->host_free(device, trainer->results, line->result_bytes);
    }
    dtrain_pipeline_destroy(line->schedule);
    dtrain_pipeline_destroy(line->forward);
    dtrain__free(a, line, 1, sizeof *line);
}

/* Walk this rank's schedule without messages, on a trainer with a tape of the plan device, which
 * counts the memory of a step. Local. */
DTRAIN__PRIVATE dtrain_result dtrain__pipeline_rehearse(dtrain_trainer *trainer,
                                                        const dtrain__stage_map *map,
                                                        const dtrain_pipeline_desc *desc)
{
    const dtrain__model_pass pass = dtrain__step_pass(&trainer->desc);
    const size_t micros = trainer->desc.micro_batches;
    dtrain_tensor *loss;
    if (!map)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "dtrain_trainer_plan: which stages of a pipeline this rank has is known "
                           "to a strategy; give desc one");
    trainer->micros = (dtrain__micro *)dtrain__alloc(&trainer->allocator, micros,
                                                     sizeof *trainer->micros, "micro-batches");
    if (!trainer->micros) return DTRAIN_ERROR_MEMORY;
    dtrain_result result = dtrain__pipeline_create(trainer, map, desc);
    if (result == DTRAIN_OK) dtrain__line_begin(trainer, &pass);
    if (result == DTRAIN_OK) result = dtrain__line_survey(trainer, &loss);
    if (result == DTRAIN_OK) {
        const dtrain_pipeline_schedule *s = trainer->pipeline->schedule;
        const size_t *first = &s->first[trainer->groups.pipeline_rank];
        for (size_t i = first[0]; i < first[1] && result == DTRAIN_OK; i++) {
            dtrain_pipeline_part part;
            result = dtrain__is_message(&s->actions[i])
                         ? dtrain__line_part(trainer, &s->actions[i], 0, &part)
                         : dtrain__line_compute(trainer, &s->actions[i]);
        }
    }
    dtrain__pipeline_destroy(trainer);
    dtrain__free(&trainer->allocator, trainer->micros, micros, sizeof *trainer->micros);
    return result;
}
