/* test_data.c: datasets, loaders: golden numbers of PyTorch, the same samples for
 * every number of ranks, and one sentence for every file that is not what it should be.
 *
 *     make build/tests/test_data && build/tests/test_data */
#include "train/data_internal.h"
#include "test.h"
#include "dtrain.h"
#include "allocator.h"
#include "files.h"
#include "shuffled.h"

static dtrain_result open_file(const char *path, uint32_t format, int64_t vocab,
                               dtrain_dataset **out)
{
    dtrain_dataset_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.format = format;
    desc.vocab_count = vocab;
    desc.path = path;
    return dtrain_dataset_open(NULL, &desc, out);
}

static dtrain_dataset_info dataset_info(const dtrain_dataset *dataset)
{
    dtrain_dataset_info info;
    dtrain_dataset_query(dataset, &info);
    return info;
}

static dtrain_loader_info loader_info(const dtrain_loader *loader)
{
    dtrain_loader_info info;
    dtrain_loader_query(loader, &info);
    return info;
}

/* Opening `name` fails with `code`, and the sentence has the path and `words`. */
static void check_refused(const char *name, uint32_t format, dtrain_result code, const char *words)
{
    dtrain_dataset *dataset = (dtrain_dataset *)1;
    const char *path = path_of(name);
    dtrain_result result = open_file(path, format, 0, &dataset);
    const char *text = dtrain_last_error();
    CHECK_MSG(result == code, "%s: %s", name, dtrain_result_text(result));
    CHECK(dataset == NULL);
    CHECK_MSG(strstr(text, path) && strstr(text, words), "\"%s\" has no \"%s\"", text, words);
}

/* ---- shuffles ---- */

static void test_randperm_golden(void)
{
    static const int64_t seed0[10] = {4, 1, 7, 5, 3, 9, 0, 8, 6, 2};
    static const int64_t seed5[10] = {1, 4, 9, 6, 3, 5, 0, 2, 8, 7};
    int64_t got[10];
    shuffled(0, 10, got);
    CHECK(memcmp(got, seed0, sizeof got) == 0);
    shuffled(5, 10, got);
    CHECK(memcmp(got, seed5, sizeof got) == 0);
    shuffled(5 + (UINT64_C(7) << 32), 10, got); /* low 32 bits */
    CHECK(memcmp(got, seed5, sizeof got) == 0);
}

/* Past 624 draws the generator renews its state; FNV-1a over the numbers torch 2.15 gave. */
static void test_randperm_long(void)
{
    static const struct {
        uint64_t seed;
        int64_t n;
        uint64_t hash;
    } golden[] = {
        {0, 625, UINT64_C(0x33494f1c57e45961)},
        {42, 5000, UINT64_C(0x668678e9f4819725)},
        {1, 100000, UINT64_C(0x6b6b202f1fc9a02d)},
        {4294967295u, 3000, UINT64_C(0x2c330f920be780a3)},
    };
    static int64_t got[100000];
    static unsigned char seen[100000];
    for (size_t g = 0; g < sizeof golden / sizeof golden[0]; g++) {
        uint64_t hash = UINT64_C(0xcbf29ce484222325);
        memset(seen, 0, sizeof seen);
        shuffled(golden[g].seed, golden[g].n, got);
        for (int64_t i = 0; i < golden[g].n; i++) {
            CHECK(got[i] >= 0 && got[i] < golden[g].n && !seen[got[i]]++);
            hash = (hash ^ (uint64_t)got[i]) * UINT64_C(0x100000001b3);
        }
        CHECK_MSG(hash == golden[g].hash, "randperm(%d) of seed %d differs from torch",
                  (int)golden[g].n, (int)golden[g].seed);
    }
}

/* ---- files ---- */

static void test_dataset_formats(void)
{
    static const unsigned char text[] = {'a', 0, 255, 'z'};
    static const uint16_t narrow[5] = {0, 1, 256, 50256, 50255};
    static const uint32_t wide[3] = {70000, 1, 128255};
    int32_t got[5];
    dtrain_dataset *dataset;

    write_file("text", text, sizeof text);
    CHECK(open_file(path_of("text"), 0, 0, &dataset) == DTRAIN_OK);
    CHECK(dataset_info(dataset).item_count == 4 && dataset_info(dataset).vocab_count == 256);
    CHECK(dtrain__dataset_read(dataset, 0, 4, got, NULL) == DTRAIN_OK);
    CHECK(got[0] == 'a' && got[1] == 0 && got[2] == 255 && got[3] == 'z');
    dtrain_dataset_close(dataset);

    write_bin("narrow", 20240520, 1, 5, narrow, sizeof narrow);
    CHECK(open_file(path_of("narrow"), 0, 0, &dataset) == DTRAIN_OK);
    CHECK(dataset_info(dataset).item_count == 5 && dataset_info(dataset).vocab_count == 50257);
    CHECK(dtrain__dataset_read(dataset, 1, 4, got, NULL) == DTRAIN_OK);
    CHECK(got[0] == 1 && got[1] == 256 && got[2] == 50256 && got[3] == 50255);
    dtrain_dataset_close(dataset);

    CHECK(open_file(path_of("narrow"), 1, 0, &dataset) == DTRAIN_OK); /* the same file as bytes */
    CHECK(dataset_info(dataset).item_count == 1034);
    dtrain_dataset_close(dataset);

    write_bin("wide", 20240801, 7, 3, wide, sizeof wide);
    CHECK(open_file(path_of("wide"), 2, 128256, &dataset) == DTRAIN_OK);
    CHECK(dtrain__dataset_read(dataset, 0, 3, got, NULL) == DTRAIN_OK);
    CHECK(got[0] == 70000 && got[1] == 1 && got[2] == 128255);
    dtrain_dataset_close(dataset);
    dtrain_dataset_close(NULL);
}

/* What nobody has called bytes is read as bytes only if it can be: tokens of nanoGPT, and other files of llm.c, are
 * told. */
