/* Kernels: how work is cut
 *
 *     launcher              checks what only it can see, cuts the work, wakes the pool
 *       -> dtrain__job        what is common to all threads of one kernel
 *         -> range function     the arithmetic on [begin, end), one per instruction set
 *
 * The bits of a result depend on the instruction set, never on the number of threads: a sum is
 * either taken by one thread alone (rows, columns, heads) or over chunks whose size follows from
 * the arguments, whose sums are then added in order. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "device/backend.h"
#include "device/cpu/cpu_internal.h"
#include "device/cpu/gemm_internal.h"
#include "device/cpu/kernels_internal.h"
#include "device/device.h"

/* The text of the kernels is compiled once per instruction set: the file with it is included with
 * DTRAIN__ISA set. (dtrain.h includes itself, and what such an inclusion sees is its last part.) */
#ifndef DTRAIN__KERNEL_TEXT
#define DTRAIN__KERNEL_TEXT "device/cpu/kernels/text.h"
#endif
#if defined(__aarch64__)
#include <arm_neon.h>
#endif
#if !defined(DTRAIN_NO_SIMD)
#if defined(__x86_64__)
#define DTRAIN__ISA 3
#include DTRAIN__KERNEL_TEXT
#undef DTRAIN__ISA
#define DTRAIN__ISA 2
#include DTRAIN__KERNEL_TEXT
#undef DTRAIN__ISA
#endif
#define DTRAIN__ISA 1
#include DTRAIN__KERNEL_TEXT
#ifdef DTRAIN__TEST_INSTANCES
#define DTRAIN__TEST_WIDE
#include DTRAIN__KERNEL_TEXT
#undef DTRAIN__TEST_WIDE
#endif
#undef DTRAIN__ISA
#endif
#if defined(DTRAIN_NO_SIMD) || defined(DTRAIN__TEST_INSTANCES)
#define DTRAIN__ISA 0
#include DTRAIN__KERNEL_TEXT
#undef DTRAIN__ISA
#endif

/* The best instance that this machine runs. */
DTRAIN__PRIVATE const dtrain__kernels *dtrain__kernels_select(void)
{
#if defined(DTRAIN_NO_SIMD)
    return &dtrain__kernels_scalar;
#else
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        return &dtrain__kernels_avx512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return &dtrain__kernels_avx2; /* F16C came two generations earlier */
#endif
    return &dtrain__kernels_generic;
#endif
}

/* NULL: products of bf16 are computed in fp32. AMD starts a VDPBF16PS as often as a multiply-add;
 * Intel every other cycle or less, a quarter as often (62 against 130 GFLOP/s of the widened
 * product on Emerald Rapids), and has AMX. */
DTRAIN__PRIVATE const dtrain__isa *dtrain__pairs_select(void)
{
#if DTRAIN__PAIRS
    if (dtrain__has_amx()) return &dtrain__isa_amx;
    if (dtrain__has_vdpbf16() && __builtin_cpu_is("amd")) return &dtrain__isa_vdpbf16;
#endif
    return NULL;
}

DTRAIN_API const char *dtrain_cpu_kernel_name(void)
{
#ifdef DTRAIN_USE_CBLAS
    return "cblas";
#else
    return dtrain__kernels_select()->name;
#endif
}

DTRAIN_API const char *dtrain_cpu_bf16_kernel_name(void)
{
    const dtrain__isa *pairs = dtrain__pairs_select();
    return pairs ? pairs->name : dtrain_cpu_kernel_name();
}
