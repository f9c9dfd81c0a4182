/* test_links.c: emulated links. Results must keep their bits; when an operation is due follows
 * from a formula, which is written here once more, pair of ranks by pair of ranks. Due times are compared
 * with the formula to the nanosecond, for they are made of time stamps; of clocks only lower bounds are
 * asked: a transfer is never faster than its link, and may be as late as a busy machine makes it. */
#include "world/world_internal.h"
#include "dtrain.h"
#include "test.h"
#include "ranks.h"
#include "ports.h"
#include "tools/emulated_links.h"
#include <sys/resource.h>

enum { MODES = 2, SLACK_NS = 64 /* each booking is rounded up to the next nanosecond */ };

static const uint32_t kinds[] = {DTRAIN_COLLECTIVE_ALL_REDUCE, DTRAIN_COLLECTIVE_REDUCE_SCATTER,
                                 DTRAIN_COLLECTIVE_ALL_GATHER, DTRAIN_COLLECTIVE_BROADCAST,
                                 DTRAIN_COLLECTIVE_REDUCE,     DTRAIN_COLLECTIVE_ALL_TO_ALL,
                                 DTRAIN_COLLECTIVE_BARRIER};
enum { KINDS = sizeof kinds / sizeof *kinds };
static const char *const kind_names[] = {"all-reduce", "reduce-scatter", "all-gather", "broadcast",
                                         "reduce",     "all-to-all",     "barrier"};

static dtrain_launch_desc links_desc(int ranks, int node_ranks, uint32_t mode, double gigabits,
                                     double latency)
{
    dtrain_launch_desc desc = ranks_desc(ranks, mode);
    if (node_ranks) emulate_links(&desc, node_ranks, gigabits, latency);
    return desc;
}

static void links_run(const dtrain_launch_desc *desc, dtrain_rank_fn rank_main, void *user)
{
    dtrain_result result = ranks_launch(desc, rank_main, user, NULL);
    CHECK_MSG(result == DTRAIN_OK, "%u ranks, %u a node, %s: %s", desc->rank_count,
              desc->options.node_ranks, ranks_mode_name(desc->mode),
              result == DTRAIN_OK ? "" : dtrain_last_error());
}

/* Ranks with a node each, as processes and as threads. */
static void links_run_modes(int ranks, double gigabits, double latency, dtrain_rank_fn rank_main)
{
    int m;
    for (m = 0; m < MODES; m++) {
        dtrain_launch_desc desc = links_desc(ranks, 1, (uint32_t)m, gigabits, latency);
        links_run(&desc, rank_main, NULL);
    }
}

/* What the links know of an operation; a work stays where it was until another operation takes it. */
static const links_work *link_work(const dtrain_work *work)
{
    return links_work_of((const dtrain_transport_work *)(const void *)work);
}

static dtrain_result call(dtrain_comm *comm, uint32_t kind, const float *send, float *recv,
                          size_t count, int root, dtrain_work **work)
{
    const dtrain_dtype dtype = DTRAIN_DTYPE_F32;
    switch (kind) {
    case DTRAIN_COLLECTIVE_ALL_REDUCE:
        return dtrain_all_reduce(comm, send, recv, count, dtype, DTRAIN_REDUCE_SUM, work);
    case DTRAIN_COLLECTIVE_REDUCE_SCATTER:
        return dtrain_reduce_scatter(comm, send, recv, count, dtype, DTRAIN_REDUCE_MEAN, work);
    case DTRAIN_COLLECTIVE_ALL_GATHER:
        return dtrain_all_gather(comm, send, recv, count, dtype, work);
    case DTRAIN_COLLECTIVE_ALL_TO_ALL:
        return dtrain_all_to_all(comm, send, recv, count, dtype, work);
    case DTRAIN_COLLECTIVE_BROADCAST: return dtrain_broadcast(comm, recv, count, dtype, root, work);
    case DTRAIN_COLLECTIVE_REDUCE:
        return dtrain_reduce(comm, send, recv, count, dtype, DTRAIN_REDUCE_SUM, root, work);
    default: return dtrain_barrier(comm);
    }
}

/* ---- the world's nodes ---- */

