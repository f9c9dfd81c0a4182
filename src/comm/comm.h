/* Communicators
 *
 * A communicator is a group of ranks. Every collective is called by all its ranks in the same
 * order with the same count, dtype, operation and root; the `local` backend compares these on
 * every call and turns a difference into DTRAIN_ERROR_MISMATCH on all ranks.
 *
 * The last argument decides how a call ends: work == NULL blocks until it is done; otherwise it
 * returns at once and *work (NULL when there is nothing to wait for) must be given to
 * dtrain_work_wait exactly once. Until then the buffers
 * belong to the operation. Operations of one communicator are carried out in the order they were
 * started. The local backend has no progress thread (on a CPU it would steal the cores that
 * compute): operations advance inside any call on the world's communicators.
 *
 * send == recv (in place) is allowed wherever the sizes are equal, and for reduce-scatter and
 * all-gather when the small buffer is this rank's slice of the large one; other overlap is an
 * error.
 * Counts are elements; buffers need no alignment; count 0 is a synchronisation without data. A
 * buffer lies in host memory or in memory of the world's device; with device memory an operation
 * starts after the work queued on the compute stream before it, and dtrain_work_wait makes later
 * work on that stream wait for it.
 * fp32, bf16 and fp16 sums are accumulated in fp32 in rank order and rounded once, so the bits
 * depend neither on timing nor on how buffers were cut; integers wrap; min and max of anything and
 * NaN are NaN.
 *
 * After any error, a wrong argument included, the communicator has failed: every later call returns
 * the same error, and the other ranks get DTRAIN_ERROR_PEER instead of a sum without this rank. */

#pragma once

#include "core/api.h"
#include "core/dtype.h"
#include "core/result.h"
#include "world/world.h"

typedef struct dtrain_work dtrain_work;

typedef enum dtrain_collective_kind {
    DTRAIN_COLLECTIVE_ALL_REDUCE = 1,
    DTRAIN_COLLECTIVE_REDUCE_SCATTER = 2,
    DTRAIN_COLLECTIVE_ALL_GATHER = 3,
    DTRAIN_COLLECTIVE_BROADCAST = 4,
    DTRAIN_COLLECTIVE_REDUCE = 5,
    DTRAIN_COLLECTIVE_BARRIER = 6,
    DTRAIN_COLLECTIVE_SEND = 7,
    DTRAIN_COLLECTIVE_RECV = 8,
    DTRAIN_COLLECTIVE_SPLIT = 9,
    DTRAIN_COLLECTIVE_ALL_TO_ALL = 10
} dtrain_collective_kind;

#define DTRAIN_COLLECTIVE_KINDS 11 /* entries of a table by kind; [0] is unused */

/* Reduce send (count) over all ranks into recv (count) of every rank. */
DTRAIN_API dtrain_result dtrain_all_reduce(dtrain_comm *comm, const void *send, void *recv,
                                           size_t count, dtrain_dtype dtype, dtrain_reduce_op op,
                                           dtrain_work **work);
/* Reduce send (ranks * recv_count) over all ranks and keep this rank's slice in recv
 * (recv_count). */
DTRAIN_API dtrain_result dtrain_reduce_scatter(dtrain_comm *comm, const void *send, void *recv,
                                               size_t recv_count, dtrain_dtype dtype,
                                               dtrain_reduce_op op, dtrain_work **work);
/* Collect send (send_count) of all ranks, in rank order, in recv (ranks * send_count). */
DTRAIN_API dtrain_result dtrain_all_gather(dtrain_comm *comm, const void *send, void *recv,
                                           size_t send_count, dtrain_dtype dtype,
                                           dtrain_work **work);
/* Collect slice `rank` (count) of every rank's send (ranks * count), in rank order, in recv
 * (ranks * count). Not in place. */
DTRAIN_API dtrain_result dtrain_all_to_all(dtrain_comm *comm, const void *send, void *recv,
                                           size_t count, dtrain_dtype dtype, dtrain_work **work);
/* Copy root's buffer (count) to every rank's. */
DTRAIN_API dtrain_result dtrain_broadcast(dtrain_comm *comm, void *buffer, size_t count,
                                          dtrain_dtype dtype, int root, dtrain_work **work);
/* Reduce send (count) over all ranks into recv (count) of root; other ranks' recv is ignored. */
DTRAIN_API dtrain_result dtrain_reduce(dtrain_comm *comm, const void *send, void *recv,
                                       size_t count, dtrain_dtype dtype, dtrain_reduce_op op,
                                       int root, dtrain_work **work);
/* Send to one rank. Messages are matched in order for each pair of ranks, apart from the
 * collectives. Counts and dtypes must agree. peer == own rank is an error. Between ranks of one
 * machine a long message comes while this rank computes; others move inside of calls. */
