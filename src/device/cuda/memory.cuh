/* Memory, streams, events and graphs
 *
 * The entries of the device table that move bytes or order work. Scratch memory belongs to the
 * device: one block that grows in the first step and is stable afterwards, so the steady state
 * allocates nothing and can be captured in a graph. */

#pragma once

#include "device/cuda/language.cuh"
#include "device/cuda/device.cuh"

#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#define DTRAIN_CUDA_NVTX 1
#else
#define DTRAIN_CUDA_NVTX 0 /* a toolkit without it: there are no ranges */
#endif

#include <stdio.h>
#include <string.h>

static dtrain_result dtrain_cuda_out_of_memory(const dtrain_device *device, size_t bytes)
{
    size_t free_bytes = 0, memory_bytes = 0;
    cudaGetLastError();
    cudaMemGetInfo(&free_bytes, &memory_bytes);
    cudaGetLastError();
    return dtrain_fail(DTRAIN_ERROR_MEMORY,
                       "no memory for %llu bytes on the GPU: dtrain holds %llu, %llu of %llu are "
                       "free. Try a smaller batch, or see with nvidia-smi who else uses it",
                       (unsigned long long)bytes, (unsigned long long)device->allocated_bytes,
                       (unsigned long long)free_bytes, (unsigned long long)memory_bytes);
}

static dtrain_result dtrain_cuda_alloc(dtrain_device *device, size_t bytes, void **memory)
{
    *memory = NULL;
    DTRAIN_CUDA_TRY(dtrain_cuda_not_captured(device, "alloc"));
    DTRAIN_CUDA_TRY(dtrain_device_account(device, &device->allocated_bytes, bytes));
    const cudaError_t error = cudaMalloc(memory, bytes ? bytes : 1); /* NULL would mean failure */
    if (error == cudaSuccess) return DTRAIN_OK;
    device->allocated_bytes -= bytes;
    if (error == cudaErrorMemoryAllocation) return dtrain_cuda_out_of_memory(device, bytes);
    return dtrain_cuda_check(error, "cudaMalloc");
}

static void dtrain_cuda_free(dtrain_device *device, void *memory, size_t bytes)
{
    if (!memory) return;
    device->allocated_bytes -= bytes;
    if (dtrain_cuda_may_free(device) && cudaFree(memory) != cudaSuccess) cudaGetLastError();
}

/* Replace the scratch block by a larger one. A captured graph holds the address of its block: while
 * there are graphs, and after the host program has captured one, the old block stays and the new
 * block has at least twice its size, so the retired blocks together are smaller than the current
 * block. */
static dtrain_result dtrain_cuda_grow_scratch(dtrain_device *device, size_t bytes)
{
    dtrain_cuda_state *state = dtrain_cuda_state_of(device);
    const bool keep = (state->graphs || state->host_graphs) && state->scratch;
    void *grown = NULL;
    if (keep && bytes < 2 * state->scratch_bytes) bytes = 2 * state->scratch_bytes;
    if (!keep) {
        DTRAIN_CUDA_TRY(dtrain_cuda_drain(device));
        dtrain_cuda_free_retired(state);
        DTRAIN_CUDA_TRY(dtrain_cuda_check(cudaFree(state->scratch), "cudaFree"));
        state->scratch = NULL;
        state->scratch_bytes = 0;
    }
    const cudaError_t error = cudaMalloc(&grown, bytes);
    if (error == cudaErrorMemoryAllocation) return dtrain_cuda_out_of_memory(device, bytes);
    DTRAIN_CUDA_TRY(dtrain_cuda_check(error, "cudaMalloc"));
    if (keep) state->retired[state->retired_count++] = state->scratch;
    state->scratch = grown;
    state->scratch_bytes = bytes;
    return DTRAIN_OK;
}

/* Give at least `bytes` of device scratch, 256-byte aligned. The contents do not survive the
 * operation. The scratch cannot grow while a graph is captured. */
static dtrain_result dtrain_cuda_scratch(dtrain_device *device, size_t bytes, void **memory)
{
    dtrain_cuda_state *state = dtrain_cuda_state_of(device);
    const bool capturing = dtrain_cuda_capturing(device); /* also notes that the host captures */
    *memory = NULL;
    if (bytes > state->scratch_bytes) {
        if (capturing)
            return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                               "a kernel needs %llu bytes of scratch and has %llu, and a graph is "
                               "being captured: run the step once before it is captured",
                               (unsigned long long)bytes, (unsigned long long)state->scratch_bytes);
        DTRAIN_CUDA_TRY(dtrain_cuda_grow_scratch(device, bytes));
    }
    *memory = state->scratch;
    return DTRAIN_OK;
}

