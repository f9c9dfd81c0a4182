/* Log and allocator. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/log.h"
#include "core/result.h"

static void *dtrain__default_alloc(void *user, size_t bytes)
{
    (void)user;
    return malloc(bytes);
}
static void dtrain__default_free(void *user, void *memory, size_t bytes)
{
    (void)user;
    (void)bytes;
    free(memory);
}

DTRAIN__PRIVATE dtrain_allocator dtrain__resolve_allocator(const dtrain_allocator *given)
{
    dtrain_allocator result;
    memset(&result, 0, sizeof result);
    if (given) result = *given;
    if (!result.alloc || !result.free) {
        result.alloc = dtrain__default_alloc;
        result.free = dtrain__default_free;
        result.user = NULL;
    }
    return result;
}

/* Allocate zeroed memory for count items; return NULL and set the last error on failure. count == 0
 * also gives memory, so that NULL always means failure. */
DTRAIN__PRIVATE void *dtrain__alloc(const dtrain_allocator *allocator, size_t count,
                                    size_t item_bytes, const char *what)
{
    size_t bytes;
    void *memory = NULL;
    if (dtrain__size_mul(count ? count : 1, item_bytes, &bytes))
        memory = allocator->alloc(allocator->user, bytes);
    if (!memory) {
        dtrain_fail(DTRAIN_ERROR_MEMORY, "no memory for %s: %zu items of %zu bytes", what, count,
                    item_bytes);
        return NULL;
    }
    memset(memory, 0, bytes);
    return memory;
}
DTRAIN__PRIVATE void dtrain__free(const dtrain_allocator *allocator, void *memory, size_t count,
                                  size_t item_bytes)
{
    if (memory) allocator->free(allocator->user, memory, (count ? count : 1) * item_bytes);
}

/* Make room for one more item after the count items of an array, which doubles when it is full.
 * Return false and keep the array if there is no memory. */
DTRAIN__PRIVATE bool dtrain__grow(const dtrain_allocator *allocator, void **array, size_t count,
                                  size_t *room, size_t item_bytes, const char *what)
{
    if (count < *room) return true;
    const size_t more = 2 * *room + 16;
    void *larger = dtrain__alloc(allocator, more, item_bytes, what);
    if (!larger) return false;
    if (count) memcpy(larger, *array, count * item_bytes);
    dtrain__free(allocator, *array, *room, item_bytes);
    *array = larger;
    *room = more;
    return true;
}

DTRAIN__PRIVATE void dtrain__log_va(const dtrain__log_sink *sink, dtrain_log_level level,
                                    const char *format, va_list args)
{
    static const char *const names[] = {"", "error", "warning", "info", "debug"};
    char text[1024];
    dtrain_log_level limit = sink->level == DTRAIN_LOG_DEFAULT ? DTRAIN_LOG_INFO : sink->level;
    if (level > limit || level < DTRAIN_LOG_ERROR || sink->silent) return;
    vsnprintf(text, sizeof text, format, args);
    dtrain__visible(text);
    if (sink->write) sink->write(sink->user, level, sink->rank, text);
    else if (sink->rank < 0) fprintf(stderr, "dtrain %s: %s\n", names[level], text);
    else if (sink->rank == 0 || level < DTRAIN_LOG_INFO)
        fprintf(stderr, "dtrain %s (rank %d): %s\n", names[level], sink->rank, text);
}

DTRAIN__PRINTF(3, 4)
DTRAIN__PRIVATE void dtrain__log_to(const dtrain__log_sink *sink, dtrain_log_level level,
                                    const char *format, ...)
{
    va_list args;
    va_start(args, format);
    dtrain__log_va(sink, level, format, args);
    va_end(args);
}
