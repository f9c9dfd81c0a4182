/* test_cuda_guest.c: dtrain_cuda.cu on a stream that is the host's. The host's own kernels are copies that it
 * queues on that stream itself. */
#include "test.h"
#include "dtrain.h"
#include "cuda_testing.h"

#include <cuda_runtime_api.h>

static bool says(const char *words) { return strstr(dtrain_last_error(), words) != NULL; }
#define CHECK_SAYS(words) CHECK_MSG(says(words), "\"%s\" is not in: %s", words, dtrain_last_error())
#define CHECK_CUDA(call) \
    CHECK_MSG((call) == cudaSuccess, "%s", cudaGetErrorString(cudaGetLastError()))

enum { COUNT = 100000, BYTES = COUNT * (int)sizeof(float) };

/* ---- A host ---- */

static cudaStream_t stream;
static float *ones, *a, *b; /* device memory of the host's */

static void host_begin(void)
{
    float *host = (float *)malloc(BYTES);
    CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK_CUDA(cudaMalloc((void **)&ones, BYTES));
    CHECK_CUDA(cudaMalloc((void **)&a, BYTES));
    CHECK_CUDA(cudaMalloc((void **)&b, BYTES));
    for (int i = 0; i < COUNT; i++) host[i] = 1;
    CHECK_CUDA(cudaMemcpy(ones, host, BYTES, cudaMemcpyHostToDevice));
    CHECK_CUDA(cudaMemset(a, 0, BYTES));
    CHECK_CUDA(cudaMemset(b, 0, BYTES));
    CHECK_CUDA(cudaDeviceSynchronize());
    free(host);
}

static void host_end(void)
{
    CHECK_CUDA(cudaStreamSynchronize(stream)); /* it is the host's, and still there */
    CHECK_CUDA(cudaFree(ones));
    CHECK_CUDA(cudaFree(a));
    CHECK_CUDA(cudaFree(b));
    CHECK_CUDA(cudaStreamDestroy(stream));
#ifdef DTRAIN_CUDA_EMULATION
    dtrain_emulation_counters c;
    dtrain_emulation_get_counters(&c);
    CHECK_MSG(c.allocations_alive == 0 && c.pinned_alive == 0 && c.cublas_alive == 0,
              "%d allocations, %d pinned", (int)c.allocations_alive, (int)c.pinned_alive);
    CHECK_MSG(c.streams_alive == 0 && c.events_alive == 0 && c.graphs_alive == 0,
              "%d streams, %d events, %d graphs", (int)c.streams_alive, (int)c.events_alive,
              (int)c.graphs_alive);
#endif
}

static void host_copy(float *to, const float *from)
{
    CHECK_CUDA(cudaMemcpyAsync(to, from, BYTES, cudaMemcpyDeviceToDevice, stream));
}

static bool all_are(const float *device, float value)
{
    float *host = (float *)malloc(BYTES);
    bool good = true;
    CHECK_CUDA(cudaMemcpyAsync(host, device, BYTES, cudaMemcpyDeviceToHost, stream));
    CHECK_CUDA(cudaStreamSynchronize(stream));
    for (int i = 0; i < COUNT; i++) good = good && host[i] == value;
    free(host);
    return good;
}

static dtrain_result join_stream(cudaStream_t given)
{
    dtrain_device_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.device_index = DTRAIN_DEVICE_CURRENT;
    desc.stream = given;
    return dtrain_device_create(dtrain_cuda_device_ops(), &desc, &gpu);
}

static dtrain_result add_one(float *y)
{
    dtrain_axpby_args args = {COUNT, true, 1, 1, NULL, y, false, DTRAIN_DTYPE_F32, NULL};
    return gpu->ops->axpby(gpu, &args);
}

static dtrain_result sum_of(const float *x, float *out)
{
    dtrain_sum_args args = {COUNT, false, false, 1, x, NULL, out, DTRAIN_DTYPE_F32, NULL};
    return gpu->ops->sum(gpu, &args);
}

