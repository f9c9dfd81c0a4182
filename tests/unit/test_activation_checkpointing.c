/* test_activation_checkpointing.c: activation checkpointing, dtrain_cast and fp16 autocast.
 *
 * A small GPT is the model, written as tools/train_gpt/train_gpt.c writes it: the residual stream and what
 * is still to be added to it cross every unit. Whatever is dropped and made again, losses and
 * gradients must keep all their bits. */
#include "test.h"
#include "packed_attention.h"
#include "dtrain.h"
#include "allocator.h"
#include "naive_device.h"
#include "tape_error.h"

enum { LAYERS_MAX = 12, PARAMS_MAX = 4 + 12 * LAYERS_MAX };

/* ---- The model ---------------------------------------------------------------------------------*/

typedef struct gpt {
    int64_t layers, heads, channels, sequence, batch, vocab;
    float dropout;
    bool mean; /* the loss is the mean of the logits */
    int param_count;
    int64_t count; /* elements of all parameters */
    dtrain_param params[PARAMS_MAX];
    float *memory; /* values, then gradients */
    int32_t *tokens, *targets;
} gpt;

static dtrain_param *declare(gpt *m, const char *name, int64_t rows, int64_t columns)
{
    dtrain_param *p = &m->params[m->param_count++];
    memset(p, 0, sizeof *p);
    p->name = name;
    p->shape[0] = rows;
    p->shape[1] = columns;
    p->count = rows * (columns ? columns : 1);
    m->count += p->count;
    return p;
}

static void gpt_fill(gpt *m)
{
    int64_t at = 0, rows = m->batch * m->sequence;
    m->memory = (float *)malloc((size_t)m->count * 2 * sizeof(float));
    m->tokens = (int32_t *)malloc((size_t)rows * 2 * sizeof(int32_t));
    m->targets = m->tokens + rows;
    for (int64_t i = 0; i < m->count; i++)
        m->memory[i] = 0.2f * dtrain_random_normal(3, 1, (uint64_t)i);
    for (int i = 0; i < m->param_count; i++) {
        m->params[i].value = m->memory + at;
        m->params[i].grad = m->memory + m->count + at;
        at += m->params[i].count;
    }
    for (int64_t i = 0; i < rows; i++) {
        m->tokens[i] = (int32_t)(i * 7 % m->vocab);
        m->targets[i] = i % 5 == 3 ? -1 : (int32_t)(i * 11 % m->vocab);
    }
}

/* Embeddings; of each block 12 tensors; the last normalisation. The classifier is the token
 * embedding. */
static gpt gpt_create(int64_t layers, int64_t channels, int64_t sequence)
{
    gpt m;
    memset(&m, 0, sizeof m);
    m.layers = layers, m.heads = 4, m.channels = channels;
    m.sequence = sequence, m.batch = 3, m.vocab = 61;
    m.dropout = 0.1f;
    const int64_t c = channels;
    declare(&m, "wte", m.vocab, c);
    declare(&m, "wpe", sequence, c);
    for (int64_t l = 0; l < layers; l++) {
        declare(&m, "ln1.weight", c, 0), declare(&m, "ln1.bias", c, 0);
        declare(&m, "qkv.weight", 3 * c, c), declare(&m, "qkv.bias", 3 * c, 0);
        declare(&m, "proj.weight", c, c), declare(&m, "proj.bias", c, 0);
        declare(&m, "ln2.weight", c, 0), declare(&m, "ln2.bias", c, 0);
        declare(&m, "fc.weight", 4 * c, c), declare(&m, "fc.bias", 4 * c, 0);
        declare(&m, "fcproj.weight", c, 4 * c), declare(&m, "fcproj.bias", c, 0);
    }
    declare(&m, "lnf.weight", c, 0), declare(&m, "lnf.bias", c, 0);
    gpt_fill(&m);
    return m;
}

static void gpt_free(gpt *m)
{
    free(m->memory);
    free(m->tokens);
}

static dtrain_tensor *block(dtrain_tape *t, const gpt *m, dtrain_param *p, dtrain_tensor **x,
                            dtrain_tensor *h)
{
    h = dtrain_layernorm(t, h, x, &p[0], &p[1], 1e-5f);
    h = dtrain_linear(t, h, &p[2], &p[3], DTRAIN_ACTIVATION_NONE);
    h = causal_attention(t, h, m->sequence, m->heads);
    h = dtrain_linear(t, h, &p[4], &p[5], DTRAIN_ACTIVATION_NONE);
    h = dtrain_layernorm(t, dtrain_dropout(t, h, m->dropout), x, &p[6], &p[7], 1e-5f);
    h = dtrain_linear(t, h, &p[8], &p[9], DTRAIN_ACTIVATION_GELU);
    h = dtrain_linear(t, h, &p[10], &p[11], DTRAIN_ACTIVATION_NONE);
    return dtrain_dropout(t, h, m->dropout);
}

static dtrain_tensor *gpt_logits(dtrain_tape *t, gpt *m)
{
    const int64_t shape[2] = {m->batch, m->sequence};
    dtrain_param *p = m->params;
    dtrain_tensor *h, *x = NULL;
    h = dtrain_tape_input(t, DTRAIN_DTYPE_I32, 2, shape, m->tokens, false);
    dtrain_tape_unit(t, 0);
    h = dtrain_dropout(t, dtrain_embedding(t, h, &p[0], &p[1]), m->dropout);
    for (int64_t l = 0; l < m->layers; l++) {
        dtrain_tape_unit(t, (uint32_t)l + 1);
        h = block(t, m, &p[2 + 12 * l], &x, h);
    }
    dtrain_tape_unit(t, (uint32_t)m->layers + 1);
    p += 2 + 12 * m->layers;
    h = dtrain_layernorm(t, h, &x, &p[0], &p[1], 1e-5f);
    return dtrain_linear(t, h, m->params, NULL, DTRAIN_ACTIVATION_NONE);
}

