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

DTRAIN_API int dtrain_pipeline_stage(uint32_t kind, int ranks, int chunks, int rank, int chunk)
{
    if (rank < 0 || rank >= ranks || chunk < 0 || chunk >= chunks) return -1;
    const bool back = kind == DTRAIN_PIPELINE_ZBV && chunk % 2;
    return chunk * ranks + (back ? ranks - 1 - rank : rank);
}

DTRAIN__PRIVATE dtrain__place_of_stage dtrain__pipeline_place(uint32_t kind, int ranks, int stage)
{
    dtrain__place_of_stage place = {stage % ranks, stage / ranks};
    if (kind == DTRAIN_PIPELINE_ZBV && place.chunk % 2) place.rank = ranks - 1 - place.rank;
    return place;
}

DTRAIN__PRIVATE bool dtrain__pipeline_splits(uint32_t kind)
{
    return kind == DTRAIN_PIPELINE_ZB_H1 || kind == DTRAIN_PIPELINE_ZBV;
}

DTRAIN__PRIVATE const char *dtrain__pipeline_act_name(uint32_t act)
{
    static const char *const names[] = {"?",      "FORWARD", "BACKWARD",      "WEIGHT",
                                        "SEND",   "RECEIVE", "SEND_GRADIENT", "RECEIVE_GRADIENT",
                                        "REDUCE", "STEP"};
    return names[act <= DTRAIN_PIPELINE_ACT_STEP ? act : 0];
}

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

/* ---- 1. Computations of a rank ----------------------------------------------------------------*/

/* One rank's computations, without messages. */
typedef struct dtrain__order {
    dtrain_pipeline_action *actions;
    size_t count;
} dtrain__order;

static void dtrain__put(dtrain__order *order, uint32_t act, int chunk, int micro)
{
    const dtrain_pipeline_action action = {act, chunk, micro, -1, -1, -1};
    order->actions[order->count++] = action;
}

/* All forwards, then all backwards. */
static void dtrain__order_gpipe(dtrain__order *order, int m)
{
    for (int i = 0; i < m; i++) dtrain__put(order, DTRAIN_PIPELINE_ACT_FORWARD, 0, i);
    for (int i = 0; i < m; i++) dtrain__put(order, DTRAIN_PIPELINE_ACT_BACKWARD, 0, i);
}

/* One forward for each stage behind this one, then a forward and a backward in turn. With weights
 * apart (ZB_H1) those of `rank` micro-batches are put off: rank 0 has none to spare, and the last
 * rank fills with them what it would wait for at the end. */
static void dtrain__order_1f1b(dtrain__order *order, int p, int rank, int m, bool splits)
{
    int forward = 0, weight = 0;
    for (; forward < p - rank - 1 && forward < m; forward++)
        dtrain__put(order, DTRAIN_PIPELINE_ACT_FORWARD, 0, forward);
    for (int i = 0; i < m; i++) {
        if (forward < m) dtrain__put(order, DTRAIN_PIPELINE_ACT_FORWARD, 0, forward++);
        dtrain__put(order, DTRAIN_PIPELINE_ACT_BACKWARD, 0, i);
        if (splits && i >= rank) dtrain__put(order, DTRAIN_PIPELINE_ACT_WEIGHT, 0, weight++);
    }
    while (splits && weight < m) dtrain__put(order, DTRAIN_PIPELINE_ACT_WEIGHT, 0, weight++);
}

/* Append number i of the passes of a rank with v chunks: groups of p micro-batches go through all
 * chunks, forwards from the first on, backwards from the last. Where p does not divide m the first
 * groups have more. */
static void dtrain__put_interleaved(dtrain__order *order, uint32_t act, int p, int v, int m, int i)
{
    const int groups = m < p ? 1 : m / p;
    int first = 0, size = m / groups + (m % groups > 0);
    for (int g = 0; i >= size * v; size = m / groups + (m % groups > g)) {
        i -= size * v;
        first += size;
        g++;
    }
    const int chunk = i / size;
    dtrain__put(order, act, act == DTRAIN_PIPELINE_ACT_FORWARD ? chunk : v - 1 - chunk,
                first + i % size);
}

