/* Tests of device.cuh: the CUDA device's memory, streams, events, graphs, faults and
 * errors, through the public table. */
#include "test.h"
#include "dtrain.h"
#include "allocator.h"
#include "cuda_testing.h"

static bool says(const char *words) { return strstr(dtrain_last_error(), words) != NULL; }
#define CHECK_SAYS(words) CHECK_MSG(says(words), "\"%s\" is not in: %s", words, dtrain_last_error())

/* y += 1 on the compute stream: work that takes its time. */
static dtrain_result add_one(float *y, int64_t count)
{
    dtrain_axpby_args args = {count, true, 1, 1, NULL, y, false, DTRAIN_DTYPE_F32, NULL};
    return gpu->ops->axpby(gpu, &args);
}

static dtrain_result sum_of(const float *x, int64_t count, float *out)
{
    dtrain_sum_args args = {count, false, false, 1, x, NULL, out, DTRAIN_DTYPE_F32, NULL};
    return gpu->ops->sum(gpu, &args);
}

static float *zeros(int64_t count)
{
    float *memory = (float *)gpu_take((size_t)count * sizeof(float), 0);
    CHECK(gpu->ops->zero(gpu, memory, (size_t)count * sizeof(float)) == DTRAIN_OK);
    return memory;
}

static bool all_are(const void *device, int64_t count, float value)
{
    float *host = (float *)malloc((size_t)count * sizeof(float));
    bool good = true;
    gpu_read(host, device, (size_t)count * sizeof(float));
    for (int64_t i = 0; i < count; i++) good = good && host[i] == value;
    free(host);
    return good;
}

/* ---- Create, query ---- */

static void test_query(void)
{
    dtrain_device_info info, again;
    gpu_open();
    CHECK(strcmp(gpu->ops->name, "cuda") == 0 && !gpu->ops->host_memory);
    CHECK(gpu->ops->query(gpu, &info) == DTRAIN_OK);
    CHECK(strlen(info.name) > 0 && strlen(info.id) == 36 && strncmp(info.id, "GPU-", 4) == 0);
    CHECK(info.count >= 1 && info.index == 0 && info.major >= 7);
    CHECK_MSG(info.code_version >= 75, "code_version is %u", info.code_version);
    CHECK(info.memory_bytes > 0 && info.free_bytes > 0 && info.free_bytes <= info.memory_bytes);
    zeros(1 << 20);
    CHECK(gpu->ops->query(gpu, &again) == DTRAIN_OK);
    CHECK(again.free_bytes <= info.free_bytes && strcmp(again.id, info.id) == 0);
    gpu_close();
}

static void test_math(void)
{
    dtrain_device_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.math = 7;
    CHECK(dtrain_device_create(dtrain_cuda_device_ops(), &desc, &gpu) == DTRAIN_ERROR_ARGUMENT);
    CHECK_SAYS("dtrain_math");
    desc.math = DTRAIN_MATH_BF16;
    desc.oversubscribed = true;
    CHECK(dtrain_device_create(dtrain_cuda_device_ops(), &desc, &gpu) == DTRAIN_OK);
    CHECK(gpu->ops->synchronize(gpu) == DTRAIN_OK);
    gpu_close();
}

static void test_allocator(void)
{
    dtrain_device_desc desc;
    dtrain_stream *stream, *left;
    counted_memory memory;
    memset(&desc, 0, sizeof desc);
    memset(&memory, 0, sizeof memory);
    desc.allocator = counted_allocator(&memory);
    for (long n = 1; n <= 2; n++) {
        memory.fail_at = memory.calls + n;
        CHECK(dtrain_device_create(dtrain_cuda_device_ops(), &desc, &gpu) == DTRAIN_ERROR_MEMORY);
        CHECK(gpu == NULL && memory.live == 0 && memory.wrong == 0);
    }
    memory.fail_at = 0;
    CHECK(dtrain_device_create(dtrain_cuda_device_ops(), &desc, &gpu) == DTRAIN_OK);
    CHECK(memory.live > 0);
    memory.fail_at = memory.calls + 1;
    CHECK(gpu->ops->stream_create(gpu, false, &stream) == DTRAIN_ERROR_MEMORY && !stream);
    CHECK(gpu->ops->stream_create(gpu, false, &stream) == DTRAIN_OK);
    CHECK(gpu->ops->stream_create(gpu, false, &left) == DTRAIN_OK);
    gpu->ops->stream_destroy(gpu, stream);
    gpu_close(); /* and the stream that was left */
    CHECK(memory.live == 0 && memory.wrong == 0);
}

#ifdef DTRAIN_CUDA_EMULATION
static dtrain_emulation_counters counters(void)
{
    dtrain_emulation_counters c;
    dtrain_emulation_get_counters(&c);
    return c;
}

static bool nothing_alive(void)
{
    const dtrain_emulation_counters c = counters();
    return c.allocations_alive == 0 && c.bytes_alive == 0 && c.pinned_alive == 0 &&
           c.streams_alive == 0 && c.events_alive == 0 && c.graphs_alive == 0 &&
           c.cublas_alive == 0;
}

static dtrain_result try_create(uint32_t index)
{
    dtrain_device_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.device_index = index;
    gpu = NULL;
    return dtrain_device_create(dtrain_cuda_device_ops(), &desc, &gpu);
}

