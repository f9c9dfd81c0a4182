/* test_monitor.c: the writers of metrics: random records through all of them against a naive reading of their files,
 * sinks that fail at call n, that call back, memory that ends, files that fail.
 *
 *     make build/tests/test_monitor && build/tests/test_monitor */
#include "test.h"
#include "dtrain.h"
#include "tools/prometheus.h"
#include "allocator.h"
#include "files.h"
#include "warned_ranks.h"
#include <dirent.h>
#include <fcntl.h>
#include <float.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>

static void with_world(dtrain_rank_fn rank_main, void *user)
{
    CHECK_MSG(with_ranks(1, DTRAIN_LAUNCH_THREADS, NULL, rank_main, user) == DTRAIN_OK, "%s",
              dtrain_last_error());
}

static char *slurp(const char *path, size_t *bytes)
{
    FILE *file = fopen(path, "rb");
    char *text = NULL;
    *bytes = 0;
    if (!CHECK_MSG(file != NULL, "%s: %s", path, strerror(errno))) return (char *)calloc(1, 1);
    fseek(file, 0, SEEK_END);
    *bytes = (size_t)ftell(file);
    rewind(file);
    text = (char *)calloc(1, *bytes + 1);
    CHECK(text && fread(text, 1, *bytes, file) == *bytes);
    fclose(file);
    return text;
}

static uint64_t seed;
static uint32_t draw(uint32_t below)
{
    seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)(seed >> 33) % below;
}

/* ---- random records ----------------------------------------------------------------------------- */

static double odd_number(void)
{
    static const double odd[] = {0,   -0.0, 1,    -1,   1e-300, -1e300,        1e300, 5e-324, 1e-9,
                                 1e9, 0.1,  1e20, 1e38, 3.5e38, 123456789.125, -7.25, 1e-40};
    switch (draw(8)) {
    case 0: return NAN;
    case 1: return draw(2) ? INFINITY : -INFINITY;
    case 2:
    case 3: return odd[draw(sizeof odd / sizeof *odd)];
    default: return (draw(2) ? 1 : -1) * ldexp((double)draw(1u << 30), (int)draw(60) - 40);
    }
}

static const struct {
    const char *name, *unit;
} figures[] = {{"time/step_ms", "ms"},
               {"time/comm_ms", "ms"},
               {"time/exposed_comm_ms", "ms"},
               {"time/data_ms", "ms"},
               {"sent/comm_bytes", "bytes"},
               {"sent/all_to_all_bytes", "bytes"},
               {"ranks/step_ms_min", "ms"},
               {"ranks/comm_bytes_mean", "bytes"},
               {"ranks/step_ms_rank", "rank"},
               {"throughput/tokens_per_second", ""},
               {"throughput/flops_per_second", ""},
               {"sent/bus_bytes_per_second", ""},
               {"val_perplexity", ""},
               {"reward", ""}};

static dtrain_step_record random_record(int64_t step)
{
    dtrain_step_record r;
    memset(&r, 0, sizeof r);
    r.step = step;
    r.loss = odd_number();
    r.val_loss = draw(2) ? NAN : odd_number();
    r.val_accuracy = draw(2) ? NAN : odd_number();
    r.grad_norm = odd_number();
    r.lr = odd_number();
    r.tokens = (uint64_t)draw(1u << 30) << draw(23);
    r.loss_scale = draw(2) ? 0 : 1024;
    r.skipped_steps = draw(3);
    r.ranks = (int)draw(4);
    for (size_t i = 0; i < sizeof figures / sizeof *figures; i++)
        if (draw(4))
            CHECK(dtrain_record_add(&r, figures[i].name, figures[i].unit,
                                    figures[i].unit[0] == 'r' ? draw(4) : odd_number()) ==
                  DTRAIN_OK);
    return r;
}

