/* plan.h: what a run would be, or how fast its links are: the one door to --dry-run, --tune and --probe-links. A
 * program that trains (tools/run/run.h) needs nothing of this folder.
 *
 * How to read it: links.h and probe.h (--probe-links) -> machine.h, stages.h and forecast.h (--dry-run) -> tune.h
 * (--tune). */
#ifndef PLAN_PLAN_H
#define PLAN_PLAN_H

#include "tools/plan/links.h"
#include "tools/plan/tune.h"

/* Whether the switches ask for one of these. */
static bool plans(const run_settings *s)
{
    return s->dry_run || s->tune || s->cluster || s->probe_links;
}

/* Do what they ask. Return main's exit status. */
static int plan_run(run_settings *s, const run_program *program)
{
    dtrain_memory memory; /* whether it is there, the forecast tells */
    int here;
    if (s->cluster && !s->dry_run) return BAD("--cluster does nothing without --dry-run");
    if (s->dry_run && s->tune) return BAD("--dry-run and --tune: use one after the other");
    if (s->tune && s->pipeline > 1)
        return BAD("--tune with --pipeline %ld: trials of layouts with stages are not made",
                   s->pipeline);
    if (!s->dry_run && !s->tune) return train_and_probe(s, program);
    if (check_switches(s, program, true, &memory, &here)) return 2;
    return s->dry_run ? dry_run(s, program) : tune(s, program);
}

#endif /* PLAN_PLAN_H */
