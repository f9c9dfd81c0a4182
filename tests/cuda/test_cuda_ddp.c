/* test_cuda_ddp.c: training on the CUDA device: collectives on device buffers, DDP, autocast, replayed
 * steps, host arrays, and what happens when the device fails. The CPU device is the reference; the
 * ranks of this machine share one GPU, so their communicator is the staged one. */
#include "test.h"
#include "dtrain.h"
#include "device_table.h"
#include "packed_attention.h"
#include "ranks.h"
#ifdef DTRAIN_CUDA_EMULATION
#include "cuda_emulation.h"
#endif

#if defined(__SANITIZE_THREAD__)
#define UNDER_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define UNDER_TSAN 1
#endif
#endif
#ifndef UNDER_TSAN
#define UNDER_TSAN 0
#endif

static dtrain_launch_desc cuda_desc(int ranks, uint32_t mode)
{
    dtrain_launch_desc desc = ranks_desc(ranks, mode);
    desc.device_ops = dtrain_cuda_device_ops();
    return desc;
}

static void cuda_run(int ranks, uint32_t mode, dtrain_rank_fn rank_main, void *user)
{
    dtrain_launch_desc desc = cuda_desc(ranks, mode);
    dtrain_result result = ranks_launch(&desc, rank_main, user, NULL);
    CHECK_MSG(result == DTRAIN_OK, "%d ranks: %s", ranks,
              result == DTRAIN_OK ? "" : dtrain_last_error());
}

/* ---- collectives ---- */

/* Where a buffer lies. */
enum { TWIN, DEVICE, HOST, PLACES };

enum { MOST = 20000 };

/* Small whole numbers: sums and products of up to 4 ranks are exact in every type. */
static double input_at(int rank, int64_t i) { return (double)((i * 7 + rank * 3) % 5 - 2); }

static void set_at(void *x, dtrain_dtype dtype, int64_t i, double value)
{
    const int32_t i32 = (int32_t)value;
    const int64_t i64 = (int64_t)value;
    const float f32 = (float)value;
    const uint16_t half = dtrain_half_from_f32(dtype, f32);
    const size_t unit = dtrain_dtype_bytes(dtype);
    const void *from = dtype == DTRAIN_DTYPE_I32   ? (const void *)&i32
                       : dtype == DTRAIN_DTYPE_I64 ? (const void *)&i64
                       : dtype == DTRAIN_DTYPE_F32 ? (const void *)&f32
                                                   : (const void *)&half;
    memcpy((char *)x + (size_t)i * unit, from, unit);
}

static double get_at(const void *x, dtrain_dtype dtype, int64_t i)
{
    const char *at = (const char *)x + (size_t)i * dtrain_dtype_bytes(dtype);
    int32_t i32;
    int64_t i64;
    float f32;
    uint16_t half;
    switch (dtype) {
    case DTRAIN_DTYPE_I32: memcpy(&i32, at, sizeof i32); return (double)i32;
    case DTRAIN_DTYPE_I64: memcpy(&i64, at, sizeof i64); return (double)i64;
    case DTRAIN_DTYPE_F32: memcpy(&f32, at, sizeof f32); return (double)f32;
    case DTRAIN_DTYPE_BF16:
        memcpy(&half, at, sizeof half);
        return (double)dtrain_half_to_f32(DTRAIN_DTYPE_BF16, half);
    default:
        memcpy(&half, at, sizeof half);
        return (double)dtrain_half_to_f32(DTRAIN_DTYPE_F16, half);
    }
}

static double reduced(int ranks, int64_t i, dtrain_reduce_op op)
{
    double value = input_at(0, i);
    for (int r = 1; r < ranks; r++) {
        const double x = input_at(r, i);
        if (op == DTRAIN_REDUCE_SUM || op == DTRAIN_REDUCE_MEAN) value += x;
        else if (op == DTRAIN_REDUCE_PROD) value *= x;
        else if (op == DTRAIN_REDUCE_MIN ? x < value : x > value) value = x;
    }
    return op == DTRAIN_REDUCE_MEAN ? value / ranks : value;
}

typedef struct buffers {
    dtrain_comm *comm;
    dtrain_device *device;
    void *memory[2][PLACES]; /* send, recv */
    char *host;              /* what is written to or read from them */
} buffers;

enum { BYTES = MOST * 8 * 4 };

static int buffers_open(buffers *b, dtrain_world *world)
{
    b->comm = dtrain_world_comm(world);
    b->device = dtrain_world_device(world);
    b->host = (char *)malloc(BYTES);
    for (int side = 0; side < 2; side++) {
        RANKS_TRY(dtrain_comm_alloc(b->comm, BYTES, &b->memory[side][TWIN]));
        RANKS_TRY(b->device->ops->alloc(b->device, BYTES, &b->memory[side][DEVICE]));
        b->memory[side][HOST] = malloc(BYTES);
    }
    return 0;
}

static void buffers_close(buffers *b)
{
    for (int side = 0; side < 2; side++) {
        dtrain_comm_free(b->comm, b->memory[side][TWIN], BYTES);
        b->device->ops->free(b->device, b->memory[side][DEVICE], BYTES);
        free(b->memory[side][HOST]);
    }
    free(b->host);
}

static dtrain_result move(buffers *b, void *to, const void *from, size_t bytes)
{
    return dtrain_device_copy(b->device, to, from, bytes);
}

