/* uneven.c: ranks with different numbers of samples. Each step is the mean over all its samples, on whichever rank.
 *
 *   build:   cc -O2 -I. examples/uneven.c -o uneven -lm -lpthread
 *   run:     ./uneven                   three ranks with 40, 70 and 100 samples; ./uneven 5 starts five
 *            ./uneven 3 run.json        also writes a trace, with the span of each batch: run.rank0.json and so on
 *   expect:
 *     rank 0 had 40 samples, rank 2 100: 7 steps an epoch
 *     ranks        w = 3.070, b = 1.033
 *     one process  w = 3.070, b = 1.033
 *
 * A smaller batch counts by its number of samples (dtrain_strategy_weight). A rank that has no samples left takes part
 * in the steps of the others without a batch (dtrain_strategy_join). */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { BATCH = 16, EPOCHS = 10 };

#define CHECK(call)                        \
    do {                                   \
        if ((call) != DTRAIN_OK) return 1; \
    } while (0)

static int samples_of(int rank) { return 40 + 30 * rank; }

/* Add the gradients of a rank's samples [first, end): y = 3 x + 1 + noise. */
static void backward(int rank, int first, int end, float w, float b, float *dw, float *db)
{
    for (int i = first; i < end; i++) {
        const float x = 2 * dtrain_random_uniform(1, (uint64_t)rank, (uint64_t)i) - 1;
        const float noise = 0.3f * dtrain_random_normal(2, (uint64_t)rank, (uint64_t)i);
        const float error = w * x + b - (3 * x + 1 + noise);
        *dw += 2 * error * x, *db += 2 * error;
    }
}

/* Make the same steps in one process: step s of an epoch has batch s of every rank. */
static void train_alone(int ranks, float *w, float *b)
{
    for (int epoch = 0; epoch < EPOCHS; epoch++)
        for (int first = 0; first < samples_of(ranks - 1); first += BATCH) {
            float dw = 0, db = 0;
            int count = 0;
            for (int r = 0; r < ranks; r++) {
                const int end = first + BATCH < samples_of(r) ? first + BATCH : samples_of(r);
                backward(r, first, end, *w, *b, &dw, &db);
                if (end > first) count += end - first;
            }
            *w -= 0.1f * dw / (float)count, *b -= 0.1f * db / (float)count;
        }
}

static int train(dtrain_world *world, void *user)
{
    const int rank = dtrain_world_rank(world), ranks = dtrain_world_size(world),
              samples = samples_of(rank);
    float w = 0, b = 0, dw = 0, db = 0, w_alone = 0, b_alone = 0;
    int steps = 0;
    dtrain_param params[] = {{.name = "w", .value = &w, .grad = &dw, .count = 1},
                             {.name = "b", .value = &b, .grad = &db, .count = 1}};
    dtrain_strategy *ddp;
    (void)user;
    CHECK(dtrain_strategy_create(world, params, 2, NULL, &ddp));
    for (int epoch = 0; epoch < EPOCHS; epoch++) {
        bool over = false;
        for (int first = 0; !over; first += BATCH) {
            const int end = first + BATCH < samples ? first + BATCH : samples;
            dw = db = 0;
            if (first < samples) {
                dtrain_span_begin(world, DTRAIN_SPAN_BACKWARD,
                                  "one batch"); /* its name in a trace */
                backward(rank, first, end, w, b, &dw, &db);
                dtrain_span_end(world);
                dw /= BATCH, db /= BATCH;                        /* the same on all ranks */
                const float full = (float)(end - first) / BATCH; /* 1, or less at the end */
                CHECK(dtrain_strategy_weight(ddp, full));
                CHECK(dtrain_strategy_ready(ddp, 0));
                CHECK(dtrain_strategy_ready(ddp, 1));
                CHECK(dtrain_strategy_finish(ddp)); /* the mean over all samples of all ranks */
            } else {
                CHECK(dtrain_strategy_join(ddp, &over));
            }
            if (over) break; /* no rank had a batch: there was no step */
            w -= 0.1f * dw, b -= 0.1f * db;
            steps++;
        }
    }
    CHECK(dtrain_strategy_verify(ddp, NULL)); /* all ranks have the same bits */
    train_alone(ranks, &w_alone, &b_alone);
    if (fabsf(w - w_alone) > 1e-5f || fabsf(b - b_alone) > 1e-5f)
        CHECK(dtrain_fail(DTRAIN_ERROR_NUMERIC, "w = %g, and %g in one process", (double)w,
                          (double)w_alone));
    if (rank == 0) {
        printf("rank 0 had %d samples, rank %d %d: %d steps an epoch\n", samples, ranks - 1,
               samples_of(ranks - 1), steps / EPOCHS);
        printf("ranks        w = %.3f, b = %.3f\n", (double)w, (double)b);
        printf("one process  w = %.3f, b = %.3f\n", (double)w_alone, (double)b_alone);
    }
    dtrain_strategy_destroy(ddp);
    return 0;
}

int main(int argc, char **argv)
{
    dtrain_launch_desc desc = {.default_rank_count = 3};
    if (argc > 1 && (desc.rank_count = (uint32_t)strtoul(argv[1], NULL, 10)) == 0) {
        fprintf(stderr, "usage: uneven [RANKS [TRACE]], not \"%s\"\n", argv[1]);
        return 2;
    }
    if (argc > 2) desc.options.trace.path = argv[2];
    if (dtrain_launch(&desc, train, NULL, NULL) == DTRAIN_OK) return 0;
    fprintf(stderr, "uneven: %s\n", dtrain_last_error());
    return 1;
}
