/* Loaders
 *
 * A loader hands out this rank's batches in order, and keeps one number: how many samples all ranks
 * have taken. The number determines the next samples. A loader cuts tokens into windows that share
 * one border token (target of one window, input of the next). With shuffling, a new shift moves the
 * grid every epoch, so that each token gets other contexts:
 *
 *     tokens   |. . .|o o o o|o o o o|o o o o|. .|        sequence = 4, shift = 3, three windows
 *               shift  0       1       2    +1 target
 *
 *     sample k of the run = window order[k % windows] of epoch k / windows
 *     rank r of R, batch B, position P:  samples P + i R + r for i < B, then P += B R
 *
 * A sample depends only on k: the world size only changes which rank reads it, and P is the whole
 * state. With drop_last P skips the last samples of an epoch if fewer than B R are left: no batch
 * crosses a border. Windows per epoch: (tokens - 1) / sequence in order; shuffled at least one
 * fewer, but never fewer than one, so that every shift in [0, sequence) leaves room for them. If
 * items are samples, each is a window, and there is no shift.
 *
 * A batch is made in two steps. Dealing looks its samples up, in order, because it can enter an
 * epoch. Reading changes nothing in the loader, so threads can read batches ahead. They take
 * batches in turn, 0, 1, 2, ... from the loader's position, and read each into its place in a ring.
 * The loader copies batches out in the same order: neither the number of workers nor a slow one
 * changes a batch:
 *
 *     batches    0 1 2 | 3 4 5 6 | 7 8 ...        batch_count = 4; 3 and 5 are ready, 4 and 6 are
 *                taken | in ring | not claimed    being read, and 7 waits until 3 is taken
 *
 * The worker that claims a batch holds `deal`, even while it waits for a free place: epochs are
 * entered in order, and the loader never waits for a shuffle. `mutex` guards the counters, for a
 * few lines at a time.
 *
 * A seek, a failed batch and a loaded checkpoint stop the workers and drop the batches that they
 * have read. The next call starts workers at the loader's new position, as the first call does. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/log.h"
#include "core/result.h"
#include "world/timeline_internal.h"
#include "world/world.h"
#include "world/world_internal.h"
#include "comm/comm.h"
#include "parallel/mesh.h"
#include "state/source_internal.h"
#include "train/data.h"
#include "train/data_internal.h"

#define DTRAIN__MOST_WORKERS 64
#define DTRAIN__MOST_PREFETCH 65536
#define DTRAIN__NEXT_TIMEOUT_NS UINT64_C(600000000000) /* ten minutes, the default of a world */

/* The shuffle's generator yields 32-bit numbers; with more windows torch takes another
 * algorithm. */
#define DTRAIN__RANDPERM_LIMIT (INT64_C(0xffffffff) / 20)
#define DTRAIN__MT_COUNT 624                           /* words of the generator's state */
#define DTRAIN__STREAM_LOADER UINT64_C(0x6c6f61646572) /* Philox stream of the shifts */

/* A batch: its samples, scratch to read one of them, and with workers the memory of its data. */
typedef struct dtrain__batch {
    dtrain_sample *picks; /* (batch) item of a window: its first token */
    uint32_t count;       /* number of picks dealt; the rest is padding */
    void *scratch;        /* one sample as the dataset stores it */
    void *inputs;         /* (batch, sample_bytes); NULL without workers, like targets */
    int32_t *targets;     /* (batch, sequence or 1) */
    uint64_t read_ns[2];  /* begin and end of a worker's read, for a trace */
    bool ready;           /* true after the read, whose result and error follow */
    dtrain_result result;
    char error[DTRAIN__ERROR_BYTES];
} dtrain__batch;

struct dtrain_loader {
    dtrain__state_source state;
    dtrain_allocator allocator;
    dtrain_world *world;     /* world whose trace shows the workers; NULL: none */
    dtrain_loader_desc desc; /* resolved */
    uint64_t rank, ranks;
    uint64_t timeout_ns;
    dtrain_loader_info info;
    uint64_t epoch_samples; /* window_count; during a load the saved run's */
    int64_t window_count;   /* windows of an epoch, before drop_last */
    bool warned;            /* true after the warning that samples come again */
    int64_t shift_count;    /* number of shifts; 1: no shift */
    size_t sample_bytes, target_bytes, scratch_bytes;
    dtrain__batch *batches; /* (batch_count) one, or with workers the ring */
    size_t batch_count;