static void test_dataset_guesses(void)
{
    static const uint16_t tokens[6] = {464, 262, 318, 11, 290, 50256}; /* the first words of many */
    static const struct {
        uint32_t magic;
        const char *what;
    } files[] = {{20240326, "be a model of llm.c"},
                 {20240327, "be a debugging state of llm.c"},
                 {20240328, "be a tokenizer of llm.c"},
                 {20240522, "be an evaluation of llm.c"}};
    dtrain_dataset *dataset = NULL;
    write_file("train.bin", (const char *)tokens, sizeof tokens);
    write_file("text.txt", "One\ttwo\r\n\f\x1b[0m \xc3\xa9\n", 17);
    CHECK(open_file(path_of("train.bin"), 0, 50257, &dataset) == DTRAIN_ERROR_DATA && !dataset);
    CHECK_MSG(strstr(dtrain_last_error(), "train.bin seems to be no text") &&
                  strstr(dtrain_last_error(), "DTRAIN_DATA_U16"),
              "%s", dtrain_last_error());
    for (uint32_t format = 0; format < 4; format += format ? 2 : 1) { /* auto, bytes, u16 */
        const int64_t vocab = format ? 50257 : 256;
        CHECK(open_file(path_of("train.bin"), format, vocab, &dataset) == DTRAIN_OK);
        CHECK(dataset_info(dataset).item_count == (format == 3 ? 6 : 12));
        dtrain_dataset_close(dataset);
    }
    CHECK(open_file(path_of("text.txt"), 0, 50257, &dataset) == DTRAIN_OK);
    dtrain_dataset_close(dataset);
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        write_bin("llmc", files[i].magic, 1, 5, tokens, sizeof tokens);
        check_refused("llmc", 0, DTRAIN_ERROR_DATA, files[i].what);
        CHECK(open_file(path_of("llmc"), 1, 0, &dataset) == DTRAIN_OK);
        dtrain_dataset_close(dataset);
    }
}

/* Kinds of files of bytes, which are read as bytes if nobody says otherwise, and then of files that are something else,
 * each with what the refusal calls it. */
static const struct {
    const char *name, *seems;
} file_kinds[] = {
    {"text of ASCII", NULL},
    {"text of UTF-8 with two bytes a letter", NULL},
    {"text of UTF-8 with three bytes a letter", NULL},
    {"text of Latin-1", NULL},
    {"random bytes", NULL},
    {"sound of 16 bits", NULL},
    {"sound of 8 bits", NULL},
    {"floats", NULL},
    {"a picture", NULL},
    {"text in blocks of zeros, as tar's", NULL},
    {"mostly zeros", NULL},
    {"uint16 of a few characters", "uint16 tokens"},
    {"uint16 of many words", "uint16 tokens"},
    {"uint16 of any words", "uint16 tokens"},
    {"uint32 of a few characters", "uint32 tokens"},
    {"uint32 of many words", "uint32 tokens"},
    {"int64 of a few characters", "integers of 64 bits"},
    {"int64 of many words", "integers of 64 bits"},
    {"UTF-16, little endian", "text in UTF-16"},
    {"UTF-16, big endian", "text in UTF-16"},
};

static uint64_t draw(uint64_t *seeds, uint64_t most)
{
    *seeds = *seeds * 6364136223846793005u + 1442695040888963407u;
    return (*seeds >> 33) % most;
}

/* A token of a large vocabulary: small ids are frequent, as in the files of byte pair encodings. */
static uint32_t draw_word(uint64_t *seeds)
{
    const double share = (double)draw(seeds, 1000000) * 1e-6;
    return (uint32_t)(pow(50257.0, share) - 1) % 50257;
}

static size_t put(unsigned char *at, uint64_t value, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++) at[i] = (unsigned char)(value >> 8 * i);
    return bytes;
}

/* Write the next few bytes of a file of a kind; return how many. */
static size_t make_bytes(uint64_t *seeds, size_t kind, size_t place, unsigned char at[16])
{
    static const char letters[] = "etaoin shrdlu\ncmfw ypvbgkjqxz";
    const unsigned char letter = (unsigned char)letters[draw(seeds, sizeof letters - 1)];
    const double wave = sin(0.05 * (double)place) * 9000 + (double)draw(seeds, 500);
    const bool blank = draw(seeds, 6) == 0;
    switch (kind) {
    case 0: return put(at, letter, 1);
    case 1: return blank ? put(at, ' ', 1) : put(at, 0x80d0 + (draw(seeds, 64) << 8), 2);
    case 2:
        return blank ? put(at, ' ', 1)
                     : put(at, 0x8080e4 + (draw(seeds, 0x4000) & 0x3f3f) * 256, 3);
    case 3: return put(at, draw(seeds, 9) ? letter : 0xe0 + draw(seeds, 32), 1);
    case 4: return put(at, draw(seeds, 256), 1);
    case 5: return put(at, (uint64_t)(int64_t)wave, 2);
    case 6: return put(at, (uint64_t)(wave / 256 + 128), 1);
    case 7: {
        const float value = (float)((double)draw(seeds, 2000000) * 1e-6 - 1);
        memcpy(at, &value, sizeof value);
        return sizeof value;
    }
    case 8: return put(at, (place / 7 + draw(seeds, 9)) % 256, 1);
    case 9: return put(at, place / 300 % 2 ? 0 : letter, 1);
    case 10: return put(at, draw(seeds, 400) ? 0 : draw(seeds, 256), 1);
    case 11: return put(at, draw(seeds, 65), 2);
    case 12: return put(at, draw_word(seeds), 2);
    case 13: return put(at, draw(seeds, 50257), 2);
    case 14: return put(at, draw(seeds, 65), 4);
    case 15: return put(at, draw_word(seeds) + (blank ? 65536 : 0), 4);
    case 16: return put(at, draw(seeds, 65), 8);
    case 17: return put(at, draw_word(seeds), 8);
    case 18: return put(at, draw(seeds, 50) ? (uint64_t)letter : 0x2019, 2);
    default: return put(at, (draw(seeds, 50) ? (uint64_t)letter : 0x60) << 8, 2);
    }
}

