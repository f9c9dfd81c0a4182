/* Emulated links
*
 * Data moves as ever; what is emulated is when an operation is done. What one rank sends to and
 * gets from other nodes: n ranks, a of them elsewhere, N nodes, B bytes of `count` elements:
 *
 *                                  out           in            rounds
 *     all-reduce                   2 a B / n     2 a B / n     2     slices to owners, results back
 *     reduce                       a B / n       a B / n       2     slices to owners ...
 *        rank on another node      + B / n                           ... results to the root
 *        root                                    + a B / n
 *     small all-reduce             a B           a B           1     inputs to everybody
 *     small reduce, elsewhere      B                           1     inputs to the root
 *        root                                    a B
 *     reduce-scatter, all-gather,
 *        all-to-all, split         a B           a B           1
 *     broadcast, root              (N - 1) B                   1     once to each other node, from
 *        first rank of a node                    B                   there on inside: free
 *     barrier                                                  log2 N, rounded up
 *     send                         B             B (peer)      1     booked when both are there
 *
 * When all ranks have shown an operation each books its bytes on the two lanes of its node, for the
 * operations of one communicator in the order in which they were started: a lane is a time until
 * which it is busy, and a booking moves it on. The transfer began when the last rank started the
 * operation, not when somebody looked: so links work while ranks compute. The invariant: a rank
 * reaches the last stage, one more than without emulation, after its own transfers are due; all
 * have reached it when every transfer is over. */

#include "core/platform_internal.h"
#include "core/dtype.h"
#include "core/result.h"
#include "world/world.h"
#include "world/world_internal.h"
#include "comm/backend.h"
#include "comm/comm.h"
#include "comm/engine_internal.h"

enum { DTRAIN__LANE_OUT = 0, DTRAIN__LANE_IN = 1 };

typedef struct dtrain__traffic {
    double out, in;  /* bytes */
    uint32_t rounds; /* 0: the group is inside one node */
} dtrain__traffic;

/* Which node a rank of the communicator is on. */
static int dtrain__emulated_node(const dtrain__engine *comm, int rank)
{
    return comm->base.world_ranks[rank] / dtrain__node_ranks(comm->base.world);
}

/* Where a rank of a group stands between nodes. */
typedef struct dtrain__spread {
    int nodes, away; /* nodes of the group; its ranks on other nodes than this one's */
    bool first;      /* of the group's ranks on this node */
    bool at_root;    /* on the root's node */
} dtrain__spread;

static dtrain__spread dtrain__spread_of(const dtrain__engine *comm, int root)
{
    bool known[DTRAIN_MAX_RANKS];
    dtrain__spread spread;
    const int own = dtrain__emulated_node(comm, comm->base.rank);
    memset(known, 0, sizeof known);
    memset(&spread, 0, sizeof spread);
    spread.at_root = root >= 0 && dtrain__emulated_node(comm, root) == own;
    for (int i = 0; i < comm->base.size; i++) {
        const int node = dtrain__emulated_node(comm, i);
        if (i == comm->base.rank) spread.first = !known[node];
        spread.nodes += !known[node];
        spread.away += node != own;
        known[node] = true;
    }
    return spread;
}

static dtrain__traffic dtrain__traffic_of(const dtrain__engine *comm, const dtrain__work *work)
{
    const dtrain_collective *what = &work->what;
    const dtrain__spread at = dtrain__spread_of(comm, what->root);
    const double bytes = (double)what->count * (double)dtrain_dtype_bytes(what->dtype);
    const double n = comm->base.size, away = at.away;
    const bool is_root = what->root == comm->base.rank;
    const bool small = work->small;
    dtrain__traffic traffic = {0, 0, 0};
    if (at.nodes == 1) return traffic;
    traffic.rounds = 1;
    switch (what->kind) {
    case DTRAIN_COLLECTIVE_BARRIER:
        while (1 << traffic.rounds < at.nodes) traffic.rounds++;
        return traffic;
    case DTRAIN_COLLECTIVE_BROADCAST:
        if (is_root) traffic.out = (double)(at.nodes - 1) * bytes;
        else if (at.first && !at.at_root) traffic.in = bytes;
        return traffic;
    case DTRAIN_COLLECTIVE_REDUCE:
        traffic.rounds = small ? 1 : 2;
        if (!small) traffic.out = traffic.in = away * bytes / n;
        if (!at.at_root) traffic.out += small ? bytes : bytes / n;
        if (is_root) traffic.in += small ? away * bytes : away * bytes / n;
        return traffic;
    case DTRAIN_COLLECTIVE_ALL_REDUCE:
        traffic.rounds = small ? 1 : 2;
        traffic.out = traffic.in = small ? away * bytes : 2 * away * bytes / n;
        return traffic;
    default: traffic.out = traffic.in = away * bytes; return traffic;
    }
}

