/* test_cuda_compression.c: compressed and hierarchical gradients on the CUDA device, over the staged
 * communicator and, on the emulated device, over a mock of NCCL. What the same strategy gives on the CPU is
 * the reference: gradients are made up by the test, so both are given the same bits. */
#include "test.h"
#include "dtrain.h"
#ifdef DTRAIN_CUDA_EMULATION
#define DTRAIN_NCCL_LINKED
#define DTRAIN_NCCL_IMPLEMENTATION
#include "dtrain_nccl.h"
#endif

#include "ranks.h"
#ifdef DTRAIN_CUDA_EMULATION
#include "nccl/mock/nccl_mock.c"
#include "nccl/mock/emulated_device.h"
#endif

/* ---- what is run ---- */

/* The compiler of a real GPU's kernels contracts products and sums; the emulation's does not. */
#ifdef DTRAIN_CUDA_EMULATION
#define SAME_BITS 0
#else
#define SAME_BITS 1e-5
#endif

enum { MOST = 4, PARAMS = 7, STEPS = 3, VALUES = 2000, STATE = 2 * VALUES };

typedef enum { ON_CPU, STAGED, NCCL } backend_id;
static const char *const backend_names[] = {"cpu", "staged", "nccl"};

typedef struct settings {
    const char *name;
    dtrain_strategy_desc desc;
    dtrain_compression_desc compression;
    uint32_t micro;   /* micro-batches of a step */
    double tolerance; /* to the CPU; 0: the same bits */
    double rounding;  /* over NCCL, which rounds sums of 16 bits before the mean */
} settings;

/* Its desc, with its compression; as long as *how lives. */
static dtrain_strategy_desc settings_desc(const settings *how)
{
    dtrain_strategy_desc desc = how->desc;
    desc.compression = &how->compression;
    return desc;
}

/* Of one rank: its shards' gradients after every step, and what compression keeps in the end. */
typedef struct outcome {
    float grads[STEPS][VALUES], state[STATE];
    size_t state_count;
    dtrain_strategy_info info;
    dtrain_comm_info comm;
} outcome;

typedef struct job {
    settings how;
    outcome *out; /* (MOST), shared */
} job;

/* 2-D, 1-D, 3-D, below dense_below, one element, one that no region of four divides. */
static void declare(dtrain_param params[PARAMS])
{
    static const struct {
        const char *name;
        int64_t shape[3];
    } list[PARAMS] = {{"table", {40, 13, 0}}, {"bias", {37, 0, 0}}, {"cube", {8, 5, 6}},
                      {"small", {3, 2, 0}},   {"one", {1, 0, 0}},   {"big", {23, 31, 0}},
                      {"last", {37, 0, 0}}};
    for (int i = 0; i < PARAMS; i++) {
        memset(&params[i], 0, sizeof params[i]);
        params[i].name = list[i].name;
        params[i].unit = (uint32_t)i / 3;
        params[i].init = DTRAIN_INIT_NORMAL;
        params[i].init_scale = 0.1f;
        for (int d = 0; d < 3; d++) params[i].shape[d] = list[i].shape[d];
    }
}

/* Few different values: a selection has to choose among equals in every step. Zeros of both signs. */
static float gradient_at(int rank, int step, int param, int64_t i)
{
    const uint64_t bits =
        ranks_mix((uint64_t)((rank * 100 + step) * 100 + param) * 1000003u + (uint64_t)i);
    const int value = (int)(bits % 129) - 64;
    return value ? (float)value / 32 : bits & 1024 ? -0.0f : 0.0f;
}

static dtrain_result to_device(dtrain_device *device, void *to, const void *from, int64_t count)
{
    return dtrain_device_copy(device, to, from, (size_t)count * sizeof(float));
}

/* This rank's backward of one micro-batch: marks in reverse, as a tape would. */
static dtrain_result backward(dtrain_device *device, dtrain_strategy *strategy,
                              dtrain_param *params, float *sums, int rank, int turn)
{
    for (int p = PARAMS - 1; p >= 0; p--) {
        float *sum = sums + p * VALUES;
        const bool add = params[p].state.grad_written;
        for (int64_t i = 0; i < params[p].count; i++)
            sum[i] = (add ? sum[i] : 0) + gradient_at(rank, turn, p, i);
        TRY(to_device(device, params[p].grad, sum, params[p].count));
        TRY(dtrain_strategy_ready(strategy, (size_t)p));
    }
    return DTRAIN_OK;
}

