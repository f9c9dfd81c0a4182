/* Tape and tensors
 *
 * A pass from begin to backward: its inputs and unit marks. Operations are in tape/op.c, backward
 * in tape/backward.c; tape_internal.h describes the memory of a pass. */

#include "core/platform_internal.h"
#include "device/device_internal.h"
#include "world/timeline_internal.h"
#include "world/world_internal.h"
#include "tape/stage_internal.h"
#include "tape/tape_internal.h"

DTRAIN__PRIVATE void dtrain__tape_plan(dtrain_tape *tape, const struct dtrain__layout *layout,
                                       const dtrain__groups *groups)
{
    dtrain__groups *own = &tape->groups;
    tape->layout = layout;
    *own = *groups;
    own->data = own->copy = own->tensor = own->pipeline = own->model = own->all = NULL;
}

/* Wait until the uploads of a pass are done (they are once its loss has been read), so that the
 * next pass can use their page-locked memory. */
static dtrain_result dtrain__uploads_await(dtrain_tape *tape)
{
    bool done = true;
    if (tape->inputs.next)
        DTRAIN__TRY(tape->device->ops->event_query(tape->device, tape->uploaded, &done));
    tape->inputs.next = 0;
    return done ? DTRAIN_OK : tape->device->ops->synchronize(tape->device);
}

static void dtrain__pinned_free(dtrain_device *device, dtrain__feed_item *item)
{
    if (item->pinned)
        device->ops->host_free(device, item->pinned, item->room + DTRAIN__VALID_BYTES);
    item->pinned = NULL;
    item->room = 0;
}

DTRAIN_API dtrain_result dtrain_tape_create(dtrain_world *world, dtrain_strategy *strategy,
                                            dtrain_device *device, dtrain_tape **out)
{
    if (!out) return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_tape_create: out is NULL");
    *out = NULL;
    if (!world && !device)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_tape_create: world and device are both "
                                                  "NULL; a tape needs a device to run on");
    dtrain__groups groups;
    dtrain_allocator allocator = dtrain__resolve_allocator(world ? &world->allocator : NULL);
    dtrain_tape *tape = (dtrain_tape *)dtrain__alloc(&allocator, 1, sizeof *tape, "a tape");
    if (!tape) return DTRAIN_ERROR_MEMORY;
    tape->allocator = allocator;
    tape->groups.tensor_ranks = 1;
    tape->device = device ? device : dtrain_world_device(world);
    /* The world's timeline shows the passes. A tape of the plan device has only the sizes of a
     * strategy: it changes neither world nor strategy, and sends nothing. */
    const bool plans = tape->device->ops == dtrain__plan_device_ops();
    if (strategy) groups = dtrain__groups_of(strategy);
    if (strategy) dtrain__tape_plan(tape, dtrain__layout_of(strategy), &groups);
    if (!plans) tape->world = !world && strategy ? dtrain__world_of(strategy) : world;
    if (!plans && strategy) {
        tape->strategy = strategy;
        tape->groups = groups;
        dtrain__expect_tape(strategy);
    }
    tape->unit = -1;
    const dtrain_result result = dtrain__slots_create(tape, 1);
    if (result == DTRAIN_OK) *out = tape;
    else dtrain_tape_destroy(tape);
    return result;
}

DTRAIN_API void dtrain_tape_destroy(dtrain_tape *tape)
{
    if (!tape) return;
    dtrain_allocator allocator = tape->allocator;
    (void)dtrain__uploads_await(tape);
    for (size_t i = 0; i < tape->inputs.count; i++)
        dtrain__pinned_free(tape->device, &tape->inputs.items[i]);
    if (tape->uploaded) tape->device->ops->event_destroy(tape->device, tape->uploaded);
    dtrain__slots_free(tape);
    if (tape->stages)
        dtrain__free(&allocator, tape->stages->inboxes, tape->stages->inbox_count,
                     sizeof *tape->stages->inboxes);
    dtrain__free(&allocator, tape->stages, 1, sizeof *tape->stages);
    dtrain__free(&allocator, tape, 1, sizeof *tape);
}

/* ---- Errors
 *
 * The tape keeps the sentence with the code: other calls on this thread can replace the thread's
 * last error before the program asks. */

