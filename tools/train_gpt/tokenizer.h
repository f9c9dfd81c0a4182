/* tokenizer.h: byte-level byte pair encoding, the tokenizer of GPT-2 (Radford et al., 2019), Llama 3 and others.
 *
 * A text is cut into pieces (words with the blank before them, numbers, runs of symbols, runs of
 * blanks), and in each piece, from single bytes on, the pair of neighbours that stands first in the
 * list of merges becomes one token, again and again.
 *
 * Letters and numbers are those of the Unicode version in unicode_classes.h. A byte that is not UTF-8
 * is a symbol of its own. Added tokens, as "<|endoftext|>", are found in the text before it is cut; none
 * is put before or behind a text. tokenizer_files.h reads the files of others. */
#ifndef TOKENIZER_H
#define TOKENIZER_H

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
    int32_t *added; /* (added_count) ids of tokens that are found before a text is cut ... */
    int32_t added_count, first_count; /* ... the first of them before the others */
    int digits; /* 0: pieces are GPT-2's; otherwise Llama 3's, with so many digits in one, 3 or 1 */
    bool whole; /* a piece that is a token stays one, whatever the merges say */
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
    free(t->added);
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
static inline size_t tokenizer__gpt2_piece(const char *text, size_t bytes)
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

/* Return the bytes of 's, 't, 're, 've, 'm, 'll or 'd in any case at the beginning of a text; a long s is one. */
static inline size_t tokenizer__suffix(const char *text, size_t bytes)
{
    static const char *const ends[] = {"s", "t", "re", "ve", "m", "ll", "d"};
    if (bytes < 2 || text[0] != '\'') return 0;
    if (bytes > 2 && memcmp(text + 1, "\xc5\xbf", 2) == 0) return 3;
    for (size_t i = 0; i < sizeof ends / sizeof ends[0]; i++) {
        size_t k = 0;
        while (ends[i][k] && 1 + k < bytes && (text[1 + k] | 32) == ends[i][k]) k++;
        if (!ends[i][k]) return 1 + k;
    }
    return 0;
}

/* Return the bytes of characters of one class at the beginning of a text, and how many they are: `most` at most. */
static inline size_t tokenizer__run(const char *text, size_t bytes, tokenizer__class of, int most)
{
    size_t at = 0;
    for (tokenizer__class found; at < bytes && most > 0; most--) {
        const size_t length = tokenizer__class_of(text + at, bytes - at, &found);
        if (found != of) break;
        at += length;
    }
    return at;
}

/* Return the bytes of what Llama 3's expression matches at the beginning of a text, with {1,digits} for its {1,3}:
 *
 *     (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|
 *     \s*[\r\n]+|\s+(?!\S)|\s+ */
static inline size_t tokenizer__llama_piece(const char *text, size_t bytes, int digits)
{
    tokenizer__class first;
    const size_t suffix = tokenizer__suffix(text, bytes);
    const size_t length = tokenizer__class_of(text, bytes, &first);
    if (suffix) return suffix;
    if (first == TOKENIZER_LETTER) return tokenizer__run(text, bytes, first, INT32_MAX);
    if (first == TOKENIZER_NUMBER) return tokenizer__run(text, bytes, first, digits);
    size_t run = 0;
    if (text[0] != '\r' && text[0] != '\n')
        run = tokenizer__run(text + length, bytes - length, TOKENIZER_LETTER, INT32_MAX);
    if (run) return length + run;
    size_t at = text[0] == ' ' ? 1 : 0;
    run = tokenizer__run(text + at, bytes - at, TOKENIZER_SYMBOL, INT32_MAX);
    if (run) {
        for (at += run; at < bytes && (text[at] == '\r' || text[at] == '\n');) at++;
        return at;
    }
    run = tokenizer__run(text, bytes, TOKENIZER_BLANK, INT32_MAX);
    for (at = run; at > 0; at--)
        if (text[at - 1] == '\r' || text[at - 1] == '\n') return at;
    size_t last = 0; /* where the last blank of the run begins */
    for (at = 0; at < run; at += tokenizer__class_of(text + at, run - at, &first)) last = at;
    return run < bytes && last > 0 ? last : run;
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

/* An added token in a text: from `at` to `end`; at the end of the text, and id -1, there is none. */
typedef struct tokenizer__match {
    size_t at, end;
    int32_t id;
} tokenizer__match;

/* Find the first of some added tokens in a text between two places, the longest of several. */
static inline tokenizer__match tokenizer__next(const tokenizer *t, const char *text, size_t from,
                                               size_t end, bool first)
{
    const int32_t begin = first ? 0 : t->first_count,
                  stop = first ? t->first_count : t->added_count;
    tokenizer__match found = {end, end, -1};
    bool begins[256] = {false};
    for (int32_t i = begin; i < stop; i++) begins[(uint8_t)t->text[t->begin[t->added[i]]]] = true;
    for (size_t at = from; begin < stop && at < end; at++) {
        if (!begins[(uint8_t)text[at]]) continue;
        for (int32_t i = begin; i < stop; i++) {
            const size_t *of = &t->begin[t->added[i]], length = of[1] - of[0];
            if (length > end - at || memcmp(text + at, t->text + of[0], length) != 0) continue;
            if (found.id >= 0 && found.end >= at + length) continue;
            found.at = at, found.end = at + length, found.id = t->added[i];
        }
        if (found.id >= 0) break;
    }
    return found;
}

/* Append the tokens of a piece. */
static inline dtrain_result tokenizer__encode_piece(const tokenizer *t, const char *text,
                                                    size_t bytes, token_list *list)
{
    if (!token_list_grow(list, bytes)) return tokenizer__memory();
    int32_t *tokens = list->at + list->count;
    const int32_t whole = t->whole ? tokenizer_find(t, text, bytes) : -1;
    if (whole >= 0) return list->at[list->count++] = whole, DTRAIN_OK;
    for (size_t i = 0; i < bytes; i++) {
        tokens[i] = t->bytes[(uint8_t)text[i]];
        if (tokens[i] < 0)
            return dtrain_fail(DTRAIN_ERROR_DATA, "the vocabulary has no token for byte 0x%02x",
                               (uint8_t)text[i]);
    }
    list->count += tokenizer__merge(t, tokens, bytes);
    return DTRAIN_OK;
}

/* Append the tokens of a text. */
static inline dtrain_result tokenizer_encode(const tokenizer *t, const char *text, size_t bytes,
                                             token_list *list)
{
    tokenizer__match first = {0, 0, -1}, other = {0, 0, -1}; /* the next added tokens */
    dtrain_result result = DTRAIN_OK;
    if (!t->merges)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "this tokenizer has no merges and can only decode: to encode, give the "
                           "directory of a tokenizer.json, or of a vocab.json and a merges.txt");
    for (size_t at = 0, piece; at < bytes && result == DTRAIN_OK; at += piece) {
        if (at >= first.end) first = tokenizer__next(t, text, at, bytes, true);
        if (at >= other.end) other = tokenizer__next(t, text, at, first.at, false);
        const tokenizer__match *here = at == first.at ? &first : at == other.at ? &other : NULL;
        if (here) {
            piece = here->end - at;
            if (!token_list_grow(list, 1)) return tokenizer__memory();
            list->at[list->count++] = here->id;
            continue;
        }
        piece = t->digits ? tokenizer__llama_piece(text + at, other.at - at, t->digits)
                          : tokenizer__gpt2_piece(text + at, other.at - at);
        result = tokenizer__encode_piece(t, text + at, piece, list);
    }
    return result;
}

#endif /* TOKENIZER_H */
