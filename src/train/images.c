/* Image files
 *
 *     CIFAR-10    | label | 3072 pixels | label | 3072 pixels | ...    planes of red, green, blue,
 *     CIFAR-100   | coarse | fine | 3072 pixels | ...                  32 rows of 32 each
 *     IDX         | 0 | 0 | 8 | axes | length of axis 1, 2, ... | bytes ...       in two files:
 *                 |<- 4 bytes ------>|<- 4 bytes each, big endian         images, and their labels
 */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/result.h"
#include "train/data.h"
#include "train/data_internal.h"

#define DTRAIN__CIFAR_PIXELS 3072
#define DTRAIN__IDX_AXES 4
#define DTRAIN__IDX_BYTES 8u /* the type: unsigned bytes */

/* ---- CIFAR ------------------------------------------------------------------------------------*/

DTRAIN__PRIVATE dtrain_result dtrain__cifar_learn(dtrain_dataset *dataset, dtrain__data_file *file)
{
    const dtrain__format *format = dataset->format;
    dataset->item_bytes = DTRAIN__CIFAR_PIXELS;
    dataset->shape[0] = 3;
    dataset->shape[1] = dataset->shape[2] = 32;
    file->item_count = (int64_t)file->opened.st_size / format->item_bytes;
    if (file->opened.st_size % format->item_bytes == 0) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_DATA,
                       "dtrain_dataset_open: %s has %lld bytes, no whole number of records of %u: "
                       "is it the binary version of %s, and not cut off?",
                       file->path, (long long)file->opened.st_size, format->item_bytes,
                       format->name);
}

/* Read records one by one: a label or two, then pixels. */
DTRAIN__PRIVATE dtrain_result dtrain__cifar_read(void *user, int64_t first, int64_t count,
                                                 void *items, int32_t *labels)
{
    const dtrain_dataset *dataset = (const dtrain_dataset *)user;
    const uint32_t record_bytes = dataset->format->item_bytes,
                   label_bytes = dataset->format->label_bytes;
    unsigned char record[2 + DTRAIN__CIFAR_PIXELS];
    for (int64_t i = 0; i < count; i++) {
        const dtrain__data_file *file = dtrain__data_file_of(&dataset->data, first + i);
        const int64_t at = first + i - file->first_item;
        DTRAIN__TRY(dtrain__data_file_read(file, at * record_bytes, record, record_bytes));
        memcpy((unsigned char *)items + i * DTRAIN__CIFAR_PIXELS, record + label_bytes,
               DTRAIN__CIFAR_PIXELS);
        if (labels) labels[i] = record[label_bytes - 1]; /* the last one is the fine one */
    }
    return DTRAIN_OK;
}

/* ---- IDX --------------------------------------------------------------------------------------*/

/* Check the header of an IDX file of bytes with `least` to `most` axes: the product of their
 * lengths must be exactly the bytes that follow. */
static dtrain_result dtrain__idx_header(dtrain__data_file *file, uint32_t least, uint32_t most,
                                        int64_t lengths[DTRAIN__IDX_AXES])
{
    unsigned char head[4 + 4 * DTRAIN__IDX_AXES] = {0};
    const int64_t size = (int64_t)file->opened.st_size;
    const int64_t have = dtrain__min(size, (int64_t)sizeof head);
    DTRAIN__TRY(dtrain__data_file_read(file, 0, head, (size_t)have));
    const uint32_t axes = head[3];
    if (have < 8 || head[0] || head[1] || head[2] != DTRAIN__IDX_BYTES || axes < least ||
        axes > most || have < 4 + 4 * (int64_t)axes)
        return dtrain_fail(DTRAIN_ERROR_DATA,
                           "dtrain_dataset_open: %s is no IDX file of %s: expected bytes 0 0 8 and "
                           "%u%s axes at its beginning, found %u %u %u %u in %lld bytes%s",
                           file->path, most > 1 ? "images" : "labels", least,
                           most > least ? " to 4" : "", head[0], head[1], head[2], head[3],
                           (long long)size,
                           head[0] == 0x1f && head[1] == 0x8b ? ": gunzip it first" : "");
    int64_t bytes = 1; /* of the data: no more than size, which bounds every product below */
    bool fits = true;
    for (uint32_t i = 0; i < axes; i++) {
        const unsigned char *big = head + 4 + 4 * i;
        lengths[i] = (int64_t)big[0] << 24 | big[1] << 16 | big[2] << 8 | big[3];
        fits = fits && lengths[i] > 0 && lengths[i] <= size / bytes;
        if (fits) bytes *= lengths[i];
    }
    file->header_bytes = 4 + 4 * (int64_t)axes;
    file->item_count = lengths[0];
    if (fits && file->header_bytes + bytes == size) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_DATA,
                       "dtrain_dataset_open: %s announces %lld items in %u axes, which does not "
                       "make its %lld bytes: is it cut off?",
                       file->path, (long long)lengths[0], axes, (long long)size);
}