/* As 1F1B, with enough forwards before the first backward for all chunks of a group. */
static void dtrain__order_interleaved(dtrain__order *order, int p, int v, int rank, int m)
{
    const int groups = m < p ? 1 : m / p, size = m / groups + (m % groups > 0);
    const int total = m * v, first = 2 * (p - rank - 1) + (v - 1) * (size > p ? size : p);
    int forward = 0;
    for (; forward < first && forward < total; forward++)
        dtrain__put_interleaved(order, DTRAIN_PIPELINE_ACT_FORWARD, p, v, m, forward);
    for (int i = 0; i < total; i++) {
        if (forward < total)
            dtrain__put_interleaved(order, DTRAIN_PIPELINE_ACT_FORWARD, p, v, m, forward++);
        dtrain__put_interleaved(order, DTRAIN_PIPELINE_ACT_BACKWARD, p, v, m, i);
    }
}

/* ---- A replay in time, which both steps share -------------------------------------------------*/

typedef struct dtrain__replay {
    uint32_t kind;
    int p, v, m;
    bool splits;
    double *done;  /* (3, p * v, m) when a computation ended; negative: it has not */
    double *clock; /* (p) until when a rank is busy */
} dtrain__replay;

static double *dtrain__done(const dtrain__replay *replay, uint32_t act, int stage, int micro)
{
    const size_t stages = (size_t)replay->p * (size_t)replay->v;
    return &replay->done[((act - 1) * stages + (size_t)stage) * (size_t)replay->m + (size_t)micro];
}

/* Find when a rank can begin a computation; false: what it needs is not done. */
static bool dtrain__begin_at(const dtrain__replay *replay, int rank,
                             const dtrain_pipeline_action *action, double *at)
{
    const int stage =
        dtrain_pipeline_stage(replay->kind, replay->p, replay->v, rank, action->chunk);
    const bool forward = action->act == DTRAIN_PIPELINE_ACT_FORWARD;
    const int last = replay->p * replay->v - 1, i = action->micro_batch;
    double needs = 0, of_rank = 0;
    if (forward && stage) needs = *dtrain__done(replay, DTRAIN_PIPELINE_ACT_FORWARD, stage - 1, i);
    if (!forward) of_rank = *dtrain__done(replay, action->act - 1, stage, i);
    if (action->act == DTRAIN_PIPELINE_ACT_BACKWARD && stage < last)
        needs = *dtrain__done(replay, DTRAIN_PIPELINE_ACT_BACKWARD, stage + 1, i);
    if (needs < 0 || of_rank < 0) return false;
    *at = fmax(replay->clock[rank], fmax(needs, of_rank));
    return true;
}

/* Let a rank do a computation. Forward, input and weight gradients take alike. */
static void dtrain__replay_do(dtrain__replay *replay, int rank,
                              const dtrain_pipeline_action *action, double at)
{
    const int stage =
        dtrain_pipeline_stage(replay->kind, replay->p, replay->v, rank, action->chunk);
    const bool both = action->act == DTRAIN_PIPELINE_ACT_BACKWARD && !replay->splits;
    replay->clock[rank] = at + (both ? 2 : 1);
    *dtrain__done(replay, action->act, stage, action->micro_batch) = replay->clock[rank];
}

static void dtrain__replay_reset(dtrain__replay *replay)
{
    const size_t count = 3 * (size_t)replay->p * (size_t)replay->v * (size_t)replay->m;
    for (size_t i = 0; i < count; i++) replay->done[i] = -1;
    for (int r = 0; r < replay->p; r++) replay->clock[r] = 0;
}

/* ---- 1. for ZBV -------------------------------------------------------------------------------*/

/* How many of a rank's computations of a kind are done, by chunk; they go in ascending order. */
typedef struct dtrain__vee {
    int forward[2], backward[2], weight[2];
} dtrain__vee;

/* Pick what a free rank does next: a backward, of the last stages first, since all others wait for
 * those; a forward, towards them; else a weight. No more than p micro-batches are on a rank at
 * once, which is the memory of 1F1B's first rank. */
