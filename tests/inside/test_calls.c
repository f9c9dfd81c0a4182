/* test_calls.c: random sequences of communicator calls on worlds of 1 to 8 ranks, against plain loops in rank order;
 * and what every rank hears when one of them deviates.
 *
 *     build/tests/test_calls                      the seeds that ever failed, then 150 new ones;
 *                                                 with DTRAIN_TEST_FULL=1 10 seconds of new ones
 *     build/tests/test_calls --count 10000        so many new ones; they are printed to be repeated
 *     build/tests/test_calls --seconds 120        as many as fit
 *     build/tests/test_calls --seed 77            this one, in words; if it fails it is shrunk
 *
 * A program is a list of steps that all ranks take in the same order: collectives, messages, splits into
 * communicators on which calls go on, their ends. It is a pure function of its seed, and so is what a rank decides
 * alone: the memory and the alignment of its buffers, whether in place, whether it waits at once or for which of its
 * open handles when, how late it comes. Every result is compared with the loops of naive_comm.h, bit for bit, guards
 * around the buffers included.
 *
 * In two programs of three one rank deviates in one step: another count, dtype, operation, root or call, a call that
 * it leaves out or makes twice, a wrong argument, its death, a stop, an absence until the others gave up, its end.
 * Then whatever was done before must still be right, every rank must end by itself, and who cannot go on must say
 * why: one documented error with the ranks, and where ranks disagree the calls, in the sentence. */
#include "world/world_internal.h"
#include "test.h"

#include "dtrain.h"
#include "ranks.h"
#include "seeds.h"
#include "naive_comm.h"
#include "tools/emulated_links.h"

#include <sys/time.h>

enum { MOST_RANKS = 8, MOST_STEPS = 24, MOST_COMMS = 5, MOST_OPEN = 12, MOST_COUNT = 20000 };

typedef enum action { CALL, BARRIER, MESSAGE, SPLIT, DESTROY } action;

typedef struct step {
    uint32_t id; /* its number before anything was taken away: decisions are drawn from it */
    action what;
    int comm; /* 0: the world's; k: those that the split with made == k has made */
    int made; /* SPLIT */
    call call;
    int to; /* MESSAGE: from call.root to this rank, both modulo the size of the group */
} step;

/* How a rank deviates. Up to WRONG it is the call that is odd, then the rank. */
typedef enum deviation {
    NONE,
    OTHER_COUNT,
    OTHER_DTYPE,
    OTHER_OP,
    OTHER_ROOT,
    OTHER_CALL,
    MISSING,
    TWICE,
    WRONG,
    DIES,
    STOPS,
    LINGERS,
    LEAVES,
    GIVES_UP,
    DEVIATIONS
} deviation;
static const char *const deviations[] = {
    "",           "other count",  "other dtype",  "other operation", "other root",
    "other call", "missing call", "a call twice", "wrong argument",  "dies",
    "stops",      "lingers",      "leaves",       "gives up"};

typedef struct program {
    uint64_t seed;
    int ranks, count, node_ranks; /* node_ranks: of an emulated node; 0: none */
    uint32_t mode;
    uint64_t late, async, tests, waits; /* one decision in so many; 0: never */
    bool alike;                         /* all ranks use the same kind of memory, in place or not */
    deviation how;
    int who;
    uint32_t when; /* the id of the step */
    step steps[MOST_STEPS];
    char note[16]; /* what shrinking took away */
} program;

typedef enum outcome { UNTOLD = 0, FINISHED, FAILED, INCORRECT, ENDED } outcome;

/* What ranks and the launcher tell; in shared memory. */
typedef struct report {
    int32_t outcome[MOST_RANKS], code[MOST_RANKS], failures; /* failures: how many have FAILED */
    char text[MOST_RANKS][700];
    int32_t launched, first_failed, signal;
} report;

typedef struct play {
    const program *g;
    report *r;
} play;

/* ---- Decisions ------------------------------------------------------------------------------------*/

enum { LATE = 1, ASYNC, TEST, WAIT, PICK, MEMORY, COLOR, KEY, ELEMENTS };

static uint64_t draw(const program *g, uint64_t what, int rank, uint32_t id)
{
    return ranks_mix(ranks_mix(g->seed * 31 + what) + (uint64_t)rank * 1000003u + id);
}
static bool one_in(const program *g, uint64_t rate, uint64_t what, int rank, uint32_t id)
{
    return rate && draw(g, what, rank, id) % rate == 0;
}

/* ---- Who is together ------------------------------------------------------------------------------*/

