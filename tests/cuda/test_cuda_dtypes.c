/* test_cuda_dtypes.c: parameters in bf16 and fp16 on the CUDA device, over the staged communicator. Each value that a
 * host sees has the bits of its rounded master; masters equal the CPU device's, to rounding. The emulated
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
    bool wide;     /* fp64, which AdamW updates */
    bool offloads; /* as much as the kind can, on a device that can */
    double masters[KINDS][PARAMS][COUNT];
} outcome;

static const uint32_t dtypes[PARAMS] = {DTRAIN_DTYPE_BF16, DTRAIN_DTYPE_F16, DTRAIN_DTYPE_F32,
                                        DTRAIN_DTYPE_BF16, DTRAIN_DTYPE_F16};

static double round_to(uint32_t dtype, double x)
{
    if (dtype == DTRAIN_DTYPE_F32 || dtype == DTRAIN_DTYPE_F64) return x;
    return (double)dtrain_half_to_f32((dtrain_dtype)dtype,
                                      dtrain_half_from_f32((dtrain_dtype)dtype, (float)x));
}

/* Copy an array of the device to x, or x to it. */
static dtrain_result move(dtrain_device *device, uint32_t dtype, void *array, double x[COUNT],
                          bool to_device)
{
    float wide[COUNT] = {0};
    uint16_t half[COUNT] = {0};
    const size_t bytes = COUNT * dtrain_dtype_bytes((dtrain_dtype)dtype);
    void *host = dtype == DTRAIN_DTYPE_F64   ? (void *)x
                 : dtype == DTRAIN_DTYPE_F32 ? (void *)wide
                                             : (void *)half;
    for (int e = 0; e < COUNT && to_device; e++) {
        wide[e] = (float)x[e];
        half[e] = dtrain_half_from_f32((dtrain_dtype)dtype, wide[e]);
    }
    TRY(dtrain_device_copy(device, to_device ? array : host, to_device ? host : array, bytes));
    for (int e = 0; e < COUNT && !to_device && dtype != DTRAIN_DTYPE_F64; e++)
        x[e] = (double)(dtype ? dtrain_half_to_f32((dtrain_dtype)dtype, half[e]) : wide[e]);
    return DTRAIN_OK;
}

/* Read a whole master. */
static dtrain_result read_master(dtrain_strategy *strategy, const dtrain_param *p, size_t i,
                                 double x[COUNT])
{
    double memory[COUNT];
    TRY(dtrain_strategy_read(strategy, i, memory));
    for (int e = 0; e < COUNT; e++)
        x[e] = p[i].dtype == DTRAIN_DTYPE_F64 ? memory[e]
                                              : (double)((const float *)(const void *)memory)[e];
    return DTRAIN_OK;
}

