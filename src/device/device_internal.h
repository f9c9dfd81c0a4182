/* What other rooms use of a device. */

#pragma once

#include "core/platform_internal.h"
#include "device/backend.h"

/* device/device.c */
DTRAIN__PRIVATE bool dtrain__on_host(dtrain_device *device, const void *memory);

/* Inputs of several ranks, which are combined in this order into equal outputs. */
typedef struct dtrain__mix_job {
    const char *const *in; /* (in_count), 2 or more */
    char *const *out;      /* (out_count) */
    int in_count, out_count;
    size_t count; /* elements */
    dtrain_dtype dtype;
    uint32_t op; /* dtrain_reduce_op */
} dtrain__mix_job;

/* device/cpu/mix.c */
DTRAIN__PRIVATE void dtrain__mix(const dtrain__mix_job *job);
