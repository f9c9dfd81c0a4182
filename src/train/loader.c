/* Loaders
 *
 * A loader hands out this rank's batches, one after the other, and keeps one number: how many
 * samples all ranks have taken. Which samples those are follows from it (batch.c). A batch is made
 * in two steps. It is dealt: its samples are looked up, in order, because that may enter an epoch.
 * Then it is read, which changes nothing of the loader. So threads may read batches ahead
 * (prefetch.c), and all batches stay the same. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/log.h"
#include "core/result.h"
#include "world/world.h"
#include "world/world_internal.h"
#include "comm/comm.h"
#include "comm/groups_internal.h"
#include "parallel/mesh.h"
#include "train/data.h"
#include "train/data_internal.h"

#define DTRAIN__MOST_WORKERS 64
#define DTRAIN__MOST_PREFETCH 65536
#define DTRAIN__NEXT_TIMEOUT_NS \
    UINT64_C(600000000000) /* without a world: ten minutes, as its default */

DTRAIN_API dtrain_result dtrain_loader_next(dtrain_loader *loader, void *inputs, int32_t *targets)
{
    DTRAIN__GIVEN("dtrain_loader_next", loader);
    DTRAIN__GIVEN("dtrain_loader_next", inputs);
    if (loader->desc.sequence) DTRAIN__GIVEN("dtrain_loader_next", targets);
    if (loader->desc.sample_limit && loader->position >= (uint64_t)loader->desc.sample_limit)
        return dtrain_fail(DTRAIN_ERROR_END,
                           "dtrain_loader_next: all %lld samples were dealt; dtrain_loader_seek "
                           "begins again",
                           (long long)loader->desc.sample_limit);
    if (loader->prefetch) DTRAIN__TRY(dtrain__prefetch_take(loader, inputs, targets));
    else {
        dtrain__loader_deal(loader, loader->desc.seed, loader->position, loader->batches);
        DTRAIN__TRY(dtrain__loader_read(loader, loader->batches, inputs, targets));
        loader->batch_samples = loader->batches->count;
    }
    /* only now, so that a call that failed can be repeated */
    const uint64_t end = loader->position + loader->desc.batch * loader->ranks;
    loader->position = dtrain__loader_begin(loader, end);
    if (loader->desc.in_order && !loader->desc.sample_limit && !loader->warned && !loader->rank &&
        end > (uint64_t)loader->window_count) {
        loader->warned = true;
        dtrain_log(loader->world, DTRAIN_LOG_WARNING,
                   "a loader in order has dealt the %lld samples of %s and begins again; "
                   "sample_limit = DTRAIN_ONE_EPOCH ends it, so that an evaluation covers each "
                   "sample once",
                   (long long)loader->samples_per_epoch, loader->desc.dataset->name);
    }
    return DTRAIN_OK;
}

/* Continue after a load at the saved epoch and the place in it, as position and epoch_samples say.
 * The note says which samples of the epoch are not dealt exactly once, if any. */
static void dtrain__loader_resume(dtrain__state_source *source, char *note, size_t room)
{
    dtrain_loader *loader = (dtrain_loader *)(void *)source;
    const uint64_t now = (uint64_t)loader->window_count;
    const uint64_t before = loader->epoch_samples ? loader->epoch_samples : now; /* from a file */
    const uint64_t place = loader->position % before;
    const uint64_t position = loader->position / before * now + (place < now ? place : now);
    loader->epoch_samples = now;
    dtrain_loader_seek(loader, position);
    if (before != now)
        snprintf(note, room,
                 "an epoch has %llu samples and had %llu: some of this one come twice or never",
                 (unsigned long long)now, (unsigned long long)before);
    else if (loader->position != position)
        snprintf(note, room,
                 "drop_last leaves out the last %llu samples of this epoch, less than a batch",
                 (unsigned long long)(loader->position - position));
}

DTRAIN_API void dtrain_loader_query(const dtrain_loader *loader, dtrain_loader_info *info)
{
    if (!info) return;
    info->samples_per_epoch = loader ? loader->samples_per_epoch : 0;
    info->position = loader ? loader->position : 0;
    info->batch_samples = loader ? loader->batch_samples : 0;
}

DTRAIN_API void dtrain_loader_seek(dtrain_loader *loader, uint64_t position)
{
    if (!loader) return;
    dtrain__prefetch_pause(loader);
    loader->position = dtrain__loader_begin(loader, position);
}

/* ---- creation ---------------------------------------------------------------------------------*/

