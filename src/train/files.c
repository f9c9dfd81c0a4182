/* Files of a dataset
 *
 * pread reads files into the caller's memory; no file is mapped. If another process cut off a
 * mapped file, this process would end with SIGBUS, which only a signal handler could stop, and its
 * writes would show in the middle of an item. A read is short instead, and after each read the file
 * must still have the size and the time of change that it was opened with: otherwise an error names
 * it. The page cache serves both ways alike; bench_data measures a read. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/log.h"
#include "core/result.h"
#include "train/data_internal.h"

#include <fnmatch.h>

#define DTRAIN__OPEN_FILES \
    64 /* files that stay open; others are opened for each read, because descriptors are few */

/* Open a file. Without O_NONBLOCK the open of a pipe would wait for its writer. */
static int dtrain__data_open(const char *path)
{
    int file;
    do file = dtrain__open(path, O_RDONLY | O_NONBLOCK);
    while (file < 0 && errno == EINTR);
    return file;
}

/* Read all `bytes` at `offset`; fail if the file has changed since it was opened. Two changes
 * within one tick of the kernel's clock, a few ms, that keep its size look like one. */
DTRAIN__PRIVATE dtrain_result dtrain__data_file_read(const dtrain__data_file *file, int64_t offset,
                                                     void *buffer, size_t bytes)
{
    const struct stat *then = &file->opened;
    const int descriptor = file->file >= 0 ? file->file : dtrain__data_open(file->path);
    struct stat now;
    size_t done = 0;
    ssize_t got = 1;
    if (descriptor < 0)
        return dtrain_fail(DTRAIN_ERROR_FILE, "%s cannot be opened again: %s", file->path,
                           strerror(errno));
    while (done < bytes && (got > 0 || (got < 0 && errno == EINTR))) {
        got = pread(descriptor, (unsigned char *)buffer + done, bytes - done,
                    (off_t)(offset + (int64_t)done));
        if (got > 0) done += (size_t)got;
    }
    const bool failed = got < 0 || fstat(descriptor, &now) != 0;
    const int error = errno;
    if (file->file < 0) close(descriptor);
    if (failed)
        return dtrain_fail(DTRAIN_ERROR_FILE, "%s cannot be read at byte %lld: %s", file->path,
                           (long long)offset + (long long)done, strerror(error));
    if (now.st_size != then->st_size || now.st_mtim.tv_sec != then->st_mtim.tv_sec ||
        now.st_mtim.tv_nsec != then->st_mtim.tv_nsec || now.st_ino != then->st_ino ||
        now.st_dev != then->st_dev)
        return dtrain_fail(
            DTRAIN_ERROR_FILE,
            "%s changed while it was in use: it had %lld bytes when it was opened and has %lld "
            "now, %s; open the dataset again when nobody writes to its files",
            file->path, (long long)then->st_size, (long long)now.st_size,
            now.st_ino != then->st_ino    ? "being another file"
            : now.st_size < then->st_size ? "having been cut"
                                          : "having been written to");
    if (done == bytes) return DTRAIN_OK; /* offsets are below the size at open */
    return dtrain_fail(DTRAIN_ERROR_FILE, "%s ended at byte %lld of %lld", file->path,
                       (long long)offset + (long long)done, (long long)then->st_size);
}

/* Return the file that holds an item of the dataset. */
DTRAIN__PRIVATE const dtrain__data_file *dtrain__data_file_of(const dtrain__data_files *files,
                                                              int64_t item)
{
    size_t low = 0, high = files->count; /* the file is in [low, high) */
    while (high - low > 1) {
        const size_t middle = low + (high - low) / 2;
        if (files->files[middle].first_item <= item) low = middle;
        else high = middle;
    }
    return &files->files[low];
}

/* ---- Opening ----------------------------------------------------------------------------------*/

static dtrain_result dtrain__data_files_add(const dtrain_allocator *allocator,
                                            dtrain__data_files *files, const char *path)
{
    void *array = files->files;
    const size_t bytes = strlen(path) + 1;
    const bool room = dtrain__grow(allocator, &array, files->count, &files->room,
                                   sizeof *files->files, "a dataset's files");
    files->files = (dtrain__data_file *)array;
    char *copy = room ? (char *)dtrain__alloc(allocator, bytes, 1, "a path") : NULL;
    if (!copy) return DTRAIN_ERROR_MEMORY;
    dtrain__data_file *file = &files->files[files->count++];
    memset(file, 0, sizeof *file);
    file->path = (char *)memcpy(copy, path, bytes);
    file->file = -1;
    return DTRAIN_OK;
}

