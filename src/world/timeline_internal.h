/* The events of a rank as the library records and reads them: see world/timeline.c. */

#pragma once

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/result.h"
#include "world/timeline.h"
#include "world/world.h"

#define DTRAIN__SPAN_DEPTH 32u /* deeper spans count to the span that they are in */
#define DTRAIN__UNNUMBERED INT64_MIN
#define DTRAIN__NO_SPAN UINT32_MAX
#define DTRAIN__EVENT_NAME 130      /* bytes of both names of an event: 48, the rest */
#define DTRAIN__FLIGHT_RECORDS 256u /* calls in a dump; without a trace, all of the ring */
#define DTRAIN__FLIGHT_PATH 1024    /* bytes of a dump directory's name, its 0 included */
#define DTRAIN__TRACE_LANES 32u     /* tracks for calls that are in flight at once */
#define DTRAIN__TRACE_TRACKS 128u   /* numbers of tracks are smaller */

/* Rows of a rank in a trace. Events of one row lie inside of each other or apart. */
enum {
    DTRAIN__TRACK_RANK = 1,    /* spans of the thread of rank_main */
    DTRAIN__TRACK_CALL = 2,    /* collectives and messages: the first of the lanes */
    DTRAIN__TRACK_TENSOR = 26, /* of them, those of a mesh's tensor axis */
    DTRAIN__TRACK_CHECKPOINT = DTRAIN__TRACK_CALL + DTRAIN__TRACE_LANES, /* the writing thread */
    DTRAIN__TRACK_READ /* batches that are read ahead: a row for each place of the ring */
};

enum { DTRAIN__CALL_QUEUED, DTRAIN__CALL_STARTED, DTRAIN__CALL_DONE, DTRAIN__CALL_FAILED };

/* A collective or a message, as the rank has called it. */
typedef struct dtrain__comm_call {
    const char *kind;    /* "all-reduce", a literal; NULL: the event is a span */
    uint64_t sequence;   /* in its communicator, from 1; messages: 0 */
    uint64_t count;      /* elements */
    int64_t comm;        /* number of the communicator; -1: dtrain_world_all_gather */
    int32_t first, size; /* its first rank in the world: groups of one split share a number */
    int32_t root;
    uint8_t dtype, op;
    const char *axis; /* of the mesh that the communicator goes along, a literal; or NULL */
} dtrain__comm_call;

/* A span that is over, or a call from its begin on. It points to nothing but literals: who gave a
 * name may be gone when the event is read. */
typedef struct dtrain__event {
    uint64_t begin_ns, started_ns, end_ns; /* 0: not yet; started: other ranks can see the call */
    int64_t number;                        /* of a step, unit, bucket, ...; or DTRAIN__UNNUMBERED */
    dtrain__comm_call call;
    uint32_t track;
    uint8_t kind, state;           /* dtrain_span_kind; DTRAIN__CALL_QUEUED, ... of a call */
    char name[DTRAIN__EVENT_NAME]; /* two strings: a span's name or who made the call; and after its
                                      0 the parameter or stage that this works on, or "" */
} dtrain__event;

/* Write a dump of this rank into a directory: comm/flight.c, which knows the communicators. */
typedef dtrain_result (*dtrain__dump_fn)(const dtrain_world *world, const char *directory);

/* The newest events; number n, from 1, is at n % room. */
typedef struct dtrain__ring {
    uint64_t count, room;
    uint32_t asked;               /* requests to dump that had come when last checked */
    const char *part, *part_name; /* label of the next call */
    int64_t part_number;
    dtrain_result code; /* the first failure; DTRAIN_OK: none */
    char error[DTRAIN__ERROR_BYTES];
    dtrain__dump_fn dump;
    char directory[DTRAIN__FLIGHT_PATH]; /* of dumps; "": none are written */
    dtrain__event events[1];             /* (room) */
} dtrain__ring;

/* A span that is open. */
typedef struct dtrain__open_span {
    uint64_t begin_ns;
    const char *name, *text; /* text: the parameter or stage that it works on; or NULL */
    int64_t number;
    bool ranged;          /* the device's profiler has it, too */
    uint32_t kind, outer; /* its kind, and that of the span around it */
} dtrain__open_span;

/* Who reads events before newer ones take their place: a trace (monitor/trace.c). The rank's own
 * thread calls its functions. */
