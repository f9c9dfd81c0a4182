/* test_trainer.c: the trainer on a small model: any number of ranks and micro-batches gives
 * the losses of one rank, evaluation and planning leave no trace, a NaN of one rank is everybody's
 * error, a slow rank is named once. */
#include "test.h"
#include "dtrain.h"
#include "allocator.h"
#include "tools/process_memory.h"

#define VOCAB 16
#define WIDTH 8
#define HIDDEN 32
#define GLOBAL_BATCH 24
#define MAX_STEPS 40
#define MAX_RANKS 4
#define PARAMS (VOCAB * WIDTH + HIDDEN * WIDTH + HIDDEN + VOCAB * HIDDEN + VOCAB)

/* One training: what to do, and what every rank saw. In shared memory: ranks may be processes. */
typedef struct run {
    uint32_t ranks, accumulation, mode, recompute_every;
    int steps, eval_at, plan_at, nan_rank, nan_step, fail_step, slow_rank, sleep_us;
    int stumbling_rank; /* whose every second read fails once, and is repeated */
    int bad_rank;       /* whose loss fails in step 2 */
    uint32_t nonfinite, verify_every;
    bool nan_on; /* from nan_step on */
    uint32_t kind;
    int64_t ends[MAX_RANKS];    /* micro-batches that a rank's data has; 0: it has no end */
    bool end_ignored;           /* behind it no target counts, and ranks go on */
    uint32_t missing;           /* of the strategy */
    int freeze_from, freeze_to; /* steps in which out.weight is frozen */
    uint32_t terms;             /* of the loss beside the first: TERM_*, from the lowest bit on */
    bool even;                  /* the first half of every batch counts for TERM_OTHERS */
    bool ignored, scaled;       /* half of the targets, unevenly, and in step 7 all; loss scaling */
    int drift_rank;             /* in whose memory a bit flips in step 5 */
    float clip, dropout;
    uint64_t seed;
    dtrain_allocator allocator;
    struct run *other; /* what the odd ranks of the world do by themselves; NULL: there are none */

    dtrain_step_record records[MAX_RANKS][MAX_STEPS];
    dtrain_result ended[MAX_RANKS]; /* of the last step */
    char error[MAX_RANKS][1024];
    float before[MAX_RANKS][PARAMS], after[MAX_RANKS][PARAMS]; /* the last step */
    double eval_loss[MAX_RANKS];
    dtrain_memory plan[MAX_RANKS];
    dtrain_tape_info first_tape[MAX_RANKS], last_tape[MAX_RANKS];
    int warnings;
    char warning[1024];
} run;

/* Terms that are added to the cross-entropy, or it to them: means over the logits and over the hidden values, and a
 * cross-entropy that ignores other targets. A sum has the weight of the others. */
enum {
    TERM_LOGITS = 1,
    TERM_HIDDEN = 2,
    TERM_OTHERS = 4,
    TERM_SUM = 8,
    TERM_FIRST = 16,
    TERMS = 32
};