/* Keep the first error of a pass. Returns `result`. */
DTRAIN__PRIVATE dtrain_result dtrain__tape_stick(dtrain_tape *tape, dtrain_result result)
{
    if (result != DTRAIN_OK && tape->error == DTRAIN_OK) {
        tape->error = result;
        memcpy(tape->error_text, dtrain_last_error(), sizeof tape->error_text);
    }
    return result;
}

/* Return the error that sticks to the tape, and make its sentence the last one. */
static dtrain_result dtrain__tape_error(const dtrain_tape *tape)
{
    if (tape->error == DTRAIN_OK) return DTRAIN_OK;
    return dtrain__set_last_error(tape->error, tape->error_text);
}

/* ---- A pass -----------------------------------------------------------------------------------*/

DTRAIN_API dtrain_result dtrain_tape_begin(dtrain_tape *tape, uint32_t flags, uint64_t seed)
{
    if (!tape) return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_tape_begin: tape is NULL");
    if (tape->stages)
        return dtrain__tape_stick(
            tape, dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                              "dtrain_tape_begin: this is the tape of a trainer over a pipeline, "
                              "which runs its own stages alone; a rank that has the whole model "
                              "can run passes of a program's own"));
    dtrain__tape_reset(tape);
    return dtrain__pass_begin(tape, flags, seed);
}

/* Discard the memory that all passes of a tape share. */
DTRAIN__PRIVATE void dtrain__tape_reset(dtrain_tape *tape)
{
    dtrain__chunk *chunk = tape->arenas[DTRAIN__ARENA_GRADIENTS].first;
    for (; chunk; chunk = chunk->next) chunk->owners = 0;
    for (int i = 0; i < DTRAIN__TAPE_ARENAS; i++) dtrain__bump_rewind(&tape->arenas[i]);
    tape->casts = NULL;
}

DTRAIN__PRIVATE dtrain_result dtrain__pass_begin(dtrain_tape *tape, uint32_t flags, uint64_t seed)
{
    const uint32_t low = DTRAIN_TAPE_BF16 | DTRAIN_TAPE_F16;
    for (int i = 0; i < DTRAIN__PASS_ARENAS; i++) {
        dtrain__bump_rewind(&tape->slot->arenas[i]);
        tape->slot->arenas[i].owner = NULL;
    }
    memset(&tape->pass, 0, sizeof tape->pass);
    tape->pass.state = DTRAIN__TAPE_FORWARD;
    tape->pass.flags = flags;
    tape->pass.seed = seed;
    tape->pass.cast = flags & DTRAIN_TAPE_BF16  ? DTRAIN_DTYPE_BF16
                      : flags & DTRAIN_TAPE_F16 ? DTRAIN_DTYPE_F16
                                                : DTRAIN_DTYPE_F32;
    tape->error = DTRAIN_OK;
    if (flags & ~(DTRAIN_TAPE_NO_GRAD | low) || (flags & low) == low)
        return dtrain__tape_stick(
            tape, dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                              "dtrain_tape_begin: flags are %#x, expected DTRAIN_TAPE_NO_GRAD and "
                              "at most one of DTRAIN_TAPE_BF16 and DTRAIN_TAPE_F16",
                              flags));
    const dtrain_result free = tape->feed ? DTRAIN_OK : dtrain__uploads_await(tape);
    return dtrain__tape_stick(tape, free ? free : dtrain__tape_enter(tape, -1));
}

DTRAIN_API void dtrain_tape_unit(dtrain_tape *tape, uint32_t unit)
{
    const char *const call = "dtrain_tape_unit";
    if (dtrain__tape_check(tape, call) != DTRAIN_OK || unit == tape->unit) return;
    dtrain__stages *stages = tape->stages;
    const int32_t stage = stages ? dtrain__stage_of_unit(stages->map, unit) : 0;
    dtrain_result result = DTRAIN_OK;
    if (stage < 0)
        result = dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                             "%s: no parameter belongs to unit %u, so that it is on no stage of "
                             "the pipeline; mark units that have parameters",
                             call, unit);
    else if (stages && stage < stages->at)
        result = dtrain_fail(DTRAIN_ERROR_USAGE,
                             "%s: unit %u is on stage %d of the pipeline, and the pass has come to "
                             "stage %d; use units in the order in which their first parameters are "
                             "registered, and register an alias of a parameter in each other unit "
                             "that uses it",
                             call, unit, (int)stage, (int)stages->at);
    if (dtrain__tape_stick(tape, result) != DTRAIN_OK) return;
    if (stages) stages->at = stage;
    dtrain__tape_stick(tape, dtrain__tape_enter(tape, unit));
    dtrain__segment_begin(tape);
}

