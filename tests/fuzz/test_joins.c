/* test_joins.c: random hosts and what joins them.
 *
 *     build/tests/test_joins                   a sample
 *     build/tests/test_joins --count 10000     so many
 *     build/tests/test_joins --seed 77         this one, in words
 *
 * A host has up to 8 ranks, which are threads of one or several processes. In each of a few rounds two drawn partitions
 * say which of them join a world together, in a drawn order; others join none. So a rank is in up to two worlds at
 * once, whose collectives it calls in turn. Members differ in their desc, in when they come, and in their buffers. One
 * member of a world may be set wrong, leave before the last collective, or die with its process.
 *
 * Oracle: sums of integers, computed by each rank from the drawn inputs of all members. Every member of a world with a
 * wrong member is refused; of a world that loses one, the others have the right results before, an error naming a rank
 * after, and can leave; all others do not notice. Each process has the same descriptors in the end as before. */
#include "test.h"

#include "dtrain.h"
#include "host.h"
#include "seeds.h"

enum { RANKS = 8, ROUNDS = 3, LAYERS = 2, OPS = 6, MANY = 60, COUNT = 40000 };
enum { RIGHT, WRONG, PARTS, DIES };

/* The world that a rank joins in a layer of a round: group -1: none. */
typedef struct seat {
    int group, rank;
} seat;

typedef struct plan {
    uint64_t seed;
    int ranks, rounds;
    int process[RANKS], processes;
    seat seats[ROUNDS][LAYERS][RANKS];
    int sizes[ROUNDS][LAYERS][RANKS];
    int deviant[ROUNDS], how[ROUNDS]; /* a host rank, in layer 0; RIGHT: none */
    int counts[ROUNDS][LAYERS][OPS], kinds[ROUNDS][LAYERS][OPS];
} plan;

typedef struct play {
    plan p;
    host_group *groups[ROUNDS][LAYERS][RANKS];
    host_group *everybody[ROUNDS + 1]; /* those that live in a round */
    char (*text)[400];                 /* of each host rank, in shared memory: what was wrong */
} play;

static bool lives(const plan *p, int round, int rank)
{
    for (int r = 0; r < round; r++)
        if (p->how[r] == DIES && p->process[p->deviant[r]] == p->process[rank]) return false;
    return true;
}

static void draw(plan *p, uint64_t seed)
{
    uint64_t at = seed * 2 + 1;
    memset(p, 0, sizeof *p);
    p->seed = seed;
    p->ranks = 2 + (int)ranks_random(&at, RANKS - 1);
    p->rounds = 1 + (int)ranks_random(&at, ROUNDS);
    const int most = 1 + (int)ranks_random(&at, (uint64_t)p->ranks);
    for (int i = 0; i < p->ranks; i++)
        p->process[i] = i < most ? i : (int)ranks_random(&at, (uint64_t)most);
    p->processes = most;
    for (int r = 0; r < p->rounds; r++) {
        for (int l = 0; l < LAYERS; l++) {
            const int groups = 1 + (int)ranks_random(&at, 3);
            int order[RANKS];
            for (int i = 0; i < p->ranks; i++) {
                const int k = (int)ranks_random(&at, (uint64_t)i + 1);
                order[i] = order[k];
                order[k] = i;
            }
            for (int i = 0; i < p->ranks; i++) {
                seat *s = &p->seats[r][l][order[i]];
                s->group = (int)ranks_random(&at, (uint64_t)groups + 1) - 1;
                if (!lives(p, r, order[i])) s->group = -1;
                if (s->group >= 0) s->rank = p->sizes[r][l][s->group]++;
            }
            for (int o = 0; o < OPS; o++) {
                p->counts[r][l][o] = (int)ranks_random(&at, o % 2 ? COUNT : 600);
                p->kinds[r][l][o] = (int)ranks_random(&at, 4);
            }
        }
        const int who = (int)ranks_random(&at, (uint64_t)p->ranks);
        const int how = (int)ranks_random(&at, 6);
        const seat *s = &p->seats[r][0][who];
        if (how > DIES || s->group < 0 || p->sizes[r][0][s->group] < 2) continue;
        p->deviant[r] = who;
        p->how[r] = how;
        if (how == WRONG) continue;
        bool alone = true; /* other threads of its process would die in the middle of a world */
        for (int i = 0; i < p->ranks; i++)
            alone = alone && (i == who || p->process[i] != p->process[who]);
        if (how == DIES && !alone) p->how[r] = RIGHT;
        else { /* in its other world members would wait for it that wait in this one */
            p->seats[r][1][who].group = -1;
            int again[RANKS] = {0};
            for (int i = 0; i < p->ranks; i++) {
                seat *t = &p->seats[r][1][i];
                if (t->group >= 0) t->rank = again[t->group]++;
            }
            memcpy(p->sizes[r][1], again, sizeof again);
        }
    }
}

