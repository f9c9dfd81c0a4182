/* The list of weights in a file, which export and import share. */

#pragma once

#include "core/core_internal.h"
#include "core/log.h"
#include "strategy/view_internal.h"
#include "state/checkpoint_internal.h"
#include "state/export.h"
#include "state/safetensors_internal.h"

/* A parameter as a file has it. rows x columns is what is stored of it, as it lies here when it is
 * whole. */
typedef struct dtrain__weight {
    const char *name;
    size_t param; /* its index in the strategy's array */
    bool transpose;
    int dims;
    int64_t shape[4]; /* in the file */
    int64_t rows, columns, total;
    const dtrain__stored *stored; /* import: what it is read from; NULL: nothing that fits ... */
    uint32_t file;                /* ... and the number of the file */
} dtrain__weight;

typedef struct dtrain__weights {
    const dtrain_allocator *allocator;
    const dtrain_param *params; /* (room), the strategy's */
    dtrain__weight *list;       /* (room), count in use */
    size_t count, room;
} dtrain__weights;

/* state/export.c */
DTRAIN__PRIVATE dtrain_result dtrain__weights_list(const char *call,
                                                   const dtrain_strategy *strategy,
                                                   const dtrain_export_name *names,
                                                   dtrain__weights *weights);
DTRAIN__PRIVATE bool dtrain__ends_with(const char *text, const char *end);
DTRAIN__PRIVATE void dtrain__directory_of(char directory[DTRAIN__PATH], const char *path);
