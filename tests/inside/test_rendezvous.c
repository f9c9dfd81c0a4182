/* test_rendezvous.c: worlds whose ranks another launcher has started: what the environment is
 * taken to mean, the rendezvous and its enemies, the control plane, deaths. The ranks here are
 * processes started by the tests with the variables that a launcher would set. */
#include "core/platform.c"
#include "core/result.c"
#include "world/arena.c"
#include "world/page.c"
#include "world/rendezvous.c"
#include "launch/environment.c"
#include "launch/launch.c"
#include "launch/rank.c"
#include "dtrain.h"
#include "test.h"
#include "ranks.h"
#include "ports.h"

enum { MOST_NAMES = 24 };

static bool has(const char *text, const char *part) { return strstr(text, part) != NULL; }

/* ---- the environment: a pure function ---- */

/* "A=1 B=2 C= D=x": values have no blanks. */
static const char *words_now;
static char *lookup_words(const char *name)
{
    static char values[16][300]; /* the last 16 answers stay good */
    static int turn;
    const char *at = words_now;
    const size_t length = strlen(name);
    for (; at && *at; at = strchr(at, ' '), at = at ? at + 1 : NULL) {
        if (strncmp(at, name, length) != 0 || at[length] != '=') continue;
        turn = (turn + 1) % 16;
        snprintf(values[turn], sizeof values[turn], "%.*s", (int)strcspn(at + length + 1, " "),
                 at + length + 1);
        return values[turn];
    }
    return NULL;
}

static dtrain_result recognise(const char *words, dtrain__placement *place)
{
    words_now = words;
    return dtrain__recognise(lookup_words, place);
}

typedef struct accepted {
    const char *words, *family;
    int rank, size, local_rank, local_size, forks;
    const char *address;
    uint32_t port;
} accepted;

#define TORCHRUN \
    "RANK=3 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=head MASTER_PORT=29500 "
#define STEP "SLURM_STEP_ID=0 SLURM_PROCID=5 SLURM_NTASKS=7 SLURM_STEP_NUM_TASKS=7 SLURM_LOCALID=1 "

static const accepted good_words[] = {
    {"", NULL, 0, 1, 0, 0, 0, "", 0},
    {"RANK= WORLD_SIZE=", NULL, 0, 1, 0, 0, 0, "", 0},
    {"RANK=0 WORLD_SIZE=1", NULL, 0, 1, 0, 0, 0, "", 0},
    {TORCHRUN, "torchrun", 3, 8, 1, 2, 0, "head", 29600},
    {TORCHRUN "TORCHELASTIC_RUN_ID=none TORCHELASTIC_USE_AGENT_STORE=True", "torchrun", 3, 8, 1, 2,
     0, "head", 29600},
    /* srun or mpirun started one agent a node: the outer launcher's variables mean the node */
    {TORCHRUN "TORCHELASTIC_RUN_ID=7 OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4", "torchrun", 3,
     8, 1, 2, 0, "head", 29600},
    {TORCHRUN "TORCHELASTIC_RUN_ID=7 " STEP, "torchrun", 3, 8, 1, 2, 0, "head", 29600},
    /* without torchrun these never conflict, they are lower */
    {TORCHRUN STEP "JOB_COMPLETION_INDEX=1 PET_NNODES=9 PET_NODE_RANK=1", "torchrun", 3, 8, 1, 2, 0,
     "head", 29600},
    {TORCHRUN "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=8", "torchrun", 3, 8, 1, 2, 0, "head",
     29600},
    {TORCHRUN "DTRAIN_PORT=4000", "torchrun", 3, 8, 1, 2, 0, "head", 4000},
    {TORCHRUN "DTRAIN_MASTER_PORT=4001", "torchrun", 3, 8, 1, 2, 0, "head", 4001},
    {TORCHRUN "DTRAIN_MASTER_ADDR=other", "torchrun", 3, 8, 1, 2, 0, "other", 29600},
    {"RANK=0 WORLD_SIZE=2 MASTER_ADDR=[::1] MASTER_PORT=65500", "torchrun", 0, 2, -1, 0, 0, "::1",
     65400},
    {"RANK=0 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=65435", "torchrun", 0, 2, -1, 0, 0, "h", 65535},
    {"RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=", "torchrun", 1, 2, 1, 2, 0,
     "127.0.0.1", 29600},
    {"RANK=2 WORLD_SIZE=3 MASTER_ADDR=job-master-0 MASTER_PORT=23456", "torchrun", 2, 3, -1, 0, 0,
     "job-master-0", 23556}, /* PyTorchJob */
    {"DTRAIN_RANK=1 DTRAIN_WORLD_SIZE=4 DTRAIN_MASTER_ADDR=n0 DTRAIN_MASTER_PORT=5000 "
     "DTRAIN_LOCAL_RANK=1 DTRAIN_LOCAL_SIZE=2 " TORCHRUN,
     "DTRAIN_RANK", 1, 4, 1, 2, 0, "n0", 5000},
    {"OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 "
     "OMPI_COMM_WORLD_LOCAL_SIZE=2 OMPI_UNIVERSE_SIZE=16",
     "Open MPI", 1, 2, 1, 2, 0, "127.0.0.1", 29600},
    {"OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 "
     "OMPI_COMM_WORLD_LOCAL_SIZE=2 MASTER_ADDR=n1 MASTER_PORT=1000",
     "Open MPI", 1, 4, 1, 2, 0, "n1", 1100},
    {"PMI_RANK=0 PMI_SIZE=3 PMI_FD=9 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=3", "MPICH", 0, 3, 0, 3, 0,
     "127.0.0.1", 29600},
    /* srun --mpi=pmi2: Slurm's variables say more; not those of another step */
    {STEP "PMI_RANK=5 PMI_SIZE=7 MASTER_ADDR=n3", "Slurm", 5, 7, 1, 0, 0, "n3", 29600},
    {STEP "PMI_RANK=5 PMI_SIZE=7 SLURM_STEP_NUM_NODES=4 SLURM_STEP_NODELIST=node[003-006]", "Slurm",
     5, 7, 1, 0, 0, "node003", 29600},
    {STEP "PMI_RANK=1 PMI_SIZE=2 MASTER_ADDR=n3", "MPICH", 1, 2, -1, 0, 0, "n3", 29600},
    {STEP "SLURM_STEP_NODELIST=node[003-006],gpu[1-2] SLURM_LAUNCH_NODE_IPADDR=login", "Slurm", 5,
     7, 1, 0, 0, "node003", 29600},
    {STEP "SLURM_STEP_NODELIST=node[003-006] MASTER_ADDR=n3", "Slurm", 5, 7, 1, 0, 0, "n3", 29600},
    {"SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=1 SLURM_STEP_NUM_NODES=1 "
     "SLURM_STEP_NODELIST=n7",
     "Slurm", 1, 2, 1, 2, 0, "127.0.0.1", 29600},
    /* the sbatch shell: no step, nobody else comes */
    {"SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=4 SLURM_JOB_ID=8", NULL, 0, 1, 0, 0, 0, "", 0},
    {"JOB_COMPLETION_INDEX=3", NULL, 0, 1, 0, 0, 0, "", 0}, /* it does not say of how many */
    {"JOB_COMPLETION_INDEX=3 WORLD_SIZE=4 MASTER_ADDR=m", "Indexed Job", 3, 4, -1, 0, 0, "m",
     29600},
    {"JOB_COMPLETION_INDEX=1 DTRAIN_WORLD_SIZE=4 HOSTNAME=train-1.svc.ns.svc.cluster.local",
     "Indexed Job", 1, 4, -1, 0, 0, "train-0.svc.ns.svc.cluster.local", 29600},
    {"PET_NNODES=2 PET_NPROC_PER_NODE=4 PET_NODE_RANK=1 PET_MASTER_ADDR=j-node-0-0.j "
     "PET_MASTER_PORT=29500",
     "PET", 4, 8, -1, 4, 4, "j-node-0-0.j", 29600},
    {"PET_NNODES=1 PET_NPROC_PER_NODE=3 PET_NODE_RANK=0", "PET", 0, 3, -1, 3, 3, "", 0},
    {"PET_NPROC_PER_NODE=2", "PET", 0, 2, -1, 2, 2, "", 0},
    {"PET_MASTER_ADDR=x", NULL, 0, 1, 0, 0, 0, "", 0},
    {"LOCAL_RANK=3 MASTER_ADDR=somewhere MASTER_PORT=x", NULL, 0, 1, 0, 0, 0, "", 0},
    {"HOSTNAME=db-3", NULL, 0, 1, 0, 0, 0, "", 0}, /* any host name can end in -digits */
};

static void test_recognised(void)
{
    size_t i;
    for (i = 0; i < sizeof good_words / sizeof *good_words; i++) {
        const accepted *a = &good_words[i];
        dtrain__placement p;
        const dtrain_result result = recognise(a->words, &p);
        if (!CHECK_MSG(result == DTRAIN_OK, "%s: %s", a->words, dtrain_last_error())) continue;
        CHECK_MSG((!a->family && !p.family) ||
                      (a->family && p.family && strcmp(a->family, p.family) == 0),
                  "%s: family %s", a->words, p.family ? p.family : "none");
        CHECK_MSG(p.rank == a->rank && p.size == a->size && p.forks == a->forks,
                  "%s: rank %d of %d, %d forks", a->words, p.rank, p.size, p.forks);
        CHECK_MSG(p.local_rank == a->local_rank && p.local_size == a->local_size,
                  "%s: local rank %d of %d", a->words, p.local_rank, p.local_size);
        CHECK_MSG(strcmp(p.address, a->address) == 0 && p.port == a->port, "%s: at '%s' port %u",
                  a->words, p.address, p.port);
    }
}

