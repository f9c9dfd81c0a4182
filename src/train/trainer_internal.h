/* The trainer's structure
 *
 * Each file calls only files further right:
 *
 *     trainer.c -> create.c -> plan.c -> pipeline_step.c, queued_step.c -> micro_batch.c
 *              \-> record.c */

#pragma once

#include "core/platform_internal.h"
#include "core/log.h"
#include "core/result.h"
#include "world/world_internal.h"
#include "comm/backend.h"
#include "comm/groups_internal.h"
#include "strategy/memory.h"
#include "strategy/samples_internal.h"
#include "strategy/view_internal.h"
#include "tape/view_internal.h"
#include "optim/scaler.h"
#include "train/trainer.h"
#include "train/view_internal.h"
#include "device/backend.h"

/* The words that a rank sends to all others each step. */
enum {
    DTRAIN__WORD_STEP,           /* seconds from the first batch to the end of the update */
    DTRAIN__WORD_DATA,           /* seconds in next_batch */
    DTRAIN__WORD_FORWARD,        /* seconds in loss, without communication, as in all of them */
    DTRAIN__WORD_BACKWARD,       /* seconds in dtrain_tape_backward and dtrain_strategy_finish */
    DTRAIN__WORD_EXPOSED_COMM,   /* seconds in calls of communicators */
    DTRAIN__WORD_HIDDEN_COMM,    /* seconds with an operation in flight outside such calls */
    DTRAIN__WORD_OPTIMIZER,      /* seconds in norm, clipping and update */
    DTRAIN__WORD_CHECKPOINT,     /* seconds in saving since the last step */
    DTRAIN__WORD_COMM,           /* seconds with an operation in flight */
    DTRAIN__WORD_TENSOR_EXPOSED, /* seconds in calls of the tensor axis; NaN without one */
    DTRAIN__WORD_BUBBLE,         /* seconds of waiting for other stages; NaN without a pipeline */
    DTRAIN__WORD_BUS,            /* bytes sent / seconds in flight */
    DTRAIN__WORD_MEMORY,         /* bytes of the device that the library has allocated */
    DTRAIN__WORD_MEMORY_PEAK,    /* largest of them so far */
    DTRAIN__WORD_ACTIVATIONS,    /* bytes of the tape */
    DTRAIN__WORD_FLOPS,          /* as dtrain_tape_info counts them */
    DTRAIN__WORD_COMM_BYTES,     /* bytes sent; at + kind, by a dtrain_collective_kind */
    DTRAIN__WORD_TENSOR_BYTES = DTRAIN__WORD_COMM_BYTES + DTRAIN_COLLECTIVE_KINDS,
    DTRAIN__WORD_PIPELINE_BYTES,
    DTRAIN__FIGURE_WORDS, /* number of words that become figures */
    DTRAIN__WORD_LOSS = DTRAIN__FIGURE_WORDS,
    DTRAIN__WORD_WEIGHT, /* weight of this rank's loss in the mean; 0: it does not count */
    DTRAIN__WORD_STOP,   /* 1: this rank was asked to stop */
    DTRAIN__WORD_ENDED,  /* share of its micro-batches that had no data any more */
    DTRAIN__WORD_SAME,   /* 24 bits of a hash of settings that can change between steps */
    DTRAIN__WORD_INPUTS, /* hash of its inputs, 22 bits in each of three words */
    DTRAIN__WORD_COUNT = DTRAIN__WORD_INPUTS + 3
};

typedef float dtrain__rank_words[DTRAIN__WORD_COUNT];

/* The numbers that a rank sends to all others after each batch of an evaluation. */
enum {
    DTRAIN__ROUND_LOSS,   /* loss times its weight */
    DTRAIN__ROUND_WEIGHT, /* number of samples that the loss is a mean over */
    DTRAIN__ROUND_ENDED,  /* 1: this rank's data had ended */
    DTRAIN__ROUND_STOP,   /* 1: this rank was asked to stop */
    DTRAIN__ROUND_COUNT
};
#define DTRAIN__ROUND_BYTES (DTRAIN__ROUND_COUNT * sizeof(double))

