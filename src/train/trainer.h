/* Trainer
 *
 * A trainer is the glue of a training loop. A program can call every part of it directly. One step
 * is
 *
 *     for each micro-batch: dtrain_strategy_accumulate(does another follow?) -> next_batch
 *                           -> loss, on the tape -> dtrain_tape_backward -> dtrain_strategy_finish
 *     unscale and clip -> dtrain_optimizer_step at the schedule's rate -> an all-gather of about
 *     forty numbers per rank, from which every rank makes the same record
 *
 * With a strategy on a mesh the record covers all ranks of the mesh, and they decide alike. The
 * data axis counts samples and tokens. The ranks of one replica must have the same samples
 * (dtrain_loader_desc.mesh does that), and they draw the same dropout masks. The all-gather of the
 * record compares a hash of all inputs (about one millisecond per megabyte): different samples in
 * one replica are an error on all ranks.
 *
 * With a pipeline axis the strategy's schedule orders the micro-batches of a step
 * (parallel/pipeline.h). Gradients have the bits of one micro-batch after another. The ranks of the
 * axis read the same samples. If the data of one ends earlier, the step fails, with some schedules
 * at the deadline. Each rank
 *
 *     calls next_batch, which is required, once per micro-batch; its error fails the step on all
 *     calls loss for each of its stages and micro-batches, and once before each step, to find what
 *         crosses stages: the same operations each time, the same shapes in all micro-batches of
 *         one step, no values read, no counting of calls;
 *         with several stages per rank, next_batch may already have been called for later
 *         micro-batches: rely on the inputs given, not on your own variables
 *
 * A pipeline refuses graph, requires_grad inputs and the program's own passes on the trainer's
 * tape. */

#pragma once

#include "core/api.h"
#include "core/result.h"
#include "world/world.h"
#include "comm/comm.h"
#include "strategy/memory.h"
#include "strategy/params.h"
#include "strategy/strategy.h"
#include "tape/tape.h"
#include "optim/optimizer.h"
#include "optim/scaler.h"
#include "parallel/mesh.h"
#include "parallel/pipeline.h"

#include <string.h>

typedef struct dtrain_trainer dtrain_trainer;

/* Fill the program's buffers with the next micro-batch. Return DTRAIN_ERROR_END when this rank's
 * data has ended: the rank then joins the steps of other ranks without samples
 * (dtrain_strategy_join), and the trainer calls next_batch again after record.ended. Not with
 * graph. */
typedef dtrain_result (*dtrain_batch_fn)(void *user);
/* Build the loss (one element, mean over the micro-batch) of the fetched micro-batch. The
 * operations must not depend on values: a plan of memory runs loss on the plan device, which
 * computes nothing. */
typedef dtrain_tensor *(*dtrain_loss_fn)(dtrain_tape *tape, void *user);

/* The reaction of a step without loss scaling to gradients that are not finite on some rank. */
typedef enum dtrain_nonfinite {
    DTRAIN_NONFINITE_STOP = 0, /* DTRAIN_ERROR_NUMERIC; load a checkpoint to continue */
    DTRAIN_NONFINITE_SKIP = 1  /* all ranks skip the step. The first in a row is a warning, the 11th
                                  an error. Refused with compression, whose residuals would keep a
                                  NaN */
} dtrain_nonfinite;

typedef struct dtrain_trainer_desc {
    uint32_t micro_batches; /* per step; 0 = 1 */
    uint32_t tokens;        /* tokens (or samples) per micro-batch and rank, for throughput */
    float clip;             /* largest global gradient norm; 0 = off */
    uint32_t tape_flags;    /* DTRAIN_TAPE_BF16, DTRAIN_TAPE_F16, or 0 */
    uint32_t recompute_every, recompute_ops; /* arguments of dtrain_tape_recompute; 0 = off */
    /* All zero: loss scaling only with DTRAIN_TAPE_F16. Any other value: loss scaling. A scale of 0
     * begins with 65536. */
    dtrain_loss_scaler loss_scaling;
    bool graph;    /* GPU: record the step once and replay it without launch costs; see create */
    uint64_t seed; /* seed of dropout, the same on all ranks, whose masks differ nevertheless */
    uint32_t nonfinite;    /* dtrain_nonfinite; 0 = stop */
    uint32_t verify_every; /* steps between two calls of dtrain_strategy_verify, which reads every
                              parameter and names rank and parameter of a replica that has drifted
                              (a flipped bit, another library). 0 = never */
    dtrain_schedule schedule; /* lr is required with an optimizer */
    dtrain_strategy *strategy;
    dtrain_optimizer *optimizer;
    dtrain_batch_fn next_batch; /* NULL: loss fetches its batch, and memory cannot be planned */
    dtrain_loss_fn loss;
    void *user;
    const dtrain_mesh *mesh; /* mesh of dtrain_trainer_plan without a strategy; NULL = none */
} dtrain_trainer_desc;