/* ---- Order ---- */

/* The host's kernels and ours are in one order, without a wait in between; another stream of ours comes after
 * the host's work through an event, and the host's later work after it. */
static void test_order(void)
{
    dtrain_stream *side;
    dtrain_event *computed, *copied;
    host_begin();
    CHECK(join_stream(stream) == DTRAIN_OK);
    CHECK(gpu->ops->stream_native(gpu, NULL) == (void *)stream);
    CHECK(gpu->ops->stream_create(gpu, true, &side) == DTRAIN_OK);
    CHECK(gpu->ops->event_create(gpu, &computed) == DTRAIN_OK);
    CHECK(gpu->ops->event_create(gpu, &copied) == DTRAIN_OK);
    EACH_ORDER(order)
    {
        host_copy(a, ones);
        CHECK(add_one(a) == DTRAIN_OK);
        host_copy(b, a);
        CHECK(add_one(b) == DTRAIN_OK);
        CHECK(gpu->ops->event_record(gpu, computed, NULL) == DTRAIN_OK);
        CHECK(gpu->ops->event_wait(gpu, computed, side) == DTRAIN_OK);
        CHECK(gpu->ops->copy_async(gpu, a, b, BYTES, DTRAIN_COPY_DEVICE_TO_DEVICE, side) ==
              DTRAIN_OK);
        CHECK(gpu->ops->event_record(gpu, copied, side) == DTRAIN_OK);
        CHECK(gpu->ops->event_wait(gpu, copied, NULL) == DTRAIN_OK);
        host_copy(b, a);
        CHECK(all_are(a, 3) && all_are(b, 3));
    }
    gpu->ops->event_destroy(gpu, computed);
    gpu->ops->event_destroy(gpu, copied);
    gpu->ops->stream_destroy(gpu, side);
    gpu_close();
    host_copy(a, ones);
    CHECK(all_are(a, 1));
    host_end();
}

/* The default stream has a handle too. */
static void test_default_stream(void)
{
    float first = 0;
    host_begin();
    CHECK(join_stream(cudaStreamLegacy) == DTRAIN_OK);
    CHECK_CUDA(cudaMemcpyAsync(a, ones, BYTES, cudaMemcpyDeviceToDevice, 0));
    CHECK(add_one(a) == DTRAIN_OK);
    CHECK_CUDA(cudaMemcpyAsync(&first, a, sizeof first, cudaMemcpyDeviceToHost, 0));
    CHECK_CUDA(cudaStreamSynchronize(0));
    CHECK(first == 2);
    gpu_close();
    host_end();
}

/* ---- Which device, and what is left ---- */

static void test_refused(void)
{
    dtrain_device_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.stream = &desc;
    CHECK(dtrain_device_create(NULL, &desc, &gpu) == DTRAIN_ERROR_ARGUMENT && !gpu);
    CHECK_SAYS("the device \"cpu\" has none");
    desc.stream = NULL;
    desc.device_index = DTRAIN_DEVICE_CURRENT; /* a CPU is always the current one */
    CHECK(dtrain_device_create(NULL, &desc, &gpu) == DTRAIN_OK);
    gpu_close();
}

