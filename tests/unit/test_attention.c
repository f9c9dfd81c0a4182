/* test_attention.c: attention on the tape with q, k and v apart, masks and key lengths: beside finite differences,
 * PyTorch's values, and other ways to say the same; bits with 1 to 4 threads and with activation checkpointing. Packed
 * rows alone are in test_tape.c and test_llama.c, the kernels in test_kernels.c and test_cuda_kernels.c. */
#include <float.h>

#include "test.h"
#include "dtrain.h"
#include "differences.h"
#include "naive_device.h"
#include "reference/llama_golden.h"
#include "tape_error.h"

/* ---- What is built -----------------------------------------------------------------------------*/

/* Which inputs are q, k and v. */
enum { APART, PACKED, ALL_ONE, KV_ONE, QK_ONE };

static struct {
    dtrain_attention_desc desc; /* without tensors */
    int64_t mask_shape[4];      /* ends at its first 0; of no axes: no mask */
    const float *mask;
    int64_t batch;
    const int32_t *lengths; /* (batch) or NULL */
    int inputs;
} now;

static void now_is(int inputs, int64_t sequence, int64_t keys, int64_t heads, int64_t kv_heads,
                   bool causal)
{
    memset(&now, 0, sizeof now);
    now.inputs = inputs;
    now.batch = 2;
    now.desc.sequence = sequence, now.desc.key_sequence = keys;
    now.desc.heads = heads, now.desc.kv_heads = kv_heads;
    now.desc.causal = causal;
}

static void now_masks(int64_t a, int64_t b, int64_t c, int64_t d, const float *mask)
{
    const int64_t shape[4] = {a, b, c, d};
    memcpy(now.mask_shape, shape, sizeof shape);
    now.mask = mask;
}

static dtrain_tensor *attend(dtrain_tape *tape, dtrain_tensor *q, dtrain_tensor *k,
                             dtrain_tensor *v)
{
    dtrain_attention_desc desc = now.desc;
    uint32_t ndim = 0;
    while (ndim < 4 && now.mask_shape[ndim]) ndim++;
    if (ndim)
        desc.mask =
            dtrain_tape_input(tape, DTRAIN_DTYPE_F32, ndim, now.mask_shape, now.mask, false);
    if (now.lengths)
        desc.key_lengths =
            dtrain_tape_input(tape, DTRAIN_DTYPE_I32, 1, &now.batch, now.lengths, false);
    return dtrain_attention(tape, q, k, v, &desc);
}

static dtrain_tensor *build(dtrain_tape *tape, op_case *c)
{
    dtrain_tensor *const *in = c->input;
    switch (now.inputs) {
    case APART: return attend(tape, in[0], in[1], in[2]);
    case PACKED: return attend(tape, in[0], NULL, NULL);
    case ALL_ONE: return dtrain_add(tape, attend(tape, in[0], in[0], in[0]), in[0]);
    case KV_ONE: return attend(tape, in[0], in[1], in[1]);
    default: return attend(tape, in[0], in[0], in[1]);
    }
}

/* Random numbers, of which every fifth is -infinity and the row 1 of each 4. */
static float *make_mask(int64_t count, int64_t keys)
{
    float *mask = (float *)malloc((size_t)count * sizeof *mask);
    for (int64_t i = 0; i < count; i++)
        mask[i] =
            i % 5 == 3 || i / keys % 4 == 1 ? -INFINITY : dtrain_random_normal(3, 1, (uint64_t)i);
    return mask;
}

/* ---- Finite differences ------------------------------------------------------------------------*/

