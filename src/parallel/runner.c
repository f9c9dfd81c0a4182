/* Running a schedule
 *
 * A rank works through its list of actions. Messages are asynchronous: RECEIVE starts a receive and
 * returns, and the action that needs the message waits for it. An action that would overwrite
 * memory that is still being sent waits for the send (the numbers are micro-batches):
 *
 *     RECEIVE 1 . . . . FORWARD 1  SEND 1 . . . . BACKWARD 1 SEND_GRADIENT 1 . . . SEND_GRADIENT 4
 *     starts            waits      starts         waits for  starts                waits for
 *     (waits for the one before                   SEND 1                           SEND_GRADIENT 1
 *     of this inbox)                                                               (the same slot)
 *
 * SEND can read the pass's inbox, if the stage only passes a tensor on. The pass's last action,
 * which is BACKWARD or WEIGHT, frees the inbox. A received gradient proves that the next stage has
 * taken the tensor; but a stage can have no gradient, so BACKWARD waits for SEND.
 *
 * A gradient to send has separate memory for each slot: the peer may compute for so long that this
 * rank's next BACKWARD in the slot comes before the peer receives. Only the slot's next
 * SEND_GRADIENT waits for the send.
 *
 * So a table holds the works (handles) of each slot (SEND, SEND_GRADIENT, RECEIVE_GRADIENT) and of
 * each inbox (RECEIVE). A rank's first run allocates its table and keeps it in the schedule. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/log.h"
#include "core/result.h"
#include "comm/backend.h"
#include "world/timeline.h"
#include "world/timeline_internal.h"
#include "parallel/schedule_internal.h"

#define DTRAIN__PARTS_MOST 16 /* most parts of a message */

typedef struct dtrain__message {
    dtrain_work *works[DTRAIN__PARTS_MOST];
    size_t count;
} dtrain__message;

typedef struct dtrain__runner {
    const dtrain_pipeline_schedule *schedule;
    dtrain_comm *comm;
    const dtrain_pipeline_work *work;
    int rank;
    dtrain__message *messages; /* (count) four for each n: for slot n and inbox n together */
    size_t count;
} dtrain__runner;

/* Return the table's message of kind `act` for an action's slot or inbox. */
static dtrain__message *dtrain__message_of(const dtrain__runner *run, uint32_t act,
                                           const dtrain_pipeline_action *action)
{
    const int32_t place = act == DTRAIN_PIPELINE_ACT_RECEIVE ? action->inbox : action->slot;
    return &run->messages[4 * (size_t)place + act - DTRAIN_PIPELINE_ACT_SEND];
}

/* Wait for all parts of a message, to free their works. Return the first error. */
static dtrain_result dtrain__message_wait(dtrain__message *message)
{
    dtrain_result first = DTRAIN_OK;
    for (size_t i = 0; i < message->count; i++) {
        const dtrain_result result = dtrain_work_wait(message->works[i]);
        if (first == DTRAIN_OK) first = result;
    }
    message->count = 0;
    return first;
}

static dtrain_result dtrain__run_wait(const dtrain__runner *run, uint32_t act,
                                      const dtrain_pipeline_action *action)
{
    return dtrain__message_wait(dtrain__message_of(run, act, action));
}

/* Start the parts of a message, after waiting for the one before in its slot or inbox. */
static dtrain_result dtrain__message_start(const dtrain__runner *run,
                                           const dtrain_pipeline_action *action)
{
    dtrain__message *message = dtrain__message_of(run, action->act, action);
    const bool sends =
        action->act == DTRAIN_PIPELINE_ACT_SEND || action->act == DTRAIN_PIPELINE_ACT_SEND_GRADIENT;
    DTRAIN__TRY(dtrain__message_wait(message));
    for (size_t i = 0;; i++) {
        dtrain_pipeline_part part;
        memset(&part, 0, sizeof part);
        DTRAIN__TRY(run->work->part(run->work->user, action, i, &part));
        if (part.count == 0) break;
        if (i == DTRAIN__PARTS_MOST)
            return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED, "a message has more than %d parts",
                               DTRAIN__PARTS_MOST);
        DTRAIN__TRY(sends ? dtrain_send(run->comm, part.address, part.count, part.dtype,
                                        action->peer, &message->works[i])
                          : dtrain_recv(run->comm, part.address, part.count, part.dtype,
                                        action->peer, &message->works[i]));
        message->count = i + 1;
    }
    if (!run->comm->ops->launch_ordered || !message->count) return DTRAIN_OK;
    bool done; /* NCCL's communicator holds messages back until a test, a wait or a collective */
    return dtrain_work_test(message->works[message->count - 1], &done);
}

/* Compute, after waiting for what the computation reads and overwrites. A span makes the pass
 * visible in a trace, which then looks like the drawing of a schedule. */
