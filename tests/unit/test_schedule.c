/* test_schedule.c: schedules of pipelines are right, cost what their formulas say, and the check finds what is
 * wrong.
 *
 * The oracle of the check carries data: a pass computes numbers that depend on all that it reads, out of memory that
 * is addressed by the slots and inboxes which the schedule says, and each send waits for its receive. A schedule is
 * right if nothing hangs and each stage adds up what one rank would have, in its order. */
#include "test.h"

#include "dtrain.h"
#include "tools/schedule.h"

enum { RANKS = 16, CHUNKS = 8, MICROS = 64, MAX_STAGES = 64, ROOM = 1024 };
enum { F = 1, B, W, SEND, RECEIVE, SEND_GRADIENT, RECEIVE_GRADIENT, REDUCE, STEP };
typedef dtrain_pipeline_schedule schedule;
typedef dtrain_pipeline_action action;

static const char *const kinds[] = {"1F1B", "GPIPE", "INTERLEAVED", "ZB_H1"};

static int least(int a, int b) { return a < b ? a : b; }
static int most(int a, int b) { return a > b ? a : b; }
static bool splits(uint32_t kind) { return kind == DTRAIN_PIPELINE_ZB_H1; }

static schedule *make(uint32_t kind, int p, int v, int m)
{
    const dtrain_pipeline_desc desc = {kind, (uint32_t)v, NULL};
    schedule *s = NULL;
    const dtrain_result result = dtrain_pipeline_create(&desc, p, m, &s);
    CHECK_MSG(result == DTRAIN_OK && s, "%s, %d ranks, %d chunks, %d micro-batches: %s",
              kinds[kind], p, v, m, dtrain_last_error());
    return s;
}

/* ---- formulas ---- */

/* Forward 1, backward 1 and weight 1 of each stage. */
static int formula_time(uint32_t kind, int p, int v, int m)
{
    if (kind == DTRAIN_PIPELINE_ZB_H1) return m < p ? 2 * (m + p) - 1 : 3 * m + p - 1;
    if (m < p)
        return 3 * (p * v + m - 1); /* the first micro-batch's way, the others right behind it */
    return 3 * (m * v + p - 1);
}
/* Passes between forward and backward; 0: no formula. */
static int formula_peak(uint32_t kind, int p, int v, int m, int rank)
{
    if (kind == DTRAIN_PIPELINE_GPIPE) return m;
    if (kind != DTRAIN_PIPELINE_INTERLEAVED) return least(p - rank, m);
    const int groups = most(m / p, 1), group = most((m + groups - 1) / groups, p);
    return m < p ? 0 : least(2 * (p - rank - 1) + (v - 1) * group + 1, m * v);
}

static bool check_formulas(uint32_t kind, int p, int v, int m)
{
    schedule_report report;
    schedule *s = make(kind, p, v, m);
    bool good = s != NULL;
    const int step = test_full() > 1 ? 1 : most(p - 1, 1); /* the first rank and the last one */
    for (int r = 0; r < p && good; r += step) {
        const dtrain_result result = schedule_check(s, NULL, r, &report);
        const int time = formula_time(kind, p, v, m), peak = formula_peak(kind, p, v, m, r);
        good =
            CHECK_MSG(result == DTRAIN_OK, "%s, %d ranks, %d chunks, %d micro-batches: %s",
                      kinds[kind], p, v, m, dtrain_last_error()) &&
            CHECK_MSG(report.makespan == time,
                      "%s, %d ranks, %d chunks, %d micro-batches take %g, expected %d", kinds[kind],
                      p, v, m, report.makespan, time) &&
            CHECK_MSG(fabs(report.bubble - (1 - 3.0 * m * v / report.makespan)) < 1e-12,
                      "a bubble of %g", report.bubble) &&
            CHECK_MSG(
                peak ? report.peak == peak : report.peak <= least(p, m) * v,
                "%s, %d ranks, %d chunks, %d micro-batches: rank %d has a peak of %d, expected %d",
                kinds[kind], p, v, m, r, report.peak, peak) &&
            CHECK_MSG(
                splits(kind) ? report.slots <= least(p, m) * v : report.slots == report.peak,
                "%s, %d ranks, %d chunks, %d micro-batches: rank %d has %d slots for a peak of %d",
                kinds[kind], p, v, m, r, report.slots, report.peak);
    }
    dtrain_pipeline_destroy(s);
    return good;
}

