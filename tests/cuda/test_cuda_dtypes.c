/* test_cuda_dtypes.c: parameters in bf16 and fp16 on the CUDA device, over the staged communicator. Each value that a
 * host sees has the bits of its rounded master; masters are those of the CPU device, but for rounding. The emulated
 * device runs streams late: a value that is rounded before the new one has arrived shows as other bits. */
#include "test.h"
#include "dtrain.h"
#include "ranks.h"
#ifdef DTRAIN_CUDA_EMULATION
#include "cuda_emulation.h"
#endif

enum { PARAMS = 5, COUNT = 35, STEPS = 3, RANKS = 3, KINDS = 7 };

typedef struct outcome {
    bool own;      /* the program has the arrays of whole values, and of gradients */
    bool offloads; /* as much as the kind can, on a device that can */
    float masters[KINDS][PARAMS][COUNT];
} outcome;

static const uint32_t dtypes[PARAMS] = {DTRAIN_DTYPE_BF16, DTRAIN_DTYPE_F16, DTRAIN_DTYPE_F32,
                                        DTRAIN_DTYPE_BF16, DTRAIN_DTYPE_F16};

static float round_to(uint32_t dtype, float x)
{
    if (dtype == DTRAIN_DTYPE_F32) return x;
    return dtrain_half_to_f32((dtrain_dtype)dtype, dtrain_half_from_f32((dtrain_dtype)dtype, x));
}

/* Copy an array of the device to fp32, or fp32 to it. */
static dtrain_result move(dtrain_device *device, uint32_t dtype, void *array, float x[COUNT],
                          bool to_device)
{
    uint16_t half[COUNT];
    const size_t bytes = COUNT * dtrain_dtype_bytes((dtrain_dtype)dtype);
    void *host = dtype == DTRAIN_DTYPE_F32 ? (void *)x : (void *)half;
    for (int e = 0; e < COUNT && to_device; e++)
        half[e] = dtrain_half_from_f32((dtrain_dtype)dtype, x[e]);
    TRY(dtrain_device_copy(device, to_device ? array : host, to_device ? host : array, bytes));
    for (int e = 0; e < COUNT && !to_device && dtype != DTRAIN_DTYPE_F32; e++)
        x[e] = dtrain_half_to_f32((dtrain_dtype)dtype, half[e]);
    return DTRAIN_OK;
}

static dtrain_result step(dtrain_world *world, dtrain_strategy *strategy, dtrain_param *p,
                          uint32_t kind, int s)
{
    dtrain_device *device = dtrain_world_device(world);
    float masters[PARAMS][COUNT], x[COUNT];
    dtrain_strategy_info info;
    dtrain_strategy_query(strategy, &info);
    for (int i = 0; i < PARAMS; i++) TRY(dtrain_strategy_read(strategy, (size_t)i, masters[i]));
    for (uint32_t pass = 0; pass < 2; pass++)
        for (int i = pass ? PARAMS - 1 : 0; i >= 0 && i < PARAMS; i += pass ? -1 : 1) {
            const uint32_t dtype = p[i].dtype;
            TRY(dtrain_strategy_gather(strategy, (uint32_t)i,
                                       pass ? DTRAIN_PASS_BACKWARD : DTRAIN_PASS_FORWARD));
            TRY(move(device, dtype, dtype ? p[i].typed_value : p[i].value, x, false));
            for (int e = 0; e < COUNT; e++) {
                if (!CHECK_MSG(x[e] ==
                                   round_to(dtype, round_to(info.desc.param_dtype, masters[i][e])),
                               "kind %u, step %d: p%d[%d] is %g, its master %g", kind, s, i, e,
                               (double)x[e], (double)masters[i][e]))
                    break;
                x[e] =
                    0.5f * x[e] + 0.125f * (float)((e + i + s + dtrain_world_rank(world)) % 7 - 3);
            }
            if (pass) TRY(move(device, dtype, dtype ? p[i].typed_grad : p[i].grad, x, true));
            if (pass) TRY(dtrain_strategy_ready(strategy, (size_t)i));
            TRY(dtrain_strategy_release(strategy, (uint32_t)i));
        }
    return dtrain_strategy_finish(strategy);
}

