/* Making a schedule
 *
 * 1. each rank's computations in their order, from the formula of the kind
 * 2. weaving: replay all ranks in time, and put behind each computation the message that it makes,
 *    at the same moment into the list of the sender and into that of the receiver
 *
 * Step 2 is why no schedule hangs: computations and messages are in one order, of which each rank's
 * list is a part. The first of all that is not done has nothing undone before it on its ranks, so
 * it can be done, even where a send waits for its receive; and the messages between two ranks start
 * in the same order on both. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "parallel/schedule_internal.h"

DTRAIN__PRIVATE bool dtrain__is_message(const dtrain_pipeline_action *action)
{
    return action->act >= DTRAIN_PIPELINE_ACT_SEND &&
           action->act <= DTRAIN_PIPELINE_ACT_RECEIVE_GRADIENT;
}

/* ---- 1. Computations --------------------------------------------------------------------------*/

typedef struct dtrain__weave_rank {
    dtrain_pipeline_action *actions; /* (count) computations and messages */
    size_t count;
    int ordered[4];              /* by act: how many computations are done or next */
    dtrain_pipeline_action next; /* computation; act 0: all are done */
    int clock;                   /* until when the rank is busy */
} dtrain__weave_rank;

/* A slot or inbox of a rank, and what a pass of this number has. */
typedef struct dtrain__holding {
    int32_t by_pass; /* number of the pass's slot; -1: it has none */
    bool taken;      /* the slot, by a pass under way */
} dtrain__holding;

typedef struct dtrain__weave {
    uint32_t kind;
    int p, v, m; /* ranks, chunks, micro-batches */
    bool splits; /* gradients of weights are separate actions */
    dtrain__weave_rank *ranks;
    dtrain__holding *held; /* (2, p, v * m) slots, inboxes */
    int *done;             /* (3, p * v, m) when a computation ended; 0: not yet */
} dtrain__weave;

/* Find the next computation of a rank. It does a number of forwards first, then a forward and a
 * backward in turn. That number is all with GPIPE; with one chunk, one for each stage after this
 * one; with several, a forward and a backward for each of those ranks, and the forwards of a whole
 * group in all chunks but the last. With weights apart (ZB_H1) `rank` micro-batches put theirs off:
 * rank 0 has none to spare, and the last rank computes them where it would wait at the end.
 *
 * Groups of p micro-batches (the first ones with more where p does not divide m) go through all
 * chunks one after the other: forwards from the first chunk on, backwards from the last. */
static void dtrain__order_next(const dtrain__weave *weave, int rank)
{
    const int p = weave->p, v = weave->v, total = weave->m * v;
    const int groups = weave->m < p ? 1 : weave->m / p, more = weave->m % groups;
    dtrain__weave_rank *own = &weave->ranks[rank];
    const int *ordered = own->ordered, backwards = ordered[DTRAIN_PIPELINE_ACT_BACKWARD];
    int first = 0, group = 0, size = weave->m / groups + (more > 0), ahead = p - rank - 1;
    if (weave->kind == DTRAIN_PIPELINE_GPIPE) ahead = weave->m;
    if (weave->kind == DTRAIN_PIPELINE_INTERLEAVED)
        ahead = 2 * ahead + (v - 1) * (size > p ? size : p);
    uint32_t act = DTRAIN_PIPELINE_ACT_WEIGHT;
    if (!weave->splits || ordered[act] >= backwards - rank) {
        if (ordered[DTRAIN_PIPELINE_ACT_FORWARD] < dtrain__min(total, ahead + backwards + 1))
            act = DTRAIN_PIPELINE_ACT_FORWARD;
        else if (backwards < total || !weave->splits) act = DTRAIN_PIPELINE_ACT_BACKWARD;
    }
    int i = own->ordered[act]++;
    own->next.act = i < total ? act : 0;
    if (i >= total) return;
    while (i >= size * v) {
        i -= size * v;
        first += size;
        size = weave->m / groups + (more > ++group);
    }
    own->next.chunk = act == DTRAIN_PIPELINE_ACT_FORWARD ? i / size : v - 1 - i / size;
    own->next.micro_batch = first + i % size;
}