/* A figure of a step. */
typedef struct dtrain_figure {
    const char *name; /* "time/step_ms", a group and the key in JSON; list in monitor/metrics.h */
    const char *unit; /* "ms", "bytes", "tokens", "steps" or "rank"; "" = none */
    double value;
    const float *ranks; /* (record.ranks) value of each rank in this unit, NaN where unknown, valid
                           until the trainer's next step; NULL = none */
} dtrain_figure;

#define DTRAIN_RECORD_FIGURES 96 /* at most; the library makes up to 70 */

/* One step, the same on every rank except for bytes sent. */
typedef struct dtrain_step_record {
    int64_t step;    /* number of steps done, with this one */
    double loss;     /* mean over the samples of all micro-batches and ranks; 0 without samples */
    double val_loss; /* NaN unless the program has evaluated and set it */
    double val_accuracy; /* share of right answers, 0 to 1, NaN likewise */
    double grad_norm;    /* before clipping */
    double lr;
    double loss_scale;      /* loss scale of this step's backward; 0: no loss scaling */
    uint64_t tokens;        /* tokens of all ranks since the start, after this step */
    uint64_t skipped_steps; /* steps since the start whose gradients were not finite */
    int ranks;              /* number of ranks that the figures come from; 0: no figures */
    bool ended;             /* the data of all ranks had ended: this step is not counted */
    bool
        stop_requested; /* a signal has reached some rank (desc.catch_signals of dtrain_launch): all
                            ranks see it in the same step, and end after it together */
    uint32_t figure_count;
    dtrain_figure figures[DTRAIN_RECORD_FIGURES]; /* (figure_count) all other numbers */
} dtrain_step_record;

/* Return the value of the figure with a key, "step_ms"; NaN if the record has none. */
static inline double dtrain_record_value(const dtrain_step_record *record, const char *key)
{
    const uint64_t nan = UINT64_C(0x7ff8) << 48; /* the bits survive -ffast-math */
    double none;
    for (uint32_t i = 0; i < record->figure_count; i++) {
        const char *slash = strchr(record->figures[i].name, '/');
        if (strcmp(slash ? slash + 1 : record->figures[i].name, key) == 0)
            return record->figures[i].value;
    }
    memcpy(&none, &nan, sizeof none);
    return none;
}

/* Add a figure of the program to a record, for all files of dtrain_metrics:
 *
 *     dtrain_record_add(&record, "perplexity", "", exp(record.loss));
 *
 * Name and unit stay valid as long as the metrics. The name has lower-case letters, digits and '_';
 * one without a group belongs to "added". A full record is DTRAIN_ERROR_ARGUMENT. */
static inline dtrain_result dtrain_record_add(dtrain_step_record *record, const char *name,
                                              const char *unit, double value)
{
    const dtrain_figure figure = {name, unit, value, NULL};
    if (record->figure_count >= DTRAIN_RECORD_FIGURES)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_record_add: the record has no room for %s", name);
    record->figures[record->figure_count++] = figure;
    return DTRAIN_OK;
}

/* Create a trainer for a strategy and an optimizer, which must outlive it. A trainer with an
 * optimizer of NULL only evaluates.
 *
 * desc->graph records the third step and replays it in later ones: the same kernels on the same
 * addresses, without calling loss. Its inputs must come through dtrain_tape_input from buffers that
 * keep their address (next_batch fills them); its other work on the host happens once. The bits
 * equal the bits of a run without graph. graph needs a device that can record, next_batch, and
 * collectives that work on the device's streams (one rank, or dtrain_nccl.h). It refuses loss
 * scaling and compression, and these two refuse each other: bf16 needs no scale. */
DTRAIN_API dtrain_result dtrain_trainer_create(dtrain_world *world, const dtrain_trainer_desc *desc,
                                               dtrain_trainer **out);
/* Free a trainer and its tape; NULL is ignored. */
DTRAIN_API void dtrain_trainer_destroy(dtrain_trainer *trainer);
/* Take one step. Collective; record can be NULL. The first step compares all settings of trainers
 * and optimizers but `tokens`, each step the flags of parameters: a difference between ranks is
 * DTRAIN_ERROR_MISMATCH, which names setting, values and rank. A warning names once each rank that
 * has been more than twice slower than the (lower) median for ten steps in a row. A gradient norm
 * or loss that is not finite is DTRAIN_ERROR_NUMERIC on all ranks, which names step and rank; if it
 * is the gradient, no parameter has changed. With loss scaling all ranks skip such a step:
 * parameters and optimizer state stay, and the scale falls until dtrain_loss_scaler_update fails.
 *
 * An error of next_batch is returned, and the step can be repeated (not with a pipeline): it
 * continues with the micro-batch that could not be read, while other ranks wait. An error of loss,
 * of the tape or of a kernel on one rank fails all ranks for good. */
DTRAIN_API dtrain_result dtrain_trainer_step(dtrain_trainer *trainer, dtrain_step_record *record);
#define DTRAIN_UNTIL_END (-1) /* dtrain_trainer_evaluate: until the data of all ranks has ended */

