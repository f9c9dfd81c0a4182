/* World: this rank, the number of ranks, and small messages between ranks
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

/* A trace of what every rank does, in the Trace Event Format, for ui.perfetto.dev or
 * chrome://tracing. Rank r writes a file with ".rank<r>" before the extension of path: passes,
 * units and operations by name, waits, the update, checkpoints, and every collective with its bytes
 * and its bucket. build/trace merges the files of all ranks. A GPU's work is shown at the time when
 * the host queued it.
 *
 * Memory is allocated at the start, and files are written between steps. A file that cannot be
 * created is an error; after a failed write there is a warning, and training continues. */
typedef struct dtrain_trace_desc {
    const char *path;     /* NULL = no trace */
    uint64_t first_step;  /* first step of a trainer to trace, from 1; 0 = from the start */
    uint64_t step_count;  /* number of steps to trace; 0 = all */
    uint64_t file_bytes;  /* limit of a rank's file; 0 = 256 MiB */
    uint32_t event_count; /* events kept in memory until they are written; 0 = 8192 */
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
 * dtrain_world_options.node_ranks, a node counts as a host. */
typedef struct dtrain_world_info {
    int rank, size;
    int local_rank, local_size; /* rank among the ranks of this host, which chooses its GPU; their
                                   number */
    int node, node_count; /* number of this host, in the order of lowest ranks; number of hosts */
    uint32_t threads;     /* compute threads of this rank */
    uint32_t timeout_ms;  /* deadline of every wait for other ranks */
    dtrain_allocator allocator;
    uint32_t restart_count; /* restarts of this run by dtrain_launch and by the launcher around it
                               (TORCHELASTIC_RESTART_COUNT, SLURM_RESTART_COUNT) */
    bool stop_requested;    /* true if a signal has asked this rank to stop: see Signals in
                               launch/launch.h */
    bool guest;             /* true if dtrain_world_join made this world */
    const void *comm_given; /* dtrain_join_desc.comm_given, for comm_ops.create; NULL later */
} dtrain_world_info;

/* Fill info with this rank's place and settings, or with zeros if world is NULL. Local and cheap
 * enough for every step. */
DTRAIN_API void dtrain_world_query(const dtrain_world *world, dtrain_world_info *info);

#define DTRAIN_WORLD_ALL_GATHER_BYTES 4096

/* Gather small records from all ranks: all (size * bytes) receives every rank's `mine` (bytes), in
 * rank order. Collective; blocks at most until the deadline. Every rank passes the same bytes, at
 * most DTRAIN_WORLD_ALL_GATHER_BYTES; 0 makes a barrier. The call is meant for ids, addresses and
 * outcomes, and needs neither a communicator nor a device. It returns DTRAIN_ERROR_PEER if another
 * rank has failed. If the gathering itself fails, all ranks fail as after dtrain_world_abort. */
DTRAIN_API dtrain_result dtrain_world_all_gather(dtrain_world *world, const void *mine,
                                                 size_t bytes, void *all);

/* End the waits of all ranks, including this rank, with DTRAIN_ERROR_PEER and this text: for a
 * failure that other ranks cannot see, such as a lost device or a library's error. The first abort
 * of a run counts, later aborts are ignored. Never blocks. */
DTRAIN_API void dtrain_world_abort(dtrain_world *world, dtrain_result code, const char *text);

/* Check, without blocking, whether a rank has died, left or aborted: then return DTRAIN_ERROR_PEER
 * with the sentence. Cheap enough for a polling loop. A rank that returned 0 counts as gone two
 * seconds later: this rank can still be finishing their last operation. */
DTRAIN_API dtrain_result dtrain_world_poll(dtrain_world *world);

/* Tell the launcher that a later attempt can continue after this step, so that the count of
 * restarts in a row begins again at 0; publishing a checkpoint does this. A run that makes no
 * further progress after restarts is a crash loop. Local and cheap; any thread of any rank may
 * call it, and the highest step counts. dtrain-run reads it through DTRAIN_PROGRESS_FILE. Without
 * desc.restarts, or under another launcher, the call has no effect. */
DTRAIN_API void dtrain_world_progress(dtrain_world *world, uint64_t step);

/* Send one formatted line to the log. */
#if defined(__GNUC__)
__attribute__((format(printf, 3, 4)))
#endif
DTRAIN_API void
dtrain_log(dtrain_world *world, dtrain_log_level level, const char *format, ...);
