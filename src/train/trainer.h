/* Trainer
 *
 * A trainer is the glue of a training loop; everything in it can be called directly instead. One
 * step is
 *
 *     for each micro-batch: dtrain_strategy_accumulate(is another to come?) -> next_batch
 *                           -> loss, on the tape -> dtrain_tape_backward -> dtrain_strategy_finish
 *     unscale and clip -> dtrain_optimizer_step at the schedule's rate -> an all-gather of some
 *     twenty numbers per rank, from which every rank makes the same record
 *
 * With a strategy on a mesh the record is of all ranks of the mesh, and so is every decision that
 * follows from it. Samples and tokens are counted over the data axis. The ranks of one replica
 * must have the same samples (dtrain_loader_desc.mesh does that), and they draw the same dropout
 * masks. The all-gather of the record compares a hash of all inputs (about one millisecond per
 * megabyte): ranks of one replica with different samples are an error on all ranks.
 *
 * With a pipeline axis the micro-batches of a step run in the order of the strategy's schedule
 * (parallel/pipeline.h), and its gradients have the bits of one micro-batch after the other. The
 * ranks of the axis read the same samples, too (where the data of one ends earlier the step fails,
 * on some schedules by the deadline), and each
 *
 *     calls next_batch once a micro-batch, which is required; an error of it fails the step on all
 *     calls loss for each of its stages and micro-batches, and once before each step, to see what
 *         crosses stages: the same operations each time, the same shapes in all micro-batches of
 *         one step, no values read, no counting of calls;
 *         with several stages a rank, later micro-batches may have been fetched meanwhile: inputs
 *         are those of the pass's own one, what else next_batch has left is not
 *
 * graph, requires_grad inputs and passes of a program's own on the trainer's tape are refused. */

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

/* Fill the host's own buffers with the next micro-batch. DTRAIN_ERROR_END: this rank's data has
 * ended. It takes part in the steps of the others without samples (dtrain_strategy_join) until
 * record.ended says that the data of all has; it is not called before. Not with graph. */
typedef dtrain_result (*dtrain_batch_fn)(void *user);
/* Build the loss (one element, mean over the micro-batch) of what next_batch fetched. Which
 * operations it calls must not depend on values: memory is planned by running it on the plan
 * device, where nothing is computed. */
typedef dtrain_tensor *(*dtrain_loss_fn)(dtrain_tape *tape, void *user);

/* Choose what a step without loss scaling does when gradients of some rank are not finite. */
typedef enum dtrain_nonfinite {
    DTRAIN_NONFINITE_STOP = 0, /* DTRAIN_ERROR_NUMERIC; a program may load a checkpoint and go on */
    DTRAIN_NONFINITE_SKIP = 1  /* all ranks skip it, with a warning for the first in a row; the 11th
                                  in a row is an error. Refused with compression, whose residuals
                                  would keep a NaN */
} dtrain_nonfinite;

typedef struct dtrain_trainer_desc {
    uint32_t micro_batches; /* per step; 0 = 1 */
    uint32_t tokens;        /* (or samples) per micro-batch and rank, for throughput figures */
    float clip;             /* global gradient norm; 0 = off */
    uint32_t tape_flags;    /* DTRAIN_TAPE_BF16, DTRAIN_TAPE_F16, or 0 */
    uint32_t recompute_every, recompute_ops; /* of dtrain_tape_recompute; 0 = off */
    /* All zero: loss scaling with DTRAIN_TAPE_F16 alone. Any field asks for it with other flags; a
     * scale of 0 begins with 65536. */
    dtrain_loss_scaler loss_scaling;
    bool graph;    /* GPU: record the step once and replay it, without launch costs; see create */
    uint64_t seed; /* of dropout, the same on all ranks: their masks differ nevertheless */
    uint32_t nonfinite;    /* dtrain_nonfinite; 0 = stop */
    uint32_t verify_every; /* steps between two calls of dtrain_strategy_verify, which reads every
                              parameter: replicas that drift apart (a flipped bit, another library)
                              are an error that names rank and parameter. 0 = never */
    dtrain_schedule schedule; /* its lr is required with an optimizer */
    dtrain_strategy *strategy;
    dtrain_optimizer *optimizer;
    dtrain_batch_fn next_batch; /* NULL: loss fetches its batch; then memory cannot be planned */
    dtrain_loss_fn loss;
    void *user;
    const dtrain_mesh *mesh; /* dtrain_trainer_plan: where there is no strategy yet; NULL = none */
} dtrain_trainer_desc;

