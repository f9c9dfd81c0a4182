/* test_join.c: guests in programs that already run in parallel (src/launch/join.c). The host of these tests has
 * ranks that are processes or threads, and an all-gather over shared memory that blocks without a deadline. */
#include "test.h"

#include "dtrain.h"
#include "footprint.h"
#include "host.h"

enum { COUNT = 5000, WIDE = 96, TALL = 40, STEPS = 6 };

/* Join, sum over the members, and leave. Return 0, or 1 with the sentence in `why`. */
static int visit(host_group *group, int rank, char why[256])
{
    host_member member = host_member_of(group, rank);
    const dtrain_join_desc desc = host_desc(&member);
    dtrain_world *world = (dtrain_world *)&member; /* must be overwritten */
    dtrain_world_info info;
    int bad = 0;
    if (dtrain_world_join(&desc, &world) != DTRAIN_OK) {
        snprintf(why, 256, "%s", dtrain_last_error());
        return 1;
    }
    dtrain_world_query(world, &info);
    bad |= info.rank != rank || info.size != group->size || info.threads != 1;
    bad |= info.local_rank != rank || info.local_size != group->size || info.node_count != 1;
    float *data = (float *)malloc(COUNT * sizeof *data);
    for (size_t i = 0; i < COUNT; i++) data[i] = (float)rank + (float)(i % 7);
    bad |= dtrain_all_reduce(dtrain_world_comm(world), data, data, COUNT, DTRAIN_DTYPE_F32,
                             DTRAIN_REDUCE_SUM, NULL) != DTRAIN_OK;
    const float ranks = (float)(group->size * (group->size - 1) / 2);
    for (size_t i = 0; i < COUNT; i++)
        bad |= data[i] != ranks + (float)(i % 7) * (float)group->size;
    free(data);
    if (bad) snprintf(why, 256, "rank %d of %d: %s", rank, group->size, dtrain_last_error());
    if (dtrain_world_leave(world) != DTRAIN_OK) {
        snprintf(why, 256, "%s", dtrain_last_error());
        return 1;
    }
    return bad;
}

static int visits(int rank, void *user)
{
    host_group *group = (host_group *)user;
    char why[256] = "";
    for (int round = 0; round < 3; round++)
        if (visit(group, rank, why)) return !CHECK_MSG(0, "round %d: %s", round, why);
    return 0;
}

static void check_run(int count, bool threads, host_main run, void *user)
{
    int status[HOST_MOST];
    host_run(count, threads, run, user, status);
    for (int i = 0; i < count; i++)
        CHECK_MSG(status[i] == 0, "rank %d ended with %d", i, status[i]);
}

static void test_processes(void)
{
    for (int size = 1; size <= 8; size++) check_run(size, false, visits, host_group_new(size));
}
static void test_threads(void)
{
    for (int size = 1; size <= 8; size++) check_run(size, true, visits, host_group_new(size));
}

/* ---- What stays ---- */

static struct footprint before, after; /* too large for a stack */

static int visitor_leaves_nothing(int rank, void *user)
{
    host_group *group = (host_group *)user;
    char why[256] = "";
    const int rounds = test_full() ? 1000 : 100;
    visit(group, rank, why); /* what libc keeps after its first use */
    footprint_take(&before);
    for (int round = 0; round < rounds; round++)
        if (visit(group, rank, why)) return !CHECK_MSG(0, "round %d: %s", round, why);
    footprint_take(&after);
    CHECK_MSG(!footprint_differs(&before, &after, why, sizeof why), "rank %d: %s", rank, why);
    return 0;
}

static void test_nothing_left(void)
{
    check_run(3, false, visitor_leaves_nothing, host_group_new(3));
}

/* ---- Several worlds ---- */

typedef struct ensemble {
    host_group *all, *half[2];
} ensemble;

