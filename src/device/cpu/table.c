/* Streams, events, pinned memory: everything is done when the call returns. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/log.h"
#include "core/result.h"
#include "device/backend.h"
#include "device/cpu/cpu_internal.h"
#include "device/device.h"

static dtrain_result dtrain__cpu_query(dtrain_device *device, dtrain_device_info *info)
{
    (void)device;
    memset(info, 0, sizeof *info);
    snprintf(info->name, sizeof info->name, "CPU (%s)", dtrain_cpu_kernel_name());
    snprintf(info->id, sizeof info->id, "cpu");
    info->count = 1;
    const long page = sysconf(_SC_PAGESIZE);
    const long pages = sysconf(_SC_PHYS_PAGES), free_pages = sysconf(_SC_AVPHYS_PAGES);
    info->memory_bytes = pages > 0 ? (uint64_t)pages * (uint64_t)page : 0;
    info->free_bytes = free_pages > 0 ? (uint64_t)free_pages * (uint64_t)page : 0;
    return DTRAIN_OK;
}

/* Like alloc, but it is not the model's: not counted. */
static dtrain_result dtrain__cpu_host_alloc(dtrain_device *device, size_t bytes, void **memory)
{
    const dtrain_allocator allocator = dtrain__cpu_allocator(device);
    *memory = dtrain__aligned_alloc(&allocator, bytes);
    return *memory ? DTRAIN_OK : dtrain_fail(DTRAIN_ERROR_MEMORY, "no memory for %zu bytes", bytes);
}
static void dtrain__cpu_host_free(dtrain_device *device, void *memory, size_t bytes)
{
    const dtrain_allocator allocator = dtrain__cpu_allocator(device);
    dtrain__aligned_free(&allocator, memory, bytes);
}

DTRAIN__PRIVATE dtrain_result dtrain__cpu_host_register(dtrain_device *device, void *memory,
                                                        size_t bytes)
{
    (void)device;
    (void)memory;
    (void)bytes;
    return DTRAIN_OK;
}
DTRAIN__PRIVATE void dtrain__cpu_host_unregister(dtrain_device *device, void *memory)
{
    (void)device;
    (void)memory;
}

DTRAIN__PRIVATE dtrain_result dtrain__cpu_copy_async(dtrain_device *device, void *to,
                                                     const void *from, size_t bytes,
                                                     dtrain_copy_kind kind, dtrain_stream *stream)
{
    (void)stream;
    return device->ops->copy(device, to, from, bytes, kind);
}

/* A stream or an event has no state: any address will do, and the table itself is one. */
DTRAIN__PRIVATE dtrain_result dtrain__cpu_stream_create(dtrain_device *device, bool high_priority,
                                                        dtrain_stream **out)
{
    (void)high_priority;
    *out = (dtrain_stream *)(uintptr_t)device->ops;
    return DTRAIN_OK;
}
DTRAIN__PRIVATE void dtrain__cpu_stream_destroy(dtrain_device *device, dtrain_stream *stream)
{
    (void)device;
    (void)stream;
}
DTRAIN__PRIVATE void *dtrain__cpu_stream_native(dtrain_device *device, dtrain_stream *stream)
{
    (void)device;
    (void)stream;
    return NULL;
}

DTRAIN__PRIVATE dtrain_result dtrain__cpu_event_create(dtrain_device *device, bool timing,
                                                       dtrain_event **out)
{
    (void)timing;
    *out = (dtrain_event *)(uintptr_t)device->ops;
    return DTRAIN_OK;
}
DTRAIN__PRIVATE void dtrain__cpu_event_destroy(dtrain_device *device, dtrain_event *event)
{
    (void)device;
    (void)event;
}
DTRAIN__PRIVATE dtrain_result dtrain__cpu_event_record(dtrain_device *device, dtrain_event *event,
                                                       dtrain_stream *stream)
{
    return dtrain__cpu_event_wait(device, event, stream); /* also does nothing */
}
DTRAIN__PRIVATE dtrain_result dtrain__cpu_event_wait(dtrain_device *device, dtrain_event *event,
                                                     dtrain_stream *stream)
{
    (void)device;
    (void)event;
    (void)stream;
    return DTRAIN_OK;
}
DTRAIN__PRIVATE dtrain_result dtrain__cpu_event_query(dtrain_device *device, dtrain_event *event,
                                                      bool *done)
{
    (void)device;
    (void)event;
    *done = true;
    return DTRAIN_OK;
}
DTRAIN__PRIVATE bool dtrain__cpu_is_device_memory(dtrain_device *device, const void *memory)
{
    (void)device;
    (void)memory;
    return false; /* host memory, all of it */
}

static dtrain_result dtrain__no_graphs(const dtrain_device *device)
{
    return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED, "the %s device cannot record graphs",
                       device->ops->name);
}
DTRAIN__PRIVATE dtrain_result dtrain__cpu_graph_begin(dtrain_device *device)
{
    return dtrain__no_graphs(device);
}
DTRAIN__PRIVATE dtrain_result dtrain__cpu_graph_end(dtrain_device *device, dtrain_graph **out)
{
    *out = NULL;
    return dtrain__no_graphs(device);
}
DTRAIN__PRIVATE dtrain_result dtrain__cpu_graph_launch(dtrain_device *device, dtrain_graph *graph)
{
    (void)graph;
    return dtrain__no_graphs(device);
}
DTRAIN__PRIVATE void dtrain__cpu_graph_destroy(dtrain_device *device, dtrain_graph *graph)
{
    (void)device;
    (void)graph;
}

/* Every kernel in the table's order. */

DTRAIN_API const dtrain_device_ops *dtrain_cpu_device_ops(void)
{
#define DTRAIN__CPU_ENTRY(op) dtrain__cpu_##op,
    static const dtrain_device_ops ops = {DTRAIN_DEVICE_ABI,
                                          "cpu",
                                          true,
                                          dtrain__cpu_create,
                                          dtrain__cpu_destroy,
                                          dtrain__cpu_query,
                                          dtrain__cpu_synchronize,
                                          dtrain__cpu_alloc,
                                          dtrain__cpu_free,
                                          dtrain__cpu_copy,
                                          dtrain__cpu_zero,
                                          dtrain__cpu_host_alloc,
                                          dtrain__cpu_host_free,
                                          dtrain__cpu_host_register,
                                          dtrain__cpu_host_unregister,
                                          dtrain__cpu_copy_async,
                                          dtrain__cpu_stream_create,
                                          dtrain__cpu_stream_destroy,
                                          dtrain__cpu_stream_native,
                                          dtrain__cpu_event_create,
                                          dtrain__cpu_event_destroy,
                                          dtrain__cpu_event_record,
                                          dtrain__cpu_event_wait,
                                          dtrain__cpu_event_query,
                                          dtrain__cpu_is_device_memory,
                                          dtrain__cpu_graph_begin,
                                          dtrain__cpu_graph_end,
                                          dtrain__cpu_graph_launch,
                                          dtrain__cpu_graph_destroy,
                                          DTRAIN__KERNEL_LIST(DTRAIN__CPU_ENTRY)};
    return &ops;
}
