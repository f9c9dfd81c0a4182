/* Whole weights
 *
 *     list        choose the parameters of a file, with their names and shapes
 *     export      all ranks gather one parameter after the other, and rank 0 writes it
 *     import      every rank: read headers | compare them with the model | read the pieces of this
 *                 rank | publish. All ranks agree after each step
 *
 * Import reads a tensor as load reads a piece of a checkpoint (state/load.c): a rank has only the
 * headers, its own pieces and one block in memory. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/json_internal.h"
#include "core/log.h"
#include "core/result.h"
#include "world/world_internal.h"
#include "comm/comm.h"
#include "strategy/query.h"
#include "strategy/view_internal.h"
#include "state/export.h"
#include "state/box_internal.h"
#include "state/checkpoint_internal.h"
#include "state/safetensors_internal.h"
#include "state/state_internal.h"
#include "state/storage_internal.h"
#include "device/backend.h"

#define DTRAIN__INDEX_MOST ((uint64_t)64 << 20) /* bytes; the largest models have 10 MiB */
#define DTRAIN__WEIGHT_FILE_NAME 256            /* bytes, with the 0 */

/* ---- What is in a file ------------------------------------------------------------------------*/

/* A parameter in a file. The file stores rows x columns of the whole parameter. */
typedef struct dtrain__weight {
    const char *name;
    size_t param; /* index in the strategy's array */
    bool transpose;
    int dims;
    int64_t shape[4]; /* in the file */
    int64_t rows, columns, total;
    const dtrain__stored *stored; /* import: tensor of the file; NULL: none that fits */
    uint32_t file;                /* import: number of the file */
} dtrain__weight;

typedef struct dtrain__weights {
    const dtrain_allocator *allocator;
    const dtrain_param *params; /* (room), array of the strategy */
    dtrain__weight *list;       /* (room), count in use */
    size_t count, room;
} dtrain__weights;

/* List the weights of a file, with their names and shapes. Aliases, and parameters that the caller
 * names "", are left out. */
static dtrain_result dtrain__weights_list(const char *call, const dtrain_strategy *strategy,
                                          const dtrain_export_name *names, dtrain__weights *weights)
{
    static const dtrain_export_name own = {0, NULL, false};
    weights->allocator = &dtrain__world_of(strategy)->allocator;
    weights->params = dtrain__params_of(strategy, &weights->room);
    weights->list = (dtrain__weight *)dtrain__alloc(weights->allocator, weights->room,
                                                    sizeof *weights->list, "a list of weights");
    if (!weights->list) return DTRAIN_ERROR_MEMORY;
    for (size_t i = 0; i < weights->room; i++) {
        const dtrain_param *param = &weights->params[i];
        const dtrain_export_name *how = names ? &names[i] : &own;
        const char *const name = dtrain__short(param->name);
        const int dims = dtrain__param_dims(param);
        const int64_t most = dims ? param->shape[0] : 0;
        dtrain__weight *weight = &weights->list[weights->count];
        if (param->state.storage != param) continue;
        if (param->dtype == DTRAIN_DTYPE_F64)
            return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                               "%s: parameter \"%s\" is fp64, which files of weights do not "
                               "take; checkpoints do",
                               call, name);
        weight->param = i;
        weight->name = how->name ? how->name : param->name;
        if (!weight->name[0]) continue;
        if (how->transpose && dims != 2)
            return dtrain_fail(
                DTRAIN_ERROR_ARGUMENT,
                "%s: parameter \"%s\" is to be transposed and has %d dimensions, not 2", call, name,
                dims);
        if (how->rows < 0 || how->rows > most)
            return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                               "%s: %lld rows of \"%s\" are to be stored, expected 0 (all) to %lld",
                               call, (long long)how->rows, name, (long long)most);
        weight->rows = how->rows ? how->rows : most;
        weight->columns = most ? dtrain__whole_count(param) / most : 1;
        weight->total = weight->rows * weight->columns;
        weight->transpose = how->transpose;
        weight->dims = dims ? dims : 1; /* without an element: [0] */
        memcpy(weight->shape, param->shape, sizeof weight->shape);
        weight->shape[0] = how->transpose ? weight->columns : weight->rows;
        if (how->transpose) weight->shape[1] = weight->rows;
        weights->count++;
    }
    return DTRAIN_OK;
}

