#include "manual.h"

#if !defined(DTRAIN_H) && !defined(DTRAIN__ISA)
#define DTRAIN_H

/* The implementation needs POSIX and Linux names, and libc fixes what it shows at the first system
 * include: so dtrain.h comes first in the file that defines DTRAIN_IMPLEMENTATION. */
#if defined(DTRAIN_IMPLEMENTATION) && !defined(_GNU_SOURCE)
#define _GNU_SOURCE 1
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

#ifdef __cplusplus
extern "C" {
#endif

/* What a training program needs, in four rings, each complete without those that follow. */

/* Ring 1, core: ranks, their communication, strategies, optimizers. */
#include "core/abi.h"
#include "core/api.h"
#include "core/result.h"
#include "core/log.h"
#include "core/dtype.h"
#include "device/device.h"
#include "world/world.h"
#include "world/timeline.h"
#include "launch/launch.h"
#include "launch/join.h"
#include "comm/comm.h"
#include "parallel/mesh.h"
#include "parallel/cut.h"
#include "parallel/pipeline.h"
#include "strategy/params.h"
#include "strategy/strategy.h"
#include "strategy/query.h"
#include "strategy/memory.h"
#include "strategy/compression.h"
#include "optim/scaler.h"
#include "optim/optimizer.h"

/* Ring 2, state: what must survive, checkpoints, import and export. */
#include "state/state.h"
#include "state/storage.h"
#include "state/checkpoint.h"
#include "state/export.h"

/* Ring 3, models: tape, operations, data, trainer. */
#include "tape/tape.h"
#include "tape/ops.h"
#include "train/data.h"
#include "train/trainer.h"

/* Ring 4, monitor: the record of a step for people and programs. */
#include "monitor/metrics.h"

/* What an author of an operation or a backend needs besides. */
#include "strategy/hook.h"
#include "tape/op.h"
#include "device/backend.h"
#include "comm/backend.h"

/* For a library that was compiled apart from its program: see core/abi.h. */
#include "sizes.h"
#include "launch/join_mpi.h"

#ifdef __cplusplus
}
#endif

#endif /* DTRAIN_H */

/* Readers of the API can stop here. */

#if defined(DTRAIN_IMPLEMENTATION) && defined(__SIZEOF_POINTER__) && __SIZEOF_POINTER__ < 8
#error "dtrain.h needs a 64-bit system: sizes, offsets and atomics have 64 bits; leave -m32 out"
#elif defined(DTRAIN_IMPLEMENTATION) && !defined(DTRAIN__IMPLEMENTED) && !defined(DTRAIN__ISA)
#define DTRAIN__IMPLEMENTED

/* Functions that only an omitted ring calls drop out of the object. */
#pragma GCC diagnostic push
#if defined(__GNUC__) && !defined(__clang__)
/* gcc guesses without the passes that DTRAIN__COLD leaves out; src/ is compiled with all. */
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wpragmas" /* another version may not know one of these passes */
#endif
#if defined(DTRAIN_CORE) || defined(DTRAIN_OMIT_STATE) || defined(DTRAIN_OMIT_MODELS) || \
    defined(DTRAIN_OMIT_MONITOR)
#pragma GCC diagnostic ignored "-Wunused-function"
#endif
#define DTRAIN__PRIVATE static
#define DTRAIN__INTRINSICS
#define DTRAIN__KERNEL_TEXT "dtrain.h" /* this file includes itself, see device/cpu/kernels.c */

/* ---- Ring 1: core ----------------------------------------------------------------------------*/

#include "core/platform.c"
#include "core/result.c"
#include "core/log.c"
#include "core/dtype.c"
#include "core/random.c"
#include "core/hash.c"
DTRAIN__COLD
#include "world/world.c"
#include "world/abi.c"
#include "world/timeline.c"
#include "world/control.c"
#include "world/arena.c"
#include "world/link.c"
#include "world/rendezvous.c"
#include "world/page.c"
#include "world/signals.c"
#include "comm/comm.c"
#include "comm/same.c"
#include "comm/flight.c"
#include "comm/engine.c"
DTRAIN__HOT
#include "comm/reduce.c"
#include "comm/local.c"
DTRAIN__COLD
#include "comm/circle.c"
#include "comm/staged.c"
#include "comm/backend.c"
#include "launch/launch.c"
#include "launch/rank.c"
#include "launch/join.c"
#include "launch/environment.c"
#include "launch/restart.c"
#include "parallel/mesh.c"
#include "parallel/cut.c"
#include "parallel/chunks.c"
#include "strategy/params.c"
#include "strategy/stages.c"
#include "strategy/layout.c"
#include "strategy/memory.c"
#include "strategy/reduce.c"
#include "strategy/counts.c"
#include "strategy/norm.c"
#include "strategy/missing.c"
#include "strategy/units.c"
#include "strategy/values.c"
#include "strategy/calls.c"
#include "strategy/ties.c"
#include "strategy/tensor.c"
#include "strategy/wire.c"
#include "strategy/compress.c"
#include "strategy/topk.c"
#include "strategy/steps.c"
#include "strategy/join.c"
#include "strategy/offload.c"
#include "strategy/levels.c"
#include "strategy/compare.c"
#include "strategy/settings.c"
#include "strategy/create.c"
#include "strategy/query.c"
#include "strategy/plan.c"
#include "optim/scaler.c"
#include "optim/optimizer.c"
#include "optim/groups.c"
#include "optim/schedule.c"

