/* Making a schedule
 *
 * 1. each rank's computations in their order, from the formula of the kind; for ZBV by giving each
 *    rank, whenever it is free, the most urgent of those that are ready
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

/* ---- Stages, ranks and actions ----------------------------------------------------------------*/

DTRAIN__PRIVATE int dtrain__action_stage(const dtrain_pipeline_schedule *s, int rank,
                                         const dtrain_pipeline_action *action)
{
    return dtrain_pipeline_stage(s->kind, s->ranks, s->chunks, rank, action->chunk);
}

DTRAIN__PRIVATE bool dtrain__is_message(const dtrain_pipeline_action *action)
{
    return action->act >= DTRAIN_PIPELINE_ACT_SEND &&
           action->act <= DTRAIN_PIPELINE_ACT_RECEIVE_GRADIENT;
}

/* ---- Making one -------------------------------------------------------------------------------*/

/* Actions in their order. */
typedef struct dtrain__order {
    dtrain_pipeline_action *actions;
    size_t count;
} dtrain__order;

typedef struct dtrain__weave_rank {
    dtrain__order order; /* 1. computations */
    dtrain__order woven; /* 2. with messages */
    size_t at;           /* the next of the computations */
    double clock;        /* until when the rank is busy */
    int next[4][2];      /* for ZBV, by act and chunk: the next micro-batch; they ascend */
} dtrain__weave_rank;

typedef struct dtrain__weave {
    uint32_t kind;
    int p, v, m; /* ranks, chunks, micro-batches */
    bool splits;
    dtrain__weave_rank *ranks;
    double *done;   /* (3, p * v, m) when a computation ended; below 0: not yet */
    int32_t *slots; /* (2, p, v * m) slot and inbox of a pass; -1: it has none */
    bool *taken;    /* (2, p, v * m) by a pass under way */
} dtrain__weave;

static void dtrain__put(dtrain__order *order, uint32_t act, int chunk, int micro)
{
    const dtrain_pipeline_action action = {act, chunk, micro, -1, -1, -1};
    order->actions[order->count++] = action;
}

/* ---- A replay in time, which both steps share -------------------------------------------------*/

static double *dtrain__done(const dtrain__weave *weave, uint32_t act, int stage, int micro)
{
    const size_t stages = (size_t)weave->p * (size_t)weave->v;
    return &weave->done[((act - 1) * stages + (size_t)stage) * (size_t)weave->m + (size_t)micro];
}

/* Return how long a computation takes: forward, input and weight gradients take alike. */
static double dtrain__takes(const dtrain__weave *weave, uint32_t act)
{
    return act == DTRAIN_PIPELINE_ACT_BACKWARD && !weave->splits ? 2 : 1;
}

/* Find when a rank can begin a computation; false: what it needs is not done. */
static bool dtrain__begin_at(const dtrain__weave *weave, int rank,
                             const dtrain_pipeline_action *action, double *at)
{
    const int stage = dtrain_pipeline_stage(weave->kind, weave->p, weave->v, rank, action->chunk);
    const bool forward = action->act == DTRAIN_PIPELINE_ACT_FORWARD;
    const int last = weave->p * weave->v - 1, i = action->micro_batch;
    double needs = 0, of_rank = 0;
    if (forward && stage) needs = *dtrain__done(weave, DTRAIN_PIPELINE_ACT_FORWARD, stage - 1, i);
    if (!forward) of_rank = *dtrain__done(weave, action->act - 1, stage, i);
    if (action->act == DTRAIN_PIPELINE_ACT_BACKWARD && stage < last)
        needs = *dtrain__done(weave, DTRAIN_PIPELINE_ACT_BACKWARD, stage + 1, i);
    if (needs < 0 || of_rank < 0) return false;
    *at = fmax(weave->ranks[rank].clock, fmax(needs, of_rank));
    return true;
}

/* Let a rank do a computation. */
static void dtrain__replay_do(dtrain__weave *weave, int rank, const dtrain_pipeline_action *action,
                              double at)
{
    const int stage = dtrain_pipeline_stage(weave->kind, weave->p, weave->v, rank, action->chunk);
    const double end = at + dtrain__takes(weave, action->act);
    *dtrain__done(weave, action->act, stage, action->micro_batch) = weave->ranks[rank].clock = end;
}

static void dtrain__replay_reset(dtrain__weave *weave)
{
    const size_t count = 3 * (size_t)weave->p * (size_t)weave->v * (size_t)weave->m;
    for (size_t i = 0; i < count; i++) weave->done[i] = -1;
    for (int r = 0; r < weave->p; r++) weave->ranks[r].clock = 0;
}

/* ---- 1. Computations --------------------------------------------------------------------------*/

/* Return how many groups of micro-batches go through all chunks, one group after the other: of p,
 * the first ones with more where p does not divide m. */
