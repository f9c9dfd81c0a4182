/* bench_collectives.c: how fast the local communicator moves and adds, beside Open MPI and MPICH.
 *
 *   run:     make bench, or build/bench/bench_collectives --ranks 2,4 --sizes 1M,25M --log FILE
 *
 * For each operation the sizes are run by dtrain, then by each MPI found, then by dtrain again, ...
 * (--rounds): a drift of the machine then meets all alike; ratios are taken round by round. fp32, sum,
 * in place. Before each call every rank rewrites its buffer, as backward does with gradients, and the
 * call is timed alone, after a barrier; with --warm calls run back to back on buffers that lie still.
 * The slowest rank's time counts. Results are checked in the same run, before each timing.
 *
 * "tensors" are the gradients of 100 parameters of 4 KiB each: DDP averages them (ready for each,
 * finish), MPI is called once for each.
 *
 *   bytes    as nccl-tests counts: a rank's buffer; for reduce-scatter a rank's whole input, for
 *            all-gather a rank's whole output
 *   algbw    bytes / time
 *   busbw    algbw x f; f = 2 (n-1)/n all-reduce, (n-1)/n reduce-scatter and all-gather, 1 broadcast:
 *            what each rank's link would carry in a ring
 *   floor    time of the bytes that must be read and written by all ranks together, at the bandwidth of
 *            a copy between buffers of this size by as many processes, measured at the start:
 *            all-reduce 2 n S, reduce-scatter (n+1) S, all-gather 2 (n-1) S, broadcast n S.
 *            Below 1.0 of it: data came from a cache that a copy does not reach
 *   x_NAME   median over the rounds of that MPI's time / ours */
#include "bench.h"
#include "dtrain.h"
#include "mpi_rival.h"

enum { MAX_ROUNDS = 16, MAX_REPS = 64, OPS = 6, SOURCES = 4, TENSORS_COUNT = 100, TENSOR = 1024 };
enum { OURS_COMM, OURS_PRIVATE, OPEN_MPI, MPICH }; /* who made a time */
enum { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, BARRIER, TENSORS };

static const char *const op_names[] = {"all-reduce", "reduce-scatter", "all-gather", "broadcast",
                                       "barrier",    "tensors",        NULL};
static const char op_letters[OPS + 1] = "argbst";
static const char *const memory_names[] = {"comm", "private", NULL};

static struct options {
    const char *sizes;
    flag_list ranks, ops, memory;
    double seconds;
    long rounds, reps, warm, no_mpi;
} opt = {"1K,16K,256K,1M,4M,25M,100M",
         {2, {2, 4}},
         {6, {0, 1, 2, 3, 4, 5}},
         {2, {0, 1}},
         0.02,
         3,
         5,
         0,
         0};

/* ---- times ---- */

typedef struct series {
    double time[MAX_ROUNDS][MAX_REPS]; /* seconds per call; 0 = not measured */
} series;

/* In shared memory: ranks are processes. */
typedef struct board {
    size_t sizes[FLAGS_LIST];
    int size_count, ranks, op, round;
    series times[SOURCES][FLAGS_LIST];
    double copy_rate[FLAGS_LIST]; /* bytes read + written per second by all ranks together */
    int wrong;
} board;

/* A barrier and tensors have one size. */
static int size_count(const board *b) { return b->op < BARRIER ? b->size_count : 1; }
static size_t size_at(const board *b, int i)
{
    if (b->op == TENSORS) return TENSORS_COUNT * TENSOR * sizeof(float);
    return b->op == BARRIER ? 0 : b->sizes[i];
}

static spread summarize(const series *s)
{
    double all[MAX_ROUNDS * MAX_REPS];
    int count = 0;
    for (int r = 0; r < opt.rounds; r++)
        for (int k = 0; k < opt.reps; k++)
            if (s->time[r][k] > 0) all[count++] = 1e6 * s->time[r][k];
    return spread_of(all, count);
}

/* Their time over ours, of the medians in each round. */
static spread ratio(const series *ours, const series *theirs)
{
    double mine[MAX_ROUNDS], other[MAX_ROUNDS];
    for (int r = 0; r < opt.rounds; r++) {
        mine[r] = median(ours->time[r], (int)opt.reps);
        other[r] = median(theirs->time[r], (int)opt.reps);
    }
    return ratios_of(other, mine, (int)opt.rounds, 1);
}

