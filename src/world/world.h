/* World and launch
 *
 * A world says which rank this is, of how many. dtrain_launch is the one way in: it starts the
 * local ranks, hands each a world, watches over them and reports how they ended. Started by another
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
 * Rank 0 listens at all addresses of its host, and at the loopback alone when its address is one.
 * Strangers and ranks with another DTRAIN_JOB_KEY are refused, and the run goes on waiting for its
 * own; a stranger that says nothing holds up nobody. The key itself is not sent, only hashes made
 * with it; but the traffic is not encrypted, and who can read or change it must be kept away by the
 * network.
 *
 * On one host, joined ranks share memory as forked ones do. A half or contradictory setting is an
 * error. A launcher that announces one rank is no launcher: dtrain_launch forks as its desc
 * says. */

#pragma once

#include "core/api.h"
#include "core/log.h"
#include "core/result.h"
#include "device/device.h"

typedef struct dtrain_world dtrain_world;
typedef struct dtrain_comm dtrain_comm;
typedef struct dtrain_comm_ops dtrain_comm_ops;

typedef enum dtrain_launch_mode {
    DTRAIN_LAUNCH_PROCESSES = 0, /* fork: one process a rank */
    DTRAIN_LAUNCH_THREADS = 1    /* one thread a rank, for tests and race detectors */
} dtrain_launch_mode;

#define DTRAIN_MAX_RANKS 256

/* The local communicator as a cluster: consecutive ranks form nodes, and what passes between nodes
 * takes the time that a link would. An emulation for measuring and teaching: the data still goes
 * through shared memory, ranks wait without using the processor, and inside a node nothing is
 * slowed. The world reports these nodes as its hosts.
 *
 * The model: every node has one full-duplex link, which its ranks share, first come, first served.
 * A collective costs latency_us for each of its rounds and, on each link, the bytes that dtrain's
 * MPI communicator would move over it, at gigabits_per_second; the table is in comm/links.c.
 * Headers are not counted: TCP over Ethernet carries 0.94 of the link's nominal rate as data.
 *
 * A transfer begins when the last rank starts the operation and goes on while ranks compute. Waits
 * notice its end some 0.1 ms late at most. timeout_ms counts as ever: it must be longer than the
 * slowest transfer with all that is queued before it. dtrain_world_all_gather and dtrain_launch
 * cost nothing. Ranks of a launcher can be emulated nodes when they are on one host and give the
 * same desc. */
typedef struct dtrain_emulation {
    uint32_t node_ranks;        /* ranks of a node; divides rank_count; 0 = no emulation */
    double gigabits_per_second; /* of a node's link, in each direction: 1e9 bits a second */
    double latency_us;          /* of a message between nodes */
} dtrain_emulation;

/* A trace: what every rank does when, in the Trace Event Format, for ui.perfetto.dev or
 * chrome://tracing. Rank r writes a file of its own, with ".rank<r>" before the extension of path:
 * passes, units and operations by name, waits, the update, checkpoints, and every collective with
 * its bytes and the bucket that asked for it. build/trace brings the files of all ranks together.
 * What is seen of a device that queues its work, a GPU, is when the host queued it.
 *
 * Memory is taken at the start and files are written between steps; a file that cannot be created
 * is an error of the rank, and one that later cannot be written a warning: training goes on. */
typedef struct dtrain_trace_desc {
    const char *path;     /* NULL = no trace */
    uint64_t first_step;  /* of a trainer, from 1: what is before it is left out; 0 = all counts */
    uint64_t step_count;  /* so many of a trainer's steps; 0 = all */
    uint64_t file_bytes;  /* a rank's file ends when it has so many; 0 = 256 MiB */
    uint32_t event_count; /* held in memory until they are written; 0 = 8192 */
} dtrain_trace_desc;

