/* bench_strategies.c: train_gpt and resnet_cifar under every strategy, and PyTorch beside them: what each one costs
 * and saves.
 *
 *   run:     make bench-strategies, or build/bench/bench_strategies --models baby,resnet20 --ranks 1,2,4,8
 *            build/bench/bench_strategies --models baby,gpt2 --ranks 2 --steps 12 --rounds 5 --log FILE
 *            PYTHON=/opt/torch/bin/python build/bench/bench_strategies --svg strategies
 *
 * Every round runs each configuration once, one after the other (A B C A B C ...): the machine's drift
 * then meets all alike, and ratios are taken round by round. A run's figure is the median over its
 * steps without the first two. Memory and bytes are MiB of rank 0. Batches are equal a rank: more ranks, more samples.
 *
 *   samples/s    of all ranks: median over rounds (min to max); a sample is a sequence of tokens or an image
 *   of_ddp       samples/s over those of dtrain's DDP in the same round: median over rounds
 *   step_ms      median over the steps of the last round
 *   params ...   as planned: parameters, gradients, optimizer state, buffers of gathered and reduced
 *                units, activations with their gradients; predicted: all of it with the process itself
 *   process      held by the process at the end, in proportion where pages are shared; peak: the largest resident
 *                set, shared pages counted whole. PyTorch's process holds its libraries, too; of what it keeps
 *                between steps, params, grads and optimizer are counted tensor by tensor
 *   sent         by a rank in a step, counted by the communicator; of PyTorch by the loopback interface, which
 *                gloo uses
 *   theory       2(N-1)/N P with whole or kept parameters, 3(N-1)/N P with sharded ones, for P parameters of 4
 *                bytes. HYBRID_SHARD with nodes of G: the latter for G ranks, and 2(M-1)/M P/G across
 *                the M = N/G nodes. Sharded kinds may stay below: what backward needs first is still there
 *                Over a tensor axis: what every layer sends (tensor_mib), and 2(M-1)/M P/2 for M replicas
 *   exposed      ms of a step in which a rank waited for communication
 *   loss         of the last step; PyTorch begins with other weights and draws other batches of the same data
 *   correct      losses to the bit those of DDP, step by step; for HYBRID_SHARD and bf16 within 1e-2, for bf16
 *                of ResNet-20, whose rate of 0.1 lets differences grow, within 0.1 in the first five steps; and
 *                the loss has fallen, in runs of 10 steps and more. PyTorch: not compared
 *
 * Beside the strategies: DDP over a tensor axis of two ranks, with and without sequence parallelism, at the same
 * samples of all ranks (twice as many a rank); activation checkpointing and bf16, each against plain DDP on the most
 * ranks. PyTorch's rows are DDP and, where it has fully_shard, FSDP2 (torch_strategies.py), by --python, or PYTHON of
 * the environment, or python3.
 *
 * --svg NAME draws NAME-memory.svg, what a rank holds by class on the most ranks (PyTorch's stand beside those that
 * are kept between steps, which alone are counted of them), and NAME-scaling.svg. */
#include "bench.h"
#include "plot.h"
#include "train_run.h"

enum { MAX_CONFIGS = 128, MAX_ROUNDS = 64 };
enum { IMAGES = 3 }; /* the place of resnet20 below */

typedef struct config {
    const char *name, *flags;
    int model, ranks, node; /* node: ranks of one, HYBRID_SHARD; else 0 */
    int tensor;             /* ranks of a tensor axis; 0: none */
    bool same_bits;
    const char *peer; /* PyTorch's strategy; NULL: dtrain's */
    int base;         /* the DDP run it is compared with */

    train_run run; /* the last round */
    double loss, rate[MAX_ROUNDS];
} config;

static const char *const models[] = {"tiny", "baby", "gpt2", "resnet20", NULL};

static struct options {
    const char *program, *images, *flags, *data, *cifar, *python, *svg;
    flag_list models, ranks;
    long steps, rounds, threads, batch;
} opt = {.program = "build/train_gpt",
         .images = "build/resnet_cifar",
         .flags = "",
         .data = "dtrain.h",
         .models = {2, {1, IMAGES}},
         .ranks = {2, {1, 2}},
         .steps = 8,
         .rounds = 1,
         .threads = 1};

