/* Results and error sentences. */

#pragma once

#include "core/api.h"

/* One list makes the enum, the names and the sentences. */
#define DTRAIN_RESULT_LIST(X)                                                            \
    X(DTRAIN_OK, 0, "success")                                                           \
    X(DTRAIN_ERROR_ARGUMENT, -1, "an argument has a value the call cannot take")         \
    X(DTRAIN_ERROR_USAGE, -2, "the call is not allowed in this state")                   \
    X(DTRAIN_ERROR_UNSUPPORTED, -3, "this build or backend cannot do what was asked")    \
    X(DTRAIN_ERROR_MEMORY, -10, "memory could not be had")                               \
    X(DTRAIN_ERROR_SYSTEM, -11, "the operating system refused")                          \
    X(DTRAIN_ERROR_FILE, -12, "a file could not be read or written")                     \
    X(DTRAIN_ERROR_DATA, -13, "data does not have the expected form")                    \
    X(DTRAIN_ERROR_NOT_FOUND, -14, "there is nothing by this name")                      \
    X(DTRAIN_ERROR_END, -15, "there is no more data")                                    \
    X(DTRAIN_ERROR_MISMATCH, -20, "ranks disagree about what they are doing")            \
    X(DTRAIN_ERROR_PEER, -21, "another rank died, failed or left")                       \
    X(DTRAIN_ERROR_TIMEOUT, -22, "a deadline passed")                                    \
    X(DTRAIN_ERROR_RANK_FAILED, -23, "a rank started by dtrain_launch did not end well") \
    X(DTRAIN_ERROR_NUMERIC, -30, "a number that must be finite is not")                  \
    X(DTRAIN_ERROR_INTERNAL, -40, "dtrain broke one of its own rules")

typedef enum dtrain_result {
#define DTRAIN_RESULT_ENUM(name, value, text) name = value,
    DTRAIN_RESULT_LIST(DTRAIN_RESULT_ENUM)
#undef DTRAIN_RESULT_ENUM
        DTRAIN_RESULT_FORCE_INT = 0x7fffffff
} dtrain_result;

/* Return one line, the name and the meaning of a result: "DTRAIN_ERROR_PEER: another rank died,
 * failed or left". A static string, never NULL. */
DTRAIN_API const char *dtrain_result_text(dtrain_result result);

/* Return the sentence of the last failed call on this thread: the rank, the call, the expected and
 * the actual value, and what to try. It is valid until the next failing call on the same thread,
 * and "" if no call has failed. Success does not clear it (like errno). */
DTRAIN_API const char *dtrain_last_error(void);

/* Set the sentence of dtrain_last_error() and return code: for backends and callbacks. */
#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
DTRAIN_API dtrain_result
dtrain_fail(dtrain_result code, const char *format, ...);
