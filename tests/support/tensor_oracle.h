/* tensor_oracle.h: programs for the tensor axis, as data, and what they compute: plain loops in double precision,
 * forward and backward, of one rank that has everything. Placements, cuts and parts mean nothing here. Include it
 * after dtrain.h and test.h. */
#ifndef TENSOR_ORACLE_H
#define TENSOR_ORACLE_H

enum { MOST_NODES = 160, MOST_PARAMS = 96, MOST_CUTS = 64, MOST_BLOCKS = 9, MOST_STAGES = 12 };

typedef enum tp_kind {
    TP_EMBEDDING, /* of the tokens: w the table, b the positions or -1 */
    TP_LINEAR,
    TP_ATTENTION, /* in: q, k, v; or one packed, then -1 twice */
    TP_ROTARY,
    TP_LAYERNORM,
    TP_RMS_NORM,
    TP_SOFTMAX,
    TP_SWIGLU,
    TP_ACTIVATE,
    TP_DROPOUT,
    TP_MULTIPLY,
    TP_ADD,
    TP_SCALE,
    TP_CAST,
    TP_PLACE,
    TP_RESHAPE, /* to three axes and back to two */
    TP_CROSS_ENTROPY,
    TP_KINDS
} tp_kind;

static const char *const tp_names[TP_KINDS] = {
    "embedding", "linear", "attention", "rotary",  "layernorm",    "rms_norm",
    "softmax",   "swiglu", "activate",  "dropout", "multiply",     "add",
    "scale",     "cast",   "place",     "reshape", "cross_entropy"};

typedef struct tp_node {
    tp_kind kind;
    int in[3]; /* nodes; -1: none */
    int w, b;  /* parameters; -1: none */
    int64_t n; /* columns of the result, of the whole */
    uint32_t placement, activation;
    int cut; /* of the result's columns, where they are cut: into program.cuts */
    int block;
    double number; /* a probability, factor, epsilon, angle or share of smoothing */
    int64_t heads, kv_heads, rotated, classes;
    bool causal, lengths, heads_mask, mask;
    bool stream;    /* a norm that keeps the sum of the residual stream */
    bool of_stream; /* an add that the norm behind it makes; a place to where the stream is */
    uint32_t dtype;
} tp_node;

typedef struct tp_param {
    char name[16];
    int64_t shape[2], count, first; /* first: in arrays of all parameters */
    dtrain_cut cut;
    uint32_t unit, init;
    float scale;
    bool frozen;
    int alias; /* -1: none */
} tp_param;

/* How a program lies on ranks from some step on. */
typedef struct tp_layout {
    int tensor, pipeline;
    uint32_t schedule, chunks, kind, units[MOST_STAGES];
    bool listed; /* units are */
} tp_layout;

typedef struct tp_program {
    uint64_t seed;
    int tensor, data, steps, micro, nodes, params, cuts, blocks;
    bool sequence_parallel, means, no_overlap, keep, stream, narrow, evaluate, hierarchical, wild,
        large, processes;
    uint32_t kind, accumulation, node_size, recompute, recompute_ops, missing, param_dtype,
        reduce_dtype;
    uint64_t skips, ignores, joins; /* one in so many; 0: never */
    float rate, clip;
    /* A trainer runs it over a pipeline: */
    bool pipeline, untied, scaled, nesterov;
    tp_layout layout[2]; /* the second from step `moves` on, by a checkpoint; 0: never */
    int moves, end[8];   /* by data rank: micro-batches that it has */
    int idle; /* in the last block something is made of this one's value that nobody reads; -1: not */
    uint32_t optimizer;
    float momentum, decay;
    struct {
        int step, micro, data_rank,
            block; /* a gradient overflows behind this block; step -1: none */
    } upset;
    int64_t sequence, batch_unit, width, vocabulary, elements;
    struct {
        int first, last, in; /* nodes of a block which a rank may leave out */
    } block[MOST_BLOCKS];
    tp_node node[MOST_NODES];
    tp_param param[MOST_PARAMS];
    struct {
        dtrain_cut cut;
        int64_t whole;
    } cut[MOST_CUTS];
} tp_program;

