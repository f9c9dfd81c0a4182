/* Spans: random programs of them against a naive reckoning, spans of the library, depth, ranks that are threads. */

#include "world/timeline.c"
#include "test.h"

#include "dtrain.h"

#include "core/json_internal.h"
#include "world/timeline_internal.h"
#include "world/world_internal.h"

#include "ranks.h"
#include "names.h"

/* ---- random programs of spans ------------------------------------------------------------------*/

typedef struct program {
    uint64_t seed, now;
    dtrain_world *world;
    uint64_t spent[DTRAIN_SPAN_KINDS]; /* as a naive reader of the program counts */
} program;

static uint32_t draw(program *p, uint32_t below)
{
    p->seed = p->seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)(p->seed >> 33) % below;
}

/* Let time pass in a span of a kind. */
static void pass_time(program *p, uint32_t kind)
{
    const uint64_t ns = draw(p, 1000);
    p->now += ns;
    p->spent[kind] += ns;
}

/* Open a span in one of `outer`, with spans inside of it; some are left open, and the mark closes them. */
static void run_span(program *p, uint32_t outer, uint32_t depth)
{
    uint32_t kind = draw(p, DTRAIN_SPAN_KINDS);
    const uint32_t mark = dtrain__span_begin_at(p->world, kind, "span", (int64_t)depth, p->now);
    CHECK(mark == depth);
    if (depth >= DTRAIN__SPAN_DEPTH ||
        (kind == DTRAIN_SPAN_COMM && outer == DTRAIN_SPAN_CHECKPOINT))
        kind = outer;
    pass_time(p, kind);
    for (uint32_t i = draw(p, 3); depth < 40 && i > 0; i--) {
        run_span(p, kind, depth + 1);
        pass_time(p, kind);
    }
    if (draw(p, 4) == 0) { /* an early return left one open */
        uint32_t inner = draw(p, DTRAIN_SPAN_KINDS);
        (void)dtrain__span_begin_at(p->world, inner, "lost", DTRAIN__UNNUMBERED, p->now);
        if (depth + 1 >= DTRAIN__SPAN_DEPTH ||
            (inner == DTRAIN_SPAN_COMM && kind == DTRAIN_SPAN_CHECKPOINT))
            inner = kind;
        pass_time(p, inner);
    }
    dtrain__span_end_at(p->world, mark, p->now);
    CHECK(p->world->timeline.depth == mark);
}

static int random_programs(dtrain_world *world, void *user)
{
    const uint64_t first = *(const uint64_t *)user;
    for (uint64_t i = 0; i < 300; i++) {
        program p;
        memset(&p, 0, sizeof p);
        p.seed = first + i + 1000 * (uint64_t)dtrain_world_rank(world);
        p.world = world;
        p.now = 1000;
        memset(world->timeline.spent_ns, 0, sizeof world->timeline.spent_ns);
        world->timeline.since_ns = p.now;
        for (int j = 0; j < 20; j++) {
            run_span(&p, DTRAIN_SPAN_OTHER, 0);
            pass_time(&p, DTRAIN_SPAN_OTHER);
        }
        dtrain__span_end_at(world, 0, p.now);
        for (uint32_t kind = 0; kind < DTRAIN_SPAN_KINDS; kind++)
            CHECK_MSG(world->timeline.spent_ns[kind] == p.spent[kind],
                      "seed %llu, kind %u: %llu ns, not %llu", (unsigned long long)(first + i),
                      kind, (unsigned long long)world->timeline.spent_ns[kind],
                      (unsigned long long)p.spent[kind]);
    }
    return 0;
}

static void test_random_programs(void)
{
    uint64_t seed = test_seed();
    dtrain_launch_desc desc;
    for (uint32_t mode = 0; mode < 2; mode++) {
        memset(&desc, 0, sizeof desc);
        desc.rank_count = 3;
        desc.mode = mode;
        CHECK(dtrain_launch(&desc, random_programs, &seed, NULL) == DTRAIN_OK);
    }
}

/* ---- spans of a program and of the library -----------------------------------------------------*/

static double all_seconds(const dtrain_world *world)
{
    double sum = 0;
    for (int kind = 0; kind < DTRAIN_SPAN_KINDS; kind++)
        sum += dtrain__span_seconds(world, (dtrain_span_kind)kind);
    return sum;
}

