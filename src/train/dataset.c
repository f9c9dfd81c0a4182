/* Token files
 *
 *     bytes    | t | t | t | ...                                      a token is a byte, 0 to 255
 *     .bin     | magic | version | count | 0 ... | t | t | ...
 *              |<------- 256 words, 1024 bytes ->|<- 2 or 4 bytes a token, little endian
 *
 * Files are read with pread into a small buffer, never mapped: a file that is truncated during the
 * run is then a short read, which becomes an error sentence, and not a SIGBUS, which ends the rank.
 */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/log.h"
#include "core/result.h"
#include "world/world.h"
#include "world/world_internal.h"
#include "train/data.h"
#include "train/data_internal.h"

#define DTRAIN__FORMAT_BYTES 1u
#define DTRAIN__FORMAT_BIN 2u
#define DTRAIN__BIN_HEADER 1024 /* 256 int32, little endian: magic, version, token count, 0 ... */
#define DTRAIN__BIN_MAGIC_U16 20240520u
#define DTRAIN__BIN_MAGIC_U32 20240801u
#define DTRAIN__READ_TOKENS 2048 /* read at once, into 8 KiB of stack */

static dtrain_result dtrain__dataset_file(dtrain_dataset *dataset);
static dtrain_result dtrain__dataset_format(dtrain_dataset *dataset, uint32_t format);
static dtrain_result dtrain__dataset_pread(const dtrain_dataset *dataset, int64_t offset,
                                           unsigned char *buffer, size_t bytes);
static uint32_t dtrain__le(const unsigned char *bytes, uint32_t width);

/* Open the file and learn what it is. The path is kept behind the struct, in one allocation. */
DTRAIN_API dtrain_result dtrain_dataset_open(dtrain_world *world, const dtrain_dataset_desc *desc,
                                             dtrain_dataset **out)
{
    const int64_t most = INT64_C(1) << 31; /* ids are handed out as int32 */
    if (out) *out = NULL;
    if (!out || !desc || !desc->path || !desc->path[0])
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_dataset_open: out, desc or its path is NULL or empty");
    if (desc->format > DTRAIN__FORMAT_BIN || desc->vocab_count < 0 || desc->vocab_count > most)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_dataset_open: expected format 0 (by magic), 1 (bytes) or 2 "
                           "(.bin) and vocab_count 0 to 2^31, found %u and %lld",
                           (unsigned)desc->format, (long long)desc->vocab_count);
    dtrain_allocator allocator = dtrain__resolve_allocator(world ? &world->allocator : NULL);
    const size_t path_bytes = strlen(desc->path) + 1, bytes = sizeof(dtrain_dataset) + path_bytes;
    dtrain_dataset *dataset = (dtrain_dataset *)dtrain__alloc(&allocator, bytes, 1, "a dataset");
    if (!dataset) return DTRAIN_ERROR_MEMORY;
    dataset->allocator = allocator;
    dataset->bytes = bytes;
    dataset->path = (char *)memcpy(dataset + 1, desc->path, path_bytes);
    dtrain_result result = dtrain__dataset_file(dataset);
    if (result == DTRAIN_OK) result = dtrain__dataset_format(dataset, desc->format);
    dataset->vocab_count = desc->vocab_count          ? desc->vocab_count
                           : dataset->token_bytes > 1 ? 50257
                                                      : 256;
    if (result == DTRAIN_OK) *out = dataset;
    else dtrain_dataset_close(dataset);
    return result;
}

/* Open the file and learn its size. Without O_NONBLOCK a pipe would wait for its writer here. */
static dtrain_result dtrain__dataset_file(dtrain_dataset *dataset)
{
    struct stat info;
    dataset->file = open(dataset->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (dataset->file < 0 || fstat(dataset->file, &info) != 0)
        return dtrain_fail(DTRAIN_ERROR_FILE, "dtrain_dataset_open: %s cannot be opened: %s",
                           dataset->path, strerror(errno));
    if (!S_ISREG(info.st_mode) || info.st_size == 0)
        return dtrain_fail(DTRAIN_ERROR_FILE,
                           "dtrain_dataset_open: %s is %s, expected a file of tokens",
                           dataset->path, S_ISREG(info.st_mode) ? "empty" : "no regular file");
    dataset->file_bytes = (int64_t)info.st_size;
    return DTRAIN_OK;
}

/* Decide what the file is. Format 0 goes by the magic, which no text begins with. The count of a
 * .bin header must fit exactly, as llm.c demands: a longer file is as suspect as a shorter one (two
 * files glued together, a count that overflowed). */
static dtrain_result dtrain__dataset_format(dtrain_dataset *dataset, uint32_t format)
{
    unsigned char head[DTRAIN__BIN_HEADER] = {0};
    const int64_t have = dtrain__min(dataset->file_bytes, DTRAIN__BIN_HEADER);
    DTRAIN__TRY(dtrain__dataset_pread(dataset, 0, head, (size_t)have));
    const uint32_t magic = dtrain__le(head, 4), version = dtrain__le(head + 4, 4);
    const bool narrow = magic == DTRAIN__BIN_MAGIC_U16;
    const bool is_bin = narrow || magic == DTRAIN__BIN_MAGIC_U32;
    if (format == DTRAIN__FORMAT_BYTES || (format == 0 && !is_bin)) {
        dataset->token_bytes = 1;
        dataset->token_count = dataset->file_bytes;
        return DTRAIN_OK;
    }
    if (!is_bin || have < DTRAIN__BIN_HEADER || version != (narrow ? 1 : 7))
        return dtrain_fail(DTRAIN_ERROR_DATA,
                           "dtrain_dataset_open: %s is no llm.c token file: expected a header of "
                           "%d bytes with magic %u, version 1 or magic %u, version 7, found %lld "
                           "bytes, %u and %u; use format 1 for plain bytes, and note that "
                           "nanoGPT's .bin files lack the header",
                           dataset->path, DTRAIN__BIN_HEADER, DTRAIN__BIN_MAGIC_U16,
                           DTRAIN__BIN_MAGIC_U32, (long long)have, magic, version);
    dataset->token_bytes = narrow ? 2 : 4;
    dataset->header_bytes = DTRAIN__BIN_HEADER;
    dataset->token_count = dtrain__le(head + 8, 4);
    const int64_t bytes = DTRAIN__BIN_HEADER + dataset->token_count * dataset->token_bytes;
    if (dataset->token_count > 0 && bytes == dataset->file_bytes) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_DATA,
                       "dtrain_dataset_open: %s announces %lld tokens, which makes %lld bytes, but "
                       "has %lld: is it cut off?",
                       dataset->path, (long long)dataset->token_count, (long long)bytes,
                       (long long)dataset->file_bytes);
}

