/* Device: state, errors, waiting, creation
 *
 * A dtrain_event is a cudaEvent_t. Streams are in a list, because synchronize waits for all
 * streams; graphs are in a list, because all are dropped when a communicator ends whose collectives
 * they hold.
 *
 * Invariant: no call here blocks without a limit. A call that would wait inside the driver (a copy
 * of pageable memory, and cudaFree, which waits for running kernels) is made only after the streams
 * have been polled until they were idle, and device->while_waiting can end every polling loop with
 * an error. */

#pragma once

#include "device/cuda/language.cuh"

#include <cublasLt.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct dtrain_stream {
    cudaStream_t native;
    dtrain_stream *next;
};

struct dtrain_graph {
    cudaGraphExec_t native; /* NULL: dropped */
    dtrain_graph *next;
};

enum {
    DTRAIN_CUDA_SPINS = 200,              /* polls before the first pause: some 200 us */
    DTRAIN_CUDA_PAUSE_NS = 50000,         /* between later polls */
    DTRAIN_CUDA_GRACE_S = 1,              /* for queued work to end after a wait was given up */
    DTRAIN_CUDA_TIMEOUT_S = 3600,         /* the launch queue holds far less work than that */
    DTRAIN_CUDA_MARK_EVERY = 128,         /* kernels between two marks in the compute stream */
    DTRAIN_CUDA_RETIRED_BLOCKS = 64,      /* each at least twice the one before: never full */
    DTRAIN_CUDA_LT_BYTES_SM90 = 32 << 20, /* workspace that cublasLt's best kernels ask for */
    DTRAIN_CUDA_LT_BYTES = 4 << 20
};

/* A kernel that meets bad data writes a fault record; the first fault is kept. The host reads the
 * record when it next waits for the device. */
enum dtrain_cuda_fault_kind {
    DTRAIN_CUDA_NO_FAULT = 0,
    DTRAIN_CUDA_BAD_TOKEN = 1,
    DTRAIN_CUDA_BAD_TARGET = 2,
    DTRAIN_CUDA_BAD_INDEX = 3,
    DTRAIN_CUDA_BAD_KEY_LENGTH = 4
};

struct dtrain_cuda_fault {
    unsigned kind; /* dtrain_cuda_fault_kind, set by atomicCAS from 0 */
    unsigned reserved;
    long long value, row, limit;
};

struct dtrain_cuda_gemm_cache; /* gemm.cuh */

struct dtrain_cuda_state {
    dtrain_allocator allocator; /* of host memory */
    int index, multiprocessors, major, minor;
    int code_version;              /* what the kernels were compiled for, 80 for sm_80: a newer GPU
                                      runs older code too, without its instructions */
    size_t shared_limit;           /* dynamic shared memory a block may ask for */
    uint32_t math;                 /* dtrain_math */
    bool tune;                     /* time GEMM algorithms at their first use */
    int spins;                     /* polls of a stream before the first pause */
    cudaStream_t stream;           /* compute */
    bool guest;                    /* the device is what was current on the host's thread */
    bool host_stream;              /* the compute stream is the host's */
    bool host_graphs;              /* the host has captured kernels that use the scratch */
    dtrain_stream *streams;        /* all others */
    dtrain_cuda_fault *fault;      /* device memory */
    dtrain_cuda_fault *host_fault; /* page-locked copy */
    void *workspace;               /* of cublasLt */
    size_t workspace_bytes;
    cublasLtHandle_t lt;
    dtrain_cuda_gemm_cache *gemm_cache;
    void *scratch; /* of kernels: grows in the first step, then stays as it is */
    size_t scratch_bytes;
    void *retired[DTRAIN_CUDA_RETIRED_BLOCKS]; /* scratch that graphs may still address */
    int retired_count;
    dtrain_graph *graphs; /* not destroyed yet */
    cudaEvent_t marks[2]; /* in the compute stream: see dtrain_cuda_await_mark */
    int64_t launches;
    dtrain_result queue_error;
    bool stuck; /* a kernel did not end within the grace: no further grace is given */
    bool capturing;
};

