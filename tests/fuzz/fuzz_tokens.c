/* fuzz_tokens.c: the token file reader and the loader on hostile bytes.
 *
 *     clang -g -O1 -fsanitize=fuzzer,address,undefined -I. tests/fuzz/fuzz_tokens.c \
 *           -o fuzz_tokens -lm -pthread
 *     ./fuzz_tokens -max_total_time=30
 * without libFuzzer, on given files or else on 20000 mutations of a good one:
 *     cc -DFUZZ_MAIN -g -fsanitize=address,undefined -I. tests/fuzz/fuzz_tokens.c \
 *        -o fuzz_tokens -lm -pthread
 *     ./fuzz_tokens [file ...]
 *
 * Byte 0 chooses the format, byte 1 the sequence length, byte 2 where the file is cut during the
 * run; the rest is the file. Wrong is: a crash, a sanitizer report, or an id outside the
 * vocabulary handed out as good. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

static void fuzz_loader(dtrain_dataset *dataset, int64_t sequence, int file, off_t cut)
{
    int32_t inputs[2 * 64], targets[2 * 64];
    dtrain_loader_desc desc;
    dtrain_loader *loader;
    dtrain_dataset_info info;
    dtrain_dataset_query(dataset, &info);
    memset(&desc, 0, sizeof desc);
    desc.dataset = dataset;
    desc.batch = 2;
    desc.sequence = sequence;
    desc.in_order = cut & 1;
    if (dtrain_loader_create(NULL, &desc, &loader) != DTRAIN_OK) return;
    for (int i = 0; i < 8; i++) {
        if (i == 4 && ftruncate(file, cut) != 0) abort();
        if (dtrain_loader_next(loader, inputs, targets) != DTRAIN_OK) continue;
        for (int64_t t = 0; t < 2 * sequence; t++)
            if (targets[t] < 0 || targets[t] >= info.vocab_count) abort();
    }
    dtrain_loader_destroy(loader);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char path[32];
    dtrain_dataset_desc desc;
    dtrain_dataset *dataset;
    int file = memfd_create("tokens", 0);
    if (size < 3 || file < 0 || write(file, data + 3, size - 3) != (ssize_t)(size - 3)) {
        close(file);
        return 0;
    }
    snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    memset(&desc, 0, sizeof desc);
    desc.path = path;
    desc.format = data[0] % 4;
    if (dtrain_dataset_open(NULL, &desc, &dataset) == DTRAIN_OK) {
        dtrain_dataset_info info;
        dtrain_dataset_query(dataset, &info);
        if (info.item_count > (int64_t)size) abort();
        fuzz_loader(dataset, 1 + data[1] % 64, file, (off_t)(data[2] * (size - 3) / 255));
        dtrain_dataset_close(dataset);
    }
    close(file);
    return 0;
}

#ifdef FUZZ_MAIN
static uint32_t fuzz_state = 1;
static uint32_t fuzz_random(void)
{
    fuzz_state ^= fuzz_state << 13;
    fuzz_state ^= fuzz_state >> 17;
    return fuzz_state ^= fuzz_state << 5;
}

/* A good file of either kind in one half of the cases, then up to four bytes changed, and cut. */
static size_t fuzz_make(uint8_t *data, size_t room)
{
    uint32_t wide = fuzz_random() & 1, count = fuzz_random() % 400;
    uint32_t words[3];
    words[0] = wide ? 20240801 : 20240520;
    words[1] = wide ? 7 : 1;
    words[2] = count;
    memset(data, 0, room);
    for (int i = 0; i < 3; i++) data[i] = (uint8_t)fuzz_random();
    memcpy(data + 3, words, sizeof words);
    size_t size = 3 + 1024 + (size_t)count * (wide ? 4 : 2);
    for (uint32_t i = fuzz_random() % 5; i > 0; i--)
        data[fuzz_random() % (fuzz_random() & 1 ? 16 : size)] = (uint8_t)fuzz_random();
    if (fuzz_random() % 4 == 0) size = fuzz_random() % (size + 1);
    return size;
}

int main(int argc, char **argv)
{
    static uint8_t data[1 << 16];
    for (int i = 1; i < argc; i++) {
        FILE *file = fopen(argv[i], "rb");
        size_t size = file ? fread(data, 1, sizeof data, file) : 0;
        if (file) fclose(file);
        LLVMFuzzerTestOneInput(data, size);
    }
    for (int i = 0; argc == 1 && i < 20000; i++)
        LLVMFuzzerTestOneInput(data, fuzz_make(data, sizeof data));
    printf("1 passed, 0 failed\n");
    return 0;
}
#endif
