/* cuda_testing.h: what the tests of GPU kernels share. They drive the public table only, so they run
 * on the emulated device and on a real one; what only the emulation can do is under
 * DTRAIN_CUDA_EMULATION. Include it after dtrain.h and test.h. */
#ifndef CUDA_TESTING_H
#define CUDA_TESTING_H

#ifdef DTRAIN_CUDA_EMULATION
#include "cuda_emulation.h"
#endif

#define EACH(i, array) for (size_t i = 0; i < sizeof array / sizeof array[0]; i++)

static dtrain_device *gpu;

static inline void gpu_open(void)
{
    dtrain_device_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.tune = true; /* the longer way */
    CHECK_MSG(dtrain_device_create(dtrain_cuda_device_ops(), &desc, &gpu) == DTRAIN_OK, "%s",
              dtrain_last_error());
    if (!gpu) exit(1);
}

/* Device memory that gpu_release frees. */
static struct {
    void *memory[64];
    size_t bytes[64];
    int count;
} gpu_taken;

/* `shift` bytes behind an aligned address; nothing follows, so that a sanitizer sees an overrun. */
static void *gpu_take(size_t bytes, size_t shift)
{
    void *memory = NULL;
    if (gpu_taken.count == 64 || gpu->ops->alloc(gpu, bytes + shift, &memory) != DTRAIN_OK) {
        CHECK_MSG(0, "no device memory: %s", dtrain_last_error());
        exit(1);
    }
    gpu_taken.memory[gpu_taken.count] = memory;
    gpu_taken.bytes[gpu_taken.count++] = bytes + shift;
    return (char *)memory + shift;
}

static inline void gpu_write(void *device, const void *host, size_t bytes)
{
    CHECK(gpu->ops->copy(gpu, device, host, bytes, DTRAIN_COPY_HOST_TO_DEVICE) == DTRAIN_OK);
}

static inline void *gpu_give(const void *host, size_t bytes, size_t shift)
{
    void *device = gpu_take(bytes, shift);
    gpu_write(device, host, bytes);
    return device;
}

static inline void gpu_read(void *host, const void *device, size_t bytes)
{
    CHECK_MSG(gpu->ops->copy(gpu, host, device, bytes, DTRAIN_COPY_DEVICE_TO_HOST) == DTRAIN_OK,
              "%s", dtrain_last_error());
}

static inline void gpu_release(void)
{
    while (gpu_taken.count > 0) {
        gpu_taken.count--;
        gpu->ops->free(gpu, gpu_taken.memory[gpu_taken.count], gpu_taken.bytes[gpu_taken.count]);
    }
}

static inline void gpu_close(void)
{
    gpu_release();
    CHECK(gpu->allocated_bytes == 0);
    dtrain_device_destroy(gpu);
    gpu = NULL;
}

/* Runs the statement under every order in which threads and blocks may take turns; on a real device
 * the order is whatever it is, several times. */
enum { GPU_ORDERS = 3 };
static inline void gpu_order(int order)
{
#ifdef DTRAIN_CUDA_EMULATION
    dtrain_emulation_set_order(order, 17);
#else
    (void)order;
#endif
}
#define EACH_ORDER(order) \
    for (int order = 0; order < GPU_ORDERS ? (gpu_order(order), 1) : (gpu_order(0), 0); order++)

/* NULL, or why there is no device: then a test file's main skips. Asked in a process of its own,
 * because CUDA does not survive the fork that every test begins with. */
static inline const char *gpu_missing(void)
{
    static char reason[256];
    int ends[2], status = 0;
    if (pipe(ends) != 0) return "no pipe";
    fflush(NULL);
    const pid_t child = fork();
    if (child == 0) {
        const dtrain_result result = dtrain_device_create(dtrain_cuda_device_ops(), NULL, &gpu);
        if (result == DTRAIN_OK) _exit(0);
        const size_t length = strnlen(dtrain_last_error(), sizeof reason - 1);
        _exit(write(ends[1], dtrain_last_error(), length) == (ssize_t)length ? 1 : 2);
    }
    close(ends[1]);
    const ssize_t got = child > 0 ? read(ends[0], reason, sizeof reason - 1) : -1;
    close(ends[0]);
    if (child > 0) waitpid(child, &status, 0);
    if (child > 0 && status == 0) return NULL;
    return got > 0 ? reason : "no device could be created";
}

/* ---- Values in any dtype ----------------------------------------------------------------------*/

static inline double gpu_get(const void *x, int64_t i, dtrain_dtype dtype)
{
    if (dtype == DTRAIN_DTYPE_BF16 || dtype == DTRAIN_DTYPE_F16)
        return (double)dtrain_half_to_f32(dtype, ((const uint16_t *)x)[i]);
    return (double)((const float *)x)[i];
}

static inline void gpu_set(void *x, int64_t i, dtrain_dtype dtype, float value)
{
    if (dtype == DTRAIN_DTYPE_BF16 || dtype == DTRAIN_DTYPE_F16)
        ((uint16_t *)x)[i] = dtrain_half_from_f32(dtype, value);
    else ((float *)x)[i] = value;
}

/* Half of the distance to the next number, relatively. */
static inline double gpu_rounding(dtrain_dtype dtype)
{
    return dtype == DTRAIN_DTYPE_BF16  ? 1.0 / 256
           : dtype == DTRAIN_DTYPE_F16 ? 1.0 / 2048
                                       : 1.0 / 16777216;
}

/* Normal numbers in host memory, the same for the same stream. */
static inline void *gpu_noise(int64_t count, dtrain_dtype dtype, uint64_t stream, float scale)
{
    void *x = malloc((size_t)count * sizeof(float) + 1);
    for (int64_t i = 0; i < count; i++)
        gpu_set(x, i, dtype, scale * dtrain_random_normal(11, stream, (uint64_t)i));
    return x;
}

/* |got - want| <= rounding to dtype + tolerance * (1 + |want|), everywhere. */
static inline bool gpu_near(const char *what, const void *got, const double *want, int64_t count,
                            dtrain_dtype dtype, double tolerance)
{
    for (int64_t i = 0; i < count; i++) {
        const double x = gpu_get(got, i, dtype);
        const double error = gpu_rounding(dtype) * fabs(want[i]) + tolerance * (1 + fabs(want[i]));
        if (fabs(x - want[i]) <= error + (dtype == DTRAIN_DTYPE_F16 ? 6e-8 : 0)) continue;
        CHECK_MSG(0, "%s: element %lld of %lld (%s) is %.9g, expected %.9g", what, (long long)i,
                  (long long)count, dtrain_dtype_name(dtype), x, want[i]);
        return false;
    }
    return CHECK_MSG(1, "%s", what) != 0;
}

#endif
