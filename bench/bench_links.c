/* bench_links.c: is an emulated link (tools/emulated_links.h) what it says, and what a network does?
 *
 *   run:     build/bench/bench_links --quick                     emulation beside its formula
 *            build/bench/bench_links --nodes 2,4 --gbit 0.1,1 --sizes 1M,4M,25M   root: Open MPI, too
 *
 *   formula_ms   all-reduce of B bytes by N nodes of one rank: 2 (N - 1) / N * 8 B / rate + 2 latency
 *   emulated_ms  dtrain_all_reduce over emulated links; over: its time / the formula's - 1, in %
 *   mpi_ms       the same algorithm over Open MPI's TCP between network namespaces (mpi_links.sh):
 *                slices to their owners in pieces of 48 KiB, their sums, results to everybody;
 *                over_emulated: its time / the emulation's - 1, in %
 *   whole_ms     the same without cutting slices into pieces
 *   allreduce_ms MPI_Allreduce
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
#include "mpi_rival.h"
#include "tools/emulated_links.h"

enum { MAX_REPS = 64 };
#define PAYLOAD (1448.0 / 1514.0)

static const char *const queues[] = {"fair", "fifo", NULL};

static struct options {
    const char *gbit, *sizes;
    flag_list nodes;
    long queue, reps;
} opt = {"1", "1M,4M,25M", {2, {2, 4}}, 0, 5};

typedef struct plan {
    int nodes, size_count;
    double gbit, latency_us;   /* gbit: of the wire, with headers */
    size_t bytes[FLAGS_LIST];  /* of each size */
    double mpi[3][FLAGS_LIST]; /* medians: pieces, whole, MPI_Allreduce; NaN: no such run */
    struct {
        double emulated[FLAGS_LIST]; /* median of each size */
        int wrong[FLAGS_LIST];
    } * shared;
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
                    p->shared->wrong[s] = 1;
        }
        if (rank == 0) p->shared->emulated[s] = median(times, (int)opt.reps);
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
    emulate_links(&desc, 1, p->gbit * PAYLOAD, p->latency_us);
    if (dtrain_launch(&desc, emulated_rank, p, NULL) == DTRAIN_OK) return 1;
    fprintf(stderr, "%s\n", dtrain_last_error());
    return 0;
}

/* ---- Open MPI ---- */

/* Medians of one operation of mpi_peer.c for all sizes; false when it did not run. */
static bool run_mpi(const plan *p, const char *peer, char op, double *medians)
{
    static double times[FLAGS_LIST][MAX_REPS];
    const int count = op == 's' ? 1 : p->size_count;
    char command[2048], folder[512];
    folder_of(__FILE__, folder, sizeof folder);
    int used =
        snprintf(command, sizeof command, "QUEUE=%s sh %smpi_links.sh %d %g %s %c 0 %ld 0.005",
                 queues[opt.queue], folder, p->nodes, p->gbit, peer, op, opt.reps);
    for (int s = 0; s < count; s++)
        used += snprintf(command + used, sizeof command - (size_t)used, " %zu",
                         op == 's' ? 0 : p->bytes[s]);
    if (!mpi_rival_run(command, count, (int)opt.reps, times[0], MAX_REPS)) return false;
    for (int s = 0; s < count; s++) medians[s] = median(times[s], (int)opt.reps);
    return true;
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
    bench_title("%d nodes, %g Gb/s (%.4g of data), latency %.0f us", p->nodes, p->gbit,
                p->gbit * PAYLOAD, p->latency_us);
    for (int s = 0; s < p->size_count; s++) {
        const double link = 8 * (double)p->bytes[s] / (p->gbit * PAYLOAD * 1e9);
        const double formula = 2 * (n - 1) / n * link + 2e-6 * p->latency_us;
        const double emulated = p->shared->emulated[s];
        bench_begin("links");
        bench_number("nodes", 0, 0, n);
        bench_number("gbit", 0, 0, p->gbit);
        bench_number("latency_us", 0, 0, p->latency_us);
        bench_number("bytes", 10, 0, (double)p->bytes[s]);
        bench_number("formula_ms", 10, 3, 1e3 * formula);
        bench_number("emulated_ms", 11, 3, 1e3 * emulated);
        bench_number("over_%", 7, 1, 100 * (emulated / formula - 1));
        bench_number("mpi_ms", 10, 3, 1e3 * p->mpi[0][s]);
        bench_number("over_emulated_%", 7, 1, 100 * (p->mpi[0][s] / emulated - 1));
        bench_number("whole_ms", 10, 3, 1e3 * p->mpi[1][s]);
        bench_number("allreduce_ms", 10, 3, 1e3 * p->mpi[2][s]);
        bench_end(!p->shared->wrong[s]);
    }
}

static int run_plan(plan *p, const char *peer)
{
    double barrier[1];
    p->latency_us = 50;
    memset(p->shared, 0, sizeof *p->shared);
    for (int o = 0; o < 3; o++)
        for (int s = 0; s < p->size_count; s++) p->mpi[o][s] = NAN;
    const bool real = peer && run_mpi(p, peer, 's', barrier);
    if (real) p->latency_us = 1e6 * barrier[0] / rounds(p->nodes);
    if (!run_emulation(p)) return 1;
    for (int o = 0; real && o < 3; o++) run_mpi(p, peer, "dwa"[o], p -> mpi[o]);
    report(p);
    return 0;
}

static const flag flag_table[] = {
    {"--nodes", 'I', &opt.nodes, 2, DTRAIN_MAX_RANKS, "numbers of nodes: 2,4", NULL},
    {"--gbit", 's', &opt.gbit, 0, 0, "bandwidths of a link", NULL},
    {"--sizes", 's', &opt.sizes, 0, 0, "bytes", NULL},
    {"--queue", 'w', &opt.queue, 0, 0, "see mpi_links.sh", queues},
    {"--reps", 'i', &opt.reps, 1, MAX_REPS, "repetitions", NULL},
    BENCH_FLAGS};

int main(int argc, char **argv)
{
    number_list gbit, sizes;
    char peer[4096];
    plan p;
    if (is_quick(argc, argv)) {
        opt.gbit = "2";
        opt.sizes = "1M";
        opt.reps = 2;
    }
    bench_start("bench_links",
                "the emulated link beside its formula and, as root, Open MPI on real ones; "
                "--quick: without Open MPI",
                flag_table, sizeof flag_table / sizeof *flag_table, argc, argv);
    bench_numbers("bench_links", "--gbit", opt.gbit, 1e-3, 1e5, &gbit);
    bench_numbers("bench_links", "--sizes", opt.sizes, 4 * DTRAIN_MAX_RANKS, 0x1p32, &sizes);
    memset(&p, 0, sizeof p);
    p.shared = share(sizeof *p.shared);
    p.size_count = sizes.count;
    const bool real = !bench.quick && mpi_rival_build("openmpi", argv[0], peer, sizeof peer);
    for (int g = 0; g < gbit.count; g++)
        for (long k = 0; k < opt.nodes.count; k++) {
            p.nodes = (int)opt.nodes.items[k];
            p.gbit = gbit.items[g];
            for (int s = 0; s < p.size_count; s++) /* whole slices */
                p.bytes[s] = (size_t)(sizes.items[s] / 4 / p.nodes) * (size_t)p.nodes * 4;
            if (run_plan(&p, real ? peer : NULL)) return 1;
        }
    return bench.wrong > 0;
}
