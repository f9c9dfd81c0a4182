/* The strategy, and what its files call of one another
 *
 * Every file of the room includes it, and with it the interfaces of core, world, communicator and
 * device that they share.
 *
 * The order of reading is that of a gradient. Each file calls those before it, and those in
 * brackets:
 *
 *     params.c, kinds.c       what the host registers; what each kind shards
 *     stages.c                which part of the model a rank of a pipeline has
 *     layout.c                who keeps what, in which memory
 *     road.c                  DDP from ready to publish [weights.c, gather.c, offload.c, calls.c]
 *     weights.c, norm.c       the mean over samples; the norm of gradients
 *     gather.c, offload.c     sharded values; shards in host memory
 *     calls.c                 calls of device and communicator, and how an error stands
 *     ways/                   one file a step that replaces or follows the all-reduce
 *     ways.c                  chooses the steps; the only file that knows all of them
 *     join.c                  passes without samples
 *     levels.c, settings.c    who shares a copy of the model; checks of the desc
 *     compare.c               have all ranks registered the same, and have they the same values?
 *     create.c, count.c       making one; dtrain_strategy_create, which counts what a step sends
 *     query.c, view.c, plan.c answers to the host, to the rooms above, before anything is made */

#pragma once

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/log.h"
#include "world/world_internal.h"
#include "comm/comm.h"
#include "comm/same_internal.h"
#include "parallel/cut_internal.h"
#include "parallel/mesh_internal.h"
#include "world/timeline_internal.h"
#include "strategy/layout_internal.h"
#include "strategy/memory.h"
#include "strategy/view_internal.h"
#include "device/backend.h"

/* Sums for a norm: of what a rank counts, of what the tensor axis repeats. */
#define DTRAIN__SQUARES 2

/* dtrain__bucket.stage: not launched, then the number of the step under way, from 1, then done. */
enum { DTRAIN__REDUCE_IDLE = 0, DTRAIN__REDUCED = 99 };

typedef dtrain_result dtrain__step_fn(dtrain_strategy *strategy, dtrain__bucket *bucket);

/* Flags of a step. BRIEF: few bytes; in lockstep they are waited for at once, so that the next
 * step, which has many, goes on under what backward computes next. */
enum { DTRAIN__LAST_ONLY = 1, DTRAIN__BRIEF = 2 };

/* One step of a bucket's way from gradients to their mean: begin prepares and starts one
 * collective, or a few at once; end is called when they are done. NULL: nothing to do. LAST_ONLY:
 * in the last micro-batch, on the shard that holds the sum of all. */
typedef struct dtrain__step {
    dtrain__step_fn *begin, *end;
    uint32_t flags;
} dtrain__step;

#define DTRAIN__STEPS 7 /* the longest way: 6, and a NULL */

/* The ways: of whole buckets, of the same when compression has begun, of sharded buckets. */
enum { DTRAIN__WHOLE, DTRAIN__COMPRESSED, DTRAIN__SHARDED, DTRAIN__WAYS };

/* Extra communicators. A step that starts when an earlier one completes must not share a
 * communicator with it: ranks could start the two in different orders. */
enum {
    DTRAIN__NODE,         /* ranks of this node: the first step between levels */
    DTRAIN__ACROSS,       /* ranks of other nodes with the same slice, or (HYBRID_SHARD) shard */
    DTRAIN__BACK,         /* the ranks of NODE, for node_gather */
    DTRAIN__FETCH_ACROSS, /* the ranks of ACROSS, to gather values ... */
    DTRAIN__FETCH,        /* ... and those of NODE, for the second collective of a gather */
    DTRAIN__SECOND,       /* the ranks that exchange compressed gradients, for a second round */
    DTRAIN__TENSOR,       /* the tensor axis, for the sum of whole parameters' gradients ... */
    DTRAIN__AFTER,        /* ... and for the step after it the data axis, or (HYBRID_SHARD) ... */
    DTRAIN__AFTER_NODE,   /* ... of sharded buckets the ranks of NODE */
    DTRAIN__EXTRAS
};

