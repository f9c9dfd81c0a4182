/* The sum over the stages that a weight is tied between
 *
 *     rank 0    embedding    g0 --.             .--> g0 + g1, and on along the data axis
 *                                  > all-reduce <
 *     rank 1    head         g1 --'             '--> g0 + g1, and on along the data axis
 *
 * Each rank that uses it has a copy, and its gradient in a bucket of its own: the same elements in
 * the same shards on all of them, so that both copies take the same steps. TIE comes first on the
 * bucket's way. It travels as fp32, whatever reduce_dtype says. On one rank, where nothing has to
 * travel, a tied gradient is added to as backward goes on: another order, and other bits. */

#include "core/platform_internal.h"
#include "strategy/strategy_internal.h"
#include "strategy/ways_internal.h"

/* TIE: a tied weight's gradient = its sum over the ranks that have a copy. A twin that counts what
 * a data axis sends has no other stages. */
DTRAIN__PRIVATE dtrain_result dtrain__tie_begin(dtrain_strategy *strategy, dtrain__bucket *bucket)
{
    dtrain_comm *comm = strategy->ties[bucket->first_param];
    if (!bucket->uses) /* all uses here are frozen ones */
        DTRAIN__TRY(strategy->device->ops->zero(strategy->device, bucket->grads,
                                                (size_t)bucket->count * sizeof(float)));
    if (!comm) return DTRAIN_OK;
    dtrain__label(strategy, bucket, "tied weight of bucket");
    return dtrain_all_reduce(comm, bucket->grads, bucket->grads, (size_t)bucket->count,
                             DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, bucket->reduces);
}
