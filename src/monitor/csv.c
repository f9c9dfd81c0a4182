/* CSV by RFC 4180
 *
 * A header and one row a step, with a column for every metric that is not DTRAIN_METRIC_FIXED:
 * which ones were measured changes within a run, and columns may not. What was not measured is an
 * empty field; what is not finite is nan, inf or -inf, which Python, R and pandas read. Names and
 * numbers need no quotes. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/result.h"
#include "monitor/metrics.h"
#include "monitor/monitor_internal.h"

static void dtrain__csv_header(dtrain__line *text)
{
    const dtrain_metric *table = dtrain__metric_table();
    dtrain__line_add(text, "step");
    for (int i = 0; i < DTRAIN__METRIC_COUNT; i++)
        if (!(table[i].flags & DTRAIN_METRIC_FIXED)) dtrain__line_add(text, ",%s", table[i].name);
    dtrain__line_add(text, "\r\n");
}

/* Compare the first line of a file with the header. */
static dtrain_result dtrain__csv_same(const char *path, const dtrain__line *header)
{
    char line[DTRAIN__LINE_SPACE];
    const int reader = dtrain__open(path, O_RDONLY);
    const ssize_t got = reader < 0 ? -1 : pread(reader, line, header->used, 0);
    if (reader >= 0) close(reader);
    if (got == (ssize_t)header->used && memcmp(line, header->text, header->used) == 0)
        return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_FILE,
                       "dtrain_metrics_create: the table %s has other columns than this run would "
                       "append (its first line differs, or cannot be read); use another file",
                       path);
}

static dtrain_result dtrain__csv_open(void *user, const dtrain_metrics_desc *desc,
                                      const dtrain_metrics_sample *sample)
{
    dtrain_metrics *metrics = (dtrain_metrics *)user;
    dtrain__line text = {metrics->scratch, 0, sizeof metrics->scratch};
    dtrain__csv_header(&text);
    (void)sample;
    DTRAIN__TRY(dtrain__records_open(&metrics->csv, desc->csv_path, desc->append));
    if (desc->append && metrics->csv.size > 0) return dtrain__csv_same(desc->csv_path, &text);
    return dtrain__records_append(&metrics->csv, text.text, text.used);
}

static dtrain_result dtrain__csv_step(void *user, const dtrain_metrics_sample *sample)
{
    dtrain_metrics *metrics = (dtrain_metrics *)user;
    dtrain__line text = {metrics->scratch, 0, sizeof metrics->scratch};
    dtrain__line_add(&text, "%lld", (long long)sample->step);
    for (size_t i = 0; i < sample->count; i++) {
        if (sample->metrics[i].flags & DTRAIN_METRIC_FIXED) continue;
        dtrain__line_add(&text, ",");
        if (!sample->known[i]) continue;
        if (dtrain__finite(sample->values[i]))
            dtrain__line_number(&text, sample->values[i], sample->metrics[i].flags);
        else
            dtrain__line_add(&text, "%s",
                             sample->values[i] > 0   ? "inf"
                             : sample->values[i] < 0 ? "-inf"
                                                     : "nan");
    }
    dtrain__line_add(&text, "\r\n");
    return dtrain__records_append(&metrics->csv, text.text, text.used);
}

static dtrain_result dtrain__csv_finish(void *user, const dtrain_summary *summary)
{
    (void)summary;
    return dtrain__records_close(&((dtrain_metrics *)user)->csv);
}

DTRAIN__PRIVATE dtrain__sink dtrain__csv_sink(void)
{
    const dtrain__sink sink = {
        {false, "csv", dtrain__csv_open, dtrain__csv_step, NULL, dtrain__csv_finish, NULL},
        "rows of the table",
        false};
    return sink;
}
