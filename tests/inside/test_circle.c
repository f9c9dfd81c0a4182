/* test_circle.c: who is said to wait in a circle (src/comm/circle.c), and who is not.
 *
 *     build/tests/test_circle                    states made by hand, then 3000 random programs
 *     build/tests/test_circle --count 100000     so many random programs
 *     build/tests/test_circle --seed 77          this one
 *
 * A random program runs on up to 6 ranks that are simulated in this process: one step of one rank after the other, each
 * drawn. Collectives of overlapping communicators, messages that wait for their receiver or do not, and all-gathers of
 * the world are waited for at once or later; some ranks make their calls in another order, leave one out or make one
 * more, and every rank is slow at times. Ranks look for circles at any moment, and other ranks take steps in the middle
 * of that. What the transport does may reach another rank late, within its grace.
 *
 * Oracle: a rank that finds a circle stays in its wait, and the program continues. A wait that then ends was accused
 * falsely. When nothing moves any more, the ranks that found one are exactly the ranks in circles of a
 * graph of who has not started what, and the circles are shortest ones. */
#include "comm/engine_internal.h"
#include "world/world_internal.h"
#include "test.h"

#include "dtrain.h"
#include "seeds.h"

enum { RANKS = 6, COMMS = 4, OPS = 14, MOST = 64, CAPACITY = 2, PARTS = 512, TURN_NS = 64 };
enum { COLLECTIVE, MESSAGE, GATHER };
enum { START, WAIT, DESTROY };

/* One operation of the program, before ranks deviate from it. */
typedef struct operation {
    int what, comm, from, to;
    int parts;       /* of a message: the sender must come back for those that find no room */
    bool rendezvous; /* ... which waits until its receiver has them */
} operation;

/* Parts of messages from one rank to another in a communicator. */
typedef struct channel {
    int sent, taken;
    int64_t arrives[PARTS],
        heard[PARTS]; /* when the receiver sees it; when the sender hears of that */
} channel;

typedef struct simulated {
    dtrain_world world;
    dtrain__engine comms[COMMS];
    dtrain__work works[MOST];
    int works_used, of[MOST]; /* of: the operation */
    int moved[MOST],
        last[MOST]; /* of a message: its parts so far; the last one's number in the channel */

    int64_t due[MOST]; /* of a collective that all ranks have started: when its data has moved */

    int act[MOST], on[MOST], length,
        at; /* the rank's program; on: an operation, or a communicator */
    bool waits, busy;
    int64_t sleeps_until;
    uint64_t gathers;
    dtrain__work *waited; /* NULL: the all-gather */
    dtrain__wait wait;
    bool accused;
    int circle; /* its length, as found last; 0: none */
} simulated;

typedef struct simulation {
    uint64_t state;
    int ranks, depth;
    int64_t now, late; /* late: the most that the transport takes */
    bool
        has_grace; /* what is late is within the grace; else the transport knows what is under way */
    bool
        destroys; /* communicators; else this rank can hear of other ranks' calls after the grace */
    bool ends;    /* a rank ends after an error */
    int64_t fails[COMMS]; /* when a communicator fails on all ranks */
    bool failed;          /* one has: ranks find a circle, or hear of the failure before */
    int members[COMMS][RANKS], size[COMMS];
    int64_t shown[COMMS][MOST][RANKS]; /* when a rank's call is heard; 0: it has not made it */
    channel channels[COMMS][RANKS][RANKS];
    operation ops[OPS];
    int op_count;
    simulated *rank; /* (RANKS) */
    dtrain__control *page;
    char why[400];
} simulation;

static simulation *sim;

static int draw(int below)
{
    sim->state = sim->state * 6364136223846793005u + 1442695040888963407u;
    return (int)((sim->state >> 33) % (uint64_t)below);
}

static int64_t delay(void) { return !sim->late || draw(2) ? sim->late : draw((int)sim->late); }

static void wrong(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    if (!sim->why[0]) vsnprintf(sim->why, sizeof sim->why, format, args);
    va_end(args);
}

