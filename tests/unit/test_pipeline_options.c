/* test_pipeline_options.c: each option of strategy, trainer and optimizer with a pipeline: it has the losses, norms and
 * parameters of the run without a pipeline, to the bit, or every rank refuses it with the same sentence when it is
 * made.
 *
 * Options that random programs draw (test_pipeline, test_3d_programs) are not here again. */
#include "test.h"
#include "dtrain.h"
#include "ranks.h"
#include "files.h"

enum {
    RANKS = 8,
    UNITS = 6,
    PARAMS = 2 * UNITS + 3,
    ROWS = 5,
    WIDTH = 8,
    CLASSES = 6,
    STEPS = 4,
    ROWS_MOST = 256,
    MICROS = 4,
    MOST = PARAMS * WIDTH * WIDTH
};

typedef struct local local;

/* What an option changes of descs and parameters; what the loss and the program then do is in flags of local. */
typedef void option_fn(local *l);

typedef struct job {
    option_fn *option;
    int pipeline, data;
    uint32_t schedule;
    bool fails;   /* ranks end with an error */
    int from, to; /* steps */
    const char *
        directory; /* where a run that does not begin with the first step finds its state, and where one that
                              does not end with the last leaves it; NULL: runs have all steps */
    /* what came of it */
    dtrain_result created[RANKS], trained[RANKS], stepped[RANKS][STEPS];
    char refused[RANKS][600], wrong[RANKS][STEPS][1024];
    dtrain_step_record records[RANKS][STEPS];
    double evaluated[RANKS];
    uint64_t planned[RANKS], held[RANKS]; /* bytes of a rank, without activations */
    float values[RANKS][MOST];
    int32_t warnings;
} job;

struct local {
    job *j;
    dtrain_world *world;
    int rank, data_rank, next, micro, step;
    dtrain_param params[PARAMS];
    char names[PARAMS][16];
    float own[PARAMS][2][WIDTH * WIDTH]; /* memory of the program's own, value and gradient */
    float x[ROWS_MOST * WIDTH];
    int32_t targets[ROWS_MOST];
    dtrain_strategy_desc how;
    dtrain_pipeline_desc line;
    dtrain_compression_desc compression;
    dtrain_trainer_desc trains;
    dtrain_optimizer_desc updates, group;
    dtrain_strategy *strategy;
    /* what the program does besides */
    bool
        sometimes; /* the parameter before the last is used in the first micro-batch of a step alone */
    bool never;    /* and not at all in the second step */
    bool sums;     /* the loss is a sum; every other weight is the program's */
    bool explodes;    /* an input of one data rank is infinite in the second step, all ... */
    int explodes_for; /* ... but for this many steps */
    bool freezes;     /* the first units' parameters are frozen between two steps */
    bool evaluates;   /* a trainer without an optimizer */
    bool unfetched;   /* an evaluation without next_batch */
    bool ends;        /* the data of an evaluation ends, earlier on the first data rank */
    bool tapes;       /* a tape of the program's own runs the loss */
    bool recomputes;  /* activation checkpointing begins between two steps */
    bool accumulates; /* the strategy was told of further micro-batches before the first step */
    int weighs;       /* next_batch gives weights; 2: the program gives one before each step */
    bool other;   /* a second trainer, of one micro-batch, is made beside the first and evaluates */
    int64_t rows; /* of an evaluation before the first step; 0: there is none */
    bool evaluating;
    int evaluated; /* batches */
};

/* ---- the program ---- */

static void register_model(local *l)
{
    for (int i = 0; i < PARAMS; i++) {
        dtrain_param *p = &l->params[i];
        const bool bias = i < 2 * UNITS && i % 2;
        snprintf(l->names[i], sizeof l->names[0], "w%d", i);
        p->name = l->names[i];
        p->unit = i < 2 * UNITS ? (uint32_t)i / 2 : UNITS - 1;
        p->shape[0] = i == PARAMS - 1 ? CLASSES : WIDTH;
        p->shape[1] = bias ? 0 : WIDTH;
        p->init = DTRAIN_INIT_NORMAL, p->init_scale = 0.4f;
    }
}

static dtrain_result next_batch(void *user)
{
    local *l = (local *)user;
    const int micro = l->next++;
    l->micro = micro % MICROS, l->step = micro / MICROS;
    if (l->evaluating && l->ends && l->evaluated++ > l->data_rank)
        return dtrain_fail(DTRAIN_ERROR_END, "no more");
    if (l->weighs == 1 && l->micro != 1)
        TRY(dtrain_strategy_weight(l->strategy, 0.3f * (float)(l->micro + 1)));
    for (int i = 0; i < ROWS * WIDTH; i++)
        l->x[i] = dtrain_random_uniform(7, (uint64_t)(micro * RANKS + l->data_rank), (uint64_t)i);
    for (int i = 0; i < ROWS; i++)
        l->targets[i] = (micro + i) % 5 == l->data_rank ? -1 : (3 * micro + i) % CLASSES;
    if (l->explodes && l->step >= 1 && l->step <= l->explodes_for && l->micro == 2 &&
        l->data_rank == 1)
        l->x[3] = INFINITY;
    return DTRAIN_OK;
}

static dtrain_tensor *loss_of(dtrain_tape *t, void *user)
{
    local *l = (local *)user;
    const int64_t rows = l->rows ? l->rows : ROWS, shape[2] = {rows, WIDTH};
    const bool used = !(l->sometimes && l->micro) && !(l->never && l->step == 1);
    dtrain_tensor *x = dtrain_tape_input(t, DTRAIN_DTYPE_F32, 2, shape, l->x, false);
    for (int u = 0; u < UNITS; u++) {
        dtrain_param *p = &l->params[2 * u];
        dtrain_tape_unit(t, (uint32_t)u);
        x = dtrain_add(t, x, dtrain_linear(t, x, &p[0], &p[1], DTRAIN_ACTIVATION_GELU));
    }
    x = dtrain_linear(t, x, &l->params[PARAMS - 3], NULL, DTRAIN_ACTIVATION_NONE);
    if (used) x = dtrain_linear(t, x, &l->params[PARAMS - 2], NULL, DTRAIN_ACTIVATION_NONE);
    if (l->sums) {
        if (!l->weighs && l->micro % 2)
            (void)dtrain_strategy_weight(l->strategy, 0.3f * (float)(l->micro + 1));
        return dtrain_sum(t, dtrain_multiply(t, x, x));
    }
    x = dtrain_linear(t, x, &l->params[PARAMS - 1], NULL, DTRAIN_ACTIVATION_NONE);
    return dtrain_cross_entropy(
        t, x, dtrain_tape_input(t, DTRAIN_DTYPE_I32, 1, &rows, l->targets, false), 0, 0);
}

