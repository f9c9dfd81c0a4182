/* bench_gemm.c: matrix products of the CPU device, beside OpenBLAS and BLIS where installed.
 *
 *   run:     make bench, or build/bench/bench_gemm --threads 2 --log FILE
 *            build/bench/bench_gemm --openblas-core SkylakeX     OpenBLAS with another kernel
 *            build/bench/bench_gemm --bf16       our operands in bf16, beside ours in fp32
 *   build:   cc -O2 -I. -Ibench bench/bench_gemm.c -o bench_gemm -lm -lpthread -ldl
 *
 * Shapes are "transposes M x N x K" of C (M,N) = op(A) (M,K) op(B) (K,N). Those of GPTs come first
 * and make the mean: GPT-2 124M on 256 tokens with its vocabulary of 50257 (and padded to 50304),
 * 6 layers of 384 channels on 1024 tokens, nanoGPT's CPU example on 768; each as forward (NT),
 * gradient of the input (NN) and of the weight (TN). Attention's 64^3 and squares follow.
 *
 * A repetition runs everyone once, one after the other, beginning with another one each time: the
 * machine's drift then meets all alike, and ratios are taken within a repetition.
 *
 *   GFLOP/s   2 M N K / time, median (min to max) over the repetitions; those of a peer under its name
 *   of_peak   the floor: GFLOP/s over threads x peak. The peak is the rate of one thread doing
 *             fp32 multiply-adds on registers only, another contender of each repetition; bf16
 *             instructions exceed it
 *   over_NAME our GFLOP/s over the peer's, median (min to max)
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
    long threads, reps, bf16;
} opt = {NULL, 1, 0, 0};

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
    if (!bench.json) printf("%s: not installed, skipped\n", name);
    return NULL;
}

static void load_openblas(void)
{
    void (*set_threads)(int);
    char *(*core)(void);
    void *library = open_library("OpenBLAS", "libopenblas.so.0", "libopenblas.so");
    if (!library) return;
    peer *x = &peers[peer_count++];
    if (find_function(library, "openblas_set_num_threads", &set_threads))
        set_threads((int)opt.threads);
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
    snprintf(x->kernel, sizeof x->kernel, "dtrain %s", bench_kernels(false));
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
    uint16_t *half = (uint16_t *)bench_alloc(count * sizeof *half);
    for (size_t i = 0; i < count; i++) {
        half[i] = dtrain_half_from_f32(DTRAIN_DTYPE_BF16, x[i]);
        x[i] = dtrain_half_to_f32(DTRAIN_DTYPE_BF16, half[i]);
    }
    return half;
}

static void use_bf16(trial *t)
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
}

static float *random_floats(size_t count, uint32_t seed)
{
    float *x = (float *)bench_alloc(count * sizeof *x);
    for (size_t i = 0; i < count; i++) {
        seed = seed * 1664525u + 1013904223u;
        x[i] = (float)(seed >> 8) / 8388608.0f - 1.0f;
    }
    return x;
}

static void trial_init(trial *t, const shape *s, dtrain_device *device)
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
    if (opt.bf16) use_bf16(t);
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
    const float c = half ? dtrain_half_to_f32(DTRAIN_DTYPE_BF16, t->half_c[i * g->ldc + j])
                         : t->c[i * g->ldc + j];
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
    double seconds = bench.quick ? 0.002 : 0.02;
    for (int i = OURS; i < runners; i++) wrong += check(t, i);
    for (int r = 0; r < opt.reps; r++)
        for (int i = 0; i < runners; i++) {
            int runner = (r + i) % runners;
            t->rates[runner][r] = measure(t, runner, seconds);
        }
    return wrong;
}

/* ---- Report ---- */

static spread ratio(const trial *t, int runner, double scale)
{
    return ratios_of(t->rates[OURS], t->rates[runner], (int)opt.reps, scale);
}

static const char *kernel_name(void) { return bench_kernels(opt.bf16); }

