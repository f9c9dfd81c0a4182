/* test_comm.c: communicators against loops one can check by eye, those of tests/support/naive_comm.h.
 *
 *   DTRAIN_TEST_FULL=1   the whole cross product instead of a walk through it */
#include "test.h"
#include "dtrain.h"
#include "ranks.h"
#include "naive_comm.h"
#include <limits.h>
#include <sys/syscall.h>
#include <sys/uio.h>

/* The kernel's call that lets ranks read each other's memory, as the library sees it: refused, as yama and seccomp do,
 * or failing at the call that counts reads_left down to 0. */
static bool refuse_reads;
static int reads_left;
ssize_t process_vm_readv(pid_t pid, const struct iovec *to, unsigned long to_count,
                         const struct iovec *from, unsigned long from_count, unsigned long flags)
{
    if (refuse_reads || (reads_left && !--reads_left)) {
        errno = refuse_reads ? EPERM : EFAULT;
        return -1;
    }
    return syscall(SYS_process_vm_readv, (long)pid, to, to_count, from, from_count, flags);
}

/* ---- every collective, dtype, operation, number of ranks ---- */

typedef int (*visit_fn)(const desk *d, call *c, uint64_t number);

static int run_varied(const desk *d, call *c, uint64_t number)
{
    uint64_t v, variants = test_draws(1, 8, 32);
    for (v = 0; v < variants; v++) {
        vary(c, d, test_full() ? v * (uint64_t)d->size + number : ranks_mix(number) >> 7);
        if (!run_call(d, c)) return 0;
    }
    return 1;
}

/* Calls visit for each (kind, dtype, op) with this count. */
static int each_type(const desk *d, size_t count, uint64_t *number, visit_fn visit)
{
    size_t k, t, o;
    for (k = 0; k < KINDS; k++)
        for (t = 0; t < 6; t++)
            for (o = 0; o < (has_op(kinds[k]) ? 5u : 1u); o++) {
                call c = make_call(kinds[k], dtypes[t], ops[o], count, ++*number);
                if (c.op == DTRAIN_REDUCE_MEAN && is_integer(c.dtype)) continue;
                if (!visit(d, &c, *number)) return 0;
            }
    return 1;
}

static int rank_every_type(dtrain_world *world, void *user)
{
    size_t counts[] = {0, 1, 2, 13, 70, 1031}, i;
    uint64_t number = 0;
    desk d;
    (void)user;
    if (open_desk(&d, world, 1031 * 8 * (size_t)dtrain_world_size(world))) return 1;
    counts[2] = (size_t)d.size - 1;
    for (i = 0; i < sizeof counts / sizeof *counts; i++)
        if (!each_type(&d, counts[i], &number, run_varied)) return 1;
    close_desk(&d);
    return 0;
}

static void test_every_type_threads(void)
{
    int ranks;
    for (ranks = 1; ranks <= 8; ranks++)
        ranks_run(ranks, DTRAIN_LAUNCH_THREADS, rank_every_type, NULL);
}
static void test_every_type_processes(void)
{
    int ranks;
    for (ranks = 1; ranks <= 8; ranks++)
        ranks_run(ranks, DTRAIN_LAUNCH_PROCESSES, rank_every_type, NULL);
}

/* ---- sizes ---- */

static int rank_sizes_to_70(dtrain_world *world, void *user)
{
    size_t count, k;
    uint64_t number = 77, v;
    desk d;
    (void)user;
    if (open_desk(&d, world, 70 * 8 * (size_t)dtrain_world_size(world))) return 1;
    for (count = 0; count <= 70; count++)
        for (k = 0; k < KINDS; k++)
            for (v = 0; v < test_draws(2, 6, 16); v++) {
                call c =
                    make_call(kinds[k], dtypes[number % 3], ops[number / 3 % 2], count, number);
                number++;
                vary(&c, &d, test_full() ? v * (uint64_t)d.size : ranks_mix(number) >> 9);
                if (!run_call(&d, &c)) return 1;
            }
    close_desk(&d);
    return 0;
}

static void test_sizes_to_70(void)
{
    int ranks;
    for (ranks = 1; ranks <= 9; ranks++)
        ranks_run(ranks, ranks % 2 ? DTRAIN_LAUNCH_THREADS : DTRAIN_LAUNCH_PROCESSES,
                  rank_sizes_to_70, NULL);
}

/* Limits hide at powers of two: inline messages, slots, chunks, pages. Counts around each of them, for
 * the whole buffer and for a rank's slice of it. */
static size_t rank_limit(int ranks)
{
    if (test_full() > 1) return (size_t)1 << (ranks > 4 ? 19 : 21);
    return (size_t)1 << (RANKS_SANITIZED ? 16 : ranks == 2 ? 20 : 18);
}
static int rank_limits(dtrain_world *world, void *user)
{
    static const int nudges[] = {-1, 0, 1, 17};
    size_t bytes, limit = rank_limit(dtrain_world_size(world)), n;
    uint64_t number = 1234;
    desk d;
    (void)user;
    if (open_desk(&d, world, (limit + 1024) * (size_t)dtrain_world_size(world))) return 1;
    for (bytes = 256; bytes <= limit; bytes *= 2)
        for (n = 0; n < 4; n++) {
            call c = make_call(kinds[number % KINDS], dtypes[number / 2 % 3], DTRAIN_REDUCE_SUM, 0,
                               number);
            size_t spread =
                number % 3 == 0 && c.kind == DTRAIN_COLLECTIVE_ALL_REDUCE ? (size_t)d.size : 1;
            int v;
            number++;
            c.count = bytes / dtrain_dtype_bytes(c.dtype) * spread + (size_t)(nudges[n] + 1) - 1;
            if (c.count * dtrain_dtype_bytes(c.dtype) > limit + 1024) continue;
            if (bytes > 70000 && n % 2 == 0 && !test_full()) continue;
            for (v = 0; v < (bytes <= 70000 ? 4 : test_full() ? 2 : 1); v++) {
                vary(&c, &d, ranks_mix(number + (uint64_t)v * 1000) >> 5);
                if (!run_call(&d, &c)) return 1;
            }
        }
    close_desk(&d);
    return 0;
}

static void test_limits(void)
{
    int ranks, m;
    for (ranks = 2; ranks <= (test_full() ? 8 : 4); ranks++)
        for (m = 0; m < MODES; m++) ranks_run(ranks, (uint32_t)m, rank_limits, NULL);
}

static int rank_primes(dtrain_world *world, void *user)
{
    static const size_t primes[] = {97,   127,  251,   509,   1021,  2039,
                                    4093, 8191, 16381, 65521, 131071};
    size_t i;
    uint64_t number = 555;
    desk d;
    (void)user;
    if (open_desk(&d, world, 131071 * 4 * (size_t)dtrain_world_size(world))) return 1;
    for (i = 0; i < sizeof primes / sizeof *primes; i++) {
        call c = make_call(kinds[i % KINDS], dtypes[i % 4], ops[i % 2 * 2], primes[i], ++number);
        vary(&c, &d, ranks_mix(number) >> 3);
        if (!run_call(&d, &c)) return 1;
    }
    close_desk(&d);
    return 0;
}
static void test_primes(void)
{
    ranks_run(3, DTRAIN_LAUNCH_PROCESSES, rank_primes, NULL);
    ranks_run(7, DTRAIN_LAUNCH_THREADS, rank_primes, NULL);
}