/* Refuse fields that contradict each other. */
static dtrain_result dtrain__loader_check(const dtrain_loader_desc *desc)
{
    const bool tokens = desc->dataset && desc->dataset->item_bytes == 0;
    if (!desc->dataset || desc->batch == 0 || desc->sequence < 0 || (tokens && !desc->sequence))
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_loader_create: expected a dataset and batch and sequence of at "
                           "least 1, found %s, %u and %lld",
                           desc->dataset ? "one" : "none", (unsigned)desc->batch,
                           (long long)desc->sequence);
    if (!tokens && desc->sequence)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_loader_create: sequence is %lld, but %s holds samples, which "
                           "are not cut: expected 0",
                           (long long)desc->sequence, desc->dataset->name);
    if (!desc->transform != !desc->output_bytes || (desc->user && !desc->transform) ||
        (desc->transform && tokens))
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_loader_create: %s",
                           desc->transform && tokens ? "transform is for samples, not for tokens"
                           : desc->transform         ? "transform needs output_bytes"
                                                     : "output_bytes and user are for a transform");
    if ((desc->mesh && desc->comm) || desc->sample_limit < DTRAIN_ONE_EPOCH)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_loader_create: sample_limit is %lld, expected DTRAIN_ONE_EPOCH, "
                           "0 or more; or mesh and comm are both given",
                           (long long)desc->sample_limit);
    if (desc->workers > DTRAIN__MOST_WORKERS || desc->prefetch > DTRAIN__MOST_PREFETCH ||
        (desc->prefetch && !desc->workers))
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_loader_create: workers is %u and prefetch %u; expected at most "
                           "%d and %d, and no prefetch without workers",
                           (unsigned)desc->workers, (unsigned)desc->prefetch, DTRAIN__MOST_WORKERS,
                           DTRAIN__MOST_PREFETCH);
    return DTRAIN_OK;
}

/* Resolve item_count, and count the windows of an epoch and the shifts to choose from, by the rule
 * at the top. Written with subtractions only: nothing overflows. */
static dtrain_result dtrain__loader_plan(dtrain_loader *loader)
{
    dtrain_loader_desc *desc = &loader->desc;
    const bool tokens = desc->sequence != 0;
    const char *name = desc->dataset->name;
    const int64_t have = desc->dataset->item_count;
    if (desc->first_item < 0 || desc->first_item > have || desc->item_count < 0 ||
        desc->item_count > have - desc->first_item)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_loader_create: %lld %s from %lld on were asked for, %s has "
                           "%lld",
                           (long long)desc->item_count, tokens ? "tokens" : "samples",
                           (long long)desc->first_item, name, (long long)have);
    if (desc->item_count == 0) desc->item_count = have - desc->first_item;
    const int64_t items = desc->item_count, sequence = desc->sequence;
    if (items <= sequence)
        return dtrain_fail(DTRAIN_ERROR_DATA,
                           tokens ? "dtrain_loader_create: %s has %lld tokens here, but a window "
                                    "of %lld + 1 needs %llu: use a shorter sequence or a larger "
                                    "file"
                                  : "dtrain_loader_create: %s has %lld samples here",
                           name, (long long)items, (long long)sequence,
                           (unsigned long long)sequence + 1);
    loader->window_count = !tokens          ? items
                           : desc->in_order ? (items - 1) / sequence
                                            : dtrain__max(1, items / sequence - 1);
    loader->shift_count =
        tokens ? dtrain__min(sequence, items - loader->window_count * sequence) : 1;
    const int64_t step = (int64_t)((uint64_t)desc->batch * loader->ranks); /* < 2^63 */
    loader->samples_per_epoch =
        loader->window_count - (desc->drop_last ? loader->window_count % step : 0);
    if (loader->samples_per_epoch == 0)
        return dtrain_fail(DTRAIN_ERROR_DATA,
                           "dtrain_loader_create: with drop_last nothing is left of %s: it has "
                           "%lld samples here, and %d ranks take batches of %u",
                           name, (long long)loader->window_count, (int)loader->ranks,
                           (unsigned)desc->batch);
    loader->epoch_samples = (uint64_t)loader->window_count;
    if (desc->sample_limit == DTRAIN_ONE_EPOCH || desc->sample_limit > loader->samples_per_epoch)
        desc->sample_limit = loader->samples_per_epoch;
    if (desc->in_order || loader->window_count < DTRAIN__RANDPERM_LIMIT) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                       "dtrain_loader_create: %lld windows of %lld tokens cannot be shuffled, "
                       "expected fewer than %lld: use a longer sequence or a part of the file",
                       (long long)loader->window_count, (long long)dtrain__max(1, sequence),
                       (long long)DTRAIN__RANDPERM_LIMIT);
}

/* Allocate the order of an epoch, and batches. Without workers there is one, which reads into the
 * caller's inputs and targets. */