/* Files of every kind and many sizes: bytes are never refused, and what is something else is never read as bytes. */
static void test_dataset_kinds(void)
{
    static unsigned char bytes[100016];
    dtrain_dataset *dataset = NULL;
    uint64_t seeds = test_seed();
    for (int round = 0; round < 200; round++) {
        const size_t kind = draw(&seeds, sizeof file_kinds / sizeof *file_kinds);
        const size_t size = 600 + draw(&seeds, round % 2 ? 3000 : 99000);
        const int64_t vocab = draw(&seeds, 2) ? 0 : 65;
        const char *const seems = file_kinds[kind].seems;
        size_t made = 0;
        for (size_t place = 0; made < size || (seems && made % 8); place++)
            made += make_bytes(&seeds, kind, place, bytes + made);
        write_file("kind", bytes, made);
        const dtrain_result result = open_file(path_of("kind"), 0, vocab, &dataset);
        CHECK_MSG(seems ? result == DTRAIN_ERROR_DATA && strstr(dtrain_last_error(), seems)
                        : result == DTRAIN_OK,
                  "%s, %zu bytes, round %d of seed %llu: %s", file_kinds[kind].name, made, round,
                  (unsigned long long)test_seed(), result ? dtrain_last_error() : "read as bytes");
        dtrain_dataset_close(dataset);
        CHECK(open_file(path_of("kind"), DTRAIN_DATA_BYTES, vocab, &dataset) == DTRAIN_OK);
        dtrain_dataset_close(dataset);
    }
}

/* Files with a beginning that says what they are; and uint32 tokens without a header. */
static void test_dataset_magics(void)
{
    static const struct {
        const char *magic, *words;
    } files[] = {{"\x93NUMPY\x01", "be a .npy file: array.tofile"},
                 {"\x1f\x8b\x08\x08", "compressed"},
                 {"\x28\xb5\x2f\xfd", "compressed"},
                 {"\xfd\x37zXZ", "compressed"},
                 {"BZh91AY&SY", "compressed"},
                 {"PK\x03\x04", "compressed"},
                 {"PAR1\x15", "Parquet"},
                 {"\xff\xfeH", "iconv -f UTF-16"},
                 {"\xfe\xff", "iconv -f UTF-16"}};
    static const uint32_t tokens[] = {70000, 1, 128255};
    static const char *const texts[] = {"BZh9 is how bzip2 begins", "PAR1 is how Parquet does",
                                        "PK"};
    int32_t got[3];
    dtrain_dataset *dataset = NULL;
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        char bytes[64] = "";
        snprintf(bytes, sizeof bytes, "%s", files[i].magic);
        write_file("magic", bytes, sizeof bytes);
        check_refused("magic", 0, DTRAIN_ERROR_DATA, files[i].words);
    }
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        write_file("magic", texts[i], strlen(texts[i]));
        CHECK(open_file(path_of("magic"), 0, 0, &dataset) == DTRAIN_OK);
        dtrain_dataset_close(dataset);
    }
    write_file("magic", "\x93NUMPY\x01 ", 8);
    check_refused("magic", DTRAIN_DATA_U16, DTRAIN_ERROR_DATA,
                  "have none: it is a .npy file: array.tofile(PATH)");
    check_refused("magic", DTRAIN_DATA_U32, DTRAIN_ERROR_DATA,
                  "and files of uint32 tokens have none");
    write_file("u32", tokens, sizeof tokens);
    CHECK(open_file(path_of("u32"), DTRAIN_DATA_U32, 128256, &dataset) == DTRAIN_OK);
    CHECK(dtrain__dataset_read(dataset, 0, 3, got, NULL) == DTRAIN_OK);
    CHECK(got[0] == 70000 && got[1] == 1 && got[2] == 128255);
    dtrain_dataset_close(dataset);
    write_file("u32", tokens, 10);
    check_refused("u32", DTRAIN_DATA_U32, DTRAIN_ERROR_DATA,
                  "10 bytes; as uint32 tokens it would have a header of 0 and 2 items of 4");
}

static void test_dataset_bad_files(void)
{
    static const char html[] = "<!DOCTYPE html><html><body>404 Not Found</body></html>";
    static const uint16_t tokens[5] = {0, 1, 2, 3, 4};
    write_file("empty", "", 0);
    write_file("html", html, sizeof html);
    write_file("two bytes", "ab", 2);
    write_bin("version", 20240520, 2, 5, tokens, sizeof tokens);
    write_bin("version 1", 20240801, 1, 5, tokens, sizeof tokens);
    write_bin("cut", 20240520, 1, 6, tokens, sizeof tokens);
    write_bin("longer", 20240520, 1, 4, tokens, sizeof tokens);
    write_bin("huge", 20240520, 1, 0x7fffffff, tokens, sizeof tokens);
    write_bin("too_many", 20240520, 1, 0xfffffffb, tokens, sizeof tokens);
    write_bin("none", 20240520, 1, 0, tokens, 0);
    write_bin("header", 20240520, 1, 5, tokens, sizeof tokens);
    CHECK(truncate(path_of("header"), 1023) == 0);
    CHECK(mkdir(path_of("directory"), 0700) == 0);
    CHECK(mkfifo(path_of("pipe"), 0600) == 0);

    check_refused("missing", 0, DTRAIN_ERROR_FILE, "No such file");
    check_refused("empty", 0, DTRAIN_ERROR_FILE, "is empty");
    check_refused("directory", 0, DTRAIN_ERROR_FILE, "has no file whose name fits");
    check_refused("pipe", 0, DTRAIN_ERROR_FILE, "is no regular file");
    check_refused("html", 2, DTRAIN_ERROR_DATA,
                  "with magic 20240520, version 1 or magic 20240801, version 7, found");
    check_refused("html", 2, DTRAIN_ERROR_DATA, "55 bytes, 1329865020 and ");
    check_refused("two bytes", 2, DTRAIN_ERROR_DATA, "found 2 bytes");
    check_refused("header", 0, DTRAIN_ERROR_DATA, "found 1023 bytes");
    check_refused("version", 0, DTRAIN_ERROR_DATA, "1024 bytes, 20240520 and 2;");
    check_refused("version 1", 0, DTRAIN_ERROR_DATA, "1024 bytes, 20240801 and 1;");
    check_refused(
        "cut", 0, DTRAIN_ERROR_DATA,
        "has 1034 bytes; as llm.c's .bin it would have a header of 1024 and 6 items of 2");
    check_refused("longer", 0, DTRAIN_ERROR_DATA, "and 4 items of 2");
    check_refused("huge", 0, DTRAIN_ERROR_DATA, "and 2147483647 items of 2");
    check_refused("too_many", 0, DTRAIN_ERROR_DATA, "and 4294967291 items");
    check_refused("none", 0, DTRAIN_ERROR_DATA, "and 0 items");
}

