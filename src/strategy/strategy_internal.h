/* The strategy, and what its files call of one another
 *
 * Every file of strategy/ includes this header. Three files show DDP, and two more the sharding:
 *
 *     layout.c       the table of kinds; buckets, shards and their owners
 *     reduce.c       from ready to publish, with the steps of DDP and of shards
 *     units.c        sharded values: gather, release, the walk back
 *     steps.c        the lists of steps; the only file that knows all steps
 *     create.c       creation and destruction
 *
 * The other files hold one topic each:
 *
 *     params.c, stages.c      the host's parameters; pipeline stages
 *     counts.c, samples.c     the mean over samples; the weights of losses
 *     norm.c                  the norm of gradients
 *     missing.c, join.c       gradients that a rank lacks; passes without samples
 *     wire.c, ties.c, tensor.c, levels.c, compress.c, topk.c, offload.c    further steps
 *     settings.c, compare.c   checks of the desc; comparison of ranks
 *     calls.c                 calls of device and communicator; permanent errors
 *     memory.c, values.c      memory of a layout; whole values
 *     query.c, view.c         answers to the host and to other rooms
 *     plan.c                  memory that a strategy will need */

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
#include "strategy/query.h"
#include "strategy/core_view_internal.h"
#include "device/backend.h"

#define DTRAIN__LOSS_SUMS 8 /* most sums of means over different samples in a loss */

/* Sums of squares of a rank: of what it counts for the norm, of what the tensor axis repeats. */
#define DTRAIN__SQUARES 2

typedef struct dtrain__step dtrain__step;
typedef dtrain_result dtrain__step_fn(dtrain_strategy *strategy, dtrain__bucket *bucket);

/* One step of a bucket from its gradients to their mean. begin prepares and starts collectives on
 * the step's own communicator. When they are done, end is called, and the next step begins. A step
 * without a communicator is done when begin returns. */
struct dtrain__step {
    dtrain__step_fn *begin, *end; /* end may be NULL */
    dtrain_comm *comm;
};

#define DTRAIN__STEPS 10 /* most steps of a list */
#define DTRAIN__COMMS 12 /* most communicators of two lists and of gathers */

/* dtrain__bucket.step after the last step; 0 before the first, else the number of the step. */
#define DTRAIN__REDUCED 99u

/* The steps of whole or of sharded buckets, in order (steps.c). */
typedef struct dtrain__step_list {
    dtrain__step list[DTRAIN__STEPS];
    uint32_t count, early_count; /* steps in the last backward of a training step, and before it */
    uint32_t collectives;        /* steps that have a communicator */
    /* Waits until queued copies have read the gradient buffers; with `over`, at the end of a
     * backward, until the copies have arrived. NULL: there are no copies. */
    dtrain_result (*settle)(dtrain_strategy *strategy, bool over);
    dtrain_reduce_op op; /* SUM if two collectives in a row make the mean: the sum is multiplied by
                            1/N once. In fp16 and fp64 each collective makes a mean */
} dtrain__step_list;

struct dtrain_strategy {
    const dtrain__kind_row *kind;
    dtrain_world *world;
    dtrain_device *device;
    dtrain__groups groups; /* given to create; the kind decides which ranks are `copy` */
    dtrain_comm *owned[DTRAIN__COMMS]; /* (owned_count) communicators of steps and gathers */
    size_t owned_count;
    dtrain_comm *tensor_comm;            /* tensor axis: sums of gradients of whole parameters */
    dtrain_comm *fetch[2];               /* gathers of values; two with several nodes */
    dtrain_strategy_desc desc;           /* resolved */
    dtrain_compression_desc compression; /* target of desc.compression, unless it is NULL */
    dtrain_param *params;                /* the host's */
    size_t param_count;
    dtrain__layout layout;
    dtrain__stage_map stages;
    dtrain_pipeline_desc pipeline; /* target of desc.pipeline, unless it is NULL */
    dtrain_comm **ties;  /* (param_count) ranks that have copies of a storage that pipeline stages
                            tie, or NULL; storages with the same ranks share one */
    dtrain__notes notes; /* members that other rooms read and write */

