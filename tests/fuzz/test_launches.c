/* Random launches: worlds of 1 to 8 ranks that are forked, are threads, or meet by TCP, and to whom something happens
 * at a random moment: they are killed, stopped, late, absent, started twice, wrong about the world's size or its
 * key, short of memory or files; strangers call; they exit, give up, disagree.
 *
 *     build/tests/test_launches                       the seeds that ever failed, then some seconds of new ones;
 *                                                     with DTRAIN_TEST_FULL=1 10 seconds of new ones
 *     build/tests/test_launches --count 10000         so many new ones; they are printed to be repeated
 *     build/tests/test_launches --seconds 120         as many as fit
 *     build/tests/test_launches --seed 77             this one twenty times, in words; if it fails it is shrunk
 *
 * From the plan of a program follows who may fail, and for what. The oracle: where nothing harmful is planned, all
 * ranks succeed, with the right values. Otherwise those who have done no harm end alike: all of them get through, if
 * the harm may have come too late, or all fail, with an error that names one of those who have done
 * harm. Only behind the last collective may some fail and others not. All end within their deadlines, and no
 * descriptor, thread, process, mapping or allocation is left. */
#include "test.h"

#include "dtrain.h"
#include "ranks.h"
#include "seeds.h"
#include "ports.h"

#include <poll.h>
#include <pthread.h>
#include <sys/resource.h>

enum {
    MOST_RANKS = 8,
    MOST_PROCESSES = MOST_RANKS + 1,
    MOST_TROUBLES = 3,
    MOST_STRANGERS = 6,
    MOST_ROUNDS = 12
};

/* ---- A program ------------------------------------------------------------------------------------*/

typedef enum way {
    FORKED,
    THREADS,
    JOINED,
    NODES
} way; /* NODES: two launchers, which fork half of the ranks each */
static const char *const way_names[] = {"forked", "threads", "joined", "nodes"};

typedef enum trouble_kind {
    NOTHING,
    KILLED,    /* by SIGKILL */
    STOPPED,   /* by SIGSTOP, for ever */
    CONTINUED, /* by SIGSTOP, and goes on later */
    EXITS,     /* calls exit inside of rank_main */
    RETURNS,   /* a value from rank_main */
    ABORTS,    /* dtrain_world_abort */
    DISAGREES, /* calls another collective, or with another count */
    NO_MEMORY, /* an allocation fails */
    FEW_FILES, /* the limit on open files is low */
    ORPHANED,  /* its launcher is killed by SIGKILL */
    LATE,      /* starts later than the others */
    ABSENT,    /* never starts */
    TWICE,     /* is started twice */
    OTHER_SIZE,
    OTHER_KEY,
    KINDS
} trouble_kind;
static const char *const kind_names[] = {"nothing",   "killed",    "stopped",    "continued",
                                         "exits",     "returns",   "aborts",     "disagrees",
                                         "no memory", "few files", "orphaned",   "late",
                                         "absent",    "twice",     "other size", "other key"};

typedef struct trouble {
    trouble_kind kind;
    int rank;
    int round; /* of the rank itself; -1: from outside ... */
    long us;   /* ... so long after the start; CONTINUED: how long it is stopped; LATE: how late */
    long number; /* a value to return, which allocation, how many files */
} trouble;

/* Who calls rank 0 without being a rank. */
typedef struct stranger {
    long us; /* when, after the start */
    int kind; /* 0: says nothing; 1: noise; 2: a recorded hello; 3: its beginning; 4: one with a wrong bit */
    size_t bytes; /* of noise or beginning */
    uint64_t bit;
    long stays_us;
} stranger;

typedef struct program {
    uint64_t seed;
    way how;
    int ranks, rounds, trouble_count, stranger_count;
    trouble t[MOST_TROUBLES];
    stranger s[MOST_STRANGERS];
    bool reaper, deaf,
        closed;    /* the host reaps all children; ignores SIGCHLD; has closed descriptors 0 to 2 */
    char note[16]; /* what shrinking took away */
} program;

static uint64_t pick(uint64_t *state, uint64_t limit)
{
    *state = ranks_mix(*state);
    return (*state >> 16) % limit;
}

static bool harmless(trouble_kind kind)
{
    return kind == NOTHING || kind == CONTINUED || kind == LATE;
}
static trouble generate_trouble(const program *g, uint64_t *state)
{
    static const trouble_kind in_thread[] = {RETURNS, ABORTS, DISAGREES, NO_MEMORY, FEW_FILES};
    trouble t;
    memset(&t, 0, sizeof t);
    if (g->how == THREADS) t.kind = in_thread[pick(state, 5)];
    else t.kind = (trouble_kind)(1 + pick(state, g->how == JOINED ? KINDS - 1 : LATE - 1));
    t.rank = (int)pick(state, (uint64_t)g->ranks);
    if (t.kind == ORPHANED && g->how == JOINED) t.kind = KILLED;
    t.round = (int)pick(state, (uint64_t)g->rounds + 1);
    t.us = (long)pick(state, pick(state, 2) ? 20000 : 200000);
    t.number = (long)pick(state, 40);
    if (t.kind == KILLED || t.kind == STOPPED || t.kind == CONTINUED)
        if (pick(state, 2)) t.round = -1;
    if (t.kind == ORPHANED) t.round = -1;
    if (t.kind == NO_MEMORY) t.number++;
    if (t.kind == FEW_FILES) t.number += 3 + (pick(state, 2) ? 40 : 0);
    if (t.kind == RETURNS && t.number == 0) t.number = 256;
    return t;
}

