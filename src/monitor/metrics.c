/* Metrics
 *
 * One record a step goes three ways: to a person (one live line on a terminal, a table elsewhere),
 * to a program (JSON lines), and into the summary. People are shown steps done, 1 to total; the
 * file has the record's step, from 0.
 *
 *     terminal   step 120/2000 [>         ] loss 3.4121  |g| 0.914  lr 9.8e-04  41.2k tok/s ...
 *     elsewhere      step      loss  val_loss grad_norm        lr    tok/s ...
 *                     120    3.4121         -     0.914  9.80e-04    41.2k ...
 *     file       {"step": 119, "loss": 3.4121, "grad_norm": 0.914, "lr": 0.00098, ...}
 *
 * Nothing here may stop a training: only opening the file can fail. A line that cannot be written
 * is counted, the first one is a warning, and dtrain_metrics_finish tells how many were lost.
 *
 * Medians are over the last 1024 steps: fixed memory, however long the run. A step costs one line
 * built on the stack, one write(2) for the file and at most ten redraws a second. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/log.h"
#include "core/result.h"
#include "world/world.h"
#include "world/world_internal.h"
#include "monitor/metrics.h"
#include "train/trainer.h"
#include "train/trainer_internal.h"

#include <sys/ioctl.h> /* TIOCGWINSZ: the width of the terminal */

#define DTRAIN__RECENT 1024 /* steps that medians look back on */

struct dtrain_metrics {
    dtrain_allocator allocator;
    dtrain_world *world;
    dtrain_metrics_desc desc; /* resolved; progress is NULL where this rank does not write */
    const char *path;         /* a copy of jsonl_path, behind the struct */
    size_t bytes;             /* of both */
    int file;                 /* -1: none */
    bool torn;                /* the last write ended inside a line */
    bool terminal;
    uint64_t lost_lines, lines;
    double started;   /* when the first step began */
    double redraw_at; /* the live line rests until then */
    dtrain_step_record last;
    dtrain_summary summary;                    /* running; medians are made on request */
    dtrain_step_record recent[DTRAIN__RECENT]; /* step n is at n % DTRAIN__RECENT */
};

/* ---- text of a line ---------------------------------------------------------------------------*/

/* What does not fit is cut, which no line here comes near. */
typedef struct dtrain__line {
    size_t used;
    char text[1024];
} dtrain__line;

DTRAIN__PRINTF(2, 3)
static void dtrain__line_add(dtrain__line *line, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    size_t room = sizeof line->text - line->used;
    int length = vsnprintf(line->text + line->used, room, format, args);
    va_end(args);
    if (length > 0) line->used += (size_t)dtrain__min(length, (int64_t)room - 1);
}

/* Add `, "key": value`, null when not finite. The host may have chosen a locale with a decimal
 * comma; JSON has only the point. */
static void dtrain__line_number(dtrain__line *line, const char *key, double value)
{
    dtrain__line_add(line, ", \"%s\": ", key);
    size_t first = line->used;
    if (dtrain_is_finite((float)value)) dtrain__line_add(line, "%.9g", value);
    else dtrain__line_add(line, "null");
    for (size_t i = first; i < line->used; i++)
        if (line->text[i] == ',') line->text[i] = '.';
}

static void dtrain__line_integer(dtrain__line *line, const char *key, uint64_t value)
{
    dtrain__line_add(line, ", \"%s\": %llu", key, (unsigned long long)value);
}

/* Add "950", "41.2k", "1.30M". */
static void dtrain__line_rate(dtrain__line *line, double value)
{
    if (value < 1e3) dtrain__line_add(line, "%.0f", value);
    else if (value < 1e6) dtrain__line_add(line, "%.1fk", value * 1e-3);
    else if (value < 1e9) dtrain__line_add(line, "%.2fM", value * 1e-6);
    else dtrain__line_add(line, "%.2fG", value * 1e-9);
}

/* Add the time until total_steps at the pace so far: "0:12", "1:02:03", "-" when unknown. */
static void dtrain__line_time_left(dtrain__line *line, const dtrain_metrics *metrics)
{
    const int64_t steps = metrics->desc.total_steps - (metrics->last.step + 1);
    const double seconds =
        metrics->summary.seconds / (double)metrics->summary.steps * (double)steps;
    if (steps < 0 || metrics->desc.total_steps <= 0 || seconds > 1e9) {
        dtrain__line_add(line, "-");
        return;
    }
    const long long whole = (long long)(seconds + 0.5);
    if (whole >= 3600) dtrain__line_add(line, "%lld:", whole / 3600);
    dtrain__line_add(line, whole >= 3600 ? "%02lld:%02lld" : "%lld:%02lld", whole / 60 % 60,
                     whole % 60);
}

