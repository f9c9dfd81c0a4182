/* The flight record: the last collectives of a rank, and of what it knows of the others
 *
 *     dtrain__run -> begin: QUEUED     engine: STARTED     engine, or wait and test: DONE
 *          |                                                             |
 *          +---- enter --- wait_poll: beat, every 10 us or so --- leave -+
 *
 * A ring in private memory, made with the world. A record is written by the rank that it is about,
 * and read by that rank when it dumps: no lock, no allocation, no system call, and no look at the
 * clock of its own. Times are those of the looks that the calls and waits take anyway: a record is
 * queued and started at the last look before, done at the next one behind.
 *
 * What other ranks may read while this one is stuck is its pulse in the control page: its last call
 * and its last sign of life inside of the library. So the dumps of the ranks that wait say where
 * one stands that dumps nothing because it hangs, is stopped or dead. Ranks of several hosts, which
 * share no memory, see no pulse of each other.
 *
 * A dump is written without allocating: it is also made when there is no memory. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/log.h"
#include "core/result.h"
#include "world/timeline.h"
#include "world/timeline_internal.h"
#include "world/trace_internal.h"
#include "world/world.h"
#include "world/world_internal.h"
#include "comm/backend.h"
#include "comm/comm.h"
#include "comm/comm_internal.h"
#include "comm/engine_internal.h"
#include "comm/flight_internal.h"

/* ---- Making it --------------------------------------------------------------------------------*/

DTRAIN__PRIVATE dtrain_result dtrain__flight_create(dtrain_world *world, const char *directory)
{
    dtrain__flight *flight =
        (dtrain__flight *)dtrain__alloc(&world->allocator, 1, sizeof *flight, "a flight record");
    if (!flight) return DTRAIN_ERROR_MEMORY;
    static const dtrain__recorder recorder = {dtrain__flight_beat, dtrain__flight_gather,
                                              dtrain__flight_gathered, dtrain__flight_fail};
    world->flight = flight;
    world->recorder = &recorder;
    flight->asked = dtrain__dumps_asked();
    snprintf(flight->directory, sizeof flight->directory, "%s", directory ? directory : "");
    return DTRAIN_OK;
}

DTRAIN__PRIVATE void dtrain__flight_destroy(dtrain_world *world)
{
    dtrain__free(&world->allocator, world->flight, 1, sizeof(dtrain__flight));
    world->flight = NULL;
    world->recorder = NULL;
}

/* ---- Recording --------------------------------------------------------------------------------*/

/* Name who asks for the next collective of this rank, right before the call. `part` is a literal;
 * name is copied by that call; either may be NULL. */
DTRAIN__PRIVATE void dtrain__flight_label(const dtrain_comm *comm, const char *part, int64_t number,
                                          const char *name)
{
    dtrain__flight *flight = comm->world->flight;
    if (!flight) return;
    flight->part = part;
    flight->part_name = name;
    flight->part_number = number;
}

/* Return the number of the newest record. */
DTRAIN__PRIVATE uint64_t dtrain__flight_latest(const dtrain_world *world)
{
    return world->flight ? world->flight->count : 0;
}

/* Find a record; NULL when newer ones have taken its place. */
static dtrain__flight_record *dtrain__flight_at(const dtrain_world *world, uint64_t number)
{
    dtrain__flight *flight = world->flight;
    if (!flight || !number || flight->count - number >= DTRAIN__FLIGHT_RECORDS) return NULL;
    return &flight->records[number % DTRAIN__FLIGHT_RECORDS];
}

/* Take the next record and label it. Labels are copied: the strategy may be gone at a dump. */
static dtrain__flight_record *dtrain__flight_next(dtrain__flight *flight)
{
    dtrain__flight_record *record = &flight->records[++flight->count % DTRAIN__FLIGHT_RECORDS];
    record->state = DTRAIN__FLIGHT_QUEUED;
    record->queued_ns = flight->now_ns;
    record->started_ns = record->ended_ns = 0;
    record->part = flight->part;
    record->number = flight->part_number;
    record->name[0] = 0;
    if (flight->part && flight->part_name) {
        const size_t length = strnlen(flight->part_name, sizeof record->name - 1);
        memcpy(record->name, flight->part_name, length);
        record->name[length] = 0;
    }
    flight->part = NULL;
    return record;
}

