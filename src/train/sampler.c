/* Samplers
 *
 * The shuffle is Mersenne Twister (Matsumoto and Nishimura, 1998) plus the swap loop of
 * torch.randperm, its modulo bias included: the order is PyTorch's, number by number. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/result.h"
#include "train/data.h"
#include "train/data_internal.h"

#define DTRAIN__MT_COUNT 624

typedef struct dtrain__mt19937 {
    uint32_t state[DTRAIN__MT_COUNT];
    uint32_t next; /* first number not handed out */
} dtrain__mt19937;

static dtrain_result dtrain__sampler_check(const dtrain_sampler_desc *desc, const char *call);
static uint32_t dtrain__mt_draw(dtrain__mt19937 *mt);
static void dtrain__mt_seed(dtrain__mt19937 *mt, uint32_t seed);
static void dtrain__mt_renew(dtrain__mt19937 *mt);

DTRAIN_API dtrain_result dtrain_sampler_indices(const dtrain_sampler_desc *desc, uint64_t epoch,
                                                int64_t *scratch, int64_t *indices)
{
    DTRAIN__TRY(dtrain__sampler_check(desc, "dtrain_sampler_indices"));
    int64_t count = dtrain_sampler_count(desc);
    if (count == 0) return DTRAIN_OK;
    if (!indices || (desc->shuffle && !scratch))
        return dtrain_fail(
            DTRAIN_ERROR_ARGUMENT, "dtrain_sampler_indices: %s is NULL, expected %lld numbers",
            indices ? "scratch" : "indices", (long long)(indices ? desc->item_count : count));
    if (desc->shuffle) DTRAIN__TRY(dtrain_randperm(desc->seed + epoch, desc->item_count, scratch));

    /* Padding repeats the order from its start, as often as it takes: position p is p mod n.
     * Unsigned, because the padded end may lie past INT64_MAX. */
    uint64_t ranks = desc->rank_count ? desc->rank_count : 1;
    for (int64_t i = 0; i < count; i++) {
        uint64_t place = ((uint64_t)i * ranks + desc->rank) % (uint64_t)desc->item_count;
        indices[i] = desc->shuffle ? scratch[place] : (int64_t)place;
    }
    return DTRAIN_OK;
}

/* ceil(items / ranks), or the whole division when the rest is dropped. Division first: items +
 * ranks - 1 could overflow. */
DTRAIN_API int64_t dtrain_sampler_count(const dtrain_sampler_desc *desc)
{
    if (dtrain__sampler_check(desc, "dtrain_sampler_count") != DTRAIN_OK) return 0;
    int64_t ranks = desc->rank_count ? desc->rank_count : 1;
    bool padded = desc->item_count % ranks != 0 && !desc->drop_last;
    return desc->item_count / ranks + (padded ? 1 : 0);
}

static dtrain_result dtrain__sampler_check(const dtrain_sampler_desc *desc, const char *call)
{
    if (!desc) return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: desc is NULL", call);
    uint32_t ranks = desc->rank_count ? desc->rank_count : 1;
    if (desc->rank >= ranks)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: rank is %u, expected 0 to %u", call,
                           (unsigned)desc->rank, (unsigned)(ranks - 1));
    if (desc->item_count < 0)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: item_count is %lld, expected 0 or more",
                           call, (long long)desc->item_count);
    return DTRAIN_OK;
}

/* ---- the shuffle ------------------------------------------------------------------------------*/

DTRAIN_API dtrain_result dtrain_randperm(uint64_t seed, int64_t n, int64_t *out)
{
    dtrain__mt19937 mt;
    if (n < 0 || n >= DTRAIN__RANDPERM_LIMIT || (n > 0 && !out))
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_randperm: n is %lld, expected 0 to %lld and a buffer for them",
                           (long long)n, (long long)DTRAIN__RANDPERM_LIMIT - 1);
    for (int64_t i = 0; i < n; i++) out[i] = i;
    dtrain__mt_seed(&mt, (uint32_t)seed);
    for (int64_t i = 0; i < n - 1; i++) {
        int64_t j = i + (int64_t)(dtrain__mt_draw(&mt) % (uint32_t)(n - i));
        int64_t swapped = out[i];
        out[i] = out[j];
        out[j] = swapped;
    }
    return DTRAIN_OK;
}

static uint32_t dtrain__mt_draw(dtrain__mt19937 *mt)
{
    if (mt->next == DTRAIN__MT_COUNT) dtrain__mt_renew(mt);
    uint32_t y = mt->state[mt->next++];
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c5680u;
    y ^= (y << 15) & 0xefc60000u;
    return y ^ (y >> 18);
}

static void dtrain__mt_seed(dtrain__mt19937 *mt, uint32_t seed)
{
    mt->state[0] = seed;
    for (uint32_t i = 1; i < DTRAIN__MT_COUNT; i++) {
        uint32_t before = mt->state[i - 1];
        mt->state[i] = 1812433253u * (before ^ (before >> 30)) + i;
    }
    mt->next = DTRAIN__MT_COUNT;
}

/* Word i becomes a mix of words i, i + 1 and i + 397, all modulo 624 and in place: the words that
 * wrap around are the ones renewed in this same pass, as the definition has it. */
static void dtrain__mt_renew(dtrain__mt19937 *mt)
{
    uint32_t *s = mt->state;
    for (uint32_t i = 0; i < DTRAIN__MT_COUNT; i++) {
        uint32_t y = (s[i] & 0x80000000u) | (s[(i + 1) % DTRAIN__MT_COUNT] & 0x7fffffffu);
        s[i] = s[(i + 397) % DTRAIN__MT_COUNT] ^ (y >> 1) ^ ((y & 1) ? 0x9908b0dfu : 0);
    }
    mt->next = 0;
}
