/* Token files
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

static dtrain_result dtrain__dataset_check(const dtrain_dataset_desc *desc);
static dtrain_result dtrain__dataset_file(dtrain_dataset *dataset);
static const char *dtrain__file_kind(mode_t mode);
static dtrain_result dtrain__dataset_format(dtrain_dataset *dataset, uint32_t format);
static dtrain_result dtrain__dataset_bin(dtrain_dataset *dataset, const unsigned char *head);
static dtrain_result dtrain__dataset_wrong_magic(const dtrain_dataset *dataset,
                                                 const unsigned char *head);
static dtrain_result dtrain__dataset_read_some(const dtrain_dataset *dataset, int64_t first,
                                               int64_t count, int32_t *tokens);
static dtrain_result dtrain__dataset_pread(const dtrain_dataset *dataset, int64_t offset,
                                           unsigned char *buffer, size_t bytes);
static uint32_t dtrain__le(const unsigned char *bytes, uint32_t width);

DTRAIN_API dtrain_result dtrain_dataset_open(dtrain_world *world, const dtrain_dataset_desc *desc,
                                             dtrain_dataset **out)
{
    if (!out) return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_dataset_open: out is NULL");
    *out = NULL;
    DTRAIN__TRY(dtrain__dataset_check(desc));
    dtrain_allocator allocator = dtrain__resolve_allocator(world ? &world->allocator : NULL);
    dtrain_dataset *dataset =
        (dtrain_dataset *)dtrain__alloc(&allocator, 1, sizeof *dataset, "a dataset");
    if (!dataset) return DTRAIN_ERROR_MEMORY;
    dataset->allocator = allocator;
    dataset->file = -1;
    dataset->path_bytes = strlen(desc->path) + 1;
    dataset->path = (char *)dtrain__alloc(&allocator, dataset->path_bytes, 1, "a dataset's path");

    dtrain_result result = dataset->path ? DTRAIN_OK : DTRAIN_ERROR_MEMORY;
    if (result == DTRAIN_OK) memcpy(dataset->path, desc->path, dataset->path_bytes);
    if (result == DTRAIN_OK) result = dtrain__dataset_file(dataset);
    if (result == DTRAIN_OK) result = dtrain__dataset_format(dataset, desc->format);
    if (result != DTRAIN_OK) {
        dtrain_dataset_close(dataset);
        return result;
    }
    dataset->vocab_count = desc->vocab_count          ? desc->vocab_count
                           : dataset->token_bytes > 1 ? 50257
                                                      : 256;
    *out = dataset;
    return DTRAIN_OK;
}

static dtrain_result dtrain__dataset_check(const dtrain_dataset_desc *desc)
{
    const int64_t most = INT64_C(1) << 31; /* ids are handed out as int32 */
    if (!desc || !desc->path || !desc->path[0])
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_dataset_open: no path is given");
    if (desc->format > DTRAIN__FORMAT_BIN)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_dataset_open: format is %u, expected 0 (by magic), 1 (bytes) "
                           "or 2 (.bin)",
                           (unsigned)desc->format);
    if (desc->vocab_count < 0 || desc->vocab_count > most)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_dataset_open: vocab_count is %lld, expected 0 to %lld",
                           (long long)desc->vocab_count, (long long)most);
    return DTRAIN_OK;
}

