/* Agreement of ranks: on an outcome, and on settings
 *
 * A call that failed on only one rank would leave the other ranks waiting in its next collective.
 * So after local work, ranks share the outcome: all ranks return success, or all return an error.
 * The communicator can still be used.
 *
 * Training with settings that differ between ranks would give meaningless numbers. Ranks first
 * compare one hash of all settings. If it differs, they compare field by field, up to the first
 * difference. All ranks see the same outcome of each comparison, so they make the same collectives.
 * Field 0 is the name of the call, so that ranks in different calls notice it. */

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
    if (mine != DTRAIN_OK) return mine; /* this rank's sentence is still the last error */
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

/* The hashes are equal if their maximum and minimum are equal; ~ reverses the order, so the maximum
 * of the complements is the complement of the minimum. If they differ, compare items one by one, up
 * to the first difference, and find its usual and its odd value. */
DTRAIN__PRIVATE dtrain_result dtrain__same_find(dtrain_comm *comm, dtrain_result mine,
                                                dtrain__same_hash *hash_of, const void *user,
                                                size_t count, uint64_t *all,
                                                dtrain__difference *found)
{
    const int ranks = dtrain_comm_size(comm);
    uint64_t values[DTRAIN_MAX_RANKS];
    *all = DTRAIN__FNV_BASIS;
    found->odd = -1;
    for (size_t item = 0; item < count; item++) {
        const uint64_t hash = mine == DTRAIN_OK ? hash_of(user, item) : 0;
        if (hash) *all = dtrain__fnv1a(*all, &hash, sizeof hash);
    }
    if (ranks == 1) return mine;
    int64_t most[] = {(int64_t)*all, (int64_t) ~*all, (int64_t)count,
                      mine == DTRAIN_OK ? INT64_MIN : -(int64_t)dtrain_comm_rank(comm)};
    DTRAIN__TRY(dtrain_all_reduce(comm, most, most, 4, DTRAIN_DTYPE_I64, DTRAIN_REDUCE_MAX, NULL));
    if (most[3] != INT64_MIN) return dtrain__verdict(comm, mine, (int)-most[3]);
    if (most[0] == ~most[1]) return DTRAIN_OK;

    for (found->item = 0; found->item < (size_t)most[2]; found->item++) {
        const uint64_t hash = hash_of(user, found->item);
        int frequent = 0;
        DTRAIN__TRY(dtrain_all_gather(comm, &hash, values, 1, DTRAIN_DTYPE_I64, NULL));
        for (int i = 0; i < ranks; i++) {
            int same = 0;
            for (int k = 0; k < ranks; k++) same += values[k] == values[i];
            if (same > frequent) found->usual = i;
            if (same > frequent) frequent = same;
        }
        if (frequent == ranks) continue;
        found->single = frequent == ranks - 1;
        for (found->odd = 0; values[found->odd] == values[found->usual];) found->odd++;
        return DTRAIN_OK;
    }
    return DTRAIN_OK;
}

/* ---- Fields -----------------------------------------------------------------------------------*/

#define DTRAIN__SHOWN_BYTES 320

/* The lists of a call. The first has one field, the name of the call. */
typedef struct dtrain__same_items {
    dtrain__same_list lists[1 + DTRAIN__SAME_LISTS];
    size_t count;
} dtrain__same_items;

DTRAIN__PRIVATE dtrain__same_list dtrain__same_struct(const dtrain__same_field *fields,
                                                      size_t count, const void *at)
{
    const dtrain__same_list list = {NULL, fields, count, 1, at, NULL};
    return list;
}

/* Find field `at` of all in its list: of which item it is, and which field of that. */
static const dtrain__same_list *dtrain__same_place(const dtrain__same_items *items, size_t at,
                                                   size_t *item, size_t *f)
{
    const dtrain__same_list *list = items->lists;
    while (list + 1 < items->lists + items->count && at >= list->items * list->field_count)
        at -= list->items * list->field_count, list++;
    *item = at / list->field_count;
    *f = at % list->field_count;
    return list;
}

/* Write a field with its name, and return a hash of the text; 0 if this rank lacks the item. */
static uint64_t dtrain__same_show(const dtrain__same_items *items, size_t which, char *text)
{
    uint64_t record[DTRAIN__SAME_RECORD / sizeof(uint64_t)] = {0};
    size_t number, f, room = DTRAIN__SHOWN_BYTES;
    const dtrain__same_list *list = dtrain__same_place(items, which, &number, &f);
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
        case DTRAIN__SAME_FLOAT: /* 0.02, not 0.0199999996, if that is the same float */
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

DTRAIN__PRIVATE dtrain_result dtrain__same(dtrain_comm *comm, dtrain_result mine, const char *call,
                                           const dtrain__same_list *lists, size_t count)
{
    static const dtrain__same_field made = {"come to", 0, sizeof call, DTRAIN__SAME_TEXT};
    char texts[2][DTRAIN__SHOWN_BYTES], what[256] = "", name[DTRAIN__SHOWN_BYTES] = "", others[32];
    dtrain__same_items items;
    dtrain__difference found;
    size_t total = 1, number, f;
    uint64_t all;
    memset(&items, 0, sizeof items);
    items.lists[0] = dtrain__same_struct(&made, 1, &call);
    items.count = mine == DTRAIN_OK ? count + 1 : 1;
    for (size_t l = 1; l < items.count; l++) {
        items.lists[l] = lists[l - 1];
        total += lists[l - 1].items * lists[l - 1].field_count;
    }
    DTRAIN__TRY(
        dtrain__same_find(comm, mine, dtrain__same_field_hash, &items, total, &all, &found));
    if (found.odd < 0) return DTRAIN_OK;
    const dtrain__same_list *list = dtrain__same_place(&items, found.item, &number, &f);
    for (int i = 0; i < 2; i++) {
        (void)dtrain__same_show(&items, found.item, texts[i]);
        DTRAIN__TRY(dtrain_broadcast(comm, texts[i], DTRAIN__SHOWN_BYTES / 4, DTRAIN_DTYPE_I32,
                                     i ? found.odd : found.usual, NULL));
    }
    if (list->what && f) (void)dtrain__same_show(&items, found.item - f, name);
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
