/* test_batchnorm.c: batch normalisation as an operation: PyTorch's values, finite differences, and the batch of several
 * ranks (SyncBatchNorm): values, gradients and running averages of one rank that has it all; buffers under every
 * strategy. The kernels are tested with the others, in test_dtypes and test_device. */
#include "test.h"
#include "dtrain.h"
#include "ranks.h"
#include "reference/op_golden.h"
#include "tape_error.h"

enum { N = 4, MOST = 8, THREADS = DTRAIN_LAUNCH_THREADS };

static bool says(const char *part) { return strstr(dtrain_last_error(), part) != NULL; }
static bool close_to(const float *got, const float *want, int64_t count, float tolerance)
{
    for (int64_t i = 0; i < count; i++)
        if (!(fabsf(got[i] - want[i]) <= tolerance * (1 + fabsf(want[i]))))
            return CHECK_MSG(false, "[%d] is %.9g, expected %.9g", (int)i, (double)got[i],
                             (double)want[i]);
    return true;
}
static float drawn(uint64_t stream, int64_t i)
{
    return dtrain_random_normal(5, stream, (uint64_t)i);
}

/* ---- one rank ---- */

typedef struct layer {
    dtrain_param weight, bias, mean, var;
    float w[N], b[N], m[N], v[N], dw[N], db[N];
    dtrain_device *device;
    dtrain_tape *tape;
} layer;

static void layer_param(dtrain_param *p, const char *name, float *value, float *grad,
                        uint32_t flags)
{
    memset(p, 0, sizeof *p);
    p->name = name;
    p->value = value;
    p->grad = grad;
    p->shape[0] = p->count = N;
    p->flags = flags;
}
static void layer_open(layer *l)
{
    dtrain_device_desc desc;
    memset(&desc, 0, sizeof desc);
    memset(l, 0, sizeof *l);
    layer_param(&l->weight, "weight", l->w, l->dw, 0);
    layer_param(&l->bias, "bias", l->b, l->db, 0);
    layer_param(&l->mean, "mean", l->m, NULL, DTRAIN_PARAM_BUFFER);
    layer_param(&l->var, "var", l->v, NULL, DTRAIN_PARAM_BUFFER);
    memcpy(l->w, op_batch_norm_w, sizeof l->w);
    memcpy(l->b, op_batch_norm_b, sizeof l->b);
    for (int i = 0; i < N; i++) l->v[i] = 1;
    CHECK(dtrain_device_create(NULL, &desc, &l->device) == DTRAIN_OK);
    CHECK(dtrain_tape_create(NULL, NULL, l->device, &l->tape) == DTRAIN_OK);
}
static void layer_close(layer *l)
{
    dtrain_tape_destroy(l->tape);
    dtrain_device_destroy(l->device);
}
/* The loss whose gradient of y is d_y: the sum of y * d_y, by a matrix product with one column. */
static dtrain_tensor *weighed(dtrain_tape *tape, dtrain_tensor *y, dtrain_param *d_y)
{
    return dtrain_sum(tape, dtrain_linear(tape, y, d_y, NULL, DTRAIN_ACTIVATION_NONE));
}

