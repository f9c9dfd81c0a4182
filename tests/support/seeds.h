/* seeds.h: the command line of a program of random tests: --seed, --count, --seconds. */
#ifndef SEEDS_H
#define SEEDS_H

#include "test.h"

typedef struct seeds {
    uint64_t first, count; /* count UINT64_MAX: until `end` */
    double end;            /* of test_seconds(); 0: none */
    bool one;              /* a single seed, in words */
} seeds;

/* Seeds from test_seed() on: `count` of them or, with DTRAIN_TEST_FULL=1, as many as fit into `seconds`, with 2 into
 * ten times that; or what the command line says. An option that is none ends the program. */
static inline seeds seeds_of(int argc, char **argv, uint64_t count, double seconds)
{
    seeds s = {test_seed(), count, 0, false};
    if (test_full())
        s.count = UINT64_MAX, s.end = test_seconds() + (test_full() > 1 ? 10 : 1) * seconds;
    for (int i = 1; i < argc; i += 2) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        char *rest = NULL;
        const double number = strtod(value, &rest);
        if (strcmp(argv[i], "--seed") == 0) {
            s.first = strtoull(value, &rest, 10), s.count = 1, s.end = 0, s.one = true;
        } else if (strcmp(argv[i], "--count") == 0) s.count = strtoull(value, &rest, 10), s.end = 0;
        else if (strcmp(argv[i], "--seconds") == 0)
            s.count = UINT64_MAX, s.end = test_seconds() + number;
        else rest = NULL;
        if (rest && rest != value && !*rest) continue;
        fprintf(stderr, "%s: \"%s %s\" is not --seed N, --count N or --seconds N\n", argv[0],
                argv[i], value);
        exit(2);
    }
    return s;
}

/* Run the seeds that failed once, then those of s, up to 20 failures; print and return how it went. */
static inline int seeds_run(const seeds *s, const uint64_t *failed_once, size_t known,
                            bool (*run_seed)(uint64_t seed, bool words))
{
    long passed = 0, failed = 0;
    for (size_t i = 0; i < known && !s->one; i++)
        *(run_seed(failed_once[i], false) ? &passed : &failed) += 1;
    printf("  seeds from %llu on\n", (unsigned long long)s->first);
    for (uint64_t i = 0; i < s->count && failed < 20 && (s->end == 0 || test_seconds() < s->end);
         i++)
        *(run_seed(s->first + i, s->one) ? &passed : &failed) += 1;
    printf("%ld passed, %ld failed\n", passed, failed);
    return failed != 0;
}

#endif
