/* The tape's structures
 *
 * Where things live during a step, and who gives them back:
 *
 *     host arena      tensors, nodes                       until the next begin
 *     data arena      every forward value                  until the next begin
 *     two regions     values that checkpointing drops      until the next but one unit that drops
 *     casts           rounded weights of a gathered unit   as long as the unit is there
 *     weights         rounded weights of all others        until the next begin, or step of a
 *                                                          pipeline
 *     inboxes         what another stage sent (stage.c)    until its pass has had its backward
 *     gradient pool   gradients of forward values          from the first contribution until their
 *                                                          producer's backward has run
 *                     what an operation borrows            while its kernels and sums run
 *     params          values and gradients                 not the tape's
 *
 * A pipeline has several passes under way, each in a slot with its arenas; casts, weights and the
 * pool are the tape's.
 *
 * Arenas are rewound, never freed, and the pool is keyed by exact size: a pass that asks for what
 * the last one asked for allocates nothing and gets the same addresses. That also makes memory
 * predictable: the plan device runs this very code and only its allocations do nothing. */

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
    uint32_t owners; /* gradient pool only: tensors whose gradient this is; 0 = free */
} dtrain__chunk;

/* An arena: chunks in the order they were made; memory is handed out by moving forward through
 * them. A pass that asks for a part of what an earlier one asked for (an evaluation after a
 * training step) is never further along than that one was, so it finds room everywhere.
 *
 * A chunk of device memory has exactly the size of the request it was made for: nothing is lost at
 * its end, and a few hundred allocations in the first step are soon forgotten. */
typedef struct dtrain__bump {
    struct dtrain__bump *next; /* of the tape's arenas */
    dtrain_device *device;     /* NULL: host memory */
    dtrain__chunk *first;
    dtrain__chunk **at;                 /* the link to the chunk in use */
    size_t used;                        /* bytes of that chunk */
    uint64_t bytes, allocations;        /* of all chunks */
    struct dtrain__tape_segment *owner; /* of a region: who put its results there last */
} dtrain__bump;

/* Arenas of a tape and of a pass. The first one of each is host memory. */
enum {
    DTRAIN__ARENA_RECORDS,   /* which weights have been rounded */
    DTRAIN__ARENA_GRADIENTS, /* the pool, from which nothing is taken by moving forward */
    DTRAIN__ARENA_CASTS,
    DTRAIN__ARENA_WEIGHTS,
    DTRAIN__TAPE_ARENAS
};
enum {
    DTRAIN__ARENA_HOST,
    DTRAIN__ARENA_DATA,
    DTRAIN__ARENA_REGION, /* and the next one: what segments drop, in turn */
    DTRAIN__PASS_ARENAS = DTRAIN__ARENA_REGION + 2
};

/* ---- Nodes and tensors ------------------------------------------------------------------------*/

/* One executed operation. */
typedef struct dtrain_node {
    dtrain_op op;                           /* first: a dtrain_op * points to a node */
    struct dtrain_node *previous;           /* the node recorded before this one */
    struct dtrain__tape_segment *segment;   /* NULL: this unit drops nothing */
    struct dtrain_node *redo;               /* next in its segment's list of dropped nodes */
    dtrain_param *target[DTRAIN_OP_PARAMS]; /* where the gradient of params[i] goes; NULL: it is
                                               frozen, or the pass has no gradients */
    const void *source[DTRAIN_OP_INPUTS];   /* where inputs[i] was when the node was made; autocast
                                               rounds it to input_data[i] where the two differ */
    int64_t unit;                           /* -1: before the first mark */
    uint32_t mark;                          /* how many marks came before it */
    bool remote;                            /* another stage computes it */
    bool dropped;                           /* its results are in the segment's region */
    bool saves;                             /* it has saved memory, which backward reads */
    bool halved;                            /* its parameters' gradients are still to be made */
    bool reached;                           /* the gradient of this backward's loss reaches it */
} dtrain_node;

/* A tensor and what only the tape knows of it: every dtrain_tensor is the first member of one. */
typedef struct dtrain__tape_tensor {
    dtrain_tensor tensor;
    dtrain__chunk *gradient;              /* tensor.grad's memory; NULL: none, or a value's */
    dtrain__chunk *earlier;               /* from before, to be added to `gradient` */
    dtrain__share part;                   /* of a row (COLUMNS) or of the rows (ROWS), as if that
                                             were an axis of a parameter, which is cut by rows */
    dtrain__samples samples;              /* of I32 inputs the entries that are not -1; of losses
                                             the samples that they are a mean over */
    float valid[2];                       /* samples.valid of an I32 input of this pass */
    struct dtrain__tape_segment *segment; /* in whose region it was made; NULL: in the data arena */
    bool kept;                            /* tensor.data is a copy in the data arena */
    bool remote;                          /* another stage has its values */
    int32_t stage;                        /* that makes it, and the last one that reads it; */
    int32_t last_stage;                   /* of an input both are -1 */
    struct dtrain__tape_tensor *next;     /* made before it, of the list it is on (stage.c) */
    bool wanted;                          /* by the operations of its segment that run again */
    bool read_here;                       /* in a survey: a stage of this rank reads it */
} dtrain__tape_tensor;