/* ---- the file ---------------------------------------------------------------------------------*/

/* Write without being stopped by it: a reader that has gone (SIGPIPE) or a limit on the size of
 * files (SIGXFSZ) is an error here, not the end of the process. The signals are blocked in this
 * thread, and one that this write has caused is taken; one that waited before is left alone. */
static ssize_t dtrain__write_quietly(int file, const void *data, size_t bytes)
{
    const struct timespec at_once = {0, 0};
    sigset_t quiet, before, waiting;
    sigemptyset(&waiting);
    sigemptyset(&quiet);
    sigaddset(&quiet, SIGPIPE);
    sigaddset(&quiet, SIGXFSZ);
    sigpending(&waiting);
    pthread_sigmask(SIG_BLOCK, &quiet, &before);
    const ssize_t wrote = write(file, data, bytes);
    const int error = errno;
    if (sigismember(&waiting, SIGPIPE) == 1) sigdelset(&quiet, SIGPIPE);
    if (sigismember(&waiting, SIGXFSZ) == 1) sigdelset(&quiet, SIGXFSZ);
    if (wrote < 0 && (error == EPIPE || error == EFBIG)) sigtimedwait(&quiet, NULL, &at_once);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    errno = error;
    return wrote;
}

/* Write the line, its '}' and its '\n'. text[0] is a spare '\n': after a write that stopped inside
 * a line (a full disk) it is sent too, so that the torn piece spoils no line but itself. */
static void dtrain__metrics_write(dtrain_metrics *metrics, dtrain__line *line)
{
    dtrain__line_add(line, "}\n");
    const char *next = metrics->torn ? line->text : line->text + 1;
    size_t left = (size_t)(line->text + line->used - next);
    metrics->lines++;
    while (left > 0) {
        ssize_t wrote = dtrain__write_quietly(metrics->file, next, left);
        if (wrote < 0 && errno == EINTR) continue;
        if (wrote <= 0) break;
        next += wrote;
        left -= (size_t)wrote;
        metrics->torn = left > 0;
    }
    if (left > 0 && metrics->lost_lines++ == 0)
        dtrain_log(metrics->world, DTRAIN_LOG_WARNING,
                   "the log file %s cannot be written: %s; training goes on without its lines",
                   metrics->path, strerror(errno));
}

/* Write the line of one step. What was not measured is left out, what is not finite is null. */
static void dtrain__metrics_json(dtrain_metrics *metrics, const dtrain_step_record *record)
{
    dtrain__line line;
    line.used = 0;
    dtrain__line_add(&line, "\n{\"step\": %lld", (long long)record->step);
    dtrain__line_number(&line, "loss", record->loss);
    if (dtrain_is_finite((float)record->val_loss))
        dtrain__line_number(&line, "val_loss", record->val_loss);
    dtrain__line_number(&line, "grad_norm", record->grad_norm);
    dtrain__line_number(&line, "lr", record->lr);
    dtrain__line_integer(&line, "tokens", record->tokens);
    dtrain__line_number(&line, "tokens_per_second", record->tokens_per_second);
    dtrain__line_number(&line, "step_ms", record->step_ms);
    dtrain__line_number(&line, "comm_ms", record->comm_ms);
    dtrain__line_number(&line, "exposed_comm_ms", record->exposed_comm_ms);
    dtrain__line_number(&line, "data_ms", record->data_ms);
    dtrain__line_integer(&line, "comm_bytes", record->comm_bytes);
    if (record->loss_scale > 0) {
        dtrain__line_number(&line, "loss_scale", record->loss_scale);
        dtrain__line_integer(&line, "skipped_steps", record->skipped_steps);
    }
    dtrain__metrics_write(metrics, &line);
}

