/* The clock. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/log.h"

#include <errno.h>
#include <fcntl.h>
#include <float.h>
#include <limits.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/prctl.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#ifdef DTRAIN_USE_CBLAS
#include <cblas.h>
#endif
#ifdef DTRAIN_USE_MPI
#ifndef OMPI_SKIP_MPICXX
#define OMPI_SKIP_MPICXX 1 /* the C++ bindings that MPI no longer has */
#endif
#ifndef MPICH_SKIP_MPICXX
#define MPICH_SKIP_MPICXX 1
#endif
#include <mpi.h>
#endif

#if !defined(CLOCK_MONOTONIC) || !defined(MAP_ANONYMOUS)
#error "dtrain.h must come before any system header where DTRAIN_IMPLEMENTATION is defined"
#endif

DTRAIN_API double dtrain_seconds(void) { return 1e-9 * (double)dtrain__now_ns(); }

/* Results, version
 *
 * The last error is thread-local, as errno is: ranks may be threads, and a rank's helper threads
 * hand their errors to the thread that asked. The rank is put in front of every sentence so that
 * the output of many ranks stays readable. */