static dtrain_result read_values(local *l)
{
    float *to = l->j->values[l->rank];
    for (size_t i = 0; i < PARAMS; i++, to += WIDTH * WIDTH)
        TRY(dtrain_strategy_read(l->strategy, i, to));
    return DTRAIN_OK;
}

/* Evaluate with a trainer of its own. */
static dtrain_result evaluate_beside(local *l)
{
    dtrain_trainer_desc t = l->trains;
    dtrain_trainer *other;
    t.micro_batches = 1, t.optimizer = NULL;
    TRY(dtrain_trainer_create(l->world, &t, &other));
    const dtrain_result result =
        dtrain_trainer_evaluate(other, next_batch, l, 1, &l->j->evaluated[l->rank]);
    dtrain_trainer_destroy(other);
    return result;
}

/* Run the loss on a tape of its own: an error, which becomes that of the job. */
static void run_beside(local *l)
{
    dtrain_tape *tape = NULL;
    job *j = l->j;
    j->created[l->rank] =
        dtrain_tape_create(l->world, l->rank % 2 ? l->strategy : NULL, NULL, &tape);
    if (j->created[l->rank] == DTRAIN_OK) j->created[l->rank] = dtrain_tape_begin(tape, 0, 1);
    if (j->created[l->rank] == DTRAIN_OK)
        j->created[l->rank] = dtrain_tape_backward(tape, loss_of(tape, l), 1);
    snprintf(j->refused[l->rank], sizeof j->refused[0], "%s", dtrain_last_error());
    dtrain_tape_destroy(tape);
}

/* Steps, of which one may be an error that the run goes on behind. */
static dtrain_result train(local *l, dtrain_trainer *trainer)
{
    job *j = l->j;
    l->next = j->from * MICROS;
    if (l->other) TRY(evaluate_beside(l));
    if (l->rows) TRY(dtrain_trainer_evaluate(trainer, next_batch, l, 1, &j->evaluated[l->rank]));
    l->rows = ROWS;
    if (l->accumulates) TRY(dtrain_strategy_accumulate(l->strategy, true));
    for (int step = j->from; step < j->to && !l->evaluates; step++) {
        if (l->weighs == 2) TRY(dtrain_strategy_weight(l->strategy, 0.5f));
        j->stepped[l->rank][step] = dtrain_trainer_step(trainer, &j->records[l->rank][step]);
        if (j->stepped[l->rank][step] != DTRAIN_OK)
            snprintf(j->wrong[l->rank][step], sizeof j->wrong[0][0], "%s", dtrain_last_error());
        for (int i = 0; i < 4 && l->freezes && step == 1; i++)
            l->params[i].flags |= DTRAIN_PARAM_FROZEN;
        if (l->recomputes && step == 1)
            TRY(dtrain_tape_recompute(dtrain_trainer_tape(trainer), 1, 0));
    }
    if (j->to < STEPS) return DTRAIN_OK;
    l->evaluating = true;
    if (l->tapes) run_beside(l);
    if (l->unfetched) {
        j->created[l->rank] = dtrain_trainer_evaluate(trainer, NULL, l, 2, &j->evaluated[l->rank]);
        snprintf(j->refused[l->rank], sizeof j->refused[0], "%s", dtrain_last_error());
    }
    TRY(dtrain_trainer_evaluate(trainer, next_batch, l, 3, &j->evaluated[l->rank]));
    return read_values(l);
}

static uint32_t states_of(const dtrain_optimizer_desc *how)
{
    const bool none = how->kind == DTRAIN_OPTIMIZER_SGD && how->momentum == 0;
    return none ? DTRAIN_OPTIMIZER_STATES_NONE : how->kind == DTRAIN_OPTIMIZER_ADAMW ? 2 : 1;
}

/* Plan what the rank with most will hold. */
static dtrain_result plan(local *l)
{
    dtrain_param params[PARAMS];
    dtrain_strategy_desc how = l->how;
    dtrain_memory memory;
    const uint32_t states[1] = {states_of(&l->group)};
    memcpy(params, l->params, sizeof params);
    for (int i = 0; i < PARAMS; i++)
        if (params[i].alias_of) params[i].alias_of = &params[params[i].alias_of - l->params];
    how.optimizer_states = states_of(&l->updates);
    how.group_count = l->updates.group_count, how.group_states = states;
    if (how.kind == DTRAIN_STRATEGY_AUTO) return DTRAIN_OK;
    TRY(dtrain_strategy_plan(params, PARAMS, &how, l->j->pipeline * l->j->data, &memory));
    l->j->planned[l->rank] = memory.total;
    return DTRAIN_OK;
}

static void note_held(local *l, const dtrain_optimizer *optimizer)
{
    dtrain_strategy_info strategy;
    dtrain_optimizer_info updates;
    dtrain_strategy_query(l->strategy, &strategy);
    dtrain_optimizer_query(optimizer, &updates);
    l->j->held[l->rank] =
        strategy.value_bytes + strategy.grad_bytes + strategy.buffer_bytes + updates.state_bytes;
}

/* Train, in a run that has not all steps from a checkpoint or to one. */
static dtrain_result train_part(local *l, dtrain_optimizer *optimizer, dtrain_trainer *trainer)
{
    dtrain_state_desc what;
    dtrain_checkpoint_desc where;
    dtrain_state *state = NULL;
    dtrain_checkpoint *checkpoint = NULL;
    if (!l->j->directory) return train(l, trainer);
    memset(&what, 0, sizeof what);
    memset(&where, 0, sizeof where);
    what.strategy = l->strategy, what.optimizer = optimizer, what.trainer = trainer;
    TRY(dtrain_state_create(l->world, &what, &state));
    dtrain_result result = DTRAIN_OK;
    if (l->j->from) result = dtrain_checkpoint_load(state, l->j->directory, NULL, NULL);
    if (result == DTRAIN_OK) result = train(l, trainer);
    where.directory = l->j->directory, where.state = state;
    if (result == DTRAIN_OK && l->j->to < STEPS) {
        result = dtrain_checkpoint_open(l->world, &where, &checkpoint);
        if (result == DTRAIN_OK) result = dtrain_checkpoint_save(checkpoint, l->j->to, NAN);
        const dtrain_result closed = dtrain_checkpoint_close(checkpoint);
        if (result == DTRAIN_OK) result = closed;
    }
    dtrain_state_destroy(state);
    return result;
}