/* Each rank is in a world of all and in one of its half, calls them in turn, and leaves the larger one first. */
static int two_worlds(int rank, void *user)
{
    const ensemble *e = (const ensemble *)user;
    host_member in_all = host_member_of(e->all, rank),
                in_half = host_member_of(e->half[rank % 2], rank / 2);
    const dtrain_join_desc all_desc = host_desc(&in_all), half_desc = host_desc(&in_half);
    dtrain_world *all, *half;
    char why[256] = "";
    RANKS_TRY(dtrain_world_join(&all_desc, &all));
    RANKS_TRY(dtrain_world_join(&half_desc, &half));
    for (int i = 0; i < 20; i++) {
        int64_t a = rank, h = rank;
        RANKS_TRY(dtrain_all_reduce(dtrain_world_comm(half), &h, &h, 1, DTRAIN_DTYPE_I64,
                                    DTRAIN_REDUCE_SUM, NULL));
        RANKS_TRY(dtrain_all_reduce(dtrain_world_comm(all), &a, &a, 1, DTRAIN_DTYPE_I64,
                                    DTRAIN_REDUCE_SUM, NULL));
        CHECK_MSG(a == 6 && h == (rank % 2 ? 4 : 2), "sums %d and %d", (int)a, (int)h);
    }
    RANKS_TRY(dtrain_world_leave(all));
    int64_t h = 1;
    RANKS_TRY(dtrain_all_reduce(dtrain_world_comm(half), &h, &h, 1, DTRAIN_DTYPE_I64,
                                DTRAIN_REDUCE_SUM, NULL));
    CHECK(h == 2);
    CHECK(dtrain_world_rank(half) == rank / 2);
    char prefix[32]; /* a sentence names the rank in the world of the last call */
    snprintf(prefix, sizeof prefix, "rank %d: ", rank / 2);
    (void)dtrain_fail(DTRAIN_ERROR_DATA, "x");
    CHECK_MSG(strncmp(dtrain_last_error(), prefix, strlen(prefix)) == 0, "%s", dtrain_last_error());
    RANKS_TRY(dtrain_world_leave(half));
    CHECK_MSG(!visit(e->all, rank, why), "%s", why);
    return 0;
}

static void test_two_worlds(void)
{
    ensemble e = {host_group_new(4), {host_group_new(2), host_group_new(2)}};
    check_run(4, false, two_worlds, &e);
    check_run(4, true, two_worlds, &e);
}

/* Many worlds at once: their pages lie beside one another. */
static int many_worlds(int rank, void *user)
{
    enum { WORLDS = 12 };
    host_group *group = (host_group *)user;
    dtrain_world *worlds[WORLDS];
    for (int i = 0; i < WORLDS; i++) {
        host_member member = host_member_of(group, rank);
        const dtrain_join_desc desc = host_desc(&member);
        RANKS_TRY(dtrain_world_join(&desc, &worlds[i]));
    }
    for (int i = 0; i < WORLDS; i++) {
        int64_t sum = i;
        RANKS_TRY(dtrain_all_reduce(dtrain_world_comm(worlds[i]), &sum, &sum, 1, DTRAIN_DTYPE_I64,
                                    DTRAIN_REDUCE_SUM, NULL));
        CHECK_MSG(sum == 3 * i, "world %d: %d", i, (int)sum);
    }
    for (int i = 0; i < WORLDS; i++) RANKS_TRY(dtrain_world_leave(worlds[(i * 5) % WORLDS]));
    return 0;
}
static void test_many_worlds(void) { check_run(3, false, many_worlds, host_group_new(3)); }

/* Ranks 0 and 1 of 3 are members; rank 2 computes and is never waited for. */
static int part(int rank, void *user)
{
    char why[256] = "";
    if (rank == 2) return 0;
    CHECK_MSG(!visit((host_group *)user, rank, why), "%s", why);
    return 0;
}
static void test_part_of_the_ranks(void) { check_run(3, false, part, host_group_new(2)); }

/* ---- The bits of dtrain_launch ---- */