static run *run_create(uint32_t ranks, uint32_t accumulation, int steps)
{
    run *r =
        (run *)mmap(NULL, sizeof *r, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    r->ranks = ranks, r->accumulation = accumulation, r->steps = steps;
    r->mode = DTRAIN_LAUNCH_THREADS;
    r->eval_at = r->plan_at = r->nan_rank = r->nan_step = r->fail_step = r->slow_rank = -1;
    r->stumbling_rank = r->bad_rank = r->drift_rank = -1;
    r->seed = 1;
    return r;
}

/* A rank's model and data. Sample k is (k mod 16 -> 7 k + 3 mod 16); step s takes samples
 * [s G, (s + 1) G), micro-batch by micro-batch, rank by rank. */
typedef struct rank_state {
    run *r;
    int rank;
    int64_t batch, micro; /* micro-batches taken so far */
    bool stumbled;        /* at the one that comes next */
    dtrain_comm *comm;    /* NULL: the world's */
    dtrain_param params[5];
    dtrain_trainer_desc desc;
    int32_t tokens[GLOBAL_BATCH], targets[GLOBAL_BATCH], others[GLOBAL_BATCH];
} rank_state;

static bool ignores(int64_t step, int64_t sample)
{
    return step == 7 || sample / 6 % 4 == 0 || sample % 5 < 2;
}

static dtrain_result next_batch(void *user)
{
    rank_state *s = (rank_state *)user;
    int64_t step = s->micro / s->r->accumulation;
    int64_t first = (s->micro * s->r->ranks + s->rank) * s->batch;
    for (int64_t i = 0; i < s->batch; i++) {
        s->tokens[i] = (int32_t)((first + i) % VOCAB);
        s->targets[i] = (int32_t)((7 * (first + i) + 3) % VOCAB);
        if (s->r->ignored && ignores(step, first + i)) s->targets[i] = -1;
    }
    if (s->rank == s->r->slow_rank || (s->r->slow_rank < 0 && s->r->sleep_us)) {
        struct timespec nap = {0, s->r->sleep_us * 1000L};
        nanosleep(&nap, NULL);
    }
    if (s->r->ends[s->rank] && s->micro >= s->r->ends[s->rank]) {
        if (!s->r->end_ignored) return dtrain_fail(DTRAIN_ERROR_END, "no more data");
        for (int64_t i = 0; i < s->batch; i++) s->targets[i] = -1;
    }
    if (step == s->r->fail_step)
        return dtrain_fail(DTRAIN_ERROR_DATA, "the well has run dry at step %d", (int)step);
    if (s->rank == s->r->stumbling_rank && s->micro % 2 && !s->stumbled) {
        s->stumbled = true;
        return dtrain_fail(DTRAIN_ERROR_DATA, "try again");
    }
    s->stumbled = false;
    s->micro++;
    return DTRAIN_OK;
}

/* Whether a sample counts for the cross-entropy of TERM_OTHERS. */
static bool counts_for_others(int64_t sample) { return sample % 7 < 3; }

static dtrain_tensor *several_terms(dtrain_tape *tape, rank_state *s, dtrain_tensor *hidden,
                                    dtrain_tensor *logits, dtrain_tensor *loss)
{
    const uint32_t terms = s->r->terms;
    const int64_t shape[1] = {s->batch}, end = s->r->ends[s->rank];
    const bool without = end && s->micro > end;
    for (int64_t i = 0; i < s->batch; i++) {
        const int64_t sample = ((s->micro - 1) * s->r->ranks + s->rank) * s->batch + i;
        const bool counts = s->r->even ? i < s->batch / 2 : counts_for_others(sample);
        s->others[i] = counts && !without ? s->tokens[i] : -1;
    }
    for (uint32_t term = 1; term < TERM_FIRST; term *= 2) {
        dtrain_tensor *other = logits;
        if (!(terms & term)) continue;
        if (term == TERM_HIDDEN) other = hidden;
        if (term == TERM_OTHERS)
            other = dtrain_cross_entropy(
                tape, logits, dtrain_tape_input(tape, DTRAIN_DTYPE_I32, 1, shape, s->others, false),
                0, 0);
        else if (term == TERM_SUM) /* as many as targets count, where it stands alone */
            other = dtrain_scale(tape, dtrain_sum(tape, dtrain_multiply(tape, other, other)),
                                 1.0f / (float)(s->batch * VOCAB));
        else other = dtrain_mean(tape, dtrain_multiply(tape, other, other));
        other = dtrain_scale(tape, other, 0.7f);
        loss = terms & TERM_FIRST ? dtrain_add(tape, other, loss) : dtrain_add(tape, loss, other);
    }
    return loss;
}

static dtrain_tensor *model_loss(dtrain_tape *tape, void *user)
{
    rank_state *s = (rank_state *)user;
    dtrain_param *p = s->params;
    int64_t shape[2];
    shape[0] = s->batch, shape[1] = 1;
    dtrain_tensor *tokens = dtrain_tape_input(tape, DTRAIN_DTYPE_I32, 2, shape, s->tokens, false);
    dtrain_tensor *targets = dtrain_tape_input(tape, DTRAIN_DTYPE_I32, 1, shape, s->targets, false);
    dtrain_tape_unit(tape, 0);
    dtrain_tensor *h = dtrain_embedding(tape, tokens, &p[0], NULL);
    dtrain_tape_unit(tape, 1);
    h = dtrain_linear(tape, h, &p[1], &p[2], DTRAIN_ACTIVATION_GELU);
    if (s->r->dropout > 0) h = dtrain_dropout(tape, h, s->r->dropout);
    dtrain_tape_unit(tape, 2);
    dtrain_tensor *hidden = h,
                  *logits = dtrain_linear(tape, h, &p[3], &p[4], DTRAIN_ACTIVATION_NONE);
    h = dtrain_cross_entropy(tape, logits, targets, 0, 0);
    if (s->r->terms) h = several_terms(tape, s, hidden, logits, h);
    int64_t step = (s->micro - 1) / s->r->accumulation;
    if (s->rank == s->r->nan_rank &&
        (step == s->r->nan_step || (s->r->nan_on && step > s->r->nan_step)))
        h = dtrain_scale(tape, h, NAN);
    if (s->rank == s->r->drift_rank && step == 5) p[3].value[7] = nextafterf(p[3].value[7], 9);
    if (s->rank == s->r->bad_rank && step == 2) h = dtrain_dropout(tape, h, 7);
    return h;
}

static void fill_param(dtrain_param *p, const char *name, int64_t rows, int64_t columns)
{
    p->name = name;
    p->shape[0] = rows;
    p->shape[1] = columns;
    p->init = columns ? DTRAIN_INIT_NORMAL : DTRAIN_INIT_ZERO;
    p->init_scale = 0.3f;
}

static void copy_params(const rank_state *s, float *to)
{
    for (int i = 0; i < 5 && s->params[i].value; i++) {
        memcpy(to, s->params[i].value, (size_t)s->params[i].count * sizeof *to);
        to += s->params[i].count;
    }
}

/* Evaluates the same model on the first samples; the training's own place in the data stays. */
static dtrain_result evaluate(dtrain_trainer *trainer, const rank_state *s)
{
    rank_state data = *s;
    data.micro = 0;
    return dtrain_trainer_evaluate(trainer, next_batch, &data, 2, &s->r->eval_loss[s->rank]);
}

static void take_steps(dtrain_world *world, dtrain_trainer *trainer, rank_state *s)
{
    run *r = s->r;
    for (int step = 0; step < r->steps; step++) {
        dtrain_result result = DTRAIN_OK;
        if (step == r->plan_at)
            result = dtrain_trainer_plan(world, &s->desc, NULL, &r->plan[s->rank]);
        if (result == DTRAIN_OK && step == r->eval_at) result = evaluate(trainer, s);
        s->params[3].flags =
            step >= r->freeze_from && step < r->freeze_to ? DTRAIN_PARAM_FROZEN : 0;
        copy_params(s, r->before[s->rank]);
        if (result == DTRAIN_OK) result = dtrain_trainer_step(trainer, &r->records[s->rank][step]);
        while (result == DTRAIN_ERROR_DATA && s->stumbled)
            result = dtrain_trainer_step(trainer, &r->records[s->rank][step]);
        r->ended[s->rank] = result;
        copy_params(s, r->after[s->rank]);
        if (r->ended[s->rank] != DTRAIN_OK) {
            snprintf(r->error[s->rank], sizeof r->error[0], "%s", dtrain_last_error());
            return;
        }
        if (step == 0) dtrain_tape_query(dtrain_trainer_tape(trainer), &r->first_tape[s->rank]);
    }
    dtrain_tape_query(dtrain_trainer_tape(trainer), &r->last_tape[s->rank]);
}

/* Everything a rank builds, in order; what exists is destroyed by the caller. */
static dtrain_result build(dtrain_world *world, rank_state *s, dtrain_strategy **strategy,
                           dtrain_optimizer **optimizer, dtrain_trainer **trainer)
{
    dtrain_trainer_desc desc;
    dtrain_optimizer_desc adamw = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_ADAMW);
    dtrain_strategy_desc ddp = {0};
    ddp.kind = s->r->kind;
    ddp.missing_gradient = s->r->missing;
    ddp.comm = s->comm;
    ddp.bucket_bytes = 1024; /* several buckets for a model this small */
    fill_param(&s->params[0], "model.embed_tokens.weight", VOCAB, WIDTH);
    fill_param(&s->params[1], "encoder.block.23.layer.1.DenseReluDense.wi_0.weight", HIDDEN, WIDTH);
    fill_param(&s->params[2], "encoder.block.23.layer.1.DenseReluDense.wi_0.bias", HIDDEN, 0);
    fill_param(&s->params[3], "encoder.block.23.layer.1.DenseReluDense.wo.weight", VOCAB, HIDDEN);
    fill_param(&s->params[4], "encoder.block.23.layer.1.DenseReluDense.wo.bias", VOCAB, 0);
    s->params[1].unit = s->params[2].unit = 1;
    s->params[3].unit = s->params[4].unit = 2;
    TRY(dtrain_strategy_create(world, s->params, 5, &ddp, strategy));
    TRY(dtrain_optimizer_create(world, *strategy, &adamw, optimizer));
    memset(&desc, 0, sizeof desc);
    desc.micro_batches = s->r->accumulation;
    desc.tokens = (uint32_t)s->batch;
    desc.clip = s->r->clip;
    desc.recompute_every = s->r->recompute_every;
    desc.seed = s->r->seed;
    desc.nonfinite = s->r->nonfinite;
    desc.verify_every = s->r->verify_every;
    if (s->r->scaled) desc.loss_scaling.scale = 1024;
    desc.schedule.kind = DTRAIN_SCHEDULE_COSINE;
    desc.schedule.lr = 0.02f;
    desc.schedule.min_lr = 0.002f;
    desc.schedule.warmup_steps = 4;
    desc.schedule.total_steps = 40;
    desc.strategy = *strategy;
    desc.optimizer = *optimizer;
    desc.next_batch = next_batch;
    desc.loss = model_loss;
    desc.user = s;
    s->desc = desc;
    return dtrain_trainer_create(world, &desc, trainer);
}

static int run_rank(dtrain_world *world, void *user)
{
    rank_state s;
    dtrain_strategy *strategy = NULL;
    dtrain_optimizer *optimizer = NULL;
    dtrain_trainer *trainer = NULL;
    memset(&s, 0, sizeof s);
    s.r = (run *)user;
    s.rank = dtrain_world_rank(world);
    if (s.r->other) {
        const int odd = s.rank % 2;
        if (!CHECK(dtrain_comm_split(dtrain_world_comm(world), odd, 0, &s.comm) == DTRAIN_OK))
            return 1;
        s.rank = dtrain_comm_rank(s.comm);
        if (odd) s.r = s.r->other;
    }
    s.batch = GLOBAL_BATCH / (s.r->ranks * s.r->accumulation);
    dtrain_result result = build(world, &s, &strategy, &optimizer, &trainer);
    s.r->ended[s.rank] = result;
    snprintf(s.r->error[s.rank], sizeof s.r->error[0], "%s", dtrain_last_error());
    if (result == DTRAIN_OK) take_steps(world, trainer, &s);
    dtrain_trainer_destroy(trainer);
    dtrain_optimizer_destroy(optimizer);
    dtrain_strategy_destroy(strategy);
    if (s.comm) dtrain_comm_destroy(s.comm);
    return 0;
}

