/* test_checkpoints.c: random checkpoints: a run under any strategy, precision, compression and number of ranks is saved
 * and goes on, as it was or under any other.
 *
 * A seed draws two configurations. The first trains, saves and goes on; a second run of it that loads must come to the
 * same bits in every record and all of its state. The other configuration loads the same checkpoint: values, moments
 * and scalars must be those that were saved, whoever holds them now; what it then trains must agree on all ranks. An
 * oracle without files compares: images of the state, copied piece by piece.
 *
 * The same seed draws a history on a disk in memory: runs that begin in a directory, go on, go back, save again, and
 * end well or with their disk, at any call, and with what was not synced. A list of steps says what must be there.
 *
 *   build/tests/test_checkpoints [--seed N] [--count N] [--seconds N] */
#include "test.h"
#include <pthread.h>
#include "dtrain.h"
#include "ranks.h"
#include "saved_run.h"
#include "memory_storage.h"
#include "seeds.h"

typedef struct draw {
    uint64_t state;
    char text[256];
} draw;

static uint32_t pick(draw *d, uint32_t limit) { return (uint32_t)ranks_random(&d->state, limit); }

static saved_run *draw_run(draw *d)
{
    static const uint32_t kinds[] = {DTRAIN_STRATEGY_DDP,         DTRAIN_STRATEGY_DDP,
                                     DTRAIN_STRATEGY_ZERO1,       DTRAIN_STRATEGY_SHARD_GRAD_OP,
                                     DTRAIN_STRATEGY_FULL_SHARD,  DTRAIN_STRATEGY_ZERO3,
                                     DTRAIN_STRATEGY_HYBRID_SHARD};
    static const uint32_t tapes[] = {0, 0, DTRAIN_TAPE_BF16, DTRAIN_TAPE_F16};
    saved_run *r = saved_new((int)pick(d, SAVED_RANKS) + 1, kinds[pick(d, 7)]);
    dtrain_strategy_desc *s = &r->strategy;
    if (s->kind == DTRAIN_STRATEGY_HYBRID_SHARD) {
        r->ranks = 2 * (int)(1 + pick(d, 4));
        s->node_size = r->ranks == 8 && pick(d, 2) ? 4 : 2;
    }
    r->micro = 1 + pick(d, 3);
    r->batch = 1 + (int)pick(d, 3);
    r->tape_flags = tapes[pick(d, 4)];
    r->recompute_every = pick(d, 3) == 0;
    r->sgd = pick(d, 3) == 0;
    r->momentum = pick(d, 2) ? 0.9f : 0;
    r->dropout = pick(d, 2) ? 0.1f : 0;
    r->background = pick(d, 2);
    if (pick(d, 4) == 0) s->reduce_dtype = DTRAIN_DTYPE_BF16;
    if (pick(d, 4) == 0 && s->kind >= DTRAIN_STRATEGY_FULL_SHARD)
        s->param_dtype = DTRAIN_DTYPE_BF16;
    if (pick(d, 4) == 0) s->keep_after_forward = s->kind >= DTRAIN_STRATEGY_FULL_SHARD;
    s->bucket_bytes = 400 + 400 * pick(d, 8);
    if (pick(d, 4) == 0 && r->ranks % 2 == 0 && s->kind != DTRAIN_STRATEGY_ZERO3 &&
        s->kind != DTRAIN_STRATEGY_HYBRID_SHARD)
        s->hierarchical = true, s->node_size = 2;
    if (s->kind == DTRAIN_STRATEGY_DDP && r->tape_flags != DTRAIN_TAPE_F16 && pick(d, 2)) {
        r->compression.kind = DTRAIN_COMPRESSION_TOPK;
        r->compression.topk_ratio = 0.02f * (float)(1 + pick(d, 5));
        r->compression.topk_momentum = pick(d, 2) ? 0.5f : 0;
        r->compression.no_error_feedback = pick(d, 5) == 0;
        r->compression.dense_steps = 1 + pick(d, 3);
        r->compression.warmup_steps = pick(d, 3);
        r->compression.dense_below = 1;
        if (r->compression.no_error_feedback) r->compression.topk_momentum = 0;
        if (r->compression.topk_momentum > 0) r->momentum = 0;
    }
    snprintf(d->text, sizeof d->text,
             "kind %u on %d ranks (node %u), micro %u, tape %u, compression %u%s%s%s", s->kind,
             r->ranks, s->node_size, r->micro, r->tape_flags, r->compression.kind,
             s->hierarchical ? ", hierarchical" : "", r->sgd ? ", sgd" : "",
             r->background ? ", background" : "");
    return r;
}

