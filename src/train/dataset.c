/* Datasets
 *
 * A dataset is a number of items and a function that reads them, dtrain_read_fn: a format's, from
 * the table of formats, or the program's. dtrain__dataset_read calls it and checks ids and labels.
 *
 *     bytes       | t | t | t | ...                                   a token is a byte, 0 to 255
 *     .bin        | magic | version | count | 0 ... | t | t | ...
 *                 |<------- 256 words, 1024 bytes ->|<- 2 or 4 bytes a token, little endian
 *     u16, u32    | t | t | t | ...                                   2 or 4 bytes, little endian
 *     CIFAR-10    | label | 3072 pixels | label | 3072 pixels | ...    planes of red, green, blue,
 *     CIFAR-100   | coarse | fine | 3072 pixels | ...                  32 rows of 32 each
 *     IDX         | 0 | 0 | 8 | axes | length of axis 1, 2, ... | bytes ...       in two files:
 *                 |<- 4 bytes ------>|<- 4 bytes each, big endian         images, and their labels
 *
 * The tokens of all files are one stream: a window can begin in one file and end in the next. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/log.h"
#include "core/result.h"
#include "world/world.h"
#include "world/world_internal.h"
#include "train/data.h"
#include "train/data_internal.h"

#define DTRAIN__MOST_IDS (INT64_C(1) << 31) /* ids are int32 */

#define DTRAIN__BIN_HEADER 1024 /* 256 int32, little endian: magic, version, token count, 0 ... */
#define DTRAIN__BIN_MAGIC_U16 20240520u
#define DTRAIN__BIN_MAGIC_U32 20240801u
#define DTRAIN__TOKEN_BYTES 4096 /* read at once into the stack, which can have 64 KiB */
#define DTRAIN__CIFAR_PIXELS 3072
#define DTRAIN__RECORD_BYTES (2 + DTRAIN__CIFAR_PIXELS) /* largest record with a label */
#define DTRAIN__COMPRESSED "compressed data: decompress it first"
#define DTRAIN__UTF16 "text in UTF-16: iconv -f UTF-16 -t UTF-8 converts it"
#define DTRAIN__IDX_AXES 4
#define DTRAIN__IDX_BYTES 8u /* type of unsigned bytes */

/* ---- Tokens -----------------------------------------------------------------------------------*/

/* Return the little-endian number of `width` bytes, whatever the host's order. */
static uint32_t dtrain__le(const unsigned char *bytes, uint32_t width)
{
    uint32_t value = 0;
    for (uint32_t i = 0; i < width; i++) value |= (uint32_t)bytes[i] << (8 * i);
    return value;
}

/* Kinds of files by their first bytes, with which no text begins. */
#define DTRAIN__MAGICS_BIN 2     /* first rows of the table: .bin files of llm.c ... */
#define DTRAIN__MAGICS_HEADERS 3 /* ... and other headers, with which no plain records begin */
static const struct {
    const char *bytes, *what;
} dtrain__magics[] = {{"\x88\xd8\x34\x01", "an llm.c token file (DTRAIN_DATA_BIN)"},
                      {"\xa1\xd9\x34\x01", "an llm.c token file (DTRAIN_DATA_BIN)"},
                      {"\x93NUMPY", "a .npy file: array.tofile(PATH) writes numbers only"},
                      {"\xc6\xd7\x34\x01", "a model of llm.c, by its magic 20240326"},
                      {"\xc7\xd7\x34\x01", "a debugging state of llm.c, by its magic 20240327"},
                      {"\xc8\xd7\x34\x01", "a tokenizer of llm.c, by its magic 20240328"},
                      {"\x8a\xd8\x34\x01", "an evaluation of llm.c, by its magic 20240522"},
                      {"PAR1\x15", "a Parquet file: write its text to a file"},
                      {"\x1f\x8b\x08", DTRAIN__COMPRESSED}, /* gzip, zstd, xz, bzip2, zip */
                      {"\x28\xb5\x2f\xfd", DTRAIN__COMPRESSED},
                      {"\xfd\x37zXZ", DTRAIN__COMPRESSED},
                      {"BZh91AY&SY", DTRAIN__COMPRESSED},
                      {"PK\x03\x04", DTRAIN__COMPRESSED},
                      {"\xff\xfe", DTRAIN__UTF16},
                      {"\xfe\xff", DTRAIN__UTF16}};
