/* fit.c: a plugin of host.c that fits a polynomial to each worker's points by gradient descent.
 * fit_dtrain.c is the same plugin whose workers fit one polynomial together.
 *
 *   build:   cc -O2 -fPIC -fvisibility=hidden -shared examples/hosts/plugin/fit.c -o fit.so
 *   run:     ./host ./fit.so                            (host.c has its own build line)
 *   expect:
 *     task 0, 2 workers: 0.9000 +1.0000 x +0.0000 x^2 -2.0000 x^3
 *     task 1, 3 workers: 1.9987 +0.9624 x +0.0087 x^2 -1.9147 x^3
 *     nothing of the plugin is left */
#include "plugin.h"

#include <stdio.h>
#include <string.h>

__attribute__((visibility("default"))) int fit(worker *me);

int fit(worker *me)
{
    float *w = me->polynomial, grad[COEFFICIENTS];
    memset(me->polynomial, 0, sizeof me->polynomial);
    for (int step = 0; step < 2000; step++) {
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
        for (int k = 0; k < COEFFICIENTS; k++) w[k] -= 0.2f * grad[k];
    }
    return 0;
}