static void test_dataset_arguments(void)
{
    dtrain_dataset *dataset;
    write_file("text", "abcd", 4);
    CHECK(dtrain_dataset_open(NULL, NULL, &dataset) == DTRAIN_ERROR_ARGUMENT);
    CHECK(open_file(NULL, 0, 0, &dataset) == DTRAIN_ERROR_ARGUMENT);
    CHECK(open_file("", 0, 0, &dataset) == DTRAIN_ERROR_ARGUMENT);
    CHECK(open_file(path_of("text"), 8, 0, &dataset) == DTRAIN_ERROR_ARGUMENT);
    CHECK(open_file(path_of("text"), 0, -1, &dataset) == DTRAIN_ERROR_ARGUMENT);
    CHECK(open_file(path_of("text"), 0, INT64_MAX, &dataset) == DTRAIN_ERROR_ARGUMENT);
}

static void test_dataset_token_outside_vocabulary(void)
{
    static uint16_t tokens[5000];
    static int32_t got[5000];
    dtrain_dataset *dataset;
    tokens[4321] = 50257;
    write_bin("ids", 20240520, 1, 5000, tokens, sizeof tokens);
    CHECK(open_file(path_of("ids"), 0, 0, &dataset) == DTRAIN_OK);
    CHECK(dtrain__dataset_read(dataset, 0, 4321, got, NULL) == DTRAIN_OK);
    CHECK(dtrain__dataset_read(dataset, 0, 5000, got, NULL) == DTRAIN_ERROR_DATA);
    CHECK(strstr(dtrain_last_error(), path_of("ids")) != NULL);
    CHECK(strstr(dtrain_last_error(), "token 4321 has id 50257, but the vocabulary has 50257"));
    dtrain_dataset_close(dataset);
}

/* Reads 100 tokens and expects the sentence of a file that is not what it was. */
static void check_changed(dtrain_dataset *dataset, const char *name, const char *words)
{
    int32_t got[100];
    CHECK(dtrain__dataset_read(dataset, 0, 100, got, NULL) == DTRAIN_ERROR_FILE);
    CHECK_MSG(strstr(dtrain_last_error(), path_of(name)) && strstr(dtrain_last_error(), words),
              "\"%s\" has no \"%s\"", dtrain_last_error(), words);
}

static void test_dataset_file_changes(void)
{
    static char text[20000];
    static int32_t got[20000];
    dtrain_dataset *dataset;
    memset(text, 'x', sizeof text);
    write_file("changes", text, sizeof text);
    wait_for_tick("changes");
    CHECK(open_file(path_of("changes"), 0, 0, &dataset) == DTRAIN_OK);
    CHECK(truncate(path_of("changes"), 9000) == 0);
    check_changed(dataset, "changes", "had 20000 bytes when it was opened and has 9000 now");
    CHECK(dtrain__dataset_read(dataset, 0, 20000, got, NULL) == DTRAIN_ERROR_FILE);
    CHECK(strstr(dtrain_last_error(), "having been cut") != NULL);
    CHECK(truncate(path_of("changes"), 30000) == 0);
    check_changed(dataset, "changes", "has 30000 now, having been written to");
    write_file("changes", text, sizeof text); /* the same size and bytes at another time */
    check_changed(dataset, "changes", "has 20000 now, having been written to");
    dtrain_dataset_close(dataset);

    CHECK(open_file(path_of("changes"), 0, 0, &dataset) == DTRAIN_OK);
    write_file("other", text, 10);
    CHECK(rename(path_of("other"), path_of("changes")) == 0); /* replaced: the open one is whole */
    CHECK(dtrain__dataset_read(dataset, 0, 20000, got, NULL) == DTRAIN_OK && got[19999] == 'x');
    CHECK(unlink(path_of("changes")) == 0);
    CHECK(dtrain__dataset_read(dataset, 0, 20000, got, NULL) == DTRAIN_OK);
    dtrain_dataset_close(dataset);
}

/* Offsets past 4 GiB: a sparse file of bytes with a mark near its end. */
static void test_dataset_large(void)
{
    const int64_t size = INT64_C(5) << 30;
    dtrain_dataset *dataset;
    int32_t got[3];
    int file = open(path_of("large"), O_RDWR | O_CREAT, 0600);
    CHECK(ftruncate(file, size) == 0 && pwrite(file, "xyz", 3, size - 3) == 3);
    close(file);
    CHECK(open_file(path_of("large"), 0, 0, &dataset) == DTRAIN_OK);
    CHECK(dataset_info(dataset).item_count == size);
    CHECK(dtrain__dataset_read(dataset, size - 3, 3, got, NULL) == DTRAIN_OK);
    CHECK(got[0] == 'x' && got[1] == 'y' && got[2] == 'z');
    dtrain_dataset_close(dataset);
    unlink(path_of("large"));
}

/* ---- loaders ---- */

#define TOKENS 1000 /* token i of the file is i: a window shows where it lies */
#define SEQUENCE 16
#define GLOBAL_BATCH 12
#define STEPS 30 /* of 12 samples, with 61 windows an epoch: six epochs, batches across borders */

static void write_counting_file(const char *name)
{
    static uint16_t tokens[TOKENS];
    for (int i = 0; i < TOKENS; i++) tokens[i] = (uint16_t)i;
    write_bin(name, 20240520, 1, TOKENS, tokens, sizeof tokens);
}

static dtrain_loader_desc loader_desc(dtrain_dataset *dataset, uint32_t batch, int64_t sequence)
{
    dtrain_loader_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.batch = batch;
    desc.sequence = sequence;
    desc.seed = 42;
    desc.dataset = dataset;
    return desc;
}

/* Reads one batch and gives the first token of each sample; every row must count upwards. */
static void next_firsts(dtrain_loader *loader, uint32_t batch, int32_t *firsts)
{
    static __thread int32_t inputs[GLOBAL_BATCH * SEQUENCE], targets[GLOBAL_BATCH * SEQUENCE];
    CHECK(dtrain_loader_next(loader, inputs, targets) == DTRAIN_OK);
    for (uint32_t i = 0; i < batch; i++) {
        firsts[i] = inputs[i * SEQUENCE];
        for (int32_t t = 0; t < SEQUENCE; t++) {
            CHECK(inputs[i * SEQUENCE + (uint32_t)t] == firsts[i] + t);
            CHECK(targets[i * SEQUENCE + (uint32_t)t] == firsts[i] + t + 1);
        }
    }
}

