/* How ranks end. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/result.h"
#include "world/link_internal.h"
#include "world/world.h"
#include "world/world_internal.h"

DTRAIN__PRIVATE const char *dtrain__signal_name(int number)
{
    switch (number) {
    case SIGHUP: return "SIGHUP";
    case SIGINT: return "SIGINT";
    case SIGQUIT: return "SIGQUIT";
    case SIGILL: return "SIGILL, an illegal instruction";
    case SIGABRT: return "SIGABRT, abort() or a failed assert";
    case SIGBUS: return "SIGBUS, memory or a mapped file that is not there";
    case SIGFPE: return "SIGFPE, an integer division by zero";
    case SIGKILL: return "SIGKILL; it may have run out of memory";
    case SIGSEGV: return "SIGSEGV, an invalid memory access";
    case SIGPIPE: return "SIGPIPE, its output was closed";
    case SIGTERM: return "SIGTERM";
    default: return "see kill -l";
    }
}

DTRAIN__PRIVATE void dtrain__describe_end(const dtrain__control *control, int rank, char *text,
                                          size_t room)
{
    const dtrain__fate *fate = &control->fates[rank];
    switch (dtrain__load(&fate->how)) {
    case DTRAIN__LEFT: snprintf(text, room, "rank %d left (returned 0)", rank); break;
    case DTRAIN__RETURNED: snprintf(text, room, "rank %d returned %d", rank, fate->value); break;
    case DTRAIN__SIGNALED:
        snprintf(text, room, "rank %d was killed by signal %d (%s)", rank, fate->value,
                 dtrain__signal_name(fate->value));
        break;
    case DTRAIN__UNSTARTED: snprintf(text, room, "rank %d could not start", rank); break;
    case DTRAIN__STOPPED:
        snprintf(text, room, "rank %d was killed by the launcher: it did not end in time", rank);
        break;
    case DTRAIN__LOST:
        snprintf(text, room,
                 "rank %d is gone: its connection closed without a word; it exited, crashed or was "
                 "killed, or its host is lost",
                 rank);
        break;
    default: snprintf(text, room, "rank %d is running", rank); break;
    }
}

/* An error sentence without the "rank 3: " that dtrain__fail will put in front of it again. */
DTRAIN__PRIVATE const char *dtrain__bare(const char *text)
{
    char prefix[32];
    snprintf(prefix, sizeof prefix, "rank %d: ", dtrain__rank_of_thread());
    return strncmp(text, prefix, strlen(prefix)) == 0 ? text + strlen(prefix) : text;
}

