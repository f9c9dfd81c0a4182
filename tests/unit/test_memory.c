/* test_memory.c: what is predicted is what a step takes, for every strategy; a limit
 * holds, and AUTO and automatic batches keep to it.
 *
 *     make build/tests/test_memory && build/tests/test_memory */
#include "test.h"
#include "dtrain.h"
#include "tools/run/split.h"
#include "ranks.h"
#include "tools/process_memory.h"

enum { BLOCKS = 5, VOCAB = 200, MOST_BATCH = 1 << 12, PARAMS = 2 + 4 * BLOCKS, STEPS = 3 };
enum { MOST = 4 }; /* ranks */
#define MIB ((uint64_t)1 << 20)

/* An embedding, blocks of two linear layers, and the embedding again as classifier. */
typedef struct model {
    dtrain_param params[PARAMS];
    char names[PARAMS][16];
    int64_t batch;
    int32_t tokens[MOST_BATCH];
} model;

static void declare(model *m, int i, int64_t rows, int64_t columns, uint32_t unit)
{
    dtrain_param *p = &m->params[i];
    snprintf(m->names[i], sizeof m->names[i], "p%d", i);
    p->name = m->names[i];
    p->shape[0] = rows;
    p->shape[1] = columns;
    p->unit = unit;
    p->init = DTRAIN_INIT_NORMAL;
    p->init_scale = 0.05f;
}

static void model_init(model *m, int64_t width)
{
    memset(m, 0, sizeof *m);
    declare(m, 0, VOCAB, width, 0);
    for (int b = 0; b < BLOCKS; b++) {
        const uint32_t unit = (uint32_t)b + 1;
        declare(m, 4 * b + 1, 4 * width, width, unit);
        declare(m, 4 * b + 2, 4 * width, 0, unit);
        declare(m, 4 * b + 3, width, 4 * width, unit);
        declare(m, 4 * b + 4, width, 0, unit);
    }
    declare(m, PARAMS - 1, 0, 0, BLOCKS + 1);
    m->params[PARAMS - 1].alias_of = &m->params[0];
    m->batch = 1;
}

static dtrain_result next_batch(void *user)
{
    model *m = (model *)user;
    for (int64_t i = 0; i < m->batch; i++) m->tokens[i] = (int32_t)(i * 7 % VOCAB);
    return DTRAIN_OK;
}

static dtrain_tensor *loss(dtrain_tape *tape, void *user)
{
    model *m = (model *)user;
    int64_t shape[2] = {0, 1};
    shape[0] = m->batch;
    dtrain_tensor *tokens = dtrain_tape_input(tape, DTRAIN_DTYPE_I32, 2, shape, m->tokens, false);
    dtrain_tensor *targets = dtrain_tape_input(tape, DTRAIN_DTYPE_I32, 1, shape, m->tokens, false);
    dtrain_tape_unit(tape, 0);
    dtrain_tensor *x = dtrain_embedding(tape, tokens, &m->params[0], NULL);
    for (int b = 0; b < BLOCKS; b++) {
        dtrain_param *p = &m->params[4 * b + 1];
        dtrain_tape_unit(tape, (uint32_t)b + 1);
        dtrain_tensor *h = dtrain_linear(tape, x, &p[0], &p[1], DTRAIN_ACTIVATION_GELU);
        x = dtrain_add(tape, x, dtrain_linear(tape, h, &p[2], &p[3], DTRAIN_ACTIVATION_NONE));
    }
    dtrain_tape_unit(tape, BLOCKS + 1);
    x = dtrain_linear(tape, x, &m->params[PARAMS - 1], NULL, DTRAIN_ACTIVATION_NONE);
    return dtrain_cross_entropy(tape, x, targets, 0, 0);
}

static dtrain_result set_batch(void *user, uint32_t batch)
{
    ((model *)user)->batch = batch;
    return batch <= MOST_BATCH ? DTRAIN_OK
                               : dtrain_fail(DTRAIN_ERROR_MEMORY, "the test has %d", MOST_BATCH);
}

