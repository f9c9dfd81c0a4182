/* A text file for Prometheus
 *
 * node_exporter's textfile collector reads DIRECTORY/NAME.prom whenever it is asked, so the file is
 * replaced as a whole: the next version is written beside it, as NAME.prom.next, which the
 * collector does not read, and renamed. That is done at most once a second, because Prometheus asks
 * every 15 seconds or so, and at the end. The format is text 0.0.4, without time stamps (the
 * collector drops a file that has them).
 *
 *     # HELP dtrain_step_seconds Time of a step, slowest rank.
 *     # TYPE dtrain_step_seconds gauge
 *     dtrain_step_seconds{run="a"} 0.0125
 *     # HELP dtrain_rank_step_seconds Time of a step, slowest rank. Here: of each rank.
 *     # TYPE dtrain_rank_step_seconds gauge
 *     dtrain_rank_step_seconds{run="a",rank="0"} 0.0125
 *
 * Values that are not finite are NaN, +Inf and -Inf. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/json_internal.h"
#include "core/result.h"
#include "world/world.h"
#include "comm/comm_internal.h"
#include "monitor/metrics.h"
#include "monitor/monitor_internal.h"

/* A metric of the file, which begins with its first sample. */
typedef struct dtrain__metric_family {
    const char *prefix, *name; /* dtrain_PREFIXNAME */
    const char *help, *more;   /* its sentences */
    bool counter, begun;
} dtrain__metric_family;

/* Add a sample, with labels besides that of the run, whose name is escaped. */
static void dtrain__prometheus_add(dtrain_metrics *metrics, dtrain__metric_family *f,
                                   const char *labels, double value)
{
    dtrain__text *text = &metrics->text;
    const bool whole = value == floor(value) && fabs(value) < 9e15;
    if (!f->begun)
        dtrain__text_add(text, "# HELP dtrain_%s%s %s%s\n# TYPE dtrain_%s%s %s\n", f->prefix,
                         f->name, f->help, f->more, f->prefix, f->name,
                         f->counter ? "counter" : "gauge");
    f->begun = true;
    dtrain__text_add(text, "dtrain_%s%s{run=\"", f->prefix, f->name);
    for (const char *at = metrics->desc.run_name; *at; at++) {
        if (strchr("\n\\\"", *at)) dtrain__text_append(text, "\\", 1);
        dtrain__text_append(text, *at == '\n' ? "n" : at, 1);
    }
    dtrain__text_add(text, "\"%s} ", labels);
    dtrain__text_number(text, value, whole ? DTRAIN_METRIC_INTEGER : 0, "NaN", "+Inf", "-Inf");
    dtrain__text_append(text, "\n", 1);
}

/* Write one number of the whole run. */
static void dtrain__prometheus_one(dtrain_metrics *metrics, const char *name, const char *help,
                                   bool counter, double value)
{
    dtrain__metric_family family = {"", name, help, "", counter, false};
    dtrain__prometheus_add(metrics, &family, "", value);
}

