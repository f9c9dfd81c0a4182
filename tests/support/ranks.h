/* ranks.h: what the tests of launch, communicators and faults share: a launch that looks for leftovers,
 * a page that ranks report to, repeatable random numbers. Include it after dtrain.h and test.h. */
#ifndef DTRAIN_TEST_RANKS_H
#define DTRAIN_TEST_RANKS_H

#include "allocator.h"

#include <dirent.h>
#include <pthread.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define RANKS_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define RANKS_SANITIZED 1
#endif
#endif
#ifndef RANKS_SANITIZED
#define RANKS_SANITIZED 0
#endif

enum { RANKS_MOST = 64 };

/* SplitMix64: one 64-bit state makes well mixed numbers. */
static inline uint64_t ranks_mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}
static inline uint64_t ranks_random(uint64_t *state, uint64_t limit)
{
    *state = ranks_mix(*state);
    return limit ? *state % limit : 0;
}

/* The rank in the world of a communicator's rank. */
static inline int ranks_in_world(const dtrain_comm *comm, int rank)
{
    dtrain_comm_info info;
    dtrain_comm_query(comm, &info);
    return info.world_ranks[rank];
}

static inline void ranks_sleep_us(long us)
{
    struct timespec left;
    left.tv_sec = us / 1000000;
    left.tv_nsec = us % 1000000 * 1000;
    while (nanosleep(&left, &left) != 0 && errno == EINTR) {}
}

static inline void *ranks_shared(size_t bytes)
{
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) exit(3);
    return memory;
}

/* A thread of the host that takes the status of every child of the process. */
typedef struct ranks_reaper {
    pthread_t thread;
    int32_t runs, ends;
} ranks_reaper;
static inline void *ranks_reap_all(void *argument)
{
    ranks_reaper *self = (ranks_reaper *)argument;
    __atomic_store_n(&self->runs, 1, __ATOMIC_RELEASE);
    while (!__atomic_load_n(&self->ends, __ATOMIC_ACQUIRE)) {
        while (waitpid(-1, NULL, WNOHANG) > 0) {}
        ranks_sleep_us(200);
    }
    return NULL;
}
/* Return when the thread runs: a thread that begins allocates, and a rank that was forked meanwhile would wait for
 * ever for a lock of the address sanitizer's allocator. False: there is no thread. */
static inline bool ranks_reaper_start(ranks_reaper *reaper)
{
    reaper->runs = reaper->ends = 0;
    if (pthread_create(&reaper->thread, NULL, ranks_reap_all, reaper) != 0) return false;
    while (!__atomic_load_n(&reaper->runs, __ATOMIC_ACQUIRE)) ranks_sleep_us(100);
    return true;
}
static inline void ranks_reaper_stop(ranks_reaper *reaper)
{
    __atomic_store_n(&reaper->ends, 1, __ATOMIC_RELEASE);
    pthread_join(reaper->thread, NULL);
}

/* A parameter with memory of the test's own. */
static inline dtrain_param ranks_param(const char *name, float *value, float *grad, int64_t rows,
                                       int64_t columns)
{
    dtrain_param p;
    memset(&p, 0, sizeof p);
    p.name = name;
    p.value = value;
    p.grad = grad;
    p.shape[0] = rows;
    p.shape[1] = columns;
    return p;
}

/* ---- what a process holds ---- */

/* Entries of a folder whose names contain `part`. */
static inline int ranks_entries(const char *folder, const char *part)
{
    DIR *dir = opendir(folder);
    struct dirent *entry;
    int count = 0;
    if (!dir) return -1;
    while ((entry = readdir(dir)) != NULL) count += strstr(entry->d_name, part) != NULL;
    closedir(dir);
    return count;
}

/* The shared mappings of this process: those of a world, and what tests share. */
static inline int ranks_maps(void)
{
    FILE *file = fopen("/proc/self/maps", "r");
    char line[500];
    int count = 0;
    while (file && fgets(line, sizeof line, file))
        count += strstr(line, "/memfd:dtrain") || strstr(line, "/dev/zero");
    if (file) fclose(file);
    return count;
}

typedef struct ranks_holdings {
    int fds, threads, shm, children, maps;
} ranks_holdings;

static inline ranks_holdings ranks_look(void)
{
    ranks_holdings now;
    siginfo_t child;
    now.fds = ranks_entries("/proc/self/fd", "");
    now.threads = ranks_entries("/proc/self/task", "");
    now.shm = ranks_entries("/dev/shm", "dtrain");
    now.maps = ranks_maps();
    now.children = waitid(P_ALL, 0, &child, WEXITED | WNOHANG | WNOWAIT) == 0 ? 1 : 0;
    return now;
}

/* A joined thread leaves /proc a moment after the join: look again for a while. Sanitizers start
 * threads of their own. */