static void count_warning(void *user, dtrain_log_level level, int rank, const char *text)
{
    run *r = (run *)user;
    (void)rank;
    if (level != DTRAIN_LOG_WARNING || !strstr(text, "straggler")) return;
    __atomic_fetch_add(&r->warnings, 1, __ATOMIC_RELAXED);
    snprintf(r->warning, sizeof r->warning, "%s", text);
}

static dtrain_result run_launch(run *r)
{
    dtrain_launch_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.rank_count = r->ranks + (r->other ? r->other->ranks : 0);
    desc.mode = r->mode;
    desc.threads_per_rank = 1;
    desc.timeout_ms = 20000;
    desc.options.log = count_warning;
    desc.options.log_user = r;
    desc.options.allocator = r->allocator;
    return dtrain_launch(&desc, run_rank, r, NULL);
}

/* A run in which nothing may go wrong. */
static void run_well(run *r)
{
    dtrain_result result = run_launch(r);
    CHECK_MSG(result == DTRAIN_OK, "%s", dtrain_last_error());
    for (uint32_t rank = 0; rank < r->ranks; rank++)
        CHECK_MSG(r->ended[rank] == DTRAIN_OK, "rank %u: %s", (unsigned)rank, r->error[rank]);
}

static void check_same_losses(const run *r, const run *reference, double tolerance)
{
    for (int step = 0; step < reference->steps; step++) {
        CHECK_CLOSE(r->records[0][step].loss, reference->records[0][step].loss, tolerance);
        CHECK_CLOSE(r->records[0][step].grad_norm, reference->records[0][step].grad_norm,
                    tolerance);
    }
}

/* ---- the same mathematics ---- */

static void test_learns(void)
{
    run *one = run_create(1, 1, 40);
    run_well(one);
    CHECK_CLOSE(one->records[0][0].loss, log(VOCAB), 0.2);
    CHECK_MSG(one->records[0][39].loss < 1.0, "loss %g after 40 steps", one->records[0][39].loss);
    CHECK(memcmp(one->before[0], one->after[0], sizeof one->before[0]) != 0);
}

static void test_ranks_and_micro_batches_agree(void)
{
    static const uint32_t cases[][2] = {{1, 2}, {1, 3}, {1, 6}, {2, 1}, {3, 1},
                                        {4, 1}, {2, 3}, {3, 2}, {4, 2}};
    run *one = run_create(1, 1, 20);
    run_well(one);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        run *many = run_create(cases[i][0], cases[i][1], 20);
        run_well(many);
        check_same_losses(many, one, 2e-5);
        for (uint32_t rank = 1; rank < many->ranks; rank++) /* replicas stay equal to the bit */
            CHECK(memcmp(many->after[0], many->after[rank], sizeof many->after[0]) == 0);
    }
}

/* One mean over all targets that count, however they lie; a step without any changes nothing. */
static void test_ignored_targets(void)
{
    static const uint32_t cases[][2] = {{1, 2}, {1, 4}, {2, 1}, {4, 1}, {2, 3}, {4, 2}};
    run *one = run_create(1, 1, 20);
    one->ignored = true;
    one->eval_at = 10;
    run_well(one);
    CHECK(one->records[0][7].loss == 0 && one->records[0][7].grad_norm == 0);
    for (size_t i = 0; i < 2 * sizeof cases / sizeof cases[0]; i++) {
        run *many = run_create(cases[i / 2][0], cases[i / 2][1], i % 2 ? 20 : 8);
        many->ignored = true;
        many->scaled = i % 2 != 0;
        many->eval_at = i % 2 ? 10 : -1;
        run_well(many);
        one->steps = many->steps;
        check_same_losses(many, one, 2e-5);
        for (uint32_t rank = 1; rank < many->ranks; rank++)
            CHECK(memcmp(many->after[0], many->after[rank], sizeof many->after[0]) == 0);
        if (many->accumulation == 1 && i % 2) /* batches of the same samples */
            CHECK_CLOSE(many->eval_loss[0], one->eval_loss[0], 2e-5);
        if (i % 2 == 0) /* step 7 is the last */
            CHECK(memcmp(many->before[0], many->after[0], sizeof many->after[0]) == 0);
    }
}

/* Count the samples of a micro-batch that a term is a mean over (0: the first), of a rank or of all ranks (-1). */
static int64_t term_samples(const run *r, uint32_t term, int step, uint32_t micro, int rank)
{
    const int64_t all = GLOBAL_BATCH / r->accumulation, batch = rank < 0 ? all : all / r->ranks;
    const int64_t first =
        (step * (int64_t)r->accumulation + micro) * all + (rank < 0 ? 0 : rank * batch);
    int64_t count = 0;
    if (term == TERM_LOGITS) return batch * VOCAB;
    if (term == TERM_HIDDEN) return batch * HIDDEN;
    for (int64_t i = first; i < first + batch; i++)
        count += term == TERM_OTHERS ? counts_for_others(i) : !(r->ignored && ignores(step, i));
    return count;
}

/* Tell whether a step can be right: all terms have the same share of their samples in each micro-batch, and where all
 * of them ignore targets no rank has some for the second term only. */
static bool can_be_right(const run *r, int step)
{
    const uint32_t both[2] = {r->terms & TERM_FIRST ? TERM_OTHERS : 0,
                              r->terms & TERM_FIRST ? 0 : TERM_OTHERS};
    for (uint32_t term = TERM_LOGITS; term < TERM_SUM; term *= 2)
        for (uint32_t micro = 1; micro < r->accumulation && (r->terms & term); micro++)
            if (term_samples(r, 0, step, micro, -1) * term_samples(r, term, step, 0, -1) !=
                term_samples(r, 0, step, 0, -1) * term_samples(r, term, step, micro, -1))
                return false;
    for (uint32_t i = 0;
         i < r->ranks * r->accumulation && (r->terms | TERM_FIRST) == (TERM_OTHERS | TERM_FIRST);
         i++)
        if (!term_samples(r, both[0], step, i / r->ranks, (int)(i % r->ranks)) &&
            term_samples(r, both[1], step, i / r->ranks, (int)(i % r->ranks)))
            return false;
    return true;
}

/* Each term of a loss is averaged over its own samples of the step, on any ranks; with several micro-batches, whose
 * numbers are not known in time, a sum is refused on all ranks as soon as they have other shares. */
static void test_losses_of_several_terms(void)
{
    static const uint32_t kinds[] = {DTRAIN_STRATEGY_DDP, DTRAIN_STRATEGY_ZERO1,
                                     DTRAIN_STRATEGY_SHARD_GRAD_OP, DTRAIN_STRATEGY_FULL_SHARD};
    int refused = 0, right = 0;
    for (uint32_t i = 0; i < 40; i++) {
        run *one = run_create(1, 1, 7), *many = run_create(1 + i % 4, i % 3 ? 1 : 2, 7);
        one->terms = many->terms = 1 + (i * 13 + 2) % (TERM_SUM - 1) + (i % 5 < 2 ? TERM_FIRST : 0);
        one->ignored = many->ignored = i % 6 != 3;
        many->kind = kinds[i % 7 % 4];
        many->recompute_every = i % 2;
        if (!one->ignored && !(one->terms & TERM_OTHERS)) one->eval_at = many->eval_at = 5;
        run_well(one);
        int good = 0;
        while (good < many->steps && can_be_right(many, good)) good++;
        if (run_launch(many) == DTRAIN_OK && good == many->steps) {
            for (uint32_t rank = 0; rank < many->ranks; rank++)
                CHECK_MSG(many->ended[rank] == DTRAIN_OK, "case %u: %s", (unsigned)i,
                          many->error[rank]);
            check_same_losses(many, one, 5e-5);
            if (many->eval_at >= 0 && many->accumulation == 1)
                CHECK_CLOSE(many->eval_loss[0], one->eval_loss[0], 2e-5);
            right++;
            continue;
        }
        refused++;
        for (uint32_t rank = 0; rank < many->ranks; rank++)
            CHECK_MSG(good < many->steps && many->ended[rank] != DTRAIN_OK &&
                          strstr(many->error[rank], "the loss adds two means"),
                      "case %u, %d steps: %s", (unsigned)i, good, many->error[rank]);
    }
    CHECK_MSG(right > 20 && refused > 5, "%d right, %d refused", right, refused);
}

