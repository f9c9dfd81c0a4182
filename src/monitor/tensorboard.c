/* Event files for TensorBoard
 *
 * A run is a directory, and each start of the run a file, events.out.tfevents.SECONDS.HOST.PID.0.
 * TensorBoard reads files in the order of their names. A file is a sequence of records (TFRecord),
 * each an Event in the encoding of Protocol Buffers:
 *
 *     u64 length | u32 masked CRC-32C of these 8 bytes | Event | u32 masked CRC-32C of the Event
 *
 * The messages are written by hand: their fields are few, and have had these numbers since 2015
 * (tensorboard/compat/proto/event.proto, summary.proto; plugins/hparams/plugin_data.proto). The
 * length of a nested message is unknown at its begin, so five bytes are left for it: a varint can
 * have leading zeros. Numbers are little-endian, like all machines that dtrain supports.
 *
 * A resumed run begins with a SessionLog of status START at its first step: readers drop this and
 * later steps of the earlier run. Each step is one write. A record that a full disk has cut is
 * removed, because readers give up a file at its first broken record. */

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

#define DTRAIN__PB_LENGTH 5 /* bytes of a length, filled in later */

static void dtrain__pb_varint(dtrain_metrics *m, uint64_t value)
{
    unsigned char text[10];
    size_t n = 0;
    for (; value >= 128; value >>= 7) text[n++] = (unsigned char)(value | 128);
    text[n++] = (unsigned char)value;
    dtrain__text_append(&m->text, text, n);
}

/* Add fields to the open message. Each is a digit, its number, and a letter:
 *     i l    an int, an int64_t           f d    a double as 4 bytes, as 8 bytes
 *     s b    a string; bytes, as size_t and const void *
 *     {      begins a nested message; } has no number and ends it */
static void dtrain__pb_list(dtrain_metrics *m, const char *fields, va_list args)
{
    for (const char *at = fields; *at; at++) {
        const uint32_t field = *at == '}' ? 0u : (uint32_t)(*at++ - '0') << 3;
        uint64_t length;
        if (*at == 'i' || *at == 'l') {
            dtrain__pb_varint(m, field | DTRAIN__PB_VARINT);
            dtrain__pb_varint(m,
                              (uint64_t)(*at == 'l' ? va_arg(args, int64_t) : va_arg(args, int)));
        } else if (*at == 'd') {
            const double value = va_arg(args, double);
            dtrain__pb_varint(m, field | DTRAIN__PB_64);
            dtrain__text_append(&m->text, &value, sizeof value);
        } else if (*at == 'f') { /* values beyond fp32 become infinite */
            const double value = va_arg(args, double);
            const float most = dtrain__f32_from_bits(0x7f800000u);
            const float rounded = value > (double)FLT_MAX    ? most
                                  : value < -(double)FLT_MAX ? -most
                                                             : (float)value;
            dtrain__pb_varint(m, field | DTRAIN__PB_32);
            dtrain__text_append(&m->text, &rounded, sizeof rounded);
        } else if (*at == 's' || *at == 'b') {
            length = *at == 'b' ? va_arg(args, size_t) : 0;
            const void *data = va_arg(args, const void *);
            if (*at == 's') length = strlen((const char *)data);
            dtrain__pb_varint(m, field | DTRAIN__PB_BYTES);
            dtrain__pb_varint(m, length);
            dtrain__text_append(&m->text, data, (size_t)length);
        } else if (*at == '{') {
            const char zeros[DTRAIN__PB_LENGTH] = {0};
            dtrain__pb_varint(m, field | DTRAIN__PB_BYTES);
            dtrain__text_append(&m->text, zeros, sizeof zeros);
            m->tensorboard.open[m->tensorboard.depth++] = m->text.bytes;
        } else {
            const size_t begin = m->tensorboard.open[--m->tensorboard.depth];
            if (m->text.failed) continue;
            length = m->text.bytes - begin;
            unsigned char *head = (unsigned char *)m->text.at + begin - DTRAIN__PB_LENGTH;
            for (int i = 0; i < DTRAIN__PB_LENGTH; i++, length >>= 7)
                head[i] = (unsigned char)((length & 127) | (i + 1 < DTRAIN__PB_LENGTH ? 128 : 0));
        }
    }
}

static void dtrain__pb_add(dtrain_metrics *m, const char *fields, ...)
{
    va_list args;
    va_start(args, fields);
    dtrain__pb_list(m, fields, args);
    va_end(args);
}

/* ---- Records ----------------------------------------------------------------------------------*/

#define DTRAIN__RECORD_HEAD 12 /* bytes before an Event */

static uint32_t dtrain__masked_crc(const void *data, size_t bytes)
{
    const uint32_t crc = dtrain__crc32c(0, data, bytes);
    return (crc >> 15 | crc << 17) + 0xa282ead8u;
}

