/* mpi_rival.h: mpi_peer.c, compiled by an MPI and run. Include it behind bench.h. */
#ifndef DTRAIN_MPI_RIVAL_H
#define DTRAIN_MPI_RIVAL_H

/* The folder of a path with its last '/', "./" where it has none. */
static inline void folder_of(const char *path, char *folder, size_t room)
{
    const char *slash = strrchr(path, '/');
    snprintf(folder, room, "%.*s", slash ? (int)(slash - path + 1) : 2, slash ? path : "./");
}

/* Compile mpi_peer.c beside `program` with mpicc.FLAVOUR; peer becomes its path, absolute because ranks may
 * start elsewhere. false after saying why not. */
static inline bool mpi_rival_build(const char *flavour, const char *program, char *peer,
                                   size_t room)
{
    char source[512], folder[512], command[8192], said[4096];
    folder_of(__FILE__, source, sizeof source);
    folder_of(program, folder, sizeof folder);
    snprintf(command, sizeof command, "command -v mpicc.%s mpirun.%s", flavour, flavour);
    char *full = realpath(folder, NULL);
    if (capture(command, said, sizeof said) || !full) {
        fprintf(stderr, "%s: mpicc.%s or mpirun.%s is not installed, skipped\n", flavour, flavour,
                flavour);
        free(full);
        return false;
    }
    snprintf(peer, room, "%s/mpi_peer.%s", full, flavour);
    free(full);
    snprintf(command, sizeof command, "mpicc.%s -O2 %smpi_peer.c -o %s 2>&1", flavour, source,
             peer);
    if (capture(command, said, sizeof said) == 0) return true;
    fprintf(stderr, "%s: its compiler failed, skipped: %s\n%s", flavour, command, said);
    return false;
}

/* Run a command that ends in mpi_peer with `sizes`; times (count, stride) gets `reps` times of each size in
 * seconds. false when it failed or a result was wrong: then times are as they were. */
static inline bool mpi_rival_run(const char *command, int count, int reps, double *times,
                                 int stride)
{
    static char text[1 << 16];
    const bool failed = capture(command, text, sizeof text);
    const bool wrong = strstr(text, "wrong") != NULL;
    char *at = text;
    if (failed || wrong) {
        fprintf(stderr, "%s: %s\n", wrong ? "wrong result" : "failed", command);
        return false;
    }
    for (int s = 0; s < count; s++) {
        strtoull(at, &at, 10);
        for (int r = 0; r < reps; r++) times[s * stride + r] = strtod(at, &at);
    }
    return true;
}

#endif
