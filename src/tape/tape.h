/* Tape and tensors
 *
 * The tape is eager reverse-mode differentiation. A model is a C function that calls operations
 * (tape/ops.h): each runs at once and is recorded, and dtrain_tape_backward walks the record in
 * reverse. One pass looks like this:
 *
 *     dtrain_tape_begin(tape, 0, seed);
 *     x = dtrain_tape_input(tape, DTRAIN_DTYPE_F32, 2, shape, batch, false);
 *     dtrain_tape_unit(tape, 0);
 *     x = dtrain_linear(tape, x, &weight, &bias, DTRAIN_ACTIVATION_GELU);
 *     loss = dtrain_mean(tape, x);
 *     result = dtrain_tape_backward(tape, loss, 1);
 *
 * Tensors belong to the tape and live until the next dtrain_tape_begin. Their memory comes from
 * arenas that are rewound there: from the second step on nothing is allocated, and every address
 * repeats.
 *
 * The first error of a pass sticks: operations then return NULL, accept NULL and do nothing, and
 * dtrain_tape_backward and dtrain_tensor_read return the error until the next dtrain_tape_begin.
 * Model code needs no checks. Nothing here is collective but what the strategy does at units and at
 * `ready` and, over a tensor axis (parallel/mesh.h), operations that put parts together: its ranks
 * run the same program. */

#pragma once

#include "core/api.h"
#include "core/dtype.h"
#include "core/result.h"
#include "world/world.h"
#include "strategy/strategy.h"
#include "device/device.h"

typedef struct dtrain_tape dtrain_tape;

/* How a tensor lies over the tensor axis of a mesh. Operations carry it on. */
typedef enum dtrain_placement {
    DTRAIN_PLACEMENT_WHOLE = 0,   /* every rank has all of it, with the same values */
    DTRAIN_PLACEMENT_COLUMNS = 1, /* a rank has some elements of the last axis, of all rows */
    DTRAIN_PLACEMENT_ROWS = 2     /* a rank has some of the rows, all axes but the last one taken as
                                     one: rank r of t has rows n r / t to n (r + 1) / t */
} dtrain_placement;

typedef struct dtrain_tensor {
    uint32_t dtype; /* dtrain_dtype: F32, BF16 or F16 (autocast, dtrain_cast), or I32 for tokens */
    uint32_t ndim;
    uint32_t placement; /* dtrain_placement; shape, count and data are of this rank's part */
    int64_t shape[4];
    int64_t count;
    void *data; /* device memory; activation checkpointing may move it */
    void *grad; /* of data's dtype; inside backward only, and afterwards of requires_grad inputs */
    /* What a loss is the mean of: of cross-entropy the targets that are not ignored, of dtrain_mean
     * and the losses made of it the elements, also after operations on that one element; 1 of
     * anything else. Losses of several passes or ranks have the mean
     * sum(loss * samples) / sum(samples). */
    double samples;

    /* Private to the tape. */
    struct dtrain_node *producer; /* NULL for inputs */
    uint32_t pending_uses;
    bool needs_grad;
} dtrain_tensor;

/* ---- A pass -----------------------------------------------------------------------------------*/

/* Flags of dtrain_tape_begin. */
#define DTRAIN_TAPE_NO_GRAD 1u /* inference: nothing is kept for backward, dropout is off */
/* Autocast to bf16: linear layers, convolutions and attention read and write bf16 and add up in
 * fp32; pooling keeps the type of its input; norms, losses and the sums of residual connections
 * stay fp32, as in torch.autocast. Parameters and their gradients are fp32; a weight is rounded
 * once per pass, and one that a strategy gathers each time its unit is there: copies take one
 * unit's memory. */
#define DTRAIN_TAPE_BF16 2u
/* Autocast to fp16, whose narrow range asks for loss scaling (optim/scaler.h). */
#define DTRAIN_TAPE_F16 4u

/* Create a tape that hands gradients to a strategy. With strategy NULL they go where the params
 * point: the first backward overwrites them, later ones add until the host clears grad_written, and
 * nothing is communicated. device NULL is the world's; with a device, world may be NULL. A tape on
 * the plan device counts bytes and computes nothing. */
DTRAIN_API dtrain_result dtrain_tape_create(dtrain_world *world, dtrain_strategy *strategy,
                                            dtrain_device *device, dtrain_tape **out);
/* Free a tape, its tensors and its memory; NULL is allowed. */
DTRAIN_API void dtrain_tape_destroy(dtrain_tape *tape);