static void test_create_fails(void)
{
    dtrain_emulation_set_quiet(1);
    dtrain_emulation_inject(DTRAIN_EMULATION_NO_DRIVER, 1);
    CHECK(try_create(0) == DTRAIN_ERROR_UNSUPPORTED);
    CHECK_SAYS("no NVIDIA driver");
    dtrain_emulation_reset();
    dtrain_emulation_set_device_count(0);
    CHECK(try_create(0) == DTRAIN_ERROR_UNSUPPORTED);
    CHECK_SAYS("no GPU is visible");
    dtrain_emulation_reset();
    dtrain_emulation_inject(DTRAIN_EMULATION_NO_KERNEL_IMAGE, 1);
    CHECK(try_create(0) == DTRAIN_ERROR_UNSUPPORTED);
    CHECK_SAYS("-arch=native");
    CHECK(nothing_alive());
    dtrain_emulation_reset();
    dtrain_emulation_inject(DTRAIN_EMULATION_LOSE_DEVICE, 1);
    CHECK(try_create(0) == DTRAIN_ERROR_SYSTEM);
    CHECK_SAYS("lost");
    dtrain_emulation_reset();
    CHECK(try_create(0) == DTRAIN_OK);
    gpu_close();
}

static void test_create_without_memory(void)
{
    int64_t n = 0;
    dtrain_result result = DTRAIN_ERROR_MEMORY;
    for (n = 1; n < 20 && result == DTRAIN_ERROR_MEMORY; n++) {
        dtrain_emulation_inject(DTRAIN_EMULATION_FAIL_ALLOCATION, n);
        result = try_create(0);
        if (result != DTRAIN_OK) {
            CHECK_SAYS("full");
            CHECK(nothing_alive());
        }
    }
    CHECK(n > 3 && result == DTRAIN_OK);
    dtrain_emulation_inject(DTRAIN_EMULATION_FAIL_ALLOCATION, 0);
    gpu_close();
    CHECK(nothing_alive());
    dtrain_emulation_set_memory_left(1 << 20); /* no room for the workspace of cublasLt */
    CHECK(try_create(0) == DTRAIN_ERROR_MEMORY);
    CHECK(nothing_alive());
}

static void test_device_index(void)
{
    dtrain_device_info info, other;
    dtrain_emulation_set_device_count(3);
    CHECK(try_create(4) == DTRAIN_OK);
    CHECK(gpu->ops->query(gpu, &info) == DTRAIN_OK && info.index == 1 && info.count == 3);
    gpu_close();
    CHECK(try_create(2) == DTRAIN_OK);
    CHECK(gpu->ops->query(gpu, &other) == DTRAIN_OK && other.index == 2);
    CHECK(strcmp(info.id, other.id) != 0);
    gpu_close();
}

static void test_workspace(void)
{
    const int64_t mib = 1 << 20;
    CHECK(try_create(0) == DTRAIN_OK);
    CHECK(counters().bytes_alive >= 32 * mib && counters().bytes_alive < 33 * mib);
    gpu_close();
    dtrain_emulation_set_capability(8, 0);
    CHECK(try_create(0) == DTRAIN_OK);
    CHECK(counters().bytes_alive >= 4 * mib && counters().bytes_alive < 5 * mib);
    gpu_close();
    CHECK(nothing_alive());
}
#endif

/* ---- Memory ---- */

static void test_accounting(void)
{
    void *a, *b, *nothing;
    gpu_open();
    CHECK(gpu->ops->alloc(gpu, 1000, &a) == DTRAIN_OK && a);
    CHECK(gpu->ops->alloc(gpu, 0, &nothing) == DTRAIN_OK && nothing);
    CHECK(gpu->ops->alloc(gpu, 24, &b) == DTRAIN_OK && b);
    CHECK(((uintptr_t)a & 255) == 0 && ((uintptr_t)b & 255) == 0);
    CHECK(gpu->allocated_bytes == 1024 && gpu->peak_bytes == 1024);
    gpu->ops->free(gpu, a, 1000);
    gpu->ops->free(gpu, NULL, 50);
    CHECK(gpu->allocated_bytes == 24 && gpu->peak_bytes == 1024);
    gpu->ops->free(gpu, nothing, 0);
    gpu->ops->free(gpu, b, 24);
    gpu_close();
#ifdef DTRAIN_CUDA_EMULATION
    CHECK(nothing_alive());
#endif
}

static void test_out_of_memory(void)
{
    void *memory;
    dtrain_device_info info;
    char free_text[32];
    gpu_open();
    zeros(256);
    CHECK(gpu->ops->alloc(gpu, (size_t)1 << 50, &memory) == DTRAIN_ERROR_MEMORY && !memory);
    CHECK(gpu->ops->query(gpu, &info) == DTRAIN_OK);
    snprintf(free_text, sizeof free_text, " of %llu are free",
             (unsigned long long)info.memory_bytes);
    CHECK_SAYS("1125899906842624 bytes");
    CHECK_SAYS("dtrain holds 1024,");
    CHECK_SAYS(free_text);
    CHECK(gpu->allocated_bytes == 1024);
    CHECK(gpu->ops->alloc(gpu, 8, &memory) == DTRAIN_OK); /* the error is forgotten */
    gpu->ops->free(gpu, memory, 8);
    gpu_close();
}

/* copy is finished when it returns, from and to page-locked memory as well. */
static void check_pinned_copy(void)
{
    void *pinned;
    CHECK(gpu->ops->host_alloc(gpu, 4000, &pinned) == DTRAIN_OK);
    float *host = (float *)pinned, *memory = zeros(1000);
    for (int i = 0; i < 1000; i++) host[i] = 3;
    gpu_write(memory, host, 4000);
    for (int i = 0; i < 1000; i++) host[i] = 4;
    CHECK(all_are(memory, 1000, 3));
    gpu_read(host, memory, 4000);
    CHECK(host[0] == 3 && host[999] == 3);
    gpu->ops->host_free(gpu, pinned, 4000);
}

