/* page.h: the page as it is written: what ran and how it ended as tables, and for the script in script.h the numbers of
 * all curves as JSON. */
#ifndef REPORT_PAGE_H
#define REPORT_PAGE_H

#include "tools/report/log.h"
#include "tools/report/script.h"

enum { POINTS = 600 }; /* of a curve: longer runs are drawn as means of neighbouring steps */

/* ---- Texts ------------------------------------------------------------------------------------ */

static void html(FILE *out, const char *words)
{
    for (; *words; words++) switch (*words) {
        case '<': fputs("&lt;", out); break;
        case '>': fputs("&gt;", out); break;
        case '&': fputs("&amp;", out); break;
        case '"': fputs("&quot;", out); break;
        default: fputc(*words, out);
        }
}

/* Write a JSON string that may stand inside of a script element. */
static void json_string(FILE *out, const char *words)
{
    fputc('"', out);
    for (; *words; words++) {
        const unsigned char c = (unsigned char)*words;
        if (c < 0x20 || strchr("\"\\<>&", c)) fprintf(out, "\\u%04x", c);
        else fputc(c, out);
    }
    fputc('"', out);
}

/* Write a count in millions or billions, or whole below a hundred thousand. */
static void count_text(char *text, size_t room, double value)
{
    if (value >= 1e9) snprintf(text, room, "%.2f G", value / 1e9);
    else if (value >= 1e5) snprintf(text, room, "%.2f M", value / 1e6);
    else snprintf(text, room, "%.0f", value);
}

/* Find the value of a flag in a run's configuration, or behind "# commit "; false: it has none. */
static bool config_value_of(const run *r, const char *key, char *value, size_t room)
{
    const size_t length = strlen(key);
    for (const char *at = r->texts[CONFIG]; at && *at; at += strcspn(at, "\n"), at += *at == '\n') {
        const char *line = strncmp(at, "# ", 2) == 0 ? at + 2 : at;
        if (strncmp(line, key, length) != 0 || line[length] != ' ') continue;
        line += length + (strncmp(line + length, " = ", 3) == 0 ? 3 : 1);
        snprintf(value, room, "%.*s", (int)strcspn(line, "\n"), line);
        return true;
    }
    return false;
}

/* ---- Tables ----------------------------------------------------------------------------------- */

static void cell(FILE *out, const char *words)
{
    fprintf(out, "<td>");
    html(out, words);
    fprintf(out, "</td>");
}

/* Begin a table that has a column for each run, under their names where there are several. */
static void table_begin(FILE *out, const char *title, const run *runs, int count)
{
    fprintf(out, "<div class=\"card\"><h2>%s</h2><table>", title);
    if (count > 1) fprintf(out, "<thead><tr><th></th>");
    for (int i = 0; count > 1 && i < count; i++) {
        fprintf(out, "<th><span class=\"key c%d\"></span>", i % 8);
        html(out, runs[i].label);
        fprintf(out, "</th>");
    }
    fprintf(out, "%s<tbody>\n", count > 1 ? "</tr></thead>" : "");
}

enum { STARTED, RANKS_OF, PARAMETERS_OF, RESUMED, ENDED };

/* Write what a run is in one respect; "" where its log does not say. */
static void fact(const run *r, int which, char *text, size_t room)
{
    const double *s = r->start;
    *text = 0;
    if (which == STARTED && s[WALL_TIME] > 0) {
        const time_t at = (time_t)s[WALL_TIME];
        struct tm utc;
        if (gmtime_r(&at, &utc)) strftime(text, room, "%Y-%m-%d %H:%M:%S UTC", &utc);
    }
    if (which == RANKS_OF && isfinite(r->ranks)) {
        snprintf(text, room, "%.0f", r->ranks);
        if (s[NODES] > 1) snprintf(text, room, "%.0f on %.0f nodes", r->ranks, s[NODES]);
        if (s[THREADS] > 0)
            snprintf(text + strlen(text), room - strlen(text), ", %.0f thread%s each", s[THREADS],
                     s[THREADS] > 1 ? "s" : "");
        if (s[SHARD_RANKS] > 0)
            snprintf(text + strlen(text), room - strlen(text), "; %.0f shard%s x %.0f replica%s",
                     s[SHARD_RANKS], s[SHARD_RANKS] > 1 ? "s" : "", s[REPLICAS],
                     s[REPLICAS] > 1 ? "s" : "");
    }
    if (which == PARAMETERS_OF && s[PARAMETERS] > 0) count_text(text, room, s[PARAMETERS]);
    if (which == RESUMED && r->starts > 1)
        snprintf(text, room, "%d times; this is of the last", r->starts);
    if (which == ENDED && !r->ended) snprintf(text, room, "no: it goes on, or was stopped");
}