/* ---- What a rank of the data axis has in a micro-batch --------------------------------------------- */

enum { TP_BATCH = 1, TP_TOKEN, TP_TARGET, TP_SKIP, TP_LENGTH, TP_MASK, TP_JOIN, TP_EVALUATIONS };

static inline uint64_t tp_draw(const tp_program *g, uint64_t what, int data_rank, int step,
                               int micro, int64_t item)
{
    uint64_t x = ranks_mix(g->seed * 31 + what);
    x = ranks_mix(x + (uint64_t)data_rank * 1000003u + (uint64_t)step * 1009u +
                  (uint64_t)micro * 101u);
    return ranks_mix(x + (uint64_t)item);
}

typedef struct tp_place { /* which micro-batch */
    int data_rank, step, micro;
    bool evaluation; /* without gradients and dropout, and with any number of rows */
} tp_place;

/* What shapes depend on: over a pipeline those of a step are those of its first micro-batch. */
static inline tp_place tp_shape_place(const tp_program *g, tp_place at)
{
    if (g->pipeline && !at.evaluation) at.micro = 0;
    return at;
}
/* How many batches a rank of the data axis has in an evaluation, of different sizes; one has some. */
static inline int tp_evaluations(const tp_program *g, int data_rank)
{
    const int drawn = (int)(tp_draw(g, TP_EVALUATIONS, data_rank, 0, 0, 0) % 4);
    return g->pipeline ? drawn + (data_rank == 0) : 1;
}
static inline bool tp_upset(const tp_program *g, tp_place at)
{
    return g->pipeline && !at.evaluation && at.step == g->upset.step &&
           at.micro == g->upset.micro && at.data_rank == g->upset.data_rank;
}

static inline int64_t tp_batch(const tp_program *g, tp_place at)
{
    at = tp_shape_place(g, at);
    const uint64_t drawn = tp_draw(g, TP_BATCH, at.data_rank, at.step, at.micro, 0);
    const int64_t least = (g->tensor + g->sequence - 1) / g->sequence; /* each rank needs a row */
    return at.evaluation ? least + (int64_t)(drawn % 3)
                         : g->batch_unit * (1 + (int64_t)(drawn % 2));
}
static inline int64_t tp_rows(const tp_program *g, tp_place at)
{
    return tp_batch(g, at) * g->sequence;
}
static inline int32_t tp_token(const tp_program *g, tp_place at, int64_t i)
{
    return (int32_t)(tp_draw(g, TP_TOKEN, at.data_rank, at.step, at.micro, i) %
                     (uint64_t)g->vocabulary);
}
static inline int32_t tp_target(const tp_program *g, tp_place at, int64_t classes, int64_t i)
{
    const uint64_t x = tp_draw(g, TP_TARGET, at.data_rank, at.step, at.micro, i);
    const bool must = at.data_rank == 0 && at.micro == 0 && i == 0; /* no step is without any */
    if (g->ignores && !must && x / 4096 % g->ignores == 0) return -1;
    if (g->ignores && !must && tp_draw(g, TP_TARGET, at.data_rank, at.step, at.micro, -1) % 6 == 0)
        return -1;
    return (int32_t)(x % (uint64_t)classes);
}
static inline bool tp_skips(const tp_program *g, tp_place at, int block)
{
    at = tp_shape_place(g, at);
    if (g->pipeline && at.data_rank == 0) return false; /* each parameter has a gradient */
    return g->skips && !at.evaluation && g->block[block].first >= 0 &&
           tp_draw(g, TP_SKIP, at.data_rank, at.step, at.micro, block) % g->skips == 0;
}
/* Whether a node is left out. */
static inline bool tp_skipped(const tp_program *g, tp_place at, int node)
{
    const int block = g->node[node].block;
    return tp_skips(g, at, block) && node >= g->block[block].first && node <= g->block[block].last;
}
/* Whether this rank has no batch, and joins the others. */
static inline bool tp_joins(const tp_program *g, tp_place at)
{
    if (g->pipeline) return !at.evaluation && at.step * g->micro + at.micro >= g->end[at.data_rank];
    return g->joins && at.data_rank > 0 && !at.evaluation &&
           tp_draw(g, TP_JOIN, at.data_rank, at.step, at.micro, 0) % g->joins == 0;
}
static inline int32_t tp_length(const tp_program *g, tp_place at, int64_t element)
{
    return (int32_t)(tp_draw(g, TP_LENGTH, at.data_rank, at.step, at.micro, element) %
                     (uint64_t)(g->sequence + 1));
}
static inline float tp_mask(const tp_program *g, tp_place at, int64_t i)
{
    const uint64_t x = tp_draw(g, TP_MASK, 0, at.step, 0, i);
    return x % 5 == 0 ? -INFINITY : (float)(x / 5 % 17) / 8 - 1;
}

