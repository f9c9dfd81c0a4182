/* test_exact.c: on an exact mesh 1, 2, 4 and 8 ranks of the tensor axis train a model to the same bits: losses, norms
 * and weights of 20 steps. Without `exact` they do not, which shows that the comparison sees rounding. */
#include "strategy/strategy_internal.h"
#include "dtrain.h"
#include "test.h"
#include "ranks.h"

enum {
    STEPS = 20,
    WIDTH = 32,
    HEADS = 8,
    SEQUENCE = 12,
    BATCH = 3,
    ROWS = BATCH * SEQUENCE,
    VOCABULARY = 48,
    CLASSES = 43, /* the last lane is padding alone */
    PARAMS = 15,
    MOST = VOCABULARY * WIDTH * 3
};

typedef struct run_case {
    int tensor, data;
    bool exact, tied, swiglu;
    uint32_t optimizer;
} run_case;

/* What a run makes, in memory that its ranks share. */
typedef struct outcome {
    run_case run;
    float loss[2][STEPS], norm[STEPS], weights[PARAMS][MOST];
    double squares[STEPS];
    int64_t count[PARAMS];
    int params, clipped;
} outcome;

enum {
    TOKEN,
    POSITION,
    NORM_W,
    NORM_B,
    QKV_W,
    QKV_B,
    OUT_W,
    OUT_B,
    UP_W,
    UP_B,
    DOWN_W,
    DOWN_B,
    LAST_W,
    LAST_B,
    HEAD
};

static void model_param(dtrain_param *p, const char *name, int64_t rows, int64_t columns,
                        uint32_t axis)
{
    memset(p, 0, sizeof *p);
    p->name = name;
    p->shape[0] = rows;
    p->shape[1] = columns;
    p->init = columns ? DTRAIN_INIT_NORMAL : DTRAIN_INIT_ZERO;
    p->init_scale = 0.2f;
    p->cut.axis = axis;
}
static void model_make(dtrain_param p[PARAMS], const run_case *c)
{
    const int64_t up = 2 * WIDTH;
    model_param(&p[TOKEN], "token", VOCABULARY, WIDTH, DTRAIN_CUT_ROWS);
    model_param(&p[POSITION], "position", SEQUENCE, WIDTH, 0);
    model_param(&p[NORM_W], "norm.weight", WIDTH, 0, 0);
    model_param(&p[NORM_B], "norm.bias", WIDTH, 0, 0);
    model_param(&p[QKV_W], "qkv.weight", 3 * WIDTH, WIDTH, DTRAIN_CUT_ROWS);
    model_param(&p[QKV_B], "qkv.bias", 3 * WIDTH, 0, DTRAIN_CUT_ROWS);
    model_param(&p[OUT_W], "out.weight", WIDTH, WIDTH, DTRAIN_CUT_COLUMNS);
    model_param(&p[OUT_B], "out.bias", WIDTH, 0, 0);
    model_param(&p[UP_W], "up.weight", up, WIDTH, DTRAIN_CUT_ROWS);
    model_param(&p[UP_B], "up.bias", up, 0, DTRAIN_CUT_ROWS);
    model_param(&p[DOWN_W], "down.weight", WIDTH, 2 * WIDTH, DTRAIN_CUT_COLUMNS);
    model_param(&p[DOWN_B], "down.bias", WIDTH, 0, 0);
    model_param(&p[LAST_W], "last.weight", WIDTH, 0, 0);
    model_param(&p[LAST_B], "last.bias", WIDTH, 0, 0);
    model_param(&p[HEAD], "head", VOCABULARY, WIDTH, DTRAIN_CUT_ROWS);
    for (int i = QKV_W; i <= QKV_B; i++) p[i].cut.components = 3, p[i].cut.parts = HEADS;
    p[OUT_W].cut.parts = HEADS;
    p[NORM_W].init = p[LAST_W].init = DTRAIN_INIT_CONSTANT;
    p[NORM_W].init_scale = p[LAST_W].init_scale = 1;
    if (c->tied) {
        p[HEAD].alias_of = &p[TOKEN];
        memset(p[HEAD].shape, 0, sizeof p[HEAD].shape);
        p[HEAD].cut.axis = 0;
    }
}

