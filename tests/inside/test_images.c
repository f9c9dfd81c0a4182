/* test_images.c: datasets of samples: CIFAR and IDX files, sources of the host's own, and loaders of them, beside
 * plain loops over the arrays that the files were written from.
 *
 *     make build/tests/test_images && build/tests/test_images */
#include "train/data_internal.h"
#include "test.h"
#include "dtrain.h"
#include "allocator.h"
#include "files.h"
#include "shuffled.h"

enum { IMAGES = 60, PIXELS = 3072, SMALL = 6 * 5 };

/* What the files hold: pixel p of image i, its label and its fine label. */
static unsigned char pixel_of(int64_t i, int64_t p) { return (unsigned char)(i * 31 + p * 7); }
static int32_t label_of(int64_t i) { return (int32_t)(i * 3 % 10); }
static int32_t fine_of(int64_t i) { return (int32_t)(i * 17 % 100); }

/* Writes images [first, past) as a file of CIFAR with `labels` bytes of labels. */
static void write_cifar(const char *name, int labels, int64_t first, int64_t past)
{
    static unsigned char records[IMAGES][2 + PIXELS];
    unsigned char *at = records[0];
    for (int64_t i = first; i < past; i++) {
        *at++ = (unsigned char)label_of(i);
        if (labels == 2) *at++ = (unsigned char)fine_of(i);
        for (int64_t p = 0; p < PIXELS; p++) *at++ = pixel_of(i, p);
    }
    write_file(name, records, (size_t)(at - records[0]));
}

/* Writes an IDX file: its magic, the lengths of its axes, then bytes. */
static void write_idx(const char *name, unsigned type, unsigned axes, const uint32_t *lengths,
                      const unsigned char *bytes, size_t count)
{
    static unsigned char image[1 << 16];
    const unsigned char magic[4] = {0, 0, (unsigned char)type, (unsigned char)axes};
    unsigned char *at = image + 4;
    memcpy(image, magic, 4);
    for (unsigned a = 0; a < axes; a++)
        for (int shift = 24; shift >= 0; shift -= 8) *at++ = (unsigned char)(lengths[a] >> shift);
    memcpy(at, bytes, count);
    write_file(name, image, (size_t)(at - image) + count);
}

/* Writes images of 6 x 5 and labels, [first, past), as two IDX files. */
static void write_mnist(const char *images, const char *labels, int64_t first, int64_t past)
{
    static unsigned char pixels[IMAGES][SMALL], answers[IMAGES];
    const uint32_t lengths[3] = {(uint32_t)(past - first), 6, 5};
    for (int64_t i = first; i < past; i++) {
        for (int64_t p = 0; p < SMALL; p++) pixels[i - first][p] = pixel_of(i, p);
        answers[i - first] = (unsigned char)label_of(i);
    }
    write_idx(images, 8, 3, lengths, pixels[0], (size_t)(past - first) * SMALL);
    write_idx(labels, 8, 1, lengths, answers, (size_t)(past - first));
}

static dtrain_result open_images(uint32_t format, const char *path, const char *labels,
                                 dtrain_dataset **out)
{
    dtrain_dataset_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.format = format;
    desc.path = path;
    desc.labels = labels;
    return dtrain_dataset_open(NULL, &desc, out);
}

/* All images, one by one and in runs, with labels and without. */
static void check_images(dtrain_dataset *dataset, int64_t bytes, int32_t (*answer)(int64_t),
                         int64_t classes, size_t files)
{
    static unsigned char got[IMAGES * PIXELS];
    int32_t labels[IMAGES];
    dtrain_dataset_info info;
    dtrain_dataset_query(dataset, &info);
    CHECK(info.item_count == IMAGES && info.item_bytes == (size_t)bytes);
    CHECK(info.vocab_count == classes && info.file_count == files);
    CHECK(info.shape[0] * info.shape[1] * info.shape[2] == bytes);
    for (int64_t first = 0; first < IMAGES; first++)
        for (int64_t count = 1; first + count <= IMAGES; count *= 3) {
            memset(got, 0xee, (size_t)(count * bytes));
            int32_t *wanted = first % 2 ? labels : NULL;
            CHECK(dtrain__dataset_read(dataset, first, count, got, wanted) == DTRAIN_OK);
            for (int64_t i = 0; i < count; i++) {
                CHECK(!wanted || labels[i] == answer(first + i));
                bool same = true;
                for (int64_t p = 0; p < bytes; p++)
                    same = same && got[i * bytes + p] == pixel_of(first + i, p);
                CHECK(same);
            }
        }
}

