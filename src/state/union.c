/* The union of all ranks' lists
 *
 *     gather    every rank learns what each of them lists: tensors, and its pieces of them
 *     check     those that list the same tensor agree on it
 *     choose    of the ranks that hold the same piece the one that has the least to write
 *     check     the pieces that are chosen are all of the tensor
 *
 * What a tensor axis does not cut its ranks have all, and where their parts of other parameters
 * differ in length they may shard it at different places. Each of them has a copy then, whole
 * between the ranks of its data axis, and the pieces of copy 0 are the ones that are written:
 *
 *     copy 0, 2 data ranks   | a a a a a a | b b b b |
 *     copy 1                 | a a a | b b b b b b b |    left out
 *
 * All ranks come to the same result from the same lists, so that nothing else has to be agreed on.
 * It is made when a directory is opened. A list of GPT-2 small has 460 entries of 180 bytes. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/log.h"
#include "core/result.h"
#include "comm/comm.h"
#include "comm/groups_internal.h"
#include "strategy/view_internal.h"
#include "state/box_internal.h"
#include "state/checkpoint_internal.h"
#include "state/safetensors_internal.h"
#include "state/state_internal.h"

#define DTRAIN__PIECE_ABOUT 256 /* bytes of the header of a file that a piece takes, about */

/* Gather all lists: entries and names, each padded to those of the longest list. */
static dtrain_result dtrain__union_gather(dtrain_checkpoint *c)
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
    char *const names = c->held_names + ranks * part;
    for (size_t i = 0, at = 0; i < state->tensor_count; i++) {
        const dtrain_state_tensor *tensor = &state->tensors[i];
        const dtrain_piece whole = dtrain__piece_whole(tensor->shape);
        const size_t bytes = strlen(tensor->name) + 1;
        memcpy(names + at, tensor->name, bytes);
        mine[i].tensor = *tensor;
        mine[i].rank = c->rank;
        mine[i].at = (int64_t)at;
        if (tensor->kind != DTRAIN_STATE_HOST && dtrain__box_same(&tensor->piece, &whole))
            mine[i].copy = copy; /* not cut: only the program knows which rank has which part */
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

/* Order entries by kind and name of their tensors. */
DTRAIN__PRIVATE int dtrain__tensor_order(const dtrain__held *a, const dtrain__held *b)
{
    if (a->tensor.kind != b->tensor.kind) return a->tensor.kind < b->tensor.kind ? -1 : 1;
    return strcmp(a->tensor.name, b->tensor.name);
}

/* Order entries by tensor, then by piece; those of a tensor that every rank has of its own by rank
 * before that. */
DTRAIN__PRIVATE int dtrain__held_order(const void *left, const void *right)
{
    const dtrain__held *a = (const dtrain__held *)left, *b = (const dtrain__held *)right;
    const int ranks = (a->rank > b->rank) - (a->rank < b->rank);
    const int tensors = dtrain__tensor_order(a, b);
    if (tensors || (a->tensor.own && ranks)) return tensors ? tensors : ranks;
    const int pieces = dtrain__piece_order(&a->tensor.piece, &b->tensor.piece);
    return pieces ? pieces : ranks;
}

/* Count the entries of a sorted list's first tensor; `differ` if they do not agree on it. */
DTRAIN__PRIVATE dtrain_result dtrain__entries_count(const char *where, dtrain_result differ,
                                                    const dtrain__held *entries, size_t room,
                                                    size_t *count)
{
    const dtrain_state_tensor *tensor = &entries->tensor;
    for (*count = 1; *count < room && !dtrain__tensor_order(entries, &entries[*count]); ++*count) {
        char text[2][120];
        if (dtrain__state_alike(tensor, &entries[*count].tensor)) continue;
        for (int i = 0; i < 2; i++) {
            const dtrain__held *held = &entries[i ? *count : 0];
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
    return DTRAIN_OK;
}

/* Check that the pieces of a tensor that ranks share, sorted, do not overlap, and that together
 * they are all of it. A piece is compared with those whose boxes begin before its own ends. */
DTRAIN__PRIVATE dtrain_result dtrain__pieces_check(const char *where, const dtrain__held *pieces,
                                                   size_t count)
{
    const dtrain_state_tensor *tensor = &pieces->tensor;
    int64_t sum = 0;
    bool overlap = false;
    for (size_t i = 0; i < count && !overlap; i++) {
        const dtrain_piece *a = &pieces[i].tensor.piece;
        overlap = a->count > tensor->total - sum;
        if (!overlap) sum += a->count;
        for (size_t k = i + 1; k < count && !overlap; k++) {
            const dtrain_piece *b = &pieces[k].tensor.piece;
            dtrain_piece common;
            if (b->first[0] >= a->first[0] + a->length[0]) break;
            overlap = a->count && b->count &&
                      (dtrain__box_same(a, b) ? b->offset < a->offset + a->count
                                              : dtrain__piece_common(a, b, &common));
        }
    }
    if (!count || tensor->own || (!overlap && sum == tensor->total)) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_DATA,
                       "%s: the pieces of the %s of \"%s\" %s: they have %lld of its %lld elements",
                       where, dtrain__state_kind_name(tensor->kind), dtrain__short(tensor->name),
                       overlap ? "overlap" : "leave a hole", (long long)sum,
                       (long long)tensor->total);
}

/* Make the union. Collective. Of entries that differ in nothing but the rank, that of the rank with
 * the least to write stays; none, if copy 0 has no such piece. */
DTRAIN__PRIVATE dtrain_result dtrain__union_make(dtrain_checkpoint *c)
{
    static const char call[] = "dtrain_checkpoint_open";
    uint64_t load[DTRAIN_MAX_RANKS] = {0};
    size_t stay = 0; /* entries */
    DTRAIN__TRY(dtrain__union_gather(c));
    dtrain__held *const held = c->held;
    qsort(held, c->held_count, sizeof *held, dtrain__held_order);
    for (size_t i = 0, count, next; i < c->held_count; i += count) {
        const bool own = held[i].tensor.own;
        const size_t first = stay; /* of this tensor */
        DTRAIN__TRY(dtrain__entries_count(call, DTRAIN_ERROR_MISMATCH, &held[i], c->held_count - i,
                                          &count));
        for (size_t k = i; k < i + count; k = next) {
            const dtrain_piece *piece = &held[k].tensor.piece;
            size_t least = k;
            bool counts = own; /* or a piece of copy 0 */
            for (next = k; next < i + count && (next == k || !own) &&
                           dtrain__piece_order(piece, &held[next].tensor.piece) == 0;
                 next++) {
                if (load[held[next].rank] < load[held[least].rank]) least = next;
                counts = counts || held[next].copy == 0;
            }
            if (!counts) continue;
            load[held[least].rank] +=
                (uint64_t)piece->count * dtrain__state_bytes(held[k].tensor.dtype) +
                DTRAIN__PIECE_ABOUT;
            held[stay++] = held[least];
        }
        DTRAIN__TRY(dtrain__pieces_check(call, &held[first], stay - first));
    }
    c->held_count = stay;
    return DTRAIN_OK;
}
