/* The trainer's structure, shared by its micro-batches (micro_batch.c), the step with the host in
 * the middle (trainer.c) and the queued step (queued_step.c). */

#pragma once

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/log.h"
#include "core/result.h"
#include "world/world_internal.h"
#include "comm/backend.h"
#include "comm/groups_internal.h"
#include "strategy/memory.h"
#include "strategy/view_internal.h"
#include "tape/tape_internal.h"
#include "optim/scaler.h"
#include "train/trainer.h"
#include "train/view_internal.h"
#include "device/backend.h"
#include "device/device.h"

/* The words that a rank sends the others each step: its figures, and behind them */
enum {
    DTRAIN__WORD_LOSS = DTRAIN_FIGURE_COUNT,
    DTRAIN__WORD_WEIGHT, /* of this rank's loss in the mean; 0: it does not count */
    DTRAIN__WORD_COMM,   /* seconds with a collective in flight */
    DTRAIN__WORD_STOP,   /* 1: this rank was asked to stop */
    DTRAIN__WORD_ENDED,  /* share of its micro-batches that had no data any more */
    DTRAIN__WORD_SAME, /* 24 bits of a hash of what may change between steps, on all ranks alike */
    DTRAIN__WORD_INPUTS, /* with the next two: the hash of its inputs, 22 bits each */
    DTRAIN__WORD_INPUTS_END = DTRAIN__WORD_INPUTS + 2,
    DTRAIN__WORD_COUNT
};

/* The numbers that a rank sends the others after each batch of an evaluation. */
enum {
    DTRAIN__ROUND_LOSS,   /* times its weight */
    DTRAIN__ROUND_WEIGHT, /* samples that the loss is a mean over */
    DTRAIN__ROUND_ENDED,  /* 1: this rank's data had ended */
    DTRAIN__ROUND_STOP,   /* 1: it was asked to stop */
    DTRAIN__ROUND_COUNT
};

#define DTRAIN__SLOW_SCORE 2.0 /* a straggler's compute time over the median rank's ... */
#define DTRAIN__SLOW_STEPS 10  /* ... in this many steps in a row */

struct dtrain_trainer {
    dtrain__trainer_view view;
    dtrain_allocator allocator;
    dtrain_world *world;
    dtrain_trainer_desc desc; /* resolved */
    dtrain_tape *tape;
    dtrain_loss_scaler scaler; /* used when `scaling` */
    bool scaling;
    bool compared;             /* all ranks have the same settings */
    dtrain__groups groups;     /* the strategy's */
    int rank, ranks;           /* in groups.all, which makes the record ... */
    int data_rank, data_ranks; /* ... and in groups.data */
    bool loss_counts;          /* in the record, once for each model */
    int64_t step;
    uint64_t tokens;   /* of all ranks, in the steps before */
    uint64_t skipped;  /* steps whose gradients were not finite, without loss scaling */
    uint32_t in_a_row; /* how many of the last steps were */
    uint32_t micro;    /* micro-batches of this step that are done: where it goes on if repeated */
    double loss;       /* their sum, each times its weight ... */
    double weight;     /* ... and the sum of their weights */
    bool ended;        /* this rank's data has ended */
    uint32_t joined;   /* micro-batches of this step that had no data */
    double saving;     /* seconds in checkpoints until the end of the last step */
    float gpu[DTRAIN_FIGURE_COUNT - DTRAIN_FIGURE_GPU_UTILIZATION]; /* NaN: no monitor has set it */
    float *words;    /* (ranks, WORD_COUNT), host memory: gathered in place */
    double *compute; /* (ranks) seconds, for the median; in an evaluation (ranks, ROUND_COUNT) */
    int slow_rank;   /* the slowest of the last step ... */
    int slow_steps;  /* ... and for how many steps it has been a straggler */
    bool *named;     /* (ranks) a warning has named it */
    struct dtrain__pipeline *pipeline; /* NULL: every rank has all stages */
    struct dtrain__queue *queue;       /* NULL: the host waits in the middle of a step */
};