static program generate(uint64_t seed)
{
    program g;
    uint64_t state = ranks_mix(seed);
    memset(&g, 0, sizeof g);
    g.seed = seed;
    g.how = (way)pick(&state, 6);
    if (g.how > NODES) g.how = JOINED;
    g.ranks = 1 + (int)pick(&state, pick(&state, 4) ? 4 : MOST_RANKS);
    if (g.how == JOINED && g.ranks == 1) g.ranks = 2;
    if (g.how == NODES) g.ranks += g.ranks % 2;
    g.rounds = 1 + (int)pick(&state, MOST_ROUNDS);
    g.trouble_count = (int)pick(&state, MOST_TROUBLES + 1);
    if (g.trouble_count == MOST_TROUBLES) g.trouble_count = 1; /* one harm alone is named best */
    for (int i = 0; i < g.trouble_count; i++) g.t[i] = generate_trouble(&g, &state);
    if (g.how >= JOINED && pick(&state, 2))
        g.stranger_count = 1 + (int)pick(&state, MOST_STRANGERS);
    for (int i = 0; i < g.stranger_count; i++) {
        g.s[i].us = (long)pick(&state, 60000);
        g.s[i].kind = (int)pick(&state, 5);
        g.s[i].bytes = (size_t)pick(&state, pick(&state, 2) ? 200 : 5000);
        g.s[i].bit = pick(&state, 1u << 20);
        g.s[i].stays_us = (long)pick(&state, 300000);
    }
    g.reaper = g.how == FORKED && pick(&state, 6) == 0;
    g.deaf = g.how != THREADS && pick(&state, 6) == 0;
    g.closed = pick(&state, 8) == 0;
    return g;
}

/* ---- What follows from a plan ---------------------------------------------------------------------*/

static const trouble *trouble_of(const program *g, trouble_kind kind, int rank)
{
    for (int i = 0; i < g->trouble_count; i++)
        if (g->t[i].kind == kind && g->t[i].rank == rank) return &g->t[i];
    return NULL;
}
static bool any_kind(const program *g, trouble_kind kind)
{
    for (int i = 0; i < g->trouble_count; i++)
        if (g->t[i].kind == kind) return true;
    return false;
}

typedef enum harm { HARM_NONE, HARM_MAYBE, HARM_SURE } harm;

/* A rank does harm for sure when it does so in one of its rounds, or never comes. What another harm may forestall is
 * certain all the same: somebody fails. */
static harm harm_of(const program *g)
{
    harm most = HARM_NONE;
    for (int i = 0; i < g->trouble_count; i++) {
        const trouble *t = &g->t[i];
        const bool alone = g->ranks == 1;
        harm h = HARM_MAYBE;
        if (harmless(t->kind)) h = HARM_NONE;
        else if (t->kind == STOPPED && trouble_of(g, CONTINUED, t->rank)) h = HARM_MAYBE;
        else if (t->kind == ABSENT || t->kind == OTHER_SIZE || t->kind == OTHER_KEY) h = HARM_SURE;
        else if (t->kind == NO_MEMORY || t->kind == FEW_FILES || t->kind == TWICE) h = HARM_MAYBE;
        else if (t->round < 0 || t->round == g->rounds) h = HARM_MAYBE;
        else if (alone && (t->kind == DISAGREES || (t->kind == EXITS && t->number % 256 == 0)))
            h = HARM_MAYBE;
        else h = HARM_SURE;
        if (h > most) most = h;
    }
    return most;
}

/* Whether somebody has to wait until a deadline. Where nobody has, deadlines are long, and a slow machine cannot be
 * taken for a failure. */
static bool needs_deadline(const program *g)
{
    for (int i = 0; i < g->trouble_count; i++) {
        const trouble *t = &g->t[i];
        const bool network = g->how >= JOINED;
        if (t->kind == STOPPED || t->kind >= ABSENT) return true;
        if (network && (t->kind == NO_MEMORY || t->kind == FEW_FILES ||
                        ((t->kind == KILLED || t->kind == ORPHANED) && t->round < 0)))
            return true;
    }
    return false;
}

/* The process that has forked a rank. */
static int launcher_of(const program *g, int rank)
{
    return g->how == NODES ? rank / (g->ranks / 2) : 0;
}

/* Whether a rank may be the cause of a failure. Whose memory is short only processes of one rank know. Where others
 * have done harm, who is late or was stopped may be blamed for a deadline. */
static bool is_culprit(const program *g, int rank)
{
    for (int i = 0; i < g->trouble_count; i++) {
        const trouble *t = &g->t[i];
        if (t->rank == rank) return true;
        if (t->kind == ORPHANED && launcher_of(g, t->rank) == launcher_of(g, rank)) return true;
        if ((t->kind == NO_MEMORY || t->kind == FEW_FILES) && g->how != JOINED) return true;
    }
    return false;
}