/* A second term written as a sum has the weight of the targets that count, with any micro-batches; and a rank whose
 * data has ended takes part in what the loss of the others exchanges. */
static void test_terms_that_take_part(void)
{
    run *sum = run_create(3, 2, 7), *ends = run_create(3, 1, 9);
    sum->terms = TERM_SUM, sum->ignored = true, sum->eval_at = 3; /* nothing to refuse */
    run_well(sum);
    ends->terms = TERM_LOGITS | TERM_HIDDEN | TERM_OTHERS, ends->ignored = true;
    ends->ends[0] = 5, ends->ends[1] = 8, ends->ends[2] = 9;
    run_well(ends);
}

/* A rank that has no batch from the first pass on does not know how many sums of means the loss of the others has: in
 * a step, in an evaluation before any step, and in one between steps. It takes part as a rank none of whose targets
 * count, to the bit. */
static void test_terms_without_a_first_batch(void)
{
    static const uint32_t kinds[] = {DTRAIN_STRATEGY_DDP, DTRAIN_STRATEGY_FULL_SHARD};
    for (uint32_t i = 0; i < 12; i++) {
        run *joins = run_create(3, 1, 4), *goes_on = run_create(3, 1, 4);
        const int64_t end = i / 6 ? 1 : -1; /* a rank with one batch has none in a second pass */
        joins->kind = goes_on->kind = kinds[i % 2];
        joins->eval_at = goes_on->eval_at = (int)(i / 2 % 3) - 1;
        joins->terms = goes_on->terms = TERM_OTHERS | (i % 4 < 2 ? TERM_FIRST : 0);
        joins->even = goes_on->even =
            joins->eval_at >= 0; /* which needs the same shares in all batches */
        joins->ends[i % 3] = goes_on->ends[i % 3] = end;
        if (i % 4 == 1) joins->ends[(i + 1) % 3] = goes_on->ends[(i + 1) % 3] = end;
        goes_on->end_ignored = true;
        run_well(joins);
        run_well(goes_on);
        check_same_losses(joins, goes_on, 0);
        CHECK(joins->eval_loss[0] == goes_on->eval_loss[0]);
    }
    run *late = run_create(2, 2, 3), *several = run_create(3, 1, 4);
    late->ends[0] = late->ends[1] = -1; /* no rank has a batch */
    late->terms = TERM_LOGITS;
    CHECK(run_launch(late) == DTRAIN_OK && late->records[1][0].ended);
    several->terms = TERM_LOGITS | TERM_HIDDEN | TERM_OTHERS, several->ends[1] = -1;
    several->even = true, several->eval_at = 0;
    run_well(several);
}

/* A parameter that is frozen in some steps stays as it is in those, whatever a missing gradient counts as. */
static void test_frozen_for_some_steps(void)
{
    static const uint32_t kinds[] = {DTRAIN_STRATEGY_DDP, DTRAIN_STRATEGY_ZERO1};
    const size_t first = VOCAB * WIDTH + HIDDEN * WIDTH + HIDDEN,
                 bytes = VOCAB * HIDDEN * sizeof(float);
    for (uint32_t i = 0; i < 12; i++) {
        run *r = run_create(1 + i % 2, 1, 5 + (int)(i / 6) * 3);
        r->kind = kinds[i % 4 / 2], r->missing = i % 3; /* AdamW with weight decay */
        r->freeze_from = 3, r->freeze_to = 6;
        run_well(r);
        const bool frozen = r->steps <= r->freeze_to; /* in the last step */
        CHECK_MSG((memcmp(r->before[0] + first, r->after[0] + first, bytes) == 0) == frozen,
                  "case %u: a parameter that is %sfrozen", (unsigned)i, frozen ? "" : "not ");
        CHECK(memcmp(r->before[0], r->after[0], first * sizeof(float)) != 0);
    }
}

/* A rank whose data ends takes part without samples: the bits of one none of whose targets count. */
static void test_data_ends_earlier(void)
{
    static const uint32_t kinds[] = {DTRAIN_STRATEGY_DDP, DTRAIN_STRATEGY_SHARD_GRAD_OP,
                                     DTRAIN_STRATEGY_FULL_SHARD, DTRAIN_STRATEGY_ZERO3};
    static const int64_t ends[2][3] = {{7, 12, 16}, {16, 9, 0}};
    for (size_t i = 0; i < 2 * sizeof kinds / sizeof kinds[0]; i++) {
        run *joins = run_create(3, 2, i % 2 ? 8 : 9), *goes_on = run_create(3, 2, 8);
        joins->kind = goes_on->kind = kinds[i / 2];
        joins->recompute_every = 1;
        memcpy(joins->ends, ends[i % 2], sizeof ends[0]);
        memcpy(goes_on->ends, ends[i % 2], sizeof ends[0]);
        if (i % 2) joins->ends[0] = goes_on->ends[0] = -1; /* without data from the beginning */
        goes_on->end_ignored = true;
        joins->eval_at = goes_on->eval_at = 5;
        run_well(joins);
        run_well(goes_on);
        check_same_losses(joins, goes_on, 0);
        CHECK(joins->eval_loss[0] == goes_on->eval_loss[0]);
        const dtrain_step_record *last = &joins->records[2][joins->steps - 1];
        CHECK(last->ended == (i % 2 == 0) && !joins->records[2][7].ended);
        if (i % 2) continue;
        CHECK(last->step == 8 && last->loss == 0); /* and it would be taken again */
        CHECK(last->tokens == (7 + 12 + 16) * 4);
    }
}

static void test_processes_are_threads_to_the_bit(void)
{
    run *threads = run_create(3, 2, 10), *processes = run_create(3, 2, 10);
    processes->mode = DTRAIN_LAUNCH_PROCESSES;
    run_well(threads);
    run_well(processes);
    check_same_losses(processes, threads, 0);
    CHECK(memcmp(threads->after, processes->after, sizeof threads->after) == 0);
}

static void test_clipping(void)
{
    run *clipped = run_create(1, 1, 3), *same = run_create(2, 2, 3);
    run *open_run = run_create(1, 1, 3);
    clipped->clip = same->clip = 0.01f;
    run_well(clipped);
    run_well(same);
    run_well(open_run);
    CHECK(clipped->records[0][0].grad_norm > 0.1); /* before clipping */
    CHECK(clipped->records[0][0].grad_norm == open_run->records[0][0].grad_norm);
    check_same_losses(same, clipped, 2e-5);
    CHECK(memcmp(clipped->after[0], open_run->after[0], sizeof clipped->after[0]) != 0);
}