static dtrain_tensor *gpt_loss(dtrain_tape *t, gpt *m)
{
    const int64_t rows = m->batch * m->sequence;
    dtrain_tensor *logits = gpt_logits(t, m);
    if (m->mean) return dtrain_mean(t, logits);
    return dtrain_cross_entropy(
        t, logits, dtrain_tape_input(t, DTRAIN_DTYPE_I32, 1, &rows, m->targets, false), 0, 0);
}

static void forget_gradients(gpt *m)
{
    for (int i = 0; i < m->param_count; i++) m->params[i].state.grad_written = false;
}

/* ---- Devices and tapes -------------------------------------------------------------------------*/

static dtrain_device *open_device(const dtrain_device_ops *ops, uint32_t threads)
{
    dtrain_device_desc desc;
    dtrain_device *device = NULL;
    memset(&desc, 0, sizeof desc);
    desc.thread_count = threads;
    CHECK_MSG(dtrain_device_create(ops, &desc, &device) == DTRAIN_OK, "%s", dtrain_last_error());
    return device;
}

static dtrain_tape *open_tape(dtrain_device *device)
{
    dtrain_tape *tape = NULL;
    CHECK(dtrain_tape_create(NULL, NULL, device, &tape) == DTRAIN_OK);
    return tape;
}

static dtrain_tape_info query(const dtrain_tape *tape)
{
    dtrain_tape_info info;
    dtrain_tape_query(tape, &info);
    return info;
}

/* ---- Bits --------------------------------------------------------------------------------------*/

/* What a run leaves: the losses of two micro-batches and of the evaluations between them, and the
 * gradients. */
typedef struct outcome {
    float losses[4];
    float *gradients;
} outcome;

static float evaluate(dtrain_tape *tape, gpt *m, uint32_t flags)
{
    float value = NAN;
    dtrain_tape_begin(tape, flags | DTRAIN_TAPE_NO_GRAD, 9);
    CHECK_MSG(dtrain_tensor_read(tape, gpt_loss(tape, m), &value, NULL) == DTRAIN_OK, "%s",
              dtrain_last_error());
    return value;
}

static void run(dtrain_tape *tape, gpt *m, uint32_t flags, outcome *out)
{
    const size_t bytes = (size_t)m->count * sizeof(float);
    forget_gradients(m);
    for (uint64_t micro = 0; micro < 2; micro++) {
        dtrain_tape_begin(tape, flags, 5 + micro);
        dtrain_tensor *loss = gpt_loss(tape, m);
        CHECK_MSG(dtrain_tape_backward(tape, loss, 0.5f) == DTRAIN_OK, "%s", dtrain_last_error());
        CHECK(dtrain_tensor_read(tape, loss, &out->losses[2 * micro], NULL) == DTRAIN_OK);
        out->losses[2 * micro + 1] = evaluate(tape, m, flags);
    }
    out->gradients = (float *)malloc(bytes);
    memcpy(out->gradients, m->memory + m->count, bytes);
}

static void check_same(const gpt *m, const outcome *a, const outcome *b, const char *what)
{
    CHECK_MSG(memcmp(a->losses, b->losses, sizeof a->losses) == 0,
              "%s: losses %.9g %.9g %.9g %.9g, expected %.9g %.9g %.9g %.9g", what,
              (double)a->losses[0], (double)a->losses[1], (double)a->losses[2],
              (double)a->losses[3], (double)b->losses[0], (double)b->losses[1],
              (double)b->losses[2], (double)b->losses[3]);
    CHECK(isfinite(a->losses[0]) && a->losses[0] != 0);
    const float *x = a->gradients, *y = b->gradients;
    for (int i = 0; i < m->param_count; i++) {
        const dtrain_param *p = &m->params[i];
        CHECK_MSG(memcmp(x, y, (size_t)p->count * sizeof(float)) == 0,
                  "%s: the gradient of %s (parameter %d) differs", what, p->name, i);
        x += p->count, y += p->count;
    }
}

/* One tape for every setting, as a program would change it between steps. */
static void check_settings(gpt *m, dtrain_device *device, uint32_t flags)
{
    static const uint32_t masks[] = {0, 1, 2, 4, 8, 3, 5, 10, 12, 14, 7};
    dtrain_tape *tape = open_tape(device);
    outcome plain, dropped;
    char what[80];
    run(tape, m, flags, &plain);
    CHECK(query(tape).recomputed_count == 0);
    for (uint32_t every = 1; every <= 3; every++)
        for (size_t i = 0; i < sizeof masks / sizeof *masks; i++) {
            CHECK(dtrain_tape_recompute(tape, every, masks[i]) == DTRAIN_OK);
            run(tape, m, flags, &dropped);
            snprintf(what, sizeof what, "flags %u, every %u, operations %#x", flags, every,
                     masks[i]);
            check_same(m, &dropped, &plain, what);
            free(dropped.gradients);
        }
    CHECK(dtrain_tape_recompute(tape, 0, 0) == DTRAIN_OK);
    run(tape, m, flags, &dropped);
    check_same(m, &dropped, &plain, "off again");
    free(dropped.gradients);
    free(plain.gradients);
    dtrain_tape_destroy(tape);
}

