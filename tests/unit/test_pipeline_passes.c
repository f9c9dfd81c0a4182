/* test_pipeline_passes.c: passes of a pipeline that are not of a step, and operations that speak to other ranks.
 *
 * Two replicas with one batch norm over both (SyncBatchNorm), each of them a pipeline of two ranks or one whole model:
 * losses, evaluation, parameters, running statistics, also through a checkpoint, and forwards of the host's own
 * (dtrain_trainer_forward), of other shapes than the training's, have the same bits on every rank. */
#include "test.h"
#include "dtrain.h"
#include "ranks.h"
#include "files.h"

enum {
    LAYERS = 4,
    OF_LAYER = 5,
    PARAMS = LAYERS * OF_LAYER + 2,
    WIDTH = 8,
    MICROS = 4,
    ROWS = 6,
    STEPS = 3
};
enum { VALUES = LAYERS * (WIDTH * WIDTH + 4 * WIDTH) + WIDTH * WIDTH + WIDTH, FORWARDS = 5 };

typedef struct run {
    int pipeline;
    uint32_t schedule, chunks;
    const char *save, *load;
    double loss[4][STEPS + 1];
    float values[4][VALUES], loaded[4][VALUES], forwarded[4], made[4][FORWARDS][FORWARDS * WIDTH];
    bool whole_world; /* the batch norm's ranks are those of all stages */
    bool early;       /* the last forward returns what is of no stage */
    dtrain_result wrong[4];
    char error[4][300];
} run;

/* A rank. */
typedef struct local {
    run *r;
    int data_rank;
    uint64_t next;
    int64_t rows; /* of a forward of our own */
    dtrain_comm *batch;
    dtrain_param params[PARAMS];
    char names[PARAMS][16];
    float x[ROWS * WIDTH];
    int32_t targets[ROWS];
} local;

static void declare(local *l, int at, uint32_t unit, int64_t columns, uint32_t flags, float value)
{
    dtrain_param *p = &l->params[at];
    snprintf(l->names[at], sizeof l->names[0], "p%d", at);
    p->name = l->names[at], p->unit = unit, p->flags = flags;
    p->shape[0] = WIDTH, p->shape[1] = columns;
    p->init = columns ? DTRAIN_INIT_NORMAL : DTRAIN_INIT_CONSTANT;
    p->init_scale = columns ? 0.3f : value;
}

/* A layer: a matrix, weight and bias of the norm, running mean and variance; then a matrix and its bias. */
static void register_model(local *l)
{
    for (int at = 0; at < LAYERS * OF_LAYER; at++) {
        const int of = at % OF_LAYER;
        declare(l, at, (uint32_t)(at / OF_LAYER), of ? 0 : WIDTH, of > 2 ? DTRAIN_PARAM_BUFFER : 0,
                of == 1 || of == 4 ? 1.0f : 0.0f);
    }
    declare(l, PARAMS - 2, LAYERS, WIDTH, 0, 0);
    declare(l, PARAMS - 1, LAYERS, 0, 0, 0);
}

static dtrain_result next_batch(void *user)
{
    local *l = (local *)user;
    const uint64_t batch = 2 * l->next++ + (uint64_t)l->data_rank;
    for (int i = 0; i < ROWS * WIDTH; i++)
        l->x[i] = (float)dtrain_random_uniform(5, batch, (uint64_t)i) * (float)(1 + i % 3);
    for (int i = 0; i < ROWS; i++)
        l->targets[i] = (int32_t)(dtrain_random_uniform(6, batch, (uint64_t)i) * WIDTH);
    return DTRAIN_OK;
}