static void test_cifar(void)
{
    dtrain_dataset *dataset;
    write_cifar("data_batch_1.bin", 1, 0, 30);
    write_cifar("data_batch_2.bin", 1, 30, 31);
    write_cifar("data_batch_3.bin", 1, 31, IMAGES);
    write_cifar("hundred", 2, 0, IMAGES);
    CHECK(open_images(DTRAIN_DATA_CIFAR10, path_of("data_batch_*.bin"), NULL, &dataset) ==
          DTRAIN_OK);
    check_images(dataset, PIXELS, label_of, 10, 3);
    dtrain_dataset_close(dataset);
    CHECK(open_images(DTRAIN_DATA_CIFAR100, path_of("hundred"), NULL, &dataset) == DTRAIN_OK);
    check_images(dataset, PIXELS, fine_of, 100, 1);
    dtrain_dataset_close(dataset);

    CHECK(open_images(DTRAIN_DATA_CIFAR10, path_of("hundred"), NULL, &dataset) ==
          DTRAIN_ERROR_DATA);
    CHECK(strstr(dtrain_last_error(),
                 "has 184440 bytes; as the binary version of CIFAR-10 it would "
                 "have a header of 0 and 60 items of 3073: is it cut off") != NULL);
    CHECK(truncate(path_of("hundred"), 3074 * 30 + 1) == 0);
    CHECK(open_images(DTRAIN_DATA_CIFAR100, path_of("hundred"), NULL, &dataset) ==
          DTRAIN_ERROR_DATA);
    CHECK(strstr(dtrain_last_error(), "as the binary version of CIFAR-100") != NULL);
    CHECK(open_images(DTRAIN_DATA_CIFAR10, path_of("data_batch_1.bin"), path_of("hundred"),
                      &dataset) == DTRAIN_ERROR_ARGUMENT);
    CHECK(strstr(dtrain_last_error(), "labels is for DTRAIN_DATA_IDX") != NULL);
}

/* A label that is none of ten is found when it is read, in its file and place. */
static void test_labels_checked(void)
{
    static unsigned char record[3][1 + PIXELS];
    unsigned char got[2 * PIXELS];
    int32_t labels[2];
    dtrain_dataset *dataset;
    record[2][0] = 10;
    write_file("label_1", record, 2 * sizeof record[0]);
    write_file("label_2", record, sizeof record);
    CHECK(open_images(DTRAIN_DATA_CIFAR10, path_of("label_?"), NULL, &dataset) == DTRAIN_OK);
    CHECK(dtrain__dataset_read(dataset, 3, 1, got, labels) == DTRAIN_OK);
    CHECK(dtrain__dataset_read(dataset, 4, 1, got, NULL) == DTRAIN_OK);
    CHECK(dtrain__dataset_read(dataset, 3, 2, got, labels) == DTRAIN_ERROR_DATA);
    CHECK(strstr(dtrain_last_error(), "label_2: sample 2 has label 10, but labels are below 10") !=
          NULL);
    dtrain_dataset_close(dataset);
}

static void test_idx(void)
{
    dtrain_dataset *dataset;
    write_mnist("images-1", "labels-1", 0, 7);
    write_mnist("images-2", "labels-2", 7, IMAGES);
    CHECK(open_images(DTRAIN_DATA_IDX, path_of("images-*"), path_of("labels-*"), &dataset) ==
          DTRAIN_OK);
    check_images(dataset, SMALL, label_of, 10, 2);
    dtrain_dataset_info info;
    dtrain_dataset_query(dataset, &info);
    CHECK(info.shape[0] == 1 && info.shape[1] == 6 && info.shape[2] == 5);
    dtrain_dataset_close(dataset);

    static const unsigned char bytes[24] = {1, 2, 3, 4, 5, 6, 7, 8, 9};
    const uint32_t four[4] = {2, 3, 2, 2}, two[2] = {2, 12};
    write_idx("four", 8, 4, four, bytes, 24);
    write_idx("two", 8, 2, two, bytes, 24);
    write_idx("answers", 8, 1, two, bytes, 2);
    CHECK(open_images(DTRAIN_DATA_IDX, path_of("four"), path_of("answers"), &dataset) == DTRAIN_OK);
    dtrain_dataset_query(dataset, &info);
    CHECK(info.shape[0] == 3 && info.shape[1] == 2 && info.shape[2] == 2 && info.item_bytes == 12);
    dtrain_dataset_close(dataset);
    CHECK(open_images(DTRAIN_DATA_IDX, path_of("two"), path_of("answers"), &dataset) == DTRAIN_OK);
    dtrain_dataset_query(dataset, &info);
    CHECK(info.shape[0] == 1 && info.shape[1] == 1 && info.shape[2] == 12);
    dtrain_dataset_close(dataset);
}

