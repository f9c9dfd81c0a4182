/* A trace: events of a rank, and the file that they are written to. See world/trace.c. */

#pragma once

#include "core/platform_internal.h"
#include "core/result.h"
#include "world/timeline_internal.h"
#include "world/world.h"

#define DTRAIN__TRACE_NAME 40
#define DTRAIN__TRACE_EVENTS 8192u /* held back by default: 1.5 MiB */
#define DTRAIN__TRACE_TEXT 65536u  /* written at once */
#define DTRAIN__TRACE_LINE 1024u   /* of one event, at most */
#define DTRAIN__TRACE_PATH 1100u   /* of a file's name, with what is put into it */
#define DTRAIN__TRACE_LANES 32u    /* collectives that are under way at once */
#define DTRAIN__TRACE_TRACKS 128u  /* numbers of tracks are smaller */

/* Rows of a rank in the viewer. Spans of one row lie inside of each other or apart. */
enum {
    DTRAIN__TRACK_RANK = 1,       /* spans of the thread of rank_main */
    DTRAIN__TRACK_COLLECTIVE = 2, /* and those behind it: one for each of those under way */
    DTRAIN__TRACK_CHECKPOINT = DTRAIN__TRACK_COLLECTIVE + DTRAIN__TRACE_LANES, /* its thread */
    DTRAIN__TRACK_READ /* batches that are read ahead, and those behind it */
};

/* What has been: names are copies, because who gave them may be gone when they are written. */
typedef struct dtrain__trace_event {
    uint64_t begin_ns, end_ns;
    char name[DTRAIN__TRACE_NAME], text[DTRAIN__TRACE_NAME];
    int64_t number; /* or DTRAIN__UNNUMBERED */
    uint32_t track, kind;
    /* of collectives alone, which have a sequence number or a comm */
    uint64_t count, bytes, sequence, flow;
    int64_t comm;
    const char *dtype, *op; /* literals */
} dtrain__trace_event;

typedef struct dtrain__trace {
    int file;                            /* -1: closed */
    uint32_t room, used;                 /* of events */
    uint64_t lost;                       /* collectives for which there was no lane */
    uint64_t written_ns, bytes;          /* of the file */
    uint64_t lanes[DTRAIN__TRACE_LANES]; /* when the last collective in each ended */
    bool named[DTRAIN__TRACE_TRACKS];
    uint64_t first_step, end_step, file_bytes;
    size_t text_bytes;
    char path[DTRAIN__TRACE_PATH];
    char text[DTRAIN__TRACE_TEXT];
    dtrain__trace_event events[1]; /* (room) */
} dtrain__trace;

/* world/trace.c */
DTRAIN__PRIVATE dtrain_result dtrain__trace_create(dtrain_world *world,
                                                   const dtrain_trace_desc *desc);
DTRAIN__PRIVATE void dtrain__trace_destroy(dtrain_world *world);
DTRAIN__PRIVATE void dtrain__trace_put(dtrain_world *world, const dtrain__trace_event *event);
DTRAIN__PRIVATE void dtrain__trace_span(dtrain_world *world, uint32_t track, uint32_t kind,
                                        const char *name, const char *text, int64_t number,
                                        uint64_t begin_ns, uint64_t end_ns);
DTRAIN__PRIVATE void dtrain__trace_step(dtrain_world *world, int64_t step);
DTRAIN__PRIVATE void dtrain__trace_pause(dtrain_world *world, uint64_t now);
