/* A rank's part of a cut parameter, or of a row whose columns are cut. */

#pragma once

#include "core/platform_internal.h"
#include "core/result.h"
#include "parallel/cut.h"

/* Along the cut axis a part has one run of each component, one after the other. */
typedef struct dtrain__share {
    int64_t shape[4]; /* shape of the part; leading non-zero entries */
    int64_t count;    /* elements of the part */
    int axis;         /* cut axis; -1: none, the part is everything */
    int64_t whole;    /* length of the axis in the whole */
    int64_t inner;    /* elements of one step along the axis */
    uint32_t runs;
    int64_t first[DTRAIN_CUT_COMPONENTS], length[DTRAIN_CUT_COMPONENTS]; /* (runs) */
    dtrain_cut cut; /* cut that made this part, and makes the parts of other ranks */
} dtrain__share;

/* parallel/cut.c */
/* Check that a cut fits a shape and that each of `ranks` gets a part. The error does not name
 * it. */
DTRAIN__PRIVATE dtrain_result dtrain__cut_check(const dtrain_cut *cut, const int64_t shape[4],
                                                int ranks);
/* Describe the part of a rank. The cut has been checked. */
DTRAIN__PRIVATE void dtrain__share_of(const dtrain_cut *cut, const int64_t shape[4], int ranks,
                                      int rank, dtrain__share *part);
/* Return the place of element i of a part in the whole. *run: consecutive elements from there
 * on. */
DTRAIN__PRIVATE int64_t dtrain__share_place(const dtrain__share *part, int64_t i, int64_t *run);
/* True if two parts have the same runs of axes of the same length. */
DTRAIN__PRIVATE bool dtrain__share_same(const dtrain__share *a, const dtrain__share *b);
