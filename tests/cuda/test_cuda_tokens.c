/* Tests of tokens.cuh: embedding and its gradient, which have the bits of a loop over rows,
 * and cross-entropy, against double precision. */
#include "test.h"
#include "dtrain.h"
#include "cuda_testing.h"

static const dtrain_dtype dtypes[] = {DTRAIN_DTYPE_F32, DTRAIN_DTYPE_BF16, DTRAIN_DTYPE_F16};

static size_t bytes_of(int64_t count, dtrain_dtype dtype)
{
    return (size_t)count * dtrain_dtype_bytes(dtype);
}
static double *doubles(int64_t count) { return (double *)calloc((size_t)count, sizeof(double)); }

/* Device memory has these bits. */
static bool holds(const void *device, const void *want, size_t bytes)
{
    void *got = malloc(bytes + 1);
    gpu_read(got, device, bytes);
    const bool same = memcmp(got, want, bytes) == 0;
    free(got);
    return same;
}

/* ---- Embedding --------------------------------------------------------------------------------*/

typedef enum spread { SAME, UPWARDS, RANDOM, FEW, SPREADS } spread;

static int32_t *tokens_of(spread kind, int64_t rows, int64_t vocab)
{
    int32_t *tokens = (int32_t *)malloc((size_t)rows * sizeof *tokens);
    for (int64_t i = 0; i < rows; i++) {
        const double u = (double)dtrain_random_uniform(5, (uint64_t)kind, (uint64_t)i);
        const double x = kind == RANDOM ? u * (double)vocab : u * u * u * u * (double)vocab;
        tokens[i] = (int32_t)(kind == SAME      ? (double)(vocab - 1)
                              : kind == UPWARDS ? (double)(i % vocab)
                                                : x);
        if (tokens[i] >= vocab) tokens[i] = (int32_t)(vocab - 1);
        /* Two tokens that differ in their fourth digit, or are one. */
        if (kind == RANDOM && i % 50 < 2)
            tokens[i] = (int32_t)((vocab - 1) % (i % 50 ? 16777216 : vocab));
    }
    return tokens;
}

typedef struct words_case {
    int64_t rows, sequence, n, vocab;
    dtrain_dtype dtype;
    size_t shift; /* bytes behind aligned addresses */
} words_case;

static const char *words_name(const words_case *c)
{
    static char text[128];
    snprintf(text, sizeof text, "rows %d, sequence %d, n %d, vocab %d, %s, shift %d", (int)c->rows,
             (int)c->sequence, (int)c->n, (int)c->vocab, dtrain_dtype_name(c->dtype),
             (int)c->shift);
    return text;
}

static void check_embedding(const words_case *c, bool positions)
{
    const size_t y_bytes = bytes_of(c->rows * c->n, c->dtype);
    int32_t *tokens = tokens_of(RANDOM, c->rows, c->vocab);
    float *wte = (float *)gpu_noise(c->vocab * c->n, DTRAIN_DTYPE_F32, 1, 1);
    float *wpe = (float *)gpu_noise(c->sequence * c->n, DTRAIN_DTYPE_F32, 2, 1);
    void *want = malloc(y_bytes);
    for (int64_t i = 0; i < c->rows * c->n; i++) {
        const int64_t row = i / c->n, column = i % c->n;
        const float word = wte[tokens[row] * c->n + column];
        gpu_set(want, i, c->dtype,
                positions ? word + wpe[row % c->sequence * c->n + column] : word);
    }
    EACH_ORDER(order)
    {
        dtrain_embedding_args args = {.rows = c->rows,
                                      .sequence = positions ? c->sequence : 0,
                                      .n = c->n,
                                      .vocab = c->vocab,
                                      .dtype = c->dtype};
        args.tokens = (int32_t *)gpu_give(tokens, bytes_of(c->rows, DTRAIN_DTYPE_I32), 0);
        args.wte =
            (float *)gpu_give(wte, bytes_of(c->vocab * c->n, DTRAIN_DTYPE_F32), c->shift * 2);
        if (positions)
            args.wpe = (float *)gpu_give(wpe, bytes_of(c->sequence * c->n, DTRAIN_DTYPE_F32), 0);
        args.y = gpu_take(y_bytes, c->shift);
        CHECK_MSG(gpu->ops->embedding(gpu, &args) == DTRAIN_OK, "%s", dtrain_last_error());
        CHECK_MSG(holds(args.y, want, y_bytes), "%s", words_name(c));
        gpu_release();
    }
    free(tokens), free(wte), free(wpe), free(want);
}

