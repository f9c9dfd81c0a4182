/* Operations
 *
 * An operation takes tensors of a pass, runs, and returns a new tensor; NULL after an error, which
 * sticks to the tape. A shape (..., n) counts as (rows, n). Weights of linear layers are (out, in),
 * as in PyTorch. Every operation checks shapes and names both in its error sentence. A program adds
 * its own operations with tape/op.h; examples/operations.c uses most of those below. */

#pragma once

#include "core/api.h"
#include "core/dtype.h"
#include "strategy/params.h"
#include "tape/tape.h"
#include "device/device.h"

/* Apply a linear layer, y (rows, out) = act(x (rows, in) weight^T + bias); bias can be NULL.
 *
 * Over the tensor axis of a mesh, a weight cut by rows (parallel/cut.h), with its bias cut alike,
 * takes x whole or cut by rows and makes columns. A weight cut by columns, with a whole bias, takes
 * columns and makes the whole, or rows under sequence parallelism. The layer takes all sums over
 * the ranks, forward and backward. */
DTRAIN_API dtrain_tensor *dtrain_linear(dtrain_tape *tape, dtrain_tensor *x, dtrain_param *weight,
                                        dtrain_param *bias, dtrain_activation activation);
/* Normalise the last axis to mean 0 and variance 1, then scale and shift it by weight and bias (n);
 * epsilon, 1e-5 in PyTorch, is added to the variance; bias can be NULL (Ba et al., "Layer
 * Normalization", 2016).
 *
 * residual, NULL = none, is the sum of a residual stream: the call adds x to *residual and
 * normalises the new *residual in one pass over memory. With *residual NULL the stream begins as x:
 *
 *     h = embedding, stream = NULL
 *     h = attention(norm(h, &stream)), h = mlp(norm(h, &stream)), ... */
DTRAIN_API dtrain_tensor *dtrain_layernorm(dtrain_tape *tape, dtrain_tensor *x,
                                           dtrain_tensor **residual, dtrain_param *weight,
                                           dtrain_param *bias, float epsilon);
/* Divide the last axis by sqrt(mean of its squares + epsilon), then scale it by weight (n): the
 * norm of Llama (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019). residual as in
 * dtrain_layernorm. */
DTRAIN_API dtrain_tensor *dtrain_rms_norm(dtrain_tape *tape, dtrain_tensor *x,
                                          dtrain_tensor **residual, dtrain_param *weight,
                                          float epsilon);
/* Every zero is the default written beside the field. */
typedef struct dtrain_batch_norm_desc {
    float momentum;               /* of the running averages; 0 = 0.1 */
    float epsilon;                /* 0 = 1e-5 */
    dtrain_activation activation; /* of the result: none or ReLU */
    dtrain_tensor *residual;      /* shaped like x, added before the activation; NULL = none */
    dtrain_param *running_mean, *running_var; /* (n), with DTRAIN_PARAM_BUFFER, initially 0 and 1:
                                                 mean and unbiased variance of the batches, for
                                                 passes without gradients. NULL = none: such passes
                                                 use their own batch */
    dtrain_comm *comm; /* ranks whose batches count as one (SyncBatchNorm) and which call the same
                          operations in the same order: a private one from dtrain_comm_split, on a
                          mesh split off the data axis's, whose ranks have the same stages of a
                          pipeline. NULL = each rank has its own batch */
} dtrain_batch_norm_desc;
/* Normalise each channel, the last axis (n), to mean 0 and variance 1 over all rows of x, then
 * scale and shift it by weight and bias (n), add the residual and apply the activation: the
 * BatchNorm2d of PyTorch for (batch, height, width, channels). desc can be NULL (Ioffe and Szegedy,
 * "Batch Normalization", 2015). */
DTRAIN_API dtrain_tensor *dtrain_batch_norm(dtrain_tape *tape, dtrain_tensor *x,
                                            dtrain_param *weight, dtrain_param *bias,
                                            const dtrain_batch_norm_desc *desc);