static dtrain_tensor *model(dtrain_tape *t, local *l, int64_t rows)
{
    const int64_t shape[2] = {rows, WIDTH};
    dtrain_tensor *x = dtrain_tape_input(t, DTRAIN_DTYPE_F32, 2, shape, l->x, false), *first = NULL;
    for (int i = 0; i < LAYERS; i++) {
        dtrain_param *p = &l->params[i * OF_LAYER];
        dtrain_batch_norm_desc norm;
        memset(&norm, 0, sizeof norm);
        norm.activation = DTRAIN_ACTIVATION_RELU, norm.comm = l->batch;
        norm.running_mean = &p[3], norm.running_var = &p[4];
        norm.residual = i == LAYERS - 1 ? first : NULL;
        dtrain_tape_unit(t, (uint32_t)i);
        x = dtrain_batch_norm(t, dtrain_linear(t, x, p, NULL, DTRAIN_ACTIVATION_NONE), &p[1], &p[2],
                              &norm);
        if (i == 0) first = x;
    }
    dtrain_tape_unit(t, LAYERS);
    return dtrain_linear(t, x, &l->params[PARAMS - 2], &l->params[PARAMS - 1],
                         DTRAIN_ACTIVATION_NONE);
}

static dtrain_tensor *loss_of(dtrain_tape *t, void *user)
{
    local *l = (local *)user;
    const int64_t rows = ROWS;
    dtrain_tensor *x = model(t, l, ROWS);
    return dtrain_cross_entropy(
        t, x, dtrain_tape_input(t, DTRAIN_DTYPE_I32, 1, &rows, l->targets, false), 0, 0);
}

static dtrain_tensor *rows_of(dtrain_tape *t, void *user)
{
    local *l = (local *)user;
    return model(t, l, l->rows);
}

static dtrain_tensor *input_of(dtrain_tape *t, void *user)
{
    local *l = (local *)user;
    const int64_t shape[2] = {l->rows, WIDTH};
    dtrain_tensor *x = dtrain_tape_input(t, DTRAIN_DTYPE_F32, 2, shape, l->x, false);
    return model(t, l, l->rows) ? x : NULL;
}

static dtrain_result read_values(dtrain_strategy *strategy, float *to)
{
    dtrain_result result = DTRAIN_OK;
    for (int i = 0; i < PARAMS && result == DTRAIN_OK; i++) {
        result = dtrain_strategy_read(strategy, (size_t)i, to);
        to += (i < PARAMS - 1 && i % OF_LAYER == 0) || i == PARAMS - 2 ? WIDTH * WIDTH : WIDTH;
    }
    return result;
}

/* Run passes of several shapes, and one whose count is wrong. */
static dtrain_result forwards(dtrain_trainer *trainer, local *l, int rank)
{
    dtrain_result result = DTRAIN_OK;
    for (l->rows = 1; l->rows <= FORWARDS && result == DTRAIN_OK; l->rows++) {
        result = next_batch(l);
        if (result == DTRAIN_OK)
            result = dtrain_trainer_forward(trainer, rows_of, l, l->r->made[rank][l->rows - 1],
                                            l->rows * WIDTH);
    }
    return result;
}

/* Save the state, or load another run's. */
static dtrain_result keep(dtrain_world *world, const run *r, dtrain_strategy *strategy)
{
    dtrain_state_desc all;
    dtrain_state *state = NULL;
    dtrain_checkpoint_desc to;
    dtrain_checkpoint *checkpoint = NULL;
    memset(&all, 0, sizeof all);
    memset(&to, 0, sizeof to);
    all.strategy = strategy;
    dtrain_result result = dtrain_state_create(world, &all, &state);
    to.directory = r->save, to.state = state;
    if (result == DTRAIN_OK && r->load) result = dtrain_checkpoint_load(state, r->load, NULL, NULL);
    if (result == DTRAIN_OK && r->save) result = dtrain_checkpoint_open(world, &to, &checkpoint);
    if (result == DTRAIN_OK && r->save) result = dtrain_checkpoint_save(checkpoint, STEPS, 0);
    const dtrain_result closed = dtrain_checkpoint_close(checkpoint);
    dtrain_state_destroy(state);
    return result == DTRAIN_OK ? closed : result;
}

