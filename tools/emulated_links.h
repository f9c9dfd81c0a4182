/* emulated_links.h: the ranks of one machine as a cluster, for measuring and teaching: consecutive ranks form nodes,
 * and what passes between nodes takes the time that a link would. It is a transport (dtrain_transport_ops) around the
 * local one: data still goes through shared memory, ranks wait without using the processor, and inside a node nothing
 * is slowed.
 *
 *     dtrain_launch_desc desc = ...;
 *     emulate_links(&desc, 4, 10, 50);       nodes of 4 ranks, 10 Gb/s and 50 us between them
 *     dtrain_launch(&desc, rank_main, ...);
 *
 * Every node has one full-duplex link, which its ranks share, first come, first served. A collective costs the latency
 * for each of its rounds and, on each link, the bytes that dtrain's MPI communicator would move over it. This is what a
 * rank sends to and receives from other nodes: n ranks, a of them on other nodes, N nodes, B bytes:
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
 * Headers are not counted: TCP over Ethernet carries 0.94 of the link's nominal rate as data.
 *
 * A node has two lanes, out and in; a lane is the time until which it is busy. When all ranks have shown an operation,
 * each rank books its bytes on the lanes of its node, which moves that time on. A transfer begins when the last rank
 * has started the operation, not when a rank advances it: so links work while ranks compute. A rank whose own
 * transfers are over says so; when all have, the operation is done. Waits notice that some 0.1 ms late at most.
 * timeout_ms must be longer than the slowest transfer with all that is queued before it. dtrain_world_all_gather and
 * dtrain_launch cost nothing. Congestion inside a switch, loss of packets and the processor time that real network
 * stacks take are not emulated. */
#ifndef EMULATED_LINKS_H
#define EMULATED_LINKS_H

#include "dtrain.h"
#include <stdio.h>
#include <string.h>
#include <time.h>

enum {
    LINKS_SLOTS = 2 * DTRAIN_WINDOW,
    LINKS_LETTERS = 16,         /* of one rank to another: sent, and not taken */
    LINKS_EAGER_BYTES = 1 << 17 /* a longer send waits for its receiver, as in MPI */
};

static struct {
    int node_ranks;
    double gigabits_per_second, latency_us;
    const dtrain_comm_ops *local;
    dtrain_comm_ops ops;
} emulated_links;

/* What one rank shows of a communicator to the others, in memory that they share; only the lanes are written by all. */
typedef struct links_part {
    int64_t inner; /* address of the local transport */
    uint64_t departed;
    struct links_part *next; /* among this rank's retired ones */
    size_t size;
    uint64_t lanes[DTRAIN_MAX_RANKS][2]; /* of rank 0 of the world: each node's, out and in */
    uint64_t started_ns[LINKS_SLOTS],
        over[LINKS_SLOTS]; /* of collective s: when; s once its transfers are over */
    uint64_t sent_ns[DTRAIN_MAX_RANKS][LINKS_LETTERS];
    uint64_t taken[DTRAIN_MAX_RANKS]; /* messages from each rank */
} links_part;

/* Follows the local transport's struct. */
typedef struct links_comm {
    links_part *parts[DTRAIN_MAX_RANKS];
    links_part *own;
    uint64_t sent[DTRAIN_MAX_RANKS]; /* messages to each rank */
    /* of the world's communicator only: */
    links_part *retired;
    const dtrain_comm *polled; /* in the turns of this wait, in which nothing has moved: */
    uint64_t moves, turns, next_ns;
} links_comm;

typedef struct links_work {
    bool begun, moved, over;
    uint64_t started_ns, due_ns; /* due 0: nothing crosses nodes */
    uint64_t number;             /* of a message in its direction between two ranks */
} links_work;

static size_t links_behind(size_t bytes) { return (bytes + 15) / 16 * 16; }
static links_comm *links_of(const dtrain_comm *comm)
{
    return (links_comm *)((uintptr_t)comm +
                          links_behind(emulated_links.local->transport->comm_bytes));
}
static links_work *links_work_of(const dtrain_transport_work *work)
{
    return (links_work *)((uintptr_t)work +
                          links_behind(emulated_links.local->transport->work_bytes));
}
static const dtrain_transport_ops *links_inner(void) { return emulated_links.local->transport; }
static links_comm *links_world(const dtrain_comm *comm)
{
    return links_of(comm->number ? dtrain_world_comm(comm->world) : comm);
}

static uint64_t links_load(const uint64_t *at) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }
static void links_store(uint64_t *at, uint64_t value)
{
    __atomic_store_n(at, value, __ATOMIC_RELEASE);
}
static uint64_t links_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* ---- Booking ---- */

