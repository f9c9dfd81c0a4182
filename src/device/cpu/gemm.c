/* The driver of matrix products
 *
 * C is cut into rectangles, which threads take one by one. One thread with private buffers computes
 * a rectangle over all of k, in blocks of DTRAIN__KC (Goto and van de Geijn, "Anatomy of
 * high-performance matrix multiplication", 2008):
 *
 *          B block (kc, n)                for each block of k:
 *         +----+----+----+                  1. pack A (m, kc) into panels of `mr` rows       -> L2
 *      kc |    | j  |    |                  2. for each panel of `nr` columns of B:
 *         +----+----+----+                  3.   pack it                                     -> L1
 *  +----+ +----+----+----+                  4.   for each panel of A: a tile (mr, nr) of C
 *  |    | |    |    |    |                         stays in registers for kc steps,
 *  +----+ +----+----+----+                         C = alpha * tile + beta * C
 *  | i  | |    |tile|    |                  5.   after the last block, while the tile is in L1:
 *  +----+ +----+----+----+                         bias, activation, rounding
 *
 * A packed panel holds its `width` rows (or columns) side by side, k after k: element (r, p) is at
 * [p * width + r], so the kernel reads both panels from front to back.
 *
 * Every element of C is the same chain of operations for any cut into rectangles: threads never
 * share k, and its blocks depend only on k. So the bits do not depend on the threads.
 *
 * Packing costs a quarter of a cycle per element, more if it waits for memory, and each rectangle
 * repeats it: at least 4 / m + 4 / n of the time. It pays even if the order in memory is right:
 * rows of B a power of two apart share few cache sets and evict each other from L1. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/log.h"
#include "device/backend.h"
#include "device/cpu/cpu_internal.h"
#include "device/cpu/gemm_internal.h"
#include "device/cpu/kernels_internal.h"
#include "device/cpu/pool_internal.h"

typedef struct dtrain__gemm_job {
    const dtrain_gemm_args *args;
    const dtrain__isa *isa;
    dtrain__operand a, b;
    const dtrain__windows *c_rows;
    int64_t k, k_step;      /* k is 0 when alpha is */
    int64_t parts, part_k;  /* parts of k with a C each, and their length */
    int64_t m_most;         /* most rows of a rectangle whose A fits the buffer */
    int64_t m_step, n_step; /* rectangle; multiples of mr and nr */
    int64_t rows, cols;     /* rectangles */
    int64_t next;           /* atomic: rectangles handed out */
    float *memory;
    int64_t slot;      /* floats of memory for each thread */
    int needs_partial; /* C cannot hold sums between blocks of k */
} dtrain__gemm_job;

/* One block of k in one rectangle of C: position and buffers of the thread. */
typedef struct dtrain__gemm_pass {
    const dtrain__gemm_job *job;
    int64_t i0, i1, j0, j1;
    int64_t p, end; /* along k */
    int64_t c_at;   /* first element of this part's C */
    int k, cells;   /* k in cells of the panels */
    int first, last;
    float *a_block, *b_panel, *partial;
} dtrain__gemm_pass;

static void *dtrain__gemm_at(void *data, dtrain_dtype dtype, int64_t index)
{
    return (char *)data + index * (dtype == DTRAIN_DTYPE_F32 ? 4 : 2);
}

