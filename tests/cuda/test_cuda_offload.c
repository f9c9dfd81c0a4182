/* test_cuda_offload.c: what is kept in host memory instead of the GPU's changes no training. Every kind of
 * strategy with every class it can offload against the same without; the CPU's update bit by bit; memory as
 * planned; refusals; allocations that fail. On the emulated device streams run late: a copy that nobody
 * waits for shows as a wrong number. */
#include "test.h"
#include "dtrain.h"
#include "ranks.h"
#ifdef DTRAIN_CUDA_EMULATION
#include "cuda_emulation.h"
#endif

enum {
    O = DTRAIN_OFFLOAD_OPTIMIZER,
    OG = O | DTRAIN_OFFLOAD_GRADS,
    OP = O | DTRAIN_OFFLOAD_PARAMS,
    ALL = OG | OP
};

static dtrain_launch_desc cuda_desc(int ranks)
{
    dtrain_launch_desc desc = ranks_desc(ranks, DTRAIN_LAUNCH_PROCESSES);
    desc.device_ops = dtrain_cuda_device_ops();
    return desc;
}

static void cuda_run(int ranks, dtrain_rank_fn rank_main, void *user)
{
    dtrain_launch_desc desc = cuda_desc(ranks);
    dtrain_result result = ranks_launch(&desc, rank_main, user, NULL);
    CHECK_MSG(result == DTRAIN_OK, "%d ranks: %s", ranks,
              result == DTRAIN_OK ? "" : dtrain_last_error());
}

/* The emulated device runs what is queued as late as it can; or as early: what must not be overwritten yet
 * shows only then. */
static void at_once(bool eager)
{
#ifdef DTRAIN_CUDA_EMULATION
    dtrain_emulation_set_eager(eager);
#else
    (void)eager;
#endif
}

/* What the device and its driver hold. */
typedef struct holdings {
    size_t device;
    int64_t pinned, streams, events;
} holdings;

static holdings held(const dtrain_device *device)
{
    holdings now;
    memset(&now, 0, sizeof now);
    now.device = device->allocated_bytes;
#ifdef DTRAIN_CUDA_EMULATION
    dtrain_emulation_counters counters;
    dtrain_emulation_get_counters(&counters);
    now.pinned = counters.pinned_alive;
    now.streams = counters.streams_alive;
    now.events = counters.events_alive;
#endif
    return now;
}

/* ---- a model: embedding, three layers, tied head ---- */

enum { B = 3, C = 20, V = 24, PARAMS = 9, STEPS = 3 };

typedef struct model {
    dtrain_param params[PARAMS];
    int32_t tokens[B], targets[B];
    int rank, batch;
} model;

static void declare(model *m, int rank)
{
    static const char *const names[PARAMS] = {"wte",    "w0", "b0", "w1",  "b1",
                                              "frozen", "w2", "b2", "head"};
    static const uint32_t units[PARAMS] = {0, 1, 1, 2, 2, 2, 3, 3, 4};
    memset(m, 0, sizeof *m);
    m->rank = rank;
    for (int i = 0; i < PARAMS; i++) {
        dtrain_param *p = &m->params[i];
        const bool bias = names[i][0] == 'b';
        p->name = names[i];
        p->unit = units[i];
        p->shape[0] = i == 0 ? V : C;
        p->shape[1] = bias ? 0 : C;
        p->init = DTRAIN_INIT_NORMAL;
        p->init_scale = bias ? 0.1f : 0.3f;
    }
    m->params[5].flags = DTRAIN_PARAM_FROZEN;
    m->params[8].alias_of = &m->params[0];
    m->params[8].shape[0] = m->params[8].shape[1] = 0;
}

static dtrain_result next_batch(void *user)
{
    model *m = (model *)user;
    for (int i = 0; i < B; i++) {
        const uint64_t at = ((uint64_t)m->batch * 64 + (uint64_t)m->rank) * B + (uint64_t)i;
        m->tokens[i] = (int32_t)(dtrain_random_uniform(3, 1, at) * V);
        m->targets[i] = (m->tokens[i] * 5 + 2) % V;
    }
    m->batch++;
    return DTRAIN_OK;
}

