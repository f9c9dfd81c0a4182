/* The stream of metrics
 *
 * A record becomes a list of figures, which every sink gets in turn, and is added to the summary.
 * Only creation can fail: nothing later stops a training. What a sink loses is counted, the first
 * loss is a warning, and dtrain_metrics_finish says how much was lost. The library's writers are
 * sinks like the host's. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/json_internal.h"
#include "core/log.h"
#include "core/result.h"
#include "world/world.h"
#include "world/world_internal.h"
#include "train/trainer.h"
#include "train/view_internal.h"
#include "monitor/metrics.h"
#include "monitor/monitor_internal.h"

/* ---- Sinks ------------------------------------------------------------------------------------*/

/* Call a sink. The last error after the call comes from the sink. */
static dtrain_result dtrain__sink_call(dtrain_metrics *metrics, const dtrain_metrics_sink *sink,
                                       dtrain_metrics_moment moment)
{
    metrics->sample.moment = moment;
    metrics->busy = true;
    (void)dtrain__set_last_error(DTRAIN_OK, "");
    const dtrain_result result = sink->take(sink->user, &metrics->sample);
    metrics->busy = false;
    return result;
}

DTRAIN__PRIVATE void dtrain__sinks_take(dtrain_metrics *metrics, dtrain_metrics_moment moment)
{
    for (size_t i = metrics->failed; i < metrics->opened; i++) {
        const dtrain_metrics_sink *sink = &metrics->sinks[i];
        dtrain_metrics_sink_info *info = &metrics->infos[i];
        if (moment == DTRAIN_METRICS_HISTOGRAM && !sink->histograms) continue;
        const dtrain_result result = dtrain__sink_call(metrics, sink, moment);
        const char *why = dtrain_last_error();
        if (result == DTRAIN_OK) info->written++;
        else if (info->lost++ == 0)
            dtrain_log(metrics->world, DTRAIN_LOG_WARNING,
                       "metrics, %s: %s; training goes on without the records that are lost",
                       info->name, why[0] ? why : dtrain_result_text(result));
    }
}

/* ---- The figures ------------------------------------------------------------------------------*/

/* The bytes of memory that a rank holds, and those that a plan predicts. */
static const struct {
    const char *name;
    bool planned;
    size_t at, and_at; /* offsets in dtrain_memory; and_at: of what is added to it, or 0 */
} dtrain__memory_rows[] = {
    {"memory/memory_param_bytes", false, offsetof(dtrain_memory, params), 0},
    {"memory/memory_grad_bytes", false, offsetof(dtrain_memory, grads), 0},
    {"memory/memory_optimizer_bytes", false, offsetof(dtrain_memory, optimizer), 0},
    {"memory/memory_buffer_bytes", false, offsetof(dtrain_memory, buffers), 0},
    {"memory/memory_host_bytes", false, offsetof(dtrain_memory, host), 0},
    {"memory/predicted_param_bytes", true, offsetof(dtrain_memory, params), 0},
    {"memory/predicted_grad_bytes", true, offsetof(dtrain_memory, grads), 0},
    {"memory/predicted_optimizer_bytes", true, offsetof(dtrain_memory, optimizer), 0},
    {"memory/predicted_buffer_bytes", true, offsetof(dtrain_memory, buffers), 0},
    {"memory/predicted_host_bytes", true, offsetof(dtrain_memory, host), 0},
    {"memory/predicted_activation_bytes", true, offsetof(dtrain_memory, activations),
     offsetof(dtrain_memory, activation_grads)},
    {"memory/predicted_bytes", true, offsetof(dtrain_memory, total), 0}};

/* List a figure of the stream, if there is a value. */
static void dtrain__figure_put(dtrain_metrics *metrics, const char *name, const char *unit,
                               double value, bool known)
{
    const dtrain_figure figure = {name, unit, value, NULL};
    if (known) metrics->figures[metrics->sample.count++] = figure;
}

static uint64_t dtrain__memory_at(const dtrain_memory *memory, size_t at)
{
    return *(const uint64_t *)(const void *)((const char *)memory + at);
}