/* ---- Values ---------------------------------------------------------------------------------------- */

typedef struct tp_pass {
    const tp_program *g;
    tp_place at;
    const double *weights;     /* (elements) */
    double *grads;             /* (elements), added to; NULL: forward alone */
    const float *const *masks; /* of dropout number k, (rows, n) */
    int64_t rows, valid;
    double *y[MOST_NODES], *d[MOST_NODES]; /* (rows, n) */
    double *kept[MOST_NODES];              /* what a kind keeps for its backward */
    int dropout[MOST_NODES];               /* its number in the pass */
    double loss;                           /* mean over valid */
    bool kink; /* rounding decides: a ReLU is at 0, a row is the same all over */
} tp_pass;

static inline double tp_act(uint32_t activation, double x)
{
    if (activation == DTRAIN_ACTIVATION_GELU)
        return 0.5 * x * (1 + tanh(0.79788456080286535588 * (x + 0.044715 * x * x * x)));
    if (activation == DTRAIN_ACTIVATION_RELU) return x > 0 ? x : 0;
    return activation == DTRAIN_ACTIVATION_SILU ? x / (1 + exp(-x)) : x;
}
static inline double tp_slope(uint32_t activation, double x)
{
    if (activation == DTRAIN_ACTIVATION_GELU) {
        const double a = 0.79788456080286535588, t = tanh(a * (x + 0.044715 * x * x * x));
        return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * a * (1 + 3 * 0.044715 * x * x);
    }
    if (activation == DTRAIN_ACTIVATION_SILU) {
        const double s = 1 / (1 + exp(-x));
        return s + x * s * (1 - s);
    }
    if (activation == DTRAIN_ACTIVATION_RELU) return x > 0;
    return 1;
}

static inline const tp_param *tp_storage(const tp_program *g, int p)
{
    return &g->param[g->param[p].alias >= 0 ? g->param[p].alias : p];
}
static inline const double *tp_w(const tp_pass *s, int p)
{
    return p < 0 ? NULL : s->weights + tp_storage(s->g, p)->first;
}
static inline double *tp_dw(const tp_pass *s, int p)
{
    return p < 0 ? NULL : s->grads + tp_storage(s->g, p)->first;
}

static inline double *tp_zeros(int64_t count)
{
    return (double *)calloc((size_t)(count ? count : 1), sizeof(double));
}

/* Of q (part 0), k or v: where element e of a head in a row is, in the arrays of values or gradients. */
static inline double *tp_head(const tp_program *g, const tp_node *n, double *const *arrays,
                              int part, int64_t row, int64_t head)
{
    const int64_t d = n->n / n->heads;
    if (n->in[1] < 0) {
        const int64_t before = part == 0 ? 0 : part == 1 ? n->heads : n->heads + n->kv_heads;
        return arrays[n->in[0]] + (row * (n->heads + 2 * n->kv_heads) + before + head) * d;
    }
    return arrays[n->in[part]] + row * g->node[n->in[part]].n + head * d;
}

