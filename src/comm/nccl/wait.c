/* Waiting
 *
 * Three kinds of wait, all with the same three looks:
 *
 *     settle      for a call of ours to take effect: communicators are non-blocking, and until NCCL
 *                 stops answering ncclInProgress the kernel is not in the stream, so no event may
 *                 be recorded behind it
 *     land        for an operation with a host buffer: the host polls the event
 *     watch       for the device, called by it: the program waits for its own results, and NCCL's
 *                 kernels among them may be waiting for a dead rank
 *
 * Only time in which this rank could look counts: a job that was suspended does not time out. */

#include "comm/nccl/nccl_internal.h"

typedef struct dtrain_nccl__patience {
    double last, waited;
    unsigned turns;
} dtrain_nccl__patience;

#define DTRAIN_NCCL_YIELDS 200u /* a launch settles within microseconds; peers take longer */

/* One turn of a wait; false when the deadline has passed. */
static bool dtrain_nccl__turn(const dtrain_nccl__hub *hub, dtrain_nccl__patience *patience)
{
    const double now = dtrain_seconds(), gap = patience->turns ? now - patience->last : 0;
    patience->waited += gap < 1 ? gap : 1;
    patience->last = now;
    if (patience->turns++ < DTRAIN_NCCL_YIELDS) sched_yield();
    else dtrain_nccl__nap(50);
    return patience->waited < hub->deadline;
}

/* The control plane and NCCL's asynchronous errors. */
DTRAIN_NCCL__PRIVATE dtrain_result dtrain_nccl__look(dtrain_nccl__hub *hub, const char *call)
{
    if (hub->code != DTRAIN_OK) return dtrain_nccl__again(hub);
    if (!hub->apart && dtrain_world_poll(hub->world) != DTRAIN_OK)
        return dtrain_nccl__fail(hub, DTRAIN_ERROR_PEER, "%s: %s", call,
                                 dtrain_nccl__bare(hub, dtrain_last_error()));
    for (dtrain_nccl__comm *comm = hub->comms; comm; comm = comm->next) {
        ncclResult_t result = ncclSuccess;
        if (comm->dead || !comm->nccl) continue;
        const ncclResult_t asked = hub->nccl.CommGetAsyncError(comm->nccl, &result);
        if (asked != ncclSuccess) result = asked;
        if (result != ncclSuccess && result != ncclInProgress)
            return dtrain_nccl__refused(hub, comm->nccl, result, call);
    }
    return DTRAIN_OK;
}

/* The stream's mark: passed, or for how long not. */
static dtrain_result dtrain_nccl__beat(dtrain_nccl__hub *hub, dtrain_nccl__pulse *pulse, double gap)
{
    const dtrain_device_ops *ops = hub->device->ops;
    bool passed = true;
    if (pulse->recorded) DTRAIN_NCCL_TRY(ops->event_query(hub->device, pulse->event, &passed));
    if (!passed) {
        pulse->waited += gap < 1 ? gap : 1;
        return pulse->waited < hub->deadline ? DTRAIN_OK : DTRAIN_ERROR_TIMEOUT;
    }
    pulse->waited = 0;
    pulse->recorded = true;
    return ops->event_record(hub->device, pulse->event, pulse->stream);
}

/* dtrain_device.while_waiting. Cheap when called often: it looks once a millisecond. */
DTRAIN_NCCL__PRIVATE dtrain_result dtrain_nccl__watch(void *user)
{
    dtrain_nccl__hub *hub = (dtrain_nccl__hub *)user;
    const double now = dtrain_seconds(), gap = now - hub->watched;
    if (hub->code != DTRAIN_OK) return dtrain_nccl__again(hub);
    if (gap < 1e-3) return DTRAIN_OK;
    hub->watched = now;
    DTRAIN_NCCL_TRY(dtrain_nccl__look(hub, "waiting for the device"));
    for (int i = 0; i < 2; i++) {
        const dtrain_result result = dtrain_nccl__beat(hub, &hub->pulses[i], gap);
        if (result == DTRAIN_ERROR_TIMEOUT)
            return dtrain_nccl__fail(hub, result,
                                     "the %s stream of the device has not moved for %.1f s",
                                     i ? "communication" : "compute", hub->deadline);
        if (result != DTRAIN_OK)
            return dtrain_nccl__fail(hub, result, "%s",
                                     dtrain_nccl__bare(hub, dtrain_last_error()));
    }
    return DTRAIN_OK;
}

/* `result` is what the call on nccl returned. */
DTRAIN_NCCL__PRIVATE dtrain_result dtrain_nccl__settle(dtrain_nccl__hub *hub, ncclComm_t nccl,
                                                       ncclResult_t result, const char *call)
{
    dtrain_nccl__patience patience = {0, 0, 0};
    while (result == ncclInProgress) {
        const ncclResult_t asked = hub->nccl.CommGetAsyncError(nccl, &result);
        if (asked != ncclSuccess) result = asked;
        if (result != ncclInProgress) break;
        DTRAIN_NCCL_TRY(dtrain_nccl__look(hub, call));
        if (!dtrain_nccl__turn(hub, &patience))
            return dtrain_nccl__fail(hub, DTRAIN_ERROR_TIMEOUT,
                                     "%s: NCCL was still in progress after %.1f s; has every rank "
                                     "made this call?",
                                     call, hub->deadline);
    }
    return result == ncclSuccess ? DTRAIN_OK : dtrain_nccl__refused(hub, nccl, result, call);
}

/* Until the event has happened; then the host may touch what was staged. */
DTRAIN_NCCL__PRIVATE dtrain_result dtrain_nccl__land(dtrain_nccl__hub *hub,
                                                     const dtrain_nccl__record *record,
                                                     const char *call)
{
    dtrain_nccl__patience patience = {0, 0, 0};
    for (;;) {
        bool done = false;
        if (hub->device->ops->event_query(hub->device, record->done, &done) != DTRAIN_OK)
            return dtrain_nccl__fail(hub, DTRAIN_ERROR_SYSTEM, "%s: %s", call,
                                     dtrain_nccl__bare(hub, dtrain_last_error()));
        if (done) return DTRAIN_OK;
        DTRAIN_NCCL_TRY(dtrain_nccl__look(hub, call));
        if (!dtrain_nccl__turn(hub, &patience))
            return dtrain_nccl__fail(hub, DTRAIN_ERROR_TIMEOUT, "%s: not finished after %.1f s",
                                     call, hub->deadline);
    }
}

/* True while the program captures a graph. Then nothing may be asked of events. */
DTRAIN_NCCL__PRIVATE dtrain_result dtrain_nccl__capturing(dtrain_nccl__hub *hub, bool *capturing)
{
    enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    const cudaError_t error = cudaStreamIsCapturing(hub->compute, &status);
    *capturing = status != cudaStreamCaptureStatusNone;
    if (error == cudaSuccess) return DTRAIN_OK;
    return dtrain_nccl__fail(hub, DTRAIN_ERROR_SYSTEM, "cudaStreamIsCapturing failed: %s",
                             cudaGetErrorString(error));
}
