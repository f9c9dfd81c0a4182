/* probe.h: --probe-links: how fast are the links between ranks, and are they fast enough for what a step sends? Two
 * seconds at the start tell, before hours are spent on a run that two nodes make no faster. Include it behind dtrain.h.
 *
 * Pairs of neighbours in the ring of ranks exchange messages, no two of them on one node at a time, and then all ranks
 * all-reduce. A message of B bytes takes alpha + B / beta; alpha is the shortest half of a round trip, beta the slope
 * between the smallest and the largest message. An all-reduce among n ranks has its own two, with 2 (n - 1) / n B in
 * the place of B: the ring's wire bytes (Patarasuk and Yuan, 2009; alpha-beta as in Hockney, 1994).
 *
 *     schedule   the neighbours of the ring, in phases in which no node has two pairs at work: what is measured is a
 *                link, and not how pairs share it
 *     pair       the first rank of a pair leads: it says by a header how large the next messages are and how many,
 *                sends them, and receives them back, each after an empty one; a header of 0 ends its turn
 *     phase      ends with an all-gather, by which all ranks know how much time is left
 *     reduce     all-reduces of growing size, as long as the next one fits in what is left
 *
 * Sizes grow until a message takes a good part of its pair's share of the time, so that slow links see small messages
 * and fast ones large: a slow link is measured as exactly, because what counts is the time of a message over that of
 * an empty one.
 *
 * A busy machine delays messages and never speeds one up. Of each size the shortest time counts, and empty messages
 * are spread over the whole turn, because a delay of all of them would shorten what a large one takes over an empty
 * one: the link would seem too fast. Even then at least half of a message's time counts as that of its bytes, so that
 * no delay makes a link look twice as fast as it is. */
#ifndef PLAN_PROBE_H
#define PLAN_PROBE_H

/* What pairs of one kind have measured. */
typedef struct probe_link {
    uint32_t pair_count;     /* measured; 0: there are none of this kind, and the rest is 0 */
    double latency_us;       /* alpha: median over the pairs */
    double bytes_per_second; /* beta: median over the pairs; 0: too little time for it */
    double worst_latency_us;
    double worst_bytes_per_second;
    int slow_rank, slow_peer; /* the pair with the worst bytes_per_second, without those the worst
                                 latency */
} probe_link;

typedef struct probe_info {
    int size, node_count;
    int node_ranks;                 /* of the largest node */
    probe_link inside, between;     /* neighbours on one node; on two */
    double reduce_us;               /* all-reduce of one number among all ranks */
    double reduce_bytes_per_second; /* wire bytes a rank, of large ones; 0: no time for it */
    double seconds;                 /* that the probe took */
} probe_info;

/* Return from the function when a call fails. */
#define PROBE_TRY(call)                           \
    do {                                          \
        const dtrain_result result_ = (call);     \
        if (result_ != DTRAIN_OK) return result_; \
    } while (0)

enum {
    PROBE_PHASES = 64,
    PROBE_FIRST = 1024,   /* numbers: the smallest message whose bytes are measured */
    PROBE_MOST = 4 << 20, /* and the largest: 16 MiB */
    PROBE_PINGS = 8
};
#define PROBE_PAIRS_SHARE 0.6 /* of the time; the rest is for all-reduces */
#define PROBE_LIMIT 0.7       /* of the ideal gain: below it the links are to blame */

/* What one pair has measured: a record of its leader. */
typedef struct probe_pair {
    double latency, bytes_per_second; /* seconds; 0: not measured */
    double spent;                     /* seconds since the probe began */
} probe_pair;

typedef struct prober {
    dtrain_world *world;
    dtrain_comm *comm;
    float *buffer; /* (PROBE_MOST) */
    double start, budget;
    int nodes[DTRAIN_MAX_RANKS];
    int phase_of[DTRAIN_MAX_RANKS]; /* of the pair that a rank leads; -1: none */
    int phases;
    probe_pair all[DTRAIN_MAX_RANKS];
} prober;

static double probe_spent(const prober *p) { return dtrain_seconds() - p->start; }

