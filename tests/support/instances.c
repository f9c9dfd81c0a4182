/* instances.c: see instances.h. The text of the kernels once more, for what the library does not compile. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi" /* wide vectors are arguments of static functions only */
#endif
#if defined(__x86_64__)
#include "emulated_tiles.h"
#endif
#define DTRAIN__INTRINSICS
#if defined(__aarch64__)
#include <arm_neon.h>
#endif
#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "device/backend.h"
#include "device/cpu/cpu_internal.h"
#include "device/cpu/gemm_internal.h"
#include "instances.h"
#include "device/device.h"
#include "device/device_internal.h"

#if !defined(DTRAIN_NO_SIMD)
#define DTRAIN__ISA 1
#define DTRAIN__TEST_WIDE
#include "device/cpu/kernels/text.h"
#undef DTRAIN__TEST_WIDE
#include "device/cpu/kernels/text.h"
#undef DTRAIN__ISA
#endif
#define DTRAIN__ISA 0
#include "device/cpu/kernels/text.h"
#undef DTRAIN__ISA

#include "dtrain.h"
#include "test.h"

int instances_find(const dtrain__kernels *found[INSTANCES])
{
    int count = 0;
    while ((found[count] = dtrain__kernels_number(count)) != NULL)
        if (count++ == 0 && TEST_RACES) return count;
#if !defined(DTRAIN_NO_SIMD)
    found[count++] = &dtrain__kernels_wide;
#if DTRAIN__HAS_GENERIC
    found[count++] = &dtrain__kernels_scalar;
#else
    found[count++] = &dtrain__kernels_generic;
#endif
#endif
    return count;
}

const dtrain__isa *instances_emulated_tiles(void)
{
#if DTRAIN__PAIRS
    return &dtrain__isa_amx_wide;
#else
    return NULL;
#endif
}

float instances_exp(float x) { return dtrain__vexp_scalar(dtrain__vset_scalar(x))[0]; }
float instances_gelu(float x) { return dtrain__vgelu_scalar(dtrain__vset_scalar(x))[0]; }
float instances_gelu_slope(float x)
{
    return dtrain__vgelu_slope_scalar(dtrain__vset_scalar(x))[0];
}
