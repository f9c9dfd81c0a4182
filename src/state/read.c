/* Reading pieces
 *
 *     held      a piece as a file has it: a checkpoint's, or a whole tensor of weights
 *     target    the tensor and piece that this rank wants
 *
 * The elements that both have are read block by block and copied to the target. Each block is
 * checked if it has a checksum. A block that the target wants whole goes straight to its place, if
 * the target is host memory: a rank never has more of a tensor in memory than its own pieces and
 * one block. 16-bit elements that become fp32 are read to the upper half of their room and widened
 * from the first one on: a widened element covers only bytes of elements that are widened. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/crc32c_internal.h"
#include "core/dtype.h"
#include "core/log.h"
#include "core/result.h"
#include "device/backend.h"
#include "device/device.h"
#include "state/box_internal.h"
#include "state/read_internal.h"
#include "state/safetensors_internal.h"
#include "state/state_internal.h"
#include "state/storage_internal.h"

DTRAIN__PRIVATE dtrain_result dtrain__reader_begin(dtrain__reader *reader,
                                                   const dtrain_state *state,
                                                   const dtrain_storage *storage)
{
    reader->storage = storage;
    reader->device = state->device;
    reader->file = -1;
    reader->block = (char *)dtrain__alloc(&state->allocator, DTRAIN__BLOCK, 1, "a block");
    return reader->block ? DTRAIN_OK : DTRAIN_ERROR_MEMORY;
}

DTRAIN__PRIVATE void dtrain__reader_end(dtrain__reader *reader, const dtrain_state *state)
{
    if (reader->block && reader->file >= 0)
        (void)reader->storage->close(reader->storage->user, reader->file);
    reader->file = -1;
    dtrain__free(&state->allocator, reader->block, DTRAIN__BLOCK, 1);
    reader->block = NULL;
}

/* Read elements first to first + count of a piece, widened to fp32 or as they are. If the piece has
 * checksums, the elements must be one whole block. */
DTRAIN__PRIVATE dtrain_result dtrain__elements_read(dtrain__reader *reader, const char *path,
                                                    const dtrain__held *held, bool widen,
                                                    int64_t first, int64_t count, char *to)
{
    const size_t each = dtrain__stored_bytes(held->tensor.dtype), bytes = (size_t)count * each;
    const uint64_t at = (uint64_t)first * each;
    char digits[DTRAIN__CRC_DIGITS + 1];
    char *from = widen ? to + (size_t)count * sizeof(float) - bytes : to;
    const dtrain_storage *storage = reader->storage;
    if (reader->file < 0 || strcmp(reader->opened, path) != 0) {
        if (reader->file >= 0) (void)storage->close(storage->user, reader->file);
        reader->file = -1;
        DTRAIN__TRY(dtrain__storage_open(storage, path, DTRAIN_STORAGE_READ, &reader->file));
        snprintf(reader->opened, sizeof reader->opened, "%s", path);
    }
    DTRAIN__TRY(
        dtrain__storage_read(storage, reader->file, path, from, bytes, (uint64_t)held->at + at));
    reader->bytes += bytes;
    if (held->crc) {
        snprintf(digits, sizeof digits, "%08x", dtrain__crc32c(0, from, bytes));
        if (memcmp(digits, held->crc + at / DTRAIN__BLOCK * DTRAIN__CRC_DIGITS,
                   DTRAIN__CRC_DIGITS) != 0)
            return dtrain_fail(
                DTRAIN_ERROR_DATA,
                "%s is damaged: its %zu bytes from %llu on, of the %s of \"%s\", do not have "
                "the checksum of its header",
                path, bytes, (unsigned long long)((uint64_t)held->at + at),
                dtrain__state_kind_name(held->tensor.kind), dtrain__short(held->tensor.name));
    }
    for (int64_t i = 0; i < count && from > to; i++) {
        uint16_t low;
        memcpy(&low, from + (size_t)i * sizeof low, sizeof low);
        const float x = dtrain_half_to_f32((dtrain_dtype)held->tensor.dtype, low);
        memcpy(to + (size_t)i * sizeof x, &x, sizeof x);
    }
    return DTRAIN_OK;
}

