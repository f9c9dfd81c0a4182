/* The tables of the CPU device and of the plan device
 *
 * Streams, events and pinned memory are the same in both: all work is done when a call returns. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/log.h"
#include "core/result.h"
#include "device/backend.h"
#include "device/cpu/cpu_internal.h"
#include "device/device.h"

static dtrain_result dtrain__cpu_host_register(dtrain_device *device, void *memory, size_t bytes)
{
    (void)device;
    (void)memory;
    (void)bytes;
    return DTRAIN_OK;
}
static void dtrain__cpu_host_unregister(dtrain_device *device, void *memory)
{
    (void)device;
    (void)memory;
}

static dtrain_result dtrain__cpu_copy_async(dtrain_device *device, void *to, const void *from,
                                            size_t bytes, dtrain_copy_kind kind,
                                            dtrain_stream *stream)
{
    (void)stream;
    return device->ops->copy(device, to, from, bytes, kind);
}

/* A stream or an event has no state: any address will do, and the table itself is one. */
static dtrain_result dtrain__cpu_stream_create(dtrain_device *device, bool high_priority,
                                               dtrain_stream **out)
{
    (void)high_priority;
    *out = (dtrain_stream *)(uintptr_t)device->ops;
    return DTRAIN_OK;
}
static void dtrain__cpu_stream_destroy(dtrain_device *device, dtrain_stream *stream)
{
    (void)device;
    (void)stream;
}
static void *dtrain__cpu_stream_native(dtrain_device *device, dtrain_stream *stream)
{
    (void)device;
    (void)stream;
    return NULL;
}

static dtrain_result dtrain__cpu_event_create(dtrain_device *device, bool timing,
                                              dtrain_event **out)
{
    (void)timing;
    *out = (dtrain_event *)(uintptr_t)device->ops;
    return DTRAIN_OK;
}
static void dtrain__cpu_event_destroy(dtrain_device *device, dtrain_event *event)
{
    (void)device;
    (void)event;
}
static dtrain_result dtrain__cpu_event_wait(dtrain_device *device, dtrain_event *event,
                                            dtrain_stream *stream)
{
    (void)device;
    (void)event;
    (void)stream;
    return DTRAIN_OK;
}
static dtrain_result dtrain__cpu_event_record(dtrain_device *device, dtrain_event *event,
                                              dtrain_stream *stream)
{
    return dtrain__cpu_event_wait(device, event, stream); /* also does nothing */
}
static dtrain_result dtrain__cpu_event_query(dtrain_device *device, dtrain_event *event, bool *done)
{
    (void)device;
    (void)event;
    *done = true;
    return DTRAIN_OK;
}
static bool dtrain__cpu_is_device_memory(dtrain_device *device, const void *memory)
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
static dtrain_result dtrain__cpu_graph_begin(dtrain_device *device)
{
    return dtrain__no_graphs(device);
}
static dtrain_result dtrain__cpu_graph_end(dtrain_device *device, dtrain_graph **out)
{
    *out = NULL;
    return dtrain__no_graphs(device);
}
static dtrain_result dtrain__cpu_graph_launch(dtrain_device *device, dtrain_graph *graph)
{
    (void)graph;
    return dtrain__no_graphs(device);
}
static void dtrain__cpu_graph_destroy(dtrain_device *device, dtrain_graph *graph)
{
    (void)device;
    (void)graph;
}

/* The entries from host_register to graph_destroy. */
#define DTRAIN__NO_ORDER                                                                  \
    dtrain__cpu_host_register, dtrain__cpu_host_unregister, dtrain__cpu_copy_async,       \
        dtrain__cpu_stream_create, dtrain__cpu_stream_destroy, dtrain__cpu_stream_native, \
        dtrain__cpu_event_create, dtrain__cpu_event_destroy, dtrain__cpu_event_record,    \
        dtrain__cpu_event_wait, dtrain__cpu_event_query, dtrain__cpu_is_device_memory,    \
        dtrain__cpu_graph_begin, dtrain__cpu_graph_end, dtrain__cpu_graph_launch,         \
        dtrain__cpu_graph_destroy

