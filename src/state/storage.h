/* Storage
 *
 * The calls through which checkpoints and weights reach their files: a table, so that tests can
 * fail any of them, and a program can keep its files elsewhere than in a file system. Where a desc
 * has none, the file system is meant. A directory below /dev/shm keeps checkpoints in memory: they
 * outlive ranks that dtrain_launch or dtrain-run starts again, but not the machine. */

#pragma once

#include "core/api.h"
#include "core/result.h"

typedef enum dtrain_storage_mode {
    DTRAIN_STORAGE_READ = 0,
    DTRAIN_STORAGE_CREATE = 1,    /* to write a new file; EEXIST if there is one */
    DTRAIN_STORAGE_LOCK = 2,      /* make it if it is not there, and lock it until close or the end
                                     of the process; EAGAIN if another has locked it */
    DTRAIN_STORAGE_DIRECTORY = 3, /* for sync */
    DTRAIN_STORAGE_MODES = 4
} dtrain_storage_mode;

/* Every call returns 0 or more, or a negated errno. Reads and writes may be short or interrupted
 * (-EINTR): the caller repeats them. Several threads call, for one file one at a time. */
typedef struct dtrain_storage {
    void *user;
    int (*open)(void *user, const char *path, dtrain_storage_mode mode); /* returns the file */
    int64_t (*read)(void *user, int file, void *to, size_t bytes, uint64_t offset);
    int64_t (*write)(void *user, int file, const void *from, size_t bytes, uint64_t offset);
    int64_t (*size)(void *user, int file);
    int (*sync)(void *user, int file); /* to the disk: the file, or the names in a directory */
    int (*close)(void *user, int file);
    int (*rename)(void *user, const char *from, const char *to); /* atomic; replaces a file */
    int (*remove)(void *user, const char *path);                 /* a file, or an empty directory */
    int (*make_directory)(void *user, const char *path);
    /* Calls name(list, entry) for every entry but "." and "..". */
    int (*list)(void *user, const char *path, void (*name)(void *list, const char *entry),
                void *list);
} dtrain_storage;