static void check_bits(uint32_t threads, bool mean)
{
    const uint32_t flags[3] = {0, DTRAIN_TAPE_BF16, DTRAIN_TAPE_F16};
    gpt m = gpt_create(5, 32, 8);
    dtrain_device *device = open_device(device_table("cpu"), threads);
    m.mean = mean;
    for (int i = 0; i < 3; i++) check_settings(&m, device, flags[i]);
    CHECK(device->allocated_bytes == 0);
    dtrain_device_destroy(device);
    gpt_free(&m);
}

static void test_bits(void) { check_bits(1, false); }
static void test_bits_threads(void)
{
    check_bits(2, false);
    check_bits(3, false);
}
static void test_bits_mean(void) { check_bits(1, true); }

/* ---- What is made again ------------------------------------------------------------------------*/

static void test_recomputed(void)
{
    /* Five blocks; with every 1 the last one and the end are still there. Of a block: two norms,
     * qkv, attention, proj, dropout, fc; neither its last product nor the embedding, nor what is
     * only added to something that is kept. */
    static const struct {
        uint32_t every, ops;
        size_t calls;
    } cases[] = {{1, 0, 4 * 7}, {2, 0, 7},     {3, 0, 0},      {1, 1, 4 * 2},
                 {1, 2, 4 * 1}, {1, 4, 4 * 2}, {1, 8, 0},      {1, 9, 4 * 2},
                 {1, 3, 4 * 3}, {1, 6, 4 * 3}, {1, 12, 4 * 3}, {0, 15, 0}};
    gpt m = gpt_create(5, 32, 8);
    dtrain_device *device = open_device(device_table("cpu"), 1);
    dtrain_tape *tape = open_tape(device);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        CHECK(dtrain_tape_recompute(tape, cases[i].every, cases[i].ops) == DTRAIN_OK);
        dtrain_tape_begin(tape, 0, 1);
        CHECK(dtrain_tape_backward(tape, gpt_loss(tape, &m), 1) == DTRAIN_OK);
        CHECK_MSG(query(tape).recomputed_count == cases[i].calls,
                  "every %u, operations %#x: %zu calls made again, expected %zu", cases[i].every,
                  cases[i].ops, query(tape).recomputed_count, cases[i].calls);
    }
    dtrain_tape_destroy(tape);
    dtrain_device_destroy(device);
    gpt_free(&m);
}

/* ---- Memory ------------------------------------------------------------------------------------*/

static uint64_t planned_bytes(gpt *m, uint32_t flags, uint32_t every, uint32_t ops)
{
    dtrain_device *plan = open_device(device_table("plan"), 1);
    dtrain_tape *tape = open_tape(plan);
    CHECK(dtrain_tape_recompute(tape, every, ops) == DTRAIN_OK);
    dtrain_tape_begin(tape, flags, 1);
    CHECK_MSG(dtrain_tape_backward(tape, gpt_loss(tape, m), 1) == DTRAIN_OK, "%s",
              dtrain_last_error());
    const uint64_t bytes = query(tape).activation_bytes;
    dtrain_tape_destroy(tape);
    dtrain_device_destroy(plan);
    return bytes;
}

/* The plan says what is needed, nothing is allocated after the first step, and an evaluation needs
 * no more than a step. */
static void test_memory_as_planned(void)
{
    const uint32_t flags[3] = {0, DTRAIN_TAPE_BF16, DTRAIN_TAPE_F16};
    gpt m = gpt_create(5, 32, 8);
    dtrain_device *device = open_device(device_table("cpu"), 1);
    for (int i = 0; i < 3; i++)
        for (uint32_t every = 0; every <= 3; every++)
            for (uint32_t ops = 0; ops <= 15; ops += every ? 3 : 15) {
                dtrain_tape *tape = open_tape(device);
                uint64_t planned = planned_bytes(&m, flags[i], every, ops), allocations = 0;
                CHECK(dtrain_tape_recompute(tape, every, ops) == DTRAIN_OK);
                for (uint64_t step = 0; step < 3; step++) {
                    dtrain_tape_begin(tape, flags[i], step);
                    CHECK(dtrain_tape_backward(tape, gpt_loss(tape, &m), 1) == DTRAIN_OK);
                    if (step == 0) allocations = query(tape).block_allocations;
                    evaluate(tape, &m, flags[i]);
                }
                CHECK(query(tape).block_allocations == allocations);
                CHECK_MSG(query(tape).activation_bytes == planned,
                          "every %u, operations %#x: %llu bytes, planned %llu", every, ops,
                          (unsigned long long)query(tape).activation_bytes,
                          (unsigned long long)planned);
                CHECK(query(tape).activation_bytes + query(tape).gradient_bytes ==
                      device->allocated_bytes);
                dtrain_tape_destroy(tape);
            }
    dtrain_device_destroy(device);
    gpt_free(&m);
}

/* Blocks alone: what layers 3 to 12 add to the first two, less the rounded weights. */
static void test_memory_saved(void)
{
    for (uint32_t flags = 0; flags <= DTRAIN_TAPE_F16; flags += DTRAIN_TAPE_BF16) {
        gpt deep = gpt_create(12, 64, 32), shallow = gpt_create(2, 64, 32);
        const double whole = (double)planned_bytes(&deep, flags, 0, 0),
                     rounded = flags ? 2.0 * 12 * 64 * 64 : 0,
                     block = (whole - (double)planned_bytes(&shallow, flags, 0, 0)) / 10 - rounded;
        double before = whole;
        for (uint32_t every = 3; every >= 1; every--) {
            double bytes = (double)planned_bytes(&deep, flags, every, 0);
            CHECK_MSG(bytes < before, "every %u: %g bytes of %g", every, bytes, before);
            before = bytes;
        }
        CHECK_MSG(whole - before >= 0.6 * 12 * block, "saves %g of %g bytes of blocks",
                  whole - before, 12 * block);
        for (uint32_t ops = 1; ops <= 8; ops *= 2) {
            double bytes = (double)planned_bytes(&deep, flags, 1, ops);
            CHECK_MSG(bytes < whole && bytes > before, "operations %#x: %g bytes", ops, bytes);
        }
        gpt_free(&deep);
        gpt_free(&shallow);
    }
}

