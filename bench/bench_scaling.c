/* bench_scaling.c: the simulator's table, measured: train_gpt on 1 to 8 ranks of this machine, and on many.
 *
 *   run:     make bench-scaling, or build/bench/bench_scaling --ranks 1,2,4 --batch-sizes 4,8 --rounds 3
 *            build/bench/bench_scaling --model gpt2 --ranks 1,2 --strategies ddp,full_shard --json
 *
 * Every round runs each configuration once, one after the other; ratios are taken round by round. A run's
 * figure is the median over its steps without the first two. Every rank has --threads threads and the same
 * batch, whatever the number of ranks: weak scaling.
 *
 *   tokens/s     of all ranks: median over rounds, least and most
 *   per rank     tokens/s of a rank / tokens/s of a rank on the fewest ranks of the list, of the first
 *                strategy with this batch: the usual efficiency, in % (this machine has few cores: more ranks
 *                than those must share them)
 *   per core     the same for min(ranks x threads, cores) in place of ranks: what it is worth here
 *   exposed      ms of a step in which a rank waited for communication (for ranks that share cores: also for
 *                its turn); in % of the step
 *   sent         MiB a rank has sent per step, counted by the communicator; predicted: by the strategy
 *   correct      losses have the bits of the first strategy's, step by step
 *
 * With --gbps every rank is a node with an emulated link of that speed (and 50 us); then build/simulate, where
 * it was built and knows the model, predicts beside it what it can from the strategy's rate on the fewest
 * ranks: step and exposed communication, in ms, for ranks with cores of their own.
 *
 * Then every number of --many ranks once, on a model so small that nothing can be said about speed: losses
 * and final parameters of all strategies have the same bits, and the losses are those of one rank with the
 * same global batch, to 1e-5. */
#include "bench.h"
#include "dtrain.h"

enum { MAX_CONFIGS = 128, MAX_ROUNDS = 32, MAX_LIST = 8 };

typedef struct config {
    const char *strategy;
    int batch, ranks, base, bits; /* indices of what it is compared with: speed, losses */

    bench_log run; /* the last round */
    double rate[MAX_ROUNDS], predicted_mib;
    double simulated_ms, simulated_exposed_ms; /* 0: not predicted */
    char hash[20];
    bool correct;
} config;

static struct options {
    const char *program, *model, *ranks, *strategies, *batches, *many, *flags, *simulator;
    double gbps;
    int steps, rounds, threads, json;
} opt = {.program = "build/train_gpt",
         .model = "baby",
         .ranks = "1,2,4,8",
         .strategies = "ddp,full_shard",
         .batches = "2,8",
         .many = "64,256",
         .flags = "",
         .simulator = "build/simulate",
         .steps = 8,
         .rounds = 3,
         .threads = 1};

typedef char word[16];

static config configs[MAX_CONFIGS];
static int config_count;
static word strategies[MAX_LIST], numbers[MAX_LIST], batches[MAX_LIST], many[MAX_LIST];
static int strategy_count, number_count, batch_count, many_count;
static long cores;

/* ---- running ---- */

static int run(config *c, int round, const char *flags)
{
    static char text[1 << 20];
    char command[1024], log[64];
    const char *hash;
    snprintf(log, sizeof log, "/tmp/bench_scaling.%ld.jsonl", (long)getpid());
    snprintf(
        command, sizeof command,
        "%s --strategy %s --batch %d --ranks %d --warmup 2 --eval-batches 0 --sample 0 --log %s %s",
        opt.program, c->strategy, c->batch, c->ranks, log, flags);
    if (capture(command, text, sizeof text) || read_log(fopen(log, "r"), &c->run)) {
        fprintf(stderr, "bench_scaling: failed: %s\n%s", command, text);
        return 1;
    }
    remove(log);
    c->rate[round] = c->run.rate;
    c->predicted_mib = number_after(text, "a rank sends ", 0) / 1048576;
    hash = strstr(text, "\n  parameters ");
    if (hash) sscanf(hash + 13, "%17s", c->hash);
    return 0;
}

/* ---- configurations ---- */

/* The words between commas; their count, or -1. */
static int split(const char *text, word *parts)
{
    int count = 0;
    while (*text) {
        const size_t length = strcspn(text, ",");
        if (length == 0 || length >= sizeof *parts || count == MAX_LIST) return -1;
        memcpy(parts[count], text, length);
        parts[count++][length] = 0;
        text += length + (text[length] == ',');
    }
    return count;
}