/* Read the elements that a piece shares with the target. Elements have the same order in both, so
 * every block is read once. A scale that is not 0 adds the elements, times the scale, to the
 * target's sums, which are fp32 in host memory. */
DTRAIN__PRIVATE dtrain_result dtrain__piece_read(dtrain__reader *reader, const char *path,
                                                 const dtrain__held *held,
                                                 const dtrain_state_tensor *target, float scale)
{
    const dtrain_piece *a = &held->tensor.piece, *b = &target->piece;
    const bool widen = held->tensor.dtype != target->dtype;
    const bool direct = scale == 0 && reader->device->ops->host_memory;
    const size_t each = dtrain__stored_bytes(target->dtype); /* in the block */
    const int64_t block = (int64_t)(DTRAIN__BLOCK / each);
    dtrain_piece common;
    if (!dtrain__piece_common(a, b, &common)) return DTRAIN_OK;
    const int64_t end = common.offset + common.count;
    const int64_t last = dtrain__piece_place(a, &common, end - 1) + 1;
    reader->low = reader->high = 0;
    for (int64_t i = common.offset, count; i < end; i += count) {
        const int64_t from = dtrain__piece_place(a, &common, i);
        char *to = (char *)target->memory + (size_t)dtrain__piece_place(b, &common, i) * each;
        const int64_t first = from / block * block;
        const int64_t low = held->crc ? first : from;
        const int64_t high = dtrain__min(first + block, held->crc ? a->count : last);
        count = dtrain__min(dtrain__piece_span(a, &common, i), dtrain__piece_span(b, &common, i));
        count = dtrain__min(dtrain__min(count, end - i), high - from);
        if (direct && low == from && high == from + count) {
            DTRAIN__TRY(dtrain__elements_read(reader, path, held, widen, low, count, to));
            continue;
        }
        if (from >= reader->high) {
            DTRAIN__TRY(
                dtrain__elements_read(reader, path, held, widen, low, high - low, reader->block));
            reader->low = low;
            reader->high = high;
        }
        const char *block_at = reader->block + (size_t)(from - reader->low) * each;
        if (scale == 0)
            DTRAIN__TRY(dtrain_device_copy(reader->device, to, block_at, (size_t)count * each));
        for (int64_t e = 0; e < count && scale != 0; e++)
            ((float *)(void *)to)[e] += scale * ((const float *)(const void *)block_at)[e];
    }
    return DTRAIN_OK;
}

/* ---- Does it fit? -----------------------------------------------------------------------------*/

/* Add a name to a list, if it is one of the first six and there is room for all of it. */
DTRAIN__PRIVATE void dtrain__name_add(dtrain__name_list *list, const char *format, ...)
{
    const size_t used = strlen(list->text);
    const int room = (int)(sizeof list->text - sizeof ", , ...") - (int)used;
    char one[sizeof list->text];
    va_list args;
    va_start(args, format);
    const int bytes = vsnprintf(one, sizeof one, format, args);
    va_end(args);
    if (list->count == 7) return;
    list->count = used && bytes > room ? 7 : list->count + 1;
    snprintf(list->text + used, sizeof list->text - used, "%s%s", used ? ", " : "",
             list->count == 7 ? "..." : one);
}

/* Write the first lists as a sentence; false: they are empty. */
DTRAIN__PRIVATE bool dtrain__difference_text(const dtrain__name_list *lists, int count, char *text,
                                             size_t room)
{
    static const char *const titles[DTRAIN__DIFFERENCES] = {
        "of another model",
        "missing in it",
        "of another shape or type",
        "only in it",
        "of other settings",
        "begins anew",
        "left out",
        "the mean over the ranks that saved it"};
    size_t used = 0;
    *text = 0;
    for (int i = 0; i < count && used < room; i++)
        if (lists[i].count)
            used += (size_t)snprintf(text + used, room - used, "%s%s: %s", used ? "; " : "",
                                     titles[i], lists[i].text);
    return used > 0;
}