/* words, then what the sentence must name */
static const char *const bad_words[][3] = {
    {"RANK=0", "RANK=0", "WORLD_SIZE"},
    {"WORLD_SIZE=3", "WORLD_SIZE=3", "RANK"},
    {"RANK=2 WORLD_SIZE=2", "RANK=2", "WORLD_SIZE=2"},
    {"RANK=0 WORLD_SIZE=0", "WORLD_SIZE=0", "RANK"},
    {"RANK=0x0 WORLD_SIZE=1", "RANK", "0x0"},
    {"RANK=+1 WORLD_SIZE=2", "RANK", "+1"},
    {"RANK=-1 WORLD_SIZE=2", "RANK", "-1"},
    {"RANK=1 WORLD_SIZE=2.0", "WORLD_SIZE", "2.0"},
    {"RANK=1 WORLD_SIZE=99999999999", "WORLD_SIZE", "99999999999"},
    {"RANK=1 WORLD_SIZE=257 MASTER_ADDR=x", "WORLD_SIZE=257", "256"},
    {"RANK=1 WORLD_SIZE=4 LOCAL_RANK=2 LOCAL_WORLD_SIZE=2", "LOCAL_RANK=2", "LOCAL_WORLD_SIZE=2"},
    {"RANK=1 WORLD_SIZE=4 LOCAL_RANK=0 LOCAL_WORLD_SIZE=8", "LOCAL_WORLD_SIZE=8", "WORLD_SIZE=4"},
    {"RANK=1 WORLD_SIZE=4 LOCAL_RANK=0 LOCAL_WORLD_SIZE=0", "LOCAL_WORLD_SIZE=0", "WORLD_SIZE=4"},
    {"RANK=1 WORLD_SIZE=4 LOCAL_RANK=4", "LOCAL_RANK=4", "WORLD_SIZE=4"},
    {"RANK=1 WORLD_SIZE=4", "WORLD_SIZE=4", "MASTER_ADDR"},
    {"RANK=1 WORLD_SIZE=4 MASTER_ADDR=", "WORLD_SIZE=4", "MASTER_ADDR"},
    {"RANK=1 WORLD_SIZE=4 MASTER_ADDR=x MASTER_PORT=0", "MASTER_PORT=0", "65535"},
    {"RANK=1 WORLD_SIZE=4 MASTER_ADDR=x MASTER_PORT=65536", "MASTER_PORT=65536", "65535"},
    {"RANK=1 WORLD_SIZE=4 MASTER_ADDR=x MASTER_PORT=http", "MASTER_PORT", "http"},
    {"RANK=1 WORLD_SIZE=4 MASTER_ADDR=x DTRAIN_PORT=70000", "DTRAIN_PORT=70000", "65535"},
    {"DTRAIN_RANK=1", "DTRAIN_RANK=1", "DTRAIN_WORLD_SIZE"},
    {"DTRAIN_WORLD_SIZE=2 RANK=0 WORLD_SIZE=1", "DTRAIN_WORLD_SIZE=2", "DTRAIN_RANK"},
    {"DTRAIN_RANK=1 DTRAIN_WORLD_SIZE=4 MASTER_ADDR=x", "DTRAIN_WORLD_SIZE=4",
     "DTRAIN_MASTER_ADDR"},
    /* RANK inherited by the shell that ran mpirun */
    {"RANK=0 WORLD_SIZE=1 OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2", "RANK=0",
     "OMPI_COMM_WORLD_RANK=1"},
    {"RANK=0 WORLD_SIZE=2 MASTER_ADDR=x PMI_RANK=0 PMI_SIZE=3", "WORLD_SIZE=2", "PMI_SIZE=3"},
    {"OMPI_COMM_WORLD_RANK=1", "OMPI_COMM_WORLD_RANK=1", "OMPI_COMM_WORLD_SIZE"},
    {"OMPI_COMM_WORLD_RANK=x OMPI_COMM_WORLD_SIZE=2", "OMPI_COMM_WORLD_RANK", "x"},
    {"OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=1 "
     "OMPI_COMM_WORLD_LOCAL_RANK=0",
     "OMPI_COMM_WORLD_SIZE=2", "MASTER_ADDR"},
    {"PMI_SIZE=2", "PMI_SIZE=2", "PMI_RANK"},
    {"SLURM_STEP_ID=0 SLURM_PROCID=1", "SLURM_PROCID=1", "SLURM_NTASKS"},
    {"SLURM_STEP_ID=0 SLURM_PROCID=7 SLURM_NTASKS=7", "SLURM_PROCID=7", "SLURM_NTASKS=7"},
    {"SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NTASKS=7 SLURM_STEP_NODELIST=n[1-",
     "SLURM_STEP_NODELIST", "n[1-"},
    {"JOB_COMPLETION_INDEX=4 WORLD_SIZE=4 MASTER_ADDR=x", "JOB_COMPLETION_INDEX=4", "WORLD_SIZE=4"},
    {"JOB_COMPLETION_INDEX=1 WORLD_SIZE=4 HOSTNAME=train-1", "WORLD_SIZE=4", "MASTER_ADDR"},
    {"JOB_COMPLETION_INDEX=1 WORLD_SIZE=4 HOSTNAME=train-2.svc", "WORLD_SIZE=4", "MASTER_ADDR"},
    {"PET_NNODES=2", "PET_NNODES=2", "PET_NODE_RANK"},
    {"PET_NODE_RANK=0", "PET_NODE_RANK=0", "PET_NNODES"},
    {"PET_NNODES=2 PET_NODE_RANK=2", "PET_NODE_RANK=2", "PET_NNODES=2"},
    {"PET_NNODES=1:4 PET_NODE_RANK=0", "PET_NNODES", "1:4"},
    {"PET_NNODES=2 PET_NODE_RANK=1 PET_NPROC_PER_NODE=auto", "PET_NPROC_PER_NODE", "auto"},
    {"PET_NNODES=2 PET_NODE_RANK=1 PET_NPROC_PER_NODE=2", "PET_NNODES=2", "PET_MASTER_ADDR"},
    {"PET_NNODES=2 PET_NODE_RANK=1 PET_NPROC_PER_NODE=0", "PET_NPROC_PER_NODE=0", "PET_NNODES=2"},
    {"PET_NNODES=100 PET_NODE_RANK=1 PET_NPROC_PER_NODE=8", "PET_NPROC_PER_NODE=8",
     "PET_NNODES=100"},
};

static void test_refused(void)
{
    char words[600];
    dtrain__placement p;
    size_t i;
    for (i = 0; i < sizeof bad_words / sizeof *bad_words; i++) {
        const dtrain_result result = recognise(bad_words[i][0], &p);
        CHECK_MSG(result == DTRAIN_ERROR_ARGUMENT || result == DTRAIN_ERROR_UNSUPPORTED,
                  "'%s' was taken: rank %d of %d", bad_words[i][0], p.rank, p.size);
        CHECK_MSG(has(dtrain_last_error(), bad_words[i][1]) &&
                      has(dtrain_last_error(), bad_words[i][2]),
                  "'%s': %s", bad_words[i][0], dtrain_last_error());
    }
    snprintf(words, sizeof words, "RANK=1 WORLD_SIZE=2 MASTER_ADDR=%0*d", 255, 0);
    CHECK(recognise(words, &p) == DTRAIN_OK && strlen(p.address) == 255);
}

/* Two runs at one port must not be taken for one. */
static void test_run_keys(void)
{
    static const char *const others[] = {
        "TORCHELASTIC_RUN_ID=8 TORCHELASTIC_RESTART_COUNT=0",
        "TORCHELASTIC_RUN_ID=7 TORCHELASTIC_RESTART_COUNT=1",
        "TORCHELASTIC_RUN_ID=70 TORCHELASTIC_RESTART_COUNT=",
        "TORCHELASTIC_RUN_ID=7 TORCHELASTIC_RESTART_COUNT=0 DTRAIN_JOB_KEY=k",
        "TORCHELASTIC_RUN_ID=7 TORCHELASTIC_RESTART_COUNT=0 DTRAIN_JOB_KEY=70",
    };
    char words[512];
    dtrain__placement first, same, p;
    size_t i;
    CHECK(recognise(TORCHRUN "TORCHELASTIC_RUN_ID=7 TORCHELASTIC_RESTART_COUNT=0", &first) ==
          DTRAIN_OK);
    CHECK(recognise("RANK=0 WORLD_SIZE=8 MASTER_ADDR=head TORCHELASTIC_RUN_ID=7 "
                    "TORCHELASTIC_RESTART_COUNT=0",
                    &same) == DTRAIN_OK);
    CHECK(first.key[0] == same.key[0] && first.key[1] == same.key[1] &&
          first.key[0] != first.key[1]);
    for (i = 0; i < sizeof others / sizeof *others; i++) {
        snprintf(words, sizeof words, "%s%s", TORCHRUN, others[i]);
        CHECK(recognise(words, &p) == DTRAIN_OK);
        CHECK_MSG(p.key[0] != first.key[0] && p.key[1] != first.key[1], "%s: the same key",
                  others[i]);
    }
}

static void check_host(const char *list, const char *expected)
{
    char one[64] = "";
    const bool found = dtrain__first_host(list, one, sizeof one);
    CHECK_MSG(found == (expected != NULL) && (!found || strcmp(one, expected) == 0), "%s -> '%s'",
              list, one);
}

static void test_host_lists(void)
{
    char small[20];
    uint64_t seed = 5;
    int round, i;
    check_host("node[001-003,7],gpu[1-2]", "node001");
    check_host("a[1-2]b[3-4]", "a1b3");
    check_host("rack[1-2]-n[08-10]", "rack1-n08");
    check_host("n[7]", "n7");
    check_host("n1", "n1");
    check_host("n1,n2", "n1");
    check_host("n[9-11]x,b", "n9x");
    check_host("", NULL);
    check_host("n[1-2", NULL);
    check_host("n[", NULL);
    check_host("n]", NULL);
    check_host("n[]", NULL);
    check_host("n[a]", NULL);
    check_host(",a", NULL);
    CHECK(!dtrain__first_host("a-very-long-host-name[1-2]", small, sizeof small));
    CHECK(!dtrain__first_host("n[01234567890123456789]", small, sizeof small));
    CHECK(dtrain__first_host("a-name-of-19-letter", small, sizeof small));
    for (round = 0; round < 20000; round++) { /* anything at all: no crash, no overrun */
        static const char letters[] = "an[]-,0123456789(x)";
        char text[24];
        for (i = 0; i < 23; i++) text[i] = letters[ranks_random(&seed, sizeof letters)];
        text[23] = 0;
        (void)dtrain__first_host(text, small, sizeof small);
    }
}

/* From the paper: key 00 01 .. 0f, message 00 01 .. 0e. */
static void test_siphash(void)
{
    const uint64_t key[2] = {0x0706050403020100u, 0x0f0e0d0c0b0a0908u};
    unsigned char message[15];
    int i;
    for (i = 0; i < 15; i++) message[i] = (unsigned char)i;
    CHECK(dtrain__siphash(key, message, 15) == 0xa129ca6149be45e5u);
    CHECK(dtrain__siphash(key, message, 0) == 0x726fdb47dd0e0e31u);
    CHECK(dtrain__siphash(key, message, 8) == 0x93f5f5799a932462u);
}

/* ---- ranks as a launcher starts them ---- */

typedef struct outcome {
    int32_t result, exit_code, first_failed, done, leftover_fds;
    double seconds;
    char error[1024];
} outcome;

typedef struct crew {
    int size;
    uint32_t timeout_ms;
    uint16_t port;
    const char *words[MOST_NAMES]; /* of one rank, behind everybody's; "A=1 B=2" */
    dtrain_rank_fn rank_main;
    void *user;
    const dtrain_comm_ops *comm_ops;
    void (*before)(int rank); /* in the process, before dtrain_launch */
    outcome *ends;            /* (MOST_NAMES), shared */
    pid_t pids[MOST_NAMES];
} crew;

static void set_words(const char *words)
{
    char text[512], *at;
    snprintf(text, sizeof text, "%s", words);
    for (at = strtok(text, " "); at; at = strtok(NULL, " ")) {
        char *value = strchr(at, '=');
        if (!value) continue;
        *value++ = 0;
        if (*value) setenv(at, value, 1);
        else unsetenv(at);
    }
}

static crew make_crew(int size, dtrain_rank_fn rank_main, void *user)
{
    crew c;
    memset(&c, 0, sizeof c);
    c.size = size;
    c.timeout_ms = 20000;
    c.port = ports_next();
    c.rank_main = rank_main;
    c.user = user;
    c.ends = (outcome *)ranks_shared(MOST_NAMES * sizeof *c.ends);
    return c;
}