/* Of one row of queries of one head: the weights of all keys, 0 where hidden. */
static inline void tp_attend(const tp_pass *s, const tp_node *n, int64_t element, int64_t i,
                             int64_t head, double *p)
{
    const int64_t q = s->g->sequence, d = n->n / n->heads, kv = head / (n->heads / n->kv_heads);
    const int64_t keys = n->lengths ? tp_length(s->g, s->at, element) : q;
    double most = -INFINITY, sum = 0;
    for (int64_t j = 0; j < q; j++) {
        const double *a = tp_head(s->g, n, s->y, 0, element * q + i, head);
        const double *b = tp_head(s->g, n, s->y, 1, element * q + j, kv);
        p[j] = 0;
        for (int64_t e = 0; e < d; e++) p[j] += a[e] * b[e];
        p[j] /= sqrt((double)d);
        if (n->mask)
            p[j] += (double)tp_mask(s->g, s->at, ((n->heads_mask ? head : 0) * q + i) * q + j);
        if (j >= keys || (n->causal && j > i)) p[j] = -INFINITY;
        most = p[j] > most ? p[j] : most;
    }
    for (int64_t j = 0; j < q; j++) sum += p[j] = most > -INFINITY ? exp(p[j] - most) : 0;
    for (int64_t j = 0; j < q && sum > 0; j++) p[j] /= sum;
}

static inline void tp_attention(tp_pass *s, const tp_node *n, double *y, const double *dy)
{
    const int64_t q = s->g->sequence, d = n->n / n->heads;
    double p[64], dp[64];
    for (int64_t row = 0; row < s->rows; row++)
        for (int64_t h = 0; h < n->heads; h++) {
            const int64_t element = row / q, kv = h / (n->heads / n->kv_heads);
            double mean = 0;
            tp_attend(s, n, element, row % q, h, p);
            for (int64_t j = 0; j < q; j++) {
                const double *v = tp_head(s->g, n, s->y, 2, element * q + j, kv);
                dp[j] = 0;
                for (int64_t e = 0; e < d; e++) {
                    if (!dy) y[row * n->n + h * d + e] += p[j] * v[e];
                    else {
                        const double g = dy[row * n->n + h * d + e];
                        dp[j] += g * v[e];
                        tp_head(s->g, n, s->d, 2, element * q + j, kv)[e] += p[j] * g;
                    }
                }
                mean += p[j] * dp[j];
            }
            for (int64_t j = 0; j < q && dy; j++) {
                const double ds = p[j] * (dp[j] - mean) / sqrt((double)d);
                const double *a = tp_head(s->g, n, s->y, 0, row, h);
                const double *b = tp_head(s->g, n, s->y, 1, element * q + j, kv);
                for (int64_t e = 0; e < d; e++) {
                    tp_head(s->g, n, s->d, 0, row, h)[e] += ds * b[e];
                    tp_head(s->g, n, s->d, 1, element * q + j, kv)[e] += ds * a[e];
                }
            }
        }
}

/* Turn the pairs of a row, or with sign -1 turn them back. */
static inline void tp_rotate(const tp_pass *s, const tp_node *n, const double *x, double *y,
                             double sign)
{
    const int64_t d = n->n / n->heads, rotated = n->rotated ? n->rotated : n->heads;
    for (int64_t row = 0; row < s->rows; row++)
        for (int64_t h = 0; h < n->heads; h++)
            for (int64_t i = 0; i < d / 2; i++) {
                const double *from = x + row * n->n + h * d + i;
                double *to = y + row * n->n + h * d + i;
                const double angle =
                    (double)(row % s->g->sequence) * pow(n->number, -2.0 * (double)i / (double)d);
                const double c = h < rotated ? cos(angle) : 1,
                             e = h < rotated ? sign * sin(angle) : 0;
                to[0] += from[0] * c - from[d / 2] * e;
                to[d / 2] += from[d / 2] * c + from[0] * e;
            }
}

