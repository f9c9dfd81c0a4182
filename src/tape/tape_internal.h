/* The tape's structures
 *
 * Memory during a step, and how long its contents last:
 *
 *     host arena      tensors, nodes                       until the next begin
 *     data arena      every forward value                  until the next begin
 *     two regions     values that checkpointing drops      until the second next unit that drops
 *     casts           rounded weights of a gathered unit   while the unit is gathered
 *     weights         rounded weights of other units       until the next begin or pipeline step
 *     inboxes         values from other stages (stage.c)   until the backward of their pass
 *     gradient pool   gradients of forward values          from the first contribution until their
 *                                                          producer's backward has run
 *                     scratch of an operation              while its kernels and sums run
 *     params          values and gradients                 owned by the program or the strategy
 *
 * A pipeline has several passes under way, each in a slot with its own arenas; all slots share
 * casts, weights and the pool.
 *
 * Arenas are rewound, never freed, and the pool is keyed by exact size: a pass that repeats the
 * requests of the last one allocates nothing and gets the same addresses. The plan device runs this
 * same code, so memory is known in advance. */

#pragma once

#include "core/platform_internal.h"
#include "world/abi_internal.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/log.h"
#include "core/result.h"
#include "strategy/params.h"
#include "strategy/samples_internal.h"
#include "strategy/view_internal.h"
#include "tape/op.h"
#include "tape/tape.h"
#include "parallel/cut_internal.h"
#include "parallel/pipeline.h"
#include "device/backend.h"
#include "device/device.h"

/* ---- Memory -----------------------------------------------------------------------------------*/

typedef struct dtrain__chunk {
    struct dtrain__chunk *next;
    char *memory;
    size_t bytes;
    uint32_t owners; /* gradient pool: number of tensors with this gradient; 0 = free */
} dtrain__chunk;

/* An arena: chunks in the order of creation; taking memory moves forward through them. A pass that
 * makes part of an earlier pass's requests (an evaluation after a training step) is never ahead of
 * that pass, so it finds room everywhere.
 *
 * A chunk of device memory has exactly the size of its first request, so its end is never wasted;
 * this costs a few hundred allocations in the first step only. */
typedef struct dtrain__bump {
    struct dtrain__bump *next; /* of the tape's arenas */
    dtrain_device *device;     /* NULL: host memory */
    dtrain__chunk *first;
    dtrain__chunk **at;                 /* the link to the chunk in use */
    size_t used;                        /* bytes of that chunk */
    uint64_t bytes, allocations;        /* of all chunks */
    struct dtrain__tape_segment *owner; /* of a region: segment with the latest results in it */
} dtrain__bump;

/* Arenas of a tape and of a pass. The first of each is host memory. */
enum {
    DTRAIN__ARENA_RECORDS,   /* of rounded weights */
    DTRAIN__ARENA_GRADIENTS, /* the pool, which dtrain__scratch_take searches */
    DTRAIN__ARENA_CASTS,
    DTRAIN__ARENA_WEIGHTS,
    DTRAIN__TAPE_ARENAS
};
enum {
    DTRAIN__ARENA_HOST,
    DTRAIN__ARENA_DATA,
    DTRAIN__ARENA_REGION, /* first of two regions, which segments use in turn */
    DTRAIN__PASS_ARENAS = DTRAIN__ARENA_REGION + 2
};

/* ---- Nodes and tensors ------------------------------------------------------------------------*/

/* One executed operation. */
typedef struct dtrain_node {
    dtrain_op op;                           /* first: a dtrain_op * points to a node */
    struct dtrain_node *previous;           /* the node recorded before this one */
    struct dtrain__tape_segment *segment;   /* NULL: this unit drops nothing */
    struct dtrain_node *redo;               /* next in its segment's list of dropped nodes */
    dtrain_param *target[DTRAIN_OP_PARAMS]; /* parameter whose gradient params[i] contributes to;
                                               NULL: frozen, or a pass without gradients */
    const void *source[DTRAIN_OP_INPUTS];   /* values of inputs[i]; autocast rounds them to
                                               input_data[i] if the two addresses differ */
    int64_t unit;                           /* -1: before the first mark */
    uint32_t mark;                          /* number of earlier marks */
    bool remote;                            /* another stage computes it */
    bool dropped;                           /* its results are in the segment's region */
    bool saves;                             /* it has saved memory, which backward reads */
    bool halved;                            /* gradients of its parameters are not made yet */
    bool reached;                           /* the gradient of this backward's loss reaches it */
} dtrain_node;

