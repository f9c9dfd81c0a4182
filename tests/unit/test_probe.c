/* test_probe.c: the link probe finds the links that were emulated, in time, on worlds of 1 to 8 ranks; its forecast
 * is what its formula says, computed by hand. The emulation's own formula is that of test_links.c. A busy machine makes
 * times longer, never shorter, so a link that looks slower than it is is asked again. */
#include "test.h"
#include "dtrain.h"
#include "tools/run/probe.h"
#include "ranks.h"

typedef struct probed {
    probe_info info[8];
    uint32_t budget_ms;
} probed;

static int rank_probes(dtrain_world *world, void *user)
{
    probed *shared = (probed *)user;
    const dtrain_result result =
        measure_links(world, shared->budget_ms / 1e3, &shared->info[dtrain_world_rank(world)]);
    return CHECK_MSG(result == DTRAIN_OK, "%s", dtrain_last_error()) ? 0 : 1;
}

static void probe(const dtrain_launch_desc *desc, probed *shared)
{
    const dtrain_result result = ranks_launch(desc, rank_probes, shared, NULL);
    CHECK_MSG(result == DTRAIN_OK, "%s", dtrain_last_error());
    for (uint32_t i = 1; i < desc->rank_count; i++) { /* all know the same, but how long it took */
        shared->info[i].seconds = shared->info[0].seconds;
        CHECK(memcmp(&shared->info[i], &shared->info[0], sizeof *shared->info) == 0);
    }
}

static bool near(double value, double wanted, double share)
{
    return value > wanted * (1 - share) && value < wanted * (1 + share);
}

/* Emulated nodes of several shapes and speeds: the best of up to five probes, for how far off a busy machine makes
 * each of them is its own matter. What is asked then tells one-way times from two-way ones, bits from bytes, and a
 * message's time from a message's time with its latency. Links are slow, so that copying into and out of messages,
 * which a busy machine and a sanitizer make slow, is little beside the time that is emulated. */
static void test_emulated(void)
{
    static const struct {
        int ranks, node_ranks;
        double gigabits, latency_us;
    } cases[] = {{2, 1, 0.2, 1000},  {4, 2, 0.05, 2000},  {4, 1, 0.3, 1000},   {8, 4, 0.1, 3000},
                 {6, 3, 0.01, 5000}, {3, 1, 0.02, 20000}, {2, 1, 0.001, 50000}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const double speed = cases[i].gigabits / 8 * 1e9;
        const int nodes = cases[i].ranks / cases[i].node_ranks;
        const uint32_t all_pairs = cases[i].ranks == 2 ? 1 : (uint32_t)nodes;
        double latency = INFINITY, bytes_per_second = 0, seconds = INFINITY, budget = 1;
        uint32_t pairs = 0;
        for (int turn = 0; turn < 5; turn++) {
            probed *shared = (probed *)ranks_shared(sizeof *shared);
            dtrain_launch_desc desc = ranks_desc(cases[i].ranks, DTRAIN_LAUNCH_PROCESSES);
            desc.emulation.node_ranks = (uint32_t)cases[i].node_ranks;
            desc.emulation.gigabits_per_second = cases[i].gigabits;
            desc.emulation.latency_us = cases[i].latency_us;
            if (test_full() || cases[i].latency_us > 10000) budget = 2;
            shared->budget_ms = (uint32_t)(1000 * budget);
            probe(&desc, shared);
            const probe_info *info = &shared->info[0];
            CHECK(info->size == cases[i].ranks && info->node_count == nodes &&
                  info->node_ranks == cases[i].node_ranks);
            CHECK((int)info->inside.pair_count <= cases[i].ranks - nodes);
            latency = fmin(latency, info->between.latency_us);
            bytes_per_second = fmax(bytes_per_second, info->between.bytes_per_second);
            seconds = fmin(seconds, info->seconds);
            if (info->between.pair_count > pairs) pairs = info->between.pair_count;
            if (pairs == all_pairs && latency < 1.15 * cases[i].latency_us &&
                bytes_per_second > 0.85 * speed && seconds < 1.1 * budget)
                break;
        }
        CHECK_MSG(pairs == all_pairs, "%d ranks, %d a node: %u pairs of %u", cases[i].ranks,
                  cases[i].node_ranks, pairs, all_pairs);
        CHECK_MSG(latency > 0.99 * cases[i].latency_us && latency < 1.6 * cases[i].latency_us,
                  "%d ranks, %d a node: %.0f us of %.0f", cases[i].ranks, cases[i].node_ranks,
                  latency, cases[i].latency_us);
        CHECK_MSG(bytes_per_second > 0.6 * speed && bytes_per_second < 1.5 * speed,
                  "%d ranks, %d a node: %.4g GB/s of %.4g", cases[i].ranks, cases[i].node_ranks,
                  1e-9 * bytes_per_second, 1e-9 * speed);
        CHECK_MSG(seconds < 2 * budget, "%d ranks, %d a node: %.2f s of %g", cases[i].ranks,
                  cases[i].node_ranks, seconds, budget);
    }
}

