/* Samplers
 *
 * The shuffle is Mersenne Twister (Matsumoto and Nishimura, 1998) plus the swap loop of
 * torch.randperm, its modulo bias included: the order is PyTorch's, number by number. Ranks deal
 * the order like cards, and its beginning is dealt again until all have the same number:
 *
 *     ten items, four ranks     order   9 4 1 6 0 2 3 8 5 7 | 9 4
 *                               rank    0 1 2 3 0 1 2 3 0 1 | 2 3      three each
 *
 * with drop_last the last two, 5 and 7, are left out instead: two each. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/result.h"
#include "train/data.h"
#include "train/data_internal.h"

#define DTRAIN__MT_COUNT 624 /* words of the generator's state */

/* Count what a rank gets, and deal it. The desc is checked on the way to the count: a program that
 * asks for the number first learns everything there. */
DTRAIN_API dtrain_result dtrain_sampler_indices(const dtrain_sampler_desc *desc, uint64_t epoch,
                                                int64_t *scratch, int64_t *indices, int64_t *count)
{
    if (!desc || !count || (indices && desc->shuffle && !scratch))
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_sampler_indices: %s is NULL",
                           !desc    ? "desc"
                           : !count ? "count"
                                    : "scratch, which shuffling needs,");
    const int64_t items = desc->item_count, ranks = desc->rank_count ? desc->rank_count : 1;
    if (desc->rank >= ranks)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_sampler_indices: rank is %u, expected 0 to %lld",
                           (unsigned)desc->rank, (long long)(ranks - 1));
    if (items < 0 || (desc->shuffle && items >= DTRAIN__RANDPERM_LIMIT))
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_sampler_indices: item_count is %lld, expected 0 or more, and "
                           "fewer than %lld to be shuffled",
                           (long long)items, (long long)DTRAIN__RANDPERM_LIMIT);

    /* ceil(items / ranks). Division first: items + ranks - 1 could overflow. */
    *count = items / ranks + (items % ranks != 0 && !desc->drop_last);
    if (!indices) return DTRAIN_OK;
    if (desc->shuffle) dtrain__randperm(desc->seed + epoch, items, scratch);

    /* Padding repeats the order from its start, as often as it takes: position p is p mod n.
     * Unsigned, because the padded end may lie past INT64_MAX. */
    for (int64_t i = 0; i < *count; i++) {
        uint64_t place = ((uint64_t)i * (uint64_t)ranks + desc->rank) % (uint64_t)items;
        indices[i] = desc->shuffle ? scratch[place] : (int64_t)place;
    }
    return DTRAIN_OK;
}

/* ---- the shuffle ------------------------------------------------------------------------------*/

/* Make the next 624 words. Word i becomes a mix of words i, i + 1 and i + 397, all modulo 624 and
 * in place: the words that wrap around are the ones renewed in this same pass, as the definition
 * has it. */
static void dtrain__mt_renew(uint32_t *s)
{
    for (uint32_t i = 0; i < DTRAIN__MT_COUNT; i++) {
        uint32_t y = (s[i] & 0x80000000u) | (s[(i + 1) % DTRAIN__MT_COUNT] & 0x7fffffffu);
        s[i] = s[(i + 397) % DTRAIN__MT_COUNT] ^ (y >> 1) ^ ((y & 1) ? 0x9908b0dfu : 0);
    }
}

/* Write a permutation of 0 to n - 1, n below DTRAIN__RANDPERM_LIMIT. Swap k takes number k of the
 * generator; the low 32 bits of the seed count, as in torch. */
DTRAIN__PRIVATE void dtrain__randperm(uint64_t seed, int64_t n, int64_t *out)
{
    uint32_t state[DTRAIN__MT_COUNT];
    state[0] = (uint32_t)seed;
    for (uint32_t i = 1; i < DTRAIN__MT_COUNT; i++)
        state[i] = 1812433253u * (state[i - 1] ^ (state[i - 1] >> 30)) + i;
    for (int64_t i = 0; i < n; i++) out[i] = i;
    for (int64_t i = 0; i < n - 1; i++) {
        if (i % DTRAIN__MT_COUNT == 0) dtrain__mt_renew(state);
        uint32_t y = state[i % DTRAIN__MT_COUNT];
        y ^= y >> 11;
        y ^= (y << 7) & 0x9d2c5680u;
        y ^= (y << 15) & 0xefc60000u;
        y ^= y >> 18;
        int64_t j = i + (int64_t)(y % (uint32_t)(n - i));
        int64_t swapped = out[i];
        out[i] = out[j];
        out[j] = swapped;
    }
}
