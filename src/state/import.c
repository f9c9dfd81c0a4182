/* Import
 *
 *     every rank    headers | do they fit the model? | read what this rank keeps | publish
 *
 * Steps end with an agreement of all ranks. No rank has more in memory than headers, its own pieces
 * and a block. 16-bit values are widened where they are read to: they lie in the upper half of the
 * room of their fp32, and are replaced from below. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/log.h"
#include "core/result.h"
#include "comm/comm.h"
#include "strategy/view_internal.h"
#include "state/export.h"
#include "state/export_internal.h"
#include "state/json_internal.h"
#include "state/safetensors_internal.h"
#include "state/state_internal.h"
#include "state/storage_internal.h"
#include "device/backend.h"

#define DTRAIN__INDEX_MOST ((uint64_t)64 << 20) /* bytes; those of the largest models have ten */
#define DTRAIN__WEIGHT_FILE_NAME 256            /* bytes, the 0 included */
#define DTRAIN__BLOCK_FLOATS ((int64_t)(DTRAIN__BLOCK / sizeof(float)))

/* ---- Files ------------------------------------------------------------------------------------*/

/* A file whose header was read. */
typedef struct dtrain__weight_file {
    char name[DTRAIN__WEIGHT_FILE_NAME]; /* in the directory; "": the path itself */
    dtrain__tensor_file header;
    size_t first; /* number of its first tensor among those of all files */
} dtrain__weight_file;

/* Where a weight is. */
typedef struct dtrain__weight_place {
    uint32_t file;
    const dtrain__stored *stored; /* NULL: nowhere, or not in this shape or type */
} dtrain__weight_place;

typedef struct dtrain__import {
    dtrain_state *state;
    const dtrain_strategy *strategy;
    const dtrain_allocator *allocator;
    dtrain_import_desc desc; /* resolved */
    const char *path;
    char index[DTRAIN__PATH]; /* the path of the index; "": there is none */
    char directory[DTRAIN__PATH];
    dtrain__weights weights;
    dtrain__weight_place *places; /* (weights.count) */
    dtrain__weight_file *files;   /* (file_room), file_count in use */
    uint32_t file_count;
    size_t file_room;
    bool *used;          /* (tensor_count) tensors of the files that are some parameter's */
    size_t tensor_count; /* of all files */
    char *block;         /* (BLOCK) */
    int file;            /* open, or -1 ... */
    uint32_t opened;     /* ... which */
    uint64_t bytes, values;
    char note[600];
} dtrain__import;

static const char dtrain__import_call[] = "dtrain_checkpoint_import";

static void dtrain__import_path(const dtrain__import *im, uint32_t file,
                                char path[2 * DTRAIN__PATH])
{
    if (im->files[file].name[0])
        snprintf(path, 2 * DTRAIN__PATH, "%s/%s", im->directory, im->files[file].name);
    else snprintf(path, 2 * DTRAIN__PATH, "%s", im->path);
}

/* Open a file, unless it is the one that is open. */
static dtrain_result dtrain__import_open(dtrain__import *im, uint32_t file,
                                         char path[2 * DTRAIN__PATH])
{
    const dtrain_storage *storage = im->desc.storage;
    dtrain__import_path(im, file, path);
    if (im->file >= 0 && im->opened == file) return DTRAIN_OK;
    if (im->file >= 0) (void)storage->close(storage->user, im->file);
    im->file = -1;
    im->opened = file;
    return dtrain__storage_open(storage, path, DTRAIN_STORAGE_READ, &im->file);
}

/* Find a file by its name, or add it. Tensors of a file follow one another in an index, so that the
 * last file is tried first. */
static dtrain_result dtrain__import_file(dtrain__import *im, const char *name, uint32_t *number)
{
    for (*number = im->file_count; *number > 0;)
        if (strcmp(im->files[--*number].name, name) == 0) return DTRAIN_OK;
    if (im->file_count == DTRAIN__WEIGHT_FILES)
        return dtrain_fail(DTRAIN_ERROR_DATA, "%s names more than %u files", im->index,
                           DTRAIN__WEIGHT_FILES);
    if (!dtrain__grow(im->allocator, (void **)&im->files, im->file_count, &im->file_room,
                      sizeof *im->files, "a list of files"))
        return DTRAIN_ERROR_MEMORY;
    *number = im->file_count++;
    dtrain__weight_file *file = &im->files[*number];
    memset(file, 0, sizeof *file);
    file->header.allocator = im->allocator;
    snprintf(file->name, sizeof file->name, "%s", name);
    return DTRAIN_OK;
}

