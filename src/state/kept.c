/* Storage in the launcher's memory: files that outlive the ranks, not the machine
 *
 * A run that dtrain_launch starts again finds them where they were: its ranks are new processes,
 * the launcher that they are forked from is not. A checkpoint there costs a copy and no disk, so it
 * can be made every few steps.
 *
 *     table | entries: files, directories | blocks: whose, and which comes next | their bytes
 *
 * It is a file system of the simplest kind. All of it is shared by the ranks, and one mutex guards
 * all but the bytes. A rank may be killed at any instruction: then the next one that wants the
 * mutex gets it, and finds at worst a file that is half made or half removed, under a name that no
 * reader takes for a whole checkpoint. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/log.h"
#include "core/result.h"
#include "world/world_internal.h"
#include "state/storage.h"

#define DTRAIN__KEPT_BLOCK ((size_t)256 << 10)
#define DTRAIN__KEPT_ENTRIES 8192u
#define DTRAIN__KEPT_NAME 64u

typedef enum dtrain__entry_kind {
    DTRAIN__ENTRY_FREE = 0,
    DTRAIN__ENTRY_FILE = 1,
    DTRAIN__ENTRY_DIRECTORY = 2
} dtrain__entry_kind;

/* A name is changed in the half that is not in use, then `half` is: nobody finds half a name. */
typedef struct dtrain__kept_entry {
    uint32_t kind, half; /* dtrain__entry_kind; which of the names is in use */
    char names[2][DTRAIN__KEPT_NAME];
    uint32_t parent; /* entry of the directory that it is in */
    uint32_t locked; /* 1 + the attempt of the run that locked it; 0: nobody did */
    uint32_t first;  /* block; 0: there is none */
    uint64_t bytes;
} dtrain__kept_entry;

typedef struct dtrain__kept_block {
    uint32_t owner; /* entry; 0: the block is free */
    uint32_t next;  /* of the same file; 0: none */
} dtrain__kept_block;

/* Entry 0 is the root, and block 0 no file's, so that 0 can mean none. */
typedef struct dtrain__kept_files {
    uint32_t ready; /* set when all else is */
    dtrain_storage table;
    dtrain__kept *kept;
    uint32_t entry_count;         /* used so far */
    uint32_t block_count, cursor; /* block where the next free one is looked for first */
    dtrain__kept_entry entries[DTRAIN__KEPT_ENTRIES];
    dtrain__kept_block *blocks; /* (block_count) */
    char *data;                 /* (block_count, DTRAIN__KEPT_BLOCK) */
} dtrain__kept_files;

/* ---- Entries ----------------------------------------------------------------------------------*/

/* Take the mutex; from a rank that was killed with it, too. */
static void dtrain__kept_lock(dtrain__kept *kept)
{
    if (pthread_mutex_lock(&kept->mutex) == EOWNERDEAD) pthread_mutex_consistent(&kept->mutex);
}

static dtrain__kept_files *dtrain__kept_enter(void *user)
{
    dtrain__kept_files *files = (dtrain__kept_files *)user;
    dtrain__kept_lock(files->kept);
    return files;
}

static int64_t dtrain__kept_leave(dtrain__kept_files *files, int64_t result)
{
    pthread_mutex_unlock(&files->kept->mutex);
    return result;
}

static const char *dtrain__kept_name(const dtrain__kept_entry *entry)
{
    return entry->names[entry->half];
}

/* Find the entry of a name of so many characters; 0: there is none. */
static uint32_t dtrain__kept_find(const dtrain__kept_files *files, uint32_t parent,
                                  const char *name, size_t length)
{
    for (uint32_t i = 1; i < files->entry_count; i++) {
        const dtrain__kept_entry *entry = &files->entries[i];
        const char *own = dtrain__kept_name(entry);
        if (entry->kind && entry->parent == parent && strncmp(own, name, length) == 0 &&
            own[length] == 0)
            return i;
    }
    return 0;
}

/* Walk to the directory that the last part of a path is in: its entry, or a negated errno. */
static int64_t dtrain__kept_walk(const dtrain__kept_files *files, const char *path,
                                 const char **last)
{
    uint32_t at = 0;
    for (;;) {
        while (*path == '/' || (path[0] == '.' && (path[1] == '/' || !path[1]))) path++;
        const size_t length = strcspn(path, "/");
        *last = path;
        if (length >= DTRAIN__KEPT_NAME) return -ENAMETOOLONG;
        if (!path[length]) return at;
        at = dtrain__kept_find(files, at, path, length);
        if (!at) return -ENOENT;
        if (files->entries[at].kind != DTRAIN__ENTRY_DIRECTORY) return -ENOTDIR;
        path += length;
    }
}

