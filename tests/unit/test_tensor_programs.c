/* Random programs for the tensor axis of a mesh, in which ranks of the data axis differ, against plain loops in
 * double precision that know nothing of ranks (tests/support/tensor_oracle.h).
 *
 *     build/tests/test_tensor_programs                  the seeds that ever failed, then 120 new ones;
 *                                                       with DTRAIN_TEST_FULL=1 1,000 new ones
 *     build/tests/test_tensor_programs --count 10000    so many new ones
 *     build/tests/test_tensor_programs --seed 77        this one, in words; if it fails it is shrunk
 *
 * A program is a pure function of its seed: a graph like a small GPT's of random operations, cuts and placements on t
 * x d ranks, a kind of strategy, two or three steps of SGD with clipping. Ranks of the data axis have batches of
 * different numbers of rows and of targets that count, and leave out blocks, so that they lack gradients; all ranks
 * of a tensor axis do the same. Beside the oracle stand: the placement and the values of each tensor of the first
 * pass, every loss, every norm, and the parameters at the end, which are the same bits on all ranks. Masks of dropout
 * are those of one rank, to the bit.
 *
 * build/emu/test_tensor_programs is the same with emulated GPUs: half of the programs exchange through host memory, in
 * the others each rank has its own GPU and talks over dtrain_nccl.h and the mock of NCCL, with collectives of two axes
 * under way at once.
 *
 * One program in five is wild: it places tensors and cuts weights in any way, also in those that an operation cannot
 * use. Then an operation refuses them on all ranks at once, or the numbers are right.
 *
 * Bounds are a small part of what training has changed in a tensor, and the program checks of every tensor that they
 * mean something: one that is shifted by an element, or that has had twice its gradient, must be outside of them. */
#include "test.h"

#include "dtrain.h"
#ifdef DTRAIN_CUDA_EMULATION
#define DTRAIN_NCCL_LINKED
#define DTRAIN_NCCL_IMPLEMENTATION
#include "dtrain_nccl.h"
#endif
#include "ranks.h"
#include "seeds.h"
#include "tensor_oracle.h"
#ifdef DTRAIN_CUDA_EMULATION
#include "nccl/mock/nccl_mock.c"
#include "nccl/mock/emulated_device.h"
enum { MANY = 30, FULL = 100 };
#else
enum { MANY = 120, FULL = 1000 };
#endif

enum { MOST_RANKS = 8, MOST_STEPS = 3, MOST_MICRO = 3 };

/* ---- Making programs ------------------------------------------------------------------------------ */

/* What shrinking takes away, if the program still fails without. */
enum {
    WITHOUT_STEPS,
    WITHOUT_MICRO,
    WITHOUT_DATA,
    WITHOUT_KIND,
    WITHOUT_SEQUENCE,
    WITHOUT_SKIPS,
    WITHOUT_IGNORES,
    WITHOUT_RECOMPUTE,
    WITHOUT_NARROW,
    WITHOUT_CLIP,
    WITHOUT_STREAM,
    WITHOUT_FROZEN,
    WITHOUT_DROPOUT,
    WITHOUT_PLACES,
    WITHOUT_BLOCK, /* all but one block */
    WITHOUT_EVALUATION,
    WITHOUT_JOINS,
    WITHOUT_RELU,
    WITHOUT_PROCESSES,
    WITHOUTS
};
static const char *const without_names[WITHOUTS] = {
    "steps",      "micro-batches",   "data axis", "kind",     "sequence parallelism",
    "skips",      "ignored targets", "recompute", "bf16",     "clipping",
    "stream",     "frozen",          "dropout",   "places",   "blocks",
    "evaluation", "joins",           "ReLU",      "processes"};

typedef struct maker {
    tp_program *g;
    uint64_t state;
    uint32_t without;
    int block;
    struct {
        int up, down; /* nodes of an earlier block, whose weights a later one may share */
        int64_t hidden, parts;
    } earlier;
} maker;

static uint64_t roll(maker *m, uint64_t limit) { return ranks_random(&m->state, limit); }
static bool chance(maker *m, uint64_t rate) { return roll(m, rate) == 0; }
static bool off(const maker *m, int what) { return m->without >> what & 1; }

static dtrain_cut cut_of(uint32_t axis, uint32_t components, int64_t parts)
{
    dtrain_cut cut;
    memset(&cut, 0, sizeof cut);
    cut.axis = axis, cut.components = components, cut.parts = parts;
    return cut;
}

static int add_param(maker *m, const char *what, int64_t rows, int64_t columns, dtrain_cut cut,
                     uint32_t init, double scale)
{
    tp_program *g = m->g;
    tp_param *p = &g->param[g->params];
    snprintf(p->name, sizeof p->name, "%s%d", what, g->params);
    p->shape[0] = rows, p->shape[1] = columns;
    p->count = rows * (columns ? columns : 1);
    p->first = g->elements;
    g->elements += p->count;
    p->cut = cut;
    p->unit = (uint32_t)m->block;
    p->init = init;
    p->scale = (float)scale;
    p->alias = -1;
    p->frozen = chance(m, 9) && !off(m, WITHOUT_FROZEN);
    return g->params++;
}
static int add_cut(maker *m, dtrain_cut cut, int64_t whole)
{
    cut.axis = DTRAIN_CUT_ROWS;
    m->g->cut[m->g->cuts].cut = cut;
    m->g->cut[m->g->cuts].whole = whole;
    return m->g->cuts++;
}

/* A node like its first input. In a wild program that may lie in any way. */
static int add_node(maker *m, tp_kind kind, int a, int b)
{
    tp_program *g = m->g;
    const bool made_late = a >= 0 && g->node[a].kind == TP_ADD && g->node[a].of_stream;
    if (g->wild && a >= 0 && kind != TP_PLACE && !made_late && chance(m, 8)) {
        const bool same = a == b;
        a = add_node(m, TP_PLACE, a, -1);
        g->node[a].placement = (uint32_t)roll(m, 3);
        b = same && roll(m, 2) ? a : b;
    }
    tp_node *n = &g->node[g->nodes];
    memset(n, 0, sizeof *n);
    n->kind = kind;
    n->in[0] = a, n->in[1] = b, n->in[2] = -1;
    n->w = n->b = -1;
    n->block = m->block;
    n->cut = -1;
    if (a >= 0) {
        n->n = g->node[a].n;
        n->placement = g->node[a].placement;
        n->cut = g->node[a].cut;
    }
    return g->nodes++;
}
static uint32_t stream_of(const maker *m)
{
    return m->g->sequence_parallel ? DTRAIN_PLACEMENT_ROWS : DTRAIN_PLACEMENT_WHOLE;
}

static int linear(maker *m, int x, int64_t out, dtrain_cut cut, uint32_t activation)
{
    tp_program *g = m->g;
    const int64_t in = g->node[x].n;
    const bool rows = cut.axis == DTRAIN_CUT_ROWS;
    const int at = add_node(m, TP_LINEAR, x, -1);
    tp_node *n = &g->node[at];
    n->n = out;
    n->activation = activation;
    n->w = add_param(m, "w", out, in, cut, DTRAIN_INIT_NORMAL, 0.9 / sqrt((double)in));
    if (g->wild && chance(m, 12)) cut = rows ? cut_of(0, 0, 0) : cut_of(DTRAIN_CUT_ROWS, 0, 0);
    if (roll(m, 4))
        n->b = add_param(m, "b", out, 0, rows ? cut : cut_of(0, 0, 0), DTRAIN_INIT_NORMAL, 0.3);
    if (rows) n->placement = DTRAIN_PLACEMENT_COLUMNS, n->cut = add_cut(m, cut, out);
    if (cut.axis == DTRAIN_CUT_COLUMNS) n->placement = stream_of(m), n->cut = -1;
    return at;
}

