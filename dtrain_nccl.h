/* dtrain_nccl.h: dtrain's communicator over NCCL (2.15 or newer), for ranks with one GPU each.

   Do this in ONE C or C++ file, before any other include:

       #define DTRAIN_NCCL_IMPLEMENTATION
       #include "dtrain_nccl.h"

   This file can also define DTRAIN_IMPLEMENTATION. Then

       dtrain_launch_desc desc = {.rank_count = 8};
       desc.device_ops = dtrain_cuda_device_ops();
       desc.comm_ops = dtrain_nccl_comm_ops();

       cc -O2 train.c dtrain_cuda.o -I/usr/local/cuda/include -L/usr/local/cuda/lib64 \
          -lcudart -lcublasLt -lstdc++ -lm -lpthread -ldl

   A program that calls dtrain_world_join sets comm_ops in dtrain_join_desc. Its comm_given can pass
   an NCCL communicator or a unique id of the program: see dtrain_nccl_given.

   The first world that needs libnccl.so.2 opens it. So the program also starts on machines without
   NCCL, and reports that NCCL is missing only when it needs NCCL.

   Contents, the files that are joined to this file:
       src/comm/nccl/nccl.h                 The public calls of the NCCL communicator
       src/comm/nccl/library.c              Opening the NCCL library
       src/comm/nccl/nccl_internal.h        Structs of a rank, private prototypes
       src/comm/nccl/rank.c                 Objects of a rank, names of operations
       src/comm/nccl/failure.c              Failure: report, abort, repeat
       src/comm/nccl/wait.c                 Waiting while watching for failures
       src/comm/nccl/operations.c           Starting and waiting for operations
       src/comm/nccl/memory.c               Registered memory, for dtrain_comm_alloc
       src/comm/nccl/create.c               Create, split, destroy communicators

   Compile time, in the file with DTRAIN_NCCL_IMPLEMENTATION:
       DTRAIN_NCCL_LIBRARY    name or path of the library to open; "libnccl.so.2"
       DTRAIN_NCCL_LINKED     link NCCL (-lnccl, or libnccl_static.a) instead of opening it

   Differences from the local communicator
       Order     Sends and receives keep their order among the collectives: as in any NCCL program,
                 both ranks must start them in matching order. Consecutive sends and receives are
                 collected. The next dtrain_work_wait, dtrain_work_test or collective launches
                 them. If there are as many sends as receives, they become one NCCL group: such an
                 exchange cannot deadlock, whatever the order of its messages. Otherwise they are
                 launched in their order, and a second send to, or receive from, the same rank
                 begins a new group.
       Streams   Operations run in the order in which they were started, on one stream. From NCCL
                 2.26 on, the tensor axis of a mesh can have a second stream: the next layer waits
                 for sums of this axis, which then do not queue after gradients of the data axis.
                 It needs kernels that start in the order of the host's calls; otherwise two
                 communicators can deadlock. So there is a second stream only if the program has set
                 NCCL_LAUNCH_ORDER_IMPLICIT=1 in its environment. A guest reads no environment: its
                 host sets dtrain_nccl_given.launch_ordered.
       Bits      NCCL chooses the order of additions, and rounds partial sums of bf16 and fp16. So
                 bits can differ from the local communicator's, and between world sizes.
                 DTRAIN_REDUCE_MEAN is the sum, multiplied by 1/N in fp32; ncclAvg would round 1/N
                 first.
       Buffers   must be aligned to their elements. Host buffers are staged through pinned memory,
                 and the host blocks until they are done: use them for small records and initial
                 values. Memory from dtrain_comm_alloc is fastest.
       Mistakes  Ranks do not compare operations in advance: a mismatch ends in a timeout, and the
                 error names the collective on both sides. An all-to-all consists of sends and
                 receives: NCCL does not compare their counts, which must agree.

   Failure. NCCL has no deadline and notices neither a killed nor a stuck peer. So every wait polls
   (1) the world's deadline, (2) NCCL's asynchronous error, and (3) the control plane, which knows
   the ranks that died or reported a failure. This includes the host's waits for the GPU, through
   dtrain_device.while_waiting. The first failure is sent to all ranks. Every NCCL communicator of
   the world is aborted, which ends spinning kernels; every later call returns the same error.
   Buffers of aborted operations have undefined contents. The failure also drops captured graphs,
   because ncclCommAbort waits for graphs with its collectives: launching one is then an error.
   A host destroys the graphs that it captured itself, before it leaves the world. For the same
   reason, destroy a communicator of dtrain_comm_split only after the graphs that use it. */

#ifndef DTRAIN_NCCL_H
#define DTRAIN_NCCL_H

#if defined(DTRAIN_NCCL_IMPLEMENTATION) && !defined(_GNU_SOURCE)
#define _GNU_SOURCE 1
#endif

/* ==== src/comm/nccl/nccl.h ==================================================================== */

/* The public calls of the NCCL communicator */

#include "dtrain.h"

#ifdef __cplusplus
extern "C" {
#endif

/* NCCL objects of the host, for dtrain_join_desc.comm_given. If comm_given is NULL, dtrain makes a
 * unique id, as in a launch. dtrain_world_join reads the struct. dtrain never destroys, aborts or
 * finalizes the host's objects.
 *
 *     comm   The world's communicator is split from the host's; this needs NCCL 2.18. All ranks of
 *            the host's communicator must join. The two share no resources: one can end or fail
 *            without the other.
 *     id     The world's communicator is made with the id of rank 0; ids of other ranks are not
 *            read. The host must not use the id again. */
typedef struct dtrain_nccl_given {
    struct ncclComm *comm; /* ncclComm_t of the members, with their ranks and GPUs; or NULL */
    const void *id;        /* ncclUniqueId; or NULL */
    bool launch_ordered;   /* true if the host has set NCCL_LAUNCH_ORDER_IMPLICIT=1, see Streams */
} dtrain_nccl_given;

/* Return the table for dtrain_launch_desc.comm_ops and dtrain_join_desc.comm_ops. The table is
 * static. A launched program with a tensor axis should set NCCL_LAUNCH_ORDER_IMPLICIT=1 in its
 * environment before the launch: see Streams above. */
DTRAIN_API const dtrain_comm_ops *dtrain_nccl_comm_ops(void);

#ifdef __cplusplus
}
#endif

#endif /* DTRAIN_NCCL_H */

#if defined(DTRAIN_NCCL_IMPLEMENTATION) && !defined(DTRAIN_NCCL_IMPLEMENTED)
#define DTRAIN_NCCL_IMPLEMENTED

#define DTRAIN_NCCL__PRIVATE static

/* ==== src/comm/nccl/library.c ================================================================= */

/* Opening the NCCL library
 *
 * One list declares the table of functions and fills it. A library older than the header is refused
 * before any other call, so the compile-time checks are enough: every function in the list exists.
 * NCCL promises that old programs run with new libraries, but not the reverse. */

/* ==== src/comm/nccl/nccl_internal.h =========================================================== */

/* Structs of a rank, private prototypes
 *
 * Read the structs in this order: the hub (one per rank), its communicators, the work (a started
 * operation), and the record of an operation, which error messages quote. */

#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif

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

#ifndef DTRAIN_NCCL_LIBRARY
#define DTRAIN_NCCL_LIBRARY "libnccl.so.2"
#endif

#ifdef DTRAIN_NCCL_LINKED
static dtrain_result dtrain_nccl__open(dtrain_nccl__library *nccl)
{
#define DTRAIN_NCCL_TAKE(name) nccl->name = &nccl##name;
    DTRAIN_NCCL_LIST(DTRAIN_NCCL_TAKE)
#undef DTRAIN_NCCL_TAKE
    return DTRAIN_OK;
}
#else
/* Find a function. dlsym returns an object pointer; POSIX allows it to hold a function's address,
 * so its bytes are copied. */
static bool dtrain_nccl__find(void *library, const char *name, void *function)
{
    void *symbol = dlsym(library, name);
    memcpy(function, &symbol, sizeof symbol);
    return symbol != NULL;
}

/* Open the library and fill the table. The handle is never closed, because NCCL's threads can be
 * inside the library until the process ends. */
static dtrain_result dtrain_nccl__open(dtrain_nccl__library *nccl)
{
    const char *missing = NULL;
    void *library = dlopen(DTRAIN_NCCL_LIBRARY, RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "NCCL could not be opened (%s); install it, add its folder to "
                           "LD_LIBRARY_PATH, or leave comm_ops NULL for the local communicator",
                           dlerror());
#define DTRAIN_NCCL_FIND(name)                                              \
    if (!dtrain_nccl__find(library, "nccl" #name, &nccl->name) && !missing) \
        missing = "ncc"                                                     \
                  "l" #name;
    DTRAIN_NCCL_LIST(DTRAIN_NCCL_FIND)
#undef DTRAIN_NCCL_FIND
    /* An older library lacks functions too; its error should name the version. */
    if (!missing || nccl->GetVersion) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED, "%s is not an NCCL library: it has no %s",
                       DTRAIN_NCCL_LIBRARY, missing);
}
#endif

/* Write a version as text: 21801 becomes "2.18.1". */
DTRAIN_NCCL__PRIVATE const char *dtrain_nccl__version_text(uint32_t code, char text[24])
{
    const unsigned base = code >= 10000 ? 10000 : 1000; /* thousands until NCCL 2.8 */
    snprintf(text, 24, "%u.%u.%u", code / base, code % base / 100, code % 100);
    return text;
}

DTRAIN_NCCL__PRIVATE dtrain_result dtrain_nccl__load(dtrain_nccl__library *nccl, uint32_t *version)
{
    char header[24], library[24];
    int code = 0;
    memset(nccl, 0, sizeof *nccl);
    DTRAIN_NCCL_TRY(dtrain_nccl__open(nccl));
    const ncclResult_t result = nccl->GetVersion(&code);
    if (result != ncclSuccess)
        return dtrain_fail(DTRAIN_ERROR_SYSTEM, "ncclGetVersion failed with ncclResult_t %d",
                           (int)result);
    *version = (uint32_t)code;
    if (code >= NCCL_VERSION_CODE) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                       "the NCCL library found is version %s, but this program was compiled with "
                       "the header of %s; install that version or a newer one, or compile with the "
                       "older header",
                       dtrain_nccl__version_text(*version, library),
                       dtrain_nccl__version_text(NCCL_VERSION_CODE, header));
}

DTRAIN_NCCL__PRIVATE dtrain_result dtrain_nccl__code(ncclResult_t result)
{
    switch (result) {
    case ncclSuccess: return DTRAIN_OK;
    case ncclInvalidArgument: return DTRAIN_ERROR_ARGUMENT;
    case ncclInvalidUsage: return DTRAIN_ERROR_USAGE;
    case ncclRemoteError: return DTRAIN_ERROR_PEER;
    case ncclInternalError: return DTRAIN_ERROR_INTERNAL;
    default: return DTRAIN_ERROR_SYSTEM;
    }
}