/* ---- The transport and the engine of a simulated rank ---- */

static void step_rank(simulated *r);

/* Other ranks take steps while this one is in the middle of a look. */
static void interrupt(void)
{
    if (sim->depth > 2 || draw(2)) return;
    sim->depth++;
    sim->now += draw(2);
    for (int k = draw(5) ? draw(6) : draw(60); k > 0; k--) {
        simulated *r = &sim->rank[draw(sim->ranks)];
        if (!r->busy) step_rank(r);
    }
    sim->depth--;
}

static const dtrain_call *heard(const dtrain_comm *comm, uint64_t sequence, int rank)
{
    static const dtrain_call nothing;
    const int64_t when = sim->shown[comm->number][sequence][comm->world_ranks[rank]];
    return when && when <= sim->now ? &nothing : NULL;
}

static channel *channel_of(const dtrain_comm *comm, const dtrain_transport_work *work)
{
    const int own = comm->world->rank, peer = comm->world_ranks[work->what.root];
    const bool sends = work->what.kind == DTRAIN_COLLECTIVE_SEND;
    return &sim->channels[comm->number][sends ? own : peer][sends ? peer : own];
}

/* A transport with a grace does not know; the other one knows what is under way. */
static bool lags(const dtrain_comm *comm, const dtrain_transport_work *work, int rank)
{
    (void)rank;
    const channel *c = channel_of(comm, work);
    return sim->has_grace || work->what.kind == DTRAIN_COLLECTIVE_SEND || c->taken == c->sent;
}

static bool message_moves(const dtrain__engine *comm, dtrain__work *work)
{
    simulated *r = &sim->rank[comm->base.world->rank];
    const size_t i = (size_t)(work - r->works);
    channel *c = channel_of(&comm->base, &work->op);
    int *moved = &r->moved[i];
    const int parts = sim->ops[r->of[i]].parts;
    if (work->op.what.kind == DTRAIN_COLLECTIVE_RECV) {
        for (; *moved < parts; ++*moved) {
            if (c->taken == c->sent || c->arrives[c->taken] > sim->now) return false;
            c->heard[c->taken++] = sim->now + (sim->has_grace ? delay() : 0);
        }
        return true;
    }
    for (; *moved < parts; ++*moved) {
        if (c->sent - c->taken >= CAPACITY) return false;
        c->arrives[c->sent] = sim->now + delay();
        r->last[i] = c->sent++;
    }
    if (!sim->ops[r->of[i]].rendezvous) return true;
    return r->last[i] < c->taken && c->heard[r->last[i]] <= sim->now;
}

static dtrain__engine *engine_of(const dtrain__work *work)
{
    return (dtrain__engine *)(void *)((char *)work->op.base.comm - offsetof(dtrain__engine, base));
}

/* Move what can be moved, in the order of the queue; messages of one pair and direction do not overtake. */
static void move_all(dtrain__engine *comm)
{
    simulated *r = &sim->rank[comm->base.world->rank];
    bool stuck = false, blocked[2][RANKS] = {{false}};
    comm->failed = sim->now >= sim->fails[comm->base.number];
    if (comm->failed) return;
    for (dtrain__work *work = comm->queue; work; work = work->next) {
        bool *order =
            work->op.sequence
                ? &stuck
                : &blocked[work->op.what.kind == DTRAIN_COLLECTIVE_SEND][work->op.what.root];
        bool done = !*order;
        for (int i = 0; work->op.sequence && i < comm->base.size; i++)
            done = done && heard(&comm->base, work->op.sequence, i);
        if (done && !work->op.sequence) done = message_moves(comm, work);
        int64_t *due = &r->due[work - r->works];
        if (done && work->op.sequence && !*due) *due = sim->now + (draw(3) ? 0 : draw(100));
        if (done && work->op.sequence) done = *due <= sim->now;
        work->done = done;
        if (!done) *order = true;
    }
    dtrain__work **link = &comm->queue;
    while (*link)
        if ((*link)->done) *link = (*link)->next;
        else link = &(*link)->next;
    comm->queue_end = link;
}

