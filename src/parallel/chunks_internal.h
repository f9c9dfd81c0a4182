/* Where the stages of a pipeline lie. */

#pragma once

#include "core/platform_internal.h"
#include "core/result.h"
#include "parallel/pipeline.h"

/* parallel/chunks.c */
/* Check the kind and its chunks, and count them: one on one rank. desc NULL = a zeroed one. */
DTRAIN__PRIVATE dtrain_result dtrain__pipeline_chunks(const dtrain_pipeline_desc *desc, int ranks,
                                                      int *chunks);
