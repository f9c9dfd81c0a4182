/* fuzz_data.c: readers of token and image files, and the loader, on hostile bytes.
 *
 *     clang -g -O1 -fsanitize=fuzzer,address,undefined -I. tests/fuzz/fuzz_data.c \
 *           -o fuzz_data -lm -pthread
 *     ./fuzz_data -max_total_time=30
 * without libFuzzer, on given files or else on 20000 mutations of good ones:
 *     cc -DFUZZ_MAIN -g -fsanitize=address,undefined -I. tests/fuzz/fuzz_data.c \
 *        -o fuzz_data -lm -pthread
 *     ./fuzz_data [file ...]
 *
 * Byte 0 chooses the format, byte 1 the sequence length, byte 2 where the first file is cut during
 * the run, byte 3 where the rest is split into two files, the second of which holds labels or more
 * of the same; 0: one file. Wrong is: a crash, a sanitizer report, or an id or label outside the
 * vocabulary handed out as good. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

enum { HEAD = 4, BATCH = 2, MOST_BYTES = 1 << 16 };

static void fuzz_loader(dtrain_dataset *dataset, int64_t sequence, int file, off_t cut)
{
    static int32_t inputs[BATCH * MOST_BYTES / 4], targets[BATCH * 64];
    dtrain_loader_desc desc;
    dtrain_loader *loader;
    dtrain_dataset_info info;
    dtrain_dataset_query(dataset, &info);
    if (info.item_bytes > MOST_BYTES) abort(); /* an image is no larger than its file */
    memset(&desc, 0, sizeof desc);
    desc.dataset = dataset;
    desc.batch = BATCH;
    desc.sequence = info.item_bytes ? 0 : sequence;
    desc.in_order = cut & 1;
    if (dtrain_loader_create(NULL, &desc, &loader) != DTRAIN_OK) return;
    for (int i = 0; i < 8; i++) {
        if (i == 4 && ftruncate(file, cut) != 0) abort();
        if (dtrain_loader_next(loader, inputs, targets) != DTRAIN_OK) continue;
        for (int64_t t = 0; t < BATCH * (info.item_bytes ? 1 : sequence); t++)
            if (targets[t] < 0 || targets[t] >= info.vocab_count) abort();
    }
    dtrain_loader_destroy(loader);
}

/* Make a file of bytes, and its path. */
static int fuzz_file(const uint8_t *data, size_t size, char *path, size_t room)
{
    const int file = memfd_create("data", 0);
    if (file < 0 || write(file, data, size) != (ssize_t)size) abort();
    snprintf(path, room, "/proc/self/fd/%d", file);
    return file;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char path[80], other[32];
    dtrain_dataset_desc desc;
    dtrain_dataset *dataset;
    if (size < HEAD || size - HEAD > MOST_BYTES) return 0;
    const size_t bytes = size - HEAD, first = data[3] ? bytes * data[3] / 256 : bytes;
    const int one = fuzz_file(data + HEAD, first, path, sizeof path);
    const int two = fuzz_file(data + HEAD + first, bytes - first, other, sizeof other);
    memset(&desc, 0, sizeof desc);
    desc.path = path;
    desc.format = data[0] % 8;
    if (desc.format == DTRAIN_DATA_IDX) desc.labels = other;
    else if (data[3]) snprintf(path + strlen(path), sizeof path - strlen(path), ",%s", other);
    if (dtrain_dataset_open(NULL, &desc, &dataset) == DTRAIN_OK) {
        dtrain_dataset_info info;
        dtrain_dataset_query(dataset, &info);
        if (info.item_count > (int64_t)size) abort();
        fuzz_loader(dataset, 1 + data[1] % 64, one, (off_t)(data[2] * first / 255));
        dtrain_dataset_close(dataset);
    }
    close(one);
    close(two);
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

/* A .bin of either kind behind the head. */
static size_t fuzz_bin(uint8_t *data)
{
    uint32_t wide = fuzz_random() & 1, count = fuzz_random() % 400;
    uint32_t words[3];
    words[0] = wide ? 20240801 : 20240520;
    words[1] = wide ? 7 : 1;
    words[2] = count;
    memcpy(data, words, sizeof words);
    return 1024 + (size_t)count * (wide ? 4 : 2);
}

/* 13 images of 8 x 8, and their labels: 848 bytes, which are 250 256ths of both files, and 21. */
static size_t fuzz_idx(uint8_t *data)
{
    static const uint8_t images[16] = {0, 0, 8, 3, 0, 0, 0, 13, 0, 0, 0, 8, 0, 0, 0, 8};
    static const uint8_t labels[8] = {0, 0, 8, 1, 0, 0, 0, 13};
    memcpy(data, images, sizeof images);
    memcpy(data + 848, labels, sizeof labels);
    return 848 + 21;
}

/* A good file in one half of the cases, then up to four bytes changed, and cut. */
static size_t fuzz_make(uint8_t *data)
{
    memset(data, 0, MOST_BYTES);
    for (int i = 0; i < HEAD; i++) data[i] = (uint8_t)fuzz_random();
    if (fuzz_random() & 1) data[3] = 0;
    size_t size = HEAD;
    switch (fuzz_random() % 3) {
    case 0: size += fuzz_bin(data + HEAD); break;
    case 1:
        data[0] = DTRAIN_DATA_IDX;
        data[3] = 250;
        size += fuzz_idx(data + HEAD);
        break;
    default: size += (fuzz_random() % 8) * (3072 + 1 + (data[0] % 8 == DTRAIN_DATA_CIFAR100));
    }
    for (uint32_t i = fuzz_random() % 5; i > 0; i--)
        data[fuzz_random() % (fuzz_random() & 1 ? 20 : size)] = (uint8_t)fuzz_random();
    if (fuzz_random() % 4 == 0) size = fuzz_random() % (size + 1);
    return size;
}

int main(int argc, char **argv)
{
    static uint8_t data[MOST_BYTES];
    for (int i = 1; i < argc; i++) {
        FILE *file = fopen(argv[i], "rb");
        size_t size = file ? fread(data, 1, sizeof data, file) : 0;
        if (file) fclose(file);
        LLVMFuzzerTestOneInput(data, size);
    }
    for (int i = 0; argc == 1 && i < 20000; i++) LLVMFuzzerTestOneInput(data, fuzz_make(data));
    printf("1 passed, 0 failed\n");
    return 0;
}
#endif
