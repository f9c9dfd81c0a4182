/* Files of a dataset
 *
 * Files are read with pread into the caller's memory, never mapped. A mapping of a file that
 * another process cuts off ends this one with SIGBUS, which only a signal handler could stop, and
 * what that process writes into the file shows up in the middle of an item. A read is short
 * instead, and after each one the file must still have the size and the time of its last change
 * that it was opened with: else it is an error that names it. The page cache serves both ways
 * alike; bench_data has what a read costs. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/log.h"
#include "core/result.h"
#include "train/data_internal.h"

#include <fnmatch.h>

#define DTRAIN__OPEN_FILES \
    64 /* that many stay open; others are opened for each read, because descriptors are few */

/* A search for files: what it has found so far, and the part of `paths` it is at. */
typedef struct dtrain__data_search {
    const dtrain_allocator *allocator;
    dtrain__data_files *files;
    char path[PATH_MAX];
} dtrain__data_search;

static dtrain_result dtrain__data_files_find(dtrain__data_search *search, const char *paths);
static dtrain_result dtrain__data_file_open(dtrain__data_file *file, bool stays);

/* Find the files that `paths` names, and open each. After a failure files_close frees what is
 * there. */
DTRAIN__PRIVATE dtrain_result dtrain__data_files_open(const dtrain_allocator *allocator,
                                                      const char *paths, dtrain__data_files *files)
{
    dtrain__data_search search;
    memset(&search, 0, sizeof search);
    search.allocator = allocator;
    search.files = files;
    DTRAIN__TRY(dtrain__data_files_find(&search, paths));
    for (size_t i = 0; i < files->count; i++)
        DTRAIN__TRY(dtrain__data_file_open(&files->files[i], i < DTRAIN__OPEN_FILES));
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
    memset(files, 0, sizeof *files);
}

/* Return the file that holds an item of the dataset. */
DTRAIN__PRIVATE const dtrain__data_file *dtrain__data_file_of(const dtrain__data_files *files,
                                                              int64_t item)
{
    size_t low = 0, high = files->count; /* it is one of [low, high) */
    while (high - low > 1) {
        const size_t middle = low + (high - low) / 2;
        if (files->files[middle].first_item <= item) low = middle;
        else high = middle;
    }
    return &files->files[low];
}

/* Return the little-endian number of `width` bytes, whatever the host's order. */
DTRAIN__PRIVATE uint32_t dtrain__le(const unsigned char *bytes, uint32_t width)
{
    uint32_t value = 0;
    for (uint32_t i = 0; i < width; i++) value |= (uint32_t)bytes[i] << (8 * i);
    return value;
}

/* ---- reading ----------------------------------------------------------------------------------*/

/* Open a file. Without O_NONBLOCK a pipe would wait for its writer here. */
static int dtrain__data_open(const char *path)
{
    int file;
    do file = dtrain__open(path, O_RDONLY | O_NONBLOCK);
    while (file < 0 && errno == EINTR);
    return file;
}

/* Check that the file is the one that was opened, unchanged. Two changes within one tick of the
 * kernel's clock, a few ms, that leave the size alone look like one. */
static dtrain_result dtrain__data_file_check(const dtrain__data_file *file, int descriptor)
{
    const struct stat *then = &file->opened;
    struct stat now;
    if (fstat(descriptor, &now) != 0)
        return dtrain_fail(DTRAIN_ERROR_FILE, "%s cannot be looked at: %s", file->path,
                           strerror(errno));
    if (now.st_size == then->st_size && now.st_mtim.tv_sec == then->st_mtim.tv_sec &&
        now.st_mtim.tv_nsec == then->st_mtim.tv_nsec && now.st_ino == then->st_ino &&
        now.st_dev == then->st_dev)
        return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_FILE,
                       "%s changed while it was in use: it had %lld bytes when it was opened and "
                       "has %lld now, %s; open the dataset again when nobody writes to its files",
                       file->path, (long long)then->st_size, (long long)now.st_size,
                       now.st_ino != then->st_ino    ? "being another file"
                       : now.st_size < then->st_size ? "having been cut"
                                                     : "having been written to");
}

static dtrain_result dtrain__data_file_pread(const dtrain__data_file *file, int descriptor,
                                             int64_t offset, void *buffer, size_t bytes)
{
    for (size_t done = 0; done < bytes;) {
        const ssize_t got = pread(descriptor, (unsigned char *)buffer + done, bytes - done,
                                  (off_t)(offset + (int64_t)done));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0)
            return dtrain_fail(DTRAIN_ERROR_FILE, "%s cannot be read at byte %lld: %s", file->path,
                               (long long)offset + (long long)done, strerror(errno));
        if (got == 0) { /* the file is shorter now: offsets lie inside its size at open */
            DTRAIN__TRY(dtrain__data_file_check(file, descriptor));
            return dtrain_fail(DTRAIN_ERROR_FILE, "%s ended at byte %lld of %lld", file->path,
                               (long long)offset + (long long)done,
                               (long long)file->opened.st_size);
        }
        done += (size_t)got;
    }
    return dtrain__data_file_check(file, descriptor);
}

