/* Running an operation
 *
 * dtrain_tape_apply is the one way onto the tape, for built-in operations and those of a program:
 *
 * 1. make a node, with a copy of the arguments, in host memory that dtrain_tape_begin rewinds 2.
 * check inputs and parameters, and note the addresses of their values 3. prepare: check shapes,
 * make outputs, take memory for what backward will read 4. forward; before it, inputs that autocast
 * wants in a narrower type are rounded 5. note the node in its segment if its results are dropped,
 * and record it on the tape if a gradient will have to pass through it
 *
 * The addresses of steps 2 and 3 hold for the life of the node, although tensor->data may move: a
 * value that a later unit reads is copied out of the region it was dropped into. A forward that
 * runs again must read and write where its neighbours in the unit do, in the region; the copy is
 * for the readers outside. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/result.h"
#include "strategy/params.h"
#include "strategy/strategy_internal.h"
#include "tape/op.h"
#include "tape/tape.h"
#include "tape/tape_internal.h"
#include "device/backend.h"
#include "device/device.h"

static dtrain_node *dtrain__node_new(dtrain_tape *tape, const dtrain_op_desc *desc,
                                     const void *args, size_t args_bytes);
static dtrain_result dtrain__take_input(dtrain_node *node, dtrain_tensor *x);
static dtrain_result dtrain__take_param(dtrain_node *node, dtrain_param *p);
static void dtrain__record(dtrain_node *node);

DTRAIN_API dtrain_tensor *dtrain_tape_apply(dtrain_tape *tape, const dtrain_op_desc *desc,
                                            dtrain_tensor *const *inputs, uint32_t input_count,
                                            dtrain_param *const *params, uint32_t param_count,
                                            const void *args, size_t args_bytes)
{
    const char *const call = desc && desc->name ? desc->name : "dtrain_tape_apply";
    dtrain_result result = dtrain__tape_check(tape, call);
    if (result != DTRAIN_OK) return NULL;
    if (!desc || !desc->name || !desc->prepare || !desc->forward || !desc->backward)
        return dtrain__tape_fail(tape, DTRAIN_ERROR_ARGUMENT,
                                 "%s: desc is NULL or has no name, prepare, forward or backward",
                                 call);
    if (input_count > DTRAIN_OP_INPUTS || param_count > DTRAIN_OP_PARAMS)
        return dtrain__tape_fail(tape, DTRAIN_ERROR_ARGUMENT,
                                 "%s: %u inputs and %u parameters, but an operation has at most %d "
                                 "and %d",
                                 call, input_count, param_count, DTRAIN_OP_INPUTS,
                                 DTRAIN_OP_PARAMS);
    dtrain_node *node = dtrain__node_new(tape, desc, args, args_bytes);
    if (!node) return NULL;
    for (uint32_t i = 0; i < input_count && !result; i++)
        result = dtrain__take_input(node, inputs[i]);
    for (uint32_t i = 0; i < param_count && !result; i++)
        result = dtrain__take_param(node, params[i]);
    if (result == DTRAIN_OK) result = desc->prepare(&node->op);
    if (result == DTRAIN_OK && tape->error == DTRAIN_OK && node->op.output_count == 0)
        result = dtrain_fail(DTRAIN_ERROR_USAGE, "%s: prepare has made no output", call);
    if (result == DTRAIN_OK && tape->error == DTRAIN_OK) result = dtrain__op_run(node);
    dtrain__tape_stick(tape, result);
    if (tape->error != DTRAIN_OK) return NULL;
    dtrain__record(node);
    return node->op.outputs[0];
}

/* A node for one call. Without gradients too: the arguments have to be somewhere, and it costs
 * nothing but a little host memory until the next begin. */
static dtrain_node *dtrain__node_new(dtrain_tape *tape, const dtrain_op_desc *desc,
                                     const void *args, size_t args_bytes)
{
    dtrain_node *node = (dtrain_node *)dtrain__take_host(tape, sizeof *node);
    void *copy = args_bytes ? dtrain__take_host(tape, args_bytes) : NULL;
    if (!node || (args_bytes && !copy)) return NULL;
    if (args_bytes) memcpy(copy, args, args_bytes);
    node->op.desc = desc;
    node->op.tape = tape;
    node->op.device = tape->device;
    node->op.args = copy;
    node->op.cast = tape->cast;
    node->op.planning = tape->planning;
    node->unit = tape->unit;
    node->mark = tape->mark_count;
    node->segment = tape->segment;
    node->dropped = tape->segment && (tape->dropped_ops & desc->checkpoint);
    return node;
}

