/* Loading
 *
 *     rank 0           which checkpoint: the one of the path, or the newest below it
 *     every rank       manifest | does it fit the state? | read the pieces that this rank needs |
 *                      scalars | publish
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
#include "strategy/view_internal.h"
#include "optim/optim_internal.h"
#include "train/trainer_internal.h"
#include "state/box_internal.h"
#include "state/checkpoint_internal.h"
#include "state/read_internal.h"
#include "state/state_internal.h"
#include "state/storage_internal.h"

#define DTRAIN__MISSED_OF_ALL "optimizer.missed" /* one array of all parameters, in version 0.2 */

static const char dtrain__load_call[] = "dtrain_checkpoint_load";

/* A checkpoint that is being loaded. */
typedef struct dtrain__load {
    dtrain_state *state;
    dtrain_load_desc desc; /* resolved */
    char directory[DTRAIN__PATH];
    dtrain__manifest manifest;
    dtrain__reader reader;
    int32_t *wanted; /* (manifest.tensor_count) some rank lists it */
    float *sum;      /* (BLOCK) for means, made when there are any */
    bool same_cuts;  /* own tensors are as this rank has saved them, on all ranks */
    uint64_t values;
    uint64_t job; /* rank 0's */
    char note[600];
} dtrain__load;

/* Add a sentence to dtrain_load_info.note; a note that becomes too long is cut off. */
DTRAIN__PRINTF(2, 3)
static void dtrain__load_note(dtrain__load *load, const char *format, ...)
{
    const size_t used = strlen(load->note);
    const char *const between = used ? "; " : "";
    va_list args;
    va_start(args, format);
    const int added = snprintf(load->note + used, sizeof load->note - used, "%s", between);
    if (added >= 0 && used + (size_t)added < sizeof load->note)
        vsnprintf(load->note + used + (size_t)added, sizeof load->note - used - (size_t)added,
                  format, args);
    va_end(args);
}

/* ---- Does it fit? -----------------------------------------------------------------------------*/

/* Tell whether a load without this tensor is an error: it would not continue the same training. */
static bool dtrain__is_needed(const dtrain__load *load, const dtrain_state_tensor *tensor)
{
    if (tensor->kind == DTRAIN_STATE_VALUE) return true;
    return !load->desc.values_only && !tensor->own && tensor->kind != DTRAIN_STATE_Q &&
           tensor->kind != DTRAIN_STATE_MISSED;
}

static bool dtrain__is_loaded(const dtrain__load *load, uint32_t kind)
{
    return kind == DTRAIN_STATE_VALUE || !load->desc.values_only;
}

/* Find a tensor in the checkpoint; NULL: it is missing, or has another shape or type. */
static const dtrain__saved_tensor *dtrain__saved_for(const dtrain__load *load,
                                                     const dtrain_state_tensor *tensor)
{
    const dtrain__saved_tensor *saved =
        dtrain__manifest_find(&load->manifest, tensor->kind, tensor->name);
    if (!saved || saved->dtype != tensor->dtype || saved->own != tensor->own ||
        saved->total != tensor->total ||
        memcmp(saved->shape, tensor->shape, sizeof saved->shape) != 0)
        return NULL;
    return saved;
}

/* List the settings whose text in the manifest is another one. Keys of one side alone do not
 * count. */
