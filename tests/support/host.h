/* host.h: a program that already runs in parallel, for the tests of dtrain_world_join: processes or
 * threads that exist, know their ranks, and have an all-gather of their own over shared memory, which
 * blocks without a deadline as MPI's does. Include it after dtrain.h, test.h and ranks.h. */
#ifndef DTRAIN_TEST_HOST_H
#define DTRAIN_TEST_HOST_H

#include "ranks.h"

#include <sys/wait.h>

enum { HOST_MOST = 64, HOST_BYTES = 8192 };

/* A group of ranks of the host that gather. */
typedef struct host_group {
    int size;
    uint32_t arrived, generation; /* atomic */
    uint32_t fail_at;             /* the gathering that fails on all; 0: none */
    char data[HOST_MOST][HOST_BYTES];
} host_group;

/* One of them: what is handed in as dtrain_join_desc.user. */
typedef struct host_member {
    host_group *group;
    int rank;
    uint32_t calls;
} host_member;

static inline host_group *host_group_new(int size)
{
    host_group *group = (host_group *)ranks_shared(sizeof *group);
    group->size = size;
    return group;
}

static inline void host_barrier(host_group *group)
{
    const uint32_t generation = __atomic_load_n(&group->generation, __ATOMIC_ACQUIRE);
    if (__atomic_add_fetch(&group->arrived, 1, __ATOMIC_ACQ_REL) == (uint32_t)group->size) {
        __atomic_store_n(&group->arrived, 0, __ATOMIC_RELEASE);
        __atomic_store_n(&group->generation, generation + 1, __ATOMIC_RELEASE);
    }
    while (__atomic_load_n(&group->generation, __ATOMIC_ACQUIRE) == generation) sched_yield();
}

static inline int host_all_gather(void *user, const void *mine, void *all, size_t bytes)
{
    host_member *member = (host_member *)user;
    host_group *group = member->group;
    if (bytes > HOST_BYTES) return 7;
    if (group->fail_at && ++member->calls == group->fail_at) return 5;
    memcpy(group->data[member->rank], mine, bytes);
    host_barrier(group);
    for (int i = 0; i < group->size; i++)
        memcpy((char *)all + (size_t)i * bytes, group->data[i], bytes);
    host_barrier(group);
    return 0;
}

static inline host_member host_member_of(host_group *group, int rank)
{
    host_member member;
    memset(&member, 0, sizeof member);
    member.group = group;
    member.rank = rank;
    return member;
}

static inline dtrain_join_desc host_desc(host_member *member)
{
    dtrain_join_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.rank = member->rank;
    desc.size = member->group->size;
    desc.all_gather = host_all_gather;
    desc.user = member;
    desc.timeout_ms = RANKS_SANITIZED ? 60000 : 20000;
    return desc;
}

/* ---- Ranks of the host ---- */

typedef int (*host_main)(int rank, void *user);
typedef struct host_thread {
    host_main run;
    void *user;
    int rank, status;
} host_thread;

static inline void *host_thread_main(void *argument)
{
    host_thread *thread = (host_thread *)argument;
    thread->status = thread->run(thread->rank, thread->user);
    return NULL;
}

/* Run `count` ranks, as threads of this process or as processes; status (count) gets their return
 * values, 128 + signal for one that was killed. */
static inline void host_run(int count, bool threads, host_main run, void *user, int *status)
{
    pid_t pids[HOST_MOST];
    pthread_t ids[HOST_MOST];
    host_thread all[HOST_MOST];
    fflush(NULL);
    for (int i = 0; i < count; i++) {
        all[i].run = run;
        all[i].user = user;
        all[i].rank = i;
        all[i].status = 99;
        if (threads) {
            if (pthread_create(&ids[i], NULL, host_thread_main, &all[i]) != 0) exit(3);
            continue;
        }
        pids[i] = fork();
        if (pids[i] < 0) exit(3);
        if (pids[i] == 0) {
            const int code = run(i, user);
            fflush(NULL);
            _exit(code);
        }
    }
    for (int i = 0; i < count; i++) {
        int ended = 0;
        if (threads) pthread_join(ids[i], NULL);
        else waitpid(pids[i], &ended, 0);
        status[i] = threads              ? all[i].status
                    : WIFSIGNALED(ended) ? 128 + WTERMSIG(ended)
                                         : WEXITSTATUS(ended);
    }
}

#endif /* DTRAIN_TEST_HOST_H */
