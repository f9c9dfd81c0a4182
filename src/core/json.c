/* JSON (RFC 8259)
 *
 * The reader is stricter than most, so that no text has two meanings: bytes that are not UTF-8,
 * half of a surrogate pair, \u0000, an extra comma and a number with a leading zero are errors. The
 * caller must find duplicate members. The reader builds no tree and allows 16 levels: its memory
 * and stack do not depend on the text. No call depends on the locale. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/json_internal.h"
#include "core/log.h"
#include "core/result.h"

/* ---- Text that grows --------------------------------------------------------------------------*/

/* Make room for more bytes and a final 0. The room doubles, so the total time is linear in the
 * text. */
static bool dtrain__text_grow(dtrain__text *text, size_t more)
{
    while (!text->failed && text->bytes + more >= text->room)
        text->failed = !dtrain__grow(text->allocator, (void **)&text->at, text->room, &text->room,
                                     1, "a text");
    return !text->failed;
}

DTRAIN__PRIVATE void dtrain__text_append(dtrain__text *text, const void *from, size_t bytes)
{
    if (!dtrain__text_grow(text, bytes)) return;
    memcpy(text->at + text->bytes, from, bytes);
    text->bytes += bytes;
    text->at[text->bytes] = 0;
}

DTRAIN__PRIVATE void dtrain__text_add(dtrain__text *text, const char *format, ...)
{
    va_list args, again;
    va_start(args, format);
    va_copy(again, args);
    const int length = vsnprintf(NULL, 0, format, args);
    if (length >= 0 && dtrain__text_grow(text, (size_t)length)) {
        vsnprintf(text->at + text->bytes, (size_t)length + 1, format, again);
        text->bytes += (size_t)length;
    } else text->failed = true;
    va_end(again);
    va_end(args);
}

DTRAIN__PRIVATE void dtrain__text_add_string(dtrain__text *text, const char *string)
{
    const char *end = string + strlen(string);
    dtrain__text_append(text, "\"", 1);
    while (string < end) {
        const size_t bytes = dtrain__utf8_bytes(string, (size_t)(end - string));
        if (bytes == 0) dtrain__text_append(text, "\xef\xbf\xbd", 3);
        else if (*string == '"' || *string == '\\') dtrain__text_add(text, "\\%c", *string);
        else if (*string == '\n') dtrain__text_append(text, "\\n", 2);
        else if (bytes == 1 && *string < 0x20) dtrain__text_add(text, "\\u%04x", *string);
        else dtrain__text_append(text, string, bytes);
        string += bytes ? bytes : 1;
    }
    dtrain__text_append(text, "\"", 1);
}

DTRAIN__PRIVATE void dtrain__text_free(dtrain__text *text)
{
    dtrain__free(text->allocator, text->at, text->room, 1);
    text->at = NULL;
    text->bytes = text->room = 0;
}

/* ---- Reading ----------------------------------------------------------------------------------*/

/* Empty the text after an error: every later call then finds its end, and no call has to check for
 * an earlier error. */
DTRAIN__PRIVATE bool dtrain__json_fail(dtrain__json *json, const char *format, ...)
{
    char text[DTRAIN__ERROR_BYTES];
    va_list args;
    if (json->result != DTRAIN_OK) return false;
    const int used =
        snprintf(text, sizeof text, "%.600s:%s%s%s at byte %zu of the JSON: ", json->what,
                 json->inside ? " \"" : "", dtrain__short(json->inside), json->inside ? "\"," : "",
                 (size_t)(json->at - json->text));
    va_start(args, format);
    vsnprintf(text + used, sizeof text - (size_t)used, format, args);
    va_end(args);
    json->result = dtrain_fail(DTRAIN_ERROR_DATA, "%s", text);
    json->at = json->end = json->text;
    return false;
}

