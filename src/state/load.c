/* Loading
 *
 *     rank 0           choose a checkpoint: the path itself, or the newest in that directory
 *     every rank       read manifest and headers | compare them with the state | read the pieces
 *                      that this rank needs | publish
 *
 * After each step all ranks agree: they continue, try an older checkpoint, or fail together. Import
 * (state/export.c) reads pieces with the same functions. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/crc32c_internal.h"
#include "core/dtype.h"
#include "core/log.h"
#include "core/result.h"
#include "comm/comm.h"
#include "world/world_internal.h"
#include "strategy/view_internal.h"
#include "state/box_internal.h"
#include "state/checkpoint_internal.h"
#include "state/safetensors_internal.h"
#include "state/state_internal.h"
#include "state/storage_internal.h"
#include "device/backend.h"
#include "device/device.h"

/* ---- Pieces -----------------------------------------------------------------------------------*/

/* The elements that a piece of a file shares with the target of this rank are read block by block
 * and copied. Each block is checked if it has a checksum. A block that the target wants whole goes
 * straight to its place, if the target is host memory: a rank never has more of a tensor in memory
 * than its own pieces and one block. 16-bit elements that become fp32 are read to the upper half of
 * their room and widened from the first one on: a widened element covers only bytes of elements
 * already widened. */

DTRAIN__PRIVATE dtrain_result dtrain__reader_begin(dtrain__reader *reader,
                                                   const dtrain_state *state,
                                                   const dtrain_storage *storage)
{
    reader->storage = storage;
    reader->device = state->device;
    reader->file = -1;
    reader->block = (char *)dtrain__alloc(&state->allocator, DTRAIN__BLOCK, 1, "a block");
    return reader->block ? DTRAIN_OK : DTRAIN_ERROR_MEMORY;
}

DTRAIN__PRIVATE void dtrain__reader_end(dtrain__reader *reader, const dtrain_state *state)
{
    if (reader->block && reader->file >= 0)
        (void)reader->storage->close(reader->storage->user, reader->file);
    reader->file = -1;
    dtrain__free(&state->allocator, reader->block, DTRAIN__BLOCK, 1);
    reader->block = NULL;
}

/* Read elements first to first + count of a piece, widened to fp32 or as they are. If the piece has
 * checksums, the elements must be one whole block. */
DTRAIN__PRIVATE dtrain_result dtrain__elements_read(dtrain__reader *reader, const char *path,
                                                    const dtrain__held *held, bool widen,
                                                    int64_t first, int64_t count, char *to)
{
    const size_t each = dtrain__stored_bytes(held->tensor.dtype), bytes = (size_t)count * each;
    const uint64_t at = (uint64_t)first * each;
    char digits[DTRAIN__CRC_DIGITS + 1];
    char *from = widen ? to + (size_t)count * sizeof(float) - bytes : to;
    const dtrain_storage *storage = reader->storage;
    if (reader->file < 0 || strcmp(reader->opened, path) != 0) {
        if (reader->file >= 0) (void)storage->close(storage->user, reader->file);
        reader->file = -1;
        DTRAIN__TRY(dtrain__storage_open(storage, path, DTRAIN_STORAGE_READ, &reader->file));
        snprintf(reader->opened, sizeof reader->opened, "%s", path);
    }
    DTRAIN__TRY(
        dtrain__storage_read(storage, reader->file, path, from, bytes, (uint64_t)held->at + at));
    reader->bytes += bytes;
    if (held->crc) {
        snprintf(digits, sizeof digits, "%08x", dtrain__crc32c(0, from, bytes));
        if (memcmp(digits, held->crc + at / DTRAIN__BLOCK * DTRAIN__CRC_DIGITS,
                   DTRAIN__CRC_DIGITS) != 0)
            return dtrain_fail(
                DTRAIN_ERROR_DATA,
                "%s is damaged: its %zu bytes from %llu on, of the %s of \"%s\", do not have "
                "the checksum of its header",
                path, bytes, (unsigned long long)((uint64_t)held->at + at),
                dtrain__state_kind_name(held->tensor.kind), dtrain__short(held->tensor.name));
    }
    for (int64_t i = 0; i < count && from > to; i++) {
        uint16_t low;
        memcpy(&low, from + (size_t)i * sizeof low, sizeof low);
        const float x = dtrain_half_to_f32((dtrain_dtype)held->tensor.dtype, low);
        memcpy(to + (size_t)i * sizeof x, &x, sizeof x);
    }
    return DTRAIN_OK;
}