static const step *split_of(const program *g, int comm)
{
    for (int i = 0; i < g->count; i++)
        if (g->steps[i].what == SPLIT && g->steps[i].made == comm) return &g->steps[i];
    return NULL;
}
/* Of two colors, and one rank in six joins none. */
static int color_of(const program *g, const step *s, int rank)
{
    const uint64_t x = draw(g, COLOR, rank, s->id);
    return x % 6 == 0 ? -1 : (int)(x >> 8 & 1);
}
static bool together(const program *g, int comm, int a, int b)
{
    if (comm == 0) return true;
    const step *s = split_of(g, comm);
    return s && color_of(g, s, a) >= 0 && color_of(g, s, a) == color_of(g, s, b) &&
           together(g, s->comm, a, b);
}
static int group_size(const program *g, int comm, int rank)
{
    int size = 0;
    for (int r = 0; r < g->ranks; r++) size += together(g, comm, r, rank);
    return size;
}
static int place_of(const program *g, uint32_t id)
{
    for (int i = 0; i < g->count; i++)
        if (g->steps[i].id == id) return i;
    return -1;
}
/* Whether the rank takes part in a collective with the deviating one from that step on. */
static bool needs(const program *g, int rank)
{
    for (int i = place_of(g, g->when); i >= 0 && i < g->count; i++)
        if (g->steps[i].what != MESSAGE && g->steps[i].what != DESTROY &&
            together(g, g->steps[i].comm, rank, g->who))
            return true;
    return false;
}
static bool anybody_needs(const program *g)
{
    for (int r = 0; r < g->ranks; r++)
        if (r != g->who && needs(g, r)) return true;
    return false;
}
/* Whether two steps look alike to the other ranks, so that one of them could be taken for the other. */
static bool look_alike(const step *a, const step *b)
{
    if ((a->what == MESSAGE) != (b->what == MESSAGE)) return false;
    if (a->what == MESSAGE) return a->call.dtype == b->call.dtype && a->call.count == b->call.count;
    if (a->what != b->what || a->what != CALL) return a->what == b->what;
    return a->call.kind == b->call.kind && a->call.dtype == b->call.dtype &&
           a->call.count == b->call.count && (a->call.op == b->call.op || !has_op(a->call.kind));
}
/* A call that is left out or made twice is found by comparing it with the next one. */
static bool is_ambiguous(const program *g)
{
    const int place = place_of(g, g->when);
    if (g->how != MISSING && g->how != TWICE) return false;
    for (int i = place + 1; i < g->count; i++)
        if (g->steps[i].comm == g->steps[place].comm && g->steps[i].what != DESTROY &&
            (g->steps[i].what == MESSAGE) == (g->steps[place].what == MESSAGE)) {
            if (look_alike(&g->steps[i], &g->steps[place])) return true;
            if (g->steps[i].what != MESSAGE)
                return false; /* messages of other pairs come between */
        }
    return false;
}

/* ---- A rank ---------------------------------------------------------------------------------------*/

/* A call whose handle is open. */
typedef struct open_call {
    desk d;
    flight f;
    bool message, receives;
    int sender; /* rank in the world */
} open_call;

typedef struct rank_state {
    play y;
    int rank, open_count;
    dtrain_comm *comms[MOST_COMMS];
    open_call *open[MOST_OPEN];
} rank_state;

static unsigned char *take(const desk *d, int memory)
{
    void *at = NULL;
    if (memory == PRIVATE) return (unsigned char *)malloc(d->capacity);
    return dtrain_comm_alloc(d->comm, d->capacity, &at) == DTRAIN_OK ? (unsigned char *)at : NULL;
}
static void give(const desk *d, int memory, unsigned char *at)
{
    if (memory == PRIVATE) free(at);
    else dtrain_comm_free(d->comm, at, d->capacity);
}

/* The call as this rank makes it, with buffers of its own. */
static open_call *prepare_step(rank_state *s, const step *p, dtrain_comm *comm)
{
    const program *g = s->y.g;
    const uint64_t own = draw(g, MEMORY, g->alike ? 0 : s->rank, p->id);
    open_call *o = (open_call *)calloc(1, sizeof *o);
    desk *d = &o->d;
    call *c = &o->f.what;
    d->comm = comm;
    d->rank = dtrain_comm_rank(comm);
    d->size = dtrain_comm_size(comm);
    for (int r = 0; r < d->size; r++) d->members[r] = ranks_in_world(comm, r);
    *c = p->call;
    c->root %= d->size;
    c->seed = draw(g, ELEMENTS, 0, p->id);
    c->async = one_in(g, g->async, ASYNC, s->rank, p->id);
    c->in_place = (own >> 16 & 1) && c->kind != DTRAIN_COLLECTIVE_ALL_TO_ALL && p->what != MESSAGE;
    c->send_memory = (int)(own & 1);
    c->recv_memory = (int)(own >> 1 & 1);
    c->send_offset = own >> 2 & 15;
    c->recv_offset = own >> 6 & 15;
    if (c->in_place && c->kind != DTRAIN_COLLECTIVE_ALL_GATHER) c->recv_memory = c->send_memory;
    o->message = p->what == MESSAGE;
    o->receives = o->message && d->rank == p->to % d->size;
    o->sender = d->members[c->root];
    d->capacity = (c->count + 1) * (size_t)(o->message ? 1 : d->size) * 8 + 2 * GUARD + 64;
    d->send[c->send_memory] = take(d, c->send_memory);
    d->recv[c->recv_memory] = take(d, c->recv_memory);
    if (!CHECK_MSG(d->send[c->send_memory] && d->recv[c->recv_memory], "no memory: %s",
                   dtrain_last_error()))
        return NULL;
    if (!o->message) prepare(d, &o->f);
    else {
        const size_t item = dtrain_dtype_bytes(c->dtype);
        o->f.recv = d->recv[c->recv_memory] + GUARD + c->recv_offset;
        guard(o->f.recv, c->count * item);
        for (size_t i = 0; i < c->count && !o->receives; i++)
            make_element(c->dtype, c->seed, o->sender, i, o->f.recv + i * item);
    }
    return o;
}