typedef struct training {
    uint32_t kind;
    host_group *group; /* NULL: launched */
    uint64_t *bits;    /* of rank 0, in shared memory */
} training;

static int train(dtrain_world *world, const training *run)
{
    const int rank = dtrain_world_rank(world);
    const bool shards = run->kind == DTRAIN_STRATEGY_FULL_SHARD;
    float *memory[4];
    dtrain_param params[2];
    dtrain_strategy *strategy;
    dtrain_optimizer *optimizer;
    dtrain_strategy_desc desc;
    dtrain_optimizer_desc adam = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_ADAMW);
    const size_t counts[2] = {(size_t)WIDE * TALL, WIDE};
    uint64_t bits = 14695981039346656037u;
    memset(params, 0, sizeof params);
    memset(&desc, 0, sizeof desc);
    desc.kind = run->kind;
    for (size_t i = 0; i < 2; i++) { /* the arrays are the host's, but for shards */
        memory[2 * i] = (float *)calloc(counts[i], sizeof(float));
        memory[2 * i + 1] = (float *)calloc(counts[i], sizeof(float));
        params[i].name = i ? "bias" : "weight";
        params[i].unit = (uint32_t)i;
        params[i].shape[0] = WIDE;
        if (!i) params[i].shape[1] = TALL;
        params[i].init = DTRAIN_INIT_UNIFORM;
        params[i].init_scale = 0.5f;
        if (shards) continue;
        params[i].value = memory[2 * i];
        params[i].grad = memory[2 * i + 1];
        for (size_t k = 0; k < counts[i]; k++)
            memory[2 * i][k] = (float)((k * 37) % 101) * (rank ? 9.0f : 0.01f); /* rank 0's count */
    }
    RANKS_TRY(dtrain_strategy_create(world, params, 2, &desc, &strategy));
    RANKS_TRY(dtrain_optimizer_create(world, strategy, &adam, &optimizer));
    for (int step = 0; step < STEPS; step++) {
        for (int i = 1; i >= 0; i--) {
            RANKS_TRY(dtrain_strategy_gather(strategy, (uint32_t)i, DTRAIN_PASS_BACKWARD));
            const float *value = (const float *)params[i].value;
            float *grad = (float *)params[i].grad;
            for (size_t k = 0; k < counts[i]; k++)
                grad[k] = value[k] * 0.3f + (float)((k + (size_t)rank * 13 + (size_t)step) % 17);
            RANKS_TRY(dtrain_strategy_ready(strategy, (size_t)i));
            RANKS_TRY(dtrain_strategy_release(strategy, (uint32_t)i));
        }
        RANKS_TRY(dtrain_strategy_finish(strategy));
        RANKS_TRY(dtrain_optimizer_step(optimizer, 0.01f, 1));
    }
    for (size_t i = 0; i < 2; i++) {
        RANKS_TRY(dtrain_strategy_gather(strategy, (uint32_t)i, DTRAIN_PASS_FORWARD));
        for (size_t k = 0; k < counts[i] * sizeof(float); k++)
            bits = (bits ^ ((const unsigned char *)params[i].value)[k]) * 1099511628211u;
        RANKS_TRY(dtrain_strategy_release(strategy, (uint32_t)i));
    }
    if (rank == 0) *run->bits = bits;
    dtrain_optimizer_destroy(optimizer);
    dtrain_strategy_destroy(strategy);
    for (int i = 0; i < 4; i++) free(memory[i]);
    return 0;
}

static int train_launched(dtrain_world *world, void *user)
{
    return train(world, (const training *)user);
}
static int train_joined(int rank, void *user)
{
    const training *run = (const training *)user;
    host_member member = host_member_of(run->group, rank);
    const dtrain_join_desc desc = host_desc(&member);
    dtrain_world *world;
    RANKS_TRY(dtrain_world_join(&desc, &world));
    const int code = train(world, run);
    RANKS_TRY(dtrain_world_leave(world));
    return code;
}

