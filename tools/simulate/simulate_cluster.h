/* simulate_cluster.h: clusters, and the seconds that a collective takes on them. tools/simulate predicts with it, and
 * --dry-run of training programs. Include it behind dtrain.h.
 *
 * How to read it: presets -> three cost models (a textbook ring, emulated links, NCCL's algorithms) ->
 * collective_cost; then simulate_device.h (kernels that only take time) and simulate_comm.h (one rank of N). */
#ifndef SIMULATE_CLUSTER_H
#define SIMULATE_CLUSTER_H

enum { NETWORK_NCCL, NETWORK_ALPHA_BETA, NETWORK_EMULATED };

/* Peaks are data sheets' (dense); what is reached of them are measurements: efficiency and bus bandwidths
 * of nccl-tests, 92 % of a network's line rate. */
typedef struct cluster {
    const char *name, *what;
    long gpus_per_node;
    double tflops_fp32, tflops_bf16, efficiency, hbm_gbs, memory_gib;
    double nvlink_gbs, nvls_gbs, network_gbps, latency_us, slowdown;
    long network;
} cluster;

static const cluster clusters[] = {
    {"h100", "8 x H100 SXM, NVLink 4, 8 x 400 Gb/s", 8, 495, 989, 0.45, 2900, 80, 370, 480, 3200,
     14, 0.12, 0},
    {"h200", "8 x H200 SXM, NVLink 4, 8 x 400 Gb/s", 8, 495, 989, 0.45, 4300, 141, 370, 480, 3200,
     14, 0.12, 0},
    {"a100", "8 x A100 SXM, NVLink 3, 8 x 200 Gb/s", 8, 156, 312, 0.55, 1750, 80, 230, 0, 1600, 14,
     0.15, 0},
    {"a100_pcie", "4 x A100 PCIe, 100 Gb/s a node", 4, 156, 312, 0.50, 1600, 80, 20, 0, 100, 14,
     0.05, 0},
    {"a100_tcp", "4 x A100 SXM, sockets of a cloud, 41 Gb/s a node", 4, 156, 312, 0.50, 1750, 80,
     214, 0, 44, 50, 0.15, 0},
    {"4090", "4 x RTX 4090, PCIe 4 through the host, 100 Gb/s", 4, 82, 165, 0.60, 920, 24, 10, 0,
     100, 14, 0.05, 0},
    {"l40s", "4 x L40S, PCIe 4, 200 Gb/s", 4, 91, 362, 0.35, 780, 48, 16, 0, 200, 14, 0.05, 0},
    {"pro6000", "8 x RTX PRO 6000, PCIe 5, 400 Gb/s", 8, 126, 503, 0.45, 1600, 96, 35, 0, 400, 14,
     0.05, 0},
    {"v100", "DGX-2: 16 x V100, NVLink 2, 8 x 100 Gb/s", 16, 15.7, 125, 0.40, 800, 32, 130, 0, 800,
     14, 0.10, 0},
    {"p100", "4 x P100, PCIe 3, 25 Gb/s RoCE a node", 4, 10.6, 21, 0.50, 600, 16, 10, 0, 25, 14,
     0.05, 0},
    {"cpu", "dtrain's emulated links: 4 ranks a node, 1 Gb/s", 4, 0.1, 0.1, 0.5, 10, 16, 5, 0, 1,
     50, 0, NETWORK_EMULATED},
    {"custom", "a GPU of 100 TFLOPS and a ring of alpha and beta: set what matters", 8, 100, 100, 1,
     1e9, 80, 1e9, 0, 100, 10, 0, NETWORK_ALPHA_BETA},
};
enum { CLUSTERS = sizeof clusters / sizeof clusters[0] };

/* Who takes part: size ranks on so many nodes. */
typedef struct group {
    int size, nodes;
} group;

static double least(double a, double b) { return a < b ? a : b; }
static double most(double a, double b) { return a > b ? a : b; }

/* What a ring moves through the slowest link, in buffers (nccl-tests' bus factors). */
static double ring_factor(uint32_t kind, int n)
{
    if (kind == DTRAIN_COLLECTIVE_ALL_REDUCE) return 2.0 * (n - 1) / n;
    if (kind == DTRAIN_COLLECTIVE_BROADCAST || kind == DTRAIN_COLLECTIVE_REDUCE ||
        kind == DTRAIN_COLLECTIVE_SEND)
        return 1;
    return kind == DTRAIN_COLLECTIVE_BARRIER ? 0 : (double)(n - 1) / n;
}

