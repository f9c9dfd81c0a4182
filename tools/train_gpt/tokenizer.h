/* tokenizer.h: GPT-2's tokenizer, byte-level byte pair encoding (Radford et al., 2019), from its files.
 *
 *     DIR/vocab.json, DIR/merges.txt     as Hugging Face has them: encodes and decodes
 *     gpt2_tokenizer.bin                 as llm.c has it: decodes
 *
 * A text is cut into pieces (words with the blank before them, numbers, runs of symbols, runs of
 * blanks), and in each piece, from single bytes on, the pair of neighbours that stands first in the
 * list of merges becomes one token, again and again.
 *
 * Letters and numbers are those of the Unicode version in unicode_classes.h. A byte that is not UTF-8
 * is a symbol of its own. "<|endoftext|>" in a text is the token of that name, if there is one. */
#ifndef TOKENIZER_H
#define TOKENIZER_H

#include "tools/files.h"
#include "tools/json.h"
#include "unicode_classes.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TOKENIZER_MAGIC = 20240328, TOKENIZER_MOST = 1 << 24 /* tokens */ };

/* What a pair of neighbours becomes. */
typedef struct tokenizer_merge {
    int32_t left, right; /* left -1: an empty place */
    int32_t rank, token; /* a lower rank goes first */
} tokenizer_merge;

typedef struct tokenizer {
    int32_t count;           /* of tokens; ids are 0 to count - 1 */
    int32_t end_of_text;     /* or -1 */
    char *text;              /* of all tokens, in order ... */
    size_t *begin;           /* (count + 1) ... token i from begin[i] to begin[i + 1] */
    int32_t *names;          /* (name_room) ids by the hash of their text; -1: an empty place */
    size_t name_room;        /* a power of two, twice the count at least */
    int32_t bytes[256];      /* the tokens of single bytes; -1: there is none */
    tokenizer_merge *merges; /* (merge_room) by the hash of the pair; NULL: cannot encode */
    size_t merge_room;       /* as name_room */
} tokenizer;

typedef struct token_list {
    int32_t *at; /* (room), count in use; free it with free */
    size_t count, room;
} token_list;

static inline void tokenizer_close(tokenizer *t)
{
    free(t->text);
    free(t->begin);
    free(t->names);
    free(t->merges);
    memset(t, 0, sizeof *t);
}

static inline dtrain_result tokenizer__memory(void)
{
    return dtrain_fail(DTRAIN_ERROR_MEMORY, "no memory for a tokenizer");
}

/* ---- tokens by their text, merges by their pair --------------------------------------------- */

static inline size_t tokenizer__room(size_t count)
{
    size_t room = 16;
    while (room < 2 * count) room *= 2;
    return room;
}

/* FNV-1a */
static inline size_t tokenizer__hash(const char *text, size_t bytes)
{
    uint64_t hash = 14695981039346656037u;
    for (size_t i = 0; i < bytes; i++) hash = (hash ^ (uint8_t)text[i]) * 1099511628211u;
    return (size_t)(hash ^ hash >> 32);
}

/* Return the place of a token in names, or the empty one where it would be. */
static inline size_t tokenizer__place(const tokenizer *t, const char *text, size_t bytes)
{
    size_t at = tokenizer__hash(text, bytes) & (t->name_room - 1);
    for (; t->names[at] >= 0; at = (at + 1) & (t->name_room - 1)) {
        const size_t *begin = &t->begin[t->names[at]];
        if (begin[1] - begin[0] == bytes && memcmp(t->text + begin[0], text, bytes) == 0) break;
    }
    return at;
}

/* Return the id of a text, or -1. */
static inline int32_t tokenizer_find(const tokenizer *t, const char *text, size_t bytes)
{
    return t->names[tokenizer__place(t, text, bytes)];
}

/* Return the place of a pair in merges, or the empty one where it would be. */
static inline tokenizer_merge *tokenizer__pair(const tokenizer *t, int32_t left, int32_t right)
{
    const uint64_t pair = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
    size_t at = (size_t)(pair * 0x9e3779b97f4a7c15u >> 20) & (t->merge_room - 1);
    while (t->merges[at].left >= 0 && (t->merges[at].left != left || t->merges[at].right != right))
        at = (at + 1) & (t->merge_room - 1);
    return &t->merges[at];
}

/* Make what is looked up from the texts: names, bytes, the end of text. Of two tokens with the same
 * text, as some of llm.c's, the first is found. */