/* Look up tokens (batch, sequence) I32 -> (batch*sequence, n): a row of `token` (vocabulary, n)
 * plus a row of `position` (sequence or more, n), which can be NULL. The tensor axis of a mesh can
 * cut `token` by rows (parallel/cut.h): each rank has a part of the vocabulary. The result is
 * whole, with the bits of one rank, or cut by rows under sequence parallelism. */
DTRAIN_API dtrain_tensor *dtrain_embedding(dtrain_tape *tape, dtrain_tensor *tokens,
                                           dtrain_param *token, dtrain_param *position);

/* Every zero is the default written beside the field. */
typedef struct dtrain_attention_desc {
    int64_t sequence;           /* rows of q in a batch element; no default */
    int64_t heads;              /* of q; no default */
    int64_t kv_heads;           /* of k and v, divides heads; 0 = heads */
    int64_t key_sequence;       /* rows of k and v in a batch element; 0 = sequence */
    bool causal;                /* row t of q sees rows 0 to t of k, also if their numbers of rows
                                   differ: PyTorch's is_causal */
    dtrain_tensor *key_lengths; /* (batch) I32: number of rows of k and v that count in each batch
                                   element, 0 to key_sequence; the rest is padding. NULL = all */
    dtrain_tensor *mask;        /* F32, added to the scores; -infinity hides a key. (batch or 1,
                                   heads or 1, sequence, key_sequence); leading axes can be
                                   left out; without requires_grad. NULL = none */
} dtrain_attention_desc;
/* Apply multi-head attention, softmax(q k^T / sqrt(d) + mask) v in each head, as PyTorch's
 * scaled_dot_product_attention defines it. q is (batch*sequence, heads*d), k and v are
 * (batch*key_sequence, kv_heads*d), and the result is like q. With k and v NULL a row of q holds
 * all three side by side: heads heads of queries, kv_heads of keys, kv_heads of values.
 *
 * With fewer heads of keys and values than of queries, head h of q uses head h / (heads / kv_heads)
 * of k and v (Ainslie et al., "GQA", 2023). A row that sees no key has the result 0 and passes no
 * gradient. q, k and v have one type, which autocast keeps; the mask is added in fp32. A row wholly
 * hidden by -1e9 weighs all keys alike, as in PyTorch; a row hidden by -10000 keeps the weights of
 * its scores, without PyTorch's rounding. On a GPU, flash attention handles causal and key_lengths;
 * a mask takes slower matrix products with scores in memory.
 *
 * The tensor axis of a mesh can cut q, k and v by columns into whole heads: heads of queries with
 * their head of keys (cut.parts = kv_heads). The result is then cut alike; the desc and the mask
 * still describe all heads. */
DTRAIN_API dtrain_tensor *dtrain_attention(dtrain_tape *tape, dtrain_tensor *q, dtrain_tensor *k,
                                           dtrain_tensor *v, const dtrain_attention_desc *desc);
/* Turn pairs of elements by angles that grow with the position, 0 to sequence - 1 (Su et al.,
 * "RoFormer", 2021), in Llama's form: element i of a head of d goes with element i + d/2, and their
 * angle is position * theta^(-2 i / d). x is (batch*sequence, heads*d); the first `rotated` heads
 * are turned, 0 = all: for packed rows of dtrain_attention, the heads of q and k. If x is cut by
 * columns, a rank has whole heads; heads and rotated still count all heads. */
DTRAIN_API dtrain_tensor *dtrain_rotary(dtrain_tape *tape, dtrain_tensor *x, int64_t sequence,
                                        int64_t heads, int64_t rotated, float theta);
/* Apply softmax to the last axis. */
DTRAIN_API dtrain_tensor *dtrain_softmax(dtrain_tape *tape, dtrain_tensor *x);

/* Multiply matrices, (..., m, k) (..., k, n) -> (..., m, n), one product for each index of the
 * equal leading axes; all rows of a are multiplied by b (k, n). */
