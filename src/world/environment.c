/* The launch environment
 *
 * Launchers tell a process its rank in environment variables, each in its own. A family is taken as
 * a whole, the first complete one wins:
 *
 *     DTRAIN_RANK, DTRAIN_WORLD_SIZE            ours: any launcher that can set variables
 *     RANK, WORLD_SIZE                          torchrun and its kin, PyTorchJob
 *     OMPI_COMM_WORLD_RANK, _SIZE               Open MPI
 *     PMI_RANK, PMI_SIZE                        MPICH and its kin
 *     SLURM_PROCID, SLURM_STEP_NUM_TASKS        srun. The sbatch shell has most SLURM variables but
 *                                               no SLURM_STEP_ID: there, nobody else comes
 *     JOB_COMPLETION_INDEX, *WORLD_SIZE         Kubernetes Indexed Job, which does not say how many
 *     PET_NNODES, PET_NODE_RANK, ...            Kubeflow TrainJob: one process a node, and we are
 *                                               the launcher of the node's ranks
 *
 * This part is a pure function of the environment; dtrain_launch hands it getenv. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/result.h"
#include "world/environment_internal.h"
#include "world/world.h"
#include "world/world_internal.h"

#define DTRAIN__DEFAULT_PORT 29500u
#define DTRAIN__PORT_OFFSET 100u /* torchrun's own store listens on MASTER_PORT itself */

/* Look up a variable; NULL when it is unset or empty. */
static const char *dtrain__env_text(const dtrain__environment *env, const char *name)
{
    const char *text = name ? env->lookup(env->user, name) : NULL;
    return text && text[0] ? text : NULL;
}

/* Read a number of at most nine digits, without sign or blank; *found says whether it is set. */
static dtrain_result dtrain__env_number(const dtrain__environment *env, const char *name,
                                        bool *found, int *value)
{
    const char *text = dtrain__env_text(env, name);
    *found = text != NULL;
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

typedef struct dtrain__family {
    const char *name, *rank, *size, *local_rank, *local_size;
    const char *run[2]; /* variables that name the run */
} dtrain__family;

static const dtrain__family dtrain__families[] = {
    {"DTRAIN_RANK",
     "DTRAIN_RANK",
     "DTRAIN_WORLD_SIZE",
     "DTRAIN_LOCAL_RANK",
     "DTRAIN_LOCAL_SIZE",
     {NULL, NULL}},
    {"torchrun",
     "RANK",
     "WORLD_SIZE",
     "LOCAL_RANK",
     "LOCAL_WORLD_SIZE",
     {"TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"}},
    {"Open MPI",
     "OMPI_COMM_WORLD_RANK",
     "OMPI_COMM_WORLD_SIZE",
     "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE",
     {"PMIX_NAMESPACE", NULL}},
    {"MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", {NULL, NULL}},
    {"Slurm",
     "SLURM_PROCID",
     "SLURM_STEP_NUM_TASKS",
     "SLURM_LOCALID",
     NULL,
     {"SLURM_JOB_ID", "SLURM_STEP_ID"}},
    {"Indexed Job", "JOB_COMPLETION_INDEX", "WORLD_SIZE", NULL, NULL, {NULL, NULL}},
    {"PET", "PET_NODE_RANK", "PET_NNODES", NULL, NULL, {NULL, NULL}},
};
enum {
    DTRAIN__OURS,
    DTRAIN__TORCHRUN,
    DTRAIN__OPEN_MPI,
    DTRAIN__MPICH,
    DTRAIN__SLURM,
    DTRAIN__INDEXED,
    DTRAIN__PET,
    DTRAIN__FAMILIES
};

/* Refuse a pair that cannot be, such as "RANK=5" beside "WORLD_SIZE=1". */
static dtrain_result dtrain__env_conflict(const char *a, int a_value, const char *b, int b_value,
                                          const char *rule)
{
    return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                       "dtrain_launch: %s=%d with %s=%d in the environment makes no sense: %s", a,
                       a_value, b, b_value, rule);
}

