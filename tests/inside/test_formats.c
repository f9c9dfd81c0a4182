/* test_formats.c: the formats of checkpoints: CRC-32C, JSON, safetensors. Vectors, attacks, every truncation and
 * every bit flip of a good file, random ones, and a second opinion by Python's own json. */
#include "test.h"

#include "core/crc32c_internal.h"
#include "core/json_internal.h"
#include "state/safetensors_internal.h"
#include "state/storage_internal.h"
#include "allocator.h"

#include <sys/stat.h>

static uint32_t random_state = 1;
static uint32_t random_below(uint32_t limit)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 17;
    random_state ^= random_state << 5;
    return random_state % limit;
}
static uint64_t random_bits(void)
{
    const uint64_t high = random_below(UINT32_MAX);
    return (high << 32 | random_below(UINT32_MAX)) >> random_below(64);
}

/* ---- CRC-32C --------------------------------------------------------------------------------------*/

static uint32_t naive_crc(uint32_t crc, const unsigned char *data, size_t bytes)
{
    crc = ~crc;
    for (size_t i = 0; i < bytes; i++) {
        crc ^= data[i];
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0);
    }
    return ~crc;
}

/* RFC 3720, B.4. */
static void test_crc_vectors(void)
{
    unsigned char bytes[32] = {0};
    CHECK(dtrain__crc32c(0, "123456789", 9) == 0xe3069283u);
    CHECK(dtrain__crc32c(0, bytes, 32) == 0x8a9136aau);
    CHECK(dtrain__crc32c(0, bytes, 0) == 0);
    memset(bytes, 0xff, 32);
    CHECK(dtrain__crc32c(0, bytes, 32) == 0x62a8ab43u);
    for (int i = 0; i < 32; i++) bytes[i] = (unsigned char)i;
    CHECK(dtrain__crc32c(0, bytes, 32) == 0x46dd794eu);
}

static void test_crc_paths(void)
{
    static unsigned char data[20000];
    for (size_t i = 0; i < sizeof data; i++) data[i] = (unsigned char)random_below(256);
    for (size_t align = 0; align < 16; align++)
        for (size_t bytes = 0; bytes <= 1000; bytes++) {
            const uint32_t expected = naive_crc(0, data + align, bytes);
            CHECK(dtrain__crc32c(0, data + align, bytes) == expected &&
                  dtrain__crc32c_portable(0, data + align, bytes) == expected);
        }
    for (size_t bytes = 3 * 512 - 20; bytes < sizeof data - 16; bytes += 1 + bytes % 97) {
        const size_t align = bytes % 16, cut = bytes / 3 + bytes % 500;
        const uint32_t expected = naive_crc(7, data + align, bytes);
        CHECK(dtrain__crc32c(7, data + align, bytes) == expected &&
              dtrain__crc32c_portable(7, data + align, bytes) == expected);
        CHECK(dtrain__crc32c(dtrain__crc32c(7, data + align, cut), data + align + cut,
                             bytes - cut) == expected);
    }
}

/* ---- JSON: writing --------------------------------------------------------------------------------*/

static const dtrain_allocator *counted(counted_memory *memory)
{
    static dtrain_allocator allocator;
    memset(memory, 0, sizeof *memory);
    allocator = counted_allocator(memory);
    return &allocator;
}

static dtrain__text text_of(const dtrain_allocator *allocator)
{
    dtrain__text text;
    memset(&text, 0, sizeof text);
    text.allocator = allocator;
    return text;
}

static void check_string(const char *string, const char *expected)
{
    counted_memory memory;
    dtrain__text text = text_of(counted(&memory));
    dtrain__text_add_string(&text, string);
    CHECK_MSG(!text.failed && strcmp(text.at, expected) == 0 && text.bytes == strlen(expected),
              "%s is written as %s", expected, text.at);
    dtrain__text_free(&text);
    CHECK(memory.live == 0 && memory.wrong == 0);
}

static void test_text_strings(void)
{
    check_string("", "\"\"");
    check_string("a \"b\" \\ /", "\"a \\\"b\\\" \\\\ /\"");
    check_string("\x01\n\x1f\x7f", "\"\\u0001\\n\\u001f\x7f\"");
    check_string("\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80",
                 "\"\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80\"");
    check_string("\xff", "\"\xef\xbf\xbd\"");
    check_string("\xc0\x80\xe2\x82", "\"\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\"");
    check_string("\xed\xa0\x80", "\"\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\"");
    check_string("\xf4\x8f\xbf\xbf\xf4\x90", "\"\xf4\x8f\xbf\xbf\xef\xbf\xbd\xef\xbf\xbd\"");
}

/* A text grows to what is added, and stays what it was after memory has run out. */
static void test_text_grows(void)
{
    counted_memory memory;
    char expected[40000];
    for (int fail_at = 0; fail_at < 12; fail_at++) {
        size_t used = 0;
        dtrain__text text = text_of(counted(&memory));
        memory.fail_at = fail_at;
        for (int i = 0; i < 3000; i++) {
            const char *word = i % 100 ? "x" : "a longer piece of text";
            if (!text.failed) dtrain__text_add(&text, "%d %s,", i, word);
            if (!text.failed)
                used +=
                    (size_t)snprintf(expected + used, sizeof expected - used, "%d %s,", i, word);
        }
        CHECK(text.failed == (memory.calls == fail_at));
        CHECK(text.bytes == used && (used == 0 || memcmp(text.at, expected, used + 1) == 0));
        CHECK(text.room <= 2 * text.bytes + 300);
        dtrain__text_free(&text);
        CHECK(memory.live == 0 && memory.wrong == 0);
    }
}

/* ---- JSON: reading --------------------------------------------------------------------------------*/

static dtrain_result skip_all(const char *text, size_t bytes)
{
    dtrain__json json = dtrain__json_begin("file.json", text, bytes);
    dtrain__json_skip(&json);
    return dtrain__json_end(&json);
}

static void test_json_accepts(void)
{
    static const char *const good[] = {"{}",
                                       "[]",
                                       " [ ] ",
                                       "0",
                                       "-0",
                                       "-1.5e+10",
                                       "1E400",
                                       "123456789012345678901234567890",
                                       "true",
                                       "false",
                                       "null",
                                       "\"\"",
                                       "\"\\u00e9\\n\\/\\\"\"",
                                       "\"\\ud83d\\ude00\"",
                                       "\"\x7f\"",
                                       "{\"a\":{\"b\":[1,2,{\"c\":null}]},\"a\":1}",
                                       "\t\r\n {\"a\" : [ 1 , 2 ] } ",
                                       "[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]",
                                       "\"\xf4\x8f\xbf\xbf\xee\x80\x80\xed\x9f\xbf\""};
    for (size_t i = 0; i < sizeof good / sizeof *good; i++)
        CHECK_MSG(skip_all(good[i], strlen(good[i])) == DTRAIN_OK, "%s is refused: %s", good[i],
                  dtrain_last_error());
}