/* Show the others which call was the last one, see dtrain__pulse. */
static void dtrain__flight_show(dtrain_world *world, const dtrain__flight_record *record)
{
    dtrain__pulse *pulse = &world->control->pulses[world->rank];
    if (!record->sequence) return;
    dtrain__store(&pulse->comm, record->comm);
    dtrain__store(&pulse->first, (int64_t)record->first);
    dtrain__store(&pulse->sequence, record->sequence);
    if (record->comm == 0) dtrain__store(&pulse->world_started, record->sequence);
}

/* Record a call. dtrain__flight_latest is its number until the next one. */
DTRAIN__PRIVATE void dtrain__flight_begin(dtrain_comm *comm, const dtrain_collective *what)
{
    const bool message =
        what->kind == DTRAIN_COLLECTIVE_SEND || what->kind == DTRAIN_COLLECTIVE_RECV;
    if (!comm->world->flight) return;
    dtrain__flight_record *record = dtrain__flight_next(comm->world->flight);
    record->sequence = message ? 0 : ++comm->started;
    record->comm = comm->number;
    record->first = comm->world_ranks[0];
    record->size = comm->size;
    record->count = what->count;
    record->kind = what->kind;
    record->dtype = (uint32_t)what->dtype;
    record->op = what->op;
    record->root = what->root;
    dtrain__flight_show(comm->world, record);
}

/* Record a dtrain_world_all_gather, which needs no communicator. */
DTRAIN__PRIVATE void dtrain__flight_gather(dtrain_world *world, size_t bytes)
{
    dtrain__flight_enter(world, dtrain__now_ns());
    if (!world->flight) return;
    dtrain__flight_record *record = dtrain__flight_next(world->flight);
    record->sequence = world->gather_count + 1;
    record->comm = -1;
    record->first = 0;
    record->size = world->size;
    record->count = bytes;
    record->kind = record->dtype = record->op = 0;
    record->root = -1;
    record->state = DTRAIN__FLIGHT_STARTED;
    record->started_ns = record->queued_ns;
    dtrain__flight_show(world, record);
}

DTRAIN__PRIVATE void dtrain__flight_gathered(dtrain_world *world, dtrain_result result)
{
    if (result == DTRAIN_OK) dtrain__flight_done(world, dtrain__flight_latest(world));
    dtrain__flight_leave(world, dtrain__now_ns());
    dtrain__flight_fail(world, result);
}

DTRAIN__PRIVATE void dtrain__flight_started(const dtrain_world *world, uint64_t number)
{
    dtrain__flight_record *record = dtrain__flight_at(world, number);
    if (!record || record->state != DTRAIN__FLIGHT_QUEUED) return;
    record->state = DTRAIN__FLIGHT_STARTED;
    record->started_ns = world->flight->now_ns;
}

