/* fuzz_safetensors.c: headers of tensor files in hostile bytes.
 *
 *     clang -g -O1 -fsanitize=fuzzer,address,undefined -I. tests/fuzz/fuzz_safetensors.c \
 *           -o fuzz_safetensors -lm -pthread
 *     ./fuzz_safetensors -max_total_time=30
 *
 * The first two bytes are how many bytes of data follow the header, the others are the header. Wrong is: a crash, a
 * sanitizer report, a refusal without a sentence, more memory than a small multiple of the header, tensors that do
 * not cover the data exactly once, or a good file that is another one after it was written again. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

static const char *const seeds[] = {
    "\x18{\"attn.0\":{\"dtype\":\"F32\",\"shape\":[1,2,3],\"data_offsets\":[0,24]}} ",
    "\x0a{\"__metadata__\":{\"format\":\"pt\"},\"a\":{\"dtype\":\"BF16\",\"shape\":[2],\"data_"
    "offsets\":[6,10]},"
    "\"b\\u00e9\":{\"dtype\":\"U8\",\"shape\":[3,2],\"data_offsets\":[0,6]}}",
    "\x08{\"w\":{\"dtype\":\"F4\",\"shape\":[0],\"data_offsets\":[0,0]},\"v\":{\"data_offsets\":[0,"
    "8],\"shape\":[],"
    "\"dtype\":\"I64\",\"x\":[{}]}}"};

size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t room);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t room, unsigned seed);
/* Begin from a good header when there is none, and now and then later. */
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t room, unsigned seed)
{
    const char *text = seeds[seed / 128 % 3];
    const size_t bytes = strlen(text + 1);
    if ((size < 4 || seed % 128 == 0) && bytes + 2 <= room) {
        data[0] = (uint8_t)text[0];
        data[1] = 0;
        memcpy(data + 2, text + 1, bytes);
        size = bytes + 2;
    }
    return LLVMFuzzerMutate(data, size, room);
}

static size_t live_bytes, most_bytes;

static void *count_alloc(void *user, size_t bytes)
{
    (void)user;
    live_bytes += bytes;
    if (live_bytes > most_bytes) abort();
    return malloc(bytes);
}
static void count_free(void *user, void *memory, size_t bytes)
{
    (void)user;
    live_bytes -= bytes;
    free(memory);
}
static const dtrain_allocator allocator = {count_alloc, count_free, NULL};

static void check_file(const dtrain__tensor_file *file, uint64_t data_bytes)
{
    uint64_t covered = 0;
    for (size_t i = 0; i < file->count; i++) {
        const dtrain__stored *t = &file->tensors[i];
        if (t->begin > t->end || t->end > data_bytes || t->dims < 0 ||
            t->dims > DTRAIN__TENSOR_DIMS)
            abort();
        if (dtrain__safetensors_find(file, t->name) != t) abort();
        uint64_t bytes = dtrain__stored_bytes(t->dtype);
        for (int d = 0; d < t->dims; d++) bytes *= (uint64_t)t->shape[d];
        if (t->dtype <= DTRAIN__STORED_F64 && bytes != t->end - t->begin) abort();
        for (size_t k = 0; k < i; k++)
            if (t->begin < file->tensors[k].end && file->tensors[k].begin < t->end &&
                t->begin != t->end && file->tensors[k].begin != file->tensors[k].end)
                abort();
        covered += t->end - t->begin;
    }
    if (covered != data_bytes) abort();
}

static int by_place(const void *a, const void *b)
{
    const dtrain__stored *x = (const dtrain__stored *)a, *y = (const dtrain__stored *)b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    return (x->end > y->end) - (x->end < y->end);
}

/* Write the header again, read it, and compare. */
static void check_again(dtrain__tensor_file *file, uint64_t data_bytes)
{
    dtrain__tensor_file again;
    dtrain__text text;
    memset(&text, 0, sizeof text);
    text.allocator = &allocator;
    dtrain__stored *ordered = (dtrain__stored *)malloc((file->count + 1) * sizeof *ordered);
    if (!ordered) abort();
    memcpy(ordered, file->tensors, file->count * sizeof *ordered);
    qsort(ordered, file->count, sizeof *ordered, by_place);
    for (size_t i = 0; i < file->count; i++) dtrain__safetensors_add(&text, &ordered[i]);
    if (dtrain__safetensors_end(&text, "{}", data_bytes) != DTRAIN_OK) abort();
    if (text.bytes % 8 ||
        dtrain__safetensors_parse("again", text.at + 8, text.bytes - 8, text.bytes + data_bytes,
                                  &allocator, &again) != DTRAIN_OK)
        abort();
    if (again.count != file->count) abort();
    for (size_t i = 0; i < again.count; i++) {
        const dtrain__stored *x = &again.tensors[i], *y = &file->tensors[i];
        if (strcmp(x->name, y->name) || x->dtype != y->dtype || x->dims != y->dims ||
            memcmp(x->shape, y->shape, sizeof x->shape) || x->begin != y->begin || x->end != y->end)
            abort();
    }
    dtrain__safetensors_free(&again);
    dtrain__text_free(&text);
    free(ordered);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    dtrain__tensor_file file;
    if (size < 2) return 0;
    const uint64_t data_bytes = data[0] + 256u * data[1];
    const size_t header = size - 2;
    live_bytes = 0;
    most_bytes = 1024 + 8 * size;
    dtrain_fail(DTRAIN_OK, "%s", "");
    const dtrain_result result = dtrain__safetensors_parse(
        "fuzz", (const char *)data + 2, header, 8 + header + data_bytes, &allocator, &file);
    if (result == DTRAIN_OK) {
        check_file(&file, data_bytes);
        most_bytes = SIZE_MAX;
        check_again(&file, data_bytes);
        dtrain__safetensors_free(&file);
    } else if (result != DTRAIN_ERROR_DATA || strlen(dtrain_last_error()) < 20) abort();
    if (live_bytes) abort();
    return 0;
}