/* What is done and what every rank saw; in shared memory. */
typedef struct run {
    dtrain_strategy_desc desc;
    uint32_t accumulation, tape_flags, checkpoint, max_batch;
    int64_t width, batch;
    uint64_t limits[MOST]; /* of desc, by rank; all 0: that of desc for all */
    uint64_t caps[MOST];   /* larger single allocations of this rank fail; 0 = none */

    dtrain_result results[MOST];
    char errors[MOST][1024];
    uint64_t predicted[MOST], peak[MOST], left[MOST]; /* bytes, beside the world's own */
    uint64_t total[MOST], resident[MOST];             /* of the process */
    uint32_t batches[MOST];
    float losses[MOST];
    dtrain_strategy_info info[MOST];
} run;

static run *run_create(uint32_t kind, int64_t width, int64_t batch)
{
    run *r = (run *)ranks_shared(sizeof *r);
    memset(&r->desc, 0, sizeof r->desc);
    r->desc.kind = kind;
    r->accumulation = 1;
    r->width = width;
    r->batch = batch;
    return r;
}

static void run_delete(run *r) { munmap(r, sizeof *r); }

static dtrain_trainer_desc trainer_desc(const run *r, model *m)
{
    dtrain_trainer_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.micro_batches = r->accumulation;
    desc.tape_flags = r->tape_flags;
    desc.recompute_every = r->checkpoint;
    desc.schedule.lr = 0.01f;
    desc.next_batch = next_batch;
    desc.loss = loss;
    desc.user = m;
    return desc;
}

static uint64_t in_use(const dtrain_device *device)
{
    return (uint64_t)device->allocated_bytes + device->comm_bytes;
}

static dtrain_result plan(dtrain_world *world, const run *r, model *m, uint64_t *bytes)
{
    const dtrain_trainer_desc trainer = trainer_desc(r, m);
    dtrain_memory strategy, activations;
    TRY(dtrain_strategy_plan(m->params, PARAMS, &r->desc, dtrain_world_size(world), &strategy));
    TRY(dtrain_trainer_plan(world, &trainer, NULL, &activations));
    *bytes = strategy.total + activations.total;
    return DTRAIN_OK;
}

static dtrain_result train(dtrain_world *world, run *r, model *m)
{
    const int rank = dtrain_world_rank(world);
    const dtrain_optimizer_desc adamw = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_ADAMW);
    dtrain_trainer_desc desc = trainer_desc(r, m);
    dtrain_strategy *strategy = NULL;
    dtrain_optimizer *optimizer = NULL;
    dtrain_trainer *trainer = NULL;
    dtrain_step_record record;
    dtrain_memory memory;
    memset(&record, 0, sizeof record);
    memset(&memory, 0, sizeof memory);
    dtrain_result result = dtrain_strategy_create(world, m->params, PARAMS, &r->desc, &strategy);
    if (result == DTRAIN_OK) result = dtrain_optimizer_create(world, strategy, &adamw, &optimizer);
    desc.strategy = strategy;
    desc.optimizer = optimizer;
    if (result == DTRAIN_OK) result = dtrain_trainer_create(world, &desc, &trainer);
    if (result == DTRAIN_OK) result = dtrain_trainer_plan(world, &desc, NULL, &memory);
    for (int s = 0; s < STEPS && result == DTRAIN_OK; s++)
        result = dtrain_trainer_step(trainer, &record);
    if (result == DTRAIN_OK) {
        process_memory(&r->resident[rank], NULL);
        result = dtrain_barrier(dtrain_world_comm(world)); /* others read what is here */
    }
    snprintf(r->errors[rank], sizeof r->errors[rank], "%s",
             result == DTRAIN_OK ? "" : dtrain_last_error());
    r->total[rank] = memory.total;
    r->losses[rank] = (float)record.loss;
    dtrain_strategy_query(strategy, &r->info[rank]);
    dtrain_trainer_destroy(trainer);
    dtrain_optimizer_destroy(optimizer);
    dtrain_strategy_destroy(strategy);
    return result;
}

/* ---- predicted and measured ---- */

static int train_rank(dtrain_world *world, void *user)
{
    static __thread model m;
    run *r = (run *)user;
    const int rank = dtrain_world_rank(world);
    const dtrain_device *device = dtrain_world_device(world);
    const uint64_t before = in_use(device);
    model_init(&m, r->width);
    m.batch = r->batch;
    if (r->desc.kind != DTRAIN_STRATEGY_AUTO) RANKS_TRY(plan(world, r, &m, &r->predicted[rank]));
    r->results[rank] = train(world, r, &m);
    r->peak[rank] = device->peak_bytes - before;
    r->left[rank] = in_use(device) - before;
    return 0;
}