static int place(maker *m, int x, uint32_t placement)
{
    tp_program *g = m->g;
    if (g->node[x].placement == placement) return x;
    const int at = add_node(m, TP_PLACE, x, -1);
    g->node[at].placement = placement;
    g->node[at].cut = -1;
    g->node[at].of_stream = placement == stream_of(m);
    if (placement == DTRAIN_PLACEMENT_COLUMNS) {
        dtrain_cut even = cut_of(DTRAIN_CUT_ROWS, 0, 0);
        if (g->node[x].cut >= 0) even = g->cut[g->node[x].cut].cut;
        g->node[at].cut = add_cut(m, even, g->node[x].n);
    }
    return at;
}

static uint32_t activation(maker *m, bool or_none)
{
    const uint32_t drawn = (uint32_t)roll(m, 4); /* dtrain_activation, of which 0 is none */
    if (drawn == DTRAIN_ACTIVATION_RELU && (roll(m, 3) || off(m, WITHOUT_RELU)))
        return DTRAIN_ACTIVATION_GELU;
    return drawn || or_none ? drawn : DTRAIN_ACTIVATION_SILU;
}

/* Something that is done element by element, wherever the elements are. */
static int element_by_element(maker *m, int x)
{
    tp_program *g = m->g;
    int at = x;
    switch (roll(m, 7)) {
    case 0:
        at = add_node(m, TP_ACTIVATE, x, -1);
        g->node[at].activation = activation(m, false);
        break;
    case 1:
        if (off(m, WITHOUT_DROPOUT)) break;
        at = add_node(m, TP_DROPOUT, x, -1);
        g->node[at].number = roll(m, 2) ? 0.25 : 0.5;
        break;
    case 2:
        at = add_node(m, TP_SCALE, x, -1);
        g->node[at].number = roll(m, 2) ? 0.75 : -1.5;
        break;
    case 3: at = add_node(m, TP_MULTIPLY, x, x); break;
    case 4: at = add_node(m, TP_ADD, x, x); break;
    case 5:
        at = add_node(m, TP_CAST, x, -1);
        g->node[at].dtype = g->narrow && roll(m, 2) ? DTRAIN_DTYPE_BF16 : DTRAIN_DTYPE_F32;
        break;
    default:
        if (g->node[x].placement != DTRAIN_PLACEMENT_ROWS) at = add_node(m, TP_RESHAPE, x, -1);
        break;
    }
    return at;
}

/* A norm, in front of which the branch is added to the stream where there is one. */
static int norm(maker *m, int h, int *stream)
{
    tp_program *g = m->g;
    const bool layer = roll(m, 2);
    int x = h;
    if (g->stream && *stream >= 0) {
        x = add_node(m, TP_ADD, h, *stream);
        g->node[x].of_stream = true;
    }
    *stream = x;
    const int at = add_node(m, layer ? TP_LAYERNORM : TP_RMS_NORM, x, -1);
    g->node[at].number = 1e-5;
    g->node[at].stream = g->stream;
    g->node[at].w = add_param(m, "g", g->node[x].n, 0, cut_of(0, 0, 0), DTRAIN_INIT_NORMAL, 0.8);
    if (layer && roll(m, 3))
        g->node[at].b =
            add_param(m, "s", g->node[x].n, 0, cut_of(0, 0, 0), DTRAIN_INIT_NORMAL, 0.3);
    return at;
}

static int attention(maker *m, int x)
{
    tp_program *g = m->g;
    const uint64_t t = (uint64_t)g->tensor;
    const int64_t kv = (int64_t)(t + roll(m, t < 4 ? 4 : 2)), group = roll(m, 3) ? 1 : 2,
                  heads = kv * group;
    const int64_t d = roll(m, 2) ? 2 : 4, cells = heads * d;
    const bool packed = roll(m, 2), rotary = roll(m, 2);
    dtrain_cut cut = cut_of(DTRAIN_CUT_ROWS, packed ? 3 : 0, kv);
    int q, k = -1, v = -1;
    if (packed && (group > 1 || roll(m, 2)))
        cut.widths[0] = cells, cut.widths[1] = cut.widths[2] = kv * d;
    if (packed) {
        q = linear(m, x, cells + 2 * kv * d, cut, DTRAIN_ACTIVATION_NONE);
        if (rotary) {
            q = add_node(m, TP_ROTARY, q, -1);
            g->node[q].heads = heads + 2 * kv;
            g->node[q].rotated = heads + kv;
            g->node[q].number = 100;
        }
    } else {
        q = linear(m, x, cells, cut, DTRAIN_ACTIVATION_NONE);
        k = linear(m, x, kv * d, cut, DTRAIN_ACTIVATION_NONE);
        v = linear(m, x, kv * d, cut, DTRAIN_ACTIVATION_NONE);
        if (rotary) {
            q = add_node(m, TP_ROTARY, q, -1);
            g->node[q].heads = heads;
            k = add_node(m, TP_ROTARY, k, -1);
            g->node[k].heads = kv;
            g->node[q].number = g->node[k].number = 100;
        }
    }
    const int at = add_node(m, TP_ATTENTION, q, k);
    tp_node *n = &g->node[at];
    n->in[2] = v;
    n->n = cells;
    n->heads = heads, n->kv_heads = kv;
    n->causal = roll(m, 2);
    n->lengths = chance(m, 4);
    n->mask = chance(m, 4);
    n->heads_mask = n->mask && roll(m, 2);
    n->cut = add_cut(m, cut_of(DTRAIN_CUT_ROWS, 0, kv), cells);
    x = roll(m, 3) ? at : element_by_element(m, at);
    if (chance(m, 5) && !off(m, WITHOUT_PLACES)) /* gathered, as for a projection that is not cut */
        return linear(m, place(m, x, roll(m, 2) ? stream_of(m) : DTRAIN_PLACEMENT_WHOLE), g->width,
                      cut_of(0, 0, 0), DTRAIN_ACTIVATION_NONE);
    return linear(m, x, g->width, cut_of(DTRAIN_CUT_COLUMNS, 0, kv), DTRAIN_ACTIVATION_NONE);
}

/* The weight of a layer is that of one in an earlier unit. */
static void share_weight(tp_program *g, int node, int earlier)
{
    tp_param *p = &g->param[g->node[node].w];
    const int first = g->node[earlier].w;
    if (p->cut.axis != g->param[first].cut.axis || p->unit == g->param[first].unit) return;
    p->alias = g->param[first].alias >= 0 ? g->param[first].alias : first;
    p->frozen = g->param[p->alias].frozen = false;
}

static int mlp(maker *m, int x)
{
    tp_program *g = m->g;
    const bool shares = m->earlier.hidden && chance(m, 2);
    int64_t hidden = g->tensor + (int64_t)roll(m, g->large ? 150 : 17);
    int64_t parts = hidden % 2 == 0 && hidden / 2 >= g->tensor && chance(m, 3) ? hidden / 2 : 0;
    if (shares) hidden = m->earlier.hidden, parts = m->earlier.parts;
    const dtrain_cut rows = cut_of(DTRAIN_CUT_ROWS, 0, parts);
    int h = linear(m, x, hidden, rows, activation(m, true));
    if (shares) share_weight(g, h, m->earlier.up);
    m->earlier.up = h;
    if (roll(m, 3) == 0) {
        const int up = chance(m, 5) ? add_node(m, TP_LINEAR, x, -1)
                                    : linear(m, x, hidden, rows, DTRAIN_ACTIVATION_NONE);
        if (g->node[up].w < 0) { /* the same weight and bias once more, without the activation */
            const tp_node *once = &g->node[h];
            g->node[up].w = once->w, g->node[up].b = once->b, g->node[up].n = once->n;
            g->node[up].placement = once->placement, g->node[up].cut = once->cut;
        }
        h = add_node(m, roll(m, 3) ? TP_SWIGLU : roll(m, 2) ? TP_MULTIPLY : TP_ADD, h, up);
    }
    for (uint64_t more = roll(m, 3); more > 0; more--) h = element_by_element(m, h);
    const int y = linear(m, h, g->width, cut_of(DTRAIN_CUT_COLUMNS, 0, parts),
                         roll(m, 3) ? 0 : activation(m, true));
    if (shares && roll(m, 2)) share_weight(g, y, m->earlier.down);
    m->earlier.down = y, m->earlier.hidden = hidden, m->earlier.parts = parts;
    return y;
}