#define DTRAIN__MAGICS (sizeof dtrain__magics / sizeof *dtrain__magics)

/* Return the magic that a file begins with, or DTRAIN__MAGICS. An unreadable file has none: the
 * next read reports the error. */
static size_t dtrain__magic_of(const dtrain__data_file *file)
{
    char head[16] = {0}; /* longer than all magics */
    size_t i = 0;
    const int64_t bytes = dtrain__min(file->opened.st_size, (int64_t)sizeof head);
    if (dtrain__data_file_read(file, 0, head, (size_t)bytes) != DTRAIN_OK) return DTRAIN__MAGICS;
    while (i < DTRAIN__MAGICS &&
           memcmp(head, dtrain__magics[i].bytes, strlen(dtrain__magics[i].bytes)) != 0)
        i++;
    return i;
}

/* Refuse a file whose desc names no format and that is not bytes of text: by its first bytes, or by
 * the bytes of four pages, counted by their place in a group of four. In little-endian integers of
 * 2, 4 or 8 bytes the high bytes are zero; in GPT-2's tokens they are never above 0xc4, the high
 * byte of 50256, and low bytes are. In programs, pictures, sound and compressed data the places do
 * not differ so much, and text has no control characters. */
static dtrain_result dtrain__bytes_guessed(const dtrain_dataset *dataset,
                                           const dtrain__data_file *file)
{
    const int64_t size = (int64_t)file->opened.st_size;
    const size_t magic = dtrain__magic_of(file);
    const char *what = magic < DTRAIN__MAGICS ? dtrain__magics[magic].what : NULL;
    int64_t all = 0, control = 0, zero[4] = {0}, printable[4] = {0}, high[4] = {0};
    unsigned char page[4096];
    bool text = true;
    for (int64_t part = 0; part < 4 && !what; part++) {
        const int64_t at = size / 4 * part / 4 * 4;
        const int64_t bytes = dtrain__min(size - at, (int64_t)sizeof page);
        DTRAIN__TRY(dtrain__data_file_read(file, at, page, (size_t)bytes));
        for (int64_t i = 0; i < bytes; i++) {
            control += page[i] < 9 || (page[i] > 13 && page[i] < 27);
            zero[i % 4] += page[i] == 0;
            printable[i % 4] += page[i] >= 32 ? page[i] < 127 : page[i] >= 9 && page[i] <= 13;
            high[i % 4] += page[i] > 0xc4;
        }
        all += bytes;
        if (part == 0) text = control == 0 || dataset->info.vocab_count <= 256;
    }
    const int64_t n = all / 4, even = zero[0] + zero[2], odd = zero[1] + zero[3];
    if (!what && n >= 32 && control * 50 >= all) { /* enough bytes to decide that this is no text */
        if (size % 4 == 0 && zero[3] >= n && 2 * zero[2] >= n && 10 * zero[0] < 9 * n)
            what = 2 * zero[0] < n ? "uint32 tokens" : "integers of 64 bits, which no format has";
        else if (size % 2 == 0 &&
                 ((10 * odd > 18 * n && 10 * (printable[0] + printable[2]) > 18 * n) ||
                  (10 * even > 18 * n && 10 * (printable[1] + printable[3]) > 18 * n)))
            what = DTRAIN__UTF16;
        else if (size % 2 == 0 && ((odd >= 2 * n && even < n) ||
                                   (high[1] + high[3] == 0 && 10 * (high[0] + high[2]) > n)))
            what = "uint16 tokens, as nanoGPT's .bin";
    }
    if (!what && !text) what = "no text, and the vocabulary is larger than 256";
    if (!what) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_DATA,
                       "dtrain_dataset_open: %s seems to be %s; a desc without a `format` reads it "
                       "as bytes: name DTRAIN_DATA_BYTES if these are meant, and for tokens "
                       "DTRAIN_DATA_U16 (nanoGPT's .bin) or DTRAIN_DATA_U32",
                       file->path, what);
}

/* Require that header and items fill the file exactly: a file that is too long is as suspect as one
 * that is too short (two files glued together, a count that overflowed). */