static dtrain_result create(local *l, dtrain_optimizer **optimizer, dtrain_trainer **trainer)
{
    dtrain_trainer_desc *t = &l->trains;
    const dtrain_result planned = plan(l);
    TRY(dtrain_strategy_create(l->world, l->params, PARAMS, &l->how, &l->strategy));
    if (!l->evaluates) TRY(dtrain_optimizer_create(l->world, l->strategy, &l->updates, optimizer));
    if (!CHECK_MSG(planned == DTRAIN_OK, "what can be made cannot be planned")) return planned;
    note_held(l, *optimizer);
    t->strategy = l->strategy, t->optimizer = *optimizer;
    return dtrain_trainer_create(l->world, t, trainer);
}

static void describe(local *l, const dtrain_mesh *mesh)
{
    dtrain_trainer_desc *t = &l->trains;
    l->line.kind = l->j->schedule;
    l->micro = MICROS - 1; /* for a loss that is run before the first batch */
    l->how.mesh = mesh, l->how.pipeline = &l->line, l->how.init_seed = 11;
    l->updates = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_ADAMW);
    t->micro_batches = MICROS, t->clip = 0.5f, t->schedule.lr = 0.02f, t->seed = 3;
    t->next_batch = next_batch, t->loss = loss_of, t->user = l;
    register_model(l);
    l->j->option(l);
}

static void count_warnings(void *user, dtrain_log_level level, int rank, const char *message)
{
    (void)rank, (void)message;
    if (level == DTRAIN_LOG_WARNING) ranks_count(&((job *)user)->warnings);
}

static int rank_main(dtrain_world *world, void *user)
{
    job *j = (job *)user;
    local *l = (local *)calloc(1, sizeof *l);
    dtrain_mesh_desc axes;
    dtrain_mesh *mesh;
    dtrain_mesh_info at;
    dtrain_optimizer *optimizer = NULL;
    dtrain_trainer *trainer = NULL;
    if (!l) return 1;
    memset(&axes, 0, sizeof axes);
    axes.pipeline = j->pipeline, axes.data = j->data;
    RANKS_TRY(dtrain_mesh_create(world, &axes, &mesh));
    dtrain_mesh_query(mesh, &at);
    l->j = j, l->world = world, l->rank = at.rank, l->data_rank = at.data_rank;
    describe(l, mesh);
    j->created[l->rank] = create(l, &optimizer, &trainer);
    if (j->created[l->rank] != DTRAIN_OK)
        snprintf(j->refused[l->rank], sizeof j->refused[0], "%s", dtrain_last_error());
    else j->trained[l->rank] = train_part(l, optimizer, trainer);
    CHECK_MSG((j->trained[l->rank] == DTRAIN_OK) == !j->fails, "%s", dtrain_last_error());
    dtrain_trainer_destroy(trainer);
    dtrain_optimizer_destroy(optimizer);
    dtrain_strategy_destroy(l->strategy);
    dtrain_mesh_destroy(mesh);
    free(l);
    return 0;
}

static void hook_fails(local *l);

static job *run_part(option_fn *option, int pipeline, int data, uint32_t schedule, int from, int to,
                     const char *directory)
{
    job *j = (job *)ranks_shared(sizeof *j);
    j->option = option, j->pipeline = pipeline, j->data = data, j->schedule = schedule;
    j->from = from, j->to = to, j->directory = directory, j->fails = option == hook_fails;
    dtrain_launch_desc desc = ranks_desc(pipeline * data, DTRAIN_LAUNCH_THREADS);
    desc.options.log_level = DTRAIN_LOG_WARNING, desc.options.log = count_warnings,
    desc.options.log_user = j;
    const dtrain_result result = ranks_launch(&desc, rank_main, j, NULL);
    CHECK_MSG(result == DTRAIN_OK, "%s", dtrain_last_error());
    return j;
}

static job *run(option_fn *option, int pipeline, int data, uint32_t schedule)
{
    return run_part(option, pipeline, data, schedule, 0, STEPS, NULL);
}

/* ---- judging ---- */

static double within; /* a share of it; 0: equal bits */

static bool equal(double a, double b)
{
    return fabs(a - b) <= within * (1 + fabs(b)) || a == b || (isnan(a) && isnan(b));
}

static void check_steps(const char *name, const job *cut, const job *whole, int r)
{
    for (int step = cut->from; step < STEPS; step++) {
        const dtrain_step_record *a = &cut->records[r][step], *b = &whole->records[0][step];
        CHECK_MSG(cut->stepped[r][step] == whole->stepped[0][step],
                  "%s, schedule %u, rank %d, step %d: result %d, expected %d: %s", name,
                  cut->schedule, r, step, (int)cut->stepped[r][step], (int)whole->stepped[0][step],
                  cut->wrong[r][step]);
        CHECK_MSG(equal(a->loss, b->loss) && equal(a->grad_norm, b->grad_norm),
                  "%s, schedule %u, rank %d, step %d: loss %.9g, norm %.9g; expected %.9g, %.9g",
                  name, cut->schedule, r, step, a->loss, a->grad_norm, b->loss, b->grad_norm);
        CHECK_MSG(a->step == b->step && a->tokens == b->tokens && a->lr == b->lr &&
                      a->skipped_steps == b->skipped_steps && a->loss_scale == b->loss_scale,
                  "%s, rank %d: record of step %d: %lld, %llu tokens, skipped %llu, scale %g", name,
                  r, step, (long long)a->step, (unsigned long long)a->tokens,
                  (unsigned long long)a->skipped_steps, a->loss_scale);
    }
}

/* A plan is what the rank with most holds. */
static void check_held(const char *name, const job *j)
{
    uint64_t most = 0;
    for (int r = 0; r < j->pipeline * j->data; r++)
        if (j->held[r] > most) most = j->held[r];
    for (int r = 0; r < j->pipeline * j->data; r++)
        CHECK_MSG(!j->planned[r] || j->planned[r] == most || !j->records[r][0].step,
                  "%s, %d ranks: rank %d planned %llu bytes, and the most that one holds is %llu",
                  name, j->pipeline * j->data, r, (unsigned long long)j->planned[r],
                  (unsigned long long)most);
}

