/* What other files may use of tape/ beside the public API. */

#pragma once

#include "core/platform_internal.h"
#include "core/dtype.h"
#include "core/result.h"
#include "strategy/params.h"
#include "tape/tape.h"
#include "tape/tape_internal.h"

typedef struct dtrain__text {
    char text[96];
} dtrain__text;

/* tape/ops.c */
DTRAIN__PRIVATE dtrain_node *dtrain__op(dtrain_tape *tape, const char *name, uint32_t kind,
                                        dtrain_result (*backward)(dtrain_tape *, dtrain_node *),
                                        dtrain_tensor *first, dtrain_tensor *second);
DTRAIN__PRIVATE const char *dtrain__shape_text(uint32_t ndim, const int64_t *shape,
                                               dtrain__text *to);
DTRAIN__PRIVATE bool dtrain__check_input(dtrain_tape *tape, dtrain_node *node, int i,
                                         dtrain_dtype dtype);
DTRAIN__PRIVATE uint32_t dtrain__param_shape(dtrain_param *p, int64_t shape[4]);
DTRAIN__PRIVATE int64_t dtrain__param_rows(dtrain_param *p);
DTRAIN__PRIVATE const char *dtrain__param_name(const dtrain_param *p);
DTRAIN__PRIVATE bool dtrain__check_param(dtrain_tape *tape, dtrain_node *node, int i,
                                         dtrain_param *p, int64_t rows, int64_t columns);
DTRAIN__PRIVATE float *dtrain__param_value(dtrain_param *p);
DTRAIN__PRIVATE void *dtrain__output(dtrain_tape *tape, dtrain_node *node, const dtrain_tensor *x,
                                     int64_t n, uint32_t dtype);
DTRAIN__PRIVATE float *dtrain__take_floats(dtrain_tape *tape, const dtrain_node *node,
                                           int64_t count);
DTRAIN__PRIVATE const void *dtrain__cast_to(dtrain_tape *tape, const void *values, uint32_t from,
                                            dtrain_dtype to, int64_t count);
DTRAIN__PRIVATE const void *dtrain__cast_input(dtrain_tape *tape, dtrain_node *node);
DTRAIN__PRIVATE const void *dtrain__cast_weight(dtrain_tape *tape, dtrain_param *p);
DTRAIN__PRIVATE dtrain_tensor *dtrain__record(dtrain_tape *tape, dtrain_node *node,
                                              dtrain_result kernel);
DTRAIN__PRIVATE int64_t dtrain__last_axis(const dtrain_tensor *x);
DTRAIN__PRIVATE dtrain_dtype dtrain__dtype(const dtrain_tensor *x);

/* tape/layers.c */
DTRAIN__PRIVATE dtrain_tensor *dtrain__layernorm(dtrain_tape *tape, const char *name,
                                                 dtrain_tensor *x, dtrain_param *weight,
                                                 dtrain_param *bias, const dtrain_node *sum);

/* Kernels as a node calls them: tape/ops.c */
DTRAIN__PRIVATE dtrain_result dtrain__call_gemm(dtrain_device *device, const void *args);
DTRAIN__PRIVATE dtrain_result dtrain__call_layernorm(dtrain_device *device, const void *args);
DTRAIN__PRIVATE dtrain_result dtrain__call_embedding(dtrain_device *device, const void *args);
DTRAIN__PRIVATE dtrain_result dtrain__call_attention(dtrain_device *device, const void *args);
DTRAIN__PRIVATE dtrain_result dtrain__call_add(dtrain_device *device, const void *args);
DTRAIN__PRIVATE dtrain_result dtrain__call_axpby(dtrain_device *device, const void *args);
DTRAIN__PRIVATE dtrain_result dtrain__call_dropout(dtrain_device *device, const void *args);
DTRAIN__PRIVATE dtrain_result dtrain__call_convert(dtrain_device *device, const void *args);
