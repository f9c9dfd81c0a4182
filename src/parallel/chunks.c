/* Where the stages of a pipeline lie: the chunks of each rank
 *
 * A strategy asks it which parameters are on this rank, with or without a schedule. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "parallel/chunks_internal.h"

DTRAIN_API int dtrain_pipeline_stage(uint32_t kind, int ranks, int chunks, int rank, int chunk)
{
    if (rank < 0 || rank >= ranks || chunk < 0 || chunk >= chunks) return -1;
    const bool back = kind == DTRAIN_PIPELINE_ZBV && chunk % 2;
    return chunk * ranks + (back ? ranks - 1 - rank : rank);
}

DTRAIN__PRIVATE dtrain__place_of_stage dtrain__pipeline_place(uint32_t kind, int ranks, int stage)
{
    dtrain__place_of_stage place = {stage % ranks, stage / ranks};
    if (kind == DTRAIN_PIPELINE_ZBV && place.chunk % 2) place.rank = ranks - 1 - place.rank;
    return place;
}

DTRAIN__PRIVATE bool dtrain__pipeline_splits(uint32_t kind)
{
    return kind == DTRAIN_PIPELINE_ZB_H1 || kind == DTRAIN_PIPELINE_ZBV;
}

DTRAIN__PRIVATE dtrain_result dtrain__pipeline_chunks(const dtrain_pipeline_desc *desc, int ranks,
                                                      int *chunks)
{
    static const char *const names[] = {"1F1B", "GPIPE", "INTERLEAVED", "ZB_H1", "ZBV"};
    const uint32_t kind = desc ? desc->kind : 0;
    if (kind > DTRAIN_PIPELINE_ZBV)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "kind %u of a pipeline is not a dtrain_pipeline_kind", kind);
    const bool loops = kind == DTRAIN_PIPELINE_INTERLEAVED, vee = kind == DTRAIN_PIPELINE_ZBV;
    const uint32_t given = desc ? desc->chunks : 0;
    *chunks = given ? (int)given : loops || vee ? 2 : 1;
    if (given <= DTRAIN__CHUNKS_MOST && (loops || given == 0 || *chunks == (vee ? 2 : 1)))
        return DTRAIN_OK;
    return dtrain_fail(
        DTRAIN_ERROR_ARGUMENT,
        "a pipeline of kind %s on %d ranks has %s, not %u; several stages a rank are "
        "for INTERLEAVED, two in the shape of a V for ZBV",
        names[kind], ranks,
        loops ? "1 to 64 chunks"
        : vee ? "2 chunks a rank"
              : "1 chunk a rank",
        given);
}
