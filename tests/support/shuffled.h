/* shuffled.h: the order in which one rank without workers gets n items, which test_data compares with PyTorch's: the
 * oracle of every other loader. Include it after dtrain.h and test.h. */
#ifndef DTRAIN_TEST_SHUFFLED_H
#define DTRAIN_TEST_SHUFFLED_H

/* A source whose items are their own numbers. */
static dtrain_result shuffled_read(void *user, int64_t first, int64_t count, void *items,
                                   int32_t *labels)
{
    (void)user;
    for (int64_t i = 0; i < count; i++) {
        const int64_t item = first + i;
        memcpy((char *)items + (size_t)i * sizeof item, &item, sizeof item);
        if (labels) labels[i] = 0;
    }
    return DTRAIN_OK;
}

/* Write the order of the epoch that begins with this seed. */
static void shuffled(uint64_t seed, int64_t n, int64_t *out)
{
    dtrain_dataset_desc source;
    dtrain_loader_desc desc;
    dtrain_loader *loader = NULL;
    memset(&source, 0, sizeof source);
    memset(&desc, 0, sizeof desc);
    source.item_count = n;
    source.item_bytes = sizeof *out;
    source.read = shuffled_read;
    CHECK(dtrain_dataset_open(NULL, &source, &desc.dataset) == DTRAIN_OK);
    desc.batch = 1;
    desc.seed = seed;
    CHECK(dtrain_loader_create(NULL, &desc, &loader) == DTRAIN_OK);
    for (int64_t i = 0; i < n; i++) CHECK(dtrain_loader_next(loader, &out[i], NULL) == DTRAIN_OK);
    dtrain_loader_destroy(loader);
    dtrain_dataset_close(desc.dataset);
}

#endif
