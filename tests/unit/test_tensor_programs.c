/* Random programs for the tensor axis of a mesh, in which ranks of the data axis differ, against plain loops in
 * double precision that know nothing of ranks (tests/support/tensor_oracle.h).
 *
 *     build/tests/test_tensor_programs                  the seeds that ever failed, then 120 new ones;
 *                                                       with DTRAIN_TEST_FULL=1 500 new ones
 *     build/tests/test_tensor_programs --count 10000    so many new ones
 *     build/tests/test_tensor_programs --seed 77        this one, in words; if it fails it is shrunk
 *
 * A program is a pure function of its seed: a graph like a small GPT's of random operations, cuts and placements on t
 * x d ranks, a kind of strategy, two or three steps of SGD with clipping. Ranks of the data axis have batches of
 * different numbers of rows and of targets that count, and leave out blocks, so that they lack gradients; all ranks
 * of a tensor axis do the same. Beside the oracle stand: the placement and the values of each tensor of the first
 * pass, every loss, every norm, and the parameters at the end, which are the same bits on all ranks. Masks of dropout
 * are those of one rank, to the bit.
 *
 * build/emu/test_tensor_programs is the same with emulated GPUs: half of the programs exchange through host memory, in
 * the others each rank has its own GPU and talks over dtrain_nccl.h and the mock of NCCL, with collectives of two axes
 * under way at once.
 *
 * One program in five is wild: it places tensors and cuts weights in any way, also in those that an operation cannot
 * use. Then an operation refuses them on all ranks at once, or the numbers are right.
 *
 * Bounds are a small part of what training has changed in a tensor, and the program checks of every tensor that they
 * mean something: one that is shifted by an element, or that has had twice its gradient, must be outside of them. */
#include "test.h"

#include "dtrain.h"
#ifdef DTRAIN_CUDA_EMULATION
#define DTRAIN_NCCL_LINKED
#define DTRAIN_NCCL_IMPLEMENTATION
#include "dtrain_nccl.h"
#endif
#include "tensor_programs.h"
#ifdef DTRAIN_CUDA_EMULATION
enum { MANY = 30, FULL = 50 };
#else
enum { MANY = 120, FULL = 500 };
#endif

/* ---- A rank ---- */

/* Compare what a node made with the oracle's, element by element, where this rank's are. */
static int check_node(rank_state *s, int at)
{
    const tp_program *g = &s->y->g;
    const tp_node *n = &g->node[at];
    const tp_pass *o = &s->y->first[s->data_rank];
    const dtrain_tensor *x = s->value[at];
    const int64_t rows = n->kind == TP_CROSS_ENTROPY ? 1 : o->rows;
    const uint32_t placement = g->tensor > 1 ? n->placement : DTRAIN_PLACEMENT_WHOLE;
    const bool by_rows = placement == DTRAIN_PLACEMENT_ROWS;
    double most = 1, worst = 0;
    if (x->placement != placement)
        return wrong(s, "node %d (%s) is placed %u, expected %u", at, tp_names[n->kind],
                     x->placement, placement);
    const int64_t begin = by_rows ? rows * s->tensor_rank / g->tensor : 0;
    const int64_t end = by_rows ? rows * (s->tensor_rank + 1) / g->tensor : rows;
    float *values = (float *)malloc((size_t)(x->count ? x->count : 1) * sizeof *values);
    const dtrain_result result = dtrain_tensor_read(s->tape, x, values, NULL);
    int64_t k = 0, row = 0, column = 0;
    for (int64_t i = 0; i < rows * n->n && n->kind != TP_CROSS_ENTROPY; i++)
        most = fabs(o->y[at][i]) > most ? fabs(o->y[at][i]) : most;
    for (int64_t r = begin; r < end && result == DTRAIN_OK; r++)
        for (int64_t c = 0; c < n->n; c++) {
            if (placement == DTRAIN_PLACEMENT_COLUMNS &&
                tp_owner(&g->cut[n->cut].cut, g->cut[n->cut].whole, g->tensor, c) != s->tensor_rank)
                continue;
            const double expected = n->kind == TP_CROSS_ENTROPY ? o->loss : o->y[at][r * n->n + c];
            const double off_by = k < x->count ? fabs((double)values[k] - expected) : INFINITY;
            if (!(off_by <= worst)) worst = off_by, row = r, column = c;
            k++;
        }
    free(values);
    if (result != DTRAIN_OK)
        return wrong(s, "node %d (%s): %.300s", at, tp_names[n->kind], dtrain_last_error());
    if (k != x->count)
        return wrong(s, "node %d (%s) has %lld elements, expected %lld", at, tp_names[n->kind],
                     (long long)x->count, (long long)k);
    if (!(worst <= (g->narrow ? 0.2 : 3e-5) * most))
        return wrong(s, "node %d (%s) is off by %g in row %lld, column %lld", at, tp_names[n->kind],
                     worst, (long long)row, (long long)column);
    return 0;
}