/* List the figures of the last step; before the first one only those that are fixed. */
static void dtrain__metrics_list(dtrain_metrics *metrics)
{
    dtrain_metrics_sample *sample = &metrics->sample;
    const dtrain_step_record *r = &metrics->last;
    const bool begun = metrics->summary.steps > 0, scaled = r->loss_scale > 0;
    const double share =
        dtrain_record_value(r, "flops_per_second") / (r->ranks * metrics->desc.peak_flops);
    sample->wall_time = dtrain__wall_time();
    sample->count = 0;
    dtrain__figure_put(metrics, "loss/loss", "", r->loss, begun);
    dtrain__figure_put(metrics, "loss/val_loss", "", r->val_loss,
                       begun && dtrain__finite(r->val_loss));
    dtrain__figure_put(metrics, "loss/val_accuracy", "", r->val_accuracy,
                       begun && dtrain__finite(r->val_accuracy));
    dtrain__figure_put(metrics, "optimizer/grad_norm", "", r->grad_norm, begun);
    dtrain__figure_put(metrics, "optimizer/lr", "", r->lr, begun);
    dtrain__figure_put(metrics, "throughput/tokens", "tokens", (double)r->tokens, begun);
    dtrain__figure_put(metrics, "optimizer/loss_scale", "", r->loss_scale, begun && scaled);
    dtrain__figure_put(metrics, "optimizer/skipped_steps", "steps", (double)r->skipped_steps,
                       begun && (scaled || r->skipped_steps));
    dtrain__figure_put(metrics, "throughput/peak_share", "", share, dtrain__finite(share));
    memcpy(metrics->figures + sample->count, r->figures, r->figure_count * sizeof *r->figures);
    const size_t step_count = sample->count += r->figure_count;
    for (size_t i = 0; i < sizeof dtrain__memory_rows / sizeof *dtrain__memory_rows; i++) {
        const bool planned = dtrain__memory_rows[i].planned;
        const dtrain_memory *memory = planned ? &metrics->planned : &metrics->held;
        const size_t and_at = dtrain__memory_rows[i].and_at;
        const uint64_t bytes = dtrain__memory_at(memory, dtrain__memory_rows[i].at) +
                               (and_at ? dtrain__memory_at(memory, and_at) : 0);
        dtrain__figure_put(metrics, dtrain__memory_rows[i].name, "bytes", (double)bytes,
                           planned ? !metrics->no_plan[0] : metrics->desc.trainer != NULL);
    }
    sample->fixed_count = sample->count - step_count;
}

/* ---- Creation ---------------------------------------------------------------------------------*/

/* Copy the texts of desc into memory; NULL: count their bytes. Empty texts become NULL. */
static size_t dtrain__strings_keep(dtrain_metrics_desc *desc, char *memory)
{
    const char **const texts[] = {&desc->jsonl_path, &desc->tensorboard_dir, &desc->run_name,
                                  &desc->config, &desc->hparams};
    size_t all = 0;
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        const char **text = texts[i];
        if (*text && !**text) *text = NULL;
        if (!*text) continue;
        const size_t bytes = strlen(*text) + 1;
        if (memory) *text = (char *)memcpy(memory + all, *text, bytes);
        all += bytes;
    }
    return all;
}

/* Do the parts of creation that can fail. Rank 0 has the library's writers that desc asks for, then
 * the program's sinks. The first sink that cannot be opened is the error. */