static void test_copies(void)
{
    const size_t sizes[] = {1, 3, 4096, 1000003};
    gpu_open();
    EACH(s, sizes)
    {
        unsigned char *host = (unsigned char *)malloc(sizes[s] * 2), *back = host + sizes[s];
        unsigned char *a = (unsigned char *)gpu_take(sizes[s], 0);
        unsigned char *b = (unsigned char *)gpu_take(sizes[s], 1);
        bool good = true, zero = true;
        for (size_t i = 0; i < sizes[s]; i++) host[i] = (unsigned char)(i * 7 + 1);
        gpu_write(a, host, sizes[s]);
        memset(host, 0, sizes[s]); /* it has been read */
        CHECK(gpu->ops->copy(gpu, b, a, sizes[s], DTRAIN_COPY_DEVICE_TO_DEVICE) == DTRAIN_OK);
        CHECK(gpu->ops->zero(gpu, a, sizes[s]) == DTRAIN_OK);
        gpu_read(back, b, sizes[s]);
        for (size_t i = 0; i < sizes[s]; i++) good = good && back[i] == (unsigned char)(i * 7 + 1);
        gpu_read(back, a, sizes[s]);
        for (size_t i = 0; i < sizes[s]; i++) zero = zero && back[i] == 0;
        CHECK(good);
        CHECK(zero);
        free(host);
        gpu_release();
    }
    check_pinned_copy();
    CHECK(gpu->ops->copy(gpu, NULL, NULL, 0, DTRAIN_COPY_HOST_TO_DEVICE) == DTRAIN_OK);
    CHECK(gpu->ops->zero(gpu, NULL, 0) == DTRAIN_OK);
    gpu_close();
}

static void test_bad_copies(void)
{
    float host[4] = {1, 2, 3, 4}, *memory;
    gpu_open();
    memory = zeros(4);
    CHECK(gpu->ops->copy(gpu, memory, host, 16, (dtrain_copy_kind)0) == DTRAIN_ERROR_ARGUMENT);
    CHECK(gpu->ops->copy_async(gpu, memory, host, 16, (dtrain_copy_kind)0, NULL) ==
          DTRAIN_ERROR_ARGUMENT);
#ifdef DTRAIN_CUDA_EMULATION
    dtrain_emulation_set_quiet(1);
    CHECK(gpu->ops->copy(gpu, memory, host, 17, DTRAIN_COPY_HOST_TO_DEVICE) ==
          DTRAIN_ERROR_ARGUMENT);
    CHECK(gpu->ops->copy(gpu, host, memory, 16, DTRAIN_COPY_HOST_TO_DEVICE) ==
          DTRAIN_ERROR_ARGUMENT);
#endif
    CHECK(gpu->ops->synchronize(gpu) == DTRAIN_OK); /* nothing stays behind */
    CHECK(all_are(memory, 4, 0));
    gpu_close();
}

static void test_is_device_memory(void)
{
    float host = 0, *memory;
    void *pinned;
    gpu_open();
    memory = zeros(100);
    CHECK(gpu->ops->host_alloc(gpu, 100, &pinned) == DTRAIN_OK);
    CHECK(gpu->ops->is_device_memory(gpu, memory) && gpu->ops->is_device_memory(gpu, memory + 50));
    CHECK(!gpu->ops->is_device_memory(gpu, &host) && !gpu->ops->is_device_memory(gpu, pinned));
    CHECK(gpu->ops->synchronize(gpu) == DTRAIN_OK);
    gpu->ops->host_free(gpu, pinned, 100);
    gpu_close();
}

/* ---- Streams, events ---- */

enum { LONG = 200000 };

/* Kernels, then a copy out on a side stream that waits for them, through page-locked memory. */
static void check_async(float *pinned, bool high_priority)
{
    dtrain_stream *side;
    dtrain_event *ready, *copied;
    bool done = false, good = true;
    float *memory = zeros(LONG);
    CHECK(gpu->ops->stream_create(gpu, high_priority, &side) == DTRAIN_OK);
    CHECK(gpu->ops->event_create(gpu, &ready) == DTRAIN_OK);
    CHECK(gpu->ops->event_create(gpu, &copied) == DTRAIN_OK);
    CHECK(gpu->ops->stream_native(gpu, side) != gpu->ops->stream_native(gpu, NULL));
    CHECK(gpu->ops->synchronize(gpu) == DTRAIN_OK); /* zero is on another stream */
    for (int i = 0; i < LONG; i++) pinned[i] = 5;
    CHECK(gpu->ops->copy_async(gpu, memory, pinned, LONG * sizeof(float),
                               DTRAIN_COPY_HOST_TO_DEVICE, side) == DTRAIN_OK);
    CHECK(gpu->ops->event_record(gpu, copied, side) == DTRAIN_OK);
    CHECK(gpu->ops->event_wait(gpu, copied, NULL) == DTRAIN_OK);
    CHECK(add_one(memory, LONG) == DTRAIN_OK && add_one(memory, LONG) == DTRAIN_OK);
    CHECK(gpu->ops->event_record(gpu, ready, NULL) == DTRAIN_OK);
    CHECK(gpu->ops->event_wait(gpu, ready, side) == DTRAIN_OK);
    CHECK(gpu->ops->copy_async(gpu, pinned, memory, LONG * sizeof(float),
                               DTRAIN_COPY_DEVICE_TO_HOST, side) == DTRAIN_OK);
    CHECK(gpu->ops->event_record(gpu, copied, side) == DTRAIN_OK);
#ifdef DTRAIN_CUDA_EMULATION
    CHECK(pinned[0] == 5); /* it was only queued */
    CHECK(gpu->ops->event_query(gpu, copied, &done) == DTRAIN_OK && !done);
#endif
    CHECK(gpu->ops->synchronize(gpu) == DTRAIN_OK); /* of the side stream too */
    for (int i = 0; i < LONG; i++) good = good && pinned[i] == 7;
    CHECK(good);
    CHECK(gpu->ops->event_query(gpu, copied, &done) == DTRAIN_OK && done);
    gpu->ops->event_destroy(gpu, ready);
    gpu->ops->event_destroy(gpu, copied);
    gpu->ops->stream_destroy(gpu, side);
    gpu->ops->event_destroy(gpu, NULL);
    gpu->ops->stream_destroy(gpu, NULL);
}

