/* Storage: the table of the file system, and whole reads and writes over any table
 *
 * Only this file continues short and interrupted transfers. An error of fsync or close is final:
 * the kernel can have dropped data that it could not write, and a second fsync would succeed
 * without that data. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/log.h"
#include "core/result.h"
#include "state/storage.h"
#include "state/storage_internal.h"

#include <sys/file.h>

#define DTRAIN__WRITE_BACK ((uint64_t)8 << 20) /* bytes */

/* ---- The file system --------------------------------------------------------------------------*/

static int dtrain__or_errno(int result) { return result < 0 ? -errno : result; }

/* Open a file. Symbolic links are followed, because clusters use them for directories and shards,
 * but not for a lock or a new file (O_EXCL).
 *
 * A lock of flock belongs to the open file, and the kernel releases it when the last process closes
 * the file: unlike a file with a process id, it cannot outlive its owner. */
static int dtrain__file_open(void *user, const char *path, dtrain_storage_mode mode)
{
    static const int flags[DTRAIN_STORAGE_MODES] = {
        O_RDONLY | O_NONBLOCK, O_WRONLY | O_CREAT | O_EXCL, O_RDWR | O_CREAT | O_NOFOLLOW,
        O_RDONLY | O_DIRECTORY};
    (void)user;
    const int file = dtrain__open(path, flags[mode]);
    if (file < 0) return -errno;
    if (mode == DTRAIN_STORAGE_LOCK && flock(file, LOCK_EX | LOCK_NB) < 0) {
        const int error = errno;
        close(file);
        return -error;
    }
    return file;
}

static int64_t dtrain__file_read(void *user, int file, void *to, size_t bytes, uint64_t offset)
{
    (void)user;
    const ssize_t done = pread(file, to, bytes, (off_t)offset);
    return done < 0 ? -errno : done;
}

/* Write, and tell the kernel to write back each DTRAIN__WRITE_BACK bytes as soon as they are
 * complete: otherwise the disk stays idle until fsync. */
static int64_t dtrain__file_write(void *user, int file, const void *from, size_t bytes,
                                  uint64_t offset)
{
    (void)user;
    const ssize_t done = pwrite(file, from, bytes, (off_t)offset);
    if (done < 0) return -errno;
#ifdef SYNC_FILE_RANGE_WRITE
    const uint64_t end = offset + (uint64_t)done, unit = DTRAIN__WRITE_BACK;
    if (end / unit > offset / unit)
        (void)sync_file_range(file, (off_t)(end / unit * unit - unit), (off_t)unit,
                              SYNC_FILE_RANGE_WRITE);
#endif
    return done;
}

static int64_t dtrain__file_size(void *user, int file)
{
    struct stat info;
    (void)user;
    if (fstat(file, &info) < 0) return -errno;
    return S_ISREG(info.st_mode) ? (int64_t)info.st_size : -EINVAL;
}

static int dtrain__file_sync(void *user, int file)
{
    (void)user;
    return dtrain__or_errno(fsync(file));
}

static int dtrain__file_close(void *user, int file)
{
    (void)user;
    return dtrain__or_errno(close(file));
}

static int dtrain__file_rename(void *user, const char *from, const char *to)
{
    (void)user;
    return dtrain__or_errno(rename(from, to));
}

static int dtrain__file_remove(void *user, const char *path)
{
    (void)user;
    return dtrain__or_errno(remove(path));
}

static int dtrain__file_make_directory(void *user, const char *path)
{
    (void)user;
    return dtrain__or_errno(mkdir(path, 0777));
}

static int dtrain__file_list(void *user, const char *path,
                             void (*name)(void *list, const char *entry), void *list)
{
    (void)user;
    DIR *directory = dtrain__open_directory(path);
    if (!directory) return -errno;
    for (;;) {
        errno = 0;
        const struct dirent *entry = readdir(directory);
        if (!entry) break;
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0)
            name(list, entry->d_name);
    }
    const int error = errno;
    closedir(directory);
    return -error;
}

/* Return the table that was given, or the file system's. */
DTRAIN__PRIVATE const dtrain_storage *dtrain__storage_or_files(const dtrain_storage *given)
{
    static const dtrain_storage table = {NULL,
                                         dtrain__file_open,
                                         dtrain__file_read,
                                         dtrain__file_write,
                                         dtrain__file_size,
                                         dtrain__file_sync,
                                         dtrain__file_close,
                                         dtrain__file_rename,
                                         dtrain__file_remove,
                                         dtrain__file_make_directory,
                                         dtrain__file_list};
    return given ? given : &table;
}

