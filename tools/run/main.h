/* main.h: what a program does with switches that are complete: train, or tell what training would be. */
#ifndef RUN_MAIN_H
#define RUN_MAIN_H

#include "tools/run/tune.h"

/* Do what the switches ask. Return main's exit status. */
static int run_training(run_settings *s, const run_program *program)
{
    dtrain_launch_desc launch;
    if (s->cluster && !s->dry_run) return BAD("--cluster does nothing without --dry-run");
    if (s->dry_run && s->tune) return BAD("--dry-run and --tune: use one after the other");
    if (check_run(s, program, true)) return 2;
    if (s->dry_run) return dry_run(s, program);
    if (s->tune) return tune(s, program);
    if (check_outputs(s, program, true) || launch_desc(s, true, &launch)) return 2;
    launch.catch_signals = true; /* the ranks stop after the same step */
    return launch_ranks(&launch, run_rank, (void *)(uintptr_t)program);
}

#endif /* RUN_MAIN_H */
