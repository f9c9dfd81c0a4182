/* draw.h: one step of some ranks as a drawing (SVG). */
#ifndef TRACE_DRAW_H
#define TRACE_DRAW_H

#include "events.h"

enum {
    DRAW_LEFT = 120,
    DRAW_WIDTH = 860,
    DRAW_ROW = 18,
    DRAW_LEVELS = 3,
    DRAW_LANES = 12,
    STAGES_MOST = 4096
};

typedef struct drawing {
    FILE *out;
    int64_t begin, end; /* of what is drawn */
    int y;              /* where the next row comes */
} drawing;

static double draw_x(const drawing *d, int64_t ns)
{
    return DRAW_LEFT + DRAW_WIDTH * (double)(ns - d->begin) / (double)(d->end - d->begin);
}

static void draw_escaped(const drawing *d, const char *text)
{
    for (; *text; text++)
        if (*text == '<') fprintf(d->out, "&lt;");
        else if (*text == '&') fprintf(d->out, "&amp;");
        else fputc(*text, d->out);
}

static void draw_text(const drawing *d, double x, double y, const char *class_name,
                      const char *text)
{
    fprintf(d->out, "<text x=\"%.1f\" y=\"%.1f\" class=\"%s\">", x, y, class_name);
    draw_escaped(d, text);
    fprintf(d->out, "</text>\n");
}

/* Draw an event in a row, with its name: all of it where a pointer rests on the event, and in the row what there is
 * room for. Of a unit that is the end, which says which layer it is; of others the begin, as a bucket's number. */
static void draw_event(const drawing *d, const trace_event *event, int y, const char *label)
{
    const int64_t begin = event->begin > d->begin ? event->begin : d->begin;
    const int64_t end = event->end < d->end ? event->end : d->end;
    const double x = draw_x(d, begin), width = draw_x(d, end) - x;
    if (end <= begin || width < 0.15) return;
    fprintf(d->out, "<rect x=\"%.1f\" y=\"%d\" width=\"%.1f\" height=\"%d\" class=\"%s\"><title>",
            x, y, width < 0.4 ? 0.4 : width, DRAW_ROW - 2, event->kind);
    draw_escaped(d, label);
    fprintf(d->out, "</title></rect>\n");
    const int room = (int)((width - 4) / 6.2);
    const size_t bytes = strlen(label), most = room > 2 ? (size_t)room : 2;
    const bool cut = bytes > most, ends = label == event->name;
    size_t from = cut && ends ? bytes - most + 2 : 0, to = cut && !ends ? most : bytes;
    while (((unsigned char)label[from] & 0xc0) == 0x80) from++; /* whole characters of UTF-8 */
    while (to < bytes && ((unsigned char)label[to] & 0xc0) == 0x80) to--;
    char text[2 * TRACE_NAME];
    snprintf(text, sizeof text, "%s%.*s", from ? ".." : "", (int)(to - from), label + from);
    if (room >= 3) draw_text(d, x + 2, y + DRAW_ROW - 6, "in", text);
}

/* Draw the spans of the rank's thread: parts of the step, units, and calls of communicators below them. */
static void draw_thread(drawing *d, const trace_event *events, size_t count)
{
    int64_t ends[64];
    size_t depth = 0;
    for (size_t i = 0; i < count; i++) {
        const trace_event *event = &events[i];
        if (event->phase[0] != 'X' || event->tid != TRACE_THREAD) continue;
        while (depth && ends[depth - 1] <= event->begin) depth--;
        const bool waits = strcmp(event->kind, "comm") == 0;
        const size_t level = waits ? DRAW_LEVELS - 1 : depth - 1;
        if (depth < 64) ends[depth++] = event->end;
        if (depth == 1 || event->end <= d->begin || event->begin >= d->end) continue;
        const bool operation = level == 1 && event->number < 0; /* without units: left out */
        if (level < DRAW_LEVELS - 1 ? !operation : waits)
            draw_event(d, event, d->y + (int)level * DRAW_ROW, event->name);
    }
    draw_text(d, 4, d->y + DRAW_ROW - 6, "row", "thread");
    draw_text(d, 4, d->y + 2 * DRAW_ROW - 6, "row", "  units");
    draw_text(d, 4, d->y + 3 * DRAW_ROW - 6, "row", "  exposed");
    d->y += DRAW_LEVELS * DRAW_ROW;
}

