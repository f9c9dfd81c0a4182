/* resnet_cifar.c: ResNet-20 (He et al., "Deep Residual Learning", 2016) on CIFAR-10, with the paper's recipe: crops and
 * flips, SGD with momentum, a rate that falls tenfold after half and after three quarters of the run.
 *
 *   build:   cc -O2 -I. examples/resnet_cifar.c -o resnet_cifar -lm -lpthread
 *   GPU:     nvcc -O3 -arch=native -I. -DDTRAIN_USE_CUDA examples/resnet_cifar.c \
 *            dtrain_cuda.cu -lcublasLt -o resnet_cifar
 *   run:     ./resnet_cifar --data FOLDER      which holds data_batch_1.bin to _5.bin and test_batch.bin
 *            ./resnet_cifar --epochs 3         the same on images that it draws itself
 *            ./resnet_cifar --epochs 1 --checkpoint run --save-every 5 --restarts 3 --resume auto
 *   flags:   --data, --epochs or --steps in its place, --sync-batchnorm, and the switches of all training programs
 *            (tools/run): --ranks --batch --threads --seed --strategy --precision --log ...; --help lists them
 *   expect   of ./resnet_cifar --ranks 2 --epochs 3 --batch 32, of one machine, in half a minute of two cores:
 *     6000 training images, 500 for the test; 2 ranks x 32 images a step
 *     model   ResNet-20: 272474 parameters
 *     strategy ddp: 1 shard x 2 replicas, gradients in 2 buckets
 *     memory  a rank will need 63.4 MiB: parameters 1.0, gradients 1.0, optimizer 1.0, ...
 *     epoch   steps      lr  training loss  test accuracy  images/s
 *         1      93  0.1000         1.0962         85.8 %       ...
 *     ...
 *
 * At a rate of 0.1 accuracy improves later than the loss, and can fall for an epoch: a test normalises by running
 * averages, which follow the weights slowly. When the rate falls, in the second epoch, accuracy reaches 100 %.
 *
 * The order of images, and how each is cropped and flipped, depends only on seed, epoch and image. So ranks that share
 * a batch see the images that one rank sees. With --sync-batchnorm they also normalise over the whole batch, and the
 * curve is the same as on one rank, except for rounding: at a rate of 0.1 it grows to one per cent of the loss in
 * twelve steps, with --lr 1e-6 the losses agree to seven digits. Without --sync-batchnorm each rank normalises over its
 * own images, as PyTorch's DDP does.
 *
 * The file goes from images to the model, the batches, and the functions that tools/run calls. mlp.c and gpt.c have a
 * training loop without tools/run. */
#define RUN_NAME "resnet_cifar"
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

#include "tools/run/run.h"
#include "tools/plan/plan.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SIDE = 32, COLORS = 3, PIXELS = SIDE * SIDE * COLORS, CLASSES = 10, PADDING = 4 };

/* ---- images ---- */

/* What the program can be asked for beside run_flags. */
static struct {
    const char *data;
    long epochs, sync;
} own_flags = {.epochs = 20};

/* Draw images for a try without data: noisy stripes whose width and colour show the class. Their direction is random,
 * because the mirror image of a class must not be another class: training flips images. */
static dtrain_result draw_images(void *user, int64_t first, int64_t count, void *items,
                                 int32_t *labels)
{
    const uint64_t seed = *(const uint64_t *)user;
    unsigned char *pixel = items;
    for (int64_t i = first; i < first + count; i++) {
        const int label = (int)(i % CLASSES);
        const float phase = 6.28f * dtrain_random_uniform(seed, 0, (uint64_t)i),
                    angle = 3.14f * dtrain_random_uniform(seed, 2, (uint64_t)i),
                    fine = 0.3f * (float)(label % 5 + 1); /* radians a pixel */
        for (int p = 0; p < PIXELS; p++) {
            const float x = (float)(p % SIDE), y = (float)(p / SIDE % SIDE);
            const float wave = cosf(fine * (x * cosf(angle) + y * sinf(angle)) + phase);
            const float noise = dtrain_random_normal(seed, 1, (uint64_t)(i * PIXELS + p));
            const float light = p / (SIDE * SIDE) == label / 5 ? 50 * wave : 0;
            *pixel++ = (unsigned char)fminf(255, fmaxf(0, 120 + light + 40 * noise));
        }
        if (labels) labels[i - first] = label;
    }
    return DTRAIN_OK;
}

