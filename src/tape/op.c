/* Running an operation
 *
 * dtrain_tape_apply records all operations, built-in and custom:
 *
 * 1. make a node, with a copy of the arguments, in host memory that dtrain_tape_begin rewinds
 * 2. check inputs and parameters, and note the addresses of their values
 * 3. prepare: check shapes, make outputs, take memory that backward will read
 * 4. forward, after rounding the inputs that autocast wants in a narrower type
 * 5. list the node in its segment if its results are dropped, and record it on the tape if a
 *    gradient passes through it
 *
 * The addresses of steps 2 and 3 hold for the life of the node, although tensor->data can move: a
 * value that a later unit reads is copied out of its region. A forward that runs again reads and
 * writes in the region, as the other operations of the unit do; readers outside use the copy. */

#include "core/platform_internal.h"
#include "device/device_internal.h"
#include "world/world_internal.h"
#include "tape/stage_internal.h"
#include "tape/tape_internal.h"

static dtrain_result dtrain__take_input(dtrain_node *node, dtrain_tensor *x);
static dtrain_result dtrain__take_param(dtrain_node *node, dtrain_param *p);
static dtrain_result dtrain__check_placements(const dtrain_op *op);

DTRAIN_API dtrain_tensor *dtrain_tape_apply(dtrain_tape *tape, const dtrain_op_desc *desc,
                                            dtrain_tensor *const *inputs, uint32_t input_count,
                                            dtrain_param *const *params, uint32_t param_count,
                                            const void *args, size_t args_bytes)
{
    const char *const call = desc && desc->name ? desc->name : "dtrain_tape_apply";
    const size_t node_bytes = dtrain__round_up(sizeof(dtrain_node), DTRAIN__CACHE_LINE);
    dtrain_result result = dtrain__tape_check(tape, call);
    if (result != DTRAIN_OK) return NULL;
    if (!desc || !desc->name || !desc->prepare || !desc->forward || !desc->backward)
        result = dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                             "%s: desc is NULL or has no name, prepare, forward or backward", call);
    else if (input_count > DTRAIN_OP_INPUTS || param_count > DTRAIN_OP_PARAMS)
        result =
            dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                        "%s: %u inputs and %u parameters, but an operation has at most %d and %d",
                        call, input_count, param_count, DTRAIN_OP_INPUTS, DTRAIN_OP_PARAMS);
    if (dtrain__tape_stick(tape, result) != DTRAIN_OK) return NULL;

    /* 1. also in passes without gradients: the arguments need a place */
    dtrain_node *node =
        (dtrain_node *)dtrain__take_host(tape, tape->slot->arenas, node_bytes + args_bytes);
    if (!node) return NULL;
    dtrain_op *op = &node->op;
    if (args_bytes) op->args = (char *)node + node_bytes;
    if (args_bytes && args) memcpy(op->args, args, args_bytes);
    op->desc = desc;
    op->tape = tape;
    op->device = tape->device;
    op->reads = desc->reads;
    op->cast = tape->pass.cast;
    node->remote = dtrain__stage_is_remote(tape);
    op->planning = node->remote || tape->device->ops == dtrain__plan_device_ops();
    node->unit = tape->unit;
    node->mark = tape->pass.mark_count;
    node->segment = tape->pass.segment;
    node->dropped = node->segment && (tape->recompute_ops & desc->recompute);

    /* 2. to 4. An error of prepare may be its result, or may only stick to the tape. */
    for (uint32_t i = 0; i < input_count && !result; i++)
        result = dtrain__take_input(node, inputs[i]);
    for (uint32_t i = 0; i < param_count && !result; i++)
        result = dtrain__take_param(node, params[i]);
    if (result == DTRAIN_OK) result = dtrain__check_placements(op);
    if (result == DTRAIN_OK) result = desc->prepare(op);
    if (result == DTRAIN_OK && tape->error == DTRAIN_OK && op->output_count == 0)
        result = dtrain_fail(DTRAIN_ERROR_USAGE, "%s: prepare has made no output", call);
    if (result == DTRAIN_OK && tape->error == DTRAIN_OK && !node->remote)
        result = dtrain__op_run(node);
    dtrain__tape_stick(tape, result);
    if (tape->error != DTRAIN_OK) return NULL;

    for (uint32_t i = 0; i < op->output_count; i++) {
        const dtrain__samples *samples = &((dtrain__tape_tensor *)op->outputs[i])->samples;
        if (samples->terms) op->outputs[i]->samples = dtrain__samples_count(samples);
    }

    /* 5. an in-place backward counts the uses of its input: it must be the only reader */
    if (node->dropped && !(tape->pass.flags & DTRAIN_TAPE_NO_GRAD)) {
        node->redo = node->segment->dropped;
        node->segment->dropped = node;
    }
    if (!op->needs_grad) return op->outputs[0];
    for (uint32_t i = 0; i < op->output_count; i++) {
        op->outputs[i]->producer = node->remote ? NULL : node;
        op->outputs[i]->needs_grad = true;
    }
    for (uint32_t i = 0; i < op->input_count; i++) op->inputs[i]->pending_uses++;
    if (node->remote) return op->outputs[0];
    node->previous = tape->pass.last;
    tape->pass.last = node;
    tape->pass.node_count++;
    return op->outputs[0];
}