static int dtrain__compare_data_files(const void *a, const void *b)
{
    return strcmp(((const dtrain__data_file *)a)->path, ((const dtrain__data_file *)b)->path);
}

/* Add the files that `path` names: the file itself, or the regular files of a folder whose names
 * match a pattern, in the order of their names. A path that exists is no pattern, whatever
 * characters it has. */
static dtrain_result dtrain__data_files_find(const dtrain_allocator *allocator,
                                             dtrain__data_files *files, char *path)
{
    const size_t before = files->count;
    const char *folder = path, *pattern = "*";
    struct stat info;
    const bool exists = stat(path, &info) == 0;
    if (exists ? !S_ISDIR(info.st_mode) : !strpbrk(path, "*?["))
        return dtrain__data_files_add(allocator, files, path);
    if (!exists) {
        char *slash = strrchr(path, '/');
        pattern = slash ? slash + 1 : path;
        folder = !slash ? "" : slash == path ? "/" : path;
        if (slash) *slash = 0;
    }
    const size_t length = strlen(folder);
    const char *between = length && folder[length - 1] != '/' ? "/" : "";
    const char *where = length ? folder : ".";
    dtrain_result result = DTRAIN_OK;
    DIR *directory = dtrain__open_directory(where);
    if (!directory)
        return dtrain_fail(DTRAIN_ERROR_FILE, "dtrain_dataset_open: %s cannot be opened: %s", where,
                           strerror(errno));
    for (const struct dirent *entry; result == DTRAIN_OK && (entry = readdir(directory));) {
        char name[PATH_MAX + 1 + NAME_MAX + 1];
        if (fnmatch(pattern, entry->d_name, FNM_PERIOD) != 0) continue;
        snprintf(name, sizeof name, "%s%s%s", folder, between, entry->d_name);
        if (stat(name, &info) == 0 && S_ISREG(info.st_mode))
            result = dtrain__data_files_add(allocator, files, name);
    }
    closedir(directory);
    DTRAIN__TRY(result);
    if (files->count == before)
        return dtrain_fail(DTRAIN_ERROR_FILE,
                           "dtrain_dataset_open: the folder %s has no file whose name fits \"%s\"",
                           where, pattern);
    qsort(files->files + before, files->count - before, sizeof *files->files,
          dtrain__compare_data_files);
    return DTRAIN_OK;
}

/* Find the files that `paths` names, an existing path or several with commas between, and open each
 * to learn its size. After a failure files_close frees them. */
DTRAIN__PRIVATE dtrain_result dtrain__data_files_open(const dtrain_allocator *allocator,
                                                      const char *paths, dtrain__data_files *files)
{
    char path[PATH_MAX];
    struct stat info;
    const bool whole = stat(paths, &info) == 0;
    for (const char *at = paths;;) {
        const size_t length = whole ? strlen(at) : strcspn(at, ",");
        if (length == 0 || length >= sizeof path)
            return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                               "dtrain_dataset_open: a path in \"%.200s\" is %s", paths,
                               length ? "too long" : "empty");
        memcpy(path, at, length);
        path[length] = 0;
        DTRAIN__TRY(dtrain__data_files_find(allocator, files, path));
        if (!at[length]) break;
        at += length + 1;
    }
    for (size_t i = 0; i < files->count; i++) {
        dtrain__data_file *file = &files->files[i];
        file->file = dtrain__data_open(file->path);
        if (file->file < 0 || fstat(file->file, &file->opened) != 0)
            return dtrain_fail(DTRAIN_ERROR_FILE, "dtrain_dataset_open: %s cannot be opened: %s",
                               file->path, strerror(errno));
        const bool regular = S_ISREG(file->opened.st_mode);
        if (!regular || file->opened.st_size == 0)
            return dtrain_fail(DTRAIN_ERROR_FILE,
                               "dtrain_dataset_open: %s is %s, expected a file of data", file->path,
                               regular ? "empty" : "no regular file");
        if (i < DTRAIN__OPEN_FILES) continue;
        close(file->file);
        file->file = -1;
    }
    return DTRAIN_OK;
}

DTRAIN__PRIVATE void dtrain__data_files_close(const dtrain_allocator *allocator,
                                              dtrain__data_files *files)
{
    for (size_t i = 0; i < files->count; i++) {
        dtrain__data_file *file = &files->files[i];
        if (file->file >= 0) close(file->file);
        dtrain__free(allocator, file->path, strlen(file->path) + 1, 1);
    }
    dtrain__free(allocator, files->files, files->room, sizeof *files->files);
}
