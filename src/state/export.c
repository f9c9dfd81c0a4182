/* Export
 *
 *     a list      which parameters a file has, by which name and in which shape; for import too
 *     export      rank 0 plans files and writes them, all ranks gather one parameter at a time */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/log.h"
#include "core/result.h"
#include "world/world_internal.h"
#include "comm/comm.h"
#include "strategy/view_internal.h"
#include "state/export.h"
#include "state/export_internal.h"
#include "state/json_internal.h"
#include "state/safetensors_internal.h"
#include "state/storage_internal.h"

/* ---- What is in a file ------------------------------------------------------------------------*/

/* Set the shape of a weight in a file. */
static dtrain_result dtrain__weight_shape(const char *call, const dtrain_param *param,
                                          const dtrain_export_name *how, dtrain__weight *weight)
{
    const int dims = dtrain__param_dims(param);
    const int64_t most = dims ? param->shape[0] : 0;
    if (how->transpose && dims != 2)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "%s: parameter \"%.100s\" is to be transposed and has %d dimensions, "
                           "expected 2",
                           call, param->name, dims);
    if (how->rows < 0 || how->rows > most)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "%s: %lld rows of parameter \"%.100s\" are to be stored, expected 0 "
                           "(all) to %lld",
                           call, (long long)how->rows, param->name, (long long)most);
    weight->rows = how->rows ? how->rows : most;
    weight->columns = most ? param->count / most : 1;
    weight->total = weight->rows * weight->columns;
    weight->transpose = how->transpose;
    weight->dims = dims ? dims : 1; /* without an element: [0] */
    memcpy(weight->shape, param->shape, sizeof weight->shape);
    weight->shape[0] = weight->rows;
    if (!how->transpose) return DTRAIN_OK;
    weight->shape[0] = weight->columns;
    weight->shape[1] = weight->rows;
    return DTRAIN_OK;
}

/* List the weights of a file: all parameters but aliases and those that are left out. */
DTRAIN__PRIVATE dtrain_result dtrain__weights_list(const char *call,
                                                   const dtrain_strategy *strategy,
                                                   const dtrain_export_name *names,
                                                   dtrain__weights *weights)
{
    static const dtrain_export_name own = {0, NULL, false};
    size_t tensor = 0;
    weights->allocator = &dtrain__world_of(strategy)->allocator;
    weights->params = dtrain__params_of(strategy, &weights->room);
    weights->list = (dtrain__weight *)dtrain__alloc(weights->allocator, weights->room,
                                                    sizeof *weights->list, "a list of weights");
    if (!weights->list) return DTRAIN_ERROR_MEMORY;
    for (size_t i = 0; i < weights->room; i++) {
        const dtrain_param *param = &weights->params[i];
        const dtrain_export_name *how = names ? &names[i] : &own;
        dtrain__weight *weight = &weights->list[weights->count];
        if (param->state.storage != param) continue;
        weight->param = i;
        weight->tensor = tensor++;
        weight->name = how->name ? how->name : param->name;
        if (!weight->name[0]) continue;
        DTRAIN__TRY(dtrain__weight_shape(call, param, how, weight));
        weights->count++;
    }
    return DTRAIN_OK;
}

DTRAIN__PRIVATE void dtrain__weights_free(dtrain__weights *weights)
{
    if (weights->allocator)
        dtrain__free(weights->allocator, weights->list, weights->room, sizeof *weights->list);
}

DTRAIN__PRIVATE bool dtrain__ends_with(const char *text, const char *end)
{
    const size_t bytes = strlen(text), end_bytes = strlen(end);
    return bytes >= end_bytes && strcmp(text + bytes - end_bytes, end) == 0;
}

/* Write the directory of a path. */
DTRAIN__PRIVATE void dtrain__directory_of(char directory[DTRAIN__PATH], const char *path)
{
    const char *slash = strrchr(path, '/');
    const int bytes = slash == path ? 1 : slash ? (int)(slash - path) : 1;
    snprintf(directory, DTRAIN__PATH, "%.*s", bytes, slash ? path : ".");
}

DTRAIN__PRIVATE dtrain_result dtrain__weight_path_check(const char *call, const char *path)
{
    if (path && path[0] && strlen(path) <= DTRAIN__PATH - 128) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: path is NULL, empty or longer than %d", call,
                       DTRAIN__PATH - 128);
}

/* ---- The plan ---------------------------------------------------------------------------------*/

