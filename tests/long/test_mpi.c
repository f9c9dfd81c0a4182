/* test_mpi.c: the communicator over MPI. tests/long/test_mpi.sh builds it with each MPI and starts it:
 *
 *     mpirun -n 4 test_mpi comm [part of a name]    what test_comm.c does with the local communicator
 *     mpirun -n 4 test_mpi mismatch 3               one way to fail: each rank judges its own error
 *                                                   and writes it to $DTRAIN_MPI_OUT.<rank>
 *
 * The oracles are those of test_comm.c: the same calls must give the same bits. */
#define DTRAIN_IMPLEMENTATION
#define main test_comm_main
#include "unit/test_comm.c"
#include "device_table.h"
#undef main

/* ---- what test_comm.c does ---- */

static int rank_all_to_all(dtrain_world *world, void *user)
{
    static const size_t counts[] = {0, 1, 7, 300, 5000, 70001};
    size_t i, t, j, e;
    desk d;
    (void)user;
    if (open_desk(&d, world, 70001 * 8 * (size_t)dtrain_world_size(world))) return 1;
    for (i = 0; i < sizeof counts / sizeof *counts; i++)
        for (t = 0; t < 5; t++) {
            const size_t n = (size_t)d.size, count = counts[i],
                         item = dtrain_dtype_bytes(dtypes[t]);
            unsigned char *send = d.send[t % 2] + GUARD + t, *recv = d.recv[i % 2] + GUARD + i;
            dtrain_work *work = NULL;
            unsigned char wanted[8];
            guard(recv, n * count * item);
            for (j = 0; j < n * count; j++) make_element(dtypes[t], i, d.rank, j, send + j * item);
            RANKS_TRY(
                dtrain_all_to_all(d.comm, send, recv, count, dtypes[t], t % 2 ? &work : NULL));
            RANKS_TRY(dtrain_work_wait(work));
            for (j = 0; j < n; j++)
                for (e = 0; e < count; e++) {
                    make_element(dtypes[t], i, (int)j, (size_t)d.rank * count + e, wanted);
                    if (memcmp(recv + (j * count + e) * item, wanted, item) != 0)
                        return !CHECK_MSG(0, "all-to-all of %zu: element %zu from %zu", count, e,
                                          j);
                }
            CHECK_MSG(guarded(recv, n * count * item), "all-to-all of %zu: beyond recv", count);
        }
    close_desk(&d);
    return 0;
}

/* Buckets of a step, all in flight at once, waited for in another order on every rank; the books of
 * the second step must not grow. */
static int rank_window(dtrain_world *world, void *user)
{
    enum { STEPS = 6, BUCKETS = 40 };
    const size_t count = 20011;
    dtrain_comm *comm = dtrain_world_comm(world);
    const int rank = dtrain_world_rank(world), n = dtrain_world_size(world);
    dtrain_work *works[BUCKETS];
    void *memory;
    size_t i, books = 0;
    int step, b, order[BUCKETS];
    float *data;
    (void)user;
    RANKS_TRY(dtrain_comm_alloc(comm, BUCKETS * count * sizeof(float), &memory));
    data = (float *)memory;
    for (step = 0; step < STEPS; step++) {
        for (i = 0; i < BUCKETS * count; i++) data[i] = (float)((i + (size_t)rank) % 1000);
        for (b = 0; b < BUCKETS; b++)
            RANKS_TRY(dtrain_all_reduce(comm, data + (size_t)b * count, data + (size_t)b * count,
                                        count, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, &works[b]));
        make_order(order, BUCKETS, step % 3, rank);
        for (b = 0; b < BUCKETS; b++) RANKS_TRY(dtrain_work_wait(works[order[b]]));
        for (i = 0; i < BUCKETS * count; i++) {
            size_t sum = 0;
            for (b = 0; b < n; b++) sum += (i + (size_t)b) % 1000;
            if (data[i] != (float)sum) return !CHECK_MSG(0, "step %d [%zu]", step, i);
        }
        if (step == 0) books = world->device->comm_bytes;
        CHECK_MSG(world->device->comm_bytes == books, "step %d takes %zu bytes, %zu before", step,
                  world->device->comm_bytes, books);
    }
    dtrain_comm_free(comm, memory, BUCKETS * count * sizeof(float));
    return 0;
}

