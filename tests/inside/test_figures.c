/* test_figures.c: what every rank tells of a step: figures of ranks of which one is slow, operations counted, spans
 * before a step, histograms under every way of sharding.
 *
 *     make build/tests/test_figures && build/tests/test_figures */
#include "train/trainer_internal.h"
#include "test.h"
#include "dtrain.h"
#include "warned_ranks.h"
#include "names.h"

/* ---- a small training --------------------------------------------------------------------------- */

enum { IN = 6, OUT = 5, ROWS = 4 };

typedef struct training {
    uint32_t kind;
    int slow_rank, steps;
    bool histograms;
    int tensor;                                /* ranks of a tensor axis; 0: there is no mesh */
    bool cut;                                  /* it cuts the parameters */
    double got[8][DTRAIN__FIGURE_WORDS];       /* by rank 0: words of ranks */
    uint64_t sent[8][DTRAIN_COLLECTIVE_KINDS]; /* by each, last step: in all, and by kind */
    uint64_t over_tensor[8], over_data[8]; /* by each, last step, as the mesh's communicators say */
    dtrain_step_record records[8];         /* of each, last step */
    double span[8]; /* by each, before step 2: no less than the time of its span there */
    dtrain_step_record last;
    double flops, predicted, held;
    uint64_t seen; /* histograms */
} training;

typedef struct trainee {
    training *t;
    int rank, reader; /* which of those that have samples of their own */
    dtrain_param params[2];
    float x[ROWS * IN];
    int32_t y[ROWS];
} trainee;

static dtrain_result train_batch(void *user)
{
    trainee *s = (trainee *)user;
    for (int i = 0; i < ROWS * IN; i++) s->x[i] = (float)((i * 7 + s->reader) % 11) / 11;
    for (int i = 0; i < ROWS; i++) s->y[i] = (i + s->reader) % OUT;
    if (s->rank == s->t->slow_rank) usleep(20000);
    return DTRAIN_OK;
}

static dtrain_tensor *train_loss(dtrain_tape *tape, void *user)
{
    trainee *s = (trainee *)user;
    const int64_t shape[2] = {ROWS, IN};
    dtrain_tensor *x = dtrain_tape_input(tape, DTRAIN_DTYPE_F32, 2, shape, s->x, false);
    dtrain_tensor *y = dtrain_tape_input(tape, DTRAIN_DTYPE_I32, 1, shape, s->y, false);
    dtrain_tape_unit(tape, 0);
    return dtrain_cross_entropy(
        tape, dtrain_linear(tape, x, &s->params[0], &s->params[1], DTRAIN_ACTIVATION_NONE), y, 0,
        0);
}

static dtrain_result count_histogram(void *user, const dtrain_metrics_sample *sample)
{
    const dtrain_histogram *histogram = sample->histogram;
    double sum = 0;
    if (sample->moment != DTRAIN_METRICS_HISTOGRAM) return DTRAIN_OK;
    for (size_t i = 0; i < histogram->bucket_count; i++) sum += histogram->buckets[i];
    CHECK(sum == (double)histogram->count && histogram->nonfinite == 0);
    CHECK(strlen(histogram->tag) > 511);
    CHECK(histogram->count == (histogram->tag[strlen(histogram->tag) - 1] == '3' ? IN * OUT : OUT));
    (*(uint64_t *)user)++;
    return DTRAIN_OK;
}

/* Return a metric of the last step; NaN: it was not measured. */
static double last_value(const dtrain_metrics *metrics, const char *name)
{
    dtrain_metrics_info info;
    dtrain_metrics_query(metrics, &info);
    for (size_t i = 0; i < info.last.count; i++)
        if (strcmp(strchr(info.last.figures[i].name, '/') + 1, name) == 0)
            return info.last.figures[i].value;
    return NAN;
}

/* The bytes that a communicator of the mesh has sent; 0 without one. */
static uint64_t bytes_over(const dtrain_mesh *mesh, uint32_t axis)
{
    dtrain_comm_info info;
    dtrain_comm_query(dtrain_mesh_comm(mesh, axis), &info);
    return info.wire_bytes;
}

