/* events.h: events of traces, and what a rank's add up to. */
#ifndef TRACE_EVENTS_H
#define TRACE_EVENTS_H

enum {
    TRACE_FILES = 1024,
    TRACE_NAME = DTRAIN__EVENT_NAME + 32, /* bytes of the names in an event */
    TRACE_THREAD = 1, /* row of the rank's thread, as src/world/timeline_internal.h has it ... */
    TRACE_COLLECTIVE = 2, /* ... and rows of collectives, up to ... */
    TRACE_TENSOR = 26,    /* (from here on those of a mesh's tensor axis) */
    TRACE_CHECKPOINT = 34 /* ... that of the thread that writes checkpoints; reading is behind it */
};

typedef struct trace_event {
    const char *line; /* as it stands in the file */
    size_t length;
    int64_t begin, end, bytes, number; /* times in ns */
    int pid, tid, file;
    char phase[4], name[TRACE_NAME], kind[24], of[TRACE_NAME];
} trace_event;
typedef struct trace_file {
    const char *path;
    size_t first, last; /* events, as they are read */
    int64_t offset, error;
    int restart;
} trace_file;
typedef struct trace {
    trace_event *events;
    size_t count, room, file_count;
    trace_file files[TRACE_FILES];
} trace;

/* Make room for one more event; NULL: there is no memory. */
static trace_event *trace_room(trace *all)
{
    if (all->count == all->room) {
        const size_t room = all->room ? 2 * all->room : 4096;
        trace_event *more = (trace_event *)realloc(all->events, room * sizeof *more);
        if (!more) return NULL;
        all->events = more;
        all->room = room;
    }
    return &all->events[all->count];
}

/* ---- Sets of times: sorted intervals that do not touch ------------------------------------------------------- */

typedef struct times {
    int64_t (*at)[2];
    size_t count;
} times;

static int by_begin(const void *left, const void *right)
{
    const int64_t a = *(const int64_t *)left, b = *(const int64_t *)right;
    return a < b ? -1 : a > b;
}

/* Bring intervals into order and join those that overlap. */
static void times_join(times *t)
{
    size_t used = 0;
    if (!t->count) return;
    qsort(t->at, t->count, sizeof *t->at, by_begin);
    for (size_t i = 1; i < t->count; i++) {
        if (t->at[i][0] > t->at[used][1]) {
            used++;
            t->at[used][0] = t->at[i][0];
            t->at[used][1] = t->at[i][1];
        } else if (t->at[i][1] > t->at[used][1]) t->at[used][1] = t->at[i][1];
    }
    t->count = used + 1;
}

/* Return how long both sets go on at once. */
static int64_t times_both(const times *a, const times *b)
{
    int64_t sum = 0;
    for (size_t i = 0, j = 0; i < a->count && j < b->count;) {
        const int64_t begin = a->at[i][0] > b->at[j][0] ? a->at[i][0] : b->at[j][0];
        const int64_t end = a->at[i][1] < b->at[j][1] ? a->at[i][1] : b->at[j][1];
        if (end > begin) sum += end - begin;
        if (a->at[i][1] < b->at[j][1]) i++;
        else j++;
    }
    return sum;
}

/* ---- What a rank's events add up to -------------------------------------------------------------------------- */

typedef struct trace_sums {
    int steps;
    int64_t step, flight, exposed; /* ns of all steps */
} trace_sums;

static bool is_span(const trace_event *event, const char *name)
{
    return event->phase[0] == 'X' && event->tid == TRACE_THREAD && strcmp(event->name, name) == 0;
}

/* Whether an event is a collective in the rows [first, last) of the trace. */
static bool is_collective(const trace_event *event, int first, int last)
{
    return event->phase[0] == 'X' && event->tid >= first && event->tid < last;
}

/* Sum up the events of a rank, sorted by place, with the collectives from row `first` on. A step ends where its record
 * begins. */
static bool sum_rank(const trace_event *events, size_t count, int first, trace_sums *sums)
{
    times steps = {NULL, 0}, flight = {NULL, 0}, inside = {NULL, 0};
    memset(sums, 0, sizeof *sums);
    int64_t(*memory)[2] = (int64_t(*)[2])malloc(3 * (count + 1) * sizeof *memory);
    if (!memory) return false;
    steps.at = memory;
    flight.at = memory + count + 1;
    inside.at = memory + 2 * (count + 1);
    for (size_t i = 0; i < count; i++) {
        const trace_event *event = &events[i];
        times *to = NULL;
        if (event->phase[0] != 'X') continue;
        if (is_span(event, "step")) to = &steps;
        else if (event->tid == TRACE_THREAD && strcmp(event->kind, "comm") == 0) to = &inside;
        else if (is_collective(event, first, TRACE_CHECKPOINT)) to = &flight;
        if (is_span(event, "record") && steps.count) steps.at[steps.count - 1][1] = event->begin;
        if (!to) continue;
        to->at[to->count][0] = event->begin;
        to->at[to->count++][1] = event->end;
    }
    sums->steps = (int)steps.count;
    times_join(&flight);
    times_join(&inside);
    for (size_t i = 0; i < steps.count; i++) {
        const times one = {steps.at + i, 1};
        sums->step += steps.at[i][1] - steps.at[i][0];
        sums->flight += times_both(&one, &flight);
    }
    /* what is exposed: in flight and inside, of the steps */
    size_t both = 0;
    times exposed = {NULL, 0};
    exposed.at = (int64_t(*)[2])malloc((flight.count + inside.count + 1) * sizeof *exposed.at);
    if (!exposed.at) return free(memory), false;
    for (size_t i = 0, j = 0; i < flight.count && j < inside.count;) {
        const int64_t begin = flight.at[i][0] > inside.at[j][0] ? flight.at[i][0] : inside.at[j][0];
        const int64_t end = flight.at[i][1] < inside.at[j][1] ? flight.at[i][1] : inside.at[j][1];
        if (end > begin) {
            exposed.at[both][0] = begin;
            exposed.at[both++][1] = end;
        }
        if (flight.at[i][1] < inside.at[j][1]) i++;
        else j++;
    }
    exposed.count = both;
    for (size_t i = 0; i < steps.count; i++) {
        const times one = {steps.at + i, 1};
        sums->exposed += times_both(&one, &exposed);
    }
    free(exposed.at);
    free(memory);
    return true;
}

#endif
