/* schedule.h: checks schedules of pipelines, writes them as text, reads and draws them, on public functions. No run
 * needs it: it is for programs that show a schedule, predict what it costs, or let people edit it.
 *
 * Text: a line for the head, then one for each rank. An action is its name, chunk.micro-batch, and its :slot, /inbox
 * and @peer if it has them:
 *
 *     1F1B ranks 2 chunks 1 micro-batches 1
 *     rank 0: F0.0:0 S0.0:0@1 RG0.0:0@1 B0.0:0 REDUCE0.0 STEP0.0
 *     rank 1: R0.0/0@0 F0.0:0/0 B0.0:0/0 SG0.0:0/0@0 REDUCE0.0 STEP0.0
 *
 * Check: all ranks are replayed. A computation is done as soon as its rank comes to it, and is an error if
 * what it needs is not there. A send waits for its receive: both ranks must stand at the two ends
 * of the same message. Where no rank can go on and not all are done, the run would hang. In the end
 * everything must have been done once, and slots and inboxes were never used twice at once: a pass
 * keeps them until it has done its last computation and has sent its gradient.
 *
 * Times: a computation begins when its rank is free and what it needs has arrived; messages take
 * time and keep no rank busy, as the runner's are asynchronous. */
#ifndef TOOLS_SCHEDULE_H
#define TOOLS_SCHEDULE_H

#include "dtrain.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SCHEDULE_TRY(call)                                        \
    do {                                                          \
        const dtrain_result schedule_result = (call);             \
        if (schedule_result != DTRAIN_OK) return schedule_result; \
    } while (0)
#ifdef __GNUC__
#define SCHEDULE_PRINTF(at, first) __attribute__((format(printf, at, first)))
#else
#define SCHEDULE_PRINTF(at, first)
#endif

typedef struct schedule_report {
    double makespan;    /* until the last rank is done */
    double bubble;      /* share of it that the ranks are idle, on average */
    int peak;           /* of the asked rank: passes between FORWARD and BACKWARD at once */
    int slots, inboxes; /* that it needs */
} schedule_report;

static inline const char *schedule_kind_name(uint32_t kind)
{
    static const char *const names[] = {"1F1B", "GPIPE", "INTERLEAVED", "ZB_H1"};
    return kind <= DTRAIN_PIPELINE_ZB_H1 ? names[kind] : "?";
}

static inline const char *schedule_act_name(uint32_t act)
{
    static const char *const names[] = {"?",      "FORWARD", "BACKWARD",      "WEIGHT",
                                        "SEND",   "RECEIVE", "SEND_GRADIENT", "RECEIVE_GRADIENT",
                                        "REDUCE", "STEP"};
    return names[act <= DTRAIN_PIPELINE_ACT_STEP ? act : 0];
}

/* The act's name in a text. */
static inline const char *schedule_act_word(uint32_t act)
{
    static const char *const words[] = {"?", "F", "B", "W", "S", "R", "SG", "RG", "REDUCE", "STEP"};
    return words[act <= DTRAIN_PIPELINE_ACT_STEP ? act : 0];
}

/* Tell whether the gradients of weights are actions of their own. */
static inline bool schedule_splits(uint32_t kind) { return kind == DTRAIN_PIPELINE_ZB_H1; }

/* ---- Checking ---------------------------------------------------------------------------------*/

/* A micro-batch in a stage. */
typedef struct schedule_pass_state {
    uint32_t done;       /* bits: 1 << act */
    int32_t slot, inbox; /* -1: none yet */
    int32_t holders[2]; /* of the slot and of the inbox with this number on this rank: the pass that
                            took it last; -1: none did */
    double end[4];      /* by act: when it was done */
    double arrived[2];  /* what came of the stage before, and the gradient from the next one */
} schedule_pass_state;

typedef struct schedule_rank_state {
    size_t at; /* the action that it has come to */
    double clock, busy;
    int live, peak; /* passes between forward and backward */
} schedule_rank_state;

typedef struct schedule_walk {
    const dtrain_pipeline_schedule *schedule;
    const dtrain_pipeline_costs *costs; /* (stages), or NULL */
    double *ends;                       /* (actions), or NULL */
    schedule_rank_state *ranks;
    schedule_pass_state *passes; /* (stages, micro-batches) */
} schedule_walk;

