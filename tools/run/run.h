/* run.h: a training program around a model: switches, checks, launch, training, reports. Include it behind dtrain.h,
 * with RUN_NAME defined; tools/train_gpt and examples/resnet_cifar.c are such programs.
 *
 * How to read it: settings.h (the switches) -> recorded.h (those in checkpoints) -> job.h (what a run consists of, and
 * what a program gives: run_program) -> monitor.h (what it reports, and where to) -> report.h (what rank 0 prints) ->
 * loop.h (what every rank does; same.h: after it has compared flags with the others; with --probe-links links.h and
 * probe.h) -> layout.h (what a restart with fewer ranks
 * makes of the axes) -> checks.h (what is refused before a rank starts) -> launch.h (from switches to dtrain_launch) ->
 * machine.h, stages.h and forecast.h (--dry-run) -> tune.h (--tune) -> main.h. */
#ifndef RUN_H
#define RUN_H

#ifdef DTRAIN_USE_NCCL /* its implementation, too: a program need not know what launch.h chooses */
#define DTRAIN_NCCL_IMPLEMENTATION
#include "dtrain_nccl.h"
#endif
#include "tools/run/main.h"

#endif /* RUN_H */
