/* A strategy as the rooms above it see it
 *
 * Tape, optimizers, trainer, state and monitor ask these questions beside the public API, and know
 * nothing of buckets, units and layouts. A parameter is named by its index in the array. None but
 * those that say so sends anything; all are cheap enough for once a parameter and step. */

#pragma once

#include "core/platform_internal.h"
#include "core/result.h"
#include "world/world.h"
#include "comm/comm.h"
#include "comm/groups_internal.h"
#include "parallel/cut_internal.h"
#include "strategy/params.h"
#include "strategy/strategy.h"
#include "device/device.h"

/* State of compression for a piece of a parameter, kept from step to step in device memory. */
typedef struct dtrain__kept {
    const dtrain_param *param;
    int64_t offset, count; /* the piece: first element, elements */
    float *residual;       /* (count), or NULL without error feedback */
    float *velocity;       /* (count), or NULL without topk_momentum */
} dtrain__kept;

/* ---- The whole --------------------------------------------------------------------------------*/

DTRAIN__PRIVATE dtrain_world *dtrain__world_of(const dtrain_strategy *strategy);
DTRAIN__PRIVATE dtrain__groups dtrain__groups_of(const dtrain_strategy *strategy);
/* Return the desc as resolved. */
DTRAIN__PRIVATE const dtrain_strategy_desc *dtrain__settings_of(const dtrain_strategy *strategy);
DTRAIN__PRIVATE dtrain_param *dtrain__params_of(const dtrain_strategy *strategy, size_t *count);
/* Return where the number of reduced steps is, which a checkpoint saves and restores. */
DTRAIN__PRIVATE uint64_t *dtrain__step_count_of(dtrain_strategy *strategy);
/* List the state of compression; *count is 0 without compression. */
DTRAIN__PRIVATE const dtrain__kept *dtrain__kept_of(const dtrain_strategy *strategy, size_t *count);
/* Tell whether gradients go node by node: hierarchical, and there are several nodes. */
DTRAIN__PRIVATE bool dtrain__goes_by_nodes(const dtrain_strategy *strategy);
/* Add up the counters of all communicators along the tensor axis: of operations, and of sums of
 * whole parameters' gradients. */
DTRAIN__PRIVATE void dtrain__strategy_tensor_info(const dtrain_strategy *strategy,
                                                  dtrain_comm_info *info);
/* The same along the pipeline axis: messages of a schedule, and sums of tied weights. */
DTRAIN__PRIVATE void dtrain__strategy_pipeline_info(const dtrain_strategy *strategy,
                                                    dtrain_comm_info *info);

/* Which stages there are, and who has them: strategy/stages.c. */
typedef struct dtrain__stage_map {
    uint32_t kind;           /* dtrain_pipeline_kind */
    int ranks, rank, chunks; /* of the pipeline axis; stages of each rank */
    int32_t stages;          /* of the model; 1 without a pipeline */
    bool *here;              /* (stages) this rank has it */
    int32_t *units;          /* (2 * unit_count) a unit and its stage, for each */
    size_t unit_count, room;
} dtrain__stage_map;
/* List the units of parameters and divide them among the stages of a pipeline; desc NULL = a zeroed
 * one. A map whose making failed can be freed. */
DTRAIN__PRIVATE dtrain_result dtrain__stage_map_make(dtrain__stage_map *map,
                                                     const dtrain_allocator *a,
                                                     const dtrain_param *params, size_t count,
                                                     const dtrain_pipeline_desc *desc,
                                                     const dtrain__groups *groups);
DTRAIN__PRIVATE void dtrain__stage_map_free(dtrain__stage_map *map, const dtrain_allocator *a);
DTRAIN__PRIVATE const dtrain__stage_map *dtrain__stages_of(const dtrain_strategy *strategy);
/* Tell whether this rank's loss counts: one of the ranks that hold a model sees its loss, with the
 * last stage, and where several do, the last of them. */
