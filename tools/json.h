/* json.h: a reader that walks through a JSON text once (RFC 8259), for files of other programs.
 *
 *     json_reader r = json_begin(path, text, bytes);
 *     (void)json_enter(&r, '{');
 *     while (json_member(&r, name, sizeof name))
 *         if (strcmp(name, "width") == 0) ... else (void)json_skip(&r);
 *     result = json_end(&r);
 *
 * After an error, whose sentence names the file and the byte, every call returns false, and json_end the error. */
#ifndef JSON_H
#define JSON_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

enum { JSON_DEPTH = 32 };

typedef struct json_reader {
    const char *path, *begin, *at, *end;
    int depth;
    bool first[JSON_DEPTH]; /* no member or item of this level has been read */
    dtrain_result result;
} json_reader;

/* Read a character of UTF-8. Return its bytes; what is none is one byte, with a code of no character. */
static inline size_t utf8_read(const char *text, size_t bytes, uint32_t *code)
{
    static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    const uint8_t *at = (const uint8_t *)text;
    const size_t length = at[0] < 0x80                    ? 1
                          : at[0] >= 0xc2 && at[0] < 0xe0 ? 2
                          : at[0] >= 0xe0 && at[0] < 0xf0 ? 3
                          : at[0] >= 0xf0 && at[0] < 0xf5 ? 4
                                                          : 0;
    uint32_t found = length == 1 ? at[0] : at[0] & (0x7fu >> length);
    bool good = length > 0 && length <= bytes;
    for (size_t i = 1; good && i < length; i++) {
        good = (at[i] & 0xc0) == 0x80;
        found = found << 6 | (at[i] & 0x3f);
    }
    good = good && found >= least[length] && found < 0x110000 && (found & ~0x7ffu) != 0xd800;
    *code = good ? found : UINT32_MAX;
    return good ? length : 1;
}

/* Write a character as UTF-8. Return its bytes. */
static inline size_t utf8_write(uint32_t code, char text[4])
{
    static const uint32_t lead[] = {0, 0, 0xc0, 0xe0, 0xf0};
    const size_t length = code < 0x80 ? 1 : code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    for (size_t i = length; i-- > 1; code >>= 6) text[i] = (char)(0x80 | (code & 0x3f));
    text[0] = (char)(lead[length] | code);
    return length;
}

/* Leave an error, unless there is one; return false. */
static inline bool json_expected(json_reader *r, const char *what)
{
    if (r->result == DTRAIN_OK)
        r->result = dtrain_fail(DTRAIN_ERROR_DATA, "%s: expected %s at byte %zu", r->path, what,
                                (size_t)(r->at - r->begin));
    r->at = r->end;
    return false;
}

static inline json_reader json_begin(const char *path, const char *text, size_t bytes)
{
    json_reader r;
    memset(&r, 0, sizeof r);
    r.path = path;
    r.begin = r.at = text;
    r.end = text + bytes;
    if (bytes >= 3 && memcmp(text, "\xef\xbb\xbf", 3) == 0)
        (void)json_expected(&r, "UTF-8 without a byte order mark (BOM)");
    return r;
}

/* Return the character that comes next behind blanks; 0 at the end. */
static inline char json_peek(json_reader *r)
{
    while (r->at < r->end && (*r->at == ' ' || *r->at == '\n' || *r->at == '\r' || *r->at == '\t'))
        r->at++;
    return r->at < r->end ? *r->at : 0;
}

/* Go over blanks, and over a character if it is the next one. */
static inline bool json_accept(json_reader *r, char c)
{
    if (json_peek(r) != c) return false;
    r->at++;
    return true;
}

static inline bool json_enter(json_reader *r, char bracket)
{
    if (!json_accept(r, bracket)) return json_expected(r, bracket == '{' ? "'{'" : "'['");
    if (r->depth == JSON_DEPTH) return json_expected(r, "fewer levels");
    r->first[r->depth++] = true;
    return true;
}

/* Go to the next item of what was entered; false at its end, which has been left. */
static inline bool json_item(json_reader *r, char close)
{
    if (r->result != DTRAIN_OK || r->depth == 0) return false;
    if (json_accept(r, close)) return r->depth--, false;
    if (!r->first[r->depth - 1] && !json_accept(r, ','))
        return json_expected(r, close == '}' ? "',' or '}'" : "',' or ']'");
    r->first[r->depth - 1] = false;
    return true;
}

/* Read the XXXX of \uXXXX. */
static inline bool json__hex(json_reader *r, uint32_t *code)
{
    static const char digits[] = "0123456789abcdefABCDEF";
    *code = 0;
    for (int i = 0; i < 4; i++) {
        const char *digit = r->at < r->end && *r->at ? strchr(digits, *r->at) : NULL;
        if (!digit) return json_expected(r, "four hexadecimal digits");
        *code = *code << 4 | (uint32_t)(digit - digits < 16 ? digit - digits : digit - digits - 6);
        r->at++;
    }
    return true;
}

