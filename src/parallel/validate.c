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

/* A micro-batch in a stage. */
typedef struct dtrain__pass_state {
    uint32_t done;       /* bits: 1 << act */
    int32_t slot, inbox; /* -1: none yet */
    int32_t holders[2]; /* of the slot and of the inbox with this number on this rank: the pass that
                            took it last; -1: none did */
    double end[4];      /* by act: when it was done */
    double arrived[2];  /* what came of the stage before, and the gradient from the next one */
} dtrain__pass_state;

typedef struct dtrain__rank_state {
    size_t at; /* the action that it has come to */
    double clock, busy;
    int live, peak; /* passes between forward and backward */
} dtrain__rank_state;

typedef struct dtrain__check {
    const dtrain_pipeline_schedule *schedule;
    const dtrain_pipeline_costs *costs; /* (stages), or NULL */
    double *ends;                       /* (actions), or NULL */
    dtrain__rank_state *ranks;
    dtrain__pass_state *passes; /* (stages, micro-batches) */
} dtrain__check;

/* The action that a rank has come to. */
typedef struct dtrain__check_turn {
    const dtrain_pipeline_action *action; /* NULL: all are done */
    int rank, stage;
    dtrain__pass_state *pass; /* NULL: there is no such chunk or micro-batch */
} dtrain__check_turn;

static dtrain__pass_state *dtrain__pass_of(const dtrain__check *check, int stage, int micro)
{
    return &check->passes[stage * check->schedule->micro_batches + micro];
}

/* Return the rank that has a stage; -1: there is no such stage. */
static int dtrain__rank_of(const dtrain_pipeline_schedule *s, int stage)
{
    if (stage < 0 || stage >= s->ranks * s->chunks) return -1;
    return dtrain__pipeline_place(s->kind, s->ranks, stage).rank;
}

