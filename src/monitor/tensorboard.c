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
 * varint may have leading zeros. Numbers are little-endian, as on every machine that dtrain runs
 * on.
 *
 * A run that is resumed begins with a SessionLog of status START at its first step: readers drop
 * what the run before wrote from there on. Each step is one write; a record that a full disk has
 * cut is removed again, because readers give up a file at its first broken record. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/crc32c_internal.h"
#include "core/dtype.h"
#include "core/json_internal.h"
#include "core/result.h"
#include "world/world.h"
#include "monitor/metrics.h"
#include "monitor/monitor_internal.h"

#include <locale.h>

/* ---- Protocol Buffers -------------------------------------------------------------------------*/

enum { DTRAIN__PB_VARINT = 0, DTRAIN__PB_64 = 1, DTRAIN__PB_BYTES = 2, DTRAIN__PB_32 = 5 };

#define DTRAIN__PB_LENGTH 5 /* bytes of a length that is filled in later */

static void dtrain__pb_varint(dtrain__tensorboard *t, uint64_t value)
{
    unsigned char text[10];
    size_t n = 0;
    for (; value >= 128; value >>= 7) text[n++] = (unsigned char)(value | 128);
    text[n++] = (unsigned char)value;
    dtrain__text_append(t->record, text, n);
}

static void dtrain__pb_integer(dtrain__tensorboard *t, uint32_t field, int64_t value)
{
    dtrain__pb_varint(t, field << 3 | DTRAIN__PB_VARINT);
    dtrain__pb_varint(t, (uint64_t)value);
}

static void dtrain__pb_double(dtrain__tensorboard *t, uint32_t field, double value)
{
    dtrain__pb_varint(t, field << 3 | DTRAIN__PB_64);
    dtrain__text_append(t->record, &value, sizeof value);
}

static void dtrain__pb_float(dtrain__tensorboard *t, uint32_t field, double value)
{
    const float most = dtrain__f32_from_bits(0x7f800000u);
    const float rounded = value > (double)FLT_MAX    ? most
                          : value < -(double)FLT_MAX ? -most
                                                     : (float)value;
    dtrain__pb_varint(t, field << 3 | DTRAIN__PB_32);
    dtrain__text_append(t->record, &rounded, sizeof rounded);
}

/* Add a string, or an array of doubles. */
static void dtrain__pb_bytes(dtrain__tensorboard *t, uint32_t field, const void *data, size_t bytes)
{
    dtrain__pb_varint(t, field << 3 | DTRAIN__PB_BYTES);
    dtrain__pb_varint(t, bytes);
    dtrain__text_append(t->record, data, bytes);
}

static void dtrain__pb_text(dtrain__tensorboard *t, uint32_t field, const char *text)
{
    dtrain__pb_bytes(t, field, text, strlen(text));
}

/* Begin a message inside of the one that is open. */
static void dtrain__pb_begin(dtrain__tensorboard *t, uint32_t field)
{
    const char zeros[DTRAIN__PB_LENGTH] = {0};
    dtrain__pb_varint(t, field << 3 | DTRAIN__PB_BYTES);
    dtrain__text_append(t->record, zeros, sizeof zeros);
    t->open[t->depth++] = t->record->bytes;
}

/* End the innermost messages, `count` of them, and fill in their lengths. */
static void dtrain__pb_end(dtrain__tensorboard *t, int count)
{
    for (; count > 0; count--) {
        const size_t begin = t->open[--t->depth];
        if (t->record->failed) continue;
        uint64_t length = t->record->bytes - begin;
        unsigned char *at = (unsigned char *)t->record->at + begin - DTRAIN__PB_LENGTH;
        for (int i = 0; i < DTRAIN__PB_LENGTH; i++, length >>= 7)
            at[i] = (unsigned char)((length & 127) | (i + 1 < DTRAIN__PB_LENGTH ? 128 : 0));
    }
}

/* ---- Records ----------------------------------------------------------------------------------*/

#define DTRAIN__RECORD_HEAD 12 /* bytes before an Event */

/* Fields of an Event. */
enum { DTRAIN__EVENT_VERSION = 3, DTRAIN__EVENT_SUMMARY = 5, DTRAIN__EVENT_SESSION = 7 };

