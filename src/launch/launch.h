/* Launch
 *
 * For programs that have no ranks yet; for others see launch/join.h. dtrain_launch starts the local
 * ranks, gives each a world, watches them and reports how they ended. If another launcher started
 * this process as one of several ranks, dtrain_launch joins these ranks instead:
 *
 *     launcher        variables that are read; the first complete family wins
 *     any             DTRAIN_RANK DTRAIN_WORLD_SIZE [DTRAIN_LOCAL_RANK DTRAIN_LOCAL_SIZE]
 *     torchrun, ...   RANK WORLD_SIZE [LOCAL_RANK LOCAL_WORLD_SIZE] MASTER_ADDR MASTER_PORT
 *     Open MPI        OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE
 *     srun            SLURM_PROCID SLURM_STEP_NUM_TASKS ..., if SLURM_STEP_ID is set
 *     MPICH           PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS
 *     Indexed Job     JOB_COMPLETION_INDEX with WORLD_SIZE or DTRAIN_WORLD_SIZE
 *     TrainJob        PET_NNODES PET_NODE_RANK PET_NPROC_PER_NODE: started once per node;
 *                     dtrain_launch forks the ranks of this node
 *
 * Ranks connect by TCP to the host of rank 0: DTRAIN_MASTER_ADDR, else MASTER_ADDR
 * (PET_MASTER_ADDR), else the host that the launcher's other variables name. The port is
 * DTRAIN_PORT, else DTRAIN_MASTER_PORT, else MASTER_PORT (29500) + 100, because torchrun itself
 * listens at MASTER_PORT. Connecting takes at most join_ms.
 *
 * Rank 0 listens at all addresses of its host, or only at the loopback if its address is a loopback
 * address. It refuses strangers and ranks with another DTRAIN_JOB_KEY, and continues to wait for
 * its ranks; a silent stranger delays nobody. Only hashes made with the key are sent, never the
 * key. But the traffic is not encrypted: the network must keep readers and writers away.
 *
 * Ranks on one host share memory, whether they are joined or forked. An incomplete or contradictory
 * setting is an error. A launcher that announces one rank is ignored: dtrain_launch forks as its
 * desc says.
 *
 * Dumps: each rank whose run fails writes flight_directory/flight-RANK.json, under this name only
 * when it is complete. A dump has the last 256 collectives and messages: communicator, sequence
 * number, kind, reduction, dtype, count, bucket and name of its first parameter, state, times on
 * the monotonic clock. For every rank that shares memory it has the last call, and the time when
 * the rank was last inside the library. build/flight DIRECTORY reads the dumps of all ranks, and
 * names the late rank or the calls that differ. A rank fails when a collective or dtrain_world_poll
 * fails (a deadline, a mismatch, another rank), or when rank_main does not return 0. A rank keeps
 * the dump of its first failure. A restarted rank replaces the dump when it fails again; give each
 * run a separate directory. If a run seems to hang, send SIGUSR2: with catch_signals each rank
 * dumps at its next call or wait, and continues. With a trace, a dump has the collectives among
 * the last events of the trace.
 *
 * Signals: with catch_signals, handlers in the ranks note SIGTERM, SIGINT, SIGHUP and SIGUSR1, and
 * waits and collectives continue. dtrain_world_info.stop_requested tells a rank of the signal.
 * Ranks can get it in different steps, or not at all. So they must agree before they stop: a
 * trainer exchanges it in each step's record, your own loop by dtrain_world_all_gather. If all
 * ranks then return 0, the run has succeeded and info.signal has the number. If the run fails, it
 * is not restarted. A second signal (not SIGUSR1) more than a second after the first ends the
 * process at once; an earlier one can be the first, sent to the process group and forwarded. If
 * SIGHUP is ignored when the run begins, as under nohup, it stays ignored. If ranks are threads,
 * they all get the signal. At the end the host's handlers are restored. */

#pragma once

#include "core/abi.h"
#include "core/api.h"
#include "core/log.h"
#include "core/result.h"
#include "world/world.h"
#include "device/device.h"

typedef enum dtrain_launch_mode {
    DTRAIN_LAUNCH_PROCESSES = 0, /* fork: one process per rank */
    DTRAIN_LAUNCH_THREADS = 1    /* one thread per rank, for tests and race detectors */
} dtrain_launch_mode;

