/* Devices: creation, copies, tables by name. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/log.h"
#include "core/result.h"
#include "device/backend.h"
#include "device/device.h"
#include "device/device_internal.h"

/* The allocator follows the public part: backends do not store it. */
typedef struct dtrain__owned_device {
    dtrain_device device;
    dtrain_allocator allocator;
} dtrain__owned_device;

DTRAIN_API dtrain_result dtrain_device_create(const dtrain_device_ops *ops,
                                              const dtrain_device_desc *desc, dtrain_device **out)
{
    dtrain_device_desc defaults;
    memset(&defaults, 0, sizeof defaults);
    if (!out) return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_device_create: out is NULL");
    *out = NULL;
    if (!desc) desc = &defaults;
    if (!ops) ops = dtrain__cpu_device_ops();
    if (ops->abi != DTRAIN_DEVICE_ABI)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "device table has ABI %u, this dtrain.h expects %u: rebuild the backend",
                           (unsigned)ops->abi, (unsigned)DTRAIN_DEVICE_ABI);
    if (desc->stream && !ops->stream_create)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "a stream is given, and the device \"%s\" has none: set device_ops to "
                           "dtrain_cuda_device_ops(), or leave stream NULL",
                           ops->name);
    const dtrain_allocator allocator = dtrain__resolve_allocator(&desc->allocator);
    dtrain__owned_device *owned =
        (dtrain__owned_device *)dtrain__alloc(&allocator, 1, sizeof *owned, "a device");
    if (!owned) return DTRAIN_ERROR_MEMORY;
    owned->allocator = allocator;
    owned->device.ops = ops;
    owned->device.limit_bytes = desc->memory_limit;
    const dtrain_result result = ops->create(desc, &owned->device);
    if (result != DTRAIN_OK) {
        dtrain__free(&allocator, owned, 1, sizeof *owned);
        return result;
    }
    *out = &owned->device;
    return DTRAIN_OK;
}

/* Return whether the host can read `memory`: a program's parameters can be in either memory. */
DTRAIN__PRIVATE bool dtrain__on_host(dtrain_device *device, const void *memory)
{
    return device->ops->host_memory || !device->ops->is_device_memory ||
           !device->ops->is_device_memory(device, memory);
}

DTRAIN_API dtrain_result dtrain_device_query(dtrain_device *device, dtrain_device_info *info)
{
    if (!device || !info)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_device_query: %s is NULL",
                           device ? "info" : "device");
    memset(info, 0, sizeof *info);
    snprintf(info->name, sizeof info->name, "%s", device->ops->name);
    snprintf(info->id, sizeof info->id, "%s", device->ops->name);
    return device->ops->query ? device->ops->query(device, info) : DTRAIN_OK;
}

DTRAIN_API dtrain_result dtrain_device_copy(dtrain_device *device, void *to, const void *from,
                                            size_t bytes)
{
    const bool apart = !device->ops->host_memory; /* false: all memory counts as the device's */
    const bool from_host = apart && dtrain__on_host(device, from);
    const bool to_host = apart && dtrain__on_host(device, to);
    if (from_host && to_host) {
        if (bytes) memmove(to, from, bytes);
        return DTRAIN_OK;
    }
    return device->ops->copy(device, to, from, bytes,
                             from_host ? DTRAIN_COPY_HOST_TO_DEVICE
                             : to_host ? DTRAIN_COPY_DEVICE_TO_HOST
                                       : DTRAIN_COPY_DEVICE_TO_DEVICE);
}

DTRAIN_API void dtrain_device_destroy(dtrain_device *device)
{
    dtrain__owned_device *owned = (dtrain__owned_device *)(void *)device;
    if (!device) return;
    const dtrain_allocator allocator = owned->allocator;
    device->ops->destroy(device);
    dtrain__free(&allocator, owned, 1, sizeof *owned);
}

DTRAIN_API dtrain_result dtrain_device_account(dtrain_device *device, size_t *counter, size_t bytes)
{
    const uint64_t used = (uint64_t)device->allocated_bytes + device->comm_bytes;
    if (device->limit_bytes && (used > device->limit_bytes || bytes > device->limit_bytes - used))
        return dtrain_fail(
            DTRAIN_ERROR_MEMORY,
            "memory limit: %llu bytes asked for beside %llu in use, and the limit of "
            "this rank is %llu; a strategy that shards more, activation checkpointing, "
            "a smaller batch or a higher memory_limit would help",
            (unsigned long long)bytes, (unsigned long long)used,
            (unsigned long long)device->limit_bytes);
    *counter += bytes;
    if (used + bytes > device->peak_bytes) device->peak_bytes = (size_t)used + bytes;
    return DTRAIN_OK;
}

DTRAIN_API dtrain_result dtrain_device_ops_by_name(const char *name, const dtrain_device_ops **out)
{
    if (!name || !out)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_device_ops_by_name: %s is NULL",
                           name ? "out" : "name");
    *out = strcmp(name, "cpu") == 0    ? dtrain__cpu_device_ops()
           : strcmp(name, "plan") == 0 ? dtrain__plan_device_ops()
                                       : NULL;
#ifdef DTRAIN_USE_CUDA
    if (strcmp(name, "cuda") == 0) *out = dtrain_cuda_device_ops();
#else
    if (strcmp(name, "cuda") == 0)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "this program was built without CUDA: compile it with "
                           "-DDTRAIN_USE_CUDA and link dtrain_cuda.cu (make cuda)");
#endif
    if (*out) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "\"%s\" is no device; expected cpu, cuda or plan",
                       name);
}
