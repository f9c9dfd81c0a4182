/* ranks.h: the ranks of this node, as processes: how one is started, what it prints, how it ends.
 *
 * Each rank leads a process group of its own, so that a signal reaches what a shell around the program has started, and
 * nothing that it leaves behind survives the run. The kernel kills a rank whose dtrain-run dies; the guard, a process
 * that waits for just that, kills the rest of its group. */
#ifndef RANKS_H
#define RANKS_H

#include "options.h"

enum { RUN_LINE = 4096, RUN_TAIL = 2048 };

/* What a rank prints to one of its two outputs, on its way to ours. */
typedef struct run_stream {
    int from, to; /* -1: closed */
    size_t used;  /* of line: the beginning of a line whose end has not come */
    char line[RUN_LINE];
} run_stream;

typedef struct run_rank {
    pid_t pid, was; /* its process and its group; 0: not started, or over; was: the number stays */
    bool ended, told; /* told: it was killed by us */
    int status;       /* of waitpid */
    int stopped;      /* the signal that has stopped it; 0: it runs */
    double
        waited; /* seconds that it was stopped while others had ended, when it was killed for that */
    uint64_t ended_ns;
    run_stream out, err;
    int log;             /* its file, for what is shown on the terminal too; -1 */
    int error_file;      /* where the library leaves the sentence of its failure */
    char tail[RUN_TAIL]; /* the last it printed, a ring, when there is no file */
    size_t printed;
} run_rank;

/* The ranks of this node, in one attempt of the run. */
typedef struct run_node {
    const run_options *options;
    int first, count, size; /* rank numbers of this node; ranks of the run */
    int attempt;            /* how often the run was started before */
    int restarts_before;    /* by the launcher around this one */
    const char *address;    /* of rank 0 */
    int port;
    char key[160];            /* of this attempt */
    char run[40];             /* of all attempts */
    int progress_file, guard; /* guard: the pipe to it */
    pid_t guard_pid;
    uint64_t *progress;
    sigset_t old_mask;
    bool pipe_ignored; /* as dtrain-run was started */
    struct sigaction old_child;
    int live;
    run_rank ranks[DTRAIN_MAX_RANKS];
} run_node;

/* ---- The guard ---------------------------------------------------------------------------------------------- */

/* Hear of groups (positive: begun, negative: over) until dtrain-run ends, and kill what is left of them then. */
static void run_guard(int pipe)
{
    pid_t groups[DTRAIN_MAX_RANKS], group;
    int count = 0;
    sigset_t all;
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, NULL);
    setsid();
    for (int i = 0; i < 1024; i++)
        if (i != pipe) close(i);
    while (read(pipe, &group, sizeof group) == (ssize_t)sizeof group) {
        if (group > 0 && count < DTRAIN_MAX_RANKS) groups[count++] = group;
        for (int i = 0; i < count && group < 0; i++)
            if (groups[i] == -group) groups[i] = groups[--count];
    }
    for (int i = 0; i < count; i++) kill(-groups[i], SIGKILL);
    _exit(0);
}

/* Start the guard; without one, ranks still die with dtrain-run, and what they have started may not. */
static void run_guard_start(run_node *node)
{
    int ends[2];
    node->guard = -1;
    if (pipe2(ends, O_CLOEXEC) != 0) return;
    node->guard_pid = fork();
    if (node->guard_pid == 0) run_guard(ends[0]);
    close(ends[0]);
    node->guard = ends[1];
}

static void run_guard_tell(const run_node *node, pid_t group)
{
    if (node->guard < 0) return;
    while (write(node->guard, &group, sizeof group) < 0 && errno == EINTR) continue;
}

/* ---- Starting ----------------------------------------------------------------------------------------------- */

static void run_set(const char *name, int value)
{
    char text[16];
    snprintf(text, sizeof text, "%d", value);
    setenv(name, text, 1);
}

/* Set the environment of a rank, in its process. What another launcher has said about ranks is without effect:
 * DTRAIN_RANK goes before it. */
static void run_environment(const run_node *node, int local)
{
    char path[64];
    run_set("DTRAIN_RANK", node->first + local);
    run_set("DTRAIN_WORLD_SIZE", node->size);
    run_set("DTRAIN_LOCAL_RANK", local);
    run_set("DTRAIN_LOCAL_SIZE", node->count);
    setenv("DTRAIN_MASTER_ADDR", node->address, 1);
    run_set("DTRAIN_MASTER_PORT", node->port);
    unsetenv("DTRAIN_PORT");
    run_set("DTRAIN_RESTART_COUNT", node->restarts_before + node->attempt);
    setenv("DTRAIN_JOB_KEY", node->key, 1);
    setenv("DTRAIN_RUN_ID", node->run, 0); /* another launcher's, around this one, stays */
    snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)getppid(), node->progress_file);
    setenv("DTRAIN_PROGRESS_FILE", path, 1);
    snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)getppid(), node->ranks[local].error_file);
    setenv("TORCHELASTIC_ERROR_FILE", path, 1);
}

