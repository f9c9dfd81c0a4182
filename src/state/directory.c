/* Directories of checkpoints: names, order, publishing, removal
 *
 *     step-000000001000        a checkpoint
 *     step-000000001000.tmp    one that is being written, or removed: nobody reads it
 *     step-000000001000.old    one that is being replaced: the checkpoint, while there is no other
 *     latest                   the name of the newest
 *     aside-1                  checkpoints that are not of the history that goes on here
 *
 * The order of a save makes it safe against the loss of power at any moment: a rename is made when
 * all that it leads to is on the disk, and counts when the directory above is. Whatever is removed
 * becomes step-N.tmp first, by one rename. Nothing is removed that has another name than those that
 * are written here. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/log.h"
#include "core/result.h"
#include "state/checkpoint_internal.h"
#include "state/storage_internal.h"

#define DTRAIN__STEP_PREFIX "step-"
#define DTRAIN__STEP_DIGITS 12 /* at least: names are in the order of their steps */

/* ---- Names ------------------------------------------------------------------------------------*/

DTRAIN__PRIVATE void dtrain__step_path(char path[DTRAIN__PATH], const char *directory, int64_t step,
                                       const char *suffix)
{
    snprintf(path, DTRAIN__PATH, "%s/" DTRAIN__STEP_PREFIX "%0*lld%s", directory,
             DTRAIN__STEP_DIGITS, (long long)step, suffix);
}

/* Read the step out of a name and what follows its digits; -1: the name is another. */
static int64_t dtrain__step_named(const char *name, const char **rest)
{
    const size_t prefix = sizeof DTRAIN__STEP_PREFIX - 1;
    int64_t step = 0;
    if (strncmp(name, DTRAIN__STEP_PREFIX, prefix) != 0) return -1;
    const char *at = name + prefix;
    for (; *at >= '0' && *at <= '9'; at++) {
        if (step > (INT64_MAX - 9) / 10) return -1;
        step = 10 * step + (*at - '0');
    }
    *rest = at;
    return at - name - (ptrdiff_t)prefix < DTRAIN__STEP_DIGITS ? -1 : step;
}

/* Tell whether a file of a checkpoint has a name that is given here. */
static bool dtrain__is_ours(const char *name)
{
    static const char *const parts[][2] = {{"model-", ".safetensors"},
                                           {"state-", ".safetensors"},
                                           {"rank-", ".json"},
                                           {"rank-", ".tmp"}};
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

static void dtrain__steps_add(dtrain__steps *steps, int64_t step)
{
    if (dtrain__grow(steps->allocator, (void **)&steps->steps, steps->count, &steps->room,
                     sizeof *steps->steps, "a list of steps"))
        steps->steps[steps->count++] = step;
    else steps->failed = true;
}

static void dtrain__add_step(void *list, const char *name)
{
    dtrain__steps *steps = (dtrain__steps *)list;
    const char *rest;
    const int64_t step = dtrain__step_named(name, &rest);
    steps->remains |= dtrain__is_ours(name);
    if (step < 0) return;
    if (strcmp(rest, steps->suffix) == 0 || (!steps->suffix[0] && strcmp(rest, ".old") == 0))
        dtrain__steps_add(steps, step);
}

static int dtrain__newest_first(const void *left, const void *right)
{
    const int64_t a = *(const int64_t *)left, b = *(const int64_t *)right;
    return a > b ? -1 : a < b;
}

static dtrain_result dtrain__list(const dtrain_storage *storage, const char *directory,
                                  void (*name)(void *list, const char *entry), void *list)
{
    const int code = storage->list(storage->user, directory, name, list);
    if (code >= 0) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_FILE, "the directory %s cannot be read: %s", directory,
                       strerror(-code));
}

/* List the steps whose directories have such a suffix, each once: "" for checkpoints, those that
 * are being replaced included. After an error nothing is left to free. */
DTRAIN__PRIVATE dtrain_result dtrain__steps_list(const dtrain_storage *storage,
                                                 const dtrain_allocator *allocator,
                                                 const char *directory, const char *suffix,
                                                 dtrain__steps *out)
{
    memset(out, 0, sizeof *out);
    out->allocator = allocator;
    out->suffix = suffix;
    dtrain_result result = dtrain__list(storage, directory, dtrain__add_step, out);
    if (out->failed) result = DTRAIN_ERROR_MEMORY;
    if (result != DTRAIN_OK) dtrain__steps_free(out);
    if (!out->count) return result;
    size_t count = 1;
    qsort(out->steps, out->count, sizeof *out->steps, dtrain__newest_first);
    for (size_t i = 1; i < out->count; i++)
        if (out->steps[i] != out->steps[i - 1]) out->steps[count++] = out->steps[i];
    out->count = count;
    return result;
}

DTRAIN__PRIVATE void dtrain__steps_free(dtrain__steps *steps)
{
    dtrain__free(steps->allocator, steps->steps, steps->room, sizeof *steps->steps);
    steps->steps = NULL;
    steps->count = steps->room = 0;
}