static int rank_books(dtrain_world *world, void *user)
{
    const int n = dtrain_world_size(world);
    dtrain_comm_info was, now;
    desk d;
    call c = make_call(DTRAIN_COLLECTIVE_ALL_REDUCE, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, 6000, 3);
    (void)user;
    if (open_desk(&d, world, 6000 * 4)) return 1;
    dtrain_comm_query(d.comm, &was);
    if (getenv("DTRAIN_MPI_GUEST") && getenv("DTRAIN_MPI_AUTO")) { /* books of test_comm.c */
        CHECK_MSG(strcmp(was.backend, "local") == 0, "backend %s", was.backend);
        close_desk(&d);
        return 0;
    }
    CHECK_MSG(strcmp(was.backend, "mpi") == 0, "backend %s", was.backend);
    if (!run_call(&d, &c)) return 1;
    dtrain_comm_query(d.comm, &now);
    CHECK(now.operation_count == was.operation_count + 1);
    CHECK(now.payload_bytes == was.payload_bytes + 24000);
    CHECK(llabs((long long)(now.wire_bytes - was.wire_bytes) - 48000LL * (n - 1) / n) <= 8);
    CHECK((now.staged_bytes > 0) == !dtrain_world_device(world)->ops->host_memory &&
          d.comm->in_flight == 0 && d.comm->outstanding == 0);
    close_desk(&d);
    return 0;
}

static int crossed_comms = 1;
static uint64_t random_seed = 7;

static const struct part {
    const char *name;
    dtrain_rank_fn run;
    void *user;
    int least, most; /* ranks; 0: any */
} parts[] = {
    {"every_type", rank_every_type, NULL, 0, 0},
    {"sizes_to_70", rank_sizes_to_70, NULL, 0, 0},
    {"limits", rank_limits, NULL, 0, 0},
    {"primes", rank_primes, NULL, 0, 4},
    {"large", rank_large, NULL, 2, 3},
    {"unaligned", rank_unaligned, NULL, 2, 4},
    {"memory_mix", rank_memory_mix, NULL, 2, 4},
    {"random_calls", rank_random_calls, &random_seed, 0, 0},
    {"special_values", rank_special_values, NULL, 2, 2},
    {"special_halves", rank_special_halves, NULL, 2, 2},
    {"async_many", rank_async_many, NULL, 0, 4},
    {"async_mixed", rank_async_mixed, NULL, 0, 4},
    {"async_at_once", rank_async_at_once, NULL, 2, 2},
    {"ring", rank_ring, NULL, 2, 0},
    {"exchange", rank_exchange, NULL, 2, 0},
    {"pair_beside", rank_pair_beside, NULL, 2, 0},
    {"split", rank_split, NULL, 0, 0},
    {"nested_split", rank_nested_split, NULL, 8, 8},
    {"two_comms", rank_two_comms, &crossed_comms, 2, 0},
    {"alloc", rank_alloc, NULL, 2, 2},
    {"alloc_limits", rank_alloc_limits, NULL, 2, 2},
    {"info_times", rank_info_times, NULL, 2, 2},
    {"all_to_all", rank_all_to_all, NULL, 0, 0},
    {"window", rank_window, NULL, 0, 0},
    {"books", rank_books, NULL, 0, 0},
};

static int rank_comm(dtrain_world *world, void *user)
{
    const int n = dtrain_world_size(world);
    size_t i;
    for (i = 0; i < sizeof parts / sizeof *parts; i++) {
        const struct part *p = &parts[i];
        const double begin = dtrain_seconds();
        if (DTRAIN__MPI_CHUNK_BYTES < 4096 && p->run == rank_large)
            continue; /* 9000 chunks, slow */
        if (!strstr(p->name, (const char *)user) || n < p->least || (p->most && n > p->most))
            continue;
        if (p->run(world, p->user)) return 1;
        if (dtrain_world_rank(world) == 0 && getenv("DTRAIN_MPI_TIMES"))
            printf("    %-16s %6.2f s\n", p->name, dtrain_seconds() - begin);
    }
    return 0;
}

