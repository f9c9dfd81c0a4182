/* Communicators
 *
 * A communicator is a group of ranks. All its ranks call every collective in the same order with
 * the same count, dtype, operation and root. The `local` backend compares these in every call; a
 * difference is DTRAIN_ERROR_MISMATCH on all ranks.
 *
 * With work == NULL a call blocks until the operation is done. Otherwise it returns at once, and
 * the program must pass *work (NULL if there is nothing to wait for) to dtrain_work_wait exactly
 * once. Until then the buffers belong to the operation. A communicator carries out its operations
 * in the order in which they were started. The local backend has no progress thread, which would
 * take cores from the computation: operations advance during any call of the world's communicators.
 *
 * send == recv (in place) is allowed if the sizes are equal. For reduce-scatter and all-gather, in
 * place means that the small buffer is this rank's slice of the large buffer. Any other overlap is
 * an error. Counts are elements; buffers need no alignment; count 0 synchronises without data. A
 * buffer lies in host memory or in memory of the world's device. With device memory an operation
 * starts after all work queued on the compute stream, and dtrain_work_wait makes later work on that
 * stream wait for the operation. fp32, bf16 and fp16 sums are accumulated in fp32 in rank order and
 * rounded once, so the bits depend neither on timing nor on the division of buffers. Integers wrap;
 * min and max of any number and NaN are NaN.
 *
 * After any error, including a wrong argument, the communicator has failed: every later call
 * returns the same error, and other ranks get DTRAIN_ERROR_PEER instead of a sum without this rank.
 */

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
/* Gather send (send_count) of all ranks, in rank order, into recv (ranks * send_count). */
DTRAIN_API dtrain_result dtrain_all_gather(dtrain_comm *comm, const void *send, void *recv,
                                           size_t send_count, dtrain_dtype dtype,
                                           dtrain_work **work);
/* Gather this rank's slice (count) of every rank's send (ranks * count), in rank order, into recv
 * (ranks * count). Not in place. */
DTRAIN_API dtrain_result dtrain_all_to_all(dtrain_comm *comm, const void *send, void *recv,
                                           size_t count, dtrain_dtype dtype, dtrain_work **work);
/* Copy root's buffer (count) to every rank. */
DTRAIN_API dtrain_result dtrain_broadcast(dtrain_comm *comm, void *buffer, size_t count,
                                          dtrain_dtype dtype, int root, dtrain_work **work);
/* Reduce send (count) over all ranks into recv (count) of root; other ranks' recv is ignored. */
DTRAIN_API dtrain_result dtrain_reduce(dtrain_comm *comm, const void *send, void *recv,
                                       size_t count, dtrain_dtype dtype, dtrain_reduce_op op,
                                       int root, dtrain_work **work);
/* Send to one rank. Messages between two ranks are matched in order, independently of collectives.
 * Counts and dtypes must be equal. A peer equal to this rank is an error. Between ranks of one
 * machine the receiver can read a long message while this rank computes; other messages move during
 * calls. */
DTRAIN_API dtrain_result dtrain_send(dtrain_comm *comm, const void *buffer, size_t count,
                                     dtrain_dtype dtype, int peer, dtrain_work **work);
/* Receive a message that the peer sends with dtrain_send. */
DTRAIN_API dtrain_result dtrain_recv(dtrain_comm *comm, void *buffer, size_t count,
                                     dtrain_dtype dtype, int peer, dtrain_work **work);
/* Wait until every rank has called it. */
DTRAIN_API dtrain_result dtrain_barrier(dtrain_comm *comm);

/* Wait until the operation is done, return its result and free the handle. NULL is allowed. */
DTRAIN_API dtrain_result dtrain_work_wait(dtrain_work *work);
/* Advance the communicator without blocking, and set *done if the operation is done. The handle
 * must still be passed to dtrain_work_wait. */
DTRAIN_API dtrain_result dtrain_work_test(dtrain_work *work, bool *done);