static const char *const kinds[DTRAIN_COLLECTIVE_KINDS] = {
    "?", "all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "?", "send",
    "?", "?",          "all_to_all"};

static int train_rank(dtrain_world *world, void *user)
{
    training *t = (training *)user;
    trainee s;
    dtrain_mesh_desc axes;
    dtrain_mesh *mesh = NULL;
    dtrain_strategy_desc how;
    dtrain_trainer_desc desc;
    dtrain_metrics_desc report;
    dtrain_metrics_sink sink;
    dtrain_metrics_info info;
    dtrain_strategy *strategy;
    dtrain_optimizer *optimizer;
    dtrain_trainer *trainer;
    dtrain_metrics *metrics;
    dtrain_optimizer_desc adamw = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_ADAMW);
    uint64_t histograms = 0;
    char names[2][NAMES_BYTES];
    memset(&s, 0, sizeof s);
    memset(&how, 0, sizeof how);
    memset(&desc, 0, sizeof desc);
    memset(&report, 0, sizeof report);
    memset(&sink, 0, sizeof sink);
    s.t = t;
    s.rank = s.reader = dtrain_world_rank(world);
    memset(&axes, 0, sizeof axes);
    axes.tensor = t->tensor;
    if (t->tensor) {
        TRY(dtrain_mesh_create(world, &axes, &mesh));
        s.reader = dtrain_comm_rank(dtrain_mesh_comm(mesh, DTRAIN_AXIS_DATA));
        how.mesh = mesh;
    }
    for (int i = 0; i < 2 && t->cut; i++) s.params[i].cut.axis = DTRAIN_CUT_ROWS;
    s.params[0].name = names_of_pair(names[0], 511, 510, 0);
    s.params[0].shape[0] = OUT, s.params[0].shape[1] = IN;
    s.params[0].init = DTRAIN_INIT_NORMAL, s.params[0].init_scale = 0.5f;
    s.params[1].name = names_of_pair(names[1], 511, 510, 1);
    s.params[1].shape[0] = OUT;
    how.kind = t->kind;
    TRY(dtrain_strategy_create(world, s.params, 2, &how, &strategy));
    TRY(dtrain_optimizer_create(world, strategy, &adamw, &optimizer));
    desc.tokens = ROWS;
    desc.schedule.lr = 0.01f;
    desc.strategy = strategy;
    desc.optimizer = optimizer;
    desc.next_batch = train_batch;
    desc.loss = train_loss;
    desc.user = &s;
    TRY(dtrain_trainer_create(world, &desc, &trainer));
    sink.name = "histograms";
    sink.histograms = true;
    sink.take = count_histogram;
    sink.user = &histograms;
    report.sinks = &sink;
    report.sink_count = 1;
    report.histogram_every = t->histograms ? 2 : 0;
    report.trainer = trainer;
    TRY(dtrain_metrics_create(world, &report, &metrics));
    for (int step = 0; step < t->steps; step++) {
        dtrain_step_record r;
        const double start = dtrain_seconds();
        dtrain_span_begin(world, DTRAIN_SPAN_CHECKPOINT,
                          "as if"); /* before each step: in its figure */
        if (step == 1) usleep(3000);
        dtrain_span_end(world);
        if (step == 2) t->span[s.rank] = dtrain_seconds() - start;
        const uint64_t tensor = bytes_over(mesh, DTRAIN_AXIS_TENSOR);
        const uint64_t data = bytes_over(mesh, DTRAIN_AXIS_DATA);
        TRY(dtrain_trainer_step(trainer, &r));
        t->over_tensor[s.rank] = bytes_over(mesh, DTRAIN_AXIS_TENSOR) - tensor;
        t->over_data[s.rank] = bytes_over(mesh, DTRAIN_AXIS_DATA) - data;
        t->records[s.rank] = r;
        const bool several = dtrain_world_size(world) > 1;
        const double least =
            dtrain_record_value(&r, several ? "checkpoint_ms_min" : "checkpoint_ms");
        const double most =
            dtrain_record_value(&r, several ? "checkpoint_ms_max" : "checkpoint_ms");
        if (step == 1) CHECK_MSG(least > 2.9, "%g", least);
        if (step == 2) {
            double longest = 0;
            for (int i = 0; i < dtrain_world_size(world); i++) longest = fmax(longest, t->span[i]);
            CHECK_MSG(most < 1e3 * (1.001 * longest + 1e-6), "%g of %g", most, 1e3 * longest);
        }
        TRY(dtrain_metrics_step(metrics, &r));
        if (s.rank == 0) t->last = r;
        t->sent[s.rank][0] = (uint64_t)dtrain_record_value(&r, "comm_bytes");
        for (int kind = 1; kind < DTRAIN_COLLECTIVE_KINDS; kind++) {
            char key[40];
            snprintf(key, sizeof key, "%s_bytes", kinds[kind]);
            t->sent[s.rank][kind] = (uint64_t)fmax(0, dtrain_record_value(&r, key));
        }
    }
    dtrain_metrics_query(metrics, &info);
    for (int r = 0; s.rank == 0 && r < dtrain_world_size(world); r++)
        for (int f = 0; f < DTRAIN__FIGURE_WORDS; f++) t->got[r][f] = (double)trainer->words[r][f];
    for (size_t i = 0; i < info.last.count; i++) { /* a rank's values are in the figure's unit */
        const dtrain_figure *figure = &info.last.figures[i];
        const int size = dtrain_world_size(world);
        if (strcmp(figure->name, "time/forward_ms") != 0) continue;
        for (int r = 0; r < size; r++)
            CHECK_CLOSE((double)figure->ranks[r],
                        1e3 * (double)trainer->words[r][DTRAIN__WORD_FORWARD], 1e-3);
    }
    if (s.rank == 0) {
        t->seen = histograms;
        CHECK(isfinite(t->flops = last_value(metrics, "flops_per_second")));
        CHECK(isfinite(t->predicted = last_value(metrics, "predicted_optimizer_bytes")));
        CHECK(isfinite(t->held = last_value(metrics, "memory_optimizer_bytes")));
        CHECK(isnan(last_value(metrics, "peak_share"))); /* desc says no peak */
        CHECK(info.no_plan[0] == 0);
    }
    TRY(dtrain_metrics_finish(metrics));
    dtrain_metrics_destroy(metrics);
    dtrain_trainer_destroy(trainer);
    dtrain_optimizer_destroy(optimizer);
    dtrain_strategy_destroy(strategy);
    dtrain_mesh_destroy(mesh);
    return 0;
}

