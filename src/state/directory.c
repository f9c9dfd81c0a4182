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
 * is removed but names that this file writes. */

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
    const size_t prefix = sizeof "model-" - 1; /* of as many bytes as "state-" */
    if (strcmp(name, "manifest.json") == 0) return true;
    if (strncmp(name, "model-", prefix) != 0 && strncmp(name, "state-", prefix) != 0) return false;
    const char *end = name + prefix + strspn(name + prefix, "0123456789-");
    return strcmp(end, ".safetensors") == 0 || strcmp(end, ".tmp") == 0;
}

/* Return the path of a checkpoint in a list. */
DTRAIN__PRIVATE dtrain__file_path dtrain__key_path(const dtrain__folder *folder, int64_t key)
{
    return dtrain__step_path(folder, key / 2, key % 2 ? "" : ".old");
}

/* ---- Lists ------------------------------------------------------------------------------------*/

static void dtrain__list_step(void *user, const char *name)
{
    dtrain__steps *list = (dtrain__steps *)user;
    const size_t prefix = sizeof DTRAIN__STEP_PREFIX - 1;
    const char *at = strncmp(name, DTRAIN__STEP_PREFIX, prefix) == 0 ? name + prefix : "";
    const size_t digits = strspn(at, "0123456789");
    const int64_t step = strtoll(at, NULL, 10);
    const bool old = !*list->suffix && strcmp(at + digits, ".old") == 0;
    list->remains |= dtrain__is_ours(name);
    if (digits < DTRAIN__STEP_DIGITS || step > DTRAIN__STEP_MOST ||
        (!old && strcmp(at + digits, list->suffix) != 0))
        return;
    list->failed =
        list->failed || !dtrain__grow(list->allocator, (void **)&list->keys, list->count,
                                      &list->room, sizeof *list->keys, "a list of steps");
    if (!list->failed) list->keys[list->count++] = 2 * step + !old;
}

static int dtrain__newest_first(const void *left, const void *right)
{
    const int64_t a = *(const int64_t *)left, b = *(const int64_t *)right;
    return a > b ? -1 : a < b;
}

/* List the directories of steps that have a suffix: "" for checkpoints, those that are being
 * replaced included. After an error nothing is left to free. */
DTRAIN__PRIVATE dtrain_result dtrain__steps_list(const dtrain__folder *folder, const char *suffix,
                                                 dtrain__steps *out)
{
    memset(out, 0, sizeof *out);
    out->allocator = folder->allocator;
    out->suffix = suffix;
    const int code =
        folder->storage->list(folder->storage->user, folder->path, dtrain__list_step, out);
    if (code < 0 || out->failed) {
        dtrain__steps_free(out);
        return out->failed ? DTRAIN_ERROR_MEMORY : dtrain__storage_fail(folder->path, "read", code);
    }
    if (out->count) qsort(out->keys, out->count, sizeof *out->keys, dtrain__newest_first);
    return DTRAIN_OK;
}

/* Free a list; one that was never made is empty. */
DTRAIN__PRIVATE void dtrain__steps_free(dtrain__steps *steps)
{
    dtrain__free(steps->allocator, steps->keys, steps->room, sizeof *steps->keys);
    steps->keys = NULL;
    steps->count = steps->room = 0;
}

/* ---- Removal ----------------------------------------------------------------------------------*/

static void dtrain__list_name(void *names, const char *name)
{
    dtrain__text_append((dtrain__text *)names, name, strlen(name) + 1);
}

/* Remove a checkpoint, or a directory that is none any more, or not yet, with all that is in it,
 * unless something in it is not ours. A checkpoint is renamed first: a crash in the middle leaves a
 * step-N.tmp. */