static void test_json_refuses(void)
{
    static const char *const bad[][2] = {
        {"", "end of the text"},
        {" ", "end of the text"},
        {"{", "end of the text"},
        {"[", "end of the text"},
        {"[1", "end of the text"},
        {"{\"a\"", "':'"},
        {"{\"a\":", "a value"},
        {"{\"a\":1", "end of the text"},
        {"{\"a\":1,}", "a string"},
        {"{,}", "a string"},
        {"{a:1}", "found 'a'"},
        {"{'a':1}", "a string"},
        {"{1:1}", "a string"},
        {"[1,]", "a value"},
        {"[,1]", "a value"},
        {"[1 2]", "',' or ']'"},
        {"[1}", "',' or ']'"},
        {"{]", "a string"},
        {"{} x", "nothing more"},
        {"[]]", "nothing more"},
        {"\"a", "end of the text"},
        {"\"a\nb\"", "0x0a"},
        {"\"\x1f\"", "0x1f"},
        {"\"\\x\"", "an escape"},
        {"\"\\u12g4\"", "hexadecimal"},
        {"\"\\u12", "hexadecimal"},
        {"\"\\", "an escape"},
        {"\"\\u0000\"", "\\u0000"},
        {"\"\\ud800\"", "\\ud800"},
        {"\"\\ud800\\n\"", "\\ud800"},
        {"\"\\ud800\\ud800\"", "\\ud800"},
        {"\"\\ud800\\u0041\"", "\\ud800"},
        {"\"\\udc00\"", "\\udc00"},
        {"\"\\udc00\\ud800\"", "\\udc00"},
        {"01", "nothing more"},
        {"-", "a digit"},
        {"+1", "a value"},
        {".5", "a value"},
        {"1.", "a digit"},
        {"1e", "a digit"},
        {"1e+", "a digit"},
        {"0x10", "nothing more"},
        {"NaN", "a value"},
        {"Infinity", "a value"},
        {"-Infinity", "a digit"},
        {"nul", "null"},
        {"nulll", "nothing more"},
        {"True", "a value"},
        {"falsy", "false"},
        {"// x\n1", "a value"},
        {"\xef\xbb\xbf{}", "byte order mark"},
        {"\"\xff\"", "UTF-8"},
        {"\"\xc0\xaf\"", "UTF-8"},
        {"\"\xed\xa0\x80\"", "UTF-8"},
        {"\"\xf0\x80\x80\x80\"", "UTF-8"},
        {"\"\xf4\x90\x80\x80\"", "UTF-8"},
        {"\"\xe2\x82", "UTF-8"},
        {"\"\xe2\x82\"", "UTF-8"},
        {"[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]", "16 levels"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        /* a copy of its exact size: sanitizers see a read beyond it */
        const size_t bytes = strlen(bad[i][0]);
        char *text = (char *)malloc(bytes + !bytes);
        if (!text) abort();
        memcpy(text, bad[i][0], bytes);
        CHECK_MSG(skip_all(text, bytes) == DTRAIN_ERROR_DATA, "%s is read", bad[i][0]);
        CHECK_MSG(strstr(dtrain_last_error(), bad[i][1]) &&
                      strstr(dtrain_last_error(), "file.json: at byte "),
                  "%s: %s", bad[i][0], dtrain_last_error());
        free(text);
    }
    CHECK(skip_all("[\0]", 3) == DTRAIN_ERROR_DATA && skip_all(NULL, 0) == DTRAIN_ERROR_DATA);
    CHECK(skip_all("\"\0\"", 3) == DTRAIN_ERROR_DATA && skip_all("1\0", 2) == DTRAIN_ERROR_DATA);
}

static bool read_string(const char *text, char *string, size_t room)
{
    dtrain__json json = dtrain__json_begin("file.json", text, strlen(text));
    return dtrain__json_string(&json, string, room) && dtrain__json_end(&json) == DTRAIN_OK;
}

static void test_json_strings(void)
{
    char s[64];
    CHECK(read_string("\"a\\\"\\\\\\/\\b\\f\\n\\r\\t\"", s, sizeof s) &&
          strcmp(s, "a\"\\/\b\f\n\r\t") == 0);
    CHECK(read_string("\"\\u0041\\u00e9\\u20AC\\ud83d\\uDE00\"", s, sizeof s) &&
          strcmp(s, "A\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80") == 0);
    CHECK(
        read_string("\"\\uD800\\uDC00\\udbff\\udfff\\u007f\\u0080\\u07ff\\u0800\\uffff\"", s,
                    sizeof s) &&
        strcmp(s, "\xf0\x90\x80\x80\xf4\x8f\xbf\xbf\x7f\xc2\x80\xdf\xbf\xe0\xa0\x80\xef\xbf\xbf") ==
            0);
    CHECK(read_string("\"1234567\"", s, 8) && strcmp(s, "1234567") == 0);
    CHECK(!read_string("\"12345678\"", s, 8) && strstr(dtrain_last_error(), "more than 7 bytes"));
    CHECK(!read_string("\"123456\\u00e9\"", s, 8) && read_string("\"12345\\u00e9\"", s, 8));
    CHECK(read_string("\"\"", s, 1) && s[0] == 0);
}

static int read_u64(const char *text, uint64_t *value)
{
    dtrain__json json = dtrain__json_begin("file.json", text, strlen(text));
    return dtrain__json_u64(&json, value) && dtrain__json_end(&json) == DTRAIN_OK;
}
static int read_count(const char *text, int64_t *value)
{
    dtrain__json json = dtrain__json_begin("file.json", text, strlen(text));
    return dtrain__json_count(&json, value) && dtrain__json_end(&json) == DTRAIN_OK;
}

static void test_json_numbers(void)
{
    static const char *const bad[] = {"1.0",
                                      "1e3",
                                      "01",
                                      "00",
                                      "",
                                      "-",
                                      "--1",
                                      "1e400",
                                      "+1",
                                      "\"1\"",
                                      "1 2",
                                      "0x1",
                                      "1a",
                                      "18446744073709551616",
                                      "99999999999999999999999999999999999999"};
    uint64_t u;
    int64_t i;
    CHECK(read_u64(" 0 ", &u) && u == 0);
    CHECK(read_u64("18446744073709551615", &u) && u == UINT64_MAX);
    CHECK(!read_u64("-1", &u) && !read_u64("-0", &u));
    CHECK(!read_count("-1", &i) && !read_count("-0", &i) && read_count("0", &i) && i == 0);
    CHECK(read_count("9223372036854775807", &i) && i == INT64_MAX);
    CHECK(!read_count("9223372036854775808", &i) && !read_count("18446744073709551615", &i));
    for (size_t k = 0; k < sizeof bad / sizeof *bad; k++)
        CHECK_MSG(!read_u64(bad[k], &u) && !read_count(bad[k], &i), "%s is read", bad[k]);
}

/* After an error, and outside of everything, calls return false; the first sentence stands. */
static void test_json_after_error(void)
{
    static const char text[] = "{\"a\": [1, oops]}";
    char name[8], sentence[256];
    uint64_t u;
    int64_t i;
    bool b;
    dtrain__json json = dtrain__json_begin("file.json", text, strlen(text));
    CHECK(dtrain__json_enter(&json, '{') && dtrain__json_member(&json, name, sizeof name));
    CHECK(strcmp(name, "a") == 0 && dtrain__json_peek(&json) == '[');
    json.inside = name;
    CHECK(!dtrain__json_skip(&json) && json.result == DTRAIN_ERROR_DATA);
    snprintf(sentence, sizeof sentence, "%s", dtrain_last_error());
    CHECK(strcmp(sentence,
                 "file.json: \"a\", at byte 10 of the JSON: expected a value, found 'o'") == 0);
    for (int round = 0; round < 20; round++)
        CHECK(!dtrain__json_enter(&json, '{') && !dtrain__json_enter(&json, '[') &&
              !dtrain__json_member(&json, name, sizeof name) && !dtrain__json_item(&json) &&
              !dtrain__json_string(&json, name, sizeof name) && !dtrain__json_u64(&json, &u) &&
              !dtrain__json_count(&json, &i) && !dtrain__json_bool(&json, &b) &&
              !dtrain__json_skip(&json) && !dtrain__json_peek(&json) &&
              !dtrain__json_fail(&json, "another") && dtrain__json_end(&json) == DTRAIN_ERROR_DATA);
    CHECK(strcmp(sentence, dtrain_last_error()) == 0);
    json = dtrain__json_begin("file.json", "1", 1);
    CHECK(!dtrain__json_item(&json) && dtrain__json_end(&json) == DTRAIN_ERROR_DATA);
    json = dtrain__json_begin("file.json", "[", 1);
    CHECK(dtrain__json_enter(&json, '[') && dtrain__json_end(&json) == DTRAIN_ERROR_DATA);
    json = dtrain__json_begin("file.json", "[1]", 3); /* what is good behind an error is not read */
    CHECK(dtrain__json_enter(&json, '[') && !dtrain__json_fail(&json, "the caller's own"));
    CHECK(!dtrain__json_item(&json) && !dtrain__json_u64(&json, &u) && !dtrain__json_peek(&json));
    CHECK(dtrain__json_end(&json) == DTRAIN_ERROR_DATA);
    json = dtrain__json_begin("file.json", "1", 1);
    CHECK(!dtrain__json_bool(&json, &b) && strstr(dtrain_last_error(), "true or false"));
}

/* A sentence shows no control characters of a text to a terminal. */
static void test_json_plain_sentences(void)
{
    dtrain__json json = dtrain__json_begin("file.json", "1", 1);
    CHECK(!dtrain__json_fail(&json, "found \"%s\"", "\x1b[2J\n\x7f") &&
          strstr(dtrain_last_error(), "found \"?[2J??\""));
    json = dtrain__json_begin("a\x1b[2J.json", "1", 1);
    json.inside = "w\x1b[2J";
    CHECK(!dtrain__json_fail(&json, "x") &&
          strstr(dtrain_last_error(), "a?[2J.json: \"w?[2J\", at"));
}

static void random_string(char *string)
{
    static const char *const pieces[] = {"a",      "\"",       "\\",           "\n",
                                         "\x01",   "\xc3\xa9", "\xe2\x82\xac", "\xf0\x9f\x98\x80",
                                         "weight", "/"};
    string[0] = 0;
    for (uint32_t n = random_below(6); n > 0; n--) strcat(string, pieces[random_below(10)]);
}

/* Draw a value and write it to the text; or, after the same seed, read the same value. */
static void random_value(dtrain__text *text, dtrain__json *json, int depth)
{
    const uint32_t kind = random_below(depth < 10 ? 7 : 4);
    const uint64_t bits = random_bits();
    char expected[64], found[64];
    uint64_t u;
    int64_t i;
    bool b;
    if (text && bits % 3 == 0) dtrain__text_add(text, "%s", bits % 2 ? " " : "\n\t\r ");
    if (kind == 0) {
        if (text) dtrain__text_add(text, "%llu", (unsigned long long)bits);
        else CHECK(dtrain__json_peek(json) == '0' && dtrain__json_u64(json, &u) && u == bits);
    } else if (kind == 1) {
        if (text) dtrain__text_add(text, "%llu", (unsigned long long)bits / 2);
        else CHECK(dtrain__json_count(json, &i) && i == (int64_t)(bits / 2));
    } else if (kind == 2) {
        random_string(expected);
        if (text) dtrain__text_add_string(text, expected);
        else
            CHECK(dtrain__json_peek(json) == '"' &&
                  dtrain__json_string(json, found, sizeof found) && strcmp(found, expected) == 0);
    } else if (kind == 3) {
        if (text) dtrain__text_add(text, bits & 1 ? "true" : "false");
        else CHECK(dtrain__json_bool(json, &b) && b == (bits & 1));
    } else {
        const bool object = kind == 4;
        const uint32_t count = random_below(5);
        if (text) dtrain__text_add(text, object ? "{" : "[");
        else CHECK(dtrain__json_enter(json, object ? '{' : '['));
        for (uint32_t k = 0; k < count; k++) {
            if (text && k) dtrain__text_add(text, " ,");
            if (object) {
                random_string(expected);
                if (text) {
                    dtrain__text_add_string(text, expected);
                    dtrain__text_add(text, bits & 1 ? " : " : ":");
                } else
                    CHECK(dtrain__json_member(json, found, sizeof found) &&
                          strcmp(found, expected) == 0);
            } else if (json) CHECK(dtrain__json_item(json));
            random_value(text, json, depth + 1);
        }
        if (text) dtrain__text_add(text, object ? "}" : "]");
        else
            CHECK(!(object ? dtrain__json_member(json, found, sizeof found)
                           : dtrain__json_item(json)));
    }
}

static void test_json_random(void)
{
    counted_memory memory;
    const uint32_t first = (uint32_t)test_seed();
    printf("       seeds from %u on\n", first);
    for (uint32_t seed = first; seed < first + (test_full() ? 20000u : 1000u); seed++) {
        dtrain__text text = text_of(counted(&memory));
        random_state = seed | 1;
        random_value(&text, NULL, 0);
        dtrain__json json = dtrain__json_begin("random", text.at, text.bytes);
        random_state = seed | 1;
        random_value(NULL, &json, 0);
        CHECK_MSG(dtrain__json_end(&json) == DTRAIN_OK, "seed %u: %s", seed, dtrain_last_error());
        CHECK(skip_all(text.at, text.bytes) == DTRAIN_OK);
        dtrain__text_free(&text);
        CHECK(memory.live == 0 && memory.wrong == 0);
    }
}

/* ---- safetensors: good files ----------------------------------------------------------------------*/

static dtrain__stored stored(const char *name, uint32_t dtype, int dims, const int64_t *shape,
                             uint64_t begin)
{
    dtrain__stored tensor;
    memset(&tensor, 0, sizeof tensor);
    tensor.name = name;
    tensor.dtype = dtype;
    tensor.dims = dims;
    tensor.begin = begin;
    tensor.end = begin + dtrain__stored_bytes(dtype);
    for (int d = 0; d < dims; d++) {
        tensor.shape[d] = shape[d];
        tensor.end = begin + (tensor.end - begin) * (uint64_t)shape[d];
    }
    return tensor;
}

/* A file in memory behind the table of storage: reads are short, and every third is interrupted. */
typedef struct memory_file {
    const char *bytes;
    uint64_t size;
    int calls;
} memory_file;

static int64_t memory_read(void *user, int file, void *to, size_t bytes, uint64_t offset)
{
    memory_file *m = (memory_file *)user;
    const uint64_t left = offset < m->size ? m->size - offset : 0;
    (void)file;
    if (++m->calls % 3 == 0) return -EINTR;
    if (bytes > 1 && m->calls % 2) bytes = (bytes + 1) / 2;
    if (bytes > left) bytes = (size_t)left;
    memcpy(to, m->bytes + offset, bytes);
    return (int64_t)bytes;
}
static int memory_open(void *user, const char *path, dtrain_storage_mode mode)
{
    (void)user, (void)path, (void)mode;
    return 0;
}
static int memory_close(void *user, int file)
{
    (void)user;
    return file;
}
static int64_t memory_size(void *user, int file)
{
    (void)file;
    return (int64_t)((memory_file *)user)->size;
}

static dtrain_result read_memory(const char *bytes, uint64_t size,
                                 const dtrain_allocator *allocator, dtrain__tensor_file *out)
{
    memory_file file = {bytes, size, 0};
    dtrain_storage storage = *dtrain__storage_or_files(NULL);
    storage.user = &file;
    storage.open = memory_open;
    storage.close = memory_close;
    storage.read = memory_read;
    storage.size = memory_size;
    return dtrain__safetensors_read(&storage, "x.safetensors", NULL, allocator, out);
}

/* What must hold of a file that was let through, whatever its bytes are. */
static void check_file(const dtrain__tensor_file *file, uint64_t file_bytes)
{
    uint64_t covered = 0;
    CHECK(file->data <= file_bytes && file->data >= 8);
    for (size_t i = 0; i < file->count; i++) {
        const dtrain__stored *t = &file->tensors[i];
        size_t elements = 1;
        for (int d = 0; d < t->dims; d++) elements *= (size_t)t->shape[d];
        CHECK(t->dims >= 0 && t->dims <= DTRAIN__TENSOR_DIMS && t->dtype < DTRAIN__STORED_TYPES);
        CHECK(strlen(t->name) < DTRAIN__TENSOR_NAME);
        CHECK(i == 0 || strcmp(file->tensors[i - 1].name, t->name) < 0);
        CHECK(t->begin <= t->end && t->end <= file_bytes - file->data);
        CHECK(t->dtype > DTRAIN__STORED_F64 ||
              t->end - t->begin == elements * dtrain__stored_bytes(t->dtype));
        CHECK(dtrain__safetensors_find(file, t->name) == t);
        for (size_t k = 0; k < i && file->count < 100; k++)
            CHECK(file->tensors[k].end <= t->begin || t->end <= file->tensors[k].begin);
        covered += t->end - t->begin;
    }
    CHECK(covered == file_bytes - file->data);
}

/* Write a header: tensors, then metadata. */
static dtrain_result write_header(dtrain__text *text, const dtrain__stored *tensors, size_t count,
                                  const char *metadata)
{
    for (size_t i = 0; i < count; i++) dtrain__safetensors_add(text, &tensors[i]);
    return dtrain__safetensors_end(text, metadata, count ? tensors[count - 1].end : 0);
}

static void test_safetensors_vectors(void)
{
    static const int64_t shape[] = {1, 2, 3};
    static const char metadata[] = "{\"format\":\"pt\",\"a \\\"b\\\"\":\"\xc3\xa9\"}";
    counted_memory memory;
    const dtrain_allocator *allocator = counted(&memory);
    const dtrain__stored one = stored("attn.0", DTRAIN_DTYPE_F32, 3, shape, 0);
    dtrain__text text = text_of(allocator);
    dtrain__tensor_file file;
    CHECK(write_header(&text, NULL, 0, "{}") == DTRAIN_OK);
    CHECK(text.bytes == 32 &&
          memcmp(text.at, "\x18\0\0\0\0\0\0\0{\"__metadata__\":{}}     ", 32) == 0);
    CHECK(read_memory(text.at, 32, allocator, &file) == DTRAIN_OK && file.count == 0);
    CHECK(!dtrain__safetensors_find(&file, "attn.0"));
    dtrain__safetensors_free(&file);
    dtrain__text_free(&text);

    CHECK(write_header(&text, &one, 1, metadata) == DTRAIN_OK);
    CHECK(text.bytes == 120 &&
          memcmp(text.at,
                 "\x70\0\0\0\0\0\0\0{\"attn.0\":{\"dtype\":\"F32\",\"shape\":[1,2,3],"
                 "\"data_offsets\":[0,24]},"
                 "\"__metadata__\":{\"format\":\"pt\",\"a \\\"b\\\"\":\"\xc3\xa9\"}}  ",
                 120) == 0);
    dtrain__text_free(&text);

    CHECK(write_header(&text, &one, 1, metadata) == DTRAIN_OK);
    CHECK(text.bytes % 8 == 0);
    dtrain__text_add(&text, "%24s", "");
    CHECK(read_memory(text.at, text.bytes, allocator, &file) == DTRAIN_OK);
    CHECK(file.count == 1 && file.data == text.bytes - 24);
    CHECK(dtrain__safetensors_find(&file, "attn.0") == file.tensors);
    CHECK(!dtrain__safetensors_find(&file, "attn.1") && !dtrain__safetensors_find(&file, ""));
    check_file(&file, text.bytes);
    dtrain__safetensors_free(&file);
    dtrain__text_free(&text);
    CHECK(strcmp(dtrain__stored_name(DTRAIN_DTYPE_BF16), "BF16") == 0);
    CHECK(strcmp(dtrain__stored_name(DTRAIN__STORED_F64), "F64") == 0);
    for (uint32_t d = 0; d <= DTRAIN_DTYPE_F64; d++)
        CHECK(dtrain__stored_bytes(d) == dtrain_dtype_bytes((dtrain_dtype)d));
    CHECK(dtrain__stored_bytes(DTRAIN__STORED_U8) == 1 &&
          dtrain__stored_bytes(DTRAIN__STORED_F64) == 8);
    CHECK(strcmp(dtrain__stored_name(DTRAIN__STORED_TYPES - 1), "F8_E5M2FNUZ") == 0);
    CHECK(memory.live == 0 && memory.wrong == 0);
}

enum { MOST = 40 };

/* Draw up to MOST tensors that follow each other, and names for them. */
static size_t random_tensors(dtrain__stored *tensors, char names[MOST][80])
{
    const size_t count = random_below(MOST + 1);
    uint64_t begin = 0;
    for (size_t i = 0; i < count; i++) {
        const int dims = (int)random_below(random_below(8) ? 4 : DTRAIN__TENSOR_DIMS + 1);
        int64_t shape[DTRAIN__TENSOR_DIMS];
        char word[64];
        random_string(word);
        for (char *c = word; *c; c++)
            if ((unsigned char)*c < 0x20) *c = '_';
        snprintf(names[i], 80, "%s.%u", word, (unsigned)i);
        for (int d = 0; d < dims; d++) shape[d] = dims > 4 ? 1 + random_below(2) : random_below(9);
        tensors[i] = stored(names[i], random_below(DTRAIN__STORED_F64 + 1), dims, shape, begin);
        begin = tensors[i].end;
    }
    return count;
}

/* Write a whole file to the text: tensors, and random bytes for data. */
static dtrain_result write_file(dtrain__text *text, const dtrain__stored *tensors, size_t count,
                                const char *metadata)
{
    const dtrain_result result = write_header(text, tensors, count, metadata);
    for (uint64_t i = 0; result == DTRAIN_OK && i < (count ? tensors[count - 1].end : 0); i++)
        dtrain__text_add(text, "%c", (int)random_below(256));
    return result;
}

static void test_safetensors_random(void)
{
    static dtrain__stored tensors[MOST];
    static char names[MOST][80];
    static const char metadata[] = "{\"format\":\"pt\"}";
    counted_memory memory;
    for (int round = 0; round < (test_full() ? 2000 : 60); round++) {
        const dtrain_allocator *allocator = counted(&memory);
        dtrain__text text = text_of(allocator);
        dtrain__tensor_file file;
        random_state = (uint32_t)round + 1;
        const size_t count = random_tensors(tensors, names);
        CHECK(write_file(&text, tensors, count, round % 3 ? metadata : "{}") == DTRAIN_OK);
        CHECK(read_memory(text.at, text.bytes, allocator, &file) == DTRAIN_OK &&
              file.count == count);
        check_file(&file, text.bytes);
        for (size_t i = 0; i < count; i++) {
            const dtrain__stored *t = dtrain__safetensors_find(&file, names[i]);
            CHECK(t && t->dtype == tensors[i].dtype && t->dims == tensors[i].dims &&
                  t->begin == tensors[i].begin && t->end == tensors[i].end &&
                  memcmp(t->shape, tensors[i].shape, sizeof t->shape) == 0);
        }
        dtrain__safetensors_free(&file);
        dtrain__text_free(&text);
        CHECK(memory.live == 0 && memory.wrong == 0);
    }
}

/* What could not be read is not written. */
static void test_safetensors_writer_refuses(void)
{
    static const int64_t shape[] = {4};
    counted_memory memory;
    const dtrain_allocator *allocator = counted(&memory);
    char name[DTRAIN__TENSOR_NAME + 1];
    for (int c = 0; c < 6; c++) {
        dtrain__stored tensors[2];
        dtrain__text text = text_of(allocator);
        memset(name, 'x', sizeof name);
        name[DTRAIN__TENSOR_NAME - (c != 1)] = 0;
        tensors[0] = stored(c == 2 ? "a\nb" : name, DTRAIN_DTYPE_F32, 1, shape, 0);
        tensors[1] = stored(c == 3   ? name
                            : c == 4 ? "__metadata__"
                                     : "b",
                            DTRAIN_DTYPE_F32, 1, shape, c == 5 ? 20 : 16);
        const dtrain_result result = write_header(&text, tensors, 2, "{}");
        CHECK_MSG(result == (c ? DTRAIN_ERROR_DATA : DTRAIN_OK), "case %d: %s", c,
                  dtrain_last_error());
        dtrain__text_free(&text);
    }
    CHECK(memory.live == 0 && memory.wrong == 0);
}

/* Memory that runs out at call n, for every n: an error, and nothing is left. */
static void test_safetensors_no_memory(void)
{
    static dtrain__stored tensors[MOST];
    static char names[MOST][80];
    static const char metadata[] = "{\"format\":\"pt\"}";
    counted_memory memory;
    const dtrain_allocator *allocator = counted(&memory);
    dtrain__text text = text_of(allocator);
    random_state = 12345;
    const size_t count = random_tensors(tensors, names);
    CHECK(write_file(&text, tensors, count, metadata) == DTRAIN_OK);
    dtrain_result result = DTRAIN_ERROR_MEMORY;
    for (long fail_at = 1; result != DTRAIN_OK && fail_at < 100; fail_at++) {
        dtrain__tensor_file file;
        const long before = memory.live;
        memory.calls = 0;
        memory.fail_at = fail_at;
        result = read_memory(text.at, text.bytes, allocator, &file);
        CHECK(result == (memory.calls < fail_at ? DTRAIN_OK : DTRAIN_ERROR_MEMORY));
        if (result == DTRAIN_OK) dtrain__safetensors_free(&file);
        CHECK(memory.live == before);
    }
    CHECK(result == DTRAIN_OK && memory.calls == 3);
    result = DTRAIN_ERROR_MEMORY;
    for (long fail_at = 1; result != DTRAIN_OK && fail_at < 100; fail_at++) {
        dtrain__text again = text_of(allocator);
        memory.calls = 0;
        memory.fail_at = fail_at;
        result = write_header(&again, tensors, count, metadata);
        CHECK(result == (memory.calls < fail_at ? DTRAIN_OK : DTRAIN_ERROR_MEMORY));
        dtrain__text_free(&again);
    }
    memory.fail_at = 0;
    dtrain__text_free(&text);
    CHECK(result == DTRAIN_OK && memory.live == 0 && memory.wrong == 0);
}

/* ---- safetensors: hostile files -------------------------------------------------------------------*/

#define U8(name, begin, end, n) \
    "\"" name "\":{\"dtype\":\"U8\",\"shape\":[" n "],\"data_offsets\":[" begin "," end "]}"
#define ONE(dtype, shape, offsets) \
    "{\"w\":{\"dtype\":" dtype ",\"shape\":" shape ",\"data_offsets\":" offsets "}}"

typedef struct attack {
    const char *header;
    uint64_t data_bytes;
    const char *sentence; /* a part of it; NULL: the file is good */
} attack;

static const attack attacks[] = {
    {"{}", 0, NULL},
    {" \n{} ", 0, NULL},
    {"{}", 1, "has 1 bytes of data, expected 0"},
    {"", 0, "end of the text"},
    {"[]", 0, "expected an object"},
    {"null", 0, "expected an object"},
    {"{}{}", 0, "nothing more"},
    {"{\"w\":1}", 0, "\"w\", at byte 5 of the JSON: expected an object"},
    {"{\"w\":{}}", 0, "\"w\", at byte 7 of the JSON: it has no \"dtype\""},
    {ONE("\"F32\"", "[2]", "[0,8]"), 8, NULL},
    {ONE("\"F32\"", "[]", "[0,4]"), 4, NULL},
    {ONE("\"F32\"", "[0,5]", "[0,0]"), 0, NULL},
    {ONE("\"F32\"", "[9223372036854775807,0]", "[0,0]"), 0, NULL},
    {ONE("\"F32\"", "[2]", "[0,8]"), 9, "has 9 bytes of data, expected 8"},
    {ONE("\"F32\"", "[2]", "[0,8]"), 7, "has 7 bytes of data, expected 8: it was truncated"},
    {ONE("\"F32\"", "[2]", "[0,7]"), 7, "leave it 7 bytes, expected 8"},
    {ONE("\"F32\"", "[2]", "[1,9]"), 9, "begins at byte 1 of the data, expected 0"},
    {ONE("\"F32\"", "[2]", "[8,0]"), 8, "leave it -8 bytes"},
    {ONE("\"F32\"", "[2]", "[18446744073709551608,0]"), 8, "2^63"},
    {ONE("\"F32\"", "[2]", "[0,18446744073709551616]"), 8, "2^64"},
    {ONE("\"F32\"", "[2]", "[0]"), 8, "has 1 of 2 numbers"},
    {ONE("\"F32\"", "[2]", "[0,8,8]"), 8, "more than 2 numbers"},
    {ONE("\"F32\"", "[2]", "[0,8.0]"), 8, "expected an integer"},
    {ONE("\"F32\"", "[2]", "[-1,7]"), 8, "expected an integer"},
    {ONE("\"F32\"", "[2]", "{}"), 8, "expected an array"},
    {ONE("\"F32\"", "[2.0]", "[0,8]"), 8, "\"w\", at byte 30 of the JSON: expected an integer"},
    {ONE("\"F32\"", "[2e0]", "[0,8]"), 8, "expected an integer"},
    {ONE("\"F32\"", "[1e400]", "[0,8]"), 8, "expected an integer"},
    {ONE("\"F32\"", "[-2]", "[0,8]"), 8, "expected an integer in its range, found '-'"},
    {ONE("\"F32\"", "[-2,-1]", "[0,8]"), 8, "expected an integer"},
    {ONE("\"F32\"", "[\"2\"]", "[0,8]"), 8, "expected an integer"},
    {ONE("\"F32\"", "2", "[0,8]"), 8, "expected an array"},
    {ONE("\"F32\"", "[[2]]", "[0,8]"), 8, "expected an integer"},
    {ONE("\"F32\"", "[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,2]", "[0,8]"), 8, NULL},
    {ONE("\"F32\"", "[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,2]", "[0,8]"), 8, "more than 16 numbers"},
    {ONE("\"F32\"", "[4294967296,4294967296]", "[0,0]"), 0, "more elements"},
    {ONE("\"F32\"", "[4294967296,2147483648,0]", "[0,0]"), 0, NULL},
    {ONE("\"F32\"", "[9223372036854775807,3,0]", "[0,0]"), 0, "more elements"},
    {ONE("\"F32\"", "[4611686018427387904]", "[0,0]"), 0, "more elements"},
    {ONE("\"F32\"", "[9223372036854775808]", "[0,0]"), 0, "2^63"},
    {ONE("\"F4\"", "[2]", "[0,1]"), 1, NULL},
    {ONE("\"F4\"", "[3]", "[0,1]"), 1, "12 bits are not whole bytes"},
    {ONE("\"F6_E2M3\"", "[4]", "[0,3]"), 3, NULL},
    {ONE("\"F6_E3M2\"", "[2]", "[0,1]"), 1, "12 bits are not whole bytes"},
    {ONE("\"C64\"", "[2]", "[0,16]"), 16, NULL},
    {ONE("\"F33\"", "[2]", "[0,8]"), 8, "\"w\", at byte 19 of the JSON: its dtype \"F33\""},
    {ONE("\"f32\"", "[2]", "[0,8]"), 8, "its dtype \"f32\""},
    {ONE("\"F32\\u001b[2J\"", "[2]", "[0,8]"), 8, "its dtype \"F32?[2J\""},
    {ONE("\"FFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFF\"", "[2]", "[0,8]"), 8, "more than 31"},
    {ONE("32", "[2]", "[0,8]"), 8, "expected a string"},
    {"{\"w\":{\"shape\":[2],\"data_offsets\":[0,2]}}", 2, "no \"dtype\""},
    {"{\"w\":{\"dtype\":\"U8\",\"data_offsets\":[0,2]}}", 2, "no \"shape\""},
    {"{\"w\":{\"dtype\":\"U8\",\"shape\":[2]}}", 2, "no \"data_offsets\""},
    {"{\"w\":{\"shape\":[2],\"data_offsets\":[0,8],\"dtype\":\"F33\"}}", 8, "dtype \"F33\""},
    {"{\"w\":{\"dtype\":\"U8\",\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}", 0,
     "a second"},
    {"{\"w\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0],\"x\":[{\"y\":1e9}]}}", 0,
     NULL},
    {"{" U8("a", "0", "2", "2") "," U8("b", "2", "4", "2") "}", 4, NULL},
    {"{" U8("a", "2", "4", "2") "," U8("b", "0", "2", "2") "}", 4, NULL},
    {"{" U8("a", "0", "2", "2") "," U8("b", "1", "3", "2") "}", 4,
     "\"b\" begins at byte 1 of the data, expected 2: it overlaps"},
    {"{" U8("a", "0", "2", "2") "," U8("b", "3", "4", "1") "}", 4,
     "\"b\" begins at byte 3 of the data, expected 2: no tensor"},
    {"{" U8("a", "0", "4", "4") "," U8("b", "0", "4", "4") "}", 4, "overlaps"},
    {"{" U8("a", "0", "4", "4") "," U8("b", "2", "2", "0") "}", 4, "\"b\" begins at byte 2"},
    {"{" U8("a", "0", "4", "4") "," U8("b", "4", "4", "0") "," U8("c", "0", "0", "0") "}", 4, NULL},
    {"{" U8("a", "0", "2", "2") "," U8("a", "2", "4", "2") "}", 4, "two tensors \"a\""},
    {"{" U8("a", "0", "2", "2") "," U8("\\u0061", "2", "4", "2") "}", 4, "two tensors \"a\""},
    {"{" U8("", "0", "2", "2") "}", 2, NULL},
    {"{" U8("\\u0000", "0", "2", "2") "}", 2, "\\u0000"},
    {"{" U8("\\ud800", "0", "2", "2") "}", 2, "\\ud800"},
    {"{" U8("a\\nb", "0", "2", "2") "}", 2, "control characters"},
    {"{" U8("\x7f", "0", "2", "2") "}", 2, "control characters"},
    {"{" U8("\xff", "0", "2", "2") "}", 2, "UTF-8"},
    {"{" U8("../../etc/passwd", "0", "2", "2") "}", 2, NULL},
    {"{\"__metadata__\":{}}", 0, NULL},
    {"{\"__metadata__\":{\"a\":\"b\",\"c\":\"\"}}", 0, NULL},
    {"{\"__metadata__\":{\"a\":1}}", 0,
     "\"__metadata__\", at byte 21 of the JSON: expected a string"},
    {"{\"__metadata__\":{\"a\":{}}}", 0, "expected a string"},
    {"{\"__metadata__\":{\"a\":null}}", 0, "expected a string"},
    {"{\"__metadata__\":[]}", 0, "expected an object"},
    {"{\"__metadata__\":null}", 0, "expected an object"},
    {"{\"__metadata__\":{},\"__metadata__\":{}}", 0, "a second \"__metadata__\""},
    {"{\"w\":{\"x\":[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]}}", 0, "16 levels"},
};
enum { ATTACKS = sizeof attacks / sizeof *attacks };

/* Put the file together in new memory of its exact size. */
static char *attack_file(const attack *a, size_t *bytes)
{
    const size_t header = strlen(a->header);
    *bytes = 8 + header + (size_t)a->data_bytes;
    char *file = (char *)calloc(*bytes, 1);
    if (!file) abort();
    for (int i = 0; i < 8; i++) file[i] = (char)(header >> (8 * i) & 255);
    memcpy(file + 8, a->header, header);
    return file;
}

static void test_safetensors_attacks(void)
{
    counted_memory memory;
    const dtrain_allocator *allocator = counted(&memory);
    for (size_t i = 0; i < ATTACKS; i++) {
        dtrain__tensor_file out;
        size_t bytes;
        char *file = attack_file(&attacks[i], &bytes);
        dtrain_fail(DTRAIN_OK, "%s", "");
        const dtrain_result result = read_memory(file, bytes, allocator, &out);
        if (result == DTRAIN_OK) {
            check_file(&out, bytes);
            dtrain__safetensors_free(&out);
        }
        CHECK_MSG((result == DTRAIN_OK) == !attacks[i].sentence, "%s, %llu bytes: %s",
                  attacks[i].header, (unsigned long long)attacks[i].data_bytes,
                  dtrain_last_error());
        if (attacks[i].sentence)
            CHECK_MSG(result == DTRAIN_ERROR_DATA && strstr(dtrain_last_error(), "x.safetensors") &&
                          strstr(dtrain_last_error(), attacks[i].sentence),
                      "%s: %s", attacks[i].header, dtrain_last_error());
        free(file);
        CHECK(memory.live == 0 && memory.wrong == 0);
    }
}

/* Lengths of headers that are none: nothing is allocated. */
static void test_safetensors_lengths(void)
{
    static const uint64_t lengths[] = {0,
                                       3,
                                       100000001u,
                                       UINT64_C(1) << 32,
                                       UINT64_C(1) << 63,
                                       UINT64_MAX,
                                       UINT64_MAX - 7,
                                       UINT64_MAX - 8,
                                       INT64_MAX};
    counted_memory memory;
    const dtrain_allocator *allocator = counted(&memory);
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        char file[10] = {0, 0, 0, 0, 0, 0, 0, 0, '{', '}'};
        dtrain__tensor_file out;
        for (int k = 0; k < 8; k++) file[k] = (char)(lengths[i] >> (8 * k) & 255);
        CHECK(read_memory(file, sizeof file, allocator, &out) == DTRAIN_ERROR_DATA);
        CHECK((memory.calls > 0) == (lengths[i] == 0) && memory.live == 0);
        memory.calls = 0;
    }
    /* a sparse file may be large, and its header still not */
    for (uint64_t size = 0; size < 8; size++) {
        dtrain__tensor_file out;
        CHECK(read_memory("\0\0\0\0\0\0\0", size, allocator, &out) == DTRAIN_ERROR_DATA &&
              strstr(dtrain_last_error(), "truncated") && memory.calls == 0);
    }
}