static void test_pytorch(void)
{
    enum { ROWS = 12 };
    const int64_t shape[4] = {2, 3, 2, N};
    layer l;
    float y[ROWS * N], dx[ROWS * N], dr[ROWS * N];
    layer_open(&l);
    dtrain_batch_norm_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.activation = DTRAIN_ACTIVATION_RELU;
    desc.running_mean = &l.mean;
    desc.running_var = &l.var;
    CHECK(dtrain_tape_begin(l.tape, 0, 0) == DTRAIN_OK);
    dtrain_tensor *x = dtrain_tape_input(l.tape, DTRAIN_DTYPE_F32, 4, shape, op_batch_norm_x, true);
    dtrain_tensor *residual =
        dtrain_tape_input(l.tape, DTRAIN_DTYPE_F32, 4, shape, op_batch_norm_residual, true);
    desc.residual = residual;
    dtrain_tensor *out = dtrain_batch_norm(l.tape, x, &l.weight, &l.bias, &desc);
    /* y as one row, times d_y as a weight of one output: its gradient is d_y */
    dtrain_param d_y;
    memset(&d_y, 0, sizeof d_y);
    d_y.name = "d_y";
    d_y.value = (float *)(uintptr_t)op_batch_norm_dy;
    d_y.shape[0] = 1;
    d_y.shape[1] = d_y.count = ROWS * N;
    d_y.flags = DTRAIN_PARAM_FROZEN;
    CHECK(dtrain_tensor_read(l.tape, out, y, NULL) == DTRAIN_OK);
    close_to(y, op_batch_norm_y, ROWS * N, 1e-5f);
    close_to(l.m, op_batch_norm_mean, N, 1e-6f);
    close_to(l.v, op_batch_norm_var, N, 1e-6f);
    if (out) { /* (2, 3, 2, 4) is one row of 48 to a linear layer that is told so */
        out->ndim = 1;
        out->shape[0] = ROWS * N;
        out->shape[1] = out->shape[2] = out->shape[3] = 0;
    }
    CHECK(dtrain_tape_backward(l.tape, weighed(l.tape, out, &d_y), 1) == DTRAIN_OK);
    CHECK(dtrain_tensor_read(l.tape, x, NULL, dx) == DTRAIN_OK);
    CHECK(dtrain_tensor_read(l.tape, residual, NULL, dr) == DTRAIN_OK);
    close_to(dx, op_batch_norm_dx, ROWS * N, 1e-5f);
    close_to(dr, op_batch_norm_dresidual, ROWS * N, 1e-6f);
    close_to(l.dw, op_batch_norm_dw, N, 1e-5f);
    close_to(l.db, op_batch_norm_db, N, 1e-5f);

    CHECK(dtrain_tape_begin(l.tape, DTRAIN_TAPE_NO_GRAD, 0) == DTRAIN_OK);
    x = dtrain_tape_input(l.tape, DTRAIN_DTYPE_F32, 4, shape, op_batch_norm_x, false);
    desc.residual = NULL;
    desc.activation = DTRAIN_ACTIVATION_NONE;
    out = dtrain_batch_norm(l.tape, x, &l.weight, &l.bias, &desc);
    CHECK(dtrain_tensor_read(l.tape, out, y, NULL) == DTRAIN_OK);
    close_to(y, op_batch_norm_inferred, ROWS * N, 1e-5f);
    close_to(l.m, op_batch_norm_mean, N, 1e-6f); /* they stay */
    layer_close(&l);
}

/* Gradients against (loss(x + h) - loss(x - h)) / 2h; x is residual of itself in half of the cases. */
static void test_finite_differences(void)
{
    for (int same = 0; same < 2; same++)
        for (int64_t rows = 2; rows < 7; rows++) {
            const int64_t shape[2] = {rows, N};
            float x[6 * N], dx[6 * N], dy[N], up, down;
            layer l;
            dtrain_tensor *input, *loss;
            dtrain_batch_norm_desc desc;
            dtrain_param d_y;
            layer_open(&l);
            memset(&desc, 0, sizeof desc);
            layer_param(&d_y, "d_y", dy, NULL, DTRAIN_PARAM_FROZEN);
            d_y.shape[0] = 1, d_y.shape[1] = N;
            for (int64_t i = 0; i < rows * N; i++) x[i] = drawn(1, i);
            for (int i = 0; i < N; i++) dy[i] = drawn(2, i);
            for (int64_t i = -1; i < rows * N + 2 * N; i++) {
                float *at = i < 0              ? NULL
                            : i < rows * N     ? &x[i]
                            : i < rows * N + N ? &l.w[i - rows * N]
                                               : &l.b[i - rows * N - N];
                const float middle = at ? *at : 0, h = 1e-2f;
                for (int side = 0; side < (at ? 2 : 1); side++) {
                    if (at) *at = side ? middle - h : middle + h;
                    CHECK(dtrain_tape_begin(l.tape, 0, 0) == DTRAIN_OK);
                    input = dtrain_tape_input(l.tape, DTRAIN_DTYPE_F32, 2, shape, x, true);
                    desc.residual = same ? input : NULL;
                    loss = dtrain_batch_norm(l.tape, input, &l.weight, &l.bias, &desc);
                    loss = dtrain_linear(l.tape, loss, &d_y, NULL, DTRAIN_ACTIVATION_GELU);
                    loss = dtrain_sum(l.tape, loss);
                    if (at) CHECK(!dtrain_tensor_read(l.tape, loss, side ? &down : &up, NULL));
                }
                if (at) *at = middle;
                if (!at) {
                    CHECK(dtrain_tape_backward(l.tape, loss, 1) == DTRAIN_OK);
                    CHECK(dtrain_tensor_read(l.tape, input, NULL, dx) == DTRAIN_OK);
                    continue;
                }
                const float got = i < rows * N       ? dx[i]
                                  : i < rows * N + N ? l.dw[i - rows * N]
                                                     : l.db[i - rows * N - N];
                CHECK_MSG(fabsf((up - down) / (2 * h) - got) < 2e-2f * (1 + fabsf(got)),
                          "%d rows, %s, %d: %g, expected %g", (int)rows,
                          same ? "residual" : "plain", (int)i, (double)got,
                          (double)((up - down) / (2 * h)));
            }
            layer_close(&l);
        }
}

