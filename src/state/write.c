/* Writing a rank's files
 *
 *     plan        where in which of two files each piece goes: values, which are read alone as
 *                 well, are in one of their own
 *     snapshot    copy these pieces to host memory, for a save in the background
 *     write       files, block by block with their checksums, and the list of what they hold
 *
 * Nothing here communicates: state/union.c has chosen who writes which piece. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/log.h"
#include "core/result.h"
#include "state/box_internal.h"
#include "state/checkpoint_internal.h"
#include "state/safetensors_internal.h"
#include "state/state_internal.h"
#include "state/storage_internal.h"
#include "device/backend.h"

/* ---- Plan -------------------------------------------------------------------------------------*/

/* Wide elements come first, so that all are aligned. */
DTRAIN__PRIVATE dtrain_result dtrain__save_plan(dtrain_checkpoint *c)
{
    c->piece_count = 0;
    memset(c->files, 0, sizeof c->files);
    for (int f = 0; f < 2; f++) {
        dtrain__write_file *file = &c->files[f];
        file->first = c->piece_count;
        for (size_t n = 0; n < 4 * c->held_count; n++) {
            const size_t each = (size_t)8 >> n / c->held_count;
            const dtrain__held *held = &c->held[n % c->held_count];
            if (held->rank != c->rank || (held->kind != DTRAIN_STATE_VALUE) != (f == 1) ||
                dtrain__state_bytes((uint32_t)held->dtype) != each || !held->piece.count)
                continue;
            if (!dtrain__grow(&c->allocator, (void **)&c->pieces, c->piece_count, &c->piece_room,
                              sizeof *c->pieces, "the plan of a save"))
                return DTRAIN_ERROR_MEMORY;
            dtrain__write_piece *piece = &c->pieces[c->piece_count++];
            piece->held = held;
            piece->at = file->bytes;
            piece->from = c->desc.state->tensors[held->index].memory;
            file->bytes += (uint64_t)held->piece.count * each;
            file->count++;
        }
    }
    return DTRAIN_OK;
}

static uint64_t dtrain__piece_bytes(const dtrain__write_piece *piece)
{
    return (uint64_t)piece->held->piece.count * dtrain__state_bytes((uint32_t)piece->held->dtype);
}

/* ---- Snapshot ---------------------------------------------------------------------------------*/

/* Copy past the cache: what training works with stays there, and the memory that is written need
 * not be read first. Of GPT-2's state (1.5 GB, Xeon) that takes 0.6 of memcpy's time. `to` is
 * aligned to 16 bytes. */
static void dtrain__copy_past_cache(char *to, const char *from, size_t bytes)
{
    size_t done = 0;
#ifdef __SSE2__
    for (; done + 64 <= bytes; done += 64) {
        const __m128i *in = (const __m128i *)(const void *)(from + done);
        __m128i *out = (__m128i *)(void *)(to + done);
        const __m128i a = _mm_loadu_si128(in), b = _mm_loadu_si128(in + 1);
        const __m128i c = _mm_loadu_si128(in + 2), d = _mm_loadu_si128(in + 3);
        _mm_stream_si128(out, a);
        _mm_stream_si128(out + 1, b);
        _mm_stream_si128(out + 2, c);
        _mm_stream_si128(out + 3, d);
    }
    _mm_sfence();
#endif
    memcpy(to + done, from + done, bytes - done);
}

/* Copy all pieces to memory that stays as it is: all that a step pays. The memory is kept for the
 * next save. */
DTRAIN__PRIVATE dtrain_result dtrain__save_snapshot(dtrain_checkpoint *c)
{
    dtrain_device *device = c->desc.state->device;
    uint64_t bytes = 0;
    for (size_t i = 0; i < c->piece_count; i++)
        bytes += dtrain__round_up((size_t)dtrain__piece_bytes(&c->pieces[i]), DTRAIN__CACHE_LINE);
    if (bytes > c->snapshot_bytes) {
        void *memory;
        if (c->snapshot) device->ops->host_free(device, c->snapshot, c->snapshot_bytes);
        c->snapshot = NULL;
        c->info.snapshot_bytes = c->snapshot_bytes = 0;
        DTRAIN__TRY(device->ops->host_alloc(device, (size_t)bytes, &memory));
        c->snapshot = (char *)memory;
        c->info.snapshot_bytes = c->snapshot_bytes = (size_t)bytes;
    }
    char *next = c->snapshot;
    for (size_t i = 0; i < c->piece_count; i++) {
        const size_t count = (size_t)dtrain__piece_bytes(&c->pieces[i]);
        if (device->ops->host_memory)
            dtrain__copy_past_cache(next, (const char *)c->pieces[i].from, count);
        else DTRAIN__TRY(dtrain_device_copy(device, next, c->pieces[i].from, count));
        c->pieces[i].from = next;
        next += dtrain__round_up(count, DTRAIN__CACHE_LINE);
    }
    return DTRAIN_OK;
}