static dtrain_tensor *model_loss(dtrain_tape *tape, dtrain_param p[PARAMS], const run_case *c,
                                 int step, int data_rank)
{
    const int64_t shape[2] = {BATCH, SEQUENCE}, rows = ROWS;
    int32_t tokens[ROWS], targets[ROWS];
    for (int i = 0; i < ROWS; i++) {
        const uint64_t x = ranks_mix((uint64_t)(step * 1000 + data_rank * 500 + i) + 77);
        tokens[i] = (int32_t)(x % CLASSES);
        targets[i] = x / 4096 % 7 ? (int32_t)(x / 65536 % CLASSES) : -1;
    }
    dtrain_attention_desc heads;
    memset(&heads, 0, sizeof heads);
    heads.sequence = SEQUENCE;
    heads.heads = HEADS;
    heads.causal = true;
    dtrain_tensor *x =
        dtrain_embedding(tape, dtrain_tape_input(tape, DTRAIN_DTYPE_I32, 2, shape, tokens, false),
                         &p[TOKEN], &p[POSITION]);
    dtrain_tensor *y = dtrain_layernorm(tape, x, NULL, &p[NORM_W], &p[NORM_B], 1e-5f);
    y = dtrain_linear(tape, y, &p[QKV_W], &p[QKV_B], DTRAIN_ACTIVATION_NONE);
    y = dtrain_attention(tape, y, NULL, NULL, &heads);
    x = dtrain_add(tape, x, dtrain_linear(tape, y, &p[OUT_W], &p[OUT_B], DTRAIN_ACTIVATION_NONE));
    y = dtrain_linear(tape, x, &p[UP_W], &p[UP_B],
                      c->swiglu ? DTRAIN_ACTIVATION_NONE : DTRAIN_ACTIVATION_GELU);
    if (c->swiglu) y = dtrain_swiglu(tape, y, y);
    x = dtrain_add(tape, x, dtrain_linear(tape, y, &p[DOWN_W], &p[DOWN_B], DTRAIN_ACTIVATION_NONE));
    x = dtrain_layernorm(tape, x, NULL, &p[LAST_W], &p[LAST_B], 1e-5f);
    x = dtrain_linear(tape, x, &p[HEAD], NULL, DTRAIN_ACTIVATION_NONE);
    return dtrain_cross_entropy(tape, x,
                                dtrain_tape_input(tape, DTRAIN_DTYPE_I32, 1, &rows, targets, false),
                                CLASSES, c->tied ? 0.1f : 0);
}

static int train_rank(dtrain_world *world, void *user)
{
    outcome *o = (outcome *)user;
    const run_case *c = &o->run;
    dtrain_mesh_desc shape;
    dtrain_mesh_info at;
    dtrain_mesh *mesh;
    dtrain_strategy_desc how;
    dtrain_strategy *strategy;
    dtrain_optimizer *optimizer;
    dtrain_optimizer_desc rule = dtrain_optimizer_defaults((dtrain_optimizer_kind)c->optimizer);
    dtrain_tape *tape;
    dtrain_param params[PARAMS];
    static const float clip = 0.5f;
    memset(&shape, 0, sizeof shape);
    memset(&how, 0, sizeof how);
    shape.tensor = c->tensor;
    shape.data = c->data;
    shape.exact = c->exact;
    RANKS_TRY(dtrain_mesh_create(world, &shape, &mesh));
    dtrain_mesh_query(mesh, &at);
    CHECK(at.exact == c->exact);
    model_make(params, c);
    how.mesh = mesh;
    how.kind = DTRAIN_STRATEGY_DDP;
    RANKS_TRY(dtrain_strategy_create(world, params, PARAMS, &how, &strategy));
    RANKS_TRY(dtrain_optimizer_create(world, strategy, &rule, &optimizer));
    RANKS_TRY(dtrain_tape_create(world, strategy, NULL, &tape));
    for (int step = 0; step < STEPS; step++) {
        float loss, norm, scale;
        double squares; /* the norm before it is rounded, which hides most orders of adding up */
        RANKS_TRY(dtrain_tape_begin(tape, 0, 0));
        dtrain_tensor *mean = model_loss(tape, params, c, step, at.data_rank);
        RANKS_TRY(dtrain_tensor_read(tape, mean, &loss, NULL));
        RANKS_TRY(dtrain_tape_backward(tape, mean, 1));
        RANKS_TRY(dtrain_strategy_finish(strategy));
        RANKS_TRY(dtrain_grad_norm(strategy, NULL, clip, &norm, &scale));
        RANKS_TRY(dtrain_optimizer_step(
            optimizer, c->optimizer == DTRAIN_OPTIMIZER_SGD ? 0.1f : 0.01f, scale));
        if (at.tensor_rank == 0) o->loss[at.data_rank][step] = loss;
        RANKS_TRY(dtrain__sum_squares(strategy, &squares));
        if (at.rank == 0) o->norm[step] = norm, o->squares[step] = squares, o->clipped += scale < 1;
    }
    for (int i = 0; i < PARAMS; i++) {
        float whole[MOST];
        if (params[i].alias_of) continue;
        RANKS_TRY(dtrain_strategy_read(strategy, (size_t)i, whole));
        if (at.rank) continue;
        o->count[i] = params[i].shape[0] * (params[i].shape[1] ? params[i].shape[1] : 1);
        memcpy(o->weights[i], whole, (size_t)o->count[i] * sizeof *whole);
        o->params++;
    }
    dtrain_tape_destroy(tape);
    dtrain_optimizer_destroy(optimizer);
    dtrain_strategy_destroy(strategy);
    dtrain_mesh_destroy(mesh);
    return 0;
}

