/* bench_scaling.c: the simulator's table, measured: train_gpt on 1 to 8 ranks of this machine, and on many.
 *
 *   run:     make bench-scaling, or build/bench/bench_scaling --ranks 1,2,4 --batch-sizes 4,8 --rounds 3
 *            build/bench/bench_scaling --model gpt2 --ranks 1,2 --strategies ddp,full_shard --json
 *
 * Every round runs each configuration once, one after the other; ratios are taken round by round. A run's
 * figure is the median over its steps without the first two. Every rank has --threads threads and the same
 * batch, whatever the number of ranks: weak scaling.
 *
 *   tokens/s     of all ranks: median over rounds (min to max)
 *   per_rank     tokens/s of a rank over tokens/s of a rank on the fewest ranks of the list, of the first
 *                strategy with this batch: the usual efficiency (this machine has few cores: more ranks
 *                than those must share them)
 *   per_core     the same for min(ranks x threads, cores) in place of ranks: what it is worth here
 *   exposed_ms   of a step in which a rank waited for communication (for ranks that share cores: also for
 *                its turn)
 *   sent         MiB a rank has sent per step, counted by the communicator
 *   correct      losses have the bits of the first strategy's, step by step
 *
 * With --gbps every rank is a node with an emulated link of that speed (and 50 us); then build/simulate, where
 * it was built and knows the model, predicts beside it what it can from the strategy's rate on the fewest
 * ranks: sim_ms and sim_exposed, step and exposed communication, for ranks with cores of their own.
 *
 * Then every number of --many ranks once, on a model so small that nothing can be said about speed: losses
 * and final parameters of all strategies have the same bits, and the losses are those of one rank with the
 * same global batch, to 1e-5. */
#include "bench.h"
#include "train_run.h"

enum { MAX_CONFIGS = 128, MAX_ROUNDS = 32 };

typedef struct config {
    const char *strategy;
    long batch, ranks;
    int base, bits; /* indices of what it is compared with: speed, losses */

    train_run run; /* the last round */
    double rate[MAX_ROUNDS];
    double simulated_ms, simulated_exposed_ms; /* NaN: not predicted */
} config;

static const char *const strategies[] = {
    "ddp", "zero1", "shard_grad_op", "full_shard", "zero3", "hybrid_shard", NULL};

static struct options {
    const char *program, *model, *many, *flags, *simulator;
    flag_list ranks, strategies, batches;
    double gbps;
    long steps, rounds, threads;
} opt = {.program = "build/train_gpt",
         .model = "baby",
         .ranks = {4, {1, 2, 4, 8}},
         .strategies = {2, {0, 3}},
         .batches = {2, {2, 8}},
         .many = "64,256",
         .flags = "",
         .simulator = "build/simulate",
         .steps = 8,
         .rounds = 3,
         .threads = 1};

static config configs[MAX_CONFIGS];
static int config_count;
static long cores;

/* ---- running ---- */

static int run(config *c, int round, const char *flags)
{
    const int failed = train(opt.program, &c->run,
                             "--strategy %s --batch %ld --ranks %ld --warmup 2 --eval-batches 0 %s",
                             c->strategy, c->batch, c->ranks, flags);
    c->rate[round] = c->run.rate;
    return failed;
}

/* Add every combination. The first of a batch is the base of its ratios; the first strategy of a number of
 * ranks has the losses that the others must have. */
static void add_configs(void)
{
    if (opt.batches.count * opt.ranks.count * opt.strategies.count > MAX_CONFIGS) {
        fprintf(stderr, "bench_scaling: more than %d configurations\n", MAX_CONFIGS);
        exit(2);
    }
    for (long b = 0; b < opt.batches.count; b++) {
        const int base = config_count;
        for (long n = 0; n < opt.ranks.count; n++) {
            const int bits = config_count;
            for (long s = 0; s < opt.strategies.count; s++) {
                config *c = &configs[config_count++];
                c->strategy = strategies[opt.strategies.items[s]];
                c->batch = opt.batches.items[b];
                c->ranks = opt.ranks.items[n];
                c->base = base;
                c->bits = bits;
                c->simulated_ms = c->simulated_exposed_ms = NAN;
            }
        }
    }
}

