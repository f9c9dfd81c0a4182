/* gpu_nccl.c: dtrain_nccl.h over the real NCCL, on one GPU. make gpu-first and gpu-check run it.
 *
 *   gpu_nccl one      one rank: every collective; with --graph recorded in a graph, which is launched twice
 *   gpu_nccl two      two processes on one GPU: the same
 *   gpu_nccl line     two processes on one GPU: every schedule of a pipeline
 *   gpu_nccl kill     two processes; one is killed. Seconds until the other knows
 *
 * Ends with 0, with 1 and a sentence, or with 77 when NCCL refuses two ranks on one GPU.
 *
 * NCCL calls it a duplicate GPU when two ranks have the same host and the same device. A process whose
 * NCCL_HOSTID differs is another host to it, reached through the loopback interface. That is for tests
 * alone: NVIDIA does not support it, and the two time-slice the GPU. dtrain looks at device ids before
 * it asks NCCL, so the device of this program gives each rank an id of its own. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#ifdef DTRAIN_CUDA_EMULATION /* without a GPU, over a mock of NCCL */
#define DTRAIN_NCCL_LINKED
#endif
#define DTRAIN_NCCL_IMPLEMENTATION
#include "dtrain_nccl.h"
#ifdef DTRAIN_CUDA_EMULATION
#include "nccl/mock/nccl_mock.c"
#include "nccl/mock/emulated_device.h"
#endif

#ifdef DTRAIN_CUDA_EMULATION
#define LINE_WIDTH 1024
#else
#define LINE_WIDTH (1 << 18) /* more than NCCL buffers */
#endif
#include "line.h"

#include <signal.h>
#include <sys/mman.h>

#ifdef DTRAIN_CUDA_EMULATION
enum { COUNT = 1 << 10, SKIPPED = 77 }; /* the mock's messages are short */
#else
enum { COUNT = 1 << 16, SKIPPED = 77 };
#endif

static bool recorded;                /* --graph */
static dtrain_device_ops device_ops; /* the CUDA device's, but for create and query */

/* What the ranks leave to the parent, in shared memory. */
static struct outcome {
    int good, refused;
    double killed_at, known_after;
} * outcome;

static dtrain_result create_as_host(const dtrain_device_desc *desc, dtrain_device *device)
{
    char host[32];
    snprintf(host, sizeof host, "dtrain-%u", desc->device_index);
    setenv("NCCL_HOSTID", host, 1);
    return dtrain_cuda_device_ops()->create(desc, device);
}

static dtrain_result query_as_own(dtrain_device *device, dtrain_device_info *info)
{
    const dtrain_result result = dtrain_cuda_device_ops()->query(device, info);
    snprintf(info->id, sizeof info->id, "%s", getenv("NCCL_HOSTID"));
    return result;
}

static int report_failure(const char *what)
{
    const char *text = dtrain_last_error();
    if (strstr(text, "uplicate GPU") || strstr(text, "invalid usage")) outcome->refused = 1;
    fprintf(stderr, "gpu_nccl: %s: %s\n", what, text);
    return 1;
}

/* Element i of what `kind` gives where rank r holds r + 1 everywhere. */
static float element(dtrain_comm *comm, dtrain_collective_kind kind, size_t i)
{
    const float ranks = (float)comm->size, sum = ranks * (ranks + 1) / 2;
    if (kind == DTRAIN_COLLECTIVE_ALL_REDUCE) return sum;
    if (kind == DTRAIN_COLLECTIVE_REDUCE_SCATTER) return sum / ranks;
    if (kind == DTRAIN_COLLECTIVE_BROADCAST) return ranks;
    return (float)(i / COUNT + 1); /* a slice of each rank */
}

static dtrain_result start(dtrain_comm *comm, dtrain_collective_kind kind, void *send, void *recv)
{
    const dtrain_dtype dtype = DTRAIN_DTYPE_F32;
    switch (kind) {
    case DTRAIN_COLLECTIVE_ALL_REDUCE:
        return dtrain_all_reduce(comm, send, recv, COUNT, dtype, DTRAIN_REDUCE_SUM, NULL);
    case DTRAIN_COLLECTIVE_REDUCE_SCATTER:
        return dtrain_reduce_scatter(comm, send, recv, COUNT, dtype, DTRAIN_REDUCE_MEAN, NULL);
    case DTRAIN_COLLECTIVE_ALL_GATHER:
        return dtrain_all_gather(comm, send, recv, COUNT, dtype, NULL);
    case DTRAIN_COLLECTIVE_ALL_TO_ALL:
        return dtrain_all_to_all(comm, send, recv, COUNT, dtype, NULL);
    default: return dtrain_broadcast(comm, send, COUNT, dtype, comm->size - 1, NULL);
    }
}