/* ---- Write ------------------------------------------------------------------------------------*/

/* Write the name and shape of a piece in its file. A whole tensor has its own name and shape. A box
 * adds its place along each axis, "wte[0:64,0:128]"; a run adds its elements of the tensor or box,
 * "wte[0:16384]". The names of all kinds but values begin with the kind. */
static dtrain_result dtrain__piece_stored(const dtrain__held *held, char *name,
                                          dtrain__stored *stored)
{
    const dtrain_piece *piece = &held->piece, whole = dtrain__piece_whole(held->shape);
    const bool boxed = !dtrain__box_same(piece, &whole), value = held->kind == DTRAIN_STATE_VALUE;
    const bool run = piece->count != dtrain__box_count(piece);
    char where[200] = "", range[48] = "";
    stored->dims = run ? 1 : 0;
    stored->shape[0] = piece->count;
    for (int d = 0; d < 4 && (d == 0 || piece->length[d]); d++) {
        const size_t used = strlen(where);
        if (!run) stored->shape[stored->dims++] = piece->length[d];
        if (boxed)
            snprintf(where + used, sizeof where - used, "%s%lld:%lld", d ? "," : "[",
                     (long long)piece->first[d], (long long)(piece->first[d] + piece->length[d]));
    }
    if (run)
        snprintf(range, sizeof range, "[%lld:%lld]", (long long)piece->offset,
                 (long long)(piece->offset + piece->count));
    const int length = snprintf(name, DTRAIN__TENSOR_NAME, "%s%s%s%s%s%s",
                                value ? "" : dtrain__state_kind_name((uint32_t)held->kind),
                                value ? "" : ".", held->name, where, boxed ? "]" : "", range);
    if (length > 0 && length < DTRAIN__TENSOR_NAME) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                       "the name \"%.100s...\" is too long for a file of tensors, which takes %d "
                       "bytes with what is added here",
                       held->name, DTRAIN__TENSOR_NAME - 1);
}

/* Write the header of a file: what it holds, and the metadata by which readers know it. */
static dtrain_result dtrain__file_header(const dtrain_checkpoint *c, const dtrain__write_file *file,
                                         dtrain__text *text)
{
    static const char metadata[] = "{\"format\":\"pt\",\"writer\":\"dtrain checkpoint\"}";
    dtrain__stored *stored = (dtrain__stored *)dtrain__alloc(
        &c->allocator, file->count, sizeof *stored, "the header of a file");
    char(*names)[DTRAIN__TENSOR_NAME] = (char(*)[DTRAIN__TENSOR_NAME])dtrain__alloc(
        &c->allocator, file->count, sizeof *names, "the header of a file");
    dtrain_result result = stored && names ? DTRAIN_OK : DTRAIN_ERROR_MEMORY;
    for (size_t i = 0; i < file->count && result == DTRAIN_OK; i++) {
        const dtrain__write_piece *piece = &c->pieces[file->first + i];
        result = dtrain__piece_stored(piece->held, names[i], &stored[i]);
        stored[i].name = names[i];
        stored[i].dtype = (uint32_t)piece->held->dtype;
        stored[i].begin = piece->at;
        stored[i].end = piece->at + dtrain__piece_bytes(piece);
    }
    if (result == DTRAIN_OK)
        result = dtrain__safetensors_write(text, stored, file->count, metadata);
    dtrain__free(&c->allocator, names, file->count, sizeof *names);
    dtrain__free(&c->allocator, stored, file->count, sizeof *stored);
    return result;
}

/* Write a piece, block by block, with the checksums into the list. A block that is in a device's
 * memory comes through `bounce`; NULL: none is. */
static dtrain_result dtrain__piece_write(const dtrain_checkpoint *c, int file, const char *path,
                                         uint64_t data, const dtrain__write_piece *piece,
                                         char *bounce, dtrain__text *list)
{
    const uint64_t bytes = dtrain__piece_bytes(piece);
    for (uint64_t done = 0; done < bytes; done += DTRAIN__BLOCK) {
        const size_t count = bytes - done < DTRAIN__BLOCK ? (size_t)(bytes - done) : DTRAIN__BLOCK;
        const char *block = (const char *)piece->from + done;
        if (bounce) {
            DTRAIN__TRY(dtrain_device_copy(c->desc.state->device, bounce, block, count));
            block = bounce;
        }
        dtrain__text_add(list, "%08x", dtrain__crc32c(0, block, count));
        DTRAIN__TRY(dtrain__storage_write(c->desc.storage, file, path, block, count,
                                          data + piece->at + done));
    }
    return DTRAIN_OK;
}