static bool dtrain__vee_pick(const dtrain__replay *replay, int rank, const dtrain__vee *vee,
                             dtrain_pipeline_action *best, double *at)
{
    const int m = replay->m;
    const dtrain_pipeline_action choices[6] = {
        {DTRAIN_PIPELINE_ACT_BACKWARD, 1, vee->backward[1], -1, -1, -1},
        {DTRAIN_PIPELINE_ACT_BACKWARD, 0, vee->backward[0], -1, -1, -1},
        {DTRAIN_PIPELINE_ACT_FORWARD, 1, vee->forward[1], -1, -1, -1},
        {DTRAIN_PIPELINE_ACT_FORWARD, 0, vee->forward[0], -1, -1, -1},
        {DTRAIN_PIPELINE_ACT_WEIGHT, 1, vee->weight[1], -1, -1, -1},
        {DTRAIN_PIPELINE_ACT_WEIGHT, 0, vee->weight[0], -1, -1, -1}};
    bool found = false;
    for (int i = 0; i < 6; i++) {
        const dtrain_pipeline_action *choice = &choices[i];
        double begin;
        if (choice->micro_batch == m) continue;
        if (i == 3 && vee->forward[0] - vee->weight[0] >= replay->p) continue;
        if (!dtrain__begin_at(replay, rank, choice, &begin)) continue;
        if (found && begin >= *at) continue;
        *best = *choice;
        *at = begin;
        found = true;
    }
    return found;
}

/* Give the rank that can begin first its next computation, until all is done. */
static void dtrain__order_zbv(dtrain__replay *replay, dtrain__order *orders, dtrain__vee *vees)
{
    for (;;) {
        dtrain_pipeline_action next = {0, 0, 0, -1, -1, -1}, best = next;
        int rank = -1;
        double at = 0, begin;
        for (int r = 0; r < replay->p; r++) {
            if (!dtrain__vee_pick(replay, r, &vees[r], &next, &begin)) continue;
            if (rank >= 0 && begin >= at) continue;
            rank = r, at = begin, best = next;
        }
        if (rank < 0) return;
        dtrain__replay_do(replay, rank, &best, at);
        dtrain__put(&orders[rank], best.act, best.chunk, best.micro_batch);
        dtrain__vee *vee = &vees[rank];
        if (best.act == DTRAIN_PIPELINE_ACT_FORWARD) vee->forward[best.chunk]++;
        else if (best.act == DTRAIN_PIPELINE_ACT_BACKWARD) vee->backward[best.chunk]++;
        else vee->weight[best.chunk]++;
    }
}

/* ---- 2. Weaving -------------------------------------------------------------------------------*/

typedef struct dtrain__weave {
    dtrain__replay replay;
    size_t most;                    /* actions of a rank */
    dtrain__order *orders;          /* (p) computations */
    dtrain__order *woven;           /* (p) with messages */
    size_t *at;                     /* (p) the next of the computations */
    int32_t *slots;                 /* (2, p, v * m) slot and inbox of a pass; -1: it has none */
    bool *taken;                    /* (2, p, v * m) by a pass under way */
    dtrain__vee *vees;              /* (p) */
    dtrain_pipeline_action *memory; /* (2, p, most) */
} dtrain__weave;

/* Return where a pass notes its slot, or (inbox) its inbox. */
static int32_t *dtrain__held_by(const dtrain__weave *weave, bool inbox, int rank, int chunk,
                                int micro)
{
    const dtrain__replay *replay = &weave->replay;
    const size_t passes = (size_t)replay->v * (size_t)replay->m;
    const size_t pass = (size_t)chunk * (size_t)replay->m + (size_t)micro;
    return &weave->slots[((size_t)inbox * (size_t)replay->p + (size_t)rank) * passes + pass];
}

/* Take the lowest free slot or inbox of a rank. */
static int32_t dtrain__take_slot(const dtrain__weave *weave, bool inbox, int rank)
{
    bool *taken = weave->taken + (dtrain__held_by(weave, inbox, rank, 0, 0) - weave->slots);
    int32_t slot = 0;
    while (taken[slot]) slot++;
    taken[slot] = true;
    return slot;
}

static void dtrain__give_slot(const dtrain__weave *weave, bool inbox, int rank, int32_t slot)
{
    bool *taken = weave->taken + (dtrain__held_by(weave, inbox, rank, 0, 0) - weave->slots);
    if (slot >= 0) taken[slot] = false;
}