static inline dtrain_result tokenizer__index(tokenizer *t)
{
    static const char end[] = "<|endoftext|>";
    t->name_room = tokenizer__room((size_t)t->count);
    t->names = (int32_t *)malloc(t->name_room * sizeof *t->names);
    if (!t->names) return tokenizer__memory();
    for (size_t i = 0; i < t->name_room; i++) t->names[i] = -1;
    for (int32_t id = 0; id < t->count; id++) {
        const size_t begin = t->begin[id];
        const size_t at = tokenizer__place(t, t->text + begin, t->begin[id + 1] - begin);
        if (t->names[at] < 0) t->names[at] = id;
    }
    for (int i = 0; i < 256; i++) {
        const char byte = (char)i;
        t->bytes[i] = tokenizer_find(t, &byte, 1);
    }
    t->end_of_text = tokenizer_find(t, end, sizeof end - 1);
    return DTRAIN_OK;
}

/* ---- characters ----------------------------------------------------------------------------- */

/* Vocabularies are text: each byte stands there as a character, itself where it is printed in Latin-1,
 * one from U+0100 on where it is not. Return the byte of a character, or -1. */
static inline int tokenizer__byte(uint32_t code)
{
    uint32_t next = 256;
    if ((code >= '!' && code <= '~') || (code >= 0xa1 && code <= 0xac) ||
        (code >= 0xae && code <= 0xff))
        return (int)code;
    for (uint32_t byte = 0; byte < 256; byte++) {
        if ((byte >= '!' && byte <= '~') || (byte >= 0xa1 && byte != 0xad)) continue;
        if (code == next++) return (int)byte;
    }
    return -1;
}

/* ---- vocab.json ----------------------------------------------------------------------------- */

/* Turn characters that stand for bytes into these, in place: text (*bytes). */
static inline bool tokenizer__to_bytes(char *text, size_t *bytes)
{
    size_t used = 0;
    for (size_t at = 0; at < *bytes;) {
        uint32_t code;
        at += utf8_read(text + at, *bytes - at, &code);
        const int byte = tokenizer__byte(code);
        if (byte < 0) return false;
        text[used++] = (char)byte;
    }
    *bytes = used;
    return true;
}

/* Read a token, quoted, to text + *used, which has room for the rest of the file. */
static inline bool tokenizer__json_token(json_reader *r, char *text, size_t *used)
{
    size_t bytes = 0;
    if (!json_text(r, text + *used, (size_t)(r->end - r->at) + 1, &bytes)) return false;
    if (!tokenizer__to_bytes(text + *used, &bytes))
        return json_expected(r, "before it, characters that stand for bytes");
    *used += bytes;
    return true;
}

/* Read all members of {"token": id, ...} in the order of the file: where the text of each begins, and
 * its id. */
static inline bool tokenizer__json_members(json_reader *r, char *text, size_t *begins, int32_t *ids,
                                           int32_t *count)
{
    size_t used = 0;
    if (!json_enter(r, '{')) return false;
    for (*count = 0; json_item(r, '}'); ++*count) {
        begins[*count] = used;
        if (!tokenizer__json_token(r, text, &used)) return false;
        if (!json_accept(r, ':')) return json_expected(r, "':'");
        if (!json_integer(r, TOKENIZER_MOST, &ids[*count])) return false;
    }
    begins[*count] = used;
    return r->result == DTRAIN_OK;
}

/* Put the members in the order of their ids. */
static inline dtrain_result tokenizer__sort(tokenizer *t, const char *path, const char *text,
                                            const size_t *begins, const int32_t *ids)
{
    const size_t count = (size_t)t->count;
    int32_t *where = (int32_t *)malloc((count + 1) * sizeof *where);
    dtrain_result result = where ? DTRAIN_OK : tokenizer__memory();
    for (size_t i = 0; i < count && where; i++) where[i] = -1;
    for (int32_t i = 0; i < t->count && result == DTRAIN_OK; i++) {
        if (ids[i] >= t->count || where[ids[i]] >= 0)
            result = dtrain_fail(DTRAIN_ERROR_DATA,
                                 "%s: id %d is there twice or beyond the %d tokens, expected 0 to "
                                 "%d, each once",
                                 path, (int)ids[i], (int)t->count, (int)t->count - 1);
        else where[ids[i]] = i;
    }
    for (size_t id = 0, used = 0; id <= count && result == DTRAIN_OK; id++) {
        t->begin[id] = used;
        if (id == count) break;
        const size_t *begin = &begins[where[id]];
        memcpy(t->text + used, text + begin[0], begin[1] - begin[0]);
        used += begin[1] - begin[0];
    }
    free(where);
    return result;
}