/* ---- Removal ----------------------------------------------------------------------------------*/

/* The names in a directory, one behind the other, each with a 0 behind it. */
typedef struct dtrain__names {
    dtrain__text text;
    bool foreign; /* one of them is not ours */
} dtrain__names;

static void dtrain__add_name(void *list, const char *name)
{
    dtrain__names *names = (dtrain__names *)list;
    if (!dtrain__is_ours(name)) names->foreign = true;
    dtrain__text_add(&names->text, "%s%c", name, 0);
}

/* List what is in a checkpoint's directory, or what is left of it, and refuse one in which
 * something is not ours. The caller frees *names in any case. */
static dtrain_result dtrain__names_list(const dtrain_storage *storage,
                                        const dtrain_allocator *allocator, const char *path,
                                        dtrain__names *names)
{
    memset(names, 0, sizeof *names);
    names->text.allocator = allocator;
    DTRAIN__TRY(dtrain__list(storage, path, dtrain__add_name, names));
    if (names->text.failed) return DTRAIN_ERROR_MEMORY;
    if (!names->foreign) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_FILE,
                       "%s is not removed: there are files in it that no checkpoint has", path);
}

/* Remove a directory that is no checkpoint any more, or not yet, with all that is in it. */
static dtrain_result dtrain__leftover_remove(const dtrain_storage *storage,
                                             const dtrain_allocator *allocator, const char *path)
{
    dtrain__names names;
    char file[2 * DTRAIN__PATH];
    dtrain_result result = dtrain__names_list(storage, allocator, path, &names);
    for (size_t at = 0; result == DTRAIN_OK && at < names.text.bytes;
         at += strlen(names.text.at + at) + 1) {
        snprintf(file, sizeof file, "%s/%s", path, names.text.at + at);
        result = dtrain__storage_remove(storage, file);
    }
    dtrain__text_free(&names.text);
    return result == DTRAIN_OK ? dtrain__storage_remove(storage, path) : result;
}

/* Remove a checkpoint. A crash in the middle leaves a step-N.tmp. */
DTRAIN__PRIVATE dtrain_result dtrain__step_remove(const dtrain_storage *storage,
                                                  const dtrain_allocator *allocator,
                                                  const char *directory, int64_t step)
{
    char path[DTRAIN__PATH], tmp[DTRAIN__PATH];
    dtrain__names names;
    dtrain__step_path(path, directory, step, "");
    dtrain__step_path(tmp, directory, step, ".tmp");
    const dtrain_result result = dtrain__names_list(storage, allocator, path, &names);
    dtrain__text_free(&names.text);
    DTRAIN__TRY(result);
    DTRAIN__TRY(dtrain__storage_rename(storage, path, tmp));
    DTRAIN__TRY(dtrain__storage_sync_directory(storage, directory)); /* before its files go */
    return dtrain__leftover_remove(storage, allocator, tmp);
}

/* Tell whether a step has nothing under its own name but a checkpoint that was being replaced: a
 * crash came between the two renames of dtrain__directory_publish. */
DTRAIN__PRIVATE dtrain_result dtrain__step_is_old(const dtrain_storage *storage,
                                                  const char *directory, int64_t step, bool *old)
{
    char path[DTRAIN__PATH];
    dtrain__step_path(path, directory, step, "");
    const int file = dtrain__storage_try(storage, path, DTRAIN_STORAGE_DIRECTORY);
    *old = file == -ENOENT;
    if (file >= 0) (void)storage->close(storage->user, file);
    if (file >= 0 || *old) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_FILE, "%s cannot be opened: %s", path, strerror(-file));
}

/* Give a checkpoint that was being replaced its name back, or remove it after the other one. */
static dtrain_result dtrain__old_settle(const dtrain_storage *storage,
                                        const dtrain_allocator *allocator, const char *directory,
                                        int64_t step)
{
    char path[DTRAIN__PATH], old[DTRAIN__PATH];
    bool is_old;
    dtrain__step_path(path, directory, step, "");
    dtrain__step_path(old, directory, step, ".old");
    DTRAIN__TRY(dtrain__step_is_old(storage, directory, step, &is_old));
    if (!is_old) return dtrain__leftover_remove(storage, allocator, old);
    DTRAIN__TRY(dtrain__storage_rename(storage, old, path));
    return dtrain__storage_sync_directory(storage, directory);
}

