/* Ranks agree: on an outcome, and on settings
 *
 * A call that fails on one rank only would leave the others waiting in its next collective. Calls
 * that do local work in between therefore bring its outcome here: all ranks leave with success, or
 * all with an error, and the communicator is as good as before.
 *
 * Settings that differ between ranks would train to numbers that mean nothing. First comes one hash
 * over all of them; where that differs all ranks search together, item by item and then field by
 * field, up to the first that differs. All of them see the same outcome of each comparison, so they
 * make the same collectives. Item 0 is the name of the call, so that ranks in different calls
 * hear of that. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/result.h"
#include "comm/comm.h"
#include "comm/comm_internal.h"
#include "comm/groups_internal.h"
#include "comm/same_internal.h"

/* Fail on all ranks with the error of rank `first`. */
static dtrain_result dtrain__verdict(dtrain_comm *comm, dtrain_result mine, int first)
{
    struct {
        int32_t code;
        char text[DTRAIN__ERROR_BYTES];
    } verdict;
    memset(&verdict, 0, sizeof verdict);
    verdict.code = (int32_t)mine;
    snprintf(verdict.text, sizeof verdict.text, "%s", dtrain__bare(dtrain_last_error()));
    DTRAIN__TRY(
        dtrain_broadcast(comm, &verdict, sizeof verdict / 4, DTRAIN_DTYPE_I32, first, NULL));
    if (mine != DTRAIN_OK) return mine; /* one's own sentence is still the last error */
    return dtrain_fail((dtrain_result)verdict.code, "rank %d failed: %s",
                       dtrain__world_rank(comm, first), verdict.text);
}

DTRAIN__PRIVATE dtrain_result dtrain__agree(dtrain_comm *comm, dtrain_result mine)
{
    int32_t first = mine == DTRAIN_OK ? INT32_MAX : (int32_t)dtrain_comm_rank(comm);
    if (dtrain_comm_size(comm) == 1) return mine;
    DTRAIN__TRY(
        dtrain_all_reduce(comm, &first, &first, 1, DTRAIN_DTYPE_I32, DTRAIN_REDUCE_MIN, NULL));
    return first == INT32_MAX ? DTRAIN_OK : dtrain__verdict(comm, mine, (int)first);
}

/* ---- The first difference ---------------------------------------------------------------------*/

/* Compare items one by one, up to the first that differs. Of that, find the usual and the odd value
 * among those of all ranks. */
static dtrain_result dtrain__same_search(dtrain_comm *comm, dtrain__same_hash *hash_of,
                                         const void *user, size_t count, dtrain__difference *found)
{
    const int ranks = dtrain_comm_size(comm);
    uint64_t values[DTRAIN_MAX_RANKS];
    found->odd = -1;
    for (found->item = 0; found->item < count; found->item++) {
        const uint64_t hash = hash_of(user, found->item);
        int most = 0;
        DTRAIN__TRY(dtrain_all_gather(comm, &hash, values, 1, DTRAIN_DTYPE_I64, NULL));
        for (int i = 0; i < ranks; i++) {
            int same = 0;
            for (int k = 0; k < ranks; k++) same += values[k] == values[i];
            if (same > most) found->usual = i;
            if (same > most) most = same;
        }
        if (most == ranks) continue;
        found->single = most == ranks - 1;
        for (found->odd = 0; values[found->odd] == values[found->usual];) found->odd++;
        break;
    }
    return DTRAIN_OK;
}

/* The hashes are common where the largest and the smallest are equal: since ~ reverses the order,
 * the maximum of the complements is the complement of the minimum. */
