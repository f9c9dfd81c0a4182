/* bench_forecast.c: what --dry-run predicts, and what the run then takes.
 *
 *   run:     make build/train_gpt build/resnet_cifar build/bench/bench_forecast && build/bench/bench_forecast
 *            build/bench/bench_forecast --models baby --ranks 1,2 --rounds 5
 *
 * In every round a configuration is predicted and then run, so that both meet the same machine. A run's figure is the
 * median over its steps without the first two.
 *
 *   predicted    ms of a step, median over rounds; of it the exposed communication
 *   measured     the same, of the run
 *   ratio        predicted / measured, round by round
 *   MiB          of a rank: parameters, gradients, optimizer, buffers and activations, predicted and counted by the run
 *   correct      those are equal, and so are the bytes that a rank sends in a step */
#include "bench.h"
#include "train_run.h"

enum { MAX_ROUNDS = 16, IMAGES = 2, TEXT = 1 << 16 };

static const char *const models[] = {"tiny", "baby", "resnet20", NULL};
static const char *const strategies[] = {"ddp", "zero1", "full_shard", "zero3", NULL};

static struct options {
    const char *program, *images, *flags;
    flag_list models, strategies, ranks;
    long steps, rounds, threads;
} opt = {.program = "build/train_gpt",
         .images = "build/resnet_cifar",
         .flags = "",
         .models = {3, {0, 1, IMAGES}},
         .strategies = {2, {0, 2}},
         .ranks = {2, {1, 2}},
         .steps = 12,
         .rounds = 3,
         .threads = 1};

/* What a dry run says. */
typedef struct prediction {
    double step_ms, exposed_ms, mib, sent_mib;
} prediction;

/* Sum the classes of a line "memory": all but the process itself. */
static double classes(const char *text)
{
    const char *at = text ? strstr(text, "parameters ") : NULL;
    return number_after(at, "parameters ", 0) + number_after(at, "gradients ", 0) +
           number_after(at, "optimizer ", 0) + number_after(at, "buffers ", 0) +
           number_after(at, "activations ", 0) +
           number_after(at ? strstr(at, "activations ") : NULL, "+ ", 0);
}

static int predict(const char *program, const char *flags, prediction *p)
{
    static char text[TEXT];
    char command[1024];
    snprintf(command, sizeof command, "%s %s --dry-run", program, flags);
    if (capture(command, text, sizeof text))
        return fprintf(stderr, "failed: %s\n%s", command, text), 1;
    p->step_ms = number_after(text, "\n# step ", 0);
    p->exposed_ms = number_after(text, "exposed communication ", 0);
    p->mib = classes(strstr(text, "\n# memory"));
    p->sent_mib = number_after(text, "a rank sends ", 0) / 1048576;
    return 0;
}

static int compare(long model, long strategy, long ranks)
{
    double predicted[MAX_ROUNDS], measured[MAX_ROUNDS], exposed[MAX_ROUNDS], waited[MAX_ROUNDS];
    char flags[512], size[64] = "--batch 16";
    const char *const program = model == IMAGES ? opt.images : opt.program;
    prediction p = {0, 0, 0, 0};
    train_run run;
    memset(&run, 0, sizeof run);
    if (model != IMAGES)
        snprintf(size, sizeof size, "--model %s --eval-batches 0 --sample 0", models[model]);
    snprintf(flags, sizeof flags, "%s --strategy %s --ranks %ld --threads %ld --steps %ld %s", size,
             strategies[strategy], ranks, opt.threads, opt.steps, opt.flags);
    for (long i = 0; i < opt.rounds; i++) {
        if (predict(program, flags, &p) || run_trainer(program, &run, "%s", flags)) return 1;
        predicted[i] = p.step_ms, exposed[i] = p.exposed_ms;
        measured[i] = run.step_ms, waited[i] = run.exposed_ms;
    }
    const int rounds = (int)opt.rounds;
    const double counted = run.params + run.grads + run.optimizer + run.buffers + run.activations +
                           run.activation_grads;
    bench_begin("forecast");
    bench_string("model", -9, models[model]);
    bench_string("strategy", -11, strategies[strategy]);
    bench_number("ranks", 5, 0, (double)ranks);
    bench_number("predicted_ms", 9, 2, median(predicted, rounds));
    bench_number("measured_ms", 9, 2, median(measured, rounds));
    bench_spread("ratio", 5, 2, ratios_of(predicted, measured, rounds, 1));
    bench_number("exposed_predicted", 9, 2, median(exposed, rounds));
    bench_number("exposed_measured", 9, 2, median(waited, rounds));
    bench_number("MiB_predicted", 9, 1, p.mib);
    bench_number("MiB_counted", 9, 1, counted);
    bench_end(fabs(p.mib - counted) < 0.35 && fabs(p.sent_mib - run.sent_mib) < 0.002);
    return 0;
}

static const flag flag_table[] = {
    {"--models", 'W', &opt.models, 0, 0, "all, or several of", models},
    {"--strategies", 'W', &opt.strategies, 0, 0, "ddp,full_shard, or several of", strategies},
    {"--ranks", 'I', &opt.ranks, 1, DTRAIN_MAX_RANKS, "1,2", NULL},
    {"--program", 's', &opt.program, 0, 0, "train_gpt", NULL},
    {"--images", 's', &opt.images, 0, 0, "resnet_cifar", NULL},
    {"--flags", 's', &opt.flags, 0, 0, "more flags of both", NULL},
    {"--threads", 'i', &opt.threads, 1, 1024, "of a rank", NULL},
    {"--steps", 'i', &opt.steps, 4, BENCH_MOST, "of each run", NULL},
    {"--rounds", 'i', &opt.rounds, 1, MAX_ROUNDS, "of each configuration", NULL},
    BENCH_FLAGS};

int main(int argc, char **argv)
{
    if (is_quick(argc, argv)) {
        const flag_list few = {2, {0, IMAGES}}, one = {1, {2}};
        opt.models = few;
        opt.ranks = one;
        opt.steps = 4;
        opt.rounds = 1;
    }
    bench_start("bench_forecast", "--dry-run beside the run", flag_table,
                sizeof flag_table / sizeof *flag_table, argc, argv);
    bench_title("predicted and measured steps, %ld threads a rank, %ld steps, %ld rounds",
                opt.threads, opt.steps, opt.rounds);
    for (long m = 0; m < opt.models.count; m++)
        for (long s = 0; s < opt.strategies.count; s++)
            for (long r = 0; r < opt.ranks.count; r++)
                if (compare(opt.models.items[m], opt.strategies.items[s], opt.ranks.items[r]))
                    return 1;
    return bench.wrong > 0;
}
