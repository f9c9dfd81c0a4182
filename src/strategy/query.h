/* Questions to a strategy
 *
 * What it is and holds, the whole value of a parameter, and whether all ranks have the same. */

#pragma once

#include "core/api.h"
#include "core/result.h"
#include "comm/comm.h"
#include "strategy/strategy.h"

typedef struct dtrain_strategy_info {
    dtrain_strategy_desc desc; /* as resolved: kind is never AUTO; compression is the strategy's */
    const char *name;          /* "full_shard" */
    dtrain_comm *comm;         /* all its ranks: those over which gradients are averaged */
    size_t param_count, bucket_count, unit_count;
    int shard_ranks, replicas;                   /* N = shard_ranks * replicas */
    uint64_t trainable_elements, total_elements; /* of the whole model; aliases counted once */
    uint64_t value_bytes, grad_bytes; /* this rank's, whoever owns them; not what is offloaded */
    uint64_t host_bytes;              /* page-locked: shards that are offloaded, and staging */
    uint64_t buffer_bytes; /* where units are gathered and reduced: constant over a run */
    uint64_t bucket_bytes; /* of one set of whole gradients, padding included */
    /* Sums over `comm` and the communicators that the strategy has split from it: the difference
     * over a step is what this rank has sent along the data axis. Calls of the host on `comm` are
     * in it, too; its backend and world_ranks describe `comm`. */
    dtrain_comm_info traffic;
    uint64_t state_bytes; /* residuals and what else compression keeps from step to step */
    uint64_t sync_count;  /* steps that were reduced */
    char reason[400];     /* AUTO: why this kind; empty otherwise */
} dtrain_strategy_info;

/* Fill in what a strategy is and what it holds on this rank; zeros for NULL. Local. */
DTRAIN_API void dtrain_strategy_query(const dtrain_strategy *strategy, dtrain_strategy_info *info);

/* Copy the whole value of params[index] to host (the elements of its shape, also where a tensor
 * axis cuts it), in fp32 unless its dtype is F64, on every rank. Collective over the mesh. Not in
 * the middle of a backward; units that are gathered stay so. */
DTRAIN_API dtrain_result dtrain_strategy_read(dtrain_strategy *strategy, size_t index, void *host);

/* Hash the bits of every parameter and compare the hashes across ranks (collective): replicas
 * that drifted apart are DTRAIN_ERROR_MISMATCH naming rank and parameter. The hash is the same for
 * the same model under every kind, and with a mesh the same on all its ranks; a model that a tensor
 * axis cuts has another for each size of the axis. Along that axis what is not cut is compared.
 * *hash may be NULL. When to call: as dtrain_strategy_read. */
DTRAIN_API dtrain_result dtrain_strategy_verify(dtrain_strategy *strategy, uint64_t *hash);
