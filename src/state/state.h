/* State
 *
 * One list of everything that must survive a run: the state of strategy, optimizer, trainer and
 * loader, and arrays that the program adds. Checkpoints go through this list. A program with its
 * own storage can do the same.
 *
 *     tensors   values of parameters, moments, momentum; residuals and velocities of
 *               compression; arrays of the program
 *     scalars   steps of optimizer, strategy and trainer, tokens seen, the loss scaler, position
 *               and seed of the loader, the seed of dropout
 *
 * The list describes a whole tensor, and which pieces of it this rank holds: different pieces per
 * rank if a strategy shards the tensor or the tensor axis cuts it, otherwise all of it. Ranks can
 * list different tensors, as the stages of a pipeline do. A checkpoint has the tensors of all
 * ranks. */

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
    DTRAIN_STATE_VALUE = 0,      /* value of a parameter */
    DTRAIN_STATE_EXP_AVG = 1,    /* AdamW's first moments */
    DTRAIN_STATE_EXP_AVG_SQ = 2, /* AdamW's second moments */
    DTRAIN_STATE_MOMENTUM = 3,   /* SGD's buffer */
    DTRAIN_STATE_RESIDUAL = 4,   /* compression: gradient not sent yet; private to each rank */
    DTRAIN_STATE_VELOCITY = 5,   /* top-k with momentum; private to each rank */
    DTRAIN_STATE_HOST = 6,       /* array that the program added */
    DTRAIN_STATE_LION = 7,       /* Lion's momentum; no other optimizer continues with it */
    DTRAIN_STATE_MUON = 8,       /* Muon's momentum; no other optimizer continues with it */
    DTRAIN_STATE_STEPS = 9,      /* updates of a parameter so far */
    DTRAIN_STATE_SCALAR = 10,    /* a number such as "optimizer.step", the same on all ranks */
    DTRAIN_STATE_KINDS = 11
} dtrain_state_kind;

#define DTRAIN_STATE_BYTES 6u /* one more dtype: raw bytes */

/* A piece of a tensor: a run of the elements, in row-major order, of a box.
 *
 *     tensor (4 x 6)      box: rows 1-2, columns 2-4      run: elements 1-4 of the box
 *       . . . . . .           . . . . . .                   . . . . . .
 *       . . . . . .           . . a b c .                   . . . b c .
 *       . . . . . .           . . d e f .                   . . d e . .
 *       . . . . . .           . . . . . .                   . . . . . .
 *
 * A cut along an axis (parallel/cut.h) makes boxes: a slice of rows or columns, or of one component
 * of a packed q|k|v. A strategy that shards by bytes makes runs, also of such a slice. The elements
 * that two pieces share are a piece again. Boxes without runs would be worse: a run of a tensor of
 * 4 axes is up to 7 boxes. */
typedef struct dtrain_piece {
    int64_t first[4], length[4]; /* the box; for a whole tensor, zeros and its shape */
    int64_t offset, count;       /* the run: its first element in the box, its elements */
} dtrain_piece;

typedef struct dtrain_state_tensor {
    const char *name;   /* name of the parameter or of the item */
    uint32_t kind;      /* dtrain_state_kind */
    uint32_t dtype;     /* dtrain_dtype or DTRAIN_STATE_BYTES */
    int64_t shape[4];   /* shape of the whole tensor, then zeros; all zero = no element */
    int64_t total;      /* elements of the whole tensor */
    dtrain_piece piece; /* piece of this rank; the list has one entry for each piece */
    void *memory;       /* (piece.count) host or device memory; dtrain_device_copy reaches both */
    void *mirror;       /* second copy that must have the same values; NULL: none */
    bool own;           /* every rank has a private tensor of this name */
} dtrain_state_tensor;

/* An array of the program, in host or device memory: a random generator, counters, statistics, or a
 * piece of a tensor that ranks share. The memory must not move. Ranks can list different arrays.
 * Ranks that list the same array give it the same shape and dtype, and together hold all of its
 * elements; dtrain_checkpoint_open checks both. */
typedef struct dtrain_state_item {
    const char *name; /* kept by pointer */
    uint32_t dtype;   /* dtrain_dtype or DTRAIN_STATE_BYTES */
    int64_t count;
    void *memory;       /* (count) */
    bool own;           /* every rank has a private array; false: all have the same values */
    int64_t shape[4];   /* shape of the whole array; zeros = (count) */
    dtrain_piece piece; /* piece of this rank, of `count` elements; zeros = all. Several pieces of
                           an array are several items of one name */
} dtrain_state_item;

/* The objects of a run. All must outlive the state; all but the strategy may be NULL. */
typedef struct dtrain_state_desc {
    dtrain_strategy *strategy;
    dtrain_optimizer *optimizer;
    struct dtrain_trainer *trainer;
    dtrain_loss_scaler *scaler;   /* for a loop without a trainer */
    struct dtrain_loader *loader; /* loader of the training data */
    /* Arrays of the program (item_count), read only by create; NULL = none. */
    const dtrain_state_item *items;
    size_t item_count;
    /* Key, text, key, text, ..., NULL, of at most 255 bytes, kept by pointer; NULL = none.
     * Checkpoints store them, and a load compares the texts of keys that both sides have. `model`
     * has the settings that give values their meaning but do not show in shapes (heads,
     * activation, epsilon): another text is an error. In `settings` (seed, rate, data), another
     * text is reported in dtrain_load_info.note. */
    const char *const *model;
    const char *const *settings;
    /* Ranks that save and load together; NULL = the ranks of the strategy. If each stage of a
     * pipeline has a separate strategy, give the ranks of all stages. */
    dtrain_comm *comm;
} dtrain_state_desc;

/* Make the list. Local. */
DTRAIN_API dtrain_result dtrain_state_create(dtrain_world *world, const dtrain_state_desc *desc,
                                             dtrain_state **out);
/* Free the list, but none of its arrays; NULL is ignored. */
DTRAIN_API void dtrain_state_destroy(dtrain_state *state);

/* List the tensors of this rank, followed by the scalars, which are tensors of one element in host
 * memory. Local; valid until the state is destroyed. Values are consistent between steps. */
DTRAIN_API dtrain_result dtrain_state_tensors(const dtrain_state *state,
                                              const dtrain_state_tensor **tensors, size_t *count);
/* Take over values that the program has written to the memory of the tensors: publish the
 * parameters to all ranks for the next forward, and recompute all that depends on scalars.
 * Collective. */
DTRAIN_API dtrain_result dtrain_state_changed(dtrain_state *state);