/* What every rank saw: sample k of the run is filled in by whoever got it. One for each group of ranks. */
typedef struct loader_case {
    uint32_t ranks, groups;
    bool in_order;
    int32_t firsts[STEPS * GLOBAL_BATCH];
} loader_case;

static int loader_rank(dtrain_world *world, void *user)
{
    loader_case *c = (loader_case *)user;
    int32_t firsts[GLOBAL_BATCH];
    const uint32_t number = (uint32_t)dtrain_world_rank(world), groups = c->groups;
    const uint32_t rank = number / groups, batch = GLOBAL_BATCH / c->ranks;
    dtrain_comm *comm = NULL;
    dtrain_dataset_desc data;
    dtrain_dataset *dataset;
    dtrain_loader *loader;
    memset(&data, 0, sizeof data);
    char path[128];
    snprintf(path, sizeof path, "%s/counting", folder);
    data.path = path;
    if (!CHECK(dtrain_dataset_open(world, &data, &dataset) == DTRAIN_OK)) return 1;
    dtrain_loader_desc desc = loader_desc(dataset, batch, SEQUENCE);
    desc.in_order = c->in_order;
    if (groups > 1) {
        const int color = (int)(number % groups);
        if (!CHECK(dtrain_comm_split(dtrain_world_comm(world), color, 0, &comm) == DTRAIN_OK))
            return 1;
        desc.comm = comm;
        c += color;
    }
    if (!CHECK(dtrain_loader_create(world, &desc, &loader) == DTRAIN_OK)) return 1;
    for (uint32_t step = 0; step < STEPS; step++) {
        CHECK(loader_info(loader).position == step * GLOBAL_BATCH);
        next_firsts(loader, batch, firsts);
        for (uint32_t i = 0; i < batch; i++)
            c->firsts[step * GLOBAL_BATCH + i * c->ranks + rank] = firsts[i];
    }
    dtrain_loader_destroy(loader);
    dtrain_dataset_close(dataset);
    if (comm) dtrain_comm_destroy(comm);
    return 0;
}

/* Launch `groups` groups of ranks, with a case each. */
static void run_loader_cases(loader_case *c, uint32_t groups, uint32_t ranks, bool in_order)
{
    dtrain_launch_desc launch;
    memset(&launch, 0, sizeof launch);
    memset(c, 0xff, groups * sizeof *c);
    launch.rank_count = groups * ranks;
    launch.mode = DTRAIN_LAUNCH_THREADS; /* they write into one array */
    for (uint32_t g = 0; g < groups; g++) {
        c[g].groups = groups;
        c[g].ranks = ranks;
        c[g].in_order = in_order;
    }
    CHECK_MSG(dtrain_launch(&launch, loader_rank, c, NULL) == DTRAIN_OK, "%s", dtrain_last_error());
}

static void run_loader_case(loader_case *c, uint32_t ranks, bool in_order)
{
    run_loader_cases(c, 1, ranks, in_order);
}

static void test_loader_same_samples_for_every_rank_count(void)
{
    static const uint32_t counts[] = {2, 3, 4, 6, 12};
    static loader_case one, many;
    write_counting_file("counting");
    for (int in_order = 0; in_order < 2; in_order++) {
        run_loader_case(&one, 1, in_order);
        for (int i = 0; i < 5; i++) {
            run_loader_case(&many, counts[i], in_order);
            CHECK_MSG(memcmp(one.firsts, many.firsts, sizeof one.firsts) == 0,
                      "%u ranks see other samples than one", (unsigned)counts[i]);
        }
    }
}

/* Every epoch deals every window of its shifted grid once, in torch's order; shifts vary. */
/* Each half of a world of 4 reads the samples of a world of its own. */
static void test_loader_of_a_group(void)
{
    static loader_case one, halves[2];
    write_counting_file("counting");
    for (int in_order = 0; in_order < 2; in_order++) {
        run_loader_case(&one, 1, in_order);
        run_loader_cases(halves, 2, 2, in_order);
        for (int g = 0; g < 2; g++)
            CHECK_MSG(memcmp(one.firsts, halves[g].firsts, sizeof one.firsts) == 0,
                      "group %d sees other samples than one rank", g);
    }
}

static void test_loader_epochs(void)
{
    static loader_case c;
    enum { WINDOWS = TOKENS / SEQUENCE - 1 };
    int64_t order[WINDOWS];
    int shifts_seen[SEQUENCE] = {0}, different = 0;
    write_counting_file("counting");
    run_loader_case(&c, 1, false);
    for (int epoch = 0; (epoch + 1) * WINDOWS <= STEPS * GLOBAL_BATCH; epoch++) {
        int shift = c.firsts[epoch * WINDOWS] % SEQUENCE;
        different += !shifts_seen[shift]++;
        shuffled(42 + (uint64_t)epoch, WINDOWS, order);
        for (int k = 0; k < WINDOWS; k++)
            CHECK(c.firsts[epoch * WINDOWS + k] == shift + order[k] * SEQUENCE);
    }
    CHECK_MSG(different >= 3, "%d different shifts in 5 epochs", different);
}

static void test_loader_in_order_wraps(void)
{
    static loader_case c;
    enum { WINDOWS = (TOKENS - 1) / SEQUENCE };
    write_counting_file("counting");
    run_loader_case(&c, 1, true);
    for (int k = 0; k < STEPS * GLOBAL_BATCH; k++) CHECK(c.firsts[k] == k % WINDOWS * SEQUENCE);
}

