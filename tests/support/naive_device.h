/* naive_device.h: every kernel of dtrain_device_ops as the plainest loop that follows its
 * definition, in double. An oracle: it shares nothing with the CPU device but the interface.
 *
 * naive_device_ops() is a table for dtrain_device_create. Include it after dtrain.h and test.h. */
#ifndef NAIVE_DEVICE_H
#define NAIVE_DEVICE_H

#include "device_table.h"

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

/* Element i of an array of activations, in any of their types (0 = F32). */
static double naive_get(const void *x, dtrain_dtype dtype, int64_t i)
{
    float wide;
    uint16_t bits = 0;
    if (dtype == DTRAIN_DTYPE_BF16 || dtype == DTRAIN_DTYPE_F16) {
        memcpy(&bits, (const char *)x + i * 2, 2);
        return (double)dtrain_half_to_f32(dtype, bits);
    }
    memcpy(&wide, (const char *)x + i * 4, 4);
    return (double)wide;
}
static void naive_put(void *x, dtrain_dtype dtype, int64_t i, double value)
{
    float wide = (float)value;
    uint16_t bits = dtrain_half_from_f32(dtype, wide);
    if (dtype == DTRAIN_DTYPE_BF16 || dtype == DTRAIN_DTYPE_F16)
        memcpy((char *)x + i * 2, &bits, 2);
    else memcpy((char *)x + i * 4, &wide, 4);
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
static double naive_sigmoid(double x) { return 1 / (1 + exp(-x)); }
static double naive_activation(uint32_t activation, double x)
{
    if (activation == DTRAIN_ACTIVATION_SILU) return x * naive_sigmoid(x);
    return activation == DTRAIN_ACTIVATION_RELU ? (x > 0 ? x : 0) : activation ? naive_gelu(x) : x;
}

static double naive_slope(uint32_t activation, double x)
{
    if (activation == DTRAIN_ACTIVATION_SILU)
        return naive_sigmoid(x) * (1 + x * (1 - naive_sigmoid(x)));
    return activation == DTRAIN_ACTIVATION_RELU ? (x > 0) : activation ? naive_gelu_slope(x) : 1;
}

static double naive_pointwise_value(uint32_t kind, double x, double other)
{
    switch (kind) {
    case DTRAIN_POINTWISE_MULTIPLY: return x * other;
    case DTRAIN_POINTWISE_SWIGLU: return x * naive_sigmoid(x) * other;
    case DTRAIN_POINTWISE_SQUARED_ERROR: return (x - other) * (x - other);
    case DTRAIN_POINTWISE_LOGISTIC_LOSS: /* - t log(sigmoid(x)) - (1 - t) log(sigmoid(-x)) */
        return other * (x > -700 ? log1p(exp(-x)) : -x) +
               (1 - other) * (x < 700 ? log1p(exp(x)) : x);
    default: return naive_activation(kind, x);
    }
}

/* The derivative by x, or by other. */
static double naive_pointwise_slope(uint32_t kind, double x, double other, bool by_other)
{
    switch (kind) {
    case DTRAIN_POINTWISE_MULTIPLY: return by_other ? x : other;
    case DTRAIN_POINTWISE_SWIGLU:
        return by_other ? naive_activation(DTRAIN_ACTIVATION_SILU, x)
                        : naive_slope(DTRAIN_ACTIVATION_SILU, x) * other;
    case DTRAIN_POINTWISE_SQUARED_ERROR: return by_other ? 2 * (other - x) : 2 * (x - other);
    case DTRAIN_POINTWISE_LOGISTIC_LOSS: return by_other ? -x : naive_sigmoid(x) - other;
    default: return naive_slope(kind, x);
    }
}

static dtrain_result naive_pointwise(dtrain_device *device, const dtrain_pointwise_args *a)
{
    (void)device;
    for (int64_t i = 0; i < a->count; i++)
        naive_put(a->y, a->y_dtype, i,
                  naive_pointwise_value(a->kind, naive_get(a->x, a->x_dtype, i),
                                        a->other ? naive_get(a->other, a->other_dtype, i) : 0));
    return DTRAIN_OK;
}

static dtrain_result naive_pointwise_backward(dtrain_device *device,
                                              const dtrain_pointwise_backward_args *a)
{
    (void)device;
    for (int64_t i = 0; i < a->count; i++) {
        const double x = naive_get(a->x, a->x_dtype, i), d_y = naive_get(a->d_y, a->y_dtype, i);
        const double other = a->other ? naive_get(a->other, a->other_dtype, i) : 0;
        if (a->d_x)
            naive_put(a->d_x, a->x_dtype, i,
                      (a->accumulate_x ? naive_get(a->d_x, a->x_dtype, i) : 0) +
                          d_y * naive_pointwise_slope(a->kind, x, other, false));
        if (a->d_other)
            naive_put(a->d_other, a->other_dtype, i,
                      (a->accumulate_other ? naive_get(a->d_other, a->other_dtype, i) : 0) +
                          d_y * naive_pointwise_slope(a->kind, x, other, true));
    }
    return DTRAIN_OK;
}

/* Element (i,k) of op(A), and (k,j) of op(B). */
static double naive_a(const dtrain_gemm_args *g, int64_t i, int64_t k)
{
    return naive_get(g->a, g->a_dtype,
                     g->flags & DTRAIN_GEMM_TRANS_A ? k * g->lda + i : i * g->lda + k);
}
static double naive_b(const dtrain_gemm_args *g, int64_t k, int64_t j)
{
    return naive_get(g->b, g->b_dtype,
                     g->flags & DTRAIN_GEMM_TRANS_B ? j * g->ldb + k : k * g->ldb + j);
}

static dtrain_result naive_gemm(dtrain_device *device, const dtrain_gemm_args *g)
{
    const bool backward = (g->flags & DTRAIN_GEMM_ACT_BACKWARD) != 0;
    const bool of_c = g->bias_grad && (g->flags & DTRAIN_GEMM_BIAS_GRAD_C);
    (void)device;
    for (int64_t i = 0; g->bias_grad && !g->accumulate_bias_grad && i < (of_c ? g->n : g->m); i++)
        g->bias_grad[i] = 0;
    for (int64_t i = 0; i < g->m; i++)
        for (int64_t j = 0; j < g->n; j++) {
            const int64_t at = i * g->ldc + j;
            double sum = 0;
            for (int64_t k = 0; k < g->k; k++) sum += naive_a(g, i, k) * naive_b(g, k, j);
            sum *= (double)g->alpha;
            if (g->beta != 0) sum += (double)g->beta * naive_get(g->c, g->c_dtype, at);
            if (g->bias) sum += (double)g->bias[j];
            if (backward) sum *= naive_slope(g->activation, naive_get(g->aux, g->c_dtype, at));
            else if (g->aux) naive_put(g->aux, g->c_dtype, at, sum);
            if (!backward) sum = naive_activation(g->activation, sum);
            naive_put(g->c, g->c_dtype, at, sum);
            if (of_c) g->bias_grad[j] += (float)sum;
        }
    for (int64_t i = 0; g->bias_grad && !of_c && i < g->m; i++)
        for (int64_t k = 0; k < g->k; k++) g->bias_grad[i] += (float)naive_a(g, i, k);
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
            double d = naive_get(a->d_out, a->dtype, at);
            if (a->activation) d *= naive_slope(a->activation, naive_get(a->x, a->dtype, at));
            if (a->activation || a->d_in != a->d_out) naive_put(a->d_in, a->dtype, at, d);
            sum += d;
        }
        if (a->d_bias) a->d_bias[j] = (float)(sum + (a->accumulate ? (double)a->d_bias[j] : 0));
    }
    return DTRAIN_OK;
}