static void fact_row(FILE *out, const run *runs, int count, const char *name, int which, int words)
{
    char text[256];
    bool any = false;
    for (int i = 0; i < count; i++) {
        fact(&runs[i], which, text, sizeof text);
        any |= words >= 0 ? runs[i].texts[words] && *runs[i].texts[words] : *text != 0;
    }
    if (!any) return;
    fprintf(out, "<tr><th>%s</th>", name);
    for (int i = 0; i < count; i++) {
        const char *own = words >= 0 ? runs[i].texts[words] : NULL;
        fact(&runs[i], which, text, sizeof text);
        cell(out, words < 0 ? (*text ? text : "-") : own && *own ? own : "-");
    }
    fprintf(out, "</tr>\n");
}

/* Write a row of the values of a flag, if the runs differ in it or `always`. */
static void flag_row(FILE *out, const run *runs, int count, const char *key, bool always)
{
    char value[256], first[256];
    bool differ = false, known = false;
    for (int i = 0; i < count; i++) {
        if (config_value_of(&runs[i], key, value, sizeof value)) known = true;
        else snprintf(value, sizeof value, "-");
        if (i == 0) memcpy(first, value, sizeof first);
        differ |= strcmp(first, value) != 0;
    }
    if (!known || !(differ || always)) return;
    fprintf(out, "<tr><th>");
    html(out, key);
    fprintf(out, "</th>");
    for (int i = 0; i < count; i++) {
        if (!config_value_of(&runs[i], key, value, sizeof value))
            snprintf(value, sizeof value, "-");
        cell(out, value);
    }
    fprintf(out, "</tr>\n");
}

/* Write what ran: the first lines of the logs, and of the flags those in which the runs differ. */
static void table_of_starts(FILE *out, const run *runs, int count)
{
    static const char *const shown[] = {"data", "batch", "precision", "optimizer", "lr"};
    static const char *const known[] = {"commit",  "model",      "ranks",      "strategy",
                                        "threads", "log",        "checkpoint", "resume",
                                        "trace",   "prometheus", "tensorboard"};
    const size_t shown_count = sizeof shown / sizeof *shown;
    table_begin(out, "What ran", runs, count);
    fact_row(out, runs, count, "program", -1, RUN);
    flag_row(out, runs, count, "model", true);
    fact_row(out, runs, count, "parameters", PARAMETERS_OF, -1);
    for (size_t k = 0; k < shown_count; k++) flag_row(out, runs, count, shown[k], true);
    fact_row(out, runs, count, "strategy", -1, STRATEGY);
    fact_row(out, runs, count, "ranks", RANKS_OF, -1);
    fact_row(out, runs, count, "device", -1, DEVICE);
    fact_row(out, runs, count, "host", -1, HOST);
    fact_row(out, runs, count, "started", STARTED, -1);
    fact_row(out, runs, count, "started again", RESUMED, -1);
    fact_row(out, runs, count, "ended", ENDED, -1);
    fact_row(out, runs, count, "dtrain", -1, VERSION);
    flag_row(out, runs, count, "commit", true);
    const char *at = runs[0].texts[CONFIG];
    for (; count > 1 && at && *at; at += strcspn(at, "\n"), at += *at == '\n') {
        char key[64];
        bool other = strncmp(at, "# ", 2) != 0;
        snprintf(key, sizeof key, "%.*s", (int)strcspn(at, " \n"), at);
        for (size_t k = 0; k < sizeof known / sizeof *known; k++)
            other = other && strcmp(key, known[k]) != 0;
        for (size_t k = 0; k < shown_count; k++) other = other && strcmp(key, shown[k]) != 0;
        if (other) flag_row(out, runs, count, key, false);
    }
    fprintf(out, "</tbody></table></div>\n");
}

