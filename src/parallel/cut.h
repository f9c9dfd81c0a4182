/* Cuts: how the tensor axis of a mesh may divide a parameter
 *
 * A model keeps its text and its whole shapes; a mark in a parameter says along which axis ranks of
 * the tensor axis may share it, and operations do what follows (tape/ops.h):
 *
 *     ROWS       axis 0: output features, heads, vocabulary. Weights whose outputs are divided, and
 *                their biases; token embeddings
 *     COLUMNS    axis 1: input features. Weights that read what a weight cut by rows has made
 *
 *     (Shoeybi et al., "Megatron-LM", 2019, calls them column- and row-parallel, of x W.)
 *
 * A matrix that several are packed in is cut component by component, so that each rank has its
 * heads of all of them; q|k|v of 4 heads over 2 ranks:
 *
 *     q0 q1 q2 q3 | k0 k1 k2 k3 | v0 v1 v2 v3      rank 0 has q0 q1 k0 k1 v0 v1
 *
 * A length that the ranks do not divide is shared as evenly as can be: rank r of t has the parts
 * from n r / t to n (r + 1) / t, rounded down. */

#pragma once

#include "core/api.h"

#define DTRAIN_CUT_COMPONENTS 4 /* at most */

typedef enum dtrain_cut_axis {
    DTRAIN_CUT_NONE = 0, /* whole on every rank */
    DTRAIN_CUT_ROWS = 1,
    DTRAIN_CUT_COLUMNS = 2
} dtrain_cut_axis;

/* Every zero is the default written beside the field. */
typedef struct dtrain_cut {
    uint32_t axis;       /* dtrain_cut_axis; 0 = not cut */
    uint32_t components; /* of the axis, each of which is cut: 3 of q|k|v, 2 of gate|up; 0 = 1.
                            COLUMNS have one */
    int64_t parts;       /* each component is so many equal parts that stay whole: heads, of grouped
                            queries the heads of keys; 0 = its rows or columns are the parts */
    int64_t widths[DTRAIN_CUT_COMPONENTS]; /* (components) their lengths; zeros = equal ones */
} dtrain_cut;