static int verify_message(const open_call *o)
{
    const call *c = &o->f.what;
    const size_t item = dtrain_dtype_bytes(c->dtype);
    unsigned char wanted[8];
    for (size_t i = 0; i < c->count; i++) {
        make_element(c->dtype, c->seed, o->sender, i, wanted);
        if (memcmp(o->f.recv + i * item, wanted, item) != 0)
            return CHECK_MSG(0, "message from rank %d, %s: element %zu of %zu is wrong", o->sender,
                             dtrain_dtype_name(c->dtype), i, c->count);
    }
    return CHECK_MSG(guarded(o->f.recv, c->count * item), "a message wrote beyond its buffer");
}

/* Judges a call that has ended; returns 0 to go on, otherwise the rank ends with that. */
static int judge(rank_state *s, open_call *o, dtrain_result result)
{
    desk *d = &o->d;
    call *c = &o->f.what;
    report *r = s->y.r;
    if (result != DTRAIN_OK) {
        r->code[s->rank] = (int32_t)result;
        snprintf(r->text[s->rank], sizeof r->text[0], "%s", dtrain_last_error());
        const dtrain_result later = dtrain_barrier(d->comm);
        r->outcome[s->rank] =
            CHECK_MSG(later == result, "rank %d: after %s a barrier gives %s", s->rank,
                      dtrain_result_text(result), dtrain_result_text(later))
                ? FAILED
                : INCORRECT;
        ranks_count(&r->failures);
        return 40; /* what is open is forgotten */
    }
    const int good =
        o->message ? verify_message(o) : verify_output(d, &o->f) && verify_rest(d, &o->f);
    if (!good) r->outcome[s->rank] = INCORRECT;
    give(d, c->send_memory, d->send[c->send_memory]);
    give(d, c->recv_memory, d->recv[c->recv_memory]);
    free(o);
    return good ? 0 : 41;
}

/* Waits for an open call by its place. */
static int wait_for_open(rank_state *s, int place)
{
    open_call *o = s->open[place];
    s->open[place] = s->open[--s->open_count];
    return judge(s, o, dtrain_work_wait(o->f.work));
}

static int make_call_step(rank_state *s, const step *p, dtrain_comm *comm)
{
    open_call *o = prepare_step(s, p, comm);
    if (!o) return 41;
    const call *c = &o->f.what;
    dtrain_work **work = c->async ? &o->f.work : NULL;
    const dtrain_result result =
        !o->message   ? start(&o->d, &o->f)
        : o->receives ? dtrain_recv(comm, o->f.recv, c->count, c->dtype, c->root, work)
                      : dtrain_send(comm, o->f.recv, c->count, c->dtype, p->to % o->d.size, work);
    if (result != DTRAIN_OK || !c->async) return judge(s, o, result);
    s->open[s->open_count++] = o;
    return s->open_count < MOST_OPEN ? 0 : wait_for_open(s, 0);
}

/* A call without buffers has failed, or not. */
static int judge_bare(rank_state *s, dtrain_comm *comm, dtrain_result result)
{
    open_call o;
    memset(&o, 0, sizeof o);
    o.d.comm = comm;
    return result == DTRAIN_OK ? 0 : judge(s, &o, result);
}

/* Waits for what is open on a communicator, or (NULL) on all of them, in an order of its own. */
static int close_calls(rank_state *s, const dtrain_comm *comm, uint64_t order)
{
    for (int i = s->open_count; i > 0; i--) {
        int place = (int)((order + (uint64_t)i) % (uint64_t)s->open_count), tried = 0;
        while (comm && tried < s->open_count && s->open[place]->d.comm != comm)
            place = (place + 1) % s->open_count, tried++;
        if (comm && tried == s->open_count) return 0;
        const int ended = wait_for_open(s, place);
        if (ended) return ended;
        if (s->open_count == 0) return 0;
    }
    return 0;
}

