/* naive_device.h: every kernel of dtrain_device_ops as the plainest loop that follows its
 * definition, in double. An oracle: it shares nothing with the CPU device but the interface.
 *
 * naive_device_ops() is a table for dtrain_device_create. Include it after dtrain.h and test.h. */
#ifndef NAIVE_DEVICE_H
#define NAIVE_DEVICE_H

static dtrain_result naive_create(const dtrain_device_desc *desc, dtrain_device *device)
{
    (void)desc, (void)device;
    return DTRAIN_OK;
}
static void naive_destroy(dtrain_device *device) { (void)device; }
static dtrain_result naive_synchronize(dtrain_device *device)
{
    (void)device;
    return DTRAIN_OK;
}

static int naive_allocations_left = -1; /* tests: how many may still succeed; -1 = all */

static dtrain_result naive_alloc(dtrain_device *device, size_t bytes, void **memory)
{
    *memory = NULL;
    if (naive_allocations_left == 0) return DTRAIN_ERROR_MEMORY;
    if (naive_allocations_left > 0) naive_allocations_left--;
    if (posix_memalign(memory, 64, bytes ? bytes : 64)) return DTRAIN_ERROR_MEMORY;
    memset(*memory, 0xff, bytes); /* NaN: what is read before it is written shows */
    device->allocated_bytes += bytes;
    if (device->allocated_bytes > device->peak_bytes) device->peak_bytes = device->allocated_bytes;
    return DTRAIN_OK;
}
static void naive_free(dtrain_device *device, void *memory, size_t bytes)
{
    device->allocated_bytes -= bytes;
    free(memory);
}
static dtrain_result naive_copy(dtrain_device *device, void *to, const void *from, size_t bytes,
                                dtrain_copy_kind kind)
{
    (void)device, (void)kind;
    memcpy(to, from, bytes);
    return DTRAIN_OK;
}
static dtrain_result naive_zero(dtrain_device *device, void *memory, size_t bytes)
{
    (void)device;
    memset(memory, 0, bytes);
    return DTRAIN_OK;
}

static double naive_gelu(double x)
{
    return 0.5 * x * (1 + tanh(sqrt(2 / 3.14159265358979323846) * (x + 0.044715 * x * x * x)));
}
static double naive_gelu_slope(double x)
{
    double c = sqrt(2 / 3.14159265358979323846), t = tanh(c * (x + 0.044715 * x * x * x));
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * c * (1 + 3 * 0.044715 * x * x);
}
static double naive_activation(uint32_t activation, double x)
{
    return activation == DTRAIN_ACT_RELU ? (x > 0 ? x : 0) : activation ? naive_gelu(x) : x;
}

static dtrain_result naive_gemm(dtrain_device *device, const dtrain_gemm_args *g)
{
    const float *a = (const float *)g->a, *b = (const float *)g->b;
    float *c = (float *)g->c;
    (void)device;
    if (g->a_dtype != DTRAIN_F32 || g->b_dtype != DTRAIN_F32 || g->c_dtype != DTRAIN_F32)
        return DTRAIN_ERROR_UNSUPPORTED;
    for (int64_t i = 0; i < g->m; i++)
        for (int64_t j = 0; j < g->n; j++) {
            double sum = 0;
            for (int64_t k = 0; k < g->k; k++)
                sum += (double)(g->flags & DTRAIN_GEMM_TRANS_A ? a[k * g->lda + i]
                                                               : a[i * g->lda + k]) *
                       (double)(g->flags & DTRAIN_GEMM_TRANS_B ? b[j * g->ldb + k]
                                                               : b[k * g->ldb + j]);
            sum *= (double)g->alpha;
            if (g->beta != 0) sum += (double)g->beta * (double)c[i * g->ldc + j];
            if (g->bias) sum += (double)g->bias[j];
            if (g->aux) g->aux[i * g->ldc + j] = (float)sum;
            c[i * g->ldc + j] = (float)naive_activation(g->activation, sum);
        }
    return DTRAIN_OK;
}

