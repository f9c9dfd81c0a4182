/* The threads of one rank
 *
 * The CPU device: pool.c runs one function on T threads; cpu.c has state, memory, table and the
 * division of work; launch*.c check arguments and call kernels; gemm.c cuts matrix products into
 * tiles; kernels/ is the arithmetic, one text that kernels.c compiles for each instruction set. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/log.h"
#include "device/cpu/pool_internal.h"

/* ---- The pool
 *
 * A generation number identifies the current job; a worker has run all jobs up to its own copy.
 *
 *   caller: write task, pending = T - 1, generation + 1 | run task(0) | wait until pending == 0
 *   worker: wait until generation differs from its copy | run task(i) | pending - 1
 *
 * Both waits spin for about 30 us, because training calls follow each other closely, and then sleep
 * on a condition variable. No wake-up is lost: the sleeper announces itself (asleep, caller_asleep)
 * and then checks the state again; the other side changes the state and then checks for sleepers.
 * All four accesses are sequentially consistent, so at least one side sees the other. The sleeper
 * holds the lock from its announcement into the wait, so the signal, sent under that lock, cannot
 * fall between them.
 *
 * Threads do not survive fork: a rank makes its pool after the fork. */

static uint32_t dtrain__pool_await_job(dtrain__pool *pool, uint32_t seen)
{
    uint32_t now = seen;
    for (int i = 0; i < pool->spins && now == seen; i++) {
        dtrain__pause();
        now = __atomic_load_n(&pool->generation, __ATOMIC_ACQUIRE);
    }
    if (now != seen) return now;
    pthread_mutex_lock(&pool->lock);
    __atomic_add_fetch(&pool->asleep, 1, __ATOMIC_SEQ_CST);
    while ((now = __atomic_load_n(&pool->generation, __ATOMIC_SEQ_CST)) == seen)
        pthread_cond_wait(&pool->work, &pool->lock);
    __atomic_sub_fetch(&pool->asleep, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&pool->lock);
    return now;
}

static void dtrain__pool_publish_job(dtrain__pool *pool)
{
    __atomic_store_n(&pool->pending, pool->thread_count - 1, __ATOMIC_RELAXED);
    __atomic_add_fetch(&pool->generation, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&pool->asleep, __ATOMIC_SEQ_CST) == 0) return;
    pthread_mutex_lock(&pool->lock);
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->lock);
}

static void dtrain__pool_await_workers(dtrain__pool *pool)
{
    for (int i = 0; i < pool->spins; i++) {
        if (__atomic_load_n(&pool->pending, __ATOMIC_ACQUIRE) == 0) return;
        dtrain__pause();
    }
    pthread_mutex_lock(&pool->lock);
    __atomic_store_n(&pool->caller_asleep, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&pool->pending, __ATOMIC_SEQ_CST) != 0)
        pthread_cond_wait(&pool->done, &pool->lock);
    __atomic_store_n(&pool->caller_asleep, 0, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&pool->lock);
}

static void *dtrain__pool_worker(void *arg)
{
    dtrain__worker *self = (dtrain__worker *)arg;
    dtrain__pool *pool = self->pool;
    uint32_t seen = 0;
    for (;;) {
        seen = dtrain__pool_await_job(pool, seen);
        if (pool->stop) return NULL;
        pool->task(pool->ctx, self->index, pool->thread_count);
        if (__atomic_sub_fetch(&pool->pending, 1, __ATOMIC_SEQ_CST) != 0) continue;
        if (!__atomic_load_n(&pool->caller_asleep, __ATOMIC_SEQ_CST)) continue;
        pthread_mutex_lock(&pool->lock);
        pthread_cond_signal(&pool->done);
        pthread_mutex_unlock(&pool->lock);
    }
}

/* Run task(ctx, index, count) once for every index below count and return when all are done; index
 * 0 is the calling thread. Without a pool, or inside a task, count is 1. */
DTRAIN__PRIVATE void dtrain__parallel(dtrain__pool *pool, dtrain__task_fn task, void *ctx)
{
    if (!pool || pool->thread_count == 1 || __atomic_exchange_n(&pool->busy, 1, __ATOMIC_ACQUIRE)) {
        task(ctx, 0, 1);
        return;
    }
    pool->task = task;
    pool->ctx = ctx;
    dtrain__pool_publish_job(pool);
    task(ctx, 0, pool->thread_count);
    dtrain__pool_await_workers(pool);
    __atomic_store_n(&pool->busy, 0, __ATOMIC_RELEASE);
}

DTRAIN__PRIVATE void dtrain__pool_destroy(dtrain__pool *pool)
{
    if (!pool) return;
    pool->stop = 1;
    dtrain__pool_publish_job(pool);
    for (int i = 0; i < pool->thread_count - 1; i++) pthread_join(pool->workers[i].thread, NULL);
    pthread_cond_destroy(&pool->done);
    pthread_cond_destroy(&pool->work);
    pthread_mutex_destroy(&pool->lock);
    dtrain__free(&pool->allocator, pool->workers, (size_t)pool->room, sizeof *pool->workers);
    dtrain_allocator allocator = pool->allocator;
    dtrain__free(&allocator, pool, 1, sizeof *pool);
}

/* Return 0, ENOMEM, or pthread_create's error. `oversubscribed`: threads sleep at once instead of
 * spinning on a core that another thread needs. */
DTRAIN__PRIVATE int dtrain__pool_create(dtrain__pool **out, const dtrain_allocator *allocator,
                                        int thread_count, int oversubscribed)
{
    dtrain_allocator memory = dtrain__resolve_allocator(allocator);
    *out = NULL;
    dtrain__pool *pool = (dtrain__pool *)dtrain__alloc(&memory, 1, sizeof *pool, "a thread pool");
    if (!pool) return ENOMEM;
    pool->allocator = memory;
    pool->room = thread_count;
    pool->workers = (dtrain__worker *)dtrain__alloc(&memory, (size_t)thread_count,
                                                    sizeof *pool->workers, "a thread pool");
    if (!pool->workers) {
        dtrain__free(&memory, pool, 1, sizeof *pool);
        return ENOMEM;
    }
    pool->spins = oversubscribed ? 0 : 1000;
    pool->thread_count = 1;
    int error = pthread_mutex_init(&pool->lock, NULL);
    if (!error) error = pthread_cond_init(&pool->work, NULL);
    if (!error) error = pthread_cond_init(&pool->done, NULL);
    for (int i = 1; i < thread_count && !error; i++) {
        dtrain__worker *worker = &pool->workers[i - 1];
        worker->pool = pool;
        worker->index = i;
        error = dtrain__thread_start(&worker->thread, dtrain__pool_worker, worker);
        if (!error) pool->thread_count = i + 1;
    }
    if (error) {
        dtrain__pool_destroy(pool);
        return error;
    }
    *out = pool;
    return 0;
}
