/* The plan device
 *
 * Addresses without memory: an allocation advances a counter in device->state. Kernels do nothing,
 * so a model runs at the speed of its bookkeeping, and peak_bytes is the result. Copies to the host
 * give zeros. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/log.h"
#include "core/result.h"
#include "device/backend.h"
#include "device/cpu/cpu_internal.h"
#include "device/device.h"
#include "device/device_internal.h"

static dtrain_result dtrain__plan_create(const dtrain_device_desc *desc, dtrain_device *device)
{
    (void)desc;
    device->state = (void *)(uintptr_t)4096;
    return DTRAIN_OK;
}

static void dtrain__plan_destroy(dtrain_device *device) { device->state = NULL; }

static dtrain_result dtrain__plan_alloc(dtrain_device *device, size_t bytes, void **memory)
{
    const uintptr_t at = (uintptr_t)device->state;
    *memory = NULL;
    if (bytes > UINTPTR_MAX - at - 128)
        return dtrain_fail(DTRAIN_ERROR_MEMORY, "no addresses left for %llu bytes",
                           (unsigned long long)bytes);
    DTRAIN__TRY(dtrain_device_account(device, &device->allocated_bytes, bytes));
    *memory = (void *)at;
    device->state = (void *)(at + ((uintptr_t)bytes + 64) / 64 * 64); /* moves for 0 bytes too */
    return DTRAIN_OK;
}

static void dtrain__plan_free(dtrain_device *device, void *memory, size_t bytes)
{
    if (memory) device->allocated_bytes -= bytes;
}

static bool dtrain__plan_is_device_memory(dtrain_device *device, const void *memory)
{
    return (uintptr_t)memory >= 4096 && (uintptr_t)memory < (uintptr_t)device->state;
}

static dtrain_result dtrain__plan_copy(dtrain_device *device, void *to, const void *from,
                                       size_t bytes, dtrain_copy_kind kind)
{
    (void)device;
    (void)from;
    if (kind == DTRAIN_COPY_DEVICE_TO_HOST) memset(to, 0, bytes);
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
DTRAIN__KERNEL_LIST(DTRAIN__PLAN_KERNEL, DTRAIN__PLAN_KERNEL)
#undef DTRAIN__PLAN_KERNEL

DTRAIN__PRIVATE const dtrain_device_ops *dtrain__plan_device_ops(void)
{
#define DTRAIN__PLAN_ENTRY(op) dtrain__plan_##op,
    static const dtrain_device_ops ops = DTRAIN__HOST_TABLE(
        plan, false, NULL, dtrain__plan_free, dtrain__plan_is_device_memory, DTRAIN__PLAN_ENTRY);
#undef DTRAIN__PLAN_ENTRY
    return &ops;
}