/* Write the common prefix of the names of a unit's parameters, up to a dot: "h.2" of
 * "h.2.ln_1.weight" and "h.2.attn.c_attn.weight". */
static void dtrain__unit_name(const dtrain_strategy *strategy, int64_t unit, char name[512])
{
    const char *first = NULL;
    size_t same = 0, count = 0;
    const dtrain_param *params = strategy ? dtrain__params_of(strategy, &count) : NULL;
    for (size_t i = 0; i < count; i++) {
        const dtrain_param *p = &params[i];
        size_t at = 0;
        if ((int64_t)p->unit != unit || !p->name) continue;
        if (!first) same = strlen(first = p->name);
        while (at < same && first[at] == p->name[at]) at++;
        if (at < same)
            for (same = at; same > 0 && first[same] != '.';) same--;
    }
    if (first && !same) same = strcspn(first, "."); /* nothing in common: the first one's unit */
    snprintf(name, 512, "%.*s", first ? (int)same : 4, first ? first : "unit");
}

/* Release the gathered unit, then gather another one; -1: none. The other order would double the
 * memory of a sharded strategy. */
DTRAIN__PRIVATE dtrain_result dtrain__tape_enter(dtrain_tape *tape, int64_t unit)
{
    const dtrain_pass pass =
        tape->pass.state == DTRAIN__TAPE_DONE ? DTRAIN_PASS_BACKWARD : DTRAIN_PASS_FORWARD;
    const int64_t before = tape->unit;
    const uint64_t begin = tape->unit_begin_ns;
    const bool traced = tape->world && tape->world->timeline.traced;
    if (unit == before && pass == tape->unit_pass) return DTRAIN_OK;
    if (traced && begin && begin < tape->unit_end_ns) { /* the unit up to its last operation */
        const bool back = tape->unit_pass == DTRAIN_PASS_BACKWARD;
        char name[512];
        dtrain__unit_name(tape->strategy, before, name);
        dtrain__span_add(tape->world, DTRAIN__TRACK_RANK,
                         back ? DTRAIN_SPAN_BACKWARD : DTRAIN_SPAN_FORWARD, name, NULL, before,
                         begin, tape->unit_end_ns);
    }
    tape->unit_begin_ns = traced && unit >= 0 ? dtrain__now_ns() : 0;
    tape->unit = unit;
    tape->unit_pass = pass;
    if (!tape->strategy || tape->stages) return DTRAIN_OK; /* all are there */
    if (before >= 0 && before != unit)
        DTRAIN__TRY(dtrain_strategy_release(tape->strategy, (uint32_t)before));
    return unit >= 0 ? dtrain_strategy_gather(tape->strategy, (uint32_t)unit, pass) : DTRAIN_OK;
}

/* Return DTRAIN_OK if the pass can continue, or an error that sticks. */
DTRAIN__PRIVATE dtrain_result dtrain__tape_check(dtrain_tape *tape, const char *call)
{
    if (!tape) return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: tape is NULL", call);
    if (tape->error != DTRAIN_OK) return dtrain__tape_error(tape);
    if (tape->pass.state == DTRAIN__TAPE_FORWARD) return DTRAIN_OK;
    return dtrain__tape_stick(
        tape, dtrain_fail(DTRAIN_ERROR_USAGE, "%s: %s; call dtrain_tape_begin first", call,
                          tape->pass.state == DTRAIN__TAPE_DONE ? "this pass has had its backward"
                                                                : "no pass is under way"));
}

