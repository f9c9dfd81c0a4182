/* Threads that read batches ahead
 *
 * Workers take batches in turn, 0, 1, 2, ... from where the loader stands, and read each into its
 * place in a ring. The loader copies them out in the same order, so how many workers there are and
 * which of them is slow changes no batch:
 *
 *     batches    0 1 2 | 3 4 5 6 | 7 8 ...        batch_count = 4; 3 and 5 are ready, 4 and 6 are
 *                taken | in ring | not claimed    being read, and 7 waits until 3 is taken
 *
 * The worker that claims a batch holds `deal`, also while it waits for a free place: so epochs are
 * entered in order, and the loader never waits for a shuffle. `mutex` guards the counters, and is
 * held for a few lines at a time.
 *
 * A seek, a failed batch and a loaded checkpoint do the same: workers stop, the batches that they
 * have read are dropped, and the next call starts them at the loader's new position. The first call
 * starts them as well, creation does not. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/result.h"
#include "world/timeline_internal.h"
#include "world/world_internal.h"
#include "train/data.h"
#include "train/data_internal.h"

typedef struct dtrain__prefetch {
    pthread_mutex_t deal, mutex;
    pthread_cond_t room;  /* a place is free, or the end: workers wait for it */
    pthread_cond_t ready; /* a batch was read: the loader waits for it */
    pid_t process;        /* the one that has the threads: a forked child has none */
    int rank;             /* to be named in error sentences */
    pthread_t *threads;   /* (thread_count) of (desc.workers) */
    uint32_t thread_count;

    /* Under mutex. Batch n lies at n % batch_count; the next to be claimed begins at position. */
    bool running, ending;
    uint64_t seed, position;
    uint64_t claimed, taken;
    uint32_t busy; /* batches that are claimed and not yet read */
} dtrain__prefetch;

/* Claim batches, deal and read them, until the end. */
static void *dtrain__prefetch_worker(void *argument)
{
    dtrain_loader *loader = (dtrain_loader *)argument;
    dtrain__prefetch *p = loader->prefetch;
    dtrain__set_thread_rank(p->rank);
    for (;;) {
        pthread_mutex_lock(&p->deal);
        pthread_mutex_lock(&p->mutex);
        while (!p->ending && !(p->running && p->claimed - p->taken < loader->batch_count))
            pthread_cond_wait(&p->room, &p->mutex);
        const bool ending = p->ending;
        const uint64_t seed = p->seed, position = p->position;
        dtrain__batch *batch = &loader->batches[p->claimed % loader->batch_count];
        if (!ending) {
            const uint64_t end = position + loader->desc.batch * loader->ranks;
            p->position = dtrain__loader_begin(loader, end);
            p->claimed++;
            p->busy++;
        }
        pthread_mutex_unlock(&p->mutex);
        if (!ending) dtrain__loader_deal(loader, seed, position, batch);
        pthread_mutex_unlock(&p->deal);
        if (ending) return NULL;
        batch->read_ns[0] = dtrain__now_ns();
        batch->result = dtrain__loader_read(loader, batch, batch->inputs, batch->targets);
        batch->read_ns[1] = dtrain__now_ns();
        if (batch->result != DTRAIN_OK)
            snprintf(batch->error, sizeof batch->error, "%s", dtrain_last_error());
        pthread_mutex_lock(&p->mutex);
        batch->ready = true;
        p->busy--;
        pthread_cond_signal(&p->ready);
        pthread_mutex_unlock(&p->mutex);
    }
}

/* Copy the next batch out of the ring, at the latest when the timeout is over. After a batch that
 * failed the workers pause, and the next call starts them at that batch. The trace has a track for
 * each place in the ring, where batches follow each other. */
