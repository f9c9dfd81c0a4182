/* fit_dtrain.c: fit.c, whose workers fit one polynomial together: `diff fit.c fit_dtrain.c` is what
 * it takes. The program that opens it knows nothing of dtrain, which is inside the plugin, in a
 * copy that nobody else sees (-fvisibility=hidden).
 *
 *   build:   cc -O2 -fPIC -fvisibility=hidden -shared -I. examples/hosts/plugin/fit_dtrain.c -o fit_dtrain.so -lm -lpthread
 *   run:     ./host ./fit_dtrain.so                     (host.c has its own build line)
 *   expect:
 *     task 0, 2 workers: 1.0000 +0.9877 x +0.0000 x^2 -1.9722 x^3
 *     task 1, 3 workers: 2.0000 +0.9877 x +0.0000 x^2 -1.9722 x^3
 *     nothing of the plugin is left */
#define DTRAIN_CORE
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "plugin.h"

#include <stdio.h>
#include <string.h>

__attribute__((visibility("default"))) int fit(worker *me);

int fit(worker *me)
{
    float *w = me->polynomial, grad[COEFFICIENTS];
    const dtrain_join_desc desc = {
        .rank = me->rank, .size = me->size, .all_gather = me->all_gather, .user = me->user};
    dtrain_param param = {.name = "polynomial", .value = w, .grad = grad, .count = COEFFICIENTS};
    dtrain_world *world = NULL;
    dtrain_strategy *ddp = NULL;
    memset(me->polynomial, 0, sizeof me->polynomial);
    bool good =
        !dtrain_world_join(&desc, &world) && !dtrain_strategy_create(world, &param, 1, NULL, &ddp);
    for (int step = 0; step < 2000 && good; step++) {
        memset(grad, 0, sizeof grad);
        for (int i = 0; i < me->count; i++) {
            float power[COEFFICIENTS] = {1}, error = w[0] - me->y[i];
            for (int k = 1; k < COEFFICIENTS; k++) {
                power[k] = power[k - 1] * me->x[i];
                error += w[k] * power[k];
            }
            for (int k = 0; k < COEFFICIENTS; k++)
                grad[k] += 2 * error * power[k] / (float)me->count;
        }
        /* grad becomes the mean over all workers, who have as many points */
        good = !dtrain_strategy_ready(ddp, 0) && !dtrain_strategy_finish(ddp);
        for (int k = 0; k < COEFFICIENTS; k++) w[k] -= 0.2f * grad[k];
    }
    if (!good) snprintf(me->sentence, sizeof me->sentence, "%s", dtrain_last_error());
    dtrain_strategy_destroy(ddp);
    return dtrain_world_leave(world) != DTRAIN_OK || !good;
}
