/* bench_strategies.c: what each strategy costs and saves: train_gpt under all of them.
 *
 *   run:     make bench-strategies, or build/bench/bench_strategies --models baby --ranks 1,2,4,8
 *            build/bench/bench_strategies --models baby,gpt2 --ranks 2 --steps 12 --rounds 5 --json
 *
 * Every round runs each configuration once, one after the other (A B C A B C ...): the machine's drift
 * then meets all alike, and ratios are taken round by round. A run's figure is the median over its
 * steps without the first two.
 *
 *   tokens/s     of all ranks; median over rounds, least and most
 *   of DDP       the same over DDP's in the same round: median over rounds
 *   MiB          of a rank, as planned: parameters, gradients, optimizer state, buffers of gathered and
 *                reduced units, activations with their gradients; then what the process held in the end
 *   sent         MiB a rank has sent per step, counted by the communicator
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
#include "dtrain.h"

enum { MAX_CONFIGS = 96, MAX_ROUNDS = 64, MAX_LIST = 8 };

typedef struct config {
    const char *name, *flags;
    int model, ranks, node; /* node: ranks of one, HYBRID_SHARD; else 0 */
    bool same_bits;
    int base; /* the DDP run it is compared with */

    bench_log run; /* the last round */
    double rate[MAX_ROUNDS], planned_bytes, elements;
    double params, grads, optimizer, buffers, activations, activation_grads, resident; /* MiB */
    bool correct;
} config;

static struct options {
    const char *program, *models, *ranks, *flags;
    int steps, rounds, threads, json;
} opt = {"build/train_gpt", "baby", "1,2", "", 8, 1, 1, 0};

static const char *const models[] = {"tiny", "baby", "gpt2"};
enum { MODELS = sizeof models / sizeof *models };

static config configs[MAX_CONFIGS];
static int config_count;

/* ---- numbers ---- */

/* Over rounds, of c's rate over base's (NULL: of c's rate). */
static spread rates(const config *c, const config *base)
{
    double values[MAX_ROUNDS] = {0};
    for (int i = 0; i < opt.rounds; i++) values[i] = c->rate[i] / (base ? base->rate[i] : 1);
    return spread_of(values, opt.rounds);
}

static double theory_mib(const config *c)
{
    const double n = c->ranks, g = c->node ? c->node : n, nodes = n / g;
    const bool kept = strstr(c->flags, "forward 0") != NULL;
    const bool sharded = strstr(c->flags, "full_shard") || strstr(c->flags, "zero3") || c->node;
    double sent = (sharded && !kept ? 3 : 2) * (g - 1) / g * c->elements;
    if (c->node) sent += 2 * (nodes - 1) / nodes * c->elements / g;
    return 4 * sent / 1048576;
}

/* ---- running ---- */

/* From the lines "model", "strategy", "memory  a rank will need" and "memory" of the end. */
static void read_output(const char *text, config *c)
{
    const char *plan = strstr(text, "a rank will need"), *end = strstr(text, "\n  memory ");
    c->planned_bytes = number_after(text, "a rank sends ", 0);
    c->elements = number_after(text, "M parameters (", 0);
    c->params = number_after(plan, "parameters ", 0);
    c->grads = number_after(plan, "gradients ", 0);
    c->optimizer = number_after(plan, "AdamW ", 0);
    c->buffers = number_after(plan, "buffers ", 0);
    c->activations = number_after(plan, "activations ", 0);
    c->activation_grads = number_after(plan ? strstr(plan, "activations ") : NULL, "+ ", 0);
    c->resident = number_after(end, "memory", 0);
}

static int run_config(config *c, int round)
{
    static char text[1 << 20];
    char command[1024], log[64];
    snprintf(log, sizeof log, "/tmp/bench_strategies.%ld.jsonl", (long)getpid());
    snprintf(
        command, sizeof command,
        "%s --model %s --ranks %d --threads %d --steps %d --warmup 2 --lr 3e-4 --eval-batches 0 "
        "--sample 0 --log %s %s %s",
        opt.program, models[c->model], c->ranks, opt.threads, opt.steps, log, c->flags, opt.flags);
    if (capture(command, text, sizeof text) || read_log(fopen(log, "r"), &c->run)) {
        fprintf(stderr, "bench_strategies: failed: %s\n", command);
        return 1;
    }
    remove(log);
    c->rate[round] = c->run.rate;
    read_output(text, c);
    return 0;
}

/* ---- configurations ---- */

