/* Saving
 *
 *     plan        assign each piece of a tensor that this rank writes a place in one of two files:
 *                 values, and all else. This happens once, when the directory is opened
 *     snapshot    copy the pieces to host memory, if a thread writes in the background
 *     write       write both files, block by block. The header comes last, because it has the
 *                 checksums of the blocks. A rename marks the file as whole and on the disk
 *     publish     rank 0 reads all headers, writes the manifest, renames the directory and removes
 *                 old checkpoints
 *     settle      all ranks agree whether the save succeeded
 *
 * In the background, snapshot belongs to one call and settle to the next:
 *
 *     every rank         save(n): settle n-1 | snapshot |   training   | save(n+1): settle n | ...
 *     thread of a rank                                  | write |
 *     thread of rank 0                                  | write | publish |
 *
 * Otherwise one call does snapshot to settle. The thread must not call a collective: its place
 * among the collectives of training would differ from rank to rank. Therefore the thread of rank 0
 * polls the shared directory for the files of the other ranks. If a rank has failed to write, rank
 * 0 learns of it when it settles, and tells its thread to stop polling. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/crc32c_internal.h"
#include "core/json_internal.h"
#include "core/log.h"
#include "core/result.h"
#include "world/timeline_internal.h"
#include "world/world_internal.h"
#include "comm/comm.h"
#include "comm/same_internal.h"
#include "strategy/view_internal.h"
#include "state/checkpoint_internal.h"
#include "state/safetensors_internal.h"
#include "state/state_internal.h"
#include "state/storage_internal.h"
#include "device/backend.h"

#define DTRAIN__POLL_MS 10     /* interval of polls for a file of another rank */
#define DTRAIN__SHARED_MS 5000 /* longest delay until one host sees the file of another host */

/* Return a result together with the sentence of the last error. */
DTRAIN__PRIVATE dtrain__outcome dtrain__outcome_of(dtrain_result result)
{
    dtrain__outcome outcome;
    outcome.result = result;
    snprintf(outcome.text, sizeof outcome.text, "%s", result ? dtrain_last_error() : "");
    return outcome;
}

/* Return the result, and restore its sentence as the last error. */
DTRAIN__PRIVATE dtrain_result dtrain__outcome_return(const dtrain__outcome *outcome)
{
    if (outcome->result == DTRAIN_OK) return DTRAIN_OK;
    return dtrain__set_last_error(outcome->result, outcome->text);
}

static void dtrain__poll_sleep(void)
{
    const struct timespec nap = {0, DTRAIN__POLL_MS * 1000000L};
    nanosleep(&nap, NULL);
}

/* ---- Plan -------------------------------------------------------------------------------------*/

/* Order pieces by file, then by element size, largest first, so that every piece is aligned. */
static int dtrain__file_order(const void *left, const void *right)
{
    const dtrain_state_tensor *a = &((const dtrain__held *)left)->tensor;
    const dtrain_state_tensor *b = &((const dtrain__held *)right)->tensor;
    const int files = (a->kind != DTRAIN_STATE_VALUE) - (b->kind != DTRAIN_STATE_VALUE);
    const int widths = (int)dtrain__state_bytes(b->dtype) - (int)dtrain__state_bytes(a->dtype);
    return files ? files : widths ? widths : dtrain__held_order(left, right);
}

/* Place the pieces that this rank writes in its two files, and allocate checksums and, if needed,
 * the snapshot or the bounce buffer. A piece without elements is left out, unless the whole tensor
 * has none: then the header lists it. */
