/* Tests of gemm.cuh: matrix multiplication with everything that can be asked of it, at
 * shapes and alignments that cublasLt's fused epilogues take and at those they do not, in all
 * combinations of types. The oracle is the definition, in double.
 *
 * Gaps between rows hold NaN before and must hold it afterwards; outputs end where their last element
 * does, so that a sanitizer sees what goes further. */
#include "test.h"
#include "dtrain.h"
#include "cuda_testing.h"
#include "packed_attention.h"

static const dtrain_dtype dtypes[] = {DTRAIN_DTYPE_F32, DTRAIN_DTYPE_BF16, DTRAIN_DTYPE_F16};

static bool says(const char *words) { return strstr(dtrain_last_error(), words) != NULL; }
#define CHECK_SAYS(words) CHECK_MSG(says(words), "\"%s\" is not in: %s", words, dtrain_last_error())

static void open_with_math(uint32_t math)
{
    dtrain_device_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.math = math;
    CHECK_MSG(dtrain_device_create(dtrain_cuda_device_ops(), &desc, &gpu) == DTRAIN_OK, "%s",
              dtrain_last_error());
    if (!gpu) exit(1);
}

/* ---- One product: what is asked, the matrices on both sides, the oracle -------------------------*/

typedef struct ask {
    int64_t m, n, k;
    uint32_t flags, activation;
    dtrain_dtype a, b, c;
    float alpha, beta;
    bool bias, aux, bias_grad, accumulate;
    int pad;      /* elements between rows */
    size_t shift; /* elements every matrix starts behind an aligned address */
} ask;

typedef struct matrix {
    int64_t rows, columns, ld, count;
    dtrain_dtype dtype;
    void *host, *device;
} matrix;

static matrix make_matrix(int64_t rows, int64_t columns, const ask *x, dtrain_dtype dtype,
                          uint64_t stream)
{
    matrix it = {rows, columns, columns + x->pad, 0, dtype, NULL, NULL};
    const size_t bytes = dtrain_dtype_bytes(dtype);
    it.count = rows > 0 && columns > 0 ? (rows - 1) * it.ld + columns : 0;
    it.host = gpu_noise(it.count, dtype, stream, 1);
    for (int64_t i = 0; i < it.count; i++)
        if (i % it.ld >= columns) gpu_set(it.host, i, dtype, NAN);
    it.device = gpu_give(it.host, (size_t)it.count * bytes, x->shift * bytes);
    return it;
}

static double at(const matrix *x, int64_t row, int64_t column)
{
    return gpu_get(x->host, row * x->ld + column, x->dtype);
}

static double gelu(double x)
{
    return 0.5 * x * (1 + tanh(0.79788456080286536 * (x + 0.044715 * x * x * x)));
}
static double gelu_slope(double x)
{
    const double c = 0.79788456080286536, t = tanh(c * (x + 0.044715 * x * x * x));
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * c * (1 + 3 * 0.044715 * x * x);
}
static double activate(uint32_t activation, double x)
{
    return activation == DTRAIN_ACTIVATION_RELU ? (x > 0 ? x : 0) : activation ? gelu(x) : x;
}
static double slope(uint32_t activation, double x)
{
    return activation == DTRAIN_ACTIVATION_RELU ? x > 0 : activation ? gelu_slope(x) : 1;
}

/* What the arithmetic of `math` leaves of an operand. */
static double operand(double x, dtrain_dtype a, dtrain_dtype b, uint32_t math)
{
    if (a != DTRAIN_DTYPE_F32 || b != DTRAIN_DTYPE_F32 || math != DTRAIN_MATH_BF16) return x;
    return (double)dtrain_half_to_f32(DTRAIN_DTYPE_BF16,
                                      dtrain_half_from_f32(DTRAIN_DTYPE_BF16, (float)x));
}

/* All that a product has to do with. */
typedef struct product {
    ask x;
    matrix a, b, c, aux;
    float *bias, *grad; /* host */
    int64_t grad_count;
    dtrain_gemm_args args;
    double *want, *want_aux, *want_grad; /* (m,n), (m,n), (grad_count) */
    double error;                        /* of an fp32 sum of k terms */
} product;

static void want_element(product *p, int64_t i, int64_t j, uint32_t math)
{
    const ask *x = &p->x;
    const bool backward = (x->flags & DTRAIN_GEMM_ACT_BACKWARD) != 0;
    double sum = 0;
    for (int64_t k = 0; k < x->k && x->alpha != 0; k++)
        sum += operand(x->flags & DTRAIN_GEMM_TRANS_A ? at(&p->a, k, i) : at(&p->a, i, k), x->a,
                       x->b, math) *
               operand(x->flags & DTRAIN_GEMM_TRANS_B ? at(&p->b, j, k) : at(&p->b, k, j), x->a,
                       x->b, math);
    sum *= (double)x->alpha;
    if (x->beta != 0) sum += (double)x->beta * at(&p->c, i, j);
    if (x->bias) sum += (double)p->bias[j];
    p->want_aux[i * x->n + j] = sum;
    p->want[i * x->n + j] =
        backward ? (x->activation ? sum * slope(x->activation, at(&p->aux, i, j)) : sum)
                 : activate(x->activation, sum);
}

static void want_all(product *p, uint32_t math)
{
    const ask *x = &p->x;
    const bool of_c = (x->flags & DTRAIN_GEMM_BIAS_GRAD_C) != 0;
    for (int64_t i = 0; i < x->m; i++)
        for (int64_t j = 0; j < x->n; j++) want_element(p, i, j, math);
    for (int64_t g = 0; g < p->grad_count; g++) {
        double sum = x->accumulate ? (double)p->grad[g] : 0;
        for (int64_t i = 0; of_c && i < x->m; i++) sum += p->want[i * x->n + g];
        for (int64_t k = 0; !of_c && k < x->k; k++)
            sum += x->flags & DTRAIN_GEMM_TRANS_A ? at(&p->a, k, g) : at(&p->a, g, k);
        p->want_grad[g] = sum;
    }
}

/* Ask for a product (16,24) of depth 32 and nothing beside it, in one type. */
static ask plain_ask(dtrain_dtype type, float beta)
{
    const ask x = {16, 24, 32, 0, 0, type, type, type, 1, beta, false, false, false, false, 0, 0};
    return x;
}

