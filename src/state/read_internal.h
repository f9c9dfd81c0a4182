/* Reading pieces of tensors from files: what loading a checkpoint and importing weights share. */

#pragma once

#include "core/core_internal.h"
#include "device/device.h"
#include "state/checkpoint_internal.h"
#include "state/storage.h"

/* One file is open at a time, and one block in memory. */
typedef struct dtrain__reader {
    const dtrain_storage *storage;
    dtrain_device *device;
    char *block;                   /* (BLOCK) */
    int64_t low, high;             /* which elements of a source are in the block */
    int file;                      /* open, or -1 ... */
    char opened[2 * DTRAIN__PATH]; /* ... which */
    uint64_t bytes;                /* that were read */
} dtrain__reader;

/* Names in a sentence: the first few, and how many there are. */
typedef struct dtrain__name_list {
    char text[400];
    int count; /* 7: the text ends with "..." */
} dtrain__name_list;

/* The differences between a file and what a run wants from it, a list of each kind. Those before
 * DTRAIN__REFUSED are errors, unless a load or import is partial. */
enum {
    DTRAIN__OTHER_MODEL,
    DTRAIN__MISSING,
    DTRAIN__DIFFERENT,
    DTRAIN__EXTRA,
    DTRAIN__REFUSED,
    DTRAIN__OTHER_SETTINGS = DTRAIN__REFUSED,
    DTRAIN__ANEW,
    DTRAIN__LEFT_OUT,
    DTRAIN__AVERAGED,
    DTRAIN__DIFFERENCES
};

/* state/read.c */
DTRAIN__PRIVATE dtrain_result dtrain__reader_begin(dtrain__reader *reader,
                                                   const dtrain_state *state,
                                                   const dtrain_storage *storage);
DTRAIN__PRIVATE void dtrain__reader_end(dtrain__reader *reader, const dtrain_state *state);
DTRAIN__PRIVATE dtrain_result dtrain__elements_read(dtrain__reader *reader, const char *path,
                                                    const dtrain__held *held, bool widen,
                                                    int64_t first, int64_t count, char *to);
DTRAIN__PRIVATE dtrain_result dtrain__piece_read(dtrain__reader *reader, const char *path,
                                                 const dtrain__held *held,
                                                 const dtrain_state_tensor *target, float scale);
DTRAIN__PRINTF(2, 3)
DTRAIN__PRIVATE void dtrain__name_add(dtrain__name_list *list, const char *format, ...);
DTRAIN__PRIVATE bool dtrain__difference_text(const dtrain__name_list *lists, int count, char *text,
                                             size_t room);