/* Out of the placement that x has and back, with something between. */
static int trip(maker *m, int x)
{
    tp_program *g = m->g;
    const uint64_t which = roll(m, 4);
    if (which == 0 &&
        !off(m, WITHOUT_PLACES)) { /* columns of each component: they come back in order */
        dtrain_cut cut = cut_of(DTRAIN_CUT_ROWS, 2, 0);
        const int64_t each = g->tensor + (int64_t)roll(m, 5);
        x = linear(m, x, 2 * each, cut, DTRAIN_ACTIVATION_GELU);
        x = place(m, element_by_element(m, x), roll(m, 2) ? stream_of(m) : DTRAIN_PLACEMENT_WHOLE);
        x = linear(m, x, g->width, cut_of(0, 0, 0), DTRAIN_ACTIVATION_NONE);
    } else if (which < 3 && !off(m, WITHOUT_PLACES)) {
        for (uint64_t hops = 1 + roll(m, 3); hops > 0; hops--) {
            x = place(m, x, (uint32_t)roll(m, 3));
            x = element_by_element(m, x);
            if (g->node[x].placement != DTRAIN_PLACEMENT_COLUMNS && chance(m, 3))
                x = add_node(m, TP_SOFTMAX, x, -1);
        }
    }
    if (g->node[x].placement == DTRAIN_PLACEMENT_COLUMNS && roll(m, 2))
        return linear(m, x, g->width, cut_of(DTRAIN_CUT_COLUMNS, 0, 0), DTRAIN_ACTIVATION_NONE);
    if (g->node[x].placement == DTRAIN_PLACEMENT_COLUMNS ||
        (g->node[x].placement == DTRAIN_PLACEMENT_ROWS && !g->sequence_parallel))
        x = place(m, x, stream_of(m));
    if (roll(m, 2)) x = linear(m, x, g->width, cut_of(0, 0, 0), DTRAIN_ACTIVATION_GELU);
    return place(m, x, stream_of(m));
}

/* The blocks of a model whose width and stream are given. */
static int make_block(maker *m, int h, int *stream)
{
    tp_program *g = m->g;
    const int in = h, first = g->nodes;
    int x = h;
    if (g->stream || roll(m, 4)) x = norm(m, h, stream);
    if (chance(m, 4) && !off(m, WITHOUT_PLACES))
        x = place(m, x, roll(m, 2) ? DTRAIN_PLACEMENT_WHOLE : DTRAIN_PLACEMENT_ROWS);
    const bool elsewhere = g->node[x].placement == DTRAIN_PLACEMENT_ROWS && !g->sequence_parallel;
    switch (elsewhere ? roll(m, 4)
                      : roll(m, 6)) { /* whole parameters would have gradients of parts of rows */
    case 0:
    case 1: x = mlp(m, x); break;
    case 2:
    case 3: x = attention(m, x); break;
    default: x = trip(m, x); break;
    }
    x = place(m, x, stream_of(m));
    if (chance(m, 3)) x = element_by_element(m, x);
    if (g->stream) return x; /* the next norm adds it */
    if (roll(m, 5)) x = add_node(m, TP_ADD, x, in);
    if (g->skips && x != in)
        g->block[m->block].first = first, g->block[m->block].last = x, g->block[m->block].in = in;
    return x;
}

static void make_head(maker *m, int h, int *stream, int table)
{
    tp_program *g = m->g;
    const bool tied = table >= 0 && chance(m, 2);
    const dtrain_cut cut = tied         ? g->param[table].cut
                           : roll(m, 2) ? cut_of(DTRAIN_CUT_ROWS, 0, 0)
                                        : cut_of(0, 0, 0);
    int x = norm(m, h, stream);
    const int gain = g->node[x].w;
    if (g->sequence_parallel && chance(m, 3)) x = place(m, x, DTRAIN_PLACEMENT_WHOLE);
    x = linear(m, x, g->vocabulary, cut, DTRAIN_ACTIVATION_NONE);
    g->node[x].b = -1; /* the memory of an unused one stays */
    if (tied) {
        tp_param *p = &g->param[g->node[x].w];
        p->alias = table;
        p->frozen = g->param[table].frozen = false;
    }
    g->param[gain].frozen = false; /* there is something to train */
    if (!off(m, WITHOUT_PLACES) && chance(m, 3)) x = place(m, x, (uint32_t)roll(m, 3));
    if (chance(m, 3)) {
        x = add_node(m, TP_CAST, x, -1);
        g->node[x].dtype = DTRAIN_DTYPE_F32;
    }
    x = add_node(m, TP_CROSS_ENTROPY, x, -1);
    g->node[x].n = 1;
    g->node[x].placement = DTRAIN_PLACEMENT_WHOLE;
    g->node[x].cut = -1;
    g->node[x].classes = roll(m, 2) ? 0 : g->vocabulary - (int64_t)roll(m, 6);
    g->node[x].number = roll(m, 2) ? 0 : 0.1;
}

static int64_t common_divisor(int64_t a, int64_t b) { return b ? common_divisor(b, a % b) : a; }

static void make_settings(maker *m)
{
    static const int axes[][2] = {{2, 1}, {2, 2}, {3, 1}, {4, 1}, {8, 1}, {2, 4}, {3, 2},
                                  {4, 2}, {2, 3}, {1, 2}, {1, 1}, {2, 2}, {5, 1}, {1, 4}};
    tp_program *g = m->g;
    const int *axis = axes[roll(m, sizeof axes / sizeof *axes)];
    const uint32_t kind = (uint32_t)(1 + roll(m, 6));
    g->tensor = axis[0];
    g->data = axis[1];
    g->sequence_parallel = roll(m, 2);
    g->steps = 2 + (int)roll(m, MOST_STEPS - 1);
    g->micro = 1 + (int)roll(m, MOST_MICRO);
    g->means = chance(m, 5);
    g->no_overlap = chance(m, 3);
    g->keep = chance(m, 3);
    g->narrow = chance(m, 7);
    g->recompute = chance(m, 3) ? (uint32_t)(1 + roll(m, 2)) : 0;
    g->recompute_ops = roll(m, 2) ? 0 : (uint32_t)(1 + roll(m, 15));
    g->missing = roll(m, 2) ? DTRAIN_MISSING_GRADIENT_SKIP : DTRAIN_MISSING_GRADIENT_ZERO;
    g->joins = chance(m, 3) && !g->recompute && !off(m, WITHOUT_JOINS) ? 4 : 0;
    g->param_dtype =
        g->narrow && roll(m, 2) && kind >= DTRAIN_STRATEGY_FULL_SHARD ? DTRAIN_DTYPE_BF16 : 0;
    g->reduce_dtype = g->narrow && roll(m, 2) ? DTRAIN_DTYPE_BF16 : 0;
    g->skips = chance(m, 2) ? 3 : 0;
    g->ignores = chance(m, 2) ? 3 : 0;
    g->stream = roll(m, 2);
    g->evaluate = roll(m, 2);
    g->clip = roll(m, 3) ? 0.5f : 0;
    g->wild = chance(m, 5) && g->tensor > 1;
    g->large = chance(m, 12);
    g->processes = chance(m, 3) && !off(m, WITHOUT_PROCESSES);
#ifdef DTRAIN_CUDA_EMULATION
    g->processes = false; /* NCCL's mock is of one process */
#endif
    if (off(m, WITHOUT_STEPS)) g->steps = 1;
    if (off(m, WITHOUT_MICRO)) g->micro = 1;
    if (off(m, WITHOUT_DATA)) g->data = 1;
    if (off(m, WITHOUT_SEQUENCE)) g->sequence_parallel = false;
    if (off(m, WITHOUT_RECOMPUTE)) g->recompute = 0;
    if (off(m, WITHOUT_NARROW)) g->narrow = false, g->param_dtype = g->reduce_dtype = 0;
    if (off(m, WITHOUT_SKIPS)) g->skips = 0;
    if (off(m, WITHOUT_IGNORES)) g->ignores = 0;
    if (off(m, WITHOUT_STREAM)) g->stream = false;
    if (off(m, WITHOUT_EVALUATION)) g->evaluate = false;
    if (off(m, WITHOUT_CLIP)) g->clip = 0;
    g->kind = off(m, WITHOUT_KIND) ? DTRAIN_STRATEGY_DDP : kind;
    if (g->kind < DTRAIN_STRATEGY_FULL_SHARD) g->param_dtype = 0;
    if (g->recompute || g->stream || g->wild) g->skips = 0;
    if (g->wild) g->joins = 0;
    g->node_size = g->kind == DTRAIN_STRATEGY_HYBRID_SHARD
                       ? (uint32_t)(g->data % 2 ? g->data : g->data / 2)
                       : 0;
    if (g->node_size == 0 && g->kind == DTRAIN_STRATEGY_HYBRID_SHARD) g->node_size = 1;
    if (chance(m, 6) && g->data % 2 == 0 && g->kind < DTRAIN_STRATEGY_ZERO3)
        g->hierarchical = true, g->node_size = (uint32_t)g->data / 2;
    g->accumulation = chance(m, 3) ? DTRAIN_ACCUMULATION_LAST : 0;
    g->rate = g->clip > 0 ? 0.3f : 0.05f;
    g->sequence = 2 + (int64_t)roll(m, g->large ? 16 : 5);
    g->batch_unit = 1;
    if (g->sequence_parallel) g->batch_unit = g->tensor / common_divisor(g->tensor, g->sequence);
    while (g->batch_unit * g->sequence < g->tensor) g->batch_unit++;
    g->width = 4 + 2 * (int64_t)roll(m, 7);
    if (g->large) g->width += 2 * (int64_t)roll(m, 30);
    if (g->width < g->tensor) g->width = g->tensor;
    g->vocabulary = 9 + (int64_t)roll(m, g->large ? 300 : 24);
    if (off(m, WITHOUT_PLACES) && g->width % 2) g->width++;
}