static bool dtrain__ends_with(const char *text, const char *end)
{
    const size_t bytes = strlen(text), end_bytes = strlen(end);
    return bytes >= end_bytes && strcmp(text + bytes - end_bytes, end) == 0;
}

/* ---- Export -----------------------------------------------------------------------------------*/

typedef struct dtrain__export {
    dtrain_strategy *strategy;
    dtrain_export_desc desc; /* resolved */
    const char *path;
    char tmp[DTRAIN__PATH];
    dtrain__weights weights;
    dtrain__text header;
    float *value; /* (most) whole value of one parameter */
    size_t most;
    char *block; /* (BLOCK) rank 0, which writes; NULL on other ranks */
    int file;    /* rank 0: open file; -1: none */
    uint64_t at; /* bytes written so far */
} dtrain__export;

static const char dtrain__export_call[] = "dtrain_checkpoint_export";

/* Write the header. Fail if a name cannot be stored, or if two parameters have the same name. */
static dtrain_result dtrain__export_header(dtrain__export *e)
{
    static const char metadata[] = "{\"format\":\"pt\"}"; /* transformers refuses a file without */
    char why[DTRAIN__ERROR_BYTES];
    uint64_t at = 0;
    for (size_t i = 0; i < e->weights.count; i++) {
        const dtrain__weight *weight = &e->weights.list[i];
        dtrain__stored stored;
        stored.name = weight->name;
        stored.dtype = e->desc.dtype;
        stored.dims = weight->dims;
        memcpy(stored.shape, weight->shape, sizeof weight->shape);
        stored.begin = at;
        stored.end = at += (uint64_t)weight->total * dtrain__stored_bytes(e->desc.dtype);
        dtrain__safetensors_add(&e->header, &stored);
    }
    const dtrain_result result = dtrain__safetensors_end(&e->header, metadata, at);
    if (result != DTRAIN_ERROR_DATA) return result;
    snprintf(why, sizeof why, "%s", dtrain__bare(dtrain_last_error()));
    return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: a name cannot be used: %s", dtrain__export_call,
                       why);
}

/* Do all local work that can fail, before values are gathered. */
static dtrain_result dtrain__export_prepare(dtrain__export *e)
{
    DTRAIN__TRY(dtrain__between_backwards(e->strategy, dtrain__export_call));
    DTRAIN__TRY(dtrain__path_check(dtrain__export_call, e->path));
    if (e->desc.dtype > DTRAIN_DTYPE_F16)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: dtype is %u, expected F32, BF16 or F16",
                           dtrain__export_call, e->desc.dtype);
    snprintf(e->tmp, sizeof e->tmp, "%s.tmp", e->path);
    DTRAIN__TRY(dtrain__weights_list(dtrain__export_call, e->strategy, e->desc.names, &e->weights));
    DTRAIN__TRY(dtrain__export_header(e));
    for (size_t i = 0; i < e->weights.room; i++) {
        const size_t count = (size_t)dtrain__whole_count(&e->weights.params[i]);
        if (count > e->most) e->most = count;
    }
    e->value = (float *)dtrain__alloc(e->weights.allocator, e->most, sizeof *e->value,
                                      "a whole parameter");
    if (!e->value) return DTRAIN_ERROR_MEMORY;
    if (dtrain_comm_rank(dtrain__groups_of(e->strategy).all) > 0) return DTRAIN_OK;
    e->block = (char *)dtrain__alloc(e->weights.allocator, DTRAIN__BLOCK, 1, "a block");
    return e->block ? DTRAIN_OK : DTRAIN_ERROR_MEMORY;
}

/* Append to the file. */
static dtrain_result dtrain__export_write(dtrain__export *e, const void *from, size_t bytes)
{
    DTRAIN__TRY(dtrain__storage_write(e->desc.storage, e->file, e->tmp, from, bytes, e->at));
    e->at += bytes;
    return DTRAIN_OK;
}

