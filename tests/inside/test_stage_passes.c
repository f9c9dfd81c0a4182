/* test_stage_passes.c: stages of a model on tapes of their own, several passes at once.
 *
 * Random models are cut into stages at random units; each stage has a tape, and messages between them are copies.
 * Losses and gradients must have the bits of one tape that has the whole model and accumulates the same micro-
 * batches. */
#include "tape/stage_internal.h"
#include "device/device_internal.h"
#include "dtrain.h"
#include "test.h"
#include "device_table.h"

enum {
    UNITS = 9,
    PARAMS = 6 * UNITS + 2,
    ROWS = 12,
    WIDTH = 16,
    VOCAB = 23,
    MICROS = 6,
    STAGES = 8,
    MOST = 40000
};

typedef struct model {
    uint64_t seed, drawn;
    int units, param_count;
    uint32_t kind[UNITS];  /* of the layer in a unit */
    int skip_from[UNITS];  /* an earlier unit whose output is added; -1: none */
    uint32_t flags, every; /* of the tape, and of activation checkpointing */
    float dropout;
    dtrain_param params[PARAMS];
    float values[MOST], grads[MOST];
    int64_t count;
    int32_t tokens[ROWS], targets[ROWS];
    int variant; /* 1: reads a value, 2: other shapes in the second micro-batch, 3: the last unit is the first */
    int calls;
} model;

static uint32_t draw(model *m, uint32_t below)
{
    uint32_t random[4];
    dtrain__philox(m->seed, 77, m->drawn++, random);
    return random[0] % below;
}

static dtrain_param *declare(model *m, uint32_t unit, int64_t rows, int64_t columns)
{
    dtrain_param *p = &m->params[m->param_count++];
    p->name = "p";
    p->shape[0] = rows, p->shape[1] = columns;
    p->count = rows * (columns ? columns : 1);
    p->unit = unit;
    p->value = m->values + m->count, p->grad = m->grads + m->count;
    for (int64_t i = 0; i < p->count; i++)
        p->value[i] =
            (columns ? 0 : 1) + 0.3f * dtrain_random_normal(3, m->seed, (uint64_t)(m->count + i));
    m->count += p->count;
    return p;
}

static void model_create(model *m, uint64_t seed)
{
    static const uint32_t flags[3] = {0, DTRAIN_TAPE_BF16, DTRAIN_TAPE_F16};
    memset(m, 0, sizeof *m);
    m->seed = seed;
    m->units = 2 + (int)draw(m, UNITS - 1);
    m->flags = draw(m, 2) ? flags[draw(m, 3)] : 0;
    m->every = draw(m, 3);
    m->dropout = draw(m, 2) ? 0.2f : 0;
    declare(m, 0, VOCAB, WIDTH);
    if (draw(m, 4) == 0) m->params[0].flags = DTRAIN_PARAM_FROZEN;
    for (int u = 1; u < m->units; u++) {
        const uint32_t unit = (uint32_t)u;
        m->kind[u] = draw(m, 4);
        m->skip_from[u] = draw(m, 3) ? -1 : (int)draw(m, unit);
        declare(m, unit, WIDTH, 0), declare(m, unit, WIDTH, 0);
        declare(m, unit, 2 * WIDTH, WIDTH), declare(m, unit, WIDTH, 2 * WIDTH);
        declare(m, unit, 2 * WIDTH, 0), declare(m, unit, WIDTH, 0);
        for (int p = 0, some = draw(m, 3) == 0; p < 6 && some; p++)
            if (draw(m, 2)) m->params[m->param_count - 6 + p].flags = DTRAIN_PARAM_FROZEN;
    }
    declare(m, (uint32_t)m->units - 1, VOCAB, WIDTH);
}

static void batch_fetch(model *m, int micro)
{
    for (int i = 0; i < ROWS; i++) {
        m->tokens[i] = (i * 7 + 5 * micro) % VOCAB;
        m->targets[i] = (i + micro) % 4 == 3 ? -1 : (i * 11 + micro) % VOCAB;
    }
}

static dtrain_tensor *layer(model *m, dtrain_tape *t, int u, dtrain_param *p, dtrain_tensor *x)
{
    dtrain_tensor *h = dtrain_layernorm(t, x, NULL, &p[0], &p[1], 1e-5f);
    h = dtrain_linear(t, h, &p[2], &p[4],
                      m->kind[u] == 0 ? DTRAIN_ACTIVATION_RELU : DTRAIN_ACTIVATION_GELU);
    if (m->kind[u] == 1) h = dtrain_scale(t, h, 0.5f);
    h = dtrain_dropout(t, dtrain_linear(t, h, &p[3], &p[5], DTRAIN_ACTIVATION_NONE), m->dropout);
    return m->kind[u] == 2 ? h : dtrain_add(t, x, h);
}