static void test_dropout_seeds(void)
{
    run *a = run_create(2, 2, 5), *again = run_create(2, 2, 5), *other = run_create(2, 2, 5);
    a->dropout = again->dropout = other->dropout = 0.5f;
    other->seed = 2;
    run_well(a);
    run_well(again);
    run_well(other);
    CHECK(memcmp(a->after, again->after, sizeof a->after) == 0);
    CHECK(memcmp(a->after, other->after, sizeof a->after) != 0);
}

/* Two groups of a world train by themselves, to the bits of worlds of their own. */
static void test_groups_train_alone(void)
{
    static const uint32_t kinds[] = {DTRAIN_STRATEGY_DDP, DTRAIN_STRATEGY_FULL_SHARD};
    for (int k = 0; k < 2; k++) {
        run *alone[2], *groups[2];
        for (int i = 0; i < 4; i++) {
            run *r = *(i < 2 ? &alone[i] : &groups[i - 2]) =
                run_create(2, 1 + (uint32_t)(i % 2), 5);
            r->kind = kinds[k];
            r->dropout = 0.5f;
            r->seed = 1 + (uint64_t)(i % 2);
            r->eval_at = 4;
        }
        run_well(alone[0]);
        run_well(alone[1]);
        groups[0]->other = groups[1];
        run_well(groups[0]);
        for (int i = 0; i < 2; i++) {
            CHECK(memcmp(alone[i]->after, groups[i]->after, sizeof alone[i]->after) == 0);
            CHECK(alone[i]->eval_loss[0] == groups[i]->eval_loss[0]);
            for (int step = 0; step < 5; step++) {
                const dtrain_step_record *a = &alone[i]->records[1][step],
                                         *g = &groups[i]->records[1][step];
                CHECK(a->loss == g->loss && a->grad_norm == g->grad_norm && a->tokens == g->tokens);
                CHECK(g->ranks == 2 &&
                      dtrain_record_value(a, "comm_bytes") == dtrain_record_value(g, "comm_bytes"));
            }
        }
    }
}

/* ---- the record ---- */

static void test_record(void)
{
    run *r = run_create(3, 2, 12);
    run_well(r);
    for (int step = 0; step < 12; step++) {
        const dtrain_step_record *a = &r->records[0][step];
        double bytes = 2.0 * 2 / 3 * PARAMS * 4; /* one all-reduce by the ring formula */
        CHECK(a->step == step + 1);
        CHECK(a->tokens == (uint64_t)(step + 1) * GLOBAL_BATCH);
        CHECK_CLOSE(dtrain_record_value(a, "tokens_per_second"),
                    GLOBAL_BATCH / (dtrain_record_value(a, "step_ms") * 1e-3), 1e-6);
        CHECK(isnan(a->val_loss));
        CHECK(dtrain_record_value(a, "exposed_comm_ms") > 0 &&
              dtrain_record_value(a, "exposed_comm_ms") <= dtrain_record_value(a, "comm_ms"));
        CHECK(dtrain_record_value(a, "comm_ms") <= dtrain_record_value(a, "step_ms") * 1.001);
        CHECK(dtrain_record_value(a, "comm_bytes") > 0.95 * bytes &&
              dtrain_record_value(a, "comm_bytes") < 1.3 * bytes);
        CHECK(dtrain_record_value(a, "straggler_score") >= 1 &&
              dtrain_record_value(a, "slowest_rank") >= 0 &&
              dtrain_record_value(a, "slowest_rank") < 3);
        for (int rank = 1; rank < 3; rank++) {
            const dtrain_step_record *b = &r->records[rank][step];
            CHECK_MSG(memcmp(a, b, offsetof(dtrain_step_record, figures)) == 0,
                      "ranks 0 and %d differ in step %d", rank, step);
            for (uint32_t f = 0; f < a->figure_count; f++) {
                const dtrain_figure *x = &a->figures[f], *y = &b->figures[f];
                const bool own = strncmp(x->name, "sent/", 5) == 0; /* bytes that each rank sent */
                CHECK_MSG(strcmp(x->name, y->name) == 0 && (own || x->value == y->value),
                          "ranks 0 and %d differ in step %d: %s", rank, step, x->name);
            }
        }
    }
    CHECK_CLOSE(r->records[0][0].lr, 0.005, 1e-6); /* warm-up: a quarter of 0.02 */
    CHECK_CLOSE(r->records[0][4].lr, 0.02, 1e-6);
}

static void test_record_of_one_rank(void)
{
    run *r = run_create(1, 1, 3);
    run_well(r);
    CHECK(dtrain_record_value(&r->records[0][2], "comm_bytes") == 0);
    CHECK(isnan(dtrain_record_value(&r->records[0][2], "straggler_score"))); /* of several ranks */
    CHECK(dtrain_record_value(&r->records[0][2], "exposed_comm_ms") <=
          dtrain_record_value(&r->records[0][2], "step_ms"));
}

/* ---- evaluation ---- */

static void test_evaluation(void)
{
    run *plain = run_create(1, 1, 8), *one = run_create(1, 1, 8), *many = run_create(3, 1, 8);
    one->eval_at = many->eval_at = 4;
    one->dropout = many->dropout = plain->dropout = 0; /* same mathematics for every split */
    run_well(plain);
    run_well(one);
    run_well(many);
    check_same_losses(one, plain, 0); /* no trace: the following steps are equal to the bit */
    CHECK(memcmp(one->after[0], plain->after[0], sizeof one->after[0]) == 0);
    CHECK_CLOSE(many->eval_loss[0], one->eval_loss[0], 2e-5);
    CHECK(many->eval_loss[1] == many->eval_loss[0] && many->eval_loss[2] == many->eval_loss[0]);
    CHECK(one->eval_loss[0] > one->records[0][7].loss && one->eval_loss[0] < log(VOCAB));
}

/* Before any training, a model with dropout must evaluate like the same model without. */
static void test_evaluation_without_dropout(void)
{
    run *dropping = run_create(1, 1, 1), *plain = run_create(1, 1, 1);
    dropping->dropout = 0.9f;
    dropping->eval_at = plain->eval_at = 0;
    run_well(dropping);
    run_well(plain);
    CHECK(plain->eval_loss[0] > 0 && dropping->eval_loss[0] == plain->eval_loss[0]);
    CHECK(dropping->records[0][0].loss != plain->records[0][0].loss);
}

/* ---- failures ---- */

static void test_nan_of_one_rank(void)
{
    run *r = run_create(3, 2, 10);
    r->nan_rank = 1;
    r->nan_step = 3;
    CHECK(run_launch(r) == DTRAIN_OK);
    for (int rank = 0; rank < 3; rank++) {
        CHECK(r->ended[rank] == DTRAIN_ERROR_NUMERIC);
        CHECK_MSG(strstr(r->error[rank], "at step 4 the loss of rank 1 is") != NULL, "%s",
                  r->error[rank]);
        CHECK(memcmp(r->before[rank], r->after[rank], sizeof r->before[rank]) == 0);
        for (int i = 0; i < PARAMS; i++) CHECK(isfinite(r->after[rank][i]));
    }
}

