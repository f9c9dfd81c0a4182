/* Progress for people
 *
 * One live line on a terminal, a table elsewhere.
 *
 *     terminal   step 120/2000 [>         ] 6%  eta 3:12  loss 3.4121  |g| 0.914  lr 9.8e-04 ...
 *     elsewhere      step      loss  val_loss grad_norm        lr    tok/s ...      eta  done
 *                     120    3.4121         -     0.914  9.80e-04    41.2k ...     3:12    6%
 *
 * The live line moves the cursor; a terminal that cannot (TERM=dumb, or no TERM) gets the table.
 * The line is drawn at most ten times a second. The bar is green, unless NO_COLOR is set
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

#define DTRAIN__CONSOLE_WORD 32 /* bytes of a word of a line, with its 0 */

/* Write "950", "41.2k", "1.30M". */
static const char *dtrain__console_rate(double value, char *word)
{
    const int power = value < 1e3 ? 0 : value < 1e6 ? 1 : value < 1e9 ? 2 : 3;
    static const char *const formats[] = {"%.0f", "%.1fk", "%.2fM", "%.2fG"};
    static const double units[] = {1, 1e-3, 1e-6, 1e-9};
    snprintf(word, DTRAIN__CONSOLE_WORD, formats[power], value * units[power]);
    return word;
}

/* Write the time left at the pace so far: "0:12", "1:02:03", "-" if unknown. */
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

/* Write the steps done in percent, rounded down: 100% is the end; "-" if unknown. */
static const char *dtrain__console_done(const dtrain_metrics *metrics, char *word)
{
    const double done = (double)metrics->last.step, total = (double)metrics->desc.total_steps;
    if (total <= 0) return "-";
    snprintf(word, DTRAIN__CONSOLE_WORD, "%.0f%%", floor(100 * (done < total ? done / total : 1)));
    return word;
}

/* Add the live line, over the last one. '\r' goes back over one row only: figures that do not fit
 * the width of the terminal are left out. Two spaces stand before each figure, the most important
 * come first. The bar needs 60 columns. */
static void dtrain__console_draw(dtrain_metrics *metrics, dtrain__text *line)
{
    const dtrain_step_record *r = &metrics->last;
    const int64_t done = r->step, total = metrics->desc.total_steps;
    char rate[DTRAIN__CONSOLE_WORD], word[DTRAIN__CONSOLE_WORD], bar[] = "[          ]";
    struct winsize size;
    const bool known = ioctl(fileno(metrics->desc.progress), TIOCGWINSZ, &size) == 0;
    const size_t room = known && size.ws_col > 1 ? size.ws_col - 1u : 79;
    dtrain__text_add(line, "\r");
    size_t begin = line->bytes; /* begin of the visible text */
    dtrain__text_add(line, "step %lld", (long long)done);
    if (total > 0) {
        const int64_t width = (int64_t)sizeof bar - 3;
        const int64_t filled =
            done < total ? (int64_t)((double)done / (double)total * (double)width) : width;
        const char *color = metrics->console.color ? "\033[32m" : "";
        const char *plain = metrics->console.color ? "\033[0m" : "";
        memset(bar + 1, '=', (size_t)filled);
        if (filled < width) bar[1 + filled] = '>';
        dtrain__text_add(line, "/%lld ", (long long)total);
        if (room >= 59) {
            dtrain__text_add(line, "%s%s%s ", color, bar, plain);
            begin += strlen(color) + strlen(plain);
        }
        dtrain__text_add(line, "%s", dtrain__console_done(metrics, word));
        dtrain__text_add(line, "  eta %s", dtrain__console_time_left(metrics, word));
    }
    const double step_ms = dtrain_record_value(r, "step_ms");
    const double data_ms = dtrain_record_value(r, "data_ms");
    dtrain__console_rate(dtrain_record_value(r, "tokens_per_second"), rate);
    dtrain__text_add(line, "  loss %.4f  |g| %.3f  lr %.1e  %s tok/s  %.1f ms", r->loss,
                     r->grad_norm, r->lr, rate, step_ms);
    if (dtrain_comm_size(metrics->comm) > 1)
        dtrain__text_add(line, "  comm %.1f ms (%.1f exposed)", dtrain_record_value(r, "comm_ms"),
                         dtrain_record_value(r, "exposed_comm_ms"));
    if (data_ms > 0.01 * step_ms) dtrain__text_add(line, "  data %.1f ms", data_ms);
    if (!line->failed && line->bytes - begin > room) {
        size_t end = begin + room;
        while (end > begin && memcmp(line->at + end, "  ", 2) != 0) end--;
        line->bytes = end > begin ? end : begin + room; /* cut the first figure if it must be */
    }
    dtrain__text_add(line, "\033[K");
}