static void check_idx_refused(const char *images, const char *labels, dtrain_result code,
                              const char *words)
{
    dtrain_dataset *dataset = (dtrain_dataset *)1;
    const dtrain_result result =
        open_images(DTRAIN_DATA_IDX, path_of(images), labels ? path_of(labels) : NULL, &dataset);
    CHECK_MSG(result == code && !dataset, "%s: %s", images, dtrain_result_text(result));
    CHECK_MSG(strstr(dtrain_last_error(), words) != NULL, "\"%s\" has no \"%s\"",
              dtrain_last_error(), words);
}

static void test_idx_malformed(void)
{
    static const unsigned char bytes[64] = {1};
    static const unsigned char zipped[16] = {0x1f, 0x8b, 8};
    const uint32_t good[3] = {2, 3, 4}, none[3] = {0, 3, 4},
                   huge[3] = {2, 0xffffffffu, 0xffffffffu},
                   wraps[3] = {0x80000000u, 0x80000000u, 4}, one[1] = {3};
    write_idx("good", 8, 3, good, bytes, 24);
    write_idx("labels", 8, 1, good, bytes, 2);
    write_idx("labels of 3", 8, 1, one, bytes, 3);
    write_idx("floats", 13, 3, good, bytes, 24);
    write_idx("five axes", 8, 5, (const uint32_t[5]){1, 1, 1, 1, 1}, bytes, 1);
    write_idx("short", 8, 3, good, bytes, 23);
    write_idx("long", 8, 3, good, bytes, 25);
    write_idx("none", 8, 3, none, bytes, 0);
    write_idx("huge", 8, 3, huge, bytes, 24);
    write_idx("wraps", 8, 3, wraps, bytes, 64);
    write_file("zipped", zipped, sizeof zipped);
    write_file("tiny", bytes, 7);
    write_idx("cut header", 8, 3, good, bytes, 0);
    CHECK(truncate(path_of("cut header"), 12) == 0);
    CHECK(mkdir(path_of("pair"), 0700) == 0);
    write_idx("pair/1", 8, 3, good, bytes, 24);
    write_idx("pair/2", 8, 3, (const uint32_t[3]){2, 4, 3}, bytes, 24);
    CHECK(mkdir(path_of("pair labels"), 0700) == 0);
    write_idx("pair labels/1", 8, 1, good, bytes, 2);
    write_idx("pair labels/2", 8, 1, good, bytes, 2);
    const dtrain_result bad = DTRAIN_ERROR_DATA;
    check_idx_refused("good", NULL, DTRAIN_ERROR_ARGUMENT, "needs labels");
    check_idx_refused("good", "labels of 3", bad, "has 2 images and");
    check_idx_refused("good", "good", bad, "is no IDX file of labels: expected bytes 0 0 8 and 1");
    check_idx_refused("labels", "labels", bad, "expected bytes 0 0 8 and 2 to 4 axes");
    check_idx_refused("floats", "labels", bad, "found 0 0 13 3");
    check_idx_refused("five axes", "labels", bad, "found 0 0 8 5");
    check_idx_refused("short", "labels", bad, "and 2 items of 12");
    check_idx_refused("long", "labels", bad, "has 41 bytes; as IDX");
    check_idx_refused("none", "labels", bad, "and 0 items");
    check_idx_refused("huge", "labels", bad, "has 40 bytes; as IDX");
    check_idx_refused("wraps", "labels", bad, "and 2147483648 items");
    check_idx_refused("zipped", "labels", bad, "gunzip it first");
    check_idx_refused("tiny", "labels", bad, "in 7 bytes");
    check_idx_refused("cut header", "labels", bad, "in 12 bytes");
    check_idx_refused("missing", "labels", DTRAIN_ERROR_FILE, "No such file");
    check_idx_refused("good", "missing", DTRAIN_ERROR_FILE, "No such file");
    check_idx_refused("pair", "labels", DTRAIN_ERROR_ARGUMENT, "2 IDX files of images and 1 of");
    check_idx_refused("pair", "pair labels", bad, "are (1, 4, 3), those of");
}