static void test_differences(void)
{
    static const int32_t lengths[2] = {3, 1}, none[2] = {0, 4};
    float *mask = make_mask(2 * 4 * 3 * 5, 5);
    for (int64_t kv_heads = 1; kv_heads <= 4; kv_heads *= 2)
        for (int turn = 0; turn < 5; turn++) {
            const int64_t queries = turn == 4 ? 5 : 3, keys = turn == 4 ? 3 : 5;
            op_case c = case_of("attention", build);
            now_is(APART, queries, keys, 4, kv_heads, turn == 1 || turn == 4);
            if (turn == 1) now.lengths = lengths;
            if (turn == 2) now_masks(3, 5, 0, 0, mask);
            if (turn == 3) now_masks(2, kv_heads == 1 ? 1 : 4, 3, 5, mask), now.lengths = none;
            case_input(&c, 2 * queries, 4 * 2, 0, 0);
            case_input(&c, 2, keys, kv_heads * 2, 0);
            case_input(&c, 2 * keys, kv_heads * 2, 0, 0);
            case_check(&c);
        }
    for (int inputs = PACKED; inputs <= QK_ONE; inputs++) {
        op_case c = case_of("attention of one tensor", build);
        now_is(inputs, 3, 0, 2, 0, inputs % 2 != 0);
        now_masks(2, 3, 3, 0, mask);
        if (inputs == PACKED) now.lengths = lengths;
        case_input(&c, 6, inputs == PACKED ? 12 : 4, 0, 0);
        if (inputs > ALL_ONE) case_input(&c, 6, 4, 0, 0);
        case_check(&c);
    }
    free(mask);
}

/* ---- PyTorch's values --------------------------------------------------------------------------*/

static void test_golden(void)
{
    static const int32_t lengths[2] = {5, 3};
    const float *crossed[3] = {llama_cross_dq, llama_cross_dk, llama_cross_dv};
    const float *longer[3] = {llama_long_dq, llama_long_dk, llama_long_dv};
    op_case c = case_of("attention with a mask", build);
    now_is(APART, 3, 5, 4, 2, false);
    now_masks(4, 3, 5, 0, llama_cross_mask);
    now.lengths = lengths;
    golden_input(&c, 6, 16, 0, llama_cross_q);
    golden_input(&c, 10, 8, 0, llama_cross_k), golden_input(&c, 10, 8, 0, llama_cross_v);
    golden_run(&c, llama_cross_y, llama_cross_dy, crossed, NULL, 5e-6);

    c = case_of("causal attention of fewer keys", build);
    now_is(APART, 5, 3, 4, 2, true);
    golden_input(&c, 10, 16, 0, llama_long_q);
    golden_input(&c, 6, 8, 0, llama_long_k), golden_input(&c, 6, 8, 0, llama_long_v);
    golden_run(&c, llama_long_y, llama_long_dy, longer, NULL, 5e-6);
}

/* ---- Other ways to say the same ----------------------------------------------------------------*/

enum { BATCH = 2, T = 70, HEADS = 3, SIZE = 8, N = HEADS * SIZE, ROWS = BATCH * T };

typedef struct outcome {
    float y[ROWS * N], slope[3][ROWS * N]; /* of q, k, v */
    uint64_t bytes;                        /* of the tape */
    size_t recomputed;
} outcome;

typedef struct setting {
    const dtrain_device_ops *ops;
    uint32_t threads, flags, every;
    bool packed;
} setting;

static float q[ROWS * N], k[ROWS * N], v[ROWS * N];

static void make_qkv(void)
{
    for (int i = 0; i < ROWS * N; i++) {
        q[i] = dtrain_random_normal(1, 1, (uint64_t)i);
        k[i] = dtrain_random_normal(1, 2, (uint64_t)i);
        v[i] = dtrain_random_normal(1, 3, (uint64_t)i);
    }
}

/* Run attention as `now` says on q, k and v, with the sum of the squares of the result as loss. With autocast the three
 * are cast, as linear layers would do. */
