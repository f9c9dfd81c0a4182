/* For authors of devices and operations: kernel arguments, table. */

#pragma once

#include "core/api.h"
#include "core/dtype.h"
#include "core/result.h"
#include "device/device.h"

typedef struct dtrain_stream dtrain_stream; /* NULL = the compute stream */
typedef struct dtrain_event dtrain_event;
typedef struct dtrain_graph dtrain_graph;

/* Numbers that change from step to step, in device memory: kernels read them when they run, so a
 * captured graph of a step can be replayed. */
typedef struct dtrain_step_scalars {
    uint64_t seed; /* added to the seed of dropout */
    float lr, correction1, correction2, grad_scale;
    uint32_t skip; /* non-zero: optimizers change nothing */
    float weight;  /* of this rank's micro-batches, for a recorded step */
} dtrain_step_scalars;

#define DTRAIN_GEMM_TRANS_A 1u
#define DTRAIN_GEMM_TRANS_B 2u
/* C = (alpha op(A) op(B) + beta C) * activation'(aux): aux (m,n) is read, bias is not allowed. */
#define DTRAIN_GEMM_ACT_BACKWARD 4u
/* bias_grad (n) = column sums of C, after ACT_BACKWARD. Without this flag bias_grad (m) = row sums
 * of op(A): with A = d_y transposed, the bias gradient comes with the weight gradient. */
#define DTRAIN_GEMM_BIAS_GRAD_C 8u

/* C (m,n) = act(alpha op(A) (m,k) op(B) (k,n) + beta C + bias (n)), accumulated in fp32.
 * lda, ldb, ldc are elements between stored rows. beta == 0 does not read C. aux, if not NULL,
 * receives the value before the activation for backward (dtype and ld of C).
 *
 * bias completes a C that was summed over ranks first: C = act(C + bias), with m, n, c, ldc = n,
 * c_dtype, bias, aux and activation. */
typedef struct dtrain_gemm_args {
    uint32_t flags, activation;
    int64_t m, n, k;
    float alpha, beta;
    const void *a, *b;
    void *c;
    int64_t lda, ldb, ldc;
    dtrain_dtype a_dtype, b_dtype, c_dtype; /* each F32, BF16 or F16 */
    const float *bias;                      /* (n) or NULL */
    void *aux;                              /* (m,n) or NULL */
    float *bias_grad;                       /* see the flags; or NULL */
    bool accumulate_bias_grad;
} dtrain_gemm_args, dtrain_bias_args;

/* d_in = d_out * act'(x), where x is the GEMM's aux; d_bias (n) = column sums of d_in. d_in can be
 * d_out; d_bias can be NULL. With DTRAIN_ACTIVATION_NONE x is not read, and with d_in == d_out only
 * d_bias is made. RELU tests only x > 0, so x can be the layer's output. */
typedef struct dtrain_activation_backward_args {
    uint32_t activation;
    bool accumulate; /* of d_bias */
    int64_t rows, n;
    const void *x, *d_out; /* (rows,n) */
    void *d_in;            /* (rows,n) */
    float *d_bias;         /* (n) or NULL */
    dtrain_dtype dtype;    /* of x, d_out, d_in */
} dtrain_activation_backward_args;

/* s = x + residual (s = x without residual); y = (s - mean) * rstd * weight + bias over the last
 * axis (Ba et al., 2016). With `mean` NULL the mean is 0: the root mean square norm of Zhang and
 * Sennrich, 2019. bias can be NULL. sum keeps s for backward and for the next residual; it can be
 * x, and is NULL exactly if residual is NULL. */
typedef struct dtrain_layernorm_args {
    int64_t rows, n;
    float epsilon;
    const void *x;              /* (rows,n) */
    const float *weight, *bias; /* (n) */
    void *y;                    /* (rows,n) */
    float *mean, *rstd;         /* (rows); mean can be NULL */
    const void *residual;       /* (rows,n) or NULL */
    void *sum;                  /* (rows,n) or NULL */
    dtrain_dtype x_dtype;       /* of x and sum */
    dtrain_dtype y_dtype;       /* of y and residual */
} dtrain_layernorm_args;

/* x is the normalised s above. mean is NULL if it was NULL in forward. d_residual receives a copy
 * of the final d_x as y_dtype. Only this layer has a separate struct for backward: with more
 * arguments, kernels that hold a row in registers spill. */
