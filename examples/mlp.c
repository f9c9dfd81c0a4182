/* mlp.c: a multi-layer perceptron on the tape: forward only, the rest follows.
 *
 *   build:   cc -O2 -I. examples/mlp.c -o build/mlp -lm -lpthread
 *   run:     build/mlp [ranks, 2 by default] [FILE in CIFAR-10's binary format] [--device cuda]
 *   GPU:     nvcc -O3 -I. -DDTRAIN_USE_CUDA examples/mlp.c dtrain_cuda.cu -lcublasLt -o mlp
 *   expect:  without a file, two spirals are told apart: accuracy rises from 50 % to over 98 %
 *
 * CIFAR-10 records are 1 label byte and 3072 pixel bytes; the last tenth of the file is held out.
 * Every rank trains on its own share of each batch, dealt by the sampler of PyTorch's
 * DistributedSampler; gradients are averaged; the result does not depend on how many ranks share
 * the work, except for rounding. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

#define CHECK(call)                                            \
    do {                                                       \
        if ((call) != DTRAIN_OK) {                             \
            fprintf(stderr, "mlp: %s\n", dtrain_last_error()); \
            return 1;                                          \
        }                                                      \
    } while (0)

enum { BATCH = 96, HIDDEN = 64, CIFAR_PIXELS = 3072, CIFAR_RECORD = 1 + CIFAR_PIXELS };

/* features (count, width), labels (count): the first train_count rows train, the rest test. */
typedef struct data {
    int64_t count, train_count, width, classes, epochs;
    float *features;
    int32_t *labels;
} data;

static int allocate(data *d, int64_t count, int64_t width, int64_t classes, int64_t epochs)
{
    d->count = count;
    d->train_count = count - count / 10;
    d->width = width;
    d->classes = classes;
    d->epochs = epochs;
    d->features = malloc((size_t)(count * width) * sizeof(float));
    d->labels = malloc((size_t)count * sizeof(int32_t));
    return d->features && d->labels ? 0 : (fprintf(stderr, "mlp: no memory for the data\n"), 1);
}

static int make_spirals(data *d)
{
    if (allocate(d, 2000, 2, 2, 60)) return 1;
    for (int64_t i = 0; i < d->count; i++) {
        uint64_t at = (uint64_t)i;
        float turn = dtrain_random_uniform(3, 0, at),
              noise = 0.02f * dtrain_random_normal(3, 1, at);
        int label = (int)(i % 2);
        float angle = 9.0f * turn + 3.14159265f * (float)label;
        d->features[2 * i] = (turn + noise) * cosf(angle);
        d->features[2 * i + 1] = (turn + noise) * sinf(angle);
        d->labels[i] = label;
    }
    return 0;
}

static int read_cifar(data *d, const char *path)
{
    unsigned char record[CIFAR_RECORD];
    FILE *file = fopen(path, "rb");
    if (!file) return fprintf(stderr, "mlp: %s: %s\n", path, strerror(errno)), 1;
    fseek(file, 0, SEEK_END);
    long bytes = ftell(file);
    rewind(file);
    if (bytes < 20 * CIFAR_RECORD || bytes % CIFAR_RECORD) {
        fclose(file);
        return fprintf(
                   stderr,
                   "mlp: %s has %ld bytes; CIFAR-10 files hold records of %d bytes, 20 at least\n",
                   path, bytes, CIFAR_RECORD),
               1;
    }
    int failed = allocate(d, bytes / CIFAR_RECORD, CIFAR_PIXELS, 10, 20);
    for (int64_t i = 0; i < d->count && !failed; i++) {
        failed = fread(record, CIFAR_RECORD, 1, file) != 1 || record[0] > 9;
        if (failed)
            fprintf(stderr, "mlp: %s: record %lld is cut off or has a label above 9\n", path,
                    (long long)i);
        d->labels[i] = record[0];
        for (int k = 0; k < CIFAR_PIXELS; k++)
            d->features[i * CIFAR_PIXELS + k] = ((float)record[1 + k] - 120.0f) / 64.0f;
    }
    fclose(file);
    return failed;
}