/* Give a collective that has ended to the trace. A bucket's is tied to where it was started. */
static void dtrain__flight_trace(dtrain_world *world, const dtrain__flight_record *record,
                                 uint64_t number)
{
    static const char *const ops[] = {"", "sum", "mean", "min", "max", "prod"};
    const dtrain_dtype dtype = (dtrain_dtype)record->dtype;
    const bool gather = record->comm < 0;
    dtrain__trace_event event;
    memset(&event, 0, sizeof event);
    event.begin_ns = record->queued_ns;
    event.end_ns = record->ended_ns;
    event.number = DTRAIN__UNNUMBERED;
    event.track = DTRAIN__TRACK_COLLECTIVE;
    event.kind = DTRAIN_SPAN_COMM;
    event.count = record->count;
    event.bytes = record->count * (gather ? 1 : dtrain_dtype_bytes(dtype));
    event.sequence = record->sequence;
    event.flow = record->part ? (uint64_t)(world->restart_count & 15u) << 48 |
                                    (uint64_t)world->rank << 40 | number
                              : 0;
    event.comm = record->comm;
    event.dtype = gather ? "byte" : dtrain_dtype_name(dtype);
    event.op = ops[record->op <= DTRAIN_REDUCE_PROD ? record->op : 0];
    snprintf(event.name, sizeof event.name, "%s",
             gather ? "world all-gather" : dtrain__kind_of(record->kind)->name);
    if (record->part) {
        event.number = record->number;
        snprintf(event.text, sizeof event.text, "%s %lld, %.20s", record->part,
                 (long long)record->number, record->name);
    }
    dtrain__trace_put(world, &event);
}

/* Note a look at the clock: it is the end of what was done since the look before. */
static void dtrain__flight_look(dtrain_world *world, uint64_t now)
{
    dtrain__flight *flight = world->flight;
    flight->now_ns = now;
    for (uint32_t i = 0; i < flight->landed_count; i++) {
        dtrain__flight_record *record =
            &flight->records[flight->landed[i] % DTRAIN__FLIGHT_RECORDS];
        record->ended_ns = now;
        if (world->timeline.traced) dtrain__flight_trace(world, record, flight->landed[i]);
    }
    flight->landed_count = 0;
}

/* Record that a collective is done. The engine calls it as soon as that is so, dtrain_work_wait and
 * dtrain_work_test for every backend: the first call counts. */
DTRAIN__PRIVATE void dtrain__flight_done(dtrain_world *world, uint64_t number)
{
    dtrain__flight_record *record = dtrain__flight_at(world, number);
    dtrain__flight *flight = world->flight;
    if (!record || record->state >= DTRAIN__FLIGHT_DONE) return;
    if (!record->started_ns) record->started_ns = record->queued_ns;
    record->state = DTRAIN__FLIGHT_DONE;
    if (record->comm == 0 && record->sequence)
        dtrain__store(&world->control->pulses[world->rank].world_done, record->sequence);
    if (flight->landed_count == DTRAIN__FLIGHT_LANDED) dtrain__flight_look(world, dtrain__now_ns());
    flight->landed[flight->landed_count++] = number;
}

/* ---- Signs of life ----------------------------------------------------------------------------*/

/* Note a look at the clock inside of the library, and dump if a signal has asked for it. */
DTRAIN__PRIVATE void dtrain__flight_beat(dtrain_world *world, uint64_t now)
{
    dtrain__flight *flight = world->flight;
    if (!flight) return;
    dtrain__store(&world->control->pulses[world->rank].beat_ns, now);
    dtrain__flight_look(world, now);
    const uint32_t asked = dtrain__dumps_asked();
    if (asked == flight->asked) return;
    flight->asked = asked;
    if (!flight->directory[0] || !world->catches) return;
    if (dtrain_world_dump(world, flight->directory) != DTRAIN_OK)
        dtrain_log(world, DTRAIN_LOG_WARNING, "%s", dtrain__bare(dtrain_last_error()));
}

DTRAIN__PRIVATE void dtrain__flight_enter(dtrain_world *world, uint64_t now)
{
    if (!world->flight) return;
    dtrain__store(&world->control->pulses[world->rank].inside, (uint64_t)1);
    dtrain__flight_beat(world, now);
}

DTRAIN__PRIVATE void dtrain__flight_leave(dtrain_world *world, uint64_t now)
{
    if (!world->flight) return;
    dtrain__flight_beat(world, now);
    dtrain__store(&world->control->pulses[world->rank].inside, (uint64_t)0);
}

/* ---- Writing ----------------------------------------------------------------------------------*/

/* A file that is written through a buffer of its own. */
typedef struct dtrain__dump {
    int file, error; /* errno of the first write that failed */
    size_t used;
    char buffer[4096];
} dtrain__dump;

