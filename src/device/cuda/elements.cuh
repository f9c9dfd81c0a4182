/* Elementwise: the loop of all such kernels
 *
 * Memory bandwidth is the limit. A thread takes packs of W neighbouring elements, with W such that
 * the widest type of the operation fills 16 bytes: 4 with a float, else 8. Two packs are loaded
 * before the first is stored, because memory can be updated in place and the compiler would not
 * move a load above a store. Unaligned pointers and the last elements are processed one element at
 * a time, so that neighbouring threads still read neighbouring elements.
 *
 * An operation is a struct with `load(i, group)` and `store(i, group)`, where `group` holds one
 * pack of each operand. A group is zeroed before load, so an operand that load skips reads as 0. */

#pragma once

#include "device/cuda/device.cuh"

enum { DTRAIN_CUDA_EACH_THREADS = 256 };

template <typename Op>
static __global__ void __launch_bounds__(DTRAIN_CUDA_EACH_THREADS, 2)
    dtrain_cuda_each_kernel(const Op op, int64_t groups, int64_t count)
{
    constexpr int W = Op::width;
    const int64_t threads = (int64_t)gridDim.x * blockDim.x;
    const int64_t me = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    int64_t at = me;
    for (; at + threads < groups; at += 2 * threads) {
        typename Op::template group<W> near = {}, far = {};
        op.load(at * W, near);
        op.load((at + threads) * W, far);
        op.store(at * W, near);
        op.store((at + threads) * W, far);
    }
    if (at < groups) {
        typename Op::template group<W> last = {};
        op.load(at * W, last);
        op.store(at * W, last);
    }
    for (int64_t i = groups * W + me; i < count; i += threads) {
        typename Op::template group<1> single = {};
        op.load(i, single);
        op.store(i, single);
    }
}

template <typename Op>
static dtrain_result dtrain_cuda_each(dtrain_device *device, const char *name, const Op &op,
                                      int64_t count, bool aligned)
{
    if (count <= 0) return DTRAIN_OK;
    const int64_t groups = aligned ? count / Op::width : 0;
    const int64_t items = groups ? (groups + 1) / 2 : count;
    const int64_t blocks =
        dtrain_cuda_blocks(dtrain_cuda_state_of(device), items, DTRAIN_CUDA_EACH_THREADS);
    return DTRAIN_CUDA_RUN(device, name, dtrain_cuda_each_kernel<Op>, blocks,
                           DTRAIN_CUDA_EACH_THREADS, 0, op, groups, count);
}
