/* Measuring links
 *
 *     schedule   the neighbours of the ring, in phases in which no node has two pairs at work: what
 *                is measured is a link, and not how pairs share it
 *     pair       the first rank of a pair leads: it says by a header how large the next messages
 *                are and how many, sends them, and receives them back; a header of 0 ends its turn
 *     phase      ends with an all-gather, by which all ranks know how much time is left
 *     reduce     all-reduces of growing size, as long as the next one fits in what is left
 *
 * Sizes grow until a message takes a good part of its pair's share of the time, so that slow links
 * see small messages and fast ones large: a slow link is measured as exactly, because what counts
 * is the time of a message over that of an empty one. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/log.h"
#include "core/result.h"
#include "world/world.h"
#include "world/world_internal.h"
#include "comm/comm.h"
#include "comm/probe.h"
#include "device/backend.h"
#include "device/device.h"

enum {
    DTRAIN__PROBE_PHASES = 64,
    DTRAIN__PROBE_FIRST = 1024,   /* numbers: the smallest message whose bytes are measured */
    DTRAIN__PROBE_MOST = 4 << 20, /* and the largest: 16 MiB */
    DTRAIN__PROBE_PINGS = 8
};
#define DTRAIN__PROBE_PAIRS_SHARE 0.6 /* of the time; the rest is for all-reduces */
#define DTRAIN__PROBE_LIMIT 0.7       /* of the ideal gain: below it the links are to blame */

/* What one pair has measured: a record of its leader. */
typedef struct dtrain__probe_pair {
    double latency, bytes_per_second; /* seconds; 0: not measured */
    double spent;                     /* seconds since the probe began */
} dtrain__probe_pair;

typedef struct dtrain__probe {
    dtrain_world *world;
    dtrain_comm *comm;
    float *buffer; /* (PROBE_MOST) */
    double start, budget;
    int nodes[DTRAIN_MAX_RANKS];
    int phase_of[DTRAIN_MAX_RANKS]; /* of the pair that a rank leads; -1: none */
    int phases;
    dtrain__probe_pair all[DTRAIN_MAX_RANKS];
} dtrain__probe;

static double dtrain__probe_spent(const dtrain__probe *p) { return dtrain_seconds() - p->start; }

/* ---- The schedule -----------------------------------------------------------------------------*/

/* Give every pair (rank, its neighbour) the first phase in which both nodes are idle, those of two
 * nodes before those of one: they matter more. Pairs that find none are left out; with ranks dealt
 * to nodes in turn there may be too many. */
static void dtrain__probe_schedule(dtrain__probe *p)
{
    unsigned char busy[DTRAIN__PROBE_PHASES][DTRAIN_MAX_RANKS];
    const int size = p->world->size, pairs = size == 2 ? 1 : size;
    memset(busy, 0, sizeof busy);
    p->phases = 0;
    for (int i = 0; i < size; i++) p->phase_of[i] = -1;
    for (int i = 0; i < 2 * pairs; i++) {
        const int rank = i % pairs, from = p->nodes[rank], to = p->nodes[(rank + 1) % size];
        int phase = 0;
        if ((from == to) != (i >= pairs)) continue;
        while (phase < DTRAIN__PROBE_PHASES && (busy[phase][from] || busy[phase][to])) phase++;
        if (phase == DTRAIN__PROBE_PHASES) continue;
        busy[phase][from] = busy[phase][to] = 1;
        p->phase_of[rank] = phase;
        if (phase >= p->phases) p->phases = phase + 1;
    }
}

/* ---- Pairs ------------------------------------------------------------------------------------*/

/* Wait for the device: with its memory, an operation that is done is one that is in its queue. */
static dtrain_result dtrain__probe_wait(dtrain__probe *p)
{
    return p->world->device->ops->synchronize(p->world->device);
}

static dtrain_result dtrain__probe_send(dtrain__probe *p, size_t count, int peer)
{
    DTRAIN__TRY(dtrain_send(p->comm, p->buffer, count, DTRAIN_DTYPE_F32, peer, NULL));
    return dtrain__probe_wait(p);
}