/* Open the images of --data for training or for the test, or draw some. */
static dtrain_result open_images(dtrain_world *world, bool test, dtrain_dataset **out)
{
    static uint64_t seeds[2] = {1, 2};
    char path[4096] = "";
    const dtrain_dataset_desc drawn = {.vocab_count = CLASSES,
                                       .item_count = test ? 500 : 6000,
                                       .item_bytes = PIXELS,
                                       .read = draw_images,
                                       .user = &seeds[test]};
    const dtrain_dataset_desc files = {.format = DTRAIN_DATA_CIFAR10, .path = path};
    if (!own_flags.data) return dtrain_dataset_open(world, &drawn, out);
    if (test) snprintf(path, sizeof path, "%s/test_batch.bin", own_flags.data);
    for (int i = 1; i <= 5 && !test; i++)
        snprintf(path + strlen(path), sizeof path - strlen(path), "%s%s/data_batch_%d.bin",
                 i > 1 ? "," : "", own_flags.data, i);
    return dtrain_dataset_open(world, &files, out);
}

/* Write one image as floats, channels last: shifted, flipped, each colour about mean 0 and deviation 1. */
static void put_image(const unsigned char *pixels, int down, int right, bool flip, float *out)
{
    static const float mean[COLORS] = {125.3f, 123.0f, 113.9f},
                       deviation[COLORS] = {63.0f, 62.1f, 66.7f};
    for (int y = 0; y < SIDE; y++)
        for (int x = 0; x < SIDE; x++)
            for (int c = 0; c < COLORS; c++) {
                const int from_y = y + down, from_x = (flip ? SIDE - 1 - x : x) + right;
                const bool inside = from_y >= 0 && from_y < SIDE && from_x >= 0 && from_x < SIDE;
                const int at = c * SIDE * SIDE + from_y * SIDE + from_x;
                *out++ = inside ? ((float)pixels[at] - mean[c]) / deviation[c]
                                : 0; /* padding: the mean */
            }
}

static dtrain_result plain(void *user, const dtrain_sample *sample, void *output)
{
    (void)user;
    put_image(sample->data, 0, 0, false, output);
    return DTRAIN_OK;
}

/* Crop and flip an image. The draw depends on image and epoch, not on the rank or the worker. */
static dtrain_result augmented(void *user, const dtrain_sample *sample, void *output)
{
    float draw[3];
    (void)user;
    for (uint64_t k = 0; k < 3; k++)
        draw[k] = dtrain_random_uniform((uint64_t)run_flags.seed, sample->epoch + 1,
                                        (uint64_t)sample->item * 3 + k);
    put_image(sample->data, (int)(draw[0] * (2 * PADDING + 1)) - PADDING,
              (int)(draw[1] * (2 * PADDING + 1)) - PADDING, draw[2] < 0.5f, output);
    return DTRAIN_OK;
}

/* ---- model ---- */

enum {
    BLOCKS = 9,
    NORM = 4,
    BLOCK = 2 + 2 * NORM + 1 + NORM,
    PARAMS = 1 + NORM + BLOCKS * BLOCK + 2
};
enum { CONV1 = 0, NORM1, CONV2 = NORM1 + NORM, NORM2, SHORTCUT = NORM2 + NORM, NORM3 };

typedef struct model {
    dtrain_param params[PARAMS];
    char names[PARAMS][32];
    int count;
    dtrain_comm *comm; /* ranks that normalise together; NULL: each rank separately */
    int64_t batch;
    float *x;        /* (batch, 32, 32, 3) */
    int32_t *labels; /* (batch) */
    dtrain_dataset *images[2];
    dtrain_loader *train, *test;
    int64_t test_count, epoch_steps, epoch_begin; /* the last: the step before the epoch's first */
    double loss_sum, begun;                       /* of the epoch so far */
} model;

static dtrain_param *declare(model *m, uint32_t unit, const char *prefix, const char *name)
{
    dtrain_param *p = &m->params[m->count];
    snprintf(m->names[m->count], sizeof m->names[0], "%s%s", prefix, name);
    p->name = m->names[m->count++];
    p->unit = unit;
    return p;
}

