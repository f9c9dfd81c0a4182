/* Creation of a trainer, and its settings
 *
 * create refuses by name what no trainer can do. The first step, which is collective, compares the
 * settings that must be the same on all ranks. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/log.h"
#include "core/result.h"
#include "world/timeline.h"
#include "world/timeline_internal.h"
#include "world/world.h"
#include "comm/comm.h"
#include "comm/same_internal.h"
#include "strategy/view_internal.h"
#include "tape/tape.h"
#include "tape/view_internal.h"
#include "optim/optim_internal.h"
#include "optim/optimizer.h"
#include "optim/scaler.h"
#include "train/trainer.h"
#include "train/trainer_internal.h"

/* ---- Settings ---------------------------------------------------------------------------------*/

DTRAIN__PRIVATE dtrain_result dtrain__check_fetches(const dtrain__groups *groups, const char *call,
                                                    dtrain_batch_fn next_batch)
{
    if (!groups->pipeline || next_batch) return DTRAIN_OK;
    return dtrain_fail(
        DTRAIN_ERROR_UNSUPPORTED,
        "%s: a pipeline calls loss once for each of its stages and micro-batches, so "
        "that loss cannot fetch its batch itself; give next_batch",
        call);
}

/* Refuse what no trainer can do; dtrain__queue_create refuses what a queued step cannot. */
static dtrain_result dtrain__check_trainer(const dtrain_trainer_desc *desc)
{
    const char *const call = "dtrain_trainer_create";
    const dtrain_schedule *schedule = &desc->schedule;
    const uint32_t flags = desc->tape_flags;
    const dtrain__bound bounds[] = {
        {desc->optimizer && !(schedule->lr > 0), "schedule.lr", (double)schedule->lr,
         "more than 0"},
        {schedule->kind > DTRAIN_SCHEDULE_STEPS, "schedule.kind", (double)schedule->kind,
         "a dtrain_schedule_kind"},
        {!(schedule->gamma >= 0), "schedule.gamma", (double)schedule->gamma, "0 or more"},
        {desc->nonfinite > DTRAIN_NONFINITE_SKIP, "nonfinite", (double)desc->nonfinite,
         "a dtrain_nonfinite"},
        {flags != 0 && flags != DTRAIN_TAPE_BF16 && flags != DTRAIN_TAPE_F16, "tape_flags",
         (double)flags, "0, DTRAIN_TAPE_BF16 or DTRAIN_TAPE_F16"}};
    if (!desc->strategy || !desc->loss)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: desc has no %s", call,
                           desc->strategy ? "loss" : "strategy");
    DTRAIN__TRY(dtrain__check_bounds(call, bounds, sizeof bounds / sizeof bounds[0]));
    if (desc->nonfinite == DTRAIN_NONFINITE_SKIP &&
        dtrain__settings_of(desc->strategy)->compression)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "%s: DTRAIN_NONFINITE_SKIP with a strategy that compresses gradients: "
                           "what it keeps from step to step would keep a NaN; use "
                           "DTRAIN_NONFINITE_STOP and load a checkpoint",
                           call);
    const dtrain__groups groups = dtrain__groups_of(desc->strategy);
    return dtrain__check_fetches(&groups, call, desc->next_batch);
}

#define DTRAIN__TRAINS(field, type) DTRAIN__SAME_AS(dtrain_trainer, desc.field, #field, type)

/* Fail on all ranks if trainers or optimizers differ in a setting that changes the numbers of a
 * step: nothing else would notice it where ranks have no copies to compare. Samples of a
 * micro-batch and `tokens` can differ. */
