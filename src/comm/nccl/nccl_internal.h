/* Structs of a rank, private prototypes
 *
 * Read the structs in this order: the hub (one per rank), its communicators, the work (a started
 * operation), and the record of an operation, which error messages quote. */

#pragma once

#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif

#include "comm/nccl/nccl.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cuda_runtime_api.h>
#include <nccl.h>

#if NCCL_VERSION_CODE < NCCL_VERSION(2, 15, 1)
#error "dtrain_nccl.h needs the header of NCCL 2.15.1 or newer"
#endif

#define DTRAIN_NCCL_HAS_SPLIT (NCCL_VERSION_CODE >= NCCL_VERSION(2, 18, 1))
#define DTRAIN_NCCL_HAS_MEMORY (NCCL_VERSION_CODE >= NCCL_VERSION(2, 19, 1))

#if defined(__GNUC__)
#define DTRAIN_NCCL_PRINTF(at, first) __attribute__((format(printf, at, first)))
#else
#define DTRAIN_NCCL_PRINTF(at, first)
#endif

/* Return the error of a failed call; it has already set its error sentence. */
#define DTRAIN_NCCL_TRY(call)                                             \
    do {                                                                  \
        const dtrain_result dtrain_nccl__status = (call);                 \
        if (dtrain_nccl__status != DTRAIN_OK) return dtrain_nccl__status; \
    } while (0)

/* Mark a private function that several files use. The joined file makes these functions static. */
#ifndef DTRAIN_NCCL__PRIVATE
#define DTRAIN_NCCL__PRIVATE __attribute__((visibility("hidden"))) extern
#endif

/* clang-format off */
#if DTRAIN_NCCL_HAS_SPLIT
#define DTRAIN_NCCL_LIST_SPLIT(X) X(CommSplit)
#else
#define DTRAIN_NCCL_LIST_SPLIT(X)
#endif
#if DTRAIN_NCCL_HAS_MEMORY
#define DTRAIN_NCCL_LIST_MEMORY(X) X(MemAlloc) X(MemFree) X(CommRegister) X(CommDeregister)
#else
#define DTRAIN_NCCL_LIST_MEMORY(X)
#endif
#define DTRAIN_NCCL_LIST(X)                                                                 \
    X(GetVersion) X(GetUniqueId) X(GetErrorString) X(GetLastError)                          \
    X(CommCount) X(CommCuDevice) X(CommUserRank) X(CommInitRankConfig) X(CommFinalize)      \
    X(CommDestroy) X(CommAbort) X(CommGetAsyncError)                                        \
    X(AllReduce) X(Reduce) X(Broadcast) X(ReduceScatter) X(AllGather) X(Send) X(Recv)       \
    X(GroupStart) X(GroupEnd) DTRAIN_NCCL_LIST_SPLIT(X) DTRAIN_NCCL_LIST_MEMORY(X)
/* clang-format on */

typedef struct dtrain_nccl__library {
#define DTRAIN_NCCL_POINTER(name) __typeof__(&nccl##name) name; /* AllReduce: ncclAllReduce */
    DTRAIN_NCCL_LIST(DTRAIN_NCCL_POINTER)
#undef DTRAIN_NCCL_POINTER
} dtrain_nccl__library;

#define DTRAIN_NCCL_RECORDS 64 /* records, each with an event, that a communicator begins with */

#define DTRAIN_NCCL_TEXT 1000

typedef struct dtrain_nccl__hub dtrain_nccl__hub;

/* The record of a recent operation of a communicator, which errors compare across ranks. A new
 * operation reuses the oldest record, unless the program still has to wait for its operation. */
typedef struct dtrain_nccl__record {
    struct dtrain_nccl__record *next; /* newer */
    uint64_t number; /* from 1; collectives and messages are counted separately; 0: unused. A
                        collective has the same number on every rank */
    dtrain_collective what;
    dtrain_event *done;
    bool waited_for; /* true if the program no longer has the work, or the record is unused */
    bool launched;
    bool captured; /* true if its event belongs to a graph and cannot be queried */
} dtrain_nccl__record;

typedef struct dtrain_nccl__comm {
    dtrain_comm base;
    dtrain_nccl__hub *hub;
    struct dtrain_nccl__comm *next; /* next older one; the world's is the oldest */
    struct dtrain_nccl__lane *lane; /* the lane of its last operation */
    ncclComm_t nccl;
    bool captured; /* true if a graph has recorded operations of it */
    bool dead;     /* true from its abort on; code and text have the reason */
    dtrain_result code;
    char text[DTRAIN_NCCL_TEXT];
    uint32_t abort_state; /* atomic: 0 = not aborted, 1 = in ncclCommAbort, 2 = aborted */
    uint32_t split_count;
    char name[64]; /* such as "world" or "world/1.0"; the same on all its ranks */
    uint64_t collectives, point_to_point;
    dtrain_nccl__record *oldest, *newest;
} dtrain_nccl__comm;

