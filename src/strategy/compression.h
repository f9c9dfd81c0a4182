/* Gradient compression and hierarchy
 *
 * dtrain_compression_desc, and reduce_dtype and hierarchical of dtrain_strategy_desc, say how a
 * bucket of gradients travels. The library never chooses a lossy way, not even with AUTO.
 *
 *     reduce_dtype        as bf16 or fp16: half the bytes, sums in fp32
 *     top-k               the topk_ratio elements of largest magnitude of every tensor, as values
 *                         and indices
 *     hook                as the program decides: strategy/hook.h; PowerSGD is examples/power_sgd.c
 *     hierarchical        reduce-scatter inside a node of G ranks, all-reduce of 1/G across nodes,
 *                         all-gather inside. With it reduce_dtype and top-k apply only between
 *                         nodes; so does a hook that takes slices
 *
 *                        DDP   ZERO1   SHARD_GRAD_OP   FULL_SHARD   ZERO3   HYBRID_SHARD
 *     reduce_dtype        x      x          x              x          x          x
 *     hierarchical        x      x          x              x                  by itself
 *     top-k, hooks        x
 *
 * Error feedback: what a rank did not send stays in its residual and is added to its next gradient
 * (Seide et al., "1-bit SGD", 2014; Stich et al., "Sparsified SGD with Memory", 2018). Every rank
 * has separate residuals, of parameters and not of buckets; with hierarchical they are residuals of
 * the pieces that the rank sends. dtrain_state lists them (DTRAIN_STATE_RESIDUAL), and checkpoints
 * hold them. Loss scaling cannot be combined with it, because a residual has the scale of an
 * earlier step: use bf16. Top-k sends a NaN of a gradient at once, and removes it from the
 * residual.
 *
 * Top-k (Lin et al., "Deep Gradient Compression", ICLR 2018): with topk_momentum the residual
 * accumulates velocity instead of gradients, and the optimizer should have no momentum (SGD). The
 * warm-up of warmup_steps starts at warmup_ratio and falls by a constant factor per step. Each rank
 * sends its selection to all ranks and receives N - 1 selections. Sums are taken in rank order,
 * each term times 1/N.
 *
 * Optimizers and clipping see the decompressed mean like any gradient, and that has effects. An
 * element of top-k arrives rarely, with the sum of many steps. AdamW takes that for variance and
 * steps too little: set variance_steps to dense_steps. What clipping cuts off is in no residual:
 * clip generously or not at all. */

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
    float topk_ratio;       /* share of a tensor's elements to send; 0 = 0.01 */
    float topk_momentum;    /* momentum correction, instead of the optimizer's momentum; 0 = off */
    float warmup_ratio;     /* share in the first step of the warm-up; 0 = 0.25 */
    int64_t dense_below;    /* tensors with fewer elements, and 1-D tensors, travel whole; 0 = 1024,
                               1 = only 1-D tensors */
    uint64_t dense_steps; /* first steps, without compression; 0 = 10, or DTRAIN_DENSE_STEPS_NONE */
    uint64_t warmup_steps; /* steps after these in which the share falls; 0 = no warm-up */
    const dtrain_comm_hook_desc *hook; /* instead of a kind, or NULL; must outlive the strategy */
} dtrain_compression_desc;
