/* tokenizer_files.h: files of tokenizers.
 *
 *     DIR/tokenizer.json                 of the tokenizers library: encodes and decodes
 *     DIR/vocab.json, DIR/merges.txt     as transformers had them before
 *     gpt2_tokenizer.bin                 as llm.c has it: decodes
 *
 * A tokenizer.json says how a text is treated, component by component. What is not byte-level byte pair encoding, or
 * cuts a text in another way than those of tokenizer.h, is refused by the component's name. */
#ifndef TOKENIZER_FILES_H
#define TOKENIZER_FILES_H

#include "tools/files.h"
#include "tools/hugging_face.h"
#include "tokenizer.h"

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

/* Turn characters that stand for bytes into these, in place: text (*bytes). false: one of them does not, and the text
 * stays. */
static inline bool tokenizer__to_bytes(char *text, size_t *bytes)
{
    size_t used = 0;
    for (int pass = 0; pass < 2; pass++)
        for (size_t at = 0; at < *bytes;) {
            uint32_t code;
            at += utf8_read(text + at, *bytes - at, &code);
            const int byte = tokenizer__byte(code);
            if (byte < 0) return false;
            if (pass) text[used++] = (char)byte;
        }
    *bytes = used;
    return true;
}

/* ---- vocab.json ----------------------------------------------------------------------------- */

/* Tokens in the order of a file: the text of number i from begins[i] to begins[i + 1], and its id. */
typedef struct tokenizer__members {
    char *text;     /* (bytes of the file + 1) */
    size_t *begins; /* (most + 1) */
    int32_t *ids;   /* (most) */
    int32_t count, most;
} tokenizer__members;

/* Make room for the tokens of a file, here and in the tokenizer. Each has a colon in it. */
static inline dtrain_result tokenizer__members_create(tokenizer__members *m, tokenizer *t,
                                                      const char *json, size_t bytes)
{
    size_t most = 1;
    memset(m, 0, sizeof *m);
    for (size_t i = 0; i < bytes; i++) most += json[i] == ':';
    if (most > TOKENIZER_MOST) most = TOKENIZER_MOST;
    m->most = (int32_t)most;
    m->text = (char *)malloc(bytes + 1);
    m->begins = (size_t *)calloc(most + 1, sizeof *m->begins);
    m->ids = (int32_t *)malloc(most * sizeof *m->ids);
    t->text = (char *)malloc(bytes + 1);
    t->begin = (size_t *)malloc((most + 1) * sizeof *t->begin);
    return m->text && m->begins && m->ids && t->text && t->begin ? DTRAIN_OK : tokenizer__memory();
}

static inline void tokenizer__members_free(tokenizer__members *m)
{
    free(m->text);
    free(m->begins);
    free(m->ids);
}

/* Append a quoted text of a file, of which the reader has read no more than what is behind it. */
static inline bool tokenizer__member(json_reader *r, tokenizer__members *m, size_t *bytes)
{
    const size_t used = m->begins[m->count];
    return json_text(r, m->text + used, (size_t)(r->end - r->at) + 1, bytes);
}

/* End a member with its id. */
static inline bool tokenizer__member_end(json_reader *r, tokenizer__members *m, size_t bytes,
                                         int32_t id)
{
    if (m->count == m->most) return json_expected(r, "fewer tokens");
    m->ids[m->count] = id;
    m->begins[m->count + 1] = m->begins[m->count] + bytes;
    m->count++;
    return true;
}

/* Read all members of {"token": id, ...}. raw: a token that is no bytes is itself, as some that are added. */
static inline bool tokenizer__read_members(json_reader *r, tokenizer__members *m, bool raw)
{
    if (!json_enter(r, '{')) return false;
    while (json_item(r, '}')) {
        size_t bytes = 0;
        int32_t id;
        if (!tokenizer__member(r, m, &bytes)) return false;
        if (!tokenizer__to_bytes(m->text + m->begins[m->count], &bytes) && !raw)
            return json_expected(r, "before it, characters that stand for bytes");
        if (!json_accept(r, ':')) return json_expected(r, "':'");
        if (!json_integer(r, TOKENIZER_MOST, &id) || !tokenizer__member_end(r, m, bytes, id))
            return false;
    }
    return r->result == DTRAIN_OK;
}