/* ==== src/comm/nccl/rank.c ==================================================================== */

/* Objects of a rank, names of operations
 *
 *     hub                       one per rank: library, streams, bounce buffers, the failure
 *      |-- comm  (the world)    an NCCL communicator and a list of its last operations
 *      |-- comm  (a split)
 *
 * The communicators of a rank share one stream of high priority. Operations run in the order in
 * which they were started, so kernels of two communicators never wait for each other's SMs.
 *
 * The tensor axis can have a second stream. The next layer waits for sums of this axis; on one
 * stream they would queue after buckets of the data axis, which are needed only by the optimizer.
 * Two streams can deadlock: a kernel of one communicator holds SMs that the other needs, and on the
 * peer it is the reverse. They do not if kernels start in the same order on all ranks: then the
 * first unfinished kernel in this order starts on each of its ranks, as all kernels before it are
 * done. The host launches in one order on all ranks (launch_ordered). From NCCL 2.26 on, kernels
 * start in the host's order if NCCL_LAUNCH_ORDER_IMPLICIT is set; else there is one stream.
 *
 *     compute   --- gradients --| ready |----- more backward -----| wait |-- optimizer --
 *     comm                          '-> all-reduce --| done |--------'
 *
 * Events are created with the communicator and reused, without a query. A stream that waits for an
 * event waits for the work before its last record; later records do not change this. So a step
 * neither allocates nor polls in the steady state, and can be captured in a graph. */

DTRAIN_NCCL__PRIVATE void *dtrain_nccl__alloc(dtrain_nccl__hub *hub, size_t bytes)
{
    void *memory = hub->allocator.alloc(hub->allocator.user, bytes);
    if (memory) memset(memory, 0, bytes);
    else
        dtrain_fail(DTRAIN_ERROR_MEMORY, "no memory for %zu bytes of the NCCL communicator", bytes);
    return memory;
}

DTRAIN_NCCL__PRIVATE void dtrain_nccl__free(dtrain_nccl__hub *hub, void *memory, size_t bytes)
{
    if (memory) hub->allocator.free(hub->allocator.user, memory, bytes);
}

/* Remove "rank 3: " from the start of an error sentence: dtrain_fail will add it again. */
DTRAIN_NCCL__PRIVATE const char *dtrain_nccl__strip_rank(const dtrain_nccl__hub *hub,
                                                         const char *text)
{
    char prefix[32];
    snprintf(prefix, sizeof prefix, "rank %d: ", dtrain_world_rank(hub->world));
    return strncmp(text, prefix, strlen(prefix)) == 0 ? text + strlen(prefix) : text;
}

/* ---- Names ------------------------------------------------------------------------------------*/

/* Indexed by dtrain_collective_kind. */
static const char *const dtrain_nccl__names[][2] = {{"?", "?"},
                                                    {"dtrain_all_reduce", "all-reduce"},
                                                    {"dtrain_reduce_scatter", "reduce-scatter"},
                                                    {"dtrain_all_gather", "all-gather"},
                                                    {"dtrain_broadcast", "broadcast"},
                                                    {"dtrain_reduce", "reduce"},
                                                    {"dtrain_barrier", "barrier"},
                                                    {"dtrain_send", "send"},
                                                    {"dtrain_recv", "recv"},
                                                    {"dtrain_comm_split", "split"},
                                                    {"dtrain_all_to_all", "all-to-all"}};

DTRAIN_NCCL__PRIVATE const char *dtrain_nccl__call_name(uint32_t kind)
{
    return dtrain_nccl__names[kind][0];
}

DTRAIN_NCCL__PRIVATE bool dtrain_nccl__is_point_to_point(uint32_t kind)
{
    return kind == DTRAIN_COLLECTIVE_SEND || kind == DTRAIN_COLLECTIVE_RECV;
}

/* Describe an operation in the format that ranks compare, such as "collective 17 on world
 * [all-reduce sum f32 count 100]". */
DTRAIN_NCCL__PRIVATE void dtrain_nccl__describe(const dtrain_nccl__comm *comm,
                                                const dtrain_nccl__record *record, char *text,
                                                size_t room)
{
    static const char *const ops[] = {"", " sum", " mean", " min", " max", " prod"};
    const dtrain_collective *what = &record->what;
    const bool point = dtrain_nccl__is_point_to_point(what->kind);
    char counts[48] = "", root[24] = "";
    if (what->kind != DTRAIN_COLLECTIVE_BARRIER)
        snprintf(counts, sizeof counts, " %s count %zu", dtrain_dtype_name(what->dtype),
                 what->count);
    if (what->root >= 0) snprintf(root, sizeof root, " %s %d", point ? "peer" : "root", what->root);
    snprintf(text, room, "%s %llu on %s [%s%s%s%s]", point ? "transfer" : "collective",
             (unsigned long long)record->number, comm->name, dtrain_nccl__names[what->kind][1],
             ops[what->op], counts, root);
}

/* ==== src/comm/nccl/failure.c ================================================================= */

/* Failure: report, abort, repeat
 *
 * A failure takes four steps:
 *
 *     1. the hub stores its text, which says what this rank was doing
 *     2. the control plane sends it to the other ranks, which poll it while they wait
 *     3. all NCCL communicators of the hub are aborted, and the device's graphs are dropped
 *     4. every later call returns the text again
 *
 * A separate thread aborts each communicator. Aborts one after another can deadlock: the first
 * abort frees device memory, this waits for kernels, and these wait for the second communicator. An
 * NCCL group would avoid it from 2.22 on. Threads avoid it in every version, and they put a
 * deadline on a call that is known to hang. A thread that does not return is abandoned, with the
 * memory it uses.
 *
 * Graphs are dropped because ncclCommAbort waits for them: a captured collective holds a reference
 * to its communicator until its graph, or the capture in progress, is destroyed. ncclCommAbort
 * first sets the flag that ends running kernels, so a graph that is being replayed ends too. The
 * host of a guest destroys its own graphs; the world waits for them when it ends. */

#define DTRAIN_NCCL_ABORT_SECONDS 30.0 /* limit of the wait, unless the deadline is shorter */

static void *dtrain_nccl__abort_thread(void *user)
{
    dtrain_nccl__comm *comm = (dtrain_nccl__comm *)user;
    cudaSetDevice(comm->hub->device_index); /* a new thread has device 0 */
    comm->hub->nccl.CommAbort(comm->nccl);
    __atomic_store_n(&comm->abort_state, 2u, __ATOMIC_RELEASE);
    return NULL;
}

static bool dtrain_nccl__aborting(const dtrain_nccl__comm *comm)
{
    return __atomic_load_n(&comm->abort_state, __ATOMIC_ACQUIRE) == 1u;
}

DTRAIN_NCCL__PRIVATE void dtrain_nccl__sleep(long microseconds)
{
    const struct timespec span = {0, microseconds * 1000};
    nanosleep(&span, NULL);
}

DTRAIN_NCCL__PRIVATE void dtrain_nccl__abort_one(dtrain_nccl__comm *comm)
{
    pthread_attr_t attributes;
    pthread_t thread;
    if (!comm->nccl || comm->abort_state) return;
    comm->abort_state = 1;
    int error = pthread_attr_init(&attributes);
    if (!error) {
        pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
        error = pthread_create(&thread, &attributes, dtrain_nccl__abort_thread, comm);
        pthread_attr_destroy(&attributes);
    }
    if (error)
        dtrain_log(comm->base.world, DTRAIN_LOG_ERROR,
                   "NCCL communicator %s cannot be aborted: no thread could be started (%s)",
                   comm->name, strerror(error));
}

DTRAIN_NCCL__PRIVATE void dtrain_nccl__await_aborts(dtrain_nccl__hub *hub)
{
    const double limit =
        hub->deadline < DTRAIN_NCCL_ABORT_SECONDS ? hub->deadline : DTRAIN_NCCL_ABORT_SECONDS;
    const double begin = dtrain_seconds();
    for (dtrain_nccl__comm *comm = hub->comms; comm; comm = comm->next) {
        if (hub->guest && comm->captured && !hub->closing) continue; /* host's graphs hold it */
        while (dtrain_nccl__aborting(comm) && dtrain_seconds() - begin < limit)
            dtrain_nccl__sleep(100);
        if (!dtrain_nccl__aborting(comm)) continue;
        hub->stuck = true;
        dtrain_log(hub->world, DTRAIN_LOG_ERROR,
                   "ncclCommAbort of %s has not returned after %.1f s; it is abandoned%s",
                   comm->name, limit,
                   comm->captured ? ". It waits until graphs with its operations are destroyed"
                                  : "");
    }
}

DTRAIN_NCCL__PRIVATE void dtrain_nccl__drop_graphs(dtrain_nccl__hub *hub)
{
    if (hub->device->ops->graphs_drop) hub->device->ops->graphs_drop(hub->device);
}

static void dtrain_nccl__abort_all(dtrain_nccl__hub *hub)
{
    for (dtrain_nccl__comm *comm = hub->comms; comm; comm = comm->next) {
        if (comm->dead) continue;
        comm->dead = true;
        comm->code = hub->code;
        memcpy(comm->text, hub->text, sizeof comm->text);
        dtrain_nccl__abort_one(comm);
    }
    dtrain_nccl__drop_graphs(hub);
    dtrain_nccl__await_aborts(hub);
    for (dtrain_nccl__memory *m = hub->memory; m; m = m->next) { /* registrations have ended */
        m->comm = NULL;
        m->handle = NULL;
    }
    hub->group = NULL;
    hub->group_end = &hub->group;
    hub->group_balance = 0;
}

/* ---- What this rank was doing -----------------------------------------------------------------*/

/* Return the oldest recorded operation of a communicator. Unused records precede it. */
static const dtrain_nccl__record *dtrain_nccl__oldest(const dtrain_nccl__comm *comm)
{
    const dtrain_nccl__record *record = comm->dead ? NULL : comm->oldest;
    while (record && !record->number) record = record->next;
    return record;
}

/* Describe the state of an operation. The event of a captured operation cannot be queried. During a
 * capture no event can be queried: the query would invalidate the capture. */
static const char *dtrain_nccl__state(dtrain_nccl__hub *hub, const dtrain_nccl__record *record)
{
    bool done = false;
    if (!record->launched) return "not launched";
    if (record->captured) return "in a graph";
    if (dtrain_nccl__capturing(hub) ||
        hub->device->ops->event_query(hub->device, record->done, &done) != DTRAIN_OK)
        return "unknown";
    return done ? "finished" : "not finished";
}

/* Append to `text`, for each communicator, the oldest unfinished operation and the number of
 * collectives started on this rank. If `text` is NULL, log all recorded operations instead. */