static int keep_grads(dtrain_device *device, dtrain_strategy *strategy, const dtrain_param *params,
                      float *grads)
{
    const dtrain_shard *shards;
    size_t count;
    RANKS_TRY(dtrain_strategy_shards(strategy, &shards, &count));
    for (size_t s = 0; s < count; s++) {
        int64_t at = shards[s].offset;
        for (const dtrain_param *p = params; p != shards[s].param; p++) at += p->count;
        CHECK(at + shards[s].count <= VALUES);
        RANKS_TRY(to_device(device, grads + at, shards[s].grad, shards[s].count));
    }
    return 0;
}

static int keep_state(dtrain_world *world, dtrain_strategy *strategy, outcome *out)
{
    const dtrain_state_tensor *tensors;
    dtrain_state_desc listed;
    dtrain_state *state;
    size_t count;
    memset(&listed, 0, sizeof listed);
    listed.strategy = strategy;
    RANKS_TRY(dtrain_state_create(world, &listed, &state));
    RANKS_TRY(dtrain_state_tensors(state, &tensors, &count));
    for (size_t s = 0; s < count; s++) {
        const int64_t held = tensors[s].piece.count;
        if (tensors[s].kind != DTRAIN_STATE_RESIDUAL && tensors[s].kind != DTRAIN_STATE_VELOCITY)
            continue;
        CHECK(out->state_count + (size_t)held <= STATE);
        RANKS_TRY(to_device(dtrain_world_device(world), out->state + out->state_count,
                            (const float *)tensors[s].memory, held));
        out->state_count += (size_t)held;
    }
    dtrain_state_destroy(state);
    return 0;
}

static int rank_main(dtrain_world *world, void *user)
{
    const job *j = (const job *)user;
    const int rank = dtrain_world_rank(world);
    dtrain_device *device = dtrain_world_device(world);
    outcome *out = &j->out[rank];
    dtrain_param params[PARAMS];
    dtrain_strategy *strategy;
    float *sums = (float *)calloc((size_t)PARAMS * VALUES, sizeof *sums);
    declare(params);
    const dtrain_strategy_desc desc = settings_desc(&j->how);
    RANKS_TRY(dtrain_strategy_create(world, params, PARAMS, &desc, &strategy));
    for (int step = 0; step < STEPS; step++) {
        for (uint32_t m = 0; m < j->how.micro; m++) {
            const int turn = step * (int)j->how.micro + (int)m;
            RANKS_TRY(dtrain_strategy_accumulate(strategy, m + 1 < j->how.micro));
            RANKS_TRY(backward(device, strategy, params, sums, rank, turn));
            RANKS_TRY(dtrain_strategy_finish(strategy));
        }
        if (keep_grads(device, strategy, params, out->grads[step])) return 1;
        RANKS_TRY(dtrain_strategy_publish(strategy));
    }
    if (keep_state(world, strategy, out)) return 1;
    dtrain_strategy_query(strategy, &out->info);
    dtrain_comm_query(dtrain_world_comm(world), &out->comm);
    dtrain_strategy_destroy(strategy);
    free(sums);
    return 0;
}

/* ---- launching ---- */

#ifdef DTRAIN_CUDA_EMULATION
static nccl_mock_controls rank_controls[MOST];
static dtrain_result controlled_create(const dtrain_device_desc *desc, dtrain_device *device)
{
    nccl_mock = rank_controls[desc->device_index % MOST];
    return dtrain_cuda_device_ops()->create(desc, device);
}
static void controlled_destroy(dtrain_device *device)
{
    dtrain_emulation_counters c;
    dtrain_cuda_device_ops()->destroy(device);
    dtrain_emulation_get_counters(&c);
    CHECK_MSG(c.allocations_alive == 0 && c.pinned_alive == 0,
              "%d device and %d pinned allocations are left", (int)c.allocations_alive,
              (int)c.pinned_alive);
    CHECK_MSG(c.streams_alive == 0 && c.events_alive == 0, "%d streams and %d events are left",
              (int)c.streams_alive, (int)c.events_alive);
    CHECK_MSG(nccl_mock_count.misuses == 0, "NCCL was misused %d times", nccl_mock_count.misuses);
    CHECK_MSG(nccl_mock_count.comms == 0 && nccl_mock_count.allocations == 0,
              "%d communicators and %d allocations of NCCL are left", nccl_mock_count.comms,
              nccl_mock_count.allocations);
}
#endif