/* Put the members in the order of their ids; those from number `first` on replace others. */
static inline dtrain_result tokenizer__sort(tokenizer *t, const char *path,
                                            const tokenizer__members *m, int32_t first)
{
    int32_t *where = (int32_t *)malloc(((size_t)m->count + 1) * sizeof *where);
    dtrain_result result = where ? DTRAIN_OK : tokenizer__memory();
    size_t used = 0;
    t->count = 0;
    for (int32_t i = 0; i < m->count && where; i++) where[i] = -1;
    for (int32_t i = 0; i < m->count; i++)
        if (m->ids[i] >= t->count) t->count = m->ids[i] + 1;
    for (int32_t i = 0; i < m->count && result == DTRAIN_OK; i++) {
        const int32_t id = m->ids[i];
        if (id >= m->count || (where[id] >= 0 && i < first))
            result = dtrain_fail(DTRAIN_ERROR_DATA,
                                 "%s: id %d is there twice or beyond the %d tokens, expected 0 to "
                                 "%d, each once",
                                 path, (int)id, (int)m->count, (int)m->count - 1);
        else where[id] = i;
    }
    for (int32_t id = 0; id < t->count && result == DTRAIN_OK; id++) {
        t->begin[id] = used;
        if (where[id] < 0)
            result = dtrain_fail(DTRAIN_ERROR_DATA, "%s: no token has the id %d of %d", path,
                                 (int)id, (int)t->count);
        if (where[id] < 0) break;
        const size_t *begin = &m->begins[where[id]];
        memcpy(t->text + used, m->text + begin[0], begin[1] - begin[0]);
        used += begin[1] - begin[0];
    }
    if (result == DTRAIN_OK) t->begin[t->count] = used;
    free(where);
    return result;
}