    /* Epoch of order and shift, and its seed. Without shuffling no epoch is entered. With workers
     * only the worker that deals uses them. */
    bool entered;
    uint64_t seed, epoch;
    int64_t shift;
    int64_t *order; /* (window_count) permutation of the epoch */

    /* Only with workers: */
    pthread_mutex_t deal, mutex;
    pthread_cond_t room;  /* wakes workers: a place is free, or the end */
    pthread_cond_t ready; /* wakes the loader: a batch was read */
    pid_t process;        /* process that has the threads, not a forked child; 0: no workers */
    int thread_rank;      /* rank in error sentences */
    pthread_t threads[DTRAIN__MOST_WORKERS]; /* (thread_count) */
    uint32_t thread_count;

    /* Guarded by mutex. Batch n is at n % batch_count; the next batch to claim begins at
     * `ahead`. */
    bool running, ending;
    uint64_t ahead, ahead_seed;
    uint64_t claimed, taken;
    uint32_t busy; /* batches claimed and not yet read */
};

/* ---- Batches ----------------------------------------------------------------------------------*/

/* Write a permutation of 0 to n - 1, n below DTRAIN__RANDPERM_LIMIT, with PyTorch's numbers:
 * Mersenne Twister (Matsumoto and Nishimura, 1998) and the swap loop of torch.randperm with its
 * modulo bias. Swap k takes number k of the generator; the seed is its low 32 bits, as in torch. */