/* One collective with its input written by this rank and its output compared. */
static int try_collective(buffers *b, uint32_t kind, dtrain_dtype dtype, dtrain_reduce_op op,
                          int64_t count, int from, int to, bool in_place)
{
    const int ranks = dtrain_comm_size(b->comm), rank = dtrain_comm_rank(b->comm), root = ranks - 1;
    const size_t unit = dtrain_dtype_bytes(dtype);
    const bool scatter = kind == DTRAIN_COLLECTIVE_REDUCE_SCATTER,
               gather = kind == DTRAIN_COLLECTIVE_ALL_GATHER;
    const bool exchange = kind == DTRAIN_COLLECTIVE_ALL_TO_ALL;
    const int64_t sent = scatter || exchange ? count * ranks : count;
    const int64_t got = gather || exchange ? count * ranks : count;
    char *send = (char *)b->memory[0][from], *recv = (char *)b->memory[1][to];
    if ((in_place && !exchange) || kind == DTRAIN_COLLECTIVE_BROADCAST) {
        if (gather) send = recv + (size_t)(rank * count) * unit;
        else if (scatter) recv = send + (size_t)(rank * count) * unit;
        else recv = send;
    }
    for (int64_t i = 0; i < sent; i++) set_at(b->host, dtype, i, input_at(rank, i));
    RANKS_TRY(move(b, send, b->host, (size_t)sent * unit));
    dtrain_result result = DTRAIN_OK;
    if (kind == DTRAIN_COLLECTIVE_ALL_REDUCE)
        result = dtrain_all_reduce(b->comm, send, recv, (size_t)count, dtype, op, NULL);
    if (scatter)
        result = dtrain_reduce_scatter(b->comm, send, recv, (size_t)count, dtype, op, NULL);
    if (gather) result = dtrain_all_gather(b->comm, send, recv, (size_t)count, dtype, NULL);
    if (exchange) result = dtrain_all_to_all(b->comm, send, recv, (size_t)count, dtype, NULL);
    if (kind == DTRAIN_COLLECTIVE_BROADCAST)
        result = dtrain_broadcast(b->comm, send, (size_t)count, dtype, root, NULL);
    if (kind == DTRAIN_COLLECTIVE_REDUCE)
        result = dtrain_reduce(b->comm, send, recv, (size_t)count, dtype, op, root, NULL);
    RANKS_TRY(result);
    if (kind == DTRAIN_COLLECTIVE_REDUCE && rank != root) return 0;
    RANKS_TRY(move(b, b->host, recv, (size_t)got * unit));
    for (int64_t i = 0; i < got; i++) {
        double want = gather || exchange
                          ? input_at((int)(i / count), (exchange ? rank * count : 0) + i % count)
                      : kind == DTRAIN_COLLECTIVE_BROADCAST
                          ? input_at(root, i)
                          : reduced(ranks, scatter ? rank * count + i : i, op);
        if (op == DTRAIN_REDUCE_MEAN && dtype == DTRAIN_DTYPE_BF16)
            want = (double)dtrain_half_to_f32(DTRAIN_DTYPE_BF16,
                                              dtrain_half_from_f32(DTRAIN_DTYPE_BF16, (float)want));
        if (op == DTRAIN_REDUCE_MEAN && dtype == DTRAIN_DTYPE_F16)
            want = (double)dtrain_half_to_f32(DTRAIN_DTYPE_F16,
                                              dtrain_half_from_f32(DTRAIN_DTYPE_F16, (float)want));
        const double found = get_at(b->host, dtype, i);
        if (fabs(found - want) <= (op == DTRAIN_REDUCE_MEAN ? 1e-7 : 0)) continue;
        CHECK_MSG(0, "kind %u %s op %d count %lld places %d %d in place %d: [%lld] is %g, not %g",
                  kind, dtrain_dtype_name(dtype), (int)op, (long long)count, from, to, in_place,
                  (long long)i, found, want);
        return 1;
    }
    CHECK(1);
    return 0;
}

static int collectives_main(dtrain_world *world, void *user)
{
    static const dtrain_dtype dtypes[] = {DTRAIN_DTYPE_F32, DTRAIN_DTYPE_BF16, DTRAIN_DTYPE_F16,
                                          DTRAIN_DTYPE_I32, DTRAIN_DTYPE_I64};
    static const int64_t counts[] = {1, 7, 1000, MOST};
    buffers b;
    int failed = buffers_open(&b, world), turn = 0;
    (void)user;
    for (uint32_t kind = DTRAIN_COLLECTIVE_ALL_REDUCE;
         kind <= DTRAIN_COLLECTIVE_ALL_TO_ALL && !failed; kind++) {
        if (kind > DTRAIN_COLLECTIVE_REDUCE && kind < DTRAIN_COLLECTIVE_ALL_TO_ALL)
            continue; /* no data, or for pairs */
        for (int d = 0; d < 5 && !failed; d++)
            for (int op = DTRAIN_REDUCE_SUM; op <= DTRAIN_REDUCE_PROD && !failed; op++) {
                const bool whole = dtypes[d] == DTRAIN_DTYPE_I32 || dtypes[d] == DTRAIN_DTYPE_I64;
                if (op == DTRAIN_REDUCE_MEAN && whole) continue;
                for (int c = 0; c < 4 && !failed; c++, turn++) /* all combinations in turn */
                    failed = try_collective(&b, kind, dtypes[d], (dtrain_reduce_op)op, counts[c],
                                            turn % 3, turn / 3 % 3, turn % 2 == 1);
            }
    }
    dtrain_comm_info info;
    dtrain_comm_query(b.comm, &info);
    CHECK(strcmp(info.backend, "staged") == 0);
    CHECK(dtrain_comm_size(b.comm) == 1 || info.staged_bytes > 0);
    buffers_close(&b);
    return failed;
}

static void test_collectives(void)
{
    for (int ranks = 1; ranks <= 4; ranks++)
        cuda_run(ranks, DTRAIN_LAUNCH_PROCESSES, collectives_main, NULL);
    cuda_run(3, DTRAIN_LAUNCH_THREADS, collectives_main, NULL);
}

/* Many at once, waited for in another order, mixed with kernels on the same memory. */
static int async_main(dtrain_world *world, void *user)
{
    enum { FLIGHTS = 40, COUNT = 3000 };
    dtrain_comm *comm = dtrain_world_comm(world);
    dtrain_device *device = dtrain_world_device(world);
    const int ranks = dtrain_world_size(world), rank = dtrain_world_rank(world);
    dtrain_work *work[FLIGHTS];
    float *x[FLIGHTS], host[COUNT];
    void *memory;
    (void)user;
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < FLIGHTS; i++) {
            RANKS_TRY(dtrain_comm_alloc(comm, sizeof host, &memory));
            x[i] = (float *)memory;
            /* written by a kernel that is still queued when the collective starts */
            dtrain_axpby_args fill = {COUNT, false, (float)(i + rank), 0,   NULL,
                                      x[i],  false, DTRAIN_DTYPE_F32,  NULL};
            RANKS_TRY(device->ops->axpby(device, &fill));
            RANKS_TRY(dtrain_all_reduce(comm, x[i], x[i], COUNT, DTRAIN_DTYPE_F32,
                                        DTRAIN_REDUCE_SUM, &work[i]));
        }
        for (int i = FLIGHTS - 1; i >= 0; i--) {
            bool done;
            RANKS_TRY(dtrain_work_test(work[i], &done));
            RANKS_TRY(dtrain_work_wait(work[i]));
            /* read by a kernel that must come after the copy back */
            dtrain_axpby_args twice = {COUNT, false, 2, 0, x[i], x[i], false, DTRAIN_DTYPE_F32,
                                       NULL};
            RANKS_TRY(device->ops->axpby(device, &twice));
        }
        for (int i = 0; i < FLIGHTS; i++) {
            const float want = 2 * ((float)(i * ranks) + (float)(ranks * (ranks - 1)) / 2);
            RANKS_TRY(
                device->ops->copy(device, host, x[i], sizeof host, DTRAIN_COPY_DEVICE_TO_HOST));
            bool same = true;
            for (int k = 0; k < COUNT; k++) same = same && host[k] == want;
            CHECK_MSG(same, "flight %d: %g, expected %g", i, (double)host[0], (double)want);
            dtrain_comm_free(comm, x[i], sizeof host);
        }
    }
    return 0;
}
/* An all-to-all takes its place between kernels like any other: written by one that is queued, read
 * by one that comes after; between memory of the communicator, and from memory of
 * the device that gets an image of its own, larger from round to round. */
