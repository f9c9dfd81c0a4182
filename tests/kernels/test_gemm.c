/* test_gemm.c: the threads of one rank, exp and GELU, and matrix multiplication, seen from inside.
 *
 * The oracle of a product is a loop in double precision; a result may differ from it by the
 * rounding of its k fp32 steps. Every case runs without a pool and with 2, 3 and 4 threads, whose
 * results must have equal bits. Matrices are malloced exactly as large as their last element
 * needs, so that ASan sees what lies beyond, and the gaps between their rows are NaN.
 *
 * Each instruction set is forced in turn. The AVX-512 tile also runs as plain vector code ("wide"),
 * and AMX on emulated tiles, so that their logic is tested on machines without them. */
#include "device/cpu/cpu.c"
#include "instances.h"
#include "dtrain.h"

#include "test.h"
#include "allocator.h"
#include <sys/resource.h>

enum { MAX_THREADS = 4 };

/* ---- Random choices; a test starts from the same state however it is run ---- */

static uint64_t random_state = 88172645463325252u;

static int below(int n)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (int)((random_state >> 16) % (unsigned)n);
}

static float uniform(void) { return (float)below(20001) / 10000.0f - 1.0f; }

/* ---- What there is to test ---- */

static const dtrain__isa *isas[INSTANCES + 1];
static int isa_count, first_pairs; /* isas[first_pairs] and on multiply pairs of bf16 */

static void find_isas(void)
{
    const dtrain__kernels *found[INSTANCES];
    isa_count = first_pairs = instances_find(found);
    for (int i = 0; i < isa_count; i++) isas[i] = found[i]->gemm;
    if (instances_emulated_tiles()) isas[isa_count++] = instances_emulated_tiles();
}

/* What is not bf16 x bf16 goes to the last of the others. */
static void force(dtrain__cpu *ws, const dtrain__isa *isa)
{
    const int pairs = isa && isa->pair == 2;
    ws->isa = pairs ? isas[first_pairs - 1] : isa;
    ws->pairs = pairs ? isa : NULL;
    if (!isa) ws->isa = dtrain__kernels_select()->gemm;
    if (!ws->allocator.alloc) ws->allocator = dtrain__resolve_allocator(NULL);
}

static void workspace_free(dtrain__cpu *ws)
{
    dtrain__aligned_free(&ws->allocator, ws->scratch, ws->scratch_bytes);
}

/* pools[t] has t + 1 threads; the machine may have fewer cores, so they do not spin. */
static dtrain__pool *pools[MAX_THREADS];

static void open_pools(void)
{
    for (int t = 1; t < MAX_THREADS; t++)
        CHECK(dtrain__pool_create(&pools[t], NULL, t + 1, 1) == 0);
}

static void close_pools(void)
{
    for (int t = 1; t < MAX_THREADS; t++) dtrain__pool_destroy(pools[t]);
}

/* ---- Matrices ---- */

static float get(const void *data, dtrain_dtype dtype, int64_t i)
{
    if (dtype == DTRAIN_DTYPE_F32) return ((const float *)data)[i];
    uint16_t half = ((const uint16_t *)data)[i];
    return dtrain_half_to_f32(dtype, half);
}

static void put(void *data, dtrain_dtype dtype, int64_t i, float value)
{
    if (dtype == DTRAIN_DTYPE_F32) ((float *)data)[i] = value;
    else ((uint16_t *)data)[i] = dtrain_half_from_f32(dtype, value);
}

static size_t matrix_bytes(int64_t rows, int64_t cols, int64_t ld, dtrain_dtype dtype)
{
    return rows && cols ? (size_t)((rows - 1) * ld + cols) * dtrain_dtype_bytes(dtype) : 0;
}

/* (rows, cols) of random numbers, or of NaN. */
static void *matrix(int64_t rows, int64_t cols, int64_t ld, dtrain_dtype dtype, int nan)
{
    size_t bytes = matrix_bytes(rows, cols, ld, dtype);
    void *data = malloc(bytes ? bytes : 1);
    int64_t count = (int64_t)(bytes / dtrain_dtype_bytes(dtype));
    for (int64_t i = 0; i < count; i++)
        put(data, dtype, i, nan || i % ld >= cols ? NAN : uniform());
    return data;
}

/* ---- One product and its oracle ---- */

typedef struct problem {
    dtrain_gemm_args args;
    void *a, *b, *before; /* before: C as it was */
    float *bias;
    int use_bias, use_aux;
} problem;

