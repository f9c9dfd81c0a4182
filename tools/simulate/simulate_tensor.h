/* simulate_tensor.h: the time of a layer, and what the ranks of a tensor axis send each other in the middle of it. Part
 * of simulate.c: included behind simulate_models.h and simulate_comm.h.
 *
 * Layers are numbers here and no operations of a tape, so what operations send (src/tape/linear.c, embedding.c,
 * cross_entropy.c) is said again, in their order, and goes through the communicator of a dtrain_mesh:
 *
 *     parameter         forward                       backward
 *
 *     table             the sum of rows of fp32       ||: rows are gathered
 *     cut by rows       ||: rows are gathered         the sum of d_x, under d_weight; ||: rows again, under d_x
 *     cut by columns    the sum of y                  ||: rows are gathered
 *     head, the loss    maxima, then two sums a row   -
 *
 *     ||: with --sequence-parallel, where each sum also is scattered to rows
 *
 * What forward and the backward of an output send is waited for at once. */
#ifndef SIMULATE_TENSOR_H
#define SIMULATE_TENSOR_H

static struct tensor_axis {
    dtrain_comm *comm; /* NULL: layers are whole */
    size_t rows;       /* of a micro-batch */
    size_t bytes;      /* of each of both: virtual memory of all rows, and of this rank's */
    void *whole, *part;
} axis;

/* With a tensor axis: the last rank of the second replica. What the axis does not divide, the last rank has the most
 * of; and in the first replica one number would name two groups of a mesh. */
static int sim_mesh_rank(int size, int tensor) { return tensor - 1 + (size > tensor ? tensor : 0); }

/* Make the communicator that a mesh is made of. */
static dtrain_result sim_mesh_comm(dtrain_world *world, int size, int nodes, dtrain_comm **out)
{
    const int tensor = (int)flags.tensor, local = size / nodes;
    *out = NULL;
    if (size % tensor == 0 && local % tensor && tensor % local)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "--tensor is %d, on nodes of %d: expected a divisor of a node's GPUs, "
                           "or whole nodes",
                           tensor, local);
    TRY(sim_comm_new(world, size, nodes, sim_mesh_rank(size, tensor), out));
    ((null_comm *)(void *)*out)->tensor = tensor;
    ((null_comm *)(void *)*out)->aside = true; /* what all ranks agree on is of no data axis */
    return DTRAIN_OK;
}

/* Make a mesh of tensor x data, where there is a tensor axis; else a communicator of all. */
static dtrain_result mesh_open(dtrain_world *world, int size, int nodes, dtrain_comm **comm,
                               dtrain_mesh **mesh)
{
    dtrain_mesh_desc axes = {0};
    *mesh = NULL;
    if (flags.tensor == 1) return sim_comm_new(world, size, nodes, sim_rank(size), comm);
    TRY(sim_mesh_comm(world, size, nodes, comm));
    axes.tensor = (int)flags.tensor;
    axes.sequence_parallel = flags.sequence_parallel != 0;
    axes.comm = *comm;
    return dtrain_mesh_create(world, &axes, mesh);
}

/* Prepare messages of so many samples; axis_close frees the memory, also after an error. */
static dtrain_result axis_open(dtrain_world *world, const model *m, dtrain_comm *comm, long batch)
{
    dtrain_device *device = dtrain_world_device(world);
    int64_t longest = 0; /* row of inputs or outputs that is sent */
    memset(&axis, 0, sizeof axis);
    axis.comm = comm;
    axis.rows = (size_t)batch * (size_t)m->samples;
    if (!comm) return DTRAIN_OK;
    if (flags.sequence_parallel && axis.rows % (size_t)flags.tensor)
        return dtrain_fail(
            DTRAIN_ERROR_ARGUMENT,
            "--sequence-parallel: a micro-batch has %zu rows, which --tensor %ld does "
            "not divide; see --batch-sizes and --seq",
            axis.rows, flags.tensor);
    for (size_t i = 0; i < m->count; i++) {
        const dtrain_param *p = &m->params[i];
        const int64_t row = p->shape[p->cut.axis == DTRAIN_CUT_ROWS];
        if (row > longest) longest = row;
    }
    axis.bytes = axis.rows * (size_t)longest * sizeof(float);
    TRY(device->ops->alloc(device, axis.bytes, &axis.whole));
    return device->ops->alloc(device, axis.bytes, &axis.part);
}