static void test_bits_of_launch(void)
{
    static const uint32_t kinds[] = {DTRAIN_STRATEGY_DDP, DTRAIN_STRATEGY_ZERO1,
                                     DTRAIN_STRATEGY_FULL_SHARD};
    uint64_t *bits = (uint64_t *)ranks_shared(2 * sizeof *bits);
    for (size_t k = 0; k < 3; k++)
        for (int size = 1; size <= 4; size++) {
            training launched = {kinds[k], NULL, &bits[0]},
                     joined = {kinds[k], host_group_new(size), &bits[1]};
            bits[0] = bits[1] = 0;
            ranks_run(size, DTRAIN_LAUNCH_PROCESSES, train_launched, &launched);
            check_run(size, size % 2 == 0, train_joined, &joined);
            CHECK_MSG(bits[0] && bits[0] == bits[1], "kind %d, %d ranks: other bits", (int)kinds[k],
                      size);
        }
}

/* ---- Joins that fail ---- */

typedef struct refusal {
    host_group *group;
    int wrong;      /* the member that is set differently; -1: all */
    int what;       /* ... and how */
    const char *in; /* the others' sentence has it, and its own */
} refusal;

enum {
    BAD_SIZE,
    BAD_RANK,
    BAD_THREADS,
    BAD_MEMORY,
    BAD_PLAN,
    BAD_DIRECTORY,
    BAD_GATHER,
    BAD_TABLE
};

static int refused(int rank, void *user)
{
    const refusal *r = (const refusal *)user;
    host_member member = host_member_of(r->group, rank);
    dtrain_join_desc desc = host_desc(&member);
    dtrain_world *world = (dtrain_world *)&member;
    dtrain_comm_ops table;
    const dtrain_comm_ops *local;
    char text[300];
    if (rank == r->wrong || r->wrong < 0) {
        if (r->what == BAD_SIZE) desc.size++;
        if (r->what == BAD_RANK) desc.rank = rank ? rank - 1 : 1;
        if (r->what == BAD_THREADS) desc.threads = 5000;
        if (r->what == BAD_MEMORY) desc.options.reserve_bytes = (size_t)1 << 62;
        if (r->what == BAD_PLAN) (void)dtrain_device_ops_by_name("plan", &desc.device_ops);
        if (r->what == BAD_DIRECTORY) desc.options.trace.path = "/nonexistent/folder/trace.json";
        if (r->what == BAD_GATHER) member.group->fail_at = 4;
        if (r->what == BAD_TABLE) {
            (void)dtrain_comm_ops_by_name("local", &local);
            table = *local;
            table.abi++;
            desc.comm_ops = &table;
        }
    }
    host_barrier(r->group); /* fail_at is set */
    const dtrain_result result = dtrain_world_join(&desc, &world);
    snprintf(text, sizeof text, "%s", dtrain_last_error());
    CHECK_MSG(result != DTRAIN_OK && !world && strstr(text, r->in) &&
                  strstr(text, "dtrain_world_join: "),
              "%d: rank %d: %s; expected \"%s\"", r->what, rank, text, r->in);
    if (result == DTRAIN_OK) (void)dtrain_world_leave(world);
    return 0;
}

