/* One host, one control page
 *
 * If all joined ranks are on one host, they share memory as forked ranks do. Rank 0 makes a file
 * without a name (memfd) and sends its address. The other ranks open the file through
 * /proc/<pid>/fd and map it at the same address; if one cannot, all ranks try another address.
 * Ranks that are threads of one process use the mapping of the first of these ranks. The kernel
 * frees the file when the last rank has ended, however it ended.
 *
 * This file needs only the world's all-gather: the link's or a host program's (launch/join.c). */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/result.h"
#include "world/link_internal.h"
#include "world/world.h"
#include "world/world_internal.h"

/* Number the hosts and the ranks of each host, unless the launcher has numbered the local ranks;
 * note the process of each rank. Ranks that can see each other's processes and memory have the same
 * host name, boot id and container namespaces: a hash of these identifies the host. What /proc
 * hides, it hides from all ranks of a host; only a lack of descriptors or memory is an error. */
static dtrain_result dtrain__find_hosts(dtrain_world *world, const dtrain__placement *place)
{
    static const char *const names[2] = {"/proc/self/ns/net", "/proc/self/ns/pid"};
    uint64_t spaces[2] = {0, 0};
    char text[320];
    struct stat status;
    dtrain__life own, *all = world->lives;
    int local_rank = 0, local_size = 0, hosts = 0, error = 0;
    memset(text, 0, sizeof text);
    if (gethostname(text, 255) != 0) text[0] = 0;
    const int file = dtrain__open("/proc/sys/kernel/random/boot_id", O_RDONLY);
    if (file < 0 || read(file, text + 256, 64) < 0) error = errno;
    if (file >= 0) close(file);
    for (int i = 0; i < 2; i++)
        if (stat(names[i], &status) == 0) spaces[i] = (uint64_t)status.st_ino;
        else if (!error) error = errno;
    if (error == EMFILE || error == ENFILE || error == ENOMEM || error == EIO)
        return dtrain__abort_with(
            world, DTRAIN_ERROR_SYSTEM, "rank %d cannot find out on which host it is: %s%s",
            world->rank, strerror(error),
            error == EMFILE || error == ENFILE ? "; raise the limit (ulimit -n)" : "");
    own.host = dtrain__siphash(spaces, text, sizeof text);
    own.pid = getpid();
    own.started = dtrain__process_started(own.pid);
    DTRAIN__TRY(dtrain_world_all_gather(world, &own, sizeof own, all));
    world->mapper = world->rank;
    for (int i = 0; i < world->size; i++) {
        const bool local = all[i].host == own.host;
        if (local && dtrain__process_started(all[i].pid) != all[i].started)
            all[i].started = 0; /* hidden from this rank: see dtrain__look_for_lost */
        int first = 0;
        while (all[first].host != all[i].host) first++;
        if (local && first == i) world->node = hosts;
        local_rank += i < world->rank && local;
        local_size += local;
        hosts += first == i;
        if (local && all[i].pid == own.pid && i < world->mapper) world->mapper = i;
    }
    world->node_count = hosts;
    if (place->forks) local_rank = world->rank - place->rank;
    else if (place->local_rank >= 0) local_rank = place->local_rank;
    world->local_rank = local_rank;
    world->local_size = place->local_size > 0 ? place->local_size : local_size;
    return DTRAIN_OK;
}

/* Rank 0's region; bytes is 0 if rank 0 could not make one. */
typedef struct dtrain__offer {
    uint64_t address, bytes, inode;
    int32_t pid, file;
} dtrain__offer;

/* Map rank 0's region at rank 0's address. First check that the file is rank 0's: another process
 * can have got its pid. */
static dtrain_result dtrain__accept_region(const dtrain__offer *offer, dtrain__region *region)
{
    char path[64];
    struct stat status;
    void *const wanted = (void *)(uintptr_t)offer->address;
    const size_t bytes = (size_t)offer->bytes;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", offer->pid, offer->file);
    const int file = dtrain__open(path, O_RDWR);
    const bool there = file >= 0 && fstat(file, &status) == 0;
    const bool same = there && (uint64_t)status.st_ino == offer->inode &&
                      (uint64_t)status.st_size == offer->bytes;
    void *memory = same ? dtrain__map_bytes(wanted, bytes, file) : MAP_FAILED;
    const int error = memory == MAP_FAILED ? errno : EEXIST;
    if (file >= 0) close(file);
    if (!there) return dtrain_fail(DTRAIN_ERROR_SYSTEM, "%s: %s", path, strerror(error));
    if (!same)
        return dtrain_fail(DTRAIN_ERROR_SYSTEM, "%s is not the file that rank 0 has made", path);
    if (memory != MAP_FAILED && memory != wanted) munmap(memory, bytes);
    if (memory != wanted)
        return dtrain_fail(DTRAIN_ERROR_MEMORY, "%zu bytes at %p are not free: %s", bytes, wanted,
                           strerror(error));
    region->control = (dtrain__control *)memory;
    region->bytes = bytes;
    return DTRAIN_OK;
}

