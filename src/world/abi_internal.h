/* Descs and infos of programs that were compiled with another dtrain.h, see core/abi.h. */

#pragma once

#include "core/abi.h"
#include "core/result.h"
#include "world/world.h"

#define DTRAIN__ABI_GROWS(name, last, first) DTRAIN__ABI_##name,
#define DTRAIN__ABI_FIXED(name, bytes) DTRAIN__ABI_##name,
typedef enum dtrain__abi_entry {
    DTRAIN_ABI_LIST(DTRAIN__ABI_GROWS, DTRAIN__ABI_FIXED) DTRAIN__ABI_COUNT
} dtrain__abi_entry;

/* Replace the program's desc (NULL is allowed) by a copy that has this library's size. A program
 * compiled together with the library has the same structs: no copy is needed. */
#ifdef DTRAIN_SHARED
#define DTRAIN__TAKE(abi, name, desc)                                          \
    dtrain_##name own_##name;                                                  \
    DTRAIN__TRY(dtrain__take((abi), DTRAIN__ABI_##name, (desc), &own_##name)); \
    if (desc) (desc) = &own_##name
#else
#define DTRAIN__TAKE(abi, name, desc) (void)(abi)
#endif

/* world/abi.c */
DTRAIN__PRIVATE const dtrain_abi *dtrain__abi_of(const dtrain_world *world);
DTRAIN__PRIVATE dtrain_result dtrain__abi_check(const char *call, const dtrain_abi *abi,
                                                dtrain_abi *own);
DTRAIN__PRIVATE size_t dtrain__abi_bytes(const dtrain_abi *abi, dtrain__abi_entry which);
DTRAIN__PRIVATE dtrain_result dtrain__take(const dtrain_abi *abi, dtrain__abi_entry which,
                                           const void *given, void *own);
DTRAIN__PRIVATE void dtrain__give(const dtrain_abi *abi, dtrain__abi_entry which, const void *own,
                                  void *info);