static uint64_t most(const uint64_t *values, int ranks)
{
    uint64_t best = 0;
    for (int i = 0; i < ranks; i++) best = values[i] > best ? values[i] : best;
    return best;
}

static void check_prediction(run *r, int ranks, const char *what)
{
    ranks_run(ranks, DTRAIN_LAUNCH_THREADS, train_rank, r);
    const double predicted = (double)most(r->predicted, ranks);
    const double measured = (double)most(r->peak, ranks);
    for (int i = 0; i < ranks; i++)
        CHECK_MSG(r->results[i] == DTRAIN_OK, "%s, rank %d: %s", what, i, r->errors[i]);
    CHECK_MSG(measured > 0.9 * predicted && measured < 1.1 * predicted,
              "%s of %d ranks: %.0f bytes predicted, %.0f measured", what, ranks, predicted,
              measured);
    run_delete(r);
}

static const uint32_t kinds[] = {DTRAIN_STRATEGY_DDP,           DTRAIN_STRATEGY_ZERO1,
                                 DTRAIN_STRATEGY_SHARD_GRAD_OP, DTRAIN_STRATEGY_FULL_SHARD,
                                 DTRAIN_STRATEGY_ZERO3,         DTRAIN_STRATEGY_HYBRID_SHARD};
static const char *const names[] = {"DDP",        "ZERO1", "SHARD_GRAD_OP",
                                    "FULL_SHARD", "ZERO3", "HYBRID_SHARD"};
enum { KINDS = sizeof kinds / sizeof *kinds };

/* Two communicators more have stages of their own, half a MiB that no plan counts. */
enum { HYBRID_WIDTH = 160 };

static void test_prediction(void)
{
    for (int ranks = 1; ranks <= MOST; ranks++)
        for (int k = 0; k < KINDS; k++) {
            if (kinds[k] == DTRAIN_STRATEGY_HYBRID_SHARD && ranks != 4) continue;
            run *r = run_create(kinds[k],
                                kinds[k] == DTRAIN_STRATEGY_HYBRID_SHARD ? HYBRID_WIDTH : 48, 96);
            if (kinds[k] == DTRAIN_STRATEGY_HYBRID_SHARD) r->desc.node_size = 2;
            check_prediction(r, ranks, names[k]);
        }
}

/* Accumulation, checkpointing, autocast and low-precision communication take memory of their own. */
static void test_prediction_of_modes(void)
{
    for (int k = 0; k < KINDS; k++)
        for (int mode = 0; mode < 3; mode++) {
            const bool sharded = kinds[k] == DTRAIN_STRATEGY_FULL_SHARD ||
                                 kinds[k] == DTRAIN_STRATEGY_ZERO3 ||
                                 kinds[k] == DTRAIN_STRATEGY_HYBRID_SHARD;
            const bool hybrid = kinds[k] == DTRAIN_STRATEGY_HYBRID_SHARD;
            run *r = run_create(kinds[k], hybrid ? HYBRID_WIDTH : 48, 64);
            r->accumulation = mode == 2 ? 1 : 2;
            if (kinds[k] == DTRAIN_STRATEGY_HYBRID_SHARD) r->desc.node_size = 2;
            if (mode == 1) r->desc.accumulation = DTRAIN_ACCUMULATION_LAST;
            if (mode == 2) r->tape_flags = DTRAIN_TAPE_BF16;
            if (mode == 0) r->checkpoint = 1;
            if (mode == 2 && sharded) r->desc.param_dtype = DTRAIN_DTYPE_BF16;
            if (mode == 2) r->desc.reduce_dtype = DTRAIN_DTYPE_BF16;
            check_prediction(r, hybrid ? 4 : 2, names[k]);
        }
}

/* Autocast rounds the weights of a gathered unit as often as it is there: in fp32 parameters' memory
 * there is room for one unit's copies and those of the tied weight, not for the model's. With the
 * bits of DDP, whose copies stay. */
static run *casting_run(uint32_t kind, uint32_t tape_flags, int mode)
{
    run *r = run_create(kind, 96, 2);
    r->tape_flags = tape_flags;
    r->accumulation = mode == 1 ? 2 : 1;
    r->checkpoint = mode == 2;
    if (kind == DTRAIN_STRATEGY_HYBRID_SHARD) r->desc.node_size = 2;
    ranks_run(4, DTRAIN_LAUNCH_THREADS, train_rank, r);
    return r;
}