static void dtrain_nccl__report(dtrain_nccl__hub *hub, char *text, size_t room)
{
    size_t used = text ? strlen(text) : 0;
    for (dtrain_nccl__comm *comm = hub->comms; comm; comm = comm->next) {
        for (const dtrain_nccl__record *record = dtrain_nccl__oldest(comm); record;
             record = record->next) {
            const char *state = dtrain_nccl__state(hub, record);
            char what[200];
            if (text && (strncmp(state, "not ", 4) != 0 || used >= room)) continue;
            dtrain_nccl__describe(comm, record, what, sizeof what);
            if (!text) {
                dtrain_log(hub->world, DTRAIN_LOG_ERROR, "  %s: %s", what, state);
                continue;
            }
            snprintf(text + used, room - used, "; %s: %s, %llu collectives started", what, state,
                     (unsigned long long)comm->collectives);
            used = strlen(text);
            break;
        }
    }
}

/* Compare this rank's records with the world's first report. The report can name the collective in
 * which its rank is stuck, in the format of dtrain_nccl__describe. If this rank has called another
 * collective under the same number, the difference is the cause, and the error says so. */
static void dtrain_nccl__compare(dtrain_nccl__hub *hub)
{
    unsigned long long number;
    char name[64], theirs[128], key[256], mine[200];
    if (dtrain_world_poll(hub->world) == DTRAIN_OK) return;
    const char *report = dtrain_nccl__strip_rank(hub, dtrain_last_error());
    const char *found = strstr(report, "collective ");
    if (!found || sscanf(found, "collective %llu on %63s [%127[^]]]", &number, name, theirs) != 3)
        return;
    snprintf(key, sizeof key, "collective %llu on %s [%s]", number, name, theirs);
    if (!strstr(report, key)) return; /* the report was cut off */
    for (dtrain_nccl__comm *comm = hub->comms; comm; comm = comm->next) {
        if (strcmp(comm->name, name) != 0) continue;
        for (const dtrain_nccl__record *record = dtrain_nccl__oldest(comm); record;
             record = record->next) {
            if (record->number != number || dtrain_nccl__is_point_to_point(record->what.kind))
                continue;
            dtrain_nccl__describe(comm, record, mine, sizeof mine);
            if (strcmp(mine, key) == 0) return;
            hub->code = DTRAIN_ERROR_MISMATCH;
            snprintf(hub->text, sizeof hub->text,
                     "ranks disagree: this rank called %s; the other: %.700s", mine, report);
            return;
        }
    }
}

/* ---- Failing ----------------------------------------------------------------------------------*/

DTRAIN_NCCL__PRIVATE dtrain_result dtrain_nccl__hub_error(dtrain_nccl__hub *hub)
{
    return dtrain_fail(hub->code, "%s", hub->text);
}

/* Return the error with which a communicator was aborted. */
DTRAIN_NCCL__PRIVATE dtrain_result dtrain_nccl__comm_error(const dtrain_nccl__comm *comm)
{
    return dtrain_fail(comm->code, "%s", comm->text);
}

DTRAIN_NCCL_PRINTF(3, 4)
DTRAIN_NCCL__PRIVATE dtrain_result dtrain_nccl__fail(dtrain_nccl__hub *hub, dtrain_result code,
                                                     const char *format, ...)
{
    char text[sizeof hub->text];
    va_list args;
    if (hub->code != DTRAIN_OK) return dtrain_nccl__hub_error(hub);
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    snprintf(hub->text, sizeof hub->text, "%s", text);
    dtrain_nccl__report(hub, hub->text, sizeof hub->text);
    hub->code = code; /* from now on dtrain_nccl__watch ends every wait for the device */
    if (!hub->closing) {
        dtrain_world_abort(hub->world, code, hub->text);
        dtrain_nccl__compare(hub); /* the first report can be from another rank */
    }
    if (!hub->closing && (hub->code == DTRAIN_ERROR_TIMEOUT || hub->code == DTRAIN_ERROR_MISMATCH))
        dtrain_nccl__report(hub, NULL, 0);
    dtrain_nccl__abort_all(hub);
    return dtrain_nccl__hub_error(hub);
}

/* Fail with NCCL's text for `result` and its last error message. */
DTRAIN_NCCL__PRIVATE dtrain_result dtrain_nccl__fail_call(dtrain_nccl__hub *hub, ncclComm_t nccl,
                                                          ncclResult_t result, const char *call)
{
    const char *more = hub->nccl.GetLastError(nccl);
    return dtrain_nccl__fail(hub, dtrain_nccl__code(result), "%s: NCCL reports \"%s\"%s%s", call,
                             hub->nccl.GetErrorString(result), more && *more ? ": " : "",
                             more ? more : "");
}

/* ==== src/comm/nccl/wait.c ==================================================================== */

/* Waiting while watching for failures
 *
 * There are three waits:
 *
 *     complete      until a call of this rank takes effect. Communicators are non-blocking: while
 *                   NCCL returns ncclInProgress the kernel is not in the stream yet, and no event
 *                   can be recorded after it
 *     await_event   until an operation with a host buffer is done: the host polls its event
 *     watch         until the device has results for the program: the device calls it, because
 *                   NCCL kernels that these results need can wait for a dead rank
 *
 * Each wait polls the deadline, NCCL's asynchronous error, and the control plane. A gap between two
 * polls counts as at most one second, so a suspended job does not time out. */

typedef struct dtrain_nccl__timer {
    double last, waited;
    unsigned turns;
} dtrain_nccl__timer;

#define DTRAIN_NCCL_YIELDS 200u /* a launch takes microseconds; waiting for a peer takes longer */

/* Yield or sleep once, and add the time; false if the deadline has passed. */
static bool dtrain_nccl__timer_step(const dtrain_nccl__hub *hub, dtrain_nccl__timer *timer)
{
    const double now = dtrain_seconds(), gap = timer->turns ? now - timer->last : 0;
    timer->waited += gap < 1 ? gap : 1;
    timer->last = now;
    if (timer->turns++ < DTRAIN_NCCL_YIELDS) sched_yield();
    else dtrain_nccl__sleep(50);
    return timer->waited < hub->deadline;
}

/* Poll the control plane and NCCL's asynchronous errors. */
DTRAIN_NCCL__PRIVATE dtrain_result dtrain_nccl__poll(dtrain_nccl__hub *hub, const char *call)
{
    if (hub->code != DTRAIN_OK) return dtrain_nccl__hub_error(hub);
    if (dtrain_world_poll(hub->world) != DTRAIN_OK)
        return dtrain_nccl__fail(hub, DTRAIN_ERROR_PEER, "%s: %s", call,
                                 dtrain_nccl__strip_rank(hub, dtrain_last_error()));
    for (dtrain_nccl__comm *comm = hub->comms; comm; comm = comm->next) {
        ncclResult_t result = ncclSuccess;
        if (comm->dead || !comm->nccl) continue;
        const ncclResult_t asked = hub->nccl.CommGetAsyncError(comm->nccl, &result);
        if (asked != ncclSuccess) result = asked;
        if (result != ncclSuccess && result != ncclInProgress)
            return dtrain_nccl__fail_call(hub, comm->nccl, result, call);
    }
    return DTRAIN_OK;
}

/* Watch for failures while the host waits for the device (dtrain_device.while_waiting). It is
 * called often, and polls once a millisecond. */
DTRAIN_NCCL__PRIVATE dtrain_result dtrain_nccl__watch(void *user)
{
    dtrain_nccl__hub *hub = (dtrain_nccl__hub *)user;
    const dtrain_device_ops *ops = hub->device->ops;
    const double now = dtrain_seconds(), gap = now - hub->last_watch;
    if (hub->code != DTRAIN_OK) return dtrain_nccl__hub_error(hub);
    if (gap < 1e-3) return DTRAIN_OK;
    hub->last_watch = now;
    DTRAIN_NCCL_TRY(dtrain_nccl__poll(hub, "waiting for the device"));
    for (int i = 0; i < DTRAIN_NCCL__MARKS; i++) {
        /* If the stream has passed its mark, record the mark again; else add the time. */
        dtrain_nccl__stream_mark *mark = &hub->marks[i];
        dtrain_result result = DTRAIN_OK;
        bool passed = true;
        if (!mark->event) continue;
        if (mark->recorded) result = ops->event_query(hub->device, mark->event, &passed);
        mark->waited = passed ? 0 : mark->waited + (gap < 1 ? gap : 1);
        if (!passed && mark->waited >= hub->deadline) result = DTRAIN_ERROR_TIMEOUT;
        if (result == DTRAIN_OK && passed) {
            mark->recorded = true;
            result = ops->event_record(hub->device, mark->event, mark->stream);
        }
        if (result == DTRAIN_ERROR_TIMEOUT)
            return dtrain_nccl__fail(hub, result,
                                     "the %s stream of the device has not moved for %.1f s",
                                     i == 0   ? "compute"
                                     : i == 1 ? "communication"
                                              : "tensor axis' communication",
                                     hub->deadline);
        if (result != DTRAIN_OK)
            return dtrain_nccl__fail(hub, result, "%s",
                                     dtrain_nccl__strip_rank(hub, dtrain_last_error()));
    }
    return DTRAIN_OK;
}

/* Wait until a call on `nccl` has taken effect. `result` is the call's return value. */
DTRAIN_NCCL__PRIVATE dtrain_result dtrain_nccl__complete(dtrain_nccl__hub *hub, ncclComm_t nccl,
                                                         ncclResult_t result, const char *call)
{
    dtrain_nccl__timer timer = {0, 0, 0};
    while (result == ncclInProgress) {
        const ncclResult_t asked = hub->nccl.CommGetAsyncError(nccl, &result);
        if (asked != ncclSuccess) result = asked;
        if (result != ncclInProgress) break;
        DTRAIN_NCCL_TRY(dtrain_nccl__poll(hub, call));
        if (!dtrain_nccl__timer_step(hub, &timer))
            return dtrain_nccl__fail(hub, DTRAIN_ERROR_TIMEOUT,
                                     "%s: NCCL was still in progress after %.1f s; has every rank "
                                     "made this call?",
                                     call, hub->deadline);
    }
    return result == ncclSuccess ? DTRAIN_OK : dtrain_nccl__fail_call(hub, nccl, result, call);
}

/* Wait until the operation is done; then the host can use its buffers. */
DTRAIN_NCCL__PRIVATE dtrain_result dtrain_nccl__await_event(dtrain_nccl__hub *hub,
                                                            const dtrain_nccl__record *record,
                                                            const char *call)
{
    dtrain_nccl__timer timer = {0, 0, 0};
    for (;;) {
        bool done = false;
        if (hub->device->ops->event_query(hub->device, record->done, &done) != DTRAIN_OK)
            return dtrain_nccl__fail(hub, DTRAIN_ERROR_SYSTEM, "%s: %s", call,
                                     dtrain_nccl__strip_rank(hub, dtrain_last_error()));
        if (done) return DTRAIN_OK;
        DTRAIN_NCCL_TRY(dtrain_nccl__poll(hub, call));
        if (!dtrain_nccl__timer_step(hub, &timer))
            return dtrain_nccl__fail(hub, DTRAIN_ERROR_TIMEOUT, "%s: not finished after %.1f s",
                                     call, hub->deadline);
    }
}