static saved_run *copy_run(const saved_run *r)
{
    saved_run *copy = (saved_run *)ranks_shared(sizeof *copy);
    memcpy(copy, r, offsetof(saved_run, records));
    return copy;
}

/* ---- histories ---- */

enum { FRESH, SET_ASIDE, NEWEST, EXPLICIT, MOST = 6, STEPS = 40 };

typedef struct act {
    bool save; /* false: load it */
    int step, stamp;
} act;

/* A run: what it does, and what came of it. A checkpoint has the values (stamp, step). */
typedef struct visit {
    disk *d;
    int ranks, begin, from; /* from: the step of EXPLICIT */
    uint32_t keep;
    act acts[MOST];
    int count, done; /* -1: not even opened */
    dtrain_result loaded, opened;
    float value[2];
} visit;

/* Checkpoints of a directory by their steps, as a list has them: 0 = there is none. */
typedef struct shelf {
    int stamps[STEPS], aside;
} shelf;

static void step_name(char *path, size_t room, int step)
{
    snprintf(path, room, "/run/step-%012d", step);
}

static int visit_main(dtrain_world *world, void *user)
{
    visit *v = (visit *)user;
    const bool first = dtrain_world_rank(world) == 0;
    float value[2] = {0, 0}, grad[2] = {0, 0};
    char path[64];
    dtrain_param p;
    dtrain_strategy *strategy;
    dtrain_state *state;
    dtrain_checkpoint *checkpoint = NULL;
    dtrain_state_desc all = {0};
    dtrain_load_desc how = {0};
    dtrain_checkpoint_desc desc = {0};
    dtrain_result result = DTRAIN_OK;
    memset(&p, 0, sizeof p);
    p.name = "w";
    p.count = 2;
    p.value = value;
    p.grad = grad;
    if (dtrain_strategy_create(world, &p, 1, NULL, &strategy) != DTRAIN_OK) return 3;
    all.strategy = strategy;
    if (dtrain_state_create(world, &all, &state) != DTRAIN_OK) return 3;
    desc.directory = "/run";
    desc.state = state;
    desc.keep = v->keep;
    desc.set_aside = v->begin == SET_ASIDE;
    desc.storage = how.storage = &v->d->table;
    step_name(path, sizeof path, v->from);
    if (v->begin >= NEWEST)
        result = dtrain_checkpoint_load(state, v->begin == NEWEST ? "/run" : path, &how, NULL);
    if (first) v->loaded = result, memcpy(v->value, value, sizeof value);
    if (v->count >= 0 && (result == DTRAIN_OK || result == DTRAIN_ERROR_NOT_FOUND)) {
        result = dtrain_checkpoint_open(world, &desc, &checkpoint);
        if (first) v->opened = result, v->done = result == DTRAIN_OK ? 0 : -1;
    }
    for (int i = 0; i < v->count && result == DTRAIN_OK; i++) {
        const act *a = &v->acts[i];
        step_name(path, sizeof path, a->step);
        value[0] = a->save ? (float)a->stamp : value[0];
        value[1] = a->save ? (float)a->step : value[1];
        result = a->save ? dtrain_checkpoint_save(checkpoint, a->step, 0)
                         : dtrain_checkpoint_load(state, path, &how, NULL);
        if (first && result == DTRAIN_OK) v->done = i + 1;
    }
    dtrain_checkpoint_close(checkpoint);
    dtrain_state_destroy(state);
    dtrain_strategy_destroy(strategy);
    return 0;
}

static void visit_go(visit *v)
{
    const dtrain_launch_desc desc = ranks_desc(v->ranks, DTRAIN_LAUNCH_THREADS);
    CHECK_MSG(ranks_launch(&desc, visit_main, v, NULL) == DTRAIN_OK, "%s", dtrain_last_error());
}

/* Load a checkpoint by its step, or the newest (-1); its stamp, 0: there is none. */
static int stamp_at(disk *d, int step, const char *what)
{
    visit v = {0};
    v.d = d;
    v.ranks = 1;
    v.begin = step < 0 ? NEWEST : EXPLICIT;
    v.from = step;
    v.count = -1;
    visit_go(&v);
    if (step < 0 && v.loaded == DTRAIN_ERROR_NOT_FOUND) return 0;
    CHECK_MSG(v.loaded == DTRAIN_OK && (step < 0 || v.value[1] == (float)step),
              "%s: step %d cannot be loaded (%d), or is %g", what, step, v.loaded, v.value[1]);
    return (int)v.value[0];
}

static void see_name(void *list, const char *name)
{
    shelf *s = (shelf *)list;
    int step;
    if (sscanf(name, "step-%d", &step) == 1 && strlen(name) == 17 && step < STEPS)
        s->stamps[step] = 1;
}