static int dtrain__groups_in(const dtrain__weave *weave)
{
    return weave->m < weave->p ? 1 : weave->m / weave->p;
}

/* Append number i of a rank's passes: those of a group of micro-batches in one chunk, then in the
 * next one, forwards from the first on, backwards from the last. */
static void dtrain__put_pass(const dtrain__weave *weave, int rank, uint32_t act, int i)
{
    const int v = weave->v, groups = dtrain__groups_in(weave), more = weave->m % groups;
    int first = 0, group = 0, size = weave->m / groups + (more > 0);
    while (i >= size * v) {
        i -= size * v;
        first += size;
        size = weave->m / groups + (more > ++group);
    }
    const int chunk = act == DTRAIN_PIPELINE_ACT_FORWARD ? i / size : v - 1 - i / size;
    dtrain__put(&weave->ranks[rank].order, act, chunk, first + i % size);
}

/* Order the computations of a rank: first a number of forwards, then a forward and a backward in
 * turn. That number is all with GPIPE; with one chunk, one for each stage after this one; with
 * several, a forward and a backward for each of those ranks, and the forwards of a whole group in
 * all chunks but the last. With weights apart (ZB_H1) `rank` micro-batches put theirs off: rank 0
 * has none to spare, and the last rank computes them where it would wait at the end. */
static void dtrain__order_rank(const dtrain__weave *weave, int rank)
{
    const int p = weave->p, groups = dtrain__groups_in(weave), total = weave->m * weave->v;
    const int size = weave->m / groups + (weave->m % groups > 0);
    int forward = 0, weight = 0, ahead = p - rank - 1;
    if (weave->kind == DTRAIN_PIPELINE_GPIPE) ahead = weave->m;
    if (weave->kind == DTRAIN_PIPELINE_INTERLEAVED)
        ahead = 2 * ahead + (weave->v - 1) * (size > p ? size : p);
    for (; forward < ahead && forward < total; forward++)
        dtrain__put_pass(weave, rank, DTRAIN_PIPELINE_ACT_FORWARD, forward);
    for (int i = 0; i < total; i++) {
        if (forward < total) dtrain__put_pass(weave, rank, DTRAIN_PIPELINE_ACT_FORWARD, forward++);
        dtrain__put_pass(weave, rank, DTRAIN_PIPELINE_ACT_BACKWARD, i);
        if (weave->splits && i >= rank)
            dtrain__put_pass(weave, rank, DTRAIN_PIPELINE_ACT_WEIGHT, weight++);
    }
    while (weave->splits && weight < total)
        dtrain__put_pass(weave, rank, DTRAIN_PIPELINE_ACT_WEIGHT, weight++);
}

/* Pick what a free rank does next with ZBV: a backward, of the last stages first, since all others
 * wait for those; a forward, towards them; else a weight. No more than p micro-batches are on a
 * rank at once, which is the memory of 1F1B's first rank. */
static bool dtrain__vee_pick(const dtrain__weave *weave, int rank, dtrain_pipeline_action *best,
                             double *at)
{
    static const uint32_t acts[] = {DTRAIN_PIPELINE_ACT_BACKWARD, DTRAIN_PIPELINE_ACT_FORWARD,
                                    DTRAIN_PIPELINE_ACT_WEIGHT};
    const dtrain__weave_rank *own = &weave->ranks[rank];
    const bool full =
        own->next[DTRAIN_PIPELINE_ACT_FORWARD][0] - own->next[DTRAIN_PIPELINE_ACT_WEIGHT][0] >=
        weave->p;
    bool found = false;
    for (int i = 0; i < 6; i++) {
        const uint32_t act = acts[i / 2];
        const int chunk = 1 - i % 2;
        const dtrain_pipeline_action choice = {act, chunk, own->next[act][chunk], -1, -1, -1};
        double begin;
        if (choice.micro_batch == weave->m) continue;
        if (full && act == DTRAIN_PIPELINE_ACT_FORWARD && chunk == 0) continue;
        if (!dtrain__begin_at(weave, rank, &choice, &begin)) continue;
        if (found && begin >= *at) continue;
        *best = choice;
        *at = begin;
        found = true;
    }
    return found;
}

/* Give the rank that can begin first its next computation, until all is done. */
static void dtrain__order_zbv(dtrain__weave *weave)
{
    for (;;) {
        dtrain_pipeline_action next, best = {0, 0, 0, -1, -1, -1};
        int rank = -1;
        double at = 0, begin;
        for (int r = 0; r < weave->p; r++) {
            if (!dtrain__vee_pick(weave, r, &next, &begin)) continue;
            if (rank >= 0 && begin >= at) continue;
            rank = r, at = begin, best = next;
        }
        if (rank < 0) return;
        dtrain__replay_do(weave, rank, &best, at);
        dtrain__put(&weave->ranks[rank].order, best.act, best.chunk, best.micro_batch);
        weave->ranks[rank].next[best.act][best.chunk]++;
    }
}