DTRAIN__PRIVATE bool dtrain__loss_counts(const dtrain_strategy *strategy);
/* Return the stage of a unit; -1: no parameter belongs to it. */
DTRAIN__PRIVATE int32_t dtrain__stage_of_unit(const dtrain__stage_map *map, uint32_t unit);
/* Return the rank of the pipeline axis that has a stage. */
DTRAIN__PRIVATE int dtrain__stage_rank(const dtrain__stage_map *map, int32_t stage);

/* ---- May a call go on? ------------------------------------------------------------------------*/

DTRAIN__PRIVATE dtrain_result dtrain__strategy_usable(const dtrain_strategy *strategy,
                                                      const char *call);
DTRAIN__PRIVATE dtrain_result dtrain__between_backwards(const dtrain_strategy *strategy,
                                                        const char *call);
DTRAIN__PRIVATE dtrain_result dtrain__between_steps(const dtrain_strategy *strategy,
                                                    const char *call);
/* Note an update, hash what all ranks must do alike between steps (updates, and flags of parameters
 * such as FROZEN), and fail on all ranks if it differs. */
DTRAIN__PRIVATE void dtrain__note_update(dtrain_strategy *strategy, float lr, float grad_scale);
DTRAIN__PRIVATE uint64_t dtrain__same_now(const dtrain_strategy *strategy);
DTRAIN__PRIVATE dtrain_result dtrain__compare_now(dtrain_strategy *strategy, const char *call);
/* Make an error stand: this rank cannot do what the others count on. They hear of it at once. */
DTRAIN__PRIVATE dtrain_result dtrain__strategy_keep(dtrain_strategy *strategy,
                                                    dtrain_result result);
/* Name the call that begins to replace values (NULL: they are whole again), and ask for it: until
 * it succeeds the strategy is not usable. */
DTRAIN__PRIVATE void dtrain__set_torn(dtrain_strategy *strategy, const char *call);
DTRAIN__PRIVATE const char *dtrain__torn(const dtrain_strategy *strategy);
/* Forget the micro-batches of a step under way. */
DTRAIN__PRIVATE void dtrain__rewind(dtrain_strategy *strategy, bool step_done);

/* ---- A parameter ------------------------------------------------------------------------------*/

/* Tell whether optimizers update it: no alias, and not frozen. */
DTRAIN__PRIVATE bool dtrain__is_updated(const dtrain_param *param);
/* Tell whether an optimizer has state of it here: it was not frozen when the strategy was created,
 * and may be so for some steps. */
DTRAIN__PRIVATE bool dtrain__has_state(const dtrain_strategy *strategy, size_t i);
/* Find the piece of its value, gradient and state that this rank keeps; false: none. */
DTRAIN__PRIVATE bool dtrain__shard_of(const dtrain_strategy *strategy, size_t i,
                                      dtrain_shard *shard);
/* Count the ranks that keep the same piece as this one; return its number among them. */
DTRAIN__PRIVATE int dtrain__holders(const dtrain_strategy *strategy, size_t i, int *count);
/* Tell whether no rank keeps it as a whole. */
DTRAIN__PRIVATE bool dtrain__is_sliced(const dtrain_strategy *strategy, size_t i);
/* Tell whether it has memory here; what stages of other ranks alone use has none. */
DTRAIN__PRIVATE bool dtrain__has_memory(const dtrain_param *param);
/* Return the first rank of the pipeline axis that has it; where weights are tied, of several. */
DTRAIN__PRIVATE int dtrain__stage_first(const dtrain_strategy *strategy, size_t i);
/* Tell whether a rank had a gradient of it in the last step: otherwise updates leave it out. */
DTRAIN__PRIVATE bool dtrain__has_gradient(const dtrain_strategy *strategy, size_t i);
DTRAIN__PRIVATE int dtrain__param_dims(const dtrain_param *p);
DTRAIN__PRIVATE void dtrain__set_grad_written(dtrain_param *storage, bool written);
/* Count the elements of all parts together; describe the part that this rank has. */
DTRAIN__PRIVATE int64_t dtrain__whole_count(const dtrain_param *p);
DTRAIN__PRIVATE dtrain__share dtrain__share_here(const dtrain_param *p,
                                                 const dtrain__groups *groups);