static int rank_numbers(dtrain_world *world, void *user)
{
    const int each = *(const int *)user, rank = dtrain_world_rank(world),
              size = dtrain_world_size(world);
    dtrain_world_info info;
    dtrain_world_query(world, &info);
    CHECK(info.node == rank / each && info.node_count == size / each);
    CHECK(info.local_rank == rank % each && info.local_size == each);
    return 0;
}
static void test_numbers(void)
{
    static const int shapes[][2] = {{1, 1}, {2, 1}, {2, 2}, {6, 2}, {6, 3}, {8, 4}, {12, 1}};
    size_t i;
    for (i = 0; i < 2 * sizeof shapes / sizeof *shapes; i++) {
        int each = shapes[i / 2][1];
        dtrain_launch_desc desc = links_desc(shapes[i / 2][0], each, (uint32_t)(i % 2), 1, 1);
        links_run(&desc, rank_numbers, &each);
    }
}

/* Cores are shared by all ranks of the machine, whatever they believe. */
static int rank_threads(dtrain_world *world, void *user)
{
    uint32_t *threads = (uint32_t *)user;
    if (dtrain_world_rank(world) == 0) *threads = world->threads;
    CHECK(world->local_size == dtrain_world_size(world) && world->node_count == 1);
    return 0;
}
static void test_cores(void)
{
    uint32_t *threads = (uint32_t *)ranks_shared(64);
    int emulated;
    for (emulated = 0; emulated < 2; emulated++) {
        dtrain_launch_desc desc = links_desc(4, emulated ? 2 : 0, 0, emulated, emulated);
        desc.threads_per_rank = 0;
        links_run(&desc, rank_threads, &threads[emulated]);
    }
    CHECK_MSG(threads[0] && threads[0] == threads[1], "%u threads, emulated %u", threads[0],
              threads[1]);
}

/* ---- bits ---- */

static void hash_in(uint64_t *hash, const float *data, size_t count)
{
    uint32_t bits;
    size_t i;
    for (i = 0; i < count; i++) {
        memcpy(&bits, data + i, sizeof bits);
        *hash = (*hash ^ bits) * 0x100000001b3u;
    }
}

/* Every kind, small, direct and staged, then messages around the ring. */
static int bits_of(dtrain_comm *comm, float *send, float *recv, size_t room, uint64_t *hash)
{
    static const size_t counts[] = {0, 1, 200, 5000, 40001};
    const int size = dtrain_comm_size(comm), rank = dtrain_comm_rank(comm);
    size_t k, c, i;
    for (k = 0; k < KINDS; k++)
        for (c = 0; c < sizeof counts / sizeof *counts; c++) {
            const size_t count = counts[c], whole = count * (size_t)size,
                         used = whole < room ? whole : room;
            if (whole > room && (k == 1 || k == 2 || k == 5)) continue;
            for (i = 0; i < used; i++) {
                send[i] =
                    (float)((i * 2654435761u + 977 * (size_t)rank + k) & 0xffffff) * 1e-7f - 0.9f;
                recv[i] = send[i] + 1;
            }
            RANKS_TRY(call(comm, kinds[k], send, recv, count, size - 1, NULL));
            hash_in(hash, recv, used);
        }
    for (c = 0; c < sizeof counts / sizeof *counts && size > 1; c++) {
        dtrain_work *work[2];
        RANKS_TRY(
            dtrain_send(comm, send, counts[c], DTRAIN_DTYPE_F32, (rank + 1) % size, &work[0]));
        RANKS_TRY(dtrain_recv(comm, recv, counts[c], DTRAIN_DTYPE_F32, (rank + size - 1) % size,
                              &work[1]));
        RANKS_TRY(dtrain_work_wait(work[0]));
        RANKS_TRY(dtrain_work_wait(work[1]));
        hash_in(hash, recv, counts[c]);
    }
    return 0;
}

