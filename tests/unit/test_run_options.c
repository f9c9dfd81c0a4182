/* test_run_options.c: how dtrain-run reads its command line and what clusters set for torchrun, beside a table of what
 * was meant, and random command lines that must be read the same in every spelling. */
#include "test.h"
#include "dtrain.h"

#include <sched.h>
#include <stdarg.h>
#include <unistd.h>

#include "tools/dtrain-run/options.h"

enum { WORDS = 24 };

/* Split a text at its blanks, after the program's name. */
static int split(char *text, char **argv)
{
    int argc = 1;
    argv[0] = (char *)(uintptr_t) "dtrain-run";
    for (char *word = strtok(text, " "); word && argc < WORDS - 1; word = strtok(NULL, " "))
        argv[argc++] = word;
    argv[argc] = NULL;
    return argc;
}

/* Read a command line in an environment, both in words; the sentence goes to *said. */
static int read_line(const char *environment, const char *line, run_options *o, char *said,
                     size_t room)
{
    static char words[2][512], *argv[WORDS];
    char *variables[WORDS];
    int ends[2];
    clearenv();
    snprintf(words[0], sizeof words[0], "%s", environment);
    const int count = split(words[0], variables);
    for (int i = 1; i < count; i++) putenv(variables[i]);
    memset(&run_flags, 0, sizeof run_flags);
    run_flags.node_rank = -1;
    run_flags.grace = 30;
    run_flags.timeout = 300;
    snprintf(words[1], sizeof words[1], "%s", line);
    const int argc = split(words[1], argv);
    const int kept = dup(2);
    CHECK(kept >= 0 && pipe(ends) == 0 && dup2(ends[1], 2) == 2);
    close(ends[1]);
    const int result = run_read(argc, argv, getenv, o);
    fflush(stderr);
    dup2(kept, 2);
    close(kept);
    const ssize_t got = read(ends[0], said, room - 1);
    said[got > 0 ? got : 0] = 0;
    close(ends[0]);
    return result;
}

static void test_accepted(void)
{
    static const struct {
        const char *environment, *line;
        int nproc, nnodes, node_rank;
        const char *master;
        int port;
        const char *program;
    } cases[] = {
        {"", "a b -c", 1, 1, 0, "", 29500, "a"},
        {"", "--nproc 4 a --nproc 5", 4, 1, 0, "", 29500, "a"},
        {"", "--nproc=4 -- --a", 4, 1, 0, "", 29500, "--a"},
        {"", "--nproc_per_node=4 --max_restarts=2 a", 4, 1, 0, "", 29500, "a"},
        {"", "--nnodes 3 --node_rank 2 --master_addr h --master_port 7 a", 1, 3, 2, "h", 7, "a"},
        {"", "--nnodes 3 --node-rank 2 --master h:8 a", 1, 3, 2, "h", 8, "a"},
        {"", "--nnodes 3 --node-rank 2 --master [::1]:8 a", 1, 3, 2, "::1", 8, "a"},
        {"", "--nnodes 3 --node-rank 2 --master [fe80::2] a", 1, 3, 2, "fe80::2", 29500, "a"},
        {"", "--nnodes 3 --node-rank 2 --master fe80::2 a", 1, 3, 2, "fe80::2", 29500, "a"},
        {"PET_NNODES=2 PET_NPROC_PER_NODE=8 PET_NODE_RANK=1 PET_MASTER_ADDR=j-node-0-0.j "
         "PET_MASTER_PORT=29400",
         "a", 8, 2, 1, "j-node-0-0.j", 29400, "a"},
        {"PET_NNODES=2 PET_NPROC_PER_NODE=8 PET_NODE_RANK=1 PET_MASTER_ADDR=x PET_MASTER_PORT=1",
         "--nproc 2 --node-rank 0 --master y:2 a", 2, 2, 0, "y", 2, "a"},
        {"JOB_COMPLETION_INDEX=4 MASTER_ADDR=m MASTER_PORT=5", "--nnodes 5 a", 1, 5, 4, "m", 5,
         "a"},
        {"JOB_COMPLETION_INDEX=4", "a", 1, 1, 0, "", 29500, "a"}, /* a run of its own in each pod */
        {"SLURM_NODEID=3 MASTER_ADDR=m", "--nnodes 5 a", 1, 5, 3, "m", 29500, "a"},
        {"PET_NODE_RANK= PET_NNODES=", "a", 1, 1, 0, "", 29500, "a"},
    };
    char said[600];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        run_options o;
        const int result = read_line(cases[i].environment, cases[i].line, &o, said, sizeof said);
        CHECK_MSG(result == 0 && !said[0], "%s: %s", cases[i].line, said);
        CHECK_MSG(o.nproc == cases[i].nproc && o.nnodes == cases[i].nnodes &&
                      o.node_rank == cases[i].node_rank,
                  "%s: %d, %d of %d", cases[i].line, o.nproc, o.node_rank, o.nnodes);
        CHECK_MSG(strcmp(o.master, cases[i].master) == 0 &&
                      (o.nnodes == 1 || o.port == cases[i].port),
                  "%s: %s port %d", cases[i].line, o.master, o.port);
        CHECK_MSG(strcmp(o.program[0], cases[i].program) == 0, "%s", cases[i].line);
    }
}

