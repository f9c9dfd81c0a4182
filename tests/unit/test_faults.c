/* test_faults.c: what ranks do to each other: they die, leave, stop, disagree. Every other
 * rank must hear of it in time, by name; nothing may hang and nothing may be left.
 *
 * Numbers in comments are the cases of the fault table in the project's notes (1 = a rank is killed
 * inside an all-reduce, ...). DTRAIN_TEST_FULL=1 runs more seeds and the whole mismatch matrix. */
#include "test.h"
#include "dtrain.h"
#include "ranks.h"

#include <sched.h>
#include <sys/mount.h>
#include <sys/time.h>

enum { PROCESSES = DTRAIN_LAUNCH_PROCESSES, THREADS = DTRAIN_LAUNCH_THREADS, UNTOLD = 77 };

/* What ranks say about their end; in shared memory, because the dead cannot return it. */
typedef struct story {
    int32_t result[RANKS_MOST]; /* of the call that ended the rank's work; UNTOLD = no word */
    double when[RANKS_MOST], happened;
    char text[RANKS_MOST][1024];
    int32_t pid[RANKS_MOST], ready;
} story;

static story *new_story(void)
{
    story *s = (story *)ranks_shared(sizeof *s);
    int r;
    for (r = 0; r < RANKS_MOST; r++) s->result[r] = UNTOLD;
    return s;
}
static void tell(story *s, int rank, dtrain_result result)
{
    s->when[rank] = dtrain_seconds();
    snprintf(s->text[rank], sizeof s->text[rank], "%s",
             result == DTRAIN_OK ? "" : dtrain_last_error());
    s->result[rank] = (int32_t)result;
}

/* "rank 1" followed by something that is not a digit. */
static bool names_rank(const char *text, int rank)
{
    char wanted[32], wanted_many[32];
    const char *at;
    snprintf(wanted, sizeof wanted, "rank %d", rank);
    for (at = strstr(text, wanted); at; at = strstr(at + 1, wanted)) {
        char next = at[strlen(wanted)];
        if (at == text && next == ':') continue; /* the sentence begins with the speaker */
        if (next < '0' || next > '9') return true;
    }
    snprintf(wanted_many, sizeof wanted_many, " %d", rank); /* "ranks 1 and 3", "ranks 0, 2" */
    at = strstr(text, "ranks ");
    return at && strstr(at, wanted_many) != NULL;
}
static bool contains(const char *text, const char *part)
{
    size_t length = strlen(part);
    for (; *text; text++)
        if (strncasecmp(text, part, length) == 0) return true;
    return false;
}

/* ---- death (1, 5, 6, 43) ---- */

typedef struct death {
    story *told;
    int victims[2], victim_count;
    long after_us, second_after_us; /* of its own clock */
    uint64_t seed;
    int mixture; /* 0 all-reduce only, 1 everything */
} death;

static story *dying_story;
static void die_now(int number)
{
    (void)number;
    dying_story->happened = dtrain_seconds();
    kill(getpid(), SIGKILL);
}
static void die_after(long us)
{
    struct itimerval timer;
    struct sigaction action;
    memset(&timer, 0, sizeof timer);
    memset(&action, 0, sizeof action);
    action.sa_handler = die_now;
    sigaction(SIGALRM, &action, NULL);
    timer.it_value.tv_sec = us / 1000000;
    timer.it_value.tv_usec = us % 1000000 ? us % 1000000 : 1;
    setitimer(ITIMER_REAL, &timer, NULL);
}

/* Endless collectives of many sizes, in communicator and private memory. */
static dtrain_result busy(dtrain_comm *comm, uint64_t seed, int mixture, float *shared, float *own,
                          size_t most)
{
    uint64_t state = seed;
    dtrain_result result = DTRAIN_OK;
    while (result == DTRAIN_OK) {
        size_t count = ranks_random(&state, ranks_random(&state, 4) ? 300 : most);
        float *x = ranks_random(&state, 2) ? shared : own;
        int n = dtrain_comm_size(comm), rank = dtrain_comm_rank(comm);
        dtrain_work *works[3] = {NULL, NULL, NULL};
        int i;
        switch (mixture ? ranks_random(&state, 7) : 0) {
        default:
            result =
                dtrain_all_reduce(comm, x, x, count, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_MAX, NULL);
            break;
        case 1: result = dtrain_barrier(comm); break;
        case 2: result = dtrain_broadcast(comm, x, count, DTRAIN_DTYPE_F32, n - 1, NULL); break;
        case 3:
            for (i = 0; i < 3 && result == DTRAIN_OK; i++)
                result = dtrain_all_reduce(comm, x + (size_t)i * most, x + (size_t)i * most, count,
                                           DTRAIN_DTYPE_F32, DTRAIN_REDUCE_MAX, &works[i]);
            for (i = 2; i >= 0; i--)
                if (works[i]) {
                    dtrain_result waited = dtrain_work_wait(works[i]);
                    if (result == DTRAIN_OK) result = waited;
                }
            break;
        case 4: /* around the ring */
            result = dtrain_send(comm, x, count, DTRAIN_DTYPE_F32, (rank + 1) % n, &works[0]);
            if (result == DTRAIN_OK)
                result =
                    dtrain_recv(comm, x + most, count, DTRAIN_DTYPE_F32, (rank + n - 1) % n, NULL);
            if (works[0]) {
                dtrain_result waited = dtrain_work_wait(works[0]);
                if (result == DTRAIN_OK) result = waited;
            }
            break;
        case 5: {
            dtrain_comm *half = NULL;
            result = dtrain_comm_split(comm, rank % 2, 0, &half);
            if (result == DTRAIN_OK) result = dtrain_barrier(half);
            if (half) dtrain_comm_destroy(half);
            break;
        }
        case 6:
            result =
                dtrain_all_to_all(comm, x, x + most, count / (size_t)n, DTRAIN_DTYPE_F32, NULL);
            break;
        }
    }
    return result;
}

static int rank_among_the_dying(dtrain_world *world, void *user)
{
    enum { MOST = 60000 };
    death *d = (death *)user;
    int rank = dtrain_world_rank(world);
    dtrain_comm *comm = dtrain_world_comm(world);
    float *own = (float *)calloc(3 * MOST, 4);
    void *shared;
    dtrain_result result = dtrain_comm_alloc(comm, 3 * MOST * 4, &shared);
    d->told->pid[rank] = (int32_t)getpid();
    if (result == DTRAIN_OK) result = dtrain_barrier(comm);
    dying_story = d->told;
    if (rank == d->victims[0]) die_after(d->after_us);
    if (d->victim_count > 1 && rank == d->victims[1]) die_after(d->second_after_us);
    if (result == DTRAIN_OK) result = busy(comm, d->seed, d->mixture, (float *)shared, own, MOST);
    tell(d->told, rank, result);
    dtrain_comm_free(comm, shared, 3 * MOST * 4);
    free(own);
    return 40;
}

static void check_death(int ranks, death *d)
{
    dtrain_launch_desc desc = ranks_desc(ranks, PROCESSES);
    dtrain_launch_info info;
    dtrain_result result;
    int r, dead0 = d->victims[0], dead1 = d->victim_count > 1 ? d->victims[1] : -1;
    d->told = new_story();
    result = ranks_launch(&desc, rank_among_the_dying, d, &info);
    CHECK_MSG(result == DTRAIN_ERROR_RANK_FAILED, "%s", dtrain_result_text(result));
    CHECK_MSG(info.first_failed_rank == dead0 || info.first_failed_rank == dead1,
              "rank %d was killed, rank %d reported: %s", dead0, info.first_failed_rank,
              dtrain_last_error());
    CHECK_MSG(info.signal == SIGKILL && info.exit_code == 137, "signal %d, exit code %d: %s",
              info.signal, info.exit_code, dtrain_last_error());
    for (r = 0; r < ranks; r++) {
        const char *text = d->told->text[r];
        if (r == dead0 || r == dead1) continue;
        if (!CHECK_MSG(d->told->result[r] != UNTOLD,
                       "seed %llu: rank %d never returned from its call",
                       (unsigned long long)d->seed, r))
            continue;
        CHECK_MSG(d->told->result[r] == DTRAIN_ERROR_PEER, "seed %llu: rank %d heard %s: %s",
                  (unsigned long long)d->seed, r,
                  dtrain_result_text((dtrain_result)d->told->result[r]), text);
        CHECK_MSG(names_rank(text, dead0) || (dead1 >= 0 && names_rank(text, dead1)),
                  "seed %llu: rank %d was not told who died: %s", (unsigned long long)d->seed, r,
                  text);
        CHECK_MSG(d->told->when[r] - d->told->happened < RANKS_SOON, "rank %d heard %.2f s later",
                  r, d->told->when[r] - d->told->happened);
    }
    munmap(d->told, sizeof *d->told);
}

