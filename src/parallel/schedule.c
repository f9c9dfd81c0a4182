/* Making a schedule
 *
 * 1. each rank's computations in their order, from the formula of the kind
 * 2. simulation: run all ranks in time. After each computation append the message that it makes to
 *    the list of the sender and, at the same moment, to the list of the receiver
 *
 * Why no schedule hangs: step 2 puts all computations and messages into one order, and each rank's
 * list is a part of it. The first action that is not done has no action before it to wait for. So
 * it can be done, even if a send waits for its receive. Both ranks of messages start them in the
 * same order. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "parallel/schedule_internal.h"

DTRAIN__PRIVATE bool dtrain__is_message(const dtrain_pipeline_action *action)
{
    return action->act >= DTRAIN_PIPELINE_ACT_SEND &&
           action->act <= DTRAIN_PIPELINE_ACT_RECEIVE_GRADIENT;
}

/* ---- 1. Computations --------------------------------------------------------------------------*/

typedef struct dtrain__sim_rank {
    dtrain_pipeline_action *actions; /* (count) computations and messages */
    size_t count;
    int ordered[4];              /* by act: computations that are done or next */
    dtrain_pipeline_action next; /* next computation; act 0: all are done */
    int clock;                   /* time at which the rank becomes idle */
} dtrain__sim_rank;

/* Entry n: the slot (or inbox) of pass n, and the state of slot (or inbox) n. */
typedef struct dtrain__holding {
    int32_t by_pass; /* slot of pass n; -1: none */
    bool taken;      /* slot n belongs to a pass under way */
} dtrain__holding;

typedef struct dtrain__sim {
    uint32_t kind;
    int p, v, m; /* ranks, chunks, micro-batches */
    bool splits; /* gradients of weights are separate actions */
    dtrain__sim_rank *ranks;
    dtrain__holding *held; /* (2, p, v * m) slots, inboxes */
    int *done;             /* (3, p * v, m) time at which a computation ended; 0: not done */
} dtrain__sim;

/* Find the next computation of a rank. `ahead` forwards come first, then a forward and a backward
 * in turn. `ahead` is m with GPIPE; p - 1 - rank with 1F1B; 2 (p - 1 - rank) + (v - 1) max(p, size
 * of a group) with INTERLEAVED. With ZB_H1, rank r keeps the weight gradients of r micro-batches
 * back: rank 0 has no idle time to fill, and the last rank computes them at the end, where it would
 * be idle.
 *
 * Micro-batches form groups of p; the first groups have more if p does not divide m. One group
 * after another goes through all chunks: forwards from the first on, backwards from the last. */
static void dtrain__order_next(const dtrain__sim *sim, int rank)
{
    const int p = sim->p, v = sim->v, total = sim->m * v;
    const int groups = sim->m < p ? 1 : sim->m / p, more = sim->m % groups;
    dtrain__sim_rank *own = &sim->ranks[rank];
    const int *ordered = own->ordered, backwards = ordered[DTRAIN_PIPELINE_ACT_BACKWARD];
    int first = 0, group = 0, size = sim->m / groups + (more > 0), ahead = p - rank - 1;
    if (sim->kind == DTRAIN_PIPELINE_GPIPE) ahead = sim->m;
    if (sim->kind == DTRAIN_PIPELINE_INTERLEAVED)
        ahead = 2 * ahead + (v - 1) * (size > p ? size : p);
    uint32_t act = DTRAIN_PIPELINE_ACT_WEIGHT;
    if (!sim->splits || ordered[act] >= backwards - rank) {
        if (ordered[DTRAIN_PIPELINE_ACT_FORWARD] < dtrain__min(total, ahead + backwards + 1))
            act = DTRAIN_PIPELINE_ACT_FORWARD;
        else if (backwards < total || !sim->splits) act = DTRAIN_PIPELINE_ACT_BACKWARD;
    }
    int i = own->ordered[act]++;
    own->next.act = i < total ? act : 0;
    if (i >= total) return;
    while (i >= size * v) {
        i -= size * v;
        first += size;
        size = sim->m / groups + (more > ++group);
    }
    own->next.chunk = act == DTRAIN_PIPELINE_ACT_FORWARD ? i / size : v - 1 - i / size;
    own->next.micro_batch = first + i % size;
}

/* ---- 2. Simulation ----------------------------------------------------------------------------*/

static int *dtrain__done(const dtrain__sim *sim, uint32_t act, int stage, int micro)
{
    const size_t stages = (size_t)sim->p * (size_t)sim->v;
    return &sim->done[((act - 1) * stages + (size_t)stage) * (size_t)sim->m + (size_t)micro];
}

/* Return the time at which a rank's next computation ends; a forward, an input gradient and a
 * weight gradient take 1 each. 0: no computation is left, or its inputs are not done. */
