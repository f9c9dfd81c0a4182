/* test_hook.c: communication hooks of a program's own
 *
 *     test_random_programs    a hook that sends half of gradient plus residual, in one round or two, beside a naive
 *                             loop over whole arrays: any number of ranks, tensors, bucket sizes, dense tensors,
 *                             steps without compression, micro-batches; to the bit
 *     test_hierarchical       the same over slices of tensors, on two levels
 *     test_checkpoint         what a hook keeps is saved and loaded
 *     test_refused            descs that contradict themselves or the strategy
 *     test_ranks_disagree     another hook on one rank; a callback that fails on one rank */
#include "test.h"
#include "dtrain.h"
#include "ranks.h"

#include <sys/stat.h>

enum { PARAMS = 6, MOST = 700, STEPS = 5 };

typedef struct program {
    uint64_t seed;
    int count, ranks, micro, levels;
    bool low; /* reduce_dtype is bf16: dense tensors are rounded */
    int64_t rows[PARAMS], columns[PARAMS];
    dtrain_comm_hook_desc hook;
    dtrain_compression_desc how;
    int steps, fails_at; /* a callback of rank 1 fails in this step; 0: none does */
    int64_t calls;
    const char *save, *load;
    dtrain_result ended[8];
    char error[8][600];
} program;

/* ---- The hook ---- */

static bool sends(const dtrain_compression_desc *how, size_t i, uint32_t round)
{
    return how->hook->rounds == 1 || i % 2 == round;
}

static void half_plan(const dtrain_compression_desc *how, dtrain_hook_bucket *bucket)
{
    (void)how;
    for (size_t i = 0; i < bucket->tensor_count; i++) {
        dtrain_hook_tensor *t = &bucket->tensors[i];
        if (t->param->name[0] == 'd') t->dense = true; /* by the hook's own wish */
        if (t->dense) continue;
        t->keeps_residual = t->keeps_velocity = true;
        bucket->scratch_count += t->count;
    }
}

static dtrain_result half_compress(const dtrain_compression_desc *how, dtrain_hook_bucket *bucket,
                                   uint32_t round)
{
    program *p = (program *)how->hook->user;
    float *out = bucket->scratch;
    if (p->fails_at && bucket->rank == 1 && bucket->step + 1 == (uint64_t)p->fails_at)
        return dtrain_fail(DTRAIN_ERROR_DATA, "the hook has no more room");
    for (size_t i = 0; i < bucket->tensor_count; i++) {
        const dtrain_hook_tensor *t = &bucket->tensors[i];
        if (!sends(how, i, round)) continue;
        for (int64_t k = 0; k < t->count; k++) {
            t->residual[k] += t->grad[k];
            *out = 0.5f * t->residual[k];
            t->residual[k] -= *out++;
            t->velocity[k] += 1; /* how often */
        }
    }
    return DTRAIN_OK;
}

/* Count the elements of a round. */
static size_t sent(const dtrain_compression_desc *how, const dtrain_hook_bucket *bucket,
                   uint32_t round)
{
    size_t count = 0;
    for (size_t i = 0; i < bucket->tensor_count; i++)
        if (sends(how, i, round)) count += (size_t)bucket->tensors[i].count;
    return count;
}

static dtrain_result half_exchange(const dtrain_compression_desc *how,
                                   const dtrain_hook_bucket *bucket, uint32_t round,
                                   dtrain_work **work)
{
    const size_t count = sent(how, bucket, round);
    if (count == 0) return DTRAIN_OK;
    return dtrain_all_reduce(bucket->comm, bucket->scratch, bucket->scratch, count,
                             DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, work);
}

static dtrain_result half_decompress(const dtrain_compression_desc *how, dtrain_hook_bucket *bucket,
                                     uint32_t round)
{
    const float *in = bucket->scratch;
    __atomic_fetch_add(&((program *)how->hook->user)->calls, 1, __ATOMIC_RELAXED);
    for (size_t i = 0; i < bucket->tensor_count; i++) {
        const dtrain_hook_tensor *t = &bucket->tensors[i];
        if (!sends(how, i, round)) continue;
        for (int64_t k = 0; k < t->count; k++) t->grad[k] = *in++ * bucket->factor;
    }
    return DTRAIN_OK;
}

static const dtrain_comm_hook_desc half = {
    "half", 1, true, true, half_plan, half_compress, half_exchange, half_decompress, NULL};

/* ---- A program and its naive form ---- */