/* Write the last line: what a benchmark script reads with `tail -1`. */
static void dtrain__metrics_json_final(dtrain_metrics *metrics)
{
    dtrain__line line;
    dtrain_summary s;
    line.used = 0;
    dtrain_metrics_summary(metrics, &s);
    dtrain__line_add(&line, "\n{\"final\": true");
    if (s.steps) dtrain__line_integer(&line, "step", (uint64_t)metrics->last.step);
    else dtrain__line_number(&line, "step", DTRAIN__NAN);
    dtrain__line_number(&line, "loss", s.last_loss);
    if (dtrain_is_finite((float)s.val_loss)) dtrain__line_number(&line, "val_loss", s.val_loss);
    dtrain__line_integer(&line, "steps", (uint64_t)s.steps);
    dtrain__line_integer(&line, "tokens", s.tokens);
    dtrain__line_number(&line, "first_loss", s.first_loss);
    dtrain__line_number(&line, "last_loss", s.last_loss);
    dtrain__line_number(&line, "seconds", s.seconds);
    dtrain__line_number(&line, "tokens_per_second", s.tokens_per_second);
    dtrain__line_number(&line, "step_ms", s.step_ms);
    dtrain__line_number(&line, "comm_ms", s.comm_ms);
    dtrain__line_number(&line, "exposed_comm_ms", s.exposed_comm_ms);
    dtrain__line_number(&line, "data_ms", s.data_ms);
    dtrain__line_number(&line, "scaling", s.scaling);
    dtrain__line_integer(&line, "comm_bytes", s.comm_bytes);
    dtrain__metrics_write(metrics, &line);
}

/* ---- progress ---------------------------------------------------------------------------------*/

/* Draw the live line over itself. The most wanted comes first: a line wider than the terminal would
 * wrap, and '\r' comes back over one row only, so it is cut. */
static void dtrain__progress_draw(const dtrain_metrics *metrics)
{
    const dtrain_step_record *r = &metrics->last;
    const int64_t done = r->step + 1, total = metrics->desc.total_steps;
    dtrain__line line;
    struct winsize size;
    line.used = 0;
    dtrain__line_add(&line, "step %lld", (long long)done);
    if (total > 0) {
        char bar[] = "[          ]";
        const int64_t width = (int64_t)sizeof bar - 3;
        const int64_t filled =
            done < total ? (int64_t)((double)done / (double)total * (double)width) : width;
        memset(bar + 1, '=', (size_t)filled);
        if (filled < width) bar[1 + filled] = '>';
        dtrain__line_add(&line, "/%lld %s", (long long)total, bar);
    }
    dtrain__line_add(&line, " loss %.4f  |g| %.3g  lr %.1e  ", r->loss, r->grad_norm, r->lr);
    dtrain__line_rate(&line, r->tokens_per_second);
    dtrain__line_add(&line, " tok/s  %.1f ms", r->step_ms);
    if (total > 0) {
        dtrain__line_add(&line, "  eta ");
        dtrain__line_time_left(&line, metrics);
    }
    if (dtrain_world_size(metrics->world) > 1)
        dtrain__line_add(&line, "  comm %.1f ms (%.1f exposed)", r->comm_ms, r->exposed_comm_ms);
    if (r->data_ms > 0.01 * r->step_ms) dtrain__line_add(&line, "  data %.1f ms", r->data_ms);
    if (ioctl(fileno(metrics->desc.progress), TIOCGWINSZ, &size) == 0 && size.ws_col > 1)
        line.used = (size_t)dtrain__min((int64_t)line.used, size.ws_col - 1);
    fprintf(metrics->desc.progress, "\r%.*s\033[K", (int)line.used, line.text);
    fflush(metrics->desc.progress);
}

/* Show the step on a terminal. An evaluation stays on the screen, the live line goes on below. */
static void dtrain__progress_live(dtrain_metrics *metrics)
{
    const dtrain_step_record *r = &metrics->last;
    const double now = dtrain_seconds();
    if (dtrain_is_finite((float)r->val_loss))
        fprintf(metrics->desc.progress, "\r\033[Kstep %lld  loss %.4f  val_loss %.4f\n",
                (long long)r->step + 1, r->loss, r->val_loss);
    else if (now < metrics->redraw_at) return;
    metrics->redraw_at = now + 0.1;
    dtrain__progress_draw(metrics);
}

/* Add a row to the table for the first step, every progress_every-th, evaluated ones and the last.
 * Every column is one word, so that awk and sort can read it as well. */