/* More than 2^31 bytes in one call. */
static int rank_huge(dtrain_world *world, void *user)
{
    const size_t count = ((size_t)1 << 28) + 12345;
    dtrain_comm *comm = dtrain_world_comm(world);
    const int rank = dtrain_world_rank(world), n = dtrain_world_size(world);
    void *memory;
    int64_t *data;
    size_t i, first = 0;
    int step;
    (void)user;
    RANKS_TRY(dtrain_comm_alloc(comm, count * 8, &memory));
    data = (int64_t *)memory;
    for (step = 0; step < 3; step++) {
        for (i = 0; i < count; i++) data[i] = (int64_t)i * 3 + rank;
        if (step == 0) RANKS_TRY(dtrain_broadcast(comm, data, count, DTRAIN_DTYPE_I64, 1, NULL));
        if (step == 1)
            RANKS_TRY(dtrain_all_reduce(comm, data, data, count, DTRAIN_DTYPE_I64,
                                        DTRAIN_REDUCE_SUM, NULL));
        if (step == 2 && rank == 0)
            RANKS_TRY(dtrain_send(comm, data, count, DTRAIN_DTYPE_I64, 1, NULL));
        if (step == 2 && rank == 1)
            RANKS_TRY(dtrain_recv(comm, data, count, DTRAIN_DTYPE_I64, 0, NULL));
        for (i = 0; i < count; i++) {
            int64_t wanted = (int64_t)i * 3 + (step == 0 ? 1 : step == 2 && rank < 2 ? 0 : rank);
            if (step == 1) wanted = (int64_t)i * 3 * n + n * (n - 1) / 2;
            if (data[i] != wanted) first = first ? first : i + 1;
        }
        CHECK_MSG(first == 0, "step %d: element %zu", step, first - 1);
    }
    return 0;
}

/* ---- ways to fail ---- */

static int mpi_rank(void) /* as the launcher tells it, before there is a world */
{
    const char *open = getenv("OMPI_COMM_WORLD_RANK"), *hydra = getenv("PMI_RANK");
    return open || hydra ? atoi(open ? open : hydra) : 0;
}

/* Writes the verdict on this rank's error where the script finds it. */
static int judge_rank(int rank, dtrain_result got, bool good, const char *wanted)
{
    const char *folder = getenv("DTRAIN_MPI_OUT"), *text = strchr(dtrain_last_error(), ':');
    char path[512];
    FILE *file;
    snprintf(path, sizeof path, "%s.%d", folder ? folder : "/dev/null", rank);
    file = fopen(path, "w");
    if (!file) return 1;
    fprintf(file, "%s %s:%s\n", good ? "ok" : "BAD", dtrain_result_text(got), text ? text + 1 : "");
    fclose(file);
    if (!good)
        fprintf(stderr, "rank %d: %s: %s; expected \"%s\"\n", rank, dtrain_result_text(got),
                dtrain_last_error(), wanted);
    return 1;
}
static int judge(dtrain_world *world, dtrain_result got, dtrain_result wanted, const char *part)
{
    return judge_rank(dtrain_world_rank(world), got,
                      got == wanted && strstr(dtrain_last_error(), part), part);
}

/* Waits until another rank has judged. moving: MPI moves this rank's messages meanwhile. */
static bool await_judge(int rank, bool moving)
{
    const double end = test_seconds() + 30;
    char path[512];
    int some;
    snprintf(path, sizeof path, "%s.%d", getenv("DTRAIN_MPI_OUT"), rank);
    while (access(path, F_OK) != 0 && test_seconds() < end) {
        if (moving)
            MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, &some, MPI_STATUS_IGNORE);
        ranks_sleep_us(5000);
    }
    return access(path, F_OK) == 0;
}
static void await_judges(const dtrain_world *world, bool moving)
{
    int r;
    for (r = 0; r < dtrain_world_size(world); r++)
        if (r != dtrain_world_rank(world)) await_judge(r, moving);
}

/* Keep a guest's process, and its messages moving, until the other ranks have judged: Open MPI over TCP ends a process
 * that sends to one which is gone, before it can say what it heard. Returns `judged`. */
static int stay_for_judges(const dtrain_world *world, int judged)
{
    if (getenv("DTRAIN_MPI_GUEST") && getenv("DTRAIN_MPI_OUT")) await_judges(world, true);
    return judged;
}