static void problem_fill(problem *x)
{
    dtrain_gemm_args *g = &x->args;
    int ta = (g->flags & DTRAIN_GEMM_TRANS_A) != 0, tb = (g->flags & DTRAIN_GEMM_TRANS_B) != 0;
    int pad = below(3) ? 0 : 1 + below(9);
    g->lda = (ta ? g->m : g->k) + pad;
    g->ldb = (tb ? g->k : g->n) + pad;
    g->ldc = g->n + pad;
    g->a = x->a = matrix(ta ? g->k : g->m, ta ? g->m : g->k, g->lda, g->a_dtype, 0);
    g->b = x->b = matrix(tb ? g->n : g->k, tb ? g->k : g->n, g->ldb, g->b_dtype, 0);
    if (x->use_bias) g->bias = x->bias = (float *)matrix(1, g->n, g->n, DTRAIN_DTYPE_F32, 0);
    x->before = matrix(g->m, g->n, g->ldc, g->c_dtype, g->beta == 0);
}

/* Everything but the sizes by chance; halves: 1 where fp16 and bf16 may occur, 2 for A and B in
 * bf16. */
static problem problem_make(int m, int n, int k, int halves)
{
    static const dtrain_dtype types[3] = {DTRAIN_DTYPE_F32, DTRAIN_DTYPE_BF16, DTRAIN_DTYPE_F16};
    static const float alphas[4] = {1, 1, -0.5f, 0}, betas[4] = {0, 0, 1, 0.75f};
    problem x;
    dtrain_gemm_args *g = &x.args;
    memset(&x, 0, sizeof x);
    g->m = m;
    g->n = n;
    g->k = k;
    g->flags = (uint32_t)below(4);
    g->activation = (uint32_t)below(3);
    g->alpha = alphas[below(4)];
    g->beta = betas[below(4)];
    g->a_dtype = types[halves == 2 ? 1 : halves ? below(3) : 0];
    g->b_dtype = types[halves == 2 ? 1 : halves ? below(3) : 0];
    g->c_dtype = types[halves ? below(3) : 0];
    x.use_aux = below(2);
    x.use_bias = below(2);
    problem_fill(&x);
    return x;
}

static void problem_free(problem *x)
{
    free(x->a);
    free(x->b);
    free(x->before);
    free(x->bias);
}

static double a_at(const dtrain_gemm_args *g, int64_t i, int64_t p)
{
    return (double)get(g->a, g->a_dtype, g->flags & 1 ? p * g->lda + i : i * g->lda + p);
}

static double b_at(const dtrain_gemm_args *g, int64_t p, int64_t j)
{
    return (double)get(g->b, g->b_dtype, g->flags & 2 ? j * g->ldb + p : p * g->ldb + j);
}

/* Element (i, j) before the activation, and how far fp32 may be from it. */
static double exact(const problem *x, int64_t i, int64_t j, double *tolerance)
{
    const dtrain_gemm_args *g = &x->args;
    double sum = 0, size = 0, alpha = (double)g->alpha, beta = (double)g->beta;
    for (int64_t p = 0; p < g->k && g->alpha != 0; p++) {
        double product = a_at(g, i, p) * b_at(g, p, j);
        sum += product;
        size += fabs(product);
    }
    double c = g->beta == 0 ? 0 : beta * (double)get(x->before, g->c_dtype, i * g->ldc + j);
    double bias = g->bias ? (double)g->bias[j] : 0;
    size = fabs(alpha) * size + fabs(c) + fabs(bias);
    *tolerance = 0x1p-24 * (4 + sqrt((double)g->k)) * size;
    return alpha * sum + c + bias;
}

static double gelu(double x)
{
    return 0.5 * x * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)));
}

static double gelu_slope(double x)
{
    if (fabs(x) > 10) return x > 0;
    double t = tanh(0.7978845608028654 * (x + 0.044715 * x * x * x));
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * 0.7978845608028654 * (1 + 0.134145 * x * x);
}

static double activated(uint32_t activation, double x)
{
    if (activation == DTRAIN_ACTIVATION_RELU) return x > 0 ? x : 0;
    return activation == DTRAIN_ACTIVATION_GELU ? gelu(x) : x;
}

/* Half a unit in the last place of a stored number, relative. */
static double storage_error(dtrain_dtype dtype)
{
    return dtype == DTRAIN_DTYPE_F32 ? 0 : dtype == DTRAIN_DTYPE_BF16 ? 0x1p-8 : 0x1p-11;
}