static int dtrain__next_ends(const dtrain__sim *sim, int rank)
{
    const dtrain_pipeline_action *next = &sim->ranks[rank].next;
    const bool backward = next->act == DTRAIN_PIPELINE_ACT_BACKWARD;
    const int stage = next->chunk * sim->p + rank, i = next->micro_batch;
    int begin = sim->ranks[rank].clock, from = -1; /* stage whose message is needed */
    if (next->act == 0) return 0;
    if (next->act > DTRAIN_PIPELINE_ACT_FORWARD && !*dtrain__done(sim, next->act - 1, stage, i))
        return 0;
    if (next->act == DTRAIN_PIPELINE_ACT_FORWARD) from = stage - 1;
    if (backward && stage + 1 < sim->p * sim->v) from = stage + 1;
    if (from >= 0) {
        const int came = *dtrain__done(sim, next->act, from, i);
        if (!came) return 0;
        if (came > begin) begin = came;
    }
    return begin + (backward && !sim->splits ? 2 : 1);
}

/* Return the slots or the inboxes of a rank. */
static dtrain__holding *dtrain__holdings(const dtrain__sim *sim, bool inbox, int rank)
{
    const size_t passes = (size_t)sim->v * (size_t)sim->m;
    return &sim->held[((size_t)inbox * (size_t)sim->p + (size_t)rank) * passes];
}

/* Give a pass the lowest free slot or inbox of its rank. */
static void dtrain__take_slot(const dtrain__sim *sim, bool inbox, int rank, int pass)
{
    dtrain__holding *held = dtrain__holdings(sim, inbox, rank);
    int32_t slot = 0;
    while (held[slot].taken) slot++;
    held[slot].taken = true;
    held[pass].by_pass = slot;
}

/* Append an action, with the slot and inbox of its pass, to the list of a rank. */
static void dtrain__sim_append(const dtrain__sim *sim, int rank, uint32_t act, int chunk, int micro,
                               int peer)
{
    const int pass = chunk * sim->m + micro;
    const int32_t slot = dtrain__holdings(sim, false, rank)[pass].by_pass;
    const int32_t inbox = dtrain__holdings(sim, true, rank)[pass].by_pass;
    const dtrain_pipeline_action action = {act, chunk, micro, peer, slot, inbox};
    dtrain__sim_rank *own = &sim->ranks[rank];
    own->actions[own->count++] = action;
}

/* Append a rank's next computation to its list, and the message that it makes to the lists of both
 * ranks. The last action of a pass frees its slot and inbox. */
static void dtrain__sim_computation(const dtrain__sim *sim, int rank, int end)
{
    const uint32_t act = sim->ranks[rank].next.act;
    const int chunk = sim->ranks[rank].next.chunk, micro = sim->ranks[rank].next.micro_batch;
    const int pass = chunk * sim->m + micro, stage = chunk * sim->p + rank;
    const bool forward = act == DTRAIN_PIPELINE_ACT_FORWARD;
    const bool weight = act == DTRAIN_PIPELINE_ACT_WEIGHT;
    const int to = forward ? stage + 1 : stage - 1, peer = to % sim->p, there = to / sim->p;
    if (forward) dtrain__take_slot(sim, false, rank, pass);
    *dtrain__done(sim, act, stage, micro) = sim->ranks[rank].clock = end;
    dtrain__sim_append(sim, rank, act, chunk, micro, -1);
    if (!weight && to >= 0 && to < sim->p * sim->v) {
        const uint32_t sends =
            forward ? DTRAIN_PIPELINE_ACT_SEND : DTRAIN_PIPELINE_ACT_SEND_GRADIENT;
        if (forward) dtrain__take_slot(sim, true, peer, there * sim->m + micro);
        dtrain__sim_append(sim, rank, sends, chunk, micro, peer);
        dtrain__sim_append(sim, peer, sends + 1, there, micro, rank);
    }
    dtrain__order_next(sim, rank);
    if (forward || weight != sim->splits) return;
    for (int inbox = 0; inbox < 2; inbox++) {
        dtrain__holding *held = dtrain__holdings(sim, inbox, rank);
        if (held[pass].by_pass >= 0) held[held[pass].by_pass].taken = false;
        held[pass].by_pass = -1;
    }
    if (micro == sim->m - 1)
        dtrain__sim_append(sim, rank, DTRAIN_PIPELINE_ACT_REDUCE, chunk, micro, -1);
}

/* Do steps 1 and 2; false if the order of step 1 waits for itself. */
static bool dtrain__sim_run(const dtrain__sim *sim)
{
    for (int r = 0; r < sim->p; r++) dtrain__order_next(sim, r);
    for (;;) {
        int first = -1, end = 0; /* rank whose next computation ends first */
        for (int r = 0; r < sim->p; r++) {
            const int ends = dtrain__next_ends(sim, r);
            if (ends && (first < 0 || ends < end)) first = r, end = ends;
        }
        if (first < 0) break;
        dtrain__sim_computation(sim, first, end);
    }
    for (int r = 0; r < sim->p; r++) {
        if (sim->ranks[r].next.act) return false;
        dtrain__sim_append(sim, r, DTRAIN_PIPELINE_ACT_STEP, 0, sim->m - 1, -1);
    }
    return true;
}