/* A new communicator has the ranks of one color, ordered by key, then by their order in the old one. */
static int verify_split(const rank_state *s, const step *p, const dtrain_comm *old,
                        const dtrain_comm *made)
{
    const program *g = s->y.g;
    int last_key = -1, last_place = -1;
    const int size = dtrain_comm_size(made);
    if (!CHECK_MSG(size == (color_of(g, p, s->rank) < 0 ? 0 : group_size(g, p->made, s->rank)),
                   "rank %d: a split has made a communicator of %d", s->rank, size))
        return 41;
    for (int i = 0; i < size; i++) {
        const int rank = ranks_in_world(made, i), key = (int)(draw(g, KEY, rank, p->id) % 5);
        int place = 0;
        while (ranks_in_world(old, place) != rank) place++;
        if (!CHECK_MSG(together(g, p->made, rank, s->rank) &&
                           (key > last_key || (key == last_key && place > last_place)),
                       "rank %d: rank %d is number %d of the split", s->rank, rank, i))
            return 41;
        last_key = key, last_place = place;
    }
    return 0;
}

static int take_step(rank_state *s, const step *p)
{
    const program *g = s->y.g;
    dtrain_comm *comm = s->comms[p->comm];
    if (!comm) return 0;
    switch (p->what) {
    case BARRIER: return judge_bare(s, comm, dtrain_barrier(comm));
    case SPLIT: {
        dtrain_comm *made = NULL;
        const dtrain_result result = dtrain_comm_split(
            comm, color_of(g, p, s->rank), (int)(draw(g, KEY, s->rank, p->id) % 5), &made);
        if (result != DTRAIN_OK) return judge_bare(s, comm, result);
        const int ended = verify_split(s, p, comm, made);
        if (s->comms[p->made]) dtrain_comm_destroy(made); /* made twice */
        else s->comms[p->made] = made;
        if (ended) s->y.r->outcome[s->rank] = INCORRECT;
        return ended;
    }
    case DESTROY: {
        const int ended = close_calls(s, comm, draw(g, PICK, s->rank, p->id));
        if (ended) return ended;
        dtrain_comm_destroy(comm);
        s->comms[p->comm] = NULL;
        return 0;
    }
    case MESSAGE: {
        const int me = dtrain_comm_rank(comm), size = dtrain_comm_size(comm);
        if (p->call.root % size == p->to % size) return 0;
        if (me != p->call.root % size && me != p->to % size) return 0;
        return make_call_step(s, p, comm);
    }
    default: return make_call_step(s, p, comm);
    }
}

/* ---- The deviating rank ---------------------------------------------------------------------------*/

static dtrain_dtype other_dtype(dtrain_dtype dtype)
{
    if (is_integer(dtype)) return dtype == DTRAIN_DTYPE_I32 ? DTRAIN_DTYPE_I64 : DTRAIN_DTYPE_I32;
    return (dtrain_dtype)((dtype + 1) % 3);
}

/* The odd call in place of a step; every kind of step has one for each kind of oddity. */
static step odd_step(const program *g, const step *p)
{
    step odd = *p;
    call *c = &odd.call;
    const int size = group_size(g, p->comm, g->who);
    const bool rooted =
        p->what == CALL && size > 1 &&
        (c->kind == DTRAIN_COLLECTIVE_BROADCAST || c->kind == DTRAIN_COLLECTIVE_REDUCE);
    if (p->what == SPLIT) odd.what = BARRIER;
    else if (p->what == BARRIER) {
        odd.what = CALL;
        *c = make_call(DTRAIN_COLLECTIVE_ALL_REDUCE, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, 5, 0);
    } else if (g->how == OTHER_CALL && p->what == CALL) odd.what = BARRIER;
    else if (g->how == OTHER_OP && p->what == CALL && has_op(c->kind))
        c->op = c->op == DTRAIN_REDUCE_SUM ? DTRAIN_REDUCE_MAX : DTRAIN_REDUCE_SUM;
    else if (g->how == OTHER_ROOT && rooted) c->root = (c->root % size + 1) % size;
    else if (g->how == OTHER_DTYPE || g->how == OTHER_OP) c->dtype = other_dtype(c->dtype);
    else c->count = c->count ? c->count - 1 : 3;
    return odd;
}

/* Deviates in a step; returns what take_step does. *over: the step needs not be taken any more. */
static int deviate(rank_state *s, const step *p, bool *over)
{
    const program *g = s->y.g;
    float x[4] = {0};
    *over = true;
    switch (g->how) {
    case NONE:
    case DEVIATIONS: *over = false; return 0;
    case MISSING: return 0;
    case TWICE: *over = false; return take_step(s, p);
    case WRONG:
        *over = p->what != DESTROY;
        if (!*over || !s->comms[p->comm]) return 0;
        return judge_bare(s, s->comms[p->comm],
                          dtrain_broadcast(s->comms[p->comm], x, 4, DTRAIN_DTYPE_F32, 99, NULL));
    case DIES: kill(getpid(), SIGKILL); return 0;
    case LEAVES:
    case GIVES_UP: s->y.r->outcome[s->rank] = ENDED; return -1;
    case STOPS: raise(SIGSTOP); break;
    case LINGERS: { /* until all that need it have given up */
        int32_t others = 0;
        for (int r = 0; r < g->ranks; r++) others += r != g->who && needs(g, r);
        ranks_await(&s->y.r->failures, others);
        break;
    }
    default: {
        const step odd = odd_step(g, p);
        return take_step(s, &odd);
    }
    }
    *over = false;
    return 0;
}

