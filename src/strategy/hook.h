/* Communication hooks: how a program sends the gradients of a bucket in another way
 *
 * A hook is a constant dtrain_comm_hook_desc, given in dtrain_compression_desc.hook. PyTorch's DDP
 * has hooks too. The built-in top-k (topk.c) is such a hook; examples/sign_sgd.c and
 * examples/power_sgd.c are complete programs. A hook has one or two rounds. The library calls
 *
 *     plan         when memory is laid out, on every rank, also in plans, which have no memory
 *     compress     when the gradients of the bucket are final
 *     exchange     directly after it, to start one collective
 *     decompress   when the collective is done; then compress of the second round
 *
 * in steps from dense_steps on; earlier steps all-reduce buckets. Several buckets are under way at
 * once, in the same order on all ranks: compress keeps what decompress needs in the bucket's
 * memory.
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

/* A parameter in a bucket; with takes_slices it can be a part of one. */
typedef struct dtrain_hook_tensor {
    const dtrain_param *param; /* its shape is the whole shape, even if a tensor axis cuts it */
    int64_t offset, count;     /* first element in this rank's part of the parameter, elements */
    bool dense;          /* set in plan: the tensor travels whole, and later calls leave it out.
                              1-D tensors and those below dense_below are already marked */
    bool keeps_residual; /* set in plan: there is a residual, which checkpoints hold */
    bool keeps_velocity; /* the same for a velocity */
    float *grad; /* (count) for compress this rank's gradient, or the sum of its node's; after the
                        last decompress the mean over all ranks */
    float *residual; /* (count) or NULL: of this rank, zero at first */
    float *velocity; /* (count) or NULL: of this rank, zero at first */
} dtrain_hook_tensor;

typedef struct dtrain_hook_bucket {
    dtrain_device *device;
    dtrain_comm *comm;  /* ranks that exchange the bucket; another one in the second round */
    int ranks, rank;    /* size of comm, and this rank in it */
    dtrain_dtype dtype; /* reduce_dtype: type of what is sent */
    uint64_t step;      /* steps since compression began */
    float factor;       /* of this rank's gradient, or of its node's, in the mean over all ranks */
    dtrain_hook_tensor *tensors; /* (tensor_count) without dense tensors, except in plan */
    size_t tensor_count;
    float *grads; /* (count) gradients of all tensors, dense ones and padding included */
    int64_t count;
    int64_t scratch_count; /* set in plan */
    float *scratch; /* (scratch_count) for the hook: zero at first, and kept from step to step.
                       Checkpoints do not hold it: keep what a resumed run needs in an array of the
                       program that its dtrain_state lists */
} dtrain_hook_bucket;

/* `how` is the resolved desc that was given to the strategy; how->hook->user is the program's. */
struct dtrain_comm_hook_desc {
    const char *name;  /* in errors and traces, which show 37 bytes; the same on all ranks */
    uint32_t rounds;   /* 1 or 2 */
    bool takes_slices; /* works on parts of parameters, as hierarchical cuts them; false: refused */
    bool takes_low;    /* rounds what it sends to `dtype`; false: a reduce_dtype is refused */
    /* Mark tensors as dense, and ask for memory. The result depends only on the arguments. */
    void (*plan)(const dtrain_compression_desc *how, dtrain_hook_bucket *bucket);
    /* An error ends the strategy; on other ranks when they miss the collective. */
    dtrain_result (*compress)(const dtrain_compression_desc *how, dtrain_hook_bucket *bucket,
                              uint32_t round);
    /* Start a collective on bucket->comm, on all ranks alike, and return its *work; or start none.
     * Must not read memory: the library also calls it without memory, to count sent bytes. */
    dtrain_result (*exchange)(const dtrain_compression_desc *how, const dtrain_hook_bucket *bucket,
                              uint32_t round, dtrain_work **work);
    dtrain_result (*decompress)(const dtrain_compression_desc *how, dtrain_hook_bucket *bucket,
                                uint32_t round);
    void *user;
};
