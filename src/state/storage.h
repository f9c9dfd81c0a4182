/* Storage
 *
 * A table of the calls by which checkpoints and weights reach their files. A test can make any call
 * fail, and a program can keep its files outside a file system. A desc without a table uses the
 * file system. A directory below /dev/shm keeps checkpoints in memory: they survive when
 * dtrain_launch or dtrain-run restarts ranks, but not a reboot. */

#pragma once

#include "core/api.h"
#include "core/result.h"

typedef enum dtrain_storage_mode {
    DTRAIN_STORAGE_READ = 0,
    DTRAIN_STORAGE_CREATE = 1,    /* a new file, to write; EEXIST if it exists */
    DTRAIN_STORAGE_LOCK = 2,      /* a file that is made if needed, and locked until close or the
                                     end of the process; EAGAIN if another process holds the lock */
    DTRAIN_STORAGE_DIRECTORY = 3, /* a directory, to sync */
    DTRAIN_STORAGE_MODES = 4
} dtrain_storage_mode;

/* Every call returns 0 or more, or a negated errno. Reads and writes can be short or interrupted
 * (-EINTR): the library repeats them. Several threads can call at once, never for one file. */
typedef struct dtrain_storage {
    void *user;
    int (*open)(void *user, const char *path, dtrain_storage_mode mode); /* returns the file */
    int64_t (*read)(void *user, int file, void *to, size_t bytes, uint64_t offset);
    int64_t (*write)(void *user, int file, const void *from, size_t bytes, uint64_t offset);
    int64_t (*size)(void *user, int file);
    int (*sync)(void *user, int file); /* a file, or the names in a directory */
    int (*close)(void *user, int file);
    int (*rename)(void *user, const char *from, const char *to); /* atomic; replaces a file */
    int (*remove)(void *user, const char *path);                 /* a file, or an empty directory */
    int (*make_directory)(void *user, const char *path);
    /* Calls name(list, entry) for every entry but "." and "..". */
    int (*list)(void *user, const char *path, void (*name)(void *list, const char *entry),
                void *list);
} dtrain_storage;
