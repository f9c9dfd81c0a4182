/* Link probe
 *
 * How fast are the links between ranks, and are they fast enough for what a step sends? A probe of
 * two seconds at the start tells, before hours are spent on a run that two nodes make no faster.
 *
 * Pairs of neighbours in the ring of ranks exchange messages, no two of them on one node at a time,
 * and then all ranks all-reduce. A message of B bytes takes alpha + B / beta; alpha is the shortest
 * half of a round trip, beta the slope between the smallest and the largest message. An all-reduce
 * among n ranks has its own two, with 2 (n - 1) / n B in the place of B: the ring's wire bytes
 * (Patarasuk and Yuan, 2009; alpha-beta as in Hockney, 1994). */

#pragma once

#include "core/api.h"
#include "core/result.h"
#include "world/world.h"

/* Zero means default. */
typedef struct dtrain_probe_desc {
    uint32_t budget_ms; /* how long the probe may take; 0 = 2000. On links on which single messages
                           take longer it takes as long as a few of those */
} dtrain_probe_desc;

/* What pairs of one kind have measured. */
typedef struct dtrain_probe_link {
    uint32_t pair_count;     /* measured; 0: there are none of this kind, and the rest is 0 */
    double latency_us;       /* alpha: median over the pairs */
    double bytes_per_second; /* beta: median over the pairs; 0: too little time for it */
    double worst_latency_us;
    double worst_bytes_per_second;
    int slow_rank, slow_peer; /* the pair with the worst bytes_per_second, without those the worst
                                 latency */
} dtrain_probe_link;

typedef struct dtrain_probe_info {
    int size, node_count;
    int node_ranks;                    /* of the largest node */
    dtrain_probe_link inside, between; /* neighbours on one node; on two */
    double reduce_us;                  /* all-reduce of one number among all ranks */
    double reduce_bytes_per_second;    /* wire bytes a rank, of large ones; 0: no time for it */
    double seconds;                    /* that the probe took */
} dtrain_probe_info;

/* Measure the links of a world. Collective and blocking; every rank receives the same info. With a
 * GPU the memory measured is its own. Call it when nothing else is under way. */
DTRAIN_API dtrain_result dtrain_probe_links(dtrain_world *world, const dtrain_probe_desc *desc,
                                            dtrain_probe_info *info);

/* What a step needs of the links. */
typedef struct dtrain_probe_step {
    double compute_seconds;    /* of a step, forward and backward, without communication */
    uint64_t wire_bytes;       /* a rank sends: dtrain_strategy_info.step_bytes */
    uint32_t collective_count; /* in so many pieces: bucket_count; 0 = 1 */
} dtrain_probe_step;

/* What is to be expected of it. The model: a step computes for C and communicates for
 *     X = pieces * alpha + wire bytes / beta
 * of which two thirds of C, the backward, can hide all but the last piece:
 *     T = C + max(X - 2/3 C, X / pieces)
 * Gains compare samples per second with one node alone (with one rank, where there is one node),
 * whose X is that of a ring over the links inside. */
typedef struct dtrain_probe_forecast {
    double communication_seconds; /* X */
    double step_seconds;          /* T */
    double one_seconds;           /* T of one node alone, or of one rank */
    double gain, ideal;           /* x1.03 of 2 */
    bool limited;                 /* less than 0.7 of the ideal */
    char text[400];               /* in a sentence, with what to try */
} dtrain_probe_forecast;

/* Predict a step from what was measured. Local, and a pure function: DTRAIN_ERROR_ARGUMENT when
 * info is no result of a probe or the step computes nothing. */
DTRAIN_API dtrain_result dtrain_probe_predict(const dtrain_probe_info *info,
                                              const dtrain_probe_step *step,
                                              dtrain_probe_forecast *forecast);
