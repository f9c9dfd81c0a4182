/* Conversions between placements
 *
 * There are two moves, each the other's backward:
 *
 *     gather    columns or rows -> whole    all gather
 *     slice     whole -> columns or rows    a rank keeps its own
 *
 * Columns become rows, and rows columns, by both. The gradient of what is whole is whole on every
 * rank, and nothing is added up: the sums are in the operations that make them (tape/linear.c).
 *
 * Rows are one piece of memory, columns are not. A block is what one rank has, (rows, its columns);
 * blocks become rows of all columns by way of their transpose, where the columns of each run are
 * one piece:
 *
 *     block of rank 0   a a          T  a a a      <- column 0 of all rows
 *     (3 rows)          a a             a a a
 *                       a a             b b b                 rows   a a b
 *     of rank 1         b                                 =>         a a b
 *                       b                                            a a b
 *                       b
 *
 * Blocks of different sizes travel in slots of the largest. */

#include "core/platform_internal.h"
#include "tape/ops.h"
#include "tape/tape_internal.h"

typedef struct dtrain__place {
    uint32_t from, to;     /* dtrain_placement */
    int64_t rows, columns; /* of the whole */
    dtrain_cut cut;        /* of its columns */
} dtrain__place;

/* A conversion under way. */
typedef struct dtrain__moving {
    const dtrain_op *op;
    const dtrain__place *place;
    int ranks, rank;
    dtrain_dtype dtype;
    size_t element;                        /* bytes */
    int64_t slot;                          /* elements of the largest block */
    char *send, *receive, *turned, *whole; /* a slot, those of all ranks, the transpose; and what
                                              is between rows and columns */
} dtrain__moving;

static dtrain__share dtrain__columns_of(const dtrain__moving *m, int rank)
{
    const int64_t shape[4] = {m->place->columns, 0, 0, 0};
    dtrain__share part;
    dtrain__share_of(&m->place->cut, shape, m->ranks, rank, &part);
    return part;
}

/* Describe a conversion and the elements of memory that it borrows: either way, so that forward and
 * backward find the same. */
static int64_t dtrain__moving_describe(const dtrain_op *op, dtrain__moving *m)
{
    const dtrain__place *place = (const dtrain__place *)op->args;
    memset(m, 0, sizeof *m);
    m->op = op;
    m->place = place;
    m->ranks = op->tape->groups.tensor_ranks;
    m->rank = op->tape->groups.tensor_rank;
    m->dtype = (dtrain_dtype)op->inputs[0]->dtype;
    m->element = dtrain_dtype_bytes(m->dtype);
    if (place->from != DTRAIN_PLACEMENT_COLUMNS && place->to != DTRAIN_PLACEMENT_COLUMNS) return 0;
    for (int r = 0; r < m->ranks; r++)
        m->slot = dtrain__max(m->slot, place->rows * dtrain__columns_of(m, r).count);
    const bool both = place->from == DTRAIN_PLACEMENT_ROWS || place->to == DTRAIN_PLACEMENT_ROWS;
    return (1 + m->ranks) * m->slot + (both ? 2 : 1) * place->rows * place->columns;
}

/* Lay the borrowed memory out; NULL: nothing was borrowed. */
static void dtrain__moving_borrow(dtrain__moving *m, void *memory)
{
    if (!memory) return;
    m->send = (char *)memory;
    m->receive = m->send + (size_t)m->slot * m->element;
    m->turned = m->receive + (size_t)(m->ranks * m->slot) * m->element;
    m->whole = m->turned + (size_t)(m->place->rows * m->place->columns) * m->element;
}

/* Transpose x (rows, n), of rows `stride` apart, to y (n, rows). */
static dtrain_result dtrain__turn(const dtrain__moving *m, const char *x, int64_t rows, int64_t n,
                                  int64_t stride, char *y)
{
    dtrain_permute_args args;
    memset(&args, 0, sizeof args);
    args.shape[0] = args.shape[1] = 1;
    args.shape[2] = n, args.step[2] = 1;
    args.shape[3] = rows, args.step[3] = stride;
    args.x = x;
    args.y = y;
    args.dtype = m->dtype;
    return m->op->device->ops->permute(m->op->device, &args);
}

static dtrain_result dtrain__move_bytes(const dtrain__moving *m, char *to, const char *from,
                                        int64_t count)
{
    return m->op->device->ops->copy(m->op->device, to, from, (size_t)count * m->element,
                                    DTRAIN_COPY_DEVICE_TO_DEVICE);
}