static void test_refused_lines(void)
{
    static const char *const cases[][3] = {
        {"", "", "no program"},
        {"", "--nproc", "needs a value"},
        {"", "--nproc 1x a", "\"1x\""},
        {"", "--nproc -1 a", "\"-1\""},
        {"PET_NPROC_PER_NODE=gpu", "a", "PET_NPROC_PER_NODE is \"gpu\""},
        {"PET_NNODES=1:4", "a", "PET_NNODES is \"1:4\""},
        {"", "--nnodes 2 --node-rank 0 --master : a", "HOST:PORT"},
        {"", "--nnodes 2 --node-rank 0 --master [::1 a", "HOST:PORT"},
        {"", "--nnodes 2 --node-rank 0 --master []:1 a", "HOST:PORT"},
        {"", "--nnodes 2 --node-rank 0 --master h: a", "port \"\""},
        {"", "--nnodes 2 --node-rank 0 --master h:65500 a", "from 1 to 65435"},
        {"", "--nnodes 2 --node-rank 2 --master h a", "node rank 2 with 2 nodes"},
        {"", "--nnodes 2 --master h a", "--node-rank"},
        {"", "--grace x a", "number"},
        {"", "--restart 3 a", "did you mean --restarts"},
    };
    char said[600];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        run_options o;
        const int result = read_line(cases[i][0], cases[i][1], &o, said, sizeof said);
        CHECK_MSG(result == 2 && strstr(said, cases[i][2]), "%s: %s", cases[i][1], said);
    }
}

/* The same settings, drawn at random, by flags in any order and spelling or by variables. */
static void test_spellings(void)
{
    uint64_t seed = test_seed();
    char said[600];
    printf("       seed %llu\n", (unsigned long long)seed);
    for (int round = 0; round < 2000; round++) {
        char line[400] = "", environment[400] = "";
        int values[4]; /* nproc, nnodes, node rank, port */
        const int first = (int)(seed >> 62);
        values[0] = 1 + (int)((seed >> 33) % 8);
        values[1] = 2 + (int)((seed >> 37) % 6);
        values[2] = (int)((seed >> 41) % (uint64_t)values[1]);
        values[3] = 1 + (int)((seed >> 30) % 60000);
        static const char *const flag_names[4][2] = {{"--nproc", "--nproc_per_node"},
                                                     {"--nnodes", "--nnodes"},
                                                     {"--node-rank", "--node_rank"},
                                                     {"--master-port", "--master_port"}};
        static const char *const variable_names[4] = {"PET_NPROC_PER_NODE", "PET_NNODES",
                                                      "PET_NODE_RANK", "PET_MASTER_PORT"};
        for (int i = 0; i < 4; i++) {
            const int k = (i + first) % 4;
            seed = seed * 6364136223846793005u + 1442695040888963407u;
            const int how = (int)(seed >> 62);
            char *text = how == 3 ? environment : line;
            const size_t used = strlen(text);
            snprintf(text + used, 400 - used, "%s%s%d ",
                     how == 3 ? variable_names[k] : flag_names[k][how % 2],
                     how == 1 || how == 3 ? "=" : " ", values[k]);
            if (how == 3) continue; /* a variable that a flag overrides */
            if (seed >> 59 & 1)
                snprintf(environment + strlen(environment), 400 - strlen(environment),
                         "%s=9999999 ", variable_names[k]);
        }
        snprintf(line + strlen(line), 400 - strlen(line), "--master h a --nproc 77");
        run_options o;
        const int result = read_line(environment, line, &o, said, sizeof said);
        CHECK_MSG(result == 0 && o.nproc == values[0] && o.nnodes == values[1] &&
                      o.node_rank == values[2] && o.port == values[3],
                  "%s | %s: %s", environment, line, said);
    }
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    RUN(test_accepted);
    RUN(test_refused_lines);
    RUN(test_spellings);
    return test_summary();
}
