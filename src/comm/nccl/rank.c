/* Objects of a rank, names of operations
 *
 *     hub                       one per rank: library, streams, bounce buffers, the failure
 *      |-- comm  (the world)    an NCCL communicator and a list of its last operations
 *      |-- comm  (a split)
 *
 * The communicators of a rank share one stream of high priority. Operations run in the order in
 * which they were started, so kernels of two communicators never wait for each other's SMs.
 *
 * The tensor axis can have a second stream. The next layer waits for sums of this axis; on one
 * stream they would queue after buckets of the data axis, which are needed only by the optimizer.
 * Two streams can deadlock: a kernel of one communicator holds SMs that the other needs, and on the
 * peer it is the reverse. They do not if kernels start in the same order on all ranks: then the
 * first unfinished kernel in this order starts on each of its ranks, as all kernels before it are
 * done. The host launches in one order on all ranks (launch_ordered). From NCCL 2.26 on, kernels
 * start in the host's order if NCCL_LAUNCH_ORDER_IMPLICIT is set; else there is one stream.
 *
 *     compute   --- gradients --| ready |----- more backward -----| wait |-- optimizer --
 *     comm                          '-> all-reduce --| done |--------'
 *
 * Events are created with the communicator and reused, without a query. A stream that waits for an
 * event waits for the work before its last record; later records do not change this. So a step
 * neither allocates nor polls in the steady state, and can be captured in a graph. */

#include "comm/nccl/nccl_internal.h"

DTRAIN_NCCL__PRIVATE void *dtrain_nccl__alloc(dtrain_nccl__hub *hub, size_t bytes)
{
    void *memory = hub->allocator.alloc(hub->allocator.user, bytes);
    if (memory) memset(memory, 0, bytes);
    else
        dtrain_fail(DTRAIN_ERROR_MEMORY, "no memory for %zu bytes of the NCCL communicator", bytes);
    return memory;
}

DTRAIN_NCCL__PRIVATE void dtrain_nccl__free(dtrain_nccl__hub *hub, void *memory, size_t bytes)
{
    if (memory) hub->allocator.free(hub->allocator.user, memory, bytes);
}

/* Remove "rank 3: " from the start of an error sentence: dtrain_fail will add it again. */
DTRAIN_NCCL__PRIVATE const char *dtrain_nccl__strip_rank(const dtrain_nccl__hub *hub,
                                                         const char *text)
{
    char prefix[32];
    snprintf(prefix, sizeof prefix, "rank %d: ", dtrain_world_rank(hub->world));
    return strncmp(text, prefix, strlen(prefix)) == 0 ? text + strlen(prefix) : text;
}

/* ---- Names ------------------------------------------------------------------------------------*/

/* Indexed by dtrain_collective_kind. */
static const char *const dtrain_nccl__names[][2] = {{"?", "?"},
                                                    {"dtrain_all_reduce", "all-reduce"},
                                                    {"dtrain_reduce_scatter", "reduce-scatter"},
                                                    {"dtrain_all_gather", "all-gather"},
                                                    {"dtrain_broadcast", "broadcast"},
                                                    {"dtrain_reduce", "reduce"},
                                                    {"dtrain_barrier", "barrier"},
                                                    {"dtrain_send", "send"},
                                                    {"dtrain_recv", "recv"},
                                                    {"dtrain_comm_split", "split"},
                                                    {"dtrain_all_to_all", "all-to-all"}};

DTRAIN_NCCL__PRIVATE const char *dtrain_nccl__call_name(uint32_t kind)
{
    return dtrain_nccl__names[kind][0];
}

DTRAIN_NCCL__PRIVATE bool dtrain_nccl__is_point_to_point(uint32_t kind)
{
    return kind == DTRAIN_COLLECTIVE_SEND || kind == DTRAIN_COLLECTIVE_RECV;
}

/* Describe an operation in the format that ranks compare, such as "collective 17 on world
 * [all-reduce sum f32 count 100]". */
DTRAIN_NCCL__PRIVATE void dtrain_nccl__describe(const dtrain_nccl__comm *comm,
                                                const dtrain_nccl__record *record, char *text,
                                                size_t room)
{
    static const char *const ops[] = {"", " sum", " mean", " min", " max", " prod"};
    const dtrain_collective *what = &record->what;
    const bool point = dtrain_nccl__is_point_to_point(what->kind);
    char counts[48] = "", root[24] = "";
    if (what->kind != DTRAIN_COLLECTIVE_BARRIER)
        snprintf(counts, sizeof counts, " %s count %zu", dtrain_dtype_name(what->dtype),
                 what->count);
    if (what->root >= 0) snprintf(root, sizeof root, " %s %d", point ? "peer" : "root", what->root);
    snprintf(text, room, "%s %llu on %s [%s%s%s%s]", point ? "transfer" : "collective",
             (unsigned long long)record->number, comm->name, dtrain_nccl__names[what->kind][1],
             ops[what->op], counts, root);
}