static int64_t dtrain__gemm_ceil(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* Rows of C at equal distances: first element, elements between rows, number of rows. */
typedef struct dtrain__gemm_rows {
    int64_t at, ld, count;
} dtrain__gemm_rows;

/* Return the rows from row i on. Rows of windows have equal distances up to the end of a line. */
static dtrain__gemm_rows dtrain__gemm_rows_at(const dtrain__gemm_pass *pass, int64_t i)
{
    const dtrain__windows *windows = pass->job->c_rows;
    const int64_t ldc = pass->job->args->ldc;
    dtrain__gemm_rows rows = {pass->c_at + i * ldc, ldc, INT64_MAX};
    if (!windows) return rows;
    const dtrain__corner corner = dtrain__window_corner(windows, i);
    rows.at = dtrain__window_tap(windows, &corner, 0, 0);
    rows.ld = windows->stride[1] * windows->channels;
    rows.count = windows->columns - corner.column;
    return rows;
}

/* Move a tile from or to C. */
static void dtrain__gemm_move(const dtrain__gemm_pass *pass, int64_t i, int64_t j, int count,
                              int cols, float *tile, bool load)
{
    const dtrain__gemm_job *job = pass->job;
    const dtrain_gemm_args *x = job->args;
    while (count > 0) {
        const dtrain__gemm_rows rows = dtrain__gemm_rows_at(pass, i);
        const int now = (int)dtrain__min(rows.count, count);
        void *at = dtrain__gemm_at(x->c, x->c_dtype, rows.at + j);
        const dtrain__rectangle c = {at, x->c_dtype, rows.ld, now, cols};
        if (load) job->isa->tile->load(tile, job->isa->nr, &c);
        else job->isa->tile->store(&c, tile, job->isa->nr);
        tile += now * job->isa->nr;
        count -= now;
        i += now;
    }
}

/* Apply bias, aux and activation, or the slope of a backward pass, to a tile; aux is part of
 * x->aux. */
static void dtrain__gemm_finish_copied(const dtrain__isa *isa, const dtrain_gemm_args *x, int64_t j,
                                       const dtrain__rectangle *aux, float *tile)
{
    float other[DTRAIN__MR_MAX * DTRAIN__NR_MAX], bias[DTRAIN__NR_MAX] = {0};
    if (x->flags & DTRAIN_GEMM_ACT_BACKWARD) {
        memset(other, 0, (size_t)(isa->mr * isa->nr) * sizeof *other);
        isa->tile->load(other, isa->nr, aux);
        isa->tile->slope(tile, other, isa->mr * isa->nr, x->activation);
        return;
    }
    if (x->bias) memcpy(bias, x->bias + j, (size_t)aux->cols * sizeof *bias);
    isa->tile->finish(tile, isa->nr, isa->nr, aux->rows, x->bias ? bias : NULL,
                      x->aux ? other : NULL, x->activation);
    if (x->aux) isa->tile->store(aux, other, isa->nr);
}

/* Compute a tile that the edge cuts off, or that C stores in half precision, in `tile`. Rows beyond
 * the edge are computed and dropped. */
static void dtrain__gemm_copied_tile(const dtrain__gemm_pass *pass, int64_t i, int64_t j,
                                     const float *a, const float *b, int64_t ldb)
{
    const dtrain__gemm_job *job = pass->job;
    const dtrain_gemm_args *x = job->args;
    const dtrain__isa *isa = job->isa;
    const int rows = (int)dtrain__min(isa->mr, pass->i1 - i);
    const int cols = (int)dtrain__min(isa->nr, pass->j1 - j);
    const float beta = pass->first ? x->beta : 1;
    float tile[DTRAIN__MR_MAX * DTRAIN__NR_MAX];

    float *sums = pass->partial + (i - pass->i0) * job->n_step + (j - pass->j0);
    const dtrain__rectangle partial = {sums, DTRAIN_DTYPE_F32, job->n_step, rows, cols};

    if (beta != 0) {
        memset(tile, 0, (size_t)(isa->mr * isa->nr) * sizeof *tile);
        if (job->needs_partial && !pass->first) isa->tile->load(tile, isa->nr, &partial);
        else dtrain__gemm_move(pass, i, j, rows, cols, tile, true);
    }
    isa->kernel(pass->cells, a, b, ldb, x->alpha, beta, tile, isa->nr);
    if (pass->last) {
        void *at = x->aux ? dtrain__gemm_at(x->aux, x->c_dtype, i * x->ldc + j) : NULL;
        const dtrain__rectangle aux = {at, x->c_dtype, x->ldc, rows, cols};
        dtrain__gemm_finish_copied(isa, x, j, &aux, tile);
    }
    if (job->needs_partial && !pass->last) isa->tile->store(&partial, tile, isa->nr);
    else dtrain__gemm_move(pass, i, j, rows, cols, tile, false);
}

static void dtrain__gemm_tile(const dtrain__gemm_pass *pass, int64_t i, int64_t j, const float *a,
                              const float *b, int64_t ldb)
{
    const dtrain__gemm_job *job = pass->job;
    const dtrain_gemm_args *x = job->args;
    const dtrain__isa *isa = job->isa;
    const dtrain__gemm_rows rows = dtrain__gemm_rows_at(pass, i);
    if (x->c_dtype != DTRAIN_DTYPE_F32 || rows.count < isa->mr || pass->i1 - i < isa->mr ||
        pass->j1 - j < isa->nr) {
        dtrain__gemm_copied_tile(pass, i, j, a, b, ldb);
        return;
    }
    const int64_t at = rows.at + j;
    float *c = (float *)x->c + at;
    isa->kernel(pass->cells, a, b, ldb, x->alpha, pass->first ? x->beta : 1, c, rows.ld);
    if (pass->last && (x->bias || x->aux || x->activation))
        isa->tile->finish(c, rows.ld, isa->nr, isa->mr, x->bias ? x->bias + j : NULL,
                          x->aux ? (float *)x->aux + at : NULL, x->activation);
}

/* Return the floats of a panel of A. */
static int dtrain__gemm_panel(const dtrain__gemm_pass *pass)
{
    const dtrain__isa *isa = pass->job->isa;
    return isa->mr * (isa->pitch ? isa->pitch : pass->cells);
}

/* Pack A; a transposed A in steps of 16 cells of k: their rows of memory stay in L1 while each
 * panel takes a few elements of each row. */
static void dtrain__gemm_pack_a_block(const dtrain__gemm_pass *pass)
{
    const dtrain__gemm_job *job = pass->job;
    int mr = job->isa->mr;
    int chunk = job->a.along_k || job->a.windows ? pass->k : 16 * job->isa->pair;
    for (int p = 0; p < pass->k; p += chunk) {
        int steps = pass->k - p < chunk ? pass->k - p : chunk;
        float *panel = pass->a_block + p / job->isa->pair * mr;
        for (int64_t i = pass->i0; i < pass->i1; i += mr, panel += dtrain__gemm_panel(pass))
            job->isa->pack_a(panel, &job->a, i, (int)dtrain__min(mr, pass->i1 - i), pass->p + p,
                             steps);
    }
}

static void dtrain__gemm_block(const dtrain__gemm_pass *pass)
{
    const dtrain__gemm_job *job = pass->job;
    const dtrain__isa *isa = job->isa;
    int mr = isa->mr, nr = isa->nr;
    /* use B in place if it has the right order and at most two panels of A would use the copy, or
     * if it is a panel */
    int in_place = !job->b.along_k && job->b.dtype == DTRAIN_DTYPE_F32 && isa->pair == 1 &&
                   (pass->i1 - pass->i0 <= 2 * mr || job->b.ld == nr);
    dtrain__gemm_pack_a_block(pass);
    for (int64_t j = pass->j0; j < pass->j1; j += nr) {
        const float *b = pass->b_panel, *a = pass->a_block;
        int64_t ldb = nr;
        if (in_place && pass->j1 - j >= nr) {
            b = (const float *)job->b.data + pass->p * job->b.ld + j;
            ldb = job->b.ld;
        } else {
            isa->pack_b(pass->b_panel, &job->b, j, (int)dtrain__min(nr, pass->j1 - j), pass->p,
                        pass->k);
        }
        for (int64_t i = pass->i0; i < pass->i1; i += mr, a += dtrain__gemm_panel(pass))
            dtrain__gemm_tile(pass, i, j, a, b, ldb);
    }
}

static void dtrain__gemm_task(void *ctx, int index, int count)
{
    dtrain__gemm_job *job = (dtrain__gemm_job *)ctx;
    const dtrain_gemm_args *x = job->args;
    const dtrain__isa *isa = job->isa;
    dtrain__gemm_pass pass;
    (void)count;
    memset(&pass, 0, sizeof pass);
    pass.job = job;
    pass.a_block = job->memory + index * job->slot;
    pass.b_panel = pass.a_block + DTRAIN__MC * DTRAIN__PITCH;
    pass.partial = pass.b_panel + DTRAIN__NR_MAX * DTRAIN__KC;
    if (isa->begin) isa->begin();
    for (;;) {
        int64_t at = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED);
        const int64_t part = at / (job->rows * job->cols);
        if (part >= job->parts) break;
        at %= job->rows * job->cols;
        pass.i0 = at % job->rows * job->m_step;
        pass.j0 = at / job->rows * job->n_step;
        pass.i1 = dtrain__min(pass.i0 + job->m_step, x->m);
        pass.j1 = dtrain__min(pass.j0 + job->n_step, x->n);
        pass.p = part * job->part_k;
        pass.end = dtrain__min(pass.p + job->part_k, job->k);
        pass.c_at = part * x->m * x->ldc;
        pass.first = 1;
        do { /* once even for k == 0: beta, bias and activation remain */
            pass.k = (int)dtrain__min(job->k_step, pass.end - pass.p);
            pass.cells = (int)dtrain__multiple(dtrain__gemm_ceil(pass.k, isa->pair), isa->unit);
            pass.last = pass.p + pass.k == pass.end;
            dtrain__gemm_block(&pass);
            pass.p += pass.k;
            pass.first = 0;
        } while (pass.p < pass.end);
    }
    if (isa->end) isa->end();
}

