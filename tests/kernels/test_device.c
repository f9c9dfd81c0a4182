/* Tests of data types and of the CPU and plan devices: every kernel against plain double-precision
 * loops, for every instruction set this machine runs, with 1 to 4 threads whose bits must agree.
 * A case prints the instruction set it failed on. */
#define DTRAIN__SMALL (-1) /* threads share even the smallest job */
#include "core/random.c"
#include "core/result.c"
#include "device/cpu/cpu.c"
#include "instances.h"
#include "dtrain.h"

#include "test.h"
#include "device_table.h"
#include "packed_attention.h"
#include "allocator.h"

static const char *variant = "";
#undef CHECK
#define CHECK(condition) CHECK_MSG(condition, "[%s] %s", variant, #condition)

#define THREADS 4
static dtrain_device *devices[THREADS + 1]; /* [t] has t threads */

static void *grab(size_t bytes)
{
    void *memory = malloc(bytes + 64);
    memset(memory, 0xff, bytes + 64); /* NaN */
    return memory;
}
static float *floats(int64_t count) { return (float *)grab((size_t)count * sizeof(float)); }
static double *doubles(int64_t count)
{
    return (double *)calloc((size_t)count + 1, sizeof(double));
}

static uint64_t noise_stream;
static float *noise(int64_t count, float scale)
{
    float *x = floats(count);
    dtrain__random_fill(7, ++noise_stream, 0, count, true, scale, x);
    return x;
}

static bool same(const void *a, const void *b, int64_t count)
{
    return memcmp(a, b, (size_t)count * sizeof(float)) == 0;
}

/* |got - want| <= tolerance * (1 + |want|) everywhere, and the guard behind it is untouched. */
static bool close_to(const float *got, const double *want, int64_t count, double tolerance)
{
    for (int64_t i = 0; i < count; i++)
        if (!isfinite(got[i]) || fabs(got[i] - want[i]) > tolerance * (1 + fabs(want[i]))) {
            if (test_shared->failed_checks < 20)
                fprintf(stderr, "  element %lld of %lld: got %.9g want %.9g\n", (long long)i,
                        (long long)count, (double)got[i], want[i]);
            return false;
        }
    return dtrain__f32_bits(got[count]) == 0xffffffffu;
}

static const int64_t sizes[] = {1, 3, 7, 64, 65, 257};
static const int64_t row_counts[] = {1, 2, 3, 4, 5, 33, 130};
#define EACH(i, array) for (size_t i = 0; i < sizeof array / sizeof array[0]; i++)

/* ---- S23 ---- */

static void test_bf16_all(void)
{
    bool same_bits = true, nan = true;
    for (uint32_t b = 0; b < 65536; b++) {
        const float f = dtrain_half_to_f32(DTRAIN_DTYPE_BF16, (uint16_t)b);
        const bool is_nan = (b & 0x7f80) == 0x7f80 && (b & 0x7f);
        if (is_nan)
            nan = nan && !isfinite(f) && dtrain_half_from_f32(DTRAIN_DTYPE_BF16, f) == (b | 0x40);
        else same_bits = same_bits && dtrain_half_from_f32(DTRAIN_DTYPE_BF16, f) == b;
    }
    CHECK(same_bits);
    CHECK(nan);
}

/* Oracle: value of a half as a double, from the definition. */
static double half_value(uint32_t b)
{
    const int e = (int)(b >> 10 & 31), m = (int)(b & 1023);
    const double v = e ? ldexp(1024 + m, e - 25) : ldexp(m, -24);
    return b & 0x8000 ? -v : v;
}

static void test_f16_all(void)
{
    bool exact = true, back = true, nan = true;
    for (uint32_t b = 0; b < 65536; b++) {
        const float f = dtrain_half_to_f32(DTRAIN_DTYPE_F16, (uint16_t)b);
        if ((b & 0x7c00) == 0x7c00 && (b & 0x3ff)) {
            nan = nan && (dtrain__f32_bits(f) & 0x7fffffffu) > 0x7f800000u &&
                  (dtrain__f32_bits(f) >> 31) == (b >> 15) &&
                  dtrain_half_from_f32(DTRAIN_DTYPE_F16, f) == (b | 0x200);
            continue;
        }
        if ((b & 0x7c00) != 0x7c00) exact = exact && (double)f == half_value(b);
        back = back && dtrain_half_from_f32(DTRAIN_DTYPE_F16, f) == b;
    }
    CHECK(exact);
    CHECK(back);
    CHECK(nan);
    CHECK(dtrain__f32_bits(dtrain_half_to_f32(DTRAIN_DTYPE_F16, 0xfc00)) == 0xff800000u);
}

/* Nearest, ties to even, by search: `low` is the largest half (or bf16) not above |x|. */
static uint16_t round_oracle(float x, bool bf16)
{
    const uint32_t bits = dtrain__f32_bits(x), sign = bits >> 16 & 0x8000;
    const double v = fabs((double)x);
    const uint32_t infinity = bf16 ? 0x7f80 : 0x7c00;
    uint32_t low = 0, high = infinity;
    while (high - low > 1) {
        const uint32_t mid = (low + high) / 2;
        const double m =
            bf16 ? (double)dtrain_half_to_f32(DTRAIN_DTYPE_BF16, (uint16_t)mid) : half_value(mid);
        if (m <= v) low = mid;
        else high = mid;
    }
    const double a =
        bf16 ? (double)dtrain_half_to_f32(DTRAIN_DTYPE_BF16, (uint16_t)low) : half_value(low);
    const double b =
        bf16 ? (high == infinity ? ldexp(1, 128)
                                 : (double)dtrain_half_to_f32(DTRAIN_DTYPE_BF16, (uint16_t)high))
             : (high == infinity ? 65536 : half_value(high));
    if (v >= b) return (uint16_t)(sign | high);
    const bool up = v - a > b - v || (v - a == b - v && (low & 1));
    return (uint16_t)(sign | (up ? high : low));
}

static void test_rounding(void)
{
    bool bf16 = true, f16 = true;
    for (uint64_t i = 0; i < 400000; i++) {
        uint32_t words[4];
        dtrain__philox(1, 2, i, words);
        uint32_t bits = words[0];
        if (i % 4 == 1) bits = (bits & 0xffffe000u) | 0x1000u; /* fp16 ties */
        if (i % 4 == 2) bits = (bits & 0xffff0000u) | 0x8000u; /* bf16 ties */
        if (i % 4 == 3) bits = (bits & 0x87ffffffu) | 0x30000000u | (words[1] & 0x08000000u);
        const float x = dtrain__f32_from_bits(bits);
        if (!isfinite(x)) continue;
#ifdef __FAST_MATH__
        if (!(bits & 0x7f800000u)) continue; /* the oracle's (double)x flushes denormals */
#endif
        bf16 = bf16 && dtrain_half_from_f32(DTRAIN_DTYPE_BF16, x) == round_oracle(x, true);
        f16 = f16 && dtrain_half_from_f32(DTRAIN_DTYPE_F16, x) == round_oracle(x, false);
    }
    CHECK(bf16);
    CHECK(f16);
    CHECK(dtrain_half_from_f32(DTRAIN_DTYPE_F16, 65519.996f) == 0x7bff &&
          dtrain_half_from_f32(DTRAIN_DTYPE_F16, 65520) == 0x7c00);
    CHECK(dtrain_half_from_f32(DTRAIN_DTYPE_BF16, FLT_MAX) == 0x7f80);
    CHECK(dtrain_half_from_f32(DTRAIN_DTYPE_F16, -1e-30f) == 0x8000);
    CHECK(dtrain__is_finite(FLT_MAX) && !dtrain__is_finite(dtrain__f32_from_bits(0xff800000u)) &&
          !dtrain__is_finite(dtrain__f32_from_bits(0x7f800001u)));
    CHECK(dtrain_dtype_bytes(DTRAIN_DTYPE_BF16) == 2 && dtrain_dtype_bytes((dtrain_dtype)99) == 0);
    CHECK(!strcmp(dtrain_dtype_name(DTRAIN_DTYPE_I64), "i64") &&
          !strcmp(dtrain_dtype_name((dtrain_dtype)9), "?"));
}