/* The state of a micro-batch in a step. */
typedef struct dtrain__micro {
    float loss;              /* with a pipeline only on the rank of the last stage */
    float weight;            /* weight in the step's mean */
    bool joined;             /* this rank's data had ended */
    dtrain__samples samples; /* samples that the loss is a mean over */
    /* With a pipeline: */
    float valid[2];      /* memory that samples points to */
    bool fetched;        /* next_batch was called for this micro-batch */
    int32_t slot;        /* slot of its first pass on this rank, with its inputs; -1: none */
    dtrain_tensor *made; /* result of its last pass on this rank */
} dtrain__micro;

/* A pass of the model: the loss of a step or an evaluation, or a function of the program. */
typedef struct dtrain__model_pass {
    const char *call; /* name of the public call, for errors */
    bool own;         /* true for dtrain_trainer_forward */
    dtrain_loss_fn function;
    void *user;
    uint32_t flags; /* DTRAIN_TAPE_... */
    float *values;  /* (count) the program's memory for the result; NULL in a step */
    int64_t count;
} dtrain__model_pass;

struct dtrain_trainer {
    dtrain__trainer_view view;
    dtrain_allocator allocator;
    dtrain_world *world;
    dtrain_trainer_desc desc; /* resolved */
    dtrain_tape *tape;
    dtrain_loss_scaler scaler; /* used only if `scaling` */
    bool scaling;
    bool compared;             /* all ranks have the same settings */
    dtrain__groups groups;     /* groups of the strategy */
    int rank, ranks;           /* rank and size in groups.all, which makes the record ... */
    int data_rank, data_ranks; /* ... and in groups.data */
    bool loss_counts;          /* true on one rank of each model */
    int64_t step;              /* steps done */
    uint64_t tokens;           /* tokens of all ranks in these steps */
    uint64_t skipped;          /* steps skipped without loss scaling */
    uint32_t in_a_row;         /* number of last steps that were skipped */
    uint32_t micro;            /* micro-batches done; a repeated step continues there */
    dtrain__micro *micros;     /* (micro_batches) */
    bool ended;                /* this rank's data has ended */
    double saving;             /* seconds in checkpoints until the end of the last step */
    dtrain__rank_words *words; /* (ranks) host memory, gathered in place */
    float *shares;             /* (FIGURE_WORDS, ranks) values of ranks in the last record */
    double *compute; /* (ranks) seconds, for the median; in an evaluation (ranks, ROUND_COUNT) */
    int slow_rank;   /* slowest rank of the last step ... */
    int slow_steps;  /* ... and number of last steps in which it was a straggler */
    bool *named;     /* (ranks) true after the warning about a rank */
    float *results;  /* (micro_batches) page-locked copies of losses; NULL: read at once */
    struct dtrain__pipeline *pipeline; /* NULL: every rank has all stages */
    struct dtrain__queue *queue;       /* NULL: the host waits in the middle of a step */
};

typedef struct dtrain__queue {
    dtrain_step_scalars *scalars; /* device memory: a step's numbers, then the norm (1) */
    dtrain_step_scalars *now;     /* page-locked: numbers of the next step */
    float *norm;                  /* (2) norm and weights, page-locked, after the losses */
    dtrain__feed *feeds;          /* (micro_batches) inputs */
    size_t pinned_bytes;          /* bytes of now, the losses and norm */
    dtrain_graph *graph;          /* NULL: not recorded yet */
    int64_t steps;                /* steps queued or replayed */
    double flops;                 /* floating-point operations of the recorded step */
} dtrain__queue;

/* train/micro_batch.c */
DTRAIN__PRIVATE uint64_t dtrain__step_seed(const dtrain_trainer *trainer);
DTRAIN__PRIVATE uint64_t dtrain__pass_seed(const dtrain_trainer *trainer, uint32_t micro);
DTRAIN__PRIVATE float dtrain__micro_scale(const dtrain_trainer *trainer);
DTRAIN__PRIVATE dtrain_result dtrain__trainer_fetch(dtrain_trainer *trainer);
DTRAIN__PRIVATE dtrain_result dtrain__pass_run(dtrain_trainer *trainer,
                                               const dtrain__model_pass *pass, uint64_t seed,
                                               int64_t number, dtrain_tensor **made);
