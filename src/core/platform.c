/* The clock. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/log.h"

#if !defined(CLOCK_MONOTONIC) || !defined(MAP_ANONYMOUS)
#error "dtrain.h must come before any system header where DTRAIN_IMPLEMENTATION is defined"
#endif

DTRAIN_API double dtrain_seconds(void) { return 1e-9 * (double)dtrain__now_ns(); }