/* Find a figure of a record by the words of metrics.h only; false: it is not shown. */
static bool expected(const dtrain_step_record *r, const char *name, double *value)
{
    char key[80];
    bool found = false;
    double rate = NAN;
#define IS(text, what, shown) \
    if (strcmp(name, text) == 0) return *value = (double)(what), (shown)
    IS("loss/loss", r->loss, true);
    IS("loss/val_loss", r->val_loss, isfinite(r->val_loss));
    IS("loss/val_accuracy", r->val_accuracy, isfinite(r->val_accuracy));
    IS("optimizer/grad_norm", r->grad_norm, true);
    IS("optimizer/lr", r->lr, true);
    IS("throughput/tokens", r->tokens, true);
    IS("optimizer/loss_scale", r->loss_scale, r->loss_scale > 0);
    IS("optimizer/skipped_steps", r->skipped_steps, r->loss_scale > 0 || r->skipped_steps);
    for (uint32_t i = 0; i < r->figure_count; i++) {
        const dtrain_figure *figure = &r->figures[i];
        snprintf(key, sizeof key, "%s%s", strchr(figure->name, '/') ? "" : "added/", figure->name);
        if (strcmp(key, name) == 0) *value = figure->value, found = true;
        if (strcmp(key, "throughput/flops_per_second") == 0)
            rate = figure->value / (r->ranks * 1e12);
    }
    IS("throughput/peak_share", rate, isfinite(rate));
    return found;
#undef IS
}

/* Says whether a number that was written as text is the one that was meant: the same float, in as few digits as that
 * takes; integers whole. */
static bool same(const char *text, double want, bool whole)
{
    const double got = strtod(text, NULL);
    char shorter[400];
    int digits = 0;
    if (isnan(want)) return isnan(got);
    if (isinf(want)) return got == want;
    if (whole) return fabs(got - want) <= 0.5 + 1e-15 * fabs(want);
    if (fabs(want) > FLT_MAX) return fabs(got - want) <= 5.1e-6 * fabs(want);
    for (const char *at = text; *at && strchr("-.0123456789", *at); at++)
        digits += *at >= '0' && *at <= '9' && (digits > 0 || *at != '0');
    for (int d = 1; d < digits && fabs(want) >= FLT_MIN; d++) {
        snprintf(shorter, sizeof shorter, "%.*g", d, want);
        if (strtof(shorter, NULL) == (float)want && strlen(shorter) < strcspn(text, ",}\r"))
            return false;
    }
    return strtof(text, NULL) == (float)want;
}

static uint32_t naive_crc(const unsigned char *data, size_t bytes)
{
    uint32_t crc = ~0u;
    for (size_t i = 0; i < bytes; i++) {
        crc ^= data[i];
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0);
    }
    crc = ~crc;
    return (crc >> 15 | crc << 17) + 0xa282ead8u;
}

static uint64_t little(const unsigned char *at, int bytes)
{
    uint64_t value = 0;
    for (int i = 0; i < bytes; i++) value |= (uint64_t)at[i] << 8 * i;
    return value;
}

/* Reads one field of a message: its number, its integer or its bytes; returns what follows. */
typedef struct field {
    uint64_t number, type, value;
    const unsigned char *bytes;
} field;

static const unsigned char *read_varint(const unsigned char *at, uint64_t *value)
{
    *value = 0;
    for (int shift = 0;; shift += 7) {
        *value |= (uint64_t)(*at & 127) << shift;
        if (!(*at++ & 128)) return at;
    }
}

static const unsigned char *read_field(const unsigned char *at, field *f)
{
    uint64_t key;
    at = read_varint(at, &key);
    f->number = key >> 3, f->type = key & 7;
    if (f->type == 0) return read_varint(at, &f->value);
    if (f->type == 1 || f->type == 5) {
        f->value = little(at, f->type == 1 ? 8 : 4);
        return at + (f->type == 1 ? 8 : 4);
    }
    CHECK(f->type == 2);
    f->bytes = read_varint(at, &f->value);
    return f->bytes + f->value;
}

