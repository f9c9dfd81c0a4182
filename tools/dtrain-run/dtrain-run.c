/* dtrain-run.c: starts the ranks of a run, on this node or on each of several, and starts them again after a failure.
 *
 *   build:   make build/dtrain-run
 *   run:     build/dtrain-run --nproc 4 --log-dir logs build/train_gpt --steps 20
 *            build/dtrain-run --nproc 2 --restarts 3 build/train_gpt --steps 50 --checkpoint runs/run --resume auto
 *
 * On several nodes the same command runs on each, with --nnodes 2 --node-rank 0 --master node0 on node0, and so on.
 *
 * What to expect: rank 0 has the terminal, lines of the others begin with "[rank N] ". A signal that comes here goes to
 * all ranks. The exit status is 0 when all ranks returned 0, and else that of the rank that failed first, 128 + N for
 * signal N; which one it was, how it ended and what it printed last is said at the end. --help lists the flags.
 *
 * A rank is told who it is by DTRAIN_RANK, DTRAIN_WORLD_SIZE, DTRAIN_LOCAL_RANK, DTRAIN_LOCAL_SIZE, DTRAIN_MASTER_ADDR
 * and DTRAIN_MASTER_PORT (dtrain_launch reads them before all others), by DTRAIN_JOB_KEY, a new one for each attempt,
 * so that a late rank of the attempt before is turned away, by DTRAIN_RUN_ID, which all attempts have, so that they
 * know their own checkpoints, and by DTRAIN_RESTART_COUNT. Ranks of several hosts need a communicator that crosses
 * them: NCCL, with a GPU each.
 *
 * Whether a run is started again, and after which wait, decides the function that decides it for dtrain_launch:
 * dtrain__restarts_next (src/launch/restart.c).
 *
 * How to read it: options.h (what is asked for) -> ranks.h (a rank as a process) -> report.h (who failed first) ->
 * attempt.h (one start of all ranks) -> nodes.h (several nodes, restarts) -> main(). */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "tools/about.h"
#include "tools/say.h"
#include "options.h"
#include "ranks.h"
#include "report.h"
#include "attempt.h"
#include "nodes.h"
#include "tools/descriptors.h"

/* Reserve a port of the loopback for the ranks of one node: bound, and never listened at, so that rank 0 can listen
 * there, in every attempt, and nobody else is given it. The socket stays open; -1 after a sentence. */
static int reserve_port(int *port)
{
    struct sockaddr_in address;
    socklen_t length = sizeof address;
    const int on = 1, file = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    memset(&address, 0, sizeof address);
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    struct sockaddr *at = (struct sockaddr *)(void *)&address;
    if (file >= 0 && setsockopt(file, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 &&
        bind(file, at, length) == 0 && getsockname(file, at, &length) == 0) {
        *port = ntohs(address.sin_port);
        return file;
    }
    run_refuse("no port of the loopback can be had: %s", strerror(errno));
    return -1;
}

/* Make the file in which ranks say how far they are: see dtrain_world_progress. */
static bool make_progress_file(run_node *node)
{
    node->progress_file = memfd_create("dtrain-run progress", MFD_CLOEXEC);
    if (node->progress_file < 0 || ftruncate(node->progress_file, 4096) != 0) return false;
    void *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, node->progress_file, 0);
    if (page == MAP_FAILED) return false;
    memcpy(page, DTRAIN__PROGRESS_MAGIC, sizeof DTRAIN__PROGRESS_MAGIC);
    node->progress = (uint64_t *)page + sizeof DTRAIN__PROGRESS_MAGIC / sizeof(uint64_t);
    return true;
}

/* Prepare what lasts over all attempts: signals, the port, the file of progress, the guard. */
static bool prepare(run_job *job)
{
    run_node *node = &job->node;
    sigset_t heard;
    struct sigaction action, found;
    memset(&action, 0, sizeof action);
    action.sa_handler = SIG_DFL;
    sigaction(SIGCHLD, &action, &node->old_child); /* ignored, there would be no exit statuses */
    action.sa_handler = SIG_IGN;
    sigaction(SIGPIPE, &action, &found);
    node->pipe_ignored = found.sa_handler == SIG_IGN;
    sigprocmask(SIG_SETMASK, NULL, &node->old_mask);
    if (make_progress_file(node)) run_guard_start(node);
    else return run_refuse("no memory for a page: %s", strerror(errno)), false;
    action.sa_handler = run_quit;
    sigemptyset(&heard);
    sigaddset(&heard, SIGCHLD);
    for (size_t i = 0; i < sizeof run_signals / sizeof *run_signals; i++) {
        sigaction(run_signals[i], NULL, &found);
        if (run_signals[i] == SIGHUP && found.sa_handler == SIG_IGN) continue; /* by nohup */
        sigaddset(&heard, run_signals[i]);
        sigaction(run_signals[i], &action, NULL);
    }
    sigprocmask(SIG_BLOCK, &heard, NULL);
    job->watch.signals = signalfd(-1, &heard, SFD_CLOEXEC | SFD_NONBLOCK);
    if (job->watch.signals < 0) return run_refuse("signalfd: %s", strerror(errno)), false;
    if (node->options->nnodes > 1) return true;
    return reserve_port(&node->port) >= 0;
}