static dtrain_result dtrain__save_plan(dtrain_checkpoint *c)
{
    dtrain_device *device = c->desc.state->device;
    size_t copied = 0, count = 0;
    void *memory;
    for (size_t i = 0; i < c->held_count; i++) {
        const dtrain__held *held = &c->held[i];
        if (held->rank == c->rank && (held->tensor.piece.count || !held->tensor.total))
            c->held[count++] = *held;
    }
    c->held_count = count;
    qsort(c->held, count, sizeof *c->held, dtrain__file_order);
    c->crc_bytes = 1;
    for (size_t i = 0; i < count; i++) {
        dtrain__held *held = &c->held[i];
        dtrain__write_file *file = &c->files[held->tensor.kind != DTRAIN_STATE_VALUE];
        const uint64_t bytes = dtrain__held_bytes(held);
        held->at = (int64_t)file->bytes;
        if (!file->count++) file->first = i;
        file->bytes += bytes;
        c->crc_bytes += dtrain__blocks_of(bytes) * DTRAIN__CRC_DIGITS;
        copied += dtrain__round_up((size_t)bytes, DTRAIN__CACHE_LINE);
    }
    c->crcs = (char *)dtrain__alloc(&c->allocator, c->crc_bytes, 1, "checksums");
    if (!c->crcs) return DTRAIN_ERROR_MEMORY;
    memset(c->crcs, '0', c->crc_bytes);
    if (c->desc.background && copied) {
        DTRAIN__TRY(device->ops->host_alloc(device, copied, &memory));
        c->snapshot = (char *)memory;
        c->info.snapshot_bytes = copied;
    } else if (!device->ops->host_memory) {
        c->bounce = (char *)dtrain__alloc(&c->allocator, DTRAIN__BLOCK, 1, "a bounce buffer");
        if (!c->bounce) return DTRAIN_ERROR_MEMORY;
    }
    char *copy = c->snapshot, *crc = c->crcs;
    for (size_t i = 0; i < count; i++) {
        const uint64_t bytes = dtrain__held_bytes(&c->held[i]);
        c->held[i].copy_at = copy;
        c->held[i].crc = crc;
        if (copy) copy += dtrain__round_up((size_t)bytes, DTRAIN__CACHE_LINE);
        crc += dtrain__blocks_of(bytes) * DTRAIN__CRC_DIGITS;
    }
    for (int f = 0; f < 2; f++) DTRAIN__TRY(dtrain__file_header(c, &c->files[f]));
    return DTRAIN_OK;
}

/* ---- Write ------------------------------------------------------------------------------------*/

/* Write a piece block by block, and keep the checksum of each block. `data` is the offset of the
 * file's data. */
static dtrain_result dtrain__piece_write(const dtrain_checkpoint *c, int file, const char *path,
                                         uint64_t data, const dtrain__held *held)
{
    const char *from = held->copy_at ? held->copy_at : (const char *)held->tensor.memory;
    const uint64_t bytes = dtrain__held_bytes(held);
    char *crc = c->crcs + (held->crc - c->crcs), digits[DTRAIN__CRC_DIGITS + 1];
    for (uint64_t done = 0; done < bytes; done += DTRAIN__BLOCK, crc += DTRAIN__CRC_DIGITS) {
        const size_t count = (size_t)dtrain__min((int64_t)(bytes - done), (int64_t)DTRAIN__BLOCK);
        const char *block = from + done;
        if (c->bounce) {
            DTRAIN__TRY(dtrain_device_copy(c->desc.state->device, c->bounce, block, count));
            block = c->bounce;
        }
        snprintf(digits, sizeof digits, "%08x", dtrain__crc32c(0, block, count));
        memcpy(crc, digits, DTRAIN__CRC_DIGITS);
        DTRAIN__TRY(dtrain__storage_write(c->folder.storage, file, path, block, count,
                                          data + (uint64_t)held->at + done));
    }
    return DTRAIN_OK;
}

/* Write both files of this rank to the directory step-N.tmp. */
static dtrain_result dtrain__save_write(dtrain_checkpoint *c)
{
    const dtrain_storage *storage = c->folder.storage;
    const dtrain__file_path directory = dtrain__step_path(&c->folder, c->step, ".tmp");
    c->bytes = 0;
    for (int f = 0; f < 2; f++) {
        dtrain__write_file *plan = &c->files[f];
        const dtrain__file_path path = dtrain__tensors_path(directory.text, f, c->rank);
        const dtrain__file_path tmp =
            dtrain__path_in(directory.text, "%s-%05d.tmp", f ? "state" : "model", c->rank);
        const uint64_t data = plan->header.bytes; /* offset of the data */
        dtrain_result result = DTRAIN_OK;
        int file;
        DTRAIN__TRY(dtrain__storage_open(storage, tmp.text, DTRAIN_STORAGE_CREATE, &file));
        for (size_t i = 0; i < plan->count && result == DTRAIN_OK; i++)
            result = dtrain__piece_write(c, file, tmp.text, data, &c->held[plan->first + i]);
        if (result == DTRAIN_OK) result = dtrain__file_header(c, plan);
        if (result == DTRAIN_OK)
            result =
                dtrain__storage_write(storage, file, tmp.text, plan->header.at, (size_t)data, 0);
        DTRAIN__TRY(dtrain__storage_finish(storage, file, tmp.text, result));
        /* publishing syncs the directory, and with it all names at once */
        const int code = storage->rename(storage->user, tmp.text, path.text);
        if (code < 0) return dtrain__storage_fail(tmp.text, "renamed", code);
        c->bytes += data + plan->bytes;
    }
    return DTRAIN_OK;
}