static void test_refused(void)
{
    const int64_t shape[2] = {3, N}, other[2] = {N, 3};
    const float x[3 * N] = {0};
    layer l;
    layer_open(&l);
    for (int what = 0; what < 6; what++) {
        static const char *const words[] = {
            "given together", "expected none or ReLU", "has no DTRAIN_PARAM_BUFFER",
            "momentum is 2",  "of the same count",     "cast one of them"};
        dtrain_batch_norm_desc desc;
        memset(&desc, 0, sizeof desc);
        CHECK(dtrain_tape_begin(l.tape, 0, 0) == DTRAIN_OK);
        dtrain_tensor *in = dtrain_tape_input(l.tape, DTRAIN_DTYPE_F32, 2, shape, x, false);
        if (what == 0) desc.running_mean = &l.mean;
        if (what == 1) desc.activation = DTRAIN_ACTIVATION_GELU;
        if (what == 2) desc.running_mean = &l.weight, desc.running_var = &l.bias;
        if (what == 3) desc.momentum = 2;
        if (what == 4)
            desc.residual = dtrain_tape_input(l.tape, DTRAIN_DTYPE_F32, 2, other, x, false);
        if (what == 5) desc.residual = dtrain_cast(l.tape, in, DTRAIN_DTYPE_BF16);
        CHECK(!dtrain_batch_norm(l.tape, in, &l.weight, &l.bias, &desc));
        CHECK(tape_error(l.tape) != DTRAIN_OK);
        CHECK_MSG(says(words[what]) && says("dtrain_batch_norm"), "%s", dtrain_last_error());
    }
    layer_close(&l);
}

/* ---- several ranks ---- */

enum { PER_RANK = 6, STEPS = 3, PARAMS = 7 };

typedef struct sync_run {
    uint32_t kind, recompute_every, flags;
    bool sync, halves; /* halves: ranks have batches of different sizes */
    int ranks;
    float loss[MOST][STEPS], params[MOST][PARAMS * N * N], inferred[MOST];
} sync_run;

static void sync_param(dtrain_param *p, const char *name, uint32_t unit, int64_t rows,
                       int64_t columns)
{
    memset(p, 0, sizeof *p);
    p->name = name;
    p->unit = unit;
    p->shape[0] = rows;
    p->shape[1] = columns;
    p->init = DTRAIN_INIT_NORMAL;
    p->init_scale = 0.5f;
}

/* Rows that all ranks have together, and this rank's. */
static int64_t rows_of(const sync_run *r, int rank, int64_t *first)
{
    const int64_t all = PER_RANK * MOST, each = all / r->ranks;
    *first = each * rank;
    if (!r->halves || r->ranks == 1) return each;
    *first = each * rank - (rank % 2 ? 2 : 0); /* even ranks have two fewer, odd ones two more */
    return each + (rank % 2 ? 2 : -2);
}

static dtrain_tensor *sync_model(dtrain_tape *tape, dtrain_param *p, const float *x, int64_t rows,
                                 dtrain_comm *comm, int64_t scale_rows)
{
    const int64_t shape[2] = {rows, N};
    dtrain_batch_norm_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.running_mean = &p[3];
    desc.running_var = &p[4];
    desc.activation = DTRAIN_ACTIVATION_RELU;
    desc.comm = comm;
    dtrain_tape_unit(tape, 0);
    dtrain_tensor *in = dtrain_tape_input(tape, DTRAIN_DTYPE_F32, 2, shape, x, false);
    dtrain_tensor *h = dtrain_linear(tape, in, &p[0], NULL, DTRAIN_ACTIVATION_NONE);
    desc.residual = h;
    h = dtrain_batch_norm(tape, h, &p[1], &p[2], &desc);
    dtrain_tape_unit(tape, 1);
    h = dtrain_linear(tape, h, &p[5], NULL, DTRAIN_ACTIVATION_NONE);
    dtrain_tape_unit(tape, 2); /* overwrites what unit 0 drops */
    h = dtrain_linear(tape, h, &p[6], NULL, DTRAIN_ACTIVATION_GELU);
    return dtrain_scale(tape, dtrain_sum(tape, h), 1 / (float)scale_rows);
}