static dtrain_result dtrain__probe_recv(dtrain__probe *p, size_t count, int peer)
{
    DTRAIN__TRY(dtrain_recv(p->comm, p->buffer, count, DTRAIN_DTYPE_F32, peer, NULL));
    return dtrain__probe_wait(p);
}

/* Send messages to and fro, `repeats` times; *seconds: one way, of the shortest. The peer is told
 * how many of which size, and says that it is ready: where a send returns before its message has
 * arrived, the header would be measured too. */
static dtrain_result dtrain__probe_ping(dtrain__probe *p, size_t count, int repeats, int peer,
                                        double *seconds)
{
    int64_t header[2] = {(int64_t)count, repeats};
    DTRAIN__TRY(dtrain_send(p->comm, header, 2, DTRAIN_DTYPE_I64, peer, NULL));
    DTRAIN__TRY(dtrain_recv(p->comm, header, 2, DTRAIN_DTYPE_I64, peer, NULL));
    for (int i = 0; i < repeats; i++) {
        const double start = dtrain_seconds();
        DTRAIN__TRY(dtrain__probe_send(p, count, peer));
        DTRAIN__TRY(dtrain__probe_recv(p, count, peer));
        const double half = 0.5 * (dtrain_seconds() - start);
        if (!i || half < *seconds) *seconds = half;
    }
    return DTRAIN_OK;
}

/* Answer the leader of a pair until its turn ends. */
static dtrain_result dtrain__probe_answer(dtrain__probe *p, int peer)
{
    for (;;) {
        int64_t header[2] = {0, 0};
        DTRAIN__TRY(dtrain_recv(p->comm, header, 2, DTRAIN_DTYPE_I64, peer, NULL));
        if (!header[0]) return DTRAIN_OK;
        DTRAIN__TRY(dtrain_send(p->comm, header, 2, DTRAIN_DTYPE_I64, peer, NULL));
        for (int64_t i = 0; i < header[1]; i++) {
            DTRAIN__TRY(dtrain__probe_recv(p, (size_t)header[0], peer));
            DTRAIN__TRY(dtrain__probe_send(p, (size_t)header[0], peer));
        }
    }
}

/* Return what the bytes of a message took, over an empty one. Noise must not look like no time. */
static double dtrain__probe_over(double seconds, double empty)
{
    const double least = empty / 20;
    return seconds - empty > least ? seconds - empty : least;
}

/* Lead a pair for at most `share` seconds: the shortest empty message, then larger ones, twice each
 * where there is time, because the first may have met cold memory. One empty message is sent
 * whatever it takes. Bytes that take less than an eighth of the latency say nothing of the link. */
static dtrain_result dtrain__probe_lead(dtrain__probe *p, int peer, double share,
                                        dtrain__probe_pair *pair)
{
    const double end = dtrain_seconds() + share;
    const int64_t over[2] = {0, 0};
    double seconds = 0, empty = 0, moved;
    DTRAIN__TRY(dtrain__probe_ping(p, 1, 1, peer, &empty));
    const double fit = share / 4 / (2 * empty) - 1; /* beside the header's way to and fro */
    const int most = DTRAIN__PROBE_PINGS, repeats = fit < most ? (int)fit : most;
    if (repeats > 0) DTRAIN__TRY(dtrain__probe_ping(p, 1, repeats, peer, &seconds));
    if (repeats > 0 && seconds < empty) empty = seconds;
    pair->latency = empty;
    moved = empty / 8;
    for (size_t count = DTRAIN__PROBE_FIRST; count <= DTRAIN__PROBE_MOST; count *= 8) {
        const double left = end - dtrain_seconds(), once = 4 * empty + 16 * moved;
        if (once > left) break;
        const int times = once + 2 * empty + 16 * moved > left ? 1 : 2;
        DTRAIN__TRY(dtrain__probe_ping(p, count, times, peer, &seconds));
        moved = dtrain__probe_over(seconds, empty);
        if (moved > empty / 8) pair->bytes_per_second = (double)count * sizeof(float) / moved;
    }
    return dtrain_send(p->comm, over, 2, DTRAIN_DTYPE_I64, peer, NULL);
}