static dtrain_tensor *loss(dtrain_tape *t, void *user)
{
    model *m = (model *)user;
    dtrain_param *p = m->params;
    const int64_t shape[2] = {1, B}, rows = B;
    dtrain_tensor *tokens = dtrain_tape_input(t, DTRAIN_DTYPE_I32, 2, shape, m->tokens, false);
    dtrain_tensor *targets = dtrain_tape_input(t, DTRAIN_DTYPE_I32, 1, &rows, m->targets, false);
    dtrain_tape_unit(t, 0);
    dtrain_tensor *x = dtrain_embedding(t, tokens, &p[0], NULL);
    dtrain_tape_unit(t, 1);
    x = dtrain_linear(t, x, &p[1], &p[2], DTRAIN_ACTIVATION_GELU);
    dtrain_tape_unit(t, 2);
    x = dtrain_linear(t, x, &p[3], &p[4], DTRAIN_ACTIVATION_GELU);
    x = dtrain_linear(t, x, &p[5], NULL, DTRAIN_ACTIVATION_NONE);
    dtrain_tape_unit(t, 3);
    x = dtrain_linear(t, x, &p[6], &p[7], DTRAIN_ACTIVATION_NONE);
    dtrain_tape_unit(t, 4);
    return dtrain_cross_entropy(t, dtrain_linear(t, x, &p[8], NULL, DTRAIN_ACTIVATION_NONE),
                                targets, 0, 0);
}

/* One training, and what came out of it on this rank. */
typedef struct run {
    dtrain_strategy_desc desc;
    uint32_t accumulation;
    bool sgd;
    double losses[STEPS], norms[STEPS];
    uint64_t hash;
    dtrain_strategy_info info;
    dtrain_memory memory, plan;
} run;

static int train(dtrain_world *world, run *how)
{
    dtrain_device *device = dtrain_world_device(world);
    const holdings before = held(device);
    model m;
    dtrain_strategy *strategy;
    dtrain_optimizer *optimizer;
    dtrain_trainer *trainer;
    dtrain_trainer_desc desc;
    dtrain_optimizer_desc optim =
        dtrain_optimizer_defaults(how->sgd ? DTRAIN_OPTIMIZER_SGD : DTRAIN_OPTIMIZER_ADAMW);
    declare(&m, dtrain_world_rank(world));
    if (how->sgd) optim.momentum = 0.9f;
    how->desc.optimizer_states = how->sgd ? 1 : 2;
    RANKS_TRY(
        dtrain_strategy_plan(m.params, PARAMS, &how->desc, dtrain_world_size(world), &how->plan));
    RANKS_TRY(dtrain_strategy_create(world, m.params, PARAMS, &how->desc, &strategy));
    RANKS_TRY(dtrain_optimizer_create(world, strategy, &optim, &optimizer));
    dtrain_strategy_query(strategy, &how->info);
    memset(&desc, 0, sizeof desc);
    desc.micro_batches = how->accumulation;
    desc.clip = 0.5f;
    desc.schedule.lr = how->sgd ? 0.2f : 0.02f;
    desc.strategy = strategy;
    desc.optimizer = optimizer;
    desc.next_batch = next_batch;
    desc.loss = loss;
    desc.user = &m;
    if (how->desc.offload) {
        desc.graph = true;
        CHECK(dtrain_trainer_create(world, &desc, &trainer) == DTRAIN_ERROR_UNSUPPORTED);
        CHECK(strstr(dtrain_last_error(), "offload") != NULL);
        desc.graph = false;
    }
    RANKS_TRY(dtrain_trainer_create(world, &desc, &trainer));
    RANKS_TRY(dtrain_trainer_plan(world, &desc, NULL, &how->memory));
    for (int step = 0; step < STEPS; step++) {
        dtrain_step_record record;
        RANKS_TRY(dtrain_trainer_step(trainer, &record));
        how->losses[step] = record.loss;
        how->norms[step] = record.grad_norm;
    }
    double val;
    model held_out = m;
    RANKS_TRY(dtrain_trainer_evaluate(trainer, next_batch, &held_out, 1, &val));
    RANKS_TRY(dtrain_strategy_verify(strategy, &how->hash));
    dtrain_trainer_destroy(trainer);
    dtrain_optimizer_destroy(optimizer);
    dtrain_strategy_destroy(strategy);
    const holdings after = held(device);
    CHECK(after.device == before.device);
    /* the communicator keeps the operations it has made, with their events and images */
    if (dtrain_world_size(world) == 1)
        CHECK(after.events == before.events && after.pinned == before.pinned);
    CHECK(after.streams == before.streams);
    return 0;
}

static void same_training(const run *a, const run *b, double tolerance, const char *what)
{
    for (int i = 0; i < STEPS; i++) {
        CHECK_MSG(test_close(a->losses[i], b->losses[i], tolerance),
                  "%s: step %d: loss %.9g, not %.9g", what, i, a->losses[i], b->losses[i]);
        CHECK_MSG(test_close(a->norms[i], b->norms[i], 4 * tolerance),
                  "%s: step %d: norm %.9g, not %.9g", what, i, a->norms[i], b->norms[i]);
    }
}

