/* The sum over the pipeline stages that share a weight
 *
 *     rank 0    embedding    g0 --.             .--> g0 + g1, and on along the data axis
 *                                  > all-reduce <
 *     rank 1    head         g1 --'             '--> g0 + g1, and on along the data axis
 *
 * Each rank that uses the weight has a copy, and the gradient in a separate bucket. All these ranks
 * have the same elements in the same shards, so that all copies get the same updates. TIE is the
 * first step of a bucket and waits for its sum: tied buckets are launched last, in finish, when
 * nothing is left to compute. The gradient travels as fp32, whatever reduce_dtype says. On one rank
 * nothing travels: backward adds each use to the gradient when it comes to that use, in another
 * order and with other bits. */

#include "core/platform_internal.h"
#include "comm/comm_internal.h"
#include "strategy/strategy_internal.h"
#include "strategy/steps_internal.h"

/* TIE: replace a tied weight's gradient by its sum over the ranks that have a copy. */
DTRAIN__PRIVATE dtrain_result dtrain__tie_begin(dtrain_strategy *strategy, dtrain__bucket *bucket)
{
    if (!bucket->tied) return DTRAIN_OK;
    if (!bucket->uses) /* all uses on this rank are frozen */
        DTRAIN__TRY(strategy->device->ops->zero(strategy->device, bucket->grads,
                                                (size_t)bucket->count * sizeof(float)));
    dtrain__label(strategy, bucket, "tied weight of bucket");
    DTRAIN__TRY(dtrain_all_reduce(strategy->ties[bucket->first_param], bucket->grads, bucket->grads,
                                  (size_t)bucket->count, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM,
                                  bucket->reduces));
    return dtrain__wait_works(strategy, bucket->reduces);
}

/* ---- Copies of tied weights -------------------------------------------------------------------*/

/* Make strategy->ties, the communicators of ranks that have copies of the same weights. Weights
 * with the same ranks share a communicator. All ranks of the axis make the same calls. */
DTRAIN__PRIVATE dtrain_result dtrain__split_ties(dtrain_strategy *strategy)
{
    const dtrain__stage_map *map = &strategy->stages;
    dtrain_comm *axis = strategy->groups.pipeline;
    const dtrain_param *before = NULL; /* the last storage that has copies */
    for (size_t i = 0; i < strategy->param_count && axis; i++) {
        const dtrain_param *p = &strategy->params[i];
        int users = 0;
        bool same = before != NULL; /* the same ranks use it and `before` */
        if (p->state.storage != p) continue;
        for (int rank = 0; rank < map->ranks; rank++) {
            const bool uses = dtrain__stage_uses(map, p, rank);
            users += uses;
            same = same && uses == dtrain__stage_uses(map, before, rank);
        }
        if (users < 2) continue;
        if (strategy->desc.compression)
            return dtrain_fail(
                DTRAIN_ERROR_UNSUPPORTED,
                "dtrain_strategy_create: compression: \"%s\" is tied between stages of several "
                "ranks, whose copies must get the same gradient to the bit; leave compression or "
                "the tie out",
                dtrain__short(p->name));
        const int color = dtrain__stage_uses(map, p, map->rank) ? 0 : -1;
        if (same) strategy->ties[i] = strategy->ties[before->state.index];
        else DTRAIN__TRY(dtrain_comm_split(axis, color, map->rank, &strategy->ties[i]));
        before = p;
    }
    return DTRAIN_OK;
}

DTRAIN__PRIVATE void dtrain__close_ties(dtrain_strategy *strategy)
{
    for (size_t i = 0; i < strategy->param_count && strategy->ties; i++) {
        dtrain_comm *comm = strategy->ties[i];
        for (size_t k = i; k < strategy->param_count; k++)
            if (strategy->ties[k] == comm) strategy->ties[k] = NULL;
        if (comm) dtrain_comm_destroy(comm);
    }
}
