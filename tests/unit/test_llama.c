/* test_llama.c: grouped-query attention, rotary embedding, softmax, products, reshaped and permuted tensors, on the
 * tape, beside finite differences and PyTorch's values; and a small Llama of all of them, whose losses and gradients
 * must keep their bits with 1 to 4 threads and with activation checkpointing. */
#include "test.h"
#include "dtrain.h"
#include "differences.h"
#include "naive_device.h"
#include "ranks.h"
#include "reference/llama_golden.h"
#include "tape_error.h"

/* ---- What is built -----------------------------------------------------------------------------*/

static dtrain_tensor *build_attention(dtrain_tape *tape, op_case *c)
{
    const dtrain_attention_desc desc = {.sequence = c->number[0],
                                        .heads = c->number[1],
                                        .kv_heads = c->number[2],
                                        .causal = c->number[3] != 0};
    return dtrain_attention(tape, c->input[0], NULL, NULL, &desc);
}
static dtrain_tensor *build_rotary(dtrain_tape *tape, op_case *c)
{
    dtrain_tensor *x = c->input[0];
    if (x->ndim == 4) { /* PyTorch's (B,T,H,D) */
        const int64_t rows[2] = {x->shape[0] * x->shape[1], -1};
        x = dtrain_reshape(tape, x, 2, rows);
    }
    dtrain_tensor *y =
        dtrain_rotary(tape, x, c->number[0], c->number[1], c->number[2], (float)c->number[3]);
    return c->input[0]->ndim == 4 ? dtrain_reshape(tape, y, 4, c->shape[0]) : y;
}
static dtrain_tensor *build_softmax(dtrain_tape *tape, op_case *c)
{
    return dtrain_softmax(tape, c->input[0]);
}
static dtrain_tensor *build_matmul(dtrain_tape *tape, op_case *c)
{
    return dtrain_matmul(tape, c->input[0], c->input[c->input_count - 1]);
}
/* Every operation twice on one input, so that gradients are added to. */
static dtrain_tensor *build_twice(dtrain_tape *tape, op_case *c)
{
    const uint32_t axes[3] = {2, 0, 1}, back[3] = {1, 2, 0};
    const int64_t flat[2] = {6, 4}, deep[3] = {2, 3, 4};
    dtrain_tensor *x = c->input[0];
    dtrain_tensor *a = dtrain_permute(tape, dtrain_permute(tape, x, axes), back);
    dtrain_tensor *b = dtrain_softmax(tape, dtrain_reshape(tape, x, 2, flat));
    dtrain_tensor *d = dtrain_rotary(tape, dtrain_reshape(tape, x, 2, flat), 3, 1, 0, 50);
    dtrain_tensor *e = dtrain_matmul(tape, a, c->input[1]);
    b = dtrain_reshape(tape, dtrain_multiply(tape, b, d), 3, deep);
    d = dtrain_multiply(tape, dtrain_permute(tape, x, axes), dtrain_permute(tape, a, axes));
    return dtrain_add(tape, dtrain_permute(tape, d, back), dtrain_multiply(tape, b, e));
}

/* ---- Finite differences ------------------------------------------------------------------------*/

static void test_attention_differences(void)
{
    for (int64_t kv_heads = 1; kv_heads <= 4; kv_heads *= 2)
        for (int64_t causal = 0; causal < 2; causal++) {
            op_case c = case_of("grouped attention", build_attention);
            c.number[0] = 3, c.number[1] = 4, c.number[2] = kv_heads;
            c.number[3] = causal;
            case_input(&c, 6, (4 + 2 * kv_heads) * 2, 0, 0);
            case_check(&c);
        }
}

static void test_differences(void)
{
    op_case c = case_of("rotary", build_rotary);
    c.number[0] = 3, c.number[1] = 4, c.number[2] = 3, c.number[3] = 100;
    case_input(&c, 6, 24, 0, 0);
    case_check(&c);

    c = case_of("softmax", build_softmax);
    case_input(&c, 2, 3, 5, 0);
    case_check(&c);

    c = case_of("matmul of two axes", build_matmul);
    case_input(&c, 3, 4, 0, 0), case_input(&c, 4, 5, 0, 0);
    case_check(&c);
    c = case_of("matmul of four axes", build_matmul);
    case_input(&c, 2, 2, 3, 4), case_input(&c, 2, 2, 4, 3);
    case_check(&c);
    c = case_of("matmul of four axes and two", build_matmul);
    case_input(&c, 2, 2, 3, 4), case_input(&c, 4, 3, 0, 0);
    case_check(&c);
    c = case_of("matmul of a tensor and itself", build_matmul);
    case_input(&c, 2, 3, 3, 0);
    case_check(&c);
    c = case_of("everything twice", build_twice);
    case_input(&c, 2, 3, 4, 0), case_input(&c, 4, 4, 0, 0);
    case_check(&c);
}