/* The deviation that keeps the size of activations (He et al., 2015). */
static void declare_conv(model *m, uint32_t unit, const char *prefix, const char *name, int out,
                         int in, int side)
{
    dtrain_param *p = declare(m, unit, prefix, name);
    const int64_t shape[4] = {out, in, side, side};
    memcpy(p->shape, shape, sizeof shape);
    p->init = DTRAIN_INIT_NORMAL;
    p->init_scale = sqrtf(2.0f / (float)(in * side * side));
}

static void declare_norm(model *m, uint32_t unit, const char *prefix, int channels)
{
    static const char *const names[NORM] = {".weight", ".bias", ".running_mean", ".running_var"};
    for (int i = 0; i < NORM; i++) {
        dtrain_param *p = declare(m, unit, prefix, names[i]);
        p->shape[0] = channels;
        p->init = DTRAIN_INIT_CONSTANT;
        p->init_scale = i == 0 || i == 3; /* weights and variances are 1 at first */
        if (i >= 2) p->flags = DTRAIN_PARAM_BUFFER;
    }
}

/* Blocks 0 to 2 have 16 channels, 3 to 5 have 32, 6 to 8 have 64; 3 and 6 halve the image. */
static int channels_of(int block) { return 16 << block / 3; }
static bool halves(int block) { return block == 3 || block == 6; }

static void declare_model(model *m)
{
    declare_conv(m, 0, "", "conv.weight", 16, COLORS, 3);
    declare_norm(m, 0, "bn", 16);
    for (int b = 0; b < BLOCKS; b++) {
        const int out = channels_of(b), in = b ? channels_of(b - 1) : 16;
        const uint32_t unit = (uint32_t)b + 1;
        char prefix[16], norm[32];
        snprintf(prefix, sizeof prefix, "%d.%d.", b / 3 + 1, b % 3);
        declare_conv(m, unit, prefix, "conv1.weight", out, in, 3);
        snprintf(norm, sizeof norm, "%sbn1", prefix);
        declare_norm(m, unit, norm, out);
        declare_conv(m, unit, prefix, "conv2.weight", out, out, 3);
        snprintf(norm, sizeof norm, "%sbn2", prefix);
        declare_norm(m, unit, norm, out);
        if (!halves(b)) continue;
        declare_conv(m, unit, prefix, "down.weight", out, in, 1);
        snprintf(norm, sizeof norm, "%sdown_bn", prefix);
        declare_norm(m, unit, norm, out);
    }
    dtrain_param *weight = declare(m, BLOCKS + 1, "", "fc.weight");
    weight->shape[0] = CLASSES;
    weight->shape[1] = 64;
    weight->init = DTRAIN_INIT_UNIFORM;
    weight->init_scale = 0.125f; /* 1 / sqrt(64) */
    declare(m, BLOCKS + 1, "", "fc.bias")->shape[0] = CLASSES;
}

/* Convolve, normalise, add a residual, apply ReLU; p is the weight; the four parameters of the norm follow it. */
static dtrain_tensor *conv_norm(dtrain_tape *t, const model *m, dtrain_tensor *x, dtrain_param *p,
                                int stride, dtrain_tensor *residual, dtrain_activation activation)
{
    const int64_t padding = p->shape[2] / 2;
    const dtrain_conv2d_desc conv = {.stride = {stride, stride}, .padding = {padding, padding}};
    const dtrain_batch_norm_desc norm = {.running_mean = p + 3,
                                         .running_var = p + 4,
                                         .residual = residual,
                                         .activation = activation,
                                         .comm = m->comm};
    x = dtrain_conv2d(t, x, p, NULL, &conv);
    return dtrain_batch_norm(t, x, p + 1, p + 2, &norm);
}