/* The action that a rank has come to. */
typedef struct schedule_check_turn {
    const dtrain_pipeline_action *action; /* NULL: all are done */
    int rank, stage;
    schedule_pass_state *pass; /* NULL: there is no such chunk or micro-batch */
} schedule_check_turn;

static inline schedule_pass_state *schedule_pass_of(const schedule_walk *check, int stage,
                                                    int micro)
{
    return &check->passes[stage * check->schedule->micro_batches + micro];
}

/* Return the rank that has a stage; -1: there is no such stage. */
static inline int schedule_rank_of(const dtrain_pipeline_schedule *s, int stage)
{
    if (stage < 0 || stage >= s->ranks * s->chunks) return -1;
    return stage % s->ranks;
}

static inline schedule_check_turn schedule_check_turn_of(const schedule_walk *check, int rank)
{
    const dtrain_pipeline_schedule *s = check->schedule;
    const size_t i = s->first[rank] + check->ranks[rank].at;
    schedule_check_turn turn = {NULL, rank, -1, NULL};
    if (i >= s->first[rank + 1]) return turn;
    const dtrain_pipeline_action *action = turn.action = &s->actions[i];
    if (action->chunk < 0 || action->chunk >= s->chunks) return turn;
    turn.stage = action->chunk * s->ranks + rank;
    if (action->micro_batch >= 0 && action->micro_batch < s->micro_batches)
        turn.pass = schedule_pass_of(check, turn.stage, action->micro_batch);
    return turn;
}

/* Fail at a rank's action. */
static inline dtrain_result schedule_check_fail(int rank, const dtrain_pipeline_action *action,
                                                const char *why)
{
    return dtrain_fail(
        DTRAIN_ERROR_USAGE, "schedule_check: rank %d, %s of chunk %d, micro-batch %d: %s", rank,
        schedule_act_name(action->act), (int)action->chunk, (int)action->micro_batch, why);
}

/* Return the act that adds to the gradients of weights, a pass's last computation. */
static inline uint32_t schedule_adds(const schedule_walk *check)
{
    return schedule_splits(check->schedule->kind) ? DTRAIN_PIPELINE_ACT_WEIGHT
                                                  : DTRAIN_PIPELINE_ACT_BACKWARD;
}

/* ---- Is it time? ------------------------------------------------------------------------------*/

/* Return what is still to come before gradients are final (REDUCE), or all are (STEP). */
static const char *schedule_missing_sum(const schedule_walk *check, const schedule_check_turn *turn)
{
    const dtrain_pipeline_schedule *s = check->schedule;
    const int last = s->micro_batches - 1, chunk = turn->action->chunk;
    const bool step = turn->action->act == DTRAIN_PIPELINE_ACT_STEP;
    const uint32_t needs = step ? (uint32_t)DTRAIN_PIPELINE_ACT_REDUCE : schedule_adds(check);
    if (turn->action->micro_batch != last || (step && chunk))
        return "it belongs to the last micro-batch, a STEP to chunk 0";
    for (int c = chunk; c < (step ? s->chunks : chunk + 1); c++) {
        const int stage = c * s->ranks + turn->rank;
        if (!(schedule_pass_of(check, stage, last)->done >> needs & 1))
            return step ? "a REDUCE is still to come" : "gradients are still to be added";
    }
    return NULL;
}

/* Return what a pass still needs before an action; NULL: nothing. Receives need what their sends
 * do. */
