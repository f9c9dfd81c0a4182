/* What other files may use of comm/ beside the public API. */

#pragma once

#include "core/platform_internal.h"
#include "core/result.h"
#include "world/world_internal.h"
#include "comm/backend.h"
#include "device/backend.h"
#include "device/device.h"

typedef struct dtrain__twin {
    struct dtrain__twin *next;
    char *device, *image;
    size_t bytes;
} dtrain__twin;

typedef struct dtrain__staged_work {
    dtrain_work base;
    struct dtrain__staged_work *next, *next_made; /* in the queue or idle; of all */
    dtrain_collective what;                       /* as called */
    dtrain_collective image;                      /* what the local backend does */
    dtrain_event *computed, *copied;
    dtrain_work *inner;
    char *stage[2]; /* images of buffers that have no twin: send, recv; they grow */
    size_t stage_bytes[2];
    int state; /* DTRAIN__COPYING_IN ... */
} dtrain__staged_work;

typedef struct dtrain__staged_comm {
    dtrain_comm base;
    struct dtrain__staged_comm *next; /* in the world's list */
    dtrain_comm *inner;               /* local */
    dtrain_device *device;
    dtrain_stream *stream; /* of copies */
    dtrain__twin *twins;
    dtrain__staged_work *queue; /* not copied out yet, in the order of their start */
    dtrain__staged_work *idle, *made;
    bool failed;
} dtrain__staged_comm;

/* comm/staged.c */
DTRAIN__PRIVATE void dtrain__staged_release(dtrain__staged_comm *comm);
DTRAIN__PRIVATE dtrain_result dtrain__staged_create(dtrain_world *world, dtrain_comm **out);