/* Every order of four axes, element by element. */
static void test_permute(void)
{
    dtrain_device *device = NULL;
    dtrain_tape *tape = NULL;
    const int64_t shape[4] = {2, 3, 4, 5};
    float x[120], got[120];
    for (int i = 0; i < 120; i++) x[i] = (float)i;
    CHECK(dtrain_device_create(NULL, NULL, &device) == DTRAIN_OK);
    CHECK(dtrain_tape_create(NULL, NULL, device, &tape) == DTRAIN_OK);
    for (uint32_t order = 0; order < 256; order++) {
        const uint32_t axes[4] = {order & 3, order >> 2 & 3, order >> 4 & 3, order >> 6};
        dtrain_tape_begin(tape, 0, 0);
        dtrain_tensor *in = dtrain_tape_input(tape, DTRAIN_DTYPE_F32, 4, shape, x, true);
        dtrain_tensor *y = dtrain_permute(tape, in, axes);
        if (((1u << axes[0]) | (1u << axes[1]) | (1u << axes[2]) | (1u << axes[3])) != 15) {
            CHECK(!y && strstr(dtrain_last_error(), "4 axes once"));
            continue;
        }
        CHECK(dtrain_tensor_read(tape, y, got, NULL) == DTRAIN_OK);
        bool good = true;
        for (int i = 0; i < 120; i++) {
            int64_t at[4], rest = i;
            for (int axis = 3; axis >= 0; axis--)
                at[axes[axis]] = rest % y->shape[axis], rest /= y->shape[axis];
            good = good && got[i] == x[((at[0] * 3 + at[1]) * 4 + at[2]) * 5 + at[3]];
        }
        CHECK_MSG(good, "axes %u %u %u %u", axes[0], axes[1], axes[2], axes[3]);
    }
    dtrain_tape_destroy(tape);
    dtrain_device_destroy(device);
}

/* ---- PyTorch's values --------------------------------------------------------------------------*/

static void test_golden(void)
{
    const float *gradients[CASE_INPUTS] = {llama_rotary_dx, NULL, NULL};
    op_case c = case_of("rotary", build_rotary);
    c.number[0] = 5, c.number[1] = 2, c.number[2] = 0, c.number[3] = 10000;
    golden_input(&c, 2, 5, 2, llama_rotary_x);
    c.shape[0][3] = 6;
    c.value[0] = (float *)realloc(c.value[0], sizeof llama_rotary_x);
    memcpy(c.value[0], llama_rotary_x, sizeof llama_rotary_x);
    golden_run(&c, llama_rotary_y, llama_rotary_dy, gradients, NULL, 1e-6);

    c = case_of("softmax", build_softmax);
    golden_input(&c, 3, 7, 0, llama_softmax_x);
    gradients[0] = llama_softmax_dx;
    golden_run(&c, llama_softmax_y, llama_softmax_dy, gradients, NULL, 1e-6);

    c = case_of("matmul", build_matmul);
    golden_input(&c, 2, 3, 4, llama_matmul_a), golden_input(&c, 2, 4, 5, llama_matmul_b);
    gradients[0] = llama_matmul_da, gradients[1] = llama_matmul_db;
    golden_run(&c, llama_matmul_y, llama_matmul_dy, gradients, NULL, 1e-6);

    c = case_of("grouped attention", build_attention);
    c.number[0] = 5, c.number[1] = 4, c.number[2] = 2, c.number[3] = true;
    golden_input(&c, 10, 32, 0, llama_attention_qkv);
    gradients[0] = llama_attention_dqkv;
    golden_run(&c, llama_attention_y, llama_attention_dy, gradients, NULL, 5e-6);
}

/* ---- A small Llama -----------------------------------------------------------------------------*/

enum { BATCH = 2, TIME = 9, WIDTH = 24, HEADS = 4, KV = 2, SIZE = 6, INNER = 40, VOCAB = 37 };
enum { LAYERS = 3, OF_LAYER = 7, PARAMS = LAYERS * OF_LAYER + 3 };
enum { ROW = (HEADS + 2 * KV) * SIZE };