/* Draw the collectives of rows [first, last) of the trace, each in the first row that is free; what has no row is in
 * the last one. */
static void draw_collectives(drawing *d, const trace_event *events, size_t count, int first,
                             int last, const char *name)
{
    int64_t ends[DRAW_LANES] = {0}, from = INT64_MIN;
    int lanes = 1;
    for (;;) { /* in the order of their begins: rows of the trace are not */
        const trace_event *next = NULL;
        for (size_t i = 0; i < count; i++) {
            const trace_event *event = &events[i];
            if (!is_collective(event, first, last) || event->end <= d->begin ||
                event->begin >= d->end)
                continue;
            if (event->begin > from && (!next || event->begin < next->begin)) next = event;
        }
        if (!next && from == INT64_MIN && first == TRACE_TENSOR) return; /* there is no such axis */
        if (!next) break;
        from = next->begin;
        int lane = 0;
        while (lane < DRAW_LANES - 1 && ends[lane] > next->begin) lane++;
        ends[lane] = next->end;
        if (lane >= lanes) lanes = lane + 1;
        char label[2 * TRACE_NAME + 2];
        snprintf(label, sizeof label, "%s%s%s", next->of, next->of[0] ? ", " : "", next->name);
        draw_event(d, next, d->y + lane * DRAW_ROW, label);
    }
    draw_text(d, 4, d->y + DRAW_ROW - 6, "row", name);
    d->y += lanes * DRAW_ROW + 8;
}

/* ---- Pipelines ---- */

/* Return which stage of a pipeline a span is a pass of; -1: it is none. */
static int stage_of(const trace_event *event)
{
    if (event->phase[0] != 'X' || event->tid != TRACE_THREAD ||
        strncmp(event->of, "stage ", 6) != 0)
        return -1;
    const long stage = strtol(event->of + 6, NULL, 10);
    return stage >= 0 && stage < STAGES_MOST ? (int)stage : -1;
}

/* Draw the passes of a rank as src/parallel/pipeline.h draws a schedule: F, B, W (forward, backward, weights), the
 * micro-batch and, where the rank has several stages, which of them. */
static void draw_passes(drawing *d, const trace_event *events, size_t count)
{
    bool has[STAGES_MOST] = {false};
    int chunk[STAGES_MOST], chunks = 0;
    for (size_t i = 0; i < count; i++)
        if (stage_of(&events[i]) >= 0) has[stage_of(&events[i])] = true;
    for (int stage = 0; stage < STAGES_MOST; stage++)
        if (has[stage]) chunk[stage] = chunks++;
    for (size_t i = 0; i < count; i++) {
        trace_event pass = events[i];
        const int stage = stage_of(&pass);
        char label[32];
        if (stage < 0) continue;
        const int length = snprintf(label, sizeof label, "%c%lld", pass.name[0] - 'a' + 'A',
                                    (long long)pass.number);
        if (chunks > 1)
            snprintf(label + length, sizeof label - (size_t)length, ".%d", chunk[stage]);
        snprintf(pass.kind, sizeof pass.kind, "%.12s%s", pass.name, chunk[stage] % 2 ? " odd" : "");
        draw_event(d, &pass, d->y, label);
    }
}

/* Draw the passes of all ranks of a pipeline, a row for each; nothing where there are none. */
static bool draw_pipeline(drawing *d, const trace *all)
{
    bool any = false;
    for (size_t i = 0, next; i < all->count; i = next) {
        char name[40];
        bool passes = false;
        for (next = i; next < all->count && all->events[next].pid == all->events[i].pid; next++)
            passes = passes || stage_of(&all->events[next]) >= 0;
        if (!passes) continue;
        snprintf(name, sizeof name, "rank %d", all->events[i].pid);
        draw_text(d, 4, d->y + DRAW_ROW - 6, "row", name);
        draw_passes(d, &all->events[i], next - i);
        d->y += DRAW_ROW;
        any = true;
    }
    d->y += any ? 8 : 0;
    return any;
}

/* ---- A step ---- */

static void draw_axis(drawing *d)
{
    const double ms = 1e-6 * (double)(d->end - d->begin);
    double unit = 1e-3;
    while (ms / unit > 12) unit *= ms / unit > 24 ? (ms / unit > 60 ? 10 : 5) : 2;
    for (double at = 0; at <= ms; at += unit) {
        char text[32];
        const double x = DRAW_LEFT + DRAW_WIDTH * at / ms;
        snprintf(text, sizeof text, "%g ms", at);
        fprintf(d->out, "<line x1=\"%.1f\" y1=\"24\" x2=\"%.1f\" y2=\"%d\" class=\"grid\"/>\n", x,
                x, d->y);
        if (x < DRAW_LEFT + DRAW_WIDTH - 30) draw_text(d, x + 2, 34, "row", text);
    }
}

