/* Strategies
 *
 * A strategy says where parameters, gradients and optimizer state live across the ranks, and moves
 * them. A training loop written once runs under every kind by changing one field:
 *
 *     kind            parameters  gradients   optimizer   sent per step and rank, P = model
 *     DDP             whole       whole       whole       2(N-1)/N P   all-reduce
 *     ZERO1           whole       whole       1/N         2(N-1)/N P   reduce-scatter, all-gather
 *     SHARD_GRAD_OP   whole       1/N         1/N         2(N-1)/N P   the same (ZeRO-2)
 *     FULL_SHARD      1/N         1/N         1/N         3(N-1)/N P   all-gather twice (ZeRO-3,
 *                                                                      FSDP), reduce-scatter
 *     ZERO3           owner only  owner only  owner only  3(N-1)/N P   broadcasts, reduces
 *     HYBRID_SHARD    1/G         1/G         1/G         FULL_SHARD inside a node of G ranks,
 *                                                         all-reduce of 1/G across nodes
 *
 * (Li et al., "PyTorch Distributed", VLDB 2020; Rajbhandari et al., "ZeRO", SC 2020; Zhao et al.,
 * "PyTorch FSDP", VLDB 2023.) ZERO3 leaves tensors whole and gives every rank about as many
 * elements: what optimizers of whole matrices need.
 *
 * Hooks, called by the tape or by a program with its own backward:
 *
 *     gather(unit, pass)   before a unit's forward, and before its backward: its parameters are
 *                          whole, and in backward there is a place for its gradients
 *     release(unit)        after it
 *     ready(param)         this gradient is final for this backward
 *     finish()             the end of a backward: gradients, or this rank's shards of them, are the
 *                          mean
 *     publish()            after this rank's shards were updated; dtrain_optimizer_step calls it
 *
 * Forward gathers units in the order in which they appear in the array, backward in the opposite
 * order; the next one is fetched meanwhile. Kinds that keep parameters and gradients whole (DDP,
 * ZERO1) need no gather and no release. In SHARD_GRAD_OP and the kinds below it param->grad is
 * memory for one unit's backward, and only shards() shows reduced gradients; in FULL_SHARD and
 * below param->value is NULL outside gather and release.
 *
 * Ranks may differ in which gradients they have and in the order in which they become ready, in
 * which units backward comes to, and in who owns the memory of gradients.
 *
 * A tensor that several units use (tied weights) is registered once and has an alias in each other
 * unit: it stays whole from its first gather in a step to the update. */

#pragma once

#include "core/api.h"
#include "core/result.h"
#include "world/world.h"
#include "comm/comm.h"
#include "parallel/mesh.h"
#include "parallel/pipeline.h"
#include "strategy/params.h"

typedef struct dtrain_strategy dtrain_strategy;

typedef enum dtrain_strategy_kind {
    DTRAIN_STRATEGY_DEFAULT = 0, /* = DTRAIN_STRATEGY_DDP */
    DTRAIN_STRATEGY_DDP = 1,
    DTRAIN_STRATEGY_ZERO1 = 2,
    DTRAIN_STRATEGY_SHARD_GRAD_OP = 3,
    DTRAIN_STRATEGY_FULL_SHARD = 4,
    DTRAIN_STRATEGY_ZERO3 = 5,
    DTRAIN_STRATEGY_HYBRID_SHARD = 6,
    DTRAIN_STRATEGY_AUTO = 7 /* the least communication that fits; see strategy/memory.h */
} dtrain_strategy_kind;

typedef enum dtrain_missing_gradient {
    /* counts as zeros on that rank. If no rank has one in the whole step, optimizers leave the
     * parameter, its moments and its count of steps alone, as torch does without a .grad */
    DTRAIN_MISSING_GRADIENT_SKIP = 0,
    DTRAIN_MISSING_GRADIENT_ERROR = 1, /* finish fails and names it */
    /* counts as zeros: old moments and weight decay still move it, unless it is frozen */
    DTRAIN_MISSING_GRADIENT_ZERO = 2
} dtrain_missing_gradient;

/* When sharded gradients are reduced in a step of several micro-batches; whole ones: the last. */
typedef enum dtrain_accumulation {
    /* SHARD_EVERY for HYBRID_SHARD, EVERY where gradients are sharded, LAST elsewhere */
    DTRAIN_ACCUMULATION_DEFAULT = 0,
    /* in the last backward only: least communication, but every rank holds whole gradients */
    DTRAIN_ACCUMULATION_LAST = 1,
    /* in every backward: sharded gradients stay sharded. Refused for DDP and ZERO1, which would pay
     * for it and gain nothing */
    DTRAIN_ACCUMULATION_EVERY = 2,
    /* HYBRID_SHARD: inside nodes in every backward, across nodes in the last */
    DTRAIN_ACCUMULATION_SHARD_EVERY = 3
} dtrain_accumulation;

struct dtrain_compression_desc; /* strategy/compression.h */

#define DTRAIN_OPTIMIZER_STATES_NONE UINT32_MAX /* for optimizer_states: SGD without momentum */