static void test_embedding(void)
{
    const words_case cases[] = {
        {1, 1, 1, 1, DTRAIN_DTYPE_F32, 0},      {37, 8, 24, 11, DTRAIN_DTYPE_F32, 0},
        {37, 8, 24, 11, DTRAIN_DTYPE_BF16, 0},  {37, 8, 24, 11, DTRAIN_DTYPE_F16, 0},
        {37, 8, 24, 11, DTRAIN_DTYPE_F32, 4},   {37, 8, 24, 11, DTRAIN_DTYPE_BF16, 2},
        {64, 64, 33, 300, DTRAIN_DTYPE_F16, 0}, {130, 50, 768, 500, DTRAIN_DTYPE_BF16, 0},
        {30, 7, 301, 40, DTRAIN_DTYPE_F32, 0},  {2500, 100, 4, 60000, DTRAIN_DTYPE_F32, 0},
    };
    gpu_open();
    EACH(i, cases) check_embedding(&cases[i], i % 2 == 0), check_embedding(&cases[i], i % 2 == 1);
    gpu_close();
}

/* Row by row, in fp32: the gradient's definition and its bits. */
static void add_rows(const words_case *c, const int32_t *tokens, const void *d_y, float *d_wte,
                     float *d_wpe)
{
    for (int64_t i = 0; i < c->rows * c->n; i++) {
        const int64_t row = i / c->n, column = i % c->n;
        d_wte[tokens[row] * c->n + column] += (float)gpu_get(d_y, i, c->dtype);
        d_wpe[row % c->sequence * c->n + column] += (float)gpu_get(d_y, i, c->dtype);
    }
}

static void check_embedding_backward(const words_case *c, spread kind)
{
    const size_t y_bytes = bytes_of(c->rows * c->n, c->dtype);
    const size_t wte_bytes = bytes_of(c->vocab * c->n, DTRAIN_DTYPE_F32),
                 wpe_bytes = bytes_of(c->sequence * c->n, DTRAIN_DTYPE_F32);
    int32_t *tokens = tokens_of(kind, c->rows, c->vocab);
    void *d_y = gpu_noise(c->rows * c->n, c->dtype, 3, 1);
    float *old_wte = (float *)gpu_noise(c->vocab * c->n, DTRAIN_DTYPE_F32, 1, 1),
          *d_wte = (float *)malloc(wte_bytes);
    float *old_wpe = (float *)gpu_noise(c->sequence * c->n, DTRAIN_DTYPE_F32, 2, 1),
          *d_wpe = (float *)malloc(wpe_bytes);
    memcpy(d_wte, old_wte, wte_bytes);
    memcpy(d_wpe, old_wpe, wpe_bytes);
    add_rows(c, tokens, d_y, d_wte, d_wpe);
    EACH_ORDER(order)
    {
        dtrain_embedding_backward_args args = {.rows = c->rows,
                                               .sequence = c->sequence,
                                               .n = c->n,
                                               .vocab = c->vocab,
                                               .dtype = c->dtype};
        args.tokens = (int32_t *)gpu_give(tokens, bytes_of(c->rows, DTRAIN_DTYPE_I32), 0);
        args.d_y = gpu_give(d_y, y_bytes, c->shift);
        float *words = (float *)gpu_give(old_wte, wte_bytes, c->shift * 2),
              *places = (float *)gpu_give(old_wpe, wpe_bytes, 0);
        if (order != 1) args.d_wte = words;
        if (order != 2) args.d_wpe = places;
        CHECK_MSG(gpu->ops->embedding_backward(gpu, &args) == DTRAIN_OK, "%s", dtrain_last_error());
        CHECK_MSG(holds(words, args.d_wte ? d_wte : old_wte, wte_bytes), "%s, spread %d: d_wte",
                  words_name(c), (int)kind);
        CHECK_MSG(holds(places, args.d_wpe ? d_wpe : old_wpe, wpe_bytes), "%s: d_wpe",
                  words_name(c));
        args.d_wte = args.d_wte ? NULL : words; /* what was left out, in this order too */
        args.d_wpe = args.d_wpe ? NULL : places;
        if (order == 0) args.d_wte = args.d_wpe = NULL;
        CHECK_MSG(gpu->ops->embedding_backward(gpu, &args) == DTRAIN_OK, "%s", dtrain_last_error());
        CHECK_MSG(holds(words, d_wte, wte_bytes), "%s, spread %d: d_wte, order %d", words_name(c),
                  (int)kind, order);
        CHECK_MSG(holds(places, d_wpe, wpe_bytes), "%s: d_wpe, order %d", words_name(c), order);
        gpu_release();
    }
    free(tokens), free(d_y), free(old_wte), free(old_wpe), free(d_wte), free(d_wpe);
}

