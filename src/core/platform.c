/* The clock, files, threads, free memory, and copies past the cache. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/log.h"

#ifdef __x86_64__
#include <emmintrin.h>
#endif

#if !defined(CLOCK_MONOTONIC) || !defined(MAP_ANONYMOUS)
#error "dtrain.h must come before any system header where DTRAIN_IMPLEMENTATION is defined"
#endif

DTRAIN_API double dtrain_seconds(void) { return 1e-9 * (double)dtrain__now_ns(); }

/* Move a new descriptor away from 0, 1 and 2. If the host has closed these, the next open gets one
 * of them, and printed text would go into a checkpoint or to another rank. Every call in src/ that
 * makes a descriptor uses this function. */
DTRAIN__PRIVATE int dtrain__above_stdio(int file)
{
    if (file < 0 || file > 2) return file;
    const int moved = fcntl(file, F_DUPFD_CLOEXEC, 3);
    const int error = errno;
    close(file);
    errno = error;
    return moved;
}

/* Open a file that child programs do not inherit. */
DTRAIN__PRIVATE int dtrain__open(const char *path, int flags)
{
    return dtrain__above_stdio(open(path, flags | O_CLOEXEC, 0666));
}

/* Make a file, to be renamed when it is complete. Remove an existing file of this name; never
 * follow a link. */
DTRAIN__PRIVATE int dtrain__open_new(const char *path)
{
    if (unlink(path) != 0 && errno != ENOENT) return -1;
    return dtrain__open(path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW);
}

/* Start a thread with all signals blocked: they stay with the rank's threads. Return its error. */
DTRAIN__PRIVATE int dtrain__thread_start(pthread_t *thread, void *(*run)(void *), void *user)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int error = pthread_create(thread, NULL, run, user);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

/* Open a directory, to be read and closed by readdir and closedir. */
DTRAIN__PRIVATE DIR *dtrain__open_directory(const char *path)
{
    const int file = dtrain__open(path, O_RDONLY | O_DIRECTORY);
    DIR *directory = file < 0 ? NULL : fdopendir(file);
    if (file >= 0 && !directory) close(file);
    return directory;
}

/* Return the start time of a process in the system's ticks, because another process can get its pid
 * later. Return 0 if it does not run (a process to be reaped has no threads) or /proc hides it. */
DTRAIN__PRIVATE uint64_t dtrain__process_started(int64_t pid)
{
    char path[64], text[1024] = "";
    /* The first thread's: qemu-user shows a process a different stat of itself. */
    snprintf(path, sizeof path, "/proc/%lld/task/%lld/stat", (long long)pid, (long long)pid);
    const int file = dtrain__open(path, O_RDONLY);
    if (file < 0 || read(file, text, sizeof text - 1) < 0) text[0] = 0;
    if (file >= 0) close(file);
    const char *at = strrchr(text, ')'); /* end of the name; the state and numbers follow */
    const bool ended = at && at[1] && (at[2] == 'Z' || at[2] == 'X');
    for (int i = 0; i < 18 && at; i++) at = strchr(at + 1, ' ');
    if (!at || (ended && strtol(at, NULL, 10) < 2)) return 0; /* threads */
    for (int i = 0; i < 2 && at; i++) at = strchr(at + 1, ' ');
    return at ? strtoull(at, NULL, 10) : 0;
}

/* ---- Memory -----------------------------------------------------------------------------------*/

DTRAIN__PRIVATE size_t dtrain__page_bytes(void)
{
    const long bytes = sysconf(_SC_PAGESIZE);
    return bytes > 0 ? (size_t)bytes : 4096;
}

/* Read the number after `key` at the start of a line of a text file; UINT64_MAX if there is none
 * (no file, no line, "max"). The buffer is small, because a rank's stack can be: an incomplete line
 * at its end is read again. */
static uint64_t dtrain__read_number(const char *path, const char *key)
{
    char text[1024], *end;
    ssize_t got;
    uint64_t number = UINT64_MAX;
    bool found = false;
    const int file = dtrain__open(path, O_RDONLY);
    for (off_t at = 0; file >= 0 && !found && (got = pread(file, text, sizeof text - 1, at)) > 0;) {
        char *line = text, *next;
        for (text[got] = 0; !found && ((next = strchr(line, '\n')) || line == text); line = next) {
            next = next ? next + 1 : text + got;
            found = strncmp(line, key, strlen(key)) == 0;
            if (found) number = strtoull(line + strlen(key), &end, 10);
            if (found && end == line + strlen(key)) number = UINT64_MAX;
        }
        at += line - text;
    }
    if (file >= 0) close(file);
    return number;
}

#define DTRAIN__GROUP_PATH 4200 /* bytes of a folder and a file name */

/* Return the memory that a control group has left: its limit minus the used memory without file
 * cache, which is freed when memory is needed. UINT64_MAX means no limit. folder has
 * DTRAIN__GROUP_PATH bytes, of which the last 32 are unused. */
