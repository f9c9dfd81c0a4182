/* The stream of metrics and its writers
 *
 * The order of reading is that of a step: metrics.c (the stream), table.c (the values of a step),
 * file.c (text, and files that cannot stop a training), console.c, lines.c, prometheus.c,
 * tensorboard.c (the writers), histogram.c and nvml.c (what is measured here). */

#pragma once

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/json_internal.h"
#include "core/log.h"
#include "core/result.h"
#include "world/world.h"
#include "world/world_internal.h"
#include "train/trainer.h"
#include "train/view_internal.h"
#include "monitor/metrics.h"

/* ---- The table --------------------------------------------------------------------------------*/

/* X(ID, name, group, flags, from, base name, base scale, help). from: the dtrain_figure that the
 * metric is made of, and how; 0: it is set from the record */
/* clang-format off */
#define DTRAIN__METRIC_LIST(X)                                                                     \
    DTRAIN__ROW(X, LOSS, "loss", "loss", 0, 0, "Mean loss over micro-batches and ranks.")          \
    DTRAIN__ROW(X, VAL_LOSS, "val_loss", "loss", 0, 0, "Mean loss of the last evaluation.")        \
    DTRAIN__ROW(X, VAL_ACCURACY, "val_accuracy", "loss", 0, 0,                                     \
                "Share of right answers in the last evaluation, 0 to 1.")                          \
    DTRAIN__ROW(X, GRAD_NORM, "grad_norm", "optimizer", 0, 0, "Gradient norm before clipping.")    \
    X(LR, "lr", "optimizer", 0, 0, "learning_rate", 1, "Learning rate.")                           \
    X(TOKENS, "tokens", "throughput", DTRAIN__COUNTS, 0, "tokens_total", 1,                        \
      "Tokens or samples of all ranks.")                                                           \
    DTRAIN__ROW(X, RATE, "tokens_per_second", "throughput", 0, 0,                                  \
                "Tokens or samples of all ranks a second.")                                        \
    DTRAIN__TIME(X, STEP, "step", RANKS, "Time of a step, slowest rank.")                          \
    X(COMM, "comm_ms", "time", 0, 0, "comm_seconds", 1e-3,                                         \
      "Time with an operation in flight, mean of ranks.")                                          \
    DTRAIN__TIME(X, EXPOSED_COMM, "exposed_comm", RANKS,                                           \
                 "Time that ranks waited in communication, mean.")                                 \
    DTRAIN__TIME(X, DATA, "data", RANKS, "Time in wait for batches, slowest rank.")                \
    DTRAIN__EACH(X, COMM_BYTES, "comm_bytes", "sent", RANKS,                                       \
                 "Bytes that rank 0 sent in the step.")                                            \
    DTRAIN__ROW(X, LOSS_SCALE, "loss_scale", "optimizer", 0, 0, "Loss scale of the step.")         \
    X(SKIPPED, "skipped_steps", "optimizer", DTRAIN__COUNTS, 0, "skipped_steps_total", 1,          \
      "Steps without an update.")                                                                  \
    X(STRAGGLER, "straggler_score", "ranks", 0, 0, "straggler_ratio", 1,                           \
      "Slowest rank's compute time by the median's.")                                              \
    DTRAIN__ROW(X, SLOWEST, "slowest_rank", "ranks", DTRAIN_METRIC_INTEGER, 0,                     \
                "Rank that computed longest.")                                                     \
    DTRAIN__TIME(X, FORWARD, "forward", MEAN, "Time in the forward pass, mean of ranks.")          \
    DTRAIN__TIME(X, BACKWARD, "backward", MEAN, "Time in the backward pass, mean of ranks.")       \
    DTRAIN__TIME(X, HIDDEN_COMM, "hidden_comm", MEAN,                                              \
                 "Communication behind compute, mean of ranks.")                                   \
    DTRAIN__TIME(X, OPTIMIZER, "optimizer", MEAN, "Time in norm and update, mean of ranks.")       \
    DTRAIN__TIME(X, CHECKPOINT, "checkpoint", MEAN,                                                \
                 "Time in saving before the step, mean of ranks.")                                 \
    DTRAIN__TIMES(X, STEP, "step", "a step")                                                       \
    DTRAIN__TIMES(X, DATA, "data", "wait for batches")                                             \
    DTRAIN__TIMES(X, FORWARD, "forward", "the forward pass")                                       \
    DTRAIN__TIMES(X, BACKWARD, "backward", "the backward pass")                                    \
    DTRAIN__TIMES(X, EXPOSED_COMM, "exposed_comm", "exposed communication")                        \
    DTRAIN__TIMES(X, HIDDEN_COMM, "hidden_comm", "hidden communication")                           \
    DTRAIN__TIMES(X, OPTIMIZER, "optimizer", "norm and update")                                    \
    DTRAIN__TIMES(X, CHECKPOINT, "checkpoint", "saving")                                           \
    DTRAIN__SPREAD(X, COMM_BYTES, "comm", "_bytes", "_bytes", DTRAIN_METRIC_INTEGER, 1,            \
                   "Bytes sent in the step")                                                       \
    DTRAIN__EACH(X, TENSOR_BYTES, "tensor_bytes", "sent", RANKS,                                   \
                 "Bytes that rank 0 sent in the step over the tensor axis.")                       \
    DTRAIN__TIME(X, TENSOR_EXPOSED, "tensor_exposed", MEAN,                                        \
                 "Exposed communication of the tensor axis, mean of ranks.")                       \
    DTRAIN__EACH(X, PIPELINE_BYTES, "pipeline_bytes", "sent", RANKS,                               \
                 "Bytes that rank 0 sent in the step over the pipeline axis.")                     \
    DTRAIN__TIME(X, BUBBLE, "bubble", MEAN,                                                        \
                 "Wait for other stages of the pipeline, mean of ranks.")                          \
    DTRAIN__ROW(X, BUS, "bus_bytes_per_second", "sent", DTRAIN_METRIC_RANKS,                       \
                DTRAIN__FROM(MEAN, BUS), "Bus bandwidth as nccl-tests have it, mean of ranks.")    \
    DTRAIN__KIND(X, ALL_REDUCE, "all_reduce") /* in the order of dtrain_collective_kind ... */     \
    DTRAIN__KIND(X, REDUCE_SCATTER, "reduce_scatter")                                              \
    DTRAIN__KIND(X, ALL_GATHER, "all_gather")                                                      \
    DTRAIN__KIND(X, BROADCAST, "broadcast")                                                        \
    DTRAIN__KIND(X, REDUCE, "reduce")                                                              \
    DTRAIN__KIND(X, SEND, "send")                                                                  \
    DTRAIN__KIND(X, ALL_TO_ALL, "all_to_all") /* ... without those that move nothing */            \
    X(FLOPS, "flops_per_second", "throughput", 0, 0, "flops_per_second", 1,                        \
      "Floating-point operations of all ranks a second.")                                          \
    X(PEAK_SHARE, "peak_share", "throughput", 0, 0, "flops_ratio", 1,                              \
      "Share of the devices' peak.")                                                               \
    DTRAIN__EACH(X, MEMORY, "memory_bytes", "memory", MAX,                                         \
                 "Device memory allocated, largest rank.")                                         \
    DTRAIN__EACH(X, MEMORY_PEAK, "memory_peak_bytes", "memory", MAX,                               \
                 "Most device memory so far, largest rank.")                                       \
    DTRAIN__EACH(X, ACTIVATIONS, "memory_activation_bytes", "memory", MAX,                         \
                 "Activations of the largest pass, largest rank.")                                 \
    X(GPU_UTILIZATION, "gpu_utilization", "nvml", DTRAIN_METRIC_RANKS,                             \
      DTRAIN__FROM(MEAN, GPU_UTILIZATION), "gpu_utilization_ratio", 1,                             \
      "GPU utilization, mean of ranks.")                                                           \
    DTRAIN__EACH(X, GPU_MEMORY, "gpu_memory_bytes", "nvml", MAX,                                   \
                 "GPU memory in use, largest rank.")                                               \
    X(GPU_CLOCK, "gpu_clock_hz", "nvml", DTRAIN_METRIC_RANKS, DTRAIN__FROM(MEAN, GPU_CLOCK),       \
      "gpu_clock_hertz", 1, "Clock of the multiprocessors, mean of ranks.")                        \
    DTRAIN__ROW(X, GPU_POWER, "gpu_power_watts", "nvml", DTRAIN_METRIC_RANKS,                      \
                DTRAIN__FROM(MEAN, GPU_POWER), "Power, mean of ranks.")                            \
    DTRAIN__ROW(X, GPU_TEMPERATURE, "gpu_temperature_celsius", "nvml", DTRAIN_METRIC_RANKS,        \
                DTRAIN__FROM(MAX, GPU_TEMPERATURE), "Temperature, hottest GPU.")                   \
    X(GPU_THROTTLE, "gpu_throttle", "nvml", DTRAIN__INTEGERS, DTRAIN__FROM(RANKS, GPU_THROTTLE),   \
      "gpu_throttle_reasons", 1, "NVML's bits of why clocks are low, of any rank.")                \
    DTRAIN__EACH(X, GPU_ECC, "gpu_ecc_errors", "nvml", RANKS,                                      \
                 "Uncorrected ECC errors of all ranks' GPUs.")                                     \
    DTRAIN__HELD_LIST(X, MEMORY_, "memory_", "held")                                               \
    DTRAIN__HELD_LIST(X, PREDICTED_, "predicted_", "predicted")                                    \
    DTRAIN__HELD(X, PREDICTED_ACTIVATION, "predicted_activation_bytes",                            \
                 "predicted for activations and their gradients")                                  \
    DTRAIN__HELD(X, PREDICTED, "predicted_bytes", "that were predicted")

