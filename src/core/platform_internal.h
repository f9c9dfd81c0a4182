/* System headers, atomics, DTRAIN__PRIVATE. */

#pragma once

/* The implementation needs POSIX and Linux names. The first system include fixes the names that
 * libc shows, so this header comes first in every file. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif

#include <dirent.h>
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
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/prctl.h>
#endif
#if defined(__x86_64__) && defined(DTRAIN__INTRINSICS) /* long headers, for few files */
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

#include "core/api.h"

/* 1 if a ring is compiled. The ring of models has tape, data, trainer and the kernels of layers. */
#if defined(DTRAIN_CORE) || defined(DTRAIN_OMIT_STATE)
#define DTRAIN__STATE 0
#else
#define DTRAIN__STATE 1
#endif
#if defined(DTRAIN_CORE) || defined(DTRAIN_OMIT_MODELS)
#define DTRAIN__MODELS 0
#else
#define DTRAIN__MODELS 1
#endif
#if defined(DTRAIN_CORE) || defined(DTRAIN_OMIT_MONITOR)
#define DTRAIN__MONITOR 0
#else
#define DTRAIN__MONITOR 1
#endif

/* Round twice in a * b + c in every dialect: gcc rounds once with -std=gnu17 and in C++, but not
 * with -std=c99, so the bits of a training would depend on the flags. Code that wants one rounding
 * uses dtrain__vfma. dtrain.h restores the host's setting at its end. -ffast-math and clang's
 * -ffp-contract=fast override this setting. */
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#elif defined(__GNUC__)
#pragma GCC push_options
#pragma GCC optimize("fp-contract=off")
#endif

/* Files that compute nothing themselves (all but communicator and device) are compiled in dtrain.h
 * with -Os, without its passes that take long and gain little there. So gcc -O2 takes four fifths
 * of the time for dtrain.h, and makes a seventh less text. One pragma has the whole list, because a
 * second pragma would enable the passes of -Os again. */
#if defined(__OPTIMIZE__) && !defined(__OPTIMIZE_SIZE__) && !defined(__clang__)
/* clang-format off */
#define DTRAIN__PRAGMA(...) _Pragma(#__VA_ARGS__)
#define DTRAIN__COLD \
    DTRAIN__PRAGMA(GCC push_options) \
    DTRAIN__PRAGMA(GCC optimize("Os", \
        "no-tree-ccp,no-tree-dominator-opts,no-tree-fre,no-tree-sra,no-tree-dse,no-tree-pta", \
        "no-tree-ch,no-tree-sink,no-dce,no-dse,no-tree-forwprop,no-tree-copy-prop", \
        "no-tree-phiprop,no-tree-slsr,no-tree-loop-optimize,no-tree-loop-im,no-tree-pre", \
        "no-move-loop-invariants,no-if-conversion,no-if-conversion2,no-ssa-phiopt,no-ivopts", \
        "no-shrink-wrap,no-cprop-registers,no-compare-elim,no-combine-stack-adjustments", \
        "no-reorder-blocks,no-guess-branch-probability,no-expensive-optimizations,no-gcse", \
        "no-tree-vrp,no-schedule-insns2,no-code-hoisting,no-store-merging,no-caller-saves", \
        "no-rerun-cse-after-loop,no-tree-switch-conversion,no-tree-tail-merge,no-ssa-backprop", \
        "no-tree-bit-ccp,no-tree-reassoc,no-tree-cselim,no-optimize-strlen,no-devirtualize", \
        "no-isolate-erroneous-paths-dereference,no-hoist-adjacent-loads,no-lra-remat,no-ree", \
        "no-tree-builtin-call-dce,no-tree-slp-vectorize,no-tree-loop-vectorize", \
        "no-tree-loop-distribute-patterns,no-tree-scev-cprop,no-partial-inlining", \
        "no-early-inlining,no-ipa-icf,no-ipa-pure-const,no-ipa-sra,no-ipa-cp,no-ipa-bit-cp", \
        "no-ipa-vrp"))
/* clang-format on */
#define DTRAIN__HOT _Pragma("GCC pop_options")
#else
#define DTRAIN__COLD
#define DTRAIN__HOT
#endif

/* A private function that more than one file uses: static in the joined file, hidden if each file
 * is compiled separately. */
#ifndef DTRAIN__PRIVATE
#define DTRAIN__PRIVATE __attribute__((visibility("hidden"))) extern
#endif

#define DTRAIN__CACHE_LINE 64

#if defined(__GNUC__)
#define DTRAIN_RESTRICT __restrict
#define DTRAIN__UNUSED \
    __attribute__((unused)) /* a helper without a caller in some configurations */
#define DTRAIN__OWN_FRAME __attribute__((noinline)) /* keeps its stack out of its caller's */
#define DTRAIN__THREAD_LOCAL __thread
#define DTRAIN__PRINTF(at, first) __attribute__((format(printf, at, first)))
#else
#error "dtrain.h needs gcc or clang: atomics, thread-local storage and vector types come from there"
#endif

/* Atomics: the __atomic builtins, because <stdatomic.h> is neither C99 nor C++. */
#define dtrain__load(p) __atomic_load_n((p), __ATOMIC_ACQUIRE)
#define dtrain__store(p, v) __atomic_store_n((p), (v), __ATOMIC_RELEASE)
#define dtrain__fetch_add(p, v) __atomic_fetch_add((p), (v), __ATOMIC_ACQ_REL)

/* Pause a waiting core between two reads of memory. */
static inline void dtrain__pause(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

static inline uint64_t dtrain__now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static inline int64_t dtrain__min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t dtrain__max(int64_t a, int64_t b) { return a > b ? a : b; }

/* Multiply or add sizes that come from outside; false on overflow. */
static inline bool dtrain__size_mul(size_t a, size_t b, size_t *out)
{
    return !__builtin_mul_overflow(a, b, out);
}
static inline bool dtrain__size_add(size_t a, size_t b, size_t *out)
{
    return !__builtin_add_overflow(a, b, out);
}

/* Round up to a multiple of `unit`, a power of two; the caller makes sure that it cannot
 * overflow. */
static inline size_t dtrain__round_up(size_t bytes, size_t unit)
{
    return (bytes + unit - 1) & ~(unit - 1);
}

static inline uint32_t dtrain__f32_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}
static inline float dtrain__f32_from_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Return false for NaN and infinity: by the exponent bits, so that -ffast-math cannot remove it. */
static inline bool dtrain__is_finite(float value)
{
    return (dtrain__f32_bits(value) & 0x7f800000u) != 0x7f800000u;
}

/* The value of a figure that was not measured. A bit pattern, not NAN, survives -ffast-math. */
#define DTRAIN__NAN ((double)dtrain__f32_from_bits(0x7fc00000u))
