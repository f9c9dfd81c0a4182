/* test_pipeline_faults.c: what goes wrong in a step over a pipeline, and what goes on after it.
 *
 * A rank dies, stalls, fails in its loss or its data, disagrees in its settings: every rank has an error in time, and
 * nothing is left. Values that are not finite in one stage are seen by all. A run that ends and is resumed in another
 * layout has the losses and the parameters of one that has not ended, to the bit. */
#include "test.h"
#include "dtrain.h"
#include "ranks.h"
#include "files.h"

enum {
    RANKS = 8,
    UNITS = 5,
    PARAMS = 2 + 2 * (UNITS - 2),
    ROWS = 4,
    WIDTH = 8,
    VOCAB = 12,
    STEPS = 6,
    MOST = 1024
};

enum misfortune {
    NOTHING,
    DIES,
    STALLS,
    LOSS_FAILS,
    LOSS_IS_NONE,
    DATA_FAILS,
    DATA_ENDS,
    EVALUATION_ENDS,
    ENDS_AND_FAILS, /* the data of replica 1, on all of its ranks, and then the loss of a rank of replica 0 */
    NOT_FINITE,
    OVERFLOWS,
    OTHER_SCHEDULE,
    OTHER_UNITS,
    OTHER_SHAPES,
    OTHER_OPERATIONS,
    FEWER_OPERATIONS, /* where a tensor that crosses would be made is one of the next stage */
    WANTS_GRADIENT,
    READS_VALUES,
    EARLY_LOSS, /* the last stage does nothing for it */
    LONG_LOSS,  /* it is not one number */
    STEPS_BACK,
    LACKS,  /* a parameter has no gradient in step `step`, which fails; the next one is taken */
    STOPS,  /* a signal asks one rank to */
    DRIFTS, /* an element of one rank's parameter `drifting` changes */
    ALONE,  /* a rank makes collective `lone` alone before step `step` */
};
enum { OPENS, READS_LAST, EXPORTS, READS, VERIFIES, EVALUATES, BARRIER, STEPS_MORE, GATHERS, LONE };

typedef struct job {
    int tensor, pipeline, data;
    uint32_t schedule, chunks, micros, kind;
    enum misfortune what;
    int rank, step, micro; /* where it happens */
    const char *save, *load;
    int from, to, lost;  /* steps; a rank dies behind step `lost` */
    bool graph, fetches; /* loss fetches its batch itself */
    bool tied, keep, compresses;
    bool warms; /* the first two units are frozen in the first two steps */
    int drifting, lone;
    uint32_t units[RANKS]; /* [0] = 0: evenly */
    /* what came of it */
    dtrain_result result[RANKS];
    char text[RANKS][1024];
    double when[RANKS], loss[RANKS][STEPS], scale[RANKS][STEPS];
    uint64_t skipped[RANKS];
    bool stops[RANKS][STEPS];
    float values[RANKS][MOST];
    int32_t over;
} job;

typedef struct local {
    job *j;
    int rank, data_rank, next, calls; /* calls: of loss, the survey of each step included */
    dtrain_param params[PARAMS];
    char names[PARAMS][16];
    int32_t tokens[ROWS], targets[ROWS];
    float factors[ROWS * WIDTH];
    dtrain_world *world;
    dtrain_mesh *mesh;
    dtrain_strategy *strategy;
    dtrain_optimizer *optimizer;
    dtrain_trainer *trainer;
    dtrain_state *state;
} local;

/* Whether it happens here: in this micro-batch, counted from the start. */
static bool happens(const local *l, enum misfortune what, int micro)
{
    const job *j = l->j;
    return j->what == what && l->rank == j->rank && micro == j->step * (int)j->micros + j->micro;
}

static void register_model(local *l)
{
    for (int i = 0; i < PARAMS; i++) {
        dtrain_param *p = &l->params[i];
        const bool bias = i && i < PARAMS - 1 && i % 2 == 0;
        snprintf(l->names[i], sizeof l->names[0], "w%d", i);
        p->name = l->names[i];
        p->unit = (uint32_t)(i + 1) / 2;
        p->shape[0] = i == 0 || i == PARAMS - 1 ? VOCAB : WIDTH;
        p->shape[1] = bias ? 0 : WIDTH;
        p->init = DTRAIN_INIT_NORMAL;
        p->init_scale = i == 0 && l->j->what == OVERFLOWS ? 1e-36f : 0.3f;
    }
    l->params[0].cut.axis = l->params[PARAMS - 1].cut.axis = DTRAIN_CUT_ROWS;
    if (l->j->tied) l->params[PARAMS - 1].alias_of = &l->params[0];
}