/* Clear away what saves, or removals, have left unfinished. */
DTRAIN__PRIVATE dtrain_result dtrain__remove_unfinished(const dtrain_storage *storage,
                                                        const dtrain_allocator *allocator,
                                                        const char *directory)
{
    static const char *const suffixes[] = {".tmp", ".old"};
    dtrain_result result = DTRAIN_OK;
    for (int s = 0; s < 2 && result == DTRAIN_OK; s++) {
        dtrain__steps steps;
        char path[DTRAIN__PATH];
        DTRAIN__TRY(dtrain__steps_list(storage, allocator, directory, suffixes[s], &steps));
        for (size_t i = 0; i < steps.count && result == DTRAIN_OK; i++) {
            dtrain__step_path(path, directory, steps.steps[i], ".tmp");
            result = s ? dtrain__old_settle(storage, allocator, directory, steps.steps[i])
                       : dtrain__leftover_remove(storage, allocator, path);
        }
        dtrain__steps_free(&steps);
    }
    return result;
}

/* ---- Publishing -------------------------------------------------------------------------------*/

/* Write the name of the newest checkpoint. Nothing here reads it. */
static dtrain_result dtrain__write_latest(const dtrain_storage *storage, const char *directory,
                                          int64_t step)
{
    char latest[DTRAIN__PATH], tmp[DTRAIN__PATH], path[DTRAIN__PATH];
    snprintf(latest, sizeof latest, "%s/latest", directory);
    snprintf(tmp, sizeof tmp, "%s/latest.tmp", directory);
    dtrain__step_path(path, directory, step, "\n");
    const char *name = path + strlen(directory) + 1;
    DTRAIN__TRY(dtrain__storage_remove(storage, tmp)); /* of a save that was cut off */
    DTRAIN__TRY(dtrain__storage_put(storage, tmp, name, strlen(name)));
    DTRAIN__TRY(dtrain__storage_rename(storage, tmp, latest));
    return dtrain__storage_sync_directory(storage, directory);
}

/* Move the checkpoints of later steps than `above`, which a run that goes on from there leaves
 * behind, to a new folder; its path, or "" when there are none. The newest goes last: until then a
 * crash leaves it the newest, and afterwards what is at `above` or before is. */
DTRAIN__PRIVATE dtrain_result dtrain__set_aside(const dtrain_storage *storage,
                                                const dtrain_allocator *allocator,
                                                const char *directory, int64_t above, char *folder)
{
    char path[DTRAIN__PATH], to[2 * DTRAIN__PATH], latest[DTRAIN__PATH];
    dtrain__steps list;
    size_t later = 0;
    int code = 0, number = 0;
    folder[0] = 0;
    DTRAIN__TRY(dtrain__steps_list(storage, allocator, directory, "", &list));
    while (later < list.count && list.steps[later] > above) later++;
    const int64_t newest = later < list.count ? list.steps[later] : -1;
    do {
        if (!later) break;
        snprintf(folder, DTRAIN__PATH, "%s/aside-%d", directory, ++number);
        code = storage->make_directory(storage->user, folder);
    } while (code == -EEXIST);
    dtrain_result result = DTRAIN_OK;
    if (code < 0)
        result = dtrain_fail(DTRAIN_ERROR_FILE, "the directory %s cannot be made: %s", folder,
                             strerror(-code));
    for (size_t i = later; i-- > 0 && result == DTRAIN_OK;) {
        dtrain__step_path(path, directory, list.steps[i], "");
        snprintf(to, sizeof to, "%s%s", folder, path + strlen(directory));
        result = dtrain__storage_rename(storage, path, to);
    }
    dtrain__steps_free(&list);
    if (result != DTRAIN_OK || !later) return result;
    DTRAIN__TRY(dtrain__storage_sync_directory(storage, folder));
    if (newest >= 0) return dtrain__write_latest(storage, directory, newest);
    snprintf(latest, sizeof latest, "%s/latest", directory);
    DTRAIN__TRY(dtrain__storage_remove(storage, latest));
    return dtrain__storage_sync_directory(storage, directory);
}

/* Make step-N.tmp, whose files are on the disk, the checkpoint of its step. One that is there
 * already goes, and comes back when a crash prevents the rename. */
DTRAIN__PRIVATE dtrain_result dtrain__directory_publish(const dtrain_storage *storage,
                                                        const dtrain_allocator *allocator,
                                                        const char *directory, int64_t step)
{
    char path[DTRAIN__PATH], tmp[DTRAIN__PATH], old[DTRAIN__PATH];
    dtrain__step_path(path, directory, step, "");
    dtrain__step_path(tmp, directory, step, ".tmp");
    dtrain__step_path(old, directory, step, ".old");
    DTRAIN__TRY(dtrain__storage_sync_directory(storage, tmp));
    const int code = storage->rename(storage->user, path, old);
    if (code < 0 && code != -ENOENT)
        return dtrain_fail(DTRAIN_ERROR_FILE, "%s cannot be renamed to %s: %s", path, old,
                           strerror(-code));
    DTRAIN__TRY(dtrain__storage_rename(storage, tmp, path));
    DTRAIN__TRY(dtrain__storage_sync_directory(storage, directory));
    if (code >= 0) DTRAIN__TRY(dtrain__leftover_remove(storage, allocator, old));
    return dtrain__write_latest(storage, directory, step);
}