static void test_embedding_backward(void)
{
    const words_case cases[] = {
        {1, 1, 1, 1, DTRAIN_DTYPE_F32, 0},        {32, 8, 8, 3, DTRAIN_DTYPE_F32, 0},
        {33, 5, 16, 300, DTRAIN_DTYPE_BF16, 0},   {100, 32, 24, 70, DTRAIN_DTYPE_F16, 0},
        {100, 32, 24, 70, DTRAIN_DTYPE_F32, 4},   {100, 32, 24, 70, DTRAIN_DTYPE_BF16, 2},
        {257, 300, 301, 90, DTRAIN_DTYPE_F32, 0}, {1300, 64, 7, 50257, DTRAIN_DTYPE_BF16, 0},
        {700, 9, 264, 256, DTRAIN_DTYPE_BF16, 0}, {600, 100, 132, 257, DTRAIN_DTYPE_F32, 0},
    };
    gpu_open();
    EACH(i, cases)
    for (int kind = 0; kind < SPREADS; kind++) check_embedding_backward(&cases[i], (spread)kind);
    gpu_close();
}

/* More rows than tiles of the least size, and token ids of three and of four digits. */
static void test_embedding_backward_large(void)
{
    const words_case cases[] = {
        {140000, 1024, 1, 1000, DTRAIN_DTYPE_F32, 0},
        {3000, 100, 1, 70000, DTRAIN_DTYPE_F32, 0},
        {2000, 100, 1, 16777216 + 9, DTRAIN_DTYPE_F32, 0},
    };
    gpu_open();
    EACH(i, cases) check_embedding_backward(&cases[i], RANDOM);
    gpu_close();
}

/* A bad token counts as token 0, and is reported. */
static void check_bad_token(int32_t bad)
{
    const words_case c = {6, 6, 4, 5, DTRAIN_DTYPE_F32, 0};
    const int32_t tokens[6] = {1, 4, bad, 3, 4, 1}, used[6] = {1, 4, 0, 3, 4, 1};
    float d_wte[20], d_wpe[24], wte[20], y[24],
        *d_y = (float *)gpu_noise(24, DTRAIN_DTYPE_F32, 1, 1);
    char text[64];
    snprintf(text, sizeof text, "token %d at row 2 is outside [0, 5)", (int)bad);
    memset(d_wte, 0, sizeof d_wte);
    memset(d_wpe, 0, sizeof d_wpe);
    add_rows(&c, used, d_y, d_wte, d_wpe);
    float *words = (float *)gpu_take(sizeof d_wte, 0);
    CHECK(gpu->ops->zero(gpu, words, sizeof d_wte) == DTRAIN_OK);
    int32_t *ids = (int32_t *)gpu_give(tokens, sizeof tokens, 0);
    dtrain_embedding_backward_args back = {.rows = 6,
                                           .sequence = 6,
                                           .n = 4,
                                           .vocab = 5,
                                           .tokens = ids,
                                           .d_wte = words,
                                           .dtype = DTRAIN_DTYPE_F32};
    back.d_y = gpu_give(d_y, 24 * sizeof *d_y, 0);
    CHECK(gpu->ops->embedding_backward(gpu, &back) == DTRAIN_OK);
    CHECK(gpu->ops->synchronize(gpu) == DTRAIN_ERROR_DATA);
    CHECK_MSG(strstr(dtrain_last_error(), text) != NULL, "%s", dtrain_last_error());
    CHECK(holds(words, d_wte, sizeof d_wte));
    for (int i = 0; i < 20; i++) wte[i] = (float)i;
    for (int i = 0; i < 24; i++) y[i] = wte[used[i / 4] * 4 + i % 4];
    dtrain_embedding_args args = {
        .rows = 6, .sequence = 6, .n = 4, .vocab = 5, .tokens = ids, .dtype = DTRAIN_DTYPE_F32};
    args.wte = (float *)gpu_give(wte, sizeof wte, 0);
    args.y = gpu_take(sizeof y, 0);
    CHECK(gpu->ops->embedding(gpu, &args) == DTRAIN_OK);
    CHECK(gpu->ops->synchronize(gpu) == DTRAIN_ERROR_DATA);
    CHECK_MSG(strstr(dtrain_last_error(), text) != NULL, "%s", dtrain_last_error());
    CHECK(holds(args.y, y, sizeof y));
    gpu_release();
    free(d_y);
}