static death make_death(uint64_t seed, int ranks)
{
    death d;
    uint64_t state = seed * 77 + 5;
    memset(&d, 0, sizeof d);
    d.victims[0] = (int)ranks_random(&state, (uint64_t)ranks);
    d.victim_count = 1;
    d.after_us = (long)ranks_random(&state, 1u << (4 + ranks_random(&state, 12))) + 1;
    d.seed = seed;
    d.mixture = (int)(seed & 1);
    return d;
}
static void test_death_in_collectives(void)
{
    uint64_t seed;
    for (seed = 0; seed < test_draws(30, 60, 200); seed++) {
        int ranks = 2 + (int)(seed / 2 % 3);
        death d = make_death(seed, ranks);
        check_death(ranks, &d);
    }
}
static void test_rank_0_dies(void)
{
    uint64_t seed;
    for (seed = 0; seed < 8; seed++) {
        death d = make_death(seed + 1000, 3);
        d.victims[0] = 0;
        check_death(3, &d);
    }
}
static void test_two_die(void)
{
    uint64_t seed;
    for (seed = 0; seed < 16; seed++) {
        death d = make_death(seed + 2000, 4);
        d.victim_count = 2;
        d.victims[1] = (d.victims[0] + 1 + (int)(seed % 3)) % 4;
        d.after_us = 5000;
        d.second_after_us =
            5000 + (seed % 4 ? (long)seed * 40 : 0); /* while the first is reported */
        check_death(4, &d);
    }
}

/* Dead before the first call of anybody. */
static int rank_dead_at_start(dtrain_world *world, void *user)
{
    story *s = (story *)user;
    int rank = dtrain_world_rank(world);
    if (rank == 1) {
        s->happened = dtrain_seconds();
        kill(getpid(), SIGKILL);
    }
    tell(s, rank, dtrain_barrier(dtrain_world_comm(world)));
    return 40;
}
static void test_dead_at_start(void)
{
    int i;
    for (i = 0; i < 5; i++) {
        story *s = new_story();
        dtrain_launch_desc desc = ranks_desc(3, PROCESSES);
        dtrain_launch_info info;
        CHECK(ranks_launch(&desc, rank_dead_at_start, s, &info) == DTRAIN_ERROR_RANK_FAILED);
        CHECK(info.first_failed_rank == 1 && info.signal == SIGKILL);
        CHECK_MSG(s->result[0] == DTRAIN_ERROR_PEER && names_rank(s->text[0], 1), "%s", s->text[0]);
        CHECK_MSG(s->result[2] == DTRAIN_ERROR_PEER && names_rank(s->text[2], 1), "%s", s->text[2]);
        munmap(s, sizeof *s);
    }
}

/* ---- leaving (2, 9) ---- */

typedef struct leaving {
    story *told;
    int who, steps, code; /* who returns code after so many steps; all others go on */
} leaving;

static int rank_leaves(dtrain_world *world, void *user)
{
    leaving *l = (leaving *)user;
    int rank = dtrain_world_rank(world), step;
    dtrain_comm *comm = dtrain_world_comm(world);
    float x[8] = {0};
    dtrain_result result = DTRAIN_OK;
    for (step = 0; result == DTRAIN_OK && (rank != l->who || step < l->steps); step++)
        result = dtrain_all_reduce(comm, x, x, 8, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, NULL);
    if (rank == l->who) l->told->happened = dtrain_seconds();
    tell(l->told, rank, result);
    return rank == l->who ? l->code : 40;
}
static void test_leaving(void)
{
    uint32_t mode;
    int code;
    for (mode = 0; mode < 2; mode++)
        for (code = 0; code < 2; code++) {
            leaving l;
            dtrain_launch_desc desc = ranks_desc(3, mode);
            dtrain_launch_info info;
            l.told = new_story();
            l.who = 1;
            l.steps = 3;
            l.code = code * 6;
            CHECK(ranks_launch(&desc, rank_leaves, &l, &info) == DTRAIN_ERROR_RANK_FAILED);
            CHECK_MSG((info.first_failed_rank == 1) == (code == 1), "rank %d reported as first",
                      info.first_failed_rank);
            CHECK_MSG(l.told->result[0] == DTRAIN_ERROR_PEER &&
                          l.told->result[2] == DTRAIN_ERROR_PEER,
                      "%s, %s", l.told->text[0], l.told->text[2]);
            CHECK_MSG(names_rank(l.told->text[0], 1) && names_rank(l.told->text[2], 1), "%s",
                      l.told->text[0]);
            CHECK_MSG(contains(l.told->text[0], "left") || contains(l.told->text[0], "ended") ||
                          contains(l.told->text[0], "returned"),
                      "a rank that left is not told from one that died: %s", l.told->text[0]);
            CHECK_MSG(!contains(l.told->text[0], "died") && !contains(l.told->text[0], "killed"),
                      "%s", l.told->text[0]);
            CHECK_MSG(l.told->when[0] - l.told->happened < RANKS_SOON, "heard %.2f s later",
                      l.told->when[0] - l.told->happened);
            munmap(l.told, sizeof *l.told);
        }
}

/* One rank makes one call more than the others (9): they have left, it must hear so. */
static int rank_calls_once_more(dtrain_world *world, void *user)
{
    story *s = (story *)user;
    dtrain_comm *comm = dtrain_world_comm(world);
    int rank = dtrain_world_rank(world), i;
    float x = 1;
    dtrain_result result = DTRAIN_OK;
    for (i = 0; i < 5 + (rank == 1) && result == DTRAIN_OK; i++)
        result = dtrain_all_reduce(comm, &x, &x, 1, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, NULL);
    tell(s, rank, result);
    return result == DTRAIN_OK ? 0 : 40;
}
static void test_extra_call(void)
{
    uint32_t mode;
    for (mode = 0; mode < 2; mode++) {
        story *s = new_story();
        dtrain_launch_desc desc = ranks_desc(3, mode);
        dtrain_launch_info info;
        CHECK(ranks_launch(&desc, rank_calls_once_more, s, &info) == DTRAIN_ERROR_RANK_FAILED);
        CHECK(info.first_failed_rank == 1);
        CHECK_MSG(s->result[0] == DTRAIN_OK && s->result[2] == DTRAIN_OK,
                  "ranks that did all their calls heard '%s' '%s'", s->text[0], s->text[2]);
        CHECK_MSG(s->result[1] == DTRAIN_ERROR_PEER, "%s", s->text[1]);
        munmap(s, sizeof *s);
    }
}

/* ---- stopping (3) ---- */

typedef struct stopping {
    story *told;
    bool wakes;
} stopping;