/* Take the next input: check that it exists, has the right type and keeps its values as long as the
 * node needs them. */
static dtrain_result dtrain__take_input(dtrain_node *node, dtrain_tensor *x)
{
    dtrain_op *op = &node->op;
    const dtrain__stages *stages = op->tape->stages;
    dtrain__tape_tensor *made = (dtrain__tape_tensor *)x;
    const uint32_t i = op->input_count++;
    const bool integer = (op->desc->integer_inputs >> i & 1) != 0;
    if (!x || (integer ? x->dtype != DTRAIN_DTYPE_I32 : !dtrain__is_float(x)))
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: input %u is %s, expected %s", op->desc->name,
                           i + 1, x ? dtrain_dtype_name((dtrain_dtype)x->dtype) : "NULL",
                           integer ? "i32" : "f32");
    DTRAIN__TRY(dtrain__tensor_keep(op->tape, x, op->desc->name));
    if (stages && stages->at > made->last_stage && made->stage >= 0) made->last_stage = stages->at;
    if (dtrain__is_surveying(op->tape))
        made->read_here |= stages->at % stages->map->ranks == stages->map->rank;
    if (stages && !node->remote && made->remote)
        return dtrain_fail(DTRAIN_ERROR_USAGE,
                           "stage %d reads a tensor of stage %d, which it did not do in the first "
                           "micro-batch; which operations the loss calls must not depend on values",
                           (int)stages->at, (int)made->stage);
    if (x->needs_grad) op->needs_grad = true;
    op->inputs[i] = x;
    op->input_data[i] = node->source[i] = x->data;
    if (op->desc->autocast && !integer && x->dtype != (uint32_t)op->cast)
        op->input_data[i] = dtrain_op_save(op, op->cast, x->count);
    return op->tape->error;
}

/* ---- Placements -------------------------------------------------------------------------------*/

DTRAIN__PRIVATE const dtrain__share *dtrain__tensor_share(const dtrain_tensor *x)
{
    return &((const dtrain__tape_tensor *)x)->part;
}

DTRAIN__PRIVATE void dtrain__place_as(dtrain_tensor *y, uint32_t placement,
                                      const dtrain__share *part)
{
    if (!y) return;
    y->placement = placement;
    if (placement != DTRAIN_PLACEMENT_WHOLE) ((dtrain__tape_tensor *)y)->part = *part;
}