static product make_product(const ask *x, uint32_t math)
{
    const bool ta = (x->flags & DTRAIN_GEMM_TRANS_A) != 0,
               tb = (x->flags & DTRAIN_GEMM_TRANS_B) != 0;
    product p;
    memset(&p, 0, sizeof p);
    p.x = *x;
    p.a = make_matrix(ta ? x->k : x->m, ta ? x->m : x->k, x, x->a, 1);
    p.b = make_matrix(tb ? x->n : x->k, tb ? x->k : x->n, x, x->b, 2);
    p.c = make_matrix(x->m, x->n, x, x->c, 3);
    p.aux = make_matrix(x->m, x->n, x, x->c, 4);
    p.grad_count = x->bias_grad ? (x->flags & DTRAIN_GEMM_BIAS_GRAD_C ? x->n : x->m) : 0;
    p.bias = (float *)gpu_noise(x->n, DTRAIN_DTYPE_F32, 5, 1);
    p.grad = (float *)gpu_noise(p.grad_count, DTRAIN_DTYPE_F32, 6, 1);
    for (int64_t i = 0; i < p.c.count && x->beta == 0; i++) gpu_set(p.c.host, i, x->c, NAN);
    for (int64_t i = 0; i < p.grad_count && !x->accumulate; i++) p.grad[i] = NAN;
    const dtrain_gemm_args args = {
        x->flags,
        x->activation,
        x->m,
        x->n,
        x->k,
        x->alpha,
        x->beta,
        p.a.device,
        p.b.device,
        p.c.device,
        p.a.ld,
        p.b.ld,
        p.c.ld,
        x->a,
        x->b,
        x->c,
        x->bias ? (float *)gpu_give(p.bias, (size_t)x->n * 4, x->shift * 4) : NULL,
        x->aux ? p.aux.device : NULL,
        x->bias_grad ? (float *)gpu_give(p.grad, (size_t)p.grad_count * 4, x->shift * 4) : NULL,
        x->accumulate};
    p.args = args;
    p.want = (double *)malloc((size_t)(x->m * x->n) * 8 + 8);
    p.want_aux = (double *)malloc((size_t)(x->m * x->n) * 8 + 8);
    p.want_grad = (double *)malloc((size_t)p.grad_count * 8 + 8);
    p.error = 3e-7 * (4 + sqrt((double)x->k)) * (fabs((double)x->alpha) + 1);
    /* A bias that a fused epilogue takes in C's type is rounded; |bias| < 7. */
    if (x->bias) p.error += 4 * gpu_rounding(x->c);
    want_all(&p, math);
    return p;
}

static void drop_product(product *p)
{
    void *host[] = {p->a.host, p->b.host, p->c.host,   p->aux.host, p->bias,
                    p->grad,   p->want,   p->want_aux, p->want_grad};
    EACH(i, host) free(host[i]);
    gpu_release();
}

/* C and aux as they were before: a product may be repeated. */
static void reset_product(const product *p)
{
    gpu_write(p->c.device, p->c.host, (size_t)p->c.count * dtrain_dtype_bytes(p->x.c));
    gpu_write(p->aux.device, p->aux.host, (size_t)p->aux.count * dtrain_dtype_bytes(p->x.c));
    if (p->args.bias_grad) gpu_write(p->args.bias_grad, p->grad, (size_t)p->grad_count * 4);
}

static const char *describe(const ask *x)
{
    static char text[256];
    snprintf(text, sizeof text,
             "(%lld,%lld,%lld) flags %x act %u %s*%s->%s alpha %g beta %g%s%s%s%s pad %d shift %d",
             (long long)x->m, (long long)x->n, (long long)x->k, (unsigned)x->flags,
             (unsigned)x->activation, dtrain_dtype_name(x->a), dtrain_dtype_name(x->b),
             dtrain_dtype_name(x->c), (double)x->alpha, (double)x->beta, x->bias ? " bias" : "",
             x->aux ? " aux" : "", x->bias_grad ? " bias_grad" : "", x->accumulate ? "+=" : "",
             x->pad, (int)x->shift);
    return text;
}

/* A matrix that came back: its values, and NaN untouched in its gaps. */
static bool check_matrix(const product *p, const matrix *x, const double *want, const char *name)
{
    const size_t bytes = dtrain_dtype_bytes(x->dtype);
    void *got = malloc((size_t)x->count * bytes + 1);
    char what[320];
    bool good = true;
    snprintf(what, sizeof what, "%s of %s", name, describe(&p->x));
    gpu_read(got, x->device, (size_t)x->count * bytes);
    for (int64_t i = 0; i < x->rows && good; i++)
        good = gpu_near(what, (char *)got + (size_t)(i * x->ld) * bytes, want + i * x->columns,
                        x->columns, x->dtype, p->error);
    for (int64_t i = 0; i < x->count && good; i++)
        if (i % x->ld >= x->columns)
            good = CHECK_MSG(isnan(gpu_get(got, i, x->dtype)), "%s: a gap was written", what);
    free(got);
    return good;
}

/* The largest Euclidean length of a column of C. */
static double longest_column(const product *p)
{
    double longest = 0;
    for (int64_t j = 0; j < p->x.n; j++) {
        double squares = 0;
        for (int64_t i = 0; i < p->x.m; i++)
            squares += p->want[i * p->x.n + j] * p->want[i * p->x.n + j];
        longest = fmax(longest, sqrt(squares));
    }
    return longest;
}

static bool check_product(const product *p)
{
    const ask *x = &p->x;
    const bool backward = (x->flags & DTRAIN_GEMM_ACT_BACKWARD) != 0;
    bool good = check_matrix(p, &p->c, p->want, "C");
    if (good && x->aux && !backward) good = check_matrix(p, &p->aux, p->want_aux, "aux");
    if (good && x->bias_grad) {
        /* Column sums are of C as it is stored: sums of m roundings. */
        const bool of_c = (x->flags & DTRAIN_GEMM_BIAS_GRAD_C) != 0;
        const double rounding = of_c ? 3 * gpu_rounding(x->c) * longest_column(p) : 0;
        float *got = (float *)malloc((size_t)p->grad_count * 4 + 4);
        gpu_read(got, p->args.bias_grad, (size_t)p->grad_count * 4);
        good = gpu_near(describe(x), got, p->want_grad, p->grad_count, DTRAIN_DTYPE_F32,
                        p->error * (2 + sqrt((double)x->m)) + rounding);
        free(got);
    }
    return good;
}

