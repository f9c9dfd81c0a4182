/* Tests of flash.cuh: attention on tensor cores, forward and backward, against loops in
 * double that say how far rounding may take each element. */
#include "test.h"
#include "dtrain.h"
#include "cuda_testing.h"
#include "packed_attention.h"

enum { GUARD = 64 }; /* elements behind each output that must stay as they are */

typedef struct shape {
    int64_t batch, sequence, heads, head;
    bool causal;
    dtrain_dtype dtype; /* F32: multiplied as bf16 */
} shape;

/* What a case reads and what is expected of it. `bound` beside a result is the error that rounding of
 * P and dS to halves, and sums in fp32, can make in each element. */
typedef struct attention_case {
    shape is;
    int64_t n, tokens, rows; /* rows: batch * heads * sequence */
    void *qkv, *d_y;         /* of dtype */
    double *y, *y_bound, *lse, *d_qkv, *d_qkv_bound;
} attention_case;

static double *doubles(int64_t count)
{
    return (double *)calloc((size_t)count + 1, sizeof(double));
}

/* The number as the tensor cores see it. */
static double as_half(double x, dtrain_dtype dtype)
{
    return dtype == DTRAIN_DTYPE_F32
               ? (double)dtrain_half_to_f32(DTRAIN_DTYPE_BF16,
                                            dtrain_half_from_f32(DTRAIN_DTYPE_BF16, (float)x))
               : x;
}

static dtrain_dtype half_of(dtrain_dtype dtype)
{
    return dtype == DTRAIN_DTYPE_F32 ? DTRAIN_DTYPE_BF16 : dtype;
}

/* How far rounding of P and dS to halves (relatively, and below the smallest normal f16 absolutely), and
 * sums and exponentials in fp32, may take a result. */
typedef struct accuracy {
    double half, tiny, fine;
} accuracy;

/* ---- The oracle ---- */

/* One (batch, head) as plain matrices (sequence, head). */
typedef struct one_head {
    int64_t t, d;
    bool causal;
    double *q, *k, *v;
} one_head;

static double score(const one_head *h, int64_t i, int64_t j)
{
    double sum = 0;
    for (int64_t c = 0; c < h->d; c++) sum += h->q[i * h->d + c] * h->k[j * h->d + c];
    return sum / sqrt((double)h->d);
}

/* y (t,d), lse (t), the scores s (t,t), -infinity where not seen; size (2,t,d) = sum of p |v| and of the |v| seen. */
static void oracle_forward(const one_head *h, double *s, double *y, double *size, double *lse)
{
    for (int64_t i = 0; i < h->t; i++) {
        double top = -INFINITY, sum = 0;
        for (int64_t j = 0; j < h->t; j++) {
            s[i * h->t + j] = h->causal && j > i ? -INFINITY : score(h, i, j);
            top = fmax(top, s[i * h->t + j]);
        }
        for (int64_t j = 0; j < h->t; j++) sum += exp(s[i * h->t + j] - top);
        lse[i] = top + log(sum);
        for (int64_t c = 0; c < h->d; c++)
            y[i * h->d + c] = size[i * h->d + c] = size[(h->t + i) * h->d + c] = 0;
        for (int64_t j = 0; j < (h->causal ? i + 1 : h->t); j++) {
            const double p = exp(s[i * h->t + j] - lse[i]);
            for (int64_t c = 0; c < h->d; c++) {
                y[i * h->d + c] += p * h->v[j * h->d + c];
                size[i * h->d + c] += p * fabs(h->v[j * h->d + c]);
                size[(h->t + i) * h->d + c] += fabs(h->v[j * h->d + c]);
            }
        }
    }
}