/* ---- The directory ----------------------------------------------------------------------------*/

/* On rank 0, set aside the checkpoints of steps later than `next`, the step to save, or than the
 * step that the state was loaded from or saved as; if they are of another run, all of them. */
static dtrain_result dtrain__history_turn(dtrain_checkpoint *c, int64_t next)
{
    const dtrain_state *state = c->desc.state;
    const int64_t above = state->run == c->run ? dtrain__min(state->step, next) : -1;
    dtrain__file_path aside;
    c->run = state->run;
    DTRAIN__TRY(dtrain__set_aside(&c->folder, above, &aside));
    if (aside.text[0])
        dtrain_log(c->world, DTRAIN_LOG_WARNING,
                   "checkpoints that this run does not go on from were set aside, in %s",
                   aside.text);
    return DTRAIN_OK;
}

/* On rank 0, check that the directory is empty or has a checkpoint of the state's run; or, with
 * set_aside, move the others away. A new run takes the number of its job as its own. */
static dtrain_result dtrain__history_join(dtrain_checkpoint *c)
{
    dtrain_state *state = c->desc.state;
    dtrain__steps list;
    dtrain__manifest manifest;
    DTRAIN__TRY(dtrain__steps_list(&c->folder, "", &list));
    bool ours = list.count == 0;
    for (size_t i = 0; i < list.count && !ours && state->step >= 0; i++) {
        const dtrain__file_path path = dtrain__key_path(&c->folder, list.keys[i]);
        if (dtrain__manifest_read(&c->folder, path.text, &manifest) != DTRAIN_OK) continue;
        ours = manifest.run == state->run;
        dtrain__manifest_free(&manifest);
    }
    const int64_t newest = list.count ? list.keys[0] / 2 : -1;
    dtrain__steps_free(&list);
    if (!ours && !c->desc.set_aside)
        return dtrain_fail(
            DTRAIN_ERROR_DATA,
            "%s has checkpoints of another run, the newest of step %lld: load it and "
            "go on, save to another directory, or set them aside",
            c->folder.path, (long long)newest);
    if (!state->run) state->run = c->world->job;
    c->run = ours ? state->run : 0;
    return dtrain__history_turn(c, INT64_MAX);
}

/* On rank 0, make the directory, lock it, remove what a crash has left, and check its history.
 * After a directory is made, its parent is synced: otherwise a loss of power could take the
 * directory with all checkpoints. */
static dtrain_result dtrain__directory_take(dtrain_checkpoint *c)
{
    const dtrain_storage *storage = c->folder.storage;
    const char *const all = c->folder.path, *unlocked = getenv("DTRAIN_NO_LOCK");
    const dtrain__file_path lock = dtrain__path_in(all, "lock");
    for (size_t end = 1, length = strlen(all); end <= length; end++) {
        dtrain__file_path path;
        if (end < length && all[end] != '/') continue;
        snprintf(path.text, sizeof path.text, "%.*s", (int)end, all);
        const dtrain__file_path above = dtrain__directory_of(path.text);
        const int made = storage->make_directory(storage->user, path.text);
        if (made < 0 && made != -EEXIST && (end == length || (made != -EROFS && made != -EACCES)))
            return dtrain__storage_fail(path.text, "made", made);
        if (made >= 0) DTRAIN__TRY(dtrain__storage_sync_directory(storage, above.text));
    }
    c->lock = dtrain__storage_try(storage, lock.text, DTRAIN_STORAGE_LOCK);
    if (c->lock == -EAGAIN)
        return dtrain_fail(DTRAIN_ERROR_USAGE,
                           "another run saves checkpoints to %s (its lock is held); end it, or use "
                           "another directory",
                           all);
    const bool lockless = c->lock == -ENOSYS || c->lock == -EOPNOTSUPP || c->lock == -ENOLCK;
    if (lockless && (!unlocked || strcmp(unlocked, "1") != 0))
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "%s is on a file system without locks (flock: %s): nothing would stop a "
                           "second run from saving to it; use another directory, or set "
                           "DTRAIN_NO_LOCK=1 if only one run saves there",
                           all, strerror(-c->lock));
    if (c->lock < 0 && !lockless) return dtrain__storage_fail(lock.text, "opened", c->lock);
    DTRAIN__TRY(dtrain__remove_unfinished(&c->folder));
    return dtrain__history_join(c);
}