/* Begin a record with an Event. Fields: 3 the version, 5 a summary, 7 a session. */
static void dtrain__event_begin(dtrain_metrics *m, double wall_time, int64_t step)
{
    const char zeros[DTRAIN__RECORD_HEAD] = {0};
    m->tensorboard.depth = 0;
    dtrain__text_append(dtrain__record_begin(m), zeros, sizeof zeros);
    dtrain__pb_add(m, "1d2l", wall_time, step);
}

/* Complete the record and write it. */
static dtrain_result dtrain__event_end(dtrain_metrics *m)
{
    if (m->text.failed) return DTRAIN_ERROR_MEMORY;
    char *head = m->text.at;
    const uint64_t length = m->text.bytes - DTRAIN__RECORD_HEAD;
    const uint32_t crc = dtrain__masked_crc(head + DTRAIN__RECORD_HEAD, (size_t)length);
    memcpy(head, &length, sizeof length);
    const uint32_t head_crc = dtrain__masked_crc(head, sizeof length);
    memcpy(head + sizeof length, &head_crc, sizeof head_crc);
    dtrain__text_append(&m->text, &crc, sizeof crc);
    if (m->tensorboard.file.partial)
        return dtrain_fail(DTRAIN_ERROR_FILE, "%s ends in a broken record that cannot be removed",
                           m->tensorboard.path);
    return dtrain__records_append(&m->tensorboard.file, &m->text);
}

/* Write an Event with these fields. */
static dtrain_result dtrain__event_put(dtrain_metrics *m, double wall_time, int64_t step,
                                       const char *fields, ...)
{
    va_list args;
    dtrain__event_begin(m, wall_time, step);
    va_start(args, fields);
    dtrain__pb_list(m, fields, args);
    va_end(args);
    return dtrain__event_end(m);
}

/* ---- Hyper-parameters -------------------------------------------------------------------------*/

/* The begin of a value of the hparams plugin, whose metadata has everything. */
#define DTRAIN__HPARAMS "1{1s9{1{1s2{1i" /* tag, "hparams", 0: version of the plugin's data */

enum { DTRAIN__HPARAM_STRING = 1, DTRAIN__HPARAM_BOOL = 2, DTRAIN__HPARAM_NUMBER = 3 };

/* Add a column or a value for each line NAME=VALUE. Skip lines without =. */
static void dtrain__hparams_add(dtrain_metrics *m, bool values)
{
    for (const char *line = m->desc.hparams, *next; *line; line = next) {
        char text[64], *end;
        const size_t bytes = strcspn(line, "\n");
        const char *equals = (const char *)memchr(line, '=', bytes);
        next = line + bytes + (line[bytes] == '\n');
        if (!equals || equals == line) continue;
        const size_t name = (size_t)(equals - line), rest = bytes - name - 1;
        snprintf(text, sizeof text, "%.*s", (int)dtrain__min((int64_t)rest, 63), equals + 1);
        const double number = strtod(text, &end);
        int kind = DTRAIN__HPARAM_STRING;
        if (text[0] && end == text + rest && dtrain__finite(number)) kind = DTRAIN__HPARAM_NUMBER;
        else if (strcmp(text, "true") == 0 || strcmp(text, "false") == 0)
            kind = DTRAIN__HPARAM_BOOL;
        dtrain__pb_add(m, values ? "1{1b2{" : "4{1b", name, line);
        if (!values) dtrain__pb_add(m, "4i}", kind);
        else if (kind == DTRAIN__HPARAM_NUMBER) dtrain__pb_add(m, "2d}}", number);
        else if (kind == DTRAIN__HPARAM_BOOL) dtrain__pb_add(m, "4i}}", text[0] == 't');
        else dtrain__pb_add(m, "3b}}", rest, equals + 1);
    }
}

/* Write the columns of TensorBoard's HPARAMS tab, and the values of this run. Numbers are written
 * as in the locale "C". */
static dtrain_result dtrain__hparams_write(dtrain_metrics *m, double now)
{
    static const char *const shown[] = {"loss/loss", "loss/val_loss",
                                        "throughput/tokens_per_second", "time/step_ms"};
    const locale_t c = newlocale(LC_ALL_MASK, "C", (locale_t)0);
    if (!c) return dtrain_fail(DTRAIN_ERROR_MEMORY, "no memory for a locale");
    const locale_t before = uselocale(c); /* of this thread only */
    dtrain__event_begin(m, now, 0);
    dtrain__pb_add(m, "5{" DTRAIN__HPARAMS "2{3d", "_hparams_/experiment", "hparams", 0, now);
    dtrain__hparams_add(m, false);
    for (size_t i = 0; i < sizeof shown / sizeof *shown; i++)
        dtrain__pb_add(m, "5{1{2s}}", shown[i]);
    dtrain__pb_add(m, "}}}}}" DTRAIN__HPARAMS "3{", "_hparams_/session_start_info", "hparams", 0);
    dtrain__hparams_add(m, true);
    dtrain__pb_add(m, "4s5d}}}}}}", m->desc.run_name, now);
    uselocale(before);
    freelocale(c);
    return dtrain__event_end(m);
}