/* Classes leave the device one by one, and nothing else does. */
static void as_planned(const run *off, const run *on, const char *what)
{
    const uint32_t offload = off->desc.offload;
    const dtrain_memory *m = &off->memory;
    CHECK_MSG(m->optimizer == 0 && on->memory.optimizer > 0, "%s: optimizer %llu", what,
              (unsigned long long)m->optimizer);
    CHECK_MSG(m->host > on->memory.optimizer && on->memory.host == 0, "%s: host %llu", what,
              (unsigned long long)m->host);
    CHECK_MSG(offload & DTRAIN_OFFLOAD_GRADS ? m->grads < on->memory.grads
                                             : m->grads == on->memory.grads,
              "%s: gradients %llu, were %llu", what, (unsigned long long)m->grads,
              (unsigned long long)on->memory.grads);
    CHECK_MSG(offload & DTRAIN_OFFLOAD_PARAMS
                  ? m->params < on->memory.params
                  : m->params - on->memory.params < PARAMS * 64, /* padding */
              "%s: parameters %llu, were %llu", what, (unsigned long long)m->params,
              (unsigned long long)on->memory.params);
    CHECK_MSG((off->info.host_bytes > 0) == ((offload & ~1u) != 0), "%s: %llu bytes of shards",
              what, (unsigned long long)off->info.host_bytes);
    if (off->info.desc.kind == DTRAIN_STRATEGY_ZERO3)
        return; /* the plan is that of the owner of most */
    CHECK_MSG(m->host == off->plan.host, "%s: %llu bytes in host memory, planned %llu", what,
              (unsigned long long)m->host, (unsigned long long)off->plan.host);
    CHECK_MSG(m->params + m->grads + m->buffers == off->plan.total, "%s: %llu bytes, planned %llu",
              what, (unsigned long long)(m->params + m->grads + m->buffers),
              (unsigned long long)off->plan.total);
}

static const struct {
    uint32_t kind, offload[4];
} kinds[] = {{DTRAIN_STRATEGY_DDP, {O}},
             {DTRAIN_STRATEGY_ZERO1, {O}},
             {DTRAIN_STRATEGY_SHARD_GRAD_OP, {O, OG}},
             {DTRAIN_STRATEGY_FULL_SHARD, {O, OG, OP, ALL}},
             {DTRAIN_STRATEGY_ZERO3, {O, OG, OP, ALL}},
             {DTRAIN_STRATEGY_HYBRID_SHARD, {O, OG, OP, ALL}}};

/* Every kind and what it can offload, in one launch; of four ranks, as two nodes, what has nodes. */
static int matrix_main(dtrain_world *world, void *user)
{
    const uint32_t accumulation = *(const uint32_t *)user;
    const int ranks = dtrain_world_size(world);
    at_once(ranks == 1);
    for (size_t k = 0; k < sizeof kinds / sizeof kinds[0]; k++) {
        static run on, off;
        if (ranks == 4 && kinds[k].kind != DTRAIN_STRATEGY_HYBRID_SHARD) continue;
        memset(&on, 0, sizeof on);
        memset(&on.desc, 0, sizeof on.desc);
        on.desc.kind = kinds[k].kind;
        on.accumulation = accumulation;
        on.sgd = k == 2;
        if (on.desc.kind == DTRAIN_STRATEGY_HYBRID_SHARD) on.desc.node_size = ranks % 2 ? 1 : 2;
        if (train(world, &on)) return 1;
        for (int i = 0; i < 4 && kinds[k].offload[i]; i++) {
            char what[100];
            off = on;
            off.desc.offload = kinds[k].offload[i];
            if (train(world, &off)) return 1;
            snprintf(what, sizeof what, "%s, offload %u, %d ranks, %u micro-batches", off.info.name,
                     off.desc.offload, ranks, accumulation);
            same_training(&off, &on, 1e-5, what);
            if (dtrain_world_rank(world) == 0) as_planned(&off, &on, what);
        }
    }
    return 0;
}

static void matrix(int ranks)
{
    for (uint32_t accumulation = 1; accumulation <= 3; accumulation += 2)
        cuda_run(ranks, matrix_main, &accumulation);
}
static void test_one_rank(void) { matrix(1); }
static void test_two_ranks(void) { matrix(2); }
static void test_three_ranks(void) { matrix(3); }
static void test_two_nodes(void)
{
    uint32_t accumulation = 3;
    cuda_run(4, matrix_main, &accumulation);
}

/* Half precision on the wire and in the slots; what travels between nodes in every micro-batch; units that
 * stay gathered; no overlap; buffers of one kind after the other. */