static program new_program(uint64_t seed)
{
    program p;
    uint64_t s = seed * 2 + 1;
    memset(&p, 0, sizeof p);
    p.seed = seed;
    p.ranks = 1 + (int)ranks_random(&s, 8);
    p.count = 1 + (int)ranks_random(&s, PARAMS);
    p.micro = 1 + (int)ranks_random(&s, 2);
    p.steps = STEPS;
    for (int i = 0; i < p.count; i++) {
        p.rows[i] = 1 + (int64_t)ranks_random(&s, 26);
        p.columns[i] = ranks_random(&s, 4) ? 1 + (int64_t)ranks_random(&s, 26) : 0; /* 0: 1-D */
    }
    p.hook = half;
    p.low = ranks_random(&s, 3) == 0;
    p.hook.rounds = 1 + (uint32_t)ranks_random(&s, 2);
    p.how.dense_below = 1 + (int64_t)ranks_random(&s, 300);
    p.how.dense_steps = ranks_random(&s, 2) ? 2 : DTRAIN_DENSE_STEPS_NONE;
    return p;
}

static int64_t length(const program *p, int i)
{
    return p->rows[i] * (p->columns[i] ? p->columns[i] : 1);
}

static float gradient(const program *p, int rank, int step, int micro, int i, int64_t k)
{
    const uint64_t at = (uint64_t)((step * 2 + micro) * PARAMS + i) * MOST + (uint64_t)k;
    return dtrain_random_normal(p->seed, (uint64_t)rank, at);
}

static bool dense(const program *p, int i)
{
    return p->columns[i] == 0 || length(p, i) < p->how.dense_below || i == 3;
}

typedef struct arrays {
    float value[PARAMS][MOST], grad[PARAMS][MOST], truth[PARAMS][MOST], residual[PARAMS][MOST],
        send[MOST];
} arrays;

static int rank_runs(dtrain_world *world, program *p, arrays *of)
{
    static const char *const names[PARAMS] = {"a", "b", "c", "d", "e", "f"};
    const int rank = dtrain_world_rank(world);
    const uint64_t first = p->how.dense_steps == DTRAIN_DENSE_STEPS_NONE ? 0 : p->how.dense_steps;
    dtrain_param params[PARAMS];
    dtrain_strategy_desc desc;
    dtrain_strategy *s;
    dtrain_result result = DTRAIN_OK;
    uint64_t shapes = p->seed;
    memset(&desc, 0, sizeof desc);
    for (int i = 0; i < p->count; i++)
        params[i] = ranks_param(names[i], of->value[i], of->grad[i], p->rows[i], p->columns[i]);
    desc.compression = &p->how;
    desc.bucket_bytes = 64 + (size_t)ranks_random(&shapes, 6000);
    desc.hierarchical = p->levels > 1;
    desc.reduce_dtype = p->low ? DTRAIN_DTYPE_BF16 : DTRAIN_DTYPE_F32;
    desc.node_size = (uint32_t)p->levels;
    desc.no_overlap = ranks_random(&shapes, 2) && rank % 2;
    RANKS_TRY(dtrain_strategy_create(world, params, (size_t)p->count, &desc, &s));
    dtrain_state_desc listed;
    dtrain_state *state;
    memset(&listed, 0, sizeof listed);
    listed.strategy = s;
    RANKS_TRY(dtrain_state_create(world, &listed, &state));
    if (p->load) RANKS_TRY(dtrain_checkpoint_load(state, p->load, NULL, NULL));
    /* A run that goes on has made the first half of the steps before; its naive form makes all of them. */
    for (int step = 0; step < p->steps && result == DTRAIN_OK; step++) {
        const bool makes = !p->load || step >= p->steps / 2;
        for (int m = 0; m < p->micro && makes && result == DTRAIN_OK; m++) {
            result = dtrain_strategy_accumulate(s, m + 1 < p->micro);
            for (int j = 0; j < p->count && result == DTRAIN_OK; j++) {
                const int i = p->count - 1 - j;
                for (int64_t k = 0; k < length(p, i); k++)
                    of->grad[i][k] = (m ? of->grad[i][k] : 0) + gradient(p, rank, step, m, i, k);
                result = dtrain_strategy_ready(s, (size_t)i);
            }
            if (result == DTRAIN_OK) result = dtrain_strategy_finish(s);
        }
        if (result != DTRAIN_OK) break;
        for (int i = 0; i < p->count; i++) {
            const int64_t count = length(p, i);
            for (int64_t k = 0; k < count; k++) {
                of->truth[i][k] = gradient(p, rank, step, 0, i, k);
                if (p->micro > 1) of->truth[i][k] += gradient(p, rank, step, 1, i, k);
            }
            if (dense(p, i) || (uint64_t)step < first || p->ranks == 1) {
                RANKS_TRY(dtrain_all_reduce(dtrain_world_comm(world), of->truth[i], of->truth[i],
                                            (size_t)count, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_MEAN,
                                            NULL));
            } else {
                for (int64_t k = 0; k < count; k++) {
                    of->residual[i][k] += of->truth[i][k];
                    of->send[k] = 0.5f * of->residual[i][k];
                    of->residual[i][k] -= of->send[k];
                }
                RANKS_TRY(dtrain_all_reduce(dtrain_world_comm(world), of->send, of->truth[i],
                                            (size_t)count, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM,
                                            NULL));
                for (int64_t k = 0; k < count; k++) of->truth[i][k] *= 1.0f / (float)p->ranks;
            }
            double worst = 0;
            for (int64_t k = 0; k < count && makes; k++)
                worst = fmax(worst, fabs((double)(of->grad[i][k] - of->truth[i][k])));
            /* With micro-batches and levels the library scales and adds in another order. */
            const bool rounded = p->low && (dense(p, i) || (uint64_t)step < first);
            CHECK_MSG(
                worst <= (rounded         ? 0.1
                          : p->levels > 1 ? 1e-5
                                          : 0),
                "seed %llu, micro %d, rounds %d, rank %d of %d, step %d, tensor %d: off by %g",
                (unsigned long long)p->seed, p->micro, (int)p->hook.rounds, rank, p->ranks, step, i,
                worst);
        }
    }
    p->ended[rank] = result;
    if (result != DTRAIN_OK)
        snprintf(p->error[rank], sizeof p->error[rank], "%s", dtrain_last_error());
    if (p->save && result == DTRAIN_OK) {
        dtrain_checkpoint_desc saved;
        dtrain_checkpoint *checkpoint;
        memset(&saved, 0, sizeof saved);
        saved.directory = p->save;
        saved.state = state;
        RANKS_TRY(dtrain_checkpoint_open(world, &saved, &checkpoint));
        RANKS_TRY(dtrain_checkpoint_save(checkpoint, p->steps, NAN));
        RANKS_TRY(dtrain_checkpoint_close(checkpoint));
    }
    const dtrain_state_tensor *tensors;
    size_t count;
    RANKS_TRY(dtrain_state_tensors(state, &tensors, &count));
    for (size_t i = 0; i < count && result == DTRAIN_OK && p->levels < 2; i++)
        if (tensors[i].kind == DTRAIN_STATE_RESIDUAL && tensors[i].piece.count)
            CHECK(memcmp(tensors[i].memory, of->residual[tensors[i].name[0] - 'a'],
                         (size_t)tensors[i].piece.count * sizeof(float)) == 0 ||
                  p->micro > 1);
    dtrain_state_destroy(state);
    dtrain_strategy_destroy(s);
    return result != DTRAIN_OK;
}

