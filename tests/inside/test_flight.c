/* test_flight.c: the flight record. Ranks hang, stop, die, disagree; every other rank leaves a file that can be
 * read, and build/flight, which is part of this program, says who it was and in which call. */
#define DTRAIN__IMPLEMENTED /* by the objects of src/ */
#include "comm/comm_internal.h"
#include "comm/engine_internal.h"
#include "world/timeline_internal.h"
#include "core/json_internal.h"

#define main flight_main
#include "../../tools/flight/flight.c"
#undef main

#include "test.h"
#include "ranks.h"
#include "names.h"

enum { PROCESSES = DTRAIN_LAUNCH_PROCESSES, THREADS = DTRAIN_LAUNCH_THREADS, BEFORE = 5 };

typedef struct plan {
    int mode, ranks, culprit;
    uint32_t timeout_ms;
    void (*act)(dtrain_world *world,
                struct plan *plan); /* the culprit's, after BEFORE collectives */
    int (*others)(dtrain_world *world, struct plan *plan); /* NULL: an all-reduce of 100 */
    char directory[64];
    const char *asked; /* what the desc says; NULL: directory */
    bool catches;
    uint32_t restarts;
    int32_t *codes; /* (ranks) of the call that failed, shared */
} plan;

static plan new_plan(int mode, int ranks, int culprit, void (*act)(dtrain_world *, plan *))
{
    plan p;
    memset(&p, 0, sizeof p);
    p.mode = mode;
    p.ranks = ranks;
    p.culprit = culprit;
    p.timeout_ms = TEST_RACES ? RANKS_SHORT_MS : 1000;
    p.act = act;
    p.codes = (int32_t *)ranks_shared((size_t)ranks * sizeof(int32_t));
    snprintf(p.directory, sizeof p.directory, "/tmp/dtrain_flight_XXXXXX");
    CHECK(mkdtemp(p.directory) != NULL);
    return p;
}
static bool has_file(const plan *p, int rank)
{
    char path[128];
    snprintf(path, sizeof path, "%s/flight-%d.json", p->directory, rank);
    return access(path, R_OK) == 0;
}
static void remove_directory(const plan *p)
{
    char command[128];
    snprintf(command, sizeof command, "rm -rf %s", p->directory);
    CHECK(system(command) == 0);
}

static dtrain_result all_reduce(dtrain_world *world, size_t count)
{
    float *x = (float *)calloc(count, sizeof(float));
    const dtrain_result result = dtrain_all_reduce(dtrain_world_comm(world), x, x, count,
                                                   DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, NULL);
    free(x);
    return result;
}

static int rank_of_a_plan(dtrain_world *world, void *user)
{
    plan *p = (plan *)user;
    const int rank = dtrain_world_rank(world);
    for (int i = 0; i < BEFORE; i++)
        if (all_reduce(world, 4) != DTRAIN_OK) return 1;
    if (rank == p->culprit) p->act(world, p);
    const int result = p->others ? p->others(world, p) : (int)all_reduce(world, 100);
    __atomic_store_n(&p->codes[rank], (int32_t)result, __ATOMIC_RELEASE);
    return result == DTRAIN_OK ? 0 : 1;
}

/* Wait until another rank has called collective #`sequence`. */
static void await_call(dtrain_comm *comm, uint64_t sequence, int rank)
{
    const dtrain_transport_ops *transport = comm->ops->transport;
    for (int i = 0; i < 10000 && !transport->heard(comm, sequence, rank); i++) ranks_sleep_us(1000);
}

static dtrain_result run_plan(plan *p)
{
    dtrain_launch_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.rank_count = (uint32_t)p->ranks;
    desc.mode = (uint32_t)p->mode;
    desc.timeout_ms = p->timeout_ms;
    desc.grace_ms = RANKS_SHORT_MS; /* the others write their files meanwhile */
    desc.threads_per_rank = 1;
    desc.restarts = p->restarts;
    desc.backoff_ms = 1;
    desc.options.log_level = DTRAIN_LOG_WARNING;
    desc.catch_signals = p->catches;
    desc.options.flight_directory = p->asked ? p->asked : p->directory;
    return dtrain_launch(&desc, rank_of_a_plan, p, NULL);
}