/* The operations between two marks in a unit that drops results. */
typedef struct dtrain__tape_segment {
    int64_t unit;
    dtrain__bump *region;
    dtrain_node *dropped;                         /* the last one first */
    const struct dtrain__tape_segment *successor; /* overwrote the results first; NULL: intact */
} dtrain__tape_segment;

/* A weight rounded to the type of autocast, at its first use in a pass. A weight that is gathered
 * with its unit has a copy only while it is gathered: the copy is made at the first use after a
 * mark, in the memory of the copies of the unit before, and made again when backward comes to that
 * mark. The key is the parameter and not its address, where several weights may be in turn. */
typedef struct dtrain__cast {
    struct dtrain__cast *next;
    const dtrain_param *storage;
    int64_t count;
    void *low;
    uint32_t mark; /* of one that lasts only while its unit is gathered, or */
#define DTRAIN__CAST_LASTS UINT32_MAX
} dtrain__cast;

/* ---- Inputs on their way to a device ----------------------------------------------------------*/

#define DTRAIN__FEED_ITEMS 16
#define DTRAIN__VALID_BYTES (2 * sizeof(float)) /* of dtrain__samples.valid */

/* Each input of a replayed step has page-locked memory, which the next step can fill while no model
 * code runs. Behind an I32 input, there and on the device, are dtrain__samples.valid: they change
 * from step to step, and a recorded loss reads them there. */
typedef struct dtrain__feed_item {
    const void *host; /* the caller's buffer */
    void *pinned;     /* (room + DTRAIN__VALID_BYTES) */
    size_t bytes, room;
    dtrain_dtype dtype;
} dtrain__feed_item;

typedef struct dtrain__feed {
    dtrain__feed_item items[DTRAIN__FEED_ITEMS];
    size_t count, next; /* inputs known; number of the pass's next input */
    bool fixed;  /* a loss adds two means: the targets that are not ignored keep their number */
    bool filled; /* `pinned` already holds this pass's data */
} dtrain__feed;

/* ---- A pass ----------------------------------------------------------------------------------*/

/* dtrain_tape_begin sets all of it to zero. */
typedef struct dtrain__pass {
    uint32_t state, flags;
    uint64_t seed, dropout_count;
    dtrain_dtype cast;  /* the type of autocast; F32 without */
    uint32_t cast_mark; /* the mark whose passing casts are in memory */
    dtrain_node *last;
    size_t node_count, tensor_count, recomputed_count;
    uint32_t mark_count, segment_count;
    dtrain__tape_segment *segment; /* the segment being recorded; NULL: none */
    bool halves;   /* its backward makes gradients of inputs now, of parameters later */
    uint32_t sums; /* of means over different samples, so far */
    bool more; /* another micro-batch adds to its gradients: none is ready after this backward */
} dtrain__pass;

/* A pass under way, of which a pipeline has several. `pass` is in the tape while it is selected. */
typedef struct dtrain__pass_slot {
    dtrain__pass pass;
    dtrain__bump arenas[DTRAIN__PASS_ARENAS];
    int32_t stage;                   /* this and what follows: see stage.c */
    struct dtrain__pass_slot *batch; /* the slot with the inputs of this micro-batch */
    void **received;                 /* (crossing_count) addresses of the pass's inbox, or NULL */
    dtrain__tape_tensor *listed;     /* inputs, and in a survey all tensors; the latest first */
    struct dtrain__crossed *crossed; /* (crossing_count) */
    size_t next_crossing, input_count;
} dtrain__pass_slot;

/* ---- Costs ------------------------------------------------------------------------------------*/

/* Where a plan adds up what units cost: see costs.c. */
typedef struct dtrain__unit_costs {
    const int32_t *units; /* (2 * count) a unit and its stage, as in dtrain__stage_map */
    size_t count;
    double flops_per_byte;        /* that the device does while it moves a byte */
    dtrain_pipeline_costs *costs; /* (count) */
    uint64_t *kept;               /* (count) bytes that a pass keeps for its backward; or NULL */
} dtrain__unit_costs;