static void test_formulas(void)
{
    const int step = test_full() ? 1 : 11;
    for (uint32_t kind = 0; kind <= DTRAIN_PIPELINE_ZB_H1; kind++)
        for (int p = 1; p <= RANKS; p++) {
            const int last = kind == DTRAIN_PIPELINE_INTERLEAVED && p > 1 ? CHUNKS : 1;
            for (int v = 1; v <= last; v++)
                for (int m = 1; m <= MICROS; m += m > p + 1 ? step : 1)
                    if (!check_formulas(kind, p, v, m)) return;
        }
}

/* Published figures: F = 1 and B + W = 2 of a rank's whole model, so a chunk has its part of it. */
static void test_golden(void)
{
    static const struct {
        uint32_t kind;
        int p, v, m;
        double time, peak;
    } golden[] = {{DTRAIN_PIPELINE_1F1B, 4, 1, 4, 21, 4},
                  {DTRAIN_PIPELINE_GPIPE, 4, 1, 4, 21, 4},
                  {DTRAIN_PIPELINE_INTERLEAVED, 4, 2, 4, 16.5, 0},
                  {DTRAIN_PIPELINE_INTERLEAVED, 4, 4, 4, 14.25, 0},
                  {DTRAIN_PIPELINE_1F1B, 4, 1, 8, 33, 4},
                  {DTRAIN_PIPELINE_GPIPE, 4, 1, 8, 33, 8},
                  {DTRAIN_PIPELINE_INTERLEAVED, 4, 2, 8, 28.5, 5.5},
                  {DTRAIN_PIPELINE_INTERLEAVED, 4, 4, 8, 26.25, 4.75},
                  {DTRAIN_PIPELINE_1F1B, 8, 1, 32, 117, 8},
                  {DTRAIN_PIPELINE_GPIPE, 8, 1, 32, 117, 32},
                  {DTRAIN_PIPELINE_INTERLEAVED, 8, 2, 32, 106.5, 11.5},
                  {DTRAIN_PIPELINE_INTERLEAVED, 8, 4, 32, 101.25, 9.75},
                  {DTRAIN_PIPELINE_1F1B, 8, 1, 64, 213, 8},
                  {DTRAIN_PIPELINE_INTERLEAVED, 8, 2, 64, 202.5, 0},
                  {DTRAIN_PIPELINE_INTERLEAVED, 8, 4, 64, 197.25, 0},
                  {DTRAIN_PIPELINE_ZB_H1, 4, 1, 8, 27, 4},
                  {DTRAIN_PIPELINE_ZB_H1, 4, 1, 16, 51, 4},
                  {DTRAIN_PIPELINE_ZB_H1, 8, 1, 32, 103, 8}};
    for (size_t i = 0; i < sizeof golden / sizeof *golden; i++) {
        const double part = 1.0 / golden[i].v;
        dtrain_pipeline_costs costs[MAX_STAGES];
        schedule_report report = {0, 0, 0, 0, 0};
        schedule *s = make(golden[i].kind, golden[i].p, golden[i].v, golden[i].m);
        for (size_t stage = 0; stage < MAX_STAGES; stage++) {
            const dtrain_pipeline_costs equal = {part, part, part, 0};
            costs[stage] = equal;
        }
        CHECK(schedule_check(s, costs, 0, &report) == DTRAIN_OK);
        CHECK_MSG(report.makespan == golden[i].time &&
                      (golden[i].peak == 0 || report.peak * part == golden[i].peak),
                  "row %zu: %g with a peak of %g, expected %g and %g", i, report.makespan,
                  report.peak * part, golden[i].time, golden[i].peak);
        dtrain_pipeline_destroy(s);
    }
}