/* Convert the value of a weight, and write it block by block in the order of the file. */
static dtrain_result dtrain__export_weight(dtrain__export *e, const dtrain__weight *weight)
{
    const size_t each = dtrain__stored_bytes(e->desc.dtype);
    const int64_t most = (int64_t)(DTRAIN__BLOCK / each);
    int64_t row = 0, column = 0; /* of the next element */
    for (int64_t done = 0; done < weight->total; done += most) {
        const int64_t count = dtrain__min(most, weight->total - done);
        for (int64_t i = 0; i < count; i++) {
            const float x = e->value[row * weight->columns + column];
            const uint16_t low = dtrain_half_from_f32((dtrain_dtype)e->desc.dtype, x);
            if (e->desc.dtype == DTRAIN_DTYPE_F32)
                memcpy(e->block + (size_t)i * sizeof x, &x, sizeof x);
            else memcpy(e->block + (size_t)i * sizeof low, &low, sizeof low);
            if (!weight->transpose) column++;
            else if (++row == weight->rows) row = 0, column++;
        }
        DTRAIN__TRY(dtrain__export_write(e, e->block, (size_t)count * each));
    }
    return DTRAIN_OK;
}

/* Gather and write one parameter after the other. If the disk of rank 0 fails, the other ranks
 * learn of it only after they have gathered all parameters. A file that an interrupted export has
 * left is replaced. */
static dtrain_result dtrain__export_values(dtrain__export *e)
{
    const dtrain_storage *storage = e->desc.storage;
    const bool writes = e->block != NULL;
    dtrain_result result = DTRAIN_OK;
    if (writes) {
        (void)storage->remove(storage->user, e->tmp);
        result = dtrain__storage_open(storage, e->tmp, DTRAIN_STORAGE_CREATE, &e->file);
        if (result == DTRAIN_OK) result = dtrain__export_write(e, e->header.at, e->header.bytes);
    }
    for (size_t i = 0; i < e->weights.count; i++) {
        const dtrain__weight *weight = &e->weights.list[i];
        const dtrain_result gathered = dtrain_strategy_read(e->strategy, weight->param, e->value);
        if (result == DTRAIN_OK) result = gathered;
        if (result == DTRAIN_OK && writes) result = dtrain__export_weight(e, weight);
    }
    if (!writes) return result;
    if (e->file >= 0) result = dtrain__storage_finish(storage, e->file, e->tmp, result);
    if (result == DTRAIN_OK) result = dtrain__storage_rename(storage, e->tmp, e->path);
    if (result != DTRAIN_OK) (void)storage->remove(storage->user, e->tmp);
    return result;
}

DTRAIN_API dtrain_result dtrain_checkpoint_export(dtrain_strategy *strategy, const char *path,
                                                  const dtrain_export_desc *desc)
{
    dtrain__export e;
    DTRAIN__GIVEN(dtrain__export_call, strategy);
    memset(&e, 0, sizeof e);
    e.strategy = strategy;
    e.path = path;
    e.file = -1;
    e.header.allocator = &dtrain__world_of(strategy)->allocator;
    DTRAIN__TRY(dtrain__take(dtrain__abi_of(dtrain__world_of(strategy)), DTRAIN__ABI_export_desc,
                             desc, &e.desc));
    e.desc.storage = dtrain__storage_or_files(e.desc.storage);
    dtrain_comm *comm = dtrain__groups_of(strategy).all;
    dtrain_result result = dtrain__agree(comm, dtrain__export_prepare(&e));
    if (result == DTRAIN_OK) result = dtrain__agree(comm, dtrain__export_values(&e));
    dtrain__text_free(&e.header);
    dtrain__free(e.header.allocator, e.block, DTRAIN__BLOCK, 1);
    dtrain__free(e.header.allocator, e.value, e.most, sizeof(float));
    dtrain__free(e.header.allocator, e.weights.list, e.weights.room, sizeof *e.weights.list);
    return result;
}

/* ---- Import: files ----------------------------------------------------------------------------*/

typedef struct dtrain__weight_file {
    char path[2 * DTRAIN__PATH];
    dtrain__tensor_file header;
} dtrain__weight_file;

typedef struct dtrain__import {
    dtrain_state *state;
    dtrain_import_desc desc; /* resolved */
    const char *path;
    char index[DTRAIN__PATH]; /* path of the index, if the import reads one */
    dtrain__weights weights;
    dtrain__weight_file *files; /* (file_room), file_count in use */
    uint32_t file_count;
    size_t file_room, tensor_count; /* tensor_count: tensors in all files */
    dtrain__reader reader;
    dtrain_import_info info; /* result of a success */
} dtrain__import;

static const char dtrain__import_call[] = "dtrain_checkpoint_import";

/* Read the header of a file, unless it has been read. The search begins at the last file, because
 * an index mostly names a file several times in a row. */