/* Structures of a ring that other rings read, also if that ring is left out. */
#include "state/source_internal.h"
#include "train/view_internal.h"

/* ---- Ring 2: state ---------------------------------------------------------------------------*/

/* The texts and checksums of files, which the ring of monitor uses, too. */

#if DTRAIN__STATE || DTRAIN__MONITOR
DTRAIN__HOT
#include "core/crc32c.c"
DTRAIN__COLD
#include "core/json.c"
#endif
#if DTRAIN__STATE || DTRAIN__MODELS || DTRAIN__MONITOR
#include "strategy/view.c" /* the questions of these rings to a strategy */
#endif
#if DTRAIN__STATE
#include "state/state.c"
#include "state/box.c"
#include "state/pieces.c"
#include "state/save.c"
#include "state/load.c"
#include "state/export.c"
#include "state/directory.c"
#include "state/manifest.c"
#include "state/safetensors.c"
#include "state/storage.c"
#endif

/* ---- Ring 3: models --------------------------------------------------------------------------*/

#if DTRAIN__MODELS
#include "strategy/samples.c"
#include "optim/recorded.c"
#include "optim/muon.c"
#include "parallel/schedule.c"
#include "parallel/runner.c"
#include "tape/tape.c"
#include "tape/op.c"
#include "tape/backward.c"
#include "tape/linear.c"
#include "tape/norms.c"
#include "tape/embedding.c"
#include "tape/attention.c"
#include "tape/shapes.c"
#include "tape/place.c"
#include "tape/convolution.c"
#include "tape/cross_entropy.c"
#include "tape/elementwise.c"
#include "tape/recompute.c"
#include "tape/stage.c"
#include "tape/arena.c"
#include "train/files.c"
#include "train/dataset.c"
#include "train/loader.c"
#include "train/micro_batch.c"
#include "train/queued_step.c"
#include "train/pipeline_step.c"
#include "train/plan.c"
#include "train/create.c"
#include "train/record.c"
#include "train/trainer.c"
#endif

/* ---- Ring 4: monitor -------------------------------------------------------------------------*/

#if DTRAIN__MONITOR
#include "monitor/metrics.c"
#include "monitor/file.c"
#include "monitor/console.c"
#include "monitor/lines.c"
#include "monitor/tensorboard.c"
#include "monitor/histogram.c"
#include "monitor/trace.c"
#endif

/* ---- MPI, of no ring: for programs that are compiled with DTRAIN_USE_MPI ----------------------*/

#include "comm/mpi.c"
#include "comm/mpi_meet.c"

/* ---- The device and its kernels; products and kernels of layers belong to ring 3 -------------*/

#include "device/device.c"
#include "device/plan.c"
#include "device/cpu/cpu.c"
#include "device/cpu/launch.c"
#if DTRAIN__MODELS
#include "device/cpu/launch_gemm.c"
#include "device/cpu/launch_layers.c"
#include "device/cpu/launch_convolution.c"
#endif
DTRAIN__HOT
#include "device/cpu/launch_sparse.c"
#include "device/cpu/pool.c"
#if DTRAIN__MODELS
#include "device/cpu/gemm.c"
#endif
#include "device/cpu/kernels.c"

/* Restore how the host rounds a * b + c, see core/platform_internal.h. */
#if defined(__clang__)
#pragma STDC FP_CONTRACT DEFAULT
#else
#pragma GCC pop_options
#endif
#pragma GCC diagnostic pop

#endif /* DTRAIN_IMPLEMENTATION */

/* The kernels, once for each instruction set: see device/cpu/kernels.c. */
#ifdef DTRAIN__ISA
#include "device/cpu/kernels/text.h"
#endif