/* A good file cut off everywhere, and with every bit flipped: an error, or a file that holds together. */
static void test_safetensors_damage(void)
{
    static const char metadata[] = "{\"format\":\"pt\"}";
    static const int64_t shape[] = {3, 2};
    counted_memory memory;
    const dtrain_allocator *allocator = counted(&memory);
    dtrain__text text = text_of(allocator);
    dtrain__stored tensors[3];
    dtrain__tensor_file out;
    size_t accepted = 0;
    tensors[0] = stored("layers.0.weight", DTRAIN_DTYPE_F32, 2, shape, 0);
    tensors[1] = stored("layers.0.bias\xc3\xa9", DTRAIN_DTYPE_BF16, 1, shape, tensors[0].end);
    tensors[2] = stored("step\"", DTRAIN_DTYPE_I64, 0, NULL, tensors[1].end);
    CHECK(write_file(&text, tensors, 3, metadata) == DTRAIN_OK);
    for (size_t bytes = 0; bytes < text.bytes; bytes++) {
        char *cut = (char *)malloc(bytes + !bytes);
        if (!cut) abort();
        memcpy(cut, text.at, bytes);
        CHECK(read_memory(cut, bytes, allocator, &out) == DTRAIN_ERROR_DATA);
        CHECK(strstr(dtrain_last_error(), "truncated"));
        free(cut);
    }
    const size_t header = text.bytes - (size_t)tensors[2].end;
    const long before = memory.live;
    for (size_t bit = 0; bit < 8 * header; bit++) {
        text.at[bit / 8] = (char)(text.at[bit / 8] ^ 1 << bit % 8);
        if (read_memory(text.at, text.bytes, allocator, &out) == DTRAIN_OK) {
            check_file(&out, text.bytes);
            dtrain__safetensors_free(&out);
            accepted++; /* a letter of a name, mostly */
        }
        CHECK(memory.live == before && memory.live_bytes < 10000);
        text.at[bit / 8] = (char)(text.at[bit / 8] ^ 1 << bit % 8);
    }
    CHECK(accepted > 50 && accepted < 8 * header / 3);
    dtrain__text_free(&text);
    CHECK(memory.live == 0 && memory.wrong == 0);
}