/* ---- the model ---- */

enum { W1, B1, W2, B2, W3, B3, PARAM_COUNT };

static void declare(dtrain_param *params, const data *d)
{
    static const char *const names[PARAM_COUNT] = {"fc1.weight", "fc1.bias",   "fc2.weight",
                                                   "fc2.bias",   "fc3.weight", "fc3.bias"};
    int64_t sizes[4] = {d->width, HIDDEN, HIDDEN, d->classes};
    memset(params, 0, PARAM_COUNT * sizeof *params);
    for (int i = 0; i < PARAM_COUNT; i++) {
        int layer = i / 2;
        params[i].name = names[i];
        params[i].unit = (uint32_t)layer;
        params[i].shape[0] = sizes[layer + 1];
        if (i % 2) continue; /* biases start at zero */
        params[i].shape[1] = sizes[layer];
        params[i].init = DTRAIN_INIT_UNIFORM; /* He et al., 2015 */
        params[i].init_scale = sqrtf(6.0f / (float)sizes[layer]);
    }
}

static dtrain_tensor *forward(dtrain_tape *t, dtrain_param *p, dtrain_tensor *x)
{
    x = dtrain_linear(t, x, &p[W1], &p[B1], DTRAIN_ACTIVATION_RELU); /* (rows, HIDDEN) */
    x = dtrain_linear(t, x, &p[W2], &p[B2], DTRAIN_ACTIVATION_RELU);
    return dtrain_linear(t, x, &p[W3], &p[B3], DTRAIN_ACTIVATION_NONE); /* (rows, classes) */
}

/* ---- training ---- */

typedef struct job {
    const data *d;
    dtrain_param params[PARAM_COUNT];
    int64_t batch, next, *order; /* this rank's rows of the epoch, and the next one to take */
    float *x;                    /* (batch, width) */
    int32_t *labels;             /* (batch) */
} job;

static dtrain_result next_batch(void *user)
{
    job *j = user;
    for (int64_t b = 0; b < j->batch; b++) {
        int64_t row = j->order[j->next++];
        memcpy(j->x + b * j->d->width, j->d->features + row * j->d->width,
               (size_t)j->d->width * sizeof(float));
        j->labels[b] = j->d->labels[row];
    }
    return DTRAIN_OK;
}

static dtrain_tensor *loss(dtrain_tape *t, void *user)
{
    job *j = user;
    int64_t shape[2] = {j->batch, j->d->width};
    dtrain_tensor *x = dtrain_tape_input(t, DTRAIN_DTYPE_F32, 2, shape, j->x, false);
    dtrain_tensor *labels = dtrain_tape_input(t, DTRAIN_DTYPE_I32, 1, shape, j->labels, false);
    return dtrain_cross_entropy(t, forward(t, j->params, x), labels);
}

/* Share of held-out rows whose largest logit is the label's. */
static dtrain_result accuracy(dtrain_tape *t, job *j, double *share)
{
    int64_t rows = j->d->count - j->d->train_count, classes = j->d->classes,
            shape[2] = {rows, j->d->width}, good = 0;
    float *logits = malloc((size_t)(rows * classes) * sizeof(float));
    dtrain_result result =
        logits ? dtrain_tape_begin(t, DTRAIN_TAPE_NO_GRAD, 0) : DTRAIN_ERROR_MEMORY;
    if (result == DTRAIN_OK) {
        const float *held_out = j->d->features + j->d->train_count * j->d->width;
        dtrain_tensor *x = dtrain_tape_input(t, DTRAIN_DTYPE_F32, 2, shape, held_out, false);
        result = dtrain_tensor_read(t, forward(t, j->params, x), logits);
    }
    for (int64_t r = 0; r < rows && result == DTRAIN_OK; r++) {
        int64_t best = 0;
        for (int64_t c = 1; c < classes; c++)
            if (logits[r * classes + c] > logits[r * classes + best]) best = c;
        good += best == j->d->labels[j->d->train_count + r];
    }
    *share = (double)good / (double)rows;
    free(logits);
    return result;
}

