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
 *     # HELP dtrain_rank_step_seconds Time of a step, slowest rank. Value of each rank.
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
    const char *sent_keys[DTRAIN_COLLECTIVE_KINDS]; /* "send_bytes"; NULL after the last */
} prometheus;

/* A figure by its key: its name in base units and its help, and what its least, mean and most over ranks are of. */
static const struct prometheus_name {
    const char *key, *base, *help, *spread;
} prometheus_names[] = {
    {"loss", "loss", "Mean loss over micro-batches and ranks.", NULL},
    {"grad_norm", "grad_norm", "Gradient norm before clipping.", NULL},
    {"lr", "learning_rate", "Learning rate.", NULL},
    {"tokens", "tokens_total", "Tokens or samples of all ranks.", NULL},
    {"tokens_per_second", "tokens_per_second", "Tokens or samples of all ranks a second.", NULL},
    {"step_ms", "step_seconds", "Time of a step, slowest rank.", "Time in a step"},
    {"comm_ms", "comm_seconds", "Time with an operation in flight, mean of ranks.", NULL},
    {"exposed_comm_ms", "exposed_comm_seconds", "Time that ranks waited in communication, mean.",
     "Time in exposed communication"},
    {"data_ms", "data_seconds", "Time in wait for batches, slowest rank.",
     "Time in wait for batches"},
    {"comm_bytes", "comm_bytes", "Bytes that rank 0 sent in the step.", "Bytes sent in the step"},
    {"loss_scale", "loss_scale", "Loss scale of the step.", NULL},
    {"skipped_steps", "skipped_steps_total", "Steps without an update.", NULL},
    {"straggler_score", "straggler_ratio", "Slowest rank's compute time by the median's.", NULL},
    {"slowest_rank", "slowest_rank", "Rank that computed longest.", NULL},
    {"forward_ms", "forward_seconds", "Time in the forward pass, mean of ranks.",
     "Time in the forward pass"},
    {"backward_ms", "backward_seconds", "Time in the backward pass, mean of ranks.",
     "Time in the backward pass"},
    {"hidden_comm_ms", "hidden_comm_seconds", "Communication that compute hides, mean of ranks.",
     "Time in hidden communication"},
    {"optimizer_ms", "optimizer_seconds", "Time in norm and update, mean of ranks.",
     "Time in norm and update"},
    {"checkpoint_ms", "checkpoint_seconds", "Time in saving before the step, mean of ranks.",
     "Time in saving"},
    {"tensor_bytes", "tensor_bytes", "Bytes that rank 0 sent in the step over the tensor axis.",
     NULL},
    {"tensor_exposed_ms", "tensor_exposed_seconds",
     "Exposed communication of the tensor axis, mean of ranks.", NULL},
    {"pipeline_bytes", "pipeline_bytes",
     "Bytes that rank 0 sent in the step over the pipeline axis.", NULL},
    {"bubble_ms", "bubble_seconds", "Wait for other stages of the pipeline, mean of ranks.", NULL},
    {"bus_bytes_per_second", "bus_bytes_per_second",
     "Bus bandwidth as nccl-tests have it, mean of ranks.", NULL},
    {"flops_per_second", "flops_per_second", "Floating-point operations of all ranks a second.",
     NULL},
    {"peak_share", "flops_ratio", "Share of the devices' peak.", NULL},
    {"memory_bytes", "memory_bytes", "Device memory allocated, largest rank.", NULL},
    {"memory_peak_bytes", "memory_peak_bytes", "Most device memory so far, largest rank.", NULL},
    {"memory_activation_bytes", "memory_activation_bytes",
     "Activations of the largest pass, largest rank.", NULL},
    {"memory_param_bytes", "memory_param_bytes", "Bytes of rank 0 held for parameters.", NULL},
    {"memory_grad_bytes", "memory_grad_bytes", "Bytes of rank 0 held for gradients.", NULL},
    {"memory_optimizer_bytes", "memory_optimizer_bytes",
     "Bytes of rank 0 held for optimizer state.", NULL},
    {"memory_buffer_bytes", "memory_buffer_bytes", "Bytes of rank 0 held to gather and reduce.",
     NULL},
    {"memory_host_bytes", "memory_host_bytes", "Bytes of rank 0 held in host memory.", NULL},
    {"predicted_param_bytes", "predicted_param_bytes", "Bytes of rank 0 predicted for parameters.",
     NULL},
    {"predicted_grad_bytes", "predicted_grad_bytes", "Bytes of rank 0 predicted for gradients.",
     NULL},
    {"predicted_optimizer_bytes", "predicted_optimizer_bytes",
     "Bytes of rank 0 predicted for optimizer state.", NULL},
    {"predicted_buffer_bytes", "predicted_buffer_bytes",
     "Bytes of rank 0 predicted to gather and reduce.", NULL},
    {"predicted_host_bytes", "predicted_host_bytes", "Bytes of rank 0 predicted in host memory.",
     NULL},
    {"predicted_activation_bytes", "predicted_activation_bytes",
     "Bytes of rank 0 predicted for activations and their gradients.", NULL},
    {"predicted_bytes", "predicted_bytes", "Bytes of rank 0 that were predicted.", NULL},
};

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