static dtrain_tensor *forward(dtrain_tape *t, model *m)
{
    const dtrain_activation relu = DTRAIN_ACTIVATION_RELU, none = DTRAIN_ACTIVATION_NONE;
    const dtrain_pool2d_desc average = {.kind = DTRAIN_POOL_AVERAGE}; /* of each image */
    const int64_t shape[4] = {m->batch, SIDE, SIDE, COLORS};
    dtrain_param *p = m->params;
    dtrain_tape_unit(t, 0);
    dtrain_tensor *x = dtrain_tape_input(t, DTRAIN_DTYPE_F32, 4, shape, m->x, false);
    x = conv_norm(t, m, x, p, 1, NULL, relu);
    p += 1 + NORM;
    for (int b = 0; b < BLOCKS; b++) {
        const int stride = halves(b) ? 2 : 1;
        dtrain_tape_unit(t, (uint32_t)b + 1);
        dtrain_tensor *inner = conv_norm(t, m, x, p, stride, NULL, relu), *shortcut = x;
        if (halves(b)) shortcut = conv_norm(t, m, x, p + 2 * (1 + NORM), stride, NULL, none);
        x = conv_norm(t, m, inner, p + 1 + NORM, 1, shortcut, relu);
        p += (halves(b) ? 3 : 2) * (1 + NORM);
    }
    dtrain_tape_unit(t, BLOCKS + 1);
    x = dtrain_linear(t, dtrain_pool2d(t, x, &average), p, p + 1, none);
    return dtrain_cast(t, x, DTRAIN_DTYPE_F32);
}

static dtrain_tensor *loss(dtrain_tape *t, void *user)
{
    model *m = user;
    const int64_t shape[1] = {m->batch};
    dtrain_tensor *logits = forward(t, m);
    return dtrain_cross_entropy(
        t, logits, dtrain_tape_input(t, DTRAIN_DTYPE_I32, 1, shape, m->labels, false), 0, 0);
}

/* ---- batches ---- */

static dtrain_result set_batch(void *user, uint32_t batch)
{
    model *m = user;
    free(m->x), free(m->labels);
    m->batch = batch;
    m->x = malloc((size_t)batch * PIXELS * sizeof *m->x);
    m->labels = calloc(batch, sizeof *m->labels);
    if (m->x && m->labels) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_MEMORY, "no memory for a batch of %u images", batch);
}

static dtrain_result next_batch(void *user)
{
    model *m = user;
    return dtrain_loader_next(m->train, m->x, m->labels);
}

/* Add a batch's number of right answers and the sum of its losses. */
static void judge(const model *m, const float *logits, double *right, double *loss)
{
    for (int64_t i = 0; i < m->batch && m->labels[i] >= 0; i++, logits += CLASSES) {
        int best = 0;
        double sum = 0;
        for (int c = 1; c < CLASSES; c++)
            if (logits[c] > logits[best]) best = c;
        for (int c = 0; c < CLASSES; c++) sum += exp((double)(logits[c] - logits[best]));
        *right += best == m->labels[i];
        *loss += log(sum) - (double)(logits[m->labels[i]] - logits[best]);
    }
}

/* Measure accuracy, in per cent, and loss on the test images, of which each rank takes its share; labels of -1 fill up
 * the last batch. *stop becomes true if a rank was asked to stop; then nothing is measured. */
static dtrain_result test(dtrain_world *world, run_job *j, double *accuracy, double *mean_loss,
                          bool *stop)
{
    model *m = j->own;
    dtrain_tape *tape = dtrain_trainer_tape(j->trainer);
    double sums[2] = {0, 0}; /* right, loss */
    float *logits = malloc((size_t)m->batch * CLASSES * sizeof *logits);
    dtrain_result result = DTRAIN_OK;
    if (!logits) return dtrain_fail(DTRAIN_ERROR_MEMORY, "no memory for logits");
    dtrain_loader_seek(m->test, 0);
    while (!*stop && (result = dtrain_loader_next(m->test, m->x, m->labels)) == DTRAIN_OK) {
        TRY(dtrain_tape_begin(tape, tape_flags(j->s) | DTRAIN_TAPE_NO_GRAD, 0));
        TRY(dtrain_tensor_read(tape, forward(tape, m), logits, NULL));
        judge(m, logits, &sums[0], &sums[1]);
        TRY(asked_to_stop(world, stop));
    }
    if (result != DTRAIN_ERROR_END) TRY(result);
    float all[2] = {(float)sums[0], (float)sums[1]}; /* counts below 2^24 are exact */
    TRY(dtrain_all_reduce(dtrain_world_comm(world), all, all, 2, DTRAIN_DTYPE_F32,
                          DTRAIN_REDUCE_SUM, NULL));
    *accuracy = 100 * (double)all[0] / (double)m->test_count;
    *mean_loss = (double)all[1] / (double)m->test_count;
cleanup:
    free(logits);
    return result;
}

/* ---- the functions that tools/run calls ---- */

