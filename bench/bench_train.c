/* bench_train.c: training speed and memory of train_gpt, beside PyTorch and other rivals.
 *
 *   run:     make bench, or build/bench/bench_train --model baby --rounds 5 [--json]
 *            build/bench/bench_train --model gpt2 --peer "llm.c=sh bench/llmc.sh ../llm.c"
 *            build/cuda/bench_train --device cuda --model gpt2 --precision bf16
 *
 * Every round runs each configuration once, one after the other (A B C A B C ...): the machine's drift
 * then meets all alike, and ratios are taken round by round. A run's figure is the median over its
 * steps without the first two. A peer is a command that prints "tokens_per_second NUMBER"; it finds the
 * configuration in its environment: THREADS BATCH SEQ LAYERS HEADS CHANNELS VOCAB STEPS DEVICE PRECISION.
 * PyTorch is one when python3 has torch; on a GPU twice, in torch.compile's default mode and its slower search.
 * A line tells the figures of each run when it ends; the table comes behind the last.
 *
 *   tokens/s     of all ranks: median over rounds (min to max)
 *   GFLOP/s      (6 (12 L C^2 + V C) + 6 L C T) tokens/s: matrix products and causal attention, forward
 *                and backward; executed arithmetic is a little more
 *   of_gemm      GFLOP/s over threads (or GPUs) x gemm, the rate of one on a square product of 1024, on
 *                GPUs 8192, in the same precision, measured in this run
 *   mfu          on GPUs: the same FLOP/s over what the data sheet promises for dense products of that
 *                precision (--peak, in TFLOP/s, where the GPU is not in the table below)
 *   floor        tokens/s if nothing but that arithmetic ran at that rate
 *   correct      the loss starts at ln(V) and has fallen at the end of its last run */
#include "bench.h"
#include "train_run.h"

enum { MAX_CONFIGS = 16, MAX_ROUNDS = 64, MAX_PEERS = 4 };

typedef struct config {
    char name[64], flags[1024], peer[32]; /* peer: "" for our own; then flags is its command */
    long ranks, threads, batch;
    char note[128]; /* what a peer says of itself: the line that begins with its name and version */
    train_run run;  /* the last round */
    double rate[MAX_ROUNDS];
} config;

static const char *const models[] = {"tiny", "baby", "gpt2", NULL};

static struct options {
    const char *program, *device, *precision, *flags, *peer;
    long model, layers, heads, channels, seq, vocab, batch, steps, rounds, gemm, peak;
} opt = {.model = 1, .device = "cpu", .flags = "", .steps = 12, .rounds = 3};

static bool on_gpu;
static dtrain_device_info gpu;

static config configs[MAX_CONFIGS];
static int config_count;

/* ---- numbers ---- */

/* Return the data sheet's rate of dense products, in TFLOP/s; 0: unknown. */
static double nominal_peak(void)
{
    static const struct {
        const char *name;
        double bf16, tf32, fp32;
    } gpus[] = {{"H200", 989, 495, 67}, {"H100", 989, 495, 67}, {"A100", 312, 156, 19.5}};
    if (opt.peak) return (double)opt.peak;
    for (size_t i = 0; i < sizeof gpus / sizeof *gpus; i++)
        if (strstr(gpu.name, gpus[i].name))
            return strcmp(opt.precision, "bf16") == 0   ? gpus[i].bf16
                   : strcmp(opt.precision, "tf32") == 0 ? gpus[i].tf32
                                                        : gpus[i].fp32;
    return 0;
}

static dtrain_result time_gemm(dtrain_device *device, const dtrain_gemm_args *args, double *rates)
{
    int calls = on_gpu && opt.gemm > 1024 ? 20 : 1;
    dtrain_result result = DTRAIN_OK;
    for (int i = 0; i < 6 && result == DTRAIN_OK; i++) {
        double start = dtrain_seconds();
        for (int c = 0; c < calls && result == DTRAIN_OK; c++)
            result = device->ops->gemm(device, args);
        if (result == DTRAIN_OK) result = device->ops->synchronize(device);
        if (i > 0)
            rates[i - 1] = 2e-9 * calls * (double)args->m * (double)args->n * (double)args->k /
                           (dtrain_seconds() - start);
    }
    return result;
}

