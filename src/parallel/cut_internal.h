/* The part of a cut parameter, or of a row whose columns are cut, that a rank has. */

#pragma once

#include "core/platform_internal.h"
#include "core/result.h"
#include "parallel/cut.h"

/* Along the axis that is cut a part is one run of each component, one after the other. */
typedef struct dtrain__share {
    int64_t shape[4]; /* of the part; leading non-zero entries */
    int64_t count;    /* its elements */
    int axis;         /* that is cut; -1: none, the part is everything */
    int64_t whole;    /* length of the axis in the whole */
    int64_t inner;    /* elements of one step along the axis */
    uint32_t runs;
    int64_t first[DTRAIN_CUT_COMPONENTS], length[DTRAIN_CUT_COMPONENTS]; /* (runs) */
    dtrain_cut cut; /* that it was made by, which also makes the parts of other ranks */
} dtrain__share;

/* parallel/cut.c */
/* Check that a cut fits a shape and that each of `ranks` gets something; the sentence has no name
 * of the parameter. */
DTRAIN__PRIVATE dtrain_result dtrain__cut_check(const dtrain_cut *cut, const int64_t shape[4],
                                                int ranks);
/* Describe the part of a rank; the cut has been checked. */
DTRAIN__PRIVATE void dtrain__share_of(const dtrain_cut *cut, const int64_t shape[4], int ranks,
                                      int rank, dtrain__share *part);
/* Return the place in the whole of element i of a part, and in *run how many elements from there on
 * follow one another in both. */
DTRAIN__PRIVATE int64_t dtrain__share_place(const dtrain__share *part, int64_t i, int64_t *run);
/* Tell whether two parts have the same runs of axes of the same length. */
DTRAIN__PRIVATE bool dtrain__share_same(const dtrain__share *a, const dtrain__share *b);
/* Write the runs of a part, "0-5 and 12-17 of 24", to a text of the caller's. */
#define DTRAIN__SHARE_TEXT 224 /* 4 runs of two numbers of 19 digits fit */
DTRAIN__PRIVATE const char *dtrain__share_text(const dtrain__share *part, char *text);