/* Either file of a pair that changes is named. */
static void test_files_change(void)
{
    unsigned char got[PIXELS];
    int32_t label;
    dtrain_dataset *dataset;
    write_mnist("changing images", "changing labels", 0, IMAGES);
    wait_for_tick("changing labels");
    CHECK(open_images(DTRAIN_DATA_IDX, path_of("changing images"), path_of("changing labels"),
                      &dataset) == DTRAIN_OK);
    CHECK(dtrain__dataset_read(dataset, 0, 1, got, &label) == DTRAIN_OK);
    CHECK(truncate(path_of("changing labels"), 20) == 0);
    CHECK(dtrain__dataset_read(dataset, 0, 1, got, NULL) == DTRAIN_OK);
    CHECK(dtrain__dataset_read(dataset, 0, 1, got, &label) == DTRAIN_ERROR_FILE);
    CHECK(strstr(dtrain_last_error(), "changing labels changed while it was in use") != NULL);
    CHECK(truncate(path_of("changing images"), 20) == 0);
    CHECK(dtrain__dataset_read(dataset, 0, 1, got, NULL) == DTRAIN_ERROR_FILE);
    CHECK(strstr(dtrain_last_error(), "changing images changed while it was in use") != NULL);
    dtrain_dataset_close(dataset);
}

/* ---- loaders of samples ---- */

enum { FLOATS = 4, BATCH = 4, STEPS = 60 };

/* A transform that shows all that it was given; how it draws depends on item and epoch alone. */
static dtrain_result show(void *user, const dtrain_sample *sample, void *output)
{
    const uint64_t seed = *(const uint64_t *)user;
    float *out = (float *)output;
    out[0] = (float)sample->item;
    out[1] = (float)sample->epoch;
    out[2] = (float)((const unsigned char *)sample->data)[5] + 1000 * (float)sample->label;
    out[3] = dtrain_random_uniform(seed, sample->epoch + 1, (uint64_t)sample->item);
    return DTRAIN_OK;
}

static const uint64_t show_seed = 77;

static dtrain_loader_desc samples_desc(dtrain_dataset *dataset, uint32_t batch)
{
    dtrain_loader_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.batch = batch;
    desc.seed = 21;
    desc.dataset = dataset;
    desc.transform = show;
    desc.output_bytes = FLOATS * sizeof(float);
    desc.user = (void *)(uintptr_t)&show_seed;
    return desc;
}

/* The item of sample k: what loaders of every kind must deal. */
static int64_t item_of(uint64_t k, int64_t items, int64_t per_epoch)
{
    static __thread int64_t order[IMAGES], count;
    static __thread uint64_t entered;
    const uint64_t epoch = k / (uint64_t)per_epoch;
    if (count != items || entered != epoch) shuffled(21 + epoch, items, order);
    count = items;
    entered = epoch;
    return order[k % (uint64_t)per_epoch];
}

typedef struct samples_case {
    uint32_t global_batch;
    bool drop_last, differ; /* ranks have different numbers of workers */
    uint32_t workers;
} samples_case;

static int samples_rank(dtrain_world *world, void *user)
{
    const samples_case *c = (const samples_case *)user;
    const uint32_t ranks = (uint32_t)dtrain_world_size(world), batch = c->global_batch / ranks,
                   rank = (uint32_t)dtrain_world_rank(world);
    const int64_t items = 50, left = c->drop_last ? items % c->global_batch : 0;
    float inputs[24 * FLOATS];
    int32_t labels[24];
    dtrain_dataset_desc data;
    dtrain_dataset *dataset;
    dtrain_loader *loader;
    memset(&data, 0, sizeof data);
    data.format = DTRAIN_DATA_CIFAR10;
    data.path = path_of("data_batch_*.bin");
    if (!CHECK(dtrain_dataset_open(world, &data, &dataset) == DTRAIN_OK)) return 1;
    dtrain_loader_desc desc = samples_desc(dataset, batch);
    desc.first_item = 10; /* the other fifty */
    desc.drop_last = c->drop_last;
    desc.workers = c->differ ? rank % 5 : c->workers;
    desc.prefetch = desc.workers ? 1 + rank : 0;
    if (!CHECK(dtrain_loader_create(world, &desc, &loader) == DTRAIN_OK)) return 1;
    for (uint32_t step = 0; step < STEPS / 4; step++) {
        CHECK(dtrain_loader_next(loader, inputs, labels) == DTRAIN_OK);
        for (uint32_t i = 0; i < batch; i++) {
            const uint64_t k = (uint64_t)step * c->global_batch + i * ranks + rank;
            const uint64_t epoch = k / (uint64_t)(items - left);
            const int64_t item = 10 + item_of(k, items, items - left);
            const float *got = inputs + i * FLOATS;
            CHECK(labels[i] == label_of(item));
            CHECK(got[0] == (float)item && got[1] == (float)epoch);
            CHECK(got[2] == (float)pixel_of(item, 5) + 1000 * (float)label_of(item));
            CHECK(got[3] == dtrain_random_uniform(show_seed, epoch + 1, (uint64_t)item));
        }
    }
    dtrain_loader_destroy(loader);
    dtrain_dataset_close(dataset);
    return 0;
}