static config configs[MAX_CONFIGS];
static int config_count;
static char peers[128]; /* what PyTorch is there, and what it has; empty: none */

/* ---- configurations ---- */

static int add(const char *name, const char *flags, long model, long ranks, bool same_bits,
               int base)
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
    c->same_bits = same_bits;
    c->base = base < 0 ? config_count : base;
    return config_count++;
}

static void add_peer(const char *name, const char *strategy, long model, long ranks, int base)
{
    char word[16];
    snprintf(word, sizeof word, " %s", strategy);
    if (!strstr(peers, word)) return;
    configs[add(name, "", model, ranks, false, base)].peer = strategy;
}

static void add_ranks(long model, long ranks, bool last)
{
    const bool gpt = model != IMAGES;
    const int base = add("DDP", "ddp", model, ranks, true, -1);
    if (ranks > 1) {
        add("ZERO1", "zero1", model, ranks, true, base);
        add("SHARD_GRAD_OP", "shard_grad_op", model, ranks, true, base);
        add("FULL_SHARD", "full_shard", model, ranks, true, base);
        if (gpt)
            add("FULL_SHARD, kept", "full_shard --reshard-after-forward 0", model, ranks, true,
                base);
        add("ZERO3", "zero3", model, ranks, true, base);
    }
    if (gpt && ranks >= 4 && ranks % 2 == 0)
        configs[add("HYBRID_SHARD, 2", "hybrid_shard --node-size 2", model, ranks, false, base)]
            .node = 2;
    if (gpt && ranks % 2 == 0) {
        configs[add("DDP, tensor 2", "ddp --tensor 2", model, ranks, false, base)].tensor = 2;
        configs[add("DDP, tensor 2, SP", "ddp --tensor 2 --sequence-parallel", model, ranks, false,
                    base)]
            .tensor = 2;
    }
    if (last && gpt)
        add("DDP, checkpoint", "ddp --activation-checkpointing 1", model, ranks, true, base);
    if (last) add("DDP, bf16", "ddp --precision bf16", model, ranks, false, base);
    add_peer("PyTorch DDP", "ddp", model, ranks, base);
    add_peer("PyTorch FSDP2", "fsdp2", model, ranks, base);
}

/* Ask what PyTorch is there; say when there is none. */
static void find_peers(void)
{
    char command[512];
    if (!opt.python) opt.python = getenv("PYTHON");
    if (!opt.python) opt.python = "python3";
    snprintf(command, sizeof command, "%s bench/torch_strategies.py --probe 2>&1", opt.python);
    if (!*opt.python || capture(command, peers, sizeof peers) || strncmp(peers, "torch ", 6) != 0) {
        if (!bench.json)
            printf("no rows of PyTorch: %s\n", *opt.python ? peers : "--python is empty");
        peers[0] = 0;
    }
    peers[strcspn(peers, "\n")] = 0;
    if (*peers && !strstr(peers, " fsdp2") && !bench.json)
        printf("no rows of FSDP2: %s has no fully_shard\n", peers);
}

/* ---- runs ---- */

static int run_dtrain(config *c)
{
    char batch[32] = "", same[32] = "", data[512] = "";
    if (opt.batch) snprintf(batch, sizeof batch, "--batch %ld", opt.batch);
    if (c->tensor)
        snprintf(same, sizeof same, "--batch %d", c->tensor * configs[c->base].run.batch);
    if (c->model != IMAGES)
        return train(opt.program, &c->run,
                     "--model %s --data %s --ranks %d --threads %ld --steps %ld --warmup 2 "
                     "--lr 3e-4 --eval-batches 0 --strategy %s %s %s %s",
                     models[c->model], opt.data, c->ranks, opt.threads, opt.steps, c->flags, batch,
                     opt.flags, same);
    if (opt.cifar) snprintf(data, sizeof data, "--data %s", opt.cifar);
    c->run.batch = opt.batch ? (int)opt.batch : 32;
    const int images = c->run.batch;
    const int failed = run_trainer(opt.images, &c->run,
                                   "%s --ranks %d --threads %ld --steps %ld --batch %d "
                                   "--strategy %s",
                                   data, c->ranks, opt.threads, opt.steps, images, c->flags);
    c->run.batch = images;
    return failed;
}