static dtrain_result next_batch(void *user)
{
    local *l = (local *)user;
    const int micro = l->next++;
    if (happens(l, STOPS, micro)) raise(SIGTERM);
    if (happens(l, DATA_FAILS, micro)) return dtrain_fail(DTRAIN_ERROR_DATA, "the hamster ate it");
    if ((l->j->what == DATA_ENDS || l->j->what == EVALUATION_ENDS) && l->rank == l->j->rank &&
        micro >= l->j->step * (int)l->j->micros + l->j->micro)
        return dtrain_fail(DTRAIN_ERROR_END, "no more");
    if (l->j->what == ENDS_AND_FAILS && l->data_rank == 1 && micro > 0)
        return dtrain_fail(DTRAIN_ERROR_END, "no more");
    for (int i = 0; i < ROWS; i++) {
        const int at = (micro * l->j->data + l->data_rank) * ROWS + i;
        l->tokens[i] = at * 7 % VOCAB;
        l->targets[i] = (at * 11 + 5) % VOCAB;
    }
    for (int i = 0; i < ROWS * WIDTH; i++) l->factors[i] = l->j->what == OVERFLOWS ? 1e36f : 1;
    if (l->j->what == NOT_FINITE && l->data_rank == l->j->rank &&
        micro == l->j->step * (int)l->j->micros + l->j->micro)
        l->factors[0] = NAN;
    return DTRAIN_OK;
}

/* What happens in the loss of micro-batch `micro`; false: go on. */
static void in_loss(local *l, int micro)
{
    if (happens(l, DIES, micro)) raise(SIGKILL);
    if (happens(l, STALLS, micro))
        (void)ranks_await(&l->j->over, l->j->pipeline * l->j->data * l->j->tensor - 1);
}

static dtrain_tensor *loss_of(dtrain_tape *t, void *user)
{
    local *l = (local *)user;
    const int each = (int)l->j->micros + 1, call = l->calls++; /* calls of a step */
    const int micro = call % each ? call / each * (each - 1) + call % each - 1 : -1;
    const int64_t rows = ROWS - (l->j->what == OTHER_SHAPES && micro == 1),
                  shape[2] = {rows, WIDTH};
    const bool wants = l->j->what == WANTS_GRADIENT;
    in_loss(l, micro);
    dtrain_tensor *tokens = dtrain_tape_input(t, DTRAIN_DTYPE_I32, 1, &rows, l->tokens, false);
    dtrain_tensor *factors = dtrain_tape_input(t, DTRAIN_DTYPE_F32, 2, shape, l->factors, wants);
    dtrain_tape_unit(t, l->j->what == STEPS_BACK ? UNITS - 1 : 0);
    dtrain_tensor *x =
        dtrain_multiply(t, dtrain_embedding(t, tokens, &l->params[0], NULL), factors);
    dtrain_tensor *early = l->j->what == EARLY_LOSS ? dtrain_mean(t, x) : NULL;
    for (int u = 1; u < UNITS - 1; u++) {
        dtrain_tape_unit(t, (uint32_t)u);
        if ((happens(l, LOSS_FAILS, micro) || happens(l, ENDS_AND_FAILS, micro)) && u == 2)
            x = dtrain_add(t, x, tokens);
        if (l->j->what == READS_VALUES && u == UNITS - 2) {
            float value[ROWS * WIDTH];
            if (dtrain_tensor_read(t, x, value, NULL) != DTRAIN_OK) return NULL;
        }
        const bool lacks =
            l->j->what == LACKS && u == 2 && micro < (l->j->step + 1) * (int)l->j->micros;
        x = dtrain_linear(t, x, &l->params[2 * u - 1], lacks ? NULL : &l->params[2 * u],
                          DTRAIN_ACTIVATION_GELU);
        if (l->j->what == OTHER_OPERATIONS && micro == 1 && u == 1) x = dtrain_add(t, x, x);
        if (l->j->what == FEWER_OPERATIONS && micro != 1 && u == 2) x = dtrain_add(t, x, x);
    }
    dtrain_tape_unit(t, UNITS - 1);
    x = dtrain_linear(t, x, &l->params[PARAMS - 1], NULL, DTRAIN_ACTIVATION_NONE);
    if (l->j->what == LONG_LOSS) return x;
    x = dtrain_cross_entropy(
        t, x, dtrain_tape_input(t, DTRAIN_DTYPE_I32, 1, &rows, l->targets, false), 0, 0);
    return happens(l, LOSS_IS_NONE, micro) ? NULL : early ? early : x;
}

/* ---- a rank ---- */