static dtrain_tensor *model_loss(dtrain_tape *t, void *user)
{
    model *m = (model *)user;
    const int64_t rows = m->variant == 2 && m->calls++ > 1 ? ROWS / 2 : ROWS;
    dtrain_tensor *made[UNITS],
        *x = dtrain_tape_input(t, DTRAIN_DTYPE_I32, 1, &rows, m->tokens, false);
    float value;
    dtrain_tape_unit(t, 0);
    made[0] = x = dtrain_dropout(t, dtrain_embedding(t, x, &m->params[0], NULL), m->dropout);
    for (int u = 1; u < m->units; u++) {
        dtrain_tape_unit(t, (uint32_t)(m->variant == 3 && u == m->units - 1 ? 0 : u));
        if (m->skip_from[u] >= 0) x = dtrain_add(t, x, made[m->skip_from[u]]);
        made[u] = x = layer(m, t, u, &m->params[1 + 6 * (u - 1)], x);
        if (m->variant == 1 && u == 1)
            dtrain__tape_stick(t, dtrain_tensor_read(t, x, &value, NULL));
    }
    x = dtrain_linear(t, x, &m->params[m->param_count - 1], NULL, DTRAIN_ACTIVATION_NONE);
    return dtrain_cross_entropy(
        t, x, dtrain_tape_input(t, DTRAIN_DTYPE_I32, 1, &rows, m->targets, false), 0, 0.1f);
}

static dtrain_device *cpu(void)
{
    dtrain_device_desc desc;
    dtrain_device *device = NULL;
    memset(&desc, 0, sizeof desc);
    desc.thread_count = 1;
    CHECK(dtrain_device_create(device_table("cpu"), &desc, &device) == DTRAIN_OK);
    return device;
}

static dtrain_tape *open_tape(const model *m, dtrain_device *device)
{
    dtrain_tape *tape = NULL;
    CHECK(dtrain_tape_create(NULL, NULL, device, &tape) == DTRAIN_OK);
    CHECK(dtrain_tape_recompute(tape, m->every, 0) == DTRAIN_OK);
    return tape;
}

static void forget_gradients(model *m)
{
    for (int i = 0; i < m->param_count; i++) m->params[i].state.grad_written = false;
    for (int i = 0; i < MOST; i++) m->grads[i] = 7; /* what nobody writes shows */
}

/* ---- one tape ---- */

static void run_whole(model *m, dtrain_device *device, float *losses)
{
    dtrain_tape *tape = open_tape(m, device);
    forget_gradients(m);
    for (int micro = 0; micro < MICROS; micro++) {
        batch_fetch(m, micro);
        CHECK(dtrain_tape_begin(tape, m->flags, (uint64_t)(40 + micro)) == DTRAIN_OK);
        dtrain_tensor *loss = model_loss(tape, m);
        CHECK_MSG(dtrain_tape_backward(tape, loss, 0.25f) == DTRAIN_OK, "%s", dtrain_last_error());
        CHECK(dtrain_tensor_read(tape, loss, &losses[micro], NULL) == DTRAIN_OK);
    }
    dtrain_tape_destroy(tape);
}

/* ---- stages: a tape for each `ranks`-th of them ---- */

typedef struct line {
    model *m;
    int stages, ranks, live; /* micro-batches under way */
    bool halves;
    int32_t units[2 * UNITS];
    dtrain__stage_map maps[STAGES];
    dtrain_tape *tapes[STAGES];
    dtrain_tensor *losses[MICROS];
    dtrain_result result;
} line;

static uint32_t slot_of(const line *l, int stage, int micro)
{
    return (uint32_t)(stage / l->ranks * l->live + micro % l->live);
}

static void line_create(line *l, model *m, dtrain_device *device, int stages, int ranks, int live)
{
    memset(l, 0, sizeof *l);
    l->m = m, l->stages = stages, l->ranks = ranks, l->live = live;
    for (int u = 0; u < m->units; u++) {
        l->units[2 * u] = u;
        l->units[2 * u + 1] = u < stages ? u : stages - 1; /* late stages have most */
    }
    for (int r = 0; r < ranks; r++) {
        l->tapes[r] = open_tape(m, device);
        const uint32_t slots = (uint32_t)(live * ((stages + ranks - 1) / ranks));
        l->maps[r].stages = stages;
        l->maps[r].ranks = ranks, l->maps[r].rank = r;
        l->maps[r].units = l->units;
        l->maps[r].unit_count = (size_t)m->units;
        CHECK(dtrain__stages_create(l->tapes[r], &l->maps[r], slots, slots) == DTRAIN_OK);
        dtrain_result result =
            dtrain__stage_begin(l->tapes[r], 0, 0, DTRAIN__SURVEY, -1, m->flags, 0);
        if (result == DTRAIN_OK) model_loss(l->tapes[r], m);
        if (result == DTRAIN_OK) result = dtrain__stage_end(l->tapes[r]);
        if (result != DTRAIN_OK) l->result = result;
    }
}

