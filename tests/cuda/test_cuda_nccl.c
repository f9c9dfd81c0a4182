/* test_cuda_nccl.c: training with dtrain_cuda.cu and dtrain_nccl.h together, on the emulated CUDA device and a
 * mock of NCCL. Ranks are processes with a device each. What the staged communicator gives is the reference:
 * the mock adds in the order of the ranks, as that does. */
#include "test.h"
#include "dtrain.h"
#define DTRAIN_NCCL_LINKED
#define DTRAIN_NCCL_IMPLEMENTATION
#include "dtrain_nccl.h"

#include "ranks.h"
#include "saved_run.h"
#include "strategy_model.h"
#include "nccl/mock/nccl_mock.c"
#include "nccl/mock/emulated_device.h"

enum { MOST = 4 };

/* ---- launching ---- */

static nccl_mock_controls rank_controls[MOST]; /* set before the ranks' worlds are made */
static bool ranks_are_threads;

static dtrain_result checked_create(const dtrain_device_desc *desc, dtrain_device *device)
{
    if (!ranks_are_threads) nccl_mock = rank_controls[desc->device_index % MOST];
    return dtrain_cuda_device_ops()->create(desc, device);
}

/* The last thing that a rank does: whatever it has made is gone. */
static void checked_destroy(dtrain_device *device)
{
    dtrain_emulation_counters c;
    dtrain_cuda_device_ops()->destroy(device);
    dtrain_emulation_get_counters(&c);
    if (ranks_are_threads) return; /* what is counted is the process's */
    CHECK_MSG(nccl_mock_count.misuses == 0, "NCCL was misused %d times", nccl_mock_count.misuses);
    CHECK_MSG(nccl_mock_count.comms == 0 && nccl_mock_count.allocations == 0,
              "%d communicators and %d allocations of NCCL are left", nccl_mock_count.comms,
              nccl_mock_count.allocations);
    CHECK_MSG(nccl_mock_count.registrations == 0, "%d registrations are left",
              nccl_mock_count.registrations);
    CHECK_MSG(c.allocations_alive == 0 && c.pinned_alive == 0,
              "%d device and %d pinned allocations are left", (int)c.allocations_alive,
              (int)c.pinned_alive);
    CHECK_MSG(c.streams_alive == 0 && c.events_alive == 0 && c.graphs_alive == 0,
              "%d streams, %d events and %d graphs are left", (int)c.streams_alive,
              (int)c.events_alive, (int)c.graphs_alive);
}

static dtrain_launch_desc nccl_desc(int ranks)
{
    static dtrain_device_ops ops;
    dtrain_launch_desc desc =
        ranks_desc(ranks, ranks_are_threads ? DTRAIN_LAUNCH_THREADS : DTRAIN_LAUNCH_PROCESSES);
    ops = *dtrain_cuda_device_ops();
    ops.create = checked_create;
    ops.destroy = checked_destroy;
    desc.device_ops = &ops;
    desc.comm_ops = dtrain_nccl_comm_ops();
    desc.grace_ms = 20000; /* ranks must end by themselves */
    return desc;
}

/* ---- a small GPT ---- */

enum { B = 2, T = 8, C = 16, V = 32, HEADS = 2, PARAMS = 9, MOST_STEPS = 12 };

typedef struct run run;
typedef struct model {
    const run *how;
    dtrain_param params[PARAMS];
    int32_t tokens[B * T], targets[B * T];
    int rank, step;
} model;

typedef enum fault_kind {
    NO_FAULT,
    DIES_IN_BATCH,
    DIES_IN_COLLECTIVE,
    HANGS,
    ERRS,
    REFUSES,
    UNRECORDABLE /* nothing is planted: the loss cannot be recorded */
} fault_kind;

/* How a run is made, and what came out of it. */
struct run {
    uint32_t tape_flags, accumulation;
    uint32_t compression, node_size; /* of more than 0 ranks: hierarchical */
    int tensor;                      /* ranks that share each layer; 0: none */
    bool staged, graph, no_overlap, sequence_parallel;
    int two;      /* the loss adds two means: 1: of the same share on all ranks, 2: of other ones */
    bool ignored; /* rank 1 ignores targets, in each step another number of them; in one all do */
    size_t bucket_bytes;
    float dropout;
    int steps;
    fault_kind fault; /* of rank 1, in step fault_step */
    int fault_step, slow_loss_step;
    double losses[MOST_STEPS], norms[MOST_STEPS]; /* rank 0's */
    uint64_t hashes[MOST], staged_bytes, launches, graph_launches;
    dtrain_result results[MOST];
    char sentences[MOST][1024];
    double seconds[MOST]; /* of the failed step */
    char backend[16], log[1024];
};
static run *result; /* in shared memory */

