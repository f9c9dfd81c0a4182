/* plain.h: a run without any flag: it keeps its log and its model in a folder of its own, and its last lines say what
 * to try next. */
#ifndef PLAIN_H
#define PLAIN_H

#include "settings.h"

#include <sys/stat.h>

/* The folder is runs/sums, or runs/sums-2 where that is there; empty: flags say what is kept. */
typedef struct plain_run {
    char folder[32];
    char programs[3072]; /* the folder of this program, with its slash, as it was typed */
    char log[64], model[64];
} plain_run;

static plain_run plain;

/* Make the folder and let the run write there. Nothing that is there is written over. A process that another program
 * has started as one of several ranks keeps nothing. */
static void plain_begin(settings *s, const char *program)
{
    const char *slash = strrchr(program, '/');
    dtrain_launch_place place;
    char folder[sizeof plain.folder];
    int tried = 0;
    if (place_ranks(s->run, true, &place) || place.started_count != place.rank_count) return;
    snprintf(folder, sizeof folder, "runs");
    int error = mkdir(folder, 0777) == 0 ? EEXIST : errno;
    while (error == EEXIST && tried++ < 10000) {
        if (tried == 1) snprintf(folder, sizeof folder, "runs/sums");
        else snprintf(folder, sizeof folder, "runs/sums-%d", tried);
        error = mkdir(folder, 0777) == 0 ? 0 : errno;
    }
    if (error) {
        fprintf(stderr, RUN_NAME ": no log and no model will be kept: %s: %s\n", folder,
                strerror(error));
        return;
    }
    snprintf(plain.folder, sizeof plain.folder, "%s", folder);
    snprintf(plain.programs, sizeof plain.programs, "%.*s", slash ? (int)(slash - program) + 1 : 0,
             program);
    snprintf(plain.log, sizeof plain.log, "%s/log.jsonl", folder);
    snprintf(plain.model, sizeof plain.model, "%s/model.safetensors", folder);
    s->run->log = plain.log;
    s->export_to = plain.model;
}

/* Print what to try next, each as a line that can be typed. */
static void plain_end(void)
{
    const char *const in = plain.programs;
    char report[sizeof plain.programs + 16];
    if (!plain.folder[0]) return;
    snprintf(report, sizeof report, "%sreport", in);
    const bool built = access(report, X_OK) == 0;
    printf("\nkept    %s has the log and the model\n\nWhat to try next:\n\n", plain.folder);
    printf("  a page about this run, for a browser\n    ");
    if (!built) printf("make %s && ", report);
    printf("%s %s/page.html %s\n", report, plain.folder, plain.log);
    printf("  ask it a sum\n"
           "    %s" RUN_NAME
           " --import %s --generate 40 --temperature 0 --prompt \"12 plus 30 is\"\n",
           in, plain.folder);
    printf("  another strategy: the same losses, to the last bit\n"
           "    %s" RUN_NAME " --strategy full_shard --log %s/full_shard.jsonl\n",
           in, plain.folder);
}

#endif /* PLAIN_H */
