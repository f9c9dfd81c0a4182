/* Boxes
 *
 * A piece is a run of the elements of a box (state.h). Row-major order compares coordinates axis by
 * axis, so it is the same order in a tensor, in a box of the tensor, and in a box of that box.
 * Three facts follow, and the code needs no others:
 *
 *     - a smaller box shares a run of its elements with a run of a larger box, because both boxes
 *       have the same order
 *     - two pieces share a piece: the box where their boxes meet, and the run where both runs meet
 *     - a place in one box becomes a place in another by counting the elements before it */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "state/box_internal.h"

enum { DTRAIN__AXES = 4 };

/* Return the length of a box along an axis; 1 after the last axis that the tensor has. */
static int64_t dtrain__box_length(const dtrain_piece *piece, int axis)
{
    return piece->length[axis] || axis == 0 ? piece->length[axis] : 1;
}

DTRAIN__PRIVATE int64_t dtrain__box_count(const dtrain_piece *piece)
{
    int64_t count = 1;
    for (int d = 0; d < DTRAIN__AXES; d++) count *= dtrain__box_length(piece, d);
    return count;
}

DTRAIN__PRIVATE dtrain_piece dtrain__piece_whole(const int64_t shape[4])
{
    dtrain_piece piece;
    memset(&piece, 0, sizeof piece);
    memcpy(piece.length, shape, sizeof piece.length);
    piece.count = dtrain__box_count(&piece);
    return piece;
}

/* Compare without a sum that can overflow, because the numbers can come from a file. */
DTRAIN__PRIVATE bool dtrain__piece_fits(const dtrain_piece *piece, const int64_t shape[4])
{
    for (int d = 0; d < DTRAIN__AXES; d++)
        if (piece->first[d] < 0 || piece->length[d] < 0 || piece->length[d] > shape[d] ||
            piece->first[d] > shape[d] - piece->length[d] || (shape[d] && !piece->length[d]))
            return false;
    const int64_t count = dtrain__box_count(piece);
    return piece->offset >= 0 && piece->count >= 0 && piece->count <= count &&
           piece->offset <= count - piece->count;
}

/* Count the elements of the box of `part` that come before element `index` of the box of `whole`.
 * index can be the number of elements of `whole`. */
static int64_t dtrain__box_before(const dtrain_piece *part, const dtrain_piece *whole,
                                  int64_t index)
{
    int64_t at[DTRAIN__AXES], inner[DTRAIN__AXES], before = 0, elements = 1;
    for (int d = DTRAIN__AXES - 1; d >= 0; d--) {
        const int64_t length = d ? dtrain__box_length(whole, d) : 0; /* axis 0 takes the rest */
        at[d] = whole->first[d] + (length ? index % length : index);
        if (length) index /= length;
        inner[d] = elements;
        elements *= dtrain__box_length(part, d);
    }
    for (int d = 0; d < DTRAIN__AXES; d++) {
        const int64_t length = dtrain__box_length(part, d), past = at[d] - part->first[d];
        if (past < 0) return before;
        if (past >= length) return before + length * inner[d];
        before += past * inner[d];
    }
    return before;
}

DTRAIN__PRIVATE int dtrain__piece_order(const dtrain_piece *a, const dtrain_piece *b)
{
    for (int d = 0; d < DTRAIN__AXES; d++) {
        if (a->first[d] != b->first[d]) return a->first[d] < b->first[d] ? -1 : 1;
        if (a->length[d] != b->length[d]) return a->length[d] < b->length[d] ? -1 : 1;
    }
    if (a->offset != b->offset) return a->offset < b->offset ? -1 : 1;
    return (a->count > b->count) - (a->count < b->count);
}

DTRAIN__PRIVATE bool dtrain__box_same(const dtrain_piece *a, const dtrain_piece *b)
{
    return memcmp(a->first, b->first, sizeof a->first) == 0 &&
           memcmp(a->length, b->length, sizeof a->length) == 0;
}

DTRAIN__PRIVATE bool dtrain__piece_common(const dtrain_piece *a, const dtrain_piece *b,
                                          dtrain_piece *common)
{
    memset(common, 0, sizeof *common);
    for (int d = 0; d < DTRAIN__AXES; d++) {
        const int64_t end = dtrain__min(a->first[d] + dtrain__box_length(a, d),
                                        b->first[d] + dtrain__box_length(b, d));
        common->first[d] = dtrain__max(a->first[d], b->first[d]);
        common->length[d] = end - common->first[d];
        if (common->length[d] <= 0) return false;
    }
    common->offset = dtrain__max(dtrain__box_before(common, a, a->offset),
                                 dtrain__box_before(common, b, b->offset));
    common->count = dtrain__min(dtrain__box_before(common, a, a->offset + a->count),
                                dtrain__box_before(common, b, b->offset + b->count)) -
                    common->offset;
    return common->count > 0;
}

DTRAIN__PRIVATE int64_t dtrain__piece_place(const dtrain_piece *piece, const dtrain_piece *part,
                                            int64_t i)
{
    return dtrain__box_before(piece, part, i) - piece->offset;
}

/* Rows of the part follow one another in the piece as long as both have the same length along all
 * later axes. */
DTRAIN__PRIVATE int64_t dtrain__piece_span(const dtrain_piece *piece, const dtrain_piece *part,
                                           int64_t i)
{
    int64_t span = 1;
    for (int d = DTRAIN__AXES - 1; d >= 0; d--) {
        span *= dtrain__box_length(part, d);
        if (dtrain__box_length(part, d) != dtrain__box_length(piece, d)) break;
    }
    return span - i % span;
}