static void test_casts_go_with_their_units(void)
{
    const uint64_t unit = 2 * 8 * 96 * 96, tied = 2 * VOCAB * 96;
    for (int mode = 0; mode < 3; mode++) {
        run *whole = casting_run(DTRAIN_STRATEGY_DDP, DTRAIN_TAPE_BF16, mode);
        for (int k = 2; k < KINDS; k++) {
            run *plain = casting_run(kinds[k], 0, mode);
            run *cast = casting_run(kinds[k], DTRAIN_TAPE_BF16, mode);
            const bool gathers = kinds[k] != DTRAIN_STRATEGY_SHARD_GRAD_OP;
            for (int i = 0; i < 4; i++) {
                const uint64_t more = cast->peak[i] - plain->peak[i];
                const double planned = (double)cast->total[i] / (double)cast->peak[i];
                CHECK_MSG(cast->results[i] == DTRAIN_OK, "%s: %s", names[k], cast->errors[i]);
                CHECK_MSG(memcmp(&cast->losses[i], &whole->losses[i], sizeof(float)) == 0,
                          "%s: loss %.9g, not %.9g", names[k], (double)cast->losses[i],
                          (double)whole->losses[i]);
                CHECK_MSG(planned > 0.85 && planned < 1.1, "%s: %.3f of what it took was planned",
                          names[k], planned);
                CHECK_MSG((more < tied + unit + unit / 2) == gathers,
                          "%s: %llu bytes more than fp32", names[k], (unsigned long long)more);
            }
            run_delete(plain);
            run_delete(cast);
        }
        run_delete(whole);
    }
}

/* What the operating system says of processes, workspace included. */
static void test_prediction_of_processes(void)
{
    for (int k = 0; k < 4; k += 3) {
        run *r = run_create(kinds[k], 320, 64);
        double predicted = 0, resident = 0;
        ranks_run(2, DTRAIN_LAUNCH_PROCESSES, train_rank, r);
        for (int i = 0; i < 2; i++) {
            CHECK_MSG(r->results[i] == DTRAIN_OK, "%s", r->errors[i]);
            predicted += (double)r->total[i];
            resident += (double)r->resident[i];
        }
        CHECK_MSG(RANKS_SANITIZED || (resident > 0.9 * predicted && resident < 1.1 * predicted),
                  "%s: %.1f MiB predicted, %.1f MiB resident", names[k], predicted / (double)MIB,
                  resident / (double)MIB);
        run_delete(r);
    }
}

/* ---- limits ---- */

static void launch_limited(int ranks, uint64_t limit, uint32_t mode, dtrain_rank_fn rank, run *r)
{
    dtrain_launch_desc desc = ranks_desc(ranks, mode);
    desc.options.memory_limit = limit;
    CHECK_MSG(ranks_launch(&desc, rank, r, NULL) == DTRAIN_OK, "%s", dtrain_last_error());
}

/* A model that is larger than what a rank may use trains where it is sharded, with the same losses;
 * whole it is refused, and nothing is left of the attempt. */
static void test_model_larger_than_the_limit(void)
{
    run *whole = run_create(DTRAIN_STRATEGY_DDP, 160, 8);
    ranks_run(4, DTRAIN_LAUNCH_THREADS, train_rank, whole);
    const uint64_t params = whole->info[0].value_bytes, limit = 3 * params + MIB;
    CHECK(whole->predicted[0] > limit);
    for (int k = 0; k < KINDS; k++) {
        if (kinds[k] == DTRAIN_STRATEGY_HYBRID_SHARD) continue;
        run *r = run_create(kinds[k], 160, 8);
        launch_limited(4, limit, DTRAIN_LAUNCH_THREADS, train_rank, r);
        for (int i = 0; i < 4; i++) {
            CHECK_MSG(r->left[i] < 8192, "%s: %llu bytes are left", names[k],
                      (unsigned long long)r->left[i]);
            if (kinds[k] == DTRAIN_STRATEGY_DDP) {
                CHECK_MSG(r->results[i] == DTRAIN_ERROR_MEMORY &&
                              strstr(r->errors[i], "memory limit"),
                          "%s", r->errors[i]);
            } else if (kinds[k] != DTRAIN_STRATEGY_ZERO1) {
                CHECK_MSG(r->results[i] == DTRAIN_OK, "%s: %s", names[k], r->errors[i]);
                CHECK_MSG(memcmp(&r->losses[i], &whole->losses[i], sizeof(float)) == 0,
                          "%s: loss %g, not %g", names[k], (double)r->losses[i],
                          (double)whole->losses[i]);
                CHECK(r->peak[i] <= limit);
            }
        }
        run_delete(r);
    }
    run_delete(whole);
}