static outcome *train(run_case c, int tensor)
{
    outcome *o = (outcome *)ranks_shared(sizeof *o);
    memset(o, 0, sizeof *o);
    c.tensor = tensor;
    o->run = c;
    ranks_run(tensor * c.data, DTRAIN_LAUNCH_THREADS, train_rank, o);
    CHECK(o->params == PARAMS - c.tied);
    CHECK_MSG(o->clipped > 5, "%d of %d steps clipped", o->clipped, STEPS);
    CHECK(o->loss[0][STEPS - 1] > 0 && o->loss[0][STEPS - 1] < 100);
    return o;
}
static bool same(const outcome *a, const outcome *b)
{
    return memcmp(a->loss, b->loss, sizeof a->loss) == 0 &&
           memcmp(a->norm, b->norm, sizeof a->norm) == 0 &&
           memcmp(a->squares, b->squares, sizeof a->squares) == 0 &&
           memcmp(a->weights, b->weights, sizeof a->weights) == 0;
}
static void compare(run_case c, int most)
{
    outcome *one = train(c, 1);
    for (int tensor = 2; tensor <= most; tensor *= 2) {
        outcome *o = train(c, tensor);
        int step = 0;
        while (step < STEPS && o->loss[0][step] == one->loss[0][step] &&
               o->norm[step] == one->norm[step])
            step++;
        CHECK_MSG(same(one, o) == c.exact,
                  "optimizer %u, tied %d, swiglu %d, exact %d: tensor %d x data %d, first other "
                  "step %d: loss %.9g and "
                  "%.9g, norm %.9g and %.9g",
                  c.optimizer, c.tied, c.swiglu, c.exact, tensor, c.data, step,
                  step < STEPS ? (double)one->loss[0][step] : 0,
                  step < STEPS ? (double)o->loss[0][step] : 0,
                  step < STEPS ? (double)one->norm[step] : 0,
                  step < STEPS ? (double)o->norm[step] : 0);
        munmap(o, sizeof *o);
    }
    munmap(one, sizeof *one);
}

static void test_bits(void)
{
    const run_case cases[] = {{0, 1, true, false, false, DTRAIN_OPTIMIZER_ADAMW},
                              {0, 1, true, true, true, DTRAIN_OPTIMIZER_ADAMW},
                              {0, 1, true, false, true, DTRAIN_OPTIMIZER_SGD}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) compare(cases[i], 8);
}
static void test_data_axis(void)
{
    const run_case c = {0, 2, true, true, false, DTRAIN_OPTIMIZER_ADAMW};
    compare(c, 4);
}
static void test_without_exact(void)
{
    const run_case c = {0, 1, false, false, false, DTRAIN_OPTIMIZER_ADAMW};
    compare(c, 8);
}