/* Find what a path leads to: its entry, 0 for the root, or a negated errno. */
static int64_t dtrain__kept_at(const dtrain__kept_files *files, const char *path)
{
    const char *name;
    const int64_t parent = dtrain__kept_walk(files, path, &name);
    if (parent < 0 || !*name) return parent;
    const uint32_t at = dtrain__kept_find(files, (uint32_t)parent, name, strlen(name));
    return at ? (int64_t)at : -ENOENT;
}

/* Make an entry: it is there when its kind is. */
static int64_t dtrain__kept_make(dtrain__kept_files *files, int64_t parent, const char *name,
                                 dtrain__entry_kind kind)
{
    uint32_t at = 1;
    while (at < files->entry_count && files->entries[at].kind) at++;
    if (at == DTRAIN__KEPT_ENTRIES) return -ENOSPC;
    dtrain__kept_entry *entry = &files->entries[at];
    memset(entry, 0, sizeof *entry);
    snprintf(entry->names[0], DTRAIN__KEPT_NAME, "%s", name);
    entry->parent = (uint32_t)parent;
    if (at == files->entry_count) files->entry_count++;
    entry->kind = (uint32_t)kind;
    return at;
}

/* Free an entry and its blocks, those too that were not linked yet when their rank was killed. */
static void dtrain__kept_free(dtrain__kept_files *files, uint32_t at)
{
    for (uint32_t b = 1; b < files->block_count; b++)
        if (files->blocks[b].owner == at) files->blocks[b].owner = 0;
    files->entries[at].kind = DTRAIN__ENTRY_FREE;
}

static bool dtrain__kept_is_empty(const dtrain__kept_files *files, uint32_t directory)
{
    for (uint32_t i = 1; i < files->entry_count; i++)
        if (files->entries[i].kind && files->entries[i].parent == directory) return false;
    return true;
}

/* A file's number is that of its entry; so many more when it is locked by it. */
static uint32_t dtrain__kept_entry_of(int file) { return (uint32_t)file % DTRAIN__KEPT_ENTRIES; }

/* ---- Bytes ------------------------------------------------------------------------------------*/

/* Find the block that an offset is in, or with `grow` make all up to it; 0: there is none. */
static uint32_t dtrain__kept_seek(dtrain__kept_files *files, uint32_t file, uint64_t offset,
                                  bool grow)
{
    uint32_t *link = &files->entries[file].first;
    for (uint64_t left = offset / DTRAIN__KEPT_BLOCK;; left--) {
        for (uint32_t tried = 0; !*link && grow && tried < files->block_count; tried++) {
            const uint32_t b = files->cursor;
            files->cursor = b + 1 < files->block_count ? b + 1 : 1;
            if (files->blocks[b].owner) continue;
            files->blocks[b].next = 0;
            files->blocks[b].owner = file;
            *link = b;
        }
        if (!*link || !left) return *link;
        link = &files->blocks[*link].next;
    }
}

/* Cut a transfer at the end of its block. */
static size_t dtrain__kept_part(uint64_t offset, uint64_t bytes)
{
    const size_t rest = DTRAIN__KEPT_BLOCK - (size_t)(offset % DTRAIN__KEPT_BLOCK);
    return bytes < rest ? (size_t)bytes : rest;
}

static char *dtrain__kept_place(const dtrain__kept_files *files, uint32_t block, uint64_t offset)
{
    return files->data + (size_t)block * DTRAIN__KEPT_BLOCK + (size_t)(offset % DTRAIN__KEPT_BLOCK);
}

static int64_t dtrain__kept_read(void *user, int file, void *to, size_t bytes, uint64_t offset)
{
    dtrain__kept_files *files = dtrain__kept_enter(user);
    const uint32_t at = dtrain__kept_entry_of(file);
    const uint64_t size = files->entries[at].bytes, left = offset < size ? size - offset : 0;
    const uint32_t block = left ? dtrain__kept_seek(files, at, offset, false) : 0;
    (void)dtrain__kept_leave(files, 0);
    if (!block) return left ? -EIO : 0;
    const size_t part = dtrain__kept_part(offset, left < bytes ? left : bytes);
    memcpy(to, dtrain__kept_place(files, block, offset), part);
    return (int64_t)part;
}

/* A file grows when its bytes are there. A write behind its end is refused: what lies between would
 * have the bytes of another file. */
static int64_t dtrain__kept_write(void *user, int file, const void *from, size_t bytes,
                                  uint64_t offset)
{
    dtrain__kept_files *files = dtrain__kept_enter(user);
    const uint32_t at = dtrain__kept_entry_of(file);
    dtrain__kept_entry *entry = &files->entries[at];
    const bool gap = offset > entry->bytes;
    const uint32_t block = gap ? 0 : dtrain__kept_seek(files, at, offset, true);
    (void)dtrain__kept_leave(files, 0);
    if (!block) return gap ? -ESPIPE : -ENOSPC;
    const size_t part = dtrain__kept_part(offset, bytes);
    memcpy(dtrain__kept_place(files, block, offset), from, part);
    dtrain__kept_enter(user);
    if (offset + part > entry->bytes) entry->bytes = offset + part;
    return dtrain__kept_leave(files, (int64_t)part);
}