static void declare(model *m)
{
    static const dtrain_cut whole = {0, 0, 0, {0}}, rows = {DTRAIN_CUT_ROWS, 0, 0, {0}},
                            columns = {DTRAIN_CUT_COLUMNS, 0, 0, {0}},
                            packed = {DTRAIN_CUT_ROWS, 3, HEADS, {0}};
    const struct {
        const char *name;
        int64_t rows, columns;
        float scale;
        const dtrain_cut *cut;
    } list[PARAMS] = {{"wte", V, C, 0.2f, &rows},         {"wpe", T, C, 0.2f, &whole},
                      {"ln1.w", C, 0, 1, &whole},         {"ln1.b", C, 0, 0, &whole},
                      {"qkv.w", 3 * C, C, 0.2f, &packed}, {"proj.w", C, C, 0.2f, &columns},
                      {"fc.w", 4 * C, C, 0.2f, &rows},    {"fc.b", 4 * C, 0, 0.1f, &rows},
                      {"out.w", C, 4 * C, 0.2f, &columns}};
    for (int i = 0; i < PARAMS; i++) {
        dtrain_param *p = &m->params[i];
        p->name = list[i].name;
        p->shape[0] = list[i].rows;
        p->shape[1] = list[i].columns;
        p->unit = i < 2 ? 0 : 1;
        p->init = list[i].scale == 1 ? DTRAIN_INIT_CONSTANT : DTRAIN_INIT_NORMAL;
        p->init_scale = list[i].scale;
        p->cut = *list[i].cut;
    }
}

static dtrain_result next_batch(void *user)
{
    model *m = (model *)user;
    if (m->rank == 1 && m->how->fault == DIES_IN_BATCH && m->step == m->how->fault_step)
        raise(SIGKILL);
    for (int i = 0; i < B * T; i++) {
        const uint64_t at = ((uint64_t)m->step * 64 + (uint64_t)m->rank) * B * T + (uint64_t)i;
        m->tokens[i] = (int32_t)(dtrain_random_uniform(5, 1, at) * V);
        m->targets[i] = (m->tokens[i] * 3 + 1) % V;
        if (m->how->ignored && m->rank == 1 && i < m->step % 4) m->targets[i] = -1;
        if (m->how->ignored && m->step / 2 == 5) m->targets[i] = -1; /* two micro-batches */
    }
    for (int i = 0; m->how->two && i < 3 + (m->how->two - 1) * m->rank; i++) m->targets[i] = -1;
    m->step++;
    return DTRAIN_OK;
}

static dtrain_tensor *loss(dtrain_tape *t, void *user)
{
    model *m = (model *)user;
    dtrain_param *p = m->params;
    const int64_t shape[2] = {B, T}, rows = B * T;
    dtrain_tensor *tokens = dtrain_tape_input(t, DTRAIN_DTYPE_I32, 2, shape, m->tokens, false);
    dtrain_tensor *targets = dtrain_tape_input(t, DTRAIN_DTYPE_I32, 1, &rows, m->targets, false);
    if (m->how->slow_loss_step == m->step && m->rank == 0) ranks_sleep_us(500000);
    dtrain_tape_unit(t, 0);
    dtrain_tensor *x = dtrain_embedding(t, tokens, &p[0], &p[1]);
    dtrain_tape_unit(t, 1);
    dtrain_tensor *h = dtrain_layernorm(t, x, NULL, &p[2], &p[3], 1e-5f);
    h = dtrain_linear(t, h, &p[4], NULL, DTRAIN_ACTIVATION_NONE);
    h = causal_attention(t, h, T, HEADS);
    h = dtrain_dropout(t, dtrain_linear(t, h, &p[5], NULL, DTRAIN_ACTIVATION_NONE),
                       m->how->dropout);
    h = dtrain_linear(t, h, &p[6], &p[7], DTRAIN_ACTIVATION_GELU);
    h = dtrain_linear(t, h, &p[8], NULL, DTRAIN_ACTIVATION_NONE);
    dtrain_tape_unit(t, 0);
    h = dtrain_add(t, x, h);
    dtrain_tensor *main_loss = dtrain_cross_entropy(
        t, dtrain_linear(t, h, &p[0], NULL, DTRAIN_ACTIVATION_NONE), targets, 0, 0);
    return m->how->two ? dtrain_add(t, main_loss, dtrain_mean(t, dtrain_multiply(t, h, h)))
                       : main_loss;
}