static int comm_rank(dtrain_world *world, void *user)
{
    dtrain_comm *comm = dtrain_world_comm(world);
    dtrain_device *device = dtrain_world_device(world);
    const uint64_t before = in_use(device);
    void *first = NULL, *second = NULL;
    (void)user;
    RANKS_TRY(dtrain_comm_alloc(comm, 2 * MIB, &first));
    CHECK(in_use(device) == before + 2 * MIB);
    CHECK(dtrain_comm_alloc(comm, 2 * MIB, &second) == DTRAIN_ERROR_MEMORY && !second);
    CHECK_MSG(strstr(dtrain_last_error(), "memory limit"), "%s", dtrain_last_error());
    CHECK(device->ops->alloc(device, 2 * MIB, &second) == DTRAIN_ERROR_MEMORY && !second);
    dtrain_comm_free(comm, first, 2 * MIB);
    CHECK(in_use(device) == before);
    RANKS_TRY(dtrain_comm_alloc(comm, 2 * MIB, &first));
    dtrain_comm_free(comm, first, 2 * MIB);
    return 0;
}

static void test_communicator_memory_counts(void)
{
    for (uint32_t mode = 0; mode < 2; mode++) {
        run *r = run_create(DTRAIN_STRATEGY_DDP, 1, 1);
        launch_limited(2, 4 * MIB, mode, comm_rank, r);
        run_delete(r);
    }
}

/* ---- AUTO ---- */

/* As the limit falls, each kind in its turn; below the last, an error that says what is missing. */
static void test_auto_keeps_to_the_limit(void)
{
    static const uint32_t order[] = {DTRAIN_STRATEGY_ZERO1, DTRAIN_STRATEGY_SHARD_GRAD_OP,
                                     DTRAIN_STRATEGY_FULL_SHARD};
    model *m = (model *)calloc(1, sizeof *m);
    uint64_t need[3];
    for (int i = 0; i < 3; i++) {
        dtrain_strategy_desc desc = {0};
        dtrain_memory memory;
        desc.kind = order[i];
        model_init(m, 160);
        CHECK(dtrain_strategy_plan(m->params, PARAMS, &desc, 4, &memory) == DTRAIN_OK);
        need[i] = memory.total;
    }
    CHECK(need[0] > need[1] && need[1] > need[2]);
    for (int i = 0; i < 4; i++) {
        const uint64_t slack = (uint64_t)3 << 19; /* the communicator's own, and unplanned bytes */
        run *r = run_create(DTRAIN_STRATEGY_AUTO, 160, 1);
        launch_limited(4, i < 3 ? need[i] + slack : need[2] - MIB, DTRAIN_LAUNCH_THREADS,
                       train_rank, r);
        for (int rank = 0; rank < 4 && i < 3; rank++) {
            CHECK_MSG(r->info[rank].desc.kind == order[i], "%d: %s: %s", i, r->info[rank].reason,
                      r->errors[rank]);
            CHECK(r->results[rank] == DTRAIN_OK && r->info[rank].reason[0]);
        }
        for (int rank = 0; rank < 4 && i == 3; rank++)
            CHECK_MSG(r->results[rank] == DTRAIN_ERROR_MEMORY && strstr(r->errors[rank], "missing"),
                      "%s", r->errors[rank]);
        run_delete(r);
    }
    free(m);
}

/* ---- automatic batch ---- */

static __thread uint64_t cap;

static void *capped_alloc(void *user, size_t bytes)
{
    (void)user;
    return cap && bytes > cap ? NULL : malloc(bytes);
}
static void capped_free(void *user, void *memory, size_t bytes)
{
    (void)user;
    (void)bytes;
    free(memory);
}