/* Plan the files, lock the directory, and probe it on every rank: each rank writes a small file and
 * waits until it sees the file of rank 0. */
static dtrain_result dtrain__directory_open(dtrain_checkpoint *c)
{
    const dtrain_storage *storage = c->folder.storage;
    int64_t token = (int64_t)(dtrain__now_ns() ^ ((uint64_t)getpid() << 40));
    char text[64];
    dtrain_result result = dtrain__save_plan(c);
    if (result == DTRAIN_OK && c->rank == 0) result = dtrain__directory_take(c);
    DTRAIN__TRY(dtrain__agree(c->comm, result));
    DTRAIN__TRY(dtrain_broadcast(c->comm, &token, 1, DTRAIN_DTYPE_I64, 0, NULL));
    const unsigned long long number = (unsigned long long)token;
    const dtrain__file_path mine =
        dtrain__path_in(c->folder.path, "probe-%llx-%05d", number, c->rank);
    const dtrain__file_path first = dtrain__path_in(c->folder.path, "probe-%llx-%05d", number, 0);
    const double deadline = dtrain_seconds() + 1e-3 * DTRAIN__SHARED_MS;
    snprintf(text, sizeof text, "rank %d can write here\n", c->rank);
    result = dtrain__storage_put(storage, mine.text, text, strlen(text));
    while (result == DTRAIN_OK &&
           dtrain__storage_probe(storage, first.text, DTRAIN_STORAGE_READ) < 0) {
        if (dtrain_seconds() > deadline)
            result = dtrain_fail(DTRAIN_ERROR_FILE,
                                 "rank %d does not see what rank 0 has written to %s: checkpoints "
                                 "need a directory that all hosts share",
                                 c->rank, c->folder.path);
        else dtrain__poll_sleep();
    }
    result = dtrain__agree(c->comm, result);
    (void)storage->remove(storage->user, mine.text);
    return result;
}

/* ---- Publishing -------------------------------------------------------------------------------*/

/* Remove the checkpoints that neither `keep` nor `keep_best` keeps. If one cannot be removed, warn:
 * the save itself has succeeded. A metric that is missing or not finite counts as DBL_MAX; the test
 * reads the exponent bits, because -ffast-math would drop a comparison. Of equal metrics the newer
 * is better. */
static dtrain_result dtrain__retain(dtrain_checkpoint *c)
{
    dtrain__steps list;
    dtrain__manifest manifest;
    if (c->desc.keep == DTRAIN_KEEP_ALL) return DTRAIN_OK;
    DTRAIN__TRY(dtrain__steps_list(&c->folder, "", &list));
    double *metrics =
        (double *)dtrain__alloc(&c->allocator, list.count, sizeof *metrics, "metrics");
    for (size_t i = 0; i < list.count && metrics && c->desc.keep_best; i++) {
        const dtrain__file_path path = dtrain__key_path(&c->folder, list.keys[i]);
        metrics[i] = DBL_MAX;
        if (dtrain__manifest_read(&c->folder, path.text, &manifest) != DTRAIN_OK) continue;
        if ((manifest.metric_bits >> 52 & 0x7ff) != 0x7ff)
            memcpy(&metrics[i], &manifest.metric_bits, sizeof *metrics);
        dtrain__manifest_free(&manifest);
    }
    for (size_t i = c->desc.keep; i < list.count && metrics; i++) {
        uint32_t better = 0;
        for (size_t k = 0; k < list.count; k++)
            better += metrics[k] < metrics[i] || (k < i && metrics[k] <= metrics[i]);
        const bool best = metrics[i] < DBL_MAX && better < c->desc.keep_best;
        if (list.keys[i] / 2 == c->step || best) continue;
        if (dtrain__step_remove(&c->folder, list.keys[i] / 2, list.keys[i] % 2 ? "" : ".old"))
            dtrain_log(c->world, DTRAIN_LOG_WARNING, "an old checkpoint stays: %s",
                       dtrain__bare(dtrain_last_error()));
    }
    dtrain__free(&c->allocator, metrics, list.count, sizeof *metrics);
    dtrain__steps_free(&list);
    return DTRAIN_OK;
}

/* On rank 0, wait for the files of every rank, write the manifest, and publish the checkpoint.
 * Without a thread all ranks have written before this call, but a shared file system can show
 * their files late. */