typedef struct dtrain__event_reader {
    void (*room)(dtrain_world *world);                  /* one more event comes */
    void (*late)(dtrain_world *world, uint64_t number); /* a call is done */
    void (*pause)(dtrain_world *world, uint64_t now);   /* no span is open */
    void (*step)(dtrain_world *world, int64_t step);    /* a trainer begins a step */
    void (*end)(dtrain_world *world);                   /* the world ends */
} dtrain__event_reader;

#if DTRAIN__MONITOR
/* Open a trace and make it the reader of this rank's events. Ring 4 has the function; a launch
 * without that ring refuses traces (launch/rank.c). */
DTRAIN__PRIVATE dtrain_result dtrain__trace_create(dtrain_world *world,
                                                   const dtrain_trace_desc *desc);
#endif

/* Only the thread of rank_main uses it. */
typedef struct dtrain__timeline {
    uint64_t spent_ns[DTRAIN_SPAN_KINDS];
    uint64_t since_ns;  /* the last reading of the clock: spent_ns is complete up to it */
    uint32_t kind;      /* of the innermost open span */
    uint32_t depth;     /* spans that are open */
    bool traced;        /* spans are recorded, and events go to the reader */
    dtrain__ring *ring; /* NULL in a world that only counts */
    const dtrain__event_reader *reader; /* NULL: no trace is asked for */
    struct dtrain__trace *trace;        /* the reader's own */
    dtrain__open_span open[DTRAIN__SPAN_DEPTH];
} dtrain__timeline;

/* JSON on its way to a file. */
typedef struct dtrain__writer {
    int file, error; /* errno of the first write that failed: nothing is written after it */
    size_t used, room;
    uint64_t bytes; /* written */
    char *text;     /* (room) */
} dtrain__writer;

#define DTRAIN__WRITER_PIECE 1024u /* of one dtrain__writer_add, at most */

/* world/timeline.c */
DTRAIN__PRIVATE dtrain_result dtrain__timeline_create(dtrain_world *world,
                                                      const char *dump_directory,
                                                      const dtrain_trace_desc *trace,
                                                      dtrain__dump_fn dump);
DTRAIN__PRIVATE void dtrain__timeline_destroy(dtrain_world *world);
DTRAIN__PRIVATE dtrain__event *dtrain__event_at(const dtrain_world *world, uint64_t number);
DTRAIN__PRIVATE uint32_t dtrain__span_begin(dtrain_world *world, uint32_t kind, const char *name,
                                            int64_t number);
DTRAIN__PRIVATE void dtrain__span_end(dtrain_world *world, uint32_t mark);
DTRAIN__PRIVATE void dtrain__span_of(dtrain_world *world, uint32_t mark, const char *text);
DTRAIN__PRIVATE uint32_t dtrain__detail_begin(dtrain_world *world, const char *name,
                                              const char *text);
DTRAIN__PRIVATE void dtrain__span_add(dtrain_world *world, uint32_t track, uint32_t kind,
                                      const char *name, const char *text, int64_t number,
                                      uint64_t begin_ns, uint64_t end_ns);
DTRAIN__PRIVATE double dtrain__span_seconds(const dtrain_world *world, dtrain_span_kind kind);
DTRAIN__PRIVATE void dtrain__call_label(dtrain_world *world, const char *part, int64_t number,
                                        const char *name);
DTRAIN__PRIVATE uint64_t dtrain__call_queued(dtrain_world *world, const dtrain__comm_call *call);
DTRAIN__PRIVATE void dtrain__call_started(const dtrain_world *world, uint64_t number);
DTRAIN__PRIVATE void dtrain__call_done(dtrain_world *world, uint64_t number);
DTRAIN__PRIVATE uint64_t dtrain__enter(dtrain_world *world, const char *name);
DTRAIN__PRIVATE uint64_t dtrain__leave(dtrain_world *world, dtrain_result result);
DTRAIN__PRIVATE void dtrain__beat(dtrain_world *world, uint64_t now);
DTRAIN__PRIVATE void dtrain__failed(dtrain_world *world, dtrain_result code);

DTRAIN__PRIVATE void dtrain__writer_flush(dtrain__writer *out);
DTRAIN__PRIVATE DTRAIN__PRINTF(2, 3) void dtrain__writer_add(dtrain__writer *out,
                                                             const char *format, ...);
DTRAIN__PRIVATE void dtrain__writer_string(dtrain__writer *out, const char *name, const char *text);
DTRAIN__PRIVATE void dtrain__writer_call(dtrain__writer *out, const dtrain__event *event);