/* ---- A run, in shared memory ----------------------------------------------------------------------*/

typedef struct ending {
    int32_t done, result;
    int32_t fds, threads, children, maps; /* that are left */
    char text[1024];
} ending;

typedef struct run {
    program g;
    uint32_t timeout_ms;
    uint16_t port;
    int32_t verdict; /* 1: good; 2: bad; 0: the leader died */
    int32_t
        kind; /* of good: 0: nothing harmful was planned; 1: all got through all the same; 2: errors */
    bool by_time; /* bad, and a slow machine may be the reason */
    char why[1600];
    int32_t wrong; /* values */
    int32_t progress[MOST_RANKS],
        stops[MOST_RANKS]; /* 1: began; 2: in the last collective; 3: through it */
    pid_t rank_pids[MOST_RANKS];
    int32_t own_result[MOST_RANKS];
    char own[MOST_RANKS][600];
    ending ends[MOST_PROCESSES];
    counted_memory memory[MOST_PROCESSES];
} run;

/* ---- What ranks do --------------------------------------------------------------------------------*/

static uint64_t draw(const program *g, int round, int what)
{
    return ranks_mix(ranks_mix(g->seed + (uint64_t)round * 977u) + (uint64_t)what) >> 8;
}

static dtrain_result gathers(dtrain_world *world, run *r, int round, size_t count)
{
    int32_t mine[256], all[256 * MOST_RANKS];
    const int rank = dtrain_world_rank(world), size = dtrain_world_size(world);
    for (size_t k = 0; k < count; k++) mine[k] = (int32_t)(draw(&r->g, round, rank) + k);
    TRY(dtrain_world_all_gather(world, mine, count * sizeof *mine, all));
    for (int i = 0; i < size; i++)
        for (size_t k = 0; k < count; k++)
            r->wrong += all[(size_t)i * count + k] != (int32_t)(draw(&r->g, round, i) + k);
    return DTRAIN_OK;
}

static dtrain_result reduces(dtrain_world *world, run *r, int round, size_t count)
{
    const int rank = dtrain_world_rank(world), size = dtrain_world_size(world);
    float *data = (float *)malloc((count + 1) * sizeof *data);
    for (size_t k = 0; k < count; k++) data[k] = (float)((k + (size_t)round) % 100 + (size_t)rank);
    const dtrain_result result = dtrain_all_reduce(dtrain_world_comm(world), data, data, count,
                                                   DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, NULL);
    for (size_t k = 0; result == DTRAIN_OK && k < count; k++)
        r->wrong += data[k] != (float)((size_t)size * ((k + (size_t)round) % 100) +
                                       (size_t)(size * (size - 1) / 2));
    free(data);
    return result;
}

/* One round: the same collective on all ranks, unless this one disagrees. */
static dtrain_result does_round(dtrain_world *world, run *r, int round, size_t extra)
{
    const uint64_t what = draw(&r->g, round, 100) % 6, count = draw(&r->g, round, 101);
    if (draw(&r->g, round, 200 + dtrain_world_rank(world)) % 3 == 0)
        ranks_sleep_us((long)(draw(&r->g, round, 300 + dtrain_world_rank(world)) % 1500));
    if (what == 0) return gathers(world, r, round, count % 200 + extra);
    if (what == 1) return reduces(world, r, round, 20000 + count % 9000 + extra);
    if (what == 2 && !extra) return dtrain_barrier(dtrain_world_comm(world));
    if (what == 3 && !extra) TRY(dtrain_world_poll(world));
    return reduces(world, r, round, count % 300 + extra);
}

/* What a rank does to itself before a round; *leaves: it returns this. */
static void suffers(dtrain_world *world, run *r, int round, size_t *extra, int *leaves)
{
    const int rank = dtrain_world_rank(world);
    for (int i = 0; i < r->g.trouble_count; i++) {
        const trouble *t = &r->g.t[i];
        if (t->rank != rank || t->round != round) continue;
        if (t->kind == KILLED) raise(SIGKILL);
        if (t->kind == STOPPED || t->kind == CONTINUED) {
            __atomic_store_n(&r->stops[rank], 1, __ATOMIC_RELEASE);
            raise(SIGSTOP);
        }
        if (t->kind == EXITS) exit((int)t->number);
        if (t->kind == RETURNS) *leaves = (int)t->number;
        if (t->kind == ABORTS) dtrain_world_abort(world, DTRAIN_ERROR_SYSTEM, "the card fell out");
        if (t->kind == ABORTS) *leaves = 4;
        if (t->kind == DISAGREES) *extra = 7 + (size_t)rank;
    }
}

static dtrain_result works(dtrain_world *world, run *r, int *leaves)
{
    const int rank = dtrain_world_rank(world);
    for (int round = 0; round < r->g.rounds; round++) {
        size_t extra = 0;
        suffers(world, r, round, &extra, leaves);
        if (*leaves) return DTRAIN_OK;
        TRY(does_round(world, r, round, extra));
    }
    r->progress[rank] = 2;
    TRY(gathers(world, r, MOST_ROUNDS, 3));
    r->progress[rank] = 3;
    size_t extra = 0;
    suffers(world, r, r->g.rounds, &extra, leaves);
    return DTRAIN_OK;
}

