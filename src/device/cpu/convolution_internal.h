/* Structures of the launchers of convolutions */

#pragma once

#include "core/platform_internal.h"
#include "core/result.h"
#include "device/backend.h"
#include "device/cpu/cpu_internal.h"
#include "device/cpu/kernels_internal.h"

/* A convolution of one group. */
typedef struct dtrain__conv {
    dtrain__cpu *cpu;
    dtrain_windows2d windows;
    int64_t in, out, in_all, out_all; /* channels of the group, of all */
    int64_t taps, pixels;             /* of the output */
    int64_t group;
    const char *x, *weight, *d_y; /* from the group's first channel on; d_y is y in forward */
    const float *bias;
    dtrain_dtype dtype;
    bool patches;   /* launch_winograd.c computes it */
    float *packed;  /* scratch */
    int32_t *order; /* (2, taps) of scratch: natural order, order of a class */
} dtrain__conv;

/* device/cpu/launch_winograd.c */
DTRAIN__PRIVATE bool dtrain__winograd_fits(const dtrain__conv *conv);
DTRAIN__PRIVATE int64_t dtrain__winograd_floats(const dtrain__conv *conv);
DTRAIN__PRIVATE dtrain_result dtrain__winograd_forward(const dtrain__conv *conv,
                                                       const dtrain__conv_weight *weight);
DTRAIN__PRIVATE dtrain_result dtrain__winograd_input_grad(const dtrain__conv *conv,
                                                          dtrain__conv_weight weight, void *d_x,
                                                          dtrain_dtype x_dtype, bool accumulate);
DTRAIN__PRIVATE dtrain_result dtrain__winograd_weight_grad(const dtrain__conv *conv,
                                                           dtrain__conv_weight weight,
                                                           float *d_weight, bool accumulate);
