/* Join: a guest in a program that already runs in parallel
 *
 * A solver with MPI, a CUDA trainer, a Fortran code, a plugin: its processes exist, know their
 * ranks and can gather a few bytes. With that its ranks, or a part of them, become the members of a
 * world:
 *
 *     dtrain_join_desc desc = {rank, size, my_all_gather, my_data};
 *     dtrain_world *world;
 *     if (dtrain_world_join(&desc, &world) != DTRAIN_OK) report(dtrain_last_error());
 *     ... strategies, optimizers, checkpoints, between the host's own work ...
 *     dtrain_world_leave(world);
 *
 * A guest forks nothing, opens no port, reads no environment, changes no signal, ends no process
 * and prints nothing. After dtrain_world_leave no thread, descriptor, mapping or memory is left.
 * The bits are those of the same ranks under dtrain_launch. docs/guest.md has the details.
 *
 * Members on one host find each other's memory through the all-gather. Members on several hosts
 * need a communicator that crosses them: MPI (dtrain_world_join_mpi), or NCCL for device memory.
 *
 * A member that dies ends the others' calls with DTRAIN_ERROR_PEER and a sentence, within two
 * seconds on one host. A host over MPI must let its ranks outlive one another for this: most
 * launchers end all of them. On several hosts a rank of the same host reports it; where none is
 * left there, MPI or NCCL does, at the latest at the deadline. The host can continue without the
 * world: dtrain_world_leave then frees it. Ranks of the host that are no members are never waited
 * for. */

#pragma once

#include "core/abi.h"
#include "core/api.h"
#include "core/log.h"
#include "core/result.h"
#include "world/world.h"
#include "device/device.h"

/* The host's all-gather among the members, which blocks: all (size * bytes) receives every member's
 * `mine` (bytes, at most 8 KiB), in rank order. Return 0, or the host's number of an error. */
typedef int (*dtrain_host_gather_fn)(void *user, const void *mine, void *all, size_t bytes);

/* Zero means default, but for the first three. */
typedef struct dtrain_join_desc {
    int rank, size;                   /* of this member, from 0; of all, at most DTRAIN_MAX_RANKS */
    dtrain_host_gather_fn all_gather; /* called inside of dtrain_world_join, never later */
    void *user;                       /* handed to all_gather */
    uint32_t timeout_ms;              /* deadline of every wait for other members; 0 = 600000 */
    uint32_t threads;                 /* compute threads of this member; 0 = 1 */
    const dtrain_device_ops *device_ops;    /* NULL = CPU; a GPU is the calling thread's current */
    void *stream;                           /* cudaStream_t of the host, on which kernels and copies
                                               are queued; NULL = one that the world makes */
    const struct dtrain_comm_ops *comm_ops; /* NULL = local; MPI over several hosts; with a GPU
                                               local through host memory */
    const void *comm_given; /* for comm_ops: MPI_Comm *, or dtrain_nccl_given *; read by the join */
    const dtrain_abi *abi;  /* as in dtrain_launch_desc */
    dtrain_world_options options;
} dtrain_join_desc;

/* Make a world of the members that call it, this one included. Collective: it blocks in all_gather
 * until all have come, at most as long as that does. Calls of the world belong to one thread at a
 * time. A process can have several worlds at once, and members can be threads of one process.
 *
 * Where one member fails, all fail, with its sentence, and *out is NULL. A member that cannot even
 * call all_gather (desc or out NULL, a size of 0) leaves the others to the host's all-gather. */
DTRAIN_API dtrain_result dtrain_world_join(const dtrain_join_desc *desc, dtrain_world **out);

/* Leave a world of dtrain_world_join and free all of it: destroy its strategies and optimizers
 * first. Collective, at most until the deadline; the result is that of waiting for the others, the
 * world is freed in any case. NULL is OK. */
DTRAIN_API dtrain_result dtrain_world_leave(dtrain_world *world);