/* Say what a model learns from, which logs do not: a model with a length of sequences has tokens. */
static const char *things_of(const run *runs, int count)
{
    char value[64];
    for (int i = 0; i < count; i++)
        if (!config_value_of(&runs[i], "seq", value, sizeof value)) return "tokens or samples";
    return "tokens";
}

/* Write a time of a step, and its share of the whole step. */
static void time_text(const run *r, int key, char *text, size_t room)
{
    const double ms = mean_of(r, key), step = mean_of(r, STEP_MS);
    if (!isfinite(ms)) return;
    snprintf(text, room, "%.2f ms", ms);
    if (key != STEP_MS && key != COMM_MS && step > 0)
        snprintf(text + strlen(text), room - strlen(text), ", %.1f %% of a step", 100 * ms / step);
}

enum { COUNT, LAST_LINE, TIME, SPEED, MOST, REST };

/* Write how the runs ended: losses and counts by the last lines of the logs, times and memory by all steps in them.
 * Times are means, whose shares add up: waits are rare and long, and a median would not have them. */
static void table_of_ends(FILE *out, const run *runs, int count)
{
    const struct {
        const char *name, *format;
        int key, how;
        double scale;
    } rows[] = {{"steps", "%.0f", STEPS, LAST_LINE, 1},
                {things_of(runs, count), "", TOKENS, COUNT, 1},
                {"time", "%.1f s", SECONDS, LAST_LINE, 1},
                {"first loss", "%.4f", FIRST_LOSS, LAST_LINE, 1},
                {"last loss", "%.4f", LAST_LOSS, LAST_LINE, 1},
                {"validation loss", "%.4f", VAL_LOSS, LAST_LINE, 1},
                {"validation accuracy", "%.1f %%", VAL_ACCURACY, LAST_LINE, 100},
                {"throughput, mean of steps", "%.0f / s", RATE, SPEED, 1},
                {"time of a step, mean", "", STEP_MS, TIME, 1},
                {"communication in flight, mean", "", COMM_MS, TIME, 1},
                {"communication exposed, mean", "", EXPOSED_MS, TIME, 1},
                {"wait for data, mean", "", DATA_MS, TIME, 1},
                {"scaling, at most", "%.1f %%", EXPOSED_MS, REST, 100},
                {"library memory at its peak", "%.1f MiB", MEMORY_PEAK, MOST, 1 / 1048576.0}};
    table_begin(out, "How it ended", runs, count);
    for (size_t k = 0; k < sizeof rows / sizeof *rows; k++) {
        fprintf(out, "<tr><th>%s</th>", rows[k].name);
        for (int i = 0; i < count; i++) {
            const run *r = &runs[i];
            const int key = rows[k].key;
            double value = r->summary[key];
            char words[64] = "-";
            if (isnan(value) && key == STEPS) value = (double)r->count;
            if (isnan(value) && key == FIRST_LOSS) value = end_of(r, LOSS, false);
            if (isnan(value) && key == LAST_LOSS) value = end_of(r, LOSS, true);
            if (isnan(value) && rows[k].how == LAST_LINE) value = end_of(r, key, true);
            if (rows[k].how == SPEED) value = rate_of(r);
            if (rows[k].how == MOST) value = most_of(r, key);
            if (rows[k].how == REST) value = 1 - mean_of(r, key) / mean_of(r, STEP_MS);
            if (rows[k].how == TIME) time_text(r, key, words, sizeof words);
            else if (isfinite(value) && rows[k].how == COUNT)
                count_text(words, sizeof words, value);
            else if (isfinite(value))
                snprintf(words, sizeof words, rows[k].format, rows[k].scale * value);
            cell(out, words);
        }
        fprintf(out, "</tr>\n");
    }
    fprintf(out, "</tbody></table></div>\n");
}

/* ---- Curves ----------------------------------------------------------------------------------- */

static size_t points_of(const run *r) { return r->count < POINTS ? r->count : POINTS; }

/* Return the mean of a key in point p of the curves of a run. */
static double point_of(const run *r, int key, size_t p, size_t points)
{
    const size_t first = p * r->count / points, end = (p + 1) * r->count / points;
    double sum = 0;
    size_t used = 0;
    for (size_t i = first; i < end; i++)
        if (isfinite(r->rows[i][key])) sum += r->rows[i][key], used++;
    return used ? sum / (double)used : NAN;
}