static void run(setting s, outcome *out)
{
    dtrain_device_desc desc;
    dtrain_device *device = NULL;
    dtrain_tape *tape = NULL;
    dtrain_tape_info info;
    const int64_t shape[2] = {ROWS, N}, wide[2] = {ROWS, 3 * N};
    const float *values[3] = {q, k, v};
    const dtrain_dtype type = s.flags & DTRAIN_TAPE_BF16  ? DTRAIN_DTYPE_BF16
                              : s.flags & DTRAIN_TAPE_F16 ? DTRAIN_DTYPE_F16
                                                          : DTRAIN_DTYPE_F32;
    const bool plan = s.ops == device_table("plan");
    static float packed[ROWS * 3 * N];
    dtrain_tensor *in[3] = {NULL, NULL, NULL}, *x[3] = {NULL, NULL, NULL};
    memset(&desc, 0, sizeof desc);
    desc.thread_count = s.threads;
    desc.oversubscribed = true;
    CHECK(dtrain_device_create(s.ops, &desc, &device) == DTRAIN_OK);
    CHECK(dtrain_tape_create(NULL, NULL, device, &tape) == DTRAIN_OK);
    CHECK(dtrain_tape_recompute(tape, s.every, 0) == DTRAIN_OK);
    dtrain_tape_begin(tape, s.flags, 0);
    dtrain_tape_unit(tape, 0);
    for (int i = 0; i < ROWS * 3 * N; i++) packed[i] = values[i / N % 3][i / (3 * N) * N + i % N];
    for (int i = 0; i < (s.packed ? 1 : 3); i++) {
        in[i] = dtrain_tape_input(tape, DTRAIN_DTYPE_F32, 2, s.packed ? wide : shape,
                                  s.packed ? packed : values[i], true);
        x[i] = dtrain_cast(tape, dtrain_scale(tape, in[i], 1), type);
    }
    dtrain_tensor *y = attend(tape, x[0], x[1], x[2]);
    if (!plan)
        CHECK_MSG(dtrain_tensor_read(tape, y, out->y, NULL) == DTRAIN_OK, "%s",
                  dtrain_last_error());
    for (uint32_t unit = 1; unit < 4; unit++) { /* so that dropped results are overwritten */
        dtrain_tape_unit(tape, unit);
        y = dtrain_scale(tape, y, 0.5f);
    }
    y = dtrain_cast(tape, y, DTRAIN_DTYPE_F32);
    dtrain_tensor *loss = dtrain_sum(tape, dtrain_multiply(tape, y, y));
    CHECK_MSG(dtrain_tape_backward(tape, loss, 1) == DTRAIN_OK, "%s", dtrain_last_error());
    for (int i = 0; i < (s.packed ? 1 : 3) && !plan; i++)
        CHECK(dtrain_tensor_read(tape, in[i], NULL, s.packed ? packed : out->slope[i]) ==
              DTRAIN_OK);
    for (int i = 0; i < ROWS * 3 * N && s.packed; i++)
        out->slope[i / N % 3][i / (3 * N) * N + i % N] = packed[i];
    dtrain_tape_query(tape, &info);
    out->bytes = info.activation_bytes + info.gradient_bytes;
    out->recomputed = info.recomputed_count;
    dtrain_tape_destroy(tape);
    dtrain_device_destroy(device);
}

static void check_near(const outcome *a, const outcome *b, double tolerance, const char *what)
{
    const float *x = a->y, *z = b->y; /* the gradients follow */
    for (int i = 0; i < 4 * ROWS * N; i++)
        if (!test_close((double)x[i], (double)z[i], tolerance)) {
            CHECK_MSG(0, "%s: number %d of y, d_q, d_k, d_v is %g, expected %g", what, i,
                      (double)x[i], (double)z[i]);
            return;
        }
    CHECK(1);
}

/* Packed rows have the bits of q, k and v apart; causal and key lengths are masks of -infinity. */
static void test_equal_ways(void)
{
    static outcome apart, other;
    static float mask[BATCH * T * T];
    static const int32_t lengths[BATCH] = {T - 6, 1};
    const setting plain = {NULL, 1, 0, 0, false}, packed = {NULL, 1, 0, 0, true};
    make_qkv();
    for (int causal = 0; causal < 2; causal++)
        for (int padded = 0; padded < 2; padded++) {
            now_is(APART, T, 0, HEADS, 0, causal != 0);
            if (padded) now.lengths = lengths;
            run(plain, &apart);
            run(packed, &other);
            CHECK(memcmp(apart.y, other.y, sizeof apart.y) == 0);
            CHECK(memcmp(apart.slope, other.slope, sizeof apart.slope) == 0);
            now_is(APART, T, T, HEADS, HEADS, false);
            for (int i = 0; i < BATCH * T * T; i++) {
                const int b = i / (T * T), query = i / T % T, key = i % T;
                const bool hidden = (causal && key > query) || (padded && key >= lengths[b]);
                mask[i] = hidden ? -INFINITY : 0;
            }
            now_masks(BATCH, 1, T, T, mask);
            run(plain, &other);
            check_near(&other, &apart, 1e-5, "a mask of -infinity");
        }
}