/* Run PyTorch with the model and batch of the DDP run before it. */
static int run_peer(config *c)
{
    static char text[1 << 16];
    static int runs;
    char command[1024], model[256];
    const train_run *base = &configs[c->base].run;
    snprintf(model, sizeof model,
             "--model gpt --layers %d --heads %d --channels %d --seq %d --vocab %d", base->layers,
             base->heads, base->channels, base->sequence, base->vocab);
    snprintf(command, sizeof command,
             "OMP_WAIT_POLICY=passive %s bench/torch_strategies.py %s --strategy %s --ranks %d "
             "--threads %ld --steps %ld --batch %d --port %d %s%s 2>&1",
             opt.python, c->model == IMAGES ? "--model resnet20" : model, c->peer, c->ranks,
             opt.threads, opt.steps, base->batch, 20000 + ((int)getpid() + runs++) % 20000,
             c->model != IMAGES || opt.cifar ? "--data " : "",
             c->model != IMAGES ? opt.data
             : opt.cifar        ? opt.cifar
                                : "");
    if (capture(command, text, sizeof text))
        return fprintf(stderr, "failed: %s\n%s", command, text), 1;
    train_run *run = &c->run;
    run->batch = base->batch;
    run->parameters = number_after(text, "parameters ", NAN);
    run->rate = number_after(text, "samples_per_second ", NAN);
    run->step_ms = number_after(text, "step_ms ", NAN);
    run->sent_mib = number_after(text, "sent_mib ", NAN);
    run->params = number_after(text, "params_mib ", NAN);
    run->grads = number_after(text, "grads_mib ", NAN);
    run->optimizer = number_after(text, "optimizer_mib ", NAN);
    run->resident = number_after(text, "held_mib ", NAN);
    run->peak = number_after(text, "peak_mib ", NAN);
    run->buffers = run->activations = run->activation_grads = NAN;
    run->predicted = run->exposed_ms = NAN;
    c->loss = number_after(text, "\nloss ", NAN);
    return 0;
}

static int run_config(config *c, int round)
{
    const int failed = c->peer ? run_peer(c) : run_dtrain(c);
    if (failed) return failed;
    c->rate[round] = c->run.rate / (c->peer ? 1 : c->run.sequence);
    if (!c->peer) c->loss = c->run.losses[c->run.steps - 1];
    return 0;
}

/* ---- report ---- */

/* Four all-reduces of (rows, channels) a block, one behind the embedding and one before the head; three floats a row
 * in the loss. Sequence parallelism sends each all-reduce as a reduce-scatter and an all-gather, and gathers what the
 * products of the weights read once more in backward, and adds up the gradients of norms, positions and biases that are
 * whole. Replicas average what a rank has: a half of what is cut. */
static double tensor_mib(const config *c)
{
    const train_run *run = &c->run;
    const double t = c->tensor, d = c->ranks / t, rows = (double)run->batch * run->sequence;
    const double layer = rows * run->channels * (t - 1) / t;
    const bool gathers = strstr(c->flags, "sequence-parallel") != NULL;
    double sent = 2 * (4 * run->layers + 2) * layer + 3 * rows * 2 * (t - 1) / t;
    const double whole = (6.0 * run->layers + 2 + run->sequence) * run->channels;
    if (gathers) sent += (2 * run->layers + 1) * layer + 2 * (t - 1) / t * whole;
    sent += 2 * (d - 1) / d * run->parameters / t;
    return 4 * sent / 1048576;
}

static double theory_mib(const config *c)
{
    const double n = c->ranks, g = c->node ? c->node : n, nodes = n / g;
    const bool kept = strstr(c->flags, "forward 0") != NULL;
    const bool sharded = strstr(c->flags, "full_shard") || strstr(c->flags, "zero3") || c->node ||
                         (c->peer && strcmp(c->peer, "fsdp2") == 0);
    double sent = (sharded && !kept ? 3 : 2) * (g - 1) / g * c->run.parameters;
    if (c->tensor) return tensor_mib(c);
    if (c->node) sent += 2 * (nodes - 1) / nodes * c->run.parameters / g;
    return 4 * sent / 1048576;
}