/* d (3, t, d) and its bound. y and exact_d_y are what D is made of, d_y what the tensor cores multiply. */
static void oracle_backward(const one_head *h, const double *s, const double *y, const double *lse,
                            const double *d_y, const double *exact_d_y, accuracy a, double *d,
                            double *bound)
{
    const int64_t t = h->t, w = h->d;
    const double scale = 1 / sqrt((double)w);
    for (int64_t i = 0; i < t; i++) {
        double dot = 0, dot_size = 0;
        for (int64_t c = 0; c < w; c++) {
            dot += y[i * w + c] * exact_d_y[i * w + c];
            dot_size += fabs(y[i * w + c] * exact_d_y[i * w + c]);
        }
        for (int64_t j = 0; j < t; j++) {
            const double p = exp(s[i * t + j] - lse[i]);
            double dp = 0, dp_size = 0, ds, ds_error;
            if (h->causal && j > i) break;
            for (int64_t c = 0; c < w; c++) {
                dp += d_y[i * w + c] * h->v[j * w + c];
                dp_size += fabs(d_y[i * w + c] * h->v[j * w + c]);
            }
            ds = p * (dp - dot) * scale;
            ds_error =
                fabs(ds) * (a.half + a.fine) + (a.fine * p * (dp_size + dot_size) + a.tiny) * scale;
            for (int64_t c = 0; c < w; c++) {
                d[i * w + c] += ds * h->k[j * w + c];
                d[(t + j) * w + c] += ds * h->q[i * w + c];
                d[(2 * t + j) * w + c] += p * d_y[i * w + c];
                bound[i * w + c] += ds_error * fabs(h->k[j * w + c]);
                bound[(t + j) * w + c] += ds_error * fabs(h->q[i * w + c]);
                bound[(2 * t + j) * w + c] +=
                    (p * (a.half + a.fine) + a.tiny) * fabs(d_y[i * w + c]);
            }
        }
    }
}

/* Where element (part, batch, head, t, c) of a packed (tokens, parts, heads, head) lies. */
static int64_t packed(const shape *is, int64_t parts, int64_t part, int64_t pair, int64_t t,
                      int64_t c)
{
    const int64_t b = pair / is->heads, h = pair % is->heads;
    return (((b * is->sequence + t) * parts + part) * is->heads + h) * is->head + c;
}

static void expect_head(attention_case *it, int64_t pair, bool backward)
{
    const shape *is = &it->is;
    const int64_t t = is->sequence, w = is->head, count = t * w;
    const double store = gpu_rounding(is->dtype);
    accuracy a = {gpu_rounding(half_of(is->dtype)), is->dtype == DTRAIN_DTYPE_F16 ? 3e-8 : 0, 0};
    one_head h = {t, w, is->causal, doubles(count), doubles(count), doubles(count)};
    double *parts[3] = {h.q, h.k, h.v}, *s = doubles(t * t), *y = doubles(count),
           *size = doubles(2 * count);
    double *d_y = doubles(count), *exact_d_y = doubles(count), *d = doubles(3 * count);
    double *bound = doubles(3 * count), *lse = it->lse + pair * t, top = 0;
    for (int64_t i = 0; i < 3 * count; i++) {
        const int64_t at = packed(is, 3, i / count, pair, i % count / w, i % w);
        parts[i / count][i % count] = as_half(gpu_get(it->qkv, at, is->dtype), is->dtype);
    }
    oracle_forward(&h, s, y, size, lse);
    for (int64_t i = 0; i < t * t; i++) top = isfinite(s[i]) ? fmax(top, fabs(s[i])) : top;
    a.fine = 4e-7 * (8 + top);
    for (int64_t i = 0; i < count; i++) {
        const int64_t at = packed(is, 1, 0, pair, i / w, i % w);
        it->y[at] = y[i];
        it->y_bound[at] =
            (a.half + a.fine) * size[i] + a.tiny * size[count + i] + store * fabs(y[i]);
        exact_d_y[i] = gpu_get(it->d_y, at, is->dtype);
        d_y[i] = as_half(exact_d_y[i], is->dtype);
        gpu_set(&y[i], 0, is->dtype, (float)y[i]); /* the backward pass gets y as it is stored */
        y[i] = gpu_get(&y[i], 0, is->dtype);
    }
    if (backward) oracle_backward(&h, s, y, lse, d_y, exact_d_y, a, d, bound);
    for (int64_t i = 0; backward && i < 3 * count; i++) {
        const int64_t at = packed(is, 3, i / count, pair, i % count / w, i % w);
        it->d_qkv[at] = d[i];
        it->d_qkv_bound[at] = bound[i] + store * fabs(d[i]);
    }
    free(h.q), free(h.k), free(h.v), free(s), free(y), free(size), free(d_y), free(exact_d_y),
        free(d), free(bound);
}