static dtrain_result dtrain__publish(dtrain_checkpoint *c)
{
    const dtrain__file_path directory = dtrain__step_path(&c->folder, c->step, ".tmp");
    const dtrain__file_path path = dtrain__path_in(directory.text, "manifest.json");
    dtrain__text *manifest = &c->head;
    for (int f = 0; f < 2 * c->ranks; f++) {
        const dtrain__file_path file = dtrain__tensors_path(directory.text, f % 2, f / 2);
        dtrain__tensor_file header;
        dtrain_result result;
        while ((result = dtrain__safetensors_read(c->folder.storage, file.text, NULL, &c->allocator,
                                                  &header)) != DTRAIN_OK) {
            pthread_mutex_lock(&c->mutex);
            const double deadline = c->deadline;
            pthread_mutex_unlock(&c->mutex);
            if (dtrain_seconds() > deadline) return result;
            dtrain__poll_sleep();
        }
        dtrain__text_add(manifest, "%08x", header.crc);
        dtrain__safetensors_free(&header);
    }
    dtrain__manifest_seal(manifest);
    if (manifest->failed) return DTRAIN_ERROR_MEMORY;
    DTRAIN__TRY(dtrain__storage_put(c->folder.storage, path.text, manifest->at, manifest->bytes));
    DTRAIN__TRY(dtrain__publish_step(&c->folder, c->step));
    return dtrain__retain(c);
}

/* ---- The thread that writes -------------------------------------------------------------------*/

/* Record the outcome of a phase, and wake the thread that waits for it. */
static void dtrain__phase_end(dtrain_checkpoint *c, uint32_t phase, dtrain_result result)
{
    pthread_mutex_lock(&c->mutex);
    c->outcomes[phase] = dtrain__outcome_of(result);
    c->ended = phase + 1;
    pthread_cond_broadcast(&c->moved);
    pthread_mutex_unlock(&c->mutex);
}

/* Write this rank's files. In the background, rank 0 also publishes the checkpoint. */
static void *dtrain__save_thread(void *argument)
{
    dtrain_checkpoint *c = (dtrain_checkpoint *)argument;
    const bool threaded = c->threaded;
    c->thread_ns[0] = threaded ? dtrain__now_ns() : 0;
    const dtrain_result result = dtrain__save_write(c);
    c->written_at = dtrain_seconds();
    c->thread_ns[1] = dtrain__now_ns();
    dtrain__phase_end(c, DTRAIN__SAVE_WRITE, result);
    if (c->rank == 0 && threaded)
        dtrain__phase_end(c, DTRAIN__SAVE_PUBLISH,
                          result == DTRAIN_OK ? dtrain__publish(c) : result);
    c->thread_ns[2] = dtrain__now_ns();
    return NULL;
}

/* Wait until a phase has ended, at most for the world's timeout, and return its outcome. */
static dtrain_result dtrain__phase_await(dtrain_checkpoint *c, uint32_t phase)
{
    struct timespec end;
    clock_gettime(CLOCK_MONOTONIC, &end);
    end.tv_sec += (time_t)(c->world->timeout_ns / 1000000000u) + 1;
    int error = 0;
    pthread_mutex_lock(&c->mutex);
    while (c->ended <= phase && error != ETIMEDOUT)
        error = pthread_cond_timedwait(&c->moved, &c->mutex, &end);
    const bool ended = c->ended > phase;
    pthread_mutex_unlock(&c->mutex);
    if (ended) return dtrain__outcome_return(&c->outcomes[phase]);
    return dtrain_fail(DTRAIN_ERROR_TIMEOUT,
                       "checkpoint of step %lld: rank %d has not written its files in %.1f s; "
                       "is the disk still there?",
                       (long long)c->step, c->rank, 1e-9 * (double)c->world->timeout_ns);
}

/* ---- Save -------------------------------------------------------------------------------------*/

/* Fail with the error of the newest save, and say which steps are lost. */
static dtrain_result dtrain__save_lost(const dtrain_checkpoint *c)
{
    char lost[80] = "this run has saved nothing, and what it trained is lost";
    if (c->info.last_step >= 0)
        snprintf(lost, sizeof lost, "what was trained after step %lld, the newest saved, is lost",
                 (long long)c->info.last_step);
    return dtrain_fail(c->lost.result, "the checkpoint of step %lld was not saved: %s; %s",
                       (long long)c->step, dtrain__bare(c->lost.text), lost);
}

/* Count a save that has ended. desc.failures failed saves in a row are warnings, and the next one
 * is an error. A failure is an error at once if the communicator has failed, and in a wait or close
 * (`last`), whose caller relies on the save. The files of a failed save are removed, because they
 * can be what filled the disk. */