static void number(FILE *out, double value, bool first)
{
    fprintf(out, first ? "" : ",");
    if (isfinite(value)) fprintf(out, "%.9g", value);
    else fprintf(out, "null");
}

/* What a step's time was spent with; what no key explains is "other". */
static const int part_keys[] = {DATA_MS, FORWARD_MS, BACKWARD_MS, OPTIMIZER_MS, EXPOSED_MS};
static const char *const part_names[] = {
    "data", "forward", "backward", "optimizer", "exposed communication", "other"};
enum { PARTS = 6 };

/* Write the parts of a run's steps, where its log has a time of the forward pass. */
static void data_of_parts(FILE *out, const run *r, size_t points)
{
    if (isnan(mean_of(r, FORWARD_MS)) || isnan(mean_of(r, STEP_MS))) return;
    fprintf(out, ",\"parts\":[");
    for (int part = 0; part < PARTS; part++) {
        fprintf(out, part ? ",[" : "[");
        for (size_t p = 0; p < points; p++) {
            double rest = point_of(r, STEP_MS, p, points), own = 0;
            for (int k = 0; k < PARTS - 1; k++) {
                const double ms = fmax(0, point_of(r, part_keys[k], p, points)); /* 0 for NAN */
                if (k == part) own = ms;
                rest -= ms;
            }
            number(out, part < PARTS - 1 ? own : fmax(0, rest), p == 0);
        }
        fprintf(out, "]");
    }
    fprintf(out, "],\"total\":[");
    for (size_t p = 0; p < points; p++) {
        double parts = 0;
        for (int k = 0; k < PARTS - 1; k++) parts += fmax(0, point_of(r, part_keys[k], p, points));
        number(out, fmax(parts, point_of(r, STEP_MS, p, points)), p == 0);
    }
    fprintf(out, "]");
}

static void data_of_run(FILE *out, const run *r)
{
    static const int curves[] = {LOSS,      VAL_LOSS, VAL_ACCURACY, RATE,
                                 GRAD_NORM, LR,       MEMORY,       MEMORY_PEAK};
    const size_t points = points_of(r);
    const double began = r->starts == 1 ? r->start[WALL_TIME] : r->rows[0][WALL_TIME];
    fprintf(out, "{\"label\":");
    json_string(out, r->label);
    fprintf(out, ",\"each\":%zu,\"first\":", (r->count + points - 1) / points);
    number(out, r->rows[0][STEP], true);
    fprintf(out, ",\"ranks\":");
    number(out, r->ranks, true);
    fprintf(out, ",\"rate\":");
    number(out, rate_of(r), true);
    fprintf(out, ",\"x\":[");
    for (size_t p = 0; p < points; p++)
        number(out, r->rows[(p + 1) * r->count / points - 1][STEP], p == 0);
    if (isfinite(began)) fprintf(out, "],\"t\":[");
    for (size_t p = 0; p < points && isfinite(began); p++)
        number(out, r->rows[(p + 1) * r->count / points - 1][WALL_TIME] - began, p == 0);
    fprintf(out, "],\"values\":{");
    for (size_t k = 0, used = 0; k < sizeof curves / sizeof *curves; k++) {
        if (isnan(mean_of(r, curves[k]))) continue;
        fprintf(out, "%s\"%s\":[", used++ ? "," : "", key_names[curves[k]]);
        for (size_t p = 0; p < points; p++) number(out, point_of(r, curves[k], p, points), p == 0);
        fprintf(out, "]");
    }
    fprintf(out, "}");
    data_of_parts(out, r, points);
    fprintf(out, "}");
}

static void data_of_runs(FILE *out, const run *runs, int count)
{
    double least = INFINITY, most = 0;
    for (int i = 0; i < count; i++) {
        if (!isfinite(runs[i].ranks) || isnan(mean_of(&runs[i], RATE))) continue;
        least = fmin(least, runs[i].ranks);
        most = fmax(most, runs[i].ranks);
    }
    fprintf(out,
            "<script type=\"application/json\" id=\"data\">{\"scaling\":%s,"
            "\"things\":\"%s\",\"parts\":[",
            most > least ? "true" : "false", things_of(runs, count));
    for (int part = 0; part < PARTS; part++)
        fprintf(out, "%s\"%s\"", part ? "," : "", part_names[part]);
    fprintf(out, "],\"runs\":[");
    for (int i = 0; i < count; i++) {
        fprintf(out, i ? ",\n" : "\n");
        data_of_run(out, &runs[i]);
    }
    fprintf(out, "]}</script>\n");
}

