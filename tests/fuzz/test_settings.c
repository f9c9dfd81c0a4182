/* Random programs in which one setting differs on one rank: all ranks refuse it, with a sentence that names the
 * setting, that rank and both values; and programs that differ in nothing, or in what ranks may differ in, train.
 *
 *     build/tests/test_settings                  300 programs
 *     build/tests/test_settings --count 10000    so many
 *     build/tests/test_settings --seed 77        this one, in words
 *
 * A program is a layout (tensor, data and pipeline axes, a kind of strategy), a loop (the trainer's or its own), a
 * setting, and the rank that has another value of it. Settings that change in the middle of a run, such as the rate of
 * a program's own loop, or a parameter, a stage or one use of a tied weight that is frozen, may be found later: by the
 * trainer at the end of that step, else by verify. */
#include "test.h"

#include "dtrain.h"
#include "ranks.h"
#include "seeds.h"

enum { PARAMS = 5, WIDTH = 8, BATCH = 2, CLASSES = 5, STEPS = 3, MOST_RANKS = 8 };

typedef struct local {
    dtrain_mesh_desc mesh;
    dtrain_strategy_desc strategy;
    dtrain_pipeline_desc pipeline;
    dtrain_optimizer_desc optimizer, group;
    dtrain_trainer_desc trainer;
    dtrain_param params[PARAMS];
    int step, params_used; /* 5: the last one is w0 again */
    float lr, x[BATCH * WIDTH];
    int32_t targets[BATCH];
    int verified; /* the rank is at verify */
} local;

typedef enum { ANY, MESH, PIPELINE, TRAINER, LOOP, LATE, ALLOWED } where;

static void mesh_sequence(local *l) { l->mesh.sequence_parallel = !l->mesh.sequence_parallel; }
static void mesh_pipeline(local *l) { l->mesh.pipeline = l->mesh.pipeline == 1 ? 2 : 1; }
static void kind(local *l) { l->strategy.kind = l->strategy.kind == 1 ? 2 : 1; }
static void missing(local *l) { l->strategy.missing_gradient = DTRAIN_MISSING_GRADIENT_ERROR; }
static void reduce_dtype(local *l) { l->strategy.reduce_dtype = DTRAIN_DTYPE_BF16; }
static void init_seed(local *l) { l->strategy.init_seed = 77; }
static void buckets(local *l) { l->strategy.bucket_bytes = 4096; }
static void schedule(local *l) { l->pipeline.kind = DTRAIN_PIPELINE_GPIPE; }
static void shape(local *l)
{
    if (l->step) return;
    l->params[1].shape[0] = WIDTH + 8; /* divides evenly too */
}
static void flags(local *l) { l->params[2].flags = DTRAIN_PARAM_NO_DECAY; }
static void frozen(local *l) { l->params[2].flags = DTRAIN_PARAM_FROZEN; }
static void frozen_stage(local *l)
{
    l->params[0].flags = l->params[1].flags = DTRAIN_PARAM_FROZEN;
}
static void frozen_use(local *l) { l->params[PARAMS - 1].flags = DTRAIN_PARAM_FROZEN; }
static void unit(local *l) { l->params[1].unit = 1; }
static void group(local *l) { l->params[3].group = 1; }
static void name(local *l) { l->params[3].name = "other"; }
static void init_scale(local *l) { l->params[0].init_scale *= 2; }
static void beta1(local *l) { l->optimizer.beta1 = 0.5f; }
static void decay(local *l) { l->group.weight_decay = 0.25f; }
static void epsilon(local *l) { l->optimizer.epsilon *= 10; }
static void other_kind(local *l)
{
    l->optimizer = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_LION);
}
static void rate(local *l) { l->trainer.schedule.lr = l->lr = 0.5f; }
static void warmup(local *l) { l->trainer.schedule.warmup_steps = 9; }
static void total(local *l) { l->trainer.schedule.total_steps = 9; }
static void milestones(local *l) { l->trainer.schedule.milestones[1] = 5; }
static void micro(local *l) { l->trainer.micro_batches++; }
static void clip(local *l) { l->trainer.clip = 7; }
static void bf16(local *l) { l->trainer.tape_flags = DTRAIN_TAPE_BF16; }
static void seed(local *l) { l->trainer.seed = 3; }
static void nonfinite(local *l) { l->trainer.nonfinite = DTRAIN_NONFINITE_SKIP; }
static void recompute(local *l) { l->trainer.recompute_every = 1; }
static void verify_every(local *l) { l->trainer.verify_every = 2; }
static void scaling(local *l) { l->trainer.loss_scaling.scale = 8; }
static void no_overlap(local *l) { l->strategy.no_overlap = true; }
static void tokens(local *l) { l->trainer.tokens = 99; }
static void nothing(local *l) { (void)l; }

