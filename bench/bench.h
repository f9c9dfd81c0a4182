/* bench.h: what the benchmarks share: medians, results, options, lists of numbers, running other programs.
 * Include it first of all, or behind the implementation of dtrain.h.
 *
 * A result is a list of named figures that ends with whether it is correct. It is printed as a row of a
 * table; --log FILE also appends it to a file as a JSON object with the same names, one a line; --json
 * prints that object instead of the row. Figures without a column are in the JSON object only. */
#ifndef DTRAIN_BENCH_H
#define DTRAIN_BENCH_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "dtrain.h"
#include "tools/flags.h"

/* A function for one instruction set, with multiply-adds fused; gcc does not fuse them in -std=c99. */
#if defined(__clang__)
#define BENCH_TARGET(t) __attribute__((target(t)))
#define BENCH_BASELINE
#else
#define BENCH_TARGET(t) __attribute__((target(t), optimize("O3", "fp-contract=fast")))
#define BENCH_BASELINE __attribute__((optimize("O3", "fp-contract=fast")))
#endif

/* ---- figures of repeated runs ---- */

enum { BENCH_MOST = 1024 }; /* repetitions of one figure */

typedef struct spread {
    double median, min, max;
} spread;

static inline int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Return the spread of at most BENCH_MOST values, which stay in their order; NaN when there are none. */
static inline spread spread_of(const double *values, int count)
{
    double sorted[BENCH_MOST];
    spread result = {NAN, NAN, NAN};
    if (count <= 0) return result;
    memcpy(sorted, values, (size_t)count * sizeof *sorted);
    qsort(sorted, (size_t)count, sizeof *sorted, by_size);
    result.median = 0.5 * (sorted[(count - 1) / 2] + sorted[count / 2]);
    result.min = sorted[0];
    result.max = sorted[count - 1];
    return result;
}

static inline double median(const double *values, int count)
{
    return spread_of(values, count).median;
}

/* Return the spread of scale * a[i] / b[i]: ratios are taken within a round, so that the machine's drift cancels.
 * Rounds that lack one of the two are left out. */
static inline spread ratios_of(const double *a, const double *b, int count, double scale)
{
    double ratios[BENCH_MOST];
    int used = 0;
    for (int i = 0; i < count; i++)
        if (a[i] > 0 && b[i] > 0) ratios[used++] = scale * a[i] / b[i];
    return spread_of(ratios, used);
}

/* ---- results ---- */

typedef struct bench_text {
    char text[4096];
    size_t used;
} bench_text;

static struct {
    const char *log;  /* --log */
    long json, quick; /* --json, --quick */
    FILE *file;       /* of --log, or NULL */
    bench_text object, names, cells;
    char heading[4096]; /* printed last */
    int results, wrong;
} bench;

__attribute__((format(printf, 2, 3))) static inline void bench_append(bench_text *to,
                                                                      const char *format, ...)
{
    va_list args;
    va_start(args, format);
    const int wanted = vsnprintf(to->text + to->used, sizeof to->text - to->used, format, args);
    va_end(args);
    to->used += wanted > 0 ? (size_t)wanted : 0;
    if (to->used < sizeof to->text) return;
    fprintf(stderr, "bench: a result is too long\n");
    exit(1);
}

/* Print a line above the next row, which gets a heading. */
__attribute__((format(printf, 1, 2))) static inline void bench_title(const char *format, ...)
{
    va_list args;
    if (bench.json) return;
    va_start(args, format);
    putchar('\n');
    vprintf(format, args);
    putchar('\n');
    va_end(args);
    bench.heading[0] = 0;
}

static inline void bench_begin(const char *name)
{
    bench.object.used = bench.names.used = bench.cells.used = 0;
    bench.names.text[0] = bench.cells.text[0] = 0;
    bench_append(&bench.object, "{\"bench\": \"%s\"", name);
}

