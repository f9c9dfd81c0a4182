/* The tables of a strategy: kinds, parameters, buckets, units, and their memory
 *
 *     dtrain__kind_row  a row of the table of kinds: what is sharded
 *     dtrain__entry     what a strategy knows of one registered parameter
 *     dtrain__bucket    gradients that travel together, and the memory of their values and shards
 *     dtrain__unit      the buckets that are gathered and released together
 *     dtrain__layout    all of them, for this rank; made by strategy/layout.c
 *
 * The storage of an alias is the entry whose value and gradient it shares; other entries are their
 * own storage. */

#pragma once

#include "core/platform_internal.h"
#include "core/result.h"
#include "comm/backend.h"
#include "strategy/compression.h"
#include "strategy/hook.h"
#include "strategy/params.h"
#include "strategy/strategy.h"
#include "strategy/core_view_internal.h"
#include "device/device.h"

#define DTRAIN__NONE UINT32_MAX                 /* no unit, no owner */
#define DTRAIN__BUCKET_BYTES ((size_t)25 << 20) /* of a bucket but the first one, by default */

/* The classes of memory that are sharded: optimizer state, gradients, parameters. */
typedef struct dtrain__classes {
    bool state, grads, params;
} dtrain__classes;

typedef struct dtrain__kind_row {
    const char *name;
    dtrain__classes shards;
    bool owners;   /* a shard is a list of whole tensors, as optimizers of matrices need */
    bool replicas; /* the ranks of a node share a copy; copies of several nodes are averaged */
} dtrain__kind_row;

typedef struct dtrain__entry {
    struct dtrain__bucket *bucket; /* of its storage, or NULL */
    bool trainable;                /* has a gradient: not frozen, nor its storage, and its storage
                                      has memory on this rank */
    bool whole;                    /* value and gradient are never sharded */
    bool marked;                   /* ready was called in this backward */
    bool seen;                     /* had a gradient in this step */
    bool warned;                   /* its missing gradient was reported */
    bool lends_value;              /* the value is an array of the library, which initialises it */
    bool lends_grad;               /* the gradient is an array of the library */
    bool local;                    /* a pipeline stage of this rank uses it */
    /* Of storages only: */
    uint32_t unit;    /* index of its unit; NONE: several units use it */
    bool tied;        /* pipeline stages on other ranks have copies */
    uint32_t uses;    /* trainable entries on this rank that share this gradient */
    uint32_t pending; /* entries not yet marked in this backward */
    int64_t offset;   /* first element in the bucket */
    float *own_value; /* memory of the library for a whole value, or NULL */
    /* Memory of the library for arrays in the host's type; NULL: the type is fp32, or the host owns
     * the arrays. In gathered units valid while the unit is gathered (dtrain__lay_typed). */
    void *typed_value, *typed_grad;
} dtrain__entry;

typedef struct dtrain__bucket {
    uint32_t unit;     /* index of its unit; NONE: several units use it, or it is cut by size */
    bool trainable;    /* false: frozen values of a unit, gathered and never reduced */
    bool sharded;      /* each rank updates a shard */
    bool tied;         /* one weight, of which pipeline stages on other ranks have copies */
    bool shards_grads; /* the reduced shard has separate memory: reduced in every backward */
    int64_t count;     /* words, padding included */
    int64_t shard_first, shard_count; /* this rank's shard; of a whole bucket everything */
    int64_t slice_first, slice_count; /* elements that this rank exchanges between nodes; with one
                                         node all (dtrain__layout_turn) */
    uint32_t first_param, last_param; /* range of indices that contains every member */
    int64_t *cuts;                    /* (ranks + 1) ZERO3: first element of each rank's shard */
    uint32_t uses, pending;           /* sums over the members' fields of this name */
    const struct dtrain__step_list *steps; /* steps from its gradients to their mean: steps.c */
    uint32_t step;     /* 0: not begun; number of the step under way; or DTRAIN__REDUCED */
    dtrain_comm *comm; /* of that step */
    dtrain_work **reduces, **gathers;      /* (works_per_bucket) collectives under way, or NULL */
    struct dtrain__compressed *compressed; /* state of compression (steps_internal.h), or NULL */
    float *tensor_sum;     /* (tensor_count) packed gradients to sum over the tensor axis */
    int64_t tensor_count;  /* 0: nothing is summed over the tensor axis */
    float *values, *grads; /* (count) */
    float *value_shard, *grad_shard; /* (shard_count), in host memory if the flag below is set */
    bool value_on_host, grad_on_host;
    uint16_t *low_values, *low_grads;     /* (count) in param_dtype, reduce_dtype; NULL for fp32 */
    uint16_t *typed_values, *typed_grads; /* (count) of a unit: arrays in the host's type */
} dtrain__bucket;

/* The state of a unit's values: the drawing is in units.c. */
typedef enum dtrain__unit_state {
    DTRAIN__UNIT_ABSENT,
    DTRAIN__UNIT_GATHERING,
    DTRAIN__UNIT_GATHERED,
    DTRAIN__UNIT_SHOWN
} dtrain__unit_state;

/* Units stand in the order in which their first parameters are registered. */
typedef struct dtrain__unit {
    uint32_t id;                        /* dtrain_param.unit */
    dtrain__bucket *trainable, *frozen; /* its buckets, or NULL */
    bool own_memory;                    /* no slot: stays from its first gather to publish */
    dtrain__unit_state state;
    dtrain__unit_state before; /* state to restore after dtrain_strategy_read, which uses slots */
} dtrain__unit;

