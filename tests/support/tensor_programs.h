/* tensor_programs.h: random programs over the axes of a mesh, which are pure functions of a seed: how they are made,
 * printed and shrunk, what plain loops in double precision (tensor_oracle.h) expect of them, and how a rank builds
 * their passes. test_tensor_programs runs them over tensor x data axes by calls of its own, test_3d_programs over a
 * pipeline by a trainer. */
#ifndef TENSOR_PROGRAMS_H
#define TENSOR_PROGRAMS_H

#include <limits.h>

#include "ranks.h"
#include "seeds.h"
#include "tensor_oracle.h"
#ifdef DTRAIN_CUDA_EMULATION
#include "nccl/mock/nccl_mock.c"
#include "nccl/mock/emulated_device.h"
#endif

enum { MOST_RANKS = 8, MOST_STEPS = 3, MOST_MICRO = 8 };

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
    WITHOUT_PIPELINE,
    WITHOUT_UPSET,
    WITHOUT_MOVE,
    WITHOUT_OPTIMIZER,
    WITHOUT_CROSSING,
    WITHOUT_TIES,
    WITHOUTS
};
static const char *const without_names[WITHOUTS] = {"steps",
                                                    "micro-batches",
                                                    "data axis",
                                                    "kind",
                                                    "sequence parallelism",
                                                    "skips",
                                                    "ignored targets",
                                                    "recompute",
                                                    "bf16",
                                                    "clipping",
                                                    "stream",
                                                    "frozen",
                                                    "dropout",
                                                    "places",
                                                    "blocks",
                                                    "evaluation",
                                                    "joins",
                                                    "ReLU",
                                                    "processes",
                                                    "pipeline",
                                                    "overflow",
                                                    "move",
                                                    "optimizer",
                                                    "crossing",
                                                    "ties"};

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

static inline uint64_t roll(maker *m, uint64_t limit) { return ranks_random(&m->state, limit); }
static inline bool over_pipeline(const maker *m) { return m->g->pipeline > 0; }
static inline bool chance(maker *m, uint64_t rate) { return roll(m, rate) == 0; }
static inline bool off(const maker *m, int what) { return m->without >> what & 1; }

static inline dtrain_cut cut_of(uint32_t axis, uint32_t components, int64_t parts)
{
    dtrain_cut cut;
    memset(&cut, 0, sizeof cut);
    cut.axis = axis, cut.components = components, cut.parts = parts;
    return cut;
}

static inline int add_param(maker *m, const char *what, int64_t rows, int64_t columns,
                            dtrain_cut cut, uint32_t init, double scale)
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
static inline int add_cut(maker *m, dtrain_cut cut, int64_t whole)
{
    cut.axis = DTRAIN_CUT_ROWS;
    m->g->cut[m->g->cuts].cut = cut;
    m->g->cut[m->g->cuts].whole = whole;
    return m->g->cuts++;
}

/* A node like its first input. In a wild program that may lie in any way. */
static inline int add_node(maker *m, tp_kind kind, int a, int b)
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
static inline uint32_t stream_of(const maker *m)
{
    return m->g->sequence_parallel ? DTRAIN_PLACEMENT_ROWS : DTRAIN_PLACEMENT_WHOLE;
}

static inline int linear(maker *m, int x, int64_t out, dtrain_cut cut, uint32_t activation)
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

static inline int place(maker *m, int x, uint32_t placement)
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

static inline uint32_t activation(maker *m, bool or_none)
{
    const uint32_t drawn = (uint32_t)roll(m, 4); /* dtrain_activation, of which 0 is none */
    if (drawn == DTRAIN_ACTIVATION_RELU && (roll(m, 3) || off(m, WITHOUT_RELU)))
        return DTRAIN_ACTIVATION_GELU;
    return drawn || or_none ? drawn : DTRAIN_ACTIVATION_SILU;
}

/* Something that is done element by element, wherever the elements are. */
static inline int element_by_element(maker *m, int x)
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
static inline int norm(maker *m, int h, int *stream)
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

