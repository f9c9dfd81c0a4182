/* bench_links.c: is the emulated link of the local communicator what it says, and what a network does?
 *
 *   run:     build/bench/bench_links --quick                     emulation beside its formula
 *            build/bench/bench_links --nodes 2,4 --gbit 0.1,1 --sizes 1,4,25      root: Open MPI, too
 *
 *   formula    all-reduce of B bytes by N nodes of one rank: 2 (N - 1) / N * 8 B / rate + 2 latency
 *   emulated   dtrain_all_reduce under dtrain_launch_desc.emulation
 *   MPI        the same algorithm over Open MPI's TCP between network namespaces (mpi_links.sh):
 *              slices to their owners in pieces of 48 KiB, their sums, results to everybody
 *   whole      the same without cutting slices into pieces
 *   allreduce  MPI_Allreduce
 *   + %        a time over the one it is compared with: emulated over formula, MPI over emulated
 *
 * The links' limit counts whole Ethernet frames, of which 1448 of 1514 bytes are data: formula and
 * emulation get 1448/1514 of --gbit. What is left of the difference is acknowledgements, some 2 %,
 * and flows that do not end together. The latency is that of the real links: the time of a barrier
 * by its rounds. Times are medians over repetitions, of the slowest rank; every run checks its sums.
 *
 * --queue fifo: see mpi_links.sh. Behind one queue, messages above Open MPI's eager limit of 64 KiB
 * that go both ways take turns, which takes twice the time: hence the pieces. */
#include "bench.h"
#include "dtrain.h"

enum { MAX_LIST = 8, MAX_REPS = 64 };
#define PAYLOAD (1448.0 / 1514.0)

static struct options {
    const char *nodes, *gbit, *sizes, *queue;
    int reps, quick, json;
} opt = {"2,4", "1", "1,4,25", "fair", 5, 0, 0};

typedef struct plan {
    int nodes, size_count;
    double gbit, latency_us; /* gbit: of the wire, with headers */
    size_t bytes[MAX_LIST];  /* of each size */
    double *emulated;        /* shared: median of each size */
    double mpi[3][MAX_LIST]; /* medians: pieces, whole, MPI_Allreduce; 0: no such run */
    int *wrong;
} plan;

/* ---- the emulation ---- */

static int emulated_rank(dtrain_world *world, void *user)
{
    plan *p = (plan *)user;
    dtrain_comm *comm = dtrain_world_comm(world);
    const int rank = dtrain_world_rank(world), size = dtrain_world_size(world);
    void *memory;
    for (int s = 0; s < p->size_count; s++) {
        const size_t count = p->bytes[s] / sizeof(float);
        if (dtrain_comm_alloc(comm, p->bytes[s], &memory) != DTRAIN_OK) return 1;
        float *buffer = (float *)memory;
        double times[MAX_REPS], all[DTRAIN_MAX_RANKS], took;
        for (int r = -1; r < opt.reps; r++) {
            for (size_t i = 0; i < count; i++) buffer[i] = (float)(rank + 1) + (float)(i % 5);
            if (dtrain_barrier(comm) != DTRAIN_OK) return 1;
            const double begin = dtrain_seconds();
            if (dtrain_all_reduce(comm, buffer, buffer, count, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM,
                                  NULL) != DTRAIN_OK)
                return 1;
            took = dtrain_seconds() - begin;
            if (dtrain_world_all_gather(world, &took, sizeof took, all) != DTRAIN_OK) return 1;
            for (int i = 0; i < size; i++) took = all[i] > took ? all[i] : took;
            if (r >= 0) times[r] = took;
            for (size_t i = 0; i < count; i++)
                if (buffer[i] != (float)(size * (size + 1)) / 2 + (float)size * (float)(i % 5))
                    *p->wrong = 1;
        }
        if (rank == 0) p->emulated[s] = median(times, opt.reps);
        dtrain_comm_free(comm, memory, p->bytes[s]);
    }
    return 0;
}