static int batch_rank(dtrain_world *world, void *user)
{
    static __thread model m;
    run *r = (run *)user;
    const int rank = dtrain_world_rank(world);
    const uint64_t before = in_use(dtrain_world_device(world));
    dtrain_trainer_desc trainer = trainer_desc(r, &m);
    dtrain_strategy_desc strategy = r->desc;
    dtrain_batch_search search;
    dtrain_memory memory;
    model_init(&m, r->width);
    memset(&search, 0, sizeof search);
    if (r->limits[rank]) strategy.memory_limit = r->limits[rank];
    search.max_batch = r->max_batch;
    search.set_batch = set_batch;
    search.params = m.params;
    search.param_count = PARAMS;
    search.strategy = &strategy;
    cap = r->caps[rank];
    r->results[rank] = dtrain_trainer_plan(world, &trainer, &search, &memory);
    r->batches[rank] = search.batch;
    cap = 0;
    snprintf(r->errors[rank], sizeof r->errors[rank], "%s", dtrain_last_error());
    r->left[rank] = in_use(dtrain_world_device(world)) - before;
    CHECK(r->left[rank] == 0);
    if (r->results[rank] != DTRAIN_OK) return 0;
    CHECK(m.batch == (int64_t)r->batches[rank]);
    if (r->desc.kind != DTRAIN_STRATEGY_AUTO) {
        uint64_t more;
        RANKS_TRY(plan(world, r, &m, &r->predicted[rank]));
        m.batch++;
        RANKS_TRY(plan(world, r, &m, &more));
        m.batch--;
        r->total[rank] = more;
    }
    r->results[rank] = train(world, r, &m);
    return 0;
}

static void check_batches(const run *r, int ranks, const char *what)
{
    for (int i = 0; i < ranks; i++) {
        CHECK_MSG(r->results[i] == DTRAIN_OK, "%s, rank %d: %s", what, i, r->errors[i]);
        CHECK_MSG(r->batches[i] == r->batches[0] && r->batches[i] > 0, "%s: %u on rank %d, %u on 0",
                  what, r->batches[i], i, r->batches[0]);
    }
}

/* Under the launch's limit: trains with it, and one sample more would not fit. */
static void test_batch_is_the_largest(void)
{
    uint32_t last = 0;
    for (int k = 0; k < KINDS - 1; k++) {
        run *r = run_create(kinds[k], 96, 1);
        const uint64_t limit = 20 * MIB, slack = (uint64_t)3 << 19;
        launch_limited(2, limit, DTRAIN_LAUNCH_THREADS, batch_rank, r);
        check_batches(r, 2, names[k]);
        CHECK_MSG(r->predicted[0] <= limit && r->total[0] > limit - slack,
                  "%s: batch %u takes %llu, one more %llu", names[k], r->batches[0],
                  (unsigned long long)r->predicted[0], (unsigned long long)r->total[0]);
        if (kinds[k] <= DTRAIN_STRATEGY_SHARD_GRAD_OP) CHECK(r->batches[0] > last);
        last = r->batches[0];
        run_delete(r);
    }
}

/* Where units are gathered there is room for more than the copies of all weights would leave. */
static void test_batch_beside_casts(void)
{
    run *r = run_create(DTRAIN_STRATEGY_FULL_SHARD, 160, 1);
    r->tape_flags = DTRAIN_TAPE_BF16;
    launch_limited(2, 20 * MIB, DTRAIN_LAUNCH_THREADS, batch_rank, r);
    check_batches(r, 2, "FULL_SHARD in bf16");
    CHECK_MSG(r->predicted[0] > 20 * MIB, "batch %u takes %llu", r->batches[0],
              (unsigned long long)r->predicted[0]);
    run_delete(r);
}

/* The limit of the rank that has least is everybody's, to the byte. */
static void test_batch_of_the_least_rank(void)
{
    run *r = run_create(DTRAIN_STRATEGY_FULL_SHARD, 96, 1);
    for (int i = 0; i < 3; i++) r->limits[i] = (uint64_t)(24 - 4 * (i == 1)) * MIB;
    ranks_run(3, DTRAIN_LAUNCH_PROCESSES, batch_rank, r);
    check_batches(r, 3, "limits that differ");
    CHECK_MSG(r->predicted[0] <= 20 * MIB && r->total[0] > 20 * MIB, "%u: %llu, then %llu",
              r->batches[0], (unsigned long long)r->predicted[0], (unsigned long long)r->total[0]);
    run_delete(r);
}

static void test_batch_at_most(void)
{
    run *r = run_create(DTRAIN_STRATEGY_AUTO, 96, 1);
    r->max_batch = 37;
    ranks_run(2, DTRAIN_LAUNCH_THREADS, batch_rank, r);
    check_batches(r, 2, "max_batch");
    CHECK(r->batches[0] == 37);
    run_delete(r);
}