typedef struct dtrain__export {
    dtrain_strategy *strategy;
    dtrain_export_desc desc; /* resolved */
    const char *path;
    dtrain__weights weights;
    float *value; /* (most) the parameter that is being written */
    size_t most;
    char *block; /* (BLOCK) of rank 0, which writes; NULL on the others */
    uint32_t file_count;
    uint32_t opened, renamed; /* files, the index included */
    dtrain__text text;        /* the header or the index that is being made */
    char tmp[DTRAIN__PATH];   /* the path of the file that was opened last */
    int file;                 /* -1: it is closed */
    uint64_t at;              /* bytes of it that are written */
} dtrain__export;

static const char dtrain__export_call[] = "dtrain_checkpoint_export";

/* Choose the file of every weight: a file is full when the next weight does not fit. */
static dtrain_result dtrain__export_plan(dtrain__export *e)
{
    const uint64_t each = dtrain_dtype_bytes((dtrain_dtype)e->desc.dtype);
    const uint64_t limit = e->desc.file_bytes ? e->desc.file_bytes : UINT64_MAX;
    uint64_t at = 0;
    e->file_count = 1;
    for (size_t i = 0; i < e->weights.count; i++) {
        dtrain__weight *weight = &e->weights.list[i];
        const uint64_t bytes = (uint64_t)weight->total * each;
        const size_t count = (size_t)e->weights.params[weight->param].count;
        if (at && (at > limit || bytes > limit - at)) {
            at = 0;
            e->file_count++;
        }
        weight->file = e->file_count - 1;
        at += bytes;
        if (count > e->most) e->most = count;
    }
    if (e->file_count <= DTRAIN__WEIGHT_FILES) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                       "%s: file_bytes is %llu, which makes %u files, expected at most %u",
                       dtrain__export_call, (unsigned long long)e->desc.file_bytes, e->file_count,
                       DTRAIN__WEIGHT_FILES);
}

/* Make the header of a file with these weights. */
static dtrain_result dtrain__export_header(dtrain__export *e, const dtrain__weight *first,
                                           size_t count)
{
    static const char metadata[] = "{\"format\":\"pt\"}"; /* transformers reads no file without */
    const uint64_t each = dtrain_dtype_bytes((dtrain_dtype)e->desc.dtype);
    uint64_t at = 0;
    dtrain__stored *stored = (dtrain__stored *)dtrain__alloc(
        e->weights.allocator, count, sizeof *stored, "the header of a file");
    if (!stored) return DTRAIN_ERROR_MEMORY;
    for (size_t i = 0; i < count; i++) {
        stored[i].name = first[i].name;
        stored[i].dtype = e->desc.dtype;
        stored[i].dims = first[i].dims;
        memcpy(stored[i].shape, first[i].shape, sizeof first[i].shape);
        stored[i].begin = at;
        stored[i].end = at += (uint64_t)first[i].total * each;
    }
    e->text.bytes = 0;
    const dtrain_result result = dtrain__safetensors_write(&e->text, stored, count, metadata);
    dtrain__free(e->weights.allocator, stored, count, sizeof *stored);
    return result;
}

/* Refuse names that no file can have, or that two parameters have: a header of all weights must be
 * readable. */
static dtrain_result dtrain__export_names(dtrain__export *e)
{
    char why[DTRAIN__ERROR_BYTES];
    const dtrain_result result = dtrain__export_header(e, e->weights.list, e->weights.count);
    if (result != DTRAIN_ERROR_DATA) return result;
    snprintf(why, sizeof why, "%s", dtrain__bare(dtrain_last_error()));
    return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: a name cannot be used: %s", dtrain__export_call,
                       why);
}

/* Do everything local that can fail before values are gathered. */
static dtrain_result dtrain__export_prepare(dtrain__export *e)
{
    const dtrain_allocator *allocator = &dtrain__world_of(e->strategy)->allocator;
    DTRAIN__TRY(dtrain__between_backwards(e->strategy, dtrain__export_call));
    DTRAIN__TRY(dtrain__weight_path_check(dtrain__export_call, e->path));
    if (e->desc.dtype > DTRAIN_DTYPE_F16)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: dtype is %u, expected F32, BF16 or F16",
                           dtrain__export_call, e->desc.dtype);
    if (e->desc.file_bytes && !dtrain__ends_with(e->path, DTRAIN__WEIGHTS_END))
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "%s: path is \"%.200s\", expected an end of \"" DTRAIN__WEIGHTS_END
                           "\" for files of file_bytes",
                           dtrain__export_call, e->path);
    DTRAIN__TRY(dtrain__weights_list(dtrain__export_call, e->strategy, e->desc.names, &e->weights));
    DTRAIN__TRY(dtrain__export_plan(e));
    DTRAIN__TRY(dtrain__export_names(e));
    e->value = (float *)dtrain__alloc(allocator, e->most, sizeof(float), "a whole parameter");
    if (!e->value) return DTRAIN_ERROR_MEMORY;
    if (dtrain_comm_rank(dtrain__groups_of(e->strategy).all) > 0) return DTRAIN_OK;
    e->block = (char *)dtrain__alloc(allocator, DTRAIN__BLOCK, 1, "a block");
    return e->block ? DTRAIN_OK : DTRAIN_ERROR_MEMORY;
}