static void line_destroy(line *l)
{
    for (int r = 0; r < l->ranks; r++) dtrain_tape_destroy(l->tapes[r]);
}

/* Copy what crosses from stage `from` to the next one, or its gradients back. */
static void carry(line *l, int micro, int from, bool gradient)
{
    const int32_t first = (int32_t)slot_of(l, from, micro),
                  next = (int32_t)slot_of(l, from + 1, micro);
    const dtrain_pipeline_action send = {gradient ? DTRAIN_PIPELINE_ACT_SEND_GRADIENT
                                                  : DTRAIN_PIPELINE_ACT_SEND,
                                         0,
                                         micro,
                                         -1,
                                         gradient ? next : first,
                                         -1};
    const dtrain_pipeline_action receive = {gradient ? DTRAIN_PIPELINE_ACT_RECEIVE_GRADIENT
                                                     : DTRAIN_PIPELINE_ACT_RECEIVE,
                                            0,
                                            micro,
                                            -1,
                                            first,
                                            next};
    const int sender = gradient ? from + 1 : from, receiver = gradient ? from : from + 1;
    for (size_t i = 0;; i++) {
        dtrain_pipeline_part ours = {NULL, 0, DTRAIN_DTYPE_F32},
                             theirs = {NULL, 0, DTRAIN_DTYPE_F32};
        CHECK(dtrain__stage_part(l->tapes[sender % l->ranks], sender, &send, false, i, &ours) ==
              DTRAIN_OK);
        CHECK(dtrain__stage_part(l->tapes[receiver % l->ranks], receiver, &receive, false, i,
                                 &theirs) == DTRAIN_OK);
        CHECK(ours.count == theirs.count && ours.dtype == theirs.dtype);
        if (!ours.count || ours.count != theirs.count) return;
        CHECK(ours.address != theirs.address);
        memcpy(theirs.address, ours.address, ours.count * dtrain_dtype_bytes(ours.dtype));
    }
}

static void forward(line *l, int micro)
{
    for (int s = 0; s < l->stages && l->result == DTRAIN_OK; s++) {
        dtrain_tape *tape = l->tapes[s % l->ranks];
        const uint32_t slot = slot_of(l, s, micro);
        if (s) carry(l, micro, s - 1, false);
        batch_fetch(l->m,
                    s < l->ranks
                        ? micro
                        : micro + 1); /* later passes of a tape share the first one's inputs */
        l->result =
            dtrain__stage_begin(tape, slot, slot_of(l, s % l->ranks, micro), s,
                                s ? (int32_t)slot : -1, l->m->flags, (uint64_t)(40 + micro));
        dtrain_tensor *loss = model_loss(tape, l->m);
        if (l->result == DTRAIN_OK) l->result = dtrain__stage_end(tape);
        if (s == l->stages - 1) l->losses[micro] = loss;
    }
}

static void backward(line *l, int micro, float *loss)
{
    for (int s = l->stages - 1; s >= 0 && l->result == DTRAIN_OK; s--) {
        dtrain_tape *tape = l->tapes[s % l->ranks];
        const bool last = s == l->stages - 1;
        const uint32_t slot = slot_of(l, s, micro);
        if (!last) carry(l, micro, s, true);
        l->result = dtrain__stage_backward(tape, slot, last ? l->losses[micro] : NULL, 0.25f, false,
                                           l->halves);
        CHECK_MSG(l->result == DTRAIN_OK, "stage %d: %s", s, dtrain_last_error());
        if (last) CHECK(dtrain_tensor_read(tape, l->losses[micro], loss, NULL) == DTRAIN_OK);
    }
}

/* Run the second halves of a micro-batch's backwards. */
static void weigh(line *l, int micro)
{
    for (int s = l->stages - 1; s >= 0 && l->halves; s--)
        CHECK(dtrain__stage_weights(l->tapes[s % l->ranks], slot_of(l, s, micro)) == DTRAIN_OK);
}