/* The records of an event file, checked; calls `value` for each scalar. Returns how many steps have scalars. */
typedef void (*scalar_fn)(int64_t step, const char *tag, float value, void *user);
static int read_events(const char *path, scalar_fn each, void *user)
{
    size_t bytes;
    int steps = 0, records = 0;
    unsigned char *file = (unsigned char *)slurp(path, &bytes);
    for (const unsigned char *at = file; at < file + bytes; records++) {
        const uint64_t length = little(at, 8);
        if (!CHECK_MSG(little(at + 8, 4) == naive_crc(at, 8), "record %d of %s: CRC of the length",
                       records, path) ||
            !CHECK_MSG(length + 16 <= (uint64_t)(file + bytes - at), "record %d of %s is cut",
                       records, path))
            break;
        const unsigned char *event = at + 12, *end = event + length;
        CHECK_MSG(little(end, 4) == naive_crc(event, (size_t)length), "record %d of %s: CRC",
                  records, path);
        int64_t step = 0;
        bool scalars = false;
        for (field f; event < end;) {
            event = read_field(event, &f);
            if (f.number == 2) step = (int64_t)f.value;
            for (const unsigned char *in = f.bytes; f.number == 5 && in < event;) {
                field one, part;
                char tag[128] = "";
                in = read_field(in, &one);
                for (const unsigned char *v = one.bytes; v < in;) {
                    v = read_field(v, &part);
                    if (part.number == 1)
                        snprintf(tag, sizeof tag, "%.*s", (int)part.value,
                                 (const char *)part.bytes);
                    if (part.number != 2) continue;
                    const uint32_t bits = (uint32_t)part.value;
                    float value;
                    memcpy(&value, &bits, 4);
                    scalars = true;
                    if (each) each(step, tag, value, user);
                }
            }
        }
        steps += scalars;
        at = end + 4;
    }
    free(file);
    return steps;
}

/* The event files of a directory, in order. */
static int event_files(const char *directory, char names[8][300])
{
    struct dirent **list;
    int count = 0;
    const int all = scandir(directory, &list, NULL, alphasort);
    for (int i = 0; i < all; i++) {
        if (strstr(list[i]->d_name, "tfevents") && count < 8)
            snprintf(names[count++], 300, "%s/%s", directory, list[i]->d_name);
        free(list[i]);
    }
    if (all >= 0) free(list);
    return count;
}

enum { MOST = 60 };
typedef struct random_run {
    dtrain_step_record records[MOST];
    int steps, first, seen;
} random_run;

static char names_of_figures[200][80]; /* that some step had */
static int names_of_figures_count;

static void note_name(const char *name)
{
    int i = 0;
    while (i < names_of_figures_count && strcmp(names_of_figures[i], name) != 0) i++;
    if (i == names_of_figures_count)
        snprintf(names_of_figures[names_of_figures_count++], 80, "%s", name);
}

/* The name of a figure with its group. */
static const char *tag_of(const dtrain_figure *figure)
{
    static char tag[80];
    snprintf(tag, sizeof tag, "%s%s", strchr(figure->name, '/') ? "" : "added/", figure->name);
    return tag;
}

static dtrain_result look_at_sample(void *user, const dtrain_metrics_sample *sample)
{
    random_run *run = (random_run *)user;
    const int64_t step = sample->record->step;
    const dtrain_step_record *r = &run->records[step];
    if (sample->moment != DTRAIN_METRICS_STEP) return DTRAIN_OK;
    for (size_t i = 0; i < sample->count; i++) note_name(tag_of(&sample->figures[i]));
    for (int n = 0; n < names_of_figures_count; n++) {
        const char *name = names_of_figures[n];
        const dtrain_figure *shown = NULL;
        double want = 0;
        for (size_t i = 0; i < sample->count; i++)
            if (strcmp(tag_of(&sample->figures[i]), name) == 0) shown = &sample->figures[i];
        CHECK_MSG(expected(r, name, &want) == (shown != NULL), "step %d, %s is %slisted", (int)step,
                  name, shown ? "" : "not ");
        if (shown)
            CHECK_MSG(shown->value == want || (isnan(want) && isnan(shown->value)) ||
                          fabs(shown->value - want) <= 1e-15 * fabs(want),
                      "step %d, %s is %g, not %g", (int)step, name, shown->value, want);
    }
    CHECK(sample->record != r && memcmp(&sample->record->loss, &r->loss, 8) == 0);
    run->seen++;
    return DTRAIN_OK;
}