/* Rank and size of one family; *found when both are there. Half a family is an error, except that a
 * lone world size may belong to an Indexed Job. */
static dtrain_result dtrain__env_pair(const dtrain__environment *env, const char *rank_name,
                                      const char *size_name, bool size_alone, bool *found,
                                      dtrain__placement *out)
{
    bool has_rank, has_size;
    *found = false;
    DTRAIN__TRY(dtrain__env_number(env, rank_name, &has_rank, &out->rank));
    DTRAIN__TRY(dtrain__env_number(env, size_name, &has_size, &out->size));
    if (!has_rank && (!has_size || size_alone)) return DTRAIN_OK;
    if (has_rank != has_size)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_launch: %s=%d is in the environment and %s is not; a launcher "
                           "sets both: set %s too or unset %s",
                           has_rank ? rank_name : size_name, has_rank ? out->rank : out->size,
                           has_rank ? size_name : rank_name, has_rank ? size_name : rank_name,
                           has_rank ? rank_name : size_name);
    if (out->rank >= out->size)
        return dtrain__env_conflict(rank_name, out->rank, size_name, out->size,
                                    "ranks go from 0 to the world size less one");
    *found = true;
    return DTRAIN_OK;
}

static dtrain_result dtrain__env_local(const dtrain__environment *env, const dtrain__family *family,
                                       dtrain__placement *out)
{
    bool has_rank, has_size;
    out->local_rank = -1;
    out->local_size = 0;
    DTRAIN__TRY(dtrain__env_number(env, family->local_rank, &has_rank, &out->local_rank));
    DTRAIN__TRY(dtrain__env_number(env, family->local_size, &has_size, &out->local_size));
    if (has_size && (out->local_size == 0 || out->local_size > out->size))
        return dtrain__env_conflict(family->local_size, out->local_size, family->size, out->size,
                                    "a node has from 1 to world size ranks");
    if (has_rank && has_size && out->local_rank >= out->local_size)
        return dtrain__env_conflict(family->local_rank, out->local_rank, family->local_size,
                                    out->local_size,
                                    "local ranks go from 0 to local size less one");
    if (has_rank && out->local_rank >= out->size)
        return dtrain__env_conflict(family->local_rank, out->local_rank, family->size, out->size,
                                    "a local rank is below the world size");
    return DTRAIN_OK;
}

/* Refuse RANK beside another launcher's variables that say something else: usually inherited by the
 * shell that ran mpirun. Under torchrun they describe the node on which srun or mpirun put the
 * agent. */
static dtrain_result dtrain__env_disagreement(const dtrain__environment *env,
                                              const dtrain__placement *taken)
{
    const dtrain__family *mine = &dtrain__families[DTRAIN__TORCHRUN];
    if (dtrain__env_text(env, "TORCHELASTIC_RUN_ID")) return DTRAIN_OK;
    for (int i = DTRAIN__OPEN_MPI; i <= DTRAIN__MPICH; i++) {
        const dtrain__family *other = &dtrain__families[i];
        dtrain__placement said;
        bool found;
        DTRAIN__TRY(dtrain__env_pair(env, other->rank, other->size, false, &found, &said));
        if (!found || (said.rank == taken->rank && said.size == taken->size)) continue;
        return dtrain_fail(
            DTRAIN_ERROR_ARGUMENT,
            "dtrain_launch: the environment has %s=%d, %s=%d and also %s=%d, %s=%d; unset those "
            "that do not come from the launcher of this run",
            mine->rank, taken->rank, mine->size, taken->size, other->rank, said.rank, other->size,
            said.size);
    }
    return DTRAIN_OK;
}

/* ---- Slurm's lists ----------------------------------------------------------------------------*/

#define DTRAIN__HOSTS_MOST 1000000

/* Read one bracket, "001-003,7]": return how many numbers it stands for, -1 when malformed; write
 * number `index` of them, zeros kept, to `out` (room 16); set *end behind the bracket. */
