/* report.h: which rank failed first, how, and what it said. */
#ifndef REPORT_H
#define REPORT_H

#include "ranks.h"

enum { RUN_SENTENCE = 500, RUN_LAST_LINES = 10 };

/* The first failure of an attempt, as this node knows it. */
typedef struct run_failure {
    bool any, here;  /* here: of a rank of this node, which is at `local` */
    int local, code; /* code: 128 + signal, or an exit status */
    int lost;        /* 1 + the node that is gone; 0: none is */
    char sentence[RUN_SENTENCE];
} run_failure;

/* Read up to `room` - 1 last bytes of a file; "" when there is none. */
static void run_file_end(int file, char *text, size_t room)
{
    const off_t end = file >= 0 ? lseek(file, 0, SEEK_END) : 0;
    const off_t begin = end > (off_t)(room - 1) ? end - (off_t)(room - 1) : 0;
    const ssize_t got = end > 0 ? pread(file, text, room - 1, begin) : 0;
    text[got > 0 ? got : 0] = 0;
}

/* Find the sentence in what a rank has written to TORCHELASTIC_ERROR_FILE: {"message": {"message": "..."}}, or
 * {"message": "..."}; "" for none. */
static void run_error_message(const run_rank *rank, char *out, size_t room)
{
    char text[4096];
    size_t used = 0;
    run_file_end(rank->error_file, text, sizeof text);
    const char *at = text[0] == '{' ? strstr(text, "\"message\"") : NULL;
    for (int depth = 0; at && depth < 2; depth++) {
        at += strlen("\"message\"");
        at += strspn(at, " \t\n:");
        if (*at == '"') break;
        at = strstr(at, "\"message\"");
    }
    for (at = at && *at == '"' ? at + 1 : ""; *at && *at != '"' && used + 1 < room; at++) {
        char letter = *at;
        if (letter == '\\' && at[1]) {
            letter = *++at;
            if (letter == 'n' || letter == 't' || letter == 'r') letter = ' ';
            if (letter == 'u')
                letter = '?', at += strspn(at + 1, "0123456789abcdefABCDEF") < 4 ? 0 : 4;
        }
        out[used++] = letter;
    }
    out[used] = 0;
}

/* Take the last bytes that a rank has printed, from its file or from its ring. */
static void run_tail(const run_rank *rank, char *text)
{
    const size_t from = rank->printed > RUN_TAIL ? rank->printed - RUN_TAIL : 0;
    size_t used = 0;
    if (rank->log >= 0) {
        run_file_end(rank->log, text, RUN_TAIL + 1);
        return;
    }
    for (size_t i = from; i < rank->printed; i++) text[used++] = rank->tail[i % RUN_TAIL];
    text[used] = 0;
}

/* Print the last lines of a rank, each with a bar in front. */
static void run_print_tail(const run_rank *rank)
{
    char text[RUN_TAIL + 1];
    int lines = 0;
    run_tail(rank, text);
    size_t begin = strlen(text);
    while (begin && text[begin - 1] == '\n') text[--begin] = 0;
    while (begin && lines < RUN_LAST_LINES) {
        while (begin && text[begin - 1] != '\n') begin--;
        if (++lines < RUN_LAST_LINES && begin) begin--;
    }
    if (!text[begin]) return;
    fprintf(stderr, "dtrain-run: the last it printed:\n");
    for (char *line = strtok(text + begin, "\n"); line; line = strtok(NULL, "\n"))
        fprintf(stderr, "    | %s\n", line);
}

/* Say whether a rank blames another one that is not of this node: its sentence begins with the name of the rank that
 * failed first. *blamed: that rank. */
static bool run_blames(const run_node *node, const run_rank *rank, int *blamed)
{
    char text[RUN_SENTENCE];
    *blamed = -1;
    run_error_message(rank, text, sizeof text);
    if (sscanf(text, "rank %d ", blamed) != 1) return false;
    return *blamed != node->first + (int)(rank - node->ranks);
}