/* alpha * steps + beta * bytes: the textbook. */
static double alpha_beta_seconds(const cluster *c, uint32_t kind, double bytes, group g)
{
    const double gbs = g.nodes > 1 ? c->network_gbps / 8 : c->nvlink_gbs;
    double steps = g.size - 1;
    if (kind == DTRAIN_COLLECTIVE_ALL_REDUCE) steps *= 2;
    if (kind == DTRAIN_COLLECTIVE_BROADCAST || kind == DTRAIN_COLLECTIVE_REDUCE ||
        kind == DTRAIN_COLLECTIVE_BARRIER)
        steps = ceil(log2(g.size));
    return steps * c->latency_us * 1e-6 + ring_factor(kind, g.size) * bytes / (gbs * 1e9);
}

/* What a collective costs: its links are busy for a time, the message takes another to arrive, and then
 * the rank itself has work with it. */
typedef struct cost {
    double links, latency, own;
    double
        inside; /* of links: how long a message to other nodes keeps those inside of one from others */
} cost;

/* Buffers up to these sizes (one rank's, all ranks' together) travel whole in the local communicator's
 * slots, without a reduce-scatter; keep them equal to its own. */
enum { SMALL_BYTES = 4096, SMALL_TOTAL = 8 * SMALL_BYTES };

/* Ranks of a node share one link, and a latency a round is added when the bytes are through: the table
 * in tools/emulated_links.h. Other groups of the same node send at the same time. The rank itself reads and
 * writes its share in memory. */
static cost emulated_cost(const cluster *c, uint32_t kind, double bytes, group g)
{
    const double local = (double)g.size / g.nodes, outside = g.size - local;
    const double sharers = (double)c->gpus_per_node / local;
    const bool small = bytes <= SMALL_BYTES && bytes * g.size <= SMALL_TOTAL;
    double out = local * outside * bytes / g.size;
    cost total = {0, 1e-6 * c->latency_us,
                  ring_factor(kind, g.size) * bytes / (c->nvlink_gbs * 1e9), 0};
    if (kind == DTRAIN_COLLECTIVE_ALL_REDUCE) out *= small ? g.size : 2;
    if (kind == DTRAIN_COLLECTIVE_REDUCE)
        out = small ? outside * bytes : out + outside * bytes / g.size;
    if (kind == DTRAIN_COLLECTIVE_BROADCAST) out = bytes * (g.nodes - 1);
    if ((kind == DTRAIN_COLLECTIVE_ALL_REDUCE || kind == DTRAIN_COLLECTIVE_REDUCE) && !small)
        total.latency *= 2;
    total.links = sharers * out / (c->network_gbps / 8 * 1e9);
    if (g.nodes == 1) total.links = total.latency = 0;
    total.inside = total.links;
    return total;
}

/* NCCL's own constants for Hopper (tuning.cc), microseconds, by protocol LL, LL128, Simple: what a call
 * costs at all, and a hop inside a node (NVLink, PCIe) and between nodes, in rings and in trees; and the
 * share of bandwidth that a protocol reaches. */
static const double call_us[3] = {6.6, 14, 8.4};
static const double nvlink_hop_us[2][3] = {{0.6, 1.9, 3.4}, {0.6, 1.25, 4.0}}; /* [tree] */
static const double pcie_hop_us[3] = {1.0, 1.9, 5.7};
static const double network_hop_us[2][3] = {{2.7, 4.0, 14}, {5.0, 8.5, 14}};
static const double protocol_share[3] = {0.25, 0.92, 1};
#define NVLS_CALL_US 25.0
#define NVLS_HOP_US 20.9
#define PCIE_GBS 60.0 /* a ring that is slower than this is not NVLink */

/* Measured all-reduces of 1 to 8 nodes of 8 H100 (nccl-tests), over what the model below says: pipelines
 * take time to fill, and eight nodes did not reach the bandwidth of four. */
static double nvls_measured(double bytes, group g)
{
    static const double sizes[6] = {1e3, 1e6, 16e6, 128e6, 1e9, 8e9}; /* bytes */
    static const double ratios[6][4] = {{1.00, 1.00, 1.00, 1.00}, {1.00, 1.50, 1.39, 1.70},
                                        {1.15, 1.37, 1.53, 2.00}, {1.19, 1.22, 1.20, 1.32},
                                        {1.03, 1.01, 1.00, 1.24}, {1.01, 1.00, 1.00, 1.13}};
    const double up = least(log2(g.nodes), 3);
    int r = 0, c = up >= 2 ? 2 : (int)up;
    while (r < 4 && bytes > sizes[r + 1]) r++;
    const double along = least(1, most(0, log2(bytes / sizes[r]) / log2(sizes[r + 1] / sizes[r])));
    const double low = ratios[r][c] + (up - c) * (ratios[r][c + 1] - ratios[r][c]);
    const double high = ratios[r + 1][c] + (up - c) * (ratios[r + 1][c + 1] - ratios[r + 1][c]);
    return low + along * (high - low);
}