/* DTRAIN_MPI_STOP=idup or barrier: there rank 1 is stopped, in front of MPI's call. */
static void may_stop(const char *where)
{
    const char *stop = getenv("DTRAIN_MPI_STOP");
    if (stop && strcmp(stop, where) == 0 && mpi_rank() == 1) raise(SIGSTOP);
}
int MPI_Comm_idup(MPI_Comm comm, MPI_Comm *copy, MPI_Request *request)
{
    may_stop("idup");
    return PMPI_Comm_idup(comm, copy, request);
}
int MPI_Ibarrier(MPI_Comm comm, MPI_Request *request)
{
    may_stop("barrier");
    return PMPI_Ibarrier(comm, request);
}

/* The last rank calls something else, after three operations that agree. */
static int rank_mismatch(dtrain_world *world, void *user)
{
    static const char *const words[] = {
        "count 100, rank 2 called all-reduce sum f32 count 101",
        "all-reduce sum f32 count 90000, rank 2 called all-reduce sum f32 count 90001",
        "all-reduce sum f32 count 100, rank 2 called all-reduce sum i32 count 100",
        "all-reduce sum f32 count 100, rank 2 called all-reduce max f32 count 100",
        "called broadcast f32 count 100 root 0, rank 2 called broadcast f32 count 100 root "
        "1",
        "called all-reduce sum f32 count 100, rank 2 called barrier",
        "called all-gather f32 count 9000, rank 2 called all-to-all f32 count 9000",
        "rank 1 sent f32 count 50, rank 2 receives f32 count 51",
        "rank 1 sent i32 count 5000, rank 2 receives f32 count 5000",
    };
    const int which = atoi((const char *)user), rank = dtrain_world_rank(world);
    const bool odd = rank == 2;
    dtrain_comm *comm = dtrain_world_comm(world);
    float *a = (float *)calloc(200000, sizeof *a), *b = (float *)calloc(200000, sizeof *b);
    dtrain_result got = DTRAIN_OK;
    int i;
    for (i = 0; i < 3 && got == DTRAIN_OK; i++)
        got = dtrain_all_reduce(comm, a, b, 1000, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, NULL);
    if (got != DTRAIN_OK) { /* the others were so quick that they disagree already */
    } else if (which < 4)
        got = dtrain_all_reduce(comm, a, b, (which == 1 ? 90000u : 100u) + (odd && which < 2),
                                odd && which == 2 ? DTRAIN_DTYPE_I32 : DTRAIN_DTYPE_F32,
                                odd && which == 3 ? DTRAIN_REDUCE_MAX : DTRAIN_REDUCE_SUM, NULL);
    else if (which == 4) got = dtrain_broadcast(comm, a, 100, DTRAIN_DTYPE_F32, odd, NULL);
    else if (which == 5 && odd) got = dtrain_barrier(comm);
    else if (which == 5)
        got = dtrain_all_reduce(comm, a, b, 100, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, NULL);
    else if (which == 6 && odd) got = dtrain_all_to_all(comm, a, b, 9000, DTRAIN_DTYPE_F32, NULL);
    else if (which == 6) got = dtrain_all_gather(comm, a, b, 9000, DTRAIN_DTYPE_F32, NULL);
    else {
        const size_t count = which == 7 ? 50 : 5000;
        if (rank == 1)
            got = dtrain_send(comm, a, count, which == 7 ? DTRAIN_DTYPE_F32 : DTRAIN_DTYPE_I32, 2,
                              NULL);
        if (rank == 2) got = dtrain_recv(comm, b, count + (which == 7), DTRAIN_DTYPE_F32, 1, NULL);
        if (got == DTRAIN_OK) got = dtrain_barrier(comm);
    }
    if (got != DTRAIN_OK) { /* it stays failed */
        const dtrain_result again = dtrain_barrier(comm);
        CHECK_MSG(again == got, "after %s: %s", dtrain_result_text(got), dtrain_result_text(again));
    }
    /* Guests on several hosts share no report: one that has not heard rank 0 in time names another rank beside 2. */
    if (getenv("DTRAIN_MPI_GUEST") && which == 1)
        return stay_for_judges(world, judge(world, got, DTRAIN_ERROR_MISMATCH,
                                            "rank 2 called all-reduce sum f32 count 90001"));
    return judge(world, got, DTRAIN_ERROR_MISMATCH, words[which]);
}

