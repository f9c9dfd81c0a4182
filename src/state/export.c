/* Export
 *
 *     a list      which parameters a file has, by which name and in which shape; for import too
 *     export      all ranks gather one parameter after the other, and rank 0 writes it */

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
#include "state/export_internal.h"
#include "state/safetensors_internal.h"
#include "state/storage_internal.h"

/* ---- What is in a file ------------------------------------------------------------------------*/

/* List the weights of a file, with their shapes there: all parameters but aliases and those that
 * are left out. */
DTRAIN__PRIVATE dtrain_result dtrain__weights_list(const char *call,
                                                   const dtrain_strategy *strategy,
                                                   const dtrain_export_name *names,
                                                   dtrain__weights *weights)
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

/* ---- Export -----------------------------------------------------------------------------------*/

typedef struct dtrain__export {
    dtrain_strategy *strategy;
    dtrain_export_desc desc; /* resolved */
    const char *path;
    char tmp[DTRAIN__PATH];
    dtrain__weights weights;
    dtrain__text header;
    float *value; /* (most) the parameter that is being written */
    size_t most;
    char *block; /* (BLOCK) of rank 0, which writes; NULL on the others */
    int file;    /* of rank 0; -1: it is not open */
    uint64_t at; /* bytes of it that are written */
} dtrain__export;

static const char dtrain__export_call[] = "dtrain_checkpoint_export";

/* Make the header. It would not be readable with a name that no file can have, or that two
 * parameters have. */
static dtrain_result dtrain__export_header(dtrain__export *e)
{
    static const char metadata[] = "{\"format\":\"pt\"}"; /* transformers reads no file without */
    const size_t count = e->weights.count;
    char why[DTRAIN__ERROR_BYTES];
    uint64_t at = 0;
    dtrain__stored *stored = (dtrain__stored *)dtrain__alloc(
        e->weights.allocator, count, sizeof *stored, "the header of a file");
    if (!stored) return DTRAIN_ERROR_MEMORY;
    for (size_t i = 0; i < count; i++) {
        const dtrain__weight *weight = &e->weights.list[i];
        stored[i].name = weight->name;
        stored[i].dtype = e->desc.dtype;
        stored[i].dims = weight->dims;
        memcpy(stored[i].shape, weight->shape, sizeof weight->shape);
        stored[i].begin = at;
        stored[i].end = at += (uint64_t)weight->total * dtrain__stored_bytes(e->desc.dtype);
    }
    const dtrain_result result = dtrain__safetensors_write(&e->header, stored, count, metadata);
    dtrain__free(e->weights.allocator, stored, count, sizeof *stored);
    if (result != DTRAIN_ERROR_DATA) return result;
    snprintf(why, sizeof why, "%s", dtrain__bare(dtrain_last_error()));
    return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: a name cannot be used: %s", dtrain__export_call,
                       why);
}

/* Do everything local that can fail before values are gathered. */
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

/* Write behind what the file has. */
static dtrain_result dtrain__export_write(dtrain__export *e, const void *from, size_t bytes)
{
    DTRAIN__TRY(dtrain__storage_write(e->desc.storage, e->file, e->tmp, from, bytes, e->at));
    e->at += bytes;
    return DTRAIN_OK;
}

/* Write the value of a weight, block by block, converted and in the order of the file. */
static dtrain_result dtrain__export_weight(dtrain__export *e, const dtrain__weight *weight)
{
    const size_t each = dtrain__stored_bytes(e->desc.dtype);
    const int64_t most = (int64_t)(DTRAIN__BLOCK / each);
    int64_t row = 0, column = 0; /* of the element that comes next */
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

/* Gather and write one parameter after the other. The other ranks learn of an error of rank 0's
 * disk at the end only, and gather until then: this costs no more than success. A file that an
 * interrupted export has left is replaced. */
static dtrain_result dtrain__export_values(dtrain__export *e)
{
    const dtrain_storage *storage = e->desc.storage;
    const bool writes = e->block != NULL;
    char directory[DTRAIN__PATH];
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
    dtrain__directory_of(directory, e->path);
    if (result == DTRAIN_OK) result = dtrain__storage_rename(storage, e->tmp, e->path);
    if (result == DTRAIN_OK) return dtrain__storage_sync_directory(storage, directory);
    (void)storage->remove(storage->user, e->tmp);
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
    e.header.allocator = &dtrain__world_of(strategy)->allocator;
    if (desc) e.desc = *desc;
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
