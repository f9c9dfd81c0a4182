/* test_vocabulary_parallel.c: what the tensor axis makes of the two ends of a language model and of attention. The
 * cross-entropy of logits whose classes are divided beside a dense one in double;
 * embeddings and heads beside those of one rank, to the bit; gradients of every share; what is sent. Tapes here have
 * the groups of a mesh and no strategy: parameters are arrays of the test, and nothing sums their gradients up. */
#include "tape/tape_internal.h"
#include "parallel/mesh_internal.h"
#include "device/device_internal.h"
#include "dtrain.h"
#include "test.h"
#include "ranks.h"
#include "dense_loss.h"
#include "tape_error.h"

enum { THREADS = DTRAIN_LAUNCH_THREADS };
static const int axes[] = {1, 2, 3, 4, 8}; /* ranks of the tensor axis */

static bool says(const char *part)
{
    return CHECK_MSG(strstr(dtrain_last_error(), part) != NULL, "\"%s\" is not in: %s", part,
                     dtrain_last_error());
}
static float *drawn(int64_t count, uint64_t stream, float scale)
{
    float *x = (float *)malloc((size_t)count * sizeof *x + 1);
    for (int64_t i = 0; i < count; i++) x[i] = scale * dtrain_random_normal(7, stream, (uint64_t)i);
    return x;
}
/* Whole numbers in [-8, 8]: sums of a few thousand have no rounding, in any order. */
static float *whole_numbers(int64_t count, uint64_t stream)
{
    float *x = drawn(count, stream, 3);
    for (int64_t i = 0; i < count; i++) x[i] = fminf(8, fmaxf(-8, rintf(x[i])));
    return x;
}
static bool same_words(const void *got, const void *want, int64_t count, const char *what)
{
    const float *a = (const float *)got, *b = (const float *)want;
    for (int64_t i = 0; i < count; i++)
        if (memcmp(&a[i], &b[i], sizeof *a))
            return CHECK_MSG(false, "%s: [%d] is %.9g, expected %.9g", what, (int)i, (double)a[i],
                             (double)b[i]);
    return CHECK(true);
}

/* ---- The cross-entropy -------------------------------------------------------------------------*/

static const loss_case loss_cases[] = {
    {6, 16, 16, 0, NORMAL, false},
    {6, 16, 16, 0.1f, NORMAL, true},
    {5, 9, 24, 0, NORMAL, true},
    {5, 9, 24, 0.3f, EXTREME, false},
    {3, 50257, 50257, 0, NORMAL, true},
    {3, 50257, 50304, 0.1f, NORMAL, true},
    {7, 40, 40, 0, EXTREME, true},
    {7, 40, 40, 1, NORMAL, false},
    {4, 24, 24, 0, LAST_RANK_INFINITE, false},
    {4, 24, 24, 0, WITH_NAN, false},
    {4, 1, 8, 0.5f, NORMAL, false},
};

/* ---- A tape over a tensor axis -----------------------------------------------------------------*/

typedef struct axis {
    dtrain_mesh *mesh;
    dtrain_tape *tape, *alone; /* of the axis; of one rank, which the other is compared with */
    int ranks, rank;
} axis;

static int axis_open(axis *a, dtrain_world *world, bool sequence_parallel)
{
    dtrain_mesh_desc desc;
    memset(&desc, 0, sizeof desc);
    a->ranks = desc.tensor = dtrain_world_size(world);
    a->rank = dtrain_world_rank(world);
    desc.sequence_parallel = sequence_parallel;
    RANKS_TRY(dtrain_mesh_create(world, &desc, &a->mesh));
    RANKS_TRY(dtrain_tape_create(world, NULL, NULL, &a->tape));
    RANKS_TRY(dtrain_tape_create(world, NULL, NULL, &a->alone));
    a->tape->groups = dtrain__mesh_groups(world, a->mesh, NULL);
    return 0;
}
static void axis_close(axis *a)
{
    dtrain_tape_destroy(a->tape);
    dtrain_tape_destroy(a->alone);
    dtrain_mesh_destroy(a->mesh);
}