/* Describe a figure: name in base units, help, and factor to them. */
typedef struct prometheus_about {
    char base[80], help[120];
    double scale;
} prometheus_about;

static inline prometheus_about prometheus__about(const dtrain_figure *figure, const char *key)
{
    static const char *const takes[][2] = {{"_min", "least of ranks"},
                                           {"_mean", "mean of ranks"},
                                           {"_max", "most of ranks"},
                                           {"_rank", "rank that has most"}};
    prometheus_about about = {"", "", strcmp(figure->unit, "ms") == 0 ? 1e-3 : 1};
    snprintf(about.base, sizeof about.base, "%s", key);
    if (key == figure->name) snprintf(about.help, sizeof about.help, "Added by the program.");
    else
        snprintf(about.help, sizeof about.help, "Bytes that rank 0 sent in the step by %.*s.",
                 (int)strlen(key) - (int)strlen("_bytes"), key);
    for (size_t i = 0; i < sizeof prometheus_names / sizeof *prometheus_names; i++) {
        const struct prometheus_name *name = &prometheus_names[i];
        const size_t length = strlen(name->key);
        if (strncmp(key, name->key, length) != 0) continue;
        if (!key[length]) {
            snprintf(about.base, sizeof about.base, "%s", name->base);
            snprintf(about.help, sizeof about.help, "%s", name->help);
        }
        for (int take = 0; take < 4 && name->spread;
             take++) { /* "step_ms_min": "step_min_seconds" */
            const char *unit = strrchr(name->base, '_');
            if (strcmp(key + length, takes[take][0]) != 0) continue;
            snprintf(about.base, sizeof about.base, "%.*s%s%s", (int)(unit - name->base),
                     name->base, take == 3 ? "_max_rank" : takes[take][0], take == 3 ? "" : unit);
            snprintf(about.help, sizeof about.help, "%s, %s.", name->spread, takes[take][1]);
        }
    }
    return about;
}

/* Write a sample of dtrain_PREFIXNAME. The first sample of a metric comes after its help and its type: a counter's name
 * ends in _total. */
static inline void prometheus__sample(FILE *file, const char *run, const char *prefix,
                                      const char *base, const char *help, const char *labels,
                                      double value, bool first)
{
    const size_t length = strlen(base);
    const bool counter = !*prefix && length > 6 && strcmp(base + length - 6, "_total") == 0;
    if (first)
        fprintf(file, "# HELP dtrain_%s%s %s%s\n# TYPE dtrain_%s%s %s\n", prefix, base, help,
                *prefix ? " Value of each rank." : "", prefix, base, counter ? "counter" : "gauge");
    fprintf(file, "dtrain_%s%s{run=\"", prefix, base);
    for (const char *at = run; *at; at++) {
        if (strchr("\n\\\"", *at)) fputc('\\', file);
        fputc(*at == '\n' ? 'n' : *at, file);
    }
    fprintf(file, "\"%s} ", labels);
    prometheus__number(file, value);
    fputc('\n', file);
}

