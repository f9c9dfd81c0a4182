/* test_system_calls.c: every system call that launch and rendezvous make fails once, and from then on, with each error
 * that it may plausibly give: the first call of a process, the second, and so on as far as a run goes. The
 * run then succeeds with the right values, or ends with an error on all ranks that says which error it was; it
 * does not hang, and leaves nothing behind.
 *
 *     build/tests/test_system_calls                a sample, drawn anew each time: the seed is printed
 *     DTRAIN_TEST_FULL=1 build/tests/test_system_calls                  all of them, as far as 20 seconds go
 *     build/tests/test_system_calls --seconds 600                       all of them
 *     build/tests/test_system_calls --case joined 1 send EPIPE 3 once   what a failure prints, in words
 *
 * The linker puts the functions named __wrap_ of this file between the library and the C library (ld --wrap). */
#include "test.h"

#include "dtrain.h"
#include "ranks.h"
#include "ports.h"

#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>

/* ---- Calls and their errors -----------------------------------------------------------------------*/

enum {
    CALL_allocation,
    CALL_fork,
    CALL_pthread_create,
    CALL_pthread_mutex_init,
    CALL_pthread_cond_init,
    CALL_waitpid,
    CALL_kill,
    CALL_sigtimedwait,
    CALL_prctl,
    CALL_sched_getaffinity,
    CALL_sysconf,
    CALL_getrlimit,
    CALL_mmap,
    CALL_madvise,
    CALL_ftruncate,
    CALL_memfd_create,
    CALL_open,
    CALL_read,
    CALL_close,
    CALL_stat,
    CALL_fstat,
    CALL_fcntl,
    CALL_socket,
    CALL_setsockopt,
    CALL_bind,
    CALL_listen,
    CALL_accept,
    CALL_connect,
    CALL_poll,
    CALL_recv,
    CALL_send,
    CALL_getaddrinfo,
    CALL_getnameinfo,
    CALL_COUNT
};

/* Errors beside those of errno.h: one byte of what was asked for; the end of a stream. Files of /proc are read in
 * one piece. */
enum { SHORT = 10001, ENDED = 10002 };
enum {
    RETRIED = 1, /* a call that fails once like this must not be noticed */
    LASTS = 2,   /* it may go on for ever */
    HEARD = 4,   /* what the end of a connection looks like: it is told as the loss of a rank */
    ELSEWHERE =
        8, /* what all ranks of a host see: one that sees it alone is taken for another host's */
    QUIET = 16 /* what is too unlikely to last to have a sentence: a deadline's will do */
};

typedef struct row {
    int call, error;
    unsigned flags;
    const char *call_name, *name;
} row;
#define ROW(call, error, flags)                  \
    {                                            \
        CALL_##call, error, flags, #call, #error \
    }