/* Read one member of a weight_map: the first time to know the files, the second time, when there
 * are headers, to see that the tensor is in its file. */
static dtrain_result dtrain__index_member(dtrain__import *im, dtrain__json *json, const char *name,
                                          bool check)
{
    char file_name[DTRAIN__WEIGHT_FILE_NAME];
    if (!dtrain__json_string(json, file_name, sizeof file_name)) return json->result;
    if (!file_name[0] || strchr(file_name, '/') || strcmp(file_name, ".") == 0 ||
        strcmp(file_name, "..") == 0) {
        dtrain__json_fail(json, "its file is \"%.100s\", expected the name of one beside the index",
                          file_name);
        return json->result;
    }
    uint32_t number;
    DTRAIN__TRY(dtrain__import_file(im, file_name, &number));
    if (check && !dtrain__safetensors_find(&im->files[number].header, name))
        dtrain__json_fail(json, "it is not in %.100s", file_name);
    return json->result;
}

/* Walk through an index, and count its tensors. */
static dtrain_result dtrain__index_walk(dtrain__import *im, const char *text, size_t bytes,
                                        bool check, size_t *count)
{
    char name[DTRAIN__TENSOR_NAME];
    dtrain__json json = dtrain__json_begin(im->index, text, bytes);
    bool seen = false;
    *count = 0;
    (void)dtrain__json_enter(&json, '{');
    while (dtrain__json_member(&json, name, sizeof name)) {
        if (strcmp(name, "weight_map") != 0) {
            (void)dtrain__json_skip(&json);
            continue;
        }
        if (seen) dtrain__json_fail(&json, "a second \"weight_map\"");
        seen = true;
        (void)dtrain__json_enter(&json, '{');
        while (dtrain__json_member(&json, name, sizeof name)) {
            json.inside = name;
            DTRAIN__TRY(dtrain__index_member(im, &json, name, check));
            json.inside = NULL;
            ++*count;
        }
    }
    DTRAIN__TRY(dtrain__json_end(&json));
    if (seen) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_DATA, "%s has no \"weight_map\", expected an index of files",
                       im->index);
}

/* Read the headers of all files, and make the list of what is used. */
static dtrain_result dtrain__import_headers(dtrain__import *im)
{
    char path[2 * DTRAIN__PATH];
    for (uint32_t i = 0; i < im->file_count; i++) {
        dtrain__weight_file *file = &im->files[i];
        DTRAIN__TRY(dtrain__import_open(im, i, path));
        DTRAIN__TRY(dtrain__safetensors_read(im->desc.storage, im->file, path, im->allocator,
                                             &file->header));
        file->first = im->tensor_count;
        im->tensor_count += file->header.count;
    }
    im->used =
        (bool *)dtrain__alloc(im->allocator, im->tensor_count, sizeof *im->used, "used tensors");
    return im->used ? DTRAIN_OK : DTRAIN_ERROR_MEMORY;
}

/* Read an index and the headers of its files. */
static dtrain_result dtrain__import_index(dtrain__import *im)
{
    char *text;
    size_t bytes, count;
    DTRAIN__TRY(dtrain__storage_get(im->desc.storage, im->allocator, im->index, DTRAIN__INDEX_MOST,
                                    &text, &bytes));
    dtrain_result result = dtrain__index_walk(im, text, bytes, false, &count);
    if (result == DTRAIN_OK) result = dtrain__import_headers(im);
    if (result == DTRAIN_OK) result = dtrain__index_walk(im, text, bytes, true, &count);
    if (result == DTRAIN_OK && count != im->tensor_count)
        result = dtrain_fail(DTRAIN_ERROR_DATA,
                             "%s names %zu tensors, and its files have %zu: one of them has "
                             "a tensor that the index does not know, or that another has too",
                             im->index, count, im->tensor_count);
    dtrain__free(im->allocator, text, bytes + 1, 1);
    return result;
}

/* Tell whether there is a file by this name. */
static bool dtrain__import_exists(const dtrain__import *im, const char *path)
{
    const dtrain_storage *storage = im->desc.storage;
    const int file = dtrain__storage_try(storage, path, DTRAIN_STORAGE_READ);
    if (file >= 0) (void)storage->close(storage->user, file);
    return file != -ENOENT;
}

