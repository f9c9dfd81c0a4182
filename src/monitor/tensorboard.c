/* Event files for TensorBoard
 *
 * A run is a directory, and each start of it a file, events.out.tfevents.SECONDS.HOST.PID.0, which
 * TensorBoard reads in the order of their names. A file is a sequence of records (TFRecord), each
 * of which is an Event in the encoding of Protocol Buffers:
 *
 *     u64 length | u32 masked CRC-32C of these 8 bytes | Event | u32 masked CRC-32C of the Event
 *
 * The messages are written by hand: their fields are few, and have had these numbers since 2015
 * (tensorboard/compat/proto/event.proto, summary.proto; plugins/hparams/plugin_data.proto). The
 * length of a message inside another is not known when it begins, so five bytes are left for it: a
 * varint may have leading zeros.
 *
 * A run that goes on begins with a SessionLog of status START at its first step: readers drop what
 * the run before has written from there on. One write a step; a record that a full disk has cut is
 * taken off again, because readers give a file up at the first broken one. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/result.h"
#include "world/world.h"
#include "state/crc32c_internal.h"
#include "monitor/metrics.h"
#include "monitor/monitor_internal.h"

#include <locale.h>

/* ---- Protocol Buffers -------------------------------------------------------------------------*/

enum { DTRAIN__PB_VARINT = 0, DTRAIN__PB_64 = 1, DTRAIN__PB_BYTES = 2, DTRAIN__PB_32 = 5 };

#define DTRAIN__PB_LENGTH 5 /* bytes of a length that is filled in later */

/* Make room for more bytes of the record. Only texts and large histograms ever need it. */
static bool dtrain__pb_room(dtrain_metrics *metrics, size_t bytes)
{
    dtrain__tensorboard *t = &metrics->tensorboard;
    size_t room = t->room ? t->room : 16384;
    if (t->overflow || t->used + bytes <= t->room) return !t->overflow;
    while (room < t->used + bytes) room *= 2;
    void *larger = dtrain__alloc(&metrics->allocator, room, 1, "an event of TensorBoard");
    t->overflow = larger == NULL;
    if (!larger) return false;
    if (t->record) memcpy(larger, t->record, t->used);
    dtrain__free(&metrics->allocator, t->record, t->room, 1);
    t->record = larger;
    t->room = room;
    return true;
}

static void dtrain__pb_raw(dtrain_metrics *metrics, const void *data, size_t bytes)
{
    dtrain__tensorboard *t = &metrics->tensorboard;
    if (!dtrain__pb_room(metrics, bytes)) return;
    if (bytes) memcpy((char *)t->record + t->used, data, bytes);
    t->used += bytes;
}

/* Add the low bytes of a number: the machine is little-endian, as every one that dtrain runs on. */
static void dtrain__pb_fixed(dtrain_metrics *metrics, uint64_t value, int bytes)
{
    unsigned char text[8];
    for (int i = 0; i < bytes; i++) text[i] = (unsigned char)(value >> 8 * i);
    dtrain__pb_raw(metrics, text, (size_t)bytes);
}

static void dtrain__pb_varint(dtrain_metrics *metrics, uint64_t value)
{
    unsigned char text[10];
    size_t n = 0;
    for (; value >= 128; value >>= 7) text[n++] = (unsigned char)(value | 128);
    text[n++] = (unsigned char)value;
    dtrain__pb_raw(metrics, text, n);
}

static void dtrain__pb_tag(dtrain_metrics *metrics, uint32_t field, uint32_t type)
{
    dtrain__pb_varint(metrics, (uint64_t)field << 3 | type);
}

static void dtrain__pb_integer(dtrain_metrics *metrics, uint32_t field, int64_t value)
{
    dtrain__pb_tag(metrics, field, DTRAIN__PB_VARINT);
    dtrain__pb_varint(metrics, (uint64_t)value);
}

static void dtrain__pb_double(dtrain_metrics *metrics, uint32_t field, double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    dtrain__pb_tag(metrics, field, DTRAIN__PB_64);
    dtrain__pb_fixed(metrics, bits, 8);
}

