/* Directories of checkpoints: names, order, publishing, removal
 *
 *     step-000000001000        a checkpoint
 *     step-000000001000.tmp    a checkpoint that is being written or removed; it is never read
 *     step-000000001000.old    a checkpoint that is being replaced; it counts while the step has no
 *                              other
 *     latest                   the name of the newest
 *     aside-1                  checkpoints of another history than the directory's
 *
 * The order of a save makes it safe against the loss of power at any moment: a name is given by a
 * rename, after all files below it are on the disk, and the directory above is brought to the disk
 * after that. A checkpoint that goes is renamed to step-N.tmp before its files are removed. Nothing
 * is removed but names that are written here. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/log.h"
#include "core/result.h"
#include "state/checkpoint_internal.h"
#include "state/storage_internal.h"

#define DTRAIN__STEP_PREFIX "step-"
#define DTRAIN__STEP_DIGITS 12 /* at least: names are in the order of their steps */

/* ---- Names ------------------------------------------------------------------------------------*/

DTRAIN__PRIVATE dtrain__file_path dtrain__step_path(const dtrain__folder *folder, int64_t step,
                                                    const char *suffix)
{
    return dtrain__path_in(folder->path, DTRAIN__STEP_PREFIX "%0*lld%s", DTRAIN__STEP_DIGITS,
                           (long long)step, suffix);
}

/* Tell whether checkpoints have files of this name. */
static bool dtrain__is_ours(const char *name)
{
    static const char *const parts[][2] = {{"model-", ".safetensors"},
                                           {"state-", ".safetensors"},
                                           {"model-", ".tmp"},
                                           {"state-", ".tmp"}};
    if (strcmp(name, "manifest.json") == 0) return true;
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
        const size_t prefix = strlen(parts[i][0]);
        if (strncmp(name, parts[i][0], prefix) != 0) continue;
        const char *at = name + prefix;
        at += strspn(at, "0123456789-");
        if (strcmp(at, parts[i][1]) == 0) return true;
    }
    return false;
}

/* ---- Lists ------------------------------------------------------------------------------------*/

static void dtrain__add_name(void *list, const char *name)
{
    dtrain__text_append((dtrain__text *)list, name, strlen(name) + 1);
}

/* List the names in a directory, each with a 0 behind it. The caller frees *names in any case. */
static dtrain_result dtrain__names_list(const dtrain__folder *folder, const char *path,
                                        dtrain__text *names)
{
    const dtrain_storage *storage = folder->storage;
    memset(names, 0, sizeof *names);
    names->allocator = folder->allocator;
    const int code = storage->list(storage->user, path, dtrain__add_name, names);
    if (code < 0) return dtrain__storage_fail(path, "read", code);
    return names->failed ? DTRAIN_ERROR_MEMORY : DTRAIN_OK;
}

/* Return the name after `name`, or the first one if that is NULL; NULL: there is no other. */
static const char *dtrain__next_name(const dtrain__text *names, const char *name)
{
    const char *next = name ? name + strlen(name) + 1 : names->at;
    return names->bytes && next < names->at + names->bytes ? next : NULL;
}

static int dtrain__newest_first(const void *left, const void *right)
{
    const int64_t a = *(const int64_t *)left, b = *(const int64_t *)right;
    return a > b ? -1 : a < b;
}

/* List the steps whose directories have such a suffix, each once: "" for checkpoints, those that
 * are being replaced included. After an error nothing is left to free. */
