/* main.h: what a program does with switches that are complete. */
#ifndef RUN_MAIN_H
#define RUN_MAIN_H

#include "tools/run/launch.h"

/* Train as the switches say. Return main's exit status. */
static int run_training(run_settings *s, const run_program *program)
{
    dtrain_launch_desc launch;
    if (check_run(s, program, true) || check_outputs(s, program, true) ||
        launch_desc(s, true, &launch))
        return 2;
    launch.catch_signals = true; /* the ranks stop after the same step */
    return launch_ranks(&launch, run_rank, (void *)(uintptr_t)program);
}

#endif /* RUN_MAIN_H */