static int sync_rank(dtrain_world *world, void *user)
{
    sync_run *r = (sync_run *)user;
    const int rank = dtrain_world_rank(world), ranks = dtrain_world_size(world);
    const int64_t all = PER_RANK * MOST;
    dtrain_param p[PARAMS];
    dtrain_strategy_desc where;
    dtrain_strategy *strategy;
    dtrain_optimizer *optimizer;
    dtrain_tape *tape;
    dtrain_comm *comm = NULL;
    float x[PER_RANK * MOST * N];
    int64_t first;
    const int64_t rows = rows_of(r, rank, &first);
    memset(&where, 0, sizeof where);
    where.kind = r->kind;
    where.init_seed = 7;
    sync_param(&p[0], "in", 0, N, N);
    sync_param(&p[1], "weight", 0, N, 0);
    sync_param(&p[2], "bias", 0, N, 0);
    sync_param(&p[3], "running_mean", 0, N, 0);
    sync_param(&p[4], "running_var", 0, N, 0);
    sync_param(&p[5], "middle", 1, N, N);
    sync_param(&p[6], "out", 2, N, N);
    for (int i = 3; i < 5; i++) {
        p[i].flags = DTRAIN_PARAM_BUFFER;
        p[i].init = DTRAIN_INIT_CONSTANT;
        p[i].init_scale = (float)(i - 3);
    }
    RANKS_TRY(dtrain_strategy_create(world, p, PARAMS, &where, &strategy));
    const dtrain_optimizer_desc sgd = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_SGD);
    RANKS_TRY(dtrain_optimizer_create(world, strategy, &sgd, &optimizer));
    RANKS_TRY(dtrain_tape_create(world, strategy, NULL, &tape));
    RANKS_TRY(dtrain_tape_recompute(tape, r->recompute_every, 0));
    if (r->sync) RANKS_TRY(dtrain_comm_split(dtrain_world_comm(world), 0, 0, &comm));
    for (int step = 0; step <= STEPS; step++) {
        float loss;
        const bool infers = step == STEPS;
        for (int64_t i = 0; i < all * N; i++) x[i] = 3 * drawn((uint64_t)step, i) + (float)(i % N);
        /* the mean over ranks of gradients is that of the sum over all rows / all, times ranks / ranks */
        RANKS_TRY(dtrain_tape_begin(tape, r->flags | (infers ? DTRAIN_TAPE_NO_GRAD : 0), 0));
        dtrain_tensor *out = sync_model(tape, p, x + first * N, rows, comm, all / ranks);
        RANKS_TRY(dtrain_tensor_read(tape, out, &loss, NULL));
        RANKS_TRY(dtrain_all_reduce(dtrain_world_comm(world), &loss, &loss, 1, DTRAIN_DTYPE_F32,
                                    DTRAIN_REDUCE_MEAN, NULL));
        if (infers) r->inferred[rank] = loss;
        else {
            r->loss[rank][step] = loss;
            RANKS_TRY(dtrain_tape_backward(tape, out, 1));
            RANKS_TRY(dtrain_strategy_finish(strategy));
            RANKS_TRY(dtrain_optimizer_step(optimizer, 0.05f, 1));
        }
    }
    for (size_t i = 0; i < PARAMS; i++)
        RANKS_TRY(dtrain_strategy_read(strategy, i, r->params[rank] + i * N * N));
    uint64_t hash;
    RANKS_TRY(dtrain_strategy_verify(strategy, &hash));
    dtrain_comm_destroy(comm);
    dtrain_tape_destroy(tape);
    dtrain_optimizer_destroy(optimizer);
    dtrain_strategy_destroy(strategy);
    return 0;
}

static void sync_go(sync_run *r, int ranks, uint32_t kind)
{
    r->ranks = ranks;
    r->kind = kind;
    ranks_run(ranks, THREADS, sync_rank, r);
    for (int rank = 1; rank < ranks; rank++)
        CHECK_MSG(memcmp(r->params[rank], r->params[0], sizeof r->params[0]) == 0 &&
                      r->inferred[rank] == r->inferred[0],
                  "%d ranks, strategy %u: rank %d has other parameters or running averages", ranks,
                  kind, rank);
}
static void sync_compare(const sync_run *a, const sync_run *b, float tolerance, const char *what)
{
    const long before = test_shared->failed_checks;
    close_to(a->loss[0], b->loss[0], STEPS, tolerance);
    close_to(a->inferred, b->inferred, 1, tolerance);
    for (int i = 0; i < PARAMS; i++)
        close_to(a->params[0] + i * N * N, b->params[0] + i * N * N, i == 0 || i >= 5 ? N * N : N,
                 tolerance);
    CHECK_MSG(test_shared->failed_checks == before, "%s", what);
}
static sync_run *sync_new(bool sync)
{
    sync_run *r = (sync_run *)ranks_shared(sizeof *r);
    r->sync = sync;
    return r;
}

