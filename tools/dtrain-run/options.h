/* options.h: what dtrain-run is asked for, by flags and, where a flag is not given, by the variables that clusters
 * set for torchrun. Nothing here starts anything. */
#ifndef OPTIONS_H
#define OPTIONS_H

#include "tools/about.h"
#include "tools/flags.h"

enum { RUN_HOST = 256, RUN_PORT = 29500, RUN_PORT_OFFSET = 100 };

typedef struct run_options {
    int nproc;             /* ranks of this node */
    int nnodes, node_rank; /* nodes of the run; which one this is */
    char master[RUN_HOST]; /* the host of node 0; "": one node */
    int port;      /* at which the dtrain-runs meet; their ranks meet RUN_PORT_OFFSET above */
    int restarts;  /* in a row without progress */
    int min_ranks; /* of the run; 0: it keeps all of them */
    double grace, timeout; /* seconds */
    const char *log_dir;   /* or NULL */
    bool dry_run;
    char **program; /* its name, its arguments, NULL */
} run_options;

/* What the parser fills; -1 and NULL: not given. */
static struct {
    const char *nproc, *nnodes, *master, *port, *log_dir;
    long node_rank, restarts, min_ranks, dry_run;
    double grace, timeout;
} run_flags = {NULL, NULL, NULL, NULL, NULL, -1, 0, 0, 0, 30, 300};

static const flag run_table[] = {
    FLAG_GROUP("what to start"),
    {"--nproc", 's', &run_flags.nproc, 0, 0,
     "ranks on this node: a number, or auto: one for each GPU, without GPUs one for each core. "
     "Default: PET_NPROC_PER_NODE, else 1",
     NULL},
    {"--dry-run", 'b', &run_flags.dry_run, 0, 1,
     "print the environment of each rank of this node, and stop", NULL},
    FLAG_GROUP("several nodes: the same command on each"),
    {"--nnodes", 's', &run_flags.nnodes, 0, 0, "nodes of the run. Default: PET_NNODES, else 1",
     NULL},
    {"--node-rank", 'i', &run_flags.node_rank, 0, 1e6,
     "which of them this is, from 0. Default: PET_NODE_RANK, else JOB_COMPLETION_INDEX (Indexed "
     "Job), else SLURM_NODEID",
     NULL},
    {"--master", 's', &run_flags.master, 0, 0,
     "HOST or HOST:PORT of node 0; the dtrain-runs meet at PORT (29500), their ranks 100 above. "
     "Default: PET_MASTER_ADDR and PET_MASTER_PORT, else MASTER_ADDR and MASTER_PORT",
     NULL},
    {"--timeout", 'f', &run_flags.timeout, 0.1, 1e6,
     "seconds to wait for the other nodes, at the start and before a restart, and for a rank that "
     "is "
     "stopped (SIGSTOP) while others have ended",
     NULL},
    FLAG_GROUP("failures and signals"),
    {"--restarts", 'i', &run_flags.restarts, 0, 1e6,
     "after a failure, start all ranks of all nodes again, as often in a row without progress; "
     "each checkpoint that is published is progress",
     NULL},
    {"--min-ranks", 'i', &run_flags.min_ranks, 1, DTRAIN_MAX_RANKS,
     "give ranks up: the second restart in a row and each further one leave out a rank of the node "
     "whose rank failed first, as long as so many are left",
     NULL},
    {"--grace", 'f', &run_flags.grace, 0, 1e6,
     "seconds that ranks have to end after a signal that asks them to stop, or after the failure "
     "of another one; then they are killed",
     NULL},
    {"--log-dir", 's', &run_flags.log_dir, 0, 0,
     "write what each rank prints to rank-N.log there, in attempt-N below it after a restart; the "
     "terminal shows rank 0 alone",
     NULL},
    FLAG_GROUP("as torchrun spells them"),
    {"--nproc-per-node", 's', &run_flags.nproc, 0, 0, "--nproc", NULL},
    {"--master-addr", 's', &run_flags.master, 0, 0, "--master", NULL},
    {"--master-port", 's', &run_flags.port, 0, 0, "the port of --master", NULL},
    {"--max-restarts", 'i', &run_flags.restarts, 0, 1e6, "--restarts", NULL},
};
enum { RUN_FLAGS = sizeof run_table / sizeof *run_table };

typedef char *(*run_lookup)(const char *name); /* getenv */

/* Look up a variable; NULL when it is unset or empty. */
static const char *run_variable(run_lookup env, const char *name)
{
    const char *text = env(name);
    return text && text[0] ? text : NULL;
}

