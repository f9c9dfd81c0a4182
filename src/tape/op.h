/* Operations of one's own
 *
 * An operation is a constant dtrain_op_desc and a call of dtrain_tape_apply; the built-in ones
 * (tape/norms.c) are made of the same two, and examples/own_operation.c is a complete program. A
 * call lives from dtrain_tape_apply until the next dtrain_tape_begin and has three stations:
 *
 *     prepare    once: check shapes, make the outputs, take memory for what backward will read
 *     forward    compute outputs and saved memory from inputs and parameters; once, and once more,
 *                to the same bits, where activation checkpointing has dropped the results (the seed
 *                of random numbers is therefore an argument, or drawn in prepare)
 *     backward   compute gradients of inputs and parameters from the gradients of the outputs
 *
 * All addresses in a dtrain_op are device memory. Where device->ops->host_memory is true, as on the
 * CPU device, a loop in C may read and write them. Code for a GPU calls the kernels of device->ops
 * (device/backend.h), or launches its own on device->ops->stream_native(device, NULL): work runs in
 * the order of the compute stream, and nothing has to be synchronised. */

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

/* What backward reads beside gradients, parameters and saved memory. Activation checkpointing makes
 * again only what somebody reads, and an output that nobody reads may be overwritten. */
#define DTRAIN_OP_READS_INPUTS 1u
#define DTRAIN_OP_READS_OUTPUTS 2u
/* Backward may be called once for each half: for the gradients of inputs and later, when other
 * micro-batches have had theirs, for those of parameters (op->half). A zero-bubble pipeline
 * (parallel/pipeline.h) then makes the second half while it would wait. In each half the calls for
 * gradients of the other answer NULL; what the first half changes in place the second one finds
 * changed: it has been called, also where no input wants a gradient. An operation without this flag
 * makes all gradients in the first half, as every operation does whose results activation
 * checkpointing drops. */
#define DTRAIN_OP_SPLITS 4u

/* Placements of inputs over the tensor axis that an operation takes beside whole tensors; its
 * outputs then lie as the first one of them that is not I32. One that says nothing is given whole
 * tensors only, and an input of another placement is an error that names both. I32 inputs are
 * always whole: beside columns they are as they should be, beside rows an error. An output as wide
 * as each of several equal components of that input (q of a packed q|k|v) lies as such a component.
 * Parameters of such operations are not cut. */
#define DTRAIN_OP_TAKES_COLUMNS 1u
#define DTRAIN_OP_TAKES_ROWS 2u

typedef enum dtrain_op_half {
    DTRAIN_OP_HALF_BOTH = 0,
    DTRAIN_OP_HALF_INPUTS = 1,
    DTRAIN_OP_HALF_PARAMS = 2
} dtrain_op_half;

typedef struct dtrain_op_desc dtrain_op_desc;

/* One call of an operation. The tensors have shapes and gradients; values are read and written at
 * the addresses below, which stay the same for the whole call (tensor->data may move). */
typedef struct dtrain_op {
    const dtrain_op_desc *desc;
    dtrain_tape *tape;
    dtrain_device *device;
    void *args; /* this call's copy of the arguments; prepare may leave addresses in it */
    uint32_t input_count, output_count, param_count;
    uint32_t reads;    /* the desc's; prepare may change it for this call */
    dtrain_dtype cast; /* the type of autocast in this pass; F32 without autocast */
    uint32_t half;     /* dtrain_op_half: what this call of backward is to make */
    bool needs_grad;   /* backward may be called: otherwise nothing has to be saved */
    bool planning;     /* addresses have no memory, on the plan device: forward is not called,
                          backward asks for gradients as always, and reads and writes none */
    dtrain_tensor *inputs[DTRAIN_OP_INPUTS], *outputs[DTRAIN_OP_OUTPUTS];
    dtrain_param *params[DTRAIN_OP_PARAMS];
    const void *input_data[DTRAIN_OP_INPUTS]; /* of inputs[i]->dtype, or see autocast */
    const void *param_data[DTRAIN_OP_PARAMS]; /* fp32, or see autocast; the unit is gathered */
    int64_t param_shape[DTRAIN_OP_PARAMS][4]; /* leading non-zero entries, one at least */
    void *output_data[DTRAIN_OP_OUTPUTS];     /* of outputs[i]->dtype */
} dtrain_op;

struct dtrain_op_desc {
    uint32_t reads;          /* DTRAIN_OP_READS_*, and DTRAIN_OP_SPLITS */
    uint32_t recompute;      /* the DTRAIN_RECOMPUTE_* that drops its results; 0: always kept */
    uint32_t integer_inputs; /* bit i: input i is I32; the others are F32, BF16 or F16 */
    uint32_t placements;     /* DTRAIN_OP_TAKES_*; 0 = whole tensors */
    bool autocast;           /* input_data, and param_data of parameters with two axes or more, are
                                 of the type `cast`. A gradient keeps the type of its tensor */
    const char *name;        /* what error sentences begin with */
    dtrain_result (*prepare)(dtrain_op *op); /* makes outputs[0] at least */
    dtrain_result (*forward)(dtrain_op *op);
    dtrain_result (*backward)(dtrain_op *op);
};

/* Run an operation on the tape and return its first output; NULL after an error, which sticks.
 * Inputs and parameters are checked: not NULL, of the right type, in the unit that is gathered. The
 * desc must outlive the pass; args (args_bytes) are copied, and zero where args is NULL. */
DTRAIN_API dtrain_tensor *dtrain_tape_apply(dtrain_tape *tape, const dtrain_op_desc *desc,
                                            dtrain_tensor *const *inputs, uint32_t input_count,
                                            dtrain_param *const *params, uint32_t param_count,
                                            const void *args, size_t args_bytes);

/* The calls below are for prepare and backward. Their errors stick to the tape, which stops after
 * prepare or backward: an address that is only stored needs no check for NULL. */

/* Make the next output, contents undefined (in prepare). */
DTRAIN_API dtrain_tensor *dtrain_op_output(dtrain_op *op, dtrain_dtype dtype, uint32_t ndim,
                                           const int64_t *shape);
/* Take memory for `count` values that forward writes and backward reads (in prepare). */
DTRAIN_API void *dtrain_op_save(dtrain_op *op, dtrain_dtype dtype, int64_t count);
/* Require the shape (rows, columns) of parameter i, or (rows) when columns is 0; -1 stands for any
 * length (in prepare). */
DTRAIN_API dtrain_result dtrain_op_check_param(const dtrain_op *op, uint32_t i, int64_t rows,
                                               int64_t columns);

/* The gradients to read in backward are outputs[i]->grad, of the output's type. The gradient of
 * output 0 is always there (zeros where the loss does not depend on it); NULL of another output
 * means zero. A gradient that was asked for must be written, and that of one input before that of
 * another is asked for: both may be one tensor. */

/* Return where the gradient of input i goes, of the input's type; NULL when nobody wants it (in
 * backward). *accumulate says whether to add to what is there or to overwrite it; with accumulate
 * NULL the call can only overwrite, and the tape adds what was there when backward returns. */
DTRAIN_API void *dtrain_op_input_grad(dtrain_op *op, uint32_t i, bool *accumulate);
/* Return where the fp32 gradient of parameter i goes, and whether to add to it; NULL when nobody
 * wants it (in backward). */
DTRAIN_API float *dtrain_op_param_grad(dtrain_op *op, uint32_t i, bool *accumulate);
