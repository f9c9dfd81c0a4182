/* Types and functions of core/ for the whole library. */

#pragma once

#include "core/platform_internal.h"
#include "core/log.h"
#include "core/result.h"

#define DTRAIN__ERROR_BYTES 1024 /* size of a last error with its 0 */

/* Propagate a failure, whose sentence is the last error. */
#define DTRAIN__TRY(call)                                       \
    do {                                                        \
        dtrain_result dtrain__status = (call);                  \
        if (dtrain__status != DTRAIN_OK) return dtrain__status; \
    } while (0)

/* Return an error that names the argument if it is NULL. */
#define DTRAIN__GIVEN(call, argument)                                                       \
    do {                                                                                    \
        if (!(argument))                                                                    \
            return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: %s is NULL", (call), #argument); \
    } while (0)

/* A field of a desc, and the check of its value. */
typedef struct dtrain__bound {
    bool wrong;
    const char *field;
    double value;
    const char *expected;
} dtrain__bound;

/* The destination of a rank's messages; one per world. */
typedef struct dtrain__log_sink {
    dtrain_log_fn write;
    void *user;
    dtrain_log_level level;
    int rank;    /* -1: the launcher */
    bool silent; /* true for a guest without a log */
} dtrain__log_sink;

#define DTRAIN__PHILOX_M0 0xD2511F53u
#define DTRAIN__PHILOX_M1 0xCD9E8D57u
#define DTRAIN__PHILOX_W0 0x9E3779B9u
#define DTRAIN__PHILOX_W1 0xBB67AE85u

/* core/platform.c */
DTRAIN__PRIVATE int dtrain__above_stdio(int file);
DTRAIN__PRIVATE int dtrain__open(const char *path, int flags);
DTRAIN__PRIVATE int dtrain__open_new(const char *path);
DTRAIN__PRIVATE DIR *dtrain__open_directory(const char *path);
DTRAIN__PRIVATE int dtrain__thread_start(pthread_t *thread, void *(*run)(void *), void *user);
DTRAIN__PRIVATE size_t dtrain__page_bytes(void);
DTRAIN__PRIVATE uint64_t dtrain__group_memory(const char *groups, const char *mount);
DTRAIN__PRIVATE uint64_t dtrain__process_started(int64_t pid);
DTRAIN__PRIVATE uint64_t dtrain__free_memory(void);
DTRAIN__PRIVATE uint64_t dtrain__process_bytes(void);
DTRAIN__PRIVATE void dtrain__copy_lines(char *to, const char *from, size_t bytes, bool past_cache);

#define DTRAIN__FNV_BASIS 0xcbf29ce484222325u

/* core/hash.c */
DTRAIN__PRIVATE uint64_t dtrain__fnv1a(uint64_t hash, const void *bytes, size_t count);
DTRAIN__PRIVATE uint64_t dtrain__hash_words(uint64_t hash, const void *bytes, size_t count);
DTRAIN__PRIVATE uint64_t dtrain__siphash(const uint64_t key[2], const void *data, size_t bytes);

/* core/result.c */
DTRAIN__PRIVATE int dtrain__rank_of_thread(void);
DTRAIN__PRIVATE const char *dtrain__bare(const char *text);
DTRAIN__PRIVATE dtrain_result dtrain__check_bounds(const char *call, const dtrain__bound *bounds,
                                                   size_t count);
DTRAIN__PRIVATE void dtrain__set_thread_rank(int rank);
DTRAIN__PRIVATE dtrain_result dtrain__set_last_error(dtrain_result code, const char *text);
DTRAIN__PRIVATE size_t dtrain__utf8_bytes(const char *text, size_t left);
DTRAIN__PRIVATE char *dtrain__visible(char *text);
DTRAIN__PRIVATE const char *dtrain__name_cut(char *to, size_t room, const char *name);
DTRAIN__PRIVATE const char *dtrain__short(const char *name);
/* The code of the last error; DTRAIN_OK after a later successful call that waits for ranks. */
DTRAIN__PRIVATE dtrain_result *dtrain__last_code(void);

/* core/log.c */
DTRAIN__PRIVATE dtrain_allocator dtrain__resolve_allocator(const dtrain_allocator *given);
DTRAIN__PRIVATE void *dtrain__alloc(const dtrain_allocator *allocator, size_t count,
                                    size_t item_bytes, const char *what);
DTRAIN__PRIVATE void dtrain__free(const dtrain_allocator *allocator, void *memory, size_t count,
                                  size_t item_bytes);
DTRAIN__PRIVATE bool dtrain__grow(const dtrain_allocator *allocator, void **array, size_t count,
                                  size_t *room, size_t item_bytes, const char *what);
DTRAIN__PRIVATE void dtrain__log_va(const dtrain__log_sink *sink, dtrain_log_level level,
                                    const char *format, va_list args);
DTRAIN__PRINTF(3, 4)
DTRAIN__PRIVATE void dtrain__log_to(const dtrain__log_sink *sink, dtrain_log_level level,
                                    const char *format, ...);

/* core/random.c */
DTRAIN__PRIVATE void dtrain__philox(uint64_t seed, uint64_t stream, uint64_t counter,
                                    uint32_t out[4]);
DTRAIN__PRIVATE void dtrain__random_fill(uint64_t seed, uint64_t stream, uint64_t first,
                                         int64_t count, bool normal, float scale, float *out);