static void dtrain__settings_compare(const char *object, size_t bytes, const char *const *pairs,
                                     char *text, size_t room)
{
    char key[DTRAIN__SETTING], was[DTRAIN__SETTING];
    dtrain__json json = dtrain__json_begin("settings", object, bytes);
    *text = 0;
    if (!object || !pairs || !dtrain__json_enter(&json, '{')) return;
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

/* Find out which tensors of the checkpoint any rank lists: ranks may list different ones. */
static dtrain_result dtrain__load_wanted(dtrain__load *load)
{
    const dtrain__manifest *m = &load->manifest;
    const dtrain_state *state = load->state;
    load->wanted = (int32_t *)dtrain__alloc(&state->allocator, m->tensor_count,
                                            sizeof *load->wanted, "a list of tensors");
    DTRAIN__TRY(dtrain__agree(state->comm, load->wanted ? DTRAIN_OK : DTRAIN_ERROR_MEMORY));
    for (size_t i = 0; i < state->tensor_count; i++) {
        const dtrain__saved_tensor *saved =
            dtrain__manifest_find(m, state->tensors[i].kind, state->tensors[i].name);
        if (saved) load->wanted[saved - m->tensors] = 1;
    }
    return dtrain_all_reduce(state->comm, load->wanted, load->wanted, m->tensor_count,
                             DTRAIN_DTYPE_I32, DTRAIN_REDUCE_MAX, NULL);
}

/* Note the tensors that no rank lists: the program's arrays by name, the optimizer's by kind. */
static void dtrain__note_left_out(dtrain__load *load)
{
    const dtrain__manifest *m = &load->manifest;
    bool done[DTRAIN_STATE_KINDS] = {false}; /* loaded, or said */
    done[DTRAIN_STATE_MISSED] = done[DTRAIN_STATE_VELOCITY] = done[DTRAIN_STATE_Q] = true;
    done[DTRAIN_STATE_VALUE] = done[DTRAIN_STATE_RESIDUAL] = true;
    for (size_t i = 0; i < m->tensor_count; i++)
        if (load->wanted[i]) done[m->tensors[i].kind] = true;
    for (size_t i = 0; i < m->tensor_count; i++) {
        const dtrain__saved_tensor *saved = &m->tensors[i];
        if (saved->kind == DTRAIN_STATE_HOST && !load->wanted[i] &&
            strcmp(saved->name, DTRAIN__MISSED_OF_ALL) != 0)
            dtrain__load_note(load, "\"%.60s\" is left out: this run has no such array",
                              saved->name);
        if (saved->kind == DTRAIN_STATE_HOST || done[saved->kind]) continue;
        done[saved->kind] = true;
        dtrain__load_note(load, "%s was left out: this optimizer keeps none",
                          dtrain__state_kind_name(saved->kind));
    }
}

/* Compare the checkpoint's tensors and settings with this run's, and name the differences. */
static dtrain_result dtrain__load_compare(dtrain__load *load)
{
    const dtrain__manifest *m = &load->manifest;
    const dtrain_state *state = load->state;
    dtrain__misfit misfit;
    char model[400], settings[400], text[1024];
    if (load->desc.this_job && m->job != load->job)
        return dtrain_fail(DTRAIN_ERROR_NOT_FOUND, "%s was not saved by this job", load->directory);
    dtrain__settings_compare(m->model, m->model_bytes, state->desc.model, model, sizeof model);
    dtrain__settings_compare(m->settings, m->settings_bytes, state->desc.settings, settings,
                             sizeof settings);
    if (model[0] && !load->desc.partial)
        return dtrain_fail(DTRAIN_ERROR_DATA, "%s is of another model: %s", load->directory, model);
    if (model[0]) dtrain__load_note(load, "%s", model);
    if (settings[0] && !load->desc.values_only) dtrain__load_note(load, "%s", settings);
    memset(&misfit, 0, sizeof misfit);
    for (size_t i = 0; i < state->tensor_count; i++) {
        const dtrain_state_tensor *tensor = &state->tensors[i];
        if (!dtrain__is_needed(load, tensor) || dtrain__saved_for(load, tensor)) continue;
        const char *const kind = dtrain__state_kind_name(tensor->kind);
        dtrain__name_add(dtrain__manifest_find(m, tensor->kind, tensor->name) ? &misfit.different
                                                                              : &misfit.missing,
                         "%s \"%.60s\"", kind, tensor->name);
    }
    for (size_t i = 0; i < m->tensor_count; i++)
        if (m->tensors[i].kind == DTRAIN_STATE_VALUE && !load->wanted[i])
            dtrain__name_add(&misfit.extra, "value \"%.60s\"", m->tensors[i].name);
    if (!dtrain__misfit_text(&misfit, text, sizeof text)) return DTRAIN_OK;
    if (load->desc.partial) return dtrain__load_note(load, "%s", text), DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_DATA,
                       "%s does not fit this run%s%s%s: %s; build the same model and optimizer, or "
                       "load with `partial` or `values_only`",
                       load->directory, settings[0] ? " (" : "", settings, settings[0] ? ")" : "",
                       text);
}

/* ---- Reading ----------------------------------------------------------------------------------*/

/* Read the target's elements of a saved tensor. `rank` chooses between the tensors that ranks have
 * of their own. */