static int rank_bits(dtrain_world *world, void *user)
{
    const int rank = dtrain_world_rank(world);
    const size_t room = 40001 * 2, bytes = room * sizeof(float);
    uint64_t *hash = (uint64_t *)user + rank; /* of this rank's results */
    dtrain_comm *comm = dtrain_world_comm(world), *half = NULL;
    float *own = (float *)malloc(2 * bytes);
    void *shared;
    if (!CHECK(own != NULL)) return 1;
    *hash = 0xcbf29ce484222325u;
    RANKS_TRY(dtrain_comm_alloc(comm, 2 * bytes, &shared));
    if (bits_of(comm, own, own + room, room, hash)) return 1;
    if (bits_of(comm, (float *)shared, (float *)shared + room, room, hash)) return 1;
    RANKS_TRY(dtrain_comm_split(comm, rank % 2, -rank, &half));
    if (bits_of(half, own, (float *)shared + room, room, hash)) return 1;
    dtrain_comm_destroy(half);
    dtrain_comm_free(comm, shared, 2 * bytes);
    free(own);
    return 0;
}
static void bits_in(uint32_t mode)
{
    uint64_t *plain = (uint64_t *)ranks_shared(16 * sizeof *plain), *emulated = plain + 8;
    int n, each, r;
    for (n = 1; n <= 8; n++) {
        dtrain_launch_desc desc = ranks_desc(n, mode);
        if (n > 4 && n < 8 && !test_full()) continue;
        links_run(&desc, rank_bits, plain);
        for (each = 1; each <= n; each++) {
            if (n % each) continue;
            desc = links_desc(n, each, mode, 100, 2);
            links_run(&desc, rank_bits, emulated);
            for (r = 0; r < n; r++)
                CHECK_MSG(plain[r] == emulated[r], "rank %d of %d, %d a node: other bits", r, n,
                          each);
        }
    }
}
static void test_bits_processes(void) { bits_in(DTRAIN_LAUNCH_PROCESSES); }
static void test_bits_threads(void) { bits_in(DTRAIN_LAUNCH_THREADS); }

/* ---- the formula ---- */

/* Bytes from rank i to rank j of n. */
static double pair_bytes(uint32_t kind, int i, int j, int n, int root, double bytes, int small)
{
    switch (kind) {
    case DTRAIN_COLLECTIVE_ALL_REDUCE: return small ? bytes : 2 * bytes / n;
    case DTRAIN_COLLECTIVE_REDUCE:
        if (small) return j == root ? bytes : 0;
        return (1 + (j == root)) * bytes / n;
    case DTRAIN_COLLECTIVE_BARRIER: return 0;
    default: return (void)i, bytes; /* of a slice or a piece, as the call counts */
    }
}

static int rounds_of(uint32_t kind, int nodes, int small)
{
    int rounds = 0;
    if (kind == DTRAIN_COLLECTIVE_ALL_REDUCE || kind == DTRAIN_COLLECTIVE_REDUCE)
        return small ? 1 : 2;
    if (kind != DTRAIN_COLLECTIVE_BARRIER) return 1;
    while (nodes > 1 << rounds) rounds++;
    return rounds;
}

/* Nanoseconds from the last start to the end: of the busiest lane, and the rounds. */
static double formula_ns(uint32_t kind, int n, int each, int root, size_t count, double gigabits,
                         double latency)
{
    const int pieces =
        kind == DTRAIN_COLLECTIVE_REDUCE_SCATTER || kind == DTRAIN_COLLECTIVE_ALL_TO_ALL ? n : 1;
    const size_t whole = count * 4 * (size_t)pieces;
    const int small = whole <= 4096 && whole * (size_t)n <= 32768, nodes = n / each;
    double out[64] = {0}, in[64] = {0}, most = 0;
    int i, j;
    if (nodes == 1) return 0;
    for (i = 0; i < n; i++)
        for (j = 0; j < n; j++) {
            double bytes = pair_bytes(kind, i, j, n, root, 4.0 * (double)count, small);
            if (i / each == j / each) continue;
            if (kind == DTRAIN_COLLECTIVE_BROADCAST && (i != root || j % each))
                continue; /* to a node's first rank */
            out[i / each] += bytes;
            in[j / each] += bytes;
        }
    for (i = 0; i < nodes; i++) most = fmax(most, fmax(out[i], in[i]));
    return 8 * most / gigabits + 1e3 * latency * rounds_of(kind, nodes, small);
}

/* What the slots and works tell after an operation: the last start and the last due time of all ranks. */
typedef struct stamps {
    uint64_t start, due;
} stamps;

static dtrain_result all_stamps(dtrain_world *world, const dtrain_work *work, stamps *latest)
{
    const links_work *local = link_work(work);
    stamps mine, all[64];
    int i;
    memset(latest, 0, sizeof *latest);
    mine.start = local->started_ns;
    mine.due = local->due_ns;
    TRY(dtrain_world_all_gather(world, &mine, sizeof mine, all));
    for (i = 0; i < dtrain_world_size(world); i++) {
        if (all[i].start > latest->start) latest->start = all[i].start;
        if (all[i].due > latest->due) latest->due = all[i].due;
    }
    return DTRAIN_OK;
}