/* N ranks with a common batch are one rank that has all of it. */
static void test_sync(void)
{
    static const int counts[] = {2, 3, 4, 6, 8};
    sync_run *one = sync_new(true);
    sync_go(one, 1, DTRAIN_STRATEGY_DDP);
    for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++)
        for (uint32_t kind = DTRAIN_STRATEGY_DDP; kind <= DTRAIN_STRATEGY_ZERO3; kind++) {
            char what[80];
            sync_run *many = sync_new(true);
            many->halves = counts[c] % 2 == 0 && kind % 2;
            snprintf(what, sizeof what, "%d ranks, strategy %u", counts[c], kind);
            sync_go(many, counts[c], kind);
            sync_compare(one, many, 2e-4f, what);
            munmap(many, sizeof *many);
        }
    munmap(one, sizeof *one);
}

/* Without a common batch ranks normalise by their own rows: the same bits under every strategy, and running averages
 * that are the mean over the ranks. */
static void test_own_batches(void)
{
    sync_run *ddp = sync_new(false), *sync = sync_new(true);
    sync_go(ddp, 4, DTRAIN_STRATEGY_DDP);
    sync_go(sync, 4, DTRAIN_STRATEGY_DDP);
    CHECK(ddp->loss[0][0] != sync->loss[0][0]);
    /* after one step of linear averages the mean of means is that of all rows; three steps are near */
    for (int i = 0; i < N; i++)
        CHECK(fabsf(ddp->params[0][3 * N * N + i] - sync->params[0][3 * N * N + i]) < 0.2f &&
              ddp->params[0][3 * N * N + i] != 0);
    for (uint32_t kind = DTRAIN_STRATEGY_ZERO1; kind <= DTRAIN_STRATEGY_ZERO3; kind++) {
        sync_run *other = sync_new(false);
        sync_go(other, 4, kind);
        CHECK_MSG(memcmp(other->params, ddp->params, sizeof ddp->params) == 0 &&
                      memcmp(other->loss, ddp->loss, sizeof ddp->loss) == 0,
                  "strategy %u has other bits than DDP", kind);
        munmap(other, sizeof *other);
    }
    munmap(ddp, sizeof *ddp);
    munmap(sync, sizeof *sync);
}

/* What is dropped is made again from the statistics that are there: same bits, and nothing is averaged twice. */
static void test_checkpointing(void)
{
    for (int sync = 0; sync < 2; sync++) {
        sync_run *kept = sync_new(sync), *dropped = sync_new(sync), *narrow = sync_new(sync);
        dropped->recompute_every = 1;
        narrow->flags = DTRAIN_TAPE_BF16;
        sync_go(kept, 2, DTRAIN_STRATEGY_FULL_SHARD);
        sync_go(dropped, 2, DTRAIN_STRATEGY_FULL_SHARD);
        sync_go(narrow, 2, DTRAIN_STRATEGY_FULL_SHARD);
        CHECK(memcmp(kept->params, dropped->params, sizeof kept->params) == 0);
        CHECK(memcmp(kept->loss, dropped->loss, sizeof kept->loss) == 0);
        sync_compare(kept, narrow, 3e-2f, "bf16");
        munmap(kept, sizeof *kept);
        munmap(dropped, sizeof *dropped);
        munmap(narrow, sizeof *narrow);
    }
}

