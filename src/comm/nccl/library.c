/* Opening the NCCL library
 *
 * One list declares the table of functions and fills it. A library older than the header is refused
 * before any other call, so the compile-time checks are enough: every function in the list exists.
 * NCCL promises that old programs run with new libraries, but not the reverse. */

#include "comm/nccl/nccl_internal.h"

#ifndef DTRAIN_NCCL_LIBRARY
#define DTRAIN_NCCL_LIBRARY "libnccl.so.2"
#endif

#ifdef DTRAIN_NCCL_LINKED
static dtrain_result dtrain_nccl__open(dtrain_nccl__library *nccl)
{
#define DTRAIN_NCCL_TAKE(name) nccl->name = &nccl##name;
    DTRAIN_NCCL_LIST(DTRAIN_NCCL_TAKE)
#undef DTRAIN_NCCL_TAKE
    return DTRAIN_OK;
}
#else
/* Find a function. dlsym returns an object pointer; POSIX allows it to hold a function's address,
 * so its bytes are copied. */
static bool dtrain_nccl__find(void *library, const char *name, void *function)
{
    void *symbol = dlsym(library, name);
    memcpy(function, &symbol, sizeof symbol);
    return symbol != NULL;
}

/* Open the library and fill the table. The handle is never closed, because NCCL's threads can be
 * inside the library until the process ends. */
static dtrain_result dtrain_nccl__open(dtrain_nccl__library *nccl)
{
    const char *missing = NULL;
    void *library = dlopen(DTRAIN_NCCL_LIBRARY, RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "NCCL could not be opened (%s); install it, add its folder to "
                           "LD_LIBRARY_PATH, or leave comm_ops NULL for the local communicator",
                           dlerror());
#define DTRAIN_NCCL_FIND(name)                                              \
    if (!dtrain_nccl__find(library, "nccl" #name, &nccl->name) && !missing) \
        missing = "ncc"                                                     \
                  "l" #name;
    DTRAIN_NCCL_LIST(DTRAIN_NCCL_FIND)
#undef DTRAIN_NCCL_FIND
    /* An older library lacks functions too; its error should name the version. */
    if (!missing || nccl->GetVersion) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED, "%s is not an NCCL library: it has no %s",
                       DTRAIN_NCCL_LIBRARY, missing);
}
#endif

/* Write a version as text: 21801 becomes "2.18.1". */
DTRAIN_NCCL__PRIVATE const char *dtrain_nccl__version_text(uint32_t code, char text[24])
{
    const unsigned base = code >= 10000 ? 10000 : 1000; /* thousands until NCCL 2.8 */
    snprintf(text, 24, "%u.%u.%u", code / base, code % base / 100, code % 100);
    return text;
}

DTRAIN_NCCL__PRIVATE dtrain_result dtrain_nccl__load(dtrain_nccl__library *nccl, uint32_t *version)
{
    char header[24], library[24];
    int code = 0;
    memset(nccl, 0, sizeof *nccl);
    DTRAIN_NCCL_TRY(dtrain_nccl__open(nccl));
    const ncclResult_t result = nccl->GetVersion(&code);
    if (result != ncclSuccess)
        return dtrain_fail(DTRAIN_ERROR_SYSTEM, "ncclGetVersion failed with ncclResult_t %d",
                           (int)result);
    *version = (uint32_t)code;
    if (code >= NCCL_VERSION_CODE) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                       "the NCCL library found is version %s, but this program was compiled with "
                       "the header of %s; install that version or a newer one, or compile with the "
                       "older header",
                       dtrain_nccl__version_text(*version, library),
                       dtrain_nccl__version_text(NCCL_VERSION_CODE, header));
}

DTRAIN_NCCL__PRIVATE dtrain_result dtrain_nccl__code(ncclResult_t result)
{
    switch (result) {
    case ncclSuccess: return DTRAIN_OK;
    case ncclInvalidArgument: return DTRAIN_ERROR_ARGUMENT;
    case ncclInvalidUsage: return DTRAIN_ERROR_USAGE;
    case ncclRemoteError: return DTRAIN_ERROR_PEER;
    case ncclInternalError: return DTRAIN_ERROR_INTERNAL;
    default: return DTRAIN_ERROR_SYSTEM;
    }
}