/* ---- our side ---- */

typedef struct seat {
    dtrain_comm *comm;
    int rank, ranks, op;
    float *buffer;
    size_t count;         /* elements, a multiple of ranks but of tensors */
    dtrain_strategy *ddp; /* of tensors: its gradients are the buffer */
} seat;

#define TRY(call)                                                        \
    do {                                                                 \
        if ((call) == DTRAIN_OK) break;                                  \
        fprintf(stderr, "bench_collectives: %s\n", dtrain_last_error()); \
        return 1;                                                        \
    } while (0)

static dtrain_result collective(const seat *s)
{
    size_t slice = s->count / (size_t)s->ranks;
    float *own = s->buffer + (size_t)s->rank * slice;
    switch (s->op) {
    case ALL_REDUCE:
        return dtrain_all_reduce(s->comm, s->buffer, s->buffer, s->count, DTRAIN_DTYPE_F32,
                                 DTRAIN_REDUCE_SUM, NULL);
    case REDUCE_SCATTER:
        return dtrain_reduce_scatter(s->comm, s->buffer, own, slice, DTRAIN_DTYPE_F32,
                                     DTRAIN_REDUCE_SUM, NULL);
    case ALL_GATHER:
        return dtrain_all_gather(s->comm, own, s->buffer, slice, DTRAIN_DTYPE_F32, NULL);
    case BROADCAST:
        return dtrain_broadcast(s->comm, s->buffer, s->count, DTRAIN_DTYPE_F32, 0, NULL);
    case TENSORS: {
        dtrain_result result = DTRAIN_OK;
        for (size_t i = TENSORS_COUNT; i-- > 0 && result == DTRAIN_OK;)
            result = dtrain_strategy_ready(s->ddp, i);
        return result == DTRAIN_OK ? dtrain_strategy_finish(s->ddp) : result;
    }
    default: return dtrain_barrier(s->comm);
    }
}

static int64_t slowest(const seat *s, int64_t ns)
{
    dtrain_all_reduce(s->comm, &ns, &ns, 1, DTRAIN_DTYPE_I64, DTRAIN_REDUCE_MAX, NULL);
    return ns;
}

/* Rank r gives r + 1 + i % 5 at i: small integers, exact in every order of summation. */
static int check_result(const seat *s, int *wrong)
{
    size_t slice = s->count / (size_t)s->ranks,
           first = s->op == REDUCE_SCATTER ? (size_t)s->rank * slice : 0;
    size_t end = s->op == REDUCE_SCATTER ? first + slice : s->count;
    float ones = (float)(s->ranks * (s->ranks + 1)) / 2, n = (float)s->ranks;
    for (size_t i = 0; i < s->count; i++) s->buffer[i] = (float)(s->rank + 1) + (float)(i % 5);
    TRY(collective(s));
    for (size_t i = first; i < end; i++) {
        float wanted = ones + n * (float)(i % 5);
        if (s->op == ALL_GATHER) wanted = (float)(i / slice + 1) + (float)(i % 5);
        if (s->op == BROADCAST) wanted = 1 + (float)(i % 5);
        if (s->op == TENSORS) wanted = ones / n + (float)(i % 5);
        if (s->buffer[i] == wanted) continue;
        fprintf(stderr, "%s of %zu: [%zu] is %g, expected %g\n", op_names[s->op], s->count, i,
                (double)s->buffer[i], (double)wanted);
        *wrong = 1;
        break;
    }
    return 0;
}

/* Seconds per call on this rank. */
static int repetition(const seat *s, long calls, double *seconds)
{
    double sum = 0, begin;
    TRY(dtrain_barrier(s->comm));
    begin = dtrain_seconds();
    for (long k = 0; k < calls; k++) {
        if (!opt.warm && s->count) {
            for (size_t i = 0; i < s->count; i++) s->buffer[i] = (float)(k + 1);
            TRY(dtrain_barrier(s->comm));
            begin = dtrain_seconds();
        }
        TRY(collective(s));
        if (!opt.warm && s->count) sum += dtrain_seconds() - begin;
    }
    if (opt.warm || !s->count) sum = dtrain_seconds() - begin;
    *seconds = sum / (double)calls;
    return 0;
}