/* ---- The tape ---------------------------------------------------------------------------------*/

enum { DTRAIN__TAPE_IDLE, DTRAIN__TAPE_FORWARD, DTRAIN__TAPE_DONE };

struct dtrain_tape {
    dtrain_world *world;                 /* for the spans of passes; NULL: no world, or a plan */
    dtrain_strategy *strategy;           /* NULL: none, or a plan */
    const struct dtrain__layout *layout; /* the strategy's, or the planned one; NULL: no strategy */
    dtrain__groups groups;               /* the same; the tensor axis is of one rank without */
    dtrain_device *device;
    dtrain_allocator allocator;
    uint64_t unit_begin_ns, unit_end_ns; /* for a trace: of the unit, of its last operation */
    double flops;                        /* see dtrain_tape_info */
    const dtrain__unit_costs *costs;     /* of a plan that counts them; or NULL */
    dtrain__bump *all_arenas;            /* of the tape, its slots and its stages */
    dtrain__bump arenas[DTRAIN__TAPE_ARENAS];
    dtrain__pass_slot *slots, *slot; /* (slot_count); the selected one */
    uint32_t slot_count;
    dtrain__pass pass;                       /* of the selected slot */
    dtrain__cast *casts;                     /* rounded weights, latest first */
    struct dtrain__stages *stages;           /* NULL: this rank has the whole model */
    int64_t unit;                            /* the gathered unit; -1: none */
    dtrain_pass unit_pass;                   /* the pass that it is gathered for */
    uint32_t recompute_every, recompute_ops; /* see dtrain_tape_recompute */
    const dtrain_step_scalars *scalars;      /* where a replayed step has its seed; or NULL */
    dtrain__feed *feed;                      /* inputs of a replayed step, or NULL: */
    dtrain__feed inputs;                     /* of all other passes, whose shapes may change */
    dtrain_event *uploaded;                  /* after their last upload */
    bool hashes; /* other ranks hold parts of the same model, and must have the same inputs */
    uint64_t inputs_hash; /* of all inputs since a trainer has compared it */
    dtrain_result error;  /* the first error of this pass, and its sentence */
    char error_text[DTRAIN__ERROR_BYTES];
};

/* tape/tape.c */
/* Let a tape of the plan device count for a strategy of this layout and these groups. It has no
 * communicator, so that nothing is sent. */
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
/* Refuse a call of an operation, and list what it was given: shape and type of the inputs, shapes
 * of the parameters and, over a tensor axis, which part of each is on this rank. */
DTRAIN__PRINTF(2, 3)
DTRAIN__PRIVATE dtrain_result dtrain__refuse(const dtrain_op *op, const char *format, ...);
DTRAIN__PRIVATE const char *dtrain__param_name(const dtrain_param *p);
/* Return the part that this rank has of a tensor which is not whole. */
DTRAIN__PRIVATE const dtrain__share *dtrain__tensor_share(const dtrain_tensor *x);
/* Say how an output lies, and which part of it this rank has. */
DTRAIN__PRIVATE void dtrain__place_as(dtrain_tensor *y, uint32_t placement,
                                      const dtrain__share *part);
/* Describe the part of parameter i that this rank has; its axis is -1 where it is not cut. */
DTRAIN__PRIVATE dtrain__share dtrain__param_share(const dtrain_op *op, uint32_t i);
/* Refuse gradients of whole parameters over some of the rows, unless a strategy adds them up. */
DTRAIN__PRIVATE dtrain_result dtrain__check_partial(const dtrain_op *op);
/* Find how the rows of an output lie that no weight divides: whole, or under sequence parallelism
 * cut (in prepare). */
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

/* tape/costs.c: add what a call of forward or backward took, of which `flops` in products; count
 * memory that a node keeps */
DTRAIN__PRIVATE void dtrain__cost_add(const dtrain_node *node, double flops);
DTRAIN__PRIVATE void dtrain__cost_keep(const dtrain_node *node, int64_t count, uint32_t dtype);

/* tape/place.c: moves of device memory over the tensor axis, rows of n elements. Rank r of t has
 * rows n r / t to n (r + 1) / t of what is cut by rows. Each is collective, and does nothing in a
 * plan. With `work` it returns at once and leaves *work to dtrain_work_wait, if the strategy wants
 * overlap; otherwise later work on the device comes after it. Sums are added up in fp32 in the
 * order of the ranks and rounded once. */
/* Return which part of `length` rows or columns a rank has by a cut; NULL: an even one. */
DTRAIN__PRIVATE dtrain__share dtrain__cut_part(const dtrain_op *op, const dtrain_cut *cut,
                                               int64_t length, int rank);
