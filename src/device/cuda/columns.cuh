/* Orthonormal columns, for PowerSGD
 *
 * x (rows, columns <= 64) becomes orthonormal in two rounds, as on the CPU, each of three kernels.
 * A round computes G = X^T X in double, factors G = R^T R, and replaces X by X R^-1.
 *
 *     gram       each block sums G over a share of the rows
 *     factor     one block adds the shares in order, then Cholesky and the inverse
 *     recombine  X = X R^-1, row by row
 *
 * The shares depend on rows and columns alone, and so do the bits. A thread of gram has 4 by 4
 * elements of G, and a part of the block's rows where the elements are few. Bytes: 12 rows columns,
 * twice. Work: rows columns^2 multiply-adds in double for gram, half of it for recombine; memory is
 * the limit up to some 16 columns. */

#pragma once

#include "device/cuda/language.cuh"
#include "device/cuda/device.cuh"
#include "device/cuda/memory.cuh"

#include <math.h>

enum {
    DTRAIN_CUDA_BASIS_THREADS = 256,
    DTRAIN_CUDA_BASIS_SIDE = DTRAIN_ORTHOGONALIZE_COLUMNS,
    DTRAIN_CUDA_BASIS_FLOATS = 4096, /* of a tile of rows in shared memory */
    DTRAIN_CUDA_BASIS_BLOCKS = 256   /* of gram, at most */
};

struct dtrain_cuda_basis {
    float *x;
    int64_t rows, share; /* rows of a block of gram: a multiple of tile */
    int columns, padded; /* padded: to a multiple of 4 */
    int tile;            /* rows in shared memory */
    int blocks;
    double *sums;   /* (blocks, columns, columns) upper triangles */
    double *factor; /* (columns, columns) */
};

/* Copy rows [row, row + count) to shared memory, with zeros behind the last column. */
static __device__ __forceinline__ void dtrain_cuda_basis_load(const dtrain_cuda_basis &basis,
                                                              int64_t row, int count, float *tile)
{
    for (int at = threadIdx.x; at < count * basis.padded; at += DTRAIN_CUDA_BASIS_THREADS) {
        const int i = at / basis.padded, j = at % basis.padded;
        tile[at] = j < basis.columns ? basis.x[(row + i) * basis.columns + j] : 0;
    }
    __syncthreads();
}

static __global__ void __launch_bounds__(DTRAIN_CUDA_BASIS_THREADS)
    dtrain_cuda_gram_kernel(dtrain_cuda_basis basis)
{
    __shared__ float tile[DTRAIN_CUDA_BASIS_FLOATS];
    __shared__ double parts[DTRAIN_CUDA_BASIS_THREADS];
    const int side = basis.padded / 4, squares = side * side;
    const int groups = DTRAIN_CUDA_BASIS_THREADS / squares; /* each takes every groups-th row */
    const int square = threadIdx.x % squares, group = threadIdx.x / squares;
    const int i = 4 * (square / side), j = 4 * (square % side);
    const int64_t begin = blockIdx.x * basis.share,
                  left = basis.rows - begin < basis.share ? basis.rows - begin : basis.share;
    double sum[4][4] = {};
    for (int64_t row = 0; row < left; row += basis.tile) {
        const int count = left - row < basis.tile ? (int)(left - row) : basis.tile;
        dtrain_cuda_basis_load(basis, begin + row, count, tile);
        for (int r = group; r < count && group < groups && i <= j; r += groups) {
            const float *const x = tile + r * basis.padded;
            DTRAIN_CUDA_UNROLL
            for (int a = 0; a < 4; a++) {
                DTRAIN_CUDA_UNROLL
                for (int b = 0; b < 4; b++) sum[a][b] += (double)x[i + a] * (double)x[j + b];
            }
        }
        __syncthreads();
    }
    double *const out = basis.sums + (int64_t)blockIdx.x * basis.columns * basis.columns;
    DTRAIN_CUDA_UNROLL
    for (int a = 0; a < 4; a++) {
        DTRAIN_CUDA_UNROLL
        for (int b = 0; b < 4; b++) {
            parts[threadIdx.x] = sum[a][b];
            __syncthreads();
            if (group == 0 && i + a < basis.columns && j + b < basis.columns && i <= j) {
                double total = 0;
                for (int g = 0; g < groups; g++) total += parts[g * squares + square];
                out[(i + a) * basis.columns + j + b] = total;
            }
            __syncthreads();
        }
    }
}

/* Factor G and invert the factor. A thread has a column; row j of R follows from the rows before
 * it. A column that has less than 1e-6 of its length left is spanned by the columns before it and
 * gets an inverse of 0. A G that is not finite makes everything NaN. */
