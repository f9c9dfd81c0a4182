/* test_transport.c: the engine of the communicators over a transport of 150 lines (toy_transport.h): every
 * call that test_comm.c makes gives the same bits, and disagreement, departure and silence end in the
 * same sentences as on the local communicator. A wait beside a program that computes sleeps longer and longer
 * while nothing moves, and briefly again when something does. */
#define main test_comm_main
#include "test_comm.c"
#undef main
#include "toy_transport.h"
#include "world/world_internal.h" /* for naps and circles, which need no separate transport */

static dtrain_comm_ops toy_ops;

static void toy_run(int ranks, dtrain_rank_fn rank_main, void *user)
{
    dtrain_launch_desc desc = ranks_desc(ranks, DTRAIN_LAUNCH_THREADS);
    desc.comm_ops = &toy_ops;
    CHECK_MSG(ranks_launch(&desc, rank_main, user, NULL) == DTRAIN_OK, "%d ranks: %s", ranks,
              dtrain_last_error());
}

static int crossed = 1;
static uint64_t seed = 11;

static void test_types(void)
{
    for (int n = 1; n <= 8; n++) toy_run(n, rank_every_type, NULL);
}
static void test_sizes(void)
{
    toy_run(3, rank_sizes_to_70, NULL);
    toy_run(4, rank_primes, NULL);
    toy_run(2, rank_large, NULL);
    toy_run(4, rank_random_calls, &seed);
}
static void test_many_at_once(void)
{
    toy_run(3, rank_async_many, NULL);
    toy_run(4, rank_async_mixed, NULL);
    toy_run(2, rank_async_at_once, NULL);
}
static void test_letters(void)
{
    toy_run(3, rank_ring, NULL);
    toy_run(4, rank_exchange, NULL);
    toy_run(4, rank_pair_beside, NULL);
}
static void test_groups(void)
{
    toy_run(5, rank_split, NULL);
    toy_run(8, rank_nested_split, NULL);
    toy_run(3, rank_two_comms, &crossed);
}

/* ---- failures: every rank returns the wanted code and sentence ---- */

typedef struct failure {
    const char *name, *words;
    dtrain_result code;
    int kind; /* of what rank 1 does: 0 another count, 1 leaves, 2 stays away, 3 sends too much */
} failure;

static int32_t ended;
static int rank_fails(dtrain_world *world, void *user)
{
    const failure *f = (const failure *)user;
    dtrain_comm *comm = dtrain_world_comm(world);
    const int rank = dtrain_world_rank(world);
    static float x[3][70000]; /* static: other ranks may still read it */
    size_t count = f->kind == 0 && rank == 1 ? 69999 : 70000;
    dtrain_result result = DTRAIN_OK;
    RANKS_TRY(dtrain_barrier(comm));
    if (rank == 1 && f->kind == 1) return 0;
    if (rank == 1 && f->kind == 2) return !ranks_await(&ended, 2);
    if (f->kind == 3 && rank == 1) result = dtrain_send(comm, x[1], 7, DTRAIN_DTYPE_F32, 0, NULL);
    else if (f->kind == 3 && rank == 0)
        result = dtrain_recv(comm, x[0], 6, DTRAIN_DTYPE_F32, 1, NULL);
    else
        result = dtrain_all_reduce(comm, x[rank], x[rank], count, DTRAIN_DTYPE_F32,
                                   DTRAIN_REDUCE_SUM, NULL);
    CHECK_MSG(result == f->code && strstr(dtrain_last_error(), f->words), "%s, rank %d: %s: %s",
              f->name, rank, dtrain_result_text(result), dtrain_last_error());
    CHECK(dtrain_barrier(comm) == f->code);
    ranks_count(&ended);
    return 0;
}
static void test_failures(void)
{
    static const failure failures[] = {
        /* beside rank 0 or rank 2, whichever hears of it first */
        {"mismatch", "rank 1 called all-reduce sum f32 count 69999", DTRAIN_ERROR_MISMATCH, 0},
        {"left", "rank 1 left after its collective #1 while rank", DTRAIN_ERROR_PEER, 1},
        {"silence", "rank 1 (its last was #1)", DTRAIN_ERROR_TIMEOUT, 2},
        {"message", "message differs: rank 1 sent f32 count 7, rank 0 receives f32 count 6",
         DTRAIN_ERROR_MISMATCH, 3}};
    for (size_t i = 0; i < sizeof failures / sizeof *failures; i++) {
        dtrain_launch_desc desc = ranks_desc(3, DTRAIN_LAUNCH_THREADS);
        failure f = failures[i];
        desc.comm_ops = &toy_ops;
        if (f.kind == 2) desc.timeout_ms = RANKS_SHORT_MS;
        ended = 0;
        CHECK_MSG(ranks_launch(&desc, rank_fails, &f, NULL) == DTRAIN_OK, "%s: %s", f.name,
                  dtrain_last_error());
    }
}