/* A tensor with the tape's private members: every dtrain_tensor is the first member of one. */
typedef struct dtrain__tape_tensor {
    dtrain_tensor tensor;
    dtrain__chunk *gradient;              /* memory of tensor.grad; NULL: no chunk of the pool */
    dtrain__chunk *earlier;               /* earlier contributions, to be added to `gradient` */
    dtrain__share part;                   /* this rank's elements of each row (COLUMNS), or its
                                             rows (ROWS), as a part of a parameter cut by rows */
    dtrain__samples samples;              /* I32 inputs: entries other than -1; losses: samples
                                             of the mean */
    float valid[2];                       /* samples.valid of an I32 input of this pass */
    struct dtrain__tape_segment *segment; /* owner of its region; NULL: made in the data arena */
    bool kept;                            /* tensor.data is a copy in the data arena */
    bool remote;                          /* another stage has its values */
    int32_t stage;                        /* maker; -1: an input */
    int32_t last_stage;                   /* last reader; -1: an input */
    struct dtrain__tape_tensor *next;     /* the tensor before it on its list (stage.c) */
    bool wanted;                          /* needed after recomputation */
    bool read_here;                       /* in a survey: a stage of this rank reads it */
} dtrain__tape_tensor;

/* The operations between two marks in a unit that drops results. */
typedef struct dtrain__tape_segment {
    int64_t unit;
    dtrain__bump *region;
    dtrain_node *dropped;                         /* from the last node to the first */
    const struct dtrain__tape_segment *successor; /* overwrote the results first; NULL: intact */
} dtrain__tape_segment;

/* A weight rounded to the type of autocast at its first use in a pass. The copy of a gathered
 * weight lasts only while the unit is gathered: the first use after a mark makes it, in the memory
 * of the previous unit's copies, and backward makes it again at that mark. The key is the
 * parameter: several weights can have the same address in turn. */
typedef struct dtrain__cast {
    struct dtrain__cast *next;
    const dtrain_param *storage;
    int64_t count;
    void *low;
    uint32_t mark; /* number of the mark of a gathered weight, or DTRAIN__CAST_LASTS */
#define DTRAIN__CAST_LASTS UINT32_MAX
} dtrain__cast;

/* ---- Inputs on their way to a device ----------------------------------------------------------*/

#define DTRAIN__FEED_ITEMS 16
#define DTRAIN__VALID_BYTES (2 * sizeof(float)) /* of dtrain__samples.valid */

/* Each input of a replayed step has page-locked memory, which the next step fills although no model
 * code runs. dtrain__samples.valid follow an I32 input in this memory and on the device: they
 * change from step to step, and a recorded loss reads them on the device. */
typedef struct dtrain__feed_item {
    const void *host; /* the caller's buffer */
    void *pinned;     /* (room + DTRAIN__VALID_BYTES) */
    size_t bytes, room;
    dtrain_dtype dtype;
} dtrain__feed_item;

typedef struct dtrain__feed {
    dtrain__feed_item items[DTRAIN__FEED_ITEMS];
    size_t count, next; /* inputs known; number of the pass's next input */
    bool fixed;  /* a loss adds two means: the number of targets that count must not change */
    bool filled; /* `pinned` already holds this pass's data */
} dtrain__feed;

/* ---- A pass ----------------------------------------------------------------------------------*/

