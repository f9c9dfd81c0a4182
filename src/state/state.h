/* State
 *
 * Everything of a run that must survive it, in one list: what strategy, optimizer, trainer and
 * loader keep, and what the program adds. Checkpoints walk this list, and so can a program that
 * has its own way to store things:
 *
 *     tensors   values of parameters, moments, momentum; residuals and velocities of
 *               compression; arrays of the program's own
 *     scalars   steps of optimizer, strategy and trainer, tokens seen, the loss scaler, position
 *               and seed of the loader, the seed of dropout
 *
 * A tensor is described as a whole, and each rank holds pieces of it: different ones where a
 * strategy shards or a tensor axis cuts, all of it where neither does. Ranks may list different
 * tensors, as the stages of a pipeline do; a checkpoint has the tensors of all ranks. */

#pragma once

#include "core/api.h"
#include "core/result.h"
#include "world/world.h"
#include "strategy/params.h"
#include "strategy/strategy.h"
#include "optim/optimizer.h"
#include "optim/scaler.h"

typedef struct dtrain_state dtrain_state;

typedef enum dtrain_state_kind {
    DTRAIN_STATE_VALUE = 0,      /* of a parameter */
    DTRAIN_STATE_EXP_AVG = 1,    /* AdamW's first moments */
    DTRAIN_STATE_EXP_AVG_SQ = 2, /* AdamW's second moments */
    DTRAIN_STATE_MOMENTUM = 3,   /* SGD's buffer */
    DTRAIN_STATE_RESIDUAL = 4,   /* compression: what was not sent; every rank has its own */
    DTRAIN_STATE_VELOCITY = 5,   /* top-k with momentum; every rank has its own */
    DTRAIN_STATE_HOST = 6,       /* added by the program */
    DTRAIN_STATE_LION = 7,       /* Lion's momentum: no optimizer continues with another's state */
    DTRAIN_STATE_MUON = 8,       /* Muon's */
    DTRAIN_STATE_STEPS = 9,      /* of a parameter: in how many steps it was updated */
    DTRAIN_STATE_SCALAR = 10,    /* "optimizer.step" and the like: one number, on all ranks */
    DTRAIN_STATE_KINDS = 11
} dtrain_state_kind;

#define DTRAIN_STATE_BYTES 6u /* besides dtrain_dtype: a blob, of bytes */

/* A piece of a tensor: a run of the elements, in row-major order, of a box.
 *
 *     tensor (4 x 6)      box: rows 1-2, columns 2-4      run: elements 1-4 of the box
 *       . . . . . .           . . . . . .                   . . . . . .
 *       . . . . . .           . . a b c .                   . . . b c .
 *       . . . . . .           . . d e f .                   . . d e . .
 *       . . . . . .           . . . . . .                   . . . . . .
 *
 * A cut along an axis (parallel/cut.h) makes boxes: a slice of rows or columns, or of one component
 * of a packed q|k|v. A cut by bytes, as of a sharding strategy, makes runs, also of an array that
 * is a slice itself. The elements that two pieces share are a piece again. Boxes alone would not do
 * as well: a run of a tensor of 4 axes is up to 7 boxes. */
typedef struct dtrain_piece {
    int64_t first[4], length[4]; /* the box; of a whole tensor: zeros, and its shape */
    int64_t offset, count;       /* the run: its first element in the box, and how many */
} dtrain_piece;

typedef struct dtrain_state_tensor {
    const char *name;   /* of the parameter, or as it was added */
    uint32_t kind;      /* dtrain_state_kind */
    uint32_t dtype;     /* dtrain_dtype or DTRAIN_STATE_BYTES */
    int64_t shape[4];   /* of the whole tensor; leading non-zero entries, all zero = no element */
    int64_t total;      /* its elements */
    dtrain_piece piece; /* this rank's; the tensor is listed once for each piece of it */
    void *memory; /* (piece.count) the host's or the device's: dtrain_device_copy reaches both */
    void *mirror; /* a second place that must have the same values, or NULL */
    bool own;     /* every rank has its private tensor by this name */
} dtrain_state_tensor;

/* An array of the program's own, in host or device memory, which must stay where it is: a random
 * generator, counters, statistics; or a piece of a tensor that ranks share. Ranks may list
 * different arrays; those that list the same one give it the same shape and dtype, and together
 * hold all of its elements: dtrain_checkpoint_open checks both. */
typedef struct dtrain_state_item {
    const char *name; /* kept by pointer */
    uint32_t dtype;   /* dtrain_dtype or DTRAIN_STATE_BYTES */
    int64_t count;
    void *memory;       /* (count) */
    bool own;           /* every rank has its own; false: all have the same values */
    int64_t shape[4];   /* of the whole array; zeros = (count) */
    dtrain_piece piece; /* this rank's, of `count` elements; zeros = all of it. Several pieces of an
                           array are as many items of one name */
} dtrain_state_item;

/* The objects of a run. All must outlive the state; all but the strategy may be NULL. */
typedef struct dtrain_state_desc {
    dtrain_strategy *strategy;
    dtrain_optimizer *optimizer;
    struct dtrain_trainer *trainer;
    dtrain_loss_scaler *scaler;   /* of a loop without trainer */
    struct dtrain_loader *loader; /* of the training data */
    /* The program's own arrays (item_count), read only by create; NULL = none. */
    const dtrain_state_item *items;
    size_t item_count;
    /* Key, text, key, text, ..., NULL, of at most 255 bytes, kept by pointer; NULL = none.
     * Checkpoints hold them, and a load compares texts whose key both sides have. Another text in
     * `model`, which is what shapes do not show of what values mean (heads, activation, epsilon),
     * is an error; in `settings` (seed, rate, data) it is said in dtrain_load_info.note. */
    const char *const *model;
    const char *const *settings;
    /* The ranks that save and load together; NULL = the strategy's. Where each stage of a pipeline
     * has its own strategy: the ranks of all stages. */
    dtrain_comm *comm;
} dtrain_state_desc;

/* Make the list. Local. */
DTRAIN_API dtrain_result dtrain_state_create(dtrain_world *world, const dtrain_state_desc *desc,
                                             dtrain_state **out);
/* Free the list, and nothing that is in it; NULL is ignored. */
DTRAIN_API void dtrain_state_destroy(dtrain_state *state);

/* List the tensors of this rank, followed by the scalars, which are tensors of one element in host
 * memory. Local; valid until the state is destroyed. What is in memory is whole between two
 * steps. */
DTRAIN_API dtrain_result dtrain_state_tensors(const dtrain_state *state,
                                              const dtrain_state_tensor **tensors, size_t *count);
/* Take over values that the program has written to the memory of the tensors by itself: bring every
 * rank's parameters to where the next forward reads them, and make anew what follows from the
 * scalars. Collective. */
DTRAIN_API dtrain_result dtrain_state_changed(dtrain_state *state);
