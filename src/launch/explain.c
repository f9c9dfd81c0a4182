/* What a launch makes of its environment, in words and in numbers
 *
 * Which launcher has started this process is guessed from its variables, and a wrong guess looks
 * like a hang or like n trainings of one rank each. So the guess can be read: the rows of the table
 * of families whose variables are set, with what dtrain__recognise has decided about each, and what
 * dtrain_launch does then. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/log.h"
#include "core/result.h"
#include "world/world.h"
#include "world/world_internal.h"
#include "launch/environment_internal.h"
#include "launch/launch.h"
#include "launch/launch_internal.h"

/* Lines of text, cut where `room` ends. */
typedef struct dtrain__lines {
    char *text;
    size_t room, used;
} dtrain__lines;

/* Add a line: a word, and what there is to say about it. */
DTRAIN__PRINTF(3, 4)
static void dtrain__say(dtrain__lines *e, const char *word, const char *format, ...)
{
    char what[900];
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    for (char *c = what; *c; c++)
        if ((unsigned char)*c < 32 || *c == 127) *c = '?'; /* values come from outside */
    const size_t left = e->room - e->used;
    const int more = snprintf(e->text + e->used, left, "%-14s %s\n", word, what);
    if (more > 0) e->used += (size_t)more < left ? (size_t)more : left - 1;
}

/* Add " NAME=value" to a list for each of these variables that is set. */
static void dtrain__list_variables(dtrain__lookup_fn env, const char *const *names, int count,
                                   char *list, size_t room)
{
    for (int i = 0; i < count; i++) {
        const char *value = dtrain__env_text(env, names[i]);
        const size_t used = strlen(list);
        if (value) snprintf(list + used, room - used, " %s=%.80s", names[i], value);
    }
}

/* Explain what each family of variables came to, and show those that are of no family or of
 * several. A host name or a world size alone announces no Indexed Job. */
static void dtrain__explain_families(dtrain__lines *e, dtrain__lookup_fn env,
                                     const char *const said[DTRAIN__FAMILIES])
{
    static const char *const others[] = {
        "DTRAIN_MASTER_ADDR", "DTRAIN_PORT",     "DTRAIN_MASTER_PORT",   "MASTER_ADDR",
        "MASTER_PORT",        "PET_MASTER_ADDR", "DTRAIN_RESTART_COUNT", "SLURM_RESTART_COUNT"};
    const dtrain__family *families = dtrain__family_table(), *last = NULL;
    const char *const key = dtrain__env_text(env, "DTRAIN_JOB_KEY");
    char list[900];
    bool any = false;
    for (int i = 0; i < DTRAIN__FAMILIES; i++) {
        const dtrain__family *family = &families[i];
        const bool none = i == DTRAIN__INDEXED && !dtrain__env_text(env, "JOB_COMPLETION_INDEX");
        list[0] = 0;
        if (said[i]) last = family;
        if (!none)
            dtrain__list_variables(env, family->variables + DTRAIN__RANK,
                                   DTRAIN__VARIABLES - DTRAIN__RANK, list, sizeof list);
        if (!list[0]) continue;
        any = true;
        if (said[i]) dtrain__say(e, family->name, "%s:%s", said[i], list);
        else dtrain__say(e, family->name, "ignored, %s goes before it:%s", last->name, list);
    }
    if (!any) dtrain__say(e, "launcher", "none: no launcher's variables are set");
    list[0] = 0;
    dtrain__list_variables(env, others, (int)(sizeof others / sizeof *others), list, sizeof list);
    if (list[0] || key)
        dtrain__say(e, "beside", "%s%s", list[0] ? list + 1 : "",
                    key ? " DTRAIN_JOB_KEY=(not shown)" : "");
}

/* Explain which ranks this process starts or is, and where they meet. */
static void dtrain__explain_ranks(dtrain__lines *e, const dtrain__launch *launch)
{
    const dtrain__placement *place = &launch->place;
    char local[64] = "local rank as the others of its host turn out";
    if (place->local_rank >= 0) snprintf(local, sizeof local, "local rank %d", place->local_rank);
    if (place->local_rank >= 0 && place->local_size > 0)
        snprintf(local, sizeof local, "local rank %d of %d", place->local_rank, place->local_size);
    if (launch->is_rank)
        dtrain__say(e, "ranks", "this process is rank %d of %d, %s", place->rank, place->size,
                    local);
    else if (launch->joins)
        dtrain__say(e, "ranks", "this process starts ranks %d to %d of %d, those of its node",
                    place->rank, place->rank + place->forks - 1, place->size);
    else
        dtrain__say(e, "ranks", "this process starts all %d, as %s", place->size,
                    launch->desc.mode == DTRAIN_LAUNCH_THREADS ? "threads" : "processes");
    if (launch->joins)
        dtrain__say(e, "meeting",
                    "at %s port %u, for at most %g s; other runs are told apart by %s",
                    place->address, place->port, launch->desc.join_ms / 1e3,
                    getenv("DTRAIN_JOB_KEY") ? "DTRAIN_JOB_KEY"
                                             : "the launcher's name of the run, where it has one");
}

/* Write what a launch makes of its environment into text (room). */
DTRAIN__PRIVATE void dtrain__explain(const dtrain__launch *launch, dtrain_result result, char *text,
                                     size_t room)
{
    dtrain__lines e = {text, room, 0};
    const char *said[DTRAIN__FAMILIES];
    char why[DTRAIN__ERROR_BYTES];
    dtrain__placement place;
    snprintf(why, sizeof why, "%s", dtrain_last_error());
    (void)dtrain__recognise(getenv, &place, said);
    dtrain__explain_families(&e, getenv, said);
    if (result == DTRAIN_OK) dtrain__explain_ranks(&e, launch);
    else dtrain__say(&e, "refused", "%s", why);
    dtrain__set_last_error(result == DTRAIN_OK ? "" : why);
}

/* Log the explanation of a launch, where its desc or the environment asks for it. */
DTRAIN__PRIVATE void dtrain__explain_launch(const dtrain__launch *launch, dtrain_result result)
{
    const char *asked = getenv("DTRAIN_EXPLAIN_LAUNCH");
    const bool all = asked && strcmp(asked, "all") == 0;
    dtrain__log_sink log = launch->log;
    char text[8192], *line = text;
    if (!launch->desc.explain && !all && (!asked || strcmp(asked, "1") != 0)) return;
    dtrain__explain(launch, result, text, sizeof text);
    if (launch->is_rank && !all) log.rank = launch->place.rank; /* the info of -1 is always shown */
    for (char *end; (end = strchr(line, '\n')) != NULL; line = end + 1)
        dtrain__log_to(&log, DTRAIN_LOG_INFO, "launch: %.*s", (int)(end - line), line);
}
