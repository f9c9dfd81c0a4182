/* The control page: how ranks end, wait for each other and gather
 *
 * One atomic store, the last one, makes a record valid for other ranks. So no lock is needed, and
 * a rank that is killed while it writes a record holds none. */

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
    case SIGABRT: return "SIGABRT, abort() or a failed assert";
    case SIGBUS: return "SIGBUS, memory or a mapped file that is not there";
    case SIGFPE: return "SIGFPE, an integer division by zero";
    case SIGKILL: return "SIGKILL; it may have run out of memory";
    case SIGSEGV: return "SIGSEGV, an invalid memory access";
    case SIGPIPE: return "SIGPIPE, its output was closed";
    case SIGTERM: return "SIGTERM";
    case SIGUSR1: return "SIGUSR1";
    case SIGUSR2: return "SIGUSR2";
    default: return strsignal(number);
    }
}

/* Describe how a rank ended. */
DTRAIN__PRIVATE void dtrain__describe_end(const dtrain__control *control, int rank, char *text,
                                          size_t room)
{
    static const char *const said[] = {
        "is running",
        "left",
        "returned",
        "was killed by signal",
        "could not start",
        "was killed by the launcher: it did not end in time",
        "is gone, and nobody saw how: it exited, crashed or was killed, or its host is lost"};
    const dtrain__exit_record *end = &control->exits[rank];
    const uint32_t how = dtrain__load(&end->how);
    const int used = snprintf(text, room, "rank %d %s", rank, said[how]);
    if (how == DTRAIN__RETURNED) snprintf(text + used, room - (size_t)used, " %d", end->value);
    if (how == DTRAIN__SIGNALED)
        snprintf(text + used, room - (size_t)used, " %d (%s)", end->value,
                 dtrain__signal_name(end->value));
}

/* Return the rank that failed first, -1 for none. The rank that ended first can have failed because
 * of another rank that ended later: `after` then names that rank. */
DTRAIN__PRIVATE int dtrain__first_failure(const dtrain__control *control)
{
    const int first = (int)dtrain__load(&control->first_failed) - 1;
    const int cause = first < 0 ? -1 : control->exits[first].after - 1;
    return cause >= 0 && dtrain__load(&control->exits[cause].how) > DTRAIN__LEFT ? cause : first;
}

