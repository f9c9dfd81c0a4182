/* One JSON line per step; monitor/metrics.h lists the keys. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/json_internal.h"
#include "core/result.h"
#include "world/world_internal.h"
#include "strategy/query.h"
#include "strategy/view_internal.h"
#include "train/view_internal.h"
#include "monitor/metrics.h"
#include "monitor/monitor_internal.h"

/* Add `, "key": value`: an integer whole, another number rounded to fp32, with the fewest digits
 * that give it back (0.1, and not 0.100000001; nine are always enough). The decimal point of the
 * host's locale, which can have several bytes, becomes a point. */
static void dtrain__json_add(dtrain__text *text, const char *key, double value, bool integer)
{
    char number[64];
    size_t bytes = 0;
    bool other = false;
    dtrain__text_add(text, ", \"%s\": ", key);
    if (!dtrain__finite(value)) {
        dtrain__text_add(text, "null");
        return;
    }
    if (integer) snprintf(number, sizeof number, fabs(value) < 1e18 ? "%.0f" : "%.17g", value);
    else {
        const double rounded = fabs(value) > (double)FLT_MAX ? value : (double)(float)value;
        for (int digits = 6; digits <= 9; digits++) { /* %g drops the zeros of fewer than 6 */
            snprintf(number, sizeof number, "%.*g", digits, rounded);
            if ((float)strtod(number, NULL) == (float)rounded) break;
        }
    }
    for (const char *at = number; *at; at++) {
        const bool usual = (*at >= '0' && *at <= '9') || strchr("+-e", *at);
        if (usual || !other) number[bytes++] = usual ? *at : '.';
        other = !usual;
    }
    dtrain__text_append(text, number, bytes);
}

static void dtrain__json_add_summary(dtrain__text *text, const dtrain_metrics *metrics,
                                     const dtrain_summary *s)
{
    dtrain__json_add(text, "step", s->steps ? (double)metrics->last.step : DTRAIN__NAN, true);
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
}

/* Write the first line, which describes the run, the line of a step, or the last line, which has
 * the summary and the fixed figures. */
DTRAIN__PRIVATE dtrain_result dtrain__jsonl_sink(void *user, const dtrain_metrics_sample *sample)
{
    dtrain_metrics *metrics = (dtrain_metrics *)user;
    const dtrain_metrics_desc *desc = &metrics->desc;
    dtrain__records *file = &metrics->jsonl;
    dtrain__text *text = dtrain__record_begin(metrics);
    const bool open = sample->moment == DTRAIN_METRICS_OPEN, end = sample->summary != NULL;
    /* milliseconds as integers: a locale can change the decimal point */
    const long long ms = (long long)(1e3 * (end ? dtrain__wall_time() : sample->wall_time));
    if (open || end) dtrain__text_add(text, open ? "{\"start\": true" : "{\"final\": true");
    else dtrain__text_add(text, "{\"step\": %lld", (long long)sample->record->step);
    dtrain__text_add(text, ", \"wall_time\": %lld.%03lld", ms / 1000, ms % 1000);
    if (open) {
        const dtrain__trainer_view *trainer = dtrain__trainer_seen(desc->trainer);
        dtrain_device_info device;
        dtrain_strategy_info how;
        dtrain_world_info world;
        char host[65] = "";
        (void)gethostname(host, sizeof host - 1);
        dtrain__world_info(metrics->world, &world);
        dtrain__strategy_info(trainer ? trainer->state.strategy : NULL, &how);
        DTRAIN__TRY(dtrain_device_query(dtrain_world_device(metrics->world), &device));
        const char *const texts[][2] = {
            {"dtrain", DTRAIN_VERSION_STRING}, {"run", desc->run_name}, {"host", host},
            {"device", device.name},           {"strategy", how.name},  {"config", desc->config}};
        dtrain__json_add(text, "first_step", (double)desc->first_step, true);
        dtrain__json_add(text, "ranks", dtrain_comm_size(metrics->comm), true);
        dtrain__json_add(text, "nodes", world.node_count, true);
        dtrain__json_add(text, "threads", world.threads, true);
        dtrain__json_add(text, "shard_ranks", how.shard_ranks, true);
        dtrain__json_add(text, "replicas", how.replicas, true);
        dtrain__json_add(text, "parameters", (double)how.total_elements, true);
        for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
            dtrain__text_add(text, ", \"%s\": ", texts[i][0]);
            dtrain__text_add_string(text, texts[i][1] ? texts[i][1] : "");
        }
        DTRAIN__TRY(dtrain__records_open(file, desc->jsonl_path, desc->append));
    }
    if (end) dtrain__json_add_summary(text, metrics, sample->summary);
    const size_t step_count = sample->count - sample->fixed_count;
    for (size_t i = end ? step_count : 0; !open && i < (end ? sample->count : step_count); i++) {
        const dtrain_figure *figure = &sample->figures[i];
        const char *slash = strchr(figure->name, '/'), *unit = figure->unit;
        const bool whole = strcmp(unit, "bytes") == 0 || strcmp(unit, "tokens") == 0 ||
                           strcmp(unit, "steps") == 0 || strcmp(unit, "rank") == 0;
        dtrain__json_add(text, slash ? slash + 1 : figure->name, figure->value, whole);
    }
    dtrain__text_add(text, "}\n");
    const dtrain_result result = dtrain__records_append(file, text);
    const dtrain_result closed = end ? dtrain__records_close(file) : DTRAIN_OK;
    return result == DTRAIN_OK ? closed : result;
}