/* Read all `bytes` at `offset`; fail if the file has changed since it was opened. */
DTRAIN__PRIVATE dtrain_result dtrain__data_file_read(const dtrain__data_file *file, int64_t offset,
                                                     void *buffer, size_t bytes)
{
    if (file->file >= 0) return dtrain__data_file_pread(file, file->file, offset, buffer, bytes);
    const int descriptor = dtrain__data_open(file->path);
    if (descriptor < 0)
        return dtrain_fail(DTRAIN_ERROR_FILE, "%s cannot be opened again: %s", file->path,
                           strerror(errno));
    const dtrain_result result = dtrain__data_file_pread(file, descriptor, offset, buffer, bytes);
    close(descriptor);
    return result;
}

/* Open a file to learn its size, and keep it open if it `stays`. */
static dtrain_result dtrain__data_file_open(dtrain__data_file *file, bool stays)
{
    file->file = dtrain__data_open(file->path);
    if (file->file < 0 || fstat(file->file, &file->opened) != 0)
        return dtrain_fail(DTRAIN_ERROR_FILE, "dtrain_dataset_open: %s cannot be opened: %s",
                           file->path, strerror(errno));
    if (!S_ISREG(file->opened.st_mode) || file->opened.st_size == 0)
        return dtrain_fail(DTRAIN_ERROR_FILE,
                           "dtrain_dataset_open: %s is %s, expected a file of data", file->path,
                           S_ISREG(file->opened.st_mode) ? "empty" : "no regular file");
    if (stays) return DTRAIN_OK;
    close(file->file);
    file->file = -1;
    return DTRAIN_OK;
}

/* ---- finding ----------------------------------------------------------------------------------*/

static dtrain_result dtrain__data_files_add(dtrain__data_search *search, const char *path)
{
    dtrain__data_files *files = search->files;
    void *array = files->files;
    const size_t bytes = strlen(path) + 1;
    const bool room = dtrain__grow(search->allocator, &array, files->count, &files->room,
                                   sizeof *files->files, "a dataset's files");
    files->files = (dtrain__data_file *)array;
    char *copy = room ? (char *)dtrain__alloc(search->allocator, bytes, 1, "a path") : NULL;
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

/* Add the regular files of a folder whose names fit the pattern, in the order of their names. */
static dtrain_result dtrain__data_files_list(dtrain__data_search *search, const char *folder,
                                             const char *pattern)
{
    const size_t before = search->files->count;
    dtrain_result result = DTRAIN_OK;
    DIR *directory = dtrain__open_directory(*folder ? folder : ".");
    if (!directory)
        return dtrain_fail(DTRAIN_ERROR_FILE, "dtrain_dataset_open: %s cannot be opened: %s",
                           *folder ? folder : ".", strerror(errno));
    const size_t length = strlen(folder);
    const char *slash = length && folder[length - 1] != '/' ? "/" : "";
    for (const struct dirent *entry; result == DTRAIN_OK && (entry = readdir(directory));) {
        char path[PATH_MAX + 1 + NAME_MAX + 1];
        struct stat info;
        if (fnmatch(pattern, entry->d_name, FNM_PERIOD) != 0) continue;
        snprintf(path, sizeof path, "%s%s%s", folder, slash, entry->d_name);
        if (stat(path, &info) == 0 && S_ISREG(info.st_mode))
            result = dtrain__data_files_add(search, path);
    }
    closedir(directory);
    DTRAIN__TRY(result);
    if (search->files->count == before)
        return dtrain_fail(DTRAIN_ERROR_FILE,
                           "dtrain_dataset_open: the folder %s has no file whose name fits \"%s\"",
                           *folder ? folder : ".", pattern);
    qsort(search->files->files + before, search->files->count - before,
          sizeof *search->files->files, dtrain__compare_data_files);
    return DTRAIN_OK;
}

/* Add the files that search->path names: the file itself, the files of a folder, or those that fit
 * a pattern. A path that exists is no pattern, whatever characters are in it. */
static dtrain_result dtrain__data_files_find_one(dtrain__data_search *search)
{
    struct stat info;
    char *path = search->path;
    const bool exists = stat(path, &info) == 0;
    if (exists && S_ISDIR(info.st_mode)) return dtrain__data_files_list(search, path, "*");
    if (exists || !strpbrk(path, "*?[")) return dtrain__data_files_add(search, path);
    char *slash = strrchr(path, '/');
    if (!slash) return dtrain__data_files_list(search, "", path);
    char pattern[NAME_MAX + 1];
    snprintf(pattern, sizeof pattern, "%s", slash + 1);
    slash[slash == path] = 0; /* the root keeps its slash */
    return dtrain__data_files_list(search, path, pattern);
}

/* Find all files: `paths` is one that exists, or several with commas between. */
static dtrain_result dtrain__data_files_find(dtrain__data_search *search, const char *paths)
{
    struct stat info;
    const bool whole = stat(paths, &info) == 0;
    for (const char *at = paths;;) {
        const size_t length = whole ? strlen(at) : strcspn(at, ",");
        if (length == 0 || length >= sizeof search->path)
            return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                               "dtrain_dataset_open: a path in \"%.200s\" is %s", paths,
                               length ? "too long" : "empty");
        memcpy(search->path, at, length);
        search->path[length] = 0;
        DTRAIN__TRY(dtrain__data_files_find_one(search));
        if (!at[length]) return DTRAIN_OK;
        at += length + 1;
    }
}
