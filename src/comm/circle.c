/* Circles: ranks that wait for each other
 *
 * Rank 0 waits in a barrier of all ranks for rank 1, which waits in a receive on the pipeline axis
 * for rank 0. Neither communicator can see this by itself, and no deadline is needed to know it. A
 * wait that has lasted a while gets a number, and its rank shows on the control page which
 * operation it is for. Two waits become a fact in three steps, at polls:
 *
 *     waiter     shows its wait n and the operation
 *     awaited    finds during its own wait m that it has not started its side: writes (n, m)
 *     waiter     reads (n, m), moves all that can be moved, still waits: confirms it
 *
 * A fact says that n cannot end well before m has ended: the operation ends well only after the
 * awaited rank has started its side. That rank had not started it when it wrote (n, m), during m,
 * and a rank starts nothing during a wait. Messages have no numbers: "not started" then means that
 * no message of the pair is under way on the awaited rank. The waiter moves what that rank sent or
 * took before it wrote (n, m), and then confirms; so another message has to be started.
 *
 * A circle of facts (n1, n2), (n2, n3), ..., (nk, n1) proves that none of these waits can end well:
 * the first wait to end would end before the next one. Facts stay true for ever, so it does not
 * matter when each was read. A rank that computes, sleeps or only tests its operations has no
 * numbered wait, so it is in no circle, however slow it is. A rank whose wait has ended with an
 * error can continue, so it is in no circle either. Only a rank that has found a circle leaves its
 * wait on the control page.
 *
 * Ranks that share no control page, and ranks over NCCL, find no circles. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/result.h"
#include "world/timeline_internal.h"
#include "world/world.h"
#include "world/world_internal.h"
#include "comm/backend.h"
#include "comm/comm.h"
#include "comm/comm_internal.h"
#include "comm/engine_internal.h"

#define DTRAIN__CIRCLE_NAMED 3 /* ranks of a circle in an error sentence */

/* Return true if an operation waits for another rank, as far as this rank can see. */
DTRAIN__PRIVATE bool dtrain__waits_for(const dtrain__engine *comm, const dtrain__work *work,
                                       int rank)
{
    const bool message = !work->op.sequence;
    if (message ? rank != work->op.what.root : rank == comm->base.rank) return false;
    return message || work->state == DTRAIN__MOVING
               ? comm->transport->lags(&comm->base, &work->op, rank)
               : !comm->transport->heard(&comm->base, work->op.sequence, rank);
}

/* Number the wait of this rank, for `work` or, if NULL, for a world all-gather, and show it. */
static void dtrain__show_wait(dtrain_world *world, const dtrain__engine *comm,
                              const dtrain__work *work, dtrain__wait *wait)
{
    dtrain__long_wait *own = &world->control->long_waits[world->rank];
    const char *axis = work && comm->base.axis ? comm->base.axis : "";
    const char *span = world->timeline.depth > 1 ? world->timeline.open[0].name : "";
    char call[80] = "dtrain_world_all_gather", ranks[64] = "";
    size_t used = 0;
    dtrain__store(&own->comm, work ? comm->base.number : -1);
    dtrain__store(&own->sequence, work ? work->op.sequence : world->gather_count);
    dtrain__store(&own->kind, work ? work->op.what.kind : 0);
    if (work) dtrain__describe(&work->op.call, work->op.sequence, call, sizeof call);
    for (int i = 0; work && i < comm->base.size && i < 6; i++)
        used +=
            (size_t)snprintf(ranks + used, sizeof ranks - used, " %d%s", comm->base.world_ranks[i],
                             i == 5 && comm->base.size > 6 ? " ..." : "");
    snprintf(own->text, sizeof own->text, "%s (%s%s%sranks%s)%s%.16s%s", call, axis,
             *axis ? " axis, " : "", work ? "" : "all ", ranks, *span ? " during \"" : "", span,
             *span ? "\"" : "");
    wait->number = ++world->long_wait_count;
    dtrain__store(&own->number, wait->number);
}

/* Return true if this rank has started its side of an operation in which `waiter` waits: false if
 * it is not in that communicator, has destroyed it or has not made it. */
static bool dtrain__has_started(const dtrain_world *world, const dtrain__long_wait *other,
                                int waiter)
{
    const dtrain__engine *comm = world->comms;
    const int64_t number = dtrain__load(&other->comm);
    const uint64_t sequence = dtrain__load(&other->sequence);
    if (number < 0) return world->gather_count >= sequence;
    while (comm && comm->base.number != number) comm = comm->next;
    if (!comm) return false;
    if (sequence) return comm->sequence >= sequence;
    for (const dtrain__work *work = comm->queue; work; work = work->next)
        if (!work->op.sequence && comm->base.world_ranks[work->op.what.root] == waiter &&
            work->op.what.kind != dtrain__load(&other->kind))
            return true;
    return false;
}

/* Move what other ranks did before, then confirm their facts about this rank's wait. A transport
 * that is slower than the page first gets its grace_ns after the newest fact. */