/* Larger than any buffer of the library: 9 MiB and a bit, everywhere. */
static int rank_large(dtrain_world *world, void *user)
{
    size_t count = ((size_t)9 << (RANKS_SANITIZED ? 14 : 18)) + 5, k;
    int v;
    desk d;
    (void)user;
    if (open_desk(&d, world, count * 4)) return 1;
    for (k = 0; k < KINDS; k++)
        for (v = 0; v < 4; v++) {
            bool whole;
            call c;
            if ((k + (size_t)v) % 2 && !test_full()) continue;
            whole = kinds[k] == DTRAIN_COLLECTIVE_REDUCE_SCATTER ||
                    kinds[k] == DTRAIN_COLLECTIVE_ALL_GATHER ||
                    kinds[k] == DTRAIN_COLLECTIVE_ALL_TO_ALL;
            c = make_call(kinds[k], DTRAIN_DTYPE_F32, DTRAIN_REDUCE_MEAN,
                          count / (whole ? (size_t)d.size : 1), k + 900);
            c.send_memory = v & 1;
            c.recv_memory = v >> 1;
            c.in_place = (v == 0 || v == 3) && kinds[k] != DTRAIN_COLLECTIVE_ALL_TO_ALL;
            c.root = v % d.size;
            if (!run_call(&d, &c)) return 1;
        }
    close_desk(&d);
    return 0;
}
static void test_large(void)
{
    ranks_run(2, DTRAIN_LAUNCH_PROCESSES, rank_large, NULL);
    if (test_full()) ranks_run(3, DTRAIN_LAUNCH_THREADS, rank_large, NULL);
}

/* ---- memory, alignment ---- */

static int rank_unaligned(dtrain_world *world, void *user)
{
    size_t k, t, offset;
    uint64_t number = 4242;
    desk d;
    (void)user;
    if (open_desk(&d, world, 5000 * 8 * (size_t)dtrain_world_size(world))) return 1;
    for (k = 0; k < KINDS; k++)
        for (t = 0; t < 5; t++)
            for (offset = 0; offset < 16; offset++) {
                call c = make_call(kinds[k], dtypes[t], DTRAIN_REDUCE_SUM, 0, ++number);
                c.count = number % 4 == 0 ? 4099 : 37;
                vary(&c, &d, number); /* not mixed: in place, async and memories in turn */
                c.send_offset = offset;
                c.recv_offset = (offset * 7 + (size_t)d.rank) % 16;
                if (!run_call(&d, &c)) return 1;
            }
    close_desk(&d);
    return 0;
}
static void test_unaligned(void)
{
    int m;
    for (m = 0; m < MODES; m++) {
        ranks_run(2, (uint32_t)m, rank_unaligned, NULL);
        ranks_run(3, (uint32_t)m, rank_unaligned, NULL);
    }
}

/* All sixteen placements (send, recv) x (own, neighbour's) of one call give one result. */
static int mix_memories(desk *d)
{
    static const size_t counts[] = {5, 300, 3000, 70001};
    size_t i, k;
    int mask;
    for (i = 0; i < 4; i++)
        for (k = 0; k < KINDS; k++)
            for (mask = 0; mask < 16; mask++) {
                call c =
                    make_call(kinds[k], DTRAIN_DTYPE_F32, DTRAIN_REDUCE_MEAN, counts[i], i + 31);
                if (i == 3 && !test_full() && mask % 5) continue;
                c.send_memory = mask >> (d->rank % 2 * 2) & 1;
                c.recv_memory = mask >> (d->rank % 2 * 2 + 1) & 1;
                if (!run_call(d, &c)) return 1;
            }
    return 0;
}
static int rank_memory_mix(dtrain_world *world, void *user)
{
    int status;
    desk d;
    (void)user;
    if (open_desk(&d, world, 70001 * 4 * (size_t)dtrain_world_size(world))) return 1;
    status = mix_memories(&d);
    close_desk(&d);
    return status;
}
static void test_memory_mix(void)
{
    int m;
    for (m = 0; m < MODES; m++) {
        ranks_run(2, (uint32_t)m, rank_memory_mix, NULL);
        ranks_run(4, (uint32_t)m, rank_memory_mix, NULL);
    }
}

/* Private memory that no rank, or only some ranks, can read travels through stages: the same results. */
static int rank_refused(dtrain_world *world, void *user)
{
    const int others = *(int *)user;
    dtrain_comm *comm;
    int status;
    desk d;
    refuse_reads = dtrain_world_rank(world) % 2 || others;
    RANKS_TRY(dtrain_comm_split(dtrain_world_comm(world), 0, 0, &comm));
    if (open_desk_on(&d, comm, 70001 * 4 * (size_t)dtrain_world_size(world))) return 1;
    status = mix_memories(&d);
    close_desk(&d);
    dtrain_comm_destroy(comm);
    return status;
}
static void test_refused_reads(void)
{
    int others;
    for (others = 0; others < 2; others++) {
        ranks_run(2, DTRAIN_LAUNCH_PROCESSES, rank_refused, &others);
        ranks_run(3, DTRAIN_LAUNCH_PROCESSES, rank_refused, &others);
    }
}

/* A message that turns out to be unreadable is an error on both ranks, and the rank that has it is named. */
static int rank_unreadable(dtrain_world *world, void *user)
{
    const size_t count = (size_t)1 << 20;
    dtrain_comm *comm = dtrain_world_comm(world);
    float *buffer = (float *)calloc(count, sizeof *buffer);
    dtrain_result result;
    (void)user;
    if (!buffer) return 1;
    RANKS_TRY(dtrain_barrier(comm));
    if (dtrain_world_rank(world) == 1) reads_left = 1;
    if (dtrain_world_rank(world) == 0)
        result = dtrain_send(comm, buffer, count, DTRAIN_DTYPE_F32, 1, NULL);
    else result = dtrain_recv(comm, buffer, count, DTRAIN_DTYPE_F32, 0, NULL);
    CHECK_MSG(result == DTRAIN_ERROR_PEER, "%s", dtrain_result_text(result));
    CHECK_MSG(strstr(dtrain_last_error(), "rank 0's buffer of") &&
                  strstr(dtrain_last_error(), "cannot be read"),
              "%s", dtrain_last_error());
    free(buffer);
    return 0;
}
static void test_unreadable(void) { ranks_run(2, DTRAIN_LAUNCH_PROCESSES, rank_unreadable, NULL); }

/* Private memory travels in chunks around a buffer, and no rank waits at the end of an operation: the chunk that a
 * slow rank still has to read must survive what faster ranks write for the next two operations. */
static int rank_slow_reader(dtrain_world *world, void *user)
{
    static const size_t bytes[] = {4100,   9000,    131072,  524288, 524352,
                                   600000, 1048640, 2097152, 2500000};
    const size_t most = 2500000 / sizeof(float);
    dtrain_comm *comm = dtrain_world_comm(world);
    const int rank = dtrain_world_rank(world), size = dtrain_world_size(world);
    uint64_t state = 4711;
    float *buffers[3];
    int i, turn;
    (void)user;
    for (i = 0; i < 3; i++) {
        buffers[i] = (float *)calloc(most * (size_t)size, sizeof(float));
        if (!buffers[i]) return 1;
    }
    for (turn = 0; turn < (int)test_draws(30, 60, 300); turn++) {
        const int slow = (int)ranks_random(&state, (uint64_t)size);
        size_t counts[3], k;
        dtrain_work *works[3];
        for (i = 0; i < 3; i++) {
            float *buffer = buffers[i];
            counts[i] = bytes[ranks_random(&state, 9)] / sizeof(float);
            float *own = buffer + counts[i] * (size_t)rank;
            for (k = 0; k < counts[i] * (size_t)size; k++)
                buffer[k] = (float)(rank + 1) + (float)((k + (size_t)turn) % 7);
            if ((turn + i) % 3 == 0)
                RANKS_TRY(dtrain_all_reduce(comm, buffer, buffer, counts[i], DTRAIN_DTYPE_F32,
                                            DTRAIN_REDUCE_SUM, &works[i]));
            else if ((turn + i) % 3 == 1)
                RANKS_TRY(
                    dtrain_all_gather(comm, own, buffer, counts[i], DTRAIN_DTYPE_F32, &works[i]));
            else
                RANKS_TRY(dtrain_reduce_scatter(comm, buffer, own, counts[i], DTRAIN_DTYPE_F32,
                                                DTRAIN_REDUCE_SUM, &works[i]));
        }
        for (i = 0; i < 3; i++) {
            const float ones = (float)(size * (size + 1)) / 2;
            size_t wrong = 0;
            bool done = rank != slow;
            while (!done) { /* goes as far as it can without the others, who then take a step */
                usleep(200);
                RANKS_TRY(dtrain_work_test(works[i], &done));
            }
            RANKS_TRY(dtrain_work_wait(works[i]));
            const bool joins = (turn + i) % 3 == 1, cuts = (turn + i) % 3 == 2;
            for (k = 0; k < counts[i] * (joins ? (size_t)size : 1); k++) {
                const size_t at = k + (cuts ? counts[i] * (size_t)rank : 0);
                const float step = (float)((at + (size_t)turn) % 7);
                wrong += buffers[i][at] !=
                         (joins ? (float)(k / counts[i] + 1) + step : ones + (float)size * step);
            }
            CHECK_MSG(!wrong, "turn %d, operation %d of %zu: %zu wrong", turn, i, counts[i], wrong);
        }
    }
    for (i = 0; i < 3; i++) free(buffers[i]);
    return 0;
}
static void test_slow_reader(void)
{
    ranks_run(2, DTRAIN_LAUNCH_PROCESSES, rank_slow_reader, NULL);
    ranks_run(3, DTRAIN_LAUNCH_THREADS, rank_slow_reader, NULL);
}