/* Make a communicator of the ranks with the same color, ordered by key and then by rank in comm. A
 * rank with a negative color gets *out = NULL. Collective over comm. */
DTRAIN_API dtrain_result dtrain_comm_split(dtrain_comm *comm, int color, int key,
                                           dtrain_comm **out);
/* Free this rank's part of a communicator: every rank calls it, and no rank waits. NULL is allowed.
 * The world's communicator cannot be destroyed: an error is logged. If handles were not passed to
 * dtrain_work_wait, the communicator fails on all ranks and lives until the world ends. */
DTRAIN_API void dtrain_comm_destroy(dtrain_comm *comm);

/* Return this rank's number in the communicator; -1 for NULL. */
DTRAIN_API int dtrain_comm_rank(const dtrain_comm *comm);
/* Return the number of ranks in the communicator; 0 for NULL. */
DTRAIN_API int dtrain_comm_size(const dtrain_comm *comm);

/* Allocate memory that collectives can use without a staging copy, if the backend supports that:
 * memory of the world's device, shared or registered, zeroed, 64-byte aligned. Local call. A
 * request for more than the machine's free memory is an error, not a killed process. */
DTRAIN_API dtrain_result dtrain_comm_alloc(dtrain_comm *comm, size_t bytes, void **out);
/* Free memory of dtrain_comm_alloc; bytes is the size of that call. NULL is allowed. */
DTRAIN_API void dtrain_comm_free(dtrain_comm *comm, void *memory, size_t bytes);

/* Counts and times of a communicator since it was made; differences give the values of a step. */
typedef struct dtrain_comm_info {
    const char *backend;      /* "local", "staged", "mpi", "nccl" */
    uint64_t operation_count; /* operations started */
    uint64_t payload_bytes;   /* bytes of send buffers */
    uint64_t wire_bytes;      /* this rank's share by the ring formula: all-reduce 2(n-1)/n, ... */
    uint64_t node_bytes;      /* wire bytes to other nodes, with dtrain_world_options.node_ranks */
    uint64_t staged_bytes;    /* bytes of extra copies: of buffers not from dtrain_comm_alloc, and
                                 of device memory without NCCL */
    double inside_seconds;    /* time of this thread in communicator calls, without computation */
    double flight_seconds;    /* time with at least one operation in flight */
    const int *world_ranks;   /* (size) ranks in the world; owned by the communicator */
    uint64_t kind_bytes[DTRAIN_COLLECTIVE_KINDS]; /* wire bytes by dtrain_collective_kind */
} dtrain_comm_info;
/* Return the counts and times of a communicator; zeros if comm is NULL. */
DTRAIN_API void dtrain_comm_query(const dtrain_comm *comm, dtrain_comm_info *info);

/* Find a communicator table by name, for comm_ops. An unknown name is an error.
 *
 * "local": ranks share memory. The default if they can.
 *
 * "mpi": for CPU ranks on several hosts, and the default there, in a program compiled with
 * DTRAIN_USE_MPI (mpicc). It moves bytes with MPI and adds in rank order in fp32, so results have
 * the bits of the local communicator. Reductions of large buffers are an all-to-all of slices, a
 * sum, and an all-gather of the results. The program calls MPI_Init before the first world and
 * MPI_Finalize after the last. The ranks come from dtrain_world_join_mpi or, in dtrain_launch, are
 * all processes of MPI's launcher: mpirun, or srun --mpi=pmix or pmi2. Any failure fails all
 * communicators of the world, and MPI is not called again: MPI_Finalize can then hang, and MPI can
 * still write to buffers of operations in flight. A program that must survive the end of a rank
 * ignores SIGPIPE, because Open MPI writes to sockets of dead ranks. Over TCP, Open MPI can then,
 * rarely, hang in a call; mpirun ends such a process with the job, unless asked to continue without
 * a rank. */
DTRAIN_API dtrain_result dtrain_comm_ops_by_name(const char *name, const dtrain_comm_ops **out);