static int rank_stops(dtrain_world *world, void *user)
{
    stopping *st = (stopping *)user;
    dtrain_comm *comm = dtrain_world_comm(world);
    int rank = dtrain_world_rank(world), i;
    float x = 1;
    dtrain_result result = DTRAIN_OK;
    st->told->pid[rank] = (int32_t)getpid();
    for (i = 0; i < 10 && result == DTRAIN_OK; i++) {
        if (i == 5 && rank == 1) {
            st->told->happened = dtrain_seconds();
            raise(SIGSTOP);
        }
        result = dtrain_all_reduce(comm, &x, &x, 1, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_MAX, NULL);
    }
    tell(st->told, rank, result);
    return result == DTRAIN_OK ? 0 : 40;
}
static void test_stopped_rank(void)
{
    stopping st;
    dtrain_launch_desc desc = ranks_desc(3, PROCESSES);
    dtrain_launch_info info;
    double took;
    st.told = new_story();
    desc.timeout_ms = desc.grace_ms = RANKS_SHORT_MS;
    CHECK(ranks_launch(&desc, rank_stops, &st, &info) == DTRAIN_ERROR_RANK_FAILED);
    took = st.told->when[0] - st.told->happened;
    CHECK_MSG(st.told->result[0] == DTRAIN_ERROR_TIMEOUT ||
                  st.told->result[2] == DTRAIN_ERROR_TIMEOUT,
              "'%s' '%s'", st.told->text[0], st.told->text[2]);
    CHECK_MSG(st.told->result[0] != UNTOLD && st.told->result[2] != UNTOLD,
              "a survivor did not return");
    CHECK_MSG(names_rank(st.told->text[0], 1), "the absent rank is not named: %s",
              st.told->text[0]);
    CHECK_MSG(names_rank(st.told->text[2], 1), "the absent rank is not named: %s",
              st.told->text[2]);
    CHECK_MSG(took > 0.9e-3 * RANKS_SHORT_MS && took < RANKS_SOON, "the deadline came after %.2f s",
              took);
}
/* Nobody waits for a rank that is stopped after its last call: the launcher ends it. */
static int rank_stops_at_the_end(dtrain_world *world, void *user)
{
    stopping *st = (stopping *)user;
    const int rank = dtrain_world_rank(world);
    st->told->pid[rank] = (int32_t)getpid();
    RANKS_TRY(dtrain_barrier(dtrain_world_comm(world)));
    tell(st->told, rank, DTRAIN_OK);
    if (rank > 0) raise(rank == 1 ? SIGSTOP : SIGTSTP);
    return 0;
}
static void test_stopped_at_the_end(void)
{
    for (int ranks = 2; ranks < 4; ranks++) {
        stopping st;
        dtrain_launch_desc desc = ranks_desc(ranks, PROCESSES);
        dtrain_launch_info info;
        st.told = new_story();
        desc.timeout_ms = RANKS_SHORT_MS;
        const double begin = dtrain_seconds();
        CHECK(ranks_launch(&desc, rank_stops_at_the_end, &st, &info) == DTRAIN_ERROR_RANK_FAILED);
        CHECK_MSG(dtrain_seconds() - begin > 0.9e-3 * RANKS_SHORT_MS,
                  "a rank may be stopped until the deadline");
        CHECK_MSG(info.first_failed_rank == 1 && info.exit_code == 137 &&
                      contains(dtrain_last_error(), "rank 1 was killed by the launcher") &&
                      contains(dtrain_last_error(), "stopped by signal"),
                  "rank %d, exit code %d: %s", info.first_failed_rank, info.exit_code,
                  dtrain_last_error());
        munmap(st.told, sizeof *st.told);
    }
}
static void test_stopped_and_continued(void)
{
    stopping st;
    dtrain_launch_desc desc = ranks_desc(3, PROCESSES);
    pid_t helper;
    double begin = dtrain_seconds();
    st.told = new_story();
    fflush(NULL);
    helper = fork();
    if (helper == 0) { /* wakes the sleeper after 200 ms, and again: it may not have slept yet */
        while (st.told->happened == 0) ranks_sleep_us(1000);
        for (;;) {
            ranks_sleep_us(200000);
            kill(st.told->pid[1], SIGCONT);
        }
    }
    CHECK_MSG(dtrain_launch(&desc, rank_stops, &st, NULL) == DTRAIN_OK, "%s", dtrain_last_error());
    CHECK_MSG(dtrain_seconds() - begin > 0.19, "nobody slept");
    kill(helper, SIGKILL);
    waitpid(helper, NULL, 0);
}
/* An endless loop in a rank is the same to the others (here it ends when they have given up). */
static int rank_lingers(dtrain_world *world, void *user)
{
    story *s = (story *)user;
    int rank = dtrain_world_rank(world);
    if (rank == 1) {
        ranks_await(&s->ready, 1);
        return 0;
    }
    s->happened = dtrain_seconds();
    tell(s, rank, dtrain_barrier(dtrain_world_comm(world)));
    ranks_count(&s->ready);
    return 40;
}
static void test_deadline(void)
{
    uint32_t mode;
    for (mode = 0; mode < 2; mode++) {
        story *s = new_story();
        dtrain_launch_desc desc = ranks_desc(2, mode);
        desc.timeout_ms = RANKS_SHORT_MS;
        CHECK(ranks_launch(&desc, rank_lingers, s, NULL) == DTRAIN_ERROR_RANK_FAILED);
        CHECK_MSG(s->result[0] == DTRAIN_ERROR_TIMEOUT, "%s", s->text[0]);
        CHECK_MSG(names_rank(s->text[0], 1) && contains(s->text[0], "barrier"), "%s", s->text[0]);
        CHECK_MSG(s->when[0] - s->happened > 0.9e-3 * RANKS_SHORT_MS &&
                      s->when[0] - s->happened < RANKS_SOON,
                  "%.2f s", s->when[0] - s->happened);
        munmap(s, sizeof *s);
    }
}

/* ---- who is behind ---- */

typedef struct lateness {
    story *told;
    uint64_t seed;
    int ranks, who, round; /* who is late in which round */
    uint32_t mode;
    bool stops;   /* by a signal, inside of its wait; else it comes when all others have given up */
    bool ring;    /* from that round on there are only messages, from each rank to the next one */
    bool lingers; /* ranks that gave up end later than the deadlines of others */
} lateness;

/* Messages around the ring, in one direction or another, and collectives, drawn alike on every rank. */
static dtrain_result play_round(dtrain_comm *comm, dtrain_comm *twin, uint64_t draw, bool ring,
                                long pause_us, float *x)
{
    const int n = dtrain_comm_size(comm), rank = dtrain_comm_rank(comm);
    const int step = ring ? 1 : 1 + (int)(draw >> 8 & 255) % (n - 1);
    const size_t count = draw >> 16 & 1 ? 60000 : 7;
    dtrain_work *work = NULL;
    dtrain_result result = DTRAIN_OK;
    switch (ring ? 2 : draw % 6) {
    case 0: return dtrain_barrier(draw >> 17 & 1 ? comm : twin);
    case 1: return dtrain_all_reduce(comm, x, x, count, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_MAX, NULL);
    default:
        if (draw >> 17 & 1) comm = twin;
        TRY(dtrain_send(comm, x, count, DTRAIN_DTYPE_F32, (rank + step) % n, &work));
        ranks_sleep_us(pause_us);
        result = dtrain_recv(comm, x + 60000, count, DTRAIN_DTYPE_F32, (rank + n - step) % n, NULL);
        if (result == DTRAIN_OK) return dtrain_work_wait(work);
        dtrain_work_wait(work);
        return result;
    }
}
static void stop_now(int number)
{
    (void)number;
    raise(SIGSTOP);
}
/* What happens in front of the call of that round; returns for how long this rank pauses between its send and its
 * receive. The rank behind the late one in the ring pauses: so deadlines end first where nobody waits for the late
 * one itself. A rank that is to be stopped inside of its wait has a neighbour that lets it wait. */
