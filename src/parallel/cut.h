/* Cuts: how the tensor axis of a mesh divides a parameter
 *
 * A model keeps its text and its whole shapes. A mark in a parameter says along which axis the
 * ranks of the tensor axis can share it; operations do the rest (tape/ops.h):
 *
 *     ROWS       axis 0: output features, heads, vocabulary. Weights whose outputs are divided, and
 *                their biases; token embeddings
 *     COLUMNS    axis 1: input features. Weights that read the outputs of a weight cut by rows
 *
 *     (Shoeybi et al., "Megatron-LM", 2019, calls them column- and row-parallel, of x W.)
 *
 * A matrix that packs several matrices is cut component by component, so that each rank has its
 * heads of every component; q|k|v of 4 heads over 2 ranks:
 *
 *     q0 q1 q2 q3 | k0 k1 k2 k3 | v0 v1 v2 v3      rank 0 has q0 q1 k0 k1 v0 v1
 *
 * A length that the number of ranks does not divide is shared as evenly as possible: rank r of t
 * has parts n r / t to n (r + 1) / t, rounded down. */

#pragma once

#include "core/api.h"

#define DTRAIN_CUT_COMPONENTS 4 /* most components of a cut */

typedef enum dtrain_cut_axis {
    DTRAIN_CUT_NONE = 0, /* whole on every rank */
    DTRAIN_CUT_ROWS = 1,
    DTRAIN_CUT_COLUMNS = 2
} dtrain_cut_axis;

/* Every zero is the default written beside the field. */
typedef struct dtrain_cut {
    uint32_t axis;       /* dtrain_cut_axis; 0 = not cut */
    uint32_t components; /* components of the axis, each of which is cut: 3 of q|k|v, 2 of gate|up;
                            0 = 1. COLUMNS have one */
    int64_t parts;       /* equal parts of each component that stay whole: heads; heads of keys for
                            grouped queries; 0 = its rows or columns */
    int64_t widths[DTRAIN_CUT_COMPONENTS]; /* (components) lengths; zeros = equal lengths */
} dtrain_cut;
