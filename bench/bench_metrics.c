/* bench_metrics.c: what reporting a step costs, by each writer and by all of them, of a step of train_gpt's model tiny.
 *
 *   run:     make bench, or build/bench/bench_metrics --program build/train_gpt --reps 900 --log FILE
 *   build:   cc -O2 -I. -Ibench bench/bench_metrics.c -o bench_metrics -lm -lpthread
 *
 * A repetition reports the same record to a stream without writers and to one with each of them, in turn, beginning
 * with another one each time, and takes the time of dtrain_metrics_step. The record is of two ranks with every figure
 * known; files are in --directory. The console is a file that gets a line every step, ten times as
 * many as usual. What repeats rarely is not in a median: a version of the Prometheus file (at most one a second, "most"
 * has it) and histograms.
 *
 *   us           median of a call less the median of one without writers
 *   most_us      the longest call
 *   of_step_%    us, of the median step of the program with its usual flags, measured in the same run
 *   correct      every step is in the file as often as it was reported */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "tools/prometheus.h"

#include "bench.h"
#include "train_run.h"

#include <sys/stat.h>

enum { NONE, JSON_LINES, PROMETHEUS, TENSORBOARD, CONSOLE, ALL, STREAMS };

static const char *const names[STREAMS] = {"none",        "JSON lines", "Prometheus",
                                           "TensorBoard", "console",    "all"};
static FILE *consoles[STREAMS];

static struct {
    long reps, steps;
    const char *program, *directory;
} opt = {900, 60, "build/train_gpt", "/tmp"};

static void fail(const char *what)
{
    fprintf(stderr, "bench_metrics: %s: %s\n", what,
            *dtrain_last_error() ? dtrain_last_error() : strerror(errno));
    exit(1);
}

static dtrain_step_record record_of(long step)
{
    static char keys[72][32];
    dtrain_step_record r;
    for (int f = 0; !keys[71][0] && f < 72; f++)
        snprintf(keys[f], sizeof keys[f], "time/figure_%d_ms", f);
    memset(&r, 0, sizeof r);
    r.step = step;
    r.loss = 3.14159 / (1 + 0.01 * (double)step);
    r.val_loss = NAN;
    r.grad_norm = 0.73;
    r.lr = 9.8e-4;
    r.tokens = (uint64_t)(step + 1) * 1024;
    r.ranks = 2;
    for (int f = 0; f < 72; f++) /* as many as a trainer makes */
        (void)dtrain_record_add(&r, keys[f], "ms", 12.5 + f);
    return r;
}

/* Path of a stream's files: NAME with the number of the stream. */
static const char *file_of(int stream, const char *name)
{
    static char paths[8][400];
    static int next;
    char *path = paths[next++ % 8];
    snprintf(path, sizeof paths[0], "%s/bench_metrics_%ld_%d%s", opt.directory, (long)getpid(),
             stream, name);
    return path;
}

static bool has(int stream, int writer) { return stream == writer || stream == ALL; }

static dtrain_metrics *open_stream(dtrain_world *world, int stream)
{
    static prometheus files[STREAMS];
    static char paths[STREAMS][400];
    dtrain_metrics_desc desc;
    dtrain_metrics_sink sink;
    dtrain_metrics *metrics;
    memset(&desc, 0, sizeof desc);
    if (has(stream, JSON_LINES)) desc.jsonl_path = file_of(stream, ".jsonl");
    if (has(stream, PROMETHEUS)) {
        snprintf(paths[stream], sizeof paths[0], "%s", file_of(stream, ".prom"));
        files[stream].path = paths[stream];
        sink = prometheus_sink(&files[stream]);
        desc.sinks = &sink, desc.sink_count = 1;
    }
    if (has(stream, TENSORBOARD)) desc.tensorboard_dir = file_of(stream, ".tb");
    if (has(stream, CONSOLE)) {
        desc.progress = consoles[stream] = fopen(file_of(stream, ".txt"), "w");
        desc.progress_every = 1;
        desc.total_steps = opt.reps;
        if (!desc.progress) fail("a console");
    }
    if (dtrain_metrics_create(world, &desc, &metrics) != DTRAIN_OK) fail("a stream");
    return metrics;
}