static int links_node(const dtrain_comm *comm, int rank)
{
    return comm->world_ranks[rank] / emulated_links.node_ranks;
}

/* Book bytes on a lane, out of a node (0) or into it (1), after those that are booked; return the time at which they
 * have passed. */
static uint64_t links_book_lane(const dtrain_comm *comm, int node, int lane, uint64_t start,
                                double bytes)
{
    uint64_t *busy = &links_world(comm)->parts[0]->lanes[node][lane];
    const double ns = 8 * bytes / emulated_links.gigabits_per_second; /* Gb/s = bits a ns */
    const uint64_t length = ns < 1e18 ? (uint64_t)ns + 1 : (uint64_t)1000000000000000000u;
    uint64_t was = links_load(busy), end;
    if (!(bytes > 0)) return start;
    do {
        end = was > start ? was : start;
        end = end <= UINT64_MAX / 2 ? end + length : end;
    } while (
        !__atomic_compare_exchange_n(busy, &was, end, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE));
    return end;
}

/* Book on the lane out of one node and the lane into another; return the time at which both transfers are over. */
static uint64_t links_book_both(const dtrain_comm *comm, int out_node, double out, int in_node,
                                double in, uint64_t start, uint32_t rounds)
{
    const uint64_t sent = links_book_lane(comm, out_node, 0, start, out);
    const uint64_t received = links_book_lane(comm, in_node, 1, start, in);
    return (sent > received ? sent : received) +
           (uint64_t)(1e3 * emulated_links.latency_us * (double)rounds) + 1;
}

/* Count the bytes that a rank of another node is sent, in anything but a broadcast: parts and results, or the inputs of
 * a small operation. */
static double links_bytes_to(const dtrain_comm *comm, const dtrain_transport_work *work, int to)
{
    const dtrain_collective *what = &work->what;
    const double bytes = (double)what->count * (double)dtrain_dtype_bytes(what->dtype);
    const bool reduces = what->kind == DTRAIN_COLLECTIVE_REDUCE;
    const bool gets = !reduces || what->root == to;
    if (!reduces && what->kind != DTRAIN_COLLECTIVE_ALL_REDUCE) return bytes;
    if (work->small) return gets ? bytes : 0;
    return (gets ? 2 : 1) * bytes / comm->size;
}

/* Book this rank's transfers of a collective that all ranks have shown. */
static void links_book(const dtrain_comm *comm, const dtrain_transport_work *work)
{
    const dtrain_collective *what = &work->what;
    const int rank = comm->rank, own = links_node(comm, rank);
    const double bytes = (double)what->count * (double)dtrain_dtype_bytes(what->dtype);
    bool known[DTRAIN_MAX_RANKS], first = false; /* this rank is the first one of its node */
    double out = 0, in = 0;
    int nodes = 0;
    uint32_t rounds = 1;
    uint64_t start = 0; /* of the rank that started last */
    memset(known, 0, sizeof known);
    for (int i = 0; i < comm->size; i++) {
        const int node = links_node(comm, i);
        const uint64_t started = links_of(comm)->parts[i]->started_ns[work->sequence % LINKS_SLOTS];
        if (started > start) start = started;
        if (i == rank) first = !known[node];
        nodes += !known[node];
        known[node] = true;
        if (node == own) continue;
        out += links_bytes_to(comm, work, i);
        in += links_bytes_to(comm, work, rank);
    }
    if (nodes == 1) return;
    if (what->kind == DTRAIN_COLLECTIVE_BROADCAST) {
        out = what->root == rank ? (double)(nodes - 1) * bytes : 0;
        in = first && own != links_node(comm, what->root) ? bytes : 0;
    }
    if (what->kind == DTRAIN_COLLECTIVE_ALL_REDUCE || what->kind == DTRAIN_COLLECTIVE_REDUCE)
        rounds = work->small ? 1 : 2;
    while (what->kind == DTRAIN_COLLECTIVE_BARRIER && 1 << rounds < nodes) rounds++;
    links_work_of(work)->due_ns = links_book_both(comm, own, out, own, in, start, rounds);
}

/* Say whether a transfer is over; if not, remember when to look again. */
static bool links_due(const dtrain_comm *comm, const links_work *own)
{
    links_comm *world = links_world(comm);
    if (links_now() >= own->due_ns) return true;
    if (own->due_ns < world->next_ns) world->next_ns = own->due_ns;
    return false;
}

/* ---- Operations ---- */

static void links_show(dtrain_comm *comm, dtrain_transport_work *work)
{
    links_work_of(work)->started_ns = links_now();
    links_of(comm)->own->started_ns[work->sequence % LINKS_SLOTS] = links_work_of(work)->started_ns;
    links_inner()->show(comm, work);
}