static const char *schedule_missing(const schedule_walk *check, const schedule_check_turn *turn)
{
    enum { NONE, F = DTRAIN_PIPELINE_ACT_FORWARD, B = DTRAIN_PIPELINE_ACT_BACKWARD };
    static const int before[] = {NONE, NONE, F, B, F, NONE, B, F}; /* by act, in its pass */
    const dtrain_pipeline_schedule *s = check->schedule;
    const schedule_pass_state *pass = turn->pass;
    const uint32_t act = turn->action->act, adds = schedule_adds(check);
    const bool first = turn->stage == 0, last = turn->stage == s->ranks * s->chunks - 1;
    if (pass->done >> act & 1) return "it has been done before";
    if (act >= DTRAIN_PIPELINE_ACT_REDUCE) return schedule_missing_sum(check, turn);
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
static inline bool schedule_is_over(const schedule_walk *check, int32_t pass)
{
    const bool sends = pass >= check->schedule->micro_batches; /* all but the first stage's */
    const uint32_t needs = 1u << schedule_adds(check) | (uint32_t)sends
                                                            << DTRAIN_PIPELINE_ACT_SEND_GRADIENT;
    return (check->passes[pass].done & needs) == needs;
}

/* Let a pass take a slot, or an inbox; false: there is none of this number, or it is not free. */
static inline bool schedule_take(schedule_walk *check, const schedule_check_turn *turn, bool inbox)
{
    const int32_t count = check->schedule->chunks * check->schedule->micro_batches;
    const int32_t number = inbox ? turn->action->inbox : turn->action->slot;
    if (number < 0 || number >= count) return false;
    int32_t *holder = &check->passes[turn->rank * count + number].holders[inbox];
    if (*holder >= 0 && !schedule_is_over(check, *holder)) return false;
    *holder = (int32_t)(turn->pass - check->passes);
    *(inbox ? &turn->pass->inbox : &turn->pass->slot) = number;
    return true;
}

/* Check the slot and the inbox that an action names: those of its pass. A forward takes the slot, a
 * receive the inbox. */
static inline dtrain_result schedule_check_room(schedule_walk *check,
                                                const schedule_check_turn *turn)
{
    const dtrain_pipeline_action *action = turn->action;
    const char *why = NULL;
    if (action->act >= DTRAIN_PIPELINE_ACT_REDUCE) return DTRAIN_OK;
    if (action->act == DTRAIN_PIPELINE_ACT_FORWARD && !schedule_take(check, turn, false))
        why = "its slot is not free, or there is none";
    else if (action->act == DTRAIN_PIPELINE_ACT_RECEIVE && !schedule_take(check, turn, true))
        why = "its inbox is not free, or there is none";
    else if (action->slot != turn->pass->slot) why = "its slot is not the forward's";
    else if (action->inbox != turn->pass->inbox) why = "its inbox is not the receive's";
    return why ? schedule_check_fail(turn->rank, action, why) : DTRAIN_OK;
}

/* ---- The replay -------------------------------------------------------------------------------*/

/* Return what a computation costs. */
static inline double schedule_check_cost(const schedule_walk *check, int stage, uint32_t act)
{
    const dtrain_pipeline_costs ones = {1, 1, 1, 0};
    const dtrain_pipeline_costs *costs = check->costs ? &check->costs[stage] : &ones;
    if (act == DTRAIN_PIPELINE_ACT_FORWARD) return costs->forward;
    if (act == DTRAIN_PIPELINE_ACT_WEIGHT) return costs->weight;
    return costs->backward + (act == schedule_adds(check) ? costs->weight : 0);
}

/* Do a computation. */
static inline void schedule_check_compute(schedule_walk *check, const schedule_check_turn *turn)
{
    const dtrain_pipeline_schedule *s = check->schedule;
    const uint32_t act = turn->action->act;
    const bool forward = act == DTRAIN_PIPELINE_ACT_FORWARD;
    const double cost = schedule_check_cost(check, turn->stage, act);
    schedule_rank_state *rank = &check->ranks[turn->rank];
    if (act != DTRAIN_PIPELINE_ACT_WEIGHT)
        rank->clock = fmax(rank->clock, turn->pass->arrived[!forward]);
    rank->clock += cost;
    rank->busy += cost;
    turn->pass->end[act] = rank->clock;
    if (check->ends) check->ends[turn->action - s->actions] = rank->clock;
    if (act == DTRAIN_PIPELINE_ACT_WEIGHT) return;
    rank->live += forward ? 1 : -1;
    if (rank->live > rank->peak) rank->peak = rank->live;
}

/* Note that an action is done. */
static inline void schedule_check_done(schedule_walk *check, const schedule_check_turn *turn)
{
    turn->pass->done |= 1u << turn->action->act;
    check->ranks[turn->rank].at++;
}

/* Carry the message whose send a rank has come to, if the peer has come to its receive. */
static inline dtrain_result schedule_check_message(schedule_walk *check,
                                                   const schedule_check_turn *send, bool *moved)
{
    const bool forward = send->action->act == DTRAIN_PIPELINE_ACT_SEND;
    const int stage = send->stage + (forward ? 1 : -1);
    const int peer = schedule_rank_of(check->schedule, stage);
    if (send->action->peer != peer)
        return schedule_check_fail(send->rank, send->action,
                                   "its peer does not have the other stage");
    const schedule_check_turn receive = schedule_check_turn_of(check, peer);
    if (!receive.action || receive.action->peer != send->rank ||
        (receive.action->act != DTRAIN_PIPELINE_ACT_RECEIVE &&
         receive.action->act != DTRAIN_PIPELINE_ACT_RECEIVE_GRADIENT))
        return DTRAIN_OK;
    if (receive.action->act != send->action->act + 1 || receive.stage != stage ||
        receive.action->micro_batch != send->action->micro_batch)
        return schedule_check_fail(peer, receive.action, "the peer sends another message");
    SCHEDULE_TRY(schedule_check_room(check, send));
    SCHEDULE_TRY(schedule_check_room(check, &receive));
    receive.pass->arrived[!forward] =
        send->pass->end[forward ? DTRAIN_PIPELINE_ACT_FORWARD : DTRAIN_PIPELINE_ACT_BACKWARD] +
        (check->costs ? check->costs[send->stage].message : 0);
    schedule_check_done(check, send);
    schedule_check_done(check, &receive);
    *moved = true;
    return DTRAIN_OK;
}

/* Let a rank go on by one action, if it can. */
static inline dtrain_result schedule_check_next(schedule_walk *check, int rank, bool *moved)
{
    const schedule_check_turn turn = schedule_check_turn_of(check, rank);
    if (!turn.action) return DTRAIN_OK;
    const uint32_t act = turn.action->act;
    if (act < DTRAIN_PIPELINE_ACT_FORWARD || act > DTRAIN_PIPELINE_ACT_STEP || !turn.pass)
        return schedule_check_fail(rank, turn.action,
                                   "there is no such action, chunk or micro-batch");
    const char *missing = schedule_missing(check, &turn);
    if (missing) return schedule_check_fail(rank, turn.action, missing);
    if (act == DTRAIN_PIPELINE_ACT_SEND || act == DTRAIN_PIPELINE_ACT_SEND_GRADIENT)
        return schedule_check_message(check, &turn, moved);
    if (act == DTRAIN_PIPELINE_ACT_RECEIVE || act == DTRAIN_PIPELINE_ACT_RECEIVE_GRADIENT)
        return DTRAIN_OK; /* its send moves both */
    SCHEDULE_TRY(schedule_check_room(check, &turn));
    if (act <= DTRAIN_PIPELINE_ACT_WEIGHT) schedule_check_compute(check, &turn);
    schedule_check_done(check, &turn);
    *moved = true;
    return DTRAIN_OK;
}

/* Check that each rank has done what its kind has; the rest is needed by these. */
static inline dtrain_result schedule_check_all_done(const schedule_walk *check)
{
    const dtrain_pipeline_schedule *s = check->schedule;
    const size_t last = (size_t)s->micro_batches - 1;
    for (int r = 0; r < s->ranks; r++)
        for (int c = 0; c < s->chunks; c++) {
            const int stage = c * s->ranks + r;
            const schedule_pass_state *passes = schedule_pass_of(check, stage, 0);
            for (size_t i = 0; i <= last; i++) {
                uint32_t left = 1u << schedule_adds(check);
                if (i == last) left |= 1u << DTRAIN_PIPELINE_ACT_REDUCE;
                if (i == last && c == 0) left |= 1u << DTRAIN_PIPELINE_ACT_STEP;
                left &= ~passes[i].done;
                dtrain_pipeline_action action = {0, c, (int32_t)i, -1, -1, -1};
                while (left && !(left >> action.act & 1)) action.act++;
                if (left) return schedule_check_fail(r, &action, "it is missing");
            }
        }
    return DTRAIN_OK;
}

/* Replay all ranks. */
static inline dtrain_result schedule_check_run(schedule_walk *check)
{
    const int ranks = check->schedule->ranks;
    for (bool moved = true; moved;) {
        moved = false;
        for (int r = 0; r < ranks; r++)
            for (bool more = true; more; moved = moved || more) {
                more = false;
                SCHEDULE_TRY(schedule_check_next(check, r, &more));
            }
    }
    for (int r = 0; r < ranks; r++) {
        const schedule_check_turn turn = schedule_check_turn_of(check, r);
        if (turn.action)
            return schedule_check_fail(r, turn.action,
                                       "the run hangs here: its peer never comes to it");
    }
    return schedule_check_all_done(check);
}

/* Add up what a rank needs, and what all of them take. */
static inline void schedule_report_of(const schedule_walk *check, int rank, schedule_report *report)
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
    for (size_t i = s->first[rank]; i < s->first[rank + 1]; i++) {
        const dtrain_pipeline_action *action = &s->actions[i];
        if (action->slot >= report->slots) report->slots = action->slot + 1;
        if (action->inbox >= report->inboxes) report->inboxes = action->inbox + 1;
    }
}

