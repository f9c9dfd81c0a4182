/* Products of matrices, copies in another type or shape, permuted axes
 *
 * A product keeps both inputs until its backward, the others keep nothing. */

#include "core/platform_internal.h"
#include "tape/ops.h"
#include "tape/tape_internal.h"

/* ---- Products of matrices
 *
 *     y = a b     d_a = d_y b^T     d_b = a^T d_y
 *
 * for each matrix of the leading axes; if b has none, all rows of a are one matrix. */

typedef struct dtrain__matmul {
    int64_t batch, m, n, k; /* y (batch,m,n), a (batch,m,k), b (batch,k,n) */
} dtrain__matmul;

static dtrain_result dtrain__matmul_prepare(dtrain_op *op)
{
    dtrain__matmul *product = (dtrain__matmul *)op->args;
    const dtrain_tensor *a = op->inputs[0], *b = op->inputs[1];
    bool match = a->ndim >= 2 && b->ndim >= 2 && a->shape[a->ndim - 1] == b->shape[b->ndim - 2] &&
                 (b->ndim == 2 || b->ndim == a->ndim);
    for (uint32_t axis = 0; match && axis + 2 < b->ndim; axis++)
        match = a->shape[axis] == b->shape[axis];
    if (!match)
        return dtrain__refuse(op, "expected (..., m, k) times (..., k, n) with the same leading "
                                  "axes, or (k, n)");
    product->k = b->shape[b->ndim - 2];
    product->n = b->shape[b->ndim - 1];
    product->batch = b->count / product->k / product->n;
    product->m = a->count / product->batch / product->k;
    dtrain__output_like(op, a, product->n, op->cast);
    return DTRAIN_OK;
}

/* Run the product `args` describes for each matrix of the batch: a of m*k elements, b of k*n. */
static dtrain_result dtrain__matmul_run(dtrain_op *op, dtrain_gemm_args *args)
{
    const size_t a_bytes = (size_t)(args->m * args->k) * dtrain_dtype_bytes(args->a_dtype);
    const size_t b_bytes = (size_t)(args->k * args->n) * dtrain_dtype_bytes(args->b_dtype);
    const size_t c_bytes = (size_t)(args->m * args->n) * dtrain_dtype_bytes(args->c_dtype);
    const int64_t batch = ((const dtrain__matmul *)op->args)->batch;
    args->alpha = 1;
    args->ldc = args->n;
    for (int64_t i = 0; i < batch; i++) {
        DTRAIN__TRY(dtrain__counted_gemm(op, args));
        args->a = (const char *)args->a + a_bytes;
        args->b = (const char *)args->b + b_bytes;
        args->c = (char *)args->c + c_bytes;
    }
    return DTRAIN_OK;
}

static dtrain_result dtrain__matmul_forward(dtrain_op *op)
{
    const dtrain__matmul *product = (const dtrain__matmul *)op->args;
    dtrain_gemm_args args;
    memset(&args, 0, sizeof args);
    args.m = product->m, args.n = args.ldb = product->n, args.k = args.lda = product->k;
    args.a = op->input_data[0], args.b = op->input_data[1], args.c = op->output_data[0];
    args.a_dtype = args.b_dtype = args.c_dtype = op->cast;
    return dtrain__matmul_run(op, &args);
}

static dtrain_result dtrain__matmul_backward(dtrain_op *op)
{
    const dtrain__matmul *product = (const dtrain__matmul *)op->args;
    for (uint32_t i = 0; i < 2; i++) {
        dtrain_gemm_args args;
        bool add;
        memset(&args, 0, sizeof args);
        args.c = dtrain_op_input_grad(op, i, &add);
        DTRAIN__TRY(op->tape->error);
        if (!args.c) continue;
        if (i == 0) { /* (m,k) = d_y (m,n) b^T (n,k) */
            args.flags = DTRAIN_GEMM_TRANS_B;
            args.m = product->m, args.n = product->k, args.k = args.lda = args.ldb = product->n;
            args.a = op->outputs[0]->grad, args.b = op->input_data[1];
        } else { /* (k,n) = a^T (k,m) d_y (m,n) */
            args.flags = DTRAIN_GEMM_TRANS_A;
            args.m = args.lda = product->k, args.n = args.ldb = product->n, args.k = product->m;
            args.a = op->input_data[0], args.b = op->outputs[0]->grad;
        }
        args.a_dtype = args.b_dtype = op->cast;
        args.c_dtype = (dtrain_dtype)op->inputs[i]->dtype;
        args.beta = add ? 1.0f : 0.0f;
        DTRAIN__TRY(dtrain__matmul_run(op, &args));
    }
    return DTRAIN_OK;
}