/* Record it, and launch the graph twice: the result is that of once. */
static dtrain_result replay(dtrain_comm *comm, dtrain_collective_kind kind, void *send, void *recv)
{
    dtrain_device *device = dtrain_world_device(comm->world);
    dtrain_graph *graph = NULL;
    dtrain_result result = device->ops->graph_begin(device);
    if (result != DTRAIN_OK) return result;
    result = start(comm, kind, send, recv);
    const dtrain_result ended = device->ops->graph_end(device, &graph);
    if (result == DTRAIN_OK) result = ended;
    for (int i = 0; i < 2 && result == DTRAIN_OK; i++)
        result = device->ops->graph_launch(device, graph);
    if (result == DTRAIN_OK) result = device->ops->synchronize(device);
    if (graph) device->ops->graph_destroy(device, graph);
    return result;
}

/* Runs it once on device buffers; whatever an earlier result left in recv is overwritten before. */
static int check_collective(dtrain_comm *comm, dtrain_collective_kind kind)
{
    dtrain_device *device = dtrain_world_device(comm->world);
    const dtrain_device_ops *ops = device->ops;
    const size_t ranks = (size_t)comm->size, most = ranks * COUNT;
    const bool slices =
        kind == DTRAIN_COLLECTIVE_ALL_GATHER || kind == DTRAIN_COLLECTIVE_ALL_TO_ALL;
    float *host = (float *)malloc(most * sizeof *host);
    void *send = NULL, *recv = NULL;
    dtrain_result result = host ? DTRAIN_OK : DTRAIN_ERROR_MEMORY;
    size_t wrong = 0;
    for (size_t i = 0; host && i < most; i++) host[i] = -1;
    if (result == DTRAIN_OK) result = dtrain_comm_alloc(comm, most * sizeof *host, &send);
    if (result == DTRAIN_OK) result = dtrain_comm_alloc(comm, most * sizeof *host, &recv);
    if (result == DTRAIN_OK)
        result = ops->copy(device, recv, host, most * sizeof *host, DTRAIN_COPY_HOST_TO_DEVICE);
    for (size_t i = 0; host && i < most; i++) host[i] = (float)comm->rank + 1;
    if (result == DTRAIN_OK)
        result = ops->copy(device, send, host, most * sizeof *host, DTRAIN_COPY_HOST_TO_DEVICE);
    if (result == DTRAIN_OK) result = (recorded ? replay : start)(comm, kind, send, recv);
    if (result == DTRAIN_OK)
        result = ops->copy(device, host, kind == DTRAIN_COLLECTIVE_BROADCAST ? send : recv,
                           most * sizeof *host, DTRAIN_COPY_DEVICE_TO_HOST);
    for (size_t i = 0; result == DTRAIN_OK && i < (slices ? most : COUNT); i++)
        wrong += host[i] != element(comm, kind, i);
    dtrain_comm_free(comm, send, most * sizeof *host);
    dtrain_comm_free(comm, recv, most * sizeof *host);
    free(host);
    if (result != DTRAIN_OK) return report_failure("a collective failed");
    if (wrong)
        fprintf(stderr, "gpu_nccl: collective %d: %zu elements are wrong\n", (int)kind, wrong);
    return wrong != 0;
}

static int check_all(dtrain_comm *comm)
{
    for (int round = 0; round < 3; round++)
        if (check_collective(comm, DTRAIN_COLLECTIVE_ALL_REDUCE) ||
            check_collective(comm, DTRAIN_COLLECTIVE_REDUCE_SCATTER) ||
            check_collective(comm, DTRAIN_COLLECTIVE_ALL_GATHER) ||
            check_collective(comm, DTRAIN_COLLECTIVE_ALL_TO_ALL) ||
            check_collective(comm, DTRAIN_COLLECTIVE_BROADCAST))
            return 1;
    return 0;
}

static int use(dtrain_world *world, void *user)
{
    dtrain_comm_info info;
    (void)user;
    dtrain_comm_query(dtrain_world_comm(world), &info);
    if (strcmp(info.backend, "nccl") != 0) {
        fprintf(stderr, "gpu_nccl: the communicator is \"%s\", not nccl\n", info.backend);
        return 1;
    }
    if (check_all(dtrain_world_comm(world))) return 1;
    __atomic_fetch_add(&outcome->good, 1, __ATOMIC_RELAXED);
    return 0;
}