static void dtrain__pb_float(dtrain_metrics *metrics, uint32_t field, double value)
{
    const float most = dtrain__f32_from_bits(0x7f800000u);
    const float rounded = value > (double)FLT_MAX    ? most
                          : value < -(double)FLT_MAX ? -most
                                                     : (float)value;
    dtrain__pb_tag(metrics, field, DTRAIN__PB_32);
    dtrain__pb_fixed(metrics, dtrain__f32_bits(rounded), 4);
}

static void dtrain__pb_bytes(dtrain_metrics *metrics, uint32_t field, const void *data,
                             size_t bytes)
{
    dtrain__pb_tag(metrics, field, DTRAIN__PB_BYTES);
    dtrain__pb_varint(metrics, bytes);
    dtrain__pb_raw(metrics, data, bytes);
}

static void dtrain__pb_text(dtrain_metrics *metrics, uint32_t field, const char *text)
{
    dtrain__pb_bytes(metrics, field, text, strlen(text));
}

static void dtrain__pb_doubles(dtrain_metrics *metrics, uint32_t field, const double *values,
                               size_t count)
{
    dtrain__pb_tag(metrics, field, DTRAIN__PB_BYTES);
    dtrain__pb_varint(metrics, 8 * (uint64_t)count);
    for (size_t i = 0; i < count; i++) {
        uint64_t bits;
        memcpy(&bits, &values[i], sizeof bits);
        dtrain__pb_fixed(metrics, bits, 8);
    }
}

/* Begin a message inside of the one that is open, and return where its length comes. */
static size_t dtrain__pb_begin(dtrain_metrics *metrics, uint32_t field)
{
    const char zeros[DTRAIN__PB_LENGTH] = {0};
    dtrain__pb_tag(metrics, field, DTRAIN__PB_BYTES);
    dtrain__pb_raw(metrics, zeros, sizeof zeros);
    return metrics->tensorboard.used;
}

/* End it. */
static void dtrain__pb_end(dtrain_metrics *metrics, size_t begin)
{
    dtrain__tensorboard *t = &metrics->tensorboard;
    if (t->overflow) return;
    uint64_t length = t->used - begin;
    unsigned char *at = (unsigned char *)t->record + begin - DTRAIN__PB_LENGTH;
    for (int i = 0; i < DTRAIN__PB_LENGTH; i++, length >>= 7)
        at[i] = (unsigned char)((length & 127) | (i + 1 < DTRAIN__PB_LENGTH ? 128 : 0));
}

/* ---- Records ----------------------------------------------------------------------------------*/

#define DTRAIN__RECORD_HEAD 12 /* bytes before an Event */

static uint32_t dtrain__masked_crc(const void *data, size_t bytes)
{
    const uint32_t crc = dtrain__crc32c(0, data, bytes);
    return (crc >> 15 | crc << 17) + 0xa282ead8u;
}

/* Begin a record with an Event. */
static void dtrain__event_begin(dtrain_metrics *metrics, double wall_time, int64_t step)
{
    const char zeros[DTRAIN__RECORD_HEAD] = {0};
    metrics->tensorboard.used = 0;
    metrics->tensorboard.overflow = false;
    dtrain__pb_raw(metrics, zeros, sizeof zeros);
    dtrain__pb_double(metrics, 1, wall_time);
    dtrain__pb_integer(metrics, 2, step);
}

/* Complete the record and write it. */
static dtrain_result dtrain__event_end(dtrain_metrics *metrics)
{
    dtrain__tensorboard *t = &metrics->tensorboard;
    unsigned char *head = (unsigned char *)t->record;
    if (t->overflow) return DTRAIN_ERROR_MEMORY;
    const uint64_t length = t->used - DTRAIN__RECORD_HEAD;
    const uint32_t crc = dtrain__masked_crc(head + DTRAIN__RECORD_HEAD, (size_t)length);
    for (int i = 0; i < 8; i++) head[i] = (unsigned char)(length >> 8 * i);
    const uint32_t head_crc = dtrain__masked_crc(head, 8);
    for (int i = 0; i < 4; i++) head[8 + i] = (unsigned char)(head_crc >> 8 * i);
    dtrain__pb_fixed(metrics, crc, 4);
    if (t->overflow) return DTRAIN_ERROR_MEMORY;
    if (t->file.torn)
        return dtrain_fail(DTRAIN_ERROR_FILE, "%s ends in a broken record that cannot be removed",
                           t->path);
    return dtrain__records_append(&t->file, t->record, t->used);
}