/* True if a graph is being captured on the compute stream. Then no event can be queried. */
DTRAIN_NCCL__PRIVATE bool dtrain_nccl__capturing(dtrain_nccl__hub *hub)
{
    const dtrain_device_ops *ops = hub->device->ops;
    return ops->capturing && ops->capturing(hub->device);
}

/* ==== src/comm/nccl/operations.c ============================================================== */

/* Starting and waiting for operations
 *
 *     start   the communication stream waits for the compute stream; host buffers are copied to
 *             bounce buffers; NCCL is called; host results are copied out; an event is recorded
 *     wait    the compute stream waits for this event; the host waits only for a host buffer
 *
 * NCCL skips empty operations. So a barrier, and a collective with a count of 0, become the sum of
 * one integer. */

/* Return the bytes that this rank sends or, if `received`, receives. */
static size_t dtrain_nccl__bytes(const dtrain_nccl__comm *comm, const dtrain_collective *what,
                                 bool received)
{
    const bool root = what->root == comm->base.rank;
    size_t slices = 1;
    switch (what->kind) {
    case DTRAIN_COLLECTIVE_REDUCE_SCATTER: slices = received ? 1 : (size_t)comm->base.size; break;
    case DTRAIN_COLLECTIVE_SPLIT:
    case DTRAIN_COLLECTIVE_ALL_GATHER: slices = received ? (size_t)comm->base.size : 1; break;
    case DTRAIN_COLLECTIVE_ALL_TO_ALL: slices = (size_t)comm->base.size; break;
    case DTRAIN_COLLECTIVE_BROADCAST: slices = root != received; break;
    case DTRAIN_COLLECTIVE_REDUCE: slices = root || !received; break;
    case DTRAIN_COLLECTIVE_SEND: slices = !received; break;
    case DTRAIN_COLLECTIVE_RECV: slices = received; break;
    default: break;
    }
    return what->count * dtrain_dtype_bytes(what->dtype) * slices;
}

/* ---- Staging ----------------------------------------------------------------------------------*/

/* Take a block of at least `bytes`. New blocks have a power of two of bytes, and stay until the
 * world ends: freeing device memory waits for kernels, which can wait for other ranks. */
static dtrain_result dtrain_nccl__take_block(dtrain_nccl__hub *hub, size_t bytes,
                                             dtrain_nccl__block **out)
{
    const dtrain_device_ops *ops = hub->device->ops;
    size_t room = 4096;
    for (dtrain_nccl__block **link = &hub->blocks; *link; link = &(*link)->next) {
        if ((*link)->bytes < bytes) continue;
        *out = *link;
        *link = (*link)->next;
        return DTRAIN_OK;
    }
    while (room < bytes) room *= 2;
    dtrain_nccl__block *block = (dtrain_nccl__block *)dtrain_nccl__alloc(hub, sizeof *block);
    if (!block) return DTRAIN_ERROR_MEMORY;
    block->bytes = room;
    dtrain_result result = ops->host_alloc(hub->device, room, &block->host);
    if (result == DTRAIN_OK) result = ops->alloc(hub->device, room, &block->device);
    if (result != DTRAIN_OK) {
        if (block->host) ops->host_free(hub->device, block->host, room);
        dtrain_nccl__free(hub, block, sizeof *block);
        return result;
    }
    *out = block;
    return DTRAIN_OK;
}

/* Return a block. The list is sorted by size, so take_block finds the smallest that fits. */
static void dtrain_nccl__give_block(dtrain_nccl__hub *hub, dtrain_nccl__block *block)
{
    dtrain_nccl__block **link = &hub->blocks;
    while (*link && (*link)->bytes < block->bytes) link = &(*link)->next;
    block->next = *link;
    *link = block;
}

/* Choose the buffers that are staged, and copy the send buffer in. The block is | send | recv |, or
 * both at one place for an in-place operation. */
static dtrain_result dtrain_nccl__stage_in(dtrain_nccl__comm *comm, dtrain_nccl__work *work)
{
    dtrain_nccl__hub *hub = comm->hub;
    const dtrain_device_ops *ops = hub->device->ops;
    const dtrain_collective *what = &work->what;
    const size_t send_bytes = dtrain_nccl__bytes(comm, what, false);
    const size_t recv_bytes = dtrain_nccl__bytes(comm, what, true);
    const bool send_host = send_bytes && !ops->is_device_memory(hub->device, what->send);
    const bool recv_host = recv_bytes && !ops->is_device_memory(hub->device, what->recv);
    work->send = what->send;
    work->recv = what->recv;
    if (!send_host && !recv_host) return DTRAIN_OK;
    const size_t padded = (send_bytes + 255) / 256 * 256; /* NCCL prefers this alignment */
    const size_t recv_at = send_host && what->send != what->recv ? padded : 0;
    const size_t end =
        recv_host && recv_at + recv_bytes > send_bytes ? recv_at + recv_bytes : send_bytes;
    DTRAIN_NCCL_TRY(dtrain_nccl__take_block(hub, end, &work->block));
    char *device = (char *)work->block->device;
    if (send_host) {
        memcpy(work->block->host, what->send, send_bytes);
        DTRAIN_NCCL_TRY(ops->copy_async(hub->device, device, work->block->host, send_bytes,
                                        DTRAIN_COPY_HOST_TO_DEVICE, comm->lane->stream));
        work->send = device;
        if (what->kind == DTRAIN_COLLECTIVE_BROADCAST) work->recv = device; /* at the root */
    }
    if (recv_host) {
        work->recv = device + recv_at;
        work->host_recv = what->recv;
    }
    comm->base.info.staged_bytes += (send_host ? send_bytes : 0) + (recv_host ? recv_bytes : 0);
    return DTRAIN_OK;
}

/* Return the offset of the received bytes in the block; it is the same on device and host. */
static size_t dtrain_nccl__recv_at(const dtrain_nccl__work *work)
{
    return (size_t)((char *)work->recv - (char *)work->block->device);
}

/* Copy results out and record the event. NCCL's call is complete. */
static dtrain_result dtrain_nccl__close_work(dtrain_nccl__comm *comm, dtrain_nccl__work *work)
{
    dtrain_nccl__hub *hub = comm->hub;
    const dtrain_device_ops *ops = hub->device->ops;
    if (work->host_recv)
        DTRAIN_NCCL_TRY(ops->copy_async(hub->device,
                                        (char *)work->block->host + dtrain_nccl__recv_at(work),
                                        work->recv, dtrain_nccl__bytes(comm, &work->what, true),
                                        DTRAIN_COPY_DEVICE_TO_HOST, comm->lane->stream));
    DTRAIN_NCCL_TRY(ops->event_record(hub->device, work->record->done, comm->lane->stream));
    work->record->launched = true;
    return DTRAIN_OK;
}

/* ---- Handles and records ----------------------------------------------------------------------*/

static dtrain_nccl__work *dtrain_nccl__take_work(dtrain_nccl__comm *comm)
{
    dtrain_nccl__hub *hub = comm->hub;
    dtrain_nccl__work *work = hub->pool;
    if (work) {
        hub->pool = work->next;
        memset(work, 0, sizeof *work);
    } else {
        work = (dtrain_nccl__work *)dtrain_nccl__alloc(hub, sizeof *work);
        if (!work) return NULL;
    }
    work->base.comm = &comm->base;
    comm->base.in_flight++;
    comm->base.outstanding++;
    return work;
}

static void dtrain_nccl__mark_done(dtrain_nccl__work *work)
{
    if (!work->done) work->base.comm->in_flight--;
    work->done = true;
}

static void dtrain_nccl__give_work(dtrain_nccl__work *work)
{
    dtrain_nccl__hub *hub = ((dtrain_nccl__comm *)work->base.comm)->hub;
    dtrain_nccl__mark_done(work);
    work->base.comm->outstanding--;
    if (work->record) work->record->waited_for = true;
    if (work->block) dtrain_nccl__give_block(hub, work->block);
    work->next = hub->pool;
    hub->pool = work;
}

static dtrain_result dtrain_nccl__write_record(dtrain_nccl__comm *comm, dtrain_nccl__work *work,
                                               const dtrain_collective *what)
{
    const bool captured = dtrain_nccl__capturing(comm->hub);
    dtrain_nccl__record *record = comm->oldest;
    if (record->waited_for) { /* reuse it, as the newest */
        comm->newest->next = record;
        comm->newest = record;
        comm->oldest = record->next;
        record->next = NULL;
    } else DTRAIN_NCCL_TRY(dtrain_nccl__add_record(comm));
    record = comm->newest;
    record->waited_for = false;
    record->number =
        dtrain_nccl__is_point_to_point(what->kind) ? ++comm->point_to_point : ++comm->collectives;
    record->what = *what;
    record->launched = false;
    record->captured = captured;
    work->captured = captured;
    comm->captured = comm->captured || captured;
    work->record = record;
    return DTRAIN_OK;
}

/* ---- Calling NCCL -----------------------------------------------------------------------------*/

static ncclDataType_t dtrain_nccl__type(dtrain_dtype dtype)
{
    switch (dtype) {
    case DTRAIN_DTYPE_BF16: return ncclBfloat16;
    case DTRAIN_DTYPE_F16: return ncclFloat16;
    case DTRAIN_DTYPE_I32: return ncclInt32;
    case DTRAIN_DTYPE_I64: return ncclInt64;
    case DTRAIN_DTYPE_F64: return ncclFloat64;
    default: return ncclFloat32;
    }
}

static ncclRedOp_t dtrain_nccl__op(uint32_t op)
{
    switch (op) {
    case DTRAIN_REDUCE_MIN: return ncclMin;
    case DTRAIN_REDUCE_MAX: return ncclMax;
    case DTRAIN_REDUCE_PROD: return ncclProd;
    default: return ncclSum; /* also DTRAIN_REDUCE_MEAN, see dtrain_nccl__wait_steps */
    }
}

/* Call an all-to-all: a group with a send to and a receive from every rank. This includes the
 * rank's own slice, which NCCL copies on the device, in stream order. */
static ncclResult_t dtrain_nccl__all_to_all(dtrain_nccl__comm *comm, const dtrain_nccl__work *work)
{
    const dtrain_nccl__library *nccl = &comm->hub->nccl;
    const cudaStream_t stream = comm->lane->native;
    const ncclDataType_t type = dtrain_nccl__type(work->what.dtype);
    const size_t count = work->what.count, bytes = count * dtrain_dtype_bytes(work->what.dtype);
    const char *send = (const char *)work->send;
    char *recv = (char *)work->recv;
    ncclResult_t failed = ncclSuccess;
    nccl->GroupStart();
    for (int i = 0; i < 2 * comm->base.size && failed == ncclSuccess; i++) {
        const int r = i / 2;
        const size_t at = (size_t)r * bytes;
        const ncclResult_t result = i % 2
                                        ? nccl->Recv(recv + at, count, type, r, comm->nccl, stream)
                                        : nccl->Send(send + at, count, type, r, comm->nccl, stream);
        if (result != ncclInProgress) failed = result;
    }
    const ncclResult_t end = nccl->GroupEnd();
    return failed == ncclSuccess ? end : failed;
}