static inline dtrain_cuda_state *dtrain_cuda_state_of(dtrain_device *device)
{
    return (dtrain_cuda_state *)device->state;
}

static dtrain_result dtrain_cuda_check(cudaError_t error, const char *what);
static bool dtrain_cuda_limit_queue(dtrain_device *device);

/* Launch a kernel on the compute stream; an error names the operation. */
#define DTRAIN_CUDA_RUN(device, name, kernel, blocks, threads, shared_bytes, ...)      \
    (!dtrain_cuda_limit_queue(device)                                                  \
         ? dtrain_cuda_state_of(device)->queue_error                                   \
         : dtrain_cuda_check(dtrain_cuda_launch(kernel, blocks, threads, shared_bytes, \
                                                dtrain_cuda_state_of(device)->stream,  \
                                                __VA_ARGS__),                          \
                             name))

/* Choose the number of blocks of a grid-stride loop over `items` work items, one for each thread:
 * at most 16 blocks a multiprocessor. */
static inline int64_t dtrain_cuda_blocks(const dtrain_cuda_state *state, int64_t items, int threads)
{
    const int64_t needed = (items + threads - 1) / threads,
                  most = (int64_t)state->multiprocessors * 16;
    return needed < 1 ? 1 : needed < most ? needed : most;
}

/* gemm_plan.cuh; no cache is legal */
static void dtrain_cuda_gemm_cache_free(dtrain_cuda_state *state);
static uint32_t dtrain_cuda_gemm_slow_count(const dtrain_cuda_state *state);

static void *dtrain_cuda_host_take(const dtrain_allocator *allocator, size_t bytes)
{
    void *memory = allocator->alloc && allocator->free ? allocator->alloc(allocator->user, bytes)
                                                       : malloc(bytes);
    if (memory) memset(memory, 0, bytes);
    return memory;
}

static void dtrain_cuda_host_give(const dtrain_allocator *allocator, void *memory, size_t bytes)
{
    if (!memory) return;
    if (allocator->alloc && allocator->free) allocator->free(allocator->user, memory, bytes);
    else free(memory);
}

/* ---- Errors -----------------------------------------------------------------------------------*/

/* Return whether the CUDA context is lost, after which every call repeats the error. A trial call
 * is safer than a list of error codes, which grows with each toolkit. */
static bool dtrain_cuda_is_lost(void)
{
    size_t free_bytes, memory_bytes;
    cudaGetLastError();
    const cudaError_t error = cudaMemGetInfo(&free_bytes, &memory_bytes);
    return error != cudaSuccess && error != cudaErrorMemoryAllocation;
}

/* Turn a CUDA error into a sentence, and clear it if possible. `what` names the call. */
static dtrain_result dtrain_cuda_check(cudaError_t error, const char *what)
{
    if (error == cudaSuccess) return DTRAIN_OK;
    const char *name = cudaGetErrorName(error), *text = cudaGetErrorString(error);
    if (dtrain_cuda_is_lost())
        return dtrain_fail(DTRAIN_ERROR_SYSTEM,
                           "%s: the device is lost (%s: %s), by this call or by a kernel before "
                           "it. Nothing on it can be used any more: the process has to be started "
                           "again; under compute-sanitizer it names the kernel",
                           what, name, text);
    if (error == cudaErrorMemoryAllocation)
        return dtrain_fail(DTRAIN_ERROR_MEMORY,
                           "%s: the GPU (or page-locked host memory) is full: try a smaller batch, "
                           "or see with nvidia-smi who else uses it",
                           what);
    if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "%s: dtrain_cuda.cu was not compiled for this GPU (%s): compile it with "
                           "nvcc -arch=native, or name the architecture, such as -arch=sm_90",
                           what, name);
    if (error >= cudaErrorStreamCaptureUnsupported && error <= cudaErrorStreamCaptureWrongThread)
        return dtrain_fail(DTRAIN_ERROR_USAGE,
                           "%s cannot be part of the graph that is captured (%s: %s)", what, name,
                           text);
    if (error == cudaErrorInvalidValue || error == cudaErrorInvalidResourceHandle)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: %s (%s)", what, name, text);
    return dtrain_fail(DTRAIN_ERROR_SYSTEM, "%s: %s (%s)", what, name, text);
}

