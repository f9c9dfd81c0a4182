/* Checking a schedule
 *
 * All ranks are replayed. A computation is done as soon as its rank comes to it, and is an error if
 * what it needs is not there. A send waits for its receive: both ranks must stand at the two ends
 * of the same message. Where no rank can go on and not all are done, the run would hang. In the end
 * everything must have been done once, and slots and inboxes were never used twice at once: a pass
 * keeps them until it has done its last computation, has sent its gradient, and the next stage, if
 * it is on the same rank and reads them, is done too.
 *
 * Times: a computation begins when its rank is free and what it needs has arrived; messages take
 * time and keep no rank busy, as the runner's are asynchronous. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "parallel/schedule_internal.h"

typedef struct dtrain__pass_state {
    uint32_t done;       /* bits: 1 << act */
    int32_t slot, inbox; /* -1: none yet */
    int32_t holders[2];  /* of the slot and of the inbox with this pass's number: the number of the
                            pass that took it last; -1: none did */
    double end[4];       /* by act: when it was done */
    double arrived[2];   /* what came of the stage before, and the gradient from the next one */
} dtrain__pass_state;

typedef struct dtrain__check {
    const dtrain_pipeline_schedule *schedule;
    const dtrain_pipeline_costs *costs; /* (stages), or NULL */
    size_t *at;                         /* (ranks) the action that a rank has come to */
    double *clock, *busy;               /* (ranks) */
    int32_t *live, *peak;               /* (ranks) passes between forward and backward */
    dtrain__pass_state *passes;         /* (ranks, chunks, micro-batches) */
    dtrain__watch_fn watch;             /* or NULL */
    void *user;
} dtrain__check;

static const char *const dtrain__act_names[] = {
    "?",       "FORWARD",       "BACKWARD",         "WEIGHT", "SEND",
    "RECEIVE", "SEND_GRADIENT", "RECEIVE_GRADIENT", "REDUCE", "STEP"};

DTRAIN__PRIVATE const char *dtrain__pipeline_act_name(uint32_t act)
{
    return dtrain__act_names[act <= DTRAIN_PIPELINE_ACT_STEP ? act : 0];
}

static dtrain__pass_state *dtrain__pass_of(const dtrain__check *check, int rank, int chunk,
                                           int micro)
{
    const dtrain_pipeline_schedule *s = check->schedule;
    return &check->passes[((size_t)rank * (size_t)s->chunks + (size_t)chunk) *
                              (size_t)s->micro_batches +
                          (size_t)micro];
}

/* Fail at a rank's action. */
static dtrain_result dtrain__check_fail(int rank, const dtrain_pipeline_action *action,
                                        const char *why)
{
    return dtrain_fail(DTRAIN_ERROR_USAGE,
                       "dtrain_pipeline_check: rank %d, %s of chunk %d, micro-batch %d: %s", rank,
                       dtrain__pipeline_act_name(action->act), (int)action->chunk,
                       (int)action->micro_batch, why);
}

/* Return the act that adds to the gradients of weights, a pass's last computation. */
static uint32_t dtrain__adds(const dtrain__check *check)
{
    return dtrain__pipeline_splits(check->schedule->kind) ? DTRAIN_PIPELINE_ACT_WEIGHT
                                                          : DTRAIN_PIPELINE_ACT_BACKWARD;
}

/* Return what is still to come before gradients are final (REDUCE), or all are (STEP). */
static const char *dtrain__missing_sum(const dtrain__check *check, int rank,
                                       const dtrain_pipeline_action *action)
{
    const int last = check->schedule->micro_batches - 1, chunks = check->schedule->chunks;
    const bool step = action->act == DTRAIN_PIPELINE_ACT_STEP;
    const uint32_t needs = step ? (uint32_t)DTRAIN_PIPELINE_ACT_REDUCE : dtrain__adds(check);
    if (action->micro_batch != last || (step && action->chunk))
        return "it belongs to the last micro-batch, a STEP to chunk 0";
    for (int c = 0; c < chunks; c++)
        if ((step || c == action->chunk) &&
            !(dtrain__pass_of(check, rank, c, last)->done >> needs & 1))
            return step ? "a REDUCE is still to come" : "gradients are still to be added";
    return NULL;
}