static int run_all(void)
{
    char flags[512], links[64];
    for (int round = 0; round < opt.rounds; round++)
        for (int i = 0; i < config_count; i++) {
            links[0] = 0;
            if (opt.gbps > 0 && configs[i].ranks > 1)
                snprintf(links, sizeof links, "--emulate %ldx1:%g:50", configs[i].ranks, opt.gbps);
            snprintf(flags, sizeof flags, "--model %s --threads %ld --steps %ld --lr 3e-4 %s %s",
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
    const double rate = median(first->rate, (int)opt.rounds) / (double)first->ranks;
    snprintf(rows, sizeof rows, "/tmp/bench_scaling.%ld.jsonl", (long)getpid());
    snprintf(
        command, sizeof command,
        "%s --cluster cpu --precision fp32 --model %s --seq %ld --batch-sizes %ld --strategies %s "
        "--gpus %ld,%ld --gpus-per-node 1 --network emulated --network-gbps %g --latency-us 50 "
        "--measured-rate %.9g --json %s >/dev/null 2>&1 && cat %s",
        opt.simulator, opt.model, first->run.tokens / (first->ranks * first->batch), c->batch,
        c->strategy, first->ranks, c->ranks, opt.gbps, rate, rows, rows);
    const int failed = capture(command, text, sizeof text);
    remove(rows);
    if (failed) return 1;
    const char *line = strchr(text, '\n');
    c->simulated_ms = number_after(line, "\"step_ms\": ", NAN);
    c->simulated_exposed_ms = number_after(line, "\"exposed_comm_ms\": ", NAN);
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

static double cores_of(const config *c)
{
    const long threads = c->ranks * opt.threads;
    return (double)(threads < cores ? threads : cores);
}

static void report(const config *c)
{
    const config *base = &configs[c->base];
    const int rounds = (int)opt.rounds;
    bench_begin("scaling");
    bench_string("model", 0, opt.model);
    bench_number("gbps", 0, 0, opt.gbps);
    bench_number("threads", 0, 0, (double)opt.threads);
    bench_number("cores", 0, 0, (double)cores);
    bench_number("batch", 5, 0, (double)c->batch);
    bench_string("strategy", -13, c->strategy);
    bench_number("ranks", 5, 0, (double)c->ranks);
    bench_spread("tokens/s", 8, 0, spread_of(c->rate, rounds));
    bench_spread("per_rank", 5, 3,
                 ratios_of(c->rate, base->rate, rounds, (double)base->ranks / (double)c->ranks));
    bench_number("per_core", 8, 3,
                 ratios_of(c->rate, base->rate, rounds, cores_of(base) / cores_of(c)).median);
    bench_number("step_ms", 8, 1, c->run.step_ms);
    bench_number("exposed_ms", 8, 2, c->run.exposed_ms);
    bench_number("sent", 8, 3, c->run.sent_mib);
    if (opt.gbps > 0) {
        bench_number("sim_ms", 8, 1, c->simulated_ms);
        bench_number("sim_exposed", 8, 2, c->simulated_exposed_ms);
    }
    bench_end(same_losses(&c->run, &configs[c->bits].run, 0));
}

static void report_all(void)
{
    char links[64] = "";
    if (opt.gbps > 0)
        snprintf(links, sizeof links, "; a node for every rank, links of %g Gb/s, 50 us", opt.gbps);
    bench_title("%s, %ld threads a rank (%s), %ld cores, %ld steps, %ld rounds%s", opt.model,
                opt.threads, bench_kernels(false), cores, opt.steps, opt.rounds, links);
    for (int i = 0; i < config_count; i++) report(&configs[i]);
}

/* ---- many ranks ---- */

/* Two samples of 16 tokens a rank. */
static int run_many(long ranks)
{
    static const char *const flags =
        "--model tiny --layers 2 --heads 2 --channels 32 --seq 16 --threads 1 --steps 3 --lr 3e-3 "
        "--deterministic";
    static config one, first, c;
    one.strategy = "ddp";
    one.batch = 2 * ranks;
    one.ranks = 1;
    if (run(&one, 0, flags)) return 1;
    for (long s = 0; s < opt.strategies.count; s++) {
        c.strategy = strategies[opt.strategies.items[s]];
        c.batch = 2;
        c.ranks = ranks;
        if (run(&c, 0, flags)) return 1;
        if (s == 0) first = c;
        const bool bits = same_losses(&c.run, &first.run, 0) && c.run.hash[0] &&
                          strcmp(c.run.hash, first.run.hash) == 0;
        const bool single = same_losses(&c.run, &one.run, 1e-5);
        bench_begin("scaling_many");
        bench_number("ranks", 5, 0, (double)ranks);
        bench_string("strategy", -13, c.strategy);
        bench_number("loss", 10, 7, c.run.losses[c.run.steps - 1]);
        bench_string("parameters", -16, c.run.hash);
        bench_string("bits", -5, bits ? "same" : "OTHER");
        bench_string("as_one_rank", -5, single ? "yes" : "NO");
        bench_end(bits && single);
    }
    return 0;
}

static const flag flag_table[] = {
    {"--model", 's', &opt.model, 0, 0, "of train_gpt", NULL},
    {"--ranks", 'I', &opt.ranks, 1, DTRAIN_MAX_RANKS, "the fewest first: 1,2,4,8", NULL},
    {"--strategies", 'W', &opt.strategies, 0, 0, "ddp,full_shard, or several of", strategies},
    {"--batch-sizes", 'I', &opt.batches, 1, 65536, "samples of a rank: 2,8", NULL},
    {"--many", 's', &opt.many, 0, 0, "numbers of ranks for correctness, or none", NULL},
    {"--program", 's', &opt.program, 0, 0, "the trainer", NULL},
    {"--flags", 's', &opt.flags, 0, 0, "more flags of the trainer", NULL},
    {"--threads", 'i', &opt.threads, 1, 1024, "of a rank", NULL},
    {"--steps", 'i', &opt.steps, 4, BENCH_MOST, "of each run", NULL},
    {"--rounds", 'i', &opt.rounds, 1, MAX_ROUNDS, "of all runs", NULL},
    {"--gbps", 'f', &opt.gbps, 0, 1e6, "every rank is a node with an emulated link; 0: none", NULL},
    {"--simulator", 's', &opt.simulator, 0, 0, "predicts beside what is measured", NULL},
    BENCH_FLAGS};

int main(int argc, char **argv)
{
    number_list many = {0, {0}};
    if (is_quick(argc, argv)) {
        const flag_list ranks = {2, {1, 2}}, batches = {1, {2}};
        opt.model = "tiny";
        opt.ranks = ranks;
        opt.batches = batches;
        opt.many = "12";
        opt.steps = 5;
        opt.rounds = 1;
    }
    bench_start("bench_scaling", "training on more and more ranks of this machine", flag_table,
                sizeof flag_table / sizeof *flag_table, argc, argv);
    if (strcmp(opt.many, "none") != 0)
        bench_numbers("bench_scaling", "--many", opt.many, 1, DTRAIN_MAX_RANKS, &many);
    cores = sysconf(_SC_NPROCESSORS_ONLN);
    add_configs();
    if (run_all()) return 1;
    simulate_all();
    report_all();
    if (many.count) bench_title("many ranks, 3 steps of a tiny model");
    for (int i = 0; i < many.count; i++)
        if (run_many((long)many.items[i])) return 1;
    return bench.wrong > 0;
}