/* ---- A case: made, run, compared, freed ---- */

/* Noise; later keys are `growth` times larger per tile of 64, and all of it q_scale times. */
static attention_case make_case(shape is, float q_scale, float growth, bool backward)
{
    attention_case it;
    memset(&it, 0, sizeof it);
    it.is = is;
    it.n = is.heads * is.head;
    it.tokens = is.batch * is.sequence;
    it.rows = it.tokens * is.heads;
    it.qkv = gpu_noise(it.tokens * 3 * it.n, is.dtype, 1, 1);
    it.d_y = gpu_noise(it.tokens * it.n, is.dtype, 2, 1);
    for (int64_t i = 0; i < it.tokens * 3 * it.n; i++) {
        const int64_t part = i / it.n % 3, t = i / (3 * it.n) % is.sequence;
        const double factor = part == 0   ? (double)q_scale
                              : part == 1 ? pow((double)growth, (double)(t / 64))
                                          : 1;
        gpu_set(it.qkv, i, is.dtype, (float)(factor * gpu_get(it.qkv, i, is.dtype)));
    }
    it.y = doubles(it.tokens * it.n);
    it.y_bound = doubles(it.tokens * it.n);
    it.lse = doubles(it.rows);
    it.d_qkv = doubles(it.tokens * 3 * it.n);
    it.d_qkv_bound = doubles(it.tokens * 3 * it.n);
    for (int64_t pair = 0; pair < is.batch * is.heads; pair++) expect_head(&it, pair, backward);
    return it;
}

static void free_case(attention_case *it)
{
    free(it->qkv), free(it->d_y), free(it->y), free(it->y_bound);
    free(it->lse), free(it->d_qkv), free(it->d_qkv_bound);
}

/* Results on the host, each followed by its guard. */
typedef struct results {
    char *y, *d_qkv;
    float *lse;
} results;

static void free_results(results *r) { free(r->y), free(r->d_qkv), free(r->lse); }

static void *with_guard(int64_t count, size_t element)
{
    char *memory = (char *)malloc(((size_t)count + GUARD) * element);
    memset(memory, 0x5a, ((size_t)count + GUARD) * element);
    return memory;
}

static void check_guard(const char *what, const void *memory, int64_t count, size_t element)
{
    const char *behind = (const char *)memory + (size_t)count * element;
    for (size_t i = 0; i < GUARD * element; i++)
        if (behind[i] != 0x5a) {
            CHECK_MSG(0, "%s: written behind its end", what);
            return;
        }
}

static packed_shape packed_of(const shape *is)
{
    const packed_shape packed = {is->batch, is->sequence, is->heads, is->heads,
                                 is->head,  is->causal,   is->dtype};
    return packed;
}

static dtrain_result run_forward(const attention_case *it, results *out)
{
    const shape *is = &it->is;
    const size_t element = dtrain_dtype_bytes(is->dtype);
    const size_t y_bytes = ((size_t)(it->tokens * it->n) + GUARD) * element,
                 lse_bytes = ((size_t)it->rows + GUARD) * 4;
    dtrain_result result;
    out->y = (char *)with_guard(it->tokens * it->n, element);
    out->lse = (float *)with_guard(it->rows, sizeof(float));
    const void *qkv = gpu_give(it->qkv, (size_t)(it->tokens * 3 * it->n) * element, 0);
    void *y = gpu_give(out->y, y_bytes, 0), *lse = gpu_give(out->lse, lse_bytes, 0);
    const dtrain_attention_args args = packed_attention(packed_of(is), qkv, y, lse);
    result = gpu->ops->attention(gpu, &args);
    if (result != DTRAIN_OK) return result;
    gpu_read(out->y, args.y, y_bytes);
    gpu_read(out->lse, args.lse, lse_bytes);
    check_guard("y", out->y, it->tokens * it->n, element);
    check_guard("lse", out->lse, it->rows, sizeof(float));
    return DTRAIN_OK;
}