DTRAIN__PRIVATE dtrain_result dtrain__steps_list(const dtrain__folder *folder, const char *suffix,
                                                 dtrain__steps *out)
{
    const size_t prefix = sizeof DTRAIN__STEP_PREFIX - 1;
    dtrain__text names;
    memset(out, 0, sizeof *out);
    out->allocator = folder->allocator;
    dtrain_result result = dtrain__names_list(folder, folder->path, &names);
    for (const char *name = NULL;
         result == DTRAIN_OK && (name = dtrain__next_name(&names, name)) != NULL;) {
        const bool is_step = strncmp(name, DTRAIN__STEP_PREFIX, prefix) == 0;
        const char *at = is_step ? name + prefix : "";
        const size_t digits = strspn(at, "0123456789");
        const int64_t step = strtoll(at, NULL, 10);
        const bool fits = strcmp(at + digits, suffix) == 0;
        out->remains |= dtrain__is_ours(name);
        if (digits < DTRAIN__STEP_DIGITS || step > DTRAIN__STEP_MOST ||
            (!fits && (*suffix || strcmp(at + digits, ".old") != 0)))
            continue;
        if (!dtrain__grow(out->allocator, (void **)&out->steps, out->count, &out->room,
                          sizeof *out->steps, "a list of steps"))
            result = DTRAIN_ERROR_MEMORY;
        else out->steps[out->count++] = step;
    }
    dtrain__text_free(&names);
    if (result != DTRAIN_OK) dtrain__steps_free(out);
    if (!out->count) return result;
    size_t count = 1;
    qsort(out->steps, out->count, sizeof *out->steps, dtrain__newest_first);
    for (size_t i = 1; i < out->count; i++)
        if (out->steps[i] != out->steps[i - 1]) out->steps[count++] = out->steps[i];
    out->count = count;
    return result;
}

/* Free a list; one that was never made is empty. */
DTRAIN__PRIVATE void dtrain__steps_free(dtrain__steps *steps)
{
    dtrain__free(steps->allocator, steps->steps, steps->room, sizeof *steps->steps);
    steps->steps = NULL;
    steps->count = steps->room = 0;
}

/* ---- Removal ----------------------------------------------------------------------------------*/

/* Remove a checkpoint, or a directory that is none any more, or not yet, with all that is in it,
 * unless something in it is not ours. A checkpoint is renamed first: a crash in the middle leaves a
 * step-N.tmp. */
DTRAIN__PRIVATE dtrain_result dtrain__step_remove(const dtrain__folder *folder, int64_t step,
                                                  const char *suffix)
{
    const dtrain__file_path path = dtrain__step_path(folder, step, suffix);
    const dtrain__file_path tmp = dtrain__step_path(folder, step, *suffix ? suffix : ".tmp");
    dtrain__text names;
    dtrain_result result = dtrain__names_list(folder, path.text, &names);
    for (const char *name = NULL;
         result == DTRAIN_OK && (name = dtrain__next_name(&names, name)) != NULL;)
        if (!dtrain__is_ours(name))
            result = dtrain_fail(DTRAIN_ERROR_FILE,
                                 "%s is not removed: there are files in it that no checkpoint has",
                                 path.text);
    if (result == DTRAIN_OK && !*suffix)
        result = dtrain__storage_rename(folder->storage, path.text, tmp.text);
    for (const char *name = NULL;
         result == DTRAIN_OK && (name = dtrain__next_name(&names, name)) != NULL;) {
        const dtrain__file_path file = dtrain__path_in(tmp.text, "%s", name);
        result = dtrain__storage_remove(folder->storage, file.text);
    }
    dtrain__text_free(&names);
    return result == DTRAIN_OK ? dtrain__storage_remove(folder->storage, tmp.text) : result;
}

/* Tell whether a step has nothing under its own name but a checkpoint that was being replaced: a
 * crash came between the two renames of dtrain__publish_step. */
DTRAIN__PRIVATE dtrain_result dtrain__step_is_old(const dtrain__folder *folder, int64_t step,
                                                  bool *old)
{
    const dtrain__file_path path = dtrain__step_path(folder, step, "");
    const int code = dtrain__storage_probe(folder->storage, path.text, DTRAIN_STORAGE_DIRECTORY);
    *old = code == -ENOENT;
    return !code || *old ? DTRAIN_OK : dtrain__storage_fail(path.text, "opened", code);
}

/* Clear away what saves, or removals, have left unfinished. A checkpoint that was being replaced
 * gets its name back, or is removed if the new one has that. */
DTRAIN__PRIVATE dtrain_result dtrain__remove_unfinished(const dtrain__folder *folder)
{
    static const char *const suffixes[] = {".tmp", ".old"};
    dtrain_result result = DTRAIN_OK;
    for (int s = 0; s < 2 && result == DTRAIN_OK; s++) {
        dtrain__steps list;
        DTRAIN__TRY(dtrain__steps_list(folder, suffixes[s], &list));
        for (size_t i = 0; i < list.count && result == DTRAIN_OK; i++) {
            const dtrain__file_path path = dtrain__step_path(folder, list.steps[i], "");
            const dtrain__file_path left = dtrain__step_path(folder, list.steps[i], suffixes[s]);
            bool is_old = false;
            if (s) result = dtrain__step_is_old(folder, list.steps[i], &is_old);
            if (result == DTRAIN_OK)
                result = is_old ? dtrain__storage_rename(folder->storage, left.text, path.text)
                                : dtrain__step_remove(folder, list.steps[i], suffixes[s]);
        }
        dtrain__steps_free(&list);
    }
    return result;
}