DTRAIN__PRIVATE dtrain__share dtrain__param_share(const dtrain_op *op, uint32_t i)
{
    const dtrain_param *p = op->params[i];
    while (!p->shape[0] && p->alias_of) p = p->alias_of;
    return dtrain__share_here(p, &op->tape->groups);
}

DTRAIN__PRIVATE dtrain_result dtrain__divide_rows(const dtrain_op *op, int64_t rows,
                                                  uint32_t *placement, dtrain__share *part)
{
    const dtrain__groups *groups = &op->tape->groups;
    const bool even = rows % groups->tensor_ranks == 0;
    *placement = DTRAIN_PLACEMENT_WHOLE;
    if (!groups->sequence_parallel || (!even && op->tape->pass.flags & DTRAIN_TAPE_NO_GRAD))
        return DTRAIN_OK;
    if (!even)
        return dtrain__refuse(op,
                              "sequence parallelism divides rows evenly, and %lld rows (batch * "
                              "sequence) do not divide by the %d ranks of the tensor axis; change "
                              "the batch",
                              (long long)rows, groups->tensor_ranks);
    *placement = DTRAIN_PLACEMENT_ROWS;
    *part = dtrain__cut_part(op, NULL, rows, groups->tensor_rank);
    return DTRAIN_OK;
}

/* Return the input that determines the placement; NULL: all are integers. */
static const dtrain_tensor *dtrain__first_float(const dtrain_op *op)
{
    uint32_t i = 0;
    while (i < op->input_count && !dtrain__is_float(op->inputs[i])) i++;
    return i < op->input_count ? op->inputs[i] : NULL;
}

DTRAIN__PRIVATE dtrain_result dtrain__check_partial(const dtrain_op *op)
{
    const dtrain_node *node = (const dtrain_node *)op;
    const dtrain_tensor *first = dtrain__first_float(op);
    const bool rows = first && first->placement == DTRAIN_PLACEMENT_ROWS;
    for (uint32_t i = 0; i < op->param_count && rows; i++)
        if (node->target[i] && !op->tape->groups.sequence_parallel)
            return dtrain__refuse(op,
                                  "the gradient of parameter %s would be a sum over this rank's "
                                  "rows only, which nobody adds up without the mesh's "
                                  "sequence_parallel; set it, or make input 1 whole with "
                                  "dtrain_place",
                                  dtrain__param_name(op->params[i]));
    return DTRAIN_OK;
}

/* Check that the operation takes the placement of the first tensor and that the others have it.
 * Integers are always whole, which fits columns of all rows. */
static dtrain_result dtrain__check_placements(const dtrain_op *op)
{
    static const char *const others[] = {"", ", or cut by columns", ", or cut by rows"};
    const uint32_t takes = op->desc->placements;
    const dtrain_tensor *first = dtrain__first_float(op);
    if (op->tape->groups.tensor_ranks == 1 || takes & DTRAIN__OP_PLACES) return DTRAIN_OK;
    for (uint32_t i = 0; i < op->input_count; i++) {
        const dtrain_tensor *x = op->inputs[i];
        if (!dtrain__is_float(x) && first && first->placement == DTRAIN_PLACEMENT_COLUMNS) continue;
        if (x->placement & ~takes) /* a placement is the flag that takes it */
            return dtrain__refuse(op, "expected input %u whole%s; dtrain_place converts it", i + 1,
                                  others[takes & DTRAIN__OP_TAKES_ALL]);
        if (first && (x->placement != first->placement ||
                      (x->placement != DTRAIN_PLACEMENT_WHOLE &&
                       !dtrain__share_same(dtrain__tensor_share(x), dtrain__tensor_share(first)))))
            return dtrain__refuse(op, "expected inputs cut alike, into the same parts; "
                                      "dtrain_place converts them");
    }
    for (uint32_t i = 0; i < op->param_count; i++)
        if (op->params[i]->cut.axis)
            return dtrain__refuse(op, "expected whole parameters; leave the cut of %s zeroed",
                                  dtrain__param_name(op->params[i]));
    if (op->param_count && first && first->placement == DTRAIN_PLACEMENT_COLUMNS)
        return dtrain__refuse(op, "expected input 1 whole, or cut by rows, beside a whole "
                                  "parameter; dtrain_place converts it");
    return dtrain__check_partial(op);
}