static spread of_ddp(const config *c)
{
    return ratios_of(c->rate, configs[c->base].rate, (int)opt.rounds, 1);
}

static double activations_of(const train_run *run)
{
    return run->activations + run->activation_grads;
}

static bool right_losses(const config *c)
{
    train_run few = c->run, base = configs[c->base].run;
    if (c->same_bits) return same_losses(&c->run, &base, 0);
    if (c->model != IMAGES) return same_losses(&c->run, &base, 1e-2);
    few.steps = base.steps = base.steps < 5 ? base.steps : 5;
    return same_losses(&few, &base, 0.1);
}

static void report(const config *c)
{
    const train_run *run = &c->run;
    const spread ratio = of_ddp(c);
    bench_begin("strategies");
    bench_string("model", -8, models[c->model]);
    bench_number("ranks", 5, 0, c->ranks);
    bench_number("threads", 0, 0, (double)opt.threads);
    bench_number("batch", 0, 0, run->batch);
    bench_string("strategy", -17, c->name);
    bench_spread("samples/s", 8, 1, spread_of(c->rate, (int)opt.rounds));
    bench_number("of_ddp", 6, 2, ratio.median);
    bench_number("of_ddp_min", 0, 2, ratio.min);
    bench_number("of_ddp_max", 0, 2, ratio.max);
    bench_number("step_ms", 8, 1, run->step_ms);
    bench_number("params", 7, 1, run->params);
    bench_number("grads", 7, 1, run->grads);
    bench_number("optimizer", 7, 1, run->optimizer);
    bench_number("buffers", 7, 1, run->buffers);
    bench_number("activations", 7, 1, activations_of(run));
    bench_number("predicted", 7, 1, run->predicted);
    bench_number("process", 7, 1, run->resident);
    bench_number("peak", 7, 1, run->peak);
    bench_number("sent", 7, 2, run->sent_mib);
    bench_number("theory", 7, 2, theory_mib(c));
    bench_number("exposed_ms", 7, 2, run->exposed_ms);
    bench_number("loss", 7, 4, c->loss);
    if (c->peer) bench_end(-1);
    else bench_end(right_losses(c) && (run->steps < 10 || learned(run)));
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
            printf("%s, %d ranks: bf16 gives %.2f times the samples/s of fp32 (%.2f to %.2f)\n",
                   models[c->model], c->ranks, ratio.median, ratio.min, ratio.max);
    }
}

/* ---- pictures ---- */

/* Colours that differ in print and for the colour-blind (Okabe and Ito), in the order of a bar's pieces. */
static const struct {
    const char *name, *colour;
} classes[] = {{"parameters", "#0072b2"},      {"gradients", "#56b4e9"},
               {"optimizer state", "#009e73"}, {"activations", "#e69f00"},
               {"communication", "#d55e00"},   {"the process itself", "#999999"}};
enum { CLASSES = sizeof classes / sizeof classes[0], KEPT = 3 }; /* KEPT: between steps */

/* Return a step of a linear axis up to `most` that makes about five lines: 1, 2 or 5 times a power of ten. */
static double round_step(double most)
{
    const double power = pow(10, floor(log10(most / 5)));
    const double digit = most / 5 / power;
    return power * (digit <= 1 ? 1 : digit <= 2 ? 2 : digit <= 5 ? 5 : 10);
}

static void scale_axis(plot *p, double most)
{
    p->y_low = 0;
    p->y_step = round_step(most);
    p->y_high = p->y_step * ceil(most / p->y_step);
}

/* Draw the first `shown` classes of a run; only with all of them there is something to compare the process with. */
static void draw_bar(const plot *p, int place, int places, const config *c, int shown)
{
    const train_run *run = &c->run;
    const double known =
        run->params + run->grads + run->optimizer + activations_of(run) + run->buffers;
    const double pieces[CLASSES] = {run->params,         run->grads,   run->optimizer,
                                    activations_of(run), run->buffers, run->predicted - known};
    double at = 0;
    for (int i = 0; i < shown; i++) {
        const double piece = fmax(pieces[i], 0);
        plot_bar(p, classes[i].colour, place, places, at, at + piece, classes[i].name);
        at += piece;
    }
    if (shown == CLASSES) plot_bar_mark(p, place, places, run->resident, "measured");
}