/* Two buffers that units use in turn, unit u number u % 2; each fits the largest unit. */
typedef struct dtrain__turns {
    float *values[2], *grads[2];
    uint16_t *low_values[2], *low_grads[2];  /* NULL for fp32 */
    uint16_t *typed_values[2], *typed_grads; /* grads: converted before backward leaves a unit */
} dtrain__turns;

enum { DTRAIN__VALUES, DTRAIN__GRADS, DTRAIN__BUFFERS, DTRAIN__HOST, DTRAIN__CLASSES };

typedef struct dtrain__layout {
    const dtrain_param *params;
    size_t count;
    const dtrain_strategy_desc *desc; /* resolved */
    const dtrain__kind_row *kind;
    /* Type of sums, shards and masters: F32, or (parameters in fp64) F64. Counts and offsets of
     * buckets are in words of 4 bytes: an element of F32 is one, of F64 two. */
    uint32_t dtype;
    int ranks, rank;             /* ranks that share one copy of the model; this rank among them */
    int all, all_rank;           /* ranks of the strategy; this rank among them */
    int node_ranks;              /* ranks of a node if hierarchical on several nodes; otherwise 1 */
    int slice_ranks, slice_rank; /* ranks that exchange a slice: one per node; otherwise all */
    int tensor_ranks;            /* ranks that share each cut parameter */
    bool partial;                /* sequence parallelism: gradients of whole parameters are
                                    summed over the tensor axis */
    /* Classes that are really sharded: with one rank, or accumulation LAST, fewer than the kind
     * says. state: any class; grads: backward writes gradients into alternating buffers, and shards
     * have separate memory; params: values are gathered. */
    dtrain__classes shards;
    bool values_on_host, grads_on_host;         /* shards of units are in host memory */
    const dtrain_compression_desc *compression; /* NULL: none, or one rank */
    struct dtrain_hook_tensor *tensors;         /* (count) for compression, or NULL */
    struct dtrain__compressed *compressed;      /* (count) one per bucket */
    uint64_t state_bytes;                       /* bytes of residuals and velocities */
    float *bounce[2];        /* bounce buffers in host memory, for results to add to a shard */
    dtrain__entry *entries;  /* (count) */
    dtrain__bucket *buckets; /* (count + 1), bucket_count in use */
    dtrain__unit *units;     /* (count), unit_count in use */
    uint32_t *owners;        /* (count) ZERO3: owner rank of each storage */
    int64_t *cuts;           /* (count + 1, ranks + 1) ZERO3: first element of each rank's shard */
    size_t bucket_count, unit_count;
    /* End of the buckets that can be launched before finish. The later ones are weights tied
     * between stages of several ranks. Assume that a stage started their sum in the middle of a
     * schedule, and that collectives run in the order of their start: it would wait for a stage
     * that waits for a message from it. */
    size_t untied;
    dtrain__unit shared; /* the buckets of parameters that several units use */
    dtrain__turns turns;
    char *memory[DTRAIN__CLASSES]; /* NULL while bytes are only counted */
    size_t bytes[DTRAIN__CLASSES];
    uint64_t value_bytes, grad_bytes; /* bytes on the device, whoever allocated them */
} dtrain__layout;

/* strategy/params.c */
DTRAIN__PRINTF(3, 4)
DTRAIN__PRIVATE dtrain_result dtrain__param_fail(const dtrain_param *p, size_t index,
                                                 const char *format, ...);
DTRAIN__PRIVATE dtrain_result dtrain__resolve_params(dtrain_param *params, size_t count,
                                                     const dtrain__groups *groups);
DTRAIN__PRIVATE uint32_t dtrain__sums_dtype(const dtrain_param *params, size_t count);
DTRAIN__PRIVATE dtrain_result dtrain__init_param(dtrain_device *device, const dtrain_param *p,
                                                 const dtrain__share *part, uint64_t seed,
                                                 int64_t first, int64_t count, void *value);
#define DTRAIN__STAGING_COUNT 1024 /* elements of a buffer on the stack: no call can fail */

/* strategy/layout.c */
DTRAIN__PRIVATE const dtrain__kind_row *dtrain__row_of(uint32_t kind);
DTRAIN__PRIVATE dtrain_result dtrain__layout_make(dtrain__layout *layout, const dtrain_allocator *a,
                                                  const dtrain_param *params, size_t count,
                                                  const dtrain_strategy_desc *desc, int all,
                                                  int all_rank);
DTRAIN__PRIVATE void dtrain__layout_turn(dtrain__layout *layout, int all_rank);
DTRAIN__PRIVATE void dtrain__layout_free(dtrain__layout *layout, const dtrain_allocator *a);
DTRAIN__PRIVATE dtrain__bucket *dtrain__shard_bucket(const dtrain__layout *layout, size_t i);

/* strategy/memory.c */
DTRAIN__PRIVATE int64_t dtrain__overlap(const dtrain__layout *layout, const dtrain__bucket *bucket,
                                        size_t i, int64_t first, int64_t count, int64_t *low);
DTRAIN__PRIVATE bool dtrain__piece(const dtrain__layout *layout, size_t i, int64_t *offset,
                                   int64_t *count);
DTRAIN__PRIVATE int64_t dtrain__words(const dtrain__layout *layout, int64_t elements);
DTRAIN__PRIVATE int64_t dtrain__elements(const dtrain__layout *layout, int64_t words);
DTRAIN__PRIVATE float *dtrain__carve(dtrain__layout *layout, int block, int64_t count);
DTRAIN__PRIVATE void dtrain__lay_memory(dtrain__layout *layout);