/* ---- Nothing seen, padding ---------------------------------------------------------------------*/

/* Padding may hold anything and gets gradient 0; a row that sees no key is 0 and passes no gradient. */
static void test_nothing_seen(void)
{
    static outcome some, other;
    static float mask[T * T];
    static const int32_t lengths[BATCH] = {5, 0};
    const setting settings[3] = {{NULL, 1, 0, 0, false},
                                 {NULL, 2, DTRAIN_TAPE_BF16, 0, true},
                                 {NULL, 1, DTRAIN_TAPE_F16, 0, false}};
    for (int i = 0; i < T * T; i++) mask[i] = i / T == 2 ? -INFINITY : 0.1f;
    for (int s = 0; s < 3; s++) {
        make_qkv();
        now_is(APART, T, 0, HEADS, 0, false);
        now_masks(T, T, 0, 0, mask);
        now.lengths = lengths;
        run(settings[s], &some);
        for (int i = 5 * N; i < ROWS * N; i++) k[i] = v[i] = NAN;
        run(settings[s], &other);
        CHECK(memcmp(some.y, other.y, sizeof some.y) == 0);
        CHECK(memcmp(some.slope, other.slope, sizeof some.slope) == 0);
        for (int i = 0; i < ROWS * N; i++) {
            const bool seen = i < T * N && i / N != 2;
            CHECK_MSG((some.y[i] != 0) == seen && (some.slope[0][i] != 0) == seen,
                      "element %d: y %g, gradient %g", i, (double)some.y[i],
                      (double)some.slope[0][i]);
            CHECK((some.slope[1][i] != 0) == (i < 5 * N) && (some.slope[2][i] != 0) == (i < 5 * N));
        }
    }
}

/* The smallest number as a mask, which others write for -infinity, hides like it beside keys that are seen, and a row
 * of nothing else weighs all keys alike, as in PyTorch, also for its gradients. So does -1e9. */
static void test_smallest_number(void)
{
    static outcome all, seen, large;
    static float mask[T * T];
    const setting plain = {NULL, 1, 0, 0, false};
    make_qkv();
    memset(q, 0, sizeof q);
    for (int i = 0; i < T * T; i++) mask[i] = i % T == 7 ? -FLT_MAX : 0;
    now_is(APART, T, 0, HEADS, 0, true); /* query 2 sees three keys; what is later stays hidden */
    now_masks(T, T, 0, 0, mask);
    run(plain, &seen);
    for (int i = 2 * T; i < 3 * T; i++) mask[i] = -1e9f;
    run(plain, &large);
    for (int i = 2 * T; i < 3 * T; i++) mask[i] = -FLT_MAX;
    run(plain, &all);
    check_near(&large, &seen, 1e-6, "a row hidden by -1e9");
    check_near(&all, &seen, 1e-6, "a row hidden by the smallest number");
    for (int query = 0; query < T; query += 1)
        for (int i = 0; i < N; i++) {
            double sum = 0, count = 0;
            for (int key = 0; key <= query; key++)
                if (key != 7 || query == 2) sum += (double)v[key * N + i], count++;
            CHECK_CLOSE((double)all.y[query * N + i], sum / count, 1e-5);
        }
}

/* A number that the mask adds to all scores of a row changes nothing, while it does not hide. */
static void test_constant_rows(void)
{
    static const float added[] = {3, -100, -10000, -65504, 12345.67f};
    static outcome plain, masked;
    static float mask[T * T];
    const setting one = {NULL, 1, 0, 0, false};
    make_qkv();
    for (int causal = 0; causal < 2; causal++) {
        now_is(APART, T, 0, HEADS, 0, causal != 0);
        run(one, &plain);
        for (size_t a = 0; a < sizeof added / sizeof *added; a++) {
            for (int i = 0; i < T * T; i++) mask[i] = i / T % 3 == 1 ? added[a] : 0;
            now_is(APART, T, 0, HEADS, 0, causal != 0);
            now_masks(T, T, 0, 0, mask);
            run(one, &masked);
            check_near(&masked, &plain, 5e-6, "a row to which the mask adds one number");
        }
    }
}