/* Streams and events between a GPU and host memory. `arrived` is for gradients: those of a backward
 * in the bounce buffers, those of an update in the optimizer's stages. */
typedef struct dtrain__offload {
    dtrain_device *cpu;       /* computes on host memory; NULL: nothing is offloaded */
    dtrain_stream *down, *up; /* copies to the host, and to the device */
    dtrain_event *order;      /* lets one stream wait for another */
    dtrain_event *arrived[2]; /* a copy has reached host memory */
    dtrain__bucket
        *bounced[2];      /* bucket to whose shard the bounce buffer is to be added, or NULL */
    uint32_t next_bounce; /* buffer to be used next */
} dtrain__offload;

struct dtrain_strategy {
    const dtrain__kind_row *kind;
    dtrain_world *world;
    dtrain_device *device;
    dtrain__groups groups;               /* of create; the kind decides which ranks are `copy` */
    dtrain_comm *extra[DTRAIN__EXTRAS];  /* NULL: not needed */
    dtrain_strategy_desc desc;           /* resolved */
    dtrain_compression_desc compression; /* what desc.compression points to, if it is not NULL */
    dtrain_param *params;                /* the host's */
    size_t param_count;
    dtrain__layout layout;
    dtrain__stage_map stages;
    dtrain_pipeline_desc pipeline; /* what desc.pipeline points to, if it is not NULL */
    dtrain_comm **ties; /* (param_count) of a storage, the ranks of several stages that have copies
                           of it, or NULL; those of the same ranks share one */

    /* The step under way. */
    const dtrain__step *ways[DTRAIN__WAYS][DTRAIN__STEPS];
    uint64_t compressed_from; /* sync_count of the first step in which COMPRESSED is taken */
    size_t launched, oldest;  /* buckets below launched are started, those below oldest reduced */
    size_t marked_count;      /* calls of ready in this backward */
    bool more;                /* micro-batches of this step follow */
    bool accumulated;         /* shards hold the sum of earlier micro-batches */
    float weight, weights;    /* of the next backward; sum over those of this step so far */
    uint32_t passes;          /* backwards that were finished in this step */
    int64_t unit;             /* samples that weigh 1 (weights.c); 0: not agreed on yet */
    /* Sums of means in a loss (weights.c): their samples in the step's first micro-batch, how many
     * have been counted in it, how many the last loss of a step or of an evaluation had, and
     * whether all ranks know that number. */
    int64_t sums_first[DTRAIN__LOSS_SUMS][2];
    uint32_t sums_known, sums_made[2];
    bool sums_agreed[2];
    bool evaluates;        /* the trainer's evaluation is under way */
    bool several;          /* one backward covers several micro-batches (pipeline) */
    bool tied;             /* there are weights with copies on other stages */
    bool taped;            /* a tape was made for this strategy */
    int64_t batch_comm;    /* number of the communicator of a batch normalisation; 0: none */
    bool empty;            /* the last step had no samples */
    bool unsure;           /* `empty` and `absent` are of this rank: the tally must be read */
    uint64_t sync_count;   /* steps that were reduced */
    uint64_t updates;      /* hash of the rates and scales of all updates */
    uint32_t in_buffer[2]; /* unit whose gradients are in the alternating buffer, or NONE */
    uint32_t slots[2];     /* unit whose values are in the slot, or NONE */
    uint32_t position;     /* unit gathered last, NONE before a pass */
    uint32_t backward;     /* unit that this backward has reached, NONE before it */
    bool entered;          /* that unit was gathered for this backward, and not yet released */
    dtrain_result failure; /* of communicator or device: every later call returns it */
    char failure_text[DTRAIN__ERROR_BYTES];
    const char *torn; /* the call that failed while it replaced values; NULL: none */