static int rank_main(dtrain_world *world, void *user)
{
    run *r = (run *)user;
    const int rank = dtrain_world_rank(world);
    int leaves = 0;
    r->progress[rank] = 1;
    __atomic_store_n(&r->rank_pids[rank], getpid(), __ATOMIC_RELEASE);
    const dtrain_result result = works(world, r, &leaves);
    r->own_result[rank] = (int32_t)result;
    if (result != DTRAIN_OK)
        snprintf(r->own[rank], sizeof r->own[rank], "%.580s", dtrain_last_error());
    return leaves ? leaves : result == DTRAIN_OK ? 0 : 1;
}

/* ---- A process that calls dtrain_launch -----------------------------------------------------------*/

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

/* The variables that a launcher sets for process `index`; the one behind the last rank is somebody's twin. */
static void set_environment(const run *r, int index)
{
    const program *g = &r->g;
    int rank = index;
    if (g->how < JOINED) return;
    for (int i = 0; i < g->trouble_count && index == g->ranks; i++)
        if (g->t[i].kind == TWICE) rank = g->t[i].rank;
    set_number("DTRAIN_PORT", r->port);
    if (g->how == NODES) {
        set_number("PET_NNODES", 2);
        set_number("PET_NODE_RANK", index);
        set_number("PET_NPROC_PER_NODE", g->ranks / 2);
        setenv("PET_MASTER_ADDR", "127.0.0.1", 1);
        return;
    }
    set_number("RANK", rank);
    set_number("WORLD_SIZE", g->ranks + (trouble_of(g, OTHER_SIZE, rank) != NULL));
    setenv("MASTER_ADDR", "127.0.0.1", 1);
    setenv("DTRAIN_JOB_KEY", trouble_of(g, OTHER_KEY, rank) ? "red" : "blue", 1);
}

/* Never returns. */
static void launch(run *r, int index)
{
    const program *g = &r->g;
    ending *end = &r->ends[index];
    dtrain_launch_desc desc = ranks_desc(g->how < JOINED ? g->ranks : 0, g->how == THREADS);
    ranks_reaper reaper;
    desc.timeout_ms = r->timeout_ms;
    desc.grace_ms =
        r->timeout_ms / 4; /* 5 s where nothing needs a deadline: a machine may stand still */
    desc.options.reserve_bytes = (size_t)4 << 20;
    desc.options.log = say_nothing;
    desc.options.allocator = counted_allocator(&r->memory[index]);
    set_environment(r, index);
    for (int i = 0; i < g->trouble_count; i++) {
        const trouble *t = &g->t[i];
        struct rlimit files;
        const bool mine = g->how == JOINED ? t->rank == index : index == 0;
        if (mine && t->kind == NO_MEMORY) r->memory[index].fail_at = t->number;
        files.rlim_cur = files.rlim_max = (rlim_t)t->number;
        if (mine && t->kind == FEW_FILES) setrlimit(RLIMIT_NOFILE, &files);
    }
    for (int fd = 0; fd < 3 && g->closed; fd++) close(fd);
    if (g->deaf) signal(SIGCHLD, SIG_IGN);
    const ranks_holdings before = ranks_look();
    const bool reaps = g->reaper && ranks_reaper_start(&reaper);
    end->result = dtrain_launch(&desc, rank_main, r, NULL);
    if (end->result) snprintf(end->text, sizeof end->text, "%s", dtrain_last_error());
    if (reaps) ranks_reaper_stop(&reaper);
    ranks_holdings after = ranks_look();
    for (int look = 0; look < 1000 && after.threads > before.threads && !RANKS_SANITIZED; look++) {
        ranks_sleep_us(1000);
        after = ranks_look();
    }
    end->fds = after.fds - before.fds;
    end->threads = RANKS_SANITIZED ? 0 : after.threads - before.threads;
    end->children = after.children - before.children;
    end->maps = after.maps - before.maps;
    __atomic_store_n(&end->done, 1, __ATOMIC_RELEASE);
    _exit(0);
}

/* ---- The leader of a run --------------------------------------------------------------------------*/

typedef struct caller { /* a stranger at work */
    int fd;             /* -1: not yet, or gone */
    bool gone;
} caller;

typedef struct leader {
    run *r;
    int processes;
    pid_t pids[MOST_PROCESSES];
    bool started[MOST_PROCESSES], over[MOST_PROCESSES], acted[MOST_TROUBLES],
        resumed[MOST_TROUBLES];
    double stopped_at[MOST_TROUBLES], start, ended;
    caller callers[MOST_STRANGERS];
} leader;

static unsigned char hello[4096]; /* of a rank with another key, as it was recorded */
static size_t hello_bytes;

