/* The tables of compression
 *
 * Compression: what a step keeps of buckets (dtrain__sparse) and of the pieces of parameters in
 * them (dtrain__portion); see strategy/compression.c. */

#pragma once

#include "core/platform_internal.h"
#include "core/log.h"
#include "core/result.h"
#include "comm/backend.h"
#include "strategy/layout_internal.h"
#include "strategy/strategy.h"
#include "strategy/strategy_internal.h"

struct dtrain__portion {
    uint32_t param;
    bool dense;
    int64_t first, count;  /* within the bucket */
    int64_t dense_at;      /* dense: place among the bucket's dense elements */
    int64_t region;        /* top-k: elements of a region; all of them without regions */
    int64_t quota, at;     /* of the step under way: selected of a region, place in a block */
    int64_t rows, columns; /* PowerSGD: of the matrix */
    float *p, *q;          /* (rows, rank), (columns, rank) */
};

struct dtrain__sparse {
    size_t first, end; /* its portions */
    int64_t dense_count, p_count, q_count;
    int64_t room;               /* elements that a block has room for */
    int64_t largest;            /* selection of one portion */
    int64_t selected;           /* of the step under way: elements of a block */
    bool masked;                /* likewise */
    float *residual, *velocity; /* (hop_count), or NULL */
    float *dense;               /* (dense_count + p_count); rounded gradients need half of it */
    float *q, *q_seed;          /* (q_count) each */
    uint32_t *out, *in;         /* (hop_ranks blocks) each */
    float *values;              /* (largest) scratch: selected values, in fp32 */
    int32_t *indices;           /* (largest) */
};

typedef struct dtrain__portion dtrain__portion;
typedef struct dtrain__sparse dtrain__sparse;

/* strategy/compression.c */
DTRAIN__PRIVATE bool dtrain__is_balanced(const dtrain_compression_desc *how);
DTRAIN__PRIVATE double dtrain__ratio_of(const dtrain_compression_desc *how, uint64_t step);
DTRAIN__PRIVATE uint64_t dtrain__dense_steps(const dtrain_compression_desc *how);
DTRAIN__PRIVATE int64_t dtrain__quota(double ratio, int64_t count);
DTRAIN__PRIVATE int64_t dtrain__value_words(const dtrain__layout *layout, int64_t selected);
DTRAIN__PRIVATE int64_t dtrain__block_words(const dtrain__layout *layout, int64_t selected);
DTRAIN__PRIVATE double dtrain__masked_share(const dtrain__layout *layout);
DTRAIN__PRIVATE void dtrain__layout_portions_free(dtrain__layout *layout,
                                                  const dtrain_allocator *a);
DTRAIN__PRIVATE dtrain_result dtrain__layout_portions(dtrain__layout *layout,
                                                      const dtrain_allocator *a);
DTRAIN__PRIVATE void dtrain__lay_compression(dtrain__layout *layout);
DTRAIN__PRIVATE uint64_t dtrain__compressed_wire(const dtrain__layout *layout,
                                                 const dtrain__bucket *bucket);
DTRAIN__PRIVATE dtrain_result dtrain__compression_open(dtrain_strategy *strategy);
DTRAIN__PRIVATE dtrain_result dtrain__dense_copy(dtrain_strategy *strategy, dtrain__bucket *bucket,
                                                 bool back);
DTRAIN__PRIVATE dtrain_result dtrain__dense_start(dtrain_strategy *strategy, dtrain__bucket *bucket,
                                                  int64_t more, dtrain_work **work);