/* Find a step of a rank's events: the one with this number, or the one in the middle. */
static const trace_event *find_step(const trace_event *events, size_t count, int64_t number)
{
    int64_t steps = 0, at = 0;
    for (size_t i = 0; i < count; i++) steps += is_span(&events[i], "step");
    for (size_t i = 0; i < count; i++)
        if (is_span(&events[i], "step") &&
            (number < 0 ? at++ == steps / 2 : events[i].number == number))
            return &events[i];
    return NULL;
}

/* Draw what each rank does. */
static void draw_ranks(drawing *d, const trace *all)
{
    for (size_t i = 0, next; i < all->count; i = next) {
        char name[40];
        next = i;
        while (next < all->count && all->events[next].pid == all->events[i].pid) next++;
        snprintf(name, sizeof name, "rank %d", all->events[i].pid);
        draw_text(d, 4, d->y + 12, "title", name);
        d->y += DRAW_ROW;
        draw_thread(d, &all->events[i], next - i);
        draw_collectives(d, &all->events[i], next - i, TRACE_COLLECTIVE, TRACE_TENSOR, "in flight");
        draw_collectives(d, &all->events[i], next - i, TRACE_TENSOR, TRACE_CHECKPOINT,
                         "tensor axis");
    }
}

/* Draw a step as the first rank has it, and what the others do meanwhile; only passes: of a pipeline, without what
 * each rank does beside them. Events are sorted by place. */
static int draw(const trace *all, const char *path, int64_t number, bool only_passes)
{
    static const char style[] =
        "text{font-family:sans-serif;font-size:10px;fill:#333}.in{fill:#111}.title{font-size:13px}"
        ".grid{stroke:#888;stroke-opacity:.25}rect{stroke:#fff;stroke-width:.3}"
        ".forward{fill:#8cb8e8}.backward{fill:#f0b070}.optimizer{fill:#a8d08d}.data{fill:#d0c8f0}"
        ".weights{fill:#a8d08d}.odd{fill-opacity:.6}.comm{fill:#e05050}.collective{fill:#d8a0c8}."
        "checkpoint{fill:#c0b090}.other{fill:#d8d8d8}"
        "@media(prefers-color-scheme:dark){text{fill:#ccc}.in{fill:#111}rect{stroke:#222}}";
    size_t count = 0;
    drawing d;
    memset(&d, 0, sizeof d);
    while (count < all->count && all->events[count].pid == all->events[0].pid) count++;
    const trace_event *step = find_step(all->events, count, number);
    if (!step) return say(stderr, "there is no such step in %s\n", all->files[0].path), 2;
    d.begin = step->begin;
    d.end = step->end > step->begin ? step->end : step->begin + 1;
    char *body = NULL;
    size_t bytes = 0;
    d.out = open_memstream(&body, &bytes);
    if (!d.out) return fprintf(stderr, "there is no memory for a drawing\n"), 2;
    d.y = 42;
    const bool passes = draw_pipeline(&d, all);
    if (!only_passes) draw_ranks(&d, all);
    draw_axis(&d);
    fclose(d.out);
    if (only_passes && !passes) {
        say(stderr, "there are no passes of a pipeline in %s\n", all->files[0].path);
        return free(body), 2;
    }
    FILE *out = fopen(path, "wb");
    if (!out) {
        say(stderr, "%s cannot be written: %s\n", path, strerror(errno));
        return free(body), 2;
    }
    fprintf(out,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\">\n<style>%s</style>\n",
            DRAW_LEFT + DRAW_WIDTH + 20, d.y + 10, style);
    fprintf(out, "<text x=\"4\" y=\"16\" class=\"title\">step %lld: %.2f ms</text>\n%s</svg>\n",
            (long long)step->number, 1e-6 * (double)(d.end - d.begin), body);
    free(body);
    if (fclose(out) != 0) return say(stderr, "%s: %s\n", path, strerror(errno)), 2;
    say(stdout, "step %lld in %s\n", (long long)step->number, path);
    return 0;
}

#endif