/* Between two steps: everything launched so far has run. */
static void plant_fault(const run *how)
{
    const int next = (int)operation_count + 1;
    if (how->fault == DIES_IN_COLLECTIVE) nccl_mock.die_at = next;
    if (how->fault == HANGS) nccl_mock.hang_at = next;
    if (how->fault == ERRS) nccl_mock.error_at = next;
    if (how->fault == REFUSES) nccl_mock.refuse_at = nccl_mock_count.launches + 1;
    nccl_mock.error = ncclSystemError;
}

static dtrain_result train(dtrain_trainer *trainer, const run *how, int rank)
{
    for (int step = 0; step < how->steps; step++) {
        dtrain_step_record record;
        if (rank == 1 && how->fault && step == how->fault_step) plant_fault(how);
        const double begin = dtrain_seconds();
        const dtrain_result stepped = dtrain_trainer_step(trainer, &record);
        if (stepped != DTRAIN_OK) {
            result->results[rank] = stepped;
            result->seconds[rank] = dtrain_seconds() - begin;
            snprintf(result->sentences[rank], sizeof result->sentences[rank], "%s",
                     dtrain_last_error());
            return stepped;
        }
        if (rank == 0) result->losses[step] = record.loss, result->norms[step] = record.grad_norm;
    }
    return DTRAIN_OK;
}

static int train_main(dtrain_world *world, void *user)
{
    const run *how = (const run *)user;
    model m;
    dtrain_strategy *strategy;
    dtrain_optimizer *optimizer;
    dtrain_trainer *trainer;
    dtrain_trainer_desc desc;
    dtrain_strategy_desc ddp = {0};
    dtrain_compression_desc lossy = {0};
    dtrain_optimizer_desc adamw = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_ADAMW);
    dtrain_comm_info info;
    dtrain_emulation_counters counters;
    dtrain_mesh_desc axes;
    dtrain_mesh_info place;
    dtrain_mesh *mesh;
    const int rank = dtrain_world_rank(world);
    memset(&m, 0, sizeof m);
    memset(&desc, 0, sizeof desc);
    memset(&axes, 0, sizeof axes);
    axes.tensor = how->tensor;
    axes.sequence_parallel = how->sequence_parallel;
    RANKS_TRY(dtrain_mesh_create(world, &axes, &mesh));
    dtrain_mesh_query(mesh, &place);
    m.rank = place.data_rank; /* whose samples it reads */
    m.how = how;
    declare(&m);
    ddp.no_overlap = how->no_overlap;
    ddp.mesh = mesh;
    ddp.compression = &lossy;
    lossy.kind = how->compression;
    lossy.dense_below = 64;
    lossy.dense_steps = 1;
    lossy.topk_ratio = 0.1f;
    ddp.hierarchical = how->node_size > 0;
    ddp.node_size = how->node_size;
    if (how->bucket_bytes) ddp.bucket_bytes = how->bucket_bytes;
    RANKS_TRY(dtrain_strategy_create(world, m.params, PARAMS, &ddp, &strategy));
    RANKS_TRY(dtrain_optimizer_create(world, strategy, &adamw, &optimizer));
    desc.micro_batches = how->accumulation;
    desc.tokens = B * T;
    desc.clip = 1;
    desc.tape_flags = how->tape_flags;
    desc.graph = how->graph;
    desc.seed = 7;
    desc.schedule.lr = 0.01f;
    desc.strategy = strategy;
    desc.optimizer = optimizer;
    desc.next_batch = next_batch;
    desc.loss = loss;
    desc.user = &m;
    RANKS_TRY(dtrain_trainer_create(world, &desc, &trainer));
    const dtrain_result trained = train(trainer, how, rank);
    CHECK_MSG(trained == DTRAIN_OK || how->fault, "%s", dtrain_last_error());
    dtrain_comm_query(dtrain_world_comm(world), &info);
    dtrain_emulation_get_counters(&counters);
    if (trained == DTRAIN_OK) RANKS_TRY(dtrain_strategy_verify(strategy, &result->hashes[rank]));
    if (rank == 0) {
        snprintf(result->backend, sizeof result->backend, "%s", info.backend);
        result->launches = (uint64_t)__atomic_load_n(&nccl_mock_count.launches, __ATOMIC_RELAXED);
        result->graph_launches = (uint64_t)counters.graph_launches;
    }
    dtrain_trainer_destroy(trainer);
    dtrain_optimizer_destroy(optimizer);
    dtrain_strategy_destroy(strategy);
    dtrain_mesh_destroy(mesh);
    return trained != DTRAIN_OK;
}