/* Whether a run is one of the bars, and of the curves: the strategies alone. */
static bool drawn(const config *c, long model)
{
    return c->model == model && !strchr(c->name, ',');
}

/* Open NAME-KIND.svg, or end the program. */
static void open_picture(plot *p, const char *kind, const char *title, const char *x, const char *y,
                         int panels)
{
    char path[4096];
    snprintf(path, sizeof path, "%s-%s.svg", opt.svg, kind);
    p->own_axes = true;
    if (plot_open(p, path, title, x, y, panels)) return;
    fprintf(stderr, "bench_strategies: --svg: %s cannot be written: %s\n", path, strerror(errno));
    exit(1);
}

static void close_picture(plot *p)
{
    if (plot_close(p)) return;
    fprintf(stderr, "bench_strategies: --svg: a picture is incomplete\n");
    exit(1);
}

/* Draw the first `shown` classes of the runs of a model: of PyTorch's, too, where they are known of both. */
static void draw_memory_panel(plot *p, long model, long ranks, int shown)
{
    const config *bars[MAX_CONFIGS];
    const char *names[MAX_CONFIGS];
    char title[128];
    int count = 0;
    double most = 0;
    for (int i = 0; i < config_count; i++) {
        const config *c = &configs[i];
        const train_run *run = &c->run;
        if (!drawn(c, model) || c->ranks != ranks || (c->peer && shown > KEPT)) continue;
        bars[count] = c;
        names[count++] = c->name;
        if (shown > KEPT) most = fmax(most, fmax(run->resident, run->predicted));
        else most = fmax(most, run->params + run->grads + run->optimizer);
    }
    scale_axis(p, most);
    snprintf(title, sizeof title, "%s, %d samples a rank: %s", models[model], bars[0]->run.batch,
             shown > KEPT ? "in a step" : "between steps");
    plot_bar_panel(p, title, names, count);
    for (int i = 0; i < count; i++) draw_bar(p, i, count, bars[i], shown);
}

/* Draw what a rank holds, by class, on the most ranks; beside PyTorch's what is kept between steps, as that alone is
 * counted of it. */
static void draw_memory(void)
{
    const long ranks = opt.ranks.items[opt.ranks.count - 1];
    const int panels = (int)opt.models.count * (*peers ? 2 : 1);
    plot p = {.y_step = 1, .legend_lines = CLASSES + 1, .below = 96};
    char title[128];
    snprintf(title, sizeof title, "Memory of one rank of %ld, by class%s", ranks,
             *peers ? "; of PyTorch what is kept between steps alone is counted" : "");
    open_picture(&p, "memory", title, "", "MiB", panels);
    for (long m = 0; m < opt.models.count; m++) {
        if (*peers) draw_memory_panel(&p, opt.models.items[m], ranks, KEPT);
        draw_memory_panel(&p, opt.models.items[m], ranks, CLASSES);
    }
    for (int i = CLASSES - 1; i >= 0; i--) plot_bar_legend(&p, classes[i].colour, classes[i].name);
    plot_legend(&p, 6, 0, "held by the process, measured");
    close_picture(&p);
}

