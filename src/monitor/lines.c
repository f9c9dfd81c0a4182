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

/* Add a time in seconds with milliseconds, whatever the decimal point of the host's locale is. */
static void dtrain__add_time(dtrain__text *text, double seconds)
{
    const long long ms = (long long)(1e3 * seconds);
    dtrain__text_add(text, "%lld.%03lld", ms / 1000, ms % 1000);
}

/* Begin with a line that says what runs, how it is divided, and where. */
DTRAIN__PRIVATE dtrain_result dtrain__jsonl_open(void *user, const dtrain_metrics_desc *desc,
                                                 const dtrain_metrics_sample *sample)
{
    dtrain_metrics *metrics = (dtrain_metrics *)user;
    dtrain__text *text = dtrain__record_begin(metrics);
    dtrain_device_info device;
    dtrain_strategy_info how;
    dtrain_world_info world;
    char host[65] = "";
    (void)gethostname(host, sizeof host - 1);
    dtrain_world_query(metrics->world, &world);
    const dtrain__trainer_view *trainer = dtrain__trainer_seen(desc->trainer);
    dtrain_strategy_query(trainer ? trainer->state.strategy : NULL, &how);
    DTRAIN__TRY(dtrain_device_query(dtrain_world_device(metrics->world), &device));
    const char *const texts[][2] = {{"run", desc->run_name},
                                    {"host", host},
                                    {"device", device.name},
                                    {"strategy", how.name},
                                    {"config", desc->config}};
    dtrain__text_add(text, "{\"start\": true, \"wall_time\": ");
    dtrain__add_time(text, sample->wall_time);
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
    dtrain__text_add(text, "}\n");
    DTRAIN__TRY(dtrain__records_open(&metrics->jsonl, desc->jsonl_path, desc->append));
    return dtrain__records_append(&metrics->jsonl, text);
}

DTRAIN__PRIVATE dtrain_result dtrain__jsonl_step(void *user, const dtrain_metrics_sample *sample)
{
    dtrain_metrics *metrics = (dtrain_metrics *)user;
    dtrain__text *text = dtrain__record_begin(metrics);
    dtrain__text_add(text, "{\"step\": %lld, \"wall_time\": ", (long long)sample->step);
    dtrain__add_time(text, sample->wall_time);
    dtrain__json_add_known(text, sample, 0);
    return dtrain__records_append(&metrics->jsonl, text);
}

DTRAIN__PRIVATE dtrain_result dtrain__jsonl_finish(void *user, const dtrain_summary *s)
{
    dtrain_metrics *metrics = (dtrain_metrics *)user;
    const uint32_t integer = DTRAIN_METRIC_INTEGER;
    dtrain__text *text = dtrain__record_begin(metrics);
    dtrain__text_add(text, "{\"final\": true, \"wall_time\": ");
    dtrain__add_time(text, dtrain__wall_time());
    dtrain__json_add(text, "step", s->steps ? (double)metrics->last.step : DTRAIN__NAN, integer);
    dtrain__json_add(text, "loss", s->last_loss, 0);
    if (dtrain__finite(s->val_loss)) dtrain__json_add(text, "val_loss", s->val_loss, 0);
    if (dtrain__finite(s->val_accuracy)) dtrain__json_add(text, "val_accuracy", s->val_accuracy, 0);
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
    if (s->tensor_bytes) dtrain__json_add(text, "tensor_bytes", (double)s->tensor_bytes, integer);
    if (s->pipeline_bytes)
        dtrain__json_add(text, "pipeline_bytes", (double)s->pipeline_bytes, integer);
    dtrain__json_add_known(text, &metrics->sample, DTRAIN_METRIC_FIXED);
    const dtrain_result result = dtrain__records_append(&metrics->jsonl, text);
    const dtrain_result closed = dtrain__records_close(&metrics->jsonl);
    return result == DTRAIN_OK ? closed : result;
}
