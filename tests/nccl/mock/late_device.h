/* late_device.h: a device for the tests of dtrain_nccl.h. Its memory is the host's, but its streams run late,
 * as a GPU's do: what is queued runs when something waits for it, after a few looks. So an event that is not
 * waited for, or a result that is read too early, shows as a wrong number (fresh memory is full of 0xff).
 *
 *     stream | item | item | wait for event e, 3rd time | item |      an item is a step that is called until
 *                                                                     it says that it is done
 * Between graph_begin and graph_end the items of the compute stream, and of streams that wait for events of
 * captured ones, go to the graph. As in CUDA, asking an event meanwhile is an error, and so is a stream that
 * has not been joined to the compute stream at the end.
 *
 * Everything is of one thread: ranks must be processes. What is misused is counted and written to stderr. */
#ifndef DTRAIN_TEST_LATE_DEVICE_H
#define DTRAIN_TEST_LATE_DEVICE_H

#include "dtrain.h"
#include "nccl_mock.h"

#include <sched.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

typedef struct late_item {
    struct late_item *next;
    bool (*step)(void *state);
    size_t bytes;
    char state[]; /* aligned: three words before it */
} late_item;

typedef struct late_queue {
    late_item *head, **tail;
} late_queue;

typedef struct late_stream {
    late_queue queue;
    struct late_stream *next;
    bool high_priority;
    bool captured; /* its items go to the graph */
    uint64_t put,
        joined; /* items put into the graph; of those, before an event the compute stream waits for */
} late_stream;

typedef struct late_event {
    struct late_event *next;
    uint64_t recorded, happened; /* how often */
    late_stream *origin;         /* when captured */
    uint64_t origin_put;
    bool alive, captured;
} late_event;

typedef struct late_reference {
    void (*release)(void *user);
    void *user;
} late_reference;

typedef struct late_graph {
    struct late_graph *next;
    late_queue items;
    late_reference references[64];
    int reference_count;
    bool dropped;
} late_graph;

typedef struct late_block {
    struct late_block *next;
    char *begin;
    size_t bytes;
    bool host;
} late_block;

typedef struct late_counts {
    int misuses, queries;                             /* of events */
    int allocations, events, streams, graphs, blocks; /* made so far; blocks: alive */
} late_counts;

static late_counts late_count;
static bool late_silent;               /* misuse is expected */
static dtrain_device *late_now;        /* this process's; the mock's hooks have no other way */
static __thread int late_current = -1; /* the device that this thread has chosen, as CUDA counts */
enum { LATE_LOOKS = 2 };               /* looks at an event before its stream moves */

typedef struct late_state {
    late_stream compute; /* and all others behind it */
    late_event *events;
    late_block *blocks;
    uint32_t index;
    int looks;
    bool capturing, compute_last;
    late_graph *graph;  /* that is being captured */
    late_graph *graphs; /* that are there */
} late_state;

static inline late_state *late_get(dtrain_device *device) { return (late_state *)device->state; }

static inline dtrain_result late_misuse(const char *what)
{
    late_count.misuses++;
    if (!late_silent) fprintf(stderr, "late_device: %s\n", what);
    return dtrain_fail(DTRAIN_ERROR_USAGE, "late device: %s", what);
}

/* ---- streams ---- */

static inline void late_put(late_queue *queue, bool (*step)(void *), const void *state,
                            size_t bytes)
{
    late_item *item = (late_item *)malloc(sizeof *item + bytes);
    if (!item) abort();
    item->next = NULL;
    item->step = step;
    item->bytes = bytes;
    if (bytes) memcpy(item->state, state, bytes);
    *queue->tail = item;
    queue->tail = &item->next;
}

static inline void late_drop(late_queue *queue)
{
    while (queue->head) {
        late_item *item = queue->head;
        queue->head = item->next;
        free(item);
    }
    queue->tail = &queue->head;
}