static void axis_close(dtrain_world *world)
{
    dtrain_device *device = dtrain_world_device(world);
    if (axis.whole) device->ops->free(device, axis.whole, axis.bytes);
    if (axis.part) device->ops->free(device, axis.part, axis.bytes);
    memset(&axis, 0, sizeof axis);
}

/* Start to put the rows of all ranks together. */
static dtrain_result axis_gather(int64_t row, dtrain_dtype dtype, dtrain_work **work)
{
    return dtrain_all_gather(axis.comm, axis.part, axis.whole,
                             axis.rows / (size_t)flags.tensor * (size_t)row, dtype, work);
}

/* Start to add up what all ranks have of all rows. */
static dtrain_result axis_sum(int64_t row, dtrain_dtype dtype, dtrain_work **work)
{
    const size_t count = axis.rows * (size_t)row;
    if (flags.sequence_parallel)
        return dtrain_reduce_scatter(axis.comm, axis.whole, axis.part, count / (size_t)flags.tensor,
                                     dtype, DTRAIN_REDUCE_SUM, work);
    return dtrain_all_reduce(axis.comm, axis.whole, axis.whole, count, dtype, DTRAIN_REDUCE_SUM,
                             work);
}

static dtrain_dtype axis_dtype(void)
{
    return flags.precision ? DTRAIN_DTYPE_BF16 : DTRAIN_DTYPE_F32;
}

/* Wait for what was started before a layer's product, and is not waited for behind it. */
static dtrain_result axis_started(dtrain_work **work)
{
    dtrain_work *started = *work;
    if (!flags.no_overlap && flags.tensor_overlap != OVERLAP_NONE) return DTRAIN_OK;
    *work = NULL;
    return dtrain_work_wait(started);
}

static dtrain_result axis_wait(dtrain_work **work)
{
    dtrain_work *started = *work;
    *work = NULL;
    return dtrain_work_wait(started);
}

/* Whether a message goes beside the product that reads or makes it. */
static bool in_pieces(void) { return flags.tensor_overlap == OVERLAP_PIECES && !flags.no_overlap; }

/* The vocabulary-parallel loss: the whole row's maximum, its sum of exponentials and the target's logit. */
static dtrain_result axis_loss(void)
{
    float *floats = (float *)axis.whole;
    TRY(dtrain_all_reduce(axis.comm, floats, floats, axis.rows, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_MAX,
                          NULL));
    return dtrain_all_reduce(axis.comm, floats, floats, 2 * axis.rows, DTRAIN_DTYPE_F32,
                             DTRAIN_REDUCE_SUM, NULL);
}

/* Share of the measured bandwidth (of copies of large arrays) that kernels around products reach: masks, rows, strides,
 * ends of grids. Of 1, 0.8, 0.65 and 0.5 the one that fits the rows of one stage of Narayanan et al. in published.txt
 * (3.6B, 7.5B, 18.4B); all other rows there are predicted with it. */
#define KERNEL_SHARE 0.65

/* Attention of layer i: a kernel whose reads and writes are hidden, or products that scores in memory bound. */
static double attention_seconds(const layer *l, double rate, double bandwidth, int pass)
{
    const double flops = l->attention[pass];
    return flags.attention ? most(flops / rate, l->scores[pass] / bandwidth)
                           : flops / (FUSED_RATE * rate);
}

static double weight_bytes(const dtrain_param *p)
{
    const double ranks = p->cut.axis ? (double)flags.tensor : 1;
    return 4.0 * (double)p->shape[0] * (double)(p->shape[1] ? p->shape[1] : 1) / ranks;
}

/* Run products of layer i for one micro-batch (forward has 1, backward 2: d_x and d_weight), and what is around them
 * where pass is 0 (forward) or 1 (backward); -1: it ran before. A product hides its own reads and writes, the kernels
 * around it hide nothing. --measured-rate scales products: bandwidth was measured, their rate was guessed. */
