/* offload.c: keeps optimizer state, gradients and parameters in host memory instead of the GPU's (ZeRO-Offload): the
 * update then runs on the CPU, and the losses stay the same.
 *
 *   build:   cc -O2 -I. examples/offload.c -o offload -lm -lpthread
 *            (no GPU: it plans the memory, and trains nothing)
 *   GPU:     nvcc -O3 -arch=native -I. -DDTRAIN_USE_CUDA examples/offload.c dtrain_cuda.cu -lcublasLt -o offload
 *   run:     ./offload                  two ranks; ./offload 4 plans for four
 *            ./offload 2 --device cuda  trains, on two GPUs or on one that the ranks share
 *   expect:
 *     KiB of a rank   parameters  gradients  AdamW  buffers    host  loss
 *     nothing              256.0      256.0  512.0    256.0     0.0  -
 *     optimizer            256.0      256.0    0.0    256.0   832.0  -
 *     and gradients        256.0        0.0    0.0    256.0  1088.0  -
 *     and parameters         0.0        0.0    0.0    256.0  1088.0  -
 *
 * The first four columns are memory of the GPU. Units are gathered in the buffers, so that with everything else
 * offloaded the GPU holds two layers at a time. The parameters in host memory are AdamW's master copy. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

#include "examples/layers.h"

enum { CHOICES = 4 };

static const struct {
    const char *name;
    uint32_t flags;
} choices[CHOICES] = {
    {"nothing", 0},
    {"optimizer", DTRAIN_OFFLOAD_OPTIMIZER},
    {"and gradients", DTRAIN_OFFLOAD_OPTIMIZER | DTRAIN_OFFLOAD_GRADS},
    {"and parameters", DTRAIN_OFFLOAD_OPTIMIZER | DTRAIN_OFFLOAD_GRADS | DTRAIN_OFFLOAD_PARAMS}};

/* Every rank runs this function. */
static int compare(dtrain_world *world, void *user)
{
    const dtrain_optimizer_desc adamw = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_ADAMW);
    const bool gpu = !dtrain_world_device(world)->ops->host_memory;
    const bool first = dtrain_world_rank(world) == 0;
    dtrain_param params[LAYERS];
    dtrain_memory plan[CHOICES];
    outcome of[CHOICES];
    char loss[16] = "-";
    (void)user;
    if (first) printf("KiB of a rank   parameters  gradients  AdamW  buffers    host  loss\n");
    for (int c = 0; c < CHOICES; c++) {
        const dtrain_strategy_desc desc = {.kind = DTRAIN_STRATEGY_FULL_SHARD,
                                           .offload = choices[c].flags};
        declare(params);
        CHECK(dtrain_strategy_plan(params, LAYERS, &desc, dtrain_world_size(world), &plan[c]));
        if (gpu) {
            CHECK(train(world, &desc, &adamw, 1e-3f, &of[c]));
            snprintf(loss, sizeof loss, "%.6f", (double)of[c].loss);
            if (of[c].info.value_bytes != plan[c].params ||
                of[c].info.grad_bytes != plan[c].grads ||
                of[c].info.buffer_bytes != plan[c].buffers ||
                fabsf(of[c].loss - of[0].loss) > 1e-4f * of[0].loss)
                CHECK(dtrain_fail(DTRAIN_ERROR_NUMERIC, "%s: not as planned, or another loss",
                                  choices[c].name));
        }
        if (first)
            printf("%-14s  %10.1f  %9.1f  %5.1f  %7.1f  %6.1f  %s\n", choices[c].name,
                   kib(plan[c].params), kib(plan[c].grads), kib(plan[c].optimizer),
                   kib(plan[c].buffers), kib(plan[c].host), loss);
        if (c && plan[c].total >= plan[c - 1].total)
            CHECK(dtrain_fail(DTRAIN_ERROR_NUMERIC, "%s saves nothing", choices[c].name));
    }
    return 0;
}

int main(int argc, char **argv)
{
    dtrain_launch_desc desc = {.default_rank_count = 2};
    const char *device = "cpu";
    for (int a = 1; a < argc; a++) {
        if (strcmp(argv[a], "--device") == 0 && a + 1 < argc) device = argv[++a];
        else if ((desc.rank_count = (uint32_t)strtoul(argv[a], NULL, 10)) == 0) {
            fprintf(stderr, "usage: offload [RANKS] [--device cpu|cuda], not \"%s\"\n", argv[a]);
            return 2;
        }
    }
    if (dtrain_device_ops_by_name(device, &desc.device_ops) == DTRAIN_OK &&
        dtrain_launch(&desc, compare, NULL, NULL) == DTRAIN_OK)
        return 0;
    fprintf(stderr, "offload: %s\n", dtrain_last_error());
    return 1;
}