/* ---- The CPU device */

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
                                          DTRAIN__NO_ORDER,
                                          DTRAIN__KERNEL_LIST(DTRAIN__CPU_ENTRY)};
#undef DTRAIN__CPU_ENTRY
    return &ops;
}

/* ---- The plan device
 *
 * Addresses without memory: an allocation is a step of a counter that lives in device->state.
 * Kernels do nothing, so a model runs at the speed of its bookkeeping, and peak_bytes is the
 * answer. */

static dtrain_result dtrain__plan_create(const dtrain_device_desc *desc, dtrain_device *device)
{
    (void)desc;
    device->state = (void *)(uintptr_t)4096;
    return DTRAIN_OK;
}

static void dtrain__plan_destroy(dtrain_device *device) { device->state = NULL; }

static dtrain_result dtrain__plan_query(dtrain_device *device, dtrain_device_info *info)
{
    (void)device;
    memset(info, 0, sizeof *info);
    snprintf(info->name, sizeof info->name, "plan");
    snprintf(info->id, sizeof info->id, "plan");
    return DTRAIN_OK;
}

static dtrain_result dtrain__plan_alloc(dtrain_device *device, size_t bytes, void **memory)
{
    const uintptr_t at = (uintptr_t)device->state;
    *memory = NULL;
    if (bytes > UINTPTR_MAX - at - 128)
        return dtrain_fail(DTRAIN_ERROR_MEMORY, "no addresses left for %llu bytes",
                           (unsigned long long)bytes);
    DTRAIN__TRY(dtrain_device_check_limit(device, bytes));
    *memory = (void *)at;
    device->state = (void *)(at + ((uintptr_t)bytes + 64) / 64 * 64); /* 0 bytes move it as well */
    dtrain_device_account(device, &device->allocated_bytes, bytes);
    return DTRAIN_OK;
}

static void dtrain__plan_free(dtrain_device *device, void *memory, size_t bytes)
{
    if (memory) device->allocated_bytes -= bytes;
}

static dtrain_result dtrain__plan_copy(dtrain_device *device, void *to, const void *from,
                                       size_t bytes, dtrain_copy_kind kind)
{
    (void)device;
    (void)to;
    (void)from;
    (void)bytes;
    (void)kind;
    return DTRAIN_OK;
}

static dtrain_result dtrain__plan_zero(dtrain_device *device, void *memory, size_t bytes)
{
    (void)device;
    (void)memory;
    (void)bytes;
    return DTRAIN_OK;
}

static dtrain_result dtrain__plan_host_alloc(dtrain_device *device, size_t bytes, void **memory)
{
    *memory = NULL;
    return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED, "the %s device has no %zu bytes of host memory",
                       device->ops->name, bytes);
}

#define DTRAIN__PLAN_KERNEL(op)                                                                   \
    static dtrain_result dtrain__plan_##op(dtrain_device *device, const dtrain_##op##_args *args) \
    {                                                                                             \
        (void)device;                                                                             \
        (void)args;                                                                               \
        return DTRAIN_OK;                                                                         \
    }
DTRAIN__KERNEL_LIST(DTRAIN__PLAN_KERNEL)
#undef DTRAIN__PLAN_KERNEL

DTRAIN_API const dtrain_device_ops *dtrain_plan_device_ops(void)
{
#define DTRAIN__PLAN_ENTRY(op) dtrain__plan_##op,
    static const dtrain_device_ops ops = {DTRAIN_DEVICE_ABI,
                                          "plan",
                                          false,
                                          dtrain__plan_create,
                                          dtrain__plan_destroy,
                                          dtrain__plan_query,
                                          dtrain__cpu_synchronize,
                                          dtrain__plan_alloc,
                                          dtrain__plan_free,
                                          dtrain__plan_copy,
                                          dtrain__plan_zero,
                                          dtrain__plan_host_alloc,
                                          dtrain__plan_free,
                                          DTRAIN__NO_ORDER,
                                          DTRAIN__KERNEL_LIST(DTRAIN__PLAN_ENTRY)};
#undef DTRAIN__PLAN_ENTRY
    return &ops;
}
