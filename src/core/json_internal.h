/* JSON: a text to write piece by piece, and a reader for untrusted texts. */

#pragma once

#include "core/core_internal.h"
#include "core/log.h"

/* Text that grows. After a failed allocation, later calls do nothing: the caller checks `failed`
 * once, at the end. */
typedef struct dtrain__text {
    const dtrain_allocator *allocator;
    char *at; /* (bytes) and a final 0; NULL while empty */
    size_t bytes, room;
    bool failed; /* true if there was no memory: dtrain_last_error has the sentence */
} dtrain__text;

DTRAIN__PRINTF(2, 3)
DTRAIN__PRIVATE void dtrain__text_add(dtrain__text *text, const char *format, ...);
DTRAIN__PRIVATE void dtrain__text_append(dtrain__text *text, const void *from, size_t bytes);
/* Append a string in quotes with JSON's escapes, and U+FFFD for each byte that is not UTF-8. */
DTRAIN__PRIVATE void dtrain__text_add_string(dtrain__text *text, const char *string);
DTRAIN__PRIVATE void dtrain__text_free(dtrain__text *text);

#define DTRAIN__JSON_DEPTH 16

/* A reader that passes a text once. Calls return false at the end of an object or array and after
 * an error, which is in `result`; after an error every later call returns false. Time is linear in
 * the text, memory constant. */
typedef struct dtrain__json {
    const char *text, *end, *at;
    const char *what;   /* name of the file, for sentences */
    const char *inside; /* entry being read, for sentences, set by the caller; or NULL */
    int depth;
    bool first[DTRAIN__JSON_DEPTH]; /* true until something of this level has been read */
    dtrain_result result;           /* DTRAIN_OK, or DTRAIN_ERROR_DATA with a sentence */
} dtrain__json;

/* Recognise by its first bytes a file that people often give instead of a JSON text or a
 * safetensors file, and return what it is; NULL for any other file. */
DTRAIN__PRIVATE const char *dtrain__mistaken(const void *head, size_t bytes);
/* Begin to read text (bytes), which must live until the end. */
DTRAIN__PRIVATE dtrain__json dtrain__json_begin(const char *what, const char *text, size_t bytes);
/* Enter an object ('{') or an array ('['). */
DTRAIN__PRIVATE bool dtrain__json_enter(dtrain__json *json, char bracket);
/* Go to the next member of an object and read its name; false at the end of the object. */
DTRAIN__PRIVATE bool dtrain__json_member(dtrain__json *json, char *name, size_t room);
/* Go to the next item of an array; false at the end of the array. */
DTRAIN__PRIVATE bool dtrain__json_item(dtrain__json *json);
/* Read a string, decode it and append a 0; if `string` is NULL, only check it. A string of `room`
 * bytes or more, \u0000 and half of a surrogate pair are errors. */
DTRAIN__PRIVATE bool dtrain__json_string(dtrain__json *json, char *string, size_t room);
/* Read an integer from 0 to 2^64 - 1, or to 2^63 - 1; 1.0, 1e3 and -0 are errors. */
DTRAIN__PRIVATE bool dtrain__json_u64(dtrain__json *json, uint64_t *value);
DTRAIN__PRIVATE bool dtrain__json_count(dtrain__json *json, int64_t *value);
/* Read true or false. */
DTRAIN__PRIVATE bool dtrain__json_bool(dtrain__json *json, bool *value);
/* Return the kind of the next value: '{', '[', '"', 't', 'f', 'n', '0' for a number, or 0. */
DTRAIN__PRIVATE char dtrain__json_peek(dtrain__json *json);
/* Check any value and step over it. */
DTRAIN__PRIVATE bool dtrain__json_skip(dtrain__json *json);
/* Report an error and its place in the text, unless there is an earlier error. Return false. */
DTRAIN__PRINTF(2, 3)
DTRAIN__PRIVATE bool dtrain__json_fail(dtrain__json *json, const char *format, ...);
/* Check that only blanks are left, and return the result. */
DTRAIN__PRIVATE dtrain_result dtrain__json_end(dtrain__json *json);
