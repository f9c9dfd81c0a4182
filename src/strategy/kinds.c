/* The table of kinds: what each shards */

#include "core/platform_internal.h"
#include "strategy/strategy_internal.h"

/* In the order of dtrain_strategy_kind, from DTRAIN_STRATEGY_DDP on. */
static const dtrain__kind_row dtrain__kind_rows[] = {
    /* name, {optimizer state, gradients, parameters are sharded}, owners, replicas */
    {"ddp", {false, false, false}, false, false},
    {"zero1", {true, false, false}, false, false},
    {"shard_grad_op", {true, true, false}, false, false},
    {"full_shard", {true, true, true}, false, false},
    {"zero3", {true, true, true}, true, false},
    {"hybrid_shard", {true, true, true}, false, true},
};

/* Find the row of a kind; NULL for AUTO, which is not resolved yet, and for unknown numbers. */
DTRAIN__PRIVATE const dtrain__kind_row *dtrain__row_of(uint32_t kind)
{
    if (kind < DTRAIN_STRATEGY_DDP || kind > DTRAIN_STRATEGY_HYBRID_SHARD) return NULL;
    return &dtrain__kind_rows[kind - DTRAIN_STRATEGY_DDP];
}