static dtrain_result create(local *l)
{
    const job *j = l->j;
    const bool other = l->rank == j->rank;
    dtrain_mesh_desc axes;
    dtrain_strategy_desc desc;
    dtrain_pipeline_desc line;
    dtrain_trainer_desc t;
    dtrain_mesh_info at;
    memset(&axes, 0, sizeof axes);
    memset(&desc, 0, sizeof desc);
    memset(&line, 0, sizeof line);
    memset(&t, 0, sizeof t);
    axes.tensor = j->tensor, axes.pipeline = j->pipeline, axes.data = j->data;
    TRY(dtrain_mesh_create(l->world, &axes, &l->mesh));
    dtrain_mesh_query(l->mesh, &at);
    l->data_rank = at.data_rank;
    register_model(l);
    line.kind = j->schedule, line.chunks = j->chunks;
    line.units = j->units[0] ? j->units : NULL;
    static const uint32_t last[2] = {1, UNITS - 1};
    if (j->what == OTHER_SCHEDULE && other) line.kind = DTRAIN_PIPELINE_GPIPE;
    if (j->what == OTHER_UNITS && other) line.units = last;
    dtrain_compression_desc compression;
    memset(&compression, 0, sizeof compression);
    compression.kind = DTRAIN_COMPRESSION_TOPK;
    if (j->compresses) desc.compression = &compression;
    desc.keep_after_forward = j->keep;
    if (j->what == LACKS || j->warms) desc.missing_gradient = DTRAIN_MISSING_GRADIENT_ERROR;
    desc.node_size = j->kind == DTRAIN_STRATEGY_HYBRID_SHARD ? 1 : 0;
    desc.kind = j->kind, desc.mesh = l->mesh, desc.pipeline = &line, desc.init_seed = 5;
    TRY(dtrain_strategy_create(l->world, l->params, PARAMS, &desc, &l->strategy));
    const dtrain_optimizer_desc how = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_ADAMW);
    TRY(dtrain_optimizer_create(l->world, l->strategy, &how, &l->optimizer));
    t.micro_batches = j->micros, t.schedule.lr = 0.01f, t.clip = 0.5f, t.graph = j->graph;
    if (j->what == OVERFLOWS) t.loss_scaling.scale = 65536;
    t.strategy = l->strategy, t.optimizer = l->optimizer;
    t.next_batch = j->fetches ? NULL : next_batch, t.loss = loss_of, t.user = l;
    return dtrain_trainer_create(l->world, &t, &l->trainer);
}

static void warm(local *l, int step)
{
    for (int i = 0; i < PARAMS; i++)
        l->params[i].flags =
            l->j->warms && step < 2 && l->params[i].unit < 2 ? DTRAIN_PARAM_FROZEN : 0;
}

static dtrain_result save(local *l, int64_t step)
{
    dtrain_checkpoint_desc desc;
    dtrain_checkpoint *checkpoint = NULL;
    memset(&desc, 0, sizeof desc);
    desc.directory = l->j->save, desc.state = l->state;
    TRY(dtrain_checkpoint_open(l->world, &desc, &checkpoint));
    dtrain_result result = dtrain_checkpoint_save(checkpoint, step, NAN);
    const dtrain_result closed = dtrain_checkpoint_close(checkpoint);
    return result == DTRAIN_OK ? closed : result;
}

static dtrain_result call_alone(local *l)
{
    float values[MOST];
    double loss;
    dtrain_checkpoint_desc desc;
    dtrain_checkpoint *checkpoint = NULL;
    dtrain_step_record record;
    memset(&desc, 0, sizeof desc);
    desc.directory = path_of("alone"), desc.state = l->state;
    switch (l->j->lone) {
    case OPENS: TRY(dtrain_checkpoint_open(l->world, &desc, &checkpoint)); break;
    case READS_LAST: return dtrain_strategy_read(l->strategy, PARAMS - 1, values);
    case EXPORTS: return dtrain_checkpoint_export(l->strategy, path_of("alone.safetensors"), NULL);
    case READS: return dtrain_strategy_read(l->strategy, 0, values);
    case VERIFIES: return dtrain_strategy_verify(l->strategy, NULL);
    case EVALUATES: return dtrain_trainer_evaluate(l->trainer, next_batch, l, 2, &loss);
    case BARRIER: return dtrain_barrier(dtrain_world_comm(l->world));
    case STEPS_MORE: return dtrain_trainer_step(l->trainer, &record);
    default: return dtrain_world_all_gather(l->world, "x", 1, values);
    }
    return dtrain_checkpoint_close(checkpoint);
}

