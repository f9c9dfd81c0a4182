/* Datasets
 *
 * A dataset is a number of items and a function that reads them, dtrain_read_fn. The function is
 * that of a format, a row of the table below, or a host's own. dtrain__dataset_read calls it and
 * checks the ids or labels that came. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/log.h"
#include "core/result.h"
#include "world/world.h"
#include "world/world_internal.h"
#include "train/data.h"
#include "train/data_internal.h"

#define DTRAIN__MOST_IDS (INT64_C(1) << 31) /* ids are handed out as int32 */

/* In the order of dtrain_data_format. */
static const dtrain__format dtrain__formats[] = {
    {"auto", 0, 0, 0, NULL, NULL},
    {"bytes", 256, 0, 0, dtrain__bytes_learn, dtrain__tokens_read},
    {"llm.c's .bin", 50257, 0, 0, dtrain__bin_learn, dtrain__tokens_read},
    {"uint16 tokens", 50257, 2, 0, dtrain__raw_learn, dtrain__tokens_read},
    {"CIFAR-10", 10, 1 + 3072, 1, dtrain__cifar_learn, dtrain__cifar_read},
    {"CIFAR-100", 100, 2 + 3072, 2, dtrain__cifar_learn, dtrain__cifar_read},
    {"IDX", 10, 0, 0, dtrain__idx_learn, dtrain__idx_read},
    {"uint32 tokens", 50257, 4, 0, dtrain__raw_learn, dtrain__tokens_read},
};

static dtrain_result dtrain__dataset_check(const dtrain_dataset_desc *desc);
static dtrain_result dtrain__dataset_files(dtrain_dataset *dataset,
                                           const dtrain_dataset_desc *desc);

DTRAIN_API dtrain_result dtrain_dataset_open(dtrain_world *world, const dtrain_dataset_desc *desc,
                                             dtrain_dataset **out)
{
    if (out) *out = NULL;
    DTRAIN__GIVEN("dtrain_dataset_open", desc);
    DTRAIN__GIVEN("dtrain_dataset_open", out);
    DTRAIN__TRY(dtrain__dataset_check(desc));
    dtrain_allocator allocator = dtrain__resolve_allocator(world ? &world->allocator : NULL);
    dtrain_dataset *dataset =
        (dtrain_dataset *)dtrain__alloc(&allocator, 1, sizeof *dataset, "a dataset");
    if (!dataset) return DTRAIN_ERROR_MEMORY;
    dtrain_result result = DTRAIN_OK;
    dataset->allocator = allocator;
    dataset->vocab_count = desc->vocab_count;
    if (desc->path) result = dtrain__dataset_files(dataset, desc);
    else {
        dataset->item_count = desc->item_count;
        dataset->item_bytes = desc->item_bytes;
        dataset->read = desc->read;
        dataset->user = desc->user;
        snprintf(dataset->name, sizeof dataset->name, "the host's own source");
        if (!desc->vocab_count) dataset->vocab_count = DTRAIN__MOST_IDS;
    }
    if (result == DTRAIN_OK && world && desc->path && !desc->format && dataset->token_bytes == 1 &&
        dataset->vocab_count > 256)
        dtrain_log(world, DTRAIN_LOG_INFO,
                   "%s is read as bytes, ids 0 to 255 of a vocabulary of %lld", dataset->name,
                   (long long)dataset->vocab_count);
    if (result == DTRAIN_OK) *out = dataset;
    else dtrain_dataset_close(dataset);
    return result;
}

static dtrain_result dtrain__dataset_check(const dtrain_dataset_desc *desc)
{
    const uint32_t last = (uint32_t)(sizeof dtrain__formats / sizeof dtrain__formats[0]) - 1;
    if (desc->format > last || desc->vocab_count < 0 || desc->vocab_count > DTRAIN__MOST_IDS)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_dataset_open: expected a dtrain_data_format, 0 to %u, and "
                           "vocab_count 0 to 2^31, found %u and %lld",
                           last, (unsigned)desc->format, (long long)desc->vocab_count);
    if ((desc->path && !*desc->path) || !desc->path == !desc->read)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_dataset_open: expected a path, or read and item_count for a "
                           "source of the host's own, found %s",
                           desc->path && desc->read ? "both"
                           : desc->path             ? "an empty path"
                                                    : "neither");
    if (desc->path && (desc->item_count || desc->item_bytes || desc->user))
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_dataset_open: item_count, item_bytes and user are for a source "
                           "of the host's own; files say what is in them");
    if (!desc->labels != (desc->format != DTRAIN_DATA_IDX))
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           desc->labels
                               ? "dtrain_dataset_open: labels is for DTRAIN_DATA_IDX: other "
                                 "formats have no files of labels"
                               : "dtrain_dataset_open: DTRAIN_DATA_IDX needs labels, the files "
                                 "with labels of the images in path");
    if (desc->path) return DTRAIN_OK;
    if (desc->item_count > 0 && desc->item_bytes <= SIZE_MAX / 2 && !desc->format) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                       "dtrain_dataset_open: a source of the host's own has no format and at "
                       "least 1 item, found %u and %lld items of %zu bytes",
                       (unsigned)desc->format, (long long)desc->item_count, desc->item_bytes);
}

/* Add files to the sizes and the hash by which ranks compare what they read: of each the size and
 * 16 pieces from its beginning to its end; of more than 16 files, the beginning. */
