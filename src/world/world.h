/* World: which rank this is, of how many, and what ranks tell each other
 *
 * dtrain_launch (launch/launch.h) makes a world for each rank and ends it. */

#pragma once

#include "core/api.h"
#include "core/log.h"
#include "core/result.h"
#include "device/device.h"

typedef struct dtrain_world dtrain_world;
typedef struct dtrain_comm dtrain_comm;
typedef struct dtrain_comm_ops dtrain_comm_ops;

#define DTRAIN_MAX_RANKS 256

/* A trace: what every rank does when, in the Trace Event Format, for ui.perfetto.dev or
 * chrome://tracing. Rank r writes its own file, with ".rank<r>" before the extension of path:
 * passes, units and operations by name, waits, the update, checkpoints, and every collective with
 * its bytes and the bucket that asked for it. build/trace brings the files of all ranks together.
 * What is seen of a device that queues its work, a GPU, is when the host queued it.
 *
 * Memory is taken at the start and files are written between steps; a file that cannot be created
 * is an error of the rank, and one that later cannot be written a warning: training continues. */
typedef struct dtrain_trace_desc {
    const char *path;     /* NULL = no trace */
    uint64_t first_step;  /* first step of a trainer to trace, from 1; 0 = from the start */
    uint64_t step_count;  /* how many steps to trace; 0 = all */
    uint64_t file_bytes;  /* size at which a rank's file ends; 0 = 256 MiB */
    uint32_t event_count; /* held in memory until they are written; 0 = 8192 */
} dtrain_trace_desc;

/* Settings of a world that few programs change, for dtrain_launch and dtrain_world_join. Zero means
 * default. */
typedef struct dtrain_world_options {
    dtrain_log_fn log; /* NULL = stderr; a guest then logs nothing */
    void *log_user;
    dtrain_allocator allocator; /* zeros = malloc and free */
    size_t reserve_bytes;  /* shared address space per rank, committed only when touched; 0 = the
                              machine's memory */
    uint64_t memory_limit; /* bytes of a rank's device, communicator memory included: what would
                              go beyond is DTRAIN_ERROR_MEMORY, and what AUTO and automatic
                              batches keep to. 0 = none. Not in it: the process itself and scratch
                              of kernels */
    const char *flight_directory; /* of dumps, see Dumps in launch/launch.h; NULL =
                                     DTRAIN_FLIGHT_DIRECTORY of the environment, and without that,
                                     or in a guest, there are none */
    dtrain_trace_desc trace;      /* all zero = none */
    uint32_t log_level;           /* dtrain_log_level */
    uint32_t math;                /* dtrain_math, for the device */
    uint32_t node_ranks; /* consecutive ranks that count as a host: a program on one machine does
                            what it would do on several. Divides the number of ranks; 0 = a host is
                            a host */
    bool tune;           /* see dtrain_device_desc */
} dtrain_world_options;

/* Return this rank's number, from 0. */
DTRAIN_API int dtrain_world_rank(const dtrain_world *world);
/* Return the number of ranks. */
DTRAIN_API int dtrain_world_size(const dtrain_world *world);
/* Return this rank's device, which the world owns. */
DTRAIN_API dtrain_device *dtrain_world_device(dtrain_world *world);
/* Return the communicator of all ranks, which the world owns. */
DTRAIN_API dtrain_comm *dtrain_world_comm(dtrain_world *world);
/* A rank's place in the world, and the settings of its launch with defaults filled in. With
 * dtrain_world_options.node_ranks such a node counts as a host. */
typedef struct dtrain_world_info {
    int rank, size;
    int local_rank,
        local_size;       /* among the ranks of this host: which GPU is its own, of how many */
    int node, node_count; /* number of this host, in the order of lowest ranks; number of hosts */
    uint32_t threads;     /* compute threads of this rank */
    uint32_t timeout_ms;  /* deadline of every wait for other ranks */
    dtrain_allocator allocator;
    uint32_t restart_count; /* how often this run was started again: by dtrain_launch, and by what
                               is around it (TORCHELASTIC_RESTART_COUNT, SLURM_RESTART_COUNT) */
    bool stop_requested;    /* a signal has asked this rank to stop: see Signals in
                               launch/launch.h */
    bool guest;             /* dtrain_world_join made this world */
    const void *comm_given; /* for comm_ops.create: of dtrain_join_desc; NULL later */
} dtrain_world_info;

/* Fill info with this rank's place and settings; with zeros when world is NULL. Local and cheap
 * enough for every step. */
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
 * of a run counts, later ones are dropped. Never blocks. */
DTRAIN_API void dtrain_world_abort(dtrain_world *world, dtrain_result code, const char *text);

/* Check, without blocking, whether a rank has died, left or aborted: DTRAIN_OK, or
 * DTRAIN_ERROR_PEER with the sentence. Cheap enough for a polling loop. A rank that returned 0
 * counts as gone two seconds later: an operation that it took part in may still be finishing on
 * this rank. */
DTRAIN_API dtrain_result dtrain_world_poll(dtrain_world *world);

/* Tell the launcher that a later attempt can continue after this step, so that failures from now on
 * are not counted with earlier ones: checkpoints call it when one is published. A run whose steps
 * after a restart do not go beyond those before it counts as a crash loop. Local and cheap; any
 * rank may call it, from any of its threads, and the highest step counts. dtrain-run hears of it
 * too, through DTRAIN_PROGRESS_FILE. Without desc.restarts, or under another launcher, nothing is
 * done with it. */
DTRAIN_API void dtrain_world_progress(dtrain_world *world, uint64_t step);

/* Send one formatted line to the log. */
#if defined(__GNUC__)
__attribute__((format(printf, 3, 4)))
#endif
DTRAIN_API void
dtrain_log(dtrain_world *world, dtrain_log_level level, const char *format, ...);