static dtrain_result dtrain__metrics_open(dtrain_metrics *metrics)
{
    const dtrain_metrics_desc *desc = &metrics->desc;
    const bool first = dtrain_comm_rank(metrics->comm) == 0;
    const dtrain_metrics_sink writers[DTRAIN__WRITERS] = {
        {false, false, "progress", dtrain__console_sink, metrics},
        {false, false, "json lines", dtrain__jsonl_sink, metrics},
        {false, true, "tensorboard", dtrain__tensorboard_sink, metrics}};
    const char *const paths[DTRAIN__WRITERS] = {desc->progress ? "" : NULL, desc->jsonl_path,
                                                desc->tensorboard_dir};
    for (size_t i = 0; i < DTRAIN__WRITERS + desc->sink_count; i++) {
        const bool own = i < DTRAIN__WRITERS;
        const dtrain_metrics_sink *sink = own ? &writers[i] : &desc->sinks[i - DTRAIN__WRITERS];
        if (!sink->name || !sink->take)
            return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                               "dtrain_metrics_create: sink %zu of desc has no name or no take",
                               i - DTRAIN__WRITERS);
        if (own ? !first || !paths[i] : !first && !sink->every_rank) continue;
        metrics->infos[metrics->sink_count].name = sink->name;
        metrics->infos[metrics->sink_count].path = own ? paths[i] : "";
        metrics->sinks[metrics->sink_count++] = *sink;
    }
    if (desc->histogram_every) DTRAIN__TRY(dtrain__histograms_create(metrics));
    const dtrain_trainer *trainer = desc->trainer; /* some losses cannot be planned */
    const dtrain_result plan =
        trainer ? dtrain__trainer_seen(trainer)->memory(trainer, &metrics->held, &metrics->planned)
                : dtrain_fail(DTRAIN_ERROR_USAGE, "desc has no trainer");
    if (plan != DTRAIN_OK)
        snprintf(metrics->no_plan, sizeof metrics->no_plan, "%s", dtrain_last_error());
    dtrain__metrics_list(metrics);
    for (; metrics->opened < metrics->sink_count; metrics->opened++) {
        const dtrain_metrics_sink *sink = &metrics->sinks[metrics->opened];
        const dtrain_result result = dtrain__sink_call(metrics, sink, DTRAIN_METRICS_OPEN);
        if (result == DTRAIN_OK) continue;
        if (!dtrain_last_error()[0])
            (void)dtrain_fail(result, "dtrain_metrics_create: the sink %s cannot be opened: %s",
                              sink->name, dtrain_result_text(result));
        return result;
    }
    return dtrain__set_last_error(DTRAIN_OK, ""); /* a missing plan is no error */
}

DTRAIN_API dtrain_result dtrain_metrics_create(dtrain_world *world, const dtrain_metrics_desc *desc,
                                               dtrain_metrics **out)
{
    if (out) *out = NULL;
    DTRAIN__GIVEN("dtrain_metrics_create", world);
    DTRAIN__GIVEN("dtrain_metrics_create", desc);
    DTRAIN__GIVEN("dtrain_metrics_create", out);
    DTRAIN__TAKE(dtrain__abi_of(world), metrics_desc, desc);
    if (desc->sink_count) DTRAIN__GIVEN("dtrain_metrics_create", desc->sinks);
    if (desc->run_name && strlen(desc->run_name) > 200)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_metrics_create: run_name has more than 200 bytes");
    if (desc->sink_count > DTRAIN_METRICS_SINKS)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_metrics_create: desc has %zu sinks, at most %d are possible",
                           desc->sink_count, DTRAIN_METRICS_SINKS);
    /* One allocation: metrics, texts, the path of TensorBoard's file. */
    dtrain_metrics_desc resolved = *desc;
    const size_t texts = dtrain__strings_keep(&resolved, NULL);
    const size_t bytes = sizeof(dtrain_metrics) + 2 * texts + DTRAIN__EVENT_FILE;
    dtrain_metrics *metrics =
        (dtrain_metrics *)dtrain__alloc(&world->allocator, 1, bytes, "metrics");
    if (!metrics) return DTRAIN_ERROR_MEMORY;
    metrics->bytes = bytes;
    (void)dtrain__strings_keep(&resolved, (char *)(metrics + 1));
    metrics->tensorboard.path = (char *)(metrics + 1) + texts;
    metrics->desc = resolved;
    metrics->allocator = world->allocator;
    metrics->text.allocator = &metrics->allocator;
    metrics->world = world;
    metrics->comm =
        desc->trainer ? dtrain__trainer_seen(desc->trainer)->groups->all : dtrain_world_comm(world);
    metrics->console.file.size = metrics->jsonl.fd = metrics->tensorboard.file.fd = -1;
    if (metrics->desc.progress_every == 0) metrics->desc.progress_every = 10;
    if (!metrics->desc.run_name) metrics->desc.run_name = "dtrain";
    dtrain_summary *s = &metrics->summary;
    s->first_loss = s->last_loss = s->val_loss = s->val_accuracy = DTRAIN__NAN;
    s->tokens_per_second = s->step_ms = s->comm_ms = s->exposed_comm_ms = s->data_ms = DTRAIN__NAN;
    metrics->sample.figures = metrics->figures;
    metrics->sample.record = &metrics->last;
    metrics->sample.desc = &metrics->desc;
    const dtrain_result result = dtrain__metrics_open(metrics);
    if (result == DTRAIN_OK) *out = metrics;
    if (result == DTRAIN_OK) return DTRAIN_OK;
    while (metrics->sinks[metrics->failed].user == metrics) metrics->failed++;
    dtrain_metrics_destroy(metrics);
    return result;
}