static dtrain_result dtrain__data_sample(dtrain_dataset *dataset, const dtrain__data_files *files)
{
    unsigned char piece[256];
    for (size_t i = 0; i < files->count; i++) {
        const int64_t bytes = files->files[i].opened.st_size;
        const int64_t length = dtrain__min(bytes, (int64_t)sizeof piece);
        dataset->file_bytes += (uint64_t)bytes;
        for (int64_t k = 0; k < 16 && (k == 0 || files->count <= 16); k++) {
            DTRAIN__TRY(dtrain__data_file_read(&files->files[i], (bytes - length) / 15 * k, piece,
                                               (size_t)length));
            dataset->file_sample = dtrain__fnv1a(dataset->file_sample, piece, (size_t)length);
        }
    }
    return DTRAIN_OK;
}

/* Open the files in order and check each one's format; its items follow those of the file
 * before. */
static dtrain_result dtrain__dataset_files(dtrain_dataset *dataset, const dtrain_dataset_desc *desc)
{
    uint32_t format = desc->format;
    DTRAIN__TRY(dtrain__data_files_open(&dataset->allocator, desc->path, &dataset->data));
    if (desc->labels)
        DTRAIN__TRY(dtrain__data_files_open(&dataset->allocator, desc->labels, &dataset->labels));
    const bool bin = format == DTRAIN_DATA_AUTO && dtrain__is_bin(dataset->data.files);
    if (format == DTRAIN_DATA_AUTO) format = bin ? DTRAIN_DATA_BIN : DTRAIN_DATA_BYTES;
    dataset->format = &dtrain__formats[format];
    dataset->read = dataset->format->read;
    dataset->user = dataset;
    for (size_t i = 0; i < dataset->data.count; i++) {
        dtrain__data_file *file = &dataset->data.files[i];
        file->first_item = dataset->item_count;
        if (desc->format == DTRAIN_DATA_AUTO && dtrain__is_bin(file) != bin)
            return dtrain_fail(DTRAIN_ERROR_DATA,
                               "dtrain_dataset_open: %s is %s and %s is not: name the format, or "
                               "leave one of them out",
                               bin ? dataset->data.files->path : file->path,
                               dtrain__formats[DTRAIN_DATA_BIN].name,
                               bin ? file->path : dataset->data.files->path);
        if (format == DTRAIN_DATA_BYTES && desc->format == DTRAIN_DATA_AUTO)
            DTRAIN__TRY(dtrain__bytes_guessed(dataset, file));
        DTRAIN__TRY(dataset->format->learn(dataset, file));
        dataset->item_count += file->item_count;
    }
    const size_t more = dataset->data.count - 1;
    const int most = (int)sizeof dataset->name - 32;
    snprintf(dataset->name, sizeof dataset->name, more ? "%.*s and %zu more" : "%.*s", most,
             dataset->data.files->path, more);
    if (!dataset->vocab_count) dataset->vocab_count = dataset->format->vocab_count;
    DTRAIN__TRY(dtrain__data_sample(dataset, &dataset->data));
    return dtrain__data_sample(dataset, &dataset->labels);
}

DTRAIN_API void dtrain_dataset_close(dtrain_dataset *dataset)
{
    if (!dataset) return;
    dtrain_allocator allocator = dataset->allocator;
    dtrain__data_files_close(&allocator, &dataset->data);
    dtrain__data_files_close(&allocator, &dataset->labels);
    dtrain__free(&allocator, dataset, 1, sizeof *dataset);
}

DTRAIN_API void dtrain_dataset_query(const dtrain_dataset *dataset, dtrain_dataset_info *info)
{
    if (!info) return;
    memset(info, 0, sizeof *info);
    if (!dataset) return;
    info->item_count = dataset->item_count;
    info->vocab_count = dataset->vocab_count;
    info->item_bytes = dataset->item_bytes;
    memcpy(info->shape, dataset->shape, sizeof info->shape);
    info->file_count = dataset->data.count;
    info->file_bytes = dataset->file_bytes;
    info->file_sample = dataset->file_sample;
}

/* ---- reading ----------------------------------------------------------------------------------*/

/* Check ids of tokens, or labels. They are checked on use, because a dataset of 100 GB would take
 * minutes to check at open. */
static dtrain_result dtrain__ids_check(const dtrain_dataset *dataset, int64_t first, int64_t count,
                                       const int32_t *ids)
{
    const uint32_t most = (uint32_t)dataset->vocab_count;
    uint32_t bad = 0;
    for (int64_t i = 0; i < count; i++) bad |= (uint32_t)ids[i] >= most;
    if (!bad) return DTRAIN_OK;
    int64_t i = 0;
    while ((uint32_t)ids[i] < most) i++;
    const bool tokens = dataset->item_bytes == 0;
    const dtrain__data_file *file =
        dataset->data.count ? dtrain__data_file_of(&dataset->data, first + i) : NULL;
    return dtrain_fail(DTRAIN_ERROR_DATA, "%s: %s %lld has %s %u, but %s %lld: %s",
                       file ? file->path : dataset->name, tokens ? "token" : "sample",
                       (long long)(first + i - (file ? file->first_item : 0)),
                       tokens ? "id" : "label", (unsigned)ids[i],
                       tokens ? "the vocabulary has" : "labels are below", (long long)most,
                       tokens ? "was the file made by another tokenizer?"
                              : "has the file another format, or desc->vocab_count to be larger?");
}

/* Read items as a dtrain_read_fn does, from any thread; first and count lie inside. */
DTRAIN__PRIVATE dtrain_result dtrain__dataset_read(dtrain_dataset *dataset, int64_t first,
                                                   int64_t count, void *items, int32_t *labels)
{
    const bool tokens = dataset->item_bytes == 0;
    DTRAIN__TRY(dataset->read(dataset->user, first, count, items, labels));
    if (!tokens && !labels) return DTRAIN_OK;
    return dtrain__ids_check(dataset, first, count, tokens ? (const int32_t *)items : labels);
}
