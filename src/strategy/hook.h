/* Communication hooks: how the gradients of a bucket travel, in a way of one's own
 *
 * A hook is a constant dtrain_comm_hook_desc, given in dtrain_compression_desc.hook. PyTorch's DDP
 * has hooks too. The built-in one, top-k (topk.c), is made of the same; examples/sign_sgd.c and
 * examples/power_sgd.c are complete programs. A hook has one or two rounds; the library calls
 *
 *     plan         when memory is laid out, on every rank, also for forecasts, which have no memory
 *     compress     when the gradients of the bucket are final; and at once
 *     exchange     to start one collective
 *     decompress   when that is done; then compress of the second round
 *
 * in steps from dense_steps on; before, buckets are all-reduced. Buckets are on their way together,
 * in the same order on all ranks: what compress leaves for decompress is in the bucket's memory.
 *
 * All addresses are device memory, for loops in C or kernels as in tape/op.h. */

#pragma once

#include "core/api.h"
#include "core/dtype.h"
#include "core/result.h"
#include "comm/comm.h"
#include "strategy/compression.h"
#include "strategy/params.h"
#include "device/device.h"

#define DTRAIN_HOOK_ROUNDS 2

/* A parameter in a bucket; with takes_slices it may be a part of one. */
typedef struct dtrain_hook_tensor {
    const dtrain_param
        *param;            /* its shape is that of the whole, also where a tensor axis cuts it */
    int64_t offset, count; /* first element in this rank's part of the parameter, elements */
    bool dense;            /* set in plan: it travels whole, and the hook does not see it again; so
                            do 1-D tensors and those below dense_below, which are marked before */
    bool keeps_residual;   /* set in plan: what there is from step to step. Checkpoints hold it */
    bool keeps_velocity;
    float *grad;     /* (count) compress finds this rank's, or the sum of its node's; after the last
                        decompress it is the mean over all ranks */
    float *residual; /* (count) or NULL: this rank's own, zero at first */
    float *velocity; /* (count) or NULL: the same */
} dtrain_hook_tensor;

typedef struct dtrain_hook_bucket {
    dtrain_device *device;
    dtrain_comm *comm; /* the ranks that exchange the bucket; the second round has one of its own */
    int ranks, rank;   /* size of comm, and this rank there */
    dtrain_dtype dtype; /* reduce_dtype, for what is sent */
    uint64_t step;      /* steps since compression began */
    float factor;       /* of this rank's gradient, or of its node's, in the mean over all ranks */
    dtrain_hook_tensor *tensors; /* (tensor_count) without dense ones, but for plan */
    size_t tensor_count;
    float *grads; /* (count) the gradients of all tensors, dense ones too, and padding */
    int64_t count;
    int64_t scratch_count; /* set in plan */
    float *scratch; /* (scratch_count) for the hook: zero at first, and kept from step to step.
                              Checkpoints do not hold it: what a resumed run must have of it lies
                              in an array of the program, which its dtrain_state lists */
} dtrain_hook_bucket;

/* `how` is the resolved desc that was given to the strategy; for a hook of one's own
 * how->hook->user is what the program wants it to be. */
struct dtrain_comm_hook_desc {
    const char *name;  /* in errors and traces, which show 37 bytes; the same on all ranks */
    uint32_t rounds;   /* 1 or 2 */
    bool takes_slices; /* works on parts of parameters, as hierarchical cuts them; false: refused */
    bool takes_low;    /* rounds what it sends to `dtype`; false: a reduce_dtype is refused */
    /* Mark tensors as dense, ask for memory of the others. May depend on its arguments alone. */
    void (*plan)(const dtrain_compression_desc *how, dtrain_hook_bucket *bucket);
    /* An error of these ends the strategy, on all ranks when they miss this one's collective. */
    dtrain_result (*compress)(const dtrain_compression_desc *how, dtrain_hook_bucket *bucket,
                              uint32_t round);
    /* Start a collective on bucket->comm that all ranks start, and hand out its *work; or none.
     * What a step sends is counted by calls of exchange alone, without memory: it reads none. */
    dtrain_result (*exchange)(const dtrain_compression_desc *how, const dtrain_hook_bucket *bucket,
                              uint32_t round, dtrain_work **work);
    dtrain_result (*decompress)(const dtrain_compression_desc *how, dtrain_hook_bucket *bucket,
                                uint32_t round);
    void *user;
};