static bool try_ask(const ask *x, uint32_t math)
{
    product p = make_product(x, math);
    const dtrain_result result = gpu->ops->gemm(gpu, &p.args);
    bool good = CHECK_MSG(result == DTRAIN_OK, "%s: %s", describe(x), dtrain_last_error()) != 0;
    /* The second call finds its algorithm in the cache. */
    for (int again = 0; again < 2 && good; again++) {
        good = check_product(&p);
        reset_product(&p);
        CHECK(gpu->ops->gemm(gpu, &p.args) == DTRAIN_OK);
    }
    drop_product(&p);
    return good;
}

/* ---- Cases --------------------------------------------------------------------------------------*/

static const int64_t shapes[][3] = {{16, 24, 32}, {16, 16, 16}, {64, 40, 8}, {1, 1, 1},
                                    {1, 9, 5},    {7, 1, 3},    {5, 3, 1},   {33, 17, 19},
                                    {130, 70, 3}, {2, 260, 4},  {24, 16, 65}};

static void test_shapes_and_transposes(void)
{
    gpu_open();
    EACH(s, shapes)
    EACH(d, dtypes)
    for (uint32_t flags = 0; flags < 4; flags++)
        for (int pad = 0; pad < 9; pad += pad ? 5 : 3) {
            ask x = {shapes[s][0],
                     shapes[s][1],
                     shapes[s][2],
                     flags,
                     0,
                     dtypes[d],
                     dtypes[d],
                     dtypes[d],
                     1,
                     0,
                     false,
                     false,
                     false,
                     false,
                     pad,
                     0};
            if (!try_ask(&x, 0)) break;
            x.alpha = -0.5f, x.beta = 0.75f;
            if (!try_ask(&x, 0)) break;
        }
    gpu_close();
}

/* Kernels run so far, where that is known: cublasLt's products are none. */
static int64_t kernels_run(void)
{
#ifdef DTRAIN_CUDA_EMULATION
    dtrain_emulation_counters now;
    CHECK(gpu->ops->synchronize(gpu) == DTRAIN_OK);
    dtrain_emulation_get_counters(&now);
    return now.kernels;
#else
    return 0;
#endif
}

/* One matrix alone is less aligned than the others: algorithms are told so, each of its own.
 * One that was told wrong would be refused, and our kernels would step in. */
static void test_alignment_of_each(void)
{
    gpu_open();
    EACH(d, dtypes)
    for (int which = 0; which < 3; which++) {
        const ask x = {16, 24, 32,    0,     0,     dtypes[d], dtypes[d], dtypes[d],
                       1,  0,  false, false, false, false,     0,         0};
        const size_t bytes = dtrain_dtype_bytes(dtypes[d]);
        product p = make_product(&x, 0);
        matrix *moved = which == 0 ? &p.a : which == 1 ? &p.b : &p.c;
        moved->device = gpu_give(moved->host, (size_t)moved->count * bytes, bytes);
        p.args.a = p.a.device, p.args.b = p.b.device, p.args.c = p.c.device;
        const int64_t before = kernels_run();
        CHECK_MSG(gpu->ops->gemm(gpu, &p.args) == DTRAIN_OK, "matrix %d: %s", which,
                  dtrain_last_error());
        CHECK_MSG(kernels_run() == before, "matrix %d: kernels of ours ran", which);
        check_product(&p);
        drop_product(&p);
    }
    gpu_close();
}

/* All 27 triples, with and without something to do after the product. */
static void test_types(void)
{
    gpu_open();
    EACH(a, dtypes)
    EACH(b, dtypes)
    EACH(c, dtypes)
    for (int kind = 0; kind < 8; kind++) {
        ask x = {kind & 4 ? 16 : 13,
                 kind & 4 ? 24 : 11,
                 kind & 4 ? 32 : 7,
                 (uint32_t)kind % 4,
                 0,
                 dtypes[a],
                 dtypes[b],
                 dtypes[c],
                 2,
                 kind & 1 ? -1.5f : 0,
                 false,
                 false,
                 false,
                 false,
                 kind & 4 ? 0 : 3,
                 0};
        if (kind & 2) x.bias = x.aux = true, x.activation = DTRAIN_ACTIVATION_GELU;
        if (!try_ask(&x, 0)) break;
    }
    gpu_close();
}

/* forward: activation x bias x aux x beta, where epilogues fuse (multiples of 8, aligned) and not. */
static void test_forward_epilogues(void)
{
    static const struct {
        int64_t m, n, k;
        int pad;
        size_t shift;
    } places[] = {{16, 24, 32, 0, 0}, {16, 24, 32, 8, 0}, {16, 24, 32, 3, 0}, {16, 24, 32, 0, 1},
                  {15, 21, 9, 0, 0},  {70, 132, 8, 4, 0}, {9, 513, 8, 0, 0}};
    gpu_open();
    EACH(place, places)
    EACH(a, dtypes)
    EACH(c, dtypes)
    for (int kind = 0; kind < 24; kind++) {
        if (dtypes[c] != DTRAIN_DTYPE_F32 && dtypes[c] != dtypes[a]) continue;
        ask x = {places[place].m,
                 places[place].n,
                 places[place].k,
                 DTRAIN_GEMM_TRANS_B,
                 (uint32_t)kind % 3,
                 dtypes[a],
                 dtypes[a],
                 dtypes[c],
                 0.5f,
                 kind & 4 ? 1.0f : 0.0f,
                 false,
                 false,
                 false,
                 false,
                 places[place].pad,
                 places[place].shift};
        x.bias = kind / 3 & 1;
        x.aux = kind / 6 & 1;
        x.beta = kind / 12 & 1 ? 0.5f : 0;
        if (!try_ask(&x, 0)) break;
    }
    gpu_close();
}

/* backward: activation x bias gradient x beta. */
static void test_backward_epilogues(void)
{
    static const struct {
        int64_t m, n, k;
        int pad;
        size_t shift;
    } places[] = {{16, 24, 32, 0, 0}, {16, 24, 32, 8, 0}, {16, 24, 32, 0, 1},
                  {15, 21, 9, 2, 0},  {200, 36, 8, 0, 0}, {1, 8, 8, 0, 0}};
    gpu_open();
    EACH(place, places)
    EACH(a, dtypes)
    EACH(c, dtypes)
    for (int kind = 0; kind < 36; kind++) {
        if (dtypes[c] != DTRAIN_DTYPE_F32 && dtypes[c] != dtypes[a]) continue;
        ask x = {places[place].m,
                 places[place].n,
                 places[place].k,
                 DTRAIN_GEMM_ACT_BACKWARD,
                 (uint32_t)kind % 3,
                 dtypes[a],
                 dtypes[a],
                 dtypes[c],
                 1.5f,
                 0,
                 false,
                 true,
                 false,
                 false,
                 places[place].pad,
                 places[place].shift};
        x.beta = kind / 3 % 2 ? -1 : 0;
        x.bias_grad = kind / 6 % 3 > 0;
        x.accumulate = kind / 6 % 3 == 2;
        if (kind / 18) x.flags |= DTRAIN_GEMM_BIAS_GRAD_C;
        if (!try_ask(&x, 0)) break;
    }
    gpu_close();
}