static dtrain_result naive_activation_backward(dtrain_device *device,
                                               const dtrain_activation_backward_args *a)
{
    (void)device;
    for (int64_t j = 0; j < a->n; j++) {
        double sum = 0;
        for (int64_t i = 0; i < a->rows; i++) {
            int64_t at = i * a->n + j;
            double d = (double)a->d_out[at];
            if (a->activation == DTRAIN_ACT_RELU) d = a->x[at] > 0 ? d : 0;
            if (a->activation == DTRAIN_ACT_GELU) d *= naive_gelu_slope((double)a->x[at]);
            if (a->activation || a->d_in != a->d_out) a->d_in[at] = (float)d;
            sum += d;
        }
        if (a->d_bias) a->d_bias[j] = (float)(sum + (a->accumulate ? (double)a->d_bias[j] : 0));
    }
    return DTRAIN_OK;
}

static dtrain_result naive_layernorm(dtrain_device *device, const dtrain_layernorm_args *a)
{
    (void)device;
    for (int64_t i = 0; i < a->rows; i++) {
        const float *x = a->x + i * a->n;
        double mean = 0, variance = 0;
        for (int64_t j = 0; j < a->n; j++) mean += (double)x[j] / (double)a->n;
        for (int64_t j = 0; j < a->n; j++)
            variance += ((double)x[j] - mean) * ((double)x[j] - mean) / (double)a->n;
        double rstd = 1 / sqrt(variance + (double)a->epsilon);
        for (int64_t j = 0; j < a->n; j++)
            a->y[i * a->n + j] = (float)(((double)x[j] - mean) * rstd * (double)a->weight[j] +
                                         (a->bias ? (double)a->bias[j] : 0));
        a->mean[i] = (float)mean;
        a->rstd[i] = (float)rstd;
    }
    return DTRAIN_OK;
}

static dtrain_result naive_layernorm_backward(dtrain_device *device,
                                              const dtrain_layernorm_backward_args *a)
{
    const int64_t n = a->n;
    (void)device;
    if (!a->accumulate_params) {
        if (a->d_weight) memset(a->d_weight, 0, (size_t)n * sizeof(float));
        if (a->d_bias) memset(a->d_bias, 0, (size_t)n * sizeof(float));
    }
    for (int64_t i = 0; i < a->rows; i++) {
        double mean_d = 0, mean_dh = 0;
        for (int64_t j = 0; j < n; j++) {
            double hat = ((double)a->x[i * n + j] - (double)a->mean[i]) * (double)a->rstd[i];
            double d_y = (double)a->d_y[i * n + j], d = d_y * (double)a->weight[j];
            mean_d += d / (double)n;
            mean_dh += d * hat / (double)n;
            if (a->d_weight) a->d_weight[j] += (float)(d_y * hat);
            if (a->d_bias) a->d_bias[j] += (float)d_y;
        }
        for (int64_t j = 0; j < n && a->d_x; j++) {
            double hat = ((double)a->x[i * n + j] - (double)a->mean[i]) * (double)a->rstd[i];
            double d = (double)a->d_y[i * n + j] * (double)a->weight[j];
            double old = a->accumulate_x ? (double)a->d_x[i * n + j] : 0;
            a->d_x[i * n + j] = (float)(old + (d - mean_d - hat * mean_dh) * (double)a->rstd[i]);
        }
    }
    return DTRAIN_OK;
}

static dtrain_result naive_embedding(dtrain_device *device, const dtrain_embedding_args *a)
{
    (void)device;
    for (int64_t i = 0; i < a->rows; i++) {
        if (a->tokens[i] < 0 || a->tokens[i] >= a->vocab) return DTRAIN_ERROR_DATA;
        for (int64_t j = 0; j < a->n; j++)
            a->y[i * a->n + j] =
                a->wte[a->tokens[i] * a->n + j] + (a->wpe ? a->wpe[i % a->sequence * a->n + j] : 0);
    }
    return DTRAIN_OK;
}

static dtrain_result naive_embedding_backward(dtrain_device *device,
                                              const dtrain_embedding_backward_args *a)
{
    (void)device;
    for (int64_t i = 0; i < a->rows; i++)
        for (int64_t j = 0; j < a->n; j++) {
            if (a->d_wte) a->d_wte[a->tokens[i] * a->n + j] += a->d_y[i * a->n + j];
            if (a->d_wpe) a->d_wpe[i % a->sequence * a->n + j] += a->d_y[i * a->n + j];
        }
    return DTRAIN_OK;
}

/* q . k of head h, positions t and u of sequence b */
static double naive_score(const float *qkv, int64_t n, int64_t heads, int64_t row_t, int64_t row_u,
                          int64_t h)
{
    int64_t d = n / heads;
    double sum = 0;
    for (int64_t j = 0; j < d; j++)
        sum += (double)qkv[row_t * 3 * n + h * d + j] * (double)qkv[row_u * 3 * n + n + h * d + j];
    return sum / sqrt((double)d);
}