static void set_backend(dtrain_launch_desc *desc, backend_id backend)
{
    if (backend == ON_CPU) return;
    desc->device_ops = dtrain_cuda_device_ops();
#ifdef DTRAIN_CUDA_EMULATION
    static dtrain_device_ops controlled;
    dtrain_emulation_set_device_count(backend == NCCL ? MOST : 1);
    controlled = *dtrain_cuda_device_ops();
    controlled.create = controlled_create;
    controlled.destroy = controlled_destroy;
    desc->device_ops = &controlled;
    if (backend == NCCL) desc->comm_ops = dtrain_nccl_comm_ops();
#endif
}

static job trained(settings how, int ranks, backend_id backend)
{
    job j;
    dtrain_launch_desc desc = ranks_desc(ranks, DTRAIN_LAUNCH_PROCESSES);
    j.how = how;
    j.out = (outcome *)ranks_shared(MOST * sizeof *j.out);
    set_backend(&desc, backend);
    const dtrain_result result = ranks_launch(&desc, rank_main, &j, NULL);
    CHECK_MSG(result == DTRAIN_OK, "%s, %d ranks, %s: %s", how.name, ranks, backend_names[backend],
              result == DTRAIN_OK ? "" : dtrain_last_error());
    for (int r = 0; r < ranks && result == DTRAIN_OK; r++) {
        const char *const expected = backend == ON_CPU ? "local" : backend_names[backend];
        CHECK_MSG(strcmp(j.out[r].comm.backend, expected) == 0, "over %s, not %s",
                  j.out[r].comm.backend, expected);
    }
    return j;
}

static void job_free(job *j) { munmap(j->out, MOST * sizeof *j->out); }

/* ---- comparing ---- */

/* The largest difference in units of the largest value. */
static double distance(const float *a, const float *b, size_t count)
{
    double most = 0, apart = 0;
    for (size_t i = 0; i < count; i++) {
        const double x = (double)a[i], y = (double)b[i];
        if (!(isfinite(x) && isfinite(y))) return INFINITY;
        most = fabs(x) > most ? fabs(x) : most;
        apart = fabs(x - y) > apart ? fabs(x - y) : apart;
    }
    return apart == 0 ? 0 : apart / most;
}

static void compare_arrays(const float *a, const float *b, size_t count, double tolerance,
                           const char *what)
{
    if (tolerance == 0)
        CHECK_MSG(memcmp(a, b, count * sizeof *a) == 0, "%s: bits differ, by %g", what,
                  distance(a, b, count));
    else CHECK_MSG(distance(a, b, count) <= tolerance, "%s: %g apart", what, distance(a, b, count));
}

static void compare(const job *a, const job *b, int ranks, double tolerance, const char *between)
{
    char what[200];
    for (int r = 0; r < ranks; r++) {
        const outcome *x = &a->out[r], *y = &b->out[r];
        for (int step = 0; step < STEPS; step++) {
            snprintf(what, sizeof what, "%s, %s, rank %d of %d, gradients of step %d", a->how.name,
                     between, r, ranks, step);
            compare_arrays(x->grads[step], y->grads[step], VALUES, tolerance, what);
        }
        snprintf(what, sizeof what, "%s, %s, rank %d of %d, state", a->how.name, between, r, ranks);
        CHECK_MSG(x->state_count == y->state_count, "%s: %zu and %zu values", what, x->state_count,
                  y->state_count);
        compare_arrays(x->state, y->state, x->state_count, tolerance, what);
        CHECK_MSG(x->info.traffic.wire_bytes == y->info.traffic.wire_bytes &&
                      x->info.state_bytes == y->info.state_bytes &&
                      x->info.bucket_count == y->info.bucket_count,
                  "%s: %llu and %llu bytes sent, %llu and %llu of state", what,
                  (unsigned long long)x->info.traffic.wire_bytes,
                  (unsigned long long)y->info.traffic.wire_bytes,
                  (unsigned long long)x->info.state_bytes, (unsigned long long)y->info.state_bytes);
    }
}

