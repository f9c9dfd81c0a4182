/* bench_train.c: training speed and memory of train_gpt, beside PyTorch and other rivals.
 *
 *   run:     make bench, or build/bench/bench_train --model baby --rounds 5 [--json]
 *            build/bench/bench_train --model gpt2 --peer "llm.c=sh time_llmc.sh"
 *            build/cuda/bench_train --device cuda --model gpt2 --precision bf16
 *
 * Every round runs each configuration once, one after the other (A B C A B C ...): the machine's drift
 * then meets all alike, and ratios are taken round by round. A run's figure is the median over its
 * steps without the first two. A peer is a command that prints "tokens_per_second NUMBER"; {threads}
 * and the like in it are replaced by the configuration. PyTorch is one when python3 has torch.
 *
 *   GFLOP/s      (6 (12 L C^2 + V C) + 6 L C T) tokens/s: matrix products and causal attention, forward
 *                and backward; executed arithmetic is a little more
 *   % of GEMM    of threads (or GPUs) x the rate of one on a square product of 1024, on GPUs 8192, in
 *                the same precision, measured in this run
 *   MFU          on GPUs: the same FLOP/s over what the data sheet promises for dense products of that
 *                precision (--peak, in TFLOP/s, where the GPU is not in the table below)
 *   floor        tokens/s if nothing but that arithmetic ran at that rate
 *   correct      the loss starts at ln(V) and has fallen at the end of its last run */
#include "bench.h"
#include "dtrain.h"

enum { MAX_CONFIGS = 16, MAX_ROUNDS = 64, MAX_PEERS = 4 };

typedef struct config {
    char name[64], command[1024], peer[32]; /* peer: "" for our own */
    int ranks, threads, batch;
    bench_log run; /* the last round */
    double rate[MAX_ROUNDS], memory_mib, predicted_mib;
} config;

static struct options {
    const char *model, *program, *device, *precision, *flags, *log;
    int layers, heads, channels, seq, vocab, batch, steps, rounds, gemm, peak, json;
} opt = {.model = "baby", .device = "cpu", .flags = "", .steps = 12, .rounds = 3};

static FILE *json; /* --json: stdout; --log: a file; or NULL */
static bool on_gpu;
static dtrain_device_info gpu;

static config configs[MAX_CONFIGS];
static int config_count;

/* ---- numbers ---- */

/* What data sheets promise of dense products, in TFLOP/s. */
static double nominal_peak(void)
{
    static const struct {
        const char *name;
        double bf16, tf32, fp32;
    } gpus[] = {{"H200", 989, 495, 67}, {"H100", 989, 495, 67}, {"A100", 312, 156, 19.5}};
    if (opt.peak) return opt.peak;
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
    char *host = (char *)malloc(count * size);
    dtrain_result result = host ? DTRAIN_OK : DTRAIN_ERROR_MEMORY;
    for (size_t i = 0; host && i < count; i++) {
        float value = (float)(i * 2654435761u % 8191) / 4096 - 1;
        if (half) ((uint16_t *)(void *)host)[i] = dtrain_f32_to_bf16(value);
        else ((float *)(void *)host)[i] = value;
    }
    if (host) result = device->ops->copy(device, x, host, count * size, DTRAIN_COPY_HOST_TO_DEVICE);
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
    if (result == DTRAIN_OK) result = ops->query(device, &gpu);
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
    double l = opt.layers, c = opt.channels;
    return 6 * (12 * l * c * c + (double)opt.vocab * c) + 6 * l * c * (double)opt.seq;
}

/* ---- running ---- */