static long come_late(lateness *l, int rank)
{
    struct itimerval timer;
    memset(&timer, 0, sizeof timer);
    timer.it_value.tv_usec = 50000;
    if (rank == (l->who + l->ranks - 1) % l->ranks && l->stops) ranks_sleep_us(150000);
    if (rank == l->who && !l->stops) ranks_await(&l->told->ready, l->ranks - 1);
    if (rank == l->who && l->stops && signal(SIGALRM, stop_now) != SIG_ERR)
        setitimer(ITIMER_REAL, &timer, NULL);
    return rank == (l->who + 1) % l->ranks ? 300000 : 0;
}
static int rank_is_late(dtrain_world *world, void *user)
{
    lateness *l = (lateness *)user;
    const int rank = dtrain_world_rank(world);
    dtrain_comm *twin;
    dtrain_result result = DTRAIN_OK;
    float *x = (float *)calloc(120000, sizeof *x);
    l->told->pid[rank] = (int32_t)getpid();
    RANKS_TRY(dtrain_comm_split(dtrain_world_comm(world), 0, 0, &twin));
    for (int round = 0; round < l->round + 40 && result == DTRAIN_OK; round++) {
        const long pause_us = round == l->round ? come_late(l, rank) : 0;
        result =
            play_round(dtrain_world_comm(world), twin, ranks_mix(l->seed * 1000 + (uint64_t)round),
                       l->ring && round >= l->round, pause_us, x);
    }
    tell(l->told, rank, result);
    if (l->lingers) ranks_sleep_us(200000);
    ranks_count(&l->told->ready);
    if (l->stops && __atomic_load_n(&l->told->ready, __ATOMIC_ACQUIRE) == l->ranks - 1)
        kill(l->told->pid[l->who], SIGKILL);
    free(x);
    return 40;
}
/* A text blames the ranks that have something behind their number: "(its last was #3)". */
static bool blames_only(const char *text, int rank)
{
    char wanted[32];
    int blamed = 0, others = 0;
    snprintf(wanted, sizeof wanted, "rank %d (", rank);
    for (const char *at = strchr(text, '('); at; at = strchr(at + 1, '(')) {
        if (strncmp(at, "(its last was", 13) != 0 && strncmp(at, "(stuck in", 9) != 0) continue;
        const size_t length = strlen(wanted);
        const bool good =
            at + 1 - text >= (long)length && strncmp(at + 1 - length, wanted, length) == 0;
        blamed += good, others += !good;
    }
    return blamed == 1 && others == 0;
}
static void check_lateness(lateness *l)
{
    dtrain_launch_desc desc = ranks_desc(l->ranks, l->mode);
    desc.timeout_ms = 2500; /* more than twice the second for which a machine may stand still */
    l->told = new_story();
    CHECK(dtrain_launch(&desc, rank_is_late, l, NULL) == DTRAIN_ERROR_RANK_FAILED);
    char killed[48]; /* what its launcher may see before it sees the ends of those that gave up */
    snprintf(killed, sizeof killed, "rank %d was killed by signal 9", l->who);
    CHECK_MSG(blames_only(dtrain_last_error(), l->who) ||
                  (l->stops && contains(dtrain_last_error(), killed)),
              "seed %llu: rank %d of %d is late: %s", (unsigned long long)l->seed, l->who, l->ranks,
              dtrain_last_error());
    for (int r = 0; r < l->ranks; r++)
        if (r != l->who)
            CHECK_MSG((l->told->result[r] == DTRAIN_ERROR_TIMEOUT ||
                       l->told->result[r] == DTRAIN_ERROR_PEER) && /* in the other communicator */
                          blames_only(l->told->text[r], l->who),
                      "seed %llu, %s: rank %d of %d is late in round %d, rank %d heard: %s",
                      (unsigned long long)l->seed, ranks_mode_name(l->mode), l->who, l->ranks,
                      l->round, r, l->told->text[r]);
    munmap(l->told, sizeof *l->told);
}
/* Several runs beside each other: they do nothing but wait. */
static void test_who_is_behind(void)
{
    enum { BESIDE = 3 };
    const uint64_t first = test_seed(), count = test_draws(BESIDE, 15, 60);
    for (uint64_t i = 0; i < count; i += BESIDE) {
        pid_t children[BESIDE];
        fflush(NULL);
        for (uint64_t k = 0; k < BESIDE; k++) {
            children[k] = fork();
            if (children[k] != 0) continue;
            lateness l;
            memset(&l, 0, sizeof l);
            l.seed = first + i + k;
            l.ranks = k == 0 ? 3 : k == 1 ? 4 : 5 + (int)(ranks_mix(l.seed) % 4);
            l.who = (int)(ranks_mix(l.seed + 1) % (uint64_t)l.ranks);
            l.round = (int)(ranks_mix(l.seed + 2) % 30);
            l.mode = k == 1 ? THREADS : PROCESSES;
            l.stops = k == 0;
            l.ring = k != 2 || l.seed % 2;
            l.lingers = ranks_mix(l.seed + 3) % 2;
            check_lateness(&l);
            _exit(0);
        }
        for (int k = 0; k < BESIDE; k++) {
            int status = 0;
            CHECK_MSG(test_wait(children[k], 60, &status) && status == 0,
                      "a run ended with status %x", (unsigned)status);
        }
    }
}
/* Ranks that all receive before they send: nobody is behind. */
static int rank_goes_in_a_circle(dtrain_world *world, void *user)
{
    story *s = (story *)user;
    const int n = dtrain_world_size(world), rank = dtrain_world_rank(world);
    float x;
    tell(s, rank,
         dtrain_recv(dtrain_world_comm(world), &x, 1, DTRAIN_DTYPE_F32, (rank + 1) % n, NULL));
    return 40;
}
static void test_circle(void)
{
    story *s = new_story();
    dtrain_launch_desc desc = ranks_desc(3, THREADS);
    CHECK(ranks_launch(&desc, rank_goes_in_a_circle, s, NULL) == DTRAIN_ERROR_RANK_FAILED);
    for (int r = 0; r < 3; r++)
        CHECK_MSG(
            s->result[r] == DTRAIN_ERROR_MISMATCH &&
                contains(s->text[r], "the ranks wait for each other in a circle: ") &&
                contains(s->text[r], "rank 0 waits for rank 1 in recv f32 count 1 peer 1 (") &&
                contains(s->text[r], "rank 1 waits for rank 2 in ") &&
                contains(s->text[r], "rank 2 waits for rank 0 in "),
            "%s", s->text[r]);
    munmap(s, sizeof *s);
}

/* Only one rank makes a call, while the others make one that needs it in another communicator. */
enum lone { LONE_BARRIER, LONE_GATHER, LONE_SPLIT, LONE_SEND, LONE_SUM, LONES };
typedef struct crossing {
    story *told;
    int ranks, who, lone, other;
} crossing;

static dtrain_result make_lone(dtrain_world *world, dtrain_comm *comm, int call, float *x)
{
    const int rank = dtrain_comm_rank(comm), n = dtrain_comm_size(comm);
    char all[DTRAIN_MAX_RANKS];
    dtrain_comm *made = NULL;
    switch (call) {
    case LONE_BARRIER: return dtrain_barrier(comm);
    case LONE_GATHER: return dtrain_world_all_gather(world, "x", 1, all);
    case LONE_SPLIT: return dtrain_comm_split(comm, 0, rank, &made);
    case LONE_SUM:
        return dtrain_all_reduce(comm, x, x, 60000, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, NULL);
    default: /* too long for a channel: it waits for the receiver */
        return dtrain_send(comm, x, 60000, DTRAIN_DTYPE_F32, (rank + 1) % n, NULL);
    }
}
static int rank_crosses(dtrain_world *world, void *user)
{
    const crossing *c = (const crossing *)user;
    const int rank = dtrain_world_rank(world);
    float *x = (float *)calloc(60000, sizeof *x);
    dtrain_comm *twin;
    RANKS_TRY(dtrain_comm_split(dtrain_world_comm(world), 0, -rank, &twin));
    tell(c->told, rank,
         rank == c->who ? make_lone(world, dtrain_world_comm(world), c->lone, x)
                        : make_lone(world, twin, c->other, x));
    free(x);
    return 40;
}
static void check_crossing(int lone, int other)
{
    crossing c = {new_story(), 2 + (lone + other) % 3, 0, lone, other};
    c.who = lone % c.ranks;
    dtrain_launch_desc desc = ranks_desc(c.ranks, (lone + other) % 2 ? THREADS : PROCESSES);
    CHECK(dtrain_launch(&desc, rank_crosses, &c, NULL) == DTRAIN_ERROR_RANK_FAILED);
    for (int r = 0; r < c.ranks; r++)
        CHECK_MSG(contains(c.told->text[r], "the ranks wait for each other in a circle") &&
                      names_rank(c.told->text[r], c.who),
                  "%d alone, %d on the others, rank %d: %s", lone, other, r, c.told->text[r]);
    munmap(c.told, sizeof *c.told);
}
/* All of one kind beside each other: they do nothing but wait. */
static void test_circle_of_communicators(void)
{
    for (int lone = 0; lone < LONES; lone++) {
        pid_t children[LONES];
        fflush(NULL);
        for (int other = 0; other < LONES; other++) {
            children[other] = fork();
            if (children[other] != 0) continue;
            if (lone != LONE_GATHER || other != LONE_GATHER) check_crossing(lone, other);
            _exit(0);
        }
        for (int other = 0; other < LONES; other++) {
            int status = 0;
            CHECK_MSG(test_wait(children[other], 60, &status) && status == 0,
                      "a run ended with status %x", (unsigned)status);
        }
    }
}

/* ---- disagreement (7, 8, 9) ---- */

typedef struct demand {
    uint32_t kind;
    dtrain_dtype dtype;
    dtrain_reduce_op op;
    size_t count;
    int root;
} demand;

typedef struct dispute {
    story *told;
    demand usual, odd;
    int who;      /* makes the odd call */
    int warm_ups; /* agreed calls before */
    bool shared, async;
    const char *words_usual, *words_odd; /* both must be in the sentence */
} dispute;

static dtrain_result make_demand(dtrain_comm *comm, const demand *d, void *a, void *b,
                                 dtrain_work **work)
{
    switch (d->kind) {
    case DTRAIN_COLLECTIVE_ALL_REDUCE:
        return dtrain_all_reduce(comm, a, b, d->count, d->dtype, d->op, work);
    case DTRAIN_COLLECTIVE_REDUCE_SCATTER:
        return dtrain_reduce_scatter(comm, a, b, d->count, d->dtype, d->op, work);
    case DTRAIN_COLLECTIVE_ALL_GATHER:
        return dtrain_all_gather(comm, a, b, d->count, d->dtype, work);
    case DTRAIN_COLLECTIVE_ALL_TO_ALL:
        return dtrain_all_to_all(comm, a, b, d->count, d->dtype, work);
    case DTRAIN_COLLECTIVE_BROADCAST:
        return dtrain_broadcast(comm, a, d->count, d->dtype, d->root, work);
    case DTRAIN_COLLECTIVE_REDUCE:
        return dtrain_reduce(comm, a, b, d->count, d->dtype, d->op, d->root, work);
    case DTRAIN_COLLECTIVE_SEND: return dtrain_send(comm, a, d->count, d->dtype, d->root, work);
    case DTRAIN_COLLECTIVE_RECV: return dtrain_recv(comm, a, d->count, d->dtype, d->root, work);
    case DTRAIN_COLLECTIVE_SPLIT: {
        dtrain_comm *half = NULL;
        return dtrain_comm_split(comm, 0, 0, &half);
    }
    default: return dtrain_barrier(comm);
    }
}