/* Wrong elements of C and aux; of large products every 41st is looked at. */
static int64_t count_wrong(const problem *x, const void *c, const void *aux)
{
    const dtrain_gemm_args *g = &x->args;
    int64_t step = g->m * g->n * g->k > 500000 ? 41 : 1, wrong = 0;
    for (int64_t e = 0; e < g->m * g->n; e += step) {
        int64_t i = e / g->n, j = e % g->n, at = i * g->ldc + j;
        double tolerance, want = exact(x, i, j, &tolerance);
        double rounding = fabs(want) * storage_error(g->c_dtype);
        if (aux && !(fabs((double)get(aux, g->c_dtype, at) - want) <= tolerance + rounding))
            wrong++;
        want = activated(g->activation, want);
        tolerance = 1.2 * tolerance + fabs(want) * (4e-7 + storage_error(g->c_dtype)) + 1e-7;
        if (!(fabs((double)get(c, g->c_dtype, at) - want) <= tolerance)) wrong++;
    }
    return wrong;
}

/* Elements between the rows of C that are no longer what they were. */
static int64_t count_disturbed(const problem *x, const void *c)
{
    const dtrain_gemm_args *g = &x->args;
    size_t bytes = dtrain_dtype_bytes(g->c_dtype);
    int64_t disturbed = 0;
    for (int64_t i = 0; g->n && i + 1 < g->m; i++) {
        size_t gap = (size_t)(i * g->ldc + g->n) * bytes;
        if (memcmp((const char *)c + gap, (const char *)x->before + gap,
                   (size_t)(g->ldc - g->n) * bytes) != 0)
            disturbed++;
    }
    return disturbed;
}

/* C and aux of x, computed by `isa` on t + 1 threads. The caller frees them. */
static void *compute(const problem *x, const dtrain__isa *isa, dtrain__cpu *ws, int t, void **aux)
{
    dtrain_gemm_args g = x->args;
    size_t bytes = matrix_bytes(g.m, g.n, g.ldc, g.c_dtype);
    g.c = malloc(bytes ? bytes : 1);
    if (bytes) memcpy(g.c, x->before, bytes);
    g.aux = x->use_aux ? calloc(bytes ? bytes : 1, 1) : NULL;
    force(ws, isa);
    ws->pool = pools[t];
    CHECK(dtrain__gemm(ws, &g) == DTRAIN_OK);
    *aux = g.aux;
    return g.c;
}

static void check_problem(const problem *x, const dtrain__isa *isa)
{
    const dtrain_gemm_args *g = &x->args;
    dtrain__cpu ws;
    void *aux;
    memset(&ws, 0, sizeof ws);
    void *c = compute(x, isa, &ws, 0, &aux);
    int64_t wrong = count_wrong(x, c, aux), disturbed = count_disturbed(x, c);
    int differ = 0;
    for (int t = 1; t < MAX_THREADS; t++) {
        void *more_aux;
        void *more = compute(x, isa, &ws, t, &more_aux);
        size_t bytes = matrix_bytes(g->m, g->n, g->ldc, g->c_dtype);
        differ |= memcmp(c, more, bytes) != 0;
        if (aux) differ |= memcmp(aux, more_aux, bytes) != 0;
        free(more);
        free(more_aux);
    }
    CHECK_MSG(wrong == 0 && disturbed == 0 && !differ,
              "%s: %lld wrong, %lld rows disturbed, threads %s; m %d n %d k %d flags %u alpha %g "
              "beta %g types %d %d %d activation %u bias %d aux %d pad %d",
              isa->name, (long long)wrong, (long long)disturbed, differ ? "DIFFER" : "agree",
              (int)g->m, (int)g->n, (int)g->k, g->flags, (double)g->alpha, (double)g->beta,
              (int)g->a_dtype, (int)g->b_dtype, (int)g->c_dtype, g->activation, g->bias != NULL,
              x->use_aux, (int)(g->ldc - g->n));
    workspace_free(&ws);
    free(c);
    free(aux);
}

/* ---- Products ---- */

/* Sizes 0 to 70, with a liking for the edges of tiles. */
static void small_sizes(const dtrain__isa *isa)
{
    static const int edges[] = {0,  1,  2,  3,  5,  7,  8,  11, 12, 13,
                                16, 17, 23, 31, 32, 33, 47, 61, 64, 70};
    open_pools();
    for (int round = 0; round < 400; round++) {
        int size[3];
        for (int d = 0; d < 3; d++) size[d] = below(2) ? edges[below(20)] : below(71);
        problem x = problem_make(size[0], size[1], size[2], isa->pair == 2 ? 2 : round % 2);
        check_problem(&x, isa);
        problem_free(&x);
    }
    close_pools();
}

static void test_small_sizes(void)
{
    for (int i = 0; i < isa_count; i++) small_sizes(isas[i]);
}