/* A bounce buffer for operations with a host buffer: pinned memory and as much device memory. */
typedef struct dtrain_nccl__block {
    struct dtrain_nccl__block *next;
    size_t bytes;
    void *host, *device;
} dtrain_nccl__block;

typedef struct dtrain_nccl__work {
    dtrain_work base;
    struct dtrain_nccl__work *next; /* in the pool, or in the group to launch */
    dtrain_nccl__record *record;
    dtrain_collective what; /* the operation; with a count of 0, an operation on `single` */
    const void *send;       /* device memory: the caller's or the block's; likewise recv */
    void *recv;
    dtrain_nccl__block *block; /* bounce buffer; NULL: both buffers are device memory */
    void *host_recv;           /* host buffer for the result in the block, or NULL */
    int32_t single;            /* the element that an operation with a count of 0 sends */
    bool captured; /* true if it is part of a graph: it does not run now, its event has no state */
    bool done;     /* true if it is known to be done and no longer counts as in flight */
} dtrain_nccl__work;

/* Memory from dtrain_comm_alloc. */
typedef struct dtrain_nccl__memory {
    struct dtrain_nccl__memory *next;
    void *pointer, *handle;
    size_t bytes;
    dtrain_nccl__comm *comm; /* communicator where it is registered; NULL: none */
} dtrain_nccl__memory;

/* An event that is recorded in its stream again whenever the stream has passed it. A stream that
 * does not pass the event within the deadline is stuck. */
typedef struct dtrain_nccl__stream_mark {
    dtrain_event *event;
    dtrain_stream *stream;
    bool recorded;
    double waited;
} dtrain_nccl__stream_mark;

/* A stream for communication. */
typedef struct dtrain_nccl__lane {
    dtrain_stream *stream; /* NULL: not created */
    cudaStream_t native;
} dtrain_nccl__lane;

enum { DTRAIN_NCCL__LANES = 2, DTRAIN_NCCL__MARKS = DTRAIN_NCCL__LANES + 1 };

struct dtrain_nccl__hub {
    dtrain_world *world;
    dtrain_device *device;
    int device_index; /* CUDA's index of the device; current in every thread that calls NCCL */
    dtrain_allocator allocator;
    dtrain_nccl__library nccl;
    uint32_t version;
    bool guest;                     /* true if the world was made by dtrain_world_join */
    const dtrain_nccl_given *given; /* the host's, until the communicator is created; or NULL */
    double deadline;
    dtrain_nccl__lane lanes[DTRAIN_NCCL__LANES]; /* 0: all communicators; 1: the tensor axis */
    dtrain_event *ready;
    dtrain_nccl__stream_mark marks[DTRAIN_NCCL__MARKS]; /* of the compute stream, then of lanes */
    dtrain_nccl__comm *comms;
    dtrain_nccl__work *pool, *group, **group_end;
    int group_balance;          /* sends minus receives in the group */
    dtrain_nccl__block *blocks; /* free blocks, smallest first */
    dtrain_nccl__memory *memory;
    double last_watch;  /* time of the last dtrain_nccl__watch that polled, in seconds */
    bool closing;       /* true during destruction: failures are not sent to other ranks */
    bool stuck;         /* true if an abort has not returned: its thread still uses the structs */
    dtrain_result code; /* the first failure; DTRAIN_OK: none */
    char text[DTRAIN_NCCL_TEXT];
};

/* comm/nccl/library.c */
DTRAIN_NCCL__PRIVATE const char *dtrain_nccl__version_text(uint32_t code, char text[24]);
DTRAIN_NCCL__PRIVATE dtrain_result dtrain_nccl__load(dtrain_nccl__library *nccl, uint32_t *version);
DTRAIN_NCCL__PRIVATE dtrain_result dtrain_nccl__code(ncclResult_t result);

/* comm/nccl/rank.c */
DTRAIN_NCCL__PRIVATE void *dtrain_nccl__alloc(dtrain_nccl__hub *hub, size_t bytes);
DTRAIN_NCCL__PRIVATE void dtrain_nccl__free(dtrain_nccl__hub *hub, void *memory, size_t bytes);
DTRAIN_NCCL__PRIVATE const char *dtrain_nccl__strip_rank(const dtrain_nccl__hub *hub,
                                                         const char *text);
