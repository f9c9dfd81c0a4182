/* JSON: text that is written piece by piece, and a reader that believes nothing. */

#pragma once

#include "core/core_internal.h"
#include "core/log.h"

/* Text that grows. An allocation that fails is noted and later calls do nothing: whoever writes
 * looks once, at the end. */
typedef struct dtrain__text {
    const dtrain_allocator *allocator;
    char *at; /* (bytes), and a 0 behind it; NULL while empty */
    size_t bytes, room;
    bool failed; /* the sentence has been left */
} dtrain__text;

DTRAIN__PRINTF(2, 3)
DTRAIN__PRIVATE void dtrain__text_add(dtrain__text *text, const char *format, ...);
/* Append a string as JSON has it: quotes, escapes, and U+FFFD for what is not UTF-8. */
DTRAIN__PRIVATE void dtrain__text_add_string(dtrain__text *text, const char *string);
DTRAIN__PRIVATE void dtrain__text_free(dtrain__text *text);

#define DTRAIN__JSON_DEPTH 16

/* A reader that walks through a text once, and makes nothing of it. Calls return false at the end
 * of what they walk through and after an error, which stands in `result`; then all of them do. Time
 * is linear in the text, memory constant. */
typedef struct dtrain__json {
    const char *text, *end, *at;
    const char *what;   /* for sentences: the name of the file ... */
    const char *inside; /* ... and what is read there, set by the caller; or NULL */
    int depth;
    bool first[DTRAIN__JSON_DEPTH]; /* no member or item of this level has been read yet */
    dtrain_result result;           /* DTRAIN_OK, or DTRAIN_ERROR_DATA with a sentence */
} dtrain__json;

/* Say what a file is by its first bytes, if it is one that people take for a JSON text or a
 * safetensors file by mistake; NULL: it is none of these. */
DTRAIN__PRIVATE const char *dtrain__mistaken(const void *head, size_t bytes);
/* Begin to read `bytes` of a text that stays where it is. It is checked for UTF-8 first. */
DTRAIN__PRIVATE dtrain__json dtrain__json_begin(const char *what, const char *text, size_t bytes);
/* Enter an object ('{') or an array ('['). */
DTRAIN__PRIVATE bool dtrain__json_enter(dtrain__json *json, char bracket);
/* Go to the next member of an object and read its name; false at its end, which has been left. */
DTRAIN__PRIVATE bool dtrain__json_member(dtrain__json *json, char *name, size_t room);
/* Go to the next item of an array; false at its end, which has been left. */
DTRAIN__PRIVATE bool dtrain__json_item(dtrain__json *json);
/* Read a string: decoded, with a 0 behind it. One that is too long, has a \u0000 or half of a
 * surrogate pair is an error. */
DTRAIN__PRIVATE bool dtrain__json_string(dtrain__json *json, char *string, size_t room);
/* Read a number that is an integer in its range; 1.0, 1e3 and -0 are errors. */
DTRAIN__PRIVATE bool dtrain__json_u64(dtrain__json *json, uint64_t *value);
DTRAIN__PRIVATE bool dtrain__json_i64(dtrain__json *json, int64_t *value);
/* Read true or false. */
DTRAIN__PRIVATE bool dtrain__json_bool(dtrain__json *json, bool *value);
/* Return the kind of the value that comes next: '{', '[', '"', 't', 'f', 'n', '0' for a number, or
 * 0. */
DTRAIN__PRIVATE char dtrain__json_peek(dtrain__json *json);
/* Step over any value, checking it like the others. */
DTRAIN__PRIVATE bool dtrain__json_skip(dtrain__json *json);
/* Leave an error that says where in the text it is; the first one stands. Returns false. */
DTRAIN__PRINTF(2, 3)
DTRAIN__PRIVATE bool dtrain__json_fail(dtrain__json *json, const char *format, ...);
/* Check that nothing but blanks is left, and return the result. */
DTRAIN__PRIVATE dtrain_result dtrain__json_end(dtrain__json *json);
