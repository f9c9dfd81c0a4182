/* Matrix multiplication: structures of the driver (gemm.c) and the kernels */

#pragma once

#include "core/platform_internal.h"
#include "core/dtype.h"
#include "device/backend.h"

/* The compiled instances of the kernels: on x86 AVX-512, AVX2, and scalars for machines without
 * AVX2, where only correctness counts; with DTRAIN_NATIVE only -march's. */
#if defined(DTRAIN_NO_SIMD)
#define DTRAIN__HAS_SCALAR 1
#elif !defined(__x86_64__)
#define DTRAIN__HAS_GENERIC 1
#elif !defined(DTRAIN_NATIVE)
#define DTRAIN__HAS_AVX512 1
#define DTRAIN__HAS_AVX2 1
#define DTRAIN__HAS_SCALAR 1
#elif defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && \
    defined(__AVX512DQ__)
#define DTRAIN__HAS_AVX512 1
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define DTRAIN__HAS_AVX2 1
#else
#error "DTRAIN_NATIVE compiles the kernels of -march alone: add -march=native, or leave it out"
#endif

/* 1 if the compiler has instructions for pairs of bf16; see device/cpu/kernels/pairs.h. */
#if DTRAIN__HAS_AVX512 && DTRAIN__MODELS && defined(__linux__) && \
    (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11) && !defined(__CUDACC__)
#define DTRAIN__PAIRS 1
#else
#define DTRAIN__PAIRS 0
#endif

enum {
    DTRAIN__KC = 384, /* cells of k in a block: a panel of B takes 24 KiB of L1, 48 with AVX-512 */
    DTRAIN__PITCH = DTRAIN__KC + 16, /* from row to row of a panel of rows; not 2^n cache lines */
    DTRAIN__MC = 264,  /* rows of a rectangle, 400 KiB of A; multiple of every mr but AMX's */
    DTRAIN__NC = 1536, /* columns of a rectangle; multiple of every nr */
    DTRAIN__MR_MAX = 32,
    DTRAIN__NR_MAX = 32
};

/* A matrix that is never in memory: row r is window r of images (height, width, channels), its
 * columns are taps with `depth` channels each. The windows of an image begin at pixels
 * (i*stride[0], j*stride[1]), i < rows, j < columns; tap (a, b) is the pixel y[a] lower and x[b] to
 * the right, or 0 outside the image. */
typedef struct dtrain__windows {
    int64_t height, width, channels, depth;
    int64_t rows, columns, stride[2];
    int64_t tap_rows, tap_columns;
    bool joined; /* the taps of a row are one run in memory, if all are inside */
    int32_t y[DTRAIN_CONV2D_KERNEL], x[DTRAIN_CONV2D_KERNEL];
} dtrain__windows;

/* The begin of a window; image: elements from the first image. */
typedef struct dtrain__corner {
    int64_t image, row, column;
} dtrain__corner;

static inline dtrain__corner dtrain__window_corner(const dtrain__windows *w, int64_t index)
{
    dtrain__corner at;
    at.column = index % w->columns;
    at.row = index / w->columns % w->rows;
    at.image = index / w->columns / w->rows * (w->height * w->width * w->channels);
    return at;
}

static inline void dtrain__window_next(const dtrain__windows *w, dtrain__corner *at)
{
    if (++at->column < w->columns) return;
    at->column = 0;
    if (++at->row < w->rows) return;
    at->row = 0;
    at->image += w->height * w->width * w->channels;
}

/* Return the first element of a tap's channels; -1: outside. */
static inline int64_t dtrain__window_tap(const dtrain__windows *w, const dtrain__corner *at,
                                         int64_t a, int64_t b)
{
    const int64_t y = at->row * w->stride[0] + w->y[a], x = at->column * w->stride[1] + w->x[b];
    if (y < 0 || y >= w->height || x < 0 || x >= w->width) return -1;
    return at->image + (y * w->width + x) * w->channels;
}

/* One operand: its element (index, p) has row `index` of op(A) or column `index` of op(B), p along
 * k. Windows are the rows of op(A) if along_k, else its columns. */
typedef struct dtrain__operand {
    const void *data;
    dtrain_dtype dtype;
    int64_t ld;
    int along_k;                    /* neighbours in memory are neighbours in k */
    const dtrain__windows *windows; /* NULL: rows are ld elements apart */
} dtrain__operand;

typedef void (*dtrain__pack_fn)(float *panel, const dtrain__operand *x, int64_t index, int count,
                                int64_t p, int k);

/* A part of a matrix in memory. */
typedef struct dtrain__rectangle {
    void *data;
    dtrain_dtype dtype;
    int64_t ld;
    int rows, cols;
} dtrain__rectangle;

/* Operations after the last step of k, on a tile with n = nr floats a row. finish: bias and
 * activation on `rows` rows. slope: c *= activation'(z), both (mr, nr). load, store: copy between a
 * rectangle and the tile. */
typedef struct dtrain__tile_ops {
    void (*finish)(float *c, int64_t ldc, int n, int rows, const float *bias, float *aux,
                   uint32_t activation);
    void (*slope)(float *c, const float *z, int count, uint32_t activation);
    void (*load)(float *tile, int n, const dtrain__rectangle *from);
    void (*store)(const dtrain__rectangle *to, const float *tile, int n);
} dtrain__tile_ops;

/* Products of an instruction set. A panel holds cells of 32 bits: an fp32 number, or two bf16 that
 * are neighbours in k. kernel: c (mr, nr) = alpha * a * b + beta * c over `cells`, a packed, b with
 * ldb cells from one k to the next. pack: `count` <= width indices from `index`, k steps from p.
 * begin, end: around the work of a thread; or NULL. */
typedef struct dtrain__isa {
    const char *name;
    int mr, nr;
    int pair;    /* elements in a cell: 1 (fp32) or 2 (bf16) */
    int unit;    /* cells of k in a panel are a multiple of it, padded with 0 */
    int packing; /* cost of packing an element, in multiply-adds */
    int pitch;   /* floats between consecutive rows of a panel of A; 0: rows lie side by side */
    void (*kernel)(int64_t cells, const float *a, const float *b, int64_t ldb, float alpha,
                   float beta, float *c, int64_t ldc);
    dtrain__pack_fn pack_a, pack_b;
    const dtrain__tile_ops *tile;
    void (*begin)(void);
    void (*end)(void);
} dtrain__isa;

/* The driver's arguments. */
typedef struct dtrain__gemm_call {
    const dtrain_gemm_args *args; /* sizes, factors, C, epilogue; not the operands */
    const dtrain__isa *isa;
    dtrain__operand a, b;
    const dtrain__windows
        *c_rows;     /* row i of C is tap (0,0) of window i; NULL: ldc elements apart */
    int64_t parts;   /* number of parts of k, each with its C after the last part's */
    int64_t reserve; /* floats at the beginning of scratch that the caller uses */
} dtrain__gemm_call;
