/* Vocabulary-parallel cross-entropy on arrays
 *
 * With m the largest logit of a row and s = smoothing:
 *
 *     1. m of the columns here                          all-reduce, largest      rows floats
 *     2. sum of e^(x - m), x[target], sum of (x - m)    all-reduce, sum          2 or 3 rows floats
 *     3. lse = m + log(sum)    loss = lse - (1 - s) x[target] - s (m + sum of (x - m) / classes)
 *     4. d_x = (e^(x - lse) - (1 - s) onehot(target) - s / classes) scale / valid targets
 *
 * A target is on one rank and the others add 0 to its logit, so that sum is exact; so is m. The sum
 * of exponentials is taken in double here and rounded once before it travels.
 *
 * The tape's operation takes the same steps by kernels of a device (tape/cross_entropy.c). A
 * program with arrays of its own may have left those out (DTRAIN_PARTS): this file needs none. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "world/world_internal.h"
#include "comm/backend.h"
#include "parallel/loss.h"

static dtrain_result dtrain__vocab_check(const dtrain_vocab_loss *loss)
{
    const char *const call = "dtrain_vocab_cross_entropy";
    size_t count;
    if (!loss || !loss->loss || (loss->rows && (!loss->targets || !loss->logits)))
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: %s is NULL", call,
                           !loss                          ? "its argument"
                           : !loss->loss                  ? "loss"
                           : loss->rows && !loss->targets ? "targets"
                                                          : "logits");
    if (loss->rows < 0 || loss->columns < 1 || loss->first_class < 0 || loss->classes < 1 ||
        loss->first_class > INT32_MAX || loss->classes > INT32_MAX ||
        !dtrain__size_mul((size_t)loss->rows, (size_t)loss->columns, &count))
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "%s: %lld rows, %lld columns from class %lld on, of %lld classes; "
                           "expected 0 rows or more, and at least one column and class",
                           call, (long long)loss->rows, (long long)loss->columns,
                           (long long)loss->first_class, (long long)loss->classes);
    if (!(loss->smoothing >= 0 && loss->smoothing <= 1)) /* so written that NaN is refused */
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: smoothing is %g, not in [0, 1]", call,
                           (double)loss->smoothing);
    for (int64_t i = 0; i < loss->rows; i++)
        if (loss->targets[i] < -1 || loss->targets[i] >= loss->classes)
            return dtrain_fail(DTRAIN_ERROR_DATA,
                               "%s: the target of row %lld is %d, expected 0 to %lld, or -1 for "
                               "none",
                               call, (long long)i, loss->targets[i], (long long)loss->classes - 1);
    return DTRAIN_OK;
}

/* Step 1, for the columns that are here: of none the largest is -infinity. NaN is larger than
 * everything, so that it reaches all ranks. */
static void dtrain__vocab_most(const dtrain_vocab_loss *loss, int64_t count, float *most)
{
    for (int64_t i = 0; i < loss->rows; i++) {
        const float *x = loss->logits + i * loss->columns;
        most[i] = -INFINITY;
        for (int64_t j = 0; j < count; j++)
            if (!(x[j] <= most[i])) most[i] = x[j];
    }
}

/* Step 2, for the columns that are here; sums (2 or 3, rows). */
static void dtrain__vocab_sums(const dtrain_vocab_loss *loss, int64_t count, const float *most,
                               float *sums)
{
    for (int64_t i = 0; i < loss->rows; i++) {
        const float *x = loss->logits + i * loss->columns;
        const int64_t target = (int64_t)loss->targets[i] - loss->first_class;
        double exponentials = 0, below = 0;
        for (int64_t j = 0; j < count; j++) {
            exponentials += exp((double)x[j] - (double)most[i]);
            below += (double)x[j] - (double)most[i];
        }
        sums[i] = (float)exponentials;
        sums[loss->rows + i] = target >= 0 && target < count ? x[target] : 0.0f;
        if (loss->smoothing > 0) sums[2 * loss->rows + i] = (float)below;
    }
}

/* Count the classes and the targets that are here: two floats more in all find classes that two
 * ranks have, or none. */
static void dtrain__vocab_count(const dtrain_vocab_loss *loss, int64_t count, float *found)
{
    const int64_t past = loss->first_class + count;
    int64_t targets = 0;
    for (int64_t i = 0; i < loss->rows; i++)
        targets += loss->targets[i] >= loss->first_class && loss->targets[i] < past;
    found[0] = (float)count;
    found[1] = (float)targets;
}