/* ---- Bits --------------------------------------------------------------------------------------*/

static void test_bits(void)
{
    static outcome first, other, naive, planned;
    static const uint32_t casts[3] = {0, DTRAIN_TAPE_BF16, DTRAIN_TAPE_F16};
    static const int32_t lengths[BATCH] = {T, 33};
    float *mask = make_mask(HEADS * T * T, T);
    make_qkv();
    for (int run_of = 0; run_of < 12; run_of++) {
        const uint32_t flags = casts[run_of % 3];
        now_is(APART, T, 0, HEADS, 0, run_of % 2 != 0);
        if (run_of / 3 % 2) now_masks(HEADS, T, T, 0, mask);
        if (run_of / 6) now.lengths = lengths;
        const setting one = {NULL, 1, flags, 0, false};
        run(one, &first);
        const setting slow = {naive_device_ops(), 1, flags, 0, false};
        run(slow, &naive);
        check_near(&first, &naive, flags ? 3e-2 : 1e-4, "beside the naive device");
        for (uint32_t threads = 1; threads <= 4; threads++) {
            const setting many = {NULL, threads, flags, threads % 2, false};
            run(many, &other);
            CHECK((other.recomputed > 0) == (many.every > 0));
            CHECK_MSG(memcmp(first.y, other.y, sizeof first.y + sizeof first.slope) == 0,
                      "run %d, %u threads: other bits", run_of, threads);
        }
        const setting plan = {device_table("plan"), 1, flags, 0, false};
        run(plan, &planned);
        CHECK(planned.bytes == first.bytes);
    }
    free(mask);
}

/* ---- Errors ------------------------------------------------------------------------------------*/

