/* Token files
 *
 *     bytes    | t | t | t | ...                                      a token is a byte, 0 to 255
 *     .bin     | magic | version | count | 0 ... | t | t | ...
 *              |<------- 256 words, 1024 bytes ->|<- 2 or 4 bytes a token, little endian
 *     u16      | t | t | t | ...                                      2 bytes, little endian
 *
 * The tokens of all files are one stream: a window may begin in one file and end in the next. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/result.h"
#include "train/data.h"
#include "train/data_internal.h"

#define DTRAIN__BIN_HEADER 1024 /* 256 int32, little endian: magic, version, token count, 0 ... */
#define DTRAIN__BIN_MAGIC_U16 20240520u
#define DTRAIN__BIN_MAGIC_U32 20240801u
#define DTRAIN__TOKEN_BYTES 16384 /* read at once, into the stack */

/* Tell by its magic, which no text begins with, whether a file is a .bin of llm.c. An unreadable
 * file counts as no .bin: the read that follows reports the error. */
DTRAIN__PRIVATE bool dtrain__is_bin(const dtrain__data_file *file)
{
    unsigned char head[4];
    if (file->opened.st_size < 4 || dtrain__data_file_read(file, 0, head, sizeof head) != DTRAIN_OK)
        return false;
    const uint32_t magic = dtrain__le(head, 4);
    return magic == DTRAIN__BIN_MAGIC_U16 || magic == DTRAIN__BIN_MAGIC_U32;
}

/* Refuse a file that was taken for bytes because desc names no format, and that is something else:
 * one of llm.c's other files, known by their magic, or, where the vocabulary is larger than 256, a
 * file that is no text, as nanoGPT's uint16 tokens. */
DTRAIN__PRIVATE dtrain_result dtrain__bytes_guessed(const dtrain_dataset *dataset,
                                                    const dtrain__data_file *file)
{
    static const struct {
        uint32_t magic;
        const char *what;
    } llmc[] = {{20240326, "a model"},
                {20240327, "a debugging state"},
                {20240328, "a tokenizer"},
                {20240522, "an evaluation"}};
    unsigned char head[4096] = {0};
    const int64_t bytes = dtrain__min((int64_t)file->opened.st_size, (int64_t)sizeof head);
    DTRAIN__TRY(dtrain__data_file_read(file, 0, head, (size_t)bytes));
    for (size_t i = 0; i < sizeof llmc / sizeof *llmc; i++)
        if (dtrain__le(head, 4) == llmc[i].magic)
            return dtrain_fail(DTRAIN_ERROR_DATA,
                               "dtrain_dataset_open: %s is %s of llm.c, by its magic %u, and no "
                               "token file; if its bytes are meant, name DTRAIN_DATA_BYTES",
                               file->path, llmc[i].what, llmc[i].magic);
    for (int64_t i = 0; i < bytes && dataset->vocab_count > 256; i++)
        if (head[i] < 9 || (head[i] > 13 && head[i] < 27))
            return dtrain_fail(DTRAIN_ERROR_DATA,
                               "dtrain_dataset_open: %s is no text and has no header of llm.c, and "
                               "the vocabulary is %lld: uint16 tokens, as nanoGPT's, are "
                               "DTRAIN_DATA_U16; if its bytes are meant, name DTRAIN_DATA_BYTES",
                               file->path, (long long)dataset->vocab_count);
    return DTRAIN_OK;
}

DTRAIN__PRIVATE dtrain_result dtrain__bytes_learn(dtrain_dataset *dataset, dtrain__data_file *file)
{
    dataset->token_bytes = 1;
    file->item_count = (int64_t)file->opened.st_size;
    return DTRAIN_OK;
}

/* Require that the count in the header is exactly the number of tokens, as llm.c does: a longer
 * file is as suspect as a shorter one (two files glued together, a count that overflowed). */