/* Rank 1 comes 50 ms late: the others wait in COMM, and it does not. All kinds together are the time that passed.
 * Load can delay a rank between any two lines. So each figure lies between two times that the test takes, one inside
 * and one outside of what the library takes, and the wait of the others is looked for in up to 40 rounds. */
static int one_is_late(dtrain_world *world, void *user)
{
    bool good = false;
    (void)user;
    for (int round = 0; round < 40 && !good; round++) {
        const double outside = dtrain_seconds(), before = all_seconds(world);
        const double waited_before = dtrain__span_seconds(world, DTRAIN_SPAN_COMM);
        const double forward_before = dtrain__span_seconds(world, DTRAIN_SPAN_FORWARD);
        const double start = dtrain_seconds();
        bool found, all_found[3];
        dtrain_span_begin(world, DTRAIN_SPAN_FORWARD, "own forward");
        const double begun = dtrain_seconds();
        if (dtrain_world_rank(world) == 1) ranks_sleep_us(50000);
        const double called = dtrain_seconds();
        CHECK(dtrain_barrier(dtrain_world_comm(world)) == DTRAIN_OK);
        const double returned = dtrain_seconds();
        dtrain_span_end(world);
        const double ended = dtrain_seconds();
        const double waited = dtrain__span_seconds(world, DTRAIN_SPAN_COMM) - waited_before;
        const double forward = dtrain__span_seconds(world, DTRAIN_SPAN_FORWARD) - forward_before;
        const double inside = dtrain_seconds() - start, all = all_seconds(world) - before;
        const double passed = dtrain_seconds() - outside, rounding = 1e-8;
        CHECK_MSG(waited <= returned - called + rounding, "waited %g s of %g s in the call", waited,
                  returned - called);
        CHECK_MSG(forward >= called - begun - rounding &&
                      forward + waited <= ended - start + rounding,
                  "forward %g s, waited %g s, of %g s", forward, waited, ended - start);
        CHECK_MSG(all <= passed + rounding && all >= inside - rounding,
                  "%g s in kinds, %g s to %g s have passed", all, inside, passed);
        found = dtrain_world_rank(world) == 1 || (waited >= 0.04 && forward < 0.04);
        CHECK_MSG(found || round < 39, "waited %g s, forward %g s", waited, forward);
        CHECK(dtrain_world_all_gather(world, &found, sizeof found, all_found) == DTRAIN_OK);
        good = all_found[0] && all_found[1] && all_found[2];
    }
    dtrain_span_end(world); /* one too many */
    dtrain_span_begin(NULL, DTRAIN_SPAN_DATA, "nowhere");
    dtrain_span_end(NULL);
    CHECK(world->timeline.depth == 0);
    return 0;
}

static void test_late_rank(void)
{
    dtrain_launch_desc desc;
    for (uint32_t mode = 0; mode < 2; mode++) {
        memset(&desc, 0, sizeof desc);
        desc.rank_count = 3;
        desc.mode = mode;
        CHECK(dtrain_launch(&desc, one_is_late, NULL, NULL) == DTRAIN_OK);
    }
}

/* ---- traces -----------------------------------------------------------------------------------*/

/* What is in a trace file, read by the library's own reader of JSON, which believes nothing. */
typedef struct found {
    bool whole, ended; /* every line is an event; the array is closed */
    long events, spans, named, writes,
        outside; /* named: with the name that is looked for; outside: not in the parent */
} found;

static found read_trace(const char *path, const char *name)
{
    static char line[4096];
    found f = {true, false, 0, 0, 0, 0, 0};
    FILE *in = fopen(path, "rb");
    while (in && fgets(line, sizeof line, in)) {
        size_t length = strcspn(line, "\n");
        const char *at = line;
        char key[64], text[256];
        bool span = false;
        if (f.ended) f.whole = false;
        if (*at == '[' && length--) at++;
        if (*at == ']') f.ended = true;
        if (*at == ']' || length == 0) continue;
        if (at[length - 1] == ',') length--;
        dtrain__json json = dtrain__json_begin(path, at, length);
        if (!dtrain__json_enter(&json, '{')) f.whole = false;
        while (dtrain__json_member(&json, key, sizeof key)) {
            text[0] = 0;
            if (strcmp(key, "ph") == 0 || strcmp(key, "name") == 0)
                (void)dtrain__json_string(&json, text, sizeof text);
            else (void)dtrain__json_skip(&json);
            span = span || (strcmp(key, "ph") == 0 && strcmp(text, "X") == 0);
            if (strcmp(key, "name") == 0) {
                f.named += strcmp(text, name) == 0;
                f.writes += strcmp(text, "trace is written") == 0;
            }
        }
        f.events++;
        f.spans += span;
        if (dtrain__json_end(&json) != DTRAIN_OK) f.whole = false;
    }
    if (in) fclose(in);
    return f;
}

