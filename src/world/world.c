/* World
 *
 * Three roads lead to a world of ranks. dtrain_launch forks them, and they share memory from the
 * start; or others have started them, and they first have to find each other:
 *
 *     forked    launch/launch.c --> arena.c: shared region --> control.c: waits, all-gathers, exits
 *     joined    launch/environment.c: which rank am I --> rendezvous.c: TCP to rank 0, with a keyed
 *               hash --> link.c: control pages in step --> page.c: on one host, shared region
 *     guests    launch/join.c: the host's all-gather --> page.c
 *
 * In all, launch/rank.c makes a rank's world and ends it.
 *
 * One anonymous shared mapping, made before the first fork, is all that ranks have in common. It
 * has no name, so nothing can be left behind and /dev/shm's size does not matter; every rank sees
 * it at the same address, so pointers into it can be handed around:
 *
 *     | control: first failure, how each rank ended | arena of rank 0 | ... | arena of rank N-1 |
 *
 * Pages are committed when touched. Each rank hands out its own arena and keeps the book in private
 * memory: no lock is shared, so no rank can die holding one.
 *
 * The launcher installs no signal handler (a rank does if it is asked to: signals.c). It blocks
 * SIGCHLD and the signals it forwards and sleeps in sigtimedwait; a rank's death is in the control
 * page some 100 us after it happened, where the waiting ranks see it. Invariant: whatever happens,
 * every rank that was started has been reaped when dtrain_launch returns, and before ranks are
 * started again (launch/restart.c). */

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
    /* the control page has the signal, too: a run that was asked to stop is not restarted, and the
     * launcher has not seen a signal that was sent to only one rank */
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
