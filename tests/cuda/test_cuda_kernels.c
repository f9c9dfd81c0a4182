/* test_cuda_kernels.c: random arguments for the GPU kernels of operations (random_kernels.h), in every order in which
 * threads may take turns, which must leave the same bits. */
#include "test.h"
#include "dtrain.h"
#include "cuda_testing.h"
#include "packed_attention.h"
#include "random_kernels.h"

enum { KINDS = 11 }; /* of cases: a seed's is seed % KINDS */

static void random_cases(uint64_t kind)
{
    dtrain_device *naive = NULL;
    const uint64_t first = test_seed() * KINDS + kind;
    const double end = test_seconds() + (double)test_draws(0, 1, 3);
    gpu_open();
    CHECK(dtrain_device_create(naive_device_ops(), NULL, &naive) == DTRAIN_OK);
    for (uint64_t i = 0; i < 10 || test_seconds() < end; i++) {
        uint64_t hash = 0;
        bool good = true;
        EACH_ORDER(order)
        {
            const uint64_t bits = kernel_case(gpu, naive, first + i * KINDS, &good);
            if (order == 0) hash = bits;
            CHECK_MSG(bits == hash, "seed %llu, %s: other bits in order %d",
                      (unsigned long long)(first + i * KINDS), kernels.what, order);
        }
        if (!good) break;
    }
    dtrain_device_destroy(naive);
    gpu_close();
}

static void test_pointwise(void) { random_cases(0); }
static void test_norms(void) { random_cases(1); }
static void test_cross_entropy(void) { random_cases(2); }
static void test_embedding(void) { random_cases(3); }
static void test_softmax(void) { random_cases(4); }
static void test_rotary(void) { random_cases(5); }
static void test_permute(void) { random_cases(6); }
static void test_attention(void) { random_cases(7); }
static void test_dropout(void) { random_cases(8); }
static void test_bias(void) { random_cases(9); }
static void test_cut_cross_entropy(void) { random_cases(10); }

/* What cannot be done is refused in a sentence. */
static void test_errors(void)
{
    float *x;
    gpu_open();
    x = (float *)gpu_take(64 * sizeof *x, 0);
    const dtrain_dtype f32 = DTRAIN_DTYPE_F32;
    dtrain_pointwise_args one = {
        .count = 4, .x = x, .y = x, .x_dtype = f32, .other_dtype = f32, .y_dtype = f32};
    for (one.kind = 0; one.kind < 9; one.kind++) {
        one.other = one.kind < DTRAIN_POINTWISE_MULTIPLY ? x : NULL;
        CHECK(gpu->ops->pointwise(gpu, &one) == DTRAIN_ERROR_ARGUMENT);
        CHECK(strstr(dtrain_last_error(), "pointwise: kind") != NULL);
    }
    one.kind = 1, one.x_dtype = DTRAIN_DTYPE_I32;
    CHECK(gpu->ops->pointwise(gpu, &one) == DTRAIN_ERROR_UNSUPPORTED);
    const dtrain_pointwise_backward_args back = {.kind = DTRAIN_POINTWISE_SILU,
                                                 .count = 4,
                                                 .x = x,
                                                 .d_y = x,
                                                 .d_x = x,
                                                 .d_other = x,
                                                 .x_dtype = f32,
                                                 .other_dtype = f32,
                                                 .y_dtype = f32};
    CHECK(gpu->ops->pointwise_backward(gpu, &back) == DTRAIN_ERROR_ARGUMENT);
    CHECK(strstr(dtrain_last_error(), "no second argument") != NULL);
    dtrain_bias_args act = {.m = 1, .n = 1, .c = x, .ldc = 1, .activation = 4, .c_dtype = f32};
    CHECK(gpu->ops->bias(gpu, &act) == DTRAIN_ERROR_ARGUMENT);
    act.activation = 0, act.c_dtype = DTRAIN_DTYPE_I32;
    CHECK(gpu->ops->bias(gpu, &act) == DTRAIN_ERROR_UNSUPPORTED);
    dtrain_rotary_args turn = {1, 1, 2, 3, 4, 100, false, false, x, x, f32};
    CHECK(gpu->ops->rotary(gpu, &turn) == DTRAIN_ERROR_ARGUMENT);
    turn.rotated = 2, turn.d = 3;
    CHECK(gpu->ops->rotary(gpu, &turn) == DTRAIN_ERROR_ARGUMENT);
    const packed_shape four = {1, 2, 4, 3, 4, false, f32};
    const dtrain_attention_args shared = packed_attention(four, x, x, x);
    CHECK(gpu->ops->attention(gpu, &shared) == DTRAIN_ERROR_ARGUMENT);
    CHECK(strstr(dtrain_last_error(), "4 heads of queries, of 4 elements, cannot share 3") != NULL);
    gpu_close();
}

/* Flash attention takes key lengths, products the mask; a length outside [0, keys] is reported at the next wait, by the
 * one as by the other, and taken for the nearest that is inside. */