void dtrain__engine_advance(dtrain__engine *comm)
{
    interrupt();
    move_all(comm);
    interrupt();
}

void dtrain__describe(const dtrain_call *shown, uint64_t sequence, char *text, size_t room)
{
    (void)shown;
    snprintf(text, room, "call %d", (int)sequence);
}

static dtrain_transport_ops transport;

/* ---- Who waits for whom ---- */

/* Say whether rank b has not started its side of what rank a waits for. */
static bool misses(int a, int b)
{
    const simulated *x = &sim->rank[a], *y = &sim->rank[b];
    if (a == b || !x->waits) return false;
    if (!x->waited) return y->gathers < x->gathers;
    const dtrain__engine *comm = engine_of(x->waited);
    if (!x->waited->op.sequence) return comm->base.world_ranks[x->waited->op.what.root] == b;
    for (int i = 0; i < comm->base.size; i++)
        if (comm->base.world_ranks[i] == b)
            return !sim->shown[comm->base.number][x->waited->op.sequence][b];
    return false;
}

/* Return the length of the shortest circle of waits that rank a is in; 0: it is in none. */
static int circle_of(int a)
{
    int far[RANKS] = {0}, found = 0;
    for (int length = 1; length <= sim->ranks && !found; length++)
        for (int x = 0; x < sim->ranks; x++)
            for (int y = 0; y < sim->ranks && (length == 1 ? x == a : far[x] == length - 1); y++) {
                if (!misses(x, y)) continue;
                if (y == a) found = length;
                else if (!far[y]) far[y] = length;
            }
    return found;
}

static bool has_failed(const simulated *r) { return r->waited && engine_of(r->waited)->failed; }

/* Read the error sentence: each rank of the circle waits for the next one. */
static void read_circle(simulated *r)
{
    const char *text = dtrain_last_error(), *more = strstr(text, "; ... ");
    int a, b, before = -1, named = 0;
    for (const char *at = strstr(text, "rank "); at; at = strstr(at + 1, "rank ")) {
        if (sscanf(at, "rank %d waits for rank %d in ", &a, &b) != 2) continue;
        if (!misses(a, b)) wrong("rank %d does not wait for rank %d: %s", a, b, text);
        if (strncmp(strstr(at, " in ") + 4, sim->page->long_waits[a].text,
                    strlen(sim->page->long_waits[a].text)) != 0)
            wrong("rank %d waits in \"%s\": %s", a, sim->page->long_waits[a].text, text);
        if (before >= 0 && before != a) wrong("no chain: %s", text);
        if (!named++ && a != r->world.rank)
            wrong("rank %d's own wait is not first: %s", r->world.rank, text);
        before = b;
    }
    r->circle = named + (more ? atoi(more + 6) : 0);
    r->accused = true;
    if (!more && before != r->world.rank) wrong("it does not close: %s", text);
}

/* ---- A rank ---- */

static void start(simulated *r, int number)
{
    const operation *o = &sim->ops[number];
    dtrain__engine *comm = &r->comms[o->comm];
    if (sim->now >= sim->fails[o->comm]) {
        if (sim->ends) r->at = r->length; /* refused */
        return;
    }
    const int i = r->works_used++, own = r->world.rank;
    dtrain__work *work = &r->works[i];
    r->of[i] = number;

    work->op.base.comm = &comm->base;
    work->op.what.kind = DTRAIN_COLLECTIVE_BARRIER;
    if (o->what == COLLECTIVE) {
        work->op.sequence = ++comm->sequence;
        sim->shown[o->comm][work->op.sequence][own] =
            sim->now + (sim->has_grace ? delay() * (sim->destroys ? 1 : 10) : 0);
    } else {
        work->op.what.kind = o->from == own ? DTRAIN_COLLECTIVE_SEND : DTRAIN_COLLECTIVE_RECV;
        for (int k = 0; k < comm->base.size; k++)
            if (comm->base.world_ranks[k] == (o->from == own ? o->to : o->from))
                work->op.what.root = k;
    }
    *comm->queue_end = work;
    comm->queue_end = &work->next;
    move_all(comm);
}

