/* warned_ranks.h: a launch of ranks of one thread, whose warnings are counted. */
#ifndef WARNED_RANKS_H
#define WARNED_RANKS_H

static int warnings;
static char warning[1024];

static void count_warning(void *user, dtrain_log_level level, int rank, const char *message)
{
    (void)user, (void)rank;
    if (level != DTRAIN_LOG_WARNING) return;
    warnings++;
    snprintf(warning, sizeof warning, "%s", message);
}

static dtrain_result with_ranks(uint32_t ranks, uint32_t mode, const dtrain_allocator *allocator,
                                dtrain_rank_fn rank_main, void *user)
{
    dtrain_launch_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.rank_count = ranks;
    desc.mode = mode;
    desc.options.log = count_warning;
    desc.threads_per_rank = 1;
    if (allocator) desc.options.allocator = *allocator;
    return dtrain_launch(&desc, rank_main, user, NULL);
}

#endif
