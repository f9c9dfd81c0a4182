/* safetensors
 *
 * The format of Hugging Face (github.com/huggingface/safetensors): tensors by name, which programs
 * in most languages read, and which cannot carry code.
 *
 *     8 bytes    N, little endian
 *     N bytes    {"__metadata__": {"key": "text"},
 *                 "name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}
 *     the rest   values, row-major, little endian; offsets count from here
 *
 * A header that this file accepts means the same to every reader: the tensors cover the data
 * without holes or overlaps, no name occurs twice, and sizes agree with shapes. The library adds
 * two limits: 16 dimensions, and names of 511 bytes without control characters. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/crc32c_internal.h"
#include "core/dtype.h"
#include "core/json_internal.h"
#include "core/log.h"
#include "core/result.h"
#include "state/safetensors_internal.h"
#include "state/storage.h"
#include "state/storage_internal.h"

#define DTRAIN__HEADER_BYTES 100000000u /* at most: the limit of the reference reader */
#define DTRAIN__LENGTH_BYTES 8u

/* The shortest entry of a tensor: "":{"dtype":"U8","shape":[],"data_offsets":[0,1]} and a comma. */
#define DTRAIN__ENTRY_BYTES 50u

/* Types of the format by number; the types of dtrain_dtype come first. */
static const struct {
    const char *name;
    uint32_t bits;
} dtrain__stored_types[DTRAIN__STORED_TYPES] = {
    {"F32", 32},        {"BF16", 16},      {"F16", 16},    {"I32", 32},    {"I64", 64},
    {"F64", 64},        {"U8", 8},         {"BOOL", 8},    {"I8", 8},      {"I16", 16},
    {"U16", 16},        {"U32", 32},       {"U64", 64},    {"C64", 64},    {"F8_E4M3", 8},
    {"F8_E5M2", 8},     {"F8_E8M0", 8},    {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"F4", 4},
    {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}};

DTRAIN__PRIVATE size_t dtrain__stored_bytes(uint32_t dtype)
{
    return dtrain__stored_types[dtype].bits / 8;
}

DTRAIN__PRIVATE const char *dtrain__stored_name(uint32_t dtype)
{
    return dtype < DTRAIN__STORED_TYPES ? dtrain__stored_types[dtype].name : "?";
}

/* ---- Writing ----------------------------------------------------------------------------------*/

DTRAIN__PRIVATE void dtrain__safetensors_add(dtrain__text *text, const dtrain__stored *tensor)
{
    if (!text->bytes) dtrain__text_add(text, "%8s{", ""); /* end writes the length */
    dtrain__text_add_string(text, tensor->name);
    dtrain__text_add(text, ":{\"dtype\":\"%s\",\"shape\":[", dtrain__stored_name(tensor->dtype));
    for (int d = 0; d < tensor->dims; d++)
        dtrain__text_add(text, "%s%lld", d ? "," : "", (long long)tensor->shape[d]);
    dtrain__text_add(text, "],\"data_offsets\":[%llu,%llu]},", (unsigned long long)tensor->begin,
                     (unsigned long long)tensor->end);
}

DTRAIN__PRIVATE dtrain_result dtrain__safetensors_end(dtrain__text *text, const char *metadata,
                                                      uint64_t data_bytes)
{
    dtrain__tensor_file check;
    if (!text->bytes) dtrain__text_add(text, "%8s{", "");
    dtrain__text_add(text, "\"__metadata__\":%s}", metadata);
    dtrain__text_add(text, "%*s", (int)(dtrain__round_up(text->bytes, 8) - text->bytes), "");
    if (text->failed) return DTRAIN_ERROR_MEMORY;
    const size_t bytes = text->bytes - DTRAIN__LENGTH_BYTES;
    for (size_t i = 0; i < DTRAIN__LENGTH_BYTES; i++) text->at[i] = (char)(bytes >> (8 * i) & 255);
    DTRAIN__TRY(dtrain__safetensors_parse("a new file", text->at + DTRAIN__LENGTH_BYTES, bytes,
                                          text->bytes + data_bytes, text->allocator, &check));
    dtrain__safetensors_free(&check);
    return DTRAIN_OK;
}

