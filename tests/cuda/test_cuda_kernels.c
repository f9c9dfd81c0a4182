/* test_cuda_kernels.c: random arguments for the GPU kernels of operations (random_kernels.h), in every order in which
 * threads may take turns, which must leave the same bits. */
#include "test.h"
#include "dtrain.h"
#include "cuda_testing.h"
#include "packed_attention.h"
#include "random_kernels.h"

enum { KINDS = 7 }; /* of cases: a seed's is seed % KINDS */

static void random_cases(uint64_t kind)
{
    dtrain_device *naive = NULL;
    const uint64_t first = (uint64_t)time(NULL) % 100000000u * KINDS + kind;
    const double end = test_seconds() + 3;
    gpu_open();
    CHECK(dtrain_device_create(naive_device_ops(), NULL, &naive) == DTRAIN_OK);
    for (uint64_t i = 0; i < 10 || (test_full() && test_seconds() < end); i++) {
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
static void test_softmax(void) { random_cases(3); }
static void test_rotary(void) { random_cases(4); }
static void test_permute(void) { random_cases(5); }
static void test_attention(void) { random_cases(6); }

/* What cannot be done is refused in a sentence. */
static void test_errors(void)
{
    float *x;
    gpu_open();
    x = (float *)gpu_take(64 * sizeof *x, 0);
    const dtrain_dtype f32 = DTRAIN_DTYPE_F32;
    dtrain_pointwise_args one = {0, 4, x, NULL, x, f32, f32, f32};
    for (one.kind = 0; one.kind < 9; one.kind++) {
        one.other = one.kind < DTRAIN_POINTWISE_MULTIPLY ? x : NULL;
        CHECK(gpu->ops->pointwise(gpu, &one) == DTRAIN_ERROR_ARGUMENT);
        CHECK(strstr(dtrain_last_error(), "pointwise: kind") != NULL);
    }
    one.kind = 1, one.x_dtype = DTRAIN_DTYPE_I32;
    CHECK(gpu->ops->pointwise(gpu, &one) == DTRAIN_ERROR_UNSUPPORTED);
    const dtrain_pointwise_backward_args back = {
        DTRAIN_POINTWISE_SILU, false, false, 4, x, NULL, x, x, x, f32, f32, f32};
    CHECK(gpu->ops->pointwise_backward(gpu, &back) == DTRAIN_ERROR_ARGUMENT);
    CHECK(strstr(dtrain_last_error(), "no second argument") != NULL);
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
    RUN(test_softmax);
    RUN(test_rotary);
    RUN(test_permute);
    RUN(test_attention);
    RUN(test_errors);
    return test_summary();
}