static int exchange_main(dtrain_world *world, void *user)
{
    enum { ROUNDS = 6, LARGEST = 4096 };
    dtrain_comm *comm = dtrain_world_comm(world);
    dtrain_device *device = dtrain_world_device(world);
    const int ranks = dtrain_world_size(world), rank = dtrain_world_rank(world);
    const size_t bytes = (size_t)ranks * LARGEST * sizeof(float);
    float *host = (float *)malloc(bytes);
    void *memory[4];
    (void)user;
    for (int i = 0; i < 2; i++) {
        RANKS_TRY(dtrain_comm_alloc(comm, bytes, &memory[i]));
        RANKS_TRY(device->ops->alloc(device, bytes, &memory[2 + i]));
    }
    for (int round = 0; round < ROUNDS; round++) {
        const int64_t count = LARGEST >> (ROUNDS - 1 - round), all = count * ranks;
        dtrain_work *work[2];
        for (int64_t i = 0; i < all; i++) host[i] = (float)(rank * all + i);
        for (int pair = 0; pair < 2; pair++) {
            float *send = (float *)memory[2 * pair];
            RANKS_TRY(dtrain_device_copy(device, send, host, (size_t)all * sizeof *host));
            dtrain_axpby_args twice = {all, false, 2, 0, send, send, false, DTRAIN_DTYPE_F32, NULL};
            RANKS_TRY(device->ops->axpby(device, &twice));
            RANKS_TRY(dtrain_all_to_all(comm, send, memory[2 * pair + 1], (size_t)count,
                                        DTRAIN_DTYPE_F32, &work[pair]));
        }
        for (int pair = 1; pair >= 0; pair--) {
            float *recv = (float *)memory[2 * pair + 1];
            dtrain_axpby_args half = {all, false, 0.5f, 0, recv, recv, false, DTRAIN_DTYPE_F32,
                                      NULL};
            RANKS_TRY(dtrain_work_wait(work[pair]));
            RANKS_TRY(device->ops->axpby(device, &half));
            RANKS_TRY(dtrain_device_copy(device, host, recv, (size_t)all * sizeof *host));
            for (int64_t i = 0; i < all; i++)
                CHECK_CLOSE(host[i], (float)(i / count * all + rank * count + i % count), 0);
        }
    }
    for (int i = 0; i < 2; i++) {
        dtrain_comm_free(comm, memory[i], bytes);
        device->ops->free(device, memory[2 + i], bytes);
    }
    free(host);
    return 0;
}
static void test_exchange(void)
{
    for (int ranks = 1; ranks <= 4; ranks++)
        cuda_run(ranks, DTRAIN_LAUNCH_PROCESSES, exchange_main, NULL);
}

static void test_async(void)
{
    cuda_run(2, DTRAIN_LAUNCH_PROCESSES, async_main, NULL);
    cuda_run(3, DTRAIN_LAUNCH_THREADS, async_main, NULL);
}

static int pairs_main(dtrain_world *world, void *user)
{
    dtrain_comm *comm = dtrain_world_comm(world), *half;
    dtrain_device *device = dtrain_world_device(world);
    const int ranks = dtrain_world_size(world), rank = dtrain_world_rank(world);
    void *out, *in;
    float host[100];
    dtrain_work *sent, *received;
    (void)user;
    RANKS_TRY(dtrain_comm_alloc(comm, sizeof host, &out));
    RANKS_TRY(device->ops->alloc(device, sizeof host, &in));
    for (int i = 0; i < 100; i++) host[i] = (float)(rank * 100 + i);
    RANKS_TRY(device->ops->copy(device, out, host, sizeof host, DTRAIN_COPY_HOST_TO_DEVICE));
    RANKS_TRY(dtrain_send(comm, out, 100, DTRAIN_DTYPE_F32, (rank + 1) % ranks, &sent));
    RANKS_TRY(dtrain_recv(comm, in, 100, DTRAIN_DTYPE_F32, (rank + ranks - 1) % ranks, &received));
    RANKS_TRY(dtrain_work_wait(received));
    RANKS_TRY(dtrain_work_wait(sent));
    RANKS_TRY(device->ops->copy(device, host, in, sizeof host, DTRAIN_COPY_DEVICE_TO_HOST));
    CHECK(host[99] == (float)((rank + ranks - 1) % ranks * 100 + 99));

    RANKS_TRY(dtrain_comm_split(comm, rank % 2, -rank, &half));
    RANKS_TRY(dtrain_all_reduce(half, in, in, 100, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_MAX, NULL));
    RANKS_TRY(device->ops->copy(device, host, in, sizeof host, DTRAIN_COPY_DEVICE_TO_HOST));
    CHECK(host[0] == (rank % 2 ? 200.0f : 300.0f)); /* 1 has 0's, 3 has 2's; 0 has 3's, 2 has 1's */
    CHECK(dtrain_comm_rank(half) == (rank < 2 ? 1 : 0));
    RANKS_TRY(dtrain_barrier(half));
    dtrain_comm_destroy(half);
    dtrain_comm_free(comm, out, sizeof host);
    device->ops->free(device, in, sizeof host);
    return 0;
}
static void test_pairs_and_groups(void) { cuda_run(4, DTRAIN_LAUNCH_PROCESSES, pairs_main, NULL); }

static bool no_streams; /* on this rank */
static dtrain_result refused_stream(dtrain_device *device, bool high_priority, dtrain_stream **out)
{
    *out = NULL;
    if (no_streams) return dtrain_fail(DTRAIN_ERROR_MEMORY, "no more streams");
    return dtrain_cuda_device_ops()->stream_create(device, high_priority, out);
}

/* A rank that cannot make its copy stream: nobody has a part of the split, and the parent goes on. */
static int no_stream_main(dtrain_world *world, void *user)
{
    dtrain_comm *comm = dtrain_world_comm(world), *half = NULL;
    const int rank = dtrain_world_rank(world);
    float sum = 1;
    (void)user;
    for (int refuses = 1; refuses < 3; refuses++) {
        no_streams = rank == refuses;
        CHECK_MSG(dtrain_comm_split(comm, rank % 2, 0, &half) == DTRAIN_ERROR_MEMORY && !half, "%s",
                  dtrain_last_error());
        CHECK_MSG(strstr(dtrain_last_error(), refuses == 1 ? "rank 1 could not make its part"
                                                           : "rank 2 could not make its part"),
                  "%s", dtrain_last_error());
    }
    no_streams = false;
    RANKS_TRY(dtrain_comm_split(comm, rank % 2, 0, &half));
    RANKS_TRY(dtrain_all_reduce(half, &sum, &sum, 1, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, NULL));
    RANKS_TRY(dtrain_all_reduce(comm, &sum, &sum, 1, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, NULL));
    CHECK(sum == 5);
    dtrain_comm_destroy(half);
    return 0;
}
static void test_split_without_stream(void)
{
    dtrain_launch_desc desc = cuda_desc(3, DTRAIN_LAUNCH_PROCESSES);
    dtrain_device_ops ops = *dtrain_cuda_device_ops();
    ops.stream_create = refused_stream;
    desc.device_ops = &ops;
    CHECK_MSG(ranks_launch(&desc, no_stream_main, NULL, NULL) == DTRAIN_OK, "%s",
              dtrain_last_error());
}

/* ---- a small GPT ---- */

enum { B = 2, T = 8, C = 16, V = 32, HEADS = 2, PARAMS = 16 };

