/* Gradient compression and hierarchy
 *
 * A bucket of gradients travels as dtrain_compression_desc says, and reduce_dtype and hierarchical
 * of dtrain_strategy_desc. What is lossy is never chosen by the library, AUTO included.
 *
 *     reduce_dtype        as bf16 or fp16: half the bytes, sums in fp32
 *     top-k               of every tensor the topk_ratio of largest magnitude: values and indices
 *     hook                as a program wants it: strategy/hook.h; PowerSGD is examples/power_sgd.c
 *     hierarchical        reduce-scatter inside a node of G ranks, all-reduce of 1/G across nodes,
 *                         all-gather inside. With it reduce_dtype and top-k apply only between
 *                         nodes; so does a hook that takes slices
 *
 *                        DDP   ZERO1   SHARD_GRAD_OP   FULL_SHARD   ZERO3   HYBRID_SHARD
 *     reduce_dtype        x      x          x              x          x          x
 *     hierarchical        x      x          x              x                  by itself
 *     top-k, hooks        x
 *
 * Error feedback: what this rank did not send stays in its residual, and is added to its next
 * gradient (Seide et al., "1-bit SGD", 2014; Stich et al., "Sparsified SGD with Memory", 2018).
 * Every rank has its own residuals, and they belong to parameters, not to buckets; under
 * hierarchical they are of the pieces of parameters that the rank sends. dtrain_state lists them
 * (DTRAIN_STATE_RESIDUAL), and checkpoints hold them. Loss scaling cannot be combined with it (a
 * residual is of yesterday's scale): use bf16. A NaN in a gradient is sent at once by top-k, and is
 * gone from its residual.
 *
 * Top-k (Lin et al., "Deep Gradient Compression", ICLR 2018): with topk_momentum the residual
 * gathers velocity instead of gradients, and the optimizer should have no momentum of its own
 * (SGD). The warm-up of warmup_steps begins at warmup_ratio and falls by a constant factor a step.
 * Each rank sends its selection to all: N - 1 selections received. Sums are taken in rank order,
 * each term times 1/N.
 *
 * Optimizers and clipping see the decompressed mean like any gradient, and that is not harmless: an
 * element of top-k arrives rarely, with the sum of many steps. AdamW takes that for variance and
 * steps too little (set variance_steps to dense_steps), and what clipping cuts off is in no
 * residual (clip generously or not at all). */

#pragma once

#include "core/api.h"
#include "core/result.h"
#include "strategy/params.h"
#include "strategy/strategy.h"

typedef enum dtrain_compression {
    DTRAIN_COMPRESSION_NONE = 0,
    DTRAIN_COMPRESSION_TOPK = 1
} dtrain_compression;

#define DTRAIN_DENSE_STEPS_NONE UINT64_MAX

typedef struct dtrain_comm_hook_desc dtrain_comm_hook_desc; /* strategy/hook.h */

/* Every zero is the default written beside the field. */
typedef struct dtrain_compression_desc {
    uint32_t kind;          /* dtrain_compression; 0 = none */
    bool no_error_feedback; /* what is not sent is lost; for experiments */
    float topk_ratio;       /* share of a tensor's elements that are sent; 0 = 0.01 */
    float topk_momentum;    /* momentum correction, then in place of the optimizer's; 0 = off */
    float warmup_ratio;     /* share in the first step of the warm-up; 0 = 0.25 */
    int64_t dense_below;    /* tensors with fewer elements, and 1-D ones, travel whole; 0 = 1024,
                                 1 = 1-D ones alone */
    uint64_t dense_steps;   /* steps without compression, at the beginning; 0 = 10, or
                                 DTRAIN_DENSE_STEPS_NONE */
    uint64_t warmup_steps;  /* steps after those, in which the share falls to topk_ratio; 0 = no
                                 warm-up */
    const dtrain_comm_hook_desc *hook; /* in place of a kind, or NULL; stays there as long as the
                                          strategy */
} dtrain_compression_desc;