/* Every number of ranks, processes and threads; short budgets are kept. */
static void test_sizes(void)
{
    for (int ranks = 1; ranks <= 8; ranks++)
        for (uint32_t mode = 0; mode < 2; mode++) {
            probed *shared = (probed *)ranks_shared(sizeof *shared);
            const dtrain_launch_desc desc = ranks_desc(ranks, mode);
            shared->budget_ms = 100;
            probe(&desc, shared);
            const probe_info *info = &shared->info[0];
            const int pairs = ranks == 1 ? 0 : ranks == 2 ? 1 : ranks;
            CHECK(info->node_count == 1 && info->between.pair_count == 0);
            CHECK_MSG(info->inside.pair_count <= (uint32_t)pairs, "%u", info->inside.pair_count);
            CHECK_MSG(info->seconds < RANKS_SOON, "%g s", info->seconds);
            if (ranks > 1) CHECK(info->reduce_us > 0 && info->inside.latency_us > 0);
        }
}

/* A rank that dies meanwhile is named, and nobody waits for ever. */
static int rank_dies(dtrain_world *world, void *user)
{
    probe_info info;
    (void)user;
    if (dtrain_world_rank(world) == 1) _exit(3);
    const dtrain_result result = measure_links(world, 2, &info);
    CHECK_MSG(result == DTRAIN_ERROR_PEER && strstr(dtrain_last_error(), "rank 1"), "%s",
              dtrain_last_error());
    return 0;
}

static void test_death(void)
{
    const dtrain_launch_desc desc = ranks_desc(3, DTRAIN_LAUNCH_PROCESSES);
    CHECK(ranks_launch(&desc, rank_dies, NULL, NULL) == DTRAIN_ERROR_RANK_FAILED);
}

/* 2 nodes of 4: 8 pieces of 1 GB in all at 5 GB/s. */
static void test_forecast(void)
{
    probe_info info;
    probe_step step;
    probe_forecast f;
    memset(&info, 0, sizeof info);
    memset(&step, 0, sizeof step);
    info.size = 8;
    info.node_count = 2;
    info.node_ranks = 4;
    info.inside.bytes_per_second = 50e9;
    info.inside.latency_us = 10;
    info.between.bytes_per_second = 5e9;
    info.between.latency_us = 30;
    info.between.slow_rank = 3;
    info.between.slow_peer = 4;
    info.between.worst_bytes_per_second = 4e9;
    info.reduce_us = 100;
    info.reduce_bytes_per_second = 2.5e9;
    step.compute_seconds = 0.3;
    step.wire_bytes = 1000000000;
    step.call_count = 8;
    predict_step(&info, &step, &f);
    /* X = 8 * 100 us + 0.4 s; T = 0.3 + X - 0.2; alone: 8 * 6 * 10 us + 6/7 / 50 s, all but an
     * eighth hidden */
    const double x = 0.0008 + 0.4, alone = 8 * 6 * 10e-6 + 0.75 / 0.875 / 50;
    CHECK_MSG(near(f.communication_seconds, x, 1e-9), "%g", f.communication_seconds);
    CHECK_MSG(near(f.step_seconds, 0.1 + x, 1e-9), "%g", f.step_seconds);
    CHECK_MSG(near(f.one_seconds, 0.3 + alone / 8, 1e-9), "%g", f.one_seconds);
    CHECK_MSG(near(f.gain, 2 * (0.3 + alone / 8) / (0.1 + x), 1e-9), "%g", f.gain);
    CHECK(f.ideal > 1.99 && f.ideal < 2.01 && f.limited);
    CHECK_MSG(strstr(f.text, "2 nodes: predicted x1.2") && strstr(f.text, "link 5 GB/s") &&
                  strstr(f.text, "rank 3 to rank 4 (4 GB/s)") && strstr(f.text, "try "),
              "%s", f.text);
    step.compute_seconds = 3; /* all hidden but the last piece */
    predict_step(&info, &step, &f);
    CHECK(!f.limited && near(f.step_seconds, 3 + x / 8, 1e-9) && !strstr(f.text, "try "));
    info.size = info.node_count = info.node_ranks = 1;
    predict_step(&info, &step, &f);
    CHECK(near(f.gain, 1, 1e-9));
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    RUN(test_emulated);
    RUN(test_sizes);
    RUN(test_death);
    RUN(test_forecast);
    return test_summary();
}
