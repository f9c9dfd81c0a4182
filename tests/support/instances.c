/* instances.c: see instances.h. It takes the place of src/device/cpu/kernels.c in programs that are linked with it. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi" /* wide vectors are arguments of inlined functions only */
#endif
#if defined(__x86_64__)
#include "emulated_tiles.h"
#endif
#define DTRAIN__TEST_INSTANCES
#include "device/cpu/kernels.c"
#include "instances.h"

#include "dtrain.h"
#include "test.h"

static void add(const dtrain__kernels **found, int *count, const dtrain__kernels *kernels)
{
    if (*count == 0 || found[0] != kernels) found[(*count)++] = kernels;
}

int instances_find(const dtrain__kernels *found[INSTANCES])
{
    int count = 0;
    add(found, &count, dtrain__kernels_select());
    if (TEST_RACES) return count;
#if !defined(DTRAIN_NO_SIMD)
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        add(found, &count, &dtrain__kernels_avx2);
#endif
    add(found, &count, &dtrain__kernels_generic);
    add(found, &count, &dtrain__kernels_wide);
#endif
    add(found, &count, &dtrain__kernels_scalar);
    return count;
}

const dtrain__dots *instances_dots(const dtrain__kernels *kernels)
{
#if DTRAIN__PAIRS
    if (kernels == &dtrain__kernels_wide) return &dtrain__dots_wide;
#endif
    return kernels == dtrain__kernels_select() ? dtrain__dots_select() : NULL;
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
