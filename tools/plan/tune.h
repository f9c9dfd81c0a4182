/* tune.h: --tune: find the batch of a rank, the strategy and the size of buckets that are fastest here.
 *
 * Candidates are tried one after the other, in this order, each by a launch of its own with the real data:
 *
 *     batches       1, 2, 4 ... under the first strategy that fits, until one is hardly faster or does not fit
 *     strategies    the others, at that batch, and at twice that where only memory had ended the search
 *     buckets       the other sizes, with the fastest of those
 *
 * Flags that are given stay as they are, and with --global-batch only its split changes; compression is never chosen,
 * because it changes what is computed. A candidate is planned on the simulator's device first: what would not fit is
 * not tried. One that fails is a row of the table and nothing else. Ranks agree without a vote: the time of a step in
 * the trainer's record is that of the slowest rank, the same number on all of them. */
#ifndef PLAN_TUNE_H
#define PLAN_TUNE_H

#include "tools/plan/forecast.h"

#include <sys/mman.h>
#include <sys/stat.h>
#ifdef DTRAIN_USE_MPI
#include <mpi.h>
#endif

#define TUNE_SECONDS 60.0     /* no candidate begins later */
#define TUNE_STEP_SECONDS 0.6 /* of steps that count, if there are three */
#define TUNE_FASTER 1.02      /* a later candidate has to be that much faster to be chosen */
enum { TUNE_STEPS = 24, TUNE_LEAST_STEPS = 3, TUNE_ROWS = 64, TUNE_MOST_BATCH = 4096 };

typedef struct candidate {
    long strategy, batch, accum, bucket_kib;
    double mib, step_ms, rate; /* rate 0: was not measured */
    size_t buckets;
    bool too_large;
    char verdict[400];
} candidate;

/* Memory that ranks share with the process that launches them. Under another launcher each rank has its own, and what
 * is decided from must be the same in all of them: times of records, and the clock of rank 0. */
typedef struct tune_shared {
    const run_program *program;
    double begun,
        elapsed; /* of this process's clock; on rank 0's, when a candidate had last been measured */
    double step_ms;
    int steps;
} tune_shared;

typedef struct tuner {
    run_settings *s;
    tune_shared *shared;
    forecast plan;
    forecast_row planned;
    candidate rows[TUNE_ROWS];
    int count, best;   /* best: -1 */
    bool same_buckets; /* equal numbers of buckets are equal candidates */
    bool broken;       /* ranks of a launch have failed */
} tuner;

/* The median; the values are sorted. */
static double middle(double *values, int count)
{
    for (int i = 1; i < count; i++)
        for (int k = i; k > 0 && values[k] < values[k - 1]; k--) {
            const double swap = values[k];
            values[k] = values[k - 1], values[k - 1] = swap;
        }
    return count ? values[count / 2] : 0;
}

/* Make a few steps of a candidate, which the switches hold: what every rank runs. All ranks write the same. */
static int tune_rank(dtrain_world *world, void *user)
{
    tune_shared *shared = (tune_shared *)user;
    dtrain_compression_desc compression;
    dtrain_strategy_desc strategy = strategy_desc(&run_flags, &compression);
    run_job j = new_job(&run_flags, shared->program, calloc(1, shared->program->own_bytes));
    double times[TUNE_STEPS], sum = 0, elapsed[DTRAIN_MAX_RANKS];
    int count = 0;
    dtrain_result result = j.own ? DTRAIN_OK : dtrain_fail(DTRAIN_ERROR_MEMORY, "no memory");
    if (result != DTRAIN_OK) return 1;
    TRY(plan_job(world, &j, &strategy));
    TRY(j.program->open_data(world, &j));
    TRY(open_trainer(world, &j, &strategy));
    TRY(dtrain_trainer_step(j.trainer, NULL)); /* warms up */
    while (count < TUNE_STEPS && (count < TUNE_LEAST_STEPS || sum < 1e3 * TUNE_STEP_SECONDS)) {
        dtrain_step_record record;
        TRY(dtrain_trainer_step(j.trainer, &record));
        sum += times[count++] = dtrain_record_value(&record, "step_ms");
    }
    sum = dtrain_seconds() - shared->begun;
    TRY(dtrain_world_all_gather(world, &sum, sizeof sum, elapsed));
    if (dtrain_world_rank(world) == 0 || !run_flags.thread_ranks) {
        shared->elapsed = elapsed[0];
        shared->step_ms = middle(times, count);
        shared->steps = count;
    }
cleanup:
    close_job(&j);
    free(j.own);
    return result == DTRAIN_OK ? 0 : 1;
}