/* With Muon the convolutions of the blocks are group 1, the shortcuts are not. */
static dtrain_result open_model(dtrain_world *world, run_job *j)
{
    model *m = j->own;
    declare_model(m);
    for (int i = 0; i < m->count && is_optimizer(j->s, DTRAIN_OPTIMIZER_MUON); i++)
        if (m->params[i].shape[2] == 3 && m->params[i].unit > 0) m->params[i].group = 1;
    j->params = m->params;
    j->param_count = (size_t)m->count;
    j->sample_things = 1;
    j->steps = j->s->steps ? j->s->steps : own_flags.epochs;
    if (!world || !own_flags.sync) return DTRAIN_OK;
    return dtrain_comm_split(j->comm ? j->comm : dtrain_world_comm(world), 0, 0, &m->comm);
}

static dtrain_result open_data(dtrain_world *world, run_job *j)
{
    model *m = j->own;
    dtrain_dataset_info test_images;
    dtrain_loader_info epoch;
    dtrain_result result = DTRAIN_OK;
    for (int test = 0; test < 2; test++) {
        TRY(open_images(world, test, &m->images[test]));
        TRY(same_data(world, m->images[test]));
    }
    dtrain_loader_desc images = {.batch = j->batch,
                                 .seed = (uint64_t)j->s->seed,
                                 .drop_last = true, /* left-over images wait for another epoch */
                                 .dataset = m->images[0],
                                 .workers = (uint32_t)j->s->workers,
                                 .transform = augmented,
                                 .output_bytes = PIXELS * sizeof *m->x};
    share_samples(j, &images);
    TRY(dtrain_loader_create(world, &images, &m->train));
    images.dataset = m->images[1];
    images.in_order = true;
    images.drop_last = false;
    images.sample_limit = DTRAIN_ONE_EPOCH; /* each image once, then DTRAIN_ERROR_END */
    images.transform = plain;
    TRY(dtrain_loader_create(world, &images, &m->test));
    dtrain_loader_query(m->train, &epoch);
    dtrain_dataset_query(m->images[1], &test_images);
    m->test_count = test_images.item_count;
    m->epoch_steps =
        epoch.samples_per_epoch / ((int64_t)j->batch * j->accum * dtrain_world_size(world));
    if (m->epoch_steps < 1)
        TRY(dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                        "an epoch has %lld images, fewer than a step of all ranks: lower --batch, "
                        "--accum or --global-batch",
                        (long long)epoch.samples_per_epoch));
    j->steps = j->s->steps ? j->s->steps : own_flags.epochs * m->epoch_steps;
    j->loader = m->train;
cleanup:
    return result;
}

static dtrain_result show_start(dtrain_world *world, const run_job *j)
{
    if (dtrain_world_rank(world)) return DTRAIN_OK;
    const model *m = j->own;
    const int ranks = dtrain_world_size(world);
    dtrain_dataset_info images;
    dtrain_strategy_info info;
    dtrain_dataset_query(m->images[0], &images);
    dtrain_strategy_query(j->strategy, &info);
    show_device(j->s, world);
    printf("%lld training images, %lld for the test; %d ranks x %u images a step\n",
           (long long)images.item_count, (long long)m->test_count, ranks, j->batch * j->accum);
    printf("model   ResNet-20: %llu parameters\n", (unsigned long long)info.trainable_elements);
    show_resumed(j, ranks);
    show_strategy(j, ranks);
    printf("epoch   steps      lr  training loss  test accuracy  images/s\n");
    return DTRAIN_OK;
}

/* End an epoch, or the run, with a test and a line of the table. */
static dtrain_result validate(dtrain_world *world, run_job *j, int64_t done, bool stopping,
                              dtrain_step_record *record)
{
    model *m = j->own;
    double accuracy = 0;
    dtrain_result result = DTRAIN_OK;
    if (m->begun == 0 || m->epoch_begin > done) /* first step of this rank, or a roll-back */
        m->epoch_begin = done - 1, m->loss_sum = 0,
        m->begun = dtrain_seconds() - dtrain_record_value(record, "step_ms") / 1e3;
    m->loss_sum += record->loss;
    if (stopping || (done % m->epoch_steps && done != j->steps)) return DTRAIN_OK;
    const double seconds = dtrain_seconds() - m->begun, steps = (double)(done - m->epoch_begin);
    const double images = steps * j->batch * j->accum * dtrain_world_size(world);
    double val_loss = 0;
    TRY(test(world, j, &accuracy, &val_loss, &record->stop_requested));
    if (record->stop_requested) return DTRAIN_OK;
    record->val_loss = val_loss;
    record->val_accuracy = accuracy / 100;
    if (dtrain_world_rank(world) == 0)
        printf("%5lld %7lld  %6.4f  %13.4f  %11.1f %%  %8.0f\n",
               (long long)((done - 1) / m->epoch_steps + 1), (long long)done, record->lr,
               m->loss_sum / steps, accuracy, images / seconds);
    fflush(stdout);
    m->epoch_begin = done, m->loss_sum = 0, m->begun = dtrain_seconds();
cleanup:
    return result;
}