static int rank_main(dtrain_world *world, void *user)
{
    arrays *of = (arrays *)calloc(1, sizeof *of);
    const int code = of ? rank_runs(world, (program *)user, of) : 1;
    free(of);
    return code;
}

static dtrain_result run_program(program *p)
{
    const bool forks = p->seed % 4 == 0 && !p->fails_at; /* what ranks report is in p: threads */
    const dtrain_launch_desc desc =
        ranks_desc(p->ranks, forks ? DTRAIN_LAUNCH_PROCESSES : DTRAIN_LAUNCH_THREADS);
    p->hook.user = p;
    p->how.hook = &p->hook;
    return ranks_launch(&desc, rank_main, p, NULL);
}

static void test_random_programs(void)
{
    const uint64_t programs = test_full() ? 300 : 60;
    int64_t calls = 0;
    for (uint64_t seed = 0; seed < programs; seed++) {
        program p = new_program(seed);
        CHECK(run_program(&p) == DTRAIN_OK);
        calls += p.calls;
    }
    CHECK(calls > (int64_t)programs); /* the hook was asked at all */
}

static void test_hierarchical(void)
{
    for (uint64_t seed = 1000; seed < 1020; seed++) {
        program p = new_program(seed);
        p.ranks = seed % 2 ? 4 : 6;
        p.levels = 2;
        p.how.dense_below = 1;
        CHECK(run_program(&p) == DTRAIN_OK);
    }
}

static void test_checkpoint(void)
{
    char directory[64] = "/tmp/dtrain_hook_XXXXXX", command[100];
    CHECK(mkdtemp(directory) != NULL);
    program p = new_program(7);
    p.ranks = 3, p.micro = 1, p.count = PARAMS;
    for (int i = 0; i < PARAMS; i++) p.rows[i] = 5 + i, p.columns[i] = 20;
    p.how.dense_below = 1;
    p.how.dense_steps = DTRAIN_DENSE_STEPS_NONE;
    p.steps = 2;
    p.save = directory;
    CHECK(run_program(&p) == DTRAIN_OK);
    p.save = NULL;
    p.load = directory;
    p.steps = 4;
    CHECK(run_program(&p) == DTRAIN_OK);
    snprintf(command, sizeof command, "rm -rf %s", directory);
    CHECK(system(command) == 0);
}