/* ---- Tensors that cross units ------------------------------------------------------------------*/

enum { WIDTH = 8, ROWS = 6 };

typedef struct chain {
    dtrain_param params[6];
    dtrain_param norm; /* frozen */
    float norm_value[WIDTH], values[6][WIDTH * WIDTH], grads[6][WIDTH * WIDTH], x[ROWS * WIDTH];
    int32_t targets[ROWS];
    dtrain_tensor *input;
} chain;

static void chain_create(chain *c)
{
    memset(c, 0, sizeof *c);
    for (int i = 0; i < 6; i++) {
        c->params[i].name = "w";
        c->params[i].shape[0] = c->params[i].shape[1] = WIDTH;
        c->params[i].count = WIDTH * WIDTH;
        c->params[i].value = c->values[i];
        c->params[i].grad = c->grads[i];
        for (int j = 0; j < WIDTH * WIDTH; j++)
            c->values[i][j] = 0.4f * dtrain_random_normal(8, (uint64_t)i, (uint64_t)j);
    }
    c->norm.name = "norm";
    c->norm.count = c->norm.shape[0] = WIDTH;
    c->norm.value = c->norm_value;
    c->norm.flags = DTRAIN_PARAM_FROZEN;
    for (int i = 0; i < ROWS * WIDTH; i++) c->x[i] = dtrain_random_normal(8, 9, (uint64_t)i);
    for (int i = 0; i < ROWS; i++) c->targets[i] = i % WIDTH;
}

static dtrain_tensor *chain_input(dtrain_tape *t, chain *c)
{
    const int64_t shape[2] = {ROWS, WIDTH};
    for (int i = 0; i < 6; i++) c->params[i].state.grad_written = false;
    c->input = dtrain_tape_input(t, DTRAIN_DTYPE_F32, 2, shape, c->x, true);
    return c->input;
}

/* A unit with four values in its region. */
static dtrain_tensor *layer(dtrain_tape *t, chain *c, uint32_t unit, dtrain_tensor *x)
{
    dtrain_tape_unit(t, unit);
    x = dtrain_linear(t, x, &c->params[unit], NULL, DTRAIN_ACTIVATION_GELU);
    return dtrain_linear(t, x, &c->params[unit], NULL, DTRAIN_ACTIVATION_RELU);
}

static dtrain_tensor *chain_loss(dtrain_tape *t, chain *c, dtrain_tensor *logits)
{
    const int64_t rows = ROWS;
    return dtrain_cross_entropy(
        t, logits, dtrain_tape_input(t, DTRAIN_DTYPE_I32, 1, &rows, c->targets, false), 0, 0);
}

/* A skip from unit 0 to unit 3; `pass`: handed on by the units between. */
static dtrain_tensor *skip_loss(dtrain_tape *t, chain *c, bool pass)
{
    dtrain_tensor *x = chain_input(t, c), *skip = layer(t, c, 0, x);
    x = layer(t, c, 1, x);
    if (pass) skip = dtrain_scale(t, skip, 1);
    x = layer(t, c, 2, x);
    if (pass) skip = dtrain_scale(t, skip, 1);
    x = layer(t, c, 3, x);
    return chain_loss(t, c, dtrain_add(t, x, skip));
}

/* The gradient of the sum lies on top of the sum, in unit 5's region, and is all that the first
 * layer's output gets at first: it may not stay there, for unit 3 uses the region too. */
static dtrain_tensor *in_place_loss(dtrain_tape *t, chain *c, bool pass)
{
    dtrain_tensor *first = layer(t, c, 0, chain_input(t, c)), *x = first;
    (void)pass;
    for (uint32_t unit = 1; unit <= 4; unit++) x = layer(t, c, unit, x);
    dtrain_tape_unit(t, 5);
    return chain_loss(t, c, dtrain_add(t, first, x));
}

/* Logits of one unit, loss in the next: the gradient overwrites the copy. Units come back, and the
 * loss is itself a dropped result. */
static dtrain_tensor *late_loss(dtrain_tape *t, chain *c, bool pass)
{
    dtrain_tensor *x = chain_input(t, c);
    (void)pass;
    for (uint32_t i = 0; i < 6; i++) x = layer(t, c, i % 3, x);
    dtrain_tape_unit(t, 0);
    x = dtrain_linear(t, x, &c->params[0], NULL, DTRAIN_ACTIVATION_GELU);
    x = dtrain_linear(t, x, &c->params[3], NULL, DTRAIN_ACTIVATION_NONE);
    dtrain_tape_unit(t, 3);
    return dtrain_scale(t, chain_loss(t, c, x), 2);
}

/* A product's backward reaches into the layer before only where that layer's values are: here it is
 * of the same unit, but of an earlier visit. (Two visits of unit 0 drop with every 2.) */