static void test_loader_resumes_by_seek(void)
{
    static loader_case c;
    int32_t firsts[GLOBAL_BATCH];
    dtrain_dataset *dataset;
    dtrain_loader *loader;
    write_counting_file("counting");
    run_loader_case(&c, 1, false);
    CHECK(open_file(path_of("counting"), 0, 0, &dataset) == DTRAIN_OK);
    dtrain_loader_desc desc = loader_desc(dataset, 4, SEQUENCE); /* another batch, same order */
    CHECK(dtrain_loader_create(NULL, &desc, &loader) == DTRAIN_OK);
    for (int round = 0; round < 40; round++) { /* back and forth over epoch borders */
        uint64_t position = (uint64_t)(round * 97 % (STEPS * GLOBAL_BATCH - 4));
        dtrain_loader_seek(loader, position);
        next_firsts(loader, 4, firsts);
        CHECK(memcmp(firsts, c.firsts + position, sizeof firsts[0] * 4) == 0);
        CHECK(loader_info(loader).position == position + 4);
    }
    dtrain_loader_destroy(loader);
    dtrain_dataset_close(dataset);
}

/* Spans from one window upwards: every shift must stay inside, every file size must work. */
static void test_loader_small_spans(void)
{
    int32_t inputs[8], targets[8];
    dtrain_dataset *dataset;
    dtrain_loader *loader;
    write_counting_file("counting");
    CHECK(open_file(path_of("counting"), 0, 0, &dataset) == DTRAIN_OK);
    for (int64_t span = 9; span < 40; span++) {
        dtrain_loader_desc desc = loader_desc(dataset, 1, 8);
        desc.first_item = 100;
        desc.item_count = span;
        CHECK(dtrain_loader_create(NULL, &desc, &loader) == DTRAIN_OK);
        CHECK(loader_info(loader).samples_per_epoch == (span < 16 ? 1 : span / 8 - 1));
        int32_t lowest = INT32_MAX, highest = 0;
        for (int k = 0; k < 200 * loader_info(loader).samples_per_epoch; k++) {
            CHECK(dtrain_loader_next(loader, inputs, targets) == DTRAIN_OK);
            lowest = inputs[0] < lowest ? inputs[0] : lowest;
            highest = targets[7] > highest ? targets[7] : highest;
        }
        CHECK_MSG(lowest == 100, "span %d: first token read is %d", (int)span, (int)lowest);
        int64_t reach = loader_info(loader).samples_per_epoch * 8 + (span < 16 ? span - 9 : 7);
        CHECK_MSG(highest == 100 + reach && reach < span, "span %d: last token is %d", (int)span,
                  (int)highest);
        dtrain_loader_destroy(loader);
    }
    dtrain_dataset_close(dataset);
}

static void check_loader_refused(const dtrain_loader_desc *desc, dtrain_result code,
                                 const char *words)
{
    dtrain_loader *loader = (dtrain_loader *)1;
    CHECK(dtrain_loader_create(NULL, desc, &loader) == code);
    CHECK(loader == NULL);
    CHECK_MSG(strstr(dtrain_last_error(), words) != NULL, "\"%s\"", dtrain_last_error());
}

static void test_loader_refusals(void)
{
    dtrain_dataset *dataset;
    int32_t tokens[16];
    write_counting_file("counting");
    CHECK(open_file(path_of("counting"), 0, 0, &dataset) == DTRAIN_OK);
    dtrain_loader_desc desc = loader_desc(dataset, 1, 64);
    desc.item_count = 40;
    check_loader_refused(&desc, DTRAIN_ERROR_DATA,
                         "has 40 tokens here, but a window of 64 + 1 needs 65");
    desc.item_count = 64;
    check_loader_refused(&desc, DTRAIN_ERROR_DATA, "needs 65");
    desc.item_count = 0, desc.sequence = INT64_MAX;
    check_loader_refused(&desc, DTRAIN_ERROR_DATA, "use a shorter sequence or a larger file");
    desc.sequence = 64, desc.first_item = 1001;
    check_loader_refused(&desc, DTRAIN_ERROR_ARGUMENT, "from 1001 on");
    desc.first_item = 1, desc.item_count = 1000;
    check_loader_refused(&desc, DTRAIN_ERROR_ARGUMENT, "1000 tokens from 1 on");
    desc.first_item = -1;
    check_loader_refused(&desc, DTRAIN_ERROR_ARGUMENT, "from -1 on");
    desc.first_item = 0, desc.batch = 0;
    check_loader_refused(&desc, DTRAIN_ERROR_ARGUMENT, "at least 1");
    desc.batch = 1, desc.sequence = 0;
    check_loader_refused(&desc, DTRAIN_ERROR_ARGUMENT, "at least 1");
    desc.sequence = 16, desc.dataset = NULL;
    check_loader_refused(&desc, DTRAIN_ERROR_ARGUMENT, "dataset is NULL");
    CHECK(dtrain_loader_next(NULL, tokens, tokens) == DTRAIN_ERROR_ARGUMENT);
    dtrain_loader_destroy(NULL);
    dtrain_dataset_close(dataset);
}

/* A file that is cut in mid-epoch is an error of this call that names it, not a crash, and stays one. */
static void test_loader_file_shrinks(void)
{
    int32_t inputs[16], targets[16];
    dtrain_dataset *dataset;
    dtrain_loader *loader;
    write_counting_file("shrinking");
    CHECK(open_file(path_of("shrinking"), 0, 0, &dataset) == DTRAIN_OK);
    dtrain_loader_desc desc = loader_desc(dataset, 1, 16);
    desc.in_order = true;
    CHECK(dtrain_loader_create(NULL, &desc, &loader) == DTRAIN_OK);
    CHECK(dtrain_loader_next(loader, inputs, targets) == DTRAIN_OK);
    CHECK(truncate(path_of("shrinking"), 1024 + 2 * 40) == 0);
    for (int again = 0; again < 3; again++) {
        CHECK(dtrain_loader_next(loader, inputs, targets) == DTRAIN_ERROR_FILE);
        CHECK(strstr(dtrain_last_error(), path_of("shrinking")) != NULL);
        CHECK(strstr(dtrain_last_error(), "had 3024 bytes when it was opened and has 1104 now"));
        CHECK(loader_info(loader).position == 1);
    }
    dtrain_loader_destroy(loader);
    dtrain_dataset_close(dataset);
}

/* ---- many files ---- */

static uint16_t stream[3000]; /* the tokens of all files, one behind the other */
static void make_stream(void)
{
    for (int i = 0; i < 3000; i++) stream[i] = (uint16_t)(i * 7 % 50257);
}

