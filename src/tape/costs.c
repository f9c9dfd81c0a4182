/* What the units of a model cost
 *
 * A tape of the plan device with `costs` adds up the time of each unit's operations. A kernel takes
 * the time of its products or of its bytes, whichever is longer. Both are counted in floating-point
 * operations: a byte counts as the operations that the device does in the time of moving it. */

#include "core/platform_internal.h"
#include "tape/tape_internal.h"

/* Return the index of a unit; operations before the first mark belong to the first unit. */
static size_t dtrain__cost_place(const dtrain__unit_costs *costs, int64_t unit)
{
    size_t u = 0;
    while (u < costs->count && costs->units[2 * u] != unit) u++;
    return u < costs->count ? u : 0;
}

DTRAIN__PRIVATE void dtrain__cost_add(const dtrain_node *node, double flops)
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