/* Append the message that a computation makes to the lists of both ranks. */
static void dtrain__weave_message(dtrain__weave *weave, int rank,
                                  const dtrain_pipeline_action *made)
{
    const dtrain__replay *replay = &weave->replay;
    const int stage = dtrain_pipeline_stage(replay->kind, replay->p, replay->v, rank, made->chunk);
    const bool forward = made->act == DTRAIN_PIPELINE_ACT_FORWARD;
    const int to = forward ? stage + 1 : stage - 1, i = made->micro_batch;
    if (made->act == DTRAIN_PIPELINE_ACT_WEIGHT || to < 0 || to == replay->p * replay->v) return;
    const dtrain__place_of_stage place = dtrain__pipeline_place(replay->kind, replay->p, to);
    if (place.rank == rank) return;
    dtrain_pipeline_action send = *made, receive = *made;
    send.act = forward ? DTRAIN_PIPELINE_ACT_SEND : DTRAIN_PIPELINE_ACT_SEND_GRADIENT;
    send.peer = place.rank;
    receive.act = send.act + 1;
    receive.peer = rank;
    receive.chunk = place.chunk;
    if (forward)
        *dtrain__held_by(weave, true, place.rank, place.chunk, i) =
            dtrain__take_slot(weave, true, place.rank);
    receive.slot = *dtrain__held_by(weave, false, place.rank, place.chunk, i);
    receive.inbox = *dtrain__held_by(weave, true, place.rank, place.chunk, i);
    weave->woven[rank].actions[weave->woven[rank].count++] = send;
    weave->woven[place.rank].actions[weave->woven[place.rank].count++] = receive;
}

/* Append a computation, with its slot; its last use gives the slot back. */
static void dtrain__weave_compute(dtrain__weave *weave, int rank, dtrain_pipeline_action action,
                                  double at)
{
    const dtrain__replay *replay = &weave->replay;
    int32_t *slot = dtrain__held_by(weave, false, rank, action.chunk, action.micro_batch);
    const int32_t *inbox = dtrain__held_by(weave, true, rank, action.chunk, action.micro_batch);
    const uint32_t last =
        replay->splits ? DTRAIN_PIPELINE_ACT_WEIGHT : DTRAIN_PIPELINE_ACT_BACKWARD;
    dtrain__order *woven = &weave->woven[rank];
    if (action.act == DTRAIN_PIPELINE_ACT_FORWARD) *slot = dtrain__take_slot(weave, false, rank);
    action.slot = *slot;
    action.inbox = *inbox;
    dtrain__replay_do(&weave->replay, rank, &action, at);
    woven->actions[woven->count++] = action;
    dtrain__weave_message(weave, rank, &action);
    if (action.act != last) return;
    dtrain__give_slot(weave, false, rank, *slot);
    dtrain__give_slot(weave, true, rank, *inbox);
    if (action.micro_batch == replay->m - 1)
        dtrain__put(woven, DTRAIN_PIPELINE_ACT_REDUCE, action.chunk, action.micro_batch);
}

/* Find the rank whose next computation ends first, of those that can begin; -1: none can. */
static int dtrain__weave_next(const dtrain__weave *weave, double *at)
{
    const dtrain__replay *replay = &weave->replay;
    int first = -1;
    double end = 0, begin;
    for (int r = 0; r < replay->p; r++) {
        const dtrain__order *order = &weave->orders[r];
        if (weave->at[r] == order->count) continue;
        const dtrain_pipeline_action *action = &order->actions[weave->at[r]];
        if (!dtrain__begin_at(replay, r, action, &begin)) continue;
        const bool both = action->act == DTRAIN_PIPELINE_ACT_BACKWARD && !replay->splits;
        if (first >= 0 && begin + (both ? 2 : 1) >= end) continue;
        first = r, *at = begin, end = begin + (both ? 2 : 1);
    }
    return first;
}

/* Weave all ranks; false: an order of step 1 waits for itself. */
static bool dtrain__weave_all(dtrain__weave *weave)
{
    const int p = weave->replay.p;
    double at;
    for (int rank; (rank = dtrain__weave_next(weave, &at)) >= 0;)
        dtrain__weave_compute(weave, rank, weave->orders[rank].actions[weave->at[rank]++], at);
    for (int r = 0; r < p; r++) {
        if (weave->at[r] < weave->orders[r].count) return false;
        dtrain__put(&weave->woven[r], DTRAIN_PIPELINE_ACT_STEP, 0, weave->replay.m - 1);
    }
    return true;
}