typedef struct llama {
    dtrain_param params[PARAMS];
    float *values, *grads;
    int64_t count;
} llama;

/* Declare the parameters: the embedding, those of the layers, a norm and the head. */
static void llama_declare(dtrain_param *params)
{
    static const char *const names[PARAMS] = {"a", "b", "c", "d", "e", "f", "g", "h",
                                              "i", "j", "k", "l", "m", "n", "o", "p",
                                              "q", "r", "s", "t", "u", "v", "w", "x"};
    static const int64_t shapes[OF_LAYER + 3][2] = {
        {WIDTH, 0},     {ROW, WIDTH}, {WIDTH, WIDTH}, {WIDTH, 0},    {INNER, WIDTH}, {INNER, WIDTH},
        {WIDTH, INNER}, {WIDTH, 0},   {VOCAB, WIDTH}, {VOCAB, WIDTH}}; /* the embedding last */
    for (int i = 0; i < PARAMS; i++) {
        dtrain_param *p = &params[i];
        const int at = i - 1, layer = at / OF_LAYER;
        const int of_end = i == 0 ? OF_LAYER + 2 : OF_LAYER + at - LAYERS * OF_LAYER;
        const int64_t *shape = shapes[i && layer < LAYERS ? at % OF_LAYER : of_end];
        memset(p, 0, sizeof *p);
        p->name = names[i];
        p->shape[0] = shape[0], p->shape[1] = shape[1];
        p->unit = i == 0 ? 0 : (uint32_t)layer + 1;
        p->init = DTRAIN_INIT_NORMAL;
        p->init_scale = 0.2f;
    }
}

static void llama_make(llama *m)
{
    int64_t at = 0;
    memset(m, 0, sizeof *m);
    llama_declare(m->params);
    for (int i = 0; i < PARAMS; i++) m->count += case_count(m->params[i].shape);
    m->values = (float *)malloc((size_t)m->count * sizeof(float));
    m->grads = (float *)malloc((size_t)m->count * sizeof(float));
    for (int64_t i = 0; i < m->count; i++)
        m->values[i] = 0.2f * dtrain_random_normal(9, 1, (uint64_t)i);
    for (int i = 0; i < PARAMS; i++) {
        m->params[i].value = m->values + at;
        m->params[i].grad = m->grads + at;
        at += case_count(m->params[i].shape);
    }
}

/* One layer; *sum is the residual stream, and x what is still to be added to it. */
static dtrain_tensor *llama_layer(dtrain_tape *t, dtrain_param *p, dtrain_tensor *x,
                                  dtrain_tensor **sum)
{
    const int64_t heads[4] = {BATCH, TIME, HEADS, SIZE}, rows[2] = {BATCH * TIME, WIDTH};
    const uint32_t order[4] = {0, 2, 1, 3};
    const dtrain_activation none = DTRAIN_ACTIVATION_NONE;
    const dtrain_attention_desc causal = {
        .sequence = TIME, .heads = HEADS, .kv_heads = KV, .causal = true};
    dtrain_tensor *h = dtrain_rms_norm(t, x, sum, &p[0], 1e-5f);
    h = dtrain_linear(t, h, &p[1], NULL, none);
    h = dtrain_rotary(t, h, TIME, HEADS + 2 * KV, HEADS + KV, 10000);
    h = dtrain_attention(t, h, NULL, NULL, &causal);
    /* attention without positions, written out, on what the first one made */
    h = dtrain_permute(t, dtrain_reshape(t, h, 4, heads), order);
    const uint32_t swap[4] = {0, 1, 3, 2};
    dtrain_tensor *scores = dtrain_matmul(t, h, dtrain_permute(t, h, swap));
    h = dtrain_matmul(t, dtrain_softmax(t, dtrain_scale(t, scores, 0.4f)), h);
    h = dtrain_reshape(t, dtrain_permute(t, h, order), 2, rows);
    h = dtrain_linear(t, h, &p[2], NULL, none);
    h = dtrain_rms_norm(t, h, sum, &p[3], 1e-5f);
    dtrain_tensor *gate = dtrain_linear(t, h, &p[4], NULL, none);
    h = dtrain_swiglu(t, gate, dtrain_linear(t, h, &p[5], NULL, none));
    return dtrain_linear(t, h, &p[6], NULL, none);
}