static void test_bad_tokens(void)
{
    gpu_open();
    check_bad_token(-1);
    check_bad_token(5);
    check_bad_token(INT32_MIN);
    gpu_close();
}

/* ---- Cross-entropy ----------------------------------------------------------------------------*/

typedef struct loss_case {
    int64_t rows, n;
    dtrain_dtype dtype;
    int64_t shift, d_shift; /* elements behind aligned addresses; d_shift -1: d_logits is logits */
    int64_t padding;        /* columns of the n that do not count, and hold what must not matter */
} loss_case;

static const char *loss_name(const loss_case *c)
{
    static char text[128];
    snprintf(text, sizeof text, "rows %d, n %d, padding %d, %s, shift %d, d_shift %d", (int)c->rows,
             (int)c->n, (int)c->padding, dtrain_dtype_name(c->dtype), (int)c->shift,
             (int)c->d_shift);
    return text;
}

/* Rows of ordinary logits, of masked ones, of huge ones and of equal ones take turns. */
static void *make_logits(const loss_case *c)
{
    static const float garbage[] = {NAN, INFINITY, -INFINITY, 6e4f};
    const int64_t classes = c->n - c->padding;
    void *logits = gpu_noise(c->rows * c->n, c->dtype, 1, 3);
    for (int64_t i = 0; i < c->rows * c->n; i++) {
        const int64_t row = i / c->n, column = i % c->n;
        if (row % 5 == 1 && column * 7 % 10 != 3 && column != classes - 1)
            gpu_set(logits, i, c->dtype, -INFINITY);
        if (row % 5 == 2) gpu_set(logits, i, c->dtype, 6e4f - (float)(column % 3));
        if (row % 5 == 3) gpu_set(logits, i, c->dtype, -2);
        if (row % 5 == 4) gpu_set(logits, i, c->dtype, (float)(column % 40) - 20);
        if (column >= classes) gpu_set(logits, i, c->dtype, garbage[(row + column) % 4]);
    }
    return logits;
}

static int32_t *make_targets(const loss_case *c, const void *logits)
{
    const int64_t classes = c->n - c->padding;
    int32_t *targets = (int32_t *)malloc((size_t)c->rows * sizeof *targets);
    for (int64_t i = 0; i < c->rows; i++) {
        targets[i] = (int32_t)(i % 3 == 0 ? classes - 1 : i * 7919 % classes);
        if (gpu_get(logits, i * c->n + targets[i], c->dtype) < -1e30)
            targets[i] = (int32_t)(classes - 1);
        if (i % 7 == 5) targets[i] = -1;
    }
    return targets;
}

typedef struct loss_want {
    double *loss, *lse, *d_logits;
} loss_want;