/* Do both steps. */
static bool dtrain__weave_run(dtrain__weave *weave)
{
    dtrain__replay *replay = &weave->replay;
    dtrain__replay_reset(replay);
    if (replay->kind == DTRAIN_PIPELINE_ZBV) dtrain__order_zbv(replay, weave->orders, weave->vees);
    for (int r = 0; r < replay->p; r++) {
        dtrain__order *order = &weave->orders[r];
        if (replay->kind == DTRAIN_PIPELINE_GPIPE) dtrain__order_gpipe(order, replay->m);
        if (replay->kind == DTRAIN_PIPELINE_1F1B || replay->kind == DTRAIN_PIPELINE_ZB_H1)
            dtrain__order_1f1b(order, replay->p, r, replay->m, replay->splits);
        if (replay->kind == DTRAIN_PIPELINE_INTERLEAVED)
            dtrain__order_interleaved(order, replay->p, replay->v, r, replay->m);
    }
    dtrain__replay_reset(replay);
    return dtrain__weave_all(weave);
}

/* ---- Creation ---------------------------------------------------------------------------------*/

DTRAIN__PRIVATE const char *dtrain__pipeline_kind_name(uint32_t kind)
{
    static const char *const names[] = {"1F1B", "GPIPE", "INTERLEAVED", "ZB_H1", "ZBV"};
    return kind <= DTRAIN_PIPELINE_ZBV ? names[kind] : "?";
}

DTRAIN__PRIVATE dtrain_result dtrain__pipeline_chunks(const dtrain_pipeline_desc *desc, int ranks,
                                                      int *chunks)
{
    const uint32_t kind = desc ? desc->kind : 0;
    if (kind > DTRAIN_PIPELINE_ZBV)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "kind %u of a pipeline is not a dtrain_pipeline_kind", kind);
    const bool loops = kind == DTRAIN_PIPELINE_INTERLEAVED, vee = kind == DTRAIN_PIPELINE_ZBV;
    const uint32_t given = desc ? desc->chunks : 0;
    *chunks = given ? (int)given : loops || vee ? 2 : 1;
    if (given <= DTRAIN__CHUNKS_MOST && (loops || given == 0 || *chunks == (vee ? 2 : 1)))
        return DTRAIN_OK;
    return dtrain_fail(
        DTRAIN_ERROR_ARGUMENT,
        "a pipeline of kind %s on %d ranks has %s, not %u; several stages a rank are "
        "for INTERLEAVED, two in the shape of a V for ZBV",
        dtrain__pipeline_kind_name(kind), ranks,
        loops ? "1 to 64 chunks"
        : vee ? "2 chunks a rank"
              : "1 chunk a rank",
        given);
}

DTRAIN__PRIVATE dtrain_pipeline_schedule *
dtrain__pipeline_alloc(const dtrain_allocator *allocator, const dtrain_pipeline_schedule *head,
                       size_t actions)
{
    const size_t ranks = (size_t)head->ranks;
    dtrain_pipeline_schedule *schedule =
        (dtrain_pipeline_schedule *)dtrain__alloc(allocator, 1, sizeof *schedule, "a schedule");
    if (!schedule) return NULL;
    *schedule = *head;
    schedule->room = actions;
    schedule->first =
        (size_t *)dtrain__alloc(allocator, ranks + 1, sizeof *schedule->first, "a schedule");
    schedule->actions = (dtrain_pipeline_action *)dtrain__alloc(
        allocator, actions, sizeof *schedule->actions, "a schedule");
    schedule->memory = (dtrain__run_memory *)dtrain__alloc(allocator, ranks,
                                                           sizeof *schedule->memory, "a schedule");
    if (schedule->first && schedule->actions && schedule->memory) return schedule;
    dtrain_pipeline_destroy(schedule);
    return NULL;
}

/* Copy the woven lists into a schedule; NULL: no memory. */
static dtrain_pipeline_schedule *dtrain__schedule_of(const dtrain__weave *weave)
{
    const dtrain_allocator allocator = dtrain__resolve_allocator(NULL);
    const dtrain__replay *replay = &weave->replay;
    const dtrain_pipeline_schedule head = {replay->kind, replay->p, replay->v, replay->m,
                                           NULL,         NULL,      0,         NULL};
    size_t count = 0;
    for (int r = 0; r < replay->p; r++) count += weave->woven[r].count;
    dtrain_pipeline_schedule *schedule = dtrain__pipeline_alloc(&allocator, &head, count);
    for (int r = 0; r < replay->p && schedule; r++) {
        const dtrain__order *woven = &weave->woven[r];
        memcpy(schedule->actions + schedule->first[r], woven->actions,
               woven->count * sizeof *woven->actions);
        schedule->first[r + 1] = schedule->first[r] + woven->count;
    }
    return schedule;
}