DTRAIN_API dtrain_tensor *dtrain_matmul(dtrain_tape *tape, dtrain_tensor *a, dtrain_tensor *b);
/* Copy x to a tensor of another shape with as many elements in the same order; -1 stands for one
 * length that follows from the others. If x is cut (dtrain_tensor.placement), the shape is that of
 * the whole and keeps the last axis; if it is cut by rows, the shape has two axes. */
DTRAIN_API dtrain_tensor *dtrain_reshape(dtrain_tape *tape, dtrain_tensor *x, uint32_t ndim,
                                         const int64_t *shape);
/* Convert x to a placement over the tensor axis of a mesh (tape/tape.h); returns x itself if it has
 * that placement or there is no such axis. Columns of a whole tensor are cut as evenly as possible;
 * rows become (rows, n). The gradient is converted back. Operations place their results themselves:
 * this call is for models that need another placement. */
DTRAIN_API dtrain_tensor *dtrain_place(dtrain_tape *tape, dtrain_tensor *x,
                                       dtrain_placement placement);
/* Copy x with its axes in another order: axis i of the result is axis axes[i] of x. */
DTRAIN_API dtrain_tensor *dtrain_permute(dtrain_tape *tape, dtrain_tensor *x, const uint32_t *axes);

/* Axis 0 is the height, axis 1 the width. Zeros are the defaults: stride 1, padding 0, dilation 1,
 * one group. */
typedef struct dtrain_conv2d_desc {
    int64_t stride[2], padding[2], dilation[2], groups;
} dtrain_conv2d_desc;

/* Apply a convolution as PyTorch's conv2d defines it, but with channels last: x (batch, height,
 * width, in_channels) -> (batch, out_height, out_width, out_channels), where out_height is (height
 * + 2 padding - dilation (kernel_height - 1) - 1) / stride + 1, rounded down. weight has PyTorch's
 * shape (out_channels, in_channels / groups, kernel_height, kernel_width), with a kernel of at most
 * 64 x 64; bias (out_channels) can be NULL. groups divides both numbers of channels. Each group is
 * a separate product: groups of one channel (depthwise) are correct, and slow. desc NULL: the
 * defaults. */
DTRAIN_API dtrain_tensor *dtrain_conv2d(dtrain_tape *tape, dtrain_tensor *x, dtrain_param *weight,
                                        dtrain_param *bias, const dtrain_conv2d_desc *desc);

typedef enum dtrain_pool_kind { DTRAIN_POOL_MAX = 1, DTRAIN_POOL_AVERAGE = 2 } dtrain_pool_kind;

typedef struct dtrain_pool2d_desc {
    uint32_t kind;      /* dtrain_pool_kind; no default */
    int64_t kernel[2];  /* both 0 = the whole image */
    int64_t stride[2];  /* 0 = the kernel */
    int64_t padding[2]; /* at most half of the kernel */
} dtrain_pool2d_desc;
/* Take the maximum or the average of each window, x (batch, height, width, channels) -> (batch,
 * out_height, out_width, channels); of whole images -> (batch, channels). The gradient of a maximum
 * goes to the first maximum, row by row; NaN is larger than all numbers, and the last NaN gets the
 * gradient, as in PyTorch. In an average, padding counts as zeros, as in PyTorch by default. */
DTRAIN_API dtrain_tensor *dtrain_pool2d(dtrain_tape *tape, dtrain_tensor *x,
                                        const dtrain_pool2d_desc *desc);

/* Add two tensors of the same count and last axis; the result has the wider type of the two.
 *
 * Two losses can be means over different samples (cross-entropy over the targets that count, an
 * auxiliary dtrain_mean). Each is averaged over all its samples of a step on all ranks: with
 * several ranks this takes a small all-reduce in the forward pass. With several micro-batches the
 * numbers of samples must be proportional in all of them; otherwise every rank gets an error. An
 * auxiliary loss that is a scaled dtrain_sum takes the weight of the other loss. */
