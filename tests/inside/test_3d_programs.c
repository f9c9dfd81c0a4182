/* Random programs over tensor x pipeline x data axes, run by a trainer, against plain loops in double precision that
 * know nothing of ranks (tests/support/tensor_programs.h and tensor_oracle.h).
 *
 *     build/tests/test_3d_programs                  the seeds that ever failed, then 60 new ones;
 *                                                   with DTRAIN_TEST_FULL=1 500 new ones
 *     build/tests/test_3d_programs --count 10000    so many new ones
 *     build/tests/test_3d_programs --seed 77        this one, in words; if it fails it is shrunk
 *
 * A program is a graph like a small GPT's whose blocks are units, put into stages evenly or by a list, under any
 * schedule; tensors go from a stage to any later one, weights are tied between stages. Ranks of the data axis have
 * batches of different shapes and of targets that count, leave out blocks, and end at different micro-batches. A
 * gradient may overflow behind any block in one micro-batch of one of them: then all ranks skip that step. Half of
 * the programs are saved in the middle and go on in another layout, with other stages, schedule and strategy. Beside
 * the oracle stand the loss and the norm of each step, the loss of an evaluation, and the parameters at the end,
 * which are the same bits on all ranks. */
#include "train/trainer_internal.h"
#include "dtrain.h"
#include "test.h"
#include "files.h"
#include "tensor_programs.h"

/* What a rank's part of a run needs beside rank_state. */
typedef struct line_rank {
    rank_state s;
    int part; /* 0: until the program is saved, or all of it; 1: from there on */
    int next, evaluated;
    tp_place at; /* of the batch that was fetched */
    dtrain_trainer *trainer;
    dtrain_state *state;
} line_rank;

/* What ranks found, in memory that they share. */
typedef struct line_found {
    double loss[MOST_RANKS][MOST_STEPS + 1], norm[MOST_RANKS][MOST_STEPS],
        scale[MOST_RANKS][MOST_STEPS];
    uint64_t skipped[MOST_RANKS];
    int part;
    int odd,
        odd_micro; /* a rank with another token in one micro-batch of the first step; 0: none */
} line_found;
static line_found *found;

enum { SCALE = 60 }; /* of the loss, a power of two: a factor of 2^100 overflows */

static int part_ranks(const tp_program *g, int part)
{
    return g->layout[part].tensor * g->layout[part].pipeline * g->data;
}
static int part_begin(const tp_program *g, int part) { return part ? g->moves : 0; }
static int part_end(const tp_program *g, int part)
{
    return part == 0 && g->moves ? g->moves : g->steps;
}

/* The seed that a trainer gives a pass: one for each micro-batch of each step and data rank. */
static uint64_t seed_of_trainer(const tp_program *g, tp_place at)
{
    dtrain_trainer trainer;
    memset(&trainer, 0, sizeof trainer);
    trainer.desc.seed = g->seed;
    trainer.data_rank = at.data_rank;
    trainer.step = at.step;
    return dtrain__pass_seed(&trainer, (uint32_t)at.micro);
}

/* ---- A rank ---------------------------------------------------------------------------------------- */

static dtrain_result next_batch(void *user)
{
    line_rank *l = (line_rank *)user;
    const tp_program *g = &l->s.y->g;
    if (l->at.evaluation) {
        if (l->evaluated == tp_evaluations(g, l->at.data_rank))
            return dtrain_fail(DTRAIN_ERROR_END, "no more");
        l->at.micro = l->evaluated++;
        return DTRAIN_OK;
    }
    l->at.step = l->next / g->micro, l->at.micro = l->next % g->micro;
    if (tp_joins(g, l->at)) return dtrain_fail(DTRAIN_ERROR_END, "no more");
    l->next++;
    return DTRAIN_OK;
}
static dtrain_tensor *loss_of_line(dtrain_tape *tape, void *user)
{
    line_rank *l = (line_rank *)user;
    l->s.tape = tape;
    return build(&l->s, l->at);
}

