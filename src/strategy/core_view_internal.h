/* A strategy as optimizers and all later rooms see it
 *
 * These rooms know nothing of buckets, units and layouts. A parameter is named by its index in the
 * array. A function that communicates says so. Every function is cheap enough for each parameter
 * and step. */

#pragma once

#include "core/platform_internal.h"
#include "core/result.h"
#include "world/world.h"
#include "comm/comm.h"
#include "comm/groups_internal.h"
#include "parallel/cut_internal.h"
#include "strategy/params.h"
#include "strategy/query.h"
#include "strategy/strategy.h"
#include "device/backend.h"

/* State of compression for a piece of a parameter, kept from step to step in device memory. */
typedef struct dtrain__kept {
    const dtrain_param *param;
    int64_t offset, count; /* the piece: first element, elements */
    float *residual;       /* (count), or NULL without error feedback */
    float *velocity;       /* (count), or NULL without topk_momentum */
} dtrain__kept;

/* Members of a strategy that other rooms read and write. */
typedef struct dtrain__notes {
    /* Used by tape and trainer: */
    float weight;       /* weight of the next backward */
    bool pipelined;     /* one backward covers all micro-batches of a step */
    int64_t batch_comm; /* number of a batch normalisation's communicator, or 0: its ranks either
                           all have a batch, or none has */
    const float *device_weight; /* device memory: the weight of a recorded step; or NULL */
    float *counts; /* (1 + param_count) device memory, valid after finish: the sum of all ranks'
                      weights; for each parameter the number of ranks that have a gradient */
    /* Used by checkpoints: */
    uint64_t sync_count; /* steps that were reduced */
    const char
        *failed_load; /* call that failed while it replaced values, or NULL. The strategy is not
                            usable until a load succeeds */
} dtrain__notes;

/* ---- The whole --------------------------------------------------------------------------------*/

DTRAIN__PRIVATE dtrain__notes *dtrain__notes_of(dtrain_strategy *strategy);

DTRAIN__PRIVATE dtrain_world *dtrain__world_of(const dtrain_strategy *strategy);
DTRAIN__PRIVATE void dtrain__strategy_info(const dtrain_strategy *strategy,
                                           dtrain_strategy_info *info);
DTRAIN__PRIVATE dtrain__groups dtrain__groups_of(const dtrain_strategy *strategy);
/* Return the desc as resolved. */
DTRAIN__PRIVATE const dtrain_strategy_desc *dtrain__settings_of(const dtrain_strategy *strategy);
DTRAIN__PRIVATE dtrain_param *dtrain__params_of(const dtrain_strategy *strategy, size_t *count);

/* The stages of a pipeline and their ranks: strategy/stages.c. */
typedef struct dtrain__stage_map {
    int ranks, rank, chunks; /* of the pipeline axis; stages per rank */
    int32_t stages;          /* stage s is on rank s % ranks; 1 without a pipeline */
    int32_t *units;          /* (2 * unit_count) pairs of a unit and its stage */
    size_t unit_count, room;
} dtrain__stage_map;
/* List the units of parameters and divide them among the stages of a pipeline; desc NULL = a zeroed
 * desc. The map can be freed after an error too. */
DTRAIN__PRIVATE dtrain_result dtrain__stage_map_make(dtrain__stage_map *map,
                                                     const dtrain_allocator *a,
                                                     const dtrain_param *params, size_t count,
                                                     const dtrain_pipeline_desc *desc,
                                                     const dtrain__groups *groups);
DTRAIN__PRIVATE void dtrain__stage_map_free(dtrain__stage_map *map, const dtrain_allocator *a);
/* Return the stage of a unit; -1 if no parameter belongs to the unit. */
DTRAIN__PRIVATE int32_t dtrain__stage_of_unit(const dtrain__stage_map *map, uint32_t unit);

/* ---- When a call is allowed -------------------------------------------------------------------*/

DTRAIN__PRIVATE dtrain_result dtrain__strategy_usable(const dtrain_strategy *strategy,
                                                      const char *call);
DTRAIN__PRIVATE dtrain_result dtrain__between_backwards(const dtrain_strategy *strategy,
                                                        const char *call);
DTRAIN__PRIVATE dtrain_result dtrain__between_steps(const dtrain_strategy *strategy,
                                                    const char *call);
/* Add an update's rates to a hash. Then: fail on all ranks if the hash or the flags of a parameter
 * (FROZEN) differ between ranks. */
DTRAIN__PRIVATE void dtrain__note_update(dtrain_strategy *strategy, float lr, float grad_scale);
DTRAIN__PRIVATE dtrain_result dtrain__compare_now(dtrain_strategy *strategy, const char *call);
/* Keep an error for all later calls, and fail the communicators so that no other rank waits. */
DTRAIN__PRIVATE dtrain_result dtrain__strategy_keep(dtrain_strategy *strategy,
                                                    dtrain_result result);
