/* report.c: a page about one or several runs, made from their logs: one HTML file that needs no network, with a script
 * that draws the curves, for light and dark screens, wide and narrow ones.
 *
 *   build:   make build/report
 *   run:     build/report OUT.html LOG...          (build/train_gpt --log LOG)
 *
 * It shows what ran and how it ended, losses, rates, gradient norms, memory, and what the time of a step was spent
 * with. Point at a curve for its values; the slider smooths; curves are drawn over steps or over time; of several
 * runs each can be hidden, and the table says in which flags they differ. Where the numbers of ranks differ, there is
 * a curve of the rate over them: a log has its ranks in its first line; write 4@LOG for one that has not. NAME=LOG
 * (or 4@NAME=LOG) calls a run something else than its file.
 * Exit status: 0 when the page is written, 1 when the command line is wrong, 2 when a file cannot be read or written.
 *
 * log.h reads the logs by dtrain__json, the reader of the library; page.h writes the page; script.h is what runs in the
 * browser. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "tools/descriptors.h"
#include "tools/about.h"
#include "tools/open.h"
#include "tools/say.h"
#include "tools/report/page.h"

enum { REPORT_RUNS = 16 };

/* Take an argument apart: RANKS@NAME=FILE. */
static void take_argument(run *r, const char *argument)
{
    static char names[REPORT_RUNS][128];
    static int used;
    char *end;
    const double ranks = strtod(argument, &end);
    memset(r, 0, sizeof *r);
    r->ranks = NAN;
    if (end > argument && *end == '@') {
        r->ranks = ranks;
        argument = end + 1;
    }
    const char *equals = strchr(argument, '='), *slash = strrchr(argument, '/');
    char *name = names[used++ % REPORT_RUNS];
    r->path = equals ? equals + 1 : argument;
    if (equals) snprintf(name, sizeof names[0], "%.*s", (int)(equals - argument), argument);
    else snprintf(name, sizeof names[0], "%s", slash ? slash + 1 : argument);
    r->label = name;
}

static void print_help(void)
{
    printf("report OUT.html LOG...   makes one page of the logs of up to %d runs, to open in a "
           "browser\n\n"
           "LOG          what --log of a training program has written\n"
           "NAME=LOG     under another name than that of its file\n"
           "RANKS@NAME=LOG   a run of so many ranks, for the curve of scaling\n\n"
           "examples\n"
           "  report page.html runs/a/log.jsonl\n"
           "  report page.html small=runs/a/log.jsonl large=runs/b/log.jsonl\n",
           REPORT_RUNS);
}

int main(int argc, char **argv)
{
    take_descriptors();
    if (about("report", argc - 1, argv + 1, print_help)) return 0;
    static run runs[REPORT_RUNS];
    const int count = argc - 2;
    if (count < 1 || count > REPORT_RUNS)
        return fprintf(stderr, "report OUT.html LOG...   (up to %d; RANKS@NAME=LOG)\n",
                       REPORT_RUNS),
               1;
    for (int i = 0; i < count; i++) {
        take_argument(&runs[i], argv[2 + i]);
        const int failed = read_run(&runs[i]);
        if (failed) return failed;
        if (!runs[i].count) return say(stderr, "%s has no steps\n", runs[i].path), 2;
    }
    return write_page(argv[1], runs, count);
}
