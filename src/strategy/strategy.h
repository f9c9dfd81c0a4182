/* Strategies
 *
 * A strategy decides where parameters, gradients and optimizer state are kept across the ranks, and
 * moves them. One field selects the kind; the training loop is the same for all kinds:
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
 * "PyTorch FSDP", VLDB 2023.) ZERO3 gives whole tensors to the ranks, about as many elements to
 * each, for optimizers that need whole matrices.
 *
 * Hooks, called by the tape or by a program with a separate backward:
 *
 *     gather(unit, pass)   before a unit's forward, and before its backward: its parameters become
 *                          whole, and in backward its gradients get memory
 *     release(unit)        after the unit's forward, and after its backward
 *     ready(param)         when a gradient is final for this backward
 *     finish()             at the end of a backward: gradients, or this rank's shards of them,
 *                          become the mean
 *     publish()            after the update of this rank's shards; dtrain_optimizer_step calls it
 *
 * Forward gathers units in the order of the array, backward in the reverse order. The next unit is
 * fetched at the same time. Kinds that keep parameters and gradients whole (DDP, ZERO1) need no
 * gather and no release. In SHARD_GRAD_OP and the kinds below it, param->grad is memory for the
 * backward of one unit, and only shards() shows reduced gradients. In FULL_SHARD and the kinds
 * below it, param->value is NULL outside gather and release.
 *
 * Ranks can differ in the gradients that they have and their order of ready, in the units that
 * backward visits, and in who owns the memory of gradients.
 *
 * A tensor that several units use (tied weights) is registered once, and has an alias in each
 * other unit. It stays whole from its first gather in a step to the update. */

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
    /* zeros on this rank. If no rank has the gradient in the whole step, optimizers change neither
     * the parameter nor its moments and step count, as torch does without a .grad */
    DTRAIN_MISSING_GRADIENT_SKIP = 0,
    DTRAIN_MISSING_GRADIENT_ERROR = 1, /* finish fails and names the parameter */
    /* zeros: old moments and weight decay still change the parameter, unless it is frozen */
    DTRAIN_MISSING_GRADIENT_ZERO = 2
} dtrain_missing_gradient;

/* When a step with several micro-batches reduces sharded gradients. Whole ones: in the last. */
typedef enum dtrain_accumulation {
    /* SHARD_EVERY for HYBRID_SHARD, EVERY for other kinds with sharded gradients, else LAST */
    DTRAIN_ACCUMULATION_DEFAULT = 0,
    /* in the last backward: least communication, but every rank holds whole gradients */
    DTRAIN_ACCUMULATION_LAST = 1,
    /* in every backward: sharded gradients stay sharded. DDP and ZERO1 refuse it, because it would
     * cost time and save no memory */
    DTRAIN_ACCUMULATION_EVERY = 2,
    /* HYBRID_SHARD: inside nodes in every backward, across nodes in the last */
    DTRAIN_ACCUMULATION_SHARD_EVERY = 3
} dtrain_accumulation;

struct dtrain_compression_desc; /* strategy/compression.h */

#define DTRAIN_OPTIMIZER_STATES_NONE UINT32_MAX /* for optimizer_states: SGD without momentum */