static void test_async(void)
{
    void *pinned, *pages;
    gpu_open();
    CHECK(gpu->ops->host_alloc(gpu, LONG * sizeof(float), &pinned) == DTRAIN_OK);
    check_async((float *)pinned, false);
    check_async((float *)pinned, true);
    gpu->ops->host_free(gpu, pinned, LONG * sizeof(float));
    gpu->ops->host_free(gpu, NULL, 0);
    if (posix_memalign(&pages, 4096, LONG * sizeof(float)) != 0) exit(1);
    CHECK(gpu->ops->copy_async(gpu, zeros(4), pages, 16, DTRAIN_COPY_HOST_TO_DEVICE, NULL) ==
          DTRAIN_ERROR_ARGUMENT);
    CHECK_SAYS("not page-locked");
    CHECK(gpu->ops->host_register(gpu, pages, LONG * sizeof(float)) == DTRAIN_OK);
    check_async((float *)pages, false);
    CHECK(gpu->ops->host_register(gpu, pages, LONG * sizeof(float)) != DTRAIN_OK);
    gpu->ops->host_unregister(gpu, pages);
    gpu->ops->host_unregister(gpu, NULL);
    CHECK(gpu->ops->copy_async(gpu, zeros(4), pages, 16, DTRAIN_COPY_HOST_TO_DEVICE, NULL) ==
          DTRAIN_ERROR_ARGUMENT);
    free(pages);
    CHECK(gpu->ops->host_alloc(gpu, 0, &pinned) == DTRAIN_OK && pinned);
    gpu->ops->host_free(gpu, pinned, 0);
    gpu_close();
#ifdef DTRAIN_CUDA_EMULATION
    CHECK(nothing_alive());
#endif
}

static void test_copy_waits(void)
{
    float *memory, host[2] = {0, 0};
    gpu_open();
    memory = zeros(LONG);
    for (int i = 0; i < 5; i++) CHECK(add_one(memory, LONG) == DTRAIN_OK);
    gpu_read(host, memory + LONG - 2, sizeof host);
    CHECK(host[0] == 5 && host[1] == 5);
    CHECK(add_one(memory, LONG) == DTRAIN_OK);
    host[0] = host[1] = 40;
    gpu_write(memory, host, sizeof host); /* after the kernels that came before */
    CHECK(add_one(memory, LONG) == DTRAIN_OK);
    gpu_read(host, memory, sizeof host);
    CHECK(host[0] == 41 && host[1] == 41);
    gpu_close();
}

static void test_events(void)
{
    dtrain_event *begin, *end, *plain;
    gpu_open();
    float *memory = zeros(LONG);
    CHECK(gpu->ops->event_create(gpu, &begin) == DTRAIN_OK);
    CHECK(gpu->ops->event_create(gpu, &end) == DTRAIN_OK);
    CHECK(gpu->ops->event_create(gpu, &plain) == DTRAIN_OK);
    CHECK(gpu->ops->event_record(gpu, begin, NULL) == DTRAIN_OK);
    CHECK(add_one(memory, LONG) == DTRAIN_OK);
    CHECK(gpu->ops->event_record(gpu, end, NULL) == DTRAIN_OK);
    CHECK(gpu->ops->event_record(gpu, plain, NULL) == DTRAIN_OK);
    CHECK(gpu->ops->synchronize(gpu) == DTRAIN_OK);
    CHECK(gpu->ops->event_record(gpu, NULL, NULL) == DTRAIN_ERROR_ARGUMENT);
    CHECK(gpu->ops->event_wait(gpu, NULL, NULL) == DTRAIN_ERROR_ARGUMENT);
    gpu->ops->event_destroy(gpu, begin);
    gpu->ops->event_destroy(gpu, end);
    gpu->ops->event_destroy(gpu, plain);
    CHECK(gpu->ops->synchronize(gpu) == DTRAIN_OK);
    gpu_close();
}

/* ---- Waiting ---- */

static int waiting_calls, waiting_fails;
static dtrain_result while_waiting(void *user)
{
    waiting_calls++;
    CHECK(user == &waiting_calls);
    return waiting_fails ? dtrain_fail(DTRAIN_ERROR_PEER, "rank 3 is gone") : DTRAIN_OK;
}

static void test_while_waiting(void)
{
    float *memory, host;
    gpu_open();
    memory = zeros(LONG);
    gpu->while_waiting = while_waiting;
    gpu->waiting_user = &waiting_calls;
    for (int i = 0; i < 100; i++) CHECK(add_one(memory, LONG) == DTRAIN_OK);
    CHECK(gpu->ops->synchronize(gpu) == DTRAIN_OK && waiting_calls > 0);
    waiting_calls = 0;
    for (int i = 0; i < 100; i++) CHECK(add_one(memory, LONG) == DTRAIN_OK);
    gpu_read(&host, memory, sizeof host);
    CHECK(host == 200 && waiting_calls > 0);
    waiting_fails = 1;
    for (int i = 0; i < 100; i++) CHECK(add_one(memory, LONG) == DTRAIN_OK);
    CHECK(gpu->ops->synchronize(gpu) == DTRAIN_ERROR_PEER);
    CHECK_SAYS("rank 3 is gone");
    gpu->while_waiting = NULL;
    gpu_read(&host, memory, sizeof host); /* a wait that was given up can be taken up again */
    CHECK(host == 300);
    gpu_close();
}

#ifdef DTRAIN_CUDA_EMULATION
/* Work that does not end: free and destroy do not wait for it for ever, and leave the memory. */
static bool ended;
static bool has_ended(void *state)
{
    (void)state;
    return ended;
}