static int run_pass(rank_state *s, tp_place at)
{
    const tp_program *g = &s->y->g;
    const uint32_t flags =
        (g->narrow ? DTRAIN_TAPE_BF16 : 0) | (at.evaluation ? DTRAIN_TAPE_NO_GRAD : 0);
    const bool look = at.step == 0 && at.micro == 0 && !g->recompute && !g->wild;
    GOOD(dtrain_tape_begin(s->tape, flags, seed_of(g, at)));
    if (!build(s, at)) return 1;
    for (int i = 0; i < g->nodes && look; i++)
        if (s->value[i] && !tp_skipped(g, at, i) && check_node(s, i)) return 1;
    dtrain_tensor *loss = s->value[g->nodes - 1];
    const int slot = at.evaluation ? MOST_STEPS : at.step;
    GOOD(dtrain_tensor_read(s->tape, loss, &s->y->losses_found[s->rank][slot][at.micro], NULL));
    if (at.evaluation) return 0;
    GOOD(dtrain_tape_backward(s->tape, loss, 1 / (float)g->micro));
    GOOD(dtrain_strategy_finish(s->strategy));
    return 0;
}

static int train(rank_state *s)
{
    const tp_program *g = &s->y->g;
    tp_place at;
    memset(&at, 0, sizeof at);
    at.data_rank = s->data_rank;
    for (at.step = 0; at.step < g->steps; at.step++) {
        float scale = 1;
        for (at.micro = 0; at.micro < g->micro; at.micro++) {
            GOOD(dtrain_strategy_accumulate(s->strategy, at.micro + 1 < g->micro));
            bool over = false;
            if (tp_joins(g, at)) GOOD(dtrain_strategy_join(s->strategy, &over));
            else if (run_pass(s, at)) return 1;
        }
        GOOD(dtrain_grad_norm(s->strategy, NULL, g->clip, &s->y->norms_found[s->rank][at.step],
                              &scale));
        GOOD(dtrain_optimizer_step(s->optimizer, g->rate, scale));
    }
    at.step = MOST_STEPS, at.micro = 0, at.evaluation = true;
    if (g->evaluate && run_pass(s, at)) return 1;
    for (int p = 0; p < g->params; p++)
        GOOD(
            dtrain_strategy_read(s->strategy, (size_t)p, s->y->found[s->rank] + g->param[p].first));
    GOOD(dtrain_strategy_verify(s->strategy, NULL));
    return 0;
}

static int set_up(rank_state *s)
{
    const dtrain_optimizer_desc sgd = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_SGD);
    const tp_program *g = &s->y->g;
    dtrain_mesh_desc mesh;
    dtrain_strategy_desc desc;
    dtrain_mesh_info info;
    memset(&mesh, 0, sizeof mesh);
    mesh.tensor = g->tensor;
    mesh.data = g->data;
    mesh.sequence_parallel = g->sequence_parallel;
    GOOD(dtrain_mesh_create(s->world, &mesh, &s->mesh));
    dtrain_mesh_query(s->mesh, &info);
    s->data_rank = info.data_rank;
    s->tensor_rank = info.tensor_rank;
    describe(s, &desc);
    GOOD(dtrain_strategy_create(s->world, s->params, (size_t)g->params, &desc, &s->strategy));
    GOOD(dtrain_optimizer_create(s->world, s->strategy, &sgd, &s->optimizer));
    GOOD(dtrain_tape_create(s->world, s->strategy, NULL, &s->tape));
    if (g->recompute) GOOD(dtrain_tape_recompute(s->tape, g->recompute, g->recompute_ops));
    return 0;
}

static int rank_main(dtrain_world *world, void *user)
{
    rank_state state, *s = &state;
    memset(s, 0, sizeof *s);
    s->y = (play *)user;
    s->world = world;
    s->rank = dtrain_world_rank(world);
    const int result = set_up(s) || train(s);
    dtrain_tape_destroy(s->tape);
    dtrain_optimizer_destroy(s->optimizer);
    dtrain_strategy_destroy(s->strategy);
    dtrain_mesh_destroy(s->mesh);
    return result;
}

/* ---- Judging ---- */

