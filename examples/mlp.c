/* mlp.c: a multi-layer perceptron on the tape, with its own training loop (no trainer): the
 * program writes the forward pass, the tape makes the backward pass and communicates during it.
 *
 *   build:   cc -O2 -I. examples/mlp.c -o mlp -lm -lpthread
 *   GPU:     nvcc -O3 -arch=native -I. -DDTRAIN_USE_CUDA examples/mlp.c dtrain_cuda.cu -lcublasLt -o mlp
 *   run:     ./mlp                      two ranks tell two spirals apart; ./mlp 3 starts three
 *            ./mlp 2 FOLDER             two ranks learn CIFAR-10 from FOLDER, which holds
 *                                       data_batch_1.bin to data_batch_5.bin and test_batch.bin
 *            ./mlp 1 --device cuda
 *            ./mlp 2 --fp16             layers compute in fp16, and the loss is scaled for it
 *   expect:
 *     epoch   6  training loss 0.5858  test accuracy  66.0 %
 *     epoch  12  training loss 0.2678  test accuracy  91.5 %
 *     ...
 *     epoch  60  training loss 0.0276  test accuracy  99.0 %
 *
 * Each rank trains on its part of each batch of 96; the loader deals samples as PyTorch's
 * DistributedSampler does. Gradients are averaged, so the result does not depend on the number of
 * ranks, except for rounding and for the samples that are left over at the end of an epoch. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* End this rank when a call fails. dtrain_launch then ends the others, and its own error quotes the
 * sentence of this one; the memory of a rank goes with its process. */
#define CHECK(call)                        \
    do {                                   \
        if ((call) != DTRAIN_OK) return 1; \
    } while (0)

enum { BATCH = 96, TEST_BATCH = 256, PIXELS = 3 * 32 * 32 };

/* ---- data: two datasets, one for training and one for the test ---------------------------- */

typedef struct task {
    const char *folder; /* of CIFAR-10; NULL: spirals */
    int64_t width, hidden, classes, epochs;
    bool fp16;
} task;

/* Draw points of two noisy spirals of one and a half turns; each spiral is a class. */
static dtrain_result draw_spirals(void *user, int64_t first, int64_t count, void *items,
                                  int32_t *labels)
{
    const uint64_t seed = *(const uint64_t *)user;
    float *x = items;
    for (int64_t i = first; i < first + count; i++) {
        const float along = dtrain_random_uniform(seed, 0, (uint64_t)i);
        const float radius = along + 0.02f * dtrain_random_normal(seed, 1, (uint64_t)i);
        const float angle = 9.0f * along + 3.14159265f * (float)(i % 2);
        *x++ = radius * cosf(angle);
        *x++ = radius * sinf(angle);
        if (labels) labels[i - first] = (int32_t)(i % 2);
    }
    return DTRAIN_OK;
}

/* Write the bytes of an image as floats: 120 and 64 are about their mean and deviation. */
static dtrain_result normalise(void *user, const dtrain_sample *sample, void *output)
{
    const unsigned char *pixels = sample->data;
    float *x = output;
    (void)user;
    for (int k = 0; k < PIXELS; k++) x[k] = ((float)pixels[k] - 120.0f) / 64.0f;
    return DTRAIN_OK;
}

static dtrain_result open_data(dtrain_world *world, const task *d, bool test, dtrain_dataset **out)
{
    static uint64_t seeds[2] = {3, 4};
    char path[4096] = "";
    const dtrain_dataset_desc spirals = {.vocab_count = 2,
                                         .item_count = test ? 200 : 1800,
                                         .item_bytes = 2 * sizeof(float),
                                         .read = draw_spirals,
                                         .user = &seeds[test]};
    const dtrain_dataset_desc files = {.format = DTRAIN_DATA_CIFAR10, .path = path};
    if (!d->folder) return dtrain_dataset_open(world, &spirals, out);
    if (test) snprintf(path, sizeof path, "%s/test_batch.bin", d->folder);
    for (int i = 1; i <= 5 && !test; i++)
        snprintf(path + strlen(path), sizeof path - strlen(path), "%s%s/data_batch_%d.bin",
                 i > 1 ? "," : "", d->folder, i);
    return dtrain_dataset_open(world, &files, out);
}

/* Create a loader of x (batch, width) and labels (batch). For training it shuffles and repeats the
 * samples; for the test it reads them in order, once. */