/* Read the text of a vocab.json. "<|endoftext|>" in a text is the token of that name, if there is one. */
static inline dtrain_result tokenizer_read_vocabulary(tokenizer *t, const char *path,
                                                      const char *json, size_t bytes)
{
    json_reader r = json_begin(path, json, bytes);
    tokenizer__members m;
    dtrain_result result = tokenizer__members_create(&m, t, json, bytes);
    if (result == DTRAIN_OK) (void)tokenizer__read_members(&r, &m, false);
    if (result == DTRAIN_OK) result = json_end(&r);
    if (result == DTRAIN_OK) result = tokenizer__sort(t, path, &m, m.count);
    if (result == DTRAIN_OK) result = tokenizer__index(t);
    tokenizer__members_free(&m);
    if (result != DTRAIN_OK || t->end_of_text < 0) return result;
    t->added = (int32_t *)malloc(sizeof *t->added);
    if (!t->added) return tokenizer__memory();
    t->added[t->added_count++] = t->end_of_text;
    return DTRAIN_OK;
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

/* Make a merge of this rank: text (both), of which the first `left` bytes are one token. */
static inline bool tokenizer__merge_add(tokenizer *t, json_reader *r, const char *text, size_t left,
                                        size_t both, int32_t rank)
{
    const int32_t a = tokenizer_find(t, text, left);
    const int32_t b = tokenizer_find(t, text + left, both - left);
    const int32_t token = tokenizer_find(t, text, both);
    if (a < 0 || b < 0 || token < 0)
        return json_expected(r, "before it, two tokens that the vocabulary has, and their "
                                "union too");
    tokenizer_merge *merge = tokenizer__pair(t, a, b);
    merge->left = a, merge->right = b; /* of two, the last counts */
    merge->rank = rank, merge->token = token;
    return true;
}

/* Make room for merges. */
static inline dtrain_result tokenizer__merges_create(tokenizer *t, size_t count)
{
    t->merge_room = tokenizer__room(count);
    t->merges = (tokenizer_merge *)malloc(t->merge_room * sizeof *t->merges);
    for (size_t i = 0; i < t->merge_room && t->merges; i++) t->merges[i].left = -1;
    return t->merges ? DTRAIN_OK : tokenizer__memory();
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
    return tokenizer__merge_add(t, r, text, left, both, rank);
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
    dtrain_result result = tokenizer__merges_create(t, count);
    if (!text) result = tokenizer__memory();
    if (bytes >= 8 && memcmp(lines, "#version", 8) == 0)
        while (r.at < r.end && *r.at++ != '\n') {}
    while (r.at < r.end && result == DTRAIN_OK) {
        if (*r.at == '\n') r.at++; /* an empty line, as the last may be */
        else if (!tokenizer__merge_line(t, &r, text, rank++)) result = r.result;
    }
    free(text);
    return result == DTRAIN_OK ? r.result : result;
}

/* ---- tokenizer.json ------------------------------------------------------------------------- */

/* What stands in it under some keys; a reader without a path: nothing. */
typedef struct tokenizer__parts {
    json_reader added, vocab, merges;
    bool split, bytes; /* what cuts a text into pieces, and a piece into bytes, was there */
} tokenizer__parts;

/* Refuse a component by its name. */
static inline bool tokenizer__refuse(json_reader *r, const char *component, const char *found,
                                     const char *expected)
{
    if (r->result == DTRAIN_OK)
        r->result = dtrain_fail(DTRAIN_ERROR_UNSUPPORTED, "%s: %s is %.200s, expected %s", r->path,
                                component, found, expected);
    r->at = r->end;
    return false;
}

/* Step over a value and write it as it stands there, a string without its quotes; cut off where it has no room. */
static inline bool tokenizer__value(json_reader *r, char *value, size_t room)
{
    (void)json_peek(r);
    const char *begin = r->at;
    const bool string = json_peek(r) == '"';
    *value = 0;
    if (string) return json_string(r, value, room);
    if (!json_skip(r)) return false;
    const size_t bytes = (size_t)(r->at - begin);
    snprintf(value, room, "%.*s", bytes < room ? (int)bytes : (int)room - 1, begin);
    return true;
}

/* Step over a value, of an object with members that have rules, and refuse another one. */
static inline bool tokenizer__obeys(json_reader *r, const char *component, const char *name,
                                    const hf_rule *rules)
{
    char value[HF_VALUE], full[128];
    while (rules->key && strcmp(rules->key, name) != 0) rules++;
    if (!rules->key) return json_skip(r);
    if (!tokenizer__value(r, value, sizeof value)) return false;
    if (hf_one_of(value, rules->values)) return true;
    snprintf(full, sizeof full, "\"%s\" of %s", name, component);
    return tokenizer__refuse(r, full, value, rules->values);
}

/* Read the type of a component; "null" where there is none. */
static inline bool tokenizer__type(json_reader r, char type[64])
{
    char name[64];
    snprintf(type, 64, "null");
    if (json_peek(&r) != '{' || !json_enter(&r, '{')) return true;
    snprintf(type, 64, "of no type");
    while (json_member(&r, name, sizeof name))
        if (strcmp(name, "type") == 0) return json_string(&r, type, 64);
        else if (!json_skip(&r)) return false;
    return true;
}

/* Read how a text is cut: by one of the expressions that tokenizer.h has, then to bytes. */
static inline bool tokenizer__read_cuts(json_reader *r, tokenizer *t, tokenizer__parts *parts)
{
#define LLAMA_PIECE(digits)                                                    \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}" digits \
    "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define GPT2_PIECE(ends) ends "| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"
    static const struct {
        const char *expression;
        int digits;
    } known[] = {{GPT2_PIECE("'s|'t|'re|'ve|'m|'ll|'d"), 0},
                 {GPT2_PIECE("'(?:[sdmt]|ll|ve|re)"), 0},
                 {LLAMA_PIECE("{1,3}"), 3},
                 {LLAMA_PIECE(""), 1}};
    static const hf_rule rules[] = {
        {"add_prefix_space", "false"}, {"behavior", "Isolated"}, {"invert", "false"}, {NULL, NULL}};
    static const char here[] = "\"pre_tokenizer\"";
    char type[64], name[64], expression[512] = "", value[16] = "true";
    size_t at = 0;
    if (!tokenizer__type(*r, type)) return false;
    if (!hf_one_of(type, "ByteLevel|Split|Sequence"))
        return tokenizer__refuse(r, here, type, "ByteLevel, or Split and ByteLevel");
    (void)json_enter(r, '{');
    while (json_member(r, name, sizeof name)) {
        if (strcmp(name, "pretokenizers") == 0 && json_enter(r, '['))
            while (json_item(r, ']')) (void)tokenizer__read_cuts(r, t, parts);
        else if (strcmp(name, "use_regex") == 0) (void)tokenizer__value(r, value, sizeof value);
        else if (strcmp(name, "pattern") == 0 && json_enter(r, '{'))
            while (json_member(r, name, sizeof name))
                (void)tokenizer__value(r, expression, sizeof expression);
        else (void)tokenizer__obeys(r, here, name, rules);
    }
    if (r->result != DTRAIN_OK || strcmp(type, "Sequence") == 0) return r->result == DTRAIN_OK;
    const bool bytes = strcmp(type, "ByteLevel") == 0;
    if (parts->bytes || (parts->split && (!bytes || strcmp(value, "false") != 0)))
        return tokenizer__refuse(r, here, "a longer Sequence", "ByteLevel, or Split and ByteLevel");
    parts->bytes |= bytes;
    parts->split |= !bytes || strcmp(value, "false") != 0;
    if (bytes) return true;
    while (at < 4 && strcmp(known[at].expression, expression) != 0) at++;
    if (at == 4)
        return tokenizer__refuse(r, "the expression of \"pre_tokenizer\"", expression,
                                 "that of GPT-2, Llama 3 or Qwen 2");
    t->digits = known[at].digits;
    return true;
#undef LLAMA_PIECE
#undef GPT2_PIECE
}

/* Read the model: where its vocabulary and merges are. */
static inline bool tokenizer__read_model(json_reader *r, tokenizer *t, tokenizer__parts *parts)
{
    static const hf_rule rules[] = {{"type", "BPE"},
                                    {"dropout", "null|0|0.0"},
                                    {"continuing_subword_prefix", "null|"},
                                    {"end_of_word_suffix", "null|"},
                                    {"byte_fallback", "false"},
                                    {NULL, NULL}};
    char name[64], value[16] = "";
    if (!json_enter(r, '{')) return false;
    while (json_member(r, name, sizeof name)) {
        if (strcmp(name, "vocab") == 0) parts->vocab = *r;
        if (strcmp(name, "merges") == 0) parts->merges = *r;
        if (strcmp(name, "ignore_merges") != 0) (void)tokenizer__obeys(r, "\"model\"", name, rules);
        else if (tokenizer__value(r, value, sizeof value)) t->whole = strcmp(value, "true") == 0;
    }
    return r->result == DTRAIN_OK;
}

/* Walk through the file: check the components, and find the lists. */
static inline bool tokenizer__read_parts(json_reader *r, tokenizer *t, tokenizer__parts *parts)
{
    char name[64], type[64];
    if (!json_enter(r, '{')) return false;
    while (json_member(r, name, sizeof name)) {
        const bool normalizer = strcmp(name, "normalizer") == 0;
        if (normalizer && tokenizer__type(*r, type) && strcmp(type, "null") != 0)
            return tokenizer__refuse(r, "\"normalizer\"", type, "none");
        if (strcmp(name, "added_tokens") == 0) parts->added = *r;
        if (strcmp(name, "pre_tokenizer") == 0) (void)tokenizer__read_cuts(r, t, parts);
        else if (strcmp(name, "model") == 0) (void)tokenizer__read_model(r, t, parts);
        else (void)json_skip(r);
    }
    if (r->result == DTRAIN_OK && (!parts->vocab.path || !parts->merges.path))
        return tokenizer__refuse(r, "\"model\"", "without vocab or merges", "BPE with both");
    if (r->result == DTRAIN_OK && (!parts->bytes || !parts->split))
        return tokenizer__refuse(r, "\"pre_tokenizer\"", "no ByteLevel that cuts texts", "one");
    return r->result == DTRAIN_OK;
}

/* Read added tokens, those that are found before others or the others, as further members. */
static inline bool tokenizer__read_added(json_reader r, tokenizer *t, tokenizer__members *m,
                                         bool first)
{
    static const hf_rule rules[] = {
        {"single_word", "false"}, {"lstrip", "false"}, {"rstrip", "false"}, {NULL, NULL}};
    char name[64], value[16];
    if (!r.path) return true;
    (void)json_enter(&r, '[');
    while (json_item(&r, ']')) {
        size_t bytes = 0;
        int32_t id = -1;
        bool later = true;
        (void)json_enter(&r, '{');
        while (json_member(&r, name, sizeof name)) {
            if (strcmp(name, "id") == 0) (void)json_integer(&r, TOKENIZER_MOST, &id);
            else if (strcmp(name, "content") == 0) (void)tokenizer__member(&r, m, &bytes);
            else if (strcmp(name, "normalized") != 0)
                (void)tokenizer__obeys(&r, "an added token", name, rules);
            else if (tokenizer__value(&r, value, sizeof value)) later = *value == 't';
        }
        if (r.result != DTRAIN_OK) break;
        if (id < 0 || !bytes) return json_expected(&r, "before it, a token with id and content");
        if (later == first) continue;
        if (!tokenizer__member_end(&r, m, bytes, id)) break;
        t->added[t->added_count++] = id;
        t->first_count += first;
    }
    return r.result == DTRAIN_OK;
}

/* Read merges, "left right" or ["left", "right"]. text has room for the file. */
static inline dtrain_result tokenizer__read_merge_list(json_reader r, tokenizer *t, char *text)
{
    json_reader counted = r;
    size_t count = 0;
    int32_t rank = 0;
    (void)json_enter(&counted, '[');
    for (; json_item(&counted, ']'); count++) (void)json_skip(&counted);
    if (tokenizer__merges_create(t, count) != DTRAIN_OK) return DTRAIN_ERROR_MEMORY;
    (void)json_enter(&r, '[');
    while (json_item(&r, ']')) {
        const size_t room = (size_t)(r.end - r.at) + 1;
        size_t left = 0, right = 0;
        char *second = text;
        if (json_peek(&r) == '[') {
            if (json_enter(&r, '[') && json_item(&r, ']') && json_text(&r, text, room, &left))
                second = text + left + 1;
            if (json_item(&r, ']')) (void)json_text(&r, second, room - left - 1, &right);
            if (json_item(&r, ']')) (void)json_expected(&r, "two tokens");
        } else if (json_text(&r, text, room, &right)) {
            left = strcspn(text, " ");
            second = text + left + (left < right);
            right -= left + (left < right);
        }
        if (r.result != DTRAIN_OK) break;
        if (!left || !right || !tokenizer__to_bytes(text, &left) ||
            !tokenizer__to_bytes(second, &right))
            (void)json_expected(&r, "before it, two tokens with a blank between them");
        memmove(text + left, second, right);
        if (r.result == DTRAIN_OK)
            (void)tokenizer__merge_add(t, &r, text, left, left + right, rank++);
    }
    return r.result;
}

/* Read the text of a tokenizer.json. */
static inline dtrain_result tokenizer_read_json(tokenizer *t, const char *path, const char *json,
                                                size_t bytes)
{
    json_reader r = json_begin(path, json, bytes);
    tokenizer__parts parts;
    tokenizer__members m;
    memset(&parts, 0, sizeof parts);
    dtrain_result result = tokenizer__members_create(&m, t, json, bytes);
    t->added = result == DTRAIN_OK ? (int32_t *)malloc((size_t)m.most * sizeof *t->added) : NULL;
    if (result == DTRAIN_OK && !t->added) result = tokenizer__memory();
    if (result == DTRAIN_OK) (void)tokenizer__read_parts(&r, t, &parts);
    if (result == DTRAIN_OK) result = json_end(&r);
    if (result == DTRAIN_OK && !tokenizer__read_members(&parts.vocab, &m, true))
        result = parts.vocab.result;
    const int32_t first = m.count;
    for (int pass = 1; pass >= 0 && result == DTRAIN_OK; pass--)
        if (!tokenizer__read_added(parts.added, t, &m, pass)) result = DTRAIN_ERROR_DATA;
    if (result == DTRAIN_OK) result = tokenizer__sort(t, path, &m, first);
    if (result == DTRAIN_OK) result = tokenizer__index(t);
    if (result == DTRAIN_OK) result = tokenizer__read_merge_list(parts.merges, t, m.text);
    tokenizer__members_free(&m);
    return result;
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

/* Find the token that ends a text: that of tokenizer_config.json beside the file, or one by a usual name. */
static inline dtrain_result tokenizer__find_end(tokenizer *t, const char *path)
{
    static const char *const usual[] = {"<|endoftext|>", "<|end_of_text|>"};
    const char *slash = strrchr(path, '/');
    char token[HF_VALUE];
    hf_config config;
    struct stat about;
    dtrain_result result = DTRAIN_OK;
    memset(&config, 0, sizeof config);
    snprintf(config.path, sizeof config.path, "%.*stokenizer_config.json",
             slash ? (int)(slash - path) + 1 : 0, path);
    if (stat(config.path, &about) == 0)
        result = read_file(config.path, &config.text, &config.bytes);
    const bool said =
        hf_value(&config, "eos_token.content", token) || hf_value(&config, "eos_token", token);
    t->end_of_text = said ? tokenizer_find(t, token, strlen(token)) : -1;
    for (int i = 0; i < 2 && t->end_of_text < 0; i++)
        t->end_of_text = tokenizer_find(t, usual[i], strlen(usual[i]));
    hf_close(&config);
    return result;
}

/* Read one file of a tokenizer. */
static inline dtrain_result tokenizer__read(tokenizer *t, const char *path,
                                            dtrain_result (*read)(tokenizer *t, const char *path,
                                                                  const char *text, size_t bytes))
{
    char *text = NULL;
    size_t bytes = 0;
    dtrain_result result = read_file(path, &text, &bytes);
    if (result == DTRAIN_OK) result = read(t, path, text, bytes);
    free(text);
    return result;
}

/* Open a tokenizer: a directory, its tokenizer.json, or a file of llm.c. tokenizer_close frees it, also after a
 * failure. */
static inline dtrain_result tokenizer_open(tokenizer *t, const char *path)
{
    struct stat about;
    char name[4096];
    const size_t length = strlen(path);
    const bool directory = stat(path, &about) == 0 && S_ISDIR(about.st_mode);
    memset(t, 0, sizeof *t);
    snprintf(name, sizeof name, directory ? "%.4000s/tokenizer.json" : "%.4000s", path);
    if (!directory && length > 4 && strcmp(path + length - 4, ".bin") == 0)
        return tokenizer__read(t, path, tokenizer_read_bin);
    if (!directory || stat(name, &about) == 0) {
        const dtrain_result result = tokenizer__read(t, name, tokenizer_read_json);
        return result == DTRAIN_OK ? tokenizer__find_end(t, name) : result;
    }
    snprintf(name, sizeof name, "%.4000s/vocab.json", path);
    if (stat(name, &about) != 0) {
        snprintf(name, sizeof name, "%.4000s/tokenizer.model", path);
        return dtrain_fail(DTRAIN_ERROR_FILE, "%s has no tokenizer.json, and no vocab.json%s", path,
                           stat(name, &about) == 0
                               ? ", only SentencePiece's tokenizer.model, which is another kind"
                               : "");
    }
    const dtrain_result result = tokenizer__read(t, name, tokenizer_read_vocabulary);
    snprintf(name, sizeof name, "%.4000s/merges.txt", path);
    return result == DTRAIN_OK ? tokenizer__read(t, name, tokenizer_read_merges) : result;
}

#endif /* TOKENIZER_FILES_H */