/* Check that a guest's device is current on this thread. */
static dtrain_result dtrain_cuda_here(const dtrain_cuda_state *state, const char *what)
{
    int index = state->index;
    if (state->guest) DTRAIN_CUDA_TRY(dtrain_cuda_check(cudaGetDevice(&index), "cudaGetDevice"));
    if (index == state->index) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_USAGE,
                       "%s: GPU %d is current on this thread, and this rank has GPU %d: call "
                       "cudaSetDevice(%d) before dtrain",
                       what, index, state->index, state->index);
}

static bool dtrain_cuda_capturing(dtrain_device *device)
{
    dtrain_cuda_state *state = dtrain_cuda_state_of(device);
    enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    if (state->capturing || !state->host_stream) return state->capturing;
    const cudaError_t error = cudaStreamIsCapturing(state->stream, &status);
    if (error != cudaSuccess) cudaGetLastError(); /* the next call on the stream reports it */
    state->host_graphs = state->host_graphs || status != cudaStreamCaptureStatusNone;
    return error == cudaSuccess && status != cudaStreamCaptureStatusNone;
}

/* Refuse a call that waits or allocates while a graph is captured: the driver would invalidate the
 * whole capture. */
static dtrain_result dtrain_cuda_not_captured(dtrain_device *device, const char *what)
{
    DTRAIN_CUDA_TRY(dtrain_cuda_here(dtrain_cuda_state_of(device), what));
    if (!dtrain_cuda_capturing(device)) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                       "%s is not possible while a graph is captured: only kernels, zero, "
                       "copy_async and copies within the device are recorded. Run the step once "
                       "before it is captured, since the first one allocates, and keep what the "
                       "host reads, writes or waits for outside of the capture",
                       what);
}

/* Refuse a data type other than F32, BF16, F16 and 0, which means F32. */
static dtrain_result dtrain_cuda_known_dtype(const char *name, dtrain_dtype dtype)
{
    if (dtype == DTRAIN_DTYPE_F32 || dtype == DTRAIN_DTYPE_BF16 || dtype == DTRAIN_DTYPE_F16)
        return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                       "%s takes f32, bf16 and f16, found the data type %d (%s)", name, (int)dtype,
                       dtrain_dtype_name(dtype));
}

/* ---- Waiting ----------------------------------------------------------------------------------*/

/* Poll until the stream is idle. A kernel of this file always ends; a kernel that waits for other
 * ranks belongs to a communicator, which keeps its own deadline in while_waiting. */
static dtrain_result dtrain_cuda_poll(dtrain_device *device, cudaStream_t stream)
{
    const int spins = dtrain_cuda_state_of(device)->spins;
    const double deadline = dtrain_seconds() + DTRAIN_CUDA_TIMEOUT_S;
    for (int polls = 0;; polls++) {
        const cudaError_t error = cudaStreamQuery(stream);
        if (error != cudaErrorNotReady) return dtrain_cuda_check(error, "waiting for the GPU");
        cudaGetLastError();
        if (device->while_waiting) DTRAIN_CUDA_TRY(device->while_waiting(device->waiting_user));
        if (dtrain_seconds() > deadline)
            return dtrain_fail(DTRAIN_ERROR_TIMEOUT,
                               "the GPU did not finish its work within %d seconds",
                               (int)DTRAIN_CUDA_TIMEOUT_S);
        if (polls >= spins) {
            const struct timespec pause = {0, DTRAIN_CUDA_PAUSE_NS};
            nanosleep(&pause, NULL);
        }
    }
}