/* Fills x on the device with small numbers that are not all alike. */
static dtrain_result fill(dtrain_device *device, void *x, size_t count, bool half)
{
    size_t size = half ? 2 : 4;
    char *host = (char *)bench_alloc(count * size);
    for (size_t i = 0; i < count; i++) {
        float value = (float)(i * 2654435761u % 8191) / 4096 - 1;
        if (half) ((uint16_t *)(void *)host)[i] = dtrain_half_from_f32(DTRAIN_DTYPE_BF16, value);
        else ((float *)(void *)host)[i] = value;
    }
    const dtrain_result result =
        device->ops->copy(device, x, host, count * size, DTRAIN_COPY_HOST_TO_DEVICE);
    free(host);
    return result;
}

/* GFLOP/s of one thread's, or one GPU's, GEMM, median of five; 0 and a message when it fails. */
static double gemm_rate(const dtrain_device_ops *ops)
{
    size_t n = (size_t)opt.gemm, bytes = n * n * sizeof(float);
    bool half = strcmp(opt.precision, "bf16") == 0;
    dtrain_device_desc desc;
    dtrain_device *device = NULL;
    dtrain_gemm_args args;
    double rates[5] = {0};
    void *a = NULL, *b = NULL, *c = NULL;
    memset(&desc, 0, sizeof desc);
    memset(&args, 0, sizeof args);
    if (strcmp(opt.precision, "tf32") == 0) desc.math = DTRAIN_MATH_TF32;
    dtrain_result result = dtrain_device_create(ops, &desc, &device);
    if (result == DTRAIN_OK) result = dtrain_device_query(device, &gpu);
    if (result == DTRAIN_OK) result = ops->alloc(device, bytes, &a);
    if (result == DTRAIN_OK) result = ops->alloc(device, bytes, &b);
    if (result == DTRAIN_OK) result = ops->alloc(device, bytes, &c);
    if (result == DTRAIN_OK) result = fill(device, a, n * n, half);
    if (result == DTRAIN_OK) result = fill(device, b, n * n, half);
    args.m = args.n = args.k = args.lda = args.ldb = args.ldc = opt.gemm;
    args.alpha = 1;
    args.a_dtype = args.b_dtype = args.c_dtype = half ? DTRAIN_DTYPE_BF16 : DTRAIN_DTYPE_F32;
    args.a = a;
    args.b = b;
    args.c = c;
    if (result == DTRAIN_OK) result = time_gemm(device, &args, rates);
    if (result != DTRAIN_OK) fprintf(stderr, "bench_train: %s\n", dtrain_last_error());
    if (a) ops->free(device, a, bytes);
    if (b) ops->free(device, b, bytes);
    if (c) ops->free(device, c, bytes);
    dtrain_device_destroy(device);
    return result == DTRAIN_OK ? median(rates, 5) : 0;
}

static double flops_per_token(void)
{
    double l = (double)opt.layers, c = (double)opt.channels;
    return 6 * (12 * l * c * c + (double)opt.vocab * c) + 6 * l * c * (double)opt.seq;
}

/* ---- running ---- */

/* Tell a peer what to run. */
static void export_config(const config *c)
{
    const struct {
        const char *name;
        long value;
    } numbers[] = {{"THREADS", c->threads},    {"BATCH", c->batch},  {"SEQ", opt.seq},
                   {"LAYERS", opt.layers},     {"HEADS", opt.heads}, {"VOCAB", opt.vocab},
                   {"CHANNELS", opt.channels}, {"STEPS", opt.steps}};
    char text[32];
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        snprintf(text, sizeof text, "%ld", numbers[i].value);
        setenv(numbers[i].name, text, 1);
    }
    setenv("DEVICE", opt.device, 1);
    setenv("PRECISION", opt.precision, 1);
}

static int run_peer(config *c, int round)
{
    static char text[1 << 20];
    export_config(c);
    const int failed = capture(c->flags, text, sizeof text);
    c->rate[round] = number_after(text, "tokens_per_second ", 0);
    c->run.step_ms = number_after(text, "step_ms ", NAN);
    c->run.exposed_ms = c->run.resident = c->run.predicted = NAN;
    snprintf(c->note, sizeof c->note, "; %.*s", (int)strcspn(text, "\n"), text);
    if (failed || c->rate[round] <= 0) return fprintf(stderr, "failed: %s\n%s", c->flags, text), 1;
    return 0;
}

