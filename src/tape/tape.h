/* Tape and tensors
 *
 * The tape is eager reverse-mode differentiation. A model is a C function that calls operations
 * (tape/ops.h): each operation runs at once and is recorded, and dtrain_tape_backward walks the
 * record in reverse. One pass:
 *
 *     dtrain_tape_begin(tape, 0, seed);
 *     x = dtrain_tape_input(tape, DTRAIN_DTYPE_F32, 2, shape, batch, false);
 *     dtrain_tape_unit(tape, 0);
 *     x = dtrain_linear(tape, x, &weight, &bias, DTRAIN_ACTIVATION_GELU);
 *     loss = dtrain_mean(tape, x);
 *     result = dtrain_tape_backward(tape, loss, 1);
 *
 * Tensors belong to the tape and live until the next dtrain_tape_begin, which rewinds the arenas:
 * from the second step on nothing is allocated, and every address repeats.
 *
 * The first error of a pass sticks: until the next dtrain_tape_begin, operations return NULL,
 * accept NULL and do nothing, and dtrain_tape_backward and dtrain_tensor_read return the error.
 * Model code needs no checks. The strategy's calls at units and at `ready` are collective, as are
 * operations that combine parts over a tensor axis (parallel/mesh.h). */

#pragma once

#include "core/api.h"
#include "core/dtype.h"
#include "core/result.h"
#include "world/world.h"
#include "strategy/strategy.h"
#include "device/device.h"

typedef struct dtrain_tape dtrain_tape;

/* How the tensor axis of a mesh divides a tensor. Operations pass it on. */
typedef enum dtrain_placement {
    DTRAIN_PLACEMENT_WHOLE = 0,   /* the whole tensor on every rank, with the same values */
    DTRAIN_PLACEMENT_COLUMNS = 1, /* some elements of the last axis, of all rows */
    DTRAIN_PLACEMENT_ROWS = 2     /* rows n r / t to n (r + 1) / t on rank r of t; all axes but the
                                     last count as rows */
} dtrain_placement;

typedef struct dtrain_tensor {
    uint32_t dtype; /* dtrain_dtype: F32, BF16 or F16 (autocast, dtrain_cast), or I32 for tokens */
    uint32_t ndim;
    uint32_t placement; /* dtrain_placement; shape, count and data describe this rank's part */
    int64_t shape[4];
    int64_t count;
    void *data; /* device memory; activation checkpointing may move it */
    void *grad; /* of data's dtype; only inside backward, and afterwards of requires_grad inputs */
    /* Number of terms that a loss averages: targets that are not ignored (cross-entropy), elements
     * (dtrain_mean and losses made of it); 1 for other tensors. Operations on the loss keep it. The
     * mean over several passes or ranks is sum(loss * samples) / sum(samples). */
    double samples;

    /* Private to the tape. */
    struct dtrain_node *producer; /* NULL for inputs */
    uint32_t pending_uses;
    bool needs_grad;
} dtrain_tensor;

/* ---- A pass -----------------------------------------------------------------------------------*/

/* Flags of dtrain_tape_begin. */
#define DTRAIN_TAPE_NO_GRAD 1u /* inference: nothing is kept for backward, dropout is off */
/* Autocast to bf16: linear layers, convolutions and attention read and write bf16 and add in fp32;
 * pooling keeps the type of its input; norms, losses and sums of residual connections stay fp32, as
 * in torch.autocast. Parameters and their gradients are fp32. A weight is rounded once per pass; a
 * gathered weight is rounded at each gather, so copies take one unit's memory. */
#define DTRAIN_TAPE_BF16 2u
/* Autocast to fp16, whose narrow range needs loss scaling (optim/scaler.h). */
#define DTRAIN_TAPE_F16 4u

/* Create a tape that gives gradients to a strategy. With strategy NULL they go where the params
 * point, and nothing is communicated: the first backward overwrites them, later ones add until the
 * host clears grad_written. device NULL is the world's; with a device, world can be NULL. A tape on
 * the plan device counts bytes and computes nothing. */
DTRAIN_API dtrain_result dtrain_tape_create(dtrain_world *world, dtrain_strategy *strategy,
                                            dtrain_device *device, dtrain_tape **out);
/* Free a tape, its tensors and its memory; NULL is allowed. */
DTRAIN_API void dtrain_tape_destroy(dtrain_tape *tape);

