/* The steps of ways, for strategy/ways.c, which chooses them; and what files of ways/ share
 *
 *     dtrain__portion   the part of a parameter that compression treats by itself
 *     dtrain__sparse    what compression keeps of a bucket */

#pragma once

#include "strategy/strategy_internal.h"

/* The part of a parameter that compression treats by itself: strategy/ways/compression.c. */
typedef struct dtrain__portion {
    uint32_t param;
    int64_t first, count;  /* within the bucket */
    int64_t region;        /* top-k: elements of a region; without regions = count */
    int64_t quota;         /* elements that this step selects from a region */
    int64_t at;            /* first element in a block of this step; dense: in `packed` */
    int64_t rows, columns; /* PowerSGD: of the matrix */
    int64_t p_at, q_at;    /* first element of its factors among those of the bucket */
    float *p, *q;          /* (rows, rank), (columns, rank) */
} dtrain__portion;

typedef struct dtrain__sparse {
    dtrain__portion *portions, *dense, *end; /* of the bucket: compressed ones, then dense ones */
    int64_t dense_count, p_count, q_count;   /* elements */
    int64_t room;                            /* most elements of a block in any step */
    int64_t largest;                         /* most elements that are selected from one portion */
    int64_t selected;                        /* elements of a block in this step */
    bool masked;                             /* this step sends zeros for what is not selected */
    float *residual, *velocity;              /* (slice_count), or NULL */
    float *packed;      /* (dense_count + p_count); rounded gradients need half of it */
    float *q, *q_seed;  /* (q_count) each */
    uint32_t *out, *in; /* (slice_ranks blocks) each */
    float *values;      /* (largest) scratch: selected values, in fp32 */
    int32_t *indices;   /* (largest) */
} dtrain__sparse;

/* road.c: the all-reduce; ways/: the others. */
DTRAIN__PRIVATE dtrain__step_fn dtrain__all_reduce_begin, dtrain__all_reduce_end,
    dtrain__reduce_scatter_begin, dtrain__reduce_scatter_end, dtrain__shard_add,
    dtrain__replicas_begin, dtrain__replicas_end, dtrain__node_scatter_begin,
    dtrain__node_gather_begin, dtrain__topk_begin, dtrain__topk_end, dtrain__topk_publish_begin,
    dtrain__topk_publish_end, dtrain__p_begin, dtrain__p_end, dtrain__q_begin, dtrain__q_end;

/* strategy/ways/compression.c */
DTRAIN__PRIVATE bool dtrain__is_balanced(const dtrain_compression_desc *how);
DTRAIN__PRIVATE uint64_t dtrain__dense_steps(const dtrain_compression_desc *how);
DTRAIN__PRIVATE int64_t dtrain__quota(double ratio, int64_t count);
DTRAIN__PRIVATE int64_t dtrain__value_words(const dtrain__layout *layout, int64_t selected);
DTRAIN__PRIVATE int64_t dtrain__block_words(const dtrain__layout *layout, int64_t selected);
DTRAIN__PRIVATE double dtrain__masked_share(const dtrain__layout *layout);
DTRAIN__PRIVATE dtrain_result dtrain__layout_portions(dtrain__layout *layout,
                                                      const dtrain_allocator *a);
DTRAIN__PRIVATE void dtrain__lay_compression(dtrain__layout *layout);
DTRAIN__PRIVATE void dtrain__portions_free(dtrain__layout *layout, const dtrain_allocator *a);
DTRAIN__PRIVATE dtrain_result dtrain__compression_open(dtrain_strategy *strategy);
DTRAIN__PRIVATE dtrain_result dtrain__dense_begin(dtrain_strategy *strategy, dtrain__bucket *bucket,
                                                  int64_t more, dtrain_work **work);
DTRAIN__PRIVATE dtrain_result dtrain__dense_end(dtrain_strategy *strategy, dtrain__bucket *bucket);