typedef struct dtrain_layernorm_backward_args {
    int64_t rows, n;
    bool accumulate_params, accumulate_x;
    const void *x;
    const float *weight, *mean, *rstd;
    const void *d_y;
    void *d_x;                /* (rows,n) or NULL */
    float *d_weight, *d_bias; /* (n) or NULL */
    void *d_residual;         /* (rows,n) or NULL; needs d_x */
    dtrain_dtype x_dtype;     /* of x and d_x */
    dtrain_dtype y_dtype;     /* of d_y and d_residual */
} dtrain_layernorm_backward_args;

/* The layers below share a struct between forward and backward: forward ignores the fields after
 * the blank line; backward reads the inputs before it and forward's results (mean, rstd, lse,
 * index, and y if its comment says so). A gradient of NULL is not made. */

/* y[row] = wte[token[row]] + wpe[row % sequence]; wpe can be NULL. A token outside [0, vocab) is an
 * error that names it; a device that detects it late uses token 0 meanwhile.
 *
 * wte can be `vocab` rows, from first_token on, of a table of whole_vocab rows: other tokens of
 * that table count as rows of zeros without gradients. Rows can be part of a batch that begins at
 * first_row: row r has position (first_row + r) % sequence.
 *
 * Backward adds to d_wte and d_wpe: the caller zeroes them before the first use in a step. Sums run
 * in row order, so the result depends neither on the number of threads nor on timing. */
typedef struct dtrain_embedding_args {
    int64_t rows, sequence, n, vocab;
    const int32_t *tokens;            /* (rows) */
    const float *wte, *wpe;           /* (vocab,n), (sequence or more,n) */
    void *y;                          /* (rows,n) */
    dtrain_dtype dtype;               /* of y and d_y */
    int64_t first_token, whole_vocab; /* whole_vocab 0: vocab */
    int64_t first_row;

    const void *d_y;
    float *d_wte, *d_wpe; /* like wte and wpe, or NULL */
} dtrain_embedding_args, dtrain_embedding_backward_args;

/* Multi-head attention, y = softmax(q k^T / sqrt(d) + mask) v for each head, without a matrix of
 * scores in memory: blocks of keys, online softmax (Milakov and Gimelshein 2018; Dao et al.,
 * FlashAttention, 2022). Rows of q, k and v are a stride apart, so the three can be columns of one
 * matrix. With fewer heads of keys and values than of queries (Ainslie et al., "GQA", 2023), head h
 * of q uses head h / (heads/kv_heads) of k and v.
 *
 * A query sees the first key_lengths[b] keys of its batch element; if causal, only keys up to its
 * own number. The mask is added to the scores, -infinity hides a key. A query that sees no key has
 * y 0 and lse +infinity, so that its weight in backward, e^(score - lse), is 0.
 *
 * If all scores of a row are large (a mask hides it with -1e9), rounding removes log(sum) from lse
 * = maximum + log(sum); e^(score - lse - lse_rest) restores it. lse_rest is 0 below 4e-6, which a
 * log-sum-exp up to 64 does not exceed. Likewise rounding removes most of the score from score +
 * mask: for a mask within 65504, the largest fp16, the removed part is added to score - lse. A
 * larger mask hides: the sum is fp32's, as in PyTorch. */
#define DTRAIN_MASK_HIDES 65504.0f

typedef struct dtrain_attention_args {
    int64_t batch, queries, keys; /* of a batch element */
    int64_t heads, kv_heads, d;   /* kv_heads divides heads; d elements a head */
    bool causal;
    dtrain_dtype dtype;                      /* of q, k, v, y */
    const void *q;                           /* (batch*queries, heads*d) */
    const void *k, *v;                       /* (batch*keys, kv_heads*d) */
    int64_t q_stride, k_stride, v_stride;    /* elements from row to row */
    const int32_t *key_lengths;              /* (batch), in [0, keys]; NULL: all keys count */
    const float *mask;                       /* (queries, keys) for each batch element and head */
    int64_t mask_batch_step, mask_head_step; /* elements from mask to mask; 0: they share one */
    void *y;                                 /* (batch*queries, heads*d) */
    float *lse;                              /* (batch, heads, queries): log-sum-exp of each row */
    float *lse_rest; /* likewise: the part of lse lost to rounding, unless small; or NULL */
} dtrain_attention_args;

/* The gradients have the strides of q, k and v, and are overwritten; NULL: not made. */
typedef struct dtrain_attention_backward_args {
    dtrain_attention_args forward; /* y and lse are read */
    const void *d_y;
    void *d_q, *d_k, *d_v;
} dtrain_attention_backward_args;

