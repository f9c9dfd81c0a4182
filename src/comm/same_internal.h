/* Comparison of settings between ranks. A collective create lists its settings in a table of
 * fields, and dtrain__same compares them. */

#pragma once

#include "core/platform_internal.h"
#include "core/result.h"
#include "comm/comm.h"

typedef enum dtrain__same_type {
    DTRAIN__SAME_INT, /* of 4 or 8 bytes, or an array with 8 bytes each */
    DTRAIN__SAME_UINT,
    DTRAIN__SAME_FLAGS,
    DTRAIN__SAME_BOOL,
    DTRAIN__SAME_FLOAT,
    DTRAIN__SAME_TEXT, /* const char * */
    DTRAIN__SAME_HASH  /* 64 bits, of a long value */
} dtrain__same_type;

typedef struct dtrain__same_field {
    const char *name; /* in the sentence */
    size_t offset;    /* in the struct */
    uint32_t bytes, type;
} dtrain__same_field;

/* A field named like its member; the second macro names it otherwise. */
#define DTRAIN__SAME(owner, member, type) DTRAIN__SAME_AS(owner, member, #member, type)
#define DTRAIN__SAME_AS(owner, member, name, type)                                                 \
    {                                                                                              \
        name, offsetof(owner, member), (uint32_t)sizeof(((owner *)0)->member), DTRAIN__SAME_##type \
    }

#define DTRAIN__SAME_RECORD 512 /* most bytes of a record that `make` writes */

/* One struct, or numbered items of one kind. */
typedef struct dtrain__same_list {
    const char *what; /* of items: "parameter"; sentences add the number and first field; or NULL */
    const dtrain__same_field *fields;
    size_t field_count, items;
    const void *at; /* the struct, or the source from which `make` writes an item's record */
    void (*make)(const void *at, size_t item, void *record);
} dtrain__same_list;

/* List one struct by its table of fields. */
#define DTRAIN__SAME_STRUCT(fields, at) \
    dtrain__same_struct(fields, sizeof fields / sizeof *fields, at)
DTRAIN__PRIVATE dtrain__same_list dtrain__same_struct(const dtrain__same_field *fields,
                                                      size_t count, const void *at);

#define DTRAIN__SAME_LISTS 2 /* most lists of a call */

/* Fail on all ranks if their calls or lists differ, with a sentence that names the call, the
 * setting, both values and the rank that differs from most ranks. First share an error of any rank
 * (`mine`) with all ranks, as dtrain__agree does; a rank with an error gives no lists. Only the
 * last list can differ in its number of items. Makes one small collective if nothing differs. */
DTRAIN__PRIVATE dtrain_result dtrain__same(dtrain_comm *comm, dtrain_result mine, const char *call,
                                           const dtrain__same_list *lists, size_t count);

/* The first item that is not the same on all ranks. */
typedef struct dtrain__difference {
    size_t item;
    int usual, odd; /* first rank with the most frequent value (a tie goes to the lower rank), and
                       first rank with another value; odd is -1 if nothing differs */
    bool single;    /* true if all ranks but `odd` have the usual value */
} dtrain__difference;

/* Hash an item; 0 if there is nothing to compare. */
typedef uint64_t dtrain__same_hash(const void *user, size_t item);

/* Compare the hashes of `count` items. *all is a hash of all items of this rank. */
DTRAIN__PRIVATE dtrain_result dtrain__same_find(dtrain_comm *comm, dtrain_result mine,
                                                dtrain__same_hash *hash_of, const void *user,
                                                size_t count, uint64_t *all,
                                                dtrain__difference *found);