static void close_model(run_job *j)
{
    model *m = j->own;
    dtrain_loader_destroy(m->train);
    dtrain_loader_destroy(m->test);
    dtrain_dataset_close(m->images[0]);
    dtrain_dataset_close(m->images[1]);
    dtrain_comm_destroy(m->comm);
    free(m->x), free(m->labels);
    memset(m, 0, sizeof *m);
}

static const run_program program = {.things = "images",
                                    .sample_name = "images/s",
                                    .own_bytes = sizeof(model),
                                    .least_batch = 2,
                                    .own_table = true,
                                    .open_model = open_model,
                                    .set_batch = set_batch,
                                    .loss = loss,
                                    .next_batch = next_batch,
                                    .open_data = open_data,
                                    .validate = validate,
                                    .start = show_start,
                                    .close = close_model};

/* ---- flags ---- */

static const flag data_flags[] = {
    FLAG_GROUP("data and batches"),
    {"--data", 'p', &own_flags.data, 0, 0,
     "folder with data_batch_1.bin to _5.bin and test_batch.bin; without it images are drawn",
     NULL},
    {"--epochs", 'i', &own_flags.epochs, 1, 1e9, "passes over the training images", NULL},
    {"--steps", 'i', &run_flags.steps, 1, 1e12, "optimizer steps, in place of --epochs", NULL},
    {"--sync-batchnorm", 'b', &own_flags.sync, 0, 0,
     "normalise over the batch of all ranks, not each rank over its own", NULL},
};
static const flag recipe[] = {FLAG_GROUP("optimization")}, shown[] = {FLAG_GROUP("monitoring")};

/* Write the recipe of the paper into the switches, and make the table in the order of --help. */
static void make_table(void)
{
    run_flags.batch = 64;
    run_flags.seed = 0;
    run_flags.init_seed = -1;
    run_flags.optimizer = DTRAIN_OPTIMIZER_SGD - 1;
    run_flags.schedule = DTRAIN_SCHEDULE_STEPS;
    add_flags(data_flags, COUNT(data_flags));
    add_flags(file_flags, COUNT(file_flags));
    add_flags(batch_flags, COUNT(batch_flags));
    add_flags(recipe, COUNT(recipe));
    add_flags(optimizer_flags, COUNT(optimizer_flags));
    add_shared_flags();
    add_flags(shown, COUNT(shown));
    add_flags(monitor_flags, COUNT(monitor_flags));
}

static void print_help(void)
{
    printf("resnet_cifar: trains ResNet-20 on CIFAR-10 (dtrain %s)\n\n", DTRAIN_VERSION_STRING);
    flags_help(flag_table, flag_count);
    printf(
        "\nexamples\n"
        "  resnet_cifar --data cifar-10-batches-bin --ranks 2 --log runs/a/log.jsonl --checkpoint "
        "runs/a\n"
        "  resnet_cifar --data cifar-10-batches-bin --ranks 4 --checkpoint runs/a --resume auto\n");
}

int main(int argc, char **argv)
{
    take_descriptors();
    run_settings *s = &run_flags;
    make_table();
    if (about(RUN_NAME, argc - 1, argv + 1, print_help)) return 0;
    if (read_flags(argc - 1, argv + 1)) return 2;
    if (s->steps && given("--epochs")) return BAD("--steps and --epochs: use one of them");
    if (s->batch < 2) return BAD("--batch is %ld; normalising a batch needs at least 2", s->batch);
    if (s->init_seed < 0) s->init_seed = s->seed;
    s->command = join_words(argc, argv);
    apply_rates(s, 0.001);
    return plans(s) ? plan_run(s, &program) : run_training(s, &program);
}