static inline void late_enqueue(late_state *late, late_stream *stream, bool (*step)(void *),
                                const void *state, size_t bytes)
{
    if (!stream) stream = &late->compute;
    if (!stream->captured) {
        late_put(&stream->queue, step, state, bytes);
        return;
    }
    late_put(&late->graph->items, step, state, bytes);
    stream->put++;
}

/* One stream as far as it goes; true when something was done. */
static inline bool late_run_stream(late_stream *stream)
{
    late_item *item;
    bool moved = false;
    while ((item = stream->queue.head) && item->step(item->state)) {
        stream->queue.head = item->next;
        if (!item->next) stream->queue.tail = &stream->queue.head;
        free(item);
        moved = true;
    }
    return moved;
}

/* All streams as far as they go, the compute stream first or last in turn: an order that is not asked for
 * must not be relied on. True when all are empty. */
static inline bool late_run(late_state *late)
{
    bool moved = true, empty = true;
    late->compute_last = !late->compute_last;
    while (moved) {
        moved = !late->compute_last && late_run_stream(&late->compute);
        for (late_stream *stream = late->compute.next; stream; stream = stream->next)
            moved = late_run_stream(stream) || moved;
        moved = (late->compute_last && late_run_stream(&late->compute)) || moved;
    }
    for (late_stream *stream = &late->compute; stream; stream = stream->next)
        empty = empty && !stream->queue.head;
    return empty;
}

static dtrain_result late_synchronize(dtrain_device *device)
{
    late_state *late = late_get(device);
    if (late->capturing) return late_misuse("synchronize while capturing");
    while (!late_run(late)) {
        if (device->while_waiting) {
            const dtrain_result result = device->while_waiting(device->waiting_user);
            if (result != DTRAIN_OK) return result;
        }
        sched_yield();
    }
    return DTRAIN_OK;
}

static dtrain_result late_stream_create(dtrain_device *device, bool high_priority,
                                        dtrain_stream **out)
{
    late_state *late = late_get(device);
    late_stream *stream = (late_stream *)calloc(1, sizeof *stream);
    if (!stream) return DTRAIN_ERROR_MEMORY;
    stream->queue.tail = &stream->queue.head;
    stream->high_priority = high_priority;
    stream->next = late->compute.next;
    late->compute.next = stream;
    late_count.streams++;
    *out = (dtrain_stream *)stream;
    return DTRAIN_OK;
}

static void late_stream_destroy(dtrain_device *device, dtrain_stream *handle)
{
    late_stream *stream = (late_stream *)handle;
    late_stream **link = &late_get(device)->compute.next;
    while (*link && *link != stream) link = &(*link)->next;
    if (!*link) {
        late_misuse("no such stream");
        return;
    }
    *link = stream->next;
    late_drop(&stream->queue);
    free(stream);
}

static void *late_stream_native(dtrain_device *device, dtrain_stream *stream)
{
    return stream ? (void *)stream : &late_get(device)->compute;
}

/* ---- events ---- */

typedef struct late_mark {
    late_event *event;
    uint64_t time;
} late_mark;

static bool late_step_record(void *state)
{
    late_mark *mark = (late_mark *)state;
    if (mark->event->happened < mark->time) mark->event->happened = mark->time;
    return true;
}
static bool late_step_wait(void *state)
{
    late_mark *mark = (late_mark *)state;
    return mark->event->happened >= mark->time;
}

static dtrain_result late_event_create(dtrain_device *device, dtrain_event **out)
{
    late_state *late = late_get(device);
    late_event *event = (late_event *)calloc(1, sizeof *event);
    if (!event) return DTRAIN_ERROR_MEMORY;
    event->alive = true;
    event->next = late->events;
    late->events = event;
    late_count.events++;
    *out = (dtrain_event *)event;
    return DTRAIN_OK;
}

/* Freed with the device: streams may still hold it. */
static void late_event_destroy(dtrain_device *device, dtrain_event *handle)
{
    late_event *event = (late_event *)handle;
    (void)device;
    if (!event->alive) late_misuse("an event is destroyed twice");
    event->alive = false;
}