/* d_weight = d_y' x with the bias gradient beside it, and its rarer relatives. */
static void test_bias_gradients(void)
{
    static const int64_t sizes[][3] = {{24, 16, 64}, {13, 5, 200}, {300, 3, 70}, {1, 1, 1}};
    gpu_open();
    EACH(s, sizes)
    EACH(a, dtypes)
    EACH(c, dtypes)
    for (int kind = 0; kind < 32; kind++) {
        if (dtypes[c] != DTRAIN_DTYPE_F32 && dtypes[c] != dtypes[a]) continue;
        ask x = {sizes[s][0],
                 sizes[s][1],
                 sizes[s][2],
                 (uint32_t)kind % 4,
                 0,
                 dtypes[a],
                 dtypes[a],
                 dtypes[c],
                 0.5f,
                 kind & 4 ? 1.0f : 0.0f,
                 false,
                 false,
                 true,
                 (kind & 8) != 0,
                 kind & 1 ? 5 : 0,
                 0};
        if (kind & 16) x.flags |= DTRAIN_GEMM_BIAS_GRAD_C;
        if (!try_ask(&x, 0)) break;
    }
    gpu_close();
}

/* Row sums of op(A) beside a forward epilogue, and a misaligned gradient vector. */
static void test_bias_gradient_beside_all(void)
{
    gpu_open();
    for (int kind = 0; kind < 16; kind++) {
        ask x = {16,
                 24,
                 32,
                 kind & 1,
                 kind & 2 ? DTRAIN_ACTIVATION_GELU : 0,
                 DTRAIN_DTYPE_BF16,
                 DTRAIN_DTYPE_BF16,
                 kind & 4 ? DTRAIN_DTYPE_F32 : DTRAIN_DTYPE_BF16,
                 1,
                 0,
                 true,
                 (kind & 2) != 0,
                 true,
                 (kind & 8) != 0,
                 0,
                 0};
        try_ask(&x, 0);
        x.bias = false, x.shift = 1;
        try_ask(&x, 0);
    }
    gpu_close();
}

/* Without a product (k or alpha 0) the rest is still done; A and B are not read; empty C is nothing. */
static void test_empty(void)
{
    gpu_open();
    EACH(c, dtypes)
    for (int kind = 0; kind < 16; kind++) {
        ask x = {9,
                 12,
                 kind & 1 ? 0 : 5,
                 kind & 8 ? DTRAIN_GEMM_TRANS_A : 0,
                 kind & 2 ? DTRAIN_ACTIVATION_GELU : 0,
                 DTRAIN_DTYPE_F32,
                 DTRAIN_DTYPE_F32,
                 dtypes[c],
                 kind & 1 ? 1.0f : 0.0f,
                 kind & 4 ? 2.0f : 0.0f,
                 true,
                 (kind & 2) != 0,
                 true,
                 (kind & 4) != 0,
                 1,
                 0};
        product p = make_product(&x, 0);
        if (!(kind & 1)) p.args.b = NULL;
        CHECK_MSG(gpu->ops->gemm(gpu, &p.args) == DTRAIN_OK, "%s: %s", describe(&x),
                  dtrain_last_error());
        check_product(&p);
        drop_product(&p);
    }
    dtrain_gemm_args none;
    memset(&none, 0, sizeof none);
    none.alpha = 1, none.k = 4;
    none.m = 0, none.n = 5;
    CHECK(gpu->ops->gemm(gpu, &none) == DTRAIN_OK);
    none.m = 5, none.n = 0;
    CHECK(gpu->ops->gemm(gpu, &none) == DTRAIN_OK);
    gpu_close();
}

/* NaN and infinities of A arrive in C, through every activation; what beta == 0 must not read does not. */
static void test_nan(void)
{
    gpu_open();
    for (uint32_t activation = 0; activation < 3; activation++) EACH(d, dtypes)
        {
            ask x = {16, 24, 32,   0,     activation, dtypes[d], dtypes[d], dtypes[d],
                     1,  0,  true, false, false,      false,     0,         0};
            const size_t bytes = dtrain_dtype_bytes(dtypes[d]);
            product p = make_product(&x, 0);
            void *got = malloc((size_t)p.c.count * bytes);
            gpu_set(p.a.host, 3 * p.a.ld + 7, dtypes[d], NAN);
            gpu_write(p.a.device, p.a.host, (size_t)p.a.count * bytes);
            CHECK(gpu->ops->gemm(gpu, &p.args) == DTRAIN_OK);
            gpu_read(got, p.c.device, (size_t)p.c.count * bytes);
            for (int64_t i = 0; i < p.c.count; i++)
                CHECK_MSG(isnan(gpu_get(got, i, dtypes[d])) == (i / x.n == 3),
                          "activation %u, element %lld", (unsigned)activation, (long long)i);
            free(got);
            drop_product(&p);
        }
    gpu_close();
}

/* The backward pass may overwrite what it reads; the slope of GELU at both ends; relu from its output. */
static void test_backward_in_place(void)
{
    gpu_open();
    EACH(d, dtypes)
    for (uint32_t activation = 1; activation < 3; activation++) {
        ask x = {16,         24,        32,        DTRAIN_GEMM_ACT_BACKWARD,
                 activation, dtypes[d], dtypes[d], dtypes[d],
                 1,          0,         false,     true,
                 false,      false,     0,         0};
        product p = make_product(&x, 0);
        p.args.c = p.args.aux;
        p.c.device = p.aux.device;
        CHECK(gpu->ops->gemm(gpu, &p.args) == DTRAIN_OK);
        check_product(&p);
        drop_product(&p);
    }
    gpu_close();
}