static void test_refusals(void)
{
    static const struct {
        int what, wrong;
        const char *in;
    } cases[] = {{BAD_SIZE, 1, "in its desc"},
                 {BAD_RANK, 2, "is rank 1"},
                 {BAD_THREADS, 0, "the number of threads is 5000; expected 0 to 4096"},
                 {BAD_THREADS, 2, "the number of threads is 5000; expected 0 to 4096"},
                 {BAD_MEMORY, 0, "address space could not be reserved"},
                 {BAD_MEMORY, 0, "address space could not be reserved"},
                 {BAD_PLAN, 1, "the plan device runs no kernel"},
                 {BAD_DIRECTORY, 1, "/nonexistent/folder"},
                 {BAD_TABLE, 2, "communicator table has ABI"},
                 {BAD_GATHER, -1, "the host's all-gather returned 5"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        refusal r = {host_group_new(3), cases[i].wrong, cases[i].what, cases[i].in};
        check_run(3, i % 2 == 0, refused, &r);
    }
}

static void test_arguments(void)
{
    host_group *group = host_group_new(1);
    host_member member = host_member_of(group, 0);
    dtrain_join_desc desc = host_desc(&member);
    dtrain_world *world;
    CHECK(dtrain_world_join(&desc, NULL) == DTRAIN_ERROR_ARGUMENT);
    CHECK(dtrain_world_join(NULL, &world) == DTRAIN_ERROR_ARGUMENT && !world);
    desc.size = DTRAIN_MAX_RANKS + 1;
    CHECK(dtrain_world_join(&desc, &world) == DTRAIN_ERROR_ARGUMENT && !world);
    CHECK(strstr(dtrain_last_error(), "size is 257"));
    desc.size = 1;
    desc.rank = -1;
    CHECK(dtrain_world_join(&desc, &world) == DTRAIN_ERROR_ARGUMENT && !world);
    desc.rank = 0;
    desc.all_gather = NULL;
    CHECK(dtrain_world_join(&desc, &world) == DTRAIN_ERROR_ARGUMENT && !world);
    CHECK(dtrain_world_leave(NULL) == DTRAIN_OK);
}

static int leaves_a_launch(dtrain_world *world, void *user)
{
    (void)user;
    CHECK(dtrain_world_leave(world) == DTRAIN_ERROR_USAGE);
    CHECK(strstr(dtrain_last_error(), "dtrain_launch ends this world"));
    return dtrain_barrier(dtrain_world_comm(world)) != DTRAIN_OK;
}
static void test_launched_worlds_stay(void)
{
    ranks_run(2, DTRAIN_LAUNCH_PROCESSES, leaves_a_launch, NULL);
}

/* The allocator fails at call n of one member, for every n: nobody hangs, all have a sentence, nothing is left. */
typedef struct failing {
    host_group *group;
    long *joined; /* in shared memory: calls of a join in which none fails */
} failing;

static int allocator_fails(int rank, void *user)
{
    const failing *f = (const failing *)user;
    counted_memory memory;
    for (long n = 0; n == 0 || n <= *f->joined; n++) {
        host_member member = host_member_of(f->group, rank);
        dtrain_join_desc desc = host_desc(&member);
        dtrain_world *world;
        memset(&memory, 0, sizeof memory);
        memory.fail_at = rank == n % 2 ? (n + 1) / 2 : 0;
        desc.options.allocator = counted_allocator(&memory);
        const dtrain_result result = dtrain_world_join(&desc, &world);
        if (n == 0) {
            if (rank == 0) *f->joined = 2 * memory.calls;
            RANKS_TRY(result);
        } else {
            CHECK_MSG(result == DTRAIN_ERROR_MEMORY || result == DTRAIN_ERROR_PEER,
                      "call %ld: rank %d: %s", n, rank,
                      result == DTRAIN_OK ? "joined" : dtrain_last_error());
            CHECK(!world);
        }
        RANKS_TRY(dtrain_world_leave(world));
        CHECK_MSG(memory.live == 0 && memory.wrong == 0, "call %ld: %ld blocks left, %ld wrong", n,
                  memory.live, memory.wrong);
        host_barrier(f->group);
    }
    return 0;
}

static void test_failing_allocator(void)
{
    failing f = {host_group_new(2), (long *)ranks_shared(sizeof(long))};
    check_run(2, false, allocator_fails, &f);
    CHECK(*f.joined > 4);
}

/* ---- Members that end ---- */

typedef struct ending {
    host_group *group, *rest;
    int how;
} ending;

enum { KILLED, EXITED, PARTED, STOPPED_IN_JOIN };

/* Rank 1 ends. The others hear of it within two seconds, and go on in a world without it. */
static int member_ends(int rank, void *user)
{
    const ending *e = (const ending *)user;
    host_member member = host_member_of(e->group, rank);
    dtrain_join_desc desc = host_desc(&member);
    dtrain_world *world;
    float x[3000] = {0};
    char why[300] = "";
    RANKS_TRY(dtrain_world_join(&desc, &world));
    RANKS_TRY(dtrain_barrier(dtrain_world_comm(world)));
    const double begin = test_seconds();
    if (rank == 1 && e->how == KILLED) raise(SIGKILL);
    if (rank == 1 && e->how == EXITED) _exit(0);
    dtrain_result result = DTRAIN_OK;
    if (rank != 1 || e->how != PARTED)
        result = dtrain_all_reduce(dtrain_world_comm(world), x, x, 3000, DTRAIN_DTYPE_F32,
                                   DTRAIN_REDUCE_SUM, NULL);
    snprintf(why, sizeof why, "%s", dtrain_last_error());
    if (rank == 1) {
        dtrain_world_leave(world);
        return 0;
    }
    const double seconds = test_seconds() - begin;
    CHECK_MSG(result == DTRAIN_ERROR_PEER || (e->how == PARTED && result != DTRAIN_OK),
              "how %d, rank %d: %s", e->how, rank, why);
    CHECK_MSG(strstr(why, "rank 1") && (RANKS_SANITIZED || seconds < 2),
              "how %d, rank %d, %.1f s: %s", e->how, rank, seconds, why);
    if (e->how == PARTED) CHECK(strstr(why, "rank 1 left after its collective #1 while rank"));
    else CHECK(dtrain_world_poll(world) == DTRAIN_ERROR_PEER);
    CHECK((dtrain_world_leave(world) == DTRAIN_OK) == (e->how == PARTED));
    CHECK_MSG(!visit(e->rest, rank / 2, why), "%s", why);
    return 0;
}

static void test_member_ends(void)
{
    int status[3];
    for (int how = KILLED; how <= PARTED; how++) {
        ending e = {host_group_new(3), host_group_new(2), how};
        host_run(3, false, member_ends, &e, status);
        CHECK_MSG(!status[0] && !status[2] && status[1] == (how == KILLED ? 137 : 0),
                  "how %d: %d %d %d", how, status[0], status[1], status[2]);
    }
}

/* A member that computes hears of the end of another by polling. */
static int polls(int rank, void *user)
{
    host_member member = host_member_of((host_group *)user, rank);
    dtrain_join_desc desc = host_desc(&member);
    dtrain_world *world;
    RANKS_TRY(dtrain_world_join(&desc, &world));
    if (rank == 1) raise(SIGKILL);
    const double end = test_seconds() + (RANKS_SANITIZED ? 20 : 2);
    dtrain_result result = DTRAIN_OK;
    while (result == DTRAIN_OK && test_seconds() < end) {
        result = dtrain_world_poll(world);
        ranks_sleep_us(1000);
    }
    CHECK_MSG(result == DTRAIN_ERROR_PEER && strstr(dtrain_last_error(), "rank 1 is gone"), "%s",
              dtrain_last_error());
    CHECK(dtrain_world_leave(world) == DTRAIN_ERROR_PEER);
    return 0;
}
static void test_polls(void)
{
    int status[2];
    host_run(2, false, polls, host_group_new(2), status);
    CHECK(status[0] == 0 && status[1] == 137);
}

/* A child that a member forks has the member's pointers and is none. */
static int forks(int rank, void *user)
{
    host_member member = host_member_of((host_group *)user, rank);
    const dtrain_join_desc desc = host_desc(&member);
    dtrain_world *world;
    int status;
    RANKS_TRY(dtrain_world_join(&desc, &world));
    const pid_t child = fork();
    if (child == 0)
        _exit(dtrain_barrier(dtrain_world_comm(world)) == DTRAIN_ERROR_USAGE &&
                      dtrain_world_leave(world) == DTRAIN_ERROR_USAGE
                  ? 0
                  : 1);
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    RANKS_TRY(dtrain_barrier(dtrain_world_comm(world)));
    RANKS_TRY(dtrain_world_leave(world));
    return 0;
}
static void test_forked_child(void) { check_run(2, false, forks, host_group_new(2)); }

/* ---- What is said ---- */

static void count_lines(void *user, dtrain_log_level level, int rank, const char *text)
{
    (void)level;
    (void)rank;
    (void)text;
    ++*(int *)user;
}

static int speaks(int rank, void *user)
{
    host_group *group = (host_group *)user;
    int lines = 0;
    for (int log = 0; log < 2; log++) {
        FILE *caught = tmpfile();
        const int kept = dup(2);
        char text[64] = "";
        host_member member = host_member_of(group, rank);
        dtrain_join_desc desc = host_desc(&member);
        dtrain_world *world;
        desc.options.log = log ? count_lines : NULL;
        desc.options.log_user = &lines;
        fflush(stderr);
        dup2(fileno(caught), 2);
        const dtrain_result result = dtrain_world_join(&desc, &world);
        dtrain_log(world, DTRAIN_LOG_ERROR, "said");
        dtrain_comm_destroy(dtrain_world_comm(world)); /* an error in the log */
        const dtrain_result left = dtrain_world_leave(world);
        dup2(kept, 2);
        close(kept);
        rewind(caught);
        CHECK(result == DTRAIN_OK && left == DTRAIN_OK);
        CHECK_MSG(!fgets(text, sizeof text, caught), "on stderr: %s", text);
        fclose(caught);
        CHECK(log ? lines >= 2 : lines == 0);
    }
    return 0;
}
static void test_silence(void) { check_run(2, false, speaks, host_group_new(2)); }

/* ---- Several hosts ---- */

/* Members with different host names count as members of different hosts: without MPI or NCCL no communicator crosses
 * them, and all are told so. */
static int on_its_host(int rank, void *user)
{
    host_member member = host_member_of((host_group *)user, rank);
    const dtrain_join_desc desc = host_desc(&member);
    dtrain_world *world = (dtrain_world *)&member;
    char name[32];
    snprintf(name, sizeof name, "dtrain-host-%d", rank / 2);
    if (unshare(CLONE_NEWUTS) != 0 || sethostname(name, strlen(name)) != 0) return 77;
    const dtrain_result result = dtrain_world_join(&desc, &world);
    CHECK_MSG(result == DTRAIN_ERROR_UNSUPPORTED && !world &&
                  strstr(dtrain_last_error(), "4 ranks on 2 hosts share no memory") &&
                  strstr(dtrain_last_error(), "dtrain_world_join_mpi"),
              "rank %d: %s", rank, dtrain_last_error());
    return 0;
}

static void test_several_hosts(void)
{
    int status[4];
    host_run(4, false, on_its_host, host_group_new(4), status);
    if (status[0] == 77) {
        test_cannot("a host name of its own needs root");
        return;
    }
    for (int i = 0; i < 4; i++) CHECK_MSG(status[i] == 0, "rank %d ended with %d", i, status[i]);
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    RUN(test_processes);
    RUN(test_threads);
    RUN(test_nothing_left);
    RUN(test_two_worlds);
    RUN(test_many_worlds);
    RUN(test_part_of_the_ranks);
    RUN(test_bits_of_launch);
    RUN(test_refusals);
    RUN(test_arguments);
    RUN(test_launched_worlds_stay);
    RUN(test_failing_allocator);
    RUN(test_member_ends);
    RUN(test_polls);
    RUN(test_forked_child);
    RUN(test_silence);
    RUN(test_several_hosts);
    return test_summary();
}