DTRAIN__PRIVATE dtrain_result dtrain__step_remove(const dtrain__folder *folder, int64_t step,
                                                  const char *suffix)
{
    const dtrain_storage *storage = folder->storage;
    const dtrain__file_path path = dtrain__step_path(folder, step, suffix);
    const dtrain__file_path tmp = dtrain__step_path(folder, step, *suffix ? suffix : ".tmp");
    dtrain__text names; /* each with a 0 after it */
    memset(&names, 0, sizeof names);
    names.allocator = folder->allocator;
    const int code = storage->list(storage->user, path.text, dtrain__list_name, &names);
    dtrain_result result = code < 0       ? dtrain__storage_fail(path.text, "read", code)
                           : names.failed ? DTRAIN_ERROR_MEMORY
                                          : DTRAIN_OK;
    for (size_t at = 0; at < names.bytes && result == DTRAIN_OK; at += strlen(names.at + at) + 1)
        if (!dtrain__is_ours(names.at + at))
            result = dtrain_fail(DTRAIN_ERROR_FILE,
                                 "%s is not removed: there are files in it that no checkpoint has",
                                 path.text);
    if (result == DTRAIN_OK && !*suffix)
        result = dtrain__storage_rename(storage, path.text, tmp.text);
    for (size_t at = 0; at < names.bytes && result == DTRAIN_OK; at += strlen(names.at + at) + 1) {
        const dtrain__file_path file = dtrain__path_in(tmp.text, "%s", names.at + at);
        result = dtrain__storage_remove(storage, file.text);
    }
    dtrain__text_free(&names);
    return result == DTRAIN_OK ? dtrain__storage_remove(storage, tmp.text) : result;
}

/* Clear away what saves, or removals, have left unfinished. A checkpoint that was being replaced is
 * removed if the new one has its name, and gets the name back if a crash came between the two
 * renames of dtrain__publish_step. */
DTRAIN__PRIVATE dtrain_result dtrain__remove_unfinished(const dtrain__folder *folder)
{
    dtrain__steps list;
    DTRAIN__TRY(dtrain__steps_list(folder, ".tmp", &list));
    dtrain_result result = DTRAIN_OK;
    for (size_t i = 0; i < list.count && result == DTRAIN_OK; i++)
        result = dtrain__step_remove(folder, list.keys[i] / 2, ".tmp");
    dtrain__steps_free(&list);
    if (result == DTRAIN_OK) result = dtrain__steps_list(folder, "", &list);
    for (size_t i = 0; i < list.count && result == DTRAIN_OK; i++) {
        const int64_t key = list.keys[i];
        const dtrain__file_path old = dtrain__key_path(folder, key);
        const dtrain__file_path path = dtrain__key_path(folder, key + 1);
        if (key % 2) continue;
        result = i && list.keys[i - 1] == key + 1
                     ? dtrain__step_remove(folder, key / 2, ".old")
                     : dtrain__storage_rename(folder->storage, old.text, path.text);
    }
    dtrain__steps_free(&list);
    return result;
}

/* ---- Publishing -------------------------------------------------------------------------------*/

/* Write the name of the newest checkpoint, for people and scripts: the library does not read it. */
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

/* Move the checkpoints of later steps than `above`, from which a run continues without them, to a
 * new folder; *aside is its path, or "" when there are none. The newest goes last: a crash before
 * that leaves it the newest, and a crash after it leaves the one at `above` or before. */
DTRAIN__PRIVATE dtrain_result dtrain__set_aside(const dtrain__folder *folder, int64_t above,
                                                dtrain__file_path *aside)
{
    dtrain__steps list;
    size_t later = 0;
    int code = 0, number = 0;
    aside->text[0] = 0;
    DTRAIN__TRY(dtrain__steps_list(folder, "", &list));
    while (later < list.count && list.keys[later] / 2 > above) later++;
    const int64_t newest = later < list.count ? list.keys[later] / 2 : -1;
    do {
        if (!later) break;
        *aside = dtrain__path_in(folder->path, "aside-%d", ++number);
        code = folder->storage->make_directory(folder->storage->user, aside->text);
    } while (code == -EEXIST);
    dtrain_result result = code >= 0 ? DTRAIN_OK : dtrain__storage_fail(aside->text, "made", code);
    const dtrain__folder there = {folder->storage, folder->allocator, aside->text};
    for (size_t i = later; i-- > 0 && result == DTRAIN_OK;) {
        const dtrain__file_path from = dtrain__key_path(folder, list.keys[i]);
        const dtrain__file_path to = dtrain__key_path(&there, list.keys[i]);
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
 * step has becomes step-N.old, which gets its name back after a crash before the 2nd rename. */
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