static int make_line(line_rank *l)
{
    rank_state *s = &l->s;
    const tp_program *g = &s->y->g;
    const tp_layout *layout = &g->layout[l->part];
    dtrain_optimizer_desc how = dtrain_optimizer_defaults((dtrain_optimizer_kind)g->optimizer);
    dtrain_mesh_desc mesh;
    dtrain_strategy_desc desc;
    dtrain_pipeline_desc line;
    dtrain_mesh_info info;
    memset(&mesh, 0, sizeof mesh);
    memset(&line, 0, sizeof line);
    mesh.tensor = layout->tensor, mesh.pipeline = layout->pipeline, mesh.data = g->data;
    mesh.sequence_parallel = g->sequence_parallel;
    GOOD(dtrain_mesh_create(s->world, &mesh, &s->mesh));
    dtrain_mesh_query(s->mesh, &info);
    s->data_rank = l->at.data_rank = info.data_rank;
    describe(s, &desc);
    line.kind = layout->schedule, line.chunks = layout->chunks;
    line.units = layout->listed ? layout->units : NULL;
    desc.kind = layout->kind;
    desc.pipeline = layout->pipeline > 1 ? &line : NULL;
    GOOD(dtrain_strategy_create(s->world, s->params, (size_t)g->params, &desc, &s->strategy));
    how.momentum = g->momentum, how.nesterov = g->nesterov, how.weight_decay = g->decay;
    if (g->optimizer == DTRAIN_OPTIMIZER_ADAMW) how.beta2 = 0.99f, how.epsilon = 0.05f;
    GOOD(dtrain_optimizer_create(s->world, s->strategy, &how, &s->optimizer));
    return 0;
}

static int make_trainer(line_rank *l)
{
    rank_state *s = &l->s;
    const tp_program *g = &s->y->g;
    dtrain_trainer_desc t;
    dtrain_state_desc state;
    memset(&t, 0, sizeof t);
    memset(&state, 0, sizeof state);
    t.micro_batches = (uint32_t)g->micro, t.clip = g->clip, t.seed = g->seed;
    t.tape_flags = g->narrow ? DTRAIN_TAPE_BF16 : 0;
    t.recompute_every = g->recompute, t.recompute_ops = g->recompute_ops;
    t.schedule.lr = g->rate;
    if (g->scaled) t.loss_scaling.scale = (float)ldexp(1, SCALE);
    t.strategy = s->strategy, t.optimizer = s->optimizer;
    t.next_batch = next_batch, t.loss = loss_of_line, t.user = l;
    GOOD(dtrain_trainer_create(s->world, &t, &l->trainer));
    state.strategy = s->strategy, state.optimizer = s->optimizer, state.trainer = l->trainer;
    GOOD(dtrain_state_create(s->world, &state, &l->state));
    return 0;
}

static int save_line(line_rank *l)
{
    rank_state *s = &l->s;
    dtrain_checkpoint_desc desc;
    dtrain_checkpoint *checkpoint = NULL;
    memset(&desc, 0, sizeof desc);
    desc.directory = path_of("saved"), desc.state = l->state;
    GOOD(dtrain_checkpoint_open(s->world, &desc, &checkpoint));
    const dtrain_result saved = dtrain_checkpoint_save(checkpoint, s->y->g.moves, NAN);
    GOOD(saved == DTRAIN_OK ? dtrain_checkpoint_close(checkpoint)
                            : (dtrain_checkpoint_close(checkpoint), saved));
    return 0;
}

static int finish_line(line_rank *l)
{
    rank_state *s = &l->s;
    const tp_program *g = &s->y->g;
    if (l->part == 0 && g->moves) return save_line(l);
    l->at.step = MOST_STEPS, l->at.micro = 0, l->at.evaluation = true;
    if (g->evaluate)
        GOOD(dtrain_trainer_evaluate(l->trainer, next_batch, l, DTRAIN_UNTIL_END,
                                     &found->loss[s->rank][MOST_STEPS]));
    for (int p = 0; p < g->params; p++)
        GOOD(
            dtrain_strategy_read(s->strategy, (size_t)p, s->y->found[s->rank] + g->param[p].first));
    GOOD(dtrain_strategy_verify(s->strategy, NULL));
    return 0;
}

