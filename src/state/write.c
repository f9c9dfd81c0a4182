/* Writing a rank's files
 *
 *     plan        once: where in which of two files each piece goes. Values have a file of their
 *                 own, because programs read them alone as well
 *     snapshot    copy these pieces to host memory, for a save in the background
 *     write       files, block by block with their checksums; the header, which has these, comes
 *                 last, and a rename then says that the file is whole and on the disk
 *
 * Nothing here communicates: state/union.c has chosen who writes which piece. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/crc32c_internal.h"
#include "core/json_internal.h"
#include "core/log.h"
#include "core/result.h"
#include "state/box_internal.h"
#include "state/checkpoint_internal.h"
#include "state/safetensors_internal.h"
#include "state/state_internal.h"
#include "state/storage_internal.h"
#include "device/backend.h"

#ifdef __x86_64__
#include <emmintrin.h>
#endif

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

/* Make the header of a file: what it holds, and the metadata by which readers know it. The length
 * does not depend on the checksums. */
static dtrain_result dtrain__file_header(const dtrain_checkpoint *c, dtrain__write_file *file)
{
    const size_t prefix = sizeof DTRAIN__PIECE_KEY - 1;
    dtrain__stored *stored = (dtrain__stored *)dtrain__alloc(
        &c->allocator, file->count, sizeof *stored, "the header of a file");
    char(*keys)[sizeof DTRAIN__PIECE_KEY + DTRAIN__TENSOR_NAME] =
        (char(*)[sizeof DTRAIN__PIECE_KEY + DTRAIN__TENSOR_NAME])
            dtrain__alloc(&c->allocator, file->count, sizeof *keys, "the header of a file");
    dtrain__text metadata, value;
    dtrain_result result = stored && keys ? DTRAIN_OK : DTRAIN_ERROR_MEMORY;
    memset(&metadata, 0, sizeof metadata);
    metadata.allocator = &c->allocator;
    value = metadata;
    dtrain__text_add(&metadata, "{\"format\":\"pt\",\"writer\":\"dtrain checkpoint\"");
    for (size_t i = 0; i < file->count && result == DTRAIN_OK; i++) {
        const dtrain__write_piece *piece = &c->pieces[file->first + i];
        const dtrain_state_tensor *tensor = &piece->held->tensor;
        int64_t numbers[16] = {tensor->kind, tensor->own};
        memcpy(numbers + 2, tensor->shape, sizeof tensor->shape);
        memcpy(numbers + 6, &tensor->piece, sizeof tensor->piece);
        memcpy(keys[i], DTRAIN__PIECE_KEY, prefix);
        result = dtrain__piece_stored(tensor, keys[i] + prefix, &stored[i]);
        stored[i].name = keys[i] + prefix;
        stored[i].dtype = tensor->dtype;
        stored[i].begin = piece->at;
        stored[i].end = piece->at + piece->bytes;
        value.bytes = 0;
        for (int n = 0; n < 16; n++) dtrain__text_add(&value, "%lld ", (long long)numbers[n]);
        for (size_t b = 0; b < dtrain__blocks_of(piece->bytes); b++)
            dtrain__text_add(&value, "%08x", piece->crc[b]);
        dtrain__text_add(&value, " %s", tensor->name);
        dtrain__text_add(&metadata, ",");
        dtrain__text_add_string(&metadata, keys[i]);
        dtrain__text_add(&metadata, ":");
        dtrain__text_add_string(&metadata, value.failed ? "" : value.at);
        metadata.failed = metadata.failed || value.failed;
    }
    dtrain__text_add(&metadata, "}");
    if (result == DTRAIN_OK && metadata.failed) result = DTRAIN_ERROR_MEMORY;
    file->header.allocator = &c->allocator;
    file->header.bytes = 0;
    if (result == DTRAIN_OK)
        result = dtrain__safetensors_write(&file->header, stored, file->count, metadata.at);
    dtrain__text_free(&value);
    dtrain__text_free(&metadata);
    dtrain__free(&c->allocator, keys, file->count, sizeof *keys);
    dtrain__free(&c->allocator, stored, file->count, sizeof *stored);
    return result;
}

/* Plan both files, wide elements first, so that all are aligned, and make the memory that blocks
 * and snapshots are copied to. A tensor without elements has an entry in its file. */