static dtrain_result dtrain_cuda_copy_kind(dtrain_copy_kind kind, cudaMemcpyKind *out)
{
    *out = kind == DTRAIN_COPY_HOST_TO_DEVICE   ? cudaMemcpyHostToDevice
           : kind == DTRAIN_COPY_DEVICE_TO_HOST ? cudaMemcpyDeviceToHost
                                                : cudaMemcpyDeviceToDevice;
    if (kind >= DTRAIN_COPY_HOST_TO_DEVICE && kind <= DTRAIN_COPY_DEVICE_TO_DEVICE)
        return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "copy: %d is not a dtrain_copy_kind", (int)kind);
}

/* Copy. Between host and device the compute stream is idle before the copy, because the driver can
 * stage pageable memory inside the call, and idle after it, because the driver can also not do so.
 */
static dtrain_result dtrain_cuda_copy(dtrain_device *device, void *to, const void *from,
                                      size_t bytes, dtrain_copy_kind kind)
{
    dtrain_cuda_state *state = dtrain_cuda_state_of(device);
    const bool waits = kind != DTRAIN_COPY_DEVICE_TO_DEVICE;
    cudaMemcpyKind native;
    DTRAIN_CUDA_TRY(dtrain_cuda_copy_kind(kind, &native));
    if (waits) {
        DTRAIN_CUDA_TRY(dtrain_cuda_not_captured(device, "copy from or to host memory"));
        DTRAIN_CUDA_TRY(dtrain_cuda_await(device));
    }
    if (bytes == 0) return DTRAIN_OK;
    DTRAIN_CUDA_TRY(
        dtrain_cuda_check(cudaMemcpyAsync(to, from, bytes, native, state->stream), "copy"));
    return waits ? dtrain_cuda_poll(device, state->stream) : DTRAIN_OK;
}

static dtrain_result dtrain_cuda_zero(dtrain_device *device, void *memory, size_t bytes)
{
    if (bytes == 0) return DTRAIN_OK;
    return dtrain_cuda_check(
        cudaMemsetAsync(memory, 0, bytes, dtrain_cuda_state_of(device)->stream), "zero");
}

static dtrain_result dtrain_cuda_host_alloc(dtrain_device *device, size_t bytes, void **memory)
{
    char what[80];
    *memory = NULL;
    DTRAIN_CUDA_TRY(dtrain_cuda_not_captured(device, "host_alloc"));
    snprintf(what, sizeof what, "page-locking %llu bytes", (unsigned long long)bytes);
    return dtrain_cuda_check(cudaMallocHost(memory, bytes ? bytes : 1), what);
}

static void dtrain_cuda_host_free(dtrain_device *device, void *memory, size_t bytes)
{
    (void)bytes;
    if (!memory || !dtrain_cuda_may_free(device)) return;
    if (cudaFreeHost(memory) != cudaSuccess) cudaGetLastError();
}

static dtrain_result dtrain_cuda_host_register(dtrain_device *device, void *memory, size_t bytes)
{
    char what[80];
    DTRAIN_CUDA_TRY(dtrain_cuda_not_captured(device, "host_register"));
    snprintf(what, sizeof what, "page-locking %llu bytes at %p", (unsigned long long)bytes, memory);
    return dtrain_cuda_check(cudaHostRegister(memory, bytes, cudaHostRegisterDefault), what);
}

static void dtrain_cuda_host_unregister(dtrain_device *device, void *memory)
{
    if (!memory || !dtrain_cuda_may_free(device)) return;
    if (cudaHostUnregister(memory) != cudaSuccess) cudaGetLastError();
}

static cudaMemoryType dtrain_cuda_memory_type(const void *memory)
{
    cudaPointerAttributes attributes;
    memset(&attributes, 0, sizeof attributes);
    if (cudaPointerGetAttributes(&attributes, memory) == cudaSuccess) return attributes.type;
    cudaGetLastError(); /* old drivers report memory they do not know as an error */
    return cudaMemoryTypeUnregistered;
}

static bool dtrain_cuda_is_device_memory(dtrain_device *device, const void *memory)
{
    (void)device;
    const cudaMemoryType type = dtrain_cuda_memory_type(memory);
    return type == cudaMemoryTypeDevice || type == cudaMemoryTypeManaged;
}