static void generate(tp_program *g, uint64_t seed, uint32_t without)
{
    maker m;
    memset(&m, 0, sizeof m);
    memset(g, 0, sizeof *g);
    m.g = g, m.state = ranks_mix(seed + 4242), m.without = without;
    g->seed = seed;
    make_settings(&m);
    m.state = ranks_mix(seed + 77);
    for (int b = 0; b < MOST_BLOCKS; b++) g->block[b].first = -1;
    const dtrain_cut cut = roll(&m, 2) ? cut_of(DTRAIN_CUT_ROWS, 0, 0) : cut_of(0, 0, 0);
    const int table = add_param(&m, "table", g->vocabulary, g->width, cut, DTRAIN_INIT_NORMAL, 0.8);
    int h = add_node(&m, TP_EMBEDDING, -1, -1), stream = -1;
    g->node[h].w = table;
    g->node[h].n = g->width;
    g->node[h].placement = stream_of(&m);
    if (roll(&m, 3))
        g->node[h].b = add_param(&m, "pos", g->sequence + (int64_t)roll(&m, 3), g->width,
                                 cut_of(0, 0, 0), DTRAIN_INIT_NORMAL, 0.5);
    const int blocks = off(&m, WITHOUT_BLOCK) ? 1 : 1 + (int)roll(&m, 3);
    for (int b = 0; b < blocks; b++) {
        const int nodes = g->nodes, params = g->params;
        m.block++;
        h = make_block(&m, h, &stream);
        if (g->params > params) continue;
        g->block[m.block--].first =
            -1; /* without parameters it is no unit: a part of the one before */
        for (int i = nodes; i < g->nodes; i++) g->node[i].block = m.block;
    }
    m.block++;
    make_head(&m, h, &stream, table);
    g->blocks = m.block + 1;
}

static void print_program(const tp_program *g, uint32_t without)
{
    static const char *const placements[] = {"whole", "columns", "rows"};
    printf("    seed %llu: tensor %d x data %d, kind %u, %d steps of %d micro-batches, sequence "
           "%lld%s%s%s%s%s, "
           "recompute %u (%u), clip %g, batches of %lld\n",
           (unsigned long long)g->seed, g->tensor, g->data, g->kind, g->steps, g->micro,
           (long long)g->sequence, g->sequence_parallel ? ", sequence parallel" : "",
           g->narrow ? ", bf16" : "", g->means ? ", means" : "",
           g->no_overlap ? ", no overlap" : "", g->keep ? ", kept" : "", g->recompute,
           g->recompute_ops, (double)g->clip, (long long)g->batch_unit);
    if (g->processes) printf("    ranks are processes\n");
    if (g->wild) printf("    wild: an operation may be given what it refuses\n");
    printf("    nodes of %u%s, missing gradients %u, accumulation %u, param_dtype %u, reduce_dtype "
           "%u, joins %d\n",
           g->node_size, g->hierarchical ? " (hierarchical)" : "", g->missing, g->accumulation,
           g->param_dtype, g->reduce_dtype, (int)g->joins);
    for (int i = 0; i < WITHOUTS; i++)
        if (without >> i & 1) printf("    without %s\n", without_names[i]);
    for (int i = 0; i < g->nodes; i++) {
        const tp_node *n = &g->node[i];
        printf("    %2d block %d: %s of %d %d %d -> %lld, %s", i, n->block, tp_names[n->kind],
               n->in[0], n->in[1], n->in[2], (long long)n->n, placements[n->placement]);
        if (n->cut >= 0)
            printf(" (%u components, %lld parts)", g->cut[n->cut].cut.components,
                   (long long)g->cut[n->cut].cut.parts);
        for (int k = 0; k < 2; k++) {
            const int p = k ? n->b : n->w;
            if (p >= 0)
                printf(", %s (%lld, %lld) cut %u%s%s", g->param[p].name,
                       (long long)g->param[p].shape[0], (long long)g->param[p].shape[1],
                       g->param[p].cut.axis, g->param[p].frozen ? " frozen" : "",
                       g->param[p].alias >= 0 ? " tied" : "");
        }
        if (n->heads) printf(", heads %lld / %lld", (long long)n->heads, (long long)n->kv_heads);
        if (n->classes) printf(", classes %lld", (long long)n->classes);
        if (n->number != 0) printf(", %g", n->number);
        if (n->stream || n->of_stream) printf(", stream");
        if (n->mask || n->lengths || n->causal)
            printf(",%s%s%s", n->causal ? " causal" : "", n->mask ? " mask" : "",
                   n->lengths ? " lengths" : "");
        printf("\n");
    }
}

/* ---- What a program is expected to do -------------------------------------------------------------- */

typedef struct play {
    tp_program g;
    float *init;                                           /* (elements) */
    double *after;                                         /* (elements): expected at the end */
    double losses[MOST_RANKS][MOST_STEPS + 1][MOST_MICRO]; /* by data rank; the last: evaluation */
    double norms[MOST_STEPS];
    float **masks[MOST_RANKS][MOST_STEPS][MOST_MICRO]; /* dropout by dropout */
    tp_pass first[MOST_RANKS];                         /* the first pass, with its values */
    float *found[MOST_RANKS];                          /* (elements): parameters at the end */
    float norms_found[MOST_RANKS][MOST_STEPS];
    float losses_found[MOST_RANKS][MOST_STEPS + 1][MOST_MICRO];
    char text[MOST_RANKS][400]; /* what a rank found wrong */
    bool kink;                  /* no oracle knows what comes out */
} play;