/* Round fp32 elements up to a cache line; add to an address that may be NULL. */
DTRAIN__PRIVATE int64_t dtrain__padded(int64_t count);
DTRAIN__PRIVATE float *dtrain__after(float *at, int64_t count);

/* ---- Norm of gradients: strategy/norm.c -------------------------------------------------------*/

/* Queue the sums of squares of the ranks that hold one model into *squares (*count, device memory),
 * where no rank shares a copy: their sum, in this order, is that of all gradients. Collective over
 * those ranks. */
DTRAIN__PRIVATE dtrain_result dtrain__queue_squares(dtrain_strategy *strategy,
                                                    const double **squares, int *count);
/* Sum the squares of all gradients; the host waits. Collective where they are sharded or cut. */
DTRAIN__PRIVATE dtrain_result dtrain__sum_squares(dtrain_strategy *strategy, double *total);

/* ---- Weights of losses: strategy/weights.c ----------------------------------------------------*/

/* What a loss is a mean over; the tape's. */
typedef struct dtrain__samples {
    int64_t terms;             /* ignored ones included; 0: nothing is counted */
    const float *valid;        /* (2) one over those that count, and their number; NULL: all do */
    const float *device_valid; /* the same on the device, of a pass that is replayed; or NULL */
} dtrain__samples;

#define DTRAIN__LOSS_SUMS 8 /* sums of means over different samples that a loss may have */
/* Tell whether the terms of a loss must be weighed, in a pass with or without gradients. */
DTRAIN__PRIVATE bool dtrain__weighs_terms(const dtrain_strategy *strategy, bool forward_only);
/* Find by what the second of two means is multiplied where sum `number` of a loss adds them. Then
 * each is averaged over its own samples: see weights.c. Collective over the data axis. */
DTRAIN__PRIVATE dtrain_result dtrain__second_mean(dtrain_strategy *strategy, uint32_t number,
                                                  const dtrain__samples *x,
                                                  const dtrain__samples *y, float *factor);
/* End a loss with so many sums on this rank: where ranks do not know yet how many sums a loss has,
 * take part in further ones of other ranks, without samples. A rank that `joins` has no batch, and
 * takes part in all of them. Collective over the data axis. */
DTRAIN__PRIVATE dtrain_result dtrain__end_sums(dtrain_strategy *strategy, uint32_t sums,
                                               bool joins);
/* Note that an evaluation begins or ends: its passes have no gradients, and still one mean. */
DTRAIN__PRIVATE void dtrain__expect_evaluation(dtrain_strategy *strategy, bool begins);
/* Note that a tape runs the backwards: joining ranks then agree on a full batch. */
DTRAIN__PRIVATE void dtrain__expect_tape(dtrain_strategy *strategy);
/* Note that an operation computes over the batches of several ranks: either all join, or none. */
DTRAIN__PRIVATE void dtrain__share_batches(dtrain_strategy *strategy, const dtrain_comm *comm);
DTRAIN__PRIVATE dtrain_result dtrain__agree_full_batch(dtrain_strategy *strategy, int64_t terms);
DTRAIN__PRIVATE double dtrain__samples_count(const dtrain__samples *samples);
DTRAIN__PRIVATE float dtrain__weight_of(const dtrain_strategy *strategy,
                                        const dtrain__samples *samples);
DTRAIN__PRIVATE int64_t dtrain__weigh_loss(dtrain_strategy *strategy,
                                           const dtrain__samples *samples);
/* Note whether the next backward is a schedule of several micro-batches. */
DTRAIN__PRIVATE void dtrain__expect_schedule(dtrain_strategy *strategy, bool several);
/* Note that a micro-batch of a pipeline, not the last one, had a gradient of an entry: should the
 * last one have none, it counts as it is. */
DTRAIN__PRIVATE void dtrain__note_gradient(dtrain_strategy *strategy, size_t i);
/* Weigh a micro-batch of a pipeline, whose schedule is one backward (samples NULL: it has no data);
 * in their order, before finish, which takes the last one's weight (more false). *weight is the one
 * that its loss has set, and becomes that of its samples where they are counted. */