/* Return what a step lacks to be recorded in a graph; NULL: nothing. */
DTRAIN__PRIVATE const char *dtrain__unrecordable(const dtrain_strategy *strategy);
/* Forget the micro-batches of the step under way. */
DTRAIN__PRIVATE void dtrain__rewind(dtrain_strategy *strategy, bool step_done);

/* ---- A parameter ------------------------------------------------------------------------------*/

/* True if optimizers update the parameter: it is no alias and not frozen. */
DTRAIN__PRIVATE bool dtrain__is_updated(const dtrain_param *param);
/* Find the piece of a value, gradient and state that this rank keeps; false if it keeps none. */
DTRAIN__PRIVATE bool dtrain__shard_of(const dtrain_strategy *strategy, size_t i,
                                      dtrain_shard *shard);
/* True if no rank keeps the whole parameter. */
DTRAIN__PRIVATE bool dtrain__is_sliced(const dtrain_strategy *strategy, size_t i);
/* False if only pipeline stages on other ranks use the parameter. */
DTRAIN__PRIVATE bool dtrain__has_memory(const dtrain_param *param);
/* Return the first rank of the pipeline axis that uses the parameter. */
DTRAIN__PRIVATE int dtrain__stage_first(const dtrain_strategy *strategy, size_t i);
/* True if any rank had a gradient in the last step; otherwise updates leave the parameter out. */
DTRAIN__PRIVATE bool dtrain__has_gradient(const dtrain_strategy *strategy, size_t i);
DTRAIN__PRIVATE int dtrain__param_dims(const dtrain_param *p);
DTRAIN__PRIVATE void dtrain__set_grad_written(dtrain_param *storage, bool written);
/* Count the elements of all parts together. Describe the part of this rank. */
DTRAIN__PRIVATE int64_t dtrain__whole_count(const dtrain_param *p);
DTRAIN__PRIVATE dtrain__share dtrain__share_here(const dtrain_param *p,
                                                 const dtrain__groups *groups);
/* Round a number of fp32 elements up to a cache line. Add to an address, which can be NULL. */
DTRAIN__PRIVATE int64_t dtrain__padded(int64_t count);
DTRAIN__PRIVATE float *dtrain__after(float *at, int64_t count);

/* ---- Norm of gradients: strategy/norm.c -------------------------------------------------------*/

/* Sum the squares of all gradients; the host waits. Collective if they are sharded or cut. */
DTRAIN__PRIVATE dtrain_result dtrain__sum_squares(dtrain_strategy *strategy, double *total);

/* Take part in a forward pass without a batch. Complete a step's counts; *empty: no samples. */
DTRAIN__PRIVATE dtrain_result dtrain__join_forward(dtrain_strategy *strategy);
DTRAIN__PRIVATE dtrain_result dtrain__counts_settle(dtrain_strategy *strategy, bool *empty);

/* ---- An update in host memory: strategy/offload.c ---------------------------------------------*/

#define DTRAIN__PIECE ((int64_t)1 << 18) /* elements of one piece of an update */

/* Streams and events between a GPU and host memory. `arrived`: in a backward, gradients have
 * reached the bounce buffers; in an update, the optimizer's staging buffers. */
typedef struct dtrain__offload {
    dtrain_device *cpu;       /* computes on host memory; NULL: nothing is offloaded */
    dtrain_stream *down, *up; /* copies to the host, and to the device */
    dtrain_event *order;      /* lets one stream wait for another */
    dtrain_event *arrived[2]; /* a copy has reached host memory */
    struct dtrain__bucket
        *bounced[2];      /* bucket whose shard will get the bounce buffer added, or NULL */
    uint32_t next_bounce; /* bounce buffer to use next */
} dtrain__offload;
DTRAIN__PRIVATE const dtrain__offload *dtrain__offload_of(const dtrain_strategy *strategy);
/* Order two streams (NULL: the compute stream): `later` waits for the work that `earlier` has. */
DTRAIN__PRIVATE dtrain_result dtrain__stream_follow(dtrain_strategy *strategy, dtrain_stream *later,
                                                    dtrain_stream *earlier);
/* Wait for event arrived[turn]. */
DTRAIN__PRIVATE dtrain_result dtrain__update_await(const dtrain_strategy *strategy, size_t turn);

/* ---- A layout, made or planned ----------------------------------------------------------------*/

struct dtrain__layout;
DTRAIN__PRIVATE const struct dtrain__layout *dtrain__layout_of(const dtrain_strategy *strategy);
DTRAIN__PRIVATE uint64_t dtrain__update_bytes(const struct dtrain__layout *layout, size_t i,
                                              size_t states, bool whole, int64_t *staging);

DTRAIN__PRIVATE double dtrain__mib(uint64_t bytes);