static void keep_log(void *user, dtrain_log_level level, int rank, const char *text)
{
    const size_t used = strlen(result->log);
    (void)user, (void)level;
    snprintf(result->log + used, sizeof result->log - used, "%d: %s\n", rank, text);
}

static run trained(run how, int ranks)
{
    dtrain_launch_desc desc = nccl_desc(ranks);
    if (how.staged) desc.comm_ops = NULL;
    if (how.fault) desc.timeout_ms = RANKS_SHORT_MS;
    desc.options.log = keep_log;
    desc.options.log_level = DTRAIN_LOG_INFO;
    if (!result) result = (run *)ranks_shared(sizeof *result);
    memset(result, 0, sizeof *result);
    const dtrain_result launched = ranks_launch(&desc, train_main, &how, NULL);
    CHECK_MSG(launched == (how.fault ? DTRAIN_ERROR_RANK_FAILED : DTRAIN_OK), "%s",
              launched == DTRAIN_OK ? "no error" : dtrain_last_error());
    if (how.fault) return *result;
    CHECK_MSG(result->losses[how.steps - 1] < result->losses[0], "loss %g, then %g",
              result->losses[0], result->losses[how.steps - 1]);
    for (int r = 1; r < ranks; r++) CHECK(result->hashes[r] == result->hashes[0]);
    return *result;
}

static void check_near(const run *a, const run *b, int steps, double tolerance, const char *what)
{
    for (int i = 0; i < steps; i++) {
        CHECK_MSG(test_close(a->losses[i], b->losses[i], tolerance),
                  "%s: step %d: loss %.9g and %.9g", what, i, a->losses[i], b->losses[i]);
        CHECK_MSG(test_close(a->norms[i], b->norms[i], 10 * tolerance),
                  "%s: step %d: norm %.9g and %.9g", what, i, a->norms[i], b->norms[i]);
    }
}

static void check_same(const run *a, const run *b, int steps, const char *what)
{
    check_near(a, b, steps, 0, what);
    CHECK_MSG(a->hashes[0] == b->hashes[0], "%s: parameters differ", what);
}

static run plain(void)
{
    run how;
    memset(&how, 0, sizeof how);
    how.accumulation = 1;
    how.steps = 6;
    how.slow_loss_step = -1;
    return how;
}

static void start_test(void)
{
    dtrain_emulation_set_device_count(3);
    memset(rank_controls, 0, sizeof rank_controls);
}

/* ---- training ---- */

static void test_as_staged(void)
{
    start_test();
    for (int ranks = 1; ranks <= 3; ranks++) {
        run how = plain();
        how.accumulation = ranks == 2 ? 2 : 1;
        how.dropout = 0.1f;
        how.bucket_bytes = 2048;
        how.staged = true;
        const run staged = trained(how, ranks);
        how.staged = false;
        const run nccl = trained(how, ranks);
        check_near(&staged, &nccl, how.steps, 1e-5, "staged and nccl");
        CHECK(strcmp(staged.backend, "staged") == 0 && strcmp(nccl.backend, "nccl") == 0);
        CHECK(staged.launches == 0 && (ranks == 1 || nccl.launches > 6));
    }
}

/* Neither buckets nor overlap nor an NCCL that takes its time changes a bit. */
static void test_same_bits(void)
{
    start_test();
    run how = plain();
    const run first = trained(how, 2);
    how.bucket_bytes = 2048;
    const run buckets = trained(how, 2);
    CHECK(buckets.launches > first.launches);
    how.no_overlap = true;
    const run late = trained(how, 2);
    how.no_overlap = false;
    for (int r = 0; r < MOST; r++) {
        rank_controls[r].delay_steps = 1 + 2 * r;
        rank_controls[r].progress_polls = 2 - r % 2;
    }
    const run slow = trained(how, 2);
    check_same(&first, &buckets, how.steps, "buckets");
    check_same(&first, &late, how.steps, "no overlap");
    check_same(&first, &slow, how.steps, "slow NCCL");
}

static void test_threads(void)
{
    start_test();
    run how = plain();
    how.steps = 4;
    how.bucket_bytes = 2048;
    const run processes = trained(how, 2);
    ranks_are_threads = true;
    const run threads = trained(how, 2);
    check_same(&processes, &threads, how.steps, "threads");
}