static void dtrain__progress_table(const dtrain_metrics *metrics)
{
    const dtrain_step_record *r = &metrics->last;
    const int64_t done = r->step + 1;
    const bool first = metrics->summary.steps == 1,
               evaluated = dtrain_is_finite((float)r->val_loss);
    dtrain__line rate, left, val;
    if (!first && !evaluated && done % metrics->desc.progress_every != 0 &&
        done != metrics->desc.total_steps)
        return;
    rate.used = left.used = val.used = 0;
    dtrain__line_rate(&rate, r->tokens_per_second);
    dtrain__line_time_left(&left, metrics);
    if (evaluated) dtrain__line_add(&val, "%.4f", r->val_loss);
    if (first)
        fprintf(metrics->desc.progress, "%8s %9s %9s %9s %9s %8s %9s %8s %8s %8s %8s\n", "step",
                "loss", "val_loss", "grad_norm", "lr", "tok/s", "step_ms", "comm_ms", "exposed",
                "data_ms", "eta");
    fprintf(metrics->desc.progress, "%8lld %9.4f %9s %9.3g %9.2e %8s %9.2f %8.2f %8.2f %8.3f %8s\n",
            (long long)done, r->loss, evaluated ? val.text : "-", r->grad_norm, r->lr, rate.text,
            r->step_ms, r->comm_ms, r->exposed_comm_ms, r->data_ms, left.text);
    fflush(metrics->desc.progress);
}

/* ---- the run ----------------------------------------------------------------------------------*/

/* Open the report. Ranks other than 0 have neither file nor progress, whatever desc says. */
DTRAIN_API dtrain_result dtrain_metrics_create(dtrain_world *world, const dtrain_metrics_desc *desc,
                                               dtrain_metrics **out)
{
    if (!world || !desc || !out)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_metrics_create: world, desc or out is NULL");
    *out = NULL;
    const bool writes = dtrain_world_rank(world) == 0;
    const char *path = writes && desc->jsonl_path ? desc->jsonl_path : "";
    const size_t path_bytes = strlen(path) + 1, bytes = sizeof(dtrain_metrics) + path_bytes;
    const dtrain_allocator *allocator = &world->allocator;
    dtrain_metrics *metrics = (dtrain_metrics *)dtrain__alloc(allocator, bytes, 1, "metrics");
    if (!metrics) return DTRAIN_ERROR_MEMORY;
    metrics->allocator = *allocator;
    metrics->world = world;
    metrics->desc = *desc;
    metrics->bytes = bytes;
    metrics->path = (char *)memcpy(metrics + 1, path, path_bytes);
    metrics->file = -1;
    if (metrics->desc.progress_every == 0) metrics->desc.progress_every = 10;
    if (!writes) metrics->desc.progress = NULL;
    FILE *progress = metrics->desc.progress;
    metrics->terminal = progress && fileno(progress) >= 0 && isatty(fileno(progress));
    metrics->summary.first_loss = metrics->summary.last_loss = DTRAIN__NAN;
    metrics->summary.val_loss = DTRAIN__NAN;
    dtrain_result result = DTRAIN_OK;
    if (*path) {
        /* not blocking: a pipe that nobody reads must not hold training up */
        metrics->file = open(path,
                             O_WRONLY | O_CREAT | (metrics->desc.append ? O_APPEND : O_TRUNC) |
                                 O_CLOEXEC | O_NOCTTY | O_NONBLOCK,
                             0666);
        if (metrics->file < 0)
            result = dtrain_fail(DTRAIN_ERROR_FILE,
                                 "dtrain_metrics_create: the log file %s cannot be opened: %s",
                                 path, errno == ENXIO ? "nobody reads this pipe" : strerror(errno));
    }
    if (result == DTRAIN_OK) *out = metrics;
    else dtrain_metrics_destroy(metrics);
    return result;
}

/* Count a step and report it. Every rank keeps the books, so that a summary can be asked for
 * anywhere. The clock starts one step before the first record: that step has been paid for as
 * well. */
