/* Dumps: the flight record of a rank
 *
 * A dump has the newest collectives and messages of this rank, from the timeline's events
 * (world/timeline.c), its communicators, and the pulses of all ranks from the control page.
 * build/flight reads the dumps of all ranks and names the late rank and its call. Writing a dump
 * allocates nothing, because a rank also writes one when it has no memory. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/result.h"
#include "world/timeline_internal.h"
#include "world/world.h"
#include "world/world_internal.h"
#include "comm/comm.h"
#include "comm/comm_internal.h"
#include "comm/engine_internal.h"

/* Write the ranks of a communicator, and the number of this rank's last collective. */
static void dtrain__dump_communicator(dtrain__writer *out, const dtrain_comm *comm, bool failed,
                                      bool first)
{
    dtrain__writer_add(out, "%s{\"communicator\": %lld, \"first\": %d, \"started\": %llu, ",
                       first ? "\n  " : ",\n  ", (long long)comm->number, comm->world_ranks[0],
                       (unsigned long long)comm->started);
    dtrain__writer_add(out, "\"failed\": %s, \"ranks\": [", failed ? "true" : "false");
    for (int i = 0; i < comm->size; i++)
        dtrain__writer_add(out, "%s%d", i ? ", " : "", comm->world_ranks[i]);
    dtrain__writer_add(out, "]}");
}

/* Write this rank's state, the pulse of each rank, the communicators and the calls. */
static void dtrain__dump_all(dtrain__writer *out, const dtrain_world *world)
{
    static const char *const states[] = {"queued", "started", "done", "failed"};
    const dtrain__ring *ring = world->timeline.ring;
    const uint64_t now = dtrain__now_ns();
    uint64_t next = ring->count + 1, calls = 0;
    bool first = !world->comm || world->comm->ops->transport;
    char host[256] = "";
    if (gethostname(host, sizeof host - 1) != 0) host[0] = 0;
    dtrain__writer_add(out, "{\"format\": 1, \"rank\": %d, \"size\": %d, \"pid\": %lld, ",
                       world->rank, world->size, (long long)getpid());
    dtrain__writer_string(out, "host", host);
    dtrain__writer_add(out, ", \"restart_count\": %u, \"time\": %lld, \"now_ns\": %llu,\n",
                       world->restart_count, (long long)time(NULL), (unsigned long long)now);
    dtrain__writer_add(out, " \"result\": %d, ", (int)ring->code);
    dtrain__writer_string(out, "error", ring->error);
    dtrain__writer_add(out, ", \"waits_for\": %d, \"first_failed\": %d,\n \"ranks\": [",
                       dtrain__waits(world, world->rank), dtrain__first_failure(world->control));
    for (int i = 0; i < world->size; i++) {
        const dtrain__pulse *pulse = &world->control->pulses[i];
        const uint64_t beat = dtrain__load(&pulse->beat_ns);
        char end[160] = "";
        if (dtrain__load(&world->control->exits[i].how) != DTRAIN__RUNNING)
            dtrain__describe_end(world->control, i, end, sizeof end);
        const long long silent = now > beat ? (long long)(now - beat) : 0;
        dtrain__writer_add(out, "%s{\"rank\": %d, \"silent_ns\": %lld, \"inside\": %s, ",
                           i ? ",\n  " : "\n  ", i, beat ? silent : -1,
                           dtrain__load(&pulse->inside) ? "true" : "false");
        dtrain__writer_add(out, "\"communicator\": %lld, \"first\": %lld, \"sequence\": %llu, ",
                           (long long)dtrain__load(&pulse->comm),
                           (long long)dtrain__load(&pulse->first),
                           (unsigned long long)dtrain__load(&pulse->sequence));
        dtrain__writer_add(
            out, "\"world_started\": %llu, \"world_done\": %llu, \"waits_for\": %d, ",
            (unsigned long long)dtrain__load(&pulse->world_started),
            (unsigned long long)dtrain__load(&pulse->world_done), dtrain__waits(world, i));
        dtrain__writer_string(out, "end", end);
        dtrain__writer_add(out, "}");
    }

    /* The world's and the engine's communicators; other communicators are in no list. */
    dtrain__writer_add(out, "],\n \"communicators\": [");
    if (!first) dtrain__dump_communicator(out, world->comm, ring->code != 0, true);
    for (const dtrain__engine *comm = world->comms; comm; comm = comm->next) {
        if (!comm->report) continue; /* not complete yet */
        dtrain__dump_communicator(out, &comm->base, comm->failed, first);
        first = false;
    }

    dtrain__writer_add(out, "],\n \"collectives\": [");
    while (calls < DTRAIN__FLIGHT_RECORDS && dtrain__event_at(world, next - 1))
        calls += dtrain__event_at(world, --next)->call.kind != NULL;
    for (first = true; next <= ring->count; next++) {
        const dtrain__event *event = dtrain__event_at(world, next);
        if (!event->call.kind) continue;
        dtrain__writer_add(out, "%s{\"kind\":\"%s\",\"first\":%d,\"size\":%d,\"root\":%d,",
                           first ? "\n  " : ",\n  ", event->call.kind, event->call.first,
                           event->call.size, event->call.root);
        dtrain__writer_call(out, event);
        dtrain__writer_add(
            out, ",\"state\":\"%s\",\"queued_ns\":%llu,\"started_ns\":%llu,\"ended_ns\":%llu}",
            states[event->state], (unsigned long long)event->begin_ns,
            (unsigned long long)event->started_ns, (unsigned long long)event->end_ns);
        first = false;
    }
    dtrain__writer_add(out, "]}\n");
    dtrain__writer_flush(out);
}

/* Write DIRECTORY/flight-RANK.json. A rename makes the complete file appear. */
DTRAIN__PRIVATE dtrain_result dtrain__dump(const dtrain_world *world, const char *directory)
{
    char path[DTRAIN__FLIGHT_PATH + 30], temporary[sizeof path + 4], text[4 * DTRAIN__WRITER_PIECE];
    dtrain__writer out = {-1, 0, 0, sizeof text, 0, text};
    const char *failed = "mkdir";
    snprintf(path, sizeof path, "%s/flight-%d.json", directory, world->rank);
    snprintf(temporary, sizeof temporary, "%s.tmp", path);
    if (mkdir(directory, 0777) != 0 && errno != EEXIST) out.error = errno;
    if (!out.error && (out.file = dtrain__open_new(temporary)) < 0)
        failed = "open", out.error = errno;
    if (!out.error) {
        failed = "write";
        dtrain__dump_all(&out, world);
        if (close(out.file) != 0 && !out.error) out.error = errno;
        if (!out.error && rename(temporary, path) != 0) out.error = errno;
        if (out.error) unlink(temporary);
    }
    if (!out.error) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_SYSTEM, "the flight record %s cannot be written: %s: %s", path,
                       failed, strerror(out.error));
}