/* Sizes beyond the blocks: k in several steps, C in several rectangles, both with a remainder. */
static void test_blocks(void)
{
    static const int sizes[][3] = {{300, 70, 40},    {31, 1700, 20}, {29, 37, 900}, {530, 33, 7},
                                   {270, 1050, 390}, {12, 32, 770},  {3, 2100, 5},  {128, 128, 384},
                                   {1, 3000, 385},   {40, 70, 1601}, {700, 33, 65}};
    open_pools();
    for (int s = 0; s < (int)(sizeof sizes / sizeof *sizes); s++) {
        for (int i = 0; i < isa_count; i++) {
            int halves = i >= first_pairs ? 2 : (s + i) % 2;
            problem x = problem_make(sizes[s][0], sizes[s][1], sizes[s][2], halves);
            check_problem(&x, isas[i]);
            problem_free(&x);
        }
    }
    close_pools();
}

/* Each combination of transposes, operand types, result type and activation. */
static void test_every_kind(void)
{
    static const dtrain_dtype types[3] = {DTRAIN_DTYPE_F32, DTRAIN_DTYPE_BF16, DTRAIN_DTYPE_F16};
    open_pools();
    for (int kind = 0; kind < 4 * 3 * 3 * 3 * 3; kind++) {
        for (int i = 0; i < isa_count; i++) {
            problem x = problem_make(0, 0, 0, 0);
            problem_free(&x);
            x.args.flags = (uint32_t)(kind % 4);
            x.args.a_dtype = types[kind / 4 % 3];
            x.args.b_dtype = types[kind / 12 % 3];
            x.args.c_dtype = types[kind / 36 % 3];
            x.args.activation = (uint32_t)(kind / 108);
            x.args.m = 26;
            x.args.n = 37;
            x.args.k = 19;
            problem_fill(&x);
            check_problem(&x, isas[i]);
            problem_free(&x);
        }
    }
    close_pools();
}

/* An element's bits depend on its row of A, its column of B and nothing else: a part of a product,
 * computed alone, equals that part of the whole. Results of sharded and unsharded runs agree. */
static void test_part_equals_whole(void)
{
    open_pools();
    for (int round = 0; round < 40; round++) {
        const dtrain__isa *isa = isas[round % isa_count];
        int halves = isa->pair == 2 ? 2 : round % 3 == 0;
        problem x = problem_make(40 + below(260), 40 + below(90), below(1600), halves);
        problem part = x;
        dtrain_gemm_args *g = &x.args, *h = &part.args;
        dtrain__cpu ws;
        void *aux, *part_aux;
        int64_t i0 = below((int)g->m), j0 = below((int)g->n), differing = 0;
        size_t a_size = dtrain_dtype_bytes(g->a_dtype), c_size = dtrain_dtype_bytes(g->c_dtype);
        size_t b_size = dtrain_dtype_bytes(g->b_dtype);
        memset(&ws, 0, sizeof ws);
        h->m = 1 + below((int)(g->m - i0));
        h->n = 1 + below((int)(g->n - j0));
        h->a = (char *)x.a + (size_t)(g->flags & DTRAIN_GEMM_TRANS_A ? i0 : i0 * g->lda) * a_size;
        h->b = (char *)x.b + (size_t)(g->flags & DTRAIN_GEMM_TRANS_B ? j0 * g->ldb : j0) * b_size;
        if (h->bias) h->bias = x.bias + j0;
        part.before = (char *)x.before + (size_t)(i0 * g->ldc + j0) * c_size;
        char *whole = (char *)compute(&x, isa, &ws, 0, &aux);
        char *alone = (char *)compute(&part, isa, &ws, below(MAX_THREADS), &part_aux);
        for (int64_t i = 0; i < h->m; i++) {
            size_t from = (size_t)((i0 + i) * g->ldc + j0) * c_size;
            size_t to = (size_t)(i * g->ldc) * c_size;
            differing += memcmp(whole + from, alone + to, (size_t)h->n * c_size) != 0;
        }
        CHECK_MSG(differing == 0, "%s: %lld of %lld rows differ; k %lld beta %g", isa->name,
                  (long long)differing, (long long)h->m, (long long)g->k, (double)g->beta);
        workspace_free(&ws);
        free(whole);
        free(alone);
        free(aux);
        free(part_aux);
        problem_free(&x);
    }
    close_pools();
}