static dtrain_result dtrain__data_file_fits(const dtrain__data_file *file, const char *format)
{
    const int64_t size = (int64_t)file->opened.st_size, left = size - file->header_bytes;
    if (file->item_count > 0 && file->record_bytes > 0 && left % file->record_bytes == 0 &&
        left / file->record_bytes == file->item_count)
        return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_DATA,
                       "dtrain_dataset_open: %s has %lld bytes; as %s it would have a header of "
                       "%lld and %lld items of %lld: is it cut off, or of another format?",
                       file->path, (long long)size, format, (long long)file->header_bytes,
                       (long long)file->item_count, (long long)file->record_bytes);
}

static dtrain_result dtrain__bin_learn(dtrain_dataset *dataset, dtrain__data_file *file)
{
    unsigned char head[DTRAIN__BIN_HEADER] = {0};
    const int64_t size = (int64_t)file->opened.st_size;
    const int64_t have = dtrain__min(size, DTRAIN__BIN_HEADER);
    (void)dataset;
    DTRAIN__TRY(dtrain__data_file_read(file, 0, head, (size_t)have));
    const uint32_t magic = dtrain__le(head, 4), version = dtrain__le(head + 4, 4);
    const bool narrow = magic == DTRAIN__BIN_MAGIC_U16;
    if ((!narrow && magic != DTRAIN__BIN_MAGIC_U32) || have < DTRAIN__BIN_HEADER ||
        version != (narrow ? 1 : 7))
        return dtrain_fail(DTRAIN_ERROR_DATA,
                           "dtrain_dataset_open: %s is no llm.c token file: expected a header of "
                           "%d bytes with magic %u, version 1 or magic %u, version 7, found %lld "
                           "bytes, %u and %u; nanoGPT's .bin files lack the header: they are "
                           "`format` DTRAIN_DATA_U16, and text is DTRAIN_DATA_BYTES",
                           file->path, DTRAIN__BIN_HEADER, DTRAIN__BIN_MAGIC_U16,
                           DTRAIN__BIN_MAGIC_U32, (long long)have, magic, version);
    file->header_bytes = DTRAIN__BIN_HEADER;
    file->record_bytes = narrow ? 2 : 4;
    file->item_count = dtrain__le(head + 8, 4);
    return DTRAIN_OK;
}

/* Take a file of records without a header, tokens or images with labels, whose size the format
 * fixes. */
static dtrain_result dtrain__raw_learn(dtrain_dataset *dataset, dtrain__data_file *file)
{
    const dtrain__format *format = dataset->format;
    if (format->label_bytes) {
        static const int64_t shape[3] = {3, 32, 32};
        dataset->info.item_bytes = DTRAIN__CIFAR_PIXELS;
        memcpy(dataset->info.shape, shape, sizeof shape);
    }
    file->record_bytes = format->record_bytes;
    file->item_count = (int64_t)file->opened.st_size / file->record_bytes;
    const size_t magic = file->record_bytes > 1 ? dtrain__magic_of(file) : DTRAIN__MAGICS;
    if (magic >= DTRAIN__MAGICS_HEADERS) return DTRAIN_OK;
    return dtrain_fail(
        DTRAIN_ERROR_DATA,
        "dtrain_dataset_open: %s begins with a header, and files of %s have none: it is %s",
        file->path, format->name, dtrain__magics[magic].what);
}

/* Read tokens of 1, 2 or 4 bytes through a small buffer, file after file. */
static dtrain_result dtrain__tokens_read(void *user, int64_t first, int64_t count, void *items,
                                         int32_t *labels)
{
    const dtrain_dataset *dataset = (const dtrain_dataset *)user;
    const int64_t width = dataset->data.files->record_bytes;
    unsigned char raw[DTRAIN__TOKEN_BYTES];
    (void)labels; /* tokens have none */
    for (int64_t done = 0; done < count;) {
        const dtrain__data_file *file = dtrain__data_file_of(&dataset->data, first + done);
        const int64_t at = first + done - file->first_item;
        const int64_t some = dtrain__min(dtrain__min(count - done, file->item_count - at),
                                         (int64_t)sizeof raw / width);
        DTRAIN__TRY(dtrain__data_file_read(file, file->header_bytes + at * width, raw,
                                           (size_t)(some * width)));
        int32_t *to = (int32_t *)items + done;
        if (width == 1)
            for (int64_t k = 0; k < some; k++) to[k] = raw[k];
        else if (width == 2)
            for (int64_t k = 0; k < some; k++) to[k] = raw[2 * k] | raw[2 * k + 1] << 8;
        else
            for (int64_t k = 0; k < some; k++) to[k] = (int32_t)dtrain__le(raw + 4 * k, 4);
        done += some;
    }
    return DTRAIN_OK;
}