static void crew_start(crew *c, int slot, int rank)
{
    const pid_t pid = fork();
    if (pid == 0) {
        dtrain_launch_desc desc = ranks_desc(0, DTRAIN_LAUNCH_PROCESSES);
        dtrain_launch_info info;
        outcome *end = &c->ends[slot];
        char words[256];
        int fds;
        snprintf(words, sizeof words,
                 "RANK=%d WORLD_SIZE=%d LOCAL_RANK= LOCAL_WORLD_SIZE= MASTER_ADDR=127.0.0.1 "
                 "DTRAIN_PORT=%u",
                 rank, c->size, c->port);
        set_words(words);
        if (c->words[slot]) set_words(c->words[slot]);
        desc.timeout_ms = c->timeout_ms;
        desc.comm_ops = c->comm_ops;
        desc.options.log_level = DTRAIN_LOG_ERROR;
        if (c->before) c->before(rank);
        fds = ranks_entries("/proc/self/fd", "");
        end->result = dtrain_launch(&desc, c->rank_main, c->user, &info);
        end->leftover_fds = ranks_entries("/proc/self/fd", "") - fds;
        end->exit_code = info.exit_code;
        end->first_failed = info.first_failed_rank;
        end->seconds = info.seconds;
        snprintf(end->error, sizeof end->error, "%s", end->result ? dtrain_last_error() : "");
        end->done = 1;
        exit(info.exit_code);
    }
    c->pids[slot] = pid;
}

static void crew_start_all(crew *c)
{
    int i;
    for (i = 0; i < c->size; i++) crew_start(c, i, i);
}

/* All processes end by themselves; nobody holds a file or names memory. */
static void crew_wait(crew *c)
{
    int i, status;
    for (i = 0; i < MOST_NAMES; i++) {
        if (!c->pids[i]) continue;
        if (!CHECK_MSG(test_wait(c->pids[i], 30, &status), "process %d does not end", i)) {
            kill(c->pids[i], SIGKILL);
            waitpid(c->pids[i], &status, 0);
        }
        if (c->ends[i].done)
            CHECK_MSG(c->ends[i].leftover_fds == 0, "process %d keeps %d files open", i,
                      c->ends[i].leftover_fds);
        c->pids[i] = 0;
    }
    CHECK(ranks_entries("/dev/shm", "dtrain") == 0);
}

static void crew_run(int size, dtrain_rank_fn rank_main, void *user)
{
    crew c = make_crew(size, rank_main, user);
    int i;
    crew_start_all(&c);
    crew_wait(&c);
    for (i = 0; i < size; i++)
        CHECK_MSG(c.ends[i].done && c.ends[i].result == DTRAIN_OK && c.ends[i].exit_code == 0,
                  "rank %d of %d: %s", i, size, c.ends[i].error);
}

/* Every rank ended with this result and a sentence that has both parts. */
static void crew_check(const crew *c, int from, int to, dtrain_result result, const char *a,
                       const char *b)
{
    int i;
    for (i = from; i < to; i++) {
        const outcome *end = &c->ends[i];
        CHECK_MSG(end->done && end->result == result && end->exit_code != 0,
                  "process %d: %s, code %d: %s", i, dtrain_result_text((dtrain_result)end->result),
                  end->exit_code, end->error);
        CHECK_MSG(has(end->error, a) && has(end->error, b),
                  "process %d: '%s' or '%s' is not in: %s", i, a, b, end->error);
    }
}

/* ---- a world is a world ---- */

typedef struct shape {
    int size, per_node;
} shape;

static int rank_uses_world(dtrain_world *world, void *user)
{
    const shape *expected = (const shape *)user;
    const int rank = dtrain_world_rank(world), size = dtrain_world_size(world);
    dtrain_comm *comm = dtrain_world_comm(world);
    float sum = (float)rank + 1, *shared;
    int32_t mine = rank * 7, all[MOST_NAMES];
    dtrain_world_info info;
    int i, round;
    CHECK_MSG(size == expected->size, "world size %d", size);
    CHECK(dtrain_comm_rank(comm) == rank && dtrain_comm_size(comm) == size);
    dtrain_world_query(world, &info);
    CHECK(info.local_rank == rank % expected->per_node && info.local_size == expected->per_node);
    CHECK(info.node == 0 && info.node_count == 1 && info.threads == 1);
    for (round = 0; round < 50; round++) {
        RANKS_TRY(dtrain_world_all_gather(world, &mine, sizeof mine, all));
        for (i = 0; i < size; i++) CHECK(all[i] == 7 * i);
        RANKS_TRY(dtrain_barrier(comm));
    }
    RANKS_TRY(dtrain_all_reduce(comm, &sum, &sum, 1, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, NULL));
    CHECK(sum == (float)(size * (size + 1) / 2));
    RANKS_TRY(dtrain_comm_alloc(comm, 1 << 20, (void **)&shared));
    for (i = 0; i < 1 << 18; i++) shared[i] = (float)rank;
    RANKS_TRY(dtrain_all_reduce(comm, shared, shared, 1 << 18, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_MAX,
                                NULL));
    CHECK(shared[0] == (float)(size - 1) && shared[(1 << 18) - 1] == (float)(size - 1));
    dtrain_comm_free(comm, shared, 1 << 20);
    CHECK(dtrain_world_poll(world) == DTRAIN_OK);
    return 0;
}

static void test_join(void)
{
    static shape shapes[] = {{2, 2}, {3, 3}, {8, 8}};
    int i, round;
    for (i = 0; i < 3; i++)
        for (round = 0; round < 3; round++) crew_run(shapes[i].size, rank_uses_world, &shapes[i]);
}

/* A few steps of DDP; the parameters' bits go to user + rank. */
enum { WEIGHTS = 5000, STEPS = 10, DDP_RANKS = 3 };
static int rank_trains(dtrain_world *world, void *user)
{
    const int rank = dtrain_world_rank(world);
    float *out = (float *)user + rank * WEIGHTS, *grad = (float *)calloc(WEIGHTS, sizeof *grad);
    float *value = (float *)calloc(WEIGHTS, sizeof *value);
    dtrain_param param = ranks_param("w", value, grad, WEIGHTS, 1);
    dtrain_strategy *ddp;
    int step, i;
    RANKS_TRY(dtrain_strategy_create(world, &param, 1, NULL, &ddp));
    for (step = 0; step < STEPS; step++) {
        for (i = 0; i < WEIGHTS; i++)
            grad[i] = (float)((i * 31 + step * 17 + rank * 101) % 997) / 131.0f - value[i];
        RANKS_TRY(dtrain_strategy_ready(ddp, 0));
        RANKS_TRY(dtrain_strategy_finish(ddp));
        for (i = 0; i < WEIGHTS; i++) value[i] += 0.1f * grad[i];
    }
    memcpy(out, value, WEIGHTS * sizeof *out);
    dtrain_strategy_destroy(ddp);
    free(value);
    free(grad);
    return 0;
}

static void test_same_bits_as_forked(void)
{
    float *forked = (float *)ranks_shared(DDP_RANKS * WEIGHTS * sizeof(float));
    float *joined = (float *)ranks_shared(DDP_RANKS * WEIGHTS * sizeof(float));
    ranks_run(DDP_RANKS, DTRAIN_LAUNCH_PROCESSES, rank_trains, forked);
    crew_run(DDP_RANKS, rank_trains, joined);
    CHECK(forked[7] != 0 && forked[WEIGHTS - 1] != 0);
    CHECK(memcmp(forked, joined, DDP_RANKS * WEIGHTS * sizeof(float)) == 0);
}

/* ---- the rendezvous and its enemies ---- */

static int rank_is_glad(dtrain_world *world, void *user)
{
    (void)user;
    RANKS_TRY(dtrain_barrier(dtrain_world_comm(world)));
    return 0;
}

static int rank_never_runs(dtrain_world *world, void *user)
{
    (void)user;
    CHECK_MSG(false, "rank %d runs in a world that cannot be", dtrain_world_rank(world));
    return 0;
}

static void test_other_sizes(void)
{
    crew c = make_crew(3, rank_never_runs, NULL);
    c.words[2] = "WORLD_SIZE=4";
    crew_start_all(&c);
    crew_wait(&c);
    crew_check(&c, 0, 3, DTRAIN_ERROR_MISMATCH, "world size 4", "world size 3");
}

/* A rank that comes after the mistake has been noticed is told as well. */
static void test_same_rank_twice(void)
{
    crew c = make_crew(3, rank_never_runs, NULL);
    c.words[2] = "RANK=1";
    crew_start_all(&c);
    ranks_await(&c.ends[1].done, 1);
    crew_start(&c, 3, 2);
    crew_wait(&c);
    crew_check(&c, 0, 4, DTRAIN_ERROR_MISMATCH, "rank 1 was started twice", "pid");
}

/* Two processes that both believe to be rank 0: one of them cannot have the port, and the other one is
 * told, or waits in vain. */
static void test_rank_0_twice(void)
{
    crew c = make_crew(2, rank_never_runs, NULL);
    c.timeout_ms = 1500;
    c.words[1] = "RANK=0";
    crew_start_all(&c);
    crew_wait(&c);
    CHECK_MSG(has(c.ends[0].error, "cannot listen") != has(c.ends[1].error, "cannot listen"),
              "%s; %s", c.ends[0].error, c.ends[1].error);
    CHECK(c.ends[0].result != DTRAIN_OK && c.ends[1].result != DTRAIN_OK);
}

/* A stranger cannot end the run; but the run does not come together, and says what was turned away. */
static void test_other_key(void)
{
    crew c = make_crew(3, rank_never_runs, NULL);
    c.timeout_ms = RANKS_SHORT_MS;
    c.words[0] = c.words[1] = "DTRAIN_JOB_KEY=blue";
    c.words[2] = "DTRAIN_JOB_KEY=red";
    crew_start_all(&c);
    crew_wait(&c);
    crew_check(&c, 0, 2, DTRAIN_ERROR_TIMEOUT, "not come: 2", "DTRAIN_JOB_KEY");
    crew_check(&c, 2, 3, DTRAIN_ERROR_MISMATCH, "DTRAIN_JOB_KEY", "127.0.0.1");
}

static void test_keys(void)
{
    crew c = make_crew(2, rank_is_glad, NULL);
    c.words[0] = c.words[1] = "DTRAIN_JOB_KEY=a_secret_of_more_than_sixteen_bytes";
    crew_start_all(&c);
    crew_wait(&c);
    CHECK_MSG(c.ends[0].result == DTRAIN_OK && c.ends[1].result == DTRAIN_OK, "%s",
              c.ends[0].error);
    c.words[1] = "DTRAIN_JOB_KEY="; /* a key on one side only */
    c.timeout_ms = RANKS_SHORT_MS;
    crew_start_all(&c);
    crew_wait(&c);
    crew_check(&c, 0, 1, DTRAIN_ERROR_TIMEOUT, "not come: 1", "DTRAIN_JOB_KEY");
    crew_check(&c, 1, 2, DTRAIN_ERROR_MISMATCH, "DTRAIN_JOB_KEY", "another run");
}

/* The stranger is turned away and the right rank comes: the run starts. */
static void test_other_key_goes_away(void)
{
    crew c = make_crew(2, rank_is_glad, NULL);
    c.words[2] = "DTRAIN_JOB_KEY=red";
    crew_start(&c, 0, 0);
    c.timeout_ms = 500;
    crew_start(&c, 2, 1);
    ranks_await(&c.ends[2].done, 1);
    CHECK(c.ends[2].result != DTRAIN_OK);
    c.timeout_ms = 20000;
    crew_start(&c, 1, 1);
    crew_wait(&c);
    CHECK_MSG(c.ends[0].result == DTRAIN_OK && c.ends[1].result == DTRAIN_OK, "%s %s",
              c.ends[0].error, c.ends[1].error);
}

static void test_missing_rank(void)
{
    crew c = make_crew(4, rank_never_runs, NULL);
    const double start = test_seconds();
    c.timeout_ms = RANKS_SHORT_MS;
    crew_start(&c, 0, 0);
    crew_start(&c, 1, 2);
    crew_wait(&c);
    crew_check(&c, 0, 2, DTRAIN_ERROR_TIMEOUT, "2 of 4 ranks have not come: 1, 3",
               " of 4 by the variables of torchrun");
    CHECK_MSG(test_seconds() - start < RANKS_SOON, "it took %.1f s", test_seconds() - start);
    crew_start(&c, 0, 1); /* nobody listens */
    crew_wait(&c);
    crew_check(&c, 0, 1, DTRAIN_ERROR_TIMEOUT, "rank 0", "refused");
}