/* Add a plugin's name and content to the value that is open. */
static void dtrain__value_plugin(dtrain_metrics *metrics, const char *plugin, uint32_t data_class)
{
    const size_t metadata = dtrain__pb_begin(metrics, 9);
    const size_t data = dtrain__pb_begin(metrics, 1);
    dtrain__pb_text(metrics, 1, plugin);
    dtrain__pb_end(metrics, data);
    dtrain__pb_integer(metrics, 4, data_class);
    dtrain__pb_end(metrics, metadata);
}

static void dtrain__value_scalar(dtrain_metrics *metrics, const dtrain_metric *metric, double value)
{
    char tag[96];
    snprintf(tag, sizeof tag, "%s/%s", metric->group, metric->name);
    const size_t one = dtrain__pb_begin(metrics, 1);
    dtrain__pb_text(metrics, 1, tag);
    dtrain__pb_float(metrics, 2, value);
    dtrain__pb_end(metrics, one);
}

static void dtrain__value_histogram(dtrain_metrics *metrics, const dtrain_histogram *h)
{
    const size_t one = dtrain__pb_begin(metrics, 1);
    dtrain__pb_text(metrics, 1, h->tag);
    const size_t histogram = dtrain__pb_begin(metrics, 5);
    dtrain__pb_double(metrics, 1, h->min);
    dtrain__pb_double(metrics, 2, h->max);
    dtrain__pb_double(metrics, 3, (double)h->count);
    dtrain__pb_double(metrics, 4, h->sum);
    dtrain__pb_double(metrics, 5, h->sum_squares);
    dtrain__pb_doubles(metrics, 6, h->limits, h->bucket_count);
    dtrain__pb_doubles(metrics, 7, h->buckets, h->bucket_count);
    dtrain__pb_end(metrics, histogram);
    dtrain__pb_end(metrics, one);
}

/* Add a text, as a tensor of one string. */
static void dtrain__value_text(dtrain_metrics *metrics, const char *tag, const char *text)
{
    const size_t one = dtrain__pb_begin(metrics, 1);
    const size_t bytes = strlen(tag);
    dtrain__pb_tag(metrics, 1, DTRAIN__PB_BYTES);
    dtrain__pb_varint(metrics, bytes + strlen("/text_summary"));
    dtrain__pb_raw(metrics, tag, bytes);
    dtrain__pb_raw(metrics, "/text_summary", strlen("/text_summary"));
    dtrain__value_plugin(metrics, "text", 2);
    const size_t tensor = dtrain__pb_begin(metrics, 8);
    dtrain__pb_integer(metrics, 1, 7); /* DT_STRING */
    const size_t shape = dtrain__pb_begin(metrics, 2);
    const size_t dim = dtrain__pb_begin(metrics, 2);
    dtrain__pb_integer(metrics, 1, 1);
    dtrain__pb_end(metrics, dim);
    dtrain__pb_end(metrics, shape);
    dtrain__pb_text(metrics, 8, text);
    dtrain__pb_end(metrics, tensor);
    dtrain__pb_end(metrics, one);
}

/* ---- Hyper-parameters -------------------------------------------------------------------------*/

enum { DTRAIN__HPARAM_STRING = 1, DTRAIN__HPARAM_BOOL = 2, DTRAIN__HPARAM_NUMBER = 3 };

typedef struct dtrain__hparam {
    const char *name, *value; /* not ended by 0 */
    size_t name_bytes, value_bytes;
    double number;
    int kind;
} dtrain__hparam;

/* Take the next line of NAME=VALUE; false: there is none. Lines without = are passed over. Numbers
 * are read as the locale "C" has them, whatever the host's is. */