/* Read the elements that a piece shares with the target. Elements have the same order in both, so
 * every block is read once. A scale that is not 0 adds the elements, times the scale, to the
 * target's sums, which are fp32 in host memory. */
DTRAIN__PRIVATE dtrain_result dtrain__piece_read(dtrain__reader *reader, const char *path,
                                                 const dtrain__held *held,
                                                 const dtrain_state_tensor *target, float scale)
{
    const dtrain_piece *a = &held->tensor.piece, *b = &target->piece;
    const bool widen = held->tensor.dtype != target->dtype;
    const bool direct = scale == 0 && reader->device->ops->host_memory;
    const size_t each = dtrain__stored_bytes(target->dtype); /* in the block */
    const int64_t block = (int64_t)(DTRAIN__BLOCK / each);
    dtrain_piece common;
    if (!dtrain__piece_common(a, b, &common)) return DTRAIN_OK;
    const int64_t end = common.offset + common.count;
    const int64_t last = dtrain__piece_place(a, &common, end - 1) + 1;
    reader->low = reader->high = 0;
    for (int64_t i = common.offset, count; i < end; i += count) {
        const int64_t from = dtrain__piece_place(a, &common, i);
        char *to = (char *)target->memory + (size_t)dtrain__piece_place(b, &common, i) * each;
        const int64_t first = from / block * block;
        const int64_t low = held->crc ? first : from;
        const int64_t high = dtrain__min(first + block, held->crc ? a->count : last);
        count = dtrain__min(dtrain__piece_span(a, &common, i), dtrain__piece_span(b, &common, i));
        count = dtrain__min(dtrain__min(count, end - i), high - from);
        if (direct && low == from && high == from + count) {
            DTRAIN__TRY(dtrain__elements_read(reader, path, held, widen, low, count, to));
            continue;
        }
        if (from >= reader->high) {
            DTRAIN__TRY(
                dtrain__elements_read(reader, path, held, widen, low, high - low, reader->block));
            reader->low = low;
            reader->high = high;
        }
        const char *block_at = reader->block + (size_t)(from - reader->low) * each;
        if (scale == 0)
            DTRAIN__TRY(dtrain_device_copy(reader->device, to, block_at, (size_t)count * each));
        for (int64_t e = 0; e < count && scale != 0; e++)
            ((float *)(void *)to)[e] += scale * ((const float *)(const void *)block_at)[e];
    }
    return DTRAIN_OK;
}

/* ---- A checkpoint -----------------------------------------------------------------------------*/

static const char dtrain__load_call[] = "dtrain_checkpoint_load";

/* A checkpoint that is being loaded. */
typedef struct dtrain__load {
    dtrain_state *state;
    dtrain_load_desc desc; /* resolved */
    dtrain__folder folder; /* the path that was given */
    dtrain__steps steps;   /* rank 0: steps of the checkpoints in the path */
    uint64_t job;          /* job number of rank 0 */

    /* The checkpoint that is being tried. */
    dtrain__file_path directory;
    dtrain__manifest manifest;
    dtrain__reader reader;
    int32_t *wanted; /* (manifest.piece_count + 1), 1 at the first piece of a tensor that any rank
                        lists; the last: 1 if cuts differ */
    float *sum;      /* (BLOCK) buffer for means; NULL: not needed yet */
    bool same_cuts;  /* residuals and velocities are cut as they were when they were saved */
    dtrain_load_info info; /* result of a success */
} dtrain__load;