/* Draw the samples/s of each strategy over the ranks. */
static void draw_scaling(void)
{
    static const char *const lines[] = {"DDP",   "ZERO1",       "SHARD_GRAD_OP", "FULL_SHARD",
                                        "ZERO3", "PyTorch DDP", "PyTorch FSDP2"};
    enum { LINES = sizeof lines / sizeof lines[0] };
    double marks[FLAGS_LIST], x[FLAGS_LIST], y[FLAGS_LIST];
    const int count = (int)opt.ranks.count;
    for (int i = 0; i < count; i++) marks[i] = (double)opt.ranks.items[i];
    plot p = {.x_low = marks[0], .x_high = marks[count - 1], .y_step = 1, .legend_lines = LINES};
    open_picture(&p, "scaling", "Samples a second of all ranks, equal batch a rank", "ranks",
                 "samples/s", (int)opt.models.count);
    for (long m = 0; m < opt.models.count; m++) {
        const long model = opt.models.items[m];
        double most = 0;
        for (int i = 0; i < config_count; i++)
            if (drawn(&configs[i], model))
                most = fmax(most, median(configs[i].rate, (int)opt.rounds));
        scale_axis(&p, most);
        plot_panel(&p, models[model], marks, count);
        for (int l = 0; l < LINES; l++) {
            int points = 0;
            for (int i = 0; i < config_count; i++) {
                const config *c = &configs[i];
                const bool start = l < 5 && c->ranks == 1 && strcmp(c->name, "DDP") == 0;
                if (c->model != model || (strcmp(c->name, lines[l]) != 0 && !start)) continue;
                x[points] = c->ranks;
                y[points++] = median(c->rate, (int)opt.rounds);
            }
            plot_line(&p, l, l < 5 ? 0 : 1, x, y, points);
            for (int i = 0; i < points; i++) plot_point(&p, l, x[i], y[i], lines[l]);
        }
    }
    for (int l = 0; l < LINES; l++)
        if (l < 5 || *peers) plot_legend(&p, l, l < 5 ? 0 : 1, lines[l]);
    close_picture(&p);
}

static const flag flag_table[] = {
    {"--models", 'W', &opt.models, 0, 0, "baby,resnet20, or several of", models},
    {"--ranks", 'I', &opt.ranks, 1, DTRAIN_MAX_RANKS, "numbers of ranks: 1,2", NULL},
    {"--program", 's', &opt.program, 0, 0, "the trainer of GPTs", NULL},
    {"--images", 's', &opt.images, 0, 0, "the trainer of ResNet-20", NULL},
    {"--flags", 's', &opt.flags, 0, 0, "more flags of the trainer of GPTs", NULL},
    {"--data", 's', &opt.data, 0, 0, "text that GPTs learn", NULL},
    {"--cifar", 's', &opt.cifar, 0, 0, "folder of CIFAR-10; without it images are drawn", NULL},
    {"--python", 's', &opt.python, 0, 0, "with PyTorch; empty: no rows of PyTorch", NULL},
    {"--svg", 's', &opt.svg, 0, 0, "draw NAME-memory.svg and NAME-scaling.svg", NULL},
    {"--threads", 'i', &opt.threads, 1, 1024, "of a rank", NULL},
    {"--batch", 'i', &opt.batch, 1, 1e6, "samples of a rank; default: the preset's, 32 images",
     NULL},
    {"--steps", 'i', &opt.steps, 4, BENCH_MOST, "of each run", NULL},
    {"--rounds", 'i', &opt.rounds, 1, MAX_ROUNDS, "of all runs", NULL},
    BENCH_FLAGS};

int main(int argc, char **argv)
{
    if (is_quick(argc, argv)) {
        const flag_list few = {2, {2, 4}}, one = {1, {0}};
        opt.models = one;
        opt.ranks = few;
        opt.steps = 5;
        opt.python = "";
    }
    bench_start("bench_strategies", "speed, memory and bytes of every strategy", flag_table,
                sizeof flag_table / sizeof *flag_table, argc, argv);
    find_peers();
    for (long m = 0; m < opt.models.count; m++)
        for (long r = 0; r < opt.ranks.count; r++)
            add_ranks(opt.models.items[m], opt.ranks.items[r], r + 1 == opt.ranks.count);
    for (int round = 0; round < opt.rounds; round++)
        for (int i = 0; i < config_count; i++)
            if (run_config(&configs[i], round)) return 1;
    bench_title("%ld threads a rank (%s), %ld steps, %ld rounds; MiB of rank 0%s%s", opt.threads,
                bench_kernels(false), opt.steps, opt.rounds, *peers ? "; " : "", peers);
    for (int i = 0; i < config_count; i++) report(&configs[i]);
    print_ratios();
    if (opt.svg) draw_memory(), draw_scaling();
    return bench.wrong > 0;
}