static void end_wait(simulated *r)
{
    if (r->accused) wrong("rank %d was told of a circle, and its wait ended", r->world.rank);
    if (r->wait.number) dtrain__store(&sim->page->long_waits[r->world.rank].number, (uint64_t)0);
    r->waits = r->accused = false;
    r->waited = NULL;
}

static void destroy(simulated *r, int c)
{
    for (dtrain__engine **link = &r->world.comms; *link; link = &(*link)->next)
        if (*link == &r->comms[c]) {
            *link = (*link)->next;
            return;
        }
}

/* What this rank has confirmed is true: of waits that are not over, the other one has not started its side. */
static void check_facts(const simulated *r)
{
    for (int i = 0; i < sim->ranks; i++) {
        const uint64_t fact = sim->page->facts[i][r->world.rank];
        const uint64_t number = sim->page->long_waits[i].number;
        if (!(fact & 1) || !number || (fact >> 1 & 0x7fffffffu) != number) continue;
        if (fact >> 32 != r->wait.number ? !sim->failed : !misses(r->world.rank, i))
            wrong("rank %d has confirmed that wait %d needs rank %d", r->world.rank,
                  (int)(fact >> 32), i);
    }
}

/* Begin the next call of the program, or take a turn of a wait. */
static void step_rank(simulated *r)
{
    r->busy = true;
    if (!r->waits && r->at < r->length && sim->now >= r->sleeps_until) {
        const int act = r->act[r->at], on = r->on[r->at];
        r->at++;
        if (draw(40) == 0) r->sleeps_until = sim->now + draw(400); /* slow, in no circle */
        if (act == DESTROY) destroy(r, on);
        else if (act == START) start(r, on);
        else {
            memset(&r->wait, 0, sizeof r->wait);
            r->waits = true;
            if (sim->ops[on].what == GATHER) r->world.gather_count = ++r->gathers;
            for (int i = r->works_used; i-- > 0 && !r->waited;)
                if (r->of[i] == on && sim->ops[on].what != GATHER) r->waited = &r->works[i];
            if (sim->ops[on].what != GATHER && !r->waited) r->waits = false;
        }
    } else if (r->waits) {
        for (int c = 0; c < COMMS && draw(4); c++)
            if (sim->size[c]) move_all(&r->comms[c]);
        bool done = r->waited ? r->waited->done : true;
        for (int i = 0; i < sim->ranks && !r->waited; i++)
            done = done && sim->rank[i].gathers >= r->gathers;
        r->wait.last_ns = (uint64_t)sim->now * TURN_NS;
        r->wait.waited_ns += 64 * TURN_NS;
        if (!done && has_failed(r)) {
            /* an error: the rank ends, or continues without this communicator, which breaks its circles */
            sim->failed = true;
            for (int i = 0; i < sim->ranks; i++) sim->rank[i].accused = false;
            end_wait(r);
            if (sim->ends) r->at = r->length;
        } else if (done) end_wait(r);
        else if (draw(3)) {
            dtrain__engine *comm = r->waited ? engine_of(r->waited) : NULL;
            const uint64_t number = r->wait.number, looked = r->wait.looked_ns;
            if (dtrain__look_for_circle(&r->world, comm, r->waited, &r->wait) != DTRAIN_OK) {
                if (r->wait.number)
                    wrong("the others would not find the circle of rank %d", r->world.rank);
                r->wait.number = sim->page->long_waits[r->world.rank].number;
                read_circle(r);
            }
            if (number && number != r->wait.number) wrong("a wait gets a second number");
            if (r->wait.number && r->wait.waited_ns < r->world.long_wait_ns)
                wrong("a short wait is shown");
            if (looked != r->wait.looked_ns &&
                r->wait.last_ns - looked < r->world.long_wait_ns / 512)
                wrong("a rank looks too often");
            check_facts(r);
        }
    }
    r->busy = false;
}

