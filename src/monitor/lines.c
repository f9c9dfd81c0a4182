/* A line a step: JSON, and CSV by RFC 4180
 *
 * A JSON line is an object in which what was not measured is left out, and what is not finite is
 * null. The last line has the summary and "final": true: a script reads it with `tail -n 1`.
 *
 * A CSV file has a header and a column for every metric that is not DTRAIN_METRIC_FIXED: what is
 * measured changes within a run, and columns may not. What was not measured is an empty field; what
 * is not finite is nan, inf or -inf, which Python, R and pandas read. Names and numbers need no
 * quotes. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/result.h"
#include "world/world.h"
#include "state/json_internal.h"
#include "monitor/metrics.h"
#include "monitor/monitor_internal.h"

/* ---- JSON -------------------------------------------------------------------------------------*/

/* Add `, "key": value`. */
static void dtrain__json_add(dtrain__text *text, const char *key, double value, uint32_t flags)
{
    dtrain__text_add(text, ", \"%s\": ", key);
    dtrain__text_number(text, value, flags, "null", "null", "null");
}

/* Add the metrics of which DTRAIN_METRIC_FIXED is set, or not. */
static void dtrain__json_add_known(dtrain__text *text, const dtrain_metrics_sample *sample,
                                   uint32_t fixed)
{
    for (size_t i = 0; i < sample->count; i++)
        if (sample->known[i] && (sample->metrics[i].flags & DTRAIN_METRIC_FIXED) == fixed)
            dtrain__json_add(text, sample->metrics[i].name, sample->values[i],
                             sample->metrics[i].flags);
    dtrain__text_add(text, "}\n");
}

DTRAIN__PRIVATE dtrain_result dtrain__jsonl_open(void *user, const dtrain_metrics_desc *desc,
                                                 const dtrain_metrics_sample *sample)
{
    (void)sample;
    return dtrain__records_open(&((dtrain_metrics *)user)->jsonl, desc->jsonl_path, desc->append);
}

DTRAIN__PRIVATE dtrain_result dtrain__jsonl_step(void *user, const dtrain_metrics_sample *sample)
{
    dtrain_metrics *metrics = (dtrain_metrics *)user;
    dtrain__text *text = dtrain__record_begin(metrics);
    dtrain__text_add(text, "{\"step\": %lld", (long long)sample->step);
    dtrain__json_add_known(text, sample, 0);
    return dtrain__records_append(&metrics->jsonl, text);
}

DTRAIN__PRIVATE dtrain_result dtrain__jsonl_finish(void *user, const dtrain_summary *s)
{
    dtrain_metrics *metrics = (dtrain_metrics *)user;
    const uint32_t integer = DTRAIN_METRIC_INTEGER;
    dtrain__text *text = dtrain__record_begin(metrics);
    dtrain__text_add(text, "{\"final\": true");
    dtrain__json_add(text, "step", s->steps ? (double)metrics->last.step : DTRAIN__NAN, integer);
    dtrain__json_add(text, "loss", s->last_loss, 0);
    if (dtrain__finite(s->val_loss)) dtrain__json_add(text, "val_loss", s->val_loss, 0);
    dtrain__json_add(text, "ranks", dtrain_comm_size(metrics->comm), integer);
    dtrain__json_add(text, "steps", (double)s->steps, integer);
    dtrain__json_add(text, "tokens", (double)s->tokens, integer);
    dtrain__json_add(text, "first_loss", s->first_loss, 0);
    dtrain__json_add(text, "last_loss", s->last_loss, 0);
    dtrain__json_add(text, "seconds", s->seconds, 0);
    dtrain__json_add(text, "tokens_per_second", s->tokens_per_second, 0);
    dtrain__json_add(text, "step_ms", s->step_ms, 0);
    dtrain__json_add(text, "comm_ms", s->comm_ms, 0);
    dtrain__json_add(text, "exposed_comm_ms", s->exposed_comm_ms, 0);
    dtrain__json_add(text, "data_ms", s->data_ms, 0);
    dtrain__json_add(text, "scaling", s->scaling, 0);
    dtrain__json_add(text, "comm_bytes", (double)s->comm_bytes, integer);
    dtrain__json_add_known(text, &metrics->sample, DTRAIN_METRIC_FIXED);
    const dtrain_result result = dtrain__records_append(&metrics->jsonl, text);
    const dtrain_result closed = dtrain__records_close(&metrics->jsonl);
    return result == DTRAIN_OK ? closed : result;
}

/* ---- CSV --------------------------------------------------------------------------------------*/

/* Compare the first line of a file with the header. */
static dtrain_result dtrain__csv_same(const char *path, const dtrain__text *header)
{
    char line[16384]; /* the header is shorter */
    const size_t bytes = header->failed || header->bytes > sizeof line ? 0 : header->bytes;
    const int reader = dtrain__open(path, O_RDONLY);
    const ssize_t got = reader < 0 ? -1 : pread(reader, line, bytes, 0);
    if (reader >= 0) close(reader);
    if (bytes && got == (ssize_t)bytes && memcmp(line, header->at, bytes) == 0) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_FILE,
                       "dtrain_metrics_create: the table %s has other columns than this run would "
                       "append (its first line differs, or cannot be read); use another file",
                       path);
}

DTRAIN__PRIVATE dtrain_result dtrain__csv_open(void *user, const dtrain_metrics_desc *desc,
                                               const dtrain_metrics_sample *sample)
{
    dtrain_metrics *metrics = (dtrain_metrics *)user;
    dtrain__text *text = dtrain__record_begin(metrics);
    dtrain__text_add(text, "step");
    for (size_t i = 0; i < sample->count; i++)
        if (!(sample->metrics[i].flags & DTRAIN_METRIC_FIXED))
            dtrain__text_add(text, ",%s", sample->metrics[i].name);
    dtrain__text_add(text, "\r\n");
    DTRAIN__TRY(dtrain__records_open(&metrics->csv, desc->csv_path, desc->append));
    if (desc->append && metrics->csv.size > 0) return dtrain__csv_same(desc->csv_path, text);
    return dtrain__records_append(&metrics->csv, text);
}

DTRAIN__PRIVATE dtrain_result dtrain__csv_step(void *user, const dtrain_metrics_sample *sample)
{
    dtrain_metrics *metrics = (dtrain_metrics *)user;
    dtrain__text *text = dtrain__record_begin(metrics);
    dtrain__text_add(text, "%lld", (long long)sample->step);
    for (size_t i = 0; i < sample->count; i++) {
        if (sample->metrics[i].flags & DTRAIN_METRIC_FIXED) continue;
        dtrain__text_append(text, ",", 1);
        if (sample->known[i])
            dtrain__text_number(text, sample->values[i], sample->metrics[i].flags, "nan", "inf",
                                "-inf");
    }
    dtrain__text_add(text, "\r\n");
    return dtrain__records_append(&metrics->csv, text);
}

DTRAIN__PRIVATE dtrain_result dtrain__csv_finish(void *user, const dtrain_summary *summary)
{
    (void)summary;
    return dtrain__records_close(&((dtrain_metrics *)user)->csv);
}