/* Wait until the device has passed `mark`, then record it anew in the compute stream.
 *
 * The driver's queue holds about a thousand launches, and a launch waits inside the driver if the
 * queue is full: forever, after a collective that waits for a dead rank. So every 128th kernel
 * records a mark. There are two marks, and a mark is recorded only after the device has passed it:
 * at most 3 * 128 kernels are queued. */
static dtrain_result dtrain_cuda_await_mark(dtrain_device *device, cudaEvent_t mark)
{
    dtrain_cuda_state *state = dtrain_cuda_state_of(device);
    for (;;) {
        const cudaError_t error = cudaEventQuery(mark);
        if (error == cudaSuccess) break;
        if (error != cudaErrorNotReady) return dtrain_cuda_check(error, "waiting for the GPU");
        cudaGetLastError();
        if (device->while_waiting) DTRAIN_CUDA_TRY(device->while_waiting(device->waiting_user));
        const struct timespec pause = {0, DTRAIN_CUDA_PAUSE_NS};
        nanosleep(&pause, NULL);
    }
    return dtrain_cuda_check(cudaEventRecord(mark, state->stream), "waiting for the GPU");
}

/* Keep the launch queue short; called before every launch. False: an error in state->queue_error.
 * Kernels that a graph captures are not queued and do not count; a host's capture is checked when a
 * mark is due. */
static bool dtrain_cuda_limit_queue(dtrain_device *device)
{
    dtrain_cuda_state *state = dtrain_cuda_state_of(device);
    state->queue_error = dtrain_cuda_here(state, "a kernel");
    if (state->queue_error != DTRAIN_OK) return false;
    if (state->capturing || ++state->launches % DTRAIN_CUDA_MARK_EVERY) return true;
    if (dtrain_cuda_capturing(device)) {
        state->launches--;
        return true;
    }
    cudaEvent_t mark = state->marks[state->launches / DTRAIN_CUDA_MARK_EVERY % 2];
    state->queue_error = dtrain_cuda_await_mark(device, mark);
    return state->queue_error == DTRAIN_OK;
}

/* Clear the fault record, with one thread. This is also the first kernel to run on a device: a
 * program without code for the GPU's architecture fails here. */
static __global__ void dtrain_cuda_clear_fault_kernel(dtrain_cuda_fault *fault)
{
    fault->kind = DTRAIN_CUDA_NO_FAULT;
    fault->reserved = 0;
    fault->value = fault->row = fault->limit = 0;
}

static dtrain_result dtrain_cuda_clear_fault(dtrain_device *device)
{
    return DTRAIN_CUDA_RUN(device, "the first kernel", dtrain_cuda_clear_fault_kernel, 1, 1, 0,
                           dtrain_cuda_state_of(device)->fault);
}

static dtrain_result dtrain_cuda_report(const dtrain_cuda_fault *fault)
{
    switch (fault->kind) {
    case DTRAIN_CUDA_NO_FAULT: return DTRAIN_OK;
    case DTRAIN_CUDA_BAD_TOKEN:
        return dtrain_fail(DTRAIN_ERROR_DATA, "token %lld at row %lld is outside [0, %lld)",
                           fault->value, fault->row, fault->limit);
    case DTRAIN_CUDA_BAD_TARGET:
        return dtrain_fail(DTRAIN_ERROR_DATA,
                           "target %lld at row %lld is outside [0, %lld) and not -1 (ignored)",
                           fault->value, fault->row, fault->limit);
    case DTRAIN_CUDA_BAD_INDEX:
        return dtrain_fail(DTRAIN_ERROR_DATA, "index %lld at place %lld is outside [0, %lld)",
                           fault->value, fault->row, fault->limit);
    case DTRAIN_CUDA_BAD_KEY_LENGTH:
        return dtrain_fail(DTRAIN_ERROR_DATA,
                           "attention: key length %lld of batch element %lld is outside [0, %lld]",
                           fault->value, fault->row, fault->limit);
    default:
        return dtrain_fail(DTRAIN_ERROR_INTERNAL, "the GPU's fault record has the unknown kind %u",
                           fault->kind);
    }
}

