/* Memory
 *
 * The memory of a rank, by class, before anything is allocated: counted from the strategy's layout.
 * With AUTO dtrain_strategy_create takes the first of
 *
 *     ZERO1, SHARD_GRAD_OP, HYBRID_SHARD (several nodes), FULL_SHARD         (one rank: DDP)
 *
 * that fits the limit: communication grows along the list and memory falls. If none fits, the error
 * says how much is missing and what would help. */

#pragma once

#include "core/api.h"
#include "core/result.h"
#include "strategy/params.h"
#include "strategy/strategy.h"

/* Classes of memory that are kept in page-locked host memory instead of a GPU's (Ren et al.,
 * "ZeRO-Offload", USENIX ATC 2021). With GRADS or PARAMS a single rank has one shard, which is
 * everything. UNSUPPORTED on a device whose memory is the host's.
 *
 *     OPTIMIZER   state and a master copy of this rank's values, read from the device when the
 *                 optimizer is created; the update runs on the CPU, while gradients come and new
 *                 values go back
 *     GRADS       gradient shards; later micro-batches are added by the CPU. Needs OPTIMIZER and a
 *                 kind that shards gradients, not under DTRAIN_ACCUMULATION_LAST
 *     PARAMS      parameter shards: they are the master copy, and gather brings them to the device.
 *                 Needs OPTIMIZER and a kind that shards parameters
 *
 * Pointers of dtrain_shard are host memory if their class is offloaded. */
#define DTRAIN_OFFLOAD_OPTIMIZER 1u
#define DTRAIN_OFFLOAD_GRADS 2u
#define DTRAIN_OFFLOAD_PARAMS 4u

/* Bytes of one rank, by class. */
typedef struct dtrain_memory {
    uint64_t params, grads, optimizer, activations, activation_grads;
    uint64_t buffers;   /* memory in which a strategy gathers and reduces units */
    uint64_t workspace; /* the process: code, libc, communicator; 0 if ranks are threads, and on a
                           GPU, where only device memory counts */
    uint64_t total;
    uint64_t host; /* page-locked host memory of offloaded classes; not in any other field */
} dtrain_memory;

/* Count params, grads, buffers and optimizer of the rank that needs most, and their total. The
 * optimizer is counted by desc->optimizer_states and group_states, without Muon's scratch.
 * desc->kind is not AUTO; node_size 0 counts as rank_count. With desc->mesh, which can be a mesh
 * without a world, rank_count is its number of ranks. Completes count and shape of params in place;
 * with a mesh, as its rank has them. Local: needs no world. */
DTRAIN_API dtrain_result dtrain_strategy_plan(dtrain_param *params, size_t param_count,
                                              const dtrain_strategy_desc *desc, int rank_count,
                                              dtrain_memory *memory);
