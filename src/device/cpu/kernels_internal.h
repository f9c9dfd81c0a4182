/* Structures of launchers and kernels
 *
 * A job, the table of an instruction set, structures of single operations. */

#pragma once

#include "core/platform_internal.h"
#include "core/dtype.h"
#include "device/backend.h"
#include "device/cpu/gemm_internal.h"
#include "device/device_internal.h"

struct dtrain__job;
typedef void (*dtrain__range_fn)(struct dtrain__job *job, int64_t begin, int64_t end, int index);

typedef struct dtrain__job {
    const void *args;   /* of the kernel */
    dtrain_dtype dtype; /* of its activations; the largest if they differ */
    dtrain__range_fn range;
    int64_t total, unit;        /* [0, total) is cut at multiples of unit */
    bool dynamic;               /* items have unequal cost: threads take them one by one */
    int64_t next;               /* atomic: items handed out */
    int64_t chunk, chunk_count; /* of ordered partial sums */
    float *scratch;
    int64_t slot; /* floats of scratch per thread */
    double *sums; /* (chunk_count) */
} dtrain__job;

/* Every kernel that works on ranges. L: layers and Muon, which belong to ring 3, models. M: layers
 * that gain by AVX-512: products and batch normalisation (without it ResNet-20 is 3 % slower, in
 * bf16 8 %). P: convolutions by patches, which scalars lack. AVX-512 has M and P and takes the
 * others from AVX2: its own made a training step of a small GPT no faster on Zen 4. Sums between
 * ranks (mix) take a fourth less time with AVX-512. */
/* clang-format off */
#define DTRAIN__RANGES(X, L, M, P)                                                   \
    X(add) X(axpby) X(sum) X(convert) X(adamw) X(sgd) X(lion) X(topk)     \
    L(dropout) L(muon) L(activate) L(activation_backward) L(layernorm) L(layernorm_backward)    \
    L(layernorm_params) L(embedding) L(embedding_backward) L(cross_entropy)          \
    L(cross_entropy_backward) L(pointwise) L(pointwise_backward) L(softmax)          \
    L(softmax_backward) L(rotary) L(permute) L(conv_weight) L(conv_weight_sum)       \
    L(pool2d) L(pool2d_backward)                                                     \
    M(attention) M(attention_backward)                                               \
    M(batchnorm_moments) M(batchnorm) M(batchnorm_sums) M(batchnorm_backward)        \
    P(winograd_filter) P(winograd) P(winograd_weight) P(winograd_filter_sum)
/* clang-format on */

/* Tiles of convolutions. rows: a panel of A has consecutive rows, into which windows are copied
 * fastest; columns: windows are the columns of A. Wide tiles have two vectors a row. */
typedef struct dtrain__conv_tiles {
    dtrain__isa rows, narrow_rows, columns, narrow_columns;
} dtrain__conv_tiles;

typedef struct dtrain__kernels {
    const char *name;
    const dtrain__isa *gemm;                /* NULL without models */
    const dtrain__conv_tiles *convolutions; /* likewise */
    void (*mix)(const dtrain__mix_job *job, int64_t at);
#define DTRAIN__RANGE(name) dtrain__range_fn name;
    DTRAIN__RANGES(DTRAIN__RANGE, DTRAIN__RANGE, DTRAIN__RANGE, DTRAIN__RANGE)
} dtrain__kernels;

/* One tensor of an optimizer step, and the numbers of this step. */
typedef struct dtrain__update {
    const dtrain_optimizer_args *args;
    const dtrain_optimizer_tensor *tensor;
    dtrain_step_scalars now;
    float inverse; /* of a norm: muon */
} dtrain__update;

/* The first pass of top-k: candidates are elements of a magnitude above `below`. Each thread has
 * its own list. */
typedef struct dtrain__topk_pass {
    const dtrain_topk_args *args;
    int32_t below;
    int64_t room;     /* of a list */
    float *values;    /* (threads, room) */
    int32_t *indices; /* (threads, room) */
    int64_t *found;   /* (threads) length of the list; -1: the list was too short */
} dtrain__topk_pass;

/* A weight (outer, inner, taps), with strides, and its fp32 copy in the order of a product's B:
 * (tap, outer, inner), taps in the order of `order`; or the inverse, for the gradient. */
typedef struct dtrain__conv_weight {
    const void *weight;
    float *d_weight, *packed; /* packed: (parts, taps, outer, inner) */
    dtrain_dtype dtype;       /* of weight */
    int64_t outer, inner, outer_stride, inner_stride;
    int64_t taps, parts;
    const int32_t *order; /* (taps) */
    bool accumulate;
} dtrain__conv_weight;

/* Images as patches of 6 x 6 or 4 x 4 pixels: windows with a stride of four. */
typedef struct dtrain__patches {
    dtrain__windows windows;
    void *data;
    dtrain_dtype dtype;
} dtrain__patches;