DTRAIN__PRIVATE void dtrain__weigh_micro(dtrain_strategy *strategy, const dtrain__samples *samples,
                                         bool more, float *weight);
/* Return the weight of the backward under way. */
DTRAIN__PRIVATE float dtrain__micro_weight(const dtrain_strategy *strategy);
/* Return where, in device memory, a step's weights of all ranks are summed up behind finish. Let
 * finish take this rank's from device memory (NULL: from its backwards), while it is recorded. */
DTRAIN__PRIVATE const float *dtrain__step_weight(const dtrain_strategy *strategy);
DTRAIN__PRIVATE void dtrain__weigh_on_device(dtrain_strategy *strategy, const float *weights);
DTRAIN__PRIVATE dtrain_result dtrain__join_forward(dtrain_strategy *strategy);
DTRAIN__PRIVATE dtrain_result dtrain__join_backward(dtrain_strategy *strategy, bool *over);
DTRAIN__PRIVATE dtrain_result dtrain__counts_settle(dtrain_strategy *strategy, bool *empty);

/* ---- An update in host memory: strategy/offload.c ---------------------------------------------*/

#define DTRAIN__PIECE ((int64_t)1 << 18) /* elements of one turn */

/* Return the CPU that updates what is offloaded; NULL: nothing is. */
DTRAIN__PRIVATE dtrain_device *dtrain__update_device(const dtrain_strategy *strategy);
/* Begin: copies down come behind what compute has queued. End: compute comes behind copies up. */
DTRAIN__PRIVATE dtrain_result dtrain__update_begin(dtrain_strategy *strategy);
DTRAIN__PRIVATE dtrain_result dtrain__update_end(dtrain_strategy *strategy);
/* Queue a copy to host memory (to NULL: none) and, as number `turn`, 0 or 1, its end. */
DTRAIN__PRIVATE dtrain_result dtrain__update_down(dtrain_strategy *strategy, size_t turn, float *to,
                                                  const float *from, int64_t count);
DTRAIN__PRIVATE dtrain_result dtrain__update_await(const dtrain_strategy *strategy, size_t turn);
DTRAIN__PRIVATE dtrain_result dtrain__update_up(dtrain_strategy *strategy, float *to,
                                                const float *from, int64_t count);

/* ---- A layout, made or planned ----------------------------------------------------------------*/

struct dtrain__layout;
DTRAIN__PRIVATE const struct dtrain__layout *dtrain__layout_of(const dtrain_strategy *strategy);
DTRAIN__PRIVATE bool dtrain__gathered_as(const struct dtrain__layout *layout,
                                         const dtrain_param *storage, uint32_t dtype,
                                         const void **low, bool *passing);
DTRAIN__PRIVATE uint64_t dtrain__update_bytes(const struct dtrain__layout *layout, size_t i,
                                              size_t states, bool whole, int64_t *staging);

/* A strategy that is not made. Collective; free it after an error too. */
typedef struct dtrain__strategy_plan {
    dtrain__groups groups;
    uint64_t needs; /* bytes of a rank for parameters, gradients, optimizer and buffers ... */
    int64_t limit;  /* ... of those that it may use, for activations too */
    const struct dtrain__layout *layout; /* of rank 0 of the data axis */
    const dtrain__stage_map *stages;     /* of a pipeline, with its desc; NULL: not known */
    const dtrain_pipeline_desc *pipeline;
    struct dtrain__planned *planned;
} dtrain__strategy_plan;
DTRAIN__PRIVATE dtrain_result dtrain__plan_strategy(dtrain_world *world, dtrain_param *params,
                                                    size_t count, const dtrain_strategy_desc *desc,
                                                    dtrain__strategy_plan *plan);
DTRAIN__PRIVATE void dtrain__strategy_plan_free(dtrain_world *world, dtrain__strategy_plan *plan);
DTRAIN__PRIVATE double dtrain__mib(uint64_t bytes);