static int add(const char *name, const char *flags, int model, int ranks, int node, bool same_bits,
               int base)
{
    config *c = &configs[config_count];
    if (config_count == MAX_CONFIGS) return 0;
    c->name = name;
    c->flags = flags;
    c->model = model;
    c->ranks = ranks;
    c->node = node;
    c->same_bits = same_bits;
    c->base = base < 0 ? config_count : base;
    return config_count++;
}

static void add_ranks(int model, int ranks, bool last)
{
    const int base = add("DDP", "--strategy ddp", model, ranks, 0, true, -1);
    if (ranks > 1) {
        add("ZERO1", "--strategy zero1", model, ranks, 0, true, base);
        add("SHARD_GRAD_OP", "--strategy shard_grad_op", model, ranks, 0, true, base);
        add("FULL_SHARD", "--strategy full_shard", model, ranks, 0, true, base);
        add("FULL_SHARD, kept", "--strategy full_shard --reshard-after-forward 0", model, ranks, 0,
            true, base);
        add("ZERO3", "--strategy zero3", model, ranks, 0, true, base);
    }
    if (ranks >= 4 && ranks % 2 == 0)
        add("HYBRID_SHARD, 2", "--strategy hybrid_shard --node-size 2", model, ranks, 2, false,
            base);
    if (!last) return;
    add("DDP, checkpoint", "--strategy ddp --activation-checkpointing 1", model, ranks, 0, true,
        base);
    add("DDP, bf16", "--strategy ddp --precision bf16", model, ranks, 0, false, base);
}

/* Numbers or names between commas; the count, or -1. */
static int split(const char *text, char parts[MAX_LIST][16])
{
    int count = 0;
    while (*text) {
        const size_t length = strcspn(text, ",");
        if (length == 0 || length > 15 || count == MAX_LIST) return -1;
        memcpy(parts[count], text, length);
        parts[count++][length] = 0;
        text += length + (text[length] == ',');
    }
    return count > 0 ? count : -1;
}

static int add_configs(void)
{
    char names[MAX_LIST][16], numbers[MAX_LIST][16];
    const int name_count = split(opt.models, names), number_count = split(opt.ranks, numbers);
    for (int i = 0; i < name_count; i++) {
        int model = 0;
        while (model < MODELS && strcmp(names[i], models[model]) != 0) model++;
        for (int k = 0; k < number_count; k++) {
            const int ranks = atoi(numbers[k]);
            if (model == MODELS || ranks < 1 || ranks > DTRAIN_MAX_RANKS) return 1;
            add_ranks(model, ranks, k + 1 == number_count);
        }
    }
    return name_count < 0 || number_count < 0;
}

/* ---- report ---- */

static void judge(config *c)
{
    const config *base = &configs[c->base];
    c->correct = c->run.steps == base->run.steps && (c->run.steps < 10 || learned(&c->run));
    for (int i = 0; i < c->run.steps; i++) {
        const double difference = fabs(c->run.losses[i] - base->run.losses[i]);
        if (!(difference <= (c->same_bits ? 0 : 1e-2))) c->correct = false;
    }
}

static void report_json(const config *c)
{
    const spread rate = rates(c, NULL), ratio = rates(c, &configs[c->base]);
    printf("{\"bench\": \"strategies\", \"model\": \"%s\", \"config\": \"%s\", \"ranks\": %d, "
           "\"threads\": %d, \"tokens_per_second\": %.6g, \"min\": %.6g, \"max\": %.6g, "
           "\"of_ddp\": %.4g, \"of_ddp_min\": %.4g, \"of_ddp_max\": %.4g, \"step_ms\": %.5g, "
           "\"params_mib\": %.1f, \"grads_mib\": %.1f, \"optimizer_mib\": %.1f, "
           "\"buffers_mib\": %.1f, \"activations_mib\": %.1f, \"activation_grads_mib\": %.1f, "
           "\"process_mib\": %.1f, \"sent_mib\": %.6g, \"layout_mib\": %.6g, "
           "\"theory_mib\": %.6g, \"exposed_ms\": %.4g, \"correct\": %s}\n",
           models[c->model], c->name, c->ranks, opt.threads, rate.median, rate.min, rate.max,
           ratio.median, ratio.min, ratio.max, c->run.step_ms, c->params, c->grads, c->optimizer,
           c->buffers, c->activations, c->activation_grads, c->resident, c->run.sent_mib,
           c->planned_bytes / 1048576, theory_mib(c), c->run.exposed_ms,
           c->correct ? "true" : "false");
}

