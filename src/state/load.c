/* Loading
 *
 *     rank 0           which checkpoint: the one of the path, or the newest below it
 *     every rank       manifest and headers | do they fit the state? | read the pieces that this
 *                      rank needs | scalars | publish
 *
 * Every step ends with an agreement of all ranks: together they go on, try an older checkpoint or
 * give up. state/read.c reads the pieces. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/log.h"
#include "core/result.h"
#include "comm/comm.h"
#include "world/world_internal.h"
#include "strategy/view_internal.h"
#include "state/box_internal.h"
#include "state/checkpoint_internal.h"
#include "state/read_internal.h"
#include "state/state_internal.h"
#include "state/storage_internal.h"

static const char dtrain__load_call[] = "dtrain_checkpoint_load";

/* A checkpoint that is being loaded. */
typedef struct dtrain__load {
    dtrain_state *state;
    dtrain_load_desc desc; /* resolved */
    dtrain__folder folder; /* the path that was given */
    dtrain__steps steps;   /* rank 0: of the checkpoints in it */
    uint64_t job;          /* rank 0's */

    /* The checkpoint that is being tried. */
    dtrain__file_path directory;
    dtrain__manifest manifest;
    dtrain__reader reader;
    uint64_t scalars[DTRAIN__SCALARS]; /* its numbers, as the state lists them */
    bool has_scalar[DTRAIN__SCALARS];
    int32_t *wanted; /* (manifest.tensor_count) 1: some rank lists it */
    float *sum;      /* (BLOCK) for means, made when there are any */
    bool same_cuts;  /* every rank has saved exactly its pieces of own tensors */
    uint64_t values;
    char note[600];
} dtrain__load;

/* Add a sentence to dtrain_load_info.note; a note that becomes too long is cut off. */
DTRAIN__PRINTF(2, 3)
static void dtrain__load_note(dtrain__load *load, const char *format, ...)
{
    char text[sizeof load->note];
    const size_t used = strlen(load->note);
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    snprintf(load->note + used, sizeof load->note - used, "%s%s", used ? "; " : "", text);
}

/* ---- Does it fit? -----------------------------------------------------------------------------*/

/* Find a tensor in the checkpoint; NULL: it is missing, or has another shape or type. */
static const dtrain__saved_tensor *dtrain__saved_for(const dtrain__load *load,
                                                     const dtrain_state_tensor *tensor)
{
    const dtrain__saved_tensor *saved =
        dtrain__manifest_find(&load->manifest, tensor->kind, tensor->name);
    return saved && dtrain__state_alike(&saved->pieces->tensor, tensor) ? saved : NULL;
}

/* List the settings whose text in the manifest is another one. Keys of one side alone do not
 * count. */
static void dtrain__settings_compare(const dtrain__object *object, const char *const *pairs,
                                     char *text, size_t room)
{
    char key[DTRAIN__SETTING], was[DTRAIN__SETTING];
    dtrain__json json = dtrain__json_begin("settings", object->at, object->bytes);
    *text = 0;
    if (!object->at || !pairs || !dtrain__json_enter(&json, '{')) return;
    while (dtrain__json_member(&json, key, sizeof key) &&
           dtrain__json_string(&json, was, sizeof was)) {
        const size_t used = strlen(text);
        size_t i = 0;
        while (pairs[i] && strcmp(pairs[i], key) != 0) i += 2;
        if (pairs[i] && strcmp(pairs[i + 1], was) != 0)
            snprintf(text + used, room - used, "%s%s was %s and is %s", used ? ", " : "", key,
                     *was ? was : "not given", *pairs[i + 1] ? pairs[i + 1] : "not given");
    }
}

/* Read the scalars that the state lists, and refuse those that no run can have: counts that a next
 * step would overflow, and a loss scale that is not finite or not positive. Every value is a
 * seed. */