/* loss[row] = log(sum(exp(logits[row]))) - (1 - smoothing) logits[row][target[row]] - smoothing
 * mean(logits[row]); lse[row], the first term, is kept for backward. A target of -1 is ignored:
 * loss and lse 0, no gradient. Other targets outside [0, classes) are an error; a device that
 * detects it late ignores the row meanwhile. With d_logits (it can be logits) the same pass writes
 * the gradient times scale: logits are read once. Columns from `classes` on are padding: whatever
 * they hold, they take no part, and their gradient is 0.
 *
 * Backward: d_logits = (softmax(logits) - (1 - smoothing) onehot(target) - smoothing / classes) *
 * scale * upstream[0], with softmax from lse; d_logits can be logits, which are then stored once.
 *
 * Ranks can share the columns: column 0 is class first_class of whole_classes; `classes` columns of
 * this rank count, -1 none; targets are numbers of whole rows. The loss takes four steps:
 *
 *     1. cross_entropy with parts: for each row the maximum, the sum of exp(x - maximum), the
 *        target's logit (0 if another rank has it) and, with smoothing, the sum of the logits;
 *        -infinity and zeros if no column counts or the target is ignored. No loss, no lse.
 *     2. whole_max = maxima, all-reduced; cross_entropy_finish without loss makes sums of
 *        exp(x - whole_max).
 *     3. one all-reduce sums the parts after the maxima.
 *     4. cross_entropy_finish with loss: loss and lse of whole rows, for backward. */
typedef struct dtrain_cross_entropy_args {
    int64_t rows, n;
    const void *logits;     /* (rows,n) */
    const int32_t *targets; /* (rows) */
    float *loss, *lse;      /* (rows), (rows) */
    void *d_logits;         /* (rows,n) or NULL */
    float scale;
    dtrain_dtype dtype;                 /* of logits and d_logits */
    int64_t classes;                    /* number of columns that count, from the first; 0 = n */
    float smoothing;                    /* in [0, 1] */
    int64_t first_class, whole_classes; /* whole_classes 0: `classes` */
    float *parts;                       /* (3,rows), with smoothing (4,rows); or NULL */
    const float *whole_max;             /* (rows), for cross_entropy_finish */
    float *lse_rest;                    /* (rows), as in attention; or NULL */

    const float *upstream; /* (1) device memory, or NULL = 1 */
} dtrain_cross_entropy_args, dtrain_cross_entropy_backward_args, dtrain_cross_entropy_finish_args;

/* Softmax over the last axis; d_x = y (d_y - sum of d_y y over the row). */
typedef struct dtrain_softmax_args {
    int64_t rows, n;
    const void *x;
    void *y;            /* (rows,n), not x; backward reads it */
    dtrain_dtype dtype; /* of x, y, d_y, d_x */

    bool accumulate;
    const void *d_y;
    void *d_x; /* (rows,n), not x, y or d_y */
} dtrain_softmax_args, dtrain_softmax_backward_args;

/* Rotary position embedding (Su et al., "RoFormer", 2021) in the form of Llama: element i of the
 * first half of a head and element i of its second half are turned as a pair,
 *
 *     y1 = x1 cos - x2 sin     y2 = x2 cos + x1 sin     angle = position * theta^(-2 i / d)
 *
 * with position = row % sequence and an even head size d. Heads from `rotated` on are copied.
 * inverse turns back: the backward pass. */
typedef struct dtrain_rotary_args {
    int64_t rows, sequence, heads, rotated, d;
    float theta;
    bool inverse, accumulate;
    const void *x;      /* (rows, heads*d) */
    void *y;            /* (rows, heads*d), not x */
    dtrain_dtype dtype; /* of x and y */
} dtrain_rotary_args;

/* y, contiguous, of elements of x:
 *     y[i,j,k,l] = x[i step[0] + j step[1] + k step[2] + l step[3]]. */
typedef struct dtrain_permute_args {
    int64_t shape[4]; /* of y */
    int64_t step[4];  /* elements of x between neighbours of y on each axis */
    bool accumulate;
    const void *x;
    void *y;            /* not x */
    dtrain_dtype dtype; /* of x and y */
} dtrain_permute_args;

/* y = a * x + b * y, or y = a * x if accumulate is false. x can be y. With broadcast x is one
 * element, used for all; x NULL is the constant 1. With a divisor, y (fp32) is multiplied by a /
 * divisor[0] and x is not read; if that is 1, or divisor[0] is 0, y is not touched. */
typedef struct dtrain_axpby_args {
    int64_t count;
    bool accumulate;
    double a, b; /* used as fp32 unless x and y are F64 */
    const void *x;
    void *y;
    bool broadcast;
    dtrain_dtype dtype;   /* of x and y; F64 too */
    const float *divisor; /* (1) device memory, or NULL */
} dtrain_axpby_args;