/* Processor time of this process: a busy machine makes it longer by what caches lose, not by what others take. */
static double processor_seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Write a header of `count` entries: good ones in reverse order (kind 0), all at one place, all of one name, no
 * tensors at all, and the shortest that there can be. Return its length. */
static size_t write_many(char *file, size_t room, int kind, uint32_t count)
{
    static const char *const entries[] = {"{}", "0",
                                          "{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0,1]}"};
    size_t used = 1;
    file[0] = '{';
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t begin = kind == 1 ? 0 : count - 1 - i;
        if (i) file[used++] = ',';
        if (kind < 3)
            used +=
                (size_t)snprintf(file + used, room - used,
                                 "\"%x\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[%u,%u]}",
                                 kind == 2 ? 7 : i * 2654435761u, begin, begin + 1);
        else used += (size_t)snprintf(file + used, room - used, "\"\":%s", entries[kind - 3]);
    }
    file[used++] = '}';
    return used;
}

/* Read such a header; return the processor time that it took. Memory is a small multiple of the header. */
static double read_many(const char *file, size_t used, int kind, uint32_t count)
{
    counted_memory memory;
    const dtrain_allocator *allocator = counted(&memory);
    dtrain__tensor_file out;
    memory.limit_bytes = 5 * (long)used;
    const double start = processor_seconds();
    const dtrain_result result =
        dtrain__safetensors_parse("many", file, used, 8 + used + count, allocator, &out);
    const double seconds = processor_seconds() - start;
    CHECK_MSG(result == (kind ? DTRAIN_ERROR_DATA : DTRAIN_OK), "kind %d: %s", kind,
              dtrain_last_error());
    if (result == DTRAIN_OK) {
        CHECK(out.count == count);
        dtrain__safetensors_free(&out);
    }
    CHECK(memory.live == 0 && memory.wrong == 0);
    return seconds;
}