static dtrain_result dtrain__scalars_read(dtrain__load *load)
{
    const dtrain_state *state = load->state;
    const dtrain__object *object = &load->manifest.scalars;
    char name[64];
    dtrain__json json = dtrain__json_begin(load->directory.text, object->at, object->bytes);
    memset(load->has_scalar, 0, sizeof load->has_scalar);
    if (!object->at || load->desc.values_only) return DTRAIN_OK;
    (void)dtrain__json_enter(&json, '{');
    while (dtrain__json_member(&json, name, sizeof name)) {
        uint64_t bits = 0;
        float scale = 1;
        size_t i = 0;
        if (!dtrain__json_u64(&json, &bits)) break;
        while (i < state->scalar_count && strcmp(state->scalars[i].name, name) != 0) i++;
        if (i == state->scalar_count) continue;
        load->scalars[i] = bits;
        load->has_scalar[i] = true;
        if (strstr(name, ".seed")) continue;
        if (strcmp(name, "scaler.scale") == 0) memcpy(&scale, &bits, sizeof scale);
        if (bits > DTRAIN__STEP_MOST || !dtrain__is_finite(scale) || scale <= 0)
            return dtrain_fail(DTRAIN_ERROR_DATA, "%s: %s is %llu, which no run can have saved",
                               load->directory.text, name, (unsigned long long)bits);
    }
    return dtrain__json_end(&json);
}

/* Compare the checkpoint's tensors and settings with this run's, and name the differences. */
static dtrain_result dtrain__load_compare(dtrain__load *load)
{
    const dtrain__manifest *m = &load->manifest;
    const dtrain_state *state = load->state;
    dtrain__name_list misfits[DTRAIN__MISFITS];
    char model[400], settings[400], text[1024];
    if (load->desc.this_job && m->job != load->job)
        return dtrain_fail(DTRAIN_ERROR_NOT_FOUND, "%s was not saved by this job",
                           load->directory.text);
    dtrain__settings_compare(&m->model, state->desc.model, model, sizeof model);
    dtrain__settings_compare(&m->settings, state->desc.settings, settings, sizeof settings);
    if (model[0] && !load->desc.partial)
        return dtrain_fail(DTRAIN_ERROR_DATA, "%s is of another model: %s", load->directory.text,
                           model);
    if (model[0]) dtrain__load_note(load, "%s", model);
    if (settings[0] && !load->desc.values_only) dtrain__load_note(load, "%s", settings);
    memset(misfits, 0, sizeof misfits);
    for (size_t i = 0; i < state->tensor_count; i++) {
        const dtrain_state_tensor *tensor = &state->tensors[i];
        const bool value = tensor->kind == DTRAIN_STATE_VALUE; /* others belong to a training */
        if (!value && (load->desc.values_only || tensor->own || tensor->kind == DTRAIN_STATE_STEPS))
            continue;
        if (dtrain__saved_for(load, tensor)) continue;
        const bool there = dtrain__manifest_find(m, tensor->kind, tensor->name) != NULL;
        dtrain__name_add(&misfits[there ? DTRAIN__DIFFERENT : DTRAIN__MISSING],
                         dtrain__state_kind_name(tensor->kind), tensor->name, "");
    }
    for (size_t i = 0; i < m->tensor_count; i++)
        if (m->tensors[i].pieces->tensor.kind == DTRAIN_STATE_VALUE && !load->wanted[i])
            dtrain__name_add(&misfits[DTRAIN__EXTRA], "value", m->tensors[i].pieces->tensor.name,
                             "");
    if (!dtrain__misfit_text(misfits, text, sizeof text)) return DTRAIN_OK;
    if (load->desc.partial) return dtrain__load_note(load, "%s", text), DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_DATA,
                       "%s does not fit this run%s%s%s: %s; build the same model and optimizer, or "
                       "load with `partial` or `values_only`",
                       load->directory.text, settings[0] ? " (" : "", settings,
                       settings[0] ? ")" : "", text);
}

/* ---- Reading ----------------------------------------------------------------------------------*/

/* Read the target's elements of a saved tensor. Of tensors that each rank has of its own, `rank`
 * chooses one. */
static dtrain_result dtrain__tensor_read(dtrain__load *load, const dtrain__saved_tensor *saved,
                                         int64_t rank, dtrain__target *target)
{
    target->dtype = saved->pieces->tensor.dtype;
    for (const dtrain__held *held = saved->pieces; held < saved->pieces + saved->count; held++) {
        const dtrain_state_tensor *tensor = &held->tensor;
        if (tensor->own && held->rank != rank) continue;
        const dtrain__file_path path = dtrain__tensors_path(
            load->directory.text, tensor->kind != DTRAIN_STATE_VALUE, held->rank);
        const dtrain__source source = {
            path.text,    (uint64_t)held->at, dtrain__state_kind_name(tensor->kind),
            tensor->name, held->crc,          tensor->dtype,
            tensor->piece};
        DTRAIN__TRY(dtrain__piece_read(&load->reader, &source, target));
    }
    return DTRAIN_OK;
}