/* Wait for the compute stream and report the fault that its kernels recorded, once. The copy of the
 * record is queued before the wait, so that one wait serves both. */
static dtrain_result dtrain_cuda_await(dtrain_device *device)
{
    dtrain_cuda_state *state = dtrain_cuda_state_of(device);
    DTRAIN_CUDA_TRY(
        dtrain_cuda_check(cudaMemcpyAsync(state->host_fault, state->fault, sizeof *state->fault,
                                          cudaMemcpyDeviceToHost, state->stream),
                          "waiting for the GPU"));
    DTRAIN_CUDA_TRY(dtrain_cuda_poll(device, state->stream));
    if (state->host_fault->kind == DTRAIN_CUDA_NO_FAULT) return DTRAIN_OK;
    DTRAIN_CUDA_TRY(dtrain_cuda_clear_fault(device));
    return dtrain_cuda_report(state->host_fault);
}

/* Wait for all streams; a recorded fault stays recorded. */
static dtrain_result dtrain_cuda_drain(dtrain_device *device)
{
    for (dtrain_stream *stream = dtrain_cuda_state_of(device)->streams; stream;
         stream = stream->next)
        DTRAIN_CUDA_TRY(dtrain_cuda_poll(device, stream->native));
    return dtrain_cuda_poll(device, dtrain_cuda_state_of(device)->stream);
}

static void dtrain_cuda_abandon_capture(dtrain_cuda_state *state)
{
    cudaGraph_t unfinished = NULL;
    if (!state->capturing) return;
    state->capturing = false;
    if (cudaStreamEndCapture(state->stream, &unfinished) == cudaSuccess)
        cudaGraphDestroy(unfinished);
    cudaGetLastError();
}

/* Free CUDA's graphs. A running graph finishes. */
static void dtrain_cuda_graphs_drop(dtrain_device *device)
{
    dtrain_cuda_state *state = dtrain_cuda_state_of(device);
    dtrain_cuda_abandon_capture(state);
    for (dtrain_graph *graph = state->graphs; graph; graph = graph->next) {
        if (graph->native && cudaGraphExecDestroy(graph->native) != cudaSuccess) cudaGetLastError();
        graph->native = NULL;
    }
}

static bool dtrain_cuda_is_running(const dtrain_cuda_state *state)
{
    bool running = cudaStreamQuery(state->stream) == cudaErrorNotReady;
    for (const dtrain_stream *stream = state->streams; stream; stream = stream->next)
        running = running || cudaStreamQuery(stream->native) == cudaErrorNotReady;
    cudaGetLastError();
    return running;
}

/* Decide whether memory can be freed. cudaFree waits for kernels, and a stuck kernel never ends:
 * its memory stays until the end of the process. A lost device runs nothing, so memory can be
 * freed. A caller that frees during a capture is cleaning up after an error: the capture ends, and
 * graph_end reports it. A capture of the host program continues, and waiting would spoil it: memory
 * freed meanwhile also stays until the end of the process. */
static bool dtrain_cuda_may_free(dtrain_device *device)
{
    dtrain_cuda_state *state = dtrain_cuda_state_of(device);
    if (!state->stream) return true;
    dtrain_cuda_abandon_capture(state);
    if (dtrain_cuda_capturing(device)) return false;
    if (dtrain_cuda_drain(device) == DTRAIN_OK) return true;
    const double deadline = dtrain_seconds() + (state->stuck ? 0 : DTRAIN_CUDA_GRACE_S);
    while (dtrain_cuda_is_running(state)) {
        const struct timespec pause = {0, DTRAIN_CUDA_PAUSE_NS};
        state->stuck = dtrain_seconds() >= deadline;
        if (state->stuck) return false;
        nanosleep(&pause, NULL);
    }
    state->stuck = false;
    return true;
}

static dtrain_result dtrain_cuda_synchronize(dtrain_device *device)
{
    DTRAIN_CUDA_TRY(dtrain_cuda_not_captured(device, "synchronize"));
    DTRAIN_CUDA_TRY(dtrain_cuda_drain(device));
    return dtrain_cuda_await(device);
}

