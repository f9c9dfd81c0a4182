/* Results and error sentences
 *
 * The last error is thread-local, as errno is: ranks may be threads, and a rank's helper threads
 * hand their errors to the thread that asked. The rank is put in front of every sentence so that
 * the output of many ranks stays readable. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/result.h"

static DTRAIN__THREAD_LOCAL char dtrain__error_text[DTRAIN__ERROR_BYTES];
static DTRAIN__THREAD_LOCAL int dtrain__thread_rank = -1; /* set by launch; -1 outside of a rank */
DTRAIN__PRIVATE int dtrain__rank_of_thread(void) { return dtrain__thread_rank; }
DTRAIN__PRIVATE void dtrain__set_thread_rank(int rank) { dtrain__thread_rank = rank; }

/* Replace the last error of this thread, without the rank in front. */
DTRAIN__PRIVATE void dtrain__set_last_error(const char *text)
{
    snprintf(dtrain__error_text, sizeof dtrain__error_text, "%s", text);
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
 * The text may quote the last error: it is built aside first. */
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
    memcpy(dtrain__error_text, text, sizeof text);
    return code;
}

/* Skip the "rank 3: " of an error sentence, because dtrain_fail puts it in front again. */
DTRAIN__PRIVATE const char *dtrain__bare(const char *text)
{
    char prefix[32];
    snprintf(prefix, sizeof prefix, "rank %d: ", dtrain__thread_rank);
    return strncmp(text, prefix, strlen(prefix)) == 0 ? text + strlen(prefix) : text;
}
