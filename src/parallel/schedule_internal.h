/* Functions of a schedule that the runner and the tape use. */

#pragma once

#include "core/platform_internal.h"
#include "core/log.h"
#include "core/result.h"
#include "parallel/chunks_internal.h"
#include "parallel/pipeline.h"

#define DTRAIN__PASSES_MOST (1 << 22) /* most passes of all ranks: ranks * chunks * micro-batches */

/* Memory for the messages of one rank, kept from run to run. Each rank has its own, so that ranks
 * that are threads can share a schedule. */
typedef struct dtrain__run_memory {
    void *messages;
    size_t bytes;
} dtrain__run_memory;

DTRAIN__PRIVATE bool dtrain__is_message(const dtrain_pipeline_action *action);
/* Count the slots and inboxes of a rank. */
DTRAIN__PRIVATE void dtrain__pipeline_room(const dtrain_pipeline_schedule *schedule, int rank,
                                           int *slots, int *inboxes);
