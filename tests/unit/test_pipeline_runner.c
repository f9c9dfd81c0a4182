/* test_pipeline_runner.c: a program with a backward of its own, run by schedules of all kinds on 1 to 8 ranks, has
 * the bits of one rank that accumulates the same micro-batches; and whatever goes wrong on a rank is an error on all
 * of them that says in which stage, action and micro-batch.
 *
 * The model is LAYERS times y = tanh(x W^T), with x (ROWS, WIDTH); a stage has some of them. What a pass keeps lies
 * in its slot, or comes in an inbox, so that memory that is used too early is a wrong number. */
#include "test.h"

#include "dtrain.h"
#include "tools/schedule.h"
#include "ranks.h"

enum { LAYERS = 24, ROWS = 3, WIDTH = 5, AREA = ROWS * WIDTH, MATRIX = WIDTH * WIDTH };
enum { RANKS = 8, CHUNKS = 3, MICROS = 12, ROOM = 40, STEPS = 2 };
enum { F = 1, B, W, SEND, RECEIVE, SEND_GRADIENT, RECEIVE_GRADIENT, REDUCE, STEP };
typedef dtrain_pipeline_action action;

static const char *const kinds[] = {"1F1B", "GPIPE", "INTERLEAVED", "ZB_H1"};
static const char *const acts[] = {"",       "FORWARD", "BACKWARD",      "WEIGHT",
                                   "SEND",   "RECEIVE", "SEND_GRADIENT", "RECEIVE_GRADIENT",
                                   "REDUCE", "STEP"};

typedef struct weights {
    float w[LAYERS][MATRIX], loss[STEPS][MICROS];
} weights;
typedef struct page { /* of what a rank tells: shared */
    dtrain_result result[RANKS];
    char text[RANKS][1024];
    double when[RANKS];
    int32_t over; /* ranks */
    weights learned;
} page;

/* ---- the model ---- */

static float drawn(uint64_t key) { return (float)(int)(ranks_mix(key) % 2001) / 1000 - 1; }
static void draw_weights(weights *model)
{
    memset(model, 0, sizeof *model);
    for (int l = 0; l < LAYERS; l++)
        for (int i = 0; i < MATRIX; i++) model->w[l][i] = drawn((uint64_t)(l * MATRIX + i));
}
static float sample(int step, int micro, int i)
{
    return drawn((uint64_t)(90000 + (step * MICROS + micro) * AREA + i));
}

static void layer(const float *w, const float *x, float *y)
{
    for (int i = 0; i < AREA; i++) {
        float sum = 0;
        for (int k = 0; k < WIDTH; k++) sum += x[i / WIDTH * WIDTH + k] * w[i % WIDTH * WIDTH + k];
        y[i] = tanhf(sum);
    }
}
/* d_sum (ROWS, WIDTH): of what went into tanh; d_x, of the input. */
static void layer_inputs(const float *w, const float *y, const float *d_y, float *d_sum, float *d_x)
{
    for (int i = 0; i < AREA; i++) d_sum[i] = d_y[i] * (1 - y[i] * y[i]), d_x[i] = 0;
    for (int i = 0; i < AREA; i++)
        for (int k = 0; k < WIDTH; k++)
            d_x[i / WIDTH * WIDTH + k] += d_sum[i] * w[i % WIDTH * WIDTH + k];
}
static void layer_weights(const float *x, const float *d_sum, float *grad)
{
    for (int i = 0; i < AREA; i++)
        for (int k = 0; k < WIDTH; k++)
            grad[i % WIDTH * WIDTH + k] += d_sum[i] * x[i / WIDTH * WIDTH + k];
}
static float loss_of(const float *y, float *d_y)
{
    float loss = 0;
    for (int i = 0; i < AREA; i++) {
        d_y[i] = y[i] - 0.5f;
        loss += d_y[i] * d_y[i] / 2;
    }
    return loss;
}
static void learn(float *w, float *grad)
{
    for (int i = 0; i < MATRIX; i++) w[i] -= 0.01f * grad[i], grad[i] = 0;
}

