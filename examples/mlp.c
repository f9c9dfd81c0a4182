/* mlp.c: a multi-layer perceptron on the tape, with a training loop of its own (no trainer): the
 * program writes the forward pass, the tape makes the backward pass and communicates during it.
 *
 *   build:   cc -O2 -I. examples/mlp.c -o mlp -lm -lpthread
 *   GPU:     nvcc -O3 -I. -DDTRAIN_USE_CUDA examples/mlp.c dtrain_cuda.cu -lcublasLt -o mlp
 *   run:     ./mlp                      two ranks tell two spirals apart; ./mlp 3 starts three
 *            ./mlp 2 FOLDER             two ranks learn CIFAR-10 from FOLDER, which holds
 *                                       data_batch_1.bin to data_batch_5.bin and test_batch.bin
 *            ./mlp 1 --device cuda
 *   expect  of ./mlp:
 *     epoch   6  training loss 0.5858  test accuracy  66.0 %
 *     epoch  12  training loss 0.2678  test accuracy  91.5 %
 *     ...
 *     epoch  60  training loss 0.0276  test accuracy  99.0 %
 *            and of ./mlp 2 FOLDER with a tenth of CIFAR-10, 4660 training and 846 test images:
 *     epoch   1  training loss 2.8318  test accuracy  27.5 %
 *     ...
 *     epoch  10  training loss 0.3046  test accuracy  40.0 %
 *
 * Every rank trains on its own part of each batch of 96, dealt as by PyTorch's DistributedSampler.
 * Gradients are averaged, so the result does not depend on the number of ranks that share the work,
 * except for rounding and for the samples that are left over at the end of an epoch. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

/* End this rank when a call fails. dtrain_launch then ends the others, and its own error quotes the
 * sentence of this one; the memory of a rank goes with its process. */
#define CHECK(call)                        \
    do {                                   \
        if ((call) != DTRAIN_OK) return 1; \
    } while (0)

enum { BATCH = 96, TEST_BATCH = 256, PIXELS = 3 * 32 * 32, RECORD = 1 + PIXELS };

/* ---- data: read before the ranks start, so that forked ranks share the memory ------------ */

typedef struct samples {
    int64_t count;
    float *x;        /* (count, width) */
    int32_t *labels; /* (count) */
} samples;

typedef struct data {
    int64_t width, hidden, classes, epochs;
    samples train, test;
} data;

/* Make room for `more` samples at the end. */
static bool grow(samples *s, int64_t more, int64_t width)
{
    const size_t count = (size_t)(s->count + more);
    float *x = realloc(s->x, count * (size_t)width * sizeof *x);
    if (x) s->x = x;
    int32_t *labels = realloc(s->labels, count * sizeof *labels);
    if (labels) s->labels = labels;
    if (!x || !labels) fprintf(stderr, "mlp: no memory for %zu samples\n", count);
    return x && labels;
}

/* Two noisy spirals, one a class, each of one and a half turns. */
static bool make_spirals(samples *s, int64_t count, uint64_t seed)
{
    if (!grow(s, count, 2)) return false;
    s->count = count;
    for (int64_t i = 0; i < count; i++) {
        const float along = dtrain_random_uniform(seed, 0, (uint64_t)i);
        const float radius = along + 0.02f * dtrain_random_normal(seed, 1, (uint64_t)i);
        s->labels[i] = (int32_t)(i % 2);
        const float angle = 9.0f * along + 3.14159265f * (float)s->labels[i];
        s->x[2 * i] = radius * cosf(angle);
        s->x[2 * i + 1] = radius * sinf(angle);
    }
    return true;
}

/* Append the records of an open file: a byte with the label, then 3072 bytes of pixels. */
static bool read_records(FILE *file, const char *path, samples *s)
{
    unsigned char record[RECORD];
    fseek(file, 0, SEEK_END);
    const long bytes = ftell(file);
    rewind(file);
    if (bytes <= 0 || bytes % RECORD) {
        fprintf(stderr,
                "mlp: \"%s\" has %ld bytes; expected records of %d bytes (CIFAR-10's "
                "binary version)\n",
                path, bytes, RECORD);
        return false;
    }
    if (!grow(s, bytes / RECORD, PIXELS)) return false;
    for (long r = 0; r < bytes / RECORD; r++, s->count++) {
        if (fread(record, RECORD, 1, file) != 1) {
            fprintf(stderr, "mlp: record %ld of \"%s\" could not be read\n", r, path);
            return false;
        }
        if (record[0] > 9) {
            fprintf(stderr, "mlp: record %ld of \"%s\" has label %d; expected 0 to 9\n", r, path,
                    record[0]);
            return false;
        }
        s->labels[s->count] = record[0];
        for (int k = 0; k < PIXELS; k++) /* 120 and 64: about their mean and deviation */
            s->x[s->count * PIXELS + k] = ((float)record[1 + k] - 120.0f) / 64.0f;
    }
    return true;
}