DTRAIN_API dtrain_result dtrain_send(dtrain_comm *comm, const void *buffer, size_t count,
                                     dtrain_dtype dtype, int peer, dtrain_work **work);
/* Receive from one rank what it sends with dtrain_send. */
DTRAIN_API dtrain_result dtrain_recv(dtrain_comm *comm, void *buffer, size_t count,
                                     dtrain_dtype dtype, int peer, dtrain_work **work);
/* Wait until every rank has called it. */
DTRAIN_API dtrain_result dtrain_barrier(dtrain_comm *comm);

/* Wait until the operation is done, report its result and give the handle back. NULL is OK. */
DTRAIN_API dtrain_result dtrain_work_wait(dtrain_work *work);
/* Advance the communicator without blocking and say whether the operation is done; the handle
 * still goes to dtrain_work_wait. */
DTRAIN_API dtrain_result dtrain_work_test(dtrain_work *work, bool *done);

/* Form a new communicator of the ranks with the same color, ordered by key, then by rank here. A
 * negative color joins none: *out = NULL. Collective over comm. */
DTRAIN_API dtrain_result dtrain_comm_split(dtrain_comm *comm, int color, int key,
                                           dtrain_comm **out);
/* Free this rank's part of a communicator: every rank calls it, none waits. NULL is allowed. The
 * world's communicator ends with the world: an error in the log. With handles that were not given
 * to dtrain_work_wait the communicator fails on all ranks, and lives until the world ends. */
DTRAIN_API void dtrain_comm_destroy(dtrain_comm *comm);

/* Return this rank's number in the communicator; -1 for NULL. */
DTRAIN_API int dtrain_comm_rank(const dtrain_comm *comm);
/* Return how many ranks there are in the communicator; 0 for NULL. */
DTRAIN_API int dtrain_comm_size(const dtrain_comm *comm);

/* Allocate memory that collectives reach without a staging copy where the backend can: of the
 * world's device, shared or registered, zeroed, 64-byte aligned. Local call. It is checked against
 * what the machine has left, so that a too large request is an error and not a killed process. */
DTRAIN_API dtrain_result dtrain_comm_alloc(dtrain_comm *comm, size_t bytes, void **out);
/* Free memory of dtrain_comm_alloc, with the size it was asked with. NULL is allowed. */
DTRAIN_API void dtrain_comm_free(dtrain_comm *comm, void *memory, size_t bytes);

/* What a communicator has done since it was made; differences give a step's share. */
typedef struct dtrain_comm_info {
    const char *backend;      /* "local", "staged", "mpi", "nccl" */
    uint64_t operation_count; /* started */
    uint64_t payload_bytes;   /* of the buffers handed in */
    uint64_t wire_bytes;      /* this rank's share by the ring formula: all-reduce 2(n-1)/n, ... */
    uint64_t node_bytes;      /* of it, to other nodes, with dtrain_world_options.node_ranks */
    uint64_t staged_bytes;    /* of extra copies: buffers that are not from
                                 dtrain_comm_alloc, and device memory without NCCL */
    double inside_seconds;  /* this thread spent in communicator calls: cannot compute meanwhile */
    double flight_seconds;  /* at least one operation was under way */
    const int *world_ranks; /* (size) in the world; owned by the communicator */
    uint64_t kind_bytes[DTRAIN_COLLECTIVE_KINDS]; /* of wire_bytes, by dtrain_collective_kind */
} dtrain_comm_info;
/* Tell what a communicator has done; all zero for a comm of NULL. */
DTRAIN_API void dtrain_comm_query(const dtrain_comm *comm, dtrain_comm_info *info);

/* Find the communicator table of a name, to be given as comm_ops. Any other name is an error that
 * says what to do.
 *
 * "local": ranks share memory; the default where they do.
 *
 * "mpi", in a program that is compiled with DTRAIN_USE_MPI (mpicc): for CPU ranks on several hosts,
 * and the default there. It moves bytes with MPI and adds in rank order in fp32, so results have
 * the bits of the local communicator. Reductions of large buffers are an all-to-all of slices, a
 * sum, and an all-gather of the results. The program calls MPI_Init before the first world and
 * MPI_Finalize after the last. Ranks are those of dtrain_world_join_mpi or, in dtrain_launch, all
 * processes of MPI's launcher: mpirun, or srun --mpi=pmix or pmi2. Any failure fails all
 * communicators of the world, and MPI is not called again: MPI_Finalize may then not return, and
 * what was under way may still be written to. A program that is to survive the end of a rank
 * ignores SIGPIPE: Open MPI writes to sockets of ranks that have died. Over TCP it may then,
 * rarely, not return from a call at all; mpirun, unless told to keep a job going without a rank,
 * ends such a process with the job. */
DTRAIN_API dtrain_result dtrain_comm_ops_by_name(const char *name, const dtrain_comm_ops **out);