/* Open the file of a rank's output; -1 after a sentence. */
static int run_open_log(const run_node *node, int rank)
{
    char path[4096];
    const char *dir = node->options->log_dir;
    int room = snprintf(path, sizeof path, "%s", dir);
    if (node->attempt) room = snprintf(path, sizeof path, "%s/attempt-%d", dir, node->attempt);
    if (room < 0 || room >= (int)sizeof path - 32) {
        run_refuse("--log-dir has %zu characters, which is too long", strlen(dir));
        return -1;
    }
    mkdir(dir, 0777);
    if (node->attempt) mkdir(path, 0777);
    snprintf(path + room, sizeof path - (size_t)room, "/rank-%d.log", rank);
    const int file = open(path, O_RDWR | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0666);
    if (file < 0) run_refuse("%s cannot be written: %s", path, strerror(errno));
    return file;
}

/* Become the rank. Returns only when the program cannot be executed. */
static void run_become(run_node *node, int local, int out, int err, pid_t parent)
{
    const run_rank *rank = &node->ranks[local];
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);
    run_environment(node, local);
    if (node->first + local || isatty(0)) {
        const int nothing = open("/dev/null", O_RDONLY);
        if (nothing >= 0) dup2(nothing, 0), close(nothing);
    }
    if (rank->log >= 0 && out < 0) out = err = rank->log;
    if (out >= 0) dup2(out, 1), dup2(err, 2);
    if (!node->pipe_ignored) signal(SIGPIPE, SIG_DFL);
    sigaction(SIGCHLD, &node->old_child, NULL);
    sigprocmask(SIG_SETMASK, &node->old_mask, NULL);
    execvp(node->options->program[0], node->options->program);
}

/* Make a pipe for a stream of a rank; its write end, or -1 with errno. */
static int run_stream_open(run_stream *stream, int to)
{
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) return -1;
    fcntl(ends[0], F_SETFL, O_NONBLOCK);
    stream->from = ends[0];
    stream->to = to;
    stream->used = 0;
    return ends[1];
}

static void run_close(int *file)
{
    if (*file >= 0) close(*file);
    *file = -1;
}

/* Start one rank. Rank 0 keeps the terminal, unless there are files: then it goes through us as the others do without
 * them, and the others write to theirs. Return 0, or the errno of what could not be done. */
static int run_start_rank(run_node *node, int local)
{
    run_rank *rank = &node->ranks[local];
    const bool files = node->options->log_dir != NULL, zero = node->first + local == 0;
    const pid_t parent = getpid();
    int out = -1, err = -1, report[2], error = 0;
    if (files && (rank->log = run_open_log(node, node->first + local)) < 0) return -1;
    rank->error_file = memfd_create("dtrain-run error", MFD_CLOEXEC);
    if (files == zero) {
        out = run_stream_open(&rank->out, 1);
        err = out < 0 ? -1 : run_stream_open(&rank->err, 2);
    }
    if ((files == zero && err < 0) || pipe2(report, O_CLOEXEC) != 0) return errno;
    const pid_t pid = fork();
    if (pid == 0) {
        run_become(node, local, out, err, parent);
        error = errno;
        (void)!write(report[1], &error, sizeof error);
        _exit(127);
    }
    if (pid < 0) error = errno;
    close(report[1]);
    run_close(&out);
    run_close(&err);
    if (pid > 0) {
        setpgid(pid, pid); /* whoever is first; EACCES: it has been executed, and did it itself */
        run_guard_tell(node, pid);
        rank->pid = rank->was = pid;
        node->live++;
        while (read(report[0], &error, sizeof error) < 0 && errno == EINTR) continue;
    }
    close(report[0]);
    return error;
}

/* ---- What ranks print --------------------------------------------------------------------------------------- */

static void run_write(int to, const char *text, size_t bytes)
{
    while (bytes) {
        const ssize_t done = write(to, text, bytes);
        if (done < 0 && errno == EAGAIN) {
            struct pollfd ready = {to, POLLOUT, 0};
            (void)poll(&ready, 1, 1000);
        } else if (done < 0 && errno != EINTR) return; /* nobody reads any more: ranks go on */
        if (done > 0) text += done, bytes -= (size_t)done;
    }
}