/* ---- Create, destroy, query -------------------------------------------------------------------*/

/* Explain why no GPU could be opened. CUDA reports a missing driver as a driver that is too old;
 * the driver's version tells them apart. */
static dtrain_result dtrain_cuda_explain_opening(cudaError_t error)
{
    int driver = 0, runtime = 0;
    cudaDriverGetVersion(&driver);
    cudaRuntimeGetVersion(&runtime);
    cudaGetLastError();
    if (error == cudaErrorNoDevice)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "no GPU is visible: see nvidia-smi and CUDA_VISIBLE_DEVICES, or use the "
                           "CPU device (device_ops NULL)");
    if (error == cudaErrorInsufficientDriver && driver == 0)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "this machine has no NVIDIA driver: install one (in a container, start "
                           "it with --gpus), or use the CPU device (device_ops NULL)");
    if (error == cudaErrorInsufficientDriver)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "the NVIDIA driver supports CUDA %d.%d, the program was built with CUDA "
                           "%d.%d: update the driver, or build with an older toolkit",
                           driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
    return dtrain_fail(error == cudaErrorMemoryAllocation ? DTRAIN_ERROR_MEMORY
                                                          : DTRAIN_ERROR_SYSTEM,
                       "the GPU cannot be opened: %s (%s). See with nvidia-smi who else uses it, "
                       "perhaps alone, and whether the driver works",
                       cudaGetErrorName(error), cudaGetErrorString(error));
}

static dtrain_result dtrain_cuda_attribute(int *value, cudaDeviceAttr attribute, int index)
{
    return dtrain_cuda_check(cudaDeviceGetAttribute(value, attribute, index),
                             "asking for a property of the GPU");
}

/* Make the rank's GPU the current device of this thread, or take the current device. Read its
 * properties. */
static dtrain_result dtrain_cuda_select(const dtrain_device_desc *desc, dtrain_cuda_state *state)
{
    int count = 0, shared_limit = 0;
    cudaError_t error = cudaGetDeviceCount(&count);
    if (error == cudaSuccess && count == 0) error = cudaErrorNoDevice;
    if (error != cudaSuccess) return dtrain_cuda_explain_opening(error);
    state->guest = desc->device_index == DTRAIN_DEVICE_CURRENT;
    state->index = state->guest ? 0 : (int)(desc->device_index % (uint32_t)count);
    error = state->guest ? cudaGetDevice(&state->index) : cudaSetDevice(state->index);
    if (error != cudaSuccess) return dtrain_cuda_explain_opening(error);
    DTRAIN_CUDA_TRY(dtrain_cuda_attribute(&state->multiprocessors, cudaDevAttrMultiProcessorCount,
                                          state->index));
    DTRAIN_CUDA_TRY(
        dtrain_cuda_attribute(&state->major, cudaDevAttrComputeCapabilityMajor, state->index));
    DTRAIN_CUDA_TRY(
        dtrain_cuda_attribute(&state->minor, cudaDevAttrComputeCapabilityMinor, state->index));
    DTRAIN_CUDA_TRY(dtrain_cuda_attribute(&shared_limit, cudaDevAttrMaxSharedMemoryPerBlockOptin,
                                          state->index));
    state->shared_limit = (size_t)shared_limit;
    return DTRAIN_OK;
}

static dtrain_result dtrain_cuda_make_stream(bool high_priority, cudaStream_t *out)
{
    int least = 0, greatest = 0;
    DTRAIN_CUDA_TRY(dtrain_cuda_check(cudaDeviceGetStreamPriorityRange(&least, &greatest),
                                      "asking for stream priorities"));
    return dtrain_cuda_check(
        cudaStreamCreateWithPriority(out, cudaStreamNonBlocking, high_priority ? greatest : least),
        "creating a stream");
}

/* Take the host's stream as the compute stream. An event of the current device can be recorded only
 * in a stream of that device, in every version of CUDA. */