/* ---- Parameters
 *
 *     declared    the parameter of the call: name, unit, flags, number of uses
 *     storage     the end of its alias chain: addresses of the values and the gradient
 *
 * A tied weight is declared once in each unit that uses it, and stored once. */

DTRAIN__PRIVATE const char *dtrain__param_name(const dtrain_param *p)
{
    return p->name ? p->name : "?";
}

/* Check that `here` values of a parameter are in memory: a sharded strategy has only the gathered
 * unit. */
static dtrain_result dtrain__check_value(const dtrain_op *op, const dtrain_param *p,
                                         const dtrain_param *storage, const dtrain_param *declared,
                                         int64_t here)
{
    const dtrain_tape *tape = op->tape;
    const char *call = op->desc->name, *name = dtrain__param_name(p);
    const bool foreign = tape->strategy && !p->state.storage;
    if (storage->dtype != DTRAIN_DTYPE_F32)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "%s: parameter %s has dtype %s, and the tape computes with fp32 values; "
                           "leave dtype 0, and let DTRAIN_TAPE_BF16 or DTRAIN_TAPE_F16 round them",
                           call, name, dtrain_dtype_name((dtrain_dtype)storage->dtype));
    if (storage->value && !foreign) {
        if (!declared->cut.axis || !declared->count || declared->count == here) return DTRAIN_OK;
        return dtrain_fail(DTRAIN_ERROR_USAGE,
                           "%s: parameter %s has %lld elements on this rank, and the tape needs "
                           "%lld: its strategy cuts it over a mesh; create the tape with that "
                           "strategy",
                           call, name, (long long)declared->count, (long long)here);
    }
    if (p->state.remote && !tape->stages)
        return dtrain_fail(DTRAIN_ERROR_USAGE,
                           "%s: parameter %s is in a stage of another rank of the pipeline axis; "
                           "run passes of a program's own over all stages by "
                           "dtrain_trainer_forward",
                           call, name);
    if (foreign || !tape->strategy)
        return dtrain_fail(DTRAIN_ERROR_USAGE,
                           "%s: parameter %s %s; give it to dtrain_strategy_create first", call,
                           name, foreign ? "belongs to no strategy" : "has no value");
    return dtrain_fail(DTRAIN_ERROR_USAGE,
                       "%s: parameter \"%s\" belongs to unit %u, which is not gathered: the tape "
                       "is in unit %lld (-1: before the first mark); mark each unit with "
                       "dtrain_tape_unit, and register an alias of a parameter in each other unit "
                       "that uses it",
                       call, name, p->unit, (long long)tape->unit);
}

/* Return a parameter's values in the type of autocast: a strategy's copy, or a new one, which
 * belongs to no node because other nodes can use it too. */
static const void *dtrain__param_low(dtrain_tape *tape, const dtrain_param *storage)
{
    const dtrain_dtype dtype = tape->pass.cast;
    const void *gathered;
    bool passing;
    if (dtrain__gathered_as(tape->layout, storage, (uint32_t)dtype, &gathered, &passing))
        return gathered;
    const uint32_t mark = passing ? tape->pass.mark_count : DTRAIN__CAST_LASTS;
    dtrain__cast *cast = tape->casts;
    while (cast && (cast->storage != storage || cast->mark != mark)) cast = cast->next;
    if (cast) return cast->low;
    cast = (dtrain__cast *)dtrain__take_host(tape, tape->arenas, sizeof *cast);
    if (!cast) return NULL; /* the error sticks */
    cast->storage = storage;
    cast->mark = mark;
    cast->count =
        storage->shape[0] ? dtrain__share_here(storage, &tape->groups).count : storage->count;
    if (passing && tape->pass.cast_mark != mark) {
        tape->pass.cast_mark = mark;
        dtrain__bump_rewind(&tape->arenas[DTRAIN__ARENA_CASTS]);
    }
    cast->low = dtrain__take_values(
        tape, &tape->arenas[passing ? DTRAIN__ARENA_CASTS : DTRAIN__ARENA_WEIGHTS], cast->count,
        dtype);
    if (!cast->low) return NULL;
    cast->next = tape->casts;
    tape->casts = cast;
    dtrain__tape_stick(tape, dtrain__tape_convert(tape->device, cast->count, storage->value,
                                                  DTRAIN_DTYPE_F32, cast->low, dtype));
    return cast->low;
}

