/* test_probe.c: the link probe finds the links of a model exactly; the test moves the model's clock. When messages of
 * the model are late, no link looks twice as fast as it is. Links that are emulated in real time are measured on worlds
 * of 1 to 8 ranks: a busy machine makes real times longer, never shorter, so the test asks only that no latency is too
 * short and no link too fast. The probe's forecast is what its formula says, computed by hand. */
#include "test.h"
#include "dtrain.h"
#include "ranks.h"
#include "tools/emulated_links.h"

/* A model of links: each rank, a process, has its own clock, which only messages move; every message carries its
 * sender's time. A message takes its link's latency and its bytes over the link's speed, and can be late. The links
 * between nodes are as the case says, but the link from the last rank to rank 0 has half the speed; links inside a node
 * have a tenth of the latency and ten times the speed. */
typedef struct model_page {
    int32_t pair_of[64][8]; /* by phase and node: 16 * the lower rank + the higher + 1 */
} model_page;

static struct {
    bool on;
    double now, latency, bytes_per_second;
    int late_first;        /* the first messages of each phase are two latencies late */
    double late_empty;     /* latencies by which every empty message is late */
    uint32_t late_percent; /* of messages, by up to 20 latencies */
    uint64_t seed;
    int size, rank, node_ranks, phase, received;
    model_page *page;
} model;

static double model_seconds(void) { return model.on ? model.now : dtrain_seconds(); }

static double model_late(void)
{
    if (ranks_random(&model.seed, 100) >= model.late_percent) return 0;
    return 1e-3 * (double)ranks_random(&model.seed, 20000) * model.latency;
}

/* What a message of some bytes takes between this rank and another; no two pairs may be at work on a node. */
static double model_takes(int peer, double bytes)
{
    const int low = peer < model.rank ? peer : model.rank, high = peer + model.rank - low;
    const int nodes[2] = {low / model.node_ranks, high / model.node_ranks};
    const double slow = model.size > 2 && low == 0 && high == model.size - 1 ? 0.5 : 1;
    const bool inside = nodes[0] == nodes[1];
    for (int i = 0; i < 2; i++) {
        int32_t none = 0;
        CHECK_MSG(__atomic_compare_exchange_n(&model.page->pair_of[model.phase][nodes[i]], &none,
                                              16 * low + high + 1, false, __ATOMIC_ACQ_REL,
                                              __ATOMIC_ACQUIRE) ||
                      none == 16 * low + high + 1,
                  "phase %d: ranks %d and %d, and ranks %d and %d", model.phase, low, high,
                  (none - 1) / 16, (none - 1) % 16);
    }
    return inside ? 0.1 * (model.latency + bytes / model.bytes_per_second)
                  : model.latency + bytes / (slow * model.bytes_per_second);
}

/* A time goes before a message, as the bits of an integer. */
static dtrain_result model_send(dtrain_comm *comm, const void *data, size_t count,
                                dtrain_dtype dtype, int peer, dtrain_work **work)
{
    if (!model.on) return dtrain_send(comm, data, count, dtype, peer, work);
    TRY(dtrain_send(comm, &model.now, 1, DTRAIN_DTYPE_I64, peer, NULL));
    return dtrain_send(comm, data, count < 2 ? count : 2, dtype, peer, work);
}

static dtrain_result model_recv(dtrain_comm *comm, void *data, size_t count, dtrain_dtype dtype,
                                int peer, dtrain_work **work)
{
    double sent, late = model_late();
    if (!model.on) return dtrain_recv(comm, data, count, dtype, peer, work);
    TRY(dtrain_recv(comm, &sent, 1, DTRAIN_DTYPE_I64, peer, NULL));
    if (model.received++ < model.late_first) late = 2 * model.latency;
    if (count == 1) late += model.late_empty * model.latency;
    model.now = fmax(model.now, sent) + late +
                model_takes(peer, (double)count * (double)dtrain_dtype_bytes(dtype));
    return dtrain_recv(comm, data, count < 2 ? count : 2, dtype, peer, work);
}

/* All ranks have the latest time of any of them. */
static dtrain_result model_meet(dtrain_world *world)
{
    double all[8];
    TRY(dtrain_world_all_gather(world, &model.now, sizeof model.now, all));
    for (int i = 0; i < model.size; i++) model.now = fmax(model.now, all[i]);
    model.phase++;
    model.received = 0;
    return DTRAIN_OK;
}

static dtrain_result model_all_gather(dtrain_world *world, const void *mine, size_t bytes,
                                      void *all)
{
    if (model.on) TRY(model_meet(world));
    return dtrain_world_all_gather(world, mine, bytes, all);
}

static dtrain_world *model_world;

static dtrain_result model_all_reduce(dtrain_comm *comm, const void *in, void *out, size_t count,
                                      dtrain_dtype dtype, dtrain_reduce_op op, dtrain_work **work)
{
    if (!model.on) return dtrain_all_reduce(comm, in, out, count, dtype, op, work);
    model.now += model_late() + model.latency +
                 (double)count * 8.0 * (model.size - 1) / (model.size * model.bytes_per_second);
    return model_meet(model_world);
}