static dtrain_result dtrain__import_file(dtrain__import *im, const char *path)
{
    const dtrain_allocator *allocator = &im->state->allocator;
    for (uint32_t i = im->file_count; i-- > 0;)
        if (strcmp(im->files[i].path, path) == 0) return DTRAIN_OK;
    if (!dtrain__grow(allocator, (void **)&im->files, im->file_count, &im->file_room,
                      sizeof *im->files, "a list of files"))
        return DTRAIN_ERROR_MEMORY;
    dtrain__weight_file *file = &im->files[im->file_count];
    snprintf(file->path, sizeof file->path, "%s", path);
    DTRAIN__TRY(dtrain__safetensors_read(im->desc.storage, path, NULL, allocator, &file->header));
    im->file_count++;
    im->tensor_count += file->header.count;
    return DTRAIN_OK;
}

/* Read the index, and the headers of the files that its weight_map names. */
static dtrain_result dtrain__import_index(dtrain__import *im)
{
    const dtrain_allocator *allocator = &im->state->allocator;
    char key[DTRAIN__TENSOR_NAME], name[DTRAIN__WEIGHT_FILE_NAME];
    char path[2 * DTRAIN__PATH], *text;
    size_t bytes, count = 0;
    bool seen = false;
    const dtrain__file_path directory = dtrain__directory_of(im->index);
    DTRAIN__TRY(dtrain__storage_get(im->desc.storage, allocator, im->index, DTRAIN__INDEX_MOST,
                                    &text, &bytes));
    dtrain__json json = dtrain__json_begin(im->index, text, bytes);
    dtrain_result result = DTRAIN_OK; /* of reading headers */
    (void)dtrain__json_enter(&json, '{');
    while (result == DTRAIN_OK && dtrain__json_member(&json, key, sizeof key)) {
        if (strcmp(key, "weight_map") != 0) {
            (void)dtrain__json_skip(&json);
            continue;
        }
        if (seen) dtrain__json_fail(&json, "a second \"weight_map\"");
        seen = true;
        (void)dtrain__json_enter(&json, '{');
        for (; result == DTRAIN_OK && dtrain__json_member(&json, key, sizeof key); count++) {
            json.inside = key;
            if (!dtrain__json_string(&json, name, sizeof name)) break;
            snprintf(path, sizeof path, "%s/%s", directory.text, name);
            if (name[0] && !strchr(name, '/') && strcmp(name, ".") != 0 && strcmp(name, "..") != 0)
                result = dtrain__import_file(im, path);
            else
                dtrain__json_fail(&json,
                                  "its file is \"%s\", expected the name of one beside the "
                                  "index",
                                  dtrain__short(name));
            json.inside = NULL;
        }
    }
    if (result == DTRAIN_OK) result = dtrain__json_end(&json);
    dtrain__free(allocator, text, bytes + 1, 1);
    DTRAIN__TRY(result);
    if (!seen)
        return dtrain_fail(DTRAIN_ERROR_DATA,
                           "%s has no \"weight_map\", expected an index of files", im->index);
    if (count == im->tensor_count) return DTRAIN_OK;
    return dtrain_fail(
        DTRAIN_ERROR_DATA,
        "%s names %zu tensors, and its files have %zu: one of them has a tensor that "
        "the index does not know, or that another has too",
        im->index, count, im->tensor_count);
}

/* ---- Import: do they fit? ---------------------------------------------------------------------*/

/* Write a shape: "[2, 3]". */
static void dtrain__weight_shape_text(const int64_t *shape, int dims, char text[64])
{
    size_t used = (size_t)snprintf(text, 64, "[");
    for (int d = 0; d < dims && used < 40; d++)
        used +=
            (size_t)snprintf(text + used, 64 - used, "%s%lld", d ? ", " : "", (long long)shape[d]);
    snprintf(text + used, 64 - used, "]");
}

/* Describe a tensor of a file as a piece without checksums. The caller sets the box. */
static dtrain__held dtrain__import_held(const dtrain__import *im, uint32_t file,
                                        const dtrain__stored *stored)
{
    dtrain__held held;
    memset(&held, 0, sizeof held);
    held.at = (int64_t)(im->files[file].header.data + stored->begin);
    held.tensor.kind = DTRAIN_STATE_VALUE;
    held.tensor.name = stored->name;
    held.tensor.dtype = stored->dtype;
    return held;
}