static inline void tp_linear(tp_pass *s, int at, bool backward)
{
    const tp_node *n = &s->g->node[at];
    const int64_t k = s->g->node[n->in[0]].n;
    const double *x = s->y[n->in[0]], *w = tp_w(s, n->w), *b = tp_w(s, n->b);
    if (!backward) s->kept[at] = tp_zeros(s->rows * n->n);
    for (int64_t r = 0; r < s->rows; r++)
        for (int64_t o = 0; o < n->n; o++) {
            double *z = &s->kept[at][r * n->n + o];
            if (!backward) {
                if (b) *z = b[o];
                for (int64_t i = 0; i < k; i++) *z += x[r * k + i] * w[o * k + i];
                s->y[at][r * n->n + o] = tp_act(n->activation, *z);
                s->kink = s->kink || (n->activation == DTRAIN_ACTIVATION_RELU && fabs(*z) < 1e-4);
                continue;
            }
            const double g = s->d[at][r * n->n + o] * tp_slope(n->activation, *z);
            double *dw = tp_dw(s, n->w), *dx = s->d[n->in[0]];
            if (b) tp_dw(s, n->b)[o] += g;
            for (int64_t i = 0; i < k; i++) {
                dw[o * k + i] += g * x[r * k + i];
                dx[r * k + i] += g * w[o * k + i];
            }
        }
}

/* Both norms, a row at a time: x' = (x - mean) / deviation, y = x' w + b. */
static inline void tp_norm(tp_pass *s, int at, bool backward)
{
    const tp_node *n = &s->g->node[at];
    const double *w = tp_w(s, n->w), *b = tp_w(s, n->b);
    for (int64_t r = 0; r < s->rows; r++) {
        const double *x = s->y[n->in[0]] + r * n->n;
        double mean = 0, squares = 0, first = 0, second = 0;
        for (int64_t i = 0; i < n->n && n->kind == TP_LAYERNORM; i++) mean += x[i] / (double)n->n;
        for (int64_t i = 0; i < n->n; i++) squares += (x[i] - mean) * (x[i] - mean) / (double)n->n;
        const double deviation = sqrt(squares + n->number);
        s->kink = s->kink || squares < (s->g->narrow ? 0.03 : 1e-6); /* it blows rounding up */
        for (int64_t i = 0; i < n->n; i++) {
            const double hat = (x[i] - mean) / deviation;
            if (!backward) {
                s->y[at][r * n->n + i] = hat * w[i] + (b ? b[i] : 0);
                continue;
            }
            const double g = s->d[at][r * n->n + i];
            tp_dw(s, n->w)[i] += g * hat;
            if (b) tp_dw(s, n->b)[i] += g;
            first += g * w[i] / (double)n->n;
            second += g * w[i] * hat / (double)n->n;
        }
        for (int64_t i = 0; i < n->n && backward; i++) {
            const double hat = (x[i] - mean) / deviation, g = s->d[at][r * n->n + i] * w[i];
            s->d[n->in[0]][r * n->n + i] +=
                (g - (n->kind == TP_LAYERNORM ? first : 0) - hat * second) / deviation;
        }
    }
}

static inline void tp_softmax(tp_pass *s, int at, bool backward)
{
    const tp_node *n = &s->g->node[at];
    for (int64_t r = 0; r < s->rows; r++) {
        const double *x = s->y[n->in[0]] + r * n->n;
        double *y = s->y[at] + r * n->n, most = x[0], sum = 0, mean = 0;
        for (int64_t i = 0; i < n->n && !backward; i++) most = x[i] > most ? x[i] : most;
        for (int64_t i = 0; i < n->n && !backward; i++) sum += y[i] = exp(x[i] - most);
        for (int64_t i = 0; i < n->n; i++)
            if (!backward) y[i] /= sum;
            else mean += y[i] * s->d[at][r * n->n + i];
        for (int64_t i = 0; i < n->n && backward; i++)
            s->d[n->in[0]][r * n->n + i] += y[i] * (s->d[at][r * n->n + i] - mean);
    }
}

