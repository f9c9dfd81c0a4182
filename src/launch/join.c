/* Joining and leaving
 *
 *     dtrain_world_join
 *         world_create       as for other ranks (rank.c), with two differences:
 *             guest_meet     the world gathers with the host's all-gather ...
 *             find_page      ... until members of one host share a control page (world/page.c)
 *             device, communicator
 *         a last gather, so that all members have a world or none has
 *
 * Members on several hosts share no page: the world then gathers over its communicator.
 *
 * The host's all-gather has no deadline, so a failed member must not leave the others in it. The
 * failed member takes part in one more gather, with its error in its record. All others find the
 * error and fail too. All records have the same size, because a failed member does not know which
 * gather comes next. When members share a page, an abort replaces this. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/log.h"
#include "core/result.h"
#include "world/world.h"
#include "world/world_internal.h"
#include "comm/comm.h"
#include "launch/join.h"
#include "launch/launch.h"
#include "launch/launch_internal.h"
#include "device/device.h"

typedef struct dtrain__guest_record {
    int32_t code, rank, size; /* code: result of this member; an error: data is its sentence */
    uint32_t bytes;           /* bytes of data */
    char data[DTRAIN_WORLD_ALL_GATHER_BYTES];
} dtrain__guest_record;

struct dtrain__guest {
    dtrain_host_gather_fn all_gather; /* NULL: can no longer be called */
    void *user;
    int rank, size;
    size_t bytes;                   /* bytes of this mapping */
    dtrain__guest_record own, *all; /* all: (size) */
};

/* Gather with the host's function. A gather that fails on one member fails on all, and is the
 * last. */
static dtrain_result dtrain__guest_exchange(dtrain__guest *guest, dtrain_result code,
                                            const void *data, size_t bytes)
{
    dtrain__guest_record *own = &guest->own;
    const dtrain_host_gather_fn all_gather = guest->all_gather;
    guest->all_gather = NULL;
    own->code = (int32_t)code;
    own->rank = guest->rank;
    own->size = guest->size;
    own->bytes = (uint32_t)bytes;
    if (bytes) memcpy(own->data, data, bytes);
    const int failed = all_gather(guest->user, own, guest->all, sizeof *own);
    if (failed)
        return dtrain_fail(DTRAIN_ERROR_SYSTEM, "the host's all-gather returned %d", failed);
    for (int i = 0; i < guest->size; i++) {
        const dtrain__guest_record *record = &guest->all[i];
        if (record->rank != i || record->size != guest->size)
            return dtrain_fail(DTRAIN_ERROR_MISMATCH,
                               "member %d of the all-gather is rank %d of %d in its desc, "
                               "this one %d of %d: set the all-gather's numbers",
                               i, record->rank, record->size, guest->rank, guest->size);
        if (record->code != DTRAIN_OK)
            return dtrain_fail((dtrain_result)record->code, "rank %d cannot join: %.400s", i,
                               record->data);
        if (record->bytes != bytes)
            return dtrain_fail(DTRAIN_ERROR_MISMATCH,
                               "rank %d joins with %u bytes, rank %d with %zu; start the same "
                               "program on all ranks",
                               i, record->bytes, guest->rank, bytes);
    }
    guest->all_gather = all_gather;
    return DTRAIN_OK;
}

/* Store gathered records for dtrain__gathered. */
static void dtrain__guest_keep(dtrain_world *world, const char *from, size_t stride, size_t bytes)
{
    const size_t half = ++world->gather_count % 2;
    for (int i = 0; i < world->size; i++) {
        world->control->slots[i].bytes[half] = bytes;
        memcpy(world->control->slots[i].data[half], from + (size_t)i * stride, bytes);
    }
}

static dtrain_result dtrain__guest_gather(dtrain_world *world, const void *mine, size_t bytes)
{
    dtrain__guest *guest = world->guest;
    DTRAIN__TRY(dtrain__guest_exchange(guest, DTRAIN_OK, mine, bytes));
    dtrain__guest_keep(world, guest->all->data, sizeof *guest->all, bytes);
    return DTRAIN_OK;
}