static dtrain_result naive_layernorm(dtrain_device *device, const dtrain_layernorm_args *a)
{
    double *x = (double *)malloc((size_t)(a->n + 1) * sizeof *x);
    (void)device;
    for (int64_t i = 0; i < a->rows; i++) {
        double mean = 0, variance = 0;
        for (int64_t j = 0; j < a->n; j++) {
            x[j] = naive_get(a->x, a->x_dtype, i * a->n + j);
            if (a->residual) x[j] += naive_get(a->residual, a->y_dtype, i * a->n + j);
            if (a->residual) naive_put(a->sum, a->x_dtype, i * a->n + j, x[j]);
        }
        for (int64_t j = 0; j < a->n && a->mean; j++) mean += x[j] / (double)a->n;
        for (int64_t j = 0; j < a->n; j++) variance += (x[j] - mean) * (x[j] - mean) / (double)a->n;
        double rstd = 1 / sqrt(variance + (double)a->epsilon);
        for (int64_t j = 0; j < a->n; j++)
            naive_put(a->y, a->y_dtype, i * a->n + j,
                      (x[j] - mean) * rstd * (double)a->weight[j] +
                          (a->bias ? (double)a->bias[j] : 0));
        if (a->mean) a->mean[i] = (float)mean;
        a->rstd[i] = (float)rstd;
    }
    free(x);
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
        const double mean = a->mean ? (double)a->mean[i] : 0;
        double mean_d = 0, mean_dh = 0;
        for (int64_t j = 0; j < n; j++) {
            double x = naive_get(a->x, a->x_dtype, i * n + j),
                   d_y = naive_get(a->d_y, a->y_dtype, i * n + j);
            double hat = (x - mean) * (double)a->rstd[i], d = d_y * (double)a->weight[j];
            if (a->mean) mean_d += d / (double)n;
            mean_dh += d * hat / (double)n;
            if (a->d_weight) a->d_weight[j] += (float)(d_y * hat);
            if (a->d_bias) a->d_bias[j] += (float)d_y;
        }
        for (int64_t j = 0; j < n && a->d_x; j++) {
            double x = naive_get(a->x, a->x_dtype, i * n + j),
                   d_y = naive_get(a->d_y, a->y_dtype, i * n + j);
            double hat = (x - mean) * (double)a->rstd[i], d = d_y * (double)a->weight[j];
            double old = a->accumulate_x ? naive_get(a->d_x, a->x_dtype, i * n + j) : 0;
            double d_x = old + (d - mean_d - hat * mean_dh) * (double)a->rstd[i];
            naive_put(a->d_x, a->x_dtype, i * n + j, d_x);
            if (a->d_residual) naive_put(a->d_residual, a->y_dtype, i * n + j, d_x);
        }
    }
    return DTRAIN_OK;
}

static dtrain_result naive_bias(dtrain_device *device, const dtrain_bias_args *a)
{
    (void)device;
    for (int64_t i = 0; i < a->m * a->n; i++) {
        const double x = naive_get(a->c, a->c_dtype, i) + (a->bias ? (double)a->bias[i % a->n] : 0);
        if (a->aux) naive_put(a->aux, a->c_dtype, i, x);
        naive_put(a->c, a->c_dtype, i, naive_activation(a->activation, x));
    }
    return DTRAIN_OK;
}