/* Return what a command that reads a file counts, and remove the file. */
static long count_and_remove(const char *path, const char *format)
{
    char command[1200], text[64] = "";
    snprintf(command, sizeof command, format, path);
    if (capture(command, text, sizeof text)) return -1;
    snprintf(command, sizeof command, "rm -rf %s", path);
    return system(command) == 0 ? strtol(text, NULL, 10) : -1;
}

static bool is_complete(int stream)
{
    bool good = true;
    if (has(stream, JSON_LINES))
        good &= count_and_remove(file_of(stream, ".jsonl"), "wc -l <%s") == opt.reps + 2;
    if (has(stream, PROMETHEUS))
        good &= count_and_remove(file_of(stream, ".prom"),
                                 "sed -n 's/^dtrain_steps_total{.*} //p' %s") == opt.reps;
    if (has(stream, TENSORBOARD))
        good &= count_and_remove(file_of(stream, ".tb"),
                                 "cat %s/* | grep -a -o loss/loss | wc -l") == opt.reps;
    if (has(stream, CONSOLE))
        good &= count_and_remove(file_of(stream, ".txt"), "wc -l <%s") == opt.reps + 1;
    return good;
}

static int measure(dtrain_world *world, void *user)
{
    static double us[STREAMS][BENCH_MOST];
    const double step_us = *(const double *)user;
    dtrain_metrics *streams[STREAMS];
    for (int s = 0; s < STREAMS; s++) streams[s] = open_stream(world, s);
    for (long rep = 0; rep < opt.reps; rep++)
        for (int turn = 0; turn < STREAMS; turn++) {
            const int s = (int)((rep + turn) % STREAMS);
            const dtrain_step_record record = record_of(rep);
            const double start = dtrain_seconds();
            if (dtrain_metrics_step(streams[s], &record) != DTRAIN_OK) fail("a step");
            us[s][rep] = 1e6 * (dtrain_seconds() - start);
        }
    const double none = median(us[0], (int)opt.reps);
    for (int s = 0; s < STREAMS; s++) {
        const bool lost = dtrain_metrics_finish(streams[s]) != DTRAIN_OK;
        dtrain_metrics_destroy(streams[s]);
        if (consoles[s]) fclose(consoles[s]);
        const spread all = spread_of(us[s], (int)opt.reps);
        const double cost = s ? all.median - none : all.median;
        bench_begin("metrics");
        bench_string("writer", -12, names[s]);
        bench_number("us", 8, 2, cost);
        bench_number("most_us", 9, 1, all.max);
        bench_number("step_us", 9, 0, step_us);
        bench_number("of_step_%", 9, 3, 100 * cost / step_us);
        bench_end(!lost && is_complete(s));
    }
    return 0;
}

static const flag flag_table[] = {
    {"--program", 's', &opt.program, 0, 0, "train_gpt, whose step costs are compared with", NULL},
    {"--reps", 'i', &opt.reps, 1, BENCH_MOST, "steps that are reported to every stream", NULL},
    {"--steps", 'i', &opt.steps, 4, BENCH_MOST, "steps that the program trains", NULL},
    {"--directory", 's', &opt.directory, 0, 0, "where files are written", NULL},
    BENCH_FLAGS};

int main(int argc, char **argv)
{
    static train_run run;
    dtrain_launch_desc desc;
    if (is_quick(argc, argv)) opt.reps = 60, opt.steps = 8;
    bench_start("bench_metrics", "what reporting a step costs", flag_table,
                sizeof flag_table / sizeof *flag_table, argc, argv);
    if (train(opt.program, &run, "--model tiny --steps %ld --ranks 1", opt.steps)) return 1;
    double step_us = 1e3 * run.step_ms;
    memset(&desc, 0, sizeof desc);
    desc.rank_count = 1;
    desc.mode = DTRAIN_LAUNCH_THREADS;
    bench_title("one step of train_gpt --model tiny, one rank: %.2f ms", run.step_ms);
    if (dtrain_launch(&desc, measure, &step_us, NULL) != DTRAIN_OK) fail("the world");
    return bench.wrong > 0;
}