static void run_layer(const model *m, size_t i, long batch, double products, int pass)
{
    const layer *l = &m->layers[i];
    const double samples = (double)batch, bandwidth = sim.machine.hbm_gbs * 1e9;
    const double rate = sim.machine.tflops_bf16 * 1e12 * sim.machine.efficiency * sim.rate_scale;
    const double bytes = weight_bytes(&m->params[i]) + l->product_bytes * samples;
    double seconds = 0;
    if (l->flops > 0) seconds = products * most(l->flops * samples / rate, bytes / bandwidth);
    if (pass >= 0)
        seconds += samples * (attention_seconds(l, rate, bandwidth, pass) +
                              l->around[pass] / (KERNEL_SHARE * bandwidth));
    compute(seconds);
}

static dtrain_result forward_layer(const model *m, size_t i, long batch)
{
    const dtrain_param *p = &m->params[i];
    const bool table = m->layers[i].flops == 0;
    const uint32_t cut = axis.comm ? p->cut.axis : (uint32_t)DTRAIN_CUT_NONE;
    dtrain_work *work = NULL;
    if (cut == DTRAIN_CUT_ROWS && !table && flags.sequence_parallel)
        TRY(axis_gather(p->shape[1], axis_dtype(), &work));
    if (cut == DTRAIN_CUT_COLUMNS && in_pieces()) TRY(axis_sum(p->shape[0], axis_dtype(), &work));
    if (!in_pieces()) TRY(axis_wait(&work));
    run_layer(m, i, batch, 1, 0);
    TRY(axis_wait(&work));
    if (cut == DTRAIN_CUT_ROWS && table) TRY(axis_sum(p->shape[1], DTRAIN_DTYPE_F32, &work));
    if (cut == DTRAIN_CUT_COLUMNS && !in_pieces()) TRY(axis_sum(p->shape[0], axis_dtype(), &work));
    TRY(dtrain_work_wait(work));
    const bool head = i + 1 == m->count && p->unit + 1 == m->units;
    return cut && head ? axis_loss() : DTRAIN_OK;
}

/* Gradients of inputs, of weights, or both: pipelines have schedules that make weights' later. */
enum { HALF_BOTH, HALF_INPUTS, HALF_WEIGHTS };

/* The backward of a layer whose weight is cut by rows: whole d_x is a sum, which goes on under d_weight. */
static dtrain_result backward_rows(const model *m, size_t i, long batch, int half)
{
    const dtrain_param *p = &m->params[i];
    dtrain_work *gathering = NULL, *summing = NULL;
    if (half != HALF_INPUTS && flags.sequence_parallel)
        TRY(axis_gather(p->shape[1], axis_dtype(), &gathering));
    TRY(axis_started(&gathering));
    if (half != HALF_WEIGHTS) {
        run_layer(m, i, batch, 1, 1); /* d_x */
        TRY(axis_sum(p->shape[1], axis_dtype(), &summing));
        TRY(axis_started(&summing));
    }
    TRY(dtrain_work_wait(gathering));
    if (half != HALF_INPUTS) run_layer(m, i, batch, 1, -1); /* d_weight */
    return dtrain_work_wait(summing);
}

static dtrain_result backward_layer(const model *m, size_t i, long batch, int half)
{
    const dtrain_param *p = &m->params[i];
    const bool table = m->layers[i].flops == 0;
    const uint32_t cut = axis.comm ? p->cut.axis : (uint32_t)DTRAIN_CUT_NONE;
    dtrain_work *gathering = NULL;
    if (cut == DTRAIN_CUT_ROWS && !table) return backward_rows(m, i, batch, half);
    if (cut && flags.sequence_parallel && half != HALF_WEIGHTS)
        TRY(table ? axis_gather(p->shape[1], DTRAIN_DTYPE_F32, &gathering)
                  : axis_gather(p->shape[0], axis_dtype(), &gathering));
    if (!in_pieces()) TRY(axis_wait(&gathering));
    run_layer(m, i, batch, half == HALF_BOTH ? 2 : 1, half == HALF_WEIGHTS ? -1 : 1);
    return dtrain_work_wait(gathering);
}

#endif
