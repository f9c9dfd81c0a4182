/* The weights of losses, which tape and trainer give to a strategy (strategy/samples.c) */

#pragma once

#include "strategy/view_internal.h"

/* The samples that a loss averages over, as the tape counts them. */
typedef struct dtrain__samples {
    int64_t terms;             /* terms of the mean, ignored ones included; 0: not counted */
    const float *valid;        /* (2) 1 / n and n, the number of valid terms; NULL: all are */
    const float *device_valid; /* `valid` in device memory, for a pass that is replayed; or NULL */
} dtrain__samples;

/* True if the terms of a loss must be weighed, in a pass with or without gradients. */
DTRAIN__PRIVATE bool dtrain__weighs_terms(const dtrain_strategy *strategy, bool forward_only);
/* Compute the factor of the second mean of sum `number` of a loss, so that each mean is averaged
 * over its own samples (samples.c). Collective over the data axis. */
DTRAIN__PRIVATE dtrain_result dtrain__second_mean(dtrain_strategy *strategy, uint32_t number,
                                                  const dtrain__samples *x,
                                                  const dtrain__samples *y, float *factor);
/* End a loss that has had `sums` sums on this rank. While ranks do not know how many sums a loss
 * has, take part in the further sums of other ranks, without samples. A rank that `joins` has no
 * batch and takes part in all sums. Collective over the data axis. */
DTRAIN__PRIVATE dtrain_result dtrain__end_sums(dtrain_strategy *strategy, uint32_t sums,
                                               bool joins);
/* Note that an evaluation begins or ends. Its passes have no gradients, but one mean. */
DTRAIN__PRIVATE void dtrain__expect_evaluation(dtrain_strategy *strategy, bool begins);
/* Note that a tape runs the backwards: ranks that join then agree on a full batch too. */
DTRAIN__PRIVATE void dtrain__expect_tape(dtrain_strategy *strategy);
DTRAIN__PRIVATE dtrain_result dtrain__agree_full_batch(dtrain_strategy *strategy, int64_t terms);
DTRAIN__PRIVATE double dtrain__samples_count(const dtrain__samples *samples);
DTRAIN__PRIVATE float dtrain__weight_of(const dtrain_strategy *strategy,
                                        const dtrain__samples *samples);
DTRAIN__PRIVATE int64_t dtrain__weigh_loss(dtrain_strategy *strategy,
                                           const dtrain__samples *samples);
/* Note that a micro-batch of a pipeline had a gradient of an entry. The gradient counts even if the
 * last micro-batch has none. */
DTRAIN__PRIVATE void dtrain__note_gradient(dtrain_strategy *strategy, size_t i);
/* Weigh a micro-batch of a pipeline (samples NULL: without data). Called in the order of
 * micro-batches, before finish; finish counts the last micro-batch (more false). *weight comes from
 * the loss, and becomes the weight of the samples if they are counted. */
DTRAIN__PRIVATE void dtrain__weigh_micro(dtrain_strategy *strategy, const dtrain__samples *samples,
                                         bool more, float *weight);
