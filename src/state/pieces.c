/* Pieces: which rank saves which part of a tensor, and how the header of a file describes it
 *
 * To save, the ranks make one plan together:
 *
 *     gather    every rank learns which tensors each rank lists, and which pieces of them
 *     check     the ranks that list a tensor agree on its shape and dtype
 *     choose    of the ranks that hold the same piece, the one that has the least to write
 *     check     the chosen pieces cover the tensor
 *
 * A parameter that the tensor axis does not cut exists once per tensor rank. Each tensor rank has a
 * copy, whole between the ranks of its data axis, and two copies can be sharded at different
 * places, because the parameters before it differ in length. Only copy 0 is written:
 *
 *     copy 0, 2 data ranks   | a a a a a a | b b b b |
 *     copy 1                 | a a a | b b b b b b b |    not written
 *
 * All ranks compute the same plan from the same lists, so they need no further agreement. The plan
 * is made once, when a directory is opened. The list of GPT-2 small has 460 entries of 180 bytes.
 *
 * To load, every rank reads the headers of all files. The metadata of a header has one text for
 * each piece of the file:
 *
 *     "piece:exp_avg.wte[0:16384]": "1 0 256 128 0 0 0 0 0 0 256 128 0 0 0 16384 8a9136aa wte"
 *
 * The text has the kind of the tensor, 1 if the tensor is private to a rank, the 4 numbers of the
 * tensor's shape, the piece (first index of its box on each of 4 axes, 4 lengths, first element and
 * length of its run), a checksum for each block of DTRAIN__BLOCK bytes, and the tensor's name. The
 * dtype and the place in the file stand in the header's entry of that name, and nowhere else. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/json_internal.h"
#include "core/log.h"
#include "core/result.h"
#include "comm/comm.h"
#include "comm/groups_internal.h"
#include "strategy/view_internal.h"
#include "state/box_internal.h"
#include "state/checkpoint_internal.h"
#include "state/safetensors_internal.h"
#include "state/state_internal.h"

#define DTRAIN__PIECE_ABOUT 256 /* bytes of a header that a piece takes, estimated */
#define DTRAIN__PIECE_KEY "piece:"

DTRAIN__PRIVATE uint64_t dtrain__held_bytes(const dtrain__held *held)
{
    return (uint64_t)held->tensor.piece.count * dtrain__state_bytes(held->tensor.dtype);
}

/* ---- Order and checks -------------------------------------------------------------------------*/

/* Order pieces by kind and name of their tensors. */
static int dtrain__tensor_order(const dtrain__held *a, const dtrain__held *b)
{
    if (a->tensor.kind != b->tensor.kind) return a->tensor.kind < b->tensor.kind ? -1 : 1;
    return strcmp(a->tensor.name, b->tensor.name);
}

/* Order by tensor, then by piece. Pieces of a tensor that every rank has privately are ordered by
 * rank first. */
DTRAIN__PRIVATE int dtrain__held_order(const void *left, const void *right)
{
    const dtrain__held *a = (const dtrain__held *)left, *b = (const dtrain__held *)right;
    const int ranks = (a->rank > b->rank) - (a->rank < b->rank);
    const int tensors = dtrain__tensor_order(a, b);
    if (tensors || (a->tensor.own && ranks)) return tensors ? tensors : ranks;
    const int pieces = dtrain__piece_order(&a->tensor.piece, &b->tensor.piece);
    return pieces ? pieces : ranks;
}

/* Set pieces->count to the number of pieces that the first tensor of a sorted list has. Fail with
 * `differ` if two ranks describe the tensor differently. */
static dtrain_result dtrain__pieces_count(const char *where, dtrain_result differ,
                                          dtrain__held *pieces, size_t room)
{
    const dtrain_state_tensor *tensor = &pieces->tensor;
    size_t count = 1;
    for (; count < room && dtrain__tensor_order(pieces, &pieces[count]) == 0; count++) {
        char text[2][120];
        if (dtrain__state_alike(tensor, &pieces[count].tensor)) continue;
        for (int i = 0; i < 2; i++) {
            const dtrain__held *held = &pieces[i ? count : 0];
            const int64_t *shape = held->tensor.shape;
            snprintf(text[i], sizeof text[i], "rank %d: %s [%lld, %lld, %lld, %lld]%s",
                     (int)held->rank, dtrain__stored_name(held->tensor.dtype), (long long)shape[0],
                     (long long)shape[1], (long long)shape[2], (long long)shape[3],
                     held->tensor.own ? ", its own" : "");
        }
        return dtrain_fail(differ,
                           "%s: ranks list the %s of \"%s\" in different ways (%s; %s), expected "
                           "the same dtype and shape from all that list it",
                           where, dtrain__state_kind_name(tensor->kind),
                           dtrain__short(tensor->name), text[0], text[1]);
    }
    pieces->count = count;
    return DTRAIN_OK;
}

