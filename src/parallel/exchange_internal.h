/* Exchanges along the tensor axis: of device memory, rows of n elements. */

#pragma once

#include "core/platform_internal.h"
#include "core/dtype.h"
#include "core/result.h"
#include "comm/comm.h"
#include "parallel/cut_internal.h"
#include "device/device.h"

/* Rank r of t has rows n r / t to n (r + 1) / t of what is cut by rows. Each call is collective,
 * returns at once and leaves *work to dtrain_work_wait; with comm NULL, in a plan, it does
 * nothing. Sums are added up in fp32 in the order of the ranks and rounded once. */

/* parallel/exchange.c */
DTRAIN__PRIVATE dtrain__share dtrain__rows_share(int64_t rows, int ranks, int rank);
/* Add values (count) up over the axis, in place. */
DTRAIN__PRIVATE dtrain_result dtrain__sum_values(dtrain_comm *comm, void *values, int64_t count,
                                                 uint32_t dtype, dtrain_work **work);
/* Put the parts of all ranks together: whole (rows, n). */
DTRAIN__PRIVATE dtrain_result dtrain__gather_rows(dtrain_comm *comm, dtrain_device *device,
                                                  const void *part, void *whole, int64_t rows,
                                                  int64_t n, uint32_t dtype, dtrain_work **work);
/* Add whole (rows, n) up over the axis, and keep this rank's rows in part, which may be the place
 * of those rows in whole. */
DTRAIN__PRIVATE dtrain_result dtrain__scatter_rows(dtrain_comm *comm, const void *whole, void *part,
                                                   int64_t rows, int64_t n, uint32_t dtype,
                                                   dtrain_work **work);