static uint64_t dtrain__group_rest(char *folder, bool v2)
{
    static const char *const names[2][4] = {
        {"limit_in_bytes", "usage_in_bytes", "total_active_file ", "total_inactive_file "},
        {"max", "current", "active_file ", "inactive_file "}};
    uint64_t found[4] = {UINT64_MAX, UINT64_MAX, UINT64_MAX, UINT64_MAX};
    char *const end = folder + strlen(folder);
    for (int i = 0; i < 4 && (i == 0 || found[0] < INT64_MAX / 2);
         i++) {                                                         /* version 1 has a number */
        snprintf(end, 32, "/memory.%s", i < 2 ? names[v2][i] : "stat"); /* for no limit, too */
        found[i] = dtrain__read_number(folder, i < 2 ? "" : names[v2][i]);
    }
    *end = 0;
    if (found[1] == UINT64_MAX) return UINT64_MAX;
    const uint64_t rest = found[0] > found[1] ? found[0] - found[1] : 0;
    if (found[2] == UINT64_MAX || found[3] == UINT64_MAX) return rest;
    return rest + found[2] + found[3];
}

/* Return the least memory that is left in a control group of this process, from its own group (the
 * file `groups`: "0::/path" in version 2, "4:memory:/path" in version 1) up to the root: Slurm,
 * systemd and containers set limits at different levels. In a container the path can be the host's,
 * which does not exist below `mount`: the root of `mount` is then the container's group. */
DTRAIN__PRIVATE uint64_t dtrain__group_memory(const char *groups, const char *mount)
{
    char line[DTRAIN__GROUP_PATH]; /* becomes the folder that it names */
    const size_t most = sizeof line - 32 - sizeof "/memory";
    const size_t above = strlen(mount);
    if (above >= most) return UINT64_MAX;
    memcpy(line, mount, above + 1);
    uint64_t least = dtrain__group_rest(line, true);
    ssize_t got;
    const int file = dtrain__open(groups, O_RDONLY);
    for (off_t at = 0; file >= 0 && (got = pread(file, line, most - above, at)) > 0;) {
        line[got] = 0;
        const size_t length = strcspn(line, "\n");
        line[length] = 0;
        at += (off_t)length + 1;
        const char *kinds = strchr(line, ':'), *path = kinds ? strchr(kinds + 1, ':') : NULL;
        const char *memory = strstr(line, "memory");
        const bool v2 = path == kinds + 1;
        if (!path || (!v2 && (!memory || memory > path))) continue;
        const char *const between = v2 ? "" : "/memory";
        memmove(line + above + strlen(between), path + 1, strlen(path));
        memcpy(line, mount, above);
        memcpy(line + above, between, strlen(between));
        for (char *end = line; end; end = strrchr(line, '/')) {
            if (end > line) *end = 0;
            if (strlen(line) < above) break;
            const uint64_t rest = dtrain__group_rest(line, v2);
            least = rest < least ? rest : least;
        }
    }
    if (file >= 0) close(file);
    return least;
}

/* Estimate the memory that this process can still touch without swapping or being killed. */
DTRAIN__PRIVATE uint64_t dtrain__free_memory(void)
{
    uint64_t bytes = dtrain__read_number("/proc/meminfo", "MemAvailable:");
    if (bytes <= UINT64_MAX / 1024) bytes *= 1024;
    const uint64_t rest = dtrain__group_memory("/proc/self/cgroup", "/sys/fs/cgroup");
    return rest < bytes ? rest : bytes;
}

/* Return the proportional set size of this process in bytes; 0 if it is unknown. */
DTRAIN__PRIVATE uint64_t dtrain__process_bytes(void)
{
    const uint64_t kib = dtrain__read_number("/proc/self/smaps_rollup", "Pss:");
    return kib == UINT64_MAX ? 0 : kib * 1024;
}

/* Copy data that another core has written: memcpy's `rep movsb` takes twice as long (Zen 4). With
 * past_cache, write past the cache: this core's data stays in its cache, the written memory is not
 * read first, and no other core is asked for it. A copy of GPT-2's state (1.5 GB, Xeon) then takes
 * 0.6 of memcpy's time. */
DTRAIN__PRIVATE void dtrain__copy_lines(char *to, const char *from, size_t bytes, bool past_cache)
{
    size_t done = 0;
#ifdef __x86_64__
    const bool past = past_cache && (uintptr_t)to % 16 == 0;
    for (; done + 64 <= bytes; done += 64) {
        const __m128i *in = (const __m128i *)(const void *)(from + done);
        __m128i *out = (__m128i *)(void *)(to + done);
        __builtin_prefetch(from + done + 512);
        const __m128i a = _mm_loadu_si128(in), b = _mm_loadu_si128(in + 1);
        const __m128i c = _mm_loadu_si128(in + 2), d = _mm_loadu_si128(in + 3);
        if (past) {
            _mm_stream_si128(out, a);
            _mm_stream_si128(out + 1, b);
            _mm_stream_si128(out + 2, c);
            _mm_stream_si128(out + 3, d);
        } else {
            _mm_storeu_si128(out, a);
            _mm_storeu_si128(out + 1, b);
            _mm_storeu_si128(out + 2, c);
            _mm_storeu_si128(out + 3, d);
        }
    }
    if (past) _mm_sfence();
#else
    (void)past_cache;
#endif
    memcpy(to + done, from + done, bytes - done);
}
