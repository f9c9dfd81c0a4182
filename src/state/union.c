/* The union of all ranks' lists
 *
 *     gather    every rank learns what each of them lists: tensors, and its pieces of them
 *     check     those that list the same tensor agree on it, and together they have all of it
 *     choose    of the ranks that hold the same piece the one that has the least to write
 *
 * All ranks come to the same result from the same lists, so that nothing else has to be agreed on.
 * It is made when a directory is opened. A list of GPT-2 small has 460 entries of 150 bytes. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/log.h"
#include "core/result.h"
#include "comm/comm.h"
#include "comm/groups_internal.h"
#include "state/box_internal.h"
#include "state/checkpoint_internal.h"
#include "state/safetensors_internal.h"
#include "state/state_internal.h"

DTRAIN__PRIVATE void dtrain__union_free(dtrain_checkpoint *c)
{
    dtrain__free(&c->allocator, c->held, c->held_room, sizeof *c->held);
    dtrain__free(&c->allocator, c->held_names, c->held_names_bytes, 1);
    c->held = NULL;
    c->held_names = NULL;
    c->held_room = c->held_count = c->held_names_bytes = 0;
}

/* Put this rank's list where its part of what is gathered begins. */
static void dtrain__union_own(const dtrain_checkpoint *c, dtrain__held *list, char *names)
{
    const dtrain_state *state = c->desc.state;
    size_t at = 0;
    for (size_t i = 0; i < state->tensor_count; i++) {
        const dtrain_state_tensor *tensor = &state->tensors[i];
        const size_t bytes = strlen(tensor->name) + 1;
        memcpy(names + at, tensor->name, bytes);
        list[i].name_at = (int64_t)at;
        list[i].index = (int64_t)i;
        list[i].rank = c->rank;
        list[i].kind = (int32_t)tensor->kind;
        list[i].dtype = (int32_t)tensor->dtype;
        list[i].own = tensor->own;
        memcpy(list[i].shape, tensor->shape, sizeof tensor->shape);
        list[i].piece = tensor->piece;
        at += bytes;
    }
}

/* Gather all lists: entries and names, each padded to those of the longest list. */
static dtrain_result dtrain__union_gather(dtrain_checkpoint *c)
{
    const dtrain_state *state = c->desc.state;
    const size_t ranks = (size_t)c->ranks, words = sizeof(dtrain__held) / sizeof(int64_t);
    int64_t most[2] = {(int64_t)state->tensor_count, 8};
    for (size_t i = 0; i < state->tensor_count; i++)
        most[1] += (int64_t)strlen(state->tensors[i].name) + 1;
    dtrain__union_free(c);
    DTRAIN__TRY(
        dtrain_all_reduce(c->comm, most, most, 2, DTRAIN_DTYPE_I64, DTRAIN_REDUCE_MAX, NULL));
    const size_t entries = (size_t)most[0], name_words = (size_t)most[1] / sizeof(int64_t);
    const size_t part = name_words * sizeof(int64_t);
    /* one part more: what this rank sends */
    c->held_room = (ranks + 1) * entries;
    c->held_names_bytes = (ranks + 1) * part;
    c->held = (dtrain__held *)dtrain__alloc(&c->allocator, c->held_room, sizeof *c->held,
                                            "the lists of all ranks");
    c->held_names =
        (char *)dtrain__alloc(&c->allocator, c->held_names_bytes, 1, "the lists of all ranks");
    DTRAIN__TRY(dtrain__agree(c->comm, c->held && c->held_names ? DTRAIN_OK : DTRAIN_ERROR_MEMORY));
    dtrain__held *mine = c->held + ranks * entries;
    for (size_t i = 0; i < entries; i++) mine[i].rank = -1; /* none */
    dtrain__union_own(c, mine, c->held_names + ranks * part);
    DTRAIN__TRY(dtrain_all_gather(c->comm, mine, c->held, entries * words, DTRAIN_DTYPE_I64, NULL));
    DTRAIN__TRY(dtrain_all_gather(c->comm, c->held_names + ranks * part, c->held_names, name_words,
                                  DTRAIN_DTYPE_I64, NULL));
    c->held_count = 0;
    for (size_t i = 0; i < ranks * entries; i++) {
        dtrain__held held = c->held[i];
        if (held.rank < 0) continue;
        held.name = c->held_names + (size_t)held.rank * part + held.name_at;
        c->held[c->held_count++] = held;
    }
    return DTRAIN_OK;
}

/* Order entries by tensor, then by piece; those of a tensor that every rank has of its own by rank
 * before that. */
static int dtrain__held_order(const void *left, const void *right)
{
    const dtrain__held *a = (const dtrain__held *)left, *b = (const dtrain__held *)right;
    if (a->kind != b->kind) return a->kind < b->kind ? -1 : 1;
    const int names = strcmp(a->name, b->name);
    if (names) return names;
    if (a->own && a->rank != b->rank) return a->rank < b->rank ? -1 : 1;
    const int pieces = dtrain__piece_order(&a->piece, &b->piece);
    return pieces ? pieces : (a->rank > b->rank) - (a->rank < b->rank);
}

static bool dtrain__same_tensor(const dtrain__held *a, const dtrain__held *b)
{
    return a->kind == b->kind && strcmp(a->name, b->name) == 0;
}