/* Read the text of a vocab.json. */
static inline dtrain_result tokenizer_read_vocabulary(tokenizer *t, const char *path,
                                                      const char *json, size_t bytes)
{
    json_reader r = json_begin(path, json, bytes);
    size_t most = 1; /* members: each has a colon */
    for (size_t i = 0; i < bytes; i++) most += json[i] == ':';
    char *text = (char *)malloc(bytes + 1);
    size_t *begins = (size_t *)malloc((most + 1) * sizeof *begins);
    int32_t *ids = (int32_t *)malloc((most + 1) * sizeof *ids);
    t->text = (char *)malloc(bytes + 1);
    t->begin = (size_t *)malloc((most + 1) * sizeof *t->begin);
    dtrain_result result =
        text && begins && ids && t->text && t->begin ? DTRAIN_OK : tokenizer__memory();
    if (result == DTRAIN_OK) (void)tokenizer__json_members(&r, text, begins, ids, &t->count);
    if (result == DTRAIN_OK) result = json_end(&r);
    if (result == DTRAIN_OK) result = tokenizer__sort(t, path, text, begins, ids);
    free(text);
    free(begins);
    free(ids);
    return result == DTRAIN_OK ? tokenizer__index(t) : result;
}

/* ---- merges.txt ----------------------------------------------------------------------------- */

/* Read one token of a line: up to a blank or the line's end. */
static inline bool tokenizer__line_token(json_reader *r, char *text, size_t *used)
{
    const size_t before = *used;
    while (r->at < r->end && *r->at != ' ' && *r->at != '\n' && *r->at != '\r') {
        uint32_t code;
        r->at += utf8_read(r->at, (size_t)(r->end - r->at), &code);
        const int byte = tokenizer__byte(code);
        if (byte < 0) return false;
        text[(*used)++] = (char)byte;
    }
    return *used > before;
}

/* Read one line, "left right", as the merge of this rank. text has room for a line. */
static inline bool tokenizer__merge_line(tokenizer *t, json_reader *r, char *text, int32_t rank)
{
    size_t left = 0;
    if (!tokenizer__line_token(r, text, &left) || r->at == r->end || *r->at++ != ' ')
        return json_expected(r, "two tokens with a blank between them");
    size_t both = left;
    if (!tokenizer__line_token(r, text, &both)) return json_expected(r, "a second token");
    if (r->at < r->end && *r->at == '\r') r->at++;
    if (r->at < r->end && *r->at++ != '\n') return json_expected(r, "the end of the line");
    const int32_t a = tokenizer_find(t, text, left);
    const int32_t b = tokenizer_find(t, text + left, both - left);
    const int32_t token = tokenizer_find(t, text, both);
    if (a < 0 || b < 0 || token < 0)
        return json_expected(r, "before it, two tokens that the vocabulary has, and their "
                                "union too");
    tokenizer_merge *merge = tokenizer__pair(t, a, b);
    if (merge->left >= 0) return true; /* a second time: the first counts */
    merge->left = a, merge->right = b;
    merge->rank = rank, merge->token = token;
    return true;
}

/* Read the text of a merges.txt, after the vocabulary. A first line that begins with "#version" is
 * none. */
static inline dtrain_result tokenizer_read_merges(tokenizer *t, const char *path, const char *lines,
                                                  size_t bytes)
{
    json_reader r = json_begin(path, lines, bytes);
    size_t count = 1;
    int32_t rank = 0;
    char *text = (char *)malloc(bytes + 1);
    for (size_t i = 0; i < bytes; i++) count += lines[i] == '\n';
    t->merge_room = tokenizer__room(count);
    t->merges = (tokenizer_merge *)malloc(t->merge_room * sizeof *t->merges);
    dtrain_result result = text && t->merges ? DTRAIN_OK : tokenizer__memory();
    for (size_t i = 0; i < t->merge_room && t->merges; i++) t->merges[i].left = -1;
    if (bytes >= 8 && memcmp(lines, "#version", 8) == 0)
        while (r.at < r.end && *r.at++ != '\n') {}
    while (r.at < r.end && result == DTRAIN_OK) {
        if (*r.at == '\n') r.at++; /* an empty line, as the last may be */
        else if (!tokenizer__merge_line(t, &r, text, rank++)) result = r.result;
    }
    free(text);
    return result == DTRAIN_OK ? r.result : result;
}

/* ---- gpt2_tokenizer.bin --------------------------------------------------------------------- */

/* Read such a file: 256 int32 (magic, version, count, end of text from version 2 on), then a byte for
 * the length of each token, and its bytes. */