static dtrain_metrics_desc everything(void)
{
    dtrain_metrics_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.jsonl_path = path_of("log.jsonl");
    desc.tensorboard_dir = path_of("deep/er/run");
    desc.config = "a = 1\n";
    desc.hparams = "a=1\nb=x\n";
    desc.peak_flops = 1e12;
    return desc;
}

static int random_rank(dtrain_world *world, void *user)
{
    random_run *run = (random_run *)user;
    dtrain_metrics_desc desc = everything();
    prometheus file;
    memset(&file, 0, sizeof file);
    file.path = path_of("run.prom");
    const dtrain_metrics_sink sinks[] = {{false, false, "looker", look_at_sample, run},
                                         prometheus_sink(&file)};
    dtrain_metrics *metrics;
    desc.sinks = sinks;
    desc.sink_count = 2;
    desc.append = run->first > 0;
    desc.first_step = run->first;
    if (!CHECK_MSG(dtrain_metrics_create(world, &desc, &metrics) == DTRAIN_OK, "%s",
                   dtrain_last_error()))
        return 1;
    for (int step = run->first; step < run->steps; step++)
        CHECK(dtrain_metrics_step(metrics, &run->records[step]) == DTRAIN_OK);
    CHECK_MSG(dtrain_metrics_finish(metrics) == DTRAIN_OK, "%s", dtrain_last_error());
    dtrain_metrics_destroy(metrics);
    return 0;
}

static void look_at_scalar(int64_t step, const char *tag, float value, void *user)
{
    random_run *run = (random_run *)user;
    double want = 0;
    if (!expected(&run->records[step], tag, &want)) {
        CHECK_MSG(false, "step %d: %s is in TensorBoard", (int)step, tag);
        return;
    }
    const float rounded =
        fabs(want) > FLT_MAX && !isnan(want) ? (want > 0 ? INFINITY : -INFINITY) : (float)want;
    CHECK_MSG(value == rounded || (isnan(value) && isnan(rounded)) ||
                  fabsf(value - rounded) <= 1.2e-7f * fabsf(rounded),
              "step %d: %s is %g, not %g", (int)step, tag, (double)value, want);
    run->seen++;
}

/* Compares what the JSON line of a step has with the record. */
static void look_at_line(const random_run *run, const char *json, int step)
{
    int shown = 0, keys = 0;
    for (const char *c = json; *c != '\n'; c++) keys += *c == ':';
    CHECK(strncmp(json, "{\"step\": ", 9) == 0 && atoi(json + 9) == step);
    CHECK(strncmp(json + strcspn(json, ",\n"), ", \"wall_time\": ", 15) == 0);
    for (int i = 0; i < names_of_figures_count; i++) {
        const char *name = names_of_figures[i];
        char pattern[80];
        double want = 0;
        snprintf(pattern, sizeof pattern, "\"%s\": ", strchr(name, '/') + 1);
        const bool is = expected(&run->records[step], name, &want);
        const char *value = strstr(json, pattern);
        if (value && value > json + strcspn(json, "\n")) value = NULL;
        shown += is;
        CHECK_MSG((value != NULL) == is, "step %d: JSON and %s", step, name);
        const bool whole = (strstr(name, "bytes") && !strstr(name, "per_second")) ||
                           strstr(name, "/tokens") == name + strlen(name) - 7 ||
                           strstr(name, "_rank") || strstr(name, "skipped");
        if (!is || !value) continue;
        value += strlen(pattern);
        if (!isfinite(want))
            CHECK_MSG(strncmp(value, "null", 4) == 0, "step %d: %s is %.20s", step, name, value);
        else
            CHECK_MSG(same(value, want, whole), "step %d: %s is %.30s in JSON, not %g", step, name,
                      value, want);
    }
    CHECK_MSG(keys == shown + 2, "step %d: %d keys, %d values", step, keys, shown);
}

static const char *line_of(const char *text, int n)
{
    while (n-- > 0) text += strcspn(text, "\n") + 1;
    return text;
}

