/* test_checkpoints.c: random checkpoints: a run under any strategy, precision, compression and number of ranks is saved
 * and goes on, as it was or under any other.
 *
 * A seed draws two configurations. The first trains, saves and goes on; a second run of it that loads must come to the
 * same bits in every record and all of its state. The other configuration loads the same checkpoint: values, moments
 * and scalars must be those that were saved, whoever holds them now; what it then trains must agree on all ranks. An
 * oracle without files compares: images of the state, copied piece by piece.
 *
 *   build/tests/test_checkpoints [--seed N] [--count N] [--seconds N] */
#include "test.h"
#include "dtrain.h"
#include "ranks.h"
#include "saved_run.h"
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
    r->checkpoint_every = pick(d, 3) == 0;
    r->sgd = pick(d, 3) == 0;
    r->momentum = pick(d, 2) ? 0.9f : 0;
    r->dropout = pick(d, 2) ? 0.1f : 0;
    r->background = pick(d, 2);
    r->keep.file_bytes = pick(d, 2) ? 4096 : 0;
    if (pick(d, 4) == 0) s->reduce_dtype = DTRAIN_DTYPE_BF16;
    if (pick(d, 4) == 0 && s->kind >= DTRAIN_STRATEGY_FULL_SHARD)
        s->param_dtype = DTRAIN_DTYPE_BF16;
    if (pick(d, 4) == 0 && s->kind != DTRAIN_STRATEGY_DDP) s->whole_below = 50;
    if (pick(d, 4) == 0) s->keep_after_forward = s->kind >= DTRAIN_STRATEGY_FULL_SHARD;
    s->bucket_bytes = 400 + 400 * pick(d, 8);
    if (pick(d, 4) == 0 && r->ranks % 2 == 0 && s->kind != DTRAIN_STRATEGY_ZERO3 &&
        s->kind != DTRAIN_STRATEGY_HYBRID_SHARD)
        s->hierarchical = true, s->node_size = 2;
    if (s->kind == DTRAIN_STRATEGY_DDP && r->tape_flags != DTRAIN_TAPE_F16 && pick(d, 2)) {
        r->compression.kind = s->hierarchical ? (uint32_t)DTRAIN_COMPRESSION_TOPK : 1 + pick(d, 2);
        r->compression.sparse_exchange = pick(d, 2);
        r->compression.topk_ratio = 0.02f * (float)(1 + pick(d, 5));
        r->compression.topk_momentum = pick(d, 2) ? 0.5f : 0;
        r->compression.powersgd_rank = 1 + pick(d, 2);
        r->compression.no_error_feedback = pick(d, 5) == 0;
        r->compression.dense_steps = 1 + pick(d, 3);
        r->compression.warmup_steps = pick(d, 3);
        r->compression.dense_below = 1;
        if (r->compression.no_error_feedback) r->compression.topk_momentum = 0;
        if (r->compression.kind == DTRAIN_COMPRESSION_POWERSGD)
            s->reduce_dtype = 0, r->compression.sparse_exchange = 0,
            r->compression.topk_momentum = 0, r->compression.warmup_steps = 0,
            r->compression.topk_ratio = 0;
        else r->compression.powersgd_rank = 0;
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