static const row rows[] = {
    ROW(allocation, ENOMEM, LASTS),
    ROW(fork, EAGAIN, LASTS),
    ROW(fork, ENOMEM, LASTS),
    ROW(pthread_create, EAGAIN, LASTS),
    ROW(pthread_create, EPERM, LASTS),
    ROW(pthread_mutex_init, ENOMEM, LASTS),
    ROW(pthread_cond_init, EAGAIN, LASTS),
    ROW(waitpid, EINTR, RETRIED),
    ROW(kill, EPERM, RETRIED),
    ROW(sigtimedwait, EINTR, RETRIED),
    ROW(sigtimedwait, EAGAIN, RETRIED),
    ROW(prctl, EINVAL, RETRIED | LASTS),
    ROW(sched_getaffinity, EINVAL, RETRIED | LASTS),
    ROW(sysconf, EINVAL, RETRIED | LASTS),
    ROW(getrlimit, EPERM, RETRIED | LASTS),
    ROW(mmap, ENOMEM, LASTS),
    ROW(mmap, EPERM, LASTS),
    ROW(madvise, EINVAL, RETRIED | LASTS),
    ROW(madvise, ENOMEM, RETRIED | LASTS),
    ROW(ftruncate, ENOSPC, LASTS),
    ROW(ftruncate, EINTR, RETRIED),
    ROW(memfd_create, ENOSYS, LASTS),
    ROW(memfd_create, EMFILE, LASTS),
    ROW(memfd_create, ENOMEM, RETRIED | LASTS),
    ROW(open, EMFILE, LASTS),
    ROW(open, ENFILE, LASTS),
    ROW(open, EACCES, ELSEWHERE),
    ROW(open, ENOMEM, LASTS),
    ROW(read, EIO, LASTS),
    ROW(read, ENOMEM, LASTS),
    ROW(close, EINTR, RETRIED | LASTS),
    ROW(close, EIO, RETRIED | LASTS),
    ROW(stat, EACCES, ELSEWHERE),
    ROW(stat, ENOMEM, LASTS),
    ROW(fstat, ENOMEM, LASTS),
    ROW(fcntl, ENOMEM, RETRIED | LASTS | QUIET),
    ROW(socket, EMFILE, LASTS),
    ROW(socket, ENFILE, LASTS),
    ROW(socket, ENOBUFS, LASTS),
    ROW(socket, EACCES, LASTS),
    ROW(setsockopt, ENOPROTOOPT, LASTS),
    ROW(setsockopt, ENOMEM, LASTS),
    ROW(bind, EADDRINUSE, LASTS),
    ROW(bind, EACCES, LASTS),
    ROW(bind, EADDRNOTAVAIL, LASTS),
    ROW(listen, EADDRINUSE, LASTS),
    ROW(accept, EINTR, RETRIED),
    ROW(accept, EAGAIN, RETRIED),
    ROW(accept, ECONNABORTED, RETRIED),
    ROW(accept, EMFILE, RETRIED | LASTS),
    ROW(accept, ENFILE, RETRIED | LASTS),
    ROW(accept, ENOMEM, RETRIED | LASTS),
    ROW(accept, ENOBUFS, RETRIED | LASTS),
    ROW(accept, EPERM, RETRIED | LASTS),
    ROW(connect, EINTR, RETRIED),
    ROW(connect, ECONNREFUSED, RETRIED | LASTS),
    ROW(connect, ECONNRESET, RETRIED | LASTS),
    ROW(connect, ETIMEDOUT, RETRIED | LASTS),
    ROW(connect, ENETUNREACH, RETRIED | LASTS),
    ROW(connect, EADDRNOTAVAIL, RETRIED | LASTS),
    ROW(connect, ENOMEM, RETRIED | LASTS),
    ROW(poll, EINTR, RETRIED),
    ROW(poll, EAGAIN, RETRIED | LASTS | QUIET),
    ROW(poll, ENOMEM, RETRIED | LASTS | QUIET),
    ROW(recv, EINTR, RETRIED),
    ROW(recv, EAGAIN, RETRIED),
    ROW(recv, SHORT, RETRIED),
    ROW(recv, ENOMEM, RETRIED | LASTS | QUIET),
    ROW(recv, ENDED, HEARD),
    ROW(recv, ECONNRESET, HEARD),
    ROW(recv, ETIMEDOUT, HEARD),
    ROW(send, EINTR, RETRIED),
    ROW(send, EAGAIN, RETRIED),
    ROW(send, SHORT, RETRIED),
    ROW(send, ENOBUFS, RETRIED | LASTS | QUIET),
    ROW(send, ENOMEM, RETRIED | LASTS | QUIET),
    ROW(send, EPIPE, HEARD),
    ROW(send, ECONNRESET, HEARD),
    ROW(getaddrinfo, EAI_AGAIN, RETRIED | LASTS),
    ROW(getaddrinfo, EAI_MEMORY, RETRIED | LASTS),
    ROW(getaddrinfo, EAI_SYSTEM, RETRIED | LASTS),
    ROW(getnameinfo, EAI_MEMORY, RETRIED | LASTS),
};
enum { ROWS = sizeof rows / sizeof *rows };

/* ---- A run ----------------------------------------------------------------------------------------*/

enum { MOST_ACTORS = 6, MOST_RANKS = 4 };

typedef struct fault {
    int row, who; /* who: the process in which it happens, see scenarios; row: -1 for none */
    long n;       /* the number of the call that fails, from 1 */
    bool lasts;   /* and all calls after it */
} fault;

/* What a process that calls dtrain_launch has to say afterwards. */
typedef struct ending {
    int32_t done, result;
    bool fds, threads, children, maps; /* that are left */
    char text[1024];
} ending;

/* In shared memory. */
typedef struct run {
    fault f;
    int scenario;
    uint16_t port;
    uint32_t timeout_ms;
    int32_t reached;
    long calls[MOST_ACTORS][CALL_COUNT];
    int32_t progress
        [MOST_RANKS]; /* 1: rank_main began; 2: it entered its last collective; 3: it has ended it */
    int32_t wrong;    /* values that are not right */
    char own[MOST_RANKS][600]; /* why rank_main failed */
    ending ends[MOST_RANKS];
    counted_memory memory;
} run;