static int run_emulation(plan *p)
{
    dtrain_launch_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.rank_count = (uint32_t)p->nodes;
    desc.threads_per_rank = 1;
    desc.emulation.node_ranks = 1;
    desc.emulation.gigabits_per_second = p->gbit * PAYLOAD;
    desc.emulation.latency_us = p->latency_us;
    if (dtrain_launch(&desc, emulated_rank, p, NULL) == DTRAIN_OK) return 1;
    fprintf(stderr, "%s\n", dtrain_last_error());
    return 0;
}

/* ---- Open MPI ---- */

/* The folder of this source, with its last '/'. */
static int folder_length(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? (int)(slash - path + 1) : 0;
}

/* Medians of one operation of mpi_peer.c for all sizes; 0 when it did not run. */
static int run_mpi(const plan *p, const char *peer, char op, double *medians)
{
    static char command[2048], text[16384];
    int used = snprintf(command, sizeof command,
                        "QUEUE=%s sh %.*smpi_links.sh %d %g %s %c 0 %d 0.005", opt.queue,
                        folder_length(__FILE__), __FILE__, p->nodes, p->gbit, peer, op, opt.reps);
    for (int s = 0; s < (op == 's' ? 1 : p->size_count); s++)
        used += snprintf(command + used, sizeof command - (size_t)used, " %zu",
                         op == 's' ? 0 : p->bytes[s]);
    const int failed = capture(command, text, sizeof text);
    char *at = text;
    for (int s = 0; !failed && s < (op == 's' ? 1 : p->size_count); s++) {
        double values[MAX_REPS];
        if (strncmp(at, "wrong", 5) == 0) return fprintf(stderr, "Open MPI: wrong result\n"), 0;
        strtoull(at, &at, 10);
        for (int r = 0; r < opt.reps; r++) values[r] = strtod(at, &at);
        while (*at == '\n') at++;
        medians[s] = median(values, opt.reps);
    }
    if (failed) fprintf(stderr, "not measured: %s\n", command);
    return !failed;
}

static int build_peer(char *peer, size_t room, const char *program)
{
    static char command[2048], ignored[4096];
    const int length = folder_length(program);
    snprintf(peer, room, "$PWD/%.*smpi_peer.openmpi", length, program);
    if (length && program[0] == '/') snprintf(peer, room, "%.*smpi_peer.openmpi", length, program);
    snprintf(command, sizeof command, "mpicc.openmpi -O2 %.*smpi_peer.c -o %s 2>&1",
             folder_length(__FILE__), __FILE__, peer);
    if (capture(command, ignored, sizeof ignored) == 0) return 1;
    printf("Open MPI's compiler mpicc.openmpi is not here or failed: emulation and formula only\n");
    return 0;
}

/* ---- report ---- */

static double rounds(int nodes)
{
    int count = 0;
    while (nodes > 1 << count) count++;
    return count;
}

static void report(const plan *p)
{
    const double n = p->nodes;
    if (!opt.json)
        printf("\n%d nodes, %g Gb/s (%.4g of data), latency %.0f us; ms, and %% over what it is "
               "compared with\n"
               "%8s %10s %10s %7s %10s %7s %10s %10s\n",
               p->nodes, p->gbit, p->gbit * PAYLOAD, p->latency_us, "MiB", "formula", "emulated",
               "+ %", "MPI", "+ %", "whole", "allreduce");
    for (int s = 0; s < p->size_count; s++) {
        const double link = 8 * (double)p->bytes[s] / (p->gbit * PAYLOAD * 1e9);
        const double formula = 2 * (n - 1) / n * link + 2e-6 * p->latency_us,
                     emulated = p->emulated[s];
        const double *mpi = p->mpi[0] + s;
        if (opt.json)
            printf("{\"bench\": \"links\", \"nodes\": %d, \"gbit\": %g, \"latency_us\": %.1f, "
                   "\"bytes\": %zu, "
                   "\"formula_s\": %.6f, \"emulated_s\": %.6f, \"mpi_s\": %.6f, "
                   "\"mpi_whole_s\": %.6f, "
                   "\"mpi_allreduce_s\": %.6f}\n",
                   p->nodes, p->gbit, p->latency_us, p->bytes[s], formula, emulated, mpi[0],
                   p->mpi[1][s], p->mpi[2][s]);
        else {
            printf("%8.3g %10.3f %10.3f %+6.1f%%", (double)p->bytes[s] / 1048576, 1e3 * formula,
                   1e3 * emulated, 100 * (emulated / formula - 1));
            if (mpi[0] > 0)
                printf(" %10.3f %+6.1f%% %10.3f %10.3f", 1e3 * mpi[0],
                       100 * (mpi[0] / emulated - 1), 1e3 * p->mpi[1][s], 1e3 * p->mpi[2][s]);
            printf("\n");
        }
    }
    fflush(stdout);
}