/* Writes stream[first, first + count) as a file of the format. */
static void write_part(const char *name, uint32_t format, int first, int count)
{
    if (format == DTRAIN_DATA_BIN)
        write_bin(name, 20240520, 1, (uint32_t)count, stream + first, (size_t)count * 2);
    else write_file(name, stream + first, (size_t)count * 2);
}

/* `path` opens as all of the stream: whole, and in pieces of every length around borders. */
static void check_stream(const char *path, uint32_t format, size_t files)
{
    static int32_t got[3000];
    dtrain_dataset *dataset;
    if (!CHECK_MSG(open_file(path, format, 0, &dataset) == DTRAIN_OK, "%s", dtrain_last_error()))
        return;
    CHECK(dataset_info(dataset).item_count == 3000 && dataset_info(dataset).file_count == files);
    CHECK(dataset_info(dataset).item_bytes == 0 && dataset_info(dataset).vocab_count == 50257);
    CHECK(dtrain__dataset_read(dataset, 0, 3000, got, NULL) == DTRAIN_OK);
    for (int i = 0; i < 3000; i++) CHECK(got[i] == stream[i]);
    for (int first = 0; first < 3000; first += 13)
        for (int count = 1; count < 300 && first + count <= 3000; count = count * 3 + first % 2) {
            CHECK(dtrain__dataset_read(dataset, first, count, got, NULL) == DTRAIN_OK);
            CHECK(got[0] == stream[first] && got[count - 1] == stream[first + count - 1]);
        }
    dtrain_dataset_close(dataset);
}

/* One stream in one file, three, and a hundred: the same tokens, by list, folder and pattern. */
static void test_many_files(void)
{
    char list[600], name[64];
    make_stream();
    for (uint32_t format = DTRAIN_DATA_BIN; format <= DTRAIN_DATA_U16; format++) {
        const char *kind = format == DTRAIN_DATA_BIN ? "bin" : "u16";
        snprintf(name, sizeof name, "one.%s", kind);
        write_part(name, format, 0, 3000);
        check_stream(path_of(name), format, 1);
        if (format == DTRAIN_DATA_BIN) check_stream(path_of(name), DTRAIN_DATA_AUTO, 1);

        static const int cuts[] = {0, 1, 1700, 3000}; /* three files, one of a single token */
        list[0] = 0;
        for (int i = 2; i >= 0; i--) { /* written in another order than that of their names */
            snprintf(name, sizeof name, "part_%d.%s", i, kind);
            write_part(name, format, cuts[i], cuts[i + 1] - cuts[i]);
        }
        for (int i = 0; i < 3; i++)
            snprintf(list + strlen(list), sizeof list - strlen(list), "%s%s/part_%d.%s",
                     i ? "," : "", folder, i, kind);
        check_stream(list, format, 3);
        snprintf(name, sizeof name, "part_?.%s", kind);
        check_stream(path_of(name), format, 3);
        snprintf(list, sizeof list, "%s/part_[01].%s,%s/part_2.%s", folder, kind, folder, kind);
        check_stream(list, format, 3);

        snprintf(name, sizeof name, "hundred_%s", kind);
        CHECK(mkdir(path_of(name), 0700) == 0);
        for (int i = 0; i < 100; i++) {
            snprintf(name, sizeof name, "hundred_%s/part_%03d", kind, i);
            write_part(name, format, i * 30, 30);
        }
        snprintf(name, sizeof name, "hundred_%s/.hidden", kind);
        write_file(name, "x", 1);
        snprintf(name, sizeof name, "hundred_%s/folder", kind);
        CHECK(mkdir(path_of(name), 0700) == 0);
        snprintf(name, sizeof name, "hundred_%s", kind);
        check_stream(path_of(name), format, 100);
    }
    CHECK(chdir(folder) == 0); /* a pattern without a folder is of this one */
    check_stream("part_*.bin", 0, 3);
    CHECK(chdir("/") == 0);
    write_part("a,[b]*.u16", DTRAIN_DATA_U16, 0, 3000); /* what exists is no list and no pattern */
    check_stream(path_of("a,[b]*.u16"), DTRAIN_DATA_U16, 1);
}

/* However tokens are cut into files, a loader deals the same samples. */
static void test_loader_many_files(void)
{
    int32_t one[2][64], many[2][64];
    dtrain_dataset *data[2];
    dtrain_loader *loaders[2];
    char name[64];
    make_stream();
    write_part("whole.bin", DTRAIN_DATA_BIN, 0, 3000);
    for (int i = 0; i < 7; i++) {
        snprintf(name, sizeof name, "seventh_%d.bin", i);
        write_part(name, DTRAIN_DATA_BIN, i * 429, i < 6 ? 429 : 426);
    }
    CHECK(open_file(path_of("whole.bin"), 0, 0, &data[0]) == DTRAIN_OK);
    CHECK(open_file(path_of("seventh_*.bin"), 0, 0, &data[1]) == DTRAIN_OK);
    for (int i = 0; i < 2; i++) {
        dtrain_loader_desc desc;
        memset(&desc, 0, sizeof desc);
        desc.dataset = data[i], desc.batch = 2, desc.sequence = 32, desc.seed = 5;
        CHECK(dtrain_loader_create(NULL, &desc, &loaders[i]) == DTRAIN_OK);
    }
    for (int step = 0; step < 100; step++) {
        CHECK(dtrain_loader_next(loaders[0], one[0], one[1]) == DTRAIN_OK);
        CHECK(dtrain_loader_next(loaders[1], many[0], many[1]) == DTRAIN_OK);
        CHECK(memcmp(one, many, sizeof one) == 0);
    }
    for (int i = 0; i < 2; i++) dtrain_loader_destroy(loaders[i]), dtrain_dataset_close(data[i]);
}