/* Check that the sorted pieces of a shared tensor do not overlap, and that together they cover it.
 * A piece is compared with the pieces whose boxes begin before its own box ends. */
static dtrain_result dtrain__pieces_check(const char *where, const dtrain__held *pieces)
{
    const dtrain_state_tensor *tensor = &pieces->tensor;
    int64_t sum = 0;
    bool overlap = false;
    for (size_t i = 0; i < pieces->count && !overlap; i++) {
        const dtrain_piece *a = &pieces[i].tensor.piece;
        overlap = a->count > tensor->total - sum;
        if (!overlap) sum += a->count;
        for (size_t k = i + 1; k < pieces->count && !overlap; k++) {
            const dtrain_piece *b = &pieces[k].tensor.piece;
            dtrain_piece common;
            if (b->first[0] >= a->first[0] + a->length[0]) break;
            overlap = a->count && b->count &&
                      (dtrain__box_same(a, b) ? b->offset < a->offset + a->count
                                              : dtrain__piece_common(a, b, &common));
        }
    }
    if (tensor->own || (!overlap && sum == tensor->total)) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_DATA,
                       "%s: the pieces of the %s of \"%s\" %s: they have %lld of its %lld elements",
                       where, dtrain__state_kind_name(tensor->kind), dtrain__short(tensor->name),
                       overlap ? "overlap" : "leave a hole", (long long)sum,
                       (long long)tensor->total);
}

/* ---- Saving: the plan of all ranks ------------------------------------------------------------*/

/* Gather the lists of all ranks: entries, and names. Every rank pads both to the length of the
 * longest list. */
static dtrain_result dtrain__pieces_gather(dtrain_checkpoint *c)
{
    const dtrain_state *state = c->desc.state;
    const size_t ranks = (size_t)c->ranks, words = sizeof(dtrain__held) / sizeof(int64_t);
    const int copy = dtrain__groups_of(state->desc.strategy).tensor_rank;
    int64_t most[2] = {(int64_t)state->tensor_count, 8};
    for (size_t i = 0; i < state->tensor_count; i++)
        most[1] += (int64_t)strlen(state->tensors[i].name) + 1;
    DTRAIN__TRY(
        dtrain_all_reduce(c->comm, most, most, 2, DTRAIN_DTYPE_I64, DTRAIN_REDUCE_MAX, NULL));
    const size_t entries = (size_t)most[0], name_words = (size_t)most[1] / sizeof(int64_t);
    const size_t part = name_words * sizeof(int64_t);
    /* the last part is the send buffer of this rank */
    c->held_room = (ranks + 1) * entries;
    c->held_names_bytes = (ranks + 1) * part;
    c->held = (dtrain__held *)dtrain__alloc(&c->allocator, c->held_room, sizeof *c->held,
                                            "the lists of all ranks");
    c->held_names =
        (char *)dtrain__alloc(&c->allocator, c->held_names_bytes, 1, "the lists of all ranks");
    DTRAIN__TRY(dtrain__agree(c->comm, c->held && c->held_names ? DTRAIN_OK : DTRAIN_ERROR_MEMORY));
    dtrain__held *mine = c->held + ranks * entries;
    for (size_t i = 0; i < entries; i++) mine[i].rank = -1; /* padding */
    char *const names = c->held_names + ranks * part;
    for (size_t i = 0, at = 0; i < state->tensor_count; i++) {
        const dtrain_state_tensor *tensor = &state->tensors[i];
        const dtrain_piece whole = dtrain__piece_whole(tensor->shape);
        const size_t bytes = strlen(tensor->name) + 1;
        memcpy(names + at, tensor->name, bytes);
        mine[i].tensor = *tensor;
        mine[i].rank = c->rank;
        mine[i].at = (int64_t)at;
        /* arrays of the program have no copies: only the program knows which rank has which part */
        if (tensor->kind != DTRAIN_STATE_HOST && dtrain__box_same(&tensor->piece, &whole))
            mine[i].copy = copy;
        at += bytes;
    }
    DTRAIN__TRY(dtrain_all_gather(c->comm, mine, c->held, entries * words, DTRAIN_DTYPE_I64, NULL));
    DTRAIN__TRY(
        dtrain_all_gather(c->comm, names, c->held_names, name_words, DTRAIN_DTYPE_I64, NULL));
    for (size_t i = 0; i < ranks * entries; i++) {
        dtrain__held held = c->held[i];
        if (held.rank < 0) continue;
        held.tensor.name = c->held_names + (size_t)held.rank * part + held.at;
        c->held[c->held_count++] = held;
    }
    return DTRAIN_OK;
}

