/* test_evaluation.c: dtrain_trainer_evaluate over loaders that end. Each held-out sample counts once, for any number of
 * ranks, axes, kind of strategy, batch and limit: seeded random programs beside a loop over the samples in double. A
 * signal ends an evaluation after the batch under way.
 *
 *     make build/tests/test_evaluation && build/tests/test_evaluation */
#include "test.h"
#include "dtrain.h"
#include "ranks.h"
#include "shuffled.h"

enum { MOST_ITEMS = 48, MOST_BATCH = 6, MOST_SHOWN = 8 };

/* What an evaluation is, drawn from a seed. */
typedef struct program {
    uint64_t seed;
    int tensor, data, pipeline;
    uint32_t kind, batch, workers, mode;
    int64_t items, limit;
    bool in_order, pads, norm,
        all_rounds; /* pads: batches of one shape, by targets of -1; otherwise of the rows that
                                              there are */
    float two[2];   /* the weights of the classes */
    double loss[MOST_SHOWN];
    int result[MOST_SHOWN];
    char text[MOST_SHOWN][300];
} program;

typedef struct local {
    const program *p;
    dtrain_loader *loader;
    dtrain_comm *norm;
    dtrain_param params[7];
    int64_t rows;
    float x[MOST_BATCH];
    int32_t labels[MOST_BATCH];
} local;

static program *program_of(uint64_t seed)
{
    static const int data[] = {1, 2, 3, 4}, beside[] = {1, 2};
    uint64_t state = seed;
    program *p = (program *)ranks_shared(sizeof *p);
    p->seed = seed;
    p->tensor = 1 + (int)ranks_random(&state, 2), p->pipeline = 1 + (int)ranks_random(&state, 2);
    p->data = p->tensor * p->pipeline > 1 ? beside[ranks_random(&state, 2)]
                                          : data[ranks_random(&state, 4)];
    p->kind = (uint32_t)(1 + ranks_random(&state, p->pipeline > 1 ? 2 : 5));
    p->batch = (uint32_t)(1 + ranks_random(&state, MOST_BATCH));
    p->workers = (uint32_t)ranks_random(&state, 3);
    p->items = 1 + (int64_t)ranks_random(&state, MOST_ITEMS);
    p->limit = ranks_random(&state, 2) ? DTRAIN_ONE_EPOCH
                                       : 1 + (int64_t)ranks_random(&state, (uint64_t)p->items);
    p->in_order = ranks_random(&state, 2);
    p->pads = ranks_random(&state, 2);
    p->norm = ranks_random(&state, 2);
    p->all_rounds = ranks_random(&state, 3) == 0;
    p->mode = ranks_random(&state, 2) ? DTRAIN_LAUNCH_THREADS : DTRAIN_LAUNCH_PROCESSES;
    return p;
}

/* Multiples of 60: a mean over up to 6 of them is exact. */
static double value_of(int64_t item) { return (double)(60 * (item * 7 % 23)); }
static int32_t label_of(int64_t item) { return item % 3 == 0; }

static dtrain_result read_values(void *user, int64_t first, int64_t count, void *items,
                                 int32_t *labels)
{
    const bool *labelled = (const bool *)user;
    for (int64_t i = 0; i < count; i++) {
        ((float *)items)[i] = (float)value_of(first + i);
        if (labels && *labelled) labels[i] = label_of(first + i);
    }
    return DTRAIN_OK;
}

/* What a loop over the samples finds. */
static double expected_loss(const program *p)
{
    const int64_t all = p->limit > 0 && p->limit < p->items ? p->limit : p->items;
    int64_t order[MOST_ITEMS];
    double sum = 0;
    if (!p->in_order) shuffled(3, p->items, order);
    for (int64_t k = 0; k < all; k++) {
        const int64_t item = p->in_order ? k : order[k];
        const double a = value_of(item) * (double)p->two[0], b = value_of(item) * (double)p->two[1];
        sum += p->pads ? log(exp(a) + exp(b)) - (label_of(item) ? b : a) : value_of(item);
    }
    return sum / (double)all;
}