/* From the oracle's y and lse, so that it does not matter what the forward kernel did. */
static dtrain_result run_backward(const attention_case *it, results *out)
{
    const shape *is = &it->is;
    const size_t element = dtrain_dtype_bytes(is->dtype),
                 bytes = (size_t)(it->tokens * it->n) * element;
    const size_t d_bytes = 3 * bytes + GUARD * element;
    char *y = (char *)malloc(bytes + 1);
    float *lse = (float *)malloc((size_t)it->rows * sizeof(float) + 1);
    dtrain_result result;
    for (int64_t i = 0; i < it->tokens * it->n; i++) gpu_set(y, i, is->dtype, (float)it->y[i]);
    for (int64_t i = 0; i < it->rows; i++) lse[i] = (float)it->lse[i];
    out->d_qkv = (char *)with_guard(it->tokens * 3 * it->n, element);
    const void *qkv = gpu_give(it->qkv, 3 * bytes, 0), *given_y = gpu_give(y, bytes, 0);
    const void *given_lse = gpu_give(lse, (size_t)it->rows * sizeof(float), 0);
    const void *d_y = gpu_give(it->d_y, bytes, 0);
    void *d_qkv = gpu_give(out->d_qkv, d_bytes, 0);
    const dtrain_attention_backward_args args =
        packed_attention_backward(packed_of(is), qkv, given_y, given_lse, d_y, d_qkv);
    free(y), free(lse);
    result = gpu->ops->attention_backward(gpu, &args);
    if (result != DTRAIN_OK) return result;
    gpu_read(out->d_qkv, d_qkv, d_bytes);
    check_guard("d_qkv", out->d_qkv, it->tokens * 3 * it->n, element);
    return DTRAIN_OK;
}

static void compare(const attention_case *it, const char *what, const void *got, const double *want,
                    const double *bound, int64_t count)
{
    const shape *is = &it->is;
    for (int64_t i = 0; i < count; i++) {
        const double x = gpu_get(got, i, is->dtype),
                     allowed = bound[i] + (is->dtype == DTRAIN_DTYPE_F16 ? 6e-8 : 1e-30);
        if (fabs(x - want[i]) <= allowed) continue;
        CHECK_MSG(0,
                  "%s (batch %d, sequence %d, heads %d, head %d, %s, %s): element %lld is %.9g, "
                  "expected %.9g +- %.2g",
                  what, (int)is->batch, (int)is->sequence, (int)is->heads, (int)is->head,
                  is->causal ? "causal" : "full", dtrain_dtype_name(is->dtype), (long long)i, x,
                  want[i], allowed);
        return;
    }
    CHECK(1);
}

static void compare_all(const attention_case *it, const results *got, bool backward)
{
    compare(it, "y", got->y, it->y, it->y_bound, it->tokens * it->n);
    for (int64_t i = 0; i < it->rows; i++)
        if (!test_close((double)got->lse[i], it->lse[i], 2e-6)) {
            CHECK_MSG(0, "lse: row %lld is %.9g, expected %.9g", (long long)i, (double)got->lse[i],
                      it->lse[i]);
            break;
        }
    if (backward)
        compare(it, "d_qkv", got->d_qkv, it->d_qkv, it->d_qkv_bound, it->tokens * 3 * it->n);
}

static void open_bf16_math(void)
{
    dtrain_device_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.math = DTRAIN_MATH_BF16;
    CHECK_MSG(dtrain_device_create(dtrain_cuda_device_ops(), &desc, &gpu) == DTRAIN_OK, "%s",
              dtrain_last_error());
    if (!gpu) exit(1);
}

static void check_case(shape is, float q_scale, float growth)
{
    attention_case it = make_case(is, q_scale, growth, true);
    results got = {NULL, NULL, NULL};
    CHECK_MSG(run_forward(&it, &got) == DTRAIN_OK && run_backward(&it, &got) == DTRAIN_OK, "%s",
              dtrain_last_error());
    compare_all(&it, &got, true);
    gpu_release();
    free_results(&got);
    free_case(&it);
}

/* ---- Tests ---- */