/* ---- What it does not cover ---- */

/* A mesh or strategy that is refused, or a model whose first step is. */
typedef struct refusal {
    dtrain_mesh_desc mesh;
    dtrain_strategy_desc how;
    uint32_t flags; /* of the tape */
    int64_t classes,
        up; /* rows of the head and columns of the hidden layer; 0: of a model that works */
    bool head_whole; /* it is not cut */
    const char *words[3];
    bool works;
} refusal;

/* Run the first step of a small model: embedding, two layers, head. */
static dtrain_result step_of(dtrain_world *world, const refusal *c, dtrain_strategy *strategy,
                             dtrain_param p[4])
{
    const int64_t rows = 4;
    int32_t tokens[4] = {0, 1, 2, 3};
    dtrain_tape *tape = NULL;
    float norm, scale;
    dtrain_result result = dtrain_tape_create(world, strategy, NULL, &tape);
    if (result == DTRAIN_OK) result = dtrain_tape_begin(tape, c->flags, 0);
    if (result == DTRAIN_OK) {
        dtrain_tensor *in = dtrain_tape_input(tape, DTRAIN_DTYPE_I32, 1, &rows, tokens, false);
        dtrain_tape_unit(tape, 0);
        dtrain_tensor *x = dtrain_embedding(tape, in, &p[0], NULL);
        x = dtrain_linear(tape, x, &p[1], NULL, DTRAIN_ACTIVATION_GELU);
        x = dtrain_linear(tape, x, &p[2], NULL, DTRAIN_ACTIVATION_NONE);
        x = dtrain_linear(tape, x, &p[3], NULL, DTRAIN_ACTIVATION_NONE);
        in = dtrain_tape_input(tape, DTRAIN_DTYPE_I32, 1, &rows, tokens, false);
        x = dtrain_cross_entropy(tape, x, in, 0, 0);
        result = dtrain_tape_backward(tape, x, 1);
        if (result == DTRAIN_OK) result = dtrain_strategy_finish(strategy);
        if (result == DTRAIN_OK) result = dtrain_grad_norm(strategy, NULL, 1, &norm, &scale);
    }
    dtrain_tape_destroy(tape);
    return result;
}

static int refused_rank(dtrain_world *world, void *user)
{
    const refusal *c = (const refusal *)user;
    dtrain_mesh *mesh = NULL;
    dtrain_strategy *strategy = NULL;
    dtrain_param p[4];
    dtrain_strategy_desc how = c->how;
    const int64_t up = c->up ? c->up : 32, classes = c->classes ? c->classes : 48;
    model_param(&p[0], "token", 48, 16, DTRAIN_CUT_ROWS);
    model_param(&p[1], "up", up, 16, DTRAIN_CUT_ROWS);
    model_param(&p[2], "down", 16, up, DTRAIN_CUT_COLUMNS);
    model_param(&p[3], "head", classes, 16, c->head_whole ? 0 : DTRAIN_CUT_ROWS);
    dtrain_result result = dtrain_mesh_create(world, &c->mesh, &mesh);
    how.mesh = mesh;
    if (result == DTRAIN_OK) result = dtrain_strategy_create(world, p, 4, &how, &strategy);
    if (result == DTRAIN_OK) result = step_of(world, c, strategy, p);
    CHECK_MSG((result == DTRAIN_OK) == c->works, "%s: %s", c->words[0],
              result == DTRAIN_OK ? "accepted" : dtrain_last_error());
    for (int i = 0; i < 3 && c->words[i] && !c->works; i++)
        CHECK_MSG(strstr(dtrain_last_error(), c->words[i]), "\"%s\" is not in: %s", c->words[i],
                  dtrain_last_error());
    dtrain_strategy_destroy(strategy);
    dtrain_mesh_destroy(mesh);
    return 0;
}