/* One rank, a plain loop. */
static void learn_alone(weights *model, int micros)
{
    static float x[LAYERS + 1][AREA], d[LAYERS + 1][AREA], d_sum[AREA], grad[LAYERS][MATRIX];
    draw_weights(model);
    for (int step = 0; step < STEPS; step++) {
        for (int m = 0; m < micros; m++) {
            for (int i = 0; i < AREA; i++) x[0][i] = sample(step, m, i);
            for (int l = 0; l < LAYERS; l++) layer(model->w[l], x[l], x[l + 1]);
            model->loss[step][m] = loss_of(x[LAYERS], d[LAYERS]);
            for (int l = LAYERS - 1; l >= 0; l--) {
                layer_inputs(model->w[l], x[l + 1], d[l + 1], d_sum, d[l]);
                layer_weights(x[l], d_sum, grad[l]);
            }
        }
        for (int l = 0; l < LAYERS; l++) learn(model->w[l], grad[l]);
    }
}

/* ---- the program of a rank ---- */

typedef struct job {
    uint32_t kind;
    int ranks, chunks, micros;
    int bad_rank, bad_chunk, bad_micro; /* where something happens */
    uint32_t bad_act;                   /* 0: nothing */
    enum { FAILS, STALLS, DIES } how;
    page *page;
} job;

typedef struct pass { /* a slot: of the layers of a stage */
    float x[LAYERS + 1][AREA], d_sum[LAYERS][AREA];
    float d_out[AREA], d_in[AREA];
    int32_t tag;
    float sent[AREA]; /* of an earlier pass, may still be under way */
} pass;
typedef struct inbox {
    float x[AREA];
    int32_t tag;
} inbox;
typedef struct local {
    const job *j;
    int rank, step, reduced;
    weights model;
    float grad[LAYERS][MATRIX];
    pass slots[ROOM];
    inbox inboxes[ROOM];
} local;

static int stage_of(const local *l, int chunk) { return chunk * l->j->ranks + l->rank; }
static int first_layer(const local *l, int stage)
{
    return LAYERS * stage / (l->j->ranks * l->j->chunks);
}

static dtrain_result misfortune(const local *l, const action *a)
{
    const job *j = l->j;
    if (a->act != j->bad_act || l->rank != j->bad_rank || a->chunk != j->bad_chunk ||
        a->micro_batch != j->bad_micro)
        return DTRAIN_OK;
    if (j->how == DIES) raise(SIGKILL);
    if (j->how == STALLS)
        return ranks_await(&j->page->over, j->ranks - 1) ? DTRAIN_OK : DTRAIN_ERROR_TIMEOUT;
    return dtrain_fail(DTRAIN_ERROR_DATA, "the hamster ate it");
}

static dtrain_result forward(local *l, const action *a)
{
    pass *slot = &l->slots[a->slot];
    const int stage = stage_of(l, a->chunk), first = first_layer(l, stage),
              end = first_layer(l, stage + 1);
    memset(slot, 0xff, offsetof(pass, sent)); /* NaN: whoever still needed it sees it */
    for (int i = 0; i < AREA; i++)
        slot->x[0][i] = stage == 0 ? sample(l->step, a->micro_batch, i) : l->inboxes[a->inbox].x[i];
    if (stage && l->inboxes[a->inbox].tag != 1000 * stage + a->micro_batch)
        return dtrain_fail(DTRAIN_ERROR_DATA, "this is message %d", l->inboxes[a->inbox].tag);
    for (int k = first; k < end; k++)
        layer(l->model.w[k], slot->x[k - first], slot->x[k - first + 1]);
    slot->tag = 1000 * (stage + 1) + a->micro_batch;
    if (end == LAYERS)
        l->model.loss[l->step][a->micro_batch] = loss_of(slot->x[end - first], slot->d_out);
    return DTRAIN_OK;
}
static void backward(local *l, const action *a)
{
    pass *slot = &l->slots[a->slot];
    const int stage = stage_of(l, a->chunk), first = first_layer(l, stage),
              end = first_layer(l, stage + 1);
    float d_x[AREA];
    memcpy(slot->d_in, slot->d_out, sizeof d_x);
    for (int k = end - 1; k >= first; k--) {
        layer_inputs(l->model.w[k], slot->x[k - first + 1], slot->d_in, slot->d_sum[k - first],
                     d_x);
        memcpy(slot->d_in, d_x, sizeof d_x);
    }
}
static void weight(local *l, const action *a)
{
    const pass *slot = &l->slots[a->slot];
    const int stage = stage_of(l, a->chunk), first = first_layer(l, stage),
              end = first_layer(l, stage + 1);
    for (int k = end - 1; k >= first; k--)
        layer_weights(slot->x[k - first], slot->d_sum[k - first], l->grad[k]);
}