static loss_want want_loss(const loss_case *c, const void *logits, const int32_t *targets,
                           double scale)
{
    const int64_t classes = c->n - c->padding;
    loss_want want = {doubles(c->rows), doubles(c->rows), doubles(c->rows * c->n)};
    for (int64_t i = 0; i < c->rows; i++) {
        double top = -INFINITY, sum = 0;
        if (targets[i] < 0) continue;
        for (int64_t j = 0; j < classes; j++)
            top = fmax(top, gpu_get(logits, i * c->n + j, c->dtype));
        for (int64_t j = 0; j < classes; j++)
            sum += exp(gpu_get(logits, i * c->n + j, c->dtype) - top);
        want.lse[i] = top + log(sum);
        want.loss[i] = want.lse[i] - gpu_get(logits, i * c->n + targets[i], c->dtype);
        for (int64_t j = 0; j < classes; j++)
            want.d_logits[i * c->n + j] =
                scale * (exp(gpu_get(logits, i * c->n + j, c->dtype) - top) / sum -
                         (j == targets[i] ? 1 : 0));
    }
    return want;
}

static bool near_gradient(const loss_case *c, const void *got, const double *want, double scale)
{
    for (int64_t i = 0; i < c->rows * c->n; i++) {
        const double relative = 1e-5 + gpu_rounding(c->dtype); /* also of logits near 6e4 */
        const double error = fabs(gpu_get(got, i, c->dtype) - want[i]);
        if (i % c->n >= c->n - c->padding
                ? error == 0
                : error <= relative * fabs(want[i]) + relative * 0.05 * scale +
                               (c->dtype == DTRAIN_DTYPE_F16 ? 6e-8 : 0))
            continue;
        return CHECK_MSG(0, "%s: d_logits of row %d, column %d is %.9g, expected %.9g",
                         loss_name(c), (int)(i / c->n), (int)(i % c->n), gpu_get(got, i, c->dtype),
                         want[i]) != 0;
    }
    return CHECK_MSG(1, "%s", loss_name(c)) != 0;
}

static void check_cross_entropy(const loss_case *c)
{
    const size_t bytes = bytes_of(c->rows * c->n, c->dtype), element = dtrain_dtype_bytes(c->dtype);
    const size_t shift = (size_t)c->shift * element, d_shift = (size_t)c->d_shift * element;
    const int64_t classes = c->padding ? c->n - c->padding : 0;
    const float scale = 0.125f, upstream = 3;
    void *logits = make_logits(c), *first = malloc(bytes), *d_logits = malloc(bytes);
    int32_t *targets = make_targets(c, logits);
    float *loss = (float *)malloc((size_t)c->rows * 4), *lse = (float *)malloc((size_t)c->rows * 4);
    const loss_want want = want_loss(c, logits, targets, (double)scale);
    EACH_ORDER(order)
    {
        dtrain_cross_entropy_args args = {
            .rows = c->rows, .n = c->n, .scale = scale, .dtype = c->dtype, .classes = classes};
        args.logits = gpu_give(logits, bytes, shift);
        args.targets = (int32_t *)gpu_give(targets, (size_t)c->rows * 4, 0);
        args.loss = (float *)gpu_take((size_t)c->rows * 4, 0);
        args.lse = (float *)gpu_take((size_t)c->rows * 4, 0);
        args.lse_rest = (float *)gpu_take((size_t)c->rows * 4, 0);
        CHECK_MSG(gpu->ops->cross_entropy(gpu, &args) == DTRAIN_OK, "%s", dtrain_last_error());
        gpu_read(loss, args.loss, (size_t)c->rows * 4);
        gpu_read(lse, args.lse, (size_t)c->rows * 4);
        CHECK_MSG(holds(args.logits, logits, bytes), "%s: logits changed", loss_name(c));

        /* Backward on its own, with upstream folded out of scale again. */
        dtrain_cross_entropy_backward_args back = {.rows = c->rows,
                                                   .n = c->n,
                                                   .scale = scale / upstream,
                                                   .logits = args.logits,
                                                   .targets = args.targets,
                                                   .lse = args.lse,
                                                   .dtype = c->dtype,
                                                   .classes = classes,
                                                   .lse_rest = args.lse_rest};
        back.upstream = (float *)gpu_give(&upstream, sizeof upstream, 0);
        back.d_logits = gpu_take(bytes, c->d_shift < 0 ? shift : d_shift);
        CHECK_MSG(gpu->ops->cross_entropy_backward(gpu, &back) == DTRAIN_OK, "%s",
                  dtrain_last_error());
        gpu_read(d_logits, back.d_logits, bytes);
        near_gradient(c, d_logits, want.d_logits, (double)scale);
        back.upstream = NULL, back.scale = scale;
        CHECK_MSG(gpu->ops->cross_entropy_backward(gpu, &back) == DTRAIN_OK, "%s",
                  dtrain_last_error());
        gpu_read(d_logits, back.d_logits, bytes);

        /* Fused: the same losses, and the gradient that backward makes, bit for bit. */
        args.d_logits = c->d_shift < 0 ? (void *)args.logits : gpu_take(bytes, d_shift);
        CHECK_MSG(gpu->ops->cross_entropy(gpu, &args) == DTRAIN_OK, "%s", dtrain_last_error());
        if (c->d_shift < 0 || c->d_shift == c->shift) /* else other threads have other elements */
            CHECK_MSG(holds(args.loss, loss, (size_t)c->rows * 4) &&
                          holds(args.d_logits, d_logits, bytes),
                      "%s: fused", loss_name(c));
        gpu_read(d_logits, args.d_logits, bytes);
        near_gradient(c, d_logits, want.d_logits, (double)scale);
        if (order == 0) memcpy(first, d_logits, bytes);
        CHECK_MSG(memcmp(first, d_logits, bytes) == 0, "%s: other bits in order %d", loss_name(c),
                  order);
        gpu_release();
    }
    gpu_near(loss_name(c), loss, want.loss, c->rows, DTRAIN_DTYPE_F32, c->rows > 2 ? 4e-3 : 5e-6);
    gpu_near(loss_name(c), lse, want.lse, c->rows, DTRAIN_DTYPE_F32, 5e-6);
    free(logits), free(first), free(d_logits), free(targets), free(loss), free(lse);
    free(want.loss), free(want.lse), free(want.d_logits);
}

