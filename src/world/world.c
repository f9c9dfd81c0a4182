/* World
 *
 * There are three ways to a world. Ranks that dtrain_launch forks share memory from the start.
 * Ranks that something else has started must first find each other:
 *
 *     forked    launch/launch.c --> arena.c: shared region --> control.c: waits, all-gathers, exits
 *     joined    launch/environment.c: which rank am I --> rendezvous.c: TCP to rank 0, with a keyed
 *               hash --> link.c: control pages in step --> page.c: on one host, shared region
 *     guests    launch/join.c: the host's all-gather --> page.c
 *
 * In each case launch/rank.c makes and ends a rank's world.
 *
 * Forked ranks share only one anonymous mapping, made before the first fork. It has no name, so
 * nothing can be left over and /dev/shm's size does not matter. Every rank sees it at the same
 * address, so ranks can exchange pointers into it:
 *
 *     | control: first failure, how each rank ended | arena of rank 0 | ... | arena of rank N-1 |
 *
 * Pages are committed when touched. Each rank allocates from its own arena and keeps the list of
 * allocations in private memory: no lock is shared, so no rank can die while it holds one.
 *
 * The launcher installs no signal handler (ranks do with catch_signals, see signals.c). It blocks
 * SIGCHLD and the signals that it forwards, and sleeps in sigtimedwait. Some 100 us after a rank
 * died, the control page has its exit record, and waiting ranks see it. Invariant: every rank that
 * was started has been reaped before dtrain_launch returns or starts ranks again
 * (launch/restart.c). */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/log.h"
#include "world/world.h"
#include "world/world_internal.h"
#include "device/device.h"

DTRAIN_API int dtrain_world_rank(const dtrain_world *world) { return world ? world->rank : -1; }
DTRAIN_API int dtrain_world_size(const dtrain_world *world) { return world ? world->size : 0; }
DTRAIN_API dtrain_device *dtrain_world_device(dtrain_world *world)
{
    return world ? world->device : NULL;
}
DTRAIN_API dtrain_comm *dtrain_world_comm(dtrain_world *world)
{
    return world ? world->comm : NULL;
}

DTRAIN__PRIVATE void dtrain__world_info(const dtrain_world *world, dtrain_world_info *info)
{
    memset(info, 0, sizeof *info);
    if (!world) return;
    const int node = world->node_ranks;
    info->rank = world->rank;
    info->size = world->size;
    info->local_rank = node ? world->rank % node : world->local_rank;
    info->local_size = node ? node : world->local_size;
    info->node = node ? world->rank / node : world->node;
    info->node_count = node ? world->size / node : world->node_count;
    info->threads = world->threads;
    info->timeout_ms = (uint32_t)(world->timeout_ns / 1000000u);
    info->restart_count = world->restart_count;
    info->guest = world->guest != NULL;
    info->comm_given = world->comm_given;
    /* Store the signal in the control page: a run that was asked to stop is not restarted, and the
     * launcher does not see a signal that was sent to one rank. */
    const int signal = world->catches ? dtrain__signal_caught() : 0;
    if (signal && *world->mine) dtrain__store(&world->control->caught, signal);
    info->stop_requested = signal != 0;
    info->allocator = world->allocator;
}

DTRAIN_API void dtrain_world_query(const dtrain_world *world, dtrain_world_info *info)
{
    dtrain_world_info own;
    dtrain__world_info(world, &own);
    dtrain__give(dtrain__abi_of(world), DTRAIN__ABI_world_info, &own, info);
}

DTRAIN_API void dtrain_log(dtrain_world *world, dtrain_log_level level, const char *format, ...)
{
    if (!world || !format) return;
    va_list args;
    va_start(args, format);
    dtrain__log_va(&world->log, level, format, args);
    va_end(args);
}
