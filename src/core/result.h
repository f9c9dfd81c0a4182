/* Results, version. */

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

/* "DTRAIN_ERROR_PEER" and its one-line meaning; both static strings, never NULL. */
DTRAIN_API const char *dtrain_result_name(dtrain_result result);
DTRAIN_API const char *dtrain_result_text(dtrain_result result);

/* The sentence left by the last failed call on this thread: which rank, which call, what was
 * expected, what was found, what to try. Valid until the next failing call on the same thread;
 * "" when nothing has failed yet. Like errno, it is not cleared by success. */
DTRAIN_API const char *dtrain_last_error(void);

/* For backends and callbacks: leaves this sentence for dtrain_last_error() and returns code. */
#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
DTRAIN_API dtrain_result
dtrain_fail(dtrain_result code, const char *format, ...);

/* Version the implementation was compiled from, e.g. "0.1.0". */
DTRAIN_API const char *dtrain_version(void);