static int train_line(line_rank *l)
{
    rank_state *s = &l->s;
    const tp_program *g = &s->y->g;
    if (make_line(l) || make_trainer(l)) return 1;
    if (l->part) GOOD(dtrain_checkpoint_load(l->state, path_of("saved"), NULL, NULL));
    l->next = part_begin(g, l->part) * g->micro;
    if (l->next > g->end[s->data_rank]) l->next = g->end[s->data_rank];
    for (int step = part_begin(g, l->part); step < part_end(g, l->part); step++) {
        dtrain_step_record record;
        GOOD(dtrain_trainer_step(l->trainer, &record));
        found->loss[s->rank][step] = record.loss;
        found->norm[s->rank][step] = record.grad_norm;
        found->scale[s->rank][step] = record.loss_scale;
        found->skipped[s->rank] = record.skipped_steps;
        if (record.step != step + 1)
            return wrong(s, "step %d is counted %lld", step + 1, (long long)record.step);
    }
    return finish_line(l);
}

static int line_main(dtrain_world *world, void *user)
{
    line_rank *l = (line_rank *)calloc(1, sizeof *l);
    l->s.y = (play *)user;
    l->s.world = world;
    l->s.rank = dtrain_world_rank(world);
    l->part = found->part;
    l->s.odd = found->odd && found->odd == l->s.rank ? found->odd_micro + 1 : 0;
    const int result = train_line(l);
    dtrain_state_destroy(l->state);
    dtrain_trainer_destroy(l->trainer);
    dtrain_optimizer_destroy(l->s.optimizer);
    dtrain_strategy_destroy(l->s.strategy);
    dtrain_mesh_destroy(l->s.mesh);
    free(l);
    return result;
}

/* ---- Judging --------------------------------------------------------------------------------------- */

static long overflows_seen, moves_seen, refusals_seen, left_out, others_named;

/* The scale of a step, before which so many have overflowed. */
static double scale_of(const play *y, int step)
{
    int overflows = 0;
    for (int i = 0; i < step; i++) overflows += y->skipped[i];
    return y->g.scaled ? ldexp(1, SCALE - overflows) : 0;
}

static bool judge_step(const play *y, int rank, int step, char *text, size_t room)
{
    const tp_program *g = &y->g;
    const double loss = y->mean[step], norm = y->norms[step];
    const double within = (g->narrow ? 0.2 : 1e-4 * (1 + 4 * step)) * (1 + fabs(loss));
    const double of_norm = g->narrow ? 0.2 + 0.2 * step : 1e-3;
    const bool overflow = !isfinite(found->norm[rank][step]);
    if (!y->skipped[step] && !(fabs(found->loss[rank][step] - loss) <= within))
        snprintf(text, room, "rank %d, step %d: loss %.9g, expected %.9g", rank, step,
                 found->loss[rank][step], loss);
    else if (overflow != y->skipped[step])
        snprintf(text, room, "rank %d, step %d: the norm is %g, and the step should %s", rank, step,
                 found->norm[rank][step], overflow ? "not overflow" : "overflow");
    else if (!overflow && !(fabs(found->norm[rank][step] - norm) <= of_norm * norm))
        snprintf(text, room, "rank %d, step %d: norm %.9g, expected %.9g", rank, step,
                 found->norm[rank][step], norm);
    else if (found->scale[rank][step] != scale_of(y, step))
        snprintf(text, room, "rank %d, step %d: scale %g, expected %g", rank, step,
                 found->scale[rank][step], scale_of(y, step));
    else return true;
    return false;
}

/* All ranks of a part have the same records. */
static bool judge_part(const play *y, int part, char *text, size_t room)
{
    const tp_program *g = &y->g;
    for (int step = part_begin(g, part); step < part_end(g, part); step++)
        for (int r = 0; r < part_ranks(g, part); r++) {
            if (!judge_step(y, r, step, text, room)) return false;
            if (memcmp(&found->loss[r][step], &found->loss[0][step], sizeof(double)) == 0 &&
                memcmp(&found->norm[r][step], &found->norm[0][step], sizeof(double)) == 0)
                continue;
            snprintf(text, room, "rank %d has another loss or norm than rank 0 in step %d", r,
                     step);
            return false;
        }
    return true;
}