/* Which of many files is at fault is in the sentence; so is a change of one that is not kept open. */
static void test_many_files_at_fault(void)
{
    static const uint16_t wild[] = {1, 2, 60000};
    dtrain_dataset *dataset;
    int32_t got[100];
    char name[64];
    make_stream();
    CHECK(mkdir(path_of("faulty"), 0700) == 0);
    for (int i = 0; i < 70; i++) {
        snprintf(name, sizeof name, "faulty/part_%03d", i);
        write_part(name, DTRAIN_DATA_U16, 0, 3);
    }
    write_file("faulty/part_066", wild, sizeof wild);
    wait_for_tick("faulty/part_066");
    CHECK(open_file(path_of("faulty"), DTRAIN_DATA_U16, 0, &dataset) == DTRAIN_OK);
    CHECK(dtrain__dataset_read(dataset, 190, 15, got, NULL) == DTRAIN_ERROR_DATA);
    CHECK(strstr(dtrain_last_error(), "faulty/part_066: token 2 has id 60000") != NULL);
    CHECK(dtrain__dataset_read(dataset, 201, 6, got, NULL) == DTRAIN_OK);
    write_part("faulty/part_067", DTRAIN_DATA_U16, 0, 2);
    CHECK(dtrain__dataset_read(dataset, 201, 6, got, NULL) == DTRAIN_ERROR_FILE);
    CHECK(strstr(dtrain_last_error(), "faulty/part_067 changed while it was in use: it had 6") !=
          NULL);
    CHECK(unlink(path_of("faulty/part_068")) == 0); /* beyond those that stay open */
    CHECK(dtrain__dataset_read(dataset, 204, 3, got, NULL) == DTRAIN_ERROR_FILE);
    CHECK(strstr(dtrain_last_error(), "faulty/part_068 cannot be opened again: No such file"));
    write_part("faulty/other", DTRAIN_DATA_U16, 0, 3);
    CHECK(rename(path_of("faulty/other"), path_of("faulty/part_069")) == 0);
    CHECK(dtrain__dataset_read(dataset, 207, 3, got, NULL) == DTRAIN_ERROR_FILE);
    CHECK(strstr(dtrain_last_error(), "being another file") != NULL);
    dtrain_dataset_close(dataset);

    static const uint32_t wide[] = {1, 2, 3};
    write_bin("mixed_1", 20240520, 1, 5, stream, 10);
    write_bin("mixed_2", 20240801, 7, 3, wide, sizeof wide);
    write_file("mixed_3", "text", 4);
    write_file("mixed_4", "odd", 3);
    char list[300];
    static const struct {
        const char *files;
        uint32_t format;
        const char *words;
    } cases[] = {
        {"1,2", 0, "mixed_2 has items of 4 bytes and"},
        {"1,3", 0, "mixed_1 is llm.c's .bin and"},
        {"3,1", 0, "mixed_1 is llm.c's .bin and"},
        {"3,1", DTRAIN_DATA_BIN, "mixed_3 is no llm.c token file"},
        {"3,1", DTRAIN_DATA_U16, "mixed_1 begins with a header"},
        {"3,4", DTRAIN_DATA_U16, "mixed_4 has 3 bytes; as uint16 tokens"},
        {"3,,1", 0, "a path in"},
        {"3,", 0, "is empty"},
        {",3", 0, "is empty"},
        {"3,5", 0, "mixed_5 cannot be opened: No such file"},
        {"3,x*", 0, "has no file whose name fits \"mixed_x*\""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        list[0] = 0;
        for (const char *at = cases[i].files;; at++) {
            const size_t length = strcspn(at, ",");
            if (length)
                snprintf(list + strlen(list), sizeof list - strlen(list), "%s/mixed_%.*s", folder,
                         (int)length, at);
            at += length;
            if (!*at) break;
            strcat(list, ",");
        }
        CHECK(open_file(list, cases[i].format, 0, &dataset) != DTRAIN_OK && !dataset);
        CHECK_MSG(strstr(dtrain_last_error(), cases[i].words) != NULL, "\"%s\" has no \"%s\"",
                  dtrain_last_error(), cases[i].words);
    }
}

/* Every allocation fails once: an error, no leak, no crash. */
static int memory_rank(dtrain_world *world, void *user)
{
    dtrain_dataset_desc data;
    dtrain_dataset *dataset = NULL;
    dtrain_loader *loader = NULL;
    (void)user;
    memset(&data, 0, sizeof data);
    data.path = path_of("counting");
    dtrain_result result = dtrain_dataset_open(world, &data, &dataset);
    if (result == DTRAIN_OK) {
        dtrain_loader_desc desc = loader_desc(dataset, 1, 16);
        result = dtrain_loader_create(world, &desc, &loader);
    }
    CHECK(result == DTRAIN_OK || result == DTRAIN_ERROR_MEMORY);
    dtrain_loader_destroy(loader);
    dtrain_dataset_close(dataset);
    return result == DTRAIN_OK ? 0 : 3;
}
static void test_memory_failures(void)
{
    dtrain_launch_desc launch;
    dtrain_result result = DTRAIN_ERROR_MEMORY;
    int fail_at = 1;
    write_counting_file("counting");
    memset(&launch, 0, sizeof launch);
    launch.mode = DTRAIN_LAUNCH_THREADS;
    for (; result != DTRAIN_OK && fail_at < 1000; fail_at++) {
        counted_memory state;
        memset(&state, 0, sizeof state);
        state.fail_at = fail_at;
        launch.options.allocator = counted_allocator(&state);
        result = dtrain_launch(&launch, memory_rank, NULL, NULL);
        CHECK_MSG(state.live == 0 && state.live_bytes == 0 && state.wrong == 0,
                  "%ld blocks left after failure %d", state.live, fail_at);
    }
    CHECK(result == DTRAIN_OK && fail_at > 4);
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    if (!files_begin("test_data")) return 1;
    RUN(test_randperm_golden);
    RUN(test_randperm_long);
    RUN(test_dataset_formats);
    RUN(test_dataset_guesses);
    RUN(test_dataset_kinds);
    RUN(test_dataset_magics);
    RUN(test_dataset_bad_files);
    RUN(test_dataset_arguments);
    RUN(test_dataset_token_outside_vocabulary);
    RUN(test_dataset_file_changes);
    RUN(test_dataset_large);
    RUN(test_loader_same_samples_for_every_rank_count);
    RUN(test_loader_of_a_group);
    RUN(test_loader_epochs);
    RUN(test_loader_in_order_wraps);
    RUN(test_loader_resumes_by_seek);
    RUN(test_loader_small_spans);
    RUN(test_loader_refusals);
    RUN(test_loader_file_shrinks);
    RUN(test_many_files);
    RUN(test_loader_many_files);
    RUN(test_many_files_at_fault);
    RUN(test_memory_failures);
    return test_summary() + !files_end();
}