static void count_name(void *list, const char *name)
{
    shelf *s = (shelf *)list;
    (void)name;
    s->aside++;
}

/* Find what is on the disk. */
static void shelf_read(disk *d, shelf *s, const char *what)
{
    char path[32];
    memset(s, 0, sizeof *s);
    (void)d->table.list(d, "/run", see_name, s);
    for (int step = 0; step < STEPS; step++)
        if (s->stamps[step]) s->stamps[step] = stamp_at(d, step, what);
    for (int i = 1; i < 99; i++) {
        snprintf(path, sizeof path, "/run/aside-%d", i);
        if (d->table.list(d, path, count_name, s) < 0) break;
    }
}

static int newest_of(const shelf *s)
{
    int step = STEPS - 1;
    while (step > 0 && !s->stamps[step]) step--;
    return step;
}

/* Leave what is behind a step. */
static void shelf_turn(shelf *s, int above)
{
    for (int step = above + 1; step < STEPS; step++)
        if (s->stamps[step]) s->stamps[step] = 0, s->aside++;
}

static void shelf_save(shelf *s, int base, const act *a, uint32_t keep)
{
    shelf_turn(s, base < a->step ? base : a->step);
    s->stamps[a->step] = a->stamp;
    for (int step = STEPS - 1; step >= 0; step--)
        if (s->stamps[step] && keep-- == 0) s->stamps[step] = 0, keep = 0;
}

/* Draw what a run does, from what is there. */
static void visit_draw(visit *v, draw *d, const shelf *s, int *stamp)
{
    shelf now = *s;
    int base = newest_of(s);
    v->begin = (int)pick(d, 4);
    if (v->begin == EXPLICIT && !s->stamps[base]) v->begin = NEWEST;
    if (v->begin == NEWEST && pick(d, 3) && s->stamps[base]) v->begin = EXPLICIT;
    for (v->from = (int)pick(d, STEPS); v->begin == EXPLICIT && !s->stamps[v->from];)
        v->from = (int)pick(d, STEPS);
    v->ranks = 1 + (int)pick(d, 2);
    v->keep = 1 + pick(d, 3);
    v->count = (int)pick(d, MOST + 1);
    if (v->begin == EXPLICIT) base = v->from;
    if (v->begin < NEWEST || !s->stamps[base]) base = 0;
    shelf_turn(&now, v->begin == SET_ASIDE ? -1 : base);
    for (int i = 0; i < v->count; i++) {
        act *a = &v->acts[i];
        a->save = pick(d, 4) != 0 || !now.stamps[newest_of(&now)];
        a->step = base + (int)pick(d, 5);
        if (a->step >= STEPS) a->step = STEPS - 1;
        if (!a->step) a->step = 1;
        a->stamp = ++*stamp;
        while (!a->save && !now.stamps[a->step]) a->step = (int)pick(d, STEPS);
        if (a->save) shelf_save(&now, base ? base : -1, a, v->keep);
        base = a->step;
    }
}

/* Make a run, with a disk that may die in it, and compare. */
static void visit_check(visit *v, draw *d, const char *what)
{
    shelf want, found;
    int may[3], base = -1;
    shelf_read(v->d, &want, what);
    const int newest = newest_of(&want);
    const bool used = want.stamps[newest] != 0;
    const bool dies = pick(d, 3) == 0;
    may[0] = may[1] = may[2] = want.stamps[newest];
    v->d->calls = 0;
    v->d->writes_only = v->d->fail_on = true;
    v->d->fail_at = dies ? 1 + (long)pick(d, 60 + 40 * (uint32_t)v->count) : 0;
    v->done = -1;
    visit_go(v);
    const bool died = v->d->fail_at && v->d->calls >= v->d->fail_at;
    if (died || pick(d, 2)) disk_lose_power(v->d, pick(d, 4) ? d->state : 0);
    v->d->fail_at = 0;
    if (v->begin == EXPLICIT) base = v->from;
    else if (v->begin == NEWEST && used) base = newest;
    const bool refused = v->begin == FRESH && used;
    if (refused) CHECK_MSG(v->done < 0, "%s: it was not refused", what);
    else if (!died) CHECK_MSG(v->done == v->count, "%s: %d acts done", what, v->done);
    if (!refused) shelf_turn(&want, base);
    if (!refused) may[0] = may[1] = base < 0 ? 0 : want.stamps[base];
    if (v->done >= 0) may[2] = may[0];
    for (int i = 0; i < v->done; i++) {
        if (v->acts[i].save) shelf_save(&want, base, &v->acts[i], v->keep);
        base = v->acts[i].step;
        may[0] = may[1] = may[2] = want.stamps[newest_of(&want)];
    }
    if (v->done >= 0 && v->done < v->count && v->acts[v->done].save) {
        may[1] = v->acts[v->done].stamp;
        may[2] = base < 0 ? 0 : want.stamps[base]; /* it had gone back, and has not saved */
    }
    const int got = stamp_at(v->d, -1, what);
    CHECK_MSG(got == may[0] || got == may[1] || got == may[2], "%s: the newest is %d, not %d %d %d",
              what, got, may[0], may[1], may[2]);
    shelf_read(v->d, &found, what);
    for (int step = 0; step < STEPS && !died; step++)
        CHECK_MSG(found.stamps[step] == want.stamps[step], "%s: at step %d is %d, not %d", what,
                  step, found.stamps[step], want.stamps[step]);
    if (!died)
        CHECK_MSG(found.aside == want.aside, "%s: %d aside, not %d", what, found.aside, want.aside);
    CHECK_MSG(found.aside >= want.aside - (died ? STEPS : 0), "%s: %d aside", what, found.aside);
}