/* Functions of single elements. The first are the dtrain_activation with the same number, functions
 * of x; the others are functions of x and `other`. */
typedef enum dtrain_pointwise {
    DTRAIN_POINTWISE_RELU = DTRAIN_ACTIVATION_RELU,
    DTRAIN_POINTWISE_GELU = DTRAIN_ACTIVATION_GELU,
    DTRAIN_POINTWISE_SILU = DTRAIN_ACTIVATION_SILU,
    DTRAIN_POINTWISE_MULTIPLY = 4,      /* x other */
    DTRAIN_POINTWISE_SWIGLU = 5,        /* silu(x) other */
    DTRAIN_POINTWISE_SQUARED_ERROR = 6, /* (x - other)^2 */
    DTRAIN_POINTWISE_LOGISTIC_LOSS = 7  /* max(x, 0) - x other + log(1 + e^-|x|) */
} dtrain_pointwise;

/* y[i] = kind(x[i], other[i]). Backward: d_x = d_y times the derivative by x, d_other = d_y times
 * the derivative by other; only x and other can be equal pointers. The slope of ReLU at 0 is 0. */
typedef struct dtrain_pointwise_args {
    uint32_t kind; /* dtrain_pointwise */
    int64_t count;
    const void *x, *other;                      /* (count); other is NULL for functions of x only */
    void *y;                                    /* (count) */
    dtrain_dtype x_dtype, other_dtype, y_dtype; /* also of their gradients */

    const void *d_y;
    void *d_x, *d_other; /* (count) or NULL */
    bool accumulate_x, accumulate_other;
} dtrain_pointwise_args, dtrain_pointwise_backward_args;

/* out = x + y elementwise; out can be x or y if it has the same dtype. */
typedef struct dtrain_add_args {
    int64_t count;
    const void *x, *y;
    void *out;
    dtrain_dtype x_dtype; /* of x and out */
    dtrain_dtype y_dtype; /* F64 exactly if x_dtype is */
} dtrain_add_args;

/* Places of the elements of a part in a whole tensor. Without segments element i has the number
 * first + i; zeroed, the part is the whole. With segments the columns are cut: a row of n elements
 * is consecutive segments, each `length` elements from `column` of a whole row of whole_n; the
 * number is first + row * whole_n + column. Lengths add up to n. */
typedef struct dtrain_part {
    int64_t first;
    int64_t n, whole_n; /* read with segments only */
    uint32_t segments;
    struct {
        int64_t length, column;
    } segment[4];
} dtrain_part;

/* y[i] = keep(i) ? x[i] / (1 - probability) : 0, keep from Philox (seed, stream, number of i in the
 * whole tensor): backward runs the same kernel on the gradient, no mask is stored, and parts have
 * the mask of the whole. y can be x. */
typedef struct dtrain_dropout_args {
    int64_t count;
    float probability;
    bool accumulate;
    uint64_t seed, stream;
    const void *x;
    void *y;
    const dtrain_step_scalars *scalars; /* device memory, its seed is added; or NULL */
    dtrain_dtype dtype;                 /* of x and y */
    dtrain_part part;
} dtrain_dropout_args;

/* total = scale * sum of x, or of x*x if squares; accumulated in double over fixed chunks in a
 * fixed order, so the bits do not depend on timing or threads. With accumulate it is added to
 * total[0]. out[0] is total rounded to fp32. */
typedef struct dtrain_sum_args {
    int64_t count;
    bool squares, accumulate;
    double scale;
    const void *x;
    double *total;       /* (1) device memory, or NULL (then without accumulate) */
    float *out;          /* (1) device memory, or NULL */
    dtrain_dtype dtype;  /* of x; F64 too */
    const float *factor; /* (1) device memory: multiplies scale; or NULL */
} dtrain_sum_args;

/* Clipping without the host: norm = sqrt(sum of sum_squares, in order) * grad_scale; if max_norm >
 * 0 and max_norm / (norm + 1e-6) < 1, scalars->grad_scale is multiplied by it; scalars->skip = 1 if
 * the norm is not finite or weight[0] is 0. */
typedef struct dtrain_clip_args {
    const double *sum_squares; /* (sum_count, at least 1) device memory */
    float max_norm;
    dtrain_step_scalars *scalars; /* device memory */
    float *norm;                  /* (1) device memory */
    const float *weight;          /* (1) device memory, of the step's samples; or NULL */
    int sum_count;                /* 0 = 1 */
} dtrain_clip_args;

