/* Stages: a part of a model, several passes at once
 *
 * The model's function runs whole on each rank. Operations of other stages than the one that a pass
 * is of are prepared alone, so that shapes, placements and the numbers of dropout's streams are
 * those of the whole model:
 *
 *     unit           0        1        2        3
 *     stage          0        0        1        1
 *     rank 0      computes computes  remote   remote        x crosses: rank 0 sends it after the
 *     rank 1      remote   remote  computes computes        pass, rank 1 finds it where its remote
 *                            x ------>                      would have been
 *
 * Inputs cross nowhere: all ranks of a pipeline have the batch, and a rank uploads what its own
 * stages read. The first of its passes of a micro-batch does; later ones share it. */

#include "core/platform_internal.h"
#include "tape/stage_internal.h"
#include "tape/tape_internal.h"

/* ---- Slots ------------------------------------------------------------------------------------*/

static void dtrain__slot_select(dtrain_tape *tape, dtrain__pass_slot *slot)
{
    tape->slot->pass = tape->pass;
    tape->pass = slot->pass;
    tape->slot = slot;
}

DTRAIN__PRIVATE dtrain_result dtrain__stages_create(dtrain_tape *tape, int32_t count,
                                                    const bool *here, const int32_t *stage_units,
                                                    size_t unit_count, uint32_t slot_count,
                                                    uint32_t inbox_count)
{
    const dtrain_allocator *a = &tape->allocator;
    dtrain__stages *stages = (dtrain__stages *)dtrain__alloc(a, 1, sizeof *stages, "stages");
    if (!stages) return DTRAIN_ERROR_MEMORY;
    dtrain__slots_free(tape); /* other ranks reach the memory of a tape with stages */
    tape->stages = stages;
    stages->count = count;
    stages->here = here;
    stages->stage_units = stage_units;
    stages->unit_count = unit_count;
    DTRAIN__TRY(dtrain__slots_create(tape, slot_count));
    dtrain__arena_add(tape, &stages->zeros, tape->device);
    stages->inboxes =
        (dtrain__inbox *)dtrain__alloc(a, inbox_count, sizeof *stages->inboxes, "inboxes");
    if (!stages->inboxes) return DTRAIN_ERROR_MEMORY;
    stages->inbox_count = inbox_count;
    for (uint32_t i = 0; i < inbox_count; i++)
        dtrain__arena_add(tape, &stages->inboxes[i].arena, tape->device);
    return DTRAIN_OK;
}

DTRAIN__PRIVATE void dtrain__stages_free(dtrain_tape *tape)
{
    dtrain__stages *stages = tape->stages;
    if (!stages) return;
    dtrain__free(&tape->allocator, stages->lists, stages->list_bytes, 1);
    dtrain__free(&tape->allocator, stages->inboxes, stages->inbox_count, sizeof *stages->inboxes);
    dtrain__free(&tape->allocator, stages, 1, sizeof *stages);
    tape->stages = NULL;
}

/* ---- Remote: what the tape asks ---------------------------------------------------------------*/

DTRAIN__PRIVATE bool dtrain__is_surveying(const dtrain_tape *tape)
{
    return tape->stages && tape->slot->stage == DTRAIN__SURVEY;
}

DTRAIN__PRIVATE bool dtrain__stage_is_remote(const dtrain_tape *tape)
{
    return tape->stages && tape->stages->at != tape->slot->stage;
}

/* Note which stage the pass has come to. */
DTRAIN__PRIVATE dtrain_result dtrain__stage_enter(dtrain_tape *tape, int64_t unit)
{
    dtrain__stages *stages = tape->stages;
    size_t i = 0;
    if (!stages) return DTRAIN_OK;
    while (i < stages->unit_count && stages->stage_units[2 * i] != unit) i++;
    if (i == stages->unit_count)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_tape_unit: no parameter belongs to unit %lld, so that it is on "
                           "no stage of the pipeline; mark units that have parameters",
                           (long long)unit);
    const int32_t stage = stages->stage_units[2 * i + 1];
    if (stage < stages->at)
        return dtrain_fail(DTRAIN_ERROR_USAGE,
                           "dtrain_tape_unit: unit %lld is on stage %d of the pipeline, and the "
                           "pass has come to stage %d; use units in the order in which their first "
                           "parameters are registered, and register an alias of a parameter in "
                           "each other unit that uses it",
                           (long long)unit, (int)stage, (int)stages->at);
    stages->at = stage;
    return DTRAIN_OK;
}