static int32_t input(const plan *p, int round, int layer, int op, int rank, int i)
{
    return (int32_t)(ranks_mix(p->seed +
                               (uint64_t)(((round * LAYERS + layer) * OPS + op) * RANKS + rank)) %
                     1000) +
           i % 13 * (rank + 1);
}

/* One collective, and whether its result is right. */
static dtrain_result call(const plan *p, dtrain_world *world, int round, int layer, int op,
                          int32_t *send, int32_t *recv, bool *right)
{
    dtrain_comm *comm = dtrain_world_comm(world);
    const int n = dtrain_world_size(world), rank = dtrain_world_rank(world),
              kind = p->kinds[round][layer][op];
    const int count = p->counts[round][layer][op], root = (op + round) % n;
    dtrain_work *work = NULL, **later = op % 2 ? &work : NULL;
    dtrain_result result;
    *right = true;
    for (int i = 0; i < count; i++) send[i] = input(p, round, layer, op, rank, i);
    if (kind == 0)
        result = dtrain_all_reduce(comm, send, recv, (size_t)count, DTRAIN_DTYPE_I32,
                                   DTRAIN_REDUCE_SUM, later);
    else if (kind == 1)
        result = dtrain_all_gather(comm, send, recv, (size_t)count, DTRAIN_DTYPE_I32, later);
    else if (kind == 2) {
        memcpy(recv, send, (size_t)count * sizeof *recv);
        result = dtrain_broadcast(comm, recv, (size_t)count, DTRAIN_DTYPE_I32, root, later);
    } else {
        const int32_t mine = rank * 3 + op;
        result = dtrain_world_all_gather(world, &mine, sizeof mine, recv);
        for (int r = 0; r < n && result == DTRAIN_OK; r++) *right = *right && recv[r] == r * 3 + op;
        return result;
    }
    if (result == DTRAIN_OK) result = dtrain_work_wait(work);
    for (int i = 0; i < count && result == DTRAIN_OK; i++) {
        int32_t sum = 0;
        for (int r = 0; r < n; r++) sum += input(p, round, layer, op, r, i);
        if (kind == 0) *right = *right && recv[i] == sum;
        if (kind == 2) *right = *right && recv[i] == input(p, round, layer, op, root, i);
        for (int r = 0; r < n && kind == 1; r++)
            *right = *right && recv[r * count + i] == input(p, round, layer, op, r, i);
    }
    return result;
}

#define SAY(...) (void)(text[0] ? 0 : snprintf(text, 400, __VA_ARGS__))

static int host_rank(int me, void *user)
{
    play *y = (play *)user;
    const plan *p = &y->p;
    char *text = y->text[me];
    uint64_t at = p->seed * 64 + (uint64_t)me;
    int32_t *send = (int32_t *)malloc(COUNT * sizeof *send),
            *recv = (int32_t *)malloc(RANKS * COUNT * sizeof *recv);
    for (int r = 0; r < p->rounds && lives(p, r, me); r++) {
        dtrain_world *worlds[LAYERS] = {NULL, NULL};
        bool spoilt[LAYERS] = {false, false};
        for (int l = 0; l < LAYERS; l++) {
            const seat *s = &p->seats[r][l][me];
            if (s->group < 0) continue;
            const seat *odd = &p->seats[r][0][p->deviant[r]];
            const bool with = p->how[r] != RIGHT && l == 0 && odd->group == s->group;
            host_member member = host_member_of(y->groups[r][l][s->group], s->rank);
            dtrain_join_desc desc = host_desc(&member);
            desc.threads = 1 + (uint32_t)ranks_random(&at, 2);
            desc.options.log_level = (uint32_t)ranks_random(&at, 5);
            desc.timeout_ms += (uint32_t)ranks_random(&at, 1000);
            if (with && p->how[r] == WRONG && me == p->deviant[r]) {
                if (p->seed % 2) desc.threads = 10000;
                else desc.options.trace.path = "/nonexistent/folder/trace.json";
            }
            if (ranks_random(&at, 4) == 0) ranks_sleep_us((long)ranks_random(&at, 3000));
            const dtrain_result result = dtrain_world_join(&desc, &worlds[l]);
            spoilt[l] = with && p->how[r] != WRONG;
            if ((result == DTRAIN_OK) == (with && p->how[r] == WRONG))
                SAY("round %d layer %d: join says %d: %s", r, l, (int)result, dtrain_last_error());
        }
        bool failed[LAYERS] = {false, false};
        for (int o = 0; o < OPS; o++)
            for (int l = 0; l < LAYERS; l++) {
                bool right;
                if (!worlds[l] || failed[l]) continue;
                const bool odd = spoilt[l] && me == p->deviant[r], last = spoilt[l] && o == OPS - 1;
                if (odd && last && p->how[r] == DIES) raise(SIGKILL);
                if (odd && last) continue; /* it leaves */
                if (ranks_random(&at, 8) == 0) ranks_sleep_us((long)ranks_random(&at, 500));
                const dtrain_result result = call(p, worlds[l], r, l, o, send, recv, &right);
                failed[l] = result != DTRAIN_OK;
                if (failed[l] && !last)
                    SAY("round %d layer %d op %d: %s", r, l, o, dtrain_last_error());
                if (failed[l] && last && !strstr(dtrain_last_error(), "rank "))
                    SAY("round %d: no rank is named: %s", r, dtrain_last_error());
                if (!failed[l] && !right) SAY("round %d layer %d op %d: a wrong result", r, l, o);
                if (!failed[l] && last && p->kinds[r][l][o] != 2 && p->counts[r][l][o] > 0)
                    SAY("round %d layer %d: nothing was heard of a member that had left", r, l);
            }
        for (int l = LAYERS - 1; l >= 0; l--) {
            const dtrain_result result = dtrain_world_leave(worlds[l]);
            if (result != DTRAIN_OK && !spoilt[l])
                SAY("round %d layer %d: leave: %s", r, l, dtrain_last_error());
        }
        if (lives(p, r + 1, me)) host_barrier(y->everybody[r + 1]);
    }
    free(send);
    free(recv);
    return 0;
}

