/* bench_gemm.c: matrix products of the CPU device, beside OpenBLAS and BLIS where installed.
 *
 *   run:     make bench, or build/bench/bench_gemm --threads 2 [--json]
 *            build/bench/bench_gemm --openblas-core SkylakeX     OpenBLAS with another kernel
 *            build/bench/bench_gemm --bf16       our operands in bf16, beside ours in fp32
 *   build:   cc -O2 -I. bench/bench_gemm.c -o bench_gemm -lm -lpthread -ldl
 *
 * Shapes are "transposes M x N x K" of C (M,N) = op(A) (M,K) op(B) (K,N). Those of GPTs come first
 * and make the mean: GPT-2 124M on 256 tokens with its vocabulary of 50257 (and padded to 50304),
 * 6 layers of 384 channels on 1024 tokens, nanoGPT's CPU example on 768; each as forward (NT),
 * gradient of the input (NN) and of the weight (TN). Attention's 64^3 and squares follow.
 *
 * A repetition runs everyone once, one after the other, beginning with another one each time: the
 * machine's drift then meets all alike, and ratios are taken within a repetition.
 *
 *   GFLOP/s   2 M N K / time, median (min to max) over the repetitions
 *   of peak   the floor: GFLOP/s over threads x peak. The peak is the rate of one thread doing
 *             fp32 multiply-adds on registers only, another contender of each repetition; bf16
 *             instructions exceed it
 *   ratio     our GFLOP/s over the peer's, median (min to max)
 *   correct   64 sampled elements of everyone's C agree with a dot product in double precision
 *
 * With --bf16 A and B are rounded to bf16 for everyone, C is bf16 (fp32 for TN, the gradient of a
 * weight), and the fp32 product of this library, on the same numbers, is one of the peers. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

#include "bench.h"

#include <dlfcn.h>

enum { MAX_REPS = 64, MAX_PEERS = 3, PEAK = 0, OURS = 1, FIRST_PEER = 2, MAX_RUNNERS = 5 };

static struct {
    const char *openblas_core;
    int threads, reps, quick, json, bf16, help;
} opt = {NULL, 1, 0, 0, 0, 0, 0};

typedef void (*sgemm_fn)(int order, int trans_a, int trans_b, int m, int n, int k, float alpha,
                         const float *a, int lda, const float *b, int ldb, float beta, float *c,
                         int ldc);

typedef struct peer {
    const char *name;
    char kernel[64];
    sgemm_fn sgemm; /* NULL: ours, in fp32 */
    double log_sum; /* of the ratios over the GPT shapes */
} peer;

static peer peers[MAX_PEERS];
static int peer_count;

typedef struct shape {
    char trans[3];
    int m, n, k;
    int gpt, quick; /* counts in the mean; is part of --quick */
} shape;

static const shape shapes[] = {
    {"NT", 256, 768, 768, 1, 0},    {"NT", 256, 2304, 768, 1, 0},  {"NT", 256, 3072, 768, 1, 0},
    {"NT", 256, 768, 3072, 1, 0},   {"NT", 256, 50257, 768, 1, 0}, {"NT", 256, 50304, 768, 1, 0},
    {"NN", 256, 768, 2304, 1, 0},   {"NN", 256, 768, 3072, 1, 0},  {"NN", 256, 3072, 768, 1, 0},
    {"NN", 256, 768, 50257, 1, 0},  {"TN", 768, 768, 256, 1, 0},   {"TN", 2304, 768, 256, 1, 0},
    {"TN", 3072, 768, 256, 1, 0},   {"TN", 50257, 768, 256, 1, 0}, {"NT", 1024, 1152, 384, 1, 0},
    {"NT", 1024, 1536, 384, 1, 0},  {"NN", 1024, 384, 1536, 1, 0}, {"TN", 1536, 384, 1024, 1, 0},
    {"NT", 768, 384, 128, 1, 1},    {"NT", 768, 512, 128, 1, 1},   {"NT", 768, 128, 512, 1, 1},
    {"NN", 768, 128, 384, 1, 1},    {"TN", 384, 128, 768, 1, 1},   {"NT", 64, 64, 64, 0, 1},
    {"NN", 64, 64, 64, 0, 0},       {"NN", 512, 512, 512, 0, 0},   {"NN", 1024, 1024, 1024, 0, 0},
    {"NT", 1024, 1024, 1024, 0, 0}, {"TN", 1024, 1024, 1024, 0, 0}};