static void test_stuck(void)
{
    float *memory;
    void *pinned;
    gpu_open();
    memory = zeros(LONG);
    CHECK(gpu->ops->host_alloc(gpu, 64, &pinned) == DTRAIN_OK);
    CHECK(gpu->ops->synchronize(gpu) == DTRAIN_OK);
    gpu->while_waiting = while_waiting;
    gpu->waiting_user = &waiting_calls;
    waiting_fails = 1;
    CHECK(dtrain_emulation_enqueue_step((cudaStream_t)gpu->ops->stream_native(gpu, NULL), has_ended,
                                        NULL, 0));
    CHECK(add_one(memory, LONG) == DTRAIN_OK);
    const double start = dtrain_seconds();
    gpu_release();
    CHECK(gpu->allocated_bytes == 0 && counters().bytes_alive > LONG * (int64_t)sizeof(float));
    gpu->ops->host_free(gpu, pinned, 64);
    CHECK(counters().pinned_alive == 2);
    CHECK(dtrain_seconds() - start < 10); /* the grace is given once */
    ended = true;
    gpu_close();
    CHECK(counters().streams_alive == 0 && counters().pinned_alive == 1);
}
#endif

/* ---- Graphs ---- */

static void test_graph(void)
{
    dtrain_graph *graph;
    float *a, *b, *total;
    gpu_open();
    a = zeros(1000);
    b = zeros(1000);
    total = zeros(1);
    CHECK(add_one(a, 1000) == DTRAIN_OK && sum_of(b, 1000, total) == DTRAIN_OK);
    CHECK(gpu->ops->graph_begin(gpu) == DTRAIN_OK);
    CHECK(gpu->ops->zero(gpu, b, 1000 * sizeof(float)) == DTRAIN_OK);
    CHECK(add_one(a, 1000) == DTRAIN_OK);
    CHECK(gpu->ops->copy(gpu, b, a, 500 * sizeof(float), DTRAIN_COPY_DEVICE_TO_DEVICE) ==
          DTRAIN_OK);
    CHECK(sum_of(b, 1000, total) == DTRAIN_OK);
    CHECK(gpu->ops->graph_end(gpu, &graph) == DTRAIN_OK && graph);
    CHECK(all_are(a, 1000, 1) && all_are(total, 1, 0)); /* recorded, not run */
    for (int i = 1; i <= 3; i++) {
        CHECK(gpu->ops->graph_launch(gpu, graph) == DTRAIN_OK);
        CHECK(all_are(total, 1, 500 * (1 + (float)i)) && all_are(a, 1000, 1 + (float)i));
        CHECK(all_are(b, 500, 1 + (float)i) && all_are(b + 500, 500, 0));
    }
    gpu->ops->graph_destroy(gpu, graph);
    gpu->ops->graph_destroy(gpu, NULL);
    gpu_close();
#ifdef DTRAIN_CUDA_EMULATION
    CHECK(nothing_alive());
#endif
}

/* A side stream that waits for an event of the captured one is recorded with it. */
static void test_graph_of_two_streams(void)
{
    dtrain_graph *graph;
    dtrain_stream *side;
    dtrain_event *fork, *join;
    float *a, *b;
    gpu_open();
    a = zeros(1000);
    b = zeros(1000);
    CHECK(gpu->ops->stream_create(gpu, true, &side) == DTRAIN_OK);
    CHECK(gpu->ops->event_create(gpu, &fork) == DTRAIN_OK);
    CHECK(gpu->ops->event_create(gpu, &join) == DTRAIN_OK);
    CHECK(gpu->ops->graph_begin(gpu) == DTRAIN_OK);
    CHECK(add_one(a, 1000) == DTRAIN_OK);
    CHECK(gpu->ops->event_record(gpu, fork, NULL) == DTRAIN_OK);
    CHECK(gpu->ops->event_wait(gpu, fork, side) == DTRAIN_OK);
    CHECK(gpu->ops->copy_async(gpu, b, a, 4000, DTRAIN_COPY_DEVICE_TO_DEVICE, side) == DTRAIN_OK);
    CHECK(gpu->ops->event_record(gpu, join, side) == DTRAIN_OK);
    CHECK(gpu->ops->event_wait(gpu, join, NULL) == DTRAIN_OK);
    CHECK(add_one(b, 1000) == DTRAIN_OK);
    CHECK(gpu->ops->graph_end(gpu, &graph) == DTRAIN_OK);
    for (int i = 1; i <= 2; i++) CHECK(gpu->ops->graph_launch(gpu, graph) == DTRAIN_OK);
    CHECK(all_are(a, 1000, 2) && all_are(b, 1000, 3));
    gpu->ops->graph_destroy(gpu, graph);
    gpu->ops->event_destroy(gpu, fork);
    gpu->ops->event_destroy(gpu, join);
    gpu->ops->stream_destroy(gpu, side);
    gpu_close();
}

/* What cannot be recorded is refused with a sentence, and the capture goes on. */
static void test_refused_in_graph(void)
{
    dtrain_graph *graph;
    void *memory;
    float *a, host[4] = {0}, *out;
    gpu_open();
    a = zeros(1000);
    out = zeros(1);
    CHECK(gpu->ops->graph_end(gpu, &graph) == DTRAIN_ERROR_USAGE && !graph);
    CHECK(gpu->ops->graph_begin(gpu) == DTRAIN_OK);
    CHECK(gpu->ops->synchronize(gpu) == DTRAIN_ERROR_UNSUPPORTED);
    CHECK_SAYS("while a graph is captured");
    CHECK(gpu->ops->alloc(gpu, 64, &memory) == DTRAIN_ERROR_UNSUPPORTED && !memory);
    CHECK(gpu->ops->host_alloc(gpu, 64, &memory) == DTRAIN_ERROR_UNSUPPORTED && !memory);
    CHECK(gpu->ops->host_register(gpu, host, sizeof host) == DTRAIN_ERROR_UNSUPPORTED);
    CHECK(gpu->ops->copy(gpu, a, host, sizeof host, DTRAIN_COPY_HOST_TO_DEVICE) ==
          DTRAIN_ERROR_UNSUPPORTED);
    CHECK(gpu->ops->copy(gpu, host, a, sizeof host, DTRAIN_COPY_DEVICE_TO_HOST) ==
          DTRAIN_ERROR_UNSUPPORTED);
    CHECK(gpu->ops->graph_begin(gpu) == DTRAIN_ERROR_UNSUPPORTED);
    CHECK(sum_of(a, 1000, out) == DTRAIN_ERROR_UNSUPPORTED); /* it has no scratch yet */
    CHECK_SAYS("run the step once before");
    CHECK(add_one(a, 1000) == DTRAIN_OK);
    CHECK(gpu->ops->graph_end(gpu, &graph) == DTRAIN_OK);
    CHECK(gpu->ops->graph_launch(gpu, graph) == DTRAIN_OK);
    CHECK(all_are(a, 1000, 1));
    CHECK(gpu->ops->graph_begin(gpu) == DTRAIN_OK);
    CHECK(gpu->ops->graph_launch(gpu, graph) == DTRAIN_ERROR_UNSUPPORTED);
    gpu->ops->graph_destroy(gpu, graph);
    CHECK(gpu->ops->graph_end(gpu, &graph) == DTRAIN_OK); /* an empty one */
    CHECK(gpu->ops->graph_launch(gpu, graph) == DTRAIN_OK);
    gpu->ops->graph_destroy(gpu, graph);
    gpu_close();
}