static void test_cross_entropy(void)
{
    const int64_t n[] = {1, 2, 7, 8, 10, 33, 127, 513, 1000, 2051};
    gpu_open();
    EACH(w, n) EACH(d, dtypes)
    {
        const loss_case in_place = {9, n[w], dtypes[d], 0, -1, 0},
                        shifted = {9, n[w], dtypes[d], 1, 1, 0};
        const loss_case apart = {7, n[w], dtypes[d], 3, 2, 0}, two = {2, n[w], dtypes[d], 0, 0, 0};
        const loss_case padded = {9, n[w] + 7, dtypes[d], 0, -1, 7},
                        to_width = {7, (n[w] + 127) / 128 * 128, dtypes[d], 0, 0, -n[w] & 127};
        check_cross_entropy(&in_place);
        check_cross_entropy(&shifted);
        check_cross_entropy(&apart);
        check_cross_entropy(&two);
        check_cross_entropy(&padded);
        check_cross_entropy(&to_width);
    }
    gpu_close();
}

/* GPT-2's vocabulary, padded and not: rows that begin anywhere, blocks of 1024 threads. */
static void test_cross_entropy_vocabulary(void)
{
    gpu_open();
    EACH(d, dtypes)
    {
        const loss_case c = {6, 50257, dtypes[d], 0, -1, 0},
                        padded = {6, 50304, dtypes[d], 0, -1, 47};
        check_cross_entropy(&c);
        check_cross_entropy(&padded);
    }
    gpu_close();
}

/* NaN reaches the loss and the gradient of its row and no other; an ignored row is zero whatever is
 * in it; a row that is all masked is NaN and no crash. */