DTRAIN__PRIVATE dtrain_result dtrain__same_find(dtrain_comm *comm, dtrain_result mine,
                                                dtrain__same_hash *hash_of, const void *user,
                                                size_t count, uint64_t *all,
                                                dtrain__difference *found)
{
    *all = DTRAIN__FNV_BASIS;
    found->odd = -1;
    for (size_t item = 0; item < count; item++) {
        const uint64_t hash = mine == DTRAIN_OK ? hash_of(user, item) : 0;
        if (hash) *all = dtrain__fnv1a(*all, &hash, sizeof hash);
    }
    if (dtrain_comm_size(comm) == 1) return mine;
    int64_t most[] = {(int64_t)*all, (int64_t) ~*all, (int64_t)count,
                      mine == DTRAIN_OK ? INT64_MIN : -(int64_t)dtrain_comm_rank(comm)};
    DTRAIN__TRY(dtrain_all_reduce(comm, most, most, 4, DTRAIN_DTYPE_I64, DTRAIN_REDUCE_MAX, NULL));
    if (most[3] != INT64_MIN) return dtrain__verdict(comm, mine, (int)-most[3]);
    if (most[0] == ~most[1]) return DTRAIN_OK;
    return dtrain__same_search(comm, hash_of, user, (size_t)most[2], found);
}

/* ---- Fields -----------------------------------------------------------------------------------*/

#define DTRAIN__SHOWN_BYTES 320

/* The lists of a call, and the item whose fields are compared. Item 0 is the call. */
typedef struct dtrain__same_items {
    dtrain__same_list lists[1 + DTRAIN__SAME_LISTS];
    size_t count, item;
} dtrain__same_items;

DTRAIN__PRIVATE dtrain__same_list dtrain__same_struct(const dtrain__same_field *fields,
                                                      size_t count, const void *at)
{
    const dtrain__same_list list = {NULL, fields, count, 1, at, NULL};
    return list;
}

/* Find the item's list, and its number there. */
static const dtrain__same_list *dtrain__same_place(const dtrain__same_items *items, size_t *number)
{
    const dtrain__same_list *list = items->lists;
    for (*number = items->item; list + 1 < items->lists + items->count && *number >= list->items;)
        *number -= list++->items;
    return list;
}

/* Write a field of the item, with its name, and return a hash of all of it; 0: this rank does not
 * have the item. */
static uint64_t dtrain__same_show(const dtrain__same_items *items, size_t f, char *text)
{
    uint64_t record[DTRAIN__SAME_RECORD / sizeof(uint64_t)] = {0};
    size_t number, room = DTRAIN__SHOWN_BYTES;
    const dtrain__same_list *list = dtrain__same_place(items, &number);
    const dtrain__same_field *field = &list->fields[f];
    const unsigned char *at = (const unsigned char *)(list->make ? record : list->at);
    const bool narrow = field->bytes == sizeof(uint32_t), several = field->bytes > sizeof(int64_t);
    memset(text, 0, room);
    if (number >= list->items) {
        snprintf(text, room, "only %zu of them", list->items);
        return 0;
    }
    if (list->make) list->make(list->at, number, record);
    size_t used = (size_t)snprintf(text, room, several ? "%s (" : "%s ", field->name);
    for (uint32_t done = 0; done < field->bytes; done += (uint32_t)sizeof(int64_t)) {
        union {
            uint32_t narrow;
            uint64_t wide;
            float number;
            bool truth;
            const char *string;
        } x;
        if (done) used += (size_t)snprintf(text + used, room - used, ", ");
        memcpy((void *)&x, at + field->offset + done,
               field->bytes < sizeof x ? field->bytes : sizeof x);
        const unsigned long long word = narrow ? x.narrow : x.wide;
        char *to = text + used;
        switch (field->type) {
        case DTRAIN__SAME_TEXT: snprintf(to, room - used, "\"%s\"", dtrain__short(x.string)); break;
        case DTRAIN__SAME_FLOAT: /* 0.02, not 0.0199999996, where that is the same float */
            snprintf(to, room - used, "%g", (double)x.number);
            if (strtof(to, NULL) != x.number) snprintf(to, room - used, "%.9g", (double)x.number);
            break;
        case DTRAIN__SAME_BOOL: snprintf(to, room - used, "%s", x.truth ? "true" : "false"); break;
        case DTRAIN__SAME_INT:
            snprintf(to, room - used, "%lld",
                     narrow ? (long long)(int32_t)x.narrow : (long long)word);
            break;
        case DTRAIN__SAME_UINT: snprintf(to, room - used, "%llu", word); break;
        case DTRAIN__SAME_FLAGS: snprintf(to, room - used, "0x%llx", word); break;
        default: snprintf(to, room - used, "(hash %llx)", word);
        }
        used += strlen(to);
    }
    if (several) snprintf(text + used, room - used, ")");
    return dtrain__fnv1a(DTRAIN__FNV_BASIS, text, strlen(text));
}