DTRAIN__OP(matmul, matmul, DTRAIN_OP_READS_INPUTS | DTRAIN__OP_COUNTS, DTRAIN_RECOMPUTE_LINEAR, 0,
           0, true)

DTRAIN_API dtrain_tensor *dtrain_matmul(dtrain_tape *tape, dtrain_tensor *a, dtrain_tensor *b)
{
    dtrain_tensor *const inputs[2] = {a, b};
    return dtrain_tape_apply(tape, &dtrain__matmul_op, inputs, 2, NULL, 0, NULL,
                             sizeof(dtrain__matmul));
}

/* ---- Copies to another type or shape
 *
 * A reshaped tensor is a copy too, because activation checkpointing and in-place gradients need one
 * owner of each value; backward passes the gradient on, or converts it. */

typedef struct dtrain__reshape {
    dtrain_dtype dtype;
    uint32_t ndim;
    int64_t shape[4]; /* of the whole tensor */
    bool keeps;       /* the shape is x's */
} dtrain__reshape;

static dtrain_result dtrain__copy_prepare(dtrain_op *op)
{
    dtrain__reshape *to = (dtrain__reshape *)op->args;
    const dtrain_tensor *x = op->inputs[0];
    char text[DTRAIN__SHAPE_TEXT];
    const int64_t here = x->shape[x->ndim - 1], whole = dtrain__tensor_share(x)->whole;
    const bool columns = x->placement == DTRAIN_PLACEMENT_COLUMNS && !to->keeps;
    const bool rows = x->placement == DTRAIN_PLACEMENT_ROWS && !to->keeps;
    const int64_t n = columns ? whole : here, count = (rows ? whole : x->count / here) * n;
    int64_t known = 1, *open = NULL;
    bool good = to->ndim >= 1;
    if (to->dtype != DTRAIN_DTYPE_F32 && to->dtype != DTRAIN_DTYPE_BF16 &&
        to->dtype != DTRAIN_DTYPE_F16)
        return dtrain__refuse(op, "dtype is %s, expected f32, bf16 or f16",
                              dtrain_dtype_name(to->dtype));
    for (uint32_t axis = 0; axis < to->ndim; axis++) {
        const int64_t length = to->shape[axis];
        if (length == -1 && !open) open = &to->shape[axis];
        else if (length < 1 || known > count / length) good = false;
        else known *= length;
    }
    if (good && open && count % known == 0) *open = count / known, known = count;
    if (!good || known != count)
        return dtrain__refuse(op, "input 1 cannot become %s", dtrain__shape_text(to->shape, text));
    /* Turn the whole shape into the shape of this rank's part. With the same last axis the part
     * keeps its elements: columns of all rows, or rows as the first of two axes. */
    int64_t *const last = &to->shape[to->ndim - 1];
    if ((columns || rows) && (*last != n || (rows && to->ndim != 2)))
        return dtrain__refuse(op, "of a part%s the last one stays; dtrain_place makes it whole",
                              rows ? " there are two axes, and" : "");
    if (rows) to->shape[0] = x->shape[0];
    if (columns) *last = here;
    dtrain_op_output(op, to->dtype, to->ndim, to->shape);
    return DTRAIN_OK;
}

static dtrain_result dtrain__copy_forward(dtrain_op *op)
{
    const dtrain_tensor *x = op->inputs[0], *y = op->outputs[0];
    return dtrain__tape_convert(op->device, x->count, op->input_data[0], x->dtype,
                                op->output_data[0], y->dtype);
}

static dtrain_result dtrain__copy_backward(dtrain_op *op)
{
    return dtrain__gradient_pass(op, 0, 0);
}

DTRAIN__OP(cast, copy, 0, DTRAIN_RECOMPUTE_ELEMENTWISE, 0, DTRAIN__OP_TAKES_ALL, false)
DTRAIN__OP(reshape, copy, 0, DTRAIN_RECOMPUTE_ELEMENTWISE, 0, DTRAIN__OP_TAKES_ALL, false)

static dtrain_tensor *dtrain__copy_apply(dtrain_tape *tape, const dtrain_op_desc *desc,
                                         dtrain_tensor *x, uint32_t dtype, uint32_t ndim,
                                         const int64_t *shape)
{
    dtrain__reshape args;
    memset(&args, 0, sizeof args);
    args.dtype = (dtrain_dtype)dtype;
    args.keeps = desc == &dtrain__cast_op;
    if (shape && ndim <= 4) { /* otherwise ndim stays 0, which prepare refuses */
        args.ndim = ndim;
        memcpy(args.shape, shape, ndim * sizeof *shape);
    }
    return dtrain_tape_apply(tape, desc, &x, 1, NULL, 0, &args, sizeof args);
}