static config *add(const char *strategy, int batch, int ranks)
{
    config *c = &configs[config_count];
    c->strategy = strategy;
    c->batch = batch;
    c->ranks = ranks;
    c->base = c->bits = config_count++;
    return c;
}

/* Of each batch the first is the base of all; of each number of ranks the first strategy. */
static int add_configs(void)
{
    if (batch_count * number_count * strategy_count > MAX_CONFIGS) return 1;
    for (int b = 0; b < batch_count; b++) {
        const int base = config_count;
        for (int n = 0; n < number_count; n++) {
            const int bits = config_count, batch = atoi(batches[b]), ranks = atoi(numbers[n]);
            if (batch < 1 || ranks < 1 || ranks > DTRAIN_MAX_RANKS) return 1;
            for (int s = 0; s < strategy_count; s++) {
                config *c = add(strategies[s], batch, ranks);
                c->base = base;
                c->bits = bits;
            }
        }
    }
    return 0;
}

static int run_all(void)
{
    char flags[512], links[64] = "";
    for (int round = 0; round < opt.rounds; round++)
        for (int i = 0; i < config_count; i++) {
            if (opt.gbps > 0 && configs[i].ranks > 1)
                snprintf(links, sizeof links, "--emulate %dx1:%g:50", configs[i].ranks, opt.gbps);
            else links[0] = 0;
            snprintf(flags, sizeof flags, "--model %s --threads %d --steps %d --lr 3e-4 %s %s",
                     opt.model, opt.threads, opt.steps, links, opt.flags);
            if (run(&configs[i], round, flags)) return 1;
        }
    return 0;
}

/* ---- the simulator ---- */

/* Predictions for `c`'s strategy and batch on its ranks, made from what was measured on the first of them. */
static int simulate(config *c, const config *first)
{
    static char text[1 << 16];
    char command[1024], rows[64];
    const double rate = median(first->rate, opt.rounds) / first->ranks;
    snprintf(rows, sizeof rows, "/tmp/bench_scaling.%ld.jsonl", (long)getpid());
    snprintf(
        command, sizeof command,
        "%s --cluster cpu --precision fp32 --model %s --seq %d --batch-sizes %d --strategies %s "
        "--gpus %d,%d --gpus-per-node 1 --network emulated --network-gbps %g --latency-us 50 "
        "--measured-rate %.9g --json %s >/dev/null 2>&1 && cat %s",
        opt.simulator, opt.model, first->run.tokens / (first->ranks * first->batch), c->batch,
        c->strategy, first->ranks, c->ranks, opt.gbps, rate, rows, rows);
    const int failed = capture(command, text, sizeof text);
    remove(rows);
    if (failed) return 1;
    const char *line = strchr(text, '\n');
    c->simulated_ms = number_after(line, "\"step_ms\": ", 0);
    c->simulated_exposed_ms = number_after(line, "\"exposed_comm_ms\": ", 0);
    return 0;
}

static void simulate_all(void)
{
    if (!(opt.gbps > 0) || access(opt.simulator, X_OK) != 0) return;
    for (int i = 0; i < config_count; i++) {
        const config *first = &configs[i];
        for (int k = config_count; k-- > 0;)
            if (configs[k].strategy == configs[i].strategy && configs[k].batch == configs[i].batch)
                first = &configs[k];
        if (first->ranks < configs[i].ranks && simulate(&configs[i], first)) return;
    }
}

/* ---- report ---- */

static bool same_losses(const config *a, const config *b, double tolerance)
{
    if (a->run.steps != b->run.steps) return false;
    for (int i = 0; i < a->run.steps; i++)
        if (!(fabs(a->run.losses[i] - b->run.losses[i]) <= tolerance)) return false;
    return true;
}

/* Over rounds: c's tokens/s; and for one of `units` over the base's for one of `base_units`. */
static spread rates(const config *c, double units, double base_units)
{
    double values[MAX_ROUNDS];
    for (int i = 0; i < opt.rounds; i++)
        values[i] =
            units > 0 ? c->rate[i] / units / (configs[c->base].rate[i] / base_units) : c->rate[i];
    return spread_of(values, opt.rounds);
}

static double cores_of(const config *c)
{
    const int threads = c->ranks * opt.threads;
    return threads < cores ? threads : (double)cores;
}