    /* Memory. */
    dtrain_allocator allocator;
    dtrain_work **works;  /* (param_count, 2 works_per_bucket): reduces, gathers of buckets */
    dtrain_shard *shards; /* (param_count), shard_count in use */
    int64_t *gathered;    /* (DTRAIN__SQUARES a rank of `all`): scratch */
    uint64_t *hashes;     /* (param_count) of values, while verify compares them */
    double *sum_squares;  /* (DTRAIN__SQUARES, and as many a rank of `model`) device memory, for the
                             norm of gradients; the tally follows it */
    float *tally, *sums;  /* (1 + param_count) device memory; its copy on the host: weights.c */
    dtrain_work *tally_work;
    const float *device_weight; /* `weights` of a recorded step, in device memory; or NULL */
    size_t works_per_bucket, shard_count;
    dtrain_compression_state *states; /* (param_count), state_count in use */
    size_t state_count;
    dtrain__offload offload;
    dtrain_strategy_info info; /* filled by create, except sync_count */
};

/* strategy/road.c */
DTRAIN__PRIVATE bool dtrain__reduces_low(const dtrain_strategy *strategy);
DTRAIN__PRIVATE dtrain_result dtrain__to_wire(dtrain_strategy *strategy, dtrain__bucket *bucket,
                                              float *x, int64_t first, int64_t count, void **wire);
DTRAIN__PRIVATE dtrain_result dtrain__from_wire(dtrain_strategy *strategy, dtrain__bucket *bucket,
                                                float *x, int64_t first, int64_t count, bool last);
DTRAIN__PRIVATE dtrain_result dtrain__reduce_all(dtrain_strategy *strategy, dtrain__bucket *bucket,
                                                 dtrain_comm *comm, float *x, int64_t first,
                                                 int64_t count);
DTRAIN__PRIVATE bool dtrain__sums_first(const dtrain_strategy *strategy,
                                        const dtrain__bucket *bucket);
DTRAIN__PRIVATE dtrain_reduce_op dtrain__level_op(const dtrain_strategy *strategy,
                                                  const dtrain__bucket *bucket);
DTRAIN__PRIVATE dtrain_result dtrain__scale(dtrain_strategy *strategy, const dtrain__bucket *bucket,
                                            float *x, int64_t count);

/* strategy/calls.c */
DTRAIN__PRIVATE bool dtrain__in_backward(const dtrain_strategy *strategy);
DTRAIN__PRIVATE void dtrain__label(const dtrain_strategy *strategy, const dtrain__bucket *bucket,
                                   const char *part);
DTRAIN__PRIVATE dtrain_result dtrain__convert(dtrain_strategy *strategy, int64_t count,
                                              const void *x, uint32_t x_dtype, void *y,
                                              uint32_t y_dtype);
DTRAIN__PRIVATE dtrain_result dtrain__wait_works(const dtrain_strategy *strategy,
                                                 dtrain_work **works);
DTRAIN__PRIVATE dtrain_result dtrain__strategy_fail(dtrain_strategy *strategy, dtrain_result code,
                                                    const char *text);

/* strategy/stages.c */
DTRAIN__PRIVATE void dtrain__stage_params(const dtrain__stage_map *map, dtrain_param *params,
                                          size_t count);
DTRAIN__PRIVATE dtrain_result dtrain__split_ties(dtrain_strategy *strategy);
DTRAIN__PRIVATE void dtrain__close_ties(dtrain_strategy *strategy);

/* strategy/ways/compression.c */
DTRAIN__PRIVATE const dtrain_comm_hook_desc *dtrain__hook_of(const dtrain_compression_desc *how);

/* strategy/ways/tensor.c */
DTRAIN__PRIVATE void dtrain__lay_tensor_sums(dtrain__layout *layout);

/* strategy/ways.c */
DTRAIN__PRIVATE void dtrain__ways_memory(dtrain__layout *layout);
DTRAIN__PRIVATE dtrain_result dtrain__ways_layout(dtrain__layout *layout, const dtrain_allocator *a,
                                                  const dtrain_param *params, size_t count,
                                                  const dtrain_strategy_desc *desc, int ranks,
                                                  int rank);
DTRAIN__PRIVATE void dtrain__ways_free(dtrain__layout *layout, const dtrain_allocator *a);
DTRAIN__PRIVATE dtrain_result dtrain__ways_open(dtrain_strategy *strategy);

