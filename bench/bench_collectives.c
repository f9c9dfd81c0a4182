/* bench_collectives.c: how fast the local communicator moves and adds, beside Open MPI and MPICH.
 *
 *   run:     make bench, or build/bench/bench_collectives --ranks 2,4 --sizes 1M,25M [--json]
 *
 * For each operation the sizes are run by dtrain, then by each MPI found, then by dtrain again, ...
 * (--rounds): a drift of the machine then meets all alike; ratios are taken round by round. fp32, sum,
 * in place. Before each call every rank rewrites its buffer, as backward does with gradients, and the
 * call is timed alone, after a barrier; with --warm calls run back to back on buffers that lie still.
 * The slowest rank's time counts. Results are checked in the same run, before each timing.
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
 *   MPI x    median over the rounds of MPI's time / ours */
#include "bench.h"
#include "dtrain.h"

enum { MAX_SIZES = 32, MAX_ROUNDS = 16, MAX_REPS = 64, MAX_LIST = 8, OPS = 5, SOURCES = 4 };
enum { OURS_COMM, OURS_PRIVATE, OPEN_MPI, MPICH }; /* who made a time */

static const char *const op_names[OPS] = {"all-reduce", "reduce-scatter", "all-gather", "broadcast",
                                          "barrier"};
static const char op_letters[OPS + 1] = "argbs";
static const char *const source_names[SOURCES] = {"comm", "private", "openmpi", "mpich"};

/* ---- options ---- */

static struct options {
    const char *ranks, *ops, *sizes, *memory, *rounds, *reps, *seconds;
    int warm, json, no_mpi, help;
} opt = {"2,4",
         "all-reduce,reduce-scatter,all-gather,broadcast,barrier",
         "1K,16K,256K,1M,4M,25M,100M",
         "comm,private",
         "3",
         "5",
         "0.02",
         0,
         0,
         0,
         0};

typedef struct option {
    const char *name, *meaning;
    const char **text; /* takes a value, or */
    int *flag;
} option;

static const option options[] = {
    {"--ranks", "numbers of ranks, e.g. 2,4,8", &opt.ranks, NULL},
    {"--ops", "operations", &opt.ops, NULL},
    {"--sizes", "bytes, with K, M or G; 1K..256M:4 is a range with a factor", &opt.sizes, NULL},
    {"--memory", "comm (from dtrain_comm_alloc), private (malloc), or both", &opt.memory, NULL},
    {"--rounds", "alternations with the rivals", &opt.rounds, NULL},
    {"--reps", "repetitions in each round", &opt.reps, NULL},
    {"--seconds", "shortest repetition; calls are added until it lasts so long", &opt.seconds,
     NULL},
    {"--warm", "calls back to back, inputs not rewritten", NULL, &opt.warm},
    {"--json", "one JSON object a line instead of the table", NULL, &opt.json},
    {"--no-mpi", "no rivals", NULL, &opt.no_mpi},
    {"--help", "this table", NULL, &opt.help},
};

static int usage(FILE *to)
{
    fprintf(to, "bench_collectives: times the local communicator; see the top of its source\n");
    for (size_t i = 0; i < sizeof options / sizeof *options; i++)
        fprintf(to, "  %-10s %s%s%s%s\n", options[i].name, options[i].meaning,
                options[i].text ? " [" : "", options[i].text ? *options[i].text : "",
                options[i].text ? "]" : "");
    return to == stderr ? 2 : 0;
}

static int parse_options(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        const option *found = NULL;
        for (size_t k = 0; k < sizeof options / sizeof *options; k++)
            if (strcmp(argv[i], options[k].name) == 0) found = &options[k];
        if (!found || (found->text && i + 1 == argc)) {
            fprintf(stderr, "%s: %s\n", argv[i], found ? "needs a value" : "unknown option");
            return 0;
        }
        if (found->text) *found->text = argv[++i];
        else *found->flag = 1;
    }
    return 1;
}

static int has_word(const char *list, const char *word)
{
    size_t length = strlen(word);
    for (const char *at = list; (at = strstr(at, word)) != NULL; at++)
        if ((at == list || at[-1] == ',') && (at[length] == 0 || at[length] == ',')) return 1;
    return 0;
}

