/* report.c: a page about one or several runs, made from their logs: one HTML file without scripts and without
 * anything from the network, with drawings in it (SVG), for light and dark screens.
 *
 *   build:   cc -O2 -I. tools/report/report.c -o build/report -lm -lpthread
 *   run:     build/report OUT.html LOG...          (build/train_gpt --log LOG)
 *
 * It shows losses, rates, what the time of a step was spent with, memory, and a table of how the runs ended. Where
 * the numbers of ranks are known and differ, also how the rate grows with them: write 4@LOG for a run of four
 * ranks, and NAME=LOG (or 4@NAME=LOG) to call a run something else than its file.
 * Exit status: 0 when the page is written, 1 when the command line is wrong, 2 when a file cannot be read or written.
 *
 * Long runs are drawn as means of neighbouring steps, at most 240 points to a curve. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "tools/descriptors.h"

/* ---- Reading logs -------------------------------------------------------------------------------------------- */

enum { REPORT_RUNS = 16 };

/* Keys of a line that are drawn or listed; a log may lack any of them. */
enum {
    STEP,
    LOSS,
    VAL_LOSS,
    RATE,
    STEP_MS,
    DATA_MS,
    FORWARD_MS,
    BACKWARD_MS,
    EXPOSED_MS,
    OPTIMIZER_MS,
    CHECKPOINT_MS,
    COMM_MS,
    MEMORY,
    MEMORY_PEAK,
    STEPS,
    TOKENS,
    SECONDS,
    FIRST_LOSS,
    LAST_LOSS,
    SCALING,
    COMM_BYTES,
    RANKS,
    KEYS
};
static const char *const key_names[KEYS] = {
    "step",          "loss",       "val_loss",     "tokens_per_second", "step_ms",
    "data_ms",       "forward_ms", "backward_ms",  "exposed_comm_ms",   "optimizer_ms",
    "checkpoint_ms", "comm_ms",    "memory_bytes", "memory_peak_bytes", "steps",
    "tokens",        "seconds",    "first_loss",   "last_loss",         "scaling",
    "comm_bytes",    "ranks"};

typedef struct run {
    const char *path, *label;
    double ranks;         /* NAN: not known */
    double (*rows)[KEYS]; /* (count) a step each; NAN: not in the log, or null */
    size_t count, room;
    double summary[KEYS]; /* of the last line, where the run has come to its end */
    bool ended;
} run;

/* Read a line into a row; false when it is no JSON. */
static bool read_line(const char *path, const char *line, size_t length, double *row, bool *final)
{
    char name[64];
    dtrain__json json = dtrain__json_begin(path, line, length);
    for (int k = 0; k < KEYS; k++) row[k] = NAN;
    *final = false;
    if (!dtrain__json_enter(&json, '{')) return false;
    while (dtrain__json_member(&json, name, sizeof name)) {
        const char kind = dtrain__json_peek(&json);
        int k = 0;
        while (k < KEYS && strcmp(key_names[k], name) != 0) k++;
        if (kind == 't' && strcmp(name, "final") == 0) *final = true;
        if (kind == '0' && k < KEYS) row[k] = strtod(json.at, NULL);
        (void)dtrain__json_skip(&json);
    }
    return dtrain__json_end(&json) == DTRAIN_OK;
}