/* Name a contradiction: two ranks describe one tensor in different ways. */
static dtrain_result dtrain__union_differs(const dtrain__held *a, const dtrain__held *b)
{
    const dtrain__held *const both[2] = {a, b};
    char text[2][120];
    for (int i = 0; i < 2; i++) {
        const int64_t *shape = both[i]->shape;
        snprintf(text[i], sizeof text[i], "rank %d: %s [%lld, %lld, %lld, %lld]%s",
                 (int)both[i]->rank, dtrain__stored_name((uint32_t)both[i]->dtype),
                 (long long)shape[0], (long long)shape[1], (long long)shape[2], (long long)shape[3],
                 both[i]->own ? ", its own" : "");
    }
    return dtrain_fail(DTRAIN_ERROR_MISMATCH,
                       "dtrain_checkpoint_open: ranks list the %s of \"%.100s\" in different ways "
                       "(%s; %s), expected the same dtype and shape from all that list it",
                       dtrain__state_kind_name((uint32_t)a->kind), a->name, text[0], text[1]);
}

/* Choose a writer for each piece: of entries that differ in nothing but the rank one stays. */
static dtrain_result dtrain__union_choose(dtrain_checkpoint *c)
{
    uint64_t load[DTRAIN_MAX_RANKS] = {0};
    size_t count = 0, first = 0; /* entries that stay; the first one of the tensor */
    for (size_t i = 0, next; i < c->held_count; i = next) {
        size_t least = i;
        if (!i || !dtrain__same_tensor(&c->held[i], &c->held[first])) first = i;
        if (c->held[i].dtype != c->held[first].dtype || c->held[i].own != c->held[first].own ||
            memcmp(c->held[i].shape, c->held[first].shape, sizeof c->held[i].shape) != 0)
            return dtrain__union_differs(&c->held[first], &c->held[i]);
        for (next = i + 1; next < c->held_count; next++) {
            const dtrain__held *a = &c->held[i], *b = &c->held[next];
            if (!dtrain__same_tensor(a, b) || dtrain__piece_order(&a->piece, &b->piece) || a->own ||
                b->own)
                break;
            if (a->dtype != b->dtype || memcmp(a->shape, b->shape, sizeof a->shape) != 0)
                return dtrain__union_differs(a, b);
            if (load[b->rank] < load[c->held[least].rank]) least = next;
        }
        load[c->held[least].rank] += (uint64_t)c->held[least].piece.count *
                                     dtrain__state_bytes((uint32_t)c->held[least].dtype);
        c->held[count++] = c->held[least];
    }
    c->held_count = count;
    return DTRAIN_OK;
}

/* Check that pieces of one tensor, sorted, do not overlap, and with `all` that they make it up.
 * Pieces lie `stride` bytes apart, as members of a larger struct. A piece
 * is compared with those whose boxes begin before its own ends. */
DTRAIN__PRIVATE dtrain_result dtrain__pieces_check(const char *where, uint32_t kind,
                                                   const char *name, const dtrain_piece *pieces,
                                                   size_t stride, size_t count, int64_t total)
{
    const char *const base = (const char *)pieces;
    int64_t sum = 0;
    bool overlap = false;
    for (size_t i = 0; i < count && !overlap; i++) {
        const dtrain_piece *a = (const dtrain_piece *)(const void *)(base + i * stride);
        overlap = a->count > total - sum;
        if (!overlap) sum += a->count;
        for (size_t k = i + 1; k < count && !overlap; k++) {
            const dtrain_piece *b = (const dtrain_piece *)(const void *)(base + k * stride);
            dtrain_piece common;
            if (b->first[0] >= a->first[0] + a->length[0]) break;
            overlap = a->count && b->count &&
                      (dtrain__box_same(a, b) ? b->offset < a->offset + a->count
                                              : dtrain__piece_common(a, b, &common));
        }
    }
    if (!overlap && sum == total) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_DATA,
                       "%s: the pieces of the %s of \"%.100s\" %s: they have %lld of its %lld "
                       "elements",
                       where, dtrain__state_kind_name(kind), name,
                       overlap ? "overlap" : "leave a hole", (long long)sum, (long long)total);
}

/* Make the union. Collective. */
DTRAIN__PRIVATE dtrain_result dtrain__union_make(dtrain_checkpoint *c)
{
    DTRAIN__TRY(dtrain__union_gather(c));
    qsort(c->held, c->held_count, sizeof *c->held, dtrain__held_order);
    DTRAIN__TRY(dtrain__union_choose(c));
    for (size_t i = 0, next; i < c->held_count; i = next) {
        dtrain__held *first = &c->held[i];
        for (next = i; next < c->held_count && dtrain__same_tensor(first, &c->held[next]);) {
            c->held[next].tensor = i ? c->held[i - 1].tensor + 1 : 0;
            next++;
        }
        dtrain_piece whole = dtrain__piece_whole(first->shape);
        if (!first->own)
            DTRAIN__TRY(dtrain__pieces_check("dtrain_checkpoint_open", (uint32_t)first->kind,
                                             first->name, &first->piece, sizeof *first, next - i,
                                             whole.count));
    }
    return DTRAIN_OK;
}