static inline dtrain_result tokenizer_read_bin(tokenizer *t, const char *path, const char *file,
                                               size_t bytes)
{
    enum { HEADER = 256 * sizeof(int32_t) };
    uint32_t header[4] = {0, 0, 0, 0};
    size_t at = HEADER, used = 0;
    for (size_t i = 0; i < 16 && bytes >= HEADER; i++)
        header[i / 4] |= (uint32_t)(uint8_t)file[i] << 8 * (i % 4);
    if (header[0] != TOKENIZER_MAGIC || header[1] < 1 || header[1] > 2)
        return dtrain_fail(
            DTRAIN_ERROR_DATA,
            "%s: expected a tokenizer of llm.c, magic %d and version 1 or 2, found %u "
            "and %u",
            path, TOKENIZER_MAGIC, header[0], header[1]);
    if (header[2] > bytes - HEADER)
        return dtrain_fail(DTRAIN_ERROR_DATA, "%s: it has %zu bytes, which cannot be %u tokens",
                           path, bytes, header[2]);
    t->count = (int32_t)header[2];
    t->text = (char *)malloc(bytes);
    t->begin = (size_t *)malloc(((size_t)header[2] + 1) * sizeof *t->begin);
    if (!t->text || !t->begin) return tokenizer__memory();
    for (int32_t id = 0; id < t->count; id++) {
        const size_t length = at < bytes ? (uint8_t)file[at] : 0;
        t->begin[id] = used;
        if (at >= bytes || length > bytes - at - 1)
            return dtrain_fail(DTRAIN_ERROR_DATA, "%s: it ends in token %d of %d", path, (int)id,
                               (int)t->count);
        memcpy(t->text + used, file + at + 1, length);
        at += 1 + length;
        used += length;
    }
    t->begin[t->count] = used;
    if (at != bytes)
        return dtrain_fail(DTRAIN_ERROR_DATA, "%s: it has %zu bytes behind its %d tokens", path,
                           bytes - at, (int)t->count);
    const dtrain_result result = tokenizer__index(t);
    const uint32_t end = header[1] == 2 ? header[3] : 50256;
    t->end_of_text = end < header[2] ? (int32_t)end : -1;
    return result;
}

/* ---- files ---------------------------------------------------------------------------------- */

/* Open a tokenizer: a directory with vocab.json and merges.txt, or a file of llm.c. tokenizer_close
 * frees it, also after a failure. */
static inline dtrain_result tokenizer_open(tokenizer *t, const char *path)
{
    static const char *const files[] = {"vocab.json", "merges.txt"};
    dtrain_result result = DTRAIN_OK;
    char name[4096], *text;
    size_t bytes, length = strlen(path);
    memset(t, 0, sizeof *t);
    if (length > 4 && strcmp(path + length - 4, ".bin") == 0) {
        result = read_file(path, &text, &bytes);
        if (result == DTRAIN_OK) result = tokenizer_read_bin(t, path, text, bytes);
        free(text);
        return result;
    }
    for (int i = 0; i < 2 && result == DTRAIN_OK; i++) {
        snprintf(name, sizeof name, "%.4000s/%s", path, files[i]);
        result = read_file(name, &text, &bytes);
        if (result == DTRAIN_OK)
            result = i ? tokenizer_read_merges(t, name, text, bytes)
                       : tokenizer_read_vocabulary(t, name, text, bytes);
        free(text);
    }
    return result;
}

/* ---- decoding ------------------------------------------------------------------------------- */

/* Return the text of a token, and its bytes; empty for what is none. */
static inline const char *tokenizer_text(const tokenizer *t, int32_t id, size_t *bytes)
{
    if (id < 0 || id >= t->count) return *bytes = 0, "";
    *bytes = t->begin[id + 1] - t->begin[id];
    return t->text + t->begin[id];
}

/* ---- pieces of a text ----------------------------------------------------------------------- */

typedef enum tokenizer__class {
    TOKENIZER_LETTER,
    TOKENIZER_NUMBER,
    TOKENIZER_BLANK,
    TOKENIZER_SYMBOL
} tokenizer__class;

static inline bool tokenizer__within(uint32_t code, const uint32_t (*ranges)[2], size_t count)
{
    size_t first = 0;
    while (count > 0) { /* among `count` ranges from `first` on */
        const size_t half = count / 2;
        if (code > ranges[first + half][1]) first += half + 1, count -= half + 1;
        else if (code < ranges[first + half][0]) count = half;
        else return true;
    }
    return false;
}