/* Check that a schedule has what a replay reads, and of sizes that fit. */
static inline dtrain_result schedule_check_shape(const dtrain_pipeline_schedule *s)
{
    const double most = 1 << 22; /* passes, as many as dtrain_pipeline_create makes */
    if (!s || !s->first || !s->actions)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "schedule_check: schedule or a part of it is NULL");
    if (s->ranks > 0 && s->chunks > 0 && (s->ranks > 1 || s->chunks == 1) && s->micro_batches > 0 &&
        (double)s->ranks * s->chunks * s->micro_batches <= most)
        return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                       "schedule_check: %d ranks, %d chunks and %d micro-batches; expected 1 or "
                       "more, 1 chunk on one rank, and at most %.0f passes in all",
                       (int)s->ranks, (int)s->chunks, (int)s->micro_batches, most);
}

/* Do what schedule_check says, and note when each computation ends in ends (actions), if not NULL. */
static inline dtrain_result schedule_replay(const dtrain_pipeline_schedule *schedule,
                                            const dtrain_pipeline_costs *costs, int rank,
                                            schedule_report *report, double *ends)
{
    schedule_walk check;
    SCHEDULE_TRY(schedule_check_shape(schedule));
    const size_t ranks = (size_t)schedule->ranks;
    const size_t passes = ranks * (size_t)schedule->chunks * (size_t)schedule->micro_batches;
    check.schedule = schedule;
    check.costs = costs;
    check.ends = ends;
    check.ranks = (schedule_rank_state *)calloc(ranks, sizeof *check.ranks);
    check.passes = (schedule_pass_state *)calloc(passes, sizeof *check.passes);
    const schedule_pass_state fresh = {0, -1, -1, {-1, -1}, {0, 0, 0, 0}, {-1, -1}};
    for (size_t i = 0; i < passes && check.passes; i++) check.passes[i] = fresh;
    dtrain_result result =
        check.ranks && check.passes
            ? schedule_check_run(&check)
            : dtrain_fail(DTRAIN_ERROR_MEMORY, "schedule_check: no memory for a replay");
    if (result == DTRAIN_OK && report) schedule_report_of(&check, rank, report);
    free(check.ranks);
    free(check.passes);
    return result;
}