static __global__ void __launch_bounds__(DTRAIN_CUDA_BASIS_SIDE)
    dtrain_cuda_basis_factor_kernel(dtrain_cuda_basis basis)
{
    __shared__ double r[DTRAIN_CUDA_BASIS_SIDE][DTRAIN_CUDA_BASIS_SIDE],
        inverse[DTRAIN_CUDA_BASIS_SIDE];
    const int n = basis.columns, k = threadIdx.x;
    for (int i = 0; i < n && k < n; i++) {
        double sum = 0;
        for (int b = 0; b < basis.blocks && k >= i; b++)
            sum += basis.sums[((int64_t)b * n + i) * n + k];
        r[i][k] = sum;
    }
    __syncthreads();
    bool finite = true;
    for (int i = 0; i < n; i++) finite = finite && r[i][i] <= 1.7976931348623157e308;
    __syncthreads();
    for (int j = 0; j < n; j++) {
        double value = 0;
        if (k >= j && k < n) {
            value = r[j][k];
            for (int i = 0; i < j; i++) value -= r[i][j] * r[i][k];
        }
        if (k == j) inverse[j] = value > 1e-12 * r[j][j] ? 1 / sqrt(value) : 0;
        __syncthreads();
        if (k >= j && k < n) r[j][k] = value * inverse[j];
        __syncthreads();
    }
    for (int i = n - 1; i >= 0 && k < n; i--) {
        double value = i == k ? inverse[k] : 0;
        if (i < k && inverse[k] > 0) {
            for (int l = i + 1; l <= k; l++) value += r[i][l] * basis.factor[l * n + k];
            value *= -inverse[i];
        }
        basis.factor[i * n + k] = finite ? value : __longlong_as_double(0x7ff8000000000000ll);
    }
}

static __global__ void __launch_bounds__(DTRAIN_CUDA_BASIS_THREADS)
    dtrain_cuda_recombine_kernel(dtrain_cuda_basis basis)
{
    __shared__ float tile[DTRAIN_CUDA_BASIS_FLOATS];
    for (int64_t row = (int64_t)blockIdx.x * basis.tile; row < basis.rows;
         row += (int64_t)gridDim.x * basis.tile) {
        const int count = basis.rows - row < basis.tile ? (int)(basis.rows - row) : basis.tile;
        dtrain_cuda_basis_load(basis, row, count, tile);
        for (int at = threadIdx.x; at < count * basis.columns; at += DTRAIN_CUDA_BASIS_THREADS) {
            const int i = at / basis.columns, k = at % basis.columns;
            double sum = 0;
            for (int l = 0; l <= k; l++)
                sum += (double)tile[i * basis.padded + l] * basis.factor[l * basis.columns + k];
            basis.x[row * basis.columns + at] = (float)sum;
        }
        __syncthreads();
    }
}

static dtrain_result dtrain_cuda_orthogonalize(dtrain_device *device,
                                               const dtrain_orthogonalize_args *args)
{
    if (args->rows < 0 || args->columns < 1 || args->columns > DTRAIN_ORTHOGONALIZE_COLUMNS)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "orthogonalize: %lld rows, %lld columns; expected 1 to %d columns",
                           (long long)args->rows, (long long)args->columns,
                           DTRAIN_ORTHOGONALIZE_COLUMNS);
    if (args->rows == 0) return DTRAIN_OK;
    dtrain_cuda_basis basis = {};
    basis.x = args->x;
    basis.rows = args->rows;
    basis.columns = (int)args->columns;
    basis.padded = (basis.columns + 3) / 4 * 4;
    const int most = DTRAIN_CUDA_BASIS_FLOATS / basis.padded;
    basis.tile = most < 256 ? most : 256;
    const int64_t tiles = (args->rows + basis.tile - 1) / basis.tile;
    basis.share = (tiles + DTRAIN_CUDA_BASIS_BLOCKS - 1) / DTRAIN_CUDA_BASIS_BLOCKS * basis.tile;
    basis.blocks = (int)((args->rows + basis.share - 1) / basis.share);
    const size_t square = (size_t)basis.columns * basis.columns;
    void *scratch;
    DTRAIN_CUDA_TRY(
        dtrain_cuda_scratch(device, (basis.blocks + 1) * square * sizeof(double), &scratch));
    basis.factor = (double *)scratch;
    basis.sums = basis.factor + square;
    const int64_t full = (int64_t)dtrain_cuda_state_of(device)->multiprocessors * 8;
    for (int round = 0; round < 2; round++) {
        DTRAIN_CUDA_TRY(DTRAIN_CUDA_RUN(device, "orthogonalize, gram", dtrain_cuda_gram_kernel,
                                        basis.blocks, DTRAIN_CUDA_BASIS_THREADS, 0, basis));
        DTRAIN_CUDA_TRY(DTRAIN_CUDA_RUN(device, "orthogonalize, factor",
                                        dtrain_cuda_basis_factor_kernel, 1, DTRAIN_CUDA_BASIS_SIDE,
                                        0, basis));
        DTRAIN_CUDA_TRY(DTRAIN_CUDA_RUN(device, "orthogonalize, recombine",
                                        dtrain_cuda_recombine_kernel, tiles < full ? tiles : full,
                                        DTRAIN_CUDA_BASIS_THREADS, 0, basis));
    }
    return DTRAIN_OK;
}