static training *training_create(void)
{
    training *t = (training *)mmap(NULL, sizeof *t, PROT_READ | PROT_WRITE,
                                   MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    memset(t, 0, sizeof *t);
    t->kind = DTRAIN_STRATEGY_DDP;
    t->steps = 4;
    t->slow_rank = -1;
    return t;
}

/* Every world size, threads and processes, one rank slow: figures say which, spreads are those of the figures, and
 * parts are the step. */
static void test_figures(void)
{
    static const struct {
        const char *key;
        int word;
        double scale;
    } parts[] = {{"step_ms", DTRAIN__WORD_STEP, 1e3},
                 {"data_ms", DTRAIN__WORD_DATA, 1e3},
                 {"forward_ms", DTRAIN__WORD_FORWARD, 1e3},
                 {"backward_ms", DTRAIN__WORD_BACKWARD, 1e3},
                 {"exposed_comm_ms", DTRAIN__WORD_EXPOSED_COMM, 1e3},
                 {"hidden_comm_ms", DTRAIN__WORD_HIDDEN_COMM, 1e3},
                 {"optimizer_ms", DTRAIN__WORD_OPTIMIZER, 1e3},
                 {"checkpoint_ms", DTRAIN__WORD_CHECKPOINT, 1e3},
                 {"comm_bytes", DTRAIN__WORD_COMM_BYTES, 1}};
    for (uint32_t ranks = 1; ranks <= 8; ranks *= 2)
        for (uint32_t mode = 0; mode < 2; mode++) {
            training *t = training_create();
            t->slow_rank = (int)ranks - 1;
            t->kind = mode ? DTRAIN_STRATEGY_FULL_SHARD : DTRAIN_STRATEGY_DDP;
            t->histograms = true;
            CHECK_MSG(with_ranks(ranks, mode, NULL, train_rank, t) == DTRAIN_OK, "%s",
                      dtrain_last_error());
            const dtrain_step_record *r = &t->last;
            CHECK(r->ranks == (int)ranks && dtrain_record_value(r, "data_ms") >= 20);
            for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
                double sum = 0, low = INFINITY, high = -INFINITY;
                char key[40];
                for (uint32_t rank = 0; rank < ranks; rank++) {
                    const double one = t->got[rank][parts[i].word] * parts[i].scale;
                    sum += one, low = fmin(low, one), high = fmax(high, one);
                }
#define VALUE(take) \
    (snprintf(key, sizeof key, "%s_" take, parts[i].key), dtrain_record_value(r, key))
                if (ranks == 1) {
                    CHECK(isnan(VALUE("max")) && isnan(VALUE("rank")));
                    continue;
                }
                CHECK_CLOSE(VALUE("mean"), sum / ranks, 1e-12 * high);
                CHECK(VALUE("min") == low && VALUE("max") == high);
                CHECK(t->got[(int)VALUE("rank")][parts[i].word] * parts[i].scale == high);
#undef VALUE
            }
            CHECK(ranks == 1 || dtrain_record_value(r, "data_ms_rank") == t->slow_rank);
            CHECK(ranks == 1 ||
                  dtrain_record_value(r, "data_ms") == dtrain_record_value(r, "data_ms_max"));
            for (uint32_t rank = 0; rank < ranks; rank++) {
                const double *own = t->got[rank];
                const double parts = own[DTRAIN__WORD_DATA] + own[DTRAIN__WORD_FORWARD] +
                                     own[DTRAIN__WORD_BACKWARD] + own[DTRAIN__WORD_EXPOSED_COMM] +
                                     own[DTRAIN__WORD_OPTIMIZER];
                CHECK_MSG(parts <= own[DTRAIN__WORD_STEP] * 1.00001, "parts %g, step %g", parts,
                          own[DTRAIN__WORD_STEP]);
                CHECK_MSG(own[DTRAIN__WORD_FLOPS] == 2 * 2.0 * ROWS * IN * OUT, "%g",
                          own[DTRAIN__WORD_FLOPS]);
                if ((int)rank != t->slow_rank) CHECK(own[DTRAIN__WORD_EXPOSED_COMM] > 0.01);
                CHECK(own[DTRAIN__WORD_MEMORY] > 0 &&
                      own[DTRAIN__WORD_MEMORY_PEAK] >= own[DTRAIN__WORD_MEMORY]);
                CHECK(ranks == 1 ? isnan(own[DTRAIN__WORD_BUS]) : own[DTRAIN__WORD_BUS] > 0);
                CHECK(own[DTRAIN__WORD_ACTIVATIONS] > 0);
            }
            uint64_t sent = 0;
            for (int kind = 1; kind < DTRAIN_COLLECTIVE_KINDS; kind++) sent += t->sent[0][kind];
            CHECK(sent == t->sent[0][0]);
            CHECK(
                ranks == 1 ||
                t->sent[0][mode ? DTRAIN_COLLECTIVE_REDUCE_SCATTER : DTRAIN_COLLECTIVE_ALL_REDUCE] >
                    0);
            CHECK(t->predicted == t->held && t->predicted > 0);
            CHECK_CLOSE(t->flops,
                        ranks * 2 * 2.0 * ROWS * IN * OUT /
                            (1e-3 * dtrain_record_value(r, "step_ms")),
                        1e-6 * t->flops);
            CHECK_MSG(t->seen == 2 * 2 * 2, "%llu histograms",
                      (unsigned long long)t->seen); /* steps 2, 4; w, b; both */
            munmap(t, sizeof *t);
        }
}