static void test_philox(void)
{
    static const uint32_t zeros[4] = {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8};
    static const uint32_t ones[4] = {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd};
    static const uint32_t pi[4] = {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1};
    uint32_t out[4];
    dtrain__philox(0, 0, 0, out);
    CHECK(!memcmp(out, zeros, sizeof out));
    dtrain__philox(~(uint64_t)0, ~(uint64_t)0, ~(uint64_t)0, out);
    CHECK(!memcmp(out, ones, sizeof out));
    dtrain__philox(0x299f31d0a4093822u, 0x0370734413198a2eu, 0x85a308d3243f6a88u, out);
    CHECK(!memcmp(out, pi, sizeof out));
}

static void test_random(void)
{
    const int64_t n = 1000000;
    double sum = 0, square = 0, cube = 0, fourth = 0, product = 0, usum = 0, usquare = 0;
    float last = 0, top = 0, utop = 0, ubottom = 1;
    bool finite = true, fill = true;
    float *x = floats(n), *u = floats(n);
    dtrain__random_fill(42, 3, 5, n, true, 1, x);
    dtrain__random_fill(42, 3, 5, n, false, 1, u);
    for (int64_t i = 0; i < n; i++) {
        u[i] = (u[i] + 1) / 2; /* from [-1, 1) to [0, 1), exactly */
        const double z = x[i];
        sum += z;
        square += z * z;
        cube += z * z * z;
        fourth += z * z * z * z;
        product += z * last;
        last = x[i];
        finite = finite && isfinite(x[i]);
        if (fabsf(x[i]) > top) top = fabsf(x[i]);
        usum += u[i];
        usquare += (double)u[i] * u[i];
        if (u[i] > utop) utop = u[i];
        if (u[i] < ubottom) ubottom = u[i];
        if (i % 977 == 0)
            fill = fill && x[i] == dtrain_random_normal(42, 3, (uint64_t)i + 5) &&
                   u[i] == dtrain_random_uniform(42, 3, (uint64_t)i + 5);
    }
    CHECK(finite && fill);
    CHECK(fabs(sum / (double)n) < 0.004 && fabs(square / (double)n - 1) < 0.006);
    CHECK(fabs(cube / (double)n) < 0.015 && fabs(fourth / (double)n - 3) < 0.04 &&
          fabs(product / (double)n) < 0.004);
    CHECK(top > 4.3f && top < 6.8f);
    CHECK(fabs(usum / (double)n - 0.5) < 0.0015 && fabs(usquare / (double)n - 1.0 / 3) < 0.0015);
    CHECK(utop < 1 && utop > 0.99999f && ubottom >= 0);
    bool pairs = true; /* against libm */
    for (uint32_t i = 0; i < 100000; i++) {
        uint32_t w[4];
        float z[2];
        dtrain__philox(9, 9, i, w);
        if (i == 0) w[0] = 0, w[1] = 0;
        if (i == 1) w[0] = 0xffffffffu, w[1] = 0xffffffffu;
        if (i < 40 && i > 1) w[1] = (uint32_t)(i / 5) * 0x20000000u + i % 5 - 2;
        dtrain__normal_pair(w[0], w[1], z);
        const double r = sqrt(-2 * log((w[0] + 0.5) / 4294967296.0));
        const double t = w[1] * (6.283185307179586476925 / 4294967296.0);
        pairs = pairs && fabs(z[0] - r * cos(t)) < 5e-7 && fabs(z[1] - r * sin(t)) < 5e-7;
    }
    CHECK(pairs);
    free(x);
    free(u);
}

/* ---- Elementwise ---- */

static void test_add_axpby(void)
{
    EACH(i, sizes)
    {
        const int64_t n = sizes[i] * 7;
        float *x = noise(n, 1), *y = noise(n, 1);
        double *sum = doubles(n), *scaled = doubles(n), *mixed = doubles(n);
        for (int64_t j = 0; j < n; j++) {
            sum[j] = (double)x[j] + y[j];
            scaled[j] = 1.5 * x[j];
            mixed[j] = 1.5 * x[j] - 0.25 * y[j];
        }
        for (int t = 1; t <= THREADS; t++) {
            dtrain_device *d = devices[t];
            float *out = floats(n), *z = floats(n);
            const dtrain_add_args add = {n, x, y, out, DTRAIN_DTYPE_F32, DTRAIN_DTYPE_F32};
            const dtrain_axpby_args scale = {n,   false, 1.5f, 9, x, z, false, DTRAIN_DTYPE_F32,
                                             NULL};
            CHECK(!d->ops->add(d, &add) && close_to(out, sum, n, 1e-6));
            CHECK(!d->ops->axpby(d, &scale) && close_to(z, scaled, n, 1e-6));
            memcpy(z, y, (size_t)n * 4);
            const dtrain_axpby_args mix = {n,   true, 1.5f, -0.25f, x, z, false, DTRAIN_DTYPE_F32,
                                           NULL};
            CHECK(!d->ops->axpby(d, &mix) && close_to(z, mixed, n, 1e-6));
            memcpy(z, y, (size_t)n * 4);
            const dtrain_add_args in_place = {n, x, z, z, DTRAIN_DTYPE_F32, DTRAIN_DTYPE_F32};
            CHECK(!d->ops->add(d, &in_place) && same(z, out, n));
            free(out);
            free(z);
        }
        free(x), free(y), free(sum), free(scaled), free(mixed);
    }
}

static void test_convert(void)
{
    const int64_t n = 65536 + 13;
    static const dtrain_dtype halves[2] = {DTRAIN_DTYPE_BF16, DTRAIN_DTYPE_F16};
    float *x = floats(n), *f = floats(n);
    uint16_t *h = (uint16_t *)grab((size_t)n * 2), *g = (uint16_t *)grab((size_t)n * 2);
    for (int64_t i = 0; i < n; i++) {
        uint32_t w[4];
        dtrain__philox(3, 3, (uint64_t)i, w);
        if (i % 3 == 0) w[0] = (w[0] & 0x8fffffffu) | 0x30000000u;
        x[i] = dtrain__f32_from_bits(w[0]);
        memcpy(&x[i], w, 4);
    }
    for (int which = 0; which < 2; which++)
        for (int t = 1; t <= THREADS; t++) {
            const dtrain_dtype half = halves[which];
            dtrain_device *d = devices[t];
            const dtrain_convert_args down = {n, x, h, DTRAIN_DTYPE_F32, half};
            bool ok = true;
            CHECK(!d->ops->convert(d, &down));
            for (int64_t i = 0; i < n; i++)
                ok = ok && h[i] == (which ? dtrain_half_from_f32(DTRAIN_DTYPE_F16, x[i])
                                          : dtrain_half_from_f32(DTRAIN_DTYPE_BF16, x[i]));
            CHECK(ok);
            for (int64_t i = 0; i < n; i++) g[i] = (uint16_t)i;
            const dtrain_convert_args up = {n, g, f, half, DTRAIN_DTYPE_F32};
            CHECK(!d->ops->convert(d, &up));
            for (int64_t i = 0; i < n; i++) {
                const float want = which ? dtrain_half_to_f32(DTRAIN_DTYPE_F16, g[i])
                                         : dtrain_half_to_f32(DTRAIN_DTYPE_BF16, g[i]);
                ok = ok && same(&want, &f[i], 1);
            }
            CHECK(ok);
            const dtrain_dtype other = halves[1 - which];
            const dtrain_convert_args cross = {n, g, h, half, other};
            CHECK(!d->ops->convert(d, &cross));
            for (int64_t i = 0; i < n; i++)
                ok = ok && h[i] == (which ? dtrain_half_from_f32(DTRAIN_DTYPE_BF16, f[i])
                                          : dtrain_half_from_f32(DTRAIN_DTYPE_F16, f[i]));
            CHECK(ok);
        }
    const dtrain_convert_args wrong = {n, x, h, DTRAIN_DTYPE_F32, DTRAIN_DTYPE_I32};
    CHECK(devices[1]->ops->convert(devices[1], &wrong) == DTRAIN_ERROR_UNSUPPORTED);
    free(x), free(f), free(h), free(g);
}