DTRAIN_API dtrain_tensor *dtrain_add(dtrain_tape *tape, dtrain_tensor *x, dtrain_tensor *y);
/* Multiply every element by factor. */
DTRAIN_API dtrain_tensor *dtrain_scale(dtrain_tape *tape, dtrain_tensor *x, float factor);
/* Convert x to F32, BF16 or F16; returns x itself if it has that type. The gradient is converted
 * back. Under autocast, dtrain_cast(tape, logits, DTRAIN_DTYPE_F32) before the loss takes softmax
 * and gradient of wide logits. */
DTRAIN_API dtrain_tensor *dtrain_cast(dtrain_tape *tape, dtrain_tensor *x, dtrain_dtype dtype);
/* Apply an activation to every element; returns x itself for DTRAIN_ACTIVATION_NONE. A linear layer
 * applies one to its output at no cost. */
DTRAIN_API dtrain_tensor *dtrain_activate(dtrain_tape *tape, dtrain_tensor *x,
                                          dtrain_activation activation);
/* Multiply two tensors of the same count and last axis, element by element; the result has the
 * wider type of the two. */
DTRAIN_API dtrain_tensor *dtrain_multiply(dtrain_tape *tape, dtrain_tensor *x, dtrain_tensor *y);
/* Compute silu(gate) * up in one pass over memory, with the shapes and types of dtrain_multiply
 * (Shazeer, "GLU Variants Improve Transformer", 2020). */
DTRAIN_API dtrain_tensor *dtrain_swiglu(dtrain_tape *tape, dtrain_tensor *gate, dtrain_tensor *up);
/* Zero each element with the given probability, in [0, 1), and scale the rest by
 * 1 / (1 - probability). Returns x itself in a pass without gradients. */
DTRAIN_API dtrain_tensor *dtrain_dropout(dtrain_tape *tape, dtrain_tensor *x, float probability);

/* Compute softmax cross-entropy, the mean over rows as one element; logits (rows, n), targets
 * (rows) I32, -1 = ignored. Backward overwrites the logits with their gradient if nothing else
 * reads them, so that they are stored once after a linear classifier: read logits before backward.
 *
 * classes: number of columns that count, from the first; 0 = all. The others are padding, which
 * gives a classifier a number of rows that is fast on a GPU (GPT-2's 50257 to 50304): they take no
 * part, whatever they hold, and have gradient 0. Rows of a classifier from `classes` on that are 0
 * initially (dtrain_param.init_count) stay 0 under any optimizer.
 *
 * smoothing: the part, in [0, 1], of the target probability that is spread evenly over all classes,
 * the target's included, as in PyTorch (Szegedy et al., 2016); 0 = none.
 *
 * The tensor axis of a mesh can cut logits: by columns, if they come from a classifier whose weight
 * is cut by rows (ranks exchange three floats a row), or by rows. targets and classes still
 * describe whole rows, and the loss is whole. */
DTRAIN_API dtrain_tensor *dtrain_cross_entropy(dtrain_tape *tape, dtrain_tensor *logits,
                                               dtrain_tensor *targets, int64_t classes,
                                               float smoothing);
/* Compute the mean over all elements of (x - target)^2, as one fp32 element; x and target have the
 * same count and last axis. target also gets a gradient if it wants one. */
DTRAIN_API dtrain_tensor *dtrain_mse_loss(dtrain_tape *tape, dtrain_tensor *x,
                                          dtrain_tensor *target);
/* Compute the mean over all elements of the binary cross-entropy of sigmoid(logits) with target, as
 * one fp32 element; target, in [0, 1], has the count and the last axis of logits. No logit is too
 * large: max(x, 0) - x t + log(1 + e^-|x|). */
DTRAIN_API dtrain_tensor *dtrain_bce_with_logits_loss(dtrain_tape *tape, dtrain_tensor *logits,
                                                      dtrain_tensor *target);
/* Add up all elements; the result has one. */
DTRAIN_API dtrain_tensor *dtrain_sum(dtrain_tape *tape, dtrain_tensor *x);
/* Average all elements; the result has one. */
DTRAIN_API dtrain_tensor *dtrain_mean(dtrain_tape *tape, dtrain_tensor *x);