static dtrain_result dtrain__loader_memory(dtrain_loader *loader)
{
    const dtrain_loader_desc *desc = &loader->desc;
    const dtrain_allocator *allocator = &loader->allocator;
    const size_t row = (size_t)desc->sequence;
    /* a window may fit in memory as bytes and not as int32 */
    if (row > SIZE_MAX / sizeof(int32_t) - 1)
        return dtrain_fail(DTRAIN_ERROR_MEMORY, "no memory for a window of %zu tokens", row);
    loader->sample_bytes = row               ? row * sizeof(int32_t)
                           : desc->transform ? desc->output_bytes
                                             : desc->dataset->item_bytes;
    loader->target_bytes = (row ? row : 1) * sizeof(int32_t);
    loader->scratch_bytes = row ? (row + 1) * sizeof(int32_t) : desc->dataset->item_bytes;
    if (!desc->in_order) {
        loader->order = (int64_t *)dtrain__alloc(allocator, (size_t)loader->window_count,
                                                 sizeof *loader->order, "a loader's order");
        if (!loader->order) return DTRAIN_ERROR_MEMORY;
    }
    loader->batch_count = desc->workers ? desc->prefetch : 1;
    loader->batches = (dtrain__batch *)dtrain__alloc(allocator, loader->batch_count,
                                                     sizeof *loader->batches, "a loader's batches");
    for (size_t i = 0; loader->batches && i < loader->batch_count; i++) {
        dtrain__batch *batch = &loader->batches[i];
        batch->picks = (dtrain__pick *)dtrain__alloc(allocator, desc->batch, sizeof *batch->picks,
                                                     "the samples of a batch");
        batch->scratch = dtrain__alloc(allocator, loader->scratch_bytes, 1, "a sample");
        if (!batch->picks || !batch->scratch) return DTRAIN_ERROR_MEMORY;
        if (!desc->workers) continue;
        batch->inputs =
            dtrain__alloc(allocator, desc->batch, loader->sample_bytes, "a batch's inputs");
        batch->targets = (int32_t *)dtrain__alloc(allocator, desc->batch, loader->target_bytes,
                                                  "a batch's targets");
        if (!batch->inputs || !batch->targets) return DTRAIN_ERROR_MEMORY;
    }
    return loader->batches ? DTRAIN_OK : DTRAIN_ERROR_MEMORY;
}

/* Count windows first: the sizes of the arrays follow from their number. */
DTRAIN_API dtrain_result dtrain_loader_create(dtrain_world *world, const dtrain_loader_desc *desc,
                                              dtrain_loader **out)
{
    DTRAIN__GIVEN("dtrain_loader_create", desc);
    DTRAIN__GIVEN("dtrain_loader_create", out);
    *out = NULL;
    DTRAIN__TRY(dtrain__loader_check(desc));
    dtrain_allocator allocator = dtrain__resolve_allocator(world ? &world->allocator : NULL);
    dtrain_loader *loader =
        (dtrain_loader *)dtrain__alloc(&allocator, 1, sizeof *loader, "a loader");
    if (!loader) return DTRAIN_ERROR_MEMORY;
    loader->allocator = allocator;
    loader->world = world;
    loader->desc = *desc;
    const dtrain__state_source state = {{{"loader.position", &loader->position, 8},
                                         {"loader.epoch_samples", &loader->epoch_samples, 8},
                                         {"loader.seed", &loader->desc.seed, 8},
                                         {NULL, NULL, 0},
                                         {NULL, NULL, 0}},
                                        dtrain__loader_resume,
                                        NULL,
                                        NULL,
                                        NULL,
                                        NULL};
    loader->state = state;
    const dtrain_comm *data = desc->mesh   ? dtrain_mesh_comm(desc->mesh, DTRAIN_AXIS_DATA)
                              : desc->comm ? desc->comm
                                           : dtrain_world_comm(world); /* NULL: one rank */
    loader->rank = data ? (uint64_t)dtrain_comm_rank(data) : 0;
    loader->ranks = data ? (uint64_t)dtrain_comm_size(data) : 1;
    loader->timeout_ns = world ? world->timeout_ns : DTRAIN__NEXT_TIMEOUT_NS;
    if (desc->prefetch == 0) loader->desc.prefetch = 2 * desc->workers;
    dtrain_result result = dtrain__loader_plan(loader);
    if (result == DTRAIN_OK) result = dtrain__loader_memory(loader);
    if (result == DTRAIN_OK && desc->workers) result = dtrain__prefetch_create(loader);
    if (result == DTRAIN_OK) *out = loader;
    else dtrain_loader_destroy(loader);
    return result;
}

DTRAIN_API void dtrain_loader_destroy(dtrain_loader *loader)
{
    if (!loader) return;
    dtrain_allocator allocator = loader->allocator;
    const uint32_t count = loader->desc.batch;
    dtrain__prefetch_destroy(loader);
    for (size_t i = 0; loader->batches && i < loader->batch_count; i++) {
        dtrain__batch *batch = &loader->batches[i];
        dtrain__free(&allocator, batch->picks, count, sizeof *batch->picks);
        dtrain__free(&allocator, batch->scratch, loader->scratch_bytes, 1);
        dtrain__free(&allocator, batch->inputs, count, loader->sample_bytes);
        dtrain__free(&allocator, batch->targets, count, loader->target_bytes);
    }
    dtrain__free(&allocator, loader->batches, loader->batch_count, sizeof *loader->batches);
    dtrain__free(&allocator, loader->order, (size_t)loader->window_count, sizeof *loader->order);
    dtrain__free(&allocator, loader, 1, sizeof *loader);
}