static dtrain_result train(dtrain_world *world, uint32_t kind, outcome *out)
{
    static const char *const names[PARAMS] = {"a", "b", "c", "d", "e"};
    dtrain_device *device = dtrain_world_device(world);
    const bool own = out->own && kind < DTRAIN_STRATEGY_FULL_SHARD;
    dtrain_optimizer_desc how = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_SGD);
    dtrain_strategy_desc desc;
    dtrain_param p[PARAMS];
    dtrain_strategy *strategy;
    dtrain_optimizer *optimizer;
    void *memory = NULL;
    float x[COUNT], norm, scale;
    memset(&desc, 0, sizeof desc);
    desc.kind = kind;
    desc.node_size = kind == DTRAIN_STRATEGY_HYBRID_SHARD ? RANKS : 0;
    desc.param_dtype = out->own && kind >= DTRAIN_STRATEGY_FULL_SHARD ? DTRAIN_DTYPE_BF16 : 0;
    if (out->offloads && !device->ops->host_memory)
        desc.offload = kind < DTRAIN_STRATEGY_SHARD_GRAD_OP ? DTRAIN_OFFLOAD_OPTIMIZER
                       : kind < DTRAIN_STRATEGY_FULL_SHARD
                           ? DTRAIN_OFFLOAD_OPTIMIZER | DTRAIN_OFFLOAD_GRADS
                           : 7;
    TRY(device->ops->alloc(device, PARAMS * 512, &memory));
    for (int i = 0; i < PARAMS; i++) {
        char *array = (char *)memory + i * 512;
        p[i] = ranks_param(names[i], NULL, NULL, 5, 7);
        p[i].unit = (uint32_t)i;
        p[i].dtype =
            dtypes[i] == DTRAIN_DTYPE_F32 && desc.param_dtype ? DTRAIN_DTYPE_BF16 : dtypes[i];
        p[i].init = DTRAIN_INIT_NORMAL;
        p[i].init_scale = 1;
        if (!own || dtypes[i] == DTRAIN_DTYPE_F32) continue;
        for (int e = 0; e < COUNT; e++) x[e] = (float)(e - i - 20 * dtrain_world_rank(world)) / 16;
        TRY(move(device, dtypes[i], array, x, true));
        p[i].typed_value = array;
        p[i].typed_grad = array + 256;
    }
    TRY(dtrain_strategy_create(world, p, PARAMS, &desc, &strategy));
    TRY(dtrain_optimizer_create(world, strategy, &how, &optimizer));
    for (int s = 0; s < STEPS; s++) {
        TRY(step(world, strategy, p, kind, s));
        TRY(dtrain_grad_norm(strategy, NULL, 1, &norm, &scale));
        TRY(dtrain_optimizer_step(optimizer, 0.25f, scale));
    }
    for (int i = 0; i < PARAMS; i++) {
        TRY(dtrain_strategy_read(strategy, (size_t)i, x));
        if (dtrain_world_rank(world) == 0) memcpy(out->masters[kind][i], x, sizeof x);
    }
    dtrain_optimizer_destroy(optimizer);
    dtrain_strategy_destroy(strategy);
    device->ops->free(device, memory, PARAMS * 512);
    return DTRAIN_OK;
}

static int train_main(dtrain_world *world, void *user)
{
    for (uint32_t kind = DTRAIN_STRATEGY_DDP; kind < KINDS; kind++)
        RANKS_TRY(train(world, kind, (outcome *)user));
    return 0;
}

static void run(bool own, bool offloads)
{
    outcome *cpu = (outcome *)ranks_shared(sizeof *cpu),
            *cuda = (outcome *)ranks_shared(sizeof *cuda);
    dtrain_launch_desc desc = ranks_desc(RANKS, DTRAIN_LAUNCH_PROCESSES);
    cpu->own = cuda->own = own;
    cuda->offloads = offloads;
    ranks_run(RANKS, DTRAIN_LAUNCH_PROCESSES, train_main, cpu);
    desc.device_ops = dtrain_cuda_device_ops();
    CHECK_MSG(ranks_launch(&desc, train_main, cuda, NULL) == DTRAIN_OK, "%s", dtrain_last_error());
    for (int k = DTRAIN_STRATEGY_DDP; k < KINDS; k++)
        for (int i = 0; i < PARAMS; i++)
            for (int e = 0; e < COUNT; e++)
                if (!CHECK_MSG(fabsf(cuda->masters[k][i][e] - cpu->masters[k][i][e]) <= 1e-5f,
                               "kind %d: p%d[%d] is %.8g, on the CPU %.8g", k, i, e,
                               (double)cuda->masters[k][i][e], (double)cpu->masters[k][i][e]))
                    break;
}

static void test_library_arrays(void) { run(false, false); }
static void test_program_arrays(void) { run(true, false); }
static void test_offload(void) { run(false, true); }
static void test_offload_program_arrays(void) { run(true, true); }

static int host_main(dtrain_world *world, void *user)
{
    static uint16_t memory[COUNT];
    dtrain_param p = ranks_param("w", NULL, NULL, COUNT, 0);
    dtrain_strategy *strategy;
    (void)user;
    p.dtype = DTRAIN_DTYPE_BF16;
    p.typed_grad = memory;
    CHECK(dtrain_strategy_create(world, &p, 1, NULL, &strategy) == DTRAIN_ERROR_ARGUMENT);
    CHECK_MSG(strstr(dtrain_last_error(),
                     "typed_value or typed_grad is host memory, which the cuda device"),
              "%s", dtrain_last_error());
    return 0;
}

static void test_host_memory(void)
{
    dtrain_launch_desc desc = ranks_desc(1, DTRAIN_LAUNCH_PROCESSES);
    desc.device_ops = dtrain_cuda_device_ops();
    CHECK(ranks_launch(&desc, host_main, NULL, NULL) == DTRAIN_OK);
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    RUN(test_library_arrays);
    RUN(test_program_arrays);
    RUN(test_offload);
    RUN(test_offload_program_arrays);
    RUN(test_host_memory);
    return test_summary();
}