/* Very many entries take time in proportion. 16 times as many are compared with the few: linear time is 16 times as
 * long, sorting 21 times, quadratic time 256 times; the limit is the geometric mean of 16 and 256. While that looks
 * bad, both sizes are read again in turns, so that both meet the same machine, and the shortest time of each counts. */
static void test_safetensors_many(void)
{
    const uint32_t most = test_full() ? 1000000 : 100000, counts[2] = {most / 16, most};
    const size_t room = 90u * most;
    char *files[2] = {(char *)malloc(room), (char *)malloc(room)};
    bool good = true;
    if (!files[0] || !files[1]) abort();
    for (int kind = 0; kind < 6 && good; kind++) {
        size_t used[2];
        double best[2] = {INFINITY, INFINITY};
        for (int i = 0; i < 2; i++) used[i] = write_many(files[i], room, kind, counts[i]);
        good = false;
        for (int turn = 0; turn < 5 && !good; turn++) {
            for (int i = 0; i < 2; i++)
                best[i] = fmin(best[i], read_many(files[i], used[i], kind, counts[i]));
            good = best[1] < 64 * best[0];
        }
        CHECK_MSG(good, "kind %d: %u entries take %.3g s, %u take %.3g s", kind, counts[0], best[0],
                  counts[1], best[1]);
    }
    free(files[0]);
    free(files[1]);
}