static const dtrain_call *links_heard(const dtrain_comm *comm, uint64_t sequence, int rank)
{
    return links_inner()->heard(comm, sequence, rank);
}

/* A send is done at once if it is short, else when the receiver has it. */
static bool links_send(dtrain_comm *comm, dtrain_transport_work *work)
{
    links_comm *links = links_of(comm);
    links_work *own = links_work_of(work);
    const int to = work->what.root;
    const uint64_t *taken = &links->parts[to]->taken[comm->rank];
    if (!own->begun) {
        if (links->sent[to] - links_load(taken) >= LINKS_LETTERS) return false;
        own->begun = true;
        own->started_ns = links_now();
        own->number = links->sent[to]++;
        links->own->sent_ns[to][own->number % LINKS_LETTERS] = own->started_ns;
    }
    if (!own->moved) own->moved = links_inner()->move(comm, work);
    if (!own->moved || work->send_bytes <= LINKS_EAGER_BYTES ||
        links_node(comm, to) == links_node(comm, comm->rank))
        return own->moved;
    work->posted = true;
    return links_load(taken) > own->number;
}

/* The receiver knows when both sides have started, and books for both. */
static bool links_receive(dtrain_comm *comm, dtrain_transport_work *work)
{
    links_comm *links = links_of(comm);
    links_work *own = links_work_of(work);
    const int from = work->what.root, node = links_node(comm, from);
    uint64_t *taken = &links->own->taken[from];
    if (!own->begun) own->started_ns = links_now();
    own->begun = true;
    if (work->agreed && !own->due_ns && node != links_node(comm, comm->rank)) {
        const uint64_t sent = links->parts[from]->sent_ns[comm->rank][*taken % LINKS_LETTERS];
        own->due_ns = links_book_both(comm, node, (double)work->recv_bytes,
                                      links_node(comm, comm->rank), (double)work->recv_bytes,
                                      sent > own->started_ns ? sent : own->started_ns, 1);
    }
    if (!links_due(comm, own) || !links_inner()->move(comm, work)) return false;
    links_store(taken, *taken + 1);
    return true;
}

static bool links_move(dtrain_comm *comm, dtrain_transport_work *work)
{
    links_comm *links = links_of(comm);
    links_work *own = links_work_of(work);
    if (work->what.kind == DTRAIN_COLLECTIVE_SEND) return links_send(comm, work);
    if (work->what.kind == DTRAIN_COLLECTIVE_RECV) return links_receive(comm, work);
    if (!own->begun) links_book(comm, work); /* in the order of the collectives */
    own->begun = true;
    if (!own->moved) own->moved = links_inner()->move(comm, work);
    if (!own->moved || !own->due_ns) return own->moved;
    if (!links_due(comm, own)) return false;
    if (!own->over) {
        own->over = true;
        ++*comm->moves;
        links_store(&links->own->over[work->sequence % LINKS_SLOTS], work->sequence);
    }
    for (int i = 0; i < comm->size; i++)
        if (links_load(&links->parts[i]->over[work->sequence % LINKS_SLOTS]) < work->sequence)
            return false;
    return true;
}

/* While this rank's own transfer is under way, it waits for no rank. */
static bool links_lags(const dtrain_comm *comm, const dtrain_transport_work *work, int rank)
{
    const links_work *own = links_work_of(work);
    if (!work->sequence || !own->moved) return links_inner()->lags(comm, work, rank);
    return own->over &&
           links_load(&links_of(comm)->parts[rank]->over[work->sequence % LINKS_SLOTS]) <
               work->sequence;
}

/* Called in each turn of a wait. When nothing has moved for a while, sleep, 0.1 ms at most, by which an operation may
 * end late; less than 0.08 ms before a due time do not, as the kernel is some 50 us late. */
static void links_poll(dtrain_comm *comm)
{
    links_comm *world = links_world(comm);
    const uint64_t longest = 100000, early = 60000;
    if (links_inner()->poll) links_inner()->poll(comm);
    if (*comm->moves != world->moves) {
        world->moves = *comm->moves;
        world->turns = 0;
        world->polled = comm; /* not the others of the same turn */
    }
    if (comm != world->polled) return;
    const uint64_t next = world->next_ns, now = links_now(),
                   left = next > now ? next - now : longest;
    world->next_ns = UINT64_MAX;
    if (++world->turns < 64 || left < early + 20000) return;
    const struct timespec nap = {0, (long)(left - early < longest ? left - early : longest)};
    nanosleep(&nap, NULL);
}

/* ---- Memory, making and ending a communicator ---- */