static const struct setting {
    void (*change)(local *);
    const char *named;
    where where;
} settings[] = {
    {mesh_sequence, "sequence_parallel", MESH},
    {mesh_pipeline, "has pipeline ", MESH},
    {mesh_pipeline, "has pipeline ", ANY},
    {kind, "has kind \"", ANY},
    {missing, "has missing_gradient 1", ANY},
    {reduce_dtype, "has reduce_dtype \"bf16\"", ANY},
    {init_seed, "has init_seed 77", ANY},
    {buckets, "has bucket_bytes 4096", ANY},
    {schedule, "has pipeline.kind 1", PIPELINE},
    {shape, "\"b0\") differs: ", ANY},
    {flags, "\"w1\") differs: ", ANY},
    {unit, "has unit 1", ANY},
    {group, "has group 1", ANY},
    {name, "has name \"other\"", ANY},
    {init_scale, "has init_scale 0.6", ANY},
    {beta1, "has beta1 0.5", ANY},
    {decay, "has weight_decay 0.25", ANY},
    {epsilon, "has epsilon 1e-07", ANY},
    {other_kind, "has kind of optimizer 3", ANY},
    {rate, "lr 0.5", ANY},
    {warmup, "has schedule.warmup_steps 9", TRAINER},
    {total, "has schedule.total_steps 9", TRAINER},
    {milestones, "has schedule.milestones (0, 5, ", TRAINER},
    {micro, "has micro_batches ", TRAINER},
    {clip, "has clip 7", TRAINER},
    {bf16, "has tape_flags 0x2", TRAINER},
    {seed, "has seed 3", TRAINER},
    {nonfinite, "has nonfinite 1", TRAINER},
    {recompute, "has recompute_every 1", TRAINER},
    {verify_every, "has verify_every 2", TRAINER},
    {scaling, "has scaling true", TRAINER},
    {rate, "has updates (lr and grad_scale", LATE},
    {frozen, "has flags 0x1", LATE},
    {frozen_stage, "\"w0\") differs: ", LATE},
    {frozen_use, "\"w0 again\") differs: ", LATE},
    {flags, "has flags 0x2", LATE},
    {nothing, NULL, ALLOWED},
    {no_overlap, NULL, ALLOWED},
    {tokens, NULL, ALLOWED},
};
enum { SETTINGS = sizeof settings / sizeof *settings };

typedef struct program {
    uint64_t seed;
    int tensor, data, pipeline, ranks, odd;
    uint32_t kind, micro_batches;
    bool trainer, with_mesh, grouped, tied;
    const struct setting *setting;
    dtrain_result results[MOST_RANKS];
    int at[MOST_RANKS]; /* the step that failed; -1: a create, STEPS: verify */
    char said[MOST_RANKS][1024];
} program;

/* ---- One rank ---- */

static dtrain_tensor *loss(dtrain_tape *tape, void *user)
{
    local *l = (local *)user;
    static const int64_t shape_x[2] = {BATCH, WIDTH};
    dtrain_tensor *x = dtrain_tape_input(tape, DTRAIN_DTYPE_F32, 2, shape_x, l->x, false);
    dtrain_tensor *t = dtrain_tape_input(tape, DTRAIN_DTYPE_I32, 1, shape_x, l->targets, false);
    dtrain_tape_unit(tape, 0);
    x = dtrain_linear(tape, x, &l->params[0], &l->params[1], DTRAIN_ACTIVATION_GELU);
    dtrain_tape_unit(tape, 1);
    if (l->params_used == PARAMS)
        x = dtrain_linear(tape, x, &l->params[PARAMS - 1], NULL, DTRAIN_ACTIVATION_NONE);
    x = dtrain_linear(tape, x, &l->params[2], &l->params[3], DTRAIN_ACTIVATION_NONE);
    return dtrain_cross_entropy(tape, x, t, 0, 0);
}
static dtrain_result next_batch(void *user)
{
    local *l = (local *)user;
    for (int i = 0; i < BATCH * WIDTH; i++) l->x[i] = 0.1f * (float)(i % 7 - l->step);
    for (int i = 0; i < BATCH; i++) l->targets[i] = (i + l->step) % CLASSES;
    return DTRAIN_OK;
}

