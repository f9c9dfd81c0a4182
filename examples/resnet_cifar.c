/* resnet_cifar.c: ResNet-20 (He et al., "Deep Residual Learning", 2016) on CIFAR-10, with the paper's recipe: crops and
 * flips, SGD with momentum, a rate that falls tenfold after half and after three quarters of the run.
 *
 *   build:   cc -O2 -I. examples/resnet_cifar.c -o resnet_cifar -lm -lpthread
 *   GPU:     nvcc -O3 -I. -DDTRAIN_USE_CUDA examples/resnet_cifar.c dtrain_cuda.cu -lcublasLt -o resnet_cifar
 *   run:     ./resnet_cifar --data FOLDER      which holds data_batch_1.bin to _5.bin and test_batch.bin
 *            ./resnet_cifar --epochs 3         the same on images that it draws itself
 *   flags:   --data FOLDER  --ranks N  --batch N (images of a rank and step)  --threads N
 *            --epochs N, or --steps N in its place
 *            --seed N  --strategy ddp|zero1|shard_grad_op|full_shard|zero3  --precision fp32|bf16
 *            --sync-batchnorm  --log FILE  --device cpu|cuda
 *            --config FILE, which has flags as lines, "batch = 128" or "sync-batchnorm = 1"; the command line wins
 *   expect   of ./resnet_cifar --ranks 2 --epochs 3 --batch 32, in half a minute of two cores:
 *     2000 training images, 500 for the test; 2 ranks x 32 images a step
 *     model   ResNet-20: 272474 parameters; strategy ddp: a rank sends 1089920 bytes a step
 *     memory  a rank will need 65.9 MiB: parameters 1.0, gradients 1.0, optimizer 1.0, ...
 *     epoch   steps      lr  training loss  test accuracy  images/s
 *         1      31  0.1000         2.0518         10.0 %       ...
 *         2      62  0.0100         0.9472         51.6 %
 *         3      93  0.0010         0.7402         59.6 %
 *
 * Which image comes when, and how it is cropped and flipped, depends on seed, epoch and image alone. So
 * ranks that share a batch see together what one rank sees; with --sync-batchnorm they normalise over all
 * of it as well, and the curve is that of one rank (but for rounding). Without it each rank normalises over
 * its own images, as PyTorch's DDP does. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

#define CHECK(call)                        \
    do {                                   \
        if ((call) != DTRAIN_OK) return 1; \
    } while (0)

enum { SIDE = 32, COLORS = 3, PIXELS = SIDE * SIDE * COLORS, CLASSES = 10, PADDING = 4 };

/* ---- images ---- */

typedef struct settings {
    const char *data, *log, *device, *config;
    uint32_t kind, tape_flags;
    long ranks, batch, threads, epochs, steps, seed;
    bool sync;
} settings;

/* Draw images for a try without data: stripes whose direction and colour are those of a class, in noise. */
static dtrain_result draw_images(void *user, int64_t first, int64_t count, void *items,
                                 int32_t *labels)
{
    const uint64_t seed = *(const uint64_t *)user;
    unsigned char *pixel = items;
    for (int64_t i = first; i < first + count; i++) {
        const int label = (int)(i % CLASSES);
        const float angle = 0.628f * (float)(label % 5),
                    phase = 6.28f * dtrain_random_uniform(seed, 0, (uint64_t)i);
        for (int p = 0; p < PIXELS; p++) {
            const float x = (float)(p % SIDE), y = (float)(p / SIDE % SIDE);
            const float wave = cosf(0.8f * (x * cosf(angle) + y * sinf(angle)) + phase);
            const float noise = dtrain_random_normal(seed, 1, (uint64_t)(i * PIXELS + p));
            const float light = p / (SIDE * SIDE) == label / 5 ? 40 * wave : 0;
            *pixel++ = (unsigned char)fminf(255, fmaxf(0, 120 + light + 40 * noise));
        }
        if (labels) labels[i - first] = label;
    }
    return DTRAIN_OK;
}