/* Tell all ranks what this one has measured and how late it is; *spent: the latest. */
static dtrain_result dtrain__probe_gather(dtrain__probe *p, dtrain__probe_pair *mine, double *spent)
{
    mine->spent = dtrain__probe_spent(p);
    DTRAIN__TRY(dtrain_world_all_gather(p->world, mine, sizeof *mine, p->all));
    *spent = 0;
    for (int i = 0; i < p->world->size; i++)
        if (p->all[i].spent > *spent) *spent = p->all[i].spent;
    return DTRAIN_OK;
}

/* Let all pairs have their turns: the first, and those of which the shortest still fits in. */
static dtrain_result dtrain__probe_pairs(dtrain__probe *p, double *spent)
{
    const int rank = p->world->rank, size = p->world->size;
    const int before = (rank + size - 1) % size, behind = (rank + 1) % size;
    const double most = DTRAIN__PROBE_PAIRS_SHARE * p->budget;
    dtrain__probe_pair mine;
    double latest = 0;
    memset(&mine, 0, sizeof mine);
    DTRAIN__TRY(dtrain__probe_gather(p, &mine, spent)); /* all begin together */
    for (int phase = 0; phase < p->phases && (!phase || *spent + 5 * latest < most); phase++) {
        const double share = (most - *spent) / (p->phases - phase);
        if (p->phase_of[rank] == phase) DTRAIN__TRY(dtrain__probe_lead(p, behind, share, &mine));
        else if (p->phase_of[before] == phase) DTRAIN__TRY(dtrain__probe_answer(p, before));
        DTRAIN__TRY(dtrain__probe_gather(p, &mine, spent));
        for (int i = 0; i < size; i++)
            if (p->all[i].latency > latest) latest = p->all[i].latency;
    }
    return DTRAIN_OK;
}

/* ---- All-reduces ------------------------------------------------------------------------------*/

/* All-reduce this many numbers; *seconds: on the slowest rank. */
static dtrain_result dtrain__probe_reduce_once(dtrain__probe *p, size_t count, double *seconds,
                                               double *spent)
{
    dtrain__probe_pair mine;
    memset(&mine, 0, sizeof mine);
    DTRAIN__TRY(dtrain_world_all_gather(p->world, NULL, 0, NULL));
    const double start = dtrain_seconds();
    DTRAIN__TRY(dtrain_all_reduce(p->comm, p->buffer, p->buffer, count, DTRAIN_DTYPE_F32,
                                  DTRAIN_REDUCE_SUM, NULL));
    DTRAIN__TRY(dtrain__probe_wait(p));
    mine.latency = dtrain_seconds() - start;
    DTRAIN__TRY(dtrain__probe_gather(p, &mine, spent));
    *seconds = 0;
    for (int i = 0; i < p->world->size; i++)
        if (p->all[i].latency > *seconds) *seconds = p->all[i].latency;
    return DTRAIN_OK;
}

/* All ranks know the same times, so they agree on the next size without a word. Sizes start above
 * those that travel whole, without a reduce-scatter. */
static dtrain_result dtrain__probe_reduce(dtrain__probe *p, double spent, dtrain_probe_info *info)
{
    const int size = p->world->size;
    const double factor = 2.0 * (size - 1) / size;
    double empty = 0, seconds, best = 0;
    size_t count = 16 * DTRAIN__PROBE_FIRST;
    for (int i = 0; i < 4 && (!i || spent + 2 * empty < 0.8 * p->budget); i++) {
        DTRAIN__TRY(dtrain__probe_reduce_once(p, 1, &seconds, &spent));
        if (!i || seconds < empty) empty = seconds;
    }
    info->reduce_us = 1e6 * empty;
    for (int again = 0; count <= DTRAIN__PROBE_MOST;) {
        const double moved = best > 0 ? best : 2 * empty;
        if (spent + 2 * empty + (again ? 1 : 8) * moved > 0.95 * p->budget) break;
        DTRAIN__TRY(dtrain__probe_reduce_once(p, count, &seconds, &spent));
        const double over = dtrain__probe_over(seconds, empty);
        best = again && best < over ? best : over;
        info->reduce_bytes_per_second = factor * (double)count * sizeof(float) / best;
        again = !again;
        if (!again) count *= 8;
    }
    return DTRAIN_OK;
}