static uint32_t dtrain__masked_crc(const void *data, size_t bytes)
{
    const uint32_t crc = dtrain__crc32c(0, data, bytes);
    return (crc >> 15 | crc << 17) + 0xa282ead8u;
}

/* Begin a record with an Event, and in it a message. */
static void dtrain__event_begin(dtrain__tensorboard *t, double wall_time, int64_t step,
                                uint32_t message)
{
    const char zeros[DTRAIN__RECORD_HEAD] = {0};
    t->depth = 0;
    t->record->bytes = 0;
    t->record->failed = false;
    dtrain__text_append(t->record, zeros, sizeof zeros);
    dtrain__pb_double(t, 1, wall_time);
    dtrain__pb_integer(t, 2, step);
    dtrain__pb_begin(t, message);
}

/* End all messages, complete the record and write it. */
static dtrain_result dtrain__event_end(dtrain__tensorboard *t)
{
    dtrain__pb_end(t, t->depth);
    if (t->record->failed) return DTRAIN_ERROR_MEMORY;
    char *head = t->record->at;
    const uint64_t length = t->record->bytes - DTRAIN__RECORD_HEAD;
    const uint32_t crc = dtrain__masked_crc(head + DTRAIN__RECORD_HEAD, (size_t)length);
    memcpy(head, &length, sizeof length);
    const uint32_t head_crc = dtrain__masked_crc(head, sizeof length);
    memcpy(head + sizeof length, &head_crc, sizeof head_crc);
    dtrain__text_append(t->record, &crc, sizeof crc);
    if (t->file.torn)
        return dtrain_fail(DTRAIN_ERROR_FILE, "%s ends in a broken record that cannot be removed",
                           t->path);
    return dtrain__records_append(&t->file, t->record);
}

static void dtrain__value_scalar(dtrain__tensorboard *t, const dtrain_metric *metric, double value)
{
    char tag[96];
    snprintf(tag, sizeof tag, "%s/%s", metric->group, metric->name);
    dtrain__pb_begin(t, 1);
    dtrain__pb_text(t, 1, tag);
    dtrain__pb_float(t, 2, value);
    dtrain__pb_end(t, 1);
}

static void dtrain__value_histogram(dtrain__tensorboard *t, const dtrain_histogram *h)
{
    dtrain__pb_begin(t, 1);
    dtrain__pb_text(t, 1, h->tag);
    dtrain__pb_begin(t, 5);
    dtrain__pb_double(t, 1, h->min);
    dtrain__pb_double(t, 2, h->max);
    dtrain__pb_double(t, 3, (double)h->count);
    dtrain__pb_double(t, 4, h->sum);
    dtrain__pb_double(t, 5, h->sum_squares);
    dtrain__pb_bytes(t, 6, h->limits, h->bucket_count * sizeof *h->limits);
    dtrain__pb_bytes(t, 7, h->buckets, h->bucket_count * sizeof *h->buckets);
    dtrain__pb_end(t, 2);
}

/* Begin a value that a plugin of TensorBoard shows: its tag, and the metadata and plugin data that
 * stay open. */
static void dtrain__value_begin(dtrain__tensorboard *t, const char *tag, const char *plugin)
{
    dtrain__pb_begin(t, 1);
    dtrain__pb_text(t, 1, tag);
    dtrain__pb_begin(t, 9);
    dtrain__pb_begin(t, 1);
    dtrain__pb_text(t, 1, plugin);
}

/* Add a text, as a tensor of shape (1) of strings. */
static void dtrain__value_text(dtrain__tensorboard *t, const char *tag, const char *text)
{
    dtrain__value_begin(t, tag, "text");
    dtrain__pb_end(t, 1);
    dtrain__pb_integer(t, 4, 2); /* DATA_CLASS_TENSOR */
    dtrain__pb_end(t, 1);
    dtrain__pb_begin(t, 8);
    dtrain__pb_integer(t, 1, 7); /* DT_STRING */
    dtrain__pb_begin(t, 2);
    dtrain__pb_begin(t, 2);
    dtrain__pb_integer(t, 1, 1);
    dtrain__pb_end(t, 2);
    dtrain__pb_text(t, 8, text);
    dtrain__pb_end(t, 2);
}

/* ---- Hyper-parameters -------------------------------------------------------------------------*/

enum { DTRAIN__HPARAM_STRING = 1, DTRAIN__HPARAM_BOOL = 2, DTRAIN__HPARAM_NUMBER = 3 };