/* ---- 2. Weaving -------------------------------------------------------------------------------*/

/* Return where a pass notes its slot, or (inbox) its inbox. */
static int32_t *dtrain__held_by(const dtrain__weave *weave, bool inbox, int rank, int chunk,
                                int micro)
{
    const size_t passes = (size_t)weave->v * (size_t)weave->m;
    const size_t pass = (size_t)chunk * (size_t)weave->m + (size_t)micro;
    return &weave->slots[((size_t)inbox * (size_t)weave->p + (size_t)rank) * passes + pass];
}

static bool *dtrain__taken(const dtrain__weave *weave, bool inbox, int rank, int32_t slot)
{
    return weave->taken + (dtrain__held_by(weave, inbox, rank, 0, 0) - weave->slots) + slot;
}

/* Let a pass have the lowest free slot or inbox of its rank. */
static void dtrain__take_slot(const dtrain__weave *weave, bool inbox, int rank, int chunk,
                              int micro)
{
    int32_t slot = 0;
    while (*dtrain__taken(weave, inbox, rank, slot)) slot++;
    *dtrain__taken(weave, inbox, rank, slot) = true;
    *dtrain__held_by(weave, inbox, rank, chunk, micro) = slot;
}

/* Append an action, with the slot and inbox of its pass, to the list of its rank. */
static void dtrain__weave_put(const dtrain__weave *weave, int rank, uint32_t act, int chunk,
                              int micro, int peer)
{
    const dtrain_pipeline_action action = {act,
                                           chunk,
                                           micro,
                                           peer,
                                           *dtrain__held_by(weave, false, rank, chunk, micro),
                                           *dtrain__held_by(weave, true, rank, chunk, micro)};
    dtrain__order *woven = &weave->ranks[rank].woven;
    woven->actions[woven->count++] = action;
}

/* Append a computation, and the message that it makes to the lists of both ranks; the last use of a
 * pass gives its slot and inbox back. */
static void dtrain__weave_compute(dtrain__weave *weave, int rank,
                                  const dtrain_pipeline_action *action, double at)
{
    const int chunk = action->chunk, micro = action->micro_batch;
    const int stage = dtrain_pipeline_stage(weave->kind, weave->p, weave->v, rank, chunk);
    const bool forward = action->act == DTRAIN_PIPELINE_ACT_FORWARD;
    const bool weight = action->act == DTRAIN_PIPELINE_ACT_WEIGHT;
    const int to = forward ? stage + 1 : stage - 1;
    if (forward) dtrain__take_slot(weave, false, rank, chunk, micro);
    dtrain__replay_do(weave, rank, action, at);
    dtrain__weave_put(weave, rank, action->act, chunk, micro, -1);
    if (!weight && to >= 0 && to < weave->p * weave->v) {
        const dtrain__place_of_stage place = dtrain__pipeline_place(weave->kind, weave->p, to);
        const uint32_t act = forward ? DTRAIN_PIPELINE_ACT_SEND : DTRAIN_PIPELINE_ACT_SEND_GRADIENT;
        if (place.rank != rank) {
            if (forward) dtrain__take_slot(weave, true, place.rank, place.chunk, micro);
            dtrain__weave_put(weave, rank, act, chunk, micro, place.rank);
            dtrain__weave_put(weave, place.rank, act + 1, place.chunk, micro, rank);
        }
    }
    if (forward || weight != weave->splits) return;
    for (int inbox = 0; inbox < 2; inbox++) {
        const int32_t held = *dtrain__held_by(weave, inbox, rank, chunk, micro);
        if (held >= 0) *dtrain__taken(weave, inbox, rank, held) = false;
    }
    if (micro == weave->m - 1)
        dtrain__put(&weave->ranks[rank].woven, DTRAIN_PIPELINE_ACT_REDUCE, chunk, micro);
}

/* Do both steps; false: an order of step 1 waits for itself. */
static bool dtrain__weave_run(dtrain__weave *weave)
{
    dtrain__replay_reset(weave);
    if (weave->kind == DTRAIN_PIPELINE_ZBV) dtrain__order_zbv(weave);
    else
        for (int r = 0; r < weave->p; r++) dtrain__order_rank(weave, r);
    dtrain__replay_reset(weave);
    for (;;) {
        dtrain__weave_rank *first = NULL; /* whose next computation ends first, of all that can
                                             begin */
        double at = 0, end = 0, begin;
        for (int r = 0; r < weave->p; r++) {
            dtrain__weave_rank *rank = &weave->ranks[r];
            if (rank->at == rank->order.count) continue;
            const dtrain_pipeline_action *action = &rank->order.actions[rank->at];
            if (!dtrain__begin_at(weave, r, action, &begin)) continue;
            const double ends = begin + dtrain__takes(weave, action->act);
            if (!first || ends < end) first = rank, at = begin, end = ends;
        }
        if (!first) break;
        dtrain__weave_compute(weave, (int)(first - weave->ranks),
                              &first->order.actions[first->at++], at);
    }
    for (int r = 0; r < weave->p; r++) {
        if (weave->ranks[r].at < weave->ranks[r].order.count) return false;
        dtrain__put(&weave->ranks[r].woven, DTRAIN_PIPELINE_ACT_STEP, 0, weave->m - 1);
    }
    return true;
}