static dtrain_result next_batch(void *user)
{
    local *l = (local *)user;
    dtrain_loader_info info;
    const dtrain_result result = dtrain_loader_next(l->loader, l->x, l->labels);
    if (result != DTRAIN_OK) return result;
    dtrain_loader_query(l->loader, &info);
    l->rows = l->p->pads ? l->p->batch : info.batch_samples;
    return l->rows ? DTRAIN_OK : DTRAIN_ERROR_END;
}

static dtrain_tensor *loss_of(dtrain_tape *t, void *user)
{
    local *l = (local *)user;
    const int64_t shape[2] = {l->rows, 1};
    dtrain_tensor *x = dtrain_tape_input(t, DTRAIN_DTYPE_F32, 2, shape, l->x, false);
    dtrain_tape_unit(t, 0);
    x = dtrain_linear(t, x, &l->params[0], NULL, DTRAIN_ACTIVATION_NONE);
    dtrain_tape_unit(t, 1);
    if (l->p->norm) {
        dtrain_batch_norm_desc desc;
        memset(&desc, 0, sizeof desc);
        desc.epsilon = 1e-20f; /* gone beside 1 */
        desc.running_mean = &l->params[3], desc.running_var = &l->params[4], desc.comm = l->norm;
        x = dtrain_batch_norm(t, x, &l->params[1], &l->params[2], &desc);
    }
    dtrain_tape_unit(t, 2);
    if (!l->p->pads)
        return dtrain_mean(t, dtrain_linear(t, x, &l->params[6], NULL, DTRAIN_ACTIVATION_NONE));
    x = dtrain_linear(t, x, &l->params[5], NULL, DTRAIN_ACTIVATION_NONE);
    return dtrain_cross_entropy(
        t, x, dtrain_tape_input(t, DTRAIN_DTYPE_I32, 1, shape, l->labels, false), 0, 0);
}

static void register_model(local *l)
{
    static const char *const names[] = {"first", "scale", "shift", "mean", "var", "two", "last"};
    static const uint32_t units[] = {0, 1, 1, 1, 1, 2, 2};
    for (int i = 0; i < 7; i++) {
        l->params[i] = ranks_param(names[i], NULL, NULL, i == 5 ? 2 : 1, i == 0 || i > 4);
        l->params[i].unit = units[i];
        l->params[i].init = DTRAIN_INIT_CONSTANT;
        l->params[i].init_scale = i == 2 || i == 3 ? 0 : i == 5 ? 1.0f / 1024 : 1;
        if (i == 5) l->params[i].init = DTRAIN_INIT_NORMAL;
        if (i == 3 || i == 4) l->params[i].flags = DTRAIN_PARAM_BUFFER;
    }
}

static dtrain_result evaluate(dtrain_world *world, program *p, local *l, double *loss)
{
    dtrain_mesh_desc axes;
    dtrain_mesh *mesh;
    dtrain_dataset_desc source;
    dtrain_loader_desc desc;
    dtrain_strategy_desc how;
    dtrain_strategy *strategy;
    dtrain_trainer_desc trains;
    dtrain_trainer *trainer;
    float two[2];
    memset(&axes, 0, sizeof axes), memset(&source, 0, sizeof source);
    memset(&desc, 0, sizeof desc), memset(&how, 0, sizeof how), memset(&trains, 0, sizeof trains);
    axes.tensor = p->tensor, axes.data = p->data, axes.pipeline = p->pipeline;
    TRY(dtrain_mesh_create(world, &axes, &mesh));
    if (p->norm) TRY(dtrain_comm_split(dtrain_mesh_comm(mesh, DTRAIN_AXIS_DATA), 0, 0, &l->norm));
    source.item_count = p->items, source.item_bytes = sizeof(float), source.read = read_values;
    source.user = &p->pads; /* where nobody reads labels, the source has none */
    TRY(dtrain_dataset_open(world, &source, &desc.dataset));
    desc.batch = p->batch, desc.seed = 3, desc.in_order = p->in_order, desc.workers = p->workers;
    desc.sample_limit = p->limit, desc.mesh = mesh;
    TRY(dtrain_loader_create(world, &desc, &l->loader));
    register_model(l);
    how.kind = p->kind, how.mesh = mesh;
    TRY(dtrain_strategy_create(world, l->params, 7, &how, &strategy));
    TRY(dtrain_strategy_read(strategy, 5, two));
    if (dtrain_world_rank(world) == 0) memcpy(p->two, two, sizeof two);
    trains.strategy = strategy, trains.next_batch = next_batch, trains.loss = loss_of;
    trains.user = l;
    TRY(dtrain_trainer_create(world, &trains, &trainer));
    for (int again = 0; again < 2; again++) {
        const int64_t rounds = p->all_rounds ? MOST_ITEMS + 1 : DTRAIN_UNTIL_END;
        dtrain_loader_seek(l->loader, 0);
        TRY(dtrain_trainer_evaluate(trainer, next_batch, l, rounds, &loss[0]));
    }
    dtrain_trainer_destroy(trainer);
    dtrain_strategy_destroy(strategy);
    dtrain_loader_destroy(l->loader);
    dtrain_dataset_close(desc.dataset);
    dtrain_comm_destroy(l->norm);
    dtrain_mesh_destroy(mesh);
    return DTRAIN_OK;
}