/* Cut k into equal blocks of whole cells, and find the rows of A that fit the buffer. */
static void dtrain__gemm_cut_k(dtrain__gemm_job *job)
{
    const int64_t most = DTRAIN__KC * job->isa->pair, mr = job->isa->mr;
    const int64_t whole = job->isa->pair * job->isa->unit;
    const int64_t k = job->part_k;
    job->k_step = dtrain__gemm_ceil(k, dtrain__gemm_ceil(k, most) + (k == 0));
    job->k_step = dtrain__multiple(job->k_step, whole);
    job->needs_partial = job->args->c_dtype != DTRAIN_DTYPE_F32 && k > job->k_step;
    job->m_most = DTRAIN__MC / mr * mr;
    if (job->isa->pair == 1 || job->isa->pitch || job->needs_partial || k == 0) return;
    /* taller blocks pack B less often, which pays for cheap products */
    job->m_most = DTRAIN__MC * DTRAIN__KC / (job->k_step / job->isa->pair) / mr * mr;
    if (job->m_most > 4 * DTRAIN__MC / mr * mr) job->m_most = 4 * DTRAIN__MC / mr * mr;
}

/* Cut C. Of the grids that fit the buffers and give every thread the same number of rectangles,
 * take the grid with the least work per thread: multiplications and packing. */