/* ---- Reading: one tensor ----------------------------------------------------------------------*/

/* Read an array of at most `room` numbers, and return its length. */
static int dtrain__header_numbers(dtrain__json *json, int64_t *numbers, int room)
{
    int count = 0;
    (void)dtrain__json_enter(json, '[');
    while (dtrain__json_item(json))
        if (count == room) dtrain__json_fail(json, "more than %d numbers", room);
        else (void)dtrain__json_count(json, &numbers[count++]);
    return count;
}

/* Read the entry of a tensor, and compare its size with its shape and type. Skip unknown members,
 * as the reference reader does. */
static bool dtrain__header_tensor(dtrain__json *json, dtrain__stored *tensor)
{
    static const char *const fields[3] = {"dtype", "shape", "data_offsets"};
    bool seen[3] = {false, false, false}, fits = true;
    char key[DTRAIN__TENSOR_NAME];
    int64_t offsets[2] = {0, 0};
    int offset_count = 0;
    size_t size = 1;
    if (!dtrain__json_enter(json, '{')) return false;
    while (dtrain__json_member(json, key, sizeof key)) {
        int field = 0;
        while (field < 3 && strcmp(key, fields[field]) != 0) field++;
        if (field < 3 && seen[field]) return dtrain__json_fail(json, "a second \"%s\"", key);
        if (field < 3) seen[field] = true;
        if (field == 0) {
            if (!dtrain__json_string(json, key, 32)) return false;
            tensor->dtype = 0;
            while (tensor->dtype < DTRAIN__STORED_TYPES &&
                   strcmp(key, dtrain__stored_types[tensor->dtype].name) != 0)
                tensor->dtype++;
            if (tensor->dtype == DTRAIN__STORED_TYPES)
                return dtrain__json_fail(json, "its dtype \"%s\" is not one of the format", key);
        } else if (field == 1)
            tensor->dims = dtrain__header_numbers(json, tensor->shape, DTRAIN__TENSOR_DIMS);
        else if (field == 2) offset_count = dtrain__header_numbers(json, offsets, 2);
        else (void)dtrain__json_skip(json);
    }
    if (json->result != DTRAIN_OK) return false;
    for (int field = 0; field < 3; field++)
        if (!seen[field]) return dtrain__json_fail(json, "it has no \"%s\"", fields[field]);
    if (offset_count < 2)
        return dtrain__json_fail(json, "data_offsets has %d of 2 numbers", offset_count);
    tensor->begin = (uint64_t)offsets[0];
    tensor->end = (uint64_t)offsets[1];
    const int64_t found = offsets[1] - offsets[0];
    for (int d = 0; d < tensor->dims; d++)
        fits = fits && dtrain__size_mul(size, (size_t)tensor->shape[d], &size);
    if (!fits || !dtrain__size_mul(size, dtrain__stored_types[tensor->dtype].bits, &size))
        return dtrain__json_fail(json, "its shape has more elements than fit any memory");
    if (size % 8) return dtrain__json_fail(json, "its %zu bits are not whole bytes", size);
    if (found >= 0 && (uint64_t)found == size / 8) return true;
    return dtrain__json_fail(json, "data_offsets leave it %lld bytes, expected %zu",
                             (long long)found, size / 8);
}

/* ---- Reading: all of them ---------------------------------------------------------------------*/

/* Check the length of a header before memory is allocated for it. */
static dtrain_result dtrain__header_fits(const char *path, uint64_t bytes, uint64_t file_bytes)
{
    if (bytes > DTRAIN__HEADER_BYTES)
        return dtrain_fail(DTRAIN_ERROR_DATA, "%s: its header has %llu bytes, expected at most %u",
                           path, (unsigned long long)bytes, DTRAIN__HEADER_BYTES);
    if (file_bytes < DTRAIN__LENGTH_BYTES + bytes)
        return dtrain_fail(DTRAIN_ERROR_DATA,
                           "%s has %llu bytes, expected at least %llu, the header and its length: "
                           "it was truncated",
                           path, (unsigned long long)file_bytes,
                           (unsigned long long)(DTRAIN__LENGTH_BYTES + bytes));
    return DTRAIN_OK;
}

