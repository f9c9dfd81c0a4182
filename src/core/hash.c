/* Hashes of 64 bits: FNV-1a to compare, SipHash under a key */

#include "core/platform_internal.h"
#include "core/core_internal.h"

/* Continue an FNV-1a hash (Fowler, Noll, Vo), which begins with DTRAIN__FNV_BASIS. */
DTRAIN__PRIVATE uint64_t dtrain__fnv1a(uint64_t hash, const void *bytes, size_t count)
{
    const unsigned char *at = (const unsigned char *)bytes;
    for (size_t i = 0; i < count; i++) hash = (hash ^ at[i]) * 0x100000001b3u;
    return hash;
}

/* Continue a hash, eight bytes per step: fast, but not safe against forgery. A step is a bijection,
 * so one changed word always changes the result. The shift mixes the upper half into the lower,
 * because a product carries bits only upwards. */
DTRAIN__PRIVATE uint64_t dtrain__hash_words(uint64_t hash, const void *bytes, size_t count)
{
    const unsigned char *at = (const unsigned char *)bytes;
    for (uint64_t word = 0; count > 0; word = 0) {
        const size_t step = count < sizeof word ? count : sizeof word;
        if (step == sizeof word)
            memcpy(&word, at, sizeof word); /* a load: the size is a constant */
        else memcpy(&word, at, step);
        hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
        hash ^= hash >> 32;
        at += step;
        count -= step;
    }
    return hash;
}

static inline uint64_t dtrain__rotate(uint64_t x, int by) { return x << by | x >> (64 - by); }

static void dtrain__sip_round(uint64_t v[4])
{
    v[0] += v[1], v[2] += v[3];
    v[1] = dtrain__rotate(v[1], 13) ^ v[0], v[3] = dtrain__rotate(v[3], 16) ^ v[2];
    v[0] = dtrain__rotate(v[0], 32);
    v[2] += v[1], v[0] += v[3];
    v[1] = dtrain__rotate(v[1], 17) ^ v[2], v[3] = dtrain__rotate(v[3], 21) ^ v[0];
    v[2] = dtrain__rotate(v[2], 32);
}

/* Hash by SipHash-2-4 (Aumasson and Bernstein, 2012): without the 128 bits of the key, nobody can
 * make or predict the result. */
DTRAIN__PRIVATE uint64_t dtrain__siphash(const uint64_t key[2], const void *data, size_t bytes)
{
    uint64_t v[4] = {key[0] ^ 0x736f6d6570736575u, key[1] ^ 0x646f72616e646f6du,
                     key[0] ^ 0x6c7967656e657261u, key[1] ^ 0x7465646279746573u};
    const unsigned char *at = (const unsigned char *)data;
    for (size_t done = 0; done <= bytes; done += 8) { /* the last word: remaining bytes, length */
        const size_t rest = bytes - done;
        uint64_t word = rest < 8 ? (uint64_t)bytes << 56 : 0;
        for (size_t i = 0; i < (rest < 8 ? rest : 8); i++)
            word |= (uint64_t)at[done + i] << (8 * i);
        v[3] ^= word;
        dtrain__sip_round(v);
        dtrain__sip_round(v);
        v[0] ^= word;
    }
    v[2] ^= 0xff;
    for (int i = 0; i < 4; i++) dtrain__sip_round(v);
    return v[0] ^ v[1] ^ v[2] ^ v[3];
}
