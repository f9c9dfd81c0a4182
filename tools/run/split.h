/* split.h: a global batch as micro-batches. Include it behind dtrain.h. */
#ifndef RUN_SPLIT_H
#define RUN_SPLIT_H

/* Split a global batch: *batch_each, at most `batch` and as large as possible, and *micro_batches make *batch_each *
 * *micro_batches * ranks = global_batch. A global batch that ranks does not divide is an error that names the nearest.
 * Counting down ends at 1, which divides everything. */
static dtrain_result split_global_batch(uint64_t global_batch, uint32_t batch, int ranks,
                                        uint32_t *batch_each, uint32_t *micro_batches)
{
    const uint64_t r = (uint64_t)ranks, own = global_batch / r;
    const uint64_t nearest = (global_batch + (r - 1) / 2) / r * r;
    if (!own || own * r != global_batch)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "a global batch of %llu cannot be shared by %d ranks; the nearest that "
                           "can is %llu",
                           (unsigned long long)global_batch, ranks,
                           (unsigned long long)(nearest ? nearest : r));
    uint64_t micro = own < batch ? own : batch;
    while (own % micro) micro--;
    if (own / micro > UINT32_MAX)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "%llu micro-batches of %llu samples are more than a step can have",
                           (unsigned long long)(own / micro), (unsigned long long)micro);
    *batch_each = (uint32_t)micro;
    *micro_batches = (uint32_t)(own / micro);
    return DTRAIN_OK;
}

#endif /* RUN_SPLIT_H */