/* A rank that is a process stands still now and then, at any place inside a wait or outside: ranks that are merely slow
 * must not be taken for ranks that wait for each other. */
static uint64_t stall_state;
static void stall(int number)
{
    struct itimerval next = {{0, 0}, {0, 1 + (long)ranks_random(&stall_state, 2000)}};
    (void)number;
    ranks_sleep_us((long)ranks_random(&stall_state, ranks_random(&stall_state, 4) ? 200 : 3000));
    setitimer(ITIMER_REAL, &next, NULL);
}
static void stall_often(uint64_t seed)
{
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = stall;
    action.sa_flags = SA_RESTART;
    sigaction(SIGALRM, &action, NULL);
    stall_state = seed;
    stall(SIGALRM);
}

static int rank_main(dtrain_world *world, void *user)
{
    rank_state *s = (rank_state *)calloc(1, sizeof *s);
    int ended = 0;
    s->y = *(const play *)user;
    s->rank = dtrain_world_rank(world);
    s->comms[0] = dtrain_world_comm(world);
    const program *g = s->y.g;
    if (g->seed % 4) world->long_wait_ns = 0; /* circles are looked for at every poll */
    if (g->seed % 4 > 1 && g->mode == DTRAIN_LAUNCH_PROCESSES)
        stall_often(g->seed * 64 + (uint64_t)s->rank);
    for (int i = 0; i < g->count && !ended; i++) {
        const step *p = &g->steps[i];
        bool over = false;
        if (one_in(g, g->late, LATE, s->rank, p->id))
            ranks_sleep_us((long)(draw(g, LATE, s->rank, p->id) >> 8) & 2047);
        if (s->rank == g->who && p->id == g->when) ended = deviate(s, p, &over);
        if (!ended && !over) ended = take_step(s, p);
        if (!ended && s->open_count && one_in(g, g->tests, TEST, s->rank, p->id)) {
            bool done;
            open_call *o = s->open[draw(g, PICK, s->rank, p->id) % (uint64_t)s->open_count];
            (void)dtrain_work_test(o->f.work, &done); /* an error is told again by wait */
        }
        if (!ended && s->open_count && one_in(g, g->waits, WAIT, s->rank, p->id))
            ended = wait_for_open(s, (int)(draw(g, PICK, s->rank, p->id) >> 8 & 0xffff) %
                                         s->open_count);
    }
    if (ended < 0) { /* leaves, or gives up, with whatever is open */
        free(s);
        return g->how == LEAVES ? 0 : 3;
    }
    if (!ended) ended = close_calls(s, NULL, draw(g, PICK, s->rank, MOST_STEPS));
    for (int k = 1; k < MOST_COMMS && !ended; k++) dtrain_comm_destroy(s->comms[k]);
    if (!ended) s->y.r->outcome[s->rank] = FINISHED;
    free(s);
    return ended;
}

/* ---- What must come out ---------------------------------------------------------------------------*/

/* "rank 3" with no digit behind it, and not as the speaker. */
static bool names_rank(const char *text, int rank)
{
    char wanted[32];
    const int length = snprintf(wanted, sizeof wanted, "rank %d", rank);
    for (const char *at = strstr(text, wanted); at; at = strstr(at + 1, wanted))
        if (!(at == text && at[length] == ':') && (at[length] < '0' || at[length] > '9'))
            return true;
    return false;
}

static bool has_splits(const program *g)
{
    for (int i = 0; i < g->count; i++)
        if (g->steps[i].what == SPLIT) return true;
    return false;
}

/* Whether the deviation can be noticed at all: by others, or for a wrong argument by the rank itself. */
static bool matters(const program *g)
{
    const int place = place_of(g, g->when);
    if (g->how == NONE || place < 0) return false;
    const step *p = &g->steps[place];
    const int size = group_size(g, p->comm, g->who);
    if (g->how >= DIES) return true;
    if (p->what == DESTROY || size == 0) return false;
    return g->how == WRONG || size > 1;
}

static bool must_fail(const program *g, int rank)
{
    const step *p = &g->steps[place_of(g, g->when)];
    const bool group = p->what != MESSAGE && together(g, p->comm, rank, g->who);
    if (g->how == WRONG && rank == g->who) return true;
    if (g->how == TWICE) return group && rank == g->who;
    if (g->how == MISSING) return group && rank != g->who;
    if (g->how >= DIES) return rank != g->who && needs(g, rank);
    return group;
}