/* Read a character of a string, escaped or not. */
static inline bool json__character(json_reader *r, uint32_t *code)
{
    static const char plain[] = "\"\\/bfnrt", meant[] = "\"\\/\b\f\n\r\t";
    uint32_t low = 0;
    if (r->at == r->end || (unsigned char)*r->at < 0x20) return json_expected(r, "a character");
    if (*r->at != '\\') {
        r->at += utf8_read(r->at, (size_t)(r->end - r->at), code);
        return *code != UINT32_MAX || json_expected(r, "UTF-8 before it");
    }
    const char *found = ++r->at < r->end && *r->at ? strchr(plain, *r->at) : NULL;
    if (found) return *code = (uint8_t)meant[found - plain], r->at++, true;
    if (r->at == r->end || *r->at++ != 'u') return json_expected(r, "an escape before it");
    if (!json__hex(r, code)) return false;
    if (*code < 0xd800 || *code >= 0xe000) return true;
    if (*code < 0xdc00 && r->end - r->at > 1 && r->at[0] == '\\' && r->at[1] == 'u') {
        r->at += 2;
        if (!json__hex(r, &low)) return false;
    }
    if (low < 0xdc00 || low >= 0xe000) return json_expected(r, "the other half of a pair");
    *code = 0x10000 + ((*code & 0x3ff) << 10 | (low & 0x3ff));
    return true;
}

/* Read a string as UTF-8, with a 0 behind it; *length, if it is not NULL, is its bytes. A string that has no room is an
 * error; to NULL: it is stepped over. Decoded it is never longer than in the text. */
static inline bool json_text(json_reader *r, char *to, size_t room, size_t *length)
{
    size_t used = 0;
    if (!json_accept(r, '"')) return json_expected(r, "a string");
    while (r->at == r->end || *r->at != '"') {
        char utf8[4];
        uint32_t code = 0;
        if (!json__character(r, &code)) return false;
        const size_t bytes = utf8_write(code, utf8);
        if (to && bytes >= room - used) return json_expected(r, "a shorter string");
        if (to) memcpy(to + used, utf8, bytes);
        used += bytes;
    }
    r->at++;
    if (to) to[used] = 0;
    if (length) *length = used;
    return true;
}

static inline bool json_string(json_reader *r, char *to, size_t room)
{
    return json_text(r, to, room, NULL);
}

/* Go to the next member of an object and read its name; false at the object's end, which has been left. */
static inline bool json_member(json_reader *r, char *name, size_t room)
{
    if (!json_item(r, '}') || !json_string(r, name, room)) return false;
    return json_accept(r, ':') || json_expected(r, "':'");
}

/* Step over any value. */
static inline bool json_skip(json_reader *r)
{
    static const char *const words[] = {"true", "false", "null"};
    const char kind = json_peek(r), *first = r->at;
    if (kind == '{' && json_enter(r, '{'))
        while (json_member(r, NULL, 0)) (void)json_skip(r);
    else if (kind == '[' && json_enter(r, '['))
        while (json_item(r, ']')) (void)json_skip(r);
    else if (kind == '"') return json_string(r, NULL, 0);
    if (r->at > first || r->result != DTRAIN_OK) return r->result == DTRAIN_OK;
    for (int i = 0; i < 3; i++) {
        const size_t length = strlen(words[i]);
        if ((size_t)(r->end - r->at) < length || memcmp(r->at, words[i], length) != 0) continue;
        return r->at += length, true;
    }
    while (r->at < r->end && *r->at && strchr("+-.0123456789Ee", *r->at)) r->at++;
    return r->at > first || json_expected(r, "a value");
}

/* Read an integer from 0 on, below `most`. */
static inline bool json_integer(json_reader *r, int32_t most, int32_t *value)
{
    (void)json_peek(r);
    const char *first = r->at;
    for (*value = 0; r->at < r->end && *r->at >= '0' && *r->at <= '9'; r->at++) {
        if (*value > (INT32_MAX - 9) / 10 || *value * 10 + (*r->at - '0') >= most)
            return json_expected(r, "a smaller number");
        *value = *value * 10 + (*r->at - '0');
    }
    return r->at > first || json_expected(r, "a number");
}

/* Check that nothing follows. Return the error, if there was one. */
static inline dtrain_result json_end(json_reader *r)
{
    if (r->result == DTRAIN_OK && (json_peek(r) || r->at < r->end))
        (void)json_expected(r, "the end");
    return r->result;
}

#endif /* JSON_H */