static dtrain_result train(local *l)
{
    job *j = l->j;
    dtrain_state_desc desc;
    memset(&desc, 0, sizeof desc);
    TRY(create(l));
    warm(l, j->from);
    desc.strategy = l->strategy, desc.optimizer = l->optimizer, desc.trainer = l->trainer;
    TRY(dtrain_state_create(l->world, &desc, &l->state));
    if (j->load) TRY(dtrain_checkpoint_load(l->state, j->load, NULL, NULL));
    l->next = j->from * (int)j->micros;
    for (int step = j->from; step < j->to; step++) {
        dtrain_step_record record;
        warm(l, step);
        if (j->what == ALONE && step == j->step && l->rank == j->rank) TRY(call_alone(l));
        const dtrain_result taken = dtrain_trainer_step(l->trainer, &record);
        if (j->what == LACKS && step == j->step) {
            CHECK_MSG(taken != DTRAIN_OK && strstr(dtrain_last_error(), "no gradient") &&
                          strstr(dtrain_last_error(), "\"w4\""),
                      "rank %d: %s", l->rank, dtrain_last_error());
            continue;
        }
        TRY(taken);
        j->loss[l->rank][step] = record.loss, j->scale[l->rank][step] = record.loss_scale;
        j->skipped[l->rank] = record.skipped_steps, j->stops[l->rank][step] = record.stop_requested;
        if (j->save && step + 1 == j->to - (j->lost > 0)) TRY(save(l, step + 1));
        if (j->lost == step + 1 && l->rank == j->rank) raise(SIGKILL);
    }
    if (j->what == EVALUATION_ENDS) {
        double loss;
        TRY(dtrain_trainer_evaluate(l->trainer, next_batch, l, j->micros, &loss));
    }
    if (j->what == DRIFTS && l->rank == j->rank) l->params[j->drifting].value[1] += 1;
    TRY(dtrain_strategy_verify(l->strategy, NULL));
    if (j->what == DRIFTS) return DTRAIN_OK; /* what follows would fail by itself */
    float *to = j->values[l->rank];
    for (size_t i = 0; i < PARAMS; i++) {
        TRY(dtrain_strategy_read(l->strategy, i, to));
        to += l->params[i].shape[0] * (l->params[i].shape[1] ? l->params[i].shape[1] : 1);
    }
    return DTRAIN_OK;
}

static int rank_main(dtrain_world *world, void *user)
{
    local l;
    memset(&l, 0, sizeof l);
    l.j = (job *)user, l.world = world, l.rank = dtrain_world_rank(world);
    const dtrain_result result = train(&l);
    snprintf(l.j->text[l.rank], sizeof l.j->text[0], "%s",
             result == DTRAIN_OK ? "" : dtrain_last_error());
    l.j->when[l.rank] = test_seconds();
    l.j->result[l.rank] = result;
    ranks_count(&l.j->over);
    dtrain_state_destroy(l.state);
    dtrain_trainer_destroy(l.trainer);
    dtrain_optimizer_destroy(l.optimizer);
    dtrain_strategy_destroy(l.strategy);
    dtrain_mesh_destroy(l.mesh);
    return result != DTRAIN_OK;
}

static int ranks_of(const job *j) { return j->tensor * j->pipeline * j->data; }

static job job_of(int pipeline, int data, uint32_t schedule, enum misfortune what)
{
    job j;
    memset(&j, 0, sizeof j);
    j.tensor = 1, j.pipeline = pipeline, j.data = data, j.schedule = schedule, j.what = what;
    j.chunks = schedule == DTRAIN_PIPELINE_INTERLEAVED ? 2 : 1;
    j.micros = 4, j.kind = DTRAIN_STRATEGY_DDP, j.to = 3;
    return j;
}

/* Run a job in shared memory, which the caller unmaps. */
static job *launch(const job *how, uint32_t mode, uint32_t timeout_ms, dtrain_result *result)
{
    job *j = (job *)ranks_shared(sizeof *j);
    *j = *how;
    for (int r = 0; r < RANKS; r++) j->result[r] = DTRAIN_OK;
    dtrain_launch_desc desc = ranks_desc(ranks_of(j), mode);
    if (timeout_ms) desc.timeout_ms = timeout_ms;
    desc.catch_signals = j->what == STOPS;
    const double begin = test_seconds();
    *result = ranks_launch(&desc, rank_main, j, NULL);
    for (int r = 0; r < ranks_of(j); r++) j->when[r] -= begin;
    return j;
}

/* Every rank but a dead one has an error with these words, if any, in time. */
static void check_errors(const job *how, uint32_t mode, uint32_t timeout_ms, const char *place,
                         const char *words)
{
    dtrain_result result;
    job *j = launch(how, mode, timeout_ms, &result);
    CHECK(result != DTRAIN_OK);
    for (int r = 0; r < ranks_of(j); r++) {
        const char *text = j->text[r];
        if (how->what == DIES && r == how->rank) continue;
        if (getenv("SHOW")) fprintf(stderr, "%d: %.2f s: %s\n", r, j->when[r], text);
        CHECK_MSG(j->result[r] != DTRAIN_OK, "misfortune %d: rank %d has no error", (int)how->what,
                  r);
        CHECK_MSG(j->when[r] < RANKS_SOON, "misfortune %d: rank %d took %.1f s", (int)how->what, r,
                  j->when[r]);
        CHECK_MSG(strstr(text, place) && strstr(text, words),
                  "misfortune %d, rank %d: \"%s\", expected \"%s\", \"%s\"", (int)how->what, r,
                  text, place, words);
    }
    munmap(j, sizeof *j);
}