static dtrain_result dtrain__gather_columns(const dtrain__moving *m, const char *x, char *whole)
{
    const int64_t rows = m->place->rows, count = rows * dtrain__columns_of(m, m->rank).count;
    dtrain_work *work = NULL;
    if (count < m->slot) {
        DTRAIN__TRY(dtrain__move_bytes(m, m->send, x, count));
        x = m->send;
    }
    DTRAIN__TRY(dtrain_all_gather(dtrain__axis_comm(m->op), x, m->receive, (size_t)m->slot,
                                  m->dtype, &work));
    DTRAIN__TRY(dtrain_work_wait(work));
    for (int r = 0; r < m->ranks; r++) {
        const dtrain__share part = dtrain__columns_of(m, r);
        const char *run = m->receive + (size_t)(r * m->slot) * m->element;
        for (uint32_t i = 0; i < part.runs; i++) {
            DTRAIN__TRY(dtrain__turn(m, run, rows, part.length[i], part.count,
                                     m->turned + (size_t)(part.first[i] * rows) * m->element));
            run += (size_t)part.length[i] * m->element;
        }
    }
    return dtrain__turn(m, m->turned, m->place->columns, rows, rows, whole);
}

static dtrain_result dtrain__slice_columns(const dtrain__moving *m, const char *whole, char *y)
{
    const int64_t rows = m->place->rows;
    const dtrain__share part = dtrain__columns_of(m, m->rank);
    int64_t at = 0;
    for (uint32_t i = 0; i < part.runs; at += part.length[i++])
        DTRAIN__TRY(dtrain__turn(m, whole + (size_t)part.first[i] * m->element, rows,
                                 part.length[i], m->place->columns,
                                 m->turned + (size_t)(at * rows) * m->element));
    return dtrain__turn(m, m->turned, part.count, rows, rows, y);
}

/* Convert x, which lies as `from`, to y. In a plan nothing is sent. */
static dtrain_result dtrain__place_move(const dtrain__moving *m, uint32_t from, uint32_t to,
                                        const void *x, void *y)
{
    const dtrain__share rows = dtrain__rows_share(m->place->rows, m->ranks, m->rank);
    const int64_t columns = m->place->columns;
    const char *whole = (const char *)x;
    char *const gathered = to == DTRAIN_PLACEMENT_WHOLE ? (char *)y : m->whole;
    dtrain_work *work = NULL;
    if (!dtrain__axis_comm(m->op)) return DTRAIN_OK;
    if (from != DTRAIN_PLACEMENT_WHOLE) whole = gathered;
    if (from == DTRAIN_PLACEMENT_COLUMNS)
        DTRAIN__TRY(dtrain__gather_columns(m, (const char *)x, gathered));
    if (from == DTRAIN_PLACEMENT_ROWS)
        DTRAIN__TRY(dtrain__gather_rows(dtrain__axis_comm(m->op), m->op->device, x, gathered,
                                        m->place->rows, columns, m->dtype, &work));
    DTRAIN__TRY(dtrain_work_wait(work));
    if (to == DTRAIN_PLACEMENT_COLUMNS) return dtrain__slice_columns(m, whole, (char *)y);
    if (to == DTRAIN_PLACEMENT_WHOLE) return DTRAIN_OK;
    return dtrain__move_bytes(m, (char *)y, whole + (size_t)(rows.first[0] * columns) * m->element,
                              rows.count * columns);
}

/* ---- The operation ----------------------------------------------------------------------------*/

/* Find the cut that the columns of x have; those that some operation has placed without one are cut
 * evenly, or cannot be told. */
static dtrain_result dtrain__place_cut(const dtrain_op *op, dtrain__place *place)
{
    const dtrain__groups *groups = &op->tape->groups;
    const dtrain__share *part = dtrain__tensor_share(op->inputs[0]);
    const int64_t shape[4] = {place->columns, 0, 0, 0};
    char text[DTRAIN__SHARE_TEXT];
    dtrain__share even;
    place->cut.axis = DTRAIN_CUT_ROWS; /* of one axis: a row */
    if (place->from != DTRAIN_PLACEMENT_COLUMNS) return DTRAIN_OK;
    if (part->cut.axis) place->cut = part->cut;
    dtrain__share_of(&place->cut, shape, groups->tensor_ranks, groups->tensor_rank, &even);
    if (dtrain__share_same(&even, part)) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                       "dtrain_place: of the input this rank has the columns %s, and those of "
                       "other ranks are not known; convert what it was made of",
                       dtrain__share_text(part, text));
}

