/* A rank's life: make its world, run its main function, record how it ended
 *
 *     dtrain__rank_run
 *         world_create    join the other ranks (rendezvous), device, communicator
 *         rank_main       the program's
 *         world_leave     ranks of another launcher wait until their exit record has been sent
 *         world_destroy   */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/log.h"
#include "core/result.h"
#include "world/link_internal.h"
#include "world/timeline_internal.h"
#include "world/world.h"
#include "world/world_internal.h"
#include "comm/comm_internal.h"
#include "launch/join.h"
#include "launch/launch.h"
#include "launch/launch_internal.h"
#include "device/device.h"

/* Map DTRAIN_PROGRESS_FILE, from which dtrain-run reads the ranks' progress: the name below /proc
 * of a memfd that begins with a magic. A dead launcher can have left the variable, which then names
 * another file: without the magic, do not touch the file. */
static uint64_t *dtrain__progress_open(void)
{
    const char *path = dtrain__env_text(getenv, "DTRAIN_PROGRESS_FILE");
    const size_t magic = sizeof DTRAIN__PROGRESS_MAGIC;
    char head[sizeof DTRAIN__PROGRESS_MAGIC + sizeof(uint64_t)]; /* pread fails on a pipe */
    const int file = path ? dtrain__open(path, O_RDWR | O_NONBLOCK) : -1;
    void *page = MAP_FAILED;
    if (file < 0) return NULL;
    if (pread(file, head, sizeof head, 0) == sizeof head &&
        memcmp(head, DTRAIN__PROGRESS_MAGIC, magic) == 0)
        page = mmap(NULL, dtrain__page_bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    return page == MAP_FAILED ? NULL : (uint64_t *)page + magic / sizeof(uint64_t);
}

DTRAIN__PRIVATE void dtrain__world_destroy(dtrain_world *world)
{
    if (!world) return;
    const dtrain_allocator allocator = world->allocator;
    dtrain__world_comm_end(world);
    dtrain__timeline_destroy(world);
    dtrain_device_destroy(world->device);
    dtrain__link_destroy(world);
    if (world->progress)
        munmap((char *)world->progress - sizeof DTRAIN__PROGRESS_MAGIC, dtrain__page_bytes());
    dtrain__page_release(world);
    if (world->mine) munmap(world->mine, dtrain__page_bytes());
    dtrain__free(&allocator, world->ranges, world->range_room, sizeof *world->ranges);
    dtrain__free(&allocator, world, 1, sizeof *world);
}

/* Create the rank's device, and warn of kernels that were compiled for an older GPU. */
static dtrain_result dtrain__make_device(const dtrain__launch *launch, dtrain_world *world)
{
    const dtrain_world_options *options = &launch->desc.options;
    dtrain_device_desc device;
    dtrain_device_info gpu;
    memset(&device, 0, sizeof device);
    device.thread_count = world->threads;
    device.device_index = launch->guest ? DTRAIN_DEVICE_CURRENT : (uint32_t)world->local_rank;
    device.stream = launch->join.stream;
    device.oversubscribed = world->oversubscribed;
    device.math = options->math;
    device.tune = options->tune;
    device.memory_limit = options->memory_limit;
    device.allocator = options->allocator;
    DTRAIN__TRY(dtrain_device_create(launch->desc.device_ops, &device, &world->device));
    if (world->local_rank == 0 && dtrain_device_query(world->device, &gpu) == DTRAIN_OK &&
        gpu.code_version && gpu.code_version / 10 < gpu.major)
        dtrain_log(
            world, DTRAIN_LOG_WARNING,
            "dtrain_cuda.cu was compiled for sm_%u, and %s is sm_%u%u: the driver compiles "
            "it again when a program starts%s; build with nvcc -arch=native, or -arch=sm_%u%u",
            gpu.code_version, gpu.name, gpu.major, gpu.minor,
            gpu.code_version < 80
                ? ", and attention does without tensor cores, several times slower"
                : "",
            gpu.major, gpu.minor);
    return DTRAIN_OK;
}

/* Make a rank's world. On failure *out can be an incomplete world, for dtrain__world_destroy. */
DTRAIN__OWN_FRAME
DTRAIN__PRIVATE dtrain_result dtrain__world_create(const dtrain__launch *launch, int rank,
                                                   dtrain_world **out)
{
    const dtrain_launch_desc *desc = &launch->desc;
    const dtrain_world_options *options = &desc->options;
    dtrain_world *world =
        (dtrain_world *)dtrain__alloc(&options->allocator, 1, sizeof *world, "a world");
    *out = world;
    if (!world) return DTRAIN_ERROR_MEMORY;
    world->guest = launch->guest;
    if (launch->guest) world->page = launch->region;
    world->comm_given = launch->join.comm_given;
    world->timeline.since_ns = dtrain__now_ns();
    world->rank = world->local_rank = rank;
    world->size = world->local_size = launch->place.size;
    world->node_count = 1;
    world->comm_ops = desc->comm_ops;
    world->node_ranks = (int)options->node_ranks;
    world->launcher = launch->launcher;
    world->timeout_ns = (uint64_t)desc->timeout_ms * 1000000u;
    world->long_wait_ns = (uint64_t)dtrain__min((int64_t)world->timeout_ns / 4, 1000000000);
    world->join_ns = (uint64_t)desc->join_ms * 1000000u;
    world->control = launch->region.control;
    world->allocator = options->allocator;
    world->log = launch->log;
    world->log.rank = rank;
    world->restart_count = launch->place.restart_count + launch->restart_count;
    world->job = launch->job;
    world->abi = launch->abi;
    world->catches = desc->catch_signals;
    void *const mine = mmap(NULL, dtrain__page_bytes(), PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mine == MAP_FAILED)
        return dtrain_fail(DTRAIN_ERROR_MEMORY, "a page of memory could not be mapped: %s",
                           strerror(errno));
    world->mine = (uint32_t *)mine;
    *world->mine = 1;
#ifdef MADV_WIPEONFORK /* without it, dtrain__world_check finds nothing */
    madvise(mine, dtrain__page_bytes(), MADV_WIPEONFORK);
#endif
    DTRAIN__TRY(
        dtrain__timeline_create(world, options->flight_directory, &options->trace, dtrain__dump));
    if (!world->guest) world->progress = dtrain__progress_open();
    if (launch->joins) DTRAIN__TRY(dtrain__meet(world, &launch->place));
    if (world->guest) DTRAIN__TRY(dtrain__guest_meet(world));
    if (world->page.control)
        DTRAIN__TRY(dtrain__find_page(world, &launch->place, options->reserve_bytes));
    const uint32_t share = launch->cores / (uint32_t)world->local_size;
    world->threads = desc->threads_per_rank ? desc->threads_per_rank : share ? share : 1;
    world->oversubscribed = (uint64_t)world->local_size * world->threads > launch->cores;
    if (options->trace.path && options->trace.path[0])
#if DTRAIN__MONITOR
        DTRAIN__TRY(dtrain__trace_create(world, &options->trace));
#else
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "dtrain_launch: a trace belongs to monitor, which is not compiled: "
                           "leave out trace, or DTRAIN_OMIT_MONITOR (DTRAIN_CORE)");
#endif
    DTRAIN__TRY(dtrain__make_device(launch, world));
    DTRAIN__TRY(dtrain__world_comm_create(world));
    if (desc->mode == DTRAIN_LAUNCH_PROCESSES) world->base_bytes = dtrain__process_bytes();
    return DTRAIN_OK;
}

