/* Failure: report, abort, repeat
 *
 * A failure takes four steps:
 *
 *     1. the hub stores its text, which says what this rank was doing
 *     2. the control plane sends it to the other ranks, which poll it while they wait
 *     3. all NCCL communicators of the hub are aborted, and the device's graphs are dropped
 *     4. every later call returns the text again
 *
 * A separate thread aborts each communicator. Aborts one after another can deadlock: the first
 * abort frees device memory, this waits for kernels, and these wait for the second communicator. An
 * NCCL group would avoid it from 2.22 on. Threads avoid it in every version, and they put a
 * deadline on a call that is known to hang. A thread that does not return is abandoned, with the
 * memory it uses.
 *
 * Graphs are dropped because ncclCommAbort waits for them: a captured collective holds a reference
 * to its communicator until its graph, or the capture in progress, is destroyed. ncclCommAbort
 * first sets the flag that ends running kernels, so a graph that is being replayed ends too. The
 * host of a guest destroys its own graphs; the world waits for them when it ends. */

#include "comm/nccl/nccl_internal.h"

#define DTRAIN_NCCL_ABORT_SECONDS 30.0 /* limit of the wait, unless the deadline is shorter */

static void *dtrain_nccl__abort_thread(void *user)
{
    dtrain_nccl__comm *comm = (dtrain_nccl__comm *)user;
    cudaSetDevice(comm->hub->device_index); /* a new thread has device 0 */
    comm->hub->nccl.CommAbort(comm->nccl);
    __atomic_store_n(&comm->abort_state, 2u, __ATOMIC_RELEASE);
    return NULL;
}

static bool dtrain_nccl__aborting(const dtrain_nccl__comm *comm)
{
    return __atomic_load_n(&comm->abort_state, __ATOMIC_ACQUIRE) == 1u;
}

DTRAIN_NCCL__PRIVATE void dtrain_nccl__sleep(long microseconds)
{
    const struct timespec span = {0, microseconds * 1000};
    nanosleep(&span, NULL);
}

DTRAIN_NCCL__PRIVATE void dtrain_nccl__abort_one(dtrain_nccl__comm *comm)
{
    pthread_attr_t attributes;
    pthread_t thread;
    if (!comm->nccl || comm->abort_state) return;
    comm->abort_state = 1;
    int error = pthread_attr_init(&attributes);
    if (!error) {
        pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
        error = pthread_create(&thread, &attributes, dtrain_nccl__abort_thread, comm);
        pthread_attr_destroy(&attributes);
    }
    if (error)
        dtrain_log(comm->base.world, DTRAIN_LOG_ERROR,
                   "NCCL communicator %s cannot be aborted: no thread could be started (%s)",
                   comm->name, strerror(error));
}

DTRAIN_NCCL__PRIVATE void dtrain_nccl__await_aborts(dtrain_nccl__hub *hub)
{
    const double limit =
        hub->deadline < DTRAIN_NCCL_ABORT_SECONDS ? hub->deadline : DTRAIN_NCCL_ABORT_SECONDS;
    const double begin = dtrain_seconds();
    for (dtrain_nccl__comm *comm = hub->comms; comm; comm = comm->next) {
        if (hub->guest && comm->captured && !hub->closing) continue; /* host's graphs hold it */
        while (dtrain_nccl__aborting(comm) && dtrain_seconds() - begin < limit)
            dtrain_nccl__sleep(100);
        if (!dtrain_nccl__aborting(comm)) continue;
        hub->stuck = true;
        dtrain_log(hub->world, DTRAIN_LOG_ERROR,
                   "ncclCommAbort of %s has not returned after %.1f s; it is abandoned%s",
                   comm->name, limit,
                   comm->captured ? ". It waits until graphs with its operations are destroyed"
                                  : "");
    }
}

DTRAIN_NCCL__PRIVATE void dtrain_nccl__drop_graphs(dtrain_nccl__hub *hub)
{
    if (hub->device->ops->graphs_drop) hub->device->ops->graphs_drop(hub->device);
}

static void dtrain_nccl__abort_all(dtrain_nccl__hub *hub)
{
    for (dtrain_nccl__comm *comm = hub->comms; comm; comm = comm->next) {
        if (comm->dead) continue;
        comm->dead = true;
        comm->code = hub->code;
        memcpy(comm->text, hub->text, sizeof comm->text);
        dtrain_nccl__abort_one(comm);
    }
    dtrain_nccl__drop_graphs(hub);
    dtrain_nccl__await_aborts(hub);
    for (dtrain_nccl__memory *m = hub->memory; m; m = m->next) { /* registrations have ended */
        m->comm = NULL;
        m->handle = NULL;
    }
    hub->group = NULL;
    hub->group_end = &hub->group;
    hub->group_balance = 0;
}

/* ---- What this rank was doing -----------------------------------------------------------------*/

/* Return the oldest recorded operation of a communicator. Unused records precede it. */
static const dtrain_nccl__record *dtrain_nccl__oldest(const dtrain_nccl__comm *comm)
{
    const dtrain_nccl__record *record = comm->dead ? NULL : comm->oldest;
    while (record && !record->number) record = record->next;
    return record;
}

/* Describe the state of an operation. The event of a captured operation cannot be queried. During a
 * capture no event can be queried: the query would invalidate the capture. */
