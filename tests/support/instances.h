/* instances.h: the CPU kernels of every instruction set, from inside: the library's own, and those that only tests run,
 * which tests/support/instances.c compiles: vectors of four, vectors as wide as AVX-512's, and AMX on emulated tiles.
 * Include it before dtrain.h. */
#ifndef INSTANCES_H
#define INSTANCES_H

#include "device/cpu/kernels_internal.h"

enum { INSTANCES = 5 }; /* at most */

/* Write the instances that this machine runs, the one that the library chooses first, and return their number. The
 * thread sanitizer needs that one alone. */
int instances_find(const dtrain__kernels *found[INSTANCES]);
/* Return products of bf16 on emulated tiles; NULL where the compiler knows no tiles. */
const dtrain__isa *instances_emulated_tiles(void);
/* What kernels compute of one number, in scalars. */
float instances_exp(float x);
float instances_gelu(float x);
float instances_gelu_slope(float x);

#endif