static int variants_main(dtrain_world *world, void *user)
{
    (void)user;
    for (int variant = 0; variant < 6; variant++) {
        static run on, off;
        memset(&on, 0, sizeof on);
        memset(&on.desc, 0, sizeof on.desc);
        on.desc.kind = variant == 1   ? DTRAIN_STRATEGY_ZERO3
                       : variant >= 4 ? DTRAIN_STRATEGY_HYBRID_SHARD
                                      : DTRAIN_STRATEGY_FULL_SHARD;
        if (variant >= 4) on.desc.node_size = 1;
        if (variant == 4) on.desc.accumulation = DTRAIN_ACCUMULATION_EVERY;
        if (variant <= 1 || variant == 5) on.desc.reduce_dtype = DTRAIN_DTYPE_BF16;
        if (variant <= 1) on.desc.param_dtype = DTRAIN_DTYPE_BF16;
        on.desc.keep_after_forward = variant == 2;
        on.desc.no_overlap = variant == 3;
        on.accumulation = variant ? 3 : 1;
        if (train(world, &on)) return 1;
        off = on;
        off.desc.offload = ALL;
        if (train(world, &off)) return 1;
        char what[40];
        snprintf(what, sizeof what, "variant %d", variant);
        /* one rounding that falls on the other side is 2^-9 of a gradient or a weight */
        same_training(&off, &on, on.desc.reduce_dtype == DTRAIN_DTYPE_BF16 ? 2e-3 : 1e-5, what);
    }
    return 0;
}
static void test_variants(void) { cuda_run(2, variants_main, NULL); }

/* ---- the update, bit by bit ---- */

enum { BIG = 3 * (1 << 18) + 1000, SMALL = 35 };

/* Multiples of 2^-10, times a factor that is a multiple of 1/2: exact, and so are their sums. */
static void big_gradient(float *grad, int64_t count, int step, uint64_t which, float factor)
{
    for (int64_t i = 0; i < count; i++) {
        const uint64_t at = ranks_mix((uint64_t)i * 8 + (uint64_t)step * 3 + which);
        grad[i] = factor * ((float)(int64_t)(at % 2001) - 1000.0f) / 1024.0f;
    }
}

/* The whole model on the CPU device, as without ranks. */
static int reference(dtrain_param *params, float **value, int steps)
{
    dtrain_device *cpu;
    float *state[2][3];
    RANKS_TRY(dtrain_device_create(NULL, NULL, &cpu));
    for (int k = 0; k < 2; k++)
        for (int s = 0; s < 3; s++)
            state[k][s] = (float *)calloc((size_t)params[k].count, sizeof(float));
    for (int step = 0; step < steps; step++) {
        dtrain_adamw_args args;
        dtrain_optimizer_tensor tensors[2];
        memset(&args, 0, sizeof args);
        memset(tensors, 0, sizeof tensors);
        for (int k = 0; k < 2; k++) {
            big_gradient(state[k][2], params[k].count, step, (uint64_t)k, 1);
            tensors[k].count = params[k].count;
            tensors[k].weight_decay = k ? 0.0f : 0.01f;
            tensors[k].value = value[k];
            tensors[k].m = state[k][0];
            tensors[k].v = state[k][1];
            tensors[k].grad = state[k][2];
        }
        args.tensor_count = 2;
        args.tensors = tensors;
        args.lr = 0.01f;
        args.beta1 = 0.9f;
        args.beta2 = 0.999f;
        args.epsilon = 1e-8f;
        args.correction1 = (float)(1 - pow((double)0.9f, step + 1));
        args.correction2 = (float)(1 - pow((double)0.999f, step + 1));
        args.grad_scale = 0.75f;
        RANKS_TRY(cpu->ops->adamw(cpu, &args));
    }
    for (int k = 0; k < 2; k++)
        for (int s = 0; s < 3; s++) free(state[k][s]);
    dtrain_device_destroy(cpu);
    return 0;
}

/* After finish the host may read them at once. */
static void check_host_shards(dtrain_strategy *strategy, int step, float *expected)
{
    const dtrain_shard *shards;
    size_t count;
    CHECK(dtrain_strategy_shards(strategy, &shards, &count) == DTRAIN_OK);
    for (size_t i = 0; i < count; i++) {
        const dtrain_param *p = shards[i].param;
        big_gradient(expected, p->count, step, p->state.index, 1);
        CHECK_MSG(memcmp(shards[i].grad, expected + shards[i].offset,
                         (size_t)shards[i].count * sizeof(float)) == 0,
                  "the shard of \"%s\" is not the mean", p->name);
    }
}