    /* The step under way. */
    dtrain__step_list whole, sharded; /* steps of whole and of sharded buckets */
    bool lockstep; /* second collectives start only at launches and in finish, which come in the
                      same order on every rank. NCCL runs collectives in the order of their starts:
                      if each rank started a step as soon as the step before it was done, orders
                      would differ, and ranks would wait for each other in a circle */
    uint64_t compressed_from; /* sync_count of the first step with compression */
    size_t launched, oldest;  /* end of the buckets that are launched, and that are reduced */
    size_t marked_count;      /* calls of ready in this backward */
    bool more;                /* micro-batches of this step follow */
    bool accumulated;         /* shards hold the sum of earlier micro-batches */
    float weights;            /* sum of the weights of this step's backwards so far */
    uint32_t passes;          /* backwards that were finished in this step */
    int64_t full_batch;       /* samples of weight 1 (samples.c); 0: not agreed on yet */
    /* The sums of means in a loss (samples.c): their samples in the step's first micro-batch; the
     * count of sums seen in this step; the count in the last loss of [a training step, an
     * evaluation]; true if all ranks know that count. */
    int64_t sums_first[DTRAIN__LOSS_SUMS][2];
    uint32_t sums_known, sums_made[2];
    bool sums_agreed[2];
    bool evaluates; /* an evaluation of the trainer is under way */
    /* Agrees with the losses of other ranks in a pass without a batch; NULL without a tape. */
    dtrain_result (*join_loss)(dtrain_strategy *strategy, dtrain_pass pass);
    uint64_t updates;      /* hash of the rates and scales of all updates */
    uint32_t in_buffer[2]; /* unit whose gradients are in the alternating buffer, or NONE */
    uint32_t slots[2];     /* unit whose values are in the slot, or NONE */
    uint32_t position;     /* unit gathered last; NONE before a pass */
    uint32_t backward;     /* unit that this backward has reached; NONE before a backward */
    bool entered;          /* unit `backward` was gathered for it, and not yet released */
    dtrain_result failure; /* error of communicator or device; every later call returns it */
    char failure_text[DTRAIN__ERROR_BYTES];

    /* Memory. */
    dtrain_allocator allocator;
    dtrain_work **works;  /* (param_count, 2 works_per_bucket) reduces and gathers of buckets */
    dtrain_shard *shards; /* (param_count), shard_count in use */
    double *gathered;     /* (DTRAIN__SQUARES per rank of `all`) scratch */
    uint64_t *hashes;     /* (param_count) hashes of values, while verify compares them */
    double *sum_squares; /* (DTRAIN__SQUARES, and as many per rank of `model`) device memory for the
                             norm of gradients; notes.counts follow in the same block */
    size_t sums_bytes;   /* bytes of that block */
    float *sums;         /* (1 + param_count) host copy of notes.counts (counts.c) */
    bool counts_due;     /* `sums` has this rank's part only: read the counts before use */
    dtrain_work *counts_work;
    size_t works_per_bucket, shard_count;
    dtrain__kept *kept; /* (param_count), kept_count in use */
    size_t kept_count;
    dtrain__offload offload;
    dtrain_strategy_info info; /* filled by create, except sync_count */
};

/* The parameters of a layout, and the ranks of its data axis. */
typedef struct dtrain__model {
    const dtrain_allocator *allocator;
    dtrain_param *params;
    size_t count;
    int ranks;
} dtrain__model;

/* A strategy that is planned and not made. */
typedef struct dtrain__planned {
    dtrain_strategy_desc desc; /* resolved */
    dtrain_compression_desc compression;
    dtrain__layout layout; /* all zero: no layout */
    dtrain__stage_map stages;
} dtrain__planned;

/* The kinds that AUTO chooses from. Ranks compare only totals, because their gradients can have
 * different sizes. */
#define DTRAIN__CANDIDATES 5
typedef struct dtrain__candidates {
    dtrain_strategy_desc descs[DTRAIN__CANDIDATES];
    dtrain_memory memory[DTRAIN__CANDIDATES];
    int64_t totals[DTRAIN__CANDIDATES]; /* bytes a rank; INT64_MAX: excluded */
} dtrain__candidates;

/* strategy/values.c */
DTRAIN__PRIVATE void *dtrain__host_value(const dtrain_param *storage);
DTRAIN__PRIVATE void *dtrain__host_grad(const dtrain_param *storage);

/* strategy/settings.c */
DTRAIN__PRIVATE dtrain_result dtrain__check_wide(const dtrain_param *params, size_t count,
                                                 const dtrain_strategy_desc *desc);