static dtrain_result late_event_record(dtrain_device *device, dtrain_event *handle,
                                       dtrain_stream *stream)
{
    late_event *event = (late_event *)handle;
    late_state *late = late_get(device);
    late_stream *at = stream ? (late_stream *)stream : &late->compute;
    late_mark mark;
    if (!event->alive) return late_misuse("a destroyed event is recorded");
    event->captured = at->captured;
    event->origin = at;
    event->origin_put = at->put;
    if (at->captured) return DTRAIN_OK; /* the graph is one list: order is kept without marks */
    mark.event = event;
    mark.time = ++event->recorded;
    late_enqueue(late, at, late_step_record, &mark, sizeof mark);
    return DTRAIN_OK;
}

static dtrain_result late_event_wait(dtrain_device *device, dtrain_event *handle,
                                     dtrain_stream *stream)
{
    late_event *event = (late_event *)handle;
    late_state *late = late_get(device);
    late_stream *at = stream ? (late_stream *)stream : &late->compute;
    late_mark mark;
    if (!event->alive) return late_misuse("a destroyed event is waited for");
    if (event->captured && !late->capturing)
        return late_misuse("an event of a graph is waited for outside");
    if (event->captured) {
        at->captured = true;
        if (at == &late->compute && event->origin->joined < event->origin_put)
            event->origin->joined = event->origin_put;
        return DTRAIN_OK;
    }
    if (at->captured)
        return late_misuse("a captured stream waits for an event from outside of the graph");
    mark.event = event;
    mark.time = event->recorded;
    late_enqueue(late, at, late_step_wait, &mark, sizeof mark);
    return DTRAIN_OK;
}

static dtrain_result late_event_query(dtrain_device *device, dtrain_event *handle, bool *done)
{
    late_event *event = (late_event *)handle;
    late_state *late = late_get(device);
    late_count.queries++;
    *done = false;
    if (!event->alive) return late_misuse("a destroyed event is queried");
    if (late->capturing || event->captured)
        return late_misuse("an event is queried while, or from what is, captured");
    if (++late->looks > LATE_LOOKS) {
        late->looks = 0;
        late_run(late);
    }
    *done = event->happened >= event->recorded;
    return DTRAIN_OK;
}

/* ---- memory ---- */

static inline late_block *late_find(late_state *late, const void *memory, size_t bytes, bool host)
{
    for (late_block *block = late->blocks; block; block = block->next)
        if (block->host == host && (const char *)memory >= block->begin &&
            (const char *)memory + bytes <= block->begin + block->bytes)
            return block;
    return NULL;
}

static inline dtrain_result late_get_block(late_state *late, size_t bytes, bool host, void **out)
{
    late_block *block = (late_block *)malloc(sizeof *block);
    char *memory = NULL;
    if (!block || posix_memalign((void **)&memory, 256, bytes ? bytes : 1) != 0) {
        free(block);
        return dtrain_fail(DTRAIN_ERROR_MEMORY, "no memory for %zu bytes on the late device",
                           bytes);
    }
    memset(memory, 0xff, bytes);
    block->begin = memory;
    block->bytes = bytes;
    block->host = host;
    block->next = late->blocks;
    late->blocks = block;
    late_count.allocations++;
    late_count.blocks++;
    *out = memory;
    return DTRAIN_OK;
}

static inline void late_put_block(late_state *late, void *memory)
{
    late_block **link = &late->blocks;
    while (*link && (*link)->begin != (char *)memory) link = &(*link)->next;
    late_block *block = *link;
    if (!block) {
        late_misuse("memory is freed that was not allocated");
        return;
    }
    *link = block->next;
    free(block->begin);
    free(block);
    late_count.blocks--;
}