/* Replay all ranks of a schedule, each send waiting for its receive, and tell what it costs. costs[ranks * chunks] are
 * those of the stages, NULL = 1 of each and no messages; report may be NULL. DTRAIN_ERROR_USAGE: it would hang, or does
 * not do everything once and in order; the sentence names rank and action. */
static inline dtrain_result schedule_check(const dtrain_pipeline_schedule *schedule,
                                           const dtrain_pipeline_costs *costs, int rank,
                                           schedule_report *report)
{
    return schedule_replay(schedule, costs, rank, report, NULL);
}

/* ---- Writing ----------------------------------------------------------------------------------*/

/* A text that goes into memory as far as there is any, and is counted in full. */
typedef struct schedule_text {
    char *text;
    size_t bytes, used; /* used: without the 0 */
} schedule_text;

SCHEDULE_PRINTF(2, 3)
static inline void schedule_page_add(schedule_text *page, const char *format, ...)
{
    const size_t left = page->used < page->bytes ? page->bytes - page->used : 0;
    va_list args;
    va_start(args, format);
    const int written = vsnprintf(left ? page->text + page->used : NULL, left, format, args);
    va_end(args);
    if (written > 0) page->used += (size_t)written;
}

/* Say how many bytes a text takes; fail if there are fewer. */
static inline dtrain_result schedule_page_end(const schedule_text *page, size_t *needed,
                                              const char *call)
{
    if (needed) *needed = page->used + 1;
    if (!page->text || page->used < page->bytes) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: the text takes %zu bytes, and there are %zu",
                       call, page->used + 1, page->bytes);
}