static dtrain_result naive_embedding(dtrain_device *device, const dtrain_embedding_args *a)
{
    (void)device;
    for (int64_t i = 0; i < a->rows; i++) {
        const int64_t token = a->tokens[i], place = (a->first_row + i) % a->sequence;
        const int64_t past = a->first_token + a->vocab;
        if (token < 0 || token >= (a->whole_vocab ? a->whole_vocab : past))
            return DTRAIN_ERROR_DATA;
        for (int64_t j = 0; j < a->n; j++) {
            float y = 0;
            if (token >= a->first_token && token < past)
                y = a->wte[(token - a->first_token) * a->n + j];
            naive_put(a->y, a->dtype, i * a->n + j,
                      (double)(y + (a->wpe ? a->wpe[place * a->n + j] : 0)));
        }
    }
    return DTRAIN_OK;
}

static dtrain_result naive_embedding_backward(dtrain_device *device,
                                              const dtrain_embedding_backward_args *a)
{
    (void)device;
    for (int64_t i = 0; i < a->rows; i++)
        for (int64_t j = 0; j < a->n; j++) {
            const int64_t token = a->tokens[i] - a->first_token;
            float d_y = (float)naive_get(a->d_y, a->dtype, i * a->n + j);
            if (a->d_wte && token >= 0 && token < a->vocab) a->d_wte[token * a->n + j] += d_y;
            if (a->d_wpe) a->d_wpe[(a->first_row + i) % a->sequence * a->n + j] += d_y;
        }
    return DTRAIN_OK;
}

/* Where the elements of head h of queries begin in q, and of the head it meets in k and v. */
static int64_t naive_q(const dtrain_attention_args *a, int64_t b, int64_t h, int64_t t)
{
    return (b * a->queries + t) * a->q_stride + h * a->d;
}
static int64_t naive_kv(const dtrain_attention_args *a, int64_t stride, int64_t b, int64_t h,
                        int64_t u)
{
    return (b * a->keys + u) * stride + h * a->kv_heads / a->heads * a->d;
}

/* The score of query t and key u, mask included; -infinity where the query does not see the key. */
static double naive_score(const dtrain_attention_args *a, int64_t b, int64_t h, int64_t t,
                          int64_t u)
{
    const int64_t q = naive_q(a, b, h, t), k = naive_kv(a, a->k_stride, b, h, u);
    const int64_t mask = b * a->mask_batch_step + h * a->mask_head_step + t * a->keys + u;
    double sum = 0;
    if ((a->causal && u > t) || (a->key_lengths && u >= a->key_lengths[b])) return -INFINITY;
    for (int64_t j = 0; j < a->d; j++)
        sum += naive_get(a->q, a->dtype, q + j) * naive_get(a->k, a->dtype, k + j);
    sum /= sqrt((double)a->d);
    return a->mask ? (double)((float)sum + a->mask[mask]) : sum; /* a mask of -1e9 absorbs it */
}

/* What rounding takes from lse = top + log(sum). */
static float naive_rest(double top, double sum, float lse)
{
    const double rest = log(sum) - ((double)lse - top);
    return isfinite(rest) ? (float)rest : 0;
}

static dtrain_result naive_attention(dtrain_device *device, const dtrain_attention_args *a)
{
    double *p = (double *)malloc((size_t)(a->keys + 1) * sizeof *p);
    (void)device;
    for (int64_t i = 0; i < a->batch * a->heads * a->queries; i++) {
        const int64_t b = i / a->queries / a->heads, h = i / a->queries % a->heads;
        const int64_t t = i % a->queries, row = (b * a->queries + t) * a->heads * a->d;
        double top = -INFINITY, sum = 0;
        for (int64_t u = 0; u < a->keys; u++) {
            p[u] = naive_score(a, b, h, t, u);
            if (!(p[u] <= top)) top = p[u];
        }
        for (int64_t u = 0; u < a->keys; u++) sum += p[u] = isinf(top) ? 0 : exp(p[u] - top);
        a->lse[i] = sum == 0 ? INFINITY : (float)(top + log(sum));
        if (a->lse_rest) a->lse_rest[i] = sum == 0 ? 0 : naive_rest(top, sum, a->lse[i]);
        for (int64_t j = 0; j < a->d; j++) {
            double y = 0;
            for (int64_t u = 0; u < a->keys; u++)
                if (p[u] != 0)
                    y += p[u] / sum *
                         naive_get(a->v, a->dtype, naive_kv(a, a->v_stride, b, h, u) + j);
            naive_put(a->y, a->dtype, row + h * a->d + j, y);
        }
    }
    free(p);
    return DTRAIN_OK;
}

/* Store gradients of a head (rows, d) where the elements of q, k or v lie. */
static void naive_attention_store(void *to, dtrain_dtype dtype, int64_t stride, int64_t column,
                                  int64_t rows, int64_t d, const double *from)
{
    for (int64_t i = 0; i < rows * d && to; i++)
        naive_put(to, dtype, i / d * stride + column + i % d, from[i]);
}