static bool judge_end(play *y, int ranks, char *text, size_t room)
{
    const tp_program *g = &y->g;
    const double mean = y->mean[MOST_STEPS];
    double all = 0;
    for (int64_t i = 0; i < g->elements; i++)
        all += (y->after[i] - (double)y->init[i]) * (y->after[i] - (double)y->init[i]);
    for (int r = 0; r < ranks; r++) {
        const double loss = found->loss[r][MOST_STEPS];
        if (g->evaluate && !(fabs(loss - mean) <= (g->narrow ? 0.3 : 2e-3) * (1 + fabs(mean)))) {
            snprintf(text, room, "rank %d evaluates to %.9g, expected %.9g", r, loss, mean);
            return false;
        }
    }
    for (int p = 0; p < g->params; p++) {
        const tp_param *q = &g->param[p];
        if (q->alias >= 0) continue;
        if (!judge_param(y, p, sqrt(all), text, room)) return false;
        for (int r = 1; r < ranks; r++)
            if (memcmp(y->found[r] + q->first, y->found[0] + q->first,
                       (size_t)q->count * sizeof(float)) != 0) {
                snprintf(text, room, "rank %d has other bits of parameter %d (%s) than rank 0", r,
                         p, q->name);
                return false;
            }
    }
    return true;
}

static const char *removal(void)
{
    static char command[128];
    snprintf(command, sizeof command, "rm -rf %s", path_of("saved"));
    return command;
}

static bool run_part(play *y, int part, char *text, size_t room)
{
    found->part = part;
    return run_ranks(y, part_ranks(&y->g, part), line_main, text, room);
}

/* A rank of the first replica that has another token than the others of it must be named, by all ranks. Where gradients
 * are clipped, the norm's own comparison along the tensor axis may see the difference first. */
static bool other_token_is_named(play *y, char *text, size_t room)
{
    const tp_layout *layout = &y->g.layout[0];
    const int replica = layout->tensor * layout->pipeline;
    const int odd =
        1 + (int)(tp_draw(&y->g, 99, 0, 0, 0, 0) % (uint64_t)(replica > 1 ? replica - 1 : 1));
    char expected[128];
    if (replica == 1) return true;
    found->odd = odd % layout->tensor + odd / layout->tensor * layout->tensor * y->g.data;
    found->odd_micro = (int)(tp_draw(&y->g, 99, 0, 0, 0, 1) % (uint64_t)y->g.micro);
    snprintf(expected, sizeof expected, "at step 1 rank %d had other inputs or targets than rank 0",
             found->odd);
    const bool ends = found->odd_micro >= y->g.end[0];
    const bool ran = run_part(y, 0, text, room);
    const bool norm =
        layout->tensor > 1 && strstr(text, "axis must run the same program on the same samples");
    if (ends ? ran : !ran && (norm || strstr(text, expected))) {
        others_named += !ends;
        return true;
    }
    const size_t used = strlen(text);
    snprintf(text + used, room - used, "; expected \"%s\"", expected);
    return false;
}

static bool run_program(play *y, char *text, size_t room, bool *judged)
{
    const int last = y->g.moves ? 1 : 0;
    bool good = run_part(y, 0, text, room);
    if (last && good) good = run_part(y, 1, text, room);
    if (last && system(removal()) != 0) good = false;
    for (int i = 0; i < y->g.steps; i++) overflows_seen += y->skipped[i];
    moves_seen += last;
    *judged = good;
    return good && judge_part(y, 0, text, room) && (!last || judge_part(y, 1, text, room)) &&
           judge_end(y, part_ranks(&y->g, last), text, room);
}

/* Whether it is one of those that use a tensor of several units before, which activation checkpointing refuses. */
static bool refused(const play *y, const char *text)
{
    const bool known =
        y->g.recompute && strstr(text, "has overwritten it: activation checkpointing");
    refusals_seen += known;
    return known;
}

/* Whether the oracle itself would fail if values at the beginning were off by some roundings, or under autocast by one:
 * deep programs multiply and normalise what is left of a difference. */
