/* Moves along the tensor axis, and conversions between placements
 *
 * Rows lie one after the other, so that a part is one piece of memory. Where the ranks divide the
 * rows one collective does; otherwise each rank's piece goes by itself, in rank order, and no
 * collective is left under way.
 *
 * There are two conversions, each the other's backward:
 *
 *     gather    columns or rows -> whole    all gather
 *     slice     whole -> columns or rows    a rank keeps its own
 *
 * Columns become rows, and rows columns, by both. The gradient of what is whole is whole on every
 * rank, and nothing is added up: the sums are in the operations that make them (tape/linear.c).
 *
 * Columns are not one piece. A block is what one rank has, (rows, its columns); blocks become rows
 * of all columns by way of their transpose, where the columns of each run are one piece:
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

/* Leave a collective to the caller, or wait for it: without `work`, or where the strategy wants no
 * overlap. The bits are the same. */
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

DTRAIN__PRIVATE dtrain_result dtrain__gather_rows(const dtrain_op *op, const void *part,
                                                  void *whole, int64_t rows, int64_t n,
                                                  uint32_t dtype, dtrain_work **work)
{
    const dtrain__groups *groups = &op->tape->groups;
    dtrain_comm *comm = groups->tensor;
    const int ranks = groups->tensor_ranks;
    const size_t row = (size_t)n * dtrain_dtype_bytes((dtrain_dtype)dtype);
    dtrain_work *started = NULL;
    if (comm && rows % ranks == 0)
        DTRAIN__TRY(dtrain_all_gather(comm, part, whole, (size_t)(rows / ranks * n),
                                      (dtrain_dtype)dtype, &started));
    for (int r = 0; comm && rows % ranks && r < ranks; r++) {
        const dtrain__share of = dtrain__cut_part(op, NULL, rows, r);
        char *place = (char *)whole + (size_t)of.first[0] * row;
        if (r == groups->tensor_rank)
            DTRAIN__TRY(op->device->ops->copy(op->device, place, part, (size_t)of.count * row,
                                              DTRAIN_COPY_DEVICE_TO_DEVICE));
        DTRAIN__TRY(dtrain_broadcast(comm, place, (size_t)(of.count * n), (dtrain_dtype)dtype, r,
                                     &started));
        DTRAIN__TRY(dtrain_work_wait(started));
        started = NULL;
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

/* ---- Columns ----------------------------------------------------------------------------------*/

typedef struct dtrain__place {
    uint32_t to;           /* dtrain_placement */
    bool gathers;          /* y is whole; false: x is */
    bool by_columns;       /* the other one is cut by columns; false: by rows */
    int64_t rows, columns; /* of the whole */
    int64_t slot;          /* elements of the largest block */
    dtrain_cut cut;        /* of the columns */
} dtrain__place;

/* Transpose x (rows, n), of rows `stride` apart, to y (n, rows). */
static dtrain_result dtrain__turn(const dtrain_op *op, const char *x, int64_t rows, int64_t n,
                                  int64_t stride, char *y)
{
    dtrain_permute_args args;
    memset(&args, 0, sizeof args);
    args.shape[0] = args.shape[1] = 1;
    args.shape[2] = n, args.step[2] = 1;
    args.shape[3] = rows, args.step[3] = stride;
    args.x = x;
    args.y = y;
    args.dtype = (dtrain_dtype)op->inputs[0]->dtype;
    return op->device->ops->permute(op->device, &args);
}

static dtrain_result dtrain__gather_columns(const dtrain_op *op, const char *x, char *whole,
                                            char *scratch)
{
    const dtrain__place *place = (const dtrain__place *)op->args;
    const dtrain__groups *groups = &op->tape->groups;
    const dtrain_dtype dtype = (dtrain_dtype)op->inputs[0]->dtype;
    const size_t element = dtrain_dtype_bytes(dtype), slot = (size_t)place->slot;
    const int64_t rows = place->rows;
    const int64_t count =
        rows * dtrain__cut_part(op, &place->cut, place->columns, groups->tensor_rank).count;
    char *const blocks = scratch + slot * element;
    char *const turned = blocks + (size_t)groups->tensor_ranks * slot * element;
    dtrain_work *work = NULL;
    if (count < place->slot) {
        DTRAIN__TRY(op->device->ops->copy(op->device, scratch, x, (size_t)count * element,
                                          DTRAIN_COPY_DEVICE_TO_DEVICE));
        x = scratch;
    }
    DTRAIN__TRY(dtrain_all_gather(groups->tensor, x, blocks, slot, dtype, &work));
    DTRAIN__TRY(dtrain_work_wait(work));
    for (int r = 0; r < groups->tensor_ranks; r++) {
        const dtrain__share part = dtrain__cut_part(op, &place->cut, place->columns, r);
        const char *run = blocks + (size_t)r * slot * element;
        for (uint32_t i = 0; i < part.runs; i++) {
            DTRAIN__TRY(dtrain__turn(op, run, rows, part.length[i], part.count,
                                     turned + (size_t)(part.first[i] * rows) * element));
            run += (size_t)part.length[i] * element;
        }
    }
    return dtrain__turn(op, turned, place->columns, rows, rows, whole);
}

static dtrain_result dtrain__slice_columns(const dtrain_op *op, const char *whole, char *y,
                                           char *turned)
{
    const dtrain__place *place = (const dtrain__place *)op->args;
    const dtrain__share part =
        dtrain__cut_part(op, &place->cut, place->columns, op->tape->groups.tensor_rank);
    const size_t element = dtrain_dtype_bytes((dtrain_dtype)op->inputs[0]->dtype);
    int64_t at = 0;
    for (uint32_t i = 0; i < part.runs; at += part.length[i++])
        DTRAIN__TRY(dtrain__turn(op, whole + (size_t)part.first[i] * element, place->rows,
                                 part.length[i], place->columns,
                                 turned + (size_t)(at * place->rows) * element));
    return dtrain__turn(op, turned, part.count, place->rows, place->rows, y);
}

/* ---- The operation ----------------------------------------------------------------------------*/

/* Convert x to y, either way. Columns borrow a slot, all ranks' slots and the transpose. In a plan
 * nothing is sent. */
static dtrain_result dtrain__place_move(const dtrain_op *op, bool gathers, const void *x, void *y)
{
    const dtrain__place *place = (const dtrain__place *)op->args;
    const dtrain__groups *groups = &op->tape->groups;
    const uint32_t dtype = op->inputs[0]->dtype;
    const size_t row = (size_t)place->columns * dtrain_dtype_bytes((dtrain_dtype)dtype);
    if (place->by_columns) {
        dtrain__chunk *scratch = dtrain__scratch_take(
            op->tape, (1 + groups->tensor_ranks) * place->slot + place->rows * place->columns,
            dtype);
        if (!scratch) return op->tape->error;
        if (groups->tensor)
            DTRAIN__TRY((gathers ? dtrain__gather_columns : dtrain__slice_columns)(
                op, (const char *)x, (char *)y, scratch->memory));
        dtrain__scratch_give(scratch);
        return DTRAIN_OK;
    }
    if (gathers) return dtrain__gather_rows(op, x, y, place->rows, place->columns, dtype, NULL);
    if (!groups->tensor) return DTRAIN_OK;
    const dtrain__share rows = dtrain__cut_part(op, NULL, place->rows, groups->tensor_rank);
    return op->device->ops->copy(op->device, y, (const char *)x + (size_t)rows.first[0] * row,
                                 (size_t)rows.count * row, DTRAIN_COPY_DEVICE_TO_DEVICE);
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

    /* columns that some operation has placed without a cut are cut evenly, or cannot be told */
    place->cut = place->by_columns && place->gathers && part->cut.axis ? part->cut : kept.cut;
    const dtrain__share here =
        dtrain__cut_part(op, &place->cut, place->columns, groups->tensor_rank);
    if (place->by_columns && place->gathers && !dtrain__share_same(&here, part))
        return dtrain__refuse(op, "the columns of other ranks are not known; convert what input 1 "
                                  "was made of");
    for (int r = 0; r < groups->tensor_ranks; r++)
        place->slot = dtrain__max(
            place->slot, place->rows * dtrain__cut_part(op, &place->cut, place->columns, r).count);

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

/* Convert the gradient back; where there is one already, beside it, and add. */
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