static void test_sum(void)
{
    static const int64_t counts[] = {0, 1, 7, 4095, 4097, 100003, 3000001};
    EACH(i, counts)
    {
        const int64_t n = counts[i];
        float *x = noise(n, 1);
        double want[2] = {0, 0}, got[2][THREADS + 1];
        for (int64_t j = 0; j < n; j++) {
            want[0] += x[j];
            want[1] += (double)x[j] * x[j];
        }
        for (int squares = 0; squares < 2; squares++)
            for (int t = 1; t <= THREADS; t++) {
                const float half = 0.5f; /* of the scale, in one of the two */
                const dtrain_sum_args a = {n,
                                           squares != 0,
                                           false,
                                           squares ? 1 : 0.5,
                                           x,
                                           &got[squares][t],
                                           NULL,
                                           DTRAIN_DTYPE_F32,
                                           squares ? &half : NULL};
                CHECK(!devices[t]->ops->sum(devices[t], &a));
                CHECK(fabs(got[squares][t] - 0.5 * want[squares]) <= 1e-11 * (1 + (double)n));
                CHECK(got[squares][t] == got[squares][1]);
            }
        if (n > 4095) {
            x[n - 1] = dtrain__f32_from_bits(0x7f800000u);
            double out;
            const dtrain_sum_args a = {n, true, false, 1, x, &out, NULL, DTRAIN_DTYPE_F32, NULL};
            CHECK(!devices[2]->ops->sum(devices[2], &a) && !isfinite((float)out));
        }
        free(x);
    }
}

static void test_dropout(void)
{
    EACH(i, sizes)
    {
        const int64_t n = sizes[i] * 61;
        float *x = noise(n, 1), *old = noise(n, 1), *first = floats(n);
        double *want = doubles(n), *added = doubles(n);
        int64_t kept = 0;
        for (int64_t j = 0; j < n; j++) {
            const bool keep = dtrain_random_uniform(5, 6, (uint64_t)j) >= 0.3f;
            kept += keep;
            want[j] = keep ? x[j] / 0.7 : 0;
            added[j] = want[j] + old[j];
        }
        CHECK(n < 3000 || fabs((double)kept / (double)n - 0.7) < 0.05);
        for (int t = 1; t <= THREADS; t++) {
            float *y = floats(n);
            dtrain_dropout_args a = {n, 0.3f, false, 5, 6, x, y, NULL, DTRAIN_DTYPE_F32, {0}};
            CHECK(!devices[t]->ops->dropout(devices[t], &a) && close_to(y, want, n, 1e-6));
            if (t == 1) memcpy(first, y, (size_t)n * 4);
            CHECK(same(first, y, n));
            memcpy(y, old, (size_t)n * 4);
            a.accumulate = true;
            CHECK(!devices[t]->ops->dropout(devices[t], &a) && close_to(y, added, n, 1e-6));
            a.accumulate = false;
            a.probability = 0;
            CHECK(!devices[t]->ops->dropout(devices[t], &a) && same(x, y, n));
            a.probability = 1;
            CHECK(!devices[t]->ops->dropout(devices[t], &a));
            for (int64_t j = 0; j < n; j++)
                if (y[j] != 0) {
                    CHECK_MSG(false, "element %lld is not dropped", (long long)j);
                    break;
                }
            free(y);
        }
        free(x), free(old), free(first), free(want), free(added);
    }
}

static void test_adamw(void)
{
    const int64_t n = 1003;
    float *start[3], *grad[3];
    double *value = doubles(n), *m = doubles(n), *v = doubles(n);
    start[0] = noise(n, 1);
    for (int s = 0; s < 3; s++) grad[s] = noise(n, 1);
    for (int64_t i = 0; i < n; i++) value[i] = start[0][i];
    for (int s = 0; s < 3; s++)
        for (int64_t i = 0; i < n; i++) {
            const double g = 0.5 * grad[s][i];
            m[i] = 0.9 * m[i] + 0.1 * g;
            v[i] = 0.95 * v[i] + 0.05 * g * g;
            const double c1 = 1 - pow(0.9, s + 1), c2 = 1 - pow(0.95, s + 1);
            value[i] = value[i] * (1 - 0.01 * 0.1) - 0.01 * (m[i] / c1) / (sqrt(v[i] / c2) + 1e-8);
        }
    float *first = floats(n);
    for (int t = 1; t <= THREADS; t++) {
        float *w = floats(n), *fm = floats(n), *fv = floats(n);
        memcpy(w, start[0], (size_t)n * 4);
        memset(fm, 0, (size_t)n * 4);
        memset(fv, 0, (size_t)n * 4);
        for (int s = 0; s < 3; s++) {
            const dtrain_optimizer_tensor one = {n, 0.1f, w, grad[s], fm, fv};
            dtrain_optimizer_args a;
            memset(&a, 0, sizeof a);
            a.tensor_count = 1;
            a.tensors = &one;
            a.lr = 0.01f, a.beta1 = 0.9f, a.beta2 = 0.95f, a.epsilon = 1e-8f;
            a.correction1 = (float)(1 - pow(0.9, s + 1));
            a.correction2 = (float)(1 - pow(0.95, s + 1));
            a.grad_scale = 0.5f;
            CHECK(!devices[t]->ops->adamw(devices[t], &a));
        }
        CHECK(close_to(w, value, n, 2e-6) && close_to(fm, m, n, 1e-6) && close_to(fv, v, n, 1e-6));
        if (t == 1) memcpy(first, w, (size_t)n * 4);
        CHECK(same(first, w, n));
        free(w), free(fm), free(fv);
    }
    free(first), free(value), free(m), free(v), free(start[0]);
    for (int s = 0; s < 3; s++) free(grad[s]);
}

static void test_sgd(void)
{
    const int64_t n = 517;
    for (int mode = 0; mode < 3; mode++) { /* plain, momentum, nesterov */
        const double mu = mode ? 0.9 : 0;
        float *w0 = noise(n, 1), *g[2];
        double *w = doubles(n), *b = doubles(n);
        for (int64_t i = 0; i < n; i++) w[i] = w0[i];
        for (int s = 0; s < 2; s++) {
            g[s] = noise(n, 1);
            for (int64_t i = 0; i < n; i++) {
                const double x = 2.0 * g[s][i] + 0.01 * w[i];
                b[i] = s ? mu * b[i] + x : x;
                w[i] -= 0.1 * (mode == 2 ? x + mu * b[i] : b[i]);
            }
        }
        for (int t = 1; t <= THREADS; t++) {
            float *x = floats(n), *buffer = floats(n);
            memcpy(x, w0, (size_t)n * 4);
            for (int s = 0; s < 2; s++) {
                const dtrain_optimizer_tensor one = {n, 0.01f, x, g[s], mode ? buffer : NULL, NULL};
                dtrain_optimizer_args a;
                memset(&a, 0, sizeof a);
                a.tensor_count = 1;
                a.tensors = &one;
                a.lr = 0.1f, a.momentum = (float)mu, a.grad_scale = 2;
                a.nesterov = mode == 2, a.first = s == 0;
                CHECK(!devices[t]->ops->sgd(devices[t], &a));
            }
            CHECK(close_to(x, w, n, 1e-6) && (!mode || close_to(buffer, b, n, 1e-6)));
            free(x), free(buffer);
        }
        free(w0), free(g[0]), free(g[1]), free(w), free(b);
    }
}

static void test_lion(void)
{
    const int64_t n = 517;
    float *w0 = noise(n, 1), *g = noise(n, 1), *m0 = noise(n, 1), *first = floats(n);
    double *w = doubles(n), *m = doubles(n);
    g[3] = m0[3] = 0; /* no direction at all */
    for (int64_t i = 0; i < n; i++) {
        const double x = 2.0 * g[i], mean = 0.9 * m0[i] + 0.1 * x;
        w[i] = w0[i] * (1 - 0.1 * 0.01) - (mean > 0 ? 0.1 : mean < 0 ? -0.1 : 0);
        m[i] = 0.99 * m0[i] + 0.01 * x;
    }
    for (int t = 1; t <= THREADS; t++) {
        float *x = floats(n), *moment = floats(n);
        memcpy(x, w0, (size_t)n * 4);
        memcpy(moment, m0, (size_t)n * 4);
        const dtrain_optimizer_tensor one = {n, 0.01f, x, g, moment, NULL};
        const dtrain_optimizer_args a = {.tensor_count = 1,
                                         .tensors = &one,
                                         .lr = 0.1f,
                                         .beta1 = 0.9f,
                                         .beta2 = 0.99f,
                                         .grad_scale = 2,
                                         .lr_scale = 1};
        CHECK(!devices[t]->ops->lion(devices[t], &a));
        CHECK(close_to(x, w, n, 1e-6) && close_to(moment, m, n, 1e-6));
        if (t == 1) memcpy(first, x, (size_t)n * 4);
        CHECK(same(first, x, n));
        free(x), free(moment);
    }
    free(w0), free(g), free(m0), free(first), free(w), free(m);
}