static void ignore_log(void *user, dtrain_log_level level, int rank, const char *text)
{
    (void)user;
    (void)level;
    (void)rank;
    (void)text;
}

/* Put a candidate into the switches. */
static void apply_candidate(run_settings *s, const candidate *c)
{
    s->strategy = c->strategy;
    s->batch = c->batch;
    s->bucket_kib = c->bucket_kib;
    s->auto_batch = 0;
}

static int plan_candidate(dtrain_world *world, void *user)
{
    tuner *t = (tuner *)user;
    memset(&t->planned, 0, sizeof t->planned);
    t->planned.ranks = t->plan.ranks;
    return forecast_ranks(world, &t->plan, &t->planned) == DTRAIN_OK ? 0 : 1;
}

/* The MiB that a rank may use, without the process itself; 0: unknown, as on a GPU without --memory-limit. */
static double tune_limit(const tuner *t)
{
    if (t->s->memory_limit) return (double)t->s->memory_limit;
    if (t->plan.named) return 0;
    return t->plan.machine.memory_gib * 1024 * 15 / 16 / ranks_here(&t->plan, t->plan.ranks);
}

/* Predict what a candidate needs. False: its row says why it is not tried. */
static bool plan_fits(tuner *t, candidate *c)
{
    const double limit = tune_limit(t);
    if (launch_virtual(sim_layer_ops(), plan_candidate, t) != DTRAIN_OK) {
        snprintf(c->verdict, sizeof c->verdict, "refused: %.380s", run_error());
        return false;
    }
    c->accum = (long)t->planned.accum;
    c->buckets = t->planned.strategy.bucket_count;
    c->mib = mib(t->planned.memory.total - t->planned.memory.workspace);
    c->too_large = limit > 0 && c->mib > limit;
    if (!c->too_large) return true;
    snprintf(c->verdict, sizeof c->verdict, "would not fit: %.0f MiB a rank are the limit", limit);
    return false;
}

/* Measure a candidate, which the switches hold. */
static void measure(tuner *t, candidate *c)
{
    dtrain_launch_desc launch;
    t->shared->steps = 0;
    if (launch_desc(t->s, true, &launch)) return; /* has said why */
    launch.options.log = ignore_log;
    launch.restarts = 0;
    launch.options.trace.path = NULL;
    if (launch.timeout_ms > 1000 * (uint32_t)TUNE_SECONDS) /* a candidate that hangs has failed */
        launch.timeout_ms = 1000 * (uint32_t)TUNE_SECONDS;
    if (dtrain_launch(&launch, tune_rank, t->shared, NULL) != DTRAIN_OK || !t->shared->steps) {
        snprintf(c->verdict, sizeof c->verdict, "failed: %.380s", run_error());
        t->broken = true;
        return;
    }
    c->step_ms = t->shared->step_ms;
    c->rate = 1e3 / c->step_ms * (double)(c->batch * c->accum) *
              (double)(t->plan.ranks / model_ranks(t->s)) * (double)t->planned.sample_things;
}

/* Try a candidate, and add its row. Return how many times faster it is than the fastest so far: 0 when it cannot be
 * measured, 1 for the first. */
static double try_candidate(tuner *t, candidate c)
{
    const run_settings before = *t->s;
    double gain = 0;
    if (t->count == TUNE_ROWS) return 0;
    memset(c.verdict, 0, sizeof c.verdict);
    c.rate = c.step_ms = c.mib = 0;
    c.accum = 0;
    c.buckets = 0;
    c.too_large = false;
    apply_candidate(t->s, &c);
    if (t->shared->elapsed > TUNE_SECONDS)
        snprintf(c.verdict, sizeof c.verdict, "not tried: the time is up");
    else if (plan_fits(t, &c)) {
        if (t->same_buckets && c.buckets == t->rows[t->best].buckets)
            snprintf(c.verdict, sizeof c.verdict, "the same buckets as the fastest");
        else measure(t, &c);
    }
    *t->s = before;
    if (c.rate > 0) gain = t->best < 0 ? 1 : c.rate / t->rows[t->best].rate;
    t->rows[t->count] = c;
    if (gain > TUNE_FASTER || (t->best < 0 && gain > 0)) t->best = t->count;
    t->count++;
    return gain;
}