/* What each rank sends by each kind of collective is what its own record says. */
static void test_sent(void)
{
    static const uint32_t strategies[] = {DTRAIN_STRATEGY_DDP, DTRAIN_STRATEGY_ZERO3,
                                          DTRAIN_STRATEGY_FULL_SHARD};
    for (uint32_t ranks = 1; ranks <= 8; ranks++)
        for (int i = 0; i < 3; i++) {
            training *t = training_create();
            t->kind = strategies[i];
            CHECK_MSG(with_ranks(ranks, ranks % 2, NULL, train_rank, t) == DTRAIN_OK, "%s",
                      dtrain_last_error());
            for (uint32_t rank = 0; rank < ranks; rank++)
                for (int kind = 0; kind < DTRAIN_COLLECTIVE_KINDS; kind++) {
                    const uint64_t sent = t->sent[rank][kind];
                    CHECK(t->got[rank][DTRAIN__WORD_COMM_BYTES + kind] == (double)sent);
                }
            CHECK((t->sent[0][0] > 0) == (ranks > 1));
            munmap(t, sizeof *t);
        }
}

/* Over a mesh the record is of all ranks, samples and tokens are of the data axis alone, and what went over each axis
 * is what its communicator has counted; histograms count each element once, whether it is cut or whole. */
