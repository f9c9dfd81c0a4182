/* bench_strategies.c: train_gpt under every strategy: what each one costs and saves.
 *
 *   run:     make bench-strategies, or build/bench/bench_strategies --models baby --ranks 1,2,4,8
 *            build/bench/bench_strategies --models baby,gpt2 --ranks 2 --steps 12 --rounds 5 --log FILE
 *
 * Every round runs each configuration once, one after the other (A B C A B C ...): the machine's drift
 * then meets all alike, and ratios are taken round by round. A run's figure is the median over its
 * steps without the first two. Memory and bytes are MiB of rank 0.
 *
 *   tokens/s     of all ranks: median over rounds (min to max)
 *   of_ddp       tokens/s over DDP's in the same round: median over rounds
 *   params ...   as planned: parameters, gradients, optimizer state, buffers of gathered and reduced
 *                units, activations with their gradients; process: held by the process at the end
 *   sent         by a rank in a step, counted by the communicator
 *   layout       the same by the strategy's own plan, which knows what is still there in backward
 *   theory       2(N-1)/N P with whole or kept parameters, 3(N-1)/N P with sharded ones, for P parameters of 4
 *                bytes. HYBRID_SHARD with nodes of G: the latter for G ranks, and 2(M-1)/M P/G across
 *                the M = N/G nodes. Sharded kinds may stay below: what backward needs first is still there
 *   exposed      ms of a step in which a rank waited for communication
 *   correct      losses to the bit those of DDP, step by step; for HYBRID_SHARD and rows with another
 *                arithmetic within 1e-2; and the loss has fallen, in runs of 10 steps and more
 *
 * Beside the strategies: activation checkpointing and bf16, each against plain DDP on the most ranks. */
#include "bench.h"
#include "train_run.h"

enum { MAX_CONFIGS = 96, MAX_ROUNDS = 64 };

typedef struct config {
    const char *name, *flags;
    int model, ranks, node; /* node: ranks of one, HYBRID_SHARD; else 0 */
    bool same_bits;
    int base; /* the DDP run it is compared with */

    train_run run; /* the last round */
    double rate[MAX_ROUNDS];
} config;

static const char *const models[] = {"tiny", "baby", "gpt2", NULL};

static struct options {
    const char *program, *flags;
    flag_list models, ranks;
    long steps, rounds, threads;
} opt = {"build/train_gpt", "", {1, {1}}, {2, {1, 2}}, 8, 1, 1};

static config configs[MAX_CONFIGS];
static int config_count;

/* ---- configurations ---- */

static int add(const char *name, const char *flags, long model, long ranks, int node,
               bool same_bits, int base)
{
    config *c = &configs[config_count];
    if (config_count == MAX_CONFIGS) {
        fprintf(stderr, "bench_strategies: more than %d configurations\n", MAX_CONFIGS);
        exit(2);
    }
    c->name = name;
    c->flags = flags;
    c->model = (int)model;
    c->ranks = (int)ranks;
    c->node = node;
    c->same_bits = same_bits;
    c->base = base < 0 ? config_count : base;
    return config_count++;
}

static void add_ranks(long model, long ranks, bool last)
{
    const int base = add("DDP", "ddp", model, ranks, 0, true, -1);
    if (ranks > 1) {
        add("ZERO1", "zero1", model, ranks, 0, true, base);
        add("SHARD_GRAD_OP", "shard_grad_op", model, ranks, 0, true, base);
        add("FULL_SHARD", "full_shard", model, ranks, 0, true, base);
        add("FULL_SHARD, kept", "full_shard --reshard-after-forward 0", model, ranks, 0, true,
            base);
        add("ZERO3", "zero3", model, ranks, 0, true, base);
    }
    if (ranks >= 4 && ranks % 2 == 0)
        add("HYBRID_SHARD, 2", "hybrid_shard --node-size 2", model, ranks, 2, false, base);
    if (!last) return;
    add("DDP, checkpoint", "ddp --activation-checkpointing 1", model, ranks, 0, true, base);
    add("DDP, bf16", "ddp --precision bf16", model, ranks, 0, false, base);
}

static int run_config(config *c, int round)
{
    const int failed =
        train(opt.program, &c->run,
              "--model %s --ranks %d --threads %ld --steps %ld --warmup 2 --lr 3e-4 "
              "--eval-batches 0 --strategy %s %s",
              models[c->model], c->ranks, opt.threads, opt.steps, c->flags, opt.flags);
    c->rate[round] = c->run.rate;
    return failed;
}

/* ---- report ---- */