static uint64_t seed_of(const tp_program *g, tp_place at)
{
    return tp_draw(g, 99, at.data_rank, at.step, at.micro, 0);
}

static void expect_step(play *y, double *weights, double *grads, int step)
{
    const tp_program *g = &y->g;
    double total = 0, squares = 0;
    memset(grads, 0, (size_t)g->elements * sizeof *grads);
    for (int r = 0; r < g->data; r++)
        for (int micro = 0; micro < g->micro; micro++) {
            tp_pass s;
            memset(&s, 0, sizeof s);
            s.g = g;
            s.at.data_rank = r, s.at.step = step, s.at.micro = micro;
            s.weights = weights, s.grads = grads;
            s.masks = (const float *const *)y->masks[r][step][micro];
            if (tp_joins(g, s.at)) continue;
            tp_forward(&s);
            y->losses[r][step][micro] = s.loss;
            y->kink = y->kink || s.kink;
            if (s.valid) tp_backward(&s, g->means ? 1 / (double)s.valid : 1);
            total += g->means ? 1 : (double)s.valid; /* a mean over nothing is a mean of 0 */
            if (step == 0 && micro == 0) y->first[r] = s;
            else tp_free(&s);
        }
    for (int p = 0; p < g->params; p++)
        for (int64_t i = 0; i < g->param[p].count && g->param[p].alias < 0 && !g->param[p].frozen;
             i++) {
            double *gradient = &grads[g->param[p].first + i];
            *gradient /= total;
            squares += *gradient * *gradient;
        }
    y->norms[step] = sqrt(squares);
    const double clip = (double)g->clip, much = y->norms[step] + 1e-6;
    const double factor = clip > 0 && much > clip ? clip / much : 1;
    for (int p = 0; p < g->params; p++)
        for (int64_t i = 0; i < g->param[p].count && g->param[p].alias < 0 && !g->param[p].frozen;
             i++)
            weights[g->param[p].first + i] -=
                (double)g->rate * factor * grads[g->param[p].first + i];
}

static void expect(play *y)
{
    const tp_program *g = &y->g;
    double *grads = tp_zeros(g->elements);
    y->after = tp_zeros(g->elements);
    for (int64_t i = 0; i < g->elements; i++) y->after[i] = (double)y->init[i];
    for (int step = 0; step < g->steps; step++) expect_step(y, y->after, grads, step);
    for (int r = 0; r < g->data && g->evaluate; r++) {
        tp_pass s;
        memset(&s, 0, sizeof s);
        s.g = g;
        s.at.data_rank = r, s.at.step = MOST_STEPS, s.at.evaluation = true;
        s.weights = y->after;
        tp_forward(&s);
        y->losses[r][MOST_STEPS][0] = s.loss;
        tp_free(&s);
    }
    free(grads);
}

/* ---- A rank ---------------------------------------------------------------------------------------- */

typedef struct rank_state {
    play *y;
    dtrain_world *world;
    int rank, data_rank, tensor_rank;
    dtrain_mesh *mesh;
    dtrain_strategy *strategy;
    dtrain_optimizer *optimizer;
    dtrain_tape *tape;
    dtrain_param params[MOST_PARAMS];
    dtrain_tensor *value[MOST_NODES];
    dtrain_tensor *stream;
} rank_state;

static int wrong(rank_state *s, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(s->y->text[s->rank], sizeof s->y->text[0], format, args);
    va_end(args);
    return 1;
}
#define GOOD(call)                                                                    \
    do {                                                                              \
        const dtrain_result good_result = (call);                                     \
        if (good_result != DTRAIN_OK)                                                 \
            return wrong(s, "%s: %s: %.250s", #call, dtrain_result_text(good_result), \
                         dtrain_last_error());                                        \
    } while (0)

static dtrain_param *param_of(rank_state *s, int p) { return p < 0 ? NULL : &s->params[p]; }

static dtrain_tensor *attend(rank_state *s, const tp_node *n, tp_place at, dtrain_tensor **in)
{
    const tp_program *g = &s->y->g;
    const int64_t batch = tp_batch(g, at), q = g->sequence;
    dtrain_attention_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.sequence = q;
    desc.heads = n->heads;
    desc.kv_heads = n->kv_heads == n->heads && s->y->g.seed % 2 ? 0 : n->kv_heads;
    desc.causal = n->causal;
    if (n->lengths) {
        int32_t lengths[64];
        for (int64_t b = 0; b < batch; b++) lengths[b] = tp_length(g, at, b);
        desc.key_lengths = dtrain_tape_input(s->tape, DTRAIN_DTYPE_I32, 1, &batch, lengths, false);
    }
    if (n->mask) {
        float mask[20 * 18 * 18];
        int64_t shape[3];
        shape[0] = n->heads, shape[1] = shape[2] = q;
        for (int64_t i = 0; i < (n->heads_mask ? n->heads : 1) * q * q; i++)
            mask[i] = tp_mask(g, at, i);
        desc.mask = dtrain_tape_input(s->tape, DTRAIN_DTYPE_F32, n->heads_mask ? 3 : 2,
                                      shape + !n->heads_mask, mask, false);
    }
    return dtrain_attention(s->tape, in[0], in[1], in[2], &desc);
}

static dtrain_tensor *embed(rank_state *s, const tp_node *n, tp_place at)
{
    const tp_program *g = &s->y->g;
    int32_t tokens[1024];
    int64_t shape[2];
    shape[0] = tp_batch(g, at), shape[1] = g->sequence;
    for (int64_t i = 0; i < shape[0] * shape[1]; i++) tokens[i] = tp_token(g, at, i);
    dtrain_tensor *input = dtrain_tape_input(s->tape, DTRAIN_DTYPE_I32, 2, shape, tokens, false);
    return dtrain_embedding(s->tape, input, param_of(s, n->w), param_of(s, n->b));
}

static dtrain_tensor *loss_of(rank_state *s, const tp_node *n, tp_place at, dtrain_tensor *logits)
{
    const tp_program *g = &s->y->g;
    const int64_t rows = tp_rows(g, at), columns = g->node[n->in[0]].n;
    int32_t targets[1024];
    for (int64_t i = 0; i < rows; i++)
        targets[i] = tp_target(g, at, n->classes ? n->classes : columns, i);
    dtrain_tensor *input = dtrain_tape_input(s->tape, DTRAIN_DTYPE_I32, 1, &rows, targets, false);
    return dtrain_cross_entropy(s->tape, logits, input, n->classes, (float)n->number);
}

static dtrain_tensor *put(rank_state *s, const tp_node *n, tp_place at, dtrain_tensor *x)
{
    const bool odd = s->y->g.sequence_parallel && tp_rows(&s->y->g, at) % s->y->g.tensor;
    return dtrain_place(
        s->tape, x, n->of_stream && odd ? DTRAIN_PLACEMENT_WHOLE : (dtrain_placement)n->placement);
}