#define dtrain_seconds model_seconds
#define dtrain_send model_send
#define dtrain_recv model_recv
#define dtrain_all_reduce model_all_reduce
#define dtrain_world_all_gather model_all_gather
#include "tools/plan/probe.h"
#undef dtrain_seconds
#undef dtrain_send
#undef dtrain_recv
#undef dtrain_all_reduce
#undef dtrain_world_all_gather

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

static void probe_with(const dtrain_launch_desc *desc, dtrain_rank_fn rank_main, void *user,
                       const probed *shared)
{
    const dtrain_result result = ranks_launch(desc, rank_main, user, NULL);
    CHECK_MSG(result == DTRAIN_OK, "%s", dtrain_last_error());
    for (uint32_t i = 1; i < desc->rank_count; i++) { /* all know the same, but how long it took */
        probe_info other = shared->info[i];
        other.seconds = shared->info[0].seconds;
        CHECK(memcmp(&other, &shared->info[0], sizeof other) == 0);
    }
}

static void probe(const dtrain_launch_desc *desc, probed *shared)
{
    probe_with(desc, rank_probes, shared, shared);
}

static bool near(double value, double wanted, double share)
{
    return value > wanted * (1 - share) && value < wanted * (1 + share);
}

/* Nodes of several shapes and speeds. The first five leave time for many messages; the last two leave time for one
 * whose bytes take two thirds of the latency: the probe counts half of its time as the time of its bytes. */
static const struct links {
    int ranks, node_ranks;
    double gigabits, latency_us;
    double least; /* share of the speed that the probe finds at least */
} cases[] = {{2, 1, 0.2, 1000, 0.999},  {4, 2, 0.05, 2000, 0.999}, {4, 1, 0.3, 1000, 0.999},
             {2, 1, 100, 5, 0.999},     {8, 2, 10, 50, 0.999},     {8, 4, 0.1, 3000, 0.999},
             {6, 3, 0.01, 5000, 0.999}, {3, 1, 0.02, 20000, 0.75}, {2, 1, 0.001, 50000, 0.75}};
enum { CASES = sizeof cases / sizeof *cases, AMPLE = 5 };

typedef struct modelled {
    probed shared;
    model_page page;
    const struct links *links;
    int late_first;
    double late_empty;
    uint32_t late_percent;
    uint64_t seed;
} modelled;

static int rank_models(dtrain_world *world, void *user)
{
    modelled *m = (modelled *)user;
    model.on = true;
    model.latency = 1e-6 * m->links->latency_us;
    model.bytes_per_second = m->links->gigabits / 8 * 1e9;
    model.late_first = m->late_first;
    model.late_empty = m->late_empty;
    model.late_percent = m->late_percent;
    model.seed = m->seed + (uint64_t)dtrain_world_rank(world);
    model.size = m->links->ranks;
    model.rank = dtrain_world_rank(world);
    model.node_ranks = m->links->node_ranks;
    model.page = &m->page;
    model_world = world;
    return rank_probes(world, &m->shared);
}

static const probe_info *run_model(const struct links *links, int late_first, double late_empty,
                                   uint32_t late_percent, uint64_t seed)
{
    modelled *m = (modelled *)ranks_shared(sizeof *m);
    dtrain_launch_desc desc = ranks_desc(links->ranks, DTRAIN_LAUNCH_PROCESSES);
    desc.options.node_ranks = (uint32_t)links->node_ranks;
    m->links = links;
    m->late_first = late_first;
    m->late_empty = late_empty;
    m->late_percent = late_percent;
    m->seed = seed;
    m->shared.budget_ms = 2000;
    probe_with(&desc, rank_models, m, &m->shared);
    return &m->shared.info[0];
}

/* What the model says, in time. This tells one-way times from two-way ones, bits from bytes, and a message's time from
 * its bytes' time. */
static void check_exact(int count, int late_first)
{
    for (int i = 0; i < count; i++) {
        const struct links *c = &cases[i];
        const probe_info *info = run_model(c, late_first, 0, 0, 0);
        const double speed = c->gigabits / 8 * 1e9;
        const int nodes = c->ranks / c->node_ranks;
        CHECK(info->size == c->ranks && info->node_count == nodes &&
              info->node_ranks == c->node_ranks);
        CHECK_MSG((int)info->between.pair_count == (c->ranks == 2 ? 1 : nodes), "case %d: %u pairs",
                  i, info->between.pair_count);
        CHECK_MSG((int)info->inside.pair_count == c->ranks - nodes, "case %d: %u pairs inside", i,
                  info->inside.pair_count);
        CHECK_MSG(near(info->between.latency_us, c->latency_us, 2e-3), "case %d: %.9g us", i,
                  info->between.latency_us);
        CHECK_MSG(info->between.bytes_per_second > c->least * speed &&
                      info->between.bytes_per_second < 1.001 * speed,
                  "case %d: %.4g bytes/s of %.4g", i, info->between.bytes_per_second, speed);
        CHECK_MSG(near(info->reduce_us, c->latency_us, 2e-3), "case %d: %.9g us", i,
                  info->reduce_us);
        CHECK_MSG((info->reduce_bytes_per_second > c->least * speed || i == CASES - 1) &&
                      info->reduce_bytes_per_second < 1.001 * speed,
                  "case %d: %.4g bytes/s of %.4g", i, info->reduce_bytes_per_second, speed);
        if (c->ranks > nodes)
            CHECK_MSG(near(info->inside.latency_us, 0.1 * c->latency_us, 2e-3) &&
                          near(info->inside.bytes_per_second, 10 * speed, 1e-3),
                      "case %d: inside %.9g us, %.4g bytes/s", i, info->inside.latency_us,
                      info->inside.bytes_per_second);
        if (c->ranks > 2 && c->least > 0.9)
            CHECK_MSG(info->between.slow_rank == c->ranks - 1 && info->between.slow_peer == 0,
                      "case %d: rank %d to rank %d is slow", i, info->between.slow_rank,
                      info->between.slow_peer);
        CHECK_MSG(info->seconds < 2.2, "case %d: %g s", i, info->seconds);
    }
}