/* Costs of one's own, and messages that take time: the way of one micro-batch there and back. */
static void test_costs(void)
{
    const dtrain_pipeline_costs alike = {1, 2, 4, 10}, costs[] = {alike, alike, alike, alike};
    const dtrain_pipeline_costs differ[] = {{1, 2, 4, 10}, {2, 1, 1, 20}, {5, 3, 2, 0}};
    schedule_report report = {0, 0, 0, 0, 0};
    schedule *s = make(DTRAIN_PIPELINE_1F1B, 4, 1, 1);
    CHECK(schedule_check(s, costs, 0, &report) == DTRAIN_OK);
    CHECK(report.makespan == 4 * 1 + 4 * 6 + 6 * 10);
    CHECK_CLOSE(report.bubble, 1 - 7.0 / 88, 1e-12);
    dtrain_pipeline_destroy(s);
    s = make(DTRAIN_PIPELINE_ZB_H1, 4, 1, 1); /* the weights of rank 0 at the end */
    CHECK(schedule_check(s, costs, 0, &report) == DTRAIN_OK);
    CHECK(report.makespan == 4 * 1 + 4 * 2 + 4 + 6 * 10);
    dtrain_pipeline_destroy(s);
    s = make(DTRAIN_PIPELINE_1F1B, 3, 1, 1); /* stages that differ */
    CHECK(schedule_check(s, differ, 0, &report) == DTRAIN_OK);
    CHECK(report.makespan == 1 + 10 + 2 + 20 + 5 + 5 + 0 + 2 + 20 + 6);
    CHECK_CLOSE(report.bubble, 1 - 21.0 / (3 * 71), 1e-12);
    dtrain_pipeline_destroy(s);
    s = make(DTRAIN_PIPELINE_INTERLEAVED, 2, 2, 1); /* each rank has two stages */
    CHECK(schedule_check(s, costs, 0, &report) == DTRAIN_OK);
    CHECK(report.makespan == 4 * 1 + 4 * 6 + 6 * 10);
    dtrain_pipeline_destroy(s);
}

/* The chunks that a zeroed desc means; one rank has the model as its only stage. */
static void test_chunks(void)
{
    for (uint32_t kind = 0; kind <= DTRAIN_PIPELINE_ZB_H1; kind++)
        for (int p = 1; p <= 3; p++)
            for (int v = 0; v <= (kind == DTRAIN_PIPELINE_INTERLEAVED ? 4 : 1); v++) {
                schedule *s = make(kind, p, v, 3);
                const int usual = kind == DTRAIN_PIPELINE_INTERLEAVED ? 2 : 1;
                CHECK(s && s->chunks == (p == 1 ? 1 : v ? v : usual));
                dtrain_pipeline_destroy(s);
            }
}

/* ---- the oracle ---- */

typedef struct room_of_pass { /* what is in a slot or an inbox */
    uint64_t in, out, grad, d_in;
} room_of_pass;
typedef struct naive_rank {
    const action *list;
    size_t count, at;
    room_of_pass slots[ROOM];
    uint64_t inboxes[ROOM];
    unsigned did[ROOM]; /* bits: acts */
    uint64_t sum[CHUNKS], reduced[CHUNKS], stepped[CHUNKS];
} naive_rank;
typedef struct naive {
    uint32_t kind;
    int p, v, m;
    naive_rank ranks[RANKS];
} naive;

static uint64_t mix(uint64_t a, uint64_t b)
{
    uint64_t x = a * 0x9e3779b97f4a7c15u + b + 0x632be59bd9b4e019u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}
static uint64_t fresh(int micro) { return mix(77, (uint64_t)micro); }
static uint64_t forward_of(int stage, uint64_t in) { return mix((uint64_t)stage, in); }
static uint64_t loss_of(uint64_t out) { return mix(1234, out); }
static uint64_t backward_of(int stage, uint64_t in, uint64_t grad)
{
    return mix(mix((uint64_t)stage + 500, in), grad);
}
static uint64_t sum_of(uint64_t sum, uint64_t in, uint64_t grad, uint64_t d_in)
{
    return mix(mix(sum, in), mix(grad, d_in));
}