static dtrain_result open_loader(dtrain_world *world, const task *d, dtrain_dataset *from,
                                 int64_t batch, bool test, dtrain_loader **out)
{
    dtrain_loader_desc desc = {
        .batch = (uint32_t)batch, .seed = 1, .in_order = test, .drop_last = !test, .dataset = from};
    if (test) desc.sample_limit = DTRAIN_ONE_EPOCH; /* each sample once, then DTRAIN_ERROR_END */
    if (d->folder) {
        desc.workers = 1; /* reads the next batch during this step */
        desc.transform = normalise;
        desc.output_bytes = PIXELS * sizeof(float);
    }
    return dtrain_loader_create(world, &desc, out);
}

/* ---- model ------------------------------------------------------------------------------- */

enum { W1, B1, W2, B2, W3, B3, PARAMS };

static void declare(dtrain_param params[PARAMS], const task *d)
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

/* x (rows, width) -> logits (rows, classes). dtrain_tape_unit opens a unit. Strategies that shard
 * parameters gather and release it; the others ignore it. */
static dtrain_tensor *forward(dtrain_tape *t, dtrain_param *p, const task *d, const float *x,
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

/* Set *share to the fraction of all test samples whose largest logit is that of the label. Each rank
 * tests its part of the samples. Labels of -1 fill up the last batch and do not count. */
static int test(dtrain_world *world, dtrain_tape *t, dtrain_param *params, const task *d,
                dtrain_loader *loader, float *x, int32_t *labels, float *logits, double *share)
{
    dtrain_loader_info info;
    dtrain_result result;
    int64_t correct = 0;
    dtrain_loader_seek(loader, 0);
    dtrain_loader_query(loader, &info);
    const int64_t count = info.samples_per_epoch;
    while ((result = dtrain_loader_next(loader, x, labels)) == DTRAIN_OK) {
        CHECK(dtrain_tape_begin(t, DTRAIN_TAPE_NO_GRAD, 0));
        CHECK(dtrain_tensor_read(t, forward(t, params, d, x, TEST_BATCH), logits, NULL));
        for (int64_t r = 0; r < TEST_BATCH; r++) {
            const float *row = logits + r * d->classes;
            int32_t best = 0;
            for (int32_t c = 1; c < d->classes; c++)
                if (row[c] > row[best]) best = c;
            correct += best == labels[r];
        }
    }
    if (result != DTRAIN_ERROR_END) CHECK(result);
    CHECK(dtrain_all_reduce(dtrain_world_comm(world), &correct, &correct, 1, DTRAIN_DTYPE_I64,
                            DTRAIN_REDUCE_SUM, NULL));
    *share = (double)correct / (double)count;
    return 0;
}

/* Every rank runs this function. */
static int train(dtrain_world *world, void *user)
{
    const task *d = user;
    const int rank = dtrain_world_rank(world), ranks = dtrain_world_size(world);
    dtrain_dataset *train_data, *test_data;
    dtrain_dataset_info info;
    dtrain_loader *train_loader, *test_loader;
    CHECK(open_data(world, d, false, &train_data));
    CHECK(open_data(world, d, true, &test_data));
    dtrain_dataset_query(train_data, &info);
    int64_t batch = BATCH < info.item_count ? BATCH / ranks : info.item_count / ranks;
    if (batch < 1) batch = 1;
    CHECK(open_loader(world, d, train_data, batch, false, &train_loader));
    CHECK(open_loader(world, d, test_data, TEST_BATCH, true, &test_loader));
    dtrain_loader_info epochs;
    dtrain_loader_query(train_loader, &epochs);

    float *x = malloc((size_t)(TEST_BATCH * d->width) * sizeof *x); /* of either batch */
    int32_t *labels = malloc(TEST_BATCH * sizeof *labels);
    float *logits = malloc((size_t)(TEST_BATCH * d->classes) * sizeof *logits);
    if (!x || !labels || !logits) CHECK(dtrain_fail(DTRAIN_ERROR_MEMORY, "no memory for a batch"));

    dtrain_param params[PARAMS];
    dtrain_strategy *strategy;
    dtrain_optimizer *optimizer;
    dtrain_tape *tape;
    const dtrain_optimizer_desc adamw = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_ADAMW);
    const int64_t steps = epochs.samples_per_epoch / (batch * ranks); /* of an epoch */
    const dtrain_schedule schedule = {.kind = DTRAIN_SCHEDULE_COSINE,
                                      .lr = 3e-3f,
                                      .warmup_steps = 10,
                                      .total_steps = d->epochs * steps};
    dtrain_loss_scaler scaler = {.scale = d->fp16 ? 65536 : 1}; /* torch.amp.GradScaler */
    declare(params, d);
    CHECK(dtrain_strategy_create(world, params, PARAMS, NULL, &strategy)); /* NULL: plain DDP */
    CHECK(dtrain_optimizer_create(world, strategy, &adamw, &optimizer));
    CHECK(dtrain_tape_create(world, strategy, NULL, &tape));

    for (int64_t epoch = 0; epoch < d->epochs; epoch++) {
        float loss, norm, clip, sum = 0;
        double share;
        for (int64_t step = 0; step < steps; step++) {
            CHECK(dtrain_loader_next(train_loader, x, labels));
            CHECK(dtrain_tape_begin(tape, d->fp16 ? DTRAIN_TAPE_F16 : 0, 0));
            dtrain_tensor *mean = dtrain_cross_entropy(
                tape, forward(tape, params, d, x, batch),
                dtrain_tape_input(tape, DTRAIN_DTYPE_I32, 1, &batch, labels, false), 0, 0);
            CHECK(dtrain_tensor_read(tape, mean, &loss, NULL));
            CHECK(dtrain_tape_backward(tape, mean, scaler.scale)); /* reduces each final gradient */
            CHECK(dtrain_strategy_finish(strategy));
            CHECK(dtrain_grad_norm(strategy, &scaler, 1, &norm, &clip)); /* clip unscales, too */
            const float lr = dtrain_schedule_lr(&schedule, epoch * steps + step);
            if (isfinite(norm)) CHECK(dtrain_optimizer_step(optimizer, lr, clip));
            if (d->fp16) CHECK(dtrain_loss_scaler_update(&scaler, !isfinite(norm)));
            sum += loss / (float)steps;
        }
        if ((epoch + 1) % (d->epochs / 10)) continue;
        CHECK(dtrain_all_reduce(dtrain_world_comm(world), &sum, &sum, 1, DTRAIN_DTYPE_F32,
                                DTRAIN_REDUCE_MEAN, NULL));
        if (test(world, tape, params, d, test_loader, x, labels, logits, &share)) return 1;
        if (rank == 0)
            printf("epoch %3lld  training loss %.4f  test accuracy %5.1f %%\n",
                   (long long)epoch + 1, sum, 100 * share);
    }
    dtrain_tape_destroy(tape);
    dtrain_optimizer_destroy(optimizer);
    dtrain_strategy_destroy(strategy);
    dtrain_loader_destroy(train_loader);
    dtrain_loader_destroy(test_loader);
    dtrain_dataset_close(train_data);
    dtrain_dataset_close(test_data);
    free(x);
    free(labels);
    free(logits);
    return 0;
}

