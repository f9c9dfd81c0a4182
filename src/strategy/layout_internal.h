/* The tables of a strategy: kinds, parameters, buckets, units, and the memory behind them
 *
 *     dtrain__kind_row  a row of the table of kinds: what is sharded
 *     dtrain__entry     what a strategy knows of one registered parameter
 *     dtrain__bucket    gradients that travel together, and where their values and shards are
 *     dtrain__unit      the buckets that are gathered and released together
 *     dtrain__layout    all of them, for this rank; made by strategy/layout.c
 *
 * The storage of an alias is the entry whose value and gradient it shares; every other entry is its
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
    bool owners;   /* a shard is a list of whole tensors, as optimizers of matrices need them */
    bool replicas; /* shards are those of a node's ranks; every node has all, and they are summed */
} dtrain__kind_row;

typedef struct dtrain__entry {
    struct dtrain__bucket *bucket; /* of its storage, or NULL */
    bool trainable;                /* it gets a gradient: neither it nor its storage is frozen, and
                                      its storage is here */
    bool whole;                    /* its value and gradient are never sharded */
    bool marked;                   /* ready was called in this backward */
    bool seen;                     /* it had a gradient in this step */
    bool warned;                   /* its missing gradient has been reported */
    bool lends_value; /* the host has given no array: the library lends one, and initialises it */
    bool lends_grad;  /* the same of the gradient */
    bool here;        /* its unit is in a stage that this rank has */
    /* Of storages alone: */
    uint32_t unit;    /* index of their unit, NONE when several units use them */
    bool tied;        /* stages of other ranks have copies of it */
    uint32_t uses;    /* trainable entries here that share this gradient: dtrain__lay_out */
    uint32_t pending; /* those not yet marked in this backward */
    int64_t offset;   /* first element within the bucket */
    float *own_value; /* memory of the library for a value that is whole, or NULL */
    /* memory of the library for the arrays in the host's type; NULL: fp32, or the host's own. In
     * units they are where dtrain__lay_typed says, while the unit is gathered. */
    void *typed_value, *typed_grad;
} dtrain__entry;

typedef struct dtrain__bucket {
    uint32_t unit;     /* index of its unit, or NONE: several units use it, or it is cut by size */
    bool trainable;    /* false: frozen values of a unit, which are gathered and never reduced */
    bool sharded;      /* each rank updates a shard of it */
    bool tied;         /* it is one weight, of which stages of other ranks have copies */
    bool shards_grads; /* its gradients are made whole in a buffer, and the reduced shard is kept
                          elsewhere: so it travels in every backward */
    int64_t count;     /* words, padding included */
    int64_t shard_first, shard_count; /* this rank's shard; of whole buckets everything */
    int64_t slice_first, slice_count; /* the elements that this rank exchanges with `comm`: all of
                                         them, or with several nodes its slice (bucket_close) */
    uint32_t first_param, last_param; /* range of indices that contains every member */
    int64_t *cuts;                    /* (ranks + 1) ZERO3: first element of each rank's shard */
    uint32_t uses, pending;           /* as in dtrain__entry, summed over all members */
    const struct dtrain__step_list *steps; /* from its gradients to their mean: steps.c */
    uint32_t step; /* how far they are: 0, the number of the step under way, or DTRAIN__REDUCED */
    dtrain_work **reduces, **gathers;      /* (works_per_bucket) collectives under way, or NULL */
    struct dtrain__compressed *compressed; /* state of compression (steps_internal.h), or NULL */
    float *tensor_sum;    /* where the tensor axis sums up whole parameters: in grads, or packed */
    int64_t tensor_count; /* elements of it; 0: nothing is summed over that axis */
    bool tensor_packed;
    float *values, *grads;           /* (count) */
    float *value_shard, *grad_shard; /* (shard_count); in host memory if: */
    bool value_on_host, grad_on_host;
    uint16_t *low_values, *low_grads;     /* (count) in param_dtype, reduce_dtype; NULL for fp32 */
    uint16_t *typed_values, *typed_grads; /* (count) of a unit: arrays in the host's type */
} dtrain__bucket;

/* Where the values of a unit are: the drawing is in units.c. */
typedef enum dtrain__unit_state {
    DTRAIN__UNIT_ABSENT,
    DTRAIN__UNIT_COMING,
    DTRAIN__UNIT_HERE,
    DTRAIN__UNIT_SHOWN
} dtrain__unit_state;

/* Units stand in registration order of their first parameters. */
typedef struct dtrain__unit {
    uint32_t id;                        /* dtrain_param.unit */
    dtrain__bucket *trainable, *frozen; /* its buckets, or NULL */
    bool own_memory;                    /* no slot: stays from its first gather to publish */
    dtrain__unit_state state;
    dtrain__unit_state before; /* to restore after a read, which borrows slots */
} dtrain__unit;

/* Two buffers that units use in turns, unit u number u % 2; as long as the largest unit needs. */
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
    int ranks, rank;             /* among those that share one copy of the model */
    int all, all_rank;           /* among all of the strategy */
    int node_ranks;              /* hierarchical, and several nodes: ranks of a node; otherwise 1 */
    int slice_ranks, slice_rank; /* of those that exchange a slice: one a node; otherwise all */
    int tensor_ranks;            /* that share each cut parameter */
    bool partial;                /* sequence parallelism: gradients of whole parameters are to be
                                    summed over the tensor axis */
    /* Which classes are really sharded: with one rank, or accumulation LAST, fewer than the kind
     * says. state: any of them; grads: units make gradients in alternating buffers and keep shards;
     * params: values are gathered. */
    dtrain__classes shards;
    bool values_on_host, grads_on_host;         /* shards of units are in host memory */
    const dtrain_compression_desc *compression; /* NULL: none, or one rank alone */
    struct dtrain_hook_tensor *tensors;         /* (count) of compression, or NULL */
    struct dtrain__compressed *compressed;      /* (count), one a bucket */
    uint64_t state_bytes;                       /* residuals and velocities */
    float *bounce[2]; /* buffers in host memory: what is to be added to a shard arrives here */
    dtrain__entry *entries;  /* (count) */
    dtrain__bucket *buckets; /* (count + 1), bucket_count in use */
    dtrain__unit *units;     /* (count), unit_count in use */
    uint32_t *owners;        /* (count) ZERO3: the rank that keeps a storage */
    int64_t *cuts;           /* (count + 1, ranks + 1) ZERO3: where each rank's shard begins */
    size_t bucket_count, unit_count;
    /* Buckets that may be launched in a backward. Buckets of weights that stages of other ranks
     * have too come last and wait for finish: a stage that began their sum in the middle of a
     * schedule would, where collectives run in the order of their start, wait for a stage that
     * waits for a message from it. */
    size_t untied;
    dtrain__unit shared; /* the buckets of parameters that several units use */
    dtrain__turns turns;
    char *memory[DTRAIN__CLASSES]; /* NULL while bytes are only counted */
    size_t bytes[DTRAIN__CLASSES];
    uint64_t value_bytes, grad_bytes; /* on the device, whoever allocated them */
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
#define DTRAIN__STAGING_COUNT 1024 /* elements that go through the stack: no call can fail */

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