/* ---- Streams and events -----------------------------------------------------------------------*/

static cudaStream_t dtrain_cuda_native(dtrain_device *device, dtrain_stream *stream)
{
    return stream ? stream->native : dtrain_cuda_state_of(device)->stream;
}

/* Copy on a stream without waiting. Pageable memory is refused: the driver would wait inside the
 * call until it has staged it. */
static dtrain_result dtrain_cuda_copy_async(dtrain_device *device, void *to, const void *from,
                                            size_t bytes, dtrain_copy_kind kind,
                                            dtrain_stream *stream)
{
    const void *host = kind == DTRAIN_COPY_HOST_TO_DEVICE   ? from
                       : kind == DTRAIN_COPY_DEVICE_TO_HOST ? to
                                                            : NULL;
    cudaMemcpyKind native;
    DTRAIN_CUDA_TRY(dtrain_cuda_copy_kind(kind, &native));
    if (bytes == 0) return DTRAIN_OK;
    if (host && dtrain_cuda_memory_type(host) != cudaMemoryTypeHost)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "copy_async: the host memory at %p is not page-locked: take it from "
                           "host_alloc, give it to host_register, or use copy",
                           host);
    return dtrain_cuda_check(
        cudaMemcpyAsync(to, from, bytes, native, dtrain_cuda_native(device, stream)), "copy_async");
}

static dtrain_result dtrain_cuda_stream_create(dtrain_device *device, bool high_priority,
                                               dtrain_stream **out)
{
    dtrain_cuda_state *state = dtrain_cuda_state_of(device);
    *out = NULL;
    DTRAIN_CUDA_TRY(dtrain_cuda_here(state, "stream_create"));
    dtrain_stream *stream =
        (dtrain_stream *)dtrain_cuda_host_take(&state->allocator, sizeof(dtrain_stream));
    if (!stream) return dtrain_fail(DTRAIN_ERROR_MEMORY, "no memory for a stream");
    const dtrain_result result = dtrain_cuda_make_stream(high_priority, &stream->native);
    if (result != DTRAIN_OK) {
        dtrain_cuda_host_give(&state->allocator, stream, sizeof *stream);
        return result;
    }
    stream->next = state->streams;
    state->streams = stream;
    *out = stream;
    return DTRAIN_OK;
}

/* Destroy a stream; its queued work still runs. */
static void dtrain_cuda_stream_destroy(dtrain_device *device, dtrain_stream *stream)
{
    dtrain_cuda_state *state = dtrain_cuda_state_of(device);
    if (!stream) return;
    for (dtrain_stream **link = &state->streams; *link; link = &(*link)->next)
        if (*link == stream) {
            *link = stream->next;
            break;
        }
    if (cudaStreamDestroy(stream->native) != cudaSuccess) cudaGetLastError();
    dtrain_cuda_host_give(&state->allocator, stream, sizeof *stream);
}

static void *dtrain_cuda_stream_native(dtrain_device *device, dtrain_stream *stream)
{
    return (void *)dtrain_cuda_native(device, stream);
}

static dtrain_result dtrain_cuda_event_create(dtrain_device *device, dtrain_event **out)
{
    cudaEvent_t event = NULL;
    *out = NULL;
    DTRAIN_CUDA_TRY(dtrain_cuda_here(dtrain_cuda_state_of(device), "event_create"));
    DTRAIN_CUDA_TRY(dtrain_cuda_check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming),
                                      "creating an event"));
    *out = (dtrain_event *)event;
    return DTRAIN_OK;
}

static void dtrain_cuda_event_destroy(dtrain_device *device, dtrain_event *event)
{
    (void)device;
    if (event && cudaEventDestroy((cudaEvent_t)event) != cudaSuccess) cudaGetLastError();
}

static dtrain_result dtrain_cuda_event_record(dtrain_device *device, dtrain_event *event,
                                              dtrain_stream *stream)
{
    return dtrain_cuda_check(
        cudaEventRecord((cudaEvent_t)event, dtrain_cuda_native(device, stream)), "event_record");
}

static dtrain_result dtrain_cuda_event_wait(dtrain_device *device, dtrain_event *event,
                                            dtrain_stream *stream)
{
    return dtrain_cuda_check(
        cudaStreamWaitEvent(dtrain_cuda_native(device, stream), (cudaEvent_t)event, 0),
        "event_wait");
}