static int run_config(config *c, int round)
{
    static char text[1 << 20], command[2048];
    char log[64];
    const char *at;
    if (c->peer[0]) {
        if (capture(c->command, text, sizeof text)) return 1;
        c->rate[round] = number_after(text, "tokens_per_second ", 0);
        c->run.step_ms = number_after(text, "step_ms ", 0);
        return c->rate[round] <= 0;
    }
    snprintf(log, sizeof log, "/tmp/bench_train.%ld.jsonl", (long)getpid());
    snprintf(command, sizeof command, "%s --log %s", c->command, log);
    if (capture(command, text, sizeof text) || read_log(fopen(log, "r"), &c->run)) return 1;
    remove(log);
    c->rate[round] = c->run.rate;
    at = strstr(text, "\n  memory ");
    if (at) c->memory_mib = number_after(at, "memory", 0);
    if (at) c->predicted_mib = number_after(at, "rank 0,", 0);
    return 0;
}

/* The loss of an untrained model is ln(V), within its initialisation's spread, and falls. */
static int is_correct(const config *c)
{
    return c->peer[0] || (fabs(c->run.losses[0] - log(opt.vocab)) < 0.5 && learned(&c->run));
}

/* ---- configurations ---- */

static void add_ours(int ranks, int threads, int batch, bool graph)
{
    config *c = &configs[config_count++];
    int used;
    c->ranks = ranks;
    c->threads = threads;
    c->batch = batch;
    if (on_gpu)
        snprintf(c->name, sizeof c->name, "%d GPU%s, %s%s", ranks, ranks == 1 ? "" : "s",
                 opt.precision, graph ? ", graph" : "");
    else
        snprintf(c->name, sizeof c->name, "%d rank%s x %d thread%s", ranks, ranks == 1 ? "" : "s",
                 threads, threads == 1 ? "" : "s");
    used = snprintf(
        c->command, sizeof c->command,
        "%s --model %s --layers %d --heads %d --channels %d --seq %d --vocab %d --ranks %d "
        "--threads %d --batch %d --steps %d --warmup 2 --lr 3e-4 --eval-every 0 --eval-batches 0 "
        "--sample 0 %s",
        opt.program, opt.model, opt.layers, opt.heads, opt.channels, opt.seq, opt.vocab, ranks,
        threads, batch, opt.steps, opt.flags);
    if (on_gpu)
        snprintf(c->command + used, sizeof c->command - (size_t)used,
                 " --device %s --precision %s%s", opt.device, opt.precision,
                 graph ? " --graph" : "");
}

/* text with {key} replaced by the number */
static void substitute(char *text, size_t room, const char *key, int value)
{
    char result[1024], *at = strstr(text, key);
    if (!at) return;
    snprintf(result, sizeof result, "%.*s%d%s", (int)(at - text), text, value, at + strlen(key));
    snprintf(text, room, "%s", result);
}

static void add_peer(const char *name, const char *command, int threads)
{
    config *c = &configs[config_count++];
    c->ranks = 1;
    c->threads = threads;
    c->batch = opt.batch;
    if (on_gpu) snprintf(c->name, sizeof c->name, "%s, %s", name, opt.precision);
    else
        snprintf(c->name, sizeof c->name, "%s, %d thread%s", name, threads,
                 threads == 1 ? "" : "s");
    snprintf(c->peer, sizeof c->peer, "%s", name);
    snprintf(c->command, sizeof c->command, "%s", command);
    substitute(c->command, sizeof c->command, "{threads}", threads);
    substitute(c->command, sizeof c->command, "{layers}", opt.layers);
    substitute(c->command, sizeof c->command, "{heads}", opt.heads);
    substitute(c->command, sizeof c->command, "{channels}", opt.channels);
    substitute(c->command, sizeof c->command, "{seq}", opt.seq);
    substitute(c->command, sizeof c->command, "{vocab}", opt.vocab);
    substitute(c->command, sizeof c->command, "{batch}", opt.batch);
    substitute(c->command, sizeof c->command, "{steps}", opt.steps);
}

static bool has_torch(void)
{
    const char *test = on_gpu ? "python3 -c 'import torch; assert torch.cuda.is_available()'"
                              : "python3 -c 'import torch'";
    char command[128];
    snprintf(command, sizeof command, "%s >/dev/null 2>&1", test);
    if (system(command) == 0) return true;
    if (!opt.json)
        printf("PyTorch: python3 has no torch%s, skipped\n", on_gpu ? " that sees a GPU" : "");
    return false;
}

