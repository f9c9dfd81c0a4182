/* Metrics
 *
 * One stream of metrics has several writers. Call dtrain_metrics_step with each record of the
 * trainer, and dtrain_metrics_finish at the end. The desc chooses the writers: a console, JSON
 * lines, TensorBoard's event files, and the program's sinks. tools/prometheus.h is such a sink, and
 * tools/nvml.h adds figures of GPUs.
 *
 * A step becomes one list of figures, which all writers walk: the fields of its record, and the
 * figures that the trainer (dtrain_trainer_step) and the program (dtrain_record_add) put into it. A
 * figure's name is TensorBoard's tag, GROUP/KEY; the key is JSON's. TensorBoard opens the first two
 * groups in the order of their names, and the loss has the first. A figure that was not measured is
 * not in the list. One that was measured and is not finite is null in JSON, nan or inf elsewhere.
 * "bytes", "tokens", "steps" and "rank" are whole numbers.
 *
 * The first JSON line describes the run: "start": true, wall_time, dtrain (the version), first_step
 * (desc.first_step), ranks, nodes, threads, run (desc.run_name), host, device, config, and of
 * desc.trainer, else 0 or "", shard_ranks, replicas, parameters and strategy. A run that appends
 * writes another such line: steps after it replace earlier lines of the same step. The keys of a
 * step:
 *
 *     step             from 1
 *     wall_time        seconds since 1970, with milliseconds
 *     loss             mean over micro-batches and ranks
 *     val_loss, val_accuracy         in steps whose record has them; accuracy: 0 to 1
 *     grad_norm, lr
 *     tokens           of all ranks since the start
 *     tokens_per_second
 *     step_ms, data_ms               of the slowest rank; data: waiting for batches
 *     comm_ms, exposed_comm_ms       time with an operation in flight, and the part of it in which
 *                      ranks waited; means over ranks
 *     comm_bytes       bytes that this rank sent, by the ring formula, over all axes of a mesh
 *     loss_scale, skipped_steps      with loss scaling, or after a skipped step
 *     straggler_score, slowest_rank  compute time of the slowest rank / median; two ranks or more
 *     forward_ms, backward_ms, hidden_comm_ms, optimizer_ms, checkpoint_ms
 *                      means over ranks; checkpoint: saving before this step, waits included
 *     PART_min, PART_mean, PART_max, PART_rank
 *                      over ranks, and the rank that has most; PART = comm_bytes, step_ms, data_ms,
 *                      exposed_comm_ms or one of the five above; two ranks or more
 *     tensor_bytes, tensor_exposed_ms, pipeline_bytes, bubble_ms
 *                      the parts of comm_bytes and exposed_comm_ms of a tensor axis with several
 *                      ranks and of the pipeline axis; the data axis has the rest
 *     bus_bytes_per_second           comm_bytes / time in flight: "busbw" of nccl-tests
 *     KIND_bytes       part of comm_bytes, for KIND = all_reduce, reduce_scatter, all_gather,
 *                      broadcast, reduce, send, all_to_all; if any rank has sent some
 *     flops_per_second operations that the tapes of all ranks launched, see dtrain_tape_info
 *     peak_share       share of desc.peak_flops
 *     memory_bytes, memory_peak_bytes, memory_activation_bytes
 *                      device memory that the library has allocated: now, most so far, and the
 *                      tape's largest pass; on the rank that holds most
 *
 * Times of a step are times of spans (world/timeline.h), which do not overlap: data + forward +
 * backward + exposed_comm + optimizer is the step without the time of the trainer itself. On a GPU,
 * where calls queue work, times are the host's; a recorded step has only step_ms.
 *
 * The last line has "final": true, wall_time, step, loss, val_loss, val_accuracy, ranks, the fields
 * of dtrain_summary but bubble_ms, and with desc.trainer the memory that a rank holds and that
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
    double first_loss, last_loss;      /* NaN where unknown */
    double val_loss, val_accuracy;     /* results of the last evaluation; NaN where unknown */
    double seconds, tokens_per_second; /* tokens_per_second: over the time of all steps */
    double step_ms, comm_ms, exposed_comm_ms; /* means of all steps */
    double data_ms;                           /* mean of all steps */
    double scaling;          /* (step_ms - exposed_comm_ms) / step_ms: an upper estimate */
    uint64_t comm_bytes;     /* bytes that this rank sent in all steps */
    uint64_t tensor_bytes;   /* part of comm_bytes over the tensor axis */
    uint64_t pipeline_bytes; /* part of comm_bytes over the pipeline axis */
    double bubble_ms; /* mean wait for other stages over ranks and steps; 0 without a pipeline */
} dtrain_summary;

/* The distribution of a tensor. Bucket i holds values from limits[i-1] (included; -inf for the
 * first bucket) to limits[i] (excluded). nonfinite counts all other values. */
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
    DTRAIN_METRICS_HISTOGRAM = 2, /* after the step of the histogram */
    DTRAIN_METRICS_FINISH = 3     /* once, if the sink was opened */
} dtrain_metrics_moment;

struct dtrain_metrics_desc;

