/* Elementwise kernels, sums, conversions
 *
 * Bandwidth is the limit: 8 to 28 bytes an element. */

DTRAIN__KERNEL(add)
{
    const dtrain_add_args *a = (const dtrain_add_args *)job->args;
    float buffers[2][DTRAIN__KERNEL_BLOCK];
    for (int64_t at = begin; at < end; at += DTRAIN__KERNEL_BLOCK) {
        const int64_t count = dtrain__min(end - at, DTRAIN__KERNEL_BLOCK);
        const float *x = DTRAIN__K(widened)(a->x, a->x_dtype, at, count, buffers[0]);
        const float *y = DTRAIN__K(widened)(a->y, a->y_dtype, at, count, buffers[1]);
        float *out = DTRAIN__K(written)(a->out, a->x_dtype, at, buffers[0]);
        for (int64_t i = 0; i < count; i += DTRAIN__W) {
            const int64_t n = count - i;
            dtrain__vstore_n(out + i, dtrain__vload_n(x + i, n) + dtrain__vload_n(y + i, n), n);
        }
        DTRAIN__K(rounded)(a->out, a->x_dtype, at, count, out);
    }
}

DTRAIN__KERNEL(axpby)
{
    const dtrain_axpby_args *args = (const dtrain_axpby_args *)job->args;
    const dtrain_dtype dtype = args->dtype;
    const bool constant = args->broadcast || !args->x;
    float value = (float)args->a, buffers[2][DTRAIN__KERNEL_BLOCK];
    if (constant && args->x) value *= dtrain__element(args->x, dtype, 0);
    const dtrain__v a = dtrain__vset(value), b = dtrain__vset((float)args->b);
    for (int64_t at = begin; at < end; at += DTRAIN__KERNEL_BLOCK) {
        const int64_t count = dtrain__min(end - at, DTRAIN__KERNEL_BLOCK);
        const float *x = NULL, *old = NULL;
        float *y = DTRAIN__K(written)(args->y, dtype, at, buffers[0]);
        if (!constant) x = DTRAIN__K(widened)(args->x, dtype, at, count, buffers[1]);
        if (args->accumulate) old = DTRAIN__K(widened)(args->y, dtype, at, count, y);
        for (int64_t i = 0; i < count; i += DTRAIN__W) {
            const int64_t n = count - i;
            dtrain__v sum = a;
            if (old) {
                const dtrain__v last = dtrain__vload_n(old + i, n);
                sum = constant ? dtrain__vfma(b, last, a)
                               : dtrain__vfma(a, dtrain__vload_n(x + i, n), b * last);
            } else if (!constant) sum = a * dtrain__vload_n(x + i, n);
            dtrain__vstore_n(y + i, sum, n);
        }
        DTRAIN__K(rounded)(args->y, dtype, at, count, y);
    }
}

/* lr / correction1 is one factor, and correction2 scales v under the root. */
DTRAIN__KERNEL(adamw)
{
    const dtrain__update *update = (const dtrain__update *)job->args;
    const dtrain_adamw_args *a = update->args;
    const dtrain_optimizer_tensor *t = update->tensor;
    const dtrain__v grad_scale = dtrain__vset(update->now.grad_scale);
    const dtrain__v epsilon = dtrain__vset(a->epsilon);
    const dtrain__v beta1 = dtrain__vset(a->beta1), rest1 = dtrain__vset(1 - a->beta1);
    const dtrain__v beta2 = dtrain__vset(a->beta2), rest2 = dtrain__vset(1 - a->beta2);
    const dtrain__v decay = dtrain__vset(1 - update->now.lr * t->weight_decay);
    const dtrain__v step = dtrain__vset(update->now.lr / update->now.correction1);
    const dtrain__v correct2 = dtrain__vset(1 / update->now.correction2);
    for (int64_t i = begin; i < end; i += DTRAIN__W) {
        const int64_t n = end - i;
        const dtrain__v g = dtrain__vload_n(t->grad + i, n) * grad_scale;
        const dtrain__v m = dtrain__vfma(rest1, g, beta1 * dtrain__vload_n(t->m + i, n));
        const dtrain__v v = dtrain__vfma(rest2 * g, g, beta2 * dtrain__vload_n(t->v + i, n));
        const dtrain__v root = DTRAIN__K(vsqrt)(v * correct2) + epsilon;
        const dtrain__v old = dtrain__vload_n(t->value + i, n);
        dtrain__vstore_n(t->m + i, m, n);
        dtrain__vstore_n(t->v + i, v, n);
        dtrain__vstore_n(t->value + i, old * decay - step * m / root, n);
    }
}

DTRAIN__KERNEL(sgd)
{
    const dtrain__update *update = (const dtrain__update *)job->args;
    const dtrain_sgd_args *a = update->args;
    const dtrain_optimizer_tensor *t = update->tensor;
    const dtrain__v grad_scale = dtrain__vset(update->now.grad_scale);
    const dtrain__v momentum = dtrain__vset(a->momentum), lr = dtrain__vset(-update->now.lr);
    const dtrain__v decay = dtrain__vset(t->weight_decay);
    float *buffer = t->m;
    for (int64_t i = begin; i < end; i += DTRAIN__W) {
        const int64_t n = end - i;
        const dtrain__v old = dtrain__vload_n(t->value + i, n);
        dtrain__v g = dtrain__vfma(decay, old, dtrain__vload_n(t->grad + i, n) * grad_scale);
        if (buffer) {
            dtrain__v b = g;
            if (!a->first) b = dtrain__vfma(momentum, dtrain__vload_n(buffer + i, n), g);
            dtrain__vstore_n(buffer + i, b, n);
            g = a->nesterov ? dtrain__vfma(momentum, b, g) : b;
        }
        dtrain__vstore_n(t->value + i, dtrain__vfma(lr, g, old), n);
    }
}

