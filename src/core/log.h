/* Log, allocator, clock. */

#pragma once

#include "core/api.h"

typedef enum dtrain_log_level {
    DTRAIN_LOG_DEFAULT = 0, /* = DTRAIN_LOG_INFO */
    DTRAIN_LOG_ERROR = 1,
    DTRAIN_LOG_WARNING = 2,
    DTRAIN_LOG_INFO = 3,
    DTRAIN_LOG_DEBUG = 4
} dtrain_log_level;

/* Receives every message up to the log level, on the thread that sends it. `rank` is -1 for the
 * launcher. `text` is one line without '\n', valid during the call. Without a callback, warnings
 * and errors of every rank and infos of rank 0 go to stderr. */
typedef void (*dtrain_log_fn)(void *user, dtrain_log_level level, int rank, const char *text);

/* The memory allocator of a run. All fields zero means malloc and free. `alloc` returns memory
 * aligned for any type, or NULL; `free` receives the size of the allocation. Several threads can
 * call both. dtrain allocates when objects are created and in the first training step, never in
 * later steps; a checkpoint allocates when it is saved. */
typedef struct dtrain_allocator {
    void *(*alloc)(void *user, size_t bytes);
    void (*free)(void *user, void *memory, size_t bytes);
    void *user;
} dtrain_allocator;

/* Return the time in seconds of the monotonic clock, which all deadlines and timings use. */
DTRAIN_API double dtrain_seconds(void);
