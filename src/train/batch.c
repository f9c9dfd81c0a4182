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

#define DTRAIN__STREAM_LOADER UINT64_C(0x6c6f61646572) /* Philox stream of the shifts */

/* Set order and shift to those of `epoch`: O(windows), once per epoch. The samples of a batch come
 * with growing k, so a batch across a border enters each epoch once. */
static void dtrain__loader_enter(dtrain_loader *loader, uint64_t seed, uint64_t epoch)
{
    uint32_t random[4];
    if (loader->entered && loader->epoch == epoch && loader->seed == seed) return;
    dtrain__randperm(seed + epoch, loader->window_count, loader->order);
    dtrain__philox(seed, DTRAIN__STREAM_LOADER, epoch, random);
    uint64_t wide = (uint64_t)random[1] << 32 | random[0];
    loader->shift = (int64_t)(wide % (uint64_t)loader->shift_count);
    loader->epoch = epoch;
    loader->seed = seed;
    loader->entered = true;
}

/* List the samples of this rank's batch at `position`, entering their epochs. */
DTRAIN__PRIVATE void dtrain__loader_deal(dtrain_loader *loader, uint64_t seed, uint64_t position,
                                         dtrain__batch *batch)
{
    const dtrain_loader_desc *desc = &loader->desc;
    const uint64_t samples = (uint64_t)loader->window_count;
    const int64_t stride = desc->sequence ? desc->sequence : 1;
    dtrain__pick *picks = batch->picks;
    batch->count = 0;
    for (uint32_t i = 0; i < desc->batch; i++, batch->count++) {
        const uint64_t k = position + i * loader->ranks + loader->rank;
        if (desc->sample_limit && k >= (uint64_t)desc->sample_limit) return;
        picks[i].epoch = k / samples;
        if (!desc->in_order) dtrain__loader_enter(loader, seed, picks[i].epoch);
        const int64_t place = (int64_t)(k % samples);
        const int64_t index = desc->in_order ? place : loader->order[place];
        picks[i].item = desc->first_item + loader->shift + index * stride;
    }
}

/* Read a sample with its label, and transform it into `output`. */
static dtrain_result dtrain__sample_read(const dtrain_loader *loader, const dtrain__pick *pick,
                                         void *scratch, void *output, int32_t *label)
{
    const dtrain_loader_desc *desc = &loader->desc;
    if (!desc->transform) return dtrain__dataset_read(desc->dataset, pick->item, 1, output, label);
    dtrain_sample sample;
    memset(&sample, 0, sizeof sample);
    sample.item = pick->item;
    sample.epoch = pick->epoch;
    sample.data = scratch;
    DTRAIN__TRY(dtrain__dataset_read(desc->dataset, pick->item, 1, scratch, &sample.label));
    if (label) *label = sample.label;
    return desc->transform(desc->user, &sample, output);
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
        } else {
            int32_t *label = targets ? targets + i : NULL;
            if (label) *label = 0; /* a source may have none: not the padding of the batch before */
            DTRAIN__TRY(dtrain__sample_read(loader, pick, batch->scratch, to, label));
        }
    }
    memset(to, 0, missing * loader->sample_bytes);
    if (targets) /* every byte of -1 is 255 */
        memset((char *)targets + batch->count * loader->target_bytes, 255,
               missing * loader->target_bytes);
    return DTRAIN_OK;
}
