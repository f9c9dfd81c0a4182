/* bench.h: what the benchmarks share: the figures of repeated runs, and running another program. Include it
 * first of all, or behind the implementation of dtrain.h. */
#ifndef DTRAIN_BENCH_H
#define DTRAIN_BENCH_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif
#include <errno.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* A function for one instruction set, with multiply-adds fused; gcc does not fuse them in -std=c99. */
#if defined(__clang__)
#define BENCH_TARGET(t) __attribute__((target(t)))
#define BENCH_BASELINE
#else
#define BENCH_TARGET(t) __attribute__((target(t), optimize("O3", "fp-contract=fast")))
#define BENCH_BASELINE __attribute__((optimize("O3", "fp-contract=fast")))
#endif

typedef struct spread {
    double median, min, max;
} spread;

static inline int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Of count values, which stay in their order. Zeros when there are none. */
static inline spread spread_of(const double *values, int count)
{
    spread result = {0, 0, 0};
    double *sorted = count > 0 ? (double *)malloc((size_t)count * sizeof *sorted) : NULL;
    if (!sorted) return result;
    memcpy(sorted, values, (size_t)count * sizeof *sorted);
    qsort(sorted, (size_t)count, sizeof *sorted, by_size);
    result.median = 0.5 * (sorted[(count - 1) / 2] + sorted[count / 2]);
    result.min = sorted[0];
    result.max = sorted[count - 1];
    free(sorted);
    return result;
}

static inline double median(const double *values, int count)
{
    return spread_of(values, count).median;
}

/* The number after `key` in text, or fallback. */
static inline double number_after(const char *text, const char *key, double fallback)
{
    const char *at = text ? strstr(text, key) : NULL;
    return at ? strtod(at + strlen(key), NULL) : fallback;
}

/* Runs a command and keeps what it printed; 0 when it ended well. */
static inline int capture(const char *command, char *text, size_t room)
{
    size_t used = 0, got;
    FILE *pipe = popen(command, "r");
    if (!pipe) return 1;
    while (used + 1 < room && (got = fread(text + used, 1, room - 1 - used, pipe)) > 0) used += got;
    text[used] = 0;
    return pclose(pipe) != 0;
}

enum { BENCH_STEPS = 1024 };

/* What a run of build/train_gpt wrote to its --log: medians over the steps but the first two. */
typedef struct bench_log {
    double losses[BENCH_STEPS], rate, step_ms, exposed_ms, sent_mib; /* rate: tokens/s */
    int steps, tokens; /* tokens: of a step, all ranks */
} bench_log;

/* Closes the file; 0 when there was something to measure. */
static inline int read_log(FILE *file, bench_log *run)
{
    static double rate[BENCH_STEPS], step[BENCH_STEPS], exposed[BENCH_STEPS];
    char line[2048];
    int count = 0;
    memset(run, 0, sizeof *run);
    if (!file) return 1;
    while (fgets(line, sizeof line, file) && !strstr(line, "\"final\"") &&
           run->steps < BENCH_STEPS) {
        run->losses[run->steps++] = number_after(line, "\"loss\": ", NAN);
        if (run->steps == 1) run->tokens = (int)number_after(line, "\"tokens\": ", 0);
        if (run->steps <= 2) continue;
        rate[count] = number_after(line, "\"tokens_per_second\": ", 0);
        step[count] = number_after(line, "\"step_ms\": ", 0);
        run->sent_mib = number_after(line, "\"comm_bytes\": ", 0) / 1048576;
        exposed[count++] = number_after(line, "\"exposed_comm_ms\": ", 0);
    }
    fclose(file);
    run->rate = median(rate, count);
    run->step_ms = median(step, count);
    run->exposed_ms = median(exposed, count);
    return count == 0;
}

/* The loss of the second half of a run beside that of the first: two steps alone differ by their batches. */
static inline bool learned(const bench_log *run)
{
    double change = 0;
    for (int i = 0; i < run->steps / 2; i++)
        change += run->losses[run->steps - 1 - i] - run->losses[i];
    return change < 0;
}

/* An option with a value, of one of three sorts; --json, which has none, is everybody's. */
typedef struct bench_option {
    const char *name;
    int *number;
    double *real;
    const char **text;
    const char *help;
} bench_option;

/* --help: what the program does, and its options. */
static inline int bench_usage(const char *what, const bench_option *table, size_t count)
{
    printf("%s\n", what);
    for (size_t i = 0; i < count; i++) printf("  %-15s %s\n", table[i].name, table[i].help);
    printf("  %-15s prints JSON, one object a line, instead of tables\n", "--json");
    return 0;
}

/* 0, or 2 after a sentence to stderr. */
static inline int bench_parse(const char *program, const bench_option *table, size_t count,
                              int *json, int argc, char **argv)
{
    for (int a = 1; a < argc; a++) {
        size_t i = 0;
        if (strcmp(argv[a], "--json") == 0) {
            *json = 1;
            continue;
        }
        while (i < count && strcmp(argv[a], table[i].name) != 0) i++;
        if (i == count || a + 1 == argc) {
            fprintf(stderr, "%s: \"%s\" is no option or lacks its value; --help lists them\n",
                    program, argv[a]);
            return 2;
        }
        if (table[i].text) *table[i].text = argv[++a];
        else if (table[i].real) *table[i].real = atof(argv[++a]);
        else *table[i].number = atoi(argv[++a]);
    }
    return 0;
}

#endif