DTRAIN__PRIVATE dtrain_result dtrain__trainer_compare(dtrain_trainer *trainer)
{
    /* clang-format off */
    static const dtrain__same_field fields[] = {
        DTRAIN__SAME(dtrain_trainer, step, INT), DTRAIN__SAME(dtrain_trainer, scaling, BOOL),
        DTRAIN__TRAINS(micro_batches, UINT), DTRAIN__TRAINS(clip, FLOAT),
        DTRAIN__TRAINS(tape_flags, FLAGS), DTRAIN__TRAINS(recompute_every, UINT),
        DTRAIN__TRAINS(recompute_ops, FLAGS), DTRAIN__TRAINS(loss_scaling.scale, FLOAT),
        DTRAIN__TRAINS(loss_scaling.growth_interval, UINT), DTRAIN__TRAINS(graph, BOOL),
        DTRAIN__TRAINS(seed, UINT), DTRAIN__TRAINS(nonfinite, UINT),
        DTRAIN__TRAINS(verify_every, UINT),
        DTRAIN__TRAINS(schedule.kind, UINT), DTRAIN__TRAINS(schedule.lr, FLOAT),
        DTRAIN__TRAINS(schedule.min_lr, FLOAT), DTRAIN__TRAINS(schedule.warmup_steps, INT),
        DTRAIN__TRAINS(schedule.total_steps, INT), DTRAIN__TRAINS(schedule.gamma, FLOAT),
        DTRAIN__TRAINS(schedule.milestones, INT)};
    /* clang-format on */
    dtrain_optimizer *optimizer = trainer->desc.optimizer;
    const dtrain__same_list lists[] = {DTRAIN__SAME_STRUCT(fields, trainer),
                                       dtrain__same_groups(optimizer)};
    if (trainer->compared) return DTRAIN_OK;
    DTRAIN__TRY(dtrain__strategy_usable(trainer->desc.strategy, "dtrain_trainer_step"));
    DTRAIN__TRY(dtrain__same(trainer->groups.all, DTRAIN_OK, "dtrain_trainer_step", lists, 2));
    trainer->compared = optimizer->compared = true;
    return DTRAIN_OK;
}

/* ---- Creation ---------------------------------------------------------------------------------*/

/* Begin the current step again after a load. */
static void dtrain__trainer_resume(dtrain__state_source *source, char *note, size_t room)
{
    (void)note;
    (void)room;
    ((dtrain_trainer *)(void *)source)->micro = 0;
}