/* ---- safetensors: a second opinion ----------------------------------------------------------------*/

/* Reads every file of the folder with Python's struct and json, and compares with what we have read: null where
 * the file was refused, otherwise {name: [dtype, shape, begin, end]}. */
static const char python_reader[] =
    "import sys, os, json, struct\n"
    "BITS = dict(F32=32, BF16=16, F16=16, I32=32, I64=64, U8=8, F64=64, BOOL=8, I8=8, I16=16,\n"
    "    U16=16, U32=32, U64=64, C64=64, F8_E4M3=8, F8_E5M2=8, F8_E8M0=8, F6_E2M3=6, F6_E3M2=6,\n"
    "    F4=4, F8_E4M3FNUZ=8, F8_E5M2FNUZ=8)\n"
    "class Object(list): pass\n"
    "def need(condition):\n"
    "    if not condition: raise ValueError\n"
    "def integer(text): return 0.5 if text == '-0' else int(text)\n"
    "def walk(value, depth):\n"
    "    if isinstance(value, list):\n"
    "        need(depth < 16)\n"
    "        for item in value:\n"
    "            if isinstance(value, Object): walk(item[0], depth), walk(item[1], depth + 1)\n"
    "            else: walk(item, depth + 1)\n"
    "    if isinstance(value, str): need('\\0' not in value and value.encode() is not None)\n"
    "def natural(value, limit): return type(value) is int and 0 <= value < limit\n"
    "def tensor(value, size):\n"
    "    need(isinstance(value, Object) and all(len(k.encode()) < 512 for k, v in value))\n"
    "    fields = ['dtype', 'shape', 'data_offsets']\n"
    "    for field in fields: need(sum(k == field for k, v in value) == 1)\n"
    "    dtype, shape, offsets = (dict(value)[field] for field in fields)\n"
    "    need(isinstance(dtype, str) and dtype in BITS)\n"
    "    need(type(shape) is list and len(shape) <= 16 and all(natural(d, 2**63) for d in shape))\n"
    "    need(type(offsets) is list and len(offsets) == 2 and all(natural(o, 2**64) for o in "
    "offsets))\n"
    "    bits = 1\n"
    "    for factor in shape + [BITS[dtype]]:\n"
    "        bits *= factor\n"
    "        need(bits < 2**64)\n"
    "    need(bits % 8 == 0 and offsets[1] - offsets[0] == bits // 8 and offsets[1] <= size)\n"
    "    return [dtype, shape] + offsets\n"
    "def read(raw):\n"
    "    need(len(raw) >= 8)\n"
    "    n, = struct.unpack('<Q', raw[:8])\n"
    "    need(n <= 10**8 and 8 + n <= len(raw))\n"
    "    tree = json.loads(raw[8:8 + n].decode('utf-8'), object_pairs_hook=Object,\n"
    "        parse_constant=lambda name: need(False), parse_int=integer, parse_float=lambda text: "
    "0.5)\n"
    "    walk(tree, 0)\n"
    "    need(isinstance(tree, Object) and len(set(k for k, v in tree)) == len(tree))\n"
    "    for name, value in tree:\n"
    "        need(len(name.encode()) < 512 and all(c >= ' ' and c != chr(127) for c in name))\n"
    "    size = len(raw) - 8 - n\n"
    "    found = {k: tensor(v, size) for k, v in tree if k != '__metadata__'}\n"
    "    for name, value in tree:\n"
    "        if name == '__metadata__':\n"
    "            need(isinstance(value, Object) and all(isinstance(v, str) for k, v in value))\n"
    "    end = 0\n"
    "    for begin, after in sorted(f[2:] for f in found.values()):\n"
    "        need(begin == end)\n"
    "        end = after\n"
    "    need(end == size)\n"
    "    return found\n"
    "ours = json.load(open(os.path.join(sys.argv[1], 'ours.json')))\n"
    "files = good = wrong = 0\n"
    "for name, mine in ours.items():\n"
    "    raw = open(os.path.join(sys.argv[1], name), 'rb').read()\n"
    "    try: theirs = read(raw)\n"
    "    except (ValueError, RecursionError): theirs = None\n"
    "    files, good = files + 1, good + (theirs is not None)\n"
    "    if mine != theirs:\n"
    "        wrong += 1\n"
    "        print('%s: %r, python: %r: %r' % (name, mine, theirs, raw[:600]))\n"
    "print('       %d files, %d of them good' % (files, good))\n"
    "sys.exit(wrong > 0 or good < 60 or files - good < 60)\n";