/* fp32, alpha 1, beta 0, nothing after it. */
static problem thin_problem(int m, int n, int k, uint32_t flags)
{
    problem x;
    dtrain_gemm_args *g = &x.args;
    memset(&x, 0, sizeof x);
    g->m = m;
    g->n = n;
    g->k = k;
    g->flags = flags;
    g->alpha = 1;
    g->a_dtype = g->b_dtype = g->c_dtype = DTRAIN_DTYPE_F32;
    problem_fill(&x);
    return x;
}

/* Few columns and short k: the shapes of low-rank gradients, the edges of their loops, more rows
 * than a rectangle has, more k than B's buffer. */
static void test_thin(void)
{
    static const int sizes[][3] = {
        {2100, 1, 768}, {2100, 4, 768},  {2100, 16, 768}, {768, 3, 2100},
        {768, 16, 900}, {1100, 768, 1},  {1100, 768, 4},  {300, 1600, 16},
        {35, 5, 12000}, {300, 70, 9},    {1, 1, 500},     {8, 16, 16},
        {9, 17, 16},    {1061, 15, 400}, {40, 16, 384},   {41, 13, 385}};
    static const uint32_t usual[3] = {0, DTRAIN_GEMM_TRANS_A, DTRAIN_GEMM_TRANS_B};
    open_pools();
    for (int s = 0; s < (int)(sizeof sizes / sizeof *sizes); s++)
        for (int i = 0; i < first_pairs; i++) {
            problem x = thin_problem(sizes[s][0], sizes[s][1], sizes[s][2], usual[(s + i) % 3]);
            check_problem(&x, isas[i]);
            problem_free(&x);
        }
    for (int round = 0; round < 600; round++) {
        const int n = 1 + below(round % 2 ? 16 : 60), k = 1 + below(round % 2 ? 60 : 16);
        problem x = thin_problem(1 + below(70), n, k, (uint32_t)below(4));
        check_problem(&x, isas[round % first_pairs]);
        problem_free(&x);
    }
    close_pools();
}

/* A thin product computes the bits that its columns have in a wide one. */
static void test_thin_part_equals_whole(void)
{
    for (int round = 0; round < 8 * first_pairs; round++) {
        const dtrain__isa *isa = isas[round % first_pairs];
        problem x = thin_problem(20 + below(60), 40, 300 + below(900), (uint32_t)(round / 2 % 4));
        problem part = x;
        dtrain_gemm_args *g = &x.args, *h = &part.args;
        dtrain__cpu ws;
        void *aux;
        int64_t j0 = below(24), differing = 0;
        memset(&ws, 0, sizeof ws);
        h->n = 1 + below(16);
        h->b = (float *)x.b + (h->flags & DTRAIN_GEMM_TRANS_B ? j0 * g->ldb : j0);
        part.before = (float *)x.before + j0;
        float *whole = (float *)compute(&x, isa, &ws, 0, &aux);
        float *alone = (float *)compute(&part, isa, &ws, 0, &aux);
        for (int64_t i = 0; i < h->m; i++)
            differing += memcmp(whole + i * g->ldc + j0, alone + i * g->ldc,
                                (size_t)h->n * sizeof *whole) != 0;
        CHECK_MSG(differing == 0, "%s: %lld of %lld rows differ; n %lld k %lld flags %u", isa->name,
                  (long long)differing, (long long)h->m, (long long)h->n, (long long)h->k,
                  h->flags);
        workspace_free(&ws);
        free(whole);
        free(alone);
        problem_free(&x);
    }
}

/* beta 0 does not read C, alpha 0 does not read A and B, and k = 0 leaves beta, bias and the
 * activation; what is NaN in A reaches its own row only, through every activation. */
static void test_not_a_number(void)
{
    enum { M = 15, N = 35, K = 9 };
    float a[M * K], b[K * N], c[M * N], bias[N];
    dtrain_gemm_args g;
    memset(&g, 0, sizeof g);
    g.m = M;
    g.n = g.ldb = g.ldc = N;
    g.lda = K;
    g.a = a;
    g.b = b;
    g.c = c;
    g.bias = bias;
    g.a_dtype = g.b_dtype = g.c_dtype = DTRAIN_DTYPE_F32;
    for (int i = 0; i < M * K; i++) a[i] = i / K == 4 ? NAN : 1;
    for (int i = 0; i < K * N; i++) b[i] = 1;
    for (int j = 0; j < N; j++) bias[j] = (float)j;
    for (int v = 0; v < isa_count * 3; v++) {
        dtrain__cpu ws;
        int wrong = 0;
        memset(&ws, 0, sizeof ws);
        force(&ws, isas[v % isa_count]);
        g.activation = (uint32_t)(v / isa_count);
        for (int step = 0; step < 4; step++) { /* k = 0; alpha = 0; beta = 2 alone; NaN in A */
            g.k = step == 0 ? 0 : K;
            g.alpha = step == 3 ? 1 : 0;
            g.beta = step == 2 ? 2 : 0;
            for (int i = 0; i < M * N; i++) c[i] = step == 2 ? 3 : NAN;
            CHECK(dtrain__gemm(&ws, &g) == DTRAIN_OK);
            for (int i = 0; i < M * N; i++) {
                double base = step == 2 ? 6 : step == 3 ? K : 0;
                double want = activated(g.activation, base + (double)bias[i % N]);
                if (step == 3 && i / N == 4) wrong += !isnan(c[i]);
                else wrong += !test_close((double)c[i], want, 1e-6);
            }
        }
        CHECK_MSG(wrong == 0, "%s, activation %u: %d wrong", ws.isa->name, g.activation, wrong);
        workspace_free(&ws);
    }
}

