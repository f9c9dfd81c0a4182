/* Passes of stages: functions for a pipeline
 *
 * A stage is a run of units; a rank has one or more stages and runs the model's function once for
 * each of its stages and each micro-batch. The tape computes the operations of that stage; the
 * operations of other stages are remote: they have shapes and no memory. Passes of several
 * micro-batches are under way at once, each in a slot.
 *
 *     stage_reset       in each step
 *     stage_begin       DTRAIN__SURVEY: all stages are remote; stage_end lists crossing tensors
 *     stage_part        addresses of a message
 *     stage_begin       select a slot; the caller then runs the model's function
 *     stage_end         after the model's function
 *     stage_backward    from received gradients, or from the loss
 *     stage_weights     the second half of a backward in halves */

#pragma once

#include "core/platform_internal.h"
#include "core/result.h"
#include "tape/tape_internal.h"

/* A tensor that one stage makes and a later stage reads. It travels from stage to stage, and each
 * stage adds to its gradient on the way back: the sum runs from the last use to the first, as on
 * one rank. */
typedef struct dtrain__crossing {
    size_t number;             /* of the tensor, in the order in which the pass makes tensors */
    int32_t stage, last_stage; /* maker and last reader */
    int64_t count;
    uint32_t dtype;
    bool grad; /* it has a gradient, which travels back */
} dtrain__crossing;

/* A crossing tensor in one pass. */
typedef struct dtrain__crossed {
    dtrain__tape_tensor *tensor; /* NULL: not made yet */
    dtrain__chunk *sent;         /* its gradient in an earlier pass, perhaps still being sent */
} dtrain__crossed;

/* Memory for the tensors that this rank receives for one pass; it outlasts the pass. */
typedef struct dtrain__inbox {
    dtrain__bump arena;
    void **received; /* (crossing_count) */
} dtrain__inbox;

typedef struct dtrain__stages {
    const dtrain__stage_map *map;
    int32_t at;             /* stage of the current unit */
    dtrain__inbox *inboxes; /* (inbox_count) */
    uint32_t inbox_count;
    dtrain__bump zeros;          /* as long as the longest crossing tensor */
    dtrain__bump lists;          /* host memory of the lists that a survey makes */
    dtrain__crossing *crossings; /* (crossing_count) */
    bool *reads;                 /* (input_count) true if a stage of this rank reads the input */
    size_t crossing_count, input_count;
} dtrain__stages;

/* Let a tape run stages; the caller owns the map. */
DTRAIN__PRIVATE dtrain_result dtrain__stages_create(dtrain_tape *tape, const dtrain__stage_map *map,
                                                    uint32_t slot_count, uint32_t inbox_count);
/* Discard the state of an earlier or failed step. */
DTRAIN__PRIVATE void dtrain__stage_reset(dtrain_tape *tape);
/* Describe part i of a message of `stage`; count stays 0 if there is no part i. Part 0 takes memory
 * for received tensors and gives back the memory of gradients sent earlier. `empty`: the
 * micro-batch has no data: zeros are sent, and no gradients. */
DTRAIN__PRIVATE dtrain_result dtrain__stage_part(dtrain_tape *tape, int32_t stage,
                                                 const dtrain_pipeline_action *action, bool empty,
                                                 size_t i, dtrain_pipeline_part *part);
/* Begin the pass of a stage. batch: slot of this rank's first pass of the micro-batch; inbox: with
 * tensors of earlier stages (-1: first stage). Stage DTRAIN__SURVEY runs in slot 0 after a reset:
 * all stages are remote, and stage_end lists crossing tensors. */
#define DTRAIN__SURVEY -1
DTRAIN__PRIVATE dtrain_result dtrain__stage_begin(dtrain_tape *tape, uint32_t slot, uint32_t batch,
                                                  int32_t stage, int32_t inbox, uint32_t flags,
                                                  uint64_t seed);
/* End a survey, or check that the pass of a stage has made the tensors of the survey. */
DTRAIN__PRIVATE dtrain_result dtrain__stage_end(dtrain_tape *tape);
/* Run the backward of a slot: from its loss, or (NULL) from its gradients. more: another
 * micro-batch of the step follows, so no gradient is ready. halves: stage_weights makes gradients
 * of parameters. */
DTRAIN__PRIVATE dtrain_result dtrain__stage_backward(dtrain_tape *tape, uint32_t slot,
                                                     dtrain_tensor *loss, float scale, bool more,
                                                     bool halves);
DTRAIN__PRIVATE dtrain_result dtrain__stage_weights(dtrain_tape *tape, uint32_t slot);