static int rank_main(dtrain_world *world, void *user)
{
    program *p = (program *)user;
    const int rank = dtrain_world_rank(world);
    local *l = (local *)calloc(1, sizeof *l);
    l->p = p;
    l->rows = 1;
    p->result[rank] = evaluate(world, p, l, &p->loss[rank]);
    if (p->result[rank]) snprintf(p->text[rank], sizeof p->text[0], "%s", dtrain_last_error());
    free(l);
    return p->result[rank] != 0;
}

static void test_random_evaluations(void)
{
    const uint64_t first = test_seed(), count = test_draws(150, 600, 2000);
    printf("  seeds from %llu on\n", (unsigned long long)first);
    for (uint64_t seed = first; seed < first + count; seed++) {
        program *p = program_of(seed);
        const int ranks = p->tensor * p->data * p->pipeline;
        const dtrain_launch_desc desc = ranks_desc(ranks, p->mode);
        (void)ranks_launch(&desc, rank_main, p, NULL);
        const double right = expected_loss(p);
        const double within = (p->pads ? 1e-6 : 1e-12) * (1 + fabs(right));
        for (int r = 0; r < ranks; r++)
            CHECK_MSG(
                p->result[r] == DTRAIN_OK && fabs(p->loss[r] - right) <= within &&
                    p->loss[r] == p->loss[0],
                "seed %llu, tensor %d x data %d x pipeline %d, kind %u, %lld of %lld items in "
                "batches of %u%s: rank %d has %.15g, expected %.15g %s",
                (unsigned long long)seed, p->tensor, p->data, p->pipeline, p->kind,
                (long long)p->limit, (long long)p->items, p->batch, p->pads ? ", padded" : "", r,
                p->loss[r], right, p->text[r]);
        munmap(p, sizeof *p);
    }
}

/* ---- a signal ---- */

typedef struct stop {
    int ranks, at; /* the last rank is asked to stop in this batch */
    int batches[4];
    double loss[4];
    bool stepped[4];
} stop;

typedef struct stopped {
    stop *j;
    int rank;
    dtrain_param w;
    float x;
} stopped;

static dtrain_result next_forever(void *user)
{
    stopped *s = (stopped *)user;
    if (++s->j->batches[s->rank] == s->j->at && s->rank == s->j->ranks - 1) raise(SIGTERM);
    return DTRAIN_OK;
}

static dtrain_tensor *stopped_loss(dtrain_tape *t, void *user)
{
    stopped *s = (stopped *)user;
    const int64_t shape[2] = {1, 1};
    dtrain_tape_unit(t, 0);
    return dtrain_mean(
        t, dtrain_linear(t, dtrain_tape_input(t, DTRAIN_DTYPE_F32, 2, shape, &s->x, false), &s->w,
                         NULL, DTRAIN_ACTIVATION_NONE));
}