static dtrain_tensor *visits_loss(dtrain_tape *t, chain *c, bool pass)
{
    dtrain_tensor *x = chain_input(t, c), *y;
    (void)pass;
    for (uint32_t i = 0; i < 3; i++) {
        dtrain_tape_unit(t, 0);
        y = dtrain_linear(t, x, &c->params[0], NULL, DTRAIN_ACTIVATION_GELU);
        dtrain_tape_unit(t, 1);
        x = dtrain_linear(t, x, &c->params[1], NULL, DTRAIN_ACTIVATION_GELU);
        dtrain_tape_unit(t, 0);
        x = dtrain_add(t, x, dtrain_linear(t, y, &c->params[2], NULL, DTRAIN_ACTIVATION_GELU));
        dtrain_tape_unit(t, 2);
        x = dtrain_linear(t, x, &c->params[3], NULL, DTRAIN_ACTIVATION_GELU);
    }
    return chain_loss(t, c, x);
}

/* Nobody uses the normalisations, whose kernel makes the sums; and inputs of layers are not of the
 * type of autocast. */
static dtrain_tensor *sum_loss(dtrain_tape *t, chain *c, bool pass)
{
    dtrain_tensor *x = chain_input(t, c), *y, *sum;
    (void)pass;
    for (uint32_t i = 0; i < 5; i++) {
        y = layer(t, c, i, x);
        sum = x;
        dtrain_layernorm(t, y, &sum, &c->norm, NULL, 1e-5f);
        x = dtrain_linear(t, sum, &c->params[5], NULL, DTRAIN_ACTIVATION_NONE);
        x = dtrain_add(t, x,
                       dtrain_linear(t, dtrain_cast(t, x, DTRAIN_DTYPE_F32), &c->params[i], NULL,
                                     DTRAIN_ACTIVATION_GELU));
    }
    return chain_loss(t, c, x);
}

typedef dtrain_tensor *(*chain_fn)(dtrain_tape *, chain *, bool);

static void check_chain(const char *what, chain_fn build, uint32_t flags)
{
    static const uint32_t settings[][2] = {{0, 0}, {1, 0}, {1, 1}, {1, 8}, {1, 14},
                                           {2, 0}, {2, 1}, {3, 0}, {0, 0}};
    static float expected[6][WIDTH * WIDTH], x_expected[ROWS * WIDTH], x_grad[ROWS * WIDTH];
    static chain c;
    dtrain_device *device = open_device(device_table("cpu"), 1);
    dtrain_tape *tape = open_tape(device);
    float loss = 0, loss_expected = 0;
    chain_create(&c);
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++) {
        if (build == visits_loss && settings[i][0] == 1) continue; /* unit 0 too late for its own */
        CHECK(dtrain_tape_recompute(tape, settings[i][0], settings[i][1]) == DTRAIN_OK);
        memset(c.grads, 0, sizeof c.grads);
        dtrain_tape_begin(tape, flags, 1);
        dtrain_tensor *out = build(tape, &c, true);
        CHECK_MSG(dtrain_tape_backward(tape, out, 1) == DTRAIN_OK, "%s: %s", what,
                  dtrain_last_error());
        CHECK(dtrain_tensor_read(tape, out, i ? &loss : &loss_expected, NULL) == DTRAIN_OK);
        CHECK(dtrain_tensor_read(tape, c.input, NULL, i ? x_grad : x_expected) == DTRAIN_OK);
        if (i == 0) memcpy(expected, c.grads, sizeof expected);
        else
            CHECK_MSG(loss == loss_expected && !memcmp(expected, c.grads, sizeof expected) &&
                          !memcmp(x_expected, x_grad, sizeof x_grad),
                      "%s, flags %u: every %u, operations %#x: loss %g, expected %g, or gradients "
                      "differ",
                      what, flags, settings[i][0], settings[i][1], (double)loss,
                      (double)loss_expected);
    }
    dtrain_tape_destroy(tape);
    dtrain_device_destroy(device);
}

static void test_crossing(void)
{
    for (uint32_t flags = 0; flags <= DTRAIN_TAPE_F16; flags += DTRAIN_TAPE_BF16) {
        check_chain("skip", skip_loss, flags);
        check_chain("in place", in_place_loss, flags);
        check_chain("late loss", late_loss, flags);
        check_chain("visits", visits_loss, flags);
        check_chain("sum", sum_loss, flags);
    }
}

static void expect_error(dtrain_result result, dtrain_result code, const char *part,
                         const char *other)
{
    CHECK_MSG(result == code && strstr(dtrain_last_error(), part) &&
                  strstr(dtrain_last_error(), other),
              "expected %s with '%s' and '%s', got %s: %s", dtrain_result_text(code), part, other,
              dtrain_result_text(result), dtrain_last_error());
}