/* Every later call gives the same error, at once. */
static int check_stays_failed(dtrain_comm *comm, dtrain_result first)
{
    static const uint32_t list[] = {DTRAIN_COLLECTIVE_ALL_REDUCE, DTRAIN_COLLECTIVE_BARRIER,
                                    DTRAIN_COLLECTIVE_BROADCAST,  DTRAIN_COLLECTIVE_SEND,
                                    DTRAIN_COLLECTIVE_SPLIT,      DTRAIN_COLLECTIVE_REDUCE_SCATTER};
    float x[64] = {0}, y[64];
    int i;
    double begin = dtrain_seconds();
    for (i = 0; i < 6; i++) {
        demand d = {0, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, 8, 0};
        dtrain_work *work = NULL;
        dtrain_result later;
        d.kind = list[i];
        d.root = dtrain_comm_rank(comm) ? 0 : 1;
        later = make_demand(comm, &d, x, y,
                            i % 2 == 0 && d.kind != DTRAIN_COLLECTIVE_SPLIT ? &work : NULL);
        if (later == DTRAIN_OK && work) later = dtrain_work_wait(work);
        CHECK_MSG(later == first, "after %s a call of kind %u gave %s", dtrain_result_text(first),
                  list[i], dtrain_result_text(later));
    }
    return CHECK_MSG(dtrain_seconds() - begin < RANKS_SOON, "calls after a failure took %.2f s",
                     dtrain_seconds() - begin);
}

static int rank_disputes(dtrain_world *world, void *user)
{
    dispute *q = (dispute *)user;
    dtrain_comm *comm = dtrain_world_comm(world);
    int rank = dtrain_world_rank(world), i;
    size_t bytes = (size_t)1 << 20;
    void *a = NULL, *b = NULL;
    dtrain_work *work = NULL;
    dtrain_result result = DTRAIN_OK;
    float x = 1;
    if (q->shared) {
        RANKS_TRY(dtrain_comm_alloc(comm, bytes, &a));
        RANKS_TRY(dtrain_comm_alloc(comm, bytes, &b));
    } else {
        a = calloc(1, bytes);
        b = calloc(1, bytes);
    }
    for (i = 0; i < q->warm_ups; i++)
        RANKS_TRY(dtrain_all_reduce(comm, &x, &x, 1, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_MAX, NULL));
    result = make_demand(comm, rank == q->who ? &q->odd : &q->usual, a, b, q->async ? &work : NULL);
    if (result == DTRAIN_OK && work) result = dtrain_work_wait(work);
    tell(q->told, rank, result);
    if (result != DTRAIN_OK) check_stays_failed(comm, result);
    if (q->shared) {
        dtrain_comm_free(comm, a, bytes);
        dtrain_comm_free(comm, b, bytes);
    } else {
        free(a);
        free(b);
    }
    return 40;
}

static void check_dispute(int ranks, uint32_t mode, dispute *q, const char *what)
{
    dtrain_launch_desc desc = ranks_desc(ranks, mode);
    int r;
    q->told = new_story();
    CHECK(ranks_launch(&desc, rank_disputes, q, NULL) == DTRAIN_ERROR_RANK_FAILED);
    for (r = 0; r < ranks; r++) {
        const char *text = q->told->text[r];
        CHECK_MSG(q->told->result[r] == DTRAIN_ERROR_MISMATCH, "%s, rank %d of %d: %s: %s", what, r,
                  ranks, dtrain_result_text((dtrain_result)q->told->result[r]), text);
        CHECK_MSG(contains(text, q->words_usual) && contains(text, q->words_odd),
                  "%s, rank %d: '%s' or '%s' is not in: %s", what, r, q->words_usual, q->words_odd,
                  text);
        /* with two ranks nobody can say who is odd: then naming either is right */
        CHECK_MSG(names_rank(text, q->who) || r == q->who || ranks == 2,
                  "%s, rank %d: the odd rank %d "
                  "is not named: %s",
                  what, r, q->who, text);
    }
    munmap(q->told, sizeof *q->told);
}

static void test_mismatch(void)
{
    static const struct {
        const char *what;
        demand usual, odd;
        const char *words_usual, *words_odd;
    } rows[] = {
        {"order",
         {DTRAIN_COLLECTIVE_ALL_REDUCE, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, 100, 0},
         {DTRAIN_COLLECTIVE_BARRIER, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, 0, 0},
         "all",
         "barrier"},
        {"order, large",
         {DTRAIN_COLLECTIVE_ALL_REDUCE, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, 100000, 0},
         {DTRAIN_COLLECTIVE_BROADCAST, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, 100000, 0},
         "reduce",
         "broadcast"},
        {"all-gather or all-reduce",
         {DTRAIN_COLLECTIVE_ALL_GATHER, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, 100, 0},
         {DTRAIN_COLLECTIVE_ALL_REDUCE, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, 100, 0},
         "gather",
         "reduce"},
        {"reduce-scatter or reduce",
         {DTRAIN_COLLECTIVE_REDUCE_SCATTER, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, 100, 0},
         {DTRAIN_COLLECTIVE_REDUCE, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, 100, 0},
         "scatter",
         "reduce"},
        {"split or barrier",
         {DTRAIN_COLLECTIVE_SPLIT, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, 0, 0},
         {DTRAIN_COLLECTIVE_BARRIER, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, 0, 0},
         "split",
         "barrier"},
        {"count",
         {DTRAIN_COLLECTIVE_ALL_REDUCE, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, 1000, 0},
         {DTRAIN_COLLECTIVE_ALL_REDUCE, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, 1004, 0},
         "1000",
         "1004"},
        {"count 0",
         {DTRAIN_COLLECTIVE_ALL_REDUCE, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, 17, 0},
         {DTRAIN_COLLECTIVE_ALL_REDUCE, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, 0, 0},
         "17",
         "0"},
        {"count, small and large",
         {DTRAIN_COLLECTIVE_ALL_REDUCE, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, 3, 0},
         {DTRAIN_COLLECTIVE_ALL_REDUCE, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, 200000, 0},
         "3",
         "200000"},
        {"count of slices",
         {DTRAIN_COLLECTIVE_REDUCE_SCATTER, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, 20001, 0},
         {DTRAIN_COLLECTIVE_REDUCE_SCATTER, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, 20002, 0},
         "20001",
         "20002"},
        {"count of all-gather",
         {DTRAIN_COLLECTIVE_ALL_GATHER, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, 31, 0},
         {DTRAIN_COLLECTIVE_ALL_GATHER, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, 32, 0},
         "31",
         "32"},
        {"dtype, same size",
         {DTRAIN_COLLECTIVE_ALL_REDUCE, DTRAIN_DTYPE_BF16, DTRAIN_REDUCE_SUM, 64, 0},
         {DTRAIN_COLLECTIVE_ALL_REDUCE, DTRAIN_DTYPE_F16, DTRAIN_REDUCE_SUM, 64, 0},
         "bf16",
         "f16"},
        {"dtype, same bytes",
         {DTRAIN_COLLECTIVE_ALL_REDUCE, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, 64, 0},
         {DTRAIN_COLLECTIVE_ALL_REDUCE, DTRAIN_DTYPE_BF16, DTRAIN_REDUCE_SUM, 128, 0},
         "f32",
         "bf16"},
        {"dtype of all-gather",
         {DTRAIN_COLLECTIVE_ALL_GATHER, DTRAIN_DTYPE_I32, DTRAIN_REDUCE_SUM, 5000, 0},
         {DTRAIN_COLLECTIVE_ALL_GATHER, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, 5000, 0},
         "i32",
         "f32"},
        {"operation",
         {DTRAIN_COLLECTIVE_ALL_REDUCE, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, 64, 0},
         {DTRAIN_COLLECTIVE_ALL_REDUCE, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_MEAN, 64, 0},
         "sum",
         "mean"},
        {"operation, large",
         {DTRAIN_COLLECTIVE_REDUCE_SCATTER, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_MIN, 50000, 0},
         {DTRAIN_COLLECTIVE_REDUCE_SCATTER, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_MAX, 50000, 0},
         "min",
         "max"},
        {"root of broadcast",
         {DTRAIN_COLLECTIVE_BROADCAST, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, 64, 0},
         {DTRAIN_COLLECTIVE_BROADCAST, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, 64, 1},
         "0",
         "1"},
        {"all-to-all or reduce-scatter",
         {DTRAIN_COLLECTIVE_ALL_TO_ALL, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, 100, 0},
         {DTRAIN_COLLECTIVE_REDUCE_SCATTER, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, 100, 0},
         "all-to-all",
         "scatter"},
        {"count of all-to-all",
         {DTRAIN_COLLECTIVE_ALL_TO_ALL, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, 20001, 0},
         {DTRAIN_COLLECTIVE_ALL_TO_ALL, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, 7, 0},
         "20001",
         "7"},
        {"dtype of all-to-all",
         {DTRAIN_COLLECTIVE_ALL_TO_ALL, DTRAIN_DTYPE_I32, DTRAIN_REDUCE_SUM, 12, 0},
         {DTRAIN_COLLECTIVE_ALL_TO_ALL, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, 12, 0},
         "i32",
         "f32"},
        {"root of reduce",
         {DTRAIN_COLLECTIVE_REDUCE, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, 90000, 1},
         {DTRAIN_COLLECTIVE_REDUCE, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, 90000, 0},
         "1",
         "0"},
    };
    size_t i;
    for (i = 0; i < sizeof rows / sizeof *rows; i++) {
        int variant, last = test_full() ? 8 : 2;
        for (variant = 0; variant < last; variant++) {
            dispute q;
            int ranks = 2 + (int)((i + (size_t)variant) % 3);
            memset(&q, 0, sizeof q);
            q.usual = rows[i].usual;
            q.odd = rows[i].odd;
            q.words_usual = rows[i].words_usual;
            q.words_odd = rows[i].words_odd;
            q.who = (int)((i + (size_t)variant * 2) % (size_t)ranks);
            q.warm_ups = (variant + (int)i) % 3 * 40;
            q.shared = ((size_t)variant + i / 2) & 1;
            q.async = (variant >> 1 ^ (int)i) & 1;
            check_dispute(ranks, (uint32_t)variant & 1, &q, rows[i].what);
        }
    }
}

