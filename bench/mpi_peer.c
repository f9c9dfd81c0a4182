/* mpi_peer.c: the collectives of bench_collectives.c through MPI, timed the same way. The bench compiles and
 * runs it by itself; by hand:
 *
 *   build:   mpicc -O2 bench/mpi_peer.c -o build/mpi_peer
 *   run:     mpirun -n 2 build/mpi_peer OPERATION WARM REPETITIONS SECONDS BYTES...
 *
 * WARM 0: every rank rewrites its buffer before each call and each call is timed alone, after a barrier.
 * WARM 1: batches of calls back to back. Prints "BYTES time time ..." with one time (seconds per call,
 * of the slowest rank) for each repetition. All calls are in place, fp32, sum. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int rank, ranks, warm;
static float *buffer;
static size_t count; /* elements of the whole buffer, a multiple of ranks */

/* All pairs at once: slice r to rank r, or this rank's own slice to everybody; what rank r gives comes to the
 * place of slice r. In pieces of at most `most` elements. */
static void swap_slices(const float *send, float *recv, int slice, int own, int most)
{
    static MPI_Request requests[65536];
    int k, at, used = 0;
    for (at = 0; at < slice; at += most)
        for (k = 1; k < ranks && used + 2 <= 65536; k++) {
            int from = (rank + ranks - k) % ranks, to = (rank + k) % ranks, length = slice - at;
            const float *give = send + (size_t)(own ? rank : to) * (size_t)slice + at;
            if (length > most) length = most;
            MPI_Irecv(recv + (size_t)from * (size_t)slice + at, length, MPI_FLOAT, from, own,
                      MPI_COMM_WORLD, &requests[used++]);
            MPI_Isend(give, length, MPI_FLOAT, to, own, MPI_COMM_WORLD, &requests[used++]);
        }
    MPI_Waitall(used, requests, MPI_STATUSES_IGNORE);
}

/* An all-reduce as dtrain makes it: slices to their owners, their sum in rank order, results to everybody. */
static void exchange(int slice, int most)
{
    static float *pieces;
    static size_t room;
    float *mine = buffer + (size_t)rank * (size_t)slice;
    int i, r;
    if (room < count) {
        free(pieces);
        pieces = (float *)malloc(count * sizeof *pieces);
        room = count;
    }
    swap_slices(buffer, pieces, slice, 0, most);
    memcpy(pieces + (size_t)rank * (size_t)slice, mine, (size_t)slice * sizeof *mine);
    for (i = 0; i < slice; i++) {
        float sum = 0;
        for (r = 0; r < ranks; r++) sum += pieces[(size_t)r * (size_t)slice + (size_t)i];
        mine[i] = sum;
    }
    swap_slices(buffer, buffer, slice, 1, most);
}

static void call(char op)
{
    int whole = (int)count, slice = (int)(count / (size_t)ranks);
    switch (op) {
    case 'a': MPI_Allreduce(MPI_IN_PLACE, buffer, whole, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); break;
    case 'r':
        MPI_Reduce_scatter_block(MPI_IN_PLACE, buffer, slice, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        break;
    case 'g':
        MPI_Allgather(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, buffer, slice, MPI_FLOAT, MPI_COMM_WORLD);
        break;
    case 'd': exchange(slice, 12288); break; /* 48 KiB: Open MPI sends that eagerly over TCP */
    case 'w': exchange(slice, slice); break;
    case 't': { /* tensors of 4 KiB, one call each */
        size_t at;
        for (at = 0; at + 1024 <= count; at += 1024)
            MPI_Allreduce(MPI_IN_PLACE, buffer + at, 1024, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        break;
    }
    case 'b': MPI_Bcast(buffer, whole, MPI_FLOAT, 0, MPI_COMM_WORLD); break;
    default: MPI_Barrier(MPI_COMM_WORLD); break;
    }
}

static void rewrite(float value)
{
    size_t i;
    for (i = 0; i < count; i++) buffer[i] = value;
}

/* Rank r contributes r + 1 + i % 5 at i; small integers, so that every order of summation is exact. */
static int wrong(char op)
{
    size_t i, slice = count / (size_t)ranks;
    float ones = (float)(ranks * (ranks + 1)) / 2, n = (float)ranks;
    for (i = 0; i < count; i++) buffer[i] = (float)(rank + 1) + (float)(i % 5);
    call(op);
    for (i = 0; i < count; i++) {
        float sum = ones + n * (float)(i % 5);
        float at_slice = ones + n * (float)((i + (size_t)rank * slice) % 5);
        if (strchr("adwt", op) && buffer[i] != sum) return 1;
        if (op == 'r' && i < slice && buffer[i] != at_slice) return 1; /* in place it starts at 0 */
        if (op == 'g' && buffer[i] != (float)(i / slice + 1) + (float)(i % 5)) return 1;
        if (op == 'b' && buffer[i] != 1 + (float)(i % 5)) return 1;
    }
    return 0;
}

static double repetition(char op, long calls)
{
    double sum = 0, begin;
    long k;
    MPI_Barrier(MPI_COMM_WORLD);
    if (warm || op == 's') {
        begin = MPI_Wtime();
        for (k = 0; k < calls; k++) call(op);
        return (MPI_Wtime() - begin) / (double)calls;
    }
    for (k = 0; k < calls; k++) {
        rewrite((float)(k + 1));
        MPI_Barrier(MPI_COMM_WORLD);
        begin = MPI_Wtime();
        call(op);
        sum += MPI_Wtime() - begin;
    }
    return sum / (double)calls;
}

static double slowest(double seconds)
{
    double result;
    MPI_Allreduce(&seconds, &result, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    return result;
}

static void measure(char op, int repetitions, double seconds)
{
    long calls = 1;
    int r, bad = op == 's' ? 0 : wrong(op), any;
    MPI_Allreduce(&bad, &any, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
    if (any) {
        if (rank == 0) printf("wrong\n");
        return;
    }
    if (count) memset(buffer, 0, count * sizeof *buffer);
    for (;;) { /* as many calls as take `seconds`: also the warm-up */
        double took = slowest(repetition(op, calls)) * (double)calls;
        if (took >= seconds || calls > 200000) break;
        calls = took * 10 < seconds ? calls * 10 : (long)((double)calls * seconds / took * 1.1) + 1;
    }
    if (rank == 0) printf("%zu", count * sizeof *buffer);
    for (r = 0; r < repetitions; r++) {
        double took = slowest(repetition(op, calls));
        if (rank == 0) printf(" %.9g", took);
    }
    if (rank == 0) printf("\n");
    fflush(stdout);
}

int main(int argc, char **argv)
{
    size_t most = 64;
    int i;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (argc < 6) MPI_Abort(MPI_COMM_WORLD, 2);
    warm = atoi(argv[2]);
    for (i = 5; i < argc; i++) {
        size_t bytes = (size_t)strtoull(argv[i], NULL, 10);
        if (bytes > most) most = bytes;
    }
    buffer = (float *)malloc(most);
    if (!buffer) MPI_Abort(MPI_COMM_WORLD, 3);
    memset(buffer, 0, most);
    for (i = 5; i < argc; i++) {
        count = (size_t)strtoull(argv[i], NULL, 10) / sizeof *buffer;
        if (argv[1][0] != 't') count = count / (size_t)ranks * (size_t)ranks;
        measure(argv[1][0], atoi(argv[3]), atof(argv[4]));
    }
    free(buffer);
    MPI_Finalize();
    return 0;
}