DTRAIN__PRIVATE void dtrain__stage_made(dtrain_tape *tape, dtrain__tape_tensor *made,
                                        const dtrain_node *node)
{
    const dtrain__stages *stages = tape->stages;
    dtrain__pass_slot *slot = tape->slot;
    dtrain_tensor *x = &made->tensor;
    made->stage = made->last_stage = node ? stages->at : -1;
    made->remote = x->data == (void *)DTRAIN__REMOTE;
    if (slot->stage == DTRAIN__SURVEY || !node) {
        made->next = slot->listed;
        slot->listed = made;
        return;
    }
    if (slot->next_crossing == stages->crossing_count) return;
    const dtrain__crossing *crossing = &stages->crossings[slot->next_crossing];
    if (crossing->number != tape->pass.tensor_count) return;
    dtrain__crossed *crossed = &slot->crossed[slot->next_crossing++];
    if (crossing->stage != made->stage || crossing->count != x->count ||
        crossing->dtype != x->dtype) {
        dtrain__tape_stick(
            tape,
            dtrain_fail(DTRAIN_ERROR_USAGE,
                        "tensor %zu of the loss, which crosses stages, has %lld elements of %s and "
                        "is made in stage %d; in the first micro-batch it had %lld of %s, in stage "
                        "%d; which operations the loss calls must not depend on values, and all "
                        "micro-batches of a step over a pipeline have the same shapes",
                        crossing->number, (long long)x->count,
                        dtrain_dtype_name((dtrain_dtype)x->dtype), (int)made->stage,
                        (long long)crossing->count,
                        dtrain_dtype_name((dtrain_dtype)crossing->dtype), (int)crossing->stage));
        return;
    }
    crossed->tensor = made;
    if (!made->remote || !crossed->received) return;
    made->remote = false;
    x->data = crossed->received;
}

DTRAIN__PRIVATE dtrain_result dtrain__stage_reads(dtrain_tape *tape, dtrain_tensor *x)
{
    const dtrain__stages *stages = tape->stages;
    dtrain__tape_tensor *made = (dtrain__tape_tensor *)x;
    if (!stages) return DTRAIN_OK;
    if (stages->at > made->last_stage && made->stage >= 0) made->last_stage = stages->at;
    if (dtrain__is_surveying(tape)) made->wanted = made->wanted || stages->here[stages->at];
    if (dtrain__stage_is_remote(tape) || !made->remote) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_USAGE,
                       "stage %d reads a tensor of stage %d, which it did not do in the first "
                       "micro-batch; which operations the loss calls must not depend on values",
                       (int)stages->at, (int)made->stage);
}

/* Tell whether the next input has memory of its own in this pass. */
DTRAIN__PRIVATE bool dtrain__input_is_here(const dtrain_tape *tape)
{
    const dtrain__stages *stages = tape->stages;
    if (!stages) return true;
    const size_t number = tape->slot->input_count;
    return !dtrain__is_surveying(tape) && tape->slot->batch == tape->slot &&
           number < stages->input_count && stages->reads[number];
}

DTRAIN__PRIVATE dtrain_result dtrain__input_share(dtrain_tape *tape, dtrain_tensor *x, bool *shared)
{
    dtrain__stages *stages = tape->stages;
    *shared = false;
    if (!stages) return DTRAIN_OK;
    dtrain__pass_slot *slot = tape->slot;
    const size_t number = slot->input_count++;
    if (x->needs_grad)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "dtrain_tape_input: a pipeline has no gradients of inputs; leave "
                           "requires_grad false");
    if (slot->batch == slot) return DTRAIN_OK;
    const dtrain__tape_tensor *before = slot->batch->listed; /* of the micro-batch's first pass */
    for (size_t i = slot->batch->input_count; before && i > number + 1; i--) before = before->next;
    if (!before) return DTRAIN_OK;
    if (before->tensor.count != x->count || before->tensor.dtype != x->dtype)
        return dtrain_fail(DTRAIN_ERROR_USAGE,
                           "dtrain_tape_input: input %zu has %lld elements, and %lld in this "
                           "micro-batch's first pass on this rank; every pass of a pipeline makes "
                           "the same inputs",
                           number + 1, (long long)x->count, (long long)before->tensor.count);
    x->data = before->tensor.data;
    ((dtrain__tape_tensor *)x)->remote = before->remote;
    ((dtrain__tape_tensor *)x)->samples = before->samples;
    *shared = true;
    return DTRAIN_OK;
}

/* ---- The survey -------------------------------------------------------------------------------*/

/* Note what the model, run with all stages remote, has shown: first how much, for one piece of
 * memory with all lists. */