static int bits_main(dtrain_world *world, void *user)
{
    static const uint32_t list[][2] = {{DTRAIN_STRATEGY_DDP, O},
                                       {DTRAIN_STRATEGY_ZERO1, O},
                                       {DTRAIN_STRATEGY_SHARD_GRAD_OP, OG},
                                       {DTRAIN_STRATEGY_ZERO3, ALL},
                                       {DTRAIN_STRATEGY_FULL_SHARD, ALL}};
    enum { COUNT = 3 };
    dtrain_device *device = dtrain_world_device(world);
    float *grad = (float *)malloc(BIG * sizeof(float)),
          *found = (float *)malloc(BIG * sizeof(float)), *value[2];
    const int ranks = dtrain_world_size(world), rank = dtrain_world_rank(world);
    const float factor = ranks == 1 ? 1.0f : rank ? 1.5f : 0.5f; /* the mean is 1 */
    (void)user;
    at_once(ranks == 1);
    for (int k = 0; k < 2; k++) value[k] = (float *)malloc(BIG * sizeof(float));
    for (size_t kind = 0; kind < sizeof list / sizeof list[0]; kind++) {
        dtrain_strategy_desc desc = {0};
        dtrain_optimizer_desc adamw = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_ADAMW);
        dtrain_strategy *strategy;
        dtrain_optimizer *optimizer;
        dtrain_param p[2] = {ranks_param("big", NULL, NULL, BIG / 8, 8),
                             ranks_param("small", NULL, NULL, SMALL, 0)};
        p[0].init = p[1].init = DTRAIN_INIT_NORMAL;
        p[0].init_scale = p[1].init_scale = 1;
        desc.kind = list[kind][0];
        desc.offload = list[kind][1];
        RANKS_TRY(dtrain_strategy_create(world, p, 2, &desc, &strategy));
        RANKS_TRY(dtrain_optimizer_create(world, strategy, &adamw, &optimizer));
        for (size_t k = 0; k < 2; k++) RANKS_TRY(dtrain_strategy_read(strategy, k, value[k]));
        for (int step = 0; step < COUNT; step++) {
            RANKS_TRY(dtrain_strategy_gather(strategy, 0, DTRAIN_PASS_BACKWARD));
            for (size_t k = 2; k-- > 0;) {
                big_gradient(grad, p[k].count, step, (uint64_t)k, factor);
                RANKS_TRY(device->ops->copy(device, p[k].grad, grad,
                                            (size_t)p[k].count * sizeof(float),
                                            DTRAIN_COPY_HOST_TO_DEVICE));
                RANKS_TRY(dtrain_strategy_ready(strategy, k));
            }
            RANKS_TRY(dtrain_strategy_finish(strategy));
            if (desc.offload & DTRAIN_OFFLOAD_GRADS) check_host_shards(strategy, step, found);
            RANKS_TRY(dtrain_optimizer_step(optimizer, 0.01f, 0.75f));
        }
        if (reference(p, value, COUNT)) return 1;
        for (size_t k = 0; k < 2; k++) {
            RANKS_TRY(dtrain_strategy_read(strategy, k, found));
            CHECK_MSG(memcmp(found, value[k], (size_t)p[k].count * sizeof(float)) == 0,
                      "kind %u, \"%s\": %.9g, not %.9g", list[kind][0], p[k].name, (double)found[0],
                      (double)value[k][0]);
        }
        dtrain_optimizer_destroy(optimizer);
        dtrain_strategy_destroy(strategy);
    }
    for (int k = 0; k < 2; k++) free(value[k]);
    free(grad);
    free(found);
    return 0;
}
static void test_bits_of_the_cpu(void)
{
    cuda_run(1, bits_main, NULL);
    cuda_run(2, bits_main, NULL);
}

/* Muon's matrix comes down in one piece, longer than those of others, beside a tensor of AdamW and one
 * of Lion: the bits of a run on the CPU device. */