/* Zero means default: a zeroed desc is plain DDP. */
typedef struct dtrain_strategy_desc {
    uint32_t kind;             /* dtrain_strategy_kind; 0 = DDP */
    uint32_t missing_gradient; /* dtrain_missing_gradient; 0 = SKIP, with one warning */
    uint32_t accumulation;     /* dtrain_accumulation; 0 = the default of the kind */
    uint32_t param_dtype;      /* F32 (0), BF16 or F16: dtype in which kinds that shard parameters
                                   gather them; shards stay fp32 */
    uint32_t reduce_dtype;     /* F32 (0), BF16 or F16: dtype of sent gradients; sums are fp32 */
    uint32_t offload;          /* DTRAIN_OFFLOAD_*, see strategy/memory.h; 0 = nothing */
    uint32_t node_size;        /* ranks per node, for HYBRID_SHARD and hierarchical; 0 = ranks per
                                   host */
    bool no_overlap;           /* true: communicate only in finish and gather; the bits are equal */
    bool keep_after_forward;   /* true: units of kinds that shard parameters stay gathered from
                                   their first gather to the update: more memory, one gather less.
                                   false: release also frees a unit between forward and backward */
    bool hierarchical;         /* true: reduce and gather node by node, see strategy/compression.h;
                                   not for ZERO3, nor for HYBRID_SHARD, which always does it */
    size_t bucket_bytes;       /* bytes of a bucket; 0 = 25 MiB, and 1 MiB for the first bucket. If
                                  gradients are sharded, a bucket is a unit */
    uint64_t memory_limit;     /* AUTO: limit of a rank in bytes; 0 = the rest of the launch's
                                   memory_limit, or without one 15/16 of free memory */
    uint64_t other_bytes;      /* AUTO: bytes of a rank besides strategy and optimizer: activations
                                   (dtrain_trainer_plan), the process */
    uint32_t optimizer_states; /* AUTO and planning: fp32 tensors of optimizer state per parameter;
                                   0 = AdamW's 2, or DTRAIN_OPTIMIZER_STATES_NONE */
    const uint32_t *group_states; /* (group_count) optimizer_states of parameters in the optimizer's
                                     groups 1, 2, ...; other groups have optimizer_states. Read in
                                     create */
    uint32_t group_count;
    uint64_t init_seed; /* for parameters that the library initialises */
    dtrain_comm *comm;  /* NULL = all ranks of the world, or of the mesh */
    /* The axes of the ranks; must exist until the strategy is destroyed. NULL = all ranks of comm
     * are the data axis. */
    const dtrain_mesh *mesh;
    const dtrain_pipeline_desc *pipeline; /* the units of each pipeline stage; NULL = one stage per
                                             rank, evenly. Read in create */
    const struct dtrain_compression_desc *compression; /* NULL = none; DDP only; read in create */
} dtrain_strategy_desc;

/* Make a strategy. Collective. It compares what all ranks have registered: names, shapes, cuts,
 * units, flags, initialisation and the desc (no_overlap only if parameters are sharded). If ranks
 * differ, DTRAIN_ERROR_MISMATCH names field, values and rank. It allocates arrays that are NULL,
 * initialises values or broadcasts rank 0's, and plans the buckets. An error on one rank is an
 * error on all. desc NULL = a zeroed one.
 *
 * Elements that the library initialises depend only on seed and place in the model. So every kind
 * and world size starts from the same bits, and no rank ever holds the whole of a sharded model.
 * Kinds that shard parameters own them: value must be NULL. ZERO1 and SHARD_GRAD_OP copy the host's
 * values to and from flat memory.
 *
 * With a mesh the kind works along the data axis, on this rank's part of each parameter
 * (dtrain_param.cut), and averages over this axis only. All ranks of the mesh agree on errors,
 * norms and skipped steps. Ranks of one tensor axis run the same program on the same samples. Under
 * sequence parallelism, the gradient of a parameter without a cut covers this rank's rows, and is
 * first summed over the tensor axis. The host's values come from rank 0 of the data axis and, for
 * parameters without a cut, of the tensor axis. */
DTRAIN_API dtrain_result dtrain_strategy_create(dtrain_world *world, dtrain_param *params,
                                                size_t param_count,
                                                const dtrain_strategy_desc *desc,
                                                dtrain_strategy **out);
/* Free a strategy and the library's memory; pointers of params to it become NULL. Local. In the
 * middle of a backward it fails the communicators, so that no other rank waits. */
DTRAIN_API void dtrain_strategy_destroy(dtrain_strategy *strategy);

typedef enum dtrain_pass { DTRAIN_PASS_FORWARD = 0, DTRAIN_PASS_BACKWARD = 1 } dtrain_pass;

/* Gather a unit's parameters before its forward or backward: they are whole until release. In
 * backward it also gives memory to the unit's gradients, until another unit is gathered. Collective
 * if parameters or gradients are sharded: ranks gather the same units in forward. In backward each
 * rank can step over units, and can gather a unit again if it has gathered no other one since.
 * Forward begins with the first unit and continues with the next; backward goes to earlier units. A
 * gather of a unit that is not due is an error.
 *
 * A forward inside a backward recomputes activations, of the one or two units whose backward comes
 * next. It can cover more if the last of them is gathered for backward and not released. All ranks
 * make the same forwards, even without gradients in these units. A forward of the first unit begins
 * another pass on a rank whose backward has stepped over all units: this rank first gathers one for
 * backward. */
DTRAIN_API dtrain_result dtrain_strategy_gather(dtrain_strategy *strategy, uint32_t unit,
                                                dtrain_pass pass);
/* Release a unit's parameters after its forward or backward, if they are gathered. Local. */
DTRAIN_API dtrain_result dtrain_strategy_release(dtrain_strategy *strategy, uint32_t unit);