/* ---- Creation ---------------------------------------------------------------------------------*/

DTRAIN_API dtrain_result dtrain_pipeline_create(const dtrain_pipeline_desc *desc, int ranks,
                                                int micro_batches, dtrain_pipeline_schedule **out)
{
    const char *const call = "dtrain_pipeline_create", *const what = "a schedule";
    const dtrain_allocator allocator = dtrain__resolve_allocator(NULL);
    const int limit = DTRAIN__PASSES_MOST;
    dtrain_result result = DTRAIN_ERROR_MEMORY;
    dtrain__sim sim;
    int chunks;
    DTRAIN__GIVEN(call, out);
    *out = NULL;
    DTRAIN__TRY(dtrain__pipeline_chunks(desc, ranks, &chunks));
    if (ranks < 1 || micro_batches < 1 || ranks > limit || micro_batches > limit ||
        (int64_t)ranks * micro_batches > limit / chunks)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "%s: %d ranks, %d chunks and %d micro-batches; expected 1 or more, and "
                           "at most %d passes in all",
                           call, ranks, chunks, micro_batches, limit);
    memset(&sim, 0, sizeof sim);
    sim.kind = desc ? desc->kind : 0;
    sim.p = ranks, sim.v = chunks, sim.m = micro_batches;
    sim.splits = sim.kind == DTRAIN_PIPELINE_ZB_H1;

    /* per rank: computations, two messages to and from each neighbour, REDUCE, STEP */
    const size_t p = (size_t)ranks, v = (size_t)chunks, m = (size_t)micro_batches;
    const size_t passes = p * v * m,
                 room = (2 + sim.splits) * passes + 4 * (passes - m) + p * (v + 1);
    const size_t bytes =
        p * sizeof *sim.ranks + 2 * passes * sizeof *sim.held + 3 * passes * sizeof *sim.done;
    dtrain_pipeline_schedule *s =
        (dtrain_pipeline_schedule *)dtrain__alloc(&allocator, 1, sizeof *s, what);
    sim.ranks = (dtrain__sim_rank *)dtrain__alloc(&allocator, bytes, 1, what);
    if (s) {
        s->kind = sim.kind;
        s->ranks = ranks, s->chunks = chunks, s->micro_batches = micro_batches;
        s->room = room;
        s->first = (size_t *)dtrain__alloc(&allocator, p + 1, sizeof *s->first, what);
        s->actions =
            (dtrain_pipeline_action *)dtrain__alloc(&allocator, room, sizeof *s->actions, what);
        s->memory = (dtrain__run_memory *)dtrain__alloc(&allocator, p, sizeof *s->memory, what);
    }
    if (sim.ranks && s && s->first && s->actions && s->memory) {
        sim.held = (dtrain__holding *)(sim.ranks + p);
        sim.done = (int *)(sim.held + 2 * passes);
        for (size_t i = 0; i < 2 * passes; i++) sim.held[i].by_pass = -1;
        for (size_t r = 0; r < p; r++) {
            const size_t neighbours = 2 * v - (r == 0) - (r == p - 1);
            sim.ranks[r].actions = s->actions + s->first[r];
            s->first[r + 1] = s->first[r] + m * (v * (2 + sim.splits) + 2 * neighbours) + v + 1;
        }
        result = dtrain__sim_run(&sim)
                     ? DTRAIN_OK
                     : dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                                   "%s: INTERLEAVED on %d ranks cannot order %d micro-batches; use "
                                   "a multiple of %d",
                                   call, ranks, micro_batches, ranks);
    }
    dtrain__free(&allocator, sim.ranks, bytes, 1);
    if (result == DTRAIN_OK) *out = s;
    else dtrain_pipeline_destroy(s);
    return result;
}

DTRAIN__PRIVATE void dtrain__pipeline_room(const dtrain_pipeline_schedule *schedule, int rank,
                                           int *slots, int *inboxes)
{
    *slots = *inboxes = 0;
    for (size_t i = schedule->first[rank]; i < schedule->first[rank + 1]; i++) {
        const dtrain_pipeline_action *action = &schedule->actions[i];
        if (action->slot >= *slots) *slots = action->slot + 1;
        if (action->inbox >= *inboxes) *inboxes = action->inbox + 1;
    }
}

DTRAIN_API void dtrain_pipeline_destroy(dtrain_pipeline_schedule *schedule)
{
    const dtrain_allocator allocator = dtrain__resolve_allocator(NULL);
    if (!schedule) return;
    for (int r = 0; r < schedule->ranks && schedule->memory; r++)
        dtrain__free(&allocator, schedule->memory[r].messages, schedule->memory[r].bytes, 1);
    dtrain__free(&allocator, schedule->memory, (size_t)schedule->ranks, sizeof *schedule->memory);
    dtrain__free(&allocator, schedule->actions, schedule->room, sizeof *schedule->actions);
    dtrain__free(&allocator, schedule->first, (size_t)schedule->ranks + 1, sizeof *schedule->first);
    dtrain__free(&allocator, schedule, 1, sizeof *schedule);
}
