/* The result of reading the environment
 *
 * What a launcher has said: the result of reading the environment, which launch.c acts on and the
 * rendezvous meets by. It is a pure function of the variables, so that tests can hand it any. */

#pragma once

#include "core/platform_internal.h"
#include "core/result.h"
#include "world/link_internal.h"

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

/* launch/environment.c */
DTRAIN__PRIVATE const dtrain__family *dtrain__family_table(void);
DTRAIN__PRIVATE const char *dtrain__env_text(dtrain__lookup_fn env, const char *name);
DTRAIN__PRIVATE dtrain_result dtrain__recognise(dtrain__lookup_fn env, dtrain__placement *out);