/* Run it, and report at once: who ends the benchmark early has the figures so far. */
static int run_config(config *c, int round)
{
    if (c->peer[0]) {
        if (run_peer(c, round)) c->rate[round] = 0, bench.wrong++; /* the others still count */
    } else {
        if (train(opt.program, &c->run, "%s", c->flags)) return 1;
        c->rate[round] = c->run.rate;
    }
    if (bench.json) return 0;
    printf("round %d of %ld: %s: %.0f tokens/s, %.2f ms a step%s\n", round + 1, opt.rounds, c->name,
           c->rate[round], c->run.step_ms, c->note);
    return 0;
}

/* ---- configurations ---- */

static config *add(long ranks, long threads, long batch)
{
    config *c = &configs[config_count++];
    c->ranks = ranks;
    c->threads = threads;
    c->batch = batch;
    return c;
}

static void add_ours(long ranks, long threads, long batch, bool graph)
{
    config *c = add(ranks, threads, batch);
    if (on_gpu)
        snprintf(c->name, sizeof c->name, "%ld GPU%s, %s%s", ranks, ranks == 1 ? "" : "s",
                 opt.precision, graph ? ", graph" : "");
    else
        snprintf(c->name, sizeof c->name, "%ld rank%s x %ld thread%s", ranks, ranks == 1 ? "" : "s",
                 threads, threads == 1 ? "" : "s");
    int used =
        snprintf(c->flags, sizeof c->flags,
                 "--model %s --layers %ld --heads %ld --channels %ld --seq %ld --vocab %ld --ranks "
                 "%ld --threads %ld --batch %ld --steps %ld --warmup 2 --lr 3e-4 --eval-every 0 "
                 "--eval-batches 0 %s",
                 models[opt.model], opt.layers, opt.heads, opt.channels, opt.seq, opt.vocab, ranks,
                 threads, batch, opt.steps, opt.flags);
    if (on_gpu)
        snprintf(c->flags + used, sizeof c->flags - (size_t)used, " --device %s --precision %s%s",
                 opt.device, opt.precision, graph ? " --graph" : "");
}

static void add_peer(const char *name, const char *command, long threads)
{
    config *c = add(1, threads, opt.batch);
    if (on_gpu) snprintf(c->name, sizeof c->name, "%s, %s", name, opt.precision);
    else
        snprintf(c->name, sizeof c->name, "%s, %ld thread%s", name, threads,
                 threads == 1 ? "" : "s");
    snprintf(c->peer, sizeof c->peer, "%s", name);
    snprintf(c->flags, sizeof c->flags, "%s", command);
}

static bool has_torch(void)
{
    const char *test =
        on_gpu ? "python3 -c 'import torch; assert torch.cuda.is_available()'"
               : "python3 -c 'from torch.nn.functional import scaled_dot_product_attention'";
    char command[128];
    snprintf(command, sizeof command, "%s >/dev/null 2>&1", test);
    if (system(command) == 0) return true;
    if (!bench.json)
        printf("PyTorch: python3 has no torch 2%s, skipped\n", on_gpu ? " that sees a GPU" : "");
    return false;
}

/* `cores` are threads to use, or GPUs. */
static void add_configs(const char *const *peers, int peer_count, long cores)
{
    static const char *const torch = "python3 bench/torch_peer.py";
    add_ours(1, 1, opt.batch, false);
    if (on_gpu) add_ours(1, 1, opt.batch, true);
    if (cores > 1 && !on_gpu) add_ours(1, cores, opt.batch, false);
    if (cores > 1) add_ours(cores, 1, opt.batch, false);
    if (cores > 1 && opt.batch % cores == 0) add_ours(cores, 1, opt.batch / cores, false);
    if (has_torch()) {
        add_peer("PyTorch", torch, 1);
        if (on_gpu)
            add_peer("PyTorch, max-autotune",
                     "python3 bench/torch_peer.py max-autotune-no-cudagraphs", 1);
        if (cores > 1 && !on_gpu) add_peer("PyTorch", torch, cores);
    }
    for (int i = 0; i < peer_count; i++) {
        const char *equals = strchr(peers[i], '=');
        char name[32];
        snprintf(name, sizeof name, "%.*s", (int)(equals - peers[i]), peers[i]);
        add_peer(name, equals + 1, cores);
    }
}

/* ---- report ---- */

