/* Launch
 *
 * For programs that have no ranks yet (launch/join.h: for others). dtrain_launch starts the local
 * ranks, hands each a world, watches over them and reports how they ended. Started by another
 * launcher as one rank of several, it joins them instead:
 *
 *     launcher        what is read, the first complete family wins
 *     any             DTRAIN_RANK DTRAIN_WORLD_SIZE [DTRAIN_LOCAL_RANK DTRAIN_LOCAL_SIZE]
 *     torchrun, ...   RANK WORLD_SIZE [LOCAL_RANK LOCAL_WORLD_SIZE] MASTER_ADDR MASTER_PORT
 *     Open MPI        OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE
 *     srun            SLURM_PROCID SLURM_STEP_NUM_TASKS ..., where SLURM_STEP_ID is set
 *     MPICH           PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS
 *     Indexed Job     JOB_COMPLETION_INDEX with WORLD_SIZE or DTRAIN_WORLD_SIZE
 *     TrainJob        PET_NNODES PET_NODE_RANK PET_NPROC_PER_NODE: started once a node,
 *                     dtrain_launch forks the ranks of this node
 *
 * Ranks meet by TCP at rank 0's host: DTRAIN_MASTER_ADDR, else MASTER_ADDR (PET_MASTER_ADDR), else
 * what the launcher tells about its hosts. The port is DTRAIN_PORT, else DTRAIN_MASTER_PORT, else
 * MASTER_PORT (29500) + 100, because torchrun itself listens at MASTER_PORT. This takes at most
 * join_ms.
 *
 * Rank 0 listens at all addresses of its host, and only at the loopback when its address is one.
 * Strangers and ranks with another DTRAIN_JOB_KEY are refused, and the run continues to wait for
 * its own ranks; a stranger that says nothing holds up nobody. The key itself is not sent, only
 * hashes made with it; but the traffic is not encrypted, and who can read or change it must be kept
 * away by the network.
 *
 * On one host, joined ranks share memory as forked ones do. A half or contradictory setting is an
 * error. A launcher that announces one rank is no launcher: dtrain_launch forks as its desc
 * says.
 *
 * Dumps: each rank whose run fails writes flight_directory/flight-RANK.json, which appears whole:
 * its last 256 collectives and messages (communicator, sequence number, kind, reduction, dtype,
 * count, which bucket made the call and the name of its first parameter, state, times on the
 * monotonic clock), and for every rank that shares memory the last call and when it was last inside
 * the library. build/flight DIRECTORY reads the files of all ranks and says who is behind, or who
 * called what. A rank fails when a collective or dtrain_world_poll does (a deadline, a mismatch,
 * another rank), or when rank_main returns another value than 0; the first failure's dump is kept.
 * A restarted rank replaces it at its next failure; give each run its own directory. With
 * catch_signals, SIGUSR2 makes each rank dump at its next call or wait, and the run continues: for
 * a run that seems to hang. With a trace, the collectives are those among its last events.
 *
 * Signals: with catch_signals, handlers in the ranks note SIGTERM, SIGINT, SIGHUP and SIGUSR1, and
 * waits and collectives continue. dtrain_world_info.stop_requested tells a rank of the signal,
 * which may have come only to this rank, or to each between other steps. So ranks may act on it
 * only when they agree: a trainer exchanges it in each step's record, your own loop by
 * dtrain_world_all_gather. A run whose ranks then return 0 has succeeded, and info.signal has the
 * number; a run that fails is not restarted. A second signal but SIGUSR1, more than a second after
 * the first (until then it may be the same one, sent to the process group and forwarded), ends the
 * process at once. A SIGHUP that is ignored when the run begins, as under nohup, stays ignored. A
 * signal comes to all ranks that are threads. At the end the host has its handlers back. */

#pragma once

#include "core/abi.h"
#include "core/api.h"
#include "core/log.h"
#include "core/result.h"
#include "world/world.h"
#include "device/device.h"

typedef enum dtrain_launch_mode {
    DTRAIN_LAUNCH_PROCESSES = 0, /* fork: one process a rank */
    DTRAIN_LAUNCH_THREADS = 1    /* one thread a rank, for tests and race detectors */
} dtrain_launch_mode;

/* Zero means default. */
typedef struct dtrain_launch_desc {
    uint32_t rank_count;       /* of the world; 0 = the launcher's number, and without a launcher
                                  default_rank_count; at most DTRAIN_MAX_RANKS */
    uint32_t mode;             /* dtrain_launch_mode */
    uint32_t threads_per_rank; /* compute threads of a rank; 0 = cores / local ranks, at least 1 */
    uint32_t timeout_ms;       /* deadline of every wait for other ranks; 0 = 600000 */
    uint32_t grace_ms;         /* after the first failure the others get this long; 0 = 5000 */
    const dtrain_device_ops *device_ops;    /* NULL = CPU */
    const struct dtrain_comm_ops *comm_ops; /* of the world's communicator; NULL = local, and with a
                                               GPU local through host memory */
    uint32_t default_rank_count;            /* see rank_count; 0 = 1 */
    uint32_t restarts; /* how often in a row the run is started again after a failure, if it makes
                            no progress; see Restarts. 0 = never */
    uint32_t
        backoff_ms;     /* before a restart; doubled for each in a row, at most 64-fold; 0 = 1000 */
    bool catch_signals; /* SIGTERM, SIGINT, SIGHUP and SIGUSR1 ask ranks to stop, instead of killing
                            them: see Signals; SIGUSR2 asks for a dump */
    uint32_t join_ms;   /* how long ranks of a launcher wait for each other at the start; 0 =
                         timeout_ms, and not more than five minutes */
    uint64_t job; /* hash of what the program trains on and how, where the launcher has no name
                         for the run and there is no DTRAIN_JOB_KEY: of two jobs that meet at one
                         port, ranks with another hash are turned away for as long as the right one
                         may still come (ten seconds). 0 = nothing tells such jobs apart */
    const dtrain_abi *abi; /* &dtrain_header_abi, required where dtrain is a library compiled apart
                              (core/abi.h); NULL = program and library are compiled together */
    dtrain_world_options options;
} dtrain_launch_desc;