static void dtrain__randperm(uint64_t seed, int64_t n, int64_t *out)
{
    uint32_t s[DTRAIN__MT_COUNT];
    s[0] = (uint32_t)seed;
    for (uint32_t i = 1; i < DTRAIN__MT_COUNT; i++)
        s[i] = 1812433253u * (s[i - 1] ^ (s[i - 1] >> 30)) + i;
    for (int64_t i = 0; i < n; i++) out[i] = i;
    for (int64_t i = 0; i < n - 1; i++) {
        /* The next 624 words: word k becomes a mix of words k, k + 1 and k + 397, in place. Words
         * that wrap around are new ones of this pass, as in the definition. */
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

/* Return the begin of the batch at `position`: with drop_last the next epoch if this one has fewer
 * samples left. */
static uint64_t dtrain__loader_begin(const dtrain_loader *loader, uint64_t position)
{
    const uint64_t all = (uint64_t)loader->window_count, left = all - position % all;
    const bool drops = loader->desc.drop_last && left < loader->desc.batch * loader->ranks;
    return drops ? position + left : position;
}

/* List the samples of this rank's batch at `position`. Their k grows, so a batch across a border
 * enters each epoch once, which sets order and shift: O(windows). */
static void dtrain__loader_deal(dtrain_loader *loader, uint64_t seed, uint64_t position,
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

/* Read a dealt batch sample by sample, and pad it. Inputs and targets of a window both come from
 * the scratch: its tokens are read once. */
static dtrain_result dtrain__loader_read(const dtrain_loader *loader, const dtrain__batch *batch,
                                         void *inputs, int32_t *targets)
{
    const dtrain_loader_desc *desc = &loader->desc;
    const size_t row = (size_t)desc->sequence;
    const uint32_t missing = desc->batch - batch->count;
    unsigned char *to = (unsigned char *)inputs;
    for (uint32_t i = 0; i < batch->count; i++, to += loader->sample_bytes) {
        dtrain_sample *sample = &batch->picks[i];
        if (desc->sequence) {
            const int32_t *window = (const int32_t *)batch->scratch;
            DTRAIN__TRY(dtrain__dataset_read(desc->dataset, sample->item, desc->sequence + 1,
                                             batch->scratch, NULL));
            memcpy(to, window, loader->sample_bytes);
            memcpy(targets + i * row, window + 1, loader->sample_bytes);
            continue;
        }
        sample->data = batch->scratch;
        sample->label = 0; /* a source can have no labels */
        DTRAIN__TRY(dtrain__dataset_read(desc->dataset, sample->item, 1,
                                         desc->transform ? batch->scratch : to,
                                         targets || desc->transform ? &sample->label : NULL));
        if (targets) targets[i] = sample->label;
        if (desc->transform) DTRAIN__TRY(desc->transform(desc->user, sample, to));
    }
    memset(to, 0, missing * loader->sample_bytes);
    if (targets) /* all bytes of -1 are 255 */
        memset((char *)targets + batch->count * loader->target_bytes, 255,
               missing * loader->target_bytes);
    return DTRAIN_OK;
}

/* ---- Workers ----------------------------------------------------------------------------------*/

/* Claim batches, deal and read them, until the end. */
static void *dtrain__prefetch_worker(void *argument)
{
    dtrain_loader *loader = (dtrain_loader *)argument;
    dtrain__set_thread_rank(loader->thread_rank);
    for (;;) {
        pthread_mutex_lock(&loader->deal);
        pthread_mutex_lock(&loader->mutex);
        while (!loader->ending &&
               !(loader->running && loader->claimed - loader->taken < loader->batch_count))
            pthread_cond_wait(&loader->room, &loader->mutex);
        const bool ending = loader->ending;
        const uint64_t seed = loader->ahead_seed, position = loader->ahead;
        dtrain__batch *batch = &loader->batches[loader->claimed % loader->batch_count];
        if (!ending) {
            const uint64_t end = position + loader->desc.batch * loader->ranks;
            loader->ahead = dtrain__loader_begin(loader, end);
            loader->claimed++;
            loader->busy++;
        }
        pthread_mutex_unlock(&loader->mutex);
        if (!ending) dtrain__loader_deal(loader, seed, position, batch);
        pthread_mutex_unlock(&loader->deal);
        if (ending) return NULL;
        batch->read_ns[0] = dtrain__now_ns();
        batch->result = dtrain__loader_read(loader, batch, batch->inputs, batch->targets);
        batch->read_ns[1] = dtrain__now_ns();
        if (batch->result != DTRAIN_OK)
            snprintf(batch->error, sizeof batch->error, "%s", dtrain_last_error());
        pthread_mutex_lock(&loader->mutex);
        batch->ready = true;
        loader->busy--;
        pthread_cond_signal(&loader->ready);
        pthread_mutex_unlock(&loader->mutex);
    }
}

/* Wait for current reads, and drop all batches of the ring. */
static void dtrain__prefetch_pause(dtrain_loader *loader)
{
    if (loader->process != getpid()) return;
    pthread_mutex_lock(&loader->mutex);
    loader->running = false;
    while (loader->busy > 0) pthread_cond_wait(&loader->ready, &loader->mutex);
    loader->claimed = loader->taken = 0;
    for (size_t i = 0; i < loader->batch_count; i++) loader->batches[i].ready = false;
    pthread_mutex_unlock(&loader->mutex);
}

/* Copy the next batch out of the ring, or fail after the timeout. After a failed batch the workers
 * pause, and the next call starts them at that batch. The trace has a track for each place in the
 * ring, where batches do not overlap. */
static dtrain_result dtrain__prefetch_take(dtrain_loader *loader, void *inputs, int32_t *targets)
{
    dtrain_world *world = loader->world;
    const size_t count = loader->desc.batch;
    if (loader->process != getpid())
        return dtrain_fail(DTRAIN_ERROR_USAGE,
                           "dtrain_loader_next: this loader's workers live in process %ld, from "
                           "which this one was forked: create loaders after the fork",
                           (long)loader->process);
    const uint64_t end = dtrain__now_ns() + loader->timeout_ns;
    struct timespec deadline;
    deadline.tv_sec = (time_t)(end / 1000000000u);
    deadline.tv_nsec = (long)(end % 1000000000u);
    pthread_mutex_lock(&loader->mutex);
    if (!loader->running) {
        loader->running = true;
        loader->ahead_seed = loader->desc.seed;
        loader->ahead = loader->info.position;
        pthread_cond_signal(
            &loader->room); /* at most one worker waits for room; others wait for `deal` */
    }
    const uint32_t place = (uint32_t)(loader->taken % loader->batch_count);
    dtrain__batch *batch = &loader->batches[place];
    while (!batch->ready && pthread_cond_timedwait(&loader->ready, &loader->mutex, &deadline) == 0)
        continue;
    const bool there = batch->ready;
    pthread_mutex_unlock(&loader->mutex);
    if (!there)
        return dtrain_fail(DTRAIN_ERROR_TIMEOUT,
                           "dtrain_loader_next: the batch at sample %llu of %s has not been read "
                           "within %.1f s: is its storage there?",
                           (unsigned long long)loader->info.position, loader->desc.dataset->name,
                           1e-9 * (double)loader->timeout_ns);
    if (batch->result != DTRAIN_OK) {
        const dtrain_result result = dtrain__set_last_error(batch->result, batch->error);
        dtrain__prefetch_pause(loader);
        return result;
    }
    if (world && world->timeline.traced && DTRAIN__TRACK_READ + place < DTRAIN__TRACE_TRACKS)
        dtrain__span_add(world, DTRAIN__TRACK_READ + place, DTRAIN_SPAN_DATA, "read batch", NULL,
                         (int64_t)loader->taken, batch->read_ns[0], batch->read_ns[1]);
    loader->info.batch_samples = batch->count;
    memcpy(inputs, batch->inputs, count * loader->sample_bytes);
    if (targets) memcpy(targets, batch->targets, count * loader->target_bytes);
    pthread_mutex_lock(&loader->mutex);
    batch->ready = false;
    loader->taken++;
    pthread_cond_signal(&loader->room);
    pthread_mutex_unlock(&loader->mutex);
    return DTRAIN_OK;
}

/* ---- The loader -------------------------------------------------------------------------------*/

DTRAIN_API dtrain_result dtrain_loader_next(dtrain_loader *loader, void *inputs, int32_t *targets)
{
    DTRAIN__GIVEN("dtrain_loader_next", loader);
    DTRAIN__GIVEN("dtrain_loader_next", inputs);
    if (loader->desc.sequence) DTRAIN__GIVEN("dtrain_loader_next", targets);
    if (loader->desc.sample_limit && loader->info.position >= (uint64_t)loader->desc.sample_limit)
        return dtrain_fail(DTRAIN_ERROR_END,
                           "dtrain_loader_next: all %lld samples were dealt; dtrain_loader_seek "
                           "begins again",
                           (long long)loader->desc.sample_limit);
    if (loader->process) DTRAIN__TRY(dtrain__prefetch_take(loader, inputs, targets));
    else {
        dtrain__loader_deal(loader, loader->desc.seed, loader->info.position, loader->batches);
        DTRAIN__TRY(dtrain__loader_read(loader, loader->batches, inputs, targets));
        loader->info.batch_samples = loader->batches->count;
    }
    /* after success, so that a failed call can be repeated */
    const uint64_t end = loader->info.position + loader->desc.batch * loader->ranks;
    loader->info.position = dtrain__loader_begin(loader, end);
    if (loader->desc.in_order && !loader->desc.sample_limit && !loader->warned && !loader->rank &&
        end > (uint64_t)loader->window_count) {
        loader->warned = true;
        dtrain_log(loader->world, DTRAIN_LOG_WARNING,
                   "a loader in order has dealt the %lld samples of %s and begins again; "
                   "sample_limit = DTRAIN_ONE_EPOCH ends it, so that an evaluation covers each "
                   "sample once",
                   (long long)loader->info.samples_per_epoch, loader->desc.dataset->name);
    }
    return DTRAIN_OK;
}

/* Continue after a load at the saved epoch and the place in it, from position and epoch_samples.
 * The note names the samples of the epoch that are not dealt exactly once. */
static void dtrain__loader_resume(dtrain__state_source *source, char *note, size_t room)
{
    dtrain_loader *loader = (dtrain_loader *)(void *)source;
    const uint64_t now = (uint64_t)loader->window_count;
    const uint64_t before =
        loader->epoch_samples ? loader->epoch_samples : now; /* a file's number */
    const uint64_t place = loader->info.position % before;
    const uint64_t position = loader->info.position / before * now + (place < now ? place : now);
    loader->epoch_samples = now;
    dtrain_loader_seek(loader, position);
    if (before != now)
        snprintf(note, room,
                 "an epoch has %llu samples and had %llu: some of this one come twice or never",
                 (unsigned long long)now, (unsigned long long)before);
    else if (loader->info.position != position)
        snprintf(note, room,
                 "drop_last leaves out the last %llu samples of this epoch, less than a batch",
                 (unsigned long long)(loader->info.position - position));
}

DTRAIN_API void dtrain_loader_query(const dtrain_loader *loader, dtrain_loader_info *info)
{
    dtrain__give(dtrain__abi_of(loader ? loader->world : NULL), DTRAIN__ABI_loader_info,
                 loader ? &loader->info : NULL, info);
}

DTRAIN_API void dtrain_loader_seek(dtrain_loader *loader, uint64_t position)
{
    if (!loader) return;
    dtrain__prefetch_pause(loader);
    loader->info.position = dtrain__loader_begin(loader, position);
}

/* ---- Creation ---------------------------------------------------------------------------------*/

/* Resolve item_count, and count the windows of an epoch and the shifts, by the rule at the top.
 * Subtractions cannot overflow. */
static dtrain_result dtrain__loader_plan(dtrain_loader *loader)
{
    dtrain_loader_desc *desc = &loader->desc;
    const bool tokens = desc->sequence != 0;
    const char *name = desc->dataset->name;
    const int64_t have = desc->dataset->info.item_count;
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
    loader->info.samples_per_epoch =
        loader->window_count - (desc->drop_last ? loader->window_count % step : 0);
    if (loader->info.samples_per_epoch == 0)
        return dtrain_fail(DTRAIN_ERROR_DATA,
                           "dtrain_loader_create: with drop_last nothing is left of %s: it has "
                           "%lld samples here, and %d ranks take batches of %u",
                           name, (long long)loader->window_count, (int)loader->ranks,
                           (unsigned)desc->batch);
    loader->epoch_samples = (uint64_t)loader->window_count;
    if (desc->sample_limit == DTRAIN_ONE_EPOCH ||
        desc->sample_limit > loader->info.samples_per_epoch)
        desc->sample_limit = loader->info.samples_per_epoch;
    if (desc->in_order || loader->window_count < DTRAIN__RANDPERM_LIMIT) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                       "dtrain_loader_create: %lld windows of %lld tokens cannot be shuffled, "
                       "expected fewer than %lld: use a longer sequence or a part of the file",
                       (long long)loader->window_count, (long long)dtrain__max(1, sequence),
                       (long long)DTRAIN__RANDPERM_LIMIT);
}

/* Allocate the order of an epoch, and batches. Without workers there is one batch, which reads into
 * the caller's inputs and targets. */
static dtrain_result dtrain__loader_memory(dtrain_loader *loader)
{
    const dtrain_loader_desc *desc = &loader->desc;
    const dtrain_allocator *allocator = &loader->allocator;
    const size_t row = (size_t)desc->sequence;
    /* a window can fit in memory as bytes and not as int32 */
    if (row > SIZE_MAX / sizeof(int32_t) - 1)
        return dtrain_fail(DTRAIN_ERROR_MEMORY, "no memory for a window of %zu tokens", row);
    loader->sample_bytes = row               ? row * sizeof(int32_t)
                           : desc->transform ? desc->output_bytes
                                             : desc->dataset->info.item_bytes;
    loader->target_bytes = (row ? row : 1) * sizeof(int32_t);
    loader->scratch_bytes = row ? (row + 1) * sizeof(int32_t) : desc->dataset->info.item_bytes;
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
        batch->picks = (dtrain_sample *)dtrain__alloc(allocator, desc->batch, sizeof *batch->picks,
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

/* Start the workers with all signals blocked: the program's handlers run in its threads. After a
 * failure destroy ends the workers that have started. */
static dtrain_result dtrain__prefetch_start(dtrain_loader *loader)
{
    pthread_condattr_t attributes;
    loader->process = getpid();
    loader->thread_rank = dtrain__rank_of_thread();
    pthread_mutex_init(&loader->deal, NULL);
    pthread_mutex_init(&loader->mutex, NULL);
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&loader->room, &attributes);
    pthread_cond_init(&loader->ready, &attributes);
    pthread_condattr_destroy(&attributes);
    int error = 0;
    while (loader->thread_count < loader->desc.workers && error == 0) {
        error = dtrain__thread_start(&loader->threads[loader->thread_count],
                                     dtrain__prefetch_worker, loader);
        if (error == 0) loader->thread_count++;
    }
    if (error == 0) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_SYSTEM,
                       "dtrain_loader_create: worker %u of %u could not be started: %s",
                       loader->thread_count + 1, (unsigned)loader->desc.workers, strerror(error));
}

/* Create a loader. The number of windows, counted first, gives the sizes of the arrays. */
DTRAIN_API dtrain_result dtrain_loader_create(dtrain_world *world, const dtrain_loader_desc *desc,
                                              dtrain_loader **out)
{
    const char *const call = "dtrain_loader_create";
    DTRAIN__GIVEN(call, desc);
    DTRAIN__GIVEN(call, out);
    *out = NULL;
    DTRAIN__TAKE(dtrain__abi_of(world), loader_desc, desc);
    DTRAIN__GIVEN(call, desc->dataset);
    const bool tokens = desc->dataset->info.item_bytes == 0;
    const dtrain__bound bounds[] = {
        {desc->batch == 0, "batch", 0, "at least 1"},
        {tokens && desc->sequence < 1, "sequence", (double)desc->sequence, "at least 1"},
        {!tokens && desc->sequence, "sequence", (double)desc->sequence,
         "0, as the dataset holds samples, which are not cut"},
        {desc->sample_limit < DTRAIN_ONE_EPOCH, "sample_limit", (double)desc->sample_limit,
         "DTRAIN_ONE_EPOCH, 0 or more"},
        {desc->workers > DTRAIN__MOST_WORKERS, "workers", (double)desc->workers, "at most 64"},
        {desc->prefetch > (desc->workers ? DTRAIN__MOST_PREFETCH : 0), "prefetch",
         (double)desc->prefetch, "at most 65536, and 0 without workers"}};
    const char *const wrong = desc->transform && tokens ? "transform is for samples, not for tokens"
                              : desc->transform && !desc->output_bytes
                                  ? "transform needs output_bytes"
                              : !desc->transform && (desc->output_bytes || desc->user)
                                  ? "output_bytes and user are for a transform"
                              : desc->mesh && desc->comm ? "mesh and comm are both given"
                                                         : NULL;
    DTRAIN__TRY(dtrain__check_bounds(call, bounds, sizeof bounds / sizeof bounds[0]));
    if (wrong) return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: %s", call, wrong);
    dtrain_allocator allocator = dtrain__resolve_allocator(world ? &world->allocator : NULL);
    dtrain_loader *loader =
        (dtrain_loader *)dtrain__alloc(&allocator, 1, sizeof *loader, "a loader");
    if (!loader) return DTRAIN_ERROR_MEMORY;
    loader->allocator = allocator;
    loader->world = world;
    loader->desc = *desc;
    const dtrain__scalar scalars[] = {{"loader.position", &loader->info.position, 8},
                                      {"loader.epoch_samples", &loader->epoch_samples, 8},
                                      {"loader.seed", &loader->desc.seed, 8}};
    memcpy(loader->state.scalars, scalars, sizeof scalars);
    loader->state.resume = dtrain__loader_resume;
    const dtrain_comm *data = desc->mesh   ? dtrain_mesh_comm(desc->mesh, DTRAIN_AXIS_DATA)
                              : desc->comm ? desc->comm
                                           : dtrain_world_comm(world); /* NULL: one rank */
    loader->rank = data ? (uint64_t)dtrain_comm_rank(data) : 0;
    loader->ranks = data ? (uint64_t)dtrain_comm_size(data) : 1;
    loader->timeout_ns = world ? world->timeout_ns : DTRAIN__NEXT_TIMEOUT_NS;
    if (desc->prefetch == 0) loader->desc.prefetch = 2 * desc->workers;
    dtrain_result result = dtrain__loader_plan(loader);
    if (result == DTRAIN_OK) result = dtrain__loader_memory(loader);
    if (result == DTRAIN_OK && desc->workers) result = dtrain__prefetch_start(loader);
    if (result == DTRAIN_OK) *out = loader;
    else dtrain_loader_destroy(loader);
    return result;
}

/* End the workers, each after its current read, and free the loader. A forked child has the
 * workers' memory and no threads. */
DTRAIN_API void dtrain_loader_destroy(dtrain_loader *loader)
{
    if (!loader) return;
    dtrain_allocator allocator = loader->allocator;
    const uint32_t count = loader->desc.batch;
    if (loader->process == getpid()) {
        pthread_mutex_lock(&loader->mutex);
        loader->ending = true;
        pthread_cond_broadcast(&loader->room);
        pthread_mutex_unlock(&loader->mutex);
        for (uint32_t i = 0; i < loader->thread_count; i++) pthread_join(loader->threads[i], NULL);
        pthread_cond_destroy(&loader->ready);
        pthread_cond_destroy(&loader->room);
        pthread_mutex_destroy(&loader->mutex);
        pthread_mutex_destroy(&loader->deal);
    }
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