typedef struct dtrain_convert_args {
    int64_t count;
    const void *x;
    void *y;
    dtrain_dtype x_dtype, y_dtype; /* F32, BF16, F16 */
} dtrain_convert_args;

/* One piece of what an optimizer updates; value is the fp32 master copy. */
typedef struct dtrain_optimizer_tensor {
    int64_t count;
    float weight_decay;
    float *value;
    const float *grad;
    float *m, *v; /* AdamW's moments; m: momentum of Lion, Muon and SGD (NULL if momentum is 0) */
} dtrain_optimizer_tensor;

/* The elementwise stages of Muon, each a call for one tensor; optim/muon.c has all of it, with gemm
 * between them:
 *   MOMENTUM    g = grad * grad_scale; m = momentum*m + g; x = nesterov ? g + momentum*m : m
 *   NORMALIZE   x = x / (sqrt(sum_squares[0]) + epsilon)
 *   STEP        value = value (1 - lr*weight_decay) - lr*scale*x */
typedef enum dtrain_muon_stage {
    DTRAIN_MUON_MOMENTUM = 0,
    DTRAIN_MUON_NORMALIZE = 1,
    DTRAIN_MUON_STEP = 2
} dtrain_muon_stage;

/* One fused pass over all tensors, with g = grad * grad_scale:
 *
 * AdamW (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019)
 *   m = b1 m + (1-b1) g; v = b2 v + (1-b2) g g
 *   value = value (1 - lr*weight_decay) - lr (m / correction1) / (sqrt(v / correction2) + epsilon)
 *   where the caller gives correction_i = 1 - b_i^step
 * SGD as PyTorch defines it
 *   g += weight_decay*value; m = momentum*m + g (m = g on the first step)
 *   value = value - lr * (nesterov ? g + momentum*m : m)
 * Lion (Chen et al., 2023); the sign of 0, and of NaN, is 0
 *   value = value (1 - lr*weight_decay) - lr sign(b1 m + (1-b1) g); m = b2 m + (1-b2) g
 *
 * scalars, if given, replace lr (by theirs times lr_scale), the corrections and grad_scale, and can
 * skip the step. */
typedef struct dtrain_optimizer_args {
    size_t tensor_count;
    const dtrain_optimizer_tensor *tensors; /* host memory */
    float lr, beta1, beta2, epsilon, correction1, correction2, momentum, grad_scale;
    bool nesterov, first;
    const dtrain_step_scalars *scalars; /* device memory, or NULL */
    float lr_scale;                     /* of the rate in scalars */
    bool wide;                          /* AdamW, SGD: all arrays are doubles, two floats each */

    uint32_t stage; /* dtrain_muon_stage; this and what follows: Muon */
    float scale;
    float *x;                  /* (tensors->count) */
    const double *sum_squares; /* (1) device memory */
} dtrain_optimizer_args;
typedef dtrain_optimizer_args dtrain_adamw_args, dtrain_sgd_args, dtrain_lion_args,
    dtrain_muon_args;

/* The k elements of largest magnitude of x, or of residual + x with error feedback (Stich et al.,
 * "Sparsified SGD with Memory", 2018): residual += x; indices (k) ascending and values (k) are
 * taken out of it, that is, become zero there. Of equal magnitudes at the border the lowest indices
 * are taken, NaN is larger than all numbers: the result is a function of the input only. With
 * velocity, which needs residual: velocity = momentum velocity + x; residual += velocity; taken
 * elements become zero in both (momentum correction and factor masking: Lin et al., "Deep Gradient
 * Compression", ICLR 2018). count < 2^31, 1 <= k <= count. */
typedef struct dtrain_topk_args {
    int64_t count, k;
    const float *x;   /* (count) */
    float *residual;  /* (count) or NULL */
    float *values;    /* (k) */
    int32_t *indices; /* (k) */
    float *velocity;  /* (count) or NULL */
    float momentum;
} dtrain_topk_args;

/* out[indices[i]] += scale * values[i]; indices differ; an index outside [0, count) is an error. */
typedef struct dtrain_scatter_add_args {
    int64_t count, k;
    float scale;
    const float *values;    /* (k) */
    const int32_t *indices; /* (k) */
    float *out;             /* (count) */
} dtrain_scatter_add_args;

/* Batch normalisation: every column (channel) of x (rows, n) is normalised over all rows, also of
 * other ranks (Ioffe and Szegedy, 2015). Ranks exchange numbers between its five steps:
 *
 *     moments      x -> part: this rank's part of the statistics
 *     statistics   the parts of all ranks, in their order -> mean, rstd; running averages
 *     batchnorm    x -> y
 *     sums         x, y, d_y -> this rank's part of two sums over all rows
 *     backward     x, y, d_y, the sums of all ranks -> d_x
 *
 * part (1 + 2 n), which moments writes to `sums`: number of rows, means, sums of squared deviations
 * from the means. Sums of many rows are taken in double or over chunks that depend only on the
 * arguments. */