/* The next input: it is there, of the right type, and stays where it is as long as the node needs
 * it. A gradient that it needs makes the node need one. */
static dtrain_result dtrain__take_input(dtrain_node *node, dtrain_tensor *x)
{
    dtrain_op *op = &node->op;
    const uint32_t i = op->input_count++;
    const bool integer = (op->desc->integer_inputs >> i & 1) != 0;
    if (!x || (integer ? x->dtype != DTRAIN_DTYPE_I32 : !dtrain__is_float(x)))
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: input %u is %s, expected %s", op->desc->name,
                           i + 1, x ? dtrain_dtype_name((dtrain_dtype)x->dtype) : "NULL",
                           integer ? "i32" : "f32");
    DTRAIN__TRY(dtrain__tensor_keep(op->tape, x, op->desc->name));
    if (x->needs_grad) op->needs_grad = true;
    op->inputs[i] = x;
    op->input_data[i] = node->source[i] = x->data;
    if (!op->desc->autocast || integer || x->dtype == (uint32_t)op->cast) return DTRAIN_OK;
    op->input_data[i] = node->rounded[i] = dtrain_op_save(op, op->cast, x->count);
    return op->tape->error;
}

/* ---- Parameters -------------------------------------------------------------------------------*/

/* Where value and gradient are: the end of the alias chain. A strategy has looked it up already. */
static dtrain_param *dtrain__param_storage(dtrain_param *p)
{
    if (p->state.storage) return p->state.storage;
    while (p->alias_of) p = p->alias_of;
    return p;
}

/* A sharded strategy has values of the gathered unit only. */
static dtrain_result dtrain__check_value(const dtrain_op *op, const dtrain_param *p,
                                         const dtrain_param *storage)
{
    const dtrain_tape *tape = op->tape;
    const char *call = op->desc->name, *name = p->name ? p->name : "?";
    const bool foreign = tape->strategy && !p->state.storage;
    if (tape->planning || (storage->value && !foreign)) return DTRAIN_OK;
    if (foreign || !tape->strategy)
        return dtrain_fail(DTRAIN_ERROR_USAGE,
                           "%s: parameter %s %s; give it to dtrain_strategy_create first", call,
                           name, foreign ? "belongs to no strategy" : "has no value");
    if (tape->unit < 0)
        return dtrain_fail(DTRAIN_ERROR_USAGE,
                           "%s: parameter \"%s\" belongs to unit %u, and no unit is gathered; mark "
                           "it with dtrain_tape_unit",
                           call, name, p->unit);
    return dtrain_fail(DTRAIN_ERROR_USAGE,
                       "%s: parameter \"%s\" belongs to unit %u, and unit %lld is gathered; "
                       "register an alias of it in each other unit that uses it",
                       call, name, p->unit, (long long)tape->unit);
}

/* Count the elements of a parameter. Only a strategy completes the field from the shape. */
static int64_t dtrain__value_count(const dtrain_param *p)
{
    int64_t count = p->shape[0];
    for (int i = 1; i < 4 && p->shape[i]; i++) count *= p->shape[i];
    return p->count ? p->count : count;
}

/* The next parameter, with its value; of the type of autocast, the strategy's copy is taken, or one
 * that is made at the first use in this pass: no result of the node, other units may use it too. */
