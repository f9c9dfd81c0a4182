/* Cuts: which part of a parameter a rank has */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/log.h"
#include "parallel/cut_internal.h"

/* Return the length of a component in the whole. */
static int64_t dtrain__component(const dtrain_cut *cut, int64_t whole, uint32_t i)
{
    const uint32_t count = cut->components ? cut->components : 1;
    return cut->widths[0] ? cut->widths[i] : whole / (int64_t)count;
}

DTRAIN__PRIVATE dtrain_result dtrain__cut_check(const dtrain_cut *cut, const int64_t shape[4],
                                                int ranks)
{
    const uint32_t count = cut->components ? cut->components : 1;
    const bool columns = cut->axis == DTRAIN_CUT_COLUMNS;
    const char *const steps = columns ? "columns" : "rows";
    if (cut->axis == DTRAIN_CUT_NONE) return DTRAIN_OK;
    if (cut->axis > DTRAIN_CUT_COLUMNS || !shape[0] || (columns && !shape[1]))
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "cut.axis is %u, expected rows, or columns of a shape of two axes or "
                           "more",
                           (unsigned)cut->axis);
    if (count > DTRAIN_CUT_COMPONENTS || (columns && count > 1) || cut->parts < 0)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "cut.components is %u and cut.parts %lld, expected at most %d "
                           "components, of columns one, and parts of 0 or more",
                           (unsigned)count, (long long)cut->parts,
                           columns ? 1 : DTRAIN_CUT_COMPONENTS);
    const int64_t whole = shape[columns ? 1 : 0];
    int64_t left = whole;
    bool widths = false;
    for (int i = 0; i < DTRAIN_CUT_COMPONENTS; i++) widths = widths || cut->widths[i];
    for (uint32_t i = 0; i < count; i++) {
        const int64_t length = widths ? cut->widths[i] : dtrain__component(cut, whole, i);
        const int64_t parts = cut->parts ? cut->parts : length;
        if (length < 1 || length > whole)
            return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                               "component %u of its cut has a width of %lld, expected 1 to %lld "
                               "(%s in all)",
                               i, (long long)length, (long long)whole, steps);
        left -= length;
        if (length % parts)
            return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                               "component %u of its cut is %lld long, which does not divide into "
                               "%lld parts",
                               i, (long long)length, (long long)parts);
        if (parts < ranks)
            return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                               "its cut has %lld parts (heads, or %s) to share, and the tensor "
                               "axis %d ranks: each needs one; take fewer ranks",
                               (long long)parts, steps, ranks);
    }
    if (left == 0) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                       "the %u components of its cut have %lld of %lld %s; together they are all "
                       "of them",
                       count, (long long)(whole - left), (long long)whole, steps);
}

DTRAIN__PRIVATE void dtrain__share_of(const dtrain_cut *cut, const int64_t shape[4], int ranks,
                                      int rank, dtrain__share *part)
{
    memset(part, 0, sizeof *part);
    memcpy(part->shape, shape, sizeof part->shape);
    part->cut = *cut;
    part->axis = ranks > 1 ? (int)cut->axis - 1 : -1;
    if (part->axis >= 0) {
        int64_t *length = &part->shape[part->axis], begin = 0;
        part->whole = *length;
        part->runs = cut->components ? cut->components : 1;
        *length = 0;
        for (uint32_t i = 0; i < part->runs; i++) {
            const int64_t component = dtrain__component(cut, part->whole, i);
            const int64_t parts = cut->parts ? cut->parts : component, each = component / parts;
            part->first[i] = begin + each * (parts * rank / ranks);
            part->length[i] = begin + each * (parts * (rank + 1) / ranks) - part->first[i];
            *length += part->length[i];
            begin += component;
        }
    }
    part->count = part->inner = 1;
    for (int axis = 0; axis < 4 && part->shape[axis]; axis++) {
        part->count *= part->shape[axis];
        if (axis > part->axis) part->inner *= part->shape[axis];
    }
}

DTRAIN__PRIVATE int64_t dtrain__share_place(const dtrain__share *part, int64_t i, int64_t *run)
{
    *run = part->count - i;
    if (part->axis < 0) return i;
    const int64_t row = part->shape[part->axis] * part->inner, outer = i / row;
    int64_t at = i % row; /* less the elements of earlier runs */
    uint32_t k = 0;
    while (k + 1 < part->runs && at >= part->length[k] * part->inner)
        at -= part->length[k++] * part->inner;
    *run = part->length[k] * part->inner - at;
    return (outer * part->whole + part->first[k]) * part->inner + at;
}

DTRAIN__PRIVATE bool dtrain__share_same(const dtrain__share *a, const dtrain__share *b)
{
    return a->whole == b->whole && a->runs == b->runs &&
           memcmp(a->first, b->first, sizeof a->first) == 0 &&
           memcmp(a->length, b->length, sizeof a->length) == 0;
}