static dtrain_result dtrain_cuda_take_stream(cudaStream_t stream, dtrain_device *device)
{
    dtrain_cuda_state *state = dtrain_cuda_state_of(device);
    state->stream = stream;
    state->host_stream = true;
    DTRAIN_CUDA_TRY(dtrain_cuda_not_captured(device, "joining with a stream"));
    const cudaError_t error = cudaEventRecord(state->marks[0], stream);
    if (error == cudaErrorInvalidResourceHandle) {
        state->stream = NULL;
        cudaGetLastError();
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "the stream is not one of GPU %d, which is current: call cudaSetDevice "
                           "first, or give a stream that was made on this GPU and still exists",
                           state->index);
    }
    return dtrain_cuda_check(error, "recording an event in the host's stream");
}

static dtrain_result dtrain_cuda_open_lt(dtrain_cuda_state *state)
{
    state->workspace_bytes = state->major >= 9 ? DTRAIN_CUDA_LT_BYTES_SM90 : DTRAIN_CUDA_LT_BYTES;
    DTRAIN_CUDA_TRY(dtrain_cuda_check(cudaMalloc(&state->workspace, state->workspace_bytes),
                                      "allocating the workspace of cublasLt"));
    const cublasStatus_t status = cublasLtCreate(&state->lt);
    if (status == CUBLAS_STATUS_SUCCESS) return DTRAIN_OK;
    state->lt = NULL;
    cudaGetLastError();
    return dtrain_fail(status == CUBLAS_STATUS_ALLOC_FAILED ? DTRAIN_ERROR_MEMORY
                                                            : DTRAIN_ERROR_SYSTEM,
                       "cublasLtCreate failed with cuBLAS status %d: is the library that of the "
                       "toolkit the program was built with?",
                       (int)status);
}

static dtrain_result dtrain_cuda_open(const dtrain_device_desc *desc, dtrain_device *device)
{
    dtrain_cuda_state *state = dtrain_cuda_state_of(device);
    DTRAIN_CUDA_TRY(dtrain_cuda_select(desc, state));
    for (cudaEvent_t &mark : state->marks)
        DTRAIN_CUDA_TRY(dtrain_cuda_check(cudaEventCreateWithFlags(&mark, cudaEventDisableTiming),
                                          "creating an event"));
    DTRAIN_CUDA_TRY(desc->stream ? dtrain_cuda_take_stream((cudaStream_t)desc->stream, device)
                                 : dtrain_cuda_make_stream(false, &state->stream));
    DTRAIN_CUDA_TRY(dtrain_cuda_check(cudaMalloc((void **)&state->fault, sizeof *state->fault),
                                      "allocating the fault record"));
    DTRAIN_CUDA_TRY(
        dtrain_cuda_check(cudaMallocHost((void **)&state->host_fault, sizeof *state->host_fault),
                          "allocating the fault record"));
    cudaFuncAttributes code;
    DTRAIN_CUDA_TRY(dtrain_cuda_check(
        cudaFuncGetAttributes(&code, (const void *)dtrain_cuda_clear_fault_kernel),
        "asking what the kernels were compiled for"));
    state->code_version = code.ptxVersion;
    DTRAIN_CUDA_TRY(dtrain_cuda_clear_fault(device));
    DTRAIN_CUDA_TRY(dtrain_cuda_await(device));
    return dtrain_cuda_open_lt(state);
}

static void dtrain_cuda_free_retired(dtrain_cuda_state *state)
{
    while (state->retired_count > 0) cudaFree(state->retired[--state->retired_count]);
}

/* Destroy the device, which can be half made or lost: missing parts are NULL, and errors do not
 * matter. */