static ncclResult_t dtrain_nccl__call(dtrain_nccl__comm *comm, const dtrain_nccl__work *work)
{
    const dtrain_nccl__library *nccl = &comm->hub->nccl;
    const cudaStream_t stream = comm->lane->native;
    const dtrain_collective *what = &work->what;
    const ncclDataType_t type = dtrain_nccl__type(what->dtype);
    const ncclRedOp_t op = dtrain_nccl__op(what->op);
    const size_t count = what->count;
    const void *send = work->send;
    void *recv = work->recv;
    switch (what->kind) {
    case DTRAIN_COLLECTIVE_ALL_REDUCE:
        return nccl->AllReduce(send, recv, count, type, op, comm->nccl, stream);
    case DTRAIN_COLLECTIVE_REDUCE_SCATTER:
        return nccl->ReduceScatter(send, recv, count, type, op, comm->nccl, stream);
    case DTRAIN_COLLECTIVE_SPLIT:
    case DTRAIN_COLLECTIVE_ALL_GATHER:
        return nccl->AllGather(send, recv, count, type, comm->nccl, stream);
    case DTRAIN_COLLECTIVE_BROADCAST:
        return nccl->Broadcast(send, recv, count, type, what->root, comm->nccl, stream);
    case DTRAIN_COLLECTIVE_REDUCE:
        return nccl->Reduce(send, recv, count, type, op, what->root, comm->nccl, stream);
    case DTRAIN_COLLECTIVE_ALL_TO_ALL: return dtrain_nccl__all_to_all(comm, work);
    case DTRAIN_COLLECTIVE_SEND:
        return nccl->Send(send, count, type, what->root, comm->nccl, stream);
    case DTRAIN_COLLECTIVE_RECV:
        return nccl->Recv(recv, count, type, what->root, comm->nccl, stream);
    default: return ncclInvalidArgument;
    }
}

/* ---- Sends and receives -------------------------------------------------------------------------
 *
 * Sends and receives (messages) are collected until the program waits, tests, or starts a
 * collective; then they are launched in groups. The grouping decides whether ranks can hang. NCCL
 * runs a group in batches: the n-th send to and the n-th receive from a rank are in batch n, which
 * starts when batch n - 1 is done. An event is recorded after the whole group.
 *
 *     As many sends as receives are an exchange, and become one group. The n-th message from one
 *     rank to another is in batch n on both, in whatever order they start messages. So the batches
 *     end one after another on all ranks.
 *
 *     Other messages can run ahead. As one group, S1 S2 R1 would have the batches S1 + R1 and S2.
 *     S2 would wait for R1, but the peer can send R1 only after it has S2. So these messages are
 *     launched in their order, and a second send to, or receive from, a rank begins a new group. A
 *     group is then one batch. It ends in every program in which ranks could wait for each message
 *     before they start the next: in the order of such a run, both ranks have launched the first
 *     message that is not done.
 *
 * The schedules of pipelines are of the second kind; their runner tests every message. */

/* True if a message in the list from `first` to before `work` has its kind, peer and comm. */
static bool dtrain_nccl__repeats(const dtrain_nccl__work *first, const dtrain_nccl__work *work)
{
    for (; first != work; first = first->next)
        if (first->base.comm == work->base.comm && first->what.kind == work->what.kind &&
            first->what.root == work->what.root)
            return true;
    return false;
}

/* Launch a list of messages as one NCCL group. */
static dtrain_result dtrain_nccl__launch_group(dtrain_nccl__hub *hub, dtrain_nccl__work *first)
{
    ncclResult_t failed = ncclSuccess;
    ncclComm_t culprit = NULL;
    hub->nccl.GroupStart();
    for (dtrain_nccl__work *work = first; work && failed == ncclSuccess; work = work->next) {
        dtrain_nccl__comm *comm = (dtrain_nccl__comm *)work->base.comm;
        const ncclResult_t result = dtrain_nccl__call(comm, work);
        if (result == ncclSuccess || result == ncclInProgress) continue;
        failed = result;
        culprit = comm->nccl;
    }
    const ncclResult_t end = hub->nccl.GroupEnd();
    if (failed == ncclSuccess && end != ncclInProgress) failed = end;
    if (failed != ncclSuccess)
        return dtrain_nccl__fail_call(hub, culprit, failed, "a group of sends and receives");
    for (dtrain_nccl__work *work = first; work; work = work->next)
        DTRAIN_NCCL_TRY(dtrain_nccl__complete(hub, ((dtrain_nccl__comm *)work->base.comm)->nccl,
                                              end, "a group of sends and receives"));
    for (dtrain_nccl__work *work = first; work; work = work->next)
        DTRAIN_NCCL_TRY(dtrain_nccl__close_work((dtrain_nccl__comm *)work->base.comm, work));
    return DTRAIN_OK;
}

/* Launch all collected messages. */
DTRAIN_NCCL__PRIVATE dtrain_result dtrain_nccl__flush(dtrain_nccl__hub *hub)
{
    const bool exchange = hub->group_balance == 0;
    dtrain_nccl__work *work = hub->group;
    hub->group = NULL;
    hub->group_end = &hub->group;
    hub->group_balance = 0;
    while (work) {
        dtrain_nccl__work *const first = work, *last;
        do last = work, work = work->next;
        while (work && (exchange || !dtrain_nccl__repeats(first, work)));
        last->next = NULL;
        DTRAIN_NCCL_TRY(dtrain_nccl__launch_group(hub, first));
    }
    return DTRAIN_OK;
}

static dtrain_result dtrain_nccl__launch(dtrain_nccl__comm *comm, dtrain_nccl__work *work)
{
    dtrain_nccl__hub *hub = comm->hub;
    if (dtrain_nccl__is_point_to_point(work->what.kind)) {
        work->next = NULL;
        *hub->group_end = work;
        hub->group_end = &work->next;
        hub->group_balance += work->what.kind == DTRAIN_COLLECTIVE_SEND ? 1 : -1;
        return DTRAIN_OK;
    }
    DTRAIN_NCCL_TRY(dtrain_nccl__complete(hub, comm->nccl, dtrain_nccl__call(comm, work),
                                          dtrain_nccl__call_name(work->what.kind)));
    return dtrain_nccl__close_work(comm, work);
}

/* ---- Starting ---------------------------------------------------------------------------------*/

/* Do the steps of a start. After an error the caller fails the communicator. */
static dtrain_result dtrain_nccl__start_steps(dtrain_nccl__comm *comm,
                                              const dtrain_collective *what,
                                              dtrain_nccl__work *work)
{
    dtrain_nccl__hub *hub = comm->hub;
    const dtrain_device_ops *ops = hub->device->ops;
    const bool message = dtrain_nccl__is_point_to_point(what->kind);
    const bool tensor = comm->base.axis && strcmp(comm->base.axis, "tensor") == 0;
    dtrain_nccl__lane *const lane = &hub->lanes[tensor && comm->next && hub->lanes[1].stream];
    if (!message || lane != comm->lane) DTRAIN_NCCL_TRY(dtrain_nccl__flush(hub));
    /* A communicator can get its axis later than its first operations. Then the new lane waits
     * for the old one. */
    if (lane != comm->lane) {
        DTRAIN_NCCL_TRY(ops->event_record(hub->device, hub->ready, comm->lane->stream));
        DTRAIN_NCCL_TRY(ops->event_wait(hub->device, hub->ready, lane->stream));
        comm->lane = lane;
    }
    DTRAIN_NCCL_TRY(dtrain_nccl__write_record(comm, work, what));
    work->what = *what;
    if (what->count == 0) { /* send one integer of host memory instead */
        work->single = 1;
        work->what.count = 1;
        work->what.dtype = DTRAIN_DTYPE_I32;
        work->what.send = work->what.recv = &work->single;
    }
    if (what->count == 0 && !message) {
        work->what.kind = DTRAIN_COLLECTIVE_ALL_REDUCE;
        work->what.op = DTRAIN_REDUCE_SUM;
        work->what.root = -1;
    }
    DTRAIN_NCCL_TRY(ops->event_record(hub->device, hub->ready, NULL));
    DTRAIN_NCCL_TRY(ops->event_wait(hub->device, hub->ready, comm->lane->stream));
    DTRAIN_NCCL_TRY(dtrain_nccl__stage_in(comm, work));
    return dtrain_nccl__launch(comm, work);
}

DTRAIN_NCCL__PRIVATE dtrain_result dtrain_nccl__start(dtrain_comm *base,
                                                      const dtrain_collective *what,
                                                      dtrain_work **out)
{
    dtrain_nccl__comm *comm = (dtrain_nccl__comm *)base;
    dtrain_nccl__hub *hub = comm->hub;
    const char *call = dtrain_nccl__call_name(what->kind);
    const size_t unit = dtrain_dtype_bytes(what->dtype);
    *out = NULL;
    if (comm->dead) return dtrain_nccl__comm_error(comm);
    if (unit && what->count && ((uintptr_t)what->send | (uintptr_t)what->recv) % unit)
        return dtrain_nccl__fail(hub, DTRAIN_ERROR_ARGUMENT,
                                 "%s: NCCL needs buffers aligned to their elements of %zu bytes, "
                                 "these are at %p and %p",
                                 call, unit, what->send, what->recv);
    DTRAIN_NCCL_TRY(dtrain_nccl__poll(hub, call));
    dtrain_nccl__work *work = dtrain_nccl__take_work(comm);
    const dtrain_result result =
        work ? dtrain_nccl__start_steps(comm, what, work) : DTRAIN_ERROR_MEMORY;
    if (result == DTRAIN_OK) {
        *out = &work->base;
        return DTRAIN_OK;
    }
    if (work) dtrain_nccl__give_work(work);
    return dtrain_nccl__fail(hub, result, "%s: %s", call,
                             dtrain_nccl__strip_rank(hub, dtrain_last_error()));
}

/* ---- Ending -----------------------------------------------------------------------------------*/