/* ---- Workspace ---- */

static counted_memory memory_failing_at(long call)
{
    counted_memory memory;
    memset(&memory, 0, sizeof memory);
    memory.fail_at = call;
    return memory;
}

/* Allocates once, again for more threads and for a half-precision C, then never; reports it and
 * works again afterwards; frees what it took. */
static void test_workspace(void)
{
    counted_memory m = memory_failing_at(1);
    dtrain_allocator allocator = counted_allocator(&m);
    dtrain__cpu ws;
    void *aux;
    open_pools();
    memset(&ws, 0, sizeof ws);
    ws.allocator = allocator;
    problem x = problem_make(90, 80, 800, 0);
    x.use_aux = 0;
    dtrain_gemm_args g = x.args;
    g.c = malloc(matrix_bytes(g.m, g.n, g.ldc, DTRAIN_DTYPE_F32));
    memcpy(g.c, x.before, matrix_bytes(g.m, g.n, g.ldc, DTRAIN_DTYPE_F32));
    force(&ws, NULL);
    CHECK(dtrain__gemm(&ws, &g) == DTRAIN_ERROR_MEMORY);
    free(g.c);
    for (int round = 0; round < 3; round++) free(compute(&x, NULL, &ws, 0, &aux));
    CHECK_MSG(m.calls == 2, "%ld allocations after one thread", m.calls);
    for (int round = 0; round < 3; round++) free(compute(&x, NULL, &ws, 3, &aux));
    CHECK_MSG(m.calls == 3, "%ld allocations after four threads", m.calls);
    problem_free(&x);
    x.args.alpha = 1;
    x.args.c_dtype = DTRAIN_DTYPE_BF16;
    problem_fill(&x);
    for (int round = 0; round < 3; round++) free(compute(&x, NULL, &ws, 3, &aux));
    CHECK_MSG(m.calls == 4, "%ld allocations after a bf16 C", m.calls);
    problem_free(&x);
    workspace_free(&ws);
    CHECK_MSG(m.live == 0, "%ld blocks were not freed", m.live);
    close_pools();
}

/* ---- Functions ---- */

/* Distance from the truth in units of the last place of a float; denormals have the last one. */
static double ulps(float got, double want)
{
    int exponent;
    frexp(want, &exponent);
    return fabs((double)got - want) / ldexp(1, (exponent > -125 ? exponent : -125) - 24);
}

static float from_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

typedef struct worst_case {
    double error;
    float x;
} worst_case;

static void take_worse(worst_case *worst, double error, float x)
{
    if (error <= worst->error) return;
    worst->error = error;
    worst->x = x;
}

/* A million floats of both signs and every exponent, through the scalar instance. GELU's error is
 * compared with the size of x: for large negative x the exponent's rounding is what fp32 cannot
 * avoid. */
static void test_functions(void)
{
    worst_case e = {0, 0}, g = {0, 0}, d = {0, 0};
    for (uint64_t bits = 0; bits < (uint64_t)1 << 32; bits += 4217) {
        float x = from_bits((uint32_t)bits);
        if (!isfinite(x)) continue;
        double wide = (double)x;
        if (fabs(wide) < 87) take_worse(&e, ulps(instances_exp(x), exp(wide)), x);
        if (fabs(wide) < 1e12)
            take_worse(&g, fabs((double)instances_gelu(x) - gelu(wide)) / (1e-30 + fabs(wide)), x);
        take_worse(&d, fabs((double)instances_gelu_slope(x) - gelu_slope(wide)), x);
    }
    CHECK_MSG(e.error < 5, "exp(%.9g) is %.2f ulp off", (double)e.x, e.error);
    CHECK_MSG(d.error < 1e-6, "the slope of gelu(%.9g) is off by %.3g", (double)d.x, d.error);
    CHECK_MSG(g.error < 3e-7, "gelu(%.9g) is off by %.3g x", (double)g.x, g.error);
}