/* Allocate all memory of steps. After a failure destroy frees it. */
DTRAIN_API dtrain_result dtrain_trainer_create(dtrain_world *world, const dtrain_trainer_desc *desc,
                                               dtrain_trainer **out)
{
    DTRAIN__GIVEN("dtrain_trainer_create", world);
    DTRAIN__GIVEN("dtrain_trainer_create", desc);
    DTRAIN__GIVEN("dtrain_trainer_create", out);
    *out = NULL;
    DTRAIN__TAKE(dtrain__abi_of(world), trainer_desc, desc);
    DTRAIN__TRY(dtrain__check_trainer(desc));
    const dtrain_allocator *allocator = &world->allocator;
    dtrain_trainer *trainer =
        (dtrain_trainer *)dtrain__alloc(allocator, 1, sizeof *trainer, "a trainer");
    if (!trainer) return DTRAIN_ERROR_MEMORY;
    trainer->allocator = *allocator;
    trainer->world = world;
    trainer->desc = *desc;
    if (desc->micro_batches == 0) trainer->desc.micro_batches = 1;
    trainer->groups = dtrain__groups_of(desc->strategy);
    trainer->rank = dtrain_comm_rank(trainer->groups.all);
    trainer->ranks = dtrain_comm_size(trainer->groups.all);
    trainer->data_rank = dtrain_comm_rank(trainer->groups.data);
    trainer->data_ranks = dtrain_comm_size(trainer->groups.data);
    trainer->loss_counts = dtrain__loss_counts(desc->strategy);
    trainer->slow_rank = -1;
    trainer->saving = dtrain__span_seconds(world, DTRAIN_SPAN_CHECKPOINT);
    dtrain_loss_scaler none;
    memset(&none, 0, sizeof none);
    const bool given = /* settings come before the counts */
        memcmp(&desc->loss_scaling, &none, offsetof(dtrain_loss_scaler, good_steps)) != 0;
    trainer->scaling = given || (desc->tape_flags & DTRAIN_TAPE_F16);
    const size_t ranks = (size_t)trainer->ranks;
    trainer->words = (dtrain__rank_words *)dtrain__alloc(allocator, ranks, sizeof *trainer->words,
                                                         "a trainer's words");
    trainer->shares = (float *)dtrain__alloc(allocator, ranks, DTRAIN__FIGURE_WORDS * sizeof(float),
                                             "a trainer's figures");
    trainer->compute =
        (double *)dtrain__alloc(allocator, ranks, DTRAIN__ROUND_BYTES, "a trainer's times");
    trainer->named = (bool *)dtrain__alloc(allocator, ranks, sizeof *trainer->named, "a trainer");
    trainer->micros = (dtrain__micro *)dtrain__alloc(allocator, trainer->desc.micro_batches,
                                                     sizeof *trainer->micros, "micro-batches");
    dtrain_result result = DTRAIN_OK;
    if (!trainer->words || !trainer->shares || !trainer->compute || !trainer->named ||
        !trainer->micros)
        result = DTRAIN_ERROR_MEMORY;
    if (result == DTRAIN_OK)
        result = dtrain_tape_create(world, desc->strategy, NULL, &trainer->tape);
    if (result == DTRAIN_OK && trainer->ranks != trainer->data_ranks)
        (void)dtrain__inputs_hash(trainer->tape); /* begins the hash */
    if (result == DTRAIN_OK)
        result = dtrain_tape_recompute(trainer->tape, desc->recompute_every, desc->recompute_ops);
    if (result == DTRAIN_OK && trainer->scaling)
        result = dtrain__check_scalable(desc->strategy, "dtrain_trainer_create",
                                        given ? "loss_scaling" : "DTRAIN_TAPE_F16");
    trainer->scaler = desc->loss_scaling;
    if (trainer->scaler.scale == 0) trainer->scaler.scale = 65536;
    if (result == DTRAIN_OK && trainer->scaling)
        result = dtrain__scaler_fill(&trainer->scaler, "dtrain_trainer_create");
    const dtrain__scalar scalars[] = {{"trainer.step", &trainer->step, 8},
                                      {"trainer.tokens", &trainer->tokens, 8},
                                      {"trainer.seed", &trainer->desc.seed, 8},
                                      {"trainer.skipped", &trainer->skipped, 8}};
    dtrain__trainer_view *view = &trainer->view;
    memcpy(view->state.scalars, scalars, sizeof scalars);
    view->state.resume = dtrain__trainer_resume;
    view->state.strategy = desc->strategy;
    view->state.optimizer = desc->optimizer;
    view->state.scaler = trainer->scaling ? &trainer->scaler : NULL;
    view->state.micro = &trainer->micro;
    view->groups = &trainer->groups;
    view->rank = trainer->rank;
    view->ranks = trainer->ranks;
    view->memory = dtrain__trainer_memory;
    if (result == DTRAIN_OK && trainer->groups.pipeline_ranks > 1)
        result = dtrain__pipeline_create(trainer, dtrain__stages_of(desc->strategy),
                                         dtrain__settings_of(desc->strategy)->pipeline);
    if (result == DTRAIN_OK && desc->graph) result = dtrain__queue_create(trainer);
    if (result == DTRAIN_OK) *out = trainer;
    else dtrain_trainer_destroy(trainer);
    return result;
}

DTRAIN_API void dtrain_trainer_destroy(dtrain_trainer *trainer)
{
    if (!trainer) return;
    dtrain_allocator allocator = trainer->allocator;
    size_t ranks = (size_t)trainer->ranks;
    dtrain__queue_destroy(trainer);
    dtrain_tape_destroy(trainer->tape);
    dtrain__pipeline_destroy(trainer);
    dtrain__free(&allocator, trainer->words, ranks, sizeof *trainer->words);
    dtrain__free(&allocator, trainer->shares, ranks, DTRAIN__FIGURE_WORDS * sizeof(float));
    dtrain__free(&allocator, trainer->compute, ranks, DTRAIN__ROUND_BYTES);
    dtrain__free(&allocator, trainer->named, ranks, sizeof *trainer->named);
    dtrain__free(&allocator, trainer->micros, trainer->desc.micro_batches, sizeof *trainer->micros);
    dtrain__free(&allocator, trainer, 1, sizeof *trainer);
}

DTRAIN_API dtrain_tape *dtrain_trainer_tape(dtrain_trainer *trainer)
{
    return trainer ? trainer->tape : NULL;
}