/* Random records in one run or in two, read back from every file. */
static void test_random_records(void)
{
    static random_run run;
    const int rounds = test_full() ? 100 : 12;
    const uint64_t first = test_seed();
    for (int round = 0; round < rounds; round++) {
        char names[8][300], command[200];
        size_t bytes;
        seed = first + (uint64_t)round;
        snprintf(command, sizeof command, "rm -rf %s/*", folder);
        CHECK(system(command) == 0);
        memset(&run, 0, sizeof run);
        const int all = 2 + (int)draw(MOST - 2),
                  cut = draw(2) ? 1 + (int)draw((uint32_t)all - 1) : 0;
        for (int step = 0; step < all; step++) run.records[step] = random_record(step);
        run.steps = cut ? cut : all;
        with_world(random_rank, &run);
        if (cut) {
            if (draw(2)) { /* it was killed inside of a line */
                FILE *file = fopen(path_of("log.jsonl"), "a");
                fputs("{\"step\": 9", file);
                fclose(file);
            }
            run.first = cut, run.steps = all;
            with_world(random_rank, &run);
        }
        CHECK_MSG(run.seen == all, "seed %llu", (unsigned long long)seed);
        char *json = slurp(path_of("log.jsonl"), &bytes);
        for (int step = 0; step < all; step++)
            look_at_line(&run, line_of(json, step + (cut && step >= cut ? 3 : 1)), step);
        const char *again = line_of(json, cut ? cut + 2 : 0); /* each start says what it begins */
        CHECK(strncmp(json, "{\"start\": true", 14) == 0 && strncmp(again, json, 14) == 0);
        CHECK(strncmp(line_of(json, all + (cut ? 3 : 1)), "{\"final\": true", 14) == 0);
        free(json);
        run.seen = 0;
        const int files = event_files(path_of("deep/er/run"), names);
        int steps = 0;
        CHECK(files == (cut ? 2 : 1));
        for (int i = 0; i < files; i++) steps += read_events(names[i], look_at_scalar, &run);
        int shown = 0;
        for (int step = 0; step < all; step++)
            for (int i = 0; i < names_of_figures_count; i++) {
                double value;
                shown += expected(&run.records[step], names_of_figures[i], &value);
            }
        CHECK_MSG(steps == all && run.seen == shown,
                  "%d steps in TensorBoard, not %d; %d values, not %d", steps, all, run.seen,
                  shown);
        char *prom = slurp(path_of("run.prom"), &bytes);
        CHECK(strstr(prom, "dtrain_finished{run=\"dtrain\"} 1\n") &&
              access(path_of("run.prom.next"), F_OK) != 0);
        CHECK(prom[bytes - 1] == '\n');
        const dtrain_step_record *last = &run.records[all - 1];
        for (uint32_t i = 0; i < last->figure_count; i++) {
            char line[80];
            if (strchr(last->figures[i].name, '/')) continue;
            snprintf(line, sizeof line, "\ndtrain_%s{run=\"dtrain\"} ", last->figures[i].name);
            CHECK_MSG(strstr(prom, line), "%s is not in the last file", last->figures[i].name);
        }
        free(prom);
    }
}

/* ---- sinks that fail ---------------------------------------------------------------------------- */

typedef struct faulty {
    int fail_at, calls; /* from 1: steps; 0: none fails */
    bool fail_on, fail_open, hostile;
    int opened, finished;
    dtrain_metrics *metrics;
} faulty;

static dtrain_result faulty_call(faulty *f)
{
    f->calls++;
    const bool fails =
        f->fail_at && (f->calls == f->fail_at || (f->fail_on && f->calls > f->fail_at));
    if (f->hostile) {
        dtrain_step_record r;
        memset(&r, 0, sizeof r);
        CHECK(dtrain_metrics_step(f->metrics, &r) == DTRAIN_ERROR_USAGE);
        CHECK(dtrain_metrics_finish(f->metrics) == DTRAIN_ERROR_USAGE);
        dtrain_metrics_destroy(f->metrics);
    }
    if (!fails) return DTRAIN_OK;
    return f->calls % 2 ? dtrain_fail(DTRAIN_ERROR_FILE, "no more")
                        : DTRAIN_ERROR_SYSTEM; /* or without a sentence */
}