/* ---- 2. Weaving -------------------------------------------------------------------------------*/

static int *dtrain__done(const dtrain__weave *weave, uint32_t act, int stage, int micro)
{
    const size_t stages = (size_t)weave->p * (size_t)weave->v;
    return &weave->done[((act - 1) * stages + (size_t)stage) * (size_t)weave->m + (size_t)micro];
}

/* Return when the next computation of a rank ends, where forward, input and weight gradients take 1
 * each; 0: none is left, or what it needs is not done. */
static int dtrain__next_ends(const dtrain__weave *weave, int rank)
{
    const dtrain_pipeline_action *next = &weave->ranks[rank].next;
    const bool backward = next->act == DTRAIN_PIPELINE_ACT_BACKWARD;
    const int stage = next->chunk * weave->p + rank, i = next->micro_batch;
    int begin = weave->ranks[rank].clock, from = -1; /* stage whose message it needs */
    if (next->act == 0) return 0;
    if (next->act > DTRAIN_PIPELINE_ACT_FORWARD && !*dtrain__done(weave, next->act - 1, stage, i))
        return 0;
    if (next->act == DTRAIN_PIPELINE_ACT_FORWARD) from = stage - 1;
    if (backward && stage + 1 < weave->p * weave->v) from = stage + 1;
    if (from >= 0) {
        const int came = *dtrain__done(weave, next->act, from, i);
        if (!came) return 0;
        if (came > begin) begin = came;
    }
    return begin + (backward && !weave->splits ? 2 : 1);
}

/* Return the slots, or (inbox) the inboxes, of a rank. */
static dtrain__holding *dtrain__holdings(const dtrain__weave *weave, bool inbox, int rank)
{
    const size_t passes = (size_t)weave->v * (size_t)weave->m;
    return &weave->held[((size_t)inbox * (size_t)weave->p + (size_t)rank) * passes];
}

/* Let a pass have the lowest free slot or inbox of its rank. */
static void dtrain__take_slot(const dtrain__weave *weave, bool inbox, int rank, int pass)
{
    dtrain__holding *held = dtrain__holdings(weave, inbox, rank);
    int32_t slot = 0;
    while (held[slot].taken) slot++;
    held[slot].taken = true;
    held[pass].by_pass = slot;
}

/* Append an action, with the slot and inbox that its pass has, to the list of its rank. */
static void dtrain__weave_put(const dtrain__weave *weave, int rank, uint32_t act, int chunk,
                              int micro, int peer)
{
    const int pass = chunk * weave->m + micro;
    const dtrain_pipeline_action action = {act,
                                           chunk,
                                           micro,
                                           peer,
                                           dtrain__holdings(weave, false, rank)[pass].by_pass,
                                           dtrain__holdings(weave, true, rank)[pass].by_pass};
    dtrain__weave_rank *own = &weave->ranks[rank];
    own->actions[own->count++] = action;
}

/* Append the next computation of a rank, and the message that it makes to the lists of both ranks;
 * the last use of a pass gives its slot and inbox back. */
static void dtrain__weave_next(const dtrain__weave *weave, int rank, int end)
{
    const uint32_t act = weave->ranks[rank].next.act;
    const int chunk = weave->ranks[rank].next.chunk, micro = weave->ranks[rank].next.micro_batch;
    const int pass = chunk * weave->m + micro, stage = chunk * weave->p + rank;
    const bool forward = act == DTRAIN_PIPELINE_ACT_FORWARD;
    const bool weight = act == DTRAIN_PIPELINE_ACT_WEIGHT;
    const int to = forward ? stage + 1 : stage - 1, peer = to % weave->p, there = to / weave->p;
    if (forward) dtrain__take_slot(weave, false, rank, pass);
    *dtrain__done(weave, act, stage, micro) = weave->ranks[rank].clock = end;
    dtrain__weave_put(weave, rank, act, chunk, micro, -1);
    if (!weight && to >= 0 && to < weave->p * weave->v) {
        const uint32_t sends =
            forward ? DTRAIN_PIPELINE_ACT_SEND : DTRAIN_PIPELINE_ACT_SEND_GRADIENT;
        if (forward) dtrain__take_slot(weave, true, peer, there * weave->m + micro);
        dtrain__weave_put(weave, rank, sends, chunk, micro, peer);
        dtrain__weave_put(weave, peer, sends + 1, there, micro, rank);
    }
    dtrain__order_next(weave, rank);
    if (forward || weight != weave->splits) return;
    for (int inbox = 0; inbox < 2; inbox++) {
        dtrain__holding *held = dtrain__holdings(weave, inbox, rank);
        if (held[pass].by_pass >= 0) held[held[pass].by_pass].taken = false;
        held[pass].by_pass = -1;
    }
    if (micro == weave->m - 1)
        dtrain__weave_put(weave, rank, DTRAIN_PIPELINE_ACT_REDUCE, chunk, micro, -1);
}