static int muon_main(dtrain_world *world, void *user)
{
    enum { LONG = (1 << 18) + 64, COUNT = 3 };
    float *const values = (float *)user; /* (LONG + 2 SMALL): those of the CPU, to be compared */
    dtrain_device *device = dtrain_world_device(world);
    dtrain_optimizer_desc desc = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_ADAMW);
    const dtrain_optimizer_desc groups[2] = {dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_MUON),
                                             dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_LION)};
    static const uint32_t offloads[] = {O, ALL};
    float *grad = (float *)malloc(LONG * sizeof(float));
    desc.groups = groups;
    desc.group_count = 2;
    at_once(true);
    for (int i = 0; i < (device->ops->host_memory ? 1 : 2); i++) {
        dtrain_param p[3] = {ranks_param("other", NULL, NULL, SMALL, 0),
                             ranks_param("long", NULL, NULL, LONG / 8, 8),
                             ranks_param("last", NULL, NULL, SMALL, 0)};
        dtrain_strategy_desc where = {0};
        dtrain_strategy *strategy;
        dtrain_optimizer *optimizer;
        float *value = values;
        for (int k = 0; k < 3; k++) p[k].init = DTRAIN_INIT_NORMAL, p[k].init_scale = 1;
        p[1].group = 1;
        p[2].group = 2;
        where.kind = i ? DTRAIN_STRATEGY_ZERO3 : DTRAIN_STRATEGY_DDP;
        if (!device->ops->host_memory) where.offload = offloads[i];
        RANKS_TRY(dtrain_strategy_create(world, p, 3, &where, &strategy));
        RANKS_TRY(dtrain_optimizer_create(world, strategy, &desc, &optimizer));
        for (int step = 0; step < COUNT; step++) {
            RANKS_TRY(dtrain_strategy_gather(strategy, 0, DTRAIN_PASS_BACKWARD));
            for (size_t k = 3; k-- > 0;) {
                big_gradient(grad, p[k].count, step, (uint64_t)k, 1);
                RANKS_TRY(device->ops->copy(device, p[k].grad, grad,
                                            (size_t)p[k].count * sizeof(float),
                                            DTRAIN_COPY_HOST_TO_DEVICE));
                RANKS_TRY(dtrain_strategy_ready(strategy, k));
            }
            RANKS_TRY(dtrain_strategy_finish(strategy));
            RANKS_TRY(dtrain_optimizer_step(optimizer, 0.01f, 0.75f));
        }
        for (size_t k = 0; k < 3; value += p[k++].count) {
            RANKS_TRY(dtrain_strategy_read(strategy, k, grad));
            const size_t bytes = (size_t)p[k].count * sizeof(float);
            if (device->ops->host_memory) memcpy(value, grad, bytes);
            else CHECK_MSG(memcmp(value, grad, bytes) == 0, "offload %d, \"%s\"", i, p[k].name);
        }
        dtrain_optimizer_destroy(optimizer);
        dtrain_strategy_destroy(strategy);
    }
    free(grad);
    return 0;
}
static void test_muon_in_one_piece(void)
{
    float *values = (float *)ranks_shared(((1 << 18) + 64 + 2 * SMALL) * sizeof(float));
    const dtrain_launch_desc cpu = ranks_desc(1, DTRAIN_LAUNCH_PROCESSES);
    CHECK(ranks_launch(&cpu, muon_main, values, NULL) == DTRAIN_OK && values[0] != 0);
    cuda_run(1, muon_main, values);
}

/* ---- AUTO, refusals ---- */

static int auto_main(dtrain_world *world, void *user)
{
    static const uint32_t list[][2] = {{O, DTRAIN_STRATEGY_ZERO1},
                                       {OG, DTRAIN_STRATEGY_SHARD_GRAD_OP},
                                       {ALL, DTRAIN_STRATEGY_FULL_SHARD}};
    (void)user;
    for (int i = 0; i < 3; i++) {
        dtrain_strategy_desc desc = {0};
        dtrain_strategy *strategy;
        dtrain_strategy_info info;
        model m;
        declare(&m, 0);
        desc.kind = DTRAIN_STRATEGY_AUTO;
        desc.offload = list[i][0];
        RANKS_TRY(dtrain_strategy_create(world, m.params, PARAMS, &desc, &strategy));
        dtrain_strategy_query(strategy, &info);
        CHECK_MSG(info.desc.kind ==
                      (i || dtrain_world_size(world) > 1 ? list[i][1] : DTRAIN_STRATEGY_DDP),
                  "%s: %s", info.name, info.reason);
        dtrain_strategy_destroy(strategy);
    }
    return 0;
}
static void test_auto(void)
{
    cuda_run(1, auto_main, NULL);
    cuda_run(2, auto_main, NULL);
}

