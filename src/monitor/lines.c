/* A JSON line a step: monitor/metrics.h has its keys. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/json_internal.h"
#include "core/result.h"
#include "world/world.h"
#include "strategy/query.h"
#include "train/view_internal.h"
#include "monitor/metrics.h"
#include "monitor/monitor_internal.h"

/* Add `, "key": value`. */
static void dtrain__json_add(dtrain__text *text, const char *key, double value, bool integer)
{
    dtrain__text_add(text, ", \"%s\": ", key);
    dtrain__text_number(text, value, integer, "null", "null", "null");
}

/* Add the metrics of which DTRAIN_METRIC_FIXED is set, or not. */
static void dtrain__json_add_metrics(dtrain__text *text, const dtrain_metrics_sample *sample,
                                     uint32_t fixed)
{
    for (size_t i = 0; i < sample->count; i++) {
        const dtrain_metric *metric = &sample->metrics[i];
        if ((metric->flags & DTRAIN_METRIC_FIXED) == fixed)
            dtrain__json_add(text, metric->name, metric->value,
                             metric->flags & DTRAIN_METRIC_INTEGER);
    }
}

/* Say what runs, how it is divided, and where. */
static dtrain_result dtrain__json_add_start(dtrain__text *text, const dtrain_metrics *metrics)
{
    const dtrain_metrics_desc *desc = &metrics->desc;
    const dtrain__trainer_view *trainer = dtrain__trainer_seen(desc->trainer);
    dtrain_device_info device;
    dtrain_strategy_info how;
    dtrain_world_info world;
    char host[65] = "";
    (void)gethostname(host, sizeof host - 1);
    dtrain_world_query(metrics->world, &world);
    dtrain_strategy_query(trainer ? trainer->state.strategy : NULL, &how);
    DTRAIN__TRY(dtrain_device_query(dtrain_world_device(metrics->world), &device));
    const char *const texts[][2] = {{"run", desc->run_name},
                                    {"host", host},
                                    {"device", device.name},
                                    {"strategy", how.name},
                                    {"config", desc->config}};
    dtrain__text_add(text,
                     ", \"dtrain\": \"%s\", \"first_step\": %lld, \"ranks\": %d, \"nodes\": %d, "
                     "\"threads\": %u, \"shard_ranks\": %d, \"replicas\": %d, \"parameters\": %llu",
                     DTRAIN_VERSION_STRING, (long long)desc->first_step,
                     dtrain_comm_size(metrics->comm), world.node_count, world.threads,
                     how.shard_ranks, how.replicas, (unsigned long long)how.total_elements);
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        dtrain__text_add(text, ", \"%s\": ", texts[i][0]);
        dtrain__text_add_string(text, texts[i][1] ? texts[i][1] : "");
    }
    return DTRAIN_OK;
}

static void dtrain__json_add_summary(dtrain__text *text, const dtrain_metrics *metrics,
                                     const dtrain_summary *s)
{
    const dtrain_metrics_sample *sample = &metrics->sample;
    dtrain__json_add(text, "step", s->steps ? (double)sample->step : DTRAIN__NAN, true);
    dtrain__json_add(text, "loss", s->last_loss, false);
    if (dtrain__finite(s->val_loss)) dtrain__json_add(text, "val_loss", s->val_loss, false);
    if (dtrain__finite(s->val_accuracy))
        dtrain__json_add(text, "val_accuracy", s->val_accuracy, false);
    dtrain__json_add(text, "ranks", dtrain_comm_size(metrics->comm), true);
    dtrain__json_add(text, "steps", (double)s->steps, true);
    dtrain__json_add(text, "tokens", (double)s->tokens, true);
    dtrain__json_add(text, "first_loss", s->first_loss, false);
    dtrain__json_add(text, "last_loss", s->last_loss, false);
    dtrain__json_add(text, "seconds", s->seconds, false);
    dtrain__json_add(text, "tokens_per_second", s->tokens_per_second, false);
    dtrain__json_add(text, "step_ms", s->step_ms, false);
    dtrain__json_add(text, "comm_ms", s->comm_ms, false);
    dtrain__json_add(text, "exposed_comm_ms", s->exposed_comm_ms, false);
    dtrain__json_add(text, "data_ms", s->data_ms, false);
    dtrain__json_add(text, "scaling", s->scaling, false);
    dtrain__json_add(text, "comm_bytes", (double)s->comm_bytes, true);
    if (s->tensor_bytes) dtrain__json_add(text, "tensor_bytes", (double)s->tensor_bytes, true);
    if (s->pipeline_bytes)
        dtrain__json_add(text, "pipeline_bytes", (double)s->pipeline_bytes, true);
    dtrain__json_add_metrics(text, sample, DTRAIN_METRIC_FIXED);
}

DTRAIN__PRIVATE dtrain_result dtrain__jsonl_sink(void *user, const dtrain_metrics_sample *sample)
{
    dtrain_metrics *metrics = (dtrain_metrics *)user;
    dtrain__records *file = &metrics->jsonl;
    dtrain__text *text = dtrain__record_begin(metrics);
    const bool open = sample->moment == DTRAIN_METRICS_OPEN;
    const bool end = sample->moment == DTRAIN_METRICS_FINISH;
    /* milliseconds, whatever the decimal point of the host's locale is */
    const long long ms = (long long)(1e3 * (end ? dtrain__wall_time() : sample->wall_time));
    if (open || end) dtrain__text_add(text, open ? "{\"start\": true" : "{\"final\": true");
    else dtrain__text_add(text, "{\"step\": %lld", (long long)sample->step);
    dtrain__text_add(text, ", \"wall_time\": %lld.%03lld", ms / 1000, ms % 1000);
    if (open) DTRAIN__TRY(dtrain__json_add_start(text, metrics));
    else if (end) dtrain__json_add_summary(text, metrics, sample->summary);
    else dtrain__json_add_metrics(text, sample, 0);
    dtrain__text_add(text, "}\n");
    if (open)
        DTRAIN__TRY(dtrain__records_open(file, metrics->desc.jsonl_path, metrics->desc.append));
    const dtrain_result result = dtrain__records_append(file, text);
    const dtrain_result closed = end ? dtrain__records_close(file) : DTRAIN_OK;
    return result == DTRAIN_OK ? closed : result;
}