/* ---- Files ------------------------------------------------------------------------------------*/

/* Write the path of a file, or of the index for number file_count, with `end` behind it. */
static void dtrain__export_path(const dtrain__export *e, uint32_t number, const char *end,
                                char path[DTRAIN__PATH])
{
    const int stem = (int)(strlen(e->path) - strlen(DTRAIN__WEIGHTS_END));
    if (number == e->file_count)
        snprintf(path, DTRAIN__PATH, "%s" DTRAIN__INDEX_END "%s", e->path, end);
    else if (e->file_count == 1) snprintf(path, DTRAIN__PATH, "%s%s", e->path, end);
    else
        snprintf(path, DTRAIN__PATH, "%.*s-%05u-of-%05u" DTRAIN__WEIGHTS_END "%s", stem, e->path,
                 number + 1, e->file_count, end);
}

/* Close the open file, if there is one, after it is on the disk if all went well. */
static dtrain_result dtrain__export_close(dtrain__export *e, dtrain_result result)
{
    if (e->file >= 0) result = dtrain__storage_finish(e->desc.storage, e->file, e->tmp, result);
    e->file = -1;
    return result;
}

/* Write behind what the open file has. */
static dtrain_result dtrain__export_write(dtrain__export *e, const void *from, size_t bytes)
{
    DTRAIN__TRY(dtrain__storage_write(e->desc.storage, e->file, e->tmp, from, bytes, e->at));
    e->at += bytes;
    return DTRAIN_OK;
}

/* End the open file and begin the next one with the text. A file that an interrupted export has
 * left is replaced. */
static dtrain_result dtrain__export_begin(dtrain__export *e)
{
    if (e->text.failed) return DTRAIN_ERROR_MEMORY;
    DTRAIN__TRY(dtrain__export_close(e, DTRAIN_OK));
    dtrain__export_path(e, e->opened, ".tmp", e->tmp);
    (void)e->desc.storage->remove(e->desc.storage->user, e->tmp);
    DTRAIN__TRY(dtrain__storage_open(e->desc.storage, e->tmp, DTRAIN_STORAGE_CREATE, &e->file));
    e->opened++;
    e->at = 0;
    return dtrain__export_write(e, e->text.at, e->text.bytes);
}

/* Begin the next file of weights with its header. */
static dtrain_result dtrain__export_next(dtrain__export *e)
{
    const dtrain__weight *first = e->weights.list, *end = first + e->weights.count, *last;
    while (first < end && first->file < e->opened) first++;
    for (last = first; last < end && last->file == e->opened;) last++;
    DTRAIN__TRY(dtrain__export_header(e, first, (size_t)(last - first)));
    return dtrain__export_begin(e);
}

/* Convert elements of a weight from element `first` of the file on, and put them into the block. */
static void dtrain__export_block(const dtrain__export *e, const dtrain__weight *weight,
                                 int64_t first, int64_t count)
{
    int64_t row = weight->transpose ? first % weight->rows : 0;
    int64_t column = weight->transpose ? first / weight->rows : first;
    for (int64_t i = 0; i < count; i++) {
        const float x = e->value[row * weight->columns + column];
        const uint16_t low = dtrain_half_from_f32((dtrain_dtype)e->desc.dtype, x);
        if (e->desc.dtype == DTRAIN_DTYPE_F32)
            memcpy(e->block + (size_t)i * sizeof x, &x, sizeof x);
        else memcpy(e->block + (size_t)i * sizeof low, &low, sizeof low);
        if (!weight->transpose) column++;
        else if (++row == weight->rows) row = 0, column++;
    }
}

/* Write the value of a weight, behind the header if it is the first of a file. */
static dtrain_result dtrain__export_weight(dtrain__export *e, const dtrain__weight *weight)
{
    const size_t each = dtrain_dtype_bytes((dtrain_dtype)e->desc.dtype);
    const int64_t most = (int64_t)(DTRAIN__BLOCK / each);
    if (weight->file == e->opened) DTRAIN__TRY(dtrain__export_next(e));
    for (int64_t done = 0; done < weight->total; done += most) {
        const int64_t count = dtrain__min(most, weight->total - done);
        dtrain__export_block(e, weight, done, count);
        DTRAIN__TRY(dtrain__export_write(e, e->block, (size_t)count * each));
    }
    return DTRAIN_OK;
}