/* A side stream that is not joined again makes graph_end an error, and the device usable after. */
static void test_unjoined_graph(void)
{
    dtrain_graph *graph;
    dtrain_stream *side;
    dtrain_event *fork;
    float *a, *b;
    gpu_open();
#ifdef DTRAIN_CUDA_EMULATION
    dtrain_emulation_set_quiet(1);
#endif
    a = zeros(1000);
    b = zeros(1000);
    CHECK(gpu->ops->stream_create(gpu, false, &side) == DTRAIN_OK);
    CHECK(gpu->ops->event_create(gpu, &fork) == DTRAIN_OK);
    CHECK(gpu->ops->graph_begin(gpu) == DTRAIN_OK);
    CHECK(gpu->ops->event_record(gpu, fork, NULL) == DTRAIN_OK);
    CHECK(gpu->ops->event_wait(gpu, fork, side) == DTRAIN_OK);
    CHECK(gpu->ops->copy_async(gpu, b, a, 4000, DTRAIN_COPY_DEVICE_TO_DEVICE, side) == DTRAIN_OK);
    CHECK(gpu->ops->graph_end(gpu, &graph) == DTRAIN_ERROR_USAGE && !graph);
    CHECK_SAYS("graph_end");
    CHECK(add_one(a, 1000) == DTRAIN_OK && all_are(a, 1000, 1));
    gpu->ops->event_destroy(gpu, fork);
    gpu->ops->stream_destroy(gpu, side);
    CHECK(gpu->ops->graph_begin(gpu) == DTRAIN_OK);
    gpu_release(); /* in the middle of a capture, as after an error */
    CHECK(gpu->ops->graph_end(gpu, &graph) == DTRAIN_ERROR_USAGE && !graph);
    CHECK_SAYS("memory was freed");
    CHECK(gpu->ops->graph_begin(gpu) == DTRAIN_OK);
    gpu_close();
#ifdef DTRAIN_CUDA_EMULATION
    CHECK(nothing_alive());
#endif
}

/* Dropped: a recording under way and all graphs, also one that runs. The handles are there to be destroyed,
 * here or with the device. */
static void test_graphs_drop(void)
{
    dtrain_graph *graph, *left;
    gpu_open();
    float *a = zeros(1000);
    for (int i = 0; i < 2; i++) {
        CHECK(gpu->ops->graph_begin(gpu) == DTRAIN_OK);
        CHECK(add_one(a, 1000) == DTRAIN_OK);
        CHECK(gpu->ops->graph_end(gpu, i ? &left : &graph) == DTRAIN_OK);
    }
    CHECK(gpu->ops->graph_launch(gpu, graph) == DTRAIN_OK);
    CHECK(gpu->ops->graph_begin(gpu) == DTRAIN_OK);
    gpu->ops->graphs_drop(gpu);
    CHECK(gpu->ops->graph_launch(gpu, graph) == DTRAIN_ERROR_USAGE);
    CHECK_SAYS("was dropped");
    CHECK(gpu->ops->graph_launch(gpu, left) == DTRAIN_ERROR_USAGE);
    gpu->ops->graph_destroy(gpu, graph);
    CHECK(gpu->ops->graph_end(gpu, &graph) == DTRAIN_ERROR_USAGE && !graph);
    CHECK(gpu->ops->may_free(gpu) && all_are(a, 1000, 1));
    CHECK(gpu->ops->graph_begin(gpu) == DTRAIN_OK && add_one(a, 1000) == DTRAIN_OK);
    CHECK(gpu->ops->graph_end(gpu, &graph) == DTRAIN_OK); /* left, like the other */
    gpu_close();
#ifdef DTRAIN_CUDA_EMULATION
    CHECK(nothing_alive());
#endif
}