static inline void ranks_check_holdings(const ranks_holdings *before, const char *what)
{
    ranks_holdings now = ranks_look();
    const int looks = RANKS_SANITIZED ? 50 : 1000;
    int look;
    for (look = 0; look < looks && now.threads > before->threads; look++) {
        ranks_sleep_us(look < 10 ? 200 : 4000);
        now = ranks_look();
    }
    CHECK_MSG(now.fds <= before->fds, "%s: %d file descriptors before, %d after", what, before->fds,
              now.fds);
    CHECK_MSG(now.threads <= before->threads || RANKS_SANITIZED, "%s: %d threads before, %d after",
              what, before->threads, now.threads);
    CHECK_MSG(now.shm <= before->shm, "%s: %d entries in /dev/shm before, %d after", what,
              before->shm, now.shm);
    CHECK_MSG(now.maps <= before->maps, "%s: %d shared mappings before, %d after", what,
              before->maps, now.maps);
    CHECK_MSG(now.children <= before->children, "%s: a child process is left", what);
}

/* ---- time ---- */

/* A machine that is shared may stand still for a second at any moment: what must come "at once" has this many
 * seconds, half of a deadline; and a rank that must come after another one waits for it, not for a while. */
#define RANKS_SOON 10.0

/* The deadline of a test that waits until it has passed: the other ranks come before, also on a busy machine. */
#define RANKS_SHORT_MS 2500

/* Waits until others have counted to `wanted`. */
static inline bool ranks_await(const int32_t *count, int32_t wanted)
{
    const double end = test_seconds() + RANKS_SOON;
    while (__atomic_load_n(count, __ATOMIC_ACQUIRE) < wanted && test_seconds() < end)
        ranks_sleep_us(1000);
    return CHECK_MSG(__atomic_load_n(count, __ATOMIC_ACQUIRE) >= wanted, "the others do not come");
}
static inline void ranks_count(int32_t *count) { __atomic_fetch_add(count, 1, __ATOMIC_RELEASE); }

/* ---- launching ---- */

static inline bool ranks_stop_requested(const dtrain_world *world)
{
    dtrain_world_info info;
    dtrain_world_query(world, &info);
    return info.stop_requested;
}

/* Agree on whether any rank has been asked to stop, as a training loop of one's own does. */
static inline dtrain_result ranks_agree_stop(dtrain_world *world, bool *stop)
{
    char all[DTRAIN_MAX_RANKS];
    const char mine = ranks_stop_requested(world);
    const dtrain_result result = dtrain_world_all_gather(world, &mine, 1, all);
    *stop = false;
    for (int i = 0; i < dtrain_world_size(world) && result == DTRAIN_OK; i++)
        *stop = *stop || all[i];
    return result;
}

static inline dtrain_launch_desc ranks_desc(int ranks, uint32_t mode)
{
    dtrain_launch_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.rank_count = (uint32_t)ranks;
    desc.mode = mode;
    desc.threads_per_rank = 1;
    desc.timeout_ms =
        20000; /* other programs may be busy here; a hang still ends inside the test */
    desc.grace_ms = 2000;
    desc.options.log_level = DTRAIN_LOG_ERROR;
    desc.options.reserve_bytes = (size_t)256 << 20;
    return desc;
}

static inline const char *ranks_mode_name(uint32_t mode)
{
    return mode == DTRAIN_LAUNCH_THREADS ? "threads" : "processes";
}

/* Launches and checks that nothing is left; the result is the caller's to judge. */
static inline dtrain_result ranks_launch(const dtrain_launch_desc *desc, dtrain_rank_fn rank_main,
                                         void *user, dtrain_launch_info *info)
{
    ranks_holdings before = ranks_look();
    dtrain_result result = dtrain_launch(desc, rank_main, user, info);
    ranks_check_holdings(&before, "after dtrain_launch");
    return result;
}

/* A run in which every rank must end well. */
static inline void ranks_run(int ranks, uint32_t mode, dtrain_rank_fn rank_main, void *user)
{
    dtrain_launch_desc desc = ranks_desc(ranks, mode);
    dtrain_result result = ranks_launch(&desc, rank_main, user, NULL);
    CHECK_MSG(result == DTRAIN_OK, "%d ranks, %s: %s: %s", ranks, ranks_mode_name(mode),
              dtrain_result_text(result), result == DTRAIN_OK ? "" : dtrain_last_error());
}

/* For rank_main: a call that must succeed; otherwise the rank ends and the others hear of it. */
#define RANKS_TRY(call)                                                        \
    do {                                                                       \
        dtrain_result ranks_result = (call);                                   \
        if (!CHECK_MSG(ranks_result == DTRAIN_OK, "%s: %s: %s", #call,         \
                       dtrain_result_text(ranks_result), dtrain_last_error())) \
            return 1;                                                          \
    } while (0)

#endif
