/* Files that cannot stop a training
 *
 * A pipe without a reader (SIGPIPE) or a limit on the size of files (SIGXFSZ) is an error of the
 * write, not the end of the process. A record that was written in part is cut off again: a disk
 * that is full for a while costs whole records, and readers never see half a record. A pipe cannot
 * be cut: its next record begins with a line end. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/json_internal.h"
#include "core/result.h"
#include "monitor/monitor_internal.h"

DTRAIN__PRIVATE dtrain__text *dtrain__record_begin(dtrain_metrics *metrics)
{
    metrics->text.bytes = 0;
    metrics->text.failed = false;
    return &metrics->text;
}

/* Write all bytes, or *written of them. Block and accept the signal of a failed write, unless it
 * was pending before. */
static bool dtrain__records_write(const dtrain__records *file, const void *data, size_t bytes,
                                  size_t *written)
{
    const struct timespec at_once = {0, 0};
    sigset_t set, pending, blocked;
    sigemptyset(&pending);
    sigemptyset(&set);
    sigaddset(&set, SIGPIPE);
    sigaddset(&set, SIGXFSZ);
    sigpending(&pending);
    pthread_sigmask(SIG_BLOCK, &set, &blocked);
    errno = 0;
    *written = 0;
    if (file->stream) {
        if (fwrite(data, 1, bytes, file->stream) == bytes && fflush(file->stream) == 0)
            *written = bytes;
        else clearerr(file->stream);
    }
    for (ssize_t wrote = 0; !file->stream && *written < bytes; *written += (size_t)wrote) {
        wrote = write(file->fd, (const char *)data + *written, bytes - *written);
        if (wrote < 0 && errno == EINTR) wrote = 0;
        else if (wrote <= 0) break;
    }
    const int error = errno;
    sigemptyset(&set);
    if (error == EPIPE && sigismember(&pending, SIGPIPE) != 1) sigaddset(&set, SIGPIPE);
    if (error == EFBIG && sigismember(&pending, SIGXFSZ) != 1) sigaddset(&set, SIGXFSZ);
    if (error == EPIPE || error == EFBIG) sigtimedwait(&set, NULL, &at_once);
    pthread_sigmask(SIG_SETMASK, &blocked, NULL);
    errno = error;
    return *written == bytes;
}

/* Leave the error of a file: what failed, and the reason from errno. */
static dtrain_result dtrain__file_fail(const char *path, const char *done)
{
    return dtrain_fail(DTRAIN_ERROR_FILE, "%s cannot be %s: %s", path, done, strerror(errno));
}

/* Open a file for appending records. The open does not block: training must not wait for the reader
 * of a pipe. Cut off what follows the last line end of an existing file: an earlier run can have
 * been killed while it wrote a line. */
DTRAIN__PRIVATE dtrain_result dtrain__records_open(dtrain__records *file, const char *path,
                                                   bool append)
{
    char block[4096];
    struct stat status;
    const int how = O_WRONLY | O_CREAT | O_APPEND | O_NOCTTY | O_NONBLOCK;
    file->stream = NULL;
    file->path = path;
    file->partial = false;
    file->size = -1;
    file->fd = dtrain__open(path, append ? how : how | O_TRUNC);
    if (file->fd < 0)
        return dtrain_fail(DTRAIN_ERROR_FILE,
                           "dtrain_metrics_create: the file %s cannot be opened: %s", path,
                           errno == ENXIO ? "nobody reads this pipe" : strerror(errno));
    if (fstat(file->fd, &status) != 0 || !S_ISREG(status.st_mode)) return DTRAIN_OK;
    int64_t end = file->size = status.st_size;
    if (end == 0) return DTRAIN_OK;
    const int reader = dtrain__open(path, O_RDONLY);
    while (reader >= 0 && end > 0) {
        const int64_t first = dtrain__max(0, end - (int64_t)sizeof block);
        const ssize_t got = pread(reader, block, (size_t)(end - first), (off_t)first);
        if (got != end - first) break;
        while (end > first && block[end - first - 1] != '\n') end--;
        if (end > first) break;
    }
    if (reader >= 0) close(reader);
    if (end == file->size) return DTRAIN_OK;
    if (ftruncate(file->fd, (off_t)end) != 0) file->partial = true;
    else file->size = end;
    return DTRAIN_OK;
}

/* Append a record. After a failure none of it is in the file, or the file ends with a part. */
DTRAIN__PRIVATE dtrain_result dtrain__records_append(dtrain__records *file,
                                                     const dtrain__text *record)
{
    size_t written = 0;
    if (record->failed) return DTRAIN_ERROR_MEMORY;
    if (file->partial && dtrain__records_write(file, "\n", 1, &written)) {
        if (file->size >= 0) file->size++;
        file->partial = false;
    }
    if (!file->partial && dtrain__records_write(file, record->at, record->bytes, &written)) {
        if (file->size >= 0) file->size += (int64_t)record->bytes;
        return DTRAIN_OK;
    }
    const dtrain_result failed = dtrain__file_fail(file->path, "written");
    if (written > 0 && !file->stream)
        file->partial = file->size < 0 || ftruncate(file->fd, (off_t)file->size) != 0;
    return failed;
}

/* Close the file; network file systems report failed writes at close. */
DTRAIN__PRIVATE dtrain_result dtrain__records_close(dtrain__records *file)
{
    if (file->fd < 0) return DTRAIN_OK;
    const bool closed = close(file->fd) == 0 || errno == EINTR;
    file->fd = -1;
    return closed ? DTRAIN_OK : dtrain__file_fail(file->path, "closed");
}