enum { SHAPE_COUNT = sizeof shapes / sizeof *shapes };

/* ---- Numbers ---- */

static spread spread_of_ratio(const double *a, const double *b)
{
    double ratios[MAX_REPS];
    for (int r = 0; r < opt.reps; r++) ratios[r] = a[r] / b[r];
    return spread_of(ratios, opt.reps);
}

/* ---- The floor ----
 *
 * 12 chains of multiply-adds, enough to hide their latency on two units. Each chain has a name of
 * its own: gcc 12 keeps an array of vectors on the stack. x -> 0.5 x + 1
 * goes to 2, far from denormals and infinity. */

#define CHAINS(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9) DO(10) DO(11)
#define CHAIN_START(i) vec x##i = half + (float)i;
#define CHAIN_STEP(i) x##i = x##i * half + one;
#define CHAIN_SUM(i) sum += x##i;
#define DEFINE_PEAK(id, target, lanes)                                 \
    target static double peak_##id(long steps)                         \
    {                                                                  \
        typedef float vec __attribute__((vector_size(4 * (lanes))));   \
        volatile float hidden = 0.5f;                                  \
        vec half = (vec){0} + hidden, one = half + hidden, sum = half; \
        CHAINS(CHAIN_START)                                            \
        for (long s = 0; s < steps; s++) {                             \
            CHAINS(CHAIN_STEP)                                         \
        }                                                              \
        CHAINS(CHAIN_SUM)                                              \
        hidden = sum[0];                                               \
        return 2.0 * 12 * lanes * (double)steps;                       \
    }

#if defined(__x86_64__) || defined(__i386__)
DEFINE_PEAK(avx512, BENCH_TARGET("avx512f,fma"), 16)
DEFINE_PEAK(avx2, BENCH_TARGET("avx2,fma"), 8)
#endif
DEFINE_PEAK(baseline, BENCH_BASELINE, 4)

/* Runs `steps` on the widest vectors of this machine; returns the floating-point operations. */
static double peak_run(long steps)
{
#if defined(__x86_64__) || defined(__i386__)
    if (__builtin_cpu_supports("avx512f")) return peak_avx512(steps);
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return peak_avx2(steps);
#endif
    return peak_baseline(steps);
}

/* ---- Peers ---- */

/* The idle threads of both libraries would go on spinning for a tenth of a second, on the core that
 * the next contender needs; so they are told to sleep about as early as ours. */
static void prepare_peers(void)
{
    setenv("OPENBLAS_THREAD_TIMEOUT", "17", 0); /* 2^17 cycles */
    setenv("GOMP_SPINCOUNT", "20000", 0);
    if (opt.openblas_core) setenv("OPENBLAS_CORETYPE", opt.openblas_core, 1);
}

/* dlsym returns an object pointer and C99 has no cast from that to a function: bytes are copied. */
static int find_function(void *library, const char *name, void *function_pointer)
{
    void *symbol = dlsym(library, name);
    memcpy(function_pointer, &symbol, sizeof symbol);
    return symbol != NULL;
}

/* The first of two names that can be loaded and has cblas_sgemm; NULL after saying that there is
 * none. */
static void *open_library(const char *name, const char *file, const char *other_file)
{
    void *library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    if (!library) library = dlopen(other_file, RTLD_NOW | RTLD_LOCAL);
    if (library && find_function(library, "cblas_sgemm", &peers[peer_count].sgemm)) {
        peers[peer_count].name = name;
        return library;
    }
    if (!opt.json) printf("%s: not installed, skipped\n", name);
    return NULL;
}

static void load_openblas(void)
{
    void (*set_threads)(int);
    char *(*core)(void);
    void *library = open_library("OpenBLAS", "libopenblas.so.0", "libopenblas.so");
    if (!library) return;
    peer *x = &peers[peer_count++];
    if (find_function(library, "openblas_set_num_threads", &set_threads)) set_threads(opt.threads);
    snprintf(x->kernel, sizeof x->kernel, "core %s",
             find_function(library, "openblas_get_corename", &core) ? core() : "unknown");
}