/* Do both steps; false: an order of step 1 waits for itself. */
static bool dtrain__weave_run(const dtrain__weave *weave)
{
    for (int r = 0; r < weave->p; r++) dtrain__order_next(weave, r);
    for (;;) {
        int first = -1, end = 0; /* the rank whose next computation ends first */
        for (int r = 0; r < weave->p; r++) {
            const int ends = dtrain__next_ends(weave, r);
            if (ends && (first < 0 || ends < end)) first = r, end = ends;
        }
        if (first < 0) break;
        dtrain__weave_next(weave, first, end);
    }
    for (int r = 0; r < weave->p; r++) {
        if (weave->ranks[r].next.act) return false;
        dtrain__weave_put(weave, r, DTRAIN_PIPELINE_ACT_STEP, 0, weave->m - 1, -1);
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
    dtrain__weave weave;
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
    memset(&weave, 0, sizeof weave);
    weave.kind = desc ? desc->kind : 0;
    weave.p = ranks, weave.v = chunks, weave.m = micro_batches;
    weave.splits = weave.kind == DTRAIN_PIPELINE_ZB_H1;

    /* of a rank: computations, two messages to and from each neighbour, REDUCE, STEP */
    const size_t p = (size_t)ranks, v = (size_t)chunks, m = (size_t)micro_batches;
    const size_t passes = p * v * m,
                 room = (2 + weave.splits) * passes + 4 * (passes - m) + p * (v + 1);
    const size_t bytes =
        p * sizeof *weave.ranks + 2 * passes * sizeof *weave.held + 3 * passes * sizeof *weave.done;
    dtrain_pipeline_schedule *s =
        (dtrain_pipeline_schedule *)dtrain__alloc(&allocator, 1, sizeof *s, what);
    weave.ranks = (dtrain__weave_rank *)dtrain__alloc(&allocator, bytes, 1, what);
    if (s) {
        s->kind = weave.kind;
        s->ranks = ranks, s->chunks = chunks, s->micro_batches = micro_batches;
        s->room = room;
        s->first = (size_t *)dtrain__alloc(&allocator, p + 1, sizeof *s->first, what);
        s->actions =
            (dtrain_pipeline_action *)dtrain__alloc(&allocator, room, sizeof *s->actions, what);
        s->memory = (dtrain__run_memory *)dtrain__alloc(&allocator, p, sizeof *s->memory, what);
    }
    if (weave.ranks && s && s->first && s->actions && s->memory) {
        weave.held = (dtrain__holding *)(weave.ranks + p);
        weave.done = (int *)(weave.held + 2 * passes);
        for (size_t i = 0; i < 2 * passes; i++) weave.held[i].by_pass = -1;
        for (size_t r = 0; r < p; r++) {
            const size_t neighbours = 2 * v - (r == 0) - (r == p - 1);
            weave.ranks[r].actions = s->actions + s->first[r];
            s->first[r + 1] = s->first[r] + m * (v * (2 + weave.splits) + 2 * neighbours) + v + 1;
        }
        result = dtrain__weave_run(&weave)
                     ? DTRAIN_OK
                     : dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                                   "%s: INTERLEAVED on %d ranks cannot order %d micro-batches; use "
                                   "a multiple of %d",
                                   call, ranks, micro_batches, ranks);
    }
    dtrain__free(&allocator, weave.ranks, bytes, 1);
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