/* The part of a row of `width` columns, or of as many rows, that a rank has. */
static dtrain__share part_of(int64_t width, uint32_t components, int64_t parts,
                             const int64_t *widths, const axis *a)
{
    const int64_t shape[4] = {width, 0, 0, 0};
    dtrain__share part;
    dtrain_cut cut;
    memset(&cut, 0, sizeof cut);
    cut.axis = DTRAIN_CUT_ROWS;
    cut.components = components;
    cut.parts = parts;
    if (widths) memcpy(cut.widths, widths, components * sizeof *widths);
    CHECK(dtrain__cut_check(&cut, shape, a->ranks) == DTRAIN_OK);
    dtrain__share_of(&cut, shape, a->ranks, a->rank, &part);
    return part;
}
/* The columns of a part, of all rows. */
static float *columns_of(const float *x, int64_t rows, int64_t width, const dtrain__share *part)
{
    float *here = (float *)malloc((size_t)(rows * part->count) * sizeof *here + 1);
    int64_t run;
    for (int64_t i = 0; i < rows * part->count; i++)
        here[i] = x[i / part->count * width + dtrain__share_place(part, i % part->count, &run)];
    return here;
}
static dtrain_tensor *input_columns(axis *a, const float *x, int64_t rows, int64_t width,
                                    const dtrain__share *part)
{
    const int64_t shape[2] = {rows, part->count};
    float *here = columns_of(x, rows, width, part);
    dtrain_tensor *t = dtrain_tape_input(a->tape, DTRAIN_DTYPE_F32, 2, shape, here, true);
    if (a->ranks > 1) dtrain__place_as(t, DTRAIN_PLACEMENT_COLUMNS, part);
    free(here);
    return t;
}
static dtrain_tensor *input_whole(dtrain_tape *tape, const float *x, int64_t rows, int64_t width)
{
    const int64_t shape[2] = {rows, width};
    return dtrain_tape_input(tape, DTRAIN_DTYPE_F32, 2, shape, x, true);
}

/* A loss whose gradient is what the test says: the words are those of d_y. */
static dtrain_result pull_prepare(dtrain_op *op)
{
    const int64_t shape[1] = {1};
    dtrain__place_as(dtrain_op_output(op, DTRAIN_DTYPE_F32, 1, shape), DTRAIN_PLACEMENT_WHOLE,
                     NULL);
    return DTRAIN_OK;
}
static dtrain_result pull_forward(dtrain_op *op)
{
    *(float *)op->output_data[0] = 0;
    return DTRAIN_OK;
}
static dtrain_result pull_backward(dtrain_op *op)
{
    void *d_y = dtrain_op_input_grad(op, 0, NULL);
    if (d_y) memcpy(d_y, *(void **)op->args, (size_t)op->inputs[0]->count * sizeof(float));
    return DTRAIN_OK;
}
static const dtrain_op_desc pull_op = {
    0, 0, 0, DTRAIN__OP_PLACES, false, "pull", pull_prepare, pull_forward, pull_backward};
static dtrain_tensor *pull(dtrain_tape *tape, dtrain_tensor *y, const float *d_y)
{
    return dtrain_tape_apply(tape, &pull_op, &y, 1, NULL, 0, &d_y, sizeof d_y);
}

/* ---- The loss on the tape ----------------------------------------------------------------------*/

static int tape_loss(axis *a, const loss_case *c, uint32_t placement, bool in_place)
{
    const bool rows_cut = placement == DTRAIN_PLACEMENT_ROWS;
    const bool extreme = c->logits == EXTREME || c->logits == LAST_RANK_INFINITE;
    loss_rank l = loss_open(c, a->ranks, a->rank, 0.5);
    float got, *d_x = (float *)malloc((size_t)(c->rows * c->columns) * sizeof *d_x);
    float words[RANKS_MOST];
    dtrain_comm_info before, after;
    dtrain_tensor *x, *logits, *loss;
    RANKS_TRY(dtrain_tape_begin(a->tape, 0, 0));
    const dtrain__share part = part_of(rows_cut ? c->rows : c->columns, 0, 0, NULL, a);
    if (rows_cut) {
        x = input_whole(a->tape, l.x + part.first[0] * c->columns, part.count, c->columns);
        dtrain__place_as(x, placement, &part);
    } else {
        x = input_columns(a, l.x, c->rows, c->columns, &part);
    }
    dtrain_tensor *targets =
        dtrain_tape_input(a->tape, DTRAIN_DTYPE_I32, 1, &c->rows, l.targets, false);
    logits = in_place ? dtrain_scale(a->tape, x, 1) : x;
    dtrain_comm_query(a->tape->groups.tensor, &before);
    loss = dtrain_cross_entropy(a->tape, logits, targets, c->classes < c->columns ? c->classes : 0,
                                c->smoothing);
    dtrain_comm_query(a->tape->groups.tensor, &after);
    RANKS_TRY(dtrain_tensor_read(a->tape, loss, &got, NULL));
    CHECK_MSG(near_to((double)got, l.want, 1e-6),
              "%d ranks, %d classes, placement %u: loss %.9g, expected %.9g", a->ranks,
              (int)c->classes, placement, (double)got, l.want);
    CHECK(loss->placement == DTRAIN_PLACEMENT_WHOLE && loss->samples > 0);
    if (a->ranks > 1)
        CHECK(after.payload_bytes - before.payload_bytes ==
              sizeof(float) * (rows_cut ? 1 : (uint64_t)c->rows * (c->smoothing > 0 ? 4 : 3)));
    dtrain_comm_query(a->tape->groups.tensor, &before);
    RANKS_TRY(dtrain_tape_backward(a->tape, loss, 0.5f));
    dtrain_comm_query(a->tape->groups.tensor, &after);
    CHECK(after.operation_count == before.operation_count);
    RANKS_TRY(dtrain_tensor_read(a->tape, x, NULL, d_x));
    if (in_place)
        CHECK(memcmp(logits->data, d_x, (size_t)x->count * sizeof *d_x) == 0 || isnan(got));
    int64_t wrong = -1;
    for (int64_t i = 0; i < x->count && wrong < 0; i++) {
        const int64_t row = rows_cut ? part.first[0] + i / c->columns : i / part.count;
        const int64_t j = rows_cut ? i % c->columns : part.first[0] + i % part.count;
        /* the log-sum-exp is a float: of logits of 1e4 it is known to 1e-3 */
        if (!near_to((double)d_x[i], l.d_x[row * c->columns + j], extreme ? 2e-3 : 1e-6)) wrong = i;
    }
    CHECK_MSG(wrong < 0, "%d ranks, %d classes of %d, placement %u: gradient [%d] is %.9g",
              a->ranks, (int)c->classes, (int)c->columns, placement, (int)wrong,
              wrong < 0 ? 0 : (double)d_x[wrong]);
    RANKS_TRY(dtrain_world_all_gather(a->tape->world, &got, sizeof got, words));
    for (int r = 1; r < a->ranks; r++) CHECK(memcmp(&words[r], &words[0], sizeof got) == 0);
    free(d_x);
    loss_close(&l);
    return 0;
}

