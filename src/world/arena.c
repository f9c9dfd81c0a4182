/* Shared memory: the region and its arenas
 *
 * Address space is reserved for all ranks at once, and a page is committed when it is touched: a
 * large reserve costs nothing. Two limits keep the kernel from killing a rank later: the size of an
 * arena, and the memory that was free at the start, for the allocations of all ranks together. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/result.h"
#include "world/world.h"
#include "world/world_internal.h"
#include "device/backend.h"
#include "device/device.h"

#define DTRAIN__SMALL_PROMISE ((size_t)1 << 20) /* bytes */

/* Map anonymous memory or, if file >= 0, a file of that size; return MAP_FAILED and errno on an
 * error. Check `ulimit -f` first, because ftruncate beyond it raises a signal. Exclude the memory
 * from core files: it would fill them with zeros. */
DTRAIN__PRIVATE void *dtrain__map_bytes(void *hint, size_t bytes, int file)
{
    struct rlimit limit;
    int flags = MAP_SHARED | MAP_NORESERVE;
    if (file < 0) flags |= MAP_ANONYMOUS;
    else if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && (uint64_t)limit.rlim_cur < bytes) {
        errno = EFBIG;
        return MAP_FAILED;
    } else if (ftruncate(file, (off_t)bytes) != 0) return MAP_FAILED;
    void *memory = mmap(hint, bytes, PROT_READ | PROT_WRITE, flags, file, 0);
#ifdef MADV_DONTDUMP
    if (memory != MAP_FAILED) madvise(memory, bytes, MADV_DONTDUMP);
#endif
    return memory;
}

/* Map a control page, then the arenas of `ranks` ranks (0: no memory is shared). This reserves
 * address space, not memory: `given` bytes per rank or, if given is 0, the machine's memory. If
 * that fails (ulimit -v, strict overcommit, valgrind), halve the default size, down to 64 MiB. */
DTRAIN__PRIVATE dtrain_result dtrain__map_region(size_t given, uint32_t ranks, void *hint, int file,
                                                 dtrain__region *region)
{
    const size_t page = dtrain__page_bytes(), least = (size_t)64 << 20;
    const size_t control = dtrain__round_up(sizeof(dtrain__control), page);
    const long pages = sysconf(_SC_PHYS_PAGES);
    size_t arena = given ? given : pages > 0 ? (size_t)pages * page : least, bytes = 0;
    for (;; arena /= 2) {
        if (arena < least && !given) arena = least;
        void *memory = MAP_FAILED;
        if (arena <= SIZE_MAX / 2) arena = dtrain__round_up(arena, page);
        if (dtrain__size_mul(arena, ranks, &bytes) && bytes <= SIZE_MAX / 2)
            memory = dtrain__map_bytes(hint, bytes += control, file);
        if (memory != MAP_FAILED) {
            region->control = (dtrain__control *)memory;
            region->bytes = bytes;
            region->control->arenas = ranks ? (char *)memory + control : NULL;
            region->control->arena_bytes = ranks ? arena : 0;
            region->control->free_at_start = dtrain__free_memory();
            return DTRAIN_OK;
        }
        if (given || arena == least)
            return dtrain_fail(DTRAIN_ERROR_MEMORY,
                               "dtrain_launch: %u times %zu bytes of address space could not be "
                               "reserved: %s; lower reserve_bytes or raise ulimit -v",
                               ranks, arena, strerror(errno));
    }
}

/* Return true if every rank can read and write these bytes at this address. */
DTRAIN__PRIVATE bool dtrain__is_shared(const dtrain_world *world, const void *memory, size_t bytes)
{
    const uintptr_t begin = (uintptr_t)world->control->arenas, at = (uintptr_t)memory;
    const size_t all = (size_t)world->size * world->control->arena_bytes;
    return at >= begin && at - begin <= all && bytes <= all - (at - begin);
}

/* Return the device that accounts for communicator memory: the CPU device, or NULL with a GPU. */
static dtrain_device *dtrain__charged_device(const dtrain_world *world)
{
    return world->device && world->device->ops->host_memory ? world->device : NULL;
}

