/* The stream of metrics and its writers
 *
 * The order of reading: metrics.c (the stream and its list of figures), file.c (files that cannot
 * stop a training), console.c, lines.c, tensorboard.c (the writers), histogram.c. trace.c reads the
 * timeline, and no figures. */

#pragma once

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/json_internal.h"
#include "core/result.h"
#include "world/world.h"
#include "strategy/memory.h"
#include "train/trainer.h"
#include "train/view_internal.h"
#include "monitor/metrics.h"

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

/* A file to which records are appended, whole or, if it can be cut, not at all. */
typedef struct dtrain__records {
    FILE *stream; /* the program's stream; NULL: fd */
    int fd;       /* -1: none */
    int64_t size; /* bytes of whole records; -1: the file cannot be cut (a pipe) */
    bool partial; /* true if the file ends with a part of a record */
    const char *path;
} dtrain__records;

#define DTRAIN__METRICS_MOST (DTRAIN_RECORD_FIGURES + 24) /* the stream adds up to 21 */
#define DTRAIN__WRITERS 3
#define DTRAIN__EVENT_FILE 160 /* largest length of the name of TensorBoard's file */

struct dtrain_metrics {
    dtrain_allocator allocator;
    dtrain_world *world;
    dtrain_comm *comm;        /* ranks of the run: the trainer's, or all */
    size_t bytes;             /* size of this struct with the texts after it */
    dtrain_metrics_desc desc; /* resolved */
    dtrain_metrics_sink sinks[DTRAIN__WRITERS + DTRAIN_METRICS_SINKS + 1];
    dtrain_metrics_sink_info infos[DTRAIN__WRITERS + DTRAIN_METRICS_SINKS];
    size_t sink_count;
    size_t opened; /* number of sinks opened; these are finished at the end ... */
    size_t failed; /* ... but for the first `failed`: creation failed, no file gets an end */
    bool busy;     /* true during the call of a sink, which must not call back */
    bool finished;
    dtrain__text text; /* record that a writer is making */

    struct {
        dtrain__records file;
        bool terminal, color;
        double redraw_at; /* time of the next drawing of the live line */
    } console;
    dtrain__records jsonl;
    struct {
        dtrain__records file;
        char *path;     /* file.path */
        size_t open[8]; /* (depth) begin of each open message in the text */
        int depth;
    } tensorboard;

    dtrain_metrics_sample sample; /* last step, as sinks see it */
    dtrain_figure figures[DTRAIN__METRICS_MOST];
    dtrain_memory held, planned;       /* memory of this rank; planned: only if no_plan is empty */
    char no_plan[DTRAIN__ERROR_BYTES]; /* reason why memory is not predicted, or "" */
    struct dtrain__histograms *histograms; /* NULL: no histograms */

    double started; /* begin of the first step */
    dtrain_step_record last;
    dtrain_summary summary; /* running means, tokens_per_second's of its product with step_ms */
};

/* monitor/file.c */
/* Begin a record in the text shared by all writers. */
DTRAIN__PRIVATE dtrain__text *dtrain__record_begin(dtrain_metrics *metrics);
DTRAIN__PRIVATE dtrain_result dtrain__records_open(dtrain__records *file, const char *path,
                                                   bool append);
DTRAIN__PRIVATE dtrain_result dtrain__records_append(dtrain__records *file,
                                                     const dtrain__text *record);
DTRAIN__PRIVATE dtrain_result dtrain__records_close(dtrain__records *file);

/* monitor/console.c */
DTRAIN__PRIVATE dtrain_result dtrain__console_sink(void *user, const dtrain_metrics_sample *sample);

/* monitor/lines.c */
DTRAIN__PRIVATE dtrain_result dtrain__jsonl_sink(void *user, const dtrain_metrics_sample *sample);

/* monitor/tensorboard.c */
DTRAIN__PRIVATE dtrain_result dtrain__tensorboard_sink(void *user,
                                                       const dtrain_metrics_sample *sample);

/* monitor/metrics.c */
/* Call all sinks, count the results and warn of a sink's first failure. */
DTRAIN__PRIVATE void dtrain__sinks_take(dtrain_metrics *metrics, dtrain_metrics_moment moment);

/* monitor/histogram.c */
DTRAIN__PRIVATE dtrain_result dtrain__histograms_create(dtrain_metrics *metrics);
DTRAIN__PRIVATE dtrain_result dtrain__histograms_step(dtrain_metrics *metrics);
DTRAIN__PRIVATE void dtrain__histograms_destroy(dtrain_metrics *metrics);