#ifdef DTRAIN_CUDA_EMULATION
static void test_current_device(void)
{
    dtrain_device_info info;
    void *memory;
    dtrain_stream *side;
    dtrain_event *event;
    int device = -1;
    dtrain_emulation_set_device_count(3);
    CHECK_CUDA(cudaSetDevice(2));
    host_begin();
    CHECK(join_stream(stream) == DTRAIN_OK);
    CHECK(dtrain_device_query(gpu, &info) == DTRAIN_OK && info.index == 2);
    CHECK_CUDA(cudaSetDevice(1)); /* the host turns to another one */
    CHECK(gpu->ops->alloc(gpu, 64, &memory) == DTRAIN_ERROR_USAGE && !memory);
    CHECK_SAYS("GPU 1 is current on this thread, and this rank has GPU 2");
    CHECK(add_one(a) == DTRAIN_ERROR_USAGE);
    CHECK(gpu->ops->stream_create(gpu, false, &side) == DTRAIN_ERROR_USAGE && !side);
    CHECK(gpu->ops->event_create(gpu, &event) == DTRAIN_ERROR_USAGE && !event);
    CHECK(gpu->ops->synchronize(gpu) == DTRAIN_ERROR_USAGE);
    CHECK_CUDA(cudaSetDevice(2));
    CHECK(add_one(a) == DTRAIN_OK && all_are(a, 1));
    CHECK_CUDA(cudaSetDevice(1));
    gpu_close();
    CHECK(cudaGetDevice(&device) == cudaSuccess && device == 1); /* as it was found */
    CHECK(join_stream(stream) == DTRAIN_ERROR_ARGUMENT && !gpu); /* of GPU 2 */
    CHECK_SAYS("the stream is not one of GPU 1");
    CHECK(cudaPeekAtLastError() == cudaSuccess);
    CHECK(cudaGetDevice(&device) == cudaSuccess && device == 1);
    CHECK_CUDA(cudaSetDevice(2));
    host_end();
    dtrain_emulation_reset();
}

/* An error that the host has not read yet is there after the device has been destroyed; none is ours. */
static void test_last_error(void)
{
    void *memory;
    host_begin();
    CHECK(join_stream(stream) == DTRAIN_OK);
    CHECK(cudaPeekAtLastError() == cudaSuccess);
    CHECK(add_one(a) == DTRAIN_OK && all_are(a, 1));
    CHECK(cudaMalloc(&memory, (size_t)1 << 60) == cudaErrorMemoryAllocation);
    gpu_close();
    CHECK(cudaGetLastError() == cudaErrorMemoryAllocation);
    host_end();
}
#endif

/* ---- The host's graphs ---- */

typedef struct recorded {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
} recorded;

static void capture_begin(void)
{
    CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal)); /* the strictest */
}
static recorded capture_end(void)
{
    recorded r;
    memset(&r, 0, sizeof r);
    CHECK_CUDA(cudaStreamEndCapture(stream, &r.graph));
    CHECK_CUDA(cudaGraphInstantiate(&r.exec, r.graph, 0));
    return r;
}
static void recorded_destroy(recorded r)
{
    CHECK_CUDA(cudaGraphExecDestroy(r.exec));
    CHECK_CUDA(cudaGraphDestroy(r.graph));
}

/* More kernels than the launch queue is checked for; what the scratch holds stays where it was recorded. */
static void test_capture(void)
{
    host_begin();
    CHECK(join_stream(stream) == DTRAIN_OK);
    CHECK(!gpu->ops->capturing(gpu) && sum_of(a, b) == DTRAIN_OK);
    host_copy(a, ones);
    capture_begin();
    CHECK(gpu->ops->capturing(gpu));
    host_copy(b, a);
    for (int i = 0; i < 300; i++) CHECK(add_one(a) == DTRAIN_OK);
    CHECK(sum_of(b, b) == DTRAIN_OK);
    const recorded r = capture_end();
    CHECK(!gpu->ops->capturing(gpu) && all_are(a, 1)); /* recorded, not run */
    float *big = (float *)gpu_take(1000 * 2000 * sizeof(float), 0);
    dtrain_activation_backward_args columns = {
        DTRAIN_ACTIVATION_NONE, false, 1000, 2000, NULL, big, big, b + 1, DTRAIN_DTYPE_F32};
#ifdef DTRAIN_CUDA_EMULATION
    dtrain_emulation_counters before, after;
    dtrain_emulation_get_counters(&before);
#endif
    CHECK(gpu->ops->activation_backward(gpu, &columns) == DTRAIN_OK); /* it needs more scratch */
#ifdef DTRAIN_CUDA_EMULATION
    dtrain_emulation_get_counters(&after);
    CHECK(after.allocations_alive == before.allocations_alive + 1); /* the old one is kept */
#endif
    for (int i = 1; i <= 3; i++) {
        float total = 0;
        CHECK_CUDA(cudaGraphLaunch(r.exec, stream));
        CHECK_CUDA(cudaMemcpyAsync(&total, b, sizeof total, cudaMemcpyDeviceToHost, stream));
        CHECK(all_are(a, 1 + 300.0f * (float)i));
        CHECK_MSG(total == COUNT * (1 + 300.0f * (float)(i - 1)), "launch %d: %g", i, total);
    }
    recorded_destroy(r);
    gpu_close();
    host_end();
}