static dtrain_result step(dtrain_world *world, dtrain_strategy *strategy, dtrain_param *p,
                          uint32_t kind, int s)
{
    dtrain_device *device = dtrain_world_device(world);
    double masters[PARAMS][COUNT], x[COUNT];
    dtrain_strategy_info info;
    dtrain_strategy_query(strategy, &info);
    for (int i = 0; i < PARAMS; i++) TRY(read_master(strategy, p, (size_t)i, masters[i]));
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
                               x[e], masters[i][e]))
                    break;
                x[e] = 0.5 * x[e] + 0.125 * ((e + i + s + dtrain_world_rank(world)) % 7 - 3);
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
    dtrain_optimizer_desc how =
        dtrain_optimizer_defaults(out->wide ? DTRAIN_OPTIMIZER_ADAMW : DTRAIN_OPTIMIZER_SGD);
    dtrain_strategy_desc desc;
    dtrain_param p[PARAMS];
    dtrain_strategy *strategy;
    dtrain_optimizer *optimizer;
    void *memory = NULL;
    double x[COUNT];
    float norm, scale;
    memset(&desc, 0, sizeof desc);
    desc.kind = kind;
    desc.node_size = kind == DTRAIN_STRATEGY_HYBRID_SHARD ? RANKS : 0;
    desc.param_dtype =
        !out->wide && out->own && kind >= DTRAIN_STRATEGY_FULL_SHARD ? DTRAIN_DTYPE_BF16 : 0;
    if (out->offloads && !device->ops->host_memory)
        desc.offload = kind < DTRAIN_STRATEGY_SHARD_GRAD_OP ? DTRAIN_OFFLOAD_OPTIMIZER
                       : kind < DTRAIN_STRATEGY_FULL_SHARD
                           ? DTRAIN_OFFLOAD_OPTIMIZER | DTRAIN_OFFLOAD_GRADS
                           : 7;
    TRY(device->ops->alloc(device, PARAMS * 1024, &memory));
    for (int i = 0; i < PARAMS; i++) {
        char *array = (char *)memory + i * 1024;
        p[i] = ranks_param(names[i], NULL, NULL, 5, 7);
        p[i].unit = (uint32_t)i;
        p[i].dtype = out->wide ? DTRAIN_DTYPE_F64 : dtypes[i];
        p[i].init = DTRAIN_INIT_NORMAL;
        p[i].init_scale = 1;
        if (!own || p[i].dtype == DTRAIN_DTYPE_F32) continue;
        for (int e = 0; e < COUNT; e++) x[e] = (e - i - 20 * dtrain_world_rank(world)) / 16.0;
        TRY(move(device, p[i].dtype, array, x, true));
        p[i].typed_value = array;
        p[i].typed_grad = array + 512;
    }
    TRY(dtrain_strategy_create(world, p, PARAMS, &desc, &strategy));
    TRY(dtrain_optimizer_create(world, strategy, &how, &optimizer));
    for (int s = 0; s < STEPS; s++) {
        TRY(step(world, strategy, p, kind, s));
        TRY(dtrain_grad_norm(strategy, NULL, 1, &norm, &scale));
        TRY(dtrain_optimizer_step(optimizer, 0.25f, scale));
    }
    for (int i = 0; i < PARAMS; i++) {
        TRY(read_master(strategy, p, (size_t)i, x));
        if (dtrain_world_rank(world) == 0) memcpy(out->masters[kind][i], x, sizeof x);
    }
    dtrain_optimizer_destroy(optimizer);
    dtrain_strategy_destroy(strategy);
    device->ops->free(device, memory, PARAMS * 1024);
    return DTRAIN_OK;
}

static int train_main(dtrain_world *world, void *user)
{
    for (uint32_t kind = DTRAIN_STRATEGY_DDP; kind < KINDS; kind++)
        RANKS_TRY(train(world, kind, (outcome *)user));
    return 0;
}

static void run(bool own, bool offloads, bool wide)
{
    outcome *cpu = (outcome *)ranks_shared(sizeof *cpu),
            *cuda = (outcome *)ranks_shared(sizeof *cuda);
    dtrain_launch_desc desc = ranks_desc(RANKS, DTRAIN_LAUNCH_PROCESSES);
    cpu->own = cuda->own = own;
    cuda->offloads = offloads;
    cpu->wide = cuda->wide = wide;
    ranks_run(RANKS, DTRAIN_LAUNCH_PROCESSES, train_main, cpu);
    desc.device_ops = dtrain_cuda_device_ops();
    CHECK_MSG(ranks_launch(&desc, train_main, cuda, NULL) == DTRAIN_OK, "%s", dtrain_last_error());
    for (int k = DTRAIN_STRATEGY_DDP; k < KINDS; k++)
        for (int i = 0; i < PARAMS; i++)
            for (int e = 0; e < COUNT; e++)
                if (!CHECK_MSG(fabs(cuda->masters[k][i][e] - cpu->masters[k][i][e]) <=
                                   (wide ? 1e-14 : 1e-5),
                               "kind %d: p%d[%d] is %.8g, on the CPU %.8g", k, i, e,
                               cuda->masters[k][i][e], cpu->masters[k][i][e]))
                    break;
}

static void test_library_arrays(void) { run(false, false, false); }
static void test_program_arrays(void) { run(true, false, false); }
static void test_offload(void) { run(false, true, false); }
static void test_offload_program_arrays(void) { run(true, true, false); }
static void test_f64(void) { run(false, false, true); }
static void test_f64_program_arrays(void) { run(true, false, true); }

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
    RUN(test_f64);
    RUN(test_f64_program_arrays);
    RUN(test_host_memory);
    return test_summary();
}