static inline int attention(maker *m, int x)
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
static inline void share_weight(tp_program *g, int node, int earlier)
{
    tp_param *p = &g->param[g->node[node].w];
    const int first = g->node[earlier].w;
    if (g->pipeline && g->untied) return;
    if (p->cut.axis != g->param[first].cut.axis || p->unit == g->param[first].unit) return;
    p->alias = g->param[first].alias >= 0 ? g->param[first].alias : first;
    p->frozen = g->param[p->alias].frozen = false;
}

static inline int mlp(maker *m, int x)
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
static inline int trip(maker *m, int x)
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
static inline int make_block(maker *m, int h, int *stream)
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

static inline void make_head(maker *m, int h, int *stream, int table)
{
    tp_program *g = m->g;
    const bool tied = table >= 0 && chance(m, 2) && !g->untied;
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

static inline int64_t common_divisor(int64_t a, int64_t b)
{
    return b ? common_divisor(b, a % b) : a;
}

static inline void make_settings(maker *m)
{
    static const int axes[][2] = {{2, 1}, {2, 2}, {3, 1}, {4, 1}, {8, 1}, {2, 4}, {3, 2},
                                  {4, 2}, {2, 3}, {1, 2}, {1, 1}, {2, 2}, {5, 1}, {1, 4}};
    /* tensor and data beside a pipeline */
    static const int beside[][2] = {{1, 1}, {1, 1}, {1, 2}, {1, 3}, {1, 4}, {2, 1},
                                    {2, 1}, {2, 2}, {2, 2}, {3, 1}, {4, 1}};
    tp_program *g = m->g;
    const int *axis = over_pipeline(m) ? beside[roll(m, sizeof beside / sizeof *beside)]
                                       : axes[roll(m, sizeof axes / sizeof *axes)];
    const uint32_t kind = (uint32_t)(1 + roll(m, over_pipeline(m) ? 2 : 6));
    g->tensor = axis[0];
    g->data = axis[1];
    g->sequence_parallel = roll(m, 2);
    g->steps = 2 + (int)roll(m, MOST_STEPS - 1);
    g->micro = 1 + (int)roll(m, over_pipeline(m) ? MOST_MICRO : 3);
    (void)chance(m,
                 5); /* of a setting that is gone: the seeds below still mean the same programs */
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
    g->wild = chance(m, 5) && g->tensor > 1 && !over_pipeline(m);
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

/* Choose the stages of one layout, of `units` units. */
static inline void make_layout(maker *m, tp_layout *l, int tensor, int units)
{
    const tp_program *g = m->g;
    l->tensor = tensor;
    l->kind = off(m, WITHOUT_KIND) ? DTRAIN_STRATEGY_DDP : (uint32_t)(1 + roll(m, 2));
    l->schedule = (uint32_t)roll(m, 4);
    l->chunks = l->schedule == DTRAIN_PIPELINE_INTERLEAVED ? 1 + (uint32_t)roll(m, 3) : 1;
    if (units / (int)l->chunks < 2) l->schedule = 0, l->chunks = 1;
    const int room = MOST_RANKS / tensor / g->data, most = units / (int)l->chunks;
    l->pipeline = 2 + (int)roll(m, (uint64_t)((most < room ? most : room) - 1));
    if (off(m, WITHOUT_PIPELINE)) l->pipeline = 1;
    const int stages = l->pipeline * (int)l->chunks;
    l->listed = roll(m, 2);
    for (int i = 0; i < stages; i++) l->units[i] = 1;
    for (int i = stages; i < units; i++) l->units[roll(m, (uint64_t)stages)]++;
}

/* Choose what a trainer does with a program: its layouts, optimizer, an overflow, where data ends. */
static inline void make_training(maker *m)
{
    tp_program *g = m->g;
    static const uint32_t optimizers[] = {DTRAIN_OPTIMIZER_SGD, DTRAIN_OPTIMIZER_SGD,
                                          DTRAIN_OPTIMIZER_ADAMW};
    g->moves = chance(m, 2) && !off(m, WITHOUT_MOVE) && g->steps > 1
                   ? 1 + (int)roll(m, (uint64_t)g->steps - 1)
                   : 0;
    make_layout(m, &g->layout[0], g->tensor, g->blocks);
    make_layout(m, &g->layout[1], roll(m, 2) ? g->tensor : 1, g->blocks);
    if (chance(m, 4)) g->layout[1].pipeline = 1;
    g->optimizer = off(m, WITHOUT_OPTIMIZER) ? DTRAIN_OPTIMIZER_SGD : optimizers[roll(m, 3)];
    g->momentum = g->optimizer == DTRAIN_OPTIMIZER_SGD && roll(m, 2) ? 0.9f : 0;
    g->nesterov = g->momentum > 0 && roll(m, 2);
    g->decay = roll(m, 2) ? 0.1f : 0;
    if (off(m, WITHOUT_OPTIMIZER)) g->momentum = g->decay = 0, g->nesterov = false;
    if (g->optimizer == DTRAIN_OPTIMIZER_ADAMW) g->rate = 0.03f;
    g->scaled = chance(m, 2);
    g->upset.step =
        g->scaled && roll(m, 3) && !off(m, WITHOUT_UPSET) ? (int)roll(m, (uint64_t)g->steps) : -1;
    g->upset.block = (int)roll(m, (uint64_t)g->blocks - 1);
    g->upset.data_rank = (int)roll(m, (uint64_t)g->data);
    g->upset.micro = (int)roll(m, (uint64_t)g->micro);
    if (g->upset.step >= 0) g->param[0].frozen = false; /* gradients go all the way */
    for (int r = 0; r < g->data; r++)
        g->end[r] = g->joins && r ? (int)roll(m, (uint64_t)(g->steps * g->micro + 1)) : INT_MAX;
    if (g->joins) /* of all ranks: no step is without data */
        g->end[0] = (g->steps - 1) * g->micro + 1 + (int)roll(m, (uint64_t)g->micro);
    g->idle = chance(m, 3) ? (int)roll(m, (uint64_t)g->blocks - 1) : -1;
}

/* Make the program of a seed; over a pipeline, by a trainer, where `trained`. */
static inline void generate(tp_program *g, uint64_t seed, uint32_t without, bool trained)
{
    maker m;
    memset(&m, 0, sizeof m);
    memset(g, 0, sizeof *g);
    m.g = g, m.state = ranks_mix(seed + 4242), m.without = without;
    g->seed = seed;
    g->pipeline = trained;
    make_settings(&m);
    g->untied = off(&m, WITHOUT_TIES);
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
    const int blocks = off(&m, WITHOUT_BLOCK) ? 1 : 1 + (int)roll(&m, trained ? 6 : 3);
    int made[MOST_BLOCKS] = {0}; /* by block: the node that goes on */
    made[0] = h;
    for (int b = 0; b < blocks; b++) {
        const int nodes = g->nodes, params = g->params;
        m.block++;
        if (trained && b && !g->stream && chance(&m, 3) &&
            !off(&m, WITHOUT_CROSSING)) /* over stages */
            h = add_node(&m, TP_ADD, h, made[roll(&m, (uint64_t)m.block - 1)]);
        h = make_block(&m, h, &stream);
        made[m.block] = h;
        if (g->params > params) continue;
        g->block[m.block--].first =
            -1; /* without parameters it is no unit: a part of the one before */
        for (int i = nodes; i < g->nodes; i++) g->node[i].block = m.block;
    }
    m.block++;
    make_head(&m, h, &stream, table);
    g->blocks = m.block + 1;
    if (trained) make_training(&m);
}

static inline void print_program(const tp_program *g, uint32_t without)
{
    static const char *const placements[] = {"whole", "columns", "rows"};
    printf("    seed %llu: tensor %d x data %d, kind %u, %d steps of %d micro-batches, sequence "
           "%lld%s%s%s%s, "
           "recompute %u (%u), clip %g, batches of %lld\n",
           (unsigned long long)g->seed, g->tensor, g->data, g->kind, g->steps, g->micro,
           (long long)g->sequence, g->sequence_parallel ? ", sequence parallel" : "",
           g->narrow ? ", bf16" : "", g->no_overlap ? ", no overlap" : "", g->keep ? ", kept" : "",
           g->recompute, g->recompute_ops, (double)g->clip, (long long)g->batch_unit);
    if (g->processes) printf("    ranks are processes\n");
    for (int i = 0; g->pipeline && i < (g->moves ? 2 : 1); i++) {
        const tp_layout *l = &g->layout[i];
        printf("    layout from step %d: tensor %d x pipeline %d, schedule %u of %u chunks, kind "
               "%u, units",
               i ? g->moves : 0, l->tensor, l->pipeline, l->schedule, l->chunks, l->kind);
        for (int k = 0; l->listed && k < l->pipeline * (int)l->chunks; k++)
            printf(" %u", l->units[k]);
        printf("%s\n", l->listed ? "" : " even");
    }
    if (g->pipeline)
        printf("    idle %d, optimizer %u, momentum %g%s, decay %g, scaled %d, overflow behind "
               "block %d in "
               "step %d, "
               "micro-batch %d of rank %d, data ends at %d %d %d %d\n",
               g->idle, g->optimizer, (double)g->momentum, g->nesterov ? " (Nesterov)" : "",
               (double)g->decay, (int)g->scaled, g->upset.block, g->upset.step, g->upset.micro,
               g->upset.data_rank, g->end[0], g->end[1], g->end[2], g->end[3]);
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
    double *moments[2];          /* (elements) of the optimizer */
    double mean[MOST_STEPS + 1]; /* loss of a step over all samples; the last: evaluation */
    bool skipped[MOST_STEPS];    /* steps whose gradients overflow */
    int updates;                 /* so far */
    float **masks[MOST_RANKS][MOST_STEPS][MOST_MICRO]; /* dropout by dropout */
    tp_pass first[MOST_RANKS];                         /* the first pass, with its values */
    float *found[MOST_RANKS];                          /* (elements): parameters at the end */
    float norms_found[MOST_RANKS][MOST_STEPS];
    float losses_found[MOST_RANKS][MOST_STEPS + 1][MOST_MICRO];
    char text[MOST_RANKS][600]; /* what a rank found wrong */
    bool kink;                  /* no oracle knows what comes out */
} play;

static uint64_t (*trainer_seed)(const tp_program *g,
                                tp_place at); /* of a pass, where a trainer gives it */

static inline uint64_t seed_of(const tp_program *g, tp_place at)
{
    if (g->pipeline) return trainer_seed(g, at);
    return tp_draw(g, 99, at.data_rank, at.step, at.micro, 0);
}

/* Whether values are so large that fp32 has nothing left of the difference between two of them, as a softmax takes it:
 * powers of powers, in programs of many blocks. */
static inline bool grows(const tp_pass *s)
{
    double most = 0;
    for (int at = 0; at < s->g->nodes; at++)
        for (int64_t i = 0; i < s->rows * s->g->node[at].n; i++)
            most = fabs(s->y[at][i]) > most ? fabs(s->y[at][i]) : most;
    return !(most < 300);
}

/* One element's update, by the formulas of torch. */
static inline double expect_element(play *y, int64_t at, double weight, double gradient,
                                    double decay)
{
    const tp_program *g = &y->g;
    const double rate = (double)g->rate, momentum = (double)g->momentum;
    double *first = &y->moments[0][at], *second = &y->moments[1][at];
    if (g->optimizer == DTRAIN_OPTIMIZER_ADAMW) {
        *first = 0.9 * *first + 0.1 * gradient;
        *second = 0.99 * *second + 0.01 * gradient * gradient;
        const double mean = *first / (1 - pow(0.9, y->updates)),
                     square = *second / (1 - pow(0.99, y->updates));
        return weight - rate * decay * weight - rate * mean / (sqrt(square) + 0.05);
    }
    gradient += decay * weight;
    *first = momentum * *first + gradient;
    return weight - rate * (g->nesterov    ? gradient + momentum * *first
                            : momentum > 0 ? *first
                                           : gradient);
}

static inline void expect_update(play *y, double *weights, const double *grads, double factor)
{
    const tp_program *g = &y->g;
    y->updates++;
    for (int p = 0; p < g->params; p++) {
        const tp_param *q = &g->param[p];
        for (int64_t i = q->first; i < q->first + q->count && q->alias < 0 && !q->frozen; i++)
            weights[i] = expect_element(y, i, weights[i], factor * grads[i],
                                        q->shape[1] ? (double)g->decay : 0);
    }
}

/* Whether values are multiplied by 1 behind this node, in two factors. */
static inline bool upsets(const tp_program *g, int node)
{
    return g->pipeline && g->upset.step >= 0 && g->node[node].block == g->upset.block &&
           g->node[node + 1].block != g->upset.block;
}
/* Whether the gradient that is multiplied by 2^100 is there: a key of no length lets none through. */
static inline bool overflows(play *y, const tp_pass *s)
{
    double most = 0;
    for (int at = 0; at < s->g->nodes; at++)
        for (int64_t i = 0; upsets(s->g, at) && i < s->rows * s->g->width; i++)
            most = fabs(s->d[at][i]) > most ? fabs(s->d[at][i]) : most;
    y->kink = y->kink || (most > 0 && most < 1e-6);
    return most > 0;
}

static inline void expect_step(play *y, double *weights, double *grads, int step)
{
    const tp_program *g = &y->g;
    double total = 0, squares = 0, losses = 0;
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
            y->kink = y->kink || (g->pipeline && grows(&s));
            y->losses[r][step][micro] = s.loss;
            y->kink = y->kink || s.kink;
            if (s.valid) tp_backward(&s, 1);
            if (tp_upset(g, s.at)) y->skipped[step] = overflows(y, &s);
            const double weight = (double)s.valid;
            total += weight, losses += weight * s.loss;
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
    y->mean[step] = losses / total;
    if (y->skipped[step]) return;
    const double clip = (double)g->clip, much = y->norms[step] + 1e-6;
    expect_update(y, weights, grads, clip > 0 && much > clip ? clip / much : 1);
}

static inline void expect(play *y)
{
    const tp_program *g = &y->g;
    double *grads = tp_zeros(g->elements), total = 0;
    y->moments[0] = tp_zeros(g->elements), y->moments[1] = tp_zeros(g->elements);
    y->after = tp_zeros(g->elements);
    for (int64_t i = 0; i < g->elements; i++) y->after[i] = (double)y->init[i];
    for (int step = 0; step < g->steps; step++) expect_step(y, y->after, grads, step);
    for (int r = 0; r < g->data && g->evaluate; r++)
        for (int i = 0; i < tp_evaluations(g, r); i++) { /* each sample counts once */
            tp_pass s;
            memset(&s, 0, sizeof s);
            s.g = g;
            s.at.data_rank = r, s.at.step = MOST_STEPS, s.at.micro = i, s.at.evaluation = true;
            s.weights = y->after;
            tp_forward(&s);
            if (i == 0) y->losses[r][MOST_STEPS][0] = s.loss;
            y->mean[MOST_STEPS] += (double)s.valid * s.loss;
            total += (double)s.valid;
            tp_free(&s);
        }
    if (total > 0) y->mean[MOST_STEPS] /= total;
    free(grads);
}

/* ---- A rank ---------------------------------------------------------------------------------------- */

typedef struct rank_state {
    play *y;
    dtrain_world *world;
    int rank, data_rank, tensor_rank;
    int odd; /* 1 + the micro-batch of the first step in which this rank has another token; 0: none */
    dtrain_mesh *mesh;
    dtrain_strategy *strategy;
    dtrain_optimizer *optimizer;
    dtrain_tape *tape;
    dtrain_param params[MOST_PARAMS];
    dtrain_tensor *value[MOST_NODES];
    dtrain_tensor *stream;
} rank_state;

static inline int wrong(rank_state *s, const char *format, ...)
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
            return wrong(s, "%s: %s: %.500s", #call, dtrain_result_text(good_result), \
                         dtrain_last_error());                                        \
    } while (0)

static inline dtrain_param *param_of(rank_state *s, int p) { return p < 0 ? NULL : &s->params[p]; }

static inline dtrain_tensor *attend(rank_state *s, const tp_node *n, tp_place at,
                                    dtrain_tensor **in)
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

static inline dtrain_tensor *embed(rank_state *s, const tp_node *n, tp_place at)
{
    const tp_program *g = &s->y->g;
    int32_t tokens[1024];
    int64_t shape[2];
    shape[0] = tp_batch(g, at), shape[1] = g->sequence;
    for (int64_t i = 0; i < shape[0] * shape[1]; i++) tokens[i] = tp_token(g, at, i);
    if (s->odd && at.step == 0 && at.micro == s->odd - 1) {
        int32_t *other = &tokens[g->seed % (uint64_t)(shape[0] * shape[1])];
        *other = (int32_t)((*other + 1) % g->vocabulary);
    }
    dtrain_tensor *input = dtrain_tape_input(s->tape, DTRAIN_DTYPE_I32, 2, shape, tokens, false);
    return dtrain_embedding(s->tape, input, param_of(s, n->w), param_of(s, n->b));
}

static inline dtrain_tensor *loss_of(rank_state *s, const tp_node *n, tp_place at,
                                     dtrain_tensor *logits)
{
    const tp_program *g = &s->y->g;
    const int64_t rows = tp_rows(g, at), columns = g->node[n->in[0]].n;
    int32_t targets[1024];
    for (int64_t i = 0; i < rows; i++)
        targets[i] = tp_target(g, at, n->classes ? n->classes : columns, i);
    dtrain_tensor *input = dtrain_tape_input(s->tape, DTRAIN_DTYPE_I32, 1, &rows, targets, false);
    return dtrain_cross_entropy(s->tape, logits, input, n->classes, (float)n->number);
}

static inline dtrain_tensor *put(rank_state *s, const tp_node *n, tp_place at, dtrain_tensor *x)
{
    const bool odd = s->y->g.sequence_parallel && tp_rows(&s->y->g, at) % s->y->g.tensor;
    return dtrain_place(
        s->tape, x, n->of_stream && odd ? DTRAIN_PLACEMENT_WHOLE : (dtrain_placement)n->placement);
}

static inline dtrain_tensor *run_node(rank_state *s, const tp_node *n, tp_place at)
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

/* Multiply by 1: elsewhere twice by 1, where it happens by 2^-100 and 2^100, so that a scaled gradient overflows. */
static inline dtrain_tensor *upset(rank_state *s, dtrain_tensor *x, tp_place at)
{
    const tp_program *g = &s->y->g;
    const float little = tp_upset(g, at) ? 0x1p-100f : 1;
    for (int i = 0; i < 2 && x; i++) {
        float *factors = (float *)malloc((size_t)(tp_rows(g, at) * g->width) * sizeof *factors);
        int64_t shape[2];
        shape[0] = tp_rows(g, at), shape[1] = g->width;
        for (int64_t k = 0; k < shape[0] * shape[1]; k++) factors[k] = i ? 1 / little : little;
        dtrain_tensor *f = dtrain_tape_input(s->tape, DTRAIN_DTYPE_F32, 2, shape, factors, false);
        free(factors);
        x = dtrain_multiply(s->tape, x, dtrain_place(s->tape, f, x->placement));
    }
    return x;
}

/* Read a value of an earlier stage for nothing: the gradient that goes back for it is zero. */
static inline void make_idle(rank_state *s)
{
    const tp_program *g = &s->y->g;
    int at = 0;
    while (g->idle >= 0 && g->node[at + 1].block <= g->idle) at++;
    if (g->idle >= 0 && s->value[at]) (void)dtrain_scale(s->tape, s->value[at], 2);
}

/* Build a micro-batch's loss on the tape, whose pass has begun; NULL: an operation has refused something. */
static inline dtrain_tensor *build(rank_state *s, tp_place at)
{
    const tp_program *g = &s->y->g;
    int unit = -1;
    memset(s->value, 0, sizeof s->value);
    s->stream = NULL;
    for (int i = 0; i < g->nodes; i++) {
        const tp_node *n = &g->node[i];
        while (unit < n->block) dtrain_tape_unit(s->tape, (uint32_t)++unit);
        if (tp_skipped(g, at, i)) {
            if (i == g->block[n->block].last) s->value[i] = s->value[g->block[n->block].in];
            if (upsets(g, i)) s->value[i] = upset(s, s->value[i], at);
            continue;
        }
        if (g->pipeline && i == g->nodes - 1) make_idle(s);
        s->value[i] = run_node(s, n, at);
        if (n->stream && g->node[n->in[0]].of_stream && g->node[n->in[0]].kind == TP_ADD)
            s->value[n->in[0]] = s->stream;
        if (upsets(g, i) && s->value[i]) s->value[i] = upset(s, s->value[i], at);
        if (!s->value[i] && !(n->kind == TP_ADD && n->of_stream))
            return wrong(s, "node %d (%s): %.300s", i, tp_names[n->kind], dtrain_last_error()),
                   NULL;
    }
    return s->value[g->nodes - 1];
}

static inline void describe(rank_state *s, dtrain_strategy_desc *desc)
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
    desc->accumulation = g->accumulation;
    desc->missing_gradient = g->missing;
    desc->param_dtype = g->param_dtype;
    desc->reduce_dtype = g->reduce_dtype;
    desc->hierarchical = g->hierarchical;
    desc->node_size = g->node_size;
    desc->no_overlap = g->no_overlap;
    desc->keep_after_forward = g->keep && g->kind >= DTRAIN_STRATEGY_FULL_SHARD;
    desc->bucket_bytes = 2000; /* several buckets for a model this small */
    desc->init_seed = g->seed;
    desc->mesh = s->mesh;
}