static dtrain_result naive_attention(dtrain_device *device, const dtrain_attention_args *a)
{
    const int64_t T = a->sequence, n = a->n, d = n / a->heads;
    (void)device;
    for (int64_t b = 0; b < a->batch; b++)
        for (int64_t h = 0; h < a->heads; h++)
            for (int64_t t = 0; t < T; t++) {
                const int64_t end = a->causal ? t + 1 : T, row = b * T + t;
                double sum = 0;
                for (int64_t u = 0; u < end; u++)
                    sum += exp(naive_score(a->qkv, n, a->heads, row, b * T + u, h));
                a->lse[(b * a->heads + h) * T + t] = (float)log(sum);
                for (int64_t j = 0; j < d; j++) {
                    double y = 0;
                    for (int64_t u = 0; u < end; u++)
                        y += exp(naive_score(a->qkv, n, a->heads, row, b * T + u, h)) / sum *
                             (double)a->qkv[(b * T + u) * 3 * n + 2 * n + h * d + j];
                    a->y[row * n + h * d + j] = (float)y;
                }
            }
    return DTRAIN_OK;
}

static dtrain_result naive_attention_backward(dtrain_device *device,
                                              const dtrain_attention_backward_args *a)
{
    const int64_t T = a->sequence, n = a->n, d = n / a->heads;
    (void)device;
    memset(a->d_qkv, 0, (size_t)(a->batch * T * 3 * n) * sizeof(float));
    for (int64_t b = 0; b < a->batch; b++)
        for (int64_t h = 0; h < a->heads; h++)
            for (int64_t t = 0; t < T; t++) {
                const int64_t row = b * T + t, end = a->causal ? t + 1 : T;
                double dot = 0; /* d_y . y = sum over u of p d_p */
                for (int64_t j = h * d; j < (h + 1) * d; j++)
                    dot += (double)a->d_y[row * n + j] * (double)a->y[row * n + j];
                for (int64_t u = 0; u < end; u++) {
                    const int64_t other = b * T + u;
                    double d_p = 0, p = exp(naive_score(a->qkv, n, a->heads, row, other, h) -
                                            (double)a->lse[(b * a->heads + h) * T + t]);
                    for (int64_t j = h * d; j < (h + 1) * d; j++) {
                        d_p +=
                            (double)a->d_y[row * n + j] * (double)a->qkv[other * 3 * n + 2 * n + j];
                        a->d_qkv[other * 3 * n + 2 * n + j] +=
                            (float)(p * (double)a->d_y[row * n + j]);
                    }
                    double d_score = p * (d_p - dot) / sqrt((double)d);
                    for (int64_t j = h * d; j < (h + 1) * d; j++) {
                        a->d_qkv[row * 3 * n + j] +=
                            (float)(d_score * (double)a->qkv[other * 3 * n + n + j]);
                        a->d_qkv[other * 3 * n + n + j] +=
                            (float)(d_score * (double)a->qkv[row * 3 * n + j]);
                    }
                }
            }
    return DTRAIN_OK;
}

static dtrain_result naive_cross_entropy(dtrain_device *device, const dtrain_cross_entropy_args *a)
{
    (void)device;
    for (int64_t i = 0; i < a->rows; i++) {
        double sum = 0, top = -INFINITY;
        if (a->targets[i] < -1 || a->targets[i] >= a->n) return DTRAIN_ERROR_DATA;
        for (int64_t j = 0; j < a->n; j++) top = fmax(top, (double)a->logits[i * a->n + j]);
        for (int64_t j = 0; j < a->n; j++) sum += exp((double)a->logits[i * a->n + j] - top);
        a->lse[i] = (float)(top + log(sum));
        a->loss[i] = a->targets[i] < 0 ? 0 : a->lse[i] - a->logits[i * a->n + a->targets[i]];
    }
    return DTRAIN_OK;
}

static dtrain_result naive_cross_entropy_backward(dtrain_device *device,
                                                  const dtrain_cross_entropy_backward_args *a)
{
    (void)device;
    for (int64_t i = 0; i < a->rows; i++)
        for (int64_t j = 0; j < a->n; j++) {
            double p = exp((double)a->logits[i * a->n + j] - (double)a->lse[i]);
            if (a->targets[i] == j) p -= 1;
            a->d_logits[i * a->n + j] = a->targets[i] < 0 ? 0 : (float)(p * (double)a->scale);
        }
    return DTRAIN_OK;
}