/* Ranks of whole parameters have the same gradients to the bit, whatever arithmetic made them. */
static void compare_ranks(const job *j, int ranks)
{
    if (j->how.desc.kind != DTRAIN_STRATEGY_DDP) return;
    for (int r = 1; r < ranks; r++)
        CHECK_MSG(memcmp(j->out[r].grads, j->out[0].grads, sizeof j->out[0].grads) == 0,
                  "%s: ranks 0 and %d of %d have other gradients", j->how.name, r, ranks);
}

static void check_settings(settings how, int ranks)
{
    const bool nodes = how.desc.hierarchical;
    if (nodes && how.desc.node_size && ranks % (int)how.desc.node_size) return;
    job cpu = trained(how, ranks, ON_CPU), staged = trained(how, ranks, STAGED);
    compare(&cpu, &staged, ranks, how.tolerance, "cpu and staged");
    compare_ranks(&staged, ranks);
#ifdef DTRAIN_CUDA_EMULATION
    job nccl = trained(how, ranks, NCCL);
    compare(&staged, &nccl, ranks, how.rounding, "staged and nccl");
    compare_ranks(&nccl, ranks);
    job_free(&nccl);
#endif
    job_free(&cpu);
    job_free(&staged);
}

static settings plain(const char *name, uint32_t compression)
{
    settings how;
    memset(&how, 0, sizeof how);
    how.name = name;
    how.compression.kind = compression;
    how.compression.dense_below = 100;
    how.compression.dense_steps = 1;
    how.compression.topk_ratio = 0.03f;
    how.desc.bucket_bytes = 2048;
    how.micro = 1;
    how.tolerance = SAME_BITS;
    return how;
}

/* ---- tests ---- */

static void test_topk(void)
{
    for (int ranks = 1; ranks <= MOST; ranks++) {
        settings how = plain("top-k", DTRAIN_COMPRESSION_TOPK);
        if (ranks % 2 || test_full()) check_settings(how, ranks);
        how.name = "top-k, momentum, micro-batches";
        how.compression.topk_momentum = 0.9f;
        how.micro = 2;
        if (ranks % 2 == 0 || test_full()) check_settings(how, ranks);
    }
    settings how = plain("top-k, no error feedback", DTRAIN_COMPRESSION_TOPK);
    how.compression.no_error_feedback = true;
    check_settings(how, 2);
    how = plain("top-k, from masked to sparse", DTRAIN_COMPRESSION_TOPK);
    how.compression.warmup_steps = 2;
    how.compression.warmup_ratio = 0.9f;
    how.compression.topk_ratio = 0.001f;
    check_settings(how, 3);
}

/* Values that travel as 16 bits; what rounding takes stays in the residual. */
static void test_topk_rounded(void)
{
    settings how = plain("top-k as bf16", DTRAIN_COMPRESSION_TOPK);
    how.desc.reduce_dtype = DTRAIN_DTYPE_BF16;
    how.rounding = 0.01;
    check_settings(how, 2);
    how.name = "top-k as fp16";
    how.desc.reduce_dtype = DTRAIN_DTYPE_F16;
    check_settings(how, 3);
}

static void test_nodes(void)
{
    static const uint32_t kinds[] = {DTRAIN_STRATEGY_DDP, DTRAIN_STRATEGY_ZERO1};
    for (int size = 1; size <= MOST; size *= 2)
        for (int k = 0; k < 2; k++) {
            settings how = plain("hierarchical", DTRAIN_COMPRESSION_NONE);
            how.desc.kind = kinds[k];
            how.desc.hierarchical = true;
            how.desc.node_size = (uint32_t)size;
            check_settings(how, MOST);
            how.name = "hierarchical, bf16 between nodes";
            how.desc.reduce_dtype = DTRAIN_DTYPE_BF16;
            how.rounding = 0.01;
            if (size == 2) check_settings(how, MOST);
        }
    settings how = plain("top-k between nodes", DTRAIN_COMPRESSION_TOPK);
    how.desc.hierarchical = true;
    how.desc.node_size = 2;
    check_settings(how, 2);
    check_settings(how, MOST);
    how.name = "top-k between nodes, momentum";
    how.compression.topk_momentum = 0.9f;
    check_settings(how, MOST);
}