static int parse_list(const char *text, double *values)
{
    int count = 0;
    char *end;
    for (; *text && count < MAX_LIST; text = *end == ',' ? end + 1 : end) {
        values[count] = strtod(text, &end);
        if (end == text || !(values[count] > 0) || (*end && *end != ',')) return 0;
        count++;
    }
    return *text ? 0 : count;
}

static int parse_options(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (strcmp(argv[i], "--quick") == 0) opt.quick = 1;
        else if (strcmp(argv[i], "--json") == 0) opt.json = 1;
        else if (!value) return 0;
        else if (strcmp(argv[i], "--nodes") == 0) opt.nodes = value, i++;
        else if (strcmp(argv[i], "--gbit") == 0) opt.gbit = value, i++;
        else if (strcmp(argv[i], "--sizes") == 0) opt.sizes = value, i++;
        else if (strcmp(argv[i], "--queue") == 0) opt.queue = value, i++;
        else if (strcmp(argv[i], "--reps") == 0) opt.reps = atoi(value), i++;
        else return 0;
    }
    if (strcmp(opt.queue, "fair") != 0 && strcmp(opt.queue, "fifo") != 0) return 0;
    return opt.reps >= 1 && opt.reps <= MAX_REPS;
}

int main(int argc, char **argv)
{
    double nodes[MAX_LIST], gbit[MAX_LIST], sizes[MAX_LIST];
    char peer[512];
    plan p;
    memset(&p, 0, sizeof p);
    if (!parse_options(argc, argv) || !parse_list(opt.nodes, nodes) ||
        !parse_list(opt.gbit, gbit) || !(p.size_count = parse_list(opt.sizes, sizes)))
        return fprintf(stderr,
                       "options: --quick --json --nodes 2,4 --gbit 0.1,1 --sizes MiB,MiB --reps N "
                       "--queue fair|fifo\n"),
               2;
    char *shared =
        (char *)mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED) return fprintf(stderr, "no shared memory\n"), 1;
    p.emulated = (double *)(void *)shared;
    p.wrong = (int *)(void *)(shared + 2048);
    const int real = !opt.quick && build_peer(peer, sizeof peer, argv[0]);
    for (int g = 0; g < parse_list(opt.gbit, gbit); g++)
        for (int k = 0; k < parse_list(opt.nodes, nodes); k++) {
            double barrier = 0;
            p.nodes = (int)nodes[k];
            p.gbit = gbit[g];
            memset(p.mpi, 0, sizeof p.mpi);
            for (int s = 0; s < p.size_count; s++) /* whole slices */
                p.bytes[s] = (size_t)(sizes[s] * 1048576 / 4 / p.nodes) * (size_t)p.nodes * 4;
            const int here = real && run_mpi(&p, peer, 's', &barrier);
            p.latency_us = here ? 1e6 * barrier / rounds(p.nodes) : 50;
            if (!run_emulation(&p)) return 1;
            for (int o = 0; here && o < 3; o++) run_mpi(&p, peer, "dwa"[o], p.mpi[o]);
            report(&p);
        }
    if (*p.wrong) return fprintf(stderr, "emulation: wrong sums\n"), 1;
    return 0;
}