static bool may_say(const program *g, int rank, dtrain_result code)
{
    const bool message = g->steps[place_of(g, g->when)].what == MESSAGE;
    switch (code) {
    case DTRAIN_ERROR_PEER: return g->how != WRONG || rank != g->who;
    case DTRAIN_ERROR_MISMATCH: return g->how <= TWICE;
    case DTRAIN_ERROR_TIMEOUT: return g->how == STOPS || g->how == LINGERS || message;
    case DTRAIN_ERROR_ARGUMENT: return g->how == WRONG && rank == g->who;
    default: return false;
    }
}

/* Says in *text what is wrong with a rank's end; false: nothing. */
static bool rank_is_wrong(const program *g, const report *r, int rank, char *text, size_t room)
{
    const outcome end = (outcome)r->outcome[rank];
    const dtrain_result code = (dtrain_result)r->code[rank];
    const char *said = r->text[rank];
    const bool single = !has_splits(g);
    *text = 0;
    if (end == INCORRECT) snprintf(text, room, "a result is wrong");
    else if (!matters(g)) {
        if (end != FINISHED)
            snprintf(text, room, "%s: %s", end == FAILED ? "an error" : "it did not end", said);
    } else if (rank == g->who && (g->how == DIES || g->how == STOPS)) return false;
    else if (end == UNTOLD) snprintf(text, room, "it did not return");
    else if (end == FINISHED && must_fail(g, rank)) snprintf(text, room, "it heard nothing");
    else if (end != FAILED) return false;
    else if (!may_say(g, rank, code))
        snprintf(text, room, "unexpected %s: %s", dtrain_result_text(code), said);
    else if (!strstr(said, "rank ")) snprintf(text, room, "no rank is named: %s", said);
    else if (code == DTRAIN_ERROR_MISMATCH && g->how < MISSING && !names_rank(said, g->who))
        snprintf(text, room, "the odd rank %d is not named: %s", g->who, said);
    else if (single && g->how >= WRONG && g->how != STOPS && g->how != LINGERS && rank != g->who &&
             !names_rank(said, g->who))
        snprintf(text, room, "rank %d is not named: %s", g->who, said);
    return *text != 0;
}

/* Says in *text what is wrong with all of them together. */
static bool world_is_wrong(const program *g, const report *r, char *text, size_t room)
{
    int failed = 0, mismatches = 0, timeouts = 0;
    *text = 0;
    for (int rank = 0; rank < g->ranks; rank++) {
        failed += r->outcome[rank] == FAILED;
        mismatches += r->outcome[rank] == FAILED && r->code[rank] == DTRAIN_ERROR_MISMATCH;
        timeouts += r->outcome[rank] == FAILED && r->code[rank] == DTRAIN_ERROR_TIMEOUT;
    }
    if (!matters(g)) {
        if (r->launched != DTRAIN_OK) snprintf(text, room, "dtrain_launch failed");
        return *text != 0;
    }
    const bool message = g->steps[place_of(g, g->when)].what == MESSAGE;
    const bool fails = failed || g->how == DIES || g->how == GIVES_UP;
    if ((r->launched == DTRAIN_OK) == fails)
        snprintf(text, room, "%d ranks failed, and dtrain_launch says %s", failed,
                 dtrain_result_text((dtrain_result)r->launched));
    else if (g->how < MISSING && !message && !mismatches)
        snprintf(text, room, "no rank says that calls differ");
    else if (g->how < MISSING && !message && !has_splits(g) && mismatches != g->ranks)
        snprintf(text, room, "%d of %d ranks say that calls differ", mismatches, g->ranks);
    else if ((g->how == STOPS || g->how == LINGERS) && !timeouts)
        snprintf(text, room, "no rank says that a deadline passed");
    else if ((g->how == DIES || g->how == GIVES_UP) && r->first_failed != g->who)
        snprintf(text, room, "rank %d failed first, not rank %d", (int)r->first_failed, g->who);
    return *text != 0;
}

/* ---- A program from its seed ----------------------------------------------------------------------*/

static uint64_t pick(uint64_t *state, uint64_t limit)
{
    *state = ranks_mix(*state);
    return (*state >> 16) % limit;
}
static uint64_t rate(uint64_t *state)
{
    static const uint64_t rates[] = {0, 0, 1, 2, 3, 6};
    return rates[pick(state, 6)];
}

static size_t draw_count(uint64_t *state)
{
    static const uint64_t limits[] = {2, 8, 100, 1100, 5000, MOST_COUNT + 1};
    return (size_t)pick(state, limits[pick(state, 6)]);
}