/* ---- The schedule -----------------------------------------------------------------------------*/

/* Give every pair (rank, its neighbour) the first phase in which both nodes are idle, those of two
 * nodes before those of one: they matter more. Pairs that find none are left out; with ranks dealt
 * to nodes in turn there may be too many. */
static void probe_schedule(prober *p)
{
    unsigned char busy[PROBE_PHASES][DTRAIN_MAX_RANKS];
    const int size = dtrain_world_size(p->world), pairs = size == 2 ? 1 : size;
    memset(busy, 0, sizeof busy);
    p->phases = 0;
    for (int i = 0; i < size; i++) p->phase_of[i] = -1;
    for (int i = 0; i < 2 * pairs; i++) {
        const int rank = i % pairs, from = p->nodes[rank], to = p->nodes[(rank + 1) % size];
        int phase = 0;
        if ((from == to) != (i >= pairs)) continue;
        while (phase < PROBE_PHASES && (busy[phase][from] || busy[phase][to])) phase++;
        if (phase == PROBE_PHASES) continue;
        busy[phase][from] = busy[phase][to] = 1;
        p->phase_of[rank] = phase;
        if (phase >= p->phases) p->phases = phase + 1;
    }
}

/* ---- Pairs ------------------------------------------------------------------------------------*/

/* Wait for the device: with its memory, an operation that is done is one that is in its queue. */
static dtrain_result probe_wait(prober *p)
{
    return dtrain_world_device(p->world)->ops->synchronize(dtrain_world_device(p->world));
}

static dtrain_result probe_send(prober *p, size_t count, int peer)
{
    PROBE_TRY(dtrain_send(p->comm, p->buffer, count, DTRAIN_DTYPE_F32, peer, NULL));
    return probe_wait(p);
}

static dtrain_result probe_recv(prober *p, size_t count, int peer)
{
    PROBE_TRY(dtrain_recv(p->comm, p->buffer, count, DTRAIN_DTYPE_F32, peer, NULL));
    return probe_wait(p);
}

/* Send a message to and fro; *best: one way, of the shortest so far, 0 before the first. */
static dtrain_result probe_round_trip(prober *p, size_t count, int peer, double *best)
{
    const double start = dtrain_seconds();
    PROBE_TRY(probe_send(p, count, peer));
    PROBE_TRY(probe_recv(p, count, peer));
    const double half = 0.5 * (dtrain_seconds() - start);
    if (!(*best > 0) || half < *best) *best = half;
    return DTRAIN_OK;
}

/* Send an empty message to and fro and then one of `count` numbers, `repeats` times; a count of 1 is an empty message
 * and goes once. The peer is told how many of which size, and says that it is ready: where a send returns before its
 * message has arrived, the header would be measured too. */
static dtrain_result probe_ping(prober *p, size_t count, int repeats, int peer, double *empty,
                                double *seconds)
{
    int64_t header[2] = {(int64_t)count, repeats};
    PROBE_TRY(dtrain_send(p->comm, header, 2, DTRAIN_DTYPE_I64, peer, NULL));
    PROBE_TRY(dtrain_recv(p->comm, header, 2, DTRAIN_DTYPE_I64, peer, NULL));
    for (int i = 0; i < repeats; i++) {
        PROBE_TRY(probe_round_trip(p, 1, peer, empty));
        if (count > 1) PROBE_TRY(probe_round_trip(p, count, peer, seconds));
    }
    return DTRAIN_OK;
}

static dtrain_result probe_echo(prober *p, size_t count, int peer)
{
    PROBE_TRY(probe_recv(p, count, peer));
    return probe_send(p, count, peer);
}

