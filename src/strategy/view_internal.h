/* A strategy as state, tape, trainer and monitor see it
 *
 * The core ring does not need these questions. */

#pragma once

#include "strategy/core_view_internal.h"

/* ---- The whole --------------------------------------------------------------------------------*/

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
/* Return the map of pipeline stages; without a pipeline it has one stage. */
DTRAIN__PRIVATE const dtrain__stage_map *dtrain__stages_of(const dtrain_strategy *strategy);
/* Tell whether this rank's loss counts: one of the ranks that hold a model sees its loss, with the
 * last stage, and where several do, the last of them. */
DTRAIN__PRIVATE bool dtrain__loss_counts(const dtrain_strategy *strategy);
/* Hash all updates so far and the flags of parameters, which all ranks must have alike. */
DTRAIN__PRIVATE uint64_t dtrain__same_now(const dtrain_strategy *strategy);

/* ---- A parameter ------------------------------------------------------------------------------*/

/* True if an optimizer keeps state of the parameter: it was not frozen at creation. */
DTRAIN__PRIVATE bool dtrain__has_state(const dtrain_strategy *strategy, size_t i);
/* Count the ranks that keep the same piece as this rank; return this rank's number among them. */
DTRAIN__PRIVATE int dtrain__holders(const dtrain_strategy *strategy, size_t i, int *count);
DTRAIN__PRIVATE bool dtrain__gathered_as(const struct dtrain__layout *layout,
                                         const dtrain_param *storage, uint32_t dtype,
                                         const void **low, bool *passing);

/* ---- Norm of gradients ------------------------------------------------------------------------*/

/* Queue the sums of squares of the ranks that hold one model into *squares (*count, device memory),
 * where no rank shares a copy: their sum, in this order, is that of all gradients. Collective over
 * those ranks. */
DTRAIN__PRIVATE dtrain_result dtrain__queue_squares(dtrain_strategy *strategy,
                                                    const double **squares, int *count);

/* ---- A strategy that is not made --------------------------------------------------------------*/

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
