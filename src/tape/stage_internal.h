/* Passes of stages: what a pipeline asks of a tape
 *
 * A stage is a run of units; a rank has one or more stages and runs the model's own function once
 * for each of them and each micro-batch. The tape computes the operations of that stage; those of
 * other stages are remote: they have shapes and no memory. Passes of several micro-batches are
 * under way at once, each in a slot.
 *
 *     stage_reset       in each step
 *     stage_begin       of DTRAIN__SURVEY: all stages are remote, and stage_end notes what crosses
 *     stage_receive     find addresses for what the stage before sends, before the pass begins
 *     stage_begin       select a slot; the caller then runs the model's function
 *     stage_end         behind it
 *     stage_seed        find addresses for the gradients that the stage behind sends
 *     stage_backward    from those, or from the loss
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
    void *received;      /* where it is if it was sent here */
    dtrain__chunk *sent; /* its gradient of an earlier pass, which may be under way */
} dtrain__crossed;

/* What was sent here for one pass: memory that outlasts the pass, and its addresses. */
typedef struct dtrain__inbox {
    dtrain__bump arena;
    void **received; /* (crossing_count) */
} dtrain__inbox;

/* Where a pass finds what earlier stages made: in an inbox, or in the slot of another stage of this
 * rank; both -1: in the first stage. */
typedef struct dtrain__stage_source {
    int32_t inbox, slot;
} dtrain__stage_source;

typedef struct dtrain__stages {
    int32_t count, at;          /* stages; the one whose unit the pass is in */
    const int32_t *stage_units; /* (2 * unit_count) a unit and its stage, for each */
    size_t unit_count;
    const bool *here;       /* (count) this rank has the stage */
    dtrain__inbox *inboxes; /* (inbox_count) */
    uint32_t inbox_count;
    dtrain__bump zeros; /* as many as the longest tensor that crosses has */
    void *lists;        /* (list_bytes) memory of the lists whose length a survey finds */
    size_t list_bytes;
    dtrain__crossing *crossings; /* (crossing_count) */
    bool *reads;                 /* (input_count) a stage here reads the input */
    size_t crossing_count, input_count;
} dtrain__stages;

/* Let a tape run stages: stage_units and here stay the caller's. */
DTRAIN__PRIVATE dtrain_result dtrain__stages_create(dtrain_tape *tape, int32_t stages,
                                                    const bool *here, const int32_t *stage_units,
                                                    size_t unit_count, uint32_t slot_count,
                                                    uint32_t inbox_count);
/* Forget what an earlier step, or one that failed, has left. */
DTRAIN__PRIVATE void dtrain__stage_reset(dtrain_tape *tape);
/* Return item i of a message between `stage` and the next one: the tensor's place among all that
 * cross; false: there is none. `gradient`: of the message that goes back. */
DTRAIN__PRIVATE bool dtrain__stage_item(const dtrain_tape *tape, int32_t stage, bool gradient,
                                        size_t i, size_t *crossing);
/* Find addresses in an inbox for what the stage before `stage` sends. */
DTRAIN__PRIVATE dtrain_result dtrain__stage_receive(dtrain_tape *tape, uint32_t inbox,
                                                    int32_t stage);
/* Begin the pass of a stage; batch is the slot of this rank's first pass of the micro-batch. Stage
 * DTRAIN__SURVEY, in slot 0 of a tape that was reset: all stages are remote, and stage_end notes
 * what crosses. */
#define DTRAIN__SURVEY -1
DTRAIN__PRIVATE dtrain_result dtrain__stage_begin(dtrain_tape *tape, uint32_t slot, uint32_t batch,
                                                  int32_t stage, dtrain__stage_source source,
                                                  uint32_t flags, uint64_t seed);
/* End a survey, or check that the pass of a stage has made what the survey found. */
DTRAIN__PRIVATE dtrain_result dtrain__stage_end(dtrain_tape *tape);
/* Find addresses for the gradients of what the stage behind has read; or take them over from a slot
 * of this rank whose backward is over. */
DTRAIN__PRIVATE dtrain_result dtrain__stage_seed(dtrain_tape *tape, uint32_t slot,
                                                 const uint32_t *from);
/* Run the backward of a slot: from its loss, or (NULL) from its gradients. more: another
 * micro-batch of the step comes, so that no gradient is ready. halves: gradients of parameters are
 * left to stage_weights. */
DTRAIN__PRIVATE dtrain_result dtrain__stage_backward(dtrain_tape *tape, uint32_t slot,
                                                     dtrain_tensor *loss, float scale, bool more,
                                                     bool halves);
DTRAIN__PRIVATE dtrain_result dtrain__stage_weights(dtrain_tape *tape, uint32_t slot);
/* Give back the gradients that an earlier pass of a slot has sent. */
DTRAIN__PRIVATE void dtrain__stage_sent(const dtrain_tape *tape, uint32_t slot);
/* Return memory in the form of a tensor that crosses, of zeros, for a pass that was not made; NULL:
 * there is none, and the error sticks. */
DTRAIN__PRIVATE void *dtrain__crossing_zeros(dtrain_tape *tape, size_t crossing);
/* Return where a tensor that crosses, or its gradient, is in a slot. */
DTRAIN__PRIVATE void *dtrain__stage_data(const dtrain_tape *tape, uint32_t slot, size_t crossing,
                                         bool gradient);
