/* Boxes: which elements a piece has, and which elements two pieces share. */

#pragma once

#include "core/core_internal.h"
#include "state/state.h"

/* state/box.c */
/* Return the piece that is a whole tensor. */
DTRAIN__PRIVATE dtrain_piece dtrain__piece_whole(const int64_t shape[4]);
/* Return the number of elements of the piece's box. */
DTRAIN__PRIVATE int64_t dtrain__box_count(const dtrain_piece *piece);
/* Tell whether a piece lies in a tensor of this shape. */
DTRAIN__PRIVATE bool dtrain__piece_fits(const dtrain_piece *piece, const int64_t shape[4]);
/* Order pieces by their boxes, then by their runs. */
DTRAIN__PRIVATE int dtrain__piece_order(const dtrain_piece *a, const dtrain_piece *b);
/* Tell whether two pieces are runs of the same box. */
DTRAIN__PRIVATE bool dtrain__box_same(const dtrain_piece *a, const dtrain_piece *b);
/* Set *common to the elements that both pieces have; return false if there are none. */
DTRAIN__PRIVATE bool dtrain__piece_common(const dtrain_piece *a, const dtrain_piece *b,
                                          dtrain_piece *common);
/* Return the place of element i of the box of `part` in `piece`, counted from the beginning of the
 * run of `piece`. The element must lie in `piece`. */
DTRAIN__PRIVATE int64_t dtrain__piece_place(const dtrain_piece *piece, const dtrain_piece *part,
                                            int64_t i);
/* Count the elements of the box of `part`, from i on, that also follow one another in `piece`. */
DTRAIN__PRIVATE int64_t dtrain__piece_span(const dtrain_piece *piece, const dtrain_piece *part,
                                           int64_t i);
