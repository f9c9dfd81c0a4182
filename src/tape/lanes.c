/* Sums of lanes
 *
 * A sum over what a tensor axis cuts has other bits with other numbers of ranks, unless its order
 * is fixed: on an exact mesh (parallel/mesh.h) it is 8 partial sums, lanes, of equal parts of what
 * is cut, added up by one binary tree. A rank has a subtree of them, and the ranks exchange its
 * result:
 *
 *     lanes      0   1   2   3   4   5   6   7
 *                 \ /     \ /     \ /     \ /
 *                   \   /           \   /          2 ranks: each adds four lanes
 *                     \ --------- /                and both add the two results
 *
 * One rank goes the same way, with all lanes. Slots of memory: this rank's lanes, then the results
 * of all ranks. */

#include "core/platform_internal.h"
#include "comm/comm.h"
#include "tape/ops.h"
#include "tape/tape_internal.h"

/* Find the width of a lane in each component of a cut, and refuse what has no 8 equal ones. */
DTRAIN__PRIVATE dtrain_result dtrain__lanes_check(const dtrain_op *op, const dtrain_cut *cut,
                                                  int64_t whole, dtrain__share *lane)
{
    if (dtrain__lane_of(cut, whole, op->tape->groups.tensor_ranks, lane)) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                       "%s: the mesh is exact, and a sum over %lld does not divide into %d lanes "
                       "that %d ranks share in whole parts; make each component of the cut "
                       "divisible by the lanes and its parts by the ranks, or leave exact out",
                       op->desc->name, (long long)whole, DTRAIN__SUM_LANES,
                       op->tape->groups.tensor_ranks);
}

/* Return the slots that a sum needs. */
DTRAIN__PRIVATE int64_t dtrain__lanes_slots(const dtrain_op *op)
{
    const int ranks = op->tape->groups.tensor_ranks;
    return DTRAIN__SUM_LANES / ranks + (ranks > 1 ? ranks : 0);
}

/* Add up `count` slots of n values, a power of two, into the first. */
DTRAIN__PRIVATE dtrain_result dtrain__lanes_tree(const dtrain_op *op, float *slots, int count,
                                                 int64_t n)
{
    for (int step = 1; step < count; step *= 2)
        for (int i = 0; i < count; i += 2 * step) {
            float *left = slots + i * n, *right = left + step * n;
            DTRAIN__TRY(dtrain__tape_add(op->device, n, left, DTRAIN_DTYPE_F32, right,
                                         DTRAIN_DTYPE_F32, left));
        }
    return DTRAIN_OK;
}

/* Set out (n) to the sum of all lanes, of which this rank's are in the slots. */
DTRAIN__PRIVATE dtrain_result dtrain__lanes_add(const dtrain_op *op, float *slots, int64_t n,
                                                float *out)
{
    const int ranks = op->tape->groups.tensor_ranks, here = DTRAIN__SUM_LANES / ranks;
    dtrain_work *work = NULL;
    DTRAIN__TRY(dtrain__lanes_tree(op, slots, here, n));
    if (ranks > 1) {
        float *results = slots + here * n;
        DTRAIN__TRY(dtrain_all_gather(dtrain__axis_comm(op), slots, results, (size_t)n,
                                      DTRAIN_DTYPE_F32, &work));
        DTRAIN__TRY(dtrain_work_wait(work));
        slots = results;
        DTRAIN__TRY(dtrain__lanes_tree(op, slots, ranks, n));
    }
    return op->device->ops->copy(op->device, out, slots, (size_t)n * sizeof *out,
                                 DTRAIN_COPY_DEVICE_TO_DEVICE);
}