/* Add a sentence to dtrain_load_info.note; a note that gets too long is cut off. */
static void dtrain__load_note(dtrain__load *load, const char *title, const char *text)
{
    char *const note = load->info.note;
    const size_t used = strlen(note);
    snprintf(note + used, sizeof load->info.note - used, "%s%s%s", used ? "; " : "", title, text);
}

/* Find the first piece of a tensor in the checkpoint; NULL if the tensor is missing or has another
 * shape or dtype. */
static const dtrain__held *dtrain__saved_for(const dtrain__load *load,
                                             const dtrain_state_tensor *tensor)
{
    const dtrain__held *saved = dtrain__pieces_find(&load->manifest, tensor->kind, tensor->name);
    return saved && dtrain__state_alike(&saved->tensor, tensor) ? saved : NULL;
}

/* Read the elements of a saved tensor that the target wants. If each rank saved a private tensor,
 * `rank` chooses one, and -1 adds the mean over the ranks to the target. */
static dtrain_result dtrain__tensor_read(dtrain__load *load, const dtrain__held *saved,
                                         int64_t rank, const dtrain_state_tensor *target)
{
    const dtrain__held *const end = saved + saved->count;
    for (const dtrain__held *held = saved; held < end; held++) {
        if (held->tensor.own && rank >= 0 && held->rank != rank) continue;
        const dtrain__file_path path = dtrain__tensors_path(
            load->directory.text, held->tensor.kind != DTRAIN_STATE_VALUE, held->rank);
        int same = 0; /* ranks that saved this piece */
        for (const dtrain__held *other = saved; other < end && rank < 0; other++)
            same += dtrain__piece_order(&held->tensor.piece, &other->tensor.piece) == 0;
        DTRAIN__TRY(dtrain__piece_read(&load->reader, path.text, held, target,
                                       rank < 0 ? 1.0f / (float)same : 0));
    }
    return DTRAIN_OK;
}

/* Fill a residual or velocity with the mean over the ranks that saved it, or with zeros if either
 * side is hierarchical. */
static dtrain_result dtrain__own_mean(dtrain__load *load, const dtrain_state_tensor *tensor)
{
    const dtrain_state *state = load->state;
    const dtrain__held *saved = dtrain__saved_for(load, tensor);
    const bool flat =
        saved && !load->manifest.hierarchical && !dtrain__goes_by_nodes(state->desc.strategy);
    const int64_t most = (int64_t)(DTRAIN__BLOCK / sizeof(float));
    if (!load->sum)
        load->sum =
            (float *)dtrain__alloc(&state->allocator, DTRAIN__BLOCK, 1, "sums of residuals");
    if (!load->sum) return DTRAIN_ERROR_MEMORY;
    for (int64_t done = 0; done < tensor->piece.count; done += most) {
        dtrain_state_tensor target = *tensor;
        target.memory = load->sum;
        target.piece.offset += done;
        target.piece.count = dtrain__min(most, tensor->piece.count - done);
        memset(load->sum, 0, DTRAIN__BLOCK);
        if (flat) DTRAIN__TRY(dtrain__tensor_read(load, saved, -1, &target));
        DTRAIN__TRY(dtrain_device_copy(state->device, (float *)tensor->memory + done, load->sum,
                                       (size_t)target.piece.count * sizeof(float)));
    }
    return DTRAIN_OK;
}

/* Refuse scalars that no run can have saved: counts that the next step would overflow, and a loss
 * scale that is not finite or not positive. A seed can have any value. */
