/* The shuffle
 *
 * Mersenne Twister (Matsumoto and Nishimura, 1998) plus the swap loop of torch.randperm, its modulo
 * bias included: the order is PyTorch's, number by number. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "train/data.h"
#include "train/data_internal.h"

#define DTRAIN__MT_COUNT 624 /* words of the generator's state */

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
