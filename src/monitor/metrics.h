/* Metrics
 *
 * One stream of metrics, several writers. Call dtrain_metrics_step with each record of the trainer,
 * and dtrain_metrics_finish at the end; the desc says who writes: a console, JSON lines,
 * TensorBoard event files, and sinks of the host's own. tools/prometheus.h is such a sink, and
 * tools/nvml.h adds figures of GPUs.
 *
 * A step becomes one list of figures, which all writers walk: the fields of its record, and the
 * figures that the trainer (dtrain_trainer_step) and the program (dtrain_record_add) put into it. A
 * figure's name is TensorBoard's tag, GROUP/KEY; the key is JSON's. TensorBoard opens the first two
 * groups in the order of their names, and the loss has the first. A figure that was not measured is
 * not in the list. One that was measured and is not finite is null in JSON, nan or inf elsewhere.
 * "bytes", "tokens", "steps" and "rank" are whole numbers.
 *
 * The first JSON line says what runs: "start": true, wall_time, dtrain (the version), first_step (0
 * unless desc has one), ranks, nodes, threads, and of desc.trainer, else 0 or "": shard_ranks,
 * replicas, parameters; run (desc.run_name), host, device, strategy and config. A run that appends
 * writes another one: steps after it replace earlier lines of the same step. The keys of a step:
 *
 *     step             from 1
 *     wall_time        seconds since 1970, with milliseconds
 *     loss             mean over micro-batches and ranks
 *     val_loss, val_accuracy         in steps in which the host has set them; 0 to 1
 *     grad_norm, lr
 *     tokens           of all ranks since the start
 *     tokens_per_second
 *     step_ms, data_ms               slowest rank; data: in wait for batches
 *     comm_ms, exposed_comm_ms       an operation was in flight, and of that time ranks waited;
 *                      means over ranks
 *     comm_bytes       that this rank sent, by the ring formula, over all axes of a mesh
 *     loss_scale, skipped_steps      with loss scaling, or where a step was skipped
 *     straggler_score, slowest_rank  of compute time; two ranks or more
 *     forward_ms, backward_ms, hidden_comm_ms, optimizer_ms, checkpoint_ms
 *                      means over ranks; the checkpoint is the one saved before this step
 *     PART_min, PART_mean, PART_max, PART_rank
 *                      over ranks, and the rank that has most; PART = comm_bytes, or step_ms,
 *                      data_ms, exposed_comm_ms and the five above; two ranks or more
 *     tensor_bytes, tensor_exposed_ms, pipeline_bytes, bubble_ms
 *                      the tensor axis's share (where it has several ranks) and the pipeline
 *                      axis's share of comm_bytes and exposed_comm_ms; the data axis has the rest
 *     bus_bytes_per_second           comm_bytes / time in flight: "busbw" of nccl-tests
 *     KIND_bytes       share of comm_bytes, for KIND = all_reduce, reduce_scatter, all_gather,
 *                      broadcast, reduce, send, all_to_all; where a rank has sent any
 *     flops_per_second of all ranks: operations that the tape launched, see dtrain_tape_info
 *     peak_share       of desc.peak_flops
 *     memory_bytes, memory_peak_bytes, memory_activation_bytes
 *                      of the device, as the library allocates: now, the most so far, and the
 *                      tape's largest pass; of the rank that holds most
 *
 * Times of a step are those of spans (world/timeline.h), which do not overlap: data + forward +
 * backward + exposed_comm + optimizer is the step without the time of the trainer itself. On a GPU,
 * where calls queue work, times are the host's; a recorded step has only step_ms.
 *
 * The last line has "final": true, wall_time, step, loss, val_loss, val_accuracy, ranks, the fields
 * of dtrain_summary but bubble_ms, and of desc.trainer what a rank holds and what
 * dtrain_trainer_plan predicts:
 *
 *     memory_param_bytes, memory_grad_bytes, memory_optimizer_bytes, memory_buffer_bytes,
 *     memory_host_bytes, and predicted_ with each of them, predicted_activation_bytes,
 *     predicted_bytes (with the process itself) */

#pragma once

#include "core/api.h"
#include "core/result.h"
#include "world/world.h"
#include "train/trainer.h"

typedef struct dtrain_metrics dtrain_metrics;

typedef struct dtrain_summary {
    int64_t steps;
    uint64_t tokens;
    double first_loss, last_loss;             /* NaN where unknown */
    double val_loss, val_accuracy;            /* of the last evaluation; NaN where unknown */
    double seconds, tokens_per_second;        /* tokens_per_second: in the time of all steps */
    double step_ms, comm_ms, exposed_comm_ms; /* means of all steps */
    double data_ms;                           /* mean of all steps */
    double scaling;          /* (step_ms - exposed_comm_ms) / step_ms: an upper estimate */
    uint64_t comm_bytes;     /* of all steps, this rank ... */
    uint64_t tensor_bytes;   /* ... and of them over the tensor axis of a mesh */
    uint64_t pipeline_bytes; /* ... and over the pipeline axis */
    double bubble_ms; /* wait for other stages, mean over ranks and steps; 0 without a pipeline */
} dtrain_summary;

/* The distribution of a tensor. Bucket i holds values from limits[i-1] (included; -inf before the
 * first) to limits[i] (excluded). Values that are not finite are counted apart. */
typedef struct dtrain_histogram {
    int64_t step;
    double wall_time;
    const char *tag; /* "weights/NAME", "weights.grad/NAME" */
    double min, max, sum, sum_squares;
    uint64_t count, nonfinite;
    size_t bucket_count;
    const double *limits, *buckets; /* (bucket_count) */
} dtrain_histogram;