static void test_axes(void)
{
    for (int variant = 0; variant < 8; variant++) {
        const uint32_t ranks = variant & 1 ? 8 : 4;
        const uint32_t tensor = variant & 2 ? ranks / 2 : 2, data = ranks / tensor;
        training *t = training_create(), *plain = training_create();
        t->tensor = (int)tensor;
        t->cut = variant & 4;
        t->histograms = true;
        CHECK_MSG(with_ranks(ranks, variant % 3 == 0, NULL, train_rank, t) == DTRAIN_OK, "%s",
                  dtrain_last_error());
        CHECK(with_ranks(data, false, NULL, train_rank, plain) == DTRAIN_OK);
        CHECK_MSG(t->seen == 2 * 2 * 2, "%llu histograms", (unsigned long long)t->seen);
        for (uint32_t rank = 0; rank < ranks; rank++) {
            const dtrain_step_record *r = &t->records[rank];
            const double *own = t->got[rank];
            CHECK(r->ranks == (int)ranks && r->tokens == (uint64_t)t->steps * ROWS * data);
            CHECK_CLOSE(r->loss, plain->last.loss, 1e-5);
            CHECK_CLOSE(r->grad_norm, plain->last.grad_norm, 1e-4);
            CHECK(memcmp(&r->loss, &t->records[0].loss, sizeof r->loss) == 0);
            const double over_tensor = dtrain_record_value(r, "tensor_bytes");
            CHECK_MSG(over_tensor == (double)t->over_tensor[rank], "%g, counted %llu", over_tensor,
                      (unsigned long long)t->over_tensor[rank]);
            CHECK(t->sent[rank][0] == t->over_tensor[rank] + t->over_data[rank]);
            CHECK(t->over_tensor[rank] > 0 && t->over_data[rank] > 0);
            CHECK(own[DTRAIN__WORD_TENSOR_BYTES] == (double)t->over_tensor[rank]);
            CHECK(own[DTRAIN__WORD_TENSOR_EXPOSED] > 0 &&
                  own[DTRAIN__WORD_TENSOR_EXPOSED] <= own[DTRAIN__WORD_EXPOSED_COMM] * 1.001);
        }
        for (uint32_t rank = 0; rank < data; rank++)
            CHECK(isnan(plain->got[rank][DTRAIN__WORD_TENSOR_BYTES]) &&
                  isnan(dtrain_record_value(&plain->records[rank], "tensor_bytes")));
        munmap(t, sizeof *t);
        munmap(plain, sizeof *plain);
    }
}

/* ---- histograms of a weight that two stages have ------------------------------------------------- */

typedef struct tied {
    dtrain_param params[2];
    float x[ROWS * IN];
} tied;

static dtrain_result tied_batch(void *user)
{
    tied *s = (tied *)user;
    for (int i = 0; i < ROWS * IN; i++) s->x[i] = (float)(i * 7 % 11) / 11;
    return DTRAIN_OK;
}