static void test_loss_fails(void)
{
    job j = job_of(2, 1, DTRAIN_PIPELINE_1F1B, LOSS_FAILS);
    j.rank = 1, j.micro = 2;
    check_errors(&j, DTRAIN_LAUNCH_THREADS, 0,
                 "stage 1 of 2, FORWARD of micro-batch 2:", "dtrain_add");
    j = job_of(3, 1, DTRAIN_PIPELINE_ZB_H1, LOSS_FAILS);
    j.rank = 0, j.step = 1, j.micro = 3;
    check_errors(&j, DTRAIN_LAUNCH_PROCESSES, 0,
                 "stage 0 of 3, FORWARD of micro-batch 3:", "dtrain_add");
    j = job_of(2, 2, DTRAIN_PIPELINE_GPIPE, LOSS_IS_NONE);
    j.rank = 3, j.micro = 1;
    check_errors(&j, DTRAIN_LAUNCH_THREADS, 0,
                 "stage 1 of 2, FORWARD of micro-batch 1:", "loss returned NULL");
}

/* Data that has ended on all ranks of a replica is no reason of another error. */
static void test_loss_fails_beside_an_end(void)
{
    dtrain_result result;
    job j = job_of(2, 2, DTRAIN_PIPELINE_1F1B, ENDS_AND_FAILS);
    j.rank = 0, j.micro = 2;
    job *run = launch(&j, DTRAIN_LAUNCH_THREADS, 0, &result);
    for (int r = 0; r < 4; r++)
        CHECK_MSG(strstr(run->text[r], "dtrain_add") && !strstr(run->text[r], "had ended"),
                  "rank %d: %s", r, run->text[r]);
    munmap(run, sizeof *run);
}

static void test_data_fails(void)
{
    job j = job_of(2, 2, DTRAIN_PIPELINE_INTERLEAVED, DATA_FAILS);
    j.rank = 2, j.step = 1, j.micro = 2;
    check_errors(&j, DTRAIN_LAUNCH_THREADS, 0, "FORWARD of micro-batch 2:", "the hamster ate it");
}

/* Ranks of a pipeline must have the same data: whichever of them ends first, and where. */
static void test_data_ends_elsewhere(void)
{
    for (int rank = 0; rank < 2; rank++)
        for (int micro = rank; micro < 4; micro += 2) {
            job j =
                job_of(2, 1, micro / 2 ? DTRAIN_PIPELINE_ZB_H1 : DTRAIN_PIPELINE_1F1B, DATA_ENDS);
            j.rank = rank, j.micro = micro;
            check_errors(&j, DTRAIN_LAUNCH_THREADS, RANKS_SHORT_MS, "", "");
        }
    job j = job_of(2, 1, DTRAIN_PIPELINE_1F1B, DATA_ENDS); /* a rank that waits says why itself */
    dtrain_result result;
    j.rank = 1, j.micro = 0;
    job *run = launch(&j, DTRAIN_LAUNCH_THREADS, RANKS_SHORT_MS, &result);
    CHECK_MSG(strstr(run->text[1], "the data of this rank had ended before micro-batch 0"), "%s",
              run->text[1]);
    CHECK(!strstr(run->text[0], "had ended"));
    munmap(run, sizeof *run);
    j = job_of(2, 2, DTRAIN_PIPELINE_1F1B, DATA_ENDS); /* messages come past each other */
    j.rank = 1, j.micro = 2;
    check_errors(&j, DTRAIN_LAUNCH_THREADS, 0,
                 "rank 3 had data for 4 of 4 micro-batches, and rank 1",
                 "for 2; give both the same samples");
    j = job_of(2, 2, DTRAIN_PIPELINE_1F1B, EVALUATION_ENDS); /* a message is left */
    j.rank = 2, j.step = j.to, j.micro = 3;
    check_errors(&j, DTRAIN_LAUNCH_THREADS, 0,
                 "dtrain_trainer_evaluate: rank 2 had data for 3 of 4 micro-batches, and rank 0",
                 "for 4; give both the same samples");
}

static void test_dead_and_stalled(void)
{
    job j = job_of(3, 2, DTRAIN_PIPELINE_1F1B, DIES);
    j.rank = 2, j.micro = 1;
    check_errors(&j, DTRAIN_LAUNCH_PROCESSES, 0, "", "rank 2");
    j = job_of(3, 1, DTRAIN_PIPELINE_ZB_H1, DIES);
    j.rank = 1, j.step = 1, j.micro = 2;
    check_errors(&j, DTRAIN_LAUNCH_PROCESSES, 0, " of micro-batch ", "rank 1");
    j = job_of(3, 1, DTRAIN_PIPELINE_1F1B, STALLS);
    j.rank = 1, j.micro = 2;
    check_errors(&j, DTRAIN_LAUNCH_THREADS, RANKS_SHORT_MS, " of micro-batch ", "stage ");
}