static program generate(uint64_t seed)
{
    program g;
    uint64_t state = ranks_mix(seed);
    int alive[MOST_COMMS] = {1}, made = 1;
    memset(&g, 0, sizeof g);
    g.seed = seed;
    g.ranks = 1 + (int)pick(&state, pick(&state, 4) ? 4 : MOST_RANKS);
    g.mode = pick(&state, 2) ? DTRAIN_LAUNCH_PROCESSES : DTRAIN_LAUNCH_THREADS;
    g.late = rate(&state), g.async = rate(&state), g.tests = rate(&state), g.waits = rate(&state);
    g.alike = pick(&state, 3) == 0;
    if (pick(&state, 8) == 0 && g.ranks > 1) g.node_ranks = g.ranks % 2 ? 1 : g.ranks / 2;
    const bool splits = pick(&state, 2), messages = g.ranks > 1 && pick(&state, 2);
    const int wanted = 1 + (int)pick(&state, MOST_STEPS);
    while (g.count < wanted) {
        step *p = &g.steps[g.count];
        const uint64_t what = pick(&state, 20);
        p->id = (uint32_t)g.count;
        do p->comm = (int)pick(&state, (uint64_t)made);
        while (!alive[p->comm]);
        p->what = what < 2                                  ? BARRIER
                  : what < 5 && splits && made < MOST_COMMS ? SPLIT
                  : what < 6 && p->comm                     ? DESTROY
                  : what < 11 && messages                   ? MESSAGE
                                                            : CALL;
        p->call = make_call(kinds[pick(&state, KINDS)], dtypes[pick(&state, 5)],
                            ops[pick(&state, 5)], draw_count(&state), 0);
        p->call.root = (int)pick(&state, 8 * 7 * 15); /* any remainder for 1 to 8 ranks */
        p->to = p->call.root + 1 + (int)pick(&state, 7);
        if (is_integer(p->call.dtype) && p->call.op == DTRAIN_REDUCE_MEAN)
            p->call.op = DTRAIN_REDUCE_MAX;
        if (p->what == SPLIT) p->made = made, alive[made++] = 1;
        if (p->what == DESTROY) alive[p->comm] = 0;
        g.count++;
    }
    g.who = (int)pick(&state, (uint64_t)g.ranks);
    g.when = (uint32_t)pick(&state, (uint64_t)g.count);
    g.how = pick(&state, 3) ? (deviation)(1 + pick(&state, DEVIATIONS - 1)) : NONE;
    if (g.mode == DTRAIN_LAUNCH_THREADS && g.how == DIES) g.how = GIVES_UP;
    if (g.mode == DTRAIN_LAUNCH_THREADS && g.how == STOPS) g.how = LINGERS;
    /* deadlines pass slowly: fewer of those */
    if ((g.how == STOPS || g.how == LINGERS) && (pick(&state, 3) || !anybody_needs(&g)))
        g.how = NONE;
    if (is_ambiguous(&g)) g.how = NONE;
    return g;
}

static void print_program(const program *g)
{
    static const char *const whats[] = {"", "barrier", "message", "split", "destroy"};
    static const char *const names[] = {
        "", "all-reduce", "reduce-scatter", "all-gather", "broadcast", "reduce", "", "",
        "", "",           "all-to-all"};
    printf("  seed %llu%s: %d ranks (%s), emulated nodes of %d; one in: late %llu, async %llu, "
           "tests %llu, "
           "waits %llu%s\n",
           (unsigned long long)g->seed, g->note, g->ranks, ranks_mode_name(g->mode), g->node_ranks,
           (unsigned long long)g->late, (unsigned long long)g->async, (unsigned long long)g->tests,
           (unsigned long long)g->waits, g->alike ? "; memory alike" : "");
    for (int i = 0; i < g->count; i++) {
        const step *p = &g->steps[i];
        printf("  %2u: comm %d: %s%s", p->id, p->comm, whats[p->what],
               p->what == CALL ? names[p->call.kind] : "");
        if (p->what == SPLIT) {
            printf(" makes %d, colors", p->made);
            for (int r = 0; r < g->ranks; r++) printf(" %d", color_of(g, p, r));
        }
        if (p->what == CALL || p->what == MESSAGE)
            printf(" %s op %d count %zu root %d", dtrain_dtype_name(p->call.dtype), (int)p->call.op,
                   p->call.count, p->call.root);
        if (p->what == MESSAGE) printf(" to %d", p->to);
        if (g->how && p->id == g->when) printf("   <- rank %d: %s", g->who, deviations[g->how]);
        printf("\n");
    }
}

/* ---- Running --------------------------------------------------------------------------------------*/

static void say_nothing(void *user, dtrain_log_level level, int rank, const char *line)
{
    (void)user, (void)level, (void)rank, (void)line;
}