/* Read the loss of a micro-batch, or queue a copy, for which losses_await waits. */
DTRAIN__PRIVATE dtrain_result dtrain__loss_read(dtrain_trainer *trainer, uint32_t number,
                                                const dtrain_tensor *loss);
DTRAIN__PRIVATE dtrain_result dtrain__losses_await(dtrain_trainer *trainer);
DTRAIN__PRIVATE dtrain_result dtrain__micro_batches(dtrain_trainer *trainer);
DTRAIN__PRIVATE dtrain__model_pass dtrain__step_pass(const dtrain_trainer_desc *desc);
/* Check that a pass has made as many elements as its caller expects. */
DTRAIN__PRIVATE dtrain_result dtrain__check_made(const dtrain__model_pass *pass,
                                                 const dtrain_tensor *made);

/* train/queued_step.c */
DTRAIN__PRIVATE dtrain_result dtrain__queue_create(dtrain_trainer *trainer);
DTRAIN__PRIVATE void dtrain__queue_destroy(dtrain_trainer *trainer);
DTRAIN__PRIVATE dtrain_result dtrain__queue_step(dtrain_trainer *trainer,
                                                 dtrain_step_record *record);

/* train/pipeline_step.c */
/* Make a trainer's schedules, and let its tape run stages. */
DTRAIN__PRIVATE dtrain_result dtrain__pipeline_create(dtrain_trainer *trainer,
                                                      const dtrain__stage_map *map,
                                                      const dtrain_pipeline_desc *desc);
DTRAIN__PRIVATE void dtrain__pipeline_destroy(dtrain_trainer *trainer);
DTRAIN__PRIVATE dtrain_result dtrain__pipeline_step(dtrain_trainer *trainer);
DTRAIN__PRIVATE dtrain_result dtrain__pipeline_failed(const dtrain_trainer *trainer,
                                                      dtrain_result result);
DTRAIN__PRIVATE dtrain_result dtrain__pipeline_forward(dtrain_trainer *trainer,
                                                       const dtrain__model_pass *pass);
DTRAIN__PRIVATE dtrain_result dtrain__pipeline_rehearse(dtrain_trainer *trainer,
                                                        const dtrain__stage_map *map,
                                                        const dtrain_pipeline_desc *desc);

/* train/record.c */
/* Read the counters that a step's words are differences of. */
DTRAIN__PRIVATE void dtrain__record_counters(const dtrain_trainer *trainer, double *words);
/* Make the record of the step that began with the counters `before`. Collective; an error is the
 * same on all ranks. */
DTRAIN__PRIVATE dtrain_result dtrain__record_make(dtrain_trainer *trainer, const double *before,
                                                  dtrain_step_record *record);
/* Gather the words of all ranks in place, with the hash of the inputs since the last gather. */
DTRAIN__PRIVATE dtrain_result dtrain__words_gather(dtrain_trainer *trainer);
/* Compare the data of ranks that have parts of one model: where it ended, and its hash. where: the
 * call, for errors; count: passes of a rank. */
DTRAIN__PRIVATE dtrain_result dtrain__check_data(const dtrain_trainer *trainer, const char *where,
                                                 int64_t count);

/* train/create.c */
/* Refuse a next_batch of NULL with a pipeline, which calls loss several times for a batch. */
DTRAIN__PRIVATE dtrain_result dtrain__check_fetches(const dtrain__groups *groups, const char *call,
                                                    dtrain_batch_fn next_batch);
/* Fail on all ranks, once, if trainers or optimizers differ in what a step's numbers depend on. */
DTRAIN__PRIVATE dtrain_result dtrain__trainer_compare(dtrain_trainer *trainer);

/* train/plan.c */
DTRAIN__PRIVATE dtrain_result dtrain__trainer_memory(const dtrain_trainer *trainer,
                                                     dtrain_memory *held, dtrain_memory *planned);
