/* Operations
 *
 * Every operation has the same steps, and its own arguments:
 *
 *     node = dtrain__op(...)               NULL after an error: the operation does nothing
 *     dtrain__check_input, _check_param    the sentence says what differs from what
 *     fill node->forward                   memory from dtrain__output and dtrain__take_data
 *     if (tape->error) return NULL         one look for all allocations above
 *     return dtrain__record(tape, node, dtrain__run_kernel(tape, node, kernel, arguments))
 *
 * Its backward reads node->forward and node->out->grad and contributes to the gradients of inputs
 * and parameters. What a node keeps alive until then, beside its parameters:
 *
 *     linear          x; with GELU the value before it, with ReLU the output
 *     layernorm       x, mean and rstd of each row
 *     embedding       tokens
 *     attention       qkv, y, log-sum-exp of each row and head
 *     cross_entropy   logits, targets, log-sum-exp of each row
 *     add, scale, cast, dropout, sum, mean: nothing
 *
 * node->reads_input, reads_output and reads_rest say the same to activation checkpointing. */

#include "core/platform_internal.h"
#include "core/dtype.h"
#include "core/result.h"
#include "strategy/params.h"
#include "strategy/strategy_internal.h"
#include "tape/ops_internal.h"
#include "tape/tape.h"
#include "tape/tape_internal.h"
#include "device/backend.h"
#include "device/device.h"