static int tape_loss_rank(dtrain_world *world, void *user)
{
    axis a;
    (void)user;
    if (axis_open(&a, world, false)) return 1;
    for (size_t k = 0; k < sizeof loss_cases / sizeof *loss_cases; k++) {
        const loss_case *c = &loss_cases[k];
        for (int in_place = 0; in_place < 2; in_place++) {
            if (tape_loss(&a, c, DTRAIN_PLACEMENT_COLUMNS, in_place)) return 1;
            if (a.ranks > 1 && c->rows >= a.ranks &&
                tape_loss(&a, c, DTRAIN_PLACEMENT_ROWS, in_place))
                return 1;
        }
    }
    axis_close(&a);
    return 0;
}
static void test_loss_on_tape(void)
{
    for (size_t i = 0; i < sizeof axes / sizeof *axes; i++)
        ranks_run(axes[i], THREADS, tape_loss_rank, NULL);
}

/* ---- Embeddings --------------------------------------------------------------------------------*/

enum { BATCH = 2, SEQUENCE = 12, ROWS = BATCH * SEQUENCE, VOCAB = 11, N = 5 };

typedef struct tables {
    float *token, *position, *d_token, *d_position, *y;
    dtrain_param params[2];
} tables;

static void tables_open(tables *t, const axis *a, bool cut)
{
    const float unset = -77;
    memset(t, 0, sizeof *t);
    t->token = drawn(VOCAB * N, 1, 1);
    t->position = drawn((SEQUENCE + 1) * N, 2, 1);
    t->d_token = (float *)malloc(VOCAB * N * sizeof(float));
    t->d_position = (float *)malloc((SEQUENCE + 1) * N * sizeof(float));
    t->y = (float *)malloc(ROWS * N * sizeof(float));
    for (int i = 0; i < VOCAB * N; i++) t->d_token[i] = unset;
    for (int i = 0; i < (SEQUENCE + 1) * N; i++) t->d_position[i] = unset;
    t->params[0] = ranks_param("token", t->token, t->d_token, VOCAB, N);
    t->params[1] = ranks_param("position", t->position, t->d_position, SEQUENCE + 1, N);
    if (!cut) return;
    t->params[0].cut.axis = DTRAIN_CUT_ROWS;
    t->params[0].value += VOCAB * a->rank / a->ranks * N;
}
static void tables_close(tables *t)
{
    free(t->token);
    free(t->position);
    free(t->d_token);
    free(t->d_position);
    free(t->y);
}
/* Two passes: gradients of the second are added to those of the first. */
static int embed(dtrain_tape *tape, tables *t, const int32_t *tokens, bool positions,
                 const float *d_y, uint32_t *placement)
{
    const int64_t shape[2] = {BATCH, SEQUENCE};
    for (int pass = 0; pass < 2; pass++) {
        RANKS_TRY(dtrain_tape_begin(tape, 0, 0));
        dtrain_tensor *in = dtrain_tape_input(tape, DTRAIN_DTYPE_I32, 2, shape, tokens, false);
        dtrain_tensor *y =
            dtrain_embedding(tape, in, &t->params[0], positions ? &t->params[1] : NULL);
        RANKS_TRY(dtrain_tensor_read(tape, y, t->y, NULL));
        *placement = y->placement;
        const int64_t first =
            y->placement == DTRAIN_PLACEMENT_ROWS ? dtrain__tensor_share(y)->first[0] : 0;
        CHECK(y->count == (y->placement == DTRAIN_PLACEMENT_ROWS
                               ? ROWS / tape->groups.tensor_ranks * N
                               : ROWS * N));
        RANKS_TRY(dtrain_tape_backward(tape, pull(tape, y, d_y + first * N), 1));
    }
    return 0;
}
static int embedding_rank(dtrain_world *world, void *user)
{
    const int kind = *(const int *)user;
    const bool parallel = kind & 1, cut = kind & 2, positions = kind & 4;
    int32_t tokens[ROWS];
    float *d_y = whole_numbers(ROWS * N, 3);
    uint32_t placement, unused;
    tables here, alone;
    axis a;
    if (axis_open(&a, world, parallel)) return 1;
    const dtrain__share rows = part_of(ROWS, 0, 0, NULL, &a),
                        vocab = part_of(VOCAB, 0, 0, NULL, &a);
    for (int i = 0; i < ROWS; i++) tokens[i] = (int32_t)(ranks_mix((uint64_t)i) % VOCAB);
    tables_open(&here, &a, cut && a.ranks > 1);
    tables_open(&alone, &a, false);
    if (embed(a.alone, &alone, tokens, positions, d_y, &unused)) return 1;
    if (embed(a.tape, &here, tokens, positions, d_y, &placement)) return 1;
    const bool parted = parallel && a.ranks > 1;
    CHECK(placement == (uint32_t)(parted ? DTRAIN_PLACEMENT_ROWS : DTRAIN_PLACEMENT_WHOLE));
    same_words(here.y, alone.y + (parted ? rows.first[0] * N : 0), (parted ? rows.count : ROWS) * N,
               "the embedding");
    /* what is whole has the gradient of the rows that are here; whole numbers add up exactly */
    if (parted && !cut)
        RANKS_TRY(dtrain_all_reduce(a.tape->groups.tensor, here.d_token, here.d_token, VOCAB * N,
                                    DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, NULL));
    if (parted && positions)
        RANKS_TRY(dtrain_all_reduce(a.tape->groups.tensor, here.d_position, here.d_position,
                                    SEQUENCE * N, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, NULL));
    const bool share = cut && a.ranks > 1;
    same_words(here.d_token, alone.d_token + (share ? vocab.first[0] * N : 0),
               (share ? vocab.count : VOCAB) * N, "the gradient of the table");
    if (positions) same_words(here.d_position, alone.d_position, SEQUENCE * N, "of the positions");
    tables_close(&here);
    tables_close(&alone);
    free(d_y);
    axis_close(&a);
    return 0;
}
static void test_embedding(void)
{
    for (size_t i = 0; i < sizeof axes / sizeof *axes; i++)
        for (int kind = 0; kind < 8; kind++) ranks_run(axes[i], THREADS, embedding_rank, &kind);
}