static size_t parse_bytes(const char *text, char **end)
{
    size_t value = (size_t)strtoull(text, end, 10);
    if (**end == 'K') value <<= 10;
    if (**end == 'M') value <<= 20;
    if (**end == 'G') value <<= 30;
    if (**end && strchr("KMG", **end)) (*end)++;
    return value;
}

/* "1K,25M" or "1K..256M:4"; 0 = not understood. */
static int parse_sizes(const char *text, size_t *sizes)
{
    int count = 0;
    while (*text && count < MAX_SIZES) {
        char *end;
        size_t last, factor = 2, size = last = parse_bytes(text, &end);
        if (end[0] == '.' && end[1] == '.') last = parse_bytes(end + 2, &end);
        if (*end == ':') factor = (size_t)strtoull(end + 1, &end, 10);
        if (size == 0 || factor < 2 || (*end && *end != ',') || last > (size_t)1 << 32) return 0;
        for (; size <= last && count < MAX_SIZES; size *= factor) sizes[count++] = size;
        text = *end ? end + 1 : end;
    }
    return count;
}

/* ---- times ---- */

typedef struct series {
    double time[MAX_ROUNDS][MAX_REPS]; /* seconds per call; 0 = not measured */
} series;

/* In shared memory: ranks are processes. */
typedef struct board {
    size_t sizes[MAX_SIZES];
    int size_count, ranks, op, round, rounds, reps;
    double seconds;
    series times[SOURCES][MAX_SIZES];
    double copy_rate[MAX_SIZES]; /* bytes read + written per second by all ranks together */
    int wrong;
} board;

static spread summarize(const board *b, const series *s)
{
    double all[MAX_ROUNDS * MAX_REPS];
    int count = 0;
    for (int r = 0; r < b->rounds; r++)
        for (int k = 0; k < b->reps; k++)
            if (s->time[r][k] > 0) all[count++] = s->time[r][k];
    return spread_of(all, count);
}
/* Median over rounds of their / our median in that round. */
static double ratio(const board *b, const series *ours, const series *theirs)
{
    double ratios[MAX_ROUNDS];
    int count = 0;
    for (int r = 0; r < b->rounds; r++) {
        double mine = median(ours->time[r], b->reps), other = median(theirs->time[r], b->reps);
        if (mine > 0 && other > 0) ratios[count++] = other / mine;
    }
    return median(ratios, count);
}

/* ---- our side ---- */

typedef struct seat {
    dtrain_comm *comm;
    int rank, ranks, op;
    float *buffer;
    size_t count; /* elements, a multiple of ranks */
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
    case 0:
        return dtrain_all_reduce(s->comm, s->buffer, s->buffer, s->count, DTRAIN_DTYPE_F32,
                                 DTRAIN_REDUCE_SUM, NULL);
    case 1:
        return dtrain_reduce_scatter(s->comm, s->buffer, own, slice, DTRAIN_DTYPE_F32,
                                     DTRAIN_REDUCE_SUM, NULL);
    case 2: return dtrain_all_gather(s->comm, own, s->buffer, slice, DTRAIN_DTYPE_F32, NULL);
    case 3: return dtrain_broadcast(s->comm, s->buffer, s->count, DTRAIN_DTYPE_F32, 0, NULL);
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
    size_t slice = s->count / (size_t)s->ranks, first = s->op == 1 ? (size_t)s->rank * slice : 0;
    size_t end = s->op == 1 ? first + slice : s->count;
    float ones = (float)(s->ranks * (s->ranks + 1)) / 2, n = (float)s->ranks;
    for (size_t i = 0; i < s->count; i++) s->buffer[i] = (float)(s->rank + 1) + (float)(i % 5);
    TRY(collective(s));
    for (size_t i = first; i < end; i++) {
        float wanted = ones + n * (float)(i % 5);
        if (s->op == 2) wanted = (float)(i / slice + 1) + (float)(i % 5);
        if (s->op == 3) wanted = 1 + (float)(i % 5);
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
        if (took >= b->seconds || calls > 200000) break;
        calls = took * 10 < b->seconds ? calls * 10
                                       : (long)((double)calls * b->seconds / took * 1.1) + 1;
    }
    for (int r = 0; r < b->reps; r++) {
        double one;
        if (repetition(s, calls, &one)) return 1;
        one = 1e-12 * (double)slowest(s, (int64_t)(one * 1e12));
        if (s->rank == 0) times[r] = one;
    }
    return 0;
}