/* What cannot be recorded is refused, and the host's capture continues as if it had not been asked for. */
static void test_refused_in_capture(void)
{
    dtrain_event *event;
    dtrain_graph *graph;
    void *memory;
    bool done;
    float host[4] = {0};
    host_begin();
    CHECK(join_stream(stream) == DTRAIN_OK);
    void *freed = NULL;
    CHECK(gpu->ops->alloc(gpu, 64, &freed) == DTRAIN_OK);
    CHECK(gpu->ops->event_create(gpu, &event) == DTRAIN_OK);
    capture_begin();
    CHECK(add_one(a) == DTRAIN_OK);
    CHECK(gpu->ops->synchronize(gpu) == DTRAIN_ERROR_UNSUPPORTED);
    CHECK_SAYS("Run the step once before");
    CHECK(gpu->ops->alloc(gpu, 64, &memory) == DTRAIN_ERROR_UNSUPPORTED && !memory);
    CHECK(gpu->ops->host_alloc(gpu, 64, &memory) == DTRAIN_ERROR_UNSUPPORTED && !memory);
    CHECK(gpu->ops->host_register(gpu, host, sizeof host) == DTRAIN_ERROR_UNSUPPORTED);
    CHECK(dtrain_device_copy(gpu, a, host, sizeof host) == DTRAIN_ERROR_UNSUPPORTED);
    CHECK(dtrain_device_copy(gpu, host, a, sizeof host) == DTRAIN_ERROR_UNSUPPORTED);
    CHECK(gpu->ops->event_query(gpu, event, &done) == DTRAIN_ERROR_UNSUPPORTED && !done);
    CHECK(gpu->ops->graph_begin(gpu) == DTRAIN_ERROR_UNSUPPORTED);
    CHECK(gpu->ops->graph_end(gpu, &graph) == DTRAIN_ERROR_USAGE && !graph);
    CHECK(sum_of(a, b) == DTRAIN_ERROR_UNSUPPORTED); /* it has no scratch yet */
    gpu->ops->graphs_drop(gpu);                      /* ours; the host's capture is none of them */
    CHECK(!gpu->ops->may_free(gpu));
    CHECK(add_one(a) == DTRAIN_OK);
    const recorded r = capture_end();
    CHECK_CUDA(cudaGraphLaunch(r.exec, stream));
    CHECK(all_are(a, 2) && gpu->ops->may_free(gpu));
    recorded_destroy(r);
    gpu->ops->event_destroy(gpu, event);
    gpu->ops->free(gpu, freed, 64);
    gpu_close();
    capture_begin();
    CHECK(join_stream(stream) == DTRAIN_ERROR_UNSUPPORTED && !gpu);
    CHECK_SAYS("joining with a stream is not possible while a graph is captured");
    recorded_destroy(capture_end());
    host_end();
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    RUN(test_refused);
    if (gpu_missing()) {
        SKIP(test_cuda_guest, gpu_missing());
        return test_summary();
    }
    RUN(test_order);
    RUN(test_default_stream);
    RUN(test_capture);
    RUN(test_refused_in_capture);
#ifdef DTRAIN_CUDA_EMULATION
    RUN(test_current_device);
    RUN(test_last_error);
#endif
    return test_summary();
}