/* ---- anything after anything ---- */

static int rank_random_calls(dtrain_world *world, void *user)
{
    uint64_t state = *(uint64_t *)user;
    size_t most = 66000;
    int i;
    desk d;
    if (open_desk(&d, world, most * 8 * (size_t)dtrain_world_size(world))) return 1;
    for (i = 0; i < (int)test_draws(250, 500, 2000); i++) {
        call c = make_call(kinds[ranks_random(&state, KINDS)], dtypes[ranks_random(&state, 5)],
                           ops[ranks_random(&state, 5)], 0, ranks_random(&state, 0));
        size_t size = (size_t)1 << ranks_random(
                          &state, i % 8 ? 15 : 17); /* some are read from rank to rank */
        c.count = ranks_random(&state, size);
        c.seed = state;
        if (c.op == DTRAIN_REDUCE_MEAN && is_integer(c.dtype)) c.op = DTRAIN_REDUCE_MAX;
        vary(&c, &d, ranks_random(&state, 1u << 30));
        if (i % 31 == 30) RANKS_TRY(dtrain_barrier(d.comm));
        if (!run_call(&d, &c)) return 1;
    }
    close_desk(&d);
    return 0;
}
static void test_random_calls(void)
{
    uint64_t seed;
    for (seed = 1; seed <= test_draws(8, 16, 40); seed++)
        ranks_run((int)(seed % 4) + 2, seed % 3 ? DTRAIN_LAUNCH_PROCESSES : DTRAIN_LAUNCH_THREADS,
                  rank_random_calls, &seed);
}

static int rank_of_many(dtrain_world *world, void *user)
{
    static const size_t counts[] = {1, 63, 1000};
    size_t i, k;
    desk d;
    (void)user;
    if (open_desk(&d, world, (size_t)1000 * 64 * 4)) return 1;
    for (i = 0; i < 3; i++)
        for (k = 0; k < KINDS; k++) {
            call c =
                make_call(kinds[k], DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, counts[i], k + i * 10);
            vary(&c, &d, ranks_mix(k + i) >> 4);
            if (!run_call(&d, &c)) return 1;
        }
    RANKS_TRY(dtrain_barrier(d.comm));
    close_desk(&d);
    return 0;
}
static void test_64_ranks(void)
{
    int m;
    for (m = 0; m < MODES; m++) ranks_run(64, (uint32_t)m, rank_of_many, NULL);
}

/* ---- special values ---- */

/* All pairs of a list of values on two ranks: NaN is contagious, also in min and max; infinities,
 * denormals and the largest numbers follow IEEE arithmetic in fp32. */
static int rank_special_values(dtrain_world *world, void *user)
{
    static const uint32_t list[] = {0,          0x80000000, 0x3f800000, 0xbf800000, 0x7f800000,
                                    0xff800000, 0x7fc00000, 0xffc00000, 0x7f800001, 0x00000001,
                                    0x807fffff, 0x00800000, 0x7f7fffff, 0xff7fffff, 0x33800000};
    enum { N = sizeof list / sizeof *list };
    float own[N * N], got[N * N];
    dtrain_comm *comm = dtrain_world_comm(world);
    int rank = dtrain_world_rank(world), i, o;
    (void)user;
    for (o = 0; o < 5; o++) {
        for (i = 0; i < N * N; i++) own[i] = bits_to_float(list[rank ? i % N : i / N]);
        RANKS_TRY(dtrain_all_reduce(comm, own, got, N * N, DTRAIN_DTYPE_F32, ops[o], NULL));
        for (i = 0; i < N * N; i++) {
            float a = bits_to_float(list[i / N]), b = bits_to_float(list[i % N]);
            float wanted = join_floats(ops[o], a, b);
            if (ops[o] == DTRAIN_REDUCE_MEAN) wanted *= 0.5f;
            /* which zero min and max take is not specified */
            CHECK_MSG(float_to_bits(got[i]) == float_to_bits(wanted) ||
                          (isnan(got[i]) && isnan(wanted)) ||
                          ((ops[o] == DTRAIN_REDUCE_MIN || ops[o] == DTRAIN_REDUCE_MAX) &&
                           got[i] == wanted),
                      "op %d of %08x and %08x: %08x, expected %08x", (int)ops[o], list[i / N],
                      list[i % N], float_to_bits(got[i]), float_to_bits(wanted));
        }
    }
    return 0;
}
/* The same for every fp16 and bf16 against a few partners: each rounds once, from fp32. */
static int rank_special_halves(dtrain_world *world, void *user)
{
    static const uint16_t partners[] = {0x0000, 0x3c00, 0x7bff, 0x0001,
                                        0x7c00, 0x7e00, 0xbc01, 0x3f80};
    dtrain_comm *comm = dtrain_world_comm(world);
    uint16_t *own = (uint16_t *)malloc(65536 * 2), *got = (uint16_t *)malloc(65536 * 2);
    int rank = dtrain_world_rank(world), p, t, i, bad = 0;
    (void)user;
    for (t = 1; t < 3; t++)
        for (p = 0; p < 8; p++) {
            dtrain_reduce_op op = p % 2 ? DTRAIN_REDUCE_MEAN : DTRAIN_REDUCE_SUM;
            for (i = 0; i < 65536; i++) own[i] = rank ? partners[p] : (uint16_t)i;
            RANKS_TRY(dtrain_all_reduce(comm, own, got, 65536, dtypes[t], op, NULL));
            for (i = 0; i < 65536; i++) {
                uint16_t pair[4],
                    wanted[4]; /* four, because an element may be a double elsewhere */
                float sum;
                pair[0] = (uint16_t)i;
                sum = load_float(dtypes[t], pair);
                pair[0] = partners[p];
                sum += load_float(dtypes[t], pair);
                store_float(dtypes[t], wanted, op == DTRAIN_REDUCE_MEAN ? sum * 0.5f : sum);
                if (same_element(dtypes[t], wanted, &got[i])) continue;
                if (bad++ < 3)
                    CHECK_MSG(0, "%s %04x + %04x: %04x, expected %04x",
                              dtrain_dtype_name(dtypes[t]), i, partners[p], got[i], wanted[0]);
            }
            CHECK(bad == 0);
        }
    free(own);
    free(got);
    return 0;
}
static void test_special_values(void)
{
    int m;
    for (m = 0; m < MODES; m++) {
        ranks_run(2, (uint32_t)m, rank_special_values, NULL);
        ranks_run(2, (uint32_t)m, rank_special_halves, NULL);
    }
}

/* ---- asynchronous calls ---- */