static void check_run(const char *name, const job *cut, const job *whole)
{
    for (int r = 0; r < cut->pipeline * cut->data; r++) {
        int differ = 0;
        CHECK_MSG(cut->created[r] == DTRAIN_OK, "%s, rank %d: %s", name, r, cut->refused[r]);
        check_steps(name, cut, whole, r);
        CHECK_MSG(equal(cut->evaluated[r], whole->evaluated[0]),
                  "%s, rank %d: evaluated %.9g, expected %.9g", name, r, cut->evaluated[r],
                  whole->evaluated[0]);
        for (int k = 0; k < MOST; k++)
            differ += !equal((double)cut->values[r][k], (double)whole->values[0][k]);
        CHECK_MSG(differ == 0, "%s, schedule %u: %d values of rank %d differ", name, cut->schedule,
                  differ, r);
    }
}

/* A run that is saved in the middle, over a pipeline, and goes on is one that is not. */
static void check_resumed(const char *name, option_fn *option, int data)
{
    static const uint32_t schedules[] = {DTRAIN_PIPELINE_1F1B, DTRAIN_PIPELINE_INTERLEAVED};
    const char *directory = path_of("saved");
    char command[300];
    job *whole = run(option, 1, data, 0);
    for (int i = 0; i < 2; i++) {
        job *first = run_part(option, 2, data, schedules[i], 0, STEPS / 2, directory),
            *rest = run_part(option, 2, data, schedules[i], STEPS / 2, STEPS, directory);
        check_run(name, rest, whole);
        munmap(first, sizeof *first);
        munmap(rest, sizeof *rest);
        snprintf(command, sizeof command, "rm -r %s", directory);
        CHECK(system(command) == 0);
    }
    munmap(whole, sizeof *whole);
}

/* An option's run over a pipeline is that without one, with schedules up to `last`. */
static void check_schedules(const char *name, option_fn *option, int data, uint32_t last)
{
    job *whole = run(option, 1, data, 0);
    CHECK_MSG(whole->created[0] == DTRAIN_OK, "%s: %s", name, whole->refused[0]);
    for (uint32_t schedule = 0; schedule <= last; schedule += TEST_RACES ? 2 : 1) {
        const bool three =
            data < 3 && (schedule == DTRAIN_PIPELINE_1F1B || schedule == DTRAIN_PIPELINE_ZB_H1);
        job *cut = run(option, three ? 3 : 2, data, schedule);
        check_held(name, cut);
        check_run(name, cut, whole);
        CHECK_MSG(!cut->warnings == !whole->warnings, "%s: %d warnings, and %d without a pipeline",
                  name, (int)cut->warnings, (int)whole->warnings);
        munmap(cut, sizeof *cut);
    }
    munmap(whole, sizeof *whole);
}

static void check_same(const char *name, option_fn *option, int data)
{
    check_schedules(name, option, data, DTRAIN_PIPELINE_ZB_H1);
}

/* Every rank of a pipeline refuses an option with a sentence that has these words, and none waits for another. */
static void check_refused(const char *name, option_fn *option, int data, const char *words)
{
    job *j = run(option, 2, data, DTRAIN_PIPELINE_1F1B);
    for (int r = 0; r < 2 * data; r++)
        CHECK_MSG(j->created[r] != DTRAIN_OK && strstr(j->refused[r], words),
                  "%s, rank %d: %d, \"%s\", expected \"%s\"", name, r, (int)j->created[r],
                  j->refused[r], words);
    munmap(j, sizeof *j);
}

/* Ranks whose trainers differ hear of it in the first step, all of them. */
static void check_differs(const char *name, option_fn *option, const char *words, const char *other)
{
    job *j = run(option, 2, 2, DTRAIN_PIPELINE_INTERLEAVED);
    for (int r = 0; r < 4; r++)
        CHECK_MSG(j->created[r] == DTRAIN_OK && j->stepped[r][0] == DTRAIN_ERROR_MISMATCH &&
                      strstr(j->wrong[r][0], words) && strstr(j->wrong[r][0], other) &&
                      strstr(j->wrong[r][0], "rank 2 has"),
                  "%s, rank %d: %d, \"%s\"", name, r, (int)j->stepped[r][0], j->wrong[r][0]);
    munmap(j, sizeof *j);
}

/* ---- gradients on their way ---- */

/* A hook that sends half of gradient plus residual, in its last round, and adds something of the mean of all ranks'
 * first elements; on two levels, where a first element is one of a slice, it does not. */
static void half_plan(const dtrain_compression_desc *how, dtrain_hook_bucket *bucket)
{
    (void)how;
    for (size_t i = 0; i < bucket->tensor_count; i++) {
        if (bucket->tensors[i].dense) continue;
        bucket->tensors[i].keeps_residual = true;
        bucket->scratch_count += bucket->tensors[i].count;
    }
}

static dtrain_result half_compress(const dtrain_compression_desc *how, dtrain_hook_bucket *bucket,
                                   uint32_t round)
{
    float *out = bucket->scratch;
    if (how->hook->user && bucket->step == 1 && bucket->rank == 1)
        return dtrain_fail(DTRAIN_ERROR_DATA, "the hook has no more room");
    for (size_t i = 0; i < bucket->tensor_count && round == 0; i++) {
        const dtrain_hook_tensor *t = &bucket->tensors[i];
        for (int64_t k = 0; k < t->count; k++, out++) {
            t->residual[k] += t->grad[k];
            *out = 0.5f * t->residual[k];
            t->residual[k] -= *out;
        }
    }
    return DTRAIN_OK;
}

static dtrain_result half_exchange(const dtrain_compression_desc *how,
                                   const dtrain_hook_bucket *bucket, uint32_t round,
                                   dtrain_work **work)
{
    const uint32_t last = how->hook->rounds - 1;
    if (round != last || !bucket->scratch_count) return DTRAIN_OK;
    return dtrain_all_reduce(bucket->comm, bucket->scratch, bucket->scratch,
                             (size_t)bucket->scratch_count, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM,
                             work);
}

static dtrain_result half_decompress(const dtrain_compression_desc *how, dtrain_hook_bucket *bucket,
                                     uint32_t round)
{
    const float *in = bucket->scratch;
    for (size_t i = 0; i < bucket->tensor_count && round + 1 == how->hook->rounds; i++)
        for (int64_t k = 0; k < bucket->tensors[i].count; k++)
            bucket->tensors[i].grad[k] = *in++ * bucket->factor;
    return DTRAIN_OK;
}

static int fails; /* user of a hook that fails on a rank of each stage in the third step */

static const dtrain_comm_hook_desc halves[4] = {
    {"half", 1, false, true, half_plan, half_compress, half_exchange, half_decompress, NULL},
    {"half in two", 2, false, true, half_plan, half_compress, half_exchange, half_decompress, NULL},
    {"half of slices", 1, true, true, half_plan, half_compress, half_exchange, half_decompress,
     NULL},
    {"half that fails", 1, false, true, half_plan, half_compress, half_exchange, half_decompress,
     &fails}};