static int measure(const seat *s, board *b, double *times)
{
    long calls = 1;
    if (s->count) {
        if (check_result(s, &b->wrong)) return 1;
        memset(s->buffer, 0, s->count * sizeof *s->buffer);
    }
    for (;;) { /* as many calls as last long enough; this is the warm-up, too */
        double one, took;
        if (repetition(s, calls, &one)) return 1;
        took = 1e-9 * (double)slowest(s, (int64_t)(one * 1e9 * (double)calls));
        if (took >= opt.seconds || calls > 200000) break;
        calls = took * 10 < opt.seconds ? calls * 10
                                        : (long)((double)calls * opt.seconds / took * 1.1) + 1;
    }
    for (int r = 0; r < opt.reps; r++) {
        double one;
        if (repetition(s, calls, &one)) return 1;
        one = 1e-12 * (double)slowest(s, (int64_t)(one * 1e12));
        if (s->rank == 0) times[r] = one;
    }
    return 0;
}

/* Make a strategy of parameters whose gradients follow each other in memory. */
static int ddp_of(dtrain_world *world, float *grads, dtrain_strategy **out)
{
    static float values[TENSORS_COUNT][TENSOR];
    static char names[TENSORS_COUNT][8];
    static dtrain_param params[TENSORS_COUNT];
    memset(params, 0, sizeof params);
    for (int i = 0; i < TENSORS_COUNT; i++) {
        snprintf(names[i], sizeof names[i], "t%d", i);
        params[i].name = names[i];
        params[i].value = values[i];
        params[i].grad = grads + i * TENSOR;
        params[i].count = TENSOR;
    }
    TRY(dtrain_strategy_create(world, params, TENSORS_COUNT, NULL, out));
    return 0;
}

static int bench_rank(dtrain_world *world, void *user)
{
    board *b = (board *)user;
    size_t most = TENSORS_COUNT * TENSOR * sizeof(float);
    void *memory[2];
    seat s;
    s.comm = dtrain_world_comm(world);
    s.rank = dtrain_world_rank(world);
    s.ranks = b->ranks;
    s.op = b->op;
    for (int i = 0; i < b->size_count; i++)
        if (b->sizes[i] > most) most = b->sizes[i];
    TRY(dtrain_comm_alloc(s.comm, most, &memory[OURS_COMM]));
    memory[OURS_PRIVATE] = bench_alloc(most);
    memset(memory[OURS_PRIVATE], 0, most);
    s.ddp = NULL;
    if (s.op == TENSORS && ddp_of(world, (float *)memory[OURS_PRIVATE], &s.ddp)) return 1;
    for (int m = OURS_COMM; m <= OURS_PRIVATE; m++)
        for (int i = 0; i < size_count(b); i++) {
            if (s.op == TENSORS ? m != OURS_PRIVATE : !listed(&opt.memory, m)) continue;
            s.buffer = (float *)memory[m];
            s.count = size_at(b, i) / sizeof(float);
            if (s.op != TENSORS) s.count = s.count / (size_t)s.ranks * (size_t)s.ranks;
            if (measure(&s, b, b->times[m][i].time[b->round])) return 1;
        }
    dtrain_strategy_destroy(s.ddp);
    free(memory[OURS_PRIVATE]);
    dtrain_comm_free(s.comm, memory[OURS_COMM], most);
    return 0;
}

/* The machine's side of the floor: every rank (one a core at most) copies between two private buffers
 * of each size. */