/* Sends and receives that do not fit: the receiver must not get a part of a message as the whole. */
static int rank_wrong_message(dtrain_world *world, void *user)
{
    dispute *q = (dispute *)user;
    dtrain_comm *comm = dtrain_world_comm(world);
    int rank = dtrain_world_rank(world);
    char *buffer = (char *)calloc(1, 1 << 20);
    dtrain_result result =
        make_demand(comm, rank == q->who ? &q->odd : &q->usual, buffer, NULL, NULL);
    if (rank == 0 && result == DTRAIN_OK)
        result = dtrain_barrier(comm); /* a small send may be gone already */
    tell(q->told, rank, result);
    free(buffer);
    return 40;
}
static void test_mismatched_messages(void)
{
    static const struct {
        size_t send_count, recv_count;
        dtrain_dtype send_dtype, recv_dtype;
    } rows[] = {{10, 11, DTRAIN_DTYPE_F32, DTRAIN_DTYPE_F32},
                {11, 10, DTRAIN_DTYPE_F32, DTRAIN_DTYPE_F32},
                {0, 1, DTRAIN_DTYPE_F32, DTRAIN_DTYPE_F32},
                {70000, 70001, DTRAIN_DTYPE_F32, DTRAIN_DTYPE_F32},
                {16, 16, DTRAIN_DTYPE_F32, DTRAIN_DTYPE_I32},
                {16, 8, DTRAIN_DTYPE_I32, DTRAIN_DTYPE_I64}};
    size_t i;
    uint32_t mode;
    for (i = 0; i < 6; i++)
        for (mode = 0; mode < 2; mode++) {
            dispute q;
            dtrain_launch_desc desc = ranks_desc(2, mode);
            memset(&q, 0, sizeof q);
            q.usual.kind = DTRAIN_COLLECTIVE_SEND;
            q.usual.root = 1;
            q.usual.count = rows[i].send_count;
            q.usual.dtype = rows[i].send_dtype;
            q.who = 1;
            q.odd.kind = DTRAIN_COLLECTIVE_RECV;
            q.odd.count = rows[i].recv_count;
            q.odd.dtype = rows[i].recv_dtype;
            q.told = new_story();
            CHECK(ranks_launch(&desc, rank_wrong_message, &q, NULL) == DTRAIN_ERROR_RANK_FAILED);
            CHECK_MSG(q.told->result[1] == DTRAIN_ERROR_MISMATCH, "row %d, receiver: %s: %s",
                      (int)i, dtrain_result_text((dtrain_result)q.told->result[1]),
                      q.told->text[1]);
            CHECK_MSG(q.told->result[0] == DTRAIN_ERROR_MISMATCH ||
                          q.told->result[0] == DTRAIN_ERROR_PEER,
                      "row %d, sender: %s: %s", (int)i,
                      dtrain_result_text((dtrain_result)q.told->result[0]), q.told->text[0]);
            munmap(q.told, sizeof *q.told);
        }
}

/* A mismatch among works in flight: that one and all after it fail, on every rank. */
static int rank_fails_with_works(dtrain_world *world, void *user)
{
    enum { SOME = 30 };
    story *s = (story *)user;
    dtrain_comm *comm = dtrain_world_comm(world);
    int rank = dtrain_world_rank(world), i, count = 0, bad = 0;
    dtrain_work *works[SOME];
    static const size_t large = 50000;
    float *x = (float *)calloc(SOME * large, 4);
    dtrain_result posted = DTRAIN_OK, first = DTRAIN_OK;
    for (i = 0; i < SOME; i++) {
        size_t n = i == 17 && rank == 1 ? 7 : i % 3 ? 9 : large; /* number 17 does not fit */
        posted = dtrain_all_reduce(comm, x + (size_t)i * large, x + (size_t)i * large, n,
                                   DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, &works[i]);
        if (posted != DTRAIN_OK) break; /* the others disagreed before this rank came so far */
        count++;
    }
    for (i = 0; i < count; i++) {
        const dtrain_result result = dtrain_work_wait(works[i]);
        if (first == DTRAIN_OK) first = result;
        if (i >= 17 && result == DTRAIN_OK) bad++;
    }
    CHECK_MSG(bad == 0, "%d works after the mismatch ended well", bad);
    if (first == DTRAIN_OK) first = posted;
    tell(s, rank, first);
    free(x);
    return 40;
}
static void test_works_after_failure(void)
{
    uint32_t mode;
    for (mode = 0; mode < 2; mode++) {
        story *s = new_story();
        dtrain_launch_desc desc = ranks_desc(3, mode);
        int r;
        CHECK(ranks_launch(&desc, rank_fails_with_works, s, NULL) == DTRAIN_ERROR_RANK_FAILED);
        for (r = 0; r < 3; r++)
            CHECK_MSG(s->result[r] == DTRAIN_ERROR_MISMATCH, "rank %d: %s", r, s->text[r]);
        munmap(s, sizeof *s);
    }
}

/* ---- wrong arguments (44, 56) ---- */

static float wrong_floats[64];