static dtrain_result dtrain__place_prepare(dtrain_op *op)
{
    dtrain__place *place = (dtrain__place *)op->args;
    const dtrain__groups *groups = &op->tape->groups;
    const dtrain_tensor *x = op->inputs[0];
    const dtrain__share *part = dtrain__tensor_share(x);
    const int64_t n = x->shape[x->ndim - 1];
    dtrain__moving m;
    dtrain__share kept;
    if (place->to > DTRAIN_PLACEMENT_ROWS)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_place: placement is %u, which is not a dtrain_placement",
                           place->to);
    place->from = x->placement;
    place->columns = place->from == DTRAIN_PLACEMENT_COLUMNS ? part->whole : n;
    place->rows = place->from == DTRAIN_PLACEMENT_ROWS ? part->whole : x->count / n;
    DTRAIN__TRY(dtrain__place_cut(op, place));
    const bool columns = place->to == DTRAIN_PLACEMENT_COLUMNS;
    const int64_t length = columns ? place->columns : place->rows;
    if (place->to != DTRAIN_PLACEMENT_WHOLE && length < groups->tensor_ranks)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_place: %lld %s to share, and the tensor axis has %d ranks: each "
                           "needs one",
                           (long long)length, columns ? "columns" : "rows", groups->tensor_ranks);
    kept = dtrain__rows_share(length, groups->tensor_ranks, groups->tensor_rank);
    if (place->to == DTRAIN_PLACEMENT_ROWS || place->from == DTRAIN_PLACEMENT_ROWS) {
        const int64_t shape[2] = {place->to == DTRAIN_PLACEMENT_ROWS ? kept.count : place->rows,
                                  columns ? kept.count : place->columns};
        dtrain_op_output(op, (dtrain_dtype)x->dtype, 2, shape);
    } else {
        dtrain__output_like(op, x, columns ? kept.count : place->columns, (dtrain_dtype)x->dtype);
    }
    DTRAIN__TRY(op->tape->error);
    dtrain__place_as(op->outputs[0], place->to, &kept);
    dtrain__op_borrow(op, dtrain__moving_describe(op, &m), x->dtype);
    return DTRAIN_OK;
}

static dtrain_result dtrain__place_forward(dtrain_op *op)
{
    const dtrain__place *place = (const dtrain__place *)op->args;
    dtrain__moving m;
    (void)dtrain__moving_describe(op, &m);
    dtrain__moving_borrow(&m, dtrain__op_scratch(op));
    return dtrain__place_move(&m, place->from, place->to, op->input_data[0], op->output_data[0]);
}

/* Convert the gradient back; where there is one already, beside it, and add. */
static dtrain_result dtrain__place_backward(dtrain_op *op)
{
    const dtrain__place *place = (const dtrain__place *)op->args;
    const dtrain_tensor *x = op->inputs[0];
    dtrain__chunk *scratch = NULL, *beside = NULL;
    dtrain__moving m;
    bool add;
    const size_t bytes = (size_t)dtrain__moving_describe(op, &m) * m.element;
    char *d_x = (char *)dtrain_op_input_grad(op, 0, &add);
    if (!d_x) return op->tape->error;
    if (bytes) scratch = dtrain__scratch_take(op->tape, bytes);
    if (add) beside = dtrain__scratch_take(op->tape, dtrain__tensor_bytes(x));
    DTRAIN__TRY(op->tape->error);
    dtrain__moving_borrow(&m, scratch ? scratch->memory : NULL);
    DTRAIN__TRY(dtrain__place_move(&m, place->to, place->from, op->outputs[0]->grad,
                                   beside ? beside->memory : d_x));
    if (beside)
        DTRAIN__TRY(
            dtrain__tape_add(op->device, x->count, d_x, x->dtype, beside->memory, x->dtype, d_x));
    dtrain__scratch_give(scratch);
    dtrain__scratch_give(beside);
    return DTRAIN_OK;
}

DTRAIN__OP(place, place, 0, DTRAIN_RECOMPUTE_ELEMENTWISE, 0, DTRAIN__OP_PLACES, false)

DTRAIN_API dtrain_tensor *dtrain_place(dtrain_tape *tape, dtrain_tensor *x,
                                       dtrain_placement placement)
{
    dtrain__place args;
    if (tape && x && dtrain__is_float(x) && (uint32_t)placement <= DTRAIN_PLACEMENT_ROWS &&
        (tape->groups.tensor_ranks == 1 || x->placement == (uint32_t)placement))
        return x;
    memset(&args, 0, sizeof args);
    args.to = placement;
    return dtrain_tape_apply(tape, &dtrain__place_op, &x, 1, NULL, 0, &args, sizeof args);
}