static dtrain_result dtrain__scalars_check(dtrain__load *load)
{
    for (size_t i = 0; i < load->state->tensor_count && !load->desc.values_only; i++) {
        const dtrain_state_tensor *tensor = &load->state->tensors[i];
        const dtrain__held *saved = dtrain__saved_for(load, tensor);
        uint64_t bits = 0;
        float scale = 1;
        dtrain_state_tensor target = *tensor;
        if (tensor->kind != DTRAIN_STATE_SCALAR || !saved || strstr(tensor->name, ".seed"))
            continue;
        target.memory = &bits;
        DTRAIN__TRY(dtrain__tensor_read(load, saved, 0, &target)); /* little-endian */
        if (tensor->dtype == DTRAIN_DTYPE_F32) memcpy(&scale, &bits, sizeof scale);
        if (bits > DTRAIN__STEP_MOST || !dtrain__is_finite(scale) || scale <= 0)
            return dtrain_fail(DTRAIN_ERROR_DATA, "%s: %s is %llu, which no run can have saved",
                               load->directory.text, tensor->name, (unsigned long long)bits);
    }
    return DTRAIN_OK;
}

/* ---- Does it fit? -----------------------------------------------------------------------------*/

/* Add a name to a list, if it is one of the first six and there is room for all of it. */
DTRAIN__PRIVATE void dtrain__name_add(dtrain__name_list *list, const char *format, ...)
{
    const size_t used = strlen(list->text);
    const int room = (int)(sizeof list->text - sizeof ", , ...") - (int)used;
    char one[sizeof list->text];
    va_list args;
    va_start(args, format);
    const int bytes = vsnprintf(one, sizeof one, format, args);
    va_end(args);
    if (list->count == 7) return;
    list->count = used && bytes > room ? 7 : list->count + 1;
    snprintf(list->text + used, sizeof list->text - used, "%s%s", used ? ", " : "",
             list->count == 7 ? "..." : one);
}

/* Write the first `count` lists as a sentence; return false if they are empty. */
DTRAIN__PRIVATE bool dtrain__difference_text(const dtrain__name_list *lists, int count, char *text,
                                             size_t room)
{
    static const char *const titles[DTRAIN__DIFFERENCES] = {
        "of another model",
        "missing in it",
        "of another shape or type",
        "only in it",
        "of other settings",
        "begins anew",
        "left out",
        "the mean over the ranks that saved it"};
    size_t used = 0;
    *text = 0;
    for (int i = 0; i < count && used < room; i++)
        if (lists[i].count)
            used += (size_t)snprintf(text + used, room - used, "%s%s: %s", used ? "; " : "",
                                     titles[i], lists[i].text);
    return used > 0;
}

/* Tell whether this rank lists exactly the pieces of residuals and velocities that the rank of the
 * same number saved. On entry `wanted` marks only the tensors that this rank lists. */
static bool dtrain__cuts_same(const dtrain__load *load)
{
    const dtrain_state *state = load->state;
    const dtrain__manifest *m = &load->manifest;
    const int rank = dtrain_comm_rank(state->comm);
    bool same = m->ranks == dtrain_comm_size(state->comm);
    int64_t more = 0; /* pieces saved minus pieces listed */
    for (size_t i = 0; i < state->tensor_count && same; i++) {
        const dtrain_state_tensor *tensor = &state->tensors[i];
        if (!tensor->own || tensor->kind == DTRAIN_STATE_HOST || !tensor->piece.count) continue;
        const dtrain__held *saved = dtrain__saved_for(load, tensor);
        same = false;
        for (size_t k = 0; saved && k < saved->count; k++)
            same |= saved[k].rank == rank &&
                    dtrain__piece_order(&saved[k].tensor.piece, &tensor->piece) == 0;
        more--;
    }
    for (size_t i = 0; i < m->piece_count; i += m->pieces[i].count) {
        const dtrain__held *saved = &m->pieces[i];
        const dtrain_state_tensor *tensor = &saved->tensor;
        if (!load->wanted[i] || !tensor->own || tensor->kind == DTRAIN_STATE_HOST) continue;
        for (size_t k = 0; k < saved->count; k++)
            more += saved[k].rank == rank && saved[k].tensor.piece.count;
    }
    return same && more == 0;
}