static int64_t dtrain__bracket(const char *text, int64_t index, char *out, const char **end)
{
    int64_t count = 0;
    do {
        const size_t width = strspn(text, "0123456789");
        if (!width || width > 9) return -1;
        const int64_t low = strtol(text, NULL, 10);
        int64_t high = low;
        text += width;
        if (*text == '-') {
            const size_t digits = strspn(++text, "0123456789");
            if (!digits || digits > 9) return -1;
            high = strtol(text, NULL, 10);
            text += digits;
        }
        if (high < low || high - low >= DTRAIN__HOSTS_MOST) return -1;
        if (index >= count && index - count <= high - low)
            snprintf(out, 16, "%0*d", (int)width, (int)(low + index - count));
        count += high - low + 1;
    } while (*text++ == ',' && count <= DTRAIN__HOSTS_MOST);
    *end = text;
    return text[-1] == ']' ? count : -1;
}

/* Count the names for which one entry stands, up to a comma or the end: "rack[1-2]-n[08-10]" has
 * six. */
static int64_t dtrain__host_count(const char *entry, const char **end)
{
    int64_t count = 1;
    char ignored[16];
    while (*entry && *entry != ',') {
        if (*entry == ']') return -1;
        if (*entry++ != '[') continue;
        const int64_t numbers = dtrain__bracket(entry, -1, ignored, &entry);
        if (numbers < 0 || count * numbers > DTRAIN__HOSTS_MOST) return -1;
        count *= numbers;
    }
    *end = entry;
    return count;
}

/* Write name number `index` of one entry that host_count has found well-formed; the last bracket
 * runs fastest. False when it does not fit. */
static bool dtrain__host_write(const char *entry, int64_t index, char *out, size_t room)
{
    size_t used = 0;
    const char *end;
    while (*entry && *entry != ',' && used + 17 < room) {
        if (*entry != '[') {
            out[used++] = *entry++;
            continue;
        }
        char number[16];
        (void)dtrain__bracket(entry + 1, -1, number, &end);
        const int64_t faster = dtrain__host_count(end, &end);
        (void)dtrain__bracket(entry + 1, index / faster, number, &entry);
        index %= faster;
        used += (size_t)snprintf(out + used, room - used, "%s", number);
    }
    out[used] = 0;
    return used > 0 && (!*entry || *entry == ',');
}

/* Write host number `index` of a list like "node[001-003,7],gpu[1-2]". False when the list is
 * malformed or has no such host. */
static bool dtrain__host_of_list(const char *list, int64_t index, char *out, size_t room)
{
    while (*list) {
        const char *end;
        const int64_t count = dtrain__host_count(list, &end);
        if (count < 0 || end == list) return false;
        if (index < count) return dtrain__host_write(list, index, out, room);
        index -= count;
        list = *end ? end + 1 : end;
    }
    return false;
}

/* Read the tasks of node number `node` from a list like "2(x3),1"; 0 when it cannot be told. */
static int dtrain__tasks_of_list(const char *list, int node)
{
    while (list && *list) {
        char *end;
        const long tasks = strtol(list, &end, 10);
        long repeat = 1;
        if (end == list || tasks < 1 || tasks > DTRAIN__HOSTS_MOST) return 0;
        if (end[0] == '(' && end[1] == 'x') {
            repeat = strtol(end + 2, &end, 10);
            if (repeat < 1 || *end++ != ')') return 0;
        }
        if (node < repeat) return (int)tasks;
        node -= (int)repeat;
        if (*end && *end != ',') return 0;
        list = *end ? end + 1 : end;
    }
    return 0;
}

/* ---- Families that need more than a pair ------------------------------------------------------*/