/* State that dtrain_tape_begin zeroes. */
typedef struct dtrain__pass {
    uint32_t state, flags;
    uint64_t seed, dropout_count;
    dtrain_dtype cast;  /* the type of autocast; F32 without */
    uint32_t cast_mark; /* the mark whose casts of gathered weights are in memory */
    dtrain_node *last;
    size_t node_count, tensor_count, recomputed_count;
    uint32_t mark_count, segment_count;
    dtrain__tape_segment *segment; /* the segment being recorded; NULL: none */
    bool halves;                   /* backward makes gradients of inputs now, of parameters later */
    uint32_t sums;                 /* number of sums of means over different samples */
    bool more; /* another micro-batch adds to the gradients: none is ready after this backward */
} dtrain__pass;

/* A pass under way; a pipeline has several. The tape holds `pass` while the slot is selected. */
typedef struct dtrain__pass_slot {
    dtrain__pass pass;
    dtrain__bump arenas[DTRAIN__PASS_ARENAS];
    int32_t stage;                   /* this and the following members: see stage.c */
    struct dtrain__pass_slot *batch; /* the slot with the inputs of this micro-batch */
    void **received;                 /* (crossing_count) addresses of the pass's inbox, or NULL */
    dtrain__tape_tensor *listed;     /* inputs, in a survey all tensors; the latest first */
    struct dtrain__crossed *crossed; /* (crossing_count) */
    size_t next_crossing, input_count;
} dtrain__pass_slot;

/* ---- Costs ------------------------------------------------------------------------------------*/

/* Costs of units, which a plan adds up: see op.c. */
typedef struct dtrain__unit_costs {
    const int32_t *units; /* (2 * count) a unit and its stage, as in dtrain__stage_map */
    size_t count;
    double flops_per_byte;        /* operations of the device in the time of moving a byte */
    dtrain_pipeline_costs *costs; /* (count) */
    uint64_t *kept;               /* (count) bytes that a pass keeps for its backward; or NULL */
} dtrain__unit_costs;

/* ---- The tape ---------------------------------------------------------------------------------*/

enum { DTRAIN__TAPE_IDLE, DTRAIN__TAPE_FORWARD, DTRAIN__TAPE_DONE };

struct dtrain_tape {
    dtrain_world *world;                 /* for the spans of passes; NULL: no world, or a plan */
    dtrain_strategy *strategy;           /* NULL: none, or a plan */
    const struct dtrain__layout *layout; /* of the strategy or the plan; NULL: no strategy */
    dtrain__groups groups;               /* likewise; one rank on the tensor axis without */
    dtrain_device *device;
    dtrain_allocator allocator;
    uint64_t unit_begin_ns, unit_end_ns; /* for a trace: of the unit, of its last operation */
    double flops;                        /* see dtrain_tape_info */
    const dtrain__unit_costs *costs;     /* counted by a plan; or NULL */
    dtrain__bump *all_arenas;            /* of the tape, its slots and its stages */
    dtrain__bump arenas[DTRAIN__TAPE_ARENAS];
    dtrain__pass_slot *slots, *slot; /* (slot_count); the selected slot */
    uint32_t slot_count;
    dtrain__pass pass;                       /* of the selected slot */
    dtrain__cast *casts;                     /* rounded weights, latest first */
    struct dtrain__stages *stages;           /* NULL: this rank has the whole model */
    int64_t unit;                            /* the gathered unit; -1: none */
    dtrain_pass unit_pass;                   /* the pass for which it is gathered */
    uint32_t recompute_every, recompute_ops; /* see dtrain_tape_recompute */
    const dtrain_step_scalars *scalars;      /* with the seed of a replayed step; or NULL */
    dtrain__feed *feed;                      /* inputs of a replayed step; or NULL */
    dtrain__feed inputs;                     /* inputs of other passes, whose shapes can change */
    dtrain_event *uploaded;                  /* recorded after the last upload of `inputs` */
    bool hashes;          /* other ranks hold parts of the same model and need the same inputs */
    uint64_t inputs_hash; /* of all inputs since a trainer last compared it */
    dtrain_result error;  /* the first error of this pass, and its sentence */
    char error_text[DTRAIN__ERROR_BYTES];
};

/* tape/tape.c */
/* Let a tape of the plan device plan a strategy of this layout and these groups, without a
 * communicator. */
DTRAIN__PRIVATE void dtrain__tape_plan(dtrain_tape *tape, const struct dtrain__layout *layout,
                                       const dtrain__groups *groups);
