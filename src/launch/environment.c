/* The launch environment
 *
 * Each launcher tells a process its rank in different environment variables, which launch.h lists.
 * A launcher's variables form a family, a row of the table below. The first complete family wins.
 * Families that need more than a rank and a size have a reader. The result is a pure function of
 * the environment. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/result.h"
#include "world/link_internal.h"
#include "world/world.h"
#include "launch/launch_internal.h"

#define DTRAIN__DEFAULT_PORT 29500
#define DTRAIN__PORT_OFFSET 100 /* torchrun's own store listens on MASTER_PORT itself */

/* Columns with the same meaning in every family. Variables of only one reader have no column. */
enum {
    DTRAIN__ADDRESS, /* of rank 0's host; families can share address and port */
    DTRAIN__PORT,
    DTRAIN__RANK,
    DTRAIN__SIZE,
    DTRAIN__LOCAL_RANK,
    DTRAIN__LOCAL_SIZE,
    DTRAIN__RUN,      /* name of the run ... */
    DTRAIN__RUN_PART, /* ... and its second part */
    DTRAIN__VARIABLES
};
enum { DTRAIN__FAMILIES = 7 }; /* rows of the table */

/* The variables of one kind of launcher. */
typedef struct dtrain__family {
    const char *name;
    /* Reads rank and size into *out, which is zeroed; a size of 0 means that the family is not
     * there. NULL: rank and size are plain numbers. */
    dtrain_result (*read)(dtrain__lookup_fn env, dtrain__placement *out);
    const char *variables[DTRAIN__VARIABLES]; /* NULL if the family has none */
} dtrain__family;

/* Look up a variable; NULL if it is unset or empty. */
DTRAIN__PRIVATE const char *dtrain__env_text(dtrain__lookup_fn env, const char *name)
{
    const char *text = name ? env(name) : NULL;
    return text && text[0] ? text : NULL;
}

/* Read a number of at most nine digits, without sign or blank; -1 if it is not set. */
static dtrain_result dtrain__env_number(dtrain__lookup_fn env, const char *name, int *value)
{
    const char *text = dtrain__env_text(env, name);
    *value = -1;
    if (!text) return DTRAIN_OK;
    const size_t digits = strspn(text, "0123456789");
    if (text[digits] || digits > 9)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_launch: %s=\"%.60s\" in the environment is not a plain decimal "
                           "number of at most nine digits; unset it or set it right",
                           name, text);
    *value = (int)strtol(text, NULL, 10);
    return DTRAIN_OK;
}

/* Refuse a contradiction, such as "RANK=5" beside "WORLD_SIZE=1". */
static dtrain_result dtrain__env_conflict(const char *a, int a_value, const char *b, int b_value,
                                          const char *rule)
{
    return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                       "dtrain_launch: %s=%d with %s=%d in the environment makes no sense: %s", a,
                       a_value, b, b_value, rule);
}

/* Read a rank and a size; a size of 0 means that they are not set. One without the other is an
 * error, except that a size without a rank can belong to an Indexed Job (size_alone). */
static dtrain_result dtrain__read_pair(dtrain__lookup_fn env, const char *rank_name,
                                       const char *size_name, bool size_alone,
                                       dtrain__placement *out)
{
    int rank, size;
    out->rank = out->size = 0;
    DTRAIN__TRY(dtrain__env_number(env, rank_name, &rank));
    DTRAIN__TRY(dtrain__env_number(env, size_name, &size));
    if (rank < 0 && (size < 0 || size_alone)) return DTRAIN_OK;
    if (rank < 0 || size < 0) {
        const char *there = size < 0 ? rank_name : size_name;
        const char *missing = size < 0 ? size_name : rank_name;
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_launch: %s=%d is in the environment and %s is not; a launcher "
                           "sets both: set %s too or unset %s",
                           there, size < 0 ? rank : size, missing, missing, there);
    }
    out->rank = rank;
    out->size = size;
    if (rank < size) return DTRAIN_OK;
    return dtrain__env_conflict(rank_name, rank, size_name, size,
                                "numbers go from 0 to the size less one");
}

/* Read torchrun's variables. Refuse a RANK that contradicts mpirun's variables: usually the shell
 * that ran mpirun had inherited RANK. Under torchrun itself mpirun's variables describe the node
 * where srun or mpirun has started torchrun's agent. */
