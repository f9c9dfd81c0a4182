/* Pipelines: schedules as data, and their runner
 *
 * A pipeline cuts a model along its depth into stages, which lie on the ranks of a mesh's pipeline
 * axis, and a batch into micro-batches, which follow each other through them. A schedule says what
 * each rank does, one action after the other; the library makes and runs it. 1F1B on 2 ranks with 3
 * micro-batches (F forward, B backward of a micro-batch, . idle):
 *
 *     rank 0   F0 F1 .  .  B0 B0 F2 B1 B1 .  B2 B2
 *     rank 1   .  F0 B0 B0 F1 B1 B1 F2 B2 B2 .  .
 *
 * Kinds, with the bubble (idle time over ideal time) of p ranks, m micro-batches, v chunks a rank:
 *
 *     1F1B           (p - 1) / m       a rank holds min(p - rank, m) micro-batches
 *     GPIPE          (p - 1) / m       a rank holds all m
 *     INTERLEAVED    (p - 1) / (v m)   a rank has v stages: v times the messages
 *     ZB_H1          a third of 1F1B's, where forward, input and weight gradients take alike: the
 *                    gradients of weights are made in what would be idle time
 *
 * (Huang et al., "GPipe", 2019; Narayanan et al., "Efficient Large-Scale Language Model Training on
 * GPU Clusters", 2021; Qi et al., "Zero Bubble Pipeline Parallelism", 2024.)
 *
 * Every kind adds gradients up in ascending order of micro-batches, so that a model has the bits of
 * one rank that accumulates the same micro-batches. No schedule counts on a message being buffered:
 * it ends also where each send waits for its receive. */

#pragma once

#include "core/api.h"
#include "core/dtype.h"
#include "core/result.h"
#include "comm/comm.h"

typedef enum dtrain_pipeline_kind {
    DTRAIN_PIPELINE_1F1B = 0,
    DTRAIN_PIPELINE_GPIPE = 1,
    DTRAIN_PIPELINE_INTERLEAVED = 2,
    DTRAIN_PIPELINE_ZB_H1 = 3
} dtrain_pipeline_kind;

/* How a model lies on the pipeline axis, and in which order it runs. A zeroed one is 1F1B with
 * units divided evenly. For strategies DDP and ZERO1; on an axis of one rank, which has the whole
 * model and one micro-batch after the other, it changes nothing. A message between two stages has
 * at most 16 tensors. */
typedef struct dtrain_pipeline_desc {
    uint32_t kind;         /* dtrain_pipeline_kind */
    uint32_t chunks;       /* stages of each rank; 0 = 1, or 2 with INTERLEAVED */
    const uint32_t *units; /* (ranks * chunks) how many units each stage has, in the order in which
                              their parameters are registered (see tools/balance.h); NULL =
                              evenly, the first stages with one more */
} dtrain_pipeline_desc;

typedef enum dtrain_pipeline_act {
    DTRAIN_PIPELINE_ACT_FORWARD = 1,
    DTRAIN_PIPELINE_ACT_BACKWARD = 2, /* of inputs alone where the kind has WEIGHT, else all */
    DTRAIN_PIPELINE_ACT_WEIGHT = 3,   /* the gradients of weights */
    DTRAIN_PIPELINE_ACT_SEND = 4,     /* what FORWARD made to the next stage */
    DTRAIN_PIPELINE_ACT_RECEIVE = 5,
    DTRAIN_PIPELINE_ACT_SEND_GRADIENT = 6, /* what BACKWARD made to the stage before */
    DTRAIN_PIPELINE_ACT_RECEIVE_GRADIENT = 7,
    DTRAIN_PIPELINE_ACT_REDUCE = 8, /* the gradients of the chunk are final */
    DTRAIN_PIPELINE_ACT_STEP = 9    /* all are */
} dtrain_pipeline_act;

typedef struct dtrain_pipeline_action {
    uint32_t act;  /* dtrain_pipeline_act */
    int32_t chunk; /* of rank r: stage chunk * ranks + r of the model */
    int32_t micro_batch;
    int32_t peer;  /* of a message, a rank of the axis; else -1 */
    int32_t slot;  /* of what FORWARD keeps until the last use, counted from 0; -1: none */
    int32_t inbox; /* of what RECEIVE brings, kept as long; -1: no stage is before this one */
} dtrain_pipeline_action;

/* A schedule; free it by dtrain_pipeline_destroy. */
typedef struct dtrain_pipeline_schedule {
    uint32_t kind;
    int32_t ranks, chunks, micro_batches;
    dtrain_pipeline_action *actions; /* of rank 0, then of rank 1, ... */
    size_t *first; /* (ranks + 1) rank r has actions first[r] to first[r + 1] - 1 */
    size_t room;   /* actions that memory was allocated for */
    struct dtrain__run_memory *memory; /* (ranks) of a rank's runs */
} dtrain_pipeline_schedule;

/* Make the schedule of a kind, for ranks of a pipeline axis; one rank has one chunk, the model.
 * desc->units is not read; NULL = a zeroed desc. Local. An unsupported number of chunks or
 * micro-batches is an error that says which work. */
DTRAIN_API dtrain_result dtrain_pipeline_create(const dtrain_pipeline_desc *desc, int ranks,
                                                int micro_batches, dtrain_pipeline_schedule **out);
/* Free a schedule; NULL is allowed. */
DTRAIN_API void dtrain_pipeline_destroy(dtrain_pipeline_schedule *schedule);

/* Seconds, or any unit, that a micro-batch takes in one stage. */
typedef struct dtrain_pipeline_costs {
    double forward, backward, weight; /* a BACKWARD of kinds without WEIGHT takes both */
    double message; /* to a neighbour stage on another rank, from the end of what is sent */
} dtrain_pipeline_costs;

/* A part of a message. */
typedef struct dtrain_pipeline_part {
    void *address; /* of memory that collectives reach */
    size_t count;
    dtrain_dtype dtype;
} dtrain_pipeline_part;

/* What a program does for a schedule. An error ends the run, on every rank of the axis. */
typedef struct dtrain_pipeline_work {
    /* Do what the action says: FORWARD, BACKWARD, WEIGHT, REDUCE, STEP. */
    dtrain_result (*compute)(void *user, const dtrain_pipeline_action *action);
    /* Say where part i of the action's message is to be read or written: *part with a count of 0
     * ends the list. Called when the message starts. What is received stays until the inbox's next
     * use, what FORWARD made until the pass's BACKWARD has begun. A gradient that is sent stays
     * until the slot's next SEND_GRADIENT, which may find the next pass done: it is in memory of
     * its own, for one by slot, and this function may copy it there. */
    dtrain_result (*part)(void *user, const dtrain_pipeline_action *action, size_t i,
                          dtrain_pipeline_part *part);
    void *user;
} dtrain_pipeline_work;
/* Run this rank's actions of a schedule. Collective over comm, the pipeline axis of a mesh, whose
 * size must be schedule->ranks; an axis of one rank sends nothing. Messages are asynchronous: a
 * receive is waited for by the action that needs it, a send before its memory is used again. The
 * first run of a rank allocates, later ones do not. An error says in which stage, action and
 * micro-batch it was, and comm fails on the other ranks. */
DTRAIN_API dtrain_result dtrain_pipeline_run(const dtrain_pipeline_schedule *schedule,
                                             dtrain_comm *comm, const dtrain_pipeline_work *work);
