/* timeline.c: writes a trace of a run: in which collective, wait and span of the program each rank is, and when.
 *
 *   build:   cc -O2 -I. examples/timeline.c -o timeline -lm -lpthread
 *   run:     ./timeline                 writes run.rank0.json and run.rank1.json
 *   expect:
 *     run.rank0.json  draw samples 20  my backward 20  my update 20  all-reduce of bucket 0 20
 *     run.rank1.json  draw samples 20  my backward 20  my update 20  all-reduce of bucket 0 20
 *
 * dtrain_world_options.trace turns it on. The library traces its own calls; dtrain_span_begin and dtrain_span_end add
 * what the program does. Open a file in ui.perfetto.dev or chrome://tracing; build/trace merges the files of all ranks,
 * and draws a step. An event is a line, which this program counts by its name. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

#include <stdio.h>
#include <string.h>

enum { RANKS = 2, COUNT = 20000, SAMPLES = 4, STEPS = 20 };

#define CHECK(call)                        \
    do {                                   \
        if ((call) != DTRAIN_OK) return 1; \
    } while (0)

/* Learn the mean of vectors, of which every rank draws its own. */
static int train(dtrain_world *world, void *user)
{
    static float mean[COUNT], grad[COUNT], sample[SAMPLES][COUNT]; /* ranks are processes */
    dtrain_param param = {.name = "mean", .value = mean, .grad = grad, .count = COUNT};
    const uint64_t rank = (uint64_t)dtrain_world_rank(world);
    dtrain_strategy *ddp;
    (void)user;
    CHECK(dtrain_strategy_create(world, &param, 1, NULL, &ddp));
    for (uint64_t step = 0; step < STEPS; step++) {
        dtrain_span_begin(world, DTRAIN_SPAN_DATA, "draw samples");
        for (uint64_t s = 0; s < SAMPLES; s++)
            for (uint64_t i = 0; i < COUNT; i++)
                sample[s][i] = dtrain_random_uniform(rank, step * SAMPLES + s, i);
        dtrain_span_end(world);
        dtrain_span_begin(world, DTRAIN_SPAN_BACKWARD, "my backward");
        memset(grad, 0, sizeof grad);
        for (int s = 0; s < SAMPLES; s++)
            for (int i = 0; i < COUNT; i++) grad[i] += (mean[i] - sample[s][i]) / SAMPLES;
        dtrain_span_end(world);
        CHECK(dtrain_strategy_ready(ddp, 0));
        CHECK(dtrain_strategy_finish(ddp));
        dtrain_span_begin(world, DTRAIN_SPAN_OPTIMIZER, "my update");
        for (int i = 0; i < COUNT; i++) mean[i] -= 0.3f * grad[i];
        dtrain_span_end(world);
    }
    dtrain_strategy_destroy(ddp);
    return 0;
}

/* Print how often each span is in a rank's file, and return 0 if it is there once a step. */
static int count(int rank)
{
    static const char *const spans[] = {"draw samples", "my backward", "my update",
                                        "all-reduce of bucket 0"};
    static const char *const events[] = {"\"name\":\"draw samples\"", "\"name\":\"my backward\"",
                                         "\"name\":\"my update\"", "\"of\":\"bucket 0, mean\""};
    char path[32], line[1024];
    int found[4] = {0}, wrong = 0;
    snprintf(path, sizeof path, "run.rank%d.json", rank);
    FILE *file = fopen(path, "r");
    while (file && fgets(line, sizeof line, file))
        for (int e = 0; e < 4; e++) found[e] += strstr(line, events[e]) != NULL;
    if (file) fclose(file);
    printf("%s", path);
    for (int e = 0; e < 4; e++) printf("  %s %d", spans[e], found[e]), wrong += found[e] != STEPS;
    printf("\n");
    return wrong;
}

int main(void)
{
    const dtrain_launch_desc desc = {.rank_count = RANKS,
                                     .options = {.trace = {.path = "run.json"}}};
    if (dtrain_launch(&desc, train, NULL, NULL) == DTRAIN_OK) return count(0) + count(1) != 0;
    fprintf(stderr, "timeline: %s\n", dtrain_last_error());
    return 1;
}