static void test_autocast(void)
{
    start_test();
    run how = plain();
    const run full = trained(how, 2);
    how.tape_flags = DTRAIN_TAPE_BF16;
    const run nccl = trained(how, 2);
    how.staged = true;
    const run staged = trained(how, 2);
    check_near(&staged, &nccl, how.steps, 1e-3, "bf16, staged and nccl");
    check_near(&full, &nccl, how.steps, 3e-2, "fp32 and bf16");
    CHECK(full.losses[3] != nccl.losses[3]);
}

/* What is sent is selected on the device and travels as it does over host memory. */
static void test_compression(void)
{
    for (int bf16 = 0; bf16 < 2; bf16++) {
        run how = plain();
        start_test();
        how.compression = DTRAIN_COMPRESSION_TOPK;
        how.steps = 4;
        how.bucket_bytes = 2048;
        how.tape_flags = bf16 ? DTRAIN_TAPE_BF16 : 0;
        const run nccl = trained(how, 2);
        how.staged = true;
        const run staged = trained(how, 2);
        check_near(&staged, &nccl, how.steps, bf16 ? 1e-3 : 1e-5, "compressed");
    }
}

/* ---- strategies ---- */

enum { MOST_CASES = 12 };

typedef struct matrix {
    int count;
    strategy_case cases[MOST_CASES];
    int like
        [MOST_CASES]; /* the case it has the bits of; HYBRID_SHARD of several nodes: the numbers */
    bool near[MOST_CASES];
    strategy_outcome out[MOST_CASES];
} matrix;

static int matrix_rank(dtrain_world *world, void *user)
{
    matrix *m = (matrix *)user;
    for (int i = 0; i < m->count; i++) {
        const dtrain_result trained = strategy_train(world, &m->cases[i], &m->out[i]);
        if (!CHECK_MSG(trained == DTRAIN_OK, "%s: rank %d: %s",
                       strategy_case_name(&m->cases[i], dtrain_world_size(world)).text,
                       dtrain_world_rank(world), dtrain_last_error()))
            return 1;
    }
    return 0;
}

static void matrix_add(matrix *m, uint32_t kind, uint32_t micro, int ranks, uint32_t node_size,
                       int like)
{
    const int at = m->count++;
    strategy_case *c = &m->cases[at];
    if (at >= MOST_CASES) exit(3);
    c->kind = kind;
    c->micro = micro;
    c->node_size = node_size;
    c->optimizer = DTRAIN_OPTIMIZER_ADAMW;
    c->batch = ranks * (int)micro;
    c->steps = micro > 1 ? 2 : 0;
    if (like >= 0) c->accumulation = micro > 1 ? DTRAIN_ACCUMULATION_EVERY : 0;
    m->like[at] = like < 0 ? at : like;
    m->near[at] = (int)node_size < ranks && node_size > 0;
}

static void add_kinds(matrix *m, int ranks)
{
    for (uint32_t kind = DTRAIN_STRATEGY_ZERO1; kind <= DTRAIN_STRATEGY_ZERO3; kind++)
        matrix_add(m, kind, 1, ranks, 0, 0);
    matrix_add(m, DTRAIN_STRATEGY_HYBRID_SHARD, 1, ranks, (uint32_t)ranks / 2, 0);
    matrix_add(m, DTRAIN_STRATEGY_SHARD_GRAD_OP, 3, ranks, 0, 6);
    matrix_add(m, DTRAIN_STRATEGY_FULL_SHARD, 3, ranks, 0, 6);
    matrix_add(m, DTRAIN_STRATEGY_ZERO3, 3, ranks, 0, 6);
    matrix_add(m, DTRAIN_STRATEGY_HYBRID_SHARD, 3, ranks, (uint32_t)ranks / 2, 6);
    matrix_add(m, DTRAIN_STRATEGY_HYBRID_SHARD, 3, ranks, (uint32_t)ranks / 2, 6);
    m->cases[m->count - 1].accumulation = DTRAIN_ACCUMULATION_SHARD_EVERY;
}

static void check_matrix(matrix *m, int ranks)
{
    dtrain_launch_desc desc = nccl_desc(ranks);
    const dtrain_result launched = ranks_launch(&desc, matrix_rank, m, NULL);
    CHECK_MSG(launched == DTRAIN_OK, "%s", launched == DTRAIN_OK ? "" : dtrain_last_error());
    for (int i = 0; i < m->count && launched == DTRAIN_OK; i++) {
        const strategy_name name = strategy_case_name(&m->cases[i], ranks);
        const strategy_outcome *like = &m->out[m->like[i]];
        strategy_check_ranks(&m->out[i], ranks, name.text);
        if (!m->near[i]) strategy_check_bits(&m->out[i], like, name.text);
        else strategy_check_close(&m->out[i], ranks, like, ranks, 2e-6, name.text);
    }
    munmap(m, sizeof *m);
}