/* Of two ranks that have met, one is killed. Whether they have met cannot be seen from here, and who is killed
 * before is nobody to the other one: so that rank is started and killed, with more time each time, until
 * the other one has ended. */
static void meet_and_kill_once(crew *c, int victim)
{
    const int other = 1 - victim;
    long us = 50000;
    int status;
    c->ends[other].done = 0;
    crew_start(c, other, other);
    for (; !c->ends[other].done && us < 4000000; us *= 2) {
        const double end = test_seconds() + 1e-6 * (double)us;
        crew_start(c, victim, victim);
        while (test_seconds() < end) ranks_sleep_us(5000);
        kill(c->pids[victim], SIGKILL);
        waitpid(c->pids[victim], &status, 0);
        c->pids[victim] = 0;
        while (test_seconds() < end + 0.1 && !c->ends[other].done) ranks_sleep_us(5000);
    }
    crew_wait(c);
}
/* Load can keep the other rank from seeing in time that the victim is gone; then it sees two victims, and all begins
 * anew. */
static void meet_and_kill(crew *c, int victim)
{
    int tries = 0;
    do meet_and_kill_once(c, victim);
    while (has(c->ends[1 - victim].error, "was started twice") && ++tries < 10);
}

static void test_rank_leaves_early(void)
{
    crew c = make_crew(3, rank_never_runs, NULL);
    meet_and_kill(&c, 1);
    crew_check(&c, 0, 1, DTRAIN_ERROR_PEER, "rank 1", "before all ranks had come");
    meet_and_kill(&c, 0);
    crew_check(&c, 1, 2, DTRAIN_ERROR_PEER, "rank 0", "rendezvous: rank 0 is gone");
}

/* The same port run after run: nothing of the last one is in the way. */
static void test_one_port_again(void)
{
    crew c = make_crew(3, rank_is_glad, NULL);
    int round, i;
    for (round = 0; round < 6; round++) {
        crew_start_all(&c);
        crew_wait(&c);
        for (i = 0; i < 3; i++)
            CHECK_MSG(c.ends[i].result == DTRAIN_OK, "round %d, rank %d: %s", round, i,
                      c.ends[i].error);
    }
}

static bool has_ipv6(void)
{
    struct sockaddr_in6 address;
    const int fd = socket(AF_INET6, SOCK_STREAM, 0);
    bool good;
    memset(&address, 0, sizeof address);
    address.sin6_family = AF_INET6;
    address.sin6_addr = in6addr_loopback;
    good = fd >= 0 && bind(fd, (struct sockaddr *)&address, sizeof address) == 0;
    if (fd >= 0) close(fd);
    return good;
}

static void run_at(const char *words)
{
    crew c = make_crew(3, rank_is_glad, NULL);
    int i;
    for (i = 0; i < 3; i++) c.words[i] = words;
    crew_start_all(&c);
    crew_wait(&c);
    for (i = 0; i < 3; i++)
        CHECK_MSG(c.ends[i].result == DTRAIN_OK, "%s, rank %d: %s", words, i, c.ends[i].error);
}

static void test_addresses(void)
{
    char host[200] = "", words[300];
    run_at("MASTER_ADDR=localhost");
    run_at("MASTER_ADDR= LOCAL_WORLD_SIZE=3");
    if (has_ipv6()) {
        run_at("MASTER_ADDR=[::1]");
        run_at("MASTER_ADDR=::1");
    }
    CHECK(gethostname(host, sizeof host - 1) == 0);
    snprintf(words, sizeof words, "MASTER_ADDR=%s", host);
    if (gethostbyname(host)) run_at(words); /* often 127.0.1.1 */
}

static void test_no_such_host(void)
{
    crew c = make_crew(2, rank_never_runs, NULL);
    c.timeout_ms = 700;
    c.words[0] = c.words[1] = "MASTER_ADDR=no-such-host.invalid";
    crew_start_all(&c);
    crew_wait(&c);
    crew_check(&c, 0, 1, DTRAIN_ERROR_TIMEOUT, "no-such-host.invalid", "not come: 1");
    crew_check(&c, 1, 2, DTRAIN_ERROR_TIMEOUT, "no-such-host.invalid", "resolved");
}

static void test_late_rank_0(void)
{
    crew c = make_crew(2, rank_is_glad, NULL);
    crew_start(&c, 1, 1);
    ranks_sleep_us(500000);
    crew_start(&c, 0, 0);
    crew_wait(&c);
    CHECK_MSG(c.ends[0].result == DTRAIN_OK && c.ends[1].result == DTRAIN_OK, "%s %s",
              c.ends[0].error, c.ends[1].error);
}

static int call(uint16_t port)
{
    struct sockaddr_in address;
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    memset(&address, 0, sizeof address);
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (connect(fd, (struct sockaddr *)&address, sizeof address) == 0) return fd;
    close(fd);
    return -1;
}

/* Listen where rank 0 should be. */
static int listen_instead(uint16_t port)
{
    struct sockaddr_in address;
    const int on = 1, fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    memset(&address, 0, sizeof address);
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    CHECK(bind(fd, (struct sockaddr *)&address, sizeof address) == 0 && listen(fd, 9) == 0);
    return fd;
}

static int call_patiently(uint16_t port)
{
    int i, fd;
    for (i = 0; i < 2000; i++, ranks_sleep_us(10000))
        if ((fd = call(port)) >= 0) return fd;
    CHECK_MSG(false, "nobody listens at port %u", port);
    return -1;
}

static void test_port_in_use(void)
{
    crew c = make_crew(2, rank_never_runs, NULL);
    char port[16];
    const int fd = listen_instead(c.port);
    snprintf(port, sizeof port, "port %u", c.port);
    c.timeout_ms = 1500;
    crew_start_all(&c);
    crew_wait(&c);
    crew_check(&c, 0, 1, DTRAIN_ERROR_SYSTEM, port, "DTRAIN_PORT");
    crew_check(&c, 1, 2, DTRAIN_ERROR_TIMEOUT, port, "rank 0");
    close(fd);
}

/* Whoever comes by while the run comes together: silent ones, talkers, half a greeting, a flood. */
static void test_strangers(void)
{
    enum { CALLERS = 100 };
    static const char http[] = "GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n";
    crew c = make_crew(3, rank_is_glad, NULL);
    uint64_t seed = 77;
    char junk[9000];
    int fds[CALLERS], i;
    size_t k;
    crew_start(&c, 0, 0);
    crew_start(&c, 1, 1);
    fds[0] = call_patiently(c.port);
    for (i = 1; i < CALLERS; i++) {
        const uint32_t magic = DTRAIN__HELLO_MAGIC;
        const size_t part = ranks_random(&seed, sizeof(dtrain__hello));
        fds[i] = call(c.port);
        if (fds[i] < 0) continue;
        for (k = 0; k < sizeof junk; k++) junk[k] = (char)ranks_random(&seed, 256);
        if (i % 8 == 1) (void)!write(fds[i], http, sizeof http);
        if (i % 8 == 2) (void)!write(fds[i], &magic, 3);
        if (i % 8 == 3) (void)!send(fds[i], junk, sizeof junk, MSG_NOSIGNAL);
        memcpy(junk, &magic, sizeof magic);
        if (i % 8 == 4) (void)!send(fds[i], junk, sizeof junk, MSG_NOSIGNAL);
        if (i % 8 == 5) (void)!send(fds[i], junk, sizeof(dtrain__hello), MSG_NOSIGNAL);
        if (i % 8 >= 6) (void)!send(fds[i], junk, part, MSG_NOSIGNAL);
        if (i % 5 == 4) {
            close(fds[i]);
            fds[i] = -1;
        }
    }
    crew_start(&c, 2, 2);
    ranks_sleep_us(300000);
    for (i = 20; i < CALLERS; i++)
        if (fds[i] >= 0) close(fds[i]);
    crew_wait(&c);
    for (i = 0; i < 20; i++)
        if (fds[i] >= 0) close(fds[i]);
    for (i = 0; i < 3; i++)
        CHECK_MSG(c.ends[i].done && c.ends[i].result == DTRAIN_OK, "rank %d: %s", i,
                  c.ends[i].error);
}

/* More connections that stay and say nothing than rank 0 listens to: ranks that come later get in. */
static void test_silent_strangers(void)
{
    enum { CALLERS = 300 };
    crew c = make_crew(3, rank_is_glad, NULL);
    int fds[CALLERS];
    crew_start(&c, 0, 0);
    fds[0] = call_patiently(c.port);
    for (int i = 1; i < CALLERS; i++) fds[i] = call(c.port);
    crew_start(&c, 1, 1);
    crew_start(&c, 2, 2);
    crew_wait(&c);
    for (int i = 0; i < CALLERS; i++)
        if (fds[i] >= 0) close(fds[i]);
    for (int i = 0; i < 3; i++)
        CHECK_MSG(c.ends[i].result == DTRAIN_OK, "rank %d: %s", i, c.ends[i].error);
}

/* What calls itself rank 1, knows the protocol and not the key: turned away, and the real one is let
 * in. Its hello comes in two parts. */
static void test_false_rank_1(void)
{
    crew c = make_crew(2, rank_is_glad, NULL);
    dtrain__rendezvous r;
    dtrain__placement place;
    dtrain_world world;
    dtrain__hello hello;
    dtrain__reply reply;
    int i, fd;
    memset(&r, 0, sizeof r);
    memset(&place, 0, sizeof place);
    memset(&world, 0, sizeof world);
    world.rank = 1;
    world.size = 2;
    r.world = &world;
    r.place = &place;
    c.words[0] = c.words[1] = "DTRAIN_JOB_KEY=blue";
    crew_start(&c, 0, 0);
    fd = call_patiently(c.port);
    hello = dtrain__hello_make(&r); /* with a key of zeros */
    CHECK(send(fd, &hello, 50, MSG_NOSIGNAL) == 50);
    ranks_sleep_us(50000);
    CHECK(send(fd, (char *)&hello + 50, sizeof hello - 50, MSG_NOSIGNAL) == sizeof hello - 50);
    CHECK(recv(fd, &reply, sizeof reply, MSG_WAITALL) == sizeof reply);
    CHECK(reply.result == DTRAIN_ERROR_MISMATCH && !reply.why[0]);
    CHECK(reply.proof != dtrain__proof(&r, hello.proof, &reply, sizeof reply));
    CHECK(recv(fd, &reply, sizeof reply, 0) == 0); /* closed */
    crew_start(&c, 1, 1);
    crew_wait(&c);
    for (i = 0; i < 2; i++)
        CHECK_MSG(c.ends[i].result == DTRAIN_OK, "rank %d: %s", i, c.ends[i].error);
    close(fd);
}

/* What listens where rank 0 should be, knows the protocol and not the key: it lets in all that call,
 * or refuses them, and nobody takes it for rank 0. */