static dtrain_result dtrain__save_count(dtrain_checkpoint *c, dtrain_result result, bool last)
{
    if (result == DTRAIN_OK) {
        c->info.saved++;
        c->info.last_step = c->step;
        c->failures = 0;
        dtrain_world_progress(c->world, (uint64_t)c->step);
        return DTRAIN_OK;
    }
    c->lost = dtrain__outcome_of(result);
    c->info.failed++;
    c->failures++;
    if (c->rank == 0 && !c->abandoned) (void)dtrain__remove_unfinished(&c->folder);
    if (result == DTRAIN_ERROR_PEER || result == DTRAIN_ERROR_MISMATCH ||
        result == DTRAIN_ERROR_TIMEOUT)
        return dtrain__outcome_return(&c->lost);
    if (last || c->failures > c->desc.failures) return dtrain__save_lost(c);
    if (c->rank == 0)
        dtrain_log(c->world, DTRAIN_LOG_WARNING,
                   "the checkpoint of step %lld was not saved, failure %u in a row of %u "
                   "tolerated: %s",
                   (long long)c->step, c->failures, c->desc.failures, dtrain__bare(c->lost.text));
    return DTRAIN_OK;
}

/* Settle the save under way, if there is one: all ranks return success, or all return one error. A
 * thread that is still blocked by the disk at the timeout is detached and left running. */
static dtrain_result dtrain__save_settle(dtrain_checkpoint *c, bool last)
{
    if (!c->outstanding) return last && c->failures ? dtrain__save_lost(c) : DTRAIN_OK;
    const dtrain_result mine = dtrain__phase_await(c, DTRAIN__SAVE_WRITE);
    const dtrain__outcome all = dtrain__outcome_of(dtrain__agree(c->comm, mine));
    /* the other ranks wait in the agreement below: rank 0 must give up before their timeout */
    const int64_t patience =
        dtrain__min(DTRAIN__SHARED_MS * (int64_t)1000000, (int64_t)c->world->timeout_ns / 2);
    dtrain_result published = DTRAIN_OK;
    pthread_mutex_lock(&c->mutex);
    c->deadline = dtrain_seconds() + (all.result == DTRAIN_OK ? 1e-9 * (double)patience : 0);
    pthread_mutex_unlock(&c->mutex);
    if (c->rank == 0 && c->threaded) published = dtrain__phase_await(c, DTRAIN__SAVE_PUBLISH);
    else if (c->rank == 0 && all.result == DTRAIN_OK) published = dtrain__publish(c);
    if (c->threaded) {
        c->abandoned = mine == DTRAIN_ERROR_TIMEOUT || published == DTRAIN_ERROR_TIMEOUT;
        if (c->abandoned) pthread_detach(c->thread);
        else pthread_join(c->thread, NULL);
        c->threaded = false;
    }
    const dtrain_result result =
        all.result != DTRAIN_OK ? dtrain__outcome_return(&all) : dtrain__agree(c->comm, published);
    c->outstanding = false;
    const uint64_t *at = c->thread_ns; /* the thread, which wrote these, has been joined */
    for (int i = 0; i < (c->rank == 0 ? 2 : 1); i++)
        if (c->world->timeline.traced && !c->abandoned && at[0])
            dtrain__span_add(c->world, DTRAIN__TRACK_CHECKPOINT, DTRAIN_SPAN_CHECKPOINT,
                             i ? "publish" : "write", NULL, c->step, at[i], at[i + 1]);
    c->info.bytes = c->bytes;
    c->info.write_seconds = c->written_at - c->begun;
    return dtrain__save_count(c, result, last);
}

/* Begin a save. Every rank takes its snapshot, if a thread will write. Rank 0 begins the manifest,
 * sets later checkpoints aside and makes the directory step-N.tmp. If the user has removed the
 * run's directory, the lock is gone with it: rank 0 makes and locks the directory again. Otherwise
 * rank 0 removes what a failed save has left. */