/* Replace the file by one with all metrics; after a failure the version before is still there. */
static dtrain_result dtrain__prometheus_replace(dtrain_metrics *metrics, bool finished)
{
    dtrain__prometheus *p = &metrics->prometheus;
    const dtrain_metric *table = dtrain__metric_table();
    const char *path = metrics->desc.prometheus_path;
    const dtrain__text *text = dtrain__record_begin(metrics);
    dtrain__metric_family sent = {
        "", "sent_bytes_total", "Bytes that rank 0 sent, by kind of collective.", "", true, false};
    char label[64];
    dtrain__prometheus_one(metrics, "finished", "1 when the run is over.", false, finished);
    dtrain__prometheus_one(metrics, "steps_total", "Steps that this run has made.", true,
                           (double)metrics->summary.steps);
    if (metrics->summary.steps > 0) {
        dtrain__prometheus_one(metrics, "step", "Number of the last step, from 1.", false,
                               (double)metrics->last.step);
        dtrain__prometheus_one(
            metrics, "last_step_timestamp_seconds",
            "When the last step was reported, in whole seconds.", false,
            floor(metrics->sample.wall_time)); /* nine digits would be tens of them */
    }
    for (int id = 0; id < DTRAIN__METRIC_COUNT; id++) {
        const dtrain_metric *row = &table[id];
        dtrain__metric_family each = {"rank_", row->base, row->help, " Here: of each rank.",
                                      false,   false};
        bool known = metrics->known[id];
        double value = metrics->values[id];
        /* of the last evaluation, not just in its second */
        if (id == DTRAIN__METRIC_VAL_LOSS)
            known = dtrain__finite(value = metrics->summary.val_loss);
        if (id == DTRAIN__METRIC_VAL_ACCURACY)
            known = dtrain__finite(value = metrics->summary.val_accuracy);
        if (!known) continue;
        dtrain__prometheus_one(metrics, row->base, row->help,
                               (row->flags & DTRAIN_METRIC_COUNTER) != 0, value * row->base_scale);
        for (int r = 0; row->flags & DTRAIN_METRIC_RANKS && r < metrics->last.ranks; r++) {
            value = dtrain__rank_value(metrics, id, r);
            snprintf(label, sizeof label, ",rank=\"%d\"", dtrain__world_rank(metrics->comm, r));
            if (dtrain__finite(value))
                dtrain__prometheus_add(metrics, &each, label, value * row->base_scale);
        }
    }
    for (int id = DTRAIN__METRIC_ALL_REDUCE; id <= DTRAIN__METRIC_ALL_TO_ALL; id++) {
        const int kind = (int)(strlen(table[id].name) - strlen("_bytes"));
        snprintf(label, sizeof label, ",op=\"%.*s\"", kind, table[id].name);
        if (p->kind_bytes[id] > 0) dtrain__prometheus_add(metrics, &sent, label, p->kind_bytes[id]);
    }
    if (text->failed) return DTRAIN_ERROR_MEMORY;
    const int file = dtrain__open_new(p->next);
    if (file < 0) return dtrain__file_fail(p->next, "opened");
    dtrain_result result = dtrain__write_all(file, p->next, text->at, text->bytes);
    const bool closed = close(file) == 0 || errno == EINTR;
    if (result == DTRAIN_OK && (!closed || rename(p->next, path) != 0))
        result = dtrain__file_fail(path, "replaced");
    if (result != DTRAIN_OK) unlink(p->next);
    return result;
}

DTRAIN__PRIVATE dtrain_result dtrain__prometheus_open(void *user, const dtrain_metrics_desc *desc,
                                                      const dtrain_metrics_sample *sample)
{
    dtrain_metrics *metrics = (dtrain_metrics *)user;
    dtrain__prometheus *p = &metrics->prometheus;
    const char *path = desc->prometheus_path;
    const size_t length = strlen(path);
    (void)sample;
    if (length < 6 || strcmp(path + length - 5, ".prom") != 0)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_metrics_create: the Prometheus file %s does not end in .prom: "
                           "node_exporter would not read it",
                           path);
    p->next_bytes = length + sizeof ".next";
    p->next = (char *)dtrain__alloc(&metrics->allocator, p->next_bytes, 1, "a path");
    if (!p->next) return DTRAIN_ERROR_MEMORY;
    snprintf(p->next, p->next_bytes, "%s.next", path);
    return dtrain__prometheus_replace(metrics, false);
}

DTRAIN__PRIVATE dtrain_result dtrain__prometheus_step(void *user,
                                                      const dtrain_metrics_sample *sample)
{
    dtrain_metrics *metrics = (dtrain_metrics *)user;
    dtrain__prometheus *p = &metrics->prometheus;
    const double now = dtrain_seconds();
    for (int id = DTRAIN__METRIC_ALL_REDUCE; id <= DTRAIN__METRIC_ALL_TO_ALL; id++)
        if (sample->known[id]) p->kind_bytes[id] += sample->values[id];
    if (now < p->write_at) return DTRAIN_OK;
    p->write_at = now + 1;
    return dtrain__prometheus_replace(metrics, false);
}

DTRAIN__PRIVATE dtrain_result dtrain__prometheus_finish(void *user, const dtrain_summary *summary)
{
    (void)summary;
    return dtrain__prometheus_replace((dtrain_metrics *)user, true);
}