/* A collective that one rank makes alone: all hear of it at the deadline, and who waits for whom. */
static void test_alone(void)
{
    static const struct {
        int pipeline, data;
        uint32_t schedule;
    } meshes[] = {
        {2, 1, DTRAIN_PIPELINE_1F1B}, {2, 2, DTRAIN_PIPELINE_ZB_H1}, {4, 1, DTRAIN_PIPELINE_GPIPE}};
    for (int lone = 0; lone < LONE; lone++)
        for (int mesh = 0; mesh < 3; mesh++) {
            if (mesh != lone % 2 * 2 && !test_full()) continue;
            dtrain_result result;
            job how =
                job_of(meshes[mesh].pipeline, meshes[mesh].data, meshes[mesh].schedule, ALONE);
            how.lone = lone, how.step = 1, how.rank = (lone + mesh) % ranks_of(&how);
            job *j = launch(&how, lone % 2 ? DTRAIN_LAUNCH_THREADS : DTRAIN_LAUNCH_PROCESSES,
                            RANKS_SHORT_MS / 2, &result);
            bool named = false;
            CHECK(result != DTRAIN_OK);
            for (int r = 0; r < ranks_of(j); r++) {
                const char *text = j->text[r];
                char who[32];
                snprintf(who, sizeof who, "rank %d", how.rank);
                named = named || strstr(text, who);
                CHECK_MSG(
                    j->result[r] != DTRAIN_OK && j->when[r] < RANKS_SOON && strstr(text, "rank "),
                    "call %d of rank %d of %d, rank %d: %s", lone, how.rank, ranks_of(j), r, text);
            }
            CHECK_MSG(named, "call %d of rank %d: nobody names it", lone, how.rank);
            munmap(j, sizeof *j);
        }
}

static void test_settings_differ(void)
{
    job j = job_of(2, 2, DTRAIN_PIPELINE_1F1B, OTHER_SCHEDULE);
    j.rank = 3;
    check_errors(&j, DTRAIN_LAUNCH_THREADS, 0, "rank 3", "pipeline.kind");
    j.what = OTHER_UNITS, j.rank = 1;
    check_errors(&j, DTRAIN_LAUNCH_PROCESSES, 0, "rank 1", "pipeline.units");
}

static void test_refused(void)
{
    const uint32_t mode = DTRAIN_LAUNCH_THREADS;
    job j = job_of(2, 1, DTRAIN_PIPELINE_1F1B, NOTHING);
    j.graph = true;
    check_errors(&j, mode, 0, "dtrain_trainer_create", "use graph = false");
    j.graph = false, j.fetches = true;
    check_errors(&j, mode, 0, "dtrain_trainer_create", "give next_batch");
    j = job_of(2, 2, DTRAIN_PIPELINE_1F1B, NOTHING);
    static const char *const kinds[] = {"shard_grad_op", "full_shard", "zero3", "hybrid_shard"};
    for (uint32_t kind = 0; kind < 8; kind++) {
        char words[120];
        snprintf(words, sizeof words, "and %s gathers or reduces them", kinds[kind / 2]);
        j.kind = DTRAIN_STRATEGY_SHARD_GRAD_OP + kind / 2, j.keep = kind % 2;
        check_errors(&j, mode, 0, words, "use DTRAIN_STRATEGY_DDP or DTRAIN_STRATEGY_ZERO1");
    }
    j.kind = DTRAIN_STRATEGY_ZERO1;
    check_errors(&j, mode, 0, "keep_after_forward", "never shards parameters");
    j.keep = false, j.compresses = true;
    check_errors(&j, mode, 0, "compression: ", "use DTRAIN_STRATEGY_DDP, or reduce_dtype");
    j.kind = DTRAIN_STRATEGY_DDP, j.tied = true;
    check_errors(&j, mode, 0, "compression: \"w0\" is tied between stages",
                 "leave compression or the tie out");
    j = job_of(2, 1, DTRAIN_PIPELINE_1F1B, NOTHING), j.units[0] = 5;
    check_errors(&j, mode, 0, "gives stage 1 of 2 no unit", "take fewer ranks or chunks");
    j.units[0] = j.units[1] = 2;
    check_errors(&j, mode, 0, "add up to 4 units", "belong to 5");
    j = job_of(6, 1, DTRAIN_PIPELINE_1F1B, NOTHING);
    check_errors(&j, mode, 0, "leave a stage of 6", "more units");
    static const struct {
        enum misfortune what;
        const char *place, *words;
    } losses[] = {
        {WANTS_GRADIENT, "dtrain_tape_input", "leave requires_grad false"},
        {READS_VALUES, "dtrain_tensor_read", "a loss that reads values cannot be cut into stages"},
        {OTHER_SHAPES, " of micro-batch 1:", ""},
        {OTHER_OPERATIONS, " of micro-batch 1:", "must not depend on values"},
        {FEWER_OPERATIONS, " of micro-batch 1:", "must not depend on values"},
        {LONG_LOSS, "dtrain_trainer: ", "the loss has 48 elements, not one; use dtrain_mean"},
        {EARLY_LOSS, "dtrain_trainer: what loss returned is of stage 0",
         "values are read from what the last one, 1, makes"},
        {STEPS_BACK, "unit 1 is on stage 0", "in which their first parameters are registered"},
    };
    for (size_t i = 0; i < sizeof losses / sizeof *losses; i++) {
        j = job_of(2, 1, DTRAIN_PIPELINE_1F1B, losses[i].what);
        check_errors(&j, mode, 0, losses[i].place, losses[i].words);
    }
}