/* ---- Inputs
 *
 * A device with its own memory fetches an input from page-locked memory in the order of its work.
 * The host can fill its arrays with the next batch at once: it waits neither for earlier work of
 * the device nor for the upload.
 *
 *     host     batch -> page-locked | forward is queued ...    next pass: await the upload
 *     device   ... previous step | page-locked -> inputs | forward ... */

/* Count the targets that are not ignored, entries other than -1: valid[1] is their number, valid[0]
 * is 1 / valid[1], or 0 without targets: the loss is then 0. */
static void dtrain__count_valid(const void *host, int64_t count, float *valid)
{
    const int32_t *entries = (const int32_t *)host;
    int64_t found = 0;
    for (int64_t i = 0; i < count; i++) found += entries[i] != -1;
    valid[0] = found ? 1.0f / (float)found : 0.0f;
    valid[1] = (float)found;
}

/* Return the two numbers after an input in page-locked memory: dtrain__samples.valid. */
static float *dtrain__feed_valid(const dtrain__feed_item *item)
{
    return (float *)(void *)((char *)item->pinned + item->bytes);
}

/* Add an input to the hash of inputs, if ranks compare it. */
static void dtrain__input_hash(dtrain_tape *tape, const void *host, uint64_t bytes)
{
    if (!tape->hashes) return;
    tape->inputs_hash =
        dtrain__hash_words(tape->inputs_hash ^ DTRAIN__FNV_BASIS, &bytes, sizeof bytes);
    tape->inputs_hash = dtrain__hash_words(tape->inputs_hash, host, (size_t)bytes);
}

/* Copy the caller's data to an input's page-locked memory. */
DTRAIN__PRIVATE dtrain_result dtrain__feed_fill(dtrain_tape *tape, const dtrain__feed *feed,
                                                const dtrain__feed_item *item)
{
    float *valid = dtrain__feed_valid(item), now[2];
    dtrain__input_hash(tape, item->host, item->bytes);
    memcpy(item->pinned, item->host, item->bytes);
    if (item->dtype != DTRAIN_DTYPE_I32) return DTRAIN_OK;
    dtrain__count_valid(item->host, (int64_t)item->bytes / 4, now);
    if (feed->fixed && valid[1] != now[1])
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "dtrain_trainer_step: %.0f targets count, and %.0f did when the step "
                           "was recorded, whose loss adds two means; use graph = false",
                           (double)now[1], (double)valid[1]);
    memcpy(valid, now, sizeof now);
    return DTRAIN_OK;
}

/* Copy the caller's data to the input's page-locked memory, unless a feed has done so; the stream
 * copies it to the device later. Without page-locked memory, copy and wait. */
static dtrain_result dtrain__input_upload(dtrain_tape *tape, dtrain_tensor *x, const void *host)
{
    const dtrain_device_ops *ops = tape->device->ops;
    dtrain__feed *feed = tape->feed ? tape->feed : &tape->inputs;
    dtrain__feed_item *item = &feed->items[feed->next];
    const bool full = feed->next == DTRAIN__FEED_ITEMS, known = feed->next < feed->count;
    size_t bytes = (size_t)x->count * 4;
    if (!tape->feed && (full || ops->host_memory || !ops->event_query))
        return ops->copy(tape->device, x->data, host, bytes, DTRAIN_COPY_HOST_TO_DEVICE);
    if (full)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "dtrain_tape_input: a pass that is replayed has at most %d inputs",
                           DTRAIN__FEED_ITEMS);
    if (tape->feed && known && (item->bytes != bytes || item->dtype != (dtrain_dtype)x->dtype))
        return dtrain_fail(DTRAIN_ERROR_USAGE,
                           "dtrain_tape_input: input %zu has %zu bytes and had %zu in an earlier "
                           "step; a step that is replayed must repeat its shapes",
                           feed->next + 1, bytes, item->bytes);
    if (!tape->feed && !tape->uploaded)
        DTRAIN__TRY(ops->event_create(tape->device, &tape->uploaded));
    if (item->room < bytes) {
        dtrain__pinned_free(tape->device, item);
        DTRAIN__TRY(ops->host_alloc(tape->device, bytes + DTRAIN__VALID_BYTES, &item->pinned));
        item->room = bytes;
    }
    item->bytes = bytes;
    item->dtype = (dtrain_dtype)x->dtype;
    item->host = host;
    if (!known) feed->count++;
    if (!tape->feed) memcpy(item->pinned, host, bytes);
    else if (!feed->filled) DTRAIN__TRY(dtrain__feed_fill(tape, feed, item));
    feed->next++;
    if (tape->feed && item->dtype == DTRAIN_DTYPE_I32) { /* the same copy brings the two numbers */
        dtrain__samples *samples = &((dtrain__tape_tensor *)x)->samples;
        samples->valid = dtrain__feed_valid(item);
        samples->device_valid = (const float *)x->data + x->count;
        bytes += DTRAIN__VALID_BYTES;
    }
    DTRAIN__TRY(ops->copy_async(tape->device, x->data, item->pinned, bytes,
                                DTRAIN_COPY_HOST_TO_DEVICE, NULL));
    return tape->feed ? DTRAIN_OK : ops->event_record(tape->device, tape->uploaded, NULL);
}