/* ---- The run ----------------------------------------------------------------------------------*/

/* Add the value of step n to a mean, unless it is not finite. Times are means because waits are
 * rare and long: a median would hide them. */
static void dtrain__mean_add(double *mean, double value, int64_t n)
{
    if (!dtrain__finite(value)) return;
    *mean = dtrain__finite(*mean) ? *mean + (value - *mean) / (double)n : value;
}

static dtrain_result dtrain__metrics_usable(const dtrain_metrics *metrics, const void *given,
                                            const char *call)
{
    if (!metrics || !given)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: metrics or another argument is NULL", call);
    if (metrics->busy || metrics->finished)
        return dtrain_fail(DTRAIN_ERROR_USAGE, "%s: %s", call,
                           metrics->busy ? "a sink must not call the metrics that call it"
                                         : "the metrics are finished");
    return DTRAIN_OK;
}

/* Return a figure in bytes; 0 if the record lacks it, or if no 64-bit integer can hold it. */
static uint64_t dtrain__record_bytes(const dtrain_step_record *record, const char *key)
{
    const double bytes = dtrain_record_value(record, key);
    return bytes >= 0 && bytes < 9e18 ? (uint64_t)bytes : 0;
}

DTRAIN_API dtrain_result dtrain_metrics_step(dtrain_metrics *metrics,
                                             const dtrain_step_record *record)
{
    DTRAIN__TRY(dtrain__metrics_usable(metrics, record, "dtrain_metrics_step"));
    dtrain_summary *s = &metrics->summary;
    const double now = dtrain_seconds(), step_ms = dtrain_record_value(record, "step_ms");
    if (s->steps == 0) { /* seconds begin with the first step, which took step_ms */
        s->first_loss = record->loss;
        metrics->started = now - 1e-3 * fmax(0, step_ms); /* a record can lack it */
    }
    metrics->last = *record;
    s->steps++;
    dtrain__mean_add(&s->tokens_per_second,
                     dtrain_record_value(record, "tokens_per_second") * step_ms, s->steps);
    dtrain__mean_add(&s->step_ms, step_ms, s->steps);
    dtrain__mean_add(&s->comm_ms, dtrain_record_value(record, "comm_ms"), s->steps);
    dtrain__mean_add(&s->exposed_comm_ms, dtrain_record_value(record, "exposed_comm_ms"), s->steps);
    dtrain__mean_add(&s->data_ms, dtrain_record_value(record, "data_ms"), s->steps);
    dtrain__mean_add(&s->bubble_ms, dtrain_record_value(record, "bubble_ms"), s->steps);
    s->last_loss = record->loss;
    if (dtrain__finite(record->val_loss)) s->val_loss = record->val_loss;
    if (dtrain__finite(record->val_accuracy)) s->val_accuracy = record->val_accuracy;
    s->tokens = record->tokens;
    s->seconds = now - metrics->started;
    s->comm_bytes += dtrain__record_bytes(record, "comm_bytes");
    s->tensor_bytes += dtrain__record_bytes(record, "tensor_bytes");
    s->pipeline_bytes += dtrain__record_bytes(record, "pipeline_bytes");
    dtrain__metrics_list(metrics);
    dtrain__sinks_take(metrics, DTRAIN_METRICS_STEP);
    const uint32_t every = metrics->desc.histogram_every;
    return every && record->step % every == 0 ? dtrain__histograms_step(metrics) : DTRAIN_OK;
}