/* A value that is not finite: without loss scaling the error of all ranks; with it all of them skip the step, and the
 * scale halves everywhere, though stage 0 alone has seen it. */
static void test_not_finite(void)
{
    dtrain_result result;
    job j = job_of(2, 2, DTRAIN_PIPELINE_ZB_H1, NOT_FINITE);
    j.rank = 1, j.step = 1, j.micro = 2;
    check_errors(&j, DTRAIN_LAUNCH_THREADS, 0, "at step 2 the loss of rank 3 is nan",
                 "lower the learning rate");
    j = job_of(2, 2, DTRAIN_PIPELINE_1F1B, OVERFLOWS);
    j.to = 2;
    job *run = launch(&j, DTRAIN_LAUNCH_PROCESSES, 0, &result);
    CHECK(result == DTRAIN_OK);
    for (int r = 0; r < 4; r++)
        CHECK_MSG(run->skipped[r] == 2 && run->scale[r][0] == 65536 && run->scale[r][1] == 32768 &&
                      isfinite(run->loss[r][1]) && run->loss[r][1] == run->loss[0][1],
                  "rank %d skipped %llu, scales %g and %g, losses %g and %g: %s", r,
                  (unsigned long long)run->skipped[r], run->scale[r][0], run->scale[r][1],
                  run->loss[r][0], run->loss[r][1], run->text[r]);
    munmap(run, sizeof *run);
}

/* A step that lacks a gradient of one stage is an error of all ranks, and the next one is taken. */
static void test_lacks(void)
{
    dtrain_result result;
    job j = job_of(2, 2, DTRAIN_PIPELINE_ZB_H1, LACKS);
    job *run = launch(&j, DTRAIN_LAUNCH_THREADS, 0, &result);
    CHECK_MSG(result == DTRAIN_OK, "%s", run->text[0]);
    for (int r = 0; r < 4; r++)
        CHECK_MSG(run->loss[r][1] > 0 && run->loss[r][2] == run->loss[0][2], "rank %d: %g, %g", r,
                  run->loss[r][1], run->loss[r][2]);
    munmap(run, sizeof *run);
}

/* A signal to a rank of one stage: all ranks see it in the same step. */
static void test_stops(void)
{
    dtrain_result result;
    job j = job_of(2, 2, DTRAIN_PIPELINE_1F1B, STOPS);
    for (j.rank = 0; j.rank < 4; j.rank += 3) {
        j.step = 1, j.micro = 1;
        job *run = launch(&j, DTRAIN_LAUNCH_PROCESSES, 0, &result);
        CHECK_MSG(result == DTRAIN_OK, "%s", run->text[0]);
        for (int r = 0; r < 4; r++)
            CHECK_MSG(!run->stops[r][0] && run->stops[r][1], "rank %d: %d %d", r, run->stops[r][0],
                      run->stops[r][1]);
        munmap(run, sizeof *run);
    }
}

/* An element that has changed on one rank of any stage: verify fails on all and names it. */
static void test_drifts(void)
{
    job j = job_of(2, 2, DTRAIN_PIPELINE_1F1B, DRIFTS);
    j.rank = 1;
    check_errors(&j, DTRAIN_LAUNCH_THREADS, 0, "rank 1", "\"w0\"");
    j.rank = 3, j.drifting = PARAMS - 1;
    check_errors(&j, DTRAIN_LAUNCH_THREADS, 0, "rank 3", "\"w7\"");
    j = job_of(3, 1, DTRAIN_PIPELINE_ZB_H1, DRIFTS); /* the copies of two stages */
    j.rank = 2, j.tied = true;
    check_errors(&j, DTRAIN_LAUNCH_THREADS, 0, "rank 2", "\"w0\"");
}

/* ---- it goes on ---- */

typedef struct layout {
    int tensor, pipeline, data;
    uint32_t schedule, kind;
} layout;

/* A run of a layout; every step has the same eight batches in all of them. */
static job job_in(const layout *at, int from, int to)
{
    job j = job_of(at->pipeline, at->data, at->schedule, NOTHING);
    j.tensor = at->tensor, j.kind = at->kind, j.micros = 8 / (uint32_t)at->data;
    j.from = from, j.to = to;
    return j;
}

