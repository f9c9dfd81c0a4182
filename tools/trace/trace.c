/* trace.c: what ranks did when: brings their traces together, sums them up, draws a step.
 *
 *   build:   make build/trace
 *   run:     build/trace merge OUT.json IN.json...      one file for ui.perfetto.dev, all ranks on rank 0's clock
 *            build/trace show IN.json...                communication that is hidden and exposed; where time goes
 *            build/trace svg OUT.svg IN.json... [STEP]  a drawing of one step, the one in the middle if none is named
 *            build/trace passes OUT.svg IN.json... [STEP]  of a pipeline's passes alone: F, B, W of each micro-batch
 *
 * Traces are what dtrain_world_options.trace writes (build/train_gpt --trace FILE), or what merge has made of them. A
 * file whose end is missing, of a rank that was killed, is read up to its last whole event.
 * Exit status: 0 when it is done, 1 when the command line is wrong, 2 when a file cannot be read or written.
 *
 * How it works: an event is a line. Communication is exposed where a collective is under way and the thread of the
 * rank is in a call of a communicator; where it computes meanwhile, it is hidden. What ranks tell each other for the
 * record of the step counts in neither, as in exposed_comm_ms. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

#include "tools/about.h"
#include "tools/open.h"
#include "tools/say.h"
#include "draw.h"
#include "tools/descriptors.h"
#include "tools/integers.h"

/* ---- Reading ------------------------------------------------------------------------------------------------ */

/* Read a number with a fraction; microseconds become nanoseconds. */
static int64_t read_ns(dtrain__json *json)
{
    (void)dtrain__json_peek(json);
    const double value = 1e3 * strtod(json->at, NULL);
    (void)dtrain__json_skip(json);
    return value > -9e18 && value < 9e18 ? (int64_t)(value < 0 ? value - 0.5 : value + 0.5) : 0;
}

/* Read the args of an event: what it is of, and of the metadata of a rank its clock. */
static void read_args(dtrain__json *json, trace_event *event, trace_file *file)
{
    char name[40];
    int64_t number = 0;
    if (!dtrain__json_enter(json, '{')) return;
    while (dtrain__json_member(json, name, sizeof name)) {
        if (strcmp(name, "of") == 0) (void)json_label(json, event->of, sizeof event->of);
        else if (strcmp(name, "bytes") == 0) (void)json_i64(json, &event->bytes);
        else if (strcmp(name, "number") == 0) (void)json_i64(json, &event->number);
        else if (strcmp(name, "clock_offset_ns") == 0) (void)json_i64(json, &file->offset);
        else if (strcmp(name, "clock_error_ns") == 0) (void)json_i64(json, &file->error);
        else if (strcmp(name, "restart") == 0 && json_i64(json, &number)) {
            if (event->pid < 1000) file->restart = (int)number; /* else merge has seen to it */
        } else (void)dtrain__json_skip(json);
    }
}

/* Read a line; false when it is no event. */
static bool read_event(trace_file *file, const char *line, size_t length, trace_event *event)
{
    char name[40];
    int64_t number;
    dtrain__json json = dtrain__json_begin(file->path, line, length);
    memset(event, 0, sizeof *event);
    event->line = line;
    event->length = length;
    event->number = -1;
    if (!dtrain__json_enter(&json, '{')) return false;
    while (dtrain__json_member(&json, name, sizeof name)) {
        if (strcmp(name, "ph") == 0) (void)json_label(&json, event->phase, sizeof event->phase);
        else if (strcmp(name, "name") == 0)
            (void)json_label(&json, event->name, sizeof event->name);
        else if (strcmp(name, "cat") == 0) (void)json_label(&json, event->kind, sizeof event->kind);
        else if (strcmp(name, "ts") == 0) event->begin = read_ns(&json);
        else if (strcmp(name, "dur") == 0) event->end = read_ns(&json);
        else if (strcmp(name, "pid") == 0 && json_i64(&json, &number)) event->pid = (int)number;
        else if (strcmp(name, "tid") == 0 && json_i64(&json, &number)) event->tid = (int)number;
        else if (strcmp(name, "args") == 0) read_args(&json, event, file);
        else (void)dtrain__json_skip(&json);
    }
    event->end += event->begin;
    return dtrain__json_end(&json) == DTRAIN_OK;
}