typedef struct model {
    dtrain_param params[PARAMS];
    int32_t tokens[B * T], targets[B * T];
    int rank, step, ignored, two;
    float dropout;
} model;

static void declare(model *m)
{
    static const struct {
        const char *name;
        int64_t rows, columns;
        float scale;
    } list[PARAMS] = {
        {"wte", V, C, 0.2f},       {"wpe", T, C, 0.2f},       {"ln1.w", C, 0, 1},
        {"ln1.b", C, 0, 0},        {"qkv.w", 3 * C, C, 0.2f}, {"qkv.b", 3 * C, 0, 0.1f},
        {"proj.w", C, C, 0.2f},    {"proj.b", C, 0, 0.1f},    {"ln2.w", C, 0, 1},
        {"ln2.b", C, 0, 0},        {"fc.w", 4 * C, C, 0.2f},  {"fc.b", 4 * C, 0, 0.1f},
        {"out.w", C, 4 * C, 0.2f}, {"out.b", C, 0, 0.1f},     {"lnf.w", C, 0, 1},
        {"lnf.b", C, 0, 0}};
    for (int i = 0; i < PARAMS; i++) {
        dtrain_param *p = &m->params[i];
        p->name = list[i].name;
        p->shape[0] = list[i].rows;
        p->shape[1] = list[i].columns;
        p->unit = i < 2 ? 0 : i < 14 ? 1 : 2;
        p->init = list[i].scale == 1 ? DTRAIN_INIT_CONSTANT : DTRAIN_INIT_NORMAL;
        p->init_scale = list[i].scale;
    }
}

static dtrain_result next_batch(void *user)
{
    model *m = (model *)user;
    for (int i = 0; i < B * T; i++) {
        const uint64_t at = ((uint64_t)m->step * 64 + (uint64_t)m->rank) * B * T + (uint64_t)i;
        m->tokens[i] = (int32_t)(dtrain_random_uniform(5, 1, at) * V);
        m->targets[i] = (m->tokens[i] * 3 + 1) % V;
    }
    if (m->ignored) /* another number of ignored targets in every step */
        for (int i = 0; i < (m->step % 9 > 5 ? B * T : m->step % 4); i++) m->targets[i] = -1;
    if (m->two) /* as many in every step; with 2 one more from the ninth batch on */
        for (int i = 0; i < 3 + (m->two == 2 && m->step >= 8); i++) m->targets[i] = -1;
    m->step++;
    return DTRAIN_OK;
}

static dtrain_tensor *loss(dtrain_tape *t, void *user)
{
    model *m = (model *)user;
    dtrain_param *p = m->params;
    const int64_t shape[2] = {B, T}, rows = B * T;
    dtrain_tensor *tokens = dtrain_tape_input(t, DTRAIN_DTYPE_I32, 2, shape, m->tokens, false);
    dtrain_tensor *targets = dtrain_tape_input(t, DTRAIN_DTYPE_I32, 1, &rows, m->targets, false);
    dtrain_tape_unit(t, 0);
    dtrain_tensor *x = dtrain_embedding(t, tokens, &p[0], &p[1]);
    dtrain_tape_unit(t, 1);
    dtrain_tensor *h = dtrain_layernorm(t, x, NULL, &p[2], &p[3], 1e-5f);
    h = dtrain_linear(t, h, &p[4], &p[5], DTRAIN_ACTIVATION_NONE);
    h = causal_attention(t, h, T, HEADS);
    h = dtrain_dropout(t, dtrain_linear(t, h, &p[6], &p[7], DTRAIN_ACTIVATION_NONE), m->dropout);
    h = dtrain_layernorm(t, h, &x, &p[8], &p[9], 1e-5f);
    h = dtrain_linear(t, h, &p[10], &p[11], DTRAIN_ACTIVATION_GELU);
    h = dtrain_linear(t, h, &p[12], &p[13], DTRAIN_ACTIVATION_NONE);
    dtrain_tape_unit(t, 2);
    h = dtrain_layernorm(t, h, &x, &p[14], &p[15], 1e-5f);
    dtrain_tensor *main_loss = dtrain_cross_entropy(
        t, dtrain_linear(t, h, &p[0], NULL, DTRAIN_ACTIVATION_NONE), targets, 0, 0);
    return m->two ? dtrain_add(t, main_loss, dtrain_mean(t, dtrain_multiply(t, h, h))) : main_loss;
}

/* How a run is made, and what came out of it on rank 0. */
typedef struct run {
    uint32_t accumulation, tape_flags, optimizer;
    int two;
    bool graph, ignored, no_overlap, evaluate;
    float dropout, clip;
    size_t bucket_bytes;
    int steps;
    double losses[16], norms[16], val_loss;
    uint64_t hash;
    int64_t late_allocations; /* made after the third step */
} run;

static run *result; /* in shared memory */

static int train_main(dtrain_world *world, void *user)
{
    const run *how = (const run *)user;
    model m;
    dtrain_strategy *strategy;
    dtrain_optimizer *optimizer;
    dtrain_trainer *trainer;
    dtrain_trainer_desc desc;
    dtrain_strategy_desc ddp = {0};
    dtrain_optimizer_desc optim = dtrain_optimizer_defaults(
        how->optimizer == DTRAIN_OPTIMIZER_SGD ? DTRAIN_OPTIMIZER_SGD : DTRAIN_OPTIMIZER_ADAMW);
    const dtrain_optimizer_desc groups[2] = {dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_MUON),
                                             dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_LION)};
    if (how->optimizer == DTRAIN_OPTIMIZER_SGD) optim.momentum = 0.9f;
    optim.groups = groups;
    optim.group_count = 2;
    memset(&m, 0, sizeof m);
    memset(&desc, 0, sizeof desc);
    m.rank = dtrain_world_rank(world);
    m.ignored = how->ignored;
    m.two = how->two;
    m.dropout = how->dropout;
    declare(&m);
    if (how->optimizer == DTRAIN_OPTIMIZER_MUON) /* of matrices; Lion of their biases */
        for (int i = 4; i < 14; i++) m.params[i].group = m.params[i].shape[1] ? 1 : i < 8 ? 2 : 0;
    ddp.no_overlap = how->no_overlap;
    if (how->bucket_bytes) ddp.bucket_bytes = how->bucket_bytes;
    RANKS_TRY(dtrain_strategy_create(world, m.params, PARAMS, &ddp, &strategy));
    RANKS_TRY(dtrain_optimizer_create(world, strategy, &optim, &optimizer));
    desc.micro_batches = how->accumulation;
    desc.tokens = B * T;
    desc.clip = how->clip;
    desc.tape_flags = how->tape_flags;
    desc.graph = how->graph;
    desc.seed = 7;
    desc.schedule.lr = how->optimizer == DTRAIN_OPTIMIZER_SGD ? 0.1f : 0.01f;
    desc.strategy = strategy;
    desc.optimizer = optimizer;
    desc.next_batch = next_batch;
    desc.loss = loss;
    desc.user = &m;
    RANKS_TRY(dtrain_trainer_create(world, &desc, &trainer));
    for (int step = 0; step < how->steps; step++) {
        dtrain_step_record record;
        const dtrain_result stepped = dtrain_trainer_step(trainer, &record);
        if (how->graph && how->two == 2 &&
            step >= 4) { /* the ninth batch of two a step has other numbers */
            CHECK(stepped == DTRAIN_ERROR_UNSUPPORTED &&
                  strstr(dtrain_last_error(), "use graph = false"));
            continue;
        }
        RANKS_TRY(stepped);
        if (m.rank == 0) result->losses[step] = record.loss, result->norms[step] = record.grad_norm;
        if (how->evaluate && step % 2) { /* its passes use the same arenas */
            double val;
            model held_out = m;
            held_out.step = 1000;
            RANKS_TRY(dtrain_trainer_evaluate(trainer, next_batch, &held_out, 2, &val));
            if (m.rank == 0) result->val_loss = val;
        }
#ifdef DTRAIN_CUDA_EMULATION
        dtrain_emulation_counters now;
        dtrain_emulation_get_counters(&now);
        if (m.rank == 0 && step == 2) result->late_allocations = -now.allocations;
        if (m.rank == 0 && step == how->steps - 1) result->late_allocations += now.allocations;
#endif
    }
    uint64_t hash;
    RANKS_TRY(dtrain_strategy_verify(strategy, &hash));
    if (m.rank == 0) result->hash = hash;
    dtrain_trainer_destroy(trainer);
    dtrain_optimizer_destroy(optimizer);
    dtrain_strategy_destroy(strategy);