/* ---- What one rank has: values at the beginning, masks of dropout ---------------------------------- */

static inline float *mask_of(rank_state *s, const tp_node *n, int64_t rows)
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

static inline void draw_masks(rank_state *s, tp_place at)
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

static inline int one_rank(dtrain_world *world, void *user)
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
static inline double bound(const tp_program *g, double moved, double all, double size)
{
    return g->narrow ? 0.5 * moved + 0.1 * all : 3e-3 * moved + 2e-5 * all + 1e-6 * size;
}

static inline bool judge_param(play *y, int p, double all, char *text, size_t room)
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

static inline void say_nothing(void *user, dtrain_log_level level, int rank, const char *text)
{
    (void)user, (void)level, (void)rank, (void)text;
}

static inline bool run_ranks(play *y, int ranks, dtrain_rank_fn main, char *text, size_t room)
{
    dtrain_launch_desc desc = ranks_desc(
        ranks, ranks > 1 && y->g.processes ? DTRAIN_LAUNCH_PROCESSES : DTRAIN_LAUNCH_THREADS);
    desc.options.log = say_nothing;
    desc.timeout_ms = 20000;
#ifdef DTRAIN_CUDA_EMULATION
    desc.device_ops =
        dtrain_cuda_device_ops(); /* staged: its memory reaches other ranks through the host's */
    if (ranks > 1 && y->g.seed % 2) {
        dtrain_emulation_set_device_count(MOST_RANKS);
        nccl_mock.delay_steps = (int)(y->g.seed / 2 % 5);
        nccl_mock.progress_polls = (int)(y->g.seed / 10 % 3);
        setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", 0); /* a stream for the tensor axis */
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

static inline void forget(play *y)
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
    free(y->moments[0]);
    free(y->moments[1]);
    munmap(y->found[0], sizeof *y->init * MOST_RANKS * (size_t)y->g.elements);
    munmap(y, sizeof *y);
}

/* Run a seed; where it fails take away what it fails without, and print what is left. */
static inline bool seed_passes(uint64_t seed, bool words, const char *program,
                               bool (*passes)(uint64_t, uint32_t, char *, size_t, bool))
{
    char text[700], other[700];
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
    printf("  %s\n  again: build/tests/%s --seed %llu\n", text, program, (unsigned long long)seed);
    return false;
}

#endif