typedef struct process {
    play *y;
    int number;
} process;

static int thread_rank(int i, void *user)
{
    const process *q = (const process *)user;
    for (int r = 0; r < q->y->p.ranks; r++)
        if (q->y->p.process[r] == q->number && i-- == 0) return host_rank(r, q->y);
    return 1;
}

static int host_process(int number, void *user)
{
    process q = {(play *)user, number};
    int threads = 0, status[HOST_MOST], bad = 0;
    for (int r = 0; r < q.y->p.ranks; r++) threads += q.y->p.process[r] == number;
    const int files = ranks_entries("/proc/self/fd", "");
    host_run(threads, true, thread_rank, &q, status);
    for (int i = 0; i < threads; i++) bad |= status[i];
    if (ranks_entries("/proc/self/fd", "") != files) return 3;
    return bad;
}

static bool run_seed(uint64_t seed, bool words)
{
    play *y = (play *)ranks_shared(sizeof *y);
    int status[HOST_MOST];
    bool good = true;
    draw(&y->p, seed);
    const plan *p = &y->p;
    y->text = (char(*)[400])ranks_shared(RANKS * 400);
    for (int r = 0; r < p->rounds; r++)
        for (int l = 0; l < LAYERS; l++)
            for (int g = 0; g < RANKS; g++)
                if (p->sizes[r][l][g]) y->groups[r][l][g] = host_group_new(p->sizes[r][l][g]);
    for (int r = 0; r <= p->rounds; r++) {
        int living = 0;
        for (int i = 0; i < p->ranks; i++) living += lives(p, r, i);
        y->everybody[r] = host_group_new(living);
    }
    host_run(p->processes, false, host_process, y, status);
    for (int i = 0; i < p->ranks; i++) {
        const bool died = !lives(p, p->rounds, i),
                   ended = status[p->process[i]] == (died ? 128 + SIGKILL : 0);
        if (words || !ended || y->text[i][0])
            printf("  seed %llu: rank %d in process %d%s: %d%s%s\n", (unsigned long long)seed, i,
                   p->process[i], died ? ", which is killed" : "", status[p->process[i]],
                   y->text[i][0] ? ": " : "", y->text[i]);
        good = good && ended && !y->text[i][0];
    }
    for (int r = 0; r < p->rounds && words; r++)
        printf("  round %d: rank %d deviates: %d\n", r, p->deviant[r], p->how[r]);
    for (int r = 0; r < p->rounds; r++)
        for (int l = 0; l < LAYERS; l++)
            for (int g = 0; g < RANKS; g++)
                if (y->groups[r][l][g]) munmap(y->groups[r][l][g], sizeof(host_group));
    for (int r = 0; r <= p->rounds; r++) munmap(y->everybody[r], sizeof(host_group));
    munmap(y->text, RANKS * 400);
    munmap(y, sizeof *y);
    return good;
}

int main(int argc, char **argv)
{
    static const uint64_t failed_once[] = {618034129};
    const seeds s = seeds_of(argc, argv, MANY, 20);
    return seeds_run(&s, failed_once, sizeof failed_once / sizeof *failed_once, run_seed);
}