/* The gradients of head h of keys in batch element b, over the heads of queries that share it. */
static void naive_attention_slopes(const dtrain_attention_backward_args *pass, int64_t b, int64_t h,
                                   double *d_q, double *d_k, double *d_v)
{
    const dtrain_attention_args *a = &pass->forward;
    const int64_t d = a->d, sharing = a->heads / a->kv_heads;
    for (int64_t i = 0; i < sharing * a->queries; i++) {
        const int64_t head = h * sharing + i / a->queries, t = i % a->queries;
        const int64_t row = ((b * a->queries + t) * a->heads + head) * d;
        const int64_t q = naive_q(a, b, head, t);
        double *slope = d_q + (t * sharing + i / a->queries) * d, dot = 0;
        for (int64_t j = row; j < row + d; j++) /* d_y . y = sum over u of p d_p */
            dot += naive_get(pass->d_y, a->dtype, j) * naive_get(a->y, a->dtype, j);
        for (int64_t u = 0; u < a->keys; u++) {
            const int64_t k = naive_kv(a, a->k_stride, b, head, u);
            const int64_t v = naive_kv(a, a->v_stride, b, head, u);
            const int64_t at = (b * a->heads + head) * a->queries + t;
            const double rest = a->lse_rest ? (double)a->lse_rest[at] : 0;
            const double p = exp(naive_score(a, b, head, t, u) - (double)a->lse[at] - rest);
            double d_p = 0;
            if (p == 0) continue;
            for (int64_t j = 0; j < d; j++) {
                const double d_y = naive_get(pass->d_y, a->dtype, row + j);
                d_p += d_y * naive_get(a->v, a->dtype, v + j);
                d_v[u * d + j] += p * d_y;
            }
            const double d_score = p * (d_p - dot) / sqrt((double)d);
            for (int64_t j = 0; j < d; j++) {
                slope[j] += d_score * naive_get(a->k, a->dtype, k + j);
                d_k[u * d + j] += d_score * naive_get(a->q, a->dtype, q + j);
            }
        }
    }
}

static dtrain_result naive_attention_backward(dtrain_device *device,
                                              const dtrain_attention_backward_args *pass)
{
    const dtrain_attention_args *a = &pass->forward;
    const int64_t d = a->d, wide = a->heads / a->kv_heads * d;
    (void)device;
    for (int64_t i = 0; i < a->batch * a->kv_heads; i++) {
        const int64_t b = i / a->kv_heads, h = i % a->kv_heads;
        double *d_q = (double *)calloc((size_t)(a->queries * wide + 1), sizeof *d_q);
        double *d_k = (double *)calloc((size_t)(a->keys * d + 1), sizeof *d_k);
        double *d_v = (double *)calloc((size_t)(a->keys * d + 1), sizeof *d_v);
        naive_attention_slopes(pass, b, h, d_q, d_k, d_v);
        naive_attention_store(pass->d_q, a->dtype, a->q_stride,
                              b * a->queries * a->q_stride + h * wide, a->queries, wide, d_q);
        naive_attention_store(pass->d_k, a->dtype, a->k_stride, b * a->keys * a->k_stride + h * d,
                              a->keys, d, d_k);
        naive_attention_store(pass->d_v, a->dtype, a->v_stride, b * a->keys * a->v_stride + h * d,
                              a->keys, d, d_v);
        free(d_q), free(d_k), free(d_v);
    }
    return DTRAIN_OK;
}

static int64_t naive_classes(const dtrain_cross_entropy_args *a)
{
    return a->classes < 0 ? 0 : a->classes ? a->classes : a->n;
}
static int64_t naive_whole_classes(const dtrain_cross_entropy_args *a)
{
    return a->whole_classes ? a->whole_classes : naive_classes(a);
}

static dtrain_result naive_cross_entropy_backward(dtrain_device *device,
                                                  const dtrain_cross_entropy_backward_args *a)
{
    const double scale = (double)a->scale * (a->upstream ? (double)a->upstream[0] : 1);
    const int64_t classes = naive_classes(a);
    (void)device;
    for (int64_t i = 0; i < a->rows; i++)
        for (int64_t j = 0; j < a->n; j++) {
            const bool counts = a->targets[i] >= 0 && j < classes;
            double p = exp(naive_get(a->logits, a->dtype, i * a->n + j) - (double)a->lse[i] -
                           (a->lse_rest ? (double)a->lse_rest[i] : 0));
            if (a->targets[i] == a->first_class + j) p -= 1 - (double)a->smoothing;
            p -= (double)a->smoothing / (double)naive_whole_classes(a);
            naive_put(a->d_logits, a->dtype, i * a->n + j, counts ? p * scale : 0);
        }
    return DTRAIN_OK;
}

static dtrain_result naive_cross_entropy(dtrain_device *device, const dtrain_cross_entropy_args *a)
{
    const int64_t classes = naive_classes(a);
    for (int64_t i = 0; i < a->rows; i++) {
        const double s = (double)a->smoothing;
        double sum = 0, top = -INFINITY, mean = 0;
        if (a->targets[i] < -1 || a->targets[i] >= naive_whole_classes(a)) return DTRAIN_ERROR_DATA;
        for (int64_t j = 0; j < classes; j++)
            top = fmax(top, naive_get(a->logits, a->dtype, i * a->n + j));
        for (int64_t j = 0; j < classes; j++) {
            const double x = naive_get(a->logits, a->dtype, i * a->n + j);
            sum += exp(x - top);
            if (a->smoothing > 0) mean += x / (double)classes;
        }
        if (a->parts) {
            const int64_t at = a->targets[i] - a->first_class;
            a->parts[i] = a->targets[i] < 0 ? -INFINITY : (float)top;
            a->parts[a->rows + i] = a->targets[i] < 0 ? 0 : (float)sum;
            a->parts[2 * a->rows + i] = 0;
            if (a->targets[i] >= 0 && at >= 0 && at < classes)
                a->parts[2 * a->rows + i] = (float)naive_get(a->logits, a->dtype, i * a->n + at);
            if (s > 0) a->parts[3 * a->rows + i] = (float)(mean * (double)classes);
            continue;
        }
        a->lse[i] = a->targets[i] < 0 ? 0 : (float)(top + log(sum));
        if (a->lse_rest) a->lse_rest[i] = a->targets[i] < 0 ? 0 : naive_rest(top, sum, a->lse[i]);
        a->loss[i] = 0;
        if (a->targets[i] < 0) continue;
        const double of_target = naive_get(a->logits, a->dtype, i * a->n + a->targets[i]);
        a->loss[i] = (float)(top + log(sum) - (1 - s) * of_target - s * mean);
    }
    if (!a->d_logits) return DTRAIN_OK;
    const dtrain_cross_entropy_backward_args backward = {.rows = a->rows,
                                                         .n = a->n,
                                                         .scale = a->scale,
                                                         .logits = a->logits,
                                                         .targets = a->targets,
                                                         .lse = a->lse,
                                                         .d_logits = a->d_logits,
                                                         .dtype = a->dtype,
                                                         .classes = a->classes,
                                                         .smoothing = a->smoothing,
                                                         .lse_rest = a->lse_rest};
    return naive_cross_entropy_backward(device, &backward);
}