static void test_function_limits(void)
{
    float infinity = INFINITY, nan = NAN;
    CHECK(instances_exp(0) == 1 && instances_exp(-0.0f) == 1);
    CHECK(instances_exp(-88) == 0 && instances_exp(-infinity) == 0);
    CHECK(isfinite(instances_exp(infinity)) && instances_exp(infinity) > 1e38f);
    CHECK(instances_gelu(0) == 0 && instances_gelu(100) == 100);
    CHECK(instances_gelu(infinity) == infinity);
    CHECK_CLOSE(instances_gelu(-100), 0, 1e-30);
    CHECK(isnan(instances_exp(nan)) && isnan(instances_gelu(nan)));
}

/* ---- The pool ---- */

typedef struct tally {
    dtrain__pool *pool;
    int hits[8], counts[8], nested[8];
} tally;

static void count_task(void *ctx, int index, int count)
{
    tally *x = (tally *)ctx;
    x->hits[index]++;
    x->counts[index] += count;
}

static void inner_task(void *ctx, int index, int count) { *(int *)ctx += index == 0 && count == 1; }

static void outer_task(void *ctx, int index, int count)
{
    tally *x = (tally *)ctx;
    count_task(ctx, index, count);
    dtrain__parallel(x->pool, inner_task, &x->nested[index]);
}

static void check_tally(const tally *x, int threads, int jobs, const char *what)
{
    int wrong = 0;
    for (int i = 0; i < 8; i++) {
        wrong += x->hits[i] != (i < threads ? jobs : 0);
        wrong += x->counts[i] != (i < threads ? jobs * threads : 0);
    }
    CHECK_MSG(wrong == 0, "%s, %d threads: %d counters are wrong", what, threads, wrong);
}

/* Every index once a job, with the number of threads; also where they spin for each other. Each
 * worker writes its counters without atomics: TSan sees a job that does not happen before the
 * next, or before what the caller reads. */
static void test_pool_many_jobs(void)
{
    int cores = (int)sysconf(_SC_NPROCESSORS_ONLN);
    for (int threads = 1; threads <= 6; threads++) {
        int jobs = threads <= cores ? 5000 : 1000;
        tally x;
        memset(&x, 0, sizeof x);
        CHECK(dtrain__pool_create(&x.pool, NULL, threads, threads > cores) == 0);
        for (int i = 0; i < jobs; i++) dtrain__parallel(x.pool, count_task, &x);
        check_tally(&x, threads, jobs, "many jobs");
        dtrain__pool_destroy(x.pool);
    }
}

static void test_pool_nested(void)
{
    int alone = 0;
    dtrain__parallel(NULL, inner_task, &alone);
    CHECK(alone == 1);
    for (int threads = 1; threads <= MAX_THREADS; threads++) {
        tally x;
        memset(&x, 0, sizeof x);
        CHECK(dtrain__pool_create(&x.pool, NULL, threads, 1) == 0);
        for (int i = 0; i < 200; i++) dtrain__parallel(x.pool, outer_task, &x);
        check_tally(&x, threads, 200, "nested");
        for (int i = 0; i < threads; i++) CHECK(x.nested[i] == 200);
        dtrain__pool_destroy(x.pool);
    }
}

static void doze(int microseconds)
{
    struct timespec nap = {0, 1000L * microseconds};
    nanosleep(&nap, NULL);
}

static void doze_task(void *ctx, int index, int count)
{
    count_task(ctx, index, count);
    if (index == 1) doze(60);
}

/* Pauses around the end of the spinning, some 30 us: workers are asked for while they go to sleep,
 * and finish while the caller does. A lost wake-up hangs this test. */
static void test_pool_sleeps_and_wakes(void)
{
    for (int round = 0; round < 2 * (MAX_THREADS - 1); round++) {
        int threads = 2 + round / 2;
        tally x;
        memset(&x, 0, sizeof x);
        CHECK(dtrain__pool_create(&x.pool, NULL, threads, round % 2) == 0);
        for (int i = 0; i < 300; i++) {
            if (i % 3) doze(below(80));
            dtrain__parallel(x.pool, i % 2 ? doze_task : count_task, &x);
        }
        check_tally(&x, threads, 300, "sleeping");
        dtrain__pool_destroy(x.pool);
    }
}