/* Answer the leader of a pair until its turn ends. */
static dtrain_result probe_answer(prober *p, int peer)
{
    for (;;) {
        int64_t header[2] = {0, 0};
        PROBE_TRY(dtrain_recv(p->comm, header, 2, DTRAIN_DTYPE_I64, peer, NULL));
        if (!header[0]) return DTRAIN_OK;
        PROBE_TRY(dtrain_send(p->comm, header, 2, DTRAIN_DTYPE_I64, peer, NULL));
        for (int64_t i = 0; i < header[1]; i++) {
            PROBE_TRY(probe_echo(p, 1, peer));
            if (header[0] > 1) PROBE_TRY(probe_echo(p, (size_t)header[0], peer));
        }
    }
}

/* Return what the bytes of a message took, over an empty one: an estimate for the next size. Noise must not look like
 * no time. */
static double probe_over(double seconds, double empty)
{
    const double least = empty / 20;
    return seconds - empty > least ? seconds - empty : least;
}

/* Return the bytes per second of a message, without the time of an empty one, but at most twice
 * bytes / seconds, which is less than twice the link's speed however late the empty ones were. */
static double probe_rate(double bytes, double seconds, double empty)
{
    return bytes / (seconds - empty > seconds / 2 ? seconds - empty : seconds / 2);
}

/* Lead a pair for at most `share` seconds: the shortest empty message, then larger ones, twice each
 * where there is time, because the first may have met cold memory. One empty message is sent
 * whatever it takes. Bytes that take less than a quarter of the latency say nothing of the link. */
static dtrain_result probe_lead(prober *p, int peer, double share, probe_pair *pair)
{
    const double end = dtrain_seconds() + share;
    const int64_t over[2] = {0, 0};
    double seconds = 0, empty = 0, moved, bytes = 0;
    PROBE_TRY(probe_ping(p, 1, 1, peer, &empty, NULL));
    const double fit = share / 8 / (2 * empty) - 1; /* beside the header's way to and fro */
    const int most = PROBE_PINGS, repeats = fit < most ? (int)fit : most;
    if (repeats > 0) PROBE_TRY(probe_ping(p, 1, repeats, peer, &empty, NULL));
    moved = empty / 8;
    for (size_t count = PROBE_FIRST; count <= PROBE_MOST; count *= 8) {
        const double left = end - dtrain_seconds(), once = 6 * empty + 16 * moved;
        if (once > left) break;
        const int times = once + 4 * empty + 16 * moved > left ? 1 : 2;
        seconds = 0;
        PROBE_TRY(probe_ping(p, count, times, peer, &empty, &seconds));
        moved = probe_over(seconds, empty);
        bytes = (double)count * sizeof(float);
    }
    pair->latency = empty;
    if (bytes > 0 && seconds - empty > empty / 4)
        pair->bytes_per_second = probe_rate(bytes, seconds, empty);
    return dtrain_send(p->comm, over, 2, DTRAIN_DTYPE_I64, peer, NULL);
}

/* Tell all ranks what this one has measured and how late it is; *spent: the latest. */
static dtrain_result probe_gather(prober *p, probe_pair *mine, double *spent)
{
    mine->spent = probe_spent(p);
    PROBE_TRY(dtrain_world_all_gather(p->world, mine, sizeof *mine, p->all));
    *spent = 0;
    for (int i = 0; i < dtrain_world_size(p->world); i++)
        if (p->all[i].spent > *spent) *spent = p->all[i].spent;
    return DTRAIN_OK;
}

/* Let all pairs have their turns: the first, and those of which the shortest still fits in. */
static dtrain_result lead_pairs(prober *p, double *spent)
{
    const int rank = dtrain_world_rank(p->world), size = dtrain_world_size(p->world);
    const int before = (rank + size - 1) % size, behind = (rank + 1) % size;
    const double most = PROBE_PAIRS_SHARE * p->budget;
    probe_pair mine;
    double latest = 0;
    memset(&mine, 0, sizeof mine);
    PROBE_TRY(probe_gather(p, &mine, spent)); /* all begin together */
    for (int phase = 0; phase < p->phases && (!phase || *spent + 5 * latest < most); phase++) {
        const double share = (most - *spent) / (p->phases - phase);
        if (p->phase_of[rank] == phase) PROBE_TRY(probe_lead(p, behind, share, &mine));
        else if (p->phase_of[before] == phase) PROBE_TRY(probe_answer(p, before));
        PROBE_TRY(probe_gather(p, &mine, spent));
        for (int i = 0; i < size; i++)
            if (p->all[i].latency > latest) latest = p->all[i].latency;
    }
    return DTRAIN_OK;
}