/* A figure of a step. */
typedef struct dtrain_figure {
    const char
        *name; /* "time/step_ms": a group, a slash, the key in JSON; monitor/metrics.h has the
                         list. Lower-case letters, digits and '_' */
    const char *unit; /* "ms", "bytes", "tokens", "steps" or "rank"; "" = none */
    double value;
    const float *ranks; /* (record.ranks) value of each rank in this unit, NaN where unknown; NULL =
                           none. Valid until the trainer's next step */
} dtrain_figure;

#define DTRAIN_RECORD_FIGURES 96 /* at most; the library makes up to 72 */

/* One step, the same on every rank except for bytes sent. */
typedef struct dtrain_step_record {
    int64_t step;    /* from 1: number of steps done, with this one */
    double loss;     /* mean over the samples of all micro-batches and ranks; 0 without any. With
                         DTRAIN_AVERAGE_MEANS over micro-batches and ranks, each counting alike */
    double val_loss; /* NaN unless the host evaluated and set it */
    double val_accuracy; /* share of right answers, 0 to 1; likewise */
    double grad_norm;    /* before clipping */
    double lr;
    double loss_scale;      /* of this step's backward; 0: no loss scaling */
    uint64_t tokens;        /* of all ranks since the start, after this step */
    uint64_t skipped_steps; /* since the start, this one included: gradients were not finite */
    int ranks;              /* number of ranks that the figures come from; 0: no figures */
    bool ended; /* the data of all ranks had ended: this was no step, and it is not counted */
    bool
        stop_requested; /* a signal has reached some rank (desc.catch_signals of dtrain_launch): all
                            ranks see it in the same step, and end after it together */
    uint32_t figure_count;
    dtrain_figure figures[DTRAIN_RECORD_FIGURES]; /* (figure_count) everything else */
} dtrain_step_record;

/* Return the value of a figure by its key, "step_ms"; NaN if the record has none. */
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
 * Name and unit stay valid as long as the metrics. A name without a group is in "added". A record
 * without room is DTRAIN_ERROR_ARGUMENT. */
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

/* Create a trainer for a strategy and an optimizer, both of which must outlive it. An optimizer of
 * NULL makes a trainer that only evaluates.
 *
 * With desc->graph the third step is recorded and later ones are replayed: the same kernels on the
 * same addresses, so loss is not called again. What it reads must come in through
 * dtrain_tape_input from buffers that stay where they are (next_batch fills them); what else it
 * does on the host happens once. The bits are those of a run without graph. Needs a device that can
 * record, next_batch, and collectives that work on its streams (one rank, or dtrain_nccl.h). Loss
 * scaling and compression are refused with it, and those two with each other: bf16 needs no
 * scale. */
DTRAIN_API dtrain_result dtrain_trainer_create(dtrain_world *world, const dtrain_trainer_desc *desc,
                                               dtrain_trainer **out);
/* Free a trainer and its tape; NULL is ignored. */
DTRAIN_API void dtrain_trainer_destroy(dtrain_trainer *trainer);
/* Take one step. Collective; record may be NULL. In the first step ranks compare all settings of
 * their trainers and optimizers but `tokens`, in each step the flags of parameters: a difference
 * is DTRAIN_ERROR_MISMATCH naming the setting, values and rank. A rank more than twice slower than
 * the (lower) median for ten steps running is named once in a warning. A gradient norm or loss
 * that is not finite is DTRAIN_ERROR_NUMERIC on all ranks, naming step and rank; no parameter has
 * changed if it was the gradient. With loss scaling such a gradient is no error: the step is
 * skipped on all ranks, parameters and optimizer state stay, and the scale falls until
 * dtrain_loss_scaler_update gives up.
 *
 * An error of next_batch comes back as it is, and the step can be repeated (not with a pipeline):
 * it goes on with the micro-batch that could not be read, while the other ranks wait. An error of
 * loss, of the tape or of a kernel on one rank is one on all, and stands. */
DTRAIN_API dtrain_result dtrain_trainer_step(dtrain_trainer *trainer, dtrain_step_record *record);
#define DTRAIN_UNTIL_END (-1) /* dtrain_trainer_evaluate: until next_batch has ended on all ranks */

/* Evaluate the mean loss without gradients over the samples of `batches` calls of next_batch on
 * every rank, or DTRAIN_UNTIL_END; a rank that ends earlier (DTRAIN_ERROR_END) has fewer.
 * Collective. Batches may differ in size: samples count one each, in double, whatever the strategy
 * averages over. With a loader that ends (dtrain_loader_desc.sample_limit) each counts once for any
 * number of ranks. next_batch and user may differ from training's; the loss function gets this
 * user. next_batch NULL: the loss fetches its batch; not with a pipeline.
 *
 * After a signal (desc.catch_signals of dtrain_launch) to any rank all end after the batch under
 * way, with a loss of NaN. An error on one rank is one on all, and stands. */
