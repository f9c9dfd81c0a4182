/* Reading the environment
 *
 * The result is a dtrain__placement, from which launch.c starts ranks and the rendezvous finds rank
 * 0. It is a pure function of the variables, so that tests can pass any. */

#pragma once

#include "core/platform_internal.h"
#include "core/result.h"
#include "world/link_internal.h"

typedef char *(*dtrain__lookup_fn)(const char *name); /* getenv */

/* Columns that have the same meaning in every family; behind them stand the variables that only the
 * family's own reader uses. */
enum {
    DTRAIN__ADDRESS, /* of rank 0's host; this one and the port may belong to several families */
    DTRAIN__PORT,
    DTRAIN__RANK,
    DTRAIN__SIZE,
    DTRAIN__LOCAL_RANK,
    DTRAIN__LOCAL_SIZE,
    DTRAIN__RUN, /* this and the next one name the run */
    DTRAIN__RUN_PART,
    DTRAIN__VARIABLES = 11
};
enum { DTRAIN__INDEXED = 5, DTRAIN__FAMILIES = 7 }; /* rows of the table */

/* The variables by which launchers of one kind say which rank a process is. */
typedef struct dtrain__family {
    const char *name;
    /* Reads rank and size into *out. *why becomes NULL, or says why the family does not apply. A
     * family without a reader has two plain numbers. */
    dtrain_result (*read)(dtrain__lookup_fn env, const char **why, dtrain__placement *out);
    const char *variables[DTRAIN__VARIABLES]; /* NULL: it has none */
} dtrain__family;

/* launch/environment.c */
DTRAIN__PRIVATE const dtrain__family *dtrain__family_table(void);
DTRAIN__PRIVATE const char *dtrain__env_text(dtrain__lookup_fn env, const char *name);
DTRAIN__PRIVATE dtrain_result dtrain__recognise(dtrain__lookup_fn env, dtrain__placement *out,
                                                const char *said[DTRAIN__FAMILIES]);