static int bench_rank(dtrain_world *world, void *user)
{
    board *b = (board *)user;
    size_t most = 4096;
    void *memory[2];
    seat s;
    s.comm = dtrain_world_comm(world);
    s.rank = dtrain_world_rank(world);
    s.ranks = b->ranks;
    s.op = b->op;
    for (int i = 0; i < b->size_count; i++)
        if (b->sizes[i] > most) most = b->sizes[i];
    TRY(dtrain_comm_alloc(s.comm, most, &memory[OURS_COMM]));
    memory[OURS_PRIVATE] = malloc(most);
    if (!memory[OURS_PRIVATE]) return 1;
    memset(memory[OURS_PRIVATE], 0, most);
    for (int m = OURS_COMM; m <= OURS_PRIVATE; m++)
        for (int i = 0; i < b->size_count; i++) {
            if (!has_word(opt.memory, source_names[m])) continue;
            s.buffer = (float *)memory[m];
            s.count =
                s.op == 4 ? 0 : b->sizes[i] / sizeof(float) / (size_t)s.ranks * (size_t)s.ranks;
            if (measure(&s, b, b->times[m][i].time[b->round])) return 1;
            if (s.op == 4) break;
        }
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
        char *from = (char *)malloc(bytes), *to = (char *)malloc(bytes);
        double best = 0;
        if (!from || !to) return 1;
        memset(from, 1, bytes);
        memset(to, 2, bytes);
        for (int r = 0; r < 5; r++) {
            long copies = 0;
            double begin, end, rate;
            TRY(dtrain_barrier(comm));
            begin = dtrain_seconds();
            do {
                memcpy(to, from, bytes);
                from[copies++ % 64] = 3; /* another copy each time */
                end = dtrain_seconds();
            } while (end - begin < 0.004);
            rate = 2.0 * (double)bytes * (double)copies / (end - begin);
            if (rate > best) best = rate;
        }
        if (to[bytes / 2] != 1) return 1;
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
    const char *label, *compiler, *runner, *environment, *flags;
} rivals[] = {
    {"Open MPI", "mpicc.openmpi", "mpirun.openmpi",
     "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 MALLOC_MMAP_MAX_=0 "
     "MALLOC_TRIM_THRESHOLD_=17179869184 MALLOC_TOP_PAD_=536870912",
     "--oversubscribe --bind-to none --mca btl self,vader --mca mpi_yield_when_idle 1"},
    {"MPICH", "mpicc.mpich", "mpirun.mpich", "UCX_TLS=self,sm", ""},
};

/* The folder of a path, with its last '/'. */
static void folder_of(const char *path, char *folder, size_t room)
{
    const char *slash = strrchr(path, '/');
    snprintf(folder, room, "%.*s", slash ? (int)(slash - path + 1) : 0, path);
}

static int build_rival(int which, const char *program, char *peer, size_t room)
{
    char source[512], folder[512], command[4096];
    snprintf(command, sizeof command, "command -v %s %s >/dev/null 2>&1", rivals[which].compiler,
             rivals[which].runner);
    if (system(command) != 0) {
        fprintf(stderr, "%s: not installed, skipped\n", rivals[which].label);
        return 0;
    }
    folder_of(__FILE__, source, sizeof source);
    folder_of(program, folder, sizeof folder);
    snprintf(peer, room, "%s%smpi_peer.%s", folder[0] ? "" : "./", folder,
             rivals[which].compiler + 6);
    snprintf(command, sizeof command, "%s -O2 %smpi_peer.c -o %s", rivals[which].compiler, source,
             peer);
    if (system(command) == 0) return 1;
    fprintf(stderr, "%s: its compiler failed, skipped: %s\n", rivals[which].label, command);
    return 0;
}

