/* Import
 *
 *     every rank    headers | do they fit the model? | read what this rank keeps | publish
 *
 * Steps end with an agreement of all ranks. A tensor of a file is a source, as a piece of a
 * checkpoint is (state/read.c): no rank has more in memory than headers, its own pieces and a
 * block. */

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
#include "state/box_internal.h"
#include "state/json_internal.h"
#include "state/read_internal.h"
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

/* The tensor of a file that a weight is read from. */
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
    dtrain__reader reader;
    uint64_t values;
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

static dtrain_result dtrain__import_open(dtrain__import *im, uint32_t file,
                                         char path[2 * DTRAIN__PATH])
{
    dtrain__import_path(im, file, path);
    return dtrain__reader_open(&im->reader, path, 0);
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

/* Read one member of a weight_map: the name of a file beside the index. */
static dtrain_result dtrain__index_member(dtrain__import *im, dtrain__json *json)
{
    char name[DTRAIN__WEIGHT_FILE_NAME];
    uint32_t number;
    if (!dtrain__json_string(json, name, sizeof name)) return json->result;
    if (name[0] && !strchr(name, '/') && strcmp(name, ".") != 0 && strcmp(name, "..") != 0)
        return dtrain__import_file(im, name, &number);
    dtrain__json_fail(json, "its file is \"%.100s\", expected the name of one beside the index",
                      name);
    return json->result;
}

/* Walk through an index, and count its tensors. */
static dtrain_result dtrain__index_walk(dtrain__import *im, const char *text, size_t bytes,
                                        size_t *count)
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
            DTRAIN__TRY(dtrain__index_member(im, &json));
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
        DTRAIN__TRY(dtrain__safetensors_read(im->desc.storage, im->reader.file, path, im->allocator,
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
    dtrain_result result = dtrain__index_walk(im, text, bytes, &count);
    if (result == DTRAIN_OK) result = dtrain__import_headers(im);
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

/* Write a shape: "[2, 3]". */
static void dtrain__weight_shape_text(const int64_t *shape, int dims, char text[64])
{
    size_t used = (size_t)snprintf(text, 64, "[");
    for (int d = 0; d < dims && used < 40; d++)
        used +=
            (size_t)snprintf(text + used, 64 - used, "%s%lld", d ? ", " : "", (long long)shape[d]);
    snprintf(text + used, 64 - used, "]");
}

/* Find a tensor in any file by a name, or by the prefix and that name. */
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
                im->reader.storage, im->reader.file, path, im->reader.block + (size_t)i * half,
                count, im->files[places[i]->file].header.data + places[i]->stored->begin + done));
        }
        same = memcmp(im->reader.block, im->reader.block + half, count) == 0;
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

/* List the tensors of the files that belong to no parameter, without those of desc.ignore. */
static void dtrain__import_extra(const dtrain__import *im, dtrain__name_list *extra)
{
    for (uint32_t i = 0; i < im->file_count; i++)
        for (size_t k = 0; k < im->files[i].header.count; k++) {
            const char *name = im->files[i].header.tensors[k].name;
            const char *const *end = im->desc.ignore;
            while (end && *end && !dtrain__ends_with(name, *end)) end++;
            if (im->used[im->files[i].first + k] || (end && *end)) continue;
            dtrain__name_add(extra, "\"%.60s\"", name);
        }
}

/* Compare the tensors of the files with the parameters, and name the differences. */
static dtrain_result dtrain__import_compare(dtrain__import *im)
{
    char sentence[1024];
    dtrain__misfit misfit;
    memset(&misfit, 0, sizeof misfit);
    for (size_t i = 0; i < im->weights.count; i++) {
        const dtrain__weight *weight = &im->weights.list[i];
        dtrain__weight_place *place = &im->places[i];
        char found[64], expected[64];
        DTRAIN__TRY(dtrain__import_place(im, weight, place));
        im->values += place->stored != NULL;
        if (!place->stored) dtrain__name_add(&misfit.missing, "\"%.60s\"", weight->name);
        if (!place->stored || dtrain__weight_fits(weight, place->stored)) continue;
        dtrain__weight_shape_text(place->stored->shape, place->stored->dims, found);
        dtrain__weight_shape_text(weight->shape, weight->dims, expected);
        dtrain__name_add(&misfit.different, "\"%.60s\" is %s %s, expected F32, BF16 or F16 %s",
                         weight->name, dtrain__stored_name(place->stored->dtype), found, expected);
        place->stored = NULL;
        im->values--;
    }
    dtrain__import_extra(im, &misfit.extra);
    if (!dtrain__misfit_text(&misfit, sentence, sizeof sentence)) return DTRAIN_OK;
    char *to = im->desc.partial ? im->note : NULL;
    if (to) snprintf(to, sizeof im->note, "%.*s", (int)sizeof im->note - 1, sentence);
    if (to && (im->values || !im->weights.count)) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_DATA, "%.300s does not fit this model: %s; see `names`, %s",
                       im->path, sentence,
                       to ? "as no parameter is in it" : "`prefix`, `ignore` or `partial`");
}

/* ---- Values -----------------------------------------------------------------------------------*/

/* Read a transposed weight from its beginning to its end, and keep this rank's part: a matrix, of
 * which (row, column) here is (column, row) in the file. */