DTRAIN_API dtrain_tensor *dtrain_tape_input(dtrain_tape *tape, dtrain_dtype dtype, uint32_t ndim,
                                            const int64_t *shape, const void *host,
                                            bool requires_grad)
{
    const char *const call = "dtrain_tape_input";
    dtrain_result result = dtrain__tape_check(tape, call);
    if (result != DTRAIN_OK) return NULL;
    if (dtype != DTRAIN_DTYPE_F32 && (dtype != DTRAIN_DTYPE_I32 || requires_grad))
        result = dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                             "%s: dtype is %s, expected f32, or i32, which has no gradient", call,
                             dtrain_dtype_name(dtype));
    else if (!shape || !host)
        result =
            dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: %s is NULL", call, shape ? "host" : "shape");
    else if (ndim < 1 || ndim > 4)
        result = dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: %u axes, not 1 to 4", call, ndim);
    for (uint32_t i = 0; i < ndim && !result; i++)
        if (shape[i] < 1)
            result = dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: axis %u has length %lld", call, i,
                                 (long long)shape[i]);
    if (dtrain__tape_stick(tape, result) != DTRAIN_OK) return NULL;
    dtrain_tensor *x = dtrain__tensor_new(tape, NULL, dtype, ndim, shape);
    if (!x) return NULL;
    x->needs_grad = requires_grad && !(tape->pass.flags & DTRAIN_TAPE_NO_GRAD);
    dtrain__tape_tensor *made = (dtrain__tape_tensor *)x;
    bool shared;
    if (dtrain__tape_stick(tape, dtrain__stage_input(tape, made, &shared)) != DTRAIN_OK)
        return NULL;
    if (shared) return x;
    if (!made->remote) { /* room for samples.valid of a replayed step */
        const int64_t more = dtype == DTRAIN_DTYPE_I32 && x->count < PTRDIFF_MAX - 2 ? 2 : 0;
        x->data = dtrain__take_data(tape, NULL, x->count + more, dtype);
        if (!x->data) return NULL;
        result = dtrain__input_upload(tape, x, host);
    }
    if (!tape->feed && !dtrain__is_surveying(tape))
        dtrain__input_hash(tape, host, (uint64_t)x->count * 4);
    if (dtype == DTRAIN_DTYPE_I32 && !tape->feed) { /* the targets are in host memory only now */
        made->samples.valid = made->valid;
        dtrain__count_valid(host, x->count, made->valid);
    }
    if (dtype == DTRAIN_DTYPE_I32) made->samples.terms = x->count;
    return dtrain__tape_stick(tape, result) == DTRAIN_OK ? x : NULL;
}

/* ---- Reading ----------------------------------------------------------------------------------*/