/* What a stranger does: call, say its sentence, stay a while. */
static void estrange(leader *l, int i)
{
    const stranger *s = &l->r->g.s[i];
    caller *c = &l->callers[i];
    const double now = test_seconds() - l->start;
    unsigned char said[5000];
    size_t bytes = s->bytes;
    if (c->gone || now < 1e-6 * (double)s->us) return;
    if (c->fd >= 0) {
        if (now < 1e-6 * (double)(s->us + s->stays_us)) return;
        close(c->fd);
        c->fd = -1;
        c->gone = true;
        return;
    }
    struct sockaddr_in address;
    memset(&address, 0, sizeof address);
    address.sin_family = AF_INET;
    address.sin_port = htons(l->r->port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof address) != 0) {
        if (fd >= 0) close(fd);
        c->gone = now > 0.5;
        return;
    }
    for (size_t k = 0; k < sizeof said; k++) said[k] = (unsigned char)ranks_mix(s->bit + k);
    if (s->kind >= 2) memcpy(said, hello, hello_bytes);
    if (s->kind == 2 || s->kind == 4) bytes = hello_bytes;
    if (s->kind == 4) said[s->bit / 8 % hello_bytes] ^= (unsigned char)(1u << (s->bit % 8));
    if (s->kind) (void)!send(fd, said, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
    c->fd = fd;
}

/* The process that a trouble happens to, 0 when there is none now. A rank that has stopped itself says who it is: it
 * may be a twin. */
static pid_t pid_of(const leader *l, const trouble *t)
{
    const program *g = &l->r->g;
    const bool starts = g->how == JOINED && t->round < 0;
    const int launcher = launcher_of(g, t->rank);
    pid_t pid = __atomic_load_n(&l->r->rank_pids[t->rank], __ATOMIC_ACQUIRE);
    if (t->kind == ORPHANED) pid = l->pids[launcher];
    if (starts) pid = l->pids[t->rank];
    for (int i = 0; i < l->processes; i++)
        if (l->over[i] && (l->pids[i] == pid || (g->how != JOINED && i == launcher))) return 0;
    return pid;
}

/* Do what troubles from outside do. A rank that is stopped for ever is killed when the others must have ended. */
static void act(leader *l)
{
    const run *r = l->r;
    const double now = test_seconds();
    for (int i = 0; i < r->g.trouble_count; i++) {
        const trouble *t = &r->g.t[i];
        const pid_t pid = pid_of(l, t);
        const bool stops = t->kind == STOPPED || t->kind == CONTINUED;
        if (pid <= 0 || (t->kind != KILLED && t->kind != ORPHANED && !stops)) continue;
        if (t->round < 0 && !l->acted[i] && now >= l->start + 1e-6 * (double)t->us) {
            l->acted[i] = true;
            l->stopped_at[i] = now;
            kill(pid, stops ? SIGSTOP : SIGKILL);
        }
        if (t->round >= 0 && stops && !l->acted[i] &&
            __atomic_load_n(&r->stops[t->rank], __ATOMIC_ACQUIRE)) {
            l->acted[i] = true;
            l->stopped_at[i] = now;
        }
        if (!l->acted[i] || !stops || l->resumed[i]) continue;
        if (t->kind == CONTINUED && now > l->stopped_at[i] + 1e-6 * (double)t->us) {
            kill(pid, SIGCONT); /* again and again: it may not have stopped yet */
            l->resumed[i] = now > l->stopped_at[i] + 1e-6 * (double)t->us + 20;
        }
        if (t->kind == STOPPED && now > l->stopped_at[i] + 4 + 4e-3 * r->timeout_ms)
            kill(pid, SIGKILL);
    }
}

static void start_process(leader *l, int index)
{
    if (l->started[index]) return;
    for (int i = 0; i < l->r->g.trouble_count; i++) {
        const trouble *t = &l->r->g.t[i];
        if (t->rank != index || l->r->g.how != JOINED) continue;
        if (t->kind == LATE && test_seconds() < l->start + 1e-6 * (double)t->us) return;
        if (t->kind == ABSENT) return;
    }
    l->started[index] = true;
    if ((l->pids[index] = fork()) == 0) launch(l->r, index);
}

/* Start what is to be started, and see to all until nobody is left; false when they hang. */
static bool lead(leader *l)
{
    const run *r = l->r;
    int live = 1;
    l->start = test_seconds();
    while (live) {
        live = 0;
        for (int i = 0; i < l->processes; i++) {
            start_process(l, i);
            if (l->started[i] && !l->over[i]) l->over[i] = waitpid(l->pids[i], NULL, WNOHANG) != 0;
            live += l->started[i] ? !l->over[i] : !trouble_of(&r->g, ABSENT, i);
        }
        for (int i = 0; i < r->g.stranger_count; i++) estrange(l, i);
        act(l);
        if (test_seconds() > l->start + 25 + 6e-3 * r->timeout_ms) return false;
        ranks_sleep_us(300);
    }
    l->ended = test_seconds();
    return true;
}

/* Whether no process is left: orphans are children of this one. The ranks of a launcher that was killed may still
 * be ending. */
static bool all_gone(const leader *l)
{
    while (test_seconds() < l->ended + RANKS_SOON) {
        const pid_t pid = waitpid(-1, NULL, WNOHANG);
        if (pid < 0) return true;
        if (pid == 0) ranks_sleep_us(300);
    }
    return false;
}

static bool bad(run *r, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(r->why, sizeof r->why, format, args);
    va_end(args);
    return false;
}

/* Whether a sentence names one of those who may have done harm: "rank 3", or 3 in the list of those who have not
 * come. */
