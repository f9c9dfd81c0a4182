/* Spans: random programs of them against a naive reckoning, spans of the library, depth, ranks that are threads. */

#include "test.h"

#include "dtrain.h"

#include "world/world_internal.h"

#include "ranks.h"

/* ---- random programs of spans ------------------------------------------------------------------*/

typedef struct program {
    uint64_t seed, now;
    dtrain_world *world;
    uint64_t spent[DTRAIN_SPAN_KINDS]; /* as a naive reader of the program counts */
} program;

static uint32_t draw(program *p, uint32_t below)
{
    p->seed = p->seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)(p->seed >> 33) % below;
}

/* Let time pass in a span of a kind. */
static void pass_time(program *p, uint32_t kind)
{
    const uint64_t ns = draw(p, 1000);
    p->now += ns;
    p->spent[kind] += ns;
}

/* Open a span in one of `outer`, with spans inside of it; some are left open, and the mark closes them. */
static void run_span(program *p, uint32_t outer, uint32_t depth)
{
    uint32_t kind = draw(p, DTRAIN_SPAN_KINDS);
    const uint32_t mark = dtrain__span_begin_at(p->world, kind, "span", (int64_t)depth, p->now);
    CHECK(mark == depth);
    if (depth >= DTRAIN__SPAN_DEPTH ||
        (kind == DTRAIN_SPAN_COMM && outer == DTRAIN_SPAN_CHECKPOINT))
        kind = outer;
    pass_time(p, kind);
    for (uint32_t i = draw(p, 3); depth < 40 && i > 0; i--) {
        run_span(p, kind, depth + 1);
        pass_time(p, kind);
    }
    if (draw(p, 4) == 0) { /* an early return left one open */
        uint32_t inner = draw(p, DTRAIN_SPAN_KINDS);
        (void)dtrain__span_begin_at(p->world, inner, "lost", DTRAIN__UNNUMBERED, p->now);
        if (depth + 1 >= DTRAIN__SPAN_DEPTH ||
            (inner == DTRAIN_SPAN_COMM && kind == DTRAIN_SPAN_CHECKPOINT))
            inner = kind;
        pass_time(p, inner);
    }
    dtrain__span_end_at(p->world, mark, p->now);
    CHECK(p->world->timeline.depth == mark);
}

static int random_programs(dtrain_world *world, void *user)
{
    const uint64_t first = *(const uint64_t *)user;
    for (uint64_t i = 0; i < 300; i++) {
        program p;
        memset(&p, 0, sizeof p);
        p.seed = first + i + 1000 * (uint64_t)dtrain_world_rank(world);
        p.world = world;
        p.now = 1000;
        memset(&world->timeline, 0, sizeof world->timeline);
        world->timeline.since_ns = p.now;
        for (int j = 0; j < 20; j++) {
            run_span(&p, DTRAIN_SPAN_OTHER, 0);
            pass_time(&p, DTRAIN_SPAN_OTHER);
        }
        dtrain__span_end_at(world, 0, p.now);
        for (uint32_t kind = 0; kind < DTRAIN_SPAN_KINDS; kind++)
            CHECK_MSG(world->timeline.spent_ns[kind] == p.spent[kind],
                      "seed %llu, kind %u: %llu ns, not %llu", (unsigned long long)(first + i),
                      kind, (unsigned long long)world->timeline.spent_ns[kind],
                      (unsigned long long)p.spent[kind]);
    }
    return 0;
}

static void test_random_programs(void)
{
    uint64_t seed = (uint64_t)time(NULL);
    dtrain_launch_desc desc;
    for (uint32_t mode = 0; mode < 2; mode++) {
        memset(&desc, 0, sizeof desc);
        desc.rank_count = 3;
        desc.mode = mode;
        CHECK(dtrain_launch(&desc, random_programs, &seed, NULL) == DTRAIN_OK);
    }
}

/* ---- spans of a program and of the library -----------------------------------------------------*/

static double all_seconds(const dtrain_world *world)
{
    double sum = 0;
    for (int kind = 0; kind < DTRAIN_SPAN_KINDS; kind++)
        sum += dtrain_span_seconds(world, (dtrain_span_kind)kind);
    return sum;
}

/* Rank 1 comes 50 ms late: the others wait in COMM, and it does not. All kinds together are the time that passed. */
static int one_is_late(dtrain_world *world, void *user)
{
    const double start = dtrain_seconds(), before = all_seconds(world);
    (void)user;
    dtrain_span_begin(world, DTRAIN_SPAN_FORWARD, "own forward");
    if (dtrain_world_rank(world) == 1) ranks_sleep_us(50000);
    CHECK(dtrain_barrier(dtrain_world_comm(world)) == DTRAIN_OK);
    dtrain_span_end(world);
    const double waited = dtrain_span_seconds(world, DTRAIN_SPAN_COMM);
    const double forward = dtrain_span_seconds(world, DTRAIN_SPAN_FORWARD);
    const double all = all_seconds(world) - before, passed = dtrain_seconds() - start;
    if (dtrain_world_rank(world) == 1) CHECK_MSG(forward >= 0.05, "forward is %g s", forward);
    else CHECK_MSG(waited >= 0.04 && forward < 0.04, "waited %g s, forward %g s", waited, forward);
    CHECK_MSG(all <= passed && all > passed - 0.01, "%g s in kinds, %g s have passed", all, passed);
    CHECK(dtrain_span_seconds(NULL, DTRAIN_SPAN_COMM) == 0 &&
          dtrain_span_seconds(world, (dtrain_span_kind)99) == 0);
    dtrain_span_end(world); /* one too many */
    dtrain_span_begin(NULL, DTRAIN_SPAN_DATA, "nowhere");
    dtrain_span_end(NULL);
    CHECK(world->timeline.depth == 0);
    return 0;
}

static void test_late_rank(void)
{
    dtrain_launch_desc desc;
    for (uint32_t mode = 0; mode < 2; mode++) {
        memset(&desc, 0, sizeof desc);
        desc.rank_count = 3;
        desc.mode = mode;
        CHECK(dtrain_launch(&desc, one_is_late, NULL, NULL) == DTRAIN_OK);
    }
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    RUN(test_random_programs);
    RUN(test_late_rank);
    return test_summary();
}