/* ---- All-reduces ------------------------------------------------------------------------------*/

/* All-reduce this many numbers; *seconds: on the slowest rank. */
static dtrain_result probe_reduce_once(prober *p, size_t count, double *seconds, double *spent)
{
    probe_pair mine;
    memset(&mine, 0, sizeof mine);
    PROBE_TRY(dtrain_world_all_gather(p->world, NULL, 0, NULL));
    const double start = dtrain_seconds();
    PROBE_TRY(dtrain_all_reduce(p->comm, p->buffer, p->buffer, count, DTRAIN_DTYPE_F32,
                                DTRAIN_REDUCE_SUM, NULL));
    PROBE_TRY(probe_wait(p));
    mine.latency = dtrain_seconds() - start;
    PROBE_TRY(probe_gather(p, &mine, spent));
    *seconds = 0;
    for (int i = 0; i < dtrain_world_size(p->world); i++)
        if (p->all[i].latency > *seconds) *seconds = p->all[i].latency;
    return DTRAIN_OK;
}

/* All ranks know the same times, so they agree on the next size without a word. Sizes start above
 * those that travel whole, without a reduce-scatter. */
static dtrain_result probe_reduce(prober *p, double spent, probe_info *info)
{
    const int size = dtrain_world_size(p->world);
    const double factor = 2.0 * (size - 1) / size;
    double empty = 0, seconds, best = 0, bytes = 0;
    size_t count = 16 * PROBE_FIRST;
    for (int i = 0; i < 4 && (!i || spent + 2 * empty < 0.8 * p->budget); i++) {
        PROBE_TRY(probe_reduce_once(p, 1, &seconds, &spent));
        if (!i || seconds < empty) empty = seconds;
    }
    for (int again = 0; count <= PROBE_MOST;) {
        const double moved = best > 0 ? probe_over(best, empty) : 2 * empty;
        if (spent + 4 * empty + (again ? 1 : 8) * moved > 0.95 * p->budget) break;
        PROBE_TRY(probe_reduce_once(p, 1, &seconds, &spent));
        if (seconds < empty) empty = seconds;
        PROBE_TRY(probe_reduce_once(p, count, &seconds, &spent));
        best = again && best < seconds ? best : seconds;
        bytes = factor * (double)count * sizeof(float);
        again = !again;
        if (!again) count *= 8;
    }
    info->reduce_us = 1e6 * empty;
    if (bytes > 0) info->reduce_bytes_per_second = probe_rate(bytes, best, empty);
    return DTRAIN_OK;
}

/* ---- Results ----------------------------------------------------------------------------------*/