/* Find out whether the path is a file or an index, and read the headers. */
static dtrain_result dtrain__import_find_files(dtrain__import *im)
{
    uint32_t number;
    dtrain__directory_of(im->directory, im->path);
    const bool is_index = dtrain__ends_with(im->path, ".json");
    snprintf(im->index, sizeof im->index, "%s%s", im->path, is_index ? "" : DTRAIN__INDEX_END);
    if (!is_index && dtrain__import_exists(im, im->path)) im->index[0] = 0;
    else if (!dtrain__import_exists(im, im->index))
        return dtrain_fail(DTRAIN_ERROR_NOT_FOUND, "%s cannot be opened: No such file%s", im->path,
                           is_index ? "" : ", nor an index of it");
    if (im->index[0]) return dtrain__import_index(im);
    DTRAIN__TRY(dtrain__import_file(im, "", &number));
    return dtrain__import_headers(im);
}

/* ---- Do they fit? -----------------------------------------------------------------------------*/

/* Names in a sentence: the first few, and how many others there are. */
typedef struct dtrain__weight_names {
    char text[280];
    int count;
} dtrain__weight_names;

DTRAIN__PRINTF(2, 3)
static void dtrain__weight_names_add(dtrain__weight_names *names, const char *format, ...)
{
    const size_t used = strlen(names->text);
    char one[160];
    va_list args;
    va_start(args, format);
    vsnprintf(one, sizeof one, format, args);
    va_end(args);
    if (names->count++ < 6)
        snprintf(names->text + used, sizeof names->text - used, "%s%s", used ? ", " : "", one);
    else snprintf(names->text + used, sizeof names->text - used, names->count == 7 ? ", ..." : "");
}

/* Write a shape: "[2, 3]". */
static void dtrain__weight_shape_text(const int64_t *shape, int dims, char text[64])
{
    size_t used = (size_t)snprintf(text, 64, "[");
    for (int d = 0; d < dims && used < 40; d++)
        used +=
            (size_t)snprintf(text + used, 64 - used, "%s%lld", d ? ", " : "", (long long)shape[d]);
    snprintf(text + used, 64 - used, "]");
}

/* Find a tensor in any file by a name, or by the name behind the prefix. */
static const dtrain__stored *dtrain__import_find(const dtrain__import *im, const char *name,
                                                 uint32_t *file)
{
    char longer[2 * DTRAIN__TENSOR_NAME];
    const dtrain__stored *stored = NULL;
    const char *prefix = im->desc.prefix;
    for (int behind = 0; behind < (prefix && prefix[0] ? 2 : 1) && !stored; behind++) {
        const int bytes = snprintf(longer, sizeof longer, "%s%s", behind ? prefix : "", name);
        if (bytes < 0 || (size_t)bytes >= sizeof longer) break;
        for (uint32_t i = 0; i < im->file_count && !stored; i++) {
            stored = dtrain__safetensors_find(&im->files[i].header, longer);
            if (stored) *file = i;
        }
    }
    return stored;
}

static bool dtrain__weight_fits(const dtrain__weight *weight, const dtrain__stored *stored)
{
    bool fits = stored->dtype <= DTRAIN_DTYPE_F16 && stored->dims == weight->dims;
    for (int d = 0; d < weight->dims && fits; d++) fits = stored->shape[d] == weight->shape[d];
    return fits;
}

static void dtrain__import_use(dtrain__import *im, const dtrain__weight_place *place)
{
    const dtrain__weight_file *file = &im->files[place->file];
    im->used[file->first + (size_t)(place->stored - file->header.tensors)] = true;
}

/* Compare the bytes of two tensors that are one parameter here. */
static dtrain_result dtrain__import_same(dtrain__import *im, const dtrain__weight_place *a,
                                         const dtrain__weight_place *b)
{
    const dtrain__weight_place *const places[2] = {a, b};
    const uint64_t bytes = a->stored->end - a->stored->begin;
    const size_t half = DTRAIN__BLOCK / 2;
    bool same = a->stored->dtype == b->stored->dtype && b->stored->end - b->stored->begin == bytes;
    for (uint64_t done = 0; done < bytes && same; done += half) {
        const size_t count = bytes - done < half ? (size_t)(bytes - done) : half;
        for (int i = 0; i < 2; i++) {
            char path[2 * DTRAIN__PATH];
            DTRAIN__TRY(dtrain__import_open(im, places[i]->file, path));
            DTRAIN__TRY(dtrain__storage_read(
                im->desc.storage, im->file, path, im->block + (size_t)i * half, count,
                im->files[places[i]->file].header.data + places[i]->stored->begin + done));
        }
        same = memcmp(im->block, im->block + half, count) == 0;
    }
    if (same) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_DATA,
                       "%s: \"%.100s\" and \"%.100s\" differ, and are one tied parameter here; "
                       "leave out one of them with `names`, and name it in `ignore`",
                       im->path, a->stored->name, b->stored->name);
}