/* Fills the round's times; a run that fails leaves zeros and a line on stderr. */
static void run_rival(int which, const char *peer, board *b)
{
    char command[4096], line[4096];
    int used =
        snprintf(command, sizeof command, "%s %s -n %d %s %s %c %d %d %g",
                 rivals[which].environment, rivals[which].runner, b->ranks, rivals[which].flags,
                 peer, op_letters[b->op], opt.warm, b->reps, b->seconds);
    int count = b->op == 4 ? 1 : b->size_count, i = 0;
    FILE *pipe;
    for (int k = 0; k < count; k++)
        used += snprintf(command + used, sizeof command - (size_t)used, " %zu",
                         b->op == 4 ? 0 : b->sizes[k]);
    snprintf(command + used, sizeof command - (size_t)used, " 2>/dev/null");
    pipe = popen(command, "r");
    for (; pipe && i < count && fgets(line, sizeof line, pipe); i++) {
        char *at = line;
        if (strncmp(line, "wrong", 5) == 0)
            fprintf(stderr, "%s: wrong result\n", rivals[which].label);
        strtoull(at, &at, 10);
        for (int r = 0; r < b->reps; r++)
            b->times[OPEN_MPI + which][i].time[b->round][r] = strtod(at, &at);
    }
    if (!pipe || pclose(pipe) != 0 || i < count)
        fprintf(stderr, "%s: failed: %s\n", rivals[which].label, command);
}

/* ---- report ---- */

static double bus_factor(int op, double n)
{
    if (op == 0) return 2 * (n - 1) / n;
    return op == 3 ? 1 : (n - 1) / n;
}
static double bytes_moved(int op, double n, double bytes)
{
    if (op == 0) return 2 * n * bytes;
    if (op == 1) return (n + 1) * bytes;
    return op == 2 ? 2 * (n - 1) * bytes : n * bytes;
}

static const char *size_text(size_t bytes, char *text, size_t room)
{
    if (bytes >= (size_t)1 << 20 && bytes % ((size_t)1 << 20) == 0)
        snprintf(text, room, "%zuM", bytes >> 20);
    else if (bytes >= 1024 && bytes % 1024 == 0) snprintf(text, room, "%zuK", bytes >> 10);
    else snprintf(text, room, "%zu", bytes);
    return text;
}

static void print_head(const board *b)
{
    printf("\n%d ranks, fp32 sum in place, %s, times in us\n", b->ranks,
           opt.warm ? "warm buffers" : "inputs rewritten before each call");
    printf("%-14s %6s %-7s %10s %10s %10s %8s %8s %9s %10s %6s %10s %6s\n", "operation", "bytes",
           "memory", "median", "min", "max", "algbw", "busbw", "floor", "Open MPI", "x", "MPICH",
           "x");
}

static void print_json(const board *b, int i, int m, spread us, double algbw, double busbw,
                       double floor_s)
{
    printf(
        "{\"bench\":\"collectives\",\"op\":\"%s\",\"ranks\":%d,\"bytes\":%zu,\"memory\":\"%s\","
        "\"warm\":%s,"
        "\"min_us\":%.3f,\"median_us\":%.3f,\"max_us\":%.3f,\"algbw_gbs\":%.3f,\"busbw_gbs\":%.3f,"
        "\"floor_us\":%.3f,\"correct\":%s",
        op_names[b->op], b->ranks, b->op == 4 ? 0 : b->sizes[i], source_names[m],
        opt.warm ? "true" : "false", us.min * 1e6, us.median * 1e6, us.max * 1e6, algbw, busbw,
        floor_s * 1e6, b->wrong ? "false" : "true");
    for (int s = OPEN_MPI; s < SOURCES; s++) {
        spread theirs = summarize(b, &b->times[s][i]);
        if (theirs.median > 0)
            printf(",\"%s_us\":%.3f,\"%s_min_us\":%.3f,\"%s_ratio\":%.3f", source_names[s],
                   theirs.median * 1e6, source_names[s], theirs.min * 1e6, source_names[s],
                   ratio(b, &b->times[m][i], &b->times[s][i]));
    }
    printf("}\n");
}