static dtrain_result dtrain__take_param(dtrain_node *node, dtrain_param *p)
{
    dtrain_op *op = &node->op;
    dtrain_tape *tape = op->tape;
    const uint32_t i = op->param_count++;
    int64_t shape[4];
    if (!p)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: parameter %u is NULL", op->desc->name,
                           i + 1);
    dtrain_param *storage = dtrain__param_storage(p);
    DTRAIN__TRY(dtrain__check_value(op, p, storage));
    op->params[i] = p;
    op->param_data[i] = storage->value;
    node->storage[i] = storage;
    if (dtrain__param_trainable(node, i)) op->needs_grad = true;
    if (!op->desc->autocast || op->cast == DTRAIN_DTYPE_F32 ||
        dtrain__param_shape(op, i, shape) < 2)
        return DTRAIN_OK;
    if (tape->strategy) op->param_data[i] = dtrain__strategy_low(tape->strategy, storage, op->cast);
    else op->param_data[i] = NULL;
    for (dtrain__cast *cast = tape->casts; cast && !op->param_data[i]; cast = cast->next)
        if (cast->storage == storage) op->param_data[i] = cast->low;
    if (op->param_data[i]) return DTRAIN_OK;
    dtrain__cast *cast = (dtrain__cast *)dtrain__take_host(tape, sizeof *cast);
    if (!cast) return tape->error;
    cast->storage = storage;
    cast->low = dtrain__cast_to(tape, storage->value, DTRAIN_DTYPE_F32, op->cast,
                                dtrain__value_count(storage));
    cast->next = tape->casts;
    tape->casts = cast;
    op->param_data[i] = cast->low;
    return tape->error;
}

/* The axes of a parameter: all zero means one axis of count, and for an alias its target's. */
DTRAIN__PRIVATE uint32_t dtrain__param_shape(const dtrain_op *op, uint32_t i, int64_t shape[4])
{
    const dtrain_param *p = op->params[i];
    const dtrain_param *from = p->shape[0] || p->count ? p : ((const dtrain_node *)op)->storage[i];
    uint32_t ndim = 0;
    memcpy(shape, from->shape, sizeof from->shape);
    while (ndim < 4 && shape[ndim] != 0) ndim++;
    if (ndim > 0) return ndim;
    shape[0] = from->count;
    return 1;
}

/* Whether it gets a gradient in this pass. A plan may be made before gradients are allocated: there
 * only the flag counts. */
DTRAIN__PRIVATE bool dtrain__param_trainable(const dtrain_node *node, uint32_t i)
{
    const dtrain_tape *tape = node->op.tape;
    const dtrain_param *p = node->op.params[i], *storage = node->storage[i];
    if (tape->flags & DTRAIN_TAPE_NO_GRAD) return false;
    if ((p->flags | storage->flags) & DTRAIN_PARAM_FROZEN) return false;
    return tape->planning || tape->strategy || storage->grad;
}

/* ---- Running ----------------------------------------------------------------------------------*/

/* Runs the node's kernels, now or again: inputs that autocast rounds, then its own forward. */
DTRAIN__PRIVATE dtrain_result dtrain__op_run(dtrain_node *node)
{
    dtrain_op *op = &node->op;
    if (op->planning) return DTRAIN_OK;
    for (uint32_t i = 0; i < op->input_count; i++) {
        const dtrain_tensor *x = op->inputs[i];
        if (node->rounded[i])
            DTRAIN__TRY(dtrain__tape_convert(op->device, x->count, node->source[i], x->dtype,
                                             node->rounded[i], op->cast));
    }
    return op->desc->forward(op);
}

/* The node goes on the tape if a gradient will have to pass through it. Uses are counted for
 * in-place backwards, which must know that nobody else will look at an input. */
static void dtrain__record(dtrain_node *node)
{
    dtrain_op *op = &node->op;
    dtrain_tape *tape = op->tape;
    if (node->dropped && !(tape->flags & DTRAIN_TAPE_NO_GRAD)) {
        node->redo = node->segment->dropped;
        node->segment->dropped = node;
    }
    if (!op->needs_grad) return;
    for (uint32_t i = 0; i < op->output_count; i++) {
        op->outputs[i]->producer = node;
        op->outputs[i]->needs_grad = true;
    }
    for (uint32_t i = 0; i < op->input_count; i++) op->inputs[i]->pending_uses++;
    node->previous = tape->last;
    tape->last = node;
    tape->node_count++;
}

/* count values in another type, to stay until the next begin; themselves when they have it. NULL
 * after an error. */
DTRAIN__PRIVATE const void *dtrain__cast_to(dtrain_tape *tape, const void *values, uint32_t from,
                                            dtrain_dtype to, int64_t count)
{
    if (from == (uint32_t)to) return values;
    void *made = dtrain__take_data(tape, NULL, count, to);
    if (made)
        dtrain__tape_stick(tape, dtrain__tape_convert(tape->device, count, values, from, made, to));
    return tape->error == DTRAIN_OK ? made : NULL;
}