static dtrain_result dtrain__tensor_read(dtrain__load *load, const dtrain__saved_tensor *saved,
                                         int rank, dtrain__target *target)
{
    char path[2 * DTRAIN__PATH];
    target->dtype = saved->dtype;
    for (size_t i = 0; i < saved->piece_count; i++) {
        const dtrain__saved_piece *piece = &load->manifest.pieces[saved->first_piece + i];
        const dtrain__saved_file *file = &load->manifest.files[piece->file];
        dtrain_piece common;
        if (piece->rank != (saved->own ? rank : -1) ||
            !dtrain__piece_common(&piece->piece, &target->piece, &common))
            continue;
        snprintf(path, sizeof path, "%s/%s", load->directory, file->name);
        const dtrain__source source = {
            path,        piece->at,  file->bytes,  dtrain__state_kind_name(saved->kind),
            saved->name, piece->crc, saved->dtype, piece->piece};
        DTRAIN__TRY(dtrain__piece_read(&load->reader, &source, target));
    }
    return DTRAIN_OK;
}

/* ---- Tensors that each rank has of its own ----------------------------------------------------*/

/* Tell whether a rank has saved exactly this piece of a tensor of its own. */
static bool dtrain__own_is_there(const dtrain__load *load, const dtrain_state_tensor *tensor)
{
    const dtrain__saved_tensor *saved = dtrain__saved_for(load, tensor);
    const int rank = dtrain_comm_rank(load->state->comm);
    int64_t there = 0, all = 0;
    for (size_t i = 0; saved && i < saved->piece_count; i++) {
        const dtrain__saved_piece *piece = &load->manifest.pieces[saved->first_piece + i];
        dtrain_piece common;
        if (piece->rank != rank) continue;
        all += piece->piece.count;
        if (dtrain__piece_common(&piece->piece, &tensor->piece, &common)) there += common.count;
    }
    return saved && there == tensor->piece.count && all == there;
}

/* Find out whether every rank finds the residuals and velocities of exactly its own pieces. */
static dtrain_result dtrain__compare_cuts(dtrain__load *load)
{
    const dtrain_state *state = load->state;
    int32_t same = load->manifest.ranks == dtrain_comm_size(state->comm);
    for (size_t i = 0; i < state->tensor_count; i++)
        if (state->tensors[i].own && state->tensors[i].kind != DTRAIN_STATE_HOST &&
            !dtrain__own_is_there(load, &state->tensors[i]))
            same = 0;
    DTRAIN__TRY(
        dtrain_all_reduce(state->comm, &same, &same, 1, DTRAIN_DTYPE_I32, DTRAIN_REDUCE_MIN, NULL));
    load->same_cuts = same != 0;
    return DTRAIN_OK;
}

/* Fill a residual or velocity with the mean over the ranks that saved it, or with zeros. */
static dtrain_result dtrain__own_mean(dtrain__load *load, const dtrain_state_tensor *tensor)
{
    const dtrain_state *state = load->state;
    const dtrain__saved_tensor *saved = dtrain__saved_for(load, tensor);
    const bool flat =
        saved && !load->manifest.hierarchical && !dtrain__goes_by_nodes(state->desc.strategy);
    const int64_t most = (int64_t)(DTRAIN__BLOCK / sizeof(float));
    const float scale = 1.0f / (float)load->manifest.ranks;
    if (!load->sum)
        load->sum =
            (float *)dtrain__alloc(&state->allocator, DTRAIN__BLOCK, 1, "sums of residuals");
    if (!load->sum) return DTRAIN_ERROR_MEMORY;
    for (int64_t done = 0; done < tensor->piece.count; done += most) {
        dtrain__target target = {load->sum, tensor->piece, DTRAIN_DTYPE_F32, true};
        target.piece.offset += done;
        target.piece.count = dtrain__min(most, tensor->piece.count - done);
        memset(load->sum, 0, DTRAIN__BLOCK);
        for (int r = 0; r < load->manifest.ranks && flat; r++)
            DTRAIN__TRY(dtrain__tensor_read(load, saved, r, &target));
        for (int64_t i = 0; i < target.piece.count; i++) load->sum[i] *= scale;
        DTRAIN__TRY(dtrain_device_copy(state->device, (float *)tensor->memory + done, load->sum,
                                       (size_t)target.piece.count * sizeof(float)));
    }
    return DTRAIN_OK;
}