static void test_cross_entropy_nan(void)
{
    enum { ROWS = 5, N = 75 };
    const int32_t targets[ROWS] = {3, 4, -1, 70, 2};
    float *logits = (float *)gpu_noise(ROWS * N, DTRAIN_DTYPE_F32, 1, 1), loss[ROWS],
          d_logits[ROWS * N];
    gpu_open();
    logits[1 * N + 33] = NAN;
    logits[2 * N + 1] = NAN;
    for (int j = 0; j < N; j++) logits[4 * N + j] = -INFINITY;
    dtrain_cross_entropy_args args = {.rows = ROWS, .n = N, .scale = 1, .dtype = DTRAIN_DTYPE_F32};
    args.logits = gpu_give(logits, sizeof d_logits, 0);
    args.targets = (int32_t *)gpu_give(targets, sizeof targets, 0);
    args.loss = (float *)gpu_take(sizeof loss, 0);
    args.lse = (float *)gpu_take(sizeof loss, 0);
    args.d_logits = gpu_take(sizeof d_logits, 0);
    CHECK(gpu->ops->cross_entropy(gpu, &args) == DTRAIN_OK);
    gpu_read(loss, args.loss, sizeof loss);
    gpu_read(d_logits, args.d_logits, sizeof d_logits);
    CHECK(isfinite(loss[0]) && loss[1] != loss[1] && loss[2] == 0 && isfinite(loss[3]) &&
          loss[4] != loss[4]);
    for (int j = 0; j < N; j++) {
        CHECK(isfinite(d_logits[j]) && isfinite(d_logits[3 * N + j]));
        CHECK(d_logits[N + j] != d_logits[N + j] && d_logits[2 * N + j] == 0);
    }
    gpu_close();
    free(logits);
}

/* A bad target is reported, and its row ignored; a column of padding is no target. */
static void test_bad_targets(void)
{
    static const char *const sentences[3] = {"target 4 at row 1 is outside [0, 4)",
                                             "target -2 at row 1 is outside [0, 4)",
                                             "target 3 at row 1 is outside [0, 3)"};
    const int32_t targets[3][3] = {{1, 4, 0}, {1, -2, 0}, {1, 3, 0}};
    float *logits = (float *)gpu_noise(12, DTRAIN_DTYPE_F32, 1, 1), loss[3], d_logits[12];
    gpu_open();
    for (int bad = 0; bad < 3; bad++) {
        dtrain_cross_entropy_args args = {
            .rows = 3, .n = 4, .scale = 1, .dtype = DTRAIN_DTYPE_F32, .classes = bad == 2 ? 3 : 0};
        args.logits = gpu_give(logits, sizeof d_logits, 0);
        args.targets = (int32_t *)gpu_give(targets[bad], sizeof targets[bad], 0);
        args.loss = (float *)gpu_take(sizeof loss, 0);
        args.lse = (float *)gpu_give(loss, sizeof loss, 0);
        args.d_logits = gpu_take(sizeof d_logits, 0);
        dtrain_cross_entropy_backward_args back = {.rows = 3,
                                                   .n = 4,
                                                   .scale = 1,
                                                   .logits = args.logits,
                                                   .targets = args.targets,
                                                   .lse = args.lse,
                                                   .d_logits = args.d_logits,
                                                   .dtype = DTRAIN_DTYPE_F32,
                                                   .classes = args.classes};
        for (int pass = 0; pass < 2; pass++) {
            CHECK((pass ? gpu->ops->cross_entropy_backward(gpu, &back)
                        : gpu->ops->cross_entropy(gpu, &args)) == DTRAIN_OK);
            CHECK(gpu->ops->synchronize(gpu) == DTRAIN_ERROR_DATA);
            CHECK_MSG(strstr(dtrain_last_error(), sentences[bad]) != NULL, "%s",
                      dtrain_last_error());
            gpu_read(loss, args.loss, sizeof loss);
            gpu_read(d_logits, args.d_logits, sizeof d_logits);
            CHECK(loss[0] > 0 && loss[1] == 0 && loss[2] > 0);
            for (int j = 0; j < 4; j++)
                CHECK((d_logits[j] != 0) == (bad < 2 || j < 3) && d_logits[4 + j] == 0 &&
                      (d_logits[8 + j] != 0) == (bad < 2 || j < 3));
        }
        gpu_release();
    }
    gpu_close();
    free(logits);
}