DTRAIN__PRIVATE dtrain_result dtrain__tape_convert(dtrain_device *device, int64_t count,
                                                   const void *x, uint32_t x_dtype, void *y,
                                                   uint32_t y_dtype)
{
    dtrain_convert_args args;
    memset(&args, 0, sizeof args);
    args.count = count;
    args.x = x;
    args.y = y;
    args.x_dtype = (dtrain_dtype)x_dtype;
    args.y_dtype = (dtrain_dtype)y_dtype;
    return device->ops->convert(device, &args);
}

/* ---- For authors ------------------------------------------------------------------------------*/

DTRAIN_API dtrain_tensor *dtrain_op_output(dtrain_op *op, dtrain_dtype dtype, uint32_t ndim,
                                           const int64_t *shape)
{
    const uint32_t i = op->output_count;
    if (op->tape->error != DTRAIN_OK) return NULL;
    if (i == DTRAIN_OP_OUTPUTS)
        return dtrain__tape_fail(op->tape, DTRAIN_ERROR_USAGE,
                                 "%s: an operation has at most %d outputs", op->desc->name,
                                 DTRAIN_OP_OUTPUTS);
    op->outputs[i] = dtrain__tensor_new(op->tape, (dtrain_node *)op, dtype, ndim, shape);
    if (!op->outputs[i]) return NULL;
    op->output_data[i] = op->outputs[i]->data;
    op->output_count++;
    return op->outputs[i];
}

DTRAIN_API void *dtrain_op_save(dtrain_op *op, dtrain_dtype dtype, int64_t count)
{
    dtrain_node *node = (dtrain_node *)op;
    node->saves = true;
    return dtrain__take_data(op->tape, node, count, dtype);
}

/* "(6, 16)", with "any" for -1. Written to *to, so that one sentence can have several. */
static const char *dtrain__axes_text(uint32_t ndim, const int64_t *shape, dtrain__text *to)
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

DTRAIN__PRIVATE const char *dtrain__shape_text(const dtrain_tensor *x, dtrain__text *to)
{
    return dtrain__axes_text(x->ndim, x->shape, to);
}

DTRAIN_API dtrain_result dtrain_op_check_param(const dtrain_op *op, uint32_t i, int64_t rows,
                                               int64_t columns)
{
    const int64_t expected[2] = {rows, columns};
    const uint32_t ndim = columns ? 2 : 1;
    int64_t shape[4];
    dtrain__text found_text, expected_text, input_text;
    if (i >= op->param_count)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: there is no parameter %u", op->desc->name,
                           i + 1);
    const uint32_t found = dtrain__param_shape(op, i, shape);
    bool same = found == ndim;
    for (uint32_t a = 0; same && a < ndim; a++) same = expected[a] < 0 || expected[a] == shape[a];
    if (same) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: parameter %s is %s where input %s needs %s",
                       op->desc->name, op->params[i]->name ? op->params[i]->name : "?",
                       dtrain__axes_text(found, shape, &found_text),
                       op->input_count ? dtrain__shape_text(op->inputs[0], &input_text) : "(none)",
                       dtrain__axes_text(ndim, expected, &expected_text));
}

DTRAIN_API void *dtrain_op_input_grad(dtrain_op *op, uint32_t i, bool *accumulate)
{
    *accumulate = false;
    if (i >= op->input_count || !op->inputs[i]->needs_grad) return NULL;
    dtrain__tape_stick(op->tape, dtrain__gradient_open(op->tape, op->inputs[i], accumulate));
    return op->inputs[i]->grad;
}

/* Whoever asks must write: the gradient counts as written from here on. */
DTRAIN_API float *dtrain_op_param_grad(dtrain_op *op, uint32_t i, bool *accumulate)
{
    dtrain_node *node = (dtrain_node *)op;
    *accumulate = false;
    if (i >= op->param_count || !dtrain__param_trainable(node, i)) return NULL;
    dtrain_param *storage = node->storage[i];
    *accumulate = storage->state.grad_written;
    if (!op->planning) storage->state.grad_written = true;
    return storage->grad;
}