/* Sort numbers, few of them, and return the one in the middle. */
static double probe_median(double *values, int count)
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
static void probe_sum(const prober *p, const probe_pair *pairs, bool between, probe_link *link)
{
    double latencies[DTRAIN_MAX_RANKS], speeds[DTRAIN_MAX_RANKS];
    const int size = dtrain_world_size(p->world);
    int count = 0, measured = 0;
    memset(link, 0, sizeof *link);
    link->slow_rank = link->slow_peer = -1;
    for (int rank = 0; rank < size; rank++) {
        const probe_pair *pair = &pairs[rank];
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
    link->latency_us = probe_median(latencies, count);
    link->bytes_per_second = probe_median(speeds, measured);
}

static dtrain_result probe_measure(prober *p, probe_info *info)
{
    dtrain_world *world = p->world;
    probe_pair pairs[DTRAIN_MAX_RANKS];
    int counts[DTRAIN_MAX_RANKS] = {0};
    dtrain_world_info where;
    double spent = 0;
    dtrain_world_query(world, &where);
    PROBE_TRY(dtrain_world_all_gather(world, &where.node, sizeof where.node, p->nodes));
    info->size = dtrain_world_size(world);
    info->node_count = where.node_count;
    for (int i = 0; i < dtrain_world_size(world); i++)
        if (++counts[p->nodes[i]] > info->node_ranks) info->node_ranks = counts[p->nodes[i]];
    if (dtrain_world_size(world) > 1) {
        probe_schedule(p);
        PROBE_TRY(lead_pairs(p, &spent));
        memcpy(pairs, p->all, sizeof pairs);
        PROBE_TRY(probe_reduce(p, spent, info));
        probe_sum(p, pairs, false, &info->inside);
        probe_sum(p, pairs, true, &info->between);
    }
    info->seconds = spent;
    return DTRAIN_OK;
}

/* Measure the links of a world for `budget` seconds; on links on which single messages take longer it takes as long as
 * a few of those. Collective and blocking; every rank receives the same info. With a GPU the memory measured is its
 * own. Call it when nothing else is under way. */
static dtrain_result measure_links(dtrain_world *world, double budget, probe_info *info)
{
    const size_t bytes = PROBE_MOST * sizeof(float);
    prober *p = (prober *)calloc(1, sizeof *p);
    void *buffer = NULL;
    memset(info, 0, sizeof *info);
    if (!p) return dtrain_fail(DTRAIN_ERROR_MEMORY, "no memory for a link probe");
    p->world = world;
    p->comm = dtrain_world_comm(world);
    p->start = dtrain_seconds();
    p->budget = budget;
    dtrain_result result = dtrain_comm_alloc(p->comm, bytes, &buffer);
    p->buffer = (float *)buffer;
    if (result == DTRAIN_OK) result = probe_measure(p, info);
    if (result == DTRAIN_OK) info->seconds = probe_spent(p);
    dtrain_comm_free(p->comm, buffer, bytes);
    free(p);
    return result;
}

/* ---- The forecast -----------------------------------------------------------------------------*/

/* What a step needs of the links. */
typedef struct probe_step {
    double compute_seconds; /* of a step, forward and backward, without communication */
    uint64_t wire_bytes;    /* a rank sends */
    uint64_t call_count;    /* in so many collectives; 0 = 1 */
} probe_step;

/* What is to be expected of it. The model: a step computes for C and communicates for
 *     X = pieces * alpha + wire bytes / beta
 * of which two thirds of C, the backward, can hide all but the last piece:
 *     T = C + max(X - 2/3 C, X / pieces)
 * Gains compare samples per second with one node alone (with one rank, where there is one node),
 * whose X is that of a ring over the links inside. */
typedef struct probe_forecast {
    double communication_seconds; /* X */
    double step_seconds;          /* T */
    double one_seconds;           /* T of one node alone, or of one rank */
    double gain, ideal;           /* x1.03 of 2 */
    bool limited;                 /* less than 0.7 of the ideal */
    char text[400];               /* in a sentence, with what to try */
} probe_forecast;

/* The time of a step: compute, and what of the communication the backward does not hide. */
static double forecast_step(double compute, double communication, double pieces)
{
    const double beyond = communication - 2.0 / 3.0 * compute, last = communication / pieces;
    return compute + (beyond > last ? beyond : last);
}

/* Predict a step, which computes for some time, from what was measured. */
static void predict_step(const probe_info *info, const probe_step *step, probe_forecast *forecast)
{
    const double pieces = step->call_count ? (double)step->call_count : 1;
    const double compute = step->compute_seconds, bytes = (double)step->wire_bytes;
    const bool nodes = info->node_count > 1;
    const probe_link *link = nodes ? &info->between : &info->inside;
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
    forecast->step_seconds = forecast_step(compute, forecast->communication_seconds, pieces);
    forecast->one_seconds = forecast_step(compute, alone, pieces);
    forecast->ideal = nodes ? n / local : n;
    forecast->gain = forecast->ideal * forecast->one_seconds / forecast->step_seconds;
    forecast->limited = forecast->gain < PROBE_LIMIT * forecast->ideal;
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
}

#endif /* PLAN_PROBE_H */
