/* Progress for people
 *
 * One live line on a terminal, a table elsewhere.
 *
 *     terminal   step 120/2000 [>         ] 6%  eta 3:12  loss 3.4121  |g| 0.914  lr 9.8e-04 ...
 *     elsewhere      step      loss  val_loss grad_norm        lr    tok/s ...      eta  done
 *                     120    3.4121         -     0.914  9.80e-04    41.2k ...     3:12    6%
 *
 * The live line moves the cursor, so a terminal that cannot move it (TERM=dumb, or no TERM) gets
 * the table. The line is drawn at most ten times a second. The bar is green, unless NO_COLOR is set
 * (no-color.org). */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/json_internal.h"
#include "core/result.h"
#include "world/world.h"
#include "train/trainer.h"
#include "monitor/metrics.h"
#include "monitor/monitor_internal.h"

#include <sys/ioctl.h> /* TIOCGWINSZ: the width of the terminal */

#define DTRAIN__CONSOLE_WORD 32 /* bytes of a word of a line, its 0 included */

/* Write "950", "41.2k", "1.30M". */
static const char *dtrain__console_rate(double value, char *word)
{
    const int power = value < 1e3 ? 0 : value < 1e6 ? 1 : value < 1e9 ? 2 : 3;
    static const char *const formats[] = {"%.0f", "%.1fk", "%.2fM", "%.2fG"};
    static const double units[] = {1, 1e-3, 1e-6, 1e-9};
    snprintf(word, DTRAIN__CONSOLE_WORD, formats[power], value * units[power]);
    return word;
}

/* Write the time until total_steps at the pace so far: "0:12", "1:02:03", "-" when unknown. */
static const char *dtrain__console_time_left(const dtrain_metrics *metrics, char *word)
{
    const int64_t steps = metrics->desc.total_steps - metrics->last.step;
    const double seconds =
        metrics->summary.seconds / (double)metrics->summary.steps * (double)steps;
    if (steps < 0 || metrics->desc.total_steps <= 0 || !(seconds <= 1e9)) return "-";
    const long long whole = (long long)(seconds + 0.5), hours = whole / 3600;
    const int used = hours ? snprintf(word, DTRAIN__CONSOLE_WORD, "%lld:", hours) : 0;
    snprintf(word + used, DTRAIN__CONSOLE_WORD - (size_t)used,
             hours ? "%02lld:%02lld" : "%lld:%02lld", whole / 60 % 60, whole % 60);
    return word;
}

DTRAIN__PRINTF(2, 3)
static dtrain_result dtrain__console_write(const dtrain_metrics *metrics, const char *format, ...)
{
    FILE *file = metrics->desc.progress;
    dtrain__quiet quiet;
    va_list args;
    va_start(args, format);
    dtrain__quiet_begin(&quiet);
    errno = 0;
    const bool written = vfprintf(file, format, args) >= 0 && fflush(file) == 0;
    dtrain__quiet_end(&quiet);
    va_end(args);
    if (written) return DTRAIN_OK;
    clearerr(file);
    return dtrain__file_fail("the progress", "written");
}

/* Write the steps done in whole percent, rounded down so that 100% is the end; "-" when unknown. */
static const char *dtrain__console_done(const dtrain_metrics *metrics, char *word)
{
    const double done = (double)metrics->last.step, total = (double)metrics->desc.total_steps;
    if (total <= 0) return "-";
    snprintf(word, DTRAIN__CONSOLE_WORD, "%.0f%%", floor(100 * (done < total ? done / total : 1)));
    return word;
}

/* Draw the live line over itself. '\r' goes back over one row only, so figures that the width of
 * the terminal has no room for are left out: two spaces stand before each, the most important
 * first. The bar needs a terminal of 60 columns. */