/* ---- Publishing -------------------------------------------------------------------------------*/

/* Write the name of the newest checkpoint, for people and scripts: nothing here reads it. */
static dtrain_result dtrain__write_latest(const dtrain__folder *folder, int64_t step)
{
    const dtrain__file_path latest = dtrain__path_in(folder->path, "latest");
    const dtrain__file_path tmp = dtrain__path_in(folder->path, "latest.tmp");
    const dtrain__file_path path = dtrain__step_path(folder, step, "\n");
    const char *name = path.text + strlen(folder->path) + 1;
    DTRAIN__TRY(dtrain__storage_remove(folder->storage, tmp.text)); /* of a save that was cut off */
    DTRAIN__TRY(dtrain__storage_put(folder->storage, tmp.text, name, strlen(name)));
    return dtrain__storage_rename(folder->storage, tmp.text, latest.text);
}

/* Move the checkpoints of later steps than `above`, from which a run goes on without them, to a new
 * folder; *aside is its path, or "" when there are none. The newest goes last: a crash before that
 * leaves it the newest, and a crash after it leaves the one at `above` or before. */
DTRAIN__PRIVATE dtrain_result dtrain__set_aside(const dtrain__folder *folder, int64_t above,
                                                dtrain__file_path *aside)
{
    dtrain__steps list;
    size_t later = 0;
    int code = 0, number = 0;
    aside->text[0] = 0;
    DTRAIN__TRY(dtrain__steps_list(folder, "", &list));
    while (later < list.count && list.steps[later] > above) later++;
    const int64_t newest = later < list.count ? list.steps[later] : -1;
    do {
        if (!later) break;
        *aside = dtrain__path_in(folder->path, "aside-%d", ++number);
        code = folder->storage->make_directory(folder->storage->user, aside->text);
    } while (code == -EEXIST);
    dtrain_result result = code >= 0 ? DTRAIN_OK : dtrain__storage_fail(aside->text, "made", code);
    const dtrain__folder there = {folder->storage, folder->allocator, aside->text};
    for (size_t i = later; i-- > 0 && result == DTRAIN_OK;) {
        const dtrain__file_path from = dtrain__step_path(folder, list.steps[i], "");
        const dtrain__file_path to = dtrain__step_path(&there, list.steps[i], "");
        result = dtrain__storage_rename(folder->storage, from.text, to.text);
    }
    dtrain__steps_free(&list);
    if (result != DTRAIN_OK || !later) return result;
    if (newest >= 0) return dtrain__write_latest(folder, newest);
    const dtrain__file_path latest = dtrain__path_in(folder->path, "latest");
    DTRAIN__TRY(dtrain__storage_remove(folder->storage, latest.text));
    return dtrain__storage_sync_directory(folder->storage, folder->path);
}

/* Make step-N.tmp, whose files are on the disk, the checkpoint of its step. A checkpoint that the
 * step has already becomes step-N.old, which gets its name back after a crash before the second
 * rename. */
DTRAIN__PRIVATE dtrain_result dtrain__publish_step(const dtrain__folder *folder, int64_t step)
{
    const dtrain_storage *storage = folder->storage;
    const dtrain__file_path path = dtrain__step_path(folder, step, "");
    const dtrain__file_path tmp = dtrain__step_path(folder, step, ".tmp");
    const dtrain__file_path old = dtrain__step_path(folder, step, ".old");
    DTRAIN__TRY(dtrain__storage_sync_directory(storage, tmp.text));
    const int code = storage->rename(storage->user, path.text, old.text);
    if (code < 0 && code != -ENOENT) return dtrain__storage_fail(path.text, "renamed", code);
    DTRAIN__TRY(dtrain__storage_rename(folder->storage, tmp.text, path.text));
    if (code >= 0) DTRAIN__TRY(dtrain__step_remove(folder, step, ".old"));
    return dtrain__write_latest(folder, step);
}
