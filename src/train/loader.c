/* Loaders
 *
 * A loader cuts the stream into windows that share one border token (target of one, input of the
 * next). When shuffling, the grid moves by a new shift every epoch, so that a token is not always
 * seen behind the same context:
 *
 *     tokens   |. . .|o o o o|o o o o|o o o o|. .|        sequence = 4, shift = 3, three windows
 *               shift  0       1       2    +1 target
 *
 *     sample k of the run = window order[k % windows] of epoch k / windows
 *     rank r of R, batch B, position P:  samples P + i R + r for i < B, then P += B R
 *
 * A sample depends on k alone, so the world size only changes who reads it, and P is all there is
 * to save. Windows per epoch: (tokens - 1) / sequence in order; shuffled, one fewer at least, so
 * that every shift in [0, sequence) leaves them room (but never fewer than one). */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/log.h"
#include "core/result.h"
#include "world/world.h"
#include "world/world_internal.h"
#include "train/data.h"
#include "train/data_internal.h"

#define DTRAIN__STREAM_LOADER UINT64_C(0x6c6f61646572) /* Philox stream of the shifts */

static void dtrain__loader_enter(dtrain_loader *loader, uint64_t epoch);
static dtrain_result dtrain__loader_plan(dtrain_loader *loader);

/* Fill a batch, sample by sample. Inputs and targets of a sample are both cut from `window`: its
 * tokens are used twice and read once. */
DTRAIN_API dtrain_result dtrain_loader_next(dtrain_loader *loader, int32_t *inputs,
                                            int32_t *targets)
{
    if (!loader || !inputs || !targets)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_loader_next: loader, inputs or targets is NULL");
    const dtrain_loader_desc *desc = &loader->desc;
    const size_t row = (size_t)desc->sequence;
    const uint64_t windows = (uint64_t)loader->window_count;
    for (uint32_t i = 0; i < desc->batch; i++) {
        const uint64_t k = loader->position + i * loader->ranks + loader->rank;
        if (!desc->in_order) dtrain__loader_enter(loader, k / windows);
        const int64_t place = (int64_t)(k % windows);
        const int64_t index = desc->in_order ? place : loader->order[place];
        const int64_t first = desc->first_token + loader->shift + index * desc->sequence;
        DTRAIN__TRY(dtrain_dataset_read(desc->dataset, first, desc->sequence + 1, loader->window));
        memcpy(inputs + i * row, loader->window, row * sizeof *inputs);
        memcpy(targets + i * row, loader->window + 1, row * sizeof *targets);
    }
    /* Only now: a call that failed can be repeated. */
    loader->position += desc->batch * loader->ranks;
    return DTRAIN_OK;
}

/* Make order and shift those of `epoch`: O(windows), once per epoch. Samples of a batch come with
 * growing k, so a batch across a border enters each epoch once. */
static void dtrain__loader_enter(dtrain_loader *loader, uint64_t epoch)
{
    uint32_t random[4];
    if (loader->entered && loader->epoch == epoch) return;
    dtrain__randperm(loader->desc.seed + epoch, loader->window_count, loader->order);
    dtrain__philox(loader->desc.seed, DTRAIN__STREAM_LOADER, epoch, random);
    uint64_t wide = (uint64_t)random[1] << 32 | random[0];
    loader->shift = (int64_t)(wide % (uint64_t)loader->shift_count);
    loader->epoch = epoch;
    loader->entered = true;
}

DTRAIN_API void dtrain_loader_query(const dtrain_loader *loader, dtrain_loader_info *info)
{
    if (!info) return;
    info->samples_per_epoch = loader ? loader->window_count : 0;
    info->position = loader ? loader->position : 0;
}

DTRAIN_API void dtrain_loader_seek(dtrain_loader *loader, uint64_t position)
{
    if (loader) loader->position = position;
}

/* ---- creation ---------------------------------------------------------------------------------*/