/* Find a parameter by its name and by those of its aliases. Rank 0 compares them with one
 * another. */
static dtrain_result dtrain__import_place(dtrain__import *im, const dtrain__weight *weight,
                                          dtrain__weight_place *place)
{
    const dtrain_param *storage = &im->weights.params[weight->param], *param = storage;
    dtrain__weight_place other;
    place->stored = NULL;
    do {
        const size_t i = param->state.index;
        const char *name = im->desc.names ? im->desc.names[i].name : NULL;
        if (!name) name = param->name;
        if (param == storage) name = weight->name;
        other.stored = name[0] ? dtrain__import_find(im, name, &other.file) : NULL;
        if (other.stored) {
            dtrain__import_use(im, &other);
            if (!place->stored) *place = other;
            else if (place->stored != other.stored && dtrain_comm_rank(im->state->comm) == 0)
                DTRAIN__TRY(dtrain__import_same(im, place, &other));
        }
        param = param->state.next;
    } while (param != storage);
    return DTRAIN_OK;
}

/* List the tensors that are no parameter's, and that nobody wants to have ignored. */
static void dtrain__import_extra(const dtrain__import *im, dtrain__weight_names *extra)
{
    for (uint32_t i = 0; i < im->file_count; i++)
        for (size_t k = 0; k < im->files[i].header.count; k++) {
            const char *name = im->files[i].header.tensors[k].name;
            const char *const *end = im->desc.ignore;
            while (end && *end && !dtrain__ends_with(name, *end)) end++;
            if (im->used[im->files[i].first + k] || (end && *end)) continue;
            dtrain__weight_names_add(extra, "\"%.60s\"", name);
        }
}

/* Compare what there is with what there should be, and name the differences. */
static dtrain_result dtrain__import_compare(dtrain__import *im)
{
    dtrain__weight_names missing, different, extra;
    memset(&missing, 0, sizeof missing);
    memset(&different, 0, sizeof different);
    memset(&extra, 0, sizeof extra);
    for (size_t i = 0; i < im->weights.count; i++) {
        const dtrain__weight *weight = &im->weights.list[i];
        dtrain__weight_place *place = &im->places[i];
        char found[64], expected[64];
        DTRAIN__TRY(dtrain__import_place(im, weight, place));
        im->values += place->stored != NULL;
        if (!place->stored) dtrain__weight_names_add(&missing, "\"%.60s\"", weight->name);
        if (!place->stored || dtrain__weight_fits(weight, place->stored)) continue;
        dtrain__weight_shape_text(place->stored->shape, place->stored->dims, found);
        dtrain__weight_shape_text(weight->shape, weight->dims, expected);
        dtrain__weight_names_add(&different, "\"%.60s\" is %s %s, expected %s", weight->name,
                                 dtrain__stored_name(place->stored->dtype), found, expected);
        place->stored = NULL;
        im->values--;
    }
    dtrain__import_extra(im, &extra);
    if (!missing.count && !different.count && !extra.count) return DTRAIN_OK;
    char *to = im->desc.partial ? im->note : NULL, sentence[sizeof im->note + 400];
    snprintf(sentence, sizeof sentence, "%s%s%s%s%s%s%s%s", missing.count ? "missing in it: " : "",
             missing.text, missing.count && (different.count || extra.count) ? "; " : "",
             different.count ? "of another shape, or not F32, BF16 or F16: " : "", different.text,
             different.count && extra.count ? "; " : "", extra.count ? "only in it: " : "",
             extra.text);
    if (to) snprintf(to, sizeof im->note, "%.*s", (int)sizeof im->note - 1, sentence);
    if (to && (im->values || !im->weights.count)) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_DATA, "%.300s does not fit this model: %s; see `names`, %s",
                       im->path, sentence,
                       to ? "as no parameter is in it" : "`prefix`, `ignore` or `partial`");
}