/* Books bytes on a lane, behind what is booked already; returns when they are through. */
static uint64_t dtrain__book_lane(const dtrain_world *world, int node, int lane, uint64_t start,
                                  double bytes)
{
    uint64_t *busy = &world->control->lanes[node][lane].busy_until;
    const double ns = 8 * bytes / world->emulation.gigabits_per_second; /* Gb/s = bits a ns */
    const uint64_t length = ns < 1e18 ? (uint64_t)ns + 1 : (uint64_t)1000000000000000000u;
    uint64_t was = dtrain__load(busy), end;
    if (!(bytes > 0)) return start;
    do {
        end = was > start ? was : start;
        end = end <= UINT64_MAX / 2 ? end + length : end;
    } while (
        !__atomic_compare_exchange_n(busy, &was, end, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE));
    return end;
}

static uint64_t dtrain__emulated_latency(const dtrain_world *world, uint32_t rounds)
{
    return (uint64_t)(1e3 * world->emulation.latency_us * (double)rounds) + 1;
}

/* Book this rank's transfers on both lanes of its node, and return when the later one is over. */
static uint64_t dtrain__book_both(const dtrain_world *world, int out_node, double out, int in_node,
                                  double in, uint64_t start, uint32_t rounds)
{
    const uint64_t sent = dtrain__book_lane(world, out_node, DTRAIN__LANE_OUT, start, out);
    const uint64_t received = dtrain__book_lane(world, in_node, DTRAIN__LANE_IN, start, in);
    return (sent > received ? sent : received) + dtrain__emulated_latency(world, rounds);
}

/* Book a collective that all ranks have shown. */
DTRAIN__PRIVATE void dtrain__book_collective(const dtrain__engine *comm, dtrain__work *work)
{
    const dtrain__traffic traffic = dtrain__traffic_of(comm, work);
    const int node = dtrain__emulated_node(comm, comm->base.rank);
    if (!traffic.rounds) return;
    work->due_ns = dtrain__book_both(comm->base.world, node, traffic.out, node, traffic.in,
                                     work->last_started_ns, traffic.rounds);
}

DTRAIN__PRIVATE bool dtrain__message_crosses(const dtrain__engine *comm, const dtrain__work *work)
{
    return dtrain__node_ranks(comm->base.world) && dtrain__emulated_node(comm, work->what.root) !=
                                                       dtrain__emulated_node(comm, comm->base.rank);
}

/* Whether a receiver may take the end of a message that was sent at `sent_ns`. The receiver knows
 * when both sides were there and books for both. A sender whose message does not fit into the
 * channel waits for the receiver; shorter messages are copied and forgotten, as MPI's eager
 * messages are. */
DTRAIN__PRIVATE bool dtrain__message_due(const dtrain__engine *comm, dtrain__work *work,
                                         uint64_t sent_ns)
{
    const uint64_t start = sent_ns > work->shown.started_ns ? sent_ns : work->shown.started_ns;
    const double bytes = (double)work->what.count * (double)dtrain_dtype_bytes(work->what.dtype);
    if (!dtrain__message_crosses(comm, work)) return true;
    if (!work->due_ns)
        work->due_ns =
            dtrain__book_both(comm->base.world, dtrain__emulated_node(comm, work->what.root), bytes,
                              dtrain__emulated_node(comm, comm->base.rank), bytes, start, 1);
    return dtrain__now_ns() >= work->due_ns;
}

/* A wait of an emulated world. Ranks that have moved something lately yield, as ever. When nothing
 * moves they sleep, 0.1 ms at most: an operation may end that much late, and less than 0.1 ms ahead
 * of a due time they yield again, for the kernel's timers come some 50 us late. */
DTRAIN__PRIVATE dtrain_result dtrain__emulated_turn(dtrain_world *world, dtrain__wait *wait)
{
    const uint64_t now = dtrain__now_ns(), longest = 100000, early = 60000;
    uint64_t nearest = UINT64_MAX, moves = 0;
    struct timespec nap;
    for (const dtrain__engine *comm = world->comms; comm; comm = comm->next)
        for (const dtrain__work *work = comm->queue; work; work = work->next) {
            moves += work->sequence + (uint64_t)work->state + work->steps;
            if (work->due_ns > now && work->due_ns < nearest) nearest = work->due_ns;
        }
    if (moves != world->emulated_moves) wait->yields = 0;
    world->emulated_moves = moves;
    const uint64_t left = nearest == UINT64_MAX ? longest : nearest - now;
    if (wait->yields < 2 * DTRAIN__YIELDS_PER_POLL || left < early + 20000)
        return dtrain__wait_turn(world, wait);
    nap.tv_sec = 0;
    nap.tv_nsec = (long)(left - early < longest ? left - early : longest);
    nanosleep(&nap, NULL);
    return dtrain__wait_poll(world, wait);
}