/* Count a rank that ended, and keep the first rank that failed. */
static void dtrain__count_end(dtrain__control *control, int rank, bool failed)
{
    uint32_t none = 0;
    dtrain__fetch_add(&control->ended_count, 1u);
    if (failed)
        __atomic_compare_exchange_n(&control->first_failed, &none, (uint32_t)rank + 1u, false,
                                    __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

/* Record how a rank ended, once for each rank. A lost rank stays lost, even if it returned 0. */
DTRAIN__PRIVATE void dtrain__record_end(dtrain__control *control, int rank, dtrain__end how,
                                        int value, const char *error)
{
    dtrain__exit_record *record = &control->exits[rank];
    if (how == DTRAIN__LEFT && dtrain__load(&record->how) == DTRAIN__LOST) return;
    record->value = value;
    record->ended_ns = dtrain__now_ns();
    snprintf(record->error, sizeof record->error, "%s", dtrain__bare(error));
    dtrain__store(&record->how, (uint32_t)how);
    dtrain__count_end(control, rank, how != DTRAIN__LEFT);
}

/* Record that a running rank is lost; false if its end was known. Several ranks can notice the loss
 * at once, so only `how` is written. */
DTRAIN__PRIVATE bool dtrain__record_lost(dtrain__control *control, int rank)
{
    uint32_t running = DTRAIN__RUNNING;
    if (!__atomic_compare_exchange_n(&control->exits[rank].how, &running, (uint32_t)DTRAIN__LOST,
                                     false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
        return false;
    dtrain__count_end(control, rank, true);
    return true;
}

/* Check whether the process of one rank has ended, the next rank at each call: guests have neither
 * a launcher that reports the end nor a connection that closes. 256 ranks take 1.3 s. If ranks
 * share no page, a message can still tell why the rank ended: wait half a second for it. */
DTRAIN__PRIVATE void dtrain__look_for_lost(dtrain_world *world)
{
    const uint64_t now = dtrain__now_ns();
    const int rank = (world->looked + 1) % world->size;
    const dtrain__life *life = &world->lives[rank];
    char text[160];
    if (now - world->looked_ns < 5000000u) return;
    world->looked_ns = now;
    world->looked = rank;
    if (life->host != world->lives[world->rank].host ||
        (life->started ? dtrain__process_started(life->pid) == life->started
                       : kill((pid_t)life->pid, 0) == 0 || errno != ESRCH))
        return;
    if (!world->left_ns[rank]) world->left_ns[rank] = now;
    if (world->tell && now < world->left_ns[rank] + 500000000u) return;
    if (!dtrain__record_lost(world->control, rank) || !world->tell) return;
    dtrain__describe_end(world->control, rank, text, sizeof text);
    dtrain_world_abort(world, DTRAIN_ERROR_PEER, text); /* on other hosts nobody can see it */
}

/* Wait until an abort record is complete. Return false if the rank that writes it has died: its
 * exit record, which comes some 100 us later, then names it. */
DTRAIN__PRIVATE bool dtrain__await_abort(const dtrain__control *control,
                                         const dtrain__abort_record *record)
{
    const uint64_t begin = dtrain__now_ns();
    while (dtrain__load(&record->state) != 2 && !dtrain__load(&control->first_failed) &&
           dtrain__now_ns() - begin < 1000000000u)
        sched_yield();
    return dtrain__load(&record->state) == 2;
}

/* Record an abort; false if there is an earlier abort, which is kept. Ranks whose deadlines pass at
 * the same time abort at the same time: the later rank waits until the first record is complete, so
 * that its next poll finds it. */
DTRAIN__PRIVATE bool dtrain__record_abort(const dtrain__control *control,
                                          dtrain__abort_record *record, int rank,
                                          dtrain_result code, const char *text)
{
    uint32_t none = 0;
    if (!__atomic_compare_exchange_n(&record->state, &none, 1, false, __ATOMIC_ACQ_REL,
                                     __ATOMIC_ACQUIRE)) {
        (void)dtrain__await_abort(control, record);
        return false;
    }
    record->rank = rank;
    record->code = (int32_t)code;
    snprintf(record->text, sizeof record->text, "%s", text);
    dtrain__store(&record->state, 2);
    return true;
}

/* ---- Waiting
 *
 *     dtrain__wait wait = dtrain__wait_begin();
 *     while (!ready()) DTRAIN__TRY(dtrain__wait_turn(world, &wait));
 *
 * If every thread has its own core, the first turns are pauses. All other turns are yields, because
 * this core may have to run the rank that is waited for: a barrier of 4 ranks on 2 cores takes 3 us
 * with sched_yield, 67 us with 2000 pauses before it, 100 us and more with futexes. Every 32nd
 * yield polls the control page, and only then can a turn fail; wait.polled tells the caller to make
 * its own rare checks.
 *
 * A yield of more than a millisecond gave the core to another program that computes, and every
 * further yield would cost a time slice. So the next turns are naps: the scheduler wakes a sleeper
 * at once. Beside two busy programs on two cores a barrier of 4 ranks takes 88 us (80 to 94) with
 * naps, and 0.1 to 24 ms with yields. A nap lasts an eighth of the time since an operation of this
 * rank last moved. So long waits take little time from the other program, and the chunks of a large
 * operation, some 20 us apart, do not wait for a nap.
 *
 * A gap of more than a second between two polls counts as one second towards the deadline: a job
 * that was suspended as a whole and resumed an hour later does not time out. */

#define DTRAIN__SPIN_TURNS 32u /* pauses before the first yield: some 2 us */
#define DTRAIN__LONG_YIELD_NS 1000000u
#define DTRAIN__NAPS 256u /* naps before the next yield */

DTRAIN__PRIVATE dtrain__wait dtrain__wait_begin(void)
{
    dtrain__wait wait;
    memset(&wait, 0, sizeof wait);
    return wait;
}

/* Return an error if a rank has failed or aborted. */
DTRAIN__PRIVATE dtrain_result dtrain__trouble(dtrain_world *world)
{
    const dtrain__control *control = world->control;
    const bool aborted = dtrain__load(&control->aborted.state) == 2;
    const int failed = dtrain__first_failure(control),
              rank = aborted ? control->aborted.rank : failed;
    char text[160];
    if (!world->caused_by) world->caused_by = 1 + rank;
    if (aborted) {
        const char *code = dtrain_result_text((dtrain_result)control->aborted.code);
        return dtrain_fail(DTRAIN_ERROR_PEER, "rank %d reported %.*s: %s", control->aborted.rank,
                           (int)strcspn(code, ":"), code, control->aborted.text);
    }
    if (failed < 0) return DTRAIN_OK;
    dtrain__describe_end(control, failed, text, sizeof text);
    return dtrain_fail(DTRAIN_ERROR_PEER, "%s%s%s", text,
                       control->exits[failed].error[0] ? "; its last error: " : "",
                       control->exits[failed].error);
}

/* ---- Who waits for whom
 *
 * At every poll, a waiting rank writes an entry: the rank that it waits for, and the time. A rank
 * whose deadline passes follows these entries to the first rank that waits for nobody: that rank
 * is late. Entries older than half a deadline do not count: a rank that was stopped during a wait
 * no longer waits. A rank that gives up keeps its entry, or ranks whose deadlines pass a moment
 * later would report it as late. */

/* Note the rank of the world that this rank waits for; -1 for none. Send it over the link after a
 * quarter of the deadline and then after every further eighth. Not earlier: the entry would remain
 * in other ranks' pages after a short wait. */
DTRAIN__PRIVATE void dtrain__set_waits(dtrain_world *world, int rank)
{
    uint64_t *own = &world->control->waits[world->rank], entry = 0;
    const uint64_t now = dtrain__now_ns();
    const int32_t target = rank;
    dtrain__link *link = world->link;
    if (rank >= 0) entry = now / 1000000u << 16 | (uint64_t)(rank + 1);
    if (*own != entry) dtrain__store(own, entry);
    if (!dtrain__is_remote(world)) return;
    if (rank < 0 || !link->wait_ns) link->wait_ns = rank < 0 ? 0 : now + world->timeout_ns / 4;
    if (rank < 0 || now < link->wait_ns || !dtrain__link_takes_waits(link)) return;
    link->wait_ns = now + world->timeout_ns / 8;
    dtrain__link_send(world, DTRAIN__FRAME_WAIT, world->rank, &target, sizeof target);
}

/* Return the rank that `rank` waits for; -1 if it waits for none. */
DTRAIN__PRIVATE int dtrain__waits(const dtrain_world *world, int rank)
{
    const uint64_t entry = dtrain__load(&world->control->waits[rank]);
    if (!entry || dtrain__now_ns() / 1000000u - (entry >> 16) > world->timeout_ns / 2000000u)
        return -1;
    return (int)(entry & 65535u) - 1;
}

/* Follow the entries from a rank to the late rank; -1 if they form a circle. */
DTRAIN__PRIVATE int dtrain__behind(const dtrain_world *world, int rank)
{
    for (int i = 0; i < world->size; i++) {
        const int next = dtrain__waits(world, rank);
        if (next < 0) return rank;
        rank = next;
    }
    return -1;
}

/* Poll during a wait: the clock, the link, the control page, the launcher. DTRAIN_ERROR_PEER has a
 * sentence. DTRAIN_ERROR_TIMEOUT has none: only the caller knows what it waits for. */
DTRAIN__PRIVATE dtrain_result dtrain__wait_poll(dtrain_world *world, dtrain__wait *wait)
{
    const uint64_t now = dtrain__now_ns(), longest_gap = 1000000000u;
    const uint64_t gap = wait->last_ns ? now - wait->last_ns : 0;
    wait->last_ns = now;
    wait->waited_ns += gap < longest_gap ? gap : longest_gap;
    wait->polled = true;
    dtrain__beat(world, now);
    dtrain__link_poll(world);
    if (world->guest) dtrain__look_for_lost(world);
    DTRAIN__TRY(dtrain__trouble(world));
    if (wait->waited_ns > 100000000u && world->launcher && getppid() != world->launcher)
        return dtrain_fail(DTRAIN_ERROR_PEER, "the launcher of the ranks is gone");
    return wait->waited_ns >= world->timeout_ns ? DTRAIN_ERROR_TIMEOUT : DTRAIN_OK;
}

DTRAIN__PRIVATE dtrain_result dtrain__wait_turn(dtrain_world *world, dtrain__wait *wait)
{
    wait->polled = false;
    if (world->moves != wait->moves) { /* the next step can be near */
        wait->moves = world->moves;
        wait->moved_ns = wait->waited_ns;
        wait->turns = 0;
    }
    if (!world->oversubscribed && wait->turns < DTRAIN__SPIN_TURNS) {
        wait->turns++;
        dtrain__pause();
        return DTRAIN_OK;
    }
    if (world->naps) {
        const int64_t share = (int64_t)(wait->waited_ns - wait->moved_ns) / 8;
        const struct timespec nap = {0, (long)dtrain__min(dtrain__max(share, 10000), 1000000)};
        world->naps--;
        nanosleep(&nap, NULL);
        return dtrain__wait_poll(world, wait);
    }
    const uint64_t begin = dtrain__now_ns();
    sched_yield();
    if (dtrain__now_ns() - begin > DTRAIN__LONG_YIELD_NS) world->naps = DTRAIN__NAPS;
    return ++wait->yields % DTRAIN__YIELDS_PER_POLL ? DTRAIN_OK : dtrain__wait_poll(world, wait);
}

/* Refuse a call from a process that a rank has forked: it has the rank's pointers but is no rank.
 * MADV_WIPEONFORK makes *mine 0 there, so the check is one load, without getpid. */
DTRAIN__PRIVATE dtrain_result dtrain__world_check(const dtrain_world *world, const char *call)
{
    dtrain__set_thread_rank(world->rank); /* a host's thread can have several worlds */
    if (world->mine && *world->mine) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_USAGE,
                       "%s: called in a process that a rank has forked; only the rank itself can",
                       call);
}

/* ---- Abort, poll, all-gather ------------------------------------------------------------------*/

DTRAIN_API void dtrain_world_abort(dtrain_world *world, dtrain_result code, const char *text)
{
    if (!world || dtrain__world_check(world, "dtrain_world_abort") != DTRAIN_OK) return;
    const char *sentence = text ? dtrain__bare(text) : "";
    dtrain__control *control = world->control;
    if (!dtrain__record_abort(control, &control->aborted, world->rank, code, sentence)) return;
    dtrain__link_send(world, DTRAIN__FRAME_ABORT, world->rank, &world->control->aborted,
                      sizeof world->control->aborted);
    if (world->tell) world->tell(world);
}

/* True once this rank has known for `grace_ns` that `rank` left. Clocks of ranks can differ. */
DTRAIN__PRIVATE bool dtrain__left_for(dtrain_world *world, int rank, uint64_t grace_ns)
{
    if (dtrain__load(&world->control->exits[rank].how) != DTRAIN__LEFT) return false;
    const uint64_t now = dtrain__now_ns();
    if (!world->left_ns[rank]) world->left_ns[rank] = now;
    return now >= world->left_ns[rank] + grace_ns;
}

DTRAIN_API dtrain_result dtrain_world_poll(dtrain_world *world)
{
    if (!world) return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_world_poll: world is NULL");
    DTRAIN__TRY(dtrain__world_check(world, "dtrain_world_poll"));
    dtrain__link_poll(world);
    if (world->tell) world->tell(world);
    if (world->guest) dtrain__look_for_lost(world);
    const dtrain_result trouble = dtrain__trouble(world);
    dtrain__failed(world, trouble);
    DTRAIN__TRY(trouble);
    const int ended = dtrain__load(&world->control->ended_count) ? world->size : 0;
    for (int i = 0; i < ended; i++)
        if (dtrain__left_for(world, i, 2000000000u))
            return dtrain_fail(DTRAIN_ERROR_PEER, "rank %d left", i);
    return DTRAIN_OK;
}

/* Abort with a sentence and return it as this rank's own error. */
DTRAIN__PRINTF(3, 4)
DTRAIN__PRIVATE dtrain_result dtrain__abort_with(dtrain_world *world, dtrain_result code,
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

/* Return true if record number `sequence` of a rank has arrived. This rank's own record has arrived
 * when the link has sent its whole buffer: the program may not call again for a long time. */
static bool dtrain__has_record(const dtrain_world *world, int rank, uint64_t sequence)
{
    if (rank == world->rank) return dtrain__link_unsent(world) < 0;
    return dtrain__load(&world->control->slots[rank].sequence) >= sequence;
}

/* Publish this rank's record, and collect the records of all other ranks. Check whether a rank has
 * left before the last look at its slot: a record written before it left counts. Without a shared
 * page all records pass through rank 0. So if rank 0 waits for nobody, rank 0 is late, whichever
 * record is missing. */
static dtrain_result dtrain__gather_all(dtrain_world *world, const void *mine, size_t bytes)
{
    dtrain__wait wait = dtrain__wait_begin();
    const uint64_t sequence = ++world->gather_count;
    const size_t half = sequence % 2;
    const bool remote = dtrain__is_remote(world);
    dtrain__gather_slot *slots = world->control->slots;
    slots[world->rank].bytes[half] = bytes;
    if (bytes) memcpy(slots[world->rank].data[half], mine, bytes);
    dtrain__store(&slots[world->rank].sequence, sequence);
    dtrain__link_send(world, DTRAIN__FRAME_GATHER, world->rank, mine, bytes);
    for (int k = 1; k <= world->size; k++) { /* this rank is the last */
        const int rank = (world->rank + k) % world->size;
        while (!dtrain__has_record(world, rank, sequence)) {
            if (remote) dtrain__link_pump(world, 5); /* sleeps; in shared memory ranks spin */
            const dtrain_result turn =
                remote ? dtrain__wait_poll(world, &wait) : dtrain__wait_turn(world, &wait);
            if (!wait.polled) continue;
            const int awaited = rank == world->rank ? dtrain__link_unsent(world) : rank;
            dtrain__set_waits(world, awaited);
            const bool left = dtrain__load(&world->control->exits[rank].how) == DTRAIN__LEFT;
            if (dtrain__has_record(world, rank, sequence)) break;
            if (turn == DTRAIN_ERROR_PEER) return turn;
            if (left)
                return dtrain__abort_with(
                    world, DTRAIN_ERROR_PEER,
                    "rank %d left while rank %d waits in dtrain_world_all_gather", rank,
                    world->rank);
            if (world->look_for_circle &&
                world->look_for_circle(world, NULL, NULL, &wait) != DTRAIN_OK)
                return dtrain__abort_with(world, DTRAIN_ERROR_MISMATCH, "%s",
                                          dtrain__bare(dtrain_last_error()));
            if (turn != DTRAIN_ERROR_TIMEOUT) continue;
            const int behind = dtrain__behind(world, world->rank && remote ? 0 : awaited);
            return dtrain__abort_with(
                world, turn, "dtrain_world_all_gather: rank %d waited %.1f s for rank %d%s",
                world->rank, 1e-9 * (double)world->timeout_ns, behind < 0 ? awaited : behind,
                rank == world->rank ? ", which does not read" : "");
        }
        if (slots[rank].bytes[half] != bytes)
            return dtrain__abort_with(
                world, DTRAIN_ERROR_MISMATCH,
                "dtrain_world_all_gather: rank %d passes %llu bytes, rank %d passes %zu", rank,
                (unsigned long long)slots[rank].bytes[half], world->rank, bytes);
    }
    dtrain__set_waits(world, -1);
    if (wait.number) dtrain__store(&world->control->long_waits[world->rank].number, (uint64_t)0);
    return DTRAIN_OK;
}

/* Gather records; dtrain__gathered returns them until this rank gathers again. */
DTRAIN__PRIVATE dtrain_result dtrain__world_gather(dtrain_world *world, const void *mine,
                                                   size_t bytes)
{
    DTRAIN__TRY(dtrain__world_check(world, "dtrain_world_all_gather"));
    DTRAIN__TRY(dtrain__trouble(world));
    if (world->gather) return world->gather(world, mine, bytes);
    const dtrain__comm_call call = {
        "world all-gather", world->gather_count + 1, bytes, -1, 0, world->size, -1, 0, 0, NULL};
    (void)dtrain__enter(world, call.kind);
    const uint64_t event = dtrain__call_queued(world, &call);
    dtrain__call_started(world, event);
    const dtrain_result result = dtrain__gather_all(world, mine, bytes);
    if (result == DTRAIN_OK) dtrain__call_done(world, event);
    (void)dtrain__leave(world, result);
    return result;
}

DTRAIN_API dtrain_result dtrain_world_all_gather(dtrain_world *world, const void *mine,
                                                 size_t bytes, void *all)
{
    if (!world || bytes > DTRAIN_WORLD_ALL_GATHER_BYTES || (bytes && (!mine || !all)))
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_world_all_gather: world or a buffer is NULL, or %zu bytes are "
                           "more than %d",
                           bytes, DTRAIN_WORLD_ALL_GATHER_BYTES);
    DTRAIN__TRY(dtrain__world_gather(world, mine, bytes));
    for (int i = 0; i < world->size && bytes; i++)
        memcpy((char *)all + (size_t)i * bytes, dtrain__gathered(world, i), bytes);
    return DTRAIN_OK;
}

/* ---- Progress ---------------------------------------------------------------------------------*/

/* Raise a number that other ranks can raise at the same time. */
static void dtrain__raise(uint64_t *highest, uint64_t to)
{
    uint64_t found = dtrain__load(highest);
    while (found < to && !__atomic_compare_exchange_n(highest, &found, to, false, __ATOMIC_ACQ_REL,
                                                      __ATOMIC_ACQUIRE)) {}
}

DTRAIN_API void dtrain_world_progress(dtrain_world *world, uint64_t step)
{
    if (!world || !world->mine || !*world->mine) return;
    const uint64_t mine = step < UINT64_MAX ? step + 1 : step;
    dtrain__raise(&world->control->progress, mine);
    if (world->progress) dtrain__raise(world->progress, mine);
}
