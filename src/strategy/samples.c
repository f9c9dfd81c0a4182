/* Samples: the weight of a loss
 *
 * A backward computes the sum over its samples divided by a full batch, a number that is the same
 * on all ranks. Its weight is the number of its samples divided by the full batch:
 *
 *     full batch 4    rank 0: 4 samples       rank 1: 1 sample, 3 targets are ignored
 *     gradient        sum of 4 / 4            sum of 1 / 4
 *     weight          1                       1/4
 *
 * A full batch is the largest number of targets, ignored ones included, that a rank had in its
 * first micro-batch. If all micro-batches have that many and ignore none, every weight is 1 and
 * nothing is corrected (counts.c): the result has the bits of a mean of means. A weight is at most
 * 1, so no sum overflows that would not overflow in a mean of means. */

#include "core/platform_internal.h"
#include "comm/comm_internal.h"
#include "strategy/samples_internal.h"
#include "strategy/strategy_internal.h"

/* ---- Weights ----------------------------------------------------------------------------------*/

/* True if the step has further backwards, on any rank: then weights matter. */
static bool dtrain__weighs(const dtrain_strategy *strategy)
{
    return strategy->layout.all > 1 || strategy->more || strategy->accumulated ||
           strategy->notes.pipelined;
}

/* Agree once on the size of a full batch: the largest `terms` of all ranks. `terms` counts the
 * samples of this rank's first micro-batch, ignored ones included; 0: not counted. Collective. */
DTRAIN__PRIVATE dtrain_result dtrain__agree_full_batch(dtrain_strategy *strategy, int64_t terms)
{
    if (strategy->full_batch) return DTRAIN_OK;
    if (strategy->layout.all > 1) {
        dtrain__call_label(strategy->world, "size of a full batch", 0, "");
        DTRAIN__TRY(dtrain_all_reduce(strategy->groups.all, &terms, &terms, 1, DTRAIN_DTYPE_I64,
                                      DTRAIN_REDUCE_MAX, NULL));
        terms = dtrain__max(terms, 1);
    }
    strategy->full_batch = terms;
    return DTRAIN_OK;
}

/* Count the samples that the mean of a loss covers. */
DTRAIN__PRIVATE double dtrain__samples_count(const dtrain__samples *samples)
{
    return samples->valid ? (double)samples->valid[1] : (double)samples->terms;
}

/* Return the weight of a loss; 1 if nothing is counted. */
DTRAIN__PRIVATE float dtrain__weight_of(const dtrain_strategy *strategy,
                                        const dtrain__samples *samples)
{
    if (!strategy || !strategy->full_batch || !samples->terms) return 1;
    return (float)(dtrain__samples_count(samples) / (double)strategy->full_batch);
}

/* Give the backward under way the weight of its loss, which is a mean over samples. Return the size
 * of a full batch; the number of samples divided by it is the gradient of the loss. 0: that
 * gradient is 1. */
DTRAIN__PRIVATE int64_t dtrain__weigh_loss(dtrain_strategy *strategy,
                                           const dtrain__samples *samples)
{
    if (!samples->terms) return 0;
    const bool weighs = dtrain__weighs(strategy);
    strategy->notes.weight =
        weighs ? dtrain__weight_of(strategy, samples) : dtrain__samples_count(samples) > 0;
    return weighs ? strategy->full_batch : 0;
}

DTRAIN__PRIVATE void dtrain__note_gradient(dtrain_strategy *strategy, size_t i)
{
    strategy->layout.entries[i].seen = true;
}

DTRAIN__PRIVATE void dtrain__weigh_micro(dtrain_strategy *strategy, const dtrain__samples *samples,
                                         bool more, float *weight)
{
    strategy->notes.weight = *weight;
    if (samples) (void)dtrain__weigh_loss(strategy, samples);
    *weight = strategy->notes.weight;
    if (!more) return; /* finish counts the last micro-batch */
    strategy->weights += strategy->notes.weight;
    strategy->passes++;
}

/* ---- Losses of several terms
 *
 * A loss that adds two means over different samples has one weight, that of the first mean x. The
 * second mean y is multiplied by a factor f, so that it is averaged over all its own samples too:
 *
 *     loss = x + f y      f = (y's share of samples on this rank) / (x's share on this rank)
 *
 * f is 1 if the numbers of samples are proportional. f is needed before the backward, when the
 * numbers of later micro-batches are unknown: they must be proportional to the first's numbers.
 *
 * A rank without a batch takes part in as many sums as the last loss had. In the first pass of a
 * training or an evaluation it does not know that number, and takes part until all ranks have ended
 * their loss: all[3] counts the ranks that have ended, plus SUM_COMES per rank with a sum. */

