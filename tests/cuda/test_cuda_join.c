/* test_cuda_join.c: guests of a program that has CUDA and NCCL of its own, on the emulated CUDA device and a mock of
 * NCCL. The host's ranks are processes with a GPU, a stream and a communicator each; its forward and backward
 * are copies that it queues on its stream, its graphs are captured by itself. All values are exact. */
#include "test.h"
#include "dtrain.h"
#define DTRAIN_NCCL_LINKED
#define DTRAIN_NCCL_IMPLEMENTATION
#include "dtrain_nccl.h"

#include "host.h"
#include "nccl/mock/nccl_mock.c"
#include "nccl/mock/emulated_device.h"

static bool says(const char *words) { return strstr(dtrain_last_error(), words) != NULL; }
#define CHECK_SAYS(words) CHECK_MSG(says(words), "\"%s\" is not in: %s", words, dtrain_last_error())
#define CHECK_CUDA(call) \
    CHECK_MSG((call) == cudaSuccess, "%s", cudaGetErrorString(cudaGetLastError()))

enum { RANKS = 2, PARAMS = 3, COUNT = 1000, BYTES = COUNT * (int)sizeof(float), STEPS = 5 };

/* ---- The host's model ---- */

enum {
    DIES_IN_LAUNCH = 1, /* rank 1, before it launches its graph for the second time */
    DIES_IN_CAPTURE     /* rank 1, while rank 0 captures */
};

typedef struct program {
    host_group *group;
    uint32_t kind, optimizer; /* dtrain_strategy_kind, dtrain_optimizer_kind */
    uint32_t missing;         /* dtrain_missing_gradient */
    bool staged;              /* no NCCL */
    bool on_host;             /* gradients are in host memory */
    bool graph;
    int order;
    int fault;
    uint64_t *hashes; /* (RANKS) shared memory */
} program;

typedef struct model {
    const program *how;
    int rank;
    cudaStream_t stream;
    ncclComm_t comm;
    float *batch, *seen; /* (PARAMS * COUNT) device memory: gradients; values in forward */
    float *values, *grads;
    float *pinned; /* (PARAMS * COUNT) */
    float on_host[PARAMS * COUNT];
    bool loses; /* in the middle of the pass it hears that the other rank is dead */
    dtrain_world *world;
    dtrain_param params[PARAMS];
    dtrain_strategy *strategy;
    dtrain_optimizer *optimizer;
} model;

static float gradient(int rank, int step, int at)
{
    return (float)((rank + 1) * (step + 1) + at % 7);
}

static float *device_floats(void)
{
    float *memory = NULL;
    CHECK_CUDA(cudaMalloc((void **)&memory, PARAMS * BYTES));
    CHECK_CUDA(cudaMemset(memory, 0, PARAMS * BYTES));
    return memory;
}

static void copy_on(model *m, float *to, const float *from)
{
    CHECK_CUDA(cudaMemcpyAsync(to, from, BYTES, cudaMemcpyDeviceToDevice, m->stream));
}

/* The host's batch of a step, in its stream. */
static void fill_batch(model *m, int step)
{
    CHECK_CUDA(cudaStreamSynchronize(m->stream));
    for (int i = 0; i < PARAMS * COUNT; i++) m->pinned[i] = gradient(m->rank, step, i);
    CHECK_CUDA(
        cudaMemcpyAsync(m->batch, m->pinned, PARAMS * BYTES, cudaMemcpyHostToDevice, m->stream));
}

/* Forward and backward of the host, with dtrain's calls in between. */
static dtrain_result pass(model *m)
{
    dtrain_result result = DTRAIN_OK;
    for (uint32_t i = 0; i < PARAMS && result == DTRAIN_OK; i++) {
        result = dtrain_strategy_gather(m->strategy, i, DTRAIN_PASS_FORWARD);
        if (result == DTRAIN_OK) copy_on(m, m->seen + i * COUNT, m->params[i].value);
        if (result == DTRAIN_OK) result = dtrain_strategy_release(m->strategy, i);
    }
    for (uint32_t i = PARAMS; i-- > 0 && result == DTRAIN_OK;) {
        while (i == 0 && m->loses && dtrain_world_poll(m->world) == DTRAIN_OK) sched_yield();
        result = dtrain_strategy_gather(m->strategy, i, DTRAIN_PASS_BACKWARD);
        if (result == DTRAIN_OK && m->how->on_host)
            memcpy(m->params[i].grad, m->pinned + i * COUNT, BYTES);
        else if (result == DTRAIN_OK) copy_on(m, m->params[i].grad, m->batch + i * COUNT);
        if (result == DTRAIN_OK) result = dtrain_strategy_ready(m->strategy, i);
        if (result == DTRAIN_OK) result = dtrain_strategy_release(m->strategy, i);
    }
    return result == DTRAIN_OK ? dtrain_strategy_finish(m->strategy) : result;
}