/* ---- Tensors that each rank has of its own ----------------------------------------------------*/

/* Find out whether every rank finds the residuals and velocities of exactly its own pieces. */
static dtrain_result dtrain__compare_cuts(dtrain__load *load)
{
    const dtrain_state *state = load->state;
    const int rank = dtrain_comm_rank(state->comm);
    int32_t same = load->manifest.ranks == dtrain_comm_size(state->comm);
    for (size_t i = 0; i < state->tensor_count && same; i++) {
        const dtrain_state_tensor *tensor = &state->tensors[i];
        if (!tensor->own || tensor->kind == DTRAIN_STATE_HOST) continue;
        const dtrain__saved_tensor *saved = dtrain__saved_for(load, tensor);
        int64_t there = 0, all = 0; /* elements: of this piece, and saved less listed */
        for (size_t k = 0; k < state->tensor_count; k++)
            if (state->tensors[k].kind == tensor->kind &&
                strcmp(state->tensors[k].name, tensor->name) == 0)
                all -= state->tensors[k].piece.count;
        for (size_t k = 0; saved && k < saved->count; k++) {
            const dtrain_piece *piece = &saved->pieces[k].tensor.piece;
            dtrain_piece common;
            if (saved->pieces[k].rank != rank) continue;
            all += piece->count;
            if (dtrain__piece_common(piece, &tensor->piece, &common)) there += common.count;
        }
        same = there == tensor->piece.count && all == 0;
    }
    DTRAIN__TRY(
        dtrain_all_reduce(state->comm, &same, &same, 1, DTRAIN_DTYPE_I32, DTRAIN_REDUCE_MIN, NULL));
    load->same_cuts = same != 0;
    return DTRAIN_OK;
}

/* Make the sums in a target means over the ranks that saved them. Ranks that had the same part of
 * the parameter saved the same piece. */
static void dtrain__own_scale(const dtrain__saved_tensor *saved, const dtrain__target *target)
{
    const dtrain_piece *to = &target->piece;
    for (size_t i = 0; i < saved->count; i++) {
        const dtrain_piece *piece = &saved->pieces[i].tensor.piece;
        dtrain_piece common;
        size_t before = 0, all = 0;
        for (size_t k = 0; k < saved->count; k++) {
            if (dtrain__piece_order(piece, &saved->pieces[k].tensor.piece) != 0) continue;
            before += k < i;
            all++;
        }
        if (before || !dtrain__piece_common(piece, to, &common)) continue;
        const float scale = 1.0f / (float)all;
        const int64_t end = common.offset + common.count;
        for (int64_t at = common.offset, count; at < end; at += count) {
            float *sums = (float *)target->memory + dtrain__piece_place(to, &common, at);
            count = dtrain__min(dtrain__piece_span(to, &common, at), end - at);
            for (int64_t e = 0; e < count; e++) sums[e] *= scale;
        }
    }
}

/* Fill a residual or velocity with the mean over the ranks that saved it, or with zeros. */
static dtrain_result dtrain__own_mean(dtrain__load *load, const dtrain_state_tensor *tensor)
{
    const dtrain_state *state = load->state;
    const dtrain__saved_tensor *saved = dtrain__saved_for(load, tensor);
    const bool flat =
        saved && !load->manifest.hierarchical && !dtrain__goes_by_nodes(state->desc.strategy);
    const int64_t most = (int64_t)(DTRAIN__BLOCK / sizeof(float));
    if (!load->sum)
        load->sum =
            (float *)dtrain__alloc(&state->allocator, DTRAIN__BLOCK, 1, "sums of residuals");
    if (!load->sum) return DTRAIN_ERROR_MEMORY;
    for (int64_t done = 0; done < tensor->piece.count; done += most) {
        dtrain__target target = {load->sum, tensor->piece, DTRAIN_DTYPE_F32, true};
        target.piece.offset += done;
        target.piece.count = dtrain__min(most, tensor->piece.count - done);
        memset(load->sum, 0, DTRAIN__BLOCK);
        for (int64_t r = 0; r < load->manifest.ranks && flat; r++)
            DTRAIN__TRY(dtrain__tensor_read(load, saved, r, &target));
        if (flat) dtrain__own_scale(saved, &target);
        DTRAIN__TRY(dtrain_device_copy(state->device, (float *)tensor->memory + done, load->sum,
                                       (size_t)target.piece.count * sizeof(float)));
    }
    return DTRAIN_OK;
}