static void naive_compute(naive *n, int rank, const action *a)
{
    naive_rank *self = &n->ranks[rank];
    const int stage = a->chunk * n->p + rank, last = n->p * n->v - 1;
    room_of_pass *slot = &self->slots[a->slot];
    const uint64_t came = a->inbox >= 0 ? self->inboxes[a->inbox] : 0;
    const uint64_t in = stage ? came : fresh(a->micro_batch);
    if (a->act == F) {
        memset(slot, 0, sizeof *slot);
        slot->out = forward_of(stage, in);
        if (stage == last) slot->grad = loss_of(slot->out);
    }
    if (a->act == B) slot->d_in = backward_of(stage, in, slot->grad);
    if (a->act == (splits(n->kind) ? W : B))
        self->sum[a->chunk] = sum_of(self->sum[a->chunk], in, slot->grad, slot->d_in);
}

/* Go on by one action of one rank, or by a message of two; false: nobody can. */
static bool naive_next(naive *n)
{
    for (int r = 0; r < n->p; r++) {
        naive_rank *self = &n->ranks[r];
        if (self->at == self->count) continue;
        const action *a = &self->list[self->at];
        if (a->act <= W) naive_compute(n, r, a);
        if (a->act == REDUCE) self->reduced[a->chunk] = self->sum[a->chunk];
        if (a->act == STEP) memcpy(self->stepped, self->reduced, sizeof self->stepped);
        if (a->act == SEND || a->act == SEND_GRADIENT) {
            naive_rank *peer = &n->ranks[a->peer];
            const action *b = peer->at < peer->count ? &peer->list[peer->at] : a;
            if ((b->act != RECEIVE && b->act != RECEIVE_GRADIENT) || b->peer != r) continue;
            const uint64_t sent =
                a->act == SEND ? self->slots[a->slot].out : self->slots[a->slot].d_in;
            if (b->act == RECEIVE) peer->inboxes[b->inbox] = sent;
            else if (b->slot >= 0) peer->slots[b->slot].grad = sent;
            peer->did[b->chunk * n->m + b->micro_batch] |= 1u << b->act;
            peer->at++;
        } else if (a->act == RECEIVE || a->act == RECEIVE_GRADIENT) {
            continue; /* its send moves both */
        }
        self->did[a->chunk * n->m + a->micro_batch] |= 1u << a->act;
        self->at++;
        return true;
    }
    return false;
}

/* Tell whether a schedule, run as it stands, ends with the right sums on all ranks. */
static bool naive_is_right(const schedule *s, naive *n)
{
    memset(n, 0, sizeof *n);
    n->kind = s->kind, n->p = s->ranks, n->v = s->chunks, n->m = s->micro_batches;
    for (int r = 0; r < n->p; r++) {
        n->ranks[r].list = s->actions + s->first[r];
        n->ranks[r].count = s->first[r + 1] - s->first[r];
    }
    while (naive_next(n)) {}
    const int stages = n->p * n->v;
    uint64_t sums[RANKS * CHUNKS] = {0}, in[RANKS * CHUNKS + 1];
    for (int i = 0; i < n->m; i++) {
        in[0] = fresh(i);
        for (int k = 0; k < stages; k++) in[k + 1] = forward_of(k, in[k]);
        uint64_t grad = loss_of(in[stages]);
        for (int k = stages - 1; k >= 0; k--) {
            const uint64_t d_in = backward_of(k, in[k], grad);
            sums[k] = sum_of(sums[k], in[k], grad, d_in);
            grad = d_in;
        }
    }
    for (int r = 0; r < n->p; r++) {
        if (n->ranks[r].at < n->ranks[r].count) return false;
        for (int c = 0; c < n->v; c++)
            if (n->ranks[r].stepped[c] != sums[c * n->p + r]) return false;
    }
    return true;
}

static uint64_t draw(uint64_t *state, int limit)
{
    return (*state = mix(*state, 1)) % (uint64_t)limit;
}