/* The argument of a sink, valid during the call. */
typedef struct dtrain_metrics_sample {
    uint32_t moment;  /* dtrain_metrics_moment */
    double wall_time; /* seconds since 1970 */
    size_t count;
    const dtrain_figure *figures; /* (count) fields of the record, its figures, fixed figures */
    size_t fixed_count;           /* number of figures at the end that are the same in all steps */
    const dtrain_step_record *record;
    const dtrain_histogram *histogram;      /* NULL at other moments */
    const dtrain_summary *summary;          /* summary of all steps at the end; otherwise NULL */
    const struct dtrain_metrics_desc *desc; /* desc of the stream, with defaults filled in */
} dtrain_metrics_sample;

#define DTRAIN_METRICS_SINKS 12 /* largest number of the program's sinks */

/* A writer: one function, called on the thread that calls the metrics. dtrain_metrics_create
 * returns its error at DTRAIN_METRICS_OPEN. Later errors are counted, and the first is a warning
 * with the error's sentence (or the code's, if dtrain_last_error is empty). The next step calls the
 * sink again: training continues whatever a sink does. */
typedef struct dtrain_metrics_sink {
    bool every_rank; /* false: only rank 0 */
    bool histograms; /* true: called also at DTRAIN_METRICS_HISTOGRAM */
    const char *name;
    dtrain_result (*take)(void *user, const dtrain_metrics_sample *sample);
    void *user;
} dtrain_metrics_sink;

/* Zero is the default written beside each field; an empty text is like NULL. Texts are copied. */
typedef struct dtrain_metrics_desc {
    uint32_t progress_every; /* steps between lines if progress is no terminal; 0 = 10 */
    int64_t total_steps;     /* for the bar and the time left; 0 = unknown */
    FILE *progress;          /* live line on a terminal, otherwise a table; NULL = none. NO_COLOR
                                turns color off, and TERM=dumb gets the table */
    const char *jsonl_path;  /* file of one JSON object per step; NULL = none */
    bool append;             /* append to the file, for a resumed run */
    const char *tensorboard_dir; /* folder of one run, for events.out.tfevents.*; NULL = none */
    uint32_t histogram_every;    /* steps between histograms of weights and gradients, for
                                     TensorBoard and sinks with `histograms`. Needs trainer, and the
                                     same number on all ranks: dtrain_metrics_step is collective
                                     in these steps. 0 = never */
    const char *run_name;        /* label; NULL = "dtrain" */
    const char *config;          /* text for TensorBoard and the first JSON line, such as the
                                    configuration file; NULL = none */
    const char *hparams;         /* lines of NAME=VALUE for TensorBoard's HPARAMS; NULL = none */
    int64_t first_step;          /* first step of a resumed run: TensorBoard drops this and later
                                     steps of the earlier run; 0 = all */
    double peak_flops;           /* peak FLOP/s of one rank's device; 0 = unknown */
    dtrain_trainer *trainer; /* trainer of the records, for histograms and memory; it must outlive
                                the metrics. Its loss is planned once, like dtrain_trainer_plan.
                                NULL = only records */
    const dtrain_metrics_sink *sinks; /* (sink_count) the program's sinks; NULL = none */
    size_t sink_count;
} dtrain_metrics_desc;

/* Create the stream of a run. Its ranks are the trainer's, or without a trainer all of the world.
 * Only rank 0 writes, apart from sinks with every_rank; every rank keeps the summary. A file or
 * sink that cannot be opened is an error. Later failures never stop the training: they are counted,
 * and the first of each sink is a warning. Local. */
DTRAIN_API dtrain_result dtrain_metrics_create(dtrain_world *world, const dtrain_metrics_desc *desc,
                                               dtrain_metrics **out);
/* Report one step. Local, except for histograms. Errors come only from arguments and from the
 * collectives of histograms. */
DTRAIN_API dtrain_result dtrain_metrics_step(dtrain_metrics *metrics,
                                             const dtrain_step_record *record);

/* The number of records that a sink has written and lost. */
typedef struct dtrain_metrics_sink_info {
    const char *name;       /* "json lines" */
    const char *path;       /* "" for the program's sinks */
    uint64_t written, lost; /* calls that succeeded and failed */
} dtrain_metrics_sink_info;

typedef struct dtrain_metrics_info {
    dtrain_summary summary;     /* summary of the steps so far */
    dtrain_metrics_sample last; /* last step; before the first step only fixed figures */
    size_t sink_count;
    const dtrain_metrics_sink_info *sinks; /* (sink_count) */
    const char *no_plan;                   /* reason why memory is not predicted; "" = it is */
} dtrain_metrics_info;
/* Return the state of the run on any rank; zeros for NULL. */
DTRAIN_API void dtrain_metrics_query(const dtrain_metrics *metrics, dtrain_metrics_info *info);
/* End the progress line, let every sink write its end (JSON: a last object with the summary and
 * "final": true), and close the files. DTRAIN_ERROR_FILE names the lost records. */
DTRAIN_API dtrain_result dtrain_metrics_finish(dtrain_metrics *metrics);
/* Finish if necessary, and free; NULL is ignored. */
DTRAIN_API void dtrain_metrics_destroy(dtrain_metrics *metrics);
