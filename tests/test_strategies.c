/* test_strategies.c: [S08], [S09] every kind of strategy. The matrix trains one model under every kind
 * and compares bits with the other kinds, and numbers with one rank that has the whole batch. Then:
 * memory and bytes against their formulas, hooks called by hand, AUTO, refusals.
 *
 *     DTRAIN_TEST_FULL=1 ./test_strategies      more rank counts for the low-precision rows */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

#include "test.h"
#include "ranks.h"
#include "strategy_model.h"

/* ---- the matrix ---- */

enum { MOST_CASES = 64 };

typedef struct matrix {
    int ranks, count;
    uint32_t mode;
    strategy_case cases[MOST_CASES];
    strategy_outcome out[MOST_CASES];
} matrix;

static matrix *matrix_create(int ranks, uint32_t mode)
{
    matrix *m = (matrix *)ranks_shared(sizeof *m);
    m->ranks = ranks;
    m->mode = mode;
    return m;
}

static strategy_case *matrix_add(matrix *m, const char *group, uint32_t kind, uint32_t micro,
                                 uint32_t accumulation)
{
    strategy_case *c = &m->cases[m->count++];
    if (m->count > MOST_CASES) exit(3);
    snprintf(c->group, sizeof c->group, "%s", group);
    c->kind = kind;
    c->micro = micro;
    c->accumulation = accumulation;
    c->optimizer = DTRAIN_ADAMW;
    return c;
}

static int matrix_rank(dtrain_world *world, void *user)
{
    matrix *m = (matrix *)user;
    int i;
    for (i = 0; i < m->count; i++) {
        const dtrain_result result = strategy_train(world, &m->cases[i], &m->out[i]);
        if (!CHECK_MSG(result == DTRAIN_OK, "%s: rank %d: %s",
                       strategy_case_name(&m->cases[i], m->ranks).text, dtrain_world_rank(world),
                       dtrain_last_error()))
            return 1;
    }
    return 0;
}

/* One rank on the whole batch, once for each setting that is to be compared with it. */
static matrix *matrix_joined(const matrix *m)
{
    matrix *joined = matrix_create(1, m->mode);
    int i;
    for (i = 0; i < m->count; i++) {
        strategy_case *c = &joined->cases[joined->count];
        if (m->cases[i].tolerance == 0) continue;
        *c = m->cases[i];
        c->kind = DTRAIN_DDP;
        c->micro = 1;
        c->accumulation = c->node_size = c->param_dtype = c->reduce_dtype = 0;
        joined->count++;
    }
    ranks_run(1, joined->mode, matrix_rank, joined);
    return joined;
}

/* Runs all cases in one launch; compares groups bit for bit, and the rest with the joined batch. */
static void matrix_run(matrix *m)
{
    matrix *joined = matrix_joined(m);
    int i, k, next = 0;
    ranks_run(m->ranks, m->mode, matrix_rank, m);
    for (i = 0; i < m->count; i++) {
        const strategy_name name = strategy_case_name(&m->cases[i], m->ranks);
        strategy_check_ranks(&m->out[i], m->ranks, name.text);
        for (k = 0; k < i; k++)
            if (strcmp(m->cases[k].group, m->cases[i].group) == 0) break;
        if (k < i) strategy_check_bits(&m->out[i], &m->out[k], name.text);
        if (m->cases[i].tolerance > 0)
            strategy_check_close(&m->out[i], m->ranks, &joined->out[next++], 1,
                                 m->cases[i].tolerance, name.text);
    }
    munmap(joined, sizeof *joined);
}

static const uint32_t flat_kinds[] = {DTRAIN_DDP, DTRAIN_ZERO1, DTRAIN_SHARD_GRAD_OP,
                                      DTRAIN_FULL_SHARD, DTRAIN_ZERO3};
enum { FLAT_KINDS = sizeof flat_kinds / sizeof *flat_kinds };

static bool shards_grads(uint32_t kind) { return kind != DTRAIN_DDP && kind != DTRAIN_ZERO1; }

/* Sums inside nodes come first, so several nodes of several ranks have groups of their own, with a
 * second run of each as company. A node of all ranks, or of one, adds in rank order like the rest. */
static void matrix_add_hybrid(matrix *m, const char *group, uint32_t micro, uint32_t accumulation,
                              strategy_case like)
{
    int node, copy;
    for (node = 1; node <= m->ranks; node++) {
        const bool flat = node == 1 || node == m->ranks;
        if (m->ranks % node || (m->ranks == 8 && node != 2 && node != 8)) continue;
        if (m->ranks > 2 && node == 1) continue;
        for (copy = 0; copy < 2 - flat; copy++) {
            strategy_case *c = matrix_add(m, "", DTRAIN_HYBRID_SHARD, micro, accumulation);
            char text[sizeof c->group];
            snprintf(text, sizeof text, flat ? "%s" : "%s, nodes of %d", group, node);
            like.kind = c->kind, like.micro = micro, like.accumulation = accumulation;
            like.node_size = (uint32_t)node;
            *c = like;
            memcpy(c->group, text, sizeof text);
        }
    }
}

