/* What a launch makes of its environment, in words and in numbers
 *
 * Which launcher has started this process is guessed from its variables, and a wrong guess looks
 * like a hang or like n trainings of one rank each. So the guess can be read: every family whose
 * variables are set, the values, whether it was taken and why not, and what dtrain_launch does
 * then. It asks the recogniser itself how far it got (placement.looked), so that it cannot say
 * anything else than what is done. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/log.h"
#include "core/result.h"
#include "world/world.h"
#include "world/world_internal.h"
#include "comm/backend.h"
#include "launch/environment_internal.h"
#include "launch/launch.h"
#include "launch/launch_internal.h"
#include "device/backend.h"

/* Where the lines go: into text, or to the log of a launch. */
typedef struct dtrain__explanation {
    char *text;
    size_t room, used;
    const dtrain__launch *launch; /* NULL: into text */
    int rank;                     /* whose lines the log is told they are */
} dtrain__explanation;

/* What else a family looks at; one that is set for other reasons too is not shown alone. */
static const char *const dtrain__more_variables[DTRAIN__FAMILIES][5] = {
    {NULL},
    {NULL},
    {NULL},
    {"SLURM_NTASKS", "SLURM_STEP_NUM_NODES", "SLURM_STEP_NODELIST", NULL},
    {NULL},
    {"DTRAIN_WORLD_SIZE", "HOSTNAME", NULL},
    {"PET_NPROC_PER_NODE", "PET_MASTER_ADDR", "PET_MASTER_PORT", NULL},
};

/* Say one line: a word, and what there is to say about it. */
DTRAIN__PRINTF(3, 4)
static void dtrain__say(dtrain__explanation *e, const char *word, const char *format, ...)
{
    char what[900];
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    for (char *c = what; *c; c++)
        if ((unsigned char)*c < 32 || *c == 127) *c = '?'; /* values come from outside */
    if (!e->launch) {
        const size_t left = e->room - e->used;
        const int more = snprintf(e->text + e->used, left, "%-14s %s\n", word, what);
        if (more > 0) e->used += (size_t)more < left ? (size_t)more : left - 1;
        return;
    }
    dtrain__launch_log(e->launch, e->rank, DTRAIN_LOG_INFO, "launch: %-14s %s", word, what);
}

/* Add " NAME=value" to a list, when it is set and not there yet. */
static void dtrain__add_variable(dtrain__lookup_fn env, const char *name, char *list, size_t room)
{
    const char *value = dtrain__env_text(env, name);
    const size_t used = strlen(list);
    char start[48];
    if (!value) return;
    snprintf(start, sizeof start, " %s=", name);
    if (strstr(list, start)) return;
    snprintf(list + used, room - used, "%s%.80s", start, value);
}

/* List the variables of a family that are set; "" when none is that belongs to it alone. */
static void dtrain__family_variables(dtrain__lookup_fn env, int index, char *list, size_t room)
{
    const dtrain__family *family = &dtrain__family_table()[index];
    const char *const own[] = {family->rank,       family->size, family->local_rank,
                               family->local_size, family->run,  family->run_part};
    const char *const *more = dtrain__more_variables[index];
    list[0] = 0;
    if (index == DTRAIN__INDEXED && !dtrain__env_text(env, family->rank)) return;
    for (size_t i = 0; i < sizeof own / sizeof *own; i++)
        dtrain__add_variable(env, own[i], list, room);
    for (; *more; more++) dtrain__add_variable(env, *more, list, room);
}

/* Say why a family that was looked at, and was not half or contradictory, was not taken. */
static const char *dtrain__why_not(dtrain__lookup_fn env, int index)
{
    const dtrain__family *family = &dtrain__family_table()[index];
    const bool rank = dtrain__env_text(env, family->rank) != NULL;
    const bool size = dtrain__env_text(env, family->size) != NULL;
    if (index == DTRAIN__SLURM && !dtrain__env_text(env, "SLURM_STEP_ID"))
        return "no SLURM_STEP_ID: this is a shell of sbatch or salloc, where no other rank comes";
    if (index == DTRAIN__SLURM && rank)
        return "PMI_RANK and PMI_SIZE say something else: an mpirun inside of the step";
    if (index == DTRAIN__INDEXED)
        return "it does not say of how many; set DTRAIN_WORLD_SIZE to the completions";
    if (index == DTRAIN__PET) return "neither PET_NNODES nor PET_NPROC_PER_NODE";
    if (size && !rank) return "a size alone, which is the Indexed Job's";
    return "no rank and no size";
}