static void test_errors(void)
{
    static chain c;
    static float host[ROWS * WIDTH], before[ROWS * WIDTH];
    dtrain_device *device = open_device(device_table("cpu"), 1);
    dtrain_tape *tape = open_tape(device);
    const dtrain_result usage = DTRAIN_ERROR_USAGE, argument = DTRAIN_ERROR_ARGUMENT;
    chain_create(&c);
    expect_error(dtrain_tape_recompute(NULL, 1, 0), argument, "dtrain_tape_recompute", "NULL");
    expect_error(dtrain_tape_recompute(tape, 1, 16), argument, "unknown operations", "0x10");
    expect_error(dtrain_tape_begin(tape, DTRAIN_TAPE_BF16 | DTRAIN_TAPE_F16, 0), argument,
                 "dtrain_tape_begin", "at most one of DTRAIN_TAPE_BF16");
    expect_error(dtrain_tape_begin(tape, 8, 0), argument, "dtrain_tape_begin", "0x8");

    for (uint32_t flags = 0; flags <= DTRAIN_TAPE_NO_GRAD; flags++) {
        CHECK(dtrain_tape_recompute(tape, 1, 0) == DTRAIN_OK);
        dtrain_tape_begin(tape, flags, 1);
        CHECK(!skip_loss(tape, &c, false));
        expect_error(tape_error(tape), usage, "dtrain_add: a tensor made in unit 0",
                     "after unit 2 has overwritten it");
        dtrain_tape_begin(tape, flags, 1);
        CHECK(skip_loss(tape, &c, true) != NULL);
        CHECK(dtrain_tape_recompute(tape, 1, DTRAIN_RECOMPUTE_ATTENTION) == DTRAIN_OK);
        dtrain_tape_begin(tape, flags, 1);
        CHECK(skip_loss(tape, &c, false) != NULL);
        CHECK(dtrain_tape_recompute(tape, 3, 0) == DTRAIN_OK); /* unit 2 alone */
        dtrain_tape_begin(tape, flags, 1);
        CHECK(skip_loss(tape, &c, false) != NULL);
    }

    /* reading: in time, in time and used later, too late */
    CHECK(dtrain_tape_recompute(tape, 1, 0) == DTRAIN_OK);
    dtrain_tape_begin(tape, 0, 1);
    dtrain_tensor *x = chain_input(tape, &c), *a = layer(tape, &c, 0, x), *b, *d;
    CHECK(dtrain_tensor_read(tape, a, before, NULL) == DTRAIN_OK);
    b = layer(tape, &c, 1, x);
    CHECK(dtrain_tensor_read(tape, a, host, NULL) == DTRAIN_OK);
    CHECK(memcmp(host, before, sizeof host) == 0);
    d = layer(tape, &c, 2, b);
    expect_error(dtrain_tensor_read(tape, a, host, NULL), usage, "dtrain_tensor_read", "unit 0");
    CHECK(tape_error(tape) == DTRAIN_OK);
    CHECK(dtrain_tensor_read(tape, b, before, NULL) == DTRAIN_OK);
    d = layer(tape, &c, 3, d);
    CHECK(dtrain_tensor_read(tape, b, host, NULL) == DTRAIN_OK); /* unit 2 has kept it */
    CHECK(memcmp(host, before, sizeof host) == 0);
    dtrain_tensor *loss = chain_loss(tape, &c, d);
    CHECK(dtrain_tape_backward(tape, loss, 1) == DTRAIN_OK);
    CHECK(dtrain_tensor_read(tape, b, host, NULL) == DTRAIN_OK);
    CHECK(memcmp(host, before, sizeof host) == 0);
    expect_error(dtrain_tensor_read(tape, a, host, NULL), usage, "dtrain_tensor_read", "unit 0");

    /* a loss of a unit that is gone */
    dtrain_tape_begin(tape, 0, 1);
    loss = dtrain_scale(tape, dtrain_sum(tape, layer(tape, &c, 0, x = chain_input(tape, &c))), 2);
    layer(tape, &c, 1, x);
    layer(tape, &c, 2, x);
    expect_error(dtrain_tape_backward(tape, loss, 1), usage, "dtrain_tape_backward", "unit 2");
    dtrain_tape_destroy(tape);
    CHECK(device->allocated_bytes == 0);
    dtrain_device_destroy(device);
}

/* Every allocation fails once: an error, nothing lost, and the next pass is as if nothing had been. */
static counted_memory host_memory; /* of the world that the tape belongs to */

static bool step_with_failure(dtrain_world *world, gpt *m, int host_at, int device_at,
                              float expected)
{
    dtrain_device *device = open_device(naive_device_ops(), 1);
    dtrain_tape *tape = NULL;
    float loss = NAN;
    CHECK(dtrain_tape_create(world, NULL, device, &tape) == DTRAIN_OK);
    CHECK(dtrain_tape_recompute(tape, 1, 0) == DTRAIN_OK);
    host_memory.fail_at = host_at < 0 ? 0 : host_memory.calls + host_at + 1;
    naive_allocations_left = device_at;
    dtrain_tape_begin(tape, 0, 1);
    dtrain_result result = dtrain_tape_backward(tape, gpt_loss(tape, m), 1);
    CHECK(result == DTRAIN_OK || result == DTRAIN_ERROR_MEMORY);
    host_memory.fail_at = 0;
    naive_allocations_left = -1;
    dtrain_tape_begin(tape, 0, 1);
    dtrain_tensor *again = gpt_loss(tape, m);
    CHECK(dtrain_tape_backward(tape, again, 1) == DTRAIN_OK);
    CHECK(dtrain_tensor_read(tape, again, &loss, NULL) == DTRAIN_OK);
    CHECK(isnan(expected) || loss == expected);
    dtrain_tape_destroy(tape);
    CHECK(device->allocated_bytes == 0);
    dtrain_device_destroy(device);
    return result != DTRAIN_OK;
}

static int allocation_failures_main(dtrain_world *world, void *user)
{
    gpt m = gpt_create(3, 8, 4);
    dtrain_device *device = open_device(naive_device_ops(), 1);
    dtrain_tape *tape = open_tape(device);
    float expected = NAN;
    int at = 0;
    (void)user;
    dtrain_tape_begin(tape, 0, 1);
    CHECK(dtrain_tensor_read(tape, gpt_loss(tape, &m), &expected, NULL) == DTRAIN_OK);
    dtrain_tape_destroy(tape);
    dtrain_device_destroy(device);
    for (at = 0; step_with_failure(world, &m, -1, at, expected); at++) {}
    CHECK_MSG(at > 20, "only %d device allocations", at);
    for (at = 0; step_with_failure(world, &m, at, -1, expected); at++) {}
    CHECK_MSG(at > 20, "only %d host allocations", at);
    gpt_free(&m);
    return 0;
}