static dtrain_result dtrain_nccl__wait_steps(dtrain_nccl__comm *comm, dtrain_nccl__work *work)
{
    dtrain_nccl__hub *hub = comm->hub;
    const dtrain_collective *what = &work->what;
    const size_t recv_bytes = dtrain_nccl__bytes(comm, what, true);
    DTRAIN_NCCL_TRY(dtrain_nccl__flush(hub));
    if (work->block)
        DTRAIN_NCCL_TRY(dtrain_nccl__await_event(hub, work->record,
                                                 dtrain_nccl__call_name(work->record->what.kind)));
    else DTRAIN_NCCL_TRY(hub->device->ops->event_wait(hub->device, work->record->done, NULL));
    if (work->host_recv)
        memcpy(work->host_recv, (char *)work->block->host + dtrain_nccl__recv_at(work), recv_bytes);
    if (what->op != DTRAIN_REDUCE_MEAN || comm->base.size == 1 || recv_bytes == 0) return DTRAIN_OK;

    /* Make the mean from the sum, on the host or on the compute stream, which already waits for the
     * sum. */
    const double scale = 1.0 / comm->base.size;
    for (size_t i = 0; i < what->count && work->host_recv; i++) {
        float *wide = (float *)what->recv + i;
        uint16_t *half = (uint16_t *)what->recv + i;
        if (what->dtype == DTRAIN_DTYPE_F64) ((double *)what->recv)[i] *= scale;
        else if (what->dtype == DTRAIN_DTYPE_F32) *wide *= (float)scale;
        else
            *half = dtrain_half_from_f32(what->dtype,
                                         dtrain_half_to_f32(what->dtype, *half) * (float)scale);
    }
    if (work->host_recv) return DTRAIN_OK;
    dtrain_axpby_args args;
    memset(&args, 0, sizeof args);
    args.count = (int64_t)what->count;
    args.a = scale;
    args.x = what->recv;
    args.y = what->recv;
    args.dtype = what->dtype;
    return hub->device->ops->axpby(hub->device, &args);
}

DTRAIN_NCCL__PRIVATE dtrain_result dtrain_nccl__wait(dtrain_work *base)
{
    dtrain_nccl__work *work = (dtrain_nccl__work *)base;
    dtrain_nccl__comm *comm = (dtrain_nccl__comm *)base->comm;
    dtrain_nccl__hub *hub = comm->hub;
    dtrain_result result = DTRAIN_OK;
    if (!comm->dead) {
        result = dtrain_nccl__wait_steps(comm, work);
        if (result != DTRAIN_OK)
            dtrain_nccl__fail(hub, result, "dtrain_work_wait: %s",
                              dtrain_nccl__strip_rank(hub, dtrain_last_error()));
    }
    const bool dead = comm->dead;
    dtrain_nccl__give_work(work);
    return dead ? dtrain_nccl__comm_error(comm) : DTRAIN_OK;
}

DTRAIN_NCCL__PRIVATE dtrain_result dtrain_nccl__test(dtrain_work *base, bool *done)
{
    dtrain_nccl__work *work = (dtrain_nccl__work *)base;
    dtrain_nccl__comm *comm = (dtrain_nccl__comm *)base->comm;
    dtrain_nccl__hub *hub = comm->hub;
    *done = true;
    if (comm->dead) return dtrain_nccl__comm_error(comm);
    DTRAIN_NCCL_TRY(dtrain_nccl__poll(hub, "dtrain_work_test"));
    DTRAIN_NCCL_TRY(dtrain_nccl__flush(hub));
    if (work->captured) return DTRAIN_OK; /* its event has no state; waiting orders the streams */
    if (hub->device->ops->event_query(hub->device, work->record->done, done) != DTRAIN_OK)
        return dtrain_nccl__fail(hub, DTRAIN_ERROR_SYSTEM, "dtrain_work_test: %s",
                                 dtrain_nccl__strip_rank(hub, dtrain_last_error()));
    if (*done) dtrain_nccl__mark_done(work);
    return DTRAIN_OK;
}

DTRAIN_NCCL__PRIVATE dtrain_result dtrain_nccl__fail_entry(dtrain_comm *base, dtrain_result code,
                                                           const char *text)
{
    dtrain_nccl__comm *comm = (dtrain_nccl__comm *)base;
    if (comm->dead) return dtrain_nccl__comm_error(comm);
    return dtrain_nccl__fail(comm->hub, code, "%s", dtrain_nccl__strip_rank(comm->hub, text));
}

/* ==== src/comm/nccl/memory.c ================================================================== */

/* Registered memory, for dtrain_comm_alloc
 *
 * NVLink switches and network cards can address memory of ncclMemAlloc. If it is registered with
 * the communicator, collectives use it without a copy. NCCL requires that all ranks register a
 * buffer, or none. They do, because the rendezvous checks that all ranks run the same version. */

#if DTRAIN_NCCL_HAS_MEMORY
static dtrain_result dtrain_nccl__memory_get(dtrain_nccl__hub *hub, size_t bytes, void **out)
{
    DTRAIN_NCCL_TRY(dtrain_device_account(hub->device, &hub->device->comm_bytes, bytes));
    const ncclResult_t result = hub->nccl.MemAlloc(out, bytes);
    if (result == ncclSuccess) return DTRAIN_OK;
    hub->device->comm_bytes -= bytes;
    return dtrain_fail(DTRAIN_ERROR_MEMORY, "ncclMemAlloc of %zu bytes failed: %s", bytes,
                       hub->nccl.GetErrorString(result));
}
/* Free memory. ncclMemFree unmaps it at once, while cudaFree waits for kernels. */
static void dtrain_nccl__memory_put(dtrain_nccl__hub *hub, dtrain_nccl__memory *memory)
{
    const dtrain_device_ops *ops = hub->device->ops;
    hub->device->comm_bytes -= memory->bytes;
    if (!ops->may_free || ops->may_free(hub->device)) hub->nccl.MemFree(memory->pointer);
}
DTRAIN_NCCL__PRIVATE dtrain_result dtrain_nccl__register(dtrain_nccl__comm *comm,
                                                         dtrain_nccl__memory *memory)
{
    dtrain_nccl__hub *hub = comm->hub;
    const ncclResult_t result =
        hub->nccl.CommRegister(comm->nccl, memory->pointer, memory->bytes, &memory->handle);
    DTRAIN_NCCL_TRY(dtrain_nccl__complete(hub, comm->nccl, result, "ncclCommRegister"));
    memory->comm = comm;
    return DTRAIN_OK;
}
DTRAIN_NCCL__PRIVATE void dtrain_nccl__deregister(dtrain_nccl__memory *memory)
{
    dtrain_nccl__comm *comm = memory->comm;
    if (!comm || comm->dead) return;
    memory->comm = NULL;
    dtrain_nccl__complete(comm->hub, comm->nccl,
                          comm->hub->nccl.CommDeregister(comm->nccl, memory->handle),
                          "ncclCommDeregister");
}
#else
static dtrain_result dtrain_nccl__memory_get(dtrain_nccl__hub *hub, size_t bytes, void **out)
{
    return hub->device->ops->alloc(hub->device, bytes, out);
}
static void dtrain_nccl__memory_put(dtrain_nccl__hub *hub, dtrain_nccl__memory *memory)
{
    hub->device->ops->free(hub->device, memory->pointer, memory->bytes);
}
DTRAIN_NCCL__PRIVATE dtrain_result dtrain_nccl__register(dtrain_nccl__comm *comm,
                                                         dtrain_nccl__memory *memory)
{
    (void)comm;
    (void)memory;
    return DTRAIN_OK;
}
DTRAIN_NCCL__PRIVATE void dtrain_nccl__deregister(dtrain_nccl__memory *memory) { (void)memory; }
#endif

DTRAIN_NCCL__PRIVATE void dtrain_nccl__memory_drop(dtrain_nccl__hub *hub,
                                                   dtrain_nccl__memory *memory)
{
    dtrain_nccl__deregister(memory);
    if (memory->pointer) dtrain_nccl__memory_put(hub, memory);
    dtrain_nccl__free(hub, memory, sizeof *memory);
}

DTRAIN_NCCL__PRIVATE dtrain_result dtrain_nccl__alloc_entry(dtrain_comm *base, size_t bytes,
                                                            void **out)
{
    dtrain_nccl__comm *comm = (dtrain_nccl__comm *)base;
    dtrain_nccl__hub *hub = comm->hub;
    *out = NULL;
    if (comm->dead) return dtrain_nccl__comm_error(comm);
    dtrain_nccl__memory *memory = (dtrain_nccl__memory *)dtrain_nccl__alloc(hub, sizeof *memory);
    if (!memory) return DTRAIN_ERROR_MEMORY;
    memory->bytes = bytes ? bytes : 1;
    dtrain_result result = dtrain_nccl__memory_get(hub, memory->bytes, &memory->pointer);
    if (result == DTRAIN_OK)
        result = hub->device->ops->zero(hub->device, memory->pointer, memory->bytes);
    if (result == DTRAIN_OK) result = dtrain_nccl__register(comm, memory);
    if (result != DTRAIN_OK) {
        dtrain_nccl__memory_drop(hub, memory);
        return result;
    }
    memory->next = hub->memory;
    hub->memory = memory;
    *out = memory->pointer;
    return DTRAIN_OK;
}

DTRAIN_NCCL__PRIVATE void dtrain_nccl__free_entry(dtrain_comm *base, void *pointer, size_t bytes)
{
    dtrain_nccl__hub *hub = ((dtrain_nccl__comm *)base)->hub;
    (void)bytes; /* recorded in the list */
    for (dtrain_nccl__memory **link = &hub->memory; *link; link = &(*link)->next) {
        dtrain_nccl__memory *memory = *link;
        if (memory->pointer != pointer) continue;
        *link = memory->next;
        dtrain_nccl__memory_drop(hub, memory);
        return;
    }
}

/* ==== src/comm/nccl/create.c ================================================================== */

/* Create, split, destroy communicators
 *
 * A communicator is made in three steps: comm_make allocates the struct and its events, rendezvous
 * agrees on a unique id, comm_init creates NCCL's communicator. Every step that can fail on a
 * single rank comes before the agreement. So after it all ranks succeed, or all fail. */

/* Append a record to the list, as the newest one. */
DTRAIN_NCCL__PRIVATE dtrain_result dtrain_nccl__add_record(dtrain_nccl__comm *comm)
{
    dtrain_nccl__hub *hub = comm->hub;
    dtrain_nccl__record *record = (dtrain_nccl__record *)dtrain_nccl__alloc(hub, sizeof *record);
    if (!record) return DTRAIN_ERROR_MEMORY;
    const dtrain_result result = hub->device->ops->event_create(hub->device, &record->done);
    if (result != DTRAIN_OK) {
        dtrain_nccl__free(hub, record, sizeof *record);
        return result;
    }
    record->waited_for = true;
    *(comm->newest ? &comm->newest->next : &comm->oldest) = record;
    comm->newest = record;
    return DTRAIN_OK;
}