/* The best of rings and trees over all protocols, and reductions in the switch. Where a group has only
 * some of a node's GPUs, the others' groups use the network at the same time. */
static double nccl_seconds(const cluster *c, uint32_t kind, double bytes, group g)
{
    const int local = g.size / g.nodes;
    const bool nvlink = c->nvlink_gbs > PCIE_GBS, sockets = c->latency_us >= 30,
               reduces = kind == DTRAIN_COLLECTIVE_ALL_REDUCE;
    const double line = c->network_gbps / 8 * local / (double)c->gpus_per_node;
    const double network = line * 0.92, inside = local > 1 ? c->nvlink_gbs : 1e30;
    const double ring = g.nodes > 1 ? least(network, inside) : c->nvlink_gbs;
    const double moved = ring_factor(kind, g.size) * bytes / 1e9;
    const double steps = (reduces ? 2.0 : 1.0) * (g.size - 1);
    const double crossings = g.nodes == 1 ? 0 : least(steps, reduces ? 2.0 * g.nodes : g.nodes - 1);
    const double up = log2(g.nodes), scale = c->latency_us / 14;
    double seconds = 1e30;
    for (int p = 0; p < 3; p++) {
        const double share = p == 1 && !nvlink ? 0.25 : protocol_share[p];
        for (int tree = 0; tree < (g.nodes > 1 && reduces ? 2 : 1); tree++) {
            const double hop = nvlink ? nvlink_hop_us[tree][p] : pcie_hop_us[p];
            const double jump = sockets ? c->latency_us : scale * network_hop_us[tree][p];
            const double us = tree ? 2 * ((local - 1) * hop + up * jump)
                                   : (steps - crossings) * hop + crossings * jump;
            const double gbs = ring * share * (tree ? 0.92 : 1);
            seconds = least(seconds, 1e-6 * (call_us[p] + us) + moved / gbs);
        }
    }
    if (reduces && c->nvls_gbs > 0 && local > 2) {
        const double gbs =
            g.nodes == 1 ? c->nvls_gbs : least(c->nvls_gbs, line * (g.nodes == 2 ? 1.154 : 0.91));
        seconds =
            least(seconds, 1e-6 * (NVLS_CALL_US + 2 * up * NVLS_HOP_US * scale) + moved / gbs);
        seconds *= nvls_measured(bytes, g);
    }
    return seconds;
}

/* All pairs: what goes out of a GPU, over its share of the network and inside the node. */
static double all_to_all_seconds(const cluster *c, double bytes, group g)
{
    const double local = (double)g.size / g.nodes, outside = (g.size - local) / g.size;
    const double share = c->network_gbps / 8 * 0.92 / (double)c->gpus_per_node;
    const double wire =
        most(outside * bytes / share, (local - 1) / g.size * bytes / c->nvlink_gbs) / 1e9;
    return 1e-6 * (call_us[2] + (g.nodes > 1 ? c->latency_us : pcie_hop_us[2]) + 0.5 * g.size) +
           wire;
}

/* bytes: of the whole buffer, the larger of what a rank sends and receives. */
static cost collective_cost(const cluster *c, uint32_t kind, double bytes, group g)
{
    cost total = {0, 0, 0, 0};
    if (g.size == 1) return total;
    if (kind == DTRAIN_COLLECTIVE_BARRIER) bytes = 4, kind = DTRAIN_COLLECTIVE_ALL_REDUCE;
    if (c->network == NETWORK_EMULATED) return emulated_cost(c, kind, bytes, g);
    if (c->network == NETWORK_ALPHA_BETA) total.links = alpha_beta_seconds(c, kind, bytes, g);
    else if (kind == DTRAIN_COLLECTIVE_ALL_TO_ALL) total.links = all_to_all_seconds(c, bytes, g);
    else total.links = nccl_seconds(c, kind, bytes, g);
    total.inside = total.links;
    if (g.nodes > 1 && c->network == NETWORK_NCCL)
        total.inside =
            least(total.links, ring_factor(kind, g.size) * bytes / (c->nvlink_gbs * 1e9));
    return total;
}

#endif