static void load_blis(void)
{
    void (*set_threads)(int64_t);
    int (*arch)(void);
    const char *(*arch_name)(int);
    void *library = open_library("BLIS", "libblis.so.4", "libblis.so");
    if (!library) return;
    peer *x = &peers[peer_count++];
    if (find_function(library, "bli_thread_set_num_threads", &set_threads))
        set_threads(opt.threads);
    int named = find_function(library, "bli_arch_query_id", &arch) &&
                find_function(library, "bli_arch_string", &arch_name);
    snprintf(x->kernel, sizeof x->kernel, "kernels %s", named ? arch_name(arch()) : "unknown");
}

static void load_ours(void)
{
    peer *x = &peers[peer_count++];
    x->name = "fp32";
    snprintf(x->kernel, sizeof x->kernel, "dtrain %s", dtrain_cpu_kernel_name());
}

/* ---- One shape ---- */

typedef struct trial {
    const shape *shape;
    dtrain_device *device;
    dtrain_gemm_args args, fp32; /* ours; the same product in fp32 */
    float *a, *b, *c;
    uint16_t *half_a, *half_b, *half_c;  /* of --bf16 */
    double rates[MAX_RUNNERS][MAX_REPS]; /* GFLOP/s */
} trial;

static void trial_free(trial *t)
{
    free(t->a);
    free(t->b);
    free(t->c);
    free(t->half_a);
    free(t->half_b);
    free(t->half_c);
}

/* A copy in bf16; x is rounded to it as well. */
static uint16_t *round_to_bf16(float *x, size_t count)
{
    uint16_t *half = (uint16_t *)malloc(count * sizeof *half);
    for (size_t i = 0; half && i < count; i++) {
        half[i] = dtrain_f32_to_bf16(x[i]);
        x[i] = dtrain_bf16_to_f32(half[i]);
    }
    return half;
}

static int use_bf16(trial *t)
{
    const shape *s = t->shape;
    t->half_a = round_to_bf16(t->a, (size_t)s->m * (size_t)s->k);
    t->half_b = round_to_bf16(t->b, (size_t)s->k * (size_t)s->n);
    t->half_c = round_to_bf16(t->c, (size_t)s->m * (size_t)s->n);
    t->args.a = t->half_a;
    t->args.b = t->half_b;
    t->args.a_dtype = t->args.b_dtype = DTRAIN_DTYPE_BF16;
    if (s->trans[0] != 'T') {
        t->args.c = t->half_c;
        t->args.c_dtype = DTRAIN_DTYPE_BF16;
    }
    return t->half_a && t->half_b && t->half_c;
}

static float *random_floats(size_t count, uint32_t seed)
{
    float *x = (float *)malloc(count * sizeof *x);
    for (size_t i = 0; x && i < count; i++) {
        seed = seed * 1664525u + 1013904223u;
        x[i] = (float)(seed >> 8) / 8388608.0f - 1.0f;
    }
    return x;
}

static int trial_init(trial *t, const shape *s, dtrain_device *device)
{
    dtrain_gemm_args *g = &t->args;
    memset(t, 0, sizeof *t);
    t->shape = s;
    t->device = device;
    t->a = random_floats((size_t)s->m * (size_t)s->k, 1);
    t->b = random_floats((size_t)s->k * (size_t)s->n, 2);
    t->c = random_floats((size_t)s->m * (size_t)s->n, 3);
    g->m = s->m;
    g->n = g->ldc = s->n;
    g->k = s->k;
    if (s->trans[0] == 'T') g->flags |= DTRAIN_GEMM_TRANS_A;
    if (s->trans[1] == 'T') g->flags |= DTRAIN_GEMM_TRANS_B;
    g->lda = s->trans[0] == 'T' ? s->m : s->k;
    g->ldb = s->trans[1] == 'T' ? s->k : s->n;
    g->alpha = 1;
    g->a = t->a;
    g->b = t->b;
    g->c = t->c;
    g->a_dtype = g->b_dtype = g->c_dtype = DTRAIN_DTYPE_F32;
    t->fp32 = *g;
    if (t->a && t->b && t->c && (!opt.bf16 || use_bf16(t))) return 0;
    trial_free(t);
    fprintf(stderr, "bench_gemm: no memory for %d x %d x %d\n", s->m, s->n, s->k);
    return 1;
}