static dtrain__check_turn dtrain__check_turn_of(const dtrain__check *check, int rank)
{
    const dtrain_pipeline_schedule *s = check->schedule;
    const size_t i = s->first[rank] + check->ranks[rank].at;
    dtrain__check_turn turn = {NULL, rank, -1, NULL};
    if (i >= s->first[rank + 1]) return turn;
    const dtrain_pipeline_action *action = turn.action = &s->actions[i];
    turn.stage = dtrain__action_stage(s, rank, action);
    if (turn.stage >= 0 && action->micro_batch >= 0 && action->micro_batch < s->micro_batches)
        turn.pass = dtrain__pass_of(check, turn.stage, action->micro_batch);
    return turn;
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

/* ---- Is it time? ------------------------------------------------------------------------------*/

/* Return what is still to come before gradients are final (REDUCE), or all are (STEP). */
static const char *dtrain__missing_sum(const dtrain__check *check, const dtrain__check_turn *turn)
{
    const dtrain_pipeline_schedule *s = check->schedule;
    const int last = s->micro_batches - 1, chunk = turn->action->chunk;
    const bool step = turn->action->act == DTRAIN_PIPELINE_ACT_STEP;
    const uint32_t needs = step ? (uint32_t)DTRAIN_PIPELINE_ACT_REDUCE : dtrain__adds(check);
    if (turn->action->micro_batch != last || (step && chunk))
        return "it belongs to the last micro-batch, a STEP to chunk 0";
    for (int c = chunk; c < (step ? s->chunks : chunk + 1); c++) {
        const int stage = dtrain_pipeline_stage(s->kind, s->ranks, s->chunks, turn->rank, c);
        if (!(dtrain__pass_of(check, stage, last)->done >> needs & 1))
            return step ? "a REDUCE is still to come" : "gradients are still to be added";
    }
    return NULL;
}

/* Return what a pass still needs before an action; NULL: nothing. Receives need what their sends
 * do. */
static const char *dtrain__missing(const dtrain__check *check, const dtrain__check_turn *turn)
{
    enum { NONE, F = DTRAIN_PIPELINE_ACT_FORWARD, B = DTRAIN_PIPELINE_ACT_BACKWARD };
    static const int before[] = {NONE, NONE, F, B, F, NONE, B, F}; /* by act, in its pass */
    const dtrain_pipeline_schedule *s = check->schedule;
    const dtrain__pass_state *pass = turn->pass;
    const uint32_t act = turn->action->act, adds = dtrain__adds(check);
    const bool first = turn->stage == 0, last = turn->stage == s->ranks * s->chunks - 1;
    if (pass->done >> act & 1) return "it has been done before";
    if (act >= DTRAIN_PIPELINE_ACT_REDUCE) return dtrain__missing_sum(check, turn);
    if (act == DTRAIN_PIPELINE_ACT_WEIGHT && act != adds) return "this kind has no such action";
    if (act == DTRAIN_PIPELINE_ACT_SEND && last) return "no stage is behind this one";
    if (act == DTRAIN_PIPELINE_ACT_SEND_GRADIENT && first) return "no stage is before this one";
    if (before[act] && !(pass->done >> before[act] & 1))
        return before[act] == F ? "it comes before the forward" : "it comes before the backward";
    if (act == DTRAIN_PIPELINE_ACT_FORWARD && !first && pass->arrived[0] < 0)
        return "what the stage before makes is not there";
    if (act == DTRAIN_PIPELINE_ACT_BACKWARD && !last && pass->arrived[1] < 0)
        return "the gradient from the next stage is not there";
    if (act == adds && turn->action->micro_batch && !((pass - 1)->done >> adds & 1))
        return "gradients add up in ascending micro-batches";
    return NULL;
}

/* ---- Slots and inboxes ------------------------------------------------------------------------*/

/* Tell whether nobody reads any more what a pass keeps in its slot and inbox. */
static bool dtrain__is_over(const dtrain__check *check, int32_t pass)
{
    const dtrain_pipeline_schedule *s = check->schedule;
    const int stage = pass / s->micro_batches, rank = dtrain__rank_of(s, stage);
    const uint32_t adds = 1u << dtrain__adds(check);
    const bool sends = stage && dtrain__rank_of(s, stage - 1) != rank;
    const uint32_t needs = adds | (uint32_t)sends << DTRAIN_PIPELINE_ACT_SEND_GRADIENT;
    if ((check->passes[pass].done & needs) != needs) return false;
    if (dtrain__rank_of(s, stage + 1) != rank) return true;
    return check->passes[pass + s->micro_batches].done & adds;
}

/* Let a pass take a slot, or an inbox; false: there is none of this number, or it is not free. */
static bool dtrain__take(dtrain__check *check, const dtrain__check_turn *turn, bool inbox)
{
    const int32_t count = check->schedule->chunks * check->schedule->micro_batches;
    const int32_t number = inbox ? turn->action->inbox : turn->action->slot;
    if (number < 0 || number >= count) return false;
    int32_t *holder = &check->passes[turn->rank * count + number].holders[inbox];
    if (*holder >= 0 && !dtrain__is_over(check, *holder)) return false;
    *holder = (int32_t)(turn->pass - check->passes);
    *(inbox ? &turn->pass->inbox : &turn->pass->slot) = number;
    return true;
}

/* Check the slot and the inbox that an action names: those of its pass. A forward takes the slot, a
 * receive the inbox. */
static dtrain_result dtrain__check_room(dtrain__check *check, const dtrain__check_turn *turn)
{
    const dtrain_pipeline_action *action = turn->action;
    const char *why = NULL;
    if (action->act >= DTRAIN_PIPELINE_ACT_REDUCE) return DTRAIN_OK;
    if (action->act == DTRAIN_PIPELINE_ACT_FORWARD && !dtrain__take(check, turn, false))
        why = "its slot is not free, or there is none";
    else if (action->act == DTRAIN_PIPELINE_ACT_RECEIVE && !dtrain__take(check, turn, true))
        why = "its inbox is not free, or there is none";
    else if (action->slot != turn->pass->slot) why = "its slot is not the forward's";
    else if (action->inbox != turn->pass->inbox) why = "its inbox is not the receive's";
    return why ? dtrain__check_fail(turn->rank, action, why) : DTRAIN_OK;
}

/* ---- The replay -------------------------------------------------------------------------------*/

/* Return what a computation costs. */
static double dtrain__check_cost(const dtrain__check *check, int stage, uint32_t act)
{
    const dtrain_pipeline_costs ones = {1, 1, 1, 0};
    const dtrain_pipeline_costs *costs = check->costs ? &check->costs[stage] : &ones;
    if (act == DTRAIN_PIPELINE_ACT_FORWARD) return costs->forward;
    if (act == DTRAIN_PIPELINE_ACT_WEIGHT) return costs->weight;
    return costs->backward + (act == dtrain__adds(check) ? costs->weight : 0);
}

/* Do a computation. What it makes is there at once for another stage of the same rank. */
static void dtrain__check_compute(dtrain__check *check, const dtrain__check_turn *turn)
{
    const dtrain_pipeline_schedule *s = check->schedule;
    const uint32_t act = turn->action->act;
    const bool forward = act == DTRAIN_PIPELINE_ACT_FORWARD;
    const int to = turn->stage + (forward ? 1 : -1);
    const double cost = dtrain__check_cost(check, turn->stage, act);
    dtrain__rank_state *rank = &check->ranks[turn->rank];
    if (act != DTRAIN_PIPELINE_ACT_WEIGHT)
        rank->clock = fmax(rank->clock, turn->pass->arrived[!forward]);
    rank->clock += cost;
    rank->busy += cost;
    turn->pass->end[act] = rank->clock;
    if (check->ends) check->ends[turn->action - s->actions] = rank->clock;
    if (act == DTRAIN_PIPELINE_ACT_WEIGHT) return;
    rank->live += forward ? 1 : -1;
    if (rank->live > rank->peak) rank->peak = rank->live;
    if (dtrain__rank_of(s, to) == turn->rank)
        dtrain__pass_of(check, to, turn->action->micro_batch)->arrived[!forward] = rank->clock;
}

/* Note that an action is done. */
static void dtrain__check_done(dtrain__check *check, const dtrain__check_turn *turn)
{
    turn->pass->done |= 1u << turn->action->act;
    check->ranks[turn->rank].at++;
}

/* Carry the message whose send a rank has come to, if the peer has come to its receive. */
static dtrain_result dtrain__check_message(dtrain__check *check, const dtrain__check_turn *send,
                                           bool *moved)
{
    const bool forward = send->action->act == DTRAIN_PIPELINE_ACT_SEND;
    const int stage = send->stage + (forward ? 1 : -1);
    const int peer = dtrain__rank_of(check->schedule, stage);
    if (send->action->peer != peer)
        return dtrain__check_fail(send->rank, send->action,
                                  "its peer does not have the other stage");
    const dtrain__check_turn receive = dtrain__check_turn_of(check, peer);
    if (!receive.action || receive.action->peer != send->rank ||
        (receive.action->act != DTRAIN_PIPELINE_ACT_RECEIVE &&
         receive.action->act != DTRAIN_PIPELINE_ACT_RECEIVE_GRADIENT))
        return DTRAIN_OK;
    if (receive.action->act != send->action->act + 1 || receive.stage != stage ||
        receive.action->micro_batch != send->action->micro_batch)
        return dtrain__check_fail(peer, receive.action, "the peer sends another message");
    DTRAIN__TRY(dtrain__check_room(check, send));
    DTRAIN__TRY(dtrain__check_room(check, &receive));
    receive.pass->arrived[!forward] =
        send->pass->end[forward ? DTRAIN_PIPELINE_ACT_FORWARD : DTRAIN_PIPELINE_ACT_BACKWARD] +
        (check->costs ? check->costs[send->stage].message : 0);
    dtrain__check_done(check, send);
    dtrain__check_done(check, &receive);
    *moved = true;
    return DTRAIN_OK;
}

/* Let a rank go on by one action, if it can. */
static dtrain_result dtrain__check_next(dtrain__check *check, int rank, bool *moved)
{
    const dtrain__check_turn turn = dtrain__check_turn_of(check, rank);
    if (!turn.action) return DTRAIN_OK;
    const uint32_t act = turn.action->act;
    if (act < DTRAIN_PIPELINE_ACT_FORWARD || act > DTRAIN_PIPELINE_ACT_STEP || !turn.pass)
        return dtrain__check_fail(rank, turn.action,
                                  "there is no such action, chunk or micro-batch");
    const char *missing = dtrain__missing(check, &turn);
    if (missing) return dtrain__check_fail(rank, turn.action, missing);
    if (act == DTRAIN_PIPELINE_ACT_SEND || act == DTRAIN_PIPELINE_ACT_SEND_GRADIENT)
        return dtrain__check_message(check, &turn, moved);
    if (act == DTRAIN_PIPELINE_ACT_RECEIVE || act == DTRAIN_PIPELINE_ACT_RECEIVE_GRADIENT)
        return DTRAIN_OK; /* its send moves both */
    DTRAIN__TRY(dtrain__check_room(check, &turn));
    if (act <= DTRAIN_PIPELINE_ACT_WEIGHT) dtrain__check_compute(check, &turn);
    dtrain__check_done(check, &turn);
    *moved = true;
    return DTRAIN_OK;
}

/* Check that each rank has done what its kind has; the rest is needed by these. */
static dtrain_result dtrain__check_all_done(const dtrain__check *check)
{
    const dtrain_pipeline_schedule *s = check->schedule;
    const size_t last = (size_t)s->micro_batches - 1;
    for (int r = 0; r < s->ranks; r++)
        for (int c = 0; c < s->chunks; c++) {
            const int stage = dtrain_pipeline_stage(s->kind, s->ranks, s->chunks, r, c);
            const dtrain__pass_state *passes = dtrain__pass_of(check, stage, 0);
            for (size_t i = 0; i <= last; i++) {
                uint32_t left = 1u << dtrain__adds(check);
                if (i == last) left |= 1u << DTRAIN_PIPELINE_ACT_REDUCE;
                if (i == last && c == 0) left |= 1u << DTRAIN_PIPELINE_ACT_STEP;
                left &= ~passes[i].done;
                dtrain_pipeline_action action = {0, c, (int32_t)i, -1, -1, -1};
                while (left && !(left >> action.act & 1)) action.act++;
                if (left) return dtrain__check_fail(r, &action, "it is missing");
            }
        }
    return DTRAIN_OK;
}

/* Replay all ranks. */
static dtrain_result dtrain__check_run(dtrain__check *check)
{
    const int ranks = check->schedule->ranks;
    for (bool moved = true; moved;) {
        moved = false;
        for (int r = 0; r < ranks; r++)
            for (bool more = true; more; moved = moved || more) {
                more = false;
                DTRAIN__TRY(dtrain__check_next(check, r, &more));
            }
    }
    for (int r = 0; r < ranks; r++) {
        const dtrain__check_turn turn = dtrain__check_turn_of(check, r);
        if (turn.action)
            return dtrain__check_fail(r, turn.action,
                                      "the run hangs here: its peer never comes to it");
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
        report->makespan = fmax(report->makespan, check->ranks[r].clock);
        busy += check->ranks[r].busy;
    }
    report->bubble = report->makespan > 0 ? 1 - busy / (s->ranks * report->makespan) : 0;
    if (rank < 0 || rank >= s->ranks) return;
    report->peak = check->ranks[rank].peak;
    dtrain__pipeline_room(s, rank, report);
}

/* Check that a schedule has what a replay reads, and of sizes that fit. */
static dtrain_result dtrain__check_shape(const dtrain_pipeline_schedule *s)
{
    const char *const call = "dtrain_pipeline_check";
    if (!s || !s->first || !s->actions || !s->chunks)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "%s: schedule or a part of it is NULL, or it has 0 chunks", call);
    const dtrain_pipeline_desc desc = {s->kind, (uint32_t)s->chunks, NULL};
    int chunks;
    return dtrain__pipeline_sizes(call, &desc, s->ranks, s->micro_batches, &chunks);
}

