/* Moves along the tensor axis, and conversions between placements
 *
 * Rows lie one after the other in memory. Where the ranks divide the rows evenly, one collective
 * moves them; otherwise each run of each rank moves by itself, in rank order, and finishes before
 * the call returns.
 *
 *     gather    columns or rows -> whole    each rank gets all parts
 *     slice     whole -> columns or rows    each rank keeps its part, nothing is sent
 *
 * Each is the backward of the other. Columns become rows, and rows columns, by both. Columns are
 * the rows of the transpose: they are transposed, moved as rows and transposed back. The gradient
 * of a whole tensor is whole on every rank; the operations that make it take the sums
 * (tape/linear.c). */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "comm/comm.h"
#include "tape/ops.h"
#include "tape/tape_internal.h"

/* ---- Sums, and rows ---------------------------------------------------------------------------*/

DTRAIN__PRIVATE dtrain__share dtrain__cut_part(const dtrain_op *op, const dtrain_cut *cut,
                                               int64_t length, int rank)
{
    const int64_t shape[4] = {length, 0, 0, 0};
    dtrain__share part;
    dtrain_cut rows;
    memset(&rows, 0, sizeof rows);
    rows.axis = DTRAIN_CUT_ROWS;
    dtrain__share_of(cut ? cut : &rows, shape, op->tape->groups.tensor_ranks, rank, &part);
    return part;
}

DTRAIN__PRIVATE dtrain__share dtrain__component_of(const dtrain_op *op, const dtrain_tensor *x,
                                                   int64_t width)
{
    dtrain_cut cut = dtrain__tensor_share(x)->cut;
    cut.components = 1;
    memset(cut.widths, 0, sizeof cut.widths);
    return dtrain__cut_part(op, &cut, width, op->tape->groups.tensor_rank);
}

/* Leave a collective to the caller; without `work`, or if the strategy wants no overlap, wait for
 * it. The bits are the same. */
static dtrain_result dtrain__move_started(const dtrain_op *op, dtrain_work *started,
                                          dtrain_work **work)
{
    const dtrain_strategy *strategy = op->tape->strategy;
    if (work) *work = NULL;
    if (!work || (strategy && dtrain__settings_of(strategy)->no_overlap))
        return dtrain_work_wait(started);
    *work = started;
    return DTRAIN_OK;
}

DTRAIN__PRIVATE dtrain_result dtrain__sum_values(const dtrain_op *op, void *values, int64_t count,
                                                 uint32_t dtype, dtrain_work **work)
{
    dtrain_comm *comm = op->tape->groups.tensor;
    dtrain_work *started = NULL;
    if (comm)
        DTRAIN__TRY(dtrain_all_reduce(comm, values, values, (size_t)count, (dtrain_dtype)dtype,
                                      DTRAIN_REDUCE_SUM, &started));
    return dtrain__move_started(op, started, work);
}

DTRAIN__PRIVATE dtrain_result dtrain__gather_rows(const dtrain_op *op, const dtrain_cut *cut,
                                                  const void *part, void *whole, int64_t rows,
                                                  int64_t n, uint32_t dtype, dtrain_work **work)
{
    const dtrain__groups *groups = &op->tape->groups;
    const int ranks = groups->tensor_ranks;
    const size_t row = (size_t)n * dtrain_dtype_bytes((dtrain_dtype)dtype);
    const char *from = (const char *)part;
    dtrain_work *started = NULL;
    bool even = true;
    for (int r = 0; r < ranks; r++) {
        const dtrain__share of = dtrain__cut_part(op, cut, rows, r);
        even = even && of.runs == 1 && of.count * ranks == rows;
    }
    if (groups->tensor && even)
        DTRAIN__TRY(dtrain_all_gather(groups->tensor, part, whole, (size_t)(rows / ranks * n),
                                      (dtrain_dtype)dtype, &started));
    for (int r = 0; groups->tensor && !even && r < ranks; r++) {
        const dtrain__share of = dtrain__cut_part(op, cut, rows, r);
        for (uint32_t i = 0; i < of.runs; i++) {
            const size_t bytes = (size_t)of.length[i] * row;
            char *place = (char *)whole + (size_t)of.first[i] * row;
            if (r == groups->tensor_rank) {
                DTRAIN__TRY(op->device->ops->copy(op->device, place, from, bytes,
                                                  DTRAIN_COPY_DEVICE_TO_DEVICE));
                from += bytes;
            }
            DTRAIN__TRY(dtrain_broadcast(groups->tensor, place, (size_t)(of.length[i] * n),
                                         (dtrain_dtype)dtype, r, &started));
            DTRAIN__TRY(dtrain_work_wait(started));
            started = NULL;
        }
    }
    return dtrain__move_started(op, started, work);
}