/* What the modes may do to fp32, and that they leave halves alone. */
static void test_math(void)
{
    for (uint32_t math = DTRAIN_MATH_FP32; math <= DTRAIN_MATH_BF16; math++) {
        open_with_math(math);
        for (int kind = 0; kind < 4; kind++) {
            ask x = {16,
                     24,
                     40,
                     0,
                     kind & 2 ? DTRAIN_ACTIVATION_GELU : 0,
                     DTRAIN_DTYPE_F32,
                     DTRAIN_DTYPE_F32,
                     DTRAIN_DTYPE_F32,
                     1,
                     0,
                     (kind & 2) != 0,
                     (kind & 2) != 0,
                     false,
                     false,
                     kind & 1 ? 3 : 0,
                     0};
            product p = make_product(&x, math);
            p.error += math == DTRAIN_MATH_TF32 ? 1e-2 : 1e-6;
            CHECK(gpu->ops->gemm(gpu, &p.args) == DTRAIN_OK);
            check_product(&p);
            drop_product(&p);
            EACH(a, dtypes) /* at least one half: exact products */
            {
                if (dtypes[a] == DTRAIN_DTYPE_F32) continue;
                x.a = dtypes[a];
                x.b = math == DTRAIN_MATH_FP32 ? DTRAIN_DTYPE_F32 : dtypes[3 - a];
                try_ask(&x, math);
            }
        }
        gpu_close();
    }
}

/* fp32 is really reduced: else "as fast as bf16" would be a word. */
static void test_math_is_used(void)
{
    float sums[3];
    for (uint32_t math = DTRAIN_MATH_FP32; math <= DTRAIN_MATH_BF16; math++) {
        const float a = 1 + 1.0f / 512 + 1.0f / 4096,
                    b = 1; /* bf16: 1, tf32: 1 + 1/512, fp32: all */
        open_with_math(math);
        dtrain_gemm_args args;
        memset(&args, 0, sizeof args);
        args.m = args.n = args.k = args.lda = args.ldb = args.ldc = 1;
        args.alpha = 1;
        args.a = gpu_give(&a, 4, 0), args.b = gpu_give(&b, 4, 0), args.c = gpu_take(4, 0);
        args.a_dtype = args.b_dtype = args.c_dtype = DTRAIN_DTYPE_F32;
        CHECK(gpu->ops->gemm(gpu, &args) == DTRAIN_OK);
        gpu_read(&sums[math - 1], args.c, 4);
        gpu_close();
    }
    CHECK(sums[0] == 1 + 1.0f / 512 + 1.0f / 4096);
#ifdef DTRAIN_CUDA_EMULATION /* a device may always be more exact than it has to be */
    CHECK(sums[1] != sums[0] && fabs((double)(sums[1] - sums[0])) <= 1.0 / 2048);
    CHECK(sums[2] == 1);
#endif
}

/* The same bits in every order of threads, and again from the cache. */
static void test_orders(void)
{
    static const int64_t sizes[][3] = {{16, 24, 32}, {65, 35, 9}};
    gpu_open();
    EACH(s, sizes)
    EACH(a, dtypes)
    EACH(c, dtypes)
    for (int kind = 0; kind < 4; kind++) {
        ask x = {sizes[s][0],
                 sizes[s][1],
                 sizes[s][2],
                 kind & 1,
                 DTRAIN_ACTIVATION_GELU,
                 dtypes[a],
                 dtypes[a],
                 dtypes[c],
                 1,
                 0.5f,
                 !(kind & 2),
                 true,
                 true,
                 false,
                 0,
                 0};
        if (kind & 2) x.flags |= DTRAIN_GEMM_ACT_BACKWARD | DTRAIN_GEMM_BIAS_GRAD_C;
        product p = make_product(&x, 0);
        const size_t bytes = (size_t)p.c.count * dtrain_dtype_bytes(x.c),
                     grad_bytes = (size_t)p.grad_count * 4;
        char *first = (char *)malloc(bytes + grad_bytes), *got = (char *)malloc(bytes + grad_bytes);
        EACH_ORDER(order)
        {
            char *to = order ? got : first;
            reset_product(&p);
            CHECK(gpu->ops->gemm(gpu, &p.args) == DTRAIN_OK);
            gpu_read(to, p.c.device, bytes);
            gpu_read(to + bytes, p.args.bias_grad, grad_bytes);
            CHECK_MSG(to == first || memcmp(got, first, bytes + grad_bytes) == 0, "order %d: %s",
                      order, describe(&x));
        }
        free(first);
        free(got);
        drop_product(&p);
    }
    gpu_close();
}

/* More kinds of products than the cache holds, twice. */
static void test_many_kinds(void)
{
    gpu_open();
    for (int round = 0; round < 2; round++)
        for (int64_t i = 0; i < 900; i++) {
            ask x = {1 + i % 30,
                     1 + i / 30,
                     2,
                     0,
                     0,
                     DTRAIN_DTYPE_F32,
                     DTRAIN_DTYPE_F32,
                     DTRAIN_DTYPE_F32,
                     1,
                     0,
                     false,
                     false,
                     false,
                     false,
                     0,
                     0};
            product p = make_product(&x, 0);
            CHECK(gpu->ops->gemm(gpu, &p.args) == DTRAIN_OK);
            check_product(&p);
            drop_product(&p);
        }
    gpu_close();
}

/* A product that is made aside goes through bounded scratch, some rows of C at a time. */
static void try_aside(uint32_t flags)
{
    const int64_t m = 20, n = 1 << 20; /* 16 rows of fp32 are 64 MiB */
    uint16_t *a = (uint16_t *)malloc((size_t)m * 2), *got = (uint16_t *)malloc((size_t)(m * n) * 2);
    float *b = (float *)calloc((size_t)n, 4);
    dtrain_gemm_args args;
    gpu_open();
    memset(&args, 0, sizeof args);
    for (int64_t i = 0; i < m; i++) a[i] = dtrain_half_from_f32(DTRAIN_DTYPE_F16, (float)(i + 1));
    for (int64_t j = 0; j < n; j++) b[j] = (float)(j % 5);
    args.m = m, args.n = n, args.k = 1, args.lda = 1, args.ldb = n, args.ldc = n;
    args.flags = flags;
    if (flags & DTRAIN_GEMM_TRANS_A) args.lda = m;
    args.alpha = 1;
    args.activation = DTRAIN_ACTIVATION_RELU;
    args.a = gpu_give(a, (size_t)m * 2, 0), args.b = gpu_give(b, (size_t)n * 4, 0);
    args.c = gpu_take((size_t)(m * n) * 2, 0);
    args.a_dtype = args.c_dtype = DTRAIN_DTYPE_F16, args.b_dtype = DTRAIN_DTYPE_F32;
    CHECK_MSG(gpu->ops->gemm(gpu, &args) == DTRAIN_OK, "%s", dtrain_last_error());
    gpu_read(got, args.c, (size_t)(m * n) * 2);
    int64_t wrong = 0;
    for (int64_t i = 0; i < m * n; i++)
        wrong +=
            got[i] != dtrain_half_from_f32(DTRAIN_DTYPE_F16, (float)((i / n + 1) * (i % n % 5)));
    CHECK_MSG(wrong == 0, "%lld elements are wrong", (long long)wrong);
    gpu_close();
    free(a);
    free(b);
    free(got);
}