/* Choose the ranks that write. Collective. Of entries that differ in the rank only, the entry of
 * the rank with the least to write stays; no entry stays if copy 0 lacks the piece. */
DTRAIN__PRIVATE dtrain_result dtrain__pieces_choose(dtrain_checkpoint *c)
{
    static const char call[] = "dtrain_checkpoint_open";
    uint64_t load[DTRAIN_MAX_RANKS] = {0}; /* bytes that each rank writes */
    size_t stay = 0;                       /* entries */
    DTRAIN__TRY(dtrain__pieces_gather(c));
    dtrain__held *const held = c->held;
    qsort(held, c->held_count, sizeof *held, dtrain__held_order);
    for (size_t i = 0, end, next; i < c->held_count; i = end) {
        const bool own = held[i].tensor.own;
        const size_t first = stay; /* entry of this tensor */
        DTRAIN__TRY(dtrain__pieces_count(call, DTRAIN_ERROR_MISMATCH, &held[i], c->held_count - i));
        end = i + held[i].count;
        for (size_t k = i; k < end; k = next) {
            const dtrain_piece *piece = &held[k].tensor.piece;
            size_t least = k;
            bool stays = own; /* or copy 0 has the piece */
            for (next = k; next < end && (next == k || !own) &&
                           dtrain__piece_order(piece, &held[next].tensor.piece) == 0;
                 next++) {
                if (load[held[next].rank] < load[held[least].rank]) least = next;
                stays = stays || held[next].copy == 0;
            }
            if (!stays) continue;
            load[held[least].rank] += dtrain__held_bytes(&held[k]) + DTRAIN__PIECE_ABOUT;
            held[stay++] = held[least];
        }
        if (stay == first) continue;
        held[first].count = stay - first;
        DTRAIN__TRY(dtrain__pieces_check(call, &held[first]));
    }
    c->held_count = stay;
    return DTRAIN_OK;
}

/* ---- Saving: headers --------------------------------------------------------------------------*/

/* Append the name that a piece has in its file, and fill the piece's entry in the header. A whole
 * tensor has its own name and shape. A box adds its place along each axis, "wte[0:64,0:128]"; a run
 * adds its elements of the tensor or box, "wte[0:16384]". All kinds but values add the kind before
 * the name. */
static dtrain_result dtrain__piece_stored(const dtrain__held *held, dtrain__text *name,
                                          dtrain__stored *stored)
{
    const dtrain_state_tensor *tensor = &held->tensor;
    const dtrain_piece *part = &tensor->piece, whole = dtrain__piece_whole(tensor->shape);
    const bool boxed = !dtrain__box_same(part, &whole), value = tensor->kind == DTRAIN_STATE_VALUE;
    const bool run = part->count != dtrain__box_count(part);
    const size_t before = name->bytes;
    stored->dtype = tensor->dtype;
    stored->begin = (uint64_t)held->at;
    stored->end = stored->begin + dtrain__held_bytes(held);
    stored->dims = run ? 1 : 0;
    stored->shape[0] = part->count;
    dtrain__text_add(name, "%s%s%s", value ? "" : dtrain__state_kind_name(tensor->kind),
                     value ? "" : ".", tensor->name);
    for (int d = 0; d < 4 && (d == 0 || part->length[d]); d++) {
        if (!run) stored->shape[stored->dims++] = part->length[d];
        if (boxed)
            dtrain__text_add(name, "%c%lld:%lld", d ? ',' : '[', (long long)part->first[d],
                             (long long)(part->first[d] + part->length[d]));
    }
    if (boxed) dtrain__text_add(name, "]");
    if (run)
        dtrain__text_add(name, "[%lld:%lld]", (long long)part->offset,
                         (long long)(part->offset + part->count));
    if (name->failed) return DTRAIN_ERROR_MEMORY;
    stored->name = name->at + before;
    if (name->bytes - before < DTRAIN__TENSOR_NAME) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                       "the name \"%s\" is too long for a file of tensors, which takes %d "
                       "bytes with what is added here",
                       dtrain__short(tensor->name), DTRAIN__TENSOR_NAME - 1);
}