/* `cores` are threads to use, or GPUs. */
static void add_configs(const char *const *peers, int peer_count, int cores)
{
    char torch[256];
    snprintf(torch, sizeof torch,
             "python3 bench/torch_peer.py {threads} {batch} {seq} {layers} {heads} {channels} "
             "{vocab} {steps} %s %s",
             opt.device, opt.precision);
    add_ours(1, 1, opt.batch, false);
    if (on_gpu) add_ours(1, 1, opt.batch, true);
    if (cores > 1 && !on_gpu) add_ours(1, cores, opt.batch, false);
    if (cores > 1) add_ours(cores, 1, opt.batch, false);
    if (cores > 1 && opt.batch % cores == 0) add_ours(cores, 1, opt.batch / cores, false);
    if (has_torch()) {
        add_peer("PyTorch", torch, 1);
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
    const spread rates = spread_of(c->rate, opt.rounds);
    double rate = rates.median, gflops = 1e-9 * flops_per_token() * rate;
    double share = gflops / (peak * c->ranks * c->threads), nominal = 1e3 * nominal_peak();
    double mfu = on_gpu && nominal > 0 ? gflops / (nominal * c->ranks) : 0;
    double low = rates.min, high = rates.max;
    if (json)
        fprintf(
            json,
            "{\"bench\": \"train\", \"model\": \"%s\", \"config\": \"%s\", \"device\": \"%s\", "
            "\"precision\": \"%s\", \"ranks\": %d, \"threads\": %d, \"batch\": %d, "
            "\"seq\": %d, \"tokens_per_second\": %.6g, \"min\": %.6g, \"max\": %.6g, "
            "\"step_ms\": %.6g, \"gflops\": %.4g, \"share_of_gemm\": %.4g, \"gemm_gflops\": %.5g, "
            "\"mfu\": %.4g, \"nominal_gflops\": %.5g, \"exposed_ms\": %.4g, "
            "\"memory_mib\": %.6g, \"predicted_mib\": %.6g, \"correct\": %s}\n",
            opt.model, c->name, on_gpu ? gpu.name : "cpu", opt.precision, c->ranks, c->threads,
            c->batch, opt.seq, rate, low, high, c->run.step_ms, gflops, share, peak, mfu, nominal,
            c->run.exposed_ms, c->memory_mib, c->predicted_mib, is_correct(c) ? "true" : "false");
    if (!opt.json)
        printf(
            "%-22s %5d  %9.0f %9.0f %9.0f  %8.1f  %7.1f  %5.1f %%  %5.1f %%  %7.2f  %8.1f %9.1f  "
            "%s\n",
            c->name, c->batch, rate, low, high, c->run.step_ms, gflops, 100 * share, 100 * mfu,
            c->run.exposed_ms, c->memory_mib, c->predicted_mib, is_correct(c) ? "yes" : "NO");
}

/* Median over rounds of a's rate over b's in the same round, per rank and thread when weak. */
static void ratio(const char *what, const config *a, const config *b, double divisor)
{
    double r[MAX_ROUNDS] = {0};
    for (int i = 0; i < opt.rounds; i++) r[i] = a->rate[i] / b->rate[i] / divisor;
    const spread all = spread_of(r, opt.rounds);
    if (json)
        fprintf(json,
                "{\"bench\": \"train\", \"model\": \"%s\", \"ratio\": \"%s\", \"median\": %.4g, "
                "\"min\": %.4g, \"max\": %.4g}\n",
                opt.model, what, all.median, all.min, all.max);
    if (!opt.json) printf("  %-52s %6.2f   (%.2f to %.2f)\n", what, all.median, all.min, all.max);
}

static void report_ratios(void)
{
    const config *one = &configs[0];
    for (int i = 0; i < config_count; i++) {
        const config *c = &configs[i];
        char what[256];
        if (!c->peer[0] && c->ranks > 1 && c->batch == one->batch) {
            snprintf(what, sizeof what, "scaling: %.60s over one, equal batch a rank", c->name);
            ratio(what, c, one, c->ranks);
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

static const struct {
    const char *name;
    int *number;
    const char **text;
    const char *help;
} option_table[] = {
    {"--model", NULL, &opt.model, "tiny, baby (default) or gpt2; the numbers below override it"},
    {"--program", NULL, &opt.program, "the trainer; build/train_gpt, on GPUs build/cuda/train_gpt"},
    {"--device", NULL, &opt.device, "cpu (default) or, in a build with dtrain_cuda.cu, cuda"},
    {"--precision", NULL, &opt.precision, "fp32 (default), on GPUs tf32 or bf16 (default there)"},
    {"--log", NULL, &opt.log, "appends one JSON object a result to this file"},
    {"--flags", NULL, &opt.flags, "more flags of the trainer"},
    {"--peak", &opt.peak, NULL, "TFLOP/s of the GPU's data sheet"},
    {"--gemm", &opt.gemm, NULL, "side of the product that is the peak; 1024, on GPUs 8192"},
    {"--layers", &opt.layers, NULL, ""},
    {"--heads", &opt.heads, NULL, ""},
    {"--channels", &opt.channels, NULL, ""},
    {"--seq", &opt.seq, NULL, ""},
    {"--vocab", &opt.vocab, NULL, ""},
    {"--batch", &opt.batch, NULL, "samples of a rank"},
    {"--steps", &opt.steps, NULL, "of each run; 12"},
    {"--rounds", &opt.rounds, NULL, "3"},
};

static int usage(void)
{
    printf("bench_train: tokens/s of train_gpt beside its rivals\n");
    for (size_t i = 0; i < sizeof option_table / sizeof *option_table; i++)
        printf("  %-12s %s\n", option_table[i].name, option_table[i].help);
    printf(
        "  --peer N=C   a rival: its name and a command that prints \"tokens_per_second NUMBER\"\n"
        "  --json       prints JSON, one object a line, instead of the table\n");
    return 0;
}

/* What depends on the device. */
static int apply_device(const dtrain_device_ops **ops)
{
    if (dtrain_device_ops_by_name(opt.device, ops) != DTRAIN_OK) {
        fprintf(stderr, "bench_train: --device: %s\n", dtrain_last_error());
        return 2;
    }
    on_gpu = !(*ops)->host_memory;
    if (!opt.program) opt.program = on_gpu ? "build/cuda/train_gpt" : "build/train_gpt";
    if (!opt.precision) opt.precision = on_gpu ? "bf16" : "fp32";
    if (!opt.gemm) opt.gemm = on_gpu ? 8192 : 1024;
    if (strcmp(opt.precision, "fp32") == 0 ||
        (on_gpu && (strcmp(opt.precision, "tf32") == 0 || strcmp(opt.precision, "bf16") == 0)))
        return 0;
    fprintf(stderr,
            "bench_train: --precision is \"%s\"; it takes fp32, on GPUs also tf32 and bf16\n",
            opt.precision);
    return 2;
}

/* On a GPU a context is as long as GPT-2's, and the vocabulary is padded to a multiple of 128. */
static int apply_model(void)
{
    static const struct {
        const char *name;
        int l, h, c, t, v, b;
    } models[2][3] = {{{"tiny", 4, 4, 128, 64, 256, 12},
                       {"baby", 6, 6, 384, 128, 256, 8},
                       {"gpt2", 12, 12, 768, 64, 50257, 4}},
                      {{"tiny", 4, 4, 128, 64, 256, 12},
                       {"baby", 6, 6, 384, 256, 256, 64},
                       {"gpt2", 12, 12, 768, 1024, 50304, 32}}};
    for (size_t i = 0; i < 3; i++) {
        if (strcmp(models[on_gpu][i].name, opt.model) != 0) continue;
        if (!opt.layers) opt.layers = models[on_gpu][i].l;
        if (!opt.heads) opt.heads = models[on_gpu][i].h;
        if (!opt.channels) opt.channels = models[on_gpu][i].c;
        if (!opt.seq) opt.seq = models[on_gpu][i].t;
        if (!opt.vocab) opt.vocab = models[on_gpu][i].v;
        if (!opt.batch) opt.batch = models[on_gpu][i].b;
        return 0;
    }
    fprintf(stderr, "bench_train: --model is \"%s\"; it takes tiny, baby or gpt2\n", opt.model);
    return 2;
}

static int parse(int argc, char **argv, const char **peers, int *peer_count)
{
    for (int a = 1; a < argc; a++) {
        size_t i = 0, count = sizeof option_table / sizeof *option_table;
        if (strcmp(argv[a], "--json") == 0) {
            opt.json = 1;
            continue;
        }
        if (a + 1 < argc && strcmp(argv[a], "--peer") == 0 && *peer_count < MAX_PEERS &&
            strchr(argv[a + 1], '=')) {
            peers[(*peer_count)++] = argv[++a];
            continue;
        }
        while (i < count && strcmp(argv[a], option_table[i].name) != 0) i++;
        if (i == count || a + 1 == argc) {
            fprintf(stderr,
                    "bench_train: \"%s\" is no option or lacks its value; --help lists them\n",
                    argv[a]);
            return 2;
        }
        if (option_table[i].text) *option_table[i].text = argv[++a];
        else *option_table[i].number = atoi(argv[++a]);
    }
    if (opt.steps < 4 || opt.rounds < 1 || opt.rounds > MAX_ROUNDS) {
        fprintf(stderr, "bench_train: --steps takes 4 or more, --rounds 1 to %d\n", MAX_ROUNDS);
        return 2;
    }
    return 0;
}

static void print_heading(double peak, int cores)
{
    printf("%s: %d layers, %d channels, %d tokens x batch, %d symbols; GEMM peak %.1f GFLOP/s a %s "
           "(%s); floor %.0f tokens/s on %d",
           opt.model, opt.layers, opt.channels, opt.seq, opt.vocab, peak, on_gpu ? "GPU" : "thread",
           on_gpu ? gpu.name : dtrain_cpu_kernel_name(), 1e9 * peak * cores / flops_per_token(),
           cores);
    if (on_gpu && nominal_peak() > 0) printf("; MFU of %.0f TFLOP/s", nominal_peak());
    printf("\n\n%-22s %5s  %9s %9s %9s  %8s  %7s  %7s  %7s  %7s  %8s %9s  %s\n", "configuration",
           "batch", "tokens/s", "min", "max", "step ms", "GFLOP/s", "of GEMM", "MFU", "exposed",
           "rank MiB", "predicted", "correct");
}

int main(int argc, char **argv)
{
    const char *peers[MAX_PEERS];
    const dtrain_device_ops *ops;
    int peer_count = 0, cores = (int)sysconf(_SC_NPROCESSORS_ONLN), bad = 0;
    if (argc > 1 && strcmp(argv[1], "--help") == 0) return usage();
    if (parse(argc, argv, peers, &peer_count) || apply_device(&ops) || apply_model()) return 2;
    json = opt.log ? fopen(opt.log, "a") : opt.json ? stdout : NULL;
    if (opt.log && !json) {
        fprintf(stderr, "bench_train: --log: %s cannot be written\n", opt.log);
        return 2;
    }
    double peak = gemm_rate(ops);
    if (peak <= 0) return 1;
    if (on_gpu) cores = (int)gpu.count;
    if (cores > 8) cores = 8;
    add_configs(peers, peer_count, cores);
    for (int round = 0; round < opt.rounds; round++)
        for (int i = 0; i < config_count; i++)
            if (run_config(&configs[i], round)) {
                fprintf(stderr, "bench_train: failed: %s\n", configs[i].command);
                return 1;
            }
    if (!opt.json) print_heading(peak, cores);
    for (int i = 0; i < config_count; i++) report(&configs[i], peak);
    if (!opt.json) printf("\nratios, round by round: median (min to max)\n");
    report_ratios();
    for (int i = 0; i < config_count; i++) bad += !is_correct(&configs[i]);
    return bad ? 1 : 0;
}