static void test_errors(void)
{
    dtrain_device *device = NULL;
    dtrain_tape *tape = NULL;
    const int64_t wide[2] = {6, 32}, narrow[2] = {10, 8}, three = 3, two = 2;
    const int64_t full[4] = {2, 4, 3, 5}, wrong[4] = {2, 3, 3, 5}, turned[2] = {5, 3};
    const int32_t some[3] = {5, 6, 0};
    float *x = (float *)calloc(192, sizeof *x);
    CHECK(dtrain_device_create(NULL, NULL, &device) == DTRAIN_OK);
    CHECK(dtrain_tape_create(NULL, NULL, device, &tape) == DTRAIN_OK);
#define INPUT(ndim, shape, grad) dtrain_tape_input(tape, DTRAIN_DTYPE_F32, ndim, shape, x, grad)
#define REFUSED(q, k, v, words, ...)                                                      \
    do {                                                                                  \
        dtrain_tape_begin(tape, 0, 0);                                                    \
        dtrain_tensor *a = INPUT(2, wide, true), *b = INPUT(2, narrow, true);             \
        const dtrain_attention_desc desc = {__VA_ARGS__};                                 \
        (void)a, (void)b;                                                                 \
        CHECK(!dtrain_attention(tape, q, k, v, &desc));                                   \
        CHECK(tape_error(tape) == DTRAIN_ERROR_ARGUMENT);                                 \
        CHECK_MSG(strstr(dtrain_last_error(), words) != NULL, "%s", dtrain_last_error()); \
    } while (0)
    REFUSED(a, NULL, NULL, "dtrain_attention: 4 heads of queries cannot share 3 of keys equally",
            .sequence = 3, .heads = 4, .kv_heads = 3);
    REFUSED(a, NULL, NULL, "dtrain_attention: 0 heads of queries", .sequence = 3);
    REFUSED(a, NULL, NULL, "a sequence of 0 queries", .heads = 4);
    REFUSED(a, NULL, NULL, "a sequence of 3 queries and -1 keys", .sequence = 3, .heads = 4,
            .key_sequence = -1);
    REFUSED(a, NULL, NULL, "sequences of 4 rows of 4 heads of q", .sequence = 4, .heads = 4,
            .kv_heads = 2);
    REFUSED(a, NULL, NULL, "3 heads of k and v, side by side", .sequence = 3, .heads = 3);
    REFUSED(a, NULL, NULL, "of 6 rows of 2 heads of k and v, side by side", .sequence = 3,
            .heads = 4, .kv_heads = 2, .key_sequence = 6);
    REFUSED(a, b, NULL, "dtrain_attention: input 3 is NULL", .sequence = 3, .heads = 4);
    REFUSED(a, b, b, "input 1 is (6, 32) f32; input 2 is (10, 8) f32; input 3 is (10, 8) f32",
            .sequence = 3, .heads = 4, .key_sequence = 5);
    REFUSED(a, b, b, "4 rows of 1 heads of k and v", .sequence = 3, .heads = 4, .kv_heads = 1,
            .key_sequence = 4);
    REFUSED(a, b, dtrain_cast(tape, b, DTRAIN_DTYPE_BF16),
            "type (see dtrain_cast); input 1 is (6, 32) f32; input 2 is (10, 8) f32; input 3 is "
            "(10, 8) bf16",
            .sequence = 3, .heads = 4, .kv_heads = 1, .key_sequence = 5);
    REFUSED(a, b, b, "3 key lengths for a batch of 2", .sequence = 3, .heads = 4, .kv_heads = 1,
            .key_sequence = 5,
            .key_lengths = dtrain_tape_input(tape, DTRAIN_DTYPE_I32, 1, &three, some, false));
    REFUSED(a, b, b, "input 2 is f32, expected i32", .sequence = 3, .heads = 4, .kv_heads = 1,
            .key_sequence = 5, .key_lengths = INPUT(1, &two, false));
    REFUSED(a, b, b,
            "expected a mask of (batch, heads, queries, keys) = (2, 4, 3, 5), where batch and "
            "heads may be 1 or left out",
            .sequence = 3, .heads = 4, .kv_heads = 1, .key_sequence = 5,
            .mask = INPUT(4, wrong, false));
    REFUSED(a, b, b, "input 4 is (5, 3)", .sequence = 3, .heads = 4, .kv_heads = 1,
            .key_sequence = 5, .mask = INPUT(2, turned, false));
    REFUSED(a, b, b, "gets no gradient and may not want one", .sequence = 3, .heads = 4,
            .kv_heads = 1, .key_sequence = 5, .mask = INPUT(4, full, true));
    REFUSED(a, b, b, "expected a mask of f32", .sequence = 3, .heads = 4, .kv_heads = 1,
            .key_sequence = 5, .mask = dtrain_cast(tape, INPUT(4, full, false), DTRAIN_DTYPE_BF16));
#undef REFUSED
    dtrain_tape_begin(tape, 0, 0);
    CHECK(!dtrain_attention(tape, INPUT(2, wide, true), NULL, NULL, NULL));
    CHECK(strstr(dtrain_last_error(), "dtrain_attention: 0 heads of queries") != NULL);
    dtrain_tape_begin(tape, 0, 0);
    const dtrain_attention_desc bad = {
        .sequence = 3,
        .heads = 4,
        .kv_heads = 1,
        .key_sequence = 5,
        .key_lengths = dtrain_tape_input(tape, DTRAIN_DTYPE_I32, 1, &two, some, false)};
    dtrain_tensor *b = INPUT(2, narrow, false);
    CHECK(!dtrain_attention(tape, INPUT(2, wide, true), b, b, &bad));
    CHECK(tape_error(tape) == DTRAIN_ERROR_DATA);
    CHECK_MSG(strstr(dtrain_last_error(), "key length 6 of batch element 1 is outside [0, 5]"),
              "%s", dtrain_last_error());
#undef INPUT
    free(x);
    dtrain_tape_destroy(tape);
    dtrain_device_destroy(device);
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    RUN(test_differences);
    RUN(test_golden);
    RUN(test_equal_ways);
    RUN(test_nothing_seen);
    RUN(test_smallest_number);
    RUN(test_constant_rows);
    RUN(test_bits);
    RUN(test_errors);
    return test_summary();
}