/* Write a schedule as text, a line for each rank; (bytes) ends with a 0, *needed, or NULL, is how many bytes it takes.
 * text NULL = only count. DTRAIN_ERROR_ARGUMENT: bytes are too few. */
static inline dtrain_result schedule_print(const dtrain_pipeline_schedule *schedule, char *text,
                                           size_t bytes, size_t *needed)
{
    schedule_text page = {text, text ? bytes : 0, 0};
    if (!schedule) return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "schedule_print: schedule is NULL");
    schedule_page_add(&page, "%s ranks %d chunks %d micro-batches %d\n",
                      schedule_kind_name(schedule->kind), (int)schedule->ranks,
                      (int)schedule->chunks, (int)schedule->micro_batches);
    for (int r = 0; r < schedule->ranks; r++) {
        schedule_page_add(&page, "rank %d:", r);
        for (size_t i = schedule->first[r]; i < schedule->first[r + 1]; i++) {
            const dtrain_pipeline_action *action = &schedule->actions[i];
            schedule_page_add(&page, " %s%d.%d", schedule_act_word(action->act), (int)action->chunk,
                              (int)action->micro_batch);
            if (action->slot >= 0) schedule_page_add(&page, ":%d", (int)action->slot);
            if (action->inbox >= 0) schedule_page_add(&page, "/%d", (int)action->inbox);
            if (action->peer >= 0) schedule_page_add(&page, "@%d", (int)action->peer);
        }
        schedule_page_add(&page, "\n");
    }
    return schedule_page_end(&page, needed, "schedule_print");
}

/* ---- Reading ----------------------------------------------------------------------------------*/

/* Step over a word, if it comes next. */
static inline bool schedule_word(const char **at, const char *word)
{
    const size_t length = strlen(word);
    if (strncmp(*at, word, length) != 0) return false;
    *at += length;
    return true;
}

/* Read digits behind a word, up to 2^31 - 1. */
static inline bool schedule_word_number(const char **at, const char *word, int32_t *number)
{
    int64_t value = 0;
    if (!schedule_word(at, word) || **at < '0' || **at > '9') return false;
    for (; **at >= '0' && **at <= '9' && value <= INT32_MAX; (*at)++)
        value = 10 * value + (**at - '0');
    *number = (int32_t)value;
    return value <= INT32_MAX;
}

static inline bool schedule_read_action(const char **at, dtrain_pipeline_action *action)
{
    action->slot = action->inbox = action->peer = -1;
    for (action->act = DTRAIN_PIPELINE_ACT_STEP; action->act > 0; action->act--) {
        const char *rest = *at; /* longer words first, as S is a part of SG */
        if (!schedule_word_number(&rest, schedule_act_word(action->act), &action->chunk)) continue;
        if (!schedule_word_number(&rest, ".", &action->micro_batch)) return false;
        if (*rest == ':' && !schedule_word_number(&rest, ":", &action->slot)) return false;
        if (*rest == '/' && !schedule_word_number(&rest, "/", &action->inbox)) return false;
        if (*rest == '@' && !schedule_word_number(&rest, "@", &action->peer)) return false;
        *at = rest;
        return true;
    }
    return false;
}

