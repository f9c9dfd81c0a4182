/* The number of pipeline stages on a rank. */

#pragma once

#include "core/platform_internal.h"
#include "core/result.h"
#include "parallel/pipeline.h"

/* parallel/chunks.c */
/* Check the kind and its chunks, and count them; 1 on one rank. desc NULL = a zeroed desc. */
DTRAIN__PRIVATE dtrain_result dtrain__pipeline_chunks(const dtrain_pipeline_desc *desc, int ranks,
                                                      int *chunks);