static dtrain_result update(model *m) { return dtrain_optimizer_step(m->optimizer, 0.25f, 1); }
static bool in_graph(const model *m) { return m->how->optimizer == DTRAIN_OPTIMIZER_SGD; }

/* ---- Join and leave ---- */

/* An abort ends once the host has destroyed its graphs. */
static void no_leftovers(void *user, dtrain_log_level level, int rank, const char *text)
{
    (void)user, (void)level;
    CHECK_MSG(!strstr(text, "left behind"), "rank %d: %s", rank, text);
}

static int guest_begin(model *m, const program *how, int rank)
{
    host_member member = host_member_of(how->group, rank);
    dtrain_join_desc desc = host_desc(&member);
    dtrain_strategy_desc settings;
    dtrain_optimizer_desc sgd = dtrain_optimizer_defaults((dtrain_optimizer_kind)how->optimizer);
    static const char *const names[PARAMS] = {"first", "second", "third"};
    dtrain_nccl_given given = {NULL, NULL, false};
    ncclUniqueId id, ids[HOST_MOST];
    const bool sharded = how->kind == DTRAIN_STRATEGY_FULL_SHARD;
    memset(m, 0, sizeof *m);
    memset(&id, 0, sizeof id);
    m->how = how;
    m->rank = rank;
    dtrain_emulation_set_order(how->order, 3);
    nccl_mock.delay_steps = how->order * (1 + 2 * rank);
    CHECK_CUDA(cudaSetDevice(rank));
    CHECK_CUDA(cudaStreamCreateWithFlags(&m->stream, cudaStreamNonBlocking));
    CHECK_CUDA(cudaMallocHost((void **)&m->pinned, PARAMS * BYTES));
    m->batch = device_floats();
    m->seen = device_floats();
    m->values = device_floats();
    m->grads = device_floats();
    CHECK_CUDA(cudaDeviceSynchronize()); /* they were filled on another stream */
    if (rank == 0) CHECK(ncclGetUniqueId(&id) == ncclSuccess);
    CHECK(host_all_gather(&member, &id, ids, sizeof id) == 0);
    CHECK(ncclCommInitRank(&m->comm, RANKS, ids[0], rank) == ncclSuccess);
    given.comm = m->comm;
    desc.timeout_ms = how->fault ? RANKS_SHORT_MS : desc.timeout_ms;
    desc.options.log = no_leftovers;
    desc.device_ops = dtrain_cuda_device_ops();
    desc.stream = (void *)m->stream;
    if (!how->staged) desc.comm_ops = dtrain_nccl_comm_ops();
    if (!how->staged) desc.comm_given = &given;
    RANKS_TRY(dtrain_world_join(&desc, &m->world));
    for (uint32_t i = 0; i < PARAMS; i++) {
        m->params[i].name = names[i];
        m->params[i].value = sharded ? NULL : m->values + i * COUNT;
        m->params[i].grad = sharded ? NULL : (how->on_host ? m->on_host : m->grads) + i * COUNT;
        m->params[i].count = COUNT;
        m->params[i].unit = i;
        m->params[i].init = DTRAIN_INIT_CONSTANT;
    }
    memset(&settings, 0, sizeof settings);
    settings.kind = how->kind;
    settings.missing_gradient = how->missing;
    settings.bucket_bytes = BYTES;
    RANKS_TRY(dtrain_strategy_create(m->world, m->params, PARAMS, &settings, &m->strategy));
    RANKS_TRY(dtrain_optimizer_create(m->world, m->strategy, &sgd, &m->optimizer));
    return 0;
}