static void refuse(refusal *c, const char *first, const char *second, const char *third)
{
    const int ranks = c->mesh.tensor * (c->mesh.data ? c->mesh.data : 1) *
                      (c->mesh.pipeline ? c->mesh.pipeline : 1);
    c->words[0] = first, c->words[1] = second, c->words[2] = third;
    c->mesh.exact = true, c->works = false;
    ranks_run(ranks, DTRAIN_LAUNCH_THREADS, refused_rank, c);
    c->mesh.exact = false, c->works = true; /* it is `exact` that it was refused for */
    ranks_run(ranks, DTRAIN_LAUNCH_THREADS, refused_rank, c);
    memset(c, 0, sizeof *c);
    c->mesh.tensor = 2;
}

/* Each limit that the mesh's comment names is refused by a sentence, and works without `exact`; but for offload, which
 * a CPU refuses by itself. */
static void test_refusals(void)
{
    static const char *const leave = "leave it out, or exact", *const divide =
                                                                   "does not divide into";
    dtrain_compression_desc topk;
    refusal c;
    memset(&c, 0, sizeof c);
    memset(&topk, 0, sizeof topk);
    topk.kind = DTRAIN_COMPRESSION_TOPK;
    c.mesh.tensor = 3;
    refuse(&c, "a tensor axis of 3 ranks does not share evenly", "take 1, 2, 4 or 8", NULL);
    c.mesh.tensor = 6;
    refuse(&c, "a tensor axis of 6 ranks", "take 1, 2, 4 or 8", NULL);
    c.mesh.sequence_parallel = true;
    refuse(&c, "exact is set beside sequence_parallel", "leave one of them out", NULL);
    for (uint32_t kind = DTRAIN_STRATEGY_ZERO1; kind <= DTRAIN_STRATEGY_HYBRID_SHARD; kind++) {
        c.mesh.data = 2, c.how.kind = kind;
        c.how.node_size = kind == DTRAIN_STRATEGY_HYBRID_SHARD ? 2 : 0;
        refuse(&c, "a kind that shards over several data ranks", leave, NULL);
    }
    c.how.compression = &topk;
    refuse(&c, "the strategy has compression", leave, NULL);
    c.how.reduce_dtype = DTRAIN_DTYPE_BF16;
    refuse(&c, "the strategy has values narrower than fp32", leave, NULL);
    c.how.kind = DTRAIN_STRATEGY_FULL_SHARD, c.how.param_dtype = DTRAIN_DTYPE_BF16;
    refuse(&c, "the strategy has values narrower than fp32", leave, NULL);
    c.flags = DTRAIN_TAPE_BF16;
    refuse(&c, "autocast", "exact", NULL);
    c.flags = DTRAIN_TAPE_BF16, c.head_whole = true;
    refuse(&c, "autocast", "exact", NULL);
    c.up = 36;
    refuse(&c, "a sum over 36", divide, "8 lanes");
    c.classes = 50;
    refuse(&c, "a sum over 50", divide, "8 lanes");
}

/* One data rank keeps everything, whatever the kind: nothing is refused. */
static void test_one_data_rank(void)
{
    refusal c;
    memset(&c, 0, sizeof c);
    c.works = true, c.mesh.exact = true, c.mesh.tensor = 2;
    c.words[0] = "one data rank";
    for (c.how.kind = DTRAIN_STRATEGY_DDP; c.how.kind <= DTRAIN_STRATEGY_ZERO3; c.how.kind++)
        ranks_run(2, DTRAIN_LAUNCH_THREADS, refused_rank, &c);
}

/* A mesh of several stages is refused before there is a model. */
static int refused_line(dtrain_world *world, void *user)
{
    dtrain_mesh_desc desc;
    dtrain_mesh *mesh = NULL;
    memset(&desc, 0, sizeof desc);
    desc.pipeline = 2, desc.exact = true;
    CHECK(dtrain_mesh_create(world, &desc, &mesh) == DTRAIN_ERROR_UNSUPPORTED);
    CHECK(strstr(dtrain_last_error(), "exact is set beside a pipeline axis") &&
          strstr(dtrain_last_error(), "leave one of them out"));
    (void)user;
    return 0;
}
static void test_pipeline_axis(void) { ranks_run(2, DTRAIN_LAUNCH_THREADS, refused_line, NULL); }

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    RUN(test_bits);
    RUN(test_data_axis);
    RUN(test_without_exact);
    RUN(test_refusals);
    RUN(test_one_data_rank);
    RUN(test_pipeline_axis);
    return test_summary();
}