static dtrain_result faulty_sink(void *user, const dtrain_metrics_sample *sample)
{
    faulty *f = (faulty *)user;
    if (sample->moment == DTRAIN_METRICS_STEP) return faulty_call(f);
    if (sample->moment == DTRAIN_METRICS_FINISH) {
        CHECK(sample->summary->steps == 8);
        f->finished++;
        return DTRAIN_OK;
    }
    CHECK(sample->moment == DTRAIN_METRICS_OPEN);
    f->opened++;
    CHECK(sample->desc->progress_every == 10 && strcmp(sample->desc->run_name, "dtrain") == 0 &&
          sample->count == 0);
    return f->fail_open ? DTRAIN_ERROR_SYSTEM : DTRAIN_OK;
}

static int faulty_rank(dtrain_world *world, void *user)
{
    faulty *f = (faulty *)user, good = {0};
    dtrain_metrics_desc desc;
    dtrain_metrics_info info;
    dtrain_metrics_sink sinks[2] = {{false, false, "faulty", faulty_sink, f},
                                    {false, false, "good", faulty_sink, &good}};
    memset(&desc, 0, sizeof desc);
    desc.sinks = sinks;
    desc.sink_count = 2;
    const dtrain_result created = dtrain_metrics_create(world, &desc, &f->metrics);
    if (f->fail_open) {
        CHECK(created == DTRAIN_ERROR_SYSTEM && !f->metrics && f->finished == 0);
        CHECK_MSG(strstr(dtrain_last_error(), "the sink faulty cannot be opened"), "%s",
                  dtrain_last_error());
        return 0;
    }
    if (!CHECK(created == DTRAIN_OK)) return 1;
    for (int step = 0; step < 8; step++) {
        dtrain_step_record r;
        memset(&r, 0, sizeof r);
        r.step = step;
        CHECK(dtrain_metrics_step(f->metrics, &r) == DTRAIN_OK);
    }
    const int lost = f->fail_at == 0 || f->fail_at > 8 ? 0 : f->fail_on ? 9 - f->fail_at : 1;
    dtrain_metrics_query(f->metrics, &info);
    CHECK(info.sink_count == 2 && info.sinks[0].lost == (uint64_t)lost &&
          info.sinks[0].written == 8 - (uint64_t)lost);
    CHECK(info.sinks[1].lost == 0 && info.sinks[1].written == 8);
    CHECK(warnings == (lost ? 1 : 0));
    const dtrain_result finished = dtrain_metrics_finish(f->metrics);
    CHECK(finished == (lost ? DTRAIN_ERROR_FILE : DTRAIN_OK));
    char text[80];
    snprintf(text, sizeof text, "%d of 9 records of faulty", lost);
    if (lost) CHECK_MSG(strstr(dtrain_last_error(), text), "%s", dtrain_last_error());
    CHECK(f->finished == 1 && good.finished == 1 && f->opened == 1);
    CHECK(dtrain_metrics_finish(f->metrics) == DTRAIN_OK);
    dtrain_metrics_destroy(f->metrics);
    CHECK(f->finished == 1);
    return 0;
}

static void test_faulty_sinks(void)
{
    for (int at = 0; at <= 9; at++)
        for (int on = 0; on < 2; on++) {
            faulty f;
            memset(&f, 0, sizeof f);
            f.fail_at = at, f.fail_on = on != 0;
            f.hostile = at == 3;
            warnings = 0;
            with_world(faulty_rank, &f);
        }
    faulty f;
    memset(&f, 0, sizeof f);
    f.fail_open = true;
    with_world(faulty_rank, &f);
}