static dtrain_tensor *llama_loss(dtrain_tape *t, dtrain_param *p, int rank)
{
    const int64_t ids[2] = {BATCH, TIME}, count[1] = {BATCH * TIME};
    int32_t tokens[BATCH * TIME], targets[BATCH * TIME];
    for (int i = 0; i < BATCH * TIME; i++)
        tokens[i] = (i * 5 + rank) % VOCAB, targets[i] = (i * 7 + rank) % 30;
    targets[3] = -1;
    dtrain_tape_unit(t, 0);
    dtrain_tensor *in = dtrain_tape_input(t, DTRAIN_DTYPE_I32, 2, ids, tokens, false);
    dtrain_tensor *sum = dtrain_embedding(t, in, &p[0], NULL), *x = sum;
    for (int layer = 0; layer < LAYERS; layer++) {
        dtrain_tape_unit(t, (uint32_t)layer + 1);
        if (layer == 0) x = dtrain_scale(t, x, 0.5f);
        x = llama_layer(t, &p[1 + layer * OF_LAYER], x, &sum);
    }
    dtrain_tape_unit(t, LAYERS + 1);
    x = dtrain_rms_norm(t, x, &sum, &p[PARAMS - 2], 1e-5f);
    x = dtrain_linear(t, x, &p[PARAMS - 1], NULL, DTRAIN_ACTIVATION_NONE);
    in = dtrain_tape_input(t, DTRAIN_DTYPE_I32, 1, count, targets, false);
    dtrain_tensor *half = dtrain_scale(t, sum, 0.5f);
    dtrain_tensor *loss = dtrain_cross_entropy(t, x, in, 30, 0.2f);
    loss = dtrain_add(t, loss, dtrain_mse_loss(t, sum, half));
    dtrain_tensor *gates = dtrain_softmax(t, half);
    return dtrain_add(t, loss, dtrain_bce_with_logits_loss(t, sum, gates));
}

/* Loss and gradients of one pass. */
static float llama_run(llama *m, const dtrain_device_ops *ops, uint32_t threads, uint32_t flags,
                       uint32_t every, uint32_t dropped, float *grads)
{
    dtrain_device_desc desc;
    dtrain_device *device = NULL;
    dtrain_tape *tape = NULL;
    dtrain_tape_info info;
    float value = NAN;
    memset(&desc, 0, sizeof desc);
    desc.thread_count = threads;
    desc.oversubscribed = true;
    CHECK(dtrain_device_create(ops, &desc, &device) == DTRAIN_OK);
    CHECK(dtrain_tape_create(NULL, NULL, device, &tape) == DTRAIN_OK);
    for (int i = 0; i < PARAMS; i++) m->params[i].state.grad_written = false;
    memset(m->grads, 0xff, (size_t)m->count * sizeof(float)); /* NaN: must be overwritten */
    CHECK(dtrain_tape_recompute(tape, every, dropped) == DTRAIN_OK);
    dtrain_tape_begin(tape, flags, 5);
    dtrain_tensor *loss = llama_loss(tape, m->params, 0);
    CHECK_MSG(dtrain_tensor_read(tape, loss, &value, NULL) == DTRAIN_OK, "%s", dtrain_last_error());
    CHECK_MSG(dtrain_tape_backward(tape, loss, 1) == DTRAIN_OK, "%s", dtrain_last_error());
    dtrain_tape_query(tape, &info);
    CHECK(every == 0 || info.recomputed_count > 0);
    memcpy(grads, m->grads, (size_t)m->count * sizeof(float));
    dtrain_tape_destroy(tape);
    dtrain_device_destroy(device);
    return value;
}

/* The CPU's numbers are the naive device's; with other threads, and with dropped results, they keep their bits. */
static void test_llama_bits(void)
{
    static const uint32_t casts[3] = {0, DTRAIN_TAPE_BF16, DTRAIN_TAPE_F16};
    llama m;
    llama_make(&m);
    float *first = (float *)malloc((size_t)m.count * sizeof(float));
    float *other = (float *)malloc((size_t)m.count * sizeof(float));
    for (int cast = 0; cast < 3; cast++) {
        const float loss = llama_run(&m, NULL, 1, casts[cast], 0, 0, first);
        const float naive = llama_run(&m, naive_device_ops(), 1, casts[cast], 0, 0, other);
        CHECK_CLOSE(loss, naive, cast ? 1e-2 : 1e-5);
        for (int64_t i = 0; i < m.count && cast == 0; i++)
            if (!test_close((double)first[i], (double)other[i], 1e-4))
                CHECK_MSG(0, "gradient %d is %g, naive %g", (int)i, (double)first[i],
                          (double)other[i]);
        for (uint32_t run = 0; run < 4 + DTRAIN_RECOMPUTE_ALL; run++) {
            const uint32_t threads = run < 4 ? run + 1 : 1, dropped = run < 4 ? 0 : run - 3;
            const float again =
                llama_run(&m, NULL, threads, casts[cast], dropped != 0, dropped, other);
            CHECK_MSG(memcmp(&again, &loss, 4) == 0 &&
                          memcmp(first, other, (size_t)m.count * sizeof(float)) == 0,
                      "cast %d, %u threads, dropped %u: other bits", cast, threads, dropped);
        }
    }
    free(first), free(other), free(m.values), free(m.grads);
}