/* A step of a loop of one's own, with gradients of ones. */
static dtrain_result own_step(local *l, dtrain_strategy *s, dtrain_optimizer *o)
{
    for (uint32_t u = 0; u < 2; u++) {
        TRY(dtrain_strategy_gather(s, u, DTRAIN_PASS_FORWARD));
        TRY(dtrain_strategy_release(s, u));
    }
    for (uint32_t u = 2; u-- > 0;) {
        TRY(dtrain_strategy_gather(s, u, DTRAIN_PASS_BACKWARD));
        for (size_t i = (size_t)l->params_used; i-- > 0;) {
            dtrain_param *p = &l->params[i];
            if (p->unit != u || p->flags & DTRAIN_PARAM_FROZEN) continue;
            for (int64_t k = 0; k < p->count; k++) p->grad[k] = 1;
            TRY(dtrain_strategy_ready(s, i));
        }
        TRY(dtrain_strategy_release(s, u));
    }
    TRY(dtrain_strategy_finish(s));
    return dtrain_optimizer_step(o, l->lr, 1);
}

static dtrain_result run(dtrain_world *world, const program *g, local *l, int *at)
{
    const bool odd = dtrain_world_rank(world) == g->odd, late = g->setting->where == LATE;
    dtrain_strategy *s = NULL;
    dtrain_optimizer *o = NULL;
    dtrain_trainer *t = NULL;
    dtrain_mesh *mesh = NULL;
    *at = -1;
    if (odd && !late) g->setting->change(l);
    dtrain_result result = g->with_mesh ? dtrain_mesh_create(world, &l->mesh, &mesh) : DTRAIN_OK;
    l->strategy.mesh = mesh;
    if (result == DTRAIN_OK)
        result = dtrain_strategy_create(world, l->params, (size_t)l->params_used, &l->strategy, &s);
    l->optimizer.groups = &l->group, l->optimizer.group_count = 1;
    if (result == DTRAIN_OK) result = dtrain_optimizer_create(world, s, &l->optimizer, &o);
    l->trainer.strategy = s, l->trainer.optimizer = o;
    if (result == DTRAIN_OK && g->trainer) result = dtrain_trainer_create(world, &l->trainer, &t);
    for (int step = 0; step < STEPS && result == DTRAIN_OK; step++) {
        *at = l->step = step;
        if (odd && late && step == 1) g->setting->change(l);
        result = g->trainer ? dtrain_trainer_step(t, NULL) : own_step(l, s, o);
    }
    if (result == DTRAIN_OK) *at = STEPS, result = dtrain_strategy_verify(s, NULL);
    snprintf((char *)g->said[dtrain_world_rank(world)], sizeof g->said[0], "%s",
             result == DTRAIN_OK ? "" : dtrain_last_error());
    dtrain_trainer_destroy(t);
    dtrain_optimizer_destroy(o);
    dtrain_strategy_destroy(s);
    dtrain_mesh_destroy(mesh);
    return result;
}

static int rank_main(dtrain_world *world, void *user)
{
    program *g = (program *)user;
    const int rank = dtrain_world_rank(world);
    local *l = (local *)calloc(1, sizeof *l);
    l->mesh.tensor = g->tensor, l->mesh.data = g->data, l->mesh.pipeline = g->pipeline;
    l->strategy.kind = g->kind;
    l->strategy.node_size = 0;
    if (g->pipeline > 1) l->strategy.pipeline = &l->pipeline;
    l->params[0] = ranks_param("w0", NULL, NULL, WIDTH, WIDTH);
    l->params[1] = ranks_param("b0", NULL, NULL, WIDTH, 0);
    l->params[2] = ranks_param("w1", NULL, NULL, CLASSES, WIDTH);
    l->params[3] = ranks_param("b1", NULL, NULL, CLASSES, 0);
    l->params[4] = ranks_param("w0 again", NULL, NULL, WIDTH, WIDTH);
    l->params[4].alias_of = &l->params[0];
    l->params[4].unit = 1;
    l->params_used = PARAMS - !g->tied;
    for (uint32_t i = 0; i < PARAMS - 1; i++) {
        l->params[i].unit = i / 2;
        l->params[i].init = DTRAIN_INIT_NORMAL;
        l->params[i].init_scale = 0.3f;
    }
    l->optimizer = l->group = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_ADAMW);
    if (g->grouped) l->params[2].group = 1;
    l->lr = l->trainer.schedule.lr = 0.01f;
    l->trainer.micro_batches = g->micro_batches;
    l->trainer.next_batch = next_batch, l->trainer.loss = loss, l->trainer.user = l;
    g->results[rank] = run(world, g, l, &g->at[rank]);
    free(l);
    return 0;
}

/* ---- Programs ---- */