/* The oracle's gradient is the slope of its forward pass. */
static void test_oracle(void)
{
    enum { T = 5, W = 4 };
    for (int causal = 0; causal < 2; causal++) {
        double qkv[3 * T * W], d_y[T * W], y[T * W], size[2 * T * W], lse[T], s[T * T],
            d[3 * T * W] = {0}, bound[3 * T * W] = {0};
        const double step = 1e-5;
        const accuracy exact = {0, 0, 0};
        one_head h = {T, W, causal != 0, qkv, qkv + T * W, qkv + 2 * T * W};
        for (int i = 0; i < 3 * T * W; i++)
            qkv[i] = (double)dtrain_random_normal(5, 1, (uint64_t)i);
        for (int i = 0; i < T * W; i++) d_y[i] = (double)dtrain_random_normal(5, 2, (uint64_t)i);
        oracle_forward(&h, s, y, size, lse);
        oracle_backward(&h, s, y, lse, d_y, d_y, exact, d, bound);
        for (int i = 0; i < 3 * T * W; i++) {
            double change = 0;
            for (int side = -1; side <= 1; side += 2) {
                qkv[i] += side * step;
                oracle_forward(&h, s, y, size, lse);
                for (int j = 0; j < T * W; j++) change += side * y[j] * d_y[j];
                qkv[i] -= side * step;
            }
            CHECK_CLOSE(change / (2 * step), d[i], 1e-8);
        }
    }
}

static const int64_t sequences[] = {1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200};

/* Every length, causal and not; type, heads and batch take turns. */
static void check_sequences(int64_t head)
{
    static const dtrain_dtype dtypes[] = {DTRAIN_DTYPE_BF16, DTRAIN_DTYPE_F16, DTRAIN_DTYPE_F32};
    open_bf16_math();
    EACH(i, sequences)
    for (int causal = 0; causal < 2; causal++) {
        const int64_t turn = (int64_t)i + causal;
        shape is = {1, sequences[i], 1, head, causal != 0, dtypes[turn % 3]};
        if (is.sequence < 100) is.heads = 1 + turn % 3, is.batch = 1 + turn % 2;
        check_case(is, 1, 1);
    }
    gpu_close();
}
static void test_head_32(void) { check_sequences(32); }
static void test_head_64(void) { check_sequences(64); }
static void test_head_80(void) { check_sequences(80); }
static void test_head_96(void) { check_sequences(96); }
static void test_head_128(void) { check_sequences(128); }

/* Several heads and batches, each type, more than one tile of queries. */
static void test_types(void)
{
    static const dtrain_dtype dtypes[] = {DTRAIN_DTYPE_BF16, DTRAIN_DTYPE_F16, DTRAIN_DTYPE_F32};
    open_bf16_math();
    EACH(i, dtypes)
    for (int64_t head = 32; head <= 64; head += 32) {
        shape is = {2, 140, 3 - (int64_t)i % 2, head, i != 1, dtypes[i]};
        check_case(is, 1, 1);
    }
    gpu_close();
}

/* Scores in the hundreds; each tile's keys 4 times larger, or smaller, than those before: the running
 * maximum has to move, and must not move back. */
static void test_magnitudes(void)
{
    static const float scales[] = {1e-3f, 8, 16, 16}, growths[] = {1, 4, 4, 0.25f};
    gpu_open();
    EACH(i, scales)
    for (int causal = 0; causal < 2; causal++) {
        shape is = {1, 200, 1, 64, causal != 0, DTRAIN_DTYPE_BF16};
        check_case(is, scales[i], growths[i]);
    }
    shape wide = {1, 130, 1, 128, false, DTRAIN_DTYPE_F16};
    check_case(wide, 20, 3);
    gpu_close();
}

/* Scores so far below 0 that exp(-lse) is infinite: keys below the end of the sequence, whose score is
 * 0, must not come in. */
static void test_negative_scores(void)
{
    attention_case it;
    results got = {NULL, NULL, NULL};
    shape is = {1, 70, 1, 64, false, DTRAIN_DTYPE_BF16};
    gpu_open();
    it = make_case(is, 1, 1, false);
    for (int64_t i = 0; i < it.tokens * 3 * it.n; i++)
        if (i / it.n % 3 < 2) gpu_set(it.qkv, i, is.dtype, i / it.n % 3 ? -4.0f : 4.0f);
    expect_head(&it, 0, true);
    CHECK_CLOSE(it.lse[0], -128 + log(70), 1e-9);
    CHECK(run_forward(&it, &got) == DTRAIN_OK && run_backward(&it, &got) == DTRAIN_OK);
    compare_all(&it, &got, true);
    gpu_close();
    free_results(&got);
    free_case(&it);
}