#ifdef DTRAIN_CUDA_EMULATION
    CHECK(dtrain_world_device(world)->ops->host_memory ||
          dtrain_world_device(world)->allocated_bytes == 0);
#endif
    return 0;
}

static run trained(run how, int ranks, uint32_t mode, bool on_cpu)
{
    dtrain_launch_desc desc = on_cpu ? ranks_desc(ranks, mode) : cuda_desc(ranks, mode);
    if (!how.steps) how.steps = 6;
    if (!result) result = (run *)ranks_shared(sizeof *result);
    memset(result, 0, sizeof *result);
    const dtrain_result launched = ranks_launch(&desc, train_main, &how, NULL);
    CHECK_MSG(launched == DTRAIN_OK, "%s", launched == DTRAIN_OK ? "" : dtrain_last_error());
    return *result;
}

static void check_same(const run *a, const run *b, int steps, const char *what)
{
    for (int i = 0; i < steps; i++)
        CHECK_MSG(a->losses[i] == b->losses[i], "%s: step %d: loss %.9g and %.9g", what, i,
                  a->losses[i], b->losses[i]);
    CHECK_MSG(a->hash == b->hash, "%s: parameters differ", what);
}

static void check_near(const run *a, const run *b, int steps, double tolerance, const char *what)
{
    for (int i = 0; i < steps; i++) {
        CHECK_MSG(test_close(a->losses[i], b->losses[i], tolerance),
                  "%s: step %d: loss %.9g and %.9g", what, i, a->losses[i], b->losses[i]);
        CHECK_MSG(test_close(a->norms[i], b->norms[i], 10 * tolerance),
                  "%s: step %d: norm %.9g and %.9g", what, i, a->norms[i], b->norms[i]);
    }
}

static run plain(void)
{
    run how;
    memset(&how, 0, sizeof how);
    how.clip = 1;
    how.accumulation = 1;
    return how;
}

/* One rank and several, on the GPU and on the CPU: the same training. */
static void test_as_on_the_cpu(void)
{
    for (uint32_t optimizer = DTRAIN_OPTIMIZER_ADAMW; optimizer <= DTRAIN_OPTIMIZER_SGD;
         optimizer++)
        for (int ranks = 1; ranks <= 3; ranks += 2) {
            run how = plain();
            how.optimizer = optimizer;
            how.accumulation = 2;
            how.dropout = 0.2f;
            how.evaluate = true;
            const run cpu = trained(how, ranks, DTRAIN_LAUNCH_PROCESSES, true);
            const run gpu = trained(how, ranks, DTRAIN_LAUNCH_PROCESSES, false);
            check_near(&cpu, &gpu, 6, 2e-4, "cpu and cuda");
            CHECK_CLOSE(gpu.val_loss, cpu.val_loss, 1e-3);
            CHECK(gpu.losses[5] < gpu.losses[0]);
        }
}

/* Neither buckets nor overlap nor the kind of rank changes a bit; 8 ranks share the device too. */
static void test_same_bits(void)
{
    run how = plain();
    const run first = trained(how, 3, DTRAIN_LAUNCH_PROCESSES, false);
    how.bucket_bytes = 4096;
    const run small = trained(how, 3, DTRAIN_LAUNCH_PROCESSES, false);
    how.no_overlap = true;
    const run late = trained(how, 3, DTRAIN_LAUNCH_THREADS, false);
    check_same(&first, &small, 6, "bucket size");
    check_same(&first, &late, 6, "overlap, threads");
    how.steps = 2;
    const run cpu = trained(how, 8, DTRAIN_LAUNCH_PROCESSES, true);
    const run gpu = trained(how, 8, DTRAIN_LAUNCH_PROCESSES, false);
    check_near(&cpu, &gpu, 2, 2e-4, "8 ranks");
}

#ifdef DTRAIN_CUDA_EMULATION
static void test_same_bits_in_any_order(void)
{
    for (uint32_t flags = 0; flags <= DTRAIN_TAPE_BF16; flags += DTRAIN_TAPE_BF16) {
        run how = plain(), runs[3];
        how.tape_flags = flags;
        how.steps = 3;
        for (int order = 0; order < 3; order++) {
            dtrain_emulation_set_order(order, 99);
            runs[order] = trained(how, 1, DTRAIN_LAUNCH_PROCESSES, false);
        }
        check_same(&runs[0], &runs[1], 3, "reverse");
        check_same(&runs[0], &runs[2], 3, "shuffled");
    }
}
#endif

/* A recorded step repeats what the eager one does, bit by bit, with other data, seeds, rates and
 * corrections every time; evaluation in between uses the same memory. */
static void test_graph_is_eager(void)
{
    for (int variant = 0; variant < 5; variant++) {
        run how = plain();
        how.steps = 10;
        how.dropout = variant == 1 ? 0.3f : 0;
        how.accumulation = variant == 2 ? 3 : 1;
        how.tape_flags = variant == 3 ? DTRAIN_TAPE_BF16 : 0;
        how.optimizer = variant == 2   ? DTRAIN_OPTIMIZER_SGD
                        : variant == 4 ? DTRAIN_OPTIMIZER_MUON
                                       : DTRAIN_OPTIMIZER_ADAMW;
        how.clip = variant == 2 ? 0.2f : 1;
        how.evaluate = variant == 1;
        const run eager = trained(how, 1, DTRAIN_LAUNCH_PROCESSES, false);
        how.graph = true;
        const run graph = trained(how, 1, DTRAIN_LAUNCH_PROCESSES, false);
        check_near(&eager, &graph, 10, 0, "graph");
        CHECK(graph.late_allocations == 0 && eager.late_allocations == 0);
        CHECK(graph.losses[9] < graph.losses[0]);
    }
}