static int copy_rank(dtrain_world *world, void *user)
{
    board *b = (board *)user;
    dtrain_comm *comm = dtrain_world_comm(world);
    for (int i = 0; i < b->size_count; i++) {
        size_t bytes = b->sizes[i];
        char *from = (char *)bench_alloc(bytes), *to = (char *)bench_alloc(bytes);
        double best = 0;
        memset(from, 1, bytes);
        memset(to, 2, bytes);
        for (int r = 0; r < 5; r++) {
            long copies = 0;
            double begin, end, rate;
            TRY(dtrain_barrier(comm));
            begin = dtrain_seconds();
            do {
                memcpy(to, from, bytes);
                from[(size_t)copies++ % (bytes / 2)] = 3; /* another copy each time */
                end = dtrain_seconds();
            } while (end - begin < 0.004);
            rate = 2.0 * (double)bytes * (double)copies / (end - begin);
            if (rate > best) best = rate;
        }
        if (to[bytes / 2] != 1) {
            fprintf(stderr, "bench_collectives: a copy of %zu bytes is wrong\n", bytes);
            return 1;
        }
        int64_t sum = (int64_t)best;
        TRY(dtrain_all_reduce(comm, &sum, &sum, 1, DTRAIN_DTYPE_I64, DTRAIN_REDUCE_SUM, NULL));
        if (dtrain_world_rank(world) == 0) b->copy_rate[i] = (double)sum;
        free(from);
        free(to);
    }
    return 0;
}

static int run_ours(board *b, dtrain_rank_fn rank_main, int ranks)
{
    dtrain_launch_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.rank_count = (uint32_t)ranks;
    desc.timeout_ms = 120000;
    TRY(dtrain_launch(&desc, rank_main, b, NULL));
    return 0;
}

/* ---- rivals ---- */

static const struct rival {
    const char *label, *flavour, *environment, *flags;
} rivals[] = {
    {"Open MPI", "openmpi",
     "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 MALLOC_MMAP_MAX_=0 "
     "MALLOC_TRIM_THRESHOLD_=17179869184 MALLOC_TOP_PAD_=536870912",
     "--oversubscribe --bind-to none --mca btl self,vader --mca mpi_yield_when_idle 1"},
    {"MPICH", "mpich", "UCX_TLS=self,sm", ""},
};

/* Fill the round's times; a run that fails leaves zeros and a line on stderr. */
static void run_rival(int which, const char *peer, board *b)
{
    const struct rival *rival = &rivals[which];
    char command[4096];
    const int count = size_count(b);
    int used = snprintf(command, sizeof command, "%s mpirun.%s -n %d %s %s %c %ld %ld %g",
                        rival->environment, rival->flavour, b->ranks, rival->flags, peer,
                        op_letters[b->op], opt.warm, opt.reps, opt.seconds);
    for (int k = 0; k < count; k++)
        used += snprintf(command + used, sizeof command - (size_t)used, " %zu", size_at(b, k));
    snprintf(command + used, sizeof command - (size_t)used, " 2>/dev/null");
    mpi_rival_run(command, count, (int)opt.reps, b->times[OPEN_MPI + which][0].time[b->round],
                  MAX_ROUNDS * MAX_REPS);
}

/* ---- report ---- */

static double bus_factor(int op, double n)
{
    if (op == ALL_REDUCE || op == TENSORS) return 2 * (n - 1) / n;
    return op == BROADCAST ? 1 : (n - 1) / n;
}
static double bytes_moved(int op, double n, double bytes)
{
    if (op == ALL_REDUCE) return 2 * n * bytes;
    if (op == REDUCE_SCATTER) return (n + 1) * bytes;
    return op == ALL_GATHER ? 2 * (n - 1) * bytes : n * bytes;
}

static void report(const board *b, int i, int memory)
{
    const series *ours = &b->times[memory][i];
    const spread us = summarize(ours);
    const bool barrier = b->op == BARRIER;
    const double bytes = (double)size_at(b, i), n = b->ranks;
    const double rate = barrier ? NAN : 1e-3 * bytes / us.median;
    if (!isfinite(us.median)) return;
    bench_begin("collectives");
    bench_string("operation", -14, op_names[b->op]);
    bench_number("ranks", 0, 0, n);
    bench_number("bytes", 9, 0, bytes);
    bench_string("memory", -7, barrier ? "-" : memory_names[memory]);
    bench_string("warm", 0, opt.warm ? "yes" : "no");
    bench_spread("us", 9, 2, us);
    bench_number("algbw", 6, 2, rate);
    bench_number("busbw", 6, 2, rate * bus_factor(b->op, n));
    bench_number("floor_us", 9, 2,
                 b->op >= BARRIER ? NAN : 1e6 * bytes_moved(b->op, n, bytes) / b->copy_rate[i]);
    for (int w = 0; w < 2; w++) {
        const series *theirs = &b->times[OPEN_MPI + w][i];
        char name[32];
        snprintf(name, sizeof name, "x_%s", rivals[w].flavour);
        bench_number(rivals[w].label, 9, 2, summarize(theirs).median);
        bench_number(name, 5, 1, ratio(ours, theirs).median);
    }
    bench_end(!b->wrong);
}