/* A convolution of 3 x 3 taps by patches, or its weight gradient (with d_y in `to`). */
typedef struct dtrain__winograd {
    dtrain__patches from, to;
    int64_t patches, block; /* number of patches, and of patches in a thread's block */
    float *filters;         /* transformed weights, or (parts) of their gradient */
    const float *bias;
    bool accumulate;
} dtrain__winograd;

/* Return the floats of one place of a block, padded by a cache line: otherwise the 36 places of a
 * patch would share few sets of L1. */
static inline int64_t dtrain__winograd_place(int64_t vectors, int64_t block, int64_t lanes)
{
    return (vectors * block + 1) * lanes;
}

/* Return one element as fp32. */
static inline float dtrain__element(const void *p, dtrain_dtype dtype, int64_t at)
{
    uint16_t half;
    float x;
    if (dtype <= DTRAIN_DTYPE_F32) {
        memcpy(&x, (const char *)p + at * 4, sizeof x);
        return x;
    }
    memcpy(&half, (const char *)p + at * 2, sizeof half);
    return dtrain_half_to_f32(dtype, half);
}

/* Return the row of wte for a row of tokens; negative if another part has the token. */
static inline int64_t dtrain__token_row(const dtrain_embedding_args *a, int64_t row)
{
    const int64_t at = a->tokens[row] - a->first_token;
    return at < a->vocab ? at : -1;
}

static inline int64_t dtrain__position(const dtrain_embedding_args *a, int64_t row)
{
    return (a->first_row + row) % a->sequence;
}

/* Return the number of columns that count on this rank. */
static inline int64_t dtrain__classes_here(const dtrain_cross_entropy_args *a)
{
    return a->classes < 0 ? 0 : a->classes ? a->classes : a->n;
}

/* Return the part of lse = top + log_sum that rounding removes; 0 if it is negligible. */
static inline float dtrain__lse_rest(float top, double log_sum, float lse)
{
    const double rest = log_sum - ((double)lse - (double)top);
    return fabs(rest) > 4e-6 && lse < INFINITY ? (float)rest : 0;
}

static inline int64_t dtrain__classes_whole(const dtrain_cross_entropy_args *a)
{
    return a->whole_classes ? a->whole_classes : dtrain__classes_here(a);
}

/* Return the column of a row's target; negative if it is ignored or on another rank. */
static inline int64_t dtrain__target_column(const dtrain_cross_entropy_args *a, int64_t row)
{
    const int64_t at = a->targets[row] - a->first_class;
    return a->targets[row] >= 0 && at < dtrain__classes_here(a) ? at : -1;
}

#define DTRAIN__TOPK_BLOCK 1024    /* elements between two checks of the remaining room */
#define DTRAIN__ATTENTION_BLOCK 64 /* queries and keys of an attention block */
#define DTRAIN__SUM_CHUNKS 256
#define DTRAIN__LINE 16 /* floats of a cache line: threads do not share lines */

/* Elements below which one thread is faster than several; tests set it to 0. */
#ifndef DTRAIN__SMALL
#define DTRAIN__SMALL 16384
#endif

/* One item of attention: the begin of its head in q, k, v (and their gradients) and in y and d_y
 * (`at`); the rest is scratch of this thread. */
typedef struct dtrain__head {
    const dtrain_attention_args *args;
    int64_t d, width, y_stride; /* width: d rounded up to a tile */
    int64_t keys;               /* number that count in this batch element */
    float scale;
    int64_t q, k, v, at;        /* elements */
    const float *mask;          /* (queries, all keys) or NULL */
    float *queries, *queries_t; /* (64, width), (width, 64): scaled, and transposed */
    float *rows;                /* (64, width): K, or V in the forward pass */
    float *scores;              /* (64 keys, 64 queries) */
    float *out;                 /* (64, width): O forward, dQ backward */
    float *top, *sum, *factor;  /* (64): running maximum and sum, rescaling of O */
    float *d_out, *d_out_t;     /* (64, width), (width, 64) */
    float *slopes;              /* (64, 64): dS^T */
    float *delta, *lse, *rest;  /* (64): rowsum(dO O) */
    float *d_keys, *d_values;   /* (keys rounded up to 64, width) */
    float *values;              /* (64, width): V of halves, backward */
    float *mask_rows, *mask_t;  /* (64, 64): part of the mask, and its transpose */
} dtrain__head;

/* The part of an attention product that is not zero. */
enum {
    DTRAIN__FULL = 0,
    DTRAIN__C_UPPER = 1, /* C is needed only for column >= row */
    DTRAIN__A_LOWER = 2, /* A is 0 for k > row */
    DTRAIN__A_UPPER = 3  /* A is 0 for k < row */
};

#define DTRAIN__STRING2(x) #x
#define DTRAIN__STRING(x) DTRAIN__STRING2(x)

/* device/cpu/kernels.c */
DTRAIN__PRIVATE const dtrain__isa *dtrain__pairs_select(void);
DTRAIN__PRIVATE const dtrain__kernels *dtrain__kernels_number(int number);
DTRAIN__PRIVATE const dtrain__kernels *dtrain__kernels_select(void);