static dtrain_result late_alloc(dtrain_device *device, size_t bytes, void **out)
{
    return late_get_block(late_get(device), bytes, false, out);
}
static void late_free(dtrain_device *device, void *memory, size_t bytes)
{
    (void)bytes;
    late_put_block(late_get(device), memory);
}
static dtrain_result late_host_alloc(dtrain_device *device, size_t bytes, void **out)
{
    return late_get_block(late_get(device), bytes, true, out);
}
static void late_host_free(dtrain_device *device, void *memory, size_t bytes)
{
    (void)bytes;
    late_put_block(late_get(device), memory);
}

static bool late_is_device_memory(dtrain_device *device, const void *memory)
{
    return late_find(late_get(device), memory, 1, false) != NULL;
}

typedef struct late_move {
    void *to;
    const void *from;
    size_t bytes;
} late_move;

static bool late_step_move(void *state)
{
    const late_move *move = (const late_move *)state;
    if (move->from) memmove(move->to, move->from, move->bytes);
    else memset(move->to, 0, move->bytes);
    return true;
}

static dtrain_result late_copy_async(dtrain_device *device, void *to, const void *from,
                                     size_t bytes, dtrain_copy_kind kind, dtrain_stream *stream)
{
    late_state *late = late_get(device);
    const late_move move = {to, from, bytes};
    const bool host_to = kind == DTRAIN_COPY_DEVICE_TO_HOST,
               host_from = kind == DTRAIN_COPY_HOST_TO_DEVICE;
    if (!late_find(late, to, bytes, host_to)) return late_misuse("copy_async: wrong destination");
    if (!late_find(late, from, bytes, host_from)) return late_misuse("copy_async: wrong source");
    late_enqueue(late, (late_stream *)stream, late_step_move, &move, sizeof move);
    return DTRAIN_OK;
}

static dtrain_result late_copy(dtrain_device *device, void *to, const void *from, size_t bytes,
                               dtrain_copy_kind kind)
{
    const dtrain_result result = late_synchronize(device);
    if (result != DTRAIN_OK) return result;
    if (kind != DTRAIN_COPY_DEVICE_TO_HOST && !late_find(late_get(device), to, bytes, false))
        return late_misuse("copy: wrong destination");
    if (kind != DTRAIN_COPY_HOST_TO_DEVICE && !late_find(late_get(device), from, bytes, false))
        return late_misuse("copy: wrong source");
    memmove(to, from, bytes);
    return DTRAIN_OK;
}

static dtrain_result late_zero(dtrain_device *device, void *memory, size_t bytes)
{
    const late_move move = {memory, NULL, bytes};
    if (!late_find(late_get(device), memory, bytes, false))
        return late_misuse("zero: not memory of the device");
    late_enqueue(late_get(device), NULL, late_step_move, &move, sizeof move);
    return DTRAIN_OK;
}

/* ---- the one kernel ---- */

static bool late_step_axpby(void *state)
{
    const dtrain_axpby_args *args = (const dtrain_axpby_args *)state;
    for (int64_t i = 0; i < args->count; i++) {
        const uint16_t *half = (const uint16_t *)args->x + i;
        if (args->dtype == DTRAIN_DTYPE_BF16 || args->dtype == DTRAIN_DTYPE_F16)
            ((uint16_t *)args->y)[i] = dtrain_half_from_f32(
                args->dtype, (float)args->a * dtrain_half_to_f32(args->dtype, *half));
        else if (args->dtype == DTRAIN_DTYPE_F64)
            ((double *)args->y)[i] = args->a * ((const double *)args->x)[i];
        else ((float *)args->y)[i] = (float)args->a * ((const float *)args->x)[i];
    }
    return true;
}

static dtrain_result late_axpby(dtrain_device *device, const dtrain_axpby_args *args)
{
    if (args->accumulate || args->broadcast || !args->x)
        return late_misuse("only y = a x is built here");
    late_enqueue(late_get(device), NULL, late_step_axpby, args, sizeof *args);
    return DTRAIN_OK;
}

/* ---- graphs ---- */

static void late_graph_drop(late_graph *graph)
{
    graph->dropped = true;
    late_drop(&graph->items);
    while (graph->reference_count > 0) {
        const late_reference *reference = &graph->references[--graph->reference_count];
        reference->release(reference->user);
    }
}