static void dtrain__dump_flush(dtrain__dump *dump)
{
    size_t at = 0;
    while (at < dump->used && !dump->error) {
        const ssize_t wrote = write(dump->file, dump->buffer + at, dump->used - at);
        if (wrote > 0) at += (size_t)wrote;
        else if (wrote < 0 && errno != EINTR) dump->error = errno;
    }
    dump->used = 0;
}

/* Append a piece, which has no more than 1 KiB. */
DTRAIN__PRINTF(2, 3)
static void dtrain__dump_add(dtrain__dump *dump, const char *format, ...)
{
    va_list args;
    if (dump->used > sizeof dump->buffer - 1024) dtrain__dump_flush(dump);
    va_start(args, format);
    dump->used += (size_t)vsnprintf(dump->buffer + dump->used, 1024, format, args);
    va_end(args);
}

/* Append a JSON string. What is not ASCII becomes a question mark: a name may have been cut in the
 * middle of a character, and then the file were no JSON. */
static void dtrain__dump_text(dtrain__dump *dump, const char *name, const char *text)
{
    dtrain__dump_add(dump, "\"%s\": \"", name);
    for (; *text; text++) {
        const unsigned char c = (unsigned char)*text;
        const char shown = c < 32 || c > 126 ? '?' : (char)c;
        dtrain__dump_add(dump, "%s%c", c == '"' || c == '\\' ? "\\" : "", shown);
    }
    dtrain__dump_add(dump, "\"");
}

static void dtrain__dump_record(dtrain__dump *dump, const dtrain__flight_record *record)
{
    static const char *const states[] = {"queued", "started", "done", "failed"};
    static const char *const ops[] = {"", "sum", "mean", "min", "max", "prod"};
    const bool gather = record->comm < 0;
    const char *dtype = dtrain_dtype_name((dtrain_dtype)record->dtype);
    const uint64_t unit = gather ? 1 : dtrain_dtype_bytes((dtrain_dtype)record->dtype);
    char by[80] = "";
    if (record->part)
        snprintf(by, sizeof by, "%s %lld%s%s", record->part, (long long)record->number,
                 record->name[0] ? ", " : "", record->name);
    dtrain__dump_add(dump, "{\"communicator\": %lld, \"first\": %d, \"size\": %d, ",
                     (long long)record->comm, record->first, record->size);
    dtrain__dump_add(dump, "\"sequence\": %llu, \"kind\": \"%s\", \"op\": \"%s\", ",
                     (unsigned long long)record->sequence,
                     gather ? "world all-gather" : dtrain__kind_of(record->kind)->name,
                     ops[record->op <= DTRAIN_REDUCE_PROD ? record->op : 0]);
    dtrain__dump_add(dump, "\"dtype\": \"%s\", \"count\": %llu, \"bytes\": %llu, \"root\": %d, ",
                     gather ? "byte" : dtype, (unsigned long long)record->count,
                     (unsigned long long)(record->count * unit), record->root);
    dtrain__dump_text(dump, "by", by);
    dtrain__dump_add(
        dump, ", \"state\": \"%s\", \"queued_ns\": %llu, \"started_ns\": %llu, \"ended_ns\": %llu}",
        states[record->state], (unsigned long long)record->queued_ns,
        (unsigned long long)record->started_ns, (unsigned long long)record->ended_ns);
}