static void test_allocation_failures(void)
{
    dtrain_launch_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.mode = DTRAIN_LAUNCH_THREADS;
    desc.options.allocator = counted_allocator(&host_memory);
    CHECK(dtrain_launch(&desc, allocation_failures_main, NULL, NULL) == DTRAIN_OK);
    CHECK(host_memory.live == 0 && host_memory.wrong == 0);
}

/* ---- Types -------------------------------------------------------------------------------------*/

static float through(float x, dtrain_dtype dtype)
{
    if (dtype == DTRAIN_DTYPE_BF16)
        return dtrain_half_to_f32(DTRAIN_DTYPE_BF16, dtrain_half_from_f32(DTRAIN_DTYPE_BF16, x));
    return dtype == DTRAIN_DTYPE_F16
               ? dtrain_half_to_f32(DTRAIN_DTYPE_F16, dtrain_half_from_f32(DTRAIN_DTYPE_F16, x))
               : x;
}

/* x -> first -> second; the loss is the sum of its elements, each with the gradient `scale`, which
 * comes back through both types. */
static void check_cast(dtrain_tape *tape, dtrain_dtype first, dtrain_dtype second)
{
    enum { N = 37 };
    const int64_t shape[1] = {N};
    const float scale = 1.2345678f;
    float x[N], got[N];
    for (int i = 0; i < N; i++) x[i] = 30 * dtrain_random_normal(4, 4, (uint64_t)i);
    x[0] = 65519.0f, x[1] = 1e-7f, x[2] = 3e38f, x[3] = -0.0f;
    dtrain_tape_begin(tape, 0, 0);
    dtrain_tensor *in = dtrain_tape_input(tape, DTRAIN_DTYPE_F32, 1, shape, x, true);
    dtrain_tensor *a = dtrain_cast(tape, in, first), *b = dtrain_cast(tape, a, second);
    CHECK(a && b && a->dtype == (uint32_t)first && b->dtype == (uint32_t)second);
    CHECK((a == in) == (first == DTRAIN_DTYPE_F32) && (a == b) == (first == second));
    CHECK(dtrain_tensor_read(tape, b, got, NULL) == DTRAIN_OK);
    for (int i = 0; i < N; i++) {
        float expected = through(through(x[i], first), second);
        CHECK_MSG(memcmp(&got[i], &expected, 4) == 0, "%s to %s: %.9g became %.9g, expected %.9g",
                  dtrain_dtype_name(first), dtrain_dtype_name(second), (double)x[i], (double)got[i],
                  (double)expected);
    }
    CHECK(dtrain_tape_backward(tape, dtrain_sum(tape, b), scale) == DTRAIN_OK);
    CHECK(dtrain_tensor_read(tape, in, NULL, got) == DTRAIN_OK);
    for (int i = 0; i < N; i++)
        CHECK_MSG(got[i] == through(through(scale, second), first), "gradient %.9g",
                  (double)got[i]);
}

static void test_cast(void)
{
    static const dtrain_dtype types[3] = {DTRAIN_DTYPE_F32, DTRAIN_DTYPE_BF16, DTRAIN_DTYPE_F16};
    const int64_t shape[1] = {4};
    const float x[4] = {1, 2, 3, 4};
    const int32_t ids[4] = {0};
    float got[4];
    dtrain_device *device = open_device(device_table("cpu"), 1);
    dtrain_tape *tape = open_tape(device);
    for (int i = 0; i < 9; i++) check_cast(tape, types[i / 3], types[i % 3]);
    for (int i = 0; i < 9; i++) { /* sums of types: the wider, or the first */
        const dtrain_dtype left = types[i / 3], right = types[i % 3];
        dtrain_tape_begin(tape, 0, 0);
        dtrain_tensor *in = dtrain_tape_input(tape, DTRAIN_DTYPE_F32, 1, shape, x, true);
        dtrain_tensor *y =
            dtrain_add(tape, dtrain_cast(tape, in, left), dtrain_cast(tape, in, right));
        CHECK(dtrain_tensor_read(tape, y, got, NULL) == DTRAIN_OK && got[3] == 8);
        CHECK(y && y->dtype == (uint32_t)(right == DTRAIN_DTYPE_F32 ? right : left));
        CHECK(dtrain_tape_backward(tape, dtrain_sum(tape, y), 1) == DTRAIN_OK);
        CHECK(dtrain_tensor_read(tape, in, NULL, got) == DTRAIN_OK && got[0] == 2 && got[3] == 2);
    }
    dtrain_tape_begin(tape, 0, 0);
    CHECK(!dtrain_cast(tape, dtrain_tape_input(tape, DTRAIN_DTYPE_F32, 1, shape, x, true),
                       DTRAIN_DTYPE_I32));
    expect_error(tape_error(tape), DTRAIN_ERROR_ARGUMENT, "dtrain_cast", "i32");
    dtrain_tape_begin(tape, 0, 0);
    CHECK(!dtrain_cast(tape, dtrain_tape_input(tape, DTRAIN_DTYPE_I32, 1, shape, ids, false),
                       DTRAIN_DTYPE_F32));
    expect_error(tape_error(tape), DTRAIN_ERROR_ARGUMENT, "dtrain_cast: input 1", "i32");
    dtrain_tape_destroy(tape);
    dtrain_device_destroy(device);
}

