/* The table of kinds: what each shards */

#include "core/platform_internal.h"
#include "strategy/strategy_internal.h"

/* A kind is what it shards; whether shards are whole tensors with owners, as optimizers of matrices
 * need them; and whether every node has a replica, so that shards are summed across nodes. In the
 * order of their numbers, from DTRAIN_STRATEGY_DDP on. */
static const dtrain__kind_row dtrain__kind_rows[] = {
    /* name, {state, grads, params are sharded}, owners, replicas */
    {"ddp", {false, false, false}, false, false},
    {"zero1", {true, false, false}, false, false},
    {"shard_grad_op", {true, true, false}, false, false},
    {"full_shard", {true, true, true}, false, false},
    {"zero3", {true, true, true}, true, false},
    {"hybrid_shard", {true, true, true}, false, true},
};

/* Find the row of a kind; NULL: AUTO, which is none yet, or a number that means nothing. */
DTRAIN__PRIVATE const dtrain__kind_row *dtrain__row_of(uint32_t kind)
{
    if (kind < DTRAIN_STRATEGY_DDP || kind > DTRAIN_STRATEGY_HYBRID_SHARD) return NULL;
    return &dtrain__kind_rows[kind - DTRAIN_STRATEGY_DDP];
}