static void write_bytes(const char *folder, const char *name, const char *bytes, size_t count)
{
    char path[256];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "wb");
    CHECK(file && fwrite(bytes, 1, count, file) == count);
    if (file) fclose(file);
}

/* Write a file, and add what the reader makes of it, through a real file this time. */
static void add_opinion(dtrain__text *ours, const char *folder, const char *bytes, size_t count)
{
    static int number;
    const dtrain_storage *storage = dtrain__storage_or_files(NULL);
    dtrain__tensor_file out;
    char name[32], path[256];
    snprintf(name, sizeof name, "%05d.safetensors", number++);
    snprintf(path, sizeof path, "%s/%s", folder, name);
    write_bytes(folder, name, bytes, count);
    dtrain__text_add(ours, "%s", number > 1 ? ",\n" : "{");
    dtrain__text_add_string(ours, name);
    if (dtrain__safetensors_read(storage, path, NULL, ours->allocator, &out) != DTRAIN_OK) {
        dtrain__text_add(ours, ": null");
    } else {
        dtrain__text_add(ours, ": {");
        for (size_t i = 0; i < out.count; i++) {
            const dtrain__stored *t = &out.tensors[i];
            if (i) dtrain__text_add(ours, ", ");
            dtrain__text_add_string(ours, t->name);
            dtrain__text_add(ours, ": [\"%s\", [", dtrain__stored_name(t->dtype));
            for (int d = 0; d < t->dims; d++)
                dtrain__text_add(ours, "%s%lld", d ? ", " : "", (long long)t->shape[d]);
            dtrain__text_add(ours, "], %llu, %llu]", (unsigned long long)t->begin,
                             (unsigned long long)t->end);
        }
        dtrain__text_add(ours, "}");
        dtrain__safetensors_free(&out);
    }
}