/* A step of NaN is skipped on all ranks, and training goes on with the parameters before it. */
static void test_nan_is_skipped(void)
{
    run *r = run_create(3, 2, 8);
    r->nan_rank = 1;
    r->nan_step = 3;
    r->nonfinite = DTRAIN_NONFINITE_SKIP;
    run_well(r);
    for (int rank = 0; rank < 3; rank++)
        for (int step = 0; step < 8; step++) {
            const dtrain_step_record *record = &r->records[rank][step];
            CHECK(record->skipped_steps == (step >= 3) && record->step == step + 1);
            CHECK(!isfinite(record->grad_norm) == (step == 3) &&
                  !isfinite(record->loss) == (step == 3));
        }
    CHECK(r->records[0][7].loss < r->records[0][2].loss);
    CHECK(memcmp(r->after[0], r->after[2], sizeof r->after[0]) == 0);

    run *stuck = run_create(2, 1, 20); /* more than ten in a row are an error, of all ranks */
    stuck->nan_rank = 0;
    stuck->nan_step = 3;
    stuck->nan_on = true;
    stuck->nonfinite = DTRAIN_NONFINITE_SKIP;
    CHECK(run_launch(stuck) == DTRAIN_OK);
    for (int rank = 0; rank < 2; rank++)
        CHECK_MSG(stuck->ended[rank] == DTRAIN_ERROR_NUMERIC &&
                      strstr(stuck->error[rank], "at step 14 the loss of rank 0"),
                  "%s", stuck->error[rank]);
}

/* Replicas that drift apart by one bit are found, and named, at the next comparison. */
static void test_drift_is_found(void)
{
    run *r = run_create(3, 1, 10);
    r->drift_rank = 2;
    r->verify_every = 4;
    CHECK(run_launch(r) == DTRAIN_OK);
    for (int rank = 0; rank < 3; rank++) {
        CHECK(r->ended[rank] == DTRAIN_ERROR_MISMATCH && r->records[rank][6].loss > 0);
        CHECK_MSG(strstr(r->error[rank], "\"encoder.block.23.layer.1.DenseReluDense.wo.weight\"") &&
                      strstr(r->error[rank], "on rank 2"),
                  "%s", r->error[rank]);
    }
}

static void test_batch_function_fails(void)
{
    run *r = run_create(1, 1, 10);
    r->fail_step = 4;
    CHECK(run_launch(r) == DTRAIN_OK);
    CHECK(r->ended[0] == DTRAIN_ERROR_DATA);
    CHECK_MSG(strstr(r->error[0], "run dry at step 4") != NULL, "%s", r->error[0]);
}

/* A read that failed is repeated, whichever micro-batch it was of: nothing is lost or counted twice. */
static void test_step_is_repeated(void)
{
    for (uint32_t accumulation = 1; accumulation <= 4; accumulation *= 2)
        for (int ranks = 1; ranks <= 3; ranks += 2) {
            run *smooth = run_create((uint32_t)ranks, accumulation, 8);
            run *stumbling = run_create((uint32_t)ranks, accumulation, 8);
            stumbling->stumbling_rank = ranks - 1;
            run_well(smooth);
            run_well(stumbling);
            check_same_losses(stumbling, smooth, 0);
            for (int rank = 0; rank < ranks; rank++)
                CHECK(memcmp(stumbling->after[rank], smooth->after[rank],
                             sizeof smooth->after[0]) == 0);
        }
}

/* A loss that fails on one rank ends the step on all of them, at once. */
static void test_loss_fails_on_one_rank(void)
{
    run *r = run_create(3, 2, 8);
    const double start = test_seconds();
    r->bad_rank = 1;
    CHECK(run_launch(r) == DTRAIN_OK);
    CHECK_MSG(test_seconds() - start < 10, "%.1f s", test_seconds() - start);
    for (int rank = 0; rank < 3; rank++) {
        CHECK_MSG(r->ended[rank] != DTRAIN_OK, "rank %d went on", rank);
        CHECK_MSG(strstr(r->error[rank], "dtrain_dropout: probability is 7"), "rank %d: %s", rank,
                  r->error[rank]);
        CHECK(memcmp(r->before[rank], r->after[rank], sizeof r->before[rank]) == 0);
    }
}

/* A loss that is not one number, as without dtrain_mean. */
static dtrain_tensor *rows_loss(dtrain_tape *tape, void *user)
{
    static const float rows[999] = {0};
    const int64_t count = 999;
    (void)user;
    return dtrain_scale(tape, dtrain_tape_input(tape, DTRAIN_DTYPE_F32, 1, &count, rows, false), 1);
}

static int arguments_rank(dtrain_world *world, void *user)
{
    rank_state s;
    dtrain_strategy *strategy = NULL;
    dtrain_optimizer *optimizer = NULL;
    dtrain_trainer *trainer = NULL, *bad = (dtrain_trainer *)1;
    dtrain_trainer_desc desc;
    dtrain_memory memory;
    double loss;
    memset(&s, 0, sizeof s);
    s.r = (run *)user;
    s.batch = 4;
    if (!CHECK(build(world, &s, &strategy, &optimizer, &trainer) == DTRAIN_OK)) return 1;
    memset(&desc, 0, sizeof desc);
    CHECK(dtrain_trainer_create(world, NULL, &bad) == DTRAIN_ERROR_ARGUMENT);
    CHECK(dtrain_trainer_create(world, &desc, &bad) == DTRAIN_ERROR_ARGUMENT && bad == NULL);
    CHECK(strstr(dtrain_last_error(), "no strategy") != NULL);
    desc.strategy = strategy;
    CHECK(dtrain_trainer_create(world, &desc, &bad) == DTRAIN_ERROR_ARGUMENT);
    CHECK(strstr(dtrain_last_error(), "no loss") != NULL);
    desc.loss = model_loss;
    desc.user = &s;
    desc.optimizer = optimizer;
    CHECK(dtrain_trainer_create(world, &desc, &bad) == DTRAIN_ERROR_ARGUMENT);
    CHECK(strstr(dtrain_last_error(), "schedule.lr is 0") != NULL);
    desc.schedule.lr = 1;
    desc.schedule.kind = DTRAIN_SCHEDULE_STEPS + 1;
    CHECK(dtrain_trainer_create(world, &desc, &bad) == DTRAIN_ERROR_ARGUMENT);
    CHECK(strstr(dtrain_last_error(), "schedule.kind is 4") != NULL);
    desc.schedule.kind = DTRAIN_SCHEDULE_STEPS;
    desc.schedule.gamma = -1;
    CHECK(dtrain_trainer_create(world, &desc, &bad) == DTRAIN_ERROR_ARGUMENT);
    CHECK(strstr(dtrain_last_error(), "schedule.gamma is -1") != NULL);
    memset(&desc.schedule, 0, sizeof desc.schedule);
    desc.optimizer = NULL;
    CHECK(dtrain_trainer_create(world, &desc, &bad) == DTRAIN_OK);
    CHECK(dtrain_trainer_step(bad, NULL) == DTRAIN_ERROR_USAGE);
    CHECK(strstr(dtrain_last_error(), "only evaluate") != NULL);
    CHECK(dtrain_trainer_plan(world, &desc, NULL, &memory) == DTRAIN_ERROR_UNSUPPORTED);
    CHECK(dtrain_trainer_evaluate(bad, next_batch, &s, 1, &loss) == DTRAIN_OK && loss > 0);
    dtrain_trainer_destroy(bad);
    CHECK(dtrain_trainer_step(NULL, NULL) == DTRAIN_ERROR_USAGE);
    CHECK(dtrain_trainer_evaluate(trainer, next_batch, &s, 0, &loss) == DTRAIN_ERROR_ARGUMENT);
    CHECK(dtrain_trainer_evaluate(trainer, next_batch, &s, 1, NULL) == DTRAIN_ERROR_ARGUMENT);
    CHECK(dtrain_trainer_plan(world, &s.desc, NULL, NULL) == DTRAIN_ERROR_ARGUMENT);
    CHECK(dtrain_trainer_plan(world, NULL, NULL, &memory) == DTRAIN_ERROR_ARGUMENT);
    CHECK(dtrain_trainer_step(trainer, NULL) == DTRAIN_OK); /* a record is not needed */
    desc.loss = rows_loss;
    CHECK(dtrain_trainer_create(world, &desc, &bad) == DTRAIN_OK);
    CHECK(dtrain_trainer_evaluate(bad, next_batch, &s, 1, &loss) == DTRAIN_ERROR_ARGUMENT);
    CHECK(strstr(dtrain_last_error(), "evaluate: the loss has 999 elements, not one") != NULL);
    dtrain_trainer_destroy(bad);
    dtrain_trainer_destroy(NULL);
    dtrain_trainer_destroy(trainer);
    dtrain_optimizer_destroy(optimizer);
    dtrain_strategy_destroy(strategy);
    return 0;
}