/* Rows that the ranks do not divide: whole without gradients, an error with them. And tables that are cut as no
 * embedding can use. */
static int embedding_errors_rank(dtrain_world *world, void *user)
{
    const int64_t shape[2] = {1, 7};
    const int32_t tokens[7] = {1, 2, 3, 4, 5, 6, 7};
    tables t;
    axis a;
    (void)user;
    if (axis_open(&a, world, true)) return 1;
    tables_open(&t, &a, true);
    RANKS_TRY(dtrain_tape_begin(a.tape, DTRAIN_TAPE_NO_GRAD, 0));
    dtrain_tensor *in = dtrain_tape_input(a.tape, DTRAIN_DTYPE_I32, 2, shape, tokens, false);
    dtrain_tensor *y = dtrain_embedding(a.tape, in, &t.params[0], NULL);
    RANKS_TRY(dtrain_tensor_read(a.tape, y, t.y, NULL));
    CHECK(y->placement == DTRAIN_PLACEMENT_WHOLE);
    same_words(t.y, t.token + N, 7 * N, "rows without gradients");

    RANKS_TRY(dtrain_tape_begin(a.tape, 0, 0));
    in = dtrain_tape_input(a.tape, DTRAIN_DTYPE_I32, 2, shape, tokens, false);
    CHECK(!dtrain_embedding(a.tape, in, &t.params[0], NULL));
    CHECK(tape_error(a.tape) == DTRAIN_ERROR_ARGUMENT);
    says("7 rows");
    says("2 ranks");
    for (int i = 0; i < 3; i++) {
        RANKS_TRY(dtrain_tape_begin(a.tape, DTRAIN_TAPE_NO_GRAD, 0));
        in = dtrain_tape_input(a.tape, DTRAIN_DTYPE_I32, 2, shape, tokens, false);
        dtrain_param table = t.params[0], position = t.params[1];
        if (i == 0) table.cut.axis = DTRAIN_CUT_COLUMNS;
        if (i == 1) position.cut.axis = DTRAIN_CUT_ROWS;
        if (i == 2) {
            table.cut.components = 2;
            table.cut.widths[0] = 5;
            table.cut.widths[1] = VOCAB - 5;
        }
        CHECK(!dtrain_embedding(a.tape, in, &table, i == 1 ? &position : NULL));
        CHECK(tape_error(a.tape) == DTRAIN_ERROR_ARGUMENT);
        says(i == 1 ? "positions stay whole" : "expected the table cut by rows, in one component");
        says(i == 0   ? "parameter token is cut by columns"
             : i == 1 ? "parameter position is cut by rows"
                      : "parameter token is cut by rows");
    }
    tables_close(&t);
    axis_close(&a);
    return 0;
}
static void test_embedding_errors(void) { ranks_run(2, THREADS, embedding_errors_rank, NULL); }