DTRAIN_API dtrain_result dtrain_tensor_read(dtrain_tape *tape, const dtrain_tensor *tensor,
                                            float *values, float *grad)
{
    const char *const call = "dtrain_tensor_read";
    if (!tape) return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: tape is NULL", call);
    DTRAIN__TRY(dtrain__tape_error(tape)); /* the likely reason for a NULL tensor */
    if (!values && !grad)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: values and grad are both NULL", call);
    if (!tensor || !dtrain__is_float(tensor))
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: the tensor is %s, expected f32, bf16 or f16",
                           call, tensor ? dtrain_dtype_name((dtrain_dtype)tensor->dtype) : "NULL");
    if (((const dtrain__tape_tensor *)tensor)->remote)
        return dtrain__tape_stick(
            tape, dtrain_fail(DTRAIN_ERROR_USAGE,
                              "%s: the tensor is of another stage of the pipeline, and its values "
                              "are not on this rank; a loss that reads values cannot be cut into "
                              "stages",
                              call));
    const dtrain_device_ops *ops = tape->device->ops;
    const size_t bytes = dtrain__tensor_bytes(tensor);
    if (values) {
        DTRAIN__TRY(dtrain__check_intact(tensor, call));
        DTRAIN__TRY(
            ops->copy(tape->device, values, tensor->data, bytes, DTRAIN_COPY_DEVICE_TO_HOST));
        for (int64_t i = tensor->count; i-- > 0 && tensor->dtype != DTRAIN_DTYPE_F32;) {
            uint16_t bits; /* converted in place, from the last on */
            memcpy(&bits, (const char *)values + (size_t)i * sizeof bits, sizeof bits);
            values[i] = dtrain_half_to_f32((dtrain_dtype)tensor->dtype, bits);
        }
    }
    if (!grad) return DTRAIN_OK;
    if (tensor->producer || !tensor->needs_grad || tape->pass.state != DTRAIN__TAPE_DONE)
        return dtrain_fail(DTRAIN_ERROR_USAGE,
                           "%s: only inputs made with requires_grad have a gradient to read, and "
                           "only after dtrain_tape_backward",
                           call);
    memset(grad, 0, bytes); /* zero if the loss does not depend on the input */
    return tensor->grad
               ? ops->copy(tape->device, grad, tensor->grad, bytes, DTRAIN_COPY_DEVICE_TO_HOST)
               : DTRAIN_OK;
}

DTRAIN__PRIVATE void dtrain__tape_info(const dtrain_tape *tape, dtrain_tape_info *info)
{
    memset(info, 0, sizeof *info);
    if (!tape) return;
    info->node_count = tape->pass.node_count;
    info->tensor_count = tape->pass.tensor_count;
    info->flops = tape->flops;
    info->recomputed_count = tape->pass.recomputed_count;
    info->gradient_bytes = tape->arenas[DTRAIN__ARENA_GRADIENTS].bytes;
    for (const dtrain__bump *arena = tape->all_arenas; arena; arena = arena->next) {
        if (!arena->device) continue;
        info->activation_bytes += arena->bytes;
        info->block_allocations += arena->allocations;
    }
    info->activation_bytes -= info->gradient_bytes;
    info->error = dtrain__tape_error(tape);
}

DTRAIN_API void dtrain_tape_query(const dtrain_tape *tape, dtrain_tape_info *info)
{
    dtrain_tape_info own;
    dtrain__tape_info(tape, &own);
    dtrain__give(dtrain__abi_of(tape ? tape->world : NULL), DTRAIN__ABI_tape_info, &own, info);
}

/* Copy the desc of an operation, see DTRAIN__TAKE; an error sticks to the tape. */
DTRAIN__PRIVATE const void *dtrain__tape_take(dtrain_tape *tape, dtrain__abi_entry which,
                                              const void *given, void *own)
{
    const dtrain_abi *abi = dtrain__abi_of(tape ? tape->world : NULL);
    const dtrain_result result = dtrain__take(abi, which, given, own);
    if (tape && result != DTRAIN_OK) dtrain__tape_stick(tape, result);
    return given ? own : NULL;
}

DTRAIN__PRIVATE bool dtrain__is_float(const dtrain_tensor *x)
{
    return x->dtype == DTRAIN_DTYPE_F32 || x->dtype == DTRAIN_DTYPE_BF16 ||
           x->dtype == DTRAIN_DTYPE_F16;
}

DTRAIN__PRIVATE size_t dtrain__tensor_bytes(const dtrain_tensor *x)
{
    return (size_t)x->count * dtrain_dtype_bytes((dtrain_dtype)x->dtype);
}