/* List the settings that have another text in the manifest. Keys that only one side has are
 * skipped. */
static void dtrain__settings_compare(const dtrain__manifest *m, const char *object,
                                     const char *const *pairs, dtrain__name_list *list)
{
    char key[DTRAIN__SETTING], was[DTRAIN__SETTING];
    if (!object || !pairs) return;
    dtrain__json json =
        dtrain__json_begin("settings", object, (size_t)(m->text + m->text_bytes - object));
    (void)dtrain__json_enter(&json, '{');
    while (dtrain__json_member(&json, key, sizeof key) &&
           dtrain__json_string(&json, was, sizeof was)) {
        size_t i = 0;
        while (pairs[i] && strcmp(pairs[i], key) != 0) i += 2;
        if (pairs[i] && strcmp(pairs[i + 1], was) != 0)
            dtrain__name_add(list, "%s was %s and is %s", key, *was ? was : "not given",
                             *pairs[i + 1] ? pairs[i + 1] : "not given");
    }
}

/* Compare the checkpoint with the state. The error names everything that cannot be loaded, and the
 * note has the other differences. Residuals, and state that only the other optimizer keeps, are
 * named once for all parameters. */
DTRAIN__OWN_FRAME
static dtrain_result dtrain__load_compare(dtrain__load *load)
{
    dtrain__name_list lists[DTRAIN__DIFFERENCES];
    char text[1024];
    const dtrain_state *state = load->state;
    const dtrain__manifest *m = &load->manifest;
    const int ranks = dtrain_comm_size(state->comm), before = (int)m->ranks;
    const bool all = !load->desc.values_only;
    const bool by_nodes = m->hierarchical || dtrain__goes_by_nodes(state->desc.strategy);
    bool said[DTRAIN_STATE_KINDS] = {false};
    if (load->desc.this_job && m->job != load->job)
        return dtrain_fail(DTRAIN_ERROR_NOT_FOUND, "%s was not saved by this job",
                           load->directory.text);
    memset(lists, 0, sizeof lists);
    dtrain__settings_compare(m, m->model, state->desc.model, &lists[DTRAIN__OTHER_MODEL]);
    if (all)
        dtrain__settings_compare(m, m->settings, state->desc.settings,
                                 &lists[DTRAIN__OTHER_SETTINGS]);
    for (size_t i = 0; i < state->tensor_count; i++) {
        const dtrain_state_tensor *tensor = &state->tensors[i];
        const uint32_t kind = tensor->kind;
        const char *kind_name = dtrain__state_kind_name(kind), *name = dtrain__short(tensor->name);
        const bool saved = dtrain__saved_for(load, tensor) != NULL;
        const bool array = kind == DTRAIN_STATE_HOST, number = kind == DTRAIN_STATE_SCALAR;
        if ((kind != DTRAIN_STATE_VALUE && !all) || kind == DTRAIN_STATE_STEPS) continue;
        if (tensor->own && !array) {
            if (!said[kind] && (!saved || (!load->same_cuts && by_nodes)))
                dtrain__name_add(&lists[DTRAIN__ANEW], "%s%s", kind_name,
                                 saved ? " (of nodes)" : "");
            else if (!said[kind] && !load->same_cuts)
                dtrain__name_add(&lists[DTRAIN__AVERAGED], "%s", kind_name);
            said[kind] = true;
        } else if (!saved) {
            const bool there = dtrain__pieces_find(m, kind, tensor->name) != NULL;
            const int list = number || tensor->own ? DTRAIN__ANEW
                             : there               ? DTRAIN__DIFFERENT
                                                   : DTRAIN__MISSING;
            dtrain__name_add(&lists[list], "%s \"%s\"", kind_name, name);
        } else if (tensor->own && ranks != before)
            dtrain__name_add(&lists[ranks > before ? DTRAIN__ANEW : DTRAIN__LEFT_OUT],
                             "%s \"%s\" of ranks from %d on", kind_name, name,
                             ranks > before ? before : ranks);
    }
    for (size_t i = 0; i < m->piece_count; i += m->pieces[i].count)
        if (load->wanted[i]) said[m->pieces[i].tensor.kind] = true;
    for (size_t i = 0; i < m->piece_count; i += m->pieces[i].count) {
        const dtrain_state_tensor *tensor = &m->pieces[i].tensor;
        const bool value = tensor->kind == DTRAIN_STATE_VALUE,
                   array = tensor->kind == DTRAIN_STATE_HOST;
        const char *kind_name = dtrain__state_kind_name(tensor->kind);
        if (load->wanted[i]) continue;
        if (value || array)
            dtrain__name_add(&lists[value ? DTRAIN__EXTRA : DTRAIN__LEFT_OUT], "%s \"%s\"",
                             kind_name, dtrain__short(tensor->name));
        else if (!said[tensor->kind]) dtrain__name_add(&lists[DTRAIN__LEFT_OUT], "%s", kind_name);
        said[tensor->kind] = true;
    }
    (void)dtrain__difference_text(lists, DTRAIN__DIFFERENCES, load->info.note,
                                  sizeof load->info.note);
    if (load->desc.partial || !dtrain__difference_text(lists, DTRAIN__REFUSED, text, sizeof text))
        return DTRAIN_OK;
    (void)dtrain__difference_text(lists, DTRAIN__OTHER_SETTINGS + 1, text, sizeof text);
    return dtrain_fail(DTRAIN_ERROR_DATA,
                       "%s does not fit this run: %s; build the same model and optimizer, or load "
                       "with `partial` or `values_only`",
                       load->directory.text, text);
}