static int multiply(trial *t, int runner)
{
    enum { ROW_MAJOR = 101, PLAIN = 111, TRANSPOSED = 112 };
    const dtrain_gemm_args *g = &t->args;
    const shape *s = t->shape;
    if (runner == OURS || !peers[runner - FIRST_PEER].sgemm) {
        g = runner == OURS ? &t->args : &t->fp32;
        return t->device->ops->gemm(t->device, g) == DTRAIN_OK ? 0 : 1;
    }
    peers[runner - FIRST_PEER].sgemm(ROW_MAJOR, s->trans[0] == 'T' ? TRANSPOSED : PLAIN,
                                     s->trans[1] == 'T' ? TRANSPOSED : PLAIN, s->m, s->n, s->k,
                                     1.0f, t->a, (int)g->lda, t->b, (int)g->ldb, 0.0f, t->c, s->n);
    return 0;
}

static int element_is_right(const trial *t, int runner, int64_t i, int64_t j)
{
    const dtrain_gemm_args *g = &t->args;
    const int half = runner == OURS && g->c_dtype == DTRAIN_DTYPE_BF16;
    const float c = half ? dtrain_bf16_to_f32(t->half_c[i * g->ldc + j]) : t->c[i * g->ldc + j];
    double sum = 0, size = 0;
    for (int64_t p = 0; p < g->k; p++) {
        double a = (double)t->a[g->flags & DTRAIN_GEMM_TRANS_A ? p * g->lda + i : i * g->lda + p];
        double b = (double)t->b[g->flags & DTRAIN_GEMM_TRANS_B ? j * g->ldb + p : p * g->ldb + j];
        sum += a * b;
        size += fabs(a * b);
    }
    double rounding = 0x1p-24 * (4 + sqrt((double)g->k)) * size + (half ? 0x1p-8 * fabs(sum) : 0);
    return fabs((double)c - sum) <= rounding; /* false for NaN */
}

/* Calls the runner once, as warm-up, on a C full of NaN, and looks at 64 elements: the corners and
 * others all over. Returns how many are wrong. */
static int check(trial *t, int runner)
{
    int64_t m = t->args.m, n = t->args.n;
    int wrong = 0;
    for (int64_t i = 0; i < m * n; i++) t->c[i] = NAN;
    if (t->half_c) memset(t->half_c, 0xff, (size_t)(m * n) * sizeof *t->half_c);
    if (multiply(t, runner)) {
        fprintf(stderr, "bench_gemm: %s\n", dtrain_last_error());
        return 64;
    }
    for (int64_t e = 0; e < 64; e++) {
        int64_t i = e < 4 ? e % 2 * (m - 1) : e * 7919 % m;
        int64_t j = e < 4 ? e / 2 * (n - 1) : e * 104729 % n;
        wrong += !element_is_right(t, runner, i, j);
    }
    if (wrong)
        fprintf(stderr, "bench_gemm: %s, %s %d x %d x %d: %d of 64 elements are wrong\n",
                runner == OURS ? "dtrain" : peers[runner - FIRST_PEER].name, t->shape->trans,
                t->shape->m, t->shape->n, t->shape->k, wrong);
    return wrong;
}

/* GFLOP/s of one thread on registers, over at least `seconds`. */
static double measure_peak(double seconds)
{
    double flops = 0, elapsed, start = dtrain_seconds();
    do {
        flops += peak_run(20000);
        elapsed = dtrain_seconds() - start;
    } while (elapsed < seconds);
    return 1e-9 * flops / elapsed;
}

/* GFLOP/s of a runner, over at least `seconds`. */
static double measure(trial *t, int runner, double seconds)
{
    double flops = 0, elapsed;
    if (opt.threads > 1) { /* the previous contender's threads fall asleep */
        struct timespec nap = {0, 1000000};
        nanosleep(&nap, NULL);
    }
    if (runner == PEAK) return measure_peak(0.25 * seconds);
    double start = dtrain_seconds();
    do {
        multiply(t, runner);
        flops += 2.0 * t->shape->m * t->shape->n * t->shape->k;
        elapsed = dtrain_seconds() - start;
    } while (elapsed < seconds);
    return 1e-9 * flops / elapsed;
}