static void compress(local *l, uint32_t kind, const dtrain_comm_hook_desc *hook)
{
    l->compression.kind = kind, l->compression.hook = hook;
    l->compression.dense_below = 1, l->compression.dense_steps = 1;
    l->compression.topk_ratio = 0.1f;
    l->how.compression = &l->compression;
    l->how.bucket_bytes = 700;
}
static void hook(local *l) { compress(l, 0, &halves[0]); }
static void hook_fails(local *l) { compress(l, 0, &halves[3]); }
static void hook_in_two_rounds(local *l)
{
    compress(l, 0, &halves[1]);
    l->how.no_overlap = true;
}
static void hook_without_dense_steps(local *l)
{
    compress(l, 0, &halves[1]);
    l->compression.dense_steps = DTRAIN_DENSE_STEPS_NONE;
}
static void topk_with_momentum(local *l)
{
    compress(l, DTRAIN_COMPRESSION_TOPK, NULL);
    l->compression.topk_momentum = 0.9f, l->compression.warmup_steps = 2;
    l->updates = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_SGD);
}
static void topk_without_feedback(local *l)
{
    compress(l, DTRAIN_COMPRESSION_TOPK, NULL);
    l->compression.no_error_feedback = true;
    l->updates.variance_steps = 2;
}
static void topk_in_bf16(local *l)
{
    compress(l, DTRAIN_COMPRESSION_TOPK, NULL);
    l->how.reduce_dtype = DTRAIN_DTYPE_BF16;
}
static void reduced_in_fp16(local *l)
{
    l->how.kind = DTRAIN_STRATEGY_ZERO1, l->how.reduce_dtype = DTRAIN_DTYPE_F16;
}
static void hierarchical(local *l) { l->how.hierarchical = true, l->how.node_size = 2; }
static void hierarchical_hook(local *l)
{
    compress(l, 0, &halves[2]);
    hierarchical(l);
}
static void skips_nonfinite(local *l);
static void skipping_with_compression(local *l)
{
    hook(l);
    skips_nonfinite(l);
}
static void scaling_with_hook(local *l)
{
    hook(l);
    l->trains.loss_scaling.scale = 1024;
}

/* A hook that fails on some ranks, inside of the schedule or behind it, is an error of all at once. */
static void check_hook_fails(void)
{
    const double begin = test_seconds();
    job *j = run(hook_fails, 2, 2, DTRAIN_PIPELINE_1F1B);
    for (int r = 0; r < 4; r++)
        CHECK_MSG(j->stepped[r][1] == DTRAIN_OK && j->stepped[r][2] != DTRAIN_OK &&
                      j->stepped[r][3] != DTRAIN_OK &&
                      strstr(j->wrong[r][2], "the hook has no more room"),
                  "rank %d: %d, \"%s\"", r, (int)j->stepped[r][2], j->wrong[r][2]);
    CHECK(test_seconds() - begin < RANKS_SOON);
    munmap(j, sizeof *j);
}

static void test_gradients_on_their_way(void)
{
    check_hook_fails();
    check_same("hook", hook, 2);
    check_same("hook in two rounds", hook_in_two_rounds, 2);
    check_same("hook without dense steps", hook_without_dense_steps, 2);
    check_same("top-k with momentum", topk_with_momentum, 2);
    check_same("top-k without feedback", topk_without_feedback, 2);
    check_same("top-k in bf16", topk_in_bf16, 2);
    check_same("reduced in fp16", reduced_in_fp16, 2);
    check_same("hierarchical", hierarchical, 4);
    check_same("hierarchical hook", hierarchical_hook, 4);
    check_refused("skipping", skipping_with_compression, 2,
                  "DTRAIN_NONFINITE_SKIP with a strategy that compresses");
    check_refused("scaling", scaling_with_hook, 2,
                  "loss_scaling with a strategy that compresses gradients");
}

/* ---- gradients that are missing, and steps that are left out ---- */

static void missing(local *l, uint32_t how)
{
    l->how.missing_gradient = how, l->never = true;
    l->updates.weight_decay = 0.1f;
}
static void missing_skip(local *l) { missing(l, DTRAIN_MISSING_GRADIENT_SKIP); }
static void missing_zero(local *l) { missing(l, DTRAIN_MISSING_GRADIENT_ZERO); }
static void missing_error(local *l) { missing(l, DTRAIN_MISSING_GRADIENT_ERROR); }
static void sometimes_skip(local *l)
{
    missing(l, DTRAIN_MISSING_GRADIENT_SKIP), l->sometimes = true;
}
static void sometimes_error(local *l)
{
    missing(l, DTRAIN_MISSING_GRADIENT_ERROR);
    l->sometimes = true, l->never = false;
}
static void skips_nonfinite(local *l)
{
    l->trains.nonfinite = DTRAIN_NONFINITE_SKIP;
    l->explodes = true, l->explodes_for = 2;
}
static void scales(local *l)
{
    dtrain_loss_scaler *s = &l->trains.loss_scaling;
    s->scale = 4096, s->growth_interval = 1;
}

static void test_missing_and_left_out(void)
{
    check_same("missing, skipped", missing_skip, 2);
    check_same("missing, zero", missing_zero, 2);
    check_same("missing, error", missing_error, 2);
    check_schedules("sometimes missing, skipped", sometimes_skip, 1, DTRAIN_PIPELINE_GPIPE);
    check_schedules("sometimes missing, error", sometimes_error, 2, DTRAIN_PIPELINE_GPIPE);
    check_same("not finite, skipped", skips_nonfinite, 2);
    check_same("loss scaling", scales, 2);
}

/* ---- losses and weights ---- */

static void weighs(local *l)
{
    l->sums = true;
    l->trains.schedule.lr = 0.002f;
}
static void plain_trainer(local *l)
{
    dtrain_trainer_desc *t = &l->trains;
    t->clip = 0, t->tokens = 17, t->verify_every = 1;
    t->recompute_every = 1, t->recompute_ops = DTRAIN_RECOMPUTE_LINEAR;
    t->schedule.kind = DTRAIN_SCHEDULE_COSINE, t->schedule.warmup_steps = 2;
    t->schedule.total_steps = 9, t->schedule.min_lr = 0.001f;
    l->how.accumulation = DTRAIN_ACCUMULATION_LAST;
}
static void evaluates(local *l) { l->evaluates = true; }
static void weighs_batches(local *l)
{
    weighs(l);
    l->weighs = 1;
}
static void weighs_steps(local *l)
{
    weighs(l);
    l->weighs = 2;
}
static void accumulates(local *l) { l->accumulates = true; }
static void one_micro_batch(local *l) { l->trains.micro_batches = 0; }
static void other_trainer(local *l) { l->other = true; }
static void evaluates_before(local *l) { l->rows = ROWS - 2; }
static void recomputes(local *l) { l->recomputes = true; }
static void ends(local *l) { l->ends = true; }
static void unfetched(local *l) { l->unfetched = true; }
static void tapes(local *l) { l->tapes = true; }