/* Return what a pass still needs before an action; NULL: nothing. */
static const char *dtrain__missing(const dtrain__check *check, int rank,
                                   const dtrain_pipeline_action *action)
{
    const dtrain_pipeline_schedule *s = check->schedule;
    const bool splits = dtrain__pipeline_splits(s->kind);
    const dtrain__pass_state *pass =
        dtrain__pass_of(check, rank, action->chunk, action->micro_batch);
    const int stage = dtrain_pipeline_stage(s->kind, s->ranks, s->chunks, rank, action->chunk);
    const bool last = stage == s->ranks * s->chunks - 1;
    const uint32_t done = pass->done, act = action->act;
    if (done >> act & 1) return "it has been done before";
    if (act == DTRAIN_PIPELINE_ACT_REDUCE || act == DTRAIN_PIPELINE_ACT_STEP)
        return dtrain__missing_sum(check, rank, action);
    if (act == DTRAIN_PIPELINE_ACT_WEIGHT && !splits) return "this kind has no such action";
    if (act == DTRAIN_PIPELINE_ACT_FORWARD && stage && pass->arrived[0] < 0)
        return "what the stage before makes is not there";
    if (act == DTRAIN_PIPELINE_ACT_BACKWARD && !(done >> DTRAIN_PIPELINE_ACT_FORWARD & 1))
        return "it comes before the forward";
    if (act == DTRAIN_PIPELINE_ACT_BACKWARD && !last && pass->arrived[1] < 0)
        return "the gradient from the next stage is not there";
    if (act == DTRAIN_PIPELINE_ACT_WEIGHT && !(done >> DTRAIN_PIPELINE_ACT_BACKWARD & 1))
        return "it comes before the backward";
    if (act == DTRAIN_PIPELINE_ACT_SEND && (last || !(done >> DTRAIN_PIPELINE_ACT_FORWARD & 1)))
        return last ? "no stage is behind this one" : "it comes before the forward";
    if (act == DTRAIN_PIPELINE_ACT_SEND_GRADIENT &&
        (!stage || !(done >> DTRAIN_PIPELINE_ACT_BACKWARD & 1)))
        return stage ? "it comes before the backward" : "no stage is before this one";
    if (act == DTRAIN_PIPELINE_ACT_RECEIVE_GRADIENT && !(done >> DTRAIN_PIPELINE_ACT_FORWARD & 1))
        return "it comes before the forward";
    return NULL;
}

/* Check that gradients add up in ascending order: the micro-batch before has done the act. */
static bool dtrain__ascends(const dtrain__check *check, int rank,
                            const dtrain_pipeline_action *action)
{
    const uint32_t adds = dtrain__adds(check);
    if (action->micro_batch == 0 || action->act != adds) return true;
    return dtrain__pass_of(check, rank, action->chunk, action->micro_batch - 1)->done >> adds & 1;
}

/* Return the rank that has a stage; -1: there is no such stage. */
static int dtrain__rank_of(const dtrain_pipeline_schedule *s, int stage)
{
    if (stage < 0 || stage >= s->ranks * s->chunks) return -1;
    return dtrain__pipeline_place(s->kind, s->ranks, stage).rank;
}

/* Tell whether nobody reads any more what a pass of a rank keeps in its slot and inbox. */
static bool dtrain__is_over(const dtrain__check *check, int rank, int chunk, int micro)
{
    const dtrain_pipeline_schedule *s = check->schedule;
    const int stage = dtrain_pipeline_stage(s->kind, s->ranks, s->chunks, rank, chunk);
    const int before = dtrain__rank_of(s, stage - 1);
    const uint32_t done = dtrain__pass_of(check, rank, chunk, micro)->done;
    if (!(done >> dtrain__adds(check) & 1)) return false;
    if (before >= 0 && before != rank && !(done >> DTRAIN_PIPELINE_ACT_SEND_GRADIENT & 1))
        return false;
    if (dtrain__rank_of(s, stage + 1) != rank) return true;
    const int next = dtrain__pipeline_place(s->kind, s->ranks, stage + 1).chunk;
    return dtrain__pass_of(check, rank, next, micro)->done >> dtrain__adds(check) & 1;
}