static uint64_t dtrain__same_field_hash(const void *user, size_t field)
{
    char text[DTRAIN__SHOWN_BYTES];
    return dtrain__same_show((const dtrain__same_items *)user, field, text);
}

static uint64_t dtrain__same_item_hash(const void *user, size_t item)
{
    dtrain__same_items items = *(const dtrain__same_items *)user;
    uint64_t all = DTRAIN__FNV_BASIS;
    size_t number;
    items.item = item;
    const dtrain__same_list *list = dtrain__same_place(&items, &number);
    for (size_t f = 0; f < list->field_count && number < list->items; f++) {
        const uint64_t hash = dtrain__same_field_hash(&items, f);
        all = dtrain__fnv1a(all, &hash, sizeof hash);
    }
    return number < list->items ? all : 0;
}

DTRAIN__PRIVATE dtrain_result dtrain__same(dtrain_comm *comm, dtrain_result mine, const char *call,
                                           const dtrain__same_list *lists, size_t count)
{
    static const dtrain__same_field made = {"come to", 0, sizeof call, DTRAIN__SAME_TEXT};
    char texts[2][DTRAIN__SHOWN_BYTES], what[256] = "", name[DTRAIN__SHOWN_BYTES] = "", others[32];
    dtrain__same_items items;
    dtrain__difference found;
    size_t total = 1, number;
    uint64_t all;
    memset(&items, 0, sizeof items);
    items.lists[0] = dtrain__same_struct(&made, 1, &call);
    items.count = mine == DTRAIN_OK ? count + 1 : 1;
    for (size_t l = 1; l < items.count; l++) total += (items.lists[l] = lists[l - 1]).items;
    DTRAIN__TRY(dtrain__same_find(comm, mine, dtrain__same_item_hash, &items, total, &all, &found));
    if (found.odd < 0) return DTRAIN_OK;
    items.item = found.item;
    const dtrain__same_list *list = dtrain__same_place(&items, &number);
    DTRAIN__TRY(
        dtrain__same_search(comm, dtrain__same_field_hash, &items, list->field_count, &found));
    for (int i = 0; i < 2; i++) {
        (void)dtrain__same_show(&items, found.item, texts[i]);
        DTRAIN__TRY(dtrain_broadcast(comm, texts[i], DTRAIN__SHOWN_BYTES / 4, DTRAIN_DTYPE_I32,
                                     i ? found.odd : found.usual, NULL));
    }
    if (list->what && found.item) (void)dtrain__same_show(&items, 0, name);
    if (list->what)
        snprintf(what, sizeof what,
                 name[0] ? "%s %zu (%.200s) differs: " : "%s %zu differs: ", list->what, number,
                 name);
    snprintf(others, sizeof others, "the others have");
    if (!found.single || dtrain_comm_size(comm) == 2)
        snprintf(others, sizeof others, "rank %d has", dtrain__world_rank(comm, found.usual));
    return dtrain_fail(DTRAIN_ERROR_MISMATCH,
                       "%s: %srank %d has %s, %s %s; give the same to every rank", call, what,
                       dtrain__world_rank(comm, found.odd), texts[1], others, texts[0]);
}