static int rank_gives_strategys(dtrain_world *world, void *user)
{
    const int64_t shape[2] = {3, N};
    const float x[3 * N] = {0};
    dtrain_param p[2];
    dtrain_strategy *strategy;
    dtrain_tape *tape;
    dtrain_batch_norm_desc desc;
    (void)user;
    memset(&desc, 0, sizeof desc);
    sync_param(&p[0], "weight", 0, N, 0);
    sync_param(&p[1], "bias", 0, N, 0);
    RANKS_TRY(dtrain_strategy_create(world, p, 2, NULL, &strategy));
    RANKS_TRY(dtrain_tape_create(world, strategy, NULL, &tape));
    RANKS_TRY(dtrain_tape_begin(tape, 0, 0));
    desc.comm = dtrain_world_comm(world);
    dtrain_tensor *in = dtrain_tape_input(tape, DTRAIN_DTYPE_F32, 2, shape, x, false);
    CHECK(!dtrain_batch_norm(tape, in, &p[0], &p[1], &desc));
    CHECK_MSG(tape_error(tape) == DTRAIN_ERROR_ARGUMENT && says("dtrain_comm_split"), "%s",
              dtrain_last_error());
    dtrain_tape_destroy(tape);
    dtrain_strategy_destroy(strategy);
    return 0;
}
/* Rank 1 has one batch, and the others two: it cannot join the second, whether or not it has had one. All of them can
 * join a third. */
static int rank_without_batch(dtrain_world *world, void *user)
{
    char(*text)[512] = (char(*)[512])user;
    const int rank = dtrain_world_rank(world);
    const int64_t shape[2] = {3, N};
    const float x[3 * N] = {0};
    dtrain_param p[2];
    dtrain_strategy *strategy;
    dtrain_tape *tape;
    dtrain_batch_norm_desc desc;
    bool over = false;
    dtrain_result result = DTRAIN_OK;
    memset(&desc, 0, sizeof desc);
    sync_param(&p[0], "weight", 0, N, 0);
    sync_param(&p[1], "bias", 0, N, 0);
    RANKS_TRY(dtrain_strategy_create(world, p, 2, NULL, &strategy));
    RANKS_TRY(dtrain_tape_create(world, strategy, NULL, &tape));
    RANKS_TRY(dtrain_comm_split(dtrain_world_comm(world), 0, 0, &desc.comm));
    for (int step = text[rank][0] == 'x'; step < 2 && result == DTRAIN_OK; step++) {
        if (step == 1 && (rank == 1 || text[rank][0] == 'a'))
            result = dtrain_strategy_join(strategy, &over);
        else {
            RANKS_TRY(dtrain_tape_begin(tape, 0, 0));
            dtrain_tensor *in = dtrain_tape_input(tape, DTRAIN_DTYPE_F32, 2, shape, x, false);
            result = dtrain_tape_backward(
                tape, dtrain_mean(tape, dtrain_batch_norm(tape, in, &p[0], &p[1], &desc)), 1);
            if (result == DTRAIN_OK) result = dtrain_strategy_finish(strategy);
        }
    }
    if (text[rank][0] == 'a') CHECK(over);
    snprintf(text[rank], sizeof *text, "%s", result == DTRAIN_OK ? "" : dtrain_last_error());
    return result != DTRAIN_OK;
}
static void test_rank_without_batch(void)
{
    char(*text)[512] = (char(*)[512])ranks_shared(3 * sizeof *text);
    dtrain_launch_desc how = ranks_desc(3, DTRAIN_LAUNCH_PROCESSES);
    CHECK(ranks_launch(&how, rank_without_batch, text, NULL) == DTRAIN_ERROR_RANK_FAILED);
    for (int r = 0; r < 3; r++)
        CHECK_MSG(strstr(text[r], "rank 1 called barrier") &&
                      (r != 1 || strstr(text[r], "dtrain_strategy_join: rank 1 has no batch left")),
                  "rank %d: %s", r, text[r]);
    for (int r = 0; r < 3; r++) strcpy(text[r], "all"); /* their data ends at once */
    CHECK(ranks_launch(&how, rank_without_batch, text, NULL) == DTRAIN_OK);
    for (int r = 0; r < 3; r++) strcpy(text[r], "x"); /* rank 1 never had one: nobody has told it */
    CHECK(ranks_launch(&how, rank_without_batch, text, NULL) == DTRAIN_ERROR_RANK_FAILED);
    for (int r = 0; r < 3; r++)
        CHECK_MSG(strstr(text[r], "the ranks wait for each other in a circle") &&
                      strstr(text[r], "all-gather"),
                  "rank %d: %s", r, text[r]);
    munmap(text, 3 * sizeof *text);
}
static void test_strategys_comm(void) { ranks_run(2, THREADS, rank_gives_strategys, NULL); }

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    RUN(test_pytorch);
    RUN(test_finite_differences);
    RUN(test_refused);
    RUN(test_sync);
    RUN(test_own_batches);
    RUN(test_checkpointing);
    RUN(test_strategys_comm);
    RUN(test_rank_without_batch);
    return test_summary();
}