/* Rank 1 is killed with parts of an all-reduce on their way. */
static int rank_death(dtrain_world *world, void *user)
{
    dtrain_comm *comm = dtrain_world_comm(world);
    const size_t count = 3000000;
    float *data = (float *)calloc(count, sizeof *data);
    dtrain_work *work[2];
    dtrain_result got = DTRAIN_OK;
    int i;
    (void)user;
    for (i = 0; i < 20 && got == DTRAIN_OK; i++) {
        got = dtrain_all_reduce(comm, data, data, count, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM,
                                &work[0]);
        if (got == DTRAIN_OK && i == 3 && dtrain_world_rank(world) == 1) kill(getpid(), SIGKILL);
        if (got == DTRAIN_OK) got = dtrain_work_wait(work[0]);
    }
    return judge(world, got, DTRAIN_ERROR_PEER, "rank 1 is gone");
}

/* Rank 1 does not come in time. What the others have sent it before is still good. */
static int rank_stuck(dtrain_world *world, void *user)
{
    const size_t count = *(const char *)user ? (size_t)atol((const char *)user) : 10;
    dtrain_comm *comm = dtrain_world_comm(world);
    float *data = (float *)calloc(count, sizeof *data);
    dtrain_result got = dtrain_barrier(comm);
    if (got == DTRAIN_OK && dtrain_world_rank(world) == 1) await_judges(world, false);
    if (got == DTRAIN_OK)
        got = dtrain_all_reduce(comm, data, data, count, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, NULL);
    if (got == DTRAIN_OK) got = dtrain_barrier(comm);
    return judge(world, got, DTRAIN_ERROR_TIMEOUT, "for rank 1 (its last was #1)");
}

/* Rank 1 starts a large all-reduce and never moves it on. */
static int rank_asleep(dtrain_world *world, void *user)
{
    const size_t count = 4000000;
    dtrain_comm *comm = dtrain_world_comm(world);
    float *data = (float *)calloc(count, sizeof *data);
    dtrain_work *work;
    (void)user;
    dtrain_result got = dtrain_barrier(comm);
    if (got == DTRAIN_OK)
        got =
            dtrain_all_reduce(comm, data, data, count, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, &work);
    if (got == DTRAIN_OK && dtrain_world_rank(world) == 1) await_judges(world, false);
    if (got == DTRAIN_OK) got = dtrain_work_wait(work);
    return judge(world, got, DTRAIN_ERROR_TIMEOUT, "for rank 1 (stuck in #2);");
}

/* Ranks that all receive before they send: ranks of one host find the circle. Ranks of several hosts wait for the
 * deadline, and hear for whom the rank waits that they wait for. */
static int rank_circle(dtrain_world *world, void *user)
{
    dtrain_world_info info;
    float x;
    (void)user;
    dtrain_world_query(world, &info);
    const dtrain_result got = dtrain_recv(dtrain_world_comm(world), &x, 1, DTRAIN_DTYPE_F32,
                                          (info.rank + 1) % info.size, NULL);
    if (info.node_count == 1) return judge(world, got, DTRAIN_ERROR_MISMATCH, "in a circle: rank ");
    return judge(world, got, DTRAIN_ERROR_TIMEOUT,
                 " in a circle; make the same calls on all of them, or if they are only slow");
}

/* Messages go around a ring, and one rank does not come to it: every other one is told of that one, its neighbour
 * or not. */
static int rank_late_in_ring(dtrain_world *world, void *user)
{
    const int rank = dtrain_world_rank(world), n = dtrain_world_size(world);
    dtrain_comm *comm = dtrain_world_comm(world);
    float x = 0, y;
    dtrain_result got = dtrain_barrier(comm);
    (void)user;
    if (got == DTRAIN_OK && rank == 2) await_judges(world, false);
    for (int i = 0; i < n && got == DTRAIN_OK; i++) {
        got = dtrain_send(comm, &x, 1, DTRAIN_DTYPE_F32, (rank + 1) % n, NULL);
        if (got == DTRAIN_OK)
            got = dtrain_recv(comm, &y, 1, DTRAIN_DTYPE_F32, (rank + n - 1) % n, NULL);
    }
    return judge(world, got, DTRAIN_ERROR_TIMEOUT, "for rank 2 (its last was #1);");
}