/* Gather over the world's communicator, in whole 4-byte elements. */
static dtrain_result dtrain__comm_gather(dtrain_world *world, const void *mine, size_t bytes)
{
    dtrain__guest *guest = world->guest;
    const size_t count = (bytes + 3) / 4;
    if (bytes) memcpy(guest->own.data, mine, bytes);
    DTRAIN__TRY(
        dtrain_all_gather(world->comm, guest->own.data, guest->all, count, DTRAIN_DTYPE_I32, NULL));
    dtrain__guest_keep(world, (const char *)guest->all, count * 4, bytes);
    return DTRAIN_OK;
}

/* Meet the other members. From now on the world gathers with the host's function. */
DTRAIN__PRIVATE dtrain_result dtrain__guest_meet(dtrain_world *world)
{
    char own[48];
    snprintf(own, sizeof own, "%s, layout %016llx", DTRAIN_VERSION_STRING,
             (unsigned long long)dtrain__shared_sizes());
    world->gather = dtrain__guest_gather;
    DTRAIN__TRY(dtrain__world_gather(world, own, sizeof own));
    for (int i = 0; i < world->size; i++)
        if (strcmp((const char *)dtrain__gathered(world, i), own) != 0)
            return dtrain_fail(DTRAIN_ERROR_MISMATCH, "rank %d has dtrain %.47s, rank %d has %s", i,
                               (const char *)dtrain__gathered(world, i), world->rank, own);
    return DTRAIN_OK;
}

/* Describe a join as a launch of one rank, which has the same checks and defaults. */
static dtrain_result dtrain__guest_resolve(const dtrain_join_desc *given, dtrain__launch *launch)
{
    dtrain_launch_desc *desc = &launch->desc;
    DTRAIN__TRY(dtrain__abi_check("dtrain_world_join", given->abi, &launch->abi));
    DTRAIN__TRY(dtrain__take(&launch->abi, DTRAIN__ABI_join_desc, given, &launch->join));
    given = &launch->join;
    desc->threads_per_rank = given->threads ? given->threads : 1;
    desc->timeout_ms = given->timeout_ms ? given->timeout_ms : 600000;
    desc->device_ops = given->device_ops;
    desc->comm_ops = given->comm_ops;
    desc->options = given->options;
    desc->mode = DTRAIN_LAUNCH_THREADS; /* the process belongs to the host */
    launch->log.silent = !given->options.log;
    launch->place.rank = given->rank;
    launch->place.size = given->size;
    launch->place.local_rank = -1;
    launch->cores = dtrain__cores();
    if (given->rank < 0 || given->rank >= given->size)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_world_join: rank is %d, expected 0 to %d",
                           given->rank, given->size - 1);
    DTRAIN__TRY(dtrain__check_launch("dtrain_world_join", launch));
    return dtrain__map_region(0, 0, NULL, -1, &launch->region);
}

/* End a join that has failed on this member, and tell the others: by an abort on the shared page,
 * or in the host's all-gather. */
static dtrain_result dtrain__guest_refused(dtrain_world *world, dtrain__guest *guest,
                                           dtrain_result result)
{
    char why[DTRAIN__ERROR_BYTES];
    snprintf(why, sizeof why, "%s", dtrain__bare(dtrain_last_error()));
    if (world && world->control->arenas) dtrain_world_abort(world, result, why);
    else if (guest->all_gather) (void)dtrain__guest_exchange(guest, result, why, sizeof why);
    if (world) dtrain__world_destroy(world);
    munmap(guest, guest->bytes);
    dtrain__set_thread_rank(-1);
    return dtrain_fail(result, "dtrain_world_join: %s", why);
}