static void false_welcome(int how)
{
    static const int results[] = {DTRAIN_OK, DTRAIN_ERROR_PEER};
    crew c = make_crew(2, rank_never_runs, NULL);
    const int fd = listen_instead(c.port);
    dtrain__hello hello;
    dtrain__reply reply;
    int callers = 0, status, i;
    memset(&reply, 0, sizeof reply);
    c.timeout_ms = RANKS_SHORT_MS;
    crew_start(&c, 0, 1);
    for (i = 0; i < 20000 && !test_wait(c.pids[0], 0, &status); i++, ranks_sleep_us(1000)) {
        const int socket = accept(fd, NULL, NULL);
        if (socket < 0) continue;
        callers += recv(socket, &hello, sizeof hello, MSG_WAITALL) == sizeof hello;
        reply.result = results[how];
        (void)!send(socket, &reply, sizeof reply, MSG_NOSIGNAL);
        close(socket);
    }
    close(fd);
    CHECK_MSG(callers > 0, "nobody called");
    CHECK_MSG(c.ends[0].done && c.ends[0].exit_code != 0, "%s", c.ends[0].error);
    crew_check(&c, 0, 1, DTRAIN_ERROR_MISMATCH, "DTRAIN_JOB_KEY", "127.0.0.1");
}

static void test_false_welcome(void) { test_cases(2, false_welcome); }

/* What calls itself rank 0 and is not. */
static void test_false_rank_0(void)
{
    crew c = make_crew(2, rank_never_runs, NULL);
    char junk[300];
    uint64_t seed = 3;
    const int fd = listen_instead(c.port);
    double start = test_seconds();
    int guests = 0;
    size_t k;
    c.timeout_ms = RANKS_SHORT_MS;
    crew_start(&c, 0, 1);
    for (; !c.ends[0].done && test_seconds() < start + RANKS_SOON; ranks_sleep_us(2000)) {
        const int guest = accept(fd, NULL, NULL);
        if (guest < 0) continue;
        for (k = 0; k < sizeof junk; k++) junk[k] = (char)ranks_random(&seed, 256);
        guests++; /* less than a reply, and the proof of none */
        (void)!send(guest, junk, ranks_random(&seed, sizeof junk), MSG_NOSIGNAL);
        close(guest);
    }
    close(fd);
    crew_wait(&c);
    CHECK_MSG(guests > 3, "only %d tries", guests);
    crew_check(&c, 0, 1, DTRAIN_ERROR_TIMEOUT, "rank 0", "answer");
}

/* ---- deaths ---- */

typedef struct death {
    int victim, by_exchange, how; /* how: 0 SIGKILL, 1 return 7, 2 exit(9), 3 leaves, 4 reports */
    double at[MOST_NAMES], heard[MOST_NAMES]; /* in shared memory */
    int32_t result[MOST_NAMES];
    char error[MOST_NAMES][1024];
} death;

static int rank_lives_or_dies(dtrain_world *world, void *user)
{
    death *d = (death *)user;
    const int rank = dtrain_world_rank(world);
    int32_t mine = rank, all[MOST_NAMES];
    dtrain_result result = DTRAIN_OK;
    int round;
    for (round = 0; result == DTRAIN_OK; round++) {
        if (rank == d->victim && round == 20) {
            d->at[rank] = test_seconds();
            if (d->how == 0) raise(SIGKILL);
            if (d->how == 1) return 7;
            if (d->how == 2) exit(9);
            if (d->how == 3) return 0;
            dtrain_world_abort(world, DTRAIN_ERROR_SYSTEM, "the card fell out");
            result = dtrain_world_poll(world);
            break;
        }
        result = d->by_exchange ? dtrain_world_all_gather(world, &mine, sizeof mine, all)
                                : dtrain_barrier(dtrain_world_comm(world));
    }
    d->heard[rank] = test_seconds();
    d->result[rank] = (int32_t)result;
    snprintf(d->error[rank], sizeof d->error[rank], "%s", dtrain_last_error());
    return 5;
}

static void check_death(const crew *c, const death *d)
{
    char name[32];
    int i;
    snprintf(name, sizeof name, "rank %d", d->victim);
    for (i = 0; i < c->size; i++) {
        if (i == d->victim) continue;
        CHECK_MSG(d->result[i] == DTRAIN_ERROR_PEER && has(d->error[i], name),
                  "victim %d, how %d, exchange %d: rank %d: %s", d->victim, d->how, d->by_exchange,
                  i, d->error[i]);
        CHECK_MSG(d->heard[i] - d->at[d->victim] < RANKS_SOON, "rank %d heard of it %.2f s later",
                  i, d->heard[i] - d->at[d->victim]);
        CHECK_MSG(c->ends[i].result == DTRAIN_ERROR_RANK_FAILED && c->ends[i].exit_code == 5,
                  "rank %d: %s, code %d: %s", i,
                  dtrain_result_text((dtrain_result)c->ends[i].result), c->ends[i].exit_code,
                  c->ends[i].error);
        if (d->how == 4) CHECK(has(d->error[i], "the card fell out"));
    }
    if (d->how == 1)
        CHECK(c->ends[d->victim].exit_code == 7 && has(c->ends[d->victim].error, "returned 7"));
    if (d->how == 3)
        CHECK(c->ends[d->victim].result == (d->victim ? DTRAIN_OK : DTRAIN_ERROR_RANK_FAILED));
}

static void test_deaths(void)
{
    int how, victim, by_exchange;
    for (how = 0; how < 5; how++)
        for (victim = 0; victim < 2; victim++)
            for (by_exchange = 0; by_exchange < 2; by_exchange++) {
                death *d = (death *)ranks_shared(sizeof *d);
                crew c = make_crew(3, rank_lives_or_dies, d);
                d->how = how;
                d->victim = victim;
                d->by_exchange = by_exchange;
                crew_start_all(&c);
                crew_wait(&c);
                check_death(&c, d);
            }
}

/* What is known of a rank that has ended: why, and that one of whom the others have heard that it is lost stays so. */
static void test_exit_records(void)
{
    dtrain_world world;
    memset(&world, 0, sizeof world);
    world.control = (dtrain__control *)ranks_shared(sizeof *world.control);
    dtrain__record_end(world.control, 3, DTRAIN__LEFT, 0, "");
    CHECK(dtrain__trouble(&world) == DTRAIN_OK);
    CHECK(dtrain__record_lost(world.control, 1) && !dtrain__record_lost(world.control, 3));
    dtrain__record_end(world.control, 1, DTRAIN__LEFT, 0, "");
    CHECK(dtrain__trouble(&world) == DTRAIN_ERROR_PEER &&
          has(dtrain_last_error(), "rank 1 is gone"));
    dtrain__record_end(world.control, 1, DTRAIN__RETURNED, 5, "the disk is full");
    CHECK(dtrain__trouble(&world) == DTRAIN_ERROR_PEER);
    CHECK_MSG(has(dtrain_last_error(), "rank 1 returned 5; its last error: the disk is full"), "%s",
              dtrain_last_error());
    munmap(world.control, sizeof *world.control);
}

/* Rank 0 has nothing left to do and stays, so that rank 1 hears that rank 2 has died. */
static int rank_0_is_early(dtrain_world *world, void *user)
{
    const int rank = dtrain_world_rank(world);
    int32_t *gone = (int32_t *)user;
    RANKS_TRY(dtrain_barrier(dtrain_world_comm(world)));
    if (rank == 0) {
        ranks_count(gone);
        return 0;
    }
    ranks_await(gone, 1);
    if (rank == 2) raise(SIGKILL);
    while (dtrain_world_poll(world) == DTRAIN_OK) ranks_sleep_us(1000);
    CHECK_MSG(has(dtrain_last_error(), "rank 2"), "%s", dtrain_last_error());
    return 0;
}

static void test_rank_0_stays(void)
{
    crew c = make_crew(3, rank_0_is_early, ranks_shared(sizeof(int32_t)));
    crew_start_all(&c);
    crew_wait(&c);
    CHECK_MSG(c.ends[0].result == DTRAIN_ERROR_RANK_FAILED && has(c.ends[0].error, "rank 2"), "%s",
              c.ends[0].error);
    CHECK(c.ends[0].first_failed == 2 && c.ends[0].exit_code == 1);
    CHECK_MSG(c.ends[1].result == DTRAIN_OK, "%s", c.ends[1].error);
}

/* ---- ranks that share no memory ---- */

/* Worlds after the rendezvous, before the shared page: all goes through the sockets. */
typedef struct apart {
    int size;
    uint16_t port;
    int (*main)(dtrain_world *world, void *user);
    void *user;
} apart;

static void apart_rank(const apart *a, int rank)
{
    dtrain_world *world;
    dtrain__placement place;
    const dtrain_allocator allocator = dtrain__resolve_allocator(NULL);
    int code = 1;
    dtrain__thread_rank = rank;
    memset(&place, 0, sizeof place);
    snprintf(place.address, sizeof place.address, "localhost");
    place.port = a->port;
    place.local_rank = -1;
    world = (dtrain_world *)dtrain__alloc(&allocator, 1, sizeof *world, "a world");
    world->rank = rank;
    world->size = a->size;
    world->timeout_ns = world->join_ns = 20000000000u;
    world->allocator = allocator;
    world->log.level = DTRAIN_LOG_ERROR;
    world->log.rank = rank;
    world->mine = (uint32_t *)dtrain__map_bytes(NULL, dtrain__page_bytes(), -1);
    *world->mine = 1;
    if (CHECK_MSG(dtrain__meet(world, &place) == DTRAIN_OK, "%s", dtrain_last_error())) {
        code = a->main(world, a->user);
        dtrain__record_end(world->control, rank, code ? DTRAIN__RETURNED : DTRAIN__LEFT, code, "");
        dtrain__world_leave(world, 2000);
    }
    dtrain__world_destroy(world);
    exit(code);
}

static void apart_run(int size, int (*rank_main)(dtrain_world *, void *), void *user)
{
    apart a;
    pid_t pids[MOST_NAMES];
    int i, status;
    a.size = size;
    a.port = ports_next();
    a.main = rank_main;
    a.user = user;
    for (i = 0; i < size; i++)
        if ((pids[i] = fork()) == 0) apart_rank(&a, i);
    for (i = 0; i < size; i++)
        if (!CHECK_MSG(test_wait(pids[i], 20, &status), "rank %d does not end", i))
            kill(pids[i], SIGKILL);
}

static void send_frame(int socket, dtrain__frame_kind kind, int rank, const void *data,
                       size_t bytes)
{
    char out[DTRAIN__FRAME_ROOM];
    dtrain__frame frame;
    frame.kind = (uint32_t)kind;
    frame.rank = rank;
    frame.bytes = (uint32_t)bytes;
    memcpy(out, &frame, sizeof frame);
    memcpy(out + sizeof frame, data, bytes);
    (void)!send(socket, out, sizeof frame + bytes, MSG_NOSIGNAL);
}

static int rank_exchanges_apart(dtrain_world *world, void *user)
{
    static const size_t sizes[] = {0, 1, 8, 100, DTRAIN_WORLD_ALL_GATHER_BYTES};
    static unsigned char mine[DTRAIN_WORLD_ALL_GATHER_BYTES],
        all[8 * DTRAIN_WORLD_ALL_GATHER_BYTES];
    const int rank = dtrain_world_rank(world), size = dtrain_world_size(world);
    uint64_t seed = (uint64_t)rank;
    int round, i, wrong = 0;
    size_t k;
    (void)user;
    CHECK(dtrain__is_remote(world));
    for (round = 0; round < 200; round++) {
        const size_t bytes = sizes[round % 5];
        for (k = 0; k < bytes; k++)
            mine[k] = (unsigned char)ranks_mix((uint64_t)(round * 64 + rank) << 16 | k);
        if (ranks_random(&seed, 8) == 0) ranks_sleep_us(2000);
        RANKS_TRY(dtrain_world_all_gather(world, mine, bytes, all));
        for (i = 0; i < size; i++)
            for (k = 0; k < bytes; k++)
                wrong += all[(size_t)i * bytes + k] !=
                         (unsigned char)ranks_mix((uint64_t)(round * 64 + i) << 16 | k);
    }
    CHECK_MSG(wrong == 0, "rank %d read %d wrong bytes", rank, wrong);
    return 0;
}