static dtrain_result late_graph_begin(dtrain_device *device)
{
    late_state *late = late_get(device);
    late->graph = (late_graph *)calloc(1, sizeof *late->graph);
    if (!late->graph) return DTRAIN_ERROR_MEMORY;
    late->graph->items.tail = &late->graph->items.head;
    late->capturing = true;
    late->compute.captured = true;
    late_count.graphs++;
    return DTRAIN_OK;
}

static bool late_capturing(dtrain_device *device) { return late_get(device)->compute.captured; }

/* True if every stream of the capture has been joined to the compute stream. */
static inline bool late_end_capture(late_state *late)
{
    bool joined = true;
    for (late_stream *stream = &late->compute; stream; stream = stream->next) {
        joined = joined && (stream == &late->compute || stream->joined == stream->put);
        stream->captured = false;
        stream->put = stream->joined = 0;
    }
    late->capturing = false;
    return joined;
}

static dtrain_result late_graph_end(dtrain_device *device, dtrain_graph **out)
{
    late_state *late = late_get(device);
    *out = NULL;
    if (!late->capturing)
        return dtrain_fail(DTRAIN_ERROR_USAGE, "late device: nothing is captured");
    const bool joined = late_end_capture(late);
    late->graph->next = late->graphs;
    late->graphs = late->graph;
    *out = (dtrain_graph *)late->graph;
    return joined ? DTRAIN_OK
                  : late_misuse("a captured stream was not joined to the compute stream");
}

static dtrain_result late_graph_launch(dtrain_device *device, dtrain_graph *handle)
{
    late_state *late = late_get(device);
    late_graph *graph = (late_graph *)handle;
    if (graph->dropped)
        return dtrain_fail(DTRAIN_ERROR_USAGE, "late device: the graph was dropped");
    for (late_item *item = graph->items.head; item; item = item->next)
        late_put(&late->compute.queue, item->step, item->state, item->bytes);
    return DTRAIN_OK;
}

static void late_graph_destroy(dtrain_device *device, dtrain_graph *graph)
{
    late_graph **link = &late_get(device)->graphs;
    if (!graph) return;
    while (*link != (late_graph *)graph) link = &(*link)->next;
    *link = (*link)->next;
    late_graph_drop((late_graph *)graph);
    free(graph);
}

static void late_graphs_drop(dtrain_device *device)
{
    late_state *late = late_get(device);
    if (late->capturing) {
        late_end_capture(late);
        late_graph_drop(late->graph);
        free(late->graph);
    }
    for (late_graph *graph = late->graphs; graph; graph = graph->next) late_graph_drop(graph);
}

/* A device that has failed is given a moment. */
static bool late_may_free(dtrain_device *device)
{
    const double begin = dtrain_seconds();
    if (late_get(device)->capturing) late_misuse("memory is freed while capturing");
    if (late_synchronize(device) == DTRAIN_OK) return true;
    while (!late_run(late_get(device)))
        if (dtrain_seconds() - begin > 0.5) return false;
    return true;
}

/* ---- the device ---- */

static dtrain_result late_create(const dtrain_device_desc *desc, dtrain_device *device)
{
    late_state *late = (late_state *)calloc(1, sizeof *late);
    if (!late) return DTRAIN_ERROR_MEMORY;
    late->compute.queue.tail = &late->compute.queue.head;
    if (desc->device_index != DTRAIN_DEVICE_CURRENT) late_current = (int)desc->device_index;
    late->index = (uint32_t)late_current;
    device->state = late;
    late_now = device;
    return DTRAIN_OK;
}

static void late_destroy(dtrain_device *device)
{
    late_state *late = late_get(device);
    if (!late) return;
    if (late->compute.next) late_misuse("a stream is left");
    if (late->blocks) late_misuse("memory is left");
    for (late_event *event = late->events; event; event = event->next)
        if (event->alive) {
            late_misuse("an event is left");
            break;
        }
    late_drop(&late->compute.queue);
    while (late->graphs) late_graph_destroy(device, (dtrain_graph *)late->graphs);
    while (late->events) {
        late_event *event = late->events;
        late->events = event->next;
        free(event);
    }
    free(late);
    device->state = NULL;
}