static bool names_culprit(const program *g, const char *text)
{
    const char *list = strstr(text, "not come: ");
    for (int rank = 0; rank < g->ranks; rank++) {
        char name[16];
        snprintf(name, sizeof name, "rank %d", rank);
        if (!is_culprit(g, rank)) continue;
        for (const char *at = text; (at = strstr(at, name)) != NULL; at++)
            if (at[strlen(name)] < '0' || at[strlen(name)] > '9') return true;
        if (list && strchr(list, '0' + rank)) return true;
    }
    return false;
}

/* What a sentence must have when one thing alone happens, and nothing else can be the reason. */
static const char *words_of(const program *g)
{
    if (g->trouble_count != 1) return "";
    if (g->t[0].kind == OTHER_SIZE) return "world size";
    if (g->t[0].kind == OTHER_KEY && !g->stranger_count) return "DTRAIN_JOB_KEY";
    if (g->t[0].kind == TWICE && g->t[0].rank) return "started twice";
    return "";
}

/* Whether process `index` belongs to somebody who has done harm. A rank that calls exit(0) is a success to the
 * launcher that has forked it, and lost to other nodes. */
static bool guilty(const program *g, int index)
{
    for (int i = 0; i < g->trouble_count && g->how != JOINED; i++)
        if ((g->t[i].kind == ORPHANED || (g->how == NODES && g->t[i].kind == EXITS)) &&
            launcher_of(g, g->t[i].rank) == index)
            return true;
    if (g->how != JOINED) return false;
    return index == g->ranks || is_culprit(g, index);
}

/* Look at one process that has ended. */
static bool judge_process(run *r, const leader *l, int index)
{
    const program *g = &r->g;
    const ending *end = &r->ends[index];
    const counted_memory *memory = &r->memory[index];
    const bool forks = g->how == FORKED || g->how == NODES;
    if (!l->started[index]) return true;
    if (!end->done && guilty(g, index)) return true;
    if (!end->done) return bad(r, "process %d crashed", index);
    if (end->fds > 0 || end->threads > 0 || end->children > 0 || end->maps > 0)
        return bad(r, "process %d keeps %d descriptors, %d threads, %d children, %d mappings",
                   index, end->fds, end->threads, end->children, end->maps);
    const bool whole =
        !forks || (end->result == DTRAIN_OK && !any_kind(g, EXITS)); /* no rank was cut off */
    if (memory->wrong || (memory->live && whole))
        return bad(r, "process %d keeps %ld allocations, %ld are wrong", index, memory->live,
                   memory->wrong);
    if (end->result && strlen(end->text) < 20)
        return bad(r, "process %d says only '%s'", index, end->text);
    return true;
}

/* Twins: one of them may be the rank, and the run succeeds without the other one. */
static bool judge_twins(run *r, int good)
{
    const program *g = &r->g;
    int rank = 0;
    for (int i = 0; i < g->trouble_count; i++)
        if (g->t[i].kind == TWICE) rank = g->t[i].rank;
    const bool one = r->ends[rank].result == DTRAIN_OK,
               other = r->ends[g->ranks].result == DTRAIN_OK;
    if (r->ends[rank].done && r->ends[g->ranks].done && one && other)
        return bad(r, "both twins succeed");
    if (good && good + 1 < g->ranks && g->trouble_count == 1)
        return bad(r, "only %d of the others succeed", good);
    return true;
}

static bool judge(run *r, const leader *l)
{
    const program *g = &r->g;
    const harm h = harm_of(g);
    int good = 0, innocent = 0;
    bool last = true;
    if (r->wrong) return bad(r, "%d wrong values", r->wrong);
    for (int i = 0; i < g->ranks; i++)
        if (!is_culprit(g, i)) last = last && r->progress[i] >= 2;
    for (int i = 0; i < l->processes; i++) {
        const ending *end = &r->ends[i];
        if (!judge_process(r, l, i)) return false;
        if (guilty(g, i)) continue;
        innocent++;
        good += end->result == DTRAIN_OK;
        if (end->result == DTRAIN_OK) continue;
        r->by_time = r->by_time || strstr(end->text, "waited") || strstr(end->text, "not found");
        if (h == HARM_NONE) return bad(r, "process %d fails: %s", i, end->text);
        if (!names_culprit(g, end->text))
            return bad(r, "process %d names none of the culprits: %s", i, end->text);
        if (!strstr(end->text, words_of(g)))
            return bad(r, "process %d does not say '%s': %s", i, words_of(g), end->text);
    }
    if (any_kind(g, TWICE) && !judge_twins(r, good)) return false;
    if (h == HARM_SURE && good && !last)
        return bad(r, "%d of %d who did no harm succeed", good, innocent);
    if (h == HARM_SURE && good == innocent && innocent == l->processes)
        return bad(r, "all succeed");
    if (good && good < innocent && !last) return bad(r, "%d of %d succeed", good, innocent);
    r->kind = h == HARM_NONE ? 0 : good == innocent ? 1 : 2;
    /* Where nobody has to wait for a deadline, nobody does. */
    const double limit = needs_deadline(g) ? 8 + 4e-3 * r->timeout_ms : RANKS_SOON;
    const double seconds = l->ended - l->start;
    if (!any_kind(g, STOPPED) && seconds > limit) {
        r->by_time = true;
        return bad(r, "it took %.1f s", seconds);
    }
    return true;
}