/* The three stages one after the other. */
static void test_muon(void)
{
    const int64_t n = 517;
    const double squares = 9;
    float *w0 = noise(n, 1), *g = noise(n, 1), *m0 = noise(n, 1);
    double *w = doubles(n), *m = doubles(n), *u = doubles(n);
    for (int nesterov = 0; nesterov < 2; nesterov++) {
        for (int64_t i = 0; i < n; i++) {
            m[i] = 0.95 * m0[i] + 2.0 * g[i];
            u[i] = (nesterov ? 2.0 * g[i] + 0.95 * m[i] : m[i]) / (3 + 0.5);
            w[i] = w0[i] * (1 - 0.1 * 0.01) - 0.1 * 1.5 * u[i];
        }
        for (int t = 1; t <= THREADS; t++) {
            float *value = floats(n), *moment = floats(n), *x = floats(n);
            memcpy(value, w0, (size_t)n * 4);
            memcpy(moment, m0, (size_t)n * 4);
            const dtrain_optimizer_tensor one = {n, 0.01f, value, g, moment, NULL};
            dtrain_muon_args a;
            memset(&a, 0, sizeof a);
            a.tensors = &one;
            a.x = x;
            a.lr = 0.1f, a.momentum = 0.95f, a.grad_scale = 2, a.scale = 1.5f, a.epsilon = 0.5f;
            a.nesterov = nesterov != 0;
            a.sum_squares = &squares;
            for (a.stage = DTRAIN_MUON_MOMENTUM; a.stage <= DTRAIN_MUON_STEP; a.stage++)
                CHECK(!devices[t]->ops->muon(devices[t], &a));
            CHECK(close_to(value, w, n, 1e-6) && close_to(moment, m, n, 1e-6) &&
                  close_to(x, u, n, 1e-6));
            free(value), free(moment), free(x);
        }
    }
    free(w0), free(g), free(m0), free(w), free(m), free(u);
}

/* ---- Activation, GEMM ---- */

static double gelu(double x)
{
    return 0.5 * x * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}
static double act(uint32_t kind, double x)
{
    return kind == DTRAIN_ACTIVATION_GELU ? gelu(x) : kind && x < 0 ? 0 : x;
}
static double slope(uint32_t kind, double x)
{
    if (kind == DTRAIN_ACTIVATION_GELU) {
        const double h = 1e-5;
        return (gelu(x + h) - gelu(x - h)) / (2 * h);
    }
    return kind == DTRAIN_ACTIVATION_RELU && x <= 0 ? 0 : 1;
}

static void activation_case(uint32_t kind, int64_t rows, int64_t n)
{
    float *x = noise(rows * n, 3), *d_out = noise(rows * n, 1), *old = noise(n, 1);
    if (rows * n > 6) {
        x[0] = 1e4f;
        x[1] = -1e4f;
        x[2] = 3e38f;
        x[3] = -3e38f;
        x[4] = 0;
        x[5] = 40;
    }
    double *d_in = doubles(rows * n), *bias = doubles(n), *both = doubles(n);
    for (int64_t i = 0; i < rows * n; i++) {
        const double s = kind == DTRAIN_ACTIVATION_GELU && fabs((double)x[i]) > 20
                             ? x[i] > 0
                             : slope(kind, x[i]);
        d_in[i] = d_out[i] * s;
        bias[i % n] += d_in[i];
    }
    for (int64_t j = 0; j < n; j++) both[j] = bias[j] + old[j];
    float *first = floats(n);
    for (int t = 1; t <= THREADS; t++) {
        dtrain_device *d = devices[t];
        float *y = floats(rows * n), *b = floats(n);
        dtrain_activation_backward_args a = {kind, false,           rows, n, x, d_out, y,
                                             b,    DTRAIN_DTYPE_F32};
        CHECK(!d->ops->activation_backward(d, &a));
        CHECK(close_to(y, d_in, rows * n, 2e-6) && close_to(b, bias, n, 2e-5));
        if (t == 1) memcpy(first, b, (size_t)n * 4);
        CHECK(same(first, b, n));
        memcpy(b, old, (size_t)n * 4);
        memcpy(y, d_out, (size_t)(rows * n) * 4);
        a.accumulate = true;
        a.d_out = y; /* in place */
        CHECK(!d->ops->activation_backward(d, &a));
        CHECK(close_to(y, d_in, rows * n, 2e-6) && close_to(b, both, n, 2e-5));
        a.d_bias = NULL;
        a.d_out = d_out;
        memset(y, 0xff, (size_t)(rows * n) * 4);
        CHECK(!d->ops->activation_backward(d, &a) && close_to(y, d_in, rows * n, 2e-6));
        free(y), free(b);
    }
    free(x), free(d_out), free(old), free(d_in), free(bias), free(both), free(first);
}

static void test_activation(void)
{
    EACH(i, row_counts)
    EACH(j, sizes)
    for (uint32_t kind = 0; kind < 3; kind++) activation_case(kind, row_counts[i], sizes[j]);
}

static float half_at(const void *x, dtrain_dtype type, int64_t i)
{
    if (type == DTRAIN_DTYPE_F32) return ((const float *)x)[i];
    return dtrain_half_to_f32(type, ((const uint16_t *)x)[i]);
}

static void *as_type(const float *x, int64_t n, dtrain_dtype type)
{
    void *y = grab((size_t)n * 4);
    const dtrain_convert_args a = {n, x, y, DTRAIN_DTYPE_F32, type};
    devices[1]->ops->convert(devices[1], &a);
    return y;
}

static void test_gemm_wrapper(void)
{
    static const dtrain_dtype types[3] = {DTRAIN_DTYPE_F32, DTRAIN_DTYPE_BF16, DTRAIN_DTYPE_F16};
    for (uint32_t run = 0; run < 36; run++) {
        const int64_t m = 33, n = 65, k = 17, lda = 40, ldb = 70, ldc = 71;
        const uint32_t flags = run & 3, kind = run / 4 % 3;
        const dtrain_dtype ta = types[run / 12], tc = types[run / 4 % 3];
        float *fa = noise(40 * 40, 1), *fb = noise(70 * 70, 1), *fc = noise(m * ldc, 1),
              *bias = noise(n, 1);
        void *a = as_type(fa, 1600, ta), *b = as_type(fb, 4900, ta), *c = as_type(fc, m * ldc, tc);
        float *aux = floats(m * ldc);
        bool ok = true;
        double *want = doubles(m * ldc), *before = doubles(m * ldc);
        for (int64_t i = 0; i < m; i++)
            for (int64_t j = 0; j < n; j++) {
                double s = 0;
                for (int64_t p = 0; p < k; p++)
                    s += (double)half_at(a, ta, flags & 1 ? p * lda + i : i * lda + p) *
                         half_at(b, ta, flags & 2 ? j * ldb + p : p * ldb + j);
                before[i * ldc + j] = 0.5 * s + 2 * half_at(c, tc, i * ldc + j) + bias[j];
                want[i * ldc + j] = act(kind, before[i * ldc + j]);
            }
        const dtrain_gemm_args g = {flags, kind, m,   n,  k,  0.5f, 2,    a,   b,    c,
                                    lda,   ldb,  ldc, ta, ta, tc,   bias, aux, NULL, false};
        CHECK(!devices[2]->ops->gemm(devices[2], &g));
        for (int64_t i = 0; i < m; i++)
            for (int64_t j = 0; j < n; j++) {
                const int64_t at = i * ldc + j;
                const double e = tc == DTRAIN_DTYPE_F32   ? 1e-5
                                 : tc == DTRAIN_DTYPE_F16 ? 1e-3
                                                          : 8e-3;
                ok = ok && fabs(half_at(c, tc, at) - want[at]) <= e * (1 + fabs(want[at]));
                ok = ok && fabs(half_at(aux, tc, at) - before[at]) <= e * (1 + fabs(before[at]));
            }
        CHECK(ok);
        free(fa), free(fb), free(fc), free(bias), free(a), free(b), free(c), free(aux), free(want),
            free(before);
    }
}