static dtrain_result destroyed(dtrain_comm *comm)
{
    dtrain_comm_destroy(comm);
    return strstr(dtrain_last_error(), "the world's communicator ends with it") ? DTRAIN_ERROR_USAGE
                                                                                : DTRAIN_OK;
}
/* Each row is one wrong call; it must be an argument or usage error with a sentence. */
static dtrain_result wrong_call(dtrain_comm *comm, int row, const char **what)
{
    float *x = wrong_floats;
    dtrain_comm *out = NULL;
    dtrain_work *work = NULL;
    int me = dtrain_comm_rank(comm);
#define WRONG(text, call) \
    do {                  \
        *what = text;     \
        return call;      \
    } while (0)
    switch (row) {
    case 0:
        WRONG("send NULL",
              dtrain_all_reduce(comm, NULL, x, 4, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, NULL));
    case 1:
        WRONG("recv NULL",
              dtrain_all_reduce(comm, x, NULL, 4, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, NULL));
    case 2:
        WRONG("comm NULL",
              dtrain_all_reduce(NULL, x, x, 4, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, NULL));
    case 3:
        WRONG("dtype 6",
              dtrain_all_reduce(comm, x, x, 4, (dtrain_dtype)6, DTRAIN_REDUCE_SUM, NULL));
    case 4:
        WRONG("dtype 99",
              dtrain_all_reduce(comm, x, x, 4, (dtrain_dtype)99, DTRAIN_REDUCE_SUM, NULL));
    case 5:
        WRONG("op 0",
              dtrain_all_reduce(comm, x, x, 4, DTRAIN_DTYPE_F32, (dtrain_reduce_op)0, NULL));
    case 6:
        WRONG("op 6",
              dtrain_all_reduce(comm, x, x, 4, DTRAIN_DTYPE_F32, (dtrain_reduce_op)6, NULL));
    case 7:
        WRONG("mean of integers",
              dtrain_all_reduce(comm, x, x, 4, DTRAIN_DTYPE_I32, DTRAIN_REDUCE_MEAN, NULL));
    case 8:
        WRONG("shifted overlap",
              dtrain_all_reduce(comm, x, x + 1, 4, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, NULL));
    case 9:
        WRONG("count overflows",
              dtrain_all_reduce(comm, x, x, SIZE_MAX, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, NULL));
    case 10:
        WRONG("bytes overflow", dtrain_all_reduce(comm, x, x, SIZE_MAX / 4 + 2, DTRAIN_DTYPE_F32,
                                                  DTRAIN_REDUCE_SUM, NULL));
    case 11:
        WRONG("slices overflow", dtrain_reduce_scatter(comm, x, x + me, SIZE_MAX / 4 - 1,
                                                       DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, NULL));
    case 12:
        WRONG("gather overflows",
              dtrain_all_gather(comm, x, x, SIZE_MAX / 8 + 1, DTRAIN_DTYPE_F32, NULL));
    case 13:
        WRONG("other slice", dtrain_reduce_scatter(comm, x, x + 4 * (1 - me), 4, DTRAIN_DTYPE_F32,
                                                   DTRAIN_REDUCE_SUM, NULL));
    case 14:
        WRONG("other slice",
              dtrain_all_gather(comm, x + 4 * (1 - me), x, 4, DTRAIN_DTYPE_F32, NULL));
    case 15: WRONG("root -1", dtrain_broadcast(comm, x, 4, DTRAIN_DTYPE_F32, -1, NULL));
    case 16: WRONG("root 2 of 2", dtrain_broadcast(comm, x, 4, DTRAIN_DTYPE_F32, 2, NULL));
    case 17:
        WRONG("root 2 of 2",
              dtrain_reduce(comm, x, x, 4, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, 2, NULL));
    case 18: WRONG("peer is oneself", dtrain_send(comm, x, 4, DTRAIN_DTYPE_F32, me, NULL));
    case 19: WRONG("peer is oneself", dtrain_recv(comm, x, 4, DTRAIN_DTYPE_F32, me, NULL));
    case 20: WRONG("peer 2 of 2", dtrain_send(comm, x, 4, DTRAIN_DTYPE_F32, 2, NULL));
    case 21: WRONG("peer -1", dtrain_recv(comm, x, 4, DTRAIN_DTYPE_F32, -1, NULL));
    case 22: WRONG("buffer NULL", dtrain_broadcast(comm, NULL, 4, DTRAIN_DTYPE_F32, 0, NULL));
    case 23: WRONG("buffer NULL", dtrain_send(comm, NULL, 4, DTRAIN_DTYPE_F32, 1 - me, NULL));
    case 24: WRONG("barrier of nobody", dtrain_barrier(NULL));
    case 25: WRONG("split of nobody", dtrain_comm_split(NULL, 0, 0, &out));
    case 26: WRONG("split to nowhere", dtrain_comm_split(comm, 0, 0, NULL));
    case 27: WRONG("destroy the world's", destroyed(comm));
    case 28: WRONG("alloc to nowhere", dtrain_comm_alloc(comm, 64, NULL));
    case 29:
        WRONG("async, dtype -1",
              dtrain_all_reduce(comm, x, x, 4, (dtrain_dtype)-1, DTRAIN_REDUCE_SUM, &work));
    case 30: WRONG("test of nothing", dtrain_work_test(NULL, NULL));
    case 31: WRONG("all-to-all in place", dtrain_all_to_all(comm, x, x, 2, DTRAIN_DTYPE_F32, NULL));
    case 32:
        WRONG("all-to-all, overlap", dtrain_all_to_all(comm, x, x + 3, 2, DTRAIN_DTYPE_F32, NULL));
    case 33:
        WRONG("all-to-all of NULL", dtrain_all_to_all(comm, NULL, x, 2, DTRAIN_DTYPE_F32, NULL));
    case 34:
        WRONG("all-to-all overflows",
              dtrain_all_to_all(comm, x, x + 4, SIZE_MAX / 8 + 1, DTRAIN_DTYPE_F32, NULL));
    default: return DTRAIN_RESULT_FORCE_INT;
    }
#undef WRONG
}
enum { WRONG_ROWS = 35 };

typedef struct wrong {
    int row;
    bool alone; /* rank 0 makes a right call meanwhile */
    story *told;
} wrong;

static bool is_argument_error(int32_t result)
{
    return result == DTRAIN_ERROR_ARGUMENT || result == DTRAIN_ERROR_USAGE;
}
static int rank_is_wrong(dtrain_world *world, void *user)
{
    wrong *w = (wrong *)user;
    dtrain_comm *comm = dtrain_world_comm(world);
    const char *what = "?";
    int rank = dtrain_world_rank(world);
    if (w->alone && rank == 0) {
        tell(w->told, 0, dtrain_barrier(comm));
        return 40;
    }
    tell(w->told, rank, wrong_call(comm, w->row, &what));
    /* when both are wrong, the second may already hear of the first */
    CHECK_MSG(is_argument_error(w->told->result[rank]) ||
                  (!w->alone && w->told->result[rank] == DTRAIN_ERROR_PEER),
              "%s: %s", what, dtrain_result_text((dtrain_result)w->told->result[rank]));
    CHECK_MSG(strlen(w->told->text[rank]) > 20, "%s: no sentence", what);
    return 40;
}
static void test_wrong_arguments(void)
{
    wrong w;
    int alone;
    for (alone = 0; alone < 2; alone++)
        for (w.row = 0; w.row < WRONG_ROWS; w.row++) {
            dtrain_launch_desc desc = ranks_desc(2, w.row % 2 ? PROCESSES : THREADS);
            double begin = dtrain_seconds();
            w.alone = alone != 0;
            w.told = new_story();
            CHECK(ranks_launch(&desc, rank_is_wrong, &w, NULL) == DTRAIN_ERROR_RANK_FAILED);
            CHECK_MSG(dtrain_seconds() - begin < RANKS_SOON, "row %d: took %.1f s", w.row,
                      dtrain_seconds() - begin);
            CHECK_MSG(is_argument_error(w.told->result[1]) || is_argument_error(w.told->result[0]),
                      "row %d: nobody heard of a wrong argument", w.row);
            if (alone)
                CHECK_MSG(w.told->result[0] != DTRAIN_OK && w.told->result[0] != UNTOLD &&
                              names_rank(w.told->text[0], 1),
                          "row %d: the other rank heard %s", w.row, w.told->text[0]);
            munmap(w.told, sizeof *w.told);
        }
}

/* A communicator that is destroyed with work in flight fails, for all ranks, and stays until the handle
 * is given back. */
static int rank_destroys_early(dtrain_world *world, void *user)
{
    dtrain_comm *pair = NULL;
    dtrain_work *work;
    float x = 1;
    (void)user;
    RANKS_TRY(dtrain_comm_split(dtrain_world_comm(world), 0, 0, &pair));
    if (dtrain_world_rank(world) == 0) {
        RANKS_TRY(dtrain_all_reduce(pair, &x, &x, 1, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, &work));
        dtrain_comm_destroy(pair);
        CHECK_MSG(strstr(dtrain_last_error(), "have not been given to dtrain_work_wait") != NULL,
                  "%s", dtrain_last_error());
        RANKS_TRY(dtrain_barrier(dtrain_world_comm(world)));
        CHECK(dtrain_work_wait(work) == DTRAIN_ERROR_USAGE);
        CHECK(x == 1);
    } else {
        RANKS_TRY(dtrain_barrier(dtrain_world_comm(world)));
        CHECK(dtrain_barrier(pair) == DTRAIN_ERROR_PEER);
        CHECK_MSG(names_rank(dtrain_last_error(), 0), "%s", dtrain_last_error());
    }
    dtrain_comm_destroy(pair);
    return 0;
}
static void test_destroy_in_flight(void)
{
    uint32_t mode;
    for (mode = 0; mode < 2; mode++) ranks_run(2, mode, rank_destroys_early, NULL);
}

