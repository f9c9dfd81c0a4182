/* Progress for people
 *
 * One live line on a terminal, a table elsewhere.
 *
 *     terminal   step 120/2000 [>         ] loss 3.4121  |g| 0.914  lr 9.8e-04  41.2k tok/s ...
 *     elsewhere      step      loss  val_loss grad_norm        lr    tok/s ...
 *                     120    3.4121         -     0.914  9.80e-04    41.2k ...
 *
 * The live line moves the cursor, so a terminal that cannot move it (TERM=dumb, or no TERM) gets the
 * table. The line is drawn at most ten times a second. The bar is green, unless NO_COLOR is set
 * (no-color.org). */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/result.h"
#include "world/world.h"
#include "train/trainer.h"
#include "monitor/metrics.h"
#include "monitor/monitor_internal.h"

#include <sys/ioctl.h> /* TIOCGWINSZ: the width of the terminal */

#define DTRAIN__LINE_ROOM 512

/* Add "950", "41.2k", "1.30M". */
static void dtrain__line_rate(dtrain__line *text, double value)
{
    if (value < 1e3) dtrain__line_add(text, "%.0f", value);
    else if (value < 1e6) dtrain__line_add(text, "%.1fk", value * 1e-3);
    else if (value < 1e9) dtrain__line_add(text, "%.2fM", value * 1e-6);
    else dtrain__line_add(text, "%.2fG", value * 1e-9);
}

/* Add the time until total_steps at the pace so far: "0:12", "1:02:03", "-" when unknown. */
static void dtrain__line_time_left(dtrain__line *text, const dtrain_metrics *metrics)
{
    const int64_t steps = metrics->desc.total_steps - metrics->last.step;
    const double seconds =
        metrics->summary.seconds / (double)metrics->summary.steps * (double)steps;
    if (steps < 0 || metrics->desc.total_steps <= 0 || !(seconds <= 1e9)) {
        dtrain__line_add(text, "-");
        return;
    }
    const long long whole = (long long)(seconds + 0.5);
    if (whole >= 3600) dtrain__line_add(text, "%lld:", whole / 3600);
    dtrain__line_add(text, whole >= 3600 ? "%02lld:%02lld" : "%lld:%02lld", whole / 60 % 60,
                     whole % 60);
}

static dtrain_result dtrain__console_write(dtrain__console *console, const char *format, ...)
    DTRAIN__PRINTF(2, 3);
static dtrain_result dtrain__console_write(dtrain__console *console, const char *format, ...)
{
    dtrain__quiet quiet;
    va_list args;
    va_start(args, format);
    dtrain__quiet_begin(&quiet);
    errno = 0;
    const bool written = vfprintf(console->file, format, args) >= 0 && fflush(console->file) == 0;
    dtrain__quiet_end(&quiet);
    va_end(args);
    if (written) return DTRAIN_OK;
    clearerr(console->file);
    return dtrain_fail(DTRAIN_ERROR_FILE, "the progress cannot be written: %s", strerror(errno));
}

/* Draw the live line over itself. It is cut at the width of the terminal, because '\r' goes back
 * over one row only; so the most important figures come first. */
static dtrain_result dtrain__console_draw(dtrain_metrics *metrics)
{
    const dtrain_step_record *r = &metrics->last;
    const int64_t done = r->step, total = metrics->desc.total_steps;
    dtrain__console *console = &metrics->console;
    char bytes[DTRAIN__LINE_ROOM];
    dtrain__line line = {bytes, 0, sizeof bytes};
    size_t bar_at = 0, bar_end = 0;
    struct winsize size;
    dtrain__line_add(&line, "step %lld", (long long)done);
    if (total > 0) {
        char bar[] = "[          ]";
        const int64_t width = (int64_t)sizeof bar - 3;
        const int64_t filled =
            done < total ? (int64_t)((double)done / (double)total * (double)width) : width;
        memset(bar + 1, '=', (size_t)filled);
        if (filled < width) bar[1 + filled] = '>';
        dtrain__line_add(&line, "/%lld ", (long long)total);
        bar_at = line.used;
        dtrain__line_add(&line, "%s", bar);
        bar_end = line.used;
    }
    dtrain__line_add(&line, " loss %.4f  |g| %.3g  lr %.1e  ", r->loss, r->grad_norm, r->lr);
    dtrain__line_rate(&line, r->tokens_per_second);
    dtrain__line_add(&line, " tok/s  %.1f ms", r->step_ms);
    if (total > 0) {
        dtrain__line_add(&line, "  eta ");
        dtrain__line_time_left(&line, metrics);
    }
    if (dtrain_comm_size(metrics->comm) > 1)
        dtrain__line_add(&line, "  comm %.1f ms (%.1f exposed)", r->comm_ms, r->exposed_comm_ms);
    if (r->data_ms > 0.01 * r->step_ms) dtrain__line_add(&line, "  data %.1f ms", r->data_ms);
    if (ioctl(fileno(console->file), TIOCGWINSZ, &size) == 0 && size.ws_col > 1)
        line.used = (size_t)dtrain__min((int64_t)line.used, size.ws_col - 1);
    if (!console->color || bar_end > line.used) bar_at = bar_end = 0;
    return dtrain__console_write(console, "\r%.*s%s%.*s%s%.*s\033[K", (int)bar_at, line.text,
                                 bar_end ? "\033[32m" : "", (int)(bar_end - bar_at),
                                 line.text + bar_at, bar_end ? "\033[0m" : "",
                                 (int)(line.used - bar_end), line.text + bar_end);
}