/* Scratch that a graph was captured with stays where it is when other work needs more. */
static void test_graph_keeps_scratch(void)
{
    const int64_t rows[] = {100, 1000, 1100, 1200, 5000};
    dtrain_activation_backward_args columns = {
        DTRAIN_ACTIVATION_NONE, false, 100, 2000, NULL, NULL, NULL, NULL, DTRAIN_DTYPE_F32};
    dtrain_graph *graph;
    float *a, *big, *out, *many;
    gpu_open();
    a = zeros(1000);
    out = zeros(1);
    big = zeros(5000 * 2000);
    many = zeros(2000);
    columns.d_out = columns.d_in = big;
    columns.d_bias = many;
    CHECK(add_one(a, 1000) == DTRAIN_OK && sum_of(a, 1000, out) == DTRAIN_OK);
    CHECK(gpu->ops->graph_begin(gpu) == DTRAIN_OK);
    CHECK(add_one(a, 1000) == DTRAIN_OK && sum_of(a, 1000, out) == DTRAIN_OK);
    CHECK(gpu->ops->graph_end(gpu, &graph) == DTRAIN_OK);
    CHECK(add_one(big, 5000 * 2000) == DTRAIN_OK);
#ifdef DTRAIN_CUDA_EMULATION
    const int64_t before = counters().allocations_alive;
#endif
    EACH(i, rows)
    {
        columns.rows = rows[i];
        CHECK(gpu->ops->activation_backward(gpu, &columns) == DTRAIN_OK);
        CHECK(gpu->ops->graph_launch(gpu, graph) == DTRAIN_OK);
        CHECK(all_are(many, 2000, (float)rows[i]));
        CHECK(all_are(out, 1, 1000 * (2 + (float)i)));
    }
#ifdef DTRAIN_CUDA_EMULATION
    CHECK(counters().allocations_alive == before + 3); /* 1200 rows had room after 1100 */
#endif
    gpu->ops->graph_destroy(gpu, graph);
    gpu_close();
#ifdef DTRAIN_CUDA_EMULATION
    CHECK(nothing_alive());
#endif
}

#ifdef DTRAIN_CUDA_EMULATION
/* Without graphs the old block goes when a larger one comes; after the first step nothing comes. */
static void test_scratch(void)
{
    float *a, *out;
    int64_t before;
    gpu_open();
    a = zeros(100000);
    out = zeros(1);
    CHECK(sum_of(a, 100000, out) == DTRAIN_OK);
    before = counters().allocations;
    for (int i = 0; i < 10; i++) CHECK(sum_of(a, 100000, out) == DTRAIN_OK);
    CHECK(gpu->ops->synchronize(gpu) == DTRAIN_OK);
    CHECK(counters().allocations == before);
    const int64_t alive = counters().allocations_alive;
    dtrain_activation_backward_args columns = {
        DTRAIN_ACTIVATION_NONE, false, 10, 10000, NULL, NULL, NULL, NULL, DTRAIN_DTYPE_F32};
    columns.d_out = columns.d_in = a;
    columns.d_bias = zeros(10000);
    CHECK(gpu->ops->activation_backward(gpu, &columns) == DTRAIN_OK);
    CHECK(counters().allocations_alive == alive + 1); /* d_bias */
    dtrain_emulation_set_memory_left(1000);
    columns.rows = 1000;
    columns.n = 100;
    CHECK(gpu->ops->activation_backward(gpu, &columns) == DTRAIN_OK); /* has it */
    columns.rows = 65;
    columns.n = 1538;
    CHECK(gpu->ops->activation_backward(gpu, &columns) == DTRAIN_OK);
    columns.rows = 200;
    columns.n = 10000;
    CHECK(gpu->ops->activation_backward(gpu, &columns) == DTRAIN_ERROR_MEMORY);
    CHECK_SAYS("no memory for 160000 bytes");
    dtrain_emulation_set_memory_left(-1);
    CHECK(sum_of(a, 100000, out) == DTRAIN_OK && all_are(out, 1, 0));
    gpu_close();
    CHECK(nothing_alive());
}

/* ---- Errors ---- */

static void test_lost_device(void)
{
    float *memory, host;
    void *more;
    dtrain_stream *side;
    gpu_open();
    dtrain_emulation_set_quiet(1);
    memory = zeros(LONG);
    CHECK(gpu->ops->stream_create(gpu, false, &side) == DTRAIN_OK);
    CHECK(gpu->ops->synchronize(gpu) == DTRAIN_OK);
    dtrain_emulation_inject(DTRAIN_EMULATION_LOSE_DEVICE, 2);
    CHECK(add_one(memory, LONG) == DTRAIN_OK && add_one(memory, LONG) == DTRAIN_OK);
    CHECK(gpu->ops->synchronize(gpu) == DTRAIN_ERROR_SYSTEM);
    CHECK_SAYS("the device is lost (cudaErrorLaunchFailure");
    CHECK_SAYS("started again");
    CHECK(gpu->ops->copy(gpu, &host, memory, 4, DTRAIN_COPY_DEVICE_TO_HOST) == DTRAIN_ERROR_SYSTEM);
    CHECK(gpu->ops->alloc(gpu, 4, &more) == DTRAIN_ERROR_SYSTEM && !more);
    CHECK(add_one(memory, LONG) == DTRAIN_ERROR_SYSTEM);
    CHECK(!gpu->ops->is_device_memory(gpu, &host));
    gpu_close(); /* no crash, no wait */
}
#endif