/* ---- Queries ----------------------------------------------------------------------------------*/

static void dtrain__metrics_info(const dtrain_metrics *metrics, dtrain_metrics_info *info)
{
    memset(info, 0, sizeof *info);
    if (!metrics) return;
    info->last = metrics->sample;
    info->sink_count = metrics->sink_count;
    info->sinks = metrics->infos;
    info->no_plan = metrics->no_plan;
    dtrain_summary *summary = &info->summary;
    *summary = metrics->summary;
    summary->tokens_per_second /= summary->step_ms; /* was the mean of their products */
    summary->scaling = summary->step_ms > 0
                           ? (summary->step_ms - summary->exposed_comm_ms) / summary->step_ms
                           : DTRAIN__NAN;
}

DTRAIN_API void dtrain_metrics_query(const dtrain_metrics *metrics, dtrain_metrics_info *info)
{
    dtrain_metrics_info own;
    dtrain__metrics_info(metrics, &own);
    dtrain__give(dtrain__abi_of(metrics ? metrics->world : NULL), DTRAIN__ABI_metrics_info, &own,
                 info);
}

/* ---- The end ----------------------------------------------------------------------------------*/

/* End the stream; a second call does nothing. Return an error if records were lost: the training is
 * over, and an error stops nothing. */
DTRAIN_API dtrain_result dtrain_metrics_finish(dtrain_metrics *metrics)
{
    dtrain_metrics_info info;
    if (metrics && metrics->finished) return DTRAIN_OK;
    DTRAIN__TRY(dtrain__metrics_usable(metrics, metrics, "dtrain_metrics_finish"));
    metrics->finished = true;
    dtrain__metrics_info(metrics, &info);
    metrics->sample.summary = &info.summary;
    dtrain__sinks_take(metrics, DTRAIN_METRICS_FINISH);
    metrics->sample.summary = NULL;
    dtrain__text *text = dtrain__record_begin(metrics);
    for (size_t i = 0; i < metrics->sink_count; i++) {
        const dtrain_metrics_sink_info *sink = &metrics->infos[i];
        if (sink->lost)
            dtrain__text_add(text, "%s%llu of %llu records of %s", text->bytes ? "; " : "",
                             (unsigned long long)sink->lost,
                             (unsigned long long)(sink->lost + sink->written),
                             sink->path[0] ? sink->path : sink->name);
    }
    if (!text->bytes && !text->failed) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_FILE, "dtrain_metrics_finish: what could not be written: %s",
                       text->bytes ? text->at : "records");
}

DTRAIN_API void dtrain_metrics_destroy(dtrain_metrics *metrics)
{
    if (!metrics) return;
    const dtrain_allocator allocator = metrics->allocator;
    if (metrics->busy) {
        dtrain_log(metrics->world, DTRAIN_LOG_ERROR,
                   "dtrain_metrics_destroy: a sink must not destroy the metrics that call it");
        return;
    }
    char text[DTRAIN__ERROR_BYTES]; /* keep the error of the run: the program reads it */
    const dtrain_result code = *dtrain__last_code();
    snprintf(text, sizeof text, "%s", dtrain_last_error());
    (void)dtrain_metrics_finish(metrics);
    (void)dtrain__set_last_error(code, text);
    (void)dtrain__records_close(&metrics->jsonl);
    (void)dtrain__records_close(&metrics->tensorboard.file);
    dtrain__histograms_destroy(metrics);
    dtrain__text_free(&metrics->text);
    dtrain__free(&allocator, metrics, 1, metrics->bytes);
}