static int rank_main(dtrain_world *world, void *user)
{
    run *r = (run *)user;
    const int rank = dtrain_world_rank(world);
    static local locals[4];
    local *l = &locals[rank];
    dtrain_mesh_desc axes;
    dtrain_mesh *mesh;
    dtrain_mesh_info at;
    dtrain_strategy_desc where;
    dtrain_pipeline_desc line;
    dtrain_strategy *strategy;
    dtrain_optimizer *optimizer;
    dtrain_trainer_desc t;
    dtrain_trainer *trainer;
    memset(l, 0, sizeof *l);
    memset(&axes, 0, sizeof axes);
    memset(&where, 0, sizeof where);
    memset(&line, 0, sizeof line);
    memset(&t, 0, sizeof t);
    axes.pipeline = r->pipeline;
    RANKS_TRY(dtrain_mesh_create(world, &axes, &mesh));
    dtrain_mesh_query(mesh, &at);
    l->r = r, l->data_rank = at.data_rank;
    register_model(l);
    RANKS_TRY(dtrain_comm_split(r->whole_world ? dtrain_world_comm(world)
                                               : dtrain_mesh_comm(mesh, DTRAIN_AXIS_DATA),
                                0, rank, &l->batch));
    line.kind = r->schedule, line.chunks = r->chunks;
    where.kind = DTRAIN_STRATEGY_DDP, where.mesh = mesh, where.pipeline = &line,
    where.init_seed = 3;
    RANKS_TRY(dtrain_strategy_create(world, l->params, PARAMS, &where, &strategy));
    const dtrain_optimizer_desc adamw = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_ADAMW);
    RANKS_TRY(dtrain_optimizer_create(world, strategy, &adamw, &optimizer));
    t.micro_batches = MICROS, t.schedule.lr = 0.01f, t.strategy = strategy, t.optimizer = optimizer;
    t.next_batch = next_batch, t.loss = loss_of, t.user = l;
    RANKS_TRY(dtrain_trainer_create(world, &t, &trainer));
    for (int step = 0; step < STEPS; step++) {
        dtrain_step_record record;
        const dtrain_result result = dtrain_trainer_step(trainer, &record);
        snprintf(r->error[rank], sizeof r->error[rank], "%s", dtrain_last_error());
        if (r->whole_world) return 1;
        RANKS_TRY(result);
        r->loss[rank][step] = record.loss;
        if (step != 1) continue;
        RANKS_TRY(forwards(trainer, l, rank)); /* the next step finds again what crosses */
        RANKS_TRY(dtrain_trainer_forward(trainer, loss_of, l, &r->forwarded[rank], 1));
    }
    RANKS_TRY(dtrain_trainer_evaluate(trainer, next_batch, l, 2, &r->loss[rank][STEPS]));
    RANKS_TRY(read_values(strategy, r->values[rank]));
    RANKS_TRY(keep(world, r, strategy));
    RANKS_TRY(read_values(strategy, r->loaded[rank]));
    l->rows = 2;
    r->wrong[rank] = dtrain_trainer_forward(trainer, r->early ? input_of : rows_of, l,
                                            r->made[rank][FORWARDS - 1], r->early ? 2 * WIDTH : 3);
    snprintf(r->error[rank], sizeof r->error[rank], "%s", dtrain_last_error());
    RANKS_TRY(dtrain_trainer_forward(trainer, rows_of, l, r->made[rank][FORWARDS - 1], 2 * WIDTH));
    RANKS_TRY(dtrain_trainer_step(trainer, NULL)); /* that was no error that stands */
    dtrain_trainer_destroy(trainer);
    dtrain_optimizer_destroy(optimizer);
    dtrain_strategy_destroy(strategy);
    dtrain_comm_destroy(l->batch);
    dtrain_mesh_destroy(mesh);
    return 0;
}