static schedule *draw_schedule(uint64_t *state)
{
    const uint32_t kind = (uint32_t)draw(state, 4);
    const int v = kind == DTRAIN_PIPELINE_INTERLEAVED ? 1 + (int)draw(state, 4) : 1;
    return make(kind, 1 + (int)draw(state, 6), v, 1 + (int)draw(state, 9));
}

static void test_right(void)
{
    naive *n = (naive *)malloc(sizeof *n);
    uint64_t state = test_seed();
    for (uint64_t i = 0; i < test_draws(300, 3000, 30000) && n; i++) {
        schedule *s = draw_schedule(&state);
        if (!s) break;
        if (!CHECK_MSG(naive_is_right(s, n),
                       "%s, %d ranks, %d chunks, %d micro-batches: the data is wrong",
                       kinds[s->kind], s->ranks, s->chunks, s->micro_batches))
            break;
        dtrain_pipeline_destroy(s);
    }
    free(n);
}

/* Swap each pair of adjacent actions: the check fails exactly when the data does. */
static void test_swaps(void)
{
    naive *n = (naive *)malloc(sizeof *n);
    uint64_t state = test_seed() + 1, right = 0, wrong = 0;
    bool good = n != NULL;
    for (uint64_t i = 0; i < test_draws(60, 600, 6000) && good; i++) {
        schedule *s = draw_schedule(&state);
        for (int r = 0; s && r < s->ranks && good; r++)
            for (size_t k = s->first[r]; k + 1 < s->first[r + 1] && good; k++) {
                const action kept = s->actions[k];
                s->actions[k] = s->actions[k + 1], s->actions[k + 1] = kept;
                const bool data = naive_is_right(s, n),
                           check = schedule_check(s, NULL, 0, NULL) == DTRAIN_OK;
                *(data ? &right : &wrong) += 1;
                good = CHECK_MSG(data == check,
                                 "%s, %d ranks, %d chunks, %d micro-batches, actions %zu and %zu "
                                 "of rank %d swapped: the "
                                 "data is %s, but: %s",
                                 kinds[s->kind], s->ranks, s->chunks, s->micro_batches,
                                 k - s->first[r], k + 1 - s->first[r], r, data ? "right" : "wrong",
                                 check ? "no complaint" : dtrain_last_error());
                s->actions[k + 1] = s->actions[k], s->actions[k] = kept;
            }
        dtrain_pipeline_destroy(s);
    }
    CHECK_MSG(right > 50 && wrong > 500, "%llu swaps are right, %llu wrong",
              (unsigned long long)right, (unsigned long long)wrong);
    free(n);
}

/* Change a number, leave an action out or do it twice: what the check lets through has the right data. */
static void test_changes(void)
{
    naive *n = (naive *)malloc(sizeof *n);
    uint64_t state = test_seed() + 2, found = 0;
    bool good = n != NULL;
    for (uint64_t i = 0; i < test_draws(4000, 40000, 400000) && good; i++) {
        schedule *s = draw_schedule(&state);
        if (!s) break;
        const size_t k = (size_t)draw(&state, (int)s->first[s->ranks]);
        const uint64_t what = draw(&state, 8);
        action *a = &s->actions[k];
        int32_t *const fields[] = {&a->chunk, &a->micro_batch, &a->peer, &a->slot, &a->inbox};
        if (what < 5) *fields[what] += draw(&state, 2) ? 1 : -1;
        if (what == 5) a->act = 1 + (uint32_t)draw(&state, 9);
        if (what == 6) *a = s->actions[k ? k - 1 : 1];
        if (what == 7) { /* left out */
            memmove(a, a + 1, (s->first[s->ranks] - k - 1) * sizeof *a);
            for (int r = s->ranks; r >= 0 && s->first[r] > k; r--) s->first[r]--;
        }
        const bool check = schedule_check(s, NULL, 0, NULL) == DTRAIN_OK;
        found += !check;
        good = !check ||
               CHECK_MSG(naive_is_right(s, n),
                         "%s, %d ranks, %d chunks, %d micro-batches, action %zu, change "
                         "%d: no complaint",
                         kinds[s->kind], s->ranks, s->chunks, s->micro_batches, k, (int)what);
        dtrain_pipeline_destroy(s);
    }
    CHECK_MSG(found > 1000, "%llu changes are found", (unsigned long long)found);
    free(n);
}