/* strategy/reduce.c */
DTRAIN__PRIVATE dtrain_result dtrain__await_step(dtrain_strategy *strategy, dtrain__bucket *bucket);
DTRAIN__PRIVATE dtrain_result dtrain__reduce_until(dtrain_strategy *strategy, size_t end);
DTRAIN__PRIVATE dtrain_result dtrain__close_buckets(dtrain_strategy *strategy, size_t end);

/* strategy/missing.c */
DTRAIN__PRIVATE dtrain_result dtrain__report_missing(dtrain_strategy *strategy);
DTRAIN__PRIVATE dtrain_result dtrain__average_buffers(dtrain_strategy *strategy);

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
DTRAIN__PRIVATE bool dtrain__stage_uses(const dtrain__stage_map *map, const dtrain_param *storage,
                                        int rank);

/* strategy/ties.c */
DTRAIN__PRIVATE dtrain_result dtrain__split_ties(dtrain_strategy *strategy);
DTRAIN__PRIVATE void dtrain__close_ties(dtrain_strategy *strategy);

/* strategy/compress.c */
DTRAIN__PRIVATE const dtrain_comm_hook_desc *dtrain__hook_of(const dtrain_compression_desc *how);

/* strategy/tensor.c */
DTRAIN__PRIVATE void dtrain__lay_tensor_sums(dtrain__layout *layout);

/* strategy/steps.c */
DTRAIN__PRIVATE dtrain_result dtrain__settle_steps(dtrain_strategy *strategy, bool over);
DTRAIN__PRIVATE dtrain_result dtrain__steps_make(dtrain_strategy *strategy);
DTRAIN__PRIVATE dtrain_result dtrain__steps_open(dtrain_strategy *strategy);
DTRAIN__PRIVATE void dtrain__steps_memory(dtrain__layout *layout);
DTRAIN__PRIVATE dtrain_result dtrain__steps_layout(dtrain__layout *layout,
                                                   const dtrain__model *model,
                                                   const dtrain_strategy_desc *desc, int rank);
DTRAIN__PRIVATE void dtrain__steps_layout_free(dtrain__layout *layout, const dtrain_allocator *a);

/* strategy/counts.c */
DTRAIN__PRIVATE dtrain_result dtrain__counts_start(dtrain_strategy *strategy);
DTRAIN__PRIVATE dtrain_result dtrain__counts_end(dtrain_strategy *strategy);

/* strategy/units.c */
DTRAIN__PRIVATE bool dtrain__walks_units(const dtrain_strategy *strategy);
DTRAIN__PRIVATE dtrain_result dtrain__walk_back(dtrain_strategy *strategy, uint32_t to);
DTRAIN__PRIVATE dtrain_result dtrain__evict_units(dtrain_strategy *strategy);
DTRAIN__PRIVATE dtrain_result dtrain__settle_gathers(dtrain_strategy *strategy);
DTRAIN__PRIVATE dtrain__unit *dtrain__unit_at(dtrain_strategy *strategy, size_t u);
DTRAIN__PRIVATE dtrain_result dtrain__unit_need(dtrain_strategy *strategy, dtrain__unit *unit);
DTRAIN__PRIVATE dtrain_result dtrain__unit_evict(dtrain_strategy *strategy, dtrain__unit *unit);
DTRAIN__PRIVATE void dtrain__unit_show(dtrain_strategy *strategy, dtrain__unit *unit, bool shown);
DTRAIN__PRIVATE dtrain_result dtrain__claim_slot(dtrain_strategy *strategy,
                                                 const dtrain__unit *unit);
DTRAIN__PRIVATE dtrain_result dtrain__gather_start(dtrain_strategy *strategy,
                                                   dtrain__bucket *bucket, dtrain_dtype dtype);
DTRAIN__PRIVATE dtrain_result dtrain__gather_inside(dtrain_strategy *strategy,
                                                    dtrain__bucket *bucket, dtrain_dtype dtype);
DTRAIN__PRIVATE dtrain_result dtrain__gather_wait(dtrain_strategy *strategy, dtrain__bucket *bucket,
                                                  dtrain_dtype dtype);