/* True if the program ends as it must; otherwise *text says why not. quiet: failed comparisons are not printed. */
static bool passes(const program *g, bool quiet, char *text, size_t room)
{
    play y = {g, (report *)ranks_shared(sizeof(report))};
    const long before = quiet ? 1000 : 0;
    test_shared->failed_checks = before;
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        dtrain_launch_desc desc = ranks_desc(g->ranks, g->mode);
        dtrain_launch_info info;
        setpgid(0, 0);
        desc.timeout_ms =
            g->how == STOPS || g->how == LINGERS || (has_splits(g) && matters(g)) ? 1500 : 15000;
        desc.grace_ms =
            g->how == STOPS ? 3000 : 20000; /* who is stopped must be killed; the others end */
        desc.options.log = say_nothing;
        if (g->node_ranks) emulate_links(&desc, g->node_ranks, 10, 5);
        alarm(60);
        y.r->launched = (int32_t)dtrain_launch(&desc, rank_main, &y, &info);
        y.r->first_failed = info.first_failed_rank;
        y.r->signal = info.signal;
        _exit(0);
    }
    int status = 0;
    setpgid(child, child);
    waitpid(child, &status, 0);
    const bool left = test_sweep(child) != 0;
    bool good = false;
    if (status != 0) snprintf(text, room, "the launcher ended with status %x", (unsigned)status);
    else if (left) snprintf(text, room, "processes are left");
    else if (test_shared->failed_checks != before) snprintf(text, room, "a comparison failed");
    else {
        char why[900];
        good = true;
        for (int r = 0; r < g->ranks && good; r++)
            if (rank_is_wrong(g, y.r, r, why, sizeof why)) {
                snprintf(text, room, "rank %d: %s", r, why);
                good = false;
            }
        if (good) good = !world_is_wrong(g, y.r, text, room);
    }
    munmap(y.r, sizeof(report));
    return good;
}

/* What fails now and then must fail once in three runs to count as the same failure. */
static bool still_fails(const program *g)
{
    char text[1000];
    for (int i = 0; i < 3; i++)
        if (!passes(g, true, text, sizeof text)) return true;
    return false;
}

static void drop(program *g, int place)
{
    memmove(&g->steps[place], &g->steps[place + 1],
            (size_t)(--g->count - place) * sizeof *g->steps);
    memset(&g->steps[g->count], 0, sizeof *g->steps);
}

/* Takes away what the failure does not need: a change that still fails is kept. */
static void shrink(program *g)
{
    bool smaller = true;
    while (smaller) {
        smaller = false;
        for (int change = 0; change < 8 + 2 * MOST_STEPS; change++) {
            program next = *g;
            const int place = (change - 8) / 2;
            switch (change) {
            case 0:
                next.ranks =
                    next.ranks > 2 && next.who < next.ranks - 1 ? next.ranks - 1 : next.ranks;
                break;
            case 1:
                next.mode =
                    next.how == DIES || next.how == STOPS ? next.mode : DTRAIN_LAUNCH_THREADS;
                break;
            case 2: next.late = 0; break;
            case 3: next.tests = 0; break;
            case 4: next.waits = 0; break;
            case 5: next.async = 0; break;
            case 6: next.node_ranks = 0; break;
            case 7: next.alike = true; break;
            default:
                if (place >= next.count) continue;
                if (change % 2)
                    next.steps[place].call.count = next.steps[place].call.count > 3 ? 3 : 1;
                else if (next.steps[place].id != next.when || !next.how) drop(&next, place);
            }
            if (next.node_ranks) next.node_ranks = next.ranks % 2 ? 1 : next.ranks / 2;
            if (memcmp(&next, g, sizeof next) == 0 || next.count == 0) continue;
            if (is_ambiguous(&next) ||
                ((next.how == STOPS || next.how == LINGERS) && !anybody_needs(&next)))
                continue;
            if (!still_fails(&next)) continue;
            *g = next;
            snprintf(g->note, sizeof g->note, ", smaller");
            smaller = true;
        }
    }
}

static const uint64_t failed_once[] = {
    887384637, /* the test looked at a split that it had destroyed */
};

static bool run_seed(uint64_t seed, bool words)
{
    program g = generate(seed);
    char text[1000];
    if (words) print_program(&g);
    if (passes(&g, false, text, sizeof text)) return true;
    printf("  FAIL seed %llu: %s\n", (unsigned long long)seed, text);
    if (!words) print_program(&g);
    shrink(&g);
    if (g.note[0]) {
        print_program(&g);
        if (!passes(&g, false, text, sizeof text)) printf("  %s\n", text);
    }
    printf("  again: build/tests/test_calls --seed %llu\n", (unsigned long long)seed);
    return false;
}

int main(int argc, char **argv)
{
    const seeds s = seeds_of(argc, argv, 150, 10);
    test_begin(1, argv);
    for (uint32_t i = 0; i < 65536; i++) half_values[i] = slow_half_value(i);
    return seeds_run(&s, failed_once, sizeof failed_once / sizeof *failed_once, run_seed);
}