static inline bool schedule_read_head(const char **at, dtrain_pipeline_schedule *schedule)
{
    for (schedule->kind = 0; schedule->kind <= DTRAIN_PIPELINE_ZB_H1; schedule->kind++)
        if (schedule_word(at, schedule_kind_name(schedule->kind))) break;
    return schedule->kind <= DTRAIN_PIPELINE_ZB_H1 &&
           schedule_word_number(at, " ranks ", &schedule->ranks) &&
           schedule_word_number(at, " chunks ", &schedule->chunks) &&
           schedule_word_number(at, " micro-batches ", &schedule->micro_batches) &&
           schedule_word(at, "\n");
}

/* Read the lines of all ranks; on an error *at is where it is. */
static inline bool schedule_read_ranks(const char **at, dtrain_pipeline_schedule *schedule)
{
    size_t count = 0;
    for (int32_t r = 0, named; r < schedule->ranks; r++) {
        const char *line = *at;
        if (!schedule_word_number(&line, "rank ", &named) || named != r ||
            !schedule_word(&line, ":"))
            return false;
        for (*at = line; **at == ' '; count++) {
            const char *next = *at + 1;
            if (!schedule_read_action(&next, &schedule->actions[count])) return false;
            *at = next;
        }
        if (!schedule_word(at, "\n")) return false;
        schedule->first[r + 1] = count;
    }
    return **at == 0;
}

/* Count a character in a text. */
static inline size_t schedule_occurrences(const char *text, char what)
{
    size_t count = 0;
    for (; *text; text++) count += *text == what;
    return count;
}

/* Fail where reading has come to. */
static inline dtrain_result schedule_read_fail(const char *text, const char *at)
{
    int line = 1;
    for (const char *c = text; c < at; c++) line += *c == '\n';
    return dtrain_fail(DTRAIN_ERROR_DATA,
                       "schedule_parse: line %d is not understood at \"%.*s\"; expected "
                       "\"KIND ranks P chunks V micro-batches M\", then for each rank \"rank R:\" "
                       "and its actions, as schedule_print writes them",
                       line, (int)strcspn(at, "\n") < 24 ? (int)strcspn(at, "\n") : 24, at);
}

/* Read a text that schedule_print wrote or somebody edited: a schedule for dtrain_pipeline_run, checked, which
 * dtrain_pipeline_destroy frees. DTRAIN_ERROR_DATA: the text is not understood, and the sentence says where;
 * DTRAIN_ERROR_USAGE: it does not pass schedule_check. */
static inline dtrain_result schedule_parse(const char *text, dtrain_pipeline_schedule **out)
{
    const char *const call = "schedule_parse";
    const char *at = text;
    dtrain_pipeline_schedule read;
    if (!text || !out) return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: an argument is NULL", call);
    *out = NULL;
    memset(&read, 0, sizeof read);
    if (!schedule_read_head(&at, &read)) return schedule_read_fail(text, at);
    /* What is allocated is bounded by the text, whatever the head says. */
    const size_t lines = schedule_occurrences(at, '\n'), room = schedule_occurrences(at, ' ');
    if (read.ranks < 1 || (size_t)read.ranks != lines ||
        (double)read.ranks * read.chunks * read.micro_batches > (double)room)
        return dtrain_fail(DTRAIN_ERROR_DATA,
                           "%s: the first line announces %d ranks, %d chunks and %d micro-batches, "
                           "and %zu lines with at most %zu actions follow",
                           call, (int)read.ranks, (int)read.chunks, (int)read.micro_batches, lines,
                           room);
    const dtrain_pipeline_desc desc = {read.kind, (uint32_t)read.chunks, NULL};
    SCHEDULE_TRY(dtrain_pipeline_create(&desc, read.ranks, read.micro_batches, out));
    dtrain_pipeline_schedule *made = *out;
    read.first = (size_t *)calloc(lines + 1, sizeof *read.first);
    read.actions = (dtrain_pipeline_action *)calloc(room + 1, sizeof *read.actions);
    dtrain_result result = DTRAIN_OK;
    if (!read.first || !read.actions)
        result = dtrain_fail(DTRAIN_ERROR_MEMORY, "%s: no memory for %zu actions", call, room);
    else if (!schedule_read_ranks(&at, &read)) result = schedule_read_fail(text, at);
    if (result == DTRAIN_OK) result = schedule_check(&read, NULL, 0, NULL);
    for (int r = 0; r <= read.ranks && result == DTRAIN_OK; r++)
        if (read.first[r] != made->first[r]) /* what passes the check has the same actions */
            result = dtrain_fail(DTRAIN_ERROR_DATA, "%s: rank %d has other actions than its kind",
                                 call, r - 1);
    if (result == DTRAIN_OK)
        memcpy(made->actions, read.actions, made->first[made->ranks] * sizeof *made->actions);
    free(read.first);
    free(read.actions);
    if (result == DTRAIN_OK) return DTRAIN_OK;
    dtrain_pipeline_destroy(made);
    *out = NULL;
    return result;
}