DTRAIN_NCCL__PRIVATE const char *dtrain_nccl__call_name(uint32_t kind);
DTRAIN_NCCL__PRIVATE bool dtrain_nccl__is_point_to_point(uint32_t kind);
DTRAIN_NCCL__PRIVATE void dtrain_nccl__describe(const dtrain_nccl__comm *comm,
                                                const dtrain_nccl__record *record, char *text,
                                                size_t room);

/* comm/nccl/failure.c */
DTRAIN_NCCL__PRIVATE void dtrain_nccl__sleep(long microseconds);
DTRAIN_NCCL__PRIVATE void dtrain_nccl__abort_one(dtrain_nccl__comm *comm);
DTRAIN_NCCL__PRIVATE void dtrain_nccl__await_aborts(dtrain_nccl__hub *hub);
DTRAIN_NCCL__PRIVATE void dtrain_nccl__drop_graphs(dtrain_nccl__hub *hub);
DTRAIN_NCCL__PRIVATE dtrain_result dtrain_nccl__hub_error(dtrain_nccl__hub *hub);
DTRAIN_NCCL__PRIVATE dtrain_result dtrain_nccl__comm_error(const dtrain_nccl__comm *comm);
DTRAIN_NCCL_PRINTF(3, 4)
DTRAIN_NCCL__PRIVATE dtrain_result dtrain_nccl__fail(dtrain_nccl__hub *hub, dtrain_result code,
                                                     const char *format, ...);
DTRAIN_NCCL__PRIVATE dtrain_result dtrain_nccl__fail_call(dtrain_nccl__hub *hub, ncclComm_t nccl,
                                                          ncclResult_t result, const char *call);

/* comm/nccl/wait.c */
DTRAIN_NCCL__PRIVATE dtrain_result dtrain_nccl__poll(dtrain_nccl__hub *hub, const char *call);
DTRAIN_NCCL__PRIVATE dtrain_result dtrain_nccl__watch(void *user);
DTRAIN_NCCL__PRIVATE dtrain_result dtrain_nccl__complete(dtrain_nccl__hub *hub, ncclComm_t nccl,
                                                         ncclResult_t result, const char *call);
DTRAIN_NCCL__PRIVATE dtrain_result dtrain_nccl__await_event(dtrain_nccl__hub *hub,
                                                            const dtrain_nccl__record *record,
                                                            const char *call);
DTRAIN_NCCL__PRIVATE bool dtrain_nccl__capturing(dtrain_nccl__hub *hub);

/* comm/nccl/operations.c */
DTRAIN_NCCL__PRIVATE dtrain_result dtrain_nccl__flush(dtrain_nccl__hub *hub);
DTRAIN_NCCL__PRIVATE dtrain_result dtrain_nccl__start(dtrain_comm *base,
                                                      const dtrain_collective *what,
                                                      dtrain_work **out);
DTRAIN_NCCL__PRIVATE dtrain_result dtrain_nccl__wait(dtrain_work *base);
DTRAIN_NCCL__PRIVATE dtrain_result dtrain_nccl__test(dtrain_work *base, bool *done);
DTRAIN_NCCL__PRIVATE dtrain_result dtrain_nccl__fail_entry(dtrain_comm *base, dtrain_result code,
                                                           const char *text);

/* comm/nccl/memory.c */
DTRAIN_NCCL__PRIVATE dtrain_result dtrain_nccl__register(dtrain_nccl__comm *comm,
                                                         dtrain_nccl__memory *memory);
DTRAIN_NCCL__PRIVATE void dtrain_nccl__deregister(dtrain_nccl__memory *memory);
DTRAIN_NCCL__PRIVATE void dtrain_nccl__memory_drop(dtrain_nccl__hub *hub,
                                                   dtrain_nccl__memory *memory);
DTRAIN_NCCL__PRIVATE dtrain_result dtrain_nccl__alloc_entry(dtrain_comm *base, size_t bytes,
                                                            void **out);
DTRAIN_NCCL__PRIVATE void dtrain_nccl__free_entry(dtrain_comm *base, void *pointer, size_t bytes);

/* comm/nccl/create.c */
DTRAIN_NCCL__PRIVATE dtrain_result dtrain_nccl__add_record(dtrain_nccl__comm *comm);
DTRAIN_NCCL__PRIVATE dtrain_result dtrain_nccl__comm_make(dtrain_nccl__hub *hub, int size, int rank,
                                                          const int *world_ranks, const char *name,
                                                          dtrain_nccl__comm **out);
DTRAIN_NCCL__PRIVATE void dtrain_nccl__comm_free(dtrain_nccl__comm *comm);
DTRAIN_NCCL__PRIVATE dtrain_result dtrain_nccl__comm_init(dtrain_nccl__comm *comm,
                                                          const ncclUniqueId *id);