/* ---- Under every strategy ----------------------------------------------------------------------*/

typedef struct llama_ranks {
    dtrain_strategy_desc strategy;
    uint32_t flags, every;
    float loss[2][3]; /* of each rank and step */
} llama_ranks;

static int llama_rank(dtrain_world *world, void *user)
{
    llama_ranks *run = (llama_ranks *)user;
    const int rank = dtrain_world_rank(world);
    const dtrain_optimizer_desc adamw = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_ADAMW);
    const dtrain_strategy_desc desc = run->strategy;
    dtrain_param params[PARAMS];
    dtrain_strategy *strategy = NULL;
    dtrain_optimizer *optimizer = NULL;
    dtrain_tape *tape = NULL;
    llama_declare(params);
    RANKS_TRY(dtrain_strategy_create(world, params, PARAMS, &desc, &strategy));
    RANKS_TRY(dtrain_optimizer_create(world, strategy, &adamw, &optimizer));
    RANKS_TRY(dtrain_tape_create(world, strategy, NULL, &tape));
    RANKS_TRY(dtrain_tape_recompute(tape, run->every, 0));
    for (int step = 0; step < 3; step++) {
        RANKS_TRY(dtrain_tape_begin(tape, run->flags, 1));
        dtrain_tensor *loss = llama_loss(tape, params, rank);
        RANKS_TRY(dtrain_tensor_read(tape, loss, &run->loss[rank][step], NULL));
        RANKS_TRY(dtrain_tape_backward(tape, loss, 1));
        RANKS_TRY(dtrain_strategy_finish(strategy));
        RANKS_TRY(dtrain_optimizer_step(optimizer, 0.01f, 1));
    }
    dtrain_tape_destroy(tape);
    dtrain_optimizer_destroy(optimizer);
    dtrain_strategy_destroy(strategy);
    return 0;
}

/* Two ranks train: the losses of DDP, to the bit, with and without dropped activations. */
static void test_llama_strategies(void)
{
    static const uint32_t casts[3] = {0, DTRAIN_TAPE_BF16, DTRAIN_TAPE_F16};
    float ddp[2][3];
    for (int cast = 0; cast < 3; cast++)
        for (uint32_t kind = DTRAIN_STRATEGY_DDP; kind <= DTRAIN_STRATEGY_HYBRID_SHARD; kind++) {
            llama_ranks *run = (llama_ranks *)ranks_shared(sizeof *run);
            run->strategy.kind = kind;
            run->strategy.node_size = kind == DTRAIN_STRATEGY_HYBRID_SHARD ? 2 : 0;
            run->flags = casts[cast];
            run->every = kind % 2;
            ranks_run(2, DTRAIN_LAUNCH_THREADS, llama_rank, run);
            if (kind == DTRAIN_STRATEGY_DDP) memcpy(ddp, run->loss, sizeof ddp);
            CHECK_MSG(memcmp(ddp, run->loss, sizeof ddp) == 0, "cast %d, strategy %u: other losses",
                      cast, kind);
            CHECK(run->loss[0][2] < run->loss[0][0]);
        }
}