/* ---- The page --------------------------------------------------------------------------------- */

/* Write the title: the program and its model, or the names of the runs. */
static void title(FILE *out, const run *runs, int count)
{
    char model[256] = "";
    if (count == 1 && runs[0].texts[RUN] && *runs[0].texts[RUN]) {
        html(out, runs[0].texts[RUN]);
        if (config_value_of(&runs[0], "model", model, sizeof model)) fprintf(out, ", ");
        html(out, model);
        fprintf(out, ": ");
    }
    for (int i = 0; i < count; i++) {
        fprintf(out, "%s", i ? i == count - 1 ? " and " : ", " : "");
        html(out, runs[i].label);
    }
}

/* Write the slider, what curves are drawn over, and a button for each of several runs. */
static void controls(FILE *out, const run *runs, int count)
{
    bool noisy = false;
    for (int i = 0; i < count; i++) noisy |= runs[i].count >= 100;
    fprintf(out,
            "<div class=\"controls\"><label>Smoothing <input id=\"smoothing\" type=\"range\" "
            "min=\"0\" max=\"0.99\" step=\"0.01\" value=\"%s\"><output id=\"weight\"></output>"
            "</label><label>Over <select id=\"over\"><option>steps</option><option>time</option>"
            "</select></label>",
            noisy ? "0.6" : "0");
    for (int i = 0; count > 1 && i < count; i++) {
        fprintf(out,
                "<button data-run=\"%d\" aria-pressed=\"true\"><span class=\"key c%d\"></span>", i,
                i % 8);
        html(out, runs[i].label);
        fprintf(out, "</button>");
    }
    fprintf(out, "</div>\n");
}

static void texts(FILE *out, const char *const *lines, size_t count)
{
    for (size_t i = 0; i < count; i++) fprintf(out, "%s\n", lines[i]);
}

static int write_page(const char *path, const run *runs, int count)
{
    FILE *out = fopen(path, "wb");
    if (!out) return say(stderr, "%s cannot be written: %s\n", path, strerror(errno)), 2;
    fprintf(out, "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">"
                 "<meta name=\"viewport\" content=\"width=device-width\">\n<title>");
    title(out, runs, count);
    fprintf(out, "</title>\n<style>");
    texts(out, page_style, sizeof page_style / sizeof *page_style);
    fprintf(out, "</style></head>\n<body><h1>");
    title(out, runs, count);
    fprintf(out, "</h1>\n<p class=\"about\">Point at a curve for its values.</p>\n");
    fprintf(out, "<div class=\"tables%s\">", count > 3 ? " wide" : "");
    table_of_starts(out, runs, count);
    table_of_ends(out, runs, count);
    fprintf(out, "</div>\n");
    controls(out, runs, count);
    fprintf(out,
            "<div class=\"charts\" id=\"charts\"></div>\n<noscript>A script in this page draws "
            "the curves: allow it to run.</noscript>\n");
    for (int i = 0; i < count; i++) {
        if (!runs[i].texts[CONFIG] || !*runs[i].texts[CONFIG]) continue;
        fprintf(out, "<details><summary>All flags of ");
        html(out, runs[i].label);
        fprintf(out, "</summary><pre>");
        html(out, runs[i].texts[CONFIG]);
        fprintf(out, "</pre></details>\n");
    }
    data_of_runs(out, runs, count);
    fprintf(out, "<script>");
    texts(out, page_script, sizeof page_script / sizeof *page_script);
    fprintf(out, "</script>\n</body></html>\n");
    if (fclose(out) != 0) return say(stderr, "%s: %s\n", path, strerror(errno)), 2;
    say(stdout, "%d run%s in %s\n", count, count > 1 ? "s" : "", path);
    return 0;
}

#endif /* REPORT_PAGE_H */