/* Note how residuals and Q were set, if not exactly as they were saved. */
static void dtrain__note_residuals(dtrain__load *load)
{
    const dtrain_state *state = load->state;
    const dtrain__manifest *m = &load->manifest;
    bool wanted = false, there = false;
    for (size_t i = 0; i < state->tensor_count; i++)
        wanted |= state->tensors[i].kind == DTRAIN_STATE_RESIDUAL;
    bool q_differs = false;
    for (size_t i = 0; i < state->tensor_count; i++)
        q_differs |= state->tensors[i].kind == DTRAIN_STATE_Q &&
                     !dtrain__saved_for(load, &state->tensors[i]);
    if (q_differs)
        dtrain__load_note(load, "Q of PowerSGD begins anew: it is not there, or has another rank");
    for (size_t i = 0; i < m->tensor_count; i++)
        there |= m->tensors[i].kind == DTRAIN_STATE_RESIDUAL && m->tensors[i].piece_count;
    if (there && !wanted) dtrain__load_note(load, "residuals were left out: this run keeps none");
    else if (wanted && !there) dtrain__load_note(load, "residuals begin with zeros");
    else if (wanted && !load->same_cuts)
        dtrain__load_note(load, m->hierarchical || dtrain__goes_by_nodes(state->desc.strategy)
                                    ? "residuals begin with zeros: they are those of nodes"
                                    : "residuals are the mean over the ranks that saved them");
}

/* Note the program's own arrays that differ from rank to rank and could not be restored on all. */
static void dtrain__note_arrays(dtrain__load *load)
{
    const dtrain_state *state = load->state;
    const int ranks = dtrain_comm_size(state->comm), before = load->manifest.ranks;
    for (size_t i = 0; i < state->tensor_count; i++) {
        const dtrain_state_tensor *tensor = &state->tensors[i];
        if (tensor->kind != DTRAIN_STATE_HOST || !tensor->own) continue;
        if (!dtrain__saved_for(load, tensor))
            dtrain__load_note(
                load, "\"%.60s\" begins anew: it is not there, or has another count or type",
                tensor->name);
        else if (ranks > before)
            dtrain__load_note(load, "\"%.60s\" begins anew on ranks from %d on, which are new",
                              tensor->name, before);
        else if (ranks < before)
            dtrain__load_note(load, "\"%.60s\" of ranks from %d on is left out", tensor->name,
                              ranks);
    }
}

/* ---- All of it --------------------------------------------------------------------------------*/

static dtrain_result dtrain__tensor_load(dtrain__load *load, const dtrain_state_tensor *tensor)
{
    const dtrain__saved_tensor *saved = dtrain__saved_for(load, tensor);
    const int rank = dtrain_comm_rank(load->state->comm);
    dtrain__target target = {tensor->memory, tensor->piece, tensor->dtype, false};
    if (tensor->own && tensor->kind != DTRAIN_STATE_HOST && !load->same_cuts)
        return dtrain__own_mean(load, tensor);
    if (!saved && tensor->kind == DTRAIN_STATE_MISSED) {
        saved = dtrain__manifest_find(&load->manifest, DTRAIN_STATE_HOST, DTRAIN__MISSED_OF_ALL);
        target.piece.offset = (int64_t *)tensor->memory - load->state->desc.optimizer->missed;
        if (saved) memcpy(target.piece.length, saved->shape, sizeof saved->shape);
    }
    if (!saved) return DTRAIN_OK;
    if (tensor->own && rank >= load->manifest.ranks) return DTRAIN_OK;
    load->values += tensor->kind == DTRAIN_STATE_VALUE;
    return dtrain__tensor_read(load, saved, rank, &target);
}

static dtrain_result dtrain__tensors_load(dtrain__load *load)
{
    const dtrain_state *state = load->state;
    for (size_t i = 0; i < state->tensor_count; i++)
        if (dtrain__is_loaded(load, state->tensors[i].kind))
            DTRAIN__TRY(dtrain__tensor_load(load, &state->tensors[i]));
    return DTRAIN_OK;
}

/* Set the scalars that the checkpoint has; others stay. */
static void dtrain__scalars_load(dtrain__load *load)
{
    const dtrain_state *state = load->state;
    for (size_t i = 0; i < state->scalar_count && !load->desc.values_only; i++) {
        const dtrain__scalar *scalar = &state->scalars[i];
        const dtrain__saved_scalar *saved = load->manifest.scalars;
        const dtrain__saved_scalar *end = saved + load->manifest.scalar_count;
        while (saved < end && strcmp(saved->name, scalar->name) != 0) saved++;
        if (saved < end) memcpy(scalar->memory, &saved->bits, scalar->bytes); /* little-endian */
        else dtrain__load_note(load, "%s begins anew", scalar->name);
    }
}

/* Load the checkpoint of a directory. *differs: its manifest could be read, and does not fit the
 * state; nor will an older one. */