/* ---- All of it --------------------------------------------------------------------------------*/

/* Note what was not carried over exactly: scalars and arrays of this run that begin anew, tensors
 * of the checkpoint that no rank lists (the program's arrays by name, the optimizer's by kind), and
 * residuals. */
static void dtrain__note_differences(dtrain__load *load)
{
    const dtrain_state *state = load->state;
    const dtrain__manifest *m = &load->manifest;
    const int ranks = dtrain_comm_size(state->comm), before = (int)m->ranks;
    const bool by_nodes = m->hierarchical || dtrain__goes_by_nodes(state->desc.strategy);
    bool quiet[DTRAIN_STATE_KINDS] = {false}; /* loaded, said, or for another note */
    bool residuals = false, there = false;
    quiet[DTRAIN_STATE_STEPS] = quiet[DTRAIN_STATE_VELOCITY] = true;
    quiet[DTRAIN_STATE_VALUE] = quiet[DTRAIN_STATE_RESIDUAL] = true;
    for (size_t i = 0; i < state->tensor_count; i++)
        residuals |= state->tensors[i].kind == DTRAIN_STATE_RESIDUAL;
    for (size_t i = 0; i < m->tensor_count; i++) {
        const uint32_t kind = m->tensors[i].pieces->tensor.kind;
        there |= kind == DTRAIN_STATE_RESIDUAL;
        quiet[kind] |= load->wanted[i] && kind != DTRAIN_STATE_HOST;
    }
    for (size_t i = 0; i < state->scalar_count; i++)
        if (!load->has_scalar[i]) dtrain__load_note(load, "%s begins anew", state->scalars[i].name);
    for (size_t i = 0; i < m->tensor_count; i++) {
        const dtrain_state_tensor *tensor = &m->tensors[i].pieces->tensor;
        const bool array = tensor->kind == DTRAIN_STATE_HOST;
        if (load->wanted[i] || quiet[tensor->kind]) continue;
        quiet[tensor->kind] = !array;
        dtrain__load_note(load,
                          array ? "\"%s\" is left out: this run has no such array"
                                : "%s was left out: this optimizer keeps none",
                          array ? dtrain__short(tensor->name)
                                : dtrain__state_kind_name(tensor->kind));
    }
    if (there && !residuals)
        dtrain__load_note(load, "residuals were left out: this run keeps none");
    else if (residuals && !there) dtrain__load_note(load, "residuals begin with zeros");
    else if (residuals && !load->same_cuts)
        dtrain__load_note(load, by_nodes ? "residuals begin with zeros: they are those of nodes"
                                         : "residuals are the mean over the ranks that saved them");
    for (size_t i = 0; i < state->tensor_count; i++) {
        const dtrain_state_tensor *tensor = &state->tensors[i];
        const char *name = dtrain__short(tensor->name);
        if (tensor->kind != DTRAIN_STATE_HOST || !tensor->own) continue;
        if (!dtrain__saved_for(load, tensor))
            dtrain__load_note(
                load, "\"%s\" begins anew: it is not there, or has another count or type", name);
        else if (ranks > before)
            dtrain__load_note(load, "\"%s\" begins anew on ranks from %d on, which are new", name,
                              before);
        else if (ranks < before)
            dtrain__load_note(load, "\"%s\" of ranks from %d on is left out", name, ranks);
    }
}

/* Load the checkpoint of a directory. *differs: its manifest was read and does not fit the state:
 * nor will an older checkpoint. */