/* Compare the bytes of two tensors that are one tied parameter in this run, half a block of each at
 * a time. */
static dtrain_result dtrain__import_same(dtrain__import *im, const dtrain__weight *weight,
                                         const dtrain__stored *other, uint32_t file)
{
    dtrain__held held[2] = {dtrain__import_held(im, weight->file, weight->stored),
                            dtrain__import_held(im, file, other)};
    const int64_t bytes = (int64_t)(other->end - other->begin), half = DTRAIN__BLOCK / 2;
    char *const block = im->reader.block;
    bool same = weight->stored->dtype == other->dtype &&
                weight->stored->end - weight->stored->begin == (uint64_t)bytes;
    held[0].tensor.dtype = held[1].tensor.dtype = DTRAIN__STORED_U8;
    for (int64_t done = 0; done < bytes && same; done += half) {
        const int64_t count = dtrain__min(bytes - done, half);
        for (int i = 0; i < 2; i++)
            DTRAIN__TRY(dtrain__elements_read(&im->reader, im->files[i ? file : weight->file].path,
                                              &held[i], false, done, count, block + i * half));
        same = memcmp(block, block + half, (size_t)count) == 0;
    }
    if (same) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_DATA,
                       "%s: \"%s\" and \"%s\" differ, and are one tied parameter here; "
                       "leave out one of them with `names`, and name it in `ignore`",
                       im->path, dtrain__short(weight->stored->name), dtrain__short(other->name));
}

/* Find a parameter in the files, by its name and by the names of its aliases, first without and
 * then with the prefix. Rank 0 compares the bytes of aliases. */
static dtrain_result dtrain__import_place(dtrain__import *im, dtrain__weight *weight)
{
    const dtrain_param *first = &im->weights.params[weight->param], *param = first;
    char longer[2 * DTRAIN__TENSOR_NAME];
    do {
        uint32_t file = 0;
        const char *name = im->desc.names ? im->desc.names[param->state.index].name : NULL;
        dtrain__stored *stored = NULL;
        if (!name) name = param->name;
        for (uint32_t i = 0; i < 2 * im->file_count && name[0] && !stored; i++) {
            file = i % im->file_count;
            snprintf(longer, sizeof longer, "%s%s", i < im->file_count ? "" : im->desc.prefix,
                     name);
            stored = dtrain__safetensors_find(&im->files[file].header, longer);
        }
        param = param->state.next;
        if (!stored || stored->user == weight) continue;
        if (stored->user)
            return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                               "%s: two parameters are called \"%s\", expected names that "
                               "occur once",
                               dtrain__import_call, dtrain__short(name));
        stored->user = weight;
        if (!weight->stored) {
            weight->stored = stored;
            weight->file = file;
        } else if (dtrain_comm_rank(im->state->comm) == 0)
            DTRAIN__TRY(dtrain__import_same(im, weight, stored, file));
    } while (param != first);
    return DTRAIN_OK;
}

/* Compare the tensors of the files with the parameters, and name the differences. A tensor without
 * a parameter counts as extra, unless desc.ignore names it. */
static dtrain_result dtrain__import_compare(dtrain__import *im)
{
    char sentence[1024];
    dtrain__name_list lists[DTRAIN__REFUSED];
    memset(lists, 0, sizeof lists);
    for (size_t i = 0; i < im->weights.count; i++) {
        dtrain__weight *weight = &im->weights.list[i];
        char found[64], expected[64];
        DTRAIN__TRY(dtrain__import_place(im, weight));
        const dtrain__stored *stored = weight->stored;
        bool fits = stored && stored->dtype <= DTRAIN_DTYPE_F16 && stored->dims == weight->dims;
        for (int d = 0; d < weight->dims && fits; d++) fits = stored->shape[d] == weight->shape[d];
        im->info.values += fits;
        if (!stored)
            dtrain__name_add(&lists[DTRAIN__MISSING], "\"%s\"", dtrain__short(weight->name));
        if (fits || !stored) continue;
        dtrain__weight_shape_text(stored->shape, stored->dims, found);
        dtrain__weight_shape_text(weight->shape, weight->dims, expected);
        dtrain__name_add(&lists[DTRAIN__DIFFERENT], "\"%s\" is %s %s, expected F32, BF16 or F16 %s",
                         dtrain__short(weight->name), dtrain__stored_name(stored->dtype), found,
                         expected);
        weight->stored = NULL;
    }
    for (uint32_t i = 0; i < im->file_count; i++)
        for (size_t k = 0; k < im->files[i].header.count; k++) {
            const dtrain__stored *stored = &im->files[i].header.tensors[k];
            const char *const *end = im->desc.ignore;
            while (end && *end && !dtrain__ends_with(stored->name, *end)) end++;
            if (!stored->user && (!end || !*end))
                dtrain__name_add(&lists[DTRAIN__EXTRA], "\"%s\"", dtrain__short(stored->name));
        }
    if (!dtrain__difference_text(lists, DTRAIN__REFUSED, sentence, sizeof sentence))
        return DTRAIN_OK;
    if (im->desc.partial && (im->info.values || !im->weights.count)) {
        snprintf(im->info.note, sizeof im->info.note, "%.*s", (int)sizeof im->info.note - 1,
                 sentence);
        return DTRAIN_OK;
    }
    return dtrain_fail(DTRAIN_ERROR_DATA, "%.300s does not fit this model: %s; see `names`, %s",
                       im->path, sentence,
                       im->desc.partial ? "as no parameter is in it"
                                        : "`prefix`, `ignore` or `partial`");
}