static dtrain_result late_query(dtrain_device *device, dtrain_device_info *info)
{
    memset(info, 0, sizeof *info);
    info->index = late_get(device)->index;
    snprintf(info->name, sizeof info->name, "late device");
    snprintf(info->id, sizeof info->id, "late-%u", info->index);
    return DTRAIN_OK;
}

static inline const dtrain_device_ops *late_device_ops(void)
{
    static dtrain_device_ops ops; /* filled anew each time, with the same */
    ops.abi = DTRAIN_DEVICE_ABI;
    ops.name = "late";
    ops.create = late_create;
    ops.destroy = late_destroy;
    ops.query = late_query;
    ops.synchronize = late_synchronize;
    ops.alloc = late_alloc;
    ops.free = late_free;
    ops.copy = late_copy;
    ops.zero = late_zero;
    ops.host_alloc = late_host_alloc;
    ops.host_free = late_host_free;
    ops.copy_async = late_copy_async;
    ops.stream_create = late_stream_create;
    ops.stream_destroy = late_stream_destroy;
    ops.stream_native = late_stream_native;
    ops.event_create = late_event_create;
    ops.event_destroy = late_event_destroy;
    ops.event_record = late_event_record;
    ops.event_wait = late_event_wait;
    ops.event_query = late_event_query;
    ops.is_device_memory = late_is_device_memory;
    ops.graph_begin = late_graph_begin;
    ops.graph_end = late_graph_end;
    ops.graph_launch = late_graph_launch;
    ops.graph_destroy = late_graph_destroy;
    ops.graphs_drop = late_graphs_drop;
    ops.capturing = late_capturing;
    ops.may_free = late_may_free;
    ops.axpby = late_axpby;
    return &ops;
}

/* ---- what the mock and dtrain_nccl.h ask for ---- */

bool nccl_mock_enqueue(cudaStream_t native, bool (*step)(void *), const void *state, size_t bytes)
{
    late_state *late = late_get(late_now);
    for (late_stream *stream = late->compute.next; stream; stream = stream->next) {
        if ((void *)stream != (void *)native) continue;
        if (!stream->high_priority) late_misuse("the communication stream has no priority");
        late_enqueue(late, stream, step, state, bytes);
        return true;
    }
    return false;
}

bool nccl_mock_retain(cudaStream_t native, void (*release)(void *), void *user)
{
    late_graph *graph = late_get(late_now)->graph;
    if (!((const late_stream *)(const void *)native)->captured) return false;
    if (graph->reference_count == sizeof graph->references / sizeof *graph->references) abort();
    graph->references[graph->reference_count].release = release;
    graph->references[graph->reference_count++].user = user;
    return true;
}

void nccl_mock_advance(void) {} /* its streams are of one thread */

bool nccl_mock_is_idle(void)
{
    for (late_stream *stream = &late_get(late_now)->compute; stream; stream = stream->next)
        for (late_item *item = stream->queue.head; item; item = item->next)
            if (item->step != late_step_record && item->step != late_step_wait) return false;
    return true;
}

bool nccl_mock_is_device_memory(const void *memory, size_t bytes)
{
    return late_find(late_get(late_now), memory, bytes, false) != NULL;
}

void *nccl_mock_device_alloc(size_t bytes)
{
    void *memory = NULL;
    late_get_block(late_get(late_now), bytes, false, &memory);
    return memory;
}

void nccl_mock_device_free(void *memory) { late_put_block(late_get(late_now), memory); }

cudaError_t cudaGetDevice(int *device)
{
    *device = late_current;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device)
{
    late_current = device;
    return cudaSuccess;
}

const char *cudaGetErrorString(cudaError_t error)
{
    return error == cudaSuccess ? "no error" : "invalid argument";
}

#endif