static bool read_file(const char *folder, const char *name, samples *s)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "rb");
    if (!file) {
        fprintf(stderr, "mlp: cannot open \"%s\": %s\n", path, strerror(errno));
        return false;
    }
    const bool good = read_records(file, path, s);
    fclose(file);
    return good;
}

static bool read_cifar(data *d, const char *folder)
{
    char name[32];
    for (int i = 1; i <= 5; i++) {
        snprintf(name, sizeof name, "data_batch_%d.bin", i);
        if (!read_file(folder, name, &d->train)) return false;
    }
    return read_file(folder, "test_batch.bin", &d->test);
}

/* ---- model ------------------------------------------------------------------------------- */

enum { W1, B1, W2, B2, W3, B3, PARAMS };

static void declare(dtrain_param params[PARAMS], const data *d)
{
    static const char *const names[PARAMS] = {"fc1.weight", "fc1.bias",   "fc2.weight",
                                              "fc2.bias",   "fc3.weight", "fc3.bias"};
    const int64_t widths[4] = {d->width, d->hidden, d->hidden, d->classes};
    memset(params, 0, PARAMS * sizeof *params);
    for (int i = 0; i < PARAMS; i++) {
        const int layer = i / 2;
        params[i].name = names[i];
        params[i].unit = (uint32_t)layer;
        params[i].shape[0] = widths[layer + 1];
        if (i % 2) continue; /* biases start at zero */
        params[i].shape[1] = widths[layer];
        params[i].init = DTRAIN_INIT_UNIFORM; /* He et al., 2015 */
        params[i].init_scale = sqrtf(6.0f / (float)widths[layer]);
    }
}

/* x (rows, width) -> logits (rows, classes). dtrain_tape_unit opens a unit, which strategies that
 * shard parameters gather and release; the others ignore it. */
static dtrain_tensor *forward(dtrain_tape *t, dtrain_param *p, const data *d, const float *x,
                              int64_t rows)
{
    const int64_t shape[2] = {rows, d->width};
    dtrain_tensor *h = dtrain_tape_input(t, DTRAIN_DTYPE_F32, 2, shape, x, false);
    dtrain_tape_unit(t, 0);
    h = dtrain_linear(t, h, &p[W1], &p[B1], DTRAIN_ACTIVATION_RELU); /* (rows, hidden) */
    dtrain_tape_unit(t, 1);
    h = dtrain_linear(t, h, &p[W2], &p[B2], DTRAIN_ACTIVATION_RELU);
    dtrain_tape_unit(t, 2);
    return dtrain_linear(t, h, &p[W3], &p[B3], DTRAIN_ACTIVATION_NONE);
}

/* ---- training ---------------------------------------------------------------------------- */

/* *share = the fraction of all test samples whose largest logit is the label's. Each rank tests
 * every ranks-th chunk of TEST_BATCH samples. */
static int test(dtrain_world *world, dtrain_tape *t, dtrain_param *params, const data *d,
                float *logits, double *share)
{
    const samples *s = &d->test;
    const int64_t stride = (int64_t)TEST_BATCH * dtrain_world_size(world);
    int64_t correct = 0;
    for (int64_t at = (int64_t)TEST_BATCH * dtrain_world_rank(world); at < s->count; at += stride) {
        const int64_t rows = s->count - at < TEST_BATCH ? s->count - at : TEST_BATCH;
        CHECK(dtrain_tape_begin(t, DTRAIN_TAPE_NO_GRAD, 0));
        CHECK(dtrain_tensor_read(t, forward(t, params, d, s->x + at * d->width, rows), logits));
        for (int64_t r = 0; r < rows; r++) {
            const float *row = logits + r * d->classes;
            int32_t best = 0;
            for (int32_t c = 1; c < d->classes; c++)
                if (row[c] > row[best]) best = c;
            correct += best == s->labels[at + r];
        }
    }
    CHECK(dtrain_all_reduce(dtrain_world_comm(world), &correct, &correct, 1, DTRAIN_DTYPE_I64,
                            DTRAIN_REDUCE_SUM, NULL));
    *share = (double)correct / (double)s->count;
    return 0;
}