/* A micro-batch of a queued step: its inputs, and the samples that its loss is a mean
 * over, or its weight where samples are not counted. */
typedef struct dtrain__queued {
    dtrain__feed feed;
    dtrain__samples samples;
    float weight;
} dtrain__queued;

typedef struct dtrain__queue {
    dtrain_device *device;
    dtrain_step_scalars *scalars; /* device memory: a step's numbers, then the norm (1) */
    dtrain_step_scalars *now;     /* page-locked: the next step's numbers */
    float *results;               /* behind `now` (micro_batches + 2): losses, norm, weights */
    dtrain__queued *micros;       /* (micro_batches) */
    size_t pinned_bytes;          /* of now and results */
    dtrain_graph *graph;          /* NULL: not recorded yet */
    int64_t steps;                /* that were queued or replayed */
    double flops;                 /* of the recorded step */
} dtrain__queue;

/* train/micro_batch.c */
DTRAIN__PRIVATE uint64_t dtrain__step_seed(const dtrain_trainer *trainer);
DTRAIN__PRIVATE uint64_t dtrain__micro_seed(uint32_t micro);
DTRAIN__PRIVATE float dtrain__micro_scale(const dtrain_trainer *trainer);
DTRAIN__PRIVATE dtrain_result dtrain__trainer_fetch(dtrain_trainer *trainer);
DTRAIN__PRIVATE dtrain_result dtrain__micro_batch(dtrain_trainer *trainer, uint64_t seed,
                                                  dtrain_tensor **loss, float *weight);
DTRAIN__PRIVATE void dtrain__trainer_add(dtrain_trainer *trainer, uint32_t micro, float loss,
                                         float weight);

/* train/pipeline_step.c */
typedef struct dtrain__pipeline dtrain__pipeline;
DTRAIN__PRIVATE dtrain_result dtrain__pipeline_create(dtrain_trainer *trainer);
DTRAIN__PRIVATE void dtrain__pipeline_destroy(dtrain_trainer *trainer);
/* Refuse a next_batch of NULL with a pipeline: the loss is called several times for a batch. */
DTRAIN__PRIVATE dtrain_result dtrain__pipeline_fetches(const dtrain_trainer *trainer,
                                                       const char *call,
                                                       dtrain_batch_fn next_batch);
DTRAIN__PRIVATE dtrain_result dtrain__pipeline_step(dtrain_trainer *trainer);
/* Return the result of a step, and add to an error of a wait that this rank's data had ended in it:
 * where the others of its pipeline have more, they wait for messages that do not come, until the
 * deadline. */
DTRAIN__PRIVATE dtrain_result dtrain__pipeline_failed(const dtrain_trainer *trainer,
                                                      dtrain_result result);
DTRAIN__PRIVATE dtrain_result dtrain__pipeline_plan(const dtrain_trainer_desc *desc,
                                                    const dtrain__strategy_plan *plan,
                                                    dtrain_tape *tape);
DTRAIN__PRIVATE dtrain_result dtrain__pipeline_evaluate(dtrain_trainer *trainer, void *user,
                                                        float *loss, dtrain__samples *samples);
DTRAIN__PRIVATE dtrain_result dtrain__pipeline_forward(dtrain_trainer *trainer,
                                                       dtrain_loss_fn function, void *user,
                                                       float *values, int64_t count);

/* train/trainer.c */
/* Check that what the host's forward has made has so many elements. */
DTRAIN__PRIVATE dtrain_result dtrain__forward_made(const dtrain_tensor *made, int64_t count);

/* train/plan.c */
DTRAIN__PRIVATE dtrain_result dtrain__trainer_memory(const dtrain_trainer *trainer,
                                                     dtrain_memory *held, dtrain_memory *planned);

/* train/queued_step.c */
DTRAIN__PRIVATE dtrain_result dtrain__queue_create(dtrain_trainer *trainer);
DTRAIN__PRIVATE void dtrain__queue_destroy(dtrain_trainer *trainer);
DTRAIN__PRIVATE dtrain_result dtrain__queue_step(dtrain_trainer *trainer,
                                                 dtrain_step_record *record);