static void test_faults(void)
{
    const int32_t good[3] = {1, 0, 4}, bad[3] = {1, 7, -2}, targets[2] = {0, 9};
    float host[2] = {0, 0}, *wte, *y, *logits, *loss;
    int32_t *tokens;
    gpu_open();
    tokens = (int32_t *)gpu_give(bad, sizeof bad, 0);
    wte = zeros(5 * 8);
    y = zeros(3 * 8);
    dtrain_embedding_args args = {.rows = 3,
                                  .sequence = 3,
                                  .n = 8,
                                  .vocab = 5,
                                  .tokens = tokens,
                                  .wte = wte,
                                  .y = y,
                                  .dtype = DTRAIN_DTYPE_F32};
    CHECK(gpu->ops->embedding(gpu, &args) == DTRAIN_OK);
    CHECK(gpu->ops->synchronize(gpu) == DTRAIN_ERROR_DATA);
    CHECK_MSG(says("token 7 at row 1 is outside [0, 5)") ||
                  says("token -2 at row 2 is outside [0, 5)"),
              "%s", dtrain_last_error());
    CHECK(gpu->ops->synchronize(gpu) == DTRAIN_OK); /* reported once */
    CHECK(gpu->ops->embedding(gpu, &args) == DTRAIN_OK);
    CHECK(gpu->ops->copy(gpu, host, y, sizeof host, DTRAIN_COPY_DEVICE_TO_HOST) ==
          DTRAIN_ERROR_DATA);
    gpu_write(tokens, good, sizeof good);
    CHECK(gpu->ops->embedding(gpu, &args) == DTRAIN_OK);
    CHECK(gpu->ops->synchronize(gpu) == DTRAIN_OK);
    logits = zeros(2 * 8);
    loss = zeros(4);
    gpu_write(tokens, targets, sizeof targets);
    dtrain_cross_entropy_args entropy = {.rows = 2,
                                         .n = 8,
                                         .logits = logits,
                                         .targets = tokens,
                                         .loss = loss,
                                         .lse = loss + 2,
                                         .scale = 1,
                                         .dtype = DTRAIN_DTYPE_F32};
    CHECK(gpu->ops->cross_entropy(gpu, &entropy) == DTRAIN_OK);
    CHECK(gpu->ops->synchronize(gpu) == DTRAIN_ERROR_DATA);
    CHECK_SAYS("target 9 at row 1 is outside [0, 8) and not -1 (ignored)");
    int32_t *indices = (int32_t *)gpu_give(bad, sizeof bad, 0);
    dtrain_scatter_add_args scatter = {6, 2, 1, logits, indices, y};
    CHECK(gpu->ops->scatter_add(gpu, &scatter) == DTRAIN_OK);
    CHECK(gpu->ops->synchronize(gpu) == DTRAIN_ERROR_DATA);
    CHECK_SAYS("index 7 at place 1 is outside [0, 6)");
    CHECK(gpu->ops->synchronize(gpu) == DTRAIN_OK);
    gpu_close();
}

#ifdef DTRAIN_CUDA_EMULATION
/* A rank's spans are ranges of the profiler, closed in their order, also those that an inner one has left open. */
static int spans_are_ranges(dtrain_world *world, void *user)
{
    dtrain_emulation_counters before, inside, after;
    (void)user;
    dtrain_emulation_get_counters(&before);
    dtrain_span_begin(world, DTRAIN_SPAN_FORWARD, "outer");
    dtrain_span_begin(world, DTRAIN_SPAN_OTHER, "inner");
    dtrain_emulation_get_counters(&inside);
    CHECK(dtrain_barrier(dtrain_world_comm(world)) == DTRAIN_OK);
    dtrain_span_end(world);
    dtrain_span_end(world);
    dtrain_emulation_get_counters(&after);
    CHECK(inside.open_ranges == before.open_ranges + 2 && inside.ranges == before.ranges + 2);
    CHECK(after.open_ranges == before.open_ranges && after.ranges == before.ranges + 3);
    return 0;
}

static void test_ranges(void)
{
    dtrain_launch_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.rank_count = 2;
    desc.device_ops = dtrain_cuda_device_ops();
    CHECK_MSG(dtrain_launch(&desc, spans_are_ranges, NULL, NULL) == DTRAIN_OK, "%s",
              dtrain_last_error());
}
static int warnings;
static char warning[512];

static void keep_warning(void *user, dtrain_log_level level, int rank, const char *message)
{
    (void)user, (void)rank;
    if (level != DTRAIN_LOG_WARNING) return;
    warnings++;
    snprintf(warning, sizeof warning, "%s", message);
}

static int use_device(dtrain_world *world, void *user)
{
    (void)user;
    return dtrain_barrier(dtrain_world_comm(world)) != DTRAIN_OK;
}

/* Kernels of an older generation than the GPU's: one of two ranks of the machine says it, and what to build with. */
static void test_old_code(void)
{
    static const struct {
        int code, major;
        bool old;
    } cases[] = {{75, 9, true},  {80, 9, true},  {75, 7, false},
                 {80, 8, false}, {90, 9, false}, {90, 10, true}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        dtrain_launch_desc desc;
        memset(&desc, 0, sizeof desc);
        desc.rank_count = 2;
        desc.mode = DTRAIN_LAUNCH_THREADS;
        desc.threads_per_rank = 1;
        desc.device_ops = dtrain_cuda_device_ops();
        desc.options.log = keep_warning;
        warnings = 0;
        warning[0] = 0;
        dtrain_emulation_set_capability(cases[i].major, 0);
        dtrain_emulation_set_code_version(cases[i].code);
        CHECK(dtrain_launch(&desc, use_device, NULL, NULL) == DTRAIN_OK);
        CHECK_MSG(warnings == cases[i].old, "sm_%d on %d.0: %d warnings: %s", cases[i].code,
                  cases[i].major, warnings, warning);
        if (!cases[i].old) continue;
        CHECK_MSG(strstr(warning, "-arch=native") != NULL, "%s", warning);
        CHECK_MSG((strstr(warning, "tensor cores") != NULL) == (cases[i].code < 80), "%s", warning);
    }
    dtrain_emulation_reset();
}
#endif

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    if (gpu_missing()) {
        SKIP(test_cuda_device, gpu_missing());
        return test_summary();
    }
    RUN(test_query);
    RUN(test_math);
    RUN(test_allocator);
    RUN(test_accounting);
    RUN(test_out_of_memory);
    RUN(test_copies);
    RUN(test_bad_copies);
    RUN(test_is_device_memory);
    RUN(test_async);
    RUN(test_copy_waits);
    RUN(test_events);
    RUN(test_while_waiting);
    RUN(test_graph);
    RUN(test_graph_of_two_streams);
    RUN(test_refused_in_graph);
    RUN(test_unjoined_graph);
    RUN(test_graphs_drop);
    RUN(test_graph_keeps_scratch);
    RUN(test_faults);
#ifdef DTRAIN_CUDA_EMULATION
    RUN(test_ranges);
    RUN(test_create_fails);
    RUN(test_create_without_memory);
    RUN(test_device_index);
    RUN(test_workspace);
    RUN(test_stuck);
    RUN(test_scratch);
    RUN(test_lost_device);
    RUN(test_old_code);
#endif
    return test_summary();
}