static dtrain_result dtrain__env_slurm(const dtrain__environment *env, bool *found,
                                       dtrain__placement *out)
{
    const dtrain__family *family = &dtrain__families[DTRAIN__SLURM];
    const char *size_name =
        dtrain__env_text(env, family->size) ? family->size : "SLURM_NTASKS"; /* before 20.11 */
    const char *hosts = dtrain__env_text(env, "SLURM_STEP_NODELIST");
    bool has_node;
    int node = 0;
    *found = false;
    if (!dtrain__env_text(env, "SLURM_STEP_ID")) return DTRAIN_OK;
    DTRAIN__TRY(dtrain__env_pair(env, family->rank, size_name, false, found, out));
    if (!*found) return DTRAIN_OK;
    DTRAIN__TRY(dtrain__env_local(env, family, out));
    DTRAIN__TRY(dtrain__env_number(env, "SLURM_NODEID", &has_node, &node));
    const char *tasks = dtrain__env_text(env, "SLURM_STEP_TASKS_PER_NODE");
    if (has_node && tasks) out->local_size = dtrain__tasks_of_list(tasks, node);
    if (out->local_size > out->size || out->local_size <= out->local_rank) out->local_size = 0;
    if (dtrain__env_text(env, "DTRAIN_MASTER_ADDR") || dtrain__env_text(env, "MASTER_ADDR"))
        return DTRAIN_OK; /* said otherwise */
    if (hosts && !dtrain__host_of_list(hosts, 0, out->address, sizeof out->address))
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_launch: SLURM_STEP_NODELIST=\"%.100s\" is not a host list; set "
                           "DTRAIN_MASTER_ADDR to the host of rank 0",
                           hosts);
    return DTRAIN_OK;
}

/* The pod's own name is <job>-<index>; with setHostnameAsFQDN the domain of the service is behind
 * it, and so the name of pod 0 is known. */
static dtrain_result dtrain__env_indexed(const dtrain__environment *env, bool *found,
                                         dtrain__placement *out)
{
    const char *index_name = dtrain__families[DTRAIN__INDEXED].rank;
    const bool ours = dtrain__env_text(env, "DTRAIN_WORLD_SIZE") != NULL;
    const char *size_name = ours ? "DTRAIN_WORLD_SIZE" : "WORLD_SIZE";
    *found = false;
    if (!dtrain__env_text(env, size_name)) return DTRAIN_OK;
    DTRAIN__TRY(dtrain__env_pair(env, index_name, size_name, true, found, out));
    const char *host = dtrain__env_text(env, "HOSTNAME");
    const char *domain = host ? strchr(host, '.') : NULL;
    char ending[16];
    if (!*found || !domain) return DTRAIN_OK;
    const size_t tail = (size_t)snprintf(ending, sizeof ending, "-%d", out->rank);
    const size_t name = (size_t)(domain - host);
    if (name > tail && strncmp(domain - tail, ending, tail) == 0 &&
        strlen(host) + 2 < sizeof out->address)
        snprintf(out->address, sizeof out->address, "%.*s-0%s", (int)(name - tail), host, domain);
    return DTRAIN_OK;
}