/* running = (1 - momentum) running + momentum new, with the unbiased variance. With parts 0, mean
 * and rstd come from the running averages, which do not change. */
typedef struct dtrain_batchnorm_statistics_args {
    int64_t parts, n;
    float epsilon, momentum;
    const float *all;                  /* (parts, 1 + 2 n) */
    float *mean, *rstd;                /* (n) */
    float *inverse_count;              /* (1): 1 / rows of all parts */
    float *running_mean, *running_var; /* (n) or NULL */
} dtrain_batchnorm_statistics_args;

/* y = act((x - mean) rstd weight + bias + residual); the activation is none or ReLU. y can be x or
 * residual. Backward, with d = d_y act' and h = (x - mean) rstd:
 *
 *     sums       sum of d, sum of d h over this rank's rows; d is also the residual's gradient
 *     backward   d_x = weight rstd (d - (sum of d + h sum of d h) / rows), with sums over the rows
 *                of all ranks
 *
 * y is read for ReLU only. */
typedef struct dtrain_batchnorm_args {
    int64_t rows, n;
    uint32_t activation;
    const void *x, *residual; /* (rows, n); residual can be NULL */
    const float *mean, *rstd, *weight, *bias;
    void *y;
    dtrain_dtype dtype; /* of x, residual, y and their gradients */

    const void *d_y;
    float *sums;                /* (2 n), written by sums; (1 + 2 n) by moments */
    const float *inverse_count; /* (1) */
    void *d_residual;           /* written by sums; or NULL */
    void *d_x;                  /* written by backward */
    bool accumulate;            /* to d_residual, or to d_x */
} dtrain_batchnorm_args;
typedef dtrain_batchnorm_args dtrain_batchnorm_moments_args, dtrain_batchnorm_sums_args,
    dtrain_batchnorm_backward_args;

/* Windows over images (batch, height, width, channels); axis 0 is vertical. Window (i, j) of an
 * image has tap (a, b) at row i*stride[0] - padding[0] + a*dilation[0], and at the corresponding
 * column; there are out_height x out_width windows, and taps can lie outside the image. */
typedef struct dtrain_windows2d {
    int64_t batch, height, width, channels;
    int64_t out_height, out_width;
    int64_t kernel[2], stride[2], padding[2], dilation[2]; /* taps: kernel[0] x kernel[1] */
} dtrain_windows2d;

#define DTRAIN_CONV2D_KERNEL 64 /* taps of an axis, at most */

/* y (batch, out_height, out_width, out_channels) = the sum over taps of x times weight, plus bias;
 * a tap outside the image is 0. Group g of `groups` maps its channels of x to its channels of y.
 * Backward sums pixels in parts that depend only on the shapes, and in order. */
typedef struct dtrain_conv2d_args {
    dtrain_windows2d windows;
    int64_t out_channels, groups;
    const void *x;
    const void *weight; /* (out_channels, channels / groups, kernel[0], kernel[1]) */
    const float *bias;  /* (out_channels) or NULL */
    void *y;
    dtrain_dtype dtype; /* of x, weight, y, d_y */

    const void *d_y;
    void *d_x;
    float *d_weight, *d_bias;
    bool accumulate_x, accumulate_weight, accumulate_bias;
    dtrain_dtype x_dtype; /* of d_x */
} dtrain_conv2d_args, dtrain_conv2d_backward_args;

/* y (batch, out_height, out_width, channels) = the largest element of each window, or the sum over
 * its taps divided by kernel[0]*kernel[1] (taps outside the image are 0 and count). index, if
 * wanted, receives the tap a*kernel[1] + b of the maximum: the first maximum, or the last NaN,
 * which is larger than all numbers. Each window has a tap inside; dilation is 1. */
typedef struct dtrain_pool2d_args {
    dtrain_windows2d windows;
    bool maximum;
    const void *x;
    void *y;
    int32_t *index;     /* like y, or NULL; for maxima only; backward reads it */
    dtrain_dtype dtype; /* of x, y, d_y, d_x */

    bool accumulate;
    const void *d_y;
    void *d_x;
} dtrain_pool2d_args, dtrain_pool2d_backward_args;

typedef enum dtrain_copy_kind {
    DTRAIN_COPY_HOST_TO_DEVICE = 1,
    DTRAIN_COPY_DEVICE_TO_HOST = 2, /* waits for the compute stream */
    DTRAIN_COPY_DEVICE_TO_DEVICE = 3
} dtrain_copy_kind;

