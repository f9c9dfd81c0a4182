/* Metrics
 *
 * Report a run: a line on the terminal, a file of JSON lines, and a summary. Call
 * dtrain_metrics_step with each record of the trainer, and dtrain_metrics_finish at the end. */

#pragma once

#include "core/api.h"
#include "core/result.h"
#include "world/world.h"
#include "train/trainer.h"

typedef struct dtrain_metrics dtrain_metrics;

typedef struct dtrain_metrics_desc {
    uint32_t progress_every; /* steps between lines when progress is no terminal; 0 = 10 */
    int64_t total_steps;     /* for the bar and the time left; 0 = unknown */
    FILE *progress;          /* a live line on a terminal, a table otherwise; NULL = none */
    const char *jsonl_path;  /* a file of one JSON object a step; NULL = none */
    bool append;             /* to what is in it, as a run that was resumed does */
} dtrain_metrics_desc;

/* Create the report of a run. Only rank 0 writes; every rank keeps the summary. A log file that
 * cannot be opened is an error; one that later cannot be written is one warning, and training goes
 * on. Local. */
DTRAIN_API dtrain_result dtrain_metrics_create(dtrain_world *world, const dtrain_metrics_desc *desc,
                                               dtrain_metrics **out);
/* Report one step. Keys of the JSON object: step, loss, val_loss (when evaluated), grad_norm, lr,
 * tokens, tokens_per_second, step_ms, comm_ms, exposed_comm_ms, data_ms, comm_bytes; with loss
 * scaling loss_scale, skipped_steps. Numbers that are not finite are written as null. */
DTRAIN_API dtrain_result dtrain_metrics_step(dtrain_metrics *metrics,
                                             const dtrain_step_record *record);

typedef struct dtrain_summary {
    int64_t steps;
    uint64_t tokens;
    double first_loss, last_loss, val_loss;   /* NaN where unknown */
    double seconds, tokens_per_second;        /* tokens_per_second: median of steps */
    double step_ms, comm_ms, exposed_comm_ms; /* medians */
    double data_ms;                           /* median */
    double scaling;                           /* (step - exposed) / step: an upper estimate */
    uint64_t comm_bytes;                      /* of all steps, this rank */
} dtrain_summary;
/* Tell what the run has come to so far, on any rank. */
DTRAIN_API void dtrain_metrics_summary(const dtrain_metrics *metrics, dtrain_summary *summary);
/* End the progress line, write a last JSON object with the summary and "final": true, and close
 * the file. DTRAIN_ERROR_FILE when lines were lost on the way. */
DTRAIN_API dtrain_result dtrain_metrics_finish(dtrain_metrics *metrics);
/* Finish, if that was not done, and free; NULL is ignored. */
DTRAIN_API void dtrain_metrics_destroy(dtrain_metrics *metrics);