static dtrain_result compute(void *user, const action *a)
{
    local *l = (local *)user;
    const bool splits = l->j->kind == DTRAIN_PIPELINE_ZB_H1;
    TRY(misfortune(l, a));
    if (a->act == F) TRY(forward(l, a));
    if (a->act == B) backward(l, a);
    if (a->act == (splits ? W : B)) weight(l, a);
    if (a->act == REDUCE) l->reduced++;
    if (a->act == STEP) {
        CHECK(l->reduced == l->j->chunks);
        for (int k = 0; k < LAYERS; k++) learn(l->model.w[k], l->grad[k]);
    }
    return DTRAIN_OK;
}

/* Activations travel with a number, as a second tensor. */
static dtrain_result part(void *user, const action *a, size_t i, dtrain_pipeline_part *out)
{
    local *l = (local *)user;
    const int layers =
        first_layer(l, stage_of(l, a->chunk) + 1) - first_layer(l, stage_of(l, a->chunk));
    const bool activation = a->act == SEND || a->act == RECEIVE;
    if (i == 0) TRY(misfortune(l, a));
    if (i == (activation ? 2 : 1)) return DTRAIN_OK;
    out->count = i ? 1 : AREA;
    out->dtype = i ? DTRAIN_DTYPE_I32 : DTRAIN_DTYPE_F32;
    if (a->act == SEND)
        out->address = i ? (void *)&l->slots[a->slot].tag : (void *)l->slots[a->slot].x[layers];
    if (a->act == RECEIVE)
        out->address = i ? (void *)&l->inboxes[a->inbox].tag : (void *)l->inboxes[a->inbox].x;
    if (a->act == SEND_GRADIENT)
        out->address = memcpy(l->slots[a->slot].sent, l->slots[a->slot].d_in, AREA * sizeof(float));
    if (a->act == RECEIVE_GRADIENT) out->address = l->slots[a->slot].d_out;
    return DTRAIN_OK;
}

static dtrain_result run_steps(local *l, dtrain_comm *comm)
{
    const dtrain_pipeline_desc desc = {l->j->kind, (uint32_t)l->j->chunks, NULL};
    const dtrain_pipeline_work work = {compute, part, l};
    dtrain_pipeline_schedule *s = NULL;
    TRY(dtrain_pipeline_create(&desc, l->j->ranks, l->j->micros, &s));
    dtrain_result result = DTRAIN_OK;
    for (l->step = 0; l->step < STEPS && result == DTRAIN_OK; l->step++) {
        l->reduced = 0;
        result = dtrain_pipeline_run(s, comm, &work);
    }
    if (result == DTRAIN_OK && comm) result = dtrain_barrier(comm);
    dtrain_pipeline_destroy(s);
    return result;
}

static int rank_main(dtrain_world *world, void *user)
{
    const job *j = (const job *)user;
    page *told = j->page;
    local *l = (local *)calloc(1, sizeof *l);
    if (!CHECK(l)) return 1;
    l->j = j;
    l->rank = dtrain_world_rank(world);
    draw_weights(&l->model);
    const dtrain_result result = run_steps(l, dtrain_world_comm(world));
    told->result[l->rank] = result;
    if (result != DTRAIN_OK)
        snprintf(told->text[l->rank], sizeof told->text[0], "%s", dtrain_last_error());
    told->when[l->rank] = test_seconds();
    for (int c = 0; c < j->chunks; c++) {
        const int stage = stage_of(l, c), first = first_layer(l, stage),
                  end = first_layer(l, stage + 1);
        memcpy(told->learned.w[first], l->model.w[first],
               (size_t)(end - first) * sizeof l->model.w[0]);
        if (end == LAYERS) memcpy(told->learned.loss, l->model.loss, sizeof l->model.loss);
    }
    /* A rank that ends is an error for others, too: they must have heard of it before. */
    if (j->bad_act && j->how == FAILS && l->rank == j->bad_rank)
        ranks_await(&told->over, j->ranks - 1);
    free(l);
    ranks_count(&told->over);
    return result != DTRAIN_OK;
}