/* In a process group of its own, which is gone when this returns. */
static void run_here(run *r)
{
    leader l;
    memset(&l, 0, sizeof l);
    l.r = r;
    for (int i = 0; i < MOST_STRANGERS; i++) l.callers[i].fd = -1;
    l.processes = r->g.how == JOINED  ? r->g.ranks + any_kind(&r->g, TWICE)
                  : r->g.how == NODES ? 2
                                      : 1;
    bool good = lead(&l) || bad(r, "it hangs");
    if (good) good = all_gone(&l) || bad(r, "processes are left");
    if (good) good = judge(r, &l);
    if (!good)
        for (int i = 0; i < l.processes; i++) {
            const size_t used = strlen(r->why);
            snprintf(r->why + used, sizeof r->why - used, "\n    process %d, %s: %s: %.160s", i,
                     l.over[i] ? "ended" : "still there",
                     r->ends[i].done ? dtrain_result_text((dtrain_result)r->ends[i].result)
                                     : "no result",
                     r->ends[i].text);
        }
    r->verdict = good ? 1 : 2;
}

/* ---- Many programs beside one another -------------------------------------------------------------*/

enum { SLOTS = 6, SLOWER = 8 };

typedef struct slot {
    run *r;
    pid_t leader;
    bool again;
} slot;

static void start(slot *at, const program *g, bool again)
{
    run *r = at->r;
    memset(r, 0, sizeof *r);
    r->g = *g;
    r->port = g->how >= JOINED ? ports_next() : 0;
    r->timeout_ms = !needs_deadline(g) ? 20000 : again ? 500 * SLOWER : 500;
    at->again = again;
    fflush(NULL);
    at->leader = fork();
    if (at->leader == 0) {
        setpgid(0, 0);
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
        run_here(r);
        _exit(0);
    }
}

/* 0: goes on; 1: good; 2: bad, r->why says why. One that fails for want of time gets more of it. */
static int look(slot *at)
{
    if (waitpid(at->leader, NULL, WNOHANG) == 0) return 0;
    kill(-at->leader, SIGKILL);
    while (waitpid(-at->leader, NULL, 0) > 0) {}
    if (at->r->verdict == 1) return 1;
    if (at->r->by_time && !at->again) {
        const program g = at->r->g;
        start(at, &g, true);
        return 0;
    }
    if (!at->r->verdict) snprintf(at->r->why, sizeof at->r->why, "the leader crashed");
    return 2;
}

static void print_program(const program *g)
{
    printf("  seed %llu%s: %d ranks, %s, %d rounds%s%s%s\n", (unsigned long long)g->seed, g->note,
           g->ranks, way_names[g->how], g->rounds, g->reaper ? ", a host that reaps" : "",
           g->deaf ? ", a host that ignores SIGCHLD" : "",
           g->closed ? ", descriptors 0 to 2 are closed" : "");
    for (int i = 0; i < g->trouble_count; i++)
        printf("    rank %d: %s, round %d, %ld us, number %ld\n", g->t[i].rank,
               kind_names[g->t[i].kind], g->t[i].round, g->t[i].us, g->t[i].number);
    for (int i = 0; i < g->stranger_count; i++)
        printf("    a stranger after %ld us, kind %d, %zu bytes, stays %ld us\n", g->s[i].us,
               g->s[i].kind, g->s[i].bytes, g->s[i].stays_us);
}

/* Run one program so often, or until it fails. */
static bool passes(const program *g, int times, char *why, size_t room)
{
    slot one;
    int end = 1;
    memset(&one, 0, sizeof one);
    one.r = (run *)ranks_shared(sizeof(run));
    for (int i = 0; i < times && end == 1; i++) {
        start(&one, g, false);
        while ((end = look(&one)) == 0) ranks_sleep_us(500);
        snprintf(why, room, "%s", one.r->why);
    }
    munmap(one.r, sizeof(run));
    return end == 1;
}

/* Take away what the failure does not need. Moments are random: what passes six times counts as passed. */
static void shrink(program *g)
{
    char why[1600];
    for (bool smaller = true; smaller;) {
        smaller = false;
        for (int change = 0; change < 7; change++) {
            program next = *g;
            if (change == 0 && next.trouble_count) next.trouble_count--;
            if (change == 1 && next.trouble_count > 1) next.t[0] = next.t[--next.trouble_count];
            if (change == 2) next.stranger_count = 0;
            if (change == 3) next.reaper = next.deaf = next.closed = false;
            if (change == 4 && next.rounds > 1) {
                next.rounds /= 2;
                for (int i = 0; i < next.trouble_count; i++)
                    if (next.t[i].round >= next.rounds) next.t[i].round = next.rounds - 1;
            }
            if (change == 5 && next.stranger_count > 1) next.stranger_count--;
            if (change == 6 && next.ranks > 2) {
                next.ranks -= next.how == NODES ? 2 : 1;
                for (int i = 0; i < next.trouble_count; i++)
                    if (next.t[i].rank >= next.ranks) next.t[i].rank = next.ranks - 1;
            }
            if (next.ranks < 2 || memcmp(&next, g, sizeof next) == 0 ||
                passes(&next, 6, why, sizeof why))
                continue;
            *g = next;
            snprintf(g->note, sizeof g->note, ", smaller");
            smaller = true;
        }
    }
}