/* ---- Layernorm ---- */

static void naive_layernorm(int64_t n, const double *x, const float *w, const float *b, double *y,
                            double *mean, double *rstd)
{
    double m = 0, v = 0;
    for (int64_t j = 0; j < n; j++) m += x[j] / (double)n;
    for (int64_t j = 0; j < n; j++) v += (x[j] - m) * (x[j] - m) / (double)n;
    *mean = m;
    *rstd = 1 / sqrt(v + 1e-5);
    for (int64_t j = 0; j < n; j++) y[j] = (x[j] - m) * *rstd * w[j] + (b ? b[j] : 0);
}

static void layernorm_case(int64_t rows, int64_t n)
{
    const int64_t count = rows * n;
    float *x = noise(count, 2), *w = noise(n, 1), *b = noise(n, 1), *d_y = noise(count, 1),
          *old = noise(count, 1);
    double *dx = doubles(count), *y = doubles(count), *mean = doubles(rows), *rstd = doubles(rows);
    double *d_x = doubles(count), *d_xa = doubles(count), *d_w = doubles(n), *d_b = doubles(n),
           *d_wa = doubles(n);
    double *moved = doubles(n);
    for (int64_t i = 0; i < count; i++) dx[i] = x[i] += 0.5f;
    for (int64_t r = 0; r < rows; r++) {
        naive_layernorm(n, dx + r * n, w, b, y + r * n, mean + r, rstd + r);
        double g1 = 0, g2 = 0;
        for (int64_t j = 0; j < n; j++) {
            const double h = (dx[r * n + j] - mean[r]) * rstd[r], g = (double)d_y[r * n + j] * w[j];
            g1 += g / (double)n;
            g2 += g * h / (double)n;
            d_w[j] += d_y[r * n + j] * h;
            d_b[j] += d_y[r * n + j];
        }
        for (int64_t j = 0; j < n; j++) {
            const double h = (dx[r * n + j] - mean[r]) * rstd[r];
            d_x[r * n + j] = rstd[r] * ((double)d_y[r * n + j] * w[j] - g1 - h * g2);
            d_xa[r * n + j] = d_x[r * n + j] + old[r * n + j];
        }
        if (r == 0 && n > 2) /* the formula itself, by differences */
            for (int64_t j = 0; j < n; j += n / 2) {
                double f[2] = {0, 0}, mm, rr;
                for (int s = 0; s < 2; s++) {
                    const double keep = dx[j];
                    dx[j] += s ? 1e-4 : -1e-4;
                    naive_layernorm(n, dx, w, b, moved, &mm, &rr);
                    dx[j] = keep;
                    for (int64_t i = 0; i < n; i++) f[s] += moved[i] * d_y[i];
                }
                CHECK(fabs((f[1] - f[0]) / 2e-4 - d_x[j]) < 1e-5 * (1 + fabs(d_x[j])));
            }
    }
    for (int64_t j = 0; j < n; j++) d_wa[j] = d_w[j] + old[j];
    float *first[3] = {floats(count), floats(n), floats(n)};
    const double tolerance = n == 1 ? 1e-2 : 2e-5; /* n = 1: rstd is 316 and everything cancels */
    for (int t = 1; t <= THREADS; t++) {
        dtrain_device *d = devices[t];
        float *fy = floats(count), *fm = floats(rows), *fr = floats(rows);
        float *gx = floats(count), *gw = floats(n), *gb = floats(n);
        dtrain_layernorm_args a = {.rows = rows,
                                   .n = n,
                                   .epsilon = 1e-5f,
                                   .x = x,
                                   .weight = w,
                                   .bias = b,
                                   .y = fy,
                                   .mean = fm,
                                   .rstd = fr,
                                   .x_dtype = DTRAIN_DTYPE_F32,
                                   .y_dtype = DTRAIN_DTYPE_F32};
        CHECK(!d->ops->layernorm(d, &a) && close_to(fy, y, count, 1e-5));
        CHECK(close_to(fm, mean, rows, 1e-6) && close_to(fr, rstd, rows, 2e-5));
        dtrain_layernorm_backward_args g = {.rows = rows,
                                            .n = n,
                                            .x = x,
                                            .weight = w,
                                            .mean = fm,
                                            .rstd = fr,
                                            .d_y = d_y,
                                            .d_x = gx,
                                            .d_weight = gw,
                                            .d_bias = gb,
                                            .x_dtype = DTRAIN_DTYPE_F32,
                                            .y_dtype = DTRAIN_DTYPE_F32};
        CHECK(!d->ops->layernorm_backward(d, &g) && close_to(gx, d_x, count, tolerance));
        CHECK(close_to(gw, d_w, n, tolerance) && close_to(gb, d_b, n, 2e-5));
        if (t == 1) {
            memcpy(first[0], gx, (size_t)count * 4);
            memcpy(first[1], gw, (size_t)n * 4);
            memcpy(first[2], gb, (size_t)n * 4);
        }
        CHECK(same(first[0], gx, count) && same(first[1], gw, n) && same(first[2], gb, n));
        memcpy(gx, old, (size_t)count * 4);
        memcpy(gw, old, (size_t)n * 4);
        g.accumulate_x = g.accumulate_params = true;
        g.d_bias = NULL;
        CHECK(!d->ops->layernorm_backward(d, &g) && close_to(gx, d_xa, count, tolerance));
        CHECK(close_to(gw, d_wa, n, tolerance));
        a.bias = NULL;
        CHECK(!d->ops->layernorm(d, &a) &&
              fabs(fy[0] + b[0] - y[0]) < 1e-5 * (1 + fabs(y[0]) + fabsf(b[0])));
        free(fy), free(fm), free(fr), free(gx), free(gw), free(gb);
    }
    free(x), free(w), free(b), free(d_y), free(old), free(dx), free(y), free(mean), free(rstd),
        free(d_x);
    free(d_xa), free(d_w), free(d_b), free(d_wa), free(moved), free(first[0]), free(first[1]),
        free(first[2]);
}

static void test_layernorm(void)
{
    EACH(i, row_counts) EACH(j, sizes) layernorm_case(row_counts[i], sizes[j]);
}

/* ---- Embedding ---- */