/* Run micro-batches with `live` of them under way; the second half of a backward comes when its slot is needed. */
static void run_line(line *l, float *losses)
{
    forget_gradients(l->m);
    for (int r = 0; r < l->ranks; r++) dtrain__stage_reset(l->tapes[r]);
    for (int micro = 0; micro < MICROS + l->live; micro++) {
        const int ahead = l->halves ? (l->live + 1) / 2 : l->live, back = micro - ahead,
                  ends = micro - l->live;
        if (back >= 0 && back < MICROS) backward(l, back, &losses[back]);
        if (ends >= 0 && ends < MICROS) weigh(l, ends);
        if (micro < MICROS) forward(l, micro);
    }
}

static void check_model(uint64_t seed)
{
    static model m;
    static float grads[MOST];
    static line l;
    float losses[MICROS], staged[MICROS];
    dtrain_device *device = cpu();
    model_create(&m, seed);
    run_whole(&m, device, losses);
    memcpy(grads, m.grads, sizeof grads);
    const int stages = 1 + (int)draw(&m, (uint32_t)(m.units < STAGES ? m.units : STAGES));
    const int ranks = stages == 1 ? 1 : 2 + (int)draw(&m, (uint32_t)stages - 1); /* of neighbours */
    line_create(&l, &m, device, stages, ranks, 1 + (int)draw(&m, MICROS));
    l.halves = draw(&m, 2);
    CHECK_MSG(l.result == DTRAIN_OK, "seed %llu: %s", (unsigned long long)seed,
              dtrain_last_error());
    uint64_t allocations[STAGES] = {0};
    for (int step = 0; step < 3; step++) {
        run_line(&l, staged);
        CHECK_MSG(memcmp(losses, staged, sizeof losses) == 0 &&
                      memcmp(grads, m.grads, sizeof grads) == 0,
                  "seed %llu, %d units, %d stages on %d tapes, %d under way, halves %d, flags %u, "
                  "every %u, step %d: loss %.9g, "
                  "expected %.9g",
                  (unsigned long long)seed, m.units, stages, ranks, l.live, l.halves, m.flags,
                  m.every, step, (double)staged[0], (double)losses[0]);
        for (int r = 0; r < ranks; r++) {
            dtrain_tape_info info;
            dtrain_tape_query(l.tapes[r], &info);
            CHECK(step == 0 || info.block_allocations == allocations[r]);
            allocations[r] = info.block_allocations;
        }
    }
    line_destroy(&l);
    CHECK(device->allocated_bytes == 0);
    dtrain_device_destroy(device);
}

static void test_random_models(void)
{
    const int count = test_full() ? 3000 : 300;
    for (int i = 0; i < count; i++) check_model(1000 + (uint64_t)i);
    check_model(2522); /* in halves, a layer whose bias has a gradient and whose input wants none */
}

/* A stage keeps its own operations' memory alone. */
static void test_memory(void)
{
    static model m;
    static line l;
    float losses[MICROS];
    dtrain_device *device = cpu();
    dtrain_tape_info whole, part;
    for (uint64_t seed = 1; m.units < 8 || m.flags || m.every; seed++) model_create(&m, seed);
    run_whole(&m, device, losses);
    dtrain_tape *tape = open_tape(&m, device);
    CHECK(dtrain_tape_begin(tape, 0, 1) == DTRAIN_OK && model_loss(tape, &m));
    dtrain_tape_query(tape, &whole);
    dtrain_tape_destroy(tape);
    line_create(&l, &m, device, 8, 8, 2);
    run_line(&l, losses);
    dtrain_tape_query(l.tapes[3], &part);
    CHECK_MSG(part.activation_bytes < whole.activation_bytes / 2, "%llu of %llu bytes",
              (unsigned long long)part.activation_bytes,
              (unsigned long long)whole.activation_bytes);
    line_destroy(&l);
    dtrain_device_destroy(device);
}

static void check_refused(int variant, const char *sentence)
{
    static model m;
    static line l;
    dtrain_device *device = cpu();
    model_create(&m, 5);
    m.variant = variant;
    line_create(&l, &m, device, 2, 2, 2);
    if (l.result == DTRAIN_OK) forward(&l, 0);
    if (l.result == DTRAIN_OK) forward(&l, 1);
    CHECK_MSG(l.result == DTRAIN_ERROR_USAGE && strstr(dtrain_last_error(), sentence), "%d: %s",
              (int)l.result, dtrain_last_error());
    line_destroy(&l);
    dtrain_device_destroy(device);
}

static void test_refused(void)
{
    check_refused(1, "a loss that reads values cannot be cut into stages");
    check_refused(2, "micro-batches of a step over a pipeline have the same shapes");
    check_refused(3, "use units in the order in which their first parameters are registered");
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    RUN(test_random_models);
    RUN(test_memory);
    RUN(test_refused);
    return test_summary();
}