typedef struct dtrain__hparam {
    const char *name, *value; /* not ended by 0 */
    size_t name_bytes, value_bytes;
    double number;
    int kind;
} dtrain__hparam;

/* Take the next line of NAME=VALUE; false: there is none. Lines without = are skipped. */
static bool dtrain__hparam_next(const char **text, dtrain__hparam *h)
{
    while (**text) {
        char value[64], *end;
        const char *line = *text;
        const size_t bytes = strcspn(line, "\n");
        const char *equals = (const char *)memchr(line, '=', bytes);
        *text += bytes + (line[bytes] == '\n');
        if (!equals || equals == line) continue;
        h->name = line;
        h->name_bytes = (size_t)(equals - line);
        h->value = equals + 1;
        h->value_bytes = bytes - h->name_bytes - 1;
        snprintf(value, sizeof value, "%.*s", (int)dtrain__min((int64_t)h->value_bytes, 63),
                 h->value);
        h->number = strtod(value, &end);
        h->kind = DTRAIN__HPARAM_STRING;
        if (value[0] && end == value + h->value_bytes && dtrain__finite(h->number))
            h->kind = DTRAIN__HPARAM_NUMBER;
        else if (strcmp(value, "true") == 0 || strcmp(value, "false") == 0)
            h->kind = DTRAIN__HPARAM_BOOL;
        return true;
    }
    return false;
}

/* Begin a value of the hparams plugin, all of which is in its metadata; five messages, of which
 * `message` is the innermost, are open then. */
static void dtrain__hparams_begin(dtrain__tensorboard *t, const char *tag, uint32_t message)
{
    dtrain__value_begin(t, tag, "hparams");
    dtrain__pb_begin(t, 2);
    dtrain__pb_integer(t, 1, 0); /* version of the plugin's data */
    dtrain__pb_begin(t, message);
}

/* Say which columns the table of the HPARAMS tab has. */
static void dtrain__hparams_experiment(dtrain__tensorboard *t, const char *lines, double now)
{
    static const char *const shown[] = {"loss/loss", "loss/val_loss",
                                        "throughput/tokens_per_second", "time/step_ms"};
    dtrain__hparam h;
    dtrain__hparams_begin(t, "_hparams_/experiment", 2);
    dtrain__pb_double(t, 3, now);
    while (dtrain__hparam_next(&lines, &h)) {
        dtrain__pb_begin(t, 4);
        dtrain__pb_bytes(t, 1, h.name, h.name_bytes);
        dtrain__pb_integer(t, 4, h.kind);
        dtrain__pb_end(t, 1);
    }
    for (size_t i = 0; i < sizeof shown / sizeof *shown; i++) {
        dtrain__pb_begin(t, 5);
        dtrain__pb_begin(t, 1);
        dtrain__pb_text(t, 2, shown[i]);
        dtrain__pb_end(t, 2);
    }
    dtrain__pb_end(t, 5);
}

/* Say which values this run has. */
static void dtrain__hparams_start(dtrain__tensorboard *t, const char *lines, const char *run_name,
                                  double now)
{
    dtrain__hparam h;
    dtrain__hparams_begin(t, "_hparams_/session_start_info", 3);
    while (dtrain__hparam_next(&lines, &h)) {
        dtrain__pb_begin(t, 1);
        dtrain__pb_bytes(t, 1, h.name, h.name_bytes);
        dtrain__pb_begin(t, 2);
        if (h.kind == DTRAIN__HPARAM_NUMBER) dtrain__pb_double(t, 2, h.number);
        else if (h.kind == DTRAIN__HPARAM_BOOL) dtrain__pb_integer(t, 4, *h.value == 't');
        else dtrain__pb_bytes(t, 3, h.value, h.value_bytes);
        dtrain__pb_end(t, 2);
    }
    dtrain__pb_text(t, 4, run_name);
    dtrain__pb_double(t, 5, now);
    dtrain__pb_end(t, 5);
}

