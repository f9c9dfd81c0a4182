/* Directories of checkpoints: names, order, publishing, removal
 *
 *     step-000000001000        a whole checkpoint: the name says so
 *     step-000000001000.tmp    a checkpoint that is being written or removed; it is never read
 *     step-000000001000.old    a checkpoint that is being replaced; it is read if the step has no
 *                              other
 *     latest                   the name of the newest checkpoint
 *     aside-1                  checkpoints that do not belong to the history of the directory
 *
 * A loss of power at any moment leaves whole checkpoints: the rename to step-N comes after the sync
 * of all files in the directory, and the sync of the parent comes after the rename. To remove a
 * checkpoint, the library first renames it to step-N.tmp. It removes only names that it writes. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/log.h"
#include "core/result.h"
#include "state/checkpoint_internal.h"
#include "state/storage_internal.h"

#define DTRAIN__STEP_PREFIX "step-"
#define DTRAIN__STEP_DIGITS 12 /* at least; names sort by step */

/* ---- Names ------------------------------------------------------------------------------------*/

DTRAIN__PRIVATE dtrain__file_path dtrain__step_path(const dtrain__folder *folder, int64_t step,
                                                    const char *suffix)
{
    return dtrain__path_in(folder->path, DTRAIN__STEP_PREFIX "%0*lld%s", DTRAIN__STEP_DIGITS,
                           (long long)step, suffix);
}

/* Tell whether a checkpoint can have a file of this name. */
static bool dtrain__is_ours(const char *name)
{
    const size_t prefix = sizeof "model-" - 1; /* as long as "state-" */
    if (strcmp(name, "manifest.json") == 0) return true;
    if (strncmp(name, "model-", prefix) != 0 && strncmp(name, "state-", prefix) != 0) return false;
    const char *end = name + prefix + strspn(name + prefix, "0123456789-");
    return strcmp(end, ".safetensors") == 0 || strcmp(end, ".tmp") == 0;
}

/* Return the path of the checkpoint that a list names by its key. */
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

/* List the step directories that have a suffix. "" lists checkpoints, also those that are being
 * replaced. After an error the list needs no free. */
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

/* Free a list; zeros are an empty list. */
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

/* Remove a step directory with its files. Fail if it has a file that the library does not write. A
 * checkpoint (suffix "") is renamed first, so that a crash leaves a step-N.tmp. */
DTRAIN__PRIVATE dtrain_result dtrain__step_remove(const dtrain__folder *folder, int64_t step,
                                                  const char *suffix)
{
    const dtrain_storage *storage = folder->storage;
    const dtrain__file_path path = dtrain__step_path(folder, step, suffix);
    const dtrain__file_path tmp = dtrain__step_path(folder, step, *suffix ? suffix : ".tmp");
    dtrain__text names; /* each ends with a 0 */
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

/* Remove what an interrupted save or removal has left. A step-N.old is removed if step-N exists;
 * otherwise a crash came between the two renames of dtrain__publish_step, and it gets its name
 * back. */
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

/* Write the name of the newest checkpoint to `latest`, for people and scripts; the library never
 * reads it. */
static dtrain_result dtrain__write_latest(const dtrain__folder *folder, int64_t step)
{
    const dtrain__file_path latest = dtrain__path_in(folder->path, "latest");
    const dtrain__file_path tmp = dtrain__path_in(folder->path, "latest.tmp");
    const dtrain__file_path path = dtrain__step_path(folder, step, "\n");
    const char *name = path.text + strlen(folder->path) + 1;
    DTRAIN__TRY(dtrain__storage_remove(folder->storage, tmp.text)); /* left by a crash */
    DTRAIN__TRY(dtrain__storage_put(folder->storage, tmp.text, name, strlen(name)));
    return dtrain__storage_rename(folder->storage, tmp.text, latest.text);
}

/* Move the checkpoints of steps later than `above` to a new folder, and set *aside to its path, or
 * to "" if there are none. The newest moves last, so a crash in the middle leaves it the newest. */
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

/* Rename step-N.tmp, whose files are on the disk, to step-N, and so make it a checkpoint. If step-N
 * exists, it becomes step-N.old and is removed afterwards. */
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