static void print_row(const board *b, int i, int m)
{
    spread us = summarize(b, &b->times[m][i]);
    double bytes = b->op == 4 ? 0 : (double)b->sizes[i], n = b->ranks;
    double algbw = us.median > 0 ? 1e-9 * bytes / us.median : 0,
           busbw = algbw * bus_factor(b->op, n);
    double floor_s =
        b->op == 4 || b->copy_rate[i] <= 0 ? 0 : bytes_moved(b->op, n, bytes) / b->copy_rate[i];
    char size[32];
    if (us.median <= 0) return;
    if (opt.json) {
        print_json(b, i, m, us, algbw, busbw, floor_s);
        return;
    }
    printf("%-14s %6s %-7s %10.2f %10.2f %10.2f %8.2f %8.2f %9.2f", op_names[b->op],
           size_text(b->op == 4 ? 0 : b->sizes[i], size, sizeof size),
           b->op == 4 ? "-" : source_names[m], us.median * 1e6, us.min * 1e6, us.max * 1e6, algbw,
           busbw, floor_s * 1e6);
    for (int s = OPEN_MPI; s < SOURCES; s++) {
        spread theirs = summarize(b, &b->times[s][i]);
        if (theirs.median > 0)
            printf(" %10.2f %5.1fx", theirs.median * 1e6,
                   ratio(b, &b->times[m][i], &b->times[s][i]));
        else printf(" %10s %6s", "-", "-");
    }
    printf("\n");
    fflush(stdout);
}

static void report(const board *b)
{
    int memories = b->op == 4 ? 1 : 2;
    for (int i = 0; i < (b->op == 4 ? 1 : b->size_count); i++)
        for (int m = 0; m < memories; m++) print_row(b, i, m);
}

/* One number of ranks: all operations, each in alternation with the rivals. */
static int bench_ranks(board *b, char peers[2][640], const int *use)
{
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    if (run_ours(b, copy_rank, b->ranks < cores ? b->ranks : (int)cores)) return 1;
    if (!opt.json) print_head(b);
    for (b->op = 0; b->op < OPS; b->op++) {
        if (!has_word(opt.ops, op_names[b->op])) continue;
        memset(b->times, 0, sizeof b->times);
        for (b->round = 0; b->round < b->rounds; b->round++) {
            if (run_ours(b, bench_rank, b->ranks)) return 1;
            for (int w = 0; w < 2;
                 w++) /* MPICH never yields: 10 ms a call with more ranks than cores */
                if (use[w] && (w == 0 || b->ranks <= cores)) run_rival(w, peers[w], b);
        }
        report(b);
    }
    return 0;
}

int main(int argc, char **argv)
{
    board *b;
    char peers[2][640];
    int use[2] = {0, 0};
    const char *at;
    if (!parse_options(argc, argv)) return usage(stderr);
    if (opt.help) return usage(stdout);
    b = (board *)mmap(NULL, sizeof *b, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (b == MAP_FAILED) return 1;
    b->size_count = parse_sizes(opt.sizes, b->sizes);
    b->rounds = atoi(opt.rounds);
    b->reps = atoi(opt.reps);
    b->seconds = atof(opt.seconds);
    if (!b->size_count || b->rounds < 1 || b->rounds > MAX_ROUNDS || b->reps < 1 ||
        b->reps > MAX_REPS) {
        fprintf(stderr, "sizes, rounds (1 to %d) or repetitions (1 to %d) not understood\n",
                MAX_ROUNDS, MAX_REPS);
        return usage(stderr);
    }
    for (int w = 0; w < 2; w++)
        use[w] = !opt.no_mpi && build_rival(w, argv[0], peers[w], sizeof peers[w]);
    for (at = opt.ranks; *at; at += strcspn(at, ","), at += *at == ',') {
        b->ranks = atoi(at);
        if (b->ranks < 1 || b->ranks > DTRAIN_MAX_RANKS) return usage(stderr);
        if (bench_ranks(b, peers, use)) return 1;
    }
    if (b->wrong) fprintf(stderr, "WRONG RESULTS, see above\n");
    else if (!opt.json) printf("\nall results correct\n");
    return b->wrong;
}
