/* Waiting while watching for failures
 *
 * There are three waits:
 *
 *     complete      until a call of this rank takes effect. Communicators are non-blocking: while
 *                   NCCL returns ncclInProgress the kernel is not in the stream yet, and no event
 *                   can be recorded after it
 *     await_event   until an operation with a host buffer is done: the host polls its event
 *     watch         until the device has results for the program: the device calls it, because
 *                   NCCL kernels that these results need can wait for a dead rank
 *
 * Each wait polls the deadline, NCCL's asynchronous error, and the control plane. A gap between two
 * polls counts as at most one second, so a suspended job does not time out. */

#include "comm/nccl/nccl_internal.h"

typedef struct dtrain_nccl__timer {
    double last, waited;
    unsigned turns;
} dtrain_nccl__timer;

#define DTRAIN_NCCL_YIELDS 200u /* a launch takes microseconds; waiting for a peer takes longer */

/* Yield or sleep once, and add the time; false if the deadline has passed. */
static bool dtrain_nccl__timer_step(const dtrain_nccl__hub *hub, dtrain_nccl__timer *timer)
{
    const double now = dtrain_seconds(), gap = timer->turns ? now - timer->last : 0;
    timer->waited += gap < 1 ? gap : 1;
    timer->last = now;
    if (timer->turns++ < DTRAIN_NCCL_YIELDS) sched_yield();
    else dtrain_nccl__sleep(50);
    return timer->waited < hub->deadline;
}

/* Poll the control plane and NCCL's asynchronous errors. */
DTRAIN_NCCL__PRIVATE dtrain_result dtrain_nccl__poll(dtrain_nccl__hub *hub, const char *call)
{
    if (hub->code != DTRAIN_OK) return dtrain_nccl__hub_error(hub);
    if (dtrain_world_poll(hub->world) != DTRAIN_OK)
        return dtrain_nccl__fail(hub, DTRAIN_ERROR_PEER, "%s: %s", call,
                                 dtrain_nccl__strip_rank(hub, dtrain_last_error()));
    for (dtrain_nccl__comm *comm = hub->comms; comm; comm = comm->next) {
        ncclResult_t result = ncclSuccess;
        if (comm->dead || !comm->nccl) continue;
        const ncclResult_t asked = hub->nccl.CommGetAsyncError(comm->nccl, &result);
        if (asked != ncclSuccess) result = asked;
        if (result != ncclSuccess && result != ncclInProgress)
            return dtrain_nccl__fail_call(hub, comm->nccl, result, call);
    }
    return DTRAIN_OK;
}

/* Watch for failures while the host waits for the device (dtrain_device.while_waiting). It is
 * called often, and polls once a millisecond. */
DTRAIN_NCCL__PRIVATE dtrain_result dtrain_nccl__watch(void *user)
{
    dtrain_nccl__hub *hub = (dtrain_nccl__hub *)user;
    const dtrain_device_ops *ops = hub->device->ops;
    const double now = dtrain_seconds(), gap = now - hub->last_watch;
    if (hub->code != DTRAIN_OK) return dtrain_nccl__hub_error(hub);
    if (gap < 1e-3) return DTRAIN_OK;
    hub->last_watch = now;
    DTRAIN_NCCL_TRY(dtrain_nccl__poll(hub, "waiting for the device"));
    for (int i = 0; i < DTRAIN_NCCL__MARKS; i++) {
        /* If the stream has passed its mark, record the mark again; else add the time. */
        dtrain_nccl__stream_mark *mark = &hub->marks[i];
        dtrain_result result = DTRAIN_OK;
        bool passed = true;
        if (!mark->event) continue;
        if (mark->recorded) result = ops->event_query(hub->device, mark->event, &passed);
        mark->waited = passed ? 0 : mark->waited + (gap < 1 ? gap : 1);
        if (!passed && mark->waited >= hub->deadline) result = DTRAIN_ERROR_TIMEOUT;
        if (result == DTRAIN_OK && passed) {
            mark->recorded = true;
            result = ops->event_record(hub->device, mark->event, mark->stream);
        }
        if (result == DTRAIN_ERROR_TIMEOUT)
            return dtrain_nccl__fail(hub, result,
                                     "the %s stream of the device has not moved for %.1f s",
                                     i == 0   ? "compute"
                                     : i == 1 ? "communication"
                                              : "tensor axis' communication",
                                     hub->deadline);
        if (result != DTRAIN_OK)
            return dtrain_nccl__fail(hub, result, "%s",
                                     dtrain_nccl__strip_rank(hub, dtrain_last_error()));
    }
    return DTRAIN_OK;
}

/* Wait until a call on `nccl` has taken effect. `result` is the call's return value. */
DTRAIN_NCCL__PRIVATE dtrain_result dtrain_nccl__complete(dtrain_nccl__hub *hub, ncclComm_t nccl,
                                                         ncclResult_t result, const char *call)
{
    dtrain_nccl__timer timer = {0, 0, 0};
    while (result == ncclInProgress) {
        const ncclResult_t asked = hub->nccl.CommGetAsyncError(nccl, &result);
        if (asked != ncclSuccess) result = asked;
        if (result != ncclInProgress) break;
        DTRAIN_NCCL_TRY(dtrain_nccl__poll(hub, call));
        if (!dtrain_nccl__timer_step(hub, &timer))
            return dtrain_nccl__fail(hub, DTRAIN_ERROR_TIMEOUT,
                                     "%s: NCCL was still in progress after %.1f s; has every rank "
                                     "made this call?",
                                     call, hub->deadline);
    }
    return result == ncclSuccess ? DTRAIN_OK : dtrain_nccl__fail_call(hub, nccl, result, call);
}

/* Wait until the operation is done; then the host can use its buffers. */
DTRAIN_NCCL__PRIVATE dtrain_result dtrain_nccl__await_event(dtrain_nccl__hub *hub,
                                                            const dtrain_nccl__record *record,
                                                            const char *call)
{
    dtrain_nccl__timer timer = {0, 0, 0};
    for (;;) {
        bool done = false;
        if (hub->device->ops->event_query(hub->device, record->done, &done) != DTRAIN_OK)
            return dtrain_nccl__fail(hub, DTRAIN_ERROR_SYSTEM, "%s: %s", call,
                                     dtrain_nccl__strip_rank(hub, dtrain_last_error()));
        if (done) return DTRAIN_OK;
        DTRAIN_NCCL_TRY(dtrain_nccl__poll(hub, call));
        if (!dtrain_nccl__timer_step(hub, &timer))
            return dtrain_nccl__fail(hub, DTRAIN_ERROR_TIMEOUT, "%s: not finished after %.1f s",
                                     call, hub->deadline);
    }
}

/* True if a graph is being captured on the compute stream. Then no event can be queried. */
DTRAIN_NCCL__PRIVATE bool dtrain_nccl__capturing(dtrain_nccl__hub *hub)
{
    const dtrain_device_ops *ops = hub->device->ops;
    return ops->capturing && ops->capturing(hub->device);
}