static int run(trial *t)
{
    int runners = FIRST_PEER + peer_count, wrong = 0;
    double seconds = opt.quick ? 0.002 : 0.02;
    for (int i = OURS; i < runners; i++) wrong += check(t, i);
    for (int r = 0; r < opt.reps; r++)
        for (int i = 0; i < runners; i++) {
            int runner = (r + i) % runners;
            t->rates[runner][r] = measure(t, runner, seconds);
        }
    return wrong;
}

/* ---- Report ---- */

static double share_of_peak(const trial *t)
{
    return spread_of_ratio(t->rates[OURS], t->rates[PEAK]).median / opt.threads;
}

static const char *kernel_name(void)
{
    return opt.bf16 ? dtrain_cpu_bf16_kernel_name() : dtrain_cpu_kernel_name();
}

static void print_json(const trial *t, int index, int wrong)
{
    const shape *s = t->shape;
    spread ours = spread_of(t->rates[OURS], opt.reps);
    printf("{\"bench\": \"gemm\", \"shape\": \"%s %dx%dx%d\", \"m\": %d, \"n\": %d, \"k\": %d, "
           "\"trans\": \"%s\", \"threads\": %d, \"gflops\": %.4g, \"min\": %.4g, \"max\": %.4g, ",
           s->trans, s->m, s->n, s->k, s->m, s->n, s->k, s->trans, opt.threads, ours.median,
           ours.min, ours.max);
    if (index < peer_count) {
        const double *theirs = t->rates[FIRST_PEER + index];
        printf("\"peer\": \"%s %s\", \"peer_gflops\": %.4g, \"ratio\": %.4g, ", peers[index].name,
               peers[index].kernel, spread_of(theirs, opt.reps).median,
               spread_of_ratio(t->rates[OURS], theirs).median);
    } else {
        printf("\"peer\": null, \"peer_gflops\": null, \"ratio\": null, ");
    }
    printf("\"share_of_peak\": %.4g, \"gpt\": %s, \"dtype\": \"%s\", \"kernel\": \"%s\", "
           "\"correct\": %s}\n",
           share_of_peak(t), s->gpt ? "true" : "false", opt.bf16 ? "bf16" : "f32", kernel_name(),
           wrong ? "false" : "true");
}

static void print_heading(void)
{
    for (int i = 0; i < peer_count; i++) printf("%s: %s\n", peers[i].name, peers[i].kernel);
    printf("dtrain: %s, %d thread%s, %d repetitions, peak %.1f GFLOP/s a thread at the start\n\n",
           kernel_name(), opt.threads, opt.threads == 1 ? "" : "s", opt.reps, measure_peak(0.02));
    printf("%-22s %7s  %-15s  %7s", "shape", "GFLOP/s", "(min to max)", "of peak");
    for (int i = 0; i < peer_count; i++)
        printf("  %8s  %5s  %-14s", peers[i].name, "ratio", "(min to max)");
    printf("\n");
}

static void print_row(const trial *t, int wrong)
{
    const shape *s = t->shape;
    spread ours = spread_of(t->rates[OURS], opt.reps);
    char range[40];
    snprintf(range, sizeof range, "(%.1f to %.1f)", ours.min, ours.max);
    printf("%s %5d x %5d x %5d %7.1f  %-15s  %5.1f %%", s->trans, s->m, s->n, s->k, ours.median,
           range, 100 * share_of_peak(t));
    for (int i = 0; i < peer_count; i++) {
        const double *theirs = t->rates[FIRST_PEER + i];
        spread ratio = spread_of_ratio(t->rates[OURS], theirs);
        snprintf(range, sizeof range, "(%.2f to %.2f)", ratio.min, ratio.max);
        printf("  %8.1f  %5.2f  %-14s", spread_of(theirs, opt.reps).median, ratio.median, range);
    }
    printf("%s\n", wrong ? "  WRONG" : "");
}

/* OpenBLAS, the faster peer, comes last: a script reads the last line. */
static void print_means(int count, double log_rates, double log_shares)
{
    if (opt.json || count == 0) return;
    printf("\n");
    if (peer_count == 0)
        printf("geometric mean over %d GPT shapes: %.1f GFLOP/s, %.1f %% of peak\n", count,
               exp(log_rates / count), 100 * exp(log_shares / count));
    for (int i = peer_count; i-- > 0;)
        printf("geometric mean over %d GPT shapes: %.2f of %s (%s)\n", count,
               exp(peers[i].log_sum / count), peers[i].name, peers[i].kernel);
}