DTRAIN__PRIVATE dtrain_result dtrain__scatter_rows(const dtrain_op *op, const void *whole,
                                                   void *part, int64_t rows, int64_t n,
                                                   uint32_t dtype, dtrain_work **work)
{
    dtrain_comm *comm = op->tape->groups.tensor;
    const int ranks = op->tape->groups.tensor_ranks;
    const size_t row = (size_t)n * dtrain_dtype_bytes((dtrain_dtype)dtype);
    dtrain_work *started = NULL;
    if (comm && rows % ranks == 0)
        DTRAIN__TRY(dtrain_reduce_scatter(comm, whole, part, (size_t)(rows / ranks * n),
                                          (dtrain_dtype)dtype, DTRAIN_REDUCE_SUM, &started));
    for (int r = 0; comm && rows % ranks && r < ranks; r++) {
        const dtrain__share of = dtrain__cut_part(op, NULL, rows, r);
        DTRAIN__TRY(dtrain_reduce(comm, (const char *)whole + (size_t)of.first[0] * row, part,
                                  (size_t)(of.count * n), (dtrain_dtype)dtype, DTRAIN_REDUCE_SUM, r,
                                  &started));
        DTRAIN__TRY(dtrain_work_wait(started));
        started = NULL;
    }
    return dtrain__move_started(op, started, work);
}

/* ---- The operation ----------------------------------------------------------------------------*/

typedef struct dtrain__place {
    uint32_t to;           /* dtrain_placement */
    bool gathers;          /* y is whole; false: x is whole */
    bool by_columns;       /* the other tensor is cut by columns; false: by rows */
    int64_t rows, columns; /* of the whole */
    dtrain_cut cut;        /* of the rows or columns */
} dtrain__place;

/* Transpose x (rows, n) to y (n, rows). */
static dtrain_result dtrain__turn(const dtrain_op *op, const void *x, int64_t rows, int64_t n,
                                  void *y)
{
    dtrain_permute_args args;
    memset(&args, 0, sizeof args);
    args.shape[0] = args.shape[1] = 1;
    args.shape[2] = n, args.step[2] = 1;
    args.shape[3] = rows, args.step[3] = n;
    args.x = x;
    args.y = y;
    args.dtype = (dtrain_dtype)op->inputs[0]->dtype;
    return op->device->ops->permute(op->device, &args);
}

/* Gather or slice x to y. Columns borrow memory for the transposes of x and y. */
static dtrain_result dtrain__place_move(const dtrain_op *op, bool gathers, const void *x, void *y)
{
    const dtrain__place *place = (const dtrain__place *)op->args;
    const uint32_t dtype = op->inputs[0]->dtype;
    const int64_t rows = place->by_columns ? place->columns : place->rows;
    const int64_t n = place->by_columns ? place->rows : place->columns;
    const size_t row = (size_t)n * dtrain_dtype_bytes((dtrain_dtype)dtype);
    const dtrain__share part =
        dtrain__cut_part(op, &place->cut, rows, op->tape->groups.tensor_rank);
    const int64_t x_rows = gathers ? part.count : rows, y_rows = gathers ? rows : part.count;
    dtrain__chunk *scratch = NULL;
    const char *from = (const char *)x;
    char *to = (char *)y;
    if (place->by_columns) {
        scratch = dtrain__scratch_take(op->tape, (rows + part.count) * n, dtype);
        if (!scratch) return op->tape->error;
        DTRAIN__TRY(dtrain__turn(op, x, n, x_rows, scratch->memory));
        from = scratch->memory;
        to = scratch->memory + (size_t)x_rows * row;
    }
    char *const moved = to;
    if (gathers) DTRAIN__TRY(dtrain__gather_rows(op, &place->cut, from, to, rows, n, dtype, NULL));
    for (uint32_t i = 0; i < part.runs && !gathers; to += (size_t)part.length[i++] * row)
        DTRAIN__TRY(op->device->ops->copy(op->device, to, from + (size_t)part.first[i] * row,
                                          (size_t)part.length[i] * row,
                                          DTRAIN_COPY_DEVICE_TO_DEVICE));
    if (scratch) DTRAIN__TRY(dtrain__turn(op, moved, y_rows, n, y));
    dtrain__scratch_give(scratch);
    return DTRAIN_OK;
}

