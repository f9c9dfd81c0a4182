/* Exchanges along the tensor axis
 *
 * Rows lie one after the other, so that a part is one piece of memory. Where the ranks divide the
 * rows one collective does; otherwise each rank's piece goes by itself, in rank order, and nothing
 * goes on behind the host's back. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "parallel/exchange_internal.h"
#include "device/backend.h"

DTRAIN__PRIVATE dtrain__share dtrain__rows_share(int64_t rows, int ranks, int rank)
{
    const int64_t shape[4] = {rows, 0, 0, 0};
    dtrain__share part;
    dtrain_cut cut;
    memset(&cut, 0, sizeof cut);
    cut.axis = DTRAIN_CUT_ROWS;
    dtrain__share_of(&cut, shape, ranks, rank, &part);
    return part;
}

DTRAIN__PRIVATE dtrain_result dtrain__sum_values(dtrain_comm *comm, void *values, int64_t count,
                                                 uint32_t dtype, dtrain_work **work)
{
    *work = NULL;
    if (!comm) return DTRAIN_OK;
    return dtrain_all_reduce(comm, values, values, (size_t)count, (dtrain_dtype)dtype,
                             DTRAIN_REDUCE_SUM, work);
}

DTRAIN__PRIVATE dtrain_result dtrain__gather_rows(dtrain_comm *comm, dtrain_device *device,
                                                  const void *part, void *whole, int64_t rows,
                                                  int64_t n, uint32_t dtype, dtrain_work **work)
{
    const int ranks = dtrain_comm_size(comm), rank = dtrain_comm_rank(comm);
    const size_t row = (size_t)n * dtrain_dtype_bytes((dtrain_dtype)dtype);
    *work = NULL;
    if (!comm) return DTRAIN_OK;
    if (rows % ranks == 0)
        return dtrain_all_gather(comm, part, whole, (size_t)(rows / ranks * n), (dtrain_dtype)dtype,
                                 work);
    for (int r = 0; r < ranks; r++) {
        const dtrain__share of = dtrain__rows_share(rows, ranks, r);
        char *place = (char *)whole + (size_t)of.first[0] * row;
        if (r == rank)
            DTRAIN__TRY(device->ops->copy(device, place, part, (size_t)of.count * row,
                                          DTRAIN_COPY_DEVICE_TO_DEVICE));
        DTRAIN__TRY(
            dtrain_broadcast(comm, place, (size_t)(of.count * n), (dtrain_dtype)dtype, r, work));
        DTRAIN__TRY(dtrain_work_wait(*work));
        *work = NULL;
    }
    return DTRAIN_OK;
}

DTRAIN__PRIVATE dtrain_result dtrain__scatter_rows(dtrain_comm *comm, const void *whole, void *part,
                                                   int64_t rows, int64_t n, uint32_t dtype,
                                                   dtrain_work **work)
{
    const int ranks = dtrain_comm_size(comm);
    const size_t row = (size_t)n * dtrain_dtype_bytes((dtrain_dtype)dtype);
    *work = NULL;
    if (!comm) return DTRAIN_OK;
    if (rows % ranks == 0)
        return dtrain_reduce_scatter(comm, whole, part, (size_t)(rows / ranks * n),
                                     (dtrain_dtype)dtype, DTRAIN_REDUCE_SUM, work);
    for (int r = 0; r < ranks; r++) {
        const dtrain__share of = dtrain__rows_share(rows, ranks, r);
        DTRAIN__TRY(dtrain_reduce(comm, (const char *)whole + (size_t)of.first[0] * row, part,
                                  (size_t)(of.count * n), (dtrain_dtype)dtype, DTRAIN_REDUCE_SUM, r,
                                  work));
        DTRAIN__TRY(dtrain_work_wait(*work));
        *work = NULL;
    }
    return DTRAIN_OK;
}
