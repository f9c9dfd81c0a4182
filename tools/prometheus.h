/* prometheus.h: a sink of metrics for Prometheus. Include it after dtrain.h.
 *
 *     prometheus file = {.path = "/var/lib/node_exporter/train.prom"};
 *     const dtrain_metrics_sink sinks[] = {prometheus_sink(&file)};
 *     desc.sinks = sinks, desc.sink_count = 1;
 *
 * node_exporter's textfile collector reads DIRECTORY/NAME.prom whenever Prometheus asks, so the file is replaced as a
 * whole: rank 0 writes NAME.prom.next, which the collector does not read, and renames it. Prometheus asks every 15
 * seconds or so: at most one version a second is written, and one at the end. The format is text 0.0.4 without time
 * stamps, because the collector refuses a file that has them.
 *
 *     # HELP dtrain_step_seconds Time of a step, slowest rank.
 *     # TYPE dtrain_step_seconds gauge
 *     dtrain_step_seconds{run="a"} 0.0125
 *     # HELP dtrain_rank_step_seconds Time of a step, slowest rank. Here: of each rank.
 *     # TYPE dtrain_rank_step_seconds gauge
 *     dtrain_rank_step_seconds{run="a",rank="0"} 0.0125 */
#ifndef PROMETHEUS_H
#define PROMETHEUS_H

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

/* One file. The program sets the first three fields, zeroes the rest, and keeps the struct until the metrics are
 * destroyed. */
typedef struct prometheus {
    const char *path; /* ends in .prom */
    /* Shares of ranks in figures that the program has added: the value of figure `name` on `rank`, or NaN. NULL: only
     * the library's figures have shares. */
    double (*share)(void *user, const char *name, int rank);
    void *user;                           /* of share */
    double write_at;                      /* when the file may be replaced again */
    double steps;                         /* of this run */
    double loss, correct;                 /* of the last evaluation; NaN before the first */
    double sent[DTRAIN_COLLECTIVE_KINDS]; /* in all steps */
    const char *sent_names[DTRAIN_COLLECTIVE_KINDS]; /* "send_bytes" */
} prometheus;

/* Write a value; the decimal point of the program's locale, which can have several bytes, becomes a point. */
static inline void prometheus__number(FILE *file, double value)
{
    const bool whole = value == floor(value) && fabs(value) < 9e15;
    char text[64];
    if (!isfinite(value)) {
        fputs(value > 0 ? "+Inf" : value < 0 ? "-Inf" : "NaN", file);
        return;
    }
    snprintf(text, sizeof text, whole ? "%.0f" : "%.7g", value);
    for (const char *at = text; *at; at++) {
        if (strchr("+-e0123456789", *at)) fputc(*at, file);
        else if (at > text && strchr("0123456789", at[-1])) fputc('.', file);
    }
}

/* Write a sample of dtrain_PREFIXNAME. The first sample of a metric comes after its help and its type. */
static inline void prometheus__sample(FILE *file, const char *run, const char *prefix,
                                      const dtrain_metric *m, const char *labels, double value,
                                      bool first)
{
    const bool counter = m->flags & DTRAIN_METRIC_COUNTER && !*prefix;
    if (first)
        fprintf(file, "# HELP dtrain_%s%s %s%s\n# TYPE dtrain_%s%s %s\n", prefix, m->base, m->help,
                *prefix ? " Here: of each rank." : "", prefix, m->base,
                counter ? "counter" : "gauge");
    fprintf(file, "dtrain_%s%s{run=\"", prefix, m->base);
    for (const char *at = run; *at; at++) {
        if (strchr("\n\\\"", *at)) fputc('\\', file);
        fputc(*at == '\n' ? 'n' : *at, file);
    }
    fprintf(file, "\"%s} ", labels);
    prometheus__number(file, value);
    fputc('\n', file);
}