/* Units are fetched and reduced on the communication stream while others compute. */
static void test_strategies(void)
{
    for (int ranks = 2; ranks <= 4; ranks += 2) {
        matrix *m = (matrix *)ranks_shared(sizeof *m);
        start_test();
        dtrain_emulation_set_device_count(4);
        for (int r = 0; r < MOST; r++) {
            rank_controls[r].delay_steps = ranks == 4 ? 1 + 3 * (r % 3) : 0;
            rank_controls[r].progress_polls = r % 2;
        }
        if (ranks == 4) dtrain_emulation_set_order(DTRAIN_EMULATION_REVERSE, 0);
        matrix_add(m, DTRAIN_STRATEGY_DDP, 1, ranks, 0, -1);
        add_kinds(m, ranks);
        check_matrix(m, ranks);
        dtrain_emulation_set_order(DTRAIN_EMULATION_FORWARD, 0);
    }
}

/* With several nodes three communicators share the stream. Ranks that see an operation done at other times
 * start the same ones in the same order: otherwise they would wait for each other in a circle, here rank 0
 * for 2 between nodes, 2 for 3 inside one, 3 for 1, 1 for 0. */
static void test_strategies_between_nodes(void)
{
    matrix *m = (matrix *)ranks_shared(sizeof *m);
    start_test();
    dtrain_emulation_set_device_count(4);
    for (int r = 0; r < MOST; r++)
        rank_controls[r].delay_steps = r % 3 ? 30 : 0; /* longer than a unit's backward */
    matrix_add(m, DTRAIN_STRATEGY_SHARD_GRAD_OP, 3, 4, 0, -1);
    matrix_add(m, DTRAIN_STRATEGY_HYBRID_SHARD, 3, 4, 2, 0);
    for (uint32_t kind = DTRAIN_STRATEGY_DDP; kind <= DTRAIN_STRATEGY_FULL_SHARD; kind++) {
        matrix_add(m, kind, 3, 4, 2, 0);
        if (kind <= DTRAIN_STRATEGY_ZERO1) m->cases[m->count - 1].accumulation = 0;
        m->cases[m->count - 1].hierarchical = true;
    }
    check_matrix(m, 4);
}

/* ---- recorded steps ---- */

/* Collectives inside of a graph, with nodes in any order that its edges allow. */
static void test_graph_is_eager(void)
{
    start_test();
    for (int variant = 0; variant < 7; variant++) {
        run how = plain();
        dtrain_emulation_set_device_count(variant >= 4 ? 4 : 3);
        how.node_size = variant == 4 ? 2 : 0;
        how.steps = 8;
        how.bucket_bytes = 2048;
        how.dropout = variant == 1 ? 0.2f : 0;
        how.accumulation = variant == 1 ? 2 : 1;
        how.tape_flags = variant == 2 ? DTRAIN_TAPE_BF16 : 0;
        how.no_overlap = variant == 3;
        how.tensor = variant >= 5 ? 2 : 0;
        how.sequence_parallel = variant == 6;
        const int ranks = variant == 0 ? 3 : variant >= 4 ? 4 : 2;
        const run eager = trained(how, ranks);
        how.graph = true;
        for (int order = variant >= 4; order < 3; order++) {
            dtrain_emulation_set_order(order, 5);
            for (int r = 0; r < MOST; r++) rank_controls[r].delay_steps = order * (1 + r);
            const run graph = trained(how, ranks);
            check_near(&eager, &graph, how.steps, 0, "graph");
            CHECK_MSG(graph.graph_launches == 6, "%d launches", (int)graph.graph_launches);
            CHECK(graph.launches < eager.launches && strcmp(graph.backend, "nccl") == 0);
        }
        start_test();
        dtrain_emulation_set_order(DTRAIN_EMULATION_FORWARD, 0);
    }
}