/* ---- The other calls --------------------------------------------------------------------------*/

/* A lock is that of an attempt: the next one is free of the locks of those that were killed. */
static int dtrain__kept_open(void *user, const char *path, dtrain_storage_mode mode)
{
    const char *name;
    dtrain__kept_files *files = dtrain__kept_enter(user);
    const bool directory = mode == DTRAIN_STORAGE_DIRECTORY;
    const int64_t parent = dtrain__kept_walk(files, path, &name);
    int64_t at = dtrain__kept_at(files, path);
    if (at >= 0 && mode == DTRAIN_STORAGE_CREATE) at = -EEXIST;
    else if (at == -ENOENT && parent >= 0 &&
             (mode == DTRAIN_STORAGE_CREATE || mode == DTRAIN_STORAGE_LOCK))
        at = dtrain__kept_make(files, parent, name, DTRAIN__ENTRY_FILE);
    else if (at >= 0 &&
             directory != (at == 0 || files->entries[at].kind == DTRAIN__ENTRY_DIRECTORY))
        at = directory ? -ENOTDIR : -EISDIR;
    if (at >= 0 && mode == DTRAIN_STORAGE_LOCK) {
        uint32_t *locked = &files->entries[at].locked;
        const bool by_another = *locked == files->kept->attempt + 1;
        if (!by_another) *locked = files->kept->attempt + 1;
        at = by_another ? -EAGAIN : at + (int64_t)DTRAIN__KEPT_ENTRIES;
    }
    return (int)dtrain__kept_leave(files, at);
}

static int64_t dtrain__kept_size(void *user, int file)
{
    dtrain__kept_files *files = dtrain__kept_enter(user);
    return dtrain__kept_leave(files, (int64_t)files->entries[dtrain__kept_entry_of(file)].bytes);
}

static int dtrain__kept_sync(void *user, int file)
{
    (void)user;
    (void)file; /* nothing is in more than one place */
    return 0;
}

static int dtrain__kept_close(void *user, int file)
{
    dtrain__kept_files *files = dtrain__kept_enter(user);
    if (file >= (int)DTRAIN__KEPT_ENTRIES) files->entries[dtrain__kept_entry_of(file)].locked = 0;
    return (int)dtrain__kept_leave(files, 0);
}

/* Tell whether an entry is in a directory, or below it; or is it. */
static bool dtrain__kept_is_below(const dtrain__kept_files *files, int64_t at, int64_t directory)
{
    while (at && at != directory) at = files->entries[at].parent;
    return at == directory;
}

/* Say why an entry cannot be moved to a directory, in the place of what is there (old >= 0). */
static int dtrain__kept_refuses(const dtrain__kept_files *files, int64_t at, int64_t to,
                                int64_t old)
{
    const bool directory = files->entries[at].kind == DTRAIN__ENTRY_DIRECTORY;
    if (dtrain__kept_is_below(files, to, at)) return -EINVAL;
    if (old < 0 || old == at) return 0;
    if (dtrain__kept_is_below(files, at, old)) return -ENOTEMPTY;
    if (directory != (files->entries[old].kind == DTRAIN__ENTRY_DIRECTORY))
        return directory ? -ENOTDIR : -EISDIR;
    return dtrain__kept_is_empty(files, (uint32_t)old) ? 0 : -ENOTEMPTY;
}

static int dtrain__kept_rename(void *user, const char *from, const char *to)
{
    const char *name, *new_name;
    dtrain__kept_files *files = dtrain__kept_enter(user);
    const int64_t in = dtrain__kept_walk(files, from, &name);
    const int64_t parent = dtrain__kept_walk(files, to, &new_name);
    const int64_t at = dtrain__kept_at(files, from), old = dtrain__kept_at(files, to);
    int64_t code = in < 0 ? in : parent < 0 ? parent : at < 0 ? at : 0;
    if (!code && (!at || !old)) code = -EBUSY;
    if (!code) code = dtrain__kept_refuses(files, at, parent, old);
    if (code || old == at) return (int)dtrain__kept_leave(files, code);
    dtrain__kept_entry *entry = &files->entries[at];
    if (old > 0) dtrain__kept_free(files, (uint32_t)old);
    snprintf(entry->names[!entry->half], DTRAIN__KEPT_NAME, "%s", new_name);
    entry->parent = (uint32_t)parent;
    entry->half = !entry->half;
    return (int)dtrain__kept_leave(files, 0);
}