/* Open the images of --data for training or for the test, or draw some. */
static dtrain_result open_images(dtrain_world *world, const settings *s, bool test,
                                 dtrain_dataset **out)
{
    static uint64_t seeds[2] = {1, 2};
    char path[4096] = "";
    const dtrain_dataset_desc drawn = {.vocab_count = CLASSES,
                                       .item_count = test ? 500 : 2000,
                                       .item_bytes = PIXELS,
                                       .read = draw_images,
                                       .user = &seeds[test]};
    const dtrain_dataset_desc files = {.format = DTRAIN_DATA_CIFAR10, .path = path};
    if (!s->data) return dtrain_dataset_open(world, &drawn, out);
    if (test) snprintf(path, sizeof path, "%s/test_batch.bin", s->data);
    for (int i = 1; i <= 5 && !test; i++)
        snprintf(path + strlen(path), sizeof path - strlen(path), "%s%s/data_batch_%d.bin",
                 i > 1 ? "," : "", s->data, i);
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

/* Crop and flip, as drawn for this image in this epoch: on whatever rank, by whatever worker. */
static dtrain_result augmented(void *user, const dtrain_sample *sample, void *output)
{
    const settings *s = user;
    float draw[3];
    for (uint64_t k = 0; k < 3; k++)
        draw[k] = dtrain_random_uniform((uint64_t)s->seed, sample->epoch + 1,
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
    const settings *s;
    dtrain_param params[PARAMS];
    char names[PARAMS][32];
    int count;
    dtrain_comm *comm; /* over which batches are normalised; NULL: each rank for itself */
    int rank, ranks;
    dtrain_loader *train, *test;
    float *x;        /* (batch, 32, 32, 3) */
    int32_t *labels; /* (batch) */
} model;

static dtrain_param *declare(model *m, uint32_t unit, const char *prefix, const char *name)
{
    dtrain_param *p = &m->params[m->count];
    snprintf(m->names[m->count], sizeof m->names[0], "%s%s", prefix, name);
    p->name = m->names[m->count++];
    p->unit = unit;
    return p;
}

/* He et al., 2015: the deviation that keeps the size of activations. */
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

/* Convolve, normalise, add a residual, apply ReLU; p: the weight, behind it the four of the norm. */
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
    const int64_t shape[4] = {m->s->batch, SIDE, SIDE, COLORS};
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
    x = dtrain_linear(t, dtrain_global_avg_pool(t, x), p, p + 1, none);
    return dtrain_cast(t, x, DTRAIN_DTYPE_F32);
}

static dtrain_tensor *loss(dtrain_tape *t, void *user)
{
    model *m = user;
    const int64_t shape[1] = {m->s->batch};
    dtrain_tensor *logits = forward(t, m);
    return dtrain_cross_entropy(
        t, logits, dtrain_tape_input(t, DTRAIN_DTYPE_I32, 1, shape, m->labels, false), 0, 0);
}

/* ---- batches ---- */

static dtrain_result next_batch(void *user)
{
    model *m = user;
    return dtrain_loader_next(m->train, m->x, m->labels);
}

/* Measure the accuracy on `count` test images. Each rank takes its share of every batch; in the last one, images from
 * the beginning come again and do not count. */
static dtrain_result test_accuracy(dtrain_world *world, dtrain_tape *t, model *m, int64_t count,
                                   double *accuracy)
{
    const int64_t batch = m->s->batch;
    int64_t right = 0;
    float *logits = malloc((size_t)batch * CLASSES * sizeof *logits);
    dtrain_result result = DTRAIN_OK;
    if (!logits) return dtrain_fail(DTRAIN_ERROR_MEMORY, "no memory for logits");
    dtrain_loader_seek(m->test, 0);
    for (int64_t first = 0; first < count && result == DTRAIN_OK; first += batch * m->ranks) {
        result = dtrain_loader_next(m->test, m->x, m->labels);
        if (result == DTRAIN_OK)
            result = dtrain_tape_begin(t, m->s->tape_flags | DTRAIN_TAPE_NO_GRAD, 0);
        if (result == DTRAIN_OK) result = dtrain_tensor_read(t, forward(t, m), logits);
        for (int64_t i = 0; i < batch && first + i * m->ranks + m->rank < count; i++) {
            int best = 0;
            for (int c = 1; c < CLASSES; c++)
                if (logits[i * CLASSES + c] > logits[i * CLASSES + best]) best = c;
            right += best == m->labels[i];
        }
    }
    free(logits);
    if (result != DTRAIN_OK) return result;
    result = dtrain_all_reduce(dtrain_world_comm(world), &right, &right, 1, DTRAIN_DTYPE_I64,
                               DTRAIN_REDUCE_SUM, NULL);
    *accuracy = 100.0 * (double)right / (double)count;
    return result;
}

/* ---- memory ---- */

static double mib(uint64_t bytes) { return (double)bytes / 1048576; }

static void show_plan(const dtrain_strategy *strategy, const dtrain_memory *m)
{
    dtrain_strategy_info info;
    dtrain_strategy_query(strategy, &info);
    printf("model   ResNet-20: %llu parameters; strategy %s: a rank sends %llu bytes a step\n",
           (unsigned long long)info.trainable_elements, info.name,
           (unsigned long long)info.step_bytes);
    printf("memory  a rank will need %.1f MiB: parameters %.1f, gradients %.1f, optimizer %.1f, "
           "buffers %.1f, activations %.1f + %.1f, workspace %.1f\n",
           mib(m->total), mib(m->params), mib(m->grads), mib(m->optimizer), mib(m->buffers),
           mib(m->activations), mib(m->activation_grads), mib(m->workspace));
}

static void show_memory(const dtrain_device *device, const dtrain_memory *plan)
{
    uint64_t now = device->peak_bytes, peak = now;
    if (device->ops->host_memory) dtrain_process_memory(&now, &peak);
    printf("  memory  %.1f MiB in rank 0, %.1f at its peak, %.1f predicted\n", mib(now), mib(peak),
           mib(plan->total));
}

/* ---- a rank ---- */

/* Train `total` steps, and print a line after each epoch, which ends with a test. */
static int train_epochs(dtrain_world *world, dtrain_trainer *trainer, dtrain_metrics *metrics,
                        model *m, int64_t test_count, int64_t per_epoch, int64_t total)
{
    double sum = 0, begun = dtrain_seconds();
    for (int64_t step = 1, since = 1; step <= total; step++, since++) {
        dtrain_step_record record;
        double accuracy = 0;
        CHECK(dtrain_trainer_step(trainer, &record));
        CHECK(dtrain_metrics_step(metrics, &record));
        sum += record.loss;
        if (step % per_epoch && step != total) continue;
        const double rate = (double)(since * m->s->batch * m->ranks) / (dtrain_seconds() - begun);
        CHECK(test_accuracy(world, dtrain_trainer_tape(trainer), m, test_count, &accuracy));
        if (m->rank == 0)
            printf("%5lld %7lld  %6.4f  %13.4f  %11.1f %%  %8.0f\n",
                   (long long)((step - 1) / per_epoch + 1), (long long)step, record.lr,
                   sum / (double)since, accuracy, rate);
        fflush(stdout);
        sum = 0, since = 0, begun = dtrain_seconds();
    }
    return 0;
}

static int train(dtrain_world *world, void *user)
{
    const settings *s = user;
    static model m; /* a rank is a process */
    dtrain_strategy *strategy;
    dtrain_optimizer *optimizer;
    dtrain_trainer *trainer;
    dtrain_metrics *metrics;
    dtrain_dataset *train_images, *test_images;
    dtrain_dataset_info train_info, test_info;
    dtrain_loader_info epoch;
    m.s = s;
    m.rank = dtrain_world_rank(world);
    m.ranks = dtrain_world_size(world);
    m.x = malloc((size_t)s->batch * PIXELS * sizeof *m.x);
    m.labels = calloc((size_t)s->batch, sizeof *m.labels);
    if (!m.x || !m.labels) {
        dtrain_fail(DTRAIN_ERROR_MEMORY, "no memory for a batch of %ld images", s->batch);
        return 1;
    }
    CHECK(open_images(world, s, false, &train_images));
    CHECK(open_images(world, s, true, &test_images));
    dtrain_loader_desc images = {.batch = (uint32_t)s->batch,
                                 .seed = (uint64_t)s->seed,
                                 .drop_last = true, /* what is left over waits for another epoch */
                                 .dataset = train_images,
                                 .workers = 1, /* makes the next batch while one is learned */
                                 .transform = augmented,
                                 .output_bytes = PIXELS * sizeof *m.x,
                                 .user = user};
    CHECK(dtrain_loader_create(world, &images, &m.train));
    images.dataset = test_images;
    images.in_order = true;
    images.drop_last = false;
    images.transform = plain;
    CHECK(dtrain_loader_create(world, &images, &m.test));
    dtrain_loader_query(m.train, &epoch);
    dtrain_dataset_query(train_images, &train_info);
    dtrain_dataset_query(test_images, &test_info);
    const int64_t per_epoch = epoch.samples_per_epoch / (s->batch * m.ranks);
    const int64_t total = s->steps ? s->steps : s->epochs * per_epoch;
    declare_model(&m);

    const dtrain_strategy_desc where = {.kind = s->kind, .init_seed = (uint64_t)s->seed};
    CHECK(dtrain_strategy_create(world, m.params, (size_t)m.count, &where, &strategy));
    if (s->sync) CHECK(dtrain_comm_split(dtrain_world_comm(world), 0, 0, &m.comm));
    dtrain_optimizer_desc sgd = dtrain_sgd_defaults();
    sgd.momentum = 0.9f;
    sgd.weight_decay = 1e-4f;
    CHECK(dtrain_optimizer_create(world, strategy, &sgd, &optimizer));
    const dtrain_trainer_desc how = {.tokens = (uint32_t)s->batch,
                                     .tape_flags = s->tape_flags,
                                     .schedule = {.kind = DTRAIN_SCHEDULE_STEPS,
                                                  .lr = 0.1f,
                                                  .milestones = {total / 2, total * 3 / 4}},
                                     .strategy = strategy,
                                     .optimizer = optimizer,
                                     .next_batch = next_batch,
                                     .loss = loss,
                                     .user = &m};
    CHECK(dtrain_trainer_create(world, &how, &trainer));
    dtrain_memory plan;
    CHECK(dtrain_trainer_plan(world, &how, &plan));
    const dtrain_metrics_desc report = {.total_steps = total, .jsonl_path = s->log};
    CHECK(dtrain_metrics_create(world, &report, &metrics));

    if (m.rank == 0) {
        printf("%lld training images, %lld for the test; %d ranks x %ld images a step\n",
               (long long)train_info.item_count, (long long)test_info.item_count, m.ranks,
               s->batch);
        show_plan(strategy, &plan);
        printf("epoch   steps      lr  training loss  test accuracy  images/s\n");
    }
    if (train_epochs(world, trainer, metrics, &m, test_info.item_count, per_epoch, total)) return 1;
    CHECK(dtrain_metrics_finish(metrics));
    if (m.rank == 0) show_memory(dtrain_world_device(world), &plan);
    dtrain_metrics_destroy(metrics);
    dtrain_trainer_destroy(trainer);
    dtrain_comm_destroy(m.comm);
    dtrain_optimizer_destroy(optimizer);
    dtrain_strategy_destroy(strategy);
    dtrain_loader_destroy(m.train);
    dtrain_loader_destroy(m.test);
    dtrain_dataset_close(train_images);
    dtrain_dataset_close(test_images);
    free(m.x), free(m.labels);
    return 0;
}

/* ---- flags ---- */

static bool number(const char *name, const char *text, long least, long *value)
{
    char *end;
    *value = strtol(text, &end, 10);
    if (*text && !*end && *value >= least && *value <= 1000000000) return true;
    fprintf(stderr, "resnet_cifar: %s is \"%s\"; expected a number from %ld on\n", name, text,
            least);
    return false;
}

/* Count the letters to insert, delete and replace that make one word of another (Levenshtein, 1966). */
static int distance(const char *from, const char *to)
{
    const int columns = (int)strlen(to);
    int row[64]; /* from the letters of `from` so far to the first j of `to` */
    for (int j = 0; j <= columns; j++) row[j] = j;
    for (int i = 0; from[i]; i++) {
        int corner = row[0];
        row[0] = i + 1;
        for (int j = 0; j < columns; j++) {
            const int replaced = corner + (from[i] != to[j]);
            const int changed = 1 + (row[j] < row[j + 1] ? row[j] : row[j + 1]);
            corner = row[j + 1];
            row[j + 1] = replaced < changed ? replaced : changed;
        }
    }
    return row[columns];
}

/* Find a word in a list that ends with NULL; -1, with a sentence: it is not there. */
static int word(const char *name, const char *text, const char *const *words)
{
    int nearest = 0;
    for (int i = 0; words[i]; i++) {
        if (strcmp(words[i], text) == 0) return i;
        if (distance(text, words[i]) < distance(text, words[nearest])) nearest = i;
    }
    fprintf(stderr, "resnet_cifar: %s \"%s\" is not one of:", name, text);
    for (int i = 0; words[i]; i++) fprintf(stderr, " %s", words[i]);
    if (3 * distance(text, words[nearest]) <= (int)strlen(text))
        fprintf(stderr, "; did you mean %s?", words[nearest]);
    fprintf(stderr, "\n");
    return -1;
}

/* Set what a flag asks for; value NULL: there is none. `where` begins the sentences about it: the place in a file, or
 * nothing. */
static bool set(const char *where, const char *name, const char *value, settings *s)
{
    static const char *const kinds[] = {"ddp",        "zero1", "shard_grad_op",
                                        "full_shard", "zero3", NULL};
    static const char *const precisions[] = {"fp32", "bf16", NULL};
    static const char *const switches[] = {"0", "1", NULL};
    static const char *const names[] = {"--data",     "--log",       "--device",         "--ranks",
                                        "--batch",    "--threads",   "--steps",          "--epochs",
                                        "--strategy", "--precision", "--sync-batchnorm", "--seed",
                                        "--config",   NULL};
    char shown[512];
    snprintf(shown, sizeof shown, "%sthe flag", where);
    const int at = word(shown, name, names);
    int found = 0;
    snprintf(shown, sizeof shown, "%s%s", where, name);
    if (at >= 0 && !value) fprintf(stderr, "resnet_cifar: %s needs a value\n", shown);
    if (at < 0 || !value) return false;
    switch (at) {
    case 0: s->data = value; break;
    case 1: s->log = value; break;
    case 2: s->device = value; break;
    case 3: return number(shown, value, 1, &s->ranks);
    case 4: return number(shown, value, 2, &s->batch);
    case 5: return number(shown, value, 1, &s->threads);
    case 6: return number(shown, value, 1, &s->steps);
    case 7: return number(shown, value, 1, &s->epochs);
    case 8:
        found = word(shown, value, kinds);
        s->kind = (uint32_t)found + DTRAIN_STRATEGY_DDP;
        break;
    case 9:
        found = word(shown, value, precisions);
        s->tape_flags = found ? DTRAIN_TAPE_BF16 : 0;
        break;
    case 10:
        found = word(shown, value, switches);
        s->sync = found == 1;
        break;
    case 11: return number(shown, value, 0, &s->seed);
    default: s->config = value;
    }
    return found >= 0;
}

static bool parse(int argc, char **argv, settings *s)
{
    for (int a = 1; a < argc; a++) {
        const char *name = argv[a];
        const bool is_switch = strcmp(name, "--sync-batchnorm") == 0;
        if (!set("", name, is_switch ? "1" : a + 1 < argc ? argv[++a] : NULL, s)) return false;
    }
    return true;
}

/* Set the flags of a file of lines "key = value", where neither has blanks; '#' begins a comment. */
static bool read_config(const char *path, settings *s)
{
    static char values[64][256]; /* flags point to them */
    char line[512], name[128] = "--", where[400], rest[2];
    FILE *file = fopen(path, "r");
    bool good = file != NULL;
    if (!good) fprintf(stderr, "resnet_cifar: cannot read \"%s\": %s\n", path, strerror(errno));
    for (int at = 1, used = 0; good && fgets(line, sizeof line, file); at++) {
        line[strcspn(line, "#\n")] = 0;
        if (!line[strspn(line, " \t\r")]) continue;
        snprintf(where, sizeof where, "%.300s:%d: ", path, at);
        good = used < 64 &&
               sscanf(line, " %100[^= \t] = %255s %1s", name + 2, values[used], rest) == 2;
        if (!good) fprintf(stderr, "resnet_cifar: %sexpected key = value\n", where);
        good = good && set(where, name, values[used++], s);
    }
    if (file) fclose(file);
    return good;
}

int main(int argc, char **argv)
{
    settings s = {.kind = DTRAIN_STRATEGY_DDP, .device = "cpu", .batch = 64, .epochs = 20};
    dtrain_launch_desc desc = {.default_rank_count = 2};
    if (!parse(argc, argv, &s)) return 2;
    if (s.config && !(read_config(s.config, &s) && parse(argc, argv, &s))) return 2;
    if (dtrain_device_ops_by_name(s.device, &desc.device_ops) != DTRAIN_OK) {
        fprintf(stderr, "resnet_cifar: --device: %s\n", dtrain_last_error());
        return 2;
    }
    desc.rank_count = (uint32_t)s.ranks;
    desc.threads_per_rank = (uint32_t)s.threads;
    if (dtrain_launch(&desc, train, &s, NULL) == DTRAIN_OK) return 0;
    fprintf(stderr, "resnet_cifar: %s\n", dtrain_last_error());
    return 1;
}