static void test_losses_and_trainers(void)
{
    check_same("weights of the program's own", weighs, 2);
    check_same("a trainer's fields", plain_trainer, 2);
    check_same("evaluation alone", evaluates, 2);
    check_same("weights of batches", weighs_batches, 2);
    check_same("weights before steps", weighs_steps, 1);
    check_same("more micro-batches", accumulates, 2);
    for (int data = 1; data <= 2; data++) {
        check_same("one micro-batch", one_micro_batch, data);
        check_same("another trainer", other_trainer, data);
        check_same("an evaluation before", evaluates_before, data);
    }
    check_same("recomputes from the third step on", recomputes, 2);
    check_same("an evaluation whose data ends", ends, 2);
    check_refused("a tape", tapes, 2, "is in a stage of another rank of the pipeline axis");
    check_refused("an evaluation without next_batch", unfetched, 2, "give next_batch");
}

/* ---- optimizers ---- */

static void lion(local *l) { l->updates = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_LION); }
static void nesterov(local *l)
{
    l->updates = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_SGD);
    l->updates.momentum = 0.9f, l->updates.nesterov = true, l->updates.weight_decay = 0.05f;
    l->how.kind = DTRAIN_STRATEGY_ZERO1;
    l->params[2].flags = l->params[2 * UNITS].flags = DTRAIN_PARAM_NO_DECAY;
}
/* Matrices of the first units are Muon's, so that the last stage has none. */
static void muon(local *l)
{
    l->group = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_MUON);
    l->group.lr_scale = 0.5f;
    l->updates.groups = &l->group, l->updates.group_count = 1;
    l->params[0].group = l->params[2].group = 1;
}
static void muon_in_slices(local *l)
{
    muon(l);
    l->how.kind = DTRAIN_STRATEGY_ZERO1;
}
static void muon_of_a_bias(local *l)
{
    muon(l);
    l->params[1].group = 1;
}
static void group_that_is_not(local *l) { l->params[0].group = 3; }
static void rate_of_nothing(local *l) { l->trains.schedule.lr = 0; }

static void test_optimizers(void)
{
    check_same("Lion", lion, 2);
    check_same("SGD of Nesterov", nesterov, 2);
    check_same("Muon", muon, 2);
    check_same("Muon, alone on the data axis", muon_in_slices, 1);
    check_refused("Muon in slices", muon_in_slices, 2, "zero1 cuts them in slices");
    check_refused("Muon of a bias", muon_of_a_bias, 2, "Muon is for matrices");
    check_refused("a group that is not", group_that_is_not, 2, "is in group 3, and the desc has 0");
    check_refused("a rate of nothing", rate_of_nothing, 2, "schedule.lr is 0");
}

/* ---- parameters ---- */

static void freeze(local *l, int first, int end)
{
    for (int i = first; i < end; i++) l->params[i].flags = DTRAIN_PARAM_FROZEN;
}
static void frozen_first(local *l) { freeze(l, 0, 2 * UNITS - 2); }
static void frozen_last(local *l) { freeze(l, UNITS / 2, PARAMS); }
static void frozen_biases(local *l)
{
    for (int i = 1; i < 2 * UNITS; i += 2) l->params[i].flags = DTRAIN_PARAM_FROZEN;
    l->how.kind = DTRAIN_STRATEGY_ZERO1;
}
static void freezes(local *l) { l->freezes = true; }
static void own_memory(local *l)
{
    for (int i = 0; i < PARAMS; i++) {
        if (i % 3 == 0) l->params[i].value = l->own[i][0];
        if (i % 3 < 2) l->params[i].grad = l->own[i][1];
        for (int k = 0; k < WIDTH * WIDTH; k++)
            l->own[i][0][k] = dtrain_random_normal(9, (uint64_t)i, (uint64_t)k) * 0.3f;
    }
}
static void initialised(local *l)
{
    l->params[2].init = DTRAIN_INIT_UNIFORM, l->params[3].init = DTRAIN_INIT_CONSTANT;
    l->params[4].init_count = 3 * WIDTH, l->params[6].init = DTRAIN_INIT_ZERO;
    l->how.kind = DTRAIN_STRATEGY_ZERO1;
}

static void test_parameters(void)
{
    check_same("frozen but for the last unit", frozen_first, 2);
    check_same("frozen but for the first units", frozen_last, 2);
    check_same("frozen biases", frozen_biases, 2);
    check_same("frozen between two steps", freezes, 2);
    check_same("memory of the program's own", own_memory, 2);
    check_same("initialisation", initialised, 2);
}

/* ---- weights that the first and the last stage share ---- */

static void tied(local *l)
{
    l->params[PARAMS - 3].alias_of = &l->params[0];
    l->updates = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_SGD);
    l->updates.momentum = 0.9f;
    l->trains.verify_every = 1; /* copies have the same bits */
}
static void tied_zero1(local *l)
{
    tied(l);
    initialised(l);
    l->params[0].init_scale = 0.2f;
}
static void tied_low(local *l)
{
    tied(l);
    l->how.reduce_dtype = DTRAIN_DTYPE_BF16;
}
static void tied_nodes(local *l)
{
    tied(l);
    hierarchical(l);
}
static void tied_missing(local *l)
{
    tied(l);
    l->how.missing_gradient = DTRAIN_MISSING_GRADIENT_ERROR, l->never = true;
    l->params[PARAMS - 2].alias_of = &l->params[0]; /* the use that is missing in a step */
}
static void tied_missing_skip(local *l)
{
    tied_missing(l);
    l->how.missing_gradient = DTRAIN_MISSING_GRADIENT_SKIP;
}
static void tied_frozen(local *l)
{
    tied(l);
    l->params[0].flags = DTRAIN_PARAM_FROZEN;
}
static void tied_frozen_use(local *l)
{
    tied(l);
    l->params[PARAMS - 3].flags = DTRAIN_PARAM_FROZEN;
}
static void tied_frozen_between(local *l)
{
    tied(l);
    l->freezes = true;
}
static void tied_host(local *l)
{
    own_memory(l);
    l->params[PARAMS - 3].value = l->params[PARAMS - 3].grad = NULL;
    tied(l);
}
static void tied_lion(local *l)
{
    tied(l);
    lion(l);
    l->trains.schedule.lr = 0.001f;
}
static void tied_muon(local *l)
{
    tied(l);
    muon(l);
    l->trains.schedule.lr = 0.001f;
}
static void tied_skips(local *l)
{
    tied(l);
    skips_nonfinite(l);
}
static void tied_hook(local *l)
{
    tied(l);
    hook(l);
}