static dtrain_result dtrain_cuda_event_query(dtrain_device *device, dtrain_event *event, bool *done)
{
    *done = false;
    DTRAIN_CUDA_TRY(dtrain_cuda_not_captured(device, "event_query"));
    const cudaError_t error = cudaEventQuery((cudaEvent_t)event);
    *done = error == cudaSuccess;
    if (error != cudaErrorNotReady) return dtrain_cuda_check(error, "event_query");
    cudaGetLastError();
    return DTRAIN_OK;
}

/* ---- Graphs -------------------------------------------------------------------------------------
 *
 * A capture belongs to this thread: another thread of the process, such as a watchdog that polls
 * its events, neither breaks the capture nor is recorded. */

static dtrain_result dtrain_cuda_graph_begin(dtrain_device *device)
{
    dtrain_cuda_state *state = dtrain_cuda_state_of(device);
    DTRAIN_CUDA_TRY(dtrain_cuda_not_captured(device, "graph_begin"));
    DTRAIN_CUDA_TRY(dtrain_cuda_check(
        cudaStreamBeginCapture(state->stream, cudaStreamCaptureModeThreadLocal), "graph_begin"));
    state->capturing = true;
    return DTRAIN_OK;
}

static dtrain_result dtrain_cuda_graph_end(dtrain_device *device, dtrain_graph **out)
{
    dtrain_cuda_state *state = dtrain_cuda_state_of(device);
    cudaGraph_t recorded = NULL;
    *out = NULL;
    if (!state->capturing)
        return dtrain_fail(
            DTRAIN_ERROR_USAGE,
            "graph_end: no graph_begin came before it, or the recording has ended since: memory "
            "was freed, which cannot be recorded, or a communicator failed");
    state->capturing = false;
    dtrain_graph *graph =
        (dtrain_graph *)dtrain_cuda_host_take(&state->allocator, sizeof(dtrain_graph));
    cudaError_t error = cudaStreamEndCapture(state->stream, &recorded);
    if (error == cudaSuccess && graph) error = cudaGraphInstantiate(&graph->native, recorded, 0);
    if (recorded) cudaGraphDestroy(recorded);
    if (!graph) return dtrain_fail(DTRAIN_ERROR_MEMORY, "no memory for a graph");
    const dtrain_result result = dtrain_cuda_check(error, "graph_end");
    if (result != DTRAIN_OK) {
        dtrain_cuda_host_give(&state->allocator, graph, sizeof *graph);
        return result;
    }
    graph->next = state->graphs;
    state->graphs = graph;
    *out = graph;
    return DTRAIN_OK;
}

/* Launch a graph. A dropped graph is refused with the failure that dropped it, if it persists. */
static dtrain_result dtrain_cuda_graph_launch(dtrain_device *device, dtrain_graph *graph)
{
    DTRAIN_CUDA_TRY(dtrain_cuda_not_captured(device, "graph_launch"));
    if (!graph->native) {
        if (device->while_waiting) DTRAIN_CUDA_TRY(device->while_waiting(device->waiting_user));
        return dtrain_fail(DTRAIN_ERROR_USAGE,
                           "graph_launch: the graph was dropped when a communicator failed: "
                           "destroy it and record another");
    }
    return dtrain_cuda_check(cudaGraphLaunch(graph->native, dtrain_cuda_state_of(device)->stream),
                             "graph_launch");
}

static void dtrain_cuda_graph_destroy(dtrain_device *device, dtrain_graph *graph)
{
    dtrain_cuda_state *state = dtrain_cuda_state_of(device);
    if (!graph) return;
    if (graph->native && cudaGraphExecDestroy(graph->native) != cudaSuccess) cudaGetLastError();
    dtrain_graph **link = &state->graphs;
    while (*link != graph) link = &(*link)->next;
    *link = graph->next;
    dtrain_cuda_host_give(&state->allocator, graph, sizeof *graph);
}

/* ---- Ranges -----------------------------------------------------------------------------------*/

/* Open and close an NVTX range. The header that comes with the CUDA Toolkit finds the profiler when
 * the program runs, there is nothing to link; without a profiler a call is a comparison. */
static void dtrain_cuda_range_begin(dtrain_device *device, const char *name)
{
    (void)device, (void)name;
#if DTRAIN_CUDA_NVTX
    (void)nvtxRangePushA(name);
#endif
}

static void dtrain_cuda_range_end(dtrain_device *device)
{
    (void)device;
#if DTRAIN_CUDA_NVTX
    (void)nvtxRangePop();
#endif
}