/* Account for an allocation, or fail. Pages are committed when touched, so all allocations together
 * must fit in the memory that was free at the start (or is free now, if that is more), or the
 * kernel would kill a rank later. Small allocations do not ask the system: it takes up to 1 ms. */
DTRAIN__PRIVATE dtrain_result dtrain__promise(dtrain_world *world, size_t bytes)
{
    dtrain_device *device = dtrain__charged_device(world);
    if (device) DTRAIN__TRY(dtrain_device_account(device, &device->comm_bytes, bytes));
    const uint64_t start = world->control->free_at_start;
    uint64_t promised = dtrain__load(&world->control->promised), now;
    do { /* another rank can allocate at the same moment */
        const bool asks = bytes >= DTRAIN__SMALL_PROMISE || promised + bytes > start;
        now = asks ? dtrain__free_memory() : start;
        if (bytes > now || promised + bytes > (now > start ? now : start)) {
            if (device) device->comm_bytes -= bytes;
            return dtrain_fail(
                DTRAIN_ERROR_MEMORY,
                "shared memory: %zu bytes needed, %llu free (%llu promised to ranks so far); "
                "use a smaller model, more accumulation steps or another machine",
                bytes, (unsigned long long)now, (unsigned long long)promised);
        }
    } while (!__atomic_compare_exchange_n(&world->control->promised, &promised, promised + bytes,
                                          false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE));
    return DTRAIN_OK;
}

/* Return bytes of dtrain__promise. */
DTRAIN__PRIVATE void dtrain__unpromise(dtrain_world *world, size_t bytes)
{
    dtrain_device *device = dtrain__charged_device(world);
    __atomic_fetch_sub(&world->control->promised, (uint64_t)bytes, __ATOMIC_ACQ_REL);
    if (device) device->comm_bytes -= bytes;
}

/* Allocate zeroed whole pages from this rank's arena, first fit. */
DTRAIN__PRIVATE dtrain_result dtrain__shared_alloc(dtrain_world *world, size_t bytes, void **out)
{
    const size_t asked = bytes, page = dtrain__page_bytes(), all = world->control->arena_bytes;
    *out = NULL;
    bytes = asked > all ? all + 1 : dtrain__round_up(asked ? asked : 1, page);
    if (!dtrain__grow(&world->allocator, (void **)&world->ranges, world->range_count,
                      &world->range_room, sizeof *world->ranges, "a list of shared memory"))
        return DTRAIN_ERROR_MEMORY;
    size_t at = 0, i = 0;
    for (; i < world->range_count && world->ranges[i].begin - at < bytes; i++)
        at = world->ranges[i].end;
    if (bytes > all - at)
        return dtrain_fail(DTRAIN_ERROR_MEMORY,
                           "shared memory: no %zu bytes left of the %zu reserved per rank; raise "
                           "reserve_bytes of dtrain_world_options",
                           asked, all);
    DTRAIN__TRY(dtrain__promise(world, bytes));
    memmove(world->ranges + i + 1, world->ranges + i,
            (world->range_count - i) * sizeof *world->ranges);
    world->ranges[i].begin = at;
    world->ranges[i].end = at + bytes;
    world->range_count++;
    *out = world->control->arenas + (size_t)world->rank * all + at;
    return DTRAIN_OK;
}

/* Free memory of this rank's arena, and return its pages to the system at once: so the next
 * allocation reads as zero. Ignore an address outside of this arena. */
DTRAIN__PRIVATE void dtrain__shared_free(dtrain_world *world, void *memory)
{
    char *arena = world->control->arenas + (size_t)world->rank * world->control->arena_bytes;
    for (size_t i = 0; memory && i < world->range_count; i++) {
        const dtrain__range range = world->ranges[i];
        if (arena + range.begin != memory) continue;
        if (madvise(memory, range.end - range.begin, MADV_REMOVE) != 0)
            memset(memory, 0, range.end - range.begin);
        dtrain__unpromise(world, range.end - range.begin);
        world->range_count--;
        memmove(world->ranges + i, world->ranges + i + 1,
                (world->range_count - i) * sizeof *world->ranges);
        return;
    }
}