#define DTRAIN__CALL(op)                                                                     \
    DTRAIN__PRIVATE dtrain_result dtrain__call_##op(dtrain_device *device, const void *args) \
    {                                                                                        \
        return device->ops->op(device, (const dtrain_##op##_args *)args);                    \
    }
DTRAIN__CALL(gemm)
DTRAIN__CALL(layernorm)
DTRAIN__CALL(embedding)
DTRAIN__CALL(attention)
DTRAIN__CALL(add)
DTRAIN__CALL(axpby)
DTRAIN__CALL(dropout)
DTRAIN__CALL(convert)
#undef DTRAIN__CALL

/* A node for one call. Without gradients too: the kernel's arguments have to be somewhere, and it
 * costs nothing but a little host memory until the next begin. kind is the operation's
 * DTRAIN_CHECKPOINT bit, 0 if its results are always kept. */
DTRAIN__PRIVATE dtrain_node *dtrain__op(dtrain_tape *tape, const char *name, uint32_t kind,
                                        dtrain_result (*backward)(dtrain_tape *, dtrain_node *),
                                        dtrain_tensor *first, dtrain_tensor *second)
{
    if (dtrain__tape_check(tape, name) != DTRAIN_OK) return NULL;
    dtrain_node *node = (dtrain_node *)dtrain__take_host(tape, sizeof *node);
    if (!node) return NULL;
    node->name = name;
    node->backward = backward;
    node->in[0] = first;
    node->in[1] = second;
    node->unit = tape->unit;
    node->mark = tape->mark_count;
    node->segment = tape->segment;
    node->dropped = tape->segment && (tape->dropped_ops & kind);
    return node;
}

/* ---- Checks -----------------------------------------------------------------------------------*/

/* "(6, 16)", with "any" for -1. Written to *to, so that one sentence can have several. */
DTRAIN__PRIVATE const char *dtrain__shape_text(uint32_t ndim, const int64_t *shape,
                                               dtrain__text *to)
{
    size_t used = 0;
    for (uint32_t i = 0; i < ndim; i++) {
        char length[24] = "any";
        if (shape[i] >= 0) snprintf(length, sizeof length, "%lld", (long long)shape[i]);
        used += (size_t)snprintf(to->text + used, sizeof to->text - used, "%s%s", i ? ", " : "(",
                                 length); /* 4 axes of 19 digits fit */
    }
    snprintf(to->text + used, sizeof to->text - used, ")");
    return to->text;
}

/* Input i is there, of this type (for F32 any type of float) and stays where it is as long as the
 * node needs it. A gradient that it needs makes the node need one. */
DTRAIN__PRIVATE bool dtrain__check_input(dtrain_tape *tape, dtrain_node *node, int i,
                                         dtrain_dtype dtype)
{
    dtrain_tensor *x = node->in[i];
    if (x && (dtype == DTRAIN_DTYPE_F32 ? dtrain__is_float(x) : x->dtype == (uint32_t)dtype)) {
        if (x->needs_grad) node->needs_grad = true;
        return dtrain__tape_stick(tape, dtrain__tensor_keep(tape, x, node->name)) == DTRAIN_OK;
    }
    const char *found = x ? dtrain_dtype_name((dtrain_dtype)x->dtype) : "NULL";
    dtrain__tape_fail(tape, DTRAIN_ERROR_ARGUMENT, "%s: input %d is %s, expected %s", node->name,
                      i + 1, found, dtrain_dtype_name(dtype));
    return false;
}

/* The axes of a parameter: all zero means one axis of count, and for an alias its target's. */
DTRAIN__PRIVATE uint32_t dtrain__param_shape(dtrain_param *p, int64_t shape[4])
{
    const dtrain_param *from = p->shape[0] || p->count ? p : dtrain__param_storage(p);
    uint32_t ndim = 0;
    memcpy(shape, from->shape, sizeof from->shape);
    while (ndim < 4 && shape[ndim] != 0) ndim++;
    if (ndim > 0) return ndim;
    shape[0] = from->count;
    return 1;
}

DTRAIN__PRIVATE int64_t dtrain__param_rows(dtrain_param *p)
{
    int64_t shape[4];
    dtrain__param_shape(p, shape);
    return shape[0];
}

DTRAIN__PRIVATE const char *dtrain__param_name(const dtrain_param *p)
{
    return p->name ? p->name : "?";
}

static bool dtrain__check_shape(dtrain_tape *tape, const dtrain_node *node, dtrain_param *p,
                                uint32_t ndim, const int64_t *expected)
{
    int64_t shape[4];
    dtrain__text found_text, expected_text, input_text;
    uint32_t found = dtrain__param_shape(p, shape);
    bool same = found == ndim;
    for (uint32_t i = 0; same && i < ndim; i++) same = expected[i] < 0 || expected[i] == shape[i];
    if (same) return true;
    const dtrain_tensor *x = node->in[0];
    dtrain__tape_fail(tape, DTRAIN_ERROR_ARGUMENT, "%s: parameter %s is %s where input %s needs %s",
                      node->name, dtrain__param_name(p),
                      dtrain__shape_text(found, shape, &found_text),
                      dtrain__shape_text(x->ndim, x->shape, &input_text),
                      dtrain__shape_text(ndim, expected, &expected_text));
    return false;
}

/* A sharded strategy has values of the gathered unit only. */
static bool dtrain__check_value(dtrain_tape *tape, const dtrain_node *node, dtrain_param *p)
{
    const dtrain_param *storage = dtrain__param_storage(p);
    const char *name = dtrain__param_name(p);
    const bool foreign = tape->strategy && !p->state.storage;
    if (storage->value && !foreign) return true;
    if (foreign || !tape->strategy)
        dtrain__tape_fail(tape, DTRAIN_ERROR_USAGE,
                          "%s: parameter %s %s; give it to dtrain_strategy_create first",
                          node->name, name, foreign ? "belongs to no strategy" : "has no value");
    else if (tape->unit < 0)
        dtrain__tape_fail(
            tape, DTRAIN_ERROR_USAGE,
            "%s: parameter \"%s\" belongs to unit %u, and no unit is gathered; mark it "
            "with dtrain_tape_unit",
            node->name, name, p->unit);
    else
        dtrain__tape_fail(tape, DTRAIN_ERROR_USAGE,
                          "%s: parameter \"%s\" belongs to unit %u, and unit %lld is gathered; "
                          "register an alias of it in each other unit that uses it",
                          node->name, name, p->unit, (long long)tape->unit);
    return false;
}

/* Parameter i of the node is p, has a value and the shape (rows, columns), or (rows) when columns
 * is 0; -1 takes any length. */
DTRAIN__PRIVATE bool dtrain__check_param(dtrain_tape *tape, dtrain_node *node, int i,
                                         dtrain_param *p, int64_t rows, int64_t columns)
{
    const int64_t expected[2] = {rows, columns};
    node->param[i] = p;
    if (!p) {
        dtrain__tape_fail(tape, DTRAIN_ERROR_ARGUMENT, "%s: parameter %d is NULL", node->name,
                          i + 1);
        return false;
    }
    if (!dtrain__check_shape(tape, node, p, columns ? 2 : 1, expected)) return false;
    if (!tape->planning && !dtrain__check_value(tape, node, p)) return false;
    if (dtrain__param_trainable(tape, p)) node->needs_grad = true;
    return true;
}

DTRAIN__PRIVATE float *dtrain__param_value(dtrain_param *p)
{
    return p ? dtrain__param_storage(p)->value : NULL;
}

/* ---- Results ----------------------------------------------------------------------------------*/

/* Output of the node: x's shape with n in the last axis. NULL after an error. */
DTRAIN__PRIVATE void *dtrain__output(dtrain_tape *tape, dtrain_node *node, const dtrain_tensor *x,
                                     int64_t n, uint32_t dtype)
{
    int64_t shape[4];
    memcpy(shape, x->shape, sizeof shape);
    shape[x->ndim - 1] = n;
    node->out = dtrain__tensor_new(tape, node, (dtrain_dtype)dtype, x->ndim, shape);
    return node->out ? node->out->data : NULL;
}

DTRAIN__PRIVATE float *dtrain__take_floats(dtrain_tape *tape, const dtrain_node *node,
                                           int64_t count)
{
    return (float *)dtrain__take_data(tape, node, count, DTRAIN_DTYPE_F32);
}

/* count values in another type, to stay until the next begin; themselves when they have it. NULL
 * after an error. */
DTRAIN__PRIVATE const void *dtrain__cast_to(dtrain_tape *tape, const void *values, uint32_t from,
                                            dtrain_dtype to, int64_t count)
{
    if (from == (uint32_t)to) return values;
    void *made = dtrain__take_data(tape, NULL, count, to);
    dtrain_convert_args args = {count, values, made, (dtrain_dtype)from, to};
    if (!made || dtrain__tape_stick(tape, tape->device->ops->convert(tape->device, &args)))
        return NULL;
    return made;
}

/* The node's input in the type of autocast: a result of the node like others. */
DTRAIN__PRIVATE const void *dtrain__cast_input(dtrain_tape *tape, dtrain_node *node)
{
    const dtrain_tensor *x = node->in[0];
    if (x->dtype == (uint32_t)tape->cast) return x->data;
    void *made = dtrain__take_data(tape, node, x->count, tape->cast);
    dtrain_convert_args args = {x->count, x->data, made, (dtrain_dtype)x->dtype, tape->cast};
    node->reads_rest = true;
    if (!made || dtrain__tape_stick(tape, dtrain__run_kernel(tape, node, dtrain__call_convert,
                                                             &args, sizeof args)))
        return NULL;
    return made;
}

/* A weight in the type of autocast: the strategy's copy, or rounded at its first use in this pass.
 * The copy is no result of a node: other units may use it too. */
DTRAIN__PRIVATE const void *dtrain__cast_weight(dtrain_tape *tape, dtrain_param *p)
{
    const dtrain_param *storage = dtrain__param_storage(p);
    if (tape->cast == DTRAIN_DTYPE_F32) return storage->value;
    const void *low =
        tape->strategy ? dtrain__strategy_low(tape->strategy, storage, tape->cast) : NULL;
    if (low) return low;
    for (dtrain__cast *cast = tape->casts; cast; cast = cast->next)
        if (cast->storage == storage) return cast->low;
    dtrain__cast *cast = (dtrain__cast *)dtrain__take_host(tape, sizeof *cast);
    if (!cast) return NULL;
    cast->storage = storage;
    cast->low = dtrain__cast_to(tape, storage->value, DTRAIN_DTYPE_F32, tape->cast, storage->count);
    cast->next = tape->casts;
    tape->casts = cast;
    return cast->low;
}

/* Ends an operation: the node goes on the tape if a gradient will have to pass through it. Uses are
 * counted for in-place backwards, which must know that nobody else will look at an input. */
DTRAIN__PRIVATE dtrain_tensor *dtrain__record(dtrain_tape *tape, dtrain_node *node,
                                              dtrain_result kernel)
{
    if (dtrain__tape_stick(tape, kernel) != DTRAIN_OK) return NULL;
    if (!node->needs_grad) return node->out;
    node->out->producer = node;
    node->out->needs_grad = true;
    for (int i = 0; i < 2; i++)
        if (node->in[i]) node->in[i]->pending_uses++;
    node->previous = tape->last;
    tape->last = node;
    tape->node_count++;
    return node->out;
}

DTRAIN__PRIVATE int64_t dtrain__last_axis(const dtrain_tensor *x) { return x->shape[x->ndim - 1]; }
DTRAIN__PRIVATE dtrain_dtype dtrain__dtype(const dtrain_tensor *x)
{
    return (dtrain_dtype)x->dtype;
}