static void test_arguments(void)
{
    dtrain_launch_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.rank_count = 1;
    desc.mode = DTRAIN_LAUNCH_THREADS;
    CHECK(dtrain_launch(&desc, arguments_rank, run_create(1, 1, 1), NULL) == DTRAIN_OK);
}

/* ---- stragglers ---- */

/* A rank of a busy machine can be delayed for longer than the slow rank sleeps. So the run is repeated with longer
 * sleeps until they are long beside what the machine does to the ranks; the longest are most of a second. */
static const int sleeps_us[] = {10000, 40000, 160000, 640000};
enum { SLEEPS = sizeof sleeps_us / sizeof *sleeps_us };

static void test_straggler_is_named_once(void)
{
    for (uint32_t ranks = 2; ranks <= 3; ranks++) {
        bool good = false;
        for (int k = 0; k < SLEEPS && !good; k++) {
            run *r = run_create(ranks, 1, 30);
            r->slow_rank = 1;
            r->sleep_us = sleeps_us[k];
            run_well(r);
            int named = 0, waited = 0;
            for (int i = 0; i < 30; i++) {
                const dtrain_step_record *record = &r->records[0][i];
                named += dtrain_record_value(record, "slowest_rank") == 1 &&
                         dtrain_record_value(record, "straggler_score") > 2;
                waited += dtrain_record_value(record, "exposed_comm_ms") >=
                          3; /* the others: mean over ranks */
                CHECK(dtrain_record_value(record, "step_ms") >= 10);
            }
            good = r->warnings == 1 && strstr(r->warning, "rank 1 is a straggler") && named > 15 &&
                   waited > 15;
            CHECK_MSG(good || k + 1 < SLEEPS,
                      "%d warnings: %s; %d steps named rank 1, in %d the others waited",
                      r->warnings, r->warning, named, waited);
        }
    }
}

/* The time in next_batch, of all micro-batches and of the slowest rank, is in every rank's record. */
static void test_waiting_for_data(void)
{
    for (uint32_t accumulation = 1; accumulation <= 2; accumulation++) {
        run *r = run_create(3, accumulation, 4);
        r->slow_rank = 2;
        r->sleep_us = 3000;
        run_well(r);
        for (int rank = 0; rank < 3; rank++)
            for (int i = 0; i < 4; i++) {
                const dtrain_step_record *record = &r->records[rank][i];
                CHECK(dtrain_record_value(record, "data_ms") >= 2.999 * accumulation);
                CHECK(dtrain_record_value(record, "data_ms") <=
                      dtrain_record_value(record, "step_ms"));
                CHECK(dtrain_record_value(record, "data_ms") ==
                      dtrain_record_value(&r->records[0][i], "data_ms"));
            }
    }
}

static void test_equal_ranks_are_no_stragglers(void)
{
    bool good = false;
    for (int k = 0; k < SLEEPS && !good; k++) {
        run *r = run_create(2, 1, 15);
        r->sleep_us = sleeps_us[k]; /* all of them */
        run_well(r);
        good = r->warnings == 0;
        CHECK_MSG(good || k + 1 < SLEEPS, "%s", r->warning);
    }
}

/* ---- memory ---- */

static void test_plan_is_what_happens(void)
{
    run *r = run_create(2, 2, 6), *never = run_create(2, 2, 6);
    r->plan_at = 0; /* before anything has run */
    run_well(r);
    run_well(never);
    check_same_losses(r, never, 0);
    for (int rank = 0; rank < 2; rank++) {
        const dtrain_memory *m = &r->plan[rank];
        CHECK_MSG(m->activations == r->last_tape[rank].activation_bytes, "%g planned, %g used",
                  (double)m->activations, (double)r->last_tape[rank].activation_bytes);
        CHECK_MSG(m->activation_grads == r->last_tape[rank].gradient_bytes, "%g planned, %g used",
                  (double)m->activation_grads, (double)r->last_tape[rank].gradient_bytes);
        CHECK(m->params == PARAMS * 4 && m->grads >= PARAMS * 4);
        CHECK(m->optimizer == PARAMS * 8);
        CHECK(m->total == m->params + m->grads + m->optimizer + m->activations +
                              m->activation_grads + m->buffers + m->workspace);
        CHECK(m->total < (uint64_t)64 << 20);
    }
}

static void test_checkpointing(void)
{
    run *plain = run_create(2, 2, 6), *saving = run_create(2, 2, 6);
    saving->recompute_every = 1;
    saving->plan_at = plain->plan_at = 0;
    saving->dropout = plain->dropout = 0.5f;
    run_well(plain);
    run_well(saving);
    check_same_losses(saving, plain, 0);
    CHECK(memcmp(saving->after, plain->after, sizeof plain->after) == 0);
    CHECK(saving->last_tape[0].activation_bytes != plain->last_tape[0].activation_bytes);
    CHECK(saving->plan[0].activations == saving->last_tape[0].activation_bytes);
    CHECK(saving->plan[0].activation_grads == saving->last_tape[0].gradient_bytes);
}

static void test_plan_in_mid_training(void)
{
    run *r = run_create(2, 2, 6), *early = run_create(2, 2, 6);
    r->plan_at = 3;
    early->plan_at = 0;
    r->eval_at = early->eval_at = 2;
    run_well(r);
    run_well(early);
    check_same_losses(r, early, 0);
    CHECK(memcmp(&r->plan, &early->plan, sizeof r->plan) == 0);
}

static void test_steady_state_allocates_nothing(void)
{
    run *r = run_create(2, 2, 12);
    r->eval_at = 5;
    run_well(r);
    CHECK(r->first_tape[0].block_allocations > 0);
    CHECK(r->first_tape[0].block_allocations == r->last_tape[0].block_allocations);
}

static void test_process_memory(void)
{
    uint64_t before = 0, now = 0, peak = 0;
    const size_t bytes = (size_t)64 << 20;
    process_memory(&before, &peak);
    if (before == 0) {
        CHECK(access("/proc/self/smaps_rollup", R_OK) != 0);
        return;
    }
    volatile char *memory = (volatile char *)mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                                                  MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (size_t i = 0; i < bytes; i += 1024) memory[i] = 1;
    process_memory(&now, &peak);
    CHECK_MSG(now >= before + bytes * 9 / 10, "%g bytes more after %g were touched",
              (double)now - (double)before, (double)bytes); /* sanitizers add their own */
    munmap((void *)(uintptr_t)memory, bytes);
    process_memory(&now, NULL);
    CHECK(now < before + bytes);
    process_memory(NULL, &peak);
    CHECK(peak >= before + bytes * 9 / 10);
}