/* Start a forward pass and discard the tensors of the last one. Dropout draws its random numbers
 * from seed: give each micro-batch and rank a different seed. */
DTRAIN_API dtrain_result dtrain_tape_begin(dtrain_tape *tape, uint32_t flags, uint64_t seed);

/* Copy host data (count elements, F32 or I32) to a new input on the device. The gradient of a
 * requires_grad input can be read after backward: for tests, or layers that the host computes. */
DTRAIN_API dtrain_tensor *dtrain_tape_input(dtrain_tape *tape, dtrain_dtype dtype, uint32_t ndim,
                                            const int64_t *shape, const void *host,
                                            bool requires_grad);

/* Begin unit `unit`, which ends at the next call. Forward gathers a unit and releases the previous
 * one, backward does so in reverse order; the last unit stays gathered between them. */
DTRAIN_API void dtrain_tape_unit(dtrain_tape *tape, uint32_t unit);

/* Run backward from a loss of one element, whose gradient starts as `scale`: 1 / (micro-batches per
 * step), times the loss scale if there is one. Calls dtrain_strategy_ready for each parameter whose
 * gradient is final; the caller calls dtrain_strategy_finish. Runs once per begin, and no operation
 * follows it.
 *
 * With several ranks or micro-batches, gradients become the mean over all samples of the step:
 * dtrain_strategy_weight. The first backward of a strategy agrees on the size of a full batch, of
 * weight 1, by a small all-reduce. */
DTRAIN_API dtrain_result dtrain_tape_backward(dtrain_tape *tape, dtrain_tensor *loss, float scale);

/* Copy a tensor's values to host memory (count floats) as fp32 and, after backward, the gradient of
 * a requires_grad input; either address can be NULL. Waits for the device. */
DTRAIN_API dtrain_result dtrain_tensor_read(dtrain_tape *tape, const dtrain_tensor *tensor,
                                            float *values, float *grad);

/* ---- Activation checkpointing -----------------------------------------------------------------*/

/* Classes of operations whose results can be dropped. The few numbers of sum, mean and
 * cross_entropy are always kept. */
#define DTRAIN_RECOMPUTE_LINEAR 1u /* matmul and convolutions too */
#define DTRAIN_RECOMPUTE_ATTENTION 2u
#define DTRAIN_RECOMPUTE_LAYERNORM 4u   /* and the root mean square norm */
#define DTRAIN_RECOMPUTE_ELEMENTWISE 8u /* all others: add, dropout, embedding, rotary, ... */
#define DTRAIN_RECOMPUTE_ALL 15u

/* Drop activations in forward and recompute them in backward (Chen et al., "Training Deep Nets with
 * Sublinear Memory Cost", 2016). Every n-th unit, in the order of marks, drops the results of the
 * operations in `ops` (0 = ALL); backward runs the same kernels on the same numbers, so losses and
 * gradients keep their bits. every 1 = all units, 0 = off. Takes effect at the next
 * dtrain_tape_unit.
 *
 * A tensor that a later unit uses is kept. The use must come before the second next such unit
 * begins, which overwrites the dropped results; a later use or read is an error, also in a pass
 * without gradients. */
DTRAIN_API dtrain_result dtrain_tape_recompute(dtrain_tape *tape, uint32_t every, uint32_t ops);

typedef struct dtrain_tape_info {
    size_t node_count, tensor_count; /* of this pass */
    size_t recomputed_count;         /* operations whose forward the last backward ran again */
    uint64_t activation_bytes;  /* arenas and regions of dropped results, of the largest pass */
    uint64_t gradient_bytes;    /* pool of activation gradients */
    uint64_t block_allocations; /* device allocations so far: constant in the steady state */
    double flops; /* launched so far in matrix products, attention and convolutions, without the
                     program's own operations. A multiply-add is two; recomputation counts. Keys
                     hidden by a mask or key_lengths and taps outside an image count, keys hidden
                     by causal attention do not */
    dtrain_result error; /* of this pass; dtrain_last_error then has its sentence */
} dtrain_tape_info;
/* Count the operations and the memory of a tape; all zero for NULL. */
DTRAIN_API void dtrain_tape_query(const dtrain_tape *tape, dtrain_tape_info *info);
