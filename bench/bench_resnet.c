/* bench_resnet.c: training steps of ResNet-20 on CIFAR-10 (examples/resnet_cifar.c), beside PyTorch.
 *
 *   run:     make bench, or build/bench/bench_resnet --threads 2 --rounds 5 --log FILE
 *            build/bench/bench_resnet --pythons python3,newer/bin/python
 *
 * Every round runs each configuration once, one after the other (A B C A B C ...): the machine's drift
 * then meets all alike, and ratios are taken round by round. A run's figure is the median over its
 * steps without the first two. Rivals are the interpreters that have torch; each runs torch_resnet20.py,
 * channels last, with as many threads.
 *
 * Images are files in CIFAR-10's format that this program writes: dtrain crops, flips and normalises 128 new
 * ones a step beside its threads, PyTorch gets the same batch in every step.
 *
 *   images/s   of all threads: median over rounds (min to max)
 *   GFLOP/s    245e6 images/s: what plain convolutions multiply and add, forward and backward (three
 *              passes of 41 million multiply-adds an image)
 *   of_gemm    GFLOP/s over threads x gemm, the rate of one thread on a square product of 768 of fp32, in
 *              this run. Above 1: algorithms that multiply less
 *   floor      images/s if those multiply-adds alone ran at that rate
 *   correct    the loss starts near ln(10) and, without --quick, has fallen at the end of the last run */
#include "bench.h"
#include "train_run.h"
#include <sys/stat.h>

enum { MAX_CONFIGS = 16, MAX_ROUNDS = 64, SIDE = 768 };
enum {
    FILES = 6,
    FILE_IMAGES = 400,
    IMAGE_SIDE = 32,
    IMAGE_BYTES = 1 + 3 * IMAGE_SIDE * IMAGE_SIDE
};

static const double image_gflop = 0.245;

typedef struct config {
    char name[64], python[64]; /* python: "" for our own */
    bool half;
    double rate[MAX_ROUNDS], first_loss, last_loss;
} config;

static struct {
    const char *program, *pythons;
    long threads, batch, steps, rounds;
} opt = {"build/resnet_cifar", "python3", 2, 128, 12, 5};

static char folder[64]; /* of the images */
static config configs[MAX_CONFIGS];
static int config_count;

/* GFLOP/s of one thread's product in fp32, median of five; 0 and a message when it fails. */
static double gemm_rate(void)
{
    static float a[SIDE * SIDE], b[SIDE * SIDE], c[SIDE * SIDE];
    double rates[5] = {0};
    dtrain_device *device;
    dtrain_gemm_args args;
    for (int i = 0; i < SIDE * SIDE; i++) a[i] = b[i] = (float)(i % 8191) / 4096 - 1;
    memset(&args, 0, sizeof args);
    args.m = args.n = args.k = args.lda = args.ldb = args.ldc = SIDE;
    args.alpha = 1;
    args.a_dtype = args.b_dtype = args.c_dtype = DTRAIN_DTYPE_F32;
    args.a = a, args.b = b, args.c = c;
    dtrain_result result = dtrain_device_create(NULL, NULL, &device);
    for (int i = -1; i < 5 && result == DTRAIN_OK; i++) {
        const double start = dtrain_seconds();
        result = device->ops->gemm(device, &args);
        if (i >= 0) rates[i] = 2e-9 * SIDE * SIDE * SIDE / (dtrain_seconds() - start);
    }
    if (result != DTRAIN_OK) {
        fprintf(stderr, "bench_resnet: %s\n", dtrain_last_error());
        return 0;
    }
    dtrain_device_destroy(device);
    return median(rates, 5);
}

/* Write the path of an image file; the last is the test's. */
static void image_path(int file, char path[128])
{
    if (file < FILES - 1) snprintf(path, 128, "%s/data_batch_%d.bin", folder, file + 1);
    else snprintf(path, 128, "%s/test_batch.bin", folder);
}

/* Write images that can be told apart, stripes in noise; 0, or 1 after a message. */
static int write_images(void)
{
    static unsigned char image[IMAGE_BYTES];
    uint32_t noise = 1;
    char path[128];
    snprintf(folder, sizeof folder, "/tmp/bench_resnet.XXXXXX");
    int failed = !mkdtemp(folder);
    for (int f = 0; f < FILES && !failed; f++) {
        image_path(f, path);
        FILE *file = fopen(path, "wb");
        for (int i = 0; i < FILE_IMAGES && file; i++) {
            image[0] = (unsigned char)(i % 10);
            for (int p = 1; p < IMAGE_BYTES; p++) {
                const int x = (p - 1) % IMAGE_SIDE, y = (p - 1) / IMAGE_SIDE % IMAGE_SIDE;
                noise = noise * 1664525u + 1013904223u;
                image[p] =
                    (unsigned char)((int)(noise >> 25) + 12 * ((i % 5 * x + i / 5 % 2 * y) % 8));
            }
            fwrite(image, 1, IMAGE_BYTES, file);
        }
        failed = !file || ferror(file);
        if (file) failed = fclose(file) || failed;
    }
    if (failed) fprintf(stderr, "bench_resnet: cannot write images into %s\n", folder);
    return failed;
}

static void remove_images(void)
{
    char path[128];
    for (int f = 0; f < FILES; f++) {
        image_path(f, path);
        remove(path);
    }
    rmdir(folder);
}

static void add(const char *name, const char *python, bool half)
{
    if (config_count == MAX_CONFIGS) return;
    config *c = &configs[config_count++];
    snprintf(c->name, sizeof c->name, "%s, %s", name, half ? "bf16" : "fp32");
    snprintf(c->python, sizeof c->python, "%s", python);
    c->half = half;
}