/* ---- Files ------------------------------------------------------------------------------------*/

/* Make the directory with its parents, and a file in it. The seconds in its name are larger than in
 * all other files: a run can start twice in a second, on another host, or after the clock was set
 * back. */
static dtrain_result dtrain__event_open(dtrain_metrics *m)
{
    static const char head[] = "events.out.tfevents.";
    const char *directory = m->desc.tensorboard_dir;
    char *path = m->tensorboard.path;
    long long seconds = (long long)time(NULL), found;
    char host[65] = "host";
    (void)gethostname(host, sizeof host - 1);
    strcpy(path, directory);
    for (char *at = path, end = 1; end; at++) {
        end = at[1];
        if (end != '/' && end != 0) continue;
        at[1] = 0;
        const bool made = mkdir(path, 0777) == 0 || errno == EEXIST;
        if (!made && end == 0)
            return dtrain_fail(DTRAIN_ERROR_FILE,
                               "dtrain_metrics_create: the directory %s cannot be made: %s",
                               directory, strerror(errno));
        at[1] = end;
    }
    DIR *files = dtrain__open_directory(directory);
    for (const struct dirent *file; files && (file = readdir(files)) != NULL;)
        if (strncmp(file->d_name, head, sizeof head - 1) == 0 &&
            sscanf(file->d_name + sizeof head - 1, "%10lld", &found) == 1 && found >= seconds &&
            found < 9999999999LL)
            seconds = found + 1;
    if (files) closedir(files);
    snprintf(path, strlen(directory) + DTRAIN__EVENT_FILE, "%s/%s%010lld.%s.%ld.0", directory, head,
             seconds, host, (long)getpid());
    return dtrain__records_open(&m->tensorboard.file, path, false);
}

/* ---- The sink ---------------------------------------------------------------------------------*/

/* At OPEN write the version, the first step of this session, configuration and hyper-parameters. At
 * a step write all scalars in one record, at the first step also the fixed figures. Write
 * histograms, and at the end that the session was a success, for the HPARAMS tab. */
DTRAIN__PRIVATE dtrain_result dtrain__tensorboard_sink(void *user,
                                                       const dtrain_metrics_sample *sample)
{
    dtrain_metrics *m = (dtrain_metrics *)user;
    const dtrain_histogram *h = sample->histogram;
    const bool open = sample->moment == DTRAIN_METRICS_OPEN;
    const double now = open ? sample->wall_time : (double)time(NULL);
    const int64_t step = m->desc.first_step;
    dtrain_result result = DTRAIN_OK;
    if (open) {
        DTRAIN__TRY(dtrain__event_open(m));
        DTRAIN__TRY(dtrain__event_put(m, now, 0, "3s", "brain.Event:2"));
        DTRAIN__TRY(dtrain__event_put(m, now, step, "7{1i}", 1)); /* START */
        if (m->desc.config) /* a tensor (2) of strings (7) with shape (1) */
            DTRAIN__TRY(dtrain__event_put(m, now, step, "5{1{1s9{1{1s}4i}8{1i2{2{1i}}8s}}}",
                                          "config/text_summary", "text", 2, 7, 1, m->desc.config));
        return m->desc.hparams ? dtrain__hparams_write(m, now) : DTRAIN_OK;
    }
    if (sample->moment == DTRAIN_METRICS_STEP) {
        dtrain__event_begin(m, sample->wall_time, sample->record->step);
        dtrain__pb_add(m, "5{");
        const size_t fixed = m->summary.steps > 1 ? sample->fixed_count : 0;
        for (size_t i = 0; i < sample->count - fixed; i++) {
            const dtrain_figure *figure = &sample->figures[i];
            char tag[96];
            snprintf(tag, sizeof tag, "%s%s", strchr(figure->name, '/') ? "" : "added/",
                     figure->name);
            dtrain__pb_add(m, "1{1s2f}", tag, figure->value);
        }
        dtrain__pb_add(m, "}");
        return dtrain__event_end(m);
    }
    if (h)
        return dtrain__event_put(m, h->wall_time, h->step, "5{1{1s5{1d2d3d4d5d6b7b}}}", h->tag,
                                 h->min, h->max, (double)h->count, h->sum, h->sum_squares,
                                 h->bucket_count * sizeof *h->limits, (const void *)h->limits,
                                 h->bucket_count * sizeof *h->buckets, (const void *)h->buckets);
    if (m->desc.hparams)
        result =
            dtrain__event_put(m, now, sample->record->step, "5{" DTRAIN__HPARAMS "4{1i2d}}}}}}",
                              "_hparams_/session_end_info", "hparams", 0, 1 /* success */, now);
    const dtrain_result closed = dtrain__records_close(&m->tensorboard.file);
    return result == DTRAIN_OK ? closed : result;
}