/* Read a whole file into memory that stays until the program ends. */
static char *read_text(const char *path, size_t *bytes, const char **why)
{
    FILE *in = open_to_read(path, why);
    size_t room = 1 << 16, got;
    char *text = in ? (char *)malloc(room) : NULL;
    *bytes = 0;
    while (text && (got = fread(text + *bytes, 1, room - *bytes, in)) > 0)
        if ((*bytes += got) == room) {
            char *more = (char *)realloc(text, room *= 2);
            if (!more) free(text);
            text = more;
        }
    if (in) fclose(in);
    if (!text && !*why) *why = strerror(ENOMEM);
    return text;
}

/* Read the events of a file; the last line may be cut off. */
static int read_file(trace *all, const char *path)
{
    size_t bytes, at = 0;
    trace_file *file = &all->files[all->file_count++];
    const char *why;
    char *text = read_text(path, &bytes, &why);
    if (!text) return say(stderr, "%s cannot be read: %s\n", path, why), 2;
    memset(file, 0, sizeof *file);
    file->path = path;
    file->first = all->count;
    while (at < bytes) {
        const char *line = text + at, *end = (const char *)memchr(line, '\n', bytes - at);
        const bool cut = !end;
        if (cut) end = text + bytes;
        at = (size_t)(end - text) + 1;
        if (*line == '[') line++;
        while (end > line && (end[-1] == ',' || end[-1] == '\r' || end[-1] == ' ')) end--;
        if (end == line || *line == ']') continue;
        trace_event *event = trace_room(all);
        if (!event) return say(stderr, "there is no memory for the events of %s\n", path), 2;
        if (read_event(file, line, (size_t)(end - line), event)) all->count++;
        else if (cut) say(stderr, "%s: the last event is cut off, and left out\n", path);
        else return say(stderr, "%s: %s\n", path, dtrain_last_error()), 2;
    }
    file->last = all->count;
    for (size_t i = file->first; i < file->last; i++) {
        trace_event *event = &all->events[i];
        event->file = (int)(file - all->files);
        event->begin += file->offset;
        event->end += file->offset;
        if (event->pid < 1000) event->pid += 1000 * file->restart; /* each attempt is a process */
    }
    return 0;
}

/* Order by rank and row, then by time; a span comes before those that are inside of it. */
static int by_place(const void *left, const void *right)
{
    const trace_event *a = (const trace_event *)left, *b = (const trace_event *)right;
    if (a->pid != b->pid) return a->pid < b->pid ? -1 : 1;
    if (a->tid != b->tid) return a->tid < b->tid ? -1 : 1;
    if (a->begin != b->begin) return a->begin < b->begin ? -1 : 1;
    if (a->end != b->end) return a->end > b->end ? -1 : 1;
    return a->line < b->line ? -1 : a->line > b->line;
}

/* Order by time, what names rows first. */
static int by_time(const void *left, const void *right)
{
    const trace_event *a = (const trace_event *)left, *b = (const trace_event *)right;
    const bool names_a = a->phase[0] == 'M', names_b = b->phase[0] == 'M';
    if (names_a != names_b) return names_a ? -1 : 1;
    if (!names_a && a->begin != b->begin) return a->begin < b->begin ? -1 : 1;
    return by_place(left, right);
}

/* ---- merge -------------------------------------------------------------------------------------------------- */

/* Find where the value of a key of the event itself begins. Quotes inside of strings are escaped: it is no text. */
static const char *value_of(const trace_event *event, const char *key)
{
    char text[24];
    const size_t length = (size_t)snprintf(text, sizeof text, ",\"%s\":", key);
    for (size_t i = 0; i + length < event->length; i++)
        if (memcmp(event->line + i, text, length) == 0) return event->line + i + length;
    return NULL;
}

/* Write a line with other numbers in it: of the process, and of the time when it has one. */
static void write_event(FILE *out, const trace_event *event, int64_t start, bool first)
{
    const char *at = event->line, *end = event->line + event->length;
    const char *pid = value_of(event, "pid"), *ts = value_of(event, "ts");
    const char *offset = event->phase[0] == 'M' ? value_of(event, "clock_offset_ns") : NULL;
    fprintf(out, "%s", first ? "[" : ",\n");
    if (pid) {
        fprintf(out, "%.*s%d", (int)(pid - at), at, event->pid);
        for (at = pid; at < end && *at != ',' && *at != '}';) at++;
    }
    if (ts && ts > at) {
        fprintf(out, "%.*s%.3f", (int)(ts - at), at, 1e-3 * (double)(event->begin - start));
        for (at = ts; at < end && *at != ',' && *at != '}';) at++;
    }
    if (offset && offset > at) { /* it has been added */
        fprintf(out, "%.*s0", (int)(offset - at), at);
        for (at = offset; at < end && *at != ',' && *at != '}';) at++;
    }
    fprintf(out, "%.*s", (int)(end - at), at);
}

