/* Memory
 *
 * The memory of a rank, by class, before anything is allocated: the strategy's own layout, counted
 * instead of made. With AUTO dtrain_strategy_create takes the first of
 *
 *     ZERO1, SHARD_GRAD_OP, HYBRID_SHARD (several nodes), FULL_SHARD         (one rank: DDP)
 *
 * that fits the limit: communication grows along the list and memory falls. None fits: an error
 * that says how much is missing and what would help. */

#pragma once

#include "core/api.h"
#include "core/result.h"
#include "strategy/params.h"
#include "strategy/strategy.h"

/* Classes of memory kept in page-locked host memory instead of a GPU's (Ren et al., "ZeRO-Offload",
 * USENIX ATC 2021). With GRADS or PARAMS a single rank has one shard, which is everything. On a
 * device whose memory is the host's: UNSUPPORTED.
 *
 *     OPTIMIZER   state and a master copy of this rank's values, read from the device when the
 *                 optimizer is created; the update runs on the CPU, while gradients come and new
 *                 values go back
 *     GRADS       gradient shards; later micro-batches are added by the CPU. Needs OPTIMIZER and a
 *                 kind that shards gradients, not under DTRAIN_ACCUMULATION_LAST
 *     PARAMS      parameter shards: they are the master copy, and gather brings them to the device.
 *                 Needs OPTIMIZER and a kind that shards parameters
 *
 * dtrain_shard's pointers are host memory where the class is offloaded. */
#define DTRAIN_OFFLOAD_OPTIMIZER 1u
#define DTRAIN_OFFLOAD_GRADS 2u
#define DTRAIN_OFFLOAD_PARAMS 4u

/* The bytes of one rank, by class. */
typedef struct dtrain_memory {
    uint64_t params, grads, optimizer, activations, activation_grads;
    uint64_t buffers;   /* where a strategy gathers and reduces units */
    uint64_t workspace; /* the process itself: code, libc, communicator (0 where ranks are threads,
                           and on a GPU, whose memory is meant) */
    uint64_t total;
    uint64_t host; /* page-locked host memory of what is offloaded; not in any other field */
} dtrain_memory;

/* Count params, grads, buffers and optimizer (desc->optimizer_states and group_states, without
 * Muon's scratch) of the rank that needs most, and their total. desc->kind is not AUTO; node_size 0
 * counts as rank_count. With desc->mesh, which may be one without a world, rank_count is its number
 * of ranks, and params are completed as its rank has them. Local: it needs no world, and completes
 * count and shape of params in place. */
DTRAIN_API dtrain_result dtrain_strategy_plan(dtrain_param *params, size_t param_count,
                                              const dtrain_strategy_desc *desc, int rank_count,
                                              dtrain_memory *memory);