/* Find the rank of this node that failed first; -1: none did. One that others were told of is the cause, where it has
 * failed, and one that a signal killed goes before those that noticed it. */
static int run_first_failed(const run_node *node)
{
    int first = -1, blamed;
    for (int i = 0; i < node->count; i++) {
        const run_rank *rank = &node->ranks[i], *best = first < 0 ? NULL : &node->ranks[first];
        if (!run_failed(rank) || rank->told) continue;
        const bool killed = WIFSIGNALED(rank->status);
        if (!best || killed > WIFSIGNALED(best->status) ||
            (killed == WIFSIGNALED(best->status) && rank->ended_ns < best->ended_ns))
            first = i;
    }
    if (first < 0 || !run_blames(node, &node->ranks[first], &blamed)) return first;
    blamed -= node->first;
    if (blamed < 0 || blamed >= node->count || !run_failed(&node->ranks[blamed])) return first;
    return blamed;
}

/* Say whether the first failure of this node may have its cause on another one, which has yet to say so. */
static bool run_cause_elsewhere(const run_node *node, int first)
{
    int blamed;
    if (node->size == node->count || !run_blames(node, &node->ranks[first], &blamed)) return false;
    return blamed < node->first || blamed >= node->first + node->count;
}

/* Make the sentence of the first failure of this node. */
static void run_describe(const run_node *node, int first, uint64_t start_ns, run_failure *failure)
{
    const run_rank *rank = &node->ranks[first];
    char host[RUN_HOST] = "", how[128];
    const int status = rank->status;
    gethostname(host, sizeof host - 1);
    if (rank->waited > 0)
        snprintf(how, sizeof how,
                 "was stopped by signal %d for %.1f s (--timeout) while others ended, and killed",
                 rank->stopped, rank->waited);
    else if (WIFSIGNALED(status))
        snprintf(how, sizeof how, "was killed by signal %d (%s)", WTERMSIG(status),
                 dtrain__signal_name(WTERMSIG(status)));
    else snprintf(how, sizeof how, "ended with exit status %d", WEXITSTATUS(status));
    failure->any = failure->here = true;
    failure->local = first;
    failure->code = run_exit_code(status);
    snprintf(failure->sentence, sizeof failure->sentence,
             "rank %d of %d (host %.64s, pid %d) %s, %.1f s after the start", node->first + first,
             node->size, host, (int)rank->was, how, 1e-9 * (double)(rank->ended_ns - start_ns));
}

/* Say how a run that has lost nodes goes on: this one, while the others wait for the lost one, or another. */
static void run_print_advice(const run_options *o, bool waits, int lost)
{
    if (waits)
        fprintf(stderr,
                "dtrain-run: the others wait %g s (--timeout) for node %d: start the same command "
                "there%s\n",
                o->timeout, lost, lost ? ", or on another host" : " again");
    else
        fprintf(stderr,
                "dtrain-run: to go on from the last checkpoint, start this command on all nodes "
                "again, or with --nnodes "
                "%d on those that are left%s\n",
                o->nnodes - 1,
                o->restarts ? "" : "; with --restarts they would wait for a node that comes back");
}

/* Print the first failure, with what its rank said when it is one of this node. */
static void run_print_failure(const run_node *node, const run_failure *failure)
{
    char error[RUN_SENTENCE] = "";
    int others = 0;
    say(stderr, "dtrain-run: %s", failure->sentence);
    if (!failure->here) {
        fprintf(stderr, "\n");
        if (failure->lost)
            run_print_advice(node->options, node->options->restarts > 0, failure->lost - 1);
        return;
    }
    for (int i = 0; i < node->count; i++)
        others += i != failure->local && run_failed(&node->ranks[i]) && !node->ranks[i].told;
    if (others) fprintf(stderr, "; %d other%s failed after it", others, others > 1 ? "s" : "");
    fprintf(stderr, "\n");
    run_error_message(&node->ranks[failure->local], error, sizeof error);
    if (error[0]) say(stderr, "dtrain-run: its error: %s\n", error);
    run_print_tail(&node->ranks[failure->local]);
}

#endif /* REPORT_H */