DTRAIN_API dtrain_tensor *dtrain_cast(dtrain_tape *tape, dtrain_tensor *x, dtrain_dtype dtype)
{
    if (x && dtrain__is_float(x) && x->dtype == (uint32_t)dtype) return x;
    return dtrain__copy_apply(tape, &dtrain__cast_op, x, dtype, x ? x->ndim : 0,
                              x ? x->shape : NULL);
}

DTRAIN_API dtrain_tensor *dtrain_reshape(dtrain_tape *tape, dtrain_tensor *x, uint32_t ndim,
                                         const int64_t *shape)
{
    return dtrain__copy_apply(tape, &dtrain__reshape_op, x, x ? x->dtype : 0, ndim, shape);
}

/* ---- Permuted axes
 *
 * Axis i of y is axis axes[i] of x. Backward runs the same kernel with the inverse permutation. */

typedef struct dtrain__permute {
    uint32_t ndim, axes[4];
} dtrain__permute;

/* Describe a contiguous tensor whose axis i is axis axes[i] of `from`, another contiguous tensor;
 * leading axes of length 1 make both four-dimensional. */
static void dtrain__permute_describe(dtrain_permute_args *args, uint32_t ndim,
                                     const int64_t *from_shape, const uint32_t *axes)
{
    int64_t steps[4], step = 1;
    memset(args, 0, sizeof *args);
    for (uint32_t axis = ndim; axis-- > 0; step *= from_shape[axis]) steps[axis] = step;
    for (uint32_t i = 0; i < 4; i++) {
        const bool extra = i < 4 - ndim;
        args->shape[i] = extra ? 1 : from_shape[axes[i - (4 - ndim)]];
        args->step[i] = extra ? 0 : steps[axes[i - (4 - ndim)]];
    }
}

static dtrain_result dtrain__permute_prepare(dtrain_op *op)
{
    const dtrain__permute *to = (const dtrain__permute *)op->args;
    const dtrain_tensor *x = op->inputs[0];
    int64_t shape[4] = {0};
    uint32_t seen = 0;
    for (uint32_t i = 0; i < x->ndim && to->ndim; i++) {
        if (to->axes[i] >= x->ndim) break;
        seen |= 1u << to->axes[i];
        shape[i] = x->shape[to->axes[i]];
    }
    if (seen != (1u << x->ndim) - 1)
        return dtrain__refuse(op, "expected each of the %u axes once", x->ndim);
    dtrain_op_output(op, (dtrain_dtype)x->dtype, x->ndim, shape);
    return DTRAIN_OK;
}

static dtrain_result dtrain__permute_forward(dtrain_op *op)
{
    const dtrain_tensor *x = op->inputs[0];
    dtrain_permute_args args;
    dtrain__permute_describe(&args, x->ndim, x->shape, ((const dtrain__permute *)op->args)->axes);
    args.x = op->input_data[0];
    args.y = op->output_data[0];
    args.dtype = (dtrain_dtype)x->dtype;
    return op->device->ops->permute(op->device, &args);
}

static dtrain_result dtrain__permute_backward(dtrain_op *op)
{
    const dtrain_tensor *x = op->inputs[0], *y = op->outputs[0];
    const uint32_t *axes = ((const dtrain__permute *)op->args)->axes;
    dtrain_permute_args args;
    uint32_t inverse[4] = {0};
    bool accumulate;
    for (uint32_t i = 0; i < x->ndim; i++) inverse[axes[i]] = i;
    dtrain__permute_describe(&args, x->ndim, y->shape, inverse);
    args.y = dtrain_op_input_grad(op, 0, &accumulate);
    if (!args.y) return op->tape->error;
    args.accumulate = accumulate;
    args.x = y->grad;
    args.dtype = (dtrain_dtype)x->dtype;
    return op->device->ops->permute(op->device, &args);
}

DTRAIN__OP(permute, permute, 0, DTRAIN_RECOMPUTE_ELEMENTWISE, 0, 0, false)

DTRAIN_API dtrain_tensor *dtrain_permute(dtrain_tape *tape, dtrain_tensor *x, const uint32_t *axes)
{
    dtrain__permute args;
    memset(&args, 0, sizeof args);
    if (x && axes) {
        args.ndim = x->ndim;
        memcpy(args.axes, axes, x->ndim * sizeof *axes);
    }
    return dtrain_tape_apply(tape, &dtrain__permute_op, &x, 1, NULL, 0, &args, sizeof args);
}
