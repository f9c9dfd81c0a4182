/* The number of pipeline stages on a rank, for schedules and for strategies */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "parallel/chunks_internal.h"

DTRAIN__PRIVATE dtrain_result dtrain__pipeline_chunks(const dtrain_pipeline_desc *desc, int ranks,
                                                      int *chunks)
{
    static const char *const names[] = {"1F1B", "GPIPE", "INTERLEAVED", "ZB_H1"};
    const uint32_t kind = desc ? desc->kind : 0, given = desc ? desc->chunks : 0;
    if (kind > DTRAIN_PIPELINE_ZB_H1)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "kind %u of a pipeline is not a dtrain_pipeline_kind", kind);
    const bool loops = kind == DTRAIN_PIPELINE_INTERLEAVED;
    *chunks = ranks == 1 ? 1 : given ? (int)given : loops ? 2 : 1;
    if (given <= (loops ? 64 : 1)) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                       "a pipeline of kind %s on %d ranks has %s a rank, not %u; several stages a "
                       "rank are for INTERLEAVED",
                       names[kind], ranks, loops ? "1 to 64 chunks" : "1 chunk", given);
}