DTRAIN_API dtrain_result dtrain_metrics_step(dtrain_metrics *metrics,
                                             const dtrain_step_record *record)
{
    if (!metrics || !record)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_metrics_step: metrics or record is NULL");
    dtrain_summary *s = &metrics->summary;
    const double now = dtrain_seconds();
    if (s->steps == 0) {
        s->first_loss = record->loss;
        metrics->started = now - 1e-3 * record->step_ms;
    }
    metrics->last = metrics->recent[s->steps % DTRAIN__RECENT] = *record;
    s->steps++;
    s->last_loss = record->loss;
    if (dtrain_is_finite((float)record->val_loss)) s->val_loss = record->val_loss;
    s->tokens = record->tokens;
    s->comm_bytes += record->comm_bytes;
    s->seconds = now - metrics->started;
    if (metrics->file >= 0) dtrain__metrics_json(metrics, record);
    if (!metrics->desc.progress) return DTRAIN_OK;
    if (metrics->terminal) dtrain__progress_live(metrics);
    else dtrain__progress_table(metrics);
    return DTRAIN_OK;
}

/* Order doubles for qsort; none of them is NaN. */
static int dtrain__compare_doubles(const void *a, const void *b)
{
    double x, y;
    memcpy(&x, a, sizeof x);
    memcpy(&y, b, sizeof y);
    return (x > y) - (x < y);
}

/* Compute the median of a field of the recent records, which lies at `offset`; NaN when none of
 * its values is finite. */
static double dtrain__median(const dtrain_metrics *metrics, size_t offset)
{
    const int64_t count = dtrain__min(metrics->summary.steps, DTRAIN__RECENT);
    double sorted[DTRAIN__RECENT];
    size_t n = 0;
    for (int64_t i = 0; i < count; i++) {
        memcpy(&sorted[n], (const char *)&metrics->recent[i] + offset, sizeof *sorted);
        if (dtrain_is_finite((float)sorted[n])) n++;
    }
    if (n == 0) return DTRAIN__NAN;
    qsort(sorted, n, sizeof *sorted, dtrain__compare_doubles);
    return 0.5 * (sorted[(n - 1) / 2] + sorted[n / 2]);
}

DTRAIN_API void dtrain_metrics_summary(const dtrain_metrics *metrics, dtrain_summary *summary)
{
    if (!summary) return;
    memset(summary, 0, sizeof *summary);
    if (!metrics) return;
    *summary = metrics->summary;
    summary->tokens_per_second =
        dtrain__median(metrics, offsetof(dtrain_step_record, tokens_per_second));
    summary->step_ms = dtrain__median(metrics, offsetof(dtrain_step_record, step_ms));
    summary->comm_ms = dtrain__median(metrics, offsetof(dtrain_step_record, comm_ms));
    summary->exposed_comm_ms =
        dtrain__median(metrics, offsetof(dtrain_step_record, exposed_comm_ms));
    summary->data_ms = dtrain__median(metrics, offsetof(dtrain_step_record, data_ms));
    summary->scaling = summary->step_ms > 0
                           ? (summary->step_ms - summary->exposed_comm_ms) / summary->step_ms
                           : DTRAIN__NAN;
}

/* End the report; a second call finds nothing left to do. The file's errors are told here, where
 * the training is over and an error stops nothing. */
DTRAIN_API dtrain_result dtrain_metrics_finish(dtrain_metrics *metrics)
{
    if (!metrics)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_metrics_finish: metrics is NULL");
    if (metrics->terminal && metrics->desc.progress && metrics->summary.steps > 0) {
        dtrain__progress_draw(metrics); /* the rate limit may have kept the last step back */
        fprintf(metrics->desc.progress, "\n");
        fflush(metrics->desc.progress);
    }
    metrics->desc.progress = NULL;
    if (metrics->file < 0) return DTRAIN_OK;
    dtrain__metrics_json_final(metrics);
    /* Network file systems report a failed write here. */
    const bool closed = close(metrics->file) == 0 || errno == EINTR;
    metrics->file = -1;
    if (!metrics->lost_lines && closed) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_FILE,
                       "dtrain_metrics_finish: %llu of %llu lines of the log file %s could not be "
                       "written%s",
                       (unsigned long long)metrics->lost_lines, (unsigned long long)metrics->lines,
                       metrics->path, closed ? "" : ", and closing it failed");
}

DTRAIN_API void dtrain_metrics_destroy(dtrain_metrics *metrics)
{
    if (!metrics) return;
    const dtrain_allocator allocator = metrics->allocator;
    dtrain_metrics_finish(metrics);
    dtrain__free(&allocator, metrics, metrics->bytes, 1);
}
