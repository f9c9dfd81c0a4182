/* footprint.h: what a process holds, so that a test can see that a library has left nothing behind:
 *
 *     static struct footprint before, after; // half a MiB each: not for the stack
 *     footprint_take(&before);
 *     ...                                    // join, train, leave
 *     footprint_take(&after);
 *     if (footprint_differs(&before, &after, why, sizeof why)) ...
 *
 * A section is text, one line for each thing: two footprints differ if the lines of a section do,
 * in any order. Of private anonymous memory only the sum counts, and it may grow by
 * FOOTPRINT_HEAP_KB: free() keeps memory for the next malloc(), and glibc reserves an arena of 64
 * MiB for a thread and caches the stacks of ended threads. Take one footprint and throw it away
 * first: the first use of stdio and of threads loads what then stays. It needs _GNU_SOURCE before
 * the first system header. */
#ifndef DTRAIN_TEST_FOOTPRINT_H
#define DTRAIN_TEST_FOOTPRINT_H

#include <dirent.h>
#include <fenv.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifndef FOOTPRINT_HEAP_KB
#define FOOTPRINT_HEAP_KB (160 << 10)
#endif

enum {
    FOOTPRINT_SIGNALS,     /* actions of all signals, and the mask of the calling thread */
    FOOTPRINT_DESCRIPTORS, /* numbers, and what they are open to */
    FOOTPRINT_THREADS,
    FOOTPRINT_CHILDREN, /* processes, zombies too */
    FOOTPRINT_ENVIRONMENT,
    FOOTPRINT_MAPPINGS, /* of files and shared memory: size, rights, name */
    FOOTPRINT_PROCESS,  /* working directory, file mode mask, rounding */
    FOOTPRINT_SECTIONS
};

struct footprint {
    char text[FOOTPRINT_SECTIONS][1 << 16];
    size_t used[FOOTPRINT_SECTIONS];
    long heap_kb;
};

/* Append a line. What has no room counts in `used`, so that footprint_differs can say so. */
__attribute__((format(printf, 3, 4))) static inline void
footprint_line(struct footprint *f, int section, const char *format, ...)
{
    const size_t room = sizeof f->text[0], used = f->used[section];
    va_list list;
    va_start(list, format);
    const int n = vsnprintf(used < room ? f->text[section] + used : NULL,
                            used < room ? room - used : 0, format, list);
    va_end(list);
    f->used[section] += n > 0 ? (size_t)n : 0;
}

/* List the entries of a folder of /proc/self, without the descriptor that reads it. */
static inline void footprint_folder(struct footprint *f, int section, const char *folder,
                                    bool links)
{
    DIR *dir = opendir(folder);
    struct dirent *entry;
    if (!dir) footprint_line(f, section, "cannot read %s\n", folder);
    while (dir && (entry = readdir(dir)) != NULL) {
        char path[300], target[300] = "";
        if (entry->d_name[0] == '.' || (links && atoi(entry->d_name) == dirfd(dir))) continue;
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        if (links && readlink(path, target, sizeof target - 1) < 0) target[0] = 0;
        footprint_line(f, section, "%s %s\n", entry->d_name, target);
    }
    if (dir) closedir(dir);
}

static inline void footprint_signals(struct footprint *f)
{
    sigset_t mask;
    sigemptyset(&mask);
    pthread_sigmask(SIG_SETMASK, NULL, &mask);
    for (int s = 1; s < NSIG; s++) {
        struct sigaction action;
        uintptr_t handler = 0;
        if (sigaction(s, NULL, &action) != 0) continue;
        memcpy(&handler, &action.sa_handler, sizeof handler);
        footprint_line(f, FOOTPRINT_SIGNALS, "signal %d: action %lx, flags %x%s\n", s,
                       (unsigned long)handler, (unsigned)action.sa_flags,
                       sigismember(&mask, s) == 1 ? ", blocked" : "");
    }
}

static inline void footprint_mappings(struct footprint *f)
{
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[600];
    if (!maps) footprint_line(f, FOOTPRINT_MAPPINGS, "cannot read /proc/self/maps\n");
    while (maps && fgets(line, sizeof line, maps)) {
        unsigned long from, to;
        char rights[5] = "", name[512] = "";
        if (sscanf(line, "%lx-%lx %4s %*s %*s %*s %511[^\n]", &from, &to, rights, name) < 3)
            continue;
        if (rights[3] == 's' || name[0] == '/')
            footprint_line(f, FOOTPRINT_MAPPINGS, "%lu KiB %s %s\n", (to - from) >> 10, rights,
                           name);
        else if (name[0] != '[' || strcmp(name, "[heap]") == 0)
            f->heap_kb += (long)((to - from) >> 10);
    }
    if (maps) fclose(maps);
}