/* One rank cannot allocate what was predicted: all take less. */
static void test_batch_of_a_failing_trial(void)
{
    run *r = run_create(DTRAIN_STRATEGY_ZERO1, 96, 1);
    dtrain_launch_desc desc = ranks_desc(2, DTRAIN_LAUNCH_THREADS);
    desc.options.allocator.alloc = capped_alloc;
    desc.options.allocator.free = capped_free;
    r->desc.memory_limit = 24 * MIB;
    r->caps[1] = 10 * MIB;
    CHECK_MSG(ranks_launch(&desc, batch_rank, r, NULL) == DTRAIN_OK, "%s", dtrain_last_error());
    check_batches(r, 2, "a trial that fails");
    CHECK_MSG(r->total[0] < 24 * MIB, "batch %u", r->batches[0]);
    r->caps[1] = MIB;
    CHECK(ranks_launch(&desc, batch_rank, r, NULL) == DTRAIN_OK);
    for (int i = 0; i < 2; i++)
        CHECK_MSG(r->results[i] == DTRAIN_ERROR_MEMORY && strstr(r->errors[i], "not every rank"),
                  "%s", r->errors[i]);
    run_delete(r);
}

static void test_batch_that_cannot_be(void)
{
    for (uint32_t kind = DTRAIN_STRATEGY_DDP; kind <= DTRAIN_STRATEGY_AUTO; kind += 6) {
        run *r = run_create(kind, 96, 1);
        r->desc.memory_limit = MIB / 2;
        ranks_run(2, DTRAIN_LAUNCH_THREADS, batch_rank, r);
        for (int i = 0; i < 2; i++)
            CHECK_MSG(r->results[i] == DTRAIN_ERROR_MEMORY && strstr(r->errors[i], "missing"), "%s",
                      r->errors[i]);
        run_delete(r);
    }
}

static void test_split_global_batch(void)
{
    for (uint32_t global = 1; global <= 60; global++)
        for (int ranks = 1; ranks <= 5; ranks++)
            for (uint32_t batch = 1; batch <= 12; batch++) {
                uint32_t micro = 0, accumulation = 0, expected = 0;
                const dtrain_result result =
                    split_global_batch(global, batch, ranks, &micro, &accumulation);
                for (uint32_t b = 1; b <= batch; b++)
                    if (global % ((uint32_t)ranks * b) == 0) expected = b;
                CHECK((result == DTRAIN_OK) == (expected > 0));
                if (result != DTRAIN_OK) continue;
                CHECK(micro == expected && micro * accumulation * (uint32_t)ranks == global);
            }
    uint32_t a, b;
    static const struct {
        uint64_t global;
        int ranks;
        const char *nearest;
    } cases[] = {{9, 4, " 8"}, {11, 4, " 12"}, {1, 4, " 4"}, {10, 4, " 8"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        CHECK(split_global_batch(cases[i].global, 3, cases[i].ranks, &a, &b) ==
              DTRAIN_ERROR_ARGUMENT);
        CHECK_MSG(strstr(dtrain_last_error(), cases[i].nearest), "%s", dtrain_last_error());
    }
    CHECK(split_global_batch(0, 1, 1, &a, &b) == DTRAIN_ERROR_ARGUMENT);
    CHECK(split_global_batch(UINT64_C(1) << 40, 1, 1, &a, &b) == DTRAIN_ERROR_ARGUMENT);
    CHECK(split_global_batch(UINT64_C(1) << 40, 1 << 20, 1, &a, &b) == DTRAIN_OK);
    CHECK(a == 1 << 20 && b == 1 << 20);
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    RUN(test_prediction);
    RUN(test_prediction_of_modes);
    RUN(test_casts_go_with_their_units);
    RUN(test_prediction_of_processes);
    RUN(test_model_larger_than_the_limit);
    RUN(test_communicator_memory_counts);
    RUN(test_auto_keeps_to_the_limit);
    RUN(test_batch_is_the_largest);
    RUN(test_batch_beside_casts);
    RUN(test_batch_of_the_least_rank);
    RUN(test_batch_at_most);
    RUN(test_batch_of_a_failing_trial);
    RUN(test_batch_that_cannot_be);
    RUN(test_split_global_batch);
    return test_summary();
}
