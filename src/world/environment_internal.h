/* The result of reading the environment
 *
 * What a launcher has said: the result of reading the environment, which launch.c acts on and the
 * rendezvous meets by. It is a pure function of the variables, so that tests can hand it any. */

#pragma once

#include "core/platform_internal.h"
#include "core/result.h"

typedef char *(*dtrain__lookup_fn)(const char *name); /* getenv */

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
} dtrain__placement;

/* world/environment.c */
DTRAIN__PRIVATE dtrain_result dtrain__recognise(dtrain__lookup_fn env, dtrain__placement *out);