/* Everything of dtrain goes first, then the host's. Nothing is left. */
static int guest_end(model *m, bool failed)
{
    dtrain_emulation_counters c;
    ncclResult_t asynchronous = ncclInternalError;
    int device = -1;
    dtrain_optimizer_destroy(m->optimizer);
    dtrain_strategy_destroy(m->strategy);
    CHECK_MSG((dtrain_world_leave(m->world) != DTRAIN_OK) == failed, "%s", dtrain_last_error());
    CHECK(cudaPeekAtLastError() == cudaSuccess && cudaGetDevice(&device) == cudaSuccess &&
          device == m->rank);
    CHECK(ncclCommGetAsyncError(m->comm, &asynchronous) == ncclSuccess && !asynchronous);
    CHECK_CUDA(cudaMemsetAsync(m->batch, 0, BYTES, m->stream)); /* it is there and works */
    CHECK_CUDA(cudaStreamSynchronize(m->stream));
    CHECK(ncclCommDestroy(m->comm) == ncclSuccess);
    CHECK_CUDA(cudaFree(m->batch));
    CHECK_CUDA(cudaFree(m->seen));
    CHECK_CUDA(cudaFree(m->values));
    CHECK_CUDA(cudaFree(m->grads));
    CHECK_CUDA(cudaFreeHost(m->pinned));
    CHECK_CUDA(cudaStreamDestroy(m->stream));
    dtrain_emulation_get_counters(&c);
    CHECK_MSG(c.allocations_alive == 0 && c.pinned_alive == 0, "%d device, %d pinned allocations",
              (int)c.allocations_alive, (int)c.pinned_alive);
    CHECK_MSG(c.streams_alive == 0 && c.events_alive == 0 && c.graphs_alive == 0,
              "%d streams, %d events, %d graphs", (int)c.streams_alive, (int)c.events_alive,
              (int)c.graphs_alive);
    CHECK(nccl_mock_count.comms == 0 && nccl_mock_count.misuses == 0);
    return 0;
}

/* ---- Steps, and steps that are launched ---- */

/* With SGD each value is known. */
static void check_values(model *m, int steps)
{
    float *host = (float *)malloc(BYTES);
    for (int i = 0; i < PARAMS; i++) {
        int wrong = 0;
        CHECK_MSG(dtrain_strategy_read(m->strategy, (size_t)i, host) == DTRAIN_OK, "%s",
                  dtrain_last_error());
        for (int j = 0; j < COUNT; j++) {
            float expected = 0;
            for (int step = 0; step < steps; step++) {
                float sum = 0;
                for (int r = 0; r < RANKS; r++) sum += gradient(r, step, i * COUNT + j);
                expected -= 0.25f * sum / RANKS;
            }
            wrong += host[j] != expected;
        }
        CHECK_MSG(wrong == 0,
                  "kind %u, order %d, graph %d, rank %d, %d steps: %d of %s are wrong, first %g",
                  m->how->kind, m->how->order, m->how->graph, m->rank, steps, wrong,
                  m->params[i].name, (double)host[0]);
    }
    free(host);
}

static int run_steps(int rank, void *user)
{
    const program *how = (const program *)user;
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    model m;
    bool failed = false;
    if (guest_begin(&m, how, rank)) return 1;
    for (int step = 0; step < STEPS && !failed; step++) {
        fill_batch(&m, step);
        if (!how->graph || step < 2) {
            RANKS_TRY(pass(&m));
            RANKS_TRY(update(&m));
            continue;
        }
        if (how->fault == DIES_IN_CAPTURE && rank == 1) _exit(0);
        m.loses = how->fault == DIES_IN_CAPTURE;
        if (step == 2) { /* recorded once, launched three times */
            CHECK_CUDA(cudaStreamBeginCapture(m.stream, how->order
                                                            ? cudaStreamCaptureModeThreadLocal
                                                            : cudaStreamCaptureModeGlobal));
            if (m.loses) {
                CHECK(pass(&m) != DTRAIN_OK);
                CHECK_SAYS("rank 1");
                if (cudaStreamEndCapture(m.stream, &graph) == cudaSuccess)
                    CHECK_CUDA(cudaGraphDestroy(graph));
                cudaGetLastError(); /* the collectives that were captured may be unjoined */
                return guest_end(&m, true);
            }
            RANKS_TRY(pass(&m));
            if (in_graph(&m)) RANKS_TRY(update(&m));
            else
                CHECK(update(&m) == DTRAIN_ERROR_UNSUPPORTED &&
                      says("after each launch of the graph"));
            CHECK_CUDA(cudaStreamEndCapture(m.stream, &graph));
            CHECK_CUDA(cudaGraphInstantiate(&exec, graph, 0));
            CHECK_CUDA(cudaGraphDestroy(graph));
        }
        if (how->fault && rank == 1 && step == 3) _exit(0);
        CHECK_CUDA(cudaGraphLaunch(exec, m.stream));
        if (!in_graph(&m)) RANKS_TRY(update(&m));
        if (how->fault && step == 3) { /* the host waits by dtrain, which knows deadlines */
            dtrain_device *device = dtrain_world_device(m.world);
            const double begin = dtrain_seconds();
            CHECK(device->ops->synchronize(device) != DTRAIN_OK);
            CHECK_SAYS("rank 1");
            CHECK_MSG(dtrain_seconds() - begin < RANKS_SOON, "it took %.1f s",
                      dtrain_seconds() - begin);
            failed = true;
        }
    }
    if (!failed && in_graph(&m)) check_values(&m, STEPS);
    if (!failed) RANKS_TRY(dtrain_strategy_verify(m.strategy, &how->hashes[rank]));
    if (exec) CHECK_CUDA(cudaGraphExecDestroy(exec));
    return guest_end(&m, failed);
}