/* PET_ is torchrun's prefix for its own flags: whoever sets these wants one launcher a node. */
static dtrain_result dtrain__env_pet(const dtrain__environment *env, bool *found,
                                     dtrain__placement *out)
{
    int nodes = 1, node = 0, forks = 1;
    bool has_nodes, has_node, has_forks;
    const char *count = dtrain__env_text(env, "PET_NPROC_PER_NODE");
    if (count &&
        (strcmp(count, "auto") == 0 || strcmp(count, "gpu") == 0 || strcmp(count, "cpu") == 0))
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "dtrain_launch: PET_NPROC_PER_NODE=\"%s\" leaves the number of ranks "
                           "open; set it to the ranks per node",
                           count);
    DTRAIN__TRY(dtrain__env_number(env, "PET_NNODES", &has_nodes, &nodes));
    DTRAIN__TRY(dtrain__env_number(env, "PET_NODE_RANK", &has_node, &node));
    DTRAIN__TRY(dtrain__env_number(env, "PET_NPROC_PER_NODE", &has_forks, &forks));
    *found = has_nodes || has_node || has_forks;
    if (!*found) return DTRAIN_OK;
    if (has_node && !has_nodes)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_launch: PET_NODE_RANK=%d is in the environment and PET_NNODES "
                           "is not; set both or neither",
                           node);
    if (nodes > 1 && !has_node)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_launch: PET_NNODES=%d is in the environment and PET_NODE_RANK "
                           "is not; set both or neither",
                           nodes);
    if (node >= nodes)
        return dtrain__env_conflict("PET_NODE_RANK", node, "PET_NNODES", nodes,
                                    "nodes go from 0 to their number less one");
    if (!forks || nodes > DTRAIN_MAX_RANKS || forks > DTRAIN_MAX_RANKS / nodes)
        return dtrain__env_conflict("PET_NNODES", nodes, "PET_NPROC_PER_NODE", forks,
                                    "their product is from 1 to DTRAIN_MAX_RANKS");
    out->forks = forks;
    out->size = nodes * forks;
    out->rank = node * forks;
    out->local_size = forks;
    return DTRAIN_OK;
}

/* ---- Where to meet ----------------------------------------------------------------------------*/

static dtrain_result dtrain__env_port_number(const dtrain__environment *env, const char *name,
                                             bool *found, int *port)
{
    DTRAIN__TRY(dtrain__env_number(env, name, found, port));
    if (!*found || (*port >= 1 && *port <= 65535)) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                       "dtrain_launch: %s=%d in the environment is not a port, expected 1 to 65535",
                       name, *port);
}

/* DTRAIN_PORT and DTRAIN_MASTER_PORT are the port itself; a launcher's port is its own, we use the
 * one DTRAIN__PORT_OFFSET above (below, at the end of the range). */
static dtrain_result dtrain__env_port(const dtrain__environment *env, const char *theirs,
                                      dtrain__placement *out)
{
    bool found;
    int port = (int)DTRAIN__DEFAULT_PORT;
    DTRAIN__TRY(dtrain__env_port_number(env, "DTRAIN_PORT", &found, &port));
    if (!found) DTRAIN__TRY(dtrain__env_port_number(env, "DTRAIN_MASTER_PORT", &found, &port));
    if (!found) {
        DTRAIN__TRY(dtrain__env_port_number(env, theirs, &found, &port));
        const int offset = (int)DTRAIN__PORT_OFFSET;
        port += port + offset <= 65535 ? offset : -offset;
    }
    out->port = (uint32_t)port;
    return DTRAIN_OK;
}

static dtrain_result dtrain__env_meeting(const dtrain__environment *env, int family,
                                         dtrain__placement *out)
{
    const bool pet = family == DTRAIN__PET;
    const char *ours = dtrain__env_text(env, "DTRAIN_MASTER_ADDR");
    const char *theirs = dtrain__env_text(env, pet ? "PET_MASTER_ADDR" : "MASTER_ADDR");
    const char *address = ours ? ours : family == DTRAIN__OURS ? NULL : theirs;
    DTRAIN__TRY(dtrain__env_port(env, pet ? "PET_MASTER_PORT" : "MASTER_PORT", out));
    if (address && strlen(address) >= sizeof out->address)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_launch: the address of rank 0 has %zu characters, at most %zu "
                           "are possible",
                           strlen(address), sizeof out->address - 1);
    if (address) snprintf(out->address, sizeof out->address, "%s", address);
    else if (out->local_size == out->size) snprintf(out->address, sizeof out->address, "127.0.0.1");
    if (out->address[0]) return DTRAIN_OK;
    return dtrain_fail(
        DTRAIN_ERROR_ARGUMENT,
        "dtrain_launch: %s=%d in the environment, and not where rank 0 is; set %s to rank 0's host",
        dtrain__families[family].size, pet ? out->size / out->forks : out->size,
        pet                      ? "PET_MASTER_ADDR"
        : family == DTRAIN__OURS ? "DTRAIN_MASTER_ADDR"
                                 : "MASTER_ADDR");
}