int main(int argc, char **argv)
{
    /* Under torchrun, mpirun or srun the launcher's number of ranks counts, else these two. */
    dtrain_launch_desc desc = {.default_rank_count = 2};
    task d = {.width = 2, .hidden = 64, .classes = 2, .epochs = 60};
    const char *device = "cpu";
    for (int a = 1; a < argc; a++) {
        char *end;
        const unsigned long number = strtoul(argv[a], &end, 10);
        if (strcmp(argv[a], "--device") == 0 && a + 1 < argc) device = argv[++a];
        else if (strcmp(argv[a], "--fp16") == 0) d.fp16 = true;
        else if (*end == 0 && number > 0) desc.rank_count = (uint32_t)number;
        else if (!d.folder && argv[a][0] != '-') d.folder = argv[a];
        else {
            fprintf(stderr,
                    "usage: mlp [RANKS] [FOLDER] [--device cpu|cuda] [--fp16], not \"%s\"\n",
                    argv[a]);
            return 2;
        }
    }
    if (d.folder) {
        d.width = PIXELS;
        d.hidden = 256;
        d.classes = 10;
        d.epochs = 10;
    }
    if (dtrain_device_ops_by_name(device, &desc.device_ops) == DTRAIN_OK &&
        dtrain_launch(&desc, train, &d, NULL) == DTRAIN_OK)
        return 0;
    fprintf(stderr, "mlp: %s\n", dtrain_last_error());
    return 1;
}