/* Each work has a buffer of its own; the first half of them in communicator memory. */
static int open_flights(dtrain_comm *comm, flight *flights, int count, size_t most, void **block,
                        size_t *bytes)
{
    size_t stride = most + 2 * GUARD + 64;
    unsigned char *private_block = (unsigned char *)malloc((size_t)count * stride);
    int i;
    *bytes = (size_t)count * stride;
    RANKS_TRY(dtrain_comm_alloc(comm, *bytes, block));
    for (i = 0; i < count; i++) {
        unsigned char *base = i % 2 ? private_block : (unsigned char *)*block;
        flights[i].send = flights[i].recv = base + (size_t)i * stride + GUARD;
    }
    block[1] = private_block;
    return 0;
}

/* Starts one call of the mixture into its own buffer, in place. */
static dtrain_result launch_flight(const desk *d, flight *f, uint64_t number, size_t most)
{
    static const uint32_t sorts[] = {DTRAIN_COLLECTIVE_ALL_REDUCE, DTRAIN_COLLECTIVE_BROADCAST,
                                     DTRAIN_COLLECTIVE_REDUCE};
    call c =
        make_call(sorts[number % 3], dtypes[number / 3 % 5], DTRAIN_REDUCE_SUM, 0, number + 17);
    size_t item = dtrain_dtype_bytes(c.dtype), i;
    c.count = ranks_mix(number) % (most / item);
    if (c.count == 0) c.count = 1;
    c.root = (int)(number % (uint64_t)d->size);
    c.in_place = c.async = true;
    c.seed &= ~(uint64_t)2;
    f->what = c;
    guard(f->recv, c.count * item);
    for (i = 0; i < c.count; i++)
        make_element(c.dtype, c.seed, d->members[d->rank], i, f->send + i * item);
    return start(d, f);
}

static int land(const desk *d, flight *f)
{
    dtrain_result result = dtrain_work_wait(f->work);
    if (!CHECK_MSG(result == DTRAIN_OK, "%s: wait: %s", describe(&f->what, d), dtrain_last_error()))
        return 0;
    return verify_output(d, f) && verify_rest(d, f);
}

/* order: 0 as started, 1 backwards, 2 shuffled differently on each rank. */
static void make_order(int *order, int count, int how, int rank)
{
    uint64_t state = (uint64_t)rank + 99;
    int i;
    for (i = 0; i < count; i++) order[i] = how == 1 ? count - 1 - i : i;
    for (i = count - 1; how == 2 && i > 0; i--) {
        int j = (int)ranks_random(&state, (uint64_t)i + 1), keep = order[i];
        order[i] = order[j];
        order[j] = keep;
    }
}

static int rank_async_many(dtrain_world *world, void *user)
{
    enum { MANY = 1000 };
    static const size_t most = 600;
    flight *flights = (flight *)calloc(MANY, sizeof(flight));
    int *order = (int *)malloc(MANY * sizeof(int)), how, i;
    void *block[2];
    size_t bytes;
    desk d;
    (void)user;
    if (open_desk(&d, world, 64)) return 1;
    if (open_flights(d.comm, flights, MANY, most, block, &bytes)) return 1;
    for (how = 0; how < 3; how++) {
        for (i = 0; i < MANY; i++) RANKS_TRY(launch_flight(&d, &flights[i], (uint64_t)i, most));
        make_order(order, MANY, how, d.rank);
        for (i = 0; i < MANY; i++)
            if (!land(&d, &flights[order[i]])) return 1;
    }
    dtrain_comm_free(d.comm, block[0], bytes);
    free(block[1]);
    free(order);
    free(flights);
    close_desk(&d);
    return 0;
}
static void test_async_many(void)
{
    int m;
    for (m = 0; m < MODES; m++) {
        ranks_run(1, (uint32_t)m, rank_async_many, NULL);
        ranks_run(2, (uint32_t)m, rank_async_many, NULL);
        ranks_run(4, (uint32_t)m, rank_async_many, NULL);
    }
}

/* Large pieces in flight, some polled with test, blocking calls between them. */
static int rank_async_mixed(dtrain_world *world, void *user)
{
    enum { SOME = 24 };
    static const size_t most = 300000;
    flight flights[SOME];
    void *block[2];
    size_t bytes;
    int i, round;
    desk d;
    (void)user;
    if (open_desk(&d, world, 4096 * 4)) return 1;
    if (open_flights(d.comm, flights, SOME, most, block, &bytes)) return 1;
    for (round = 0; round < 3; round++) {
        for (i = 0; i < SOME; i++) {
            call c = make_call(kinds[i % KINDS], DTRAIN_DTYPE_F32, DTRAIN_REDUCE_MAX, 100,
                               (uint64_t)i * 4);
            RANKS_TRY(launch_flight(&d, &flights[i], (uint64_t)(i + round), most));
            if (i % 4 == 1 && !run_call(&d, &c)) return 1; /* a blocking call overtakes nothing */
            if (i % 4 == 2) RANKS_TRY(dtrain_barrier(d.comm));
        }
        for (i = SOME - 1; i >= 0; i--) {
            bool done = false;
            double end = dtrain_seconds() + 10;
            while (i % 3 == 0 && !done && dtrain_seconds() < end)
                RANKS_TRY(dtrain_work_test(flights[i].work, &done));
            CHECK_MSG(done || i % 3, "work_test never said done");
            if (done) { /* and stays so */
                RANKS_TRY(dtrain_work_test(flights[i].work, &done));
                CHECK(done);
            }
            if (!land(&d, &flights[i])) return 1;
        }
    }
    RANKS_TRY(dtrain_work_wait(NULL));
    dtrain_comm_free(d.comm, block[0], bytes);
    free(block[1]);
    close_desk(&d);
    return 0;
}
static void test_async_mixed(void)
{
    int m;
    for (m = 0; m < MODES; m++) {
        ranks_run(1, (uint32_t)m, rank_async_mixed, NULL);
        ranks_run(2, (uint32_t)m, rank_async_mixed, NULL);
        ranks_run(3, (uint32_t)m, rank_async_mixed, NULL);
    }
}

/* "returns at once": rank 0 starts works of every size, and only when it has rank 1 comes; a poll does not
 * block either, and nothing can be done before. */
static int rank_async_at_once(dtrain_world *world, void *user)
{
    enum { SOME = 40 };
    flight flights[SOME];
    void *block[2];
    size_t bytes;
    bool done = true;
    char nothing = 0, all[2];
    int i;
    desk d;
    (void)user;
    if (open_desk(&d, world, 64)) return 1;
    if (open_flights(d.comm, flights, SOME, 100000, block, &bytes)) return 1;
    RANKS_TRY(dtrain_barrier(d.comm));
    if (d.rank == 1) RANKS_TRY(dtrain_world_all_gather(world, &nothing, 1, all));
    for (i = 0; i < SOME; i++) RANKS_TRY(launch_flight(&d, &flights[i], (uint64_t)i, 100000));
    if (d.rank == 0) {
        RANKS_TRY(dtrain_work_test(flights[0].work, &done));
        CHECK_MSG(!done, "an all-reduce was done before the other rank had called it");
        RANKS_TRY(dtrain_world_all_gather(world, &nothing, 1, all));
    }
    for (i = 0; i < SOME; i++)
        if (!land(&d, &flights[i])) return 1;
    dtrain_comm_free(d.comm, block[0], bytes);
    free(block[1]);
    close_desk(&d);
    return 0;
}
static void test_async_at_once(void)
{
    int m;
    for (m = 0; m < MODES; m++) ranks_run(2, (uint32_t)m, rank_async_at_once, NULL);
}