/* Read a log. The last line of a run that goes on, or was killed, may be cut off. */
static int read_run(run *r)
{
    FILE *in = fopen(r->path, "rb");
    char *line = NULL;
    size_t room = 0;
    ssize_t length;
    if (!in) return fprintf(stderr, "%s cannot be read: %s\n", r->path, strerror(errno)), 2;
    for (int k = 0; k < KEYS; k++) r->summary[k] = NAN;
    while ((length = getline(&line, &room, in)) > 0) {
        double row[KEYS];
        bool final;
        const bool cut = line[length - 1] != '\n';
        if (length == 1 && !cut) continue;
        if (!read_line(r->path, line, (size_t)length, row, &final)) {
            if (cut) break;
            fclose(in);
            free(line);
            return fprintf(stderr, "%s: line %zu: %s\n", r->path, r->count + 1,
                           dtrain_last_error()),
                   2;
        }
        if (!isnan(row[RANKS])) r->ranks = row[RANKS];
        if (final) {
            memcpy(r->summary, row, sizeof row);
            r->ended = true;
            continue;
        }
        if (r->count == r->room) {
            r->room = r->room ? 2 * r->room : 1024;
            double(*more)[KEYS] = (double(*)[KEYS])realloc(r->rows, r->room * sizeof *more);
            if (!more) exit((fprintf(stderr, "there is no memory for %s\n", r->path), 2));
            r->rows = more;
        }
        memcpy(r->rows[r->count++], row, sizeof row);
    }
    fclose(in);
    free(line);
    return 0;
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

/* Return the median of a key over the steps; NAN: no step has it. */
static double median_of(const run *r, int key)
{
    double *values = (double *)malloc((r->count + 1) * sizeof *values), median = NAN;
    size_t used = 0;
    for (size_t i = 0; values && i < r->count; i++)
        if (!isnan(r->rows[i][key])) values[used++] = r->rows[i][key];
    if (used) {
        qsort(values, used, sizeof *values, by_value);
        median = (values[(used - 1) / 2] + values[used / 2]) / 2;
    }
    free(values);
    return median;
}

/* ---- Drawing ------------------------------------------------------------------------------------------------- */

enum { WIDTH = 640, HEIGHT = 240, LEFT = 62, RIGHT = 12, TOP = 12, BOTTOM = 30, POINTS = 240 };

typedef struct chart {
    FILE *out;
    double x0, x1, y0, y1;
} chart;

static void text(FILE *out, const char *words)
{
    for (; *words; words++) switch (*words) {
        case '<': fputs("&lt;", out); break;
        case '>': fputs("&gt;", out); break;
        case '&': fputs("&amp;", out); break;
        case '"': fputs("&quot;", out); break;
        default: fputc(*words, out);
        }
}

/* Write a number with the unit prefix that makes it short. */
static const char *number_text(double value)
{
    static char texts[4][32];
    static int at;
    char *t = texts[at++ & 3];
    const double size = fabs(value);
    if (isnan(value)) return "-";
    if (size >= 1e9) snprintf(t, 32, "%.3gG", value / 1e9);
    else if (size >= 1e6) snprintf(t, 32, "%.3gM", value / 1e6);
    else if (size >= 1e4) snprintf(t, 32, "%.3gk", value / 1e3);
    else snprintf(t, 32, "%.4g", value);
    return t;
}

static double to_x(const chart *c, double x)
{
    return LEFT + (WIDTH - LEFT - RIGHT) * (x - c->x0) / (c->x1 - c->x0);
}
static double to_y(const chart *c, double y)
{
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (y - c->y0) / (c->y1 - c->y0);
}

/* Return a round distance of about `span` / 5. */
static double round_step(double span)
{
    const double unit = pow(10, floor(log10(span / 5)));
    const double times = span / 5 / unit;
    return unit * (times < 1.5 ? 1 : times < 3.5 ? 2 : times < 7.5 ? 5 : 10);
}

/* Begin a drawing, with axes that hold these values. */
static chart chart_begin(FILE *out, const char *title, const char *x_name, double x0, double x1,
                         double y0, double y1)
{
    chart c = {out, x0, x1 > x0 ? x1 : x0 + 1, y0, y1};
    if (!(y1 > y0)) c.y1 = y0 + (y0 == 0 ? 1 : fabs(y0));
    const double y_step = round_step(c.y1 - c.y0), x_step = fmax(1, round_step(c.x1 - c.x0));
    c.y0 = y_step * floor(c.y0 / y_step);
    c.y1 = y_step * ceil(c.y1 / y_step - 1e-9);
    fprintf(out, "<figure><figcaption>");
    text(out, title);
    fprintf(out, "</figcaption><svg viewBox=\"0 0 %d %d\" role=\"img\" aria-label=\"", WIDTH,
            HEIGHT);
    text(out, title);
    fprintf(out, "\">\n");
    for (double y = c.y0; y <= c.y1 + y_step / 2; y += y_step)
        fprintf(out,
                "<line x1=\"%d\" x2=\"%d\" y1=\"%.1f\" y2=\"%.1f\" class=\"grid\"/>"
                "<text x=\"%d\" y=\"%.1f\" class=\"y\">%s</text>\n",
                LEFT, WIDTH - RIGHT, to_y(&c, y), to_y(&c, y), LEFT - 6, to_y(&c, y) + 4,
                number_text(fabs(y) < y_step / 1e6 ? 0 : y));
    for (double x = x_step * ceil(c.x0 / x_step); x <= c.x1 * (1 + 1e-9); x += x_step)
        fprintf(out, "<text x=\"%.1f\" y=\"%d\" class=\"x\">%s</text>\n", to_x(&c, x), HEIGHT - 14,
                number_text(x));
    fprintf(out, "<text x=\"%d\" y=\"%d\" class=\"x\">%s</text>\n", (LEFT + WIDTH) / 2, HEIGHT - 2,
            x_name);
    return c;
}
static void chart_end(const chart *c) { fprintf(c->out, "</svg></figure>\n"); }

/* Return the mean of a key in point p of the drawing of a run, and its step. */
static double point_of(const run *r, int key, size_t p, size_t points, double *step)
{
    const size_t first = p * r->count / points, end = (p + 1) * r->count / points;
    double sum = 0;
    size_t used = 0;
    *step = isnan(r->rows[first][STEP]) ? (double)first : r->rows[first][STEP];
    for (size_t i = first; i < end; i++)
        if (!isnan(r->rows[i][key])) sum += r->rows[i][key], used++;
    return used ? sum / (double)used : NAN;
}
static size_t points_of(const run *r) { return r->count < POINTS ? r->count : POINTS; }

/* Find the ranges of a key over all runs; false: no run has it. */
static bool range_of(const run *runs, int count, int key, double x[2], double y[2])
{
    bool found = false;
    for (int i = 0; i < count; i++)
        for (size_t p = 0, n = points_of(&runs[i]); p < n; p++) {
            double step;
            const double value = point_of(&runs[i], key, p, n, &step);
            if (isnan(value) || !isfinite(value)) continue;
            if (!found || step < x[0]) x[0] = step;
            if (!found || step > x[1]) x[1] = step;
            if (!found || value < y[0]) y[0] = value;
            if (!found || value > y[1]) y[1] = value;
            found = true;
        }
    return found;
}

/* Draw a key as a curve of each run, and another one, which few steps have, as dots. */
static void draw_curves(FILE *out, const run *runs, int count, int key, int dots, const char *title,
                        bool from_zero)
{
    double x[2] = {0, 0}, y[2] = {0, 0}, dots_x[2], dots_y[2];
    if (!range_of(runs, count, key, x, y)) return;
    if (dots >= 0 && range_of(runs, count, dots, dots_x, dots_y)) {
        y[0] = fmin(y[0], dots_y[0]);
        y[1] = fmax(y[1], dots_y[1]);
    }
    const chart c = chart_begin(out, title, "step", x[0], x[1], from_zero ? 0 : y[0], y[1]);
    for (int i = 0; i < count; i++) {
        const size_t n = points_of(&runs[i]);
        double step;
        bool gap = true;
        fprintf(out, "<path class=\"curve c%d\" d=\"", i % 8);
        for (size_t p = 0; p < n; p++) {
            const double value = point_of(&runs[i], key, p, n, &step);
            if (isfinite(value))
                fprintf(out, "%c%.1f %.1f", gap ? 'M' : 'L', to_x(&c, step), to_y(&c, value));
            gap = !isfinite(value);
        }
        fprintf(out, "\"><title>");
        text(out, runs[i].label);
        fprintf(out, "</title></path>\n");
        for (size_t p = 0; p < n && dots >= 0; p++) {
            const double value = point_of(&runs[i], dots, p, n, &step);
            if (isfinite(value))
                fprintf(out,
                        "<circle class=\"dot c%d\" cx=\"%.1f\" cy=\"%.1f\" "
                        "r=\"3.5\"><title>%s</title></circle>\n",
                        i % 8, to_x(&c, step), to_y(&c, value), number_text(value));
        }
    }
    chart_end(&c);
}

/* ---- What the time of a step was spent with ------------------------------------------------------------------ */

static const int part_keys[] = {DATA_MS, FORWARD_MS, BACKWARD_MS, OPTIMIZER_MS, EXPOSED_MS};
static const char *const part_names[] = {
    "data", "forward", "backward", "optimizer", "exposed communication", "other"};
enum { PARTS = 6 };

/* Draw the parts of a run's steps on top of each other. What no key explains is "other". */
static void draw_parts(FILE *out, const run *r)
{
    double x[2], y[2], (*top)[PARTS + 1];
    const size_t n = points_of(r);
    char title[200];
    if (!range_of(r, 1, STEP_MS, x, y)) return;
    top = (double(*)[PARTS + 1]) calloc(n, sizeof *top);
    if (!top) return;
    snprintf(title, sizeof title, "Time of a step, ms: %.120s", r->label);
    for (size_t p = 0; p < n; p++) {
        double step;
        for (int part = 0; part < PARTS - 1; part++) {
            const double ms = point_of(r, part_keys[part], p, n, &step);
            top[p][part + 1] = top[p][part] + (isfinite(ms) && ms > 0 ? ms : 0);
        }
        const double all = point_of(r, STEP_MS, p, n, &step);
        top[p][PARTS] = isfinite(all) && all > top[p][PARTS - 1] ? all : top[p][PARTS - 1];
        if (top[p][PARTS] > y[1]) y[1] = top[p][PARTS];
    }
    const chart c = chart_begin(out, title, "step", x[0], x[1], 0, y[1]);
    for (int part = 0; part < PARTS; part++) {
        double step, thickest = 0;
        for (size_t p = 0; p < n; p++) thickest = fmax(thickest, top[p][part + 1] - top[p][part]);
        if (thickest <= 0) continue;
        fprintf(out, "<path class=\"area p%d\" d=\"", part);
        for (size_t p = 0; p < n; p++) {
            (void)point_of(r, STEP, p, n, &step);
            fprintf(out, "%c%.1f %.1f", p ? 'L' : 'M', to_x(&c, step), to_y(&c, top[p][part + 1]));
        }
        for (size_t p = n; p-- > 0;) {
            (void)point_of(r, STEP, p, n, &step);
            fprintf(out, "L%.1f %.1f", to_x(&c, step), to_y(&c, top[p][part]));
        }
        fprintf(out, "z\"><title>%s</title></path>\n", part_names[part]);
    }
    free(top);
    chart_end(&c);
}

/* ---- Scaling, table, page ------------------------------------------------------------------------------------ */

/* Draw the median rate over the number of ranks, beside a rate that grows with it. */
static void draw_scaling(FILE *out, const run *runs, int count)
{
    double least = INFINITY, most = 0, first = NAN, best = 0;
    for (int i = 0; i < count; i++) {
        const double rate = median_of(&runs[i], RATE);
        if (!isfinite(runs[i].ranks) || !isfinite(rate)) continue;
        if (runs[i].ranks < least) least = runs[i].ranks, first = rate;
        most = fmax(most, runs[i].ranks);
        best = fmax(best, rate);
    }
    if (!(most > least)) return;
    const chart c = chart_begin(out, "Tokens per second over ranks; the line grows with them",
                                "ranks", 0, most, 0, fmax(best, first * most / least));
    fprintf(out, "<line class=\"ideal\" x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\"/>\n",
            to_x(&c, 0), to_y(&c, 0), to_x(&c, most), to_y(&c, first * most / least));
    for (int i = 0; i < count; i++) {
        const double rate = median_of(&runs[i], RATE);
        if (!isfinite(runs[i].ranks) || !isfinite(rate)) continue;
        fprintf(out, "<circle class=\"dot c%d\" cx=\"%.1f\" cy=\"%.1f\" r=\"4\"><title>", i % 8,
                to_x(&c, runs[i].ranks), to_y(&c, rate));
        text(out, runs[i].label);
        fprintf(out, ": %.1f %% of what it would be</title></circle>\n",
                100 * rate / (first * runs[i].ranks / least));
    }
    chart_end(&c);
}

static void table(FILE *out, const run *runs, int count)
{
    static const struct {
        const char *name;
        int key, of_steps; /* the key whose median stands for it while the run goes on; -1: none */
    } columns[] = {{"steps", STEPS, -1},          {"tokens", TOKENS, -1},
                   {"seconds", SECONDS, -1},      {"first loss", FIRST_LOSS, -1},
                   {"last loss", LAST_LOSS, -1},  {"val loss", VAL_LOSS, -1},
                   {"tokens/s", RATE, RATE},      {"step ms", STEP_MS, STEP_MS},
                   {"comm ms", COMM_MS, COMM_MS}, {"exposed ms", EXPOSED_MS, EXPOSED_MS},
                   {"data ms", DATA_MS, DATA_MS}, {"scaling", SCALING, -1}};
    fprintf(out, "<table><thead><tr><th>run</th><th>ranks</th>");
    for (size_t k = 0; k < sizeof columns / sizeof *columns; k++)
        fprintf(out, "<th>%s</th>", columns[k].name);
    fprintf(out, "</tr></thead><tbody>\n");
    for (int i = 0; i < count; i++) {
        fprintf(out, "<tr><td><span class=\"key k%d\"></span>", i % 8);
        text(out, runs[i].label);
        fprintf(out, "%s</td><td>%s</td>", runs[i].ended ? "" : " (no end)",
                number_text(runs[i].ranks));
        for (size_t k = 0; k < sizeof columns / sizeof *columns; k++) {
            double value = runs[i].summary[columns[k].key];
            if (isnan(value) && columns[k].of_steps >= 0)
                value = median_of(&runs[i], columns[k].of_steps);
            if (isnan(value) && columns[k].key == STEPS) value = (double)runs[i].count;
            fprintf(out, "<td>%s</td>", number_text(value));
        }
        fprintf(out, "</tr>\n");
    }
    fprintf(out, "</tbody></table>\n");
}

static const char style[] =
    ":root{color-scheme:light dark;--ink:#222;--dim:#777;--line:#ddd;--paper:#fff}"
    "@media(prefers-color-scheme:dark){:root{--ink:#ddd;--dim:#999;--line:#3a3a3a;--paper:#181818}}"
    "body{font:14px/1.5 "
    "system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:1360px;margin:24px "
    "auto;padding:0 16px}"
    "h1{font-size:20px}figure{display:inline-block;width:min(640px,100%);margin:0 16px 16px "
    "0;vertical-align:top}"
    "figcaption{font-weight:600}svg{width:100%;height:auto}.grid{stroke:var(--line)}"
    "svg text{font-size:11px;fill:var(--dim)}.y{text-anchor:end}.x{text-anchor:middle}"
    ".curve{fill:none;stroke-width:1.6}.dot{stroke:var(--paper)}.ideal{stroke:var(--dim);stroke-"
    "dasharray:4 4}.area{opacity:.9}"
    "table{border-collapse:collapse;margin:8px 0 24px;display:block;overflow-x:auto}"
    "th,td{padding:3px 10px;border-bottom:1px solid var(--line);text-align:right}"
    "th:first-child,td:first-child{text-align:left}.key{display:inline-block;width:12px;height:"
    "12px;margin:0 6px 0 0}"
    ".legend span{margin-right:4px}.legend{margin:0 0 8px}";
static const char *const run_colors[8] = {"#3b7dd8", "#e07b28", "#2e9e5b", "#c9404f",
                                          "#8a63d2", "#8f6f4f", "#d264a8", "#7a8a99"};
static const char *const part_colors[PARTS] = {"#b8a9e8", "#6fa8e6", "#eda55d",
                                               "#93c47d", "#df5656", "#b5b5b5"};

static int write_page(const char *path, const run *runs, int count)
{
    FILE *out = fopen(path, "wb");
    if (!out) return fprintf(stderr, "%s cannot be written: %s\n", path, strerror(errno)), 2;
    fprintf(out, "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">"
                 "<meta name=\"viewport\" content=\"width=device-width\"><title>dtrain: ");
    text(out, runs[0].label);
    fprintf(out, "%s</title>\n<style>%s", count > 1 ? " and others" : "", style);
    for (int i = 0; i < 8; i++)
        fprintf(out, ".curve.c%d{stroke:%s}.dot.c%d,.k%d{fill:%s;background:%s}", i, run_colors[i],
                i, i, run_colors[i], run_colors[i]);
    for (int i = 0; i < PARTS; i++)
        fprintf(out, ".p%d{fill:%s;background:%s}", i, part_colors[i], part_colors[i]);
    fprintf(out, "</style></head>\n<body><h1>%s</h1>\n", count > 1 ? "Runs" : "Run");
    table(out, runs, count);
    draw_curves(out, runs, count, LOSS, VAL_LOSS, "Loss; dots: validation", false);
    draw_curves(out, runs, count, RATE, -1, "Tokens per second", true);
    draw_curves(out, runs, count, MEMORY_PEAK, MEMORY,
                "Memory of the fullest rank, bytes: peak; dots: now", true);
    draw_scaling(out, runs, count);
    fprintf(out, "<p class=\"legend\">Parts of a step: ");
    for (int i = 0; i < PARTS; i++)
        fprintf(out, "<span class=\"key p%d\"></span>%s ", i, part_names[i]);
    fprintf(out, "</p>\n");
    for (int i = 0; i < count; i++) draw_parts(out, &runs[i]);
    fprintf(out, "</body></html>\n");
    if (fclose(out) != 0) return fprintf(stderr, "%s: %s\n", path, strerror(errno)), 2;
    printf("%d run%s in %s\n", count, count > 1 ? "s" : "", path);
    return 0;
}

/* Take an argument apart: RANKS@NAME=FILE. */
static void take_argument(run *r, const char *argument)
{
    static char names[REPORT_RUNS][128];
    static int used;
    char *end;
    const double ranks = strtod(argument, &end);
    memset(r, 0, sizeof *r);
    r->ranks = NAN;
    if (end > argument && *end == '@') {
        r->ranks = ranks;
        argument = end + 1;
    }
    const char *equals = strchr(argument, '='), *slash = strrchr(argument, '/');
    char *name = names[used++ % REPORT_RUNS];
    r->path = equals ? equals + 1 : argument;
    if (equals) snprintf(name, sizeof names[0], "%.*s", (int)(equals - argument), argument);
    else snprintf(name, sizeof names[0], "%s", slash ? slash + 1 : argument);
    r->label = name;
}

int main(int argc, char **argv)
{
    take_descriptors();
    static run runs[REPORT_RUNS];
    const int count = argc - 2;
    if (count < 1 || count > REPORT_RUNS)
        return fprintf(stderr, "report OUT.html LOG...   (up to %d; RANKS@NAME=LOG)\n",
                       REPORT_RUNS),
               1;
    for (int i = 0; i < count; i++) {
        take_argument(&runs[i], argv[2 + i]);
        const int failed = read_run(&runs[i]);
        if (failed) return failed;
        if (!runs[i].count) return fprintf(stderr, "%s has no steps\n", runs[i].path), 2;
    }
    return write_page(argv[1], runs, count);
}
