/* The steps of ways, for strategy/ways.c, which chooses them; and what files of ways/ share */

#pragma once

#include "strategy/strategy_internal.h"

/* What compression keeps of a bucket. */
typedef struct dtrain__compressed {
    dtrain_hook_bucket hook;
    size_t tensor_count; /* in hook.tensors, the dense ones behind the others */
    int64_t dense_count; /* elements of dense tensors */
    float *packed;       /* (dense_count + hook.averaged_count) of reduce_dtype */
    char label[48];      /* of its collectives in traces */
} dtrain__compressed;

/* road.c: the all-reduce; ways/: the others. */
DTRAIN__PRIVATE dtrain__step_fn dtrain__all_reduce_begin, dtrain__all_reduce_end,
    dtrain__reduce_scatter_begin, dtrain__reduce_scatter_end, dtrain__shard_add,
    dtrain__replicas_begin, dtrain__replicas_end, dtrain__node_scatter_begin,
    dtrain__node_gather_begin, dtrain__tie_begin, dtrain__tensor_begin, dtrain__tensor_end,
    dtrain__round_1_begin, dtrain__round_1_end, dtrain__round_2_begin, dtrain__round_2_end;

/* strategy/ways/compression.c */
DTRAIN__PRIVATE dtrain_result dtrain__layout_hooks(dtrain__layout *layout,
                                                   const dtrain_allocator *a);
DTRAIN__PRIVATE void dtrain__lay_hooks(dtrain__layout *layout);
DTRAIN__PRIVATE void dtrain__hooks_free(dtrain__layout *layout, const dtrain_allocator *a);
DTRAIN__PRIVATE dtrain_result dtrain__compression_open(dtrain_strategy *strategy);

/* strategy/ways/topk.c, powersgd.c */
DTRAIN__PRIVATE const dtrain_comm_hook_desc *dtrain__topk_hook(void);
DTRAIN__PRIVATE const dtrain_comm_hook_desc *dtrain__powersgd_hook(void);
