/* bench_pipeline.c: a model over pipelines, beside one rank and beside data parallelism on the same ranks.
 *
 *   run:     make build/train_gpt build/bench/bench_pipeline && build/bench/bench_pipeline
 *            build/bench/bench_pipeline --models gpt2 --ranks 2 --micro-batches 8 --rounds 5
 *
 * All runs of a round train on the same samples: one rank that accumulates the micro-batches, DDP whose ranks share
 * them, and a pipeline of each schedule. A run's figure is the median over its steps without the first two.
 *
 *   step_ms     median over rounds
 *   of_one      step / (step of one rank / ranks), round by round: 1 is a pipeline without a bubble, on ranks that do
 *               not slow each other down
 *   schedule    the same as schedule_check says, for stages alike whose forward, input and weight gradients take
 *               equal times: the floor
 *   of_ddp      step / step of DDP
 *   bubble      share of a step that ranks wait for stages, mean of the ranks; below it what the schedule says
 *   MiB         of the process of rank 0, predicted and held; sent: by a rank in a step
 *   correct     losses are those of one rank, to rounding (1e-3: the models tie their classifier) */
#include "bench.h"
#include "train_run.h"
#include "tools/schedule.h"

enum { MAX_ROUNDS = 16, KINDS = 4, ROWS = KINDS + 2, ONE = KINDS, DDP = KINDS + 1 };

static const char *const models[] = {"tiny", "baby", "gpt2", NULL};
static const char *const kinds[] = {"1f1b", "gpipe", "interleaved", "zb_h1", NULL};

static struct options {
    const char *program, *data, *flags;
    flag_list models, kinds, ranks;
    long micro_batches, batch, sequence, steps, rounds, threads;
} opt = {.program = "build/train_gpt",
         .data = "dtrain.h",
         .flags = "",
         .models = {1, {1}},
         .kinds = {KINDS, {0, 1, 2, 3}},
         .ranks = {1, {2}},
         .micro_batches = 8,
         .batch = 1,
         .sequence = 128,
         .steps = 5,
         .rounds = 3,
         .threads = 1};

/* Tell what a schedule takes, in parts of what its ranks would take without a bubble, and its bubble. */
static int of_schedule(long kind, long ranks, double *time, double *bubble)
{
    dtrain_pipeline_desc desc;
    dtrain_pipeline_schedule *schedule;
    schedule_report report;
    memset(&desc, 0, sizeof desc);
    desc.kind = (uint32_t)kind;
    if (dtrain_pipeline_create(&desc, (int)ranks, (int)opt.micro_batches, &schedule) != DTRAIN_OK ||
        schedule_check(schedule, NULL, 0, &report) != DTRAIN_OK)
        return fprintf(stderr, "%s\n", dtrain_last_error()), 1;
    *time = report.makespan / (3.0 * (double)opt.micro_batches * schedule->chunks);
    *bubble = report.bubble;
    dtrain_pipeline_destroy(schedule);
    return 0;
}

static int run(long model, long row, long ranks, train_run *result)
{
    char how[96];
    long accum = opt.micro_batches;
    if (row == ONE) snprintf(how, sizeof how, "--ranks 1");
    else if (row == DDP) {
        snprintf(how, sizeof how, "--ranks %ld", ranks);
        accum = opt.micro_batches / ranks;
    } else {
        snprintf(how, sizeof how, "--ranks %ld --pipeline %ld --pipeline-schedule %s", ranks, ranks,
                 kinds[row]);
    }
    return train(opt.program, result,
                 "--data %s --model %s --eval-batches 0 --seq %ld --batch %ld --accum %ld --steps "
                 "%ld --threads %ld %s %s",
                 opt.data, models[model], opt.sequence, opt.batch, accum, opt.steps, opt.threads,
                 how, opt.flags);
}