/* Learn a file of images, and the file of labels with the same number in the other list. Axes are
 * (images, columns), (images, rows, columns) or (images, channels, rows, columns). */
DTRAIN__PRIVATE dtrain_result dtrain__idx_learn(dtrain_dataset *dataset, dtrain__data_file *file)
{
    const size_t at = (size_t)(file - dataset->data.files);
    int64_t lengths[DTRAIN__IDX_AXES], shape[3] = {1, 1, 1}, label_count[DTRAIN__IDX_AXES];
    if (dataset->labels.count != dataset->data.count)
        return dtrain_fail(
            DTRAIN_ERROR_ARGUMENT,
            "dtrain_dataset_open: %zu IDX files of images and %zu of labels; expected "
            "as many in desc->labels as in desc->path",
            dataset->data.count, dataset->labels.count);
    dtrain__data_file *beside = &dataset->labels.files[at];
    DTRAIN__TRY(dtrain__idx_header(file, 2, DTRAIN__IDX_AXES, lengths));
    DTRAIN__TRY(dtrain__idx_header(beside, 1, 1, label_count));
    beside->first_item = file->first_item;
    if (file->item_count != beside->item_count)
        return dtrain_fail(
            DTRAIN_ERROR_DATA, "dtrain_dataset_open: %s has %lld images and %s %lld labels",
            file->path, (long long)file->item_count, beside->path, (long long)beside->item_count);
    const int64_t axes = (file->header_bytes - 4) / 4;
    for (int64_t i = 1; i < axes; i++) shape[3 - axes + i] = lengths[i];
    if (at > 0 && memcmp(shape, dataset->shape, sizeof shape) != 0)
        return dtrain_fail(DTRAIN_ERROR_DATA,
                           "dtrain_dataset_open: images of %s are (%lld, %lld, %lld), those of %s "
                           "(%lld, %lld, %lld)",
                           file->path, (long long)shape[0], (long long)shape[1],
                           (long long)shape[2], dataset->data.files->path,
                           (long long)dataset->shape[0], (long long)dataset->shape[1],
                           (long long)dataset->shape[2]);
    memcpy(dataset->shape, shape, sizeof shape);
    dataset->item_bytes = (size_t)(shape[0] * shape[1] * shape[2]);
    return DTRAIN_OK;
}

DTRAIN__PRIVATE dtrain_result dtrain__idx_read(void *user, int64_t first, int64_t count,
                                               void *items, int32_t *labels)
{
    const dtrain_dataset *dataset = (const dtrain_dataset *)user;
    const size_t bytes = dataset->item_bytes;
    for (int64_t i = 0; i < count; i++) {
        const dtrain__data_file *file = dtrain__data_file_of(&dataset->data, first + i);
        const int64_t at = first + i - file->first_item;
        DTRAIN__TRY(dtrain__data_file_read(file, file->header_bytes + at * (int64_t)bytes,
                                           (unsigned char *)items + (size_t)i * bytes, bytes));
        if (!labels) continue;
        const dtrain__data_file *beside = dtrain__data_file_of(&dataset->labels, first + i);
        unsigned char label;
        DTRAIN__TRY(dtrain__data_file_read(beside, beside->header_bytes + at, &label, 1));
        labels[i] = label;
    }
    return DTRAIN_OK;
}