/* Report the most common error: the text does not continue with `what`. */
static bool dtrain__json_expected(dtrain__json *json, const char *what)
{
    if (json->at == json->end)
        return dtrain__json_fail(json, "expected %s, found the end of the text", what);
    const unsigned char found = (unsigned char)*json->at;
    if (found <= 0x20 || found >= 0x7f)
        return dtrain__json_fail(json, "expected %s, found byte 0x%02x", what, found);
    return dtrain__json_fail(json, "expected %s, found '%c'", what, found);
}

DTRAIN__PRIVATE const char *dtrain__mistaken(const void *head, size_t bytes)
{
    static const char torch[] = "this is torch's own format, not safetensors: model.save_pretrained"
                                "(DIR, safe_serialization=True) converts it";
    static const char *const begins[][2] = {
        {"\xef\xbb\xbf", "a byte order mark (BOM), expected UTF-8 without one"},
        {"version https://git-lfs", "this is a pointer of git-lfs: git lfs pull gets the file"},
        {"<", "this is a web page, expected what its link leads to"},
        {"GGUF", "this is a GGUF file, expected the safetensors that it was made of"},
        {"PK\3\4", torch}, /* a zip archive */
        {"\x80\2", torch}, /* a pickle, of torch before 1.6 */
    };
    for (size_t i = 0; i < sizeof begins / sizeof *begins; i++) {
        const size_t length = strlen(begins[i][0]);
        if (bytes >= length && memcmp(head, begins[i][0], length) == 0) return begins[i][1];
    }
    return NULL;
}

/* Check the whole text for UTF-8: strings can then be copied byte by byte. */
DTRAIN__PRIVATE dtrain__json dtrain__json_begin(const char *what, const char *text, size_t bytes)
{
    dtrain__json json;
    memset(&json, 0, sizeof json);
    json.what = what;
    json.text = json.at = text ? text : "";
    json.end = json.text + bytes;
    const char *mistaken = dtrain__mistaken(json.text, bytes);
    if (mistaken) dtrain__json_fail(&json, "%s", mistaken);
    while (json.at < json.end) {
        const size_t length = dtrain__utf8_bytes(json.at, (size_t)(json.end - json.at));
        if (length == 0) dtrain__json_expected(&json, "UTF-8");
        json.at += length;
    }
    json.at = json.text;
    return json;
}

/* Step over the next byte if it is `byte`. */
static bool dtrain__json_accept(dtrain__json *json, char byte)
{
    const bool found = json->at < json->end && *json->at == byte;
    if (found) json->at++;
    return found;
}

static void dtrain__json_blanks(dtrain__json *json)
{
    while (json->at < json->end &&
           (*json->at == ' ' || *json->at == '\t' || *json->at == '\n' || *json->at == '\r'))
        json->at++;
}

DTRAIN__PRIVATE bool dtrain__json_enter(dtrain__json *json, char bracket)
{
    dtrain__json_blanks(json);
    if (!dtrain__json_accept(json, bracket))
        return dtrain__json_expected(json, bracket == '{' ? "an object" : "an array");
    if (json->depth == DTRAIN__JSON_DEPTH)
        return dtrain__json_fail(json, "more than %d levels", DTRAIN__JSON_DEPTH);
    json->first[json->depth++] = true;
    return true;
}

/* Leave the object or array at its closing bracket, or step over the comma before an entry. */
static bool dtrain__json_next(dtrain__json *json, char close)
{
    if (json->depth == 0) return dtrain__json_fail(json, "nothing has been entered");
    bool *first = &json->first[json->depth - 1];
    dtrain__json_blanks(json);
    if (dtrain__json_accept(json, close)) {
        json->depth--;
        return false;
    }
    if (!*first && !dtrain__json_accept(json, ','))
        return dtrain__json_expected(json, close == '}' ? "',' or '}'" : "',' or ']'");
    *first = false;
    return json->at < json->end || dtrain__json_expected(json, "more");
}

