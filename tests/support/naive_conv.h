/* naive_conv.h: convolution and pooling as loops in double: a part of naive_device.h, and an oracle by itself. */
#ifndef NAIVE_CONV_H
#define NAIVE_CONV_H

/* The pixel under tap (a, b) of window (n, i, j), counted over all images; -1: outside. */
static inline int64_t naive_tap(const dtrain_windows2d *w, int64_t n, int64_t i, int64_t j,
                                int64_t a, int64_t b)
{
    const int64_t y = i * w->stride[0] - w->padding[0] + a * w->dilation[0];
    const int64_t x = j * w->stride[1] - w->padding[1] + b * w->dilation[1];
    return y < 0 || y >= w->height || x < 0 || x >= w->width ? -1
                                                             : (n * w->height + y) * w->width + x;
}

/* A convolution and the sums that are wanted of it. */
typedef struct naive_products {
    const dtrain_windows2d *w;
    int64_t out, groups;
    const void *x, *weight, *d_y;
    dtrain_dtype dtype;
    double *y, *d_x, *d_weight, *d_bias;
} naive_products;

static void naive_window(const naive_products *p, int64_t at, int64_t n, int64_t i, int64_t j,
                         int64_t o)
{
    const dtrain_windows2d *w = p->w;
    const int64_t in = w->channels / p->groups, group = o / (p->out / p->groups);
    const double d = p->d_y ? naive_get(p->d_y, p->dtype, at) : 0;
    if (p->d_bias) p->d_bias[o] += d;
    for (int64_t a = 0; a < w->kernel[0]; a++)
        for (int64_t b = 0; b < w->kernel[1]; b++)
            for (int64_t c = 0; c < in; c++) {
                const int64_t pixel = naive_tap(w, n, i, j, a, b);
                const int64_t by = ((o * in + c) * w->kernel[0] + a) * w->kernel[1] + b;
                const int64_t from = pixel * w->channels + group * in + c;
                if (pixel < 0) continue;
                if (p->y)
                    p->y[at] +=
                        naive_get(p->x, p->dtype, from) * naive_get(p->weight, p->dtype, by);
                if (p->d_x) p->d_x[from] += d * naive_get(p->weight, p->dtype, by);
                if (p->d_weight) p->d_weight[by] += d * naive_get(p->x, p->dtype, from);
            }
}

static void naive_convolve(const naive_products *p)
{
    int64_t at = 0;
    for (int64_t n = 0; n < p->w->batch; n++)
        for (int64_t i = 0; i < p->w->out_height; i++)
            for (int64_t j = 0; j < p->w->out_width; j++)
                for (int64_t o = 0; o < p->out; o++) naive_window(p, at++, n, i, j, o);
}

static inline double *naive_sums(int64_t count)
{
    return (double *)calloc((size_t)count + 1, sizeof(double));
}

/* Rounds sums to where they belong, and frees them. */
static inline void naive_leave(double *sums, void *to, dtrain_dtype dtype, int64_t count,
                               bool accumulate)
{
    for (int64_t i = 0; to && i < count; i++)
        naive_put(to, dtype, i, sums[i] + (accumulate ? naive_get(to, dtype, i) : 0));
    free(sums);
}

static dtrain_result naive_conv2d(dtrain_device *device, const dtrain_conv2d_args *a)
{
    const dtrain_windows2d *w = &a->windows;
    const int64_t count = w->batch * w->out_height * w->out_width * a->out_channels;
    naive_products p = {
        w, a->out_channels, a->groups, a->x, a->weight, NULL, a->dtype, NULL, NULL, NULL, NULL};
    (void)device;
    p.y = naive_sums(count);
    for (int64_t i = 0; i < count && a->bias; i++) p.y[i] = (double)a->bias[i % a->out_channels];
    naive_convolve(&p);
    naive_leave(p.y, a->y, a->dtype, count, false);
    return DTRAIN_OK;
}

static dtrain_result naive_conv2d_backward(dtrain_device *device,
                                           const dtrain_conv2d_backward_args *a)
{
    const dtrain_windows2d *w = &a->windows;
    const int64_t pixels = w->batch * w->height * w->width * w->channels;
    const int64_t weights =
        a->out_channels * (w->channels / a->groups) * w->kernel[0] * w->kernel[1];
    naive_products p = {
        w, a->out_channels, a->groups, a->x, a->weight, a->d_y, a->dtype, NULL, NULL, NULL, NULL};
    (void)device;
    p.d_x = naive_sums(pixels);
    p.d_weight = naive_sums(weights);
    p.d_bias = naive_sums(a->out_channels);
    naive_convolve(&p);
    naive_leave(p.d_x, a->d_x, a->x_dtype, pixels, a->accumulate_x);
    naive_leave(p.d_weight, a->d_weight, DTRAIN_DTYPE_F32, weights, a->accumulate_weight);
    naive_leave(p.d_bias, a->d_bias, DTRAIN_DTYPE_F32, a->out_channels, a->accumulate_bias);
    return DTRAIN_OK;
}

static dtrain_result naive_pool2d(dtrain_device *device, const dtrain_pool2d_args *a)
{
    const dtrain_windows2d *w = &a->windows;
    const int64_t taps = w->kernel[0] * w->kernel[1];
    const int64_t count = w->batch * w->out_height * w->out_width * w->channels;
    (void)device;
    for (int64_t at = 0; at < count; at++) {
        const int64_t window = at / w->channels;
        double top = -INFINITY, sum = 0;
        int64_t where = -1;
        for (int64_t t = 0; t < taps; t++) {
            const int64_t pixel = naive_tap(
                w, window / w->out_width / w->out_height, window / w->out_width % w->out_height,
                window % w->out_width, t / w->kernel[1], t % w->kernel[1]);
            if (pixel < 0) continue;
            const double x = naive_get(a->x, a->dtype, pixel * w->channels + at % w->channels);
            sum += x;
            if (where < 0) where = t;
            if (x > top || isnan(x)) top = x, where = t;
        }
        naive_put(a->y, a->dtype, at, a->maximum ? top : sum / (double)taps);
        if (a->maximum && a->index) a->index[at] = (int32_t)where;
    }
    return DTRAIN_OK;
}

static dtrain_result naive_pool2d_backward(dtrain_device *device,
                                           const dtrain_pool2d_backward_args *a)
{
    const dtrain_windows2d *w = &a->windows;
    const int64_t taps = w->kernel[0] * w->kernel[1];
    const int64_t count = w->batch * w->out_height * w->out_width * w->channels;
    const int64_t pixels = w->batch * w->height * w->width * w->channels;
    double *d_x = naive_sums(pixels);
    (void)device;
    for (int64_t at = 0; at < count; at++)
        for (int64_t t = 0; t < taps; t++) {
            const int64_t window = at / w->channels;
            const int64_t pixel = naive_tap(
                w, window / w->out_width / w->out_height, window / w->out_width % w->out_height,
                window % w->out_width, t / w->kernel[1], t % w->kernel[1]);
            if (pixel < 0 || (a->maximum && a->index[at] != t)) continue;
            d_x[pixel * w->channels + at % w->channels] +=
                naive_get(a->d_y, a->dtype, at) / (a->maximum ? 1 : (double)taps);
        }
    naive_leave(d_x, a->d_x, a->dtype, pixels, a->accumulate);
    return DTRAIN_OK;
}

#endif