/* Every zero is the default written beside the field: a zeroed desc is plain DDP. */
typedef struct dtrain_strategy_desc {
    uint32_t kind;             /* dtrain_strategy_kind; 0 = DDP */
    uint32_t missing_gradient; /* dtrain_missing_gradient; 0 = zeros, or skipped; a warning once */
    uint32_t accumulation;     /* dtrain_accumulation; 0 = as the kind needs it */
    uint32_t param_dtype;      /* 0 = F32, or BF16, F16: what gathered parameters are rounded to and
                                   travel as, in kinds that shard them; shards stay fp32 */
    uint32_t reduce_dtype;     /* 0 = F32, or BF16, F16: what gradients travel as; sums are fp32 */
    uint32_t offload;          /* DTRAIN_OFFLOAD_*, see strategy/memory.h; 0 = nothing */
    uint32_t node_size;        /* ranks of a node, for HYBRID_SHARD and hierarchical; 0 = those of a
                                   host */
    bool no_overlap;           /* communicate in finish and gather only; with the same bits */
    bool keep_after_forward;   /* kinds that shard parameters: units stay gathered from their first
                                   gather to the update. More memory, one gather less; false:
                                   release frees a unit between forward and backward too */
    bool hierarchical;         /* reduce and gather node by node; see strategy/compression.h. Not
                                   for ZERO3, nor for HYBRID_SHARD, which does it by itself */
    size_t bucket_bytes;       /* 0 = 25 MiB, and 1 MiB for the first one; where gradients are
                                  sharded, a unit is a bucket */
    uint64_t memory_limit;     /* AUTO: bytes a rank may use; 0 = what is left of the launch's
                                   memory_limit, and without one 15/16 of what is free */
    uint64_t other_bytes;      /* AUTO: bytes of a rank beside the strategy's and the optimizer's:
                                   activations (dtrain_trainer_plan), the process */
    uint32_t optimizer_states; /* AUTO and planning: fp32 tensors of optimizer state a parameter;
                                   0 = AdamW's 2, or DTRAIN_OPTIMIZER_STATES_NONE */
    const uint32_t *group_states; /* (group_count) the same for parameters of the groups 1, 2, ...
                                     of an optimizer; of groups behind them it is
                                     optimizer_states. Read in create */
    uint32_t group_count;
    uint64_t init_seed; /* for parameters the library initialises */
    dtrain_comm *comm;  /* NULL = all ranks of the world, or the mesh's */
    /* Which axes there are; it stays until the strategy is destroyed. NULL = all ranks of comm are
     * the data axis. */
    const dtrain_mesh *mesh;
    const dtrain_pipeline_desc *pipeline; /* which units each stage of a pipeline axis has; NULL =
                                             one stage a rank, evenly. Read in create */
    const struct dtrain_compression_desc *compression; /* NULL = none; DDP only; read in create */
} dtrain_strategy_desc;

/* Make a strategy. Collective. It compares the registration of all ranks (names, shapes, cuts,
 * units, flags, initialisation and the desc, except no_overlap where parameters are whole; a
 * difference is DTRAIN_ERROR_MISMATCH naming the field, values and rank), allocates what the
 * host left NULL, initialises or broadcasts rank 0's values, plans the buckets. An error on one
 * rank is an error on all. desc NULL = a zeroed one.
 *
 * Values the library initialises are drawn element by element from their place in the model: every
 * kind and world size starts from the same bits, and no rank ever holds the whole of a sharded
 * model. Kinds that shard parameters own them: value must be NULL. Values of the host's own are
 * copied to and from flat memory in ZERO1 and SHARD_GRAD_OP.
 *
 * With a mesh the kind does its work along the data axis, on this rank's part of each parameter
 * (dtrain_param.cut), and averages are over that axis alone. All ranks of the mesh agree on
 * errors, norms and steps to be left out. Ranks of one tensor axis run the same program on the
 * same samples. Under sequence parallelism gradients of what is not cut are those of this rank's
 * rows, and are summed over the tensor axis first. Values of the host's own are rank 0's of each
 * axis. */
DTRAIN_API dtrain_result dtrain_strategy_create(dtrain_world *world, dtrain_param *params,
                                                size_t param_count,
                                                const dtrain_strategy_desc *desc,
                                                dtrain_strategy **out);
/* Free a strategy and the memory that the library owns; the params' pointers to it become NULL.
 * Local. In the middle of a backward the communicator fails, so that no other rank waits. */
DTRAIN_API void dtrain_strategy_destroy(dtrain_strategy *strategy);

typedef enum dtrain_pass { DTRAIN_PASS_FORWARD = 0, DTRAIN_PASS_BACKWARD = 1 } dtrain_pass;

/* Gather a unit's parameters before its forward or backward: they are whole until release; and in
 * backward give its gradients, those between this call and the gather of another unit, a place.
 * Collective where parameters or gradients are sharded: ranks gather the same units in forward; in
 * backward each may step over units, and a unit may be gathered again while no other one was. A
 * unit that is not due (forward begins with the first and goes to the next, backward to an earlier
 * one) is an error that names the one that is.
 *
 * Forward inside a backward makes activations again: of one or two units whose backward comes next,
 * or of more when the last of them has been gathered for backward before and not yet released. All
 * ranks make the same forwards, also one that has no gradients there; a rank that has stepped over
 * all units so far gathers one for backward before a forward of the first unit, which would begin
 * another pass. */
