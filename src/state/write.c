/* Writing a rank's files
 *
 *     plan        once: where in which of two files each piece goes, and their headers. Values
 *                 have a file of their own, because programs read them alone as well
 *     snapshot    copy these pieces to host memory, for a save in the background
 *     write       files, block by block with their checksums, and the list of what they hold
 *
 * Nothing here communicates: state/union.c has chosen who writes which piece. */

#define DTRAIN__INTRINSICS
#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/crc32c_internal.h"
#include "core/log.h"
#include "core/result.h"
#include "state/box_internal.h"
#include "state/checkpoint_internal.h"
#include "state/safetensors_internal.h"
#include "state/state_internal.h"
#include "state/storage_internal.h"
#include "device/backend.h"

/* ---- Plan -------------------------------------------------------------------------------------*/

/* Write the name and shape of a piece in its file. A whole tensor has its own name and shape. A box
 * adds its place along each axis, "wte[0:64,0:128]"; a run adds its elements of the tensor or box,
 * "wte[0:16384]". The names of all kinds but values begin with the kind. */
static dtrain_result dtrain__piece_stored(const dtrain_state_tensor *tensor, char *name,
                                          dtrain__stored *stored)
{
    const dtrain_piece *piece = &tensor->piece, whole = dtrain__piece_whole(tensor->shape);
    const bool boxed = !dtrain__box_same(piece, &whole), value = tensor->kind == DTRAIN_STATE_VALUE;
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
                                value ? "" : dtrain__state_kind_name(tensor->kind),
                                value ? "" : ".", tensor->name, where, boxed ? "]" : "", range);
    if (length > 0 && length < DTRAIN__TENSOR_NAME) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                       "the name \"%s\" is too long for a file of tensors, which takes %d "
                       "bytes with what is added here",
                       dtrain__short(tensor->name), DTRAIN__TENSOR_NAME - 1);
}

/* Make the header of a file: what it holds, and the metadata by which readers know it. */
static dtrain_result dtrain__file_header(const dtrain_checkpoint *c, dtrain__write_file *file)
{
    static const char metadata[] = "{\"format\":\"pt\",\"writer\":\"dtrain checkpoint\"}";
    dtrain__stored *stored = (dtrain__stored *)dtrain__alloc(
        &c->allocator, file->count, sizeof *stored, "the header of a file");
    char(*names)[DTRAIN__TENSOR_NAME] = (char(*)[DTRAIN__TENSOR_NAME])dtrain__alloc(
        &c->allocator, file->count, sizeof *names, "the header of a file");
    dtrain_result result = stored && names ? DTRAIN_OK : DTRAIN_ERROR_MEMORY;
    file->header.allocator = &c->allocator;
    for (size_t i = 0; i < file->count && result == DTRAIN_OK; i++) {
        const dtrain__write_piece *piece = &c->pieces[file->first + i];
        result = dtrain__piece_stored(&piece->held->tensor, names[i], &stored[i]);
        stored[i].name = names[i];
        stored[i].dtype = piece->held->tensor.dtype;
        stored[i].begin = piece->at;
        stored[i].end = piece->at + piece->bytes;
    }
    if (result == DTRAIN_OK)
        result = dtrain__safetensors_write(&file->header, stored, file->count, metadata);
    dtrain__free(&c->allocator, names, file->count, sizeof *names);
    dtrain__free(&c->allocator, stored, file->count, sizeof *stored);
    return result;
}