/* strategy/weights.c */
DTRAIN__PRIVATE dtrain_result dtrain__tally_start(dtrain_strategy *strategy);
DTRAIN__PRIVATE dtrain_result dtrain__tally_end(dtrain_strategy *strategy);

/* strategy/gather.c */
DTRAIN__PRIVATE dtrain_result dtrain__bring_unit(dtrain_strategy *strategy, uint32_t at,
                                                 uint32_t next);
DTRAIN__PRIVATE void dtrain__show_unit(dtrain_strategy *strategy, uint32_t at, bool shown);
DTRAIN__PRIVATE dtrain_result dtrain__gather_shards(dtrain_strategy *strategy);
DTRAIN__PRIVATE dtrain_result dtrain__copy_host_values(dtrain_strategy *strategy, bool to_host);
DTRAIN__PRIVATE dtrain_result dtrain__forget_units(dtrain_strategy *strategy);
DTRAIN__PRIVATE dtrain_result dtrain__settle_gathers(dtrain_strategy *strategy);
DTRAIN__PRIVATE void dtrain__note_units(dtrain_strategy *strategy);
DTRAIN__PRIVATE dtrain_result dtrain__restore_units(dtrain_strategy *strategy);
DTRAIN__PRIVATE dtrain_result dtrain__whole_param(dtrain_strategy *strategy, size_t i,
                                                  dtrain_param *whole);

/* strategy/levels.c */
DTRAIN__PRIVATE dtrain_result dtrain__even_nodes(const dtrain_world *world,
                                                 const dtrain__groups *groups,
                                                 uint32_t *node_ranks);
DTRAIN__PRIVATE void dtrain__resolve_levels(dtrain_strategy_desc *desc, int ranks);
DTRAIN__PRIVATE dtrain_result dtrain__split_levels(dtrain_strategy *strategy);

/* strategy/offload.c */
DTRAIN__PRIVATE dtrain_result dtrain__host_put(dtrain_strategy *strategy, dtrain__bucket *bucket,
                                               const float *result, bool add);
DTRAIN__PRIVATE dtrain_result dtrain__host_get(dtrain_strategy *strategy, dtrain__bucket *bucket,
                                               float *sum);
DTRAIN__PRIVATE dtrain_result dtrain__host_vacate(dtrain_strategy *strategy);
DTRAIN__PRIVATE dtrain_result dtrain__host_settle(dtrain_strategy *strategy);
DTRAIN__PRIVATE dtrain_result dtrain__host_bring(dtrain_strategy *strategy, dtrain__bucket *bucket);
DTRAIN__PRIVATE dtrain_result dtrain__offload_open(dtrain_strategy *strategy);
DTRAIN__PRIVATE void dtrain__offload_close(dtrain_strategy *strategy);

/* strategy/settings.c */
DTRAIN__PRIVATE dtrain_result dtrain__resolve_desc(const dtrain_strategy_desc *given,
                                                   dtrain_strategy_desc *desc,
                                                   dtrain_compression_desc *how);
DTRAIN__PRIVATE dtrain_result dtrain__resolve_kind(dtrain_strategy_desc *desc,
                                                   const dtrain__kind_row *kind);
DTRAIN__PRIVATE dtrain_result dtrain__compare_settings(const dtrain_strategy *strategy,
                                                       const dtrain__groups *groups,
                                                       dtrain_result mine);

/* strategy/compare.c */
DTRAIN__PRIVATE dtrain__same_list dtrain__same_params(const dtrain_strategy *strategy);

/* strategy/create.c */
DTRAIN__PRIVATE dtrain_result dtrain__strategy_make(dtrain_world *world, dtrain_param *params,
                                                    size_t param_count,
                                                    const dtrain_strategy_desc *desc,
                                                    const dtrain__groups *groups,
                                                    dtrain_strategy **out);

/* strategy/plan.c */
DTRAIN__PRIVATE dtrain_result dtrain__strategy_choose(dtrain_strategy *strategy);