static dtrain_result dtrain__read_torchrun(dtrain__lookup_fn env, dtrain__placement *out)
{
    static const char *const others[][2] = {{"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},
                                            {"PMI_RANK", "PMI_SIZE"}};
    const bool indexed = dtrain__env_text(env, "JOB_COMPLETION_INDEX") != NULL;
    dtrain__placement said;
    DTRAIN__TRY(dtrain__read_pair(env, "RANK", "WORLD_SIZE", indexed, out));
    for (int i = 0; i < 2 && out->size && !dtrain__env_text(env, "TORCHELASTIC_RUN_ID"); i++) {
        DTRAIN__TRY(dtrain__read_pair(env, others[i][0], others[i][1], false, &said));
        if (said.size && (said.rank != out->rank || said.size != out->size))
            return dtrain_fail(
                DTRAIN_ERROR_ARGUMENT,
                "dtrain_launch: the environment has RANK=%d, WORLD_SIZE=%d and also %s=%d, %s=%d; "
                "unset those that do not come from the launcher of this run",
                out->rank, out->size, others[i][0], said.rank, others[i][1], said.size);
    }
    return DTRAIN_OK;
}

/* Write the first host of a list like "node[001-003,7],gpu[1-2]"; false if the list is malformed or
 * the host does not fit. */
static bool dtrain__first_host(const char *list, char *out, size_t room)
{
    size_t used = 0;
    for (; *list && *list != ','; list++) {
        const bool bracket = *list == '[';
        const size_t length = bracket ? strspn(list + 1, "0123456789") : 1;
        if (!length || *list == ']' || used + length >= room) return false;
        memcpy(out + used, list + bracket, length);
        used += length;
        if (bracket) list = strchr(list, ']');
        if (!list) return false;
    }
    out[used] = 0;
    return used > 0;
}

/* Read Slurm's variables. Without SLURM_STEP_ID this is a shell of sbatch or salloc, which is no
 * rank. srun --mpi=pmi2 sets MPICH's variables too: if they contradict Slurm's, this is a rank of
 * an mpirun inside the step. */
static dtrain_result dtrain__read_slurm(dtrain__lookup_fn env, dtrain__placement *out)
{
    const bool recent = dtrain__env_text(env, "SLURM_STEP_NUM_TASKS") != NULL; /* Slurm 20.11 */
    const char *hosts = dtrain__env_text(env, "SLURM_STEP_NODELIST");
    dtrain__placement said;
    int nodes;
    if (!dtrain__env_text(env, "SLURM_STEP_ID")) return DTRAIN_OK;
    DTRAIN__TRY(dtrain__read_pair(env, "SLURM_PROCID",
                                  recent ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS", false, out));
    DTRAIN__TRY(dtrain__read_pair(env, "PMI_RANK", "PMI_SIZE", false, &said));
    if (said.size && (said.rank != out->rank || said.size != out->size)) out->size = 0;
    if (!out->size) return DTRAIN_OK;
    DTRAIN__TRY(dtrain__env_number(env, "SLURM_STEP_NUM_NODES", &nodes));
    if (nodes == 1) out->local_size = out->size;
    if (!hosts || dtrain__first_host(hosts, out->address, sizeof out->address)) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                       "dtrain_launch: SLURM_STEP_NODELIST=\"%.100s\" is not a host list; "
                       "unset it and set MASTER_ADDR to the host of rank 0",
                       hosts);
}

/* Read the variables of an Indexed Job. The pod's name is <job>-<index>. With setHostnameAsFQDN the
 * domain of the service follows, which gives the name of pod 0. */
static dtrain_result dtrain__read_indexed(dtrain__lookup_fn env, dtrain__placement *out)
{
    const bool ours = dtrain__env_text(env, "DTRAIN_WORLD_SIZE") != NULL;
    const char *size_name = ours ? "DTRAIN_WORLD_SIZE" : "WORLD_SIZE";
    const char *host = dtrain__env_text(env, "HOSTNAME");
    char ending[16];
    if (!dtrain__env_text(env, size_name)) return DTRAIN_OK; /* the job does not set a size */
    DTRAIN__TRY(dtrain__read_pair(env, "JOB_COMPLETION_INDEX", size_name, true, out));
    if (!out->size || !host || strlen(host) + 2 >= sizeof out->address) return DTRAIN_OK;
    const int tail = snprintf(ending, sizeof ending, "-%d.", out->rank);
    const char *at = strstr(host, ending), *domain = strchr(host, '.');
    if (at && at > host && at + tail - 1 == domain)
        snprintf(out->address, sizeof out->address, "%.*s-0%s", (int)(at - host), host, domain);
    return DTRAIN_OK;
}

/* Read the variables of a TrainJob. PET_ is torchrun's prefix for its flags: they mean one launcher
 * per node. */
static dtrain_result dtrain__read_pet(dtrain__lookup_fn env, dtrain__placement *out)
{
    int forks;
    DTRAIN__TRY(dtrain__read_pair(env, "PET_NODE_RANK", "PET_NNODES", false, out));
    DTRAIN__TRY(dtrain__env_number(env, "PET_NPROC_PER_NODE", &forks));
    const int nodes = out->size ? out->size : 1;
    if (!out->size && forks < 0) return DTRAIN_OK;
    if (forks < 0) forks = 1;
    if (!forks || nodes > DTRAIN_MAX_RANKS || forks > DTRAIN_MAX_RANKS / nodes)
        return dtrain__env_conflict("PET_NNODES", nodes, "PET_NPROC_PER_NODE", forks,
                                    "their product is from 1 to DTRAIN_MAX_RANKS");
    out->forks = out->local_size = forks;
    out->size = nodes * forks;
    out->rank *= forks;
    return DTRAIN_OK;
}

static const dtrain__family dtrain__families[DTRAIN__FAMILIES] = {
    {"DTRAIN_RANK",
     NULL,
     {"DTRAIN_MASTER_ADDR", "MASTER_PORT", "DTRAIN_RANK", "DTRAIN_WORLD_SIZE", "DTRAIN_LOCAL_RANK",
      "DTRAIN_LOCAL_SIZE"}},
    {"torchrun",
     dtrain__read_torchrun,
     {"MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
      "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"}},
    {"Open MPI",
     NULL,
     {"MASTER_ADDR", "MASTER_PORT", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
      "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "PMIX_NAMESPACE"}},
    {"Slurm",
     dtrain__read_slurm,
     {"MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", NULL,
      "SLURM_JOB_ID", "SLURM_STEP_ID"}},
    {"MPICH",
     NULL,
     {"MASTER_ADDR", "MASTER_PORT", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"}},
    {"Indexed Job",
     dtrain__read_indexed,
     {"MASTER_ADDR", "MASTER_PORT", "JOB_COMPLETION_INDEX", "WORLD_SIZE"}},
    {"PET",
     dtrain__read_pet,
     {"PET_MASTER_ADDR", "PET_MASTER_PORT", "PET_NODE_RANK", "PET_NNODES"}},
};

/* Find the address and port of rank 0. The port is DTRAIN_PORT or DTRAIN_MASTER_PORT. A launcher
 * listens at its own port, so the port DTRAIN__PORT_OFFSET above it is used (below it, at the end
 * of the range). The address comes from the environment. Without one it is this host if all ranks
 * are on it, else the address that the family's reader has found. "[::1]" is "::1". */
static dtrain_result dtrain__env_meeting(dtrain__lookup_fn env, const dtrain__family *family,
                                         dtrain__placement *out)
{
    const char *const *names = family->variables;
    const char *const ports[] = {"DTRAIN_PORT", "DTRAIN_MASTER_PORT", names[DTRAIN__PORT]};
    int port = -1;
    for (int i = 0; i < 3 && port < 0; i++) {
        DTRAIN__TRY(dtrain__env_number(env, ports[i], &port));
        if (port == 0 || port > 65535)
            return dtrain_fail(
                DTRAIN_ERROR_ARGUMENT,
                "dtrain_launch: %s=%d in the environment is not a port, expected 1 to 65535",
                ports[i], port);
        if (i < 2) continue;
        if (port < 0) port = DTRAIN__DEFAULT_PORT;
        port += port + DTRAIN__PORT_OFFSET > 65535 ? -DTRAIN__PORT_OFFSET : DTRAIN__PORT_OFFSET;
    }
    out->port = (uint32_t)port;

    const char *address = dtrain__env_text(env, "DTRAIN_MASTER_ADDR");
    if (!address) address = dtrain__env_text(env, names[DTRAIN__ADDRESS]);
    if (!address && out->local_size == out->size) address = "127.0.0.1";
    size_t length = address ? strlen(address) : 0;
    if (length >= sizeof out->address)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_launch: the address of rank 0 has %zu characters, at most %zu "
                           "are possible",
                           length, sizeof out->address - 1);
    if (length > 2 && address[0] == '[' && address[length - 1] == ']') {
        address++;
        length -= 2;
    }
    if (address) snprintf(out->address, sizeof out->address, "%.*s", (int)length, address);
    if (out->address[0]) return DTRAIN_OK;
    return dtrain_fail(
        DTRAIN_ERROR_ARGUMENT,
        "dtrain_launch: %s=%d in the environment, and not where rank 0 is; set %s to rank 0's host",
        names[DTRAIN__SIZE], out->forks ? out->size / out->forks : out->size,
        names[DTRAIN__ADDRESS]);
}

/* Read the environment: the first complete family wins. A world of one counts as no launcher:
 * dtrain_launch does what its desc says. */
DTRAIN__PRIVATE dtrain_result dtrain__recognise(dtrain__lookup_fn env, dtrain__placement *out)
{
    const bool indexed = dtrain__env_text(env, "JOB_COMPLETION_INDEX") != NULL;
    static const char *const counts[] = {"DTRAIN_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT",
                                         "SLURM_RESTART_COUNT"};
    const dtrain__family *family = dtrain__families;
    bool found = false;
    int count = -1;
    for (int i = 0; i < DTRAIN__FAMILIES && !found; i++) {
        family = &dtrain__families[i];
        memset(out, 0, sizeof *out);
        out->local_rank = -1;
        if (family->read) DTRAIN__TRY(family->read(env, out));
        else
            DTRAIN__TRY(dtrain__read_pair(env, family->variables[DTRAIN__RANK],
                                          family->variables[DTRAIN__SIZE], indexed && !i, out));
        found = out->size > 0;
    }
    if (found) {
        const char *const *names = family->variables;
        int size;
        DTRAIN__TRY(dtrain__env_number(env, names[DTRAIN__LOCAL_RANK], &out->local_rank));
        DTRAIN__TRY(dtrain__env_number(env, names[DTRAIN__LOCAL_SIZE], &size));
        if (size == 0 || size > out->size)
            return dtrain__env_conflict(names[DTRAIN__LOCAL_SIZE], size, names[DTRAIN__SIZE],
                                        out->size, "a node has from 1 to world size ranks");
        const int limit = size > 0 ? size : out->size;
        if (out->local_rank >= limit)
            return dtrain__env_conflict(names[DTRAIN__LOCAL_RANK], out->local_rank,
                                        names[size > 0 ? DTRAIN__LOCAL_SIZE : DTRAIN__SIZE], limit,
                                        "local ranks go from 0 to the local size less one");
        if (size > 0) out->local_size = size;
    }
    const bool alone = !found || out->size == 1;
    if (alone) memset(out, 0, sizeof *out), out->size = 1;
    out->complete = found;

    /* The number of restarts by the launcher around this process, which can have started one rank,
     * a node or a shell. */
    for (int i = 0; i < 3 && count < 0; i++)
        DTRAIN__TRY(dtrain__env_number(env, counts[i], &count));
    out->restart_count = count < 0 ? 0 : (uint32_t)count;
    if (alone) return DTRAIN_OK;
    if (out->size > DTRAIN_MAX_RANKS)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "dtrain_launch: %s=%d in the environment, at most %d ranks are possible",
                           family->variables[DTRAIN__SIZE], out->size, DTRAIN_MAX_RANKS);
    out->family = family->name;

    /* The key of the run is made from DTRAIN_JOB_KEY, a secret, or else from the launcher's name
     * for this run, which at least keeps apart two runs at one port. */
    const char *secret = dtrain__env_text(env, "DTRAIN_JOB_KEY");
    const char *run = secret ? secret : dtrain__env_text(env, family->variables[DTRAIN__RUN]);
    const char *part = secret ? NULL : dtrain__env_text(env, family->variables[DTRAIN__RUN_PART]);
    out->named = run != NULL;
    for (uint64_t i = 0; i < 2; i++) {
        const uint64_t plain[2] = {i, secret ? 1u : 0u};
        const uint64_t chain[2] = {dtrain__siphash(plain, run, run ? strlen(run) : 0), i};
        out->key[i] = dtrain__siphash(chain, part, part ? strlen(part) : 0);
    }
    return out->forks == out->size ? DTRAIN_OK : dtrain__env_meeting(env, family, out);
}