DTRAIN_API dtrain_result dtrain_world_join(const dtrain_join_desc *desc, dtrain_world **out)
{
    dtrain__launch launch;
    dtrain_world *world = NULL;
    if (!out) return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_world_join: out is NULL");
    *out = NULL;
    memset(&launch, 0, sizeof launch);
    if (!desc || !desc->all_gather || desc->size < 1 || desc->size > DTRAIN_MAX_RANKS)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_world_join: size is %d, expected 1 to %d, and all_gather is %s",
                           desc ? desc->size : 0, DTRAIN_MAX_RANKS,
                           desc && desc->all_gather ? "given" : "NULL");
    const size_t bytes = sizeof(dtrain__guest) + (size_t)desc->size * sizeof(dtrain__guest_record);
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return dtrain_fail(DTRAIN_ERROR_MEMORY, "dtrain_world_join: no %zu bytes: %s", bytes,
                           strerror(errno));
    dtrain__guest *guest = (dtrain__guest *)memory;
    guest->all_gather = desc->all_gather;
    guest->user = desc->user;
    guest->rank = desc->rank;
    guest->size = desc->size;
    guest->bytes = bytes;
    guest->all = (dtrain__guest_record *)(void *)(guest + 1);
    launch.guest = guest;
    dtrain__set_thread_rank(desc->rank);
    dtrain_result result = dtrain__guest_resolve(desc, &launch);
    if (result == DTRAIN_OK) result = dtrain__world_create(&launch, desc->rank, &world);
    if (result == DTRAIN_OK) result = dtrain__world_gather(world, NULL, 0);
    if (!world && launch.region.control) munmap(launch.region.control, launch.region.bytes);
    if (result != DTRAIN_OK) return dtrain__guest_refused(world, guest, result);
    world->comm_given = NULL;
    guest->all_gather = NULL;
    if (world->gather) world->gather = dtrain__comm_gather;
    *out = world;
    return DTRAIN_OK;
}

/* Wait until all members leave, because another member can still read this one's memory. On a
 * shared page this member records its end first: calls of members that still use the world fail. */
static dtrain_result dtrain__await_leaving(dtrain_world *world)
{
    dtrain__wait wait = dtrain__wait_begin();
    DTRAIN__TRY(dtrain__trouble(world));
    if (world->gather) return dtrain__world_gather(world, NULL, 0);
    dtrain__record_end(world->control, world->rank, DTRAIN__LEFT, 0, "");
    for (int i = 0; i < world->size; i++)
        while (dtrain__load(&world->control->exits[i].how) == DTRAIN__RUNNING) {
            const dtrain_result turn = dtrain__wait_turn(world, &wait);
            if (turn == DTRAIN_ERROR_TIMEOUT)
                return dtrain__abort_with(world, turn,
                                          "dtrain_world_leave: rank %d waited %.1f s for rank %d",
                                          world->rank, 1e-9 * (double)world->timeout_ns, i);
            DTRAIN__TRY(turn);
        }
    return dtrain__trouble(world);
}

DTRAIN_API dtrain_result dtrain_world_leave(dtrain_world *world)
{
    if (!world) return DTRAIN_OK;
    DTRAIN__TRY(dtrain__world_check(world, "dtrain_world_leave"));
    if (!world->guest)
        return dtrain_fail(DTRAIN_ERROR_USAGE, "dtrain_world_leave: dtrain_launch ends this world; "
                                               "return from rank_main");
    dtrain__guest *guest = world->guest;
    const dtrain_result result = dtrain__await_leaving(world);
    if (dtrain__load(&world->control->exits[world->rank].how) == DTRAIN__RUNNING)
        dtrain__record_end(world->control, world->rank,
                           result == DTRAIN_OK ? DTRAIN__LEFT : DTRAIN__RETURNED, (int)result,
                           result == DTRAIN_OK ? "" : dtrain_last_error());
    dtrain__world_destroy(world);
    munmap(guest, guest->bytes);
    dtrain__set_thread_rank(-1);
    return result;
}
