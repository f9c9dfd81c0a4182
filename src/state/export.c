/* Export
 *
 *     a list      what of the model is in a file, under which name, in which shape; for import too
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

static int dtrain__name_order(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* Refuse a name that a file cannot have. */
static dtrain_result dtrain__weight_name_check(const char *call, const char *name)
{
    bool plain = strlen(name) < DTRAIN__TENSOR_NAME && strcmp(name, "__metadata__") != 0;
    for (const char *c = name; *c; c++) plain = plain && (unsigned char)*c >= 0x20 && *c != 0x7f;
    if (plain) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                       "%s: a name is \"%.60s\", expected at most %d bytes without control "
                       "characters, and not \"__metadata__\"",
                       call, name, DTRAIN__TENSOR_NAME - 1);
}

/* Refuse a name that two parameters would have. */
static dtrain_result dtrain__weights_differ(const char *call, const dtrain__weights *weights)
{
    const char **names = (const char **)dtrain__alloc(weights->allocator, weights->count,
                                                      sizeof *names, "names of tensors");
    dtrain_result result = DTRAIN_OK;
    if (!names) return DTRAIN_ERROR_MEMORY;
    for (size_t i = 0; i < weights->count; i++) names[i] = weights->list[i].name;
    qsort((void *)names, weights->count, sizeof *names, dtrain__name_order);
    for (size_t i = 1; i < weights->count && result == DTRAIN_OK; i++)
        if (strcmp(names[i - 1], names[i]) == 0)
            result = dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                                 "%s: two parameters are called \"%.100s\", expected names that "
                                 "occur once",
                                 call, names[i]);
    dtrain__free(weights->allocator, (void *)names, weights->count, sizeof *names);
    return result;
}

/* Work out how a parameter lies in a file. */
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

/* List what is in a file: all parameters but aliases, and those that are left out. */
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
        DTRAIN__TRY(dtrain__weight_name_check(call, weight->name));
        DTRAIN__TRY(dtrain__weight_shape(call, param, how, weight));
        weights->count++;
    }
    return dtrain__weights_differ(call, weights);
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

/* An export under way. Rank 0 alone has a block and files. */
typedef struct dtrain__export {
    dtrain_strategy *strategy;
    dtrain_export_desc desc; /* resolved */
    const char *path;
    dtrain__weights weights;
    float *value; /* (most) the parameter under way */
    size_t most;
    char *block;                 /* (BLOCK) */
    uint32_t file_count, opened; /* files; those that have been begun */
    uint32_t renamed;
    uint64_t total_bytes;
    int file;      /* open, or -1 */
    uint64_t data; /* where its data begins */
} dtrain__export;

static const char dtrain__export_call[] = "dtrain_checkpoint_export";

/* Give every weight its place: a file is full when the next one does not fit. */
static dtrain_result dtrain__export_plan(dtrain__export *e)
{
    const uint64_t each = dtrain_dtype_bytes((dtrain_dtype)e->desc.dtype);
    uint64_t at = 0;
    e->file_count = 1;
    for (size_t i = 0; i < e->weights.count; i++) {
        dtrain__weight *weight = &e->weights.list[i];
        const uint64_t bytes = (uint64_t)weight->total * each, limit = e->desc.file_bytes;
        if (limit && at && (at > limit || bytes > limit - at)) {
            at = 0;
            e->file_count++;
        }
        weight->file = e->file_count - 1;
        weight->at = at;
        at += bytes;
        e->total_bytes += bytes;
        const size_t count = (size_t)e->weights.params[weight->param].count;
        if (count > e->most) e->most = count;
    }
    if (e->file_count <= DTRAIN__WEIGHT_FILES) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                       "%s: file_bytes is %llu, which makes %u files, expected at most %u",
                       dtrain__export_call, (unsigned long long)e->desc.file_bytes, e->file_count,
                       DTRAIN__WEIGHT_FILES);
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
    e->value = (float *)dtrain__alloc(allocator, e->most, sizeof(float), "a whole parameter");
    if (!e->value) return DTRAIN_ERROR_MEMORY;
    if (dtrain_comm_rank(dtrain__groups_of(e->strategy).all) > 0) return DTRAIN_OK;
    e->block = (char *)dtrain__alloc(allocator, DTRAIN__BLOCK, 1, "a block");
    return e->block ? DTRAIN_OK : DTRAIN_ERROR_MEMORY;
}

/* ---- Files ------------------------------------------------------------------------------------*/

/* Write the path of a file, of its index for number file_count, and what follows. */
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