static dtrain_result dtrain__survey_end(dtrain_tape *tape)
{
    dtrain__stages *stages = tape->stages;
    const dtrain__tape_tensor *made = tape->slot->listed;
    size_t count = 0, inputs = 0, number = tape->pass.tensor_count;
    for (const dtrain__tape_tensor *x = made; x; x = x->next) {
        inputs += x->stage < 0;
        count += x->last_stage > x->stage;
    }
    if (!stages->lists || count != stages->crossing_count || inputs != stages->input_count) {
        const size_t crossed = tape->slot_count * count, received = stages->inbox_count * count;
        dtrain__free(&tape->allocator, stages->lists, stages->list_bytes, 1);
        stages->crossing_count = stages->input_count = 0;
        stages->list_bytes = count * sizeof *stages->crossings + received * sizeof(void *) +
                             crossed * sizeof(dtrain__crossed) + inputs * sizeof *stages->reads;
        stages->lists =
            dtrain__alloc(&tape->allocator, stages->list_bytes, 1, "what crosses stages");
        if (!stages->lists) return DTRAIN_ERROR_MEMORY;
        stages->crossing_count = count;
        stages->input_count = inputs;
        stages->crossings = (dtrain__crossing *)stages->lists;
        for (size_t i = 0; i < tape->slot_count; i++)
            tape->slots[i].crossed = (dtrain__crossed *)(stages->crossings + count) + i * count;
        void **const inbox = (void **)(tape->slots[0].crossed + crossed);
        for (size_t i = 0; i < stages->inbox_count; i++)
            stages->inboxes[i].received = inbox + i * count;
        stages->reads = (bool *)(inbox + received);
    }
    for (const dtrain__tape_tensor *x = made; x; x = x->next, number--) {
        if (x->stage < 0) stages->reads[--inputs] = x->wanted;
        if (x->last_stage <= x->stage) continue;
        dtrain__crossing *crossing = &stages->crossings[--count];
        crossing->number = number;
        crossing->stage = x->stage;
        crossing->last_stage = x->last_stage;
        crossing->count = x->tensor.count;
        crossing->dtype = x->tensor.dtype;
        crossing->grad = x->tensor.needs_grad;
    }
    return DTRAIN_OK;
}

/* ---- Passes -----------------------------------------------------------------------------------*/

DTRAIN__PRIVATE void dtrain__stage_reset(dtrain_tape *tape)
{
    dtrain__stages *stages = tape->stages;
    const size_t count = tape->slot_count * stages->crossing_count;
    dtrain__tape_reset(tape);
    if (count) memset(tape->slots[0].crossed, 0, count * sizeof(dtrain__crossed));
}

DTRAIN__PRIVATE bool dtrain__stage_item(const dtrain_tape *tape, int32_t stage, bool gradient,
                                        size_t i, size_t *crossing)
{
    const dtrain__stages *stages = tape->stages;
    for (size_t k = 0; k < stages->crossing_count; k++) {
        const dtrain__crossing *c = &stages->crossings[k];
        if (c->stage > stage || c->last_stage <= stage || (gradient && !c->grad)) continue;
        *crossing = k;
        if (i-- == 0) return true;
    }
    return false;
}

DTRAIN__PRIVATE dtrain_result dtrain__stage_receive(dtrain_tape *tape, uint32_t number,
                                                    int32_t stage)
{
    const dtrain__stages *stages = tape->stages;
    dtrain__inbox *inbox = &stages->inboxes[number];
    dtrain__bump_rewind(&inbox->arena);
    for (size_t i = 0, k; dtrain__stage_item(tape, stage - 1, false, i, &k); i++) {
        const dtrain__crossing *c = &stages->crossings[k];
        inbox->received[k] = dtrain__take_values(tape, &inbox->arena, c->count, c->dtype);
        if (!inbox->received[k]) return tape->error;
    }
    return DTRAIN_OK;
}

DTRAIN__PRIVATE void dtrain__stage_sent(const dtrain_tape *tape, uint32_t number)
{
    const dtrain__stages *stages = tape->stages;
    for (size_t k = 0; k < stages->crossing_count; k++) {
        dtrain__crossed *crossed = &tape->slots[number].crossed[k];
        dtrain__scratch_give(crossed->sent);
        crossed->sent = NULL;
    }
}

DTRAIN__PRIVATE dtrain_result dtrain__stage_begin(dtrain_tape *tape, uint32_t number,
                                                  uint32_t batch, int32_t stage,
                                                  dtrain__stage_source source, uint32_t flags,
                                                  uint64_t seed)
{
    dtrain__stages *stages = tape->stages;
    dtrain__pass_slot *slot = &tape->slots[number];
    dtrain__slot_select(tape, slot);
    for (size_t k = 0; k < stages->crossing_count; k++) {
        dtrain__crossed *crossed = &slot->crossed[k];
        if (crossed->tensor && crossed->tensor->gradient) crossed->sent = crossed->tensor->gradient;
        crossed->tensor = NULL; /* a gradient of the slot's last pass may be under way */
        crossed->received = NULL;
    }
    slot->stage = stage;
    slot->batch = &tape->slots[batch];
    slot->listed = NULL;
    slot->next_crossing = slot->input_count = 0;
    stages->at = 0;
    for (size_t i = 0, k; dtrain__stage_item(tape, stage - 1, false, i, &k); i++)
        slot->crossed[k].received = source.inbox >= 0
                                        ? stages->inboxes[source.inbox].received[k]
                                        : tape->slots[source.slot].crossed[k].tensor->tensor.data;
    return dtrain__pass_begin(tape, flags, seed);
}