/* Read a character, and say what it is. */
static inline size_t tokenizer__class_of(const char *text, size_t bytes, tokenizer__class *found)
{
    uint32_t c;
    const size_t length = utf8_read(text, bytes, &c);
    *found = TOKENIZER_SYMBOL;
    if ((c >= 9 && c <= 13) || c == ' ' || c == 0x85 || c == 0xa0 || c == 0x1680 ||
        (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f ||
        c == 0x3000)
        *found = TOKENIZER_BLANK;
    else if (tokenizer__within(c, unicode_letters,
                               sizeof unicode_letters / sizeof *unicode_letters))
        *found = TOKENIZER_LETTER;
    else if (tokenizer__within(c, unicode_numbers,
                               sizeof unicode_numbers / sizeof *unicode_numbers))
        *found = TOKENIZER_NUMBER;
    return length;
}

/* Return the bytes of what GPT-2's expression matches at the beginning of a text:
 *
 *     's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
 *
 * A run of blanks before something leaves its last one to that; if it is the only one, and no space,
 * it stands alone. */
static inline size_t tokenizer__piece(const char *text, size_t bytes)
{
    static const char *const ends[] = {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"};
    tokenizer__class first, next = TOKENIZER_BLANK;
    size_t at, last = 0;
    for (size_t i = 0; i < sizeof ends / sizeof ends[0]; i++)
        if (strlen(ends[i]) <= bytes && memcmp(text, ends[i], strlen(ends[i])) == 0)
            return strlen(ends[i]);
    at = tokenizer__class_of(text, bytes, &first);
    if (text[0] == ' ' && at < bytes) {
        const size_t length = tokenizer__class_of(text + at, bytes - at, &next);
        if (next != TOKENIZER_BLANK) first = next, at += length;
    }
    while (at < bytes) {
        const size_t length = tokenizer__class_of(text + at, bytes - at, &next);
        if (next != first) break;
        last = at;
        at += length;
    }
    return first == TOKENIZER_BLANK && at < bytes && last > 0 ? last : at;
}

/* ---- encoding ------------------------------------------------------------------------------- */

/* Make room for `more` tokens. */
static inline bool token_list_grow(token_list *list, size_t more)
{
    size_t room = list->room ? list->room : 1024;
    while (room - list->count < more) room *= 2;
    if (room == list->room) return true;
    int32_t *at = (int32_t *)realloc(list->at, room * sizeof *at);
    if (!at) return false;
    list->at = at;
    list->room = room;
    return true;
}

/* Merge neighbours in place; return how many tokens are left. A round merges all pairs of the lowest
 * rank that there is, so that there are at most as many rounds as merges. */
static inline size_t tokenizer__merge(const tokenizer *t, int32_t *tokens, size_t count)
{
    for (;;) {
        tokenizer_merge best = {-1, -1, INT32_MAX, -1};
        size_t left = 0;
        for (size_t i = 0; i + 1 < count; i++) {
            const tokenizer_merge *found = tokenizer__pair(t, tokens[i], tokens[i + 1]);
            if (found->left >= 0 && found->rank < best.rank) best = *found;
        }
        if (best.token < 0) return count;
        for (size_t i = 0; i < count; i++) {
            const bool both =
                i + 1 < count && tokens[i] == best.left && tokens[i + 1] == best.right;
            tokens[left++] = both ? best.token : tokens[i];
            i += both;
        }
        count = left;
    }
}

/* Append the tokens of a text. */
static inline dtrain_result tokenizer_encode(const tokenizer *t, const char *text, size_t bytes,
                                             token_list *list)
{
    static const char end[] = "<|endoftext|>";
    const size_t end_bytes = sizeof end - 1;
    if (!t->merges)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "this tokenizer has no merges and can only decode: to encode, give the "
                           "directory of a vocab.json and a merges.txt");
    for (size_t at = 0, stop = 0, piece; at < bytes; at += piece) {
        if (at >= stop) /* as far as no end of text comes */
            for (stop = at; stop < bytes &&
                            (t->end_of_text < 0 || text[stop] != '<' || bytes - stop < end_bytes ||
                             memcmp(text + stop, end, end_bytes) != 0);)
                stop++;
        piece = at < stop ? tokenizer__piece(text + at, stop - at) : end_bytes;
        if (!token_list_grow(list, piece)) return tokenizer__memory();
        int32_t *tokens = list->at + list->count;
        for (size_t i = 0; i < piece && at < stop; i++) {
            tokens[i] = t->bytes[(uint8_t)text[at + i]];
            if (tokens[i] < 0)
                return dtrain_fail(DTRAIN_ERROR_DATA,
                                   "the vocabulary has no token for byte 0x%02x, at byte %zu",
                                   (uint8_t)text[at + i], at + i);
        }
        if (at < stop) list->count += tokenizer__merge(t, tokens, piece);
        else list->at[list->count++] = t->end_of_text;
    }
    return DTRAIN_OK;
}

#endif /* TOKENIZER_H */