/* Who is who: the processes that call dtrain_launch come first, then the ranks that they fork, node by node. */
typedef struct scenario {
    const char *name;
    int launches, ranks,
        forks;           /* forks: ranks of each launch; 0: it is one itself, or they are threads */
    const char *victims; /* in whom calls fail */
    bool threads;
    bool apart; /* each rank is on a host of its own, so all goes over the link */
    bool stuck; /* rank 0 fails, and the other one never ends: it has to be killed */
} scenario;
static const scenario scenarios[] = {
    {"forked", 1, 2, 2, "012", false, false, false}, {"threads", 1, 2, 0, "0", true, false, false},
    {"joined", 3, 3, 0, "01", false, false, false},  {"apart", 3, 3, 0, "02", false, true, false},
    {"nodes", 2, 4, 2, "13", false, false, false},   {"stuck", 1, 2, 2, "0", false, false, true},
};
enum { SCENARIOS = sizeof scenarios / sizeof *scenarios };

static run *now;       /* the run that this process takes part in; NULL: none, and nothing fails */
static int actor = -1; /* who this process is */
static int children;   /* that it has forked */

/* Count a call; say how it fails, 0 when it does not. */
static int fails(int call)
{
    if (!now || actor < 0) return 0;
    const fault *f = &now->f;
    const long n = __atomic_add_fetch(&now->calls[actor][call], 1, __ATOMIC_ACQ_REL);
    if (f->row < 0 || f->who != actor || rows[f->row].call != call) return 0;
    if (n != f->n && !(f->lasts && n > f->n)) return 0;
    __atomic_store_n(&now->reached, 1, __ATOMIC_RELEASE);
    errno = rows[f->row].error;
    return rows[f->row].error;
}

/* ---- The functions that fail ----------------------------------------------------------------------*/