/* ---- All of it --------------------------------------------------------------------------------*/

/* Load the checkpoint in load->directory. *differs is set if the checkpoint is readable and does
 * not fit the state: then no older checkpoint will fit. */
static dtrain_result dtrain__load_one(dtrain__load *load, bool *differs)
{
    dtrain_state *state = load->state;
    dtrain__manifest *m = &load->manifest;
    dtrain__state_source *loader = dtrain__source_of(state->desc.loader);
    const bool all = !load->desc.values_only;
    const int rank = dtrain_comm_rank(state->comm);
    char note[256] = "";
    *differs = false;
    memset(&load->info, 0, sizeof load->info);
    load->reader.bytes = 0;
    load->reader.opened[0] = 0; /* the last checkpoint had files of the same names */
    dtrain_result result = dtrain__manifest_read(&load->folder, load->directory.text, m);
    if (result == DTRAIN_OK) result = dtrain__pieces_read(m, !all);
    if (result == DTRAIN_OK) result = dtrain__scalars_check(load);
    DTRAIN__TRY(dtrain__agree(state->comm, result));
    /* ranks may list different tensors */
    load->wanted = (int32_t *)dtrain__alloc(&state->allocator, m->piece_count + 1,
                                            sizeof *load->wanted, "a list of tensors");
    DTRAIN__TRY(dtrain__agree(state->comm, load->wanted ? DTRAIN_OK : DTRAIN_ERROR_MEMORY));
    for (size_t i = 0; i < state->tensor_count; i++) {
        const dtrain__held *saved =
            dtrain__pieces_find(m, state->tensors[i].kind, state->tensors[i].name);
        if (saved) load->wanted[saved - m->pieces] = 1;
    }
    load->wanted[m->piece_count] = !dtrain__cuts_same(load);
    DTRAIN__TRY(dtrain_all_reduce(state->comm, load->wanted, load->wanted, m->piece_count + 1,
                                  DTRAIN_DTYPE_I32, DTRAIN_REDUCE_MAX, NULL));
    load->same_cuts = !load->wanted[m->piece_count];
    result = dtrain__agree(state->comm, dtrain__load_compare(load));
    *differs = result != DTRAIN_OK;
    DTRAIN__TRY(result);
    dtrain__notes_of(state->desc.strategy)->failed_load = dtrain__load_call;
    for (size_t i = 0; i < state->tensor_count && result == DTRAIN_OK; i++) {
        const dtrain_state_tensor *tensor = &state->tensors[i];
        const dtrain__held *saved = dtrain__saved_for(load, tensor);
        if (tensor->kind != DTRAIN_STATE_VALUE && !all) continue;
        if (tensor->own && tensor->kind != DTRAIN_STATE_HOST && !load->same_cuts)
            result = dtrain__own_mean(load, tensor);
        else if (saved && (!tensor->own || rank < m->ranks)) {
            load->info.values += tensor->kind == DTRAIN_STATE_VALUE;
            result = dtrain__tensor_read(load, saved, rank, tensor);
        }
    }
    DTRAIN__TRY(dtrain__agree(state->comm, result));
    if (all) {
        if (loader) loader->resume(loader, note, sizeof note);
        if (note[0]) dtrain__load_note(load, note, "");
        state->step = m->step;
        if (m->run) state->run = m->run;
    }
    return dtrain_state_changed(state);
}