/* Files that cannot be opened, one at a time; and what is asked of the desc. */
static int refused_rank(dtrain_world *world, void *user)
{
    static const char *const nowhere = "/dev/null/nothing";
    dtrain_metrics *metrics = (dtrain_metrics *)1;
    (void)user;
    for (int which = 0; which < 7; which++) {
        dtrain_metrics_desc desc = everything();
        static prometheus file; /* the array of its next path is large */
        dtrain_metrics_sink sink;
        const char *want = nowhere;
        char name[300];
        memset(&sink, 0, sizeof sink);
        memset(&file, 0, sizeof file);
        if (which == 1 || which == 3)
            sink = prometheus_sink(&file), desc.sinks = &sink, desc.sink_count = 1;
        if (which == 0) desc.jsonl_path = nowhere;
        if (which == 1) file.path = "/dev/null/nothing.prom";
        if (which == 2) desc.tensorboard_dir = nowhere;
        if (which == 3) file.path = path_of("run.txt"), want = "does not end in .prom";
        if (which == 4) desc.histogram_every = 3, want = "histogram_every needs a trainer";
        if (which == 5)
            desc.sinks = &sink, desc.sink_count = 1, want = "sink 0 of desc has no name or no take";
        if (which == 6) {
            memset(name, 'x', sizeof name);
            name[299] = 0;
            desc.run_name = name, want = "run_name";
        }
        CHECK(dtrain_metrics_create(world, &desc, &metrics) != DTRAIN_OK && !metrics);
        CHECK_MSG(strstr(dtrain_last_error(), want), "%d: %s", which, dtrain_last_error());
    }
    /* empty texts are none */
    dtrain_metrics_desc desc = everything();
    dtrain_metrics_info info;
    desc.jsonl_path = desc.tensorboard_dir = desc.run_name = "";
    CHECK(dtrain_metrics_create(world, &desc, &metrics) == DTRAIN_OK);
    dtrain_metrics_query(metrics, &info);
    CHECK(info.sink_count == 0);
    dtrain_metrics_destroy(metrics);
    return 0;
}

static void test_refused(void) { with_world(refused_rank, NULL); }

/* A limit on the size of files stands for a disk that is full for a while: what is lost is lost whole. */
static int full_rank(dtrain_world *world, void *user)
{
    dtrain_metrics_desc desc = everything();
    dtrain_metrics_info info;
    dtrain_metrics *metrics;
    struct rlimit old, small;
    (void)user;
    char events[8][300];
    if (!CHECK(dtrain_metrics_create(world, &desc, &metrics) == DTRAIN_OK)) return 1;
    CHECK(event_files(desc.tensorboard_dir, events) == 1);
    getrlimit(RLIMIT_FSIZE, &old);
    for (int step = 0; step < 12; step++) {
        dtrain_step_record r = random_record(step);
        small = old;
        struct stat file; /* one of them is cut inside of its next record */
        if (stat(step % 2 ? desc.jsonl_path : events[0], &file) == 0)
            small.rlim_cur = (rlim_t)file.st_size + 1 + draw(400);
        if (step >= 4 && step < 9) setrlimit(RLIMIT_FSIZE, &small);
        CHECK(dtrain_metrics_step(metrics, &r) == DTRAIN_OK);
        setrlimit(RLIMIT_FSIZE, &old);
    }
    dtrain_metrics_query(metrics, &info);
    CHECK(info.sinks[0].lost > 0 && info.sinks[1].lost > 0);
    CHECK_MSG(warnings == 2, "%d warnings", warnings); /* one a sink */
    CHECK(dtrain_metrics_finish(metrics) == DTRAIN_ERROR_FILE);
    const int steps = 12 - (int)info.sinks[1].lost, lines = 12 - (int)info.sinks[0].lost;
    dtrain_metrics_destroy(metrics);
    char names[8][300];
    size_t bytes;
    CHECK(event_files(path_of("deep/er/run"), names) == 1 &&
          read_events(names[0], NULL, NULL) == steps);
    char *json = slurp(path_of("log.jsonl"), &bytes);
    int seen = 0;
    for (const char *at = json; *at; at += strcspn(at, "\n") + 1) {
        CHECK(at[0] == '{' && at[strcspn(at, "\n") - 1] == '}' &&
              !memchr(at + 1, '{', strcspn(at + 1, "\n")));
        seen += strncmp(at, "{\"step\"", 7) == 0;
    }
    CHECK_MSG(seen == lines, "%d lines, not %d", seen, lines);
    free(json);
    return 0;
}

static void test_full_disk(void)
{
    char command[200];
    snprintf(command, sizeof command, "rm -rf %s/*", folder);
    CHECK(system(command) == 0);
    seed = 5;
    warnings = 0;
    with_world(full_rank, NULL);
}