static dtrain_result naive_cross_entropy_finish(dtrain_device *device,
                                                const dtrain_cross_entropy_finish_args *a)
{
    const double s = (double)a->smoothing;
    (void)device;
    for (int64_t i = 0; i < a->rows; i++) {
        float *part = a->parts + i;
        const double top = (double)a->whole_max[i];
        if (!a->loss && part[0] != -INFINITY)
            part[a->rows] = (float)((double)part[a->rows] * exp((double)part[0] - top));
        if (!a->loss) continue;
        const double lse = a->targets[i] < 0 ? 0 : top + log((double)part[a->rows]);
        double loss = lse - (1 - s) * (double)part[2 * a->rows];
        if (s > 0) loss -= s * (double)part[3 * a->rows] / (double)naive_whole_classes(a);
        a->lse[i] = (float)lse;
        if (a->lse_rest)
            a->lse_rest[i] =
                a->targets[i] < 0 ? 0 : naive_rest(top, (double)part[a->rows], a->lse[i]);
        a->loss[i] = a->targets[i] < 0 ? 0 : (float)loss;
    }
    return DTRAIN_OK;
}

static dtrain_result naive_softmax(dtrain_device *device, const dtrain_softmax_args *a)
{
    (void)device;
    for (int64_t i = 0; i < a->rows; i++) {
        double sum = 0, top = -INFINITY;
        for (int64_t j = 0; j < a->n; j++) top = fmax(top, naive_get(a->x, a->dtype, i * a->n + j));
        for (int64_t j = 0; j < a->n; j++)
            sum += exp(naive_get(a->x, a->dtype, i * a->n + j) - top);
        for (int64_t j = 0; j < a->n; j++)
            naive_put(a->y, a->dtype, i * a->n + j,
                      exp(naive_get(a->x, a->dtype, i * a->n + j) - top) / sum);
    }
    return DTRAIN_OK;
}

static dtrain_result naive_softmax_backward(dtrain_device *device,
                                            const dtrain_softmax_backward_args *a)
{
    (void)device;
    for (int64_t i = 0; i < a->rows; i++)
        for (int64_t j = 0; j < a->n; j++) {
            const double y = naive_get(a->y, a->dtype, i * a->n + j);
            double d_x = a->accumulate ? naive_get(a->d_x, a->dtype, i * a->n + j) : 0;
            for (int64_t k = 0; k < a->n; k++) /* d y[k] / d x[j] */
                d_x += naive_get(a->d_y, a->dtype, i * a->n + k) * y *
                       ((k == j) - naive_get(a->y, a->dtype, i * a->n + k));
            naive_put(a->d_x, a->dtype, i * a->n + j, d_x);
        }
    return DTRAIN_OK;
}

static dtrain_result naive_rotary(dtrain_device *device, const dtrain_rotary_args *a)
{
    const int64_t half = a->d / 2;
    (void)device;
    for (int64_t i = 0; i < a->rows * a->heads * a->d; i++) {
        const int64_t column = i % a->d, head = i / a->d % a->heads, row = i / a->d / a->heads;
        const bool low = column < half;
        const double x = naive_get(a->x, a->dtype, i);
        const double other = naive_get(a->x, a->dtype, low ? i + half : i - half);
        double angle = (double)(row % a->sequence) /
                       pow((double)a->theta, 2 * (double)(column % half) / (double)a->d);
        if (a->inverse) angle = -angle;
        double y = a->accumulate ? naive_get(a->y, a->dtype, i) : 0;
        y += head >= a->rotated ? x : x * cos(angle) + (low ? -other : other) * sin(angle);
        naive_put(a->y, a->dtype, i, y);
    }
    return DTRAIN_OK;
}

static dtrain_result naive_permute(dtrain_device *device, const dtrain_permute_args *a)
{
    int64_t at = 0;
    (void)device;
    for (int64_t i = 0; i < a->shape[0]; i++)
        for (int64_t j = 0; j < a->shape[1]; j++)
            for (int64_t k = 0; k < a->shape[2]; k++)
                for (int64_t l = 0; l < a->shape[3]; l++, at++)
                    naive_put(a->y, a->dtype, at,
                              (a->accumulate ? naive_get(a->y, a->dtype, at) : 0) +
                                  naive_get(a->x, a->dtype,
                                            i * a->step[0] + j * a->step[1] + k * a->step[2] +
                                                l * a->step[3]));
    return DTRAIN_OK;
}