/* Free the memory of one checkpoint. */
static void dtrain__load_free(dtrain__load *load)
{
    dtrain__free(&load->state->allocator, load->wanted, load->manifest.piece_count + 1,
                 sizeof *load->wanted);
    load->wanted = NULL;
    dtrain__manifest_free(&load->manifest);
}

/* ---- Choosing a checkpoint --------------------------------------------------------------------*/

/* Choose a checkpoint on rank 0, and load it: the path itself, or the newest checkpoint in that
 * directory that can be read whole. A directory without checkpoints, a checkpoint without its
 * manifest and a failing disk are three different errors. */
static dtrain_result dtrain__load_path(dtrain__load *load)
{
    const dtrain_state *state = load->state;
    const dtrain__folder *folder = &load->folder;
    const char *path = folder->path;
    char passed[256] = "";
    bool is_one = false, differs;
    dtrain_result result = dtrain__between_backwards(state->desc.strategy, dtrain__load_call);
    if (result == DTRAIN_OK) result = dtrain__path_check(dtrain__load_call, path);
    if (result == DTRAIN_OK) result = dtrain__reader_begin(&load->reader, state, folder->storage);
    if (result == DTRAIN_OK && dtrain_comm_rank(state->comm) == 0) {
        const dtrain__file_path manifest = dtrain__path_in(path, "manifest.json");
        const int code = dtrain__storage_probe(folder->storage, manifest.text, DTRAIN_STORAGE_READ);
        is_one = code == 0;
        if (code && code != -ENOENT && code != -ENOTDIR)
            result = dtrain__storage_fail(manifest.text, "opened", code);
        else if (code &&
                 dtrain__storage_probe(folder->storage, path, DTRAIN_STORAGE_DIRECTORY) != -ENOENT)
            result = dtrain__steps_list(folder, "", &load->steps);
        if (result == DTRAIN_OK && code && !load->steps.count)
            result =
                load->steps.remains
                    ? dtrain_fail(DTRAIN_ERROR_DATA,
                                  "%s has files of a checkpoint, and no manifest.json", path)
                    : dtrain_fail(DTRAIN_ERROR_NOT_FOUND, "there is no checkpoint in %s", path);
    }
    DTRAIN__TRY(dtrain__agree(state->comm, result));
    for (size_t i = 0;; i++) {
        int64_t from[3] = {i < load->steps.count ? load->steps.keys[i] : -1, is_one,
                           (int64_t)state->world->job};
        DTRAIN__TRY(dtrain_broadcast(state->comm, from, 3, DTRAIN_DTYPE_I64, 0, NULL));
        load->job = (uint64_t)from[2];
        if (from[0] < 0 && !from[1])
            return dtrain_fail(DTRAIN_ERROR_DATA,
                               "no checkpoint in %s can be read; the last one that was tried: %s",
                               path, passed);
        load->directory = dtrain__key_path(folder, from[0]);
        if (from[1]) snprintf(load->directory.text, sizeof load->directory.text, "%s", path);
        const dtrain__outcome tried = dtrain__outcome_of(dtrain__load_one(load, &differs));
        if (tried.result == DTRAIN_OK && passed[0])
            dtrain__load_note(load, "newer ones were passed over: ", passed);
        if (tried.result == DTRAIN_OK || differs || from[1]) return tried.result;
        int32_t damaged = tried.result == DTRAIN_ERROR_DATA || tried.result == DTRAIN_ERROR_FILE;
        DTRAIN__TRY(dtrain_all_reduce(state->comm, &damaged, &damaged, 1, DTRAIN_DTYPE_I32,
                                      DTRAIN_REDUCE_MIN, NULL));
        if (!damaged || (load->desc.partial && dtrain__notes_of(state->desc.strategy)->failed_load))
            return dtrain__outcome_return(&tried);
        dtrain__load_free(load);
        snprintf(passed, sizeof passed, "%.250s", dtrain__bare(tried.text));
        if (dtrain_comm_rank(state->comm) == 0)
            dtrain_log(state->world, DTRAIN_LOG_WARNING,
                       "%s is passed over, and an older checkpoint is tried: %s",
                       load->directory.text, dtrain__bare(tried.text));
    }
}

