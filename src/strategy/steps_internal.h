/* The steps of buckets, which strategy/steps.c lists, and functions that their files share */

#pragma once

#include "strategy/strategy_internal.h"

/* The state of compression of a bucket. */
typedef struct dtrain__compressed {
    dtrain_hook_bucket hook;
    size_t tensor_count; /* of hook.tensors; dense tensors come last */
    int64_t dense_count; /* elements of dense tensors */
    float *packed;       /* (dense_count) dense tensors in reduce_dtype */
    char label[48];      /* label of collectives in traces */
} dtrain__compressed;

/* In reduce.c: */
DTRAIN__PRIVATE dtrain__step_fn dtrain__all_reduce_begin, dtrain__reduce_scatter_begin,
    dtrain__keep_begin;
/* In the files of their features: */
DTRAIN__PRIVATE dtrain__step_fn dtrain__round_begin, dtrain__widen_begin,
    dtrain__reduce_owners_begin, dtrain__tie_begin, dtrain__tensor_begin, dtrain__tensor_end,
    dtrain__node_scatter_begin, dtrain__node_gather_begin, dtrain__scale_begin,
    dtrain__replicas_begin, dtrain__replicas_end, dtrain__round_1_begin, dtrain__round_1_end,
    dtrain__round_2_begin, dtrain__round_2_end, dtrain__host_put_begin, dtrain__host_get_begin,
    dtrain__host_return_begin;

/* strategy/reduce.c */
DTRAIN__PRIVATE float *dtrain__reduce_result(const dtrain_strategy *strategy,
                                             const dtrain__bucket *bucket);

/* strategy/wire.c */
DTRAIN__PRIVATE void *dtrain__wire(const dtrain__bucket *bucket, int64_t first);
DTRAIN__PRIVATE void *dtrain__wire_end(const dtrain_strategy *strategy,
                                       const dtrain__bucket *bucket);
DTRAIN__PRIVATE dtrain_dtype dtrain__wire_dtype(const dtrain_strategy *strategy);
DTRAIN__PRIVATE dtrain_result dtrain__wire_convert(dtrain_strategy *strategy,
                                                   const dtrain__bucket *bucket, float *x,
                                                   int64_t first, int64_t count, bool back);

/* strategy/levels.c */
DTRAIN__PRIVATE dtrain_result dtrain__scale(dtrain_strategy *strategy, const dtrain__bucket *bucket,
                                            float *x, int64_t count);

/* strategy/compress.c */
DTRAIN__PRIVATE dtrain_result dtrain__layout_hooks(dtrain__layout *layout,
                                                   const dtrain_allocator *a);
DTRAIN__PRIVATE void dtrain__lay_hooks(dtrain__layout *layout);
DTRAIN__PRIVATE dtrain_result dtrain__compression_open(dtrain_strategy *strategy);

/* strategy/topk.c */
DTRAIN__PRIVATE const dtrain_comm_hook_desc *dtrain__topk_hook(void);