/* ---- Values -----------------------------------------------------------------------------------*/

/* Read elements of a tensor as fp32, from element `first` of it on; at most BLOCK_FLOATS. 16-bit
 * ones are read to the upper half of `to` and widened from below: element i is written over what
 * was read before it. */
static dtrain_result dtrain__import_read(dtrain__import *im, const dtrain__weight_place *place,
                                         int64_t first, int64_t count, char *to)
{
    const dtrain__stored *stored = place->stored;
    const size_t each = dtrain__stored_bytes(stored->dtype), bytes = (size_t)count * each;
    char path[2 * DTRAIN__PATH], *from = to + (size_t)count * sizeof(float) - bytes;
    DTRAIN__TRY(dtrain__import_open(im, place->file, path));
    DTRAIN__TRY(dtrain__storage_read(im->desc.storage, im->file, path, from, bytes,
                                     im->files[place->file].header.data + stored->begin +
                                         (uint64_t)first * each));
    im->bytes += bytes;
    for (int64_t i = 0; i < count && from > to; i++) {
        uint16_t low;
        memcpy(&low, from + (size_t)i * sizeof low, sizeof low);
        const float x =
            stored->dtype == DTRAIN_DTYPE_BF16 ? dtrain_bf16_to_f32(low) : dtrain_f16_to_f32(low);
        memcpy(to + (size_t)i * sizeof x, &x, sizeof x);
    }
    return DTRAIN_OK;
}

/* Read this rank's part of a weight that lies in the file as it does here. */
static dtrain_result dtrain__import_straight(dtrain__import *im, const dtrain__weight *weight,
                                             const dtrain__weight_place *place,
                                             const dtrain_state_tensor *tensor)
{
    const bool direct = im->state->device->ops->host_memory;
    const int64_t end = dtrain__min(tensor->offset + tensor->count, weight->total);
    for (int64_t at = tensor->offset; at < end; at += DTRAIN__BLOCK_FLOATS) {
        const int64_t count = dtrain__min(end - at, DTRAIN__BLOCK_FLOATS);
        float *to = (float *)tensor->memory + (at - tensor->offset);
        DTRAIN__TRY(dtrain__import_read(im, place, at, count, direct ? (char *)to : im->block));
        if (!direct)
            DTRAIN__TRY(dtrain_device_copy(im->state->device, to, im->block,
                                           (size_t)count * sizeof(float)));
    }
    return DTRAIN_OK;
}

/* Read a transposed weight from its beginning to its end, and keep this rank's part. piece: of
 * element tensor->offset on. */
static dtrain_result dtrain__import_turned(dtrain__import *im, const dtrain__weight *weight,
                                           const dtrain__weight_place *place,
                                           const dtrain_state_tensor *tensor, float *piece)
{
    int64_t row = 0, column = 0; /* here, of the element that comes next in the file */
    for (int64_t at = 0; at < weight->total; at += DTRAIN__BLOCK_FLOATS) {
        const int64_t count = dtrain__min(weight->total - at, DTRAIN__BLOCK_FLOATS);
        DTRAIN__TRY(dtrain__import_read(im, place, at, count, im->block));
        for (int64_t i = 0; i < count; i++) {
            const int64_t to = row * weight->columns + column - tensor->offset;
            if (to >= 0 && to < tensor->count)
                memcpy(&piece[to], im->block + (size_t)i * sizeof(float), sizeof(float));
            if (++row == weight->rows) row = 0, column++;
        }
    }
    return DTRAIN_OK;
}