DTRAIN__PRIVATE dtrain_result dtrain__pipeline_replay(const dtrain_pipeline_schedule *schedule,
                                                      const dtrain_pipeline_costs *costs, int rank,
                                                      dtrain_pipeline_report *report, double *ends)
{
    const dtrain_allocator allocator = dtrain__resolve_allocator(NULL);
    const char *const what = "a check of a schedule";
    dtrain__check check;
    DTRAIN__TRY(dtrain__check_shape(schedule));
    const size_t ranks = (size_t)schedule->ranks;
    const size_t passes = ranks * (size_t)schedule->chunks * (size_t)schedule->micro_batches;
    check.schedule = schedule;
    check.costs = costs;
    check.ends = ends;
    check.ranks = (dtrain__rank_state *)dtrain__alloc(&allocator, ranks, sizeof *check.ranks, what);
    check.passes =
        (dtrain__pass_state *)dtrain__alloc(&allocator, passes, sizeof *check.passes, what);
    const dtrain__pass_state fresh = {0, -1, -1, {-1, -1}, {0, 0, 0, 0}, {-1, -1}};
    for (size_t i = 0; i < passes && check.passes; i++) check.passes[i] = fresh;
    dtrain_result result =
        check.ranks && check.passes ? dtrain__check_run(&check) : DTRAIN_ERROR_MEMORY;
    if (result == DTRAIN_OK && report) dtrain__check_report(&check, rank, report);
    dtrain__free(&allocator, check.ranks, ranks, sizeof *check.ranks);
    dtrain__free(&allocator, check.passes, passes, sizeof *check.passes);
    return result;
}

DTRAIN_API dtrain_result dtrain_pipeline_check(const dtrain_pipeline_schedule *schedule,
                                               const dtrain_pipeline_costs *costs, int rank,
                                               dtrain_pipeline_report *report)
{
    return dtrain__pipeline_replay(schedule, costs, rank, report, NULL);
}
