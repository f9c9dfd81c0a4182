/* Registered memory, for dtrain_comm_alloc
 *
 * NVLink switches and network cards can address memory of ncclMemAlloc. If it is registered with
 * the communicator, collectives use it without a copy. NCCL requires that all ranks register a
 * buffer, or none. They do, because the rendezvous checks that all ranks run the same version. */

#include "comm/nccl/nccl_internal.h"

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