static void check_due(const stamps *at, double expected, const char *what)
{
    const double took = at->due ? (double)(at->due - at->start) : 0;
    CHECK_MSG(took >= expected && took <= expected + SLACK_NS,
              "%s: due after %.0f ns, the formula says %.0f", what, took, expected);
}

static int rank_formula(dtrain_world *world, void *user)
{
    static const size_t counts[] = {1, 300, 25000};
    const dtrain_launch_desc *desc = (const dtrain_launch_desc *)user;
    const int n = dtrain_world_size(world), each = (int)desc->options.node_ranks;
    const double gigabits = emulated_links.gigabits_per_second, latency = emulated_links.latency_us;
    dtrain_comm *comm = dtrain_world_comm(world);
    size_t k, c;
    void *memory;
    RANKS_TRY(dtrain_comm_alloc(comm, 2 * 25000 * 8 * 4, &memory));
    for (k = 0; k < KINDS - 1; k++)
        for (c = 0; c < sizeof counts / sizeof *counts; c++) {
            const int root = (int)(k + c) % n;
            const double expected =
                formula_ns(kinds[k], n, each, root, counts[c], gigabits, latency);
            char name[64];
            dtrain_work *work;
            stamps at;
            double begin = test_seconds(), took;
            RANKS_TRY(call(comm, kinds[k], (float *)memory, (float *)memory + 25000 * 8, counts[c],
                           root, &work));
            RANKS_TRY(dtrain_work_wait(work));
            took = test_seconds() - begin;
            snprintf(name, sizeof name, "%dx%d %s %zu", n / each, each, kind_names[k], counts[c]);
            CHECK_MSG(1e9 * took >= expected, "%s took %.0f ns, its links need %.0f", name,
                      1e9 * took, expected);
            RANKS_TRY(all_stamps(world, work, &at));
            check_due(&at, expected, name);
        }
    {
        double begin = test_seconds();
        RANKS_TRY(dtrain_barrier(comm));
        CHECK(1e9 * (test_seconds() - begin) >=
              formula_ns(DTRAIN_COLLECTIVE_BARRIER, n, each, -1, 0, gigabits, latency));
    }
    dtrain_comm_free(comm, memory, 2 * 25000 * 8 * 4);
    return 0;
}
static void test_formula(void)
{
    static const int shapes[][2] = {{2, 1}, {8, 4}, {8, 2}, {8, 1}, {3, 1}, {4, 4}};
    size_t i;
    for (i = 0; i < 2 * sizeof shapes / sizeof *shapes; i++) {
        dtrain_launch_desc desc =
            links_desc(shapes[i / 2][0], shapes[i / 2][1], (uint32_t)(i % 2), 1.25, 300);
        links_run(&desc, rank_formula, &desc);
    }
}

/* ---- operations at the same time ---- */

/* Two pairs of nodes do not see each other; two operations of one pair queue; what a rank computes in the
 * meantime costs the transfer nothing. */
static int rank_queue(dtrain_world *world, void *user)
{
    enum { COUNT = 200000 };
    const int rank = dtrain_world_rank(world);
    const double expected = formula_ns(DTRAIN_COLLECTIVE_ALL_REDUCE, 2, 1, -1, COUNT, 1, 50),
                 bytes_ns = 8.0 * COUNT * 4;
    dtrain_comm *comm = dtrain_world_comm(world), *pair;
    dtrain_work *work[2];
    const links_work *local[2];
    stamps at[4], mine;
    void *memory;
    int i;
    (void)user;
    RANKS_TRY(dtrain_comm_split(comm, rank / 2, rank, &pair));
    RANKS_TRY(dtrain_comm_alloc(comm, 2 * COUNT * 4, &memory));
    for (i = 0; i < 2; i++) {
        float *buffer = (float *)memory + i * COUNT;
        RANKS_TRY(dtrain_all_reduce(pair, buffer, buffer, COUNT, DTRAIN_DTYPE_F32,
                                    DTRAIN_REDUCE_SUM, &work[i]));
        local[i] = link_work(work[i]);
    }
    ranks_sleep_us(20000); /* longer than the transfers: nobody looks, and they end all the same */
    RANKS_TRY(dtrain_work_wait(work[0]));
    RANKS_TRY(dtrain_work_wait(work[1]));
    CHECK(local[0]->due_ns && local[1]->due_ns >= local[0]->due_ns + (uint64_t)bytes_ns);
    mine.start = local[0]->started_ns;
    mine.due = local[0]->due_ns;
    RANKS_TRY(dtrain_world_all_gather(world, &mine, sizeof mine, at));
    for (i = rank / 2 * 2; i < rank / 2 * 2 + 2; i++)
        if (at[i].start > mine.start) mine.start = at[i].start;
    check_due(&mine, expected, "first of two");
    dtrain_comm_destroy(pair);
    return 0;
}
static void test_queue(void) { links_run_modes(4, 1, 50, rank_queue); }