/* Zero means default. */
typedef struct dtrain_launch_desc {
    uint32_t rank_count;       /* ranks of the world, at most DTRAIN_MAX_RANKS; 0 = the launcher's
                                  number, or default_rank_count without a launcher */
    uint32_t mode;             /* dtrain_launch_mode */
    uint32_t threads_per_rank; /* compute threads of a rank; 0 = cores / local ranks, at least 1 */
    uint32_t timeout_ms;       /* deadline of every wait for other ranks; 0 = 600000 */
    uint32_t grace_ms;         /* time for other ranks to end after the first failure; 0 = 5000 */
    const dtrain_device_ops *device_ops;    /* NULL = CPU */
    const struct dtrain_comm_ops *comm_ops; /* communicator of the world; NULL = local, which uses
                                               host memory for GPU data */
    uint32_t default_rank_count;            /* see rank_count; 0 = 1 */
    uint32_t restarts; /* limit of restarts in a row without progress, after failures; see
                          Restarts. 0 = never restart */
    uint32_t
        backoff_ms; /* wait before a restart; doubled for each in a row, up to 64-fold. 0: 1000 */
    bool catch_signals; /* true: SIGTERM, SIGINT, SIGHUP and SIGUSR1 ask ranks to stop and do not
                            kill them, and SIGUSR2 asks for a dump: see Signals */
    uint32_t join_ms;   /* limit of the wait for other joined ranks at the start; 0 = timeout_ms,
                           at most five minutes */
    uint64_t job; /* hash of the program's settings and data, for a run without DTRAIN_JOB_KEY and
                         without a name from its launcher. If two jobs meet at one port, rank 0
                         refuses ranks with another hash, but accepts one if the right rank has not
                         come after ten seconds. 0 = no hash */
    const dtrain_abi *abi; /* &dtrain_header_abi, required if dtrain is a library compiled apart
                              (core/abi.h); NULL = program and library are compiled together */
    dtrain_world_options options;
} dtrain_launch_desc;

/* How the run ended. */
typedef struct dtrain_launch_info {
    uint32_t rank_count;
    int first_failed_rank; /* -1: none failed */
    int exit_code;         /* for main(): 0, the failed rank's return value, or 128 + signal */
    int signal;            /* signal that ended the first failed rank, else signal that asked the
                              run to stop; 0: none */
    double seconds;
    uint32_t restart_count; /* see dtrain_world_info */
} dtrain_launch_info;

/* The main function of a rank. Its return value is the rank's exit status: 0 = success. */
typedef int (*dtrain_rank_fn)(dtrain_world *world, void *user);

/* Start desc->rank_count ranks, run rank_main in each, and wait for all of them. Return DTRAIN_OK
 * if all returned 0; else DTRAIN_ERROR_RANK_FAILED, and dtrain_last_error() names the first failed
 * rank and how it failed. Ranks that still run grace_ms after a failure are killed; so are ranks
 * that are still stopped (SIGSTOP) timeout_ms after all others have ended.
 *
 * Processes: call it before the program starts threads or touches much memory (fork copies page
 * tables). Ranks end by _exit after flushing stdio, so they run none of the parent's atexit
 * handlers. The parent forwards SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1 and SIGUSR2 to every
 * rank. It installs no handler, and restores the signal mask before the call returns. The second
 * request to stop (one of the first four, more than a second after the first) kills the ranks. If
 * the parent dies, the ranks die with it (Linux).
 * Threads: rank_main must not use non-constant globals; a rank that hangs cannot be killed.
 *
 * Joined ranks: the calling process is one rank and runs rank_main; the result is the result of
 * this rank. Rank 0 returns when all ranks have ended, or grace_ms after a failure, and reports the
 * first failure of any rank. If TORCHELASTIC_ERROR_FILE is set, a failed rank writes its error
 * sentence there for torchrun.
 *
 * Restarts: with desc->restarts, a run is started again after a rank has failed: it returned
 * another value than 0, crashed, was killed, or hung until the deadline. When all ranks have ended,
 * a warning gives the first failure, and after a wait all ranks start again. Their memory is as it
 * was before the call, so they load what they saved. If the ranks announced a further step than all
 * attempts before (dtrain_world_progress), the count in a row and the wait begin again. After
 * desc->restarts in a row without progress the call returns DTRAIN_ERROR_RANK_FAILED, with the
 * crash loop and the last failure in the sentence. A run is not restarted if its first failure is a
 * refused call (DTRAIN_ERROR_ARGUMENT, _USAGE, _UNSUPPORTED or _DATA) and no step was announced: it
 * would fail again. A run that a signal asked to stop is not restarted. A signal during the wait
 * ends the run, with the exit code 128 + signal. Ranks that are threads are restarted too; memory
 * that they have not freed stays allocated.
 *
 * This call does not restart ranks of another launcher, nor ranks that it forks on one of several
 * nodes (TrainJob), because a node cannot start again without the others: restarts is ignored.
 * After a failure info->exit_code is not 0: return it from main. Then the other launcher starts all
 * ranks again, if it is configured to: torchrun --max-restarts, backoffLimit or maxRestarts of
 * Kubernetes, sbatch --requeue.
 *
 * desc and info can be NULL. */
DTRAIN_API dtrain_result dtrain_launch(const dtrain_launch_desc *desc, dtrain_rank_fn rank_main,
                                       void *user, dtrain_launch_info *info);

/* The ranks that a launch starts from this process. */
typedef struct dtrain_launch_place {
    int rank_count;                /* ranks of the world */
    int first_rank, started_count; /* ranks that this process starts, or the rank that it is */
    int host_rank_count;           /* ranks of this host; 0: the launcher does not say */
    uint32_t restart_count;        /* restarts so far by the launcher around this process */
} dtrain_launch_place;

/* Tell which ranks dtrain_launch would start with this desc in this environment; start nothing. The
 * checks and errors are the same as in dtrain_launch. After an error (an incomplete setting, a
 * contradiction) *place is zeros. */
DTRAIN_API dtrain_result dtrain_launch_plan(const dtrain_launch_desc *desc,
                                            dtrain_launch_place *place);
