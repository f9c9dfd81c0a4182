/* Descs and infos of programs that were compiled with another dtrain.h
 *
 *     program (older)   | fields it knows       |              program (newer) | ... | unknown |
 *                            | copied                                              | must be 0
 *     library           | fields it knows ...   | 0 |                  library | ... |
 *
 * The library's own calls do not pass through these copies: they use dtrain__*_info functions. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "world/abi_internal.h"
#include "world/world_internal.h"
#include "sizes.h"

#ifdef DTRAIN_SHARED
/* One row per struct of the list; `bytes` is its size, or its first version's if it can grow. */
#define DTRAIN__ABI_GROWS_ROW(name, last, first) {#name, first, false},
#define DTRAIN__ABI_FIXED_ROW(name, bytes) {#name, bytes, true},
static const struct {
    const char *name;
    uint32_t bytes;
    bool fixed;
} dtrain__abi_rows[] = {DTRAIN_ABI_LIST(DTRAIN__ABI_GROWS_ROW, DTRAIN__ABI_FIXED_ROW)};
#endif

/* An array of negative size means that a struct was changed in a way that core/abi.h forbids. */
#define DTRAIN__ABI_GROWN(name, last, first) \
    typedef char dtrain__abi_grown_##name    \
        [offsetof(dtrain_##name, last) + sizeof(((dtrain_##name *)NULL)->last) >= first ? 1 : -1];
#define DTRAIN__ABI_SAME(name, bytes) \
    typedef char dtrain__abi_same_##name[sizeof(dtrain_##name) == bytes ? 1 : -1];
DTRAIN_ABI_LIST(DTRAIN__ABI_GROWN, DTRAIN__ABI_SAME)

DTRAIN__PRIVATE const dtrain_abi *dtrain__abi_of(const dtrain_world *world)
{
    return world ? &world->abi : NULL;
}

/* Check the sizes of a program's structs, at a call that makes a world, and copy them to *own. */
DTRAIN__PRIVATE dtrain_result dtrain__abi_check(const char *call, const dtrain_abi *abi,
                                                dtrain_abi *own)
{
    memset(own, 0, sizeof *own);
#ifdef DTRAIN_SHARED
    if (!abi || !abi->count)
        return dtrain_fail(DTRAIN_ERROR_USAGE,
                           "%s: abi of the desc is NULL, and this library (%s) was compiled apart "
                           "from the program: set it to &dtrain_header_abi",
                           call, DTRAIN_VERSION_STRING);
    for (uint32_t i = 0; i < abi->count && i < DTRAIN__ABI_COUNT; i++) {
        own->bytes[own->count++] = abi->bytes[i];
        if (dtrain__abi_rows[i].fixed ? abi->bytes[i] != dtrain__abi_rows[i].bytes
                                      : abi->bytes[i] < dtrain__abi_rows[i].bytes)
            return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                               "%s: dtrain_%s has %u bytes in the program and %u in this library "
                               "(%s): compile the program with the dtrain.h of this library",
                               call, dtrain__abi_rows[i].name, abi->bytes[i],
                               dtrain__abi_rows[i].bytes, DTRAIN_VERSION_STRING);
    }
#else
    if (abi && memcmp(abi, &dtrain_header_abi, sizeof *abi) != 0)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED, "%s: the program has another dtrain.h", call);
#endif
    return DTRAIN_OK;
}

/* Return the program's size of a struct. */
DTRAIN__PRIVATE size_t dtrain__abi_bytes(const dtrain_abi *abi, dtrain__abi_entry which)
{
    if (abi && (uint32_t)which < abi->count) return abi->bytes[which];
#ifdef DTRAIN_SHARED
    return dtrain__abi_rows[which].bytes;
#else
    return dtrain_header_abi.bytes[which];
#endif
}

/* Copy the program's desc to *own; fields that it does not have, or all if it is NULL, are 0. */
DTRAIN__PRIVATE dtrain_result dtrain__take(const dtrain_abi *abi, dtrain__abi_entry which,
                                           const void *given, void *own)
{
    const size_t theirs = dtrain__abi_bytes(abi, which), ours = dtrain_header_abi.bytes[which];
    memset(own, 0, ours);
    if (!given) return DTRAIN_OK;
    memcpy(own, given, theirs < ours ? theirs : ours);
#ifdef DTRAIN_SHARED
    for (size_t i = ours; i < theirs; i++)
        if (((const char *)given)[i])
            return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                               "dtrain_%s: a field at byte %zu is not 0, and this library (%s) is "
                               "older than the program and knows %zu bytes: leave the field at 0, "
                               "or use the library that came with the program's dtrain.h",
                               dtrain__abi_rows[which].name, i, DTRAIN_VERSION_STRING, ours);
#endif
    return DTRAIN_OK;
}

/* Copy an info to the program's (NULL is allowed); fields that `own` does not have, or all if it is
 * NULL, are 0. */
DTRAIN__PRIVATE void dtrain__give(const dtrain_abi *abi, dtrain__abi_entry which, const void *own,
                                  void *info)
{
    const size_t theirs = dtrain__abi_bytes(abi, which), ours = dtrain_header_abi.bytes[which];
    if (info) memset(info, 0, theirs);
    if (info && own) memcpy(info, own, theirs < ours ? theirs : ours);
}