/* Many all-to-alls of many sizes in flight at once, with a blocking call and all-reduces between them. */
static int rank_async_all_to_all(dtrain_world *world, void *user)
{
    enum { SOME = 40, MOST = 3000 };
    flight flights[SOME];
    int order[SOME], how, i;
    desk desks[SOME];
    (void)user;
    for (i = 0; i < SOME; i++)
        if (open_desk(&desks[i], world, MOST * 8 * (size_t)dtrain_world_size(world))) return 1;
    for (how = 0; how < 3; how++) {
        for (i = 0; i < SOME; i++) {
            const uint64_t number = (uint64_t)(how * SOME + i);
            const uint32_t kind =
                i % 4 == 3 ? DTRAIN_COLLECTIVE_ALL_REDUCE : DTRAIN_COLLECTIVE_ALL_TO_ALL;
            call c = make_call(kind, dtypes[number % 5], DTRAIN_REDUCE_SUM, 0, number);
            c.count = i % 7 ? ranks_mix(number) % 90 : ranks_mix(number) % MOST;
            vary(&c, &desks[i], ranks_mix(number) >> 8);
            c.async = i % 9 != 8;
            flights[i].what = c;
            prepare(&desks[i], &flights[i]);
            RANKS_TRY(start(&desks[i], &flights[i]));
        }
        make_order(order, SOME, how, desks[0].rank);
        for (i = 0; i < SOME; i++)
            if (!land(&desks[order[i]], &flights[order[i]])) return 1;
    }
    for (i = 0; i < SOME; i++) close_desk(&desks[i]);
    return 0;
}
static void test_async_all_to_all(void)
{
    int m, ranks;
    for (m = 0; m < MODES; m++)
        for (ranks = 1; ranks <= 8; ranks += ranks < 4 ? 1 : 4)
            ranks_run(ranks, (uint32_t)m, rank_async_all_to_all, NULL);
}

/* The last barrier means: nobody leaves before everybody has come. */
static int rank_barrier_order(dtrain_world *world, void *user)
{
    int32_t *arrived = (int32_t *)user;
    dtrain_comm *comm = dtrain_world_comm(world);
    int round, n = dtrain_world_size(world);
    for (round = 1; round <= 300; round++) {
        __atomic_fetch_add(arrived, 1, __ATOMIC_RELAXED);
        RANKS_TRY(dtrain_barrier(comm));
        if (__atomic_load_n(arrived, __ATOMIC_RELAXED) < round * n)
            return !CHECK_MSG(0, "left barrier %d before all had come", round);
        if (__atomic_load_n(arrived, __ATOMIC_RELAXED) > (round + 1) * n)
            return !CHECK_MSG(0, "barrier %d let a rank through twice", round);
    }
    CHECK(round == 301);
    return 0;
}
static void test_barrier_order(void)
{
    int m, ranks;
    for (m = 0; m < MODES; m++)
        for (ranks = 1; ranks <= 8; ranks += ranks < 4 ? 1 : 4) {
            void *arrived = ranks_shared(64);
            ranks_run(ranks, (uint32_t)m, rank_barrier_order, arrived);
            munmap(arrived, 64);
        }
}

/* ---- point to point ---- */

static void fill_message(dtrain_dtype dtype, uint64_t tag, int from, size_t count,
                         unsigned char *at)
{
    size_t i;
    guard(at, count * dtrain_dtype_bytes(dtype));
    for (i = 0; i < count; i++)
        make_element(dtype, tag, from, i, at + i * dtrain_dtype_bytes(dtype));
}
static int check_message(dtrain_dtype dtype, uint64_t tag, int from, size_t count,
                         const unsigned char *at)
{
    unsigned char wanted[8];
    size_t i, item = dtrain_dtype_bytes(dtype);
    for (i = 0; i < count; i++) {
        make_element(dtype, tag, from, i, wanted);
        if (memcmp(at + i * item, wanted, item) != 0)
            return CHECK_MSG(0, "message %llu from %d: element %zu of %zu differs",
                             (unsigned long long)tag, from, i, count);
    }
    return CHECK_MSG(guarded(at, count * item), "message %llu from %d: wrote beyond the buffer",
                     (unsigned long long)tag, from);
}

/* Every rank sends to the next and receives from the one before; even ranks send first. */
static int rank_ring(dtrain_world *world, void *user)
{
    static const size_t counts[] = {0, 1, 7, 64, 1000, 16411, 262147, 1400003};
    size_t i, last = test_full() ? 8 : RANKS_SANITIZED ? 6 : 7;
    int v, n = dtrain_world_size(world), next, before;
    desk d;
    (void)user;
    if (open_desk(&d, world, (size_t)1400003 * 4)) return 1;
    next = (d.rank + 1) % n;
    before = (d.rank + n - 1) % n;
    for (i = 0; i < last; i++)
        for (v = 0; v < 4; v++) {
            dtrain_dtype dtype = dtypes[(i + (size_t)v) % 3];
            unsigned char *out = d.send[v & 1] + GUARD + (v & 2),
                          *in = d.recv[v >> 1] + GUARD + (v & 1);
            dtrain_work *work = NULL;
            bool odd_ring = n % 2 != 0; /* then two neighbours send first: one must not block */
            fill_message(dtype, i * 10 + (size_t)v, d.rank, counts[i], out);
            guard(in, counts[i] * dtrain_dtype_bytes(dtype));
            if (d.rank % 2 == 0)
                RANKS_TRY(
                    dtrain_send(d.comm, out, counts[i], dtype, next, odd_ring ? &work : NULL));
            RANKS_TRY(dtrain_recv(d.comm, in, counts[i], dtype, before, NULL));
            if (d.rank % 2) RANKS_TRY(dtrain_send(d.comm, out, counts[i], dtype, next, NULL));
            RANKS_TRY(dtrain_work_wait(work));
            if (!check_message(dtype, i * 10 + (size_t)v, before, counts[i], in)) return 1;
            if (!check_message(dtype, i * 10 + (size_t)v, d.rank, counts[i], out)) return 1;
        }
    close_desk(&d);
    return 0;
}
static void test_send_ring(void)
{
    int m, ranks;
    for (m = 0; m < MODES; m++)
        for (ranks = 2; ranks <= 5; ranks++) ranks_run(ranks, (uint32_t)m, rank_ring, NULL);
}

/* All pairs, both directions at once, many in flight, receives started first on odd ranks, collectives
 * in between: order holds for each pair, apart from the collectives. */
static size_t exchanged(int k) { return (size_t)(k * 31) % 600 + (k % 5 ? 0 : 40000); }
static int rank_exchange(dtrain_world *world, void *user)
{
    enum { EACH = 20, MOST = 40600 }; /* every fifth is longer than a channel */
    int n = dtrain_world_size(world), rank = dtrain_world_rank(world), peer, k, pass;
    dtrain_comm *comm = dtrain_world_comm(world);
    size_t stride = MOST * 4 + 2 * GUARD, slots = (size_t)n * EACH;
    unsigned char *out = (unsigned char *)malloc(slots * stride);
    dtrain_work **works = (dtrain_work **)calloc(2 * slots, sizeof(dtrain_work *));
    void *in_memory;
    unsigned char *in;
    float token = 1;
    (void)user;
    RANKS_TRY(dtrain_comm_alloc(comm, slots * stride, &in_memory));
    in = (unsigned char *)in_memory;
    for (pass = 0; pass < 2; pass++)
        for (k = 0; k < EACH; k++) {
            for (peer = 0; peer < n; peer++) {
                size_t slot = (size_t)peer * EACH + (size_t)k, count = exchanged(k);
                bool receives = (rank % 2 != 0) == (pass == 0);
                if (peer == rank) continue;
                if (receives) {
                    guard(in + slot * stride + GUARD, count * 4);
                    RANKS_TRY(dtrain_recv(comm, in + slot * stride + GUARD, count, DTRAIN_DTYPE_F32,
                                          peer, &works[slot]));
                } else {
                    fill_message(DTRAIN_DTYPE_F32, (uint64_t)(k * 64 + peer), rank, count,
                                 out + slot * stride + GUARD);
                    RANKS_TRY(dtrain_send(comm, out + slot * stride + GUARD, count,
                                          DTRAIN_DTYPE_F32, peer, &works[slots + slot]));
                }
            }
            if (k % 5 == 0)
                RANKS_TRY(dtrain_all_reduce(comm, &token, &token, 1, DTRAIN_DTYPE_F32,
                                            DTRAIN_REDUCE_MAX, NULL));
        }
    for (k = (int)(2 * slots) - 1; k >= 0; k--) RANKS_TRY(dtrain_work_wait(works[k]));
    for (peer = 0; peer < n; peer++)
        for (k = 0; peer != rank && k < EACH; k++)
            if (!check_message(DTRAIN_DTYPE_F32, (uint64_t)(k * 64 + rank), peer, exchanged(k),
                               in + ((size_t)peer * EACH + (size_t)k) * stride + GUARD))
                return 1;
    dtrain_comm_free(comm, in_memory, slots * stride);
    free(works);
    free(out);
    return 0;
}
static void test_exchange(void)
{
    int m;
    for (m = 0; m < MODES; m++) {
        ranks_run(2, (uint32_t)m, rank_exchange, NULL);
        ranks_run(5, (uint32_t)m, rank_exchange, NULL);
    }
}