static run *run_of(int pipeline, uint32_t schedule, uint32_t chunks, const char *save,
                   const char *load)
{
    run *r = (run *)ranks_shared(sizeof *r);
    r->pipeline = pipeline, r->schedule = schedule, r->chunks = chunks, r->save = save,
    r->load = load, r->early = schedule % 2 == 1;
    ranks_run(2 * pipeline, DTRAIN_LAUNCH_PROCESSES, rank_main, r);
    return r;
}

/* All schedules beside the run without a pipeline, whose replica of a rank has its place on the data axis. */
static void test_beside_whole(void)
{
    static const uint32_t chunks[] = {1, 1, 2, 1};
    char name[16], directory[256];
    const run *whole = run_of(1, 0, 0, NULL, NULL);
    CHECK(whole->loss[0][0] != whole->loss[0][1]);
    CHECK(whole->values[0][WIDTH * WIDTH + 2 * WIDTH] != 0); /* a running mean has moved */
    for (uint32_t kind = 0; kind < 4; kind++) {
        snprintf(name, sizeof name, "kind%u", kind);
        snprintf(directory, sizeof directory, "%s", path_of(name));
        const run *r = run_of(2, kind, chunks[kind], directory, NULL);
        for (int rank = 0; rank < 4; rank++) {
            CHECK_MSG(memcmp(r->loss[rank], whole->loss[0], sizeof r->loss[0]) == 0,
                      "kind %u, rank %d: loss %.9g, evaluated %.9g; expected %.9g and %.9g", kind,
                      rank, r->loss[rank][STEPS - 1], r->loss[rank][STEPS],
                      whole->loss[0][STEPS - 1], whole->loss[0][STEPS]);
            CHECK_MSG(memcmp(r->values[rank], whole->values[0], sizeof r->values[0]) == 0,
                      "kind %u, rank %d: values", kind, rank);
            CHECK_MSG(strstr(r->error[rank],
                             kind % 2 ? "is of stage -1, and values are read from what the last one"
                                      : "a tensor of 16 elements, and values has room for 3"),
                      "kind %u, rank %d: %d, %s", kind, rank, (int)r->wrong[rank], r->error[rank]);
        }
        for (int rank = 0; rank < 4; rank++) { /* neighbours on the data axis have other samples */
            int same = -1;
            CHECK_MSG(r->forwarded[rank] == whole->forwarded[rank % 2],
                      "kind %u, rank %d: the loss as a forward is %.9g, expected %.9g", kind, rank,
                      (double)r->forwarded[rank], (double)whole->forwarded[rank % 2]);
            for (int w = 0; w < 2; w++)
                if (memcmp(r->made[rank], whole->made[w],
                           sizeof(float) * (FORWARDS - 1) * FORWARDS * WIDTH) == 0)
                    same = w;
            CHECK_MSG(same == rank % 2, "kind %u, rank %d: its forwards are those of replica %d",
                      kind, rank, same);
        }
        const run *loaded = run_of(1, 0, 0, NULL, directory);
        CHECK(memcmp(loaded->loaded[0], r->values[0], sizeof r->values[0]) == 0);
    }
}

/* A batch norm over ranks that do not have its stage is refused on all of them, before any waits. */
static void test_ranks_of_other_stages(void)
{
    run *r = (run *)ranks_shared(sizeof *r);
    r->pipeline = 2, r->whole_world = true;
    dtrain_launch_desc desc = ranks_desc(4, DTRAIN_LAUNCH_PROCESSES);
    CHECK(dtrain_launch(&desc, rank_main, r, NULL) != DTRAIN_OK);
    for (int rank = 0; rank < 4; rank++)
        CHECK_MSG(strstr(r->error[rank], "comm has 4 ranks, and a stage of the pipeline is on 2"),
                  "rank %d: %s", rank, r->error[rank]);
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    if (!files_begin("pipeline_passes")) return 1;
    RUN(test_beside_whole);
    RUN(test_ranks_of_other_stages);
    const bool removed = files_end();
    return test_summary() || !removed;
}
