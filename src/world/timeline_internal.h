/* The events of a rank, see world/timeline.c. */

#pragma once

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/result.h"
#include "world/timeline.h"
#include "world/world.h"

#define DTRAIN__SPAN_DEPTH 32u /* a deeper span counts to the span around it */
#define DTRAIN__UNNUMBERED INT64_MIN
#define DTRAIN__NO_SPAN UINT32_MAX
#define DTRAIN__EVENT_NAME 130      /* bytes of both names of an event: 48 and the rest */
#define DTRAIN__FLIGHT_RECORDS 256u /* calls in a dump; the ring's room without a trace */
#define DTRAIN__FLIGHT_PATH 1024    /* bytes of a dump directory's name with its 0 */
#define DTRAIN__TRACE_LANES 32u     /* tracks for concurrent calls */
#define DTRAIN__TRACE_TRACKS 128u   /* limit of track numbers */

/* Rows of a rank in a trace. Events of one row nest or do not overlap. */
enum {
    DTRAIN__TRACK_RANK = 1,    /* spans of the thread of rank_main */
    DTRAIN__TRACK_CALL = 2,    /* first lane of collectives and messages */
    DTRAIN__TRACK_TENSOR = 26, /* first lane of a mesh's tensor axis */
    DTRAIN__TRACK_CHECKPOINT = DTRAIN__TRACK_CALL + DTRAIN__TRACE_LANES, /* the writing thread */
    DTRAIN__TRACK_READ /* batches read ahead: one row for each place of the loader's ring */
};

enum { DTRAIN__CALL_QUEUED, DTRAIN__CALL_STARTED, DTRAIN__CALL_DONE, DTRAIN__CALL_FAILED };

/* A collective or a message. */
typedef struct dtrain__comm_call {
    const char *kind;    /* "all-reduce", a literal; NULL if the event is a span */
    uint64_t sequence;   /* number in its communicator, from 1; 0 for a message */
    uint64_t count;      /* elements */
    int64_t comm;        /* number of the communicator; -1: dtrain_world_all_gather */
    int32_t first, size; /* first: its first rank in the world; groups of a split share `comm` */
    int32_t root;
    uint8_t dtype, op;
    const char *axis; /* the communicator's axis of a mesh, a literal; or NULL */
} dtrain__comm_call;

/* A span that has ended, or a call. Its pointers are literals: other strings can be freed before
 * the event is read. */
typedef struct dtrain__event {
    uint64_t begin_ns, started_ns, end_ns; /* 0: not yet; started: other ranks can see the call */
    int64_t number;                        /* of a step, unit, bucket, ...; or DTRAIN__UNNUMBERED */
    dtrain__comm_call call;
    uint32_t track;
    uint8_t kind, state;           /* dtrain_span_kind; state of a call: DTRAIN__CALL_QUEUED, ... */
    char name[DTRAIN__EVENT_NAME]; /* two strings: the span's name or the call's label, and the
                                      parameter or stage that it works on, or "" */
} dtrain__event;

/* Write a dump of this rank into a directory, see comm/flight.c. */
typedef dtrain_result (*dtrain__dump_fn)(const dtrain_world *world, const char *directory);

/* The newest events; event n, from 1, is at n % room. */
typedef struct dtrain__ring {
    uint64_t count, room;
    uint32_t asked;               /* number of requests to dump at the last check */
    const char *part, *part_name; /* label of the next call */
    int64_t part_number;
    dtrain_result code; /* of the first failure; DTRAIN_OK: none */
    char error[DTRAIN__ERROR_BYTES];
    dtrain__dump_fn dump;
    char directory[DTRAIN__FLIGHT_PATH]; /* of dumps; "" for none */
    dtrain__event events[1];             /* (room) */
} dtrain__ring;

typedef struct dtrain__open_span {
    uint64_t begin_ns;
    const char *name, *text; /* text: the parameter or stage that it works on; or NULL */
    int64_t number;
    bool ranged;          /* true if the device's profiler has a range for it */
    uint32_t kind, outer; /* outer: kind of the span around it */
} dtrain__open_span;

/* The reader of events before newer events replace them: a trace (monitor/trace.c). The rank's own
 * thread calls these functions. */
typedef struct dtrain__event_reader {
    void (*room)(dtrain_world *world);                  /* before a new event */
    void (*late)(dtrain_world *world, uint64_t number); /* a call is done */
    void (*pause)(dtrain_world *world, uint64_t now);   /* no span is open */
    void (*step)(dtrain_world *world, int64_t step);    /* a trainer begins a step */
    void (*end)(dtrain_world *world);                   /* the world ends */
} dtrain__event_reader;

#if DTRAIN__MONITOR
/* Open a trace and make it the reader of this rank's events. Ring 4 has this function; without that
 * ring, launch/rank.c refuses traces. */
DTRAIN__PRIVATE dtrain_result dtrain__trace_create(dtrain_world *world,
                                                   const dtrain_trace_desc *desc);
#endif

/* Only the thread of rank_main uses it. */
typedef struct dtrain__timeline {
    uint64_t spent_ns[DTRAIN_SPAN_KINDS];
    uint64_t since_ns;  /* last reading of the clock; spent_ns includes the time until then */
    uint32_t kind;      /* of the innermost open span */
    uint32_t depth;     /* number of open spans */
    bool traced;        /* true if spans are recorded and events go to the reader */
    dtrain__ring *ring; /* NULL in a world that only counts */
    const dtrain__event_reader *reader; /* NULL without a trace */
    struct dtrain__trace *trace;        /* data of the reader */
    dtrain__open_span open[DTRAIN__SPAN_DEPTH];
} dtrain__timeline;

/* A buffered writer of JSON. */
typedef struct dtrain__writer {
    int file, error; /* error: errno of the first failed write, which is the last write */
    size_t used, room;
    uint64_t bytes; /* written */
    char *text;     /* (room) */
} dtrain__writer;

#define DTRAIN__WRITER_PIECE 1024u /* most bytes of one dtrain__writer_add */

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