static void test_tied(void)
{
    within = 2e-3;
    for (int data = 1; data <= 2; data++) {
        check_same("tied", tied, data);
        check_same("tied under ZERO1", tied_zero1, data);
        check_same("tied, gradient missing", tied_missing, data);
        check_same("tied, gradient missing and skipped", tied_missing_skip, data);
        check_same("tied and frozen", tied_frozen, data);
        check_same("tied, one use frozen", tied_frozen_use, data);
        check_same("tied, frozen between two steps", tied_frozen_between, data);
        check_same("tied, memory of the program's own", tied_host, data);
        check_refused("tied hook", tied_hook, data, "is tied between stages of several ranks");
    }
    check_same("tied by nodes", tied_nodes, 4);
    check_same("tied, Lion", tied_lion, 2);
    check_same("tied, Muon", tied_muon, 2);
    check_same("tied, not finite", tied_skips, 2);
    within = 2e-2;
    check_same("tied and reduced in bf16", tied_low, 2);
    within = 0;
}

/* ---- what a strategy refuses, and AUTO ---- */

static void keeps_all(local *l) { l->how.keep_after_forward = true; }
static void keeps_all_zero1(local *l)
{
    keeps_all(l);
    l->how.kind = DTRAIN_STRATEGY_ZERO1;
}
static void narrow_params(local *l) { l->how.param_dtype = DTRAIN_DTYPE_BF16; }
static void narrow_params_zero1(local *l)
{
    narrow_params(l);
    l->how.kind = DTRAIN_STRATEGY_ZERO1;
}
static void accumulates_every(local *l) { l->how.accumulation = DTRAIN_ACCUMULATION_EVERY; }
static void accumulates_shards(local *l)
{
    l->how.kind = DTRAIN_STRATEGY_ZERO1, l->how.accumulation = DTRAIN_ACCUMULATION_SHARD_EVERY;
}
static void node_of_nothing(local *l) { l->how.node_size = 2; }
static void offloads(local *l) { l->how.offload = DTRAIN_OFFLOAD_OPTIMIZER; }
static void chooses(local *l)
{
    static const uint32_t states[1] = {1};
    l->how.kind = DTRAIN_STRATEGY_AUTO;
    l->how.memory_limit = 1 << 20, l->how.other_bytes = 1 << 10, l->how.optimizer_states = 2;
    l->how.group_states = states, l->how.group_count = 1;
    muon(l);
    l->group = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_LION);
}
static void chooses_of_little(local *l)
{
    chooses(l);
    l->how.memory_limit = 4096;
}
static void chooses_of_other(local *l)
{
    chooses(l);
    l->how.other_bytes = (1 << 20) - 4096;
}
static void chooses_kept(local *l)
{
    chooses(l);
    keeps_all(l);
}
static void chooses_narrow(local *l)
{
    chooses(l);
    narrow_params(l);
}
static void chooses_every(local *l)
{
    chooses(l);
    accumulates_every(l);
}
static void records_a_graph(local *l) { l->trains.graph = true; }
static void fetches_itself(local *l) { l->trains.next_batch = NULL; }
static void comm_beside_mesh(local *l) { l->how.comm = dtrain_world_comm(l->world); }
static void chunks_of_1f1b(local *l) { l->line.chunks = 2; }
static void flags_of_nothing(local *l) { l->trains.tape_flags = DTRAIN_TAPE_NO_GRAD; }

static void test_strategies(void)
{
    check_same("AUTO", chooses, 2);
    check_same("AUTO, alone on the data axis", chooses, 1);
    for (int data = 1; data <= 2; data++) {
        check_refused("kept units", keeps_all, data, "keep_after_forward is set, but ddp never");
        check_refused("kept units", keeps_all_zero1, data, "but zero1 never shards parameters");
        check_refused("param_dtype", narrow_params, data,
                      "param_dtype: ddp keeps parameters whole");
        check_refused("param_dtype", narrow_params_zero1, data, "param_dtype: zero1 keeps");
        check_refused("AUTO", chooses_of_little, data, "no strategy fits");
        check_refused("AUTO", chooses_of_other, data, "no strategy fits");
        check_refused("AUTO", chooses_kept, data, "none of the kinds that it chooses from");
        check_refused("AUTO", chooses_narrow, data, "none of the kinds that it chooses from");
        check_refused("AUTO", chooses_every, data, "none of the kinds that it chooses from");
        check_refused("accumulation", accumulates_every, data, "ddp keeps whole gradients");
        check_refused("accumulation", accumulates_shards, data, "use DTRAIN_STRATEGY_HYBRID_SHARD");
        check_refused("node_size", node_of_nothing, data, "node_size means something to");
        check_refused("offload", offloads, data,
                      "offload is 0x1, but the memory of the cpu device");
        check_refused("graph", records_a_graph, data, "graph needs no pipeline");
        check_refused("next_batch", fetches_itself, data, "give next_batch");
        check_refused("flags", flags_of_nothing, data, "tape_flags is 1; expected 0, DTRAIN");
        check_refused("comm", comm_beside_mesh, data, "with a mesh leave comm NULL");
        check_refused("chunks", chunks_of_1f1b, data, "a pipeline of kind 1F1B on 2 ranks has 1");
    }
}

/* ---- trainers that differ ---- */

static void more_micro_batches(local *l) { l->trains.micro_batches += l->rank == 2; }
static void other_flags(local *l) { l->trains.tape_flags = l->rank == 2 ? DTRAIN_TAPE_BF16 : 0; }
static void other_clip(local *l) { l->trains.clip += l->rank == 2; }
static void other_scale(local *l) { l->trains.loss_scaling.scale = l->rank == 2 ? 1024 : 0; }
static void other_skips(local *l) { l->trains.nonfinite = l->rank == 2; }
static void other_rate(local *l) { l->trains.schedule.lr += 0.5f * (l->rank == 2); }
static void other_updates(local *l)
{
    muon(l);
    l->group.momentum -= 0.1f * (float)(l->rank == 2);
}
static void other_milestones(local *l)
{
    l->trains.schedule.kind = DTRAIN_SCHEDULE_STEPS;
    l->trains.schedule.milestones[0] = 2 + (l->rank == 2);
}