DTRAIN_API void dtrain_dataset_close(dtrain_dataset *dataset)
{
    if (!dataset) return;
    dtrain_allocator allocator = dataset->allocator;
    if (dataset->file >= 0) close(dataset->file);
    dtrain__free(&allocator, dataset, dataset->bytes, 1);
}

DTRAIN_API void dtrain_dataset_query(const dtrain_dataset *dataset, dtrain_dataset_info *info)
{
    if (!info) return;
    info->token_count = dataset ? dataset->token_count : 0;
    info->vocab_count = dataset ? dataset->vocab_count : 0;
}

/* ---- reading ----------------------------------------------------------------------------------*/

/* Read tokens piece by piece through a small buffer. Every id is checked here, on use, because
 * checking a file of 100 GB at open would take minutes. */
DTRAIN_API dtrain_result dtrain_dataset_read(dtrain_dataset *dataset, int64_t first, int64_t count,
                                             int32_t *tokens)
{
    unsigned char raw[DTRAIN__READ_TOKENS * 4];
    if (!dataset || count < 0 || (count > 0 && !tokens))
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_dataset_read: dataset or tokens is NULL, or count is negative");
    if (first < 0 || first > dataset->token_count - count)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_dataset_read: %lld tokens from %lld on were asked for, %s has "
                           "%lld",
                           (long long)count, (long long)first, dataset->path,
                           (long long)dataset->token_count);
    const uint32_t width = dataset->token_bytes;
    for (int64_t done = 0; done < count;) {
        const int64_t some = dtrain__min(count - done, DTRAIN__READ_TOKENS);
        DTRAIN__TRY(dtrain__dataset_pread(dataset, dataset->header_bytes + (first + done) * width,
                                          raw, (size_t)some * width));
        for (int64_t i = 0; i < some; i++, done++) {
            const uint32_t id = dtrain__le(raw + i * width, width);
            if ((int64_t)id >= dataset->vocab_count)
                return dtrain_fail(DTRAIN_ERROR_DATA,
                                   "%s: token %lld has id %u, but the vocabulary has %lld: was the "
                                   "file made by another tokenizer?",
                                   dataset->path, (long long)(first + done), (unsigned)id,
                                   (long long)dataset->vocab_count);
            tokens[done] = (int32_t)id;
        }
    }
    return DTRAIN_OK;
}

/* Read all `bytes` at `offset`, or fail. A read may be short or interrupted at any time; only 0 is
 * the end of the file, and there the file must have shrunk, because offsets were checked. */
static dtrain_result dtrain__dataset_pread(const dtrain_dataset *dataset, int64_t offset,
                                           unsigned char *buffer, size_t bytes)
{
    while (bytes > 0) {
        ssize_t got = pread(dataset->file, buffer, bytes, (off_t)offset);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0)
            return dtrain_fail(DTRAIN_ERROR_FILE, "%s cannot be read at byte %lld: %s",
                               dataset->path, (long long)offset, strerror(errno));
        if (got == 0)
            return dtrain_fail(DTRAIN_ERROR_FILE,
                               "%s ended at byte %lld, but had %lld bytes when it was opened: was "
                               "it truncated or written again during the run?",
                               dataset->path, (long long)offset, (long long)dataset->file_bytes);
        buffer += got;
        bytes -= (size_t)got;
        offset += got;
    }
    return DTRAIN_OK;
}

/* Return the little-endian number of `width` bytes, whatever the host's order. */
static uint32_t dtrain__le(const unsigned char *bytes, uint32_t width)
{
    uint32_t value = 0;
    for (uint32_t i = 0; i < width; i++) value |= (uint32_t)bytes[i] << (8 * i);
    return value;
}