typedef struct traced_run {
    char directory[64], path[80];
    dtrain_launch_desc desc;
    long warnings; /* shared */
} traced_run;

static void count_warnings(void *user, dtrain_log_level level, int rank, const char *text)
{
    (void)rank;
    (void)text;
    if (level <= DTRAIN_LOG_WARNING)
        __atomic_add_fetch(&((traced_run *)user)->warnings, 1, __ATOMIC_ACQ_REL);
}

static traced_run *new_run(uint32_t mode, uint32_t events)
{
    traced_run *run = (traced_run *)ranks_shared(sizeof *run);
    snprintf(run->directory, sizeof run->directory, "/tmp/dtrain_trace_XXXXXX");
    CHECK(mkdtemp(run->directory) != NULL);
    snprintf(run->path, sizeof run->path, "%s/a.b.json", run->directory);
    run->desc.rank_count = 2;
    run->desc.mode = mode;
    run->desc.options.trace.path = run->path;
    run->desc.options.trace.event_count = events;
    run->desc.options.log = count_warnings;
    run->desc.options.log_user = run;
    return run;
}
static const char *file_of(const traced_run *run, int rank)
{
    static char path[128];
    snprintf(path, sizeof path, "%s/a.b.rank%d.json", run->directory, rank);
    return path;
}
static void end_run(const traced_run *run)
{
    char command[128];
    snprintf(command, sizeof command, "rm -rf %s", run->directory);
    CHECK(system(command) == 0);
}

enum { MANY = 1000 };

/* Many spans in one that stays open, with names that JSON has to escape. */
static int many_spans(dtrain_world *world, void *user)
{
    (void)user;
    dtrain_span_begin(world, DTRAIN_SPAN_FORWARD, "all of \"them\" \\ \n\x80");
    for (int i = 0; i < MANY; i++) {
        char name[NAMES_BYTES];
        names_of_pair(name, 300, 299, 0); /* longer than there is room for */
        dtrain_span_begin(world, DTRAIN_SPAN_BACKWARD, i % 2 ? "inner" : name);
        memset(name, 'x', sizeof name - 1); /* the name lives as long as the span, and not longer */
        snprintf(name, sizeof name, "one of many spans, changed");
        dtrain_span_end(world);
    }
    for (int i = 0; i < 50; i++) dtrain_span_begin(world, DTRAIN_SPAN_OTHER, "deep");
    for (int i = 0; i < 50; i++) dtrain_span_end(world);
    dtrain_span_end(world);
    return dtrain_barrier(dtrain_world_comm(world)) == DTRAIN_OK ? 0 : 1;
}

/* Memory that is full in the middle: nothing is lost, and the writing is in the trace. */
static void test_full_memory(void)
{
    for (uint32_t mode = 0; mode < 2; mode++) {
        traced_run *run = new_run(mode, 64);
        CHECK(dtrain_launch(&run->desc, many_spans, NULL, NULL) == DTRAIN_OK);
        for (int rank = 0; rank < 2; rank++) {
            const found inner = read_trace(file_of(run, rank), "inner");
            const found deep = read_trace(file_of(run, rank), "deep");
            CHECK_MSG(inner.whole && inner.ended, "%s is no trace", file_of(run, rank));
            CHECK_MSG(inner.named == MANY / 2 && deep.named == (long)DTRAIN__SPAN_DEPTH - 1,
                      "%ld inner, %ld deep", inner.named, deep.named);
            CHECK_MSG(inner.writes >= MANY / 64, "written %ld times", inner.writes);
        }
        CHECK(run->warnings == 0);
        end_run(run);
    }
}

/* A collective that stays in flight while the events around it are written. */
static int long_flight(dtrain_world *world, void *user)
{
    float *x = (float *)calloc(100000, sizeof *x);
    dtrain_work *work = NULL;
    (void)user;
    if (dtrain_world_rank(world) == 1) ranks_sleep_us(20000);
    dtrain_result result = dtrain_all_reduce(dtrain_world_comm(world), x, x, 100000,
                                             DTRAIN_DTYPE_F32, DTRAIN_REDUCE_MAX, &work);
    for (int i = 0; i < 200; i++) {
        dtrain_span_begin(world, DTRAIN_SPAN_FORWARD, "inner");
        dtrain_span_end(world);
    }
    if (result == DTRAIN_OK) result = dtrain_work_wait(work);
    free(x);
    return result == DTRAIN_OK ? 0 : 1;
}