/* Show whole lines, in one write each, with the rank in front; rank 0's as they are. */
static void run_show(const run_node *node, const run_rank *rank, run_stream *stream, bool all)
{
    const int number = node->first + (int)(rank - node->ranks);
    char text[RUN_LINE + 32];
    size_t begin = 0;
    for (size_t i = 0; i < stream->used; i++) {
        const bool last = i + 1 == stream->used && (all || stream->used == RUN_LINE);
        if (stream->line[i] != '\n' && !last) continue;
        int length = number ? snprintf(text, sizeof text, "[rank %d] ", number) : 0;
        memcpy(text + length, stream->line + begin, i + 1 - begin);
        length += (int)(i + 1 - begin);
        if (number && stream->line[i] != '\n') text[length++] = '\n';
        run_write(stream->to, text, (size_t)length);
        begin = i + 1;
    }
    memmove(stream->line, stream->line + begin, stream->used - begin);
    stream->used -= begin;
}

/* Read what a rank has printed. */
static void run_hear(const run_node *node, run_rank *rank, run_stream *stream)
{
    while (stream->from >= 0) {
        char *at = stream->line + stream->used;
        const ssize_t got = read(stream->from, at, RUN_LINE - stream->used);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0 && errno == EAGAIN) return;
        if (got <= 0) {
            run_show(node, rank, stream, true);
            run_close(&stream->from);
            return;
        }
        if (rank->log >= 0) run_write(rank->log, at, (size_t)got);
        for (ssize_t i = 0; i < got; i++) rank->tail[rank->printed++ % RUN_TAIL] = at[i];
        stream->used += (size_t)got;
        run_show(node, rank, stream, false);
    }
}

/* ---- Ends --------------------------------------------------------------------------------------------------- */

static void run_signal(const run_node *node, int number)
{
    for (int i = 0; i < node->count; i++)
        if (node->ranks[i].pid > 0) kill(-node->ranks[i].pid, number);
}

/* Reap every process that has ended: ranks, and as the first process of a container whatever else ends there. */
static void run_reap(run_node *node)
{
    int status;
    pid_t pid;
    while ((pid = waitpid(-1, &status, WNOHANG | WUNTRACED | WCONTINUED)) > 0 ||
           (pid < 0 && errno == EINTR))
        for (int i = 0; i < node->count && pid > 0; i++) {
            run_rank *rank = &node->ranks[i];
            if (rank->pid != pid || rank->ended) continue;
            if (WIFSTOPPED(status) || WIFCONTINUED(status))
                rank->stopped = WIFSTOPPED(status) ? WSTOPSIG(status) : 0;
            if (WIFCONTINUED(status)) continue;
            if (WIFSTOPPED(status)) {
                fprintf(stderr,
                        "dtrain-run: rank %d (pid %d) was stopped by signal %d: the run waits for "
                        "it; kill -CONT %d lets it go on\n",
                        node->first + i, (int)pid, WSTOPSIG(status), (int)pid);
                continue;
            }
            rank->ended = true;
            rank->status = status;
            rank->ended_ns = dtrain__now_ns();
            node->live--;
        }
}

/* End the attempt: give what ranks have started and left behind half a second to end (a tee that still writes), kill
 * it, and take what is still in the pipes. A group's number is nobody else's while a process is in it. */
static void run_clear(run_node *node)
{
    const uint64_t end = dtrain__now_ns() + 500000000u;
    for (int i = 0; i < node->count; i++) {
        run_rank *rank = &node->ranks[i];
        while (rank->pid > 0 && kill(-rank->pid, 0) == 0 && dtrain__now_ns() < end) {
            (void)poll(NULL, 0, 5);
            run_reap(node);
        }
        if (rank->pid > 0) kill(-rank->pid, SIGKILL);
        if (rank->pid > 0) run_guard_tell(node, -rank->pid);
        rank->pid = 0;
        run_hear(node, rank, &rank->out);
        run_hear(node, rank, &rank->err);
        run_close(&rank->out.from);
        run_close(&rank->err.from);
    }
}

/* Forget the ranks of an attempt, and make room for the next. */
static void run_forget(run_node *node)
{
    for (int i = 0; i < DTRAIN_MAX_RANKS; i++) {
        run_rank *rank = &node->ranks[i];
        if (rank->was) run_close(&rank->log), run_close(&rank->error_file);
        memset(rank, 0, sizeof *rank);
        rank->out.from = rank->err.from = rank->log = rank->error_file = -1;
    }
    node->live = 0;
}

/* Say whether a rank has ended otherwise than by exit status 0. */
static bool run_failed(const run_rank *rank) { return rank->ended && rank->status != 0; }

static int run_exit_code(int status)
{
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

#endif /* RANKS_H */
