/* nccl_mock.h: what tests can make the mock do, and what the mock needs from the device. */
#ifndef DTRAIN_TEST_NCCL_MOCK_H
#define DTRAIN_TEST_NCCL_MOCK_H

#include <nccl.h>
#include <stdbool.h>

/* Of this process; zeros = a healthy NCCL. Operations are counted from 1, as they are launched. */
typedef struct nccl_mock_controls {
    int version;        /* what ncclGetVersion says; 0 = the header's */
    int progress_polls; /* calls answer ncclInProgress for so many polls, and take effect only then */
    int delay_steps;    /* a running operation needs so many more looks at its stream */
    int hang_at;        /* this operation never completes, and its peers' with it */
    int error_at;  /* this operation never completes, and error becomes the asynchronous error */
    int refuse_at; /* the call of this operation returns error at once */
    int die_at;    /* this operation kills the process with SIGKILL while it runs */
    ncclResult_t error;  /* of error_at and refuse_at */
    bool no_id;          /* ncclGetUniqueId fails */
    bool no_join;        /* ncclCommInitRankConfig never gets anywhere */
    bool no_memory;      /* ncclMemAlloc fails */
    bool stuck_abort;    /* ncclCommAbort does not return for a minute */
    bool stuck_finalize; /* ncclCommFinalize stays in progress */
} nccl_mock_controls;
extern nccl_mock_controls nccl_mock;

/* What this process holds and has done. */
typedef struct nccl_mock_counts {
    int comms, registrations, allocations;                  /* alive */
    int launches, groups, aborts, finalized, native_splits; /* so far */
    int misuses; /* calls that the documentation forbids; each is also written to stderr */
} nccl_mock_counts;
extern nccl_mock_counts nccl_mock_count;

/* The device. step is called with a copy of state, again and again, until it returns true; what is behind it
 * in the stream waits. Replaying a graph starts with the state as it was handed over. */
bool nccl_mock_enqueue(cudaStream_t stream, bool (*step)(void *state), const void *state,
                       size_t bytes);
/* True if the stream is being captured: then the graph calls release(user) when it is gone. */
bool nccl_mock_retain(cudaStream_t stream, void (*release)(void *user), void *user);
void nccl_mock_advance(void); /* let the streams of this thread's device go on; from any thread */
bool nccl_mock_is_idle(void); /* nothing that touches memory is queued on this thread's device */
bool nccl_mock_is_device_memory(const void *memory, size_t bytes);
void *nccl_mock_device_alloc(size_t bytes);
void nccl_mock_device_free(void *memory);

#endif