/* One rank looks at all its operations again and again while the other starts the same ones: whatever it
 * sees first, the links carry what was started first. */
static int rank_order(dtrain_world *world, void *user)
{
    enum { ROUNDS = 200, AT_ONCE = 24 };
    dtrain_comm *comm = dtrain_world_comm(world);
    float *memory = (float *)calloc(AT_ONCE, sizeof *memory);
    dtrain_work *work[AT_ONCE];
    int round, i, late = 0;
    (void)user;
    if (!CHECK(memory != NULL)) return 1;
    for (round = 0; round < ROUNDS; round++) {
        RANKS_TRY(dtrain_barrier(comm));
        if (dtrain_world_rank(world) == round % 2) ranks_sleep_us(100);
        for (i = 0; i < AT_ONCE; i++)
            RANKS_TRY(dtrain_all_reduce(comm, &memory[i], &memory[i], 1, DTRAIN_DTYPE_F32,
                                        DTRAIN_REDUCE_SUM, &work[i]));
        for (i = 0; i < AT_ONCE; i++) RANKS_TRY(dtrain_work_wait(work[i]));
        for (i = 1; i < AT_ONCE; i++)
            late += link_work(work[i])->due_ns <= link_work(work[i - 1])->due_ns;
    }
    CHECK_MSG(!late, "%d of %d operations were due before the one started before them", late,
              ROUNDS * (AT_ONCE - 1));
    free(memory);
    return 0;
}
static void test_order(void) { links_run_modes(2, 10, 0, rank_order); }

/* Groups inside a node are as fast as without emulation: nothing is booked. */
static int rank_inside(dtrain_world *world, void *user)
{
    const int rank = dtrain_world_rank(world);
    dtrain_comm *inside;
    dtrain_work *work;
    float value[2] = {1, 2};
    dtrain_world_info info;
    (void)user;
    dtrain_world_query(world, &info);
    RANKS_TRY(dtrain_comm_split(dtrain_world_comm(world), info.node, rank, &inside));
    RANKS_TRY(
        dtrain_all_reduce(inside, value, value, 2, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, &work));
    RANKS_TRY(dtrain_work_wait(work));
    CHECK(link_work(work)->due_ns == 0); /* no stage for the links */
    CHECK(value[0] == 2 && value[1] == 4);
    dtrain_comm_destroy(inside);
    return 0;
}
static void test_inside(void)
{
    dtrain_launch_desc desc = links_desc(4, 2, DTRAIN_LAUNCH_THREADS, 1, 100);
    links_run(&desc, rank_inside, NULL);
}

/* ---- messages ---- */