/* Rank 1 leaves early; or makes a mistake that no other rank can see. */
static int rank_leave(dtrain_world *world, void *user)
{
    (void)user;
    if (dtrain_world_rank(world) == 1) {
        judge(world, DTRAIN_OK, DTRAIN_OK, "");
        return 0;
    }
    return judge(world, dtrain_barrier(dtrain_world_comm(world)), DTRAIN_ERROR_PEER, "rank 1 left");
}
static int rank_argument(dtrain_world *world, void *user)
{
    float x = 0;
    const bool odd = dtrain_world_rank(world) == 1;
    const dtrain_result got =
        dtrain_broadcast(dtrain_world_comm(world), &x, 1, DTRAIN_DTYPE_F32, odd ? 99 : 0, NULL);
    (void)user;
    if (got == DTRAIN_OK) /* others may have had all they need: the next one fails */
        return stay_for_judges(world, judge(world, dtrain_barrier(dtrain_world_comm(world)),
                                            DTRAIN_ERROR_PEER,
                                            "rank 1 had to give up: dtrain_broadcast: rank 99"));
    return stay_for_judges(world, judge(world, got, odd ? DTRAIN_ERROR_ARGUMENT : DTRAIN_ERROR_PEER,
                                        "dtrain_broadcast: rank 99 does not exist"));
}

/* The last one to have something to say leaves at once: what MPI still has to send must arrive. */
static int rank_hurry(dtrain_world *world, void *user)
{
    dtrain_comm *comm = dtrain_world_comm(world);
    const int rank = dtrain_world_rank(world), n = dtrain_world_size(world);
    float data[900];
    int i;
    (void)user;
    memset(data, 0, sizeof data);
    for (i = 1; i < n; i++) {
        if (rank == 0) RANKS_TRY(dtrain_send(comm, data, 900, DTRAIN_DTYPE_F32, i, NULL));
        if (rank == i) ranks_sleep_us(i * 100000);
        if (rank == i) RANKS_TRY(dtrain_recv(comm, data, 900, DTRAIN_DTYPE_F32, 0, NULL));
    }
    return 0;
}

static int rank_nothing(dtrain_world *world, void *user)
{
    (void)user;
    return dtrain_barrier(dtrain_world_comm(world)) != DTRAIN_OK;
}

/* The last of three ranks is at its end; rank 1 comes there when that one has given up to wait for it. */
static int rank_late_end(dtrain_world *world, void *user)
{
    (void)user;
    RANKS_TRY(dtrain_barrier(dtrain_world_comm(world)));
    return dtrain_world_rank(world) == 1 &&
           !CHECK_MSG(await_judge(2, false), "rank 2 waits without a deadline");
}

static const struct {
    const char *name;
    dtrain_rank_fn run;
    uint32_t timeout_ms;
} scenes[] = {
    {"comm", rank_comm, 30000},
    {"huge", rank_huge, 120000},
    {"hurry", rank_hurry, 20000},
    {"nothing", rank_nothing, 5000},
    {"ring", rank_late_in_ring, RANKS_SHORT_MS},
    {"stopped", rank_nothing, RANKS_SHORT_MS},
    {"late_end", rank_late_end, RANKS_SHORT_MS},
    {"mismatch", rank_mismatch, 20000},
    {"death", rank_death, 20000},
    {"stuck", rank_stuck, RANKS_SHORT_MS},
    {"asleep", rank_asleep, RANKS_SHORT_MS},
    {"leave", rank_leave, 20000},
    {"argument", rank_argument, 20000},
    {"circle", rank_circle, 4000},
};

static long copies; /* of the device below */

static dtrain_result counted_copy(dtrain_device *at, void *to, const void *from, size_t bytes,
                                  dtrain_copy_kind kind, dtrain_stream *stream)
{
    copies++;
    return device_table("cpu")->copy_async(at, to, from, bytes, kind, stream);
}

