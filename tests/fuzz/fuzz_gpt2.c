/* fuzz_gpt2.c: the files of a GPT-2 on hostile bytes: checkpoint and tokenizer of llm.c, vocab.json, merges.txt,
 * tokenizer.json, text, config.json.
 *
 *     clang -g -O1 -fsanitize=fuzzer,address,undefined -I. tests/fuzz/fuzz_gpt2.c -o fuzz_gpt2 -lm -pthread
 *     ./fuzz_gpt2 -max_total_time=30
 *
 * Byte 0 chooses what the rest is. Wrong is: a crash, a sanitizer report, a refusal without a sentence, sizes that are
 * accepted and do not fit the file, tokens outside the vocabulary, or text that encoding and decoding change. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

#include "tools/train_gpt/llmc.h"
#include "tools/train_gpt/tokenizer_files.h"

enum { MODEL, LLMC, VOCABULARY, MERGES, TEXT, JSON, CONFIG, KINDS };

static const char vocabulary[] = "{\"a\": 0, \"b\":1,\"\\u0120\": 2, \"ab\": 3, \"\\u0120ab\": 4, "
                                 "\"<|endoftext|>\": 5, \"'\": 6, \"\xc3\xa9\": 7}\n";
static const char merges[] = "#version: 0.2\na b\n\xc4\xa0 ab\n";
static const char json[] =
    "{\"added_tokens\": [{\"id\": 5, \"content\": \"<|e|>\", \"normalized\": true}, {\"id\": 6, "
    "\"content\": \"<|e\", "
    "\"normalized\": false}], \"normalizer\": null, \"pre_tokenizer\": {\"type\": \"ByteLevel\", "
    "\"use_regex\": true}, "
    "\"model\": {\"type\": \"BPE\", \"ignore_merges\": false, \"vocab\": {\"a\": 0, \"b\": 1, "
    "\"\\u0120\": 2, "
    "\"ab\": 3, \"\\u0120ab\": 4}, \"merges\": [\"a b\", [\"\\u0120\", \"ab\"]]}}";
static const char config[] =
    "{\"n_layer\": 2, \"n_head\": 2, \"n_embd\": 8, \"n_positions\": 4, \"vocab_size\": 9, "
    "\"activation_function\": \"relu\", \"layer_norm_epsilon\": 1e-3, \"x\": [{\"y\": null}]}";
static const char text[] = "ab abab <|endoftext|> 'b \xe9";

size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t room);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t room, unsigned seed);

/* Write a good file of a kind behind byte 0; return its bytes. */
static size_t make_good(uint8_t *data, int kind)
{
    static const int32_t model[8] = {LLMC_MAGIC, LLMC_F32, 2, 3, 1, 1, 2, 3};
    static const int32_t tokens[4] = {TOKENIZER_MAGIC, 2, 3, 2};
    static const char *const good[KINDS] = {NULL, NULL, vocabulary, merges, text, json, config};
    const char *of_kind = good[kind];
    data[0] = (uint8_t)kind;
    if (kind > LLMC) {
        memcpy(data + 1, of_kind, strlen(of_kind));
        return 1 + strlen(of_kind);
    }
    memset(data + 1, 0, 2000);
    memcpy(data + 1, kind == MODEL ? model : tokens, kind == MODEL ? sizeof model : sizeof tokens);
    memcpy(data + 1 + 1024, "\1a\2bc\0", 6);
    return 1 + 1024 +
           (kind == MODEL ? (size_t)llmc__total(&(gpt_config){1, 1, 2, 0, 2, 3, 0, 0, 0}, 3) * 4
                          : 6);
}

/* Begin from a good file when there is none, and now and then later. */
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t room, unsigned seed)
{
    if ((size < 3 || seed % 128 == 0) && room > 4000)
        size = make_good(data, (int)(seed / 128 % KINDS));
    return LLVMFuzzerMutate(data, size, room);
}

static void check(dtrain_result result)
{
    if (result != DTRAIN_OK && strlen(dtrain_last_error()) < 20) abort();
}