/* Write a file, bring it to the disk, and add it to the list. */
static dtrain_result dtrain__tensors_write(dtrain_checkpoint *c, const char *directory,
                                           const dtrain__write_file *plan, char *bounce,
                                           dtrain__text *list)
{
    char path[2 * DTRAIN__PATH], name[64];
    dtrain__text header;
    int file;
    memset(&header, 0, sizeof header);
    header.allocator = &c->allocator;
    snprintf(name, sizeof name, "%s-%05d.safetensors", plan == c->files ? "model" : "state",
             c->rank);
    snprintf(path, sizeof path, "%s/%s", directory, name);
    dtrain_result result = dtrain__file_header(c, plan, &header);
    if (result == DTRAIN_OK)
        result = dtrain__storage_open(c->desc.storage, path, DTRAIN_STORAGE_CREATE, &file);
    if (result == DTRAIN_OK) {
        dtrain__text_add(list,
                         "%s\n  {\"name\": \"%s\", \"bytes\": %llu, \"rank\": %d, "
                         "\"pieces\": [",
                         plan == c->files || !c->files[0].count ? "" : ",", name,
                         (unsigned long long)(header.bytes + plan->bytes), c->rank);
        result = dtrain__storage_write(c->desc.storage, file, path, header.at, header.bytes, 0);
        for (size_t i = 0; i < plan->count && result == DTRAIN_OK; i++) {
            const dtrain__write_piece *piece = &c->pieces[plan->first + i];
            const dtrain_piece *box = &piece->held->piece;
            const dtrain_piece whole = dtrain__piece_whole(piece->held->shape);
            dtrain__text_add(list, "%s\n   [%lld, %lld, %lld, %llu, \"", i ? "," : "",
                             (long long)piece->held->tensor, (long long)box->offset,
                             (long long)box->count, (unsigned long long)(header.bytes + piece->at));
            result = dtrain__piece_write(c, file, path, header.bytes, piece, bounce, list);
            dtrain__text_add(list, "\"");
            for (int d = 0; d < 4 && !dtrain__box_same(box, &whole); d++)
                dtrain__text_add(list, ", %lld, %lld", (long long)box->first[d],
                                 (long long)box->length[d]);
            dtrain__text_add(list, "]");
        }
        dtrain__text_add(list, "]}");
        result = dtrain__storage_finish(c->desc.storage, file, path, result);
        c->bytes += header.bytes + plan->bytes;
    }
    dtrain__text_free(&header);
    return result;
}

/* Put this rank's list of files where rank 0 looks for it, by a rename: what has the name is
 * whole. */
static dtrain_result dtrain__list_write(const dtrain_checkpoint *c, const char *directory,
                                        const dtrain__text *list)
{
    char path[2 * DTRAIN__PATH], tmp[2 * DTRAIN__PATH];
    if (list->failed) return DTRAIN_ERROR_MEMORY;
    snprintf(path, sizeof path, "%s/rank-%05d.json", directory, c->rank);
    snprintf(tmp, sizeof tmp, "%s/rank-%05d.tmp", directory, c->rank);
    DTRAIN__TRY(dtrain__storage_put(c->desc.storage, tmp, list->at, list->bytes));
    return dtrain__storage_rename(c->desc.storage, tmp, path);
}

/* Write what was planned to step-N.tmp, which is there. */
DTRAIN__PRIVATE dtrain_result dtrain__save_write(dtrain_checkpoint *c)
{
    char directory[DTRAIN__PATH], *bounce = NULL;
    dtrain__text list;
    const bool direct = c->desc.background || c->desc.state->device->ops->host_memory;
    dtrain_result result = DTRAIN_OK;
    memset(&list, 0, sizeof list);
    list.allocator = &c->allocator;
    c->bytes = 0;
    dtrain__step_path(directory, c->desc.directory, c->step, ".tmp");
    if (!direct) {
        bounce = (char *)dtrain__alloc(&c->allocator, DTRAIN__BLOCK, 1, "a bounce buffer");
        if (!bounce) return DTRAIN_ERROR_MEMORY;
    }
    dtrain__text_add(&list, "{\"files\": [");
    for (int i = 0; i < 2 && result == DTRAIN_OK; i++)
        if (c->files[i].count)
            result = dtrain__tensors_write(c, directory, &c->files[i], bounce, &list);
    dtrain__text_add(&list, "]");
    dtrain__seal(&list);
    if (result == DTRAIN_OK) result = dtrain__list_write(c, directory, &list);
    dtrain__text_free(&list);
    dtrain__free(&c->allocator, bounce, DTRAIN__BLOCK, 1);
    return result;
}
