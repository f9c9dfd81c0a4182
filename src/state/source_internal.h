/* The part of a trainer or loader that a state saves; a state knows no other part. */

#pragma once

#include "core/platform_internal.h"
#include "strategy/strategy.h"
#include "optim/optimizer.h"
#include "optim/scaler.h"

/* A number of 4 or 8 bytes, the same on every rank. */
typedef struct dtrain__scalar {
    const char *name; /* "optimizer.step" */
    void *memory;     /* (bytes) */
    size_t bytes;
} dtrain__scalar;

/* The first member of a dtrain_trainer and of a dtrain_loader. */
typedef struct dtrain__state_source {
    dtrain__scalar scalars[5]; /* ends at the first without a name */
    /* Continue from the loaded scalars. If that is not exact, write the reason to note (room
     * bytes). */
    void (*resume)(struct dtrain__state_source *source, char *note, size_t room);
    /* Members of a trainer; NULL in a loader. */
    const dtrain_strategy *strategy;
    dtrain_optimizer *optimizer;
    dtrain_loss_scaler *scaler; /* NULL: no loss scaling */
    const uint32_t *micro;      /* finished micro-batches of the step under way */
} dtrain__state_source;

/* Return the source at the beginning of a trainer or loader; NULL for NULL. */
static inline dtrain__state_source *dtrain__source_of(void *object)
{
    return (dtrain__state_source *)object;
}