/* ---- Images -----------------------------------------------------------------------------------*/

/* Read the header of an IDX file of bytes with `least` to `most` axes. */
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
    file->header_bytes = 4 + 4 * (int64_t)axes;
    file->record_bytes = 1;
    for (uint32_t i = 0; i < axes; i++) {
        const unsigned char *big = head + 4 + 4 * i;
        lengths[i] = (int64_t)big[0] << 24 | big[1] << 16 | big[2] << 8 | big[3];
        if (i && lengths[i] > size / file->record_bytes) lengths[i] = 0; /* no product overflows */
        if (i) file->record_bytes *= lengths[i];
        if (file->record_bytes == 0) break;
    }
    file->item_count = lengths[0];
    return dtrain__data_file_fits(file, "IDX");
}

/* Read the headers of a file of images and of its file of labels. Axes are (images, columns),
 * (images, rows, columns) or (images, channels, rows, columns). */
static dtrain_result dtrain__idx_learn(dtrain_dataset *dataset, dtrain__data_file *file)
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
    if (at > 0 && memcmp(shape, dataset->info.shape, sizeof shape) != 0)
        return dtrain_fail(DTRAIN_ERROR_DATA,
                           "dtrain_dataset_open: images of %s are (%lld, %lld, %lld), those of %s "
                           "(%lld, %lld, %lld)",
                           file->path, (long long)shape[0], (long long)shape[1],
                           (long long)shape[2], dataset->data.files->path,
                           (long long)dataset->info.shape[0], (long long)dataset->info.shape[1],
                           (long long)dataset->info.shape[2]);
    memcpy(dataset->info.shape, shape, sizeof shape);
    dataset->info.item_bytes = (size_t)(shape[0] * shape[1] * shape[2]);
    return DTRAIN_OK;
}

/* Read images one by one. A label is the last byte before the pixels of its record (CIFAR-100: the
 * fine label), or a byte of the file of labels. */
static dtrain_result dtrain__images_read(void *user, int64_t first, int64_t count, void *items,
                                         int32_t *labels)
{
    const dtrain_dataset *dataset = (const dtrain_dataset *)user;
    const size_t bytes = dataset->info.item_bytes, before = dataset->format->label_bytes;
    unsigned char *to = (unsigned char *)items, record[DTRAIN__RECORD_BYTES] = {0};
    for (int64_t i = 0; i < count; i++, to += bytes) {
        const dtrain__data_file *file = dtrain__data_file_of(&dataset->data, first + i);
        const int64_t at = first + i - file->first_item;
        const int64_t offset = file->header_bytes + at * (int64_t)(before + bytes);
        DTRAIN__TRY(dtrain__data_file_read(file, offset, before ? record : to, before + bytes));
        unsigned char label = before ? record[before - 1] : 0;
        if (before) memcpy(to, record + before, bytes);
        else if (labels) {
            file = dtrain__data_file_of(&dataset->labels, first + i);
            DTRAIN__TRY(dtrain__data_file_read(file, file->header_bytes + at, &label, 1));
        }
        if (labels) labels[i] = label;
    }
    return DTRAIN_OK;
}

/* ---- Opening and reading ----------------------------------------------------------------------*/

/* Formats in the order of dtrain_data_format. */
static const dtrain__format dtrain__formats[] = {
    {"auto", 0, 0, 0, NULL, NULL},
    {"bytes", 256, 1, 0, dtrain__raw_learn, dtrain__tokens_read},
    {"llm.c's .bin", 50257, 0, 0, dtrain__bin_learn, dtrain__tokens_read},
    {"uint16 tokens", 50257, 2, 0, dtrain__raw_learn, dtrain__tokens_read},
    {"the binary version of CIFAR-10", 10, 1 + DTRAIN__CIFAR_PIXELS, 1, dtrain__raw_learn,
     dtrain__images_read},
    {"the binary version of CIFAR-100", 100, 2 + DTRAIN__CIFAR_PIXELS, 2, dtrain__raw_learn,
     dtrain__images_read},
    {"IDX", 10, 0, 0, dtrain__idx_learn, dtrain__images_read},
    {"uint32 tokens", 50257, 4, 0, dtrain__raw_learn, dtrain__tokens_read},
};