static dtrain_result links_map(dtrain_comm *comm, size_t bytes, void **out)
{
    return links_inner()->map(comm, bytes, out);
}
static void links_unmap(dtrain_comm *comm, void *memory, size_t bytes)
{
    links_inner()->unmap(comm, memory, bytes);
}

/* Free what belonged to communicators that all their ranks have left. */
static void links_sweep(dtrain_comm *comm)
{
    links_part **at = &links_world(comm)->retired;
    while (*at) {
        links_part *part = *at;
        if (links_load(&part->departed) < part->size) {
            at = &part->next;
            continue;
        }
        *at = part->next;
        links_unmap(comm, part, sizeof *part);
    }
}

static dtrain_result links_make(dtrain_comm *comm, int64_t *address)
{
    int64_t inner;
    void *part;
    dtrain_result result = links_inner()->make(comm, &inner);
    if (result != DTRAIN_OK) return result;
    links_sweep(comm);
    result = links_map(comm, sizeof(links_part), &part);
    if (result != DTRAIN_OK) return result;
    links_of(comm)->own = (links_part *)part;
    links_of(comm)->own->inner = inner;
    links_of(comm)->own->size = (size_t)comm->size;
    *address = (int64_t)(intptr_t)part;
    return DTRAIN_OK;
}

static void *links_join(dtrain_comm *comm, const int64_t *addresses)
{
    int64_t inner[DTRAIN_MAX_RANKS];
    for (int i = 0; i < comm->size; i++) {
        links_of(comm)->parts[i] = (links_part *)(intptr_t)addresses[i];
        inner[i] = links_of(comm)->parts[i]->inner;
    }
    return links_inner()->join(comm, inner);
}

static void links_release(dtrain_comm *comm, bool joined)
{
    links_comm *links = links_of(comm);
    if (links->own && !joined) links_unmap(comm, links->own, sizeof *links->own);
    if (links->own && joined && comm->number) { /* the world's stays until the world ends */
        links->own->next = links_world(comm)->retired;
        links_world(comm)->retired = links->own;
        for (int i = 0; i < comm->size; i++)
            __atomic_add_fetch(&links->parts[i]->departed, 1, __ATOMIC_ACQ_REL);
    }
    links_inner()->release(comm, joined);
}

/* Make the world's communicator, if all ranks ask for the same links. */
static dtrain_result links_create(dtrain_world *world, dtrain_comm **out)
{
    struct settings {
        double node_ranks, gigabits_per_second, latency_us;
    } own = {(double)emulated_links.node_ranks, emulated_links.gigabits_per_second,
             emulated_links.latency_us};
    struct settings all[DTRAIN_MAX_RANKS];
    const dtrain_result result = dtrain_world_all_gather(world, &own, sizeof own, all);
    if (result != DTRAIN_OK) return result;
    for (int i = 0; i < dtrain_world_size(world); i++) {
        char text[200];
        if (memcmp(&all[i], &own, sizeof own) == 0) continue;
        snprintf(text, sizeof text,
                 "emulated links differ: rank %d has nodes of %g ranks, %g Gb/s and %g us, rank %d "
                 "%g, %g and %g",
                 i, all[i].node_ranks, all[i].gigabits_per_second, all[i].latency_us,
                 dtrain_world_rank(world), own.node_ranks, own.gigabits_per_second, own.latency_us);
        dtrain_world_abort(world, DTRAIN_ERROR_MISMATCH, text);
        return dtrain_world_poll(world);
    }
    return emulated_links.local->create(world, out);
}

/* Let a launch emulate links between nodes of node_ranks ranks, which must divide the number of ranks. */
static void emulate_links(dtrain_launch_desc *desc, int node_ranks, double gigabits_per_second,
                          double latency_us)
{
    static dtrain_transport_ops transport;
    dtrain_transport_ops table = {
        0,           0,          0,           links_make, links_join, links_release, links_map,
        links_unmap, links_show, links_heard, links_move, links_lags, links_poll};
    (void)dtrain_comm_ops_by_name("local", &emulated_links.local);
    table.comm_bytes = links_behind(links_inner()->comm_bytes) + sizeof(links_comm);
    table.work_bytes = links_behind(links_inner()->work_bytes) + sizeof(links_work);
    table.grace_ns = links_inner()->grace_ns;
    transport = table;
    emulated_links.node_ranks = node_ranks;
    emulated_links.gigabits_per_second = gigabits_per_second;
    emulated_links.latency_us = latency_us;
    emulated_links.ops = *emulated_links.local;
    emulated_links.ops.create = links_create;
    emulated_links.ops.transport = &transport;
    desc->options.node_ranks = (uint32_t)node_ranks;
    desc->comm_ops = &emulated_links.ops;
}

#endif