/* ---- text ---- */

static char text[1 << 20];

static void expect_parse(const char *from, dtrain_result expected, const char *words)
{
    schedule *s = NULL;
    const dtrain_result result = schedule_parse(from, &s);
    CHECK_MSG(result == expected && !s && strstr(dtrain_last_error(), words),
              "\"%.40s\": %s, expected: %s", from, dtrain_last_error(), words);
}

static void test_text(void)
{
    uint64_t state = test_seed() + 3;
    for (int i = 0; i < 100; i++) {
        schedule *s = draw_schedule(&state), *back = NULL;
        size_t needed = 0, again = 0;
        if (!s) return;
        CHECK(schedule_print(s, NULL, 0, &needed) == DTRAIN_OK);
        CHECK(schedule_print(s, text, needed, &again) == DTRAIN_OK && again == needed);
        CHECK(strlen(text) == needed - 1);
        CHECK_MSG(schedule_parse(text, &back) == DTRAIN_OK, "%s", dtrain_last_error());
        if (!back) return;
        CHECK(back->kind == s->kind && back->ranks == s->ranks && back->chunks == s->chunks &&
              back->micro_batches == s->micro_batches);
        CHECK(memcmp(back->first, s->first, ((size_t)s->ranks + 1) * sizeof *s->first) == 0);
        CHECK(memcmp(back->actions, s->actions, s->first[s->ranks] * sizeof *s->actions) == 0);
        CHECK(schedule_print(s, text, needed - 1, NULL) == DTRAIN_ERROR_ARGUMENT);
        dtrain_pipeline_destroy(s), dtrain_pipeline_destroy(back);
    }
}