DTRAIN__KERNEL(lion)
{
    const dtrain__update *update = (const dtrain__update *)job->args;
    const dtrain_lion_args *a = update->args;
    const dtrain_optimizer_tensor *t = update->tensor;
    const dtrain__v grad_scale = dtrain__vset(update->now.grad_scale), zero = dtrain__vset(0);
    const dtrain__v beta1 = dtrain__vset(a->beta1), rest1 = dtrain__vset(1 - a->beta1);
    const dtrain__v beta2 = dtrain__vset(a->beta2), rest2 = dtrain__vset(1 - a->beta2);
    const dtrain__v decay = dtrain__vset(1 - update->now.lr * t->weight_decay);
    const dtrain__v lr = dtrain__vset(update->now.lr);
    for (int64_t i = begin; i < end; i += DTRAIN__W) {
        const int64_t n = end - i;
        const dtrain__v g = dtrain__vload_n(t->grad + i, n) * grad_scale;
        const dtrain__v m = dtrain__vload_n(t->m + i, n);
        const dtrain__v mean = dtrain__vfma(rest1, g, beta1 * m);
        const dtrain__v up = dtrain__vkeep(lr, DTRAIN__K(vless)(zero, mean));
        const dtrain__v down = dtrain__vkeep(lr, DTRAIN__K(vless)(mean, zero));
        const dtrain__v old = dtrain__vload_n(t->value + i, n);
        dtrain__vstore_n(t->m + i, dtrain__vfma(rest2, g, beta2 * m), n);
        dtrain__vstore_n(t->value + i, dtrain__vfma(old, decay, down - up), n);
    }
}

/* ---- Sums: chunk c of the job covers [c, c+1) * job->chunk elements ---------------------------
 *
 * Accumulated in double, half a vector of floats at a time; two accumulators hide the latency. */
#define DTRAIN__H (DTRAIN__W > 1 ? DTRAIN__W / 2 : 1)
typedef float DTRAIN__K(vhalf) __attribute__((vector_size(4 * DTRAIN__H), aligned(4), may_alias));
typedef double DTRAIN__K(vd) __attribute__((vector_size(8 * DTRAIN__H)));
DTRAIN__HELPER DTRAIN__K(vd) DTRAIN__K(vwiden)(const float *p)
{
    return __builtin_convertvector(*(const DTRAIN__K(vhalf) *)p, DTRAIN__K(vd));
}

DTRAIN__KERNEL(sum)
{
    const dtrain_sum_args *a = (const dtrain_sum_args *)job->args;
    const bool squares = a->squares;
    const int64_t step = 2 * DTRAIN__H;
    float buffer[DTRAIN__KERNEL_BLOCK];
    for (int64_t chunk = begin; chunk < end; chunk++) {
        const int64_t first = chunk * job->chunk, past = dtrain__min(first + job->chunk, a->count);
        const int64_t last = past - (past - first) % step;
        DTRAIN__K(vd) even = {0}, odd = {0};
        double total = 0;
        for (int64_t at = first; at < last; at += DTRAIN__KERNEL_BLOCK) {
            const int64_t count = dtrain__min(last - at, DTRAIN__KERNEL_BLOCK);
            const float *x = DTRAIN__K(widened)(a->x, a->dtype, at, count, buffer);
            for (int64_t i = 0; squares && i < count; i += step) {
                const DTRAIN__K(vd) low = DTRAIN__K(vwiden)(x + i);
                const DTRAIN__K(vd) high = DTRAIN__K(vwiden)(x + i + DTRAIN__H);
                even += low * low;
                odd += high * high;
            }
            for (int64_t i = 0; !squares && i < count; i += step) {
                even += DTRAIN__K(vwiden)(x + i);
                odd += DTRAIN__K(vwiden)(x + i + DTRAIN__H);
            }
        }
        even += odd;
        for (int lane = 0; lane < DTRAIN__H; lane++) total += even[lane];
        for (int64_t i = last; i < past; i++) {
            const double x = (double)dtrain__element(a->x, a->dtype, i);
            total += squares ? x * x : x;
        }
        job->sums[chunk] = total;
    }
}

DTRAIN__KERNEL(convert)
{
    const dtrain_convert_args *a = (const dtrain_convert_args *)job->args;
    const dtrain_dtype from = a->x_dtype, to = a->y_dtype;
    float buffer[DTRAIN__KERNEL_BLOCK];
    for (int64_t at = begin; at < end; at += DTRAIN__KERNEL_BLOCK) {
        const int64_t count = dtrain__min(end - at, DTRAIN__KERNEL_BLOCK);
        float *y = DTRAIN__K(written)(a->y, to, at, buffer);
        if (from == to) {
            const size_t bytes = dtrain_dtype_bytes(from), first = (size_t)at * bytes;
            memmove((char *)a->y + first, (const char *)a->x + first, (size_t)count * bytes);
        } else DTRAIN__K(rounded)
        (a->y, to, at, count, DTRAIN__K(widened)(a->x, from, at, count, y));
    }
}