/* |a - b| / |b| over all parameters. */
static double distance(const gpt *m, const float *a, const float *b)
{
    double difference = 0, norm_b = 0;
    for (int64_t i = 0; i < m->count; i++) {
        difference += (double)(a[i] - b[i]) * (double)(a[i] - b[i]);
        norm_b += (double)b[i] * (double)b[i];
    }
    return sqrt(difference / norm_b);
}

/* A step with the gradient scaled by `scale`, and divided by it again. */
static float scaled_step(dtrain_tape *tape, gpt *m, uint32_t flags, float scale, float *gradients)
{
    float value = NAN;
    forget_gradients(m);
    dtrain_tape_begin(tape, flags, 1);
    dtrain_tensor *loss = gpt_loss(tape, m);
    CHECK_MSG(dtrain_tape_backward(tape, loss, scale) == DTRAIN_OK, "%s", dtrain_last_error());
    CHECK(dtrain_tensor_read(tape, loss, &value, NULL) == DTRAIN_OK);
    for (int64_t i = 0; i < m->count; i++) gradients[i] = m->memory[m->count + i] / scale;
    return value;
}

static void test_f16(void)
{
    gpt m = gpt_create(3, 32, 8);
    dtrain_device *device = open_device(device_table("cpu"), 1);
    dtrain_tape *tape = open_tape(device);
    float *exact = (float *)malloc((size_t)m.count * 3 * sizeof(float));
    float *half = exact + m.count, *brain = half + m.count, loss, loss_half;
    for (int mean = 0; mean < 2; mean++) {
        m.mean = mean;
        loss = scaled_step(tape, &m, 0, 1, exact);
        loss_half = scaled_step(tape, &m, DTRAIN_TAPE_F16, 65536.0f / 64, half);
        scaled_step(tape, &m, DTRAIN_TAPE_BF16, 1, brain);
        CHECK_CLOSE(loss_half, loss, 2e-3);
        CHECK(loss_half != loss);
        const double of_half = distance(&m, half, exact), of_brain = distance(&m, brain, exact);
        CHECK_MSG(of_half > 1e-6 && of_half < 4e-3, "fp16 gradients are off by %g", of_half);
        CHECK_MSG(of_brain > 2 * of_half && of_brain < 4e-2, "bf16 gradients are off by %g",
                  of_brain);
    }
    /* a scale beyond fp16 does no harm where the gradient itself is within */
    scaled_step(tape, &m, DTRAIN_TAPE_F16, 131072.0f, half);
    CHECK_MSG(distance(&m, half, exact) < 4e-3, "off by %g", distance(&m, half, exact));
    free(exact);
    dtrain_tape_destroy(tape);
    dtrain_device_destroy(device);
    gpt_free(&m);
}

static const void *seen_weights[2]; /* of the last two products, last first */
static dtrain_result watching_gemm(dtrain_device *device, const dtrain_gemm_args *args)
{
    seen_weights[1] = seen_weights[0];
    seen_weights[0] = args->b;
    return device_table("cpu")->gemm(device, args);
}

/* Two weights that are at one address in turn, as a strategy that gathers units has them. */
static void test_weights_in_turn(void)
{
    static chain c;
    float shared[WIDTH * WIDTH], apart[ROWS * WIDTH], in_turn[ROWS * WIDTH];
    dtrain_device_ops ops = *device_table("cpu");
    ops.gemm = watching_gemm;
    dtrain_device *device = open_device(&ops, 1);
    dtrain_tape *tape = open_tape(device);
    chain_create(&c);
    for (uint32_t flags = DTRAIN_TAPE_BF16; flags <= DTRAIN_TAPE_F16; flags += 2)
        for (int turn = 0; turn < 2; turn++) {
            dtrain_tape_begin(tape, flags | DTRAIN_TAPE_NO_GRAD, 0);
            dtrain_tensor *x = chain_input(tape, &c);
            for (int i = 0; i < 3; i++) {
                dtrain_param *p = &c.params[i];
                memcpy(shared, c.values[i], sizeof shared);
                p->value = turn ? shared : c.values[i];
                x = dtrain_linear(tape, x, p, NULL, DTRAIN_ACTIVATION_NONE);
            }
            CHECK(dtrain_tensor_read(tape, x, turn ? in_turn : apart, NULL) == DTRAIN_OK);
            if (turn) CHECK(memcmp(in_turn, apart, sizeof apart) == 0);
        }
    /* a weight that is used twice is rounded once */
    dtrain_tape_begin(tape, DTRAIN_TAPE_BF16, 0);
    dtrain_tensor *x =
        dtrain_linear(tape, chain_input(tape, &c), &c.params[0], NULL, DTRAIN_ACTIVATION_NONE);
    dtrain_param alias = c.params[0];
    alias.alias_of = &c.params[0];
    x = dtrain_linear(tape, x, &alias, NULL, DTRAIN_ACTIVATION_NONE);
    CHECK(x && seen_weights[0] && seen_weights[0] == seen_weights[1]);
    dtrain_tape_destroy(tape);
    dtrain_device_destroy(device);
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    RUN(test_bits);
    RUN(test_bits_threads);
    RUN(test_bits_mean);
    RUN(test_recomputed);
    RUN(test_memory_as_planned);
    RUN(test_memory_saved);
    RUN(test_crossing);
    RUN(test_errors);
    RUN(test_allocation_failures);
    RUN(test_cast);
    RUN(test_f16);
    RUN(test_weights_in_turn);
    return test_summary();
}