static int refused_main(dtrain_world *world, void *user)
{
    static const struct {
        uint32_t kind, offload, accumulation;
        dtrain_result code;
        const char *says;
    } list[] = {
        {DTRAIN_STRATEGY_DDP, 8, 0, DTRAIN_ERROR_ARGUMENT, "offload is 8"},
        {DTRAIN_STRATEGY_DDP, 0x80000001u, 0, DTRAIN_ERROR_ARGUMENT, "offload is 2"},
        {DTRAIN_STRATEGY_FULL_SHARD, OG & ~1u, 0, DTRAIN_ERROR_UNSUPPORTED,
         "without DTRAIN_OFFLOAD_OPTIMIZER"},
        {DTRAIN_STRATEGY_FULL_SHARD, OP & ~1u, 0, DTRAIN_ERROR_UNSUPPORTED,
         "without DTRAIN_OFFLOAD_OPTIMIZER"},
        {DTRAIN_STRATEGY_ZERO1, OG, 0, DTRAIN_ERROR_UNSUPPORTED, "whole gradients"},
        {DTRAIN_STRATEGY_DDP, OG, 0, DTRAIN_ERROR_UNSUPPORTED, "whole gradients"},
        {DTRAIN_STRATEGY_SHARD_GRAD_OP, OP, 0, DTRAIN_ERROR_UNSUPPORTED, "whole parameters"},
        {DTRAIN_STRATEGY_FULL_SHARD, ALL, DTRAIN_ACCUMULATION_LAST, DTRAIN_ERROR_UNSUPPORTED,
         "ACCUMULATION_LAST"}};
    const bool on_cpu = dtrain_world_device(world)->ops->host_memory;
    (void)user;
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++) {
        dtrain_strategy_desc desc = {0};
        dtrain_strategy *strategy;
        dtrain_memory memory;
        model m;
        declare(&m, 0);
        desc.kind = list[i].kind;
        desc.offload = list[i].offload;
        desc.accumulation = list[i].accumulation;
        CHECK(dtrain_strategy_plan(m.params, PARAMS, &desc, 2, &memory) == list[i].code);
        CHECK_MSG(strstr(dtrain_last_error(), list[i].says) != NULL, "%s", dtrain_last_error());
        CHECK(dtrain_strategy_create(world, m.params, PARAMS, &desc, &strategy) != DTRAIN_OK);
        CHECK_MSG(on_cpu || strstr(dtrain_last_error(), list[i].says) != NULL, "%s",
                  dtrain_last_error());
        desc.offload = O;
        desc.accumulation = 0;
        if (!on_cpu) continue;
        CHECK(dtrain_strategy_create(world, m.params, PARAMS, &desc, &strategy) ==
              DTRAIN_ERROR_UNSUPPORTED);
        CHECK_MSG(strstr(dtrain_last_error(), "the host's") != NULL, "%s", dtrain_last_error());
    }
    return 0;
}
static void test_refused(void)
{
    dtrain_launch_desc cpu = ranks_desc(2, DTRAIN_LAUNCH_PROCESSES);
    CHECK(ranks_launch(&cpu, refused_main, NULL, NULL) == DTRAIN_OK);
    cuda_run(1, refused_main, NULL);
    cuda_run(2, refused_main, NULL);
}

#ifdef DTRAIN_CUDA_EMULATION
/* ---- orders, failures ---- */

static int orders_main(dtrain_world *world, void *user)
{
    static run runs[3];
    (void)user;
    for (int order = 0; order < 3; order++) {
        dtrain_emulation_set_order(order, 5);
        memset(&runs[order], 0, sizeof runs[order]);
        memset(&runs[order].desc, 0, sizeof runs[order].desc);
        runs[order].desc.kind = DTRAIN_STRATEGY_FULL_SHARD;
        runs[order].desc.offload = ALL;
        runs[order].accumulation = 3;
        if (train(world, &runs[order])) return 1;
        CHECK(runs[order].hash == runs[0].hash);
    }
    return 0;
}
static void test_same_bits_in_any_order(void) { cuda_run(2, orders_main, NULL); }

static counted_memory *budget; /* of the process: each rank has its own after the fork */

/* user: bit 0: the driver's allocations fail, not the allocator's. Every call up to the last. */
static int failures_main(dtrain_world *world, void *user)
{
    const bool driver = *(const int *)user != 0;
    dtrain_device *device = dtrain_world_device(world);
    const holdings before = held(device);
    const long live = budget->live;
    int failures = 0;
    for (int64_t n = 1;; n++) {
        dtrain_strategy_desc desc = {0};
        dtrain_optimizer_desc adamw = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_ADAMW);
        dtrain_strategy *strategy = NULL;
        dtrain_optimizer *optimizer = NULL;
        model m;
        declare(&m, 0);
        desc.kind = DTRAIN_STRATEGY_ZERO3;
        desc.offload = ALL;
        if (driver) dtrain_emulation_inject(DTRAIN_EMULATION_FAIL_ALLOCATION, n);
        else budget->fail_at = budget->calls + n;
        dtrain_result result = dtrain_strategy_create(world, m.params, PARAMS, &desc, &strategy);
        if (result == DTRAIN_OK)
            result = dtrain_optimizer_create(world, strategy, &adamw, &optimizer);
        const bool reached = driver ? result != DTRAIN_OK : budget->calls >= budget->fail_at;
        CHECK(result == DTRAIN_OK || strlen(dtrain_last_error()) > 20);
        CHECK(!reached || result != DTRAIN_OK);
        dtrain_emulation_inject(DTRAIN_EMULATION_FAIL_ALLOCATION, 0);
        budget->fail_at = 0;
        dtrain_optimizer_destroy(optimizer);
        dtrain_strategy_destroy(strategy);
        const holdings after = held(device);
        CHECK_MSG(after.device == before.device && after.pinned == before.pinned &&
                      after.streams == before.streams && after.events == before.events &&
                      budget->live == live,
                  "allocation %lld: %zu bytes, %lld pinned, %lld allocations are left",
                  (long long)n, after.device - before.device,
                  (long long)(after.pinned - before.pinned), (long long)(budget->live - live));
        if (!reached) break;
        failures++;
    }
    CHECK_MSG(failures >= (driver ? 6 : 10), "only %d failures", failures);
    return 0;
}
static void test_failures(void)
{
    budget = (counted_memory *)ranks_shared(sizeof *budget);
    for (int driver = 0; driver < 2; driver++) {
        dtrain_launch_desc desc = cuda_desc(1);
        memset(budget, 0, sizeof *budget);
        desc.options.allocator = counted_allocator(budget);
        dtrain_emulation_set_quiet(1);
        CHECK(ranks_launch(&desc, failures_main, &driver, NULL) == DTRAIN_OK);
    }
}
#endif

