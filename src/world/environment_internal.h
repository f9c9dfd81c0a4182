/* The result of reading the environment
 *
 * What a launcher has said: the result of reading the environment, which launch.c acts on and the
 * rendezvous meets by. It is a pure function of the variables, so that tests can hand it any. */

#pragma once

#include "core/platform_internal.h"
#include "core/result.h"

typedef char *(*dtrain__lookup_fn)(const char *name); /* getenv */

/* The families of variables, in the order in which they are looked at. */
enum {
    DTRAIN__OURS,
    DTRAIN__TORCHRUN,
    DTRAIN__OPEN_MPI,
    DTRAIN__SLURM,
    DTRAIN__MPICH,
    DTRAIN__INDEXED,
    DTRAIN__PET,
    DTRAIN__FAMILIES
};

typedef struct dtrain__family {
    const char *name;
    const char *rank, *size, *local_rank, *local_size; /* variables; NULL: it has none */
    const char *address, *port;                        /* of rank 0's host */
    const char *run, *run_part;                        /* that name the run */
} dtrain__family;

/* Where the environment places this process. */
typedef struct dtrain__placement {
    const char *family;         /* NULL: no launcher, or one that started a world of one */
    int rank, size;             /* forks > 0: of the node's first rank */
    int local_rank, local_size; /* -1, 0: not said */
    int forks;                  /* ranks this process has to start; 0: it is a rank itself */
    char address[256];          /* of rank 0; "": the world is on one node that we fork */
    uint32_t port;              /* of the control plane */
    uint32_t restart_count;     /* by the launcher around this process, so far */
    uint64_t key[2];            /* tells this run from others, see world/rendezvous.c */
    int looked;                 /* for explain.c: the last family that was looked at ... */
    bool complete;              /* ... and whether it has a rank and a size */
} dtrain__placement;

/* world/environment.c */
DTRAIN__PRIVATE const dtrain__family *dtrain__family_table(void);
DTRAIN__PRIVATE const char *dtrain__env_text(dtrain__lookup_fn env, const char *name);
DTRAIN__PRIVATE dtrain_result dtrain__recognise(dtrain__lookup_fn env, dtrain__placement *out);