static void report_json(const config *c)
{
    const spread rate = rates(c, 0, 0), rank = rates(c, c->ranks, configs[c->base].ranks),
                 core = rates(c, cores_of(c), cores_of(&configs[c->base]));
    printf("{\"bench\": \"scaling\", \"model\": \"%s\", \"strategy\": \"%s\", \"batch\": %d, "
           "\"nodes\": %d, \"ranks\": %d, \"gbps\": %g, \"threads\": %d, \"cores\": %ld, "
           "\"tokens_per_second\": %.6g, \"min\": %.6g, \"max\": %.6g, \"efficiency\": %.4g, "
           "\"efficiency_min\": %.4g, \"efficiency_max\": %.4g, \"core_efficiency\": %.4g, "
           "\"step_ms\": %.5g, \"exposed_ms\": %.5g, \"simulated_step_ms\": %.5g, "
           "\"simulated_exposed_ms\": %.5g, \"sent_mib\": %.6g, \"predicted_mib\": %.6g, "
           "\"correct\": %s}\n",
           opt.model, c->strategy, c->batch, opt.gbps > 0 ? c->ranks : 1, c->ranks, opt.gbps,
           opt.threads, cores, rate.median, rate.min, rate.max, rank.median, rank.min, rank.max,
           core.median, c->run.step_ms, c->run.exposed_ms, c->simulated_ms, c->simulated_exposed_ms,
           c->run.sent_mib, c->predicted_mib, c->correct ? "true" : "false");
}

static void report(const config *c)
{
    const spread rate = rates(c, 0, 0), rank = rates(c, c->ranks, configs[c->base].ranks),
                 core = rates(c, cores_of(c), cores_of(&configs[c->base]));
    char simulated[48] = "";
    if (c->simulated_ms > 0)
        snprintf(simulated, sizeof simulated, "%9.1f %8.2f", c->simulated_ms,
                 c->simulated_exposed_ms);
    printf("%5d  %-14s %5d  %9.0f %9.0f %9.0f  %7.1f %% %7.1f %%  %8.1f %8.2f %6.1f %%  %8.3f "
           "%9.3f  %-8s%s\n",
           c->batch, c->strategy, c->ranks, rate.median, rate.min, rate.max, 100 * rank.median,
           100 * core.median, c->run.step_ms, c->run.exposed_ms,
           100 * c->run.exposed_ms / c->run.step_ms, c->run.sent_mib, c->predicted_mib,
           c->correct ? "yes" : "NO", simulated);
}

static void print_heading(void)
{
    printf("%s, %d thread%s a rank (%s), %ld cores, %d steps, %d rounds", opt.model, opt.threads,
           opt.threads > 1 ? "s" : "", dtrain_cpu_kernel_name(), cores, opt.steps, opt.rounds);
    if (opt.gbps > 0) printf("; a node for every rank, links of %g Gb/s, 50 us", opt.gbps);
    printf("\n\n%5s  %-14s %5s  %9s %9s %9s  %9s %9s  %8s %8s %8s  %8s %9s  %-8s%s\n", "batch",
           "strategy", "ranks", "tokens/s", "min", "max", "per rank", "per core", "step ms",
           "exposed", "", "sent", "predicted", "correct", opt.gbps > 0 ? "simulated  exposed" : "");
}

static int report_all(void)
{
    int bad = 0;
    if (!opt.json) print_heading();
    for (int i = 0; i < config_count; i++) {
        config *c = &configs[i];
        c->correct = same_losses(c, &configs[c->bits], 0);
        bad += !c->correct;
        if (opt.json) report_json(c);
        else report(c);
    }
    return bad;
}

/* ---- many ranks ---- */

static void report_many(const config *c, bool bits, bool single)
{
    if (opt.json)
        printf("{\"bench\": \"scaling_many\", \"ranks\": %d, \"strategy\": \"%s\", \"steps\": %d, "
               "\"loss\": %.9g, \"parameters\": \"%s\", \"same_bits\": %s, \"as_one_rank\": %s}\n",
               c->ranks, c->strategy, c->run.steps, c->run.losses[c->run.steps - 1], c->hash,
               bits ? "true" : "false", single ? "true" : "false");
    else
        printf("%5d  %-14s %12.7f  %-18s %-10s %s\n", c->ranks, c->strategy,
               c->run.losses[c->run.steps - 1], c->hash, bits ? "same" : "OTHER",
               single ? "yes" : "NO");
}