static dtrain_result dtrain__run_compute(const dtrain__runner *run,
                                         const dtrain_pipeline_action *action)
{
    static const char *const names[] = {"forward", "backward", "weights"};
    const bool forward = action->act == DTRAIN_PIPELINE_ACT_FORWARD;
    dtrain_world *world = run->comm ? run->comm->world : NULL;
    char stage[24];
    if (action->act == DTRAIN_PIPELINE_ACT_FORWARD && action->inbox >= 0)
        DTRAIN__TRY(dtrain__run_wait(run, DTRAIN_PIPELINE_ACT_RECEIVE, action));
    if (action->act == DTRAIN_PIPELINE_ACT_BACKWARD) {
        DTRAIN__TRY(dtrain__run_wait(run, DTRAIN_PIPELINE_ACT_RECEIVE_GRADIENT, action));
        DTRAIN__TRY(dtrain__run_wait(run, DTRAIN_PIPELINE_ACT_SEND, action));
    }
    if (!world || action->act > DTRAIN_PIPELINE_ACT_WEIGHT)
        return run->work->compute(run->work->user, action);
    snprintf(stage, sizeof stage, "stage %d", action->chunk * run->schedule->ranks + run->rank);
    const uint32_t span =
        dtrain__span_begin(world, forward ? DTRAIN_SPAN_FORWARD : DTRAIN_SPAN_BACKWARD,
                           names[action->act - DTRAIN_PIPELINE_ACT_FORWARD], action->micro_batch);
    dtrain__span_of(world, span, stage);
    const dtrain_result result = run->work->compute(run->work->user, action);
    dtrain__span_end(world, span);
    return result;
}

/* Add this rank's place in the schedule to the last error. */
static dtrain_result dtrain__run_place(const dtrain__runner *run,
                                       const dtrain_pipeline_action *action, dtrain_result result)
{
    static const char *const names[] = {"?",      "FORWARD", "BACKWARD",      "WEIGHT",
                                        "SEND",   "RECEIVE", "SEND_GRADIENT", "RECEIVE_GRADIENT",
                                        "REDUCE", "STEP"};
    const dtrain_pipeline_schedule *s = run->schedule;
    return dtrain_fail(result, "stage %d of %d, %s of micro-batch %d: %s",
                       action->chunk * s->ranks + run->rank, s->ranks * s->chunks,
                       names[action->act], (int)action->micro_batch,
                       dtrain__bare(dtrain_last_error()));
}

/* Fail on all ranks, and free the works under way. If the communicator has failed before (an error
 * of another rank, or a rank that was late or has died), return its error instead of this rank's,
 * with this rank's place added. */
static dtrain_result dtrain__run_fail(const dtrain__runner *run,
                                      const dtrain_pipeline_action *action, dtrain_result result)
{
    char text[DTRAIN__ERROR_BYTES];
    result = dtrain__run_place(run, action, result);
    snprintf(text, sizeof text, "%s", dtrain_last_error());
    if (run->comm) result = run->comm->ops->fail(run->comm, result, text);
    const char *stands = dtrain_last_error(); /* `text`, perhaps cut, or an earlier error */
    if (strncmp(stands, text, strlen(stands)) != 0) dtrain__run_place(run, action, result);
    snprintf(text, sizeof text, "%s", dtrain_last_error());
    for (size_t i = 0; i < run->count; i++) (void)dtrain__message_wait(&run->messages[i]);
    return dtrain__set_last_error(result, text); /* waiting has left another error */
}

DTRAIN_API dtrain_result dtrain_pipeline_run(const dtrain_pipeline_schedule *schedule,
                                             dtrain_comm *comm, const dtrain_pipeline_work *work)
{
    const char *const call = "dtrain_pipeline_run";
    const dtrain_allocator allocator = dtrain__resolve_allocator(NULL);
    const dtrain_pipeline_action *action = NULL;
    dtrain_result result = DTRAIN_OK;
    dtrain__runner run;
    int slots, inboxes;
    DTRAIN__GIVEN(call, schedule);
    DTRAIN__GIVEN(call, work);
    DTRAIN__GIVEN(call, work->compute);
    DTRAIN__GIVEN(call, work->part);
    if (!schedule->memory)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "%s: the schedule was not made by dtrain_pipeline_create", call);
    if (schedule->ranks != (comm ? dtrain_comm_size(comm) : 1))
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "%s: the schedule is for %d ranks, and the communicator has %d", call,
                           (int)schedule->ranks, comm ? dtrain_comm_size(comm) : 1);
    run.schedule = schedule;
    run.comm = comm;
    run.work = work;
    run.rank = comm ? dtrain_comm_rank(comm) : 0;

    /* reuse this rank's table or make a larger one: no message of an earlier run is under way */
    dtrain__run_memory *memory = &schedule->memory[run.rank];
    dtrain__pipeline_room(schedule, run.rank, &slots, &inboxes);
    run.count = 4 * (size_t)(slots > inboxes ? slots : inboxes);
    const size_t bytes = run.count * sizeof *run.messages;
    if (memory->bytes < bytes) {
        dtrain__free(&allocator, memory->messages, memory->bytes, 1);
        memory->messages = dtrain__alloc(&allocator, bytes, 1, "messages of a pipeline");
        memory->bytes = memory->messages ? bytes : 0;
    }
    run.messages = (dtrain__message *)memory->messages;
    if (!run.messages) return DTRAIN_ERROR_MEMORY;

    /* work through the list, then wait for sends under way: their errors name the last action */
    for (size_t i = schedule->first[run.rank]; i < schedule->first[run.rank + 1] && !result; i++) {
        action = &schedule->actions[i];
        result = dtrain__is_message(action) ? dtrain__message_start(&run, action)
                                            : dtrain__run_compute(&run, action);
    }
    for (size_t i = 0; i < run.count && result == DTRAIN_OK; i++)
        result = dtrain__message_wait(&run.messages[i]);
    return result == DTRAIN_OK ? DTRAIN_OK : dtrain__run_fail(&run, action, result);
}