/* Two axes have collectives under way at once; the losses are those of two ranks with whole layers. */
static void test_tensor_axis(void)
{
    run how = plain();
    start_test();
    how.accumulation = 2;
    how.dropout = 0.1f;
    how.bucket_bytes = 2048;
    const run whole = trained(how, 2);
    dtrain_emulation_set_device_count(4);
    how.tensor = 2;
    for (int variant = 0; variant < 4; variant++) {
        how.sequence_parallel = variant % 2 == 1;
        how.no_overlap = variant == 2;
        for (int r = 0; r < MOST; r++) rank_controls[r].delay_steps = variant * (1 + r % 3);
        const run shared = trained(how, 4);
        check_near(&whole, &shared, how.steps, 2e-5, "whole layers, and shared ones");
        CHECK(shared.launches > whole.launches && strcmp(shared.backend, "nccl") == 0);
    }
}

/* A rank whose targets change in number replays as the others do: all record once, together. */
static void test_graph_of_ignored_targets(void)
{
    start_test();
    run how = plain();
    how.steps = 8;
    how.accumulation = 2;
    how.ignored = true;
    const run eager = trained(how, 2);
    how.graph = true;
    const run graph = trained(how, 2);
    check_near(&eager, &graph, how.steps, 0, "ignored targets");
    CHECK(eager.losses[5] == 0 && eager.hashes[0] == graph.hashes[0]);
    CHECK_MSG(graph.graph_launches == 6, "%d launches", (int)graph.graph_launches);
}

/* A loss of two means over other samples is recorded where the shares are the same, and refused on all ranks else. */
static void test_graph_adds_means(void)
{
    start_test();
    run how = plain();
    how.steps = 8;
    how.accumulation = 2;
    how.two = 1;
    const run eager = trained(how, 2);
    how.graph = true;
    const run graph = trained(how, 2);
    check_near(&eager, &graph, how.steps, 0, "two means");
    CHECK(eager.hashes[0] == graph.hashes[0]);
    CHECK_MSG(graph.graph_launches == 6, "%d launches", (int)graph.graph_launches);
    how.two = 2; /* rank 1 alone has the mean share */
    how.fault = UNRECORDABLE;
    const run refused = trained(how, 3);
    for (int r = 0; r < 3; r++)
        CHECK_MSG(refused.results[r] != DTRAIN_OK &&
                      strstr(refused.sentences[r], "use graph = false"),
                  "%s", refused.sentences[r]);
}

/* ---- which backend ---- */

static void test_shared_device(void)
{
    start_test();
    run how = plain();
    const run apart = trained(how, 2);
    dtrain_emulation_set_device_count(1);
    const run shared = trained(how, 2);
    check_near(&apart, &shared, how.steps, 1e-5, "a device each, and one");
    CHECK(strcmp(apart.backend, "nccl") == 0 && strcmp(shared.backend, "staged") == 0);
    CHECK(shared.launches == 0 && apart.log[0] == '\0');
    CHECK_MSG(strstr(shared.log, "0: ranks 0 and 1 share one device (Emulated CUDA device 0 of 1)"),
              "the log is: %s", shared.log);
}

/* ---- faults in the middle of training ---- */

/* Every rank that is left has failed, in time, with a sentence that says `words`. */
static void check_fault(run how, const char *name, const char *words)
{
    enum { RANKS = 3 };
    const bool dies = how.fault == DIES_IN_BATCH || how.fault == DIES_IN_COLLECTIVE;
    const double begin = dtrain_seconds();
    int told = 0;
    dtrain_emulation_set_quiet(1); /* a capture that breaks off is explained there */
    how.bucket_bytes = 2048;
    how.steps = 10;
    const run ended = trained(how, RANKS);
    CHECK_MSG(dtrain_seconds() - begin < 2 * RANKS_SOON, "%s took %.1f s", name,
              dtrain_seconds() - begin);
    for (int r = 0; r < RANKS; r++) {
        if (dies && r == 1) continue;
        const bool tells = strstr(ended.sentences[r], words) != NULL;
        told += tells;
        CHECK_MSG(ended.results[r] != DTRAIN_OK, "%s: rank %d saw no error", name, r);
        CHECK_MSG(tells || !dies, "%s: rank %d says: %s", name, r, ended.sentences[r]);
        CHECK_MSG(ended.seconds[r] < RANKS_SOON, "%s: rank %d needed %.1f s", name, r,
                  ended.seconds[r]);
        if (getenv("DTRAIN_TEST_SHOW"))
            fprintf(stderr, "    %s, rank %d, %.1f s: %s\n", name, r, ended.seconds[r],
                    ended.sentences[r]);
    }
    CHECK_MSG(told > 0, "%s: no rank says \"%s\"; rank 0 says: %s", name, words,
              ended.sentences[0]);
}

