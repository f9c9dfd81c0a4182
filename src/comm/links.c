/* Emulated links
 *
 * Data moves as without emulation; an operation is only done later. This is what a rank sends to
 * and receives from other nodes: n ranks, a of them on other nodes, N nodes, B bytes:
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
 * A node has two lanes, out and in; a lane is the time until which it is busy. When all ranks have
 * shown an operation, each rank books its bytes on the lanes of its node, which moves that time on;
 * operations of one communicator are booked in the order in which they were started. A transfer
 * begins when the last rank has started the operation, not when a rank advances it: so links work
 * while ranks compute. There is one stage more than without emulation, which a rank reaches when
 * its own transfers are due; when all have reached it, every transfer is over. */

#include "core/platform_internal.h"
#include "core/dtype.h"
#include "core/result.h"
#include "world/world.h"
#include "world/world_internal.h"
#include "comm/backend.h"
#include "comm/comm.h"
#include "comm/comm_internal.h"
#include "comm/engine_internal.h"

/* Find the node that a rank of the communicator is on. */
static int dtrain__emulated_node(const dtrain__engine *comm, int rank)
{
    return comm->base.world_ranks[rank] / dtrain__node_ranks(comm->base.world);
}

/* Count the bytes that a rank of another node is sent, in anything but a broadcast: parts and
 * results, or the inputs of a small operation. */
static double dtrain__bytes_to(const dtrain__engine *comm, const dtrain__work *work, int to)
{
    const dtrain_collective *what = &work->op.what;
    const double bytes = (double)what->count * (double)dtrain_dtype_bytes(what->dtype);
    if (!dtrain__kind_of(what->kind)->reduces || dtrain__kind_of(what->kind)->cuts) return bytes;
    if (work->op.small) return dtrain__gets(what, to) ? bytes : 0;
    return (dtrain__gets(what, to) ? 2 : 1) * bytes / comm->base.size;
}

/* Book bytes on a lane, out of a node (0) or into it (1), after those that are booked; return the
 * time at which they have passed. */
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

/* Book on the lane out of one node and the lane into another; return the time at which both
 * transfers are over. */
static uint64_t dtrain__book_both(const dtrain_world *world, int out_node, double out, int in_node,
                                  double in, uint64_t start, uint32_t rounds)
{
    const uint64_t sent = dtrain__book_lane(world, out_node, 0, start, out);
    const uint64_t received = dtrain__book_lane(world, in_node, 1, start, in);
    return (sent > received ? sent : received) +
           (uint64_t)(1e3 * world->emulation.latency_us * (double)rounds) + 1;
}

/* Book this rank's transfers of a collective that all ranks have shown. */
DTRAIN__PRIVATE void dtrain__book_collective(const dtrain__engine *comm, dtrain__work *work)
{
    const dtrain_collective *what = &work->op.what;
    const int rank = comm->base.rank, own = dtrain__emulated_node(comm, rank);
    const double bytes = (double)what->count * (double)dtrain_dtype_bytes(what->dtype);
    bool known[DTRAIN_MAX_RANKS], first = false; /* this rank is the first one of its node */
    double out = 0, in = 0;
    int nodes = 0;
    uint32_t rounds = 1;
    memset(known, 0, sizeof known);
    for (int i = 0; i < comm->base.size; i++) {
        const int node = dtrain__emulated_node(comm, i);
        if (i == rank) first = !known[node];
        nodes += !known[node];
        known[node] = true;
        if (node == own) continue;
        out += dtrain__bytes_to(comm, work, i);
        in += dtrain__bytes_to(comm, work, rank);
    }
    if (nodes == 1) return;
    if (what->kind == DTRAIN_COLLECTIVE_BROADCAST) {
        out = what->root == rank ? (double)(nodes - 1) * bytes : 0;
        in = first && own != dtrain__emulated_node(comm, what->root) ? bytes : 0;
    }
    if (what->kind == DTRAIN_COLLECTIVE_ALL_REDUCE || what->kind == DTRAIN_COLLECTIVE_REDUCE)
        rounds = work->op.small ? 1 : 2;
    while (what->kind == DTRAIN_COLLECTIVE_BARRIER && 1 << rounds < nodes) rounds++;
    work->due_ns =
        dtrain__book_both(comm->base.world, own, out, own, in, work->last_started_ns, rounds);
}

DTRAIN__PRIVATE bool dtrain__message_crosses(const dtrain__engine *comm, const dtrain__work *work)
{
    return dtrain__node_ranks(comm->base.world) &&
           dtrain__emulated_node(comm, work->op.what.root) !=
               dtrain__emulated_node(comm, comm->base.rank);
}

/* Say whether a receiver may take the end of a message that was sent at `sent_ns`. The receiver
 * knows when both sides had started and books for both. A sender waits for the receiver if its
 * message does not fit into the channel; a shorter send is done at once, as in MPI. */
DTRAIN__PRIVATE bool dtrain__message_due(const dtrain__engine *comm, dtrain__work *work,
                                         uint64_t sent_ns)
{
    const uint64_t start = sent_ns > work->op.call.started_ns ? sent_ns : work->op.call.started_ns;
    const double bytes =
        (double)work->op.what.count * (double)dtrain_dtype_bytes(work->op.what.dtype);
    if (!dtrain__message_crosses(comm, work)) return true;
    if (!work->due_ns)
        work->due_ns =
            dtrain__book_both(comm->base.world, dtrain__emulated_node(comm, work->op.what.root),
                              bytes, dtrain__emulated_node(comm, comm->base.rank), bytes, start, 1);
    return dtrain__now_ns() >= work->due_ns;
}

/* Take a turn of a wait in an emulated world. Ranks that have moved something lately yield, as
 * without emulation. When nothing moves they sleep, 0.1 ms at most, by which an operation may end
 * late; less than 0.08 ms before a due time they yield, as the kernel is some 50 us late. */
DTRAIN__PRIVATE dtrain_result dtrain__emulated_turn(dtrain_world *world, dtrain__wait *wait)
{
    const uint64_t now = dtrain__now_ns(), longest = 100000, early = 60000;
    uint64_t nearest = UINT64_MAX;
    for (const dtrain__engine *comm = world->comms; comm; comm = comm->next)
        for (const dtrain__work *work = comm->queue; work; work = work->next)
            if (work->due_ns > now && work->due_ns < nearest) nearest = work->due_ns;
    if (world->moves != wait->moves) wait->yields = 0;
    const uint64_t left = nearest == UINT64_MAX ? longest : nearest - now;
    if (wait->yields < 2 * DTRAIN__YIELDS_PER_POLL || left < early + 20000)
        return dtrain__wait_turn(world, wait);
    const struct timespec nap = {0, (long)(left - early < longest ? left - early : longest)};
    nanosleep(&nap, NULL);
    return dtrain__wait_poll(world, wait);
}