/* Add a column as wide as `width` or its name, whichever is wider; negative: aligned left; 0: no column. */
static inline void bench_column(const char *name, int width, const char *cell)
{
    int room = abs(width) > (int)strlen(name) ? abs(width) : (int)strlen(name);
    if (width == 0) return;
    if (width < 0) room = -room;
    bench_append(&bench.names, "%*s  ", room, name);
    bench_append(&bench.cells, "%*s  ", room, cell);
}

static inline void bench_string(const char *name, int width, const char *value)
{
    bench_append(&bench.object, ", \"%s\": \"%s\"", name, value);
    bench_column(name, width, value);
}

/* Add one figure. NaN means "not measured": null in the JSON object, "-" in the table. */
static inline void bench_number(const char *name, int width, int decimals, double value)
{
    char cell[64] = "-";
    if (isfinite(value)) {
        snprintf(cell, sizeof cell, "%.*f", decimals, value);
        bench_append(&bench.object, ", \"%s\": %.*g", name, value == floor(value) ? 17 : 9, value);
    } else bench_append(&bench.object, ", \"%s\": null", name);
    bench_column(name, width, cell);
}

/* Add three figures: NAME, NAME_min and NAME_max; the table shows "(min to max)". */
static inline void bench_spread(const char *name, int width, int decimals, spread s)
{
    char cell[64] = "", least[64], most[64];
    bench_number(name, width, decimals, s.median);
    snprintf(least, sizeof least, "%s_min", name);
    snprintf(most, sizeof most, "%s_max", name);
    bench_number(least, 0, 0, s.min);
    bench_number(most, 0, 0, s.max);
    if (isfinite(s.median))
        snprintf(cell, sizeof cell, "(%.*f to %.*f)", decimals, s.min, decimals, s.max);
    bench_column("(min to max)", width ? -(2 * width + 4) : 0, cell);
}

/* Print a line of the table without the blanks at its end. */
static inline void bench_line(const bench_text *line)
{
    size_t length = strlen(line->text);
    while (length > 0 && line->text[length - 1] == ' ') length--;
    printf("%.*s\n", (int)length, line->text);
}

/* End a result and print it. correct: 1, 0, or -1 where nothing was compared; bench.wrong counts the 0s. */
static inline void bench_end(int correct)
{
    static const char *const values[] = {"null", "false", "true"}, *const cells[] = {"-", "NO",
                                                                                     "yes"};
    bench_append(&bench.object, ", \"correct\": %s}\n", values[correct + 1]);
    bench_column("correct", -7, cells[correct + 1]);
    bench.results++;
    bench.wrong += correct == 0;
    if (bench.file) {
        fputs(bench.object.text, bench.file);
        fflush(bench.file);
    }
    if (bench.json) {
        fputs(bench.object.text, stdout);
        return;
    }
    if (strcmp(bench.heading, bench.names.text) != 0) bench_line(&bench.names);
    memcpy(bench.heading, bench.names.text, sizeof bench.heading);
    bench_line(&bench.cells);
}

/* ---- options ---- */

/* The last lines of every program's table of flags. */
#define BENCH_FLAGS                                                                               \
    {"--quick", 'b', &bench.quick, 0, 0, "seconds instead of minutes: a test, no figures", NULL}, \
        {"--log", 's', &bench.log, 0, 0, "append one JSON object a result to this file", NULL},   \
    {                                                                                             \
        "--json", 'b', &bench.json, 0, 0, "print JSON objects instead of tables", NULL            \
    }

/* Return whether --quick is given: it changes defaults, so it is asked before the options are parsed. */
static inline bool is_quick(int argc, char **argv)
{
    while (argc-- > 1)
        if (strcmp(argv[argc], "--quick") == 0) return true;
    return false;
}