#define WRAP(type, name, parameters, arguments)  \
    type __real_##name parameters;               \
    type __wrap_##name parameters;               \
    type __wrap_##name parameters                \
    {                                            \
        if (fails(CALL_##name)) return (type)-1; \
        return __real_##name arguments;          \
    }
#define WRAP_CODE(name, parameters, arguments)        \
    int __real_##name parameters;                     \
    int __wrap_##name parameters;                     \
    int __wrap_##name parameters                      \
    {                                                 \
        const int code = fails(CALL_##name);          \
        return code ? code : __real_##name arguments; \
    }

WRAP(pid_t, waitpid, (pid_t pid, int *status, int options), (pid, status, options))
WRAP(int, kill, (pid_t pid, int number), (pid, number))
WRAP(int, sigtimedwait, (const sigset_t *set, siginfo_t *info, const struct timespec *limit),
     (set, info, limit))
WRAP(int, sched_getaffinity, (pid_t pid, size_t size, cpu_set_t *set), (pid, size, set))
WRAP(long, sysconf, (int name), (name))
WRAP(int, getrlimit, (int what, struct rlimit *limit), (what, limit))
WRAP(int, madvise, (void *at, size_t bytes, int advice), (at, bytes, advice))
WRAP(int, ftruncate, (int file, off_t bytes), (file, bytes))
WRAP(int, stat, (const char *path, struct stat *status), (path, status))
WRAP(int, fstat, (int file, struct stat *status), (file, status))
WRAP(int, socket, (int family, int type, int protocol), (family, type, protocol))
WRAP(int, setsockopt, (int fd, int level, int name, const void *value, socklen_t size),
     (fd, level, name, value, size))
WRAP(int, bind, (int fd, const struct sockaddr *address, socklen_t size), (fd, address, size))
WRAP(int, listen, (int fd, int backlog), (fd, backlog))
WRAP(int, accept, (int fd, struct sockaddr *address, socklen_t *size), (fd, address, size))
WRAP(int, connect, (int fd, const struct sockaddr *address, socklen_t size), (fd, address, size))
WRAP(int, poll, (struct pollfd * fds, nfds_t count, int ms), (fds, count, ms))
WRAP_CODE(pthread_create,
          (pthread_t * thread, const pthread_attr_t *attributes, void *(*main)(void *),
           void *argument),
          (thread, attributes, main, argument))
WRAP_CODE(pthread_mutex_init, (pthread_mutex_t * mutex, const pthread_mutexattr_t *attributes),
          (mutex, attributes))
WRAP_CODE(pthread_cond_init, (pthread_cond_t * condition, const pthread_condattr_t *attributes),
          (condition, attributes))
WRAP_CODE(getnameinfo,
          (const struct sockaddr *address, socklen_t size, char *host, socklen_t host_size,
           char *port, socklen_t port_size, int flags),
          (address, size, host, host_size, port, port_size, flags))

/* A name that cannot be looked up for want of a descriptor says so in errno. */
int __real_getaddrinfo(const char *node, const char *service, const struct addrinfo *hints,
                       struct addrinfo **found);
int __wrap_getaddrinfo(const char *node, const char *service, const struct addrinfo *hints,
                       struct addrinfo **found);
int __wrap_getaddrinfo(const char *node, const char *service, const struct addrinfo *hints,
                       struct addrinfo **found)
{
    const int code = fails(CALL_getaddrinfo);
    errno = EMFILE;
    return code ? code : __real_getaddrinfo(node, service, hints, found);
}

/* A forked rank counts its own calls. */
pid_t __real_fork(void);
pid_t __wrap_fork(void);
pid_t __wrap_fork(void)
{
    if (fails(CALL_fork)) return -1;
    const pid_t pid = __real_fork();
    if (!now || actor < 0) return pid;
    const scenario *s = &scenarios[now->scenario];
    if (pid == 0) actor = s->launches + actor * s->forks + children;
    else children++;
    return pid;
}

void *__real_mmap(void *hint, size_t bytes, int access, int flags, int file, off_t offset);
void *__wrap_mmap(void *hint, size_t bytes, int access, int flags, int file, off_t offset);
void *__wrap_mmap(void *hint, size_t bytes, int access, int flags, int file, off_t offset)
{
    return fails(CALL_mmap) ? MAP_FAILED : __real_mmap(hint, bytes, access, flags, file, offset);
}

/* Linux has closed the descriptor when close fails. */
int __real_close(int file);
int __wrap_close(int file);
int __wrap_close(int file)
{
    const int result = __real_close(file);
    return fails(CALL_close) ? -1 : result;
}

ssize_t __real_read(int file, void *out, size_t bytes);
ssize_t __wrap_read(int file, void *out, size_t bytes);
ssize_t __wrap_read(int file, void *out, size_t bytes)
{
    const int error = fails(CALL_read);
    if (error == ENDED) return 0;
    return error && error != SHORT ? -1 : __real_read(file, out, error ? 1 : bytes);
}
/* A connection that has ended stays so, for both ends. */
static bool is_loss(int error)
{
    return error == ENDED || error == ECONNRESET || error == EPIPE || error == ETIMEDOUT;
}
static void loses(int fd, int error)
{
    shutdown(fd, SHUT_RDWR);
    errno = error;
}
ssize_t __real_recv(int fd, void *out, size_t bytes, int flags);
ssize_t __wrap_recv(int fd, void *out, size_t bytes, int flags);
ssize_t __wrap_recv(int fd, void *out, size_t bytes, int flags)
{
    const int error = fails(CALL_recv);
    if (is_loss(error)) loses(fd, error);
    if (error == ENDED) return 0;
    return error && error != SHORT ? -1 : __real_recv(fd, out, error ? 1 : bytes, flags);
}
ssize_t __real_send(int fd, const void *data, size_t bytes, int flags);
ssize_t __wrap_send(int fd, const void *data, size_t bytes, int flags);
ssize_t __wrap_send(int fd, const void *data, size_t bytes, int flags)
{
    const int error = fails(CALL_send);
    if (is_loss(error)) loses(fd, error);
    return error && error != SHORT ? -1 : __real_send(fd, data, error ? 1 : bytes, flags);
}

/* What these are given beside their first arguments is one word. */
int __real_open(const char *path, int flags, ...);
int __wrap_open(const char *path, int flags, int mode);
int __wrap_open(const char *path, int flags, int mode)
{
    return fails(CALL_open) ? -1 : __real_open(path, flags, mode);
}
int __real_fcntl(int file, int command, ...);
int __wrap_fcntl(int file, int command, long value);
int __wrap_fcntl(int file, int command, long value)
{
    return fails(CALL_fcntl) ? -1 : __real_fcntl(file, command, value);
}
int __real_prctl(int option, ...);
int __wrap_prctl(int option, unsigned long value);
int __wrap_prctl(int option, unsigned long value)
{
    return fails(CALL_prctl) ? -1 : __real_prctl(option, value, 0, 0, 0);
}
long __real_syscall(long number, ...);
long __wrap_syscall(long number, long a, long b, long c, long d, long e);
long __wrap_syscall(long number, long a, long b, long c, long d, long e)
{
    if (number == SYS_memfd_create && fails(CALL_memfd_create)) return -1;
    return __real_syscall(number, a, b, c, d, e);
}

/* Ranks of other hosts are other names. */
int __real_gethostname(char *name, size_t room);
int __wrap_gethostname(char *name, size_t room);
int __wrap_gethostname(char *name, size_t room)
{
    if (!now || actor < 0 || !scenarios[now->scenario].apart) return __real_gethostname(name, room);
    snprintf(name, room, "host-%d", actor);
    return 0;
}

static void *fails_or_counts(void *user, size_t bytes)
{
    return fails(CALL_allocation) ? NULL : counted_alloc(user, bytes);
}

/* ---- What ranks do --------------------------------------------------------------------------------*/

/* A communicator that could cross hosts; it only has to be made and ended. */
static dtrain_result bridge_create(dtrain_world *world, dtrain_comm **out);
static dtrain_result bridge_destroy(dtrain_comm *comm)
{
    free(comm);
    return DTRAIN_OK;
}
static dtrain_comm_ops bridge_ops;
static dtrain_result bridge_create(dtrain_world *world, dtrain_comm **out)
{
    *out = (dtrain_comm *)calloc(1, sizeof **out);
    (*out)->ops = &bridge_ops;
    (*out)->world = world;
    (*out)->rank = dtrain_world_rank(world);
    (*out)->size = dtrain_world_size(world);
    return DTRAIN_OK;
}

static dtrain_result gathers(dtrain_world *world, run *r, int round)
{
    int32_t all[MOST_RANKS], mine = round * 16 + dtrain_world_rank(world);
    const dtrain_result result = dtrain_world_all_gather(world, &mine, sizeof mine, all);
    for (int i = 0; result == DTRAIN_OK && i < dtrain_world_size(world); i++)
        r->wrong += all[i] != round * 16 + i;
    return result;
}

/* Shared memory reads as zero also where it has been handed out before. */
static dtrain_result shares(dtrain_world *world, run *r)
{
    enum { FLOATS = 8192 };
    const int rank = dtrain_world_rank(world), size = dtrain_world_size(world);
    dtrain_comm *comm = dtrain_world_comm(world);
    for (int round = 0; round < 2; round++) {
        float *data;
        TRY(dtrain_comm_alloc(comm, FLOATS * sizeof *data, (void **)&data));
        for (int i = 0; i < FLOATS; i++) {
            r->wrong += data[i] != 0;
            data[i] = (float)(rank + i);
        }
        const dtrain_result result =
            dtrain_all_reduce(comm, data, data, FLOATS, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, NULL);
        const float ranks = (float)(size * (size - 1) / 2);
        for (int i = 0; result == DTRAIN_OK && i < FLOATS; i++)
            r->wrong += data[i] != ranks + (float)(size * i);
        dtrain_comm_free(comm, data, FLOATS * sizeof *data);
        TRY(result);
    }
    return DTRAIN_OK;
}

static dtrain_result works(dtrain_world *world, run *r)
{
    const int rank = dtrain_world_rank(world);
    for (int round = 0; round < 3; round++) TRY(gathers(world, r, round));
    if (!scenarios[r->scenario].apart) TRY(shares(world, r));
    r->progress[rank] = 2;
    TRY(gathers(world, r, 7));
    r->progress[rank] = 3;
    return DTRAIN_OK;
}

static int rank_main(dtrain_world *world, void *user)
{
    run *r = (run *)user;
    const int rank = dtrain_world_rank(world);
    r->progress[rank] = 1;
    if (scenarios[r->scenario].stuck && rank == 0) return 3;
    while (scenarios[r->scenario].stuck) ranks_sleep_us(1000000);
    const dtrain_result result = works(world, r);
    if (result != DTRAIN_OK)
        snprintf(r->own[rank], sizeof r->own[rank], "%s: %.500s", dtrain_result_text(result),
                 dtrain_last_error());
    return result == DTRAIN_OK ? 0 : 1;
}

/* ---- Launching ------------------------------------------------------------------------------------*/

static void say_nothing(void *user, dtrain_log_level level, int rank, const char *line)
{
    (void)user, (void)level, (void)rank, (void)line;
}

static void set_number(const char *name, int value)
{
    char text[16];
    snprintf(text, sizeof text, "%d", value);
    setenv(name, text, 1);
}

/* A process that calls dtrain_launch: number `index` of its scenario. Never returns. */
static void launch(run *r, int index)
{
    const scenario *s = &scenarios[r->scenario];
    ending *end = &r->ends[index];
    dtrain_launch_desc desc = ranks_desc(s->launches == 1 ? s->ranks : 0, s->threads ? 1 : 0);
    setpgid(0, 0);
    desc.threads_per_rank = s->launches == 1 ? 2 : 1;
    desc.timeout_ms = r->timeout_ms;
    desc.grace_ms = s->stuck ? 50 : r->timeout_ms / 2;
    desc.options.reserve_bytes = (size_t)1 << 20;
    desc.options.log = say_nothing;
    desc.options.allocator = counted_allocator(&r->memory);
    desc.options.allocator.alloc = fails_or_counts;
    if (s->apart) desc.comm_ops = &bridge_ops;
    if (s->launches > 1) {
        const bool forks = s->forks > 0;
        set_number(forks ? "PET_NODE_RANK" : "RANK", index);
        set_number(forks ? "PET_NNODES" : "WORLD_SIZE", s->launches);
        if (forks) set_number("PET_NPROC_PER_NODE", s->forks);
        setenv(forks ? "PET_MASTER_ADDR" : "MASTER_ADDR", "127.0.0.1", 1);
        set_number("DTRAIN_PORT", r->port);
    }
    const ranks_holdings before = ranks_look();
    actor = index;
    now = r;
    end->result = dtrain_launch(&desc, rank_main, r, NULL);
    now = NULL;
    if (end->result) snprintf(end->text, sizeof end->text, "%s", dtrain_last_error());
    ranks_holdings after = ranks_look();
    for (int look = 0; look < 1000 && after.threads > before.threads && !RANKS_SANITIZED; look++) {
        ranks_sleep_us(1000);
        after = ranks_look();
    }
    end->fds = after.fds > before.fds;
    end->threads = after.threads > before.threads && !RANKS_SANITIZED;
    end->children = after.children > before.children;
    end->maps = after.maps > before.maps;
    end->done = 1;
    _exit(0);
}

/* ---- What is allowed ------------------------------------------------------------------------------*/

static const char *error_text(const row *what)
{
    if (what->call == CALL_allocation) return "no memory for";
    if (what->call == CALL_getaddrinfo || what->call == CALL_getnameinfo)
        return what->error == EAI_SYSTEM ? strerror(EMFILE) : gai_strerror(what->error);
    return what->error < SHORT ? strerror(what->error) : "";
}

/* Whether a sentence says what happened: with the name of the error or, where a connection has ended, as the
 * loss of a rank. */
static bool tells(const row *what, const char *text)
{
    if (what->error < SHORT && strstr(text, error_text(what))) return true;
    if (what->call == CALL_allocation && strstr(text, strerror(ENOMEM))) return true;
    if ((what->flags & ELSEWHERE) && strstr(text, " hosts")) return true;
    return (what->flags & HEARD) && (strstr(text, "is gone, and nobody saw how") ||
                                     strstr(text, " left before all ranks had come"));
}

/* Whether a run ended as it may; if not, `why` says what was wrong. */
static bool judge(const run *r, char *why, size_t room)
{
    const scenario *s = &scenarios[r->scenario];
    const row *what = r->f.row < 0 ? NULL : &rows[r->f.row];
    int good = 0;
    bool told = false, last = true;
    for (int i = 0; i < s->launches; i++) {
        const ending *end = &r->ends[i];
        if (!end->done) return snprintf(why, room, "process %d crashed", i), false;
        if (end->fds || end->threads || end->children || end->maps)
            return snprintf(why, room, "process %d keeps %s", i,
                            end->fds       ? "a descriptor"
                            : end->threads ? "a thread"
                            : end->maps    ? "a mapping"
                                           : "a child"),
                   false;
        good +=
            !s->stuck ? end->result == DTRAIN_OK : strstr(end->text, "rank 0 returned 3") != NULL;
        if (end->result && strlen(end->text) < 20)
            return snprintf(why, room, "process %d says only: '%s'", i, end->text), false;
        if (what && end->result) told = told || tells(what, end->text);
        /* A launcher tells the first failure: that a rank is missed may come before that rank gives up. */
        told = told || (s->forks && strstr(end->text, "have not come: "));
    }
    for (int i = 0; i < s->ranks; i++) {
        last = last && r->progress[i] >= 2;
        told = told || (what && tells(what, r->own[i]));
        if (good == s->launches && r->progress[i] != 3 && !s->stuck)
            return snprintf(why, room, "a success, and rank %d did not get through", i), false;
    }
    if (r->wrong) return snprintf(why, room, "%d wrong values", r->wrong), false;
    const bool killed = s->forks && (s->stuck || good < s->launches); /* some rank may have been */
    if ((r->memory.live && !killed) || r->memory.wrong)
        return snprintf(why, room, "%ld allocations are left, %ld are wrong", r->memory.live,
                        r->memory.wrong),
               false;
    if (good == s->launches) return true;
    snprintf(why, room, "%d of %d succeed", good, s->launches);
    if (!what || ((what->flags & RETRIED) && !r->f.lasts) || (good && !last)) return false;
    told = told || (what->flags & QUIET);
    if (!told)
        snprintf(why, room, "nobody says %s",
                 what->error < SHORT ? error_text(what) : "which rank is lost");
    return told;
}

static void print_run(const run *r, const char *why, double seconds)
{
    const scenario *s = &scenarios[r->scenario];
    const row *what = r->f.row < 0 ? NULL : &rows[r->f.row];
    printf("    --case %s %d %s %s %ld %s: %s (%.1f s, deadline %.1f s)\n", s->name, r->f.who,
           what ? what->call_name : "none", what ? what->name : "none", r->f.n,
           r->f.lasts ? "on" : "once", why, seconds, 1e-3 * (double)r->timeout_ms);
    for (int i = 0; i < s->launches; i++)
        printf("      process %d: %s: %s\n", i,
               !r->ends[i].done ? "did not end"
                                : dtrain_result_text((dtrain_result)r->ends[i].result),
               r->ends[i].text);
    for (int i = 0; i < s->ranks; i++)
        printf("      rank %d: came to %d; %s\n", i, r->progress[i], r->own[i]);
}

/* ---- Many runs beside one another -----------------------------------------------------------------*/

enum { SLOTS = 16, MOST_N = 40, SLOWER = 10 };

typedef struct slot {
    run *r; /* shared */
    pid_t pids[MOST_RANKS];
    int live;
    double start;
    bool again; /* it failed before, with shorter deadlines */
} slot;

static void start(slot *at, int scenario_index, const fault *f, bool again)
{
    run *r = at->r;
    const bool must = f->row < 0 || ((rows[f->row].flags & RETRIED) && !f->lasts);
    memset(r, 0, sizeof *r);
    r->f = *f;
    r->scenario = scenario_index;
    r->port = ports_next();
    r->timeout_ms = must ? 15000 : again ? 500 * SLOWER : 500;
    at->again = again || must;
    at->start = test_seconds();
    at->live = scenarios[scenario_index].launches;
    fflush(NULL);
    for (int i = 0; i < at->live; i++)
        if ((at->pids[i] = fork()) == 0) launch(r, i);
}

/* Take note of processes that have ended. One that is far beyond its deadlines is killed, and so is what the
 * others have left: their groups. */
static bool ended(slot *at, bool *hangs)
{
    const double limit = 8 + 4e-3 * (double)at->r->timeout_ms;
    *hangs = test_seconds() > at->start + limit;
    for (int i = 0; i < scenarios[at->r->scenario].launches; i++) {
        int status;
        if (!at->pids[i]) continue;
        if (*hangs) kill(-at->pids[i], SIGKILL);
        if (waitpid(at->pids[i], &status, *hangs ? 0 : WNOHANG) == 0) continue;
        kill(
            -at->pids[i],
            SIGKILL); /* nobody is there: the launch has reaped its ranks, or is judged a failure */
        at->pids[i] = 0;
        at->live--;
    }
    return at->live == 0;
}

typedef struct sweep {
    int scenario, count, next;
    fault *cases;
    int runs, reached, failed;
    double end;
} sweep;

static int compare_drawn(const void *a, const void *b)
{
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

/* List every call that the victims of a scenario made in a run without faults, with each of its errors, in an order
 * that the seed draws. The counts of calls vary a little, so one more is tried. */
static void list_cases(sweep *s, const run *clean, uint64_t seed)
{
    typedef struct drawn {
        uint64_t order;
        fault f;
    } drawn;
    const size_t most = (size_t)ROWS * MOST_ACTORS * MOST_N * 2;
    drawn *list = (drawn *)malloc(most * sizeof *list);
    s->cases = (fault *)malloc(most * sizeof *s->cases);
    s->count = 0;
    for (const char *who = scenarios[s->scenario].victims; *who; who++)
        for (int i = 0; i < ROWS; i++) {
            const bool own = RANKS_SANITIZED &&
                             rows[i].call == CALL_sysconf; /* the sanitizer's, which then dies */
            const long calls = own ? 0 : clean->calls[*who - '0'][rows[i].call];
            for (long n = 1; calls && n <= calls + 1 && n <= MOST_N; n++)
                for (int lasts = 0; lasts <= ((rows[i].flags & LASTS) != 0); lasts++) {
                    const fault f = {i, *who - '0', n, lasts != 0};
                    seed = ranks_mix(seed);
                    list[s->count].order = seed;
                    list[s->count++].f = f;
                }
        }
    qsort(list, (size_t)s->count, sizeof *list, compare_drawn);
    for (int i = 0; i < s->count; i++) s->cases[i] = list[i].f;
    free(list);
}

/* Judge a run that has ended; one that fails for want of time, or may, gets a second try with long deadlines. */
static void finish(sweep *s, slot *at, bool hangs)
{
    char why[200] = "it hangs";
    s->runs += !at->again;
    if (!hangs && judge(at->r, why, sizeof why)) {
        s->reached += at->r->reached;
        return;
    }
    if (!at->again) {
        const fault f = at->r->f;
        start(at, s->scenario, &f, true);
        return;
    }
    s->failed++;
    print_run(at->r, why, test_seconds() - at->start);
    CHECK_MSG(false, "%s: see above", scenarios[s->scenario].name);
}

static void run_cases(sweep *s)
{
    static slot slots[SLOTS];
    bool busy = true, hangs;
    for (int i = 0; i < SLOTS; i++) slots[i].r = (run *)ranks_shared(sizeof(run));
    while (busy) {
        busy = false;
        for (int i = 0; i < SLOTS; i++) {
            const bool more = s->next < s->count && test_seconds() < s->end && s->failed < 30;
            if (slots[i].live && ended(&slots[i], &hangs)) finish(s, &slots[i], hangs);
            if (!slots[i].live && more) start(&slots[i], s->scenario, &s->cases[s->next++], false);
            busy = busy || slots[i].live;
        }
        ranks_sleep_us(500);
    }
    for (int i = 0; i < SLOTS; i++) munmap(slots[i].r, sizeof(run));
}

static uint64_t seed_now;
static double seconds_each, end_of_all;

static void test_scenario(int index)
{
    const fault none = {-1, 0, 0, false};
    sweep s;
    slot clean;
    bool hangs;
    char why[200] = "it hangs";
    memset(&s, 0, sizeof s);
    memset(&clean, 0, sizeof clean);
    s.scenario = index;
    clean.r = (run *)ranks_shared(sizeof(run));
    start(&clean, index, &none, true);
    while (!ended(&clean, &hangs)) ranks_sleep_us(500);
    if (!CHECK_MSG(!hangs && judge(clean.r, why, sizeof why), "without faults: %s", why)) {
        print_run(clean.r, why, test_seconds() - clean.start);
        return;
    }
    list_cases(&s, clean.r, seed_now);
    s.end = fmin(test_seconds() + seconds_each, end_of_all);
    run_cases(&s);
    printf("    %s: %d of %d cases, %d reached\n", scenarios[index].name, s.next, s.count,
           s.reached);
    CHECK_MSG(s.next == 0 || s.reached > s.next / 2, "only %d of %d faults happened", s.reached,
              s.next);
    free(s.cases);
}

static void test_forked(void) { test_scenario(0); }
static void test_threads(void) { test_scenario(1); }
static void test_joined(void) { test_scenario(2); }
static void test_apart(void) { test_scenario(3); }
static void test_nodes(void) { test_scenario(4); }
static void test_stuck(void) { test_scenario(5); }

/* --case SCENARIO WHO CALL ERROR N once|on: twenty times, because the order of calls varies */
static int one_case(char **words)
{
    int failures = 0;
    for (int round = 0; round < 20; round++) {
        sweep s;
        fault f = {-1, atoi(words[1]), atol(words[4]), strcmp(words[5], "on") == 0};
        memset(&s, 0, sizeof s);
        for (int i = 0; i < ROWS; i++)
            if (strcmp(words[2], rows[i].call_name) == 0 && strcmp(words[3], rows[i].name) == 0)
                f.row = i;
        for (int i = 0; i < SCENARIOS; i++)
            if (strcmp(words[0], scenarios[i].name) == 0) s.scenario = i;
        s.cases = &f;
        s.count = 1;
        s.end = test_seconds() + 1;
        run_cases(&s);
        failures += s.failed;
    }
    printf("%d of 20 failed\n", failures);
    return failures != 0;
}

int main(int argc, char **argv)
{
    bridge_ops.abi = DTRAIN_COMM_ABI;
    bridge_ops.name = "bridge";
    bridge_ops.create = bridge_create;
    bridge_ops.destroy = bridge_destroy;
    const bool has_seconds = argc > 2 && strcmp(argv[1], "--seconds") == 0;
    seed_now = test_seed();
    const double seconds = has_seconds ? atof(argv[2]) : test_full() ? 20 : 6;
    seconds_each = has_seconds || test_full() ? seconds : seconds / SCENARIOS;
    end_of_all = test_seconds() + seconds;
    if (argc > 1 && argv[1][0] == '-' && !has_seconds &&
        !(argc == 8 && strcmp(argv[1], "--case") == 0)) {
        fprintf(stderr, "%s: \"%s\" is not --seconds N or --case and its six words\n", argv[0],
                argv[1]);
        return 2;
    }
    test_begin(has_seconds ? 1 : argc, argv);
    if (argc == 8 && strcmp(argv[1], "--case") == 0) return one_case(argv + 2);
    if (has_seconds) setenv("DTRAIN_TEST_TIMEOUT", argv[2], 0);
    printf("  seed %llu\n", (unsigned long long)seed_now);
    RUN(test_forked);
    RUN(test_threads);
    RUN(test_stuck);
    RUN(test_nodes);
    RUN(test_joined);
    RUN(test_apart);
    return test_summary();
}