/* How the run ended. */
typedef struct dtrain_launch_info {
    uint32_t rank_count;
    int first_failed_rank; /* -1: none failed */
    int exit_code;         /* for main(): 0, the failed rank's return value, or 128 + signal */
    int signal;            /* the signal that ended the first failed rank, else the one that asked
                              the run to stop; 0: none */
    double seconds;
    uint32_t restart_count; /* see dtrain_world_info */
} dtrain_launch_info;

/* The main function of a rank. Its return value is the rank's exit status: 0 = success. */
typedef int (*dtrain_rank_fn)(dtrain_world *world, void *user);

/* Start desc->rank_count ranks that each run rank_main, wait for all of them, and return DTRAIN_OK
 * when all returned 0. Otherwise DTRAIN_ERROR_RANK_FAILED, and dtrain_last_error() names the rank
 * that failed first and how. Ranks still running grace_ms after a failure are killed, and ranks
 * that are stopped (SIGSTOP) for timeout_ms after all others have ended.
 *
 * Processes: call it before starting threads and before touching much memory (fork copies page
 * tables). Ranks end by _exit after flushing stdio: the parent's atexit handlers are not theirs.
 * SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1 and SIGUSR2 that reach the parent are forwarded to
 * every rank; no handler is installed in the parent, and the signal mask is restored before the
 * call returns. The second request to stop (one of the first four, more than a second after the
 * first) kills the ranks. If the parent dies, the ranks die with it (Linux).
 * Threads: rank_main must not use non-constant globals; a rank that hangs cannot be killed.
 *
 * Joined ranks: rank_main runs in the calling process, which is one rank; the result is that rank's
 * own. Rank 0 returns when all ranks have ended, or grace_ms after a failure, and reports the first
 * failure of any. When a rank fails and TORCHELASTIC_ERROR_FILE is set, torchrun finds the sentence
 * there.
 *
 * Restarts: with desc->restarts, a run in which a rank fails (it returns another value than 0,
 * crashes, is killed, or hangs until the deadline) is started again. When all ranks have ended, a
 * warning with the sentence of the first failure is logged, and after a wait all ranks start anew,
 * with memory as it was before the call; what they know of the run before is what they saved. When
 * the ranks have announced a further step than any attempt before (dtrain_world_progress), the
 * count in a row and the wait begin anew. After desc->restarts in a row without progress the call
 * returns DTRAIN_ERROR_RANK_FAILED, and the sentence tells of the crash loop and the last failure.
 * A run whose first failure is that a call was refused (DTRAIN_ERROR_ARGUMENT, _USAGE,
 * _UNSUPPORTED or _DATA) is not restarted, unless a step was announced before: it would fail again.
 * A run that was asked to stop by a signal is not restarted; a signal during the wait ends the run,
 * with 128 + signal as exit code. Ranks that are threads are restarted too, but what they have not
 * freed stays.
 *
 * Ranks of another launcher, and those that this call forks on one node of several (TrainJob), are
 * not restarted by this call, because one node cannot start again without the others: restarts is
 * ignored. info->exit_code is not 0 after a failure: return it from main, and that launcher starts
 * all of them again, if it is told to: torchrun --max-restarts, backoffLimit or maxRestarts of
 * Kubernetes, sbatch --requeue.
 *
 * desc and info may be NULL. */
DTRAIN_API dtrain_result dtrain_launch(const dtrain_launch_desc *desc, dtrain_rank_fn rank_main,
                                       void *user, dtrain_launch_info *info);

/* Which ranks a launch starts from this process, and of how many. */
typedef struct dtrain_launch_place {
    int rank_count;                /* of the world */
    int first_rank, started_count; /* the ranks that this process starts, or the one that it is */
    int host_rank_count;           /* ranks of this host; 0: its launcher does not say */
    uint32_t restart_count;        /* restarts so far, by the launcher around this process */
} dtrain_launch_place;

/* Tell which ranks dtrain_launch would start with this desc and the environment as it is, and start
 * nothing. The result is that of dtrain_launch's own checks: after an error (half a setting, a
 * contradiction) *place is zeros. */
DTRAIN_API dtrain_result dtrain_launch_plan(const dtrain_launch_desc *desc,
                                            dtrain_launch_place *place);