/* The mean over rows that count; backward that of the sum over them, which micro-batches add up to. */
static inline void tp_cross_entropy(tp_pass *s, int at, bool backward, double scale)
{
    const tp_node *n = &s->g->node[at];
    const int64_t columns = s->g->node[n->in[0]].n, classes = n->classes ? n->classes : columns;
    double total = 0;
    if (!backward) s->valid = 0;
    for (int64_t r = 0; r < s->rows; r++) {
        const double *z = s->y[n->in[0]] + r * columns;
        const int64_t target = tp_target(s->g, s->at, classes, r);
        double most = z[0], sum = 0, even = 0;
        if (target < 0) continue;
        if (!backward) s->valid++;
        for (int64_t i = 0; i < classes; i++) most = z[i] > most ? z[i] : most;
        for (int64_t i = 0; i < classes; i++)
            sum += exp(z[i] - most), even += z[i] / (double)classes;
        total += most + log(sum) - (1 - n->number) * z[target] - n->number * even;
        for (int64_t i = 0; i < classes && backward; i++)
            s->d[n->in[0]][r * columns + i] +=
                scale * (exp(z[i] - most) / sum - n->number / (double)classes -
                         (i == target ? 1 - n->number : 0));
    }
    if (!backward) s->loss = s->valid ? total / (double)s->valid : 0;
}

static inline void tp_embedding(tp_pass *s, int at, bool backward)
{
    const tp_node *n = &s->g->node[at];
    for (int64_t r = 0; r < s->rows; r++)
        for (int64_t i = 0; i < n->n; i++) {
            const int64_t from = tp_token(s->g, s->at, r) * n->n + i,
                          place = r % s->g->sequence * n->n + i;
            double *y = &s->y[at][r * n->n + i];
            if (!backward) *y = tp_w(s, n->w)[from] + (n->b >= 0 ? tp_w(s, n->b)[place] : 0);
            else {
                tp_dw(s, n->w)[from] += s->d[at][r * n->n + i];
                if (n->b >= 0) tp_dw(s, n->b)[place] += s->d[at][r * n->n + i];
            }
        }
}

/* One element of what is made element by element, or its gradients. */
static inline void tp_element(tp_pass *s, int at, int64_t i, bool backward)
{
    const tp_node *n = &s->g->node[at];
    const double a = s->y[n->in[0]][i], b = n->in[1] >= 0 ? s->y[n->in[1]][i] : 0;
    const double g = backward ? s->d[at][i] : 0;
    double y = a, da = g, db = 0;
    if (n->kind == TP_ACTIVATE) y = tp_act(n->activation, a), da = g * tp_slope(n->activation, a);
    if (n->kind == TP_ACTIVATE && n->activation == DTRAIN_ACTIVATION_RELU && fabs(a) < 1e-4)
        s->kink = true;
    if (n->kind == TP_SCALE) y = n->number * a, da = n->number * g;
    if (n->kind == TP_ADD) y = a + b, db = g;
    if (n->kind == TP_MULTIPLY) y = a * b, da = g * b, db = g * a;
    if (n->kind == TP_SWIGLU) {
        y = tp_act(DTRAIN_ACTIVATION_SILU, a) * b;
        da = g * b * tp_slope(DTRAIN_ACTIVATION_SILU, a),
        db = g * tp_act(DTRAIN_ACTIVATION_SILU, a);
    }
    if (n->kind == TP_DROPOUT && s->dropout[at] >= 0) {
        const double keep = (double)s->masks[s->dropout[at]][i];
        y = a * keep, da = g * keep;
    }
    if (!backward) s->y[at][i] = y;
    else {
        s->d[n->in[0]][i] += da;
        if (n->in[1] >= 0) s->d[n->in[1]][i] += db;
    }
}