DTRAIN__PRIVATE dtrain_result dtrain__stage_end(dtrain_tape *tape)
{
    const dtrain__stages *stages = tape->stages;
    const dtrain__pass_slot *slot = tape->slot;
    DTRAIN__TRY(tape->error);
    if (slot->stage == DTRAIN__SURVEY) return dtrain__survey_end(tape);
    if (slot->next_crossing == stages->crossing_count && stages->at == stages->count - 1)
        return DTRAIN_OK;
    return dtrain__tape_stick(
        tape, dtrain_fail(DTRAIN_ERROR_USAGE,
                          "the loss made %zu of the %zu tensors that cross stages, and came to "
                          "stage %d of %d: which operations it calls must not depend on values",
                          slot->next_crossing, stages->crossing_count, (int)stages->at,
                          (int)stages->count));
}

DTRAIN__PRIVATE dtrain_result dtrain__stage_seed(dtrain_tape *tape, uint32_t number,
                                                 const uint32_t *from)
{
    dtrain__pass_slot *slot = &tape->slots[number];
    for (size_t i = 0, k; dtrain__stage_item(tape, slot->stage, true, i, &k); i++) {
        dtrain__tape_tensor *x = slot->crossed[k].tensor;
        bool accumulate;
        if (from) {
            dtrain__tape_tensor *y = tape->slots[*from].crossed[k].tensor;
            x->gradient = y->gradient;
            x->tensor.grad = y->tensor.grad;
            y->gradient = NULL;
            y->tensor.grad = NULL;
        } else DTRAIN__TRY(dtrain__gradient_open(tape, &x->tensor, &accumulate));
    }
    return DTRAIN_OK;
}

DTRAIN__PRIVATE dtrain_result dtrain__stage_backward(dtrain_tape *tape, uint32_t number,
                                                     dtrain_tensor *loss, float scale, bool more,
                                                     bool halves)
{
    dtrain__pass_slot *slot = &tape->slots[number];
    dtrain__slot_select(tape, slot);
    tape->pass.more = more;
    tape->pass.halves = halves;
    for (size_t i = 0, k; dtrain__stage_item(tape, slot->stage, true, i, &k); i++) {
        dtrain__tape_tensor *x = slot->crossed[k].tensor;
        if (x->tensor.producer) x->tensor.producer->reached = true;
        if (x->tensor.needs_grad || !x->gradient) continue;
        dtrain__scratch_give(x->gradient); /* it came for parameters frozen in this step */
        x->gradient = NULL;
        x->tensor.grad = NULL;
    }
    DTRAIN__TRY(dtrain__backward_pass(tape, loss, scale));
    dtrain_result result = DTRAIN_OK; /* what is sent and has no contribution is zero */
    for (size_t i = 0, k; !result && dtrain__stage_item(tape, slot->stage - 1, true, i, &k); i++)
        result = dtrain__gradient_zeros(tape, &slot->crossed[k].tensor->tensor);
    return dtrain__tape_stick(tape, result);
}

DTRAIN__PRIVATE dtrain_result dtrain__stage_weights(dtrain_tape *tape, uint32_t number)
{
    dtrain__slot_select(tape, &tape->slots[number]);
    return dtrain__backward_params(tape);
}

DTRAIN__PRIVATE void *dtrain__crossing_zeros(dtrain_tape *tape, size_t crossing)
{
    dtrain__stages *stages = tape->stages;
    dtrain__bump *zeros = &stages->zeros;
    const dtrain__crossing *c = &stages->crossings[crossing];
    const uint64_t bytes = zeros->bytes;
    dtrain__bump_rewind(zeros);
    void *memory = dtrain__take_values(tape, zeros, c->count, c->dtype);
    if (memory && zeros->bytes > bytes)
        dtrain__tape_stick(
            tape, tape->device->ops->zero(tape->device, memory, (size_t)(zeros->bytes - bytes)));
    return memory;
}

DTRAIN__PRIVATE void *dtrain__stage_data(const dtrain_tape *tape, uint32_t slot, size_t crossing,
                                         bool gradient)
{
    const dtrain__crossed *crossed = &tape->slots[slot].crossed[crossing];
    const dtrain__tape_tensor *x = crossed->tensor;
    if (!gradient && crossed->received) return crossed->received;
    return !x ? NULL : gradient ? x->tensor.grad : x->tensor.data;
}