static dtrain_result dtrain__load_one(dtrain__load *load, bool *differs)
{
    dtrain_state *state = load->state;
    dtrain__manifest *m = &load->manifest;
    dtrain__state_source *loader = dtrain__source_of(state->desc.loader);
    const bool all = !load->desc.values_only;
    const int rank = dtrain_comm_rank(state->comm);
    char note[256] = "";
    *differs = false;
    load->note[0] = 0;
    load->reader.bytes = load->values = 0;
    load->reader.opened[0] = 0; /* another checkpoint has files of the same names */
    dtrain_result result = dtrain__manifest_read(&load->folder, load->directory.text, m);
    if (result == DTRAIN_OK)
        result = dtrain__manifest_tensors(m, &load->folder, load->directory.text, !all);
    if (result == DTRAIN_OK) result = dtrain__scalars_read(load);
    DTRAIN__TRY(dtrain__agree(state->comm, result));
    /* ranks may list different tensors */
    load->wanted = (int32_t *)dtrain__alloc(&state->allocator, m->tensor_count,
                                            sizeof *load->wanted, "a list of tensors");
    DTRAIN__TRY(dtrain__agree(state->comm, load->wanted ? DTRAIN_OK : DTRAIN_ERROR_MEMORY));
    for (size_t i = 0; i < state->tensor_count; i++) {
        const dtrain__saved_tensor *saved =
            dtrain__manifest_find(m, state->tensors[i].kind, state->tensors[i].name);
        if (saved) load->wanted[saved - m->tensors] = 1;
    }
    DTRAIN__TRY(dtrain_all_reduce(state->comm, load->wanted, load->wanted, m->tensor_count,
                                  DTRAIN_DTYPE_I32, DTRAIN_REDUCE_MAX, NULL));
    result = dtrain__agree(state->comm, dtrain__load_compare(load));
    *differs = result != DTRAIN_OK;
    DTRAIN__TRY(result);
    DTRAIN__TRY(dtrain__compare_cuts(load));
    dtrain__set_torn(state->desc.strategy, dtrain__load_call);
    for (size_t i = 0; i < state->tensor_count && result == DTRAIN_OK; i++) {
        const dtrain_state_tensor *tensor = &state->tensors[i];
        const dtrain__saved_tensor *saved = dtrain__saved_for(load, tensor);
        dtrain__target target = {tensor->memory, tensor->piece, tensor->dtype, false};
        if (tensor->kind != DTRAIN_STATE_VALUE && !all) continue;
        if (tensor->own && tensor->kind != DTRAIN_STATE_HOST && !load->same_cuts)
            result = dtrain__own_mean(load, tensor);
        else if (saved && (!tensor->own || rank < m->ranks)) {
            load->values += tensor->kind == DTRAIN_STATE_VALUE;
            result = dtrain__tensor_read(load, saved, rank, &target);
        }
    }
    DTRAIN__TRY(dtrain__agree(state->comm, result));
    for (size_t i = 0; i < state->scalar_count && all; i++)
        if (load->has_scalar[i]) /* little-endian */
            memcpy(state->scalars[i].memory, &load->scalars[i], state->scalars[i].bytes);
    if (all) {
        dtrain__note_differences(load);
        if (loader) loader->resume(loader, note, sizeof note);
        if (note[0]) dtrain__load_note(load, "%s", note);
        state->step = m->step;
        if (m->run) state->run = m->run;
    }
    return dtrain_state_changed(state);
}

/* Free what belongs to one checkpoint. */
static void dtrain__load_free(dtrain__load *load)
{
    dtrain__free(&load->state->allocator, load->wanted, load->manifest.tensor_count,
                 sizeof *load->wanted);
    load->wanted = NULL;
    dtrain__manifest_free(&load->manifest);
}

/* ---- Choosing a checkpoint --------------------------------------------------------------------*/