static void test_embedding(void)
{
    EACH(i, row_counts) EACH(j, sizes)
    {
        const int64_t rows = row_counts[i], n = sizes[j], vocab = 11, sequence = 5;
        float *wte = noise(vocab * n, 1), *wpe = noise(sequence * n, 1), *d_y = noise(rows * n, 1);
        int32_t *tokens = (int32_t *)grab((size_t)rows * 4);
        double *y = doubles(rows * n), *dt = doubles(vocab * n), *dp = doubles(sequence * n);
        float *first = floats(vocab * n);
        for (int64_t r = 0; r < rows; r++) {
            tokens[r] = (int32_t)(r * r % 11);
            for (int64_t c = 0; c < n; c++) {
                y[r * n + c] = (double)wte[tokens[r] * n + c] + wpe[r % 5 * n + c];
                dt[tokens[r] * n + c] += d_y[r * n + c];
                dp[r % 5 * n + c] += d_y[r * n + c];
            }
        }
        for (int t = 1; t <= THREADS; t++) {
            dtrain_device *d = devices[t];
            float *fy = floats(rows * n), *gt = floats(vocab * n), *gp = floats(sequence * n);
            const dtrain_embedding_args a = {.rows = rows,
                                             .sequence = sequence,
                                             .n = n,
                                             .vocab = vocab,
                                             .tokens = tokens,
                                             .wte = wte,
                                             .wpe = wpe,
                                             .y = fy,
                                             .dtype = DTRAIN_DTYPE_F32};
            CHECK(!d->ops->embedding(d, &a) && close_to(fy, y, rows * n, 1e-6));
            memset(gt, 0, (size_t)(vocab * n) * 4);
            memset(gp, 0, (size_t)(sequence * n) * 4);
            const dtrain_embedding_backward_args g = {.rows = rows,
                                                      .sequence = sequence,
                                                      .n = n,
                                                      .vocab = vocab,
                                                      .tokens = tokens,
                                                      .d_y = d_y,
                                                      .d_wte = gt,
                                                      .d_wpe = gp,
                                                      .dtype = DTRAIN_DTYPE_F32};
            CHECK(!d->ops->embedding_backward(d, &g));
            CHECK(close_to(gt, dt, vocab * n, 1e-5) && close_to(gp, dp, sequence * n, 1e-5));
            if (t == 1) memcpy(first, gt, (size_t)(vocab * n) * 4);
            CHECK(same(first, gt, vocab * n));
            free(fy), free(gt), free(gp);
        }
        tokens[rows - 1] = 11;
        float *fy = floats(rows * n);
        dtrain_embedding_args bad = {.rows = rows,
                                     .sequence = sequence,
                                     .n = n,
                                     .vocab = vocab,
                                     .tokens = tokens,
                                     .wte = wte,
                                     .y = fy,
                                     .dtype = DTRAIN_DTYPE_F32};
        CHECK(devices[2]->ops->embedding(devices[2], &bad) == DTRAIN_ERROR_DATA);
        CHECK(strstr(dtrain__error_text, "token 11 at row") != NULL);
        bad.whole_vocab = 11;
        CHECK(devices[2]->ops->embedding(devices[2], &bad) == DTRAIN_ERROR_DATA);
        bad.whole_vocab = 12; /* of another part of the table */
        CHECK(devices[2]->ops->embedding(devices[2], &bad) == DTRAIN_OK);
        free(wte), free(wpe), free(d_y), free(tokens), free(y), free(dt), free(dp), free(first),
            free(fy);
    }
}

/* ---- Batch normalisation ---- */

static void batchnorm_case(int64_t rows, int64_t n)
{
    const uint32_t relu = DTRAIN_ACTIVATION_RELU;
    float *x = noise(rows * n, 1), *d_y = noise(rows * n, 1), *weight = noise(n, 1);
    float *bias = noise(n, 1), *first[4] = {NULL, NULL, NULL, NULL};
    const int64_t counts[4] = {1 + 2 * n, rows * n, 2 * n, rows * n};
    double *want = doubles(rows * n);
    for (int64_t c = 0; c < n; c++) {
        double mean = 0, spread = 0;
        for (int64_t r = 0; r < rows; r++) mean += (double)x[r * n + c] / (double)rows;
        for (int64_t r = 0; r < rows; r++) spread += pow((double)x[r * n + c] - mean, 2);
        for (int64_t r = 0; r < rows; r++) {
            const double h = ((double)x[r * n + c] - mean) / sqrt(spread / (double)rows + 1e-3);
            want[r * n + c] = fmax(0, h * (double)weight[c] + (double)bias[c]);
        }
    }
    for (int t = 1; t <= THREADS; t++) {
        dtrain_device *d = devices[t];
        float *got[4], *mean = floats(n), *rstd = floats(n), share;
        for (int i = 0; i < 4; i++) got[i] = floats(counts[i]);
        const dtrain_batchnorm_moments_args moments = {
            .rows = rows, .n = n, .x = x, .sums = got[0], .dtype = DTRAIN_DTYPE_F32};
        const dtrain_batchnorm_statistics_args statistics = {1,    n,    1e-3f,  0.1f, got[0],
                                                             mean, rstd, &share, NULL, NULL};
        const dtrain_batchnorm_args forward = {.rows = rows,
                                               .n = n,
                                               .activation = relu,
                                               .x = x,
                                               .mean = mean,
                                               .rstd = rstd,
                                               .weight = weight,
                                               .bias = bias,
                                               .y = got[1],
                                               .dtype = DTRAIN_DTYPE_F32};
        const dtrain_batchnorm_sums_args sums = {.rows = rows,
                                                 .n = n,
                                                 .activation = relu,
                                                 .x = x,
                                                 .y = got[1],
                                                 .d_y = d_y,
                                                 .mean = mean,
                                                 .rstd = rstd,
                                                 .sums = got[2],
                                                 .dtype = DTRAIN_DTYPE_F32};
        const dtrain_batchnorm_backward_args backward = {.rows = rows,
                                                         .n = n,
                                                         .activation = relu,
                                                         .x = x,
                                                         .y = got[1],
                                                         .d_y = d_y,
                                                         .mean = mean,
                                                         .rstd = rstd,
                                                         .weight = weight,
                                                         .sums = got[2],
                                                         .inverse_count = &share,
                                                         .d_x = got[3],
                                                         .dtype = DTRAIN_DTYPE_F32};
        CHECK(!d->ops->batchnorm_moments(d, &moments));
        CHECK(!d->ops->batchnorm_statistics(d, &statistics));
        CHECK(!d->ops->batchnorm(d, &forward) && close_to(got[1], want, rows * n, 1e-4));
        CHECK(!d->ops->batchnorm_sums(d, &sums) && !d->ops->batchnorm_backward(d, &backward));
        for (int i = 0; i < 4; i++) {
            if (t == 1) first[i] = got[i];
            CHECK_MSG(same(first[i], got[i], counts[i]), "%s: step %d of %d x %d, %d threads",
                      variant, i, (int)rows, (int)n, t);
            if (t > 1) free(got[i]);
        }
        free(mean), free(rstd);
    }
    for (int i = 0; i < 4; i++) free(first[i]);
    free(x), free(d_y), free(weight), free(bias), free(want);
}

static void test_batchnorm(void)
{
    static const int64_t shapes[][2] = {{3, 1}, {40, 3}, {700, 16}, {130, 33}, {5, 200}, {9000, 4}};
    EACH(i, shapes) batchnorm_case(shapes[i][0], shapes[i][1]);
}

/* ---- Cross-entropy ---- */

/* `classes` of n columns count; the others hold what must not matter. */
static void cross_entropy_case(int64_t rows, int64_t classes, int64_t n, float scale)
{
    static const float garbage[] = {NAN, INFINITY, -INFINITY, 3e38f};
    float *x = noise(rows * n, scale), *first = floats(rows * n);
    int32_t *target = (int32_t *)grab((size_t)rows * 4);
    double *loss = doubles(rows), *lse = doubles(rows), *d = doubles(rows * n);
    for (int64_t r = 0; r < rows; r++) {
        double top = -1e300, sum = 0;
        target[r] = r % 4 == 2 ? -1 : (int32_t)(r * 13 % classes);
        for (int64_t j = classes; j < n; j++) x[r * n + j] = garbage[(r + j) % 4];
        if (target[r] < 0) continue;
        for (int64_t j = 0; j < classes; j++) top = x[r * n + j] > top ? x[r * n + j] : top;
        for (int64_t j = 0; j < classes; j++) sum += exp(x[r * n + j] - top);
        lse[r] = top + log(sum);
        loss[r] = lse[r] - x[r * n + target[r]];
        for (int64_t j = 0; j < classes; j++)
            d[r * n + j] = 0.25 * (exp(x[r * n + j] - lse[r]) - (j == target[r]));
    }
    for (int t = 1; t <= THREADS; t++) {
        dtrain_device *dev = devices[t];
        float *fl = floats(rows), *fs = floats(rows), *g = floats(rows * n), *rest = floats(rows);
        const int64_t given = classes == n && t == 1 ? 0 : classes;
        const dtrain_cross_entropy_args a = {.rows = rows,
                                             .n = n,
                                             .logits = x,
                                             .targets = target,
                                             .loss = fl,
                                             .lse = fs,
                                             .dtype = DTRAIN_DTYPE_F32,
                                             .classes = given,
                                             .lse_rest = rest};
        CHECK(!dev->ops->cross_entropy(dev, &a) && close_to(fs, lse, rows, 2e-6));
        CHECK(close_to(fl, loss, rows, 2e-6 * (1 + (double)scale)));
        dtrain_cross_entropy_backward_args b = {.rows = rows,
                                                .n = n,
                                                .scale = 0.25f,
                                                .logits = x,
                                                .targets = target,
                                                .lse = fs,
                                                .d_logits = g,
                                                .dtype = DTRAIN_DTYPE_F32,
                                                .classes = given,
                                                .lse_rest = rest};
        CHECK(!dev->ops->cross_entropy_backward(dev, &b) && close_to(g, d, rows * n, 1e-6));
        if (t == 1) memcpy(first, g, (size_t)(rows * n) * 4);
        CHECK(same(first, g, rows * n));
        for (int64_t i = 0; i < rows * n; i++) CHECK(i % n < classes || g[i] == 0);
        if (t == THREADS) { /* in place */
            float *copy = floats(rows * n);
            memcpy(copy, x, (size_t)(rows * n) * 4);
            b.logits = b.d_logits = copy;
            CHECK(!dev->ops->cross_entropy_backward(dev, &b) && same(copy, first, rows * n));
            free(copy);
        }
        free(fl), free(fs), free(g), free(rest);
    }
    target[rows - 1] = (int32_t)classes;
    dtrain_cross_entropy_args bad = {.rows = rows,
                                     .n = n,
                                     .logits = x,
                                     .targets = target,
                                     .loss = first,
                                     .lse = first,
                                     .dtype = DTRAIN_DTYPE_F32,
                                     .classes = classes};
    CHECK(devices[1]->ops->cross_entropy(devices[1], &bad) == DTRAIN_ERROR_DATA);
    bad.parts = floats(3 * rows);
    bad.whole_classes = classes;
    CHECK(devices[1]->ops->cross_entropy(devices[1], &bad) == DTRAIN_ERROR_DATA);
    bad.whole_classes++; /* another rank's target */
    CHECK(devices[1]->ops->cross_entropy(devices[1], &bad) == DTRAIN_OK);
    CHECK(bad.parts[3 * rows - 1] == 0);
    bad.d_logits = first;
    CHECK(devices[1]->ops->cross_entropy(devices[1], &bad) == DTRAIN_ERROR_ARGUMENT);
    free(bad.parts);
    free(x), free(first), free(target), free(loss), free(lse), free(d);
}