static int run_all(dtrain_device *device)
{
    double log_rates = 0, log_shares = 0;
    int count = 0, failed = 0;
    if (!opt.json) print_heading();
    for (int s = 0; s < SHAPE_COUNT; s++) {
        trial t;
        if (opt.quick && !shapes[s].quick) continue;
        if (trial_init(&t, &shapes[s], device)) return 1;
        int wrong = run(&t);
        failed |= wrong != 0;
        if (!opt.json) print_row(&t, wrong);
        for (int i = 0; opt.json && i < (peer_count ? peer_count : 1); i++)
            print_json(&t, i, wrong);
        fflush(stdout);
        for (int i = 0; shapes[s].gpt && i < peer_count; i++)
            peers[i].log_sum += log(spread_of_ratio(t.rates[OURS], t.rates[FIRST_PEER + i]).median);
        if (shapes[s].gpt) {
            log_rates += log(spread_of(t.rates[OURS], opt.reps).median);
            log_shares += log(share_of_peak(&t));
            count++;
        }
        trial_free(&t);
    }
    print_means(count, log_rates, log_shares);
    return failed;
}

/* ---- Options ---- */

static const struct {
    const char *name, *value, *help;
    int *number; /* without `value` a switch */
    const char **text;
} option_table[] = {
    {"--threads", "N", "threads of everyone; 1", &opt.threads, NULL},
    {"--reps", "N", "repetitions, at most 64; 7, with --quick 3", &opt.reps, NULL},
    {"--openblas-core", "NAME", "the kernel OpenBLAS uses: Haswell, SkylakeX, ...", NULL,
     &opt.openblas_core},
    {"--bf16", NULL, "A and B in bf16, beside the fp32 product", &opt.bf16, NULL},
    {"--quick", NULL, "a few small shapes, 2 ms each", &opt.quick, NULL},
    {"--json", NULL, "one JSON object a line", &opt.json, NULL},
    {"--help", NULL, "this list", &opt.help, NULL},
};
enum { OPTION_COUNT = sizeof option_table / sizeof *option_table };

static int usage(void)
{
    printf("bench_gemm: GFLOP/s of matrix products beside OpenBLAS and BLIS\n");
    for (int i = 0; i < OPTION_COUNT; i++)
        printf("  %-15s %-5s %s\n", option_table[i].name,
               option_table[i].value ? option_table[i].value : "", option_table[i].help);
    return 0;
}

static int parse(int argc, char **argv)
{
    for (int a = 1; a < argc; a++) {
        int i = 0;
        while (i < OPTION_COUNT && strcmp(argv[a], option_table[i].name) != 0) i++;
        if (i == OPTION_COUNT || (option_table[i].value && a + 1 == argc)) {
            fprintf(stderr,
                    "bench_gemm: \"%s\" is no option or lacks its value; --help lists them\n",
                    argv[a]);
            return 2;
        }
        if (!option_table[i].value) *option_table[i].number = 1;
        else if (option_table[i].text) *option_table[i].text = argv[++a];
        else *option_table[i].number = atoi(argv[++a]);
    }
    if (opt.reps == 0) opt.reps = opt.quick ? 3 : 7;
    if (opt.reps < 1 || opt.reps > MAX_REPS || opt.threads < 1 || opt.threads > 1024) {
        fprintf(stderr, "bench_gemm: --reps takes 1 to %d, --threads 1 to 1024\n", MAX_REPS);
        return 2;
    }
    return 0;
}

int main(int argc, char **argv)
{
    dtrain_device_desc desc;
    dtrain_device *device;
    if (parse(argc, argv)) return 2;
    if (opt.help) return usage();
    prepare_peers();
    if (opt.bf16) load_ours();
    load_openblas();
    load_blis();
    memset(&desc, 0, sizeof desc);
    desc.thread_count = (uint32_t)opt.threads;
    desc.oversubscribed = opt.threads > (int)sysconf(_SC_NPROCESSORS_ONLN);
    if (dtrain_device_create(NULL, &desc, &device) != DTRAIN_OK) {
        fprintf(stderr, "bench_gemm: %s\n", dtrain_last_error());
        return 1;
    }
    int failed = run_all(device);
    dtrain_device_destroy(device);
    return failed;
}