/* ---- naps ---- */

/* Every sleep of this process goes through here. A nap is at most an eighth of the time since something has moved, for
 * which the last nap before that move is early enough: so load, which makes that time longer, cannot break it. */
static struct {
    const dtrain_world *world; /* that naps are looked at of; NULL: none */
    uint64_t moves, since_ns, last_ns;
    int long_ones, too_long_ones;
} naps;

static void naps_begin(const dtrain_world *world)
{
    memset(&naps, 0, sizeof naps);
    naps.world = world;
    naps.moves = world->moves;
    naps.since_ns = naps.last_ns = dtrain__now_ns();
}

int nanosleep(const struct timespec *time, struct timespec *left)
{
    if (naps.world) {
        const uint64_t now = dtrain__now_ns(), ns = (uint64_t)time->tv_nsec;
        if (naps.world->moves != naps.moves) naps.since_ns = naps.last_ns;
        naps.moves = naps.world->moves;
        naps.last_ns = now;
        naps.long_ones += ns >= 500000;
        naps.too_long_ones += time->tv_sec > 0 || (ns > 10000 && ns > (now - naps.since_ns) / 8);
    }
    return clock_nanosleep(CLOCK_MONOTONIC, 0, time, left) ? -1 : 0;
}

enum { NAP_CHUNKS = 256, NAP_COUNT = NAP_CHUNKS * 32768 };

/* Rank 1 comes late, then the ranks hand each other chunks through the stages. Load can keep rank 0 from its naps:
 * then once more, at most twenty times. */
static int rank_naps(dtrain_world *world, void *user)
{
    dtrain_comm *comm = dtrain_world_comm(world);
    const int rank = dtrain_world_rank(world);
    float *data = (float *)calloc(NAP_COUNT, sizeof *data);
    int long_ones[2] = {0, 0};
    (void)user;
    if (!data) return 1;
    for (int i = 0; i < 20 && !long_ones[0]; i++) {
        RANKS_TRY(dtrain_barrier(comm));
        if (rank == 1) ranks_sleep_us(12000);
        world->naps = UINT32_MAX;     /* as after a yield that took long */
        world->oversubscribed = true; /* no spinning before a nap */
        naps_begin(world);
        RANKS_TRY(dtrain_all_reduce(comm, data, data, NAP_COUNT, DTRAIN_DTYPE_F32,
                                    DTRAIN_REDUCE_SUM, NULL));
        naps.world = NULL;
        CHECK_MSG(!naps.too_long_ones, "%d naps are too long", naps.too_long_ones);
        RANKS_TRY(
            dtrain_world_all_gather(world, &naps.long_ones, sizeof naps.long_ones, long_ones));
    }
    CHECK_MSG(long_ones[0] > 0, "no nap is long");
    free(data);
    return 0;
}
static void test_naps(void) { ranks_run(2, DTRAIN_LAUNCH_PROCESSES, rank_naps, NULL); }

/* A rank whose wait ends with an error can continue in other communicators: its wait is no longer shown, so that nobody
 * takes it for one of a circle. */
static int rank_gives_up(dtrain_world *world, void *user)
{
    const int rank = dtrain_world_rank(world);
    const uint64_t *shown = &world->control->long_waits[0].number;
    const double end = test_seconds() + RANKS_SOON;
    float x = 0;
    dtrain_comm *twin;
    (void)user;
    world->long_wait_ns = 0; /* each wait is shown at once */
    RANKS_TRY(dtrain_comm_split(dtrain_world_comm(world), 0, rank, &twin));
    while (rank && !dtrain__load(shown) && test_seconds() < end) ranks_sleep_us(100);
    if (rank) CHECK(dtrain__load(shown));
    const dtrain_result got =
        rank ? dtrain_broadcast(twin, &x, 1, DTRAIN_DTYPE_F32, 0, NULL) : dtrain_barrier(twin);
    CHECK_MSG(got == DTRAIN_ERROR_MISMATCH, "%s", dtrain_last_error());
    if (!rank) CHECK(!dtrain__load(shown));
    RANKS_TRY(dtrain_barrier(dtrain_world_comm(world)));
    dtrain_comm_destroy(twin);
    return 0;
}
static void test_gives_up(void) { ranks_run(2, DTRAIN_LAUNCH_PROCESSES, rank_gives_up, NULL); }

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    toy_ops = toy_comm_ops();
    for (uint32_t i = 0; i < 65536; i++) half_values[i] = slow_half_value(i);
    RUN(test_types);
    RUN(test_sizes);
    RUN(test_many_at_once);
    RUN(test_letters);
    RUN(test_groups);
    RUN(test_failures);
    RUN(test_naps);
    RUN(test_gives_up);
    return test_summary();
}