static void check_history(uint64_t seed, bool words)
{
    draw d = {ranks_mix(seed ^ 0x715), ""};
    disk *memory = disk_new();
    int stamp = 0;
    for (int i = 0; i < 8; i++) {
        char what[300];
        visit v = {0};
        shelf s;
        v.d = memory;
        shelf_read(memory, &s, "a history");
        visit_draw(&v, &d, &s, &stamp);
        int used = snprintf(what, sizeof what, "seed %llu, run %d: begins %d at %d, keep %u:",
                            (unsigned long long)seed, i, v.begin, v.from, v.keep);
        for (int k = 0; k < v.count; k++)
            used += snprintf(what + used, sizeof what - (size_t)used, " %s %d",
                             v.acts[k].save ? "save" : "load", v.acts[k].step);
        if (words) printf("  %s\n", what);
        visit_check(&v, &d, what);
    }
    disk_free(memory);
}

static bool run_seed(uint64_t seed, bool words)
{
    char folder[64], what[600], command[128];
    const long before = test_shared->failed_checks;
    draw a = {ranks_mix(seed), ""}, b = {ranks_mix(seed ^ 0x5a5a), ""};
    snprintf(folder, sizeof folder, "/tmp/dtrain_checkpoints_XXXXXX");
    if (!mkdtemp(folder)) exit(3);
    saved_run *whole = draw_run(&a), *other = draw_run(&b);
    const int saved_at = 1 + (int)pick(&a, 4), end = saved_at + 1 + (int)pick(&a, 3);
    saved_run *first = copy_run(whole), *second = copy_run(whole);
    whole->steps = second->steps = end;
    first->steps = first->save_every = saved_at;
    first->save = second->load = other->load = folder;
    snprintf(what, sizeof what, "seed %llu, saved at %d of %d: %s", (unsigned long long)seed,
             saved_at, end, a.text);
    if (words) printf("%s\n  then %s\n", what, b.text);
    if (saved_go(whole, what) && saved_go(first, what) && saved_go(second, what)) {
        saved_compare(whole, second, saved_at, what);
        CHECK_MSG(!second->loaded[0].note[0], "%s: %s", what, second->loaded[0].note);
    }
    snprintf(what, sizeof what, "seed %llu: %s; then %s", (unsigned long long)seed, a.text, b.text);
    other->how.partial = other->sgd != first->sgd || (other->momentum > 0) != (first->momentum > 0);
    other->steps = saved_at;
    if (saved_go(other, what)) {
        CHECK_MSG(other->hash[0] == first->hash[0], "%s: parameters differ", what);
        saved_compare_state(first, other, what, false);
    }
    other->steps = saved_at + 2;
    if (saved_go(other, what))
        for (int r = 1; r < other->ranks; r++)
            CHECK_MSG(other->hash[r] == other->hash[0], "%s: rank %d has other parameters", what,
                      r);
    check_history(seed, words);
    snprintf(command, sizeof command, "rm -rf %s", folder);
    CHECK(system(command) == 0);
    munmap(whole, sizeof *whole);
    munmap(first, sizeof *first);
    munmap(second, sizeof *second);
    munmap(other, sizeof *other);
    return test_shared->failed_checks == before;
}

int main(int argc, char **argv)
{
    const seeds s = seeds_of(argc, argv, 25, 10);
    char *only[] = {argv[0], NULL};
    test_begin(1, only);
    return seeds_run(&s, NULL, 0, run_seed);
}