#define DTRAIN_DEVICE_ABI 13u

/* The entries from create to is_device_memory move data and order work; a stream of NULL is the
 * compute stream. Kernels go to the compute stream.
 *
 * query, host_register, host_unregister and the entries from stream_create to range_end can be
 * NULL: nothing to do. Such a device has finished its work when a call returns, its streams and
 * events are NULL, the host can read all memory, and it cannot record graphs. */
struct dtrain_device_ops {
    uint32_t abi;     /* DTRAIN_DEVICE_ABI */
    const char *name; /* "cpu", "cuda" */
    bool host_memory; /* true: the host can read device pointers */

    dtrain_result (*create)(const dtrain_device_desc *desc, dtrain_device *device);
    void (*destroy)(dtrain_device *device);
    dtrain_result (*query)(dtrain_device *device, dtrain_device_info *info);
    /* Wait for all streams of this device; device->while_waiting is called meanwhile. */
    dtrain_result (*synchronize)(dtrain_device *device);

    /* 64-byte aligned (256 on a GPU), contents undefined. copy has read host memory when it
     * returns. */
    dtrain_result (*alloc)(dtrain_device *device, size_t bytes, void **memory);
    void (*free)(dtrain_device *device, void *memory, size_t bytes);
    dtrain_result (*copy)(dtrain_device *device, void *to, const void *from, size_t bytes,
                          dtrain_copy_kind kind);
    dtrain_result (*zero)(dtrain_device *device, void *memory, size_t bytes);

    /* Page-locked host memory, new or made from existing whole pages, for copy_async, which only
     * queues the copy. */
    dtrain_result (*host_alloc)(dtrain_device *device, size_t bytes, void **memory);
    void (*host_free)(dtrain_device *device, void *memory, size_t bytes);
    dtrain_result (*host_register)(dtrain_device *device, void *memory, size_t bytes);
    void (*host_unregister)(dtrain_device *device, void *memory);
    dtrain_result (*copy_async)(dtrain_device *device, void *to, const void *from, size_t bytes,
                                dtrain_copy_kind kind, dtrain_stream *stream);

    dtrain_result (*stream_create)(dtrain_device *device, bool high_priority, dtrain_stream **out);
    void (*stream_destroy)(dtrain_device *device, dtrain_stream *stream);
    void *(*stream_native)(dtrain_device *device, dtrain_stream *stream); /* cudaStream_t */
    dtrain_result (*event_create)(dtrain_device *device, dtrain_event **out);
    void (*event_destroy)(dtrain_device *device, dtrain_event *event);
    dtrain_result (*event_record)(dtrain_device *device, dtrain_event *event,
                                  dtrain_stream *stream);
    dtrain_result (*event_wait)(dtrain_device *device, dtrain_event *event, dtrain_stream *stream);
    dtrain_result (*event_query)(dtrain_device *device, dtrain_event *event, bool *done);
    bool (*is_device_memory)(dtrain_device *device, const void *memory);

    /* Between begin and end work on the compute stream, and on streams that wait for its events, is
     * recorded instead of run; launch runs it, any number of times. */
    dtrain_result (*graph_begin)(dtrain_device *device);
    dtrain_result (*graph_end)(dtrain_device *device, dtrain_graph **out);
    dtrain_result (*graph_launch)(dtrain_device *device, dtrain_graph *graph);
    void (*graph_destroy)(dtrain_device *device, dtrain_graph *graph);
    /* End a recording under way, and all graphs: they can be destroyed but not launched. A
     * communicator that ends calls it, because graphs contain its collectives. */
    void (*graphs_drop)(dtrain_device *device);
    /* True if work on the compute stream is recorded: between graph_begin and graph_end, or by the
     * host program that owns the stream. */
    bool (*capturing)(dtrain_device *device);
    /* Wait until no queued work can touch memory, as free does, before memory is given back by
     * other means. False: a kernel does not end, and the memory must stay. */
    bool (*may_free)(dtrain_device *device);
    /* Open a named range for a profiler of this device (the spans of world/timeline.h), and close
     * the innermost range. */
    void (*range_begin)(dtrain_device *device, const char *name);
    void (*range_end)(dtrain_device *device);