static void test_long_flight(void)
{
    traced_run *run = new_run(DTRAIN_LAUNCH_THREADS, 64);
    CHECK(dtrain_launch(&run->desc, long_flight, NULL, NULL) == DTRAIN_OK);
    for (int rank = 0; rank < 2; rank++) { /* the span of the call, and the collective */
        const found f = read_trace(file_of(run, rank), "all-reduce");
        CHECK_MSG(f.whole && f.ended && f.named == 2, "rank %d: %ld events", rank, f.named);
        CHECK(read_trace(file_of(run, rank), "inner").named == 200);
        CHECK(read_trace(file_of(run, rank), "dtrain_lost").named == 0);
    }
    end_run(run);
}

/* A span, a detail and a collective of each name. */
static int with_names(dtrain_world *world, void *user)
{
    char name[NAMES_BYTES], part[16];
    float x = 0;
    (void)user;
    for (int i = 0; i < NAMES_COUNT; i++) {
        dtrain_span_begin(world, DTRAIN_SPAN_FORWARD, names_all(i, name));
        dtrain__span_end(world, dtrain__detail_begin(world, "linear", name));
        snprintf(part, sizeof part, "bucket");
        dtrain__call_label(world, part, 3, name);
        if (dtrain_all_reduce(dtrain_world_comm(world), &x, &x, 1, DTRAIN_DTYPE_F32,
                              DTRAIN_REDUCE_SUM, NULL) != DTRAIN_OK)
            return 1;
        memset(part, 'x',
               sizeof part - 1); /* who made the call may be gone when the event is written */
        dtrain_span_end(world);
    }
    return 0;
}

/* Count the different texts that follow `before` in a file, and of the names those that stand there as they are. */
static void count_texts(const char *path, const char *before, const char *after, int *different,
                        int *whole)
{
    static char line[4096], seen[8 * NAMES_COUNT][1024];
    FILE *in = fopen(path, "rb");
    *different = *whole = 0;
    while (in && fgets(line, sizeof line, in)) {
        char *at = strstr(line, before), *end = at ? strchr(at + strlen(before), '"') : NULL,
             name[NAMES_BYTES];
        int i = 0;
        if (!end || strncmp(end, after, strlen(after)) != 0) continue;
        *end = 0;
        at += strlen(before);
        while (i < *different && strcmp(seen[i], at) != 0) i++;
        if (i < *different || i == 8 * NAMES_COUNT) continue;
        snprintf(seen[(*different)++], sizeof seen[0], "%s", at);
        for (i = 0; i < NAMES_COUNT; i++) *whole += strcmp(at, names_all(i, name)) == 0;
    }
    if (in) fclose(in);
}

/* Names that differ stay different in a trace, however long they are; and names of Hugging Face's models are whole. */
static void test_names_of_parameters(void)
{
    static const struct {
        const char *what, *before, *after;
    } places[] = {{"spans", "\"cat\":\"forward\",\"name\":\"", "\",\"args\":{}"},
                  {"details", "\"name\":\"linear\",\"args\":{\"of\":\"", "\"}"},
                  {"calls", "\"of\":\"bucket 3, ", "\",\"communicator"}};
    traced_run *run = new_run(DTRAIN_LAUNCH_PROCESSES, 0);
    CHECK(dtrain_launch(&run->desc, with_names, NULL, NULL) == DTRAIN_OK);
    CHECK(read_trace(file_of(run, 0), "all-reduce").whole);
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        int different, whole;
        count_texts(file_of(run, 0), places[i].before, places[i].after, &different, &whole);
        CHECK_MSG(different == NAMES_COUNT, "%s: %d different names of %d", places[i].what,
                  different, NAMES_COUNT);
        CHECK_MSG(whole >= NAMES_HUGGING_FACE + 2 + 3 * 2, "%s: %d names are whole", places[i].what,
                  whole);
    }
    end_run(run);
}

