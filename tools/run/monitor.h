/* monitor.h: what a run reports, and where to: the one place in which switches become sinks. */
#ifndef RUN_MONITOR_H
#define RUN_MONITOR_H

#include "tools/run/settings.h"

static dtrain_metrics_desc metrics_desc(const run_settings *s, int64_t steps, bool resumed,
                                        FILE *progress)
{
    dtrain_metrics_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.append = resumed;
    desc.total_steps = steps;
    desc.progress = progress;
    desc.progress_every = steps >= 200 ? (uint32_t)(steps / 20) : 1;
    desc.jsonl_path = s->log;
    return desc;
}

#endif /* RUN_MONITOR_H */