/* ---- the search ------------------------------------------------------------------------------------ */

/* Whether micro-batches of so many samples make up the global batch, if one is given. */
static bool splits(const tuner *t, long batch)
{
    uint32_t each, accum;
    if (!t->s->global_batch) return true;
    return split_global_batch((uint64_t)t->s->global_batch, (uint32_t)batch,
                              t->plan.ranks / (int)model_ranks(t->s), &each, &accum) == DTRAIN_OK &&
           each == (uint32_t)batch;
}

/* Try `first` samples under one strategy, then twice as many, until that is no longer worth it. Return whether only
 * memory has ended it. */
static bool climb(tuner *t, candidate c, long first)
{
    for (c.batch = first; c.batch <= TUNE_MOST_BATCH; c.batch *= 2) {
        if (!splits(t, c.batch)) continue;
        (void)try_candidate(t, c);
        if (t->rows[t->count - 1].too_large) return true;
        if (t->best != t->count - 1) return false;
    }
    return false;
}

/* Name the strategies to try, in the order in which they are tried. */
static int tune_strategies(const run_settings *s, int ranks, long *list)
{
    static const long all[] = {DTRAIN_STRATEGY_DDP,           DTRAIN_STRATEGY_ZERO1,
                               DTRAIN_STRATEGY_SHARD_GRAD_OP, DTRAIN_STRATEGY_FULL_SHARD,
                               DTRAIN_STRATEGY_ZERO3,         DTRAIN_STRATEGY_HYBRID_SHARD};
    int count = 0;
    if (given("--strategy") || ranks == 1) return list[0] = s->strategy, 1;
    for (int i = 0; i < COUNT(all); i++)
        if (all[i] != DTRAIN_STRATEGY_HYBRID_SHARD || s->node_size || s->emulate)
            list[count++] = all[i] - 1;
    return count;
}

static void search(tuner *t)
{
    static const long buckets[] = {256, 1024, 4096, 25 * 1024, 100 * 1024};
    const run_settings *s = t->s;
    long kinds[8];
    const int kind_count = tune_strategies(s, t->plan.ranks / (int)model_ranks(s), kinds);
    const bool fixed = given("--batch") && !s->auto_batch;
    bool memory = false;
    int k = 0;
    candidate c;
    memset(&c, 0, sizeof c);
    c.bucket_kib = s->bucket_kib;
    for (; k < kind_count && t->best < 0; k++) { /* the first that fits */
        c.strategy = kinds[k];
        c.batch = s->batch;
        if (fixed) try_candidate(t, c);
        else memory = climb(t, c, t->plan.program->least_batch);
    }
    for (; k < kind_count && t->best >= 0; k++) {
        c.strategy = kinds[k];
        c.batch = t->rows[t->best].batch;
        if (try_candidate(t, c) > 0 && memory && !fixed) climb(t, c, 2 * c.batch);
    }
    t->same_buckets = true;
    for (int i = 0; i < COUNT(buckets) && t->best >= 0 && t->plan.ranks > 1; i++) {
        c = t->rows[t->best];
        c.bucket_kib = buckets[i];
        if (!given("--bucket-kib") && buckets[i] != s->bucket_kib) try_candidate(t, c);
    }
}

#ifdef DTRAIN_USE_MPI
/* Whether MPI's launcher has started this process, and the ranks will use MPI: because they were told to, or because
 * they may be on several hosts. */
static bool uses_mpi(const tuner *t)
{
    const dtrain_launch_place *place = &t->plan.place;
    if (place->started_count == place->rank_count || strcmp(t->s->device, "cpu") != 0) return false;
    if (t->s->comm) return strcmp(t->s->comm, "mpi") == 0;
    return place->host_rank_count != place->rank_count;
}
#endif

/* Search. MPI can be started once in a process and every candidate is a launch, so it is started around them all; it
 * is not ended after a failure, because it would wait for what is left of that. */