static void test_apart(void)
{
    apart_run(2, rank_exchanges_apart, NULL);
    apart_run(3, rank_exchanges_apart, NULL);
    apart_run(8, rank_exchanges_apart, NULL);
}

static void test_deaths_apart(void)
{
    int how, victim, i;
    for (how = 0; how < 5; how++)
        for (victim = 0; victim < 3; victim += 2) {
            death *d = (death *)ranks_shared(sizeof *d);
            char name[16];
            d->how = how;
            d->victim = victim;
            d->by_exchange = 1;
            apart_run(4, rank_lives_or_dies, d);
            snprintf(name, sizeof name, "rank %d", victim);
            for (i = 0; i < 4; i++) {
                if (i == victim) continue;
                CHECK_MSG(d->result[i] == DTRAIN_ERROR_PEER && has(d->error[i], name) &&
                              (how != 4 || has(d->error[i], "the card fell out")),
                          "victim %d, how %d: rank %d: %s", victim, how, i, d->error[i]);
                CHECK_MSG(d->heard[i] - d->at[victim] < RANKS_SOON,
                          "rank %d heard of it %.2f s later", i, d->heard[i] - d->at[victim]);
            }
        }
}

/* A rank that knows the key and then goes mad: it is cut off, the others go on to say so. */
static int rank_goes_mad(dtrain_world *world, void *user)
{
    const int rank = dtrain_world_rank(world), size = dtrain_world_size(world);
    uint64_t seed = *(uint64_t *)user;
    int32_t mine = rank, all[8];
    dtrain_result result = DTRAIN_OK;
    int i;
    RANKS_TRY(dtrain_world_all_gather(world, &mine, sizeof mine, all));
    if (rank != size - 1) {
        while (result == DTRAIN_OK)
            result = dtrain_world_all_gather(world, &mine, sizeof mine, all);
        CHECK_MSG(result == DTRAIN_ERROR_PEER || result == DTRAIN_ERROR_MISMATCH, "%s",
                  dtrain_last_error());
        return 0;
    }
    for (i = 0; i < 200; i++) {
        dtrain__frame frame;
        char data[DTRAIN_WORLD_ALL_GATHER_BYTES];
        size_t k;
        for (k = 0; k < sizeof data; k++) data[k] = (char)ranks_random(&seed, 256);
        memcpy(&frame, data, sizeof frame);
        if (ranks_random(&seed, 10)) frame.kind = (uint32_t)ranks_random(&seed, 5);
        if (ranks_random(&seed, 4)) frame.bytes = (uint32_t)ranks_random(&seed, sizeof data + 1);
        if (ranks_random(&seed, 4)) frame.rank = (int32_t)ranks_random(&seed, 5) - 1;
        if (ranks_random(&seed, 2)) {
            frame.bytes =
                (uint32_t)(frame.kind == DTRAIN__FRAME_EXIT ? sizeof(dtrain__exit_record)
                                                            : sizeof(dtrain__abort_record));
            data[1] = data[2] = data[3] = 0; /* how a rank ended: 0 to 255 */
        }
        if (send(world->link->ends[0].socket, &frame, sizeof frame, MSG_NOSIGNAL) < 0) break;
        (void)!send(world->link->ends[0].socket, data, frame.bytes % (sizeof data + 1),
                    MSG_NOSIGNAL);
    }
    return 1;
}

static void test_mad_rank(void)
{
    uint64_t seed;
    for (seed = 1; seed <= 12; seed++) apart_run(3, rank_goes_mad, &seed);
}

/* A rank that speaks for another one is cut off; the other one is believed to be well. */
typedef struct lie {
    dtrain__frame_kind kind;
    int32_t heard; /* by how many */
} lie;

static int rank_lies(dtrain_world *world, void *user)
{
    const int rank = dtrain_world_rank(world);
    int32_t mine = rank, all[8];
    dtrain_result result = DTRAIN_OK;
    lie *l = (lie *)user;
    RANKS_TRY(dtrain_world_all_gather(world, &mine, sizeof mine, all));
    if (rank == 2) {
        const dtrain__frame_kind kind = l->kind;
        dtrain__exit_record end;
        dtrain__abort_record stop;
        const bool ends = kind == DTRAIN__FRAME_EXIT;
        memset(&end, 0, sizeof end);
        memset(&stop, 0, sizeof stop);
        end.how = DTRAIN__RETURNED;
        send_frame(world->link->ends[0].socket, kind, 1, ends ? (void *)&end : (void *)&stop,
                   kind == DTRAIN__FRAME_GATHER ? sizeof mine
                   : ends                       ? sizeof end
                                                : sizeof stop);
        ranks_sleep_us(200000);
        return 0;
    }
    while (result == DTRAIN_OK) result = dtrain_world_all_gather(world, &mine, sizeof mine, all);
    CHECK_MSG(result == DTRAIN_ERROR_PEER && has(dtrain_last_error(), "rank 2 is gone"), "%s",
              dtrain_last_error());
    ranks_count(&l->heard);
    return 0;
}

static void test_lies(void)
{
    lie *l = (lie *)ranks_shared(sizeof *l);
    for (l->kind = DTRAIN__FRAME_GATHER; l->kind <= DTRAIN__FRAME_ABORT;
         l->kind = (dtrain__frame_kind)(l->kind + 1)) {
        l->heard = 0;
        apart_run(3, rank_lies, l);
        CHECK_MSG(l->heard == 2, "%d ranks heard of it", l->heard);
    }
}

/* A rank that sends every record in time and reads none: rank 0 cannot tell it the others' records,
 * and says so at its deadline. */
typedef struct deaf {
    int32_t rounds, over; /* of rank 0, in shared memory */
} deaf;

static int rank_is_deaf(dtrain_world *world, void *user)
{
    static unsigned char mine[DTRAIN_WORLD_ALL_GATHER_BYTES],
        all[3 * DTRAIN_WORLD_ALL_GATHER_BYTES];
    deaf *d = (deaf *)user;
    const int rank = dtrain_world_rank(world), little = 4096;
    dtrain_result result = DTRAIN_OK;
    int32_t round;
    if (rank == 2) {
        dtrain__connection *end = &world->link->ends[0];
        setsockopt(end->socket, SOL_SOCKET, SO_RCVBUF, &little, sizeof little);
        for (round = 1; !dtrain__load(&d->over); round++) {
            send_frame(end->socket, DTRAIN__FRAME_GATHER, 2, mine, sizeof mine);
            while (dtrain__load(&d->rounds) < round && !dtrain__load(&d->over)) sched_yield();
        }
        return 0;
    }
    if (rank == 0) world->timeout_ns = RANKS_SHORT_MS * UINT64_C(1000000);
    for (round = 1; result == DTRAIN_OK && round < 20000; round++) {
        result = dtrain_world_all_gather(world, mine, sizeof mine, all);
        if (rank == 0) dtrain__store(&d->rounds, round);
    }
    dtrain__store(&d->over, 1);
    CHECK_MSG(result == (rank ? DTRAIN_ERROR_PEER : DTRAIN_ERROR_TIMEOUT) &&
                  has(dtrain_last_error(), "for rank 2, which does not read"),
              "round %d: %s", round, dtrain_last_error());
    return 0;
}

static void test_deaf_rank(void) { apart_run(3, rank_is_deaf, ranks_shared(sizeof(deaf))); }

/* A rank stops between two steps that lead to a shared page: every other one blames it. */
typedef struct silence {
    int victim, step; /* 0: before the clocks are compared, 1: behind that, 2: its record is sent */
    int32_t over;     /* in shared memory */
} silence;

/* Whether a sentence blames a rank: who reports has a number, too. */
static bool blames(const char *text, int rank)
{
    char waited[32], missing[32];
    snprintf(waited, sizeof waited, " s for rank %d", rank);
    snprintf(missing, sizeof missing, "not come: %d", rank);
    return has(text, waited) || has(text, missing) ||
           (rank == 0 && has(text, "rank 0 was not found"));
}

static int rank_falls_silent(dtrain_world *world, void *user)
{
    silence *s = (silence *)user;
    const int rank = dtrain_world_rank(world), size = dtrain_world_size(world);
    int32_t mine = rank, all[MOST_NAMES];
    dtrain_result result = DTRAIN_OK;
    world->timeout_ns = RANKS_SHORT_MS * UINT64_C(1000000);
    if (rank != s->victim || s->step > 0) result = dtrain__clocks_compare(world);
    if (rank != s->victim) {
        if (s->step)
            ranks_sleep_us(100000); /* rank 0 sends on what comes while it compares clocks */
        if (result == DTRAIN_OK) result = dtrain_world_all_gather(world, &mine, sizeof mine, all);
        CHECK_MSG(result != DTRAIN_OK && blames(dtrain_last_error(), s->victim),
                  "rank %d is silent in step %d; rank %d: %s", s->victim, s->step, rank,
                  result ? dtrain_last_error() : "it went well");
        ranks_count(&s->over);
        return 0;
    }
    if (s->step == 2) dtrain__link_send(world, DTRAIN__FRAME_GATHER, rank, &mine, sizeof mine);
    return !ranks_await(&s->over, size - 1);
}

static void silent_rank(int number)
{
    silence *s = (silence *)ranks_shared(sizeof *s);
    s->victim = number % 3;
    s->step = number / 3;
    apart_run(3, rank_falls_silent, s);
}

/* Each victim in the first two steps, and rank 0 in the third. */
static void test_silence(void) { test_cases(7, silent_rank); }

/* The same by SIGSTOP at any moment of launch and run: the others end, and blame the rank that was stopped. */
static int rank_keeps_meeting(dtrain_world *world, void *user)
{
    const double end = test_seconds() + 60; /* long after one of them has been stopped */
    int64_t more = 1;
    dtrain_result result = DTRAIN_OK;
    (void)user;
    while (result == DTRAIN_OK && more) {
        more = test_seconds() < end; /* on rank 0, or they would not stop together */
        result = dtrain_broadcast(dtrain_world_comm(world), &more, 1, DTRAIN_DTYPE_I64, 0, NULL);
    }
    return result != DTRAIN_OK;
}

static void stopped_rank(int round)
{
    crew c = make_crew(3, rank_keeps_meeting, NULL);
    uint64_t seed = 16 + (uint64_t)round;
    const int victim = round % 3;
    const long us = (long)ranks_random(&seed, 40000);
    c.timeout_ms = RANKS_SHORT_MS;
    crew_start_all(&c);
    ranks_sleep_us(us);
    kill(c.pids[victim], SIGSTOP);
    for (int i = 0; i < 3; i++) {
        const outcome *end = &c.ends[i];
        if (i == victim) continue;
        CHECK_MSG(ranks_await(&c.ends[i].done, 1), "rank %d does not end", i);
        CHECK_MSG(end->result != DTRAIN_OK && blames(end->error, victim),
                  "rank %d was stopped after %ld us; rank %d: %s", victim, us, i, end->error);
    }
    kill(c.pids[victim], SIGKILL);
    crew_wait(&c);
}

static int rounds_before;
static void next_stopped_rank(int number) { stopped_rank(rounds_before + number); }