/* Start a forward pass; the tensors of the last one are gone. Dropout draws its random numbers from
 * seed: give a different one for every micro-batch and rank. */
DTRAIN_API dtrain_result dtrain_tape_begin(dtrain_tape *tape, uint32_t flags, uint64_t seed);

/* Make an input, a copy of host data (count elements, F32 or I32) on the device. The gradient of a
 * requires_grad input can be read after backward: for tests, and for layers that the host computes
 * itself. */
DTRAIN_API dtrain_tensor *dtrain_tape_input(dtrain_tape *tape, dtrain_dtype dtype, uint32_t ndim,
                                            const int64_t *shape, const void *host,
                                            bool requires_grad);

/* Mark the beginning of unit `unit`; it ends at the next mark. Forward gathers a unit and releases
 * the one before, backward does so in reverse order; the last unit stays gathered between the two.
 */
DTRAIN_API void dtrain_tape_unit(dtrain_tape *tape, uint32_t unit);

/* Run backward from loss, which must have one element and whose gradient starts as `scale`: 1 /
 * (micro-batches per step), times the loss scale if there is one. dtrain_strategy_ready is called
 * as each parameter's gradient becomes final; dtrain_strategy_finish is left to the caller. Once
 * per begin; no operation may follow it.
 *
 * Where a strategy has several ranks or micro-batches, gradients are made ready for one mean over
 * all samples of the step: dtrain_strategy_weight. The first backward of a strategy agrees on the
 * size of a full batch, of weight 1, by a small all-reduce. */
DTRAIN_API dtrain_result dtrain_tape_backward(dtrain_tape *tape, dtrain_tensor *loss, float scale);

/* Copy a tensor's values to host memory (count floats) as fp32, and after backward the gradient of
 * a requires_grad input; either address may be NULL. Waits for the device. */
DTRAIN_API dtrain_result dtrain_tensor_read(dtrain_tape *tape, const dtrain_tensor *tensor,
                                            float *values, float *grad);

/* ---- Activation checkpointing -----------------------------------------------------------------*/

/* Classes of operations whose results can be dropped. sum, mean and cross_entropy make a few
 * numbers, which are always kept. */
#define DTRAIN_RECOMPUTE_LINEAR 1u /* matmul and convolutions as well */
#define DTRAIN_RECOMPUTE_ATTENTION 2u
#define DTRAIN_RECOMPUTE_LAYERNORM 4u   /* and the root mean square norm */
#define DTRAIN_RECOMPUTE_ELEMENTWISE 8u /* all others: add, dropout, embedding, rotary, ... */
#define DTRAIN_RECOMPUTE_ALL 15u

/* Drop activations in forward and make them again in backward (Chen et al., "Training Deep Nets
 * with Sublinear Memory Cost", 2016). In every n-th unit, counted in the order of their marks, the
 * results of the operations in `ops` (0 = ALL) are dropped; when backward comes to that unit the
 * same kernels make them again from the same numbers, so losses and gradients keep their bits.
 * every 1 = all units, 0 = off. Takes effect at the next dtrain_tape_unit.
 *
 * A tensor that a later unit uses is kept. It must be used in time: the dropped results of a unit
 * are there until the next but one of such units begins, and using or reading them later is an
 * error. The same holds in a pass without gradients, which drops as much and makes nothing again.
 */
DTRAIN_API dtrain_result dtrain_tape_recompute(dtrain_tape *tape, uint32_t every, uint32_t ops);

typedef struct dtrain_tape_info {
    size_t node_count, tensor_count; /* of this pass */
    size_t recomputed_count;         /* operations whose forward the last backward ran again */
    uint64_t activation_bytes;  /* arenas, and what checkpointing drops into; largest pass so far */
    uint64_t gradient_bytes;    /* pool of activation gradients */
    uint64_t block_allocations; /* device allocations so far: constant in the steady state */
    double flops; /* floating-point operations that it has launched so far, in matrix products,
                     attention and convolutions; not those of operations of a program's own. A
                     multiplication and an addition are two, and what is computed again counts
                     again. Keys that a mask or key_lengths hide count, and taps outside of an
                     image; keys behind the query of causal attention do not */
    dtrain_result error; /* that sticks to this pass; dtrain_last_error then has its sentence */
} dtrain_tape_info;
/* Count the operations and the memory of a tape; all zero for a tape of NULL. */
DTRAIN_API void dtrain_tape_query(const dtrain_tape *tape, dtrain_tape_info *info);