static dtrain_result naive_add(dtrain_device *device, const dtrain_add_args *a)
{
    (void)device;
    for (int64_t i = 0; i < a->count; i++) a->out[i] = a->x[i] + a->y[i];
    return DTRAIN_OK;
}
static dtrain_result naive_axpby(dtrain_device *device, const dtrain_axpby_args *a)
{
    (void)device;
    for (int64_t i = 0; i < a->count; i++)
        a->y[i] = a->accumulate ? a->a * a->x[i] + a->b * a->y[i] : a->a * a->x[i];
    return DTRAIN_OK;
}
static dtrain_result naive_dropout(dtrain_device *device, const dtrain_dropout_args *a)
{
    (void)device;
    for (int64_t i = 0; i < a->count; i++) {
        bool keep = dtrain_random_uniform(a->seed, a->stream, (uint64_t)i) >= a->probability;
        float y = keep ? a->x[i] / (1 - a->probability) : 0;
        a->y[i] = a->accumulate ? a->y[i] + y : y;
    }
    return DTRAIN_OK;
}
static dtrain_result naive_sum(dtrain_device *device, const dtrain_sum_args *a)
{
    double sum = 0;
    (void)device;
    for (int64_t i = 0; i < a->count; i++)
        sum += a->squares ? (double)a->x[i] * (double)a->x[i] : (double)a->x[i];
    a->out[0] = a->scale * sum;
    return DTRAIN_OK;
}
static dtrain_result naive_convert(dtrain_device *device, const dtrain_convert_args *a)
{
    (void)device;
    if (a->x_dtype != DTRAIN_F32 || a->y_dtype != DTRAIN_F32) return DTRAIN_ERROR_UNSUPPORTED;
    memmove(a->y, a->x, (size_t)a->count * sizeof(float));
    return DTRAIN_OK;
}

static dtrain_result naive_adamw(dtrain_device *device, const dtrain_adamw_args *a)
{
    (void)device;
    for (int64_t i = 0; i < a->count; i++) {
        double g = (double)a->grad[i] * (double)a->grad_scale;
        double m = (double)a->beta1 * (double)a->m[i] + (1 - (double)a->beta1) * g;
        double v = (double)a->beta2 * (double)a->v[i] + (1 - (double)a->beta2) * g * g;
        double step =
            m / (double)a->correction1 / (sqrt(v / (double)a->correction2) + (double)a->epsilon);
        a->m[i] = (float)m;
        a->v[i] = (float)v;
        a->value[i] = (float)((double)a->value[i] * (1 - (double)a->lr * (double)a->weight_decay) -
                              (double)a->lr * step);
    }
    return DTRAIN_OK;
}
static dtrain_result naive_sgd(dtrain_device *device, const dtrain_sgd_args *a)
{
    (void)device;
    for (int64_t i = 0; i < a->count; i++) {
        float g = a->grad[i] * a->grad_scale, step = g;
        if (a->momentum_buffer) {
            float buffer = a->first ? g : a->momentum * a->momentum_buffer[i] + g;
            a->momentum_buffer[i] = buffer;
            step = a->nesterov ? g + a->momentum * buffer : buffer;
        }
        a->value[i] = a->value[i] * (1 - a->lr * a->weight_decay) - a->lr * step;
    }
    return DTRAIN_OK;
}

static inline const dtrain_device_ops *naive_device_ops(void)
{
    static const dtrain_device_ops ops = {DTRAIN_DEVICE_ABI,
                                          "naive",
                                          true,
                                          naive_create,
                                          naive_destroy,
                                          naive_synchronize,
                                          naive_alloc,
                                          naive_free,
                                          naive_copy,
                                          naive_zero,
                                          naive_gemm,
                                          naive_activation_backward,
                                          naive_layernorm,
                                          naive_layernorm_backward,
                                          naive_embedding,
                                          naive_embedding_backward,
                                          naive_attention,
                                          naive_attention_backward,
                                          naive_cross_entropy,
                                          naive_cross_entropy_backward,
                                          naive_add,
                                          naive_axpby,
                                          naive_dropout,
                                          naive_sum,
                                          naive_convert,
                                          naive_adamw,
                                          naive_sgd};
    return &ops;
}

#endif