/* ---- Paths ------------------------------------------------------------------------------------*/

/* Return the path of a name in a directory. */
DTRAIN__PRIVATE dtrain__file_path dtrain__path_in(const char *directory, const char *format, ...)
{
    dtrain__file_path path;
    va_list args;
    const int used = snprintf(path.text, sizeof path.text, "%.*s/", DTRAIN__PATH - 2, directory);
    va_start(args, format);
    vsnprintf(path.text + used, sizeof path.text - (size_t)used, format, args);
    va_end(args);
    return path;
}

/* Check a path of a caller; the library appends up to 128 bytes. */
DTRAIN__PRIVATE dtrain_result dtrain__path_check(const char *call, const char *path)
{
    if (path && path[0] && strlen(path) <= DTRAIN__PATH - 128) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: path is NULL, empty or longer than %d", call,
                       DTRAIN__PATH - 128);
}

/* Return the directory of a path. */
DTRAIN__PRIVATE dtrain__file_path dtrain__directory_of(const char *path)
{
    dtrain__file_path directory;
    const char *slash = strrchr(path, '/');
    const int bytes = !slash || slash == path ? 1 : (int)(slash - path);
    snprintf(directory.text, sizeof directory.text, "%.*s", bytes, slash ? path : ".");
    return directory;
}

/* ---- For any table ----------------------------------------------------------------------------*/

/* Fail with "PATH cannot be WHAT" and the text of a negated errno. */
DTRAIN__PRIVATE dtrain_result dtrain__storage_fail(const char *path, const char *what, int64_t code)
{
    return dtrain_fail(DTRAIN_ERROR_FILE, "%s cannot be %s: %s", path, what, strerror((int)-code));
}

/* Open a file. Return its number, or a negated errno. */
DTRAIN__PRIVATE int dtrain__storage_try(const dtrain_storage *storage, const char *path,
                                        dtrain_storage_mode mode)
{
    int file;
    do file = storage->open(storage->user, path, mode);
    while (file == -EINTR);
    return file;
}

/* Return 0 if a path can be opened, or a negated errno. */
DTRAIN__PRIVATE int dtrain__storage_probe(const dtrain_storage *storage, const char *path,
                                          dtrain_storage_mode mode)
{
    const int file = dtrain__storage_try(storage, path, mode);
    if (file >= 0) (void)storage->close(storage->user, file);
    return file < 0 ? file : 0;
}

DTRAIN__PRIVATE dtrain_result dtrain__storage_open(const dtrain_storage *storage, const char *path,
                                                   dtrain_storage_mode mode, int *file)
{
    *file = dtrain__storage_try(storage, path, mode);
    if (*file >= 0) return DTRAIN_OK;
    return dtrain__storage_fail(path, mode == DTRAIN_STORAGE_CREATE ? "created" : "opened", *file);
}

/* Read exactly `bytes`; a file that ends earlier is an error. */
DTRAIN__PRIVATE dtrain_result dtrain__storage_read(const dtrain_storage *storage, int file,
                                                   const char *path, void *to, size_t bytes,
                                                   uint64_t offset)
{
    for (size_t done = 0; done < bytes;) {
        const int64_t count =
            storage->read(storage->user, file, (char *)to + done, bytes - done, offset + done);
        if (count == -EINTR) continue;
        if (count < 0) return dtrain__storage_fail(path, "read", count);
        if (count == 0)
            return dtrain_fail(
                DTRAIN_ERROR_DATA, "%s ends at byte %llu, expected %llu bytes: it was truncated",
                path, (unsigned long long)(offset + done), (unsigned long long)(offset + bytes));
        done += (size_t)count;
    }
    return DTRAIN_OK;
}

/* Write exactly `bytes`. A write of 0 bytes counts as a full disk, so that the loop ends. */
DTRAIN__PRIVATE dtrain_result dtrain__storage_write(const dtrain_storage *storage, int file,
                                                    const char *path, const void *from,
                                                    size_t bytes, uint64_t offset)
{
    for (size_t done = 0; done < bytes;) {
        const int64_t count = storage->write(storage->user, file, (const char *)from + done,
                                             bytes - done, offset + done);
        if (count == -EINTR) continue;
        if (count <= 0) return dtrain__storage_fail(path, "written", count ? count : -ENOSPC);
        done += (size_t)count;
    }
    return DTRAIN_OK;
}