static bool rounding_decides(play *y)
{
    const tp_program *g = &y->g;
    play *z = (play *)malloc(sizeof *z);
    char text[700];
    *z = *y;
    z->init = (float *)malloc((size_t)g->elements * sizeof *z->init);
    memset(z->first, 0, sizeof z->first);
    memset(z->skipped, 0, sizeof z->skipped);
    z->mean[MOST_STEPS] = z->updates = 0;
    for (int64_t i = 0; i < g->elements; i++)
        z->init[i] = y->init[i] * (1 + ldexpf((float)(tp_draw(g, 98, 0, 0, 0, i) % 33) - 16,
                                              g->narrow ? -13 : -24));
    expect(z);
    for (int r = 0; r < MOST_RANKS; r++) {
        for (int step = 0; step < g->steps; step++)
            found->norm[r][step] = z->skipped[step] ? (double)INFINITY : z->norms[step],
            found->scale[r][step] = scale_of(z, step);
        memcpy(found->loss[r], z->mean, sizeof z->mean);
        for (int64_t i = 0; i < g->elements; i++) y->found[r][i] = (float)z->after[i];
        if (z->first[r].g) tp_free(&z->first[r]);
    }
    const bool same = judge_part(y, 0, text, sizeof text) &&
                      (!g->moves || judge_part(y, 1, text, sizeof text)) &&
                      judge_end(y, 1, text, sizeof text);
    free(z->init), free(z->after), free(z->moments[0]), free(z->moments[1]), free(z);
    left_out += !same;
    return !same;
}

static bool passes(uint64_t seed, uint32_t without, char *text, size_t room, bool words)
{
    play *y = (play *)ranks_shared(sizeof *y);
    bool judged = false; /* it ran, and numbers are off */
    memset(found, 0, sizeof *found);
    generate(&y->g, seed, without, true);
    if (words) print_program(&y->g, without);
    y->init = (float *)calloc((size_t)y->g.elements, sizeof *y->init);
    y->found[0] = (float *)ranks_shared(sizeof *y->init * MOST_RANKS * (size_t)y->g.elements);
    for (int r = 1; r < MOST_RANKS; r++) y->found[r] = y->found[r - 1] + y->g.elements;
    bool good = run_ranks(y, 1, one_rank, text, room);
    if (good) expect(y);
    left_out += y->kink;
    if (good && !y->kink)
        good = run_program(y, text, room, &judged) || refused(y, text) ||
               (judged && rounding_decides(y));
    if (good && !y->kink && seed % 3 == 0) {
        memset(y->text, 0, sizeof y->text);
        good = other_token_is_named(y, text, room) || refused(y, text);
        if (system(removal()) != 0) good = false;
    }
    forget(y);
    return good;
}

static bool run_seed(uint64_t seed, bool words)
{
    return seed_passes(seed, words, "test_3d_programs", passes);
}

static const uint64_t failed_once[] = {618034128, 618034484, 4643, 5350};

int main(int argc, char **argv)
{
    enum { MANY = 60, FULL = 500 };
    seeds s = seeds_of(argc, argv, MANY, 0);
    if (test_full() && argc == 1) s.count = test_draws(MANY, FULL, 20 * FULL), s.end = 0;
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (!files_begin("3d_programs")) return 1;
    found = (line_found *)ranks_shared(sizeof *found);
    trainer_seed = seed_of_trainer;
    const int status =
        seeds_run(&s, failed_once, sizeof failed_once / sizeof *failed_once, run_seed);
    printf("  of %ld tensors %ld of %ld shifted ones and %ld with twice their gradients would be "
           "noticed\n",
           tensors_seen, shifts_noticed, shifts_seen, doubles_noticed);
    printf("  %ld steps overflowed, %ld programs went on in another layout, %ld were refused; %ld "
           "were "
           "left out, where rounding decides; in %ld others another token on one rank was named\n",
           overflows_seen, moves_seen, refusals_seen, left_out, others_named);
    const bool vacuous = !s.one && (shifts_noticed * 100 < shifts_seen * 97 ||
                                    doubles_noticed * 10 < tensors_seen * 8);
    if (vacuous) printf("  FAIL the bounds are so wide that wrong numbers pass\n");
    return !files_end() || status || vacuous;
}
