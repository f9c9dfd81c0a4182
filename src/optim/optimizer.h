/* Optimizers and learning rates
 *
 * An optimizer updates the parameters of a strategy, each rank its own shards, and publishes them.
 * Hyper-parameters have no default of zero: start from dtrain_optimizer_defaults(). A desc that
 * does not is refused by name.
 *
 * A parameter group has its own hyper-parameters, even another kind. Parameter i is in group
 * params[i].group: 0 is the desc itself, g > 0 is groups[g - 1]. For instance hidden matrices use
 * Muon and everything else AdamW:
 *
 *     dtrain_optimizer_desc desc = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_ADAMW);
 *     dtrain_optimizer_desc muon = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_MUON);
 *     muon.lr_scale = 0.02f / 3e-4f;      // multiplies the rate of dtrain_optimizer_step
 *     desc.groups = &muon;
 *     desc.group_count = 1;               // and params[i].group = 1 for each hidden matrix i */

#pragma once

#include "core/api.h"
#include "core/result.h"
#include "world/world.h"
#include "strategy/strategy.h"

typedef struct dtrain_optimizer dtrain_optimizer;

typedef enum dtrain_optimizer_kind {
    DTRAIN_OPTIMIZER_ADAMW = 1,
    DTRAIN_OPTIMIZER_SGD = 2,
    DTRAIN_OPTIMIZER_LION = 3,
    DTRAIN_OPTIMIZER_MUON = 4
} dtrain_optimizer_kind;

typedef struct dtrain_optimizer_desc {
    uint32_t kind;
    float beta1, beta2;      /* AdamW: 0.9, 0.999; Lion: 0.9, 0.99 */
    float epsilon;           /* AdamW: 1e-8; Muon: 1e-7, added to the norm of a matrix */
    float weight_decay;      /* skips NO_DECAY and 1-D parameters. Decoupled, except for SGD, where
                                it is a part of the gradient as in torch. AdamW: 0.01; others: 0 */
    float momentum;          /* SGD: 0; Muon: 0.95 */
    bool nesterov;           /* Muon: true */
    uint64_t variance_steps; /* AdamW: first steps that second moments average over; they are fixed
                                after these. For top-k gradients, whose rare large elements would
                                pass for variance: 10 to 25 % of a run, as many as dense_steps (Tang
                                et al., "1-bit Adam", ICML 2021). 0 = all steps */
    float lr_scale;          /* multiplies the rate of a step: 1 */
    const struct dtrain_optimizer_desc *groups; /* (group_count) parameter groups 1, 2, ..., without
                                                   further groups. Read in create */
    uint32_t group_count;
} dtrain_optimizer_desc;

/* Return the defaults of a kind, written beside the fields; other fields are 0.
 *
 *     ADAMW   the values of torch (Loshchilov and Hutter, "Decoupled Weight Decay Regularization",
 *             ICLR 2019)
 *     SGD     no momentum, no weight decay, as in torch
 *     LION    one moment per parameter. Its rate is 3 to 10 times smaller than AdamW's, its weight
 *             decay as many times larger (Chen et al., "Symbolic Discovery of Optimization
 *             Algorithms", NeurIPS 2023)
 *     MUON    rates around 0.02 (Jordan et al., "Muon: An optimizer for hidden layers in neural
 *             networks", 2024). It is for hidden matrices: parameters of two or more dimensions, of
 *             which all after the first count as one. Embeddings, the last layer, biases and norms
 *             belong in a group of AdamW. It updates whole matrices: under DDP every rank updates
 *             all of them, under ZERO3 each owner its own. UNSUPPORTED: kinds that cut tensors, and
 *             parameters that a tensor axis cuts (dtrain_param.cut). */
DTRAIN_API dtrain_optimizer_desc dtrain_optimizer_defaults(dtrain_optimizer_kind kind);

/* Create an optimizer, with fp32 state for this rank's shards only. desc is required; the strategy
 * must outlive the optimizer. A parameter of a group that the desc does not have is an error that
 * names both. With DTRAIN_OFFLOAD_OPTIMIZER the master copy of the values is in host memory: the
 * next step undoes changes made to values on the device. Local. */
DTRAIN_API dtrain_result dtrain_optimizer_create(dtrain_world *world, dtrain_strategy *strategy,
                                                 const dtrain_optimizer_desc *desc,
                                                 dtrain_optimizer **out);
/* Free an optimizer and its state; NULL is ignored. */
DTRAIN_API void dtrain_optimizer_destroy(dtrain_optimizer *optimizer);
/* Update the parameters once, with every gradient multiplied by grad_scale, and publish them.
 * Collective if anything is sharded; the first update is collective everywhere, because ranks then
 * compare hyper-parameters, rate and scale. dtrain_trainer_step, dtrain_strategy_verify and
 * dtrain_checkpoint_save find later rates that differ between ranks. A rate or scale that is not
 * finite, or a negative rate, is an error before anything changes. */
DTRAIN_API dtrain_result dtrain_optimizer_step(dtrain_optimizer *optimizer, float lr,
                                               float grad_scale);

typedef struct dtrain_optimizer_info {
    uint32_t kind;          /* dtrain_optimizer_kind, of group 0 */
    uint64_t step_count;    /* updates made */
    uint64_t state_bytes;   /* bytes of this rank's moments, on device or host */
    uint64_t scratch_bytes; /* Muon: bytes of matrices between two steps of its iteration */
} dtrain_optimizer_info;
/* Fill in what an optimizer has done and holds; zeros for an optimizer of NULL. */
DTRAIN_API void dtrain_optimizer_query(const dtrain_optimizer *optimizer,
                                       dtrain_optimizer_info *info);

typedef enum dtrain_schedule_kind {
    DTRAIN_SCHEDULE_CONSTANT = 0,
    DTRAIN_SCHEDULE_LINEAR = 1,
    DTRAIN_SCHEDULE_COSINE = 2,
    DTRAIN_SCHEDULE_STEPS = 3
} dtrain_schedule_kind;

#define DTRAIN_SCHEDULE_MILESTONES 8

/* Learning rates of a run. Warm-up: lr * (step + 1) / warmup_steps. Then from lr at warmup_steps to
 * min_lr at total_steps, along a straight line or half a cosine; min_lr after that. STEPS
 * multiplies lr by gamma at each milestone, and needs neither min_lr nor total_steps (MultiStepLR
 * of PyTorch).
 *
 * A rate found on one rank is often multiplied by the number of ranks, because the batch is larger:
 * for SGD by the number (Goyal et al., 2017), for Adam by its square root (Malladi et al.,
 * 2022). */
typedef struct dtrain_schedule {
    uint32_t kind;
    float lr, min_lr;
    int64_t warmup_steps, total_steps;
    float gamma;                                    /* of STEPS; 0 = 0.1 */
    int64_t milestones[DTRAIN_SCHEDULE_MILESTONES]; /* of STEPS: ascending; 0 ends them */
} dtrain_schedule;
/* Return the learning rate of a step, counted from 0. */
DTRAIN_API float dtrain_schedule_lr(const dtrain_schedule *schedule, int64_t step);