static dtrain_tensor *run_node(rank_state *s, const tp_node *n, tp_place at)
{
    dtrain_tape *tape = s->tape;
    dtrain_tensor *in[3] = {NULL, NULL, NULL};
    dtrain_param *w = param_of(s, n->w), *b = param_of(s, n->b);
    dtrain_tensor **stream = n->stream ? &s->stream : NULL;
    for (int i = 0; i < 3; i++)
        if (n->in[i] >= 0) in[i] = s->value[n->in[i]];
    /* A norm reads the branch, and what it makes of it and the stream is the sum. */
    if (n->stream && s->y->g.node[n->in[0]].of_stream && s->y->g.node[n->in[0]].kind == TP_ADD)
        in[0] = s->value[s->y->g.node[n->in[0]].in[0]];
    switch (n->kind) {
    case TP_EMBEDDING: return embed(s, n, at);
    case TP_LINEAR: return dtrain_linear(tape, in[0], w, b, (dtrain_activation)n->activation);
    case TP_ATTENTION: return attend(s, n, at, in);
    case TP_ROTARY:
        return dtrain_rotary(tape, in[0], s->y->g.sequence, n->heads, n->rotated, (float)n->number);
    case TP_LAYERNORM: return dtrain_layernorm(tape, in[0], stream, w, b, (float)n->number);
    case TP_RMS_NORM: return dtrain_rms_norm(tape, in[0], stream, w, (float)n->number);
    case TP_SOFTMAX: return dtrain_softmax(tape, in[0]);
    case TP_SWIGLU: return dtrain_swiglu(tape, in[0], in[1]);
    case TP_ACTIVATE: return dtrain_activate(tape, in[0], (dtrain_activation)n->activation);
    case TP_DROPOUT: return dtrain_dropout(tape, in[0], (float)n->number);
    case TP_MULTIPLY: return dtrain_multiply(tape, in[0], in[1]);
    case TP_ADD: return n->of_stream ? NULL : dtrain_add(tape, in[0], in[1]);
    case TP_SCALE: return dtrain_scale(tape, in[0], (float)n->number);
    case TP_CAST: return dtrain_cast(tape, in[0], (dtrain_dtype)n->dtype);
    case TP_PLACE: return put(s, n, at, in[0]);
    case TP_RESHAPE: {
        int64_t there[3], back[2];
        there[0] = tp_batch(&s->y->g, at), there[1] = s->y->g.sequence, there[2] = n->n;
        back[0] = there[0] * there[1], back[1] = n->n;
        return dtrain_reshape(tape, dtrain_reshape(tape, in[0], 3, there), 2, back);
    }
    case TP_CROSS_ENTROPY: return loss_of(s, n, at, in[0]);
    default: return NULL;
    }
}

/* Compare what a node made with the oracle's, element by element, where this rank's are. */
static int check_node(rank_state *s, int at)
{
    const tp_program *g = &s->y->g;
    const tp_node *n = &g->node[at];
    const tp_pass *o = &s->y->first[s->data_rank];
    const dtrain_tensor *x = s->value[at];
    const int64_t rows = n->kind == TP_CROSS_ENTROPY ? 1 : o->rows;
    const uint32_t placement = g->tensor > 1 ? n->placement : DTRAIN_PLACEMENT_WHOLE;
    const bool by_rows = placement == DTRAIN_PLACEMENT_ROWS;
    double most = 1, worst = 0;
    if (x->placement != placement)
        return wrong(s, "node %d (%s) is placed %u, expected %u", at, tp_names[n->kind],
                     x->placement, placement);
    const int64_t begin = by_rows ? rows * s->tensor_rank / g->tensor : 0;
    const int64_t end = by_rows ? rows * (s->tensor_rank + 1) / g->tensor : rows;
    float *values = (float *)malloc((size_t)(x->count ? x->count : 1) * sizeof *values);
    const dtrain_result result = dtrain_tensor_read(s->tape, x, values, NULL);
    int64_t k = 0, row = 0, column = 0;
    for (int64_t i = 0; i < rows * n->n && n->kind != TP_CROSS_ENTROPY; i++)
        most = fabs(o->y[at][i]) > most ? fabs(o->y[at][i]) : most;
    for (int64_t r = begin; r < end && result == DTRAIN_OK; r++)
        for (int64_t c = 0; c < n->n; c++) {
            if (placement == DTRAIN_PLACEMENT_COLUMNS &&
                tp_owner(&g->cut[n->cut].cut, g->cut[n->cut].whole, g->tensor, c) != s->tensor_rank)
                continue;
            const double expected = n->kind == TP_CROSS_ENTROPY ? o->loss : o->y[at][r * n->n + c];
            const double off_by = k < x->count ? fabs((double)values[k] - expected) : INFINITY;
            if (!(off_by <= worst)) worst = off_by, row = r, column = c;
            k++;
        }
    free(values);
    if (result != DTRAIN_OK)
        return wrong(s, "node %d (%s): %.300s", at, tp_names[n->kind], dtrain_last_error());
    if (k != x->count)
        return wrong(s, "node %d (%s) has %lld elements, expected %lld", at, tp_names[n->kind],
                     (long long)x->count, (long long)k);
    if (!(worst <= (g->narrow ? 0.2 : 3e-5) * most))
        return wrong(s, "node %d (%s) is off by %g in row %lld, column %lld", at, tp_names[n->kind],
                     worst, (long long)row, (long long)column);
    return 0;
}

static int run_pass(rank_state *s, tp_place at)
{
    const tp_program *g = &s->y->g;
    const uint32_t flags =
        (g->narrow ? DTRAIN_TAPE_BF16 : 0) | (at.evaluation ? DTRAIN_TAPE_NO_GRAD : 0);
    const bool look = at.step == 0 && at.micro == 0 && !g->recompute && !g->wild;
    int unit = -1;
    memset(s->value, 0, sizeof s->value);
    s->stream = NULL;
    GOOD(dtrain_tape_begin(s->tape, flags, seed_of(g, at)));
    for (int i = 0; i < g->nodes; i++) {
        const tp_node *n = &g->node[i];
        while (unit < n->block) dtrain_tape_unit(s->tape, (uint32_t)++unit);
        if (tp_skipped(g, at, i)) {
            if (i == g->block[n->block].last) s->value[i] = s->value[g->block[n->block].in];
            continue;
        }
        s->value[i] = run_node(s, n, at);
        if (n->stream && g->node[n->in[0]].of_stream && g->node[n->in[0]].kind == TP_ADD)
            s->value[n->in[0]] = s->stream;
        if (!s->value[i] && !(n->kind == TP_ADD && n->of_stream))
            return wrong(s, "node %d (%s): %.300s", i, tp_names[n->kind], dtrain_last_error());
    }
    for (int i = 0; i < g->nodes && look; i++)
        if (s->value[i] && !tp_skipped(g, at, i) && check_node(s, i)) return 1;
    dtrain_tensor *loss = s->value[g->nodes - 1];
    const int slot = at.evaluation ? MOST_STEPS : at.step;
    GOOD(dtrain_tensor_read(s->tape, loss, &s->y->losses_found[s->rank][slot][at.micro], NULL));
    if (at.evaluation) return 0;
    GOOD(dtrain_tape_backward(s->tape, loss, 1 / (float)g->micro));
    GOOD(dtrain_strategy_finish(s->strategy));
    return 0;
}

static void describe(rank_state *s, dtrain_strategy_desc *desc)
{
    const tp_program *g = &s->y->g;
    for (int p = 0; p < g->params; p++) {
        const tp_param *from = &g->param[p];
        dtrain_param *to = &s->params[p];
        memset(to, 0, sizeof *to);
        to->name = from->name;
        to->shape[0] = from->shape[0], to->shape[1] = from->shape[1];
        to->unit = from->unit;
        to->flags = from->frozen ? DTRAIN_PARAM_FROZEN : 0;
        to->init = from->init;
        to->init_scale = from->scale;
        to->cut = from->cut;
        if (from->alias >= 0) to->alias_of = &s->params[from->alias];
        if (from->alias >= 0 && g->seed % 3 == 0) { /* shape and cut of its target */
            to->shape[0] = to->shape[1] = 0;
            memset(&to->cut, 0, sizeof to->cut);
        }
    }
    memset(desc, 0, sizeof *desc);
    desc->kind = g->kind;
    desc->average = g->means ? DTRAIN_AVERAGE_MEANS : DTRAIN_AVERAGE_SAMPLES;
    desc->accumulation = g->accumulation;
    desc->missing_gradient = g->missing;
    desc->param_dtype = g->param_dtype;
    desc->reduce_dtype = g->reduce_dtype;
    desc->hierarchical = g->hierarchical;
    desc->node_size = g->node_size;
    desc->no_overlap = g->no_overlap;
    desc->keep_after_forward = g->keep && g->kind >= DTRAIN_STRATEGY_FULL_SHARD;
    desc->first_bucket_bytes = 500; /* several buckets for a model this small */
    desc->bucket_bytes = 2000;
    desc->init_seed = g->seed;
    desc->mesh = s->mesh;
}

