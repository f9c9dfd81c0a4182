/* llmc_peer.c: llm.c's CPU training step on random weights and tokens, timed for bench_train. llmc.sh builds and
 * runs it; by hand:
 *
 *   build:   cc -Ofast -march=native -fopenmp -DOMP -I LLMC bench/llmc_peer.c -lm -o llmc_peer
 *   run:     OMP_NUM_THREADS=2 ./llmc_peer BATCH SEQ LAYERS HEADS CHANNELS VOCAB STEPS
 *
 * It includes llm.c's train_gpt2.c as llm.c's own test does and makes the model in memory, so that no file
 * needs to be downloaded. A step is what llm.c's main times: forward, zero_grad, backward, update; without
 * clipping, which bench_train's own runs have. Prints the median over the steps without the first two. */
#define TESTING
#include "train_gpt2.c"

static uint64_t state = 1;

/* Uniform in [0, 1): splitmix64. */
static double uniform(void)
{
    uint64_t x = state += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return (double)((x ^ (x >> 31)) >> 11) / 9007199254740992.0;
}

/* GPT-2's initialisation: N(0, 0.02), smaller before residual additions; norms 1, biases 0. */
static void initialise(GPT2 *model)
{
    enum { WPE = 1, LN1W = 2, ATTPROJW = 6, LN2W = 8, FCPROJW = 12, LNFW = 14 };
    float *at = model->params_memory;
    for (int t = 0; t < NUM_PARAMETER_TENSORS; t++) {
        const int is_norm = t == LN1W || t == LN2W || t == LNFW, is_bias = t > WPE && t % 2 == 1;
        double deviation = 0.02;
        if (t == ATTPROJW || t == FCPROJW) deviation /= sqrt(2.0 * model->config.num_layers);
        for (size_t i = 0; i < model->param_sizes[t]; i++) {
            const double radius = sqrt(-2 * log(1 - uniform())),
                         angle = 6.283185307179586 * uniform();
            *at++ = is_norm ? 1 : is_bias ? 0 : (float)(deviation * radius * cos(angle));
        }
    }
}

static int by_size(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv)
{
    GPT2 model;
    if (argc != 8 || atoi(argv[7]) < 4) {
        fprintf(
            stderr,
            "llmc_peer: expects BATCH SEQ LAYERS HEADS CHANNELS VOCAB STEPS, 4 steps or more\n");
        return 2;
    }
    const int batch = atoi(argv[1]), seq = atoi(argv[2]), vocab = atoi(argv[6]),
              steps = atoi(argv[7]);
    memset(&model, 0, sizeof model);
    model.config.max_seq_len = seq;
    model.config.num_layers = atoi(argv[3]);
    model.config.num_heads = atoi(argv[4]);
    model.config.channels = atoi(argv[5]);
    model.config.vocab_size = vocab;
    model.config.padded_vocab_size = (vocab + 127) / 128 * 128;
    fill_in_parameter_sizes(model.param_sizes, model.config);
    for (int i = 0; i < NUM_PARAMETER_TENSORS; i++) model.num_parameters += model.param_sizes[i];
    model.params_memory = malloc_and_point_parameters(&model.params, model.param_sizes);
    initialise(&model);
    int *tokens = mallocCheck((size_t)(batch * seq + 1) * sizeof *tokens);
    double *ms = mallocCheck((size_t)steps * sizeof *ms), first = 0;
    for (int i = 0; i <= batch * seq; i++) tokens[i] = (int)(uniform() * vocab);
    for (int step = 0; step < steps; step++) {
        struct timespec start, end;
        clock_gettime(CLOCK_MONOTONIC, &start);
        gpt2_forward(&model, tokens, tokens + 1, batch, seq);
        gpt2_zero_grad(&model);
        gpt2_backward(&model);
        gpt2_update(&model, 3e-4f, 0.9f, 0.95f, 1e-8f, 0.1f, step + 1);
        clock_gettime(CLOCK_MONOTONIC, &end);
        ms[step] = 1e3 * (double)(end.tv_sec - start.tv_sec) +
                   1e-6 * (double)(end.tv_nsec - start.tv_nsec);
        if (step == 0) first = model.mean_loss;
    }
    printf("loss %.4f to %.4f, ln V %.4f\n", first, model.mean_loss, log(vocab));
    if (!(fabs(first - log(vocab)) < 0.5) || !(model.mean_loss < first)) {
        fprintf(stderr, "llmc_peer: the loss does not start at ln V and fall\n");
        return 1;
    }
    qsort(ms + 2, (size_t)steps - 2, sizeof *ms, by_size);
    const double median = 0.5 * (ms[2 + (steps - 3) / 2] + ms[2 + (steps - 2) / 2]);
    printf("step_ms %.3f\ntokens_per_second %.1f\n", median, 1e3 * batch * seq / median);
    gpt2_free(&model);
    free(tokens);
    free(ms);
    return 0;
}