#define DTRAIN__COUNTS (DTRAIN_METRIC_INTEGER | DTRAIN_METRIC_COUNTER)
#define DTRAIN__INTEGERS (DTRAIN_METRIC_INTEGER | DTRAIN_METRIC_RANKS)

/* A metric in base units; one of integers of each rank; a time of each rank. */
#define DTRAIN__ROW(X, ID, name, group, flags, from, help)                                         \
    X(ID, name, group, flags, from, name, 1, help)
#define DTRAIN__EACH(X, ID, name, group, take, help)                                               \
    X(ID, name, group, DTRAIN__INTEGERS, DTRAIN__FROM(take, ID), name, 1, help)
#define DTRAIN__TIME(X, ID, part, take, help)                                                      \
    X(ID, part "_ms", "time", DTRAIN_METRIC_RANKS, DTRAIN__FROM(take, ID), part "_seconds", 1e-3,  \
      help)
/* Least, mean and most of a figure over ranks, and the rank that has most. */
#define DTRAIN__SPREAD(X, ID, part, unit, base_unit, flags, scale, what)                           \
    X(ID##_MIN, part unit "_min", "ranks", flags, DTRAIN__FROM(SPREAD_MIN, ID),                    \
      part "_min" base_unit, scale, what ", least of ranks.")                                      \
    X(ID##_MEAN, part unit "_mean", "ranks", flags, DTRAIN__FROM(SPREAD_MEAN, ID),                 \
      part "_mean" base_unit, scale, what ", mean of ranks.")                                      \
    X(ID##_MAX, part unit "_max", "ranks", flags, DTRAIN__FROM(SPREAD_MAX, ID),                    \
      part "_max" base_unit, scale, what ", most of ranks.")                                       \
    X(ID##_RANK, part unit "_rank", "ranks", DTRAIN_METRIC_INTEGER, DTRAIN__FROM(SPREAD_RANK, ID), \
      part "_max_rank", 1, what ", rank that has most.")
