/* A launch: types and functions that the files of launch/ share. */

#pragma once

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/log.h"
#include "core/result.h"
#include "world/world.h"
#include "world/link_internal.h"
#include "world/world_internal.h"
#include "launch/join.h"
#include "launch/launch.h"

#define DTRAIN__PROGRESS_MAGIC "dtrain progress" /* and the 0 at its end: 16 bytes */
#define DTRAIN__RESTART_TEXT 128

/* The restart policy of dtrain_launch and dtrain-run. An attempt is one start of all ranks. It
 * makes progress if it announces a further step than all attempts before. */
typedef struct dtrain__restarts {
    uint32_t most;       /* limit of restarts in a row without progress; 0: none */
    uint32_t backoff_ms; /* wait before a restart, doubled for each in a row, at most six times */
    uint32_t in_a_row;   /* restarts since the last progress */
    uint64_t best;       /* 1 + the furthest step announced; 0: none */
} dtrain__restarts;

typedef struct dtrain__launch {
    dtrain_launch_desc desc; /* resolved */
    dtrain_abi abi;          /* a copy of the program's */
    dtrain__log_sink log;    /* of rank -1, the launcher */
    dtrain_rank_fn rank_main;
    void *user;
    dtrain__placement place; /* rank: first rank of this process; size: of the world */
    bool joins;              /* true if another launcher started the ranks, which meet by TCP */
    bool is_rank;            /* true if `joins` and this process is a rank; it does not fork */
    dtrain_result joined;    /* result of making this rank's world, if is_rank */
    dtrain__guest *guest;    /* of dtrain_world_join; or NULL */
    dtrain_join_desc join;   /* of the guest */
    dtrain__region region;
    uint32_t cores;
    uint64_t job;                 /* see dtrain_world */
    uint64_t start_ns, kill_ns;   /* kill_ns: end of the grace period; 0: no failure, 1: ended */
    pid_t launcher;               /* this process if it forks ranks and waits for signals; else 0 */
    pid_t pids[DTRAIN_MAX_RANKS]; /* 0: not started, or reaped */
    int live;                     /* processes to reap */
    int stops[DTRAIN_MAX_RANKS];  /* signal that has stopped each process; 0: it runs */
    int forwarded, stop_count;    /* last request to stop; number of requests */
    int passed_on;                /* last signal forwarded, including SIGUSR1 and SIGUSR2 */
    uint64_t stop_ns;             /* time of the last request to stop */
    sigset_t watched, old_mask;   /* `watched` is blocked while this process forks ranks */
    uint32_t gate;                /* atomic, for ranks that are threads: 0 wait, 1 run, 2 return */
    uint32_t taken;               /* atomic: number of threads that have taken a rank */

    /* Attempts. */
    uint64_t attempt_ns;    /* start of this attempt */
    uint32_t restart_count; /* restarts by this call */
    dtrain__restarts restarts;
    uint64_t announced; /* 1 + the furthest step of this attempt; 0: none */
    dtrain_result code; /* last error of the rank that failed first */
    int caught;         /* signal that a rank of this attempt has caught, see signals.c */
} dtrain__launch;

typedef char *(*dtrain__lookup_fn)(const char *name); /* getenv */

/* launch/launch.c */
DTRAIN__PRIVATE uint32_t dtrain__cores(void);
DTRAIN__PRIVATE dtrain_result dtrain__check_launch(const char *call, dtrain__launch *launch);

/* launch/environment.c */
DTRAIN__PRIVATE const char *dtrain__env_text(dtrain__lookup_fn env, const char *name);
DTRAIN__PRIVATE dtrain_result dtrain__recognise(dtrain__lookup_fn env, dtrain__placement *out);

/* launch/rank.c */
DTRAIN__PRIVATE dtrain_result dtrain__world_create(const dtrain__launch *launch, int rank,
                                                   dtrain_world **out);
DTRAIN__PRIVATE void dtrain__world_destroy(dtrain_world *world);
DTRAIN__PRIVATE int dtrain__rank_run(dtrain__launch *launch, int index);

/* launch/join.c */
DTRAIN__PRIVATE dtrain_result dtrain__guest_meet(dtrain_world *world);

/* launch/restart.c */
DTRAIN__PRIVATE bool dtrain__restarts_next(dtrain__restarts *r, uint64_t announced,
                                           uint64_t *wait_ns, char what[DTRAIN__RESTART_TEXT]);
DTRAIN__PRIVATE bool dtrain__restart(dtrain__launch *launch, dtrain_result *result,
                                     dtrain_launch_info *info);