/* Let a pass take a slot, or an inbox; false: there is none of this number, or it is not free. */
static bool dtrain__take(dtrain__check *check, int rank, const dtrain_pipeline_action *action,
                         bool inbox)
{
    const int micros = check->schedule->micro_batches;
    const int32_t number = inbox ? action->inbox : action->slot;
    dtrain__pass_state *pass = dtrain__pass_of(check, rank, action->chunk, action->micro_batch);
    if (number < 0 || number >= check->schedule->chunks * micros) return false;
    int32_t *holder = &dtrain__pass_of(check, rank, 0, number)->holders[inbox];
    if (*holder >= 0 && !dtrain__is_over(check, rank, *holder / micros, *holder % micros))
        return false;
    *holder = action->chunk * micros + action->micro_batch;
    *(inbox ? &pass->inbox : &pass->slot) = number;
    return true;
}

/* Let what a computation made reach the other stage where that is on the same rank. */
static void dtrain__hand_over(dtrain__check *check, int rank, const dtrain_pipeline_action *action,
                              int direction, double at)
{
    const dtrain_pipeline_schedule *s = check->schedule;
    const int stage = dtrain_pipeline_stage(s->kind, s->ranks, s->chunks, rank, action->chunk);
    const int to = stage + direction;
    if (to < 0 || to >= s->ranks * s->chunks) return;
    const dtrain__place_of_stage place = dtrain__pipeline_place(s->kind, s->ranks, to);
    if (place.rank != rank) return;
    dtrain__pass_of(check, rank, place.chunk, action->micro_batch)->arrived[direction < 0] = at;
}

/* Return what a computation costs. */
static double dtrain__check_cost(const dtrain__check *check, int rank,
                                 const dtrain_pipeline_action *action)
{
    const dtrain_pipeline_schedule *s = check->schedule;
    const dtrain_pipeline_costs ones = {1, 1, 1, 0};
    const int stage = dtrain_pipeline_stage(s->kind, s->ranks, s->chunks, rank, action->chunk);
    const dtrain_pipeline_costs *costs = check->costs ? &check->costs[stage] : &ones;
    if (action->act == DTRAIN_PIPELINE_ACT_FORWARD) return costs->forward;
    if (action->act == DTRAIN_PIPELINE_ACT_WEIGHT) return costs->weight;
    return dtrain__pipeline_splits(s->kind) ? costs->backward : costs->backward + costs->weight;
}

/* Do a computation of a rank. */
static dtrain_result dtrain__check_compute(dtrain__check *check, int rank,
                                           const dtrain_pipeline_action *action)
{
    const uint32_t act = action->act;
    dtrain__pass_state *pass = dtrain__pass_of(check, rank, action->chunk, action->micro_batch);
    if (!dtrain__ascends(check, rank, action))
        return dtrain__check_fail(rank, action, "gradients add up in ascending micro-batches");
    const double cost = dtrain__check_cost(check, rank, action);
    double begin = check->clock[rank];
    if (act <= DTRAIN_PIPELINE_ACT_BACKWARD)
        begin = fmax(begin, pass->arrived[act - DTRAIN_PIPELINE_ACT_FORWARD]);
    check->clock[rank] = begin + cost;
    check->busy[rank] += cost;
    pass->end[act] = begin + cost;
    if (check->watch) check->watch(check->user, rank, action, begin, begin + cost);
    if (act == DTRAIN_PIPELINE_ACT_FORWARD) {
        check->peak[rank] = (int32_t)fmax(check->peak[rank], ++check->live[rank]);
        dtrain__hand_over(check, rank, action, 1, begin + cost);
    } else if (act == DTRAIN_PIPELINE_ACT_BACKWARD) {
        check->live[rank]--;
        dtrain__hand_over(check, rank, action, -1, begin + cost);
    }
    return DTRAIN_OK;
}