/* The recorded loss and gradient divide by the number of targets that each step has; where it has
 * none, in steps 6 to 8 or with three micro-batches in 2 and 5, nothing changes. */
static void test_graph_notices_ignored_targets(void)
{
    for (uint32_t accumulation = 1; accumulation <= 3; accumulation += 2) {
        run how = plain();
        how.steps = 10;
        how.ignored = true;
        how.accumulation = accumulation;
        const run eager = trained(how, 1, DTRAIN_LAUNCH_PROCESSES, false);
        how.graph = true;
        const run graph = trained(how, 1, DTRAIN_LAUNCH_PROCESSES, false);
        check_near(&eager, &graph, 10, 0, "ignored targets");
        CHECK(eager.hash == graph.hash && eager.losses[accumulation == 1 ? 7 : 5] == 0);
    }
}

/* A loss of two means over other samples is recorded where their numbers stay, and refused in a step where they do not,
 * once more when the program goes on after the refusal. */
static void test_graph_adds_means(void)
{
    run how = plain();
    how.two = 1;
    for (how.accumulation = 1; how.accumulation <= 3; how.accumulation += 2) {
        const run cpu = trained(how, 1, DTRAIN_LAUNCH_PROCESSES, true);
        const run eager = trained(how, 1, DTRAIN_LAUNCH_PROCESSES, false);
        run recorded = how;
        recorded.graph = true;
        const run graph = trained(recorded, 1, DTRAIN_LAUNCH_PROCESSES, false);
        check_near(&cpu, &graph, 6, 1e-4, "two means, on the CPU and recorded");
        check_same(&eager, &graph, 6, "two means");
    }
    how.two = 2; /* steps 4 and 5 are refused */
    how.accumulation = 2;
    how.graph = true;
    (void)trained(how, 1, DTRAIN_LAUNCH_PROCESSES, false);
}

/* bf16 products on the GPU and on the CPU agree, and stay near fp32. */
static void test_autocast(void)
{
    run how = plain();
    const run full = trained(how, 2, DTRAIN_LAUNCH_PROCESSES, false);
    how.tape_flags = DTRAIN_TAPE_BF16;
    const run gpu = trained(how, 2, DTRAIN_LAUNCH_PROCESSES, false);
    const run cpu = trained(how, 2, DTRAIN_LAUNCH_PROCESSES, true);
    check_near(&cpu, &gpu, 6, 5e-3, "bf16, cpu and cuda");
    check_near(&full, &gpu, 6, 3e-2, "fp32 and bf16");
    CHECK(full.losses[3] != gpu.losses[3]);
}

/* ---- a host with arrays of its own ---- */

/* values and gradients in host memory (which 0), device memory (1), one each (2) */
static int arrays_main(dtrain_world *world, void *user)
{
    enum { N = 100, STEPS = 5 };
    const int which = *(const int *)user;
    dtrain_device *device = dtrain_world_device(world);
    const int ranks = dtrain_world_size(world), rank = dtrain_world_rank(world);
    float host[N], expected[N], *value = host, grad_host[N], *grad = grad_host;
    void *memory[2] = {NULL, NULL};
    dtrain_strategy *ddp;
    for (int i = 0; i < 2; i++) RANKS_TRY(device->ops->alloc(device, sizeof host, &memory[i]));
    if (which == 1) value = (float *)memory[0];
    if (which >= 1) grad = (float *)memory[1];
    for (int i = 0; i < N; i++) expected[i] = (float)i; /* rank 0's values reach everybody */
    for (int i = 0; i < N; i++) host[i] = (float)(i + rank);
    RANKS_TRY(dtrain_device_copy(device, value, host, sizeof host));
    dtrain_param p = ranks_param("x", value, grad, N, 0);
    RANKS_TRY(dtrain_strategy_create(world, &p, 1, NULL, &ddp));
    for (int step = 0; step < STEPS; step++) {
        float local[N];
        for (int i = 0; i < N; i++) local[i] = (float)(rank + step * i);
        RANKS_TRY(dtrain_device_copy(device, grad, local, sizeof local));
        RANKS_TRY(dtrain_strategy_ready(ddp, 0));
        RANKS_TRY(dtrain_strategy_finish(ddp));
        RANKS_TRY(dtrain_device_copy(device, local, grad, sizeof local));
        RANKS_TRY(dtrain_device_copy(device, host, value, sizeof host));
        bool same = true;
        for (int i = 0; i < N; i++) {
            const float mean = (float)(step * i) + (float)(ranks - 1) / 2;
            same = same && fabsf(local[i] - mean) < 1e-4f;
            host[i] -= local[i];
            expected[i] -= mean;
            same = same && fabsf(host[i] - expected[i]) < 1e-3f;
        }
        CHECK_MSG(same, "arrays %d, step %d", which, step);
        RANKS_TRY(dtrain_device_copy(device, value, host, sizeof host));
    }
    RANKS_TRY(dtrain_strategy_verify(ddp, NULL));
    dtrain_strategy_destroy(ddp);
    for (int i = 0; i < 2; i++) device->ops->free(device, memory[i], sizeof host);
    return 0;
}
/* Inputs are uploaded late, when nobody waits: arrays are filled again at once, passes follow each other without a
 * read between them, and each is larger than the one before. What the passes add up to is the gradient. */
static int inputs_main(dtrain_world *world, void *user)
{
    enum { IN = 60, OUT = 5, ROWS = 40 };
    static float x[ROWS * IN];
    static int32_t targets[ROWS];
    float *grad = (float *)user;
    dtrain_strategy *ddp;
    dtrain_tape *tape;
    dtrain_param p = ranks_param("w", NULL, NULL, OUT * IN, 0);
    p.shape[0] = OUT, p.shape[1] = IN;
    p.init = DTRAIN_INIT_NORMAL;
    p.init_scale = 0.1f;
    RANKS_TRY(dtrain_strategy_create(world, &p, 1, NULL, &ddp));
    RANKS_TRY(dtrain_tape_create(world, ddp, NULL, &tape));
    for (int pass = 0; pass < 8; pass++) {
        const int64_t rows = pass < 4 ? 10 * (pass + 1) : 10 * (8 - pass), shape[2] = {rows, IN};
        for (int64_t i = 0; i < rows * IN; i++) x[i] = (float)((i * 7 + pass * 13) % 11) - 5;
        for (int64_t i = 0; i < rows; i++) targets[i] = (int32_t)((i + pass) % OUT);
        RANKS_TRY(dtrain_strategy_accumulate(ddp, pass < 7));
        RANKS_TRY(dtrain_tape_begin(tape, 0, 0));
        dtrain_tensor *h = dtrain_tape_input(tape, DTRAIN_DTYPE_F32, 2, shape, x, false);
        dtrain_tensor *t = dtrain_tape_input(tape, DTRAIN_DTYPE_I32, 1, shape, targets, false);
        memset(x, 0x55, sizeof x);
        memset(targets, 0, sizeof targets);
        h = dtrain_linear(tape, h, &p, NULL, DTRAIN_ACTIVATION_NONE);
        RANKS_TRY(dtrain_tape_backward(tape, dtrain_cross_entropy(tape, h, t, 0, 0), 1));
        RANKS_TRY(dtrain_strategy_finish(ddp));
    }
    RANKS_TRY(
        dtrain_device_copy(dtrain_world_device(world), grad, p.grad, OUT * IN * sizeof *grad));
    dtrain_tape_destroy(tape);
    dtrain_strategy_destroy(ddp);
    return 0;
}
static void test_inputs_are_staged(void)
{
    static float cpu[300], cuda[300];
    dtrain_launch_desc desc = ranks_desc(1, DTRAIN_LAUNCH_THREADS);
    CHECK(ranks_launch(&desc, inputs_main, cpu, NULL) == DTRAIN_OK);
    cuda_run(1, DTRAIN_LAUNCH_THREADS, inputs_main, cuda);
    for (int i = 0; i < 300; i++) CHECK_CLOSE(cuda[i], cpu[i], 1e-4);
    CHECK(fabsf(cpu[7]) > 1e-3f);
}
static void test_host_arrays(void)
{
    for (int which = 0; which < 3; which++)
        cuda_run(2, DTRAIN_LAUNCH_PROCESSES, arrays_main, &which);
}