/* Overlap changes no bit; buckets change none of top-k, which selects tensor by tensor. */
static void test_same_bits(void)
{
    settings how = plain("buckets", DTRAIN_COMPRESSION_TOPK);
    job first = trained(how, 3, STAGED);
    how.desc.no_overlap = true;
    job late = trained(how, 3, STAGED);
    for (int r = 0; r < 3; r++) {
        compare_arrays(first.out[r].grads[0], late.out[r].grads[0], (size_t)STEPS * VALUES, 0,
                       "no overlap, gradients");
        compare_arrays(first.out[r].state, late.out[r].state, STATE, 0, "no overlap, state");
    }
    how.desc.bucket_bytes = 1 << 20;
    job joined = trained(how, 3, STAGED);
    CHECK(joined.out[0].info.bucket_count == 1 && first.out[0].info.bucket_count > 2);
    for (int r = 0; r < 3; r++)
        compare_arrays(first.out[r].grads[0], joined.out[r].grads[0], (size_t)STEPS * VALUES, 0,
                       "one bucket, gradients");
    job_free(&first);
    job_free(&late);
    job_free(&joined);
}

/* A recorded step would go on as the third one did. */
static dtrain_tensor *no_loss(dtrain_tape *tape, void *user)
{
    (void)tape, (void)user;
    return NULL;
}
static dtrain_result no_batch(void *user)
{
    (void)user;
    return DTRAIN_OK;
}
static int graph_main(dtrain_world *world, void *user)
{
    dtrain_param params[PARAMS];
    dtrain_strategy *strategy;
    dtrain_optimizer *optimizer;
    dtrain_trainer *trainer;
    dtrain_trainer_desc desc;
    dtrain_optimizer_desc sgd = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_SGD);
    declare(params);
    const dtrain_strategy_desc lossy = settings_desc((const settings *)user);
    RANKS_TRY(dtrain_strategy_create(world, params, PARAMS, &lossy, &strategy));
    RANKS_TRY(dtrain_optimizer_create(world, strategy, &sgd, &optimizer));
    memset(&desc, 0, sizeof desc);
    desc.strategy = strategy;
    desc.optimizer = optimizer;
    desc.loss = no_loss;
    desc.schedule.lr = 1;
    desc.next_batch = no_batch;
    desc.graph = true;
    CHECK(dtrain_trainer_create(world, &desc, &trainer) == DTRAIN_ERROR_UNSUPPORTED);
    CHECK_MSG(strstr(dtrain_last_error(), "graph needs no compression"), "%s", dtrain_last_error());
    desc.graph = false;
    desc.tape_flags = DTRAIN_TAPE_F16;
    CHECK(dtrain_trainer_create(world, &desc, &trainer) == DTRAIN_ERROR_UNSUPPORTED);
    CHECK_MSG(strstr(dtrain_last_error(), "an earlier step's scale"), "%s", dtrain_last_error());
    dtrain_optimizer_destroy(optimizer);
    dtrain_strategy_destroy(strategy);
    return 0;
}
static void test_refused(void)
{
    settings how = plain("refused", DTRAIN_COMPRESSION_TOPK);
    dtrain_launch_desc desc = ranks_desc(1, DTRAIN_LAUNCH_PROCESSES);
    set_backend(&desc, STAGED);
    CHECK_MSG(ranks_launch(&desc, graph_main, &how, NULL) == DTRAIN_OK, "%s", dtrain_last_error());
}