/* Long messages come while the sender computes: here, until the receiver has them, as a flag in shared memory says.
 * Those in private memory do where the kernel lets ranks read each other's; the sender knows of it when the receiver
 * has come to a collective. */
typedef struct meeting {
    int here[2];
    pid_t pid[2];
    const int *at[2];
    bool reads[2];
} meeting;

static int rank_computes(dtrain_world *world, void *user)
{
    enum { COUNT = 100000, MESSAGES = 4 };
    dtrain_comm *comm = dtrain_world_comm(world);
    meeting *m = (meeting *)user;
    const int rank = dtrain_world_rank(world), proof = 7;
    const size_t bytes = MESSAGES * COUNT * 4;
    int read = 0;
    m->pid[rank] = getpid();
    m->at[rank] = &proof;
    RANKS_TRY(dtrain_barrier(comm));
    struct iovec to = {&read, sizeof read},
                 from = {(void *)(uintptr_t)m->at[1 - rank], sizeof read};
    m->reads[rank] =
        process_vm_readv(m->pid[1 - rank], &to, 1, &from, 1, 0) == (ssize_t)sizeof read &&
        read == 7;
    RANKS_TRY(dtrain_barrier(comm));
    for (int shared = m->reads[0] && m->reads[1] ? 0 : 1; shared < 2; shared++) {
        dtrain_work *works[MESSAGES];
        void *memory = NULL;
        if (shared) RANKS_TRY(dtrain_comm_alloc(comm, bytes, &memory));
        else memory = malloc(bytes);
        float *data = (float *)memory;
        for (int i = 0; i < MESSAGES * COUNT; i++) data[i] = rank ? -1 : (float)(i % 1000 + shared);
        for (int i = 0; i < MESSAGES && !rank; i++)
            RANKS_TRY(dtrain_send(comm, data + i * COUNT, COUNT, DTRAIN_DTYPE_F32, 1, &works[i]));
        for (int i = 0; i < MESSAGES && rank; i++)
            RANKS_TRY(dtrain_recv(comm, data + i * COUNT, COUNT, DTRAIN_DTYPE_F32, 0, NULL));
        if (rank) __atomic_store_n(&m->here[shared], 1, __ATOMIC_RELEASE);
        for (int ms = 0; ms < 20000 && !__atomic_load_n(&m->here[shared], __ATOMIC_ACQUIRE); ms++)
            ranks_sleep_us(1000);
        CHECK_MSG(__atomic_load_n(&m->here[shared], __ATOMIC_ACQUIRE),
                  "memory %d: the receiver waits for a call of the sender", shared);
        for (int i = 0; i < MESSAGES && !rank; i++) RANKS_TRY(dtrain_work_wait(works[i]));
        int differ = 0;
        for (int i = 0; i < MESSAGES * COUNT; i++) differ += data[i] != (float)(i % 1000 + shared);
        CHECK(differ == 0);
        if (shared) dtrain_comm_free(comm, memory, bytes);
        else free(memory);
    }
    return 0;
}
static void test_sender_computes(void)
{
    for (int m = 0; m < MODES; m++) {
        void *page = ranks_shared(4096);
        ranks_run(2, (uint32_t)m, rank_computes, page);
        munmap(page, 4096);
    }
}

/* Ranks 0 and 1 talk while the others sit in a collective that 0 and 1 join later. */
static int rank_pair_beside(dtrain_world *world, void *user)
{
    dtrain_comm *comm = dtrain_world_comm(world);
    int rank = dtrain_world_rank(world), i;
    float value = (float)rank, got = -1;
    (void)user;
    for (i = 0; i < 50 && rank < 2; i++) {
        if (rank == 0) RANKS_TRY(dtrain_send(comm, &value, 1, DTRAIN_DTYPE_F32, 1, NULL));
        RANKS_TRY(dtrain_recv(comm, &got, 1, DTRAIN_DTYPE_F32, 1 - rank, NULL));
        CHECK(got == (float)(1 - rank));
        if (rank == 1) RANKS_TRY(dtrain_send(comm, &value, 1, DTRAIN_DTYPE_F32, 0, NULL));
    }
    RANKS_TRY(dtrain_all_reduce(comm, &value, &got, 1, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, NULL));
    CHECK(got == (float)(dtrain_world_size(world) * (dtrain_world_size(world) - 1) / 2));
    return 0;
}
static void test_pair_beside(void)
{
    int m;
    for (m = 0; m < MODES; m++) ranks_run(4, (uint32_t)m, rank_pair_beside, NULL);
}

/* ---- split ---- */

static int check_group(dtrain_comm *group, uint64_t seed)
{
    size_t k;
    desk d;
    if (open_desk_on(&d, group, 9000 * 4)) return 0;
    for (k = 0; k < KINDS; k++) {
        call c = make_call(kinds[k], DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM,
                           k % 2 ? 11 : 3000 / (size_t)d.size, seed + k);
        vary(&c, &d, ranks_mix(seed + k) >> 6);
        if (!run_call(&d, &c)) return 0;
    }
    close_desk(&d);
    return 1;
}

static int rank_split(dtrain_world *world, void *user)
{
    dtrain_comm *all = dtrain_world_comm(world), *half = NULL, *reversed = NULL, *few = NULL;
    int n = dtrain_world_size(world), rank = dtrain_world_rank(world), r;
    (void)user;
    CHECK(dtrain_comm_size(all) == n && dtrain_comm_rank(all) == rank);
    for (r = 0; r < n; r++) CHECK(ranks_in_world(all, r) == r);

    RANKS_TRY(dtrain_comm_split(all, rank % 2, 0, &half)); /* equal keys: order as in all */
    CHECK(dtrain_comm_size(half) == (n + 1 - rank % 2) / 2);
    CHECK(dtrain_comm_rank(half) == rank / 2);
    for (r = 0; r < dtrain_comm_size(half); r++) CHECK(ranks_in_world(half, r) == 2 * r + rank % 2);

    RANKS_TRY(dtrain_comm_split(all, 7, -rank, &reversed)); /* negative keys are keys */
    CHECK(dtrain_comm_size(reversed) == n && dtrain_comm_rank(reversed) == n - 1 - rank);
    for (r = 0; r < n; r++) CHECK(ranks_in_world(reversed, r) == n - 1 - r);

    few = all; /* must become NULL */
    RANKS_TRY(dtrain_comm_split(all, rank < 2 ? INT_MAX : -1 - rank, INT_MAX - rank, &few));
    CHECK((few != NULL) == (rank < 2));
    if (few) CHECK(dtrain_comm_size(few) == (n < 2 ? n : 2));
    if (few && n > 1) CHECK(ranks_in_world(few, 0) == 1);

    for (r = 0; r < 4; r++) {
        if (!check_group(half, (uint64_t)r * 100)) return 1;
        if (!check_group(reversed, (uint64_t)r * 100 + 10)) return 1;
        if (few && !check_group(few, (uint64_t)r * 100 + 20)) return 1;
        if (!check_group(all, (uint64_t)r * 100 + 30)) return 1;
    }
    if (rank % 2) dtrain_comm_destroy(half); /* any order, different on every rank */
    dtrain_comm_destroy(reversed);
    if (!check_group(all, 999)) return 1;
    dtrain_comm_destroy(few);
    if (rank % 2 == 0) dtrain_comm_destroy(half);
    dtrain_comm_destroy(NULL);
    return check_group(all, 1999) ? 0 : 1;
}
static void test_split(void)
{
    int m, ranks;
    for (m = 0; m < MODES; m++)
        for (ranks = 1; ranks <= 6; ranks++) ranks_run(ranks, (uint32_t)m, rank_split, NULL);
}

