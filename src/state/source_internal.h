/* The part of a trainer and of a loader that a state saves; a state knows no more of them. */

#pragma once

#include "core/platform_internal.h"
#include "strategy/strategy.h"
#include "optim/optimizer.h"
#include "optim/scaler.h"

/* A number of 4 or 8 bytes, the same on every rank; a float is taken by its bits. */
typedef struct dtrain__scalar {
    const char *name; /* "optimizer.step" */
    void *memory;     /* (bytes) */
    size_t bytes;
} dtrain__scalar;

/* The first member of a dtrain_trainer and of a dtrain_loader. */
typedef struct dtrain__state_source {
    dtrain__scalar scalars[5]; /* up to the first without a name */
    /* Continue where the scalars say, after a load. Write to note (room bytes) what does not
     * continue exactly, if anything. */
    void (*resume)(struct dtrain__state_source *source, char *note, size_t room);
    /* Of a trainer; NULL in a loader. */
    const dtrain_strategy *strategy;
    dtrain_optimizer *optimizer;
    dtrain_loss_scaler *scaler; /* NULL: the loss is not scaled */
    const uint32_t *micro;      /* micro-batches of the step under way that are done */
} dtrain__state_source;

/* Return the source that a trainer or a loader begins with; NULL for NULL. */
static inline dtrain__state_source *dtrain__source_of(void *object)
{
    return (dtrain__state_source *)object;
}