static void report(const run *r)
{
    char why[1600];
    program g = r->g;
    printf("  FAIL seed %llu: %s\n", (unsigned long long)g.seed, r->why);
    print_program(&g);
    shrink(&g);
    if (g.note[0] && !passes(&g, 20, why, sizeof why)) {
        print_program(&g);
        printf("  %s\n", why);
    }
    printf("  again: build/tests/test_launches --seed %llu\n", (unsigned long long)g.seed);
}

/* The hello of a rank that calls a listener of ours, under another key than any of our worlds. */
static void record_hello(void)
{
    const int on = 1, listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const uint16_t port = ports_next();
    struct sockaddr_in address;
    struct pollfd one;
    memset(&address, 0, sizeof address);
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(listener, (struct sockaddr *)&address, sizeof address) != 0 ||
        listen(listener, 1) != 0)
        exit(3);
    const pid_t pid = fork();
    if (pid == 0) {
        dtrain_launch_desc desc = ranks_desc(0, DTRAIN_LAUNCH_PROCESSES);
        desc.options.log = say_nothing;
        set_number("RANK", 1);
        set_number("WORLD_SIZE", 2);
        set_number("DTRAIN_PORT", port);
        setenv("MASTER_ADDR", "127.0.0.1", 1);
        setenv("DTRAIN_JOB_KEY", "green", 1);
        _exit(dtrain_launch(&desc, rank_main, NULL, NULL) != DTRAIN_OK);
    }
    one.fd = accept(listener, NULL, NULL);
    one.events = POLLIN;
    while (poll(&one, 1, hello_bytes ? 100 : 20000) == 1) {
        const ssize_t got = recv(one.fd, hello + hello_bytes, sizeof hello - hello_bytes, 0);
        if (got <= 0) break;
        hello_bytes += (size_t)got;
    }
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    close(one.fd);
    close(listener);
    if (hello_bytes < 32) exit(3);
}

/* Seeds that failed once, and what was wrong. */
static const struct {
    uint64_t seed;
    const char *why;
} failed_once[] = {
    {266365094, "a rank that came after another one had been started twice was not told"},
    {266365100, "the same, without strangers"},
    {266367708, "who heard of a failure only as another rank's end did not hear the cause"},
    {325371667, "all ranks disagree in the same way: a mistake of this program"},
    {924364590, "the twin of a rank stops itself: a mistake of this program"},
    {112562188, "a rank that was late to the comparison of clocks was not named"},
    {320493929,
     "a rank forked while a thread began hung in the address sanitizer: a mistake of this program"},
};
enum { FAILED_ONCE = sizeof failed_once / sizeof *failed_once };

int main(int argc, char **argv)
{
    seeds s = seeds_of(argc, argv, UINT64_MAX, 10);
    uint64_t next = 0;
    static slot slots[SLOTS];
    long passed = 0, failed = 0, kinds[3] = {0, 0, 0};
    bool busy = true;
    if (s.count == UINT64_MAX && s.end == 0) s.end = test_seconds() + 4;
    test_begin(1, argv);
    record_hello();
    if (s.one) {
        char why[1600];
        program g = generate(s.first);
        print_program(&g);
        if (passes(&g, 20, why, sizeof why)) return printf("20 passed, 0 failed\n"), 0;
        printf("  %s\n", why);
        shrink(&g);
        if (!passes(&g, 20, why, sizeof why)) print_program(&g), printf("  %s\n", why);
        return printf("0 passed, 1 failed\n"), 1;
    }
    printf("  seeds from %llu on\n", (unsigned long long)s.first);
    for (int i = 0; i < SLOTS; i++) slots[i].r = (run *)ranks_shared(sizeof(run));
    while (busy) {
        busy = false;
        for (int i = 0; i < SLOTS; i++) {
            slot *at = &slots[i];
            const int how = at->leader ? look(at) : 0;
            if (how) at->leader = 0;
            if (how == 1) passed++, kinds[at->r->kind]++;
            if (how == 2) failed++, report(at->r);
            const bool more = next < FAILED_ONCE || (next - FAILED_ONCE < s.count &&
                                                     (s.end == 0 || test_seconds() < s.end));
            if (!at->leader && more && failed < 10) {
                const program g = generate(next < FAILED_ONCE ? failed_once[next].seed
                                                              : s.first + next - FAILED_ONCE);
                next++;
                start(at, &g, false);
            }
            busy = busy || at->leader;
        }
        ranks_sleep_us(500);
    }
    printf("  %ld without harm, %ld in spite of harm, %ld with the errors that follow from it\n",
           kinds[0], kinds[1], kinds[2]);
    if (passed > 200 && (!kinds[0] || !kinds[1] || !kinds[2])) failed++;
    printf("%ld passed, %ld failed\n", passed, failed);
    return failed != 0;
}