static int dtrain__kept_remove(void *user, const char *path)
{
    dtrain__kept_files *files = dtrain__kept_enter(user);
    int64_t at = dtrain__kept_at(files, path);
    if (at == 0) at = -EBUSY;
    else if (at > 0 && !dtrain__kept_is_empty(files, (uint32_t)at)) at = -ENOTEMPTY;
    else if (at > 0) dtrain__kept_free(files, (uint32_t)at);
    return (int)dtrain__kept_leave(files, at < 0 ? at : 0);
}

static int dtrain__kept_make_directory(void *user, const char *path)
{
    const char *name;
    dtrain__kept_files *files = dtrain__kept_enter(user);
    const int64_t parent = dtrain__kept_walk(files, path, &name);
    int64_t at = dtrain__kept_at(files, path);
    if (at >= 0) at = -EEXIST;
    else if (at == -ENOENT && parent >= 0)
        at = dtrain__kept_make(files, parent, name, DTRAIN__ENTRY_DIRECTORY);
    return (int)dtrain__kept_leave(files, at < 0 ? at : 0);
}

/* The caller may call back here with each name, so the mutex is not held meanwhile. */
static int dtrain__kept_list(void *user, const char *path,
                             void (*name)(void *list, const char *entry), void *list)
{
    dtrain__kept_files *files = dtrain__kept_enter(user);
    const int64_t directory = dtrain__kept_at(files, path);
    const bool is_one = directory == 0 || (directory > 0 && files->entries[directory].kind ==
                                                                DTRAIN__ENTRY_DIRECTORY);
    uint32_t count = files->entry_count;
    (void)dtrain__kept_leave(files, 0);
    if (!is_one) return directory < 0 ? (int)directory : -ENOTDIR;
    for (uint32_t i = 1; i < count; i++) {
        char found[DTRAIN__KEPT_NAME] = "";
        dtrain__kept_enter(user);
        if (files->entries[i].kind && files->entries[i].parent == (uint32_t)directory)
            snprintf(found, sizeof found, "%s", dtrain__kept_name(&files->entries[i]));
        (void)dtrain__kept_leave(files, 0);
        if (found[0]) name(list, found);
    }
    return 0;
}

/* ---- Where it is ------------------------------------------------------------------------------*/

/* Lay the table out in the memory that the launcher keeps, which is all zeros. */
static dtrain_result dtrain__kept_format(dtrain__kept *kept, dtrain__kept_files *files)
{
    const dtrain_storage table = {files,
                                  dtrain__kept_open,
                                  dtrain__kept_read,
                                  dtrain__kept_write,
                                  dtrain__kept_size,
                                  dtrain__kept_sync,
                                  dtrain__kept_close,
                                  dtrain__kept_rename,
                                  dtrain__kept_remove,
                                  dtrain__kept_make_directory,
                                  dtrain__kept_list};
    const size_t head = (size_t)((char *)files - (char *)kept) +
                        dtrain__round_up(sizeof *files, DTRAIN__CACHE_LINE);
    const size_t each = DTRAIN__KEPT_BLOCK + sizeof *files->blocks;
    size_t count = kept->bytes > head ? (kept->bytes - head) / each : 0;
    if (count > INT32_MAX) count = INT32_MAX;
    if (count < 2)
        return dtrain_fail(DTRAIN_ERROR_MEMORY,
                           "dtrain_kept_storage: kept_bytes of dtrain_launch_desc is %zu, "
                           "expected at least %zu",
                           kept->bytes, head + 2 * each);
    files->kept = kept;
    files->entry_count = 1;
    files->cursor = 1;
    files->block_count = (uint32_t)count;
    files->blocks = (dtrain__kept_block *)(void *)((char *)kept + head);
    files->data = (char *)kept + kept->bytes - count * DTRAIN__KEPT_BLOCK;
    files->table = table;
    dtrain__store(&files->ready, 1u);
    return DTRAIN_OK;
}

DTRAIN_API dtrain_result dtrain_kept_storage(dtrain_world *world, const dtrain_storage **out)
{
    const char *const call = "dtrain_kept_storage";
    if (out) *out = NULL;
    if (!world || !out) return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: world or out is NULL", call);
    dtrain__kept *kept = world->kept;
    if (!kept)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED, "%s: the launcher keeps no memory: %s", call,
                           world->link ? "the ranks were started by another one than dtrain_launch"
                                       : "kept_bytes of dtrain_launch_desc is 0");
    const size_t head = dtrain__round_up(sizeof *kept, DTRAIN__CACHE_LINE);
    dtrain__kept_files *files = (dtrain__kept_files *)(void *)((char *)kept + head);
    dtrain_result result = DTRAIN_OK;
    dtrain__kept_lock(kept);
    if (!dtrain__load(&files->ready)) result = dtrain__kept_format(kept, files);
    pthread_mutex_unlock(&kept->mutex);
    if (result == DTRAIN_OK) *out = &files->table;
    return result;
}