static void test_cross_entropy(void)
{
    EACH(i, row_counts)
    EACH(j, sizes)
    for (int64_t padding = 0; padding < 20; padding += padding ? 16 : 3)
        cross_entropy_case(row_counts[i], sizes[j], sizes[j] + padding, j % 2 ? 1 : 1e4f);
    cross_entropy_case(3, 5001, 5001, 3);
    cross_entropy_case(3, 5001, 5120, 3);
    /* NaN comes out as NaN, not as a number. */
    float x[9] = {0}, loss, lse;
    const int32_t target = 0;
    x[8] = dtrain__f32_from_bits(0x7fc00000u);
    const dtrain_cross_entropy_args a = {.rows = 1,
                                         .n = 9,
                                         .logits = x,
                                         .targets = &target,
                                         .loss = &loss,
                                         .lse = &lse,
                                         .dtype = DTRAIN_DTYPE_F32};
    CHECK(!devices[1]->ops->cross_entropy(devices[1], &a) && !isfinite(loss));
}

/* ---- Attention ---- */

typedef struct shape {
    int64_t batch, sequence, heads, d;
    bool causal;
} shape;

/* y, lse and, with d_y, d_qkv, from the definition. */
static void naive_attention(const shape *s, const double *qkv, double *y, double *lse,
                            const float *d_y, double *d_qkv)
{
    const int64_t T = s->sequence, n = s->heads * s->d, D = s->d;
    double *p = doubles(T), *dp = doubles(T);
    for (int64_t bh = 0; bh < s->batch * s->heads; bh++)
        for (int64_t i = 0; i < T; i++) {
            const int64_t at = bh / s->heads * T * 3 * n + bh % s->heads * D;
            const int64_t out = (bh / s->heads * T + i) * n + bh % s->heads * D,
                          end = s->causal ? i + 1 : T;
            const double *q = qkv + at + i * 3 * n, *k = qkv + at + n, *v = k + n;
            double top = -1e300, sum = 0, delta = 0;
            for (int64_t j = 0; j < end; j++) {
                p[j] = 0;
                for (int64_t c = 0; c < D; c++) p[j] += q[c] * k[j * 3 * n + c] / sqrt((double)D);
                top = p[j] > top ? p[j] : top;
            }
            for (int64_t j = 0; j < end; j++) sum += p[j] = exp(p[j] - top);
            for (int64_t c = 0; c < D; c++) y[out + c] = 0;
            for (int64_t j = 0; j < end; j++) {
                p[j] /= sum;
                for (int64_t c = 0; c < D; c++) y[out + c] += p[j] * v[j * 3 * n + c];
            }
            lse[bh * T + i] = top + log(sum);
            if (!d_y) continue;
            for (int64_t j = 0; j < end; j++) {
                dp[j] = 0;
                for (int64_t c = 0; c < D; c++) {
                    dp[j] += d_y[out + c] * v[j * 3 * n + c];
                    d_qkv[at + 2 * n + j * 3 * n + c] += p[j] * d_y[out + c];
                }
                delta += p[j] * dp[j];
            }
            for (int64_t j = 0; j < end; j++)
                for (int64_t c = 0; c < D; c++) {
                    const double g = p[j] * (dp[j] - delta) / sqrt((double)D);
                    d_qkv[at + i * 3 * n + c] += g * k[j * 3 * n + c];
                    d_qkv[at + n + j * 3 * n + c] += g * q[c];
                }
        }
    free(p), free(dp);
}

static void attention_case(shape s, float scale, bool differences)
{
    const int64_t n = s.heads * s.d, rows = s.batch * s.sequence, count = rows * 3 * n,
                  lses = rows * s.heads;
    float *qkv = noise(count, scale), *d_y = noise(rows * n, 1),
          *first[2] = {floats(rows * n), floats(count)};
    double *x = doubles(count), *y = doubles(rows * n), *lse = doubles(lses), *d = doubles(count),
           *z = doubles(lses);
    for (int64_t i = 0; i < count; i++) x[i] = qkv[i];
    naive_attention(&s, x, y, lse, d_y, d);
    double *moved = doubles(rows * n);
    for (int64_t i = 0; differences && i < count; i++) {
        double f[2] = {0, 0};
        for (int k = 0; k < 2; k++) {
            const double keep = x[i];
            x[i] += k ? 1e-4 : -1e-4;
            naive_attention(&s, x, moved, z, NULL, NULL);
            x[i] = keep;
            for (int64_t j = 0; j < rows * n; j++) f[k] += moved[j] * d_y[j];
        }
        CHECK(fabs((f[1] - f[0]) / 2e-4 - d[i]) < 1e-6 * (1 + fabs(d[i])));
    }
    for (int t = 1; t <= THREADS; t++) {
        dtrain_device *dev = devices[t];
        float *fy = floats(rows * n), *fl = floats(lses), *g = floats(count);
        const packed_shape packed = {s.batch, s.sequence, s.heads,         s.heads,
                                     s.d,     s.causal,   DTRAIN_DTYPE_F32};
        const dtrain_attention_args a = packed_attention(packed, qkv, fy, fl);
        CHECK(!dev->ops->attention(dev, &a));
        /* scores grow with scale^2 and their rounding with them, before the exponential */
        CHECK(close_to(fy, y, rows * n, 1e-5 * (double)(1 + scale * scale)));
        CHECK(close_to(fl, lse, lses, 2e-6));
        const dtrain_attention_backward_args b =
            packed_attention_backward(packed, qkv, fy, fl, d_y, g);
        CHECK(!dev->ops->attention_backward(dev, &b));
        if (scale < 10) CHECK(close_to(g, d, count, 1e-5 * (double)(1 + scale * scale)));
        else
            for (int64_t i = 0; i < count; i++)
                if (!isfinite(g[i])) {
                    CHECK_MSG(false, "element %lld is not finite", (long long)i);
                    break;
                }
        if (t == 1) {
            memcpy(first[0], fy, (size_t)(rows * n) * 4);
            memcpy(first[1], g, (size_t)count * 4);
        }
        CHECK(same(first[0], fy, rows * n) && same(first[1], g, count));
        free(fy), free(fl), free(g);
    }
    free(qkv), free(d_y), free(first[0]), free(first[1]), free(x), free(y), free(lse), free(d),
        free(z), free(moved);
}