/* Opens the file and learns its size. Without O_NONBLOCK a pipe would wait for its writer here. */
static dtrain_result dtrain__dataset_file(dtrain_dataset *dataset)
{
    struct stat info;
    dataset->file = open(dataset->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (dataset->file < 0 || fstat(dataset->file, &info) != 0)
        return dtrain_fail(DTRAIN_ERROR_FILE, "dtrain_dataset_open: %s cannot be opened: %s",
                           dataset->path, strerror(errno));
    if (!S_ISREG(info.st_mode))
        return dtrain_fail(DTRAIN_ERROR_FILE,
                           "dtrain_dataset_open: %s is %s, expected a regular file", dataset->path,
                           dtrain__file_kind(info.st_mode));
    if (info.st_size == 0)
        return dtrain_fail(DTRAIN_ERROR_DATA,
                           "dtrain_dataset_open: %s is empty, expected at least one token",
                           dataset->path);
    dataset->file_bytes = (int64_t)info.st_size;
    return DTRAIN_OK;
}

static const char *dtrain__file_kind(mode_t mode)
{
    if (S_ISDIR(mode)) return "a directory";
    if (S_ISFIFO(mode)) return "a pipe";
    if (S_ISSOCK(mode)) return "a socket";
    return "a device";
}

/* Decides what the file is. Format 0 goes by the magic, which no text begins with. */
static dtrain_result dtrain__dataset_format(dtrain_dataset *dataset, uint32_t format)
{
    unsigned char head[DTRAIN__BIN_HEADER] = {0};
    size_t have = (size_t)dtrain__min(dataset->file_bytes, DTRAIN__BIN_HEADER);
    DTRAIN__TRY(dtrain__dataset_pread(dataset, 0, head, have));
    uint32_t magic = dtrain__le(head, 4);
    bool is_bin = magic == DTRAIN__BIN_MAGIC_U16 || magic == DTRAIN__BIN_MAGIC_U32;
    if (format == DTRAIN__FORMAT_BYTES || (format == 0 && !is_bin)) {
        dataset->token_bytes = 1;
        dataset->token_count = dataset->file_bytes;
        return DTRAIN_OK;
    }
    if (!is_bin && have >= 4) return dtrain__dataset_wrong_magic(dataset, head);
    if (have < DTRAIN__BIN_HEADER)
        return dtrain_fail(DTRAIN_ERROR_DATA,
                           "dtrain_dataset_open: %s has %zu bytes, expected a llm.c header of %d",
                           dataset->path, have, DTRAIN__BIN_HEADER);
    return dtrain__dataset_bin(dataset, head);
}

/* Checks a .bin header against the file. The count must fit exactly, as llm.c demands: a longer
 * file is as suspect as a shorter one (two files glued together, a count that overflowed). */
static dtrain_result dtrain__dataset_bin(dtrain_dataset *dataset, const unsigned char *head)
{
    bool narrow = dtrain__le(head, 4) == DTRAIN__BIN_MAGIC_U16;
    uint32_t expected = narrow ? 1 : 7, version = dtrain__le(head + 4, 4);
    int64_t count = (int32_t)dtrain__le(head + 8, 4);
    int64_t token_bytes = narrow ? 2 : 4;
    if (version != expected)
        return dtrain_fail(DTRAIN_ERROR_DATA,
                           "dtrain_dataset_open: %s has header version %u, expected %u",
                           dataset->path, (unsigned)version, (unsigned)expected);
    if (count <= 0 || DTRAIN__BIN_HEADER + count * token_bytes != dataset->file_bytes)
        return dtrain_fail(DTRAIN_ERROR_DATA,
                           "dtrain_dataset_open: %s announces %lld tokens, which makes %lld "
                           "bytes, but has %lld: is it cut off?",
                           dataset->path, (long long)count,
                           (long long)(DTRAIN__BIN_HEADER + count * token_bytes),
                           (long long)dataset->file_bytes);
    dataset->token_bytes = (uint32_t)token_bytes;
    dataset->header_bytes = DTRAIN__BIN_HEADER;
    dataset->token_count = count;
    return DTRAIN_OK;
}

static dtrain_result dtrain__dataset_wrong_magic(const dtrain_dataset *dataset,
                                                 const unsigned char *head)
{
    char text[5] = "....";
    for (int i = 0; i < 4; i++)
        if (head[i] >= ' ' && head[i] < 127) text[i] = (char)head[i];
    return dtrain_fail(DTRAIN_ERROR_DATA,
                       "dtrain_dataset_open: %s is no llm.c token file: expected magic %u or %u, "
                       "found %u (\"%s\"); use format 1 for plain bytes, and note that nanoGPT's "
                       ".bin files lack the header",
                       dataset->path, DTRAIN__BIN_MAGIC_U16, DTRAIN__BIN_MAGIC_U32,
                       (unsigned)dtrain__le(head, 4), text);
}

DTRAIN_API void dtrain_dataset_close(dtrain_dataset *dataset)
{
    if (!dataset) return;
    dtrain_allocator allocator = dataset->allocator;
    if (dataset->file >= 0) close(dataset->file);
    dtrain__free(&allocator, dataset->path, dataset->path_bytes, 1);
    dtrain__free(&allocator, dataset, 1, sizeof *dataset);
}

DTRAIN_API void dtrain_dataset_query(const dtrain_dataset *dataset, dtrain_dataset_info *info)
{
    if (!info) return;
    info->token_count = dataset ? dataset->token_count : 0;
    info->vocab_count = dataset ? dataset->vocab_count : 0;
}

/* ---- reading ----------------------------------------------------------------------------------*/

DTRAIN_API dtrain_result dtrain_dataset_read(dtrain_dataset *dataset, int64_t first, int64_t count,
                                             int32_t *tokens)
{
    if (!dataset || count < 0 || (count > 0 && !tokens))
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_dataset_read: dataset or tokens is NULL, or count is negative");
    if (first < 0 || first > dataset->token_count - count)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_dataset_read: %lld tokens from %lld on were asked for, %s has "
                           "%lld",
                           (long long)count, (long long)first, dataset->path,
                           (long long)dataset->token_count);
    for (int64_t done = 0; done < count;) {
        int64_t some = dtrain__min(count - done, 2048);
        DTRAIN__TRY(dtrain__dataset_read_some(dataset, first + done, some, tokens + done));
        done += some;
    }
    return DTRAIN_OK;
}

/* `count` tokens, 2048 at most, so that the widest fit the buffer. Every id is checked here, on
 * use, because checking a file of 100 GB at open would take minutes. */
static dtrain_result dtrain__dataset_read_some(const dtrain_dataset *dataset, int64_t first,
                                               int64_t count, int32_t *tokens)
{
    unsigned char raw[8192];
    uint32_t width = dataset->token_bytes;
    DTRAIN__TRY(dtrain__dataset_pread(dataset, dataset->header_bytes + first * width, raw,
                                      (size_t)count * width));
    for (int64_t i = 0; i < count; i++) {
        uint32_t id = dtrain__le(raw + i * width, width);
        if ((int64_t)id >= dataset->vocab_count)
            return dtrain_fail(DTRAIN_ERROR_DATA,
                               "%s: token %lld has id %u, but the vocabulary has %lld: was the "
                               "file made by another tokenizer?",
                               dataset->path, (long long)(first + i), (unsigned)id,
                               (long long)dataset->vocab_count);
        tokens[i] = (int32_t)id;
    }
    return DTRAIN_OK;
}

/* All `bytes` at `offset`, or an error. A read may be short or interrupted at any time; only 0 is
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

/* Little-endian number of `width` bytes, whatever the host's order. */
static uint32_t dtrain__le(const unsigned char *bytes, uint32_t width)
{
    uint32_t value = 0;
    for (uint32_t i = 0; i < width; i++) value |= (uint32_t)bytes[i] << (8 * i);
    return value;
}