/* Load the newest of the steps that can be read whole. */
static dtrain_result dtrain__load_newest(dtrain__load *load)
{
    const dtrain_state *state = load->state;
    char passed[256] = "";
    for (size_t i = 0;; i++) {
        int64_t which[2] = {i < load->steps.count ? load->steps.steps[i] : -1, 0}; /* of rank 0 */
        bool differs, old = false;
        if (which[0] >= 0) (void)dtrain__step_is_old(&load->folder, which[0], &old);
        which[1] = old;
        DTRAIN__TRY(dtrain_broadcast(state->comm, which, 2, DTRAIN_DTYPE_I64, 0, NULL));
        if (which[0] < 0)
            return dtrain_fail(DTRAIN_ERROR_DATA,
                               "no checkpoint in %s can be read; the last one that was tried: %s",
                               load->folder.path, passed);
        load->directory = dtrain__step_path(&load->folder, which[0], which[1] ? ".old" : "");
        const dtrain__outcome tried = dtrain__outcome_of(dtrain__load_one(load, &differs));
        if (tried.result == DTRAIN_OK && passed[0])
            dtrain__load_note(load, "newer ones were passed over: %s", passed);
        if (tried.result == DTRAIN_OK || differs) return tried.result;
        int32_t damaged = tried.result == DTRAIN_ERROR_DATA || tried.result == DTRAIN_ERROR_FILE;
        DTRAIN__TRY(dtrain_all_reduce(state->comm, &damaged, &damaged, 1, DTRAIN_DTYPE_I32,
                                      DTRAIN_REDUCE_MIN, NULL));
        if (!damaged || (load->desc.partial && dtrain__torn(state->desc.strategy)))
            return dtrain__outcome_return(&tried);
        dtrain__load_free(load);
        snprintf(passed, sizeof passed, "%.250s", dtrain__bare(tried.text));
        if (dtrain_comm_rank(state->comm) == 0)
            dtrain_log(state->world, DTRAIN_LOG_WARNING,
                       "%s is passed over, and an older checkpoint is tried: %s",
                       load->directory.text, dtrain__bare(tried.text));
    }
}

/* Find a checkpoint, on rank 0, and load it: the path is one, or a directory with some. An empty
 * path, a checkpoint without its manifest and a disk that fails are three different errors. */
static dtrain_result dtrain__load_path(dtrain__load *load)
{
    const dtrain_state *state = load->state;
    const dtrain__folder *folder = &load->folder;
    const char *path = folder->path;
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
    int64_t from[2] = {is_one, (int64_t)state->world->job};
    DTRAIN__TRY(dtrain__agree(state->comm, result));
    DTRAIN__TRY(dtrain_broadcast(state->comm, from, 2, DTRAIN_DTYPE_I64, 0, NULL));
    load->job = (uint64_t)from[1];
    if (!from[0]) return dtrain__load_newest(load);
    snprintf(load->directory.text, sizeof load->directory.text, "%s", path);
    return dtrain__load_one(load, &differs);
}

DTRAIN_API dtrain_result dtrain_checkpoint_load(dtrain_state *state, const char *path,
                                                const dtrain_load_desc *desc,
                                                dtrain_load_info *info)
{
    dtrain_load_info ignored;
    dtrain__load load;
    if (!info) info = &ignored;
    memset(info, 0, sizeof *info);
    info->step = -1;
    DTRAIN__GIVEN(dtrain__load_call, state);
    memset(&load, 0, sizeof load);
    load.state = state;
    if (desc) load.desc = *desc;
    load.folder.storage = dtrain__storage_or_files(load.desc.storage);
    load.folder.allocator = &state->allocator;
    load.folder.path = path;
    const double start = dtrain_seconds();
    const char *const torn = dtrain__torn(state->desc.strategy); /* mended by a whole load alone */
    if (!load.desc.partial && !load.desc.values_only) dtrain__set_torn(state->desc.strategy, NULL);
    const dtrain_result result = dtrain__load_path(&load);
    const dtrain__manifest *m = &load.manifest;
    if (result == DTRAIN_OK) {
        info->step = m->step;
        info->ranks = (int)m->ranks;
        snprintf(info->strategy, sizeof info->strategy, "%s", m->strategy ? m->strategy : "");
        snprintf(info->path, sizeof info->path, "%.*s", (int)sizeof info->path - 1,
                 load.directory.text);
        info->bytes = load.reader.bytes;
        info->values = load.values;
        memcpy(&info->metric, &m->metric_bits, sizeof info->metric);
        info->seconds = dtrain_seconds() - start;
        memcpy(info->note, load.note, sizeof info->note);
    } else if (torn && !dtrain__torn(state->desc.strategy))
        dtrain__set_torn(state->desc.strategy, torn);
    dtrain__load_free(&load);
    dtrain__steps_free(&load.steps);
    dtrain__free(&state->allocator, load.sum, DTRAIN__BLOCK, 1);
    dtrain__reader_end(&load.reader, state);
    return result;
}