/* ---- Import: values ---------------------------------------------------------------------------*/

/* Read a piece of a transposed weight: (row, column) in memory is (column, row) in the file. All
 * rows of the piece's columns are read, and the piece is kept. Rows that the file lacks become
 * zero. */
static dtrain_result dtrain__import_transposed(dtrain__import *im, const dtrain__weight *weight,
                                               const dtrain__held *held,
                                               const dtrain_state_tensor *tensor)
{
    const dtrain_piece *piece = &tensor->piece;
    const int64_t block = (int64_t)(DTRAIN__BLOCK / sizeof(float));
    const size_t bytes = (size_t)piece->count * sizeof(float);
    const int64_t end = (piece->first[1] + piece->length[1]) * weight->rows; /* in the file */
    int64_t row = 0, column = piece->first[1]; /* in memory, of the next element of the file */
    dtrain_result result = DTRAIN_OK;
    float *to = (float *)dtrain__alloc(&im->state->allocator, bytes, 1, "a piece of a parameter");
    if (!to) return DTRAIN_ERROR_MEMORY;
    for (int64_t at = column * weight->rows; at < end && result == DTRAIN_OK; at += block) {
        const int64_t count = dtrain__min(end - at, block);
        result = dtrain__elements_read(&im->reader, im->files[weight->file].path, held,
                                       held->tensor.dtype != DTRAIN_DTYPE_F32, at, count,
                                       im->reader.block);
        for (int64_t i = 0; i < count; i++) {
            const int64_t r = row - piece->first[0], c = column - piece->first[1];
            const int64_t place = r * piece->length[1] + c - piece->offset;
            if (r >= 0 && c >= 0 && c < piece->length[1] && place >= 0 && place < piece->count)
                memcpy(&to[place], im->reader.block + (size_t)i * sizeof(float), sizeof(float));
            if (++row == weight->rows) row = 0, column++;
        }
    }
    if (result == DTRAIN_OK)
        result = dtrain_device_copy(im->state->device, tensor->memory, to, bytes);
    dtrain__free(&im->state->allocator, to, bytes, 1);
    return result;
}

/* Do all work that can fail before values change: read the headers of the file, or of all files of
 * the index, and compare them with the model. */
static dtrain_result dtrain__import_prepare(dtrain__import *im)
{
    const dtrain_strategy *strategy = im->state->desc.strategy;
    const dtrain_storage *storage = im->desc.storage;
    DTRAIN__TRY(dtrain__between_backwards(strategy, dtrain__import_call));
    DTRAIN__TRY(dtrain__path_check(dtrain__import_call, im->path));
    DTRAIN__TRY(dtrain__weights_list(dtrain__import_call, strategy, im->desc.names, &im->weights));
    DTRAIN__TRY(dtrain__reader_begin(&im->reader, im->state, im->desc.storage));
    const bool is_index = dtrain__ends_with(im->path, ".json");
    snprintf(im->index, sizeof im->index, "%s%s", im->path, is_index ? "" : ".index.json");
    if (!is_index && dtrain__storage_probe(storage, im->path, DTRAIN_STORAGE_READ) != -ENOENT)
        DTRAIN__TRY(dtrain__import_file(im, im->path));
    else if (dtrain__storage_probe(storage, im->index, DTRAIN_STORAGE_READ) != -ENOENT)
        DTRAIN__TRY(dtrain__import_index(im));
    else
        return dtrain_fail(DTRAIN_ERROR_NOT_FOUND, "%s cannot be opened: No such file%s", im->path,
                           is_index ? "" : ", nor an index of it");
    return dtrain__import_compare(im);
}