/* Add files to the sizes and the hash by which ranks compare their files: size and 16 pieces of
 * each file; with more than 16 files only the beginning of each. */
static dtrain_result dtrain__data_sample(dtrain_dataset *dataset, const dtrain__data_files *files)
{
    unsigned char piece[256];
    for (size_t i = 0; i < files->count; i++) {
        const int64_t bytes = files->files[i].opened.st_size;
        const int64_t length = dtrain__min(bytes, (int64_t)sizeof piece);
        dataset->info.file_bytes += (uint64_t)bytes;
        for (int64_t k = 0; k < 16 && (k == 0 || files->count <= 16); k++) {
            DTRAIN__TRY(dtrain__data_file_read(&files->files[i], (bytes - length) / 15 * k, piece,
                                               (size_t)length));
            dataset->info.file_sample =
                dtrain__fnv1a(dataset->info.file_sample, piece, (size_t)length);
        }
    }
    return DTRAIN_OK;
}

/* Open the files in order, check the format of each, and number the items of all. */
static dtrain_result dtrain__dataset_files(dtrain_dataset *dataset, const dtrain_dataset_desc *desc)
{
    uint32_t format = desc->format;
    DTRAIN__TRY(dtrain__data_files_open(&dataset->allocator, desc->path, &dataset->data));
    if (desc->labels)
        DTRAIN__TRY(dtrain__data_files_open(&dataset->allocator, desc->labels, &dataset->labels));
    const bool bin = dtrain__magic_of(dataset->data.files) < DTRAIN__MAGICS_BIN;
    if (format == DTRAIN_DATA_AUTO) format = bin ? DTRAIN_DATA_BIN : DTRAIN_DATA_BYTES;
    dataset->format = &dtrain__formats[format];
    dataset->read = dataset->format->read;
    dataset->user = dataset;
    for (size_t i = 0; i < dataset->data.count; i++) {
        dtrain__data_file *file = &dataset->data.files[i];
        file->first_item = dataset->info.item_count;
        if (desc->format == DTRAIN_DATA_AUTO &&
            (dtrain__magic_of(file) < DTRAIN__MAGICS_BIN) != bin)
            return dtrain_fail(DTRAIN_ERROR_DATA,
                               "dtrain_dataset_open: %s is %s and %s is not: name the format, or "
                               "leave one of them out",
                               bin ? dataset->data.files->path : file->path,
                               dtrain__formats[DTRAIN_DATA_BIN].name,
                               bin ? file->path : dataset->data.files->path);
        if (format == DTRAIN_DATA_BYTES && desc->format == DTRAIN_DATA_AUTO)
            DTRAIN__TRY(dtrain__bytes_guessed(dataset, file));
        DTRAIN__TRY(dataset->format->learn(dataset, file));
        DTRAIN__TRY(dtrain__data_file_fits(file, dataset->format->name));
        if (file->record_bytes != dataset->data.files->record_bytes)
            return dtrain_fail(DTRAIN_ERROR_DATA,
                               "dtrain_dataset_open: %s has items of %lld bytes and %s of %lld: "
                               "files of one dataset have one size of item",
                               file->path, (long long)file->record_bytes, dataset->data.files->path,
                               (long long)dataset->data.files->record_bytes);
        dataset->info.item_count += file->item_count;
    }
    dataset->info.file_count = dataset->data.count;
    const size_t more = dataset->data.count - 1;
    const int most = (int)sizeof dataset->name - 32;
    snprintf(dataset->name, sizeof dataset->name, more ? "%.*s and %zu more" : "%.*s", most,
             dataset->data.files->path, more);
    if (!dataset->info.vocab_count) dataset->info.vocab_count = dataset->format->vocab_count;
    DTRAIN__TRY(dtrain__data_sample(dataset, &dataset->data));
    return dtrain__data_sample(dataset, &dataset->labels);
}

