/* plugin.h: what a program and its plugins agree on. Neither of the two has to do with dtrain. */
#ifndef PLUGIN_H
#define PLUGIN_H

#include <stddef.h>

enum { COEFFICIENTS = 4 };

/* One of the workers that a program has for a task: threads, each in another process. */
typedef struct worker {
    int rank, size;
    /* Bring the bytes of all workers together, in the order of ranks; returns 0, or another value for an error. */
    int (*all_gather)(void *user, const void *mine, void *all, size_t bytes);
    void *user;
    int count; /* of this worker's points */
    const float *x, *y;
    float polynomial[COEFFICIENTS]; /* a plugin's result */
    char sentence[512];             /* an error of the plugin */
} worker;

/* A plugin exports `fit`: make the polynomial that is nearest to the points. Returns 0, or 1 and a
 * sentence. */
typedef int (*fit_fn)(worker *me);

#endif