/* Take the next parameter: its values, and the target of its gradient if it gets one in this pass.
 * A plan can run before values and gradients are allocated. */
static dtrain_result dtrain__take_param(dtrain_node *node, dtrain_param *p)
{
    dtrain_op *op = &node->op;
    dtrain_tape *tape = op->tape;
    const uint32_t i = op->param_count++;
    int64_t *shape = op->param_shape[i];
    if (!p)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: parameter %u is NULL", op->desc->name,
                           i + 1);
    /* follow the registered parameter: the program can pass a copy with an outdated value */
    dtrain_param *storage = p->state.storage ? p->state.storage : p;
    while (storage->alias_of) storage = storage->alias_of;
    const dtrain_param *declared = p->shape[0] || p->count ? p : storage;
    const dtrain__share here = dtrain__share_here(declared, &tape->groups);
    if (!op->planning) DTRAIN__TRY(dtrain__check_value(op, p, storage, declared, here.count));
    memcpy(shape, here.shape, sizeof declared->shape);
    if (shape[0] == 0) shape[0] = declared->count;
    op->params[i] = p;
    op->param_data[i] = storage->value;
    p->state.pending_uses = 0; /* left by a failed backward */
    const bool frozen = dtrain__is_surveying(tape)
                            ? p->state.frozen || storage->state.frozen /* on all ranks alike */
                            : (p->flags | storage->flags) & DTRAIN_PARAM_FROZEN;
    if (!(tape->pass.flags & DTRAIN_TAPE_NO_GRAD) && !frozen &&
        (op->planning || tape->strategy || storage->grad)) {
        node->target[i] = storage;
        op->needs_grad = true;
    }
    if (op->desc->autocast && op->cast != DTRAIN_DTYPE_F32 && shape[1])
        op->param_data[i] =
            node->remote ? (void *)DTRAIN__REMOTE : dtrain__param_low(tape, storage);
    return tape->error;
}

/* ---- What the units of a model cost
 *
 * A tape of the plan device with `costs` adds up the time of each unit's operations. A kernel takes
 * the time of its products or of its bytes, whichever is longer. Both are counted in floating-point
 * operations: a byte counts as the operations that the device does in the time of moving it. */

/* Return the index of a unit; operations before the first mark belong to the first unit. */
static size_t dtrain__cost_place(const dtrain__unit_costs *costs, int64_t unit)
{
    size_t u = 0;
    while (u < costs->count && costs->units[2 * u] != unit) u++;
    return u < costs->count ? u : 0;
}