DTRAIN__PRIVATE dtrain_result dtrain__save_plan(dtrain_checkpoint *c)
{
    dtrain_device *device = c->desc.state->device;
    size_t copied = 0;
    void *memory;
    for (size_t n = 0; n < 8 * c->held_count; n++) {
        const size_t round = n / c->held_count, each = (size_t)8 >> round % 4;
        const dtrain__held *held = &c->held[n % c->held_count];
        dtrain__write_file *file = &c->files[round / 4];
        if (held->rank != c->rank || (!held->tensor.piece.count && held->tensor.total) ||
            (held->tensor.kind != DTRAIN_STATE_VALUE) != (round >= 4) ||
            dtrain__state_bytes(held->tensor.dtype) != each)
            continue;
        if (!dtrain__grow(&c->allocator, (void **)&c->pieces, c->piece_count, &c->piece_room,
                          sizeof *c->pieces, "the plan of a save"))
            return DTRAIN_ERROR_MEMORY;
        const uint64_t bytes = (uint64_t)held->tensor.piece.count * each;
        const dtrain__write_piece piece = {held, bytes, file->bytes, NULL, NULL};
        if (!file->count++) file->first = c->piece_count;
        c->pieces[c->piece_count++] = piece;
        c->crc_count += dtrain__blocks_of(bytes);
        copied += dtrain__round_up((size_t)bytes, DTRAIN__CACHE_LINE);
        file->bytes += bytes;
    }
    c->crcs = (uint32_t *)dtrain__alloc(&c->allocator, c->crc_count, sizeof *c->crcs, "checksums");
    if (!c->crcs) return DTRAIN_ERROR_MEMORY;
    if (c->desc.background && copied) {
        DTRAIN__TRY(device->ops->host_alloc(device, copied, &memory));
        c->snapshot = (char *)memory;
        c->info.snapshot_bytes = copied;
    } else if (!device->ops->host_memory) {
        c->bounce = (char *)dtrain__alloc(&c->allocator, DTRAIN__BLOCK, 1, "a bounce buffer");
        if (!c->bounce) return DTRAIN_ERROR_MEMORY;
    }
    char *copy = c->snapshot;
    uint32_t *crc = c->crcs;
    for (size_t i = 0; i < c->piece_count; i++) {
        const uint64_t bytes = c->pieces[i].bytes;
        c->pieces[i].copy = copy;
        c->pieces[i].crc = crc;
        if (copy) copy += dtrain__round_up((size_t)bytes, DTRAIN__CACHE_LINE);
        crc += dtrain__blocks_of(bytes);
    }
    for (int f = 0; f < 2; f++) DTRAIN__TRY(dtrain__file_header(c, &c->files[f]));
    return DTRAIN_OK;
}

/* ---- Snapshot ---------------------------------------------------------------------------------*/

/* Copy past the cache: what training works with stays there, and the memory that is written need
 * not be read first. Of GPT-2's state (1.5 GB, Xeon) that takes 0.6 of memcpy's time. `to` is
 * aligned to 16 bytes. */
static void dtrain__copy_past_cache(char *to, const char *from, size_t bytes)
{
    size_t done = 0;
#ifdef __x86_64__
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

/* Write a piece behind the header of its file, block by block. */
static dtrain_result dtrain__piece_write(const dtrain_checkpoint *c, int file, const char *path,
                                         uint64_t data, const dtrain__write_piece *piece)
{
    const char *from = piece->copy ? piece->copy : (const char *)piece->held->tensor.memory;
    for (uint64_t done = 0; done < piece->bytes; done += DTRAIN__BLOCK) {
        const size_t count =
            (size_t)dtrain__min((int64_t)(piece->bytes - done), (int64_t)DTRAIN__BLOCK);
        const char *block = from + done;
        if (c->bounce) {
            DTRAIN__TRY(dtrain_device_copy(c->desc.state->device, c->bounce, block, count));
            block = c->bounce;
        }
        piece->crc[done / DTRAIN__BLOCK] = dtrain__crc32c(0, block, count);
        DTRAIN__TRY(dtrain__storage_write(c->folder.storage, file, path, block, count,
                                          data + piece->at + done));
    }
    return DTRAIN_OK;
}

/* Write what was planned to step-N.tmp, which is there. */
DTRAIN__PRIVATE dtrain_result dtrain__save_write(dtrain_checkpoint *c)
{
    const dtrain_storage *storage = c->folder.storage;
    const dtrain__file_path directory = dtrain__step_path(&c->folder, c->step, ".tmp");
    c->bytes = 0;
    for (int f = 0; f < 2; f++) {
        dtrain__write_file *plan = &c->files[f];
        const dtrain__file_path path = dtrain__tensors_path(directory.text, f, c->rank);
        const dtrain__file_path tmp =
            dtrain__path_in(directory.text, "%s-%05d.tmp", f ? "state" : "model", c->rank);
        const uint64_t data = plan->header.bytes; /* where it begins */
        dtrain_result result = DTRAIN_OK;
        int file;
        DTRAIN__TRY(dtrain__storage_open(storage, tmp.text, DTRAIN_STORAGE_CREATE, &file));
        for (size_t i = 0; i < plan->count && result == DTRAIN_OK; i++)
            result = dtrain__piece_write(c, file, tmp.text, data, &c->pieces[plan->first + i]);
        if (result == DTRAIN_OK) result = dtrain__file_header(c, plan);
        if (result == DTRAIN_OK)
            result =
                dtrain__storage_write(storage, file, tmp.text, plan->header.at, (size_t)data, 0);
        DTRAIN__TRY(dtrain__storage_finish(storage, file, tmp.text, result));
        DTRAIN__TRY(dtrain__storage_rename(storage, tmp.text, path.text));
        c->bytes += data + plan->bytes;
    }
    return DTRAIN_OK;
}