static inline void footprint_children(struct footprint *f)
{
    DIR *tasks = opendir("/proc/self/task");
    struct dirent *entry;
    while (tasks && (entry = readdir(tasks)) != NULL) {
        char path[300];
        int child;
        snprintf(path, sizeof path, "/proc/self/task/%s/children", entry->d_name);
        FILE *list = entry->d_name[0] == '.' ? NULL : fopen(path, "r");
        while (list && fscanf(list, "%d", &child) == 1)
            footprint_line(f, FOOTPRINT_CHILDREN, "%d\n", child);
        if (list) fclose(list);
    }
    if (tasks) closedir(tasks);
}

extern char **environ;

static inline void footprint_process(struct footprint *f)
{
    char line[600];
    FILE *status = fopen("/proc/self/status", "r");
    while (status && fgets(line, sizeof line, status))
        if (strncmp(line, "Umask:", 6) == 0) footprint_line(f, FOOTPRINT_PROCESS, "%s", line);
    if (status) fclose(status);
    footprint_line(f, FOOTPRINT_PROCESS, "folder %s\n", getcwd(line, sizeof line) ? line : "?");
    footprint_line(f, FOOTPRINT_PROCESS, "rounding %d\n", fegetround());
#if defined(__SSE__)
    footprint_line(f, FOOTPRINT_PROCESS, "modes of floating point %x\n",
                   __builtin_ia32_stmxcsr() & ~0x3fu);
#endif
}

static inline void footprint_take(struct footprint *f)
{
    memset(f, 0, sizeof *f);
    footprint_signals(f);
    footprint_folder(f, FOOTPRINT_DESCRIPTORS, "/proc/self/fd", true);
    footprint_folder(f, FOOTPRINT_THREADS, "/proc/self/task", false);
    footprint_children(f);
    for (char **e = environ; e && *e; e++) footprint_line(f, FOOTPRINT_ENVIRONMENT, "%.400s\n", *e);
    footprint_mappings(f);
    footprint_process(f);
}

static inline int footprint_order(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

/* Split a section's text into lines, sorted; returns how many there are. */
static inline size_t footprint_lines(char *text, char **lines, size_t room)
{
    size_t count = 0;
    for (char *line = strtok(text, "\n"); line && count < room; line = strtok(NULL, "\n"))
        lines[count++] = line;
    qsort(lines, count, sizeof *lines, footprint_order);
    return count;
}

/* Tell whether anything was added or taken away, and write to `why` (room bytes) the first thing
 * found. */
static inline bool footprint_differs(const struct footprint *before, const struct footprint *after,
                                     char *why, size_t room)
{
    static const char *const names[] = {"signals",     "descriptors", "threads", "children",
                                        "environment", "mappings",    "process"};
    enum { LINES = 1 << 13 };
    static char text[2][1 << 16];
    static char *lines[2][LINES];
    for (int s = 0; s < FOOTPRINT_SECTIONS; s++) {
        const struct footprint *both[2] = {before, after};
        size_t count[2], at[2] = {0, 0};
        for (int i = 0; i < 2; i++) {
            if (both[i]->used[s] >= sizeof text[0])
                return snprintf(why, room, "%s: no room", names[s]), true;
            memcpy(text[i], both[i]->text[s], sizeof text[0]);
            count[i] = footprint_lines(text[i], lines[i], LINES);
        }
        while (at[0] < count[0] || at[1] < count[1]) {
            const int order = at[0] == count[0]   ? 1
                              : at[1] == count[1] ? -1
                                                  : strcmp(lines[0][at[0]], lines[1][at[1]]);
            if (order != 0) {
                const int i = order < 0 ? 0 : 1;
                return snprintf(why, room, "%s: %s %s", names[s],
                                i == 0 ? "gone:" : "new:", lines[i][at[i]]),
                       true;
            }
            at[0]++, at[1]++;
        }
    }
    if (after->heap_kb - before->heap_kb > FOOTPRINT_HEAP_KB)
        return snprintf(why, room, "private memory grew by %ld KiB",
                        after->heap_kb - before->heap_kb),
               true;
    return false;
}

#endif