static void test_death(void)
{
    start_test();
    for (int graph = 0; graph < 2; graph++)
        for (int step = 1; step <= 5; step += 2) /* with a graph: eager, replayed */
            for (int where = DIES_IN_BATCH; where <= DIES_IN_COLLECTIVE; where++) {
                run how = plain();
                how.graph = graph;
                how.fault = (fault_kind)where;
                how.fault_step = step;
                check_fault(how, "death", "rank 1 was killed by signal 9");
            }
}

/* Rank 0 hears of it while it records: its next collective is refused, and the capture ends well. */
static void test_death_while_recording(void)
{
    start_test();
    run how = plain();
    how.graph = true;
    how.fault = DIES_IN_BATCH;
    how.fault_step = 2;
    how.slow_loss_step = 3; /* next_batch has counted it */
    check_fault(how, "death while recording", "rank 1 was killed by signal 9");
}

static void test_hang(void)
{
    start_test();
    for (int graph = 0; graph < 2; graph++) {
        run how = plain();
        how.graph = graph;
        how.fault = HANGS;
        how.fault_step = 4;
        check_fault(how, "hang", graph ? "stream of the device has not moved for 2.5 s" : "2.5 s");
    }
}

/* ---- started again ---- */

static int die_in_step_5(dtrain_world *world, saved_run *r, int64_t step)
{
    dtrain_world_info info;
    dtrain_world_query(world, &info);
    return info.restart_count || step != 5 || info.rank != r->ranks - 1 ? 0 : raise(SIGKILL);
}
/* A rank dies, and all are started again with a new communicator: they go on from the last checkpoint, of state in
 * device memory, to the bits of a run to which nothing happened. */
static void test_started_again(void)
{
    static const uint32_t kinds[] = {DTRAIN_STRATEGY_DDP, DTRAIN_STRATEGY_ZERO1,
                                     DTRAIN_STRATEGY_FULL_SHARD, DTRAIN_STRATEGY_ZERO3};
    start_test();
    for (int i = 0; i < 4; i++) {
        saved_run *runs[2];
        char what[40], directories[2][64], command[160];
        snprintf(what, sizeof what, "strategy %u over NCCL", kinds[i]);
        for (int hit = 0; hit < 2; hit++) {
            const dtrain_launch_desc desc = nccl_desc(2 + i % 2);
            saved_run *r = runs[hit] = saved_new(2 + i % 2, kinds[i]);
            r->mode = desc.mode;
            r->device = desc.device_ops;
            r->comm = desc.comm_ops;
            snprintf(directories[hit], sizeof directories[0], "/tmp/dtrain_nccl_XXXXXX");
            CHECK(mkdtemp(directories[hit]) != NULL);
            r->load = r->save = directories[hit];
            r->save_every = 2;
            r->restarts = 1;
            if (hit) r->during = die_in_step_5;
        }
        if (saved_go(runs[0], what) && saved_go(runs[1], what)) {
            CHECK_MSG(runs[1]->from[0] == 4, "%s: from step %lld", what,
                      (long long)runs[1]->from[0]);
            saved_compare(runs[0], runs[1], 5, what);
        }
        for (int hit = 0; hit < 2; hit++) {
            snprintf(command, sizeof command, "rm -rf %s", directories[hit]);
            CHECK(system(command) == 0);
            munmap(runs[hit], sizeof *runs[hit]);
        }
    }
}

static void test_errors(void)
{
    start_test();
    for (int graph = 0; graph < 2; graph++) {
        run how = plain();
        how.graph = graph;
        how.fault = ERRS;
        how.fault_step = 4;
        check_fault(how, "asynchronous error", "unhandled system error");
        how.fault = REFUSES;
        how.fault_step = 2; /* recorded, when there is a graph */
        check_fault(how, "refused call", "refused by the test");
    }
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    RUN(test_threads);
#if TEST_RACES
    SKIP(test_processes, "they share little, and a training run takes 10 s under ThreadSanitizer");
    return test_summary();
#endif
    RUN(test_as_staged);
    RUN(test_same_bits);
    RUN(test_autocast);
    RUN(test_compression);
    RUN(test_strategies);
    RUN(test_strategies_between_nodes);
    RUN(test_tensor_axis);
    RUN(test_graph_is_eager);
    RUN(test_graph_of_ignored_targets);
    RUN(test_graph_adds_means);
    RUN(test_shared_device);
    RUN(test_death);
    RUN(test_death_while_recording);
    RUN(test_hang);
    RUN(test_errors);
    RUN(test_started_again);
    return test_summary();
}