/* ---- bits ---- */

static void check_bits(uint32_t kind, int ranks, int chunks, int micros, uint32_t mode)
{
    static weights alone;
    job j = {kind, ranks, chunks, micros, 0, 0, 0, 0, FAILS, (page *)ranks_shared(sizeof(page))};
    learn_alone(&alone, micros);
    ranks_run(ranks, mode, rank_main, &j);
    CHECK_MSG(memcmp(&alone, &j.page->learned, sizeof alone) == 0,
              "%s, %d ranks, %d chunks, %d micro-batches: not the bits of one rank", kinds[kind],
              ranks, chunks, micros);
    munmap(j.page, sizeof(page));
}

static void check_all_bits(uint32_t mode)
{
    static const int counts[] = {1, 2, 3, 5, 8, 12};
    for (uint32_t kind = 0; kind <= DTRAIN_PIPELINE_ZB_H1; kind++)
        for (int ranks = 1; ranks <= RANKS; ranks += ranks > 3 && !test_full() ? 2 : 1)
            for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
                const bool loops = kind == DTRAIN_PIPELINE_INTERLEAVED && ranks > 1;
                const int chunks = loops ? 2 + (int)i % 2 : 1;
                if (!test_full() && (ranks + (int)i) % 2) continue;
                check_bits(kind, ranks, chunks, counts[i], mode);
            }
}
static void test_bits_threads(void) { check_all_bits(DTRAIN_LAUNCH_THREADS); }
static void test_bits_processes(void)
{
    for (uint32_t kind = 0; kind <= DTRAIN_PIPELINE_ZB_H1; kind++)
        check_bits(kind, 4, kind == DTRAIN_PIPELINE_INTERLEAVED ? 2 : 1, 8,
                   DTRAIN_LAUNCH_PROCESSES);
}

/* An axis of one rank needs no communicator. */
static void test_alone(void)
{
    static weights alone;
    job j = {DTRAIN_PIPELINE_1F1B, 1, 1, 7, 0, 0, 0, 0, FAILS, NULL};
    local *l = (local *)calloc(1, sizeof *l);
    if (!l) return;
    learn_alone(&alone, 7);
    for (uint32_t kind = 0; kind <= DTRAIN_PIPELINE_ZB_H1; kind++) {
        memset(l, 0, sizeof *l);
        j.kind = kind;
        l->j = &j;
        draw_weights(&l->model);
        CHECK_MSG(run_steps(l, NULL) == DTRAIN_OK, "%s", dtrain_last_error());
        CHECK(memcmp(&alone, &l->model, sizeof alone) == 0);
    }
    j.kind = DTRAIN_PIPELINE_GPIPE, j.bad_act = B, j.bad_micro = 3;
    CHECK(run_steps(l, NULL) == DTRAIN_ERROR_DATA);
    CHECK_MSG(
        strstr(dtrain_last_error(), "stage 0 of 1, BACKWARD of micro-batch 3: the hamster ate it"),
        "%s", dtrain_last_error());
    free(l);
}

/* ---- errors ---- */