/* Splits of splits, down to one rank; children outlive their parents. Many rounds: what a destroyed
 * communicator held is used again. */
static int rank_nested_split(dtrain_world *world, void *user)
{
    dtrain_comm *all = dtrain_world_comm(world);
    int rank = dtrain_world_rank(world), round;
    (void)user;
    for (round = 0; round < (int)test_draws(40, 80, 200); round++) {
        dtrain_comm *half, *quarter, *single;
        RANKS_TRY(dtrain_comm_split(all, rank / 4, round % 2 ? rank : -rank, &half));
        RANKS_TRY(dtrain_comm_split(half, rank / 2, rank, &quarter));
        dtrain_comm_destroy(half);
        RANKS_TRY(dtrain_comm_split(quarter, rank, 0, &single));
        if (!check_group(quarter, (uint64_t)round)) return 1;
        dtrain_comm_destroy(quarter);
        CHECK(dtrain_comm_size(single) == 1 && ranks_in_world(single, 0) == rank);
        if (!check_group(single, (uint64_t)round)) return 1;
        dtrain_comm_destroy(single);
    }
    return check_group(all, 5) ? 0 : 1;
}
static void test_nested_split(void)
{
    int m;
    for (m = 0; m < MODES; m++) ranks_run(8, (uint32_t)m, rank_nested_split, NULL);
}

/* Works on two communicators at once. Waits follow one order on all ranks, and then crossed: while a
 * rank waits on one, its share of the other must still be done. */
static int rank_two_comms(dtrain_world *world, void *user)
{
    int crossed = *(int *)user, round, i, rank = dtrain_world_rank(world);
    dtrain_comm *all = dtrain_world_comm(world), *other;
    static const size_t counts[] = {3, 500, 40000};
    desk d[2];
    RANKS_TRY(dtrain_comm_split(all, 0, -rank, &other));
    if (open_desk(&d[0], world, 40000 * 4) || open_desk_on(&d[1], other, 40000 * 4)) return 1;
    for (round = 0; round < 60; round++) {
        flight f[2];
        for (i = 0; i < 2; i++) {
            f[i].what = make_call(DTRAIN_COLLECTIVE_ALL_REDUCE, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM,
                                  counts[round % 3], (uint64_t)round * 2 + (uint64_t)i);
            f[i].what.async = true;
            f[i].what.send_memory = f[i].what.recv_memory = round / 3 % 2;
            prepare(&d[i], &f[i]);
            RANKS_TRY(start(&d[i], &f[i]));
        }
        for (i = 0; i < 2; i++) {
            int which = crossed ? (i + rank) % 2 : 1 - i;
            if (!land(&d[which], &f[which])) return 1;
        }
    }
    close_desk(&d[0]);
    close_desk(&d[1]);
    dtrain_comm_destroy(other);
    return 0;
}
static void test_two_comms(void)
{
    int m, crossed = 0;
    for (m = 0; m < MODES; m++) ranks_run(3, (uint32_t)m, rank_two_comms, &crossed);
}
static void test_two_comms_crossed(void)
{
    int m, crossed = 1;
    for (m = 0; m < MODES; m++) {
        dtrain_launch_desc desc = ranks_desc(2, (uint32_t)m);
        CHECK_MSG(ranks_launch(&desc, rank_two_comms, &crossed, NULL) == DTRAIN_OK, "%s",
                  dtrain_last_error());
    }
}

/* ---- memory ---- */

/* Random blocks: zeroed, aligned, disjoint, reused; every rank on its own. */
static int rank_alloc(dtrain_world *world, void *user)
{
    enum { SLOTS = 40 };
    dtrain_comm *comm = dtrain_world_comm(world);
    unsigned char *memory[SLOTS] = {NULL};
    size_t bytes[SLOTS] = {0}, i;
    uint64_t state = (uint64_t)dtrain_world_rank(world) + 5;
    int turn, s;
    (void)user;
    for (turn = 0; turn < 1500; turn++) {
        s = (int)ranks_random(&state, SLOTS);
        if (memory[s]) {
            for (i = 0; i < bytes[s]; i++)
                if (memory[s][i] != (unsigned char)(s + 1))
                    return !CHECK_MSG(0, "block %d was overwritten at %zu of %zu", s, i, bytes[s]);
            dtrain_comm_free(comm, memory[s], bytes[s]);
            memory[s] = NULL;
        } else {
            void *got = NULL;
            bytes[s] = ranks_random(&state, (uint64_t)1 << ranks_random(&state, 18)) + 1;
            RANKS_TRY(dtrain_comm_alloc(comm, bytes[s], &got));
            memory[s] = (unsigned char *)got;
            CHECK_MSG((uintptr_t)got % 64 == 0, "%p is not aligned", got);
            for (i = 0; i < bytes[s]; i++)
                if (memory[s][i]) return !CHECK_MSG(0, "a new block of %zu is not zero", bytes[s]);
            memset(memory[s], s + 1, bytes[s]);
        }
    }
    for (s = 0; s < SLOTS; s++)
        if (memory[s]) dtrain_comm_free(comm, memory[s], bytes[s]);
    dtrain_comm_free(comm, NULL, 0);
    return 0;
}
static void test_alloc(void)
{
    int m;
    for (m = 0; m < MODES; m++) ranks_run(2, (uint32_t)m, rank_alloc, NULL);
}

/* 1 GiB in all, 64 MiB at a time: freed memory comes back. Then requests no machine can fill, and many of as much as
 * `user` says beside small ones. */
static int rank_alloc_limits(dtrain_world *world, void *user)
{
    dtrain_comm *comm = dtrain_world_comm(world);
    static const size_t too_much[] = {(size_t)1 << 46, SIZE_MAX / 2, SIZE_MAX - 63, SIZE_MAX};
    void *memory;
    float token = 1;
    size_t i;
    for (i = 0; i < 16; i++) {
        RANKS_TRY(dtrain_comm_alloc(comm, (size_t)64 << 20, &memory));
        ((char *)memory)[0] = ((char *)memory)[((size_t)64 << 20) - 1] = 1;
        dtrain_comm_free(comm, memory, (size_t)64 << 20);
    }
    for (i = 0; i < 4; i++) {
        dtrain_result result;
        memory = &token;
        result = dtrain_comm_alloc(comm, too_much[i], &memory);
        CHECK_MSG(result == DTRAIN_ERROR_MEMORY || result == DTRAIN_ERROR_ARGUMENT, "%zu bytes: %s",
                  too_much[i], dtrain_result_text(result));
        CHECK_MSG(memory == NULL, "a failed allocation must give NULL");
        CHECK_MSG(strlen(dtrain_last_error()) > 20, "no sentence: '%s'", dtrain_last_error());
    }
    RANKS_TRY(dtrain_barrier(comm));
    const bool refused = dtrain_world_rank(world) == 0; /* which takes nothing from the others */
    const size_t most = user ? *(const size_t *)user : too_much[0];
    for (i = 0; i < (refused ? 400u : 40000u); i++) {
        const dtrain_result result = dtrain_comm_alloc(comm, refused ? most : 4096, &memory);
        if (!CHECK_MSG(result == (refused ? DTRAIN_ERROR_MEMORY : DTRAIN_OK), "%s",
                       dtrain_last_error()))
            return 1;
        dtrain_comm_free(comm, memory, 4096);
    }
    return 0;
}
static void test_alloc_limits(void)
{
    int m;
    size_t most = (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE);
    most -= (size_t)16 << 20; /* what can be reserved, and is never free */
    for (m = 0; m < MODES; m++) {
        dtrain_launch_desc desc = ranks_desc(2, (uint32_t)m);
        desc.options.reserve_bytes = 0; /* as much as the machine has */
        CHECK_MSG(ranks_launch(&desc, rank_alloc_limits, &most, NULL) == DTRAIN_OK, "%s",
                  dtrain_last_error());
    }
}