static int merge(trace *all, const char *path)
{
    int64_t start = INT64_MAX;
    FILE *out = fopen(path, "wb");
    if (!out) return say(stderr, "%s cannot be written: %s\n", path, strerror(errno)), 2;
    qsort(all->events, all->count, sizeof *all->events, by_time);
    for (size_t i = 0; i < all->count; i++)
        if (all->events[i].phase[0] != 'M' && all->events[i].begin < start)
            start = all->events[i].begin;
    for (size_t i = 0; i < all->count; i++) write_event(out, &all->events[i], start, i == 0);
    fprintf(out, "%s\n]\n", all->count ? "" : "[");
    if (fclose(out) != 0) return say(stderr, "%s: %s\n", path, strerror(errno)), 2;
    for (size_t i = 0; i < all->file_count; i++)
        if (all->files[i].offset)
            say(stdout, "%s: its clock is moved by %.3f ms, +-%.3f\n", all->files[i].path,
                1e-6 * (double)all->files[i].offset, 1e-6 * (double)all->files[i].error);
    printf("%zu events of %zu files in %s\n", all->count, all->file_count, path);
    return 0;
}

/* ---- show --------------------------------------------------------------------------------------------------- */

typedef struct total { /* of all spans with a name in a kind */
    char name[TRACE_NAME], kind[24];
    int64_t count, ns, own, most; /* own: not in spans inside of it */
} total;

static int by_own(const void *left, const void *right)
{
    const int64_t a = ((const total *)left)->own, b = ((const total *)right)->own;
    return a > b ? -1 : a < b;
}

/* Count a span, and take it from the one that it is in. */
static void count_span(total *totals, size_t *used, size_t room, const trace_event *event,
                       const trace_event *around)
{
    const int64_t ns = event->end - event->begin;
    for (int side = 0; side < 2; side++) {
        const trace_event *of = side ? around : event;
        size_t i = 0;
        if (!of) return;
        while (i < *used &&
               (strcmp(totals[i].name, of->name) != 0 || strcmp(totals[i].kind, of->kind) != 0))
            i++;
        if (i == room) return;
        if (i == *used) {
            memset(&totals[i], 0, sizeof totals[i]);
            memcpy(totals[i].name, of->name, sizeof totals[i].name);
            memcpy(totals[i].kind, of->kind, sizeof totals[i].kind);
            (*used)++;
        }
        totals[i].own += side ? -ns : ns;
        if (side) return;
        totals[i].count++;
        totals[i].ns += ns;
        if (ns > totals[i].most) totals[i].most = ns;
    }
}

static void print_totals(const trace *all)
{
    enum { ROOM = 512, DEPTH = 64, LINES = 15 };
    static total totals[ROOM];
    size_t used = 0, depth = 0;
    int width = 28;
    const trace_event *open[DEPTH];
    for (size_t i = 0; i < all->count; i++) {
        const trace_event *event = &all->events[i];
        if (event->phase[0] != 'X' || event->tid != TRACE_THREAD) continue;
        while (depth &&
               (open[depth - 1]->pid != event->pid || open[depth - 1]->end <= event->begin))
            depth--;
        count_span(totals, &used, ROOM, event, depth ? open[depth - 1] : NULL);
        if (depth < DEPTH) open[depth++] = event;
    }
    qsort(totals, used, sizeof *totals, by_own);
    for (size_t i = 0; i < used && i < LINES; i++)
        if ((int)strlen(totals[i].name) > width) width = (int)strlen(totals[i].name);
    printf("\n%-*s %-11s %8s %12s %12s %12s\n", width, "span, of all ranks", "kind", "count",
           "own ms", "with inner", "longest ms");
    for (size_t i = 0; i < used && i < LINES; i++)
        printf("%-*s %-11s %8lld %12.3f %12.3f %12.3f\n", width, totals[i].name, totals[i].kind,
               (long long)totals[i].count, 1e-6 * (double)totals[i].own,
               1e-6 * (double)totals[i].ns, 1e-6 * (double)totals[i].most);
}