/* ---- Attention and rotary ----------------------------------------------------------------------*/

enum { D = 4, KEYS = 6, MASKED = 1, LENGTHS = 2, PACKED = 4, TURNED = 8, KINDS = 16 };

typedef struct heads {
    int64_t q, kv; /* in the whole */
    int kind;      /* of the above */
} heads;

/* Attend on a tape, with whole numbers in the desc; d_y of a rank's columns. */
static dtrain_tensor *attend(dtrain_tape *tape, const heads *h, dtrain_tensor *const *in)
{
    const int64_t shape[3] = {h->q, KEYS, KEYS}, batch = BATCH;
    const int32_t lengths[BATCH] = {4, 6};
    float *mask = drawn(h->q * KEYS * KEYS, 20, 1);
    dtrain_attention_desc desc;
    dtrain_tensor *q = in[0], *k = in[1], *v = in[2];
    memset(&desc, 0, sizeof desc);
    desc.sequence = KEYS;
    desc.heads = h->q;
    desc.kv_heads = h->kv;
    desc.causal = !(h->kind & MASKED);
    if (h->kind & MASKED)
        desc.mask = dtrain_tape_input(tape, DTRAIN_DTYPE_F32, 3, shape, mask, false);
    if (h->kind & LENGTHS)
        desc.key_lengths = dtrain_tape_input(tape, DTRAIN_DTYPE_I32, 1, &batch, lengths, false);
    if ((h->kind & TURNED) && k) k = dtrain_rotary(tape, k, KEYS, h->kv, 0, 10000);
    if (h->kind & TURNED)
        q = dtrain_rotary(tape, q, KEYS, k ? h->q : h->q + 2 * h->kv, k ? 0 : h->q + h->kv, 10000);
    dtrain_tensor *y = dtrain_attention(tape, q, k, v, &desc);
    free(mask);
    return y;
}

