/* Passes of stages: what a pipeline asks of a tape
 *
 * A stage is a run of units; a rank has one or more stages and runs the model's own function once
 * for each of them and each micro-batch. The tape computes the operations of that stage; those of
 * other stages are remote: they have shapes and no memory. Passes of several micro-batches are
 * under way at once, each in a slot.
 *
 *     stage_reset       in each step
 *     stage_begin       of DTRAIN__SURVEY: all stages are remote, and stage_end notes what crosses
 *     stage_part        of a message: its addresses
 *     stage_begin       select a slot; the caller then runs the model's function
 *     stage_end         after it
 *     stage_backward    from gradients that came, or from the loss
 *     stage_weights     the second half of a backward in halves */

#pragma once

#include "core/platform_internal.h"
#include "core/result.h"
#include "tape/tape_internal.h"

/* A tensor that one stage makes and a later one reads. It goes from stage to stage, through those
 * in between, which add their part to its gradient on the way back: the sum is taken from the last
 * use to the first, as one rank takes it. */
typedef struct dtrain__crossing {
    size_t number; /* which tensor of the pass it is, in the order in which they are made */
    int32_t stage, last_stage; /* that makes it, and the last one that reads it */
    int64_t count;
    uint32_t dtype;
    bool grad; /* it has a gradient, which goes the other way */
} dtrain__crossing;

/* A tensor that crosses, in a pass; NULL: not yet. */
typedef struct dtrain__crossed {
    dtrain__tape_tensor *tensor;
    dtrain__chunk *sent; /* its gradient of an earlier pass, which may be under way */
} dtrain__crossed;

/* What this rank receives for one pass: memory that outlasts the pass, and its addresses. */
typedef struct dtrain__inbox {
    dtrain__bump arena;
    void **received; /* (crossing_count) */
} dtrain__inbox;

typedef struct dtrain__stages {
    const dtrain__stage_map *map;
    int32_t at;             /* the stage whose unit the pass is in */
    dtrain__inbox *inboxes; /* (inbox_count) */
    uint32_t inbox_count;
    dtrain__bump zeros;          /* as many as the longest tensor that crosses has */
    dtrain__bump lists;          /* host memory of the lists that a survey finds */
    dtrain__crossing *crossings; /* (crossing_count) */
    bool *reads;                 /* (input_count) a stage of this rank reads the input */
    size_t crossing_count, input_count;
} dtrain__stages;

/* Let a tape run stages: the map stays the caller's. */
DTRAIN__PRIVATE dtrain_result dtrain__stages_create(dtrain_tape *tape, const dtrain__stage_map *map,
                                                    uint32_t slot_count, uint32_t inbox_count);
/* Forget what an earlier step, or one that failed, has left. */
DTRAIN__PRIVATE void dtrain__stage_reset(dtrain_tape *tape);
/* Describe part i of a message of `stage`; its count stays 0 where there is none. With part 0 what
 * is received gets its memory, and memory of gradients that were sent before is given back.
 * `empty`: the micro-batch has no data, so that zeros are sent and no gradients. */
DTRAIN__PRIVATE dtrain_result dtrain__stage_part(dtrain_tape *tape, int32_t stage,
                                                 const dtrain_pipeline_action *action, bool empty,
                                                 size_t i, dtrain_pipeline_part *part);
/* Begin the pass of a stage; batch is the slot of this rank's first pass of the micro-batch, inbox
 * has what earlier stages made (-1: no stage is before). Stage DTRAIN__SURVEY, in slot 0 of a tape
 * that was reset: all stages are remote, and stage_end notes what crosses. */
#define DTRAIN__SURVEY -1
DTRAIN__PRIVATE dtrain_result dtrain__stage_begin(dtrain_tape *tape, uint32_t slot, uint32_t batch,
                                                  int32_t stage, int32_t inbox, uint32_t flags,
                                                  uint64_t seed);
/* End a survey, or check that the pass of a stage has made what the survey found. */
DTRAIN__PRIVATE dtrain_result dtrain__stage_end(dtrain_tape *tape);
/* Run the backward of a slot: from its loss, or (NULL) from its gradients. more: another
 * micro-batch of the step comes, so that no gradient is ready. halves: gradients of parameters are
 * left to stage_weights. */
DTRAIN__PRIVATE dtrain_result dtrain__stage_backward(dtrain_tape *tape, uint32_t slot,
                                                     dtrain_tensor *loss, float scale, bool more,
                                                     bool halves);
DTRAIN__PRIVATE dtrain_result dtrain__stage_weights(dtrain_tape *tape, uint32_t slot);