/* Write the header of a file. */
static dtrain_result dtrain__export_header(const dtrain__export *e, uint32_t number,
                                           dtrain__text *text)
{
    static const char metadata[] = "{\"format\":\"pt\"}"; /* transformers reads no file without */
    const uint64_t each = dtrain_dtype_bytes((dtrain_dtype)e->desc.dtype);
    const dtrain__weight *first = e->weights.list, *end = first + e->weights.count, *last;
    while (first < end && first->file < number) first++;
    for (last = first; last < end && last->file == number;) last++;
    const size_t count = (size_t)(last - first);
    dtrain__stored *stored = (dtrain__stored *)dtrain__alloc(text->allocator, count, sizeof *stored,
                                                             "the header of a file");
    if (!stored) return DTRAIN_ERROR_MEMORY;
    for (size_t i = 0; i < count; i++) {
        stored[i].name = first[i].name;
        stored[i].dtype = e->desc.dtype;
        stored[i].dims = first[i].dims;
        memcpy(stored[i].shape, first[i].shape, sizeof first[i].shape);
        stored[i].begin = first[i].at;
        stored[i].end = first[i].at + (uint64_t)first[i].total * each;
    }
    const dtrain_result result = dtrain__safetensors_write(text, stored, count, metadata);
    dtrain__free(text->allocator, stored, count, sizeof *stored);
    return result;
}

/* Close the file under way, after it is on the disk if all went well. */
static dtrain_result dtrain__export_close(dtrain__export *e, dtrain_result result)
{
    char path[DTRAIN__PATH];
    if (e->file < 0) return result;
    dtrain__export_path(e, e->opened - 1, ".tmp", path);
    const dtrain_result closed =
        dtrain__storage_finish(e->desc.storage, e->file, path, result == DTRAIN_OK);
    e->file = -1;
    return result == DTRAIN_OK ? closed : result;
}

/* End the file under way and begin the next one. What an interrupted export has left by its name is
 * replaced. */
static dtrain_result dtrain__export_open(dtrain__export *e)
{
    char path[DTRAIN__PATH];
    dtrain__text header;
    memset(&header, 0, sizeof header);
    header.allocator = e->weights.allocator;
    DTRAIN__TRY(dtrain__export_close(e, DTRAIN_OK));
    dtrain__export_path(e, e->opened, ".tmp", path);
    dtrain_result result = dtrain__export_header(e, e->opened, &header);
    (void)e->desc.storage->remove(e->desc.storage->user, path);
    if (result == DTRAIN_OK)
        result = dtrain__storage_open(e->desc.storage, path, DTRAIN_STORAGE_CREATE, &e->file);
    if (result == DTRAIN_OK) e->opened++;
    if (result == DTRAIN_OK)
        result = dtrain__storage_write(e->desc.storage, e->file, path, header.at, header.bytes, 0);
    e->data = header.bytes;
    dtrain__text_free(&header);
    return result;
}

/* Put elements of a weight into the block as the file has them: from element `first` of it on. */
static void dtrain__export_block(const dtrain__export *e, const dtrain__weight *weight,
                                 int64_t first, int64_t count)
{
    int64_t row = weight->transpose ? first % weight->rows : 0;
    int64_t column = weight->transpose ? first / weight->rows : first;
    for (int64_t i = 0; i < count; i++) {
        const float x = e->value[row * weight->columns + column];
        const uint16_t low = e->desc.dtype == DTRAIN_DTYPE_BF16  ? dtrain_f32_to_bf16(x)
                             : e->desc.dtype == DTRAIN_DTYPE_F16 ? dtrain_f32_to_f16(x)
                                                                 : 0;
        if (e->desc.dtype == DTRAIN_DTYPE_F32)
            memcpy(e->block + (size_t)i * sizeof x, &x, sizeof x);
        else memcpy(e->block + (size_t)i * sizeof low, &low, sizeof low);
        if (!weight->transpose) column++;
        else if (++row == weight->rows) row = 0, column++;
    }
}

/* Write the value of a weight. */
static dtrain_result dtrain__export_weight(dtrain__export *e, const dtrain__weight *weight)
{
    const size_t each = dtrain_dtype_bytes((dtrain_dtype)e->desc.dtype);
    const int64_t most = (int64_t)(DTRAIN__BLOCK / each);
    char path[DTRAIN__PATH];
    dtrain__export_path(e, weight->file, ".tmp", path);
    for (int64_t done = 0; done < weight->total; done += most) {
        const int64_t count = dtrain__min(most, weight->total - done);
        dtrain__export_block(e, weight, done, count);
        DTRAIN__TRY(dtrain__storage_write(e->desc.storage, e->file, path, e->block,
                                          (size_t)count * each,
                                          e->data + weight->at + (uint64_t)done * each));
    }
    return DTRAIN_OK;
}

