/* Activation checkpointing
 *
 * A unit that drops results writes them to one of two regions instead of the data arena; such units
 * use the regions in turn. Units 1 to 4, in regions A and B:
 *
 *     forward      1 -> A     2 -> B     3 -> A     4 -> B
 *     backward     4 is in B, 3 is in A     2 again -> B     1 again -> A
 *
 * When backward enters an overwritten unit, the operations of the unit run forward again: the same
 * kernels on the same addresses with the same random streams, so the bits are the same, and no
 * pointer changes. Operations whose results are not read are left out: only the next block reads
 * the last product of a transformer block, a third of its multiplications, and it reads a copy.
 *
 * The copy is made when an operation of a later unit takes the tensor. The tensor's unit is still
 * intact then, because the next unit writes to the other region. From then on tensor->data is the
 * copy, in the data arena; the operations of the tensor's unit keep the address in the region. */

#include "core/platform_internal.h"
#include "tape/tape_internal.h"

/* Let the segment own its region and overwrite the results of the last owner. */
static void dtrain__region_take(dtrain__tape_segment *segment)
{
    dtrain__tape_segment *before = segment->region->owner;
    if (before && !before->successor) before->successor = segment;
    segment->region->owner = segment;
}

/* Begin a segment after a mark, if this unit drops results. */
DTRAIN__PRIVATE void dtrain__segment_begin(dtrain_tape *tape)
{
    const uint32_t every = tape->recompute_every, mark = tape->pass.mark_count++;
    tape->pass.segment = NULL;
    if (tape->error != DTRAIN_OK || every == 0 || mark % every != every - 1) return;
    if (dtrain__stage_is_remote(tape)) return;
    dtrain__tape_segment *segment =
        (dtrain__tape_segment *)dtrain__take_host(tape, tape->slot->arenas, sizeof *segment);
    if (!segment) return;
    segment->unit = tape->unit;
    segment->region = &tape->slot->arenas[DTRAIN__ARENA_REGION + tape->pass.segment_count++ % 2];
    dtrain__region_take(segment);
    dtrain__bump_rewind(segment->region);
    tape->pass.segment = segment;
}

/* Check that x's values have not been overwritten by a later unit. */
DTRAIN__PRIVATE dtrain_result dtrain__check_intact(const dtrain_tensor *x, const char *call)
{
    const dtrain__tape_tensor *made = (const dtrain__tape_tensor *)x;
    if (!made->segment || made->kept || !made->segment->successor) return DTRAIN_OK;
    return dtrain_fail(
        DTRAIN_ERROR_USAGE,
        "%s: a tensor made in unit %lld is needed after unit %lld has overwritten it: activation "
        "checkpointing keeps it until then only; use it in the unit that follows its own (a "
        "dtrain_scale by 1 hands it on), or drop less with dtrain_tape_recompute",
        call, (long long)made->segment->unit, (long long)made->segment->successor->unit);
}

/* Copy x's values before a use outside their segment: x->data then lasts until the next begin. */
DTRAIN__PRIVATE dtrain_result dtrain__tensor_keep(dtrain_tape *tape, dtrain_tensor *x,
                                                  const char *call)
{
    dtrain__tape_tensor *made = (dtrain__tape_tensor *)x;
    if (!made->segment || made->kept || made->segment == tape->pass.segment) return DTRAIN_OK;
    DTRAIN__TRY(dtrain__check_intact(x, call));
    void *copy = dtrain__take_data(tape, NULL, x->count, x->dtype);
    if (!copy) return tape->error;
    DTRAIN__TRY(tape->device->ops->copy(tape->device, copy, x->data, dtrain__tensor_bytes(x),
                                        DTRAIN_COPY_DEVICE_TO_DEVICE));
    x->data = copy;
    made->kept = true;
    return DTRAIN_OK;
}

/* Mark values that are read at their addresses in the segment. */
static void dtrain__want(const dtrain__tape_segment *segment, dtrain_tensor *const *tensors,
                         uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        dtrain__tape_tensor *made = (dtrain__tape_tensor *)tensors[i];
        if (made->segment == segment) made->wanted = true;
    }
}

/* Recompute the segment's values that backward needs, if they are overwritten; node is the last
 * node with a backward to run.
 *
 * 1. tensors that backward functions read are wanted
 * 2. from the last dropped node to the first: a node is needed if one of its outputs is wanted or
 *    its backward reads its saved memory; then its inputs are wanted too
 * 3. the needed nodes run in the order of forward */
DTRAIN__PRIVATE dtrain_result dtrain__segment_again(dtrain_tape *tape, const dtrain_node *node)
{
    dtrain__tape_segment *segment = node->segment;
    dtrain_node *first = NULL, *made, *before;
    if (!segment || segment->region->owner == segment) return DTRAIN_OK; /* intact, or made again */
    dtrain__region_take(segment);
    for (; node && node->segment == segment; node = node->previous) {
        const dtrain_op *op = &node->op;
        if (!node->reached) continue;
        if (op->reads & DTRAIN_OP_READS_INPUTS) dtrain__want(segment, op->inputs, op->input_count);
        if (op->reads & DTRAIN_OP_READS_OUTPUTS)
            dtrain__want(segment, op->outputs, op->output_count);
    }
    for (made = segment->dropped; made; made = before) {
        before = made->redo;
        bool needed = made->reached && made->saves;
        for (uint32_t i = 0; i < made->op.output_count; i++)
            needed = needed || ((dtrain__tape_tensor *)made->op.outputs[i])->wanted;
        if (!needed) continue;
        dtrain__want(segment, made->op.inputs, made->op.input_count);
        made->redo = first;
        first = made;
    }
    for (made = first; made; made = made->redo, tape->pass.recomputed_count++)
        DTRAIN__TRY(dtrain__op_run(made));
    return DTRAIN_OK;
}

DTRAIN_API dtrain_result dtrain_tape_recompute(dtrain_tape *tape, uint32_t every, uint32_t ops)
{
    const char *const call = "dtrain_tape_recompute";
    if (!tape) return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: tape is NULL", call);
    if (ops & ~DTRAIN_RECOMPUTE_ALL)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: unknown operations %#x", call, ops);
    tape->recompute_every = every;
    tape->recompute_ops = ops ? ops : DTRAIN_RECOMPUTE_ALL;
    return DTRAIN_OK;
}
