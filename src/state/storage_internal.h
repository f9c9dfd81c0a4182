/* Paths, and whole reads and writes over any storage table. */

#pragma once

#include "core/core_internal.h"
#include "state/storage.h"

#define DTRAIN__PATH 768

/* A path, long enough for every file of a checkpoint. */
typedef struct dtrain__file_path {
    char text[DTRAIN__PATH];
} dtrain__file_path;

/* state/storage.c */
DTRAIN__PRINTF(2, 3)
DTRAIN__PRIVATE dtrain__file_path dtrain__path_in(const char *directory, const char *format, ...);
DTRAIN__PRIVATE dtrain_result dtrain__path_check(const char *call, const char *path);
DTRAIN__PRIVATE dtrain__file_path dtrain__directory_of(const char *path);
DTRAIN__PRIVATE const dtrain_storage *dtrain__storage_or_files(const dtrain_storage *given);
DTRAIN__PRIVATE int dtrain__storage_try(const dtrain_storage *storage, const char *path,
                                        dtrain_storage_mode mode);
DTRAIN__PRIVATE int dtrain__storage_probe(const dtrain_storage *storage, const char *path,
                                          dtrain_storage_mode mode);
DTRAIN__PRIVATE dtrain_result dtrain__storage_fail(const char *path, const char *what,
                                                   int64_t code);
DTRAIN__PRIVATE dtrain_result dtrain__storage_open(const dtrain_storage *storage, const char *path,
                                                   dtrain_storage_mode mode, int *file);
DTRAIN__PRIVATE dtrain_result dtrain__storage_read(const dtrain_storage *storage, int file,
                                                   const char *path, void *to, size_t bytes,
                                                   uint64_t offset);
DTRAIN__PRIVATE dtrain_result dtrain__storage_write(const dtrain_storage *storage, int file,
                                                    const char *path, const void *from,
                                                    size_t bytes, uint64_t offset);
DTRAIN__PRIVATE dtrain_result dtrain__storage_finish(const dtrain_storage *storage, int file,
                                                     const char *path, dtrain_result result);
DTRAIN__PRIVATE dtrain_result dtrain__storage_sync_directory(const dtrain_storage *storage,
                                                             const char *path);
DTRAIN__PRIVATE dtrain_result dtrain__storage_rename(const dtrain_storage *storage,
                                                     const char *from, const char *to);
DTRAIN__PRIVATE dtrain_result dtrain__storage_remove(const dtrain_storage *storage,
                                                     const char *path);
DTRAIN__PRIVATE dtrain_result dtrain__storage_put(const dtrain_storage *storage, const char *path,
                                                  const void *from, size_t bytes);
DTRAIN__PRIVATE dtrain_result dtrain__storage_get(const dtrain_storage *storage,
                                                  const dtrain_allocator *allocator,
                                                  const char *path, uint64_t most, char **text,
                                                  size_t *bytes);