/* Allocate what weaving needs (allocate), or free it. */
static bool dtrain__weave_memory(dtrain__weave *weave, bool allocate)
{
    const dtrain_allocator allocator = dtrain__resolve_allocator(NULL);
    const dtrain__replay *replay = &weave->replay;
    const size_t p = (size_t)replay->p, passes = (size_t)replay->v * (size_t)replay->m;
    struct {
        void **memory;
        size_t count, bytes;
    } all[] = {{(void **)&weave->replay.done, 3 * p * passes, sizeof(double)},
               {(void **)&weave->replay.clock, p, sizeof(double)},
               {(void **)&weave->orders, p, sizeof *weave->orders},
               {(void **)&weave->woven, p, sizeof *weave->woven},
               {(void **)&weave->at, p, sizeof *weave->at},
               {(void **)&weave->slots, 2 * p * passes, sizeof *weave->slots},
               {(void **)&weave->taken, 2 * p * passes, sizeof *weave->taken},
               {(void **)&weave->vees, p, sizeof *weave->vees},
               {(void **)&weave->memory, 2 * p * weave->most, sizeof *weave->memory}};
    bool complete = true;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        if (!allocate) dtrain__free(&allocator, *all[i].memory, all[i].count, all[i].bytes);
        else *all[i].memory = dtrain__alloc(&allocator, all[i].count, all[i].bytes, "a schedule");
        complete = complete && *all[i].memory;
    }
    for (size_t r = 0; allocate && complete && r < p; r++) {
        weave->orders[r].actions = weave->memory + 2 * r * weave->most;
        weave->woven[r].actions = weave->memory + (2 * r + 1) * weave->most;
    }
    for (size_t i = 0; allocate && complete && i < 2 * p * passes; i++) weave->slots[i] = -1;
    return complete;
}

DTRAIN_API dtrain_result dtrain_pipeline_create(const dtrain_pipeline_desc *desc, int ranks,
                                                int micro_batches, dtrain_pipeline_schedule **out)
{
    const char *const call = "dtrain_pipeline_create";
    dtrain__weave weave;
    int chunks;
    if (!out) return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: out is NULL", call);
    *out = NULL;
    DTRAIN__TRY(dtrain__pipeline_chunks(desc, ranks, &chunks));
    if (ranks < 1 || micro_batches < 1 ||
        (int64_t)ranks * chunks * micro_batches > DTRAIN__PASSES_MOST)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "%s: %d ranks, %d chunks and %d micro-batches; expected 1 or more, and "
                           "at most %d passes in all",
                           call, ranks, chunks, micro_batches, DTRAIN__PASSES_MOST);
    memset(&weave, 0, sizeof weave);
    weave.replay.kind = desc ? desc->kind : 0;
    weave.replay.p = ranks, weave.replay.v = chunks, weave.replay.m = micro_batches;
    weave.replay.splits = dtrain__pipeline_splits(weave.replay.kind);
    weave.most = 7 * (size_t)chunks * (size_t)micro_batches + (size_t)chunks + 1;
    dtrain_result result = dtrain__weave_memory(&weave, true) ? DTRAIN_OK : DTRAIN_ERROR_MEMORY;
    if (result == DTRAIN_OK && !dtrain__weave_run(&weave))
        result = dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                             "%s: INTERLEAVED on %d ranks cannot order %d micro-batches; use a "
                             "multiple of %d",
                             call, ranks, micro_batches, ranks);
    if (result == DTRAIN_OK) {
        *out = dtrain__schedule_of(&weave);
        if (!*out) result = DTRAIN_ERROR_MEMORY;
    }
    dtrain__weave_memory(&weave, false);
    return result;
}

DTRAIN__PRIVATE void dtrain__pipeline_room(const dtrain_pipeline_schedule *schedule, int rank,
                                           dtrain_pipeline_report *report)
{
    report->slots = report->inboxes = 0;
    for (size_t i = schedule->first[rank]; i < schedule->first[rank + 1]; i++) {
        const dtrain_pipeline_action *action = &schedule->actions[i];
        if (action->slot >= report->slots) report->slots = action->slot + 1;
        if (action->inbox >= report->inboxes) report->inboxes = action->inbox + 1;
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