/* Write what this rank knows of each rank. */
static void dtrain__dump_ranks(dtrain__dump *dump, const dtrain_world *world, uint64_t now)
{
    for (int i = 0; i < world->size; i++) {
        const dtrain__pulse *pulse = &world->control->pulses[i];
        const uint64_t beat = dtrain__load(&pulse->beat_ns);
        const uint32_t how = dtrain__load(&world->control->exits[i].how);
        char end[160] = "";
        if (how != DTRAIN__RUNNING) dtrain__describe_end(world->control, i, end, sizeof end);
        dtrain__dump_add(dump, "%s{\"rank\": %d, \"silent_ns\": %lld, \"inside\": %s, ",
                         i ? ",\n  " : "\n  ", i,
                         !beat        ? -1LL
                         : now > beat ? (long long)(now - beat)
                                      : 0LL,
                         dtrain__load(&pulse->inside) ? "true" : "false");
        dtrain__dump_add(dump, "\"communicator\": %lld, \"first\": %lld, \"sequence\": %llu, ",
                         (long long)dtrain__load(&pulse->comm),
                         (long long)dtrain__load(&pulse->first),
                         (unsigned long long)dtrain__load(&pulse->sequence));
        dtrain__dump_add(dump, "\"world_started\": %llu, \"world_done\": %llu, \"waits_for\": %d, ",
                         (unsigned long long)dtrain__load(&pulse->world_started),
                         (unsigned long long)dtrain__load(&pulse->world_done),
                         dtrain__waits(world, i));
        dtrain__dump_text(dump, "end", end);
        dtrain__dump_add(dump, "}");
    }
}

/* Write who is in a communicator, and the sequence number of this rank's last call of it. */
static void dtrain__dump_communicator(dtrain__dump *dump, const dtrain_comm *comm, bool failed,
                                      bool first)
{
    dtrain__dump_add(dump, "%s{\"communicator\": %lld, \"first\": %d, \"started\": %llu, ",
                     first ? "\n  " : ",\n  ", (long long)comm->number, comm->world_ranks[0],
                     (unsigned long long)comm->started);
    dtrain__dump_add(dump, "\"failed\": %s, \"ranks\": [", failed ? "true" : "false");
    for (int i = 0; i < comm->size; i++)
        dtrain__dump_add(dump, "%s%d", i ? ", " : "", comm->world_ranks[i]);
    dtrain__dump_add(dump, "]}");
}

/* Write the communicators: those of the engine, and the world's; others are the host's to know. */
static void dtrain__dump_communicators(dtrain__dump *dump, const dtrain_world *world)
{
    bool first = true, listed = !world->comm;
    for (const dtrain__engine *comm = world->comms; comm; comm = comm->next) {
        if (!comm->report) continue; /* half of one that is being made */
        dtrain__dump_communicator(dump, &comm->base, comm->failed, first);
        listed = listed || &comm->base == world->comm;
        first = false;
    }
    if (!listed) dtrain__dump_communicator(dump, world->comm, world->flight->code != 0, first);
}

static void dtrain__dump_all(dtrain__dump *dump, const dtrain_world *world)
{
    const dtrain__flight *flight = world->flight;
    const uint64_t now = dtrain__now_ns();
    const uint64_t oldest =
        flight->count > DTRAIN__FLIGHT_RECORDS ? flight->count - DTRAIN__FLIGHT_RECORDS + 1 : 1;
    char host[256] = "";
    if (gethostname(host, sizeof host - 1) != 0) host[0] = 0;
    dtrain__dump_add(dump, "{\"format\": 1, \"rank\": %d, \"size\": %d, \"pid\": %lld, ",
                     world->rank, world->size, (long long)getpid());
    dtrain__dump_text(dump, "host", host);
    dtrain__dump_add(dump, ", \"restart_count\": %u, \"time\": %lld, \"now_ns\": %llu,\n",
                     world->restart_count, (long long)time(NULL), (unsigned long long)now);
    dtrain__dump_add(dump, " \"result\": %d, ", (int)flight->code);
    dtrain__dump_text(dump, "error", flight->error);
    dtrain__dump_add(dump, ", \"waits_for\": %d, \"first_failed\": %d,\n \"ranks\": [",
                     dtrain__waits(world, world->rank), dtrain__first_failure(world->control));
    dtrain__dump_ranks(dump, world, now);
    dtrain__dump_add(dump, "],\n \"communicators\": [");
    dtrain__dump_communicators(dump, world);
    dtrain__dump_add(dump, "],\n \"collectives\": [");
    for (uint64_t i = oldest; i <= flight->count; i++) {
        dtrain__dump_add(dump, "%s", i > oldest ? ",\n  " : "\n  ");
        dtrain__dump_record(dump, &flight->records[i % DTRAIN__FLIGHT_RECORDS]);
    }
    dtrain__dump_add(dump, "]}\n");
    dtrain__dump_flush(dump);
}