DTRAIN__PRIVATE dtrain_result dtrain__prefetch_take(dtrain_loader *loader, void *inputs,
                                                    int32_t *targets)
{
    dtrain__prefetch *p = loader->prefetch;
    dtrain_world *world = loader->world;
    const size_t count = loader->desc.batch;
    if (p->process != getpid())
        return dtrain_fail(DTRAIN_ERROR_USAGE,
                           "dtrain_loader_next: this loader's workers live in process %ld, from "
                           "which this one was forked: create loaders after the fork",
                           (long)p->process);
    const uint64_t end = dtrain__now_ns() + loader->timeout_ns;
    struct timespec deadline;
    deadline.tv_sec = (time_t)(end / 1000000000u);
    deadline.tv_nsec = (long)(end % 1000000000u);
    pthread_mutex_lock(&p->mutex);
    if (!p->running) {
        p->running = true;
        p->seed = loader->desc.seed;
        p->position = loader->position;
        pthread_cond_signal(&p->room); /* one at most waits: the others wait for `deal` */
    }
    const uint32_t place = (uint32_t)(p->taken % loader->batch_count);
    dtrain__batch *batch = &loader->batches[place];
    while (!batch->ready && pthread_cond_timedwait(&p->ready, &p->mutex, &deadline) == 0) continue;
    const bool there = batch->ready;
    pthread_mutex_unlock(&p->mutex);
    if (!there)
        return dtrain_fail(DTRAIN_ERROR_TIMEOUT,
                           "dtrain_loader_next: the batch at sample %llu of %s has not been read "
                           "within %.1f s: is its storage there?",
                           (unsigned long long)loader->position, loader->desc.dataset->name,
                           1e-9 * (double)loader->timeout_ns);
    if (batch->result != DTRAIN_OK) {
        const dtrain_result result = dtrain__set_last_error(batch->result, batch->error);
        dtrain__prefetch_pause(loader);
        return result;
    }
    if (world && world->timeline.traced && DTRAIN__TRACK_READ + place < DTRAIN__TRACE_TRACKS)
        dtrain__span_add(world, DTRAIN__TRACK_READ + place, DTRAIN_SPAN_DATA, "read batch", NULL,
                         (int64_t)p->taken, batch->read_ns[0], batch->read_ns[1]);
    loader->batch_samples = batch->count;
    memcpy(inputs, batch->inputs, count * loader->sample_bytes);
    if (targets) memcpy(targets, batch->targets, count * loader->target_bytes);
    pthread_mutex_lock(&p->mutex);
    batch->ready = false;
    p->taken++;
    pthread_cond_signal(&p->room);
    pthread_mutex_unlock(&p->mutex);
    return DTRAIN_OK;
}

/* Wait for the reads that are under way, and drop all batches of the ring. */
DTRAIN__PRIVATE void dtrain__prefetch_pause(dtrain_loader *loader)
{
    dtrain__prefetch *p = loader->prefetch;
    if (!p || p->process != getpid()) return;
    pthread_mutex_lock(&p->mutex);
    p->running = false;
    while (p->busy > 0) pthread_cond_wait(&p->ready, &p->mutex);
    p->claimed = p->taken = 0;
    for (size_t i = 0; i < loader->batch_count; i++) loader->batches[i].ready = false;
    pthread_mutex_unlock(&p->mutex);
}

/* ---- creation ---------------------------------------------------------------------------------*/

/* Start the workers, with all signals blocked: the host's handlers run in its own threads. After a
 * failure prefetch_destroy ends those that have started. */
DTRAIN__PRIVATE dtrain_result dtrain__prefetch_create(dtrain_loader *loader)
{
    pthread_condattr_t attributes;
    sigset_t all, before;
    dtrain__prefetch *p =
        (dtrain__prefetch *)dtrain__alloc(&loader->allocator, 1, sizeof *p, "a loader's workers");
    if (!p) return DTRAIN_ERROR_MEMORY;
    p->process = getpid();
    p->rank = dtrain__rank_of_thread();
    pthread_mutex_init(&p->deal, NULL);
    pthread_mutex_init(&p->mutex, NULL);
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&p->room, &attributes);
    pthread_cond_init(&p->ready, &attributes);
    pthread_condattr_destroy(&attributes);
    loader->prefetch = p;
    p->threads = (pthread_t *)dtrain__alloc(&loader->allocator, loader->desc.workers,
                                            sizeof *p->threads, "a loader's threads");
    if (!p->threads) return DTRAIN_ERROR_MEMORY;
    int error = 0;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (p->thread_count < loader->desc.workers && error == 0) {
        error = pthread_create(&p->threads[p->thread_count], NULL, dtrain__prefetch_worker, loader);
        if (error == 0) p->thread_count++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error == 0) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_SYSTEM,
                       "dtrain_loader_create: worker %u of %u could not be started: %s",
                       p->thread_count + 1, (unsigned)loader->desc.workers, strerror(error));
}

/* End the workers, each after the read that it is in. A forked child has their memory and no
 * threads. */
DTRAIN__PRIVATE void dtrain__prefetch_destroy(dtrain_loader *loader)
{
    dtrain__prefetch *p = loader->prefetch;
    if (!p) return;
    if (p->process == getpid()) {
        pthread_mutex_lock(&p->mutex);
        p->ending = true;
        pthread_cond_broadcast(&p->room);
        pthread_mutex_unlock(&p->mutex);
        for (uint32_t i = 0; i < p->thread_count; i++) pthread_join(p->threads[i], NULL);
        pthread_cond_destroy(&p->ready);
        pthread_cond_destroy(&p->room);
        pthread_mutex_destroy(&p->mutex);
        pthread_mutex_destroy(&p->deal);
    }
    dtrain__free(&loader->allocator, p->threads, loader->desc.workers, sizeof *p->threads);
    dtrain__free(&loader->allocator, p, 1, sizeof *p);
    loader->prefetch = NULL;
}