static void test_errors(void)
{
    gpu_open();
    int32_t *ids = (int32_t *)gpu_take(64, 0);
    float *memory = (float *)gpu_take(64, 0);
    dtrain_embedding_args words = {.rows = 1,
                                   .sequence = 1,
                                   .n = 1,
                                   .tokens = ids,
                                   .wte = memory,
                                   .y = memory,
                                   .dtype = DTRAIN_DTYPE_F32};
    CHECK(gpu->ops->embedding(gpu, &words) == DTRAIN_ERROR_ARGUMENT);
    words.vocab = 1, words.sequence = 0, words.wpe = memory;
    CHECK(gpu->ops->embedding(gpu, &words) == DTRAIN_ERROR_ARGUMENT);
    words.sequence = 1, words.dtype = DTRAIN_DTYPE_I32;
    CHECK(gpu->ops->embedding(gpu, &words) == DTRAIN_ERROR_UNSUPPORTED);
    words.rows = 0, words.dtype = DTRAIN_DTYPE_F32;
    CHECK(gpu->ops->embedding(gpu, &words) == DTRAIN_OK);
    dtrain_embedding_backward_args back = {.rows = (int64_t)1 << 31,
                                           .sequence = 1,
                                           .n = 1,
                                           .vocab = 1,
                                           .tokens = ids,
                                           .d_y = memory,
                                           .d_wte = memory,
                                           .dtype = DTRAIN_DTYPE_F32};
    CHECK(gpu->ops->embedding_backward(gpu, &back) == DTRAIN_ERROR_UNSUPPORTED);
    CHECK_MSG(strstr(dtrain_last_error(), "2147483648 rows") != NULL, "%s", dtrain_last_error());
    back.rows = 1, back.vocab = ((int64_t)1 << 31) + 1;
    CHECK(gpu->ops->embedding_backward(gpu, &back) == DTRAIN_ERROR_UNSUPPORTED);
    back.vocab = 0;
    CHECK(gpu->ops->embedding_backward(gpu, &back) == DTRAIN_ERROR_ARGUMENT);
    back.vocab = 1, back.d_wpe = memory, back.sequence = 0;
    CHECK(gpu->ops->embedding_backward(gpu, &back) == DTRAIN_ERROR_ARGUMENT);
    back.sequence = 1, back.dtype = DTRAIN_DTYPE_I64;
    CHECK(gpu->ops->embedding_backward(gpu, &back) == DTRAIN_ERROR_UNSUPPORTED);
    dtrain_cross_entropy_args loss = {.rows = 1,
                                      .n = 1,
                                      .logits = memory,
                                      .targets = ids,
                                      .loss = memory,
                                      .lse = memory,
                                      .scale = 1,
                                      .dtype = DTRAIN_DTYPE_I32};
    CHECK(gpu->ops->cross_entropy(gpu, &loss) == DTRAIN_ERROR_UNSUPPORTED);
    loss.dtype = DTRAIN_DTYPE_F32, loss.rows = 0;
    CHECK(gpu->ops->cross_entropy(gpu, &loss) == DTRAIN_OK);
    dtrain_cross_entropy_backward_args d_loss = {.rows = 1,
                                                 .n = 1,
                                                 .scale = 1,
                                                 .logits = memory,
                                                 .targets = ids,
                                                 .lse = memory,
                                                 .d_logits = memory,
                                                 .dtype = DTRAIN_DTYPE_I64};
    CHECK(gpu->ops->cross_entropy_backward(gpu, &d_loss) == DTRAIN_ERROR_UNSUPPORTED);
    CHECK(gpu->ops->synchronize(gpu) == DTRAIN_OK);
    gpu_close();
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    if (gpu_missing()) {
        SKIP(test_cuda_tokens, gpu_missing());
        return test_summary();
    }
    RUN(test_embedding);
    RUN(test_embedding_backward);
    RUN(test_embedding_backward_large);
    RUN(test_bad_tokens);
    RUN(test_cross_entropy);
    RUN(test_cross_entropy_vocabulary);
    RUN(test_cross_entropy_nan);
    RUN(test_bad_targets);
    RUN(test_errors);
    return test_summary();
}