static void dtrain__cost_add(const dtrain_node *node, double flops)
{
    const dtrain_op *op = &node->op;
    const bool backward = op->tape->pass.state == DTRAIN__TAPE_DONE; /* or recomputation */
    const dtrain__unit_costs *costs = op->tape->costs;
    bool wanted = !backward || op->half != DTRAIN_OP_HALF_INPUTS; /* or the gradient of an input */
    double bytes = 0;
    if (!costs) return;
    /* bytes of one pass over the tensors, and over parameters in a product (an embedding reads only
     * a few rows of its table) */
    for (uint32_t i = 0; i < op->input_count; i++) {
        wanted = wanted || op->inputs[i]->needs_grad;
        bytes += (double)dtrain__tensor_bytes(op->inputs[i]);
    }
    for (uint32_t i = 0; i < op->output_count; i++)
        bytes += (double)dtrain__tensor_bytes(op->outputs[i]);
    for (uint32_t i = 0; i < op->param_count && flops > 0; i++) {
        double count = sizeof(float);
        for (int axis = 0; axis < 4 && op->param_shape[i][axis]; axis++)
            count *= (double)op->param_shape[i][axis];
        bytes += count;
    }
    if (!wanted) return;
    if (backward && op->half == DTRAIN_OP_HALF_BOTH) bytes *= 2;
    dtrain_pipeline_costs *unit = &costs->costs[dtrain__cost_place(costs, node->unit)];
    double *const sum = !backward                           ? &unit->forward
                        : op->half == DTRAIN_OP_HALF_PARAMS ? &unit->weight
                                                            : &unit->backward;
    *sum += flops > costs->flops_per_byte * bytes ? flops : costs->flops_per_byte * bytes;
}

DTRAIN__PRIVATE void dtrain__cost_keep(const dtrain_node *node, int64_t count, uint32_t dtype)
{
    const dtrain__unit_costs *costs = node ? node->op.tape->costs : NULL;
    if (!costs || !costs->kept || node->dropped) return;
    costs->kept[dtrain__cost_place(costs, node->unit)] +=
        (uint64_t)count * dtrain_dtype_bytes((dtrain_dtype)dtype);
}

/* ---- Running ----------------------------------------------------------------------------------*/

/* Call an operation's forward or backward (NULL: neither, in a plan) in a span named after its
 * first parameter, and count its cost. */
DTRAIN__PRIVATE dtrain_result dtrain__op_call(dtrain_op *op, dtrain_result (*run)(dtrain_op *))
{
    dtrain_world *world = op->tape->world;
    const char *name = op->desc->name;
    const double flops = op->tape->flops;
    const uint32_t span = dtrain__detail_begin(world, strncmp(name, "dtrain_", 7) ? name : name + 7,
                                               op->param_count ? op->params[0]->name : NULL);
    const dtrain_result result = run ? run(op) : DTRAIN_OK;
    if (span != DTRAIN__NO_SPAN) {
        dtrain__span_end(world, span);
        op->tape->unit_end_ns = world->timeline.since_ns;
    }
    dtrain__cost_add((const dtrain_node *)op, op->tape->flops - flops);
    return result ? result : op->tape->error;
}

/* Run the node's kernels, the first time or again, on inputs in the type that autocast wants. */
DTRAIN__PRIVATE dtrain_result dtrain__op_run(dtrain_node *node)
{
    dtrain_op *op = &node->op;
    const bool runs = !op->planning || (op->desc->reads & DTRAIN__OP_COUNTS);
    for (uint32_t i = 0; i < op->input_count; i++) {
        const dtrain_tensor *x = op->inputs[i];
        if (op->input_data[i] != node->source[i])
            DTRAIN__TRY(dtrain__tape_convert(op->device, x->count, node->source[i], x->dtype,
                                             (void *)op->input_data[i], op->cast));
    }
    return dtrain__op_call(op, runs ? op->desc->forward : NULL);
}

/* ---- Kernels that several operations launch ---------------------------------------------------*/

/* Set y to x, in its own type. */
DTRAIN__PRIVATE dtrain_result dtrain__tape_convert(dtrain_device *device, int64_t count,
                                                   const void *x, uint32_t x_dtype, void *y,
                                                   uint32_t y_dtype)
{
    const dtrain_convert_args args = {count, x, y, (dtrain_dtype)x_dtype, (dtrain_dtype)y_dtype};
    return device->ops->convert(device, &args);
}