static dtrain_result naive_add(dtrain_device *device, const dtrain_add_args *a)
{
    (void)device;
    for (int64_t i = 0; i < a->count; i++)
        naive_put(a->out, a->x_dtype, i,
                  (double)((float)naive_get(a->x, a->x_dtype, i) +
                           (float)naive_get(a->y, a->y_dtype, i)));
    return DTRAIN_OK;
}
static dtrain_result naive_axpby(dtrain_device *device, const dtrain_axpby_args *a)
{
    (void)device;
    for (int64_t i = 0; a->divisor && a->divisor[0] != 0 && i < a->count; i++)
        ((float *)a->y)[i] *= (float)a->a / a->divisor[0];
    for (int64_t i = 0; !a->divisor && i < a->count; i++) {
        double x = a->x ? naive_get(a->x, a->dtype, a->broadcast ? 0 : i) : 1;
        double y = a->accumulate ? a->b * naive_get(a->y, a->dtype, i) : 0;
        naive_put(a->y, a->dtype, i, a->a * x + y);
    }
    return DTRAIN_OK;
}
/* The number of element i in the whole tensor: the column is looked for among all of the whole row. */
static int64_t naive_number(const dtrain_part *p, int64_t i)
{
    int64_t here = 0;
    for (uint32_t s = 0; s < p->segments; s++)
        for (int64_t j = 0; j < p->segment[s].length; j++)
            if (here++ == i % p->n)
                return p->first + i / p->n * p->whole_n + p->segment[s].column + j;
    return p->first + i;
}
static dtrain_result naive_dropout(dtrain_device *device, const dtrain_dropout_args *a)
{
    const uint64_t seed = a->seed + (a->scalars ? a->scalars->seed : 0);
    (void)device;
    for (int64_t i = 0; i < a->count; i++) {
        const uint64_t number = (uint64_t)naive_number(&a->part, i);
        bool keep = dtrain_random_uniform(seed, a->stream, number) >= a->probability;
        double y = keep ? naive_get(a->x, a->dtype, i) / (1 - (double)a->probability) : 0;
        naive_put(a->y, a->dtype, i, (a->accumulate ? naive_get(a->y, a->dtype, i) : 0) + y);
    }
    return DTRAIN_OK;
}
static dtrain_result naive_sum(dtrain_device *device, const dtrain_sum_args *a)
{
    double sum = 0;
    (void)device;
    for (int64_t i = 0; i < a->count; i++) {
        double x = naive_get(a->x, a->dtype, i);
        sum += a->squares ? x * x : x;
    }
    sum *= a->scale * (a->factor ? (double)a->factor[0] : 1);
    sum += a->accumulate ? a->total[0] : 0;
    if (a->total) a->total[0] = sum;
    if (a->out) a->out[0] = (float)sum;
    return DTRAIN_OK;
}
static dtrain_result naive_clip(dtrain_device *device, const dtrain_clip_args *a)
{
    double squares = a->sum_squares[0];
    (void)device;
    for (int i = 1; i < a->sum_count; i++) squares += a->sum_squares[i];
    const double norm = sqrt(squares) * (double)a->scalars->grad_scale;
    a->norm[0] = (float)norm;
    if (!isfinite(a->norm[0]) || (a->weight && a->weight[0] == 0)) a->scalars->skip = 1;
    else if (a->max_norm > 0 && (double)a->max_norm / (norm + 1e-6) < 1)
        a->scalars->grad_scale =
            (float)((double)a->scalars->grad_scale * (double)a->max_norm / (norm + 1e-6));
    return DTRAIN_OK;
}
static dtrain_result naive_convert(dtrain_device *device, const dtrain_convert_args *a)
{
    (void)device;
    for (int64_t i = 0; i < a->count; i++)
        naive_put(a->y, a->y_dtype, i, naive_get(a->x, a->x_dtype, i));
    return DTRAIN_OK;
}

static dtrain_result naive_adamw(dtrain_device *device, const dtrain_adamw_args *a)
{
    dtrain_step_scalars now = {0, a->lr, a->correction1, a->correction2, a->grad_scale, 0, 0};
    (void)device;
    if (a->scalars) now = *a->scalars, now.lr *= a->lr_scale;
    for (size_t k = 0; k < a->tensor_count && !now.skip; k++)
        for (int64_t i = 0; i < a->tensors[k].count; i++) {
            const dtrain_optimizer_tensor *t = &a->tensors[k];
            double g = (double)t->grad[i] * (double)now.grad_scale;
            double m = (double)a->beta1 * (double)t->m[i] + (1 - (double)a->beta1) * g;
            double v = (double)a->beta2 * (double)t->v[i] + (1 - (double)a->beta2) * g * g;
            double step = m / (double)now.correction1 /
                          (sqrt(v / (double)now.correction2) + (double)a->epsilon);
            t->m[i] = (float)m;
            t->v[i] = (float)v;
            t->value[i] =
                (float)((double)t->value[i] * (1 - (double)now.lr * (double)t->weight_decay) -
                        (double)now.lr * step);
        }
    return DTRAIN_OK;
}
static dtrain_result naive_sgd(dtrain_device *device, const dtrain_sgd_args *a)
{
    dtrain_step_scalars now = {0, a->lr, 1, 1, a->grad_scale, 0, 0};
    (void)device;
    if (a->scalars) now = *a->scalars, now.lr *= a->lr_scale;
    for (size_t k = 0; k < a->tensor_count && !now.skip; k++)
        for (int64_t i = 0; i < a->tensors[k].count; i++) {
            const dtrain_optimizer_tensor *t = &a->tensors[k];
            double g = (double)t->grad[i] * (double)now.grad_scale +
                       (double)t->weight_decay * (double)t->value[i];
            double step = g;
            if (t->m) {
                double buffer = a->first ? g : (double)a->momentum * (double)t->m[i] + g;
                t->m[i] = (float)buffer;
                step = a->nesterov ? g + (double)a->momentum * buffer : buffer;
            }
            t->value[i] = (float)((double)t->value[i] - (double)now.lr * step);
        }
    return DTRAIN_OK;
}
static dtrain_result naive_lion(dtrain_device *device, const dtrain_lion_args *a)
{
    dtrain_step_scalars now = {0, a->lr, 1, 1, a->grad_scale, 0, 0};
    (void)device;
    if (a->scalars) now = *a->scalars, now.lr *= a->lr_scale;
    for (size_t k = 0; k < a->tensor_count && !now.skip; k++)
        for (int64_t i = 0; i < a->tensors[k].count; i++) {
            const dtrain_optimizer_tensor *t = &a->tensors[k];
            double g = (double)t->grad[i] * (double)now.grad_scale, m = (double)t->m[i];
            double mean = (double)a->beta1 * m + (1 - (double)a->beta1) * g;
            double sign = mean > 0 ? 1 : mean < 0 ? -1 : 0;
            t->m[i] = (float)((double)a->beta2 * m + (1 - (double)a->beta2) * g);
            t->value[i] =
                (float)((double)t->value[i] * (1 - (double)now.lr * (double)t->weight_decay) -
                        (double)now.lr * sign);
        }
    return DTRAIN_OK;
}
static dtrain_result naive_muon(dtrain_device *device, const dtrain_muon_args *a)
{
    dtrain_step_scalars now = {0, a->lr, 1, 1, a->grad_scale, 0, 0};
    const dtrain_optimizer_tensor *t = a->tensors;
    (void)device;
    if (a->scalars) now = *a->scalars, now.lr *= a->lr_scale;
    for (int64_t i = 0; i < t->count && !now.skip; i++) {
        double x = (double)a->x[i];
        if (a->stage == DTRAIN_MUON_MOMENTUM) {
            double g = (double)t->grad[i] * (double)now.grad_scale;
            double m = (double)a->momentum * (double)t->m[i] + g;
            t->m[i] = (float)m;
            a->x[i] = (float)(a->nesterov ? g + (double)a->momentum * m : m);
        } else if (a->stage == DTRAIN_MUON_NORMALIZE)
            a->x[i] = (float)(x / (sqrt(a->sum_squares[0]) + (double)a->epsilon));
        else
            t->value[i] =
                (float)((double)t->value[i] * (1 - (double)now.lr * (double)t->weight_decay) -
                        (double)now.lr * (double)a->scale * x);
    }
    return DTRAIN_OK;
}