DTRAIN_API dtrain_result dtrain_strategy_gather(dtrain_strategy *strategy, uint32_t unit,
                                                dtrain_pass pass);
/* Release a unit's parameters after its forward or backward, if they are gathered. Local. */
DTRAIN_API dtrain_result dtrain_strategy_release(dtrain_strategy *strategy, uint32_t unit);

/* Mark params[index]'s gradient final for this backward; communication of its bucket may start.
 * Every trainable entry is marked once per backward, an alias and its target each. Marking one
 * twice between two finishes, or where gradients are sharded outside its unit's backward, is an
 * error that names it. Never blocks for other ranks. */
DTRAIN_API dtrain_result dtrain_strategy_ready(dtrain_strategy *strategy, size_t index);

/* End a backward: handle parameters that were not marked, wait for all buckets. After a step's last
 * backward the gradients, or this rank's shards of them, hold the mean over all samples of the step
 * (dtrain_strategy_weight), and buffers (DTRAIN_PARAM_BUFFER) the mean over the ranks.
 * DTRAIN_MISSING_GRADIENT_ERROR costs one small all-reduce, so that all ranks fail together; the
 * next step may go on. */
DTRAIN_API dtrain_result dtrain_strategy_finish(dtrain_strategy *strategy);

/* Say whether further micro-batches of this step follow the next backward: true before every
 * micro-batch but the last, false before the last (and where there is only one). While true, finish
 * leaves the step open and gradients add up, here or in shards as desc.accumulation says (a host's
 * own backward must add where param->state.grad_written, the tape does it by itself). Changing it
 * in the middle of a backward is an error. */
DTRAIN_API dtrain_result dtrain_strategy_accumulate(dtrain_strategy *strategy, bool more);

/* Set the weight of the backward under way, or of the next one; it is 1 if this is not called. The
 * backward's gradients are the sum over its samples divided by a unit, which is the same on every
 * rank and in every micro-batch; its weight is the number of its samples divided by that unit. With
 * `rows` targets of which `valid` count: (sum over valid) / rows, and valid / rows. The step's last
 * finish makes the mean over all samples of the step. If all weights are 0, no parameter changes.
 * Ranks that hold parts of one model have the same samples, and give the same weight.
 *
 * dtrain_tape_backward sets it for losses of the tape that are means: it counts the targets of
 * cross-entropy that are not ignored, and the elements of other losses (of several, see
 * dtrain_add); a sum, or a loss of the program's own, leaves the weight as it is. Local. */
DTRAIN_API dtrain_result dtrain_strategy_weight(dtrain_strategy *strategy, float weight);

/* Take part in the others' micro-batch without a batch, on a rank whose data has ended before
 * theirs: in place of forward, backward and finish, with a weight of 0 (torch calls this Join). The
 * mean is over the ranks that have data. *over becomes true, on all ranks, when a step ends in
 * which none had any. Collective; everything else of a step stays, accumulate, clipping, update:
 *
 *     while (!over) {
 *         if (has_batch(data)) train(data);   // forward, backward, dtrain_strategy_finish
 *         else dtrain_strategy_join(strategy, &over);
 *         dtrain_optimizer_step(optimizer, lr, 1);
 *     }
 *
 * Gathers each unit once, in forward and in backward: a backward of the program's own that gathers
 * units for forward again has no rank that joins. Where a batch normalisation is over several
 * ranks, either all of them join or none (DTRAIN_ERROR_MISMATCH). Buffers of a rank that joins
 * count in their mean. */
DTRAIN_API dtrain_result dtrain_strategy_join(dtrain_strategy *strategy, bool *over);

/* A flat slice of a parameter that this rank's optimizer updates, in fp32 unless its dtype is F64;
 * at most one a parameter. Under DDP every trainable parameter is one, whole. After updating them
 * (all ranks, or none) call publish. */
typedef struct dtrain_shard {
    const dtrain_param *param;
    int64_t offset; /* first element within the parameter; of one that a tensor axis cuts, within
                       this rank's part of it */
    int64_t count;
    float *value;
    const float *grad;
    void *typed_value; /* doubles in place of the two above, where dtype is F64 */
    const void *typed_grad;
} dtrain_shard;

/* List what the optimizer updates on this rank, between finish and publish. Local. The list is
 * valid until the strategy is destroyed. An error in the middle of a backward and between the
 * micro-batches of a step, when gradients are not yet the mean; so are publish, an optimizer's step
 * and the norm of gradients. */
DTRAIN_API dtrain_result dtrain_strategy_shards(dtrain_strategy *strategy,
                                                const dtrain_shard **shards, size_t *count);

/* Bring updated shards to where the next forward reads them. Collective. */
DTRAIN_API dtrain_result dtrain_strategy_publish(dtrain_strategy *strategy);