/* Set out to x + y, in x's type. */
DTRAIN__PRIVATE dtrain_result dtrain__tape_add(dtrain_device *device, int64_t count, const void *x,
                                               uint32_t x_dtype, const void *y, uint32_t y_dtype,
                                               void *out)
{
    const dtrain_add_args args = {count, x, y, out, (dtrain_dtype)x_dtype, (dtrain_dtype)y_dtype};
    return device->ops->add(device, &args);
}

/* ---- For authors ------------------------------------------------------------------------------*/

DTRAIN_API dtrain_tensor *dtrain_op_output(dtrain_op *op, dtrain_dtype dtype, uint32_t ndim,
                                           const int64_t *shape)
{
    const uint32_t i = op->output_count;
    if (op->tape->error != DTRAIN_OK) return NULL;
    if (i < DTRAIN_OP_OUTPUTS)
        op->outputs[i] = dtrain__tensor_new(op->tape, (dtrain_node *)op, dtype, ndim, shape);
    else
        dtrain__tape_stick(op->tape, dtrain_fail(DTRAIN_ERROR_USAGE,
                                                 "%s: an operation has at most %d outputs",
                                                 op->desc->name, DTRAIN_OP_OUTPUTS));
    if (op->tape->error != DTRAIN_OK) return NULL;
    op->output_data[i] = op->outputs[i]->data;
    op->output_count++;
    const dtrain_tensor *first = dtrain__first_float(op);
    if (first) { /* placed like that input, or like one of its components of this width */
        dtrain__share part = *dtrain__tensor_share(first);
        const int64_t n = op->outputs[i]->shape[ndim - 1];
        bool each = first->placement == DTRAIN_PLACEMENT_COLUMNS && part.runs > 1;
        for (uint32_t k = 0; k < part.runs && each; k++) each = part.length[k] == n;
        if (each) part = dtrain__component_of(op, first, part.whole / part.runs);
        dtrain__place_as(op->outputs[i], first->placement, &part);
    }
    /* The output is a mean over the samples of its inputs. Of two losses take the one that ignores
     * no targets, which has samples on every rank, or else one that has samples. */
    dtrain__samples *samples = &((dtrain__tape_tensor *)op->outputs[i])->samples;
    for (uint32_t k = 0; k < op->input_count && op->outputs[i]->count == 1; k++) {
        const dtrain_tensor *x = op->inputs[k];
        const dtrain__samples *of = &((const dtrain__tape_tensor *)x)->samples;
        if (x->count == 1 && dtrain__is_float(x) && of->terms &&
            (!samples->terms ||
             (samples->valid && (!of->valid || (of->valid[1] > 0 && samples->valid[1] <= 0)))))
            *samples = *of;
    }
    return op->outputs[i];
}

DTRAIN_API void *dtrain_op_save(dtrain_op *op, dtrain_dtype dtype, int64_t count)
{
    dtrain_node *node = (dtrain_node *)op;
    node->saves = true;
    return dtrain__take_data(op->tape, node, count, dtype);
}

/* Set out (1) to scale * sum of x (count), times factor[0] if factor is not NULL. The sum is a
 * double: a float sum over many rows would lose digits of the loss. */
DTRAIN__PRIVATE dtrain_result dtrain__sum_to(dtrain_device *device, void *out, const void *x,
                                             uint32_t dtype, int64_t count, double scale,
                                             const float *factor)
{
    dtrain_sum_args args;
    memset(&args, 0, sizeof args);
    args.count = count;
    args.scale = scale;
    args.x = x;
    args.out = (float *)out;
    args.dtype = (dtrain_dtype)dtype;
    args.factor = factor;
    return device->ops->sum(device, &args);
}