/* k times the largest that is left; of equals the first. */
static dtrain_result naive_topk(dtrain_device *device, const dtrain_topk_args *a)
{
    float *x = (float *)malloc((size_t)a->count * sizeof *x);
    bool *taken = (bool *)calloc((size_t)a->count, sizeof *taken);
    (void)device;
    for (int64_t i = 0; i < a->count; i++) {
        volatile float step = a->x[i]; /* each operation is rounded */
        if (a->velocity) {
            volatile float product = a->momentum * a->velocity[i];
            step = a->velocity[i] = product + step;
        }
        if (a->residual) a->residual[i] += step;
        x[i] = a->residual ? a->residual[i] : a->x[i];
    }
    for (int64_t j = 0; j < a->k; j++) {
        int64_t best = -1;
        for (int64_t i = 0; i < a->count; i++) {
            double m = isnan(x[i]) ? 2e300 : isinf(x[i]) ? 1e300 : fabs((double)x[i]);
            double b = best < 0         ? -1
                       : isnan(x[best]) ? 2e300
                       : isinf(x[best]) ? 1e300
                                        : fabs((double)x[best]);
            if (!taken[i] && m > b) best = i;
        }
        taken[best] = true;
    }
    int64_t j = 0;
    for (int64_t i = 0; i < a->count; i++) {
        if (!taken[i]) continue;
        a->indices[j] = (int32_t)i;
        a->values[j++] = x[i];
        if (a->residual) a->residual[i] = 0;
        if (a->velocity) a->velocity[i] = 0;
    }
    free(x), free(taken);
    return DTRAIN_OK;
}
static dtrain_result naive_scatter_add(dtrain_device *device, const dtrain_scatter_add_args *a)
{
    (void)device;
    for (int64_t i = 0; i < a->k; i++) {
        if (a->indices[i] < 0 || a->indices[i] >= a->count) return DTRAIN_ERROR_DATA;
        a->out[a->indices[i]] += a->scale * a->values[i];
    }
    return DTRAIN_OK;
}

/* ---- Batch normalisation: columns of (rows, n) ---- */

static dtrain_result naive_batchnorm_moments(dtrain_device *device,
                                             const dtrain_batchnorm_moments_args *a)
{
    (void)device;
    a->sums[0] = (float)a->rows;
    for (int64_t c = 0; c < a->n; c++) {
        double mean = 0, spread = 0;
        for (int64_t r = 0; r < a->rows; r++)
            mean += naive_get(a->x, a->dtype, r * a->n + c) / (double)a->rows;
        for (int64_t r = 0; r < a->rows; r++)
            spread += pow(naive_get(a->x, a->dtype, r * a->n + c) - mean, 2);
        a->sums[1 + c] = (float)mean;
        a->sums[1 + a->n + c] = (float)spread;
    }
    return DTRAIN_OK;
}

/* All parts as one set: the mean of means weighed by rows, then the spread around it. */
static dtrain_result naive_batchnorm_statistics(dtrain_device *device,
                                                const dtrain_batchnorm_statistics_args *a)
{
    const int64_t part = 1 + 2 * a->n;
    const double m = (double)a->momentum;
    (void)device;
    for (int64_t c = 0; c < a->n; c++) {
        double rows = 0, mean = 0, spread = 0;
        for (int64_t p = 0; p < a->parts; p++) {
            rows += (double)a->all[p * part];
            mean += (double)a->all[p * part] * (double)a->all[p * part + 1 + c];
        }
        mean = rows > 0 ? mean / rows : (double)a->running_mean[c];
        for (int64_t p = 0; p < a->parts; p++)
            spread += (double)a->all[p * part + 1 + a->n + c] +
                      (double)a->all[p * part] * pow((double)a->all[p * part + 1 + c] - mean, 2);
        const double variance = rows > 0 ? spread / rows : (double)a->running_var[c];
        a->mean[c] = (float)mean;
        a->rstd[c] = (float)(1 / sqrt(variance + (double)a->epsilon));
        if (a->parts == 0) continue;
        a->inverse_count[0] = (float)(1 / rows);
        if (!a->running_mean) continue;
        a->running_mean[c] = (float)((1 - m) * (double)a->running_mean[c] + m * mean);
        a->running_var[c] =
            (float)((1 - m) * (double)a->running_var[c] + m * spread / (rows > 1 ? rows - 1 : 1));
    }
    return DTRAIN_OK;
}

