/* Where the stages of a pipeline lie. */

#pragma once

#include "core/platform_internal.h"
#include "core/result.h"
#include "parallel/pipeline.h"

#define DTRAIN__CHUNKS_MOST 64

typedef struct dtrain__place_of_stage {
    int rank, chunk;
} dtrain__place_of_stage;

/* parallel/chunks.c */
DTRAIN__PRIVATE dtrain__place_of_stage dtrain__pipeline_place(uint32_t kind, int ranks, int stage);
/* Tell whether the gradients of weights are actions of their own. */
DTRAIN__PRIVATE bool dtrain__pipeline_splits(uint32_t kind);
/* Check the kind and its chunks; desc NULL = a zeroed one. */
DTRAIN__PRIVATE dtrain_result dtrain__pipeline_chunks(const dtrain_pipeline_desc *desc, int ranks,
                                                      int *chunks);