/* Layouts that are cut along the pipeline alone have equal bits; others add up in another order. */
static void check_same(const job *run, const job *whole, bool exact)
{
    const double within = exact ? 0 : 1e-4;
    for (int r = 0; r < ranks_of(run); r++) {
        int differ = 0;
        for (int step = run->from; step < STEPS; step++)
            CHECK_MSG(fabs(run->loss[r][step] - whole->loss[0][step]) <= within,
                      "%d x %d x %d, rank %d: loss %.9g of step %d, expected %.9g", run->tensor,
                      run->pipeline, run->data, r, run->loss[r][step], step, whole->loss[0][step]);
        for (int i = 0; i < MOST; i++)
            differ +=
                !(fabs((double)run->values[r][i] - (double)whole->values[0][i]) <= 10 * within);
        CHECK_MSG(differ == 0, "%d x %d x %d: %d elements of rank %d differ", run->tensor,
                  run->pipeline, run->data, differ, r);
    }
}

/* Run three steps and save them; where `lost`, begin another one behind them, in which a rank is killed. */
static void run_and_save(const layout *at, bool lost, bool warms, const char *directory)
{
    dtrain_result result;
    job j = job_in(at, 0, STEPS / 2 + lost);
    j.save = directory, j.rank = 1, j.lost = lost ? j.to : 0, j.warms = warms;
    job *run = launch(&j, lost ? DTRAIN_LAUNCH_PROCESSES : DTRAIN_LAUNCH_THREADS, 0, &result);
    CHECK_MSG((result == DTRAIN_OK) == !lost, "%s", run->text[0]);
    munmap(run, sizeof *run);
}

static job *run_on(const layout *at, bool warms, const char *directory)
{
    dtrain_result result;
    job j = job_in(at, directory ? STEPS / 2 : 0, STEPS);
    j.load = directory, j.warms = warms;
    job *run = launch(&j, DTRAIN_LAUNCH_THREADS, 0, &result);
    CHECK_MSG(result == DTRAIN_OK, "%s", run->text[0]);
    return run;
}

/* Three steps in one layout, saved, and three more in the next: as six steps in that one without a pipeline. */
static void test_resumed_elsewhere(void)
{
    static const layout layouts[] = {{1, 1, 2, DTRAIN_PIPELINE_1F1B, DTRAIN_STRATEGY_ZERO1},
                                     {1, 2, 2, DTRAIN_PIPELINE_1F1B, DTRAIN_STRATEGY_DDP},
                                     {1, 2, 2, DTRAIN_PIPELINE_INTERLEAVED, DTRAIN_STRATEGY_ZERO1},
                                     {1, 4, 2, DTRAIN_PIPELINE_ZB_H1, DTRAIN_STRATEGY_ZERO1},
                                     {1, 2, 2, DTRAIN_PIPELINE_INTERLEAVED, DTRAIN_STRATEGY_DDP},
                                     {1, 3, 2, DTRAIN_PIPELINE_GPIPE, DTRAIN_STRATEGY_ZERO1},
                                     {2, 2, 2, DTRAIN_PIPELINE_1F1B, DTRAIN_STRATEGY_ZERO1},
                                     {2, 2, 2, DTRAIN_PIPELINE_ZB_H1, DTRAIN_STRATEGY_DDP},
                                     {2, 4, 1, DTRAIN_PIPELINE_1F1B, DTRAIN_STRATEGY_DDP},
                                     {1, 2, 4, DTRAIN_PIPELINE_INTERLEAVED, DTRAIN_STRATEGY_ZERO1}};
    const size_t count = sizeof layouts / sizeof *layouts;
    const char *directory = path_of("saved");
    for (size_t i = 0; i < count; i++) {
        const layout *from = &layouts[i], *to = &layouts[(i + 1) % count];
        const layout plain = {to->tensor, 1, to->data, 0, DTRAIN_STRATEGY_DDP};
        char command[300];
        const bool warms = i % 3 == 0;
        run_and_save(from, i % 2 == 1, warms, directory);
        job *run = run_on(to, warms, directory), *whole = run_on(&plain, warms, NULL);
        check_same(run, whole, from->tensor == to->tensor && from->data == to->data);
        munmap(run, sizeof *run);
        munmap(whole, sizeof *whole);
        snprintf(command, sizeof command, "rm -r %s", directory);
        CHECK(system(command) == 0);
    }
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    if (!files_begin("pipeline_faults")) return 1;
    RUN(test_loss_fails);
    RUN(test_loss_fails_beside_an_end);
    RUN(test_data_fails);
    RUN_BESIDE(test_data_ends_elsewhere);
    RUN_BESIDE(test_dead_and_stalled);
    RUN_BESIDE(test_alone);
    RUN(test_settings_differ);
    RUN(test_refused);
    RUN(test_not_finite);
    RUN(test_lacks);
    RUN(test_stops);
    RUN(test_drifts);
    RUN_BESIDE(test_resumed_elsewhere);
    const int failed = test_summary();
    return !files_end() || failed;
}
