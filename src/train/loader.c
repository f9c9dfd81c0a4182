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

struct dtrain_loader {
    dtrain_allocator allocator;
    dtrain_loader_desc desc; /* token_count resolved */
    uint64_t rank, ranks;
    uint64_t position;    /* samples handed out by all ranks */
    int64_t window_count; /* per epoch */
    int64_t shift_count;  /* shifts to choose from */
    int32_t *window;      /* (sequence + 1) */

    /* The epoch that `order` and `shift` belong to; both stay 0 when in_order. */
    bool entered;
    uint64_t epoch;
    int64_t shift;
    int64_t *order; /* (window_count) */
};

static dtrain_result dtrain__loader_sample(dtrain_loader *loader, uint64_t sample);
static dtrain_result dtrain__loader_enter(dtrain_loader *loader, uint64_t epoch);
static dtrain_result dtrain__loader_check(dtrain_loader_desc *desc);
static dtrain_result dtrain__loader_plan(dtrain_loader *loader);
static dtrain_result dtrain__loader_alloc(dtrain_loader *loader);

DTRAIN_API dtrain_result dtrain_loader_next(dtrain_loader *loader, int32_t *inputs,
                                            int32_t *targets)
{
    if (!loader || !inputs || !targets)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_loader_next: loader, inputs or targets is NULL");
    size_t row = (size_t)loader->desc.sequence;
    for (uint32_t i = 0; i < loader->desc.batch; i++) {
        uint64_t sample = loader->position + i * loader->ranks + loader->rank;
        DTRAIN__TRY(dtrain__loader_sample(loader, sample));
        memcpy(inputs + i * row, loader->window, row * sizeof *inputs);
        memcpy(targets + i * row, loader->window + 1, row * sizeof *targets);
    }
    /* Only now: a call that failed can be repeated. */
    loader->position += loader->desc.batch * loader->ranks;
    return DTRAIN_OK;
}

/* Fills `window` with sample k of the run. Inputs and targets are both cut from it, so a window is
 * read once although its tokens are used twice. */
static dtrain_result dtrain__loader_sample(dtrain_loader *loader, uint64_t sample)
{
    uint64_t windows = (uint64_t)loader->window_count;
    DTRAIN__TRY(dtrain__loader_enter(loader, sample / windows));
    uint64_t place = sample % windows;
    int64_t index = loader->desc.in_order ? (int64_t)place : loader->order[place];
    int64_t first = loader->desc.first_token + loader->shift + index * loader->desc.sequence;
    return dtrain_dataset_read(loader->desc.dataset, first, loader->desc.sequence + 1,
                               loader->window);
}

/* Makes order and shift those of `epoch`: O(windows), once per epoch. Samples of a batch come with
 * growing k, so a batch across a border enters each epoch once. */