DTRAIN__PRIVATE void dtrain__record_end(dtrain__control *control, int rank, dtrain__end how,
                                        int value, const char *error)
{
    dtrain__fate *fate = &control->fates[rank];
    uint32_t none = 0;
    fate->value = value;
    fate->ended_ns = dtrain__now_ns();
    snprintf(fate->error, sizeof fate->error, "%s", dtrain__bare(error));
    dtrain__store(&fate->how, (uint32_t)how);
    dtrain__fetch_add(&control->ended_count, 1u);
    if (how == DTRAIN__LEFT) return;
    __atomic_compare_exchange_n(&control->first_failed, &none, (uint32_t)rank + 1u, false,
                                __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

/* Several ranks may notice it at once: nothing is written but the word itself. */
DTRAIN__PRIVATE void dtrain__record_lost(dtrain__control *control, int rank)
{
    uint32_t running = DTRAIN__RUNNING, none = 0;
    if (!__atomic_compare_exchange_n(&control->fates[rank].how, &running, (uint32_t)DTRAIN__LOST,
                                     false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
        return;
    dtrain__fetch_add(&control->ended_count, 1u);
    __atomic_compare_exchange_n(&control->first_failed, &none, (uint32_t)rank + 1u, false,
                                __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

/* The first report stands. Ranks whose deadlines end together report together: who comes second
 * returns when the first one can be read, so that a look behind the call finds it. Its writer may
 * have been killed in the middle; hence the limit. */
DTRAIN__PRIVATE void dtrain__record_report(dtrain__control *control, int rank, dtrain_result code,
                                           const char *text)
{
    dtrain__report *report = &control->report;
    uint32_t none = 0;
    if (!__atomic_compare_exchange_n(&report->state, &none, 1, false, __ATOMIC_ACQ_REL,
                                     __ATOMIC_ACQUIRE)) {
        const uint64_t begin = dtrain__now_ns();
        while (dtrain__load(&report->state) != 2 && dtrain__now_ns() - begin < 100000000u)
            sched_yield();
        return;
    }
    report->rank = rank;
    report->code = (int32_t)code;
    snprintf(report->text, sizeof report->text, "%s", text);
    dtrain__store(&report->state, 2);
}

/* ---- Waiting
 *
 *     dtrain__wait wait = dtrain__wait_begin();
 *     while (!ready()) DTRAIN__TRY(dtrain__wait_turn(world, &wait));
 *
 * A turn is a pause while every thread has a core of its own, and a yield otherwise: the rank
 * waited for may be the one that this core should run (a 4-rank barrier on 2 cores takes 3 us with
 * sched_yield, 67 us with 2000 pauses first, 100 us and more with futexes). After some 20 us waits
 * yield everywhere: on a machine that also does other work the peer may be waiting for a core. The
 * clock and the failure record are looked at between yields, and only then a turn can fail;
 * wait.looked tells the caller to make its own rarer checks.
 *
 * Only time in which this rank could look counts towards the deadline: a job that was suspended as
 * a whole and resumed an hour later does not time out. */

#define DTRAIN__SPIN_TURNS \
    32u /* some 2 us of pauses, then yield: the peer may have lost its core */

DTRAIN__PRIVATE dtrain__wait dtrain__wait_begin(void)
{
    dtrain__wait wait;
    memset(&wait, 0, sizeof wait);
    return wait;
}

/* Has a rank failed or reported a failure? */
DTRAIN__PRIVATE dtrain_result dtrain__trouble(const dtrain_world *world)
{
    const dtrain__control *control = world->control;
    const uint32_t failed = dtrain__load(&control->first_failed);
    char text[160];
    if (dtrain__load(&control->report.state) == 2)
        return dtrain_fail(DTRAIN_ERROR_PEER, "rank %d reported %s: %s", control->report.rank,
                           dtrain_result_name((dtrain_result)control->report.code),
                           control->report.text);
    if (!failed) return DTRAIN_OK;
    dtrain__describe_end(control, (int)failed - 1, text, sizeof text);
    return dtrain_fail(DTRAIN_ERROR_PEER, "%s", text);
}

/* TIMEOUT without a sentence (the caller knows what it was waiting for), PEER with one. */
DTRAIN__PRIVATE dtrain_result dtrain__wait_look(dtrain_world *world, dtrain__wait *wait)
{
    const uint64_t now = dtrain__now_ns(), longest_gap = 1000000000u;
    const uint64_t gap = wait->last_ns ? now - wait->last_ns : 0;
    wait->last_ns = now;
    wait->waited_ns += gap < longest_gap ? gap : longest_gap;
    wait->looked = true;
    dtrain__link_look(world);
    DTRAIN__TRY(dtrain__trouble(world));
    if (wait->waited_ns > 100000000u && world->launcher && getppid() != world->launcher)
        return dtrain_fail(DTRAIN_ERROR_PEER, "the process that launched the ranks is gone");
    return wait->waited_ns >= world->timeout_ns ? DTRAIN_ERROR_TIMEOUT : DTRAIN_OK;
}

DTRAIN__PRIVATE dtrain_result dtrain__wait_turn(dtrain_world *world, dtrain__wait *wait)
{
    wait->looked = false;
    if (!world->oversubscribed && wait->turns < DTRAIN__SPIN_TURNS) {
        wait->turns++;
        dtrain__pause();
        return DTRAIN_OK;
    }
    sched_yield();
    return ++wait->yields % DTRAIN__YIELDS_PER_LOOK ? DTRAIN_OK : dtrain__wait_look(world, wait);
}

/* A rank that forks by itself has a child with the same pointers and none of the rights.
 * MADV_WIPEONFORK makes the flag read 0 there, so the check is one load and no getpid. */
DTRAIN__PRIVATE dtrain_result dtrain__world_check(const dtrain_world *world, const char *call)
{
    if (world->mine && *world->mine) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_USAGE,
                       "%s: called in a process that a rank has forked; only the rank itself can",
                       call);
}

/* ---- Exchange, report, look
 *
 * The control page is the one place where ranks tell each other how they are. */

DTRAIN_API void dtrain_world_abort(dtrain_world *world, dtrain_result code, const char *text)
{
    if (!world || dtrain__world_check(world, "dtrain_world_abort") != DTRAIN_OK) return;
    dtrain__record_report(world->control, world->rank, code, text ? dtrain__bare(text) : "");
    dtrain__link_news(world);
}

/* The first rank that has left (returned 0) at least `age_ns` ago, -1 if there is none. */
static int dtrain__who_left(const dtrain_world *world, uint64_t age_ns)
{
    const dtrain__control *control = world->control;
    if (!dtrain__load(&control->ended_count)) return -1;
    const uint64_t now = dtrain__now_ns();
    for (int i = 0; i < world->size; i++)
        if (dtrain__load(&control->fates[i].how) == DTRAIN__LEFT &&
            now >= control->fates[i].ended_ns + age_ns) /* it may have ended after `now` */
            return i;
    return -1;
}

DTRAIN_API dtrain_result dtrain_world_poll(dtrain_world *world)
{
    if (!world) return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_world_poll: world is NULL");
    DTRAIN__TRY(dtrain__world_check(world, "dtrain_world_poll"));
    dtrain__link_look(world);
    DTRAIN__TRY(dtrain__trouble(world));
    const int left = dtrain__who_left(world, 2000000000u);
    return left < 0 ? DTRAIN_OK : dtrain_fail(DTRAIN_ERROR_PEER, "rank %d left (returned 0)", left);
}

DTRAIN__PRINTF(3, 4)
DTRAIN__PRIVATE dtrain_result dtrain__exchange_fail(dtrain_world *world, dtrain_result code,
                                                    const char *format, ...)
{
    char text[480];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    dtrain_world_abort(world, code, text);
    return dtrain_fail(code, "%s", text);
}

/* What has to come over the network is slept for. */
static dtrain_result dtrain__exchange_turn(dtrain_world *world, dtrain__wait *wait)
{
    if (!dtrain__is_remote(world)) return dtrain__wait_turn(world, wait);
    dtrain__link_pump(world, 5);
    return dtrain__wait_look(world, wait);
}

/* Waits until `rank` has posted for the `sequence`-th time. Whether it has left is asked before its
 * post is looked at for the last time: what it posted before leaving counts. */
static dtrain_result dtrain__await_post(dtrain_world *world, int rank, uint64_t sequence,
                                        dtrain__wait *wait)
{
    const dtrain__post *post = &world->control->posts[rank];
    while (dtrain__load(&post->sequence) < sequence) {
        const dtrain_result turn = dtrain__exchange_turn(world, wait);
        if (!wait->looked) continue;
        const bool left = dtrain__load(&world->control->fates[rank].how) == DTRAIN__LEFT;
        if (dtrain__load(&post->sequence) >= sequence) break;
        if (turn == DTRAIN_ERROR_PEER) return turn;
        if (left)
            return dtrain__exchange_fail(
                world, DTRAIN_ERROR_PEER,
                "rank %d left (returned 0) while rank %d waits in dtrain_world_all_gather", rank,
                world->rank);
        if (turn == DTRAIN_ERROR_TIMEOUT)
            return dtrain__exchange_fail(
                world, turn, "dtrain_world_all_gather: rank %d waited %.1f s for rank %d",
                world->rank, 1e-9 * (double)world->timeout_ns, rank);
    }
    return DTRAIN_OK;
}

DTRAIN_API dtrain_result dtrain_world_all_gather(dtrain_world *world, const void *mine,
                                                 size_t bytes, void *all)
{
    dtrain__wait wait = dtrain__wait_begin();
    if (!world || bytes > DTRAIN_WORLD_ALL_GATHER_BYTES || (bytes && (!mine || !all)))
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_world_all_gather: world or a buffer is NULL, or %zu bytes are "
                           "more than %d",
                           bytes, DTRAIN_WORLD_ALL_GATHER_BYTES);
    DTRAIN__TRY(dtrain__world_check(world, "dtrain_world_all_gather"));
    DTRAIN__TRY(dtrain__trouble(world));
    const uint64_t sequence = ++world->exchange_count;
    const size_t half = sequence % 2;
    dtrain__post *posts = world->control->posts;
    posts[world->rank].bytes[half] = bytes;
    if (bytes) memcpy(posts[world->rank].data[half], mine, bytes);
    dtrain__store(&posts[world->rank].sequence, sequence);
    dtrain__link_news(world);
    for (int i = 0; i < world->size; i++) {
        DTRAIN__TRY(dtrain__await_post(world, i, sequence, &wait));
        if (posts[i].bytes[half] != bytes)
            return dtrain__exchange_fail(
                world, DTRAIN_ERROR_MISMATCH,
                "dtrain_world_all_gather: rank %d passes %llu bytes, rank %d passes %zu", i,
                (unsigned long long)posts[i].bytes[half], world->rank, bytes);
        if (bytes) memcpy((char *)all + (size_t)i * bytes, posts[i].data[half], bytes);
    }
    while (!dtrain__link_all_told(world)) { /* the caller may not look here again for long */
        const dtrain_result turn = dtrain__exchange_turn(world, &wait);
        if (turn == DTRAIN_ERROR_PEER) return turn;
        if (turn == DTRAIN_ERROR_TIMEOUT)
            return dtrain__exchange_fail(
                world, turn,
                "dtrain_world_all_gather: rank %d could not tell the others "
                "in %.1f s: a rank does not read",
                world->rank, 1e-9 * (double)world->timeout_ns);
    }
    return DTRAIN_OK;
}