static int rank_messages(dtrain_world *world, void *user)
{
    static const size_t counts[] = {0, 1, 20000, 300000};
    const int rank = dtrain_world_rank(world);
    dtrain_comm *comm = dtrain_world_comm(world);
    float *buffer = (float *)malloc(300000 * sizeof *buffer);
    size_t c;
    (void)user;
    if (!CHECK(buffer != NULL)) return 1;
    for (c = 0; c < sizeof counts / sizeof *counts; c++) {
        const double link_ns = 8.0 * 4 * (double)counts[c], latency_ns = 100e3; /* 1 Gb/s */
        uint64_t starts[2], dues[2], mine;
        dtrain_work *work;
        double begin, took;
        RANKS_TRY(dtrain_barrier(comm));
        begin = test_seconds();
        if (rank == 0) RANKS_TRY(dtrain_send(comm, buffer, counts[c], DTRAIN_DTYPE_F32, 1, &work));
        else RANKS_TRY(dtrain_recv(comm, buffer, counts[c], DTRAIN_DTYPE_F32, 0, &work));
        RANKS_TRY(dtrain_work_wait(work));
        took = 1e9 * (test_seconds() - begin);
        mine = link_work(work)->started_ns;
        RANKS_TRY(dtrain_world_all_gather(world, &mine, sizeof mine, starts));
        mine = link_work(work)->due_ns;
        RANKS_TRY(dtrain_world_all_gather(world, &mine, sizeof mine, dues));
        if (rank == 1)
            CHECK_MSG(took >= link_ns + latency_ns || starts[0] < starts[1], "%.0f ns", took);
        if (rank == 0 &&
            counts[c] == 300000) /* does not fit into the channel: ends with the receiver */
            CHECK_MSG(took >= link_ns || starts[1] < starts[0], "sent in %.0f ns", took);
        {
            stamps at;
            at.start = starts[0] > starts[1] ? starts[0] : starts[1];
            at.due = dues[1];
            check_due(&at, link_ns + latency_ns, "message");
        }
    }
    free(buffer);
    return 0;
}
static void test_messages(void) { links_run_modes(2, 1, 100, rank_messages); }

/* ---- waiting ---- */

