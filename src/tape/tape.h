/* Tape and tensors
 *
 * Eager reverse-mode differentiation. A model is a C function that calls operations (tape/ops.h);
 * each runs at once and leaves a node on the tape. dtrain_tape_backward walks the nodes in reverse.
 * Tensors belong to the tape and live until the next dtrain_tape_begin: their memory comes from an
 * arena that is reset there, so that from the second step on nothing is allocated and every
 * address repeats.
 *
 * Errors stick: after the first, operations return NULL, accept NULL and do nothing, and
 * dtrain_tape_backward (or dtrain_tape_error) returns it, until the next dtrain_tape_begin. Model
 * code needs no checks. */

#pragma once

#include "core/api.h"
#include "core/dtype.h"
#include "core/result.h"
#include "world/world.h"
#include "strategy/strategy.h"
#include "device/device.h"

typedef struct dtrain_tape dtrain_tape;

typedef struct dtrain_tensor {
    uint32_t dtype; /* dtrain_dtype: F32, BF16 or F16 (autocast, dtrain_cast), or I32 for tokens */
    uint32_t ndim;
    int64_t shape[4];
    int64_t count;
    void *data;                   /* device memory; with checkpointing it may move, see there */
    void *grad;                   /* inside backward only; has the dtype of data */
    struct dtrain_node *producer; /* private; NULL for inputs */
    uint32_t pending_uses;        /* private */
    bool needs_grad, grad_written;
} dtrain_tensor;

#define DTRAIN_TAPE_NO_GRAD 1u /* inference: nothing is kept for backward, dropout is off */
/* Autocast: linear layers and attention read and write bf16 and add up in fp32; norms, losses and
 * the sums of residual connections stay fp32, as torch.autocast does. Parameters and their
 * gradients are fp32; a weight is rounded once per pass. */
#define DTRAIN_TAPE_BF16 2u
#define DTRAIN_TAPE_F16 \
    4u /* the same with fp16, whose range asks for loss scaling optim/scaler.h */

/* Operations whose results activation checkpointing drops. The rest of them (sum, mean,
 * cross_entropy) make a few numbers and are always kept. */
#define DTRAIN_CHECKPOINT_LINEAR 1u
#define DTRAIN_CHECKPOINT_ATTENTION 2u
#define DTRAIN_CHECKPOINT_LAYERNORM 4u
#define DTRAIN_CHECKPOINT_ELEMENTWISE 8u /* add, scale, dropout, cast, embedding */
#define DTRAIN_CHECKPOINT_ALL 15u

/* strategy may be NULL: then gradients go where the params point (the first backward overwrites,
 * later ones add until the host clears state.grad_written) and nothing is communicated. device NULL
 * = the world's; with a device world may be NULL; the plan device makes a tape that only counts
 * bytes. */
DTRAIN_API dtrain_result dtrain_tape_create(dtrain_world *world, dtrain_strategy *strategy,
                                            dtrain_device *device, dtrain_tape **out);
DTRAIN_API void dtrain_tape_destroy(dtrain_tape *tape);

/* Starts a forward pass; tensors of the last one are gone. seed makes dropout's random numbers:
 * give another one for every micro-batch and rank. */
DTRAIN_API dtrain_result dtrain_tape_begin(dtrain_tape *tape, uint32_t flags, uint64_t seed);

/* loss must have one element. Its gradient starts as `scale` (1 / micro-batch count for
 * accumulation). Calls dtrain_strategy_ready as each parameter's gradient becomes final; the
 * caller calls dtrain_strategy_finish. Once per begin; no operations after it. */
DTRAIN_API dtrain_result dtrain_tape_backward(dtrain_tape *tape, dtrain_tensor *loss, float scale);

/* The error that sticks to the tape, DTRAIN_OK if none. */
DTRAIN_API dtrain_result dtrain_tape_error(const dtrain_tape *tape);

/* An input: host data (count elements, F32 or I32) is copied into the arena. requires_grad tensors
 * are for tests and host-side layers: their gradient can be read after backward. */
DTRAIN_API dtrain_tensor *dtrain_tape_input(dtrain_tape *tape, dtrain_dtype dtype, uint32_t ndim,
                                            const int64_t *shape, const void *host,
                                            bool requires_grad);
/* Copies a tensor, or the gradient of an input, to host memory (count floats). */
DTRAIN_API dtrain_result dtrain_tensor_read(dtrain_tape *tape, const dtrain_tensor *tensor,
                                            float *host);
DTRAIN_API dtrain_result dtrain_tensor_read_grad(dtrain_tape *tape, const dtrain_tensor *tensor,
                                                 float *host);

/* Everything after this mark belongs to unit `unit` until the next mark: forward gathers it and
 * releases the one before, backward the other way round; the last one stays gathered in between. */
DTRAIN_API void dtrain_tape_unit(dtrain_tape *tape, uint32_t unit);

/* Activation checkpointing (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016):
 * results of the operations in `ops` (0 = ALL) are dropped in every n-th unit, counted in the order
 * of their marks, and made again when backward comes to that unit, by the same kernels from the
 * same numbers: losses and gradients keep their bits. every 1 = all units, 0 = off. From the next
 * dtrain_tape_begin on.
 *
 * What a later unit uses is kept. It has to be used in time: a unit's dropped results are there
 * until the next but one of such units begins; afterwards using or reading them is an error. The
 * same holds in a pass without gradients, which drops as much and makes nothing again. */
DTRAIN_API dtrain_result dtrain_tape_checkpoint(dtrain_tape *tape, uint32_t every, uint32_t ops);

typedef struct dtrain_tape_info {
    size_t node_count, tensor_count;
    size_t recomputed_count;    /* kernel calls that the last backward ran again */
    uint64_t activation_bytes;  /* arena and what checkpointing drops into, largest pass so far */
    uint64_t gradient_bytes;    /* pool of activation gradients */
    uint64_t block_allocations; /* device allocations so far: constant in the steady state */
} dtrain_tape_info;
DTRAIN_API void dtrain_tape_query(const dtrain_tape *tape, dtrain_tape_info *info);