/* Add the interpreters of the list that have torch, each with its version. */
static void add_rivals(bool half)
{
    for (const char *at = opt.pythons; *at; at += strcspn(at, ","), at += *at == ',') {
        char python[64], command[256], version[256], name[40];
        snprintf(python, sizeof python, "%.*s", (int)strcspn(at, ","), at);
        snprintf(command, sizeof command,
                 "%s -c 'import torch; print(torch.__version__)' 2>/dev/null", python);
        if (capture(command, version, sizeof version)) {
            fprintf(stderr, "bench_resnet: %s has no torch: left out\n", python);
            continue;
        }
        snprintf(name, sizeof name, "PyTorch %.20s", strtok(version, "+\n"));
        add(name, python, half);
    }
}

/* Run a configuration once; 0, or 1 after a message. */
static int run_config(config *c, int round)
{
    static char text[1 << 16];
    char command[512], log[64];
    train_run run;
    memset(&run, 0, sizeof run);
    snprintf(log, sizeof log, "/tmp/bench_resnet.%ld.jsonl", (long)getpid());
    if (c->python[0])
        snprintf(command, sizeof command,
                 "THREADS=%ld BATCH=%ld STEPS=%ld PRECISION=%s %s bench/torch_resnet20.py",
                 opt.threads, opt.batch, opt.steps, c->half ? "bf16" : "fp32", c->python);
    else
        snprintf(command, sizeof command,
                 "%s --data %s --ranks 1 --threads %ld --batch %ld --steps %ld --precision %s "
                 "--log %s",
                 opt.program, folder, opt.threads, opt.batch, opt.steps, c->half ? "bf16" : "fp32",
                 log);
    int failed = capture(command, text, sizeof text);
    if (c->python[0]) {
        c->rate[round] = number_after(text, "images_per_second ", 0);
        c->first_loss = number_after(text, "first_loss ", NAN);
        c->last_loss = number_after(text, "last_loss ", NAN);
    } else {
        failed = train_run_log(fopen(log, "r"), &run) || failed;
        c->rate[round] = 1000 * (double)opt.batch / run.step_ms;
        c->first_loss = run.losses[0];
        c->last_loss = run.steps ? run.losses[run.steps - 1] : NAN;
        remove(log);
    }
    if (failed) fprintf(stderr, "bench_resnet: failed: %s\n", command);
    return failed;
}

static void report(const config *c, double gemm)
{
    const spread rates = spread_of(c->rate, (int)opt.rounds);
    const double gflops = image_gflop * rates.median, peak = gemm * (double)opt.threads;
    bench_begin("resnet");
    bench_string("configuration", -24, c->name);
    bench_number("threads", 0, 0, (double)opt.threads);
    bench_number("batch", 5, 0, (double)opt.batch);
    bench_spread("images/s", 8, 0, rates);
    bench_number("GFLOP/s", 8, 1, gflops);
    bench_number("of_gemm", 7, 3, gflops / peak);
    bench_number("gemm", 0, 1, gemm);
    bench_number("floor", 6, 0, peak / image_gflop);
    bench_end(fabs(c->first_loss - log(10)) < 1.5 && (bench.quick || c->last_loss < c->first_loss));
}

static void report_ratio(const config *a, const config *b)
{
    char what[140];
    snprintf(what, sizeof what, "%.60s over %.60s", a->name, b->name);
    bench_begin("resnet");
    bench_string("of", -56, what);
    bench_spread("ratio", 6, 2, ratios_of(a->rate, b->rate, (int)opt.rounds, 1));
    bench_end(-1);
}

static const flag flag_table[] = {
    {"--program", 's', &opt.program, 0, 0, "resnet_cifar; build/resnet_cifar", NULL},
    {"--pythons", 's', &opt.pythons, 0, 0, "interpreters that may have torch; python3", NULL},
    {"--threads", 'i', &opt.threads, 1, 1024, "threads; 2", NULL},
    {"--batch", 'i', &opt.batch, 2, 4096, "images of a step; 128, with --quick 8", NULL},
    {"--steps", 'i', &opt.steps, 4, BENCH_MOST, "steps of a run; 12, with --quick 6", NULL},
    {"--rounds", 'i', &opt.rounds, 1, MAX_ROUNDS, "rounds; 5, with --quick 1", NULL},
    BENCH_FLAGS};

int main(int argc, char **argv)
{
    int failed = 0;
    if (is_quick(argc, argv)) opt.batch = 8, opt.steps = 6, opt.rounds = 1, opt.pythons = "";
    bench_start("bench_resnet", "training steps of ResNet-20 beside PyTorch", flag_table,
                sizeof flag_table / sizeof *flag_table, argc, argv);
    for (int half = 0; half < 2; half++) {
        add("dtrain", "", half);
        add_rivals(half);
    }
    const double gemm = gemm_rate();
    failed = write_images();
    for (int round = 0; round < opt.rounds && !failed; round++)
        for (int c = 0; c < config_count && !failed; c++) failed = run_config(&configs[c], round);
    remove_images();
    if (failed || gemm == 0) return 1;
    bench_title("ResNet-20, CIFAR-10, %s, %ld threads, %ld rounds", bench_kernels(false),
                opt.threads, opt.rounds);
    for (int c = 0; c < config_count; c++) report(&configs[c], gemm);
    bench_title("ratios, round by round");
    for (int a = 0; a < config_count; a++)
        for (int b = 0; b < config_count && !configs[a].python[0]; b++)
            if (configs[b].python[0] && configs[a].half == configs[b].half)
                report_ratio(&configs[a], &configs[b]);
    return bench.wrong > 0;
}