static int stopped_rank(dtrain_world *world, void *user)
{
    const dtrain_optimizer_desc sgd = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_SGD);
    stopped s = {(stop *)user, dtrain_world_rank(world), {0}, 1};
    dtrain_strategy *strategy;
    dtrain_optimizer *optimizer;
    dtrain_trainer_desc desc;
    dtrain_trainer *trainer;
    dtrain_step_record record;
    memset(&desc, 0, sizeof desc);
    s.w = ranks_param("w", NULL, NULL, 1, 1);
    RANKS_TRY(dtrain_strategy_create(world, &s.w, 1, NULL, &strategy));
    RANKS_TRY(dtrain_optimizer_create(world, strategy, &sgd, &optimizer));
    desc.strategy = strategy, desc.optimizer = optimizer, desc.schedule.lr = 0.1f;
    desc.next_batch = next_forever, desc.loss = stopped_loss, desc.user = &s;
    RANKS_TRY(dtrain_trainer_create(world, &desc, &trainer));
    RANKS_TRY(dtrain_trainer_evaluate(trainer, next_forever, &s, INT64_MAX, &s.j->loss[s.rank]));
    const int batches = s.j->batches[s.rank];
    RANKS_TRY(dtrain_trainer_step(trainer, &record)); /* the program decides what it does */
    s.j->stepped[s.rank] = record.stop_requested;
    s.j->batches[s.rank] = batches;
    dtrain_trainer_destroy(trainer);
    dtrain_optimizer_destroy(optimizer);
    dtrain_strategy_destroy(strategy);
    return 0;
}

/* All ranks end behind the batch under way in which a signal came to one of them, or behind the next one. */
static void test_signal(void)
{
    for (int ranks = 1; ranks <= 3; ranks++) {
        stop *j = (stop *)ranks_shared(sizeof *j);
        dtrain_launch_desc desc = ranks_desc(ranks, DTRAIN_LAUNCH_PROCESSES);
        desc.catch_signals = true;
        j->ranks = ranks, j->at = 4;
        CHECK_MSG(ranks_launch(&desc, stopped_rank, j, NULL) == DTRAIN_OK, "%s",
                  dtrain_last_error());
        for (int r = 0; r < ranks; r++)
            CHECK_MSG(isnan(j->loss[r]) && j->stepped[r] && j->batches[r] == j->batches[0] &&
                          (j->batches[r] == 4 || j->batches[r] == 5),
                      "rank %d of %d: %d batches, loss %g", r, ranks, j->batches[r], j->loss[r]);
        munmap(j, sizeof *j);
    }
}

static dtrain_result never(void *user)
{
    (void)user;
    return DTRAIN_OK;
}

/* Limits that are none, both ways to say who shares the samples, and an end that nobody can reach. */
static void test_refused(void)
{
    dtrain_dataset_desc source;
    dtrain_loader_desc desc;
    dtrain_loader *loader;
    double loss;
    memset(&source, 0, sizeof source), memset(&desc, 0, sizeof desc);
    source.item_count = 5, source.item_bytes = sizeof(float), source.read = read_values;
    CHECK(dtrain_dataset_open(NULL, &source, &desc.dataset) == DTRAIN_OK);
    desc.batch = 2, desc.sample_limit = -2;
    CHECK(dtrain_loader_create(NULL, &desc, &loader) == DTRAIN_ERROR_ARGUMENT && !loader);
    CHECK(strstr(dtrain_last_error(), "sample_limit is -2"));
    desc.sample_limit = 3;
    desc.comm = (dtrain_comm *)(void *)&source, desc.mesh = (dtrain_mesh *)(void *)&source;
    CHECK(dtrain_loader_create(NULL, &desc, &loader) == DTRAIN_ERROR_ARGUMENT);
    CHECK(strstr(dtrain_last_error(), "mesh and comm are both given"));
    dtrain_dataset_close(desc.dataset);
    CHECK(dtrain_trainer_evaluate(NULL, never, NULL, DTRAIN_UNTIL_END, &loss) ==
          DTRAIN_ERROR_ARGUMENT);
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    RUN(test_random_evaluations);
    RUN(test_signal);
    RUN(test_refused);
    return test_summary();
}