static void dtrain__confirm_facts(dtrain_world *world, dtrain__engine *comm,
                                  const dtrain__work *work, dtrain__wait *wait)
{
    const int size = work ? comm->base.size : world->size;
    uint64_t *at[DTRAIN_MAX_RANKS], found[DTRAIN_MAX_RANKS], sum = 0;
    for (int i = 0; i < size; i++) {
        at[i] = &world->control->facts[work ? comm->base.world_ranks[i] : i][world->rank];
        found[i] = dtrain__load(at[i]);
        if (found[i] >> 32 != wait->number) found[i] = 0;
        sum += found[i];
    }
    if (sum != wait->facts) wait->facts_ns = wait->last_ns;
    wait->facts = sum;
    if (!sum || (work && wait->last_ns - wait->facts_ns < comm->transport->grace_ns)) return;
    if (work) dtrain__engine_advance(comm);
    /* Once a collective moves, all ranks have called it: facts about it are out of date. */
    if (work && (work->done || (work->op.sequence && work->state == DTRAIN__MOVING))) return;
    for (int i = 0; i < size; i++)
        if (found[i] && (!work || dtrain__waits_for(comm, work, i)))
            dtrain__store(at[i], found[i] | 1); /* a newer fact is written again */
}

/* Find a shortest circle with wait n of this rank, breadth first: path[0] is this rank, and path[i]
 * waits for path[i + 1]. Return its length; 0 if there is none. The search goes from a rank to the
 * ranks that wait for it. */
static int dtrain__find_circle(const dtrain_world *world, uint64_t n, int *path)
{
    uint64_t waits[DTRAIN_MAX_RANKS] = {0}; /* waits of the ranks reached; 0: not reached */
    int reached[DTRAIN_MAX_RANKS], awaited[DTRAIN_MAX_RANKS], count = 1, length = 1;
    waits[reached[0] = path[0] = world->rank] = n;
    for (int at = 0; at < count; at++)
        for (int i = 0; i < world->size; i++) {
            const uint64_t fact = dtrain__load(&world->control->facts[reached[at]][i]);
            const uint64_t number = dtrain__load(&world->control->long_waits[i].number);
            const uint64_t ends_after = fact >> 1 & 0x7fffffffu;
            if (!(fact & 1) || ends_after != waits[reached[at]] || fact >> 32 != number) continue;
            if (i == world->rank) {
                for (int r = reached[at]; r != i; r = awaited[r]) path[length++] = r;
                return length;
            }
            if (waits[i]) continue;
            waits[i] = number;
            awaited[i] = reached[at];
            reached[count++] = i;
        }
    return 0;
}

/* Look for a circle during a wait for `work` or, if NULL, for a world all-gather. */
DTRAIN__PRIVATE dtrain_result dtrain__look_for_circle(dtrain_world *world, dtrain__engine *comm,
                                                      const dtrain__work *work, dtrain__wait *wait)
{
    int path[DTRAIN_MAX_RANKS];
    char list[DTRAIN__CIRCLE_NAMED * 144] = "", more[40] = "";
    size_t used = 0;
    if (wait->waited_ns < world->long_wait_ns ||
        wait->last_ns - wait->looked_ns < world->long_wait_ns / 512)
        return DTRAIN_OK;
    wait->looked_ns = wait->last_ns;
    if (!wait->number) dtrain__show_wait(world, comm, work, wait);
    /* Write a fact for each rank whose wait can need an operation that this rank has not started.
     * If rank i begins another wait while this rank reads, the fact is about a wait that has ended,
     * and rank i does not confirm it. */
    const uint64_t m = wait->number;
    for (int i = 0; i < world->size; i++) {
        const dtrain__long_wait *other = &world->control->long_waits[i];
        uint64_t *fact = &world->control->facts[world->rank][i];
        const uint64_t n = dtrain__load(&other->number);
        if (dtrain__load(fact) >> 1 == (n << 31 | m)) continue;
        if (!dtrain__has_started(world, other, i)) dtrain__store(fact, n << 32 | m << 1);
    }
    dtrain__confirm_facts(world, comm, work, wait);
    const int length = dtrain__find_circle(world, wait->number, path);
    for (int i = 0; i < length && i < DTRAIN__CIRCLE_NAMED; i++)
        used += (size_t)snprintf(list + used, sizeof list - used,
                                 "%srank %d waits for rank %d in %.110s", i ? "; " : "", path[i],
                                 path[(i + 1) % length], world->control->long_waits[path[i]].text);
    if (!length) return DTRAIN_OK;
    wait->number = 0; /* the page keeps the wait: the other ranks of the circle find it, too */
    if (length > DTRAIN__CIRCLE_NAMED)
        snprintf(more, sizeof more, "; ... %d more ranks", length - DTRAIN__CIRCLE_NAMED);
    return dtrain_fail(DTRAIN_ERROR_MISMATCH,
                       "the ranks wait for each other in a circle: %s%s; make the same calls on "
                       "all of them",
                       list, more);
}