static program plain(uint32_t kind, uint32_t optimizer)
{
    program how;
    memset(&how, 0, sizeof how);
    how.group = host_group_new(RANKS);
    how.kind = kind;
    how.optimizer = optimizer;
    how.hashes = (uint64_t *)ranks_shared(RANKS * sizeof *how.hashes);
    dtrain_emulation_set_device_count(RANKS);
    return how;
}

static void check_run(program *how, host_main run)
{
    int status[RANKS];
    host_run(RANKS, false, run, how, status);
    for (int r = 0; r < RANKS; r++)
        CHECK_MSG(status[r] == 0, "kind %u: rank %d: %d", how->kind, r, status[r]);
}

static const uint32_t kinds[] = {DTRAIN_STRATEGY_DDP, DTRAIN_STRATEGY_ZERO1,
                                 DTRAIN_STRATEGY_FULL_SHARD};

static void test_steps(void)
{
    for (int i = 0; i < 3; i++)
        for (int order = 0; order < 3; order++)
            for (int graph = 0; graph < 2; graph++) {
                program how = plain(kinds[i], DTRAIN_OPTIMIZER_SGD);
                how.order = order;
                how.graph = graph;
                check_run(&how, run_steps);
            }
}

/* AdamW's numbers change: its update stays outside, and the bits are those of steps without a graph. */
static void test_adamw(void)
{
    for (int i = 0; i < 3; i++) {
        program eager = plain(kinds[i], DTRAIN_OPTIMIZER_ADAMW),
                graph = plain(kinds[i], DTRAIN_OPTIMIZER_ADAMW);
        graph.graph = true;
        check_run(&eager, run_steps);
        check_run(&graph, run_steps);
        CHECK(eager.hashes[0] == graph.hashes[0] && eager.hashes[1] == graph.hashes[1] &&
              eager.hashes[0]);
    }
}

static void test_death(void)
{
    for (int fault = DIES_IN_LAUNCH; fault <= DIES_IN_CAPTURE; fault++) {
        program how = plain(DTRAIN_STRATEGY_DDP, DTRAIN_OPTIMIZER_SGD);
        const double start = dtrain_seconds();
        how.graph = true;
        how.fault = fault;
        dtrain_emulation_set_quiet(1);
        check_run(&how, run_steps);
        CHECK_MSG(dtrain_seconds() - start < RANKS_SOON, "it took %.1f s",
                  dtrain_seconds() - start);
    }
}

/* ---- Steps that cannot be captured ---- */

/* Refused before anything is started: the capture and the world are as before. */
static int run_refused(int rank, void *user)
{
    const program *how = (const program *)user;
    cudaGraph_t graph = NULL;
    model m;
    if (guest_begin(&m, how, rank)) return 1;
    for (int step = 0; step < 3; step++) {
        fill_batch(&m, step);
        CHECK_CUDA(cudaStreamBeginCapture(m.stream, cudaStreamCaptureModeGlobal));
        const bool plain_nccl = !how->staged && !how->missing && !how->on_host;
        if (!step || !plain_nccl) {
            CHECK(pass(&m) == DTRAIN_ERROR_UNSUPPORTED);
            CHECK_SAYS(how->on_host  ? "parameters and gradients in device memory"
                       : !step       ? "a captured graph needs a whole step before it"
                       : how->staged ? "collectives on the device (dtrain_nccl.h)"
                                     : "another missing_gradient");
            CHECK(update(&m) == DTRAIN_ERROR_UNSUPPORTED);
        }
        CHECK(dtrain_barrier(dtrain_world_comm(m.world)) == DTRAIN_ERROR_UNSUPPORTED);
        CHECK_SAYS("dtrain_barrier: a barrier, a split, a count of 0");
        if (how->staged) {
            CHECK(dtrain_all_reduce(dtrain_world_comm(m.world), m.batch, m.batch, COUNT,
                                    DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM,
                                    NULL) == DTRAIN_ERROR_UNSUPPORTED);
            CHECK_SAYS("a communicator that moves data through host memory cannot be part of a "
                       "captured graph");
        }
        copy_on(&m, m.seen, m.batch);
        CHECK_CUDA(cudaStreamEndCapture(m.stream, &graph));
        CHECK_CUDA(cudaGraphDestroy(graph));
        RANKS_TRY(pass(&m));
        RANKS_TRY(update(&m));
    }
    check_values(&m, 3);
    return guest_end(&m, false);
}