/* Mark params[index]'s gradient final for this backward: communication of its bucket can start.
 * Mark every trainable entry once per backward, an alias and its target each. Marking one twice
 * between two finishes or, if gradients are sharded, outside its unit's backward is an error that
 * names it. Never blocks for other ranks. */
DTRAIN_API dtrain_result dtrain_strategy_ready(dtrain_strategy *strategy, size_t index);

/* End a backward: handle parameters that were not marked, and wait for all buckets. After a step's
 * last backward the gradients, or this rank's shards of them, are the mean over all samples of the
 * step (dtrain_strategy_weight), and buffers (DTRAIN_PARAM_BUFFER) the mean over the ranks.
 * DTRAIN_MISSING_GRADIENT_ERROR adds a small all-reduce, so that all ranks fail together; the
 * program can continue with the next step. */
DTRAIN_API dtrain_result dtrain_strategy_finish(dtrain_strategy *strategy);

/* Tell whether this step has further micro-batches after the next backward: true before every
 * micro-batch but the last, and false before the last or only one. While true, finish leaves the
 * step open and gradients add up, whole or in shards as desc.accumulation says. The tape adds by
 * itself; another backward must add if param->state.grad_written. Changing it in the middle of a
 * backward is an error. */
DTRAIN_API dtrain_result dtrain_strategy_accumulate(dtrain_strategy *strategy, bool more);

/* Set the weight of the backward in progress, or of the next one; the default is 1. Gradients of a
 * backward are the sum over its samples divided by a full batch, a number that is the same on every
 * rank and in every micro-batch. The weight is its number of samples divided by a full batch. With
 * `rows` targets of which `valid` count: (sum over valid) / rows, and valid / rows. The step's last
 * finish makes the mean over all samples of the step. If all weights are 0, no parameter changes.
 * Ranks that hold parts of one model have the same samples, and must set the same weight.
 *
 * dtrain_tape_backward sets it for losses of the tape that are means: it counts the targets of
 * cross-entropy that are not ignored, and the elements of other losses (for several, see
 * dtrain_add). A sum, or another loss of the program, does not change the weight. Local. */
DTRAIN_API dtrain_result dtrain_strategy_weight(dtrain_strategy *strategy, float weight);

/* Take part in a micro-batch of the other ranks without a batch, when this rank's data has ended
 * first (torch calls this Join). It replaces forward, backward and finish, with a weight of 0. The
 * mean is over the ranks that have data. *over becomes true on all ranks after a step in which no
 * rank had data. Collective. The rest of a step is unchanged (accumulate, clipping, update):
 *
 *     while (!over) {
 *         if (has_batch(data)) train(data);   // forward, backward, dtrain_strategy_finish
 *         else dtrain_strategy_join(strategy, &over);
 *         dtrain_optimizer_step(optimizer, lr, 1);
 *     }
 *
 * It gathers each unit once in forward and once in backward. So no rank can join if the program's
 * backward gathers units for forward again. If several ranks share a batch normalisation, all must
 * join or none (DTRAIN_ERROR_MISMATCH). Buffers of a rank that joins count in their mean. */
DTRAIN_API dtrain_result dtrain_strategy_join(dtrain_strategy *strategy, bool *over);

/* A flat slice of a parameter that this rank's optimizer updates, at most one per parameter; fp32,
 * or fp64 if dtype is F64. Under DDP every trainable parameter is one whole slice. After the
 * optimizer has updated the slices (all ranks, or none) call publish. */
typedef struct dtrain_shard {
    const dtrain_param *param;
    int64_t offset; /* first element within the parameter; if a tensor axis cuts the parameter,
                       within this rank's part of it */
    int64_t count;
    float *value;
    const float *grad;
    void *typed_value; /* doubles in place of the two above, if dtype is F64 */
    const void *typed_grad;
} dtrain_shard;

/* List the slices that the optimizer updates on this rank, between finish and publish. Local. The
 * list is valid until the strategy is destroyed. An error in the middle of a backward and between
 * micro-batches of a step, because gradients are not yet the mean; likewise publish, an optimizer's
 * step and the norm of gradients. */
DTRAIN_API dtrain_result dtrain_strategy_shards(dtrain_strategy *strategy,
                                                const dtrain_shard **shards, size_t *count);

/* Send updated shards to where the next forward reads them. Collective. */
DTRAIN_API dtrain_result dtrain_strategy_publish(dtrain_strategy *strategy);