static void test_aside_in_pieces(void) { try_aside(0); }
static void test_aside_in_pieces_transposed(void) { try_aside(DTRAIN_GEMM_TRANS_A); }

static void test_errors(void)
{
    static const float zero = 0;
    const ask x = {8,
                   8,
                   8,
                   0,
                   0,
                   DTRAIN_DTYPE_F32,
                   DTRAIN_DTYPE_F32,
                   DTRAIN_DTYPE_F32,
                   1,
                   0,
                   false,
                   false,
                   false,
                   false,
                   0,
                   0};
    gpu_open();
    product p = make_product(&x, 0);
    dtrain_gemm_args args = p.args;
    args.m = (int64_t)INT32_MAX + 1;
    CHECK(gpu->ops->gemm(gpu, &args) == DTRAIN_ERROR_UNSUPPORTED);
    CHECK_SAYS("m is 2147483648");
    args = p.args, args.ldb = (int64_t)1 << 40;
    CHECK(gpu->ops->gemm(gpu, &args) == DTRAIN_ERROR_UNSUPPORTED);
    CHECK_SAYS("ldb is 1099511627776");
    args = p.args, args.k = -1;
    CHECK(gpu->ops->gemm(gpu, &args) == DTRAIN_ERROR_ARGUMENT);
    CHECK_SAYS("k is -1");
    args = p.args, args.a_dtype = DTRAIN_DTYPE_I32;
    CHECK(gpu->ops->gemm(gpu, &args) == DTRAIN_ERROR_UNSUPPORTED);
    CHECK_SAYS("i32");
    args = p.args, args.c_dtype = DTRAIN_DTYPE_I64;
    CHECK(gpu->ops->gemm(gpu, &args) == DTRAIN_ERROR_UNSUPPORTED);
    args = p.args, args.flags = 64;
    CHECK(gpu->ops->gemm(gpu, &args) == DTRAIN_ERROR_UNSUPPORTED);
    CHECK_SAYS("0x40");
    args = p.args, args.activation = 4;
    CHECK(gpu->ops->gemm(gpu, &args) == DTRAIN_ERROR_ARGUMENT);
    CHECK_SAYS("activation is 4");
    args = p.args, args.flags = DTRAIN_GEMM_ACT_BACKWARD, args.activation = DTRAIN_ACTIVATION_GELU;
    CHECK(gpu->ops->gemm(gpu, &args) == DTRAIN_ERROR_ARGUMENT);
    CHECK_SAYS("aux");
    args.aux = p.aux.device, args.bias = &zero;
    CHECK(gpu->ops->gemm(gpu, &args) == DTRAIN_ERROR_ARGUMENT);
    CHECK_SAYS("bias");
    CHECK(gpu->ops->gemm(gpu, &p.args) == DTRAIN_OK); /* and nothing is broken by them */
    check_product(&p);
    drop_product(&p);
    gpu_close();
}

/* Type 0 is F32, as everywhere. */
static void test_type_zero(void)
{
    const ask x = {8,
                   8,
                   8,
                   0,
                   DTRAIN_ACTIVATION_GELU,
                   DTRAIN_DTYPE_F32,
                   DTRAIN_DTYPE_F32,
                   DTRAIN_DTYPE_F32,
                   1,
                   0,
                   true,
                   true,
                   false,
                   false,
                   0,
                   0};
    gpu_open();
    product p = make_product(&x, 0);
    p.args.a_dtype = p.args.b_dtype = p.args.c_dtype = DTRAIN_DTYPE_F32;
    CHECK(gpu->ops->gemm(gpu, &p.args) == DTRAIN_OK);
    check_product(&p);
    drop_product(&p);
    gpu_close();
}

/* A captured product replays, and sees what its operands hold then. */
static void test_graph(void)
{
    gpu_open();
    for (int kind = 0; kind < 4; kind++) {
        ask x = {16,
                 24,
                 32,
                 0,
                 DTRAIN_ACTIVATION_GELU,
                 DTRAIN_DTYPE_BF16,
                 DTRAIN_DTYPE_BF16,
                 DTRAIN_DTYPE_BF16,
                 1,
                 kind & 1 ? 1.0f : 0.0f,
                 true,
                 true,
                 true,
                 true,
                 kind & 2 ? 3 : 0,
                 0};
        dtrain_graph *graph = NULL;
        product p = make_product(&x, 0);
        CHECK(gpu->ops->gemm(gpu, &p.args) == DTRAIN_OK); /* the first step is not captured */
        reset_product(&p);
        const dtrain_result begin = gpu->ops->graph_begin(gpu);
        CHECK(begin == DTRAIN_OK);
        CHECK_MSG(gpu->ops->gemm(gpu, &p.args) == DTRAIN_OK, "%s", dtrain_last_error());
        CHECK(gpu->ops->graph_end(gpu, &graph) == DTRAIN_OK);
        reset_product(&p);
        CHECK(gpu->ops->graph_launch(gpu, graph) == DTRAIN_OK);
        check_product(&p);
        gpu->ops->graph_destroy(gpu, graph);
        drop_product(&p);
    }
    gpu_close();
}

/* A kind of product first met while a graph is captured is taken untimed. */
static void try_graph_first(float beta)
{
    const ask x = plain_ask(DTRAIN_DTYPE_F32, beta);
    dtrain_graph *graph = NULL;
    gpu_open();
    product p = make_product(&x, 0);
    CHECK(gpu->ops->graph_begin(gpu) == DTRAIN_OK);
    CHECK_MSG(gpu->ops->gemm(gpu, &p.args) == DTRAIN_OK, "%s", dtrain_last_error());
    CHECK_MSG(gpu->ops->graph_end(gpu, &graph) == DTRAIN_OK, "%s", dtrain_last_error());
    CHECK(graph && gpu->ops->graph_launch(gpu, graph) == DTRAIN_OK);
    check_product(&p);
    gpu->ops->graph_destroy(gpu, graph);
    drop_product(&p);
    gpu_close();
}

static void test_graph_first(void)
{
    try_graph_first(0);
    try_graph_first(1);
}

#ifdef DTRAIN_CUDA_EMULATION