/* Zero means default. */
typedef struct dtrain_launch_desc {
    uint32_t rank_count;       /* of the world; 0 = the launcher's number, and without a launcher
                                  default_rank_count; at most DTRAIN_MAX_RANKS */
    uint32_t mode;             /* dtrain_launch_mode */
    uint32_t threads_per_rank; /* compute threads of a rank; 0 = cores / local ranks, at least 1 */
    uint32_t timeout_ms;       /* deadline of every wait for other ranks; 0 = 600000 */
    uint32_t grace_ms;         /* after the first failure the others get this long; 0 = 5000 */
    uint32_t log_level;        /* dtrain_log_level */
    size_t reserve_bytes;      /* shared address space per rank, committed only when touched;
                                    0 = the machine's memory */
    dtrain_log_fn log;         /* NULL = stderr */
    void *log_user;
    dtrain_allocator allocator;             /* zeros = malloc and free */
    const dtrain_device_ops *device_ops;    /* NULL = CPU */
    const struct dtrain_comm_ops *comm_ops; /* of the world's communicator; NULL = local, and with a
                                               GPU local through host memory */
    uint32_t math;                          /* dtrain_math, for the device */
    uint32_t default_rank_count;            /* see rank_count; 0 = 1 */
    bool tune;                              /* for the device: its desc says what it does */
    uint64_t memory_limit; /* bytes of a rank's device, communicator memory included: what would
                              go beyond is DTRAIN_ERROR_MEMORY, and what AUTO and automatic
                              batches keep to. 0 = none. Not in it: the process itself and scratch
                              of kernels */
    dtrain_emulation emulation; /* all zero = none */
    uint32_t restarts;   /* how often in a row the run is started again after a failure, if it makes
                            no progress; see Restarts. 0 = never */
    uint32_t backoff_ms; /* before a restart; doubled for each in a row, up to 64 times as long;
                            0 = 1000 */
    uint32_t min_ranks;  /* a restart in which the system refuses to start some ranks goes on with
                            those that it has started, if they are as many; 0 = all are needed */
    bool catch_signals; /* SIGTERM, SIGINT, SIGHUP and SIGUSR1 ask ranks to stop, instead of killing
                            them: see dtrain_world_stop_requested; SIGUSR2: see dtrain_world_dump */
    const char *flight_directory; /* every rank whose run fails writes its last collectives there,
                                     see dtrain_world_dump; NULL = DTRAIN_FLIGHT_DIRECTORY of the
                                     environment, and without that nowhere */
    dtrain_trace_desc trace;      /* all zero = none */
    uint32_t join_ms; /* how long ranks of a launcher wait for each other at the start; 0 =
                         timeout_ms, and not more than five minutes */
    bool explain;     /* log what dtrain_launch_explain says; DTRAIN_EXPLAIN_LAUNCH=1 in the
                         environment does it too, and =all on every rank */
} dtrain_launch_desc;

/* How the run ended. */
typedef struct dtrain_launch_info {
    uint32_t rank_count;
    int first_failed_rank; /* -1: none failed */
    int exit_code;         /* for main(): 0, the failed rank's return value, or 128 + signal */
    int signal;            /* that ended the first failed rank, or 0; or that was forwarded, or
                              caught by a rank */
    double seconds;
    uint32_t restart_count; /* see dtrain_world_info */
} dtrain_launch_info;

/* The main function of a rank. Its return value is the rank's exit status: 0 = success. */
typedef int (*dtrain_rank_fn)(dtrain_world *world, void *user);

/* Start desc->rank_count ranks that each run rank_main, wait for all of them, and return DTRAIN_OK
 * when all returned 0. Otherwise DTRAIN_ERROR_RANK_FAILED, and dtrain_last_error() names the rank
 * that failed first and how. Ranks still running grace_ms after a failure are killed.
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
 * A run that was asked to stop by a signal is not restarted; a signal during the wait ends the run,
 * with 128 + signal as exit code. Each restart tries to start all ranks, also after one that went
 * on with fewer (min_ranks). Ranks that are threads are restarted too, but what they have not freed
 * stays.
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
} dtrain_launch_place;

/* Explain what dtrain_launch would do with this desc and the environment as it is, and start
 * nothing. place, which may be NULL, receives the ranks (zeros after an error); text (room bytes,
 * cut there; NULL with 0 when nobody reads it) receives lines:
 *
 *     torchrun       taken: RANK=3 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2
 *     Slurm          ignored, torchrun goes before it: SLURM_PROCID=1 SLURM_STEP_ID=0
 *     ranks          this process is rank 3 of 8, local rank 1 of 2
 *     meeting        at head port 29600, for at most 300 s
 *
 * and so on: every family of variables that is set, why it is taken or not, and what comes of it.
 * DTRAIN_JOB_KEY is not shown. The result is that of dtrain_launch's own checks: a half or
 * contradictory environment is explained, and then refused. */
DTRAIN_API dtrain_result dtrain_launch_explain(const dtrain_launch_desc *desc, char *text,
                                               size_t room, dtrain_launch_place *place);

/* Return this rank's number, from 0. */
DTRAIN_API int dtrain_world_rank(const dtrain_world *world);
/* Return the number of ranks. */
DTRAIN_API int dtrain_world_size(const dtrain_world *world);
/* Return this rank's device, which the world owns. */
DTRAIN_API dtrain_device *dtrain_world_device(dtrain_world *world);
/* Return the communicator of all ranks, which the world owns. */
DTRAIN_API dtrain_comm *dtrain_world_comm(dtrain_world *world);
/* Where a rank stands, and what its launch desc has come to. Under emulation a node stands for a
 * host. */
typedef struct dtrain_world_info {
    int rank, size;
    int local_rank,
        local_size;       /* among the ranks of this host: which GPU is its own, of how many */
    int node, node_count; /* of this host; numbered in the order of their lowest ranks */
    uint32_t threads;     /* compute threads of this rank */
    uint32_t timeout_ms;  /* deadline of every wait for other ranks */
    dtrain_allocator allocator;
    uint32_t restart_count; /* how often this run was started again: by dtrain_launch, and by what
                               is around it (TORCHELASTIC_RESTART_COUNT, SLURM_RESTART_COUNT) */
} dtrain_world_info;

/* Fill info with where this rank stands; with zeros when world is NULL. */
DTRAIN_API void dtrain_world_query(const dtrain_world *world, dtrain_world_info *info);