/* Return this rank's part of a row of `width` columns, one component of those that x has. */
DTRAIN__PRIVATE dtrain__share dtrain__component_of(const dtrain_op *op, const dtrain_tensor *x,
                                                   int64_t width);
/* Add values (count) up over the axis, in place. */
DTRAIN__PRIVATE dtrain_result dtrain__sum_values(const dtrain_op *op, void *values, int64_t count,
                                                 uint32_t dtype, dtrain_work **work);
/* Put the parts of all ranks together: whole (rows, n), its rows cut by `cut`; NULL: evenly. */
DTRAIN__PRIVATE dtrain_result dtrain__gather_rows(const dtrain_op *op, const dtrain_cut *cut,
                                                  const void *part, void *whole, int64_t rows,
                                                  int64_t n, uint32_t dtype, dtrain_work **work);
/* Add whole (rows, n) up over the axis, and keep this rank's rows in part, which may be the place
 * of those rows in whole. */
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

/* Placements of a built-in operation on single elements; and of one that checks its inputs and
 * places its outputs itself. */
#define DTRAIN__OP_TAKES_ALL (DTRAIN_OP_TAKES_COLUMNS | DTRAIN_OP_TAKES_ROWS)
#define DTRAIN__OP_PLACES 4u
/* In `reads` of a built-in operation: its forward touches no memory itself, so that a plan can run
 * it, and count its products and the memory that it borrows. */
#define DTRAIN__OP_COUNTS (1u << 31)
/* In `reads`, or added to a call's by its prepare: of a backward in halves the first one makes the
 * gradient of parameter i as well. */
#define DTRAIN__OP_FIRST_HALF(i) (1u << (8 + (i)))

/* The descriptor dtrain__<op>_op of a built-in operation, made of dtrain__<functions>_prepare,
 * _forward and _backward. The macro names the fields: C++17 has no designators. Ends with its last
 * use, in elementwise.c. */
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
/* Give zeros to a tensor that no operation has contributed a gradient to. */
DTRAIN__PRIVATE dtrain_result dtrain__gradient_zeros(dtrain_tape *tape, dtrain_tensor *x);
/* Run the backward of a pass from its loss or, without one, from gradients that are there; the
 * nodes that made their tensors are marked as reached. */
DTRAIN__PRIVATE dtrain_result dtrain__backward_pass(dtrain_tape *tape, dtrain_tensor *loss,
                                                    float scale);
/* Make what a backward in halves has left: gradients of parameters. */
DTRAIN__PRIVATE dtrain_result dtrain__backward_params(dtrain_tape *tape);
DTRAIN__PRIVATE dtrain_result dtrain__gradient_pass(dtrain_op *op, uint32_t output, uint32_t input);

/* tape/recompute.c */
DTRAIN__PRIVATE void dtrain__segment_begin(dtrain_tape *tape);
DTRAIN__PRIVATE dtrain_result dtrain__segment_again(dtrain_tape *tape, const dtrain_node *node);
DTRAIN__PRIVATE dtrain_result dtrain__check_intact(const dtrain_tensor *x, const char *call);
DTRAIN__PRIVATE dtrain_result dtrain__tensor_keep(dtrain_tape *tape, dtrain_tensor *x,
                                                  const char *call);

/* tape/stage.c: what the tape asks it, and what a pipeline calls */
#define DTRAIN__REMOTE 64 /* address of data that this rank does not have: aligned, never read */
DTRAIN__PRIVATE bool dtrain__stage_is_remote(const dtrain_tape *tape);
DTRAIN__PRIVATE bool dtrain__is_surveying(const dtrain_tape *tape);
DTRAIN__PRIVATE void dtrain__stage_made(dtrain_tape *tape, dtrain__tape_tensor *made,
                                        const dtrain_node *node);
/* Say whether a stage of this rank reads an input, or an earlier pass has its memory. */
DTRAIN__PRIVATE dtrain_result dtrain__stage_input(dtrain_tape *tape, dtrain__tape_tensor *made,
                                                  bool *shared);

/* tape/arena.c */
/* Make slots for passes in place of the earlier ones. */
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
/* Borrow memory for `count` values of the gradient pool, where every layer finds the same (NULL:
 * the error sticks), and give it back: kernels that are queued still use it, later ones follow. */
DTRAIN__PRIVATE dtrain__chunk *dtrain__scratch_take(dtrain_tape *tape, int64_t count,
                                                    uint32_t dtype);
DTRAIN__PRIVATE void dtrain__scratch_give(dtrain__chunk *chunk);