/* ---- what does not work ---- */

static int refused_main(dtrain_world *world, void *user)
{
    model m;
    dtrain_strategy *strategy;
    dtrain_optimizer *optimizer;
    dtrain_trainer *trainer;
    dtrain_trainer_desc desc;
    dtrain_optimizer_desc adamw = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_ADAMW);
    (void)user;
    memset(&m, 0, sizeof m);
    memset(&desc, 0, sizeof desc);
    declare(&m);
    RANKS_TRY(dtrain_strategy_create(world, m.params, PARAMS, NULL, &strategy));
    RANKS_TRY(dtrain_optimizer_create(world, strategy, &adamw, &optimizer));
    desc.strategy = strategy;
    desc.optimizer = optimizer;
    desc.loss = loss;
    desc.user = &m;
    desc.schedule.lr = 0.001f;
    desc.graph = true;
    CHECK(dtrain_trainer_create(world, &desc, &trainer) == DTRAIN_ERROR_UNSUPPORTED);
    CHECK(strstr(dtrain_last_error(), "next_batch") != NULL);
    desc.next_batch = next_batch;
    desc.optimizer = NULL;
    CHECK(dtrain_trainer_create(world, &desc, &trainer) == DTRAIN_ERROR_UNSUPPORTED);
    dtrain_optimizer_desc other = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_ADAMW);
    other.beta2 = 0.99f;
    adamw.groups = &other;
    adamw.group_count = 1;
    RANKS_TRY(dtrain_optimizer_create(world, strategy, &adamw, &desc.optimizer));
    CHECK(dtrain_trainer_create(world, &desc, &trainer) == DTRAIN_ERROR_UNSUPPORTED);
    CHECK(strstr(dtrain_last_error(), "same beta1 and beta2") != NULL);
    dtrain_optimizer_destroy(desc.optimizer);
    desc.optimizer = optimizer;
    if (dtrain_world_size(world) > 1) {
        CHECK(dtrain_trainer_create(world, &desc, &trainer) == DTRAIN_ERROR_UNSUPPORTED);
        CHECK(strstr(dtrain_last_error(), "nccl") != NULL);
    }
    desc.graph = false;
    desc.tape_flags = 8;
    CHECK(dtrain_trainer_create(world, &desc, &trainer) == DTRAIN_ERROR_ARGUMENT);
    desc.tape_flags = 0;
    RANKS_TRY(dtrain_trainer_create(world, &desc, &trainer));
    next_batch(&m);
    m.tokens[3] = V; /* the device learns of it late, and says it all the same */
    desc.next_batch = NULL;
    dtrain_trainer_destroy(trainer);
    RANKS_TRY(dtrain_trainer_create(world, &desc, &trainer));
    CHECK(dtrain_trainer_step(trainer, NULL) != DTRAIN_OK);
    CHECK_MSG(dtrain_world_size(world) > 1 ||
                  strstr(dtrain_last_error(), "token 32 at row 3") != NULL,
              "%s", dtrain_last_error());
    dtrain_trainer_destroy(trainer);
    dtrain_optimizer_destroy(optimizer);
    dtrain_strategy_destroy(strategy);
    return 0;
}
static void test_refused(void)
{
    cuda_run(1, DTRAIN_LAUNCH_PROCESSES, refused_main, NULL);
    cuda_run(2, DTRAIN_LAUNCH_PROCESSES, refused_main, NULL);
}

/* x times itself: both gradients go to one place, one after the other. */
static int square_main(dtrain_world *world, void *user)
{
    enum { N = 1027 };
    const int64_t count = N;
    float values[N], targets[N], grad[N];
    dtrain_tape *tape;
    (void)user;
    for (uint64_t i = 0; i < N; i++) {
        values[i] = dtrain_random_normal(1, 0, i);
        targets[i] = dtrain_random_normal(1, 1, i);
    }
    RANKS_TRY(dtrain_tape_create(world, NULL, NULL, &tape));
    for (int round = 0; round < 2; round++) {
        RANKS_TRY(dtrain_tape_begin(tape, 0, 0));
        dtrain_tensor *x = dtrain_tape_input(tape, DTRAIN_DTYPE_F32, 1, &count, values, true);
        dtrain_tensor *target =
            dtrain_tape_input(tape, DTRAIN_DTYPE_F32, 1, &count, targets, false);
        dtrain_tensor *square = round ? dtrain_multiply(tape, x, x) : dtrain_swiglu(tape, x, x);
        RANKS_TRY(dtrain_tape_backward(tape, dtrain_mse_loss(tape, square, target), N));
        RANKS_TRY(dtrain_device_copy(dtrain_world_device(world), grad, x->grad, sizeof grad));
        for (int i = 0; i < N; i++) {
            const double v = (double)values[i], s = 1 / (1 + exp(-v));
            const double y = round ? v * v : v * v * s;
            const double slope = round ? 2 * v : 2 * v * s + v * v * s * (1 - s);
            if (!CHECK_CLOSE(grad[i], 2 * (y - (double)targets[i]) * slope, 1e-6)) break;
        }
    }
    dtrain_tape_destroy(tape);
    return 0;
}
static void test_square(void) { cuda_run(1, DTRAIN_LAUNCH_PROCESSES, square_main, NULL); }

static void test_names(void)
{
    const dtrain_device_ops *ops;
    CHECK(dtrain_device_ops_by_name("cuda", &ops) == DTRAIN_OK && ops == dtrain_cuda_device_ops());
    CHECK(dtrain_device_ops_by_name("cpu", &ops) == DTRAIN_OK && ops == device_table("cpu"));
    CHECK(dtrain_device_ops_by_name("tpu", &ops) == DTRAIN_ERROR_ARGUMENT && !ops);
    dtrain_launch_desc desc = ranks_desc(1, DTRAIN_LAUNCH_PROCESSES);
    desc.options.math = DTRAIN_MATH_TF32;
    CHECK(dtrain_launch(&desc, arrays_main, NULL, NULL) != DTRAIN_OK);
    CHECK(strstr(dtrain_last_error(), "tensor cores") != NULL);
}

