/* The clock, and files. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/log.h"

#if !defined(CLOCK_MONOTONIC) || !defined(MAP_ANONYMOUS)
#error "dtrain.h must come before any system header where DTRAIN_IMPLEMENTATION is defined"
#endif

DTRAIN_API double dtrain_seconds(void) { return 1e-9 * (double)dtrain__now_ns(); }

/* Move a new descriptor away from 0, 1 and 2: where the host has closed those, the next open gets
 * one of them, and what somebody prints would go into a checkpoint or to another rank. Every call
 * in src/ that makes a descriptor goes through here. */
DTRAIN__PRIVATE int dtrain__above_stdio(int file)
{
    if (file < 0 || file > 2) return file;
    const int moved = fcntl(file, F_DUPFD_CLOEXEC, 3);
    const int error = errno;
    close(file);
    errno = error;
    return moved;
}

/* Open a file, which a program that this process starts does not inherit. */
DTRAIN__PRIVATE int dtrain__open(const char *path, int flags)
{
    return dtrain__above_stdio(open(path, flags | O_CLOEXEC, 0666));
}

/* Open a directory, to be read and closed by readdir and closedir. */
DTRAIN__PRIVATE DIR *dtrain__open_directory(const char *path)
{
    const int file = dtrain__open(path, O_RDONLY | O_DIRECTORY);
    DIR *directory = file < 0 ? NULL : fdopendir(file);
    if (file >= 0 && !directory) close(file);
    return directory;
}
