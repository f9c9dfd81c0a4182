/* JSON lines
 *
 * One object a step, in one write. What was not measured is left out, what is not finite is null.
 * The last line has the summary and "final": true: a script reads it with `tail -n 1`. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/result.h"
#include "world/world.h"
#include "monitor/metrics.h"
#include "monitor/monitor_internal.h"

/* Add `, "key": value`. */
static void dtrain__json_add(dtrain__line *text, const char *key, double value, uint32_t flags)
{
    dtrain__line_add(text, ", \"%s\": ", key);
    if (dtrain__finite(value)) dtrain__line_number(text, value, flags);
    else dtrain__line_add(text, "null");
}

static dtrain_result dtrain__jsonl_write(dtrain_metrics *metrics, dtrain__line *text)
{
    dtrain__line_add(text, "}\n");
    return dtrain__records_append(&metrics->jsonl, text->text, text->used);
}

static dtrain_result dtrain__jsonl_open(void *user, const dtrain_metrics_desc *desc,
                                        const dtrain_metrics_sample *sample)
{
    dtrain_metrics *metrics = (dtrain_metrics *)user;
    (void)sample;
    return dtrain__records_open(&metrics->jsonl, desc->jsonl_path, desc->append);
}

static dtrain_result dtrain__jsonl_step(void *user, const dtrain_metrics_sample *sample)
{
    dtrain_metrics *metrics = (dtrain_metrics *)user;
    dtrain__line text = {metrics->scratch, 0, sizeof metrics->scratch};
    dtrain__line_add(&text, "{\"step\": %lld", (long long)sample->step);
    for (size_t i = 0; i < sample->count; i++)
        if (sample->known[i] && !(sample->metrics[i].flags & DTRAIN_METRIC_FIXED))
            dtrain__json_add(&text, sample->metrics[i].name, sample->values[i],
                             sample->metrics[i].flags);
    return dtrain__jsonl_write(metrics, &text);
}

static dtrain_result dtrain__jsonl_finish(void *user, const dtrain_summary *s)
{
    dtrain_metrics *metrics = (dtrain_metrics *)user;
    const dtrain_metric *table = dtrain__metric_table();
    const uint32_t integer = DTRAIN_METRIC_INTEGER;
    dtrain__line text = {metrics->scratch, 0, sizeof metrics->scratch};
    dtrain__line_add(&text, "{\"final\": true");
    dtrain__json_add(&text, "step", s->steps ? (double)metrics->last.step : DTRAIN__NAN, integer);
    dtrain__json_add(&text, "loss", s->last_loss, 0);
    if (dtrain__finite(s->val_loss)) dtrain__json_add(&text, "val_loss", s->val_loss, 0);
    dtrain__json_add(&text, "ranks", dtrain_comm_size(metrics->comm), integer);
    dtrain__json_add(&text, "steps", (double)s->steps, integer);
    dtrain__json_add(&text, "tokens", (double)s->tokens, integer);
    dtrain__json_add(&text, "first_loss", s->first_loss, 0);
    dtrain__json_add(&text, "last_loss", s->last_loss, 0);
    dtrain__json_add(&text, "seconds", s->seconds, 0);
    dtrain__json_add(&text, "tokens_per_second", s->tokens_per_second, 0);
    dtrain__json_add(&text, "step_ms", s->step_ms, 0);
    dtrain__json_add(&text, "comm_ms", s->comm_ms, 0);
    dtrain__json_add(&text, "exposed_comm_ms", s->exposed_comm_ms, 0);
    dtrain__json_add(&text, "data_ms", s->data_ms, 0);
    dtrain__json_add(&text, "scaling", s->scaling, 0);
    dtrain__json_add(&text, "comm_bytes", (double)s->comm_bytes, integer);
    for (int i = 0; i < DTRAIN__METRIC_COUNT; i++)
        if (metrics->known[i] && (table[i].flags & DTRAIN_METRIC_FIXED))
            dtrain__json_add(&text, table[i].name, metrics->values[i], table[i].flags);
    const dtrain_result result = dtrain__jsonl_write(metrics, &text);
    const dtrain_result closed = dtrain__records_close(&metrics->jsonl);
    return result == DTRAIN_OK ? closed : result;
}

DTRAIN__PRIVATE dtrain__sink dtrain__jsonl_sink(void)
{
    const dtrain__sink sink = {{false, "json lines", dtrain__jsonl_open, dtrain__jsonl_step, NULL,
                                dtrain__jsonl_finish, NULL},
                               "lines of the log file",
                               false};
    return sink;
}