static bool dtrain__hparam_next(const char **text, dtrain__hparam *h)
{
    while (**text) {
        char number[64];
        const char *line = *text;
        const size_t bytes = strcspn(line, "\n");
        const char *equals = (const char *)memchr(line, '=', bytes);
        *text += bytes + (line[bytes] == '\n');
        if (!equals || equals == line) continue;
        h->name = line;
        h->name_bytes = (size_t)(equals - line);
        h->value = equals + 1;
        h->value_bytes = bytes - h->name_bytes - 1;
        h->kind = DTRAIN__HPARAM_STRING;
        snprintf(number, sizeof number, "%.*s", (int)dtrain__min((int64_t)h->value_bytes, 63),
                 h->value);
        const locale_t c = newlocale(LC_ALL_MASK, "C", (locale_t)0);
        char *end = number;
        if (c) {
            const locale_t before = uselocale(c); /* of this thread alone */
            h->number = strtod(number, &end);
            uselocale(before);
            freelocale(c);
        }
        if (number[0] && end == number + h->value_bytes && dtrain__finite(h->number))
            h->kind = DTRAIN__HPARAM_NUMBER;
        else if (strcmp(number, "true") == 0 || strcmp(number, "false") == 0)
            h->kind = DTRAIN__HPARAM_BOOL;
        return true;
    }
    return false;
}

/* Begin a value of the hparams plugin: all that counts is its metadata. Three messages are open
 * then. */
static void dtrain__hparams_begin(dtrain_metrics *metrics, const char *tag, size_t open[4])
{
    open[0] = dtrain__pb_begin(metrics, 1);
    dtrain__pb_text(metrics, 1, tag);
    open[1] = dtrain__pb_begin(metrics, 9);
    open[2] = dtrain__pb_begin(metrics, 1);
    dtrain__pb_text(metrics, 1, "hparams");
    open[3] = dtrain__pb_begin(metrics, 2);
    dtrain__pb_integer(metrics, 1, 0); /* version of the plugin's data */
}

static void dtrain__hparams_end(dtrain_metrics *metrics, const size_t open[4])
{
    for (int i = 3; i >= 0; i--) dtrain__pb_end(metrics, open[i]);
}

/* Say which columns the table of the HPARAMS tab has. */
static void dtrain__hparams_experiment(dtrain_metrics *metrics, const char *lines, double now)
{
    static const char *const shown[] = {"train/loss", "train/val_loss",
                                        "throughput/tokens_per_second", "time/step_ms"};
    size_t open[4];
    dtrain__hparam h;
    dtrain__hparams_begin(metrics, "_hparams_/experiment", open);
    const size_t experiment = dtrain__pb_begin(metrics, 2);
    dtrain__pb_double(metrics, 3, now);
    while (dtrain__hparam_next(&lines, &h)) {
        const size_t info = dtrain__pb_begin(metrics, 4);
        dtrain__pb_bytes(metrics, 1, h.name, h.name_bytes);
        dtrain__pb_integer(metrics, 4, h.kind);
        dtrain__pb_end(metrics, info);
    }
    for (size_t i = 0; i < sizeof shown / sizeof *shown; i++) {
        const size_t info = dtrain__pb_begin(metrics, 5);
        const size_t name = dtrain__pb_begin(metrics, 1);
        dtrain__pb_text(metrics, 2, shown[i]);
        dtrain__pb_end(metrics, name);
        dtrain__pb_end(metrics, info);
    }
    dtrain__pb_end(metrics, experiment);
    dtrain__hparams_end(metrics, open);
}