/* Make the plan first: how large the arrays are follows from it. */
DTRAIN_API dtrain_result dtrain_loader_create(dtrain_world *world, const dtrain_loader_desc *desc,
                                              dtrain_loader **out)
{
    if (!out || !desc)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_loader_create: desc or out is NULL");
    *out = NULL;
    dtrain_allocator allocator = dtrain__resolve_allocator(world ? &world->allocator : NULL);
    dtrain_loader *loader =
        (dtrain_loader *)dtrain__alloc(&allocator, 1, sizeof *loader, "a loader");
    if (!loader) return DTRAIN_ERROR_MEMORY;
    loader->allocator = allocator;
    loader->desc = *desc;
    loader->rank = world ? (uint64_t)dtrain_world_rank(world) : 0;
    loader->ranks = world ? (uint64_t)dtrain_world_size(world) : 1;
    dtrain_result result = dtrain__loader_plan(loader);
    if (result == DTRAIN_OK) {
        loader->window = (int32_t *)dtrain__alloc(&allocator, (size_t)desc->sequence + 1,
                                                  sizeof *loader->window, "a loader's window");
        if (!desc->in_order)
            loader->order = (int64_t *)dtrain__alloc(&allocator, (size_t)loader->window_count,
                                                     sizeof *loader->order, "a loader's order");
        if (!loader->window || !(loader->order || desc->in_order)) result = DTRAIN_ERROR_MEMORY;
    }
    if (result == DTRAIN_OK) *out = loader;
    else dtrain_loader_destroy(loader);
    return result;
}

/* Check the desc, resolve token_count, and count the windows of an epoch and the shifts to choose
 * from, by the rule at the top. Written with subtractions only: nothing overflows. */
static dtrain_result dtrain__loader_plan(dtrain_loader *loader)
{
    dtrain_loader_desc *desc = &loader->desc;
    if (!desc->dataset || desc->batch == 0 || desc->sequence <= 0)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_loader_create: expected a dataset and batch and sequence of at "
                           "least 1, found %s, %u and %lld",
                           desc->dataset ? "one" : "none", (unsigned)desc->batch,
                           (long long)desc->sequence);
    const int64_t have = desc->dataset->token_count;
    if (desc->first_token < 0 || desc->first_token > have || desc->token_count < 0 ||
        desc->token_count > have - desc->first_token)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_loader_create: %lld tokens from %lld on were asked for, %s has "
                           "%lld",
                           (long long)desc->token_count, (long long)desc->first_token,
                           desc->dataset->path, (long long)have);
    if (desc->token_count == 0) desc->token_count = have - desc->first_token;
    const int64_t tokens = desc->token_count, sequence = desc->sequence;
    if (tokens <= sequence)
        return dtrain_fail(DTRAIN_ERROR_DATA,
                           "dtrain_loader_create: %s has %lld tokens here, but a window of %lld + "
                           "1 needs %llu: use a shorter sequence or a larger file",
                           desc->dataset->path, (long long)tokens, (long long)sequence,
                           (unsigned long long)sequence + 1);
    loader->window_count =
        desc->in_order ? (tokens - 1) / sequence : dtrain__max(1, tokens / sequence - 1);
    loader->shift_count = dtrain__min(sequence, tokens - loader->window_count * sequence);
    if (desc->in_order || loader->window_count < DTRAIN__RANDPERM_LIMIT) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                       "dtrain_loader_create: %lld windows of %lld tokens cannot be shuffled, "
                       "expected fewer than %lld: use a longer sequence or a part of the file",
                       (long long)loader->window_count, (long long)sequence,
                       (long long)DTRAIN__RANDPERM_LIMIT);
}

DTRAIN_API void dtrain_loader_destroy(dtrain_loader *loader)
{
    if (!loader) return;
    dtrain_allocator allocator = loader->allocator;
    dtrain__free(&allocator, loader->window, (size_t)loader->desc.sequence + 1,
                 sizeof *loader->window);
    dtrain__free(&allocator, loader->order, (size_t)loader->window_count, sizeof *loader->order);
    dtrain__free(&allocator, loader, 1, sizeof *loader);
}
