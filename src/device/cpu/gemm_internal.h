/* What the GEMM driver and its kernels share
 *
 * Matrix multiplication: what the driver (gemm.c) and the kernels of each instruction set share. */

#pragma once

#include "core/platform_internal.h"
#include "core/dtype.h"
#include "device/backend.h"

/* Whether the compiler has instructions for pairs of bf16; see device/cpu/kernels/pairs.h. */
#if defined(__x86_64__) && defined(__linux__) && !defined(DTRAIN_NO_SIMD) && \
    (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11) && !defined(__CUDACC__)
#define DTRAIN__PAIRS 1
#else
#define DTRAIN__PAIRS 0
#endif

enum {
    DTRAIN__KC = 384,  /* cells of k in a block: a panel of B takes 24 KiB of L1, 48 with AVX-512 */
    DTRAIN__MC = 264,  /* rows of a rectangle, 400 KiB of A; multiple of every mr but AMX's */
    DTRAIN__NC = 1536, /* columns of a rectangle; multiple of every nr */
    DTRAIN__MR_MAX = 32,
    DTRAIN__NR_MAX = 32
};

/* How to reach the elements of one operand: element (index, p), index counting rows of op(A) or
 * columns of op(B), p along k. */
typedef struct dtrain__operand {
    const void *data;
    dtrain_dtype dtype;
    int64_t ld;
    int along_k; /* neighbours in memory are neighbours in k */
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

/* What follows the last step of k, on a tile with nr floats a row. finish: bias and activation on
 * `rows` rows. slope: c *= activation'(z), both (mr, nr). load, store: between a rectangle and the
 * tile. */
typedef struct dtrain__tile_ops {
    void (*finish)(float *c, int64_t ldc, int rows, const float *bias, float *aux,
                   uint32_t activation);
    void (*slope)(float *c, const float *z, int count, uint32_t activation);
    void (*load)(float *tile, const dtrain__rectangle *from);
    void (*store)(const dtrain__rectangle *to, const float *tile);
} dtrain__tile_ops;

/* What an instruction set offers. A panel holds cells of 32 bits: an fp32 number, or two bf16 that
 * are neighbours in k. kernel: c (mr, nr) = alpha * a * b + beta * c over `cells`, a packed, b with
 * ldb cells from one k to the next. pack: `count` <= width indices from `index`, k steps from p.
 * finish: bias and activation on `rows` rows of nr elements. slope: c *= activation'(z), both
 * (mr, nr). load, store: between a rectangle and a tile with nr floats a row. begin, end: around
 * the work of a thread; may be NULL. */
typedef struct dtrain__isa {
    const char *name;
    int mr, nr;
    int pair;    /* elements in a cell: 1 (fp32) or 2 (bf16) */
    int unit;    /* a panel has a multiple of so many cells of k; what is too much is 0 */
    int packing; /* what packing an element costs, in multiply-adds */
    void (*kernel)(int64_t cells, const float *a, const float *b, int64_t ldb, float alpha,
                   float beta, float *c, int64_t ldc);
    dtrain__pack_fn pack_a, pack_b;
    const dtrain__tile_ops *tile;
    void (*begin)(void);
    void (*end)(void);
} dtrain__isa;