DTRAIN__PRIVATE bool dtrain__json_member(dtrain__json *json, char *name, size_t room)
{
    if (!dtrain__json_next(json, '}') || !dtrain__json_string(json, name, room)) return false;
    dtrain__json_blanks(json);
    return dtrain__json_accept(json, ':') || dtrain__json_expected(json, "':'");
}

DTRAIN__PRIVATE bool dtrain__json_item(dtrain__json *json) { return dtrain__json_next(json, ']'); }

/* Read the XXXX of \uXXXX. */
static bool dtrain__json_hex(dtrain__json *json, uint32_t *code)
{
    static const char digits[] = "0123456789abcdefABCDEF";
    *code = 0;
    for (int i = 0; i < 4; i++) {
        const char *digit = json->at < json->end && *json->at ? strchr(digits, *json->at) : NULL;
        if (!digit) return dtrain__json_expected(json, "four hexadecimal digits");
        *code = *code << 4 | (uint32_t)(digit - digits - (digit - digits < 16 ? 0 : 6));
        json->at++;
    }
    return true;
}

/* Read an escape after its backslash. Write the character as UTF-8, and return its number of bytes;
 * 0 after an error. */
static size_t dtrain__json_escape(dtrain__json *json, char utf8[4])
{
    static const char names[] = "\"\\/bfnrt", values[] = "\"\\/\b\f\n\r\t";
    uint32_t code, low = 0;
    for (size_t i = 0; i < sizeof names - 1; i++)
        if (dtrain__json_accept(json, names[i])) {
            utf8[0] = values[i];
            return 1;
        }
    if (!dtrain__json_accept(json, 'u')) return dtrain__json_expected(json, "an escape"), 0;
    if (!dtrain__json_hex(json, &code)) return 0;
    if (code >= 0xd800 && code < 0xdc00) { /* first of a pair; the second is 0xdc00 to 0xdfff */
        if (dtrain__json_accept(json, '\\') && dtrain__json_accept(json, 'u'))
            (void)dtrain__json_hex(json, &low);
        if (low >= 0xdc00 && low < 0xe000) code = 0x10000 + ((code & 0x3ff) << 10 | (low & 0x3ff));
    }
    if (code == 0 || (code >= 0xd800 && code < 0xe000))
        return dtrain__json_fail(json, "\\u%04x is not a character of a text", code), 0;
    const size_t bytes = code < 0x80 ? 1 : code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    static const uint32_t lead[] = {0, 0, 0xc0, 0xe0, 0xf0};
    for (size_t i = bytes; i-- > 1; code >>= 6) utf8[i] = (char)(0x80 | (code & 0x3f));
    utf8[0] = (char)(lead[bytes] | code);
    return bytes;
}

DTRAIN__PRIVATE bool dtrain__json_string(dtrain__json *json, char *string, size_t room)
{
    size_t used = 0;
    dtrain__json_blanks(json);
    if (!dtrain__json_accept(json, '"')) return dtrain__json_expected(json, "a string");
    while (!dtrain__json_accept(json, '"')) {
        char utf8[4];
        size_t bytes = 1;
        if (json->at == json->end || (unsigned char)*json->at < 0x20)
            return dtrain__json_expected(json, "'\"'");
        utf8[0] = *json->at++;
        if (utf8[0] == '\\') bytes = dtrain__json_escape(json, utf8);
        if (bytes == 0) return false;
        if (!string) continue;
        if (bytes >= room - used)
            return dtrain__json_fail(json, "a string of more than %zu bytes", room - 1);
        for (size_t i = 0; i < bytes; i++) string[used++] = utf8[i];
    }
    if (string) string[used] = 0;
    return true;
}

/* Read digits, at least one. */
static bool dtrain__json_digits(dtrain__json *json, const char *expected)
{
    const char *first = json->at;
    while (json->at < json->end && *json->at >= '0' && *json->at <= '9') json->at++;
    return json->at > first || dtrain__json_expected(json, expected);
}

