/* cuda_emulation.h: what a test may ask of the emulated device. C99 and C++.
 *
 * The emulation runs CUDA kernels on the CPU, one thread after another, and delays what is queued on
 * streams until somebody waits for it. It cannot show speed, bank conflicts or races between blocks;
 * it shows wrong indices (under AddressSanitizer), reads before writes (NaN), missing barriers
 * (results change with the thread order), missing event waits and host reads before synchronisation
 * (late streams), leaks (counters) and the handling of failures (faults).
 *
 * All settings hold for the process. Set them while no work is queued. */
#ifndef DTRAIN_CUDA_EMULATION_H
#define DTRAIN_CUDA_EMULATION_H

#include "cuda_runtime.h"

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The order in which the blocks of a grid, the threads of a block, independent nodes of a graph and
 * the streams of a device take their turns. A correct kernel gives the same bits in every order. */
enum {
    DTRAIN_EMULATION_FORWARD = 0,
    DTRAIN_EMULATION_REVERSE = 1,
    DTRAIN_EMULATION_SHUFFLED = 2, /* by the seed; anew for each launch */
};
void dtrain_emulation_set_order(int order, uint64_t seed);

/* 1: operations run when they are queued, as if every stream were fast. 0, the default: late. */
void dtrain_emulation_set_eager(int eager);

/* 1: kernel failures and bad arguments are not explained on stderr. */
void dtrain_emulation_set_quiet(int quiet);

/* The last explanation, kept for the process; "" when there was none. */
const char *dtrain_emulation_message(void);

/* The device(s): by default one of compute capability 9.0 with 8 GiB. At most 16. */
void dtrain_emulation_set_device_count(int count);
void dtrain_emulation_set_capability(int major, int minor);
/* What the kernels are compiled for, 75 for sm_75; 0, the default: for this device. */
void dtrain_emulation_set_code_version(int version);
void dtrain_emulation_set_total_memory(uint64_t bytes);

/* Faults, all off by default. Numbers count from 1, from the call on; 0 switches the fault off. */
typedef enum dtrain_emulation_fault {
    DTRAIN_EMULATION_NO_DRIVER,       /* 1: cudaErrorInsufficientDriver from the next call on */
    DTRAIN_EMULATION_NO_KERNEL_IMAGE, /* 1: launches return cudaErrorNoKernelImageForDevice */
    DTRAIN_EMULATION_FAIL_ALLOCATION, /* n: the nth allocation (device or pinned) fails, once */
    DTRAIN_EMULATION_LOSE_DEVICE,   /* n: the nth kernel ends in cudaErrorLaunchFailure, for good */
    DTRAIN_EMULATION_NO_HEURISTIC,  /* 1: cublasLtMatmulAlgoGetHeuristic finds nothing */
    DTRAIN_EMULATION_FAIL_MATMUL,   /* n: the nth cublasLtMatmul returns an error, once */
    DTRAIN_EMULATION_REFUSE_MATMUL, /* n: cublasLtMatmul does not support the first n algorithms
                                       (of 2) that are proposed for a product */
    DTRAIN_EMULATION_WORKSPACE, /* n: bytes that the first algorithm needs, in place of 32 KiB */
    DTRAIN_EMULATION_FAULT_COUNT
} dtrain_emulation_fault;
void dtrain_emulation_inject(dtrain_emulation_fault fault, int64_t n);
/* Bytes that device allocations may still take; negative: the device's memory is the only limit. */
void dtrain_emulation_set_memory_left(int64_t bytes);

/* An operation on a stream that takes its time, as one that waits for another rank does: step is called
 * with a copy of state, again and again while somebody queries or waits, until it returns true; what is
 * behind it waits. Each launch of a graph that recorded it begins with the state as it was. step must not
 * call the runtime. False: there is no such stream. */
bool dtrain_emulation_enqueue_step(cudaStream_t stream, bool (*step)(void *state),
                                   const void *state, size_t bytes);

/* True if the stream is being captured. Then release(user) is called when the graph, everything made of it
 * and its launches are gone, as with cudaGraphRetainUserObject; it must not call the runtime. */
bool dtrain_emulation_retain(cudaStream_t stream, void (*release)(void *user), void *user);

/* Lets the streams of this thread's device go on as far as they go, as a device does by itself. Returns how
 * many operations that touch memory had not been waited for. */
int64_t dtrain_emulation_advance(void);

/* Back to the defaults: settings, faults, a lost device. Allocations, streams and events stay. */
void dtrain_emulation_reset(void);

typedef struct dtrain_emulation_counters {
    int64_t kernels;         /* kernels run, graph nodes included */
    int64_t matmuls;         /* cublasLt products run */
    int64_t heuristics;      /* cublasLtMatmulAlgoGetHeuristic was asked */
    int64_t refused_matmuls; /* by DTRAIN_EMULATION_REFUSE_MATMUL */
    int64_t graph_launches;
    int64_t copies, copied_bytes; /* memcpy operations run */
    int64_t allocations;          /* device and pinned allocations made so far */
    int64_t allocations_alive;    /* device */
    int64_t bytes_alive;          /* device */
    int64_t peak_bytes;           /* highest bytes_alive */
    int64_t pinned_alive;         /* pinned and registered host ranges */
    int64_t streams_alive, events_alive;
    int64_t graphs_alive;        /* graphs and executable graphs */
    int64_t cublas_alive;        /* handles, descriptors, layouts, preferences */
    int64_t host_syncs;          /* calls that made the host wait for the device */
    int64_t operations_queued;   /* operations that streams hold and have not run */
    int64_t ranges, open_ranges; /* of NVTX: opened so far, and open now */
} dtrain_emulation_counters;
void dtrain_emulation_get_counters(dtrain_emulation_counters *counters);

#ifdef __cplusplus
}
#endif
#endif