#ifdef DTRAIN_CUDA_EMULATION
/* NCCL runs what was started in its order: ranks of different speed must start everything in one. */
static void test_slow_nccl(void)
{
    for (uint32_t size = 0; size <= 2; size += 2) {
        settings how = plain("slow ranks", DTRAIN_COMPRESSION_TOPK);
        how.desc.hierarchical = size > 0;
        how.desc.node_size = size;
        how.desc.bucket_bytes = 1024;
        memset(rank_controls, 0, sizeof rank_controls);
        job fast = trained(how, MOST, NCCL);
        for (int r = 0; r < MOST; r++) {
            rank_controls[r].delay_steps = 1 + 3 * r;
            rank_controls[r].progress_polls = 3 - r;
        }
        job slow = trained(how, MOST, NCCL);
        compare(&fast, &slow, MOST, 0, "fast and slow");
        memset(rank_controls, 0, sizeof rank_controls);
        job_free(&fast);
        job_free(&slow);
    }
}

/* Streams that run in another order, or at once: nothing depends on it. */
static void test_other_orders(void)
{
    settings how = plain("other orders", DTRAIN_COMPRESSION_TOPK);
    job first = trained(how, 2, STAGED);
    for (int order = DTRAIN_EMULATION_REVERSE; order <= DTRAIN_EMULATION_SHUFFLED; order++) {
        dtrain_emulation_set_order(order, 5);
        dtrain_emulation_set_eager(order == DTRAIN_EMULATION_REVERSE);
        job other = trained(how, 2, STAGED);
        compare(&first, &other, 2, 0, "orders");
        job_free(&other);
    }
    dtrain_emulation_reset();
    job_free(&first);
}

/* The nth allocation of a rank fails: creation does, on both ranks, and everything is given back. */
typedef struct fault {
    settings how;
    int64_t at;
    int *reached; /* shared */
} fault;
static int fault_main(dtrain_world *world, void *user)
{
    const fault *f = (const fault *)user;
    dtrain_param params[PARAMS];
    dtrain_strategy *strategy = NULL;
    declare(params);
    if (dtrain_world_rank(world) == 1)
        dtrain_emulation_inject(DTRAIN_EMULATION_FAIL_ALLOCATION, f->at);
    const dtrain_strategy_desc desc = settings_desc(&f->how);
    const dtrain_result result = dtrain_strategy_create(world, params, PARAMS, &desc, &strategy);
    CHECK((result == DTRAIN_OK) == (strategy != NULL));
    if (result != DTRAIN_OK) __atomic_add_fetch(f->reached, 1, __ATOMIC_SEQ_CST);
    dtrain_strategy_destroy(strategy);
    return 0;
}
static void test_no_memory(void)
{
    int failures = 0, *reached = (int *)ranks_shared(sizeof *reached);
    for (int64_t n = 1; n < 40; n++) {
        dtrain_launch_desc desc = ranks_desc(2, DTRAIN_LAUNCH_PROCESSES);
        fault f = {plain("no memory", DTRAIN_COMPRESSION_TOPK), n, reached};
        set_backend(&desc, STAGED);
        *reached = 0;
        CHECK_MSG(ranks_launch(&desc, fault_main, &f, NULL) == DTRAIN_OK, "%s",
                  dtrain_last_error());
        CHECK_MSG(*reached == 0 || *reached == 2, "allocation %d: %d of 2 ranks failed", (int)n,
                  *reached);
        if (*reached == 0) break;
        failures++;
    }
    CHECK_MSG(failures > 2, "only %d allocations were reached", failures);
    munmap(reached, sizeof *reached);
}
#endif

static bool device_is_there(void)
{
    dtrain_device *device = NULL;
    const bool there = dtrain_device_create(dtrain_cuda_device_ops(), NULL, &device) == DTRAIN_OK;
    dtrain_device_destroy(device);
    return there;
}

/* The driver must not be touched before ranks are forked: the probe is a process of its own. */
static void probe(void) { CHECK_MSG(device_is_there(), "%s", dtrain_last_error()); }

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    RUN(probe);
    if (test_failed) return test_summary();
    RUN(test_topk);
    RUN(test_topk_rounded);
    RUN(test_nodes);
    RUN(test_same_bits);
    RUN(test_refused);
#ifdef DTRAIN_CUDA_EMULATION
    RUN(test_slow_nccl);
    RUN(test_other_orders);
    RUN(test_no_memory);
#endif
    return test_summary();
}