/* Fill in what is known before ranks are started. */
static void describe_node(run_job *job, run_lookup env)
{
    static const char *const counts[] = {"DTRAIN_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT",
                                         "SLURM_RESTART_COUNT"};
    const run_options *o = job->options;
    run_node *node = &job->node;
    node->options = o;
    node->count = o->nproc;
    node->first = o->nproc * o->node_rank;
    node->size = o->nproc * o->nnodes;
    node->port = o->port + RUN_PORT_OFFSET;
    node->address = o->nnodes > 1 ? o->master : "127.0.0.1";
    job->secret = run_variable(env, "DTRAIN_JOB_KEY");
    for (int i = 0; i < 3; i++) {
        const char *text = run_variable(env, counts[i]);
        if (text && run_number(text, 0, 999999, &node->restarts_before)) break;
    }
}

/* Print what each rank of this node would be started with, and start none. Several nodes are taken to be alike. */
static int dry_run(const run_job *job)
{
    const run_node *node = &job->node;
    char **word;
    for (int i = 0; i < node->count; i++) {
        printf("DTRAIN_RANK=%d DTRAIN_WORLD_SIZE=%d DTRAIN_LOCAL_RANK=%d DTRAIN_LOCAL_SIZE=%d "
               "DTRAIN_MASTER_ADDR=%s ",
               node->first + i, node->size, i, node->count, node->address);
        if (job->options->nnodes > 1) printf("DTRAIN_MASTER_PORT=%d ", node->port);
        else printf("DTRAIN_MASTER_PORT=<a free one> ");
        printf("DTRAIN_RESTART_COUNT=%d DTRAIN_JOB_KEY=<%s>", node->restarts_before,
               job->secret ? "yours and a random one" : "a random one");
        for (word = job->options->program; *word; word++) printf(" %s", *word);
        printf("\n");
    }
    return fflush(stdout) == 0 ? 0 : 1;
}

/* ---- Several nodes ------------------------------------------------------------------------------------------ */

/* Copy a sentence of the library, whose ranks are our nodes here. */
static void as_nodes(const char *text, char *out, size_t room)
{
    size_t used = 0;
    for (const char *begin = text; *text && used + 1 < room; text++) {
        const bool word = text == begin || text[-1] == ' ' || text[-1] == '(';
        if (word && strncmp(text, "rank", 4) == 0 && strchr(" s", text[4])) {
            used += (size_t)snprintf(out + used, room - used, "node");
            text += 3;
        } else out[used++] = *text;
    }
    out[used < room ? used : room - 1] = 0;
}

static void log_line(void *user, dtrain_log_level level, int rank, const char *text)
{
    char line[1024];
    (void)user, (void)level, (void)rank;
    as_nodes(text, line, sizeof line);
    say(stderr, "dtrain-run: %s\n", line);
}

/* The dtrain-runs exchange records and no tensors: their world needs a communicator that does nothing, because one that
 * crosses hosts there may not be. */
static dtrain_result no_comm_create(dtrain_world *world, dtrain_comm **out);
static dtrain_result no_comm_destroy(dtrain_comm *comm)
{
    free(comm);
    return DTRAIN_OK;
}
static const dtrain_comm_ops no_comm = {
    DTRAIN_COMM_ABI, false, "none", no_comm_create, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
    no_comm_destroy, NULL};

static dtrain_result no_comm_create(dtrain_world *world, dtrain_comm **out)
{
    *out = (dtrain_comm *)calloc(1, sizeof **out);
    if (!*out) return DTRAIN_ERROR_MEMORY;
    (*out)->ops = &no_comm;
    (*out)->world = world;
    return DTRAIN_OK;
}

/* Run the attempts of a run of several nodes: each in a world of its own. */
static int run_nodes(run_job *job)
{
    const run_options *o = job->options;
    const double grace_ms = 1e3 * o->grace + 5000;
    dtrain_launch_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.threads_per_rank = 1;
    desc.timeout_ms = UINT32_MAX; /* for the ends of the other nodes */
    desc.join_ms = (uint32_t)(o->timeout * 1e3 < 4e9 ? o->timeout * 1e3 : 4e9);
    desc.grace_ms = (uint32_t)(grace_ms < 4e9 ? grace_ms : 4e9);
    desc.options.reserve_bytes = 1u << 20;
    desc.options.log = log_line;
    desc.comm_ops = &no_comm;
    run_set("DTRAIN_RANK", o->node_rank);
    run_set("DTRAIN_WORLD_SIZE", o->nnodes);
    setenv("DTRAIN_MASTER_ADDR", o->master, 1);
    run_set("DTRAIN_MASTER_PORT", o->port);
    unsetenv("DTRAIN_PORT");
    unsetenv("DTRAIN_LOCAL_RANK");
    unsetenv("DTRAIN_LOCAL_SIZE");
    do {
        const int before = job->code;
        job->met = job->again = false;
        run_signals_quit(0);
        (void)dtrain_launch(&desc, run_node_main, job, NULL);
        run_signals_quit(-1);
        if (!job->met) {
            char text[1024];
            as_nodes(dtrain_last_error(), text, sizeof text);
            say(stderr, "dtrain-run: node %d: %s\n", o->node_rank, text);
            if (before) run_print_advice(o, false, 0);
            job->code = before ? before : 1;
        }
    } while (job->again);
    return job->code;
}

int main(int argc, char **argv)
{
    take_descriptors();
    static run_options options;
    static run_job job;
    const int read = run_read(argc, argv, getenv, &options);
    if (read) return read == 1 ? 0 : read;
    job.options = &options;
    describe_node(&job, getenv);
    if (options.dry_run) return dry_run(&job);
    if (!prepare(&job)) return 1;
    if (options.nnodes > 1) job.code = run_nodes(&job);
    else do
            (void)run_node_main(NULL, &job);
        while (job.again);
    if (job.node.guard >= 0) close(job.node.guard);
    if (job.node.guard_pid > 0) waitpid(job.node.guard_pid, NULL, 0);
    return job.code;
}