static void test_attention(void)
{
    static const int64_t lengths[] = {1, 3, 7, 31, 63, 64, 65, 128, 150};
    static const int64_t widths[] = {1, 5, 16, 24, 32, 64, 80};
    EACH(i, lengths) EACH(j, widths) for (int causal = 0; causal < 2; causal++)
    {
        const shape s = {i % 2 ? 2 : 1, lengths[i], (int64_t)(j % 3) + 1, widths[j], causal != 0};
        attention_case(s, 1, s.sequence == 7 && s.d == 5);
    }
    const shape s = {1, 100, 2, 16, true};
    attention_case(s, 50, false); /* scores near 1e4 */
    float x;
    const packed_shape shared = {1, 1, 3, 2, 4, true, DTRAIN_DTYPE_F32};
    const dtrain_attention_args bad = packed_attention(shared, &x, &x, &x);
    CHECK(devices[1]->ops->attention(devices[1], &bad) == DTRAIN_ERROR_ARGUMENT);
}

/* ---- Devices ---- */

static void test_device_memory(void)
{
    dtrain_device_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.thread_count = 2;
    for (int fail_at = 0; fail_at < 6; fail_at++) {
        counted_memory memory;
        dtrain_device *d = NULL;
        memset(&memory, 0, sizeof memory);
        memory.fail_at = fail_at;
        desc.allocator = counted_allocator(&memory);
        dtrain_result result = dtrain_device_create(NULL, &desc, &d);
        if (result == DTRAIN_OK) {
            void *a = NULL, *b = NULL;
            result = d->ops->alloc(d, 100, &a);
            CHECK(((uintptr_t)a & 63) == 0);
            if (!result) result = d->ops->alloc(d, 200, &b);
            if (!result) {
                float *f = (float *)b;
                dtrain_layernorm_backward_args g = {.rows = 1,
                                                    .n = 4,
                                                    .x = f,
                                                    .weight = f,
                                                    .mean = f,
                                                    .rstd = f,
                                                    .d_y = f,
                                                    .d_x = f + 8,
                                                    .d_weight = f + 16,
                                                    .d_bias = f + 24,
                                                    .x_dtype = DTRAIN_DTYPE_F32,
                                                    .y_dtype = DTRAIN_DTYPE_F32};
                CHECK(!d->ops->zero(d, b, 200));
                CHECK(d->allocated_bytes == 300 && d->peak_bytes == 300);
                result = d->ops->layernorm_backward(d, &g);
            }
            d->ops->free(d, a, 100);
            d->ops->free(d, b, 200);
            CHECK(d->allocated_bytes == 0 || !b);
            dtrain_device_destroy(d);
        }
        CHECK(result == (fail_at == 0 || fail_at > 5 ? DTRAIN_OK : DTRAIN_ERROR_MEMORY));
        CHECK(memory.live == 0 && memory.wrong == 0);
    }
}

/* What would go beyond the limit is refused with the three numbers, on the plan device too. */
static void test_memory_limit(void)
{
    const dtrain_device_ops *const tables[] = {device_table("cpu"), device_table("plan")};
    for (int i = 0; i < 2; i++) {
        dtrain_device_desc desc;
        dtrain_device *d;
        void *a = NULL, *b = NULL;
        memset(&desc, 0, sizeof desc);
        desc.memory_limit = 1000;
        CHECK(!dtrain_device_create(tables[i], &desc, &d));
        CHECK(!d->ops->alloc(d, 600, &a));
        CHECK(d->ops->alloc(d, 401, &b) == DTRAIN_ERROR_MEMORY && !b);
        CHECK_MSG(strstr(dtrain_last_error(), " 401 ") && strstr(dtrain_last_error(), " 600 ") &&
                      strstr(dtrain_last_error(), " 1000;"),
                  "%s", dtrain_last_error());
        CHECK(d->ops->alloc(d, SIZE_MAX, &b) == DTRAIN_ERROR_MEMORY && !b);
        CHECK(d->allocated_bytes == 600 && d->peak_bytes == 600);
        CHECK(!d->ops->alloc(d, 400, &b));
        d->ops->free(d, a, 600);
        d->ops->free(d, b, 400);
        CHECK(d->allocated_bytes == 0 && d->peak_bytes == 1000);
        dtrain_device_destroy(d);
    }
}

static void test_plan_device(void)
{
    dtrain_device *d;
    void *a = NULL, *b = NULL, *c = NULL;
    double sum = 1; /* stays: no kernel runs */
    CHECK(!dtrain_device_create(device_table("plan"), NULL, &d));
    CHECK(!d->ops->alloc(d, 0, &a) && !d->ops->alloc(d, (size_t)1 << 40, &b) &&
          !d->ops->alloc(d, 1, &c));
    CHECK(a && b && c && a != b && b != c && ((uintptr_t)b & 63) == 0 && ((uintptr_t)c & 63) == 0);
    CHECK((uintptr_t)c - (uintptr_t)b >= (size_t)1 << 40);
    CHECK(d->peak_bytes == ((size_t)1 << 40) + 1);
    const dtrain_sum_args s = {4, false, false, 1, b, &sum, NULL, DTRAIN_DTYPE_F32, NULL};
    const dtrain_add_args add = {4, b, b, c, DTRAIN_DTYPE_F32, DTRAIN_DTYPE_F32};
    CHECK(!d->ops->sum(d, &s) && sum == 1 && !d->ops->add(d, &add) && !d->ops->zero(d, b, 100));
    CHECK(!d->ops->copy(d, &sum, b, sizeof sum, DTRAIN_COPY_DEVICE_TO_HOST) && sum == 0);
    d->ops->free(d, b, (size_t)1 << 40);
    CHECK(d->allocated_bytes == 1);
    dtrain_device_destroy(d);
    dtrain_device_ops old = *device_table("plan");
    old.abi = 0;
    CHECK(dtrain_device_create(&old, NULL, &d) == DTRAIN_ERROR_UNSUPPORTED && !d);
    const dtrain_device_ops *ops[2] = {device_table("plan"), device_table("cpu")};
    for (int i = 0; i < 2; i++) /* no hole among the kernels */
        CHECK(ops[i]->create && ops[i]->sgd && ops[i]->gemm && ops[i]->adamw && ops[i]->convert &&
              ops[i]->sum);
}

static void test_variant(const dtrain__kernels *kernels)
{
    variant = kernels->name;
    for (uint32_t t = 1; t <= THREADS; t++) {
        dtrain_device_desc desc;
        memset(&desc, 0, sizeof desc);
        desc.thread_count = t;
        desc.oversubscribed = true;
        CHECK(!dtrain_device_create(NULL, &desc, &devices[t]));
        ((dtrain__cpu *)devices[t]->state)->kernels = kernels;
        ((dtrain__cpu *)devices[t]->state)->isa = kernels->gemm;
    }
    test_add_axpby();
    test_convert();
    test_sum();
    test_dropout();
    test_adamw();
    test_sgd();
    test_lion();
    test_muon();
    test_activation();
    test_gemm_wrapper();
    test_layernorm();
    test_embedding();
    test_cross_entropy();
    test_attention();
    test_batchnorm();
    for (int t = 1; t <= THREADS; t++) dtrain_device_destroy(devices[t]);
    variant = "";
}

static const dtrain__kernels *instances[INSTANCES];
static int instance_count;

static void test_chosen_kernels(void) { test_variant(instances[0]); }
static void test_other_kernels(void)
{
    for (int i = 1; i < instance_count; i++) test_variant(instances[i]);
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    RUN(test_bf16_all);
    RUN(test_f16_all);
    RUN(test_rounding);
    RUN(test_philox);
    RUN(test_random);
    RUN(test_device_memory);
    RUN(test_memory_limit);
    RUN(test_plan_device);
    instance_count = instances_find(instances);
    RUN(test_chosen_kernels);
    if (instance_count > 1) RUN(test_other_kernels);
    else SKIP(test_other_kernels, "the thread sanitizer needs one instruction set");
    return test_summary();
}
