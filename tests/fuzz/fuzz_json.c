/* fuzz_json.c: the JSON reader on hostile bytes.
 *
 *     clang -g -O1 -fsanitize=fuzzer,address,undefined -I. tests/fuzz/fuzz_json.c -o fuzz_json -lm -pthread
 *     ./fuzz_json -max_total_time=30
 *
 * Byte 0 chooses how the rest is read: stepped over, or walked through with every call there is. Wrong is: a crash,
 * a sanitizer report, a refusal without a sentence, an error that goes away, or a text that one walk accepts and the
 * other does not. Strings that were read are written, and read again. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

static const char *const seeds[] = {
    "\0{\"format\": 1, \"step\": 1000, \"shape\": [2, 3], \"ok\": true, \"none\": null}",
    "\1{\"a\": {\"b\": [1, -2, {\"c\": \"\\u00e9\\ud83d\\ude00\\n\"}]}, \"x\": 1.5e-10}",
    "\1[\"\xc3\xa9\\\\\\\"\", 18446744073709551615, -9223372036854775808, [[[[]]]], false]"};

size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t room);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t room, unsigned seed);
/* Begin from a good text when there is none, and now and then later. */
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t room, unsigned seed)
{
    const char *text = seeds[seed / 128 % 3];
    const size_t bytes = 1 + strlen(text + 1);
    if ((size < 3 || seed % 128 == 0) && bytes <= room) {
        memcpy(data, text, bytes);
        size = bytes;
    }
    return LLVMFuzzerMutate(data, size, room);
}

static void *count_alloc(void *user, size_t bytes)
{
    (void)user;
    return malloc(bytes);
}
static void count_free(void *user, void *memory, size_t bytes)
{
    (void)user, (void)bytes;
    free(memory);
}

/* What was read is UTF-8 without a 0, and survives being written. */
static void check_string(const char *string)
{
    const dtrain_allocator allocator = {count_alloc, count_free, NULL};
    dtrain__text text;
    char again[4096];
    memset(&text, 0, sizeof text);
    text.allocator = &allocator;
    dtrain__text_add_string(&text, string);
    dtrain__json json = dtrain__json_begin("again", text.at, text.bytes);
    if (!dtrain__json_string(&json, again, sizeof again) || strcmp(again, string) != 0) abort();
    if (dtrain__json_end(&json) != DTRAIN_OK) abort();
    dtrain__text_free(&text);
}

static void walk(dtrain__json *json)
{
    char string[4096];
    uint64_t u;
    int64_t i;
    bool b;
    switch (dtrain__json_peek(json)) {
    case '{':
        if (!dtrain__json_enter(json, '{')) return;
        while (dtrain__json_member(json, string, sizeof string)) {
            check_string(string);
            walk(json);
        }
        return;
    case '[':
        if (!dtrain__json_enter(json, '[')) return;
        while (dtrain__json_item(json)) walk(json);
        return;
    case '"':
        if (dtrain__json_string(json, string, sizeof string)) check_string(string);
        return;
    case '0':
        /* an integer, if it is one: a copy of the reader may fail */
        {
            dtrain__json one = *json, other = *json;
            if (dtrain__json_u64(&one, &u) && dtrain__json_count(&other, &i) && (uint64_t)i != u)
                abort();
            dtrain__json_skip(json);
            if (json->result == DTRAIN_OK && one.result == DTRAIN_OK && one.at != json->at) abort();
            return;
        }
    case 't':
    case 'f': dtrain__json_bool(json, &b); return;
    default: dtrain__json_skip(json);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 1 || size > 4000) return 0;
    dtrain_fail(DTRAIN_OK, "%s", "");
    dtrain__json json = dtrain__json_begin("fuzz", (const char *)data + 1, size - 1);
    if (data[0] % 2) walk(&json);
    else dtrain__json_skip(&json);
    const dtrain_result result = dtrain__json_end(&json);
    if (result != DTRAIN_OK) {
        if (result != DTRAIN_ERROR_DATA || strlen(dtrain_last_error()) < 20) abort();
        if (dtrain__json_skip(&json) || dtrain__json_peek(&json) ||
            dtrain__json_end(&json) != result)
            abort();
    }
    dtrain__json other = dtrain__json_begin("fuzz", (const char *)data + 1, size - 1);
    if (data[0] % 2) dtrain__json_skip(&other);
    else walk(&other);
    if (dtrain__json_end(&other) != result) abort();
    return 0;
}