static void test_refused(void)
{
    for (int i = 0; i < 4; i++) {
        program how = plain(kinds[i % 3], DTRAIN_OPTIMIZER_SGD);
        how.on_host = i == 3;
        how.staged = i == 1;
        how.missing = i == 2 ? DTRAIN_MISSING_GRADIENT_ERROR : 0;
        check_run(&how, run_refused);
    }
}

/* ---- dtrain's own graph on the host's stream ---- */

enum { ROWS = 4, WIDTH = 8 };

typedef struct trained {
    int rank, step;
    float x[ROWS * WIDTH];
    dtrain_param weight;
} trained;

static dtrain_result next_batch(void *user)
{
    trained *t = (trained *)user;
    for (int i = 0; i < ROWS * WIDTH; i++)
        t->x[i] = (float)((t->rank + 1) * (i + 3 * t->step) % 7) - 3;
    t->step++;
    return DTRAIN_OK;
}

static dtrain_tensor *loss(dtrain_tape *tape, void *user)
{
    trained *t = (trained *)user;
    const int64_t shape[2] = {ROWS, WIDTH};
    dtrain_tensor *x = dtrain_tape_input(tape, DTRAIN_DTYPE_F32, 2, shape, t->x, false);
    dtrain_tape_unit(tape, 0);
    dtrain_tensor *h = dtrain_linear(tape, x, &t->weight, NULL, DTRAIN_ACTIVATION_GELU);
    return dtrain_mean(tape, dtrain_multiply(tape, h, h));
}

/* The trainer records its step on the host's stream, between work of the host's. */
static int run_trainer(int rank, void *user)
{
    const program *how = (const program *)user;
    dtrain_optimizer_desc adamw = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_ADAMW);
    dtrain_trainer_desc desc;
    dtrain_strategy *strategy;
    dtrain_optimizer *optimizer;
    dtrain_trainer *trainer;
    dtrain_step_record record;
    model m;
    trained t;
    if (guest_begin(&m, how, rank)) return 1;
    memset(&t, 0, sizeof t);
    memset(&desc, 0, sizeof desc);
    t.rank = rank;
    t.weight.name = "weight";
    t.weight.shape[0] = 3;
    t.weight.shape[1] = WIDTH;
    t.weight.init = DTRAIN_INIT_NORMAL;
    t.weight.init_scale = 0.5f;
    RANKS_TRY(dtrain_strategy_create(m.world, &t.weight, 1, NULL, &strategy));
    RANKS_TRY(dtrain_optimizer_create(m.world, strategy, &adamw, &optimizer));
    desc.micro_batches = 1;
    desc.graph = how->graph;
    desc.schedule.lr = 0.01f;
    desc.strategy = strategy;
    desc.optimizer = optimizer;
    desc.next_batch = next_batch;
    desc.loss = loss;
    desc.user = &t;
    RANKS_TRY(dtrain_trainer_create(m.world, &desc, &trainer));
    for (int step = 0; step < STEPS; step++) {
        RANKS_TRY(dtrain_trainer_step(trainer, &record));
        copy_on(&m, m.seen, m.batch);
    }
    RANKS_TRY(dtrain_strategy_verify(strategy, &how->hashes[rank]));
    dtrain_trainer_destroy(trainer);
    dtrain_optimizer_destroy(optimizer);
    dtrain_strategy_destroy(strategy);
    return guest_end(&m, false);
}

static void test_trainer(void)
{
    program eager = plain(DTRAIN_STRATEGY_DDP, DTRAIN_OPTIMIZER_SGD), graph = eager;
    graph.graph = true;
    graph.hashes = (uint64_t *)ranks_shared(RANKS * sizeof *graph.hashes);
    check_run(&eager, run_trainer);
    check_run(&graph, run_trainer);
    CHECK(eager.hashes[0] && eager.hashes[0] == graph.hashes[0]);
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    RUN(test_steps);
    RUN(test_adamw);
    RUN(test_refused);
    RUN(test_death);
    RUN(test_trainer);
    return test_summary();
}