/* Show a step. On a terminal an evaluation is a line that stays, with the live line below it; the
 * end draws the last step, which can have come too soon after another step. A table has rows for
 * the first step, every progress_every-th, evaluated steps and the last. Each column is one word,
 * so that awk and sort can read the table. */
DTRAIN__PRIVATE dtrain_result dtrain__console_sink(void *user, const dtrain_metrics_sample *sample)
{
    dtrain_metrics *metrics = (dtrain_metrics *)user;
    dtrain__records *file = &metrics->console.file;
    dtrain__text *text = dtrain__record_begin(metrics);
    const dtrain_step_record *r = &metrics->last;
    const bool evaluated = dtrain__finite(r->val_loss),
               end = sample->moment == DTRAIN_METRICS_FINISH;
    if (sample->moment == DTRAIN_METRICS_OPEN) { /* can lines be redrawn, and colored? */
        const char *term = getenv("TERM"), *no_color = getenv("NO_COLOR");
        file->stream = metrics->desc.progress;
        file->path = "the progress";
        metrics->console.terminal = fileno(file->stream) >= 0 && isatty(fileno(file->stream)) &&
                                    term && term[0] && strcmp(term, "dumb") != 0;
        metrics->console.color = !no_color || !no_color[0];
        return DTRAIN_OK;
    }
    if (metrics->console.terminal) {
        const double now = dtrain_seconds();
        if (metrics->summary.steps == 0) return DTRAIN_OK;
        if (!end && evaluated)
            dtrain__text_add(text, "\r\033[Kstep %lld  loss %.4f  val_loss %.4f\n",
                             (long long)r->step, r->loss, r->val_loss);
        else if (!end && now < metrics->console.redraw_at) return DTRAIN_OK;
        metrics->console.redraw_at = now + 0.1;
        dtrain__console_draw(metrics, text);
        if (end) dtrain__text_add(text, "\n");
    } else {
        if (end ||
            (metrics->summary.steps != 1 && !evaluated &&
             r->step % metrics->desc.progress_every != 0 && r->step != metrics->desc.total_steps))
            return DTRAIN_OK;
        char rate[DTRAIN__CONSOLE_WORD], left[DTRAIN__CONSOLE_WORD], share[DTRAIN__CONSOLE_WORD];
        char val[DTRAIN__CONSOLE_WORD] = "-";
        if (evaluated) snprintf(val, sizeof val, "%.4f", r->val_loss);
        if (metrics->summary.steps == 1)
            dtrain__text_add(text, "%8s %9s %9s %9s %9s %8s %9s %8s %8s %8s %8s %5s\n", "step",
                             "loss", "val_loss", "grad_norm", "lr", "tok/s", "step_ms", "comm_ms",
                             "exposed", "data_ms", "eta", "done");
        dtrain__text_add(
            text, "%8lld %9.4f %9s %9.3f %9.2e %8s %9.2f %8.2f %8.2f %8.3f %8s %5s\n",
            (long long)r->step, r->loss, val, r->grad_norm, r->lr,
            dtrain__console_rate(dtrain_record_value(r, "tokens_per_second"), rate),
            dtrain_record_value(r, "step_ms"), dtrain_record_value(r, "comm_ms"),
            dtrain_record_value(r, "exposed_comm_ms"), dtrain_record_value(r, "data_ms"),
            dtrain__console_time_left(metrics, left), dtrain__console_done(metrics, share));
    }
    return dtrain__records_append(file, text);
}
