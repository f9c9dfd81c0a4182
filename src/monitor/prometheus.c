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

/* Add a sample of dtrain_PREFIXNAME, with labels besides that of the run, whose name is escaped.
 * The first of a metric comes with its help and its type. */
static void dtrain__prometheus_add(dtrain_metrics *metrics, const char *prefix,
                                   const dtrain_metric *m, double value, const char *labels,
                                   bool first)
{
    dtrain__text *text = &metrics->text;
    const bool whole = value == floor(value) && fabs(value) < 9e15;
    if (first)
        dtrain__text_add(text, "# HELP dtrain_%s%s %s%s\n# TYPE dtrain_%s%s %s\n", prefix, m->base,
                         m->help, prefix[0] ? " Here: of each rank." : "", prefix, m->base,
                         m->flags & DTRAIN_METRIC_COUNTER && !prefix[0] ? "counter" : "gauge");
    dtrain__text_add(text, "dtrain_%s%s{run=\"", prefix, m->base);
    for (const char *at = metrics->desc.run_name; *at; at++) {
        if (strchr("\n\\\"", *at)) dtrain__text_append(text, "\\", 1);
        dtrain__text_append(text, *at == '\n' ? "n" : at, 1);
    }
    dtrain__text_add(text, "\"%s} ", labels);
    dtrain__text_number(text, value, whole, "NaN", "+Inf", "-Inf");
    dtrain__text_append(text, "\n", 1);
}

/* Replace the file by one with the state of the run, the last evaluation and all metrics; after a
 * failure the version before is still there. */
static dtrain_result dtrain__prometheus_replace(dtrain_metrics *metrics, bool finished)
{
    const dtrain_metrics_sample *sample = &metrics->sample;
    const dtrain_summary *s = &metrics->summary;
    const dtrain__text *text = dtrain__record_begin(metrics);
    const uint32_t counter = DTRAIN_METRIC_COUNTER;
    const double steps = (double)s->steps, unknown = DTRAIN__NAN;
    const dtrain_metric rows[] = {
        {"", "finished", 1, "", 0, -1, (double)finished, "1 when the run is over."},
        {"", "steps_total", 1, "", counter, -1, steps, "Steps that this run has made."},
        {"", "step", 1, "", 0, -1, steps > 0 ? (double)sample->step : unknown,
         "Number of the last step, from 1."},
        {"", "last_step_timestamp_seconds", 1, "", 0, -1, /* nine digits would be tens of them */
         steps > 0 ? floor(sample->wall_time) : unknown,
         "When the last step was reported, in whole seconds."},
        {"", "val_loss", 1, "", 0, -1, s->val_loss, "Mean loss of the last evaluation."},
        {"", "val_accuracy", 1, "", 0, -1, s->val_accuracy,
         "Share of right answers in the last evaluation, 0 to 1."},
        {"", "sent_bytes_total", 1, "", counter, -1, unknown,
         "Bytes that rank 0 sent, by kind of collective."},
    };
    const size_t count = sizeof rows / sizeof *rows;
    char *next = metrics->prometheus.next, label[64];
    dtrain__records file;
    bool first = true;
    for (size_t i = 0; i < count; i++)
        if (dtrain__finite(rows[i].value))
            dtrain__prometheus_add(metrics, "", &rows[i], rows[i].value, "", true);
    for (size_t i = 0; i < sample->count; i++) {
        const dtrain_metric *m = &sample->metrics[i];
        first = true;
        if (strcmp(m->group, "loss") == 0 && strcmp(m->name, "loss") != 0) continue; /* above */
        dtrain__prometheus_add(metrics, "", m, m->value * m->base_scale, "", true);
        for (int r = 0; m->figure >= 0 && sample->figures && r < metrics->last.ranks; r++) {
            const size_t at = (size_t)r * sample->figure_stride + (size_t)m->figure;
            if (!dtrain__is_finite(sample->figures[at])) continue;
            snprintf(label, sizeof label, ",rank=\"%d\"", dtrain__world_rank(metrics->comm, r));
            dtrain__prometheus_add(metrics, "rank_", m, (double)sample->figures[at], label, first);
            first = false;
        }
    }
    first = true;
    for (int kind = 0; kind < DTRAIN_COLLECTIVE_KINDS; kind++) {
        const char *name = metrics->prometheus.sent_names[kind];
        const double sent = metrics->prometheus.sent[kind];
        if (!(sent > 0)) continue;
        snprintf(label, sizeof label, ",op=\"%.*s\"", (int)(strlen(name) - strlen("_bytes")), name);
        dtrain__prometheus_add(metrics, "", &rows[count - 1], sent, label, first);
        first = false;
    }
    snprintf(next, strlen(metrics->desc.prometheus_path) + sizeof DTRAIN__NEXT, "%s" DTRAIN__NEXT,
             metrics->desc.prometheus_path);
    (void)unlink(next);
    DTRAIN__TRY(dtrain__records_open(&file, next, false));
    dtrain_result result = dtrain__records_append(&file, text);
    const dtrain_result closed = dtrain__records_close(&file);
    if (result == DTRAIN_OK) result = closed;
    if (result == DTRAIN_OK && rename(next, metrics->desc.prometheus_path) != 0)
        result = dtrain__file_fail(metrics->desc.prometheus_path, "replaced");
    if (result != DTRAIN_OK) unlink(next);
    return result;
}

DTRAIN__PRIVATE dtrain_result dtrain__prometheus_sink(void *user,
                                                      const dtrain_metrics_sample *sample)
{
    dtrain_metrics *metrics = (dtrain_metrics *)user;
    const char *path = metrics->desc.prometheus_path;
    const size_t length = strlen(path);
    const double now = dtrain_seconds();
    const bool end = sample->moment == DTRAIN_METRICS_FINISH;
    if (length < 6 || strcmp(path + length - 5, ".prom") != 0)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_metrics_create: the Prometheus file %s does not end in .prom: "
                           "node_exporter would not read it",
                           path);
    if (sample->moment != DTRAIN_METRICS_STEP) return dtrain__prometheus_replace(metrics, end);
    for (size_t i = 0; i < sample->count; i++) {
        const int kind = sample->metrics[i].figure - DTRAIN_FIGURE_COMM_BYTES;
        if (kind <= 0 || kind >= DTRAIN_COLLECTIVE_KINDS) continue;
        metrics->prometheus.sent[kind] += sample->metrics[i].value;
        metrics->prometheus.sent_names[kind] = sample->metrics[i].name;
    }
    if (now < metrics->prometheus.write_at) return DTRAIN_OK;
    metrics->prometheus.write_at = now + 1;
    return dtrain__prometheus_replace(metrics, false);
}