static void dtrain__gemm_cut(dtrain__gemm_job *job, int threads)
{
    int64_t m = job->args->m, n = job->args->n, mr = job->isa->mr, nr = job->isa->nr;
    int64_t best = INT64_MAX, fewest = dtrain__gemm_ceil(m, job->m_most);
    for (int64_t extra = 0; extra < threads; extra++) {
        int64_t m_step = dtrain__multiple(dtrain__gemm_ceil(m, fewest + extra), mr);
        int64_t rows = dtrain__gemm_ceil(m, m_step);
        int64_t cols = dtrain__gemm_ceil(n, DTRAIN__NC);
        while (rows * cols % threads && rows * cols < 8 * threads) cols++;
        int64_t n_step = dtrain__multiple(dtrain__gemm_ceil(n, cols), nr);
        cols = dtrain__gemm_ceil(n, n_step);
        int64_t rounds = dtrain__gemm_ceil(rows * cols, threads);
        int64_t cost = rounds * (m_step * n_step + job->isa->packing * (m_step + n_step));
        if (cost >= best) continue;
        best = cost;
        job->m_step = m_step;
        job->n_step = n_step;
        job->rows = rows;
        job->cols = cols;
    }
}

/* Return the floats of scratch of a thread; partial: with sums that C cannot hold. */
DTRAIN__PRIVATE int64_t dtrain__gemm_slot(bool partial)
{
    return DTRAIN__MC * DTRAIN__PITCH + DTRAIN__NR_MAX * DTRAIN__KC +
           (partial ? DTRAIN__MC * DTRAIN__NC : 0);
}

DTRAIN__PRIVATE dtrain_result dtrain__gemm_run(dtrain__cpu *cpu, const dtrain__gemm_call *product)
{
    const dtrain_gemm_args *args = product->args;
    dtrain__gemm_job job;
    dtrain__pool *pool = cpu->pool;
    if (args->m <= 0 || args->n <= 0) return DTRAIN_OK;
    memset(&job, 0, sizeof job);
    job.args = args;
    job.isa = product->isa;
    job.a = product->a;
    job.b = product->b;
    job.c_rows = product->c_rows;
    job.k = args->alpha == 0 || args->k < 0 ? 0 : args->k;
    job.part_k = dtrain__gemm_ceil(job.k, product->parts);
    job.parts = job.k ? dtrain__gemm_ceil(job.k, job.part_k) : 1;
    dtrain__gemm_cut_k(&job);

    /* waking other threads costs more than a quarter of a million multiply-adds */
    int64_t tiny = 1 << 18;
    if (args->m * args->n <= tiny && args->m * args->n * job.k <= tiny) pool = NULL;
    const int threads = pool ? pool->thread_count : 1;
    dtrain__gemm_cut(&job, job.parts > 1 ? 1 : threads);
    job.slot = dtrain__gemm_slot(job.needs_partial);
    DTRAIN__TRY(dtrain__cpu_scratch(cpu, product->reserve + job.slot * threads, &job.memory));
    job.memory += product->reserve;
    dtrain__parallel(pool, dtrain__gemm_task, &job);
    return DTRAIN_OK;
}

DTRAIN__PRIVATE dtrain_result dtrain__gemm(dtrain__cpu *cpu, const dtrain_gemm_args *args)
{
    dtrain__gemm_call product;
    memset(&product, 0, sizeof product);
    product.args = args;
    product.isa = cpu->isa;
    if (cpu->pairs && args->a_dtype == DTRAIN_DTYPE_BF16 && args->b_dtype == DTRAIN_DTYPE_BF16)
        product.isa = cpu->pairs;
    product.a.data = args->a;
    product.a.dtype = args->a_dtype;
    product.a.ld = args->lda;
    product.a.along_k = !(args->flags & DTRAIN_GEMM_TRANS_A);
    product.b.data = args->b;
    product.b.dtype = args->b_dtype;
    product.b.ld = args->ldb;
    product.b.along_k = (args->flags & DTRAIN_GEMM_TRANS_B) != 0;
    product.parts = 1;
    return dtrain__gemm_run(cpu, &product);
}