static dtrain_result dtrain__import_turned(dtrain__import *im, const dtrain__weight *weight,
                                           const dtrain__source *source, const dtrain_piece *piece,
                                           float *to)
{
    int64_t row = 0, column = 0; /* here, of the element that comes next in the file */
    for (int64_t at = 0; at < weight->total; at += DTRAIN__BLOCK_FLOATS) {
        const int64_t count = dtrain__min(weight->total - at, DTRAIN__BLOCK_FLOATS);
        DTRAIN__TRY(dtrain__elements_read(&im->reader, source, source->dtype != DTRAIN_DTYPE_F32,
                                          at, count, im->reader.block));
        for (int64_t i = 0; i < count; i++) {
            const int64_t r = row - piece->first[0], c = column - piece->first[1];
            const int64_t place = r * piece->length[1] + c - piece->offset;
            if (r >= 0 && c >= 0 && c < piece->length[1] && place >= 0 && place < piece->count)
                memcpy(&to[place], im->reader.block + (size_t)i * sizeof(float), sizeof(float));
            if (++row == weight->rows) row = 0, column++;
        }
    }
    return DTRAIN_OK;
}

/* Read this rank's piece of a weight. Rows that the file lacks come last and become zero. */
static dtrain_result dtrain__import_weight(dtrain__import *im, const dtrain__weight *weight,
                                           const dtrain__weight_place *place)
{
    const dtrain_state_tensor *tensor = &im->state->tensors[weight->tensor];
    const dtrain_piece *piece = &tensor->piece;
    dtrain_device *device = im->state->device;
    char path[2 * DTRAIN__PATH];
    int64_t shape[4];
    memcpy(shape, tensor->shape, sizeof shape);
    shape[0] = weight->rows;
    const dtrain__target target = {tensor->memory, *piece, DTRAIN_DTYPE_F32, false};
    const dtrain__source source = {path,
                                   im->files[place->file].header.data + place->stored->begin,
                                   0,
                                   "value",
                                   path,
                                   NULL,
                                   place->stored->dtype,
                                   dtrain__piece_whole(shape)};
    const int64_t end = dtrain__piece_place(piece, &source.piece, weight->total);
    const int64_t here = dtrain__max(0, dtrain__min(end, piece->count));
    dtrain__import_path(im, place->file, path);
    if (here && !weight->transpose) DTRAIN__TRY(dtrain__piece_read(&im->reader, &source, &target));
    if (here && weight->transpose) {
        const bool direct = device->ops->host_memory;
        const size_t count = (size_t)piece->count;
        float *to = direct ? (float *)tensor->memory
                           : (float *)dtrain__alloc(im->allocator, count, sizeof *to,
                                                    "a piece of a parameter");
        if (!to) return DTRAIN_ERROR_MEMORY;
        dtrain_result result = dtrain__import_turned(im, weight, &source, piece, to);
        if (!direct && result == DTRAIN_OK)
            result = dtrain_device_copy(device, tensor->memory, to, (size_t)here * sizeof(float));
        if (!direct) dtrain__free(im->allocator, to, count, sizeof *to);
        DTRAIN__TRY(result);
    }
    memset(im->reader.block, 0, here < piece->count ? DTRAIN__BLOCK : 0);
    for (int64_t at = here; at < piece->count; at += DTRAIN__BLOCK_FLOATS)
        DTRAIN__TRY(dtrain_device_copy(
            device, (float *)tensor->memory + at, im->reader.block,
            (size_t)dtrain__min(piece->count - at, DTRAIN__BLOCK_FLOATS) * sizeof(float)));
    return DTRAIN_OK;
}

/* Do everything that can fail before values change. */
static dtrain_result dtrain__import_prepare(dtrain__import *im)
{
    DTRAIN__TRY(dtrain__between_backwards(im->strategy, dtrain__import_call));
    DTRAIN__TRY(dtrain__weight_path_check(dtrain__import_call, im->path));
    DTRAIN__TRY(
        dtrain__weights_list(dtrain__import_call, im->strategy, im->desc.names, &im->weights));
    im->places = (dtrain__weight_place *)dtrain__alloc(im->allocator, im->weights.count,
                                                       sizeof *im->places, "places of weights");
    if (!im->places) return DTRAIN_ERROR_MEMORY;
    DTRAIN__TRY(dtrain__reader_begin(&im->reader, im->state, im->desc.storage));
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
    dtrain__reader_end(&im->reader, im->state);
    for (uint32_t i = 0; i < im->file_count; i++) dtrain__safetensors_free(&im->files[i].header);
    dtrain__free(im->allocator, im->files, im->file_room, sizeof *im->files);
    dtrain__free(im->allocator, im->used, im->tensor_count, sizeof *im->used);
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
    if (desc) im.desc = *desc;
    im.desc.storage = dtrain__storage_or_files(im.desc.storage);
    dtrain_result result = dtrain__agree(state->comm, dtrain__import_prepare(&im));
    if (result == DTRAIN_OK) {
        dtrain__set_torn(state->desc.strategy, dtrain__import_call);
        result = dtrain__agree(state->comm, dtrain__import_values(&im));
    }
    if (result == DTRAIN_OK) result = dtrain_state_changed(state);
    if (result == DTRAIN_OK && info) {
        info->values = im.values;
        info->bytes = im.reader.bytes;
        info->seconds = dtrain_seconds() - start;
        memcpy(info->note, im.note, sizeof im.note);
    }
    dtrain__import_free(&im);
    return result;
}