/* The directory of the Prometheus file goes away and comes back. */
static int gone_rank(dtrain_world *world, void *user)
{
    dtrain_metrics_desc desc;
    dtrain_metrics *metrics;
    prometheus file;
    size_t bytes;
    (void)user;
    memset(&desc, 0, sizeof desc);
    memset(&file, 0, sizeof file);
    CHECK(mkdir(path_of("d"), 0700) == 0);
    file.path = path_of("d/x.prom");
    const dtrain_metrics_sink sink = prometheus_sink(&file);
    desc.sinks = &sink, desc.sink_count = 1;
    if (!CHECK(dtrain_metrics_create(world, &desc, &metrics) == DTRAIN_OK)) return 1;
    unlink(path_of("d/x.prom"));
    CHECK(rmdir(path_of("d")) == 0);
    dtrain_step_record r = random_record(0);
    CHECK(dtrain_metrics_step(metrics, &r) == DTRAIN_OK && warnings == 1);
    CHECK(mkdir(path_of("d"), 0700) == 0);
    CHECK(dtrain_metrics_finish(metrics) == DTRAIN_ERROR_FILE);
    CHECK_MSG(strstr(dtrain_last_error(), "1 of 2 records of prometheus"), "%s",
              dtrain_last_error());
    dtrain_metrics_destroy(metrics);
    char *text = slurp(path_of("d/x.prom"), &bytes);
    CHECK(strstr(text, "dtrain_steps_total{run=\"dtrain\"} 1\n"));
    free(text);
    return 0;
}

static void test_directory_goes(void)
{
    warnings = 0;
    with_world(gone_rank, NULL);
}

/* ---- memory that ends --------------------------------------------------------------------------- */

typedef struct tight {
    counted_memory *memory;
    long at;
    dtrain_result result;
    long before;
} tight;

static int tight_rank(dtrain_world *world, void *user)
{
    tight *s = (tight *)user;
    dtrain_metrics_desc desc = everything();
    dtrain_metrics *metrics;
    static char long_text[100000];
    dtrain_step_record r = random_record(0);
    memset(long_text, 'a', sizeof long_text - 1);
    desc.config = long_text; /* the memory for records grows with it */
    s->before = s->memory->live;
    s->memory->calls = 0;
    s->memory->fail_at = s->at;
    s->result = dtrain_metrics_create(world, &desc, &metrics);
    if (s->result == DTRAIN_OK) {
        CHECK(dtrain_metrics_step(metrics, &r) == DTRAIN_OK);
        const long calls = s->memory->calls;
        CHECK(dtrain_metrics_step(metrics, &r) == DTRAIN_OK &&
              s->memory->calls == calls); /* a step allocates nothing */
        (void)dtrain_metrics_finish(metrics);
        dtrain_metrics_destroy(metrics);
    } else CHECK(s->result == DTRAIN_ERROR_MEMORY && metrics == NULL);
    s->memory->fail_at = 0;
    CHECK(s->memory->live == s->before);
    return 0;
}

static void test_memory(void)
{
    long n = 1;
    for (bool failed = true; failed && n < 100; n++) {
        counted_memory memory;
        tight s;
        memset(&memory, 0, sizeof memory);
        memset(&s, 0, sizeof s);
        s.memory = &memory;
        s.at = n;
        seed = 7;
        const dtrain_allocator allocator = counted_allocator(&memory);
        CHECK_MSG(with_ranks(1, DTRAIN_LAUNCH_THREADS, &allocator, tight_rank, &s) == DTRAIN_OK,
                  "%s", dtrain_last_error());
        CHECK(memory.live == 0 && memory.wrong == 0);
        failed = memory.calls >= n;
    }
    CHECK_MSG(n > 6, "%ld allocations", n);
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    if (!files_begin("test_monitor")) return 1;
    RUN(test_random_records);
    RUN(test_faulty_sinks);
    RUN(test_refused);
    RUN(test_full_disk);
    RUN(test_directory_goes);
    RUN(test_memory);
    return test_summary() + !files_end();
}
