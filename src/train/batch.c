/* The samples of a batch
 *
 * A loader cuts tokens into windows that share one border token (target of one, input of the next).
 * When shuffling, the grid moves by a new shift every epoch, so that a token is not always seen
 * behind the same context:
 *
 *     tokens   |. . .|o o o o|o o o o|o o o o|. .|        sequence = 4, shift = 3, three windows
 *               shift  0       1       2    +1 target
 *
 *     sample k of the run = window order[k % windows] of epoch k / windows
 *     rank r of R, batch B, position P:  samples P + i R + r for i < B, then P += B R
 *
 * A sample depends on k alone, so the world size only changes who reads it, and P is all there is
 * to save. With drop_last P passes over what an epoch has left, fewer than B R samples, so that a
 * batch never crosses a border. Windows per epoch: (tokens - 1) / sequence in order; shuffled, one
 * fewer at least, so that every shift in [0, sequence) leaves them room (but never fewer than one).
 * Where items are samples, each is a window by itself, and there is no shift. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/result.h"
#include "train/data.h"
#include "train/data_internal.h"

#define DTRAIN__MT_COUNT 624                           /* words of the generator's state */
#define DTRAIN__STREAM_LOADER UINT64_C(0x6c6f61646572) /* Philox stream of the shifts */

/* Write a permutation of 0 to n - 1, n below DTRAIN__RANDPERM_LIMIT: Mersenne Twister (Matsumoto and
 * Nishimura, 1998) plus the swap loop of torch.randperm, its modulo bias included, so that the order
 * is PyTorch's, number by number. Swap k takes number k of the generator; the low 32 bits of the
 * seed count, as in torch. */
static void dtrain__randperm(uint64_t seed, int64_t n, int64_t *out)
{
    uint32_t s[DTRAIN__MT_COUNT];
    s[0] = (uint32_t)seed;
    for (uint32_t i = 1; i < DTRAIN__MT_COUNT; i++)
        s[i] = 1812433253u * (s[i - 1] ^ (s[i - 1] >> 30)) + i;
    for (int64_t i = 0; i < n; i++) out[i] = i;
    for (int64_t i = 0; i < n - 1; i++) {
        /* The next 624 words: word k becomes a mix of words k, k + 1 and k + 397, in place. The
         * words that wrap around are the ones renewed in this same pass, as the definition has
         * it. */
        for (uint32_t k = 0; i % DTRAIN__MT_COUNT == 0 && k < DTRAIN__MT_COUNT; k++) {
            const uint32_t y = (s[k] & 0x80000000u) | (s[(k + 1) % DTRAIN__MT_COUNT] & 0x7fffffffu);
            s[k] = s[(k + 397) % DTRAIN__MT_COUNT] ^ (y >> 1) ^ ((y & 1) ? 0x9908b0dfu : 0);
        }
        uint32_t y = s[i % DTRAIN__MT_COUNT];
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

DTRAIN__PRIVATE uint64_t dtrain__loader_begin(const dtrain_loader *loader, uint64_t position)
{
    const uint64_t all = (uint64_t)loader->window_count, left = all - position % all;
    const bool drops = loader->desc.drop_last && left < loader->desc.batch * loader->ranks;
    return drops ? position + left : position;
}

/* List the samples of this rank's batch at `position`. They come with growing k, so a batch across a
 * border enters each epoch once, which sets order and shift: O(windows). */
DTRAIN__PRIVATE void dtrain__loader_deal(dtrain_loader *loader, uint64_t seed, uint64_t position,
                                         dtrain__batch *batch)
{
    const dtrain_loader_desc *desc = &loader->desc;
    const uint64_t samples = (uint64_t)loader->window_count;
    const int64_t stride = desc->sequence ? desc->sequence : 1;
    batch->count = 0;
    for (uint32_t i = 0; i < desc->batch; i++, batch->count++) {
        const uint64_t k = position + i * loader->ranks + loader->rank, epoch = k / samples;
        if (desc->sample_limit && k >= (uint64_t)desc->sample_limit) return;
        if (!desc->in_order &&
            !(loader->entered && loader->epoch == epoch && loader->seed == seed)) {
            uint32_t random[4];
            dtrain__randperm(seed + epoch, loader->window_count, loader->order);
            dtrain__philox(seed, DTRAIN__STREAM_LOADER, epoch, random);
            const uint64_t wide = (uint64_t)random[1] << 32 | random[0];
            loader->shift = (int64_t)(wide % (uint64_t)loader->shift_count);
            loader->epoch = epoch;
            loader->seed = seed;
            loader->entered = true;
        }
        const int64_t place = (int64_t)(k % samples);
        const int64_t index = desc->in_order ? place : loader->order[place];
        batch->picks[i].epoch = epoch;
        batch->picks[i].item = desc->first_item + loader->shift + index * stride;
    }
}

/* Read a batch that has been dealt, sample by sample, and pad it. Inputs and targets of a window
 * are both cut from the scratch: its tokens are used twice and read once. */
DTRAIN__PRIVATE dtrain_result dtrain__loader_read(const dtrain_loader *loader,
                                                  const dtrain__batch *batch, void *inputs,
                                                  int32_t *targets)
{
    const dtrain_loader_desc *desc = &loader->desc;
    const size_t row = (size_t)desc->sequence;
    const uint32_t missing = desc->batch - batch->count;
    unsigned char *to = (unsigned char *)inputs;
    for (uint32_t i = 0; i < batch->count; i++, to += loader->sample_bytes) {
        const dtrain__pick *pick = &batch->picks[i];
        if (desc->sequence) {
            const int32_t *window = (const int32_t *)batch->scratch;
            DTRAIN__TRY(dtrain__dataset_read(desc->dataset, pick->item, desc->sequence + 1,
                                             batch->scratch, NULL));
            memcpy(to, window, loader->sample_bytes);
            memcpy(targets + i * row, window + 1, loader->sample_bytes);
            continue;
        }
        dtrain_sample sample; /* label 0: a source may have none */
        memset(&sample, 0, sizeof sample);
        sample.item = pick->item;
        sample.epoch = pick->epoch;
        sample.data = batch->scratch;
        DTRAIN__TRY(dtrain__dataset_read(desc->dataset, pick->item, 1,
                                         desc->transform ? batch->scratch : to,
                                         targets || desc->transform ? &sample.label : NULL));
        if (targets) targets[i] = sample.label;
        if (desc->transform) DTRAIN__TRY(desc->transform(desc->user, &sample, to));
    }
    memset(to, 0, missing * loader->sample_bytes);
    if (targets) /* every byte of -1 is 255 */
        memset((char *)targets + batch->count * loader->target_bytes, 255,
               missing * loader->target_bytes);
    return DTRAIN_OK;
}