/* Print a line for each rank: its steps, and its collectives from row `first` of the trace on. Return the number of
 * steps, or -1: there is no memory. */
static int print_ranks(const trace *all, int first)
{
    int steps = 0;
    printf("%-6s %6s %12s %14s %12s %12s %8s\n", "rank", "steps", "step ms", "in flight ms",
           "exposed ms", "hidden ms", "hidden %");
    for (size_t i = 0, next; i < all->count; i = next) {
        trace_sums sums;
        next = i;
        while (next < all->count && all->events[next].pid == all->events[i].pid) next++;
        if (!sum_rank(&all->events[i], next - i, first, &sums)) return -1;
        if (!sums.steps) continue;
        const double each = 1e-6 / (double)sums.steps;
        steps += sums.steps;
        printf("%-6d %6d %12.3f %14.3f %12.3f %12.3f %8.1f\n", all->events[i].pid, sums.steps,
               each * (double)sums.step, each * (double)sums.flight, each * (double)sums.exposed,
               each * (double)(sums.flight - sums.exposed),
               sums.flight ? 100.0 * (double)(sums.flight - sums.exposed) / (double)sums.flight
                           : 0.0);
    }
    return steps;
}

static int show(trace *all)
{
    bool tensor = false;
    qsort(all->events, all->count, sizeof *all->events, by_place);
    for (size_t i = 0; i < all->count && !tensor; i++)
        tensor = is_collective(&all->events[i], TRACE_TENSOR, TRACE_CHECKPOINT);
    int steps = print_ranks(all, TRACE_COLLECTIVE);
    if (tensor && steps > 0) {
        printf("\nof these, the tensor axis alone\n");
        steps = print_ranks(all, TRACE_TENSOR);
    }
    if (steps < 0) return fprintf(stderr, "there is no memory to sum up a rank\n"), 2;
    if (!steps)
        printf("there is no step of a trainer in it: a host with a loop of its own has none\n");
    print_totals(all);
    return 0;
}

/* ---- main --------------------------------------------------------------------------------------------------- */

static const char usage_text[] = "trace merge OUT.json IN.json...\n"
                                 "trace show IN.json...\n"
                                 "trace svg OUT.svg IN.json... [STEP]\n"
                                 "trace passes OUT.svg IN.json... [STEP]\n";

static int usage(void) { return fputs(usage_text, stderr), 1; }

static void print_help(void)
{
    printf(
        "trace: what ranks did when, of the timelines that --trace of a training program writes\n\n"
        "%s\n"
        "merge        one file for ui.perfetto.dev, with all ranks on the clock of rank 0\n"
        "show         communication that is hidden and exposed, and where the time goes\n"
        "svg          a drawing of one step, the one in the middle if none is named\n"
        "passes       the same of a pipeline's passes only\n\n"
        "examples\n"
        "  trace show t.rank*.json\n"
        "  trace svg step.svg t.rank*.json 12\n",
        usage_text);
}

int main(int argc, char **argv)
{
    take_descriptors();
    if (about("trace", argc - 1, argv + 1, print_help)) return 0;
    trace all;
    const char *what = argc > 1 ? argv[1] : "";
    const bool shows = strcmp(what, "show") == 0, passes = strcmp(what, "passes") == 0,
               draws = passes || strcmp(what, "svg") == 0;
    const int first = shows ? 2 : 3;
    int64_t step = -1;
    char *rest = NULL;
    memset(&all, 0, sizeof all);
    if (!shows && !draws && strcmp(what, "merge") != 0) return usage();
    if (draws && argc > first) {
        step = strtoll(argv[argc - 1], &rest, 10);
        if (rest == argv[argc - 1] || *rest) step = -1;
        else argc--;
    }
    if (argc <= first || argc - first > TRACE_FILES) return usage();
    for (int i = first; i < argc; i++) {
        const int failed = read_file(&all, argv[i]);
        if (failed) return failed;
        for (int j = first; j < i; j++) {
            const trace_file *a = &all.files[j - first], *b = &all.files[i - first];
            if (a->last > a->first && b->last > b->first &&
                all.events[a->first].pid == all.events[b->first].pid)
                return say(stderr, "%s and %s are both of rank %d\n", a->path, b->path,
                           all.events[a->first].pid % 1000),
                       2;
        }
    }
    if (shows) return show(&all);
    if (!draws) return merge(&all, argv[2]);
    qsort(all.events, all.count, sizeof *all.events, by_place);
    return draw(&all, argv[2], step, passes);
}