DTRAIN_API dtrain_result dtrain_dataset_open(dtrain_world *world, const dtrain_dataset_desc *desc,
                                             dtrain_dataset **out)
{
    const char *const call = "dtrain_dataset_open";
    if (out) *out = NULL;
    DTRAIN__GIVEN(call, desc);
    DTRAIN__GIVEN(call, out);
    DTRAIN__TAKE(dtrain__abi_of(world), dataset_desc, desc);
    const uint32_t last = (uint32_t)(sizeof dtrain__formats / sizeof dtrain__formats[0]) - 1;
    const bool own = !desc->path, idx = desc->format == DTRAIN_DATA_IDX;
    const dtrain__bound bounds[] = {
        {desc->format > last, "format", (double)desc->format, "a dtrain_data_format"},
        {desc->vocab_count < 0 || desc->vocab_count > DTRAIN__MOST_IDS, "vocab_count",
         (double)desc->vocab_count, "0 to 2^31"},
        {desc->read && desc->item_count < 1, "item_count", (double)desc->item_count,
         "at least 1 item of a source of the host's own"},
        {desc->item_bytes > SIZE_MAX / 2, "item_bytes", (double)desc->item_bytes,
         "the bytes of a sample"}};
    const char *const wrong =
        own && !desc->read   ? "a path, or read and item_count for a source of the host's own, is "
                               "expected, found neither"
        : !own && desc->read ? "path is for files and read for a source of the host's own; found "
                               "both"
        : !own && !*desc->path ? "path is empty"
        : !own && (desc->item_count || desc->item_bytes || desc->user)
            ? "item_count, item_bytes and user are for a source of the host's own; files say what "
              "is in them"
        : own && desc->format ? "a source of the host's own has no format"
        : desc->labels && !idx
            ? "labels is for DTRAIN_DATA_IDX: other formats have no files of labels"
        : idx && !desc->labels
            ? "DTRAIN_DATA_IDX needs labels, the files with labels of the images in path"
            : NULL;
    DTRAIN__TRY(dtrain__check_bounds(call, bounds, sizeof bounds / sizeof bounds[0]));
    if (wrong) return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: %s", call, wrong);
    dtrain_allocator allocator = dtrain__resolve_allocator(world ? &world->allocator : NULL);
    dtrain_dataset *dataset =
        (dtrain_dataset *)dtrain__alloc(&allocator, 1, sizeof *dataset, "a dataset");
    if (!dataset) return DTRAIN_ERROR_MEMORY;
    dtrain_result result = DTRAIN_OK;
    dataset->allocator = allocator;
    dataset->info.vocab_count = desc->vocab_count;
    if (desc->path) result = dtrain__dataset_files(dataset, desc);
    else {
        dataset->info.item_count = desc->item_count;
        dataset->info.item_bytes = desc->item_bytes;
        dataset->read = desc->read;
        dataset->user = desc->user;
        snprintf(dataset->name, sizeof dataset->name, "the host's own source");
        if (!desc->vocab_count) dataset->info.vocab_count = DTRAIN__MOST_IDS;
    }
    if (result == DTRAIN_OK && world && desc->path && !desc->format &&
        dataset->data.files->record_bytes == 1 && dataset->info.vocab_count > 256)
        dtrain_log(world, DTRAIN_LOG_INFO,
                   "%s is read as bytes, ids 0 to 255 of a vocabulary of %lld", dataset->name,
                   (long long)dataset->info.vocab_count);
    if (result == DTRAIN_OK) *out = dataset;
    else dtrain_dataset_close(dataset);
    return result;
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
    if (dataset) *info = dataset->info;
    else memset(info, 0, sizeof *info);
}

/* Read items like a dtrain_read_fn, from any thread; first and count are in range. Each read checks
 * its ids and labels: checking 100 GB at open would take minutes. */
DTRAIN__PRIVATE dtrain_result dtrain__dataset_read(dtrain_dataset *dataset, int64_t first,
                                                   int64_t count, void *items, int32_t *labels)
{
    const bool tokens = dataset->info.item_bytes == 0;
    const uint32_t most = (uint32_t)dataset->info.vocab_count;
    const int32_t *ids = tokens ? (const int32_t *)items : labels;
    uint32_t bad = 0;
    int64_t i = 0;
    DTRAIN__TRY(dataset->read(dataset->user, first, count, items, labels));
    if (!ids) return DTRAIN_OK;
    for (int64_t k = 0; k < count; k++) bad |= (uint32_t)ids[k] >= most;
    if (!bad) return DTRAIN_OK;
    while ((uint32_t)ids[i] < most) i++;
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