DTRAIN__PRIVATE void dtrain__tape_reset(dtrain_tape *tape);
DTRAIN__PRIVATE dtrain_result dtrain__pass_begin(dtrain_tape *tape, uint32_t flags, uint64_t seed);
DTRAIN__PRIVATE dtrain_result dtrain__tape_check(dtrain_tape *tape, const char *call);
DTRAIN__PRIVATE dtrain_result dtrain__tape_stick(dtrain_tape *tape, dtrain_result result);
DTRAIN__PRIVATE void dtrain__tape_info(const dtrain_tape *tape, dtrain_tape_info *info);
DTRAIN__PRIVATE const void *dtrain__tape_take(dtrain_tape *tape, dtrain__abi_entry which,
                                              const void *given, void *own);
DTRAIN__PRIVATE dtrain_result dtrain__tape_enter(dtrain_tape *tape, int64_t unit);
DTRAIN__PRIVATE dtrain_result dtrain__feed_fill(dtrain_tape *tape, const dtrain__feed *feed,
                                                const dtrain__feed_item *item);
DTRAIN__PRIVATE bool dtrain__is_float(const dtrain_tensor *x);
DTRAIN__PRIVATE size_t dtrain__tensor_bytes(const dtrain_tensor *x);

/* tape/op.c */
#define DTRAIN__SHAPE_TEXT 96 /* 4 axes of 19 digits fit */
DTRAIN__PRIVATE const char *dtrain__shape_text(const int64_t shape[4], char *text);
/* Refuse a call of an operation. The sentence lists shape and type of the inputs, shapes of the
 * parameters and, over a tensor axis, this rank's part of each. */
DTRAIN__PRINTF(2, 3)
DTRAIN__PRIVATE dtrain_result dtrain__refuse(const dtrain_op *op, const char *format, ...);
DTRAIN__PRIVATE const char *dtrain__param_name(const dtrain_param *p);
/* Return this rank's part of a tensor that is not whole. */
DTRAIN__PRIVATE const dtrain__share *dtrain__tensor_share(const dtrain_tensor *x);
/* Set the placement of an output and this rank's part of it. */
DTRAIN__PRIVATE void dtrain__place_as(dtrain_tensor *y, uint32_t placement,
                                      const dtrain__share *part);
/* Describe this rank's part of parameter i; its axis is -1 if it is not cut. */
DTRAIN__PRIVATE dtrain__share dtrain__param_share(const dtrain_op *op, uint32_t i);
/* Refuse gradients of whole parameters over some of the rows, unless a strategy sums them. */
DTRAIN__PRIVATE dtrain_result dtrain__check_partial(const dtrain_op *op);
/* Find the placement of rows that no weight divides: whole, or cut under sequence parallelism (in
 * prepare). */
DTRAIN__PRIVATE dtrain_result dtrain__divide_rows(const dtrain_op *op, int64_t rows,
                                                  uint32_t *placement, dtrain__share *part);
DTRAIN__PRIVATE dtrain_result dtrain__op_call(dtrain_op *op, dtrain_result (*run)(dtrain_op *));
DTRAIN__PRIVATE dtrain_result dtrain__op_run(dtrain_node *node);
DTRAIN__PRIVATE dtrain_result dtrain__tape_convert(dtrain_device *device, int64_t count,
                                                   const void *x, uint32_t x_dtype, void *y,
                                                   uint32_t y_dtype);
DTRAIN__PRIVATE dtrain_result dtrain__tape_add(dtrain_device *device, int64_t count, const void *x,
                                               uint32_t x_dtype, const void *y, uint32_t y_dtype,
                                               void *out);
DTRAIN__PRIVATE dtrain_result dtrain__sum_to(dtrain_device *device, void *out, const void *x,
                                             uint32_t dtype, int64_t count, double scale,
                                             const float *factor);

/* Count memory that a node keeps. */
DTRAIN__PRIVATE void dtrain__cost_keep(const dtrain_node *node, int64_t count, uint32_t dtype);