/* More pairs than run together: every pair once, in the right place. */
static void test_many_pairs(void)
{
    attention_case it;
    results got = {NULL, NULL, NULL};
    shape is = {65, 64, 8, 128, true, DTRAIN_DTYPE_BF16};
    gpu_open();
    it = make_case(is, 1, 1, false);
    CHECK_MSG(run_forward(&it, &got) == DTRAIN_OK, "%s", dtrain_last_error());
    compare_all(&it, &got, false);
    gpu_close();
    free_results(&got);
    free_case(&it);
}

/* The same bits whatever the order of threads and blocks. */
static void test_orders(void)
{
    static const shape shapes[] = {{1, 140, 2, 64, true, DTRAIN_DTYPE_BF16},
                                   {1, 70, 1, 80, false, DTRAIN_DTYPE_F16},
                                   {1, 140, 1, 128, true, DTRAIN_DTYPE_F32}};
    open_bf16_math();
    EACH(i, shapes)
    {
        attention_case it = make_case(shapes[i], 2, 1, true);
        const size_t bytes = (size_t)(it.tokens * it.n) * dtrain_dtype_bytes(shapes[i].dtype);
        results first = {NULL, NULL, NULL};
        CHECK(run_forward(&it, &first) == DTRAIN_OK && run_backward(&it, &first) == DTRAIN_OK);
        compare_all(&it, &first, true);
        EACH_ORDER(order)
        {
            results again = {NULL, NULL, NULL};
            CHECK(run_forward(&it, &again) == DTRAIN_OK && run_backward(&it, &again) == DTRAIN_OK);
            CHECK_MSG(memcmp(first.y, again.y, bytes) == 0, "y in order %d", order);
            CHECK_MSG(memcmp(first.lse, again.lse, (size_t)it.rows * 4) == 0, "lse in order %d",
                      order);
            CHECK_MSG(memcmp(first.d_qkv, again.d_qkv, 3 * bytes) == 0, "d_qkv in order %d", order);
            free_results(&again);
            gpu_release();
        }
        free_results(&first);
        free_case(&it);
    }
    gpu_close();
}

/* A NaN in query 20 stays in its row; one in key 30 reaches the rows that see it. */
static void test_nan(void)
{
    enum { T = 80, N = 64 };
    for (int part = 0; part < 2; part++) {
        shape is = {1, T, 1, N, true, DTRAIN_DTYPE_BF16};
        attention_case it;
        results got = {NULL, NULL, NULL};
        gpu_open();
        it = make_case(is, 1, 1, false);
        gpu_set(it.qkv, packed(&is, 3, part, 0, part ? 30 : 20, 5), is.dtype,
                part ? NAN : INFINITY);
        CHECK(run_forward(&it, &got) == DTRAIN_OK);
        for (int64_t t = 0; t < T; t++) {
            const bool reached = part ? t >= 30 : t == 20;
            const double y = gpu_get(got.y, t * N, is.dtype);
            CHECK_MSG((isnan(y) != 0) == reached, "row %d of part %d is %g", (int)t, part, y);
            CHECK(isfinite(got.lse[t]) != reached);
        }
        gpu_close();
        free_results(&got);
        free_case(&it);
    }
}