/* Make the memory that blocks and snapshots are copied to. */
static dtrain_result dtrain__copies_make(dtrain_checkpoint *c)
{
    dtrain_device *device = c->desc.state->device;
    size_t bytes = 0;
    void *memory;
    if (!c->desc.background && !device->ops->host_memory) {
        c->bounce = (char *)dtrain__alloc(&c->allocator, DTRAIN__BLOCK, 1, "a bounce buffer");
        return c->bounce ? DTRAIN_OK : DTRAIN_ERROR_MEMORY;
    }
    for (size_t i = 0; i < c->piece_count; i++)
        bytes += dtrain__round_up((size_t)c->pieces[i].bytes, DTRAIN__CACHE_LINE);
    if (!c->desc.background || !bytes) return DTRAIN_OK;
    DTRAIN__TRY(device->ops->host_alloc(device, bytes, &memory));
    c->snapshot = (char *)memory;
    c->info.snapshot_bytes = bytes;
    for (size_t i = 0, at = 0; i < c->piece_count; i++) {
        c->pieces[i].copy = c->snapshot + at;
        at += dtrain__round_up((size_t)c->pieces[i].bytes, DTRAIN__CACHE_LINE);
    }
    return DTRAIN_OK;
}

/* Plan both files. Wide elements come first, so that all are aligned. */
DTRAIN__PRIVATE dtrain_result dtrain__save_plan(dtrain_checkpoint *c)
{
    for (size_t n = 0; n < 8 * c->held_count; n++) {
        const size_t round = n / c->held_count, each = (size_t)8 >> round % 4;
        const dtrain__held *held = &c->held[n % c->held_count];
        dtrain__write_file *file = &c->files[round / 4];
        if (held->rank != c->rank || !held->tensor.piece.count ||
            (held->tensor.kind != DTRAIN_STATE_VALUE) != (round >= 4) ||
            dtrain__state_bytes(held->tensor.dtype) != each)
            continue;
        if (!dtrain__grow(&c->allocator, (void **)&c->pieces, c->piece_count, &c->piece_room,
                          sizeof *c->pieces, "the plan of a save"))
            return DTRAIN_ERROR_MEMORY;
        const uint64_t bytes = (uint64_t)held->tensor.piece.count * each;
        const dtrain__write_piece piece = {held, bytes, file->bytes, NULL};
        if (!file->count++) file->first = c->piece_count;
        c->pieces[c->piece_count++] = piece;
        file->bytes += bytes;
    }
    for (int f = 0; f < 2; f++)
        if (c->files[f].count) DTRAIN__TRY(dtrain__file_header(c, &c->files[f]));
    return dtrain__copies_make(c);
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

/* Copy all pieces to memory that stays as it is: all that a step pays. */
DTRAIN__PRIVATE dtrain_result dtrain__save_snapshot(dtrain_checkpoint *c)
{
    dtrain_device *device = c->desc.state->device;
    for (size_t i = 0; i < c->piece_count; i++) {
        const dtrain__write_piece *piece = &c->pieces[i];
        const char *from = (const char *)piece->held->tensor.memory;
        if (device->ops->host_memory)
            dtrain__copy_past_cache(piece->copy, from, (size_t)piece->bytes);
        else DTRAIN__TRY(dtrain_device_copy(device, piece->copy, from, (size_t)piece->bytes));
    }
    return DTRAIN_OK;
}

/* ---- Write ------------------------------------------------------------------------------------*/

/* Write a piece at byte `at` of its file, block by block, and its entry into the list. */
static dtrain_result dtrain__piece_write(const dtrain_checkpoint *c, int file, const char *path,
                                         uint64_t at, const dtrain__write_piece *piece,
                                         dtrain__text *list)
{
    const dtrain_state_tensor *tensor = &piece->held->tensor;
    const dtrain_piece *box = &tensor->piece, whole = dtrain__piece_whole(tensor->shape);
    const char *from = piece->copy ? piece->copy : (const char *)tensor->memory;
    dtrain__text_add(list, "[%lld, %lld, %lld, %llu, \"", (long long)piece->held->number,
                     (long long)box->offset, (long long)box->count, (unsigned long long)at);
    for (uint64_t done = 0; done < piece->bytes; done += DTRAIN__BLOCK) {
        const size_t count =
            (size_t)dtrain__min((int64_t)(piece->bytes - done), (int64_t)DTRAIN__BLOCK);
        const char *block = from + done;
        if (c->bounce) {
            DTRAIN__TRY(dtrain_device_copy(c->desc.state->device, c->bounce, block, count));
            block = c->bounce;
        }
        dtrain__text_add(list, "%08x", dtrain__crc32c(0, block, count));
        DTRAIN__TRY(dtrain__storage_write(c->folder.storage, file, path, block, count, at + done));
    }
    dtrain__text_add(list, "\"");
    for (int d = 0; d < 4 && !dtrain__box_same(box, &whole); d++)
        dtrain__text_add(list, ", %lld, %lld", (long long)box->first[d], (long long)box->length[d]);
    dtrain__text_add(list, "]");
    return DTRAIN_OK;
}

/* Write a file, bring it to the disk, and add it to the list. */
static dtrain_result dtrain__tensors_write(dtrain_checkpoint *c, const char *directory,
                                           const dtrain__write_file *plan, dtrain__text *list)
{
    const dtrain_storage *storage = c->folder.storage;
    const uint64_t data = plan->header.bytes; /* where it begins */
    char name[64];
    int file;
    snprintf(name, sizeof name, "%s-%05d.safetensors", plan == c->files ? "model" : "state",
             c->rank);
    const dtrain__file_path path = dtrain__path_in(directory, "%s", name);
    const dtrain__saved_file entry = {name, data + plan->bytes, c->rank};
    DTRAIN__TRY(dtrain__storage_open(storage, path.text, DTRAIN_STORAGE_CREATE, &file));
    if (plan != c->files && c->files[0].count) dtrain__text_add(list, ",");
    dtrain__manifest_file(list, &entry);
    dtrain_result result =
        dtrain__storage_write(storage, file, path.text, plan->header.at, (size_t)data, 0);
    for (size_t i = 0; i < plan->count && result == DTRAIN_OK; i++) {
        const dtrain__write_piece *piece = &c->pieces[plan->first + i];
        dtrain__text_add(list, "%s\n   ", i ? "," : "");
        result = dtrain__piece_write(c, file, path.text, data + piece->at, piece, list);
    }
    dtrain__text_add(list, "]}");
    c->bytes += entry.bytes;
    return dtrain__storage_finish(storage, file, path.text, result);
}

/* Put this rank's list of files where rank 0 polls for it, by a rename: a file of that name is
 * whole. */
static dtrain_result dtrain__list_write(const dtrain_checkpoint *c, const char *directory,
                                        const dtrain__text *list)
{
    const dtrain__file_path path = dtrain__path_in(directory, "rank-%05d.json", c->rank);
    const dtrain__file_path tmp = dtrain__path_in(directory, "rank-%05d.tmp", c->rank);
    if (list->failed) return DTRAIN_ERROR_MEMORY;
    DTRAIN__TRY(dtrain__storage_put(c->folder.storage, tmp.text, list->at, list->bytes));
    return dtrain__storage_rename(c->folder.storage, tmp.text, path.text);
}

/* Write what was planned to step-N.tmp, which is there. */
DTRAIN__PRIVATE dtrain_result dtrain__save_write(dtrain_checkpoint *c)
{
    const dtrain__file_path directory = dtrain__step_path(&c->folder, c->step, ".tmp");
    dtrain__text list;
    dtrain_result result = DTRAIN_OK;
    memset(&list, 0, sizeof list);
    list.allocator = &c->allocator;
    c->bytes = 0;
    dtrain__text_add(&list, "{\"files\": [");
    for (int f = 0; f < 2 && result == DTRAIN_OK; f++)
        if (c->files[f].count)
            result = dtrain__tensors_write(c, directory.text, &c->files[f], &list);
    dtrain__text_add(&list, "]");
    dtrain__seal(&list);
    if (result == DTRAIN_OK) result = dtrain__list_write(c, directory.text, &list);
    dtrain__text_free(&list);
    return result;
}