/* Every rank runs this function. */
static int train(dtrain_world *world, void *user)
{
    const data *d = user;
    const int rank = dtrain_world_rank(world), ranks = dtrain_world_size(world);
    const dtrain_sampler_desc sampler = {.rank = (uint32_t)rank,
                                         .rank_count = (uint32_t)ranks,
                                         .item_count = d->train.count,
                                         .seed = 1,
                                         .shuffle = true,
                                         .drop_last = true};
    int64_t own; /* samples of this rank in an epoch */
    CHECK(dtrain_sampler_indices(&sampler, 0, NULL, NULL, &own));
    int64_t batch = BATCH / ranks > 0 ? BATCH / ranks : 1;
    if (own < 1)
        CHECK(dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%d ranks cannot share %lld training samples",
                          ranks, (long long)d->train.count));
    if (batch > own) batch = own;

    int64_t *scratch = malloc((size_t)d->train.count * sizeof *scratch);
    int64_t *order = malloc((size_t)own * sizeof *order);
    float *x = malloc((size_t)(batch * d->width) * sizeof *x);
    int32_t *labels = malloc((size_t)batch * sizeof *labels);
    float *logits = malloc((size_t)(TEST_BATCH * d->classes) * sizeof *logits);
    if (!scratch || !order || !x || !labels || !logits)
        CHECK(dtrain_fail(DTRAIN_ERROR_MEMORY, "no memory for a batch of %lld samples",
                          (long long)batch));

    dtrain_param params[PARAMS];
    dtrain_strategy *strategy;
    dtrain_optimizer *optimizer;
    dtrain_tape *tape;
    const dtrain_optimizer_desc adamw = dtrain_adamw_defaults();
    const int64_t steps = own / batch; /* of an epoch */
    const dtrain_schedule schedule = {.kind = DTRAIN_SCHEDULE_COSINE,
                                      .lr = 3e-3f,
                                      .warmup_steps = 10,
                                      .total_steps = d->epochs * steps};
    declare(params, d);
    CHECK(dtrain_strategy_create(world, params, PARAMS, NULL, &strategy)); /* NULL: plain DDP */
    CHECK(dtrain_optimizer_create(world, strategy, &adamw, &optimizer));
    CHECK(dtrain_tape_create(world, strategy, NULL, &tape));

    for (int64_t epoch = 0; epoch < d->epochs; epoch++) {
        float loss, norm, clip, sum = 0;
        double share;
        CHECK(dtrain_sampler_indices(&sampler, (uint64_t)epoch, scratch, order, &own));
        for (int64_t step = 0; step < steps; step++) {
            for (int64_t b = 0; b < batch; b++) {
                const int64_t row = order[step * batch + b];
                memcpy(x + b * d->width, d->train.x + row * d->width, (size_t)d->width * sizeof *x);
                labels[b] = d->train.labels[row];
            }
            CHECK(dtrain_tape_begin(tape, 0, 0));
            dtrain_tensor *mean = dtrain_cross_entropy(
                tape, forward(tape, params, d, x, batch),
                dtrain_tape_input(tape, DTRAIN_DTYPE_I32, 1, &batch, labels, false), 0, 0);
            CHECK(dtrain_tensor_read(tape, mean, &loss));
            CHECK(dtrain_tape_backward(tape, mean, 1)); /* reduces gradients as they are made */
            CHECK(dtrain_strategy_finish(strategy));
            CHECK(dtrain_clip_grad_norm(strategy, 1, &norm, &clip));
            CHECK(dtrain_optimizer_step(optimizer,
                                        dtrain_schedule_lr(&schedule, epoch * steps + step), clip));
            sum += loss / (float)steps;
        }
        if ((epoch + 1) % (d->epochs / 10)) continue;
        CHECK(dtrain_all_reduce(dtrain_world_comm(world), &sum, &sum, 1, DTRAIN_DTYPE_F32,
                                DTRAIN_REDUCE_MEAN, NULL));
        if (test(world, tape, params, d, logits, &share)) return 1;
        if (rank == 0)
            printf("epoch %3lld  training loss %.4f  test accuracy %5.1f %%\n",
                   (long long)epoch + 1, sum, 100 * share);
    }
    dtrain_tape_destroy(tape);
    dtrain_optimizer_destroy(optimizer);
    dtrain_strategy_destroy(strategy);
    free(scratch);
    free(order);
    free(x);
    free(labels);
    free(logits);
    return 0;
}

int main(int argc, char **argv)
{
    /* Under torchrun, mpirun or srun the launcher's number of ranks counts, else these two. */
    dtrain_launch_desc desc = {.default_rank_count = 2};
    data d = {.width = 2, .hidden = 64, .classes = 2, .epochs = 60};
    const char *device = "cpu", *folder = NULL;
    for (int a = 1; a < argc; a++) {
        char *end;
        const unsigned long number = strtoul(argv[a], &end, 10);
        if (strcmp(argv[a], "--device") == 0 && a + 1 < argc) device = argv[++a];
        else if (*end == 0 && number > 0) desc.rank_count = (uint32_t)number;
        else if (!folder && argv[a][0] != '-') folder = argv[a];
        else {
            fprintf(stderr, "usage: mlp [RANKS] [FOLDER] [--device cpu|cuda], not \"%s\"\n",
                    argv[a]);
            return 2;
        }
    }
    bool good;
    if (folder) {
        d.width = PIXELS;
        d.hidden = 256;
        d.classes = 10;
        d.epochs = 10;
        good = read_cifar(&d, folder);
    } else good = make_spirals(&d.train, 1800, 3) && make_spirals(&d.test, 200, 4);
    if (good) {
        good = dtrain_device_ops_by_name(device, &desc.device_ops) == DTRAIN_OK &&
               dtrain_launch(&desc, train, &d, NULL) == DTRAIN_OK;
        if (!good) fprintf(stderr, "mlp: %s\n", dtrain_last_error());
    }
    free(d.train.x);
    free(d.train.labels);
    free(d.test.x);
    free(d.test.labels);
    return good ? 0 : 1;
}