/* Send this rank's exit record, and wait until it has been sent. Rank 0 waits until all connected
 * ranks have ended, because it forwards their frames. After a failure the grace period limits the
 * wait; ranks other than 0 always have this limit. */
static void dtrain__world_leave(dtrain_world *world, uint32_t grace_ms)
{
    const dtrain__exit_record *own = &world->control->exits[world->rank];
    uint64_t end_ns = 0, now;
    bool all = false;
    dtrain__link_send(world, DTRAIN__FRAME_EXIT, world->rank, own, sizeof *own);
    while (!all) {
        dtrain__link_pump(world, 20);
        dtrain__world_comm_linger(world);
        now = dtrain__now_ns();
        if (!end_ns && (world->rank || dtrain__trouble(world) != DTRAIN_OK))
            end_ns = now + (uint64_t)grace_ms * 1000000u;
        all = dtrain__link_unsent(world) < 0;
        for (int i = 0; i < world->size && world->rank == 0; i++)
            all = all && (world->link->ends[i].socket < 0 ||
                          dtrain__load(&world->control->exits[i].how) != DTRAIN__RUNNING);
        if (end_ns && now >= end_ns) break;
    }
}

/* Run a rank from its start to its end, in a separate process or thread, and record its end in the
 * control page of its world. A rank of another launcher also records its end in the page of this
 * launch, from which dtrain_launch makes its result; rank 0 and a failed rank copy the records of
 * all ranks. */
DTRAIN__PRIVATE int dtrain__rank_run(dtrain__launch *launch, int index)
{
    const int rank = launch->place.rank + index;
    dtrain__control *control = launch->region.control;
    char error[DTRAIN__ERROR_BYTES];
    int code = 1;
    dtrain__end how = DTRAIN__UNSTARTED;
    dtrain_world *world = NULL;
    dtrain__set_thread_rank(rank);
    (void)dtrain__set_last_error(DTRAIN_OK, "");
    const dtrain_result created = dtrain__world_create(launch, rank, &world);
    if (created == DTRAIN_OK) {
        code = launch->rank_main(world, launch->user);
        how = code ? DTRAIN__RETURNED : DTRAIN__LEFT;
    }
    if (launch->is_rank) launch->joined = created;

    snprintf(error, sizeof error, "%s", code ? dtrain_last_error() : "");
    if (error[0]) control->exits[rank].code = (int32_t)*dtrain__last_code();
    const bool met = world && world->link;
    if (world && code) dtrain__failed(world, DTRAIN_ERROR_RANK_FAILED);
    if (world) world->control->exits[rank].after = world->caused_by;
    if (!met || !launch->is_rank) dtrain__record_end(control, rank, how, code, error);
    if (met) {
        dtrain__record_end(world->control, rank, how, code, error);
        dtrain__world_leave(world, launch->desc.grace_ms);
    }
    if (met && launch->is_rank && (!rank || code)) {
        memcpy(control->exits, world->control->exits, sizeof control->exits);
        control->first_failed = dtrain__load(&world->control->first_failed);
    }
    dtrain__world_destroy(world);
    dtrain__set_thread_rank(-1);
    return code;
}