#define DTRAIN__TIMES(X, ID, part, text)                                                           \
    DTRAIN__SPREAD(X, ID, part, "_ms", "_seconds", 0, 1e-3, "Time in " text)
#define DTRAIN__KIND(X, ID, kind)                                                                  \
    DTRAIN__ROW(X, ID, kind "_bytes", "sent", DTRAIN__INTEGERS, DTRAIN__SENT_BY(ID),               \
                "Bytes that rank 0 sent in the step by " kind ".")
#define DTRAIN__HELD(X, ID, name, text)                                                            \
    DTRAIN__ROW(X, ID, name, "memory", DTRAIN_METRIC_INTEGER | DTRAIN_METRIC_FIXED, 0,             \
                "Bytes of rank 0 " text ".")
#define DTRAIN__HELD_LIST(X, WHAT, what, verb)                                                     \
    DTRAIN__HELD(X, WHAT##PARAM, what "param_bytes", verb " for parameters")                       \
    DTRAIN__HELD(X, WHAT##GRAD, what "grad_bytes", verb " for gradients")                          \
    DTRAIN__HELD(X, WHAT##OPTIMIZER, what "optimizer_bytes", verb " for optimizer state")          \
    DTRAIN__HELD(X, WHAT##BUFFER, what "buffer_bytes", verb " to gather and reduce")               \
    DTRAIN__HELD(X, WHAT##HOST, what "host_bytes", verb " in host memory")
/* clang-format on */

/* The ways to make a metric of a figure: the metric is set from the record, and each rank has the
 * figure too; it is the mean or the largest of all ranks; or it is one of the four of a spread. */
enum {
    DTRAIN__TAKE_RANKS = 1,
    DTRAIN__TAKE_MEAN,
    DTRAIN__TAKE_MAX,
    DTRAIN__TAKE_SPREAD_MIN,
    DTRAIN__TAKE_SPREAD_MEAN,
    DTRAIN__TAKE_SPREAD_MAX,
    DTRAIN__TAKE_SPREAD_RANK
};
#define DTRAIN__FROM(take, figure) (DTRAIN__TAKE_##take + 8 * DTRAIN_FIGURE_##figure)
#define DTRAIN__SENT_BY(kind) \
    (DTRAIN__TAKE_RANKS + 8 * (DTRAIN_FIGURE_COMM_BYTES + (int)DTRAIN_COLLECTIVE_##kind))

enum {
#define DTRAIN__METRIC_NUMBER(ID, name, group, flags, from, base, scale, help) DTRAIN__METRIC_##ID,
    DTRAIN__METRIC_LIST(DTRAIN__METRIC_NUMBER)
#undef DTRAIN__METRIC_NUMBER
        DTRAIN__METRIC_COUNT
};

/* Return false for NaN and infinity, also under -ffast-math. */
static inline bool dtrain__finite(double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (bits >> 52 & 0x7ff) != 0x7ff;
}

static inline double dtrain__wall_time(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* ---- Text and files ---------------------------------------------------------------------------*/

/* A file that records are appended to: the whole of a record, or nothing of it if the file can be
 * cut. */
typedef struct dtrain__records {
    int fd;       /* -1: none */
    int64_t size; /* of the whole records; -1: it cannot be cut (a pipe) */
    bool torn;    /* it ends with a part of a record */
    const char *path;
} dtrain__records;

/* The signals that this thread had blocked, and those that were pending, before a write. */
typedef struct dtrain__quiet {
    sigset_t blocked, pending;
} dtrain__quiet;

/* ---- Writers ----------------------------------------------------------------------------------*/

typedef struct dtrain__console {
    bool terminal, color;
    double redraw_at; /* the live line is drawn again from then on */
} dtrain__console;

typedef struct dtrain__prometheus {
    double write_at;                         /* when the file may be replaced again */
    double kind_bytes[DTRAIN__METRIC_COUNT]; /* so far, of KIND_bytes */
    char *next;                              /* (next_bytes) path of the next version */
    size_t next_bytes;
} dtrain__prometheus;

typedef struct dtrain__tensorboard {
    dtrain__records file;
    char *path; /* of the file; owned */
    size_t path_bytes;
    dtrain__text *record; /* under way: metrics->text */
    size_t open[8];       /* (depth) offsets in it where its open messages begin */
    int depth;
} dtrain__tensorboard;

typedef struct dtrain__nvml {
    void *library, *device;
    bool started;
    double ask_at;
    float figures[DTRAIN_FIGURE_COUNT - DTRAIN_FIGURE_GPU_UTILIZATION]; /* NaN: no answer */
    char reason[200]; /* why there is nothing; "" */
} dtrain__nvml;

#define DTRAIN__WRITERS 4

struct dtrain_metrics {
    dtrain_allocator allocator;
    dtrain_world *world;
    dtrain_comm *comm;               /* the ranks of the run: the trainer's, or all */
    size_t bytes;                    /* of all this, with the sinks, infos and texts after it */
    dtrain_metrics_desc desc;        /* resolved */
    dtrain_metrics_sink *sinks;      /* (sink_count) */
    dtrain_metrics_sink_info *infos; /* likewise */
    size_t sink_count;
    size_t opened; /* the first of them, which are to be finished */
    bool busy;     /* a sink is being called: it must not call back */
    bool finished;
    dtrain__text text; /* the record that a writer is making */

    dtrain__console console;
    dtrain__records jsonl;
    dtrain__prometheus prometheus;
    dtrain__tensorboard tensorboard;

    dtrain_metrics_sample sample; /* the last step, as sinks see it */
    double values[DTRAIN__METRIC_COUNT];
    bool known[DTRAIN__METRIC_COUNT];
    char no_plan[DTRAIN__ERROR_BYTES]; /* why memory is not predicted; "" */
    dtrain__nvml nvml;
    struct dtrain__histograms *histograms; /* NULL: none are made */
    size_t histograms_bytes;

    double started; /* when the first step began */
    dtrain_step_record last;
    dtrain_summary summary; /* running; tokens_per_second times step_ms */
};

/* monitor/table.c */
DTRAIN__PRIVATE const dtrain_metric *dtrain__metric_table(void);
DTRAIN__PRIVATE void dtrain__metrics_plan(dtrain_metrics *metrics);
DTRAIN__PRIVATE void dtrain__metrics_fill(dtrain_metrics *metrics,
                                          const dtrain_step_record *record);
DTRAIN__PRIVATE double dtrain__rank_value(const dtrain_metrics *metrics, int id, int rank);

/* monitor/file.c */
DTRAIN__PRIVATE dtrain__text *dtrain__record_begin(dtrain_metrics *metrics);
DTRAIN__PRIVATE void dtrain__text_number(dtrain__text *text, double value, uint32_t flags,
                                         const char *nan, const char *inf, const char *minus_inf);
DTRAIN__PRIVATE dtrain_result dtrain__file_fail(const char *path, const char *done);
DTRAIN__PRIVATE void dtrain__quiet_begin(dtrain__quiet *quiet);
DTRAIN__PRIVATE void dtrain__quiet_end(const dtrain__quiet *quiet);
DTRAIN__PRIVATE dtrain_result dtrain__write_all(int fd, const char *path, const void *data,
                                                size_t bytes);
DTRAIN__PRIVATE dtrain_result dtrain__records_open(dtrain__records *file, const char *path,
                                                   bool append);
DTRAIN__PRIVATE dtrain_result dtrain__records_append(dtrain__records *file,
                                                     const dtrain__text *record);
DTRAIN__PRIVATE dtrain_result dtrain__records_close(dtrain__records *file);

/* The functions of a writer's sink, whose user is the dtrain_metrics. */
#define DTRAIN__WRITER(name)                                                                  \
    DTRAIN__PRIVATE dtrain_result dtrain__##name##_open(                                      \
        void *user, const dtrain_metrics_desc *desc, const dtrain_metrics_sample *sample);    \
    DTRAIN__PRIVATE dtrain_result dtrain__##name##_step(void *user,                           \
                                                        const dtrain_metrics_sample *sample); \
    DTRAIN__PRIVATE dtrain_result dtrain__##name##_finish(void *user, const dtrain_summary *s)
DTRAIN__WRITER(console);
DTRAIN__WRITER(jsonl);
DTRAIN__WRITER(prometheus);
DTRAIN__WRITER(tensorboard);
DTRAIN__PRIVATE dtrain_result dtrain__tensorboard_histogram(void *user,
                                                            const dtrain_histogram *histogram);

/* monitor/metrics.c */
DTRAIN__PRIVATE void dtrain__sinks_take(dtrain_metrics *metrics, const dtrain_histogram *histogram,
                                        const dtrain_summary *end);

/* monitor/histogram.c */
DTRAIN__PRIVATE dtrain_result dtrain__histograms_create(dtrain_metrics *metrics);
DTRAIN__PRIVATE dtrain_result dtrain__histograms_step(dtrain_metrics *metrics);

/* monitor/nvml.c */
DTRAIN__PRIVATE void dtrain__nvml_open(dtrain_metrics *metrics);
DTRAIN__PRIVATE void dtrain__nvml_sample(dtrain_metrics *metrics);
DTRAIN__PRIVATE void dtrain__nvml_close(dtrain_metrics *metrics);