static int compare(long model, long ranks)
{
    static double ms[ROWS][MAX_ROUNDS], ideal[MAX_ROUNDS], bubble[ROWS][MAX_ROUNDS];
    static train_run runs[ROWS];
    bool correct[ROWS];
    for (int row = 0; row < ROWS; row++) correct[row] = true;
    if (opt.micro_batches % ranks)
        return fprintf(stderr,
                       "--micro-batches is %ld: expected a multiple of --ranks %ld, so that DDP's "
                       "ranks share them\n",
                       opt.micro_batches, ranks),
               2;
    for (long round = 0; round < opt.rounds; round++)
        for (long i = -2; i < opt.kinds.count; i++) {
            const long row = i < 0 ? KINDS + 2 + i : opt.kinds.items[i];
            if (run(model, row, ranks, &runs[row])) return 1;
            ms[row][round] = runs[row].step_ms;
            bubble[row][round] = runs[row].bubble_ms / runs[row].step_ms;
            if (row == ONE) ideal[round] = runs[row].step_ms / (double)ranks;
            correct[row] = correct[row] && same_losses(&runs[row], &runs[ONE], 1e-3);
        }
    for (long i = -2; i < opt.kinds.count; i++) {
        const long row = i < 0 ? KINDS + 2 + i : opt.kinds.items[i];
        double time = 1, idle = 0;
        if (row < KINDS && of_schedule(row, ranks, &time, &idle)) return 1;
        bench_begin("pipeline");
        bench_string("model", -5, models[model]);
        bench_number("ranks", 5, 0, (double)(row == ONE ? 1 : ranks));
        bench_string("how", -11, row == ONE ? "one rank" : row == DDP ? "DDP" : kinds[row]);
        bench_number("step_ms", 9, 1, median(ms[row], (int)opt.rounds));
        bench_spread("of_one", 5, 2, ratios_of(ms[row], ideal, (int)opt.rounds, 1));
        bench_number("schedule", 8, 2, row == ONE ? (double)ranks : time);
        bench_spread("of_ddp", 5, 2, ratios_of(ms[row], ms[DDP], (int)opt.rounds, 1));
        bench_number("bubble", 6, 3, median(bubble[row], (int)opt.rounds));
        bench_number("scheduled", 9, 3, idle);
        bench_number("MiB_predicted", 9, 1, runs[row].predicted);
        bench_number("MiB_held", 9, 1, runs[row].resident);
        bench_number("MiB_sent", 9, 2, runs[row].sent_mib);
        bench_end(correct[row]);
    }
    return 0;
}

static const flag flag_table[] = {
    {"--models", 'W', &opt.models, 0, 0, "baby, or several of", models},
    {"--schedules", 'W', &opt.kinds, 0, 0, "all, or several of", kinds},
    {"--ranks", 'I', &opt.ranks, 2, DTRAIN_MAX_RANKS, "stages of the pipeline: 2", NULL},
    {"--micro-batches", 'i', &opt.micro_batches, 1, 4096, "of a step", NULL},
    {"--batch", 'i', &opt.batch, 1, 4096, "samples of a micro-batch", NULL},
    {"--seq", 'i', &opt.sequence, 1, 1 << 20, "tokens of a sample", NULL},
    {"--program", 's', &opt.program, 0, 0, "train_gpt", NULL},
    {"--data", 's', &opt.data, 0, 0, "text that is learned", NULL},
    {"--flags", 's', &opt.flags, 0, 0, "more flags of it", NULL},
    {"--threads", 'i', &opt.threads, 1, 1024, "of a rank", NULL},
    {"--steps", 'i', &opt.steps, 4, BENCH_MOST, "of each run", NULL},
    {"--rounds", 'i', &opt.rounds, 1, MAX_ROUNDS, "of all runs", NULL},
    BENCH_FLAGS};

int main(int argc, char **argv)
{
    if (is_quick(argc, argv)) {
        const flag_list tiny = {1, {0}}, few = {2, {0, 4}};
        opt.models = tiny;
        opt.kinds = few;
        opt.micro_batches = 4;
        opt.sequence = 32;
        opt.steps = 4;
        opt.rounds = 1;
    }
    bench_start("bench_pipeline", "pipelines beside one rank and DDP", flag_table,
                sizeof flag_table / sizeof *flag_table, argc, argv);
    bench_title("%ld micro-batches of %ld x %ld tokens, %ld threads a rank, %ld steps, %ld rounds",
                opt.micro_batches, opt.batch, opt.sequence, opt.threads, opt.steps, opt.rounds);
    for (long m = 0; m < opt.models.count; m++)
        for (long r = 0; r < opt.ranks.count; r++) {
            const int failed = compare(opt.models.items[m], opt.ranks.items[r]);
            if (failed) return failed;
        }
    return bench.wrong > 0;
}