/* tape/place.c: moves of device memory over the tensor axis, rows of n elements. Each move is
 * collective and does nothing in a plan. With `work`, if the strategy wants overlap, it returns at
 * once and leaves *work to dtrain_work_wait; otherwise later work on the device follows it. Sums
 * are taken in fp32 in the order of the ranks and rounded once. */
/* Return a rank's part of `length` rows or columns by a cut; NULL: an even cut. */
DTRAIN__PRIVATE dtrain__share dtrain__cut_part(const dtrain_op *op, const dtrain_cut *cut,
                                               int64_t length, int rank);
/* Return this rank's part of a row of `width` columns, which is one component of x. */
DTRAIN__PRIVATE dtrain__share dtrain__component_of(const dtrain_op *op, const dtrain_tensor *x,
                                                   int64_t width);
/* Sum values (count) over the axis, in place. */
DTRAIN__PRIVATE dtrain_result dtrain__sum_values(const dtrain_op *op, void *values, int64_t count,
                                                 uint32_t dtype, dtrain_work **work);
/* Put the parts of all ranks together: whole (rows, n), its rows cut by `cut`; NULL: evenly. */
DTRAIN__PRIVATE dtrain_result dtrain__gather_rows(const dtrain_op *op, const dtrain_cut *cut,
                                                  const void *part, void *whole, int64_t rows,
                                                  int64_t n, uint32_t dtype, dtrain_work **work);
/* Sum whole (rows, n) over the axis, and keep this rank's rows in part, which can be their place in
 * whole. */
DTRAIN__PRIVATE dtrain_result dtrain__scatter_rows(const dtrain_op *op, const void *whole,
                                                   void *part, int64_t rows, int64_t n,
                                                   uint32_t dtype, dtrain_work **work);

/* tape/linear.c */
DTRAIN__PRIVATE dtrain_result dtrain__counted_gemm(dtrain_op *op, const dtrain_gemm_args *args);

/* tape/norms.c */
DTRAIN__PRIVATE void dtrain__output_like(dtrain_op *op, const dtrain_tensor *x, int64_t n,
                                         dtrain_dtype dtype);

/* tape/elementwise.c */
DTRAIN__PRIVATE dtrain_result dtrain__check_same(const dtrain_op *op);

/* Placements of an operation on single elements; and of an operation that checks its inputs and
 * places its outputs itself. */
#define DTRAIN__OP_TAKES_ALL (DTRAIN_OP_TAKES_COLUMNS | DTRAIN_OP_TAKES_ROWS)
#define DTRAIN__OP_PLACES 4u
/* In `reads`: forward touches memory only in kernels, so a plan can run it to count its products
 * and its scratch. */
#define DTRAIN__OP_COUNTS (1u << 31)
/* In `reads`: the first half of a backward in halves also makes the gradient of parameter i. */
#define DTRAIN__OP_FIRST_HALF(i) (1u << (8 + (i)))