static bool always(dtrain_device *at, const void *address)
{
    (void)at;
    (void)address;
    return true;
}

/* Runs a scene as a guest of this program, which has the ranks of MPI_COMM_WORLD. */
static dtrain_result run_guest(const dtrain_launch_desc *launch, dtrain_rank_fn scene, void *user)
{
    dtrain_join_desc desc;
    dtrain_world *world;
    MPI_Comm all = MPI_COMM_WORLD;
    memset(&desc, 0, sizeof desc);
    desc.timeout_ms = launch->timeout_ms;
    desc.device_ops = launch->device_ops;
    desc.comm_ops = launch->comm_ops;
    if (desc.comm_ops) desc.comm_given = &all;
    dtrain_result result = dtrain_world_join_mpi(MPI_COMM_WORLD, &desc, &world);
    if (result != DTRAIN_OK) return result;
    const int code = scene(world, user);
    result = dtrain_world_leave(world);
    return code ? DTRAIN_ERROR_RANK_FAILED : result;
}

/* test_mpi SCENE [argument]. DTRAIN_MPI_RANKS, _MODE: for runs that dtrain_launch would fork. DTRAIN_MPI_GUEST: join
 * as a guest. DTRAIN_MPI_DEVICE: all buffers belong to a device whose memory the host may not touch, so that they
 * travel through bounce buffers. */
int main(int argc, char **argv)
{
    static dtrain_device_ops device; /* outlives the ranks */
    dtrain_launch_desc desc = ranks_desc(0, DTRAIN_LAUNCH_PROCESSES);
    const char *ranks = getenv("DTRAIN_MPI_RANKS"), *mode = getenv("DTRAIN_MPI_MODE");
    dtrain_result result = DTRAIN_ERROR_ARGUMENT;
    size_t s;
    uint32_t i;
    char nothing[1] = "";
    char *own[2] = {argv[0], nothing};
    test_begin(1, own);
    int level = 0;
    signal(SIGUSR1, SIG_IGN); /* Hydra's way of saying that a rank has died */
    signal(SIGPIPE, SIG_IGN); /* MPI writes to sockets of ranks that have died */
    if (!ranks) MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &level);
    for (i = 0; i < 65536; i++) half_values[i] = slow_half_value(i);
    if (ranks) desc.rank_count = (uint32_t)atoi(ranks);
    if (mode) desc.mode = (uint32_t)atoi(mode);
    device = *device_table("cpu");
    device.host_memory = false;
    device.is_device_memory = always;
    device.copy_async = counted_copy;
    if (getenv("DTRAIN_MPI_DEVICE")) desc.device_ops = &device;
    if (!getenv("DTRAIN_MPI_AUTO")) (void)dtrain_comm_ops_by_name("mpi", &desc.comm_ops);
    for (s = 0; argc > 1 && s < sizeof scenes / sizeof *scenes; s++) {
        if (strcmp(argv[1], scenes[s].name) != 0) continue;
        desc.timeout_ms = scenes[s].timeout_ms;
        result = getenv("DTRAIN_MPI_GUEST")
                     ? run_guest(&desc, scenes[s].run, argc > 2 ? argv[2] : own[1])
                     : dtrain_launch(&desc, scenes[s].run, argc > 2 ? argv[2] : own[1], NULL);
    }
    if (result != DTRAIN_OK)
        fprintf(stderr, "%s: %s\n", dtrain_result_text(result), dtrain_last_error());
    if (argc > 1 && strcmp(argv[1], "late_end") == 0)
        judge_rank(mpi_rank(), result, result == DTRAIN_OK, "the end");
    if (argc > 1 && strcmp(argv[1], "stopped") == 0 &&
        argc > 2) /* all ranks end well, or hear of rank 1 */
        judge_rank(mpi_rank(), result,
                   strstr(result == DTRAIN_OK ? "" : dtrain_last_error(), argv[2]) != NULL,
                   argv[2]);
    CHECK(desc.device_ops != &device || copies > 0);
    if (!ranks && result == DTRAIN_OK) MPI_Finalize();
    return result == DTRAIN_OK && test_shared->failed_checks == 0 ? 0 : 1;
}