/* Run the tool in a process of its own; its exit status, and what it prints. */
static int run_tool(const char *directory, char *text, size_t room)
{
    char path[] = "/tmp/dtrain_flight_out_XXXXXX", name[] = "flight";
    char *arguments[3];
    int status = 0;
    const int file = mkstemp(path);
    CHECK(file >= 0);
    fflush(NULL);
    arguments[0] = name;
    arguments[1] = (char *)(uintptr_t)directory;
    arguments[2] = NULL;
    const pid_t pid = fork();
    if (pid == 0) {
        dup2(file, 1);
        const int code = flight_main(2, arguments);
        fflush(NULL);
        _exit(code);
    }
    CHECK(waitpid(pid, &status, 0) == pid);
    const ssize_t bytes = pread(file, text, room - 1, 0);
    text[bytes > 0 ? bytes : 0] = 0;
    close(file);
    unlink(path);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/* python3 reads the files as well; true when there is none. */
static bool python_reads(const char *directory)
{
    char command[300];
    if (system("command -v python3 >/dev/null 2>&1") != 0) return true;
    snprintf(command, sizeof command,
             "python3 -c 'import glob,json; files=glob.glob(\"%s/flight-*.json\"); assert files; "
             "[json.load(open(f)) for f in files]'",
             directory);
    return system(command) == 0;
}

/* Run a plan that fails; every rank but `silent` leaves a file, and the tool's text has both parts. */
static void expect(plan p, int silent, const char *part, const char *more)
{
    char text[8192];
    CHECK(run_plan(&p) == DTRAIN_ERROR_RANK_FAILED);
    for (int i = 0; i < p.ranks; i++) CHECK_MSG(has_file(&p, i) == (i != silent), "rank %d", i);
    CHECK(run_tool(p.directory, text, sizeof text) == 0);
    CHECK_MSG(strstr(text, part) != NULL, "expected \"%s\" in:\n%s", part, text);
    CHECK_MSG(strstr(text, more) != NULL, "expected \"%s\" in:\n%s", more, text);
    if (getenv("FLIGHT_SHOW")) printf("%s\n", text);
    CHECK(python_reads(p.directory));
    remove_directory(&p);
}

/* ---- hanging, stopping, dying ---- */

/* A rank that hangs, for the others. It ends when they have failed and written their files. */
static void act_loop(dtrain_world *world, plan *p)
{
    for (int r = 0; r < p->ranks; r++)
        while (r != p->culprit &&
               !(__atomic_load_n(&p->codes[r], __ATOMIC_ACQUIRE) && has_file(p, r)))
            ranks_sleep_us(1000);
    (void)world;
    raise(SIGKILL);
}
static void act_stop(dtrain_world *world, plan *p)
{
    (void)world;
    (void)p;
    raise(SIGSTOP);
}
static void act_die(dtrain_world *world, plan *p)
{
    (void)world;
    (void)p;
    raise(SIGKILL);
}
/* Come when all others have given up. */
static void act_late(dtrain_world *world, plan *p)
{
    (void)world;
    for (int r = 0; r < p->ranks; r++)
        for (int i = 0;
             i < 10000 && r != p->culprit && !__atomic_load_n(&p->codes[r], __ATOMIC_ACQUIRE); i++)
            ranks_sleep_us(1000);
}
static void test_hang(void)
{
    expect(new_plan(PROCESSES, 4, 2, act_loop), 2,
           "rank 2 is behind: it has not called #6 all-reduce sum f32 count 100, where ranks 0, 1 "
           "and 3 wait; its last call was #5 all-reduce sum f32 count 4; outside of dtrain, silent "
           "for ",
           "2     called #5 all-reduce sum f32 count 4");
}
static void test_stopped_outside(void)
{
    expect(new_plan(PROCESSES, 3, 1, act_stop), 1,
           "rank 1 is behind: it has not called #6 all-reduce", "outside of dtrain, silent for");
}
static void test_death(void)
{
    expect(new_plan(PROCESSES, 4, 1, act_die), 1,
           "rank 1 was killed by signal 9 (SIGKILL; it may have run out of memory); its last call "
           "was #5 all-reduce",
           "0     #5 all-reduce sum f32 count 4                  #6 all-reduce sum f32 count 100");
}
/* It comes when the others have given up, fails at once and leaves a file, too: what it called is no excuse. */
static int large(dtrain_world *world, plan *p)
{
    (void)p;
    return (int)all_reduce(world, 100000);
}
static void test_late(void)
{
    plan p = new_plan(THREADS, 3, 2, act_late);
    p.others = large;
    expect(p, -1,
           "rank 2 is behind: it has not called #6 all-reduce sum f32 count 100000, where ranks 0 "
           "and 1 wait",
           "2     #5 all-reduce sum f32 count 4                  no call");
    p = new_plan(THREADS, 3, 2, act_late); /* a small one it finishes alone, and fails nowhere */
    expect(p, 2,
           "rank 2 is behind: it has not called #6 all-reduce sum f32 count 100, where ranks 0 and "
           "1 wait",
           "");
}

static bool has_stopped(pid_t pid)
{
    char path[40], state = 0;
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    FILE *file = fopen(path, "r");
    if (file) CHECK(fscanf(file, "%*d %*s %c", &state) == 1);
    if (file) fclose(file);
    return state == 'T';
}
/* Stopped in the middle of a long all-reduce that it has shown: it waits for rank 2, which comes after that. */
static int long_reduce(dtrain_world *world, plan *p)
{
    int32_t *stopping = &p->codes[p->culprit]; /* its process, until it has a code */
    if (dtrain_world_rank(world) == p->culprit)
        __atomic_store_n(stopping, (int32_t)getpid(), __ATOMIC_RELEASE);
    else if (dtrain_world_rank(world) == 2) {
        await_call(dtrain_world_comm(world), BEFORE + 1, p->culprit);
        const pid_t pid = __atomic_load_n(stopping, __ATOMIC_ACQUIRE);
        CHECK(pid > 0 && kill(pid, SIGSTOP) == 0);
        while (pid > 0 && !has_stopped(pid)) ranks_sleep_us(5000);
    }
    return (int)all_reduce(world, 100000);
}
static void act_nothing(dtrain_world *world, plan *p)
{
    (void)world;
    (void)p;
}
static void test_stopped_inside(void)
{
    plan p = new_plan(PROCESSES, 3, 1, act_nothing);
    p.others = long_reduce;
    p.timeout_ms = 1500;
    expect(p, 1, "rank 1 is stuck in #6 all-reduce sum f32 count 100000, where ranks 0 and 2 wait",
           "inside of a call of dtrain, silent for");
}

/* ---- disagreeing ---- */

static int one_barrier(dtrain_world *world, plan *p)
{
    if (dtrain_world_rank(world) == p->culprit)
        return (int)dtrain_barrier(dtrain_world_comm(world));
    return (int)all_reduce(world, 100);
}
static int one_count(dtrain_world *world, plan *p)
{
    return (int)all_reduce(world, dtrain_world_rank(world) == p->culprit ? 101 : 100);
}
static void test_other_collective(void)
{
    for (int mode = PROCESSES; mode <= THREADS; mode++) {
        plan p = new_plan(mode, 3, 1, act_nothing);
        p.others = one_barrier;
        expect(p, -1,
               "rank 0 and rank 1 disagree: rank 0 called #6 all-reduce sum f32 count 100, rank 1 "
               "called "
               "#6 barrier\n",
               "1     #5 all-reduce sum f32 count 4                  #6 barrier");
    }
}
static void test_other_count(void)
{
    for (int mode = PROCESSES; mode <= THREADS; mode++) {
        plan p = new_plan(mode, 4, 3, act_nothing);
        p.others = one_count;
        expect(p, -1,
               "disagree: rank 0 called #6 all-reduce sum f32 count 100, rank 3 called #6 "
               "all-reduce sum f32 "
               "count 101\n",
               "");
    }
}

/* ---- failing by itself, other ways to wait ---- */

static int returns(dtrain_world *world, plan *p)
{
    if (dtrain_world_rank(world) != p->culprit) return (int)all_reduce(world, 100);
    return (int)dtrain_fail(DTRAIN_ERROR_DATA, "line 7 is \"broken\"");
}
static void test_own_failure(void)
{
    plan p = new_plan(PROCESSES, 3, 1, act_nothing);
    p.others = returns;
    expect(p, -1,
           "rank 1 failed by itself, its last call was #5 all-reduce sum f32 count 4: line 7 is "
           "\"broken\"\n",
           "");
}
static int gathers(dtrain_world *world, plan *p)
{
    char mine[8] = "", all[8 * RANKS_MOST];
    if (dtrain_world_rank(world) == p->culprit) act_loop(world, p);
    return (int)dtrain_world_all_gather(world, mine, sizeof mine, all);
}
static void test_world_all_gather(void)
{
    plan p = new_plan(PROCESSES, 3, 2, act_nothing);
    p.others = gathers;
    expect(p, 2, "rank 2 is behind: it has not called #",
           "world all-gather byte count 8, where ranks 0 and 1 wait");
}
/* Two groups of two; rank 3 hangs in the second one, after `calls` of its collectives. Rank 0 waits for it in a
 * barrier, and came there before rank 2 came to where it waits: rank 3 is behind where it would have come next. */
static int groups_hang(dtrain_world *world, plan *p, int calls)
{
    dtrain_comm *half;
    float x = 1;
    const int rank = dtrain_world_rank(world);
    dtrain_result result = dtrain_comm_split(dtrain_world_comm(world), rank / 2, 0, &half);
    for (int i = 0; i < 3 && result == DTRAIN_OK; i++) {
        if (rank == p->culprit && i == calls) act_loop(world, p);
        if (rank == 2 && i == calls) await_call(dtrain_world_comm(world), BEFORE + 3, 0);
        result = dtrain_all_reduce(half, &x, &x, 1, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_MAX, NULL);
    }
    return result == DTRAIN_OK ? (int)dtrain_barrier(dtrain_world_comm(world)) : (int)result;
}
static int groups_first(dtrain_world *world, plan *p) { return groups_hang(world, p, 0); }
static int groups_third(dtrain_world *world, plan *p) { return groups_hang(world, p, 2); }
static void test_groups(void)
{
    plan p = new_plan(PROCESSES, 4, 3, act_nothing);
    p.others = groups_third;
    expect(p, 3,
           "rank 3 is behind: it has not called #3 all-reduce max f32 count 1 of communicator 1/2, "
           "where rank 2 waits; "
           "its last call was #2 all-reduce max f32 count 1 of communicator 1/2",
           "#8 barrier");
    p = new_plan(PROCESSES, 4, 3, act_nothing);
    p.others = groups_first;
    expect(p, 3,
           "rank 3 is behind: it has not called #1 all-reduce max f32 count 1 of communicator 1/2, "
           "where rank 2 waits; "
           "its last call was #7 split",
           "#8 barrier");
}
/* A message that nobody sends. */
static int receives(dtrain_world *world, plan *p)
{
    float x = 1;
    if (dtrain_world_rank(world) == p->culprit) act_loop(world, p);
    if (dtrain_world_rank(world) == 1)
        return (int)dtrain_recv(dtrain_world_comm(world), &x, 1, DTRAIN_DTYPE_F32, p->culprit,
                                NULL);
    return (int)dtrain_barrier(dtrain_world_comm(world));
}
static void test_message(void)
{
    plan p = new_plan(PROCESSES, 3, 2, act_nothing);
    p.others = receives;
    expect(p, 2, "rank 2 is behind: it has not called",
           "1     #5 all-reduce sum f32 count 4                  recv f32 count 1 peer 2");
}

/* ---- who asked ---- */

static int trains(dtrain_world *world, plan *p)
{
    float value[6] = {0}, grad[6] = {0};
    dtrain_param params[2];
    dtrain_strategy_desc desc;
    dtrain_strategy *strategy = NULL;
    memset(&desc, 0, sizeof desc);
    desc.kind = DTRAIN_STRATEGY_DDP;
    params[0] = ranks_param(names_hugging_face[8], value, grad, 1, 4);
    params[1] = ranks_param("model.layers.11.\"moe\".experts.7.w1.lora_A.default.weight", value + 4,
                            grad + 4, 1, 2);
    dtrain_result result = dtrain_strategy_create(world, params, 2, &desc, &strategy);
    for (int i = 0; i < 2 && result == DTRAIN_OK; i++) {
        if (dtrain_world_rank(world) == p->culprit && i) act_loop(world, p);
        for (size_t k = 2; k-- > 0 && result == DTRAIN_OK;)
            result = dtrain_strategy_ready(strategy, k);
        if (result == DTRAIN_OK) result = dtrain_strategy_finish(strategy);
    }
    return (int)result;
}
static void test_bucket(void)
{
    plan p = new_plan(PROCESSES, 2, 1, act_nothing);
    p.others = trains;
    expect(p, 1, "rank 1 is behind: it has not called #", ".experts.7.w1.lora_A.default.weight)");
}

/* ---- the ring, and when there is a file ---- */

static int many(dtrain_world *world, plan *p)
{
    for (int i = 0; i < 600; i++)
        if (all_reduce(world, 4) != DTRAIN_OK) return 1;
    return one_count(world, p);
}
static void test_ring(void)
{
    plan p = new_plan(THREADS, 2, 1, act_nothing);
    char path[128];
    p.others = many;
    CHECK(run_plan(&p) == DTRAIN_ERROR_RANK_FAILED);
    snprintf(path, sizeof path, "%s/flight-0.json", p.directory);
    flight_dump *d = flight_load(path);
    CHECK(d != NULL && d->calls == DTRAIN__FLIGHT_RECORDS);
    for (size_t i = 0; d && i < d->calls; i++) {
        CHECK(d->call[i].sequence == (int64_t)(BEFORE + 601 - DTRAIN__FLIGHT_RECORDS + 1 + i));
        CHECK(d->call[i].queued > 0 && d->call[i].ended >= d->call[i].queued);
        CHECK(flight_is_done(&d->call[i]) == (i + 1 < d->calls));
        CHECK(i == 0 || d->call[i].queued >= d->call[i - 1].ended);
    }
    free(d);
    remove_directory(&p);
}

/* A dump can be written at any time; that of a failure stands. */
static int dumps(dtrain_world *world, plan *p)
{
    char other[80], path[128];
    struct stat before, after;
    snprintf(other, sizeof other, "%s/other", p->directory);
    snprintf(path, sizeof path, "%s/flight-%d.json", p->directory, dtrain_world_rank(world));
    /* one all-gather made the communicator */
    CHECK(dtrain__dump(world, p->directory) == DTRAIN_OK);
    CHECK(dtrain__dump(world, "/proc/nowhere/at/all") == DTRAIN_ERROR_SYSTEM);
    flight_dump *d = flight_load(path);
    CHECK(d != NULL && d->result == DTRAIN_OK && d->calls == BEFORE + 1);
    free(d);
    const int result = one_count(world, p);
    CHECK(result == DTRAIN_ERROR_MISMATCH);
    CHECK(strstr(dtrain_last_error(), "collective #6 differs") != NULL);
    CHECK(stat(path, &before) == 0);
    CHECK(all_reduce(world, 4) != DTRAIN_OK);
    CHECK(stat(path, &after) == 0 && after.st_ino == before.st_ino &&
          after.st_size == before.st_size);
    CHECK(dtrain__dump(world, other) == DTRAIN_OK);
    d = flight_load(path);
    CHECK(d != NULL && d->result == DTRAIN_ERROR_MISMATCH &&
          strstr(d->error, "collective #6 differs") != NULL);
    free(d);
    snprintf(path, sizeof path, "%s/flight-%d.json", other, dtrain_world_rank(world));
    d = flight_load(path);
    CHECK(d != NULL && d->result == DTRAIN_ERROR_MISMATCH &&
          strstr(d->error, "collective #6 differs") != NULL);
    free(d);
    return result;
}
static void test_first_dump_stands(void)
{
    for (int mode = PROCESSES; mode <= THREADS; mode++) {
        plan p = new_plan(mode, 2, 1, act_nothing);
        p.others = dumps;
        CHECK(run_plan(&p) == DTRAIN_ERROR_RANK_FAILED);
        remove_directory(&p);
    }
}

/* Without a directory nothing is written; the environment gives one, the desc's goes before it. */
static void test_no_directory(void)
{
    char elsewhere[80], text[64];
    plan p = new_plan(PROCESSES, 2, 1, act_nothing);
    p.others = one_count;
    p.asked = "";
    unsetenv("DTRAIN_FLIGHT_DIRECTORY");
    CHECK(run_plan(&p) == DTRAIN_ERROR_RANK_FAILED);
    CHECK(p.codes[0] == DTRAIN_ERROR_MISMATCH && !has_file(&p, 0) && !has_file(&p, 1));
    CHECK(run_tool(p.directory, text, sizeof text) == 1);
    setenv("DTRAIN_FLIGHT_DIRECTORY", p.directory, 1);
    CHECK(run_plan(&p) == DTRAIN_ERROR_RANK_FAILED);
    CHECK(has_file(&p, 0) && has_file(&p, 1));
    remove_directory(&p);
    snprintf(elsewhere, sizeof elsewhere, "%s.new", p.directory);
    p.asked = elsewhere; /* is made */
    CHECK(run_plan(&p) == DTRAIN_ERROR_RANK_FAILED);
    CHECK(access(p.directory, F_OK) != 0 && access(elsewhere, F_OK) == 0);
    snprintf(p.directory, sizeof p.directory, "%.60s", elsewhere);
    CHECK(has_file(&p, 0) && has_file(&p, 1));
    remove_directory(&p);
    p.asked = "/proc/nowhere/at/all"; /* cannot be made: the failure is the same */
    p.codes[0] = 0;
    CHECK(run_plan(&p) == DTRAIN_ERROR_RANK_FAILED && p.codes[0] == DTRAIN_ERROR_MISMATCH);
    CHECK(strstr(dtrain_last_error(), "collective #6 differs") != NULL);
}

/* The second attempt's files replace those of the first; what another world left is not taken for them. */
static void test_restart(void)
{
    plan p = new_plan(PROCESSES, 2, 1, act_nothing);
    char path[128];
    p.others = one_count;
    p.restarts = 1;
    CHECK(run_plan(&p) == DTRAIN_ERROR_RANK_FAILED);
    for (int i = 0; i < 2; i++) {
        snprintf(path, sizeof path, "%s/flight-%d.json", p.directory, i);
        flight_dump *d = flight_load(path);
        CHECK(d != NULL && d->restart == 1);
        free(d);
    }
    remove_directory(&p);
}

/* SIGUSR2 while a rank waits: a file, and the run goes on. */
static int asked_by_signal(dtrain_world *world, plan *p)
{
    if (dtrain_world_rank(world) == p->culprit) {
        await_call(dtrain_world_comm(world), BEFORE + 1, 0);
        kill(getppid(), SIGUSR2); /* the launcher passes it on */
        for (int i = 0; i < 1000 && !(has_file(p, 0) && dtrain__dumps_asked()); i++)
            ranks_sleep_us(10000); /* the launcher may be late with its signal to this rank */
    }
    return (int)all_reduce(world, 100);
}
static void test_signal(void)
{
    char text[4096];
    plan p = new_plan(PROCESSES, 2, 1, act_nothing);
    p.others = asked_by_signal;
    p.catches = true;
    p.timeout_ms = 20000;
    CHECK(run_plan(&p) == DTRAIN_OK);
    CHECK(has_file(&p, 0) && has_file(&p, 1));
    CHECK(run_tool(p.directory, text, sizeof text) == 0);
    CHECK_MSG(
        strstr(text, "0     #5 all-reduce sum f32 count 4                  #6 all-reduce sum") !=
            NULL,
        "%s", text);
    remove_directory(&p);
}

/* A file that is cut off, or lies, is refused. */
static void test_bad_files(void)
{
    static const char *const bad[] = {
        "",
        "{",
        "{\"rank\": 2, \"size\": 2}",
        "{\"rank\": 0, \"size\": 257}",
        "{\"rank\": 0, \"size\": 1, \"ranks\": [{\"rank\": 1}]}",
        "{\"rank\": -1, \"size\": 1}",
        "{\"rank\": 0, \"size\": 1, \"first_failed\": 1}",
        "{\"rank\": 0, \"size\": 1, \"communicators\": [{\"ranks\": [0, 256]}]}"};
    char path[] = "/tmp/dtrain_flight_XXXXXX/flight-0.json", text[64];
    path[25] = 0;
    CHECK(mkdtemp(path) != NULL);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        path[25] = '/';
        FILE *file = fopen(path, "w");
        CHECK(file != NULL);
        fputs(bad[i], file);
        fclose(file);
        path[25] = 0;
        CHECK_MSG(run_tool(path, text, sizeof text) == 2, "%s", bad[i]);
    }
    path[25] = '/';
    unlink(path);
    path[25] = 0;
    rmdir(path);
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    RUN_BESIDE(test_hang);
    RUN_BESIDE(test_stopped_outside);
    RUN_BESIDE(test_stopped_inside);
    RUN(test_death);
    RUN_BESIDE(test_late);
    RUN(test_other_collective);
    RUN(test_other_count);
    RUN(test_own_failure);
    RUN_BESIDE(test_world_all_gather);
    RUN_BESIDE(test_groups);
    RUN_BESIDE(test_message);
    RUN_BESIDE(test_bucket);
    RUN(test_ring);
    RUN(test_first_dump_stands);
    RUN(test_no_directory);
    RUN(test_restart);
    RUN(test_signal);
    RUN(test_bad_files);
    return test_summary();
}