static void test_key_lengths(void)
{
    enum { T = 20, WIDE = 3 * 64 };
    const packed_shape shape = {2, T, 1, 1, 64, false, DTRAIN_DTYPE_BF16};
    const int32_t lengths[2] = {T + 1, -1};
    gpu_open();
    for (int masked = 0; masked < 2; masked++) {
        uint16_t y[2 * T * 64];
        float *mask = (float *)calloc(T * T, sizeof *mask);
        void *qkv = gpu_noise(2 * T * WIDE, DTRAIN_DTYPE_BF16, 1, 1);
        dtrain_attention_args args =
            packed_attention(shape, gpu_give(qkv, 2 * T * WIDE * 2, 0), gpu_take(sizeof y, 0),
                             gpu_take(2 * T * sizeof(float), 0));
        args.key_lengths = (const int32_t *)gpu_give(lengths, sizeof lengths, 0);
        if (masked) args.mask = (const float *)gpu_give(mask, T * T * sizeof *mask, 0);
#ifdef DTRAIN_CUDA_EMULATION
        dtrain_emulation_counters before, after;
        dtrain_emulation_get_counters(&before);
#endif
        CHECK_MSG(gpu->ops->attention(gpu, &args) == DTRAIN_OK, "%s", dtrain_last_error());
        CHECK(gpu->ops->synchronize(gpu) == DTRAIN_ERROR_DATA);
        CHECK_MSG(strstr(dtrain_last_error(), "attention: key length ") &&
                      strstr(dtrain_last_error(), " is outside [0, 20]"),
                  "%s", dtrain_last_error());
#ifdef DTRAIN_CUDA_EMULATION
        dtrain_emulation_get_counters(&after);
        CHECK((after.matmuls > before.matmuls) == (masked != 0));
#endif
        gpu_read(y, args.y, sizeof y);
        for (int i = 0; i < 2 * T * 64; i++) /* all keys; none */
            CHECK((naive_get(y, DTRAIN_DTYPE_BF16, i) != 0) == (i < T * 64));
        free(mask), free(qkv);
    }
    gpu_close();
}

/* A number that the mask adds to all scores of a row changes nothing, while it does not hide. */
static void test_constant_rows(void)
{
    enum { T = 20, D = 32, COUNT = 2 * T * D };
    static const float added[] = {0, 3, -100, -10000, -65504};
    static float mask[T * T], y[COUNT], d_qkv[3 * COUNT], plain_y[COUNT], plain_d[3 * COUNT];
    const packed_shape shape = {2, T, 1, 1, D, false, DTRAIN_DTYPE_F32};
    gpu_open();
    void *qkv = gpu_noise(3 * COUNT, DTRAIN_DTYPE_F32, 1, 1),
         *d_y = gpu_noise(COUNT, DTRAIN_DTYPE_F32, 2, 1);
    for (size_t a = 0; a < sizeof added / sizeof *added; a++) {
        for (int i = 0; i < T * T; i++) mask[i] = i / T % 3 == 1 ? added[a] : 0;
        void *on_gpu = gpu_give(qkv, sizeof d_qkv, 0), *lse = gpu_take(2 * T * sizeof(float), 0);
        dtrain_attention_args args =
            packed_attention(shape, on_gpu, gpu_take(sizeof y, 0), (float *)lse);
        args.mask = (const float *)gpu_give(mask, sizeof mask, 0);
        args.lse_rest = (float *)gpu_take(2 * T * sizeof(float), 0);
        dtrain_attention_backward_args back = packed_attention_backward(
            shape, on_gpu, args.y, args.lse, gpu_give(d_y, sizeof y, 0), gpu_take(sizeof d_qkv, 0));
        back.forward = args;
        CHECK_MSG(gpu->ops->attention(gpu, &args) == DTRAIN_OK, "%s", dtrain_last_error());
        CHECK_MSG(gpu->ops->attention_backward(gpu, &back) == DTRAIN_OK, "%s", dtrain_last_error());
        gpu_read(y, args.y, sizeof y), gpu_read(d_qkv, back.d_q, sizeof d_qkv);
        if (a == 0) memcpy(plain_y, y, sizeof y), memcpy(plain_d, d_qkv, sizeof d_qkv);
        for (int i = 0; i < COUNT; i++) CHECK_CLOSE((double)y[i], (double)plain_y[i], 5e-6);
        for (int i = 0; i < 3 * COUNT; i++) CHECK_CLOSE((double)d_qkv[i], (double)plain_d[i], 5e-6);
        gpu_release();
    }
    free(qkv), free(d_y);
    gpu_close();
}

int main(int argc, char **argv)
{
    const char *missing = gpu_missing();
    test_begin(argc, argv);
    if (missing) {
        SKIP(test_everything, missing);
        return test_summary();
    }
    RUN(test_pointwise);
    RUN(test_norms);
    RUN(test_cross_entropy);
    RUN(test_embedding);
    RUN(test_softmax);
    RUN(test_rotary);
    RUN(test_permute);
    RUN(test_attention);
    RUN(test_dropout);
    RUN(test_bias);
    RUN(test_cut_cross_entropy);
    RUN(test_errors);
    RUN(test_key_lengths);
    RUN(test_constant_rows);
    return test_summary();
}