/* Destroyed before its workers have run at all, asleep, or just after a job. */
static void test_pool_destroyed_at_once(void)
{
    dtrain__pool_destroy(NULL);
    for (int i = 0; i < 240; i++) {
        int threads = 1 + i % MAX_THREADS;
        counted_memory m = memory_failing_at(0);
        dtrain_allocator allocator = counted_allocator(&m);
        tally x;
        memset(&x, 0, sizeof x);
        CHECK(dtrain__pool_create(&x.pool, &allocator, threads, i % 2) == 0);
        if (i % 3 == 1) doze(below(200));
        if (i % 3 == 2) {
            dtrain__parallel(x.pool, count_task, &x);
            check_tally(&x, threads, 1, "one job");
        }
        dtrain__pool_destroy(x.pool);
        CHECK(m.live == 0);
    }
}

/* The pool's own allocations fail, one after the other. */
static void test_pool_without_memory(void)
{
    for (int fail_at = 1; fail_at < 10; fail_at++) {
        counted_memory m = memory_failing_at(fail_at);
        dtrain_allocator allocator = counted_allocator(&m);
        dtrain__pool *pool = NULL;
        int error = dtrain__pool_create(&pool, &allocator, 3, 1);
        CHECK(error == (m.calls < fail_at ? 0 : ENOMEM));
        CHECK((pool == NULL) == (error != 0));
        dtrain__pool_destroy(pool);
        CHECK(m.live == 0);
        if (error == 0) return;
    }
    CHECK_MSG(0, "a pool needed 9 allocations");
}

/* Root may start any number of threads: it becomes a user who has no other process. */
static void become_nobody(void)
{
    if (geteuid() != 0) return;
    if (setuid(61000 + (uid_t)getpid() % 4000) != 0) return;
#ifdef __linux__
    prctl(PR_SET_DUMPABLE, 1, 0, 0, 0); /* or the leak checker may not look at us */
#endif
}

/* The system refuses the first, second, ... thread; those that came before are stopped again. */
static void test_pool_without_threads(void)
{
    struct rlimit before, limit;
    int refused = 0;
    if (getrlimit(RLIMIT_NPROC, &before) != 0) return;
    become_nobody();
    for (rlim_t most = 1; most <= 8; most++) {
        counted_memory m = memory_failing_at(0);
        dtrain_allocator allocator = counted_allocator(&m);
        tally x;
        memset(&x, 0, sizeof x);
        limit = before;
        limit.rlim_cur = most;
        CHECK(setrlimit(RLIMIT_NPROC, &limit) == 0);
        int error = dtrain__pool_create(&x.pool, &allocator, 5, 1);
        CHECK(setrlimit(RLIMIT_NPROC, &before) == 0);
        CHECK(error == 0 || error == EAGAIN);
        CHECK((x.pool == NULL) == (error != 0));
        if (x.pool) dtrain__parallel(x.pool, count_task, &x);
        check_tally(&x, error ? 0 : 5, !error, "few threads");
        dtrain__pool_destroy(x.pool);
        CHECK(m.live == 0);
        refused += error != 0;
    }
    CHECK_MSG(geteuid() == 0 || refused > 0, "no thread was refused");
}

static void mask_task(void *ctx, int index, int count)
{
    sigset_t mask;
    pthread_sigmask(SIG_BLOCK, NULL, &mask);
    ((tally *)ctx)->hits[index] = sigismember(&mask, SIGTERM) && sigismember(&mask, SIGINT);
    (void)count;
}

/* Signals go to the rank's own thread, whose mask is as it was. */
static void test_pool_signals(void)
{
    tally x;
    memset(&x, 0, sizeof x);
    CHECK(dtrain__pool_create(&x.pool, NULL, 3, 1) == 0);
    dtrain__parallel(x.pool, mask_task, &x);
    CHECK(x.hits[0] == 0 && x.hits[1] == 1 && x.hits[2] == 1);
    dtrain__pool_destroy(x.pool);
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    find_isas();
    RUN(test_small_sizes);
    RUN(test_blocks);
    RUN(test_every_kind);
    RUN(test_part_equals_whole);
    RUN(test_thin);
    RUN(test_thin_part_equals_whole);
    RUN(test_not_a_number);
    RUN(test_workspace);
    RUN(test_functions);
    RUN(test_function_limits);
    RUN(test_pool_many_jobs);
    RUN(test_pool_nested);
    RUN(test_pool_sleeps_and_wakes);
    RUN(test_pool_destroyed_at_once);
    RUN(test_pool_without_memory);
    RUN(test_pool_without_threads);
    RUN(test_pool_signals);
    return test_summary();
}