static double theory_mib(const config *c)
{
    const double n = c->ranks, g = c->node ? c->node : n, nodes = n / g;
    const bool kept = strstr(c->flags, "forward 0") != NULL;
    const bool sharded = strstr(c->flags, "full_shard") || strstr(c->flags, "zero3") || c->node;
    double sent = (sharded && !kept ? 3 : 2) * (g - 1) / g * c->run.parameters;
    if (c->node) sent += 2 * (nodes - 1) / nodes * c->run.parameters / g;
    return 4 * sent / 1048576;
}

static spread of_ddp(const config *c)
{
    return ratios_of(c->rate, configs[c->base].rate, (int)opt.rounds, 1);
}

static void report(const config *c)
{
    const train_run *run = &c->run;
    bench_begin("strategies");
    bench_string("model", -5, models[c->model]);
    bench_number("ranks", 5, 0, c->ranks);
    bench_number("threads", 0, 0, (double)opt.threads);
    bench_string("strategy", -17, c->name);
    bench_spread("tokens/s", 8, 0, spread_of(c->rate, (int)opt.rounds));
    bench_spread("of_ddp", 5, 2, of_ddp(c));
    bench_number("step_ms", 0, 0, run->step_ms);
    bench_number("params", 7, 1, run->params);
    bench_number("grads", 7, 1, run->grads);
    bench_number("optimizer", 7, 1, run->optimizer);
    bench_number("buffers", 7, 1, run->buffers);
    bench_number("activations", 7, 1, run->activations + run->activation_grads);
    bench_number("process", 7, 1, run->resident);
    bench_number("sent", 7, 2, run->sent_mib);
    bench_number("layout", 7, 2, run->planned_mib);
    bench_number("theory", 7, 2, theory_mib(c));
    bench_number("exposed_ms", 7, 2, run->exposed_ms);
    bench_end(same_losses(run, &configs[c->base].run, c->same_bits ? 0 : 1e-2) &&
              (run->steps < 10 || learned(run)));
}

/* Print the gain and the price of checkpointing, and the gain of bf16. */
static void print_ratios(void)
{
    for (int i = 0; i < config_count && !bench.json; i++) {
        const config *c = &configs[i], *base = &configs[c->base];
        const spread ratio = of_ddp(c);
        if (strstr(c->name, "checkpoint"))
            printf("\n%s, %d ranks: activation checkpointing saves %.0f %% of %.1f MiB of "
                   "activations for %.0f %% more time\n",
                   models[c->model], c->ranks,
                   100 * (1 - c->run.activations / base->run.activations), base->run.activations,
                   100 * (1 / ratio.median - 1));
        if (strstr(c->name, "bf16"))
            printf("%s, %d ranks: bf16 gives %.2f times the tokens/s of fp32 (%.2f to %.2f)\n",
                   models[c->model], c->ranks, ratio.median, ratio.min, ratio.max);
    }
}

static const flag flag_table[] = {
    {"--models", 'W', &opt.models, 0, 0, "baby, or several of", models},
    {"--ranks", 'I', &opt.ranks, 1, DTRAIN_MAX_RANKS, "numbers of ranks: 1,2", NULL},
    {"--program", 's', &opt.program, 0, 0, "the trainer", NULL},
    {"--flags", 's', &opt.flags, 0, 0, "more flags of the trainer", NULL},
    {"--threads", 'i', &opt.threads, 1, 1024, "of a rank", NULL},
    {"--steps", 'i', &opt.steps, 4, BENCH_MOST, "of each run", NULL},
    {"--rounds", 'i', &opt.rounds, 1, MAX_ROUNDS, "of all runs", NULL},
    BENCH_FLAGS};

int main(int argc, char **argv)
{
    if (is_quick(argc, argv)) {
        const flag_list few = {2, {2, 4}};
        opt.models.items[0] = 0;
        opt.ranks = few;
        opt.steps = 5;
    }
    bench_start("bench_strategies", "speed, memory and bytes of every strategy", flag_table,
                sizeof flag_table / sizeof *flag_table, argc, argv);
    for (long m = 0; m < opt.models.count; m++)
        for (long r = 0; r < opt.ranks.count; r++)
            add_ranks(opt.models.items[m], opt.ranks.items[r], r + 1 == opt.ranks.count);
    for (int round = 0; round < opt.rounds; round++)
        for (int i = 0; i < config_count; i++)
            if (run_config(&configs[i], round)) return 1;
    bench_title("train_gpt, %ld threads a rank (%s), %ld steps, %ld rounds; MiB of rank 0",
                opt.threads, bench_kernels(false), opt.steps, opt.rounds);
    for (int i = 0; i < config_count; i++) report(&configs[i]);
    print_ratios();
    return bench.wrong > 0;
}