static int steps_of_a_host(dtrain_world *world, void *user)
{
    (void)user;
    for (int step = 0; step < 10; step++) {
        world->timeline.reader->step(world, step);
        const uint32_t span = dtrain__span_begin(world, DTRAIN_SPAN_OTHER, "step", step);
        const uint32_t detail = dtrain__detail_begin(world, "detail", "of a layer");
        dtrain__span_end(world, detail);
        dtrain__span_end(world, span);
    }
    return 0;
}

/* The steps that were asked for, details too, and no others; and a limit of bytes, said once a rank. */
static void test_limits(void)
{
    traced_run *run = new_run(DTRAIN_LAUNCH_PROCESSES, 0);
    run->desc.options.trace.first_step = 3;
    run->desc.options.trace.step_count = 4;
    CHECK(dtrain_launch(&run->desc, steps_of_a_host, NULL, NULL) == DTRAIN_OK);
    found f = read_trace(file_of(run, 1), "step");
    CHECK_MSG(f.whole && f.ended && f.named == 4, "%ld steps", f.named);
    CHECK(read_trace(file_of(run, 1), "detail").named == 4 && run->warnings == 0);
    end_run(run);
    run = new_run(DTRAIN_LAUNCH_THREADS, 64);
    run->desc.options.trace.file_bytes = 20000;
    CHECK(dtrain_launch(&run->desc, many_spans, NULL, NULL) == DTRAIN_OK);
    f = read_trace(file_of(run, 0), "inner");
    CHECK_MSG(f.whole && f.ended && f.named > 20 && f.named < 200, "%ld spans in 20000 bytes",
              f.named);
    CHECK_MSG(run->warnings == 2, "%ld warnings", run->warnings);
    end_run(run);
}

/* A file that cannot be made is an error; one that cannot be written a warning. */
static void test_failing_files(void)
{
    traced_run *run = new_run(DTRAIN_LAUNCH_PROCESSES, 64);
    CHECK(symlink("/dev/full", file_of(run, 0)) == 0);
    CHECK(dtrain_launch(&run->desc, many_spans, NULL, NULL) == DTRAIN_OK);
    CHECK_MSG(run->warnings == 1, "%ld warnings", run->warnings);
    CHECK(read_trace(file_of(run, 1), "inner").named == MANY / 2);
    run->desc.options.trace.path = "/proc/nowhere/t.json";
    CHECK(dtrain_launch(&run->desc, many_spans, NULL, NULL) == DTRAIN_ERROR_RANK_FAILED);
    CHECK_MSG(strstr(dtrain_last_error(), "/proc/nowhere/t.rank") != NULL, "%s",
              dtrain_last_error());
    run->desc.options.trace.path = run->path;
    run->desc.options.trace.event_count = 3;
    CHECK(dtrain_launch(&run->desc, many_spans, NULL, NULL) == DTRAIN_ERROR_RANK_FAILED);
    CHECK_MSG(strstr(dtrain_last_error(), "event_count") != NULL, "%s", dtrain_last_error());
    end_run(run);
}

/* Every allocation fails once: an error, nothing leaks; and a trace allocates once, at the start. */
static void test_memory_failures(void)
{
    counted_memory memory;
    traced_run *run = new_run(DTRAIN_LAUNCH_THREADS, 64);
    long plain = 0;
    for (int traced = 0; traced < 2; traced++) {
        memset(&memory, 0, sizeof memory);
        run->desc.options.allocator = counted_allocator(&memory);
        run->desc.options.trace.path = traced ? run->path : NULL;
        CHECK(dtrain_launch(&run->desc, many_spans, NULL, NULL) == DTRAIN_OK);
        if (!traced) plain = memory.calls;
    }
    const long calls = memory.calls;
    CHECK_MSG(calls == plain + 2, "%ld allocations, %ld without a trace", calls, plain);
    for (long at = 1; at <= calls; at++) {
        memset(&memory, 0, sizeof memory);
        memory.fail_at = at;
        run->desc.options.allocator = counted_allocator(&memory);
        CHECK_MSG(dtrain_launch(&run->desc, many_spans, NULL, NULL) != DTRAIN_OK, "allocation %ld",
                  at);
        CHECK_MSG(memory.live == 0 && memory.wrong == 0, "allocation %ld: %ld blocks, %ld wrong",
                  at, memory.live, memory.wrong);
    }
    end_run(run);
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    RUN(test_random_programs);
    RUN(test_late_rank);
    RUN(test_full_memory);
    RUN(test_long_flight);
    RUN(test_names_of_parameters);
    RUN(test_limits);
    RUN(test_failing_files);
    RUN(test_memory_failures);
    return test_summary();
}
