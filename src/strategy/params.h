/* Parameters, units, buckets
 *
 * A model is an array of dtrain_param in forward order. The array belongs to the host and must
 * stay where it is until the strategy is destroyed. */

#pragma once

#include "core/api.h"
#include "core/dtype.h"
#include "parallel/cut.h"

/* No gradient, and no optimizer state. A program may also set it for some steps, on all ranks
 * alike: then there is no gradient (dtrain_missing_gradient) and the state is kept. What was
 * created with it stays so. */
#define DTRAIN_PARAM_FROZEN 1u
#define DTRAIN_PARAM_NO_DECAY 2u /* weight decay skips it; 1-D tensors are skipped anyway */
/* Frozen, whole on every rank, and written by an operation, as running averages are: a step ends
 * with the mean over the ranks. */
#define DTRAIN_PARAM_BUFFER 4u

typedef enum dtrain_init {
    DTRAIN_INIT_ZERO = 0,
    DTRAIN_INIT_CONSTANT = 1, /* init_scale */
    DTRAIN_INIT_NORMAL = 2,   /* N(0, init_scale^2) */
    DTRAIN_INIT_UNIFORM = 3   /* [-init_scale, init_scale) */
} dtrain_init;

/* The library's part of a parameter: dtrain_strategy_create fills it, the host reads it. A program
 * without a strategy zeroes it once, and clears grad_written before each backward. */
typedef struct dtrain_param_state {
    struct dtrain_param *storage; /* whose value and grad these are: the parameter itself, or the
                                     end of its alias chain */
    struct dtrain_param *next;    /* the next with this storage, in a circle */
    uint32_t index;               /* place in the array */
    uint32_t pending_uses;        /* the tape's count of backward contributions still to come */
    bool grad_written;            /* grad holds a part of this step's gradient: add to it; otherwise
                                     overwrite. Set by the tape and by ready, cleared by finish; of
                                     an alias as of its target */
    bool frozen;                  /* DTRAIN_PARAM_FROZEN was set when the strategy was created */
    bool remote;                  /* a pipeline has its unit in a stage of another rank: nothing is
                                     computed with it here, and no gradient of it made */
} dtrain_param_state;

/* Filled by the host, except for its last member. */
typedef struct dtrain_param {
    const char *name; /* unique; kept by pointer */
    float *value;     /* (count); NULL: the library owns it and initialises it */
    float *grad;      /* (count); NULL: it lives inside a bucket and this becomes its
                                      address; the host's own is copied at ready and back */
    int64_t count;    /* elements; 0 = product of shape. Both are completed in place; where
                                      neither is given, an alias takes its target's. Of one that a
                                      tensor axis cuts, the elements of this rank's part; 0 where
                                      all that use it are stages of other ranks */
    int64_t shape[4]; /* leading non-zero entries; all zero = 1-D of count. Always of the whole */
    uint32_t unit;    /* which unit (transformer block) it belongs to */
    uint32_t flags;   /* DTRAIN_PARAM_* */
    uint32_t group;   /* parameter group of the optimizer; 0 = its desc itself. An alias
                                      is in its target's */
    struct dtrain_param *alias_of; /* tied weights: shares value and grad of an earlier parameter */
    uint32_t init;                 /* dtrain_init, used when the host has given no value */
    float init_scale;
    int64_t init_count; /* elements that init is for, the first ones; 0 = all. Others are 0 */
    dtrain_cut cut;     /* how the tensor axis of a mesh divides it; zeroed = not */
    /* The type in which the host computes. 0 = F32: with value and grad. Others: with typed_value
     * and typed_grad in place of value and grad, which the host leaves NULL. Arrays that are NULL
     * the library owns; arrays that the host gives are device memory. Not for the tape, nor for
     * DTRAIN_PARAM_BUFFER.
     *
     *     BF16, F16   sums, optimizers and their master copies are fp32; typed_value is the rounded
     *                 copy. Where gradients are whole, micro-batches add up in typed_grad, in its
     *                 type, as in torch
     *     F64         everything is fp64 but rates, scales and weights of samples. For all
     *                 parameters of a strategy, or none; AdamW and SGD; without compression,
     *                 offload, mesh, param_dtype and reduce_dtype */
    uint32_t dtype;                 /* dtrain_dtype; of an alias 0, or that of its target */
    void *typed_value, *typed_grad; /* (count) */
    dtrain_param_state state;       /* the library's */
} dtrain_param;