static double thread_cpu(void)
{
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* How often this thread has given up the processor for something else than a yield. */
static long thread_sleeps(void)
{
    struct rusage usage;
    getrusage(RUSAGE_THREAD, &usage);
    return usage.ru_nvcsw;
}

/* 2 MB at 0.1 Gb/s: 160 ms of waiting, which must not be 160 ms of computing. Beside busy neighbours a rank that does
 * not sleep has little processor time, too: hence the count. Each of its yields takes long there, so that the wait may
 * be over before it sleeps: then once more with a wait that is twice as long, up to 5 s. */
static int rank_sleeps(dtrain_world *world, void *user)
{
    enum { COUNT = 500000, TRIES = 6 };
    dtrain_comm *comm = dtrain_world_comm(world);
    dtrain_comm_info was, now;
    void *memory;
    double cpu, wall;
    int i;
    (void)user;
    RANKS_TRY(dtrain_comm_alloc(comm, ((size_t)COUNT << TRIES) * 2, &memory));
    for (i = 0; i < TRIES; i++) {
        int32_t slept, all[2];
        long sleeps;
        RANKS_TRY(dtrain_barrier(comm));
        dtrain_comm_query(comm, &was);
        sleeps = thread_sleeps();
        cpu = thread_cpu();
        wall = test_seconds();
        RANKS_TRY(dtrain_all_reduce(comm, memory, memory, (size_t)COUNT << i, DTRAIN_DTYPE_F32,
                                    DTRAIN_REDUCE_SUM, NULL));
        wall = test_seconds() - wall;
        cpu = thread_cpu() - cpu;
        sleeps = thread_sleeps() - sleeps;
        dtrain_comm_query(comm, &now);
        CHECK_MSG(wall >= 0.16, "%.4f s", wall);
        CHECK_MSG(now.flight_seconds - was.flight_seconds >= 0.16, "in flight for %.4f s",
                  now.flight_seconds - was.flight_seconds);
        slept = sleeps >= 20 && (cpu < 0.5 * wall || RANKS_SANITIZED);
        CHECK_MSG(slept || i + 1 < TRIES, "slept %ld times in %.4f s, %.4f s of processor", sleeps,
                  wall, cpu);
        RANKS_TRY(dtrain_world_all_gather(world, &slept, sizeof slept, all));
        if (all[0] && all[1]) break;
    }
    return 0;
}
static void test_sleeps(void) { links_run_modes(2, 0.1, 0, rank_sleeps); }

/* ---- deadlines and deaths ---- */

/* 4 MB at 0.001 Gb/s: half a minute. */
static int rank_too_slow(dtrain_world *world, void *user)
{
    float *memory = (float *)calloc(1000000, sizeof *memory);
    const int message = *(const int *)user, rank = dtrain_world_rank(world);
    dtrain_comm *comm = dtrain_world_comm(world);
    dtrain_result result;
    RANKS_TRY(dtrain_barrier(comm)); /* all are there: what takes time is the link */
    if (!message)
        result = dtrain_all_reduce(comm, memory, memory, 1000000, DTRAIN_DTYPE_F32,
                                   DTRAIN_REDUCE_SUM, NULL);
    else if (rank) result = dtrain_recv(comm, memory, 1000000, DTRAIN_DTYPE_F32, 0, NULL);
    else result = dtrain_send(comm, memory, 1000000, DTRAIN_DTYPE_F32, 1, NULL);
    CHECK_MSG(result == DTRAIN_ERROR_TIMEOUT, "%s", dtrain_result_text(result));
    CHECK_MSG(strstr(dtrain_last_error(), "raise timeout_ms") != NULL, "%s", dtrain_last_error());
    free(memory);
    return 0;
}
static void test_too_slow(void)
{
    int i;
    for (i = 0; i < 2 * MODES; i++) {
        int message = i / 2;
        dtrain_launch_desc desc = links_desc(2, 1, (uint32_t)(i % 2), 0.001, 0);
        desc.timeout_ms = 2500; /* both ranks have started long before */
        links_run(&desc, rank_too_slow, &message);
    }
}

static int rank_dies(dtrain_world *world, void *user)
{
    int *told = (int *)user, rank = dtrain_world_rank(world);
    float *memory = (float *)calloc(1000000, sizeof *memory);
    dtrain_work *work;
    bool done = false;
    dtrain_result result = dtrain_all_reduce(dtrain_world_comm(world), memory, memory, 1000000,
                                             DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, &work);
    if (rank == 1) RANKS_TRY(result);
    while (rank == 1 && !link_work(work)->due_ns)
        RANKS_TRY(dtrain_work_test(work, &done)); /* until it waits for nothing but the link */
    if (rank == 1) raise(SIGKILL);
    if (result == DTRAIN_OK) result = dtrain_work_wait(work); /* the start may hear of it already */
    told[rank] = result == DTRAIN_ERROR_PEER && strstr(dtrain_last_error(), "rank 1") != NULL;
    free(memory);
    return 0;
}
static void test_dies(void)
{
    int *told = (int *)ranks_shared(64);
    dtrain_launch_info info;
    dtrain_launch_desc desc = links_desc(3, 1, DTRAIN_LAUNCH_PROCESSES, 0.001, 0);
    CHECK(ranks_launch(&desc, rank_dies, told, &info) == DTRAIN_ERROR_RANK_FAILED);
    CHECK_MSG(info.first_failed_rank == 1 && info.seconds < 10, "rank %d after %.1f s",
              info.first_failed_rank, info.seconds);
    CHECK(told[0] && told[2]);
}

/* ---- bad values ---- */

static int rank_never(dtrain_world *world, void *user)
{
    (void)world, (void)user;
    CHECK_MSG(0, "a rank ran");
    return 0;
}

static void refused(const dtrain_launch_desc *desc, dtrain_result code, const char *words)
{
    dtrain_result result = dtrain_launch(desc, rank_never, NULL, NULL);
    CHECK_MSG(result == code && strstr(dtrain_last_error(), words), "%s: %s",
              dtrain_result_text(result), dtrain_last_error());
}

static void test_bad_values(void)
{
    static const uint32_t nodes[] = {3, 8, 65536, 0xffffffffu};
    for (size_t i = 0; i < sizeof nodes / sizeof *nodes; i++) {
        dtrain_launch_desc desc = ranks_desc(4, 0);
        desc.options.node_ranks = nodes[i];
        refused(&desc, DTRAIN_ERROR_ARGUMENT, "node_ranks");
    }
}

/* Without links, too, nodes count as hosts. */
static int rank_local_named(dtrain_world *world, void *user)
{
    (void)user;
    dtrain_world_info info;
    dtrain_world_query(world, &info);
    CHECK(info.node_count == 2);
    return 0;
}
static void test_local_by_name(void)
{
    dtrain_launch_desc desc = ranks_desc(2, 0);
    desc.options.node_ranks = 1;
    CHECK(dtrain_comm_ops_by_name("local", &desc.comm_ops) == DTRAIN_OK);
    links_run(&desc, rank_local_named, NULL);
}

/* ---- ranks of a launcher ---- */

typedef struct joined {
    int good[4];
} joined;

static int rank_joined(dtrain_world *world, void *user)
{
    joined *all = (joined *)user;
    const int rank = dtrain_world_rank(world);
    float one = 1;
    dtrain_world_info info;
    double begin = test_seconds();
    RANKS_TRY(dtrain_all_reduce(dtrain_world_comm(world), &one, &one, 1, DTRAIN_DTYPE_F32,
                                DTRAIN_REDUCE_SUM, NULL));
    CHECK(test_seconds() - begin >= 0.01 && one == 4);
    dtrain_world_query(world, &info);
    all->good[rank] = info.node == rank / 2 && info.node_count == 2 &&
                      info.local_rank == rank % 2 && info.local_size == 2;
    return 0;
}

typedef enum join_how {
    ALIKE,
    OTHER_RATE,
    OTHER_NODES,
    TWO_HOSTS
} join_how; /* rank 3, ranks 2 and 3 */

static int become_a_host(const char *name)
{
    return unshare(CLONE_NEWUTS) == 0 && sethostname(name, strlen(name)) == 0;
}

/* Four processes, each told who it is, as a launcher does it; returns how many failed. */
static int join_all(joined *all, join_how how, char text[4][512])
{
    pid_t pids[4];
    int r, status, failures = 0;
    char *page = (char *)ranks_shared(4 * 512);
    char port[16];
    snprintf(port, sizeof port, "%d", ports_next());
    for (r = 0; r < 4; r++) {
        fflush(NULL);
        pids[r] = fork();
        if (pids[r]) continue;
        {
            char number[16];
            dtrain_launch_desc desc = links_desc(0, 2, 0, 1, 10000);
            dtrain_result result;
            if (how == OTHER_RATE && r == 3) emulated_links.gigabits_per_second = 2;
            if (how == OTHER_NODES && r == 3) emulate_links(&desc, 1, 1, 10000);
            if (how == TWO_HOSTS && !become_a_host(r < 2 ? "links-0" : "links-1")) _exit(77);
            snprintf(number, sizeof number, "%d", r);
            setenv("DTRAIN_RANK", number, 1);
            setenv("DTRAIN_WORLD_SIZE", "4", 1);
            setenv("DTRAIN_MASTER_ADDR", "127.0.0.1", 1);
            setenv("DTRAIN_PORT", port, 1);
            result = dtrain_launch(&desc, rank_joined, all, NULL);
            if (result != DTRAIN_OK) snprintf(page + 512 * r, 512, "%.500s", dtrain_last_error());
            _exit(result != DTRAIN_OK);
        }
    }
    for (r = 0; r < 4; r++) {
        waitpid(pids[r], &status, 0);
        failures += status != 0;
        memcpy(text[r], page + 512 * r, 512);
    }
    return failures;
}
static void test_joined(void)
{
    joined *all = (joined *)ranks_shared(sizeof *all);
    char text[4][512];
    int failures = join_all(all, ALIKE, text);
    CHECK_MSG(failures == 0, "%d ranks failed: %s%s", failures, text[0], text[1]);
    CHECK(all->good[0] && all->good[1] && all->good[2] && all->good[3]);
}
static void join_refused(join_how how, const char *words)
{
    joined *all = (joined *)ranks_shared(sizeof *all);
    char text[4][512];
    int r, failures = join_all(all, how, text);
    CHECK_MSG(failures == 4, "%d ranks failed", failures);
    for (r = 0; r < 4; r++) CHECK_MSG(strstr(text[r], words) != NULL, "rank %d: %s", r, text[r]);
}
static void test_joined_differ(void)
{
    join_refused(OTHER_RATE, "emulated links differ");
    join_refused(OTHER_NODES, "emulated links differ");
}
static void test_two_hosts(void) { join_refused(TWO_HOSTS, "4 ranks on 2 hosts share no memory"); }
static int can_be_a_host(void)
{
    int status = 1;
    const pid_t pid = fork();
    if (pid == 0) _exit(!become_a_host("links"));
    return waitpid(pid, &status, 0) == pid && status == 0;
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    RUN(test_numbers);
    RUN(test_cores);
    RUN_NUMBERS(test_bits_processes);
    RUN(test_bits_threads);
    RUN(test_formula);
    RUN(test_queue);
    RUN(test_order);
    RUN(test_inside);
    RUN(test_messages);
    RUN(test_sleeps);
    RUN(test_too_slow);
    RUN(test_dies);
    RUN(test_bad_values);
    RUN(test_local_by_name);
    RUN(test_joined);
    RUN(test_joined_differ);
    if (can_be_a_host()) RUN(test_two_hosts);
    else SKIP(test_two_hosts, "no UTS namespaces here: needs root");
    return test_summary();
}