/* Read what this rank keeps of a weight, and set rows that are not in the file to zero. */
static dtrain_result dtrain__import_weight(dtrain__import *im, const dtrain__weight *weight,
                                           const dtrain__weight_place *place)
{
    const dtrain_state_tensor *tensor = &im->state->tensors[weight->tensor];
    dtrain_device *device = im->state->device;
    const int64_t here = dtrain__min(tensor->count, weight->total - tensor->offset);
    const int64_t first_zero = here > 0 ? here : 0;
    if (here > 0 && !weight->transpose)
        DTRAIN__TRY(dtrain__import_straight(im, weight, place, tensor));
    if (here > 0 && weight->transpose) {
        const bool direct = device->ops->host_memory;
        const size_t count = (size_t)tensor->count;
        float *piece = direct ? (float *)tensor->memory
                              : (float *)dtrain__alloc(im->allocator, count, sizeof *piece,
                                                       "a piece of a parameter");
        if (!piece) return DTRAIN_ERROR_MEMORY;
        dtrain_result result = dtrain__import_turned(im, weight, place, tensor, piece);
        if (!direct && result == DTRAIN_OK)
            result =
                dtrain_device_copy(device, tensor->memory, piece, (size_t)here * sizeof(float));
        if (!direct) dtrain__free(im->allocator, piece, count, sizeof *piece);
        DTRAIN__TRY(result);
    }
    if (first_zero < tensor->count) memset(im->block, 0, DTRAIN__BLOCK);
    for (int64_t at = first_zero; at < tensor->count; at += DTRAIN__BLOCK_FLOATS)
        DTRAIN__TRY(dtrain_device_copy(
            device, (float *)tensor->memory + at, im->block,
            (size_t)dtrain__min(tensor->count - at, DTRAIN__BLOCK_FLOATS) * sizeof(float)));
    return DTRAIN_OK;
}

/* Do everything before values change. */
static dtrain_result dtrain__import_prepare(dtrain__import *im)
{
    DTRAIN__TRY(dtrain__between_backwards(im->strategy, dtrain__import_call));
    DTRAIN__TRY(dtrain__weight_path_check(dtrain__import_call, im->path));
    DTRAIN__TRY(
        dtrain__weights_list(dtrain__import_call, im->strategy, im->desc.names, &im->weights));
    im->places = (dtrain__weight_place *)dtrain__alloc(im->allocator, im->weights.count,
                                                       sizeof *im->places, "places of weights");
    im->block = (char *)dtrain__alloc(im->allocator, DTRAIN__BLOCK, 1, "a block");
    if (!im->places || !im->block) return DTRAIN_ERROR_MEMORY;
    DTRAIN__TRY(dtrain__import_find_files(im));
    return dtrain__import_compare(im);
}

static dtrain_result dtrain__import_values(dtrain__import *im)
{
    for (size_t i = 0; i < im->weights.count; i++)
        if (im->places[i].stored)
            DTRAIN__TRY(dtrain__import_weight(im, &im->weights.list[i], &im->places[i]));
    return DTRAIN_OK;
}

static void dtrain__import_free(dtrain__import *im)
{
    if (im->file >= 0) (void)im->desc.storage->close(im->desc.storage->user, im->file);
    for (uint32_t i = 0; i < im->file_count; i++) dtrain__safetensors_free(&im->files[i].header);
    dtrain__free(im->allocator, im->files, im->file_room, sizeof *im->files);
    dtrain__free(im->allocator, im->used, im->tensor_count, sizeof *im->used);
    dtrain__free(im->allocator, im->block, DTRAIN__BLOCK, 1);
    dtrain__free(im->allocator, im->places, im->weights.count, sizeof *im->places);
    dtrain__weights_free(&im->weights);
}

DTRAIN_API dtrain_result dtrain_checkpoint_import(dtrain_state *state, const char *path,
                                                  const dtrain_import_desc *desc,
                                                  dtrain_import_info *info)
{
    dtrain__import im;
    if (info) memset(info, 0, sizeof *info);
    DTRAIN__TRY(dtrain__state_check(state, dtrain__import_call));
    const double start = dtrain_seconds();
    memset(&im, 0, sizeof im);
    im.state = state;
    im.strategy = state->desc.strategy;
    im.allocator = &state->allocator;
    im.path = path;
    im.file = -1;
    if (desc) im.desc = *desc;
    if (!im.desc.storage) im.desc.storage = dtrain_file_storage();
    dtrain_result result = dtrain__agree(state->comm, dtrain__import_prepare(&im));
    if (result == DTRAIN_OK) {
        dtrain__set_torn(state->desc.strategy, dtrain__import_call);
        result = dtrain__agree(state->comm, dtrain__import_values(&im));
    }
    if (result == DTRAIN_OK) result = dtrain_state_changed(state);
    if (result == DTRAIN_OK && info) {
        info->values = im.values;
        info->bytes = im.bytes;
        info->seconds = dtrain_seconds() - start;
        memcpy(info->note, im.note, sizeof im.note);
    }
    dtrain__import_free(&im);
    return result;
}