static void check_misfortune(job j, uint32_t mode, uint32_t timeout_ms)
{
    char place[100], heard[160], own[40];
    dtrain_launch_desc desc = ranks_desc(j.ranks, mode);
    desc.timeout_ms = timeout_ms ? timeout_ms : desc.timeout_ms;
    j.page = (page *)ranks_shared(sizeof(page));
    snprintf(place, sizeof place,
             "stage %d of %d, %s of micro-batch %d:", j.bad_chunk * j.ranks + j.bad_rank,
             j.ranks * j.chunks, acts[j.bad_act], j.bad_micro);
    snprintf(heard, sizeof heard, "rank %d had to give up: %s", j.bad_rank, place);
    const double begin = test_seconds();
    CHECK(ranks_launch(&desc, rank_main, &j, NULL) != DTRAIN_OK);
    for (int r = 0; r < j.ranks; r++) {
        const char *text = j.page->text[r];
        if (j.how == DIES && r == j.bad_rank) continue;
        CHECK_MSG(j.page->result[r] != DTRAIN_OK, "%s %s rank %d has no error", kinds[j.kind],
                  place, r);
        CHECK_MSG(j.page->when[r] - begin < RANKS_SOON, "%s rank %d took %.1f s", place, r,
                  j.page->when[r] - begin);
        if (j.how == FAILS)
            CHECK_MSG(strstr(text, place) && strstr(text, "the hamster ate it"),
                      "%s rank %d: \"%s\", expected: %s", kinds[j.kind], r, text, place);
        snprintf(own, sizeof own, "rank %d: stage ", r); /* the others say, too, where they were */
        if (j.how == FAILS && r != j.bad_rank)
            CHECK_MSG(strstr(text, own) && strstr(text, heard),
                      "%s rank %d: \"%s\", expected its place and: %s", kinds[j.kind], r, text,
                      heard);
        else
            CHECK_MSG(strstr(text, "stage ") && strstr(text, " of micro-batch "),
                      "%s, %s rank %d: \"%s\"", kinds[j.kind], place, r, text);
        if (getenv("SHOW")) fprintf(stderr, "%d: %s\n", r, text);
    }
    munmap(j.page, sizeof(page));
}

/* Each kind of action of some rank in the middle. */
static void test_failing_actions(void)
{
    for (uint32_t kind = 0; kind <= DTRAIN_PIPELINE_ZB_H1; kind++)
        for (uint32_t act = F; act <= STEP; act++) {
            const bool splits = kind == DTRAIN_PIPELINE_ZB_H1;
            const int chunks = kind == DTRAIN_PIPELINE_INTERLEAVED ? 2 : 1;
            const job j = {kind,
                           3,
                           chunks,
                           5,
                           1,
                           chunks - 1 - (act == STEP && chunks > 1),
                           act < REDUCE ? 3 : 4,
                           act,
                           FAILS,
                           NULL};
            if (act == W && !splits) continue;
            check_misfortune(j, act % 2 ? DTRAIN_LAUNCH_THREADS : DTRAIN_LAUNCH_PROCESSES, 0);
        }
}

static void stalled_rank(int number)
{
    static const uint32_t where[] = {F, B, W, SEND, RECEIVE_GRADIENT};
    const job j = {DTRAIN_PIPELINE_ZB_H1, 3, 1, 5, 1, 0, 2, where[number], STALLS, NULL};
    check_misfortune(j, DTRAIN_LAUNCH_THREADS, RANKS_SHORT_MS);
}

static void test_stalled_rank(void) { test_cases(5, stalled_rank); }

static void test_dead_rank(void)
{
    static const uint32_t where[] = {F, B, SEND_GRADIENT, RECEIVE};
    for (size_t i = 0; i < sizeof where / sizeof *where; i++) {
        const job j = {
            (uint32_t)i, 3,   i == DTRAIN_PIPELINE_INTERLEAVED ? 2 : 1, 5, 1, 0, 2, where[i],
            DIES,        NULL};
        check_misfortune(j, DTRAIN_LAUNCH_PROCESSES, 0);
    }
}

static void test_arguments(void)
{
    const dtrain_pipeline_work none = {NULL, NULL, NULL}, work = {compute, part, NULL};
    dtrain_pipeline_schedule *s = NULL;
    CHECK(dtrain_pipeline_create(NULL, 2, 2, &s) == DTRAIN_OK);
    CHECK(dtrain_pipeline_run(s, NULL, &none) == DTRAIN_ERROR_ARGUMENT);
    CHECK(dtrain_pipeline_run(NULL, NULL, &work) == DTRAIN_ERROR_ARGUMENT);
    CHECK(dtrain_pipeline_run(s, NULL, &work) == DTRAIN_ERROR_ARGUMENT);
    CHECK_MSG(
        strstr(dtrain_last_error(), "the schedule is for 2 ranks, and the communicator has 1"),
        "%s", dtrain_last_error());
    dtrain_pipeline_destroy(s);
}