static void test_stopped_at_any_moment(void)
{
    enum { AT_ONCE = 5 };
    const int rounds = (int)test_draws(10, 20, 1000);
    for (; rounds_before < rounds; rounds_before += AT_ONCE) test_cases(AT_ONCE, next_stopped_rank);
}

/* ---- several hosts ---- */

static void become_a_host(int rank)
{
    char name[32];
    snprintf(name, sizeof name, "dtrain-test-%d", rank / 2);
    if (unshare(CLONE_NEWUTS) != 0 || sethostname(name, strlen(name)) != 0) exit(77);
}

static bool can_be_a_host(void)
{
    int status = 1;
    const pid_t pid = fork();
    if (pid == 0) become_a_host(0), _exit(0);
    return waitpid(pid, &status, 0) == pid && status == 0;
}

static void test_several_hosts(void)
{
    crew c = make_crew(4, rank_never_runs, NULL);
    c.before = become_a_host;
    crew_start_all(&c);
    crew_wait(&c);
    crew_check(&c, 0, 4, DTRAIN_ERROR_UNSUPPORTED, "4 ranks on 2 hosts", "NCCL");
}

/* A communicator backend that could cross hosts; here it only has to be made and ended. */
static dtrain_result bridge_create(dtrain_world *world, dtrain_comm **out);
static dtrain_result bridge_destroy(dtrain_comm *comm)
{
    free(comm);
    return DTRAIN_OK;
}
static dtrain_comm_ops bridge_ops;
static dtrain_result bridge_create(dtrain_world *world, dtrain_comm **out)
{
    int32_t mine = 3, all[MOST_NAMES];
    const dtrain_result result = dtrain_world_all_gather(world, &mine, sizeof mine, all);
    if (result != DTRAIN_OK) return result;
    *out = (dtrain_comm *)calloc(1, sizeof **out);
    (*out)->ops = &bridge_ops;
    (*out)->world = world;
    (*out)->rank = dtrain_world_rank(world);
    (*out)->size = dtrain_world_size(world);
    return DTRAIN_OK;
}

static int rank_has_hosts(dtrain_world *world, void *user)
{
    const int rank = dtrain_world_rank(world);
    int32_t mine = rank * rank, all[MOST_NAMES];
    dtrain_world_info info;
    int round, i;
    (void)user;
    dtrain_world_query(world, &info);
    CHECK(info.node == rank / 2 && info.node_count == 2);
    CHECK(info.local_rank == rank % 2 && info.local_size == 2);
    for (round = 0; round < 50; round++) {
        RANKS_TRY(dtrain_world_all_gather(world, &mine, sizeof mine, all));
        for (i = 0; i < 4; i++) CHECK(all[i] == i * i);
    }
    if (rank == 3) return 6;
    while (dtrain_world_poll(world) == DTRAIN_OK) ranks_sleep_us(1000);
    CHECK_MSG(has(dtrain_last_error(), "rank 3 returned 6"), "%s", dtrain_last_error());
    return 0;
}

static void test_across_hosts(void)
{
    crew c = make_crew(4, rank_has_hosts, NULL);
    int i;
    bridge_ops.abi = DTRAIN_COMM_ABI;
    bridge_ops.name = "bridge";
    bridge_ops.create = bridge_create;
    bridge_ops.destroy = bridge_destroy;
    c.before = become_a_host;
    c.comm_ops = &bridge_ops;
    crew_start_all(&c);
    crew_wait(&c);
    for (i = 1; i < 3; i++)
        CHECK_MSG(c.ends[i].result == DTRAIN_OK, "rank %d: %s", i, c.ends[i].error);
    CHECK_MSG(has(c.ends[0].error, "rank 3 returned 6") && c.ends[0].exit_code == 6, "rank 0: %s",
              c.ends[0].error);
    CHECK(c.ends[3].exit_code == 6);
}

/* ---- the shared page ---- */