static int train(rank_state *s)
{
    const tp_program *g = &s->y->g;
    tp_place at;
    memset(&at, 0, sizeof at);
    at.data_rank = s->data_rank;
    for (at.step = 0; at.step < g->steps; at.step++) {
        float scale = 1;
        for (at.micro = 0; at.micro < g->micro; at.micro++) {
            GOOD(dtrain_strategy_accumulate(s->strategy, at.micro + 1 < g->micro));
            bool over = false;
            if (tp_joins(g, at)) GOOD(dtrain_strategy_join(s->strategy, &over));
            else if (run_pass(s, at)) return 1;
        }
        GOOD(dtrain_grad_norm(s->strategy, NULL, g->clip, &s->y->norms_found[s->rank][at.step],
                              &scale));
        GOOD(dtrain_optimizer_step(s->optimizer, g->rate, scale));
    }
    at.step = MOST_STEPS, at.micro = 0, at.evaluation = true;
    if (g->evaluate && run_pass(s, at)) return 1;
    for (int p = 0; p < g->params; p++)
        GOOD(
            dtrain_strategy_read(s->strategy, (size_t)p, s->y->found[s->rank] + g->param[p].first));
    GOOD(dtrain_strategy_verify(s->strategy, NULL));
    return 0;
}

static int set_up(rank_state *s)
{
    const dtrain_optimizer_desc sgd = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_SGD);
    const tp_program *g = &s->y->g;
    dtrain_mesh_desc mesh;
    dtrain_strategy_desc desc;
    dtrain_mesh_info info;
    memset(&mesh, 0, sizeof mesh);
    mesh.tensor = g->tensor;
    mesh.data = g->data;
    mesh.sequence_parallel = g->sequence_parallel;
    GOOD(dtrain_mesh_create(s->world, &mesh, &s->mesh));
    dtrain_mesh_query(s->mesh, &info);
    s->data_rank = info.data_rank;
    s->tensor_rank = info.tensor_rank;
    describe(s, &desc);
    GOOD(dtrain_strategy_create(s->world, s->params, (size_t)g->params, &desc, &s->strategy));
    GOOD(dtrain_optimizer_create(s->world, s->strategy, &sgd, &s->optimizer));
    GOOD(dtrain_tape_create(s->world, s->strategy, NULL, &s->tape));
    if (g->recompute) GOOD(dtrain_tape_recompute(s->tape, g->recompute, g->recompute_ops));
    return 0;
}

static int rank_main(dtrain_world *world, void *user)
{
    rank_state state, *s = &state;
    memset(s, 0, sizeof *s);
    s->y = (play *)user;
    s->world = world;
    s->rank = dtrain_world_rank(world);
    const int result = set_up(s) || train(s);
    dtrain_tape_destroy(s->tape);
    dtrain_optimizer_destroy(s->optimizer);
    dtrain_strategy_destroy(s->strategy);
    dtrain_mesh_destroy(s->mesh);
    return result;
}

/* ---- What one rank has: values at the beginning, masks of dropout ---------------------------------- */

static float *mask_of(rank_state *s, const tp_node *n, int64_t rows)
{
    int64_t shape[2];
    float *ones = (float *)malloc((size_t)(rows * n->n) * sizeof *ones);
    shape[0] = rows, shape[1] = n->n;
    for (int64_t i = 0; i < rows * n->n; i++) ones[i] = 1;
    dtrain_tensor *x = dtrain_tape_input(s->tape, DTRAIN_DTYPE_F32, 2, shape, ones, false);
    if (dtrain_tensor_read(s->tape, dtrain_dropout(s->tape, x, (float)n->number), ones, NULL) !=
        DTRAIN_OK)
        ones[0] = NAN;
    return ones;
}

static void draw_masks(rank_state *s, tp_place at)
{
    const tp_program *g = &s->y->g;
    float ***masks = &s->y->masks[at.data_rank][at.step][at.micro];
    int count = 0;
    *masks = (float **)calloc(MOST_NODES, sizeof **masks);
    dtrain_tape_begin(s->tape, 0, seed_of(g, at));
    for (int i = 0; i < g->nodes; i++) {
        const tp_node *n = &g->node[i];
        if (n->kind != TP_DROPOUT || tp_skipped(g, at, i)) continue;
        (*masks)[count++] = mask_of(s, n, tp_rows(g, at));
    }
}

static int one_rank(dtrain_world *world, void *user)
{
    rank_state state, *s = &state;
    dtrain_strategy_desc desc;
    tp_place at;
    memset(s, 0, sizeof *s);
    memset(&at, 0, sizeof at);
    s->y = (play *)user;
    const tp_program *g = &s->y->g;
    describe(s, &desc);
    desc.kind = DTRAIN_STRATEGY_DDP;
    desc.node_size = 0, desc.accumulation = 0, desc.keep_after_forward = desc.hierarchical = false;
    desc.param_dtype = 0;
    GOOD(dtrain_strategy_create(world, s->params, (size_t)g->params, &desc, &s->strategy));
    for (int p = 0; p < g->params; p++)
        GOOD(dtrain_strategy_read(s->strategy, (size_t)p, s->y->init + g->param[p].first));
    GOOD(dtrain_tape_create(world, NULL, NULL, &s->tape));
    for (at.data_rank = 0; at.data_rank < g->data; at.data_rank++)
        for (at.step = 0; at.step < g->steps; at.step++)
            for (at.micro = 0; at.micro < g->micro; at.micro++) draw_masks(s, at);
    dtrain_tape_destroy(s->tape);
    dtrain_strategy_destroy(s->strategy);
    return 0;
}

/* ---- Judging --------------------------------------------------------------------------------------- */

static long tensors_seen, shifts_seen, shifts_noticed, doubles_noticed;

/* How far values may be from those expected, of a tensor that training has moved by `moved`, while all of the model
 * has moved by `all`. */
static double bound(const tp_program *g, double moved, double all, double size)
{
    return g->narrow ? 0.5 * moved + 0.1 * all : 3e-3 * moved + 2e-5 * all + 1e-6 * size;
}

static bool judge_param(play *y, int p, double all, char *text, size_t room)
{
    const tp_program *g = &y->g;
    const tp_param *q = &g->param[p];
    const double *expected = y->after + q->first;
    double moved = 0, size = 0, error = 0, shifted = 0;
    for (int64_t i = 0; i < q->count; i++) {
        const double before = (double)y->init[q->first + i], next = expected[(i + 1) % q->count];
        const double off_by = (double)y->found[0][q->first + i] - expected[i];
        moved += (expected[i] - before) * (expected[i] - before);
        size += expected[i] * expected[i];
        error += off_by * off_by;
        shifted += (next - expected[i]) * (next - expected[i]);
    }
    const double limit = bound(g, sqrt(moved), all, sqrt(size));
    if (!g->narrow && !q->frozen) {
        tensors_seen++;
        shifts_seen += q->count > 1;
        shifts_noticed += q->count > 1 && sqrt(shifted) > limit;
        doubles_noticed += sqrt(moved) > limit;
    }
    if (sqrt(error) <= limit) return true;
    snprintf(text, room, "parameter %d (%s) is off by %g, training moves it by %g; allowed are %g",
             p, q->name, sqrt(error), sqrt(moved), limit);
    return false;
}

