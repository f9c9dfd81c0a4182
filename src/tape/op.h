/* Custom operations
 *
 * An operation is a constant dtrain_op_desc and a call of dtrain_tape_apply. The built-in
 * operations (tape/norms.c) use the same two; examples/own_operation.c is a complete program. A
 * call lives from dtrain_tape_apply until the next dtrain_tape_begin and has three steps:
 *
 *     prepare    once: check shapes, make the outputs, take memory that backward will read
 *     forward    compute outputs and saved memory from inputs and parameters. Runs once more, to
 *                the same bits, if activation checkpointing has dropped the results: the seed of
 *                random numbers is an argument, or prepare draws it
 *     backward   compute gradients of inputs and parameters from the gradients of the outputs
 *
 * All addresses in a dtrain_op are device memory. If device->ops->host_memory is true, as on the
 * CPU device, a loop in C can read and write them. Code for a GPU calls the kernels of device->ops
 * (device/backend.h), or launches its own on device->ops->stream_native(device, NULL): work runs in
 * the order of the compute stream and needs no synchronisation. */

#pragma once

#include "core/api.h"
#include "core/dtype.h"
#include "core/result.h"
#include "strategy/params.h"
#include "tape/tape.h"
#include "device/device.h"

#define DTRAIN_OP_INPUTS 8 /* at most, in one call */
#define DTRAIN_OP_PARAMS 8
#define DTRAIN_OP_OUTPUTS 2

/* Tensors that backward reads besides gradients, parameters and saved memory. Activation
 * checkpointing recomputes only these tensors; other outputs can be overwritten. */
#define DTRAIN_OP_READS_INPUTS 1u
#define DTRAIN_OP_READS_OUTPUTS 2u
/* Backward can run in two halves (op->half): for the gradients of inputs and later, after other
 * micro-batches, for the gradients of parameters. A zero-bubble pipeline (parallel/pipeline.h) runs
 * the second half instead of waiting. In each half, calls for gradients of the other half return
 * NULL. The first half always runs, also if no input wants a gradient, and the second sees what it
 * has changed in place. Without this flag, or if activation checkpointing drops the results, the
 * first half makes all gradients. */
#define DTRAIN_OP_SPLITS 4u

/* Placements of inputs over the tensor axis that an operation accepts besides whole tensors; an
 * input of another placement is an error that names both. Outputs have the placement of the first
 * input that is not I32. I32 inputs are always whole, and are an error beside rows. An output as
 * wide as each of several equal components of that input (q of a packed q|k|v) is cut like such a
 * component. Parameters of these operations are not cut. */
#define DTRAIN_OP_TAKES_COLUMNS 1u
#define DTRAIN_OP_TAKES_ROWS 2u

typedef enum dtrain_op_half {
    DTRAIN_OP_HALF_BOTH = 0,
    DTRAIN_OP_HALF_INPUTS = 1,
    DTRAIN_OP_HALF_PARAMS = 2
} dtrain_op_half;

typedef struct dtrain_op_desc dtrain_op_desc;

/* One call of an operation. The tensors have shapes and gradients; kernels read and write values at
 * the addresses below, which stay the same for the whole call (tensor->data can move). */
typedef struct dtrain_op {
    const dtrain_op_desc *desc;
    dtrain_tape *tape;
    dtrain_device *device;
    void *args; /* this call's copy of the arguments; prepare can store addresses in it */
    uint32_t input_count, output_count, param_count;
    uint32_t reads;    /* the desc's; prepare can change it for this call */
    dtrain_dtype cast; /* the type of autocast in this pass; F32 without autocast */
    uint32_t half;     /* dtrain_op_half: the gradients that this call of backward makes */
    bool needs_grad;   /* false: backward is not called, and nothing has to be saved */
    bool planning;     /* true on the plan device, whose addresses have no memory: forward is not
                          called, backward asks for gradients but reads and writes none */
    dtrain_tensor *inputs[DTRAIN_OP_INPUTS], *outputs[DTRAIN_OP_OUTPUTS];
    dtrain_param *params[DTRAIN_OP_PARAMS];
    const void *input_data[DTRAIN_OP_INPUTS]; /* of inputs[i]->dtype, or see autocast */
    const void *param_data[DTRAIN_OP_PARAMS]; /* fp32, or see autocast; the unit is gathered */
    int64_t param_shape[DTRAIN_OP_PARAMS][4]; /* leading non-zero entries, at least one */
    void *output_data[DTRAIN_OP_OUTPUTS];     /* of outputs[i]->dtype */
} dtrain_op;

struct dtrain_op_desc {
    uint32_t reads;          /* DTRAIN_OP_READS_*, DTRAIN_OP_SPLITS */
    uint32_t recompute;      /* the DTRAIN_RECOMPUTE_* that drops its results; 0 = none */
    uint32_t integer_inputs; /* bit i: input i is I32; the others are F32, BF16 or F16 */
    uint32_t placements;     /* DTRAIN_OP_TAKES_*; 0 = whole tensors */
    bool autocast;           /* input_data, and param_data of parameters with two or more axes, have
                                 the type `cast`. A gradient keeps the type of its tensor */
    const char *name;        /* first word of error sentences */
    dtrain_result (*prepare)(dtrain_op *op); /* makes at least outputs[0] */
    dtrain_result (*forward)(dtrain_op *op);
    dtrain_result (*backward)(dtrain_op *op);
};

/* Run an operation on the tape and return its first output; NULL after an error, which sticks.
 * Checks inputs and parameters: not NULL, of the right type, in the gathered unit. The desc must
 * outlive the pass; args (args_bytes) are copied, or zeroed if args is NULL. */
DTRAIN_API dtrain_tensor *dtrain_tape_apply(dtrain_tape *tape, const dtrain_op_desc *desc,
                                            dtrain_tensor *const *inputs, uint32_t input_count,
                                            dtrain_param *const *params, uint32_t param_count,
                                            const void *args, size_t args_bytes);

/* Prepare and backward call the functions below. Their errors stick to the tape, which stops after
 * prepare or backward: an address that is only stored needs no check for NULL. */

/* Make the next output, contents undefined (in prepare). */
DTRAIN_API dtrain_tensor *dtrain_op_output(dtrain_op *op, dtrain_dtype dtype, uint32_t ndim,
                                           const int64_t *shape);
/* Take memory for `count` values that forward writes and backward reads (in prepare). */
DTRAIN_API void *dtrain_op_save(dtrain_op *op, dtrain_dtype dtype, int64_t count);
/* Require the shape (rows, columns) of parameter i, or (rows) if columns is 0; -1 is any length (in
 * prepare). */
DTRAIN_API dtrain_result dtrain_op_check_param(const dtrain_op *op, uint32_t i, int64_t rows,
                                               int64_t columns);

/* Backward reads outputs[i]->grad, of the output's type. The gradient of output 0 always exists
 * (zeros if the loss does not depend on it); NULL for another output means zero. Backward writes
 * every gradient that it asks for, and writes the gradient of one input before it asks for the
 * next: both inputs can be one tensor. */

/* Return the address for the gradient of input i, of the input's type; NULL if none is wanted (in
 * backward). *accumulate says whether to add to the old contents or to overwrite them; with
 * accumulate NULL the caller overwrites, and the tape adds the old contents after backward. */
DTRAIN_API void *dtrain_op_input_grad(dtrain_op *op, uint32_t i, bool *accumulate);
/* Return the address for the fp32 gradient of parameter i, and whether to add to it; NULL if none
 * is wanted (in backward). */
DTRAIN_API float *dtrain_op_param_grad(dtrain_op *op, uint32_t i, bool *accumulate);