static void generate(program *g, uint64_t seed_of)
{
    uint64_t state = ranks_mix(seed_of);
    memset(g, 0, sizeof *g);
    g->seed = seed_of;
    do {
        g->tensor = 1 + (int)ranks_random(&state, 2);
        g->data = 1 + (int)ranks_random(&state, 4);
        g->pipeline = 1 + (int)ranks_random(&state, 2);
        g->ranks = g->tensor * g->data * g->pipeline;
    } while (g->ranks < 2 || g->ranks > MOST_RANKS);
    g->with_mesh = g->tensor > 1 || g->pipeline > 1 || ranks_random(&state, 2);
    g->kind = 1 + (uint32_t)ranks_random(&state, g->pipeline > 1 ? 2 : 5);
    g->trainer = g->pipeline > 1 || ranks_random(&state, 3) > 0;
    g->grouped = ranks_random(&state, 2);
    g->tied = ranks_random(&state, 2);
    g->micro_batches = 1 + (uint32_t)ranks_random(&state, 3);
    g->odd = (int)ranks_random(&state, (uint64_t)g->ranks);
    for (;;) {
        g->setting = &settings[ranks_random(&state, SETTINGS)];
        const where w = g->setting->where;
        const bool mesh =
            g->setting->change == mesh_pipeline || g->setting->change == mesh_sequence;
        if (mesh && !g->with_mesh) continue;
        if (w == PIPELINE && g->pipeline == 1) continue;
        if (w == TRAINER && !g->trainer) continue;
        if (w == LATE && g->setting->change == rate && g->trainer)
            continue; /* it has the schedule */
        /* where units are gathered, fetching ahead is no rank's own business */
        if (g->setting->change == no_overlap && g->kind >= DTRAIN_STRATEGY_FULL_SHARD) continue;
        if (g->setting->change == frozen_use && !g->tied) continue;
        /* gradients that are missing are heard of by their norm */
        const bool freezes = g->setting->change == frozen || g->setting->change == frozen_stage ||
                             g->setting->change == frozen_use;
        if (w == LATE && freezes && (!g->trainer || g->tensor > 1)) continue;
        return;
    }
}

static bool is_wrong(const program *g, dtrain_result launched, char *why, size_t room)
{
    char odd[32];
    snprintf(odd, sizeof odd, "rank %d has ", g->odd);
    for (int r = 0; r < g->ranks; r++) {
        if (!g->setting->named) {
            if (g->results[r] == DTRAIN_OK) continue;
            snprintf(why, room, "rank %d, step %d, refuses: %s", r, g->at[r], g->said[r]);
        } else if (g->results[r] != DTRAIN_ERROR_MISMATCH)
            snprintf(why, room, "rank %d, step %d: %d, %s", r, g->at[r], (int)g->results[r],
                     g->said[r]);
        else if (!strstr(g->said[r], g->setting->named))
            snprintf(why, room, "rank %d does not name it: %s", r, g->said[r]);
        else if (g->ranks == 2
                     ? !strstr(g->said[r], "rank 1 has ") || !strstr(g->said[r], "rank 0 has ")
                     : !strstr(g->said[r], odd) || !strstr(g->said[r], ", the others have "))
            snprintf(why, room, "rank %d does not name the odd rank: %s", r, g->said[r]);
        else if (g->setting->where == LATE ? g->at[r] != (g->trainer ? 1 : STEPS) : g->at[r] > 0)
            snprintf(why, room, "rank %d finds it in step %d: %s", r, g->at[r], g->said[r]);
        else continue;
        return true;
    }
    snprintf(why, room, "launch: %s", dtrain_last_error());
    return launched != DTRAIN_OK;
}

static bool run_seed(uint64_t seed_of, bool words)
{
    static program *g;
    char why[1400];
    if (!g) g = (program *)ranks_shared(sizeof *g);
    generate(g, seed_of);
    dtrain_launch_desc desc = ranks_desc(g->ranks, DTRAIN_LAUNCH_THREADS);
    const dtrain_result launched = ranks_launch(&desc, rank_main, g, NULL);
    const bool wrong = is_wrong(g, launched, why, sizeof why);
    if (wrong || words)
        printf("  seed %llu: tensor %d, data %d, pipeline %d, kind %u, %s, rank %d %s%s: %s\n",
               (unsigned long long)g->seed, g->tensor, g->data, g->pipeline, (unsigned)g->kind,
               g->trainer ? "trainer" : "own loop", g->odd,
               g->setting->named ? g->setting->named : "differs as it may",
               g->setting->where == LATE ? " in step 1" : "", wrong ? why : g->said[0]);
    return !wrong;
}

int main(int argc, char **argv)
{
    const seeds s = seeds_of(argc, argv, 300, 10);
    test_begin(1, argv);
    return seeds_run(&s, NULL, 0, run_seed);
}