/* Check the slot and the inbox that an action names: those of its pass. */
static dtrain_result dtrain__check_room(dtrain__check *check, int rank,
                                        const dtrain_pipeline_action *action)
{
    const dtrain__pass_state *pass =
        dtrain__pass_of(check, rank, action->chunk, action->micro_batch);
    if (action->act >= DTRAIN_PIPELINE_ACT_REDUCE) return DTRAIN_OK;
    if (action->act == DTRAIN_PIPELINE_ACT_FORWARD && !dtrain__take(check, rank, action, false))
        return dtrain__check_fail(rank, action, "its slot is not free, or there is none");
    if (action->slot != pass->slot)
        return dtrain__check_fail(rank, action, "its slot is not the forward's");
    if (action->inbox != pass->inbox)
        return dtrain__check_fail(rank, action, "its inbox is not the receive's");
    return DTRAIN_OK;
}

/* Return the action that a rank has come to; NULL: it is done. */
static const dtrain_pipeline_action *dtrain__at(const dtrain__check *check, int rank)
{
    const dtrain_pipeline_schedule *s = check->schedule;
    const size_t i = s->first[rank] + check->at[rank];
    return i < s->first[rank + 1] ? &s->actions[i] : NULL;
}

/* Carry the message whose send a rank has come to, if the peer has come to its receive. */
static dtrain_result dtrain__check_message(dtrain__check *check, int rank,
                                           const dtrain_pipeline_action *send, bool *moved)
{
    const dtrain_pipeline_schedule *s = check->schedule;
    const bool forward = send->act == DTRAIN_PIPELINE_ACT_SEND;
    const int stage = dtrain_pipeline_stage(s->kind, s->ranks, s->chunks, rank, send->chunk);
    const dtrain__place_of_stage place =
        dtrain__pipeline_place(s->kind, s->ranks, stage + (forward ? 1 : -1));
    if (send->peer != place.rank)
        return dtrain__check_fail(rank, send, "its peer does not have the other stage");
    const dtrain_pipeline_action *receive = dtrain__at(check, place.rank);
    if (!receive || receive->peer != rank ||
        (receive->act != DTRAIN_PIPELINE_ACT_RECEIVE &&
         receive->act != DTRAIN_PIPELINE_ACT_RECEIVE_GRADIENT))
        return DTRAIN_OK;
    if (receive->act != send->act + 1 || receive->chunk != place.chunk ||
        receive->micro_batch != send->micro_batch)
        return dtrain__check_fail(place.rank, receive, "the peer sends another message");
    dtrain__pass_state *to =
        dtrain__pass_of(check, place.rank, receive->chunk, receive->micro_batch);
    if (forward && !dtrain__take(check, place.rank, receive, true))
        return dtrain__check_fail(place.rank, receive, "its inbox is not free, or there is none");
    DTRAIN__TRY(dtrain__check_room(check, rank, send));
    DTRAIN__TRY(dtrain__check_room(check, place.rank, receive));
    to->arrived[!forward] =
        dtrain__pass_of(check, rank, send->chunk, send->micro_batch)
            ->end[forward ? DTRAIN_PIPELINE_ACT_FORWARD : DTRAIN_PIPELINE_ACT_BACKWARD] +
        (check->costs ? check->costs[stage].message : 0);
    dtrain__pass_of(check, rank, send->chunk, send->micro_batch)->done |= 1u << send->act;
    to->done |= 1u << receive->act;
    check->at[rank]++;
    check->at[place.rank]++;
    *moved = true;
    return DTRAIN_OK;
}

