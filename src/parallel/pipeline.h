/* Pipelines: schedules as data, and their runner
 *
 * A pipeline cuts a model along its depth into stages, which lie on the ranks of a mesh's pipeline
 * axis, and a batch into micro-batches, which go through the stages one after another. A schedule
 * lists the actions of each rank in order; the library makes it and runs it. 1F1B on 2 ranks with 3
 * micro-batches (F forward, B backward of a micro-batch, . idle):
 *
 *     rank 0   F0 F1 .  .  B0 B0 F2 B1 B1 .  B2 B2
 *     rank 1   .  F0 B0 B0 F1 B1 B1 F2 B2 B2 .  .
 *
 * Kinds, with the bubble (idle time over ideal time) of p ranks, m micro-batches, v chunks per
 * rank:
 *
 *     1F1B           (p - 1) / m       a rank holds min(p - rank, m) micro-batches
 *     GPIPE          (p - 1) / m       a rank holds all m
 *     INTERLEAVED    (p - 1) / (v m)   a rank has v stages: v times the messages
 *     ZB_H1          a third of 1F1B's if forward, input and weight gradients take equal time:
 *                    weight gradients are computed where 1F1B would be idle
 *
 * (Huang et al., "GPipe", 2019; Narayanan et al., "Efficient Large-Scale Language Model Training on
 * GPU Clusters", 2021; Qi et al., "Zero Bubble Pipeline Parallelism", 2024.)
 *
 * Every kind adds gradients in ascending order of micro-batches, so that a model has the bits of
 * one rank that accumulates the same micro-batches. No schedule needs buffered messages: it ends
 * even if each send waits for its receive. */

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

/* How a model lies on the pipeline axis, and the order of its passes. A zeroed desc is 1F1B with
 * units divided evenly. For strategies DDP and ZERO1. On an axis of one rank it changes nothing:
 * that rank has the whole model and one micro-batch after another. A message has at most 16
 * tensors. */
typedef struct dtrain_pipeline_desc {
    uint32_t kind;         /* dtrain_pipeline_kind */
    uint32_t chunks;       /* stages per rank; 0 = 1, or 2 with INTERLEAVED */
    const uint32_t *units; /* (ranks * chunks) units of each stage, in the order in which their
                              parameters are registered (see tools/balance.h); NULL = evenly, the
                              first stages with one more */
} dtrain_pipeline_desc;

typedef enum dtrain_pipeline_act {
    DTRAIN_PIPELINE_ACT_FORWARD = 1,
    DTRAIN_PIPELINE_ACT_BACKWARD = 2, /* input gradients only if the kind has WEIGHT, else all */
    DTRAIN_PIPELINE_ACT_WEIGHT = 3,   /* weight gradients */
    DTRAIN_PIPELINE_ACT_SEND = 4,     /* outputs of FORWARD, to the next stage */
    DTRAIN_PIPELINE_ACT_RECEIVE = 5,
    DTRAIN_PIPELINE_ACT_SEND_GRADIENT = 6, /* input gradients, to the stage before */
    DTRAIN_PIPELINE_ACT_RECEIVE_GRADIENT = 7,
    DTRAIN_PIPELINE_ACT_REDUCE = 8, /* the gradients of the chunk are final */
    DTRAIN_PIPELINE_ACT_STEP = 9    /* all gradients are final */
} dtrain_pipeline_act;

typedef struct dtrain_pipeline_action {
    uint32_t act;  /* dtrain_pipeline_act */
    int32_t chunk; /* of rank r: stage chunk * ranks + r of the model */
    int32_t micro_batch;
    int32_t peer;  /* of a message: a rank of the axis; else -1 */
    int32_t slot;  /* memory for what FORWARD keeps for BACKWARD, counted from 0; -1: none */
    int32_t inbox; /* memory for what RECEIVE brings, kept as long; -1: the first stage has none */
} dtrain_pipeline_action;

/* A schedule; free it by dtrain_pipeline_destroy. */
typedef struct dtrain_pipeline_schedule {
    uint32_t kind;
    int32_t ranks, chunks, micro_batches;
    dtrain_pipeline_action *actions; /* of rank 0, then of rank 1, ... */
    size_t *first; /* (ranks + 1) rank r has actions first[r] to first[r + 1] - 1 */
    size_t room;   /* allocated actions */
    struct dtrain__run_memory *memory; /* (ranks) memory of a rank's runs */
} dtrain_pipeline_schedule;

/* Make the schedule of a kind for the ranks of a pipeline axis; one rank has one chunk, the model.
 * desc->units is not read; desc NULL = a zeroed desc. Local. An unsupported number of chunks or
 * micro-batches is an error that names the supported numbers. */
DTRAIN_API dtrain_result dtrain_pipeline_create(const dtrain_pipeline_desc *desc, int ranks,
                                                int micro_batches, dtrain_pipeline_schedule **out);
/* Free a schedule; NULL is allowed. */
DTRAIN_API void dtrain_pipeline_destroy(dtrain_pipeline_schedule *schedule);

/* Time of a micro-batch in one stage, in seconds or any unit. */
typedef struct dtrain_pipeline_costs {
    double forward, backward, weight; /* BACKWARD of kinds without WEIGHT takes both */
    double message; /* to a neighbour stage on another rank, after the computation */
} dtrain_pipeline_costs;

/* A part of a message. */
typedef struct dtrain_pipeline_part {
    void *address; /* memory that collectives can read and write */
    size_t count;
    dtrain_dtype dtype;
} dtrain_pipeline_part;

/* The part of a schedule that a program supplies. An error ends the run on every rank. */
typedef struct dtrain_pipeline_work {
    /* Do the action: FORWARD, BACKWARD, WEIGHT, REDUCE, STEP. */
    dtrain_result (*compute)(void *user, const dtrain_pipeline_action *action);
    /* Give the address of part i of the action's message; a count of 0 ends the list. Called when
     * the message starts. What is received stays until the inbox is used again. What FORWARD made
     * stays until the pass's BACKWARD has begun. A gradient to send stays until the slot's next
     * SEND_GRADIENT, even if the next pass of the slot is done before: keep it in separate memory,
     * one per slot; this function may copy it there. */
    dtrain_result (*part)(void *user, const dtrain_pipeline_action *action, size_t i,
                          dtrain_pipeline_part *part);
    void *user;
} dtrain_pipeline_work;
/* Run this rank's actions of a schedule. Collective over comm, the pipeline axis of a mesh, whose
 * size must be schedule->ranks; an axis of one rank sends nothing. Messages are asynchronous: the
 * action that needs a message waits for its receive, and the action that overwrites sent memory
 * waits for the send. Only the first run of a rank allocates. An error names stage, action and
 * micro-batch, and comm fails on the other ranks. */
DTRAIN_API dtrain_result dtrain_pipeline_run(const dtrain_pipeline_schedule *schedule,
                                             dtrain_comm *comm, const dtrain_pipeline_work *work);