/* Print a sentence and return the status of a command line that cannot be. */
__attribute__((format(printf, 1, 2))) static int run_refuse(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fprintf(stderr, "dtrain-run: ");
    vfprintf(stderr, format, args);
    fprintf(stderr, "\n");
    va_end(args);
    return 2;
}

/* Read a whole number, all of the text, in a range. */
static bool run_number(const char *text, int low, int high, int *value)
{
    const size_t digits = strspn(text, "0123456789");
    if (!digits || text[digits] || digits > 9) return false;
    const long number = strtol(text, NULL, 10);
    *value = (int)number;
    return number >= low && number <= high;
}

/* Count what "auto" stands for: the GPUs that CUDA_VISIBLE_DEVICES leaves, or that have a device file; without GPUs
 * the cores that this process may use. */
static int run_auto(run_lookup env)
{
    const char *visible = env("CUDA_VISIBLE_DEVICES");
    int count = 0;
    char path[64];
    for (int i = 0; i < DTRAIN_MAX_RANKS; i++) {
        snprintf(path, sizeof path, "/dev/nvidia%d", i);
        count += access(path, F_OK) == 0;
    }
    if (count && visible) {
        count = visible[0] != 0;
        for (; *visible; visible++) count += *visible == ',';
    }
    if (count) return count;
    cpu_set_t set;
    CPU_ZERO(&set);
    if (sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) > 0) return CPU_COUNT(&set);
    return (int)sysconf(_SC_NPROCESSORS_ONLN);
}

/* Return a flag's text, else the first variable of two that is set; *from is its name for a sentence. */
static const char *run_text(run_lookup env, const char *given, const char *name, const char *first,
                            const char *second, const char **from)
{
    const char *const variables[] = {first, second};
    *from = name;
    for (int i = 0; i < 2 && !given; i++) {
        if (variables[i]) given = run_variable(env, variables[i]);
        if (given) *from = variables[i];
    }
    return given;
}

/* Settle how many ranks this node has, how many nodes there are, and which this is. */
static int run_settle_nodes(run_lookup env, run_options *o)
{
    const char *from;
    const char *text = run_text(env, run_flags.nproc, "--nproc", "PET_NPROC_PER_NODE", NULL, &from);
    o->nproc = 1;
    if (text && strcmp(text, "auto") == 0) o->nproc = run_auto(env);
    else if (text && !run_number(text, 1, DTRAIN_MAX_RANKS, &o->nproc))
        return run_refuse("%s is \"%s\"; it takes a number from 1 to %d, or auto", from, text,
                          DTRAIN_MAX_RANKS);
    text = run_text(env, run_flags.nnodes, "--nnodes", "PET_NNODES", NULL, &from);
    o->nnodes = 1;
    if (text && !run_number(text, 1, DTRAIN_MAX_RANKS, &o->nnodes))
        return run_refuse("%s is \"%s\"; it takes a number from 1 to %d: a run has the same nodes "
                          "from its start to its end",
                          from, text, DTRAIN_MAX_RANKS);
    if (o->nnodes > DTRAIN_MAX_RANKS / o->nproc)
        return run_refuse("%d nodes of %d ranks are more than %d ranks", o->nnodes, o->nproc,
                          DTRAIN_MAX_RANKS);
    o->node_rank = (int)run_flags.node_rank;
    if (o->node_rank < 0) {
        text = run_text(env, NULL, "--node-rank", "PET_NODE_RANK", "JOB_COMPLETION_INDEX", &from);
        if (!text && o->nnodes > 1) text = run_variable(env, from = "SLURM_NODEID");
        if (!text && o->nnodes > 1)
            return run_refuse("there are %d nodes, and not which this is; give --node-rank",
                              o->nnodes);
        o->node_rank = 0;
        if (text && o->nnodes > 1 && !run_number(text, 0, DTRAIN_MAX_RANKS, &o->node_rank))
            return run_refuse("%s is \"%s\"; it takes a number from 0", from, text);
    }
    if (o->node_rank >= o->nnodes)
        return run_refuse("node rank %d with %d node%s makes no sense: they are numbered from 0",
                          o->node_rank, o->nnodes, o->nnodes > 1 ? "s" : "");
    return 0;
}