/* Write the header of a file that this rank saves. Its length does not depend on the checksums. */
DTRAIN__PRIVATE dtrain_result dtrain__file_header(const dtrain_checkpoint *c,
                                                  dtrain__write_file *file)
{
    dtrain__text texts[3], *metadata = &texts[0], *key = &texts[1], *value = &texts[2];
    dtrain_result result = DTRAIN_OK;
    memset(texts, 0, sizeof texts);
    for (int i = 0; i < 3; i++) texts[i].allocator = &c->allocator;
    file->header.allocator = &c->allocator;
    file->header.bytes = 0;
    dtrain__text_add(metadata, "{\"format\":\"pt\",\"writer\":\"dtrain checkpoint\"");
    for (size_t i = 0; i < file->count && result == DTRAIN_OK; i++) {
        const dtrain__held *held = &c->held[file->first + i];
        const dtrain_state_tensor *tensor = &held->tensor;
        dtrain__stored stored;
        int64_t numbers[16] = {tensor->kind, tensor->own};
        memcpy(numbers + 2, tensor->shape, sizeof tensor->shape);
        memcpy(numbers + 6, &tensor->piece, sizeof tensor->piece);
        key->bytes = value->bytes = 0;
        dtrain__text_add(key, DTRAIN__PIECE_KEY);
        result = dtrain__piece_stored(held, key, &stored);
        for (int n = 0; n < 16; n++) dtrain__text_add(value, "%lld ", (long long)numbers[n]);
        dtrain__text_append(value, held->crc,
                            dtrain__blocks_of(dtrain__held_bytes(held)) * DTRAIN__CRC_DIGITS);
        dtrain__text_add(value, " %s", tensor->name);
        if (result == DTRAIN_OK && value->failed) result = DTRAIN_ERROR_MEMORY;
        if (result != DTRAIN_OK) break;
        dtrain__safetensors_add(&file->header, &stored);
        dtrain__text_add(metadata, ",");
        dtrain__text_add_string(metadata, key->at);
        dtrain__text_add(metadata, ":");
        dtrain__text_add_string(metadata, value->at);
    }
    dtrain__text_add(metadata, "}");
    if (result == DTRAIN_OK && metadata->failed) result = DTRAIN_ERROR_MEMORY;
    if (result == DTRAIN_OK)
        result = dtrain__safetensors_end(&file->header, metadata->at, file->bytes);
    for (int i = 0; i < 3; i++) dtrain__text_free(&texts[i]);
    return result;
}

/* ---- Loading ----------------------------------------------------------------------------------*/

/* Read the text that describes a piece; `file` is the number of its file. */
static bool dtrain__piece_parse(dtrain__json *json, const dtrain__stored *stored, size_t file,
                                dtrain__held *held)
{
    dtrain_state_tensor *tensor = &held->tensor;
    int64_t numbers[16] = {0}; /* kind, own, shape, piece */
    bool fits = true;
    for (int i = 0; i < 16; i++) (void)dtrain__json_count(json, &numbers[i]);
    if (json->result != DTRAIN_OK) return false;
    held->rank = (int64_t)(file / 2);
    tensor->kind = (uint32_t)numbers[0];
    tensor->own = numbers[1] != 0;
    tensor->dtype = stored->dtype;
    memcpy(tensor->shape, numbers + 2, sizeof tensor->shape);
    memcpy(&tensor->piece, numbers + 6, sizeof tensor->piece);
    tensor->total = 1;
    for (int d = 0; d < 4 && (d == 0 || tensor->shape[d]); d++) {
        fits = fits && (!tensor->shape[d] || tensor->total <= INT64_MAX / 8 / tensor->shape[d]);
        if (fits) tensor->total *= tensor->shape[d];
    }
    if (!fits || numbers[0] >= DTRAIN_STATE_KINDS || stored->dtype > DTRAIN_STATE_BYTES ||
        (numbers[0] == DTRAIN_STATE_VALUE) != (file % 2 == 0) ||
        !dtrain__piece_fits(&tensor->piece, tensor->shape))
        return dtrain__json_fail(json, "this piece cannot be");
    const uint64_t bytes = dtrain__held_bytes(held);
    const size_t digits = dtrain__blocks_of(bytes) * DTRAIN__CRC_DIGITS;
    held->crc = json->at + 1;
    if (bytes != stored->end - stored->begin || *json->at != ' ' ||
        strspn(held->crc, DTRAIN__HEX) != digits || held->crc[digits] != ' ' ||
        !held->crc[digits + 1])
        return dtrain__json_fail(json, "expected %zu digits of checksums and a name, of %llu bytes",
                                 digits, (unsigned long long)bytes);
    tensor->name = held->crc + digits + 1;
    return true;
}