/* Every allocation of a short training fails once, in turn: an error, nothing left behind. */
static void test_memory_failures(void)
{
    run *r = run_create(1, 1, 2);
    dtrain_result result = DTRAIN_ERROR_MEMORY;
    int fail_at = 1;
    r->plan_at = 0;
    for (; result != DTRAIN_OK && fail_at < 500; fail_at++) {
        counted_memory state;
        memset(&state, 0, sizeof state);
        state.fail_at = fail_at;
        r->allocator = counted_allocator(&state);
        result = run_launch(r);
        if (result == DTRAIN_ERROR_RANK_FAILED) /* the rank could not start */
            result = strstr(dtrain_last_error(), "no memory for") ? DTRAIN_ERROR_MEMORY : result;
        else if (result == DTRAIN_OK) result = r->ended[0];
        CHECK_MSG(result == DTRAIN_OK || result == DTRAIN_ERROR_MEMORY, "failure %d: %s", fail_at,
                  dtrain_last_error());
        CHECK_MSG(state.live == 0 && state.live_bytes == 0 && state.wrong == 0,
                  "%ld blocks left after failure %d", state.live, fail_at);
    }
    CHECK(result == DTRAIN_OK && fail_at > 10);
}

/* Each argument that may not be NULL, alone: the sentence names it and no other. */
static int null_rank(dtrain_world *world, void *user)
{
    dtrain_param param;
    dtrain_strategy *strategy = NULL, *no_strategy;
    dtrain_trainer *trainer;
    dtrain_optimizer *optimizer;
    dtrain_optimizer_desc optimizer_desc = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_SGD);
    dtrain_trainer_desc trainer_desc;
    dtrain_strategy_desc strategy_desc;
    dtrain_metrics_desc metrics_desc;
    dtrain_loader_desc loader_desc;
    dtrain_dataset_desc dataset_desc;
    dtrain_state_desc state_desc;
    dtrain_checkpoint_desc checkpoint_desc;
    dtrain_metrics *metrics;
    dtrain_loader *loader;
    dtrain_dataset *dataset;
    dtrain_state *state;
    dtrain_checkpoint *checkpoint;
    dtrain_memory memory;
    float value = 1, grad = 0;
    (void)user;
    memset(&param, 0, sizeof param);
    param.name = "w", param.value = &value, param.grad = &grad, param.count = 1;
    memset(&trainer_desc, 0, sizeof trainer_desc);
    memset(&strategy_desc, 0, sizeof strategy_desc);
    memset(&metrics_desc, 0, sizeof metrics_desc);
    memset(&loader_desc, 0, sizeof loader_desc);
    memset(&dataset_desc, 0, sizeof dataset_desc);
    memset(&state_desc, 0, sizeof state_desc);
    memset(&checkpoint_desc, 0, sizeof checkpoint_desc);
    if (!CHECK(dtrain_strategy_create(world, &param, 1, NULL, &strategy) == DTRAIN_OK)) return 1;
#define NAMED(call, name)                                                                   \
    do {                                                                                    \
        const char *text;                                                                   \
        CHECK((call) == DTRAIN_ERROR_ARGUMENT);                                             \
        text = strchr(dtrain_last_error(), ':') + 1;                                        \
        text = strncmp(dtrain_last_error(), "rank", 4) == 0 ? strchr(text, ':') : text - 1; \
        CHECK_MSG(text &&strcmp(text, ": " name " is NULL") == 0, "%s, expected %s",        \
                  dtrain_last_error(), name);                                               \
    } while (0)
    NAMED(dtrain_strategy_create(NULL, &param, 1, NULL, &no_strategy), "world");
    NAMED(dtrain_strategy_create(world, NULL, 1, NULL, &no_strategy), "params");
    NAMED(dtrain_strategy_create(world, &param, 1, NULL, NULL), "out");
    NAMED(dtrain_strategy_plan(NULL, 1, &strategy_desc, 1, &memory), "params");
    NAMED(dtrain_strategy_plan(&param, 1, NULL, 1, &memory), "desc");
    NAMED(dtrain_strategy_plan(&param, 1, &strategy_desc, 1, NULL), "memory");
    NAMED(dtrain_optimizer_create(NULL, strategy, &optimizer_desc, &optimizer), "world");
    NAMED(dtrain_optimizer_create(world, NULL, &optimizer_desc, &optimizer), "strategy");
    NAMED(dtrain_optimizer_create(world, strategy, NULL, &optimizer), "desc");
    NAMED(dtrain_optimizer_create(world, strategy, &optimizer_desc, NULL), "out");
    NAMED(dtrain_trainer_create(NULL, &trainer_desc, &trainer), "world");
    NAMED(dtrain_trainer_create(world, NULL, &trainer), "desc");
    NAMED(dtrain_trainer_create(world, &trainer_desc, NULL), "out");
    NAMED(dtrain_trainer_plan(NULL, &trainer_desc, NULL, &memory), "world");
    NAMED(dtrain_trainer_plan(world, NULL, NULL, &memory), "desc");
    NAMED(dtrain_trainer_plan(world, &trainer_desc, NULL, NULL), "memory");
    NAMED(dtrain_metrics_create(NULL, &metrics_desc, &metrics), "world");
    NAMED(dtrain_metrics_create(world, NULL, &metrics), "desc");
    NAMED(dtrain_metrics_create(world, &metrics_desc, NULL), "out");
    metrics_desc.sink_count = 1;
    NAMED(dtrain_metrics_create(world, &metrics_desc, &metrics), "desc->sinks");
    NAMED(dtrain_loader_create(world, NULL, &loader), "desc");
    NAMED(dtrain_loader_create(world, &loader_desc, NULL), "out");
    NAMED(dtrain_dataset_open(world, NULL, &dataset), "desc");
    NAMED(dtrain_dataset_open(world, &dataset_desc, NULL), "out");
    NAMED(dtrain_state_create(NULL, &state_desc, &state), "world");
    NAMED(dtrain_state_create(world, NULL, &state), "desc");
    NAMED(dtrain_state_create(world, &state_desc, NULL), "out");
    NAMED(dtrain_checkpoint_open(NULL, &checkpoint_desc, &checkpoint), "world");
    NAMED(dtrain_checkpoint_open(world, NULL, &checkpoint), "desc");
    NAMED(dtrain_checkpoint_open(world, &checkpoint_desc, NULL), "out");
    NAMED(dtrain_checkpoint_open(world, &checkpoint_desc, &checkpoint), "desc->state");
#undef NAMED
    dtrain_strategy_destroy(strategy);
    return 0;
}

static void test_null_is_named(void)
{
    dtrain_launch_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.rank_count = 1;
    CHECK(dtrain_launch(&desc, null_rank, NULL, NULL) == DTRAIN_OK);
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    RUN(test_learns);
    RUN(test_ranks_and_micro_batches_agree);
    RUN(test_ignored_targets);
    RUN(test_losses_of_several_terms);
    RUN(test_terms_that_take_part);
    RUN(test_terms_without_a_first_batch);
    RUN(test_frozen_for_some_steps);
    RUN(test_data_ends_earlier);
    RUN(test_processes_are_threads_to_the_bit);
    RUN(test_clipping);
    RUN(test_dropout_seeds);
    RUN(test_groups_train_alone);
    RUN(test_record);
    RUN(test_record_of_one_rank);
    RUN(test_evaluation);
    RUN(test_evaluation_without_dropout);
    RUN(test_nan_of_one_rank);
    RUN(test_nan_is_skipped);
    RUN(test_drift_is_found);
    RUN(test_batch_function_fails);
    RUN(test_step_is_repeated);
    RUN(test_loss_fails_on_one_rank);
    RUN(test_arguments);
    RUN(test_null_is_named);
    RUN(test_straggler_is_named_once);
    RUN(test_waiting_for_data);
    RUN(test_equal_ranks_are_no_stragglers);
    RUN(test_plan_is_what_happens);
    RUN(test_checkpointing);
    RUN(test_plan_in_mid_training);
    RUN(test_steady_state_allocates_nothing);
    RUN(test_process_memory);
    RUN(test_memory_failures);
    return test_summary();
}
