/* bench.h: what the benchmarks share: the figures of repeated runs, and running another program. Include it
 * behind dtrain.h. */
#ifndef DTRAIN_BENCH_H
#define DTRAIN_BENCH_H

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

#endif