    dtrain_result (*gemm)(dtrain_device *, const dtrain_gemm_args *);
    dtrain_result (*activation_backward)(dtrain_device *, const dtrain_activation_backward_args *);
    dtrain_result (*bias)(dtrain_device *, const dtrain_bias_args *);
    dtrain_result (*layernorm)(dtrain_device *, const dtrain_layernorm_args *);
    dtrain_result (*layernorm_backward)(dtrain_device *, const dtrain_layernorm_backward_args *);
    dtrain_result (*embedding)(dtrain_device *, const dtrain_embedding_args *);
    dtrain_result (*embedding_backward)(dtrain_device *, const dtrain_embedding_backward_args *);
    dtrain_result (*attention)(dtrain_device *, const dtrain_attention_args *);
    dtrain_result (*attention_backward)(dtrain_device *, const dtrain_attention_backward_args *);
    dtrain_result (*cross_entropy)(dtrain_device *, const dtrain_cross_entropy_args *);
    dtrain_result (*cross_entropy_backward)(dtrain_device *,
                                            const dtrain_cross_entropy_backward_args *);
    dtrain_result (*cross_entropy_finish)(dtrain_device *,
                                          const dtrain_cross_entropy_finish_args *);
    dtrain_result (*pointwise)(dtrain_device *, const dtrain_pointwise_args *);
    dtrain_result (*pointwise_backward)(dtrain_device *, const dtrain_pointwise_backward_args *);
    dtrain_result (*softmax)(dtrain_device *, const dtrain_softmax_args *);
    dtrain_result (*softmax_backward)(dtrain_device *, const dtrain_softmax_backward_args *);
    dtrain_result (*rotary)(dtrain_device *, const dtrain_rotary_args *);
    dtrain_result (*permute)(dtrain_device *, const dtrain_permute_args *);
    dtrain_result (*add)(dtrain_device *, const dtrain_add_args *);
    dtrain_result (*axpby)(dtrain_device *, const dtrain_axpby_args *);
    dtrain_result (*dropout)(dtrain_device *, const dtrain_dropout_args *);
    dtrain_result (*sum)(dtrain_device *, const dtrain_sum_args *);
    dtrain_result (*clip)(dtrain_device *, const dtrain_clip_args *);
    dtrain_result (*convert)(dtrain_device *, const dtrain_convert_args *);
    dtrain_result (*adamw)(dtrain_device *, const dtrain_adamw_args *);
    dtrain_result (*sgd)(dtrain_device *, const dtrain_sgd_args *);
    dtrain_result (*lion)(dtrain_device *, const dtrain_lion_args *);
    dtrain_result (*muon)(dtrain_device *, const dtrain_muon_args *);
    dtrain_result (*topk)(dtrain_device *, const dtrain_topk_args *);
    dtrain_result (*scatter_add)(dtrain_device *, const dtrain_scatter_add_args *);
    dtrain_result (*batchnorm_moments)(dtrain_device *, const dtrain_batchnorm_moments_args *);
    dtrain_result (*batchnorm_statistics)(dtrain_device *,
                                          const dtrain_batchnorm_statistics_args *);
    dtrain_result (*batchnorm)(dtrain_device *, const dtrain_batchnorm_args *);
    dtrain_result (*batchnorm_sums)(dtrain_device *, const dtrain_batchnorm_sums_args *);
    dtrain_result (*batchnorm_backward)(dtrain_device *, const dtrain_batchnorm_backward_args *);
    dtrain_result (*conv2d)(dtrain_device *, const dtrain_conv2d_args *);
    dtrain_result (*conv2d_backward)(dtrain_device *, const dtrain_conv2d_backward_args *);
    dtrain_result (*pool2d)(dtrain_device *, const dtrain_pool2d_args *);
    dtrain_result (*pool2d_backward)(dtrain_device *, const dtrain_pool2d_backward_args *);
};

struct dtrain_device {
    const dtrain_device_ops *ops;
    void *state;            /* the backend's own */
    size_t allocated_bytes; /* from alloc, not given back */
    size_t comm_bytes;      /* of communicators, not from alloc */
    size_t peak_bytes;      /* largest sum of both */
    uint64_t limit_bytes;   /* of their sum; 0 = none */
    /* Called repeatedly while the host waits for the device; an error ends the wait. A communicator
     * whose kernels wait for other ranks checks its deadlines in it. NULL = nothing. */
    dtrain_result (*while_waiting)(void *user);
    void *waiting_user;
};

/* Add `bytes` to *counter, which is device->allocated_bytes or device->comm_bytes, and update
 * device->peak_bytes; fail, and say what would help, if that exceeds the memory limit of this rank.
 * Devices and communicators call it before they allocate, and subtract freed or missing bytes. */
DTRAIN_API dtrain_result dtrain_device_account(dtrain_device *device, size_t *counter,
                                               size_t bytes);