static dtrain_result naive_batchnorm(dtrain_device *device, const dtrain_batchnorm_args *a)
{
    (void)device;
    for (int64_t i = 0; i < a->rows * a->n; i++) {
        const int64_t c = i % a->n;
        double y = (naive_get(a->x, a->dtype, i) - (double)a->mean[c]) * (double)a->rstd[c] *
                       (double)a->weight[c] +
                   (double)a->bias[c];
        if (a->residual) y += naive_get(a->residual, a->dtype, i);
        naive_put(a->y, a->dtype, i, a->activation && y < 0 ? 0 : y);
    }
    return DTRAIN_OK;
}

static dtrain_result naive_batchnorm_sums(dtrain_device *device,
                                          const dtrain_batchnorm_sums_args *a)
{
    (void)device;
    for (int64_t c = 0; c < a->n; c++) {
        double sum = 0, product = 0;
        for (int64_t i = c; i < a->rows * a->n; i += a->n) {
            const double h =
                (naive_get(a->x, a->dtype, i) - (double)a->mean[c]) * (double)a->rstd[c];
            double d = naive_get(a->d_y, a->dtype, i);
            if (a->activation && !(naive_get(a->y, a->dtype, i) > 0)) d = 0;
            sum += d;
            product += d * h;
            if (a->d_residual)
                naive_put(a->d_residual, a->dtype, i,
                          d + (a->accumulate ? naive_get(a->d_residual, a->dtype, i) : 0));
        }
        a->sums[c] = (float)sum;
        a->sums[a->n + c] = (float)product;
    }
    return DTRAIN_OK;
}

static dtrain_result naive_batchnorm_backward(dtrain_device *device,
                                              const dtrain_batchnorm_backward_args *a)
{
    (void)device;
    for (int64_t i = 0; i < a->rows * a->n; i++) {
        const int64_t c = i % a->n;
        const double rstd = (double)a->rstd[c];
        const double h = (naive_get(a->x, a->dtype, i) - (double)a->mean[c]) * rstd;
        double d = naive_get(a->d_y, a->dtype, i);
        if (a->activation && !(naive_get(a->y, a->dtype, i) > 0)) d = 0;
        d -= ((double)a->sums[c] + h * (double)a->sums[a->n + c]) * (double)a->inverse_count[0];
        naive_put(a->d_x, a->dtype, i,
                  (double)a->weight[c] * rstd * d +
                      (a->accumulate ? naive_get(a->d_x, a->dtype, i) : 0));
    }
    return DTRAIN_OK;
}

#include "naive_conv.h"

/* These kernels and this memory; streams and events are the plan device's, which do nothing. */
static inline const dtrain_device_ops *naive_device_ops(void)
{
    static dtrain_device_ops ops;
    ops = *device_table("plan");
    ops.name = "naive";
    ops.host_memory = true;
    ops.create = naive_create;
    ops.destroy = naive_destroy;
    ops.synchronize = naive_synchronize;
    ops.alloc = naive_alloc;
    ops.free = naive_free;
    ops.copy = naive_copy;
    ops.zero = naive_zero;
    ops.gemm = naive_gemm;
    ops.activation_backward = naive_activation_backward;
    ops.bias = naive_bias;
    ops.layernorm = naive_layernorm;
    ops.layernorm_backward = naive_layernorm_backward;
    ops.embedding = naive_embedding;
    ops.embedding_backward = naive_embedding_backward;
    ops.attention = naive_attention;
    ops.attention_backward = naive_attention_backward;
    ops.cross_entropy = naive_cross_entropy;
    ops.cross_entropy_backward = naive_cross_entropy_backward;
    ops.cross_entropy_finish = naive_cross_entropy_finish;
    ops.pointwise = naive_pointwise;
    ops.pointwise_backward = naive_pointwise_backward;
    ops.softmax = naive_softmax;
    ops.softmax_backward = naive_softmax_backward;
    ops.rotary = naive_rotary;
    ops.permute = naive_permute;
    ops.add = naive_add;
    ops.axpby = naive_axpby;
    ops.dropout = naive_dropout;
    ops.sum = naive_sum;
    ops.clip = naive_clip;
    ops.convert = naive_convert;
    ops.adamw = naive_adamw;
    ops.sgd = naive_sgd;
    ops.lion = naive_lion;
    ops.muon = naive_muon;
    ops.topk = naive_topk;
    ops.scatter_add = naive_scatter_add;
    ops.batchnorm_moments = naive_batchnorm_moments;
    ops.batchnorm_statistics = naive_batchnorm_statistics;
    ops.batchnorm = naive_batchnorm;
    ops.batchnorm_sums = naive_batchnorm_sums;
    ops.batchnorm_backward = naive_batchnorm_backward;
    ops.conv2d = naive_conv2d;
    ops.conv2d_backward = naive_conv2d_backward;
    ops.pool2d = naive_pool2d;
    ops.pool2d_backward = naive_pool2d_backward;
    return &ops;
}

#endif