static inline void tp_node_run(tp_pass *s, int at, bool backward, double scale)
{
    const tp_node *n = &s->g->node[at];
    if (n->kind == TP_EMBEDDING) tp_embedding(s, at, backward);
    else if (n->kind == TP_LINEAR) tp_linear(s, at, backward);
    else if (n->kind == TP_ATTENTION) tp_attention(s, n, s->y[at], backward ? s->d[at] : NULL);
    else if (n->kind == TP_ROTARY)
        tp_rotate(s, n, backward ? s->d[at] : s->y[n->in[0]], backward ? s->d[n->in[0]] : s->y[at],
                  backward ? -1 : 1);
    else if (n->kind == TP_LAYERNORM || n->kind == TP_RMS_NORM) tp_norm(s, at, backward);
    else if (n->kind == TP_SOFTMAX) tp_softmax(s, at, backward);
    else if (n->kind == TP_CROSS_ENTROPY) tp_cross_entropy(s, at, backward, scale);
    else
        for (int64_t i = 0; i < s->rows * n->n; i++) tp_element(s, at, i, backward);
}

/* Run a pass forward. */
static inline void tp_forward(tp_pass *s)
{
    int dropouts = 0;
    s->rows = tp_rows(s->g, s->at);
    for (int at = 0; at < s->g->nodes; at++) {
        const tp_node *n = &s->g->node[at];
        s->y[at] = tp_zeros(s->rows * n->n);
        s->d[at] = tp_zeros(s->rows * n->n);
        if (tp_skipped(s->g, s->at, at)) {
            if (at == s->g->block[n->block].last) /* what came in goes out */
                memcpy(s->y[at], s->y[s->g->block[n->block].in],
                       (size_t)(s->rows * n->n) * sizeof(double));
            continue;
        }
        s->dropout[at] =
            n->kind == TP_DROPOUT && !s->at.evaluation && n->number > 0 ? dropouts++ : -1;
        tp_node_run(s, at, false, 0);
    }
}
/* Add `scale` times the gradient of the sum over the rows that count. */
static inline void tp_backward(tp_pass *s, double scale)
{
    for (int at = s->g->nodes; at-- > 0;) {
        const tp_node *n = &s->g->node[at];
        if (tp_skipped(s->g, s->at, at)) {
            for (int64_t i = 0; i < s->rows * n->n && at == s->g->block[n->block].last; i++)
                s->d[s->g->block[n->block].in][i] += s->d[at][i];
            continue;
        }
        tp_node_run(s, at, true, scale);
    }
}
static inline void tp_free(tp_pass *s)
{
    for (int at = 0; at < s->g->nodes; at++) {
        free(s->y[at]), free(s->d[at]), free(s->kept[at]);
        s->y[at] = s->d[at] = s->kept[at] = NULL;
    }
}

/* ---- Cuts ------------------------------------------------------------------------------------------ */

/* The rank that has a column of a row (or a row of a matrix) that is cut. */
static inline int tp_owner(const dtrain_cut *cut, int64_t whole, int ranks, int64_t column)
{
    const uint32_t components = cut->components ? cut->components : 1;
    int64_t begin = 0;
    for (uint32_t c = 0; c < components; c++) {
        const int64_t length = cut->widths[0] ? cut->widths[c] : whole / (int64_t)components;
        const int64_t parts = cut->parts ? cut->parts : length;
        if (column < begin + length) {
            const int64_t part = (column - begin) / (length / parts);
            for (int r = 0; r < ranks; r++)
                if (part >= parts * r / ranks && part < parts * (r + 1) / ranks) return r;
        }
        begin += length;
    }
    return -1;
}

#endif