/* Let a rank go on by one action, if it can. */
static dtrain_result dtrain__check_next(dtrain__check *check, int rank, bool *moved)
{
    const dtrain_pipeline_schedule *s = check->schedule;
    const dtrain_pipeline_action *action = dtrain__at(check, rank);
    if (!action) return DTRAIN_OK;
    if (action->act < DTRAIN_PIPELINE_ACT_FORWARD || action->act > DTRAIN_PIPELINE_ACT_STEP ||
        action->chunk < 0 || action->chunk >= s->chunks || action->micro_batch < 0 ||
        action->micro_batch >= s->micro_batches)
        return dtrain__check_fail(rank, action, "there is no such action, chunk or micro-batch");
    const char *missing = dtrain__missing(check, rank, action);
    if (missing) return dtrain__check_fail(rank, action, missing);
    if (action->act == DTRAIN_PIPELINE_ACT_SEND || action->act == DTRAIN_PIPELINE_ACT_SEND_GRADIENT)
        return dtrain__check_message(check, rank, action, moved);
    if (action->act == DTRAIN_PIPELINE_ACT_RECEIVE ||
        action->act == DTRAIN_PIPELINE_ACT_RECEIVE_GRADIENT)
        return DTRAIN_OK; /* its send moves both */
    DTRAIN__TRY(dtrain__check_room(check, rank, action));
    if (action->act <= DTRAIN_PIPELINE_ACT_WEIGHT)
        DTRAIN__TRY(dtrain__check_compute(check, rank, action));
    dtrain__pass_of(check, rank, action->chunk, action->micro_batch)->done |= 1u << action->act;
    check->at[rank]++;
    *moved = true;
    return DTRAIN_OK;
}

/* Check that a rank has done an action. */
static dtrain_result dtrain__check_done(const dtrain__check *check, int rank, uint32_t act,
                                        int chunk, int micro)
{
    const dtrain_pipeline_action action = {act, chunk, micro, -1, -1, -1};
    if (dtrain__pass_of(check, rank, chunk, micro)->done >> act & 1) return DTRAIN_OK;
    return dtrain__check_fail(rank, &action, "it is missing");
}

/* Check that each rank has done what its kind has; the rest is needed by these. */
static dtrain_result dtrain__check_all_done(const dtrain__check *check)
{
    const dtrain_pipeline_schedule *s = check->schedule;
    const int last = s->micro_batches - 1;
    for (int r = 0; r < s->ranks; r++) {
        for (int c = 0; c < s->chunks; c++)
            for (int i = 0; i <= last; i++)
                DTRAIN__TRY(dtrain__check_done(check, r, dtrain__adds(check), c, i));
        for (int c = 0; c < s->chunks; c++)
            DTRAIN__TRY(dtrain__check_done(check, r, DTRAIN_PIPELINE_ACT_REDUCE, c, last));
        DTRAIN__TRY(dtrain__check_done(check, r, DTRAIN_PIPELINE_ACT_STEP, 0, last));
    }
    return DTRAIN_OK;
}

/* Replay all ranks. */
static dtrain_result dtrain__check_run(dtrain__check *check)
{
    const dtrain_pipeline_schedule *s = check->schedule;
    for (bool moved = true; moved;) {
        moved = false;
        for (int r = 0; r < s->ranks; r++)
            for (bool more = true; more; moved = moved || more) {
                more = false;
                DTRAIN__TRY(dtrain__check_next(check, r, &more));
            }
    }
    for (int r = 0; r < s->ranks; r++) {
        const dtrain_pipeline_action *action = dtrain__at(check, r);
        if (action)
            return dtrain__check_fail(r, action, "the run hangs here: its peer never comes to it");
    }
    return dtrain__check_all_done(check);
}