/* ---- Results ----------------------------------------------------------------------------------*/

/* Sort numbers, few of them, and return the one in the middle. */
static double dtrain__probe_median(double *values, int count)
{
    for (int i = 1; i < count; i++)
        for (int k = i; k > 0 && values[k] < values[k - 1]; k--) {
            const double swap = values[k];
            values[k] = values[k - 1];
            values[k - 1] = swap;
        }
    return count ? values[count / 2] : 0;
}

/* Sum up the pairs of one kind: on one node, or on two. */
static void dtrain__probe_sum(const dtrain__probe *p, const dtrain__probe_pair *pairs, bool between,
                              dtrain_probe_link *link)
{
    double latencies[DTRAIN_MAX_RANKS], speeds[DTRAIN_MAX_RANKS];
    const int size = p->world->size;
    int count = 0, measured = 0;
    memset(link, 0, sizeof *link);
    link->slow_rank = link->slow_peer = -1;
    for (int rank = 0; rank < size; rank++) {
        const dtrain__probe_pair *pair = &pairs[rank];
        const int peer = (rank + 1) % size;
        if (!(pair->latency > 0) || (p->nodes[rank] != p->nodes[peer]) != between) continue;
        const double latency_us = 1e6 * pair->latency, speed = pair->bytes_per_second;
        const bool slower = speed > 0 && (!measured || speed < link->worst_bytes_per_second);
        const bool later = latency_us > link->worst_latency_us;
        if (slower) link->worst_bytes_per_second = speed;
        if (slower || (!(speed > 0) && !measured && later)) {
            link->slow_rank = rank;
            link->slow_peer = peer;
        }
        if (later) link->worst_latency_us = latency_us;
        latencies[count++] = latency_us;
        if (speed > 0) speeds[measured++] = speed;
    }
    link->pair_count = (uint32_t)count;
    link->latency_us = dtrain__probe_median(latencies, count);
    link->bytes_per_second = dtrain__probe_median(speeds, measured);
}

static dtrain_result dtrain__probe_measure(dtrain__probe *p, dtrain_probe_info *info)
{
    dtrain_world *world = p->world;
    dtrain__probe_pair pairs[DTRAIN_MAX_RANKS];
    int counts[DTRAIN_MAX_RANKS] = {0};
    dtrain_world_info where;
    double spent = 0;
    dtrain_world_query(world, &where);
    DTRAIN__TRY(dtrain_world_all_gather(world, &where.node, sizeof where.node, p->nodes));
    info->size = world->size;
    info->node_count = where.node_count;
    for (int i = 0; i < world->size; i++)
        if (++counts[p->nodes[i]] > info->node_ranks) info->node_ranks = counts[p->nodes[i]];
    if (world->size > 1) {
        dtrain__probe_schedule(p);
        DTRAIN__TRY(dtrain__probe_pairs(p, &spent));
        memcpy(pairs, p->all, sizeof pairs);
        DTRAIN__TRY(dtrain__probe_reduce(p, spent, info));
        dtrain__probe_sum(p, pairs, false, &info->inside);
        dtrain__probe_sum(p, pairs, true, &info->between);
    }
    info->seconds = spent;
    return DTRAIN_OK;
}