DTRAIN_NCCL__PRIVATE dtrain_result dtrain_nccl__comm_make(dtrain_nccl__hub *hub, int size, int rank,
                                                          const int *world_ranks, const char *name,
                                                          dtrain_nccl__comm **out)
{
    dtrain_nccl__comm *comm = (dtrain_nccl__comm *)dtrain_nccl__alloc(hub, sizeof *comm);
    dtrain_result result = DTRAIN_OK;
    *out = NULL;
    if (!comm) return DTRAIN_ERROR_MEMORY;
    comm->hub = hub;
    comm->lane = &hub->lanes[0];
    comm->base.ops = dtrain_nccl_comm_ops();
    comm->base.world = hub->world;
    comm->base.size = size;
    comm->base.rank = rank;
    snprintf(comm->name, sizeof comm->name, "%s", name);
    comm->next = hub->comms;
    hub->comms = comm;
    comm->base.world_ranks = (int *)dtrain_nccl__alloc(hub, (size_t)size * sizeof(int));
    if (!comm->base.world_ranks) result = DTRAIN_ERROR_MEMORY;
    for (int i = 0; i < size && result == DTRAIN_OK; i++)
        comm->base.world_ranks[i] = world_ranks ? world_ranks[i] : i;
    for (int i = 0; i < DTRAIN_NCCL_RECORDS && result == DTRAIN_OK; i++)
        result = dtrain_nccl__add_record(comm);
    if (result == DTRAIN_OK) *out = comm;
    else dtrain_nccl__comm_free(comm);
    return result;
}

/* Free a communicator. If a thread is still inside ncclCommAbort, it uses the struct, which then
 * stays allocated. */
DTRAIN_NCCL__PRIVATE void dtrain_nccl__comm_free(dtrain_nccl__comm *comm)
{
    dtrain_nccl__hub *hub = comm->hub;
    dtrain_nccl__comm **link = &hub->comms;
    while (*link != comm) link = &(*link)->next;
    *link = comm->next;
    while (comm->oldest) {
        dtrain_nccl__record *record = comm->oldest;
        comm->oldest = record->next;
        hub->device->ops->event_destroy(hub->device, record->done);
        dtrain_nccl__free(hub, record, sizeof *record);
    }
    dtrain_nccl__free(hub, comm->base.world_ranks, (size_t)comm->base.size * sizeof(int));
    if (!hub->stuck) dtrain_nccl__free(hub, comm, sizeof *comm);
}

DTRAIN_NCCL__PRIVATE dtrain_result dtrain_nccl__comm_init(dtrain_nccl__comm *comm,
                                                          const ncclUniqueId *id)
{
    dtrain_nccl__hub *hub = comm->hub;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    const ncclResult_t result =
        hub->nccl.CommInitRankConfig(&comm->nccl, comm->base.size, *id, comm->base.rank, &config);
    return dtrain_nccl__complete(hub, comm->nccl, result, "ncclCommInitRankConfig");
}

/* Close a communicator. ncclCommFinalize waits for operations in flight and for graphs that hold
 * its collectives, so it is polled. Then ncclCommDestroy has nothing to wait for. */
static void dtrain_nccl__comm_close(dtrain_nccl__comm *comm)
{
    dtrain_nccl__hub *hub = comm->hub;
    for (dtrain_nccl__memory *m = hub->memory; m; m = m->next)
        if (m->comm == comm) dtrain_nccl__deregister(m);
    if (!comm->dead && comm->nccl) {
        dtrain_nccl__complete(
            hub, comm->nccl, hub->nccl.CommFinalize(comm->nccl),
            comm->captured ? "ncclCommFinalize, which waits until graphs with its operations are "
                             "destroyed"
                           : "ncclCommFinalize");
        if (!comm->dead) hub->nccl.CommDestroy(comm->nccl);
    }
    dtrain_nccl__comm_free(comm);
}

/* ---- Splits -----------------------------------------------------------------------------------*/

/* Run a collective of this file on host memory, and wait for it. */
static dtrain_result dtrain_nccl__gather(dtrain_nccl__comm *comm, uint32_t kind, const void *mine,
                                         void *all, size_t ints)
{
    const dtrain_collective what = {kind, DTRAIN_DTYPE_I32, 0, -1, ints, mine, all};
    dtrain_work *work;
    DTRAIN_NCCL_TRY(dtrain_nccl__start(&comm->base, &what, &work));
    return dtrain_nccl__wait(work);
}

#if DTRAIN_NCCL_HAS_SPLIT
/* Split by ncclCommSplit; a rank without a child takes part too. NCCL writes the new handle when
 * the call on the parent is complete, or when the parent is aborted. */
static dtrain_result dtrain_nccl__split_call(dtrain_nccl__hub *hub, ncclComm_t parent, int color,
                                             dtrain_nccl__comm *child, ncclConfig_t *config,
                                             const char *call)
{
    ncclComm_t none = NULL;
    const ncclResult_t result =
        hub->nccl.CommSplit(parent, child ? color : NCCL_SPLIT_NOCOLOR,
                            child ? child->base.rank : 0, child ? &child->nccl : &none, config);
    DTRAIN_NCCL_TRY(dtrain_nccl__complete(hub, parent, result, call));
    if (!child) return DTRAIN_OK;
    return dtrain_nccl__complete(hub, child->nccl, ncclInProgress, call);
}

static dtrain_result dtrain_nccl__split_native(dtrain_nccl__comm *parent, int color,
                                               dtrain_nccl__comm *child)
{
    return dtrain_nccl__split_call(parent->hub, parent->nccl, color, child, NULL,
                                   "dtrain_comm_split");
}

/* Split the world's communicator from the host's. They share no resources, so the world's can be
 * aborted. It is non-blocking, even if the host's is blocking. */
static dtrain_result dtrain_nccl__split_host(dtrain_nccl__hub *hub, dtrain_nccl__comm *comm)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    config.splitShare = 0;
    return dtrain_nccl__split_call(hub, hub->given->comm, 0, comm, &config,
                                   "ncclCommSplit of the host's communicator");
}
#else
/* Split without ncclCommSplit: the first rank of each color makes a unique id, and all ranks gather
 * the ids over the parent. */
static dtrain_result dtrain_nccl__split_native(dtrain_nccl__comm *parent, int color,
                                               dtrain_nccl__comm *child)
{
    dtrain_nccl__hub *hub = parent->hub;
    const size_t size = (size_t)parent->base.size, bytes = size * sizeof(ncclUniqueId);
    ncclUniqueId mine, *all = (ncclUniqueId *)dtrain_nccl__alloc(hub, bytes);
    dtrain_result result = all ? DTRAIN_OK : DTRAIN_ERROR_MEMORY;
    (void)color;
    memset(&mine, 0, sizeof mine);
    if (result == DTRAIN_OK && child && child->base.rank == 0) {
        const ncclResult_t made = hub->nccl.GetUniqueId(&mine);
        if (made != ncclSuccess)
            result = dtrain_nccl__fail_call(hub, parent->nccl, made, "ncclGetUniqueId");
    }
    if (result == DTRAIN_OK)
        result = dtrain_nccl__gather(parent, DTRAIN_COLLECTIVE_ALL_GATHER, &mine, all,
                                     sizeof mine / sizeof(int32_t));
    for (size_t i = 0; i < size && result == DTRAIN_OK && child; i++) {
        if (parent->base.world_ranks[i] != child->base.world_ranks[0]) continue;
        result = dtrain_nccl__comm_init(child, &all[i]);
        break;
    }
    dtrain_nccl__free(hub, all, bytes);
    return result;
}

/* Never called: dtrain_nccl__check_given refuses a communicator of the host. */
static dtrain_result dtrain_nccl__split_host(dtrain_nccl__hub *hub, dtrain_nccl__comm *comm)
{
    (void)hub;
    (void)comm;
    return DTRAIN_ERROR_UNSUPPORTED;
}
#endif

/* Split a communicator. Every rank gathers the color and key of all ranks. It sorts the ranks of
 * its color by key, then by rank (a stable insertion sort). */
static dtrain_result dtrain_nccl__split(dtrain_comm *base, int color, int key, dtrain_comm **out)
{
    dtrain_nccl__comm *parent = (dtrain_nccl__comm *)base, *child = NULL;
    dtrain_nccl__hub *hub = parent->hub;
    const int32_t mine[2] = {color < 0 ? -1 : color, key};
    int32_t all[DTRAIN_MAX_RANKS][2];
    int members[DTRAIN_MAX_RANKS], count = 0, rank = 0;
    char name[sizeof parent->name];
    *out = NULL;
    if (parent->dead) return dtrain_nccl__comm_error(parent);
    dtrain_result result = dtrain_nccl__gather(parent, DTRAIN_COLLECTIVE_SPLIT, mine, all, 2);
    for (int i = 0; i < base->size && color >= 0 && result == DTRAIN_OK; i++) {
        if (all[i][0] != color) continue;
        int at = count++;
        for (; at > 0 && all[members[at - 1]][1] > all[i][1]; at--) members[at] = members[at - 1];
        members[at] = i;
    }
    for (int i = 0; i < count; i++) {
        if (members[i] == base->rank) rank = i;
        members[i] = base->world_ranks[members[i]];
    }
    snprintf(name, sizeof name, "%.40s/%u.%d", parent->name, ++parent->split_count, color);
    if (count) result = dtrain_nccl__comm_make(hub, count, rank, members, name, &child);
    if (result == DTRAIN_OK) result = dtrain_nccl__split_native(parent, color, child);
    if (result == DTRAIN_OK) {
        *out = child ? &child->base : NULL;
        return DTRAIN_OK;
    }
    result = dtrain_nccl__fail(hub, result, "dtrain_comm_split: %s",
                               dtrain_nccl__strip_rank(hub, dtrain_last_error()));
    if (child) {
        dtrain_nccl__abort_one(child); /* the abort of the parent can have written its handle */
        dtrain_nccl__await_aborts(hub);
        dtrain_nccl__comm_free(child);
    }
    return result;
}

/* ---- Rendezvous ---------------------------------------------------------------------------------
 *
 * The ranks look for errors before they call NCCL together, where all would wait for a failed rank.
 * Each rank sends its NCCL version and its result so far, and the first rank also the unique id.
 * All ranks check the same records, and so come to the same result. (No two ranks of a node share a
 * device: the world has checked this before it chose NCCL.) */

#define DTRAIN_NCCL_HELLO 0x64744e33u /* "dtN3"; must change with the struct below */

typedef struct dtrain_nccl__hello {
    uint32_t magic;
    int32_t status; /* dtrain_result of this rank so far */
    uint32_t version;
    uint32_t split; /* 1: splits a communicator of the host */
    char error[320];
    ncclUniqueId id; /* used from rank 0 only */
} dtrain_nccl__hello;

/* Exchange the records of all ranks (size), check them, and return the unique id. `prepared` is
 * this rank's result so far; after an error all ranks receive its sentence. */