static void test_trainers_differ(void)
{
    check_differs("micro-batches", more_micro_batches, "rank 2 has micro_batches 5,",
                  "the others have micro_batches 4;");
    check_differs("flags", other_flags, "has tape_flags 0x2,", "have tape_flags 0x0;");
    check_differs("clip", other_clip, "has clip 1.5,", "have clip 0.5;");
    check_differs("loss scaling", other_scale, "has scaling true,", "have scaling false;");
    check_differs("nonfinite", other_skips, "has nonfinite 1,", "have nonfinite 0;");
    check_differs("rate", other_rate, "has schedule.lr 0.52,", "have schedule.lr 0.02;");
    check_differs("optimizer", other_updates,
                  "group 1 (kind of optimizer 4) differs: ", "has momentum ");
    check_differs("milestones", other_milestones, "has schedule.milestones (3, 0,",
                  "have schedule.milestones (2, 0,");
}

/* ---- the largest batch ---- */

enum { LIMIT = 150000 };

typedef struct found {
    uint32_t schedule, batch[4];
    uint64_t used[4], planned[4], held[4], more[4];
} found;

static dtrain_result set_rows(void *user, uint32_t batch)
{
    ((local *)user)->rows = batch;
    return DTRAIN_OK;
}

static uint64_t activations(const dtrain_memory *memory)
{
    return memory->activations + memory->activation_grads;
}

/* Search, take a step with what was found, and plan one sample more. */
static dtrain_result search(local *l, found *f, dtrain_optimizer **optimizer,
                            dtrain_trainer **trainer)
{
    dtrain_batch_search by;
    dtrain_memory memory;
    dtrain_tape_info info;
    memset(&by, 0, sizeof by);
    by.max_batch = ROWS_MOST, by.set_batch = set_rows, by.params = l->params,
    by.param_count = PARAMS;
    by.strategy = &l->how;
    l->how.memory_limit = LIMIT, l->trains.mesh = l->how.mesh;
    TRY(dtrain_trainer_plan(l->world, &l->trains, &by, &memory));
    f->batch[l->rank] = by.batch, f->planned[l->rank] = activations(&memory);
    TRY(create(l, optimizer, trainer));
    f->held[l->rank] = l->j->held[l->rank];
    TRY(dtrain_trainer_step(*trainer, NULL));
    dtrain_tape_query(dtrain_trainer_tape(*trainer), &info);
    f->used[l->rank] = info.activation_bytes + info.gradient_bytes;
    l->rows++;
    TRY(dtrain_trainer_plan(l->world, &l->trains, NULL, &memory));
    f->more[l->rank] = activations(&memory);
    return DTRAIN_OK;
}

static void plainly(local *l) { (void)l; }

static int search_rank(dtrain_world *world, void *user)
{
    found *f = (found *)user;
    job *j = (job *)calloc(1, sizeof *j);
    local *l = (local *)calloc(1, sizeof *l);
    dtrain_mesh_desc axes;
    dtrain_mesh *mesh;
    dtrain_optimizer *optimizer = NULL;
    dtrain_trainer *trainer = NULL;
    if (!l || !j) return 1;
    memset(&axes, 0, sizeof axes);
    axes.pipeline = 2;
    RANKS_TRY(dtrain_mesh_create(world, &axes, &mesh));
    j->option = plainly, j->pipeline = j->data = 2, j->schedule = f->schedule;
    l->j = j, l->world = world, l->rank = dtrain_world_rank(world);
    describe(l, mesh);
    RANKS_TRY(search(l, f, &optimizer, &trainer));
    dtrain_trainer_destroy(trainer);
    dtrain_optimizer_destroy(optimizer);
    dtrain_strategy_destroy(l->strategy);
    dtrain_mesh_destroy(mesh);
    free(l), free(j);
    return 0;
}

/* All ranks find one batch, whose step takes what was planned; with a sample more a rank would be above the limit. */
static void test_largest_batch(void)
{
    found *f = (found *)ranks_shared(sizeof *f);
    for (f->schedule = 0; f->schedule <= DTRAIN_PIPELINE_ZB_H1; f->schedule++) {
        uint64_t most = 0, more = 0;
        ranks_run(4, DTRAIN_LAUNCH_THREADS, search_rank, f);
        for (int r = 0; r < 4; r++) {
            CHECK_MSG(f->batch[r] == f->batch[0] && f->batch[r] > 1 && f->batch[r] < ROWS_MOST &&
                          f->used[r] == f->planned[r],
                      "schedule %u, rank %d: batch %u takes %llu bytes, planned %llu", f->schedule,
                      r, f->batch[r], (unsigned long long)f->used[r],
                      (unsigned long long)f->planned[r]);
            if (f->held[r] + f->used[r] > most) most = f->held[r] + f->used[r];
            if (f->held[r] + f->more[r] > more) more = f->held[r] + f->more[r];
        }
        CHECK_MSG(most <= LIMIT && more > LIMIT,
                  "schedule %u: batch %u takes %llu bytes, one more %llu", f->schedule, f->batch[0],
                  (unsigned long long)most, (unsigned long long)more);
    }
    munmap(f, sizeof *f);
}

/* ---- what goes on in another run ---- */

static void resumes_missing(local *l)
{
    missing_skip(l);
    lion(l);
}

static void test_resumed(void)
{
    check_resumed("hook", hook_in_two_rounds, 2);
    check_resumed("top-k with momentum", topk_with_momentum, 2);
    check_resumed("hierarchical hook", hierarchical_hook, 4);
    check_resumed("missing, skipped", resumes_missing, 2);
    check_resumed("groups", muon, 2);
    check_resumed("loss scaling", scales, 2);
    check_resumed("weights of batches", weighs_batches, 2);
    check_resumed("initialisation", initialised, 2);
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    if (!files_begin("pipeline_options")) return 1;
    RUN(test_gradients_on_their_way);
    RUN(test_missing_and_left_out);
    RUN(test_losses_and_trainers);
    RUN(test_optimizers);
    RUN(test_parameters);
    RUN(test_tied);
    RUN(test_strategies);
    RUN(test_trainers_differ);
    RUN(test_largest_batch);
    RUN(test_resumed);
    const bool removed = files_end();
    return test_summary() || !removed;
}