/* Say which values this run has. */
static void dtrain__hparams_start(dtrain_metrics *metrics, const char *lines, double now)
{
    size_t open[4];
    dtrain__hparam h;
    dtrain__hparams_begin(metrics, "_hparams_/session_start_info", open);
    const size_t start = dtrain__pb_begin(metrics, 3);
    while (dtrain__hparam_next(&lines, &h)) {
        const size_t entry = dtrain__pb_begin(metrics, 1);
        dtrain__pb_bytes(metrics, 1, h.name, h.name_bytes);
        const size_t value = dtrain__pb_begin(metrics, 2);
        if (h.kind == DTRAIN__HPARAM_NUMBER) dtrain__pb_double(metrics, 2, h.number);
        else if (h.kind == DTRAIN__HPARAM_BOOL) dtrain__pb_integer(metrics, 4, *h.value == 't');
        else dtrain__pb_bytes(metrics, 3, h.value, h.value_bytes);
        dtrain__pb_end(metrics, value);
        dtrain__pb_end(metrics, entry);
    }
    dtrain__pb_text(metrics, 4, metrics->desc.run_name);
    dtrain__pb_double(metrics, 5, now);
    dtrain__pb_end(metrics, start);
    dtrain__hparams_end(metrics, open);
}

/* ---- Files ------------------------------------------------------------------------------------*/

/* Make a directory and those around it. */
static dtrain_result dtrain__make_directories(char *path)
{
    for (char *at = path + 1;; at++) {
        const char end = *at;
        if (end != '/' && end != 0) continue;
        *at = 0;
        const bool made = mkdir(path, 0777) == 0 || errno == EEXIST;
        const int error = errno;
        *at = end;
        if (!made && end == 0)
            return dtrain_fail(DTRAIN_ERROR_FILE,
                               "dtrain_metrics_create: the directory %s cannot be made: %s", path,
                               strerror(error));
        if (end == 0) return DTRAIN_OK;
    }
}

/* Find seconds for a file's name that come after those of all files here: a run may start twice in
 * a second, on another host, or after the clock was set back. */
static long long dtrain__event_seconds(const char *directory)
{
    static const char head[] = "events.out.tfevents.";
    long long seconds = (long long)time(NULL), found;
    DIR *files = dtrain__open_directory(directory);
    for (const struct dirent *file; files && (file = readdir(files)) != NULL;)
        if (strncmp(file->d_name, head, sizeof head - 1) == 0 &&
            sscanf(file->d_name + sizeof head - 1, "%10lld", &found) == 1 && found >= seconds &&
            found < 9999999999LL)
            seconds = found + 1;
    if (files) closedir(files);
    return seconds;
}

static dtrain_result dtrain__event_open(dtrain_metrics *metrics)
{
    dtrain__tensorboard *t = &metrics->tensorboard;
    const char *directory = metrics->desc.tensorboard_dir;
    char host[65] = "host";
    (void)gethostname(host, sizeof host - 1);
    t->path_bytes = strlen(directory) + 160;
    t->path = (char *)dtrain__alloc(&metrics->allocator, t->path_bytes, 1, "a path");
    if (!t->path) return DTRAIN_ERROR_MEMORY;
    snprintf(t->path, t->path_bytes, "%s", directory);
    DTRAIN__TRY(dtrain__make_directories(t->path));
    snprintf(t->path, t->path_bytes, "%s/events.out.tfevents.%010lld.%s.%ld.0", directory,
             dtrain__event_seconds(directory), host, (long)getpid());
    return dtrain__records_open(&t->file, t->path, false);
}

/* ---- The sink ---------------------------------------------------------------------------------*/

/* Write what comes before the first step: the version, where this session begins, its
 * configuration and its hyper-parameters. */