/* List the pieces that a file's metadata describes; each tensor of the file must be one piece. */
static dtrain_result dtrain__pieces_list(dtrain__manifest *m, const char *path, size_t f)
{
    const dtrain__tensor_file *file = &m->files[f];
    const size_t prefix = sizeof DTRAIN__PIECE_KEY - 1, before = m->piece_count;
    const char *value;
    for (const char *key = file->metadata; key < file->metadata_end;
         key = value + strlen(value) + 1) {
        value = key + strlen(key) + 1;
        if (strncmp(key, DTRAIN__PIECE_KEY, prefix) != 0) continue;
        if (!dtrain__grow(m->folder->allocator, (void **)&m->pieces, m->piece_count, &m->piece_room,
                          sizeof *m->pieces, "the pieces of a checkpoint"))
            return DTRAIN_ERROR_MEMORY;
        dtrain__held *held = &m->pieces[m->piece_count++];
        dtrain__stored *stored = dtrain__safetensors_find(file, key + prefix);
        dtrain__json json = dtrain__json_begin(path, value, strlen(value));
        json.inside = key;
        memset(held, 0, sizeof *held);
        if (!stored || stored->user)
            dtrain__json_fail(&json, "there is no such tensor, or it is described twice");
        else if (dtrain__piece_parse(&json, stored, f, held)) {
            held->at = (int64_t)(file->data + stored->begin);
            stored->user = m;
        }
        DTRAIN__TRY(json.result);
    }
    if (m->piece_count - before == file->count) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_DATA, "%s describes %zu of its %zu tensors", path,
                       m->piece_count - before, file->count);
}

/* Return the path of a rank's file: values (which = 0), or all else (1). */
DTRAIN__PRIVATE dtrain__file_path dtrain__tensors_path(const char *checkpoint, int which,
                                                       int64_t rank)
{
    return dtrain__path_in(checkpoint, "%s-%05d.safetensors", which ? "state" : "model", (int)rank);
}

/* Read the headers of all files, or only of the files with values, and list their pieces in
 * dtrain__held_order. The first piece of a tensor has the number of its pieces. */
DTRAIN__PRIVATE dtrain_result dtrain__pieces_read(dtrain__manifest *m, bool values_only)
{
    const dtrain_allocator *allocator = m->folder->allocator;
    const size_t count = 2 * (size_t)m->ranks;
    m->files = (dtrain__tensor_file *)dtrain__alloc(allocator, count, sizeof *m->files,
                                                    "the headers of a checkpoint");
    if (!m->files) return DTRAIN_ERROR_MEMORY;
    m->file_count = count;
    for (size_t f = 0; f < count; f += values_only ? 2 : 1) {
        const dtrain__file_path path = dtrain__tensors_path(m->directory, f % 2, (int64_t)(f / 2));
        DTRAIN__TRY(dtrain__safetensors_read(m->folder->storage, path.text,
                                             m->headers + DTRAIN__CRC_DIGITS * f, allocator,
                                             &m->files[f]));
        DTRAIN__TRY(dtrain__pieces_list(m, path.text, f));
    }
    if (m->piece_count) qsort(m->pieces, m->piece_count, sizeof *m->pieces, dtrain__held_order);
    for (size_t i = 0; i < m->piece_count; i += m->pieces[i].count) {
        DTRAIN__TRY(dtrain__pieces_count(m->directory, DTRAIN_ERROR_DATA, &m->pieces[i],
                                         m->piece_count - i));
        DTRAIN__TRY(dtrain__pieces_check(m->directory, &m->pieces[i]));
    }
    return DTRAIN_OK;
}

/* Find the first piece of a tensor; NULL if the checkpoint lacks the tensor. */
DTRAIN__PRIVATE const dtrain__held *dtrain__pieces_find(const dtrain__manifest *m, uint32_t kind,
                                                        const char *name)
{
    size_t low = 0, high = m->piece_count;
    dtrain__held key;
    key.tensor.kind = kind;
    key.tensor.name = name;
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        if (dtrain__tensor_order(&m->pieces[middle], &key) < 0) low = middle + 1;
        else high = middle;
    }
    const bool found = low < m->piece_count && dtrain__tensor_order(&m->pieces[low], &key) == 0;
    return found ? &m->pieces[low] : NULL;
}
