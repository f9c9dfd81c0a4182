/* Join: a guest in a program that already runs in parallel
 *
 * The processes of an MPI solver, a CUDA trainer, a Fortran code or a plugin exist already. They
 * know their ranks and can gather a few bytes. All its ranks, or some of them, can become the
 * members of a world:
 *
 *     dtrain_join_desc desc = {rank, size, my_all_gather, my_data};
 *     dtrain_world *world;
 *     if (dtrain_world_join(&desc, &world) != DTRAIN_OK) report(dtrain_last_error());
 *     ... strategies, optimizers, checkpoints, between the host's own work ...
 *     dtrain_world_leave(world);
 *
 * A guest forks nothing, opens no port, reads no environment, changes no signal, ends no process
 * and prints nothing. dtrain_world_leave frees every thread, descriptor, mapping and memory. The
 * results have the same bits as with dtrain_launch and the same ranks. See docs/guest.md.
 *
 * Members on one host find each other's memory through the all-gather. Members on several hosts
 * need a communicator that crosses hosts: MPI (dtrain_world_join_mpi), or NCCL for device memory.
 *
 * If a member dies, the calls of the others return DTRAIN_ERROR_PEER with a sentence, within two
 * seconds on one host. With MPI, the host's ranks must survive the death of another rank; most
 * launchers end all ranks instead. On several hosts, a member on the dead member's host reports the
 * death. If there is none, MPI or NCCL reports it, at the latest at the deadline. The host can
 * continue without the world, which dtrain_world_leave then frees. The host's ranks that are not
 * members are never waited for. */

#pragma once

#include "core/abi.h"
#include "core/api.h"
#include "core/log.h"
#include "core/result.h"
#include "world/world.h"
#include "device/device.h"

/* The host's all-gather among the members, which blocks. all (size * bytes) receives `mine` (bytes,
 * at most 8 KiB) of every member in rank order. Returns 0, or an error number of the host. */
typedef int (*dtrain_host_gather_fn)(void *user, const void *mine, void *all, size_t bytes);

/* Zero means default, but not in rank, size and all_gather. */
typedef struct dtrain_join_desc {
    int rank, size;                      /* this member's rank; number of members, 1 to 256 */
    dtrain_host_gather_fn all_gather;    /* called only inside dtrain_world_join */
    void *user;                          /* argument of all_gather */
    uint32_t timeout_ms;                 /* deadline of every wait for other members; 0 = 600000 */
    uint32_t threads;                    /* compute threads of this member; 0 = 1 */
    const dtrain_device_ops *device_ops; /* NULL = CPU; a GPU is the calling thread's current */
    void *stream;                        /* the host's cudaStream_t for kernels and copies, or
                                               NULL = a new stream */
    const struct dtrain_comm_ops *comm_ops; /* NULL = local, or MPI on several hosts; local uses
                                               host memory for GPU data */
    const void *comm_given; /* for comm_ops: MPI_Comm *, or dtrain_nccl_given *; read by the join */
    const dtrain_abi *abi;  /* see dtrain_launch_desc */
    dtrain_world_options options;
} dtrain_join_desc;

/* Make a world of all members, each of which calls this function. Collective: it blocks in
 * all_gather until all members have called it; only all_gather can limit this wait. One thread at a
 * time can use a world. A process can have several worlds, and its threads can be members.
 *
 * If one member fails, all fail with its sentence, and *out is NULL. But a member that cannot call
 * all_gather (desc or out is NULL, size is 0) leaves the others waiting in it. */
DTRAIN_API dtrain_result dtrain_world_join(const dtrain_join_desc *desc, dtrain_world **out);

/* Leave a world of dtrain_world_join and free all of it; destroy its strategies and optimizers
 * before. Collective: it waits for the other members, at most until the deadline, and returns the
 * result of this wait. The world is freed in any case. NULL is OK. */
DTRAIN_API dtrain_result dtrain_world_leave(dtrain_world *world);