static void report(const config *c, double peak)
{
    const spread rates = spread_of(c->rate, (int)opt.rounds);
    const double gflops = 1e-9 * flops_per_token() * rates.median, nominal = 1e3 * nominal_peak();
    bench_begin("train");
    bench_string("model", 0, models[opt.model]);
    bench_string("device", 0, on_gpu ? gpu.name : "cpu");
    bench_string("precision", 0, opt.precision);
    bench_number("seq", 0, 0, (double)opt.seq);
    bench_string("configuration", -22, c->name);
    bench_number("ranks", 0, 0, (double)c->ranks);
    bench_number("threads", 0, 0, (double)c->threads);
    bench_number("batch", 5, 0, (double)c->batch);
    bench_spread("tokens/s", 8, 0, rates);
    bench_number("step_ms", 8, 1, c->run.step_ms);
    bench_number("GFLOP/s", 8, 1, gflops);
    bench_number("of_gemm", 7, 3, gflops / (peak * (double)(c->ranks * c->threads)));
    bench_number("gemm", 0, 0, peak);
    bench_number("mfu", on_gpu ? 7 : 0, 3,
                 on_gpu && nominal > 0 ? gflops / (nominal * (double)c->ranks) : NAN);
    bench_number("exposed_ms", 8, 2, c->run.exposed_ms);
    bench_number("rank_mib", 8, 1, c->run.resident);
    bench_number("predicted", 8, 1, c->run.predicted);
    bench_end(c->peer[0]
                  ? -1
                  : fabs(c->run.losses[0] - log((double)opt.vocab)) < 0.5 && learned(&c->run));
}

/* Report the median over rounds of a's rate over b's in the same round, divided by `divisor`. */
static void ratio(const char *what, const config *a, const config *b, double divisor)
{
    bench_begin("train");
    bench_string("model", 0, models[opt.model]);
    bench_string("of", -56, what);
    bench_spread("ratio", 6, 2, ratios_of(a->rate, b->rate, (int)opt.rounds, 1 / divisor));
    bench_end(-1);
}

static void report_ratios(void)
{
    const config *one = &configs[0];
    for (int i = 0; i < config_count; i++) {
        const config *c = &configs[i];
        char what[256];
        if (!c->peer[0] && c->ranks > 1 && c->batch == one->batch) {
            snprintf(what, sizeof what, "scaling: %.60s over one, equal batch a rank", c->name);
            ratio(what, c, one, (double)c->ranks);
        }
        for (int k = 0; k < config_count && !c->peer[0]; k++) {
            const config *peer = &configs[k];
            if (!peer->peer[0] || peer->threads != c->ranks * c->threads ||
                c->batch * c->ranks != peer->batch)
                continue;
            snprintf(what, sizeof what, "%.60s over %.60s", c->name, peer->name);
            ratio(what, c, peer, 1);
        }
    }
}

/* ---- options ---- */

static const flag flag_table[] = {
    {"--model", 'w', &opt.model, 0, 0, "the numbers below override it", models},
    {"--program", 's', &opt.program, 0, 0, "build/train_gpt, on GPUs build/cuda/train_gpt", NULL},
    {"--device", 's', &opt.device, 0, 0, "in a build with dtrain_cuda.cu also cuda", NULL},
    {"--precision", 's', &opt.precision, 0, 0, "fp32, on GPUs also tf32 or bf16, the default there",
     NULL},
    {"--flags", 's', &opt.flags, 0, 0, "more flags of the trainer", NULL},
    {"--peer", 's', &opt.peer, 0, 0,
     "NAME=COMMAND, a rival, whose command prints \"tokens_per_second NUMBER\"; up to 4 times",
     NULL},
    {"--peak", 'i', &opt.peak, 1, 1e6, "TFLOP/s of the GPU's data sheet", NULL},
    {"--gemm", 'i', &opt.gemm, 1, 65536, "side of the product that is the peak; 1024, on GPUs 8192",
     NULL},
    {"--layers", 'i', &opt.layers, 1, 1e4, "", NULL},
    {"--heads", 'i', &opt.heads, 1, 1e4, "", NULL},
    {"--channels", 'i', &opt.channels, 1, 1e6, "", NULL},
    {"--seq", 'i', &opt.seq, 1, 1e7, "", NULL},
    {"--vocab", 'i', &opt.vocab, 1, 1e7, "", NULL},
    {"--batch", 'i', &opt.batch, 1, 1e6, "samples of a rank", NULL},
    {"--steps", 'i', &opt.steps, 4, BENCH_MOST, "of each run", NULL},
    {"--rounds", 'i', &opt.rounds, 1, MAX_ROUNDS, "of all runs", NULL},
    BENCH_FLAGS};