DTRAIN__PRIVATE dtrain_result dtrain__bin_learn(dtrain_dataset *dataset, dtrain__data_file *file)
{
    unsigned char head[DTRAIN__BIN_HEADER] = {0};
    const int64_t size = (int64_t)file->opened.st_size;
    const int64_t have = dtrain__min(size, DTRAIN__BIN_HEADER);
    DTRAIN__TRY(dtrain__data_file_read(file, 0, head, (size_t)have));
    const uint32_t magic = dtrain__le(head, 4), version = dtrain__le(head + 4, 4);
    const bool narrow = magic == DTRAIN__BIN_MAGIC_U16;
    if ((!narrow && magic != DTRAIN__BIN_MAGIC_U32) || have < DTRAIN__BIN_HEADER ||
        version != (narrow ? 1 : 7))
        return dtrain_fail(DTRAIN_ERROR_DATA,
                           "dtrain_dataset_open: %s is no llm.c token file: expected a header of "
                           "%d bytes with magic %u, version 1 or magic %u, version 7, found %lld "
                           "bytes, %u and %u; nanoGPT's .bin files lack the header: they are "
                           "DTRAIN_DATA_U16, and text is DTRAIN_DATA_BYTES",
                           file->path, DTRAIN__BIN_HEADER, DTRAIN__BIN_MAGIC_U16,
                           DTRAIN__BIN_MAGIC_U32, (long long)have, magic, version);
    const uint32_t token_bytes = narrow ? 2 : 4;
    if (dataset->token_bytes && dataset->token_bytes != token_bytes)
        return dtrain_fail(DTRAIN_ERROR_DATA,
                           "dtrain_dataset_open: %s has tokens of %u bytes and %s of %u: files of "
                           "one dataset have one size of token",
                           file->path, token_bytes, dataset->data.files->path,
                           dataset->token_bytes);
    dataset->token_bytes = token_bytes;
    file->header_bytes = DTRAIN__BIN_HEADER;
    file->item_count = dtrain__le(head + 8, 4);
    const int64_t bytes = DTRAIN__BIN_HEADER + file->item_count * token_bytes;
    if (file->item_count > 0 && bytes == size) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_DATA,
                       "dtrain_dataset_open: %s announces %lld tokens, which makes %lld bytes, but "
                       "has %lld: is it cut off?",
                       file->path, (long long)file->item_count, (long long)bytes, (long long)size);
}

DTRAIN__PRIVATE dtrain_result dtrain__u16_learn(dtrain_dataset *dataset, dtrain__data_file *file)
{
    if (dtrain__is_bin(file))
        return dtrain_fail(DTRAIN_ERROR_DATA,
                           "dtrain_dataset_open: %s begins with the header of an llm.c token file: "
                           "it is DTRAIN_DATA_BIN, not DTRAIN_DATA_U16",
                           file->path);
    if (file->opened.st_size % 2)
        return dtrain_fail(DTRAIN_ERROR_DATA,
                           "dtrain_dataset_open: %s has %lld bytes, no whole number of uint16 "
                           "tokens: is it cut off?",
                           file->path, (long long)file->opened.st_size);
    dataset->token_bytes = 2;
    file->item_count = (int64_t)file->opened.st_size / 2;
    return DTRAIN_OK;
}

/* Write tokens of 1, 2 or 4 bytes as int32. */
static void dtrain__widen(const unsigned char *raw, uint32_t width, int64_t count, int32_t *tokens)
{
    if (width == 1)
        for (int64_t i = 0; i < count; i++) tokens[i] = raw[i];
    else if (width == 2)
        for (int64_t i = 0; i < count; i++) tokens[i] = raw[2 * i] | raw[2 * i + 1] << 8;
    else
        for (int64_t i = 0; i < count; i++) tokens[i] = (int32_t)dtrain__le(raw + 4 * i, 4);
}

/* Read tokens through a small buffer, file after file. */
DTRAIN__PRIVATE dtrain_result dtrain__tokens_read(void *user, int64_t first, int64_t count,
                                                  void *items, int32_t *labels)
{
    const dtrain_dataset *dataset = (const dtrain_dataset *)user;
    const uint32_t width = dataset->token_bytes;
    unsigned char raw[DTRAIN__TOKEN_BYTES];
    (void)labels; /* tokens have none */
    for (int64_t done = 0; done < count;) {
        const dtrain__data_file *file = dtrain__data_file_of(&dataset->data, first + done);
        const int64_t at = first + done - file->first_item;
        const int64_t some = dtrain__min(dtrain__min(count - done, file->item_count - at),
                                         (int64_t)(sizeof raw / width));
        DTRAIN__TRY(dtrain__data_file_read(file, file->header_bytes + at * width, raw,
                                           (size_t)some * width));
        dtrain__widen(raw, width, some, (int32_t *)items + done);
        done += some;
    }
    return DTRAIN_OK;
}
