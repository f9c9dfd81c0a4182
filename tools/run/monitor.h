/* monitor.h: what a run reports, and where to: the one place in which switches become sinks of the metrics. */
#ifndef RUN_MONITOR_H
#define RUN_MONITOR_H

#include "tools/run/recorded.h"
#include "tools/run/settings.h"

/* Read a file's first line into text (room); "" where it cannot be read. */
static const char *first_line(const char *path, char *text, size_t room)
{
    FILE *file = fopen(path, "r");
    *text = 0;
    if (file && !fgets(text, (int)room, file)) *text = 0;
    if (file) fclose(file);
    text[strcspn(text, "\n")] = 0;
    return text;
}

/* Read the commit of the working folder out of git's files: a rank starts no other program. "" where there is none,
 * or where git keeps it in another place. */
static void commit_text(char *text, size_t room)
{
    char up[32] = "", path[512], head[256];
    for (;; snprintf(up + strlen(up), sizeof up - strlen(up), "../")) {
        snprintf(path, sizeof path, "%s.git/HEAD", up);
        if (*first_line(path, head, sizeof head) || strlen(up) + 4 > sizeof up) break;
    }
    if (strncmp(head, "ref: ", 5) == 0) {
        snprintf(path, sizeof path, "%s.git/%s", up, head + 5);
        first_line(path, head, sizeof head);
    }
    snprintf(text, room, "%.12s", strspn(head, "0123456789abcdef") >= 40 ? head : "");
}

enum { MONITOR_TEXT = 16384 };

/* Write the flags in force as a text, whole lines only: the file of --config, or NAME=VALUE for hyper-parameters. */
static const char *flags_text(char *text, bool hyper)
{
    char value[CONFIG_VALUE];
    size_t used = 0;
    commit_text(value, sizeof value);
    *text = 0;
    if (*value) used = (size_t)sprintf(text, hyper ? "commit=%s\n" : "# commit %s\n", value);
    for (int i = 0; i < flag_count; i++) {
        const flag *f = &flag_table[i];
        bool wanted = !hyper && f->name && config__kept(f);
        for (int k = 0; hyper && f->name && k < COUNT(hyper_parameters); k++)
            wanted = wanted || strcmp(f->name, hyper_parameters[k]) == 0;
        if (!wanted || !config__value(f, value, sizeof value)) continue;
        if (used + strlen(f->name) + strlen(value) + 4 > MONITOR_TEXT) break;
        used += (size_t)sprintf(text + used, hyper ? "%s=%s\n" : "%s = %s\n", f->name + 2, value);
    }
    return text;
}

/* What the switches ask of the metrics; texts has room for two of MONITOR_TEXT, which are copied by
 * dtrain_metrics_create. */
static dtrain_metrics_desc metrics_desc(const run_settings *s, char *texts)
{
    dtrain_metrics_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.jsonl_path = s->log;
    desc.tensorboard_dir = s->tensorboard;
    desc.histogram_every = (uint32_t)s->histograms;
    desc.run_name = RUN_NAME;
    desc.config = s->tensorboard || s->log ? flags_text(texts, false) : NULL;
    desc.hparams = s->tensorboard ? flags_text(texts + MONITOR_TEXT, true) : NULL;
    return desc;
}

#endif /* RUN_MONITOR_H */