/* Add up what a rank needs, and what all of them take. */
static void dtrain__check_report(const dtrain__check *check, int rank,
                                 dtrain_pipeline_report *report)
{
    const dtrain_pipeline_schedule *s = check->schedule;
    double busy = 0;
    memset(report, 0, sizeof *report);
    for (int r = 0; r < s->ranks; r++) {
        report->makespan = fmax(report->makespan, check->clock[r]);
        busy += check->busy[r];
    }
    report->bubble = report->makespan > 0 ? 1 - busy / (s->ranks * report->makespan) : 0;
    if (rank < 0 || rank >= s->ranks) return;
    report->peak = check->peak[rank];
    dtrain__pipeline_room(s, rank, report);
}

/* Check that a schedule has what a replay reads, and of sizes that fit. */
static dtrain_result dtrain__check_shape(const dtrain_pipeline_schedule *s)
{
    const char *const call = "dtrain_pipeline_check";
    const dtrain_pipeline_desc desc = {s ? s->kind : 0, s ? (uint32_t)s->chunks : 0, NULL};
    int chunks;
    if (!s || !s->first || !s->actions)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: schedule or a part of it is NULL", call);
    DTRAIN__TRY(dtrain__pipeline_chunks(&desc, s->ranks, &chunks));
    if (s->chunks == chunks && s->ranks > 0 && s->micro_batches > 0 &&
        s->ranks <= DTRAIN__PASSES_MOST &&
        (int64_t)s->ranks * chunks * s->micro_batches <= DTRAIN__PASSES_MOST)
        return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                       "%s: the schedule has %d ranks, %d chunks and %d micro-batches; expected 1 "
                       "or more, and at most %d passes in all",
                       call, (int)s->ranks, (int)s->chunks, (int)s->micro_batches,
                       DTRAIN__PASSES_MOST);
}

DTRAIN__PRIVATE dtrain_result dtrain__pipeline_replay(const dtrain_pipeline_schedule *schedule,
                                                      const dtrain_pipeline_costs *costs, int rank,
                                                      dtrain_pipeline_report *report,
                                                      dtrain__watch_fn watch, void *user)
{
    const dtrain_allocator allocator = dtrain__resolve_allocator(NULL);
    dtrain__check check;
    DTRAIN__TRY(dtrain__check_shape(schedule));
    memset(&check, 0, sizeof check);
    check.schedule = schedule;
    check.watch = watch;
    check.user = user;
    check.costs = costs;
    const size_t ranks = (size_t)schedule->ranks;
    const size_t passes = ranks * (size_t)schedule->chunks * (size_t)schedule->micro_batches;
    const size_t bytes = sizeof *check.at + 2 * sizeof *check.clock + 2 * sizeof *check.live;
    char *memory = (char *)dtrain__alloc(&allocator, ranks, bytes, "a check of a schedule");
    check.passes = (dtrain__pass_state *)dtrain__alloc(&allocator, passes, sizeof *check.passes,
                                                       "a check of a schedule");
    dtrain_result result = memory && check.passes ? DTRAIN_OK : DTRAIN_ERROR_MEMORY;
    if (result == DTRAIN_OK) {
        check.clock = (double *)(void *)memory;
        check.busy = check.clock + ranks;
        check.at = (size_t *)(void *)(check.busy + ranks);
        check.live = (int32_t *)(void *)(check.at + ranks);
        check.peak = check.live + ranks;
        for (size_t i = 0; i < passes; i++) {
            check.passes[i].slot = check.passes[i].inbox = -1;
            check.passes[i].holders[0] = check.passes[i].holders[1] = -1;
            check.passes[i].arrived[0] = check.passes[i].arrived[1] = -1;
        }
        result = dtrain__check_run(&check);
    }
    if (result == DTRAIN_OK && report) dtrain__check_report(&check, rank, report);
    dtrain__free(&allocator, memory, ranks, bytes);
    dtrain__free(&allocator, check.passes, passes, sizeof *check.passes);
    return result;
}

DTRAIN_API dtrain_result dtrain_pipeline_check(const dtrain_pipeline_schedule *schedule,
                                               const dtrain_pipeline_costs *costs, int rank,
                                               dtrain_pipeline_report *report)
{
    return dtrain__pipeline_replay(schedule, costs, rank, report, NULL, NULL);
}