/* Explain what each family of variables came to. */
static void dtrain__explain_families(dtrain__explanation *e, dtrain__lookup_fn env,
                                     const dtrain__placement *place, dtrain_result result)
{
    const dtrain__family *families = dtrain__family_table();
    const bool refused = result != DTRAIN_OK && !place->family;
    bool any = false;
    for (int i = 0; i < DTRAIN__FAMILIES; i++) {
        char list[640];
        const char *name = families[i].name;
        dtrain__family_variables(env, i, list, sizeof list);
        if (!list[0]) continue;
        any = true;
        if (i > place->looked)
            dtrain__say(e, name, "ignored, %s goes before it:%s", families[place->looked].name,
                        list);
        else if (i < place->looked || (!place->complete && !refused))
            dtrain__say(e, name, "ignored, %s:%s", dtrain__why_not(env, i), list);
        else if (refused) dtrain__say(e, name, "refused:%s", list);
        else if (!place->family)
            dtrain__say(e, name, "ignored, one rank is as without a launcher:%s", list);
        else dtrain__say(e, name, "taken:%s", list);
    }
    if (!any) dtrain__say(e, "launcher", "none: no launcher's variables are set");
}

/* Show the variables that are of no family, or of several. */
static void dtrain__explain_others(dtrain__explanation *e, dtrain__lookup_fn env)
{
    static const char *const names[] = {"DTRAIN_MASTER_ADDR", "DTRAIN_PORT", "DTRAIN_MASTER_PORT",
                                        "MASTER_ADDR",        "MASTER_PORT", "DTRAIN_RESTART_COUNT",
                                        "SLURM_RESTART_COUNT"};
    char list[640] = "";
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        dtrain__add_variable(env, names[i], list, sizeof list);
    if (dtrain__env_text(env, "DTRAIN_JOB_KEY"))
        snprintf(list + strlen(list), sizeof list - strlen(list), " DTRAIN_JOB_KEY=(not shown)");
    if (list[0]) dtrain__say(e, "beside", "%s", list + 1);
}

/* Explain which ranks this process starts or is, and where they meet. */
static void dtrain__explain_ranks(dtrain__explanation *e, const dtrain__launch *launch)
{
    const dtrain_launch_desc *desc = &launch->desc;
    const dtrain__placement *place = &launch->place;
    const char *how = desc->mode == DTRAIN_LAUNCH_THREADS ? "threads" : "processes";
    char local[64] = "local rank as the others of its host turn out";
    if (place->local_rank >= 0) snprintf(local, sizeof local, "local rank %d", place->local_rank);
    if (place->local_rank >= 0 && place->local_size > 0)
        snprintf(local, sizeof local, "local rank %d of %d", place->local_rank, place->local_size);
    if (launch->here)
        dtrain__say(e, "ranks", "this process is rank %d of %d, %s", place->rank, place->size,
                    local);
    else if (launch->joins)
        dtrain__say(e, "ranks", "this process starts ranks %d to %d of %d, those of its node",
                    place->rank, place->rank + place->forks - 1, place->size);
    else dtrain__say(e, "ranks", "this process starts all %d, as %s", place->size, how);
    if (!launch->joins) return;
    dtrain__say(e, "meeting", "at %s port %u, for at most %g s; others' runs are told apart %s",
                place->address, place->port, desc->join_ms / 1e3,
                getenv("DTRAIN_JOB_KEY") ? "by DTRAIN_JOB_KEY"
                                         : "by the launcher's name of the run at most");
}