static bool judge(play *y, char *text, size_t room)
{
    const tp_program *g = &y->g;
    const int ranks = g->tensor * g->data;
    double all = 0;
    for (int r = 0; r < ranks; r++)
        for (int step = 0; step <= MOST_STEPS; step++)
            for (int micro = 0; micro < g->micro; micro++) {
                const double loss = y->losses[r / g->tensor][step][micro],
                             found = (double)y->losses_found[r][step][micro];
                if (fabs(found - loss) <=
                    (g->narrow ? 0.2 : 1e-4 * (1 + 4 * step)) * (1 + fabs(loss)))
                    continue;
                snprintf(text, room, "rank %d, step %d, micro-batch %d: loss %.9g, expected %.9g",
                         r, step, micro, found, loss);
                return false;
            }
    for (int step = 0; step < g->steps; step++)
        if (!(fabs((double)y->norms_found[0][step] - y->norms[step]) <=
              (g->narrow ? 0.2 + 0.2 * step : 1e-3) * y->norms[step])) {
            snprintf(text, room, "step %d: norm %.9g, expected %.9g", step,
                     (double)y->norms_found[0][step], y->norms[step]);
            return false;
        }
    for (int r = 1; r < ranks; r++) {
        if (memcmp(y->norms_found[r], y->norms_found[0], sizeof y->norms_found[0]) != 0) {
            snprintf(text, room, "rank %d has another norm than rank 0", r);
            return false;
        }
        if (r % g->tensor &&
            memcmp(y->losses_found[r], y->losses_found[r - 1], sizeof y->losses_found[0]) != 0) {
            snprintf(text, room, "rank %d has another loss than its neighbour on the tensor axis",
                     r);
            return false;
        }
    }
    for (int64_t i = 0; i < g->elements; i++)
        all += (y->after[i] - (double)y->init[i]) * (y->after[i] - (double)y->init[i]);
    for (int p = 0; p < g->params; p++) {
        const int64_t first = g->param[p].first;
        if (g->param[p].alias >= 0) continue;
        if (!judge_param(y, p, sqrt(all), text, room)) return false;
        for (int r = 1; r < ranks; r++)
            if (memcmp(y->found[r] + first, y->found[0] + first,
                       (size_t)g->param[p].count * sizeof(float)) != 0) {
                snprintf(text, room, "rank %d has other bits of parameter %d (%s) than rank 0", r,
                         p, g->param[p].name);
                return false;
            }
    }
    return true;
}

static void say_nothing(void *user, dtrain_log_level level, int rank, const char *text)
{
    (void)user, (void)level, (void)rank, (void)text;
}

static long wild_seen, wild_refused, left_out;

static bool run_ranks(play *y, int ranks, dtrain_rank_fn main, char *text, size_t room)
{
    dtrain_launch_desc desc = ranks_desc(
        ranks, ranks > 1 && y->g.processes ? DTRAIN_LAUNCH_PROCESSES : DTRAIN_LAUNCH_THREADS);
    desc.log = say_nothing;
    desc.timeout_ms = 10000;
#ifdef DTRAIN_CUDA_EMULATION
    desc.device_ops =
        dtrain_cuda_device_ops(); /* staged: its memory reaches other ranks through the host's */
    if (ranks > 1 && y->g.seed % 2) {
        dtrain_emulation_set_device_count(MOST_RANKS);
        nccl_mock.delay_steps = (int)(y->g.seed / 2 % 5);
        nccl_mock.progress_polls = (int)(y->g.seed / 10 % 3);
        desc.comm_ops = dtrain_nccl_comm_ops();
    }
    const int misuses = nccl_mock_count.misuses;
#endif
    const dtrain_result result = dtrain_launch(&desc, main, y, NULL);
#ifdef DTRAIN_CUDA_EMULATION
    if (result == DTRAIN_OK && nccl_mock_count.misuses != misuses) {
        snprintf(text, room, "NCCL was misused %d times", nccl_mock_count.misuses - misuses);
        return false;
    }
#endif
    for (int r = 0; r < ranks;
         r++) /* the first cause is the one that no other rank is quoted for */
        if (y->text[r][0] && !strstr(y->text[r], "rank failed")) {
            snprintf(text, room, "rank %d: %s", r, y->text[r]);
            return false;
        }
    snprintf(text, room, "%s", result == DTRAIN_OK ? "" : dtrain_last_error());
    return result == DTRAIN_OK;
}

static void forget(play *y)
{
    for (int r = 0; r < MOST_RANKS; r++) {
        if (y->first[r].g) tp_free(&y->first[r]);
        for (int step = 0; step < MOST_STEPS; step++)
            for (int micro = 0; micro < MOST_MICRO; micro++) {
                for (int i = 0; i < MOST_NODES && y->masks[r][step][micro]; i++)
                    free(y->masks[r][step][micro][i]);
                free(y->masks[r][step][micro]);
            }
    }
    free(y->init);
    free(y->after);
    munmap(y->found[0], sizeof *y->init * MOST_RANKS * (size_t)y->g.elements);
    munmap(y, sizeof *y);
}

static bool passes(uint64_t seed, uint32_t without, char *text, size_t room, bool words)
{
    play *y = (play *)ranks_shared(sizeof *y);
    generate(&y->g, seed, without);
    if (words) print_program(&y->g, without);
    y->init = (float *)calloc((size_t)y->g.elements, sizeof *y->init);
    y->found[0] = (float *)ranks_shared(sizeof *y->init * MOST_RANKS * (size_t)y->g.elements);
    for (int r = 1; r < MOST_RANKS; r++) y->found[r] = y->found[r - 1] + y->g.elements;
    bool good = run_ranks(y, 1, one_rank, text, room);
    if (good) expect(y);
    if (y->kink) {
        left_out++;
        forget(y);
        return true;
    }
    const double start = test_seconds();
    if (good) {
        good = run_ranks(y, y->g.tensor * y->g.data, rank_main, text, room);
        /* What an operation cannot use it refuses, on all ranks at once. */
        const bool refused =
            !good && y->g.wild && strstr(text, ": node ") && test_seconds() < start + 5;
        wild_seen += y->g.wild, wild_refused += refused;
        good = refused || (good && judge(y, text, room));
    }
    forget(y);
    return good;
}

static bool run_seed(uint64_t seed, bool words)
{
    char text[600], other[600];
    uint32_t without = 0;
    if (passes(seed, 0, text, sizeof text, words)) return true;
    printf("  FAIL seed %llu: %s\n", (unsigned long long)seed, text);
    if (getenv("DTRAIN_TEST_FIRST")) exit(1); /* broken on purpose: that it fails is enough */
    for (int i = 0; i < WITHOUTS; i++)
        if (!passes(seed, without | 1u << i, other, sizeof other, false)) {
            without |= 1u << i;
            memcpy(text, other, sizeof text);
        }
    passes(seed, without, text, sizeof text, true);
    printf("  %s\n  again: build/tests/test_tensor_programs --seed %llu\n", text,
           (unsigned long long)seed);
    return false;
}

static const uint64_t failed_once[] = {618034011, 618034027, 618034012, 618034477, 618035920};

int main(int argc, char **argv)
{
    seeds s = seeds_of(argc, argv, MANY, 0);
    if (test_full() && argc == 1) s.count = test_draws(MANY, FULL, 10 * FULL), s.end = 0;
    setvbuf(stdout, NULL, _IOLBF, 0);
    const int status =
        seeds_run(&s, failed_once, sizeof failed_once / sizeof *failed_once, run_seed);
    printf("  of %ld tensors %ld of %ld shifted ones and %ld with twice their gradients would be "
           "noticed\n",
           tensors_seen, shifts_noticed, shifts_seen, doubles_noticed);
    printf("  of %ld programs that place tensors in any way %ld were refused; %ld were left out, "
           "where rounding decides\n",
           wild_seen, wild_refused, left_out);
#ifdef DTRAIN_CUDA_EMULATION
    if (!s.one && nccl_mock_count.launches == 0) {
        printf("  FAIL no collective went over NCCL\n");
        return 1;
    }
#endif
    const bool vacuous = !s.one && (shifts_noticed * 100 < shifts_seen * 97 ||
                                    doubles_noticed * 10 < tensors_seen * 8);
    if (vacuous) printf("  FAIL the bounds are so wide that wrong numbers pass\n");
    return status || vacuous;
}