static bool judge(play *y, char *text, size_t room)
{
    const tp_program *g = &y->g;
    const int ranks = g->tensor * g->data;
    double all = 0;
    for (int r = 0; r < ranks; r++)
        for (int step = 0; step <= MOST_STEPS; step++)
            for (int micro = 0; micro < g->micro; micro++) {
                const double loss = y->losses[r / g->tensor][step][micro],
                             found = (double)y->losses_found[r][step][micro];
                if (fabs(found - loss) <=
                    (g->narrow ? 0.2 : 1e-4 * (1 + 4 * step)) * (1 + fabs(loss)))
                    continue;
                snprintf(text, room, "rank %d, step %d, micro-batch %d: loss %.9g, expected %.9g",
                         r, step, micro, found, loss);
                return false;
            }
    for (int step = 0; step < g->steps; step++)
        if (!(fabs((double)y->norms_found[0][step] - y->norms[step]) <=
              (g->narrow ? 0.2 + 0.2 * step : 1e-3) * y->norms[step])) {
            snprintf(text, room, "step %d: norm %.9g, expected %.9g", step,
                     (double)y->norms_found[0][step], y->norms[step]);
            return false;
        }
    for (int r = 1; r < ranks; r++) {
        if (memcmp(y->norms_found[r], y->norms_found[0], sizeof y->norms_found[0]) != 0) {
            snprintf(text, room, "rank %d has another norm than rank 0", r);
            return false;
        }
        if (r % g->tensor &&
            memcmp(y->losses_found[r], y->losses_found[r - 1], sizeof y->losses_found[0]) != 0) {
            snprintf(text, room, "rank %d has another loss than its neighbour on the tensor axis",
                     r);
            return false;
        }
    }
    for (int64_t i = 0; i < g->elements; i++)
        all += (y->after[i] - (double)y->init[i]) * (y->after[i] - (double)y->init[i]);
    for (int p = 0; p < g->params; p++) {
        const int64_t first = g->param[p].first;
        if (g->param[p].alias >= 0) continue;
        if (!judge_param(y, p, sqrt(all), text, room)) return false;
        for (int r = 1; r < ranks; r++)
            if (memcmp(y->found[r] + first, y->found[0] + first,
                       (size_t)g->param[p].count * sizeof(float)) != 0) {
                snprintf(text, room, "rank %d has other bits of parameter %d (%s) than rank 0", r,
                         p, g->param[p].name);
                return false;
            }
    }
    return true;
}

static long wild_seen, wild_refused, left_out;

static bool passes(uint64_t seed, uint32_t without, char *text, size_t room, bool words)
{
    play *y = (play *)ranks_shared(sizeof *y);
    generate(&y->g, seed, without, false);
    if (words) print_program(&y->g, without);
    y->init = (float *)calloc((size_t)y->g.elements, sizeof *y->init);
    y->found[0] = (float *)ranks_shared(sizeof *y->init * MOST_RANKS * (size_t)y->g.elements);
    for (int r = 1; r < MOST_RANKS; r++) y->found[r] = y->found[r - 1] + y->g.elements;
    bool good = run_ranks(y, 1, one_rank, text, room);
    if (good) expect(y);
    if (y->kink) {
        left_out++;
        forget(y);
        return true;
    }
    const double start = test_seconds();
    if (good) {
        good = run_ranks(y, y->g.tensor * y->g.data, rank_main, text, room);
        /* What an operation cannot use it refuses, on all ranks at once. A rank that is slow may
         * still be in create, and then says what the operation of another one has said. */
        const bool slow = strstr(text, "DTRAIN_ERROR_PEER") &&
                          strstr(text, "its last error: dtrain_") &&
                          !strstr(text, "its last error: dtrain_strategy_");
        const bool refused = !good && y->g.wild && (slow || strstr(text, ": node ")) &&
                             test_seconds() < start + RANKS_SOON;
        wild_seen += y->g.wild, wild_refused += refused;
        good = refused || (good && judge(y, text, room));
    }
    forget(y);
    return good;
}

static bool run_seed(uint64_t seed, bool words)
{
    return seed_passes(seed, words, "test_tensor_programs", passes);
}

static const uint64_t failed_once[] = {618034011, 618034027, 618034012, 618034477, 618035920};

int main(int argc, char **argv)
{
    seeds s = seeds_of(argc, argv, MANY, 0);
    if (test_full() && argc == 1) s.count = test_draws(MANY, FULL, 20 * FULL), s.end = 0;
    setvbuf(stdout, NULL, _IOLBF, 0);
    const int status =
        seeds_run(&s, failed_once, sizeof failed_once / sizeof *failed_once, run_seed);
    printf("  of %ld tensors %ld of %ld shifted ones and %ld with twice their gradients would be "
           "noticed\n",
           tensors_seen, shifts_noticed, shifts_seen, doubles_noticed);
    printf("  of %ld programs that place tensors in any way %ld were refused; %ld were left out, "
           "where rounding decides\n",
           wild_seen, wild_refused, left_out);
#ifdef DTRAIN_CUDA_EMULATION
    if (!s.one && nccl_mock_count.launches == 0) {
        printf("  FAIL no collective went over NCCL\n");
        return 1;
    }
#endif
    const bool vacuous = !s.one && (shifts_noticed * 100 < shifts_seen * 97 ||
                                    doubles_noticed * 10 < tensors_seen * 8);
    if (vacuous) printf("  FAIL the bounds are so wide that wrong numbers pass\n");
    return status || vacuous;
}
