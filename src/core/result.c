/* Results and error sentences
 *
 * The last error is thread-local, like errno: ranks can be threads, and a rank's helper threads
 * pass their errors to the rank's thread. The rank precedes every sentence, so that the output of
 * many ranks stays readable. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/result.h"

static DTRAIN__THREAD_LOCAL char dtrain__error_text[DTRAIN__ERROR_BYTES];
static DTRAIN__THREAD_LOCAL dtrain_result dtrain__error_code;
DTRAIN__PRIVATE dtrain_result *dtrain__last_code(void) { return &dtrain__error_code; }
static DTRAIN__THREAD_LOCAL int dtrain__thread_rank = -1; /* -1 if the thread is no rank */
DTRAIN__PRIVATE int dtrain__rank_of_thread(void) { return dtrain__thread_rank; }
DTRAIN__PRIVATE void dtrain__set_thread_rank(int rank) { dtrain__thread_rank = rank; }

/* Return the number of bytes of the first character, or 0 if it is not UTF-8: it is truncated,
 * longer than necessary, half of a surrogate pair, or beyond U+10FFFF. The second byte decides the
 * last three (RFC 3629, section 4). */
DTRAIN__PRIVATE size_t dtrain__utf8_bytes(const char *text, size_t left)
{
    const unsigned char *at = (const unsigned char *)text;
    const unsigned char first = at[0];
    size_t bytes = 4;
    if (first < 0x80) return 1;
    if (first < 0xc2 || first > 0xf4) return 0;
    if (first < 0xe0) bytes = 2;
    else if (first < 0xf0) bytes = 3;
    if (bytes > left) return 0;
    for (size_t i = 1; i < bytes; i++)
        if ((at[i] & 0xc0) != 0x80) return 0;
    if ((first == 0xe0 && at[1] < 0xa0) || (first == 0xed && at[1] > 0x9f)) return 0;
    if ((first == 0xf0 && at[1] < 0x90) || (first == 0xf4 && at[1] > 0x8f)) return 0;
    return bytes;
}

/* Replace control characters and bytes that are not UTF-8 by '?': a terminal would obey them. Names
 * in sentences come from files and from the environment. */
DTRAIN__PRIVATE char *dtrain__visible(char *text)
{
    for (size_t at = 0, end = strlen(text), bytes; at < end; at += bytes) {
        const unsigned char *c = (const unsigned char *)text + at;
        bytes = dtrain__utf8_bytes(text + at, end - at);
        const bool shown = *c == 0xc2 ? c[1] > 0x9f : *c > 31 && *c != 127;
        if (bytes && shown) continue;
        if (!bytes) bytes = 1;
        memset(text + at, '?', bytes);
    }
    return text;
}

/* Copy a name to `room` bytes. In a name that is too long, a hash of the whole name replaces the
 * middle: different names stay different, and the end still names the tensor of a layer. */
DTRAIN__PRIVATE const char *dtrain__name_cut(char *to, size_t room, const char *name)
{
    const size_t bytes = strlen(name = name ? name : "");
    size_t head = room / 3, tail = bytes + head + sizeof "...01234567..." - room;
    if (bytes < room) return (const char *)memcpy(to, name, bytes + 1);
    while (head > 0 && ((unsigned char)name[head] & 0xc0) == 0x80) head--; /* whole characters */
    while (((unsigned char)name[tail] & 0xc0) == 0x80) tail++;
    snprintf(to, room, "%.*s...%08x...%s", (int)head, name,
             (unsigned)dtrain__fnv1a(DTRAIN__FNV_BASIS, name, bytes), name + tail);
    return to;
}

/* Return a name for a sentence, of 99 bytes at most; it is valid for the next three calls. */
DTRAIN__PRIVATE const char *dtrain__short(const char *name)
{
    static DTRAIN__THREAD_LOCAL char shown[4][100];
    static DTRAIN__THREAD_LOCAL uint32_t next;
    return dtrain__name_cut(shown[next++ % 4], sizeof shown[0], name);
}

/* Replace the last error of this thread, without a rank before it, and return its code. */
DTRAIN__PRIVATE dtrain_result dtrain__set_last_error(dtrain_result code, const char *text)
{
    snprintf(dtrain__error_text, sizeof dtrain__error_text, "%s", text);
    return dtrain__error_code = code;
}

DTRAIN_API const char *dtrain_last_error(void) { return dtrain__error_text; }

DTRAIN_API const char *dtrain_result_text(dtrain_result result)
{
    switch (result) {
#define DTRAIN__TEXT(name, value, text) \
    case name: return #name ": " text;
        DTRAIN_RESULT_LIST(DTRAIN__TEXT)
#undef DTRAIN__TEXT
    default: return "unknown result: a number that is not a dtrain_result";
    }
}

/* Record the sentence and return code, so that a check is one line:
 *     if (count < 0) return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_x: count is %lld", ...);
 * The text can quote the last error: it is formatted in another buffer first. */
DTRAIN_API dtrain_result dtrain_fail(dtrain_result code, const char *format, ...)
{
    char text[DTRAIN__ERROR_BYTES];
    int used = 0;
    if (dtrain__thread_rank >= 0)
        used = snprintf(text, sizeof text, "rank %d: ", dtrain__thread_rank);
    va_list args;
    va_start(args, format);
    vsnprintf(text + used, sizeof text - (size_t)used, format, args);
    va_end(args);
    memcpy(dtrain__error_text, dtrain__visible(text), sizeof text);
    return dtrain__error_code = code;
}

/* Skip the "rank 3: " of an error sentence, because dtrain_fail adds it again. */
DTRAIN__PRIVATE const char *dtrain__bare(const char *text)
{
    char prefix[32];
    snprintf(prefix, sizeof prefix, "rank %d: ", dtrain__thread_rank);
    return strncmp(text, prefix, strlen(prefix)) == 0 ? text + strlen(prefix) : text;
}

/* Return an error for the first field that is wrong. */
DTRAIN__PRIVATE dtrain_result dtrain__check_bounds(const char *call, const dtrain__bound *bounds,
                                                   size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (bounds[i].wrong)
            return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: %s is %.9g; expected %s", call,
                               bounds[i].field, bounds[i].value, bounds[i].expected);
    return DTRAIN_OK;
}