/* ---- A program ---- */

static void add(simulated *r, int act, int on)
{
    r->act[r->length] = act;
    r->on[r->length++] = on;
}

static bool takes_part(int rank, const operation *o)
{
    if (o->what == GATHER) return true;
    if (o->what == MESSAGE) return rank == o->from || rank == o->to;
    for (int i = 0; i < sim->size[o->comm]; i++)
        if (sim->members[o->comm][i] == rank) return true;
    return false;
}

/* Write the program of a rank: waits may come later than starts; then make it another one than was agreed on. */
static void write_program(simulated *r, bool deviates)
{
    int open[OPS], count = 0;
    for (int o = 0; o < sim->op_count; o++) {
        if (!takes_part(r->world.rank, &sim->ops[o])) continue;
        const bool left_out = deviates && draw(8) == 0, twice = deviates && draw(10) == 0;
        for (int k = left_out ? 0 : twice ? 2 : 1; k > 0; k--) {
            if (sim->ops[o].what != GATHER) add(r, START, o);
            if (sim->ops[o].what != GATHER && draw(3) == 0 && !twice) open[count++] = o;
            else add(r, WAIT, o);
        }
        while (count && draw(2)) add(r, WAIT, open[--count]);
    }
    while (count) add(r, WAIT, open[--count]);
    for (int k = deviates ? draw(4) : 0; k > 0 && r->length > 1; k--) { /* another order */
        const int i = draw(r->length - 1);
        if (r->on[i] == r->on[i + 1]) continue;
        const int act = r->act[i], on = r->on[i];
        r->act[i] = r->act[i + 1], r->on[i] = r->on[i + 1];
        r->act[i + 1] = act, r->on[i + 1] = on;
    }
    for (int c = 1; c < COMMS; c++) { /* destroyed after its last use, or never */
        int last = -1;
        for (int i = 0; i < r->length; i++)
            if (r->act[i] != DESTROY && sim->ops[r->on[i]].what != GATHER &&
                sim->ops[r->on[i]].comm == c)
                last = i;
        if (last < 0 || draw(2) || !sim->destroys) continue;
        memmove(&r->act[last + 2], &r->act[last + 1],
                (size_t)(r->length - last - 1) * sizeof *r->act);
        memmove(&r->on[last + 2], &r->on[last + 1], (size_t)(r->length - last - 1) * sizeof *r->on);
        r->act[last + 1] = DESTROY, r->on[last + 1] = c;
        r->length++;
    }
}

static void make_ranks(void)
{
    for (int i = 0; i < sim->ranks; i++) {
        simulated *r = &sim->rank[i];
        r->world.rank = i;
        r->world.size = sim->ranks;
        r->world.control = sim->page;
        r->world.long_wait_ns =
            (uint64_t)draw(3) * 512 * TURN_NS; /* ranks look in every second turn */
        for (int c = COMMS; c-- > 0;) {
            dtrain__engine *comm = &r->comms[c];
            comm->base.world = &r->world;
            comm->base.size = sim->size[c];
            comm->base.world_ranks = sim->members[c];
            comm->base.number = c;
            comm->transport = &transport;
            comm->queue_end = &comm->queue;
            for (int k = 0; k < sim->size[c]; k++) {
                if (sim->members[c][k] != i) continue;
                comm->base.rank = k;
                comm->next = r->world.comms;
                r->world.comms = comm;
            }
        }
    }
}

