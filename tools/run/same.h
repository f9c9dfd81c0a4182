/* same.h: do all ranks have the same flags and data? Two nodes may have been given other command lines, or another
 * --config, and would train together to numbers that mean nothing. The first exchange of a run compares a hash of all
 * flags, as they are in force; where that differs, the first flag that differs is looked for and named. */
#ifndef RUN_SAME_H
#define RUN_SAME_H

#include "tools/run/settings.h"

enum { SAME_TEXT = 256 };

/* Flags that ranks may give differently: they change no number and no exchange, or the library compares what comes of
 * them. Of a path only whether there is one is compared: it is one of a rank's own machine. */
static const char *const free_flags[] = {
    "--config",  "--config-out", "--log",         "--tensorboard",  "--prometheus",
    "--trace",   "--threads",    "--workers",     "--ranks",        "--thread-ranks",
    "--timeout", "--restarts",   "--stop-status", "--memory-limit", NULL};

static bool may_differ(const char *name)
{
    const char *const *free_flag = free_flags;
    while (*free_flag && strcmp(*free_flag, name) != 0) free_flag++;
    return *free_flag != NULL;
}

static uint64_t hash_text(const char *text)
{
    uint64_t hash = 0xcbf29ce484222325u; /* FNV-1a */
    for (; *text; text++) hash = (hash ^ (unsigned char)*text) * 0x100000001b3u;
    return hash;
}

/* Fail on all ranks if their texts differ, with the name of the thing, the text of the rank that differs from most,
 * and that of the others. Collective. */
static dtrain_result same_text(dtrain_world *world, const char *name, const char *text)
{
    uint64_t hashes[DTRAIN_MAX_RANKS];
    const uint64_t own = hash_text(text);
    const int ranks = dtrain_world_size(world);
    char texts[2][SAME_TEXT], others[32] = "the others";
    int usual = 0, odd = 0, most = 0;
    dtrain_result result = dtrain_world_all_gather(world, &own, sizeof own, hashes);
    if (result != DTRAIN_OK) return result;
    for (int i = 0; i < ranks; i++) {
        int same = 0;
        for (int k = 0; k < ranks; k++) same += hashes[k] == hashes[i];
        if (same > most) most = same, usual = i;
    }
    if (most == ranks) return DTRAIN_OK;
    while (hashes[odd] == hashes[usual]) odd++;
    char *all = (char *)malloc((size_t)ranks * SAME_TEXT), mine[SAME_TEXT];
    snprintf(mine, sizeof mine, "%s", text);
    if (all) result = dtrain_world_all_gather(world, mine, SAME_TEXT, all);
    else result = dtrain_fail(DTRAIN_ERROR_MEMORY, "no memory to compare flags");
    for (int i = 0; i < 2 && result == DTRAIN_OK; i++)
        memcpy(texts[i], all + (size_t)(i ? odd : usual) * SAME_TEXT, SAME_TEXT);
    free(all);
    if (result != DTRAIN_OK) return result;
    if (most < ranks - 1 || ranks == 2) snprintf(others, sizeof others, "rank %d", usual);
    return dtrain_fail(DTRAIN_ERROR_MISMATCH,
                       "rank %d has %s %s, %s %s; give the same to every rank", odd, name, texts[1],
                       others, texts[0]);
}

/* Write a flag's value as it is compared. */
static void compared_value(const flag *f, char *text, size_t room)
{
    if (may_differ(f->name)) *text = 0;
    else if (!config__value(f, text, room)) snprintf(text, room, "not set");
    else if (f->kind == 'p') snprintf(text, room, "set");
}

static uint64_t hash_flags(void)
{
    char text[CONFIG_VALUE];
    uint64_t hash = 0;
    for (int i = 0; i < flag_count; i++) {
        if (!flag_table[i].name) continue;
        compared_value(&flag_table[i], text, sizeof text);
        hash = hash * 0x9e3779b97f4a7c15u + hash_text(text) + hash_text(flag_table[i].name);
    }
    return hash;
}

/* Hash of the data, where a program has looked at it before the launch. */
static uint64_t run_data;

/* Return what tells this job from another one at its port. */
static uint64_t hash_job(void) { return hash_flags() * 0x9e3779b97f4a7c15u + run_data; }

/* Fail on all ranks if their flags differ. Collective. */
static dtrain_result same_flags(dtrain_world *world)
{
    const uint64_t own = hash_flags();
    uint64_t hashes[DTRAIN_MAX_RANKS];
    char text[CONFIG_VALUE];
    bool same = true;
    dtrain_result result = dtrain_world_all_gather(world, &own, sizeof own, hashes);
    for (int r = 0; r < dtrain_world_size(world) && result == DTRAIN_OK; r++)
        same = same && hashes[r] == hashes[0];
    for (int i = 0; i < flag_count && !same && result == DTRAIN_OK; i++) {
        if (!flag_table[i].name) continue;
        compared_value(&flag_table[i], text, sizeof text);
        result = same_text(world, flag_table[i].name, text);
    }
    return result;
}

/* Fail on all ranks if the files of their datasets have other bytes. Collective. */
static dtrain_result same_data(dtrain_world *world, const dtrain_dataset *dataset)
{
    dtrain_dataset_info info;
    char text[SAME_TEXT];
    dtrain_dataset_query(dataset, &info);
    snprintf(text, sizeof text, "with %lld items in %llu bytes of files, whose hash is %08x",
             (long long)info.item_count, (unsigned long long)info.file_bytes,
             (unsigned)info.file_sample);
    return same_text(world, "--data", text);
}

#endif /* RUN_SAME_H */