/* ---- What is refused ---- */

static int rank_refuses(dtrain_world *world, void *user)
{
    static const struct {
        const char *what, *says;
    } rows[] = {{"name", "name, plan"},
                {"plan", "name, plan"},
                {"exchange", "exchange"},
                {"no rounds", "rounds is 0; expected 1 or 2"},
                {"rounds", "rounds is 3; expected 1 or 2"},
                {"kind", "compression is 1; expected 0, for hook is set"},
                {"slices", "slices"},
                {"low", "rounds by itself"},
                {"zero1", "zero1 reduces gradients to shards"}};
    float value[64] = {0}, grad[64] = {0};
    (void)user;
    for (int i = 0; i < (int)(sizeof rows / sizeof rows[0]); i++) {
        dtrain_param param = ranks_param("a", value, grad, 8, 8);
        program p = new_program(1);
        dtrain_strategy_desc desc;
        dtrain_strategy *s = NULL;
        memset(&desc, 0, sizeof desc);
        desc.compression = &p.how;
        p.how.hook = &p.hook;
        p.hook.user = &p;
        if (i == 0) p.hook.name = NULL;
        if (i == 1) p.hook.plan = NULL;
        if (i == 2) p.hook.exchange = NULL;
        if (i == 3 || i == 4) p.hook.rounds = i == 3 ? 0 : 3;
        if (i == 5) p.how.kind = DTRAIN_COMPRESSION_TOPK;
        if (i == 6) p.hook.takes_slices = false, desc.hierarchical = true, desc.node_size = 1;
        if (i == 7) p.hook.takes_low = false, desc.reduce_dtype = DTRAIN_DTYPE_BF16;
        if (i == 8) desc.kind = DTRAIN_STRATEGY_ZERO1;
        CHECK_MSG(dtrain_strategy_create(world, &param, 1, &desc, &s) != DTRAIN_OK &&
                      strstr(dtrain_last_error(), rows[i].says),
                  "%s: %s", rows[i].what, dtrain_last_error());
        CHECK(s == NULL);
    }
    return 0;
}

static void test_refused(void) { ranks_run(2, DTRAIN_LAUNCH_THREADS, rank_refuses, NULL); }

static int rank_with_another(dtrain_world *world, void *user)
{
    float value[64] = {0}, grad[64] = {0};
    dtrain_param param = ranks_param("a", value, grad, 8, 8);
    program p = new_program(1);
    dtrain_strategy_desc desc;
    dtrain_strategy *s = NULL;
    (void)user;
    memset(&desc, 0, sizeof desc);
    desc.compression = &p.how;
    p.how.hook = &p.hook;
    p.hook.user = &p;
    p.hook.rounds = 1;
    if (dtrain_world_rank(world) == 2) p.hook.name = "third";
    CHECK(dtrain_strategy_create(world, &param, 1, &desc, &s) == DTRAIN_ERROR_MISMATCH);
    CHECK_MSG(strstr(dtrain_last_error(), "third") && strstr(dtrain_last_error(), "half"), "%s",
              dtrain_last_error());
    p.hook.name = "half";
    if (dtrain_world_rank(world) == 2) p.hook.rounds = 2;
    CHECK(dtrain_strategy_create(world, &param, 1, &desc, &s) == DTRAIN_ERROR_MISMATCH);
    CHECK_MSG(strstr(dtrain_last_error(), "rank 2 has hook->rounds 2, the others"), "%s",
              dtrain_last_error());
    return 0;
}

static void test_ranks_disagree(void)
{
    ranks_run(3, DTRAIN_LAUNCH_THREADS, rank_with_another, NULL);
    program p = new_program(3);
    p.ranks = 3, p.micro = 1, p.count = 2, p.fails_at = 2;
    p.rows[0] = p.rows[1] = p.columns[0] = p.columns[1] = 20;
    p.how.dense_below = 1;
    p.how.dense_steps = DTRAIN_DENSE_STEPS_NONE;
    CHECK(run_program(&p) == DTRAIN_ERROR_RANK_FAILED);
    CHECK_MSG(p.ended[1] == DTRAIN_ERROR_DATA && strstr(p.error[1], "no more room"), "%s",
              p.error[1]);
    for (int r = 0; r < 3; r += 2)
        CHECK_MSG(p.ended[r] == DTRAIN_ERROR_PEER, "rank %d: %s: %s", r,
                  dtrain_result_text(p.ended[r]), p.error[r]);
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    RUN(test_random_programs);
    RUN(test_hierarchical);
    RUN(test_checkpoint);
    RUN(test_refused);
    RUN(test_ranks_disagree);
    return test_summary();
}