/* The sizes that are accepted are those of the file. */
static void fuzz_model(const uint8_t *data, size_t size)
{
    char path[32];
    gpt_config config;
    const int file = memfd_create("model", 0);
    if (file < 0 || write(file, data, size) != (ssize_t)size) abort();
    snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    const dtrain_result result = llmc_read_config(path, &config);
    check(result);
    if (result == DTRAIN_OK && (size <= 1024 || config.layers * config.channels > (long)size))
        abort();
    close(file);
}

/* Encode text with a tokenizer, decode it, and compare. */
static void fuzz_text(const tokenizer *t, const uint8_t *data, size_t size)
{
    token_list list = {NULL, 0, 0};
    size_t at = 0;
    const dtrain_result result = tokenizer_encode(t, (const char *)data, size, &list);
    check(result);
    for (size_t i = 0; i < list.count && result == DTRAIN_OK; i++) {
        size_t bytes;
        const char *of_token = tokenizer_text(t, list.at[i], &bytes);
        if (list.at[i] < 0 || list.at[i] >= t->count || bytes > size - at) abort();
        if (memcmp(of_token, data + at, bytes) != 0) abort();
        at += bytes;
    }
    if (result == DTRAIN_OK && at != size) abort();
    free(list.at);
}

/* A config.json that is accepted says sizes, and is written again as another type. */
static void fuzz_config(char *data, size_t size)
{
    hf_config from = {"fuzz", data, size};
    gpt_config found;
    json_reader r = json_begin("fuzz", data, size);
    (void)json_skip(&r);
    if (json_end(&r) != DTRAIN_OK) return;
    const dtrain_result result = gpt_read_config(&from, &found);
    check(result);
    if (result == DTRAIN_OK && (found.layers < 1 || found.heads < 1 || !(found.epsilon > 0)))
        abort();
}

/* Every token has a text within the file. */
static void fuzz_tokens(const tokenizer *t, size_t size)
{
    size_t bytes, sum = 0;
    for (int32_t id = -1; id <= t->count; id++) {
        (void)tokenizer_text(t, id, &bytes);
        sum += bytes;
    }
    if (sum > size) abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    /* in memory of its own, so that a byte too far is seen */
    if (size < 1) return 0;
    const int kind = data[0] % KINDS;
    char *file = (char *)malloc(size);
    memcpy(file, data + 1, --size);
    tokenizer t;
    memset(&t, 0, sizeof t);
    dtrain_fail(DTRAIN_OK, "%s", "");
    dtrain_result result = DTRAIN_OK;
    if (kind == MODEL) fuzz_model(data + 1, size);
    if (kind == CONFIG) fuzz_config(file, size);
    if (kind == JSON) result = tokenizer_read_json(&t, "fuzz", file, size);
    if (kind == JSON && result == DTRAIN_OK) {
        fuzz_tokens(&t, size);
        fuzz_text(&t, (const uint8_t *)text, sizeof text - 1);
        fuzz_text(&t, (const uint8_t *)file, size);
    }
    if (kind == LLMC) result = tokenizer_read_bin(&t, "fuzz", file, size);
    if (kind >= VOCABULARY && kind <= TEXT)
        result = kind == VOCABULARY
                     ? tokenizer_read_vocabulary(&t, "fuzz", file, size)
                     : tokenizer_read_vocabulary(&t, "fuzz", vocabulary, sizeof vocabulary - 1);
    if (result == DTRAIN_OK && kind >= VOCABULARY && kind <= TEXT)
        result = kind == MERGES ? tokenizer_read_merges(&t, "fuzz", file, size)
                                : tokenizer_read_merges(&t, "fuzz", merges,
                                                        kind == TEXT ? sizeof merges - 1 : 0);
    check(result);
    if (result == DTRAIN_OK && (kind == LLMC || kind == VOCABULARY)) fuzz_tokens(&t, size);
    if (result == DTRAIN_OK && (kind == MERGES || kind == TEXT))
        fuzz_text(&t, (const uint8_t *)file, size);
    tokenizer_close(&t);
    free(file);
    return 0;
}