/* Write the hyper-parameters, whose numbers are those of the locale "C" whatever the host's is. */
static dtrain_result dtrain__hparams_write(dtrain__tensorboard *t, const dtrain_metrics_desc *desc,
                                           double now)
{
    const locale_t c = newlocale(LC_ALL_MASK, "C", (locale_t)0);
    if (!c) return dtrain_fail(DTRAIN_ERROR_MEMORY, "no memory for a locale");
    const locale_t before = uselocale(c); /* of this thread alone */
    dtrain__event_begin(t, now, 0, DTRAIN__EVENT_SUMMARY);
    dtrain__hparams_experiment(t, desc->hparams, now);
    dtrain__hparams_start(t, desc->hparams, desc->run_name, now);
    uselocale(before);
    freelocale(c);
    return dtrain__event_end(t);
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

static dtrain_result dtrain__event_open(dtrain__tensorboard *t, const char *directory)
{
    char host[65] = "host";
    (void)gethostname(host, sizeof host - 1);
    t->path_bytes = strlen(directory) + 160;
    t->path = (char *)dtrain__alloc(t->record->allocator, t->path_bytes, 1, "a path");
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
DTRAIN__PRIVATE dtrain_result dtrain__tensorboard_open(void *user, const dtrain_metrics_desc *desc,
                                                       const dtrain_metrics_sample *sample)
{
    dtrain__tensorboard *t = &((dtrain_metrics *)user)->tensorboard;
    const double now = sample->wall_time;
    t->record = &((dtrain_metrics *)user)->text;
    DTRAIN__TRY(dtrain__event_open(t, desc->tensorboard_dir));
    dtrain__event_begin(t, now, 0, DTRAIN__EVENT_VERSION);
    dtrain__text_add(t->record, "brain.Event:2"); /* no message, but a string: both are bytes */
    DTRAIN__TRY(dtrain__event_end(t));
    dtrain__event_begin(t, now, desc->first_step, DTRAIN__EVENT_SESSION);
    dtrain__pb_integer(t, 1, 1); /* START */
    DTRAIN__TRY(dtrain__event_end(t));
    if (desc->config) {
        dtrain__event_begin(t, now, desc->first_step, DTRAIN__EVENT_SUMMARY);
        dtrain__value_text(t, "config/text_summary", desc->config);
        DTRAIN__TRY(dtrain__event_end(t));
    }
    return desc->hparams ? dtrain__hparams_write(t, desc, now) : DTRAIN_OK;
}

/* Write all scalars of a step in one record. Those that are fixed come with the first. */
DTRAIN__PRIVATE dtrain_result dtrain__tensorboard_step(void *user,
                                                       const dtrain_metrics_sample *sample)
{
    dtrain__tensorboard *t = &((dtrain_metrics *)user)->tensorboard;
    const bool first = ((dtrain_metrics *)user)->summary.steps == 1;
    dtrain__event_begin(t, sample->wall_time, sample->step, DTRAIN__EVENT_SUMMARY);
    for (size_t i = 0; i < sample->count; i++)
        if (sample->known[i] && (first || !(sample->metrics[i].flags & DTRAIN_METRIC_FIXED)))
            dtrain__value_scalar(t, &sample->metrics[i], sample->values[i]);
    return dtrain__event_end(t);
}

DTRAIN__PRIVATE dtrain_result dtrain__tensorboard_histogram(void *user,
                                                            const dtrain_histogram *histogram)
{
    dtrain__tensorboard *t = &((dtrain_metrics *)user)->tensorboard;
    dtrain__event_begin(t, histogram->wall_time, histogram->step, DTRAIN__EVENT_SUMMARY);
    dtrain__value_histogram(t, histogram);
    return dtrain__event_end(t);
}

/* Say that the session has ended well, where the HPARAMS tab has it, and close the file. */
DTRAIN__PRIVATE dtrain_result dtrain__tensorboard_finish(void *user, const dtrain_summary *summary)
{
    dtrain_metrics *metrics = (dtrain_metrics *)user;
    dtrain__tensorboard *t = &metrics->tensorboard;
    const double now = (double)time(NULL);
    dtrain_result result = DTRAIN_OK;
    (void)summary;
    if (metrics->desc.hparams) {
        dtrain__event_begin(t, now, metrics->sample.step, DTRAIN__EVENT_SUMMARY);
        dtrain__hparams_begin(t, "_hparams_/session_end_info", 4);
        dtrain__pb_integer(t, 1, 1); /* STATUS_SUCCESS */
        dtrain__pb_double(t, 2, now);
        result = dtrain__event_end(t);
    }
    const dtrain_result closed = dtrain__records_close(&t->file);
    return result == DTRAIN_OK ? closed : result;
}
