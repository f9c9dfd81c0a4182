/* What the units of a model cost
 *
 * A tape of the plan device that has `costs` adds up what each unit's operations would take. A
 * kernel takes as long as its products or as long as its bytes, whichever is longer; both are
 * counted in floating-point operations, a byte as so many as the device does while it moves one. */

#include "core/platform_internal.h"
#include "tape/tape_internal.h"

/* Count the bytes that one pass over an operation's tensors moves, and over its parameters where it
 * multiplies by them: an embedding reads a few rows of its table. */
static double dtrain__cost_bytes(const dtrain_op *op, bool multiplies)
{
    double bytes = 0;
    for (uint32_t i = 0; i < op->input_count; i++)
        bytes += (double)dtrain__tensor_bytes(op->inputs[i]);
    for (uint32_t i = 0; i < op->output_count; i++)
        bytes += (double)dtrain__tensor_bytes(op->outputs[i]);
    for (uint32_t i = 0; i < op->param_count && multiplies; i++) {
        double count = 1;
        for (int axis = 0; axis < 4 && op->param_shape[i][axis]; axis++)
            count *= (double)op->param_shape[i][axis];
        bytes += count * (double)sizeof(float);
    }
    return bytes;
}

/* Return the place of a unit; what runs before the first mark belongs to the first one. */
static size_t dtrain__cost_place(const dtrain__unit_costs *costs, int64_t unit)
{
    size_t u = 0;
    while (u < costs->count && costs->units[2 * u] != unit) u++;
    return u < costs->count ? u : 0;
}

/* Tell whether a call is the half of gradients that nobody wants. */
static bool dtrain__cost_is_none(const dtrain_op *op)
{
    bool wanted = op->half != DTRAIN_OP_HALF_INPUTS;
    for (uint32_t i = 0; i < op->input_count; i++) wanted = wanted || op->inputs[i]->needs_grad;
    return !wanted;
}

DTRAIN__PRIVATE void dtrain__cost_add(const dtrain_node *node, bool backward, double flops)
{
    const dtrain_op *op = &node->op;
    const dtrain__unit_costs *costs = op->tape->costs;
    if (!costs || (backward && dtrain__cost_is_none(op))) return;
    dtrain_pipeline_costs *unit = &costs->costs[dtrain__cost_place(costs, node->unit)];
    const bool both = backward && op->half == DTRAIN_OP_HALF_BOTH;
    const double bytes = dtrain__cost_bytes(op, flops > 0) * (both ? 2 : 1);
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