#ifdef DTRAIN_CUDA_EMULATION
/* Rank 1's device is lost in the middle of a step: it says so, rank 0 names it, nobody hangs. */
static int lost_main(dtrain_world *world, void *user)
{
    const run *how = (const run *)user;
    const bool victim = dtrain_world_rank(world) == how->steps - 1;
    dtrain_emulation_counters before, after;
    dtrain_emulation_get_counters(&before);
    if (victim) dtrain_emulation_inject((dtrain_emulation_fault)how->optimizer, how->accumulation);
    model m;
    dtrain_strategy *strategy = NULL;
    dtrain_optimizer *optimizer = NULL;
    dtrain_trainer *trainer = NULL;
    dtrain_trainer_desc desc;
    dtrain_optimizer_desc adamw = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_ADAMW);
    memset(&m, 0, sizeof m);
    memset(&desc, 0, sizeof desc);
    declare(&m);
    dtrain_result found = dtrain_strategy_create(world, m.params, PARAMS, NULL, &strategy);
    if (found == DTRAIN_OK) found = dtrain_optimizer_create(world, strategy, &adamw, &optimizer);
    desc.strategy = strategy;
    desc.optimizer = optimizer;
    desc.next_batch = next_batch;
    desc.loss = loss;
    desc.user = &m;
    desc.schedule.lr = 0.001f;
    if (found == DTRAIN_OK) found = dtrain_trainer_create(world, &desc, &trainer);
    for (int step = 0; step < 3 && found == DTRAIN_OK; step++)
        found = dtrain_trainer_step(trainer, NULL);
    dtrain_emulation_get_counters(&after);
    const int64_t done = how->optimizer == DTRAIN_EMULATION_LOSE_DEVICE
                             ? after.kernels - before.kernels
                             : after.allocations - before.allocations;
    if (victim && done + 1 < (int64_t)how->accumulation)
        CHECK(found == DTRAIN_OK); /* not reached */
    if (victim && done > (int64_t)how->accumulation) CHECK(found != DTRAIN_OK);
    if (found != DTRAIN_OK) CHECK(strlen(dtrain_last_error()) > 20);
    if (victim) result->steps = found != DTRAIN_OK;
    dtrain_trainer_destroy(trainer);
    dtrain_optimizer_destroy(optimizer);
    dtrain_strategy_destroy(strategy);
    return found != DTRAIN_OK;
}

/* The fault strikes at the nth kernel or allocation; every n ends the same way. */
static void test_device_failures(void)
{
    int failures = 0;
    result = (run *)ranks_shared(sizeof *result);
    for (int ranks = 1; ranks <= 2; ranks++)
        for (uint32_t n = 1; n < 60; n += n < 8 ? 1 : 11)
            for (int fault = 0; fault < 2; fault++) {
                if (!test_full() && (n + (uint32_t)fault + (uint32_t)ranks) % 2) continue;
                run how = plain();
                dtrain_launch_desc desc = cuda_desc(ranks, DTRAIN_LAUNCH_PROCESSES);
                dtrain_emulation_set_quiet(1);
                how.steps = ranks;
                how.accumulation = n;
                how.optimizer =
                    fault ? DTRAIN_EMULATION_FAIL_ALLOCATION : DTRAIN_EMULATION_LOSE_DEVICE;
                const dtrain_result ended = ranks_launch(&desc, lost_main, &how, NULL);
                CHECK_MSG(ended == (result->steps ? DTRAIN_ERROR_RANK_FAILED : DTRAIN_OK),
                          "%d ranks, fault %d at %u: %s", ranks, fault, n,
                          dtrain_result_text(ended));
                failures += result->steps;
            }
    CHECK_MSG(failures >= (test_full() ? 40 : 20), "only %d of the faults were reached", failures);
}

static int nothing_main(dtrain_world *world, void *user)
{
    (void)world, (void)user;
    return 0;
}

/* No driver, no GPU, a GPU too old: a sentence each, from every rank. */
static void test_no_device(void)
{
    static const struct {
        dtrain_emulation_fault fault;
        int devices;
        const char *says;
    } list[] = {{DTRAIN_EMULATION_NO_DRIVER, 1, "driver"},
                {DTRAIN_EMULATION_FAULT_COUNT, 0, "GPU"},
                {DTRAIN_EMULATION_NO_KERNEL_IMAGE, 1, "sm_"}};
    for (size_t i = 0; i < 3; i++) {
        dtrain_launch_desc desc = cuda_desc(2, DTRAIN_LAUNCH_PROCESSES);
        dtrain_emulation_reset();
        dtrain_emulation_set_quiet(1);
        dtrain_emulation_set_device_count(list[i].devices);
        if (list[i].fault != DTRAIN_EMULATION_FAULT_COUNT)
            dtrain_emulation_inject(list[i].fault, 1);
        CHECK(ranks_launch(&desc, nothing_main, NULL, NULL) == DTRAIN_ERROR_RANK_FAILED);
        CHECK_MSG(strstr(dtrain_last_error(), list[i].says) != NULL, "%s", dtrain_last_error());
    }
    dtrain_emulation_reset();
}

/* Ranks with a device each, and no NCCL: through host memory as well, and the log says why. */
static void test_several_devices(void)
{
    dtrain_emulation_set_device_count(3);
    cuda_run(3, DTRAIN_LAUNCH_PROCESSES, collectives_main, NULL);
    dtrain_emulation_set_device_count(1);
}
#endif

static bool device_is_there(void)
{
    dtrain_device *device = NULL;
    const bool there = dtrain_device_create(dtrain_cuda_device_ops(), NULL, &device) == DTRAIN_OK;
    dtrain_device_destroy(device);
    return there;
}

/* The driver must not be touched before ranks are forked: the probe is a process of its own. */
static void probe(void) { CHECK_MSG(device_is_there(), "%s", dtrain_last_error()); }

/* What a race detector can look at: ranks that are threads of one process. */
static void test_threads(void)
{
    run how = plain();
    cuda_run(3, DTRAIN_LAUNCH_THREADS, async_main, NULL);
    how.steps = 3;
    trained(how, 2, DTRAIN_LAUNCH_THREADS, false);
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    RUN(probe);
    if (test_failed) return test_summary();
    RUN(test_threads);
    if (UNDER_TSAN) return test_summary(); /* it takes ten seconds to start a process */
    RUN(test_collectives);
    RUN(test_async);
    RUN(test_exchange);
    RUN(test_pairs_and_groups);
    RUN(test_split_without_stream);
    RUN(test_as_on_the_cpu);
    RUN(test_same_bits);
    RUN(test_graph_is_eager);
    RUN(test_graph_notices_ignored_targets);
    RUN(test_graph_adds_means);
    RUN(test_autocast);
    RUN(test_inputs_are_staged);
    RUN(test_host_arrays);
    RUN(test_refused);
    RUN(test_square);
    RUN(test_names);
#ifdef DTRAIN_CUDA_EMULATION
    RUN(test_same_bits_in_any_order);
    RUN(test_device_failures);
    RUN(test_no_device);
    RUN(test_several_devices);
#endif
    return test_summary();
}