DTRAIN_API dtrain_result dtrain_trainer_evaluate(dtrain_trainer *trainer,
                                                 dtrain_batch_fn next_batch, void *user,
                                                 int64_t batches, double *loss);
/* Run a forward pass of the host's own between two steps, without gradients, and read what it makes
 * (count floats): to generate, or to measure. `forward` is called as loss is, with this user, with
 * the units that loss has. Collective with a pipeline, whose last stage makes the tensor, and then
 * all of its ranks get the values: all come with the same inputs, forward is called once to find
 * what crosses and once for each stage of the rank, and what changes from call to call (a cache's
 * length) is changed behind the pass. Shapes may differ from those of other passes. Without a
 * pipeline as collective as passes on the trainer's tape are. */
DTRAIN_API dtrain_result dtrain_trainer_forward(dtrain_trainer *trainer, dtrain_loss_fn forward,
                                                void *user, float *values, int64_t count);
/* Return the trainer's tape, for passes of the host's own between two steps; with a pipeline it can
 * only be queried, and dtrain_trainer_forward runs them. */
DTRAIN_API dtrain_tape *dtrain_trainer_tape(dtrain_trainer *trainer);

/* A search for the largest micro-batch whose step fits. */
typedef struct dtrain_batch_search {
    uint32_t max_batch; /* 0 = 65536 */
    /* Called with the desc's user and a batch: from here on the loss builds micro-batches of so
     * many samples, with buffers of that size. */
    dtrain_result (*set_batch)(void *user, uint32_t batch);
    dtrain_param *params;
    size_t param_count;
    const dtrain_strategy_desc *strategy; /* that create will be given; NULL = defaults */
    uint32_t batch;                       /* found, the same on every rank */
} dtrain_batch_search;

/* Predict a step's memory, by running desc->loss forwards and backwards on the plan device, where
 * kernels do nothing. Without desc->strategy that is the memory of activations alone, and only
 * loss, user and the fields of the tape are read: it can be asked before there is a strategy, whose
 * desc wants it as other_bytes; autocast's copies of weights all count then. With a strategy, which
 * may gather units and have the copies of one at a time, what it and desc->optimizer hold is
 * counted too, and workspace is what the process held before the model came. The loss reads its
 * inputs, so their buffers must be there; what is in them does not matter. Under autocast,
 * parameters need their count or shape. Local with a search of NULL; needs a next_batch, which is
 * not called.
 *
 * With a search, to be made before anything of the model is allocated, find the largest batch with
 *
 *     dtrain_strategy_plan + dtrain_trainer_plan(batch) <= memory_limit - other_bytes
 *
 * with those two of the strategy's desc, as AUTO reads them, and autocast's copies as its kind has
 * them. For AUTO itself the kind that needs least counts, with all copies, and
 * dtrain_strategy_create then takes the first that leaves room for the batch. The prediction is
 * tried: every rank allocates and touches that much at the same time, and where one cannot, all try
 * an eighth less. Leaves set_batch called with search->batch, whose memory is predicted.
 * Collective. When not even one sample fits, DTRAIN_ERROR_MEMORY says how much is missing. */
DTRAIN_API dtrain_result dtrain_trainer_plan(dtrain_world *world, const dtrain_trainer_desc *desc,
                                             dtrain_batch_search *search, dtrain_memory *memory);

/* Count what each unit of a model costs, to divide units among stages, by running desc->loss on the
 * plan device, forwards and backwards in halves: as for a plan without a strategy, before there is
 * one. A pass takes its floating-point operations or, where that is more, its bytes times the
 * operations that the world's device does while it moves one; what the operations of a unit take
 * is added up, those behind the last mark (classifier, loss) with the last unit. Costs are in the
 * order of the units' first parameters; costs[param_count] has room for all of them, and
 * *unit_count says how many there are. activations[param_count], or NULL: bytes that a micro-batch
 * keeps in each unit. The whole model is counted, whatever mesh desc has, so that every rank finds
 * the same if its batch has the same shape. Local. */
DTRAIN_API dtrain_result dtrain_trainer_unit_costs(dtrain_world *world,
                                                   const dtrain_trainer_desc *desc,
                                                   const dtrain_param *params, size_t param_count,
                                                   dtrain_pipeline_costs *costs,
                                                   uint64_t *activations, size_t *unit_count);