/* Read this rank's pieces of all weights. The state lists values first, in the order of the
 * parameters, and keeps pointers to the parameters' names. Rows that the file lacks are the last
 * rows, and become zero. */
static dtrain_result dtrain__import_values(dtrain__import *im)
{
    const dtrain_state *state = im->state;
    const dtrain__weight *weight = im->weights.list, *end = weight + im->weights.count;
    for (size_t i = 0; i < state->tensor_count && weight < end; i++) {
        const dtrain_state_tensor *tensor = &state->tensors[i];
        if (tensor->kind != DTRAIN_STATE_VALUE) break;
        const dtrain__weight *next = weight; /* skips weights of other stages */
        while (next < end && tensor->name != im->weights.params[next->param].name) next++;
        if (next == end) continue;
        weight = next;
        if (!weight->stored || !tensor->piece.count) continue;
        dtrain__held held = dtrain__import_held(im, weight->file, weight->stored);
        dtrain_piece *const whole = &held.tensor.piece;
        *whole = dtrain__piece_whole(tensor->shape);
        whole->length[0] = weight->rows;
        whole->count = dtrain__box_count(whole);
        if (weight->transpose) {
            DTRAIN__TRY(dtrain__import_transposed(im, weight, &held, tensor));
            continue;
        }
        const int64_t stored = dtrain__piece_place(&tensor->piece, whole, weight->total);
        if (stored < tensor->piece.count) memset(im->reader.block, 0, DTRAIN__BLOCK);
        for (int64_t at = dtrain__max(0, stored), count; at < tensor->piece.count; at += count) {
            count = dtrain__min(tensor->piece.count - at, (int64_t)(DTRAIN__BLOCK / sizeof(float)));
            DTRAIN__TRY(dtrain_device_copy(state->device, (float *)tensor->memory + at,
                                           im->reader.block, (size_t)count * sizeof(float)));
        }
        DTRAIN__TRY(
            dtrain__piece_read(&im->reader, im->files[weight->file].path, &held, tensor, 0));
    }
    return DTRAIN_OK;
}

DTRAIN_API dtrain_result dtrain_checkpoint_import(dtrain_state *state, const char *path,
                                                  const dtrain_import_desc *desc,
                                                  dtrain_import_info *info)
{
    dtrain__import im;
    const dtrain_abi *abi = dtrain__abi_of(state ? state->world : NULL);
    dtrain__give(abi, DTRAIN__ABI_import_info, NULL, info);
    DTRAIN__GIVEN(dtrain__import_call, state);
    const double start = dtrain_seconds();
    memset(&im, 0, sizeof im);
    im.state = state;
    im.path = path;
    DTRAIN__TRY(dtrain__take(abi, DTRAIN__ABI_import_desc, desc, &im.desc));
    if (!im.desc.prefix) im.desc.prefix = "";
    im.desc.storage = dtrain__storage_or_files(im.desc.storage);
    dtrain_result result = dtrain__agree(state->comm, dtrain__import_prepare(&im));
    if (result == DTRAIN_OK) {
        dtrain__notes_of(state->desc.strategy)->failed_load = dtrain__import_call;
        result = dtrain__agree(state->comm, dtrain__import_values(&im));
    }
    if (result == DTRAIN_OK) result = dtrain_state_changed(state);
    im.info.bytes = im.reader.bytes;
    im.info.seconds = dtrain_seconds() - start;
    if (result == DTRAIN_OK) dtrain__give(abi, DTRAIN__ABI_import_info, &im.info, info);
    dtrain__reader_end(&im.reader, state);
    for (uint32_t i = 0; i < im.file_count; i++) dtrain__safetensors_free(&im.files[i].header);
    dtrain__free(&state->allocator, im.files, im.file_room, sizeof *im.files);
    dtrain__free(im.weights.allocator, im.weights.list, im.weights.room, sizeof *im.weights.list);
    return result;
}