/* ---- a device that hangs ---- */

static bool hangs; /* on this rank: no event happens any more */
static dtrain_result hung_query(dtrain_device *device, dtrain_event *event, bool *done)
{
    *done = false;
    return hangs ? DTRAIN_OK : dtrain_cuda_device_ops()->event_query(device, event, done);
}

/* Rank 1 dies, and then rank 0's device hangs in what has nothing to do with rank 1: a deadline ends that too,
 * although every look at the world says that a rank is dead. */
static int hung_main(dtrain_world *world, void *user)
{
    int32_t *ready = (int32_t *)user;
    const int rank = dtrain_world_rank(world);
    dtrain_param p = ranks_param("p", NULL, NULL, 1000, 0);
    dtrain_strategy_desc desc = {0};
    dtrain_strategy *strategy;
    desc.kind = DTRAIN_STRATEGY_SHARD_GRAD_OP;
    desc.offload = OG;
    RANKS_TRY(dtrain_comm_split(dtrain_world_comm(world), rank, 0, &desc.comm));
    RANKS_TRY(dtrain_strategy_create(world, &p, 1, &desc, &strategy));
    RANKS_TRY(dtrain_strategy_gather(strategy, 0, DTRAIN_PASS_BACKWARD));
    if (rank == 1) {
        ranks_await(ready, 1);
        raise(SIGKILL);
    }
    ranks_count(ready);
    const double begin = dtrain_seconds();
    while (dtrain_world_poll(world) == DTRAIN_OK && dtrain_seconds() - begin < RANKS_SOON)
        ranks_sleep_us(1000);
    CHECK(dtrain_world_poll(world) == DTRAIN_ERROR_PEER);
    RANKS_TRY(dtrain_strategy_ready(strategy, 0));
    hangs = true;
    const double finish = dtrain_seconds();
    CHECK(dtrain_strategy_finish(strategy) == DTRAIN_ERROR_TIMEOUT);
    CHECK_MSG(strstr(dtrain_last_error(), "the work before a copy to the host in 2.5 s"), "%s",
              dtrain_last_error());
    CHECK_MSG(dtrain_seconds() - finish < RANKS_SOON, "it took %.1f s", dtrain_seconds() - finish);
    hangs = false;
    dtrain_strategy_destroy(strategy);
    ranks_count(ready);
    return 0;
}
static void test_hung_device(void)
{
    int32_t *ready = (int32_t *)ranks_shared(sizeof *ready);
    dtrain_launch_desc desc = cuda_desc(2);
    dtrain_device_ops ops = *dtrain_cuda_device_ops();
    ops.event_query = hung_query;
    desc.device_ops = &ops;
    desc.timeout_ms = RANKS_SHORT_MS;
    desc.grace_ms = 20000; /* rank 0 must end by itself */
    CHECK(ranks_launch(&desc, hung_main, ready, NULL) == DTRAIN_ERROR_RANK_FAILED);
    CHECK_MSG(*ready == 2, "rank 0 did not come to its end");
}

static int probe_main(dtrain_world *world, void *user)
{
    (void)world, (void)user;
    return 0;
}
static void probe(void) { cuda_run(1, probe_main, NULL); }

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    RUN(probe);
    if (test_failed) return test_summary();
    RUN(test_one_rank);
    RUN(test_two_ranks);
    RUN(test_three_ranks);
    RUN(test_two_nodes);
    RUN(test_variants);
    RUN(test_bits_of_the_cpu);
    RUN(test_muon_in_one_piece);
    RUN(test_auto);
    RUN(test_refused);
    RUN(test_hung_device);
#ifdef DTRAIN_CUDA_EMULATION
    RUN(test_same_bits_in_any_order);
    RUN(test_failures);
#endif
    return test_summary();
}
