/* host.c: a program with plugins that knows nothing of dtrain. Three processes have two tasks, each
 * in a thread of its own: the first task has workers in two processes, the second in all three. A
 * plugin that trains with dtrain has two worlds in a process at once, of two sizes.
 *
 *   build:   cc -O2 examples/hosts/plugin/host.c -o host -lpthread -ldl
 *   run:     ./host ./fit_dtrain.so                     (fit_dtrain.c has its own build line; fit.c too)
 *   expect:
 *     task 0, 2 workers: 1.0000 +0.9877 x +0.0000 x^2 -1.9722 x^3
 *     task 1, 3 workers: 2.0000 +0.9877 x +0.0000 x^2 -1.9722 x^3
 *     nothing of the plugin is left
 *
 * In the end each process looks whether the plugin has left it: the file, threads, descriptors. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1 /* for dlopen with -std=c99 and what forked.h needs */
#endif
#include "../forked.h"
#include "plugin.h"

#include <dirent.h>
#include <dlfcn.h>
#include <pthread.h>

enum { TASKS = 2, PROCESSES = 3, POINTS = 60 };

typedef struct task {
    worker me;
    forked group; /* its workers */
    fit_fn fit;
    int status;
    pthread_t thread;
    float x[POINTS], y[POINTS];
} task;

static void *work(void *argument)
{
    task *t = (task *)argument;
    t->status = t->fit(&t->me);
    return NULL;
}

/* Give a worker its part of the points of a task, which lie on (task + 1) + x - 2 x^3, and some
 * beside it. */
static void prepare(task *t, int number, int rank, struct forked_page *page, fit_fn fit)
{
    const int size = number + 2;
    t->fit = fit;
    t->group.rank = t->me.rank = rank;
    t->group.size = t->me.size = size;
    t->group.page = page;
    t->group.passed = 0;
    t->me.all_gather = forked_gather;
    t->me.user = &t->group;
    t->me.count = 0;
    for (int i = rank; i < POINTS; i += size) {
        const float x = 2 * (float)i / (POINTS - 1) - 1;
        t->x[t->me.count] = x;
        t->y[t->me.count++] = (float)(number + 1) + x - 2 * x * x * x + (i % 2 ? 0.1f : -0.1f);
    }
    t->me.x = t->x;
    t->me.y = t->y;
}

/* Count the entries of a folder of /proc. */
static int entries(const char *folder)
{
    int count = 0;
    DIR *dir = opendir(folder);
    while (dir && readdir(dir)) count++;
    if (dir) closedir(dir);
    return count;
}

/* Tell whether a file of this name is mapped. */
static int is_mapped(const char *path)
{
    const char *name = strrchr(path, '/') ? strrchr(path, '/') + 1 : path;
    char line[1024];
    int found = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    while (maps && fgets(line, sizeof line, maps)) found |= strstr(line, name) != NULL;
    if (maps) fclose(maps);
    return found;
}

/* Do this process' part of both tasks with a plugin. */
static int use(const char *path, int process, struct forked_page *pages[TASKS])
{
    static task tasks[TASKS];
    int status = 0;
    void *plugin = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    union { /* ISO C has no conversion from a pointer to an object to one to a function */
        void *object;
        fit_fn function;
    } fit = {plugin ? dlsym(plugin, "fit") : NULL};
    if (!fit.object) return fprintf(stderr, "host: %s\n", dlerror()), 1;
    for (int i = 0; i < TASKS; i++) {
        if (process >= i + 2) continue;
        prepare(&tasks[i], i, process, pages[i], fit.function);
        if (pthread_create(&tasks[i].thread, NULL, work, &tasks[i]) != 0) return 1;
    }
    for (int i = 0; i < TASKS; i++) {
        const worker *me = &tasks[i].me;
        if (process >= i + 2) continue;
        pthread_join(tasks[i].thread, NULL);
        status |= tasks[i].status;
        if (tasks[i].status)
            fprintf(stderr, "host: task %d, worker %d: %s\n", i, process, me->sentence);
        else if (process == 0)
            printf("task %d, %d workers: %.4f %+.4f x %+.4f x^2 %+.4f x^3\n", i, me->size,
                   (double)me->polynomial[0], (double)me->polynomial[1], (double)me->polynomial[2],
                   (double)me->polynomial[3]);
    }
    dlclose(plugin);
    return status;
}

int main(int argc, char **argv)
{
    struct forked_page *pages[TASKS] = {forked_meeting(), forked_meeting()};
    forked processes;
    if (argc != 2) return fprintf(stderr, "usage: host PLUGIN\n"), 2;
    if (!pages[0] || !pages[1] || forked_begin(&processes, PROCESSES) != 0)
        return fprintf(stderr, "host: no memory or processes\n"), 1;
    const int files = entries("/proc/self/fd"), threads = entries("/proc/self/task");
    int status = use(argv[1], processes.rank, pages);
    const int left = is_mapped(argv[1]) || entries("/proc/self/fd") != files ||
                     entries("/proc/self/task") != threads;
    if (left)
        fprintf(stderr, "host: process %d still has something of the plugin\n", processes.rank);
    else if (processes.rank == 0) printf("nothing of the plugin is left\n");
    for (int i = 0; i < TASKS; i++) munmap(pages[i], sizeof *pages[i]);
    return forked_end(&processes, status | left);
}