static dtrain_result dtrain__load_one(dtrain__load *load, bool *differs)
{
    const dtrain_state *state = load->state;
    *differs = false;
    load->note[0] = 0;
    load->reader.bytes = load->values = 0;
    load->reader.opened[0] = 0; /* another checkpoint has files of the same names */
    DTRAIN__TRY(
        dtrain__agree(state->comm, dtrain__manifest_read(load->desc.storage, &state->allocator,
                                                         load->directory, &load->manifest)));
    DTRAIN__TRY(dtrain__load_wanted(load));
    dtrain_result result = dtrain__agree(state->comm, dtrain__load_compare(load));
    *differs = result != DTRAIN_OK;
    if (result == DTRAIN_OK) result = dtrain__compare_cuts(load);
    if (result == DTRAIN_OK) {
        dtrain__set_torn(state->desc.strategy, dtrain__load_call);
        result = dtrain__agree(state->comm, dtrain__tensors_load(load));
    }
    if (result != DTRAIN_OK) return result;
    dtrain__scalars_load(load);
    if (!load->desc.values_only) {
        dtrain__note_left_out(load);
        dtrain__note_residuals(load);
        dtrain__note_arrays(load);
        load->state->step = load->manifest.step;
        if (load->manifest.run) load->state->run = load->manifest.run;
    }
    return dtrain_state_changed(load->state);
}

/* Free what belongs to one checkpoint. */
static void dtrain__load_free(dtrain__load *load)
{
    dtrain__free(&load->state->allocator, load->wanted, load->manifest.tensor_count,
                 sizeof *load->wanted);
    load->wanted = NULL;
    dtrain__manifest_free(&load->manifest);
}

/* ---- Which checkpoint -------------------------------------------------------------------------*/

/* Rank 0: find out whether the path is a checkpoint, or list the checkpoints in it. An empty path,
 * a checkpoint without its manifest and a disk that fails are three different errors. */
static dtrain_result dtrain__find_checkpoints(const dtrain__load *load, const char *path,
                                              bool *is_one, dtrain__steps *steps)
{
    const dtrain_storage *storage = load->desc.storage;
    char manifest[2 * DTRAIN__PATH];
    memset(steps, 0, sizeof *steps);
    steps->allocator = &load->state->allocator;
    snprintf(manifest, sizeof manifest, "%s/manifest.json", path);
    const int file = dtrain__storage_try(storage, manifest, DTRAIN_STORAGE_READ);
    *is_one = file >= 0;
    if (file >= 0) return (void)storage->close(storage->user, file), DTRAIN_OK;
    if (file != -ENOENT && file != -ENOTDIR)
        return dtrain_fail(DTRAIN_ERROR_FILE, "%s cannot be opened: %s", manifest, strerror(-file));
    const int directory = dtrain__storage_try(storage, path, DTRAIN_STORAGE_DIRECTORY);
    if (directory >= 0) (void)storage->close(storage->user, directory);
    if (directory != -ENOENT)
        DTRAIN__TRY(dtrain__steps_list(storage, &load->state->allocator, path, "", steps));
    if (steps->count) return DTRAIN_OK;
    if (steps->remains)
        return dtrain_fail(DTRAIN_ERROR_DATA, "%s has files of a checkpoint, and no manifest.json",
                           path);
    return dtrain_fail(DTRAIN_ERROR_NOT_FOUND, "there is no checkpoint in %s", path);
}