/* Evaluate the mean loss without gradients over the samples of `batches` calls of next_batch on
 * every rank, or DTRAIN_UNTIL_END; a rank whose data ends earlier (DTRAIN_ERROR_END) has fewer.
 * Collective. Batches can differ in size: every sample counts one, in double, whatever the strategy
 * averages over. With a loader that ends (dtrain_loader_desc.sample_limit) every sample counts once
 * for any number of ranks. next_batch and user can differ from training's; the loss function gets
 * this user. next_batch NULL: the loss fetches its batch; not with a pipeline.
 *
 * After a signal to any rank (desc.catch_signals of dtrain_launch) all ranks end with the current
 * batch, and the loss is NaN. An error on one rank fails all ranks for good. */
DTRAIN_API dtrain_result dtrain_trainer_evaluate(dtrain_trainer *trainer,
                                                 dtrain_batch_fn next_batch, void *user,
                                                 int64_t batches, double *loss);
/* Run a forward pass of the program between two steps, without gradients, and read the tensor that
 * it makes (count floats): to generate, or to measure. The trainer calls `forward` like loss, with
 * this user; it marks the units that loss marks. Shapes can differ from other passes.
 * Without a pipeline this is as collective as passes on the trainer's tape. With a pipeline it is
 * collective: all ranks come with the same inputs, the last stage makes the tensor, and all ranks
 * get the values. The trainer calls forward once to find what crosses stages, and once for each
 * stage of the rank: change state (a cache's length) after the pass, not in it. */
DTRAIN_API dtrain_result dtrain_trainer_forward(dtrain_trainer *trainer, dtrain_loss_fn forward,
                                                void *user, float *values, int64_t count);
/* Return the trainer's tape, for passes of the program between two steps. With a pipeline the tape
 * can only be queried, and dtrain_trainer_forward runs such passes. */
DTRAIN_API dtrain_tape *dtrain_trainer_tape(dtrain_trainer *trainer);

/* A search for the largest micro-batch whose step fits. */
typedef struct dtrain_batch_search {
    uint32_t max_batch; /* 0 = 65536 */
    /* Called with the desc's user and a batch: loss must then build micro-batches of that many
     * samples, in buffers of that size. */
    dtrain_result (*set_batch)(void *user, uint32_t batch);
    dtrain_param *params;
    size_t param_count;
    const dtrain_strategy_desc *strategy; /* desc of the strategy to create; NULL = defaults */
    uint32_t batch;                       /* result, the same on every rank */
} dtrain_batch_search;

/* Predict a step's memory by running desc->loss forwards and backwards on the plan device, whose
 * kernels do nothing. The buffers of the loss's inputs must exist; their values do not matter.
 * Under autocast, parameters need their count or shape. The call needs a next_batch, which it does
 * not call. Local with a search of NULL.
 *
 * Without desc->strategy the result is the memory of activations, with autocast's copies of all
 * weights. It reads only loss, user and the fields of the tape: the desc of a strategy wants it as
 * other_bytes. With a strategy, which can gather units and have the copies of one at a time, it
 * counts also what the strategy and desc->optimizer hold; workspace is what the process held before
 * the model.
 *
 * With a search, which must come before any allocation of the model, find the largest batch with
 *
 *     dtrain_strategy_plan + dtrain_trainer_plan(batch) <= memory_limit - other_bytes
 *
 * memory_limit and other_bytes are the strategy desc's, read as AUTO reads them, and autocast's
 * copies are counted for its kind. For AUTO the kind that needs least counts, with all copies, and
 * dtrain_strategy_create then takes the first kind that leaves room for the batch. Every rank tries
 * the prediction: all allocate and touch that much memory at the same time, and where one cannot,
 * all try an eighth less. At the end set_batch has been called with search->batch, whose memory is
 * predicted. Collective. If not even one sample fits, DTRAIN_ERROR_MEMORY says how much is
 * missing. */
DTRAIN_API dtrain_result dtrain_trainer_plan(dtrain_world *world, const dtrain_trainer_desc *desc,
                                             dtrain_batch_search *search, dtrain_memory *memory);

/* Count the cost of each unit of a model, to divide units among stages, by running desc->loss on
 * the plan device, forwards and backwards in halves, like a plan without a strategy. An operation
 * costs its floating-point operations or, where that is more, its bytes times the operations that
 * the world's device does while it moves one byte. A unit costs the sum of its operations;
 * operations after the last mark (classifier, loss) belong to the last unit. Costs are in the order
 * of the units' first parameters; costs[param_count] has room for all units, and *unit_count is
 * their number. activations[param_count], or NULL: bytes that a micro-batch keeps in each unit. The
 * whole model is counted, whatever mesh desc has: every rank finds the same for the same shape of
 * batch. Local. */
DTRAIN_API dtrain_result dtrain_trainer_unit_costs(dtrain_world *world,
                                                   const dtrain_trainer_desc *desc,
                                                   const dtrain_param *params, size_t param_count,
                                                   dtrain_pipeline_costs *costs,
                                                   uint64_t *activations, size_t *unit_count);