/* Two samples of 16 tokens a rank. */
static int run_many(int ranks)
{
    static const char *const flags =
        "--model tiny --layers 2 --heads 2 --channels 32 --seq 16 --threads 1 --steps 3 --lr 3e-3 "
        "--deterministic";
    static config one, first, c;
    int bad = 0;
    one.strategy = "ddp";
    one.batch = 2 * ranks;
    one.ranks = 1;
    if (run(&one, 0, flags)) return 1;
    for (int s = 0; s < strategy_count; s++) {
        memset(&c, 0, sizeof c);
        c.strategy = strategies[s];
        c.batch = 2;
        c.ranks = ranks;
        if (run(&c, 0, flags)) return 1;
        if (s == 0) first = c;
        const bool bits = same_losses(&c, &first, 0) && c.hash[0] && !strcmp(c.hash, first.hash);
        const bool single = same_losses(&c, &one, 1e-5);
        bad += !bits + !single;
        report_many(&c, bits, single);
    }
    return bad;
}

static int run_many_all(void)
{
    int bad = 0;
    if (many_count && !opt.json)
        printf("\nmany ranks, 3 steps of a tiny model\n%5s  %-14s %12s  %-18s %-10s %s\n", "ranks",
               "strategy", "loss", "parameters", "bits", "losses of one rank");
    for (int i = 0; i < many_count; i++) bad += run_many(atoi(many[i]));
    return bad;
}

/* ---- options ---- */

static const bench_option option_table[] = {
    {"--model", NULL, NULL, &opt.model, "of train_gpt; baby"},
    {"--ranks", NULL, NULL, &opt.ranks, "numbers of ranks, the fewest first; 1,2,4,8"},
    {"--strategies", NULL, NULL, &opt.strategies, "of train_gpt; ddp,full_shard"},
    {"--batch-sizes", NULL, NULL, &opt.batches, "samples of a rank; 2,8"},
    {"--many", NULL, NULL, &opt.many, "numbers of ranks for correctness, or none; 64,256"},
    {"--program", NULL, NULL, &opt.program, "the trainer; build/train_gpt"},
    {"--flags", NULL, NULL, &opt.flags, "more flags of the trainer"},
    {"--threads", &opt.threads, NULL, NULL, "of a rank; 1"},
    {"--steps", &opt.steps, NULL, NULL, "of each run; 8"},
    {"--rounds", &opt.rounds, NULL, NULL, "3"},
    {"--gbps", NULL, &opt.gbps, NULL, "every rank is a node with an emulated link; 0: none"},
    {"--simulator", NULL, NULL, &opt.simulator, "build/simulate"},
};
enum { OPTIONS = sizeof option_table / sizeof *option_table };

static int check_options(void)
{
    bool good = true;
    strategy_count = split(opt.strategies, strategies);
    number_count = split(opt.ranks, numbers);
    batch_count = split(opt.batches, batches);
    many_count = strcmp(opt.many, "none") == 0 ? 0 : split(opt.many, many);
    for (int i = 0; i < many_count; i++)
        good = good && atoi(many[i]) >= 1 && atoi(many[i]) <= DTRAIN_MAX_RANKS;
    if (good && strategy_count > 0 && number_count > 0 && batch_count > 0 && many_count >= 0 &&
        opt.steps >= 4 && opt.steps <= BENCH_STEPS && opt.rounds >= 1 && opt.rounds <= MAX_ROUNDS &&
        opt.threads >= 1 && add_configs() == 0)
        return 0;
    fprintf(
        stderr,
        "bench_scaling: --steps takes 4 to %d, --rounds 1 to %d, lists at most %d words between "
        "commas, of ranks 1 to %d; --help lists the options\n",
        BENCH_STEPS, MAX_ROUNDS, MAX_LIST, DTRAIN_MAX_RANKS);
    return 2;
}

static int parse(int argc, char **argv)
{
    if (bench_parse("bench_scaling", option_table, OPTIONS, &opt.json, argc, argv)) return 2;
    return check_options();
}

int main(int argc, char **argv)
{
    int bad;
    if (argc > 1 && strcmp(argv[1], "--help") == 0)
        return bench_usage("bench_scaling: training on more and more ranks of this machine",
                           option_table, OPTIONS);
    if (parse(argc, argv)) return 2;
    cores = sysconf(_SC_NPROCESSORS_ONLN);
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (run_all()) return 1;
    simulate_all();
    bad = report_all();
    bad += run_many_all();
    return bad ? 1 : 0;
}