/* A rank that ends with works in flight, and communicators and memory not given back: what it forgot is
 * its own loss (a leak checker would tell), but it must end and leave no process or thread. */
static int rank_forgets(dtrain_world *world, void *user)
{
    dtrain_comm *pair = NULL;
    dtrain_work *work;
    void *memory;
    static float x[2][4];
    float *mine = x[dtrain_world_rank(world)];
    (void)user;
    RANKS_TRY(dtrain_comm_split(dtrain_world_comm(world), 0, 0, &pair));
    RANKS_TRY(dtrain_comm_alloc(pair, 100000, &memory));
    RANKS_TRY(dtrain_all_reduce(pair, mine, mine, 4, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, &work));
    return 0;
}
static void test_forgotten_things(void)
{
    uint32_t mode;
    int i;
    for (mode = 0; mode < (RANKS_SANITIZED ? 1u : 2u); mode++)
        for (i = 0; i < 3; i++) {
            dtrain_launch_desc desc = ranks_desc(2, mode);
            dtrain_result result = ranks_launch(&desc, rank_forgets, NULL, NULL);
            CHECK_MSG(result == DTRAIN_OK || result == DTRAIN_ERROR_RANK_FAILED, "%s",
                      dtrain_result_text(result));
        }
}

/* ---- signals, fork (15, 50) ---- */

static volatile sig_atomic_t ticks;
static void on_tick(int number)
{
    (void)number;
    ticks++;
}
static void start_ticking(long us)
{
    struct itimerval timer;
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = on_tick; /* no SA_RESTART: every blocking system call sees EINTR */
    sigaction(SIGALRM, &action, NULL);
    timer.it_interval.tv_sec = timer.it_value.tv_sec = 0;
    timer.it_interval.tv_usec = timer.it_value.tv_usec = us;
    setitimer(ITIMER_REAL, &timer, NULL);
}
static int rank_in_a_storm(dtrain_world *world, void *user)
{
    dtrain_comm *comm = dtrain_world_comm(world);
    int rank = dtrain_world_rank(world), n = dtrain_world_size(world), i;
    size_t count = 30000, k;
    float *x = (float *)malloc(count * 4);
    (void)user;
    start_ticking(150 + rank * 37);
    for (i = 0; i < 150; i++) {
        size_t now = i % 10 ? 100 : count;
        for (k = 0; k < now; k++) x[k] = (float)(rank + 1);
        RANKS_TRY(dtrain_all_reduce(comm, x, x, now, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, NULL));
        for (k = 0; k < now; k++)
            if (x[k] != (float)(n * (n + 1) / 2))
                return !CHECK_MSG(0, "x[%zu] = %g", k, (double)x[k]);
        if (i % 7 == 0) RANKS_TRY(dtrain_barrier(comm));
        if (i % 50 == 49 && rank == 1) ranks_sleep_us(30000); /* the others sleep in the library */
        if (i % 40 == 39) {
            dtrain_comm *copy;
            RANKS_TRY(dtrain_comm_split(comm, 0, 0, &copy));
            dtrain_comm_destroy(copy);
        }
    }
    CHECK_MSG(ticks > 5, "only %d signals came", (int)ticks);
    free(x);
    return 0;
}
static void test_signal_storm(void)
{
    int i;
    start_ticking(200); /* in the launcher too; children do not inherit the timer */
    for (i = 0; i < 5; i++) ranks_run(3, PROCESSES, rank_in_a_storm, NULL);
    CHECK_MSG(ticks > 5, "only %d signals came to the launcher", (int)ticks);
}

/* A process forked by a rank is not a rank: its calls are errors and do not disturb the real one. */
static int rank_forks(dtrain_world *world, void *user)
{
    dtrain_comm *comm = dtrain_world_comm(world);
    float x = 1;
    (void)user;
    RANKS_TRY(dtrain_barrier(comm));
    if (dtrain_world_rank(world) == 1) {
        int status = 0;
        pid_t child;
        fflush(NULL);
        child = fork();
        if (child == 0) {
            dtrain_work *work = NULL;
            int code = 0;
            alarm(15); /* before the deadline of the others */
            if (dtrain_barrier(comm) == DTRAIN_OK) code |= 1;
            if (dtrain_all_reduce(comm, &x, &x, 1, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, NULL) ==
                DTRAIN_OK)
                code |= 2;
            if (dtrain_send(comm, &x, 1, DTRAIN_DTYPE_F32, 0, &work) == DTRAIN_OK) code |= 4;
            if (strlen(dtrain_last_error()) < 20) code |= 8;
            _exit(code);
        }
        CHECK_MSG(test_wait(child, 18, &status) && WIFEXITED(status) && WEXITSTATUS(status) == 0,
                  "the forked child ended with status %x", (unsigned)status);
    }
    RANKS_TRY(dtrain_all_reduce(comm, &x, &x, 1, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, NULL));
    CHECK_MSG(x == (float)dtrain_world_size(world), "x = %g", (double)x);
    return 0;
}
static void test_fork_inside_a_rank(void) { ranks_run(3, PROCESSES, rank_forks, NULL); }

/* ---- /dev/shm (39, 40) ---- */

static int rank_needs_memory(dtrain_world *world, void *user)
{
    dtrain_comm *comm = dtrain_world_comm(world);
    size_t bytes = (size_t)6 << 20;
    void *memory;
    (void)user;
    if (dtrain_comm_alloc(comm, bytes, &memory) != DTRAIN_OK) return 40;
    memset(memory, 1, bytes);
    if (dtrain_all_reduce(comm, memory, memory, bytes / 4, DTRAIN_DTYPE_I32, DTRAIN_REDUCE_MAX,
                          NULL) != DTRAIN_OK)
        return 41;
    dtrain_comm_free(comm, memory, bytes);
    return 0;
}
/* 1 MiB of /dev/shm, then one that is read-only: it works or it is an error, never a SIGBUS. */
static void test_small_dev_shm(void)
{
    static const unsigned long flags[] = {0, MS_RDONLY};
    int i;
    if (unshare(CLONE_NEWNS) != 0 || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0) {
        test_cannot("no private mounts here");
        return;
    }
    for (i = 0; i < 2; i++) {
        dtrain_launch_desc desc = ranks_desc(3, PROCESSES);
        dtrain_launch_info info;
        dtrain_result result;
        CHECK(mount("tmpfs", "/dev/shm", "tmpfs", flags[i], "size=1m") == 0);
        result = ranks_launch(&desc, rank_needs_memory, NULL, &info);
        CHECK_MSG(result == DTRAIN_OK || (info.signal == 0 && strlen(dtrain_last_error()) > 20),
                  "%s: %s", dtrain_result_text(result), dtrain_last_error());
        umount("/dev/shm");
    }
}

/* ---- many failures in one process ---- */

/* Failed runs of all sorts in one process, each followed by a good one: nothing sticks. */
static void test_good_after_bad(void)
{
    int i;
    for (i = 0; i < 12; i++) {
        death d = make_death((uint64_t)i + 3000, 2);
        leaving l;
        dtrain_launch_desc desc = ranks_desc(2, (uint32_t)i % 2);
        check_death(2, &d);
        l.told = new_story();
        l.who = i % 2;
        l.steps = i;
        l.code = 3;
        CHECK(ranks_launch(&desc, rank_leaves, &l, NULL) == DTRAIN_ERROR_RANK_FAILED);
        munmap(l.told, sizeof *l.told);
        ranks_run(2, (uint32_t)i % 2, rank_destroys_early, NULL);
    }
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    RUN(test_death_in_collectives);
    RUN(test_rank_0_dies);
    RUN(test_two_die);
    RUN(test_dead_at_start);
    RUN(test_leaving);
    RUN(test_extra_call);
    RUN_BESIDE(test_stopped_rank);
    RUN_BESIDE(test_stopped_at_the_end);
    RUN(test_stopped_and_continued);
    RUN_BESIDE(test_deadline);
    RUN_BESIDE(test_who_is_behind);
    RUN_BESIDE(test_circle);
    RUN_BESIDE(test_circle_of_communicators);
    RUN(test_mismatch);
    RUN(test_mismatched_messages);
    RUN(test_works_after_failure);
    RUN(test_wrong_arguments);
    RUN(test_destroy_in_flight);
    RUN(test_forgotten_things);
    RUN(test_signal_storm);
    RUN(test_fork_inside_a_rank);
    RUN(test_small_dev_shm);
    RUN(test_good_after_bad);
    if (!test_full()) printf("  note DTRAIN_TEST_FULL=1 runs the long forms\n");
    return test_summary();
}