/* One number of ranks: all operations, each in alternation with the rivals. */
static int bench_ranks(board *b, char peers[2][4096], const bool *use)
{
    const long cores = sysconf(_SC_NPROCESSORS_ONLN);
    if (run_ours(b, copy_rank, b->ranks < cores ? b->ranks : (int)cores)) return 1;
    bench_title("%d ranks, fp32 sum in place, %s", b->ranks,
                opt.warm ? "warm buffers" : "inputs rewritten before each call");
    for (long o = 0; o < opt.ops.count; o++) {
        b->op = (int)opt.ops.items[o];
        b->wrong = 0;
        memset(b->times, 0, sizeof b->times);
        for (b->round = 0; b->round < opt.rounds; b->round++) {
            if (run_ours(b, bench_rank, b->ranks)) return 1;
            /* MPICH never yields: 10 ms a call with more ranks than cores */
            for (int w = 0; w < 2; w++)
                if (use[w] && (w == 0 || b->ranks <= cores)) run_rival(w, peers[w], b);
        }
        for (int i = 0; i < size_count(b); i++)
            for (long m = 0; m < (b->op < BARRIER ? opt.memory.count : 1); m++)
                report(b, i, b->op == TENSORS ? OURS_PRIVATE : (int)opt.memory.items[m]);
    }
    return 0;
}

static const flag flag_table[] = {
    {"--ranks", 'I', &opt.ranks, 1, DTRAIN_MAX_RANKS, "numbers of ranks: 2,4", NULL},
    {"--ops", 'W', &opt.ops, 0, 0, "all, or several of", op_names},
    {"--sizes", 's', &opt.sizes, 0, 0, "bytes; 1K..256M:4 is a range with a factor", NULL},
    {"--memory", 'W', &opt.memory, 0, 0, "from dtrain_comm_alloc, from malloc, or both",
     memory_names},
    {"--rounds", 'i', &opt.rounds, 1, MAX_ROUNDS, "alternations with the rivals", NULL},
    {"--reps", 'i', &opt.reps, 1, MAX_REPS, "repetitions in each round", NULL},
    {"--seconds", 'f', &opt.seconds, 1e-6, 60, "the least time of a repetition, filled with calls",
     NULL},
    {"--warm", 'b', &opt.warm, 0, 0, "calls back to back, inputs not rewritten", NULL},
    {"--no-mpi", 'b', &opt.no_mpi, 0, 0, "no rivals", NULL},
    BENCH_FLAGS};

int main(int argc, char **argv)
{
    board *b = (board *)share(sizeof *b);
    char peers[2][4096];
    bool use[2];
    number_list sizes;
    if (is_quick(argc, argv)) {
        opt.sizes = "4K,1M";
        opt.ranks.count = 1;
        opt.rounds = 1;
        opt.reps = 2;
        opt.seconds = 0.002;
    }
    bench_start("bench_collectives", "times of the local communicator beside MPI's", flag_table,
                sizeof flag_table / sizeof *flag_table, argc, argv);
    long most = 1; /* ranks: each has a slice of at least one element */
    for (long i = 0; i < opt.ranks.count; i++)
        if (opt.ranks.items[i] > most) most = opt.ranks.items[i];
    bench_numbers("bench_collectives", "--sizes", opt.sizes, 4.0 * (double)most, 0x1p32, &sizes);
    b->size_count = sizes.count;
    for (int i = 0; i < sizes.count; i++) b->sizes[i] = (size_t)sizes.items[i];
    for (int w = 0; w < 2; w++)
        use[w] =
            !opt.no_mpi && mpi_rival_build(rivals[w].flavour, argv[0], peers[w], sizeof peers[w]);
    for (long i = 0; i < opt.ranks.count; i++) {
        b->ranks = (int)opt.ranks.items[i];
        if (bench_ranks(b, peers, use)) return 1;
    }
    return bench.wrong > 0;
}