static dtrain_tensor *tied_loss(dtrain_tape *tape, void *user)
{
    tied *s = (tied *)user;
    const int64_t shape[2] = {ROWS, IN};
    dtrain_tensor *x = dtrain_tape_input(tape, DTRAIN_DTYPE_F32, 2, shape, s->x, false);
    for (uint32_t unit = 0; unit < 2; unit++) {
        dtrain_tape_unit(tape, unit);
        x = dtrain_linear(tape, x, &s->params[unit], NULL, DTRAIN_ACTIVATION_GELU);
    }
    return dtrain_mean(tape, x);
}

static dtrain_result tied_histogram(void *user, const dtrain_metrics_sample *sample)
{
    const dtrain_histogram *histogram = sample->histogram;
    if (sample->moment != DTRAIN_METRICS_HISTOGRAM) return DTRAIN_OK;
    CHECK_MSG(histogram->count == IN * IN, "%s: %llu elements", histogram->tag,
              (unsigned long long)histogram->count);
    ++*(int *)user;
    return DTRAIN_OK;
}

static int tied_rank(dtrain_world *world, void *user)
{
    const dtrain_optimizer_desc adamw = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_ADAMW);
    dtrain_mesh_desc axes;
    dtrain_strategy_desc how;
    dtrain_trainer_desc desc;
    dtrain_metrics_desc report;
    dtrain_metrics_sink sink;
    dtrain_mesh *mesh;
    dtrain_strategy *strategy;
    dtrain_optimizer *optimizer;
    dtrain_trainer *trainer;
    dtrain_metrics *metrics;
    dtrain_step_record r;
    int seen = 0;
    tied s;
    (void)user;
    memset(&axes, 0, sizeof axes), memset(&how, 0, sizeof how), memset(&desc, 0, sizeof desc);
    memset(&report, 0, sizeof report), memset(&sink, 0, sizeof sink), memset(&s, 0, sizeof s);
    s.params[0].name = "w", s.params[0].shape[0] = s.params[0].shape[1] = IN;
    s.params[0].init = DTRAIN_INIT_NORMAL, s.params[0].init_scale = 0.5f;
    s.params[1].name = "again", s.params[1].unit = 1, s.params[1].alias_of = &s.params[0];
    axes.pipeline = 2;
    TRY(dtrain_mesh_create(world, &axes, &mesh));
    how.mesh = mesh;
    TRY(dtrain_strategy_create(world, s.params, 2, &how, &strategy));
    TRY(dtrain_optimizer_create(world, strategy, &adamw, &optimizer));
    desc.schedule.lr = 0.01f, desc.strategy = strategy, desc.optimizer = optimizer;
    desc.next_batch = tied_batch, desc.loss = tied_loss, desc.user = &s;
    TRY(dtrain_trainer_create(world, &desc, &trainer));
    sink.name = "histograms", sink.histograms = true, sink.take = tied_histogram, sink.user = &seen;
    report.sinks = &sink, report.sink_count = 1, report.histogram_every = 1,
    report.trainer = trainer;
    TRY(dtrain_metrics_create(world, &report, &metrics));
    TRY(dtrain_trainer_step(trainer, &r));
    TRY(dtrain_metrics_step(metrics, &r));
    CHECK(seen == (dtrain_world_rank(world) ? 0 : 2)); /* of the weight and of its gradient */
    TRY(dtrain_metrics_finish(metrics));
    dtrain_metrics_destroy(metrics);
    dtrain_trainer_destroy(trainer);
    dtrain_optimizer_destroy(optimizer);
    dtrain_strategy_destroy(strategy);
    dtrain_mesh_destroy(mesh);
    return 0;
}

/* Each of its elements counts once, whichever stages have a copy, and replicas. */
static void test_histograms_of_a_tie(void)
{
    dtrain_launch_desc desc;
    memset(&desc, 0, sizeof desc);
    for (desc.rank_count = 2; desc.rank_count <= 4; desc.rank_count += 2) {
        desc.mode = desc.rank_count == 2 ? DTRAIN_LAUNCH_THREADS : DTRAIN_LAUNCH_PROCESSES;
        CHECK_MSG(dtrain_launch(&desc, tied_rank, NULL, NULL) == DTRAIN_OK, "%s",
                  dtrain_last_error());
    }
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    RUN(test_figures);
    RUN(test_sent);
    RUN(test_axes);
    RUN(test_histograms_of_a_tie);
    return test_summary();
}