static dtrain_result dtrain__console_draw(dtrain_metrics *metrics)
{
    const dtrain_step_record *r = &metrics->last;
    const int64_t done = r->step, total = metrics->desc.total_steps;
    char rate[DTRAIN__CONSOLE_WORD], word[DTRAIN__CONSOLE_WORD], bar[] = "[          ]";
    dtrain__text *line = dtrain__record_begin(metrics);
    size_t bar_at = 0, bar_end = 0;
    struct winsize size;
    const bool known = ioctl(fileno(metrics->desc.progress), TIOCGWINSZ, &size) == 0;
    const size_t room = known && size.ws_col > 1 ? size.ws_col - 1u : 79;
    dtrain__text_add(line, "step %lld", (long long)done);
    if (total > 0) {
        const int64_t width = (int64_t)sizeof bar - 3;
        const int64_t filled =
            done < total ? (int64_t)((double)done / (double)total * (double)width) : width;
        memset(bar + 1, '=', (size_t)filled);
        if (filled < width) bar[1 + filled] = '>';
        dtrain__text_add(line, "/%lld ", (long long)total);
        bar_at = line->bytes;
        dtrain__text_add(line, "%s", room < 59 ? "" : bar);
        bar_end = line->bytes;
        dtrain__text_add(line, "%s%s", room < 59 ? "" : " ", dtrain__console_done(metrics, word));
        dtrain__text_add(line, "  eta %s", dtrain__console_time_left(metrics, word));
    }
    dtrain__text_add(line, "  loss %.4f  |g| %.3f  lr %.1e  %s tok/s  %.1f ms", r->loss,
                     r->grad_norm, r->lr, dtrain__console_rate(r->tokens_per_second, rate),
                     r->step_ms);
    if (dtrain_comm_size(metrics->comm) > 1)
        dtrain__text_add(line, "  comm %.1f ms (%.1f exposed)", r->comm_ms, r->exposed_comm_ms);
    if (r->data_ms > 0.01 * r->step_ms) dtrain__text_add(line, "  data %.1f ms", r->data_ms);
    if (line->failed) return DTRAIN_ERROR_MEMORY;
    if (line->bytes > room) {
        size_t end = room;
        while (end > 0 && memcmp(line->at + end, "  ", 2) != 0) end--;
        line->bytes = end > 0 ? end : room; /* not even the first fits: a part of it */
    }
    if (!metrics->console.color) bar_at = bar_end = 0;
    return dtrain__console_write(metrics, "\r%.*s%s%.*s%s%.*s\033[K", (int)bar_at, line->at,
                                 bar_end ? "\033[32m" : "", (int)(bar_end - bar_at),
                                 line->at + bar_at, bar_end ? "\033[0m" : "",
                                 (int)(line->bytes - bar_end), line->at + bar_end);
}

/* Show a step. On a terminal an evaluation is a line that stays, with the live line below it. A
 * table has rows of the first step, every progress_every-th, evaluated ones and the last; each of
 * its columns is one word, so that awk and sort can read it as well. */
DTRAIN__PRIVATE dtrain_result dtrain__console_step(void *user, const dtrain_metrics_sample *sample)
{
    dtrain_metrics *metrics = (dtrain_metrics *)user;
    const dtrain_step_record *r = sample->record;
    const bool first = metrics->summary.steps == 1, evaluated = dtrain__finite(r->val_loss);
    char rate[DTRAIN__CONSOLE_WORD], left[DTRAIN__CONSOLE_WORD], val[DTRAIN__CONSOLE_WORD] = "-";
    char share[DTRAIN__CONSOLE_WORD];
    dtrain_result result = DTRAIN_OK, last;
    if (metrics->console.terminal) {
        const double now = dtrain_seconds();
        if (evaluated)
            result = dtrain__console_write(metrics, "\r\033[Kstep %lld  loss %.4f  val_loss %.4f\n",
                                           (long long)r->step, r->loss, r->val_loss);
        else if (now < metrics->console.redraw_at) return DTRAIN_OK;
        metrics->console.redraw_at = now + 0.1;
        last = dtrain__console_draw(metrics);
        return result == DTRAIN_OK ? last : result;
    }
    if (!first && !evaluated && r->step % metrics->desc.progress_every != 0 &&
        r->step != metrics->desc.total_steps)
        return DTRAIN_OK;
    if (evaluated) snprintf(val, sizeof val, "%.4f", r->val_loss);
    if (first)
        result = dtrain__console_write(metrics, "%8s %9s %9s %9s %9s %8s %9s %8s %8s %8s %8s %5s\n",
                                       "step", "loss", "val_loss", "grad_norm", "lr", "tok/s",
                                       "step_ms", "comm_ms", "exposed", "data_ms", "eta", "done");
    last = dtrain__console_write(
        metrics, "%8lld %9.4f %9s %9.3f %9.2e %8s %9.2f %8.2f %8.2f %8.3f %8s %5s\n",
        (long long)r->step, r->loss, val, r->grad_norm, r->lr,
        dtrain__console_rate(r->tokens_per_second, rate), r->step_ms, r->comm_ms,
        r->exposed_comm_ms, r->data_ms, dtrain__console_time_left(metrics, left),
        dtrain__console_done(metrics, share));
    return result == DTRAIN_OK ? last : result;
}

/* Draw the last step, which may have come too soon after another one, and end the live line. */
DTRAIN__PRIVATE dtrain_result dtrain__console_finish(void *user, const dtrain_summary *summary)
{
    dtrain_metrics *metrics = (dtrain_metrics *)user;
    if (!metrics->console.terminal || summary->steps == 0) return DTRAIN_OK;
    const dtrain_result drawn = dtrain__console_draw(metrics);
    const dtrain_result ended = dtrain__console_write(metrics, "\n");
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
    console->terminal =
        fileno(file) >= 0 && isatty(fileno(file)) && term && term[0] && strcmp(term, "dumb") != 0;
    console->color = !no_color || !no_color[0];
    return DTRAIN_OK;
}