/* Convert without strtod, which follows the locale and rounds numbers above 2^53. */
DTRAIN__PRIVATE bool dtrain__json_u64(dtrain__json *json, uint64_t *value)
{
    dtrain__json_blanks(json);
    const char *at = json->at;
    *value = 0;
    if (!dtrain__json_digits(json, "an integer in its range")) return false;
    if (*at == '0' && json->at - at > 1) return dtrain__json_fail(json, "a leading zero");
    if (json->at < json->end && strchr(".eE", *json->at))
        return dtrain__json_expected(json, "an integer");
    for (; at < json->at; at++) {
        const uint64_t digit = (uint64_t)(*at - '0');
        if (*value > (UINT64_MAX - digit) / 10)
            return dtrain__json_fail(json, "a number of 2^64 or more");
        *value = *value * 10 + digit;
    }
    return true;
}

DTRAIN__PRIVATE bool dtrain__json_count(dtrain__json *json, int64_t *value)
{
    uint64_t number;
    *value = 0;
    if (!dtrain__json_u64(json, &number)) return false;
    if (number > INT64_MAX) return dtrain__json_fail(json, "a number of 2^63 or more");
    *value = (int64_t)number;
    return true;
}

/* Step over true, false or null. If letters follow the word, the next read fails. */
static bool dtrain__json_word(dtrain__json *json, const char *word)
{
    for (const char *c = word; *c; c++)
        if (!dtrain__json_accept(json, *c)) return dtrain__json_expected(json, word);
    return true;
}

DTRAIN__PRIVATE bool dtrain__json_bool(dtrain__json *json, bool *value)
{
    const char kind = dtrain__json_peek(json);
    *value = kind == 't';
    if (kind != 't' && kind != 'f') return dtrain__json_expected(json, "true or false");
    return dtrain__json_word(json, *value ? "true" : "false");
}

DTRAIN__PRIVATE char dtrain__json_peek(dtrain__json *json)
{
    dtrain__json_blanks(json);
    const char c = json->at < json->end ? *json->at : 0;
    if (c == '-' || (c >= '0' && c <= '9')) return '0';
    return c && strchr("{[\"tfn", c) ? c : 0;
}

/* Recursion ends at DTRAIN__JSON_DEPTH. */
DTRAIN__PRIVATE bool dtrain__json_skip(dtrain__json *json)
{
    switch (dtrain__json_peek(json)) {
    case '{':
        if (!dtrain__json_enter(json, '{')) return false;
        while (dtrain__json_member(json, NULL, 0)) (void)dtrain__json_skip(json);
        return json->result == DTRAIN_OK;
    case '[':
        if (!dtrain__json_enter(json, '[')) return false;
        while (dtrain__json_item(json)) (void)dtrain__json_skip(json);
        return json->result == DTRAIN_OK;
    case '"': return dtrain__json_string(json, NULL, 0);
    case '0': /* -? (0 | [1-9][0-9]*) (. [0-9]+)? ([eE] [+-]? [0-9]+)? */
        (void)dtrain__json_accept(json, '-');
        if (!dtrain__json_accept(json, '0') && !dtrain__json_digits(json, "a digit")) return false;
        if (dtrain__json_accept(json, '.') && !dtrain__json_digits(json, "a digit")) return false;
        if (!dtrain__json_accept(json, 'e') && !dtrain__json_accept(json, 'E')) return true;
        if (!dtrain__json_accept(json, '+')) (void)dtrain__json_accept(json, '-');
        return dtrain__json_digits(json, "a digit");
    case 't': return dtrain__json_word(json, "true");
    case 'f': return dtrain__json_word(json, "false");
    case 'n': return dtrain__json_word(json, "null");
    default: return dtrain__json_expected(json, "a value");
    }
}

DTRAIN__PRIVATE dtrain_result dtrain__json_end(dtrain__json *json)
{
    dtrain__json_blanks(json);
    if (json->at < json->end || json->depth > 0) dtrain__json_expected(json, "nothing more");
    return json->result;
}