/* Explain the rest of the desc, as it was resolved. */
static void dtrain__explain_settings(dtrain__explanation *e, const dtrain__launch *launch)
{
    const dtrain_launch_desc *desc = &launch->desc;
    const dtrain__placement *place = &launch->place;
    const int local = place->local_size > 0 ? place->local_size : place->size;
    const uint32_t share = launch->cores / (uint32_t)local;
    const char *comm = desc->comm_ops ? desc->comm_ops->name : NULL;
    dtrain__say(e, "communicator", "%s",
                comm            ? comm
                : launch->joins ? "local where all ranks share memory, else MPI if built in"
                : desc->device_ops && !desc->device_ops->host_memory ? "local, through host memory"
                                                                     : "local");
    dtrain__say(e, "device", "%s, %u thread%s a rank of %u cores for %d ranks%s",
                desc->device_ops ? desc->device_ops->name : "cpu",
                desc->threads_per_rank ? desc->threads_per_rank
                : share                ? share
                                       : 1,
                (desc->threads_per_rank ? desc->threads_per_rank : share) > 1 ? "s" : "",
                launch->cores, local, place->local_size > 0 || !launch->joins ? "" : " at most");
    if (desc->emulation.node_ranks)
        dtrain__say(e, "emulation", "nodes of %u, %g Gb/s, %g us", desc->emulation.node_ranks,
                    desc->emulation.gigabits_per_second, desc->emulation.latency_us);
    if (launch->joins)
        dtrain__say(e, "restarts", "by the launcher; %u so far%s", place->restart_count,
                    desc->restarts ? "; desc.restarts is ignored" : "");
    else
        dtrain__say(e, "restarts", "%u in a row without progress; %u so far, by what is around it",
                    desc->restarts, place->restart_count);
    dtrain__say(e, "waits", "timeout %g s, grace %g s; signals %s; flight records %s",
                desc->timeout_ms / 1e3, desc->grace_ms / 1e3,
                desc->catch_signals ? "are caught" : "are not caught",
                desc->flight_directory ? desc->flight_directory : "nowhere");
}

static void dtrain__explain(dtrain__explanation *e, const dtrain__launch *launch,
                            dtrain_result result)
{
    char why[DTRAIN__ERROR_BYTES];
    snprintf(why, sizeof why, "%s", dtrain_last_error());
    dtrain__placement place;
    const dtrain_result recognised = dtrain__recognise(getenv, &place);
    dtrain__explain_families(e, getenv, &place, recognised);
    dtrain__explain_others(e, getenv);
    if (result == DTRAIN_OK) {
        dtrain__explain_ranks(e, launch);
        dtrain__explain_settings(e, launch);
    } else dtrain__say(e, "refused", "%s", why);
    dtrain__set_last_error(result == DTRAIN_OK ? "" : why);
}

/* Log the explanation of a launch, where its desc or the environment asks for it. */
DTRAIN__PRIVATE void dtrain__explain_launch(const dtrain__launch *launch, dtrain_result result)
{
    const char *asked = getenv("DTRAIN_EXPLAIN_LAUNCH");
    dtrain__explanation e;
    const bool all = asked && strcmp(asked, "all") == 0;
    if (!launch->desc.explain && !all && (!asked || strcmp(asked, "1") != 0)) return;
    memset(&e, 0, sizeof e);
    e.launch = launch;
    e.rank = launch->here && !all ? launch->place.rank : -1; /* -1: nobody's info is left out */
    dtrain__explain(&e, launch, result);
}

/* Say in numbers what dtrain__explain_ranks says in words. */
static void dtrain__explain_place(const dtrain__launch *launch, dtrain_launch_place *place)
{
    place->rank_count = launch->place.size;
    place->first_rank = launch->place.rank;
    place->started_count = (int)launch->desc.rank_count;
    place->host_rank_count = launch->place.local_size;
    if (!launch->here) place->host_rank_count = place->started_count;
}

DTRAIN_API dtrain_result dtrain_launch_explain(const dtrain_launch_desc *desc, char *text,
                                               size_t room, dtrain_launch_place *place)
{
    dtrain__explanation e;
    dtrain__launch launch;
    if (place) memset(place, 0, sizeof *place);
    if (!text != !room)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_launch_explain: text is %s",
                           text ? "0 bytes" : "NULL");
    memset(&e, 0, sizeof e);
    memset(&launch, 0, sizeof launch);
    if (text) text[0] = 0;
    e.text = text;
    e.room = room;
    const dtrain_result result = dtrain__resolve_launch(&launch, desc);
    if (text) dtrain__explain(&e, &launch, result);
    if (place && result == DTRAIN_OK) dtrain__explain_place(&launch, place);
    return result;
}