/* Make the key of the run from DTRAIN_JOB_KEY, a secret, or else from the launcher's name for this
 * run, which at least keeps two runs apart that meet at one port. */
static void dtrain__env_key(const dtrain__environment *env, const dtrain__family *family,
                            dtrain__placement *out)
{
    const char *secret = dtrain__env_text(env, "DTRAIN_JOB_KEY");
    const char *run = secret ? secret : dtrain__env_text(env, family->run[0]);
    const char *part = secret ? NULL : dtrain__env_text(env, family->run[1]);
    for (uint64_t i = 0; i < 2; i++) {
        const uint64_t plain[2] = {i, secret ? 1u : 0u};
        const uint64_t chain[2] = {dtrain__siphash(plain, run, run ? strlen(run) : 0), i};
        out->key[i] = dtrain__siphash(chain, part, part ? strlen(part) : 0);
    }
}

/* srun --mpi=pmi2 sets the rank and size of MPICH's family. Slurm's own, which also says where the
 * hosts are, is taken if it means the same. */
static dtrain_result dtrain__env_prefer_slurm(const dtrain__environment *env, int *family,
                                              dtrain__placement *out)
{
    dtrain__placement step;
    bool found;
    memset(&step, 0, sizeof step);
    step.local_rank = -1;
    DTRAIN__TRY(dtrain__env_slurm(env, &found, &step));
    if (!found || step.rank != out->rank || step.size != out->size) return DTRAIN_OK;
    *out = step;
    *family = DTRAIN__SLURM;
    return DTRAIN_OK;
}

/* Read the environment: the first complete family wins. A world of one counts as no launcher, and
 * dtrain_launch does what its desc says, as if nothing were set. */
DTRAIN__PRIVATE dtrain_result dtrain__recognise(const dtrain__environment *env,
                                                dtrain__placement *out)
{
    const bool indexed = dtrain__env_text(env, "JOB_COMPLETION_INDEX") != NULL;
    bool found = false;
    int i = 0;
    memset(out, 0, sizeof *out);
    for (; i < DTRAIN__FAMILIES; i++) {
        const dtrain__family *family = &dtrain__families[i];
        out->local_rank = -1;
        if (i == DTRAIN__SLURM) DTRAIN__TRY(dtrain__env_slurm(env, &found, out));
        else if (i == DTRAIN__INDEXED) DTRAIN__TRY(dtrain__env_indexed(env, &found, out));
        else if (i == DTRAIN__PET) DTRAIN__TRY(dtrain__env_pet(env, &found, out));
        else {
            const bool size_alone = indexed && i <= DTRAIN__TORCHRUN;
            DTRAIN__TRY(dtrain__env_pair(env, family->rank, family->size, size_alone, &found, out));
            if (found) DTRAIN__TRY(dtrain__env_local(env, family, out));
        }
        if (found) break;
    }
    if (found && i == DTRAIN__TORCHRUN) DTRAIN__TRY(dtrain__env_disagreement(env, out));
    if (found && i == DTRAIN__MPICH) DTRAIN__TRY(dtrain__env_prefer_slurm(env, &i, out));
    if (!found || out->size == 1) {
        memset(out, 0, sizeof *out);
        out->size = 1;
        return DTRAIN_OK;
    }
    if (out->size > DTRAIN_MAX_RANKS)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "dtrain_launch: %s=%d in the environment, at most %d ranks are possible",
                           dtrain__families[i].size, out->size, DTRAIN_MAX_RANKS);
    out->family = dtrain__families[i].name;
    dtrain__env_key(env, &dtrain__families[i], out);
    return out->forks == out->size ? DTRAIN_OK : dtrain__env_meeting(env, i, out);
}

DTRAIN__PRIVATE const char *dtrain__getenv(void *user, const char *name)
{
    (void)user;
    return getenv(name);
}
