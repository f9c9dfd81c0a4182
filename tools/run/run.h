/* run.h: a training program around a model: switches, checks, launch, training, reports. Include it after dtrain.h,
 * with RUN_NAME defined; tools/train_gpt and examples/resnet_cifar.c are such programs.
 *
 * How to read it: main.h (what a run does) -> settings.h (the switches) -> job.h (what a run consists of, and what a
 * program gives: run_program) -> loop.h (what every rank does) -> report.h (what rank 0 prints). Then what these stand
 * on: recorded.h (the switches in checkpoints), monitor.h (what is reported, and where to), same.h (ranks compare their
 * flags), split.h (a global batch as micro-batches), checks.h (what is refused before a rank starts), layout.h (the
 * axes after a restart with fewer ranks) and launch.h (from switches to dtrain_launch).
 *
 * --dry-run, --tune and --probe-links are in tools/plan, which this folder does not include. */
#ifndef RUN_H
#define RUN_H

#ifdef DTRAIN_USE_NCCL /* its implementation, too: a program need not know what launch.h chooses */
#define DTRAIN_NCCL_IMPLEMENTATION
#include "dtrain_nccl.h"
#endif
#include "tools/run/main.h"

#endif /* RUN_H */