static int run_line(dtrain_world *world, void *user)
{
    (void)user;
    for (uint32_t kind = 0; kind <= DTRAIN_PIPELINE_ZB_H1; kind++) {
        const bool twice = kind == DTRAIN_PIPELINE_INTERLEAVED;
        long wrong = 0;
        if (line_try(dtrain_world_comm(world), kind, twice ? 2 : 1, 4, &wrong) != DTRAIN_OK)
            return report_failure("a schedule failed");
        if (!wrong) continue;
        fprintf(stderr, "gpu_nccl: schedule %u: %ld values are wrong\n", kind, wrong);
        return 1;
    }
    __atomic_fetch_add(&outcome->good, 1, __ATOMIC_RELAXED);
    return 0;
}

/* Rank 0 outlives rank 1: its all-reduce ends with an error. */
static int survive(dtrain_world *world, void *user)
{
    dtrain_comm *comm = dtrain_world_comm(world);
    if (use(world, user)) return 1;
    if (dtrain_barrier(comm) != DTRAIN_OK) return report_failure("the barrier failed");
    if (dtrain_world_rank(world) == 1) {
        outcome->killed_at = dtrain_seconds();
        kill(getpid(), SIGKILL);
    }
    if (check_collective(comm, DTRAIN_COLLECTIVE_ALL_REDUCE) == 0) {
        fprintf(stderr, "gpu_nccl: an all-reduce with a dead rank succeeded\n");
        return 1;
    }
    outcome->known_after = dtrain_seconds() - outcome->killed_at;
    __atomic_fetch_add(&outcome->good, 1, __ATOMIC_RELAXED);
    return 0;
}

/* As reference environments for several ranks on one GPU have it; an explicit setting wins. */
static void set_environment(void)
{
    static const char *const settings[][2] = {
        {"NCCL_NET", "Socket"},     {"NCCL_IB_DISABLE", "1"},  {"NCCL_SOCKET_IFNAME", "lo"},
        {"NCCL_P2P_DISABLE", "1"},  {"NCCL_SHM_DISABLE", "1"}, {"NCCL_NVLS_ENABLE", "0"},
        {"NCCL_MNNVL_ENABLE", "0"}, {"NCCL_MAX_CTAS", "4"},
    };
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++)
        setenv(settings[i][0], settings[i][1], 0);
}

int main(int argc, char **argv)
{
    recorded = argc == 3 && strcmp(argv[2], "--graph") == 0;
    const char *mode = argc == 2 + recorded ? argv[1] : "";
    const int ranks = strcmp(mode, "one") == 0 ? 1 : 2, killing = strcmp(mode, "kill") == 0;
    const int line = strcmp(mode, "line") == 0;
    const int wanted = ranks == 1 ? 1
                       : killing  ? 3
                                  : 2; /* before the kill both ranks are good once */
    dtrain_launch_desc desc;
    if (ranks == 2 && !killing && !line && strcmp(mode, "two") != 0) {
        fprintf(stderr,
                "gpu_nccl: the argument is \"%s\"; it takes one, two, line or kill, and --graph\n",
                mode);
        return 2;
    }
    outcome = (struct outcome *)mmap(NULL, sizeof *outcome, PROT_READ | PROT_WRITE,
                                     MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (outcome == MAP_FAILED) return 1;
    device_ops = *dtrain_cuda_device_ops();
    device_ops.create = create_as_host;
    device_ops.query = query_as_own;
    if (ranks == 2) set_environment();
    memset(&desc, 0, sizeof desc);
    desc.rank_count = (uint32_t)ranks;
    desc.timeout_ms = 40000;
    desc.grace_ms = 40000; /* the survivor has work to do */
    desc.device_ops = &device_ops;
    desc.comm_ops = dtrain_nccl_comm_ops();
    const dtrain_result result = dtrain_launch(&desc,
                                               killing ? survive
                                               : line  ? run_line
                                                       : use,
                                               NULL, NULL);
    const char *why = dtrain_last_error();
    if (outcome->good == wanted && (result == DTRAIN_OK || killing)) {
        if (killing) printf("killed: known after %.2f s\n", outcome->known_after);
        else if (line) printf("2 ranks: every schedule of a pipeline is right\n");
        else
            printf("%d rank%s: every collective is right%s\n", ranks, ranks == 1 ? "" : "s",
                   recorded ? ", recorded in a graph" : "");
        return 0;
    }
    fprintf(stderr, "gpu_nccl: %s\n", why);
    return ranks == 2 &&
                   (outcome->refused || strstr(why, "uplicate GPU") || strstr(why, "invalid usage"))
               ? SKIPPED
               : 1;
}