static dtrain_result dtrain__loader_enter(dtrain_loader *loader, uint64_t epoch)
{
    uint32_t random[4];
    if (loader->desc.in_order || (loader->entered && loader->epoch == epoch)) return DTRAIN_OK;
    dtrain__randperm(loader->desc.seed + epoch, loader->window_count, loader->order);
    dtrain_philox(loader->desc.seed, DTRAIN__STREAM_LOADER, epoch, random);
    uint64_t wide = (uint64_t)random[1] << 32 | random[0];
    loader->shift = (int64_t)(wide % (uint64_t)loader->shift_count);
    loader->epoch = epoch;
    loader->entered = true;
    return DTRAIN_OK;
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

DTRAIN_API dtrain_result dtrain_loader_create(dtrain_world *world, const dtrain_loader_desc *desc,
                                              dtrain_loader **out)
{
    if (!out || !desc)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_loader_create: desc or out is NULL");
    *out = NULL;
    dtrain_loader_desc resolved = *desc;
    DTRAIN__TRY(dtrain__loader_check(&resolved));
    dtrain_allocator allocator =
        dtrain__resolve_allocator(world ? dtrain_world_allocator(world) : NULL);
    dtrain_loader *loader =
        (dtrain_loader *)dtrain__alloc(&allocator, 1, sizeof *loader, "a loader");
    if (!loader) return DTRAIN_ERROR_MEMORY;
    loader->allocator = allocator;
    loader->desc = resolved;
    loader->rank = world ? (uint64_t)dtrain_world_rank(world) : 0;
    loader->ranks = world ? (uint64_t)dtrain_world_size(world) : 1;
    dtrain_result result = dtrain__loader_plan(loader);
    if (result == DTRAIN_OK) result = dtrain__loader_alloc(loader);
    if (result != DTRAIN_OK) {
        dtrain_loader_destroy(loader);
        return result;
    }
    *out = loader;
    return DTRAIN_OK;
}

/* Checks the desc and resolves token_count. Written with subtractions only: nothing overflows. */
static dtrain_result dtrain__loader_check(dtrain_loader_desc *desc)
{
    if (!desc->dataset || desc->batch == 0 || desc->sequence <= 0)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_loader_create: expected a dataset and batch and sequence of at "
                           "least 1, found %s, %u and %lld",
                           desc->dataset ? "one" : "none", (unsigned)desc->batch,
                           (long long)desc->sequence);
    int64_t have = desc->dataset->token_count;
    if (desc->first_token < 0 || desc->first_token > have || desc->token_count < 0 ||
        desc->token_count > have - desc->first_token)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_loader_create: %lld tokens from %lld on were asked for, %s has "
                           "%lld",
                           (long long)desc->token_count, (long long)desc->first_token,
                           desc->dataset->path, (long long)have);
    if (desc->token_count == 0) desc->token_count = have - desc->first_token;
    if (desc->token_count <= desc->sequence)
        return dtrain_fail(DTRAIN_ERROR_DATA,
                           "dtrain_loader_create: %s has %lld tokens here, but a window of "
                           "%lld + 1 needs %llu: use a shorter sequence or a larger file",
                           desc->dataset->path, (long long)desc->token_count,
                           (long long)desc->sequence, (unsigned long long)desc->sequence + 1);
    return DTRAIN_OK;
}

/* Count the windows of an epoch and the shifts to choose from, by the rule at the top. */
static dtrain_result dtrain__loader_plan(dtrain_loader *loader)
{
    const dtrain_loader_desc *desc = &loader->desc;
    int64_t fit = (desc->token_count - 1) / desc->sequence;
    loader->window_count =
        desc->in_order ? fit : dtrain__max(1, desc->token_count / desc->sequence - 1);
    loader->shift_count =
        dtrain__min(desc->sequence, desc->token_count - loader->window_count * desc->sequence);
    if (!desc->in_order && loader->window_count >= DTRAIN__RANDPERM_LIMIT)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "dtrain_loader_create: %lld windows of %lld tokens cannot be shuffled, "
                           "expected fewer than %lld: use a longer sequence or a part of the file",
                           (long long)loader->window_count, (long long)desc->sequence,
                           (long long)DTRAIN__RANDPERM_LIMIT);
    return DTRAIN_OK;
}

static dtrain_result dtrain__loader_alloc(dtrain_loader *loader)
{
    const dtrain_loader_desc *desc = &loader->desc;
    loader->window = (int32_t *)dtrain__alloc(&loader->allocator, (size_t)desc->sequence + 1,
                                              sizeof *loader->window, "a loader's window");
    if (!loader->window) return DTRAIN_ERROR_MEMORY;
    if (desc->in_order) return DTRAIN_OK;
    loader->order = (int64_t *)dtrain__alloc(&loader->allocator, (size_t)loader->window_count,
                                             sizeof *loader->order, "a loader's order");
    /* The permutation is made anew every epoch, in the same memory. */
    return loader->order ? DTRAIN_OK : DTRAIN_ERROR_MEMORY;
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