/* Write the index of several files. */
static dtrain_result dtrain__export_index(const dtrain__export *e)
{
    char path[DTRAIN__PATH], tmp[DTRAIN__PATH];
    dtrain__text text;
    memset(&text, 0, sizeof text);
    text.allocator = e->weights.allocator;
    dtrain__text_add(&text, "{\n  \"metadata\": {\n    \"total_size\": %llu\n  },\n",
                     (unsigned long long)e->total_bytes);
    dtrain__text_add(&text, "  \"weight_map\": {");
    for (size_t i = 0; i < e->weights.count; i++) {
        dtrain__export_path(e, e->weights.list[i].file, "", path);
        const char *slash = strrchr(path, '/');
        dtrain__text_add(&text, "%s\n    ", i ? "," : "");
        dtrain__text_add_string(&text, e->weights.list[i].name);
        dtrain__text_add(&text, ": ");
        dtrain__text_add_string(&text, slash ? slash + 1 : path);
    }
    dtrain__text_add(&text, "\n  }\n}\n");
    dtrain__export_path(e, e->file_count, "", path);
    dtrain__export_path(e, e->file_count, ".tmp", tmp);
    (void)e->desc.storage->remove(e->desc.storage->user, tmp);
    dtrain_result result = text.failed ? DTRAIN_ERROR_MEMORY : DTRAIN_OK;
    if (result == DTRAIN_OK)
        result = dtrain__storage_put(e->desc.storage, tmp, text.at, text.bytes);
    dtrain__text_free(&text);
    if (result == DTRAIN_OK) result = dtrain__storage_rename(e->desc.storage, tmp, path);
    if (result != DTRAIN_OK) (void)e->desc.storage->remove(e->desc.storage->user, tmp);
    return result;
}

/* Give the files their names, and bring those to the disk; then remove what an earlier export to
 * the same path has left in the other form, which readers would take for this one. */
static dtrain_result dtrain__export_publish(dtrain__export *e)
{
    const dtrain_storage *storage = e->desc.storage;
    char path[DTRAIN__PATH], tmp[DTRAIN__PATH], directory[DTRAIN__PATH];
    dtrain__directory_of(directory, e->path);
    for (; e->renamed < e->file_count; e->renamed++) {
        dtrain__export_path(e, e->renamed, "", path);
        dtrain__export_path(e, e->renamed, ".tmp", tmp);
        DTRAIN__TRY(dtrain__storage_rename(storage, tmp, path));
    }
    if (e->file_count > 1) DTRAIN__TRY(dtrain__export_index(e));
    DTRAIN__TRY(dtrain__storage_sync_directory(storage, directory));
    dtrain__export_path(e, e->file_count, "", path);
    if (storage->remove(storage->user, e->file_count > 1 ? e->path : path) < 0) return DTRAIN_OK;
    return dtrain__storage_sync_directory(storage, directory);
}

/* Gather and write one parameter after the other. An error of rank 0's disk is known to the others
 * in the end only: until then they go on gathering with it, which costs no more than success. */
static dtrain_result dtrain__export_values(dtrain__export *e)
{
    const bool writes = e->block != NULL;
    dtrain_result result = writes ? dtrain__export_open(e) : DTRAIN_OK;
    for (size_t i = 0; i < e->weights.count; i++) {
        const dtrain__weight *weight = &e->weights.list[i];
        const dtrain_result gathered = dtrain_strategy_read(e->strategy, weight->param, e->value);
        if (result == DTRAIN_OK) result = gathered;
        if (result == DTRAIN_OK && writes && weight->file == e->opened)
            result = dtrain__export_open(e);
        if (result == DTRAIN_OK && writes) result = dtrain__export_weight(e, weight);
    }
    result = dtrain__export_close(e, result);
    if (result == DTRAIN_OK && writes) result = dtrain__export_publish(e);
    for (uint32_t i = e->renamed; i < e->opened && result != DTRAIN_OK; i++) {
        char tmp[DTRAIN__PATH];
        dtrain__export_path(e, i, ".tmp", tmp);
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
    if (desc) e.desc = *desc;
    e.desc.storage = dtrain__storage_or_files(e.desc.storage);
    const dtrain_allocator *allocator = &dtrain__world_of(strategy)->allocator;
    dtrain_comm *comm = dtrain__groups_of(strategy).all;
    dtrain_result result = dtrain__agree(comm, dtrain__export_prepare(&e));
    if (result == DTRAIN_OK) result = dtrain__agree(comm, dtrain__export_values(&e));
    dtrain__free(allocator, e.block, DTRAIN__BLOCK, 1);
    dtrain__free(allocator, e.value, e.most, sizeof(float));
    dtrain__weights_free(&e.weights);
    return result;
}