static void search_worlds(tuner *t)
{
#ifdef DTRAIN_USE_MPI
    if (uses_mpi(t)) {
        MPI_Init(NULL, NULL);
        MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    }
#endif
    search(t);
#ifdef DTRAIN_USE_MPI
    if (uses_mpi(t) && !t->broken) MPI_Finalize();
#endif
}

/* ---- what is printed ------------------------------------------------------------------------------- */

static void print_rows(const tuner *t)
{
    const double limit = tune_limit(t);
    printf("# --tune: %d rank%s, a few steps of each candidate, none begun after %.0f s",
           t->plan.ranks, t->plan.ranks == 1 ? "" : "s", TUNE_SECONDS);
    if (limit > 0) printf("; %.0f MiB a rank are there", limit);
    printf("\n# %-13s %6s %6s %10s %7s %10s %10s %12s\n", "strategy", "batch", "accum",
           "bucket KiB", "buckets", "MiB a rank", "step ms", t->plan.program->sample_name);
    for (int i = 0; i < t->count; i++) {
        const candidate *c = &t->rows[i];
        printf("# %-13s %6ld ", strategies[c->strategy], c->batch);
        if (c->accum)
            printf("%6ld %10ld %7zu %10.1f ", c->accum, c->bucket_kib, c->buckets, c->mib);
        else printf("%6s %10ld %7s %10s ", "-", c->bucket_kib, "-", "-");
        if (c->rate > 0) printf("%10.2f %12.0f  ", c->step_ms, c->rate);
        else printf("%10s %12s  %s\n", "-", "-", c->verdict);
        if (i == t->best) printf("chosen\n");
        else if (c->rate > 0)
            printf("%.0f %% of the chosen one's rate%s\n", 100 * c->rate / t->rows[t->best].rate,
                   c->rate > t->rows[t->best].rate ? ": too little to be sure" : ": slower");
    }
}

/* Print the switches with the fastest candidate, as a file for --config, and write that file where it is asked for. */
static dtrain_result print_choice(tuner *t)
{
    const candidate *c = &t->rows[t->best];
    char about[160], path[4096];
    dtrain_result result = DTRAIN_OK;
    apply_candidate(t->s, c);
    snprintf(about, sizeof about, "tuned: --strategy %s --batch %ld --bucket-kib %ld",
             strategies[c->strategy], c->batch, c->bucket_kib);
    printf("# " RUN_NAME " of dtrain %s: %s\n", DTRAIN_VERSION_STRING, about);
    config_write(stdout, flag_table, flag_count);
    snprintf(path, sizeof path, "%s/config", t->s->checkpoints ? t->s->checkpoints : "");
    if (t->s->checkpoints && mkdir(t->s->checkpoints, 0777) != 0 && errno != EEXIST)
        TRY(dtrain_fail(DTRAIN_ERROR_FILE, "%s: %s", t->s->checkpoints, strerror(errno)));
    if (t->s->checkpoints) TRY(write_config(path, about));
    if (t->s->config_out) TRY(write_config(t->s->config_out, about));
cleanup:
    return result;
}

/* Find the fastest switches, print them and why, and stop. Return main's exit status. */
static int tune(run_settings *s, const run_program *program)
{
    static tuner t;
    t.s = s;
    t.plan.s = s;
    t.plan.program = program;
    t.best = -1;
    void *const memory =
        mmap(NULL, sizeof *t.shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return BAD("--tune: %s", strerror(errno));
    t.shared = (tune_shared *)memory;
    t.shared->program = program;
    t.shared->begun = dtrain_seconds();
    if (choose_machine(&t.plan)) return 2;
    uint32_t each, accum;
    if (s->global_batch &&
        split_global_batch((uint64_t)s->global_batch, 1, t.plan.ranks / (int)model_ranks(s), &each,
                           &accum) != DTRAIN_OK)
        return BAD("--global-batch: %s", run_error());
    search_worlds(&t);
    const bool first = t.plan.place.first_rank == 0; /* else another process tells */
    if (first) print_rows(&t);
    if (!first && t.best >= 0) return 0;
    if (t.best < 0) return BAD("--tune: no candidate could be measured; see the table above");
    return print_choice(&t) == DTRAIN_OK ? 0 : BAD("--tune: %s", run_error());
}

#endif /* PLAN_TUNE_H */