/* strategy/values.c */
DTRAIN__PRIVATE dtrain_result dtrain__gather_shards(dtrain_strategy *strategy);
DTRAIN__PRIVATE dtrain_result dtrain__copy_host_values(dtrain_strategy *strategy, bool to_host);
DTRAIN__PRIVATE void dtrain__note_units(dtrain_strategy *strategy);
DTRAIN__PRIVATE dtrain_result dtrain__restore_units(dtrain_strategy *strategy);
DTRAIN__PRIVATE dtrain_result dtrain__whole_param(dtrain_strategy *strategy, size_t i,
                                                  dtrain_param *whole);

/* strategy/query.c */
DTRAIN__PRIVATE void dtrain__fill_info(dtrain_strategy *strategy);
DTRAIN__PRIVATE void dtrain__add_comm(dtrain_comm_info *info, const dtrain_comm *comm);

/* strategy/norm.c */
DTRAIN__PRIVATE dtrain_result dtrain__device_squares(dtrain_strategy *strategy, bool replicated,
                                                     double *total);

/* strategy/wire.c */
DTRAIN__PRIVATE dtrain_result dtrain__gather_owners(dtrain_strategy *strategy,
                                                    dtrain__bucket *bucket, char *whole,
                                                    dtrain_dtype dtype);

/* strategy/levels.c */
DTRAIN__PRIVATE dtrain_result dtrain__even_nodes(const dtrain_world *world,
                                                 const dtrain__groups *groups,
                                                 uint32_t *node_ranks);
DTRAIN__PRIVATE void dtrain__resolve_levels(dtrain_strategy_desc *desc, int ranks);
DTRAIN__PRIVATE dtrain_result dtrain__resolve_node_size(dtrain_strategy *strategy, int ranks);
DTRAIN__PRIVATE uint32_t dtrain__buffer_steps(const dtrain_strategy *strategy,
                                              const dtrain__bucket *bucket);

/* strategy/offload.c */
DTRAIN__PRIVATE dtrain_result dtrain__host_settle(dtrain_strategy *strategy, bool over);
DTRAIN__PRIVATE dtrain_result dtrain__host_bring(dtrain_strategy *strategy, dtrain__bucket *bucket);
DTRAIN__PRIVATE dtrain_result dtrain__offload_open(dtrain_strategy *strategy);
DTRAIN__PRIVATE void dtrain__offload_close(dtrain_strategy *strategy);

/* strategy/settings.c */
DTRAIN__PRIVATE dtrain_result dtrain__take_strategy(const dtrain_world *world,
                                                    const dtrain_strategy_desc *given,
                                                    dtrain_strategy_desc *desc,
                                                    dtrain_compression_desc *how);
DTRAIN__PRIVATE dtrain_result dtrain__resolve_desc(const dtrain_strategy_desc *given,
                                                   dtrain_strategy_desc *desc,
                                                   dtrain_compression_desc *how);
DTRAIN__PRIVATE dtrain_result dtrain__resolve_kind(dtrain_strategy_desc *desc,
                                                   const dtrain__kind_row *kind);
DTRAIN__PRIVATE dtrain_result dtrain__mesh_fits(const dtrain_world *world,
                                                const dtrain_strategy_desc *desc);
DTRAIN__PRIVATE dtrain_result dtrain__check_layout(const dtrain_strategy *strategy);
DTRAIN__PRIVATE dtrain_result dtrain__compare_settings(const dtrain_strategy *strategy,
                                                       const dtrain__groups *groups,
                                                       dtrain_result mine);

/* strategy/compare.c */
DTRAIN__PRIVATE dtrain__same_list dtrain__same_params(const dtrain_strategy *strategy);

/* strategy/plan.c */
DTRAIN__PRIVATE dtrain_result dtrain__plan_kind(const dtrain__model *model,
                                                const dtrain_strategy_desc *given,
                                                dtrain_memory *memory);
DTRAIN__PRIVATE dtrain_result dtrain__plan_resolve(const dtrain__model *model,
                                                   const dtrain_strategy_desc *desc,
                                                   const dtrain__groups *groups,
                                                   dtrain__planned *planned);
DTRAIN__PRIVATE dtrain_result dtrain__plan_candidates(const dtrain__model *model,
                                                      const dtrain_strategy_desc *given,
                                                      uint32_t node_ranks, dtrain__candidates *all);
DTRAIN__PRIVATE dtrain_result dtrain__auto_limit(dtrain_world *world,
                                                 const dtrain_strategy_desc *desc,
                                                 dtrain_comm *comm, int64_t *left);
DTRAIN__PRIVATE dtrain_result dtrain__strategy_choose(dtrain_strategy *strategy);