/* Compare the counts of all ranks with what they should be, as far as a float holds them. */
static dtrain_result dtrain__vocab_found(const dtrain_vocab_loss *loss, const float *found)
{
    const int64_t most = 1 << 24;
    int64_t valid = 0;
    for (int64_t i = 0; i < loss->rows; i++) valid += loss->targets[i] != -1;
    if (loss->classes > most || valid > most ||
        (found[0] == (float)loss->classes && found[1] == (float)valid))
        return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_MISMATCH,
                       "dtrain_vocab_cross_entropy: all ranks together have %.0f of %lld classes "
                       "and the classes of %.0f of %lld targets; each class is on one rank, from "
                       "its first_class on, and classes and targets are the same on all of them",
                       (double)found[0], (long long)loss->classes, (double)found[1],
                       (long long)valid);
}

/* Steps 3 and 4. */
static void dtrain__vocab_finish(const dtrain_vocab_loss *loss, int64_t count, const float *most,
                                 const float *sums)
{
    const double smoothing = (double)loss->smoothing, classes = (double)loss->classes;
    double total = 0;
    int64_t valid = 0;
    for (int64_t i = 0; i < loss->rows; i++) valid += loss->targets[i] != -1;
    const double each = (loss->scale != 0 ? (double)loss->scale : 1) / (double)(valid ? valid : 1);
    for (int64_t i = 0; i < loss->rows; i++) {
        const float *x = loss->logits + i * loss->columns;
        float *d_x = loss->d_logits ? loss->d_logits + i * loss->columns : NULL;
        const int64_t target = (int64_t)loss->targets[i] - loss->first_class;
        const bool ignored = loss->targets[i] == -1;
        const double lse = (double)most[i] + log((double)sums[i]);
        if (!ignored) total += lse - (1 - smoothing) * (double)sums[loss->rows + i];
        if (!ignored && smoothing > 0)
            total -= smoothing * ((double)most[i] + (double)sums[2 * loss->rows + i] / classes);
        for (int64_t j = 0; j < loss->columns && d_x; j++) {
            double d = 0;
            if (j < count && !ignored)
                d = exp((double)x[j] - lse) - (j == target ? 1 - smoothing : 0) -
                    smoothing / classes;
            d_x[j] = (float)(d * each);
        }
    }
    *loss->loss = valid ? total / (double)valid : 0;
}

DTRAIN_API dtrain_result dtrain_vocab_cross_entropy(dtrain_comm *tensor,
                                                    const dtrain_vocab_loss *loss)
{
    const char *const call = "dtrain_vocab_cross_entropy";
    if (!tensor) return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: tensor is NULL", call);
    DTRAIN__TRY(dtrain__world_check(tensor->world, call));
    const dtrain_allocator *allocator = &tensor->world->allocator;
    dtrain_result result = dtrain__vocab_check(loss);
    float *most = NULL;
    size_t count = 0;
    if (result == DTRAIN_OK) { /* rows fit four times: there are as many targets */
        count = 4 * (size_t)loss->rows + 2;
        most = (float *)dtrain__alloc(allocator, count, sizeof *most, "three floats a row");
        if (!most) result = DTRAIN_ERROR_MEMORY;
    }
    /* the others count on this rank: a mistake here is theirs to hear of, as in any collective */
    if (result != DTRAIN_OK) return tensor->ops->fail(tensor, result, dtrain_last_error());

    const size_t rows = (size_t)loss->rows;
    const int64_t left = loss->classes - loss->first_class;
    const int64_t here = left < 0 ? 0 : left < loss->columns ? left : loss->columns;
    const size_t each = loss->smoothing > 0 ? 3 : 2;
    float *sums = most + rows, *found = sums + each * rows;
    dtrain__vocab_most(loss, here, most);
    result = dtrain_all_reduce(tensor, most, most, rows, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_MAX, NULL);
    if (result == DTRAIN_OK) {
        dtrain__vocab_sums(loss, here, most, sums);
        dtrain__vocab_count(loss, here, found);
        result = dtrain_all_reduce(tensor, sums, sums, each * rows + 2, DTRAIN_DTYPE_F32,
                                   DTRAIN_REDUCE_SUM, NULL);
    }
    if (result == DTRAIN_OK) result = dtrain__vocab_found(loss, found);
    if (result == DTRAIN_ERROR_MISMATCH)
        result = tensor->ops->fail(tensor, result, dtrain_last_error());
    if (result == DTRAIN_OK) dtrain__vocab_finish(loss, here, most, sums);
    dtrain__free(allocator, most, count, sizeof *most);
    return result;
}