/* Order tensors by place; an empty tensor comes before a tensor that begins at the same place. */
static int dtrain__stored_by_place(const void *a, const void *b)
{
    const dtrain__stored *x = (const dtrain__stored *)a, *y = (const dtrain__stored *)b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    return (x->end > y->end) - (x->end < y->end);
}

static int dtrain__stored_by_name(const void *a, const void *b)
{
    return strcmp(((const dtrain__stored *)a)->name, ((const dtrain__stored *)b)->name);
}

/* Check that the tensors cover the data and have different names, and sort them by name. */
static dtrain_result dtrain__header_check_all(const char *path, uint64_t data_bytes,
                                              dtrain__tensor_file *file)
{
    dtrain__stored *const tensors = file->tensors;
    uint64_t end = 0;
    qsort(tensors, file->count, sizeof *tensors, dtrain__stored_by_place);
    for (size_t i = 0; i < file->count; end = tensors[i++].end)
        if (tensors[i].begin != end)
            return dtrain_fail(DTRAIN_ERROR_DATA,
                               "%s: \"%s\" begins at byte %llu of the data, expected %llu: %s",
                               path, dtrain__short(tensors[i].name),
                               (unsigned long long)tensors[i].begin, (unsigned long long)end,
                               tensors[i].begin < end ? "it overlaps another tensor"
                                                      : "no tensor has the bytes between");
    if (end != data_bytes)
        return dtrain_fail(DTRAIN_ERROR_DATA, "%s has %llu bytes of data, expected %llu: %s", path,
                           (unsigned long long)data_bytes, (unsigned long long)end,
                           end > data_bytes ? "it was truncated" : "nothing else may follow");
    qsort(tensors, file->count, sizeof *tensors, dtrain__stored_by_name);
    for (size_t i = 1; i < file->count; i++)
        if (strcmp(tensors[i - 1].name, tensors[i].name) == 0)
            return dtrain_fail(DTRAIN_ERROR_DATA, "%s has two tensors \"%s\"", path,
                               dtrain__short(tensors[i].name));
    return DTRAIN_OK;
}

/* Names are decoded into memory as long as the header, which is enough: a decoded string is never
 * longer than its text. */
DTRAIN__PRIVATE dtrain_result dtrain__safetensors_parse(const char *path, const char *header,
                                                        size_t bytes, uint64_t file_bytes,
                                                        const dtrain_allocator *allocator,
                                                        dtrain__tensor_file *out)
{
    memset(out, 0, sizeof *out);
    out->allocator = allocator;
    DTRAIN__TRY(dtrain__header_fits(path, bytes, file_bytes));
    out->data = DTRAIN__LENGTH_BYTES + bytes;
    out->room = bytes / DTRAIN__ENTRY_BYTES + 1;
    out->names_bytes = bytes;
    out->tensors = (dtrain__stored *)dtrain__alloc(allocator, out->room, sizeof *out->tensors,
                                                   "the tensors of a file");
    out->names = (char *)dtrain__alloc(allocator, bytes, 1, "names of tensors");
    if (!out->tensors || !out->names) {
        dtrain__safetensors_free(out);
        return DTRAIN_ERROR_MEMORY;
    }
    char *name = out->names, *const end = name + bytes;
    dtrain__json json = dtrain__json_begin(path, header, bytes);
    (void)dtrain__json_enter(&json, '{');
    while (dtrain__json_member(&json, name, DTRAIN__TENSOR_NAME)) {
        dtrain__stored *tensor = &out->tensors[out->count];
        json.inside = name;
        for (const char *c = name; *c; c++)
            if ((unsigned char)*c < 0x20 || *c == 0x7f)
                dtrain__json_fail(&json, "a name with control characters");
        if (strcmp(name, "__metadata__") == 0) { /* strings by name */
            json.inside = "__metadata__";
            if (out->metadata) dtrain__json_fail(&json, "a second \"__metadata__\"");
            out->metadata = name;
            (void)dtrain__json_enter(&json, '{');
            while (dtrain__json_member(&json, name, (size_t)(end - name))) {
                name += strlen(name) + 1;
                if (dtrain__json_string(&json, name, (size_t)(end - name)))
                    name += strlen(name) + 1;
            }
            out->metadata_end = name;
        } else if (dtrain__header_tensor(&json, tensor)) {
            tensor->name = name;
            name += strlen(name) + 1;
            out->count++;
        }
        if (json.result == DTRAIN_OK) json.inside = NULL;
    }
    dtrain_result result = dtrain__json_end(&json);
    if (result == DTRAIN_OK) result = dtrain__header_check_all(path, file_bytes - out->data, out);
    if (result != DTRAIN_OK) dtrain__safetensors_free(out);
    return result;
}