/* ---- Creation ---------------------------------------------------------------------------------*/

/* Copy the woven lists into a schedule; NULL: no memory. */
static dtrain_pipeline_schedule *dtrain__schedule_of(const dtrain__weave *weave)
{
    const dtrain_allocator allocator = dtrain__resolve_allocator(NULL);
    const size_t ranks = (size_t)weave->p;
    size_t count = 0;
    for (size_t r = 0; r < ranks; r++) count += weave->ranks[r].woven.count;
    dtrain_pipeline_schedule *schedule =
        (dtrain_pipeline_schedule *)dtrain__alloc(&allocator, 1, sizeof *schedule, "a schedule");
    if (!schedule) return NULL;
    schedule->kind = weave->kind;
    schedule->ranks = weave->p;
    schedule->chunks = weave->v;
    schedule->micro_batches = weave->m;
    schedule->room = count;
    schedule->first =
        (size_t *)dtrain__alloc(&allocator, ranks + 1, sizeof *schedule->first, "a schedule");
    schedule->actions = (dtrain_pipeline_action *)dtrain__alloc(
        &allocator, count, sizeof *schedule->actions, "a schedule");
    schedule->memory = (dtrain__run_memory *)dtrain__alloc(&allocator, ranks,
                                                           sizeof *schedule->memory, "a schedule");
    if (!schedule->first || !schedule->actions || !schedule->memory) {
        dtrain_pipeline_destroy(schedule);
        return NULL;
    }
    for (size_t r = 0; r < ranks; r++) {
        const dtrain__order *woven = &weave->ranks[r].woven;
        memcpy(schedule->actions + schedule->first[r], woven->actions,
               woven->count * sizeof *woven->actions);
        schedule->first[r + 1] = schedule->first[r] + woven->count;
    }
    return schedule;
}

DTRAIN_API dtrain_result dtrain_pipeline_create(const dtrain_pipeline_desc *desc, int ranks,
                                                int micro_batches, dtrain_pipeline_schedule **out)
{
    const char *const call = "dtrain_pipeline_create";
    const dtrain_allocator allocator = dtrain__resolve_allocator(NULL);
    const int limit = DTRAIN__PASSES_MOST;
    dtrain_result result = DTRAIN_OK;
    dtrain__weave weave;
    int chunks;
    if (!out) return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: out is NULL", call);
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
    weave.splits = dtrain__pipeline_splits(weave.kind);

    /* one piece of memory for all lists: elements of 8 bytes first */
    const size_t p = (size_t)ranks, passes = (size_t)chunks * (size_t)micro_batches;
    const size_t most = 7 * passes + (size_t)chunks + 1; /* actions of a rank */
    const size_t bytes = p * sizeof *weave.ranks + 3 * p * passes * sizeof *weave.done +
                         2 * p * most * sizeof(dtrain_pipeline_action) +
                         2 * p * passes * (sizeof *weave.slots + sizeof *weave.taken);
    weave.ranks = (dtrain__weave_rank *)dtrain__alloc(&allocator, bytes, 1, "a schedule");
    if (!weave.ranks) return DTRAIN_ERROR_MEMORY;
    weave.done = (double *)(weave.ranks + p);
    dtrain_pipeline_action *const actions = (dtrain_pipeline_action *)(weave.done + 3 * p * passes);
    weave.slots = (int32_t *)(actions + 2 * p * most);
    weave.taken = (bool *)(weave.slots + 2 * p * passes);
    for (size_t r = 0; r < p; r++) {
        weave.ranks[r].order.actions = actions + 2 * r * most;
        weave.ranks[r].woven.actions = actions + (2 * r + 1) * most;
    }
    for (size_t i = 0; i < 2 * p * passes; i++) weave.slots[i] = -1;

    if (!dtrain__weave_run(&weave))
        result = dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                             "%s: INTERLEAVED on %d ranks cannot order %d micro-batches; use a "
                             "multiple of %d",
                             call, ranks, micro_batches, ranks);
    else if (!(*out = dtrain__schedule_of(&weave))) result = DTRAIN_ERROR_MEMORY;
    dtrain__free(&allocator, weave.ranks, bytes, 1);
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
