/* Parameters, units, buckets
 *
 * A model is an array of dtrain_param in forward order. The array belongs to the host and must
 * stay where it is until the strategy is destroyed. */

#pragma once

#include "core/api.h"

#define DTRAIN_PARAM_FROZEN 1u   /* no gradient, no optimizer state */
#define DTRAIN_PARAM_NO_DECAY 2u /* weight decay skips it; 1-D tensors are skipped anyway */

typedef enum dtrain_init {
    DTRAIN_INIT_ZERO = 0,
    DTRAIN_INIT_CONSTANT = 1, /* init_scale */
    DTRAIN_INIT_NORMAL = 2,   /* N(0, init_scale^2) */
    DTRAIN_INIT_UNIFORM = 3   /* [-init_scale, init_scale) */
} dtrain_init;

typedef struct dtrain_param {
    /* Filled by the host. */
    const char *name;              /* unique; kept by pointer */
    float *value;                  /* (count); NULL: the library owns it and initialises it */
    float *grad;                   /* (count); NULL: it lives inside a bucket and this becomes its
                                      address; the host's own is copied at ready and back */
    int64_t count;                 /* elements; 0 = product of shape. Both are completed in place */
    int64_t shape[4];              /* leading non-zero entries; all zero = 1-D of count */
    uint32_t unit;                 /* which unit (transformer block) it belongs to */
    uint32_t flags;                /* DTRAIN_PARAM_* */
    struct dtrain_param *alias_of; /* tied weights: shares value and grad of an earlier parameter */
    uint32_t init;                 /* dtrain_init, used when value is NULL */
    float init_scale;

    /* Filled by dtrain_strategy_create; the host reads, never writes. */
    struct dtrain_param *storage; /* itself, or the end of the alias chain */
    uint32_t index;               /* place in the array */
    uint32_t pending_uses;        /* the tape's count of backward contributions still to come */
    bool grad_written;            /* grad holds a part of this step's gradient: add to it; otherwise
                                     overwrite. Set by the tape and by ready, cleared by finish */
} dtrain_param;