DTRAIN__PRIVATE dtrain_result dtrain__safetensors_read(const dtrain_storage *storage,
                                                       const char *path, const char *crc,
                                                       const dtrain_allocator *allocator,
                                                       dtrain__tensor_file *out)
{
    unsigned char head[32]; /* the length, and enough bytes to recognize other kinds of files */
    char digits[9], *header = NULL;
    uint64_t bytes = 0;
    int file;
    memset(out, 0, sizeof *out);
    DTRAIN__TRY(dtrain__storage_open(storage, path, DTRAIN_STORAGE_READ, &file));
    const int64_t size = storage->size(storage->user, file);
    const size_t shown = (size_t)dtrain__max(0, dtrain__min(size, (int64_t)sizeof head));
    dtrain_result result = size < 0 ? dtrain__storage_fail(path, "read", size)
                                    : dtrain__storage_read(storage, file, path, head, shown, 0);
    if (result == DTRAIN_OK) {
        for (size_t i = 0; i < DTRAIN__LENGTH_BYTES && i < shown; i++)
            bytes |= (uint64_t)head[i] << (8 * i);
        result = dtrain__header_fits(path, bytes, (uint64_t)size);
        const char *mistaken = result == DTRAIN_OK ? NULL : dtrain__mistaken(head, shown);
        if (mistaken) result = dtrain_fail(DTRAIN_ERROR_DATA, "%s: %s", path, mistaken);
    }
    if (result == DTRAIN_OK) {
        header = (char *)dtrain__alloc(allocator, (size_t)bytes, 1, "the header of a file");
        result = header ? dtrain__storage_read(storage, file, path, header, (size_t)bytes,
                                               DTRAIN__LENGTH_BYTES)
                        : DTRAIN_ERROR_MEMORY;
    }
    (void)storage->close(storage->user, file);
    const uint32_t found = result == DTRAIN_OK ? dtrain__crc32c(0, header, (size_t)bytes) : 0;
    snprintf(digits, sizeof digits, "%08x", found);
    if (result == DTRAIN_OK && crc && memcmp(digits, crc, 8) != 0)
        result = dtrain_fail(DTRAIN_ERROR_DATA,
                             "%s is damaged: its header does not have the checksum of the manifest",
                             path);
    if (result == DTRAIN_OK)
        result =
            dtrain__safetensors_parse(path, header, (size_t)bytes, (uint64_t)size, allocator, out);
    out->crc = found;
    dtrain__free(allocator, header, (size_t)bytes, 1);
    return result;
}

DTRAIN__PRIVATE dtrain__stored *dtrain__safetensors_find(const dtrain__tensor_file *file,
                                                         const char *name)
{
    dtrain__stored key;
    key.name = name;
    return (dtrain__stored *)bsearch(&key, file->tensors, file->count, sizeof key,
                                     dtrain__stored_by_name);
}

DTRAIN__PRIVATE void dtrain__safetensors_free(dtrain__tensor_file *file)
{
    dtrain__free(file->allocator, file->tensors, file->room, sizeof *file->tensors);
    dtrain__free(file->allocator, file->names, file->names_bytes, 1);
    memset(file, 0, sizeof *file);
}
