/* Reading the environment
 *
 * The result is a dtrain__placement, from which launch.c starts ranks and the rendezvous finds rank
 * 0. It is a pure function of the variables, so that tests can pass any. */

#pragma once

#include "core/platform_internal.h"
#include "core/result.h"
#include "world/link_internal.h"

typedef char *(*dtrain__lookup_fn)(const char *name); /* getenv */

/* launch/environment.c */
DTRAIN__PRIVATE const char *dtrain__env_text(dtrain__lookup_fn env, const char *name);
DTRAIN__PRIVATE dtrain_result dtrain__recognise(dtrain__lookup_fn env, dtrain__placement *out);