/* Something is where rank 0 puts the region. */
static void take_the_place(int rank)
{
    int attempt;
    if (rank != 1) return;
    for (attempt = 0; attempt < 2; attempt++)
        (void)!mmap((char *)dtrain__places[attempt] + (1 << 20), 4096, PROT_READ,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
}

static void test_region_elsewhere(void)
{
    static shape three = {3, 3};
    crew c = make_crew(3, rank_uses_world, &three);
    int i;
    c.before = take_the_place;
    crew_start_all(&c);
    crew_wait(&c);
    for (i = 0; i < 3; i++)
        CHECK_MSG(c.ends[i].result == DTRAIN_OK, "rank %d: %s", i, c.ends[i].error);
}

/* What is offered must be what is found. */
static void test_region_checked(void)
{
    dtrain__region region, other;
    dtrain__offer offer, wrong;
    struct stat status;
    void *place;
    memset(&offer, 0, sizeof offer);
    memset(&region, 0, sizeof region);
    offer.file = memfd_create("dtrain", MFD_CLOEXEC);
    if (!CHECK(offer.file >= 0 && ftruncate(offer.file, 1 << 20) == 0)) return;
    CHECK(fstat(offer.file, &status) == 0);
    place = mmap(NULL, 1 << 20, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    munmap(place, 1 << 20);
    offer.pid = (int32_t)getpid();
    offer.inode = (uint64_t)status.st_ino;
    offer.bytes = 1 << 20;
    offer.address = (uint64_t)(uintptr_t)place;
    wrong = offer;
    wrong.inode++;
    CHECK(dtrain__accept_region(&wrong, &other) != DTRAIN_OK &&
          has(dtrain_last_error(), "not the file"));
    wrong = offer;
    wrong.bytes += 4096;
    CHECK(dtrain__accept_region(&wrong, &other) != DTRAIN_OK &&
          has(dtrain_last_error(), "not the file"));
    wrong = offer;
    wrong.file += 100;
    CHECK(dtrain__accept_region(&wrong, &other) != DTRAIN_OK &&
          has(dtrain_last_error(), "No such file"));
    if (!CHECK_MSG(dtrain__accept_region(&offer, &region) == DTRAIN_OK, "%s", dtrain_last_error()))
        return;
    CHECK((void *)region.control == place && region.bytes == 1 << 20);
    region.control->promised = 77;
    CHECK(dtrain__accept_region(&offer, &other) != DTRAIN_OK &&
          has(dtrain_last_error(), "not free"));
    CHECK(region.control->promised == 77);
    munmap(region.control, region.bytes);
    close(offer.file);
}

/* 100 MiB more than it has: a linked BLAS has much. */
static void allow_little(int rank)
{
    struct rlimit limit;
    const uint64_t kib = dtrain__read_number("/proc/self/status", "VmSize:");
    limit.rlim_cur = limit.rlim_max = (rlim_t)(kib * 1024 + (100u << 20));
    if (rank == 1) setrlimit(RLIMIT_AS, &limit);
}

static void test_region_impossible(void)
{
    crew c = make_crew(2, rank_never_runs, NULL);
    c.before = allow_little;
    crew_start_all(&c);
    crew_wait(&c);
    crew_check(&c, 0, 2, DTRAIN_ERROR_UNSUPPORTED, "rank 1", "not free");
}

/* Too few files may be open for all who could come: that is said, and nobody is taken for absent. */
static void allow_few_files(int rank)
{
    struct rlimit limit;
    limit.rlim_cur = limit.rlim_max = 40;
    if (rank == 0) setrlimit(RLIMIT_NOFILE, &limit);
}

static void test_few_files(void)
{
    crew c = make_crew(2, rank_never_runs, NULL);
    c.before = allow_few_files;
    c.timeout_ms = 2000;
    crew_start_all(&c);
    crew_wait(&c);
    crew_check(&c, 0, 1, DTRAIN_ERROR_SYSTEM, "may open 40 files", "ulimit -n");
    crew_check(&c, 1, 2, DTRAIN_ERROR_TIMEOUT, "rank 0 was not found", "");
}

/* A host that has closed its standard streams: no socket takes their place. */
static void close_streams(int rank)
{
    (void)rank;
    for (int fd = 0; fd < 3; fd++) close(fd);
}

static int rank_has_no_streams(dtrain_world *world, void *user)
{
    (void)user;
    for (int fd = 0; fd < 3; fd++) {
        int type;
        socklen_t length = sizeof type;
        CHECK(getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &length) != 0);
    }
    return dtrain_barrier(dtrain_world_comm(world)) == DTRAIN_OK ? 0 : 1;
}

static void test_no_streams(void)
{
    crew c = make_crew(3, rank_has_no_streams, NULL);
    int i;
    c.before = close_streams;
    crew_start_all(&c);
    crew_wait(&c);
    for (i = 0; i < 3; i++)
        CHECK_MSG(c.ends[i].done && c.ends[i].result == DTRAIN_OK, "rank %d: %s", i,
                  c.ends[i].error);
}

/* ---- dtrain_launch around it ---- */

static int rank_tells_threads(dtrain_world *world, void *user)
{
    ((uint32_t *)user)[dtrain_world_rank(world)] = world->threads;
    return 0;
}

static void start_default_threads(int rank, uint16_t port, uint32_t *threads)
{
    char words[128];
    if (fork() != 0) return;
    snprintf(words, sizeof words,
             "RANK=%d WORLD_SIZE=2 LOCAL_RANK=%d LOCAL_WORLD_SIZE=2 DTRAIN_PORT=%u", rank, rank,
             port);
    set_words(words);
    exit(dtrain_launch(NULL, rank_tells_threads, threads, NULL) == DTRAIN_OK ? 0 : 1);
}

static void test_default_threads(void)
{
    uint32_t *threads = (uint32_t *)ranks_shared(64), share = dtrain__cores() / 2;
    const uint16_t port = ports_next();
    int i, status = 1;
    start_default_threads(0, port, threads);
    start_default_threads(1, port, threads);
    for (i = 0; i < 2; i++) CHECK(wait(&status) > 0 && status == 0);
    for (i = 0; i < 2; i++) CHECK_MSG(threads[i] == (share ? share : 1), "%u threads", threads[i]);
}

/* Memory that fails at each call, on rank 0 and on another: an error on both, and everything given back. */
static int rank_tries(dtrain_world *world, void *user)
{
    (void)user;
    return dtrain_barrier(dtrain_world_comm(world)) == DTRAIN_OK ? 0 : 1;
}

/* A rank with `memory`, or with malloc. */
static pid_t start_poor(int rank, counted_memory *memory, uint16_t port)
{
    const pid_t pid = fork();
    dtrain_launch_desc desc = ranks_desc(2, DTRAIN_LAUNCH_PROCESSES);
    char words[128];
    dtrain_result result;
    if (pid) return pid;
    desc.timeout_ms = 1500;
    desc.grace_ms = 300;
    desc.options.log_level = DTRAIN_LOG_ERROR;
    if (memory) desc.options.allocator = counted_allocator(memory);
    snprintf(words, sizeof words, "RANK=%d WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 DTRAIN_PORT=%u", rank,
             port);
    set_words(words);
    result = dtrain_launch(&desc, rank_tries, NULL, NULL);
    if (result) CHECK(dtrain_last_error()[0]);
    exit(result ? 1 : 0);
}

/* Eight runs beside one another: most of the time they wait for a deadline. */
static void test_no_memory(void)
{
    enum { AT_ONCE = 8, MOST_CALLS = 60 };
    counted_memory *memory = (counted_memory *)ranks_shared(AT_ONCE * sizeof *memory);
    int rank, first, i, r, failures = 0;
    for (rank = 0; rank < 2; rank++) {
        bool enough = false;
        for (first = 1; first < MOST_CALLS && !enough; first += AT_ONCE) {
            pid_t pids[AT_ONCE][2];
            for (i = 0; i < AT_ONCE; i++) {
                const uint16_t port = ports_next();
                memset(&memory[i], 0, sizeof memory[i]);
                memory[i].fail_at = first + i;
                for (r = 0; r < 2; r++)
                    pids[i][r] = start_poor(r, r == rank ? &memory[i] : NULL, port);
            }
            for (i = 0; i < AT_ONCE; i++) {
                int status[2] = {1, 1};
                for (r = 0; r < 2; r++) CHECK(test_wait(pids[i][r], 20, &status[r]));
                CHECK_MSG(memory[i].live == 0 && memory[i].wrong == 0,
                          "call %d fails on rank %d: %ld blocks are left", first + i, rank,
                          memory[i].live);
                CHECK_MSG((status[0] == 0) == (status[1] == 0),
                          "call %d fails on rank %d: the ranks disagree", first + i, rank);
                failures += status[rank] != 0;
                enough = enough || (status[0] == 0 && status[1] == 0);
            }
        }
        CHECK_MSG(enough, "rank %d never has enough", rank);
    }
    CHECK_MSG(failures > 10, "only %d failures", failures);
}

static void test_desc_against_launcher(void)
{
    dtrain_launch_desc desc = ranks_desc(3, DTRAIN_LAUNCH_PROCESSES);
    dtrain_launch_info info;
    set_words("RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1");
    CHECK(dtrain_launch(&desc, rank_never_runs, NULL, &info) == DTRAIN_ERROR_ARGUMENT);
    CHECK_MSG(has(dtrain_last_error(), "rank_count is 3") && has(dtrain_last_error(), "2 ranks"),
              "%s", dtrain_last_error());
    CHECK(info.exit_code != 0);
    desc = ranks_desc(2, DTRAIN_LAUNCH_THREADS);
    CHECK(dtrain_launch(&desc, rank_never_runs, NULL, NULL) == DTRAIN_ERROR_UNSUPPORTED);
    CHECK_MSG(has(dtrain_last_error(), "THREADS") && has(dtrain_last_error(), "torchrun"), "%s",
              dtrain_last_error());
}

/* ---- what dtrain-run tells a launch, and hears ---- */

static int rank_says_how_far(dtrain_world *world, void *user)
{
    dtrain_world_info info;
    (void)user;
    dtrain_world_query(world, &info);
    CHECK_MSG(info.restart_count == 7, "%u", info.restart_count);
    dtrain_world_progress(world, 40 + (uint64_t)info.rank);
    dtrain_world_progress(world, 3);
    return 0;
}

/* Ranks of dtrain-run write the highest step into its file; one without the magic is not touched,
 * nor one that is too short. */
static void test_progress_file(void)
{
    for (int kind = 0; kind < 3; kind++) {
        char words[300], path[] = "/tmp/dtrain_progress_XXXXXX", whole[24] = "dtrain progress";
        uint64_t progress = 0;
        const int port = ports_next(), file = mkstemp(path), bytes = kind == 2 ? 20 : 24;
        if (kind == 1) whole[3] = 'X';
        CHECK(file >= 0 && write(file, whole, (size_t)bytes) == bytes);
        for (int rank = 0; rank < 2; rank++) {
            snprintf(words, sizeof words,
                     "DTRAIN_RANK=%d DTRAIN_WORLD_SIZE=2 DTRAIN_LOCAL_SIZE=2 DTRAIN_PORT=%d "
                     "DTRAIN_RESTART_COUNT=7 TORCHELASTIC_RESTART_COUNT=1 DTRAIN_PROGRESS_FILE=%s",
                     rank, port, path);
            if (rank == 0) {
                fflush(NULL);
                const pid_t pid = fork();
                if (pid == 0) {
                    set_words(words);
                    _exit(dtrain_launch(NULL, rank_says_how_far, NULL, NULL) != DTRAIN_OK);
                }
                continue;
            }
            set_words(words);
            const dtrain_result result = dtrain_launch(NULL, rank_says_how_far, NULL, NULL);
            CHECK_MSG(result == DTRAIN_OK, "%s", dtrain_last_error());
        }
        int status = -1;
        CHECK(wait(&status) > 0 && status == 0);
        (void)!pread(file, &progress, sizeof progress, 16);
        if (kind < 2)
            CHECK_MSG(progress == (kind ? 0u : 42u), "%llu", (unsigned long long)progress);
        CHECK(lseek(file, 0, SEEK_END) == bytes);
        close(file);
        unlink(path);
    }
}

static int rank_fails_loudly(dtrain_world *world, void *user)
{
    (void)user;
    if (dtrain_world_rank(world) == 0) return dtrain_barrier(dtrain_world_comm(world)) ? 3 : 0;
    (void)dtrain_fail(DTRAIN_ERROR_DATA, "file \"a\\b\"\n\x01 is bad");
    return 4;
}

static void test_error_file(void)
{
    static const char start[] = "{\"message\": {\"message\":\"";
    char path[64], text[2000];
    crew c = make_crew(2, rank_fails_loudly, NULL);
    char words[128];
    ssize_t got;
    int fd;
    snprintf(path, sizeof path, "/tmp/dtrain_error_%d.json", (int)getpid());
    snprintf(words, sizeof words, "TORCHELASTIC_ERROR_FILE=%s", path);
    c.words[1] = words;
    crew_start_all(&c);
    crew_wait(&c);
    CHECK(c.ends[1].exit_code == 4 && c.ends[0].exit_code == 3);
    fd = open(path, O_RDONLY);
    CHECK(fd >= 0);
    got = read(fd, text, sizeof text - 1);
    text[got > 0 ? got : 0] = 0;
    CHECK_MSG(strncmp(text, start, sizeof start - 1) == 0 && has(text, "rank 1 returned 4"), "%s",
              text);
    CHECK_MSG(has(text, "file \\\"a\\\\b\\\"?? is bad"), "%s", text);
    CHECK_MSG(has(text, "\", \"extraInfo\": {\"timestamp\": \"") && has(text, "\"}}}\n"), "%s",
              text);
    close(fd);
    unlink(path);
    c.words[1] = "TORCHELASTIC_ERROR_FILE=/nonexistent/x"; /* nothing more can be done */
    crew_start_all(&c);
    crew_wait(&c);
    CHECK(c.ends[1].exit_code == 4);
}

/* ---- one process a node, PET_ ---- */

static void test_nodes(void)
{
    static shape shapes[] = {{4, 2}, {3, 3}};
    crew c = make_crew(4, rank_uses_world, &shapes[0]);
    dtrain_launch_desc desc = ranks_desc(0, DTRAIN_LAUNCH_PROCESSES);
    int i;
    c.words[0] = "RANK= WORLD_SIZE= MASTER_ADDR= PET_NNODES=2 PET_NODE_RANK=0 PET_NPROC_PER_NODE=2 "
                 "PET_MASTER_ADDR=127.0.0.1";
    c.words[1] = "RANK= WORLD_SIZE= MASTER_ADDR= PET_NNODES=2 PET_NODE_RANK=1 PET_NPROC_PER_NODE=2 "
                 "PET_MASTER_ADDR=127.0.0.1";
    crew_start(&c, 0, 0);
    crew_start(&c, 1, 0);
    crew_wait(&c);
    for (i = 0; i < 2; i++)
        CHECK_MSG(c.ends[i].done && c.ends[i].result == DTRAIN_OK, "node %d: %s", i,
                  c.ends[i].error);
    set_words("PET_NNODES=1 PET_NODE_RANK=0 PET_NPROC_PER_NODE=3"); /* no network at all */
    CHECK_MSG(dtrain_launch(&desc, rank_uses_world, &shapes[1], NULL) == DTRAIN_OK, "%s",
              dtrain_last_error());
}

static void test_deaths_on_nodes(void)
{
    int victim;
    for (victim = 0; victim < 4; victim++) {
        death *d = (death *)ranks_shared(sizeof *d);
        crew c = make_crew(4, rank_lives_or_dies, d);
        char name[16];
        int i;
        d->victim = victim;
        c.words[0] =
            "RANK= WORLD_SIZE= MASTER_ADDR= PET_NNODES=2 PET_NODE_RANK=0 PET_NPROC_PER_NODE=2 "
            "PET_MASTER_ADDR=127.0.0.1";
        c.words[1] =
            "RANK= WORLD_SIZE= MASTER_ADDR= PET_NNODES=2 PET_NODE_RANK=1 PET_NPROC_PER_NODE=2 "
            "PET_MASTER_ADDR=127.0.0.1";
        crew_start(&c, 0, 0);
        crew_start(&c, 1, 0);
        crew_wait(&c);
        snprintf(name, sizeof name, "rank %d", victim);
        for (i = 0; i < 4; i++)
            if (i != victim)
                CHECK_MSG(d->result[i] == DTRAIN_ERROR_PEER && has(d->error[i], name),
                          "rank %d: %s", i, d->error[i]);
        for (i = 0; i < 2; i++)
            CHECK_MSG(c.ends[i].result == DTRAIN_ERROR_RANK_FAILED, "node %d: %s", i,
                      c.ends[i].error);
        CHECK_MSG(has(c.ends[victim / 2].error, name), "the victim's node: %s",
                  c.ends[victim / 2].error);
    }
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    RUN(test_recognised);
    RUN(test_refused);
    RUN(test_run_keys);
    RUN(test_host_lists);
    RUN(test_siphash);
    RUN(test_join);
    RUN(test_same_bits_as_forked);
    RUN(test_other_sizes);
    RUN(test_same_rank_twice);
    RUN_BESIDE(test_rank_0_twice);
    RUN_BESIDE(test_other_key);
    RUN_BESIDE(test_keys);
    RUN_BESIDE(test_other_key_goes_away);
    RUN_BESIDE(test_missing_rank);
    RUN_BESIDE(test_rank_leaves_early);
    RUN_BESIDE(test_late_rank_0);
    RUN(test_one_port_again);
    RUN(test_addresses);
    RUN_BESIDE(test_no_such_host);
    RUN_BESIDE(test_port_in_use);
    RUN(test_strangers);
    RUN(test_silent_strangers);
    RUN(test_false_rank_1);
    RUN_BESIDE(test_false_rank_0);
    RUN_BESIDE(test_false_welcome);
    RUN(test_deaths);
    RUN(test_exit_records);
    RUN(test_rank_0_stays);
    RUN(test_apart);
    RUN(test_deaths_apart);
    RUN(test_mad_rank);
    RUN(test_lies);
    RUN_BESIDE(test_deaf_rank);
    RUN_BESIDE(test_silence);
    RUN_BESIDE(test_stopped_at_any_moment);
    if (can_be_a_host()) {
        RUN(test_several_hosts);
        RUN(test_across_hosts);
    } else {
        SKIP(test_several_hosts, "host names cannot be changed here (needs root)");
        SKIP(test_across_hosts, "host names cannot be changed here (needs root)");
    }
    RUN(test_region_checked);
    if (RANKS_SANITIZED) {
        SKIP(test_region_elsewhere, "sanitizers have address space of their own");
        SKIP(test_region_impossible, "sanitizers have address space of their own");
    } else {
        RUN(test_region_elsewhere);
        RUN(test_region_impossible);
    }
    RUN_BESIDE(test_few_files);
    RUN(test_no_streams);
    RUN(test_default_threads);
    RUN_BESIDE(test_no_memory);
    RUN(test_desc_against_launcher);
    RUN(test_progress_file);
    RUN(test_error_file);
    RUN(test_nodes);
    RUN(test_deaths_on_nodes);
    return test_summary();
}