static void test_parse_errors(void)
{
    static const char head[] = "1F1B ranks 1 chunks 1 micro-batches 1\n";
    expect_parse("", DTRAIN_ERROR_DATA, "line 1 is not understood");
    expect_parse("2F2B ranks 1 chunks 1 micro-batches 1\n", DTRAIN_ERROR_DATA,
                 "line 1 is not understood at \"2F2B");
    expect_parse("ZB_H1 ranks 1 chunks 1 micro-batches 99999999999\n", DTRAIN_ERROR_DATA, "line 1");
    expect_parse("INTERLEAVED ranks 2147483647 chunks 2147483647 micro-batches 2147483647\n",
                 DTRAIN_ERROR_DATA, "announces 2147483647 ranks");
    expect_parse(head, DTRAIN_ERROR_DATA, "and 0 lines with at most 0 actions follow");
    static const struct {
        const char *line, *words;
        dtrain_result result;
    } lines[] = {
        {"rank 1: F0.0:0 B0.0:0 REDUCE0.0 STEP0.0\n", "line 2 is not understood at \"rank 1",
         DTRAIN_ERROR_DATA},
        {"rank 0: F0.0:0 X0.0 REDUCE0.0 STEP0.0\n", "line 2 is not understood at \" X0.0",
         DTRAIN_ERROR_DATA},
        {"rank 0: F0.0:0 B0.0: REDUCE0.0 STEP0.0\n", "at \" B0.0: ", DTRAIN_ERROR_DATA},
        {"rank 0: F0.0:0 B0.0:0 REDUCE0.0 STEP0.0", "0 lines", DTRAIN_ERROR_DATA},
        {"rank 0: F0.0:0 B0.0:0 REDUCE0.0 STEP0.0\nrank", "line 3 is not understood at \"rank",
         DTRAIN_ERROR_DATA},
        {"rank 0: F0.0:0 REDUCE0.0 STEP0.0\n", "REDUCE of chunk 0, micro-batch 0: gradients",
         DTRAIN_ERROR_USAGE},
        {"rank 0: F0.0:0 B0.0:0 STEP0.0 REDUCE0.0\n", "STEP of chunk 0, micro-batch 0: a REDUCE",
         DTRAIN_ERROR_USAGE},
        {"rank 0: F0.0:0 B0.0:0 REDUCE0.0\n", "STEP of chunk 0, micro-batch 0: it is missing",
         DTRAIN_ERROR_USAGE},
        {"rank 0: F0.0:0 F0.0:0 B0.0:0 REDUCE0.0 STEP0.0\n",
         "FORWARD of chunk 0, micro-batch 0: it has been done", DTRAIN_ERROR_USAGE},
        {"rank 0: F0.0 B0.0 REDUCE0.0 STEP0.0\n", "its slot is not free", DTRAIN_ERROR_USAGE},
        {"rank 0: F0.0:7 B0.0:7 REDUCE0.0 STEP0.0\n", "its slot is not free, or there is none",
         DTRAIN_ERROR_USAGE},
        {"rank 0: F0.0:0 W0.0:0 B0.0:0 REDUCE0.0 STEP0.0\n", "this kind has no such action",
         DTRAIN_ERROR_USAGE},
        {"rank 0: F0.0:0 R0.0:0@0 B0.0:0 REDUCE0.0 STEP0.0\n", "the run hangs here",
         DTRAIN_ERROR_USAGE},
        {"rank 0: F0.5:0 B0.5:0 REDUCE0.0 STEP0.0\n", "there is no such action",
         DTRAIN_ERROR_USAGE}};
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) {
        char whole[300];
        snprintf(whole, sizeof whole, "%s%s", head, lines[i].line);
        expect_parse(whole, lines[i].result, lines[i].words);
    }
    expect_parse("1F1B ranks 1 chunks 3 micro-batches 1\nrank 0: F0.0:0 B0.0:0 F1.0:0\n",
                 DTRAIN_ERROR_ARGUMENT, "1 chunk a rank");
    expect_parse("INTERLEAVED ranks 1 chunks 2 micro-batches 1\nrank 0: F0.0:0 B0.0:0 F1.0:0\n",
                 DTRAIN_ERROR_ARGUMENT, "1 chunk on one rank");
    CHECK(schedule_parse(NULL, NULL) == DTRAIN_ERROR_ARGUMENT);
}

/* Texts with some bytes changed are errors or right schedules; a sanitizer sees the rest. */
static void test_parse_fuzz(void)
{
    static const char bytes[] = "0123456789 :./@\nFBWSRGkK";
    uint64_t state = test_seed() + 4;
    for (uint64_t i = 0; i < test_draws(3000, 30000, 300000); i++) {
        schedule *s = draw_schedule(&state), *back = NULL;
        if (!s) return;
        CHECK(schedule_print(s, text, sizeof text, NULL) == DTRAIN_OK);
        const int length = (int)strlen(text);
        for (uint64_t k = 0; k <= draw(&state, 3); k++)
            text[draw(&state, length)] = bytes[draw(&state, (int)sizeof bytes - 1)];
        if (draw(&state, 4) == 0) text[draw(&state, length)] = 0;
        if (schedule_parse(text, &back) == DTRAIN_OK)
            CHECK(schedule_check(back, NULL, 0, NULL) == DTRAIN_OK);
        else CHECK(!back && dtrain_last_error()[0]);
        dtrain_pipeline_destroy(s), dtrain_pipeline_destroy(back);
    }
}