static void dtrain_cuda_destroy(dtrain_device *device)
{
    dtrain_cuda_state *state = dtrain_cuda_state_of(device);
    if (!state) return;
    const cudaError_t before = cudaPeekAtLastError();
    const bool may_free = dtrain_cuda_may_free(device);
    dtrain_cuda_graphs_drop(device);
    while (state->graphs) {
        dtrain_graph *graph = state->graphs;
        state->graphs = graph->next;
        dtrain_cuda_host_give(&state->allocator, graph, sizeof *graph);
    }
    if (state->gemm_cache) dtrain_cuda_gemm_cache_free(state);
    if (state->lt) cublasLtDestroy(state->lt);
    if (may_free) {
        dtrain_cuda_free_retired(state);
        if (state->scratch) cudaFree(state->scratch);
        if (state->workspace) cudaFree(state->workspace);
        if (state->fault) cudaFree(state->fault);
        if (state->host_fault) cudaFreeHost(state->host_fault);
    }
    while (state->streams) {
        dtrain_stream *stream = state->streams;
        state->streams = stream->next;
        cudaStreamDestroy(stream->native);
        dtrain_cuda_host_give(&state->allocator, stream, sizeof *stream);
    }
    for (cudaEvent_t mark : state->marks)
        if (mark) cudaEventDestroy(mark);
    if (state->stream && !state->host_stream) cudaStreamDestroy(state->stream);
    if (cudaPeekAtLastError() != before) cudaGetLastError(); /* else it is the host's to read */
    const dtrain_allocator allocator = state->allocator;
    dtrain_cuda_host_give(&allocator, state, sizeof *state);
    device->state = NULL;
}

static dtrain_result dtrain_cuda_create(const dtrain_device_desc *desc, dtrain_device *device)
{
    device->state = NULL;
    if (desc->math > DTRAIN_MATH_BF16)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "math is %u, which is not a dtrain_math",
                           (unsigned)desc->math);
    dtrain_cuda_state *state =
        (dtrain_cuda_state *)dtrain_cuda_host_take(&desc->allocator, sizeof(dtrain_cuda_state));
    if (!state) return dtrain_fail(DTRAIN_ERROR_MEMORY, "no memory for the state of a GPU");
    state->allocator = desc->allocator;
    state->math = desc->math ? desc->math : (uint32_t)DTRAIN_MATH_FP32;
    state->tune = desc->tune;
    state->spins = desc->oversubscribed ? 0 : DTRAIN_CUDA_SPINS;
    device->state = state;
    const dtrain_result result = dtrain_cuda_open(desc, device);
    if (result != DTRAIN_OK) dtrain_cuda_destroy(device);
    return result;
}

/* Describe the GPU. The id is the UUID, because slices of one GPU (MIG) share its PCI address. */
static dtrain_result dtrain_cuda_query(dtrain_device *device, dtrain_device_info *info)
{
    const dtrain_cuda_state *state = dtrain_cuda_state_of(device);
    cudaDeviceProp properties;
    size_t free_bytes = 0, memory_bytes = 0;
    int count = 0;
    memset(info, 0, sizeof *info);
    DTRAIN_CUDA_TRY(dtrain_cuda_check(cudaGetDeviceProperties(&properties, state->index),
                                      "cudaGetDeviceProperties"));
    DTRAIN_CUDA_TRY(
        dtrain_cuda_check(cudaMemGetInfo(&free_bytes, &memory_bytes), "cudaMemGetInfo"));
    DTRAIN_CUDA_TRY(dtrain_cuda_check(cudaGetDeviceCount(&count), "cudaGetDeviceCount"));
    snprintf(info->name, sizeof info->name, "%.*s", (int)sizeof info->name - 1, properties.name);
    memcpy(info->id, "GPU-", 4);
    for (int i = 0; i < 16; i++)
        snprintf(info->id + 4 + 2 * i, 3, "%02x",
                 (unsigned)(unsigned char)properties.uuid.bytes[i]);
    info->index = (uint32_t)state->index;
    info->count = (uint32_t)count;
    info->major = (uint32_t)state->major;
    info->minor = (uint32_t)state->minor;
    info->code_version = (uint32_t)state->code_version;
    info->memory_bytes = memory_bytes;
    info->free_bytes = free_bytes;
    info->slow_gemms = dtrain_cuda_gemm_slow_count(state);
    return DTRAIN_OK;
}