static dtrain_result dtrain_nccl__rendezvous(dtrain_nccl__hub *hub, dtrain_result prepared,
                                             dtrain_nccl__hello *all, ncclUniqueId *id)
{
    dtrain_world *world = hub->world;
    dtrain_nccl__hello hello;
    const int size = dtrain_world_size(world);
    char first[24], other[24];
    memset(&hello, 0, sizeof hello);
    const dtrain_nccl_given *given = hub->given;
    if (given && given->id) memcpy(&hello.id, given->id, sizeof hello.id);
    else if (prepared == DTRAIN_OK && dtrain_world_rank(world) == 0 && !(given && given->comm)) {
        const ncclResult_t made = hub->nccl.GetUniqueId(&hello.id);
        prepared = dtrain_nccl__code(made);
        if (made != ncclSuccess)
            dtrain_fail(prepared,
                        "ncclGetUniqueId failed: %s; %s; is the network interface for NCCL up "
                        "(NCCL_SOCKET_IFNAME)?",
                        hub->nccl.GetErrorString(made), hub->nccl.GetLastError(NULL));
    }
    hello.magic = DTRAIN_NCCL_HELLO;
    hello.status = prepared;
    hello.version = hub->version;
    hello.split = given && given->comm;
    if (prepared != DTRAIN_OK)
        snprintf(hello.error, sizeof hello.error, "%s",
                 dtrain_nccl__strip_rank(hub, dtrain_last_error()));
    DTRAIN_NCCL_TRY(dtrain_world_all_gather(world, &hello, sizeof hello, all));
    for (int i = 0; i < size; i++) {
        if (all[i].magic != DTRAIN_NCCL_HELLO)
            return dtrain_fail(DTRAIN_ERROR_MISMATCH,
                               "rank %d of %d was built with another version of dtrain_nccl.h", i,
                               size);
        if (all[i].status != DTRAIN_OK)
            return dtrain_fail((dtrain_result)all[i].status, "on rank %d: %.*s", i,
                               (int)sizeof all[i].error, all[i].error);
    }
    for (int i = 1; i < size; i++)
        if (all[i].split != all[0].split)
            return dtrain_fail(DTRAIN_ERROR_MISMATCH,
                               "rank %d hands in a communicator of NCCL, and rank %d none: all do, "
                               "or none does",
                               all[0].split ? 0 : i, all[0].split ? i : 0);
    for (int i = 1; i < size; i++)
        if (all[i].version != all[0].version)
            return dtrain_fail(
                DTRAIN_ERROR_MISMATCH,
                "rank 0 runs NCCL %s and rank %d NCCL %s: they do not talk to each other; install "
                "the same version everywhere",
                dtrain_nccl__version_text(all[0].version, first), i,
                dtrain_nccl__version_text(all[i].version, other));
    *id = all[0].id;
    return DTRAIN_OK;
}

/* ---- The hub ----------------------------------------------------------------------------------*/

/* Check the NCCL objects of the host. */
static dtrain_result dtrain_nccl__check_given(dtrain_nccl__hub *hub)
{
    const dtrain_nccl_given *given = hub->given;
    const int size = dtrain_world_size(hub->world), rank = dtrain_world_rank(hub->world);
    int count = -1, user = -1, device = -1;
    if (!given || !given->comm) return DTRAIN_OK;
    if (given->id)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_nccl_given has a communicator and an id: hand in one of them");
    if (!DTRAIN_NCCL_HAS_SPLIT)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "this program was compiled with the header of an NCCL that cannot split "
                           "a communicator (before 2.18): hand in a unique id");
    if (hub->nccl.CommCount(given->comm, &count) != ncclSuccess ||
        hub->nccl.CommUserRank(given->comm, &user) != ncclSuccess ||
        hub->nccl.CommCuDevice(given->comm, &device) != ncclSuccess)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "the host's communicator cannot be used: %s",
                           hub->nccl.GetLastError(given->comm));
    if (count == size && user == rank && device == hub->device_index) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                       "the host's communicator has rank %d of %d on GPU %d, and joins as rank %d "
                       "of %d on GPU %d: hand in one of the members, in their order",
                       user, count, device, rank, size, hub->device_index);
}

/* Do every step that can fail on a single rank. A guest reads no environment. */
static dtrain_result dtrain_nccl__hub_prepare(dtrain_nccl__hub *hub)
{
    const dtrain_device_ops *ops = hub->device->ops;
    const char *order = hub->guest ? NULL : getenv("NCCL_LAUNCH_ORDER_IMPLICIT");
    if (ops->host_memory || !ops->stream_native)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "NCCL needs ranks on GPUs, and the device is \"%s\"; set device_ops to "
                           "dtrain_cuda_device_ops(), or leave comm_ops NULL",
                           ops->name);
    DTRAIN_NCCL_TRY(dtrain_nccl__load(&hub->nccl, &hub->version));
    const cudaError_t error = cudaGetDevice(&hub->device_index); /* NCCL uses this device too */
    if (error != cudaSuccess)
        return dtrain_fail(DTRAIN_ERROR_SYSTEM, "cudaGetDevice failed: %s",
                           cudaGetErrorString(error));
    DTRAIN_NCCL_TRY(dtrain_nccl__check_given(hub));
    DTRAIN_NCCL_TRY(ops->event_create(hub->device, &hub->ready));
    DTRAIN_NCCL_TRY(ops->event_create(hub->device, &hub->marks[0].event));
    /* True if kernels of different communicators start in the order of the host's launches. */
    const bool set = hub->given ? hub->given->launch_ordered : order && atoi(order) > 0;
    const bool ordered = hub->version >= 22600 && set;
    for (int i = 0; i < (ordered ? DTRAIN_NCCL__LANES : 1); i++) {
        dtrain_nccl__lane *lane = &hub->lanes[i];
        DTRAIN_NCCL_TRY(ops->stream_create(hub->device, true, &lane->stream));
        DTRAIN_NCCL_TRY(ops->event_create(hub->device, &hub->marks[1 + i].event));
        lane->native = (cudaStream_t)ops->stream_native(hub->device, lane->stream);
        hub->marks[1 + i].stream = lane->stream;
    }
    return DTRAIN_OK;
}

/* Close everything. Graphs that still exist are dropped: they can no longer run. while_waiting
 * stays set until all memory is free, because freeing can wait and needs the deadline. */
static void dtrain_nccl__hub_close(dtrain_nccl__hub *hub)
{
    const dtrain_device_ops *ops = hub->device->ops;
    hub->closing = true;
    if (hub->code == DTRAIN_OK) dtrain_nccl__flush(hub);
    dtrain_nccl__drop_graphs(hub);
    if (!hub->stuck) dtrain_nccl__await_aborts(hub);
    while (hub->comms) dtrain_nccl__comm_close(hub->comms);
    while (hub->memory) {
        dtrain_nccl__memory *memory = hub->memory;
        hub->memory = memory->next;
        dtrain_nccl__memory_drop(hub, memory);
    }
    while (hub->blocks) {
        dtrain_nccl__block *block = hub->blocks;
        hub->blocks = block->next;
        ops->host_free(hub->device, block->host, block->bytes);
        ops->free(hub->device, block->device, block->bytes);
        dtrain_nccl__free(hub, block, sizeof *block);
    }
    while (hub->pool) {
        dtrain_nccl__work *work = hub->pool;
        hub->pool = work->next;
        dtrain_nccl__free(hub, work, sizeof *work);
    }
    if (hub->device->waiting_user == hub) {
        hub->device->while_waiting = NULL;
        hub->device->waiting_user = NULL;
    }
    for (int i = 0; i < DTRAIN_NCCL__MARKS; i++)
        if (hub->marks[i].event) ops->event_destroy(hub->device, hub->marks[i].event);
    if (hub->ready) ops->event_destroy(hub->device, hub->ready);
    for (int i = 0; i < DTRAIN_NCCL__LANES; i++)
        if (hub->lanes[i].stream) ops->stream_destroy(hub->device, hub->lanes[i].stream);
    if (!hub->stuck) dtrain_nccl__free(hub, hub, sizeof *hub);
}

/* Create the world's communicator. If one rank fails, all ranks return an error and free
 * everything. */
static dtrain_result dtrain_nccl__create(dtrain_world *world, dtrain_comm **out)
{
    dtrain_world_info room[2]; /* the info of a newer dtrain.h can be larger */
    dtrain_nccl__comm *comm = NULL;
    ncclUniqueId id;
    *out = NULL;
    dtrain_world_query(world, room);
    const dtrain_world_info info = room[0];
    dtrain_nccl__hub *hub =
        (dtrain_nccl__hub *)info.allocator.alloc(info.allocator.user, sizeof *hub);
    if (!hub) return dtrain_fail(DTRAIN_ERROR_MEMORY, "no memory for the NCCL communicator");
    memset(hub, 0, sizeof *hub);
    hub->world = world;
    hub->device = dtrain_world_device(world);
    hub->allocator = info.allocator;
    hub->deadline = 1e-3 * (double)info.timeout_ms;
    hub->guest = info.guest;
    hub->given = (const dtrain_nccl_given *)info.comm_given;
    hub->group_end = &hub->group;
    dtrain_result result = dtrain_nccl__hub_prepare(hub);
    if (result == DTRAIN_OK)
        result = dtrain_nccl__comm_make(hub, dtrain_world_size(world), dtrain_world_rank(world),
                                        NULL, "world", &comm);
    const size_t bytes = sizeof(dtrain_nccl__hello) * (size_t)dtrain_world_size(world);
    dtrain_nccl__hello *all = (dtrain_nccl__hello *)dtrain_nccl__alloc(hub, bytes);
    result = all ? dtrain_nccl__rendezvous(hub, result, all, &id) : DTRAIN_ERROR_MEMORY;
    dtrain_nccl__free(hub, all, bytes);
    if (result == DTRAIN_OK) {
        hub->device->while_waiting = dtrain_nccl__watch;
        hub->device->waiting_user = hub;
        result = hub->given && hub->given->comm ? dtrain_nccl__split_host(hub, comm)
                                                : dtrain_nccl__comm_init(comm, &id);
    }
    hub->given = NULL;
    if (result != DTRAIN_OK) {
        dtrain_nccl__hub_close(hub);
        return result;
    }
    *out = &comm->base;
    return DTRAIN_OK;
}

/* Destroy a communicator. The world's is the oldest; destroying it destroys all others. */
static dtrain_result dtrain_nccl__destroy(dtrain_comm *base)
{
    dtrain_nccl__comm *comm = (dtrain_nccl__comm *)base;
    dtrain_nccl__hub *hub = comm->hub;
    const dtrain_result before = hub->code;
    const bool dead = comm->dead;
    if (!comm->next) {
        dtrain_nccl__hub_close(hub);
        return DTRAIN_OK;
    }
    dtrain_nccl__comm_close(comm);
    return dead || hub->code == before ? DTRAIN_OK : dtrain_nccl__hub_error(hub);
}

DTRAIN_API const dtrain_comm_ops *dtrain_nccl_comm_ops(void)
{
    static const dtrain_comm_ops ops = {DTRAIN_COMM_ABI,
                                        true,
                                        "nccl",
                                        dtrain_nccl__create,
                                        dtrain_nccl__start,
                                        dtrain_nccl__test,
                                        dtrain_nccl__wait,
                                        dtrain_nccl__alloc_entry,
                                        dtrain_nccl__free_entry,
                                        dtrain_nccl__split,
                                        dtrain_nccl__fail_entry,
                                        dtrain_nccl__destroy,
                                        NULL};
    return &ops;
}

#endif /* DTRAIN_NCCL_IMPLEMENTATION */