/* The plan device runs the same calls, and predicts the memory of the CPU's pass. */
static void test_llama_plan(void)
{
    llama m;
    uint64_t bytes[2];
    llama_make(&m);
    for (int kind = 0; kind < 2; kind++) {
        dtrain_device *device = NULL;
        dtrain_tape *tape = NULL;
        dtrain_tape_info info;
        const dtrain_device_ops *ops = kind ? device_table("plan") : NULL;
        CHECK(dtrain_device_create(ops, NULL, &device) == DTRAIN_OK);
        CHECK(dtrain_tape_create(NULL, NULL, device, &tape) == DTRAIN_OK);
        for (int i = 0; i < PARAMS; i++) m.params[i].state.grad_written = false;
        dtrain_tape_begin(tape, DTRAIN_TAPE_BF16, 5);
        CHECK_MSG(dtrain_tape_backward(tape, llama_loss(tape, m.params, 0), 1) == DTRAIN_OK, "%s",
                  dtrain_last_error());
        dtrain_tape_query(tape, &info);
        bytes[kind] = info.activation_bytes + info.gradient_bytes;
        dtrain_tape_destroy(tape);
        dtrain_device_destroy(device);
    }
    CHECK(bytes[0] == bytes[1] && bytes[0] > 0);
    free(m.values), free(m.grads);
}

/* ---- Errors ------------------------------------------------------------------------------------*/

static void test_errors(void)
{
    dtrain_device *device = NULL;
    dtrain_tape *tape = NULL;
    const int64_t shape[3] = {6, 4, 8}, wide[2] = {6, 32}, other[2] = {6, 30};
    const int64_t two_open[2] = {-1, -1}, odd[2] = {5, -1}, zero[2] = {0, -1}, more[1] = {200};
    const uint32_t axes[3] = {0, 1, 3};
    float *x = (float *)calloc(192, sizeof *x);
    CHECK(dtrain_device_create(NULL, NULL, &device) == DTRAIN_OK);
    CHECK(dtrain_tape_create(NULL, NULL, device, &tape) == DTRAIN_OK);
#define REFUSED(call, words)                                                              \
    do {                                                                                  \
        dtrain_tape_begin(tape, 0, 0);                                                    \
        dtrain_tensor *a = dtrain_tape_input(tape, DTRAIN_DTYPE_F32, 2, wide, x, true);   \
        dtrain_tensor *b = dtrain_tape_input(tape, DTRAIN_DTYPE_F32, 3, shape, x, true);  \
        dtrain_tensor *d = dtrain_tape_input(tape, DTRAIN_DTYPE_F32, 2, other, x, true);  \
        (void)a, (void)b, (void)d;                                                        \
        CHECK(!(call) && tape_error(tape) == DTRAIN_ERROR_ARGUMENT);                      \
        CHECK_MSG(strstr(dtrain_last_error(), words) != NULL, "%s", dtrain_last_error()); \
    } while (0)
    REFUSED(dtrain_rotary(tape, a, 4, 4, 0, 10), "dtrain_rotary: expected sequences of 4 rows");
    REFUSED(dtrain_rotary(tape, d, 3, 6, 0, 10), "6 heads of an even size");
    REFUSED(dtrain_rotary(tape, a, 3, 4, 5, 10), "5 of 4 heads");
    REFUSED(dtrain_rotary(tape, a, 3, 4, 0, 0), "theta 0");
    REFUSED(dtrain_softmax(tape, NULL), "dtrain_softmax: input 1 is NULL");
    REFUSED(dtrain_matmul(tape, a, d), "input 1 is (6, 32) f32; input 2 is (6, 30) f32");
    REFUSED(dtrain_matmul(tape, b, b), "dtrain_matmul: expected (..., m, k) times (..., k, n)");
    REFUSED(dtrain_matmul(tape, a, b), "the same leading axes");
    REFUSED(dtrain_reshape(tape, a, 2, two_open),
            "dtrain_reshape: input 1 cannot become (any, any)");
    REFUSED(dtrain_reshape(tape, a, 2, odd), "cannot become (5, any)");
    REFUSED(dtrain_reshape(tape, a, 2, zero), "cannot become");
    REFUSED(dtrain_reshape(tape, a, 1, more), "cannot become (200)");
    REFUSED(dtrain_reshape(tape, a, 5, shape), "cannot become");
    REFUSED(dtrain_reshape(tape, a, 2, NULL), "cannot become");
    REFUSED(dtrain_permute(tape, b, axes), "expected each of the 3 axes once");
    REFUSED(dtrain_permute(tape, b, NULL), "expected each of the 3 axes once");
#undef REFUSED
    free(x);
    dtrain_tape_destroy(tape);
    dtrain_device_destroy(device);
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    RUN(test_attention_differences);
    RUN(test_differences);
    RUN(test_permute);
    RUN(test_golden);
    RUN(test_llama_bits);
    RUN(test_llama_strategies);
    RUN(test_llama_plan);
    RUN(test_errors);
    return test_summary();
}