/* Change, insert or remove a few bytes of the header, and keep its length right. */
static void mutate(dtrain__text *file)
{
    static const char bytes[] = "0123456789-+.eE\"\\{}[]:,unftr \x01\x80\xc3\xe9";
    for (uint32_t n = random_below(3); n < 3; n++) {
        const size_t header = 8 + (unsigned char)file->at[0] + 256u * (unsigned char)file->at[1];
        const size_t at = 8 + random_below((uint32_t)header - 8);
        const char byte = bytes[random_below(sizeof bytes - 1)];
        const uint32_t kind = random_below(3);
        int length = (int)header - 8;
        if (kind == 0) file->at[at] = byte;
        else if (kind == 1) {
            dtrain__text_add(file, "x");
            memmove(file->at + at + 1, file->at + at, file->bytes - at - 1);
            file->at[at] = byte;
            length++;
        } else if (length > 1) {
            memmove(file->at + at, file->at + at + 1, file->bytes - at - 1);
            file->bytes--;
            length--;
        }
        file->at[0] = (char)(length & 255);
        file->at[1] = (char)(length >> 8);
    }
}

static void test_safetensors_beside_python(void)
{
    static const char metadata[] = "{\"format\":\"pt\"}";
    static dtrain__stored tensors[MOST];
    static char names[MOST][80];
    char folder[] = "/tmp/dtrain-formats-XXXXXX", command[256];
    counted_memory memory;
    dtrain__text ours = text_of(counted(&memory));
    CHECK(mkdtemp(folder) != NULL);
    for (size_t i = 0; i < ATTACKS; i++) {
        size_t bytes;
        char *file = attack_file(&attacks[i], &bytes);
        add_opinion(&ours, folder, file, bytes);
        free(file);
    }
    for (uint32_t round = 0; round < (test_full() ? 20000u : 1000u); round++) {
        dtrain__text file = text_of(ours.allocator);
        random_state = round + 1;
        const size_t count = random_tensors(tensors, names) % 4;
        CHECK(write_file(&file, tensors, count, round % 2 ? metadata : "{}") == DTRAIN_OK);
        if (round % 8) mutate(&file);
        add_opinion(&ours, folder, file.at, file.bytes);
        dtrain__text_free(&file);
    }
    dtrain__text_add(&ours, "}\n");
    write_bytes(folder, "ours.json", ours.at, ours.bytes);
    write_bytes(folder, "read.py", python_reader, strlen(python_reader));
    fflush(NULL);
    snprintf(command, sizeof command, "python3 %s/read.py %s", folder, folder);
    CHECK_MSG(system(command) == 0, "python reads other things: see above");
    snprintf(command, sizeof command, "rm -r %s", folder);
    CHECK(system(command) == 0);
    dtrain__text_free(&ours);
    CHECK(memory.live == 0 && memory.wrong == 0);
}

/* Sentences of any bytes, each a piece that is kept as it is or one that becomes a question mark for each of its bytes:
 * control characters of ASCII and of Unicode, and what is not UTF-8. */
static void test_sentences_are_visible(void)
{
    static const struct {
        const char *bytes;
        bool kept;
    } pieces[] = {{"a ", true},
                  {"~", true},
                  {"\xc2\xa0", true},
                  {"\xc3\xa9", true},
                  {"\xe6\x97\xa5", true},
                  {"\xf0\x9d\x84\x9e", true},
                  {"\x1b", false},
                  {"\n", false},
                  {"\r", false},
                  {"\t", false},
                  {"\x7f", false},
                  {"\x01", false},
                  {"\xc2\x9b", false},
                  {"\xc2\x80", false},
                  {"\xff", false},
                  {"\xc0\xaf", false},
                  {"\xed\xa0\x80", false},
                  {"\xf5", false}};
    uint64_t seeds = test_seed();
    for (int round = 0; round < 2000; round++) {
        char given[400] = "", expected[400] = "";
        for (int i = 0; i < round % 60; i++) {
            seeds = seeds * 6364136223846793005u + 1442695040888963407u;
            const size_t k = (size_t)(seeds >> 33) % (sizeof pieces / sizeof *pieces);
            strcat(given, pieces[k].bytes);
            if (pieces[k].kept) strcat(expected, pieces[k].bytes);
            else strncat(expected, "????", strlen(pieces[k].bytes));
        }
        (void)dtrain_fail(DTRAIN_ERROR_DATA, "%s", given);
        CHECK_MSG(strcmp(dtrain_last_error(), expected) == 0,
                  "round %d of seed %llu: %s, expected %s", round, (unsigned long long)test_seed(),
                  dtrain_last_error(), expected);
    }
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    RUN(test_sentences_are_visible);
    RUN(test_crc_vectors);
    RUN(test_crc_paths);
    RUN(test_text_strings);
    RUN(test_text_grows);
    RUN(test_json_accepts);
    RUN(test_json_refuses);
    RUN(test_json_strings);
    RUN(test_json_numbers);
    RUN(test_json_after_error);
    RUN(test_json_plain_sentences);
    RUN(test_json_random);
    RUN(test_safetensors_vectors);
    RUN(test_safetensors_random);
    RUN(test_safetensors_writer_refuses);
    RUN(test_safetensors_no_memory);
    RUN(test_safetensors_attacks);
    RUN(test_safetensors_lengths);
    RUN(test_safetensors_damage);
    RUN(test_safetensors_many);
    if (system("python3 -c 'import json, struct' >/dev/null 2>&1") == 0)
        RUN(test_safetensors_beside_python);
    else SKIP(test_safetensors_beside_python, "no python3 to read the files");
    return test_summary();
}
