/* The clock, files, and how much memory there is. */

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

/* Make a file that is renamed when it is complete. What has its name is removed, never followed. */
DTRAIN__PRIVATE int dtrain__open_new(const char *path)
{
    if (unlink(path) != 0 && errno != ENOENT) return -1;
    return dtrain__open(path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW);
}

/* Open a directory, to be read and closed by readdir and closedir. */
DTRAIN__PRIVATE DIR *dtrain__open_directory(const char *path)
{
    const int file = dtrain__open(path, O_RDONLY | O_DIRECTORY);
    DIR *directory = file < 0 ? NULL : fdopendir(file);
    if (file >= 0 && !directory) close(file);
    return directory;
}

/* ---- Memory -----------------------------------------------------------------------------------*/

DTRAIN__PRIVATE size_t dtrain__page_bytes(void)
{
    const long bytes = sysconf(_SC_PAGESIZE);
    return bytes > 0 ? (size_t)bytes : 4096;
}

/* Read the number behind `key` at the start of a line of a small text file; UINT64_MAX when there
 * is none (no file, no line, "max"). */
static uint64_t dtrain__read_number(const char *path, const char *key)
{
    char text[8192];
    const int file = dtrain__open(path, O_RDONLY);
    if (file < 0) return UINT64_MAX;
    const ssize_t got = read(file, text, sizeof text - 1);
    close(file);
    text[got > 0 ? got : 0] = 0;
    for (const char *line = text; line; line = strchr(line, '\n')) {
        if (*line == '\n') line++;
        if (strncmp(line, key, strlen(key)) != 0) continue;
        char *end;
        const char *digits = line + strlen(key);
        const unsigned long long number = strtoull(digits, &end, 10);
        return end == digits ? UINT64_MAX : number;
    }
    return UINT64_MAX;
}

/* Return the memory that a control group leaves: its limit, less what is used but for file cache,
 * which goes when memory is needed. UINT64_MAX: it has no limit. */
static uint64_t dtrain__group_rest(const char *folder, bool v2)
{
    static const char *const names[2][4] = {
        {"limit_in_bytes", "usage_in_bytes", "total_active_file ", "total_inactive_file "},
        {"max", "current", "active_file ", "inactive_file "}};
    uint64_t found[4];
    char path[4400];
    for (int i = 0; i < 4; i++) {
        snprintf(path, sizeof path, "%s/memory.%s", folder, i < 2 ? names[v2][i] : "stat");
        found[i] = dtrain__read_number(path, i < 2 ? "" : names[v2][i]);
    }
    if (found[0] == UINT64_MAX || found[1] == UINT64_MAX) return UINT64_MAX;
    const uint64_t rest = found[0] > found[1] ? found[0] - found[1] : 0;
    if (found[2] == UINT64_MAX || found[3] == UINT64_MAX) return rest;
    return rest + found[2] + found[3];
}

/* Return the least that the control groups of this process leave, from its own (the file `groups`:
 * "0::/path" in version 2, "4:memory:/path" in version 1) up to the root: Slurm, systemd and
 * containers set limits at different heights. In a container the path can be that of the host,
 * which does not exist below `mount`: its root is then the container's. */
DTRAIN__PRIVATE uint64_t dtrain__group_memory(const char *groups, const char *mount)
{
    char text[4096] = "", folder[4200], *next = NULL;
    uint64_t least = dtrain__group_rest(mount, true);
    const int file = dtrain__open(groups, O_RDONLY);
    if (file >= 0 && read(file, text, sizeof text - 1) < 0) text[0] = 0;
    if (file >= 0) close(file);
    for (char *line = strtok_r(text, "\n", &next); line; line = strtok_r(NULL, "\n", &next)) {
        const char *kinds = strchr(line, ':'), *path = kinds ? strchr(kinds + 1, ':') : NULL;
        const char *memory = strstr(line, "memory");
        const bool v2 = path == kinds + 1;
        if (!path || (!v2 && (!memory || memory > path))) continue;
        snprintf(folder, sizeof folder, "%s%s%s", mount, v2 ? "" : "/memory", path + 1);
        for (char *end = folder; end; end = strrchr(folder, '/')) {
            if (end > folder) *end = 0;
            if (strlen(folder) < strlen(mount)) break;
            const uint64_t rest = dtrain__group_rest(folder, v2);
            least = rest < least ? rest : least;
        }
    }
    return least;
}

/* Estimate what could be touched now without swapping or being killed. */
DTRAIN__PRIVATE uint64_t dtrain__free_memory(void)
{
    uint64_t bytes = dtrain__read_number("/proc/meminfo", "MemAvailable:");
    if (bytes <= UINT64_MAX / 1024) bytes *= 1024;
    const uint64_t rest = dtrain__group_memory("/proc/self/cgroup", "/sys/fs/cgroup");
    return rest < bytes ? rest : bytes;
}

DTRAIN_API void dtrain_process_memory(uint64_t *now_bytes, uint64_t *peak_bytes)
{
    const uint64_t now = now_bytes ? dtrain__read_number("/proc/self/smaps_rollup", "Pss:") : 0;
    const uint64_t peak = peak_bytes ? dtrain__read_number("/proc/self/status", "VmHWM:") : 0;
    if (now_bytes) *now_bytes = now == UINT64_MAX ? 0 : now * 1024;
    if (peak_bytes) *peak_bytes = peak == UINT64_MAX ? 0 : peak * 1024;
}