/* ---- counters ---- */

static int rank_info(dtrain_world *world, void *user)
{
    enum { COUNT = 6000 };
    double begin = dtrain_seconds(), n = dtrain_world_size(world), each = COUNT * 4.0;
    double factor[KINDS];
    dtrain_comm_info was, now;
    size_t k;
    int memory;
    desk d;
    (void)user;
    factor[0] = 2 * (n - 1) / n;
    factor[1] = factor[2] = n - 1; /* of one slice: (n-1)/n of the whole */
    factor[5] = n - 1;             /* of its n slices a rank keeps one */
    factor[3] = factor[4] = 1;     /* along a chain every byte passes each link once */
    if (open_desk(&d, world, COUNT * 4 * (size_t)n)) return 1;
    dtrain_comm_query(d.comm, &was);
    CHECK_MSG(was.backend && strcmp(was.backend, "local") == 0, "backend %s", was.backend);
    for (memory = COMM; memory >= PRIVATE; memory--)
        for (k = 0; k < KINDS; k++) {
            call c = make_call(kinds[k], DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, COUNT, k);
            c.send_memory = c.recv_memory = memory;
            dtrain_comm_query(d.comm, &was);
            if (!run_call(&d, &c)) return 1;
            dtrain_comm_query(d.comm, &now);
            CHECK_MSG(now.operation_count == was.operation_count + 1, "operation_count + %llu",
                      (unsigned long long)(now.operation_count - was.operation_count));
            CHECK_MSG((double)(now.payload_bytes - was.payload_bytes) >= each &&
                          (double)(now.payload_bytes - was.payload_bytes) <= each * (n + 1),
                      "kind %u: payload_bytes + %llu", kinds[k],
                      (unsigned long long)(now.payload_bytes - was.payload_bytes));
            if (k < 3 || k == 5)
                CHECK_MSG(fabs((double)(now.wire_bytes - was.wire_bytes) - each * factor[k]) <= 8,
                          "kind %u: wire_bytes + %llu, expected %.0f", kinds[k],
                          (unsigned long long)(now.wire_bytes - was.wire_bytes), each * factor[k]);
            if (k == 3 || k == 4)
                CHECK_MSG((double)(now.wire_bytes - was.wire_bytes) <= each * factor[k],
                          "kind %u: wire_bytes + %llu", kinds[k],
                          (unsigned long long)(now.wire_bytes - was.wire_bytes));
            if (memory == COMM)
                CHECK_MSG(now.staged_bytes == was.staged_bytes, "kind %u staged %llu bytes",
                          kinds[k], (unsigned long long)(now.staged_bytes - was.staged_bytes));
            else if ((k < 3 || k == 5) && n > 1)
                CHECK_MSG(now.staged_bytes > was.staged_bytes, "kind %u staged nothing", kinds[k]);
        }
    CHECK(now.inside_seconds > 0 && now.inside_seconds <= dtrain_seconds() - begin + 1e-3);
    CHECK(now.flight_seconds > 0 && now.flight_seconds <= dtrain_seconds() - begin + 1e-3);
    close_desk(&d);
    return 0;
}
static void test_info(void)
{
    int m;
    for (m = 0; m < MODES; m++) {
        ranks_run(1, (uint32_t)m, rank_info, NULL);
        ranks_run(2, (uint32_t)m, rank_info, NULL);
        ranks_run(3, (uint32_t)m, rank_info, NULL);
    }
}

/* A work that floats while the rank does something else: time in flight, not inside. */
static int rank_info_times(dtrain_world *world, void *user)
{
    dtrain_comm *comm = dtrain_world_comm(world);
    dtrain_comm_info was, now;
    dtrain_work *work;
    float value = 1, other = 0;
    int rank = dtrain_world_rank(world);
    double begin;
    (void)user;
    RANKS_TRY(dtrain_barrier(comm));
    if (rank == 1) /* when rank 0 has started the operation and slept */
        RANKS_TRY(dtrain_recv(comm, &other, 1, DTRAIN_DTYPE_F32, 0, NULL));
    begin = dtrain_seconds();
    dtrain_comm_query(comm, &was);
    RANKS_TRY(
        dtrain_all_reduce(comm, &value, &value, 1, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, &work));
    ranks_sleep_us(100000);
    dtrain_comm_query(comm, &now);
    if (rank == 0)
        CHECK_MSG(now.inside_seconds - was.inside_seconds < dtrain_seconds() - begin - 0.099,
                  "sleep counts as inside");
    if (rank == 0) RANKS_TRY(dtrain_send(comm, &other, 1, DTRAIN_DTYPE_F32, 1, NULL));
    RANKS_TRY(dtrain_work_wait(work));
    dtrain_comm_query(comm, &now);
    if (rank == 0) /* rank 1 started after it had slept */
        CHECK_MSG(now.flight_seconds - was.flight_seconds > 0.09, "in flight for %.4f s of 0.1",
                  now.flight_seconds - was.flight_seconds);
    double longest[2] = {0, 0};
    for (int i = 0; i < 100 && longest[1] <= 0.02; i++) { /* load can keep rank 1 outside */
        if (rank == 0) ranks_sleep_us(60000);
        dtrain_comm_query(comm, &was);
        RANKS_TRY(dtrain_barrier(comm));
        dtrain_comm_query(comm, &now);
        begin = now.inside_seconds - was.inside_seconds;
        RANKS_TRY(dtrain_world_all_gather(world, &begin, sizeof begin, longest));
    }
    CHECK_MSG(longest[1] > 0.02, "inside for %.4f s of 0.06", longest[1]);
    return 0;
}
static void test_info_times(void)
{
    int m;
    for (m = 0; m < MODES; m++) ranks_run(2, (uint32_t)m, rank_info_times, NULL);
}

int main(int argc, char **argv)
{
    uint32_t i;
    test_begin(argc, argv);
    for (i = 0; i < 65536; i++) half_values[i] = slow_half_value(i);
    RUN_NUMBERS(test_every_type_threads);
    RUN_NUMBERS(test_every_type_processes);
    RUN(test_sizes_to_70);
    RUN(test_limits);
    RUN(test_primes);
    RUN(test_large);
    RUN(test_unaligned);
    RUN_NUMBERS(test_memory_mix);
    RUN(test_refused_reads);
    RUN(test_unreadable);
    RUN(test_slow_reader);
    RUN(test_random_calls);
    RUN(test_64_ranks);
    RUN(test_special_values);
    RUN(test_async_many);
    RUN(test_async_mixed);
    RUN(test_async_at_once);
    RUN(test_async_all_to_all);
    RUN(test_barrier_order);
    RUN(test_send_ring);
    RUN(test_exchange);
    RUN(test_sender_computes);
    RUN(test_pair_beside);
    RUN(test_split);
    RUN(test_nested_split);
    RUN(test_two_comms);
    RUN(test_two_comms_crossed);
    RUN(test_alloc);
    RUN(test_alloc_limits);
    RUN(test_info);
    RUN(test_info_times);
    if (!test_full()) printf("  note DTRAIN_TEST_FULL=1 runs the long forms\n");
    return test_summary();
}