static void report(const config *c)
{
    const spread rate = rates(c, NULL), ratio = rates(c, &configs[c->base]);
    printf("%-5s %5d  %-17s %9.0f %9.0f %9.0f %7.2f  %7.1f %7.1f %7.1f %7.1f %7.1f %8.1f  %8.2f "
           "%8.2f %8.2f  %7.2f  %s\n",
           models[c->model], c->ranks, c->name, rate.median, rate.min, rate.max, ratio.median,
           c->params, c->grads, c->optimizer, c->buffers, c->activations + c->activation_grads,
           c->resident, c->run.sent_mib, c->planned_bytes / 1048576, theory_mib(c),
           c->run.exposed_ms, c->correct ? "yes" : "NO");
}

static void print_heading(void)
{
    printf(
        "train_gpt, %d threads a rank (%s), %d steps, %d rounds; memory and bytes in MiB, of rank "
        "0\n\n%-5s %5s  %-17s %9s %9s %9s %7s  %7s %7s %7s %7s %7s %8s  %8s %8s %8s  %7s  %s\n",
        opt.threads, dtrain_cpu_kernel_name(), opt.steps, opt.rounds, "model", "ranks", "strategy",
        "tokens/s", "min", "max", "of DDP", "params", "grads", "optim", "buffers", "activ",
        "process", "sent", "layout", "theory", "exposed", "correct");
}

/* What checkpointing gains and costs, and what bf16 gains. */
static void print_ratios(void)
{
    for (int i = 0; i < config_count; i++) {
        const config *c = &configs[i], *base = &configs[c->base];
        const spread ratio = rates(c, base);
        if (strstr(c->name, "checkpoint"))
            printf("\n%s, %d ranks: activation checkpointing saves %.0f %% of %.1f MiB of "
                   "activations for %.0f %% more time\n",
                   models[c->model], c->ranks, 100 * (1 - c->activations / base->activations),
                   base->activations, 100 * (1 / ratio.median - 1));
        if (strstr(c->name, "bf16"))
            printf("%s, %d ranks: bf16 gives %.2f times the tokens/s of fp32 (%.2f to %.2f)\n",
                   models[c->model], c->ranks, ratio.median, ratio.min, ratio.max);
    }
}

/* ---- options ---- */

static const bench_option option_table[] = {
    {"--models", NULL, NULL, &opt.models, "of tiny, baby, gpt2, between commas; baby"},
    {"--ranks", NULL, NULL, &opt.ranks, "numbers of ranks, between commas; 1,2"},
    {"--program", NULL, NULL, &opt.program, "the trainer; build/train_gpt"},
    {"--flags", NULL, NULL, &opt.flags, "more flags of the trainer"},
    {"--threads", &opt.threads, NULL, NULL, "of a rank; 1"},
    {"--steps", &opt.steps, NULL, NULL, "of each run; 8"},
    {"--rounds", &opt.rounds, NULL, NULL, "1"},
};
enum { OPTIONS = sizeof option_table / sizeof *option_table };

static int parse(int argc, char **argv)
{
    if (bench_parse("bench_strategies", option_table, OPTIONS, &opt.json, argc, argv)) return 2;
    if (opt.steps < 4 || opt.steps > BENCH_STEPS || opt.rounds < 1 || opt.rounds > MAX_ROUNDS ||
        opt.threads < 1 || add_configs()) {
        fprintf(stderr,
                "bench_strategies: --steps takes 4 to %d, --rounds 1 to %d, --models and "
                "--ranks what --help says\n",
                BENCH_STEPS, MAX_ROUNDS);
        return 2;
    }
    return 0;
}

int main(int argc, char **argv)
{
    int bad = 0;
    if (argc > 1 && strcmp(argv[1], "--help") == 0)
        return bench_usage("bench_strategies: what each strategy costs and saves", option_table,
                           OPTIONS);
    if (parse(argc, argv)) return 2;
    for (int round = 0; round < opt.rounds; round++)
        for (int i = 0; i < config_count; i++)
            if (run_config(&configs[i], round)) return 1;
    if (!opt.json) print_heading();
    for (int i = 0; i < config_count; i++) {
        judge(&configs[i]);
        bad += !configs[i].correct;
        if (opt.json) report_json(&configs[i]);
        else report(&configs[i]);
    }
    if (!opt.json) print_ratios();
    return bad ? 1 : 0;
}