/* Addresses for regions: far from programs, libraries, stacks and the shadow memory of sanitizers.
 * Other worlds of a process can lie at these addresses, so rank 0 draws one of the 32 places that
 * follow each address. In the last attempt the kernel chooses. */
#define DTRAIN__PLACE_BYTES ((uintptr_t)1 << 38)
static const uintptr_t dtrain__places[] = {0x210000000000u, 0x410000000000u, 0x7a0000000000u};

/* Make one attempt with all ranks: rank 0 offers a region, the other ranks map it, and all gather
 * the sentences of ranks that failed (world->no_region, "" if none did). Return an error only if
 * the gathering fails. */
static dtrain_result dtrain__try_region(dtrain_world *world, size_t reserve_bytes, int attempt,
                                        dtrain__region *region)
{
    dtrain__offer offer;
    struct stat status;
    char why[sizeof world->no_region] = "";
    dtrain_result result = DTRAIN_OK;
    memset(&offer, 0, sizeof offer);
    offer.file = -1;
    if (world->rank == 0) {
        offer.file = /* 1: MFD_CLOEXEC, which libc may hide */
            dtrain__above_stdio((int)syscall(SYS_memfd_create, "dtrain", 1u));
        if (offer.file < 0 || fstat(offer.file, &status) != 0)
            result = dtrain_fail(DTRAIN_ERROR_SYSTEM, "memfd_create: %s", strerror(errno));
        const uintptr_t drawn = dtrain__now_ns() * 0x9e3779b97f4a7c15u >> 59;
        const uintptr_t at =
            attempt < 5 ? dtrain__places[attempt % 3] + drawn * DTRAIN__PLACE_BYTES : 0;
        if (result == DTRAIN_OK)
            result = dtrain__map_region(reserve_bytes, (uint32_t)world->size, (void *)at,
                                        offer.file, region);
        if (result == DTRAIN_OK) {
            offer.address = (uint64_t)(uintptr_t)region->control;
            offer.bytes = region->bytes;
            offer.inode = (uint64_t)status.st_ino;
            offer.pid = (int32_t)getpid();
        }
    }
    dtrain_result gathered = dtrain__world_gather(world, &offer, sizeof offer);
    if (gathered == DTRAIN_OK) {
        const dtrain__offer *first = (const dtrain__offer *)dtrain__gathered(world, 0);
        if (world->mapper != world->rank) { /* another thread of this process maps it */
            region->control = (dtrain__control *)(uintptr_t)first->address;
            region->bytes = (size_t)first->bytes;
        } else if (world->rank && first->bytes) result = dtrain__accept_region(first, region);
        const bool maps = region->control && world->mapper == world->rank;
        for (int i = 0; i < world->size && maps; i++)
            if (world->lives[i].host == world->lives[world->rank].host &&
                world->lives[i].pid == world->lives[world->rank].pid)
                region->control->holders[world->rank]++;
        if (result != DTRAIN_OK)
            snprintf(why, sizeof why, "rank %d: %.160s", world->rank,
                     dtrain__bare(dtrain_last_error()));
        gathered = dtrain__world_gather(world, why, sizeof why);
    }
    if (offer.file >= 0) close(offer.file);
    world->no_region[0] = 0;
    for (int i = 0; i < world->size && gathered == DTRAIN_OK && !world->no_region[0]; i++)
        memcpy(world->no_region, dtrain__gathered(world, i), sizeof why);
    if ((gathered == DTRAIN_OK && !world->no_region[0]) || !region->control) return gathered;
    if (world->mapper == world->rank) munmap(region->control, region->bytes);
    return gathered;
}

/* Unmap a joined rank's control page. The last rank of a process unmaps a shared page. */
DTRAIN__PRIVATE void dtrain__page_release(dtrain_world *world)
{
    dtrain__control *control = world->page.control;
    if (!control) return;
    if (!control->arenas || dtrain__fetch_add(&control->holders[world->mapper], -1u) == 1)
        munmap(control, world->page.bytes);
    world->page.control = NULL;
}

/* Find the hosts of joined ranks. If all ranks are on one host, move from this rank's private
 * control page to a shared page. If no address is free in every rank, continue without shared
 * memory, as on several hosts. */
DTRAIN__PRIVATE dtrain_result dtrain__find_page(dtrain_world *world, const dtrain__placement *place,
                                                size_t reserve_bytes)
{
    DTRAIN__TRY(dtrain__clocks_compare(world));
    DTRAIN__TRY(dtrain__find_hosts(world, place));
    for (int attempt = 0; attempt < 6 && world->node_count == 1 && !world->control->arenas;
         attempt++) {
        dtrain__region region;
        memset(&region, 0, sizeof region);
        DTRAIN__TRY(dtrain__try_region(world, reserve_bytes, attempt, &region));
        if (world->no_region[0]) continue;
        dtrain__page_release(world);
        world->page = region;
        world->control = region.control;
        world->gather_count = 0;
        world->gather = NULL;
        if (world->link) world->link->shared = true;
    }
    return DTRAIN_OK;
}