static void write_cifar_batches(void)
{
    write_cifar("data_batch_1.bin", 1, 0, 30);
    write_cifar("data_batch_2.bin", 1, 30, 31);
    write_cifar("data_batch_3.bin", 1, 31, IMAGES);
}

/* Every number of ranks and workers sees the samples that a loop over the sampler's order sees. */
static void test_same_samples(void)
{
    write_cifar_batches();
    for (uint32_t ranks = 1; ranks <= 8; ranks++)
        for (uint32_t workers = 0; workers <= 5; workers++) {
            dtrain_launch_desc launch;
            samples_case c;
            memset(&launch, 0, sizeof launch);
            c.global_batch = ranks == 5 || ranks == 7 ? 3 * ranks : 24;
            c.drop_last = (ranks + workers) % 2;
            c.workers = workers;
            c.differ = workers == 5;
            launch.rank_count = ranks;
            launch.mode = DTRAIN_LAUNCH_THREADS;
            CHECK_MSG(dtrain_launch(&launch, samples_rank, &c, NULL) == DTRAIN_OK, "%s",
                      dtrain_last_error());
        }
}

/* Without a transform inputs are the bytes of the file; labels need not be wanted. */
static void test_plain_samples(void)
{
    static unsigned char got[BATCH * PIXELS];
    int32_t labels[BATCH];
    dtrain_dataset *dataset;
    dtrain_loader *loader;
    write_cifar_batches();
    CHECK(open_images(DTRAIN_DATA_CIFAR10, path_of("data_batch_*.bin"), NULL, &dataset) ==
          DTRAIN_OK);
    for (uint32_t workers = 0; workers < 3; workers++) {
        dtrain_loader_desc desc = samples_desc(dataset, BATCH);
        desc.transform = NULL, desc.output_bytes = 0, desc.user = NULL;
        desc.in_order = true;
        desc.workers = workers;
        CHECK(dtrain_loader_create(NULL, &desc, &loader) == DTRAIN_OK);
        dtrain_loader_info info;
        dtrain_loader_query(loader, &info);
        CHECK(info.samples_per_epoch == IMAGES);
        for (int64_t step = 0; step < 40; step++) {
            int32_t *wanted = step % 3 ? labels : NULL;
            CHECK(dtrain_loader_next(loader, got, wanted) == DTRAIN_OK);
            for (int64_t i = 0; i < BATCH; i++) {
                const int64_t item = (step * BATCH + i) % IMAGES;
                CHECK(got[i * PIXELS] == pixel_of(item, 0));
                CHECK(got[i * PIXELS + PIXELS - 1] == pixel_of(item, PIXELS - 1));
                CHECK(!wanted || labels[i] == label_of(item));
            }
        }
        dtrain_loader_destroy(loader);
    }
    dtrain_dataset_close(dataset);
}

static void check_loader_refused(const dtrain_loader_desc *desc, const char *words)
{
    dtrain_loader *loader = (dtrain_loader *)1;
    CHECK(dtrain_loader_create(NULL, desc, &loader) != DTRAIN_OK && !loader);
    CHECK_MSG(strstr(dtrain_last_error(), words) != NULL, "\"%s\" has no \"%s\"",
              dtrain_last_error(), words);
}