/* Show the step on a terminal. An evaluation is a line that stays, with the live line below it. */
static dtrain_result dtrain__console_live(dtrain_metrics *metrics)
{
    const dtrain_step_record *r = &metrics->last;
    dtrain__console *console = &metrics->console;
    const double now = dtrain_seconds();
    dtrain_result result = DTRAIN_OK;
    if (dtrain__finite(r->val_loss))
        result = dtrain__console_write(console, "\r\033[Kstep %lld  loss %.4f  val_loss %.4f\n",
                                       (long long)r->step, r->loss, r->val_loss);
    else if (now < console->redraw_at) return DTRAIN_OK;
    console->redraw_at = now + 0.1;
    const dtrain_result drawn = dtrain__console_draw(metrics);
    return result == DTRAIN_OK ? drawn : result;
}

/* Add a row to the table for the first step, every progress_every-th, evaluated ones and the last.
 * Every column is one word, so that awk and sort can read it as well. */
static dtrain_result dtrain__console_table(dtrain_metrics *metrics)
{
    const dtrain_step_record *r = &metrics->last;
    const int64_t done = r->step;
    const bool first = metrics->summary.steps == 1, evaluated = dtrain__finite(r->val_loss);
    char words[3][64];
    dtrain__line rate = {words[0], 0, sizeof words[0]}, left = {words[1], 0, sizeof words[1]},
                 val = {words[2], 0, sizeof words[2]};
    dtrain_result result = DTRAIN_OK;
    if (!first && !evaluated && done % metrics->desc.progress_every != 0 &&
        done != metrics->desc.total_steps)
        return DTRAIN_OK;
    dtrain__line_rate(&rate, r->tokens_per_second);
    dtrain__line_time_left(&left, metrics);
    if (evaluated) dtrain__line_add(&val, "%.4f", r->val_loss);
    if (first)
        result = dtrain__console_write(&metrics->console,
                                       "%8s %9s %9s %9s %9s %8s %9s %8s %8s %8s %8s\n", "step",
                                       "loss", "val_loss", "grad_norm", "lr", "tok/s", "step_ms",
                                       "comm_ms", "exposed", "data_ms", "eta");
    const dtrain_result row = dtrain__console_write(
        &metrics->console, "%8lld %9.4f %9s %9.3g %9.2e %8s %9.2f %8.2f %8.2f %8.3f %8s\n",
        (long long)done, r->loss, evaluated ? val.text : "-", r->grad_norm, r->lr, rate.text,
        r->step_ms, r->comm_ms, r->exposed_comm_ms, r->data_ms, left.text);
    return result == DTRAIN_OK ? row : result;
}

DTRAIN__PRIVATE dtrain_result dtrain__console_step(void *user, const dtrain_metrics_sample *sample)
{
    dtrain_metrics *metrics = (dtrain_metrics *)user;
    (void)sample;
    return metrics->console.terminal ? dtrain__console_live(metrics)
                                     : dtrain__console_table(metrics);
}

/* Draw the last step, which may have come too soon after another one, and end the live line. */
DTRAIN__PRIVATE dtrain_result dtrain__console_finish(void *user, const dtrain_summary *summary)
{
    dtrain_metrics *metrics = (dtrain_metrics *)user;
    if (!metrics->console.terminal || summary->steps == 0) return DTRAIN_OK;
    const dtrain_result drawn = dtrain__console_draw(metrics);
    const dtrain_result ended = dtrain__console_write(&metrics->console, "\n");
    return drawn == DTRAIN_OK ? ended : drawn;
}

/* Ask whether the file is a terminal that can redraw the live line, and may have colors. */
DTRAIN__PRIVATE dtrain_result dtrain__console_open(void *user, const dtrain_metrics_desc *desc,
                                                   const dtrain_metrics_sample *sample)
{
    dtrain__console *console = &((dtrain_metrics *)user)->console;
    FILE *file = desc->progress;
    const char *term = getenv("TERM"), *no_color = getenv("NO_COLOR");
    (void)sample;
    console->file = file;
    console->terminal =
        fileno(file) >= 0 && isatty(fileno(file)) && term && term[0] && strcmp(term, "dumb") != 0;
    console->color = !no_color || !no_color[0];
    return DTRAIN_OK;
}