static dtrain_result dtrain__tensorboard_open(void *user, const dtrain_metrics_desc *desc,
                                              const dtrain_metrics_sample *sample)
{
    dtrain_metrics *metrics = (dtrain_metrics *)user;
    const double now = (double)time(NULL);
    (void)sample;
    DTRAIN__TRY(dtrain__event_open(metrics));
    dtrain__event_begin(metrics, now, 0);
    dtrain__pb_text(metrics, 3, "brain.Event:2");
    DTRAIN__TRY(dtrain__event_end(metrics));
    dtrain__event_begin(metrics, now, desc->first_step);
    const size_t session = dtrain__pb_begin(metrics, 7);
    dtrain__pb_integer(metrics, 1, 1); /* START */
    dtrain__pb_end(metrics, session);
    DTRAIN__TRY(dtrain__event_end(metrics));
    if (desc->config) {
        dtrain__event_begin(metrics, now, desc->first_step);
        const size_t summary = dtrain__pb_begin(metrics, 5);
        dtrain__value_text(metrics, "config", desc->config);
        dtrain__pb_end(metrics, summary);
        DTRAIN__TRY(dtrain__event_end(metrics));
    }
    if (!desc->hparams) return DTRAIN_OK;
    dtrain__event_begin(metrics, now, 0);
    const size_t summary = dtrain__pb_begin(metrics, 5);
    dtrain__hparams_experiment(metrics, desc->hparams, now);
    dtrain__hparams_start(metrics, desc->hparams, now);
    dtrain__pb_end(metrics, summary);
    return dtrain__event_end(metrics);
}

/* Write all scalars of a step in one record. What is fixed comes with the first. */
static dtrain_result dtrain__tensorboard_step(void *user, const dtrain_metrics_sample *sample)
{
    dtrain_metrics *metrics = (dtrain_metrics *)user;
    const bool first = metrics->summary.steps == 1;
    dtrain__event_begin(metrics, sample->wall_time, sample->step);
    const size_t summary = dtrain__pb_begin(metrics, 5);
    for (size_t i = 0; i < sample->count; i++)
        if (sample->known[i] && (first || !(sample->metrics[i].flags & DTRAIN_METRIC_FIXED)))
            dtrain__value_scalar(metrics, &sample->metrics[i], sample->values[i]);
    dtrain__pb_end(metrics, summary);
    return dtrain__event_end(metrics);
}

static dtrain_result dtrain__tensorboard_histogram(void *user, const dtrain_histogram *histogram)
{
    dtrain_metrics *metrics = (dtrain_metrics *)user;
    dtrain__event_begin(metrics, histogram->wall_time, histogram->step);
    const size_t summary = dtrain__pb_begin(metrics, 5);
    dtrain__value_histogram(metrics, histogram);
    dtrain__pb_end(metrics, summary);
    return dtrain__event_end(metrics);
}

static dtrain_result dtrain__tensorboard_finish(void *user, const dtrain_summary *s)
{
    dtrain_metrics *metrics = (dtrain_metrics *)user;
    const double now = (double)time(NULL);
    dtrain_result result = DTRAIN_OK;
    size_t open[4];
    if (metrics->tensorboard.file.fd < 0) return DTRAIN_OK;
    if (metrics->desc.hparams) {
        dtrain__event_begin(metrics, now, s->steps ? metrics->last.step : 0);
        const size_t summary = dtrain__pb_begin(metrics, 5);
        dtrain__hparams_begin(metrics, "_hparams_/session_end_info", open);
        const size_t end = dtrain__pb_begin(metrics, 4);
        dtrain__pb_integer(metrics, 1, 1); /* STATUS_SUCCESS */
        dtrain__pb_double(metrics, 2, now);
        dtrain__pb_end(metrics, end);
        dtrain__hparams_end(metrics, open);
        dtrain__pb_end(metrics, summary);
        result = dtrain__event_end(metrics);
    }
    const dtrain_result closed = dtrain__records_close(&metrics->tensorboard.file);
    return result == DTRAIN_OK ? closed : result;
}

DTRAIN__PRIVATE dtrain__sink dtrain__tensorboard_sink(void)
{
    const dtrain__sink sink = {{false, "tensorboard", dtrain__tensorboard_open,
                                dtrain__tensorboard_step, dtrain__tensorboard_histogram,
                                dtrain__tensorboard_finish, NULL},
                               "records of the event file",
                               false};
    return sink;
}

DTRAIN__PRIVATE void dtrain__tensorboard_free(dtrain_metrics *metrics)
{
    dtrain__tensorboard *t = &metrics->tensorboard;
    dtrain__free(&metrics->allocator, t->record, t->room, 1);
    dtrain__free(&metrics->allocator, t->path, t->path_bytes, 1);
    t->record = NULL;
    t->path = NULL;
}
