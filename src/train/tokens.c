/* Token files
 *
 *     bytes    | t | t | t | ...                                      a token is a byte, 0 to 255
 *     .bin     | magic | version | count | 0 ... | t | t | ...
 *              |<------- 256 words, 1024 bytes ->|<- 2 or 4 bytes a token, little endian
 *     u16, u32 | t | t | t | ...                                      2 or 4 bytes, little endian
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
#define DTRAIN__TOKEN_BYTES 4096 /* read at once, into the stack, which can be of 64 KiB */

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

/* Return what the first bytes of a file say that it is, if that is neither text nor tokens. */
static const char *dtrain__known_file(const unsigned char *head, size_t bytes)
{
    static const char packed[] = "compressed data: decompress it first",
                      utf16[] = "text in UTF-16: iconv -f UTF-16 -t UTF-8 converts it";
    static const struct {
        const char *magic, *what;
    } known[] = {{"\xc6\xd7\x34\x01", "a model of llm.c, by its magic 20240326"},
                 {"\xc7\xd7\x34\x01", "a debugging state of llm.c, by its magic 20240327"},
                 {"\xc8\xd7\x34\x01", "a tokenizer of llm.c, by its magic 20240328"},
                 {"\x8a\xd8\x34\x01", "an evaluation of llm.c, by its magic 20240522"},
                 {"\x93NUMPY", "a .npy file: array.tofile(PATH) writes numbers only"},
                 {"PAR1\x15", "a Parquet file: write its text to a file"},
                 {"\x1f\x8b\x08", packed}, /* gzip, zstd, xz, bzip2, zip */
                 {"\x28\xb5\x2f\xfd", packed},
                 {"\xfd\x37zXZ", packed},
                 {"BZh91AY&SY", packed},
                 {"PK\x03\x04", packed},
                 {"\xff\xfe", utf16},
                 {"\xfe\xff", utf16}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        const size_t length = strlen(known[i].magic);
        if (bytes >= length && memcmp(head, known[i].magic, length) == 0) return known[i].what;
    }
    return NULL;
}

/* Bytes of a sample of a file, by their place in a group of four. */
typedef struct dtrain__byte_counts {
    int64_t all, control;                   /* control: bytes that no text has */
    int64_t zero[4], printable[4], high[4]; /* high: above 0xc4, the high byte of 50256 */
} dtrain__byte_counts;

static void dtrain__count_bytes(dtrain__byte_counts *c, const unsigned char *bytes, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        c->control += bytes[i] < 9 || (bytes[i] > 13 && bytes[i] < 27);
        c->zero[i % 4] += bytes[i] == 0;
        c->printable[i % 4] += bytes[i] >= 32 ? bytes[i] < 127 : bytes[i] >= 9 && bytes[i] <= 13;
        c->high[i % 4] += bytes[i] > 0xc4;
    }
    c->all += count;
}

/* Tell integers of 2, 4 or 8 bytes, little endian, from bytes: their high bytes are zero, or of
 * GPT-2's tokens never above 0xc4 where low bytes are. In programs, pictures, sound and compressed
 * data no place in a group of bytes is so unlike its neighbour, and text has no control characters.
 * NULL: bytes, or too few to tell. */
static const char *dtrain__wide_tokens(const dtrain__byte_counts *c, int64_t size)
{
    const int64_t n = c->all / 4, even = c->zero[0] + c->zero[2], odd = c->zero[1] + c->zero[3];
    const int64_t letters[2] = {c->printable[0] + c->printable[2],
                                c->printable[1] + c->printable[3]};
    if (n < 32 || c->control * 50 < c->all) return NULL;
    if (size % 4 == 0 && c->zero[3] >= n && 2 * c->zero[2] >= n && 10 * c->zero[0] < 9 * n)
        return 2 * c->zero[0] < n ? "uint32 tokens" : "integers of 64 bits, which no format has";
    if (size % 2) return NULL;
    if ((10 * odd > 18 * n && 10 * letters[0] > 18 * n) ||
        (10 * even > 18 * n && 10 * letters[1] > 18 * n))
        return "text in UTF-16: iconv -f UTF-16 -t UTF-8 converts it";
    const bool low = odd >= 2 * n && even < n;
    const bool words = c->high[1] + c->high[3] == 0 && 10 * (c->high[0] + c->high[2]) > n;
    return low || words ? "uint16 tokens, as nanoGPT's .bin" : NULL;
}

/* Refuse a file that was taken for bytes because desc names no format, and that is something else.
 * Four pages of it are looked at. */
DTRAIN__PRIVATE dtrain_result dtrain__bytes_guessed(const dtrain_dataset *dataset,
                                                    const dtrain__data_file *file)
{
    const int64_t size = (int64_t)file->opened.st_size;
    unsigned char page[4096];
    const char *what = NULL;
    bool text = true;
    dtrain__byte_counts counts;
    memset(&counts, 0, sizeof counts);
    for (int64_t part = 0; part < 4 && !what; part++) {
        const int64_t at = size / 4 * part / 4 * 4;
        const int64_t bytes = dtrain__min(size - at, (int64_t)sizeof page);
        DTRAIN__TRY(dtrain__data_file_read(file, at, page, (size_t)bytes));
        dtrain__count_bytes(&counts, page, bytes);
        if (part == 0) what = dtrain__known_file(page, (size_t)bytes);
        if (part == 0) text = counts.control == 0 || dataset->vocab_count <= 256;
    }
    if (!what) what = dtrain__wide_tokens(&counts, size);
    if (!what && !text) what = "no text, and the vocabulary is larger than 256";
    if (!what) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_DATA,
                       "dtrain_dataset_open: %s seems to be %s; a desc without a `format` reads it "
                       "as bytes: name DTRAIN_DATA_BYTES if these are meant, and for tokens "
                       "DTRAIN_DATA_U16 (nanoGPT's .bin) or DTRAIN_DATA_U32",
                       file->path, what);
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
                           "`format` DTRAIN_DATA_U16, and text is DTRAIN_DATA_BYTES",
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

/* Take a file of tokens without a header; its format says how many bytes a token has. */
DTRAIN__PRIVATE dtrain_result dtrain__raw_learn(dtrain_dataset *dataset, dtrain__data_file *file)
{
    const int64_t size = (int64_t)file->opened.st_size;
    unsigned char head[6] = {0};
    dataset->token_bytes = dataset->format->item_bytes;
    DTRAIN__TRY(dtrain__data_file_read(file, 0, head, (size_t)dtrain__min(size, sizeof head)));
    if (dtrain__is_bin(file) || memcmp(head, "\x93NUMPY", sizeof head) == 0)
        return dtrain_fail(DTRAIN_ERROR_DATA,
                           "dtrain_dataset_open: %s begins with the header of %s, and %s have none",
                           file->path,
                           head[0] != 0x93 ? "an llm.c token file (DTRAIN_DATA_BIN)"
                                           : "a .npy file (array.tofile(PATH) writes none)",
                           dataset->format->name);
    if (size % dataset->token_bytes)
        return dtrain_fail(DTRAIN_ERROR_DATA,
                           "dtrain_dataset_open: %s has %lld bytes, no whole number of %s: is it "
                           "cut off?",
                           file->path, (long long)size, dataset->format->name);
    file->item_count = size / dataset->token_bytes;
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