/* Write the index of several files. */
static dtrain_result dtrain__export_index(dtrain__export *e)
{
    char path[DTRAIN__PATH];
    uint64_t elements = 0;
    for (size_t i = 0; i < e->weights.count; i++) elements += (uint64_t)e->weights.list[i].total;
    e->text.bytes = 0;
    dtrain__text_add(
        &e->text, "{\n  \"metadata\": {\n    \"total_size\": %llu\n  },\n",
        (unsigned long long)(elements * dtrain_dtype_bytes((dtrain_dtype)e->desc.dtype)));
    dtrain__text_add(&e->text, "  \"weight_map\": {");
    for (size_t i = 0; i < e->weights.count; i++) {
        dtrain__export_path(e, e->weights.list[i].file, "", path);
        const char *slash = strrchr(path, '/');
        dtrain__text_add(&e->text, "%s\n    ", i ? "," : "");
        dtrain__text_add_string(&e->text, e->weights.list[i].name);
        dtrain__text_add(&e->text, ": ");
        dtrain__text_add_string(&e->text, slash ? slash + 1 : path);
    }
    dtrain__text_add(&e->text, "\n  }\n}\n");
    return dtrain__export_begin(e);
}

/* Give the files their names, that of the index last, and bring the names to the disk. Then remove
 * what an earlier export to the same path has left in the other form, which readers would take for
 * this one. */
static dtrain_result dtrain__export_publish(dtrain__export *e)
{
    const dtrain_storage *storage = e->desc.storage;
    char path[DTRAIN__PATH], tmp[DTRAIN__PATH], directory[DTRAIN__PATH];
    dtrain__directory_of(directory, e->path);
    if (!e->opened) DTRAIN__TRY(dtrain__export_next(e)); /* a file without weights */
    if (e->file_count > 1) DTRAIN__TRY(dtrain__export_index(e));
    DTRAIN__TRY(dtrain__export_close(e, DTRAIN_OK));
    for (; e->renamed < e->opened; e->renamed++) {
        dtrain__export_path(e, e->renamed, "", path);
        dtrain__export_path(e, e->renamed, ".tmp", tmp);
        DTRAIN__TRY(dtrain__storage_rename(storage, tmp, path));
    }
    DTRAIN__TRY(dtrain__storage_sync_directory(storage, directory));
    dtrain__export_path(e, e->file_count, "", path);
    if (storage->remove(storage->user, e->file_count > 1 ? e->path : path) < 0) return DTRAIN_OK;
    return dtrain__storage_sync_directory(storage, directory);
}

/* Gather and write one parameter after the other. The other ranks learn of an error of rank 0's
 * disk at the end only, and gather until then: this costs no more than success. */
static dtrain_result dtrain__export_values(dtrain__export *e)
{
    char tmp[DTRAIN__PATH];
    dtrain_result result = DTRAIN_OK;
    for (size_t i = 0; i < e->weights.count; i++) {
        const dtrain__weight *weight = &e->weights.list[i];
        const dtrain_result gathered = dtrain_strategy_read(e->strategy, weight->param, e->value);
        if (result == DTRAIN_OK) result = gathered;
        if (result == DTRAIN_OK && e->block) result = dtrain__export_weight(e, weight);
    }
    if (result == DTRAIN_OK && e->block) result = dtrain__export_publish(e);
    result = dtrain__export_close(e, result);
    for (; e->renamed < e->opened && result != DTRAIN_OK; e->renamed++) {
        dtrain__export_path(e, e->renamed, ".tmp", tmp);
        (void)e->desc.storage->remove(e->desc.storage->user, tmp);
    }
    return result;
}

DTRAIN_API dtrain_result dtrain_checkpoint_export(dtrain_strategy *strategy, const char *path,
                                                  const dtrain_export_desc *desc)
{
    dtrain__export e;
    if (!strategy)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: strategy is NULL", dtrain__export_call);
    memset(&e, 0, sizeof e);
    e.strategy = strategy;
    e.path = path;
    e.file = -1;
    e.text.allocator = &dtrain__world_of(strategy)->allocator;
    if (desc) e.desc = *desc;
    e.desc.storage = dtrain__storage_or_files(e.desc.storage);
    dtrain_comm *comm = dtrain__groups_of(strategy).all;
    dtrain_result result = dtrain__agree(comm, dtrain__export_prepare(&e));
    if (result == DTRAIN_OK) result = dtrain__agree(comm, dtrain__export_values(&e));
    dtrain__text_free(&e.text);
    dtrain__free(e.text.allocator, e.block, DTRAIN__BLOCK, 1);
    dtrain__free(e.text.allocator, e.value, e.most, sizeof(float));
    dtrain__weights_free(&e.weights);
    return result;
}