static void make_program(uint64_t seed)
{
    sim->state = seed * 2654435761u + 12345;
    sim->ranks = 2 + draw(RANKS - 1);
    sim->late = draw(2) ? 0 : 1 + draw(20);
    sim->has_grace = draw(2);
    sim->destroys = draw(2);
    sim->ends = draw(2);
    transport.heard = heard;
    transport.lags = lags;
    transport.grace_ns = sim->has_grace ? (uint64_t)sim->late * TURN_NS : 0;
    for (int c = 0; c < COMMS; c++)
        for (int i = 0; i < sim->ranks; i++)
            if (!c || draw(2)) sim->members[c][sim->size[c]++] = i;
    for (int c = 0; c < COMMS; c++) sim->fails[c] = draw(20) ? INT64_MAX : draw(300);
    for (int c = 1; c < COMMS; c++)
        if (sim->size[c] < 2) sim->size[c] = 0;
    sim->op_count = 3 + draw(OPS - 3);
    for (int o = 0; o < sim->op_count; o++) {
        operation *x = &sim->ops[o];
        do x->comm = draw(COMMS);
        while (!sim->size[x->comm]);
        x->what = draw(8) == 0 ? GATHER : draw(2) ? MESSAGE : COLLECTIVE;
        x->rendezvous = draw(2);
        x->parts = draw(2) ? 1 : 1 + draw(5);
        const int n = sim->size[x->comm], from = draw(n);
        x->from = sim->members[x->comm][from];
        x->to = sim->members[x->comm][(from + 1 + draw(n - 1)) % n];
    }
    make_ranks();
    const bool deviates = draw(4) != 0;
    for (int i = 0; i < sim->ranks; i++) write_program(&sim->rank[i], deviates && draw(2));
}

static void clear(void)
{
    dtrain__control *page = sim->page;
    simulated *rank = sim->rank;
    memset(page->long_waits, 0, sizeof page->long_waits);
    memset(page->facts, 0, sizeof page->facts);
    memset(rank, 0, RANKS * sizeof *rank);
    memset(sim, 0, sizeof *sim);
    sim->page = page;
    sim->rank = rank;
    sim->now = 1;
}

static void make_simulation(void)
{
    sim = (simulation *)calloc(1, sizeof *sim);
    sim->page = (dtrain__control *)calloc(1, sizeof *sim->page);
    sim->rank = (simulated *)calloc(RANKS, sizeof *sim->rank);
    clear();
}

/* Continue until nothing has begun or ended for long; the time in between lets everything arrive. */
static void run_program(void)
{
    for (int still = 0; still < 60 * sim->ranks && !sim->why[0]; still++) {
        simulated *r = &sim->rank[draw(sim->ranks)];
        const int at = r->at;
        const bool waits = r->waits;
        sim->now += 1 + (still > 20 * sim->ranks ? 30 : 0);
        step_rank(r);
        for (int i = 0; i < sim->ranks; i++)
            if (!sim->rank[i].waits && sim->rank[i].at < sim->rank[i].length) still = 0;
        if (r->at != at || r->waits != waits) still = 0;
    }
}

static bool run_seed(uint64_t seed, bool words)
{
    int circles = 0, stuck = 0;

    if (!sim) make_simulation();
    clear();
    make_program(seed);
    run_program();
    for (int c = 0; c < COMMS; c++) sim->failed = sim->failed || sim->now >= sim->fails[c];
    for (int i = 0; i < sim->ranks; i++) {
        const int expected = circle_of(i), told = sim->rank[i].accused ? sim->rank[i].circle : 0;
        circles += told > 0;
        stuck += sim->rank[i].waits;
        if (expected != told && !sim->failed)
            wrong("rank %d is in a circle of %d, and was told of one of %d", i, expected, told);
    }
    if (sim->why[0] || words)
        printf("  %sseed %llu: %d ranks, %d operations, late by %d%s; %d ranks are stuck, %d in "
               "circles%s%s\n",
               sim->why[0] ? "FAIL " : "", (unsigned long long)seed, sim->ranks, sim->op_count,
               (int)sim->late, sim->has_grace ? " within the grace" : "", stuck, circles,
               sim->why[0] ? ": " : "", sim->why);
    return !sim->why[0];
}

int main(int argc, char **argv)
{
    const seeds s = seeds_of(argc, argv, 3000, 10);
    test_begin(1, argv);
    return seeds_run(&s, NULL, 0, run_seed);
}