/* Return a figure's key: its name without the group. */
static inline const char *prometheus__key(const dtrain_figure *figure)
{
    const char *slash = strchr(figure->name, '/');
    return slash ? slash + 1 : figure->name;
}

/* Write the state of the run, the last evaluation, all figures, and the bytes that were sent. */
static inline void prometheus__write(const prometheus *p, const dtrain_metrics_sample *sample,
                                     FILE *file)
{
    const bool end = sample->moment == DTRAIN_METRICS_FINISH, begun = p->steps > 0;
    const char *run = sample->desc->run_name;
    const struct {
        const char *base, *help;
        double value;
    } rows[] = {
        {"finished", "1 when the run is over.", (double)end},
        {"steps_total", "Steps that this run has made.", p->steps},
        {"step", "Number of the last step, from 1.",
         begun ? (double)sample->record->step : (double)NAN},
        {"last_step_timestamp_seconds", "When the last step was reported, in whole seconds.",
         begun ? floor(sample->wall_time) : (double)NAN},
        {"val_loss", "Mean loss of the last evaluation.", p->loss},
        {"val_accuracy", "Share of right answers in the last evaluation, 0 to 1.", p->correct},
    };
    char label[64];
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (isfinite(rows[i].value))
            prometheus__sample(file, run, "", rows[i].base, rows[i].help, "", rows[i].value, true);
    for (size_t i = 0; i < sample->count; i++) {
        const dtrain_figure *figure = &sample->figures[i];
        const char *key = prometheus__key(figure);
        if (strncmp(figure->name, "loss/val_", 9) == 0) continue;
        const prometheus_about about = prometheus__about(figure, key);
        prometheus__sample(file, run, "", about.base, about.help, "", figure->value * about.scale,
                           true);
        bool first = true;
        for (int rank = 0; rank < sample->record->ranks; rank++) {
            double share = NAN;
            if (figure->ranks) share = (double)figure->ranks[rank] * about.scale;
            else if (p->share) share = p->share(p->user, key, rank);
            if (!isfinite(share)) continue;
            snprintf(label, sizeof label, ",rank=\"%d\"", rank);
            prometheus__sample(file, run, "rank_", about.base, about.help, label, share, first);
            first = false;
        }
    }
    for (int i = 0; i < DTRAIN_COLLECTIVE_KINDS && p->sent_keys[i]; i++) {
        snprintf(label, sizeof label, ",op=\"%.*s\"",
                 (int)(strlen(p->sent_keys[i]) - strlen("_bytes")), p->sent_keys[i]);
        prometheus__sample(file, run, "", "sent_bytes_total",
                           "Bytes that rank 0 sent, by kind of collective.", label, p->sent[i],
                           i == 0);
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
        for (size_t i = 0; i < sample->count;
             i++) { /* the group "sent" has other figures, which have names */
            const char *key = prometheus__key(&sample->figures[i]);
            int at = 0;
            size_t known = 0;
            if (strncmp(sample->figures[i].name, "sent/", 5) != 0) continue;
            while (known < sizeof prometheus_names / sizeof *prometheus_names &&
                   strcmp(prometheus_names[known].key, key) != 0)
                known++;
            if (known < sizeof prometheus_names / sizeof *prometheus_names) continue;
            while (at < DTRAIN_COLLECTIVE_KINDS - 1 && p->sent_keys[at] &&
                   strcmp(p->sent_keys[at], key) != 0)
                at++;
            p->sent_keys[at] = key;
            p->sent[at] += sample->figures[i].value;
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