static dtrain_result dtrain__save_begin(dtrain_checkpoint *c)
{
    const dtrain_storage *storage = c->folder.storage;
    dtrain_device *device = c->desc.state->device;
    const dtrain__file_path lock = dtrain__path_in(c->folder.path, "lock");
    const dtrain__file_path path = dtrain__step_path(&c->folder, c->step, ".tmp");
    for (size_t i = 0; i < c->held_count && c->desc.background; i++) {
        const dtrain__held *held = &c->held[i];
        const char *from = (const char *)held->tensor.memory;
        const size_t bytes = (size_t)dtrain__held_bytes(held);
        if (!bytes) continue;
        if (device->ops->host_memory) dtrain__copy_lines(held->copy_at, from, bytes, true);
        else DTRAIN__TRY(dtrain_device_copy(device, held->copy_at, from, bytes));
    }
    if (c->rank != 0) return DTRAIN_OK;
    dtrain__text_free(&c->head);
    c->head.failed = false;
    dtrain__manifest_head(&c->head, c);
    if (c->head.failed) return DTRAIN_ERROR_MEMORY;
    if (dtrain__storage_probe(storage, lock.text, DTRAIN_STORAGE_READ) == -ENOENT) {
        dtrain_log(c->world, DTRAIN_LOG_WARNING,
                   "%s was removed while the run saves to it; it is made again", c->folder.path);
        if (c->lock >= 0) (void)storage->close(storage->user, c->lock);
        DTRAIN__TRY(dtrain__directory_take(c));
    } else DTRAIN__TRY(dtrain__remove_unfinished(&c->folder));
    DTRAIN__TRY(dtrain__history_turn(c, c->step));
    c->desc.state->step = c->step;
    const int code = storage->make_directory(storage->user, path.text);
    return code >= 0 ? DTRAIN_OK : dtrain__storage_fail(path.text, "made", code);
}

/* Settle the previous save, agree on the step, and save. A thread that writes blocks all signals,
 * so that it never runs a signal handler of the host program. */
static dtrain_result dtrain__save(dtrain_checkpoint *c, int64_t step, double metric)
{
    static const char call[] = "dtrain_checkpoint_save";
    static const dtrain__same_field field = {"step", 0, sizeof step, DTRAIN__SAME_INT};
    const dtrain__same_list list = dtrain__same_struct(&field, 1, &step);
    const dtrain__state_source *trainer = dtrain__source_of(c->desc.state->desc.trainer);
    const double start = dtrain_seconds();
    DTRAIN__TRY(dtrain__save_settle(c, false));
    dtrain_result result = dtrain__between_steps(c->desc.state->desc.strategy, call);
    if (result == DTRAIN_OK && trainer && *trainer->micro != 0)
        result = dtrain_fail(DTRAIN_ERROR_USAGE,
                             "%s: a step is under way, whose micro-batches are not all done; save "
                             "between two steps",
                             call);
    if (result == DTRAIN_OK && (step < 0 || step > DTRAIN__STEP_MOST))
        result = dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: step is %lld, expected 0 to %lld", call,
                             (long long)step, (long long)DTRAIN__STEP_MOST);
    DTRAIN__TRY(dtrain__same(c->comm, result, call, &list, 1));
    DTRAIN__TRY(dtrain__compare_now(c->desc.state->desc.strategy, call));
    c->step = step;
    c->metric = metric;
    c->begun = start;
    c->deadline = start + 1e-9 * (double)c->world->timeout_ns;
    c->ended = 0;
    c->thread_ns[0] = 0;
    result = dtrain__agree(c->comm, dtrain__save_begin(c));
    c->outstanding = result == DTRAIN_OK;
    if (!c->outstanding) result = dtrain__save_count(c, result, false); /* no rank writes */
    else if (!c->desc.background) {
        (void)dtrain__save_thread(c);
        result = dtrain__save_settle(c, false);
    } else {
        c->threaded = true;
        const int error = dtrain__thread_start(&c->thread, dtrain__save_thread, c);
        if (error) {
            c->threaded = false;
            dtrain__phase_end(
                c, DTRAIN__SAVE_WRITE,
                dtrain_fail(DTRAIN_ERROR_SYSTEM,
                            "a thread that writes the checkpoint could not be made: %s",
                            strerror(error)));
        }
    }
    c->info.stall_seconds = dtrain_seconds() - start;
    return result;
}

DTRAIN_API dtrain_result dtrain_checkpoint_save(dtrain_checkpoint *checkpoint, int64_t step,
                                                double metric)
{
    DTRAIN__GIVEN("dtrain_checkpoint_save", checkpoint);
    dtrain_world *world = checkpoint->world;
    const uint32_t span = dtrain__span_begin(world, DTRAIN_SPAN_CHECKPOINT, "save", step);
    const dtrain_result result = dtrain__save(checkpoint, step, metric);
    dtrain__span_end(world, span);
    return result;
}