static void test_refusals(void)
{
    dtrain_dataset *images, *text;
    dtrain_dataset_desc data;
    write_cifar_batches();
    write_file("text", "some text", 9);
    CHECK(open_images(DTRAIN_DATA_CIFAR10, path_of("data_batch_2.bin"), NULL, &images) ==
          DTRAIN_OK);
    CHECK(open_images(DTRAIN_DATA_BYTES, path_of("text"), NULL, &text) == DTRAIN_OK);
    dtrain_loader_desc desc = samples_desc(images, 1);
    desc.sequence = 4;
    check_loader_refused(&desc, "sequence is 4; expected 0");
    desc = samples_desc(images, 1);
    desc.output_bytes = 0;
    check_loader_refused(&desc, "transform needs output_bytes");
    desc = samples_desc(images, 1);
    desc.transform = NULL;
    check_loader_refused(&desc, "are for a transform");
    desc = samples_desc(text, 1);
    desc.sequence = 4;
    check_loader_refused(&desc, "not for tokens");
    desc = samples_desc(images, 2);
    desc.drop_last = true;
    check_loader_refused(&desc, "with drop_last nothing is left of");
    desc = samples_desc(images, 1);
    desc.first_item = 1;
    check_loader_refused(&desc, "has 0 samples here");
    desc.first_item = 2;
    check_loader_refused(&desc, "0 samples from 2 on");
    desc = samples_desc(images, 1);
    desc.workers = 65;
    check_loader_refused(&desc, "workers is 65; expected at most 64");
    desc.workers = 0, desc.prefetch = 1;
    check_loader_refused(&desc, "prefetch is 1; expected at most 65536, and 0 without workers");
    dtrain_dataset_close(images);
    dtrain_dataset_close(text);

    dtrain_dataset *none = NULL;
    memset(&data, 0, sizeof data);
    CHECK(dtrain_dataset_open(NULL, &data, &none) == DTRAIN_ERROR_ARGUMENT);
    CHECK(strstr(dtrain_last_error(), "found neither") != NULL);
    data.path = path_of("text");
    data.item_count = 5;
    CHECK(dtrain_dataset_open(NULL, &data, &none) == DTRAIN_ERROR_ARGUMENT);
    CHECK(strstr(dtrain_last_error(), "files say what is in them") != NULL && !none);
}

/* Every allocation fails once, with files by a pattern, a pair of lists, workers and without. */
static int memory_rank(dtrain_world *world, void *user)
{
    dtrain_dataset_desc data;
    dtrain_dataset *dataset = NULL;
    dtrain_loader *loader = NULL;
    float inputs[2 * FLOATS];
    memset(&data, 0, sizeof data);
    data.format = DTRAIN_DATA_IDX;
    data.path = path_of("images-*");
    data.labels = path_of("labels-*");
    dtrain_result result = dtrain_dataset_open(world, &data, &dataset);
    if (result == DTRAIN_OK) {
        dtrain_loader_desc desc = samples_desc(dataset, 2);
        desc.workers = *(const uint32_t *)user;
        result = dtrain_loader_create(world, &desc, &loader);
    }
    if (result == DTRAIN_OK) result = dtrain_loader_next(loader, inputs, NULL);
    CHECK(result == DTRAIN_OK || result == DTRAIN_ERROR_MEMORY);
    dtrain_loader_destroy(loader);
    dtrain_dataset_close(dataset);
    return result == DTRAIN_OK ? 0 : 3;
}

static void test_memory_failures(void)
{
    dtrain_launch_desc launch;
    write_mnist("images-1", "labels-1", 0, 7);
    write_mnist("images-2", "labels-2", 7, IMAGES);
    memset(&launch, 0, sizeof launch);
    launch.mode = DTRAIN_LAUNCH_THREADS;
    for (uint32_t workers = 0; workers < 4; workers += 3) {
        dtrain_result result = DTRAIN_ERROR_MEMORY;
        int fail_at = 1;
        for (; result != DTRAIN_OK && fail_at < 1000; fail_at++) {
            counted_memory state;
            memset(&state, 0, sizeof state);
            state.fail_at = fail_at;
            launch.options.allocator = counted_allocator(&state);
            result = dtrain_launch(&launch, memory_rank, &workers, NULL);
            CHECK_MSG(state.live == 0 && state.live_bytes == 0 && state.wrong == 0,
                      "%ld blocks left after failure %d", state.live, fail_at);
        }
        CHECK(result == DTRAIN_OK && fail_at > 10);
    }
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    if (!files_begin("test_images")) return 1;
    RUN(test_cifar);
    RUN(test_labels_checked);
    RUN(test_idx);
    RUN(test_idx_malformed);
    RUN(test_files_change);
    RUN(test_same_samples);
    RUN(test_plain_samples);
    RUN(test_refusals);
    RUN(test_memory_failures);
    return test_summary() + !files_end();
}