static void test_exact(void) { check_exact(CASES, 0); }
/* All messages at the beginning of a turn are late: the empty messages between larger ones count. */
static void test_late_first(void) { check_exact(AMPLE, 3 + PROBE_PINGS); }

/* Messages are late, by up to 20 latencies: few of them, many, or all. Links then look slower; none looks twice as
 * fast as it is, and with few late messages none looks much faster. */
static void test_late(void)
{
    static const uint32_t percents[] = {10, 50, 90, 100};
    const uint64_t seed = test_seed(), rounds = test_draws(2, 20, 100);
    for (uint64_t n = 0; n < rounds * CASES * 4; n++) {
        const uint32_t percent = percents[n % 4];
        const struct links *c = &cases[n / 4 % CASES];
        const probe_info *info = run_model(c, 0, 0, percent, ranks_mix(seed + n));
        const double speed = c->gigabits / 8 * 1e9;
        CHECK_MSG(info->between.latency_us > 0.999 * c->latency_us, "%.3f us of %.3f",
                  info->between.latency_us, c->latency_us);
        CHECK_MSG(info->between.bytes_per_second < 2 * speed &&
                      info->reduce_bytes_per_second < 2 * speed,
                  "DTRAIN_TEST_SEED=%llu, run %llu: %.4g and %.4g bytes/s of %.4g",
                  (unsigned long long)seed, (unsigned long long)n, info->between.bytes_per_second,
                  info->reduce_bytes_per_second, speed);
    }
}

/* The worst case: all empty messages are late, and no other one is. */
static void test_late_empty(void)
{
    for (int i = 0; i < AMPLE; i++)
        for (int late = 1; late < 20; late++) {
            const probe_info *info = run_model(&cases[i], 0, late, 0, 0);
            const double speed = cases[i].gigabits / 8 * 1e9;
            CHECK_MSG(info->between.bytes_per_second < 2 * speed,
                      "case %d, %d: %.4g bytes/s of %.4g", i, late, info->between.bytes_per_second,
                      speed);
        }
}

/* The same links, emulated in real time. */
static void test_emulated(void)
{
    for (int i = 0; i < CASES; i++) {
        const double speed = cases[i].gigabits / 8 * 1e9;
        const int nodes = cases[i].ranks / cases[i].node_ranks;
        probed *shared = (probed *)ranks_shared(sizeof *shared);
        dtrain_launch_desc desc = ranks_desc(cases[i].ranks, DTRAIN_LAUNCH_PROCESSES);
        const probe_info *info = &shared->info[0];
        emulate_links(&desc, cases[i].node_ranks, cases[i].gigabits, cases[i].latency_us);
        shared->budget_ms = test_full() || cases[i].latency_us > 10000 ? 2000 : 1000;
        probe(&desc, shared);
        CHECK(info->size == cases[i].ranks && info->node_count == nodes &&
              info->node_ranks == cases[i].node_ranks);
        CHECK((int)info->inside.pair_count <= cases[i].ranks - nodes);
        CHECK_MSG(info->between.pair_count > 0 && (int)info->between.pair_count <= nodes,
                  "case %d: %u pairs", i, info->between.pair_count);
        CHECK_MSG(info->between.latency_us > 0.99 * cases[i].latency_us, "case %d: %.0f us of %.0f",
                  i, info->between.latency_us, cases[i].latency_us);
        CHECK_MSG(info->between.bytes_per_second < 2 * speed &&
                      info->reduce_bytes_per_second < 2 * speed,
                  "case %d: %.4g and %.4g bytes/s of %.4g", i, info->between.bytes_per_second,
                  info->reduce_bytes_per_second, speed);
    }
}

/* Every number of ranks, processes and threads, with little time. */
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
    RUN(test_exact);
    RUN(test_late_first);
    RUN(test_late);
    RUN(test_late_empty);
    RUN(test_emulated);
    RUN(test_sizes);
    RUN(test_death);
    RUN(test_forecast);
    return test_summary();
}