static dtrain_result dtrain__place_prepare(dtrain_op *op)
{
    dtrain__place *place = (dtrain__place *)op->args;
    const dtrain__groups *groups = &op->tape->groups;
    const dtrain_tensor *x = op->inputs[0];
    const dtrain__share *part = dtrain__tensor_share(x);
    const int64_t n = x->shape[x->ndim - 1];
    if (place->to > DTRAIN_PLACEMENT_ROWS)
        return dtrain__refuse(op, "placement is %u, which is not a dtrain_placement", place->to);
    place->gathers = place->to == DTRAIN_PLACEMENT_WHOLE;
    place->by_columns =
        (place->gathers ? x->placement : place->to) == (uint32_t)DTRAIN_PLACEMENT_COLUMNS;
    place->columns = x->placement == DTRAIN_PLACEMENT_COLUMNS ? part->whole : n;
    place->rows = x->placement == DTRAIN_PLACEMENT_ROWS ? part->whole : x->count / n;
    const int64_t length = place->by_columns ? place->columns : place->rows;
    const dtrain__share kept = dtrain__cut_part(op, NULL, length, groups->tensor_rank);
    if (!place->gathers && length < groups->tensor_ranks)
        return dtrain__refuse(op,
                              "%lld %s to share, and each of the %d ranks of the tensor axis "
                              "needs one",
                              (long long)length, place->by_columns ? "columns" : "rows",
                              groups->tensor_ranks);

    /* columns that an operation has placed without a cut must be cut evenly */
    place->cut = place->by_columns && place->gathers && part->cut.axis ? part->cut : kept.cut;
    const dtrain__share here = dtrain__cut_part(op, &place->cut, length, groups->tensor_rank);
    if (place->by_columns && place->gathers && !dtrain__share_same(&here, part))
        return dtrain__refuse(op, "the columns of other ranks are not known; convert what input 1 "
                                  "was made of");

    if (place->by_columns) {
        dtrain__output_like(op, x, place->gathers ? place->columns : kept.count,
                            (dtrain_dtype)x->dtype);
    } else {
        const int64_t shape[2] = {place->gathers ? place->rows : kept.count, place->columns};
        dtrain_op_output(op, (dtrain_dtype)x->dtype, 2, shape);
    }
    DTRAIN__TRY(op->tape->error);
    dtrain__place_as(op->outputs[0], place->to, &kept);
    return DTRAIN_OK;
}

static dtrain_result dtrain__place_forward(dtrain_op *op)
{
    return dtrain__place_move(op, ((const dtrain__place *)op->args)->gathers, op->input_data[0],
                              op->output_data[0]);
}

/* Convert the gradient back. A gradient that is there already gets it added from other memory. */
static dtrain_result dtrain__place_backward(dtrain_op *op)
{
    const dtrain_tensor *x = op->inputs[0];
    dtrain__chunk *beside = NULL;
    bool add;
    char *d_x = (char *)dtrain_op_input_grad(op, 0, &add);
    if (!d_x) return op->tape->error;
    if (add) beside = dtrain__scratch_take(op->tape, x->count, x->dtype);
    DTRAIN__TRY(op->tape->error);
    DTRAIN__TRY(dtrain__place_move(op, !((const dtrain__place *)op->args)->gathers,
                                   op->outputs[0]->grad, beside ? beside->memory : d_x));
    if (beside)
        DTRAIN__TRY(
            dtrain__tape_add(op->device, x->count, d_x, x->dtype, beside->memory, x->dtype, d_x));
    dtrain__scratch_give(beside);
    return DTRAIN_OK;
}

DTRAIN__OP(place, place, DTRAIN__OP_COUNTS, DTRAIN_RECOMPUTE_ELEMENTWISE, 0, DTRAIN__OP_PLACES,
           false)

DTRAIN_API dtrain_tensor *dtrain_place(dtrain_tape *tape, dtrain_tensor *x,
                                       dtrain_placement placement)
{
    dtrain__place args;
    const uint32_t whole = DTRAIN_PLACEMENT_WHOLE, to = (uint32_t)placement;
    if (tape && x && dtrain__is_float(x) && to <= DTRAIN_PLACEMENT_ROWS) {
        if (tape->groups.tensor_ranks == 1 || x->placement == to) return x;
        if (x->placement != whole && to != whole) x = dtrain_place(tape, x, DTRAIN_PLACEMENT_WHOLE);
    }
    memset(&args, 0, sizeof args);
    args.to = to;
    return dtrain_tape_apply(tape, &dtrain__place_op, &x, 1, NULL, 0, &args, sizeof args);
}
