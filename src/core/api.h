/* Version and linkage. */

#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#define DTRAIN_VERSION_MAJOR 0
#define DTRAIN_VERSION_MINOR 2
#define DTRAIN_VERSION_PATCH 0
#define DTRAIN_VERSION_STRING "0.2.0"

/* Linkage of every public function. Define DTRAIN_STATIC for a private copy in one file. `make lib`
 * defines DTRAIN_SHARED, with -fvisibility=hidden; programs that use the library do not define
 * it. */
#ifndef DTRAIN_API
#ifdef DTRAIN_STATIC
#define DTRAIN_API static
#elif defined(DTRAIN_SHARED)
#define DTRAIN_API extern __attribute__((visibility("default")))
#else
#define DTRAIN_API extern
#endif
#endif
