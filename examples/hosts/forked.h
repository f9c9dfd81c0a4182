/* forked.h: a program's own parallel ranks for the examples of this folder, without dtrain:
 * processes made by fork, which meet in shared memory. It stands for what your program has: MPI,
 * sockets, a job's key-value store. */
#ifndef FORKED_H
#define FORKED_H

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { FORKED_MOST = 16, FORKED_BYTES = 1 << 13 };

/* What the ranks share. */
struct forked_page {
    int came; /* ranks at the gates, of all times */
    char data[FORKED_MOST][FORKED_BYTES];
};

typedef struct forked {
    int rank, size; /* of this process */
    int passed;     /* gates that this rank has passed */
    struct forked_page *page;
} forked;

/* Wait until all ranks have come. */
static inline void forked_gate(forked *me)
{
    me->passed++;
    __atomic_add_fetch(&me->page->came, 1, __ATOMIC_ACQ_REL);
    while (__atomic_load_n(&me->page->came, __ATOMIC_ACQUIRE) < me->passed * me->size)
        sched_yield();
}

/* Bring the bytes of all ranks together, in the order of ranks. */
static inline int forked_gather(void *user, const void *mine, void *all, size_t bytes)
{
    forked *const me = (forked *)user;
    if (bytes > FORKED_BYTES) return 1;
    memcpy(me->page->data[me->rank], mine, bytes);
    forked_gate(me);
    for (int r = 0; r < me->size; r++)
        memcpy((char *)all + (size_t)r * bytes, me->page->data[r], bytes);
    forked_gate(me); /* until all have read them */
    return 0;
}

/* Return memory in which the ranks of later forks can meet; NULL: there is none. */
static inline struct forked_page *forked_meeting(void)
{
    void *page = mmap(NULL, sizeof(struct forked_page), PROT_READ | PROT_WRITE,
                      MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    return page == MAP_FAILED ? NULL : (struct forked_page *)page;
}

/* Become `size` processes, of which this one is rank 0. Returns 0, or another value for an error.
 */
static inline int forked_begin(forked *me, int size)
{
    memset(me, 0, sizeof *me);
    me->size = size;
    me->page = size < 1 || size > FORKED_MOST ? NULL : forked_meeting();
    if (!me->page) return 1;
    fflush(NULL);
    for (me->rank = size - 1; me->rank > 0; me->rank--) {
        const pid_t child = fork();
        if (child < 0) return 1;
        if (child == 0) break;
    }
    return 0;
}

/* End a rank; rank 0 waits for the others and returns the exit status of the program. */
static inline int forked_end(forked *me, int status)
{
    int ended;
    fflush(NULL);
    if (me->rank > 0) _exit(status);
    while (wait(&ended) > 0)
        if (ended != 0 && status == 0)
            status = WIFEXITED(ended) ? WEXITSTATUS(ended) : 128 + WTERMSIG(ended);
    munmap(me->page, sizeof *me->page);
    return status;
}

#endif