/* Parse the options; --help and what it does not list end the program here. */
static inline void bench_start(const char *program, const char *purpose, const flag *table,
                               int count, int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "--help") == 0) {
        printf("%s: %s; the top of its source explains the columns\n", program, purpose);
        flags_help(table, count);
        exit(0);
    }
    if (flags_parse(program, table, count, argc - 1, argv + 1)) exit(2);
    setvbuf(stdout, NULL, _IOLBF, 0);
    bench.file = bench.log ? fopen(bench.log, "a") : NULL;
    if (bench.log && !bench.file) {
        fprintf(stderr, "%s: --log: %s cannot be written: %s\n", program, bench.log,
                strerror(errno));
        exit(2);
    }
}

/* Return whether the list of a flag names this number, or this place in its words. */
static inline bool listed(const flag_list *list, long item)
{
    for (long i = 0; i < list->count; i++)
        if (list->items[i] == item) return true;
    return false;
}

/* Parse numbers that need not be whole, or sizes: "0.1,25", "64K,1M", or "1K..256M:4", a range with a factor. */
typedef struct number_list {
    int count;
    double items[FLAGS_LIST];
} number_list;

static inline double bench_size(const char *text, char **end)
{
    double value = strtod(text, end);
    const char *units = "KMG", *unit = **end ? strchr(units, **end) : NULL;
    if (*end == text || !unit) return value;
    (*end)++;
    return ldexp(value, 10 * (int)(unit - units + 1));
}

static inline void bench_numbers(const char *program, const char *name, const char *text,
                                 double low, double high, number_list *list)
{
    const char *at = text;
    for (list->count = 0; *at;) {
        char *end;
        double size = bench_size(at, &end), last = size, factor = 2;
        bool good = end != at;
        if (good && strncmp(end, "..", 2) == 0) last = bench_size(end + 2, &end);
        if (good && *end == ':') factor = strtod(end + 1, &end);
        good = good && size >= low && last <= high && factor > 1 && (!*end || *end == ',');
        for (; good && size <= last; size *= factor) {
            good = list->count < FLAGS_LIST;
            if (good) list->items[list->count++] = size;
        }
        if (!good) list->count = 0;
        if (!good) break;
        at = *end ? end + 1 : end;
    }
    if (list->count > 0) return;
    fprintf(stderr, "%s: %s is \"%s\"; it takes at most %d numbers from %g to %g, with commas\n",
            program, name, text, FLAGS_LIST, low, high);
    exit(2);
}

/* ---- other programs, other processes ---- */

/* Return the number after `key` in text, or fallback. */
static inline double number_after(const char *text, const char *key, double fallback)
{
    const char *at = text ? strstr(text, key) : NULL;
    return at ? strtod(at + strlen(key), NULL) : fallback;
}

/* Run a command and keep what it printed; 0 when it ended well. */
static inline int capture(const char *command, char *text, size_t room)
{
    size_t used = 0, got;
    FILE *pipe = popen(command, "r");
    if (!pipe) return 1;
    while (used + 1 < room && (got = fread(text + used, 1, room - 1 - used, pipe)) > 0) used += got;
    text[used] = 0;
    return pclose(pipe) != 0;
}

/* Return zeroed memory; end the program when there is none. */
static inline void *bench_alloc(size_t bytes)
{
    void *memory = calloc(bytes ? bytes : 1, 1);
    if (memory) return memory;
    fprintf(stderr, "bench: no memory for %zu bytes\n", bytes);
    exit(1);
}

/* Return zeroed memory that processes forked later share; end the program when there is none. */
static inline void *share(size_t bytes)
{
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory != MAP_FAILED) return memory;
    fprintf(stderr, "bench: no %zu bytes of shared memory\n", bytes);
    exit(1);
}

/* The name of the CPU's kernels, or of those for products of bf16. */
static inline const char *bench_kernels(bool bf16)
{
    static dtrain_device_info info;
    dtrain_device *device;
    if (!info.kernels[0] && dtrain_device_create(NULL, NULL, &device) == DTRAIN_OK) {
        dtrain_device_query(device, &info);
        dtrain_device_destroy(device);
    }
    return bf16 ? info.bf16_kernels : info.kernels;
}
#endif