/* Every kind x {1, 4 micro-batches reduced at the end, 4 reduced one by one}. */
static void matrix_add_kinds(matrix *m, const char *what, strategy_case like)
{
    char once[48], last[48], every[48];
    int i;
    snprintf(once, sizeof once, "%s, one micro-batch", what);
    snprintf(last, sizeof last, "%s, last", what);
    snprintf(every, sizeof every, "%s, every", what);
    for (i = 0; i < FLAT_KINDS * 3; i++) {
        const uint32_t kind = flat_kinds[i / 3];
        const uint32_t modes[3] = {DTRAIN_ACCUMULATE_DEFAULT, DTRAIN_ACCUMULATE_LAST,
                                   DTRAIN_ACCUMULATE_DEFAULT};
        const char *const groups[3] = {once, last, shards_grads(kind) ? every : last};
        strategy_case *c = matrix_add(m, groups[i % 3], kind, i % 3 ? 4 : 1, modes[i % 3]);
        like.kind = c->kind, like.micro = c->micro, like.accumulation = c->accumulation;
        memcpy(like.group, c->group, sizeof like.group);
        *c = like;
    }
    matrix_add_hybrid(m, once, 1, DTRAIN_ACCUMULATE_DEFAULT, like);
    matrix_add_hybrid(m, last, 4, DTRAIN_ACCUMULATE_LAST, like);
    matrix_add_hybrid(m, every, 4, DTRAIN_ACCUMULATE_EVERY, like);
}

static strategy_case plain_case(double tolerance)
{
    strategy_case c;
    memset(&c, 0, sizeof c);
    c.optimizer = DTRAIN_ADAMW;
    c.tolerance = tolerance;
    return c;
}

/* fp32. Parameters are of size 1 and move by 0.08: 2e-6 is some units in the last place. */
static matrix *matrix_fp32(int ranks, uint32_t mode)
{
    matrix *m = matrix_create(ranks, mode);
    strategy_case *c;
    int i;
    matrix_add_kinds(m, "adamw", plain_case(2e-6));
    for (i = 0; i < FLAT_KINDS; i++) {
        c = matrix_add(m, "sgd", flat_kinds[i], 1, 0);
        c->optimizer = DTRAIN_SGD;
        c->tolerance = 2e-6;
    }
    if (ranks == 4) {
        c = matrix_add(m, "shard every", DTRAIN_HYBRID_SHARD, 4, DTRAIN_ACCUMULATE_SHARD_EVERY);
        c->node_size = 2;
        c->tolerance = 2e-6;
        c = matrix_add(m, "shard every", DTRAIN_HYBRID_SHARD, 4, DTRAIN_ACCUMULATE_DEFAULT);
        c->node_size = 2;
    }
    matrix_run(m);
    return m;
}

static void test_matrix_1_rank(void) { matrix_fp32(1, DTRAIN_LAUNCH_PROCESSES); }
static void test_matrix_3_ranks(void) { matrix_fp32(3, DTRAIN_LAUNCH_PROCESSES); }
static void test_matrix_4_ranks(void) { matrix_fp32(4, DTRAIN_LAUNCH_THREADS); }
static void test_matrix_8_ranks(void) { matrix_fp32(8, DTRAIN_LAUNCH_PROCESSES); }

static void test_matrix_2_ranks_are_threads_or_processes(void)
{
    matrix *a = matrix_fp32(2, DTRAIN_LAUNCH_PROCESSES), *b = matrix_fp32(2, DTRAIN_LAUNCH_THREADS);
    int i;
    for (i = 0; i < a->count; i++)
        strategy_check_bits(&a->out[i], &b->out[i], strategy_case_name(&a->cases[i], 2).text);
}

/* Autocast on the tape is the same computation under every kind: the same bits. A rounded product
 * may fall to either side after another order of sums, so the joined batch is 8 bits away. */
static void check_autocast(int ranks, uint32_t flags, uint32_t checkpoint_every, double tolerance)
{
    matrix *m = matrix_create(ranks, DTRAIN_LAUNCH_PROCESSES);
    strategy_case like = plain_case(tolerance);
    like.tape_flags = flags;
    like.checkpoint_every = checkpoint_every;
    matrix_add_kinds(m, "autocast", like);
    matrix_run(m);
}

static void test_bf16_autocast(void)
{
    check_autocast(2, DTRAIN_TAPE_BF16, 0, 4e-3);
    check_autocast(3, DTRAIN_TAPE_BF16, 0, 4e-3);
    if (ranks_full()) check_autocast(8, DTRAIN_TAPE_BF16, 0, 4e-3);
}