/* ---- Drawing ----------------------------------------------------------------------------------*/

/* Draw a rank up to a time, from where its line has come to: a name for each unit of time. */
static inline void schedule_draw_until(schedule_text *page, size_t *at, double end, size_t columns,
                                       int width, const char *name)
{
    for (; *at < columns && (double)*at < end; ++*at)
        schedule_page_add(page, " %-*s", *at + 1 < columns ? width : 0, name);
}

/* Draw a rank's computations; those of a later chunk have a dot and its number behind the
 * micro-batch. */
static inline void schedule_draw_rank(const dtrain_pipeline_schedule *s, int rank,
                                      const double *ends, size_t columns, schedule_text *page)
{
    const int width = snprintf(NULL, 0, "F%d", (int)s->micro_batches - 1) +
                      (s->chunks > 1 ? 2 + (s->chunks > 10) : 0);
    size_t at = 0;
    schedule_page_add(page, "rank %-3d", rank);
    for (size_t i = s->first[rank]; i < s->first[rank + 1]; i++) {
        const dtrain_pipeline_action *action = &s->actions[i];
        const bool both = action->act == DTRAIN_PIPELINE_ACT_BACKWARD;
        char name[40];
        if (action->act > DTRAIN_PIPELINE_ACT_WEIGHT) continue;
        const int used = snprintf(name, sizeof name, "%s%d", schedule_act_word(action->act),
                                  (int)action->micro_batch);
        if (s->chunks > 1)
            snprintf(name + used, sizeof name - (size_t)used, ".%d", (int)action->chunk);
        const double begin = ends[i] - (both && !schedule_splits(s->kind) ? 2 : 1);
        schedule_draw_until(page, &at, begin, columns, width, ".");
        schedule_draw_until(page, &at, ends[i], columns, width, name);
    }
    schedule_draw_until(page, &at, (double)columns, columns, width, ".");
    schedule_page_add(page, "\n");
}

/* Draw ranks over time as in src/parallel/pipeline.h, for costs of 1: what, micro-batch and, where a rank has several
 * chunks, .chunk. text, bytes and needed are as for schedule_print. */
static inline dtrain_result schedule_draw(const dtrain_pipeline_schedule *schedule, char *text,
                                          size_t bytes, size_t *needed)
{
    schedule_text page = {text, text ? bytes : 0, 0};
    schedule_report report;
    SCHEDULE_TRY(schedule_check(schedule, NULL, 0, &report));
    const size_t count = schedule->first[schedule->ranks];
    double *ends = (double *)calloc(count + 1, sizeof *ends);
    if (!ends) return dtrain_fail(DTRAIN_ERROR_MEMORY, "schedule_draw: no memory for a drawing");
    dtrain_result result = schedule_replay(schedule, NULL, 0, NULL, ends);
    for (int r = 0; r < schedule->ranks && result == DTRAIN_OK; r++)
        schedule_draw_rank(schedule, r, ends, (size_t)report.makespan, &page);
    if (result == DTRAIN_OK) result = schedule_page_end(&page, needed, "schedule_draw");
    free(ends);
    return result;
}

#endif /* TOOLS_SCHEDULE_H */