static void test_drawing(void)
{
    static const char expected[] = "rank 0   F0 F1 .  .  B0 B0 F2 B1 B1 .  B2 B2\n"
                                   "rank 1   .  F0 B0 B0 F1 B1 B1 F2 B2 B2 .  .\n";
    static const char halves[] = "rank 0   F0 F1 .  B0 W0 B1 W1\n"
                                 "rank 1   .  F0 B0 F1 B1 W0 W1\n";
    static const char chunks[] =
        "rank 0   F0.0 .    F0.1 .    .    .    B0.1 B0.1 .    .    B0.0 B0.0\n"
        "rank 1   .    F0.0 .    F0.1 B0.1 B0.1 .    .    B0.0 B0.0 .    .\n";
    size_t needed = 0;
    schedule *s = make(DTRAIN_PIPELINE_1F1B, 2, 1, 3);
    CHECK(schedule_draw(s, text, sizeof text, &needed) == DTRAIN_OK && needed == sizeof expected);
    CHECK_MSG(strcmp(text, expected) == 0, "\n%s", text);
    CHECK(schedule_draw(s, text, needed - 1, NULL) == DTRAIN_ERROR_ARGUMENT);
    s->actions[0].slot = -1;
    CHECK(schedule_draw(s, text, sizeof text, NULL) == DTRAIN_ERROR_USAGE);
    dtrain_pipeline_destroy(s);
    s = make(DTRAIN_PIPELINE_ZB_H1, 2, 1, 2);
    CHECK(schedule_draw(s, text, sizeof text, &needed) == DTRAIN_OK && needed == sizeof halves);
    CHECK_MSG(strcmp(text, halves) == 0, "\n%s", text);
    dtrain_pipeline_destroy(s);
    s = make(DTRAIN_PIPELINE_INTERLEAVED, 2, 2, 1);
    CHECK(schedule_draw(s, text, sizeof text, &needed) == DTRAIN_OK && needed == sizeof chunks);
    CHECK_MSG(strcmp(text, chunks) == 0, "\n%s", text);
    dtrain_pipeline_destroy(s);
}

static void test_arguments(void)
{
    static const struct {
        uint32_t kind, chunks;
        int ranks, micro_batches;
        const char *words;
    } bad[] = {{4, 0, 2, 2, "kind 4 of a pipeline"},
               {DTRAIN_PIPELINE_1F1B, 2, 2, 2, "has 1 chunk a rank, not 2"},
               {DTRAIN_PIPELINE_ZB_H1, 2, 1, 2, "has 1 chunk a rank, not 2"},
               {DTRAIN_PIPELINE_INTERLEAVED, 65, 2, 2, "1 to 64 chunks"},
               {0, 0, 0, 2, "0 ranks"},
               {0, 0, 2, 0, "0 micro-batches"},
               {0, 0, 2, -3, "-3 micro-batches"},
               {0, 0, 1 << 20, 1 << 20, "at most"},
               {DTRAIN_PIPELINE_INTERLEAVED, 64, INT32_MAX, INT32_MAX, "at most"}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        const dtrain_pipeline_desc desc = {bad[i].kind, bad[i].chunks, NULL};
        schedule *s = NULL;
        CHECK(dtrain_pipeline_create(&desc, bad[i].ranks, bad[i].micro_batches, &s) ==
                  DTRAIN_ERROR_ARGUMENT &&
              !s);
        CHECK_MSG(strstr(dtrain_last_error(), bad[i].words), "%s, expected: %s",
                  dtrain_last_error(), bad[i].words);
    }
    schedule *s = NULL;
    CHECK(dtrain_pipeline_create(NULL, 2, 3, &s) == DTRAIN_OK && s &&
          s->kind == DTRAIN_PIPELINE_1F1B && s->chunks == 1);
    dtrain_pipeline_destroy(s);
    CHECK(dtrain_pipeline_create(NULL, 2, 3, NULL) == DTRAIN_ERROR_ARGUMENT);
    CHECK(schedule_check(NULL, NULL, 0, NULL) == DTRAIN_ERROR_ARGUMENT);
    CHECK(schedule_print(NULL, NULL, 0, NULL) == DTRAIN_ERROR_ARGUMENT);
    dtrain_pipeline_destroy(NULL);
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    RUN(test_arguments);
    RUN(test_chunks);
    RUN(test_golden);
    RUN(test_formulas);
    RUN(test_costs);
    RUN(test_right);
    RUN(test_swaps);
    RUN(test_changes);
    RUN(test_text);
    RUN(test_parse_errors);
    RUN(test_parse_fuzz);
    RUN(test_drawing);
    return test_summary();
}