static int heads_rank(dtrain_world *world, void *user)
{
    const heads *h = (const heads *)user;
    const bool packed = h->kind & PACKED;
    const int64_t widths[3] = {h->q * D, h->kv * D, h->kv * D}, rows = BATCH * KEYS;
    const int64_t all = widths[0] + 2 * widths[1];
    float *x = drawn(rows * all, 30, 1), *d_y = drawn(rows * widths[0], 31, 1);
    float *y = (float *)malloc((size_t)(rows * all) * sizeof *y);
    float *want = (float *)malloc((size_t)(rows * all) * sizeof *want);
    dtrain_tensor *in[3] = {NULL, NULL, NULL}, *out;
    float *parts[3] = {x, x + rows * widths[0], x + rows * (widths[0] + widths[1])};
    dtrain__share part[3];
    axis a;
    if (axis_open(&a, world, false)) return 1;
    const dtrain__share result = part_of(widths[0], 0, h->kv, NULL, &a);
    if (packed) part[0] = part_of(all, 3, h->kv, widths, &a);
    for (int i = 0; i < 3 && !packed; i++) part[i] = part_of(widths[i], 0, h->kv, NULL, &a);
    const int inputs = packed ? 1 : 3;

    RANKS_TRY(dtrain_tape_begin(a.alone, 0, 0));
    RANKS_TRY(dtrain_tape_begin(a.tape, 0, 0));
    dtrain_tensor *whole[3] = {NULL, NULL, NULL};
    for (int i = 0; i < inputs; i++) {
        whole[i] = input_whole(a.alone, parts[i], rows, packed ? all : widths[i]);
        in[i] = input_columns(&a, parts[i], rows, packed ? all : widths[i], &part[i]);
    }
    dtrain_tensor *expected = attend(a.alone, h, whole);
    out = attend(a.tape, h, in);
    RANKS_TRY(dtrain_tensor_read(a.alone, expected, want, NULL));
    RANKS_TRY(dtrain_tensor_read(a.tape, out, y, NULL));
    float *want_here = columns_of(want, rows, widths[0], &result);
    same_words(y, want_here, rows * result.count, "attention");
    CHECK(out->count == rows * result.count);
    if (a.ranks > 1)
        CHECK(out->placement == DTRAIN_PLACEMENT_COLUMNS &&
              dtrain__share_same(dtrain__tensor_share(out), &result));
    free(want_here);

    float *d_here = columns_of(d_y, rows, widths[0], &result);
    RANKS_TRY(dtrain_tape_backward(a.alone, pull(a.alone, expected, d_y), 1));
    RANKS_TRY(dtrain_tape_backward(a.tape, pull(a.tape, out, d_here), 1));
    free(d_here);
    for (int i = 0; i < inputs; i++) {
        RANKS_TRY(dtrain_tensor_read(a.alone, whole[i], NULL, want));
        RANKS_TRY(dtrain_tensor_read(a.tape, in[i], NULL, y));
        want_here = columns_of(want, rows, packed ? all : widths[i], &part[i]);
        same_words(y, want_here, rows * part[i].count, "the gradient of q, k or v");
        free(want_here);
    }
    free(x), free(d_y), free(y), free(want);
    axis_close(&a);
    return 0;
}
static void test_heads(void)
{
    static const int64_t numbers[][2] = {{8, 8}, {16, 8}, {24, 12}, {3, 3}, {12, 4}, {9, 3}};
    for (size_t i = 0; i < sizeof axes / sizeof *axes; i++)
        for (size_t n = 0; n < sizeof numbers / sizeof *numbers; n++)
            for (int kind = 0; kind < KINDS; kind++) {
                heads h;
                h.q = numbers[n][0];
                h.kv = numbers[n][1];
                h.kind = kind;
                if (axes[i] > h.kv || (!test_full() && (kind + (int)n) % 3)) continue;
                ranks_run(axes[i], THREADS, heads_rank, &h);
            }
}

/* Parts that are no whole heads, or other heads of keys than of queries; rows; masks that are cut. */
static int heads_errors_rank(dtrain_world *world, void *user)
{
    static const char *const says_what[] = {
        "the columns ",
        "of input 1 are not whole heads of 4 columns",
        "this rank has the heads",
        "all whole or all cut by columns",
        "input 2 is whole",
        "input 4 is cut by columns",
        "expected input 1 cut out of 24 columns (heads of 4) in three components",
        "dtrain_rotary: the columns ",
        "dtrain_rotary: expected input 1 whole, or cut by columns",
    };
    const int64_t rows = BATCH * KEYS, mask_shape[2] = {KEYS, KEYS};
    float *x = drawn(rows * 48, 40, 1);
    axis a;
    (void)user;
    if (axis_open(&a, world, false)) return 1;
    for (int i = 0; i < 9; i++) {
        RANKS_TRY(dtrain_tape_begin(a.tape, 0, 0));
        const bool small = i == 6;
        dtrain__share q = part_of(i < 2 || i == 7 ? 12
                                  : small         ? 24
                                                  : 48,
                                  0,
                                  i < 2 || i == 7 || small ? 0
                                  : i == 2                 ? 12
                                                           : 4,
                                  NULL, &a);
        dtrain__share k = part_of(i < 2 || i == 7 ? 12 : 16, 0, i < 2 || i == 7 ? 0 : 4, NULL, &a);
        dtrain_attention_desc desc;
        memset(&desc, 0, sizeof desc);
        desc.sequence = KEYS;
        desc.heads = i < 2 || i == 7 ? 3 : small ? 2 : 12;
        desc.kv_heads = i < 2 || i == 7 ? 3 : small ? 2 : 4;
        if (i == 2)
            q.first[0] = a.rank ? 20 : 0, q.length[0] = q.shape[0] = q.count = a.rank ? 28 : 20;
        dtrain_tensor *qs = input_columns(&a, x, rows, q.whole, &q);
        dtrain_tensor *ks = input_columns(&a, x, rows, k.whole, &k);
        dtrain_tensor *vs = input_columns(&a, x, rows, k.whole, &k);
        if (i == 3 || i == 8) dtrain__place_as(qs, DTRAIN_PLACEMENT_ROWS, &q);
        if (i == 4) ks->placement = DTRAIN_PLACEMENT_WHOLE;
        if (i == 5) {
            desc.mask = dtrain_tape_input(a.tape, DTRAIN_DTYPE_F32, 2, mask_shape, x, false);
            dtrain__place_as(desc.mask, DTRAIN_PLACEMENT_COLUMNS, &k);
        }
        if (small) ks = vs = NULL;
        if (i >= 7) CHECK(!dtrain_rotary(a.tape, qs, KEYS, 3, 0, 10000));
        else CHECK(!dtrain_attention(a.tape, qs, ks, vs, &desc));
        CHECK(tape_error(a.tape) == DTRAIN_ERROR_ARGUMENT);
        says(says_what[i]);
    }
    free(x);
    axis_close(&a);
    return 0;
}
static void test_heads_errors(void) { ranks_run(2, THREADS, heads_errors_rank, NULL); }