static int train(dtrain_world *world, void *user)
{
    const data *d = user;
    int ranks = dtrain_world_size(world);
    dtrain_sampler_desc sampler = {.rank = (uint32_t)dtrain_world_rank(world),
                                   .rank_count = (uint32_t)ranks,
                                   .item_count = d->train_count,
                                   .seed = 1,
                                   .shuffle = true,
                                   .drop_last = true};
    int64_t per_rank = dtrain_sampler_count(&sampler);
    job j = {.d = d, .batch = BATCH / ranks > 0 ? BATCH / ranks : 1};
    int64_t steps = per_rank / j.batch, *scratch = malloc((size_t)d->train_count * sizeof(int64_t));
    j.order = malloc((size_t)per_rank * sizeof(int64_t));
    j.x = malloc((size_t)(j.batch * d->width) * sizeof(float));
    j.labels = malloc((size_t)j.batch * sizeof(int32_t));
    if (!scratch || !j.order || !j.x || !j.labels) return 1;
    declare(j.params, d);

    dtrain_strategy *strategy;
    dtrain_optimizer *optimizer;
    dtrain_trainer *trainer;
    dtrain_optimizer_desc adamw = dtrain_adamw_defaults();
    CHECK(dtrain_strategy_create(world, j.params, PARAM_COUNT, NULL, &strategy));
    CHECK(dtrain_optimizer_create(world, strategy, &adamw, &optimizer));
    dtrain_trainer_desc desc = {
        .tokens = (uint32_t)j.batch,
        .clip = 1,
        .schedule = {DTRAIN_SCHEDULE_COSINE, 3e-3f, 0, 10, d->epochs * steps},
        .strategy = strategy,
        .optimizer = optimizer,
        .next_batch = next_batch,
        .loss = loss,
        .user = &j};
    CHECK(dtrain_trainer_create(world, &desc, &trainer));

    for (int64_t epoch = 0; epoch < d->epochs; epoch++) {
        dtrain_step_record record = {0};
        double share, sum = 0;
        CHECK(dtrain_sampler_indices(&sampler, (uint64_t)epoch, scratch, j.order));
        j.next = 0;
        for (int64_t step = 0; step < steps; step++) {
            CHECK(dtrain_trainer_step(trainer, &record));
            sum += record.loss;
        }
        if ((epoch + 1) % (d->epochs / 10)) continue;
        CHECK(accuracy(dtrain_trainer_tape(trainer), &j, &share));
        if (dtrain_world_rank(world) == 0)
            printf("epoch %3lld  loss %.4f  held-out accuracy %5.1f %%\n", (long long)epoch + 1,
                   sum / (double)steps, 100 * share);
    }
    dtrain_trainer_destroy(trainer);
    dtrain_optimizer_destroy(optimizer);
    dtrain_strategy_destroy(strategy);
    free(scratch);
    free(j.order);
    free(j.x);
    free(j.labels);
    return 0;
}

int main(int argc, char **argv)
{
    data d;
    const char *device = "cpu";
    if (argc > 2 && strcmp(argv[argc - 2], "--device") == 0) device = argv[argc - 1], argc -= 2;
    dtrain_launch_desc desc = {.default_rank_count = 2}; /* a launcher's number comes first */
    if (argc > 1) desc.rank_count = (uint32_t)atoi(argv[1]);
    CHECK(dtrain_device_ops_by_name(device, &desc.device_ops));
    memset(&d, 0, sizeof d);
    int failed = argc > 2 ? read_cifar(&d, argv[2]) : make_spirals(&d);
    if (!failed && dtrain_launch(&desc, train, &d, NULL) != DTRAIN_OK)
        failed = (fprintf(stderr, "mlp: %s\n", dtrain_last_error()), 1);
    free(d.features);
    free(d.labels);
    return failed;
}