#define DTRAIN__SUM_COMES ((int64_t)1 << 32)

/* Add up the counts of a sum over all ranks, and check that one weight of the pass can be right. */
static dtrain_result dtrain__sum_samples(dtrain_strategy *strategy, uint32_t number, int64_t all[4])
{
    int64_t *first = strategy->sums_first[dtrain__min(number, DTRAIN__LOSS_SUMS - 1)];
    dtrain_comm *data = strategy->groups.data;
    dtrain__call_label(strategy->world, "samples of losses", (int64_t)number, "");
    if (dtrain_comm_size(data) > 1)
        DTRAIN__TRY(
            dtrain_all_reduce(data, all, all, 4, DTRAIN_DTYPE_I64, DTRAIN_REDUCE_SUM, NULL));
    if (all[3] < DTRAIN__SUM_COMES) {
        if (all[3]) strategy->sums_agreed[strategy->evaluates] = true;
        return DTRAIN_OK;
    }
    strategy->sums_made[strategy->evaluates] = number + 1;
    if (number >= strategy->sums_known || (!first[0] && !first[1]))
        memcpy(first, all, sizeof strategy->sums_first[0]);
    if (number >= strategy->sums_known) strategy->sums_known = number + 1;
    if (!all[2] && (double)all[0] * (double)first[1] == (double)all[1] * (double)first[0])
        return DTRAIN_OK;
    return dtrain_fail(
        DTRAIN_ERROR_UNSUPPORTED,
        "dtrain_add: the loss adds two means, over %lld and %lld samples of all ranks, over %lld "
        "and %lld in an earlier pass of this step or evaluation, and %lld ranks have samples "
        "of the second alone; no weight of a pass makes both the mean over all their samples. "
        "Write an auxiliary loss as dtrain_scale(dtrain_sum(x), 1 / count), which takes the weight "
        "of the other",
        (long long)all[0], (long long)all[1], (long long)first[0], (long long)first[1],
        (long long)all[2]);
}

DTRAIN__PRIVATE dtrain_result dtrain__second_mean(dtrain_strategy *strategy, uint32_t number,
                                                  const dtrain__samples *x,
                                                  const dtrain__samples *y, float *factor)
{
    const int64_t mine[2] = {(int64_t)dtrain__samples_count(x), (int64_t)dtrain__samples_count(y)};
    int64_t all[4] = {mine[0], mine[1], mine[0] == 0 && mine[1] > 0, DTRAIN__SUM_COMES};
    *factor = 1;
    if (strategy->notes.device_weight) return DTRAIN_OK; /* a recorded step: as before */
    DTRAIN__TRY(dtrain__sum_samples(strategy, number, all));
    *factor = 0;
    if (mine[1])
        *factor = (float)((double)mine[1] * (double)all[0] / ((double)all[1] * (double)mine[0]));
    return DTRAIN_OK;
}

DTRAIN__PRIVATE dtrain_result dtrain__end_sums(dtrain_strategy *strategy, uint32_t sums, bool joins)
{
    const bool *agreed = &strategy->sums_agreed[strategy->evaluates];
    const uint32_t made = strategy->sums_made[strategy->evaluates];
    bool more = strategy->join_loss != NULL;
    while (more && (!*agreed || (joins && sums < made))) {
        int64_t all[4] = {0, 0, 0, !joins};
        DTRAIN__TRY(dtrain__sum_samples(strategy, sums++, all));
        more = all[3] >= DTRAIN__SUM_COMES;
    }
    return DTRAIN_OK;
}

DTRAIN__PRIVATE void dtrain__expect_evaluation(dtrain_strategy *strategy, bool begins)
{
    strategy->evaluates = begins;
    strategy->sums_known = strategy->sums_made[true] = 0;
    strategy->sums_agreed[true] = false;
}

DTRAIN__PRIVATE bool dtrain__weighs_terms(const dtrain_strategy *strategy, bool forward_only)
{
    return strategy->evaluates || (!forward_only && dtrain__weighs(strategy));
}

/* ---- A rank without a batch -------------------------------------------------------------------*/

/* Agree with the losses of other ranks in this pass. */
static dtrain_result dtrain__join_loss(dtrain_strategy *strategy, dtrain_pass pass)
{
    if (pass == DTRAIN_PASS_FORWARD) return dtrain__end_sums(strategy, 0, true);
    return dtrain__agree_full_batch(strategy, 0);
}

DTRAIN__PRIVATE void dtrain__expect_tape(dtrain_strategy *strategy)
{
    strategy->join_loss = dtrain__join_loss;
}