/* ---- All of it ---------------------------------------------------------------------------------*/

/* A model of one layer with tied embeddings, beside the same on one rank: the loss, and the gradient of every part. */
enum { HEADS = 8, C = HEADS * 2, TABLE = 13, WTE = 0, WPE, QKV, QKV_BIAS, PROJ, PROJ_BIAS, PARAMS };

typedef struct whole_model {
    dtrain_param p[PARAMS];
    dtrain__share part[PARAMS];
    float *value[PARAMS], *grad[PARAMS];
} whole_model;

static void model_open(whole_model *m, const dtrain__groups *groups)
{
    static const char *const names[PARAMS] = {"wte", "wpe", "qkv", "qkv_bias", "proj", "proj_bias"};
    static const int64_t shapes[PARAMS][2] = {{TABLE, C}, {SEQUENCE, C}, {3 * C, C},
                                              {3 * C, 0}, {C, C},        {C, 0}};
    memset(m, 0, sizeof *m);
    for (int i = 0; i < PARAMS; i++) {
        m->p[i] = ranks_param(names[i], NULL, NULL, shapes[i][0], shapes[i][1]);
        m->p[i].cut.axis = i == WTE || i == QKV || i == QKV_BIAS ? DTRAIN_CUT_ROWS
                           : i == PROJ                           ? DTRAIN_CUT_COLUMNS
                                                                 : DTRAIN_CUT_NONE;
        if (i == QKV || i == QKV_BIAS) m->p[i].cut.components = 3;
        if (i == QKV || i == QKV_BIAS || i == PROJ) m->p[i].cut.parts = HEADS;
        m->part[i] = dtrain__share_here(&m->p[i], groups);
        m->value[i] = (float *)malloc((size_t)m->part[i].count * sizeof(float));
        m->grad[i] = (float *)malloc((size_t)m->part[i].count * sizeof(float));
        for (int64_t j = 0, run; j < m->part[i].count; j++)
            m->value[i][j] =
                0.3f * dtrain_random_normal(50, (uint64_t)i,
                                            (uint64_t)dtrain__share_place(&m->part[i], j, &run));
        m->p[i].value = m->value[i];
        m->p[i].grad = m->grad[i];
    }
}
static void model_close(whole_model *m)
{
    for (int i = 0; i < PARAMS; i++) free(m->value[i]), free(m->grad[i]);
}
static int model_pass(dtrain_tape *tape, whole_model *m, uint32_t flags, float *loss)
{
    const int64_t shape[2] = {BATCH, SEQUENCE}, rows = ROWS;
    int32_t tokens[ROWS], targets[ROWS];
    dtrain_attention_desc desc;
    dtrain_param *p = m->p;
    memset(&desc, 0, sizeof desc);
    desc.sequence = SEQUENCE;
    desc.heads = HEADS;
    desc.causal = true;
    for (int i = 0; i < ROWS; i++) {
        tokens[i] = (int32_t)(ranks_mix((uint64_t)i) % (TABLE - 1));
        targets[i] = i % 5 ? (int32_t)(ranks_mix((uint64_t)i + 99) % (TABLE - 1)) : -1;
    }
    for (int i = 0; i < PARAMS; i++) p[i].state.grad_written = false;
    RANKS_TRY(dtrain_tape_begin(tape, flags, 0));
    dtrain_tensor *in = dtrain_tape_input(tape, DTRAIN_DTYPE_I32, 2, shape, tokens, false);
    dtrain_tensor *to = dtrain_tape_input(tape, DTRAIN_DTYPE_I32, 1, &rows, targets, false);
    dtrain_tape_unit(tape, 0);
    dtrain_tensor *x = dtrain_embedding(tape, in, &p[WTE], &p[WPE]);
    dtrain_tape_unit(tape, 1);
    dtrain_tensor *y = dtrain_linear(tape, x, &p[QKV], &p[QKV_BIAS], DTRAIN_ACTIVATION_NONE);
    y = dtrain_attention(tape, y, NULL, NULL, &desc);
    y = dtrain_linear(tape, y, &p[PROJ], &p[PROJ_BIAS], DTRAIN_ACTIVATION_NONE);
    x = dtrain_add(tape, x, y);
    dtrain_tape_unit(tape, 2);
    y = dtrain_linear(tape, x, &p[WTE], NULL, DTRAIN_ACTIVATION_NONE);
    dtrain_tensor *mean = dtrain_cross_entropy(tape, y, to, TABLE - 1, 0.1f);
    RANKS_TRY(dtrain_tensor_read(tape, mean, loss, NULL));
    return dtrain_tape_backward(tape, mean, 1) == DTRAIN_OK ? 0 : 1;
}
/* A plan, which has no communicator, counts the bytes that the tape has taken. */
static int model_plan(const axis *a, whole_model *m, uint32_t flags)
{
    dtrain_tape_info planned, taken;
    dtrain_device_desc desc;
    dtrain_device *device;
    dtrain_tape *tape;
    float unused;
    memset(&desc, 0, sizeof desc);
    RANKS_TRY(dtrain_device_create(dtrain__plan_device_ops(), &desc, &device));
    RANKS_TRY(dtrain_tape_create(NULL, NULL, device, &tape));
    dtrain__tape_plan(tape, NULL, &a->tape->groups);
    if (model_pass(tape, m, flags, &unused)) return 1;
    dtrain_tape_query(tape, &planned);
    dtrain_tape_query(a->tape, &taken);
    CHECK(planned.activation_bytes == taken.activation_bytes && taken.activation_bytes > 0);
    CHECK(planned.gradient_bytes == taken.gradient_bytes);
    dtrain_tape_destroy(tape);
    dtrain_device_destroy(device);
    return 0;
}
static int model_rank(dtrain_world *world, void *user)
{
    const int kind = *(const int *)user;
    const bool parallel = kind & 1, narrow = kind & 2, again = kind & 4;
    const uint32_t flags = narrow ? DTRAIN_TAPE_BF16 : 0;
    const float tolerance = narrow ? 0.02f : 2e-6f;
    whole_model here, alone;
    float got, want, first = 0;
    axis a;
    if (axis_open(&a, world, parallel)) return 1;
    model_open(&here, &a.tape->groups);
    model_open(&alone, &a.alone->groups);
    if (again) {
        if (model_pass(a.tape, &here, flags, &first)) return 1;
        RANKS_TRY(dtrain_tape_recompute(a.tape, 1, 0));
    }
    if (model_pass(a.tape, &here, flags, &got)) return 1;
    if (!again && model_plan(&a, &here, flags)) return 1;
    if (model_pass(a.alone, &alone, flags, &want)) return 1;
    if (again) CHECK(memcmp(&got, &first, sizeof got) == 0);
    CHECK_MSG(near_to((double)got, (double)want, (double)tolerance), "kind %d: %.9g, expected %.9g",
              kind, (double)got, (double)want);
    for (int i = 0; i < PARAMS; i++) {
        const dtrain__share *part = &here.part[i];
        if (parallel && a.ranks > 1 && part->axis < 0)
            RANKS_TRY(dtrain_all_reduce(a.tape->groups.tensor, here.grad[i], here.grad[i],
                                        (size_t)part->count, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM,
                                        NULL));
        int64_t wrong = -1;
        for (int64_t j = 0, run; j < part->count && wrong < 0; j++)
            if (!near_to((double)here.grad[i][j],
                         (double)alone.grad[i][dtrain__share_place(part, j, &run)],
                         (double)tolerance))
                wrong = j;
        CHECK_MSG(wrong < 0, "%d ranks, kind %d: the gradient of %s at %d", a.ranks, kind,
                  here.p[i].name, (int)wrong);
    }
    model_close(&here);
    model_close(&alone);
    axis_close(&a);
    return 0;
}
static void test_model(void)
{
    for (size_t i = 0; i < sizeof axes / sizeof *axes; i++)
        for (int kind = 0; kind < 8; kind++) ranks_run(axes[i], THREADS, model_rank, &kind);
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    RUN(test_loss_on_tape);
    RUN(test_embedding);
    RUN(test_embedding_errors);
    RUN(test_heads);
    RUN(test_heads_errors);
    RUN(test_model);
    return test_summary();
}