DTRAIN_API dtrain_result dtrain_probe_links(dtrain_world *world, const dtrain_probe_desc *desc,
                                            dtrain_probe_info *info)
{
    if (!world || !info)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_probe_links: %s is NULL",
                           world ? "info" : "world");
    memset(info, 0, sizeof *info);
    DTRAIN__TRY(dtrain__world_check(world, "dtrain_probe_links"));
    const size_t bytes = DTRAIN__PROBE_MOST * sizeof(float);
    dtrain__probe *p =
        (dtrain__probe *)dtrain__alloc(&world->allocator, 1, sizeof *p, "a link probe");
    if (!p) return DTRAIN_ERROR_MEMORY;
    void *buffer = NULL;
    p->world = world;
    p->comm = dtrain_world_comm(world);
    p->start = dtrain_seconds();
    p->budget = desc && desc->budget_ms ? desc->budget_ms / 1e3 : 2;
    dtrain_result result = dtrain_comm_alloc(p->comm, bytes, &buffer);
    p->buffer = (float *)buffer;
    if (result == DTRAIN_OK) result = dtrain__probe_measure(p, info);
    if (result == DTRAIN_OK) info->seconds = dtrain__probe_spent(p);
    dtrain_comm_free(p->comm, buffer, bytes);
    dtrain__free(&world->allocator, p, 1, sizeof *p);
    return result;
}

/* ---- The forecast -----------------------------------------------------------------------------*/

/* The time of a step: compute, and what of the communication the backward does not hide. */
static double dtrain__forecast_step(double compute, double communication, double pieces)
{
    const double beyond = communication - 2.0 / 3.0 * compute, last = communication / pieces;
    return compute + (beyond > last ? beyond : last);
}

DTRAIN_API dtrain_result dtrain_probe_predict(const dtrain_probe_info *info,
                                              const dtrain_probe_step *step,
                                              dtrain_probe_forecast *forecast)
{
    if (!info || !step || !forecast || info->size < 1 || info->node_count < 1 ||
        !(step->compute_seconds > 0))
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_probe_predict: an argument is NULL, info is not of a probe, or "
                           "step.compute_seconds is %g, expected more than 0",
                           step ? step->compute_seconds : 0.0);
    const double pieces = step->collective_count ? step->collective_count : 1;
    const double compute = step->compute_seconds, bytes = (double)step->wire_bytes;
    const bool nodes = info->node_count > 1;
    const dtrain_probe_link *link = nodes ? &info->between : &info->inside;
    const double n = info->size, local = info->node_ranks;
    const double speed =
        info->reduce_bytes_per_second > 0 ? info->reduce_bytes_per_second : link->bytes_per_second;
    double alone = 0;
    memset(forecast, 0, sizeof *forecast);
    if (info->size > 1 && bytes > 0)
        forecast->communication_seconds =
            pieces * 1e-6 * info->reduce_us + (speed > 0 ? bytes / speed : 0);
    if (nodes && local > 1 && info->inside.bytes_per_second > 0) /* the ring of one node */
        alone = pieces * 2 * (local - 1) * 1e-6 * info->inside.latency_us +
                bytes * ((local - 1) / local) / ((n - 1) / n) / info->inside.bytes_per_second;
    forecast->step_seconds =
        dtrain__forecast_step(compute, forecast->communication_seconds, pieces);
    forecast->one_seconds = dtrain__forecast_step(compute, alone, pieces);
    forecast->ideal = nodes ? n / local : n;
    forecast->gain = forecast->ideal * forecast->one_seconds / forecast->step_seconds;
    forecast->limited = forecast->gain < DTRAIN__PROBE_LIMIT * forecast->ideal;
    const int used = snprintf(
        forecast->text, sizeof forecast->text,
        "%d %s: predicted x%.2f of one, link %.3g GB/s and %.3g us, slowest from rank %d to rank "
        "%d (%.3g GB/s); a step computes %.3g s and communicates %.3g s",
        nodes ? info->node_count : info->size,
        nodes            ? "nodes"
        : info->size > 1 ? "ranks"
                         : "rank",
        forecast->gain, 1e-9 * (link->bytes_per_second > 0 ? link->bytes_per_second : speed),
        link->latency_us, link->slow_rank, link->slow_peer, 1e-9 * link->worst_bytes_per_second,
        compute, forecast->communication_seconds);
    if (forecast->limited && used > 0 && (size_t)used < sizeof forecast->text)
        snprintf(forecast->text + used, sizeof forecast->text - (size_t)used, "; try %s",
                 nodes && local > 1 ? "hierarchical or top-k compression, or more micro-batches"
                                    : "top-k compression, or more micro-batches");
    return DTRAIN_OK;
}
