/* A strategy as state, tape, trainer and monitor see it
 *
 * The core ring does not use these functions. */

#pragma once

#include "strategy/core_view_internal.h"

/* ---- The whole --------------------------------------------------------------------------------*/

/* List the state of compression; *count is 0 without compression. */
DTRAIN__PRIVATE const dtrain__kept *dtrain__kept_of(const dtrain_strategy *strategy, size_t *count);
/* True if gradients are reduced node by node: hierarchical, on several nodes. */
DTRAIN__PRIVATE bool dtrain__goes_by_nodes(const dtrain_strategy *strategy);
/* Add up the counters of all communicators of the tensor axis: for operations, and for sums of
 * whole parameters' gradients. */
DTRAIN__PRIVATE void dtrain__strategy_tensor_info(const dtrain_strategy *strategy,
                                                  dtrain_comm_info *info);
/* Add up the counters of the pipeline axis: messages of a schedule, and sums of tied weights. */
DTRAIN__PRIVATE void dtrain__strategy_pipeline_info(const dtrain_strategy *strategy,
                                                    dtrain_comm_info *info);
/* Return the map of pipeline stages; without a pipeline it has one stage. */
DTRAIN__PRIVATE const dtrain__stage_map *dtrain__stages_of(const dtrain_strategy *strategy);
/* True if this rank's loss counts. Of the ranks that hold one model only the ranks with the last
 * stage see the loss, and only the last of them counts it. */
DTRAIN__PRIVATE bool dtrain__loss_counts(const dtrain_strategy *strategy);
/* Hash all updates so far and the flags of parameters, which all ranks have in common. */
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
 * if no rank shares a copy. Their sum in this order covers all gradients. Collective over those
 * ranks. */
DTRAIN__PRIVATE dtrain_result dtrain__queue_squares(dtrain_strategy *strategy,
                                                    const double **squares, int *count);

/* ---- A strategy that is not made --------------------------------------------------------------*/

/* A planned strategy. dtrain__plan_strategy is collective; free the plan after an error too. */
typedef struct dtrain__strategy_plan {
    dtrain__groups groups;
    uint64_t needs; /* bytes per rank for parameters, gradients, optimizer and buffers */
    int64_t limit;  /* bytes that a rank may use, for activations too */
    const struct dtrain__layout *layout; /* layout of rank 0 of the data axis */
    const dtrain__stage_map *stages;     /* pipeline stages; NULL: not known */
    const dtrain_pipeline_desc *pipeline;
    struct dtrain__planned *planned;
} dtrain__strategy_plan;
DTRAIN__PRIVATE dtrain_result dtrain__plan_strategy(dtrain_world *world, dtrain_param *params,
                                                    size_t count, const dtrain_strategy_desc *desc,
                                                    dtrain__strategy_plan *plan);
DTRAIN__PRIVATE void dtrain__strategy_plan_free(dtrain_world *world, dtrain__strategy_plan *plan);