/* Load the newest of the steps that can be read whole. */
static dtrain_result dtrain__load_newest(dtrain__load *load, const char *path,
                                         const dtrain__steps *steps)
{
    const dtrain_state *state = load->state;
    char passed[256] = "";
    for (size_t i = 0;; i++) {
        int64_t which[2] = {i < steps->count ? steps->steps[i] : -1, 0}; /* rank 0 knows */
        bool differs, old = false;
        char why[DTRAIN__ERROR_BYTES];
        if (which[0] >= 0) (void)dtrain__step_is_old(load->desc.storage, path, which[0], &old);
        which[1] = old;
        DTRAIN__TRY(dtrain_broadcast(state->comm, which, 2, DTRAIN_DTYPE_I64, 0, NULL));
        if (which[0] < 0)
            return dtrain_fail(DTRAIN_ERROR_DATA,
                               "no checkpoint in %s can be read; the last one "
                               "that was tried: %s",
                               path, passed);
        dtrain__step_path(load->directory, path, which[0], which[1] ? ".old" : "");
        const dtrain_result result = dtrain__load_one(load, &differs);
        if (result == DTRAIN_OK && passed[0])
            dtrain__load_note(load, "newer ones were passed over: %s", passed);
        if (result == DTRAIN_OK || differs) return result;
        snprintf(why, sizeof why, "%s", dtrain_last_error());
        int32_t damaged = result == DTRAIN_ERROR_DATA || result == DTRAIN_ERROR_FILE;
        DTRAIN__TRY(dtrain_all_reduce(state->comm, &damaged, &damaged, 1, DTRAIN_DTYPE_I32,
                                      DTRAIN_REDUCE_MIN, NULL));
        dtrain__set_last_error(why);
        if (!damaged || (load->desc.partial && dtrain__torn(state->desc.strategy))) return result;
        dtrain__load_free(load);
        snprintf(passed, sizeof passed, "%.250s", dtrain__bare(why));
        if (dtrain_comm_rank(state->comm) == 0)
            dtrain_log(state->world, DTRAIN_LOG_WARNING,
                       "%s is passed over, and an older checkpoint is tried: %s", load->directory,
                       dtrain__bare(why));
    }
}

/* Fill in the caller's info. */
static void dtrain__load_report(const dtrain__load *load, double start, dtrain_load_info *info)
{
    const dtrain__manifest *m = &load->manifest;
    info->step = m->step;
    info->ranks = m->ranks;
    snprintf(info->strategy, sizeof info->strategy, "%s", m->strategy);
    snprintf(info->path, sizeof info->path, "%.*s", (int)sizeof info->path - 1, load->directory);
    info->bytes = load->reader.bytes;
    info->values = load->values;
    info->metric = m->has_metric ? m->metric : DTRAIN__NAN;
    info->seconds = dtrain_seconds() - start;
    memcpy(info->note, load->note, sizeof info->note);
}

DTRAIN_API dtrain_result dtrain_checkpoint_load(dtrain_state *state, const char *path,
                                                const dtrain_load_desc *desc,
                                                dtrain_load_info *info)
{
    const char *const call = dtrain__load_call;
    dtrain_load_info ignored;
    dtrain__load load;
    dtrain__steps steps;
    bool is_one = false, differs;
    if (!info) info = &ignored;
    memset(info, 0, sizeof *info);
    info->step = -1;
    DTRAIN__TRY(dtrain__state_check(state, call));
    memset(&load, 0, sizeof load);
    memset(&steps, 0, sizeof steps);
    load.state = state;
    steps.allocator = &state->allocator;
    if (desc) load.desc = *desc;
    load.desc.storage = dtrain__storage_or_files(load.desc.storage);
    const double start = dtrain_seconds();
    const char *const torn = dtrain__torn(state->desc.strategy); /* mended by a whole load alone */
    if (!load.desc.partial && !load.desc.values_only) dtrain__set_torn(state->desc.strategy, NULL);
    dtrain_result result = dtrain__between_backwards(state->desc.strategy, call);
    if (result == DTRAIN_OK && (!path || !path[0] || strlen(path) > DTRAIN__PATH - 128))
        result = dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: path is NULL, empty or longer than %d",
                             call, DTRAIN__PATH - 128);
    if (result == DTRAIN_OK) result = dtrain__reader_begin(&load.reader, state, load.desc.storage);
    if (result == DTRAIN_OK && dtrain_comm_rank(state->comm) == 0)
        result = dtrain__find_checkpoints(&load, path, &is_one, &steps);
    int64_t from[2] = {is_one, (int64_t)state->world->job};
    result = dtrain__agree(state->comm, result);
    if (result == DTRAIN_OK)
        result = dtrain_broadcast(state->comm, from, 2, DTRAIN_DTYPE_I64, 0, NULL);
    load.job = (uint64_t)from[1];
    if (result == DTRAIN_OK && from[0]) {
        snprintf(load.directory, sizeof load.directory, "%s", path);
        result = dtrain__load_one(&load, &differs);
    } else if (result == DTRAIN_OK) result = dtrain__load_newest(&load, path, &steps);
    if (result == DTRAIN_OK) dtrain__load_report(&load, start, info);
    else if (torn && !dtrain__torn(state->desc.strategy))
        dtrain__set_torn(state->desc.strategy, torn);
    dtrain__load_free(&load);
    dtrain__steps_free(&steps);
    dtrain__free(&state->allocator, load.sum, DTRAIN__BLOCK, 1);
    dtrain__reader_end(&load.reader, state);
    return result;
}