/* Write a shape, "(6, 16)", with "any" for -1, to the caller's text. */
DTRAIN__PRIVATE const char *dtrain__shape_text(const int64_t shape[4], char *text)
{
    size_t used = 0;
    for (uint32_t i = 0; i < 4 && (i == 0 || shape[i]); i++) {
        char length[24] = "any";
        if (shape[i] >= 0) snprintf(length, sizeof length, "%lld", (long long)shape[i]);
        used += (size_t)snprintf(text + used, DTRAIN__SHAPE_TEXT - used, "%s%s", i ? ", " : "(",
                                 length);
    }
    snprintf(text + used, DTRAIN__SHAPE_TEXT - used, ")");
    return text;
}

#define DTRAIN__SHARE_TEXT 224 /* 4 runs of two numbers of 19 digits fit */

/* Write the runs of a part, "0-5 and 12-17 of 24", to the caller's text. */
static const char *dtrain__share_text(const dtrain__share *part, char *text)
{
    size_t used = 0;
    for (uint32_t i = 0; i < part->runs; i++)
        used += (size_t)snprintf(text + used, DTRAIN__SHARE_TEXT - used, "%s%lld-%lld",
                                 i ? " and " : "", (long long)part->first[i],
                                 (long long)(part->first[i] + part->length[i] - 1));
    if (part->axis < 0)
        snprintf(text, DTRAIN__SHARE_TEXT, "all of %lld", (long long)part->shape[0]);
    else snprintf(text + used, DTRAIN__SHARE_TEXT - used, " of %lld", (long long)part->whole);
    return text;
}

DTRAIN__PRIVATE dtrain_result dtrain__refuse(const dtrain_op *op, const char *format, ...)
{
    static const char *const placements[3] = {"whole", "cut by columns", "cut by rows"};
    char why[512], found[DTRAIN__ERROR_BYTES], shape[DTRAIN__SHAPE_TEXT], text[DTRAIN__SHARE_TEXT];
    const bool cut = op->tape->groups.tensor_ranks > 1;
    size_t used = 0;
    va_list args;
    va_start(args, format);
    vsnprintf(why, sizeof why, format, args);
    va_end(args);
    found[0] = 0;
    for (uint32_t k = 0; k < op->input_count + op->param_count && used < sizeof found; k++) {
        const uint32_t i = k < op->input_count ? k : k - op->input_count;
        const dtrain_tensor *x = k < op->input_count ? op->inputs[i] : NULL;
        const dtrain__share part = x ? *dtrain__tensor_share(x) : dtrain__param_share(op, i);
        const uint32_t placement = !cut            ? 0
                                   : x             ? x->placement
                                   : part.axis < 0 ? 0
                                                   : 2 - (uint32_t)part.axis;
        char number[12];
        snprintf(number, sizeof number, "%u", i + 1);
        used += (size_t)snprintf(
            found + used, sizeof found - used, "; %s %.99s is %s%s%s%s%s %s",
            x ? "input" : "parameter", x ? number : dtrain__param_name(op->params[i]),
            cut ? placements[placement] : "", placement ? ", on this rank " : "",
            placement ? dtrain__share_text(&part, text) : "", cut ? ", " : "",
            dtrain__shape_text(x ? x->shape : op->param_shape[i], shape),
            dtrain_dtype_name(x ? (dtrain_dtype)x->dtype : DTRAIN_DTYPE_F32));
    }
    return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: %s%s", op->desc->name, why, found);
}

DTRAIN_API dtrain_result dtrain_op_check_param(const dtrain_op *op, uint32_t i, int64_t rows,
                                               int64_t columns)
{
    const int64_t expected[4] = {rows, columns, 0, 0};
    char text[DTRAIN__SHAPE_TEXT];
    bool same = i < op->param_count;
    for (int a = 0; a < 4 && same; a++)
        same = expected[a] < 0 ? op->param_shape[i][a] > 0 : op->param_shape[i][a] == expected[a];
    if (same) return DTRAIN_OK;
    return dtrain__refuse(op, "parameter %s must be %s",
                          i < op->param_count ? dtrain__param_name(op->params[i])
                                              : "that is missing",
                          dtrain__shape_text(expected, text));
}
