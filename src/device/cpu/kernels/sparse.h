/* Top-k
 *
 * Moves 4 bytes an element, 12 with residual, 20 with velocity; candidates are few. */

/* Add elements i .. i+n-1 of x to velocity and residual; return the values to select from. Rounds
 * twice, so that every instruction set gives the same bits. */
DTRAIN__HELPER dtrain__v DTRAIN__K(topk_fold)(const dtrain_topk_args *a, int64_t i, int64_t n)
{
    dtrain__v x = dtrain__vload_n(a->x + i, n);
    if (a->velocity) {
        const dtrain__v old = dtrain__vload_n(a->velocity + i, n);
        x = dtrain__vset(a->momentum) * old + x;
        dtrain__vstore_n(a->velocity + i, x, n);
    }
    if (a->residual) {
        x = dtrain__vload_n(a->residual + i, n) + x;
        dtrain__vstore_n(a->residual + i, x, n);
    }
    return x;
}

/* Prefetch one page ahead: the processor's prefetching stops at the end of a page, and this saves a
 * third of the time. Past the end it does nothing. */
DTRAIN__HELPER void DTRAIN__K(topk_ahead)(const dtrain_topk_args *a, int64_t i)
{
    const uintptr_t at = (uintptr_t)i * sizeof(float) + 4096;
    __builtin_prefetch((const void *)((uintptr_t)a->x + at));
    if (a->residual) __builtin_prefetch((const void *)((uintptr_t)a->residual + at), 1);
    if (a->velocity) __builtin_prefetch((const void *)((uintptr_t)a->velocity + at), 1);
}

/* Return the lanes of a mask as bits. */
DTRAIN__HELPER uint32_t DTRAIN__K(vlanes)(dtrain__vi mask)
{
#if DTRAIN__ISA == 2
    return (uint32_t)_mm256_movemask_ps((__m256)mask);
#elif DTRAIN__ISA == 1 && DTRAIN__W == 4 && defined(__SSE2__)
    return (uint32_t)_mm_movemask_ps((__m128)mask);
#else
    int32_t lanes[DTRAIN__W];
    uint32_t bits = 0;
    memcpy(lanes, &mask, sizeof lanes);
    for (int j = 0; j < DTRAIN__W; j++) bits |= (uint32_t)(lanes[j] & 1) << j;
    return bits;
#endif
}

/* Fold elements [begin, end), append their candidates in order and return the number of candidates.
 * Elements are tested in groups of 16. Most groups have no candidate, and mispredicted branches for
 * the others would cost more than the rest of the pass: groups with candidates are listed first,
 * without a branch. */
DTRAIN__HELPER int64_t DTRAIN__K(topk_collect)(const dtrain_topk_args *a, int64_t begin,
                                               int64_t end, int32_t below, float *values,
                                               int32_t *indices)
{
    const dtrain__vi mask = dtrain__viset(INT32_MAX), border = dtrain__viset(below);
    const float *from = a->residual ? a->residual : a->x;
    struct {
        int32_t at;
        uint32_t some;
    } groups[DTRAIN__TOPK_BLOCK / 16 + 1];
    int64_t found = 0, group_count = 0;
    for (int64_t i = begin; i < end; i += 16) {
        const int64_t n = end - i < 16 ? end - i : 16;
        uint32_t some = 0;
        DTRAIN__K(topk_ahead)(a, i);
        for (int64_t j = 0; j < n; j += DTRAIN__W) {
            const dtrain__v x = DTRAIN__K(topk_fold)(a, i + j, n - j);
            some |= DTRAIN__K(vlanes)(dtrain__viless(border, dtrain__vbits(x) & mask)) << j;
        }
        groups[group_count].at = (int32_t)i;
        groups[group_count].some = some & ((1u << n) - 1u);
        group_count += groups[group_count].some != 0;
    }
    for (int64_t g = 0; g < group_count; g++)
        for (uint32_t some = groups[g].some; some; some &= some - 1u) {
            const int32_t at = groups[g].at + __builtin_ctz(some);
            values[found] = from[at];
            indices[found++] = at;
        }
    return found;
}

/* Range: elements. After its list is full, a thread only folds the remaining elements. */
DTRAIN__KERNEL(topk)
{
    const dtrain__topk_pass *pass = (const dtrain__topk_pass *)job->args;
    const dtrain_topk_args a = *pass->args;
    float *values = pass->values + index * pass->room;
    int32_t *indices = pass->indices + index * pass->room;
    int64_t found = 0, at = begin;
    for (; at < end && pass->room - found >= DTRAIN__TOPK_BLOCK; at += DTRAIN__TOPK_BLOCK) {
        const int64_t stop = end - at < DTRAIN__TOPK_BLOCK ? end : at + DTRAIN__TOPK_BLOCK;
        found +=
            DTRAIN__K(topk_collect)(&a, at, stop, pass->below, values + found, indices + found);
    }
    pass->found[index] = at < end ? -1 : found;
    for (; a.residual && at < end; at += DTRAIN__W) DTRAIN__K(topk_fold)(&a, at, end - at);
}