DTRAIN_API dtrain_result dtrain_checkpoint_load(dtrain_state *state, const char *path,
                                                const dtrain_load_desc *desc,
                                                dtrain_load_info *info)
{
    const dtrain_abi *abi = dtrain__abi_of(state ? state->world : NULL);
    dtrain_load_info own;
    dtrain__load load;
    memset(&own, 0, sizeof own);
    own.step = -1;
    dtrain__give(abi, DTRAIN__ABI_load_info, &own, info);
    DTRAIN__GIVEN(dtrain__load_call, state);
    memset(&load, 0, sizeof load);
    load.state = state;
    DTRAIN__TRY(dtrain__take(abi, DTRAIN__ABI_load_desc, desc, &load.desc));
    load.folder.storage = dtrain__storage_or_files(load.desc.storage);
    load.folder.allocator = &state->allocator;
    load.folder.path = path;
    const double start = dtrain_seconds();
    dtrain__notes *notes = dtrain__notes_of(state->desc.strategy);
    const char *const failed_load = notes->failed_load; /* only a whole load mends it */
    if (!load.desc.partial && !load.desc.values_only) notes->failed_load = NULL;
    const dtrain_result result = dtrain__load_path(&load);
    if (result == DTRAIN_OK) {
        const dtrain__manifest *m = &load.manifest;
        own = load.info;
        own.step = m->step;
        own.ranks = (int)m->ranks;
        snprintf(own.strategy, sizeof own.strategy, "%s", m->strategy ? m->strategy : "");
        snprintf(own.path, sizeof own.path, "%.*s", (int)sizeof own.path - 1, load.directory.text);
        own.bytes = load.reader.bytes;
        memcpy(&own.metric, &m->metric_bits, sizeof own.metric);
        own.seconds = dtrain_seconds() - start;
        dtrain__give(abi, DTRAIN__ABI_load_info, &own, info);
    } else if (!notes->failed_load) notes->failed_load = failed_load;
    dtrain__load_free(&load);
    dtrain__steps_free(&load.steps);
    dtrain__free(&state->allocator, load.sum, DTRAIN__BLOCK, 1);
    dtrain__reader_end(&load.reader, state);
    return result;
}