static const char *dtrain_nccl__state(dtrain_nccl__hub *hub, const dtrain_nccl__record *record)
{
    bool done = false;
    if (!record->launched) return "not launched";
    if (record->captured) return "in a graph";
    if (dtrain_nccl__capturing(hub) ||
        hub->device->ops->event_query(hub->device, record->done, &done) != DTRAIN_OK)
        return "unknown";
    return done ? "finished" : "not finished";
}

/* Append to `text`, for each communicator, the oldest unfinished operation and the number of
 * collectives started on this rank. If `text` is NULL, log all recorded operations instead. */
static void dtrain_nccl__report(dtrain_nccl__hub *hub, char *text, size_t room)
{
    size_t used = text ? strlen(text) : 0;
    for (dtrain_nccl__comm *comm = hub->comms; comm; comm = comm->next) {
        for (const dtrain_nccl__record *record = dtrain_nccl__oldest(comm); record;
             record = record->next) {
            const char *state = dtrain_nccl__state(hub, record);
            char what[200];
            if (text && (strncmp(state, "not ", 4) != 0 || used >= room)) continue;
            dtrain_nccl__describe(comm, record, what, sizeof what);
            if (!text) {
                dtrain_log(hub->world, DTRAIN_LOG_ERROR, "  %s: %s", what, state);
                continue;
            }
            snprintf(text + used, room - used, "; %s: %s, %llu collectives started", what, state,
                     (unsigned long long)comm->collectives);
            used = strlen(text);
            break;
        }
    }
}

/* Compare this rank's records with the world's first report. The report can name the collective in
 * which its rank is stuck, in the format of dtrain_nccl__describe. If this rank has called another
 * collective under the same number, the difference is the cause, and the error says so. */
static void dtrain_nccl__compare(dtrain_nccl__hub *hub)
{
    unsigned long long number;
    char name[64], theirs[128], key[256], mine[200];
    if (dtrain_world_poll(hub->world) == DTRAIN_OK) return;
    const char *report = dtrain_nccl__strip_rank(hub, dtrain_last_error());
    const char *found = strstr(report, "collective ");
    if (!found || sscanf(found, "collective %llu on %63s [%127[^]]]", &number, name, theirs) != 3)
        return;
    snprintf(key, sizeof key, "collective %llu on %s [%s]", number, name, theirs);
    if (!strstr(report, key)) return; /* the report was cut off */
    for (dtrain_nccl__comm *comm = hub->comms; comm; comm = comm->next) {
        if (strcmp(comm->name, name) != 0) continue;
        for (const dtrain_nccl__record *record = dtrain_nccl__oldest(comm); record;
             record = record->next) {
            if (record->number != number || dtrain_nccl__is_point_to_point(record->what.kind))
                continue;
            dtrain_nccl__describe(comm, record, mine, sizeof mine);
            if (strcmp(mine, key) == 0) return;
            hub->code = DTRAIN_ERROR_MISMATCH;
            snprintf(hub->text, sizeof hub->text,
                     "ranks disagree: this rank called %s; the other: %.700s", mine, report);
            return;
        }
    }
}

/* ---- Failing ----------------------------------------------------------------------------------*/

DTRAIN_NCCL__PRIVATE dtrain_result dtrain_nccl__hub_error(dtrain_nccl__hub *hub)
{
    return dtrain_fail(hub->code, "%s", hub->text);
}

/* Return the error with which a communicator was aborted. */
DTRAIN_NCCL__PRIVATE dtrain_result dtrain_nccl__comm_error(const dtrain_nccl__comm *comm)
{
    return dtrain_fail(comm->code, "%s", comm->text);
}

DTRAIN_NCCL_PRINTF(3, 4)
DTRAIN_NCCL__PRIVATE dtrain_result dtrain_nccl__fail(dtrain_nccl__hub *hub, dtrain_result code,
                                                     const char *format, ...)
{
    char text[sizeof hub->text];
    va_list args;
    if (hub->code != DTRAIN_OK) return dtrain_nccl__hub_error(hub);
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    snprintf(hub->text, sizeof hub->text, "%s", text);
    dtrain_nccl__report(hub, hub->text, sizeof hub->text);
    hub->code = code; /* from now on dtrain_nccl__watch ends every wait for the device */
    if (!hub->closing) {
        dtrain_world_abort(hub->world, code, hub->text);
        dtrain_nccl__compare(hub); /* the first report can be from another rank */
    }
    if (!hub->closing && (hub->code == DTRAIN_ERROR_TIMEOUT || hub->code == DTRAIN_ERROR_MISMATCH))
        dtrain_nccl__report(hub, NULL, 0);
    dtrain_nccl__abort_all(hub);
    return dtrain_nccl__hub_error(hub);
}

/* Fail with NCCL's text for `result` and its last error message. */
DTRAIN_NCCL__PRIVATE dtrain_result dtrain_nccl__fail_call(dtrain_nccl__hub *hub, ncclComm_t nccl,
                                                          ncclResult_t result, const char *call)
{
    const char *more = hub->nccl.GetLastError(nccl);
    return dtrain_nccl__fail(hub, dtrain_nccl__code(result), "%s: NCCL reports \"%s\"%s%s", call,
                             hub->nccl.GetErrorString(result), more && *more ? ": " : "",
                             more ? more : "");
}
