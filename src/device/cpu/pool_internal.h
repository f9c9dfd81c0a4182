/* A pool of threads. */

#pragma once

#include "core/platform_internal.h"
#include "core/log.h"

typedef void (*dtrain__task_fn)(void *ctx, int index, int count);

typedef struct dtrain__worker {
    struct dtrain__pool *pool;
    pthread_t thread;
    int index;
} dtrain__worker;

typedef struct dtrain__pool {
    dtrain_allocator allocator;
    int room;                  /* of workers */
    int thread_count;          /* workers and caller */
    int spins;                 /* pauses before sleeping; 0 when cores are oversubscribed */
    uint32_t generation;       /* atomic */
    int pending;               /* atomic: number of workers in the current job */
    int asleep, caller_asleep; /* atomic, written under lock */
    int busy;                  /* atomic: a job runs, nested calls run inline */
    int stop;                  /* published by generation, like task and ctx */
    dtrain__task_fn task;
    void *ctx;
    pthread_mutex_t lock;
    pthread_cond_t work, done;
    dtrain__worker *workers;
} dtrain__pool;

/* device/cpu/pool.c */
DTRAIN__PRIVATE void dtrain__parallel(dtrain__pool *pool, dtrain__task_fn task, void *ctx);
DTRAIN__PRIVATE void dtrain__pool_destroy(dtrain__pool *pool);
DTRAIN__PRIVATE int dtrain__pool_create(dtrain__pool **out, const dtrain_allocator *allocator,
                                        int thread_count, int oversubscribed);