/* ---- what is passed on ---- */

enum {
    LONG = 50000,
    INBOXES = 24
}; /* floats: more than a channel holds, so that messages stay where they are */
typedef struct passing {
    int rank, wrong;
    float *memory, *at[2 * INBOXES]; /* of slots, then of inboxes */
} passing;

/* Stage 0 makes the number of its micro-batch, the others pass it on from their inboxes; rank 1 is late to send on one
 * micro-batch, and rank 2 to take it. */
static dtrain_result pass_compute(void *user, const action *a)
{
    passing *l = (passing *)user;
    if (a->act == F && l->rank == 1 && a->micro_batch == 4 && a->chunk == 1) ranks_sleep_us(100000);
    if (a->act == B && l->rank == 2 && a->micro_batch == 1 && a->chunk == 0) ranks_sleep_us(500000);
    for (int i = 0; i < LONG && a->act == F; i++)
        if (a->inbox < 0) l->at[a->slot][i] = (float)a->micro_batch;
        else l->wrong += l->at[INBOXES + a->inbox][i] != (float)a->micro_batch;
    return DTRAIN_OK;
}
static dtrain_result pass_part(void *user, const action *a, size_t i, dtrain_pipeline_part *out)
{
    const passing *l = (const passing *)user;
    if (i > 0 || a->act == SEND_GRADIENT || a->act == RECEIVE_GRADIENT) return DTRAIN_OK;
    out->address = l->at[a->inbox < 0 ? a->slot : INBOXES + a->inbox];
    out->count = LONG, out->dtype = DTRAIN_DTYPE_F32;
    return DTRAIN_OK;
}
static int pass_rank(dtrain_world *world, void *user)
{
    const dtrain_pipeline_desc desc = {DTRAIN_PIPELINE_INTERLEAVED, 2, NULL};
    passing l = {dtrain_world_rank(world), 0, NULL, {NULL}};
    const dtrain_pipeline_work work = {pass_compute, pass_part, &l};
    const size_t bytes = sizeof(float) * 2 * INBOXES * LONG;
    dtrain_comm *comm = dtrain_world_comm(world);
    dtrain_pipeline_schedule *s;
    schedule_report report;
    void *memory;
    (void)user;
    RANKS_TRY(dtrain_pipeline_create(&desc, 4, 12, &s));
    RANKS_TRY(schedule_check(s, NULL, l.rank, &report));
    if (!CHECK(report.slots <= INBOXES && report.inboxes <= INBOXES)) return 1;
    RANKS_TRY(dtrain_comm_alloc(comm, bytes, &memory));
    for (int i = 0; i < 2 * INBOXES; i++) l.at[i] = (float *)memory + (size_t)i * LONG;
    RANKS_TRY(dtrain_pipeline_run(s, comm, &work));
    CHECK_MSG(l.wrong == 0, "rank %d has read %d wrong numbers", l.rank, l.wrong);
    RANKS_TRY(dtrain_barrier(comm));
    dtrain_comm_free(comm, memory, bytes);
    dtrain_pipeline_destroy(s);
    return 0;
}

/* A message lies in the inbox of a stage that passes it on, until it is taken; no gradient says that it was. */
static void test_passed_on(void)
{
    ranks_run(4, DTRAIN_LAUNCH_THREADS, pass_rank, NULL);
    ranks_run(4, DTRAIN_LAUNCH_PROCESSES, pass_rank, NULL);
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    RUN(test_arguments);
    RUN(test_alone);
    RUN(test_bits_threads);
    RUN(test_bits_processes);
    RUN_BESIDE(test_passed_on);
    RUN(test_failing_actions);
    RUN_BESIDE(test_stalled_rank);
    RUN(test_dead_rank);
    return test_summary();
}