/* The forward of an operation that only runs a kernel, whose arguments begin its args. */
#define DTRAIN__OP_FORWARD(kernel)                                                            \
    static dtrain_result dtrain__##kernel##_forward(dtrain_op *op)                            \
    {                                                                                         \
        return op->device->ops->kernel(op->device, (const dtrain_##kernel##_args *)op->args); \
    }

/* The descriptor dtrain__<op>_op of a built-in operation with dtrain__<functions>_prepare, _forward
 * and _backward. The macro names the fields: C++17 has no designators. Defined until elementwise.c,
 * its last user. */
#define DTRAIN__OP_NAMED(op, name, functions, reads, recompute, integer_inputs, placements, \
                         autocast)                                                          \
    static const dtrain_op_desc dtrain__##op##_op = {reads,                                 \
                                                     recompute,                             \
                                                     integer_inputs,                        \
                                                     placements,                            \
                                                     autocast,                              \
                                                     name,                                  \
                                                     dtrain__##functions##_prepare,         \
                                                     dtrain__##functions##_forward,         \
                                                     dtrain__##functions##_backward};
#define DTRAIN__OP(op, ...) DTRAIN__OP_NAMED(op, "dtrain_" #op, __VA_ARGS__)

/* tape/backward.c */
DTRAIN__PRIVATE dtrain_result dtrain__gradient_open(dtrain_tape *tape, dtrain_tensor *x,
                                                    bool *accumulate);
/* Refuse a loss that is not one number. */
DTRAIN__PRIVATE dtrain_result dtrain__check_loss(const char *call, const dtrain_tensor *loss);
/* Zero the gradient of a tensor without contributions. */
DTRAIN__PRIVATE dtrain_result dtrain__gradient_zeros(dtrain_tape *tape, dtrain_tensor *x);
/* Run the backward of a pass from its loss or, without a loss, from tensors that have gradients and
 * whose producers are marked as reached. */
DTRAIN__PRIVATE dtrain_result dtrain__backward_pass(dtrain_tape *tape, dtrain_tensor *loss,
                                                    float scale);
/* Run the second half of a backward: gradients of parameters. */
DTRAIN__PRIVATE dtrain_result dtrain__backward_params(dtrain_tape *tape);
DTRAIN__PRIVATE dtrain_result dtrain__gradient_pass(dtrain_op *op, uint32_t output, uint32_t input);

/* tape/recompute.c */
DTRAIN__PRIVATE void dtrain__segment_begin(dtrain_tape *tape);
DTRAIN__PRIVATE dtrain_result dtrain__segment_again(dtrain_tape *tape, const dtrain_node *node);
DTRAIN__PRIVATE dtrain_result dtrain__check_intact(const dtrain_tensor *x, const char *call);
DTRAIN__PRIVATE dtrain_result dtrain__tensor_keep(dtrain_tape *tape, dtrain_tensor *x,
                                                  const char *call);

/* tape/stage.c, for the tape */
#define DTRAIN__REMOTE 64 /* address of remote data: aligned, never read */
DTRAIN__PRIVATE bool dtrain__stage_is_remote(const dtrain_tape *tape);
DTRAIN__PRIVATE bool dtrain__is_surveying(const dtrain_tape *tape);
DTRAIN__PRIVATE void dtrain__stage_made(dtrain_tape *tape, dtrain__tape_tensor *made,
                                        const dtrain_node *node);
/* Make an input remote if no stage of this rank reads it. *shared: an earlier pass has its memory.
 */
DTRAIN__PRIVATE dtrain_result dtrain__stage_input(dtrain_tape *tape, dtrain__tape_tensor *made,
                                                  bool *shared);

/* tape/arena.c */
/* Replace the slots for passes. */
DTRAIN__PRIVATE dtrain_result dtrain__slots_create(dtrain_tape *tape, uint32_t slot_count);
DTRAIN__PRIVATE void dtrain__slots_free(dtrain_tape *tape);
DTRAIN__PRIVATE void dtrain__arena_add(dtrain_tape *tape, dtrain__bump *arena,
                                       dtrain_device *device);
DTRAIN__PRIVATE void dtrain__bump_rewind(dtrain__bump *arena);
DTRAIN__PRIVATE void *dtrain__take_host(dtrain_tape *tape, dtrain__bump *arena, size_t bytes);
DTRAIN__PRIVATE void *dtrain__take_values(dtrain_tape *tape, dtrain__bump *arena, int64_t count,
                                          uint32_t dtype);
DTRAIN__PRIVATE void *dtrain__take_data(dtrain_tape *tape, const dtrain_node *node, int64_t count,
                                        uint32_t dtype);
DTRAIN__PRIVATE dtrain_tensor *dtrain__tensor_new(dtrain_tape *tape, const dtrain_node *node,
                                                  dtrain_dtype dtype, uint32_t ndim,
                                                  const int64_t *shape);
/* Borrow memory for `count` values from the gradient pool, the same in every layer (NULL: the error
 * sticks), and give it back: queued kernels still use it, later kernels follow them. */
DTRAIN__PRIVATE dtrain__chunk *dtrain__scratch_take(dtrain_tape *tape, int64_t count,
                                                    uint32_t dtype);
DTRAIN__PRIVATE void dtrain__scratch_give(dtrain__chunk *chunk);