/* Write DIRECTORY/flight-RANK.json: under another name first, so that nobody reads half of it. */
static dtrain_result dtrain__dump_write(const dtrain_world *world, const char *directory)
{
    char path[1100], temporary[1120];
    dtrain__dump dump;
    dump.error = 0;
    dump.used = 0;
    if (snprintf(path, sizeof path, "%s/flight-%d.json", directory, world->rank) >=
        (int)sizeof path)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_world_dump: \"%.60s...\" is too long",
                           directory);
    snprintf(temporary, sizeof temporary, "%s.tmp", path);
    if (mkdir(directory, 0777) != 0 && errno != EEXIST)
        return dtrain_fail(DTRAIN_ERROR_SYSTEM, "dtrain_world_dump: mkdir %s: %s", directory,
                           strerror(errno));
    dump.file = dtrain__open(temporary, O_WRONLY | O_CREAT | O_TRUNC);
    if (dump.file < 0)
        return dtrain_fail(DTRAIN_ERROR_SYSTEM, "dtrain_world_dump: open %s: %s", temporary,
                           strerror(errno));
    dtrain__dump_all(&dump, world);
    if (close(dump.file) != 0 && !dump.error) dump.error = errno;
    if (!dump.error && rename(temporary, path) != 0) dump.error = errno;
    if (!dump.error) return DTRAIN_OK;
    unlink(temporary);
    return dtrain_fail(DTRAIN_ERROR_SYSTEM, "dtrain_world_dump: %s: %s", path,
                       strerror(dump.error));
}

/* The dump of a failure stands: what comes after it is a consequence. */
DTRAIN_API dtrain_result dtrain_world_dump(dtrain_world *world, const char *directory)
{
    if (!world || !directory || !directory[0])
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_world_dump: %s",
                           world ? "no directory" : "world is NULL");
    DTRAIN__TRY(dtrain__world_check(world, "dtrain_world_dump"));
    const dtrain__flight *flight = world->flight;
    if (flight->code != DTRAIN_OK && strcmp(directory, flight->directory) == 0) return DTRAIN_OK;
    return dtrain__dump_write(world, directory);
}

/* Note the first failure of this rank, as its last error tells it, and dump if the launch desc says
 * where. The last error is the failure's afterwards, too. */
DTRAIN__PRIVATE void dtrain__flight_fail(dtrain_world *world, dtrain_result code)
{
    dtrain__flight *flight = world->flight;
    char found[DTRAIN__ERROR_BYTES];
    if (!flight || code == DTRAIN_OK || flight->code != DTRAIN_OK) return;
    const uint64_t now = dtrain__now_ns();
    dtrain__flight_look(world, now);
    flight->code = code;
    snprintf(found, sizeof found, "%s", dtrain_last_error());
    snprintf(flight->error, sizeof flight->error, "%s", dtrain__bare(found));
    for (uint32_t i = 0; i < DTRAIN__FLIGHT_RECORDS; i++) {
        dtrain__flight_record *record = &flight->records[i];
        if (!record->queued_ns || record->state >= DTRAIN__FLIGHT_DONE) continue;
        record->state = DTRAIN__FLIGHT_FAILED;
        record->ended_ns = now;
    }
    if (!flight->directory[0]) return;
    if (dtrain__dump_write(world, flight->directory) != DTRAIN_OK)
        dtrain_log(world, DTRAIN_LOG_WARNING, "%s", dtrain__bare(dtrain_last_error()));
    dtrain__set_last_error(found);
}