static int bad_option(const char *name, const char *value, const char *takes)
{
    fprintf(stderr, "bench_train: %s is \"%s\"; it takes %s\n", name, value, takes);
    return 2;
}

/* Choose what depends on the device. */
static int apply_device(const dtrain_device_ops **ops)
{
    if (dtrain_device_ops_by_name(opt.device, ops) != DTRAIN_OK)
        return fprintf(stderr, "bench_train: --device: %s\n", dtrain_last_error()), 2;
    on_gpu = !(*ops)->host_memory;
    if (!opt.program) opt.program = on_gpu ? "build/cuda/train_gpt" : "build/train_gpt";
    if (!opt.precision) opt.precision = on_gpu ? "bf16" : "fp32";
    if (!opt.gemm) opt.gemm = on_gpu ? 8192 : 1024;
    if (strcmp(opt.precision, "fp32") == 0 ||
        (on_gpu && (strcmp(opt.precision, "tf32") == 0 || strcmp(opt.precision, "bf16") == 0)))
        return 0;
    return bad_option("--precision", opt.precision, "fp32, on GPUs also tf32 and bf16");
}

/* On a GPU a context is as long as GPT-2's. */
static void apply_model(void)
{
    static const long shapes[2][3][6] = {
        /* layers, heads, channels, seq, vocab, batch of tiny, baby, gpt2 */
        {{4, 4, 128, 64, 256, 12}, {6, 6, 384, 128, 256, 8}, {12, 12, 768, 64, 50257, 4}},
        {{4, 4, 128, 64, 256, 12}, {6, 6, 384, 256, 256, 64}, {12, 12, 768, 1024, 50257, 32}}};
    long *const numbers[] = {&opt.layers, &opt.heads, &opt.channels,
                             &opt.seq,    &opt.vocab, &opt.batch};
    for (int i = 0; i < 6; i++)
        if (!*numbers[i]) *numbers[i] = shapes[on_gpu][opt.model][i];
}

static int find_peers(int argc, char **argv, const char **peers, int *count)
{
    for (int a = 1; a + 1 < argc; a++) {
        if (strcmp(argv[a], "--peer") != 0) continue;
        if (*count == MAX_PEERS || !strchr(argv[a + 1], '='))
            return bad_option("--peer", argv[a + 1], "NAME=COMMAND, at most 4 times");
        peers[(*count)++] = argv[++a];
    }
    return 0;
}

static void print_title(double peak, long cores)
{
    char floor[96] = "";
    if (on_gpu && nominal_peak() > 0)
        snprintf(floor, sizeof floor, "; MFU of %.0f TFLOP/s", nominal_peak());
    bench_title(
        "%s: %ld layers, %ld channels, %ld tokens x batch, %ld symbols; GEMM peak %.1f GFLOP/s "
        "a %s (%s); floor %.0f tokens/s on %ld%s",
        models[opt.model], opt.layers, opt.channels, opt.seq, opt.vocab, peak,
        on_gpu ? "GPU" : "thread", on_gpu ? gpu.name : bench_kernels(false),
        1e9 * peak * (double)cores / flops_per_token(), cores, floor);
}

int main(int argc, char **argv)
{
    const char *peers[MAX_PEERS];
    const dtrain_device_ops *ops;
    int peer_count = 0;
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    if (is_quick(argc, argv)) {
        opt.model = 0;
        opt.layers = 1;
        opt.channels = 32;
        opt.batch = 4;
        opt.gemm = 64;
        opt.steps = 60;
        opt.rounds = 1;
    }
    bench_start("bench_train", "tokens/s of train_gpt beside its rivals", flag_table,
                sizeof flag_table / sizeof *flag_table, argc, argv);
    if (find_peers(argc, argv, peers, &peer_count) || apply_device(&ops)) return 2;
    apply_model();
    const double peak = gemm_rate(ops);
    if (peak <= 0) return 1;
    if (on_gpu) cores = (long)gpu.count;
    if (cores > 8) cores = 8;
    add_configs(peers, peer_count, cores);
    for (int round = 0; round < opt.rounds; round++)
        for (int i = 0; i < config_count; i++)
            if (run_config(&configs[i], round)) return 1;
    print_title(peak, cores);
    for (int i = 0; i < config_count; i++) report(&configs[i], peak);
    bench_title("ratios of tokens/s, round by round");
    report_ratios();
    return bench.wrong > 0;
}