#define DTRAIN_WORLD_ALL_GATHER_BYTES 4096

/* Gather small records from all ranks: all (size * bytes) receives every rank's `mine` (bytes), in
 * rank order. Collective and blocking, at most until the deadline; every rank passes the same
 * bytes, at most DTRAIN_WORLD_ALL_GATHER_BYTES; 0 is a barrier. It is meant for ids, addresses and
 * verdicts, and needs neither a communicator nor a device. When another rank has failed, the result
 * is DTRAIN_ERROR_PEER; when the gathering itself fails, all ranks fail as by
 * dtrain_world_abort. */
DTRAIN_API dtrain_result dtrain_world_all_gather(dtrain_world *world, const void *mine,
                                                 size_t bytes, void *all);

/* End the waits of all ranks, this one included, with DTRAIN_ERROR_PEER and this text: for a
 * failure that the others cannot see, such as a lost device or a library's error. The first abort
 * of a run stands, later ones are dropped. Never blocks. */
DTRAIN_API void dtrain_world_abort(dtrain_world *world, dtrain_result code, const char *text);

/* Check, without blocking, whether a rank has died, left or aborted: DTRAIN_OK, or
 * DTRAIN_ERROR_PEER with the sentence. Cheap enough for a polling loop. A rank that returned 0
 * counts as gone two seconds later: an operation that it took part in may still be finishing
 * here. */
DTRAIN_API dtrain_result dtrain_world_poll(dtrain_world *world);

/* Tell the launcher that a later attempt can go on behind this step, so that failures from now on
 * are not counted with those before: checkpoints call it when one is published. A run whose steps
 * after a restart do not go beyond those before it counts as a crash loop. Local and cheap; any
 * rank may call it, from any of its threads, and the highest step stands. dtrain-run hears of it
 * too, through DTRAIN_PROGRESS_FILE. Without desc.restarts, or under another launcher, nothing is
 * done with it. */
DTRAIN_API void dtrain_world_progress(dtrain_world *world, uint64_t step);

/* Say whether SIGTERM, SIGINT, SIGHUP or SIGUSR1 has come to this rank, with desc.catch_signals;
 * false without it. A SIGHUP that is ignored when the run begins, as under nohup, stays ignored.
 * Local and cheap enough for every step. The signal may come to one rank alone, or to each between
 * other steps: ranks may act on it only when they agree, by dtrain_world_agree_stop or by a word
 * that they exchange anyway.
 *
 * The handlers only note the signal, whatever they interrupt: waits and collectives go on. A second
 * one, more than a second after the first and no SIGUSR1, ends the process at once; until then it
 * may be the same one, sent to the process group and forwarded; the launcher's log says so. The
 * host's handlers are back when dtrain_launch returns. Processes: in ranks alone, the launcher
 * forwards what it gets. Threads: the signal is the process's, so it comes to all ranks. A run
 * whose ranks then return 0 has succeeded, and info.signal tells of the signal; one that fails is
 * not restarted. */
DTRAIN_API bool dtrain_world_stop_requested(const dtrain_world *world);

/* Agree on whether to stop: *stop is true on every rank when dtrain_world_stop_requested is on any.
 * Collective and blocking like dtrain_world_all_gather, which carries it: for a host with a loop of
 * its own, once a step or every few steps. *stop is false on failure. */
DTRAIN_API dtrain_result dtrain_world_agree_stop(dtrain_world *world, bool *stop);

/* Write the flight record of this rank to DIRECTORY/flight-RANK.json: its last 256 collectives and
 * messages (communicator, sequence number, kind, reduction, dtype, count, which bucket asked and
 * the name of its first parameter, state, times on the monotonic clock), and for every rank the
 * last call and how long ago it gave a sign of life, as far as ranks share memory. build/flight
 * DIRECTORY reads the files of all ranks and says who is behind, or who called what.
 *
 * Local; it waits for no other rank. The directory is made if it is missing, and the file appears
 * whole. Errors: DTRAIN_ERROR_ARGUMENT, DTRAIN_ERROR_SYSTEM.
 *
 * With desc.flight_directory a rank does it by itself, once: when a collective, or
 * dtrain_world_poll, ends in a failure (a deadline, a mismatch, the failure of another rank), or
 * when rank_main returns another value than 0. That file stands: later calls with the same
 * directory leave it as it is. A restarted rank replaces it at its next failure; give each run a
 * directory of its own. With desc.catch_signals too, SIGUSR2 makes a rank write its file at its
 * next call or wait, and the run goes on: for a look at a run that seems to hang. */
DTRAIN_API dtrain_result dtrain_world_dump(dtrain_world *world, const char *directory);

/* Send one formatted line to the log. */
#if defined(__GNUC__)
__attribute__((format(printf, 3, 4)))
#endif
DTRAIN_API void
dtrain_log(dtrain_world *world, dtrain_log_level level, const char *format, ...);

/* Ask the operating system for the memory of this process: the proportional set size now, and the
 * high-water mark of the resident set size. 0 where it is unknown. */
DTRAIN_API void dtrain_process_memory(uint64_t *now_bytes, uint64_t *peak_bytes);