static dtrain_emulation_counters counters(void)
{
    dtrain_emulation_counters now;
    CHECK(gpu->ops->synchronize(gpu) == DTRAIN_OK);
    dtrain_emulation_get_counters(&now);
    return now;
}

/* How many products and kernels one call takes once its algorithm is known: what was fused shows. */
static void check_cost(const ask *x, int64_t matmuls, int64_t kernels)
{
    product p = make_product(x, 0);
    CHECK(gpu->ops->gemm(gpu, &p.args) == DTRAIN_OK);
    const dtrain_emulation_counters before = counters();
    CHECK(gpu->ops->gemm(gpu, &p.args) == DTRAIN_OK);
    const dtrain_emulation_counters after = counters();
    CHECK_MSG(after.matmuls - before.matmuls == matmuls, "%s: %lld products", describe(x),
              (long long)(after.matmuls - before.matmuls));
    CHECK_MSG(after.kernels - before.kernels == kernels, "%s: %lld kernels", describe(x),
              (long long)(after.kernels - before.kernels));
    CHECK(after.allocations == before.allocations && after.cublas_alive == before.cublas_alive);
    CHECK(after.events_alive == before.events_alive);
    drop_product(&p);
}

static void test_what_is_fused(void)
{
    const ask plain = plain_ask(DTRAIN_DTYPE_BF16, 0);
    ask x = plain;
    gpu_open();
    check_cost(&x, 1, 0);
    x.beta = 1;
    check_cost(&x, 1, 0);
    x = plain, x.bias = true;
    check_cost(&x, 1, 1); /* the bias in C's type */
    x.c = DTRAIN_DTYPE_F32;
    check_cost(&x, 1, 0);
    x = plain, x.bias = x.aux = true, x.activation = DTRAIN_ACTIVATION_GELU;
    check_cost(&x, 1, 1);
    x = plain, x.aux = true, x.activation = DTRAIN_ACTIVATION_GELU,
    x.flags = DTRAIN_GEMM_ACT_BACKWARD;
    check_cost(&x, 1, 0);
    x.bias_grad = true, x.flags |= DTRAIN_GEMM_BIAS_GRAD_C;
    check_cost(&x, 1, 2); /* fp32 column sums of a bf16 C */
    x.c = DTRAIN_DTYPE_F32;
    check_cost(&x, 1, 0);
    x = plain, x.flags = DTRAIN_GEMM_TRANS_A, x.c = DTRAIN_DTYPE_F32, x.bias_grad = true;
    check_cost(&x, 1, 0);
    x.accumulate = true;
    check_cost(&x, 1, 1); /* one kernel adds the new gradient */
    x = plain, x.activation = DTRAIN_ACTIVATION_RELU, x.bias = true;
    check_cost(&x, 1, 1);
    x = plain, x.a = DTRAIN_DTYPE_F16;
    check_cost(&x, 1, 3);
    gpu_close();
}

static uint32_t slow_gemms(void)
{
    dtrain_device_info info;
    CHECK(dtrain_device_query(gpu, &info) == DTRAIN_OK);
    return info.slow_gemms;
}

/* Run a product twice under a fault, which the second call meets no more: cublasLt is asked for
 * nothing that it refused. */
static void try_refused(const ask *x, dtrain_emulation_fault fault, int64_t n)
{
    product p = make_product(x, 0);
    dtrain_emulation_inject(fault, n);
    CHECK_MSG(gpu->ops->gemm(gpu, &p.args) == DTRAIN_OK, "%s: %s", describe(x),
              dtrain_last_error());
    check_product(&p);
    reset_product(&p);
    const dtrain_emulation_counters before = counters();
    CHECK(gpu->ops->gemm(gpu, &p.args) == DTRAIN_OK);
    const dtrain_emulation_counters after = counters();
    check_product(&p);
    CHECK_MSG(after.heuristics == before.heuristics &&
                  after.refused_matmuls == before.refused_matmuls,
              "%s: the second call asks %d times and is refused %d times", describe(x),
              (int)(after.heuristics - before.heuristics),
              (int)(after.refused_matmuls - before.refused_matmuls));
    dtrain_emulation_inject(fault, 0);
    drop_product(&p);
}

/* The heuristic that finds nothing, and proposals that cublasLtMatmul refuses, one and all: results
 * are right, and query says how many kinds are slow for it. */
static void test_refusals(void)
{
    static const struct {
        dtrain_emulation_fault fault;
        int64_t n;
        bool slow;
    } faults[] = {{DTRAIN_EMULATION_REFUSE_MATMUL, 1, false},
                  {DTRAIN_EMULATION_REFUSE_MATMUL, 2, true},
                  {DTRAIN_EMULATION_NO_HEURISTIC, 1, true}};
    EACH(f, faults) for (uint32_t kind = 0; kind < 12; kind++)
    {
        const dtrain_dtype type = dtypes[kind % 3]; /* with every transposition */
        ask x = {33,  20,   25,    kind % 4, 0,     type,  type, type,
                 0.5, 0.75, false, false,    false, false, 0,    0};
        if (kind >= 4) x.bias_grad = x.accumulate = true;
        if (kind >= 8) x.bias = x.aux = true, x.activation = DTRAIN_ACTIVATION_GELU;
        if (kind % 2) x.m = 16, x.n = 24, x.k = 32; /* what epilogues take */
        if (kind / 2 % 2) gpu_open();               /* with a race of all proposals */
        else open_with_math(0);
        try_refused(&x, faults[f].fault, faults[f].n);
        if (kind < 8 || faults[f].slow) /* GELU is not fused at odd sizes without a fault */
            CHECK_MSG((slow_gemms() > 0) == faults[f].slow, "%s: %u slow kinds", describe(&x),
                      (unsigned)slow_gemms());
        gpu_close();
    }
    dtrain_emulation_counters now;
    dtrain_emulation_get_counters(&now);
    CHECK(now.cublas_alive == 0 && now.events_alive == 0 && now.allocations_alive == 0);
}