/* Sync and close a file. If `result` is an error, close only, and return it. */
DTRAIN__PRIVATE dtrain_result dtrain__storage_finish(const dtrain_storage *storage, int file,
                                                     const char *path, dtrain_result result)
{
    int synced = 0;
    while (result == DTRAIN_OK && (synced = storage->sync(storage->user, file)) == -EINTR) {}
    const int closed = storage->close(storage->user, file);
    if (result != DTRAIN_OK) return result;
    if (synced < 0) return dtrain__storage_fail(path, "brought to the disk (fsync)", synced);
    if (closed < 0 && closed != -EINTR) return dtrain__storage_fail(path, "closed", closed);
    return DTRAIN_OK;
}

/* Sync the names in a directory. */
DTRAIN__PRIVATE dtrain_result dtrain__storage_sync_directory(const dtrain_storage *storage,
                                                             const char *path)
{
    int file;
    DTRAIN__TRY(dtrain__storage_open(storage, path, DTRAIN_STORAGE_DIRECTORY, &file));
    return dtrain__storage_finish(storage, file, path, DTRAIN_OK);
}

/* Rename a file or directory, and sync the new name. */
DTRAIN__PRIVATE dtrain_result dtrain__storage_rename(const dtrain_storage *storage,
                                                     const char *from, const char *to)
{
    const dtrain__file_path directory = dtrain__directory_of(to);
    const int code = storage->rename(storage->user, from, to);
    if (code >= 0) return dtrain__storage_sync_directory(storage, directory.text);
    return dtrain_fail(DTRAIN_ERROR_FILE, "%s cannot be renamed to %s: %s", from, to,
                       strerror(-code));
}

/* Remove a file or an empty directory; a missing one is no error. */
DTRAIN__PRIVATE dtrain_result dtrain__storage_remove(const dtrain_storage *storage,
                                                     const char *path)
{
    const int code = storage->remove(storage->user, path);
    if (code >= 0 || code == -ENOENT) return DTRAIN_OK;
    return dtrain__storage_fail(path, "removed", code);
}

/* Write a whole new file, and sync it. */
DTRAIN__PRIVATE dtrain_result dtrain__storage_put(const dtrain_storage *storage, const char *path,
                                                  const void *from, size_t bytes)
{
    int file;
    DTRAIN__TRY(dtrain__storage_open(storage, path, DTRAIN_STORAGE_CREATE, &file));
    return dtrain__storage_finish(storage, file, path,
                                  dtrain__storage_write(storage, file, path, from, bytes, 0));
}

/* Read a whole file of at most `most` bytes into new memory, with a 0 after it. The caller frees
 * *bytes + 1 bytes. */
DTRAIN__PRIVATE dtrain_result dtrain__storage_get(const dtrain_storage *storage,
                                                  const dtrain_allocator *allocator,
                                                  const char *path, uint64_t most, char **text,
                                                  size_t *bytes)
{
    int file;
    *text = NULL;
    *bytes = 0;
    DTRAIN__TRY(dtrain__storage_open(storage, path, DTRAIN_STORAGE_READ, &file));
    const int64_t size = storage->size(storage->user, file);
    dtrain_result result = DTRAIN_OK;
    if (size < 0) result = dtrain__storage_fail(path, "read", size);
    else if ((uint64_t)size > most)
        result = dtrain_fail(DTRAIN_ERROR_DATA, "%s has %lld bytes, expected at most %llu", path,
                             (long long)size, (unsigned long long)most);
    if (result == DTRAIN_OK) {
        *text = (char *)dtrain__alloc(allocator, (size_t)size + 1, 1, "the text of a file");
        *bytes = (size_t)size;
        result = *text ? dtrain__storage_read(storage, file, path, *text, *bytes, 0)
                       : DTRAIN_ERROR_MEMORY;
    }
    (void)storage->close(storage->user, file);
    if (result != DTRAIN_OK) dtrain__free(allocator, *text, *bytes + 1, 1);
    return result;
}