static void report(const trial *t, int wrong)
{
    const shape *s = t->shape;
    char text[64];
    snprintf(text, sizeof text, "%s %d x %d x %d", s->trans, s->m, s->n, s->k);
    bench_begin("gemm");
    bench_string("shape", -22, text);
    bench_number("threads", 0, 0, (double)opt.threads);
    bench_string("dtype", 0, opt.bf16 ? "bf16" : "f32");
    bench_string("kernel", 0, kernel_name());
    bench_string("gpt", 0, s->gpt ? "yes" : "no");
    bench_spread("GFLOP/s", 6, 1, spread_of(t->rates[OURS], (int)opt.reps));
    bench_number("of_peak", 7, 3, ratio(t, PEAK, 1 / (double)opt.threads).median);
    for (int i = 0; i < peer_count; i++) {
        snprintf(text, sizeof text, "over_%s", peers[i].name);
        bench_number(peers[i].name, 8, 1, median(t->rates[FIRST_PEER + i], (int)opt.reps));
        bench_spread(text, 5, 2, ratio(t, FIRST_PEER + i, 1));
    }
    bench_end(!wrong);
}

/* The geometric mean over the GPT shapes. OpenBLAS, the faster peer, comes last. */
static void report_mean(const char *of, int count, double log_sum)
{
    bench_begin("gemm_mean");
    bench_string("geometric mean over GPT shapes", -40, of);
    bench_number("shapes", 6, 0, count);
    bench_number("threads", 0, 0, (double)opt.threads);
    bench_number("mean", 7, 3, exp(log_sum / count));
    bench_end(-1);
}

static void print_title(void)
{
    for (int i = 0; i < peer_count && !bench.json; i++)
        printf("%s: %s\n", peers[i].name, peers[i].kernel);
    bench_title("dtrain: %s, %ld threads, %ld repetitions, peak %.1f GFLOP/s a thread at the start",
                kernel_name(), opt.threads, opt.reps, measure_peak(0.02));
}

static int run_all(dtrain_device *device)
{
    double log_rates = 0, log_shares = 0;
    int count = 0;
    print_title();
    for (int s = 0; s < SHAPE_COUNT; s++) {
        trial t;
        if (bench.quick && !shapes[s].quick) continue;
        trial_init(&t, &shapes[s], device);
        report(&t, run(&t));
        for (int i = 0; shapes[s].gpt && i < peer_count; i++)
            peers[i].log_sum += log(ratio(&t, FIRST_PEER + i, 1).median);
        if (shapes[s].gpt) {
            log_rates += log(median(t.rates[OURS], (int)opt.reps));
            log_shares += log(ratio(&t, PEAK, 1 / (double)opt.threads).median);
            count++;
        }
        trial_free(&t);
    }
    report_mean("GFLOP/s", count, log_rates);
    report_mean("of_peak", count, log_shares);
    for (int i = peer_count; i-- > 0;) {
        char of[128];
        snprintf(of, sizeof of, "over %s (%s)", peers[i].name, peers[i].kernel);
        report_mean(of, count, peers[i].log_sum);
    }
    return bench.wrong > 0;
}

static const flag flag_table[] = {
    {"--threads", 'i', &opt.threads, 1, 1024, "threads of everyone", NULL},
    {"--reps", 'i', &opt.reps, 1, MAX_REPS, "repetitions; 7, with --quick 3", NULL},
    {"--openblas-core", 's', &opt.openblas_core, 0, 0, "OpenBLAS's kernel: Haswell, SkylakeX, ...",
     NULL},
    {"--bf16", 'b', &opt.bf16, 0, 0, "A and B in bf16, beside the fp32 product", NULL},
    BENCH_FLAGS};

int main(int argc, char **argv)
{
    dtrain_device_desc desc;
    dtrain_device *device;
    opt.reps = is_quick(argc, argv) ? 3 : 7;
    bench_start("bench_gemm", "GFLOP/s of matrix products beside OpenBLAS and BLIS", flag_table,
                sizeof flag_table / sizeof *flag_table, argc, argv);
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