/* Refuse a least number of ranks that would do nothing. */
static int run_settle_min(const run_options *o)
{
    if (o->min_ranks && o->restarts < 2)
        return run_refuse("--min-ranks %d does nothing without --restarts 2 or more: the first "
                          "restart in a row is of all ranks",
                          o->min_ranks);
    if (o->nnodes == 1 && o->min_ranks > o->nproc)
        return run_refuse("--min-ranks is %d, and there are %d ranks", o->min_ranks, o->nproc);
    return 0;
}

/* Settle where node 0 is: HOST, HOST:PORT, [IPV6]:PORT; a bare IPv6 address has more than one colon. */
static int run_settle_master(run_lookup env, run_options *o)
{
    const char *from, *port_from, *end;
    const char *text =
        run_text(env, run_flags.master, "--master", "PET_MASTER_ADDR", "MASTER_ADDR", &from);
    const char *port = run_text(env, run_flags.port, "--master-port", "PET_MASTER_PORT",
                                "MASTER_PORT", &port_from);
    o->port = RUN_PORT;
    if (o->nnodes == 1) return 0;
    if (!text)
        return run_refuse("there are %d nodes, and not where they meet; give --master HOST: the "
                          "host of node 0",
                          o->nnodes);
    const char *colon = strrchr(text, ':');
    const bool bracket = text[0] == '[';
    if (bracket) {
        end = strchr(++text, ']');
        if (!end || (end[1] && end[1] != ':')) end = text;
        colon = *end && end[1] == ':' ? end + 1 : NULL;
    } else {
        if (colon && strchr(text, ':') != colon) colon = NULL;
        end = colon ? colon : text + strlen(text);
    }
    if (end == text || (size_t)(end - text) >= sizeof o->master)
        return run_refuse("%s is \"%s\"; it takes HOST, HOST:PORT or [IPV6]:PORT", from,
                          text - bracket);
    snprintf(o->master, sizeof o->master, "%.*s", (int)(end - text), text);
    if (colon) port = colon + 1, port_from = from;
    if (port && !run_number(port, 1, 65535 - RUN_PORT_OFFSET, &o->port))
        return run_refuse("%s has port \"%s\"; it takes a number from 1 to %d: ranks meet %d above",
                          port_from, port, 65535 - RUN_PORT_OFFSET, RUN_PORT_OFFSET);
    return 0;
}

/* Write the dashes of a flag for its underscores: --nproc_per_node is --nproc-per-node. */
static void run_dashes(char *word)
{
    for (; *word && *word != '='; word++)
        if (*word == '_') *word = '-';
}

/* Find where the program begins: at the first word that is neither a flag nor the value of one, or after "--".
 * Return the number of words before it. */
static int run_split(int count, char **words, char ***program)
{
    int a = 0;
    while (a < count && words[a][0] == '-' && strcmp(words[a], "--") != 0) {
        run_dashes(words[a]);
        const int at = flags_find(run_table, RUN_FLAGS, words[a]);
        a += at >= 0 && run_table[at].kind != 'b' ? 2 : 1;
    }
    if (a > count) a = count;
    *program = words + a + (a < count && strcmp(words[a], "--") == 0);
    return a;
}

static void run_help(void)
{
    printf("dtrain-run [FLAGS] PROGRAM ARGUMENTS...   starts the ranks of a program\n\n");
    flags_help(run_table, RUN_FLAGS);
    printf("\nexamples\n"
           "  dtrain-run --nproc 4 ./program --its-flag\n"
           "  dtrain-run --nnodes 2 --node-rank 0 --master head --nproc 8 ./program\n");
}

/* Read the command line and the environment. Return 0, 1 after --help, or 2 after a sentence to stderr. */
static int run_read(int argc, char **argv, run_lookup env, run_options *o)
{
    memset(o, 0, sizeof *o);
    const int given = run_split(argc - 1, argv + 1, &o->program);
    if (about("dtrain-run", given, argv + 1, run_help)) return 1;
    if (flags_parse("dtrain-run", run_table, RUN_FLAGS, given, argv + 1)) return 2;
    if (!o->program[0])
        return run_refuse("there is no program to start: dtrain-run [FLAGS] PROGRAM ARGUMENTS...; "
                          "--help lists the flags");
    o->restarts = (int)run_flags.restarts;
    o->min_ranks = (int)run_flags.min_ranks;
    o->grace = run_flags.grace;
    o->timeout = run_flags.timeout;
    o->log_dir = run_flags.log_dir;
    o->dry_run = run_flags.dry_run;
    if (run_settle_nodes(env, o) || run_settle_min(o)) return 2;
    return run_settle_master(env, o);
}

#endif /* OPTIONS_H */