/* The moment at which a sink is called. */
typedef enum dtrain_metrics_moment {
    DTRAIN_METRICS_OPEN = 0, /* before the first step, by dtrain_metrics_create */
    DTRAIN_METRICS_STEP = 1,
    DTRAIN_METRICS_HISTOGRAM = 2, /* after the step that it belongs to */
    DTRAIN_METRICS_FINISH = 3     /* once, if the sink was opened */
} dtrain_metrics_moment;

struct dtrain_metrics_desc;

/* What a sink is given. It is valid during the call. */
typedef struct dtrain_metrics_sample {
    uint32_t moment;  /* dtrain_metrics_moment */
    double wall_time; /* seconds since 1970 */
    size_t count;
    const dtrain_figure *figures; /* (count): fields of the record, its figures, then ... */
    size_t fixed_count;           /* ... at the end those that are the same in all steps */
    const dtrain_step_record *record;
    const dtrain_histogram *histogram;      /* NULL at other moments */
    const dtrain_summary *summary;          /* of all steps, at the end; NULL at other moments */
    const struct dtrain_metrics_desc *desc; /* the stream's, with its defaults */
} dtrain_metrics_sample;

#define DTRAIN_METRICS_SINKS 12 /* of the host, at most */

/* A writer: a function that is called by the thread that calls the metrics. An error at
 * DTRAIN_METRICS_OPEN is dtrain_metrics_create's. Later ones are counted, the first is a warning
 * with the error's sentence (or the code's, where dtrain_last_error is empty), and the sink is
 * called again in the next step: training continues whatever a sink does. */
typedef struct dtrain_metrics_sink {
    bool every_rank; /* false: only rank 0 */
    bool histograms; /* it is called with histograms, too */
    const char *name;
    dtrain_result (*take)(void *user, const dtrain_metrics_sample *sample);
    void *user;
} dtrain_metrics_sink;

/* Every zero is the default written beside the field, an empty text none. Texts are copied. */
typedef struct dtrain_metrics_desc {
    uint32_t progress_every;     /* steps between lines when progress is no terminal; 0 = 10 */
    int64_t total_steps;         /* for the bar and the time left; 0 = unknown */
    FILE *progress;              /* a live line on a terminal, a table otherwise; NULL = none. On a
                                terminal NO_COLOR is respected, and TERM=dumb gets the table */
    const char *jsonl_path;      /* a file of one JSON object a step; NULL = none */
    bool append;                 /* to what is in the files, as a run that was resumed does */
    const char *tensorboard_dir; /* one run: events.out.tfevents.* is made in it; NULL = none */
    uint32_t histogram_every;    /* steps between histograms of weights and gradients, for
                                     TensorBoard and sinks with `histograms`; needs trainer, and the
                                     same number on all ranks: dtrain_metrics_step is collective
                                     in these steps. 0 = never */
    const char *run_name;        /* a label; NULL = "dtrain" */
    const char *config;          /* text for TensorBoard and the first JSON line, such as the
                                    configuration file; NULL = none */
    const char *hparams;         /* lines of NAME=VALUE for its HPARAMS tab; NULL = none */
    int64_t first_step;          /* of a resumed run: TensorBoard drops what the earlier run
                                     wrote for this step and later ones; 0 = all */
    double peak_flops;           /* FLOP/s that one rank's device can do at most; 0 = unknown */
    dtrain_trainer *trainer; /* whose records are reported; it must outlive the metrics. Figures of
                                each rank, histograms, and what ranks hold; its loss is planned
                                once, as by dtrain_trainer_plan. NULL = records alone */
    const dtrain_metrics_sink *sinks; /* (sink_count) the host's; NULL = none */
    size_t sink_count;
} dtrain_metrics_desc;

/* Create the stream of a run, whose ranks are those of the trainer, or without one all of the
 * world. Rank 0 of them alone writes, apart from sinks with every_rank; every rank keeps the
 * summary. A file that cannot be opened, or a sink, is an error. Later no failure stops the
 * training: it is counted, and the first of each sink is a warning. Local. */
DTRAIN_API dtrain_result dtrain_metrics_create(dtrain_world *world, const dtrain_metrics_desc *desc,
                                               dtrain_metrics **out);
/* Report one step. Local, except for histograms; the only errors are those of arguments and of
 * histograms' collectives. */
DTRAIN_API dtrain_result dtrain_metrics_step(dtrain_metrics *metrics,
                                             const dtrain_step_record *record);

/* The records that a sink has written and lost. */
typedef struct dtrain_metrics_sink_info {
    const char *name;       /* "json lines" */
    const char *path;       /* "" for the host's sinks */
    uint64_t written, lost; /* calls of it that succeeded and failed */
} dtrain_metrics_sink_info;

typedef struct dtrain_metrics_info {
    dtrain_summary summary;     /* of the steps so far */
    dtrain_metrics_sample last; /* of the last step; before the first only what is FIXED */
    size_t sink_count;
    const dtrain_metrics_sink_info *sinks; /* (sink_count) */
    const char *no_plan;                   /* why memory is not predicted; "" where it is */
} dtrain_metrics_info;
/* Tell what the run has come to so far, on any rank; zeros for NULL. */
DTRAIN_API void dtrain_metrics_query(const dtrain_metrics *metrics, dtrain_metrics_info *info);
/* End the progress line, let every sink write its end (JSON: a last object with the summary and
 * "final": true) and close its file. DTRAIN_ERROR_FILE says what was lost on the way. */
DTRAIN_API dtrain_result dtrain_metrics_finish(dtrain_metrics *metrics);
/* Finish, if that was not done, and free; NULL is ignored. */
DTRAIN_API void dtrain_metrics_destroy(dtrain_metrics *metrics);
