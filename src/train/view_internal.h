/* The part of a trainer that the monitor reads. */

#pragma once

#include "core/platform_internal.h"
#include "comm/groups_internal.h"
#include "strategy/memory.h"
#include "state/source_internal.h"
#include "train/trainer.h"

/* The first member of a dtrain_trainer. */
typedef struct dtrain__trainer_view {
    dtrain__state_source state;
    const dtrain__groups *groups;
    int rank, ranks; /* rank and size in groups->all */
    /* Report the memory that this rank holds, and the memory that a plan of the loss predicts; an
     * error is the plan's. */
    dtrain_result (*memory)(const dtrain_trainer *trainer, dtrain_memory *held,
                            dtrain_memory *planned);
} dtrain__trainer_view;

static inline const dtrain__trainer_view *dtrain__trainer_seen(const dtrain_trainer *trainer)
{
    return (const dtrain__trainer_view *)(const void *)trainer;
}