/* Weights of matrix multiplications are rounded to bf16 there anyway: it is the same to round them
 * before they travel. Everything else loses bits. */
static void test_bf16_parameters(void)
{
    static const uint32_t kinds[] = {DTRAIN_FULL_SHARD, DTRAIN_ZERO3, DTRAIN_HYBRID_SHARD};
    matrix *m = matrix_create(3, DTRAIN_LAUNCH_PROCESSES);
    strategy_case *c = matrix_add(m, "matmul", DTRAIN_DDP, 1, 0);
    int i, model;
    c->model = MODEL_MATMUL, c->tape_flags = DTRAIN_TAPE_BF16;
    for (i = 0; i < 6; i++) {
        model = i / 3 ? MODEL_MATMUL : MODEL_GPT;
        c = matrix_add(m, model == MODEL_MATMUL ? "matmul" : "gpt", kinds[i % 3], 1, 0);
        c->model = (uint32_t)model;
        c->tape_flags = DTRAIN_TAPE_BF16;
        c->param_dtype = DTRAIN_BF16;
        c->node_size = c->kind == DTRAIN_HYBRID_SHARD ? 3 : 0;
        c->tolerance = model == MODEL_GPT ? 2e-2 : 4e-3;
    }
    matrix_run(m);
}

/* What travels is rounded the same way under every kind, and added in fp32. */
static void check_reduce_dtype(uint32_t dtype, double tolerance)
{
    matrix *m = matrix_create(3, DTRAIN_LAUNCH_PROCESSES);
    int i;
    for (i = 0; i < FLAT_KINDS * 2; i++) {
        strategy_case *c = matrix_add(m, i % 2 ? "reduce, last" : "reduce", flat_kinds[i / 2],
                                      i % 2 ? 4 : 1, i % 2 ? DTRAIN_ACCUMULATE_LAST : 0);
        c->reduce_dtype = dtype;
        c->tolerance = tolerance;
    }
    matrix_run(m);
    for (i = 1; i < 2 * FLAT_KINDS; i++) /* rounding is what this is about: it happened */
        CHECK(m->out[i].norms[0][0] > 0);
}

static void test_reduce_dtype(void)
{
    check_reduce_dtype(DTRAIN_BF16, 4e-3);
    check_reduce_dtype(DTRAIN_F16, 1e-3);
}

/* Where units lie between forward and backward, and when they travel, changes no bit. */
static void test_keeping_units(void)
{
    static const uint32_t kinds[] = {DTRAIN_FULL_SHARD, DTRAIN_ZERO3};
    matrix *m = matrix_create(3, DTRAIN_LAUNCH_PROCESSES);
    int i, r;
    for (i = 0; i < 10; i++) {
        strategy_case *c = matrix_add(m, "kept", kinds[i / 5], 1, 0);
        c->keep_all = i % 5 == 1;
        c->keep_one = i % 5 == 2;
        c->no_overlap = i % 5 == 3;
        c->whole_below = i % 5 == 4 ? 40 : 0;
    }
    matrix_run(m);
    for (i = 0; i < 10; i += 5)
        for (r = 0; r < 3; r++) {
            const dtrain_strategy_info *plain = &m->out[i].info[r], *all = &m->out[i + 1].info[r],
                                       *some = &m->out[i + 2].info[r];
            CHECK(all->step_bytes < some->step_bytes && some->step_bytes < plain->step_bytes);
            CHECK(all->buffer_bytes > some->buffer_bytes &&
                  some->buffer_bytes > plain->buffer_bytes);
            CHECK(m->out[i + 4].info[r].value_bytes > plain->value_bytes);
        }
}

/* Two steps with one sample a rank. */
static void test_64_ranks(void)
{
    static const uint32_t kinds[] = {DTRAIN_FULL_SHARD, DTRAIN_ZERO3};
    matrix *m = matrix_create(64, DTRAIN_LAUNCH_PROCESSES);
    int i;
    for (i = 0; i < 2; i++) {
        strategy_case *c = matrix_add(m, "many", kinds[i], 1, 0);
        c->batch = 64;
        c->steps = 2;
        c->tolerance = 2e-6;
    }
    matrix_run(m);
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    RUN(test_matrix_1_rank);
    RUN(test_matrix_2_ranks_are_threads_or_processes);
    RUN(test_matrix_3_ranks);
    RUN(test_matrix_4_ranks);
    RUN(test_matrix_8_ranks);
    RUN(test_bf16_autocast);
    RUN(test_bf16_parameters);
    RUN(test_reduce_dtype);
    RUN(test_keeping_units);
    RUN(test_64_ranks);
    return test_summary();
}