/* Attention by batched products, where cublasLt makes none of them. */
static void test_batches_refused(void)
{
    enum { T = 21, HEADS = 2, N = 10, BATCH = 2 };
    float y[2][BATCH * T * N];
    void *qkv = gpu_noise(BATCH * T * 3 * N, DTRAIN_DTYPE_F32, 1, 1);
    for (int refused = 0; refused < 2; refused++) {
        open_with_math(0);
        const packed_shape shape = {BATCH, T, HEADS, HEADS, N / HEADS, true, DTRAIN_DTYPE_F32};
        const dtrain_attention_args args =
            packed_attention(shape, gpu_give(qkv, BATCH * T * 3 * N * 4, 0),
                             gpu_take(sizeof y[0], 0), gpu_take(BATCH * HEADS * T * 4, 0));
        dtrain_emulation_inject(DTRAIN_EMULATION_REFUSE_MATMUL, refused ? 2 : 0);
        CHECK_MSG(gpu->ops->attention(gpu, &args) == DTRAIN_OK, "%s", dtrain_last_error());
        gpu_read(y[refused], args.y, sizeof y[0]);
        CHECK(slow_gemms() == (refused ? 2 : 0));
        dtrain_emulation_inject(DTRAIN_EMULATION_REFUSE_MATMUL, 0);
        gpu_close();
    }
    for (int i = 0; i < BATCH * T * N; i++)
        CHECK_MSG(fabs((double)y[1][i] - (double)y[0][i]) < 1e-5, "y[%d] is %g, not %g", i,
                  (double)y[1][i], (double)y[0][i]);
    free(qkv);
}

/* An error that is no refusal stays one; a candidate that meets it loses the race. */
static void test_failures(void)
{
    const ask x = {16,
                   24,
                   32,
                   0,
                   0,
                   DTRAIN_DTYPE_BF16,
                   DTRAIN_DTYPE_BF16,
                   DTRAIN_DTYPE_F32,
                   1,
                   1,
                   false,
                   false,
                   false,
                   false,
                   0,
                   0};
    gpu_open();
    product p = make_product(&x, 0);
    dtrain_emulation_inject(DTRAIN_EMULATION_FAIL_MATMUL, 1);
    CHECK_MSG(gpu->ops->gemm(gpu, &p.args) == DTRAIN_OK, "%s", dtrain_last_error());
    check_product(&p);
    reset_product(&p);
    dtrain_emulation_inject(DTRAIN_EMULATION_FAIL_MATMUL, 1);
    CHECK(gpu->ops->gemm(gpu, &p.args) == DTRAIN_ERROR_SYSTEM);
    CHECK_SAYS("cublasLtMatmul failed: CUBLAS_STATUS_EXECUTION_FAILED");
    CHECK(gpu->ops->gemm(gpu, &p.args) == DTRAIN_OK);
    check_product(&p);
    CHECK(slow_gemms() == 0);
    drop_product(&p);
    gpu_close();
}

/* A product that adds to C takes no memory; to time its candidates it takes that of C, and gives it
 * back. What there is no room for is not timed. */
static void test_memory(void)
{
    const ask x = {64,
                   1024,
                   2,
                   0,
                   0,
                   DTRAIN_DTYPE_F32,
                   DTRAIN_DTYPE_F32,
                   DTRAIN_DTYPE_F32,
                   1,
                   1,
                   false,
                   false,
                   false,
                   false,
                   0,
                   0};
    for (int kind = 0; kind < 3; kind++) { /* untimed, timed, timed without room */
        if (kind) gpu_open();
        else open_with_math(0);
        product p = make_product(&x, 0);
        const dtrain_emulation_counters before = counters();
        dtrain_emulation_set_memory_left(kind == 2 ? 64 * 1024 * 4 - 1 : -1);
        CHECK_MSG(gpu->ops->gemm(gpu, &p.args) == DTRAIN_OK, "%s", dtrain_last_error());
        dtrain_emulation_set_memory_left(-1);
        check_product(&p);
        const dtrain_emulation_counters after = counters();
        CHECK_MSG(after.bytes_alive == before.bytes_alive, "kind %d keeps %lld bytes", kind,
                  (long long)(after.bytes_alive - before.bytes_alive));
        CHECK(after.allocations - before.allocations == (kind == 1));
        CHECK(after.matmuls - before.matmuls == (kind == 1 ? 7 : 1));
        drop_product(&p);
        gpu_close();
    }
}

/* An algorithm that needs all of the workspace is taken; one that needs more is not proposed. */
static void test_workspace(void)
{
    const ask x = plain_ask(DTRAIN_DTYPE_BF16, 1);
    for (int more = 0; more < 2; more++) {
        dtrain_emulation_inject(DTRAIN_EMULATION_WORKSPACE, (32 << 20) + more);
        open_with_math(0);
        check_cost(&x, 1, 0);
        CHECK(slow_gemms() == 0);
        gpu_close();
    }
    dtrain_emulation_inject(DTRAIN_EMULATION_WORKSPACE, 0);
}

/* The timing of candidates with beta != 0 leaves C alone even where there are two of them. */
static void test_timing_is_harmless(void)
{
    const ask x = {
        16,    24,   32,   0, 0, DTRAIN_DTYPE_F32, DTRAIN_DTYPE_F32, DTRAIN_DTYPE_F32, 1, 1, false,
        false, true, true, 0, 0};
    gpu_open();
    product p = make_product(&x, 0);
    const dtrain_emulation_counters before = counters();
    CHECK(gpu->ops->gemm(gpu, &p.args) == DTRAIN_OK);
    check_product(&p);
    const dtrain_emulation_counters after = counters();
    CHECK_MSG(after.matmuls - before.matmuls == 7, "%lld products",
              (long long)(after.matmuls - before.matmuls));
    drop_product(&p);
    gpu_close();
}

#endif

int main(int argc, char **argv)
{
    test_begin(argc, argv);
#ifdef DTRAIN_CUDA_EMULATION
    dtrain_emulation_set_quiet(1); /* cublasLt is asked for much that it refuses */
#endif
    if (gpu_missing()) {
        SKIP(test_cuda_gemm, gpu_missing());
        return test_summary();
    }
    RUN(test_shapes_and_transposes);
    RUN(test_alignment_of_each);
    RUN(test_types);
    RUN(test_forward_epilogues);
    RUN(test_backward_epilogues);
    RUN(test_bias_gradients);
    RUN(test_bias_gradient_beside_all);
    RUN(test_empty);
    RUN(test_nan);
    RUN(test_backward_in_place);
    RUN(test_math);
    RUN(test_math_is_used);
    RUN(test_orders);
    RUN(test_many_kinds);
    RUN(test_aside_in_pieces);
    RUN(test_aside_in_pieces_transposed);
    RUN(test_errors);
    RUN(test_type_zero);
    RUN(test_graph);
    RUN(test_graph_first);
#ifdef DTRAIN_CUDA_EMULATION
    RUN(test_what_is_fused);
    RUN(test_refusals);
    RUN(test_batches_refused);
    RUN(test_failures);
    RUN(test_memory);
    RUN(test_workspace);
    RUN(test_timing_is_harmless);
#endif
    return test_summary();
}