DTRAIN_API dtrain_result dtrain_checkpoint_wait(dtrain_checkpoint *checkpoint)
{
    DTRAIN__GIVEN("dtrain_checkpoint_wait", checkpoint);
    dtrain_world *world = checkpoint->world;
    const uint32_t span =
        dtrain__span_begin(world, DTRAIN_SPAN_CHECKPOINT, "wait for save", DTRAIN__UNNUMBERED);
    const dtrain_result result = dtrain__save_settle(checkpoint, true);
    dtrain__span_end(world, span);
    return result;
}

DTRAIN_API void dtrain_checkpoint_query(const dtrain_checkpoint *checkpoint,
                                        dtrain_checkpoint_info *info)
{
    dtrain__give(dtrain__abi_of(checkpoint ? checkpoint->world : NULL), DTRAIN__ABI_checkpoint_info,
                 checkpoint ? &checkpoint->info : NULL, info);
}

/* ---- Life -------------------------------------------------------------------------------------*/

DTRAIN_API dtrain_result dtrain_checkpoint_open(dtrain_world *world,
                                                const dtrain_checkpoint_desc *desc,
                                                dtrain_checkpoint **out)
{
    static const char call[] = "dtrain_checkpoint_open";
    dtrain_checkpoint *c = NULL;
    if (out) *out = NULL;
    DTRAIN__GIVEN(call, desc);
    DTRAIN__TAKE(dtrain__abi_of(world), checkpoint_desc, desc);
    const char *null = !world ? "world" : !out ? "out" : !desc->state ? "desc->state" : NULL;
    dtrain_result result = null ? dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: %s is NULL", call, null)
                                : dtrain__path_check(call, desc->directory);
    if (!desc->state) return result; /* no communicator to agree on the error */
    dtrain_comm *comm = desc->state->comm;
    if (result == DTRAIN_OK && desc->config && strlen(desc->config) > DTRAIN__TEXT_MOST)
        result = dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: config has more than %d bytes", call,
                             DTRAIN__TEXT_MOST);
    if (result == DTRAIN_OK) {
        c = (dtrain_checkpoint *)dtrain__alloc(&world->allocator, 1, sizeof *c, "checkpoints");
        result = c ? DTRAIN_OK : DTRAIN_ERROR_MEMORY;
    }
    if (c) {
        c->allocator = world->allocator;
        c->world = world;
        c->desc = *desc;
        c->comm = comm;
        c->rank = dtrain_comm_rank(comm);
        c->ranks = dtrain_comm_size(comm);
        c->desc.keep = desc->keep ? desc->keep : 3;
        c->folder.storage = dtrain__storage_or_files(desc->storage);
        c->folder.allocator = &c->allocator;
        c->folder.path = desc->directory;
        c->lock = -1;
        c->info.last_step = -1;
        c->head.allocator = &c->allocator;
        pthread_condattr_t monotonic;
        pthread_condattr_init(&monotonic);
        pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
        pthread_mutex_init(&c->mutex, NULL);
        pthread_cond_init(&c->moved, &monotonic);
        pthread_condattr_destroy(&monotonic);
    }
    result = dtrain__agree(comm, result);
    if (result == DTRAIN_OK) result = dtrain__pieces_choose(c);
    if (result == DTRAIN_OK) result = dtrain__directory_open(c);
    if (result == DTRAIN_OK) *out = c;
    else (void)dtrain_checkpoint_close(c);
    return result;
}

DTRAIN_API dtrain_result dtrain_checkpoint_close(dtrain_checkpoint *checkpoint)
{
    dtrain_checkpoint *c = checkpoint;
    if (!c) return DTRAIN_OK;
    const dtrain_allocator allocator = c->allocator;
    dtrain_device *device = c->desc.state->device;
    const dtrain_result result = dtrain__save_settle(c, true);
    if (c->abandoned) return result; /* the thread still reads this memory */
    if (c->lock >= 0) (void)c->folder.storage->close(c->folder.storage->user, c->lock);
    if (c->snapshot) device->ops->host_free(device, c->snapshot, c->info.snapshot_bytes);
    pthread_cond_destroy(&c->moved);
    pthread_mutex_destroy(&c->mutex);
    dtrain__text_free(&c->head);
    for (int f = 0; f < 2; f++) dtrain__text_free(&c->files[f].header);
    dtrain__free(&allocator, c->bounce, DTRAIN__BLOCK, 1);
    dtrain__free(&allocator, c->held, c->held_room, sizeof *c->held);
    dtrain__free(&allocator, c->held_names, c->held_names_bytes, 1);
    dtrain__free(&allocator, c->crcs, c->crc_bytes, 1);
    dtrain__free(&allocator, c, 1, sizeof *c);
    return result;
}