/* Write the state of the run, the last evaluation, all metrics, and the bytes that were sent. */
static inline void prometheus__write(const prometheus *p, const dtrain_metrics_sample *sample,
                                     FILE *file)
{
    const bool end = sample->moment == DTRAIN_METRICS_FINISH, begun = p->steps > 0;
    const char *run = sample->desc->run_name;
    const dtrain_metric sent = {"",
                                "sent_bytes_total",
                                1,
                                "",
                                DTRAIN_METRIC_COUNTER,
                                -1,
                                0,
                                "Bytes that rank 0 sent, by kind of collective."};
    const dtrain_metric rows[] = {
        {"", "finished", 1, "", 0, -1, (double)end, "1 when the run is over."},
        {"", "steps_total", 1, "", DTRAIN_METRIC_COUNTER, -1, p->steps,
         "Steps that this run has made."},
        {"", "step", 1, "", 0, -1, begun ? (double)sample->step : (double)NAN,
         "Number of the last step, from 1."},
        {"", "last_step_timestamp_seconds", 1, "", 0, -1,
         begun ? floor(sample->wall_time) : (double)NAN,
         "When the last step was reported, in whole seconds."},
        {"", "val_loss", 1, "", 0, -1, p->loss, "Mean loss of the last evaluation."},
        {"", "val_accuracy", 1, "", 0, -1, p->correct,
         "Share of right answers in the last evaluation, 0 to 1."},
    };
    char label[64];
    bool first;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (isfinite(rows[i].value))
            prometheus__sample(file, run, "", &rows[i], "", rows[i].value, true);
    for (size_t i = 0; i < sample->count; i++) {
        const dtrain_metric *m = &sample->metrics[i];
        if (strncmp(m->name, "val_", 4) == 0 && strcmp(m->group, "loss") == 0) continue;
        prometheus__sample(file, run, "", m, "", m->value * m->base_scale, true);
        first = true;
        for (int rank = 0; rank < sample->record->ranks; rank++) {
            const size_t at = (size_t)rank * sample->figure_stride + (size_t)m->figure;
            double share = NAN;
            if (m->figure >= 0 && sample->figures) share = (double)sample->figures[at];
            else if (m->figure < 0 && p->share) share = p->share(p->user, m->name, rank);
            if (!isfinite(share)) continue;
            snprintf(label, sizeof label, ",rank=\"%d\"", rank);
            prometheus__sample(file, run, "rank_", m, label, share, first);
            first = false;
        }
    }
    first = true;
    for (int kind = 0; kind < DTRAIN_COLLECTIVE_KINDS; kind++) {
        if (!(p->sent[kind] > 0)) continue;
        snprintf(label, sizeof label, ",op=\"%.*s\"",
                 (int)(strlen(p->sent_names[kind]) - strlen("_bytes")), p->sent_names[kind]);
        prometheus__sample(file, run, "", &sent, label, p->sent[kind], first);
        first = false;
    }
}

static inline dtrain_result prometheus__take(void *user, const dtrain_metrics_sample *sample)
{
    prometheus *p = (prometheus *)user;
    const dtrain_step_record *r = sample->record;
    const size_t length = strlen(p->path);
    char next[4096];
    if (sample->moment == DTRAIN_METRICS_OPEN) {
        p->loss = p->correct = (double)NAN;
        if (length < 6 || strcmp(p->path + length - 5, ".prom") != 0)
            return dtrain_fail(
                DTRAIN_ERROR_ARGUMENT,
                "the Prometheus file %s does not end in .prom: node_exporter would not read it",
                p->path);
        if (length + sizeof ".next" > sizeof next)
            return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "the Prometheus file has a path of %zu bytes",
                               length);
    }
    if (sample->moment == DTRAIN_METRICS_STEP) {
        const double now = dtrain_seconds();
        p->steps++;
        if (isfinite(r->val_loss)) p->loss = r->val_loss;
        if (isfinite(r->val_accuracy)) p->correct = r->val_accuracy;
        for (size_t i = 0; i < sample->count; i++) {
            const int kind = sample->metrics[i].figure - (int)DTRAIN_FIGURE_COMM_BYTES;
            if (kind <= 0 || kind >= DTRAIN_COLLECTIVE_KINDS) continue;
            p->sent[kind] += sample->metrics[i].value;
            p->sent_names[kind] = sample->metrics[i].name;
        }
        if (now < p->write_at) return DTRAIN_OK;
        p->write_at = now + 1;
    }
    snprintf(next, sizeof next, "%s.next", p->path);
    (void)remove(next); /* a link in its place is not followed */
    FILE *file = fopen(next, "w");
    if (file) prometheus__write(p, sample, file);
    const bool written = file && !ferror(file);
    if (file && fclose(file) == 0 && written && rename(next, p->path) == 0) return DTRAIN_OK;
    const char *why = strerror(errno);
    (void)remove(next);
    return dtrain_fail(DTRAIN_ERROR_FILE, "%s cannot be written: %s", p->path, why);
}

/* Return the sink that writes p's file. */
static inline dtrain_metrics_sink prometheus_sink(prometheus *p)
{
    const dtrain_metrics_sink sink = {false, false, "prometheus", prometheus__take, p};
    return sink;
}

#endif /* PROMETHEUS_H */