/* What these kernels do not take goes through matrix products, with the same results. */
static void test_paths(void)
{
    static const struct {
        int64_t head;
        dtrain_dtype dtype;
        uint32_t math;
        size_t shift;
        bool flash;
    } cases[] = {{64, DTRAIN_DTYPE_BF16, DTRAIN_MATH_FP32, 0, true},
                 {64, DTRAIN_DTYPE_F32, DTRAIN_MATH_BF16, 0, true},
                 {64, DTRAIN_DTYPE_F32, DTRAIN_MATH_FP32, 0, false},
                 {48, DTRAIN_DTYPE_BF16, DTRAIN_MATH_FP32, 0, false},
                 {64, DTRAIN_DTYPE_BF16, DTRAIN_MATH_FP32, 2, false},
                 {64, DTRAIN_DTYPE_F32, DTRAIN_MATH_TF32, 0, false}};
    EACH(i, cases)
    {
        const shape is = {1, 20, 2, cases[i].head, true, cases[i].dtype};
        const size_t element = dtrain_dtype_bytes(is.dtype), shift = cases[i].shift;
        dtrain_device_desc desc;
        attention_case it;
        memset(&desc, 0, sizeof desc);
        desc.math = cases[i].math;
        CHECK(dtrain_device_create(dtrain_cuda_device_ops(), &desc, &gpu) == DTRAIN_OK);
        it = make_case(is, 1, 1, false);
        const size_t bytes = (size_t)(it.tokens * it.n) * element;
        char *y = (char *)malloc(bytes);
        const void *qkv = gpu_give(it.qkv, 3 * bytes, shift);
        void *of_y = gpu_take(bytes, shift), *lse = gpu_take((size_t)it.rows * sizeof(float), 0);
        const dtrain_attention_args args = packed_attention(packed_of(&is), qkv, of_y, lse);
#ifdef DTRAIN_CUDA_EMULATION
        dtrain_emulation_counters before, after;
        dtrain_emulation_get_counters(&before);
#endif
        CHECK_MSG(gpu->ops->attention(gpu, &args) == DTRAIN_OK, "case %d: %s", (int)i,
                  dtrain_last_error());
        gpu_read(y, args.y, bytes);
#ifdef DTRAIN_CUDA_EMULATION
        dtrain_emulation_get_counters(&after);
        CHECK_MSG((after.matmuls == before.matmuls) == cases[i].flash,
                  "case %d took the other path", (int)i);
#endif
        CHECK(gpu_near("y", y, it.y, it.tokens * it.n, is.dtype, 0.02));
        gpu_close();
        free(y);
        free_case(&it);
    }
}

#ifdef DTRAIN_CUDA_EMULATION
/* A GPU without bf16 mma or without the shared memory takes the other path too. */
static void test_old_gpu(void)
{
    const shape is = {1, 20, 1, 64, true, DTRAIN_DTYPE_F16};
    dtrain_emulation_counters before, after;
    results got = {NULL, NULL, NULL};
    dtrain_emulation_set_capability(7, 5);
    gpu_open();
    attention_case it = make_case(is, 1, 1, false);
    dtrain_emulation_get_counters(&before);
    CHECK_MSG(run_forward(&it, &got) == DTRAIN_OK, "%s", dtrain_last_error());
    dtrain_emulation_get_counters(&after);
    CHECK(after.matmuls > before.matmuls);
    gpu_close();
    free_results(&got);
    free_case(&it);
}
#endif

/* Nothing to do is done without looking at the pointers. */
static void test_empty(void)
{
    gpu_open();
    for (int batch = 0; batch < 2; batch++) {
        const packed_shape is = {batch, batch ? 0 : 8, 2, 2, 64, true, DTRAIN_DTYPE_BF16};
        const dtrain_attention_args args = packed_attention(is, NULL, NULL, NULL);
        const dtrain_attention_backward_args back =
            packed_attention_backward(is, NULL, NULL, NULL, NULL, NULL);
        CHECK_MSG(gpu->ops->attention(gpu, &args) == DTRAIN_OK, "%s", dtrain_last_error());
        CHECK_MSG(gpu->ops->attention_backward(gpu, &back) == DTRAIN_OK, "%s", dtrain_last_error());
    }
    CHECK(gpu->ops->synchronize(gpu) == DTRAIN_OK);
    gpu_close();
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    RUN(test_oracle);
    if (gpu_missing()) {
        SKIP(test_cuda_flash, gpu_missing());
        return test_summary();
    }
    RUN(test_head_32);
    RUN(test_head_64);
    RUN(test_head_80);
    RUN(test_head_96);
    RUN(test_head_128);
    RUN(test_types);
    RUN(test_magnitudes);
    RUN(test_negative_scores);
    RUN(test_many_pairs);
    RUN(test_orders);
    RUN(test_nan);
    RUN(test_paths);
#ifdef DTRAIN_CUDA_EMULATION
    RUN(test_old_gpu);
#endif
    RUN(test_empty);
    return test_summary();
}
