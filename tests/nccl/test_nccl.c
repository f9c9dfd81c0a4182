/* test_nccl.c: dtrain_nccl.h over the mock of NCCL and a device whose streams run late (tests/nccl/mock/).
 * Ranks are processes. Expected values are naive loops over every rank's input, which is a function of
 * (rank, index); all values are small integers, so sums are exact in every data type.
 *
 * Built once for each NCCL_MOCK_VERSION that has a gate: tests/long/test_nccl.sh. */
#include "test.h"
#include "dtrain.h"
#define DTRAIN_NCCL_LINKED
#define DTRAIN_NCCL_IMPLEMENTATION
#include "dtrain_nccl.h"

#include "host.h"
#include "ranks.h"
#include "nccl/mock/nccl_mock.c"
#include "nccl/mock/late_device.h"
#include "line.h"

#include <sched.h>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/lsan_interface.h>
#endif

enum { MOST = 8 };

static const dtrain_dtype dtypes[] = {DTRAIN_DTYPE_F32, DTRAIN_DTYPE_BF16, DTRAIN_DTYPE_F16,
                                      DTRAIN_DTYPE_I32, DTRAIN_DTYPE_I64,  DTRAIN_DTYPE_F64};
static const dtrain_reduce_op ops[] = {DTRAIN_REDUCE_SUM, DTRAIN_REDUCE_MEAN, DTRAIN_REDUCE_MIN,
                                       DTRAIN_REDUCE_MAX, DTRAIN_REDUCE_PROD};

/* ---- launching ---- */

/* What the device's end finds is checked when everything of the rank is gone. */
static bool expect_leftovers;
static int host_comms; /* the host's own communicators */
static void checked_destroy(dtrain_device *device)
{
    CHECK(!device->while_waiting && !device->waiting_user);
    late_destroy(device);
    if (expect_leftovers) return;
    CHECK_MSG(late_count.misuses == 0, "the device was misused %d times", late_count.misuses);
    CHECK_MSG(nccl_mock_count.misuses == 0, "NCCL was misused %d times", nccl_mock_count.misuses);
    CHECK_MSG(nccl_mock_count.comms == host_comms, "%d NCCL communicators are left",
              nccl_mock_count.comms);
    CHECK_MSG(nccl_mock_count.registrations == 0, "%d registrations are left",
              nccl_mock_count.registrations);
    CHECK_MSG(nccl_mock_count.allocations == 0, "%d allocations of NCCL are left",
              nccl_mock_count.allocations);
#ifdef __SANITIZE_ADDRESS__
    CHECK(__lsan_do_recoverable_leak_check() ==
          0); /* ranks end by _exit, where nobody else looks */
#endif
}

/* The mock's controls are set for some ranks before their worlds are made: in the device's create. */
static nccl_mock_controls rank_controls[MOST];
static dtrain_result checked_create(const dtrain_device_desc *desc, dtrain_device *device)
{
    if (desc->device_index != DTRAIN_DEVICE_CURRENT)
        nccl_mock = rank_controls[desc->device_index % MOST];
    return late_create(desc, device);
}

static const dtrain_device_ops *test_ops(void)
{
    static dtrain_device_ops table;
    table = *late_device_ops();
    table.create = checked_create;
    table.destroy = checked_destroy;
    return &table;
}

static void quiet(void *user, dtrain_log_level level, int rank, const char *text)
{
    (void)user;
    (void)level;
    (void)rank;
    (void)text;
}

static dtrain_launch_desc nccl_desc(int ranks, uint32_t timeout_ms)
{
    dtrain_launch_desc desc = ranks_desc(ranks, DTRAIN_LAUNCH_PROCESSES);
    desc.timeout_ms = timeout_ms;
    desc.grace_ms = 20000; /* ranks must end by themselves */
    desc.device_ops = test_ops();
    desc.comm_ops = dtrain_nccl_comm_ops();
    setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", 0);
    desc.options.log = quiet;
    return desc;
}

static void nccl_run(int ranks, dtrain_rank_fn rank_main, void *user)
{
    dtrain_launch_desc desc = nccl_desc(ranks, 20000);
    const dtrain_result result = ranks_launch(&desc, rank_main, user, NULL);
    CHECK_MSG(result == DTRAIN_OK, "%d ranks: %s: %s", ranks, dtrain_result_text(result),
              result == DTRAIN_OK ? "" : dtrain_last_error());
}

/* ---- values ---- */

static int value_of(int rank, size_t i) { return (int)((i * 7 + (size_t)rank * 5) % 5) - 2; }

static void put(void *to, size_t i, dtrain_dtype dtype, double value)
{
    switch (dtype) {
    case DTRAIN_DTYPE_F32: ((float *)to)[i] = (float)value; break;
    case DTRAIN_DTYPE_BF16:
        ((uint16_t *)to)[i] = dtrain_half_from_f32(DTRAIN_DTYPE_BF16, (float)value);
        break;
    case DTRAIN_DTYPE_F16:
        ((uint16_t *)to)[i] = dtrain_half_from_f32(DTRAIN_DTYPE_F16, (float)value);
        break;
    case DTRAIN_DTYPE_I32: ((int32_t *)to)[i] = (int32_t)value; break;
    case DTRAIN_DTYPE_F64: ((double *)to)[i] = value; break;
    default: ((int64_t *)to)[i] = (int64_t)value; break;
    }
}

static double get(const void *from, size_t i, dtrain_dtype dtype)
{
    switch (dtype) {
    case DTRAIN_DTYPE_F32: return ((const float *)from)[i];
    case DTRAIN_DTYPE_BF16:
        return dtrain_half_to_f32(DTRAIN_DTYPE_BF16, ((const uint16_t *)from)[i]);
    case DTRAIN_DTYPE_F16: return dtrain_half_to_f32(DTRAIN_DTYPE_F16, ((const uint16_t *)from)[i]);
    case DTRAIN_DTYPE_I32: return ((const int32_t *)from)[i];
    case DTRAIN_DTYPE_F64: return ((const double *)from)[i];
    default: return (double)((const int64_t *)from)[i];
    }
}

/* What a reduction of element i over `size` ranks gives, rounded as the type rounds. */
static double reduced(int size, size_t i, dtrain_dtype dtype, dtrain_reduce_op op)
{
    char rounded[8];
    double result = value_of(0, i);
    for (int r = 1; r < size; r++) {
        const double x = value_of(r, i);
        if (op == DTRAIN_REDUCE_SUM || op == DTRAIN_REDUCE_MEAN) result += x;
        else if (op == DTRAIN_REDUCE_PROD) result *= x;
        else if (op == DTRAIN_REDUCE_MIN) result = x < result ? x : result;
        else result = x > result ? x : result;
    }
    if (op != DTRAIN_REDUCE_MEAN) return result;
    if (dtype == DTRAIN_DTYPE_F64) return result * (1.0 / size);
    put(rounded, 0, dtype, (float)result * (1.0f / (float)size));
    return get(rounded, 0, dtype);
}

/* ---- buffers: of the device, of the communicator, of the host ---- */

typedef enum { ON_DEVICE, IN_COMM, ON_HOST, PLACES } place_id;

typedef struct buffer {
    dtrain_comm *comm;
    place_id place;
    size_t bytes;
    void *memory;
} buffer;

static dtrain_device *device_of(dtrain_comm *comm) { return dtrain_world_device(comm->world); }

static buffer buffer_make(dtrain_comm *comm, place_id place, size_t bytes)
{
    buffer b = {comm, place, bytes ? bytes : 8, NULL};
    dtrain_device *device = device_of(comm);
    dtrain_result result = DTRAIN_OK;
    if (place == ON_HOST) b.memory = calloc(1, b.bytes);
    else if (place == IN_COMM) result = dtrain_comm_alloc(comm, b.bytes, &b.memory);
    else result = device->ops->alloc(device, b.bytes, &b.memory);
    CHECK_MSG(result == DTRAIN_OK && b.memory, "no buffer: %s", dtrain_last_error());
    return b;
}

static void buffer_free(buffer *b)
{
    dtrain_device *device = device_of(b->comm);
    if (b->place == ON_HOST) free(b->memory);
    else if (b->place == IN_COMM) dtrain_comm_free(b->comm, b->memory, b->bytes);
    else device->ops->free(device, b->memory, b->bytes);
}

static void buffer_write(buffer *b, const void *from, size_t bytes)
{
    dtrain_device *device = device_of(b->comm);
    if (b->place == ON_HOST) memcpy(b->memory, from, bytes);
    else
        CHECK(device->ops->copy(device, b->memory, from, bytes, DTRAIN_COPY_HOST_TO_DEVICE) ==
              DTRAIN_OK);
}

/* Host memory is read as it is: the wait must have filled it. The device is asked in stream order. */
static void buffer_read(buffer *b, void *to, size_t bytes)
{
    dtrain_device *device = device_of(b->comm);
    if (b->place == ON_HOST) memcpy(to, b->memory, bytes);
    else
        CHECK(device->ops->copy(device, to, b->memory, bytes, DTRAIN_COPY_DEVICE_TO_HOST) ==
              DTRAIN_OK);
}

/* ---- one collective against the loops ---- */

typedef struct one_case {
    uint32_t kind;
    dtrain_dtype dtype;
    dtrain_reduce_op op;
    int root;
    size_t count;
    place_id send_place, recv_place;
    bool in_place, blocking;
} one_case;

enum { LONGEST = 2048 };

static dtrain_result start_case(dtrain_comm *comm, const one_case *c, const void *send, void *recv,
                                dtrain_work **work)
{
    switch (c->kind) {
    case DTRAIN_COLLECTIVE_ALL_REDUCE:
        return dtrain_all_reduce(comm, send, recv, c->count, c->dtype, c->op, work);
    case DTRAIN_COLLECTIVE_REDUCE_SCATTER:
        return dtrain_reduce_scatter(comm, send, recv, c->count, c->dtype, c->op, work);
    case DTRAIN_COLLECTIVE_ALL_GATHER:
        return dtrain_all_gather(comm, send, recv, c->count, c->dtype, work);
    case DTRAIN_COLLECTIVE_ALL_TO_ALL:
        return dtrain_all_to_all(comm, send, recv, c->count, c->dtype, work);
    case DTRAIN_COLLECTIVE_BROADCAST:
        return dtrain_broadcast(comm, recv, c->count, c->dtype, c->root, work);
    default: return dtrain_reduce(comm, send, recv, c->count, c->dtype, c->op, c->root, work);
    }
}

static double expected_of(const one_case *c, int rank, int size, size_t i)
{
    switch (c->kind) {
    case DTRAIN_COLLECTIVE_ALL_GATHER: return value_of((int)(i / c->count), i % c->count);
    case DTRAIN_COLLECTIVE_ALL_TO_ALL:
        return value_of((int)(i / c->count), (size_t)rank * c->count + i % c->count);
    case DTRAIN_COLLECTIVE_BROADCAST: return value_of(c->root, i);
    case DTRAIN_COLLECTIVE_REDUCE_SCATTER:
        return reduced(size, (size_t)rank * c->count + i, c->dtype, c->op);
    default: return reduced(size, i, c->dtype, c->op);
    }
}

static void run_case(dtrain_comm *comm, const one_case *c)
{
    static char host[LONGEST * 8 * MOST];
    const int rank = dtrain_comm_rank(comm), size = dtrain_comm_size(comm);
    const size_t unit = dtrain_dtype_bytes(c->dtype);
    const size_t all = c->count * (size_t)size;
    const bool exchanges = c->kind == DTRAIN_COLLECTIVE_ALL_TO_ALL;
    const size_t send_count =
        c->kind == DTRAIN_COLLECTIVE_REDUCE_SCATTER || exchanges ? all : c->count;
    const size_t recv_count = c->kind == DTRAIN_COLLECTIVE_ALL_GATHER || exchanges ? all : c->count;
    const size_t slice = (size_t)rank * c->count * unit;
    const bool shared = c->in_place || c->kind == DTRAIN_COLLECTIVE_BROADCAST;
    const size_t most = send_count > recv_count ? send_count : recv_count;
    buffer recv = buffer_make(comm, c->recv_place, (shared ? most : recv_count) * unit);
    buffer send = shared ? recv : buffer_make(comm, c->send_place, send_count * unit);
    char *from = (char *)send.memory, *to = (char *)recv.memory;
    dtrain_work *work = NULL;
    size_t wrong = 0;
    if (shared && c->kind == DTRAIN_COLLECTIVE_ALL_GATHER) from += slice;
    if (shared && c->kind == DTRAIN_COLLECTIVE_REDUCE_SCATTER) to += slice;
    for (size_t i = 0; i < send_count; i++) put(host, i, c->dtype, value_of(rank, i));
    if (c->kind != DTRAIN_COLLECTIVE_BROADCAST || rank == c->root) {
        buffer part = send;
        part.memory = from;
        buffer_write(&part, host, send_count * unit);
    }
    dtrain_result result = start_case(comm, c, from, to, c->blocking ? NULL : &work);
    if (result == DTRAIN_OK) result = dtrain_work_wait(work);
    CHECK_MSG(result == DTRAIN_OK, "kind %u: %s", c->kind, dtrain_last_error());
    if (c->kind != DTRAIN_COLLECTIVE_REDUCE || rank == c->root) {
        buffer part = recv;
        part.memory = to;
        memset(host, 0x55, recv_count * unit);
        buffer_read(&part, host, recv_count * unit);
        for (size_t i = 0; i < recv_count; i++)
            wrong += get(host, i, c->dtype) != expected_of(c, rank, size, i);
    }
    CHECK_MSG(wrong == 0,
              "kind %u %s op %d count %zu root %d places %d %d in place %d: %zu elements are wrong",
              c->kind, dtrain_dtype_name(c->dtype), (int)c->op, c->count, c->root,
              (int)c->send_place, (int)c->recv_place, c->in_place, wrong);
    CHECK(device_of(comm)->ops->synchronize(device_of(comm)) ==
          DTRAIN_OK); /* a rank that only sends has not read */
    if (!shared) buffer_free(&send);
    buffer_free(&recv);
}

/* Every kind, type and operation at every place (step 1), at one place each (step 0), or only each step-th of them
 * all. Counts walk through a list. */
static void run_all_cases(dtrain_comm *comm, int step)
{
    static const size_t counts[] = {1, 7, 64, 1000};
    static const uint32_t kinds[] = {DTRAIN_COLLECTIVE_ALL_REDUCE, DTRAIN_COLLECTIVE_REDUCE_SCATTER,
                                     DTRAIN_COLLECTIVE_ALL_GATHER, DTRAIN_COLLECTIVE_BROADCAST,
                                     DTRAIN_COLLECTIVE_REDUCE,     DTRAIN_COLLECTIVE_ALL_TO_ALL};
    int at = 0;
    for (size_t k = 0; k < 6; k++)
        for (size_t t = 0; t < 6; t++)
            for (size_t o = 0; o < 5; o++)
                for (int place = 0; place < PLACES * 2; place++) {
                    one_case c;
                    const bool integer =
                        dtypes[t] == DTRAIN_DTYPE_I32 || dtypes[t] == DTRAIN_DTYPE_I64;
                    const bool exchanges = kinds[k] == DTRAIN_COLLECTIVE_ALL_TO_ALL;
                    const bool reduces = kinds[k] != DTRAIN_COLLECTIVE_ALL_GATHER &&
                                         kinds[k] != DTRAIN_COLLECTIVE_BROADCAST && !exchanges;
                    if ((ops[o] == DTRAIN_REDUCE_MEAN && integer) || (!reduces && o)) continue;
                    at++;
                    if (step ? at % step : (size_t)place != (k + t + o) % (PLACES * 2)) continue;
                    c.kind = kinds[k];
                    c.dtype = dtypes[t];
                    c.op = ops[o];
                    c.root = at % dtrain_comm_size(comm);
                    c.count = counts[at % 4];
                    c.in_place = place >= PLACES && !exchanges;
                    c.recv_place = (place_id)(place % PLACES);
                    c.send_place = c.in_place ? c.recv_place : (place_id)(at % PLACES);
                    c.blocking = at % 3 == 0;
                    run_case(comm, &c);
                }
}

static int rank_collectives(dtrain_world *world, void *user)
{
    run_all_cases(dtrain_world_comm(world), *(int *)user);
    return 0;
}

static void test_collectives(void)
{
    static const int sizes[] = {1, 2, 3, 4, 8};
    for (size_t i = 0; i < 5; i++) {
        int step = sizes[i] == 2 || sizes[i] == 3 || test_full();
        nccl_run(sizes[i], rank_collectives, &step);
    }
}

/* NCCL that needs a while for every call and every operation. */
static void test_slow_calls(void)
{
    int step = 5;
    for (int r = 0; r < MOST; r++) {
        rank_controls[r].progress_polls = 1 + r % 3;
        rank_controls[r].delay_steps = 1 + r % 4;
    }
    nccl_run(3, rank_collectives, &step);
}

/* ---- order ---- */

static dtrain_result scale(dtrain_device *device, float *memory, size_t count, float factor)
{
    dtrain_axpby_args args;
    memset(&args, 0, sizeof args);
    args.count = (int64_t)count;
    args.a = factor;
    args.x = memory;
    args.y = memory;
    args.dtype = DTRAIN_DTYPE_F32;
    return device->ops->axpby(device, &args);
}

/* kernel -> collective -> kernel, the host never waiting in between; then many at once, waited for backwards. */
static int rank_order(dtrain_world *world, void *user)
{
    enum { COUNT = 500, MANY = 150 };
    dtrain_comm *comm = dtrain_world_comm(world);
    dtrain_device *device = dtrain_world_device(world);
    const float size = (float)dtrain_world_size(world);
    float host[COUNT];
    dtrain_work *works[MANY];
    buffer b = buffer_make(comm, IN_COMM, sizeof host), many[MANY];
    (void)user;
    for (int i = 0; i < COUNT; i++) host[i] = 1;
    buffer_write(&b, host, sizeof host);
    for (int turn = 0; turn < 3; turn++) {
        RANKS_TRY(scale(device, (float *)b.memory, COUNT, 3));
        RANKS_TRY(dtrain_all_reduce(comm, b.memory, b.memory, COUNT, DTRAIN_DTYPE_F32,
                                    DTRAIN_REDUCE_MEAN, &works[0]));
        RANKS_TRY(dtrain_work_wait(works[0]));
        RANKS_TRY(scale(device, (float *)b.memory, COUNT, 0.5f));
    }
    buffer_read(&b, host, sizeof host);
    CHECK_CLOSE(host[0], 3.375, 0);
    CHECK_CLOSE(host[COUNT - 1], 3.375, 0);
    for (int i = 0; i < MANY; i++) {
        host[0] = (float)i;
        many[i] = buffer_make(comm, ON_DEVICE, sizeof host[0]);
        buffer_write(&many[i], host, sizeof host[0]);
    }
    for (int i = 0; i < MANY; i++)
        RANKS_TRY(dtrain_all_reduce(comm, many[i].memory, many[i].memory, 1, DTRAIN_DTYPE_F32,
                                    DTRAIN_REDUCE_SUM, &works[i]));
    CHECK(comm->in_flight == MANY && comm->outstanding == MANY);
    for (int i = MANY; i-- > 0;) RANKS_TRY(dtrain_work_wait(works[i]));
    CHECK(comm->in_flight == 0 && comm->outstanding == 0);
    for (int i = 0; i < MANY; i++) {
        buffer_read(&many[i], host, sizeof host[0]);
        CHECK_CLOSE(host[0], (float)i * size, 0);
        buffer_free(&many[i]);
    }
    buffer_free(&b);
    return 0;
}
static void test_order(void)
{
    nccl_run(1, rank_order,
             NULL); /* at once: before the compute stream, unless told to wait for it */
    nccl_run(2, rank_order, NULL);
    for (int r = 0; r < MOST; r++)
        rank_controls[r].delay_steps = 3; /* late: after it, unless that waits */
    nccl_run(2, rank_order, NULL);
}

/* test becomes true without a wait; barriers and empty operations meet all ranks. */
static int rank_test_and_barrier(dtrain_world *world, void *user)
{
    int *arrived = (int *)user;
    dtrain_comm *comm = dtrain_world_comm(world);
    const int rank = dtrain_world_rank(world), size = dtrain_world_size(world);
    buffer b = buffer_make(comm, ON_DEVICE, 4);
    dtrain_work *work;
    bool done = false;
    float one = 1;
    for (int turn = 1; turn <= 3; turn++) {
        ranks_sleep_us(rank * 20000);
        __atomic_add_fetch(arrived, 1, __ATOMIC_SEQ_CST);
        if (turn == 1) RANKS_TRY(dtrain_barrier(comm));
        if (turn == 2)
            RANKS_TRY(
                dtrain_all_reduce(comm, NULL, NULL, 0, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_MEAN, NULL));
        if (turn == 3) RANKS_TRY(dtrain_broadcast(comm, NULL, 0, DTRAIN_DTYPE_F16, size - 1, NULL));
        CHECK_MSG(__atomic_load_n(arrived, __ATOMIC_SEQ_CST) >= turn * size,
                  "rank %d went ahead in turn %d", rank, turn);
    }
    buffer_write(&b, &one, sizeof one);
    RANKS_TRY(
        dtrain_all_reduce(comm, b.memory, b.memory, 1, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, &work));
    for (double end = test_seconds() + RANKS_SOON; !done && test_seconds() < end;)
        RANKS_TRY(dtrain_work_test(work, &done));
    CHECK(done && comm->in_flight == 0 && comm->outstanding == 1);
    RANKS_TRY(dtrain_work_wait(work));
    buffer_read(&b, &one, sizeof one);
    CHECK_CLOSE(one, size, 0);
    buffer_free(&b);
    return 0;
}
static void test_test_and_barrier(void)
{
    int *arrived = (int *)ranks_shared(sizeof *arrived);
    nccl_run(4, rank_test_and_barrier, arrived);
}

/* ---- point to point ---- */

/* Everybody sends before it receives: only a group can do that. */
static int rank_exchange(dtrain_world *world, void *user)
{
    enum { MESSAGES = 40, COUNT = 300 };
    dtrain_comm *comm = dtrain_world_comm(world);
    const int rank = dtrain_world_rank(world), size = dtrain_world_size(world);
    const int next = (rank + 1) % size, last = (rank + size - 1) % size;
    float host[COUNT];
    dtrain_work *sent[MESSAGES], *got[MESSAGES];
    buffer out[MESSAGES], in[MESSAGES];
    (void)user;
    for (int m = 0; m < MESSAGES; m++) {
        const size_t count = (size_t)(m * 7 % COUNT); /* the first has no data */
        out[m] = buffer_make(comm, m % 3 == 1 ? ON_HOST : ON_DEVICE, sizeof host);
        in[m] = buffer_make(comm, m % 5 == 1 ? ON_HOST : ON_DEVICE, sizeof host);
        for (size_t i = 0; i < COUNT; i++) host[i] = (float)(rank * 1000 + m) + (float)i / 512;
        buffer_write(&out[m], host, sizeof host);
        RANKS_TRY(dtrain_send(comm, out[m].memory, count, DTRAIN_DTYPE_F32, next, &sent[m]));
        RANKS_TRY(dtrain_recv(comm, in[m].memory, count, DTRAIN_DTYPE_F32, last, &got[m]));
    }
    RANKS_TRY(dtrain_barrier(comm));
    for (int m = 0; m < MESSAGES; m++) {
        const size_t count = (size_t)(m * 7 % COUNT);
        size_t wrong = 0;
        RANKS_TRY(dtrain_work_wait(sent[m]));
        RANKS_TRY(dtrain_work_wait(got[m]));
        buffer_read(&in[m], host, sizeof host);
        for (size_t i = 0; i < count; i++)
            wrong += host[i] != (float)(last * 1000 + m) + (float)i / 512;
        CHECK_MSG(wrong == 0, "message %d: %zu elements are wrong", m, wrong);
        buffer_free(&out[m]);
        buffer_free(&in[m]);
    }
    CHECK_MSG(nccl_mock_count.groups == 2, "%d launches, expected one group and a barrier",
              nccl_mock_count.groups);
    return 0;
}

/* A chain of blocking calls, as a pipeline makes them. */
static int rank_chain(dtrain_world *world, void *user)
{
    dtrain_comm *comm = dtrain_world_comm(world);
    const int rank = dtrain_world_rank(world), size = dtrain_world_size(world);
    int32_t token = 0;
    (void)user;
    if (rank > 0) RANKS_TRY(dtrain_recv(comm, &token, 1, DTRAIN_DTYPE_I32, rank - 1, NULL));
    CHECK(token == rank);
    token++;
    if (rank + 1 < size) RANKS_TRY(dtrain_send(comm, &token, 1, DTRAIN_DTYPE_I32, rank + 1, NULL));
    return 0;
}

/* Exchanges of random numbers of messages between all pairs of ranks, which each rank starts in an order of its own
 * and waits for in another one. */
static int rank_random_exchange(dtrain_world *world, void *user)
{
    enum { PAIR = 4, ALL = 2 * MOST * PAIR };
    dtrain_comm *comm = dtrain_world_comm(world);
    const int rank = dtrain_world_rank(world), size = dtrain_world_size(world);
    const uint64_t seed = *(const uint64_t *)user;
    uint64_t own = seed * 100 + (uint64_t)rank;
    buffer memory = buffer_make(comm, ON_DEVICE, 2 * MOST * PAIR * sizeof(float));
    float *sent = (float *)memory.memory, *got = sent + MOST * PAIR, host[2 * MOST * PAIR];
    dtrain_work *works[ALL];
    int queue[2 * MOST], at[2 * MOST] = {0}, left[2 * MOST], count = 0, started = 0;
    for (int peer = 0; peer < size; peer++) {
        uint64_t both = seed * 7919 + (uint64_t)((rank < peer ? rank : peer) * MOST) +
                        (uint64_t)(rank < peer ? peer : rank);
        const int messages = peer == rank ? 0 : (int)ranks_random(&both, PAIR + 1);
        for (int receives = 0; receives < 2 && messages; receives++) {
            queue[count] = 2 * peer + receives;
            left[count++] = messages;
            started += messages;
        }
        for (int m = 0; m < PAIR; m++) host[peer * PAIR + m] = (float)(rank * 100 + peer * 10 + m);
    }
    buffer_write(&memory, host, sizeof host);
    for (int i = 0; i < started; i++) {
        int q = (int)ranks_random(&own, (uint64_t)count);
        while (!left[q]) q = (q + 1) % count;
        const int peer = queue[q] / 2, place = peer * PAIR + at[q]++;
        left[q]--;
        RANKS_TRY(queue[q] % 2
                      ? dtrain_recv(comm, got + place, 1, DTRAIN_DTYPE_F32, peer, &works[i])
                      : dtrain_send(comm, sent + place, 1, DTRAIN_DTYPE_F32, peer, &works[i]));
    }
    for (int i = started; i > 0; i--) {
        const int chosen = (int)ranks_random(&own, (uint64_t)i);
        RANKS_TRY(dtrain_work_wait(works[chosen]));
        works[chosen] = works[i - 1];
    }
    RANKS_TRY(device_of(comm)->ops->synchronize(device_of(comm)));
    buffer_read(&memory, host, sizeof host);
    for (int q = 0; q < count; q++)
        for (int m = 0; m < at[q] && queue[q] % 2; m++)
            CHECK_CLOSE(host[(MOST + queue[q] / 2) * PAIR + m], queue[q] / 2 * 100 + rank * 10 + m,
                        0);
    buffer_free(&memory);
    return 0;
}

static void test_random_exchanges(void)
{
    const uint64_t first = test_seed(), count = test_draws(12, 100, 1000);
    for (uint64_t seed = first; seed < first + count; seed++) {
        uint64_t own = seed;
        dtrain_launch_desc desc = nccl_desc(2 + (int)(seed % 3), 20000);
        for (int r = 0; r < MOST; r++) rank_controls[r].delay_steps = (int)ranks_random(&own, 4);
        CHECK_MSG(ranks_launch(&desc, rank_random_exchange, &seed, NULL) == DTRAIN_OK,
                  "seed %llu: %s", (unsigned long long)seed, dtrain_last_error());
    }
}

/* Rank 0's sends run ahead: its second one goes before what it receives, which rank 1 sends between the two. */
static int rank_ahead(dtrain_world *world, void *user)
{
    dtrain_comm *comm = dtrain_world_comm(world);
    const int peer = 1 - dtrain_world_rank(world);
    buffer b = buffer_make(comm, ON_DEVICE, 3 * sizeof(float));
    float *x = (float *)b.memory, host[3] = {3, 5, 0};
    dtrain_work *works[3];
    (void)user;
    if (peer == 1) {
        buffer_write(&b, host, sizeof host);
        RANKS_TRY(dtrain_send(comm, x, 1, DTRAIN_DTYPE_F32, peer, &works[0]));
        RANKS_TRY(dtrain_send(comm, x + 1, 1, DTRAIN_DTYPE_F32, peer, &works[1]));
        RANKS_TRY(dtrain_recv(comm, x + 2, 1, DTRAIN_DTYPE_F32, peer, &works[2]));
    } else {
        RANKS_TRY(dtrain_recv(comm, x, 1, DTRAIN_DTYPE_F32, peer, &works[0]));
        RANKS_TRY(dtrain_recv(comm, x + 1, 1, DTRAIN_DTYPE_F32, peer, &works[1]));
        RANKS_TRY(dtrain_work_wait(works[0]));
        RANKS_TRY(scale(device_of(comm), x, 1, 7));
        RANKS_TRY(dtrain_send(comm, x, 1, DTRAIN_DTYPE_F32, peer, &works[2]));
    }
    for (int i = peer == 1 ? 0 : 1; i < 3; i++) RANKS_TRY(dtrain_work_wait(works[i]));
    RANKS_TRY(device_of(comm)->ops->synchronize(device_of(comm)));
    buffer_read(&b, host, sizeof host);
    CHECK_CLOSE(host[peer == 1 ? 2 : 0], 21, 0);
    CHECK_CLOSE(host[1], 5, 0);
    buffer_free(&b);
    return 0;
}

/* The first of many messages under way is waited for: not one that was started later. */
static int rank_many(dtrain_world *world, void *user)
{
    enum { MANY = 150 };
    dtrain_comm *comm = dtrain_world_comm(world);
    const int rank = dtrain_world_rank(world);
    int32_t numbers[MANY];
    dtrain_work *works[MANY];
    for (int m = 0; m < MANY; m++) numbers[m] = m;
    for (int m = 0; m < MANY && rank == 0; m++)
        RANKS_TRY(dtrain_send(comm, &numbers[m], 1, DTRAIN_DTYPE_I32, 1, &works[m]));
    for (int m = 0; m < MANY; m++) {
        int32_t got = -1;
        if (rank == 0) RANKS_TRY(dtrain_work_wait(works[m]));
        else RANKS_TRY(dtrain_recv(comm, &got, 1, DTRAIN_DTYPE_I32, 0, NULL));
        CHECK(got == (rank == 0 ? -1 : m));
        if (m) continue;
        if (rank == 0) ranks_count((int32_t *)user); /* the first has arrived */
        else ranks_await((int32_t *)user, 1);
    }
    return 0;
}

static void test_point_to_point(void)
{
    int32_t *arrived = (int32_t *)ranks_shared(sizeof *arrived);
    nccl_run(2, rank_ahead, NULL);
    nccl_run(2, rank_many, arrived);
    munmap(arrived, sizeof *arrived);
    nccl_run(2, rank_exchange, NULL);
    nccl_run(3, rank_exchange, NULL);
    nccl_run(4, rank_chain, NULL);
    rank_controls[1].progress_polls = 2;
    nccl_run(3, rank_exchange, NULL);
}

/* ---- pipelines ---- */

typedef struct line_case {
    uint32_t kind, chunks;
    int least, most; /* micro-batches */
} line_case;

static int rank_line(dtrain_world *world, void *user)
{
    const line_case *c = (const line_case *)user;
    for (int micros = c->least; micros <= c->most; micros++) {
        long wrong = 0;
        const dtrain_result result =
            line_try(dtrain_world_comm(world), c->kind, c->chunks, micros, &wrong);
        if (result == DTRAIN_ERROR_UNSUPPORTED) continue; /* INTERLEAVED: multiples of the ranks */
        if (result != DTRAIN_OK) return 1;                /* the launch says why */
        CHECK_MSG(wrong == 0,
                  "kind %u, %d ranks, %u chunks, %d micro-batches: %ld values are wrong", c->kind,
                  dtrain_world_size(world), c->chunks, micros, wrong);
    }
    return 0;
}

static void run_line(int ranks, uint32_t kind, int least, int most)
{
    const bool twice = kind == DTRAIN_PIPELINE_INTERLEAVED;
    line_case c = {kind, twice ? 2 : 1, least, most};
    dtrain_launch_desc desc = nccl_desc(ranks, 20000);
    const dtrain_result result = ranks_launch(&desc, rank_line, &c, NULL);
    CHECK_MSG(result == DTRAIN_OK, "kind %u, %d ranks, %d to %d micro-batches: %s", kind, ranks,
              least, most, result == DTRAIN_OK ? "" : dtrain_last_error());
    c.chunks = 3;
    if (kind != DTRAIN_PIPELINE_INTERLEAVED || !test_full()) return;
    CHECK_MSG(ranks_launch(&desc, rank_line, &c, NULL) == DTRAIN_OK, "3 chunks, %d ranks: %s",
              ranks, dtrain_last_error());
}

/* A message that waits for a later one of the same group hangs over NCCL, whatever its size. */
static void test_pipelines(void)
{
    static const int few[][2] = {{2, 2}, {2, 4}, {3, 4}, {4, 8}, {8, 16}};
    for (uint32_t kind = 0; kind <= DTRAIN_PIPELINE_ZB_H1; kind++) {
        for (size_t i = 0; i < sizeof few / sizeof *few && !test_full(); i++)
            run_line(few[i][0], kind, few[i][1], few[i][1]);
        for (int ranks = 1; ranks <= MOST && test_full(); ranks++)
            run_line(ranks, kind, 1, LINE_MICROS);
    }
}

/* ---- all-to-all ---- */

/* One group of NCCL, in its place between kernels and between transfers, waited for or not. */
static int rank_all_to_all(dtrain_world *world, void *user)
{
    enum { COUNT = 90 };
    dtrain_comm *comm = dtrain_world_comm(world);
    const int rank = dtrain_world_rank(world), size = dtrain_world_size(world);
    const int next = (rank + 1) % size, last = (rank + size - 1) % size;
    const size_t bytes = (size_t)size * COUNT * sizeof(float);
    buffer out = buffer_make(comm, IN_COMM, bytes), in = buffer_make(comm, ON_DEVICE, bytes);
    buffer token = buffer_make(comm, ON_DEVICE, sizeof(float));
    float host[MOST * COUNT], one = (float)rank, got = -1;
    dtrain_work *sent, *work, *received;
    (void)user;
    for (int i = 0; i < size * COUNT; i++) host[i] = (float)(rank * 10000 + i);
    buffer_write(&out, host, bytes);
    buffer_write(&token, &one, sizeof one);
    RANKS_TRY(dtrain_barrier(comm));
    const int groups = nccl_mock_count.groups;
    RANKS_TRY(scale(device_of(comm), (float *)out.memory, (size_t)(size * COUNT), 2));
    RANKS_TRY(dtrain_send(comm, token.memory, 1, DTRAIN_DTYPE_F32, next, &sent));
    RANKS_TRY(dtrain_recv(comm, &got, 1, DTRAIN_DTYPE_F32, last, &received));
    RANKS_TRY(dtrain_all_to_all(comm, out.memory, in.memory, COUNT, DTRAIN_DTYPE_F32, &work));
    CHECK_MSG(nccl_mock_count.groups == groups + 2, "%d launches, expected the transfers' and one",
              nccl_mock_count.groups - groups);
    RANKS_TRY(dtrain_work_wait(work));
    RANKS_TRY(scale(device_of(comm), (float *)in.memory, (size_t)(size * COUNT), 0.5f));
    buffer_read(&in, host, bytes);
    for (int i = 0; i < size * COUNT; i++)
        CHECK_CLOSE(host[i], (float)(i / COUNT * 10000 + rank * COUNT + i % COUNT), 0);
    RANKS_TRY(dtrain_work_wait(sent));
    RANKS_TRY(dtrain_work_wait(received));
    CHECK_CLOSE(got, last, 0);
    RANKS_TRY(dtrain_all_to_all(comm, NULL, NULL, 0, DTRAIN_DTYPE_BF16, NULL));
    buffer_free(&out);
    buffer_free(&in);
    buffer_free(&token);
    return 0;
}

/* NCCL refuses a call in the middle of the group: it is closed all the same, and the rank says so. */
static int rank_refused_exchange(dtrain_world *world, void *user)
{
    dtrain_comm *comm = dtrain_world_comm(world);
    float from[8] = {0}, to[8];
    (void)user;
    const dtrain_result result = dtrain_all_to_all(comm, from, to, 2, DTRAIN_DTYPE_F32, NULL);
    CHECK_MSG(group_depth == 0, "an NCCL group is left open");
    CHECK_MSG(result != DTRAIN_OK && (dtrain_world_rank(world) != 2 ||
                                      strstr(dtrain_last_error(), "dtrain_all_to_all: NCCL")),
              "%s: %s", dtrain_result_text(result), dtrain_last_error());
    return 0;
}

static void test_all_to_all(void)
{
    dtrain_launch_desc desc = nccl_desc(4, RANKS_SHORT_MS);
    for (int ranks = 2; ranks <= MOST; ranks *= 2) nccl_run(ranks, rank_all_to_all, NULL);
    for (int r = 0; r < MOST; r++) {
        rank_controls[r].progress_polls = r % 3;
        rank_controls[r].delay_steps = 1 + r % 2;
    }
    nccl_run(3, rank_all_to_all, NULL);
    memset(rank_controls, 0, sizeof rank_controls);
    rank_controls[2].refuse_at = 4; /* of 4 sends and 4 receives */
    rank_controls[2].error = ncclInvalidArgument;
    CHECK(ranks_launch(&desc, rank_refused_exchange, NULL, NULL) == DTRAIN_OK);
    memset(rank_controls, 0, sizeof rank_controls);
}

/* ---- split ---- */

static int rank_split(dtrain_world *world, void *user)
{
    dtrain_comm *comm = dtrain_world_comm(world), *half = NULL, *quarter = NULL, *none = NULL;
    const int rank = dtrain_world_rank(world), size = dtrain_world_size(world);
    const int members = (size + 1 - rank % 2) / 2;
    (void)user;
    RANKS_TRY(dtrain_comm_split(comm, rank % 2, -rank, &half)); /* the key turns the order around */
    CHECK(dtrain_comm_size(half) == members);
    CHECK(dtrain_comm_rank(half) == members - 1 - rank / 2);
    for (int i = 0; i < members; i++)
        CHECK(ranks_in_world(half, i) == 2 * (members - 1 - i) + rank % 2);
    run_all_cases(half, 23);
    RANKS_TRY(dtrain_comm_split(half, dtrain_comm_rank(half) == 0 ? -1 : 3, 0, &quarter));
    CHECK((quarter == NULL) == (dtrain_comm_rank(half) == 0));
    if (quarter) {
        CHECK(dtrain_comm_size(quarter) == members - 1);
        for (int i = 0; i < members - 1; i++) /* equal keys keep the order */
            CHECK(ranks_in_world(quarter, i) == ranks_in_world(half, i + 1));
        run_all_cases(quarter, 31);
    }
    RANKS_TRY(dtrain_comm_split(comm, -7, 0, &none));
    CHECK(none == NULL);
    CHECK(nccl_mock_count.native_splits == (DTRAIN_NCCL_HAS_SPLIT ? 3 : 0));
    run_all_cases(comm, 37); /* all of them in turn, on one stream */
    if (quarter) dtrain_comm_destroy(quarter);
    dtrain_comm_destroy(half);
    RANKS_TRY(dtrain_comm_split(comm, 0, rank, &none)); /* left to the end of the world */
    run_all_cases(none, 41);
    return 0;
}
static void test_split(void)
{
    nccl_run(5, rank_split, NULL);
    for (int r = 0; r < MOST; r++) rank_controls[r].progress_polls = 2;
    nccl_run(4, rank_split, NULL);
}

/* ---- the stream of the tensor axis ---- */

/* A sum along the tensor axis ends while one along the data axis, which was started before it, does not. */
static int rank_lanes(dtrain_world *world, void *user)
{
    dtrain_comm *comm = dtrain_world_comm(world), *data = NULL, *tensor = NULL;
    int32_t one = 1, two = 1;
    bool done = false;
    dtrain_work *slow;
    RANKS_TRY(dtrain_comm_split(comm, 0, 0, &data));
    RANKS_TRY(dtrain_comm_split(comm, 0, 0, &tensor));
    data->axis = "data", tensor->axis = "tensor";
    RANKS_TRY(dtrain_barrier(tensor));
    RANKS_TRY(dtrain_barrier(comm));
    nccl_mock.hang_at = (int)operation_count + 1;
    RANKS_TRY(dtrain_all_reduce(data, &one, &one, 1, DTRAIN_DTYPE_I32, DTRAIN_REDUCE_SUM, &slow));
    for (int look = 0; look < 10; look++) RANKS_TRY(dtrain_work_test(slow, &done)); /* it begins */
    CHECK(!done);
    if (dtrain_all_reduce(tensor, &two, &two, 1, DTRAIN_DTYPE_I32, DTRAIN_REDUCE_SUM, NULL) ==
        DTRAIN_OK)
        ranks_count((int32_t *)user + (two == 2));
    (void)dtrain_work_wait(slow); /* it never comes */
    return 1;
}

static void test_lanes(void)
{
    int32_t *ended = (int32_t *)ranks_shared(2 * sizeof *ended);
    dtrain_launch_desc desc = nccl_desc(2, RANKS_SHORT_MS);
    expect_leftovers = true;
    CHECK(ranks_launch(&desc, rank_lanes, ended, NULL) != DTRAIN_OK);
    CHECK_MSG(ended[0] == 0 && ended[1] == (NCCL_VERSION_CODE >= 22600 ? 2 : 0),
              "%d and %d ranks have a sum of the tensor axis", (int)ended[0], (int)ended[1]);
    setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "0", 1); /* NCCL may start them in any order */
    ended[1] = 0;
    CHECK(ranks_launch(&desc, rank_lanes, ended, NULL) != DTRAIN_OK && ended[1] == 0);
    setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", 1);
    expect_leftovers = false;
    munmap(ended, 2 * sizeof *ended);
}

/* ---- memory, the steady state ---- */

static int rank_memory(dtrain_world *world, void *user)
{
    dtrain_comm *comm = dtrain_world_comm(world);
    dtrain_work *work;
    void *a, *b, *left;
    char bytes[1000];
    (void)user;
    RANKS_TRY(dtrain_comm_alloc(comm, 1000, &a));
    RANKS_TRY(dtrain_comm_alloc(comm, 0, &b));
    RANKS_TRY(dtrain_comm_alloc(comm, 64, &left)); /* for the end of the world to free */
    CHECK(nccl_mock_count.registrations == (DTRAIN_NCCL_HAS_MEMORY ? 3 : 0));
    CHECK(nccl_mock_count.allocations == (DTRAIN_NCCL_HAS_MEMORY ? 3 : 0));
    RANKS_TRY(
        device_of(comm)->ops->copy(device_of(comm), bytes, a, 1000, DTRAIN_COPY_DEVICE_TO_HOST));
    for (int i = 0; i < 1000; i++) CHECK(bytes[i] == 0);
    RANKS_TRY(dtrain_all_reduce(comm, a, a, 250, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, &work));
    RANKS_TRY(dtrain_work_wait(work)); /* in the order of the stream: it has not run */
    dtrain_comm_free(comm, a, 1000);
    dtrain_comm_free(comm, b, 0);
    CHECK(nccl_mock_count.registrations == (DTRAIN_NCCL_HAS_MEMORY ? 1 : 0));
    nccl_mock.no_memory = true;
    if (DTRAIN_NCCL_HAS_MEMORY) {
        CHECK(dtrain_comm_alloc(comm, 1000, &a) == DTRAIN_ERROR_MEMORY && !a);
        CHECK(strstr(dtrain_last_error(), "ncclMemAlloc") != NULL);
    }
    RANKS_TRY(dtrain_barrier(comm)); /* a failed allocation is no failure of the communicator */
    return 0;
}
static void test_memory(void) { nccl_run(2, rank_memory, NULL); }

static counted_memory steady_memory; /* of this process */

static int rank_steady(dtrain_world *world, void *user)
{
    dtrain_comm *comm = dtrain_world_comm(world);
    buffer b = buffer_make(comm, IN_COMM, 400);
    late_counts before = late_count;
    long calls = 0;
    int queries = 0;
    float host[100];
    (void)user;
    for (int step = 0; step < 200; step++) {
        dtrain_work *work, *other;
        const int asked = late_count.queries;
        RANKS_TRY(dtrain_all_reduce(comm, b.memory, b.memory, 100, DTRAIN_DTYPE_F32,
                                    DTRAIN_REDUCE_MEAN, &work));
        RANKS_TRY(dtrain_broadcast(comm, b.memory, 100, DTRAIN_DTYPE_F32, 1, &other));
        RANKS_TRY(dtrain_work_wait(work));
        RANKS_TRY(dtrain_work_wait(other));
        queries += late_count.queries - asked; /* of operations that nobody has to wait for */
        if (step % 10 == 0) RANKS_TRY(device_of(comm)->ops->synchronize(device_of(comm)));
        RANKS_TRY(
            dtrain_all_reduce(comm, host, host, 100, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_MAX, NULL));
        if (step == 0) {
            before = late_count;
            calls = steady_memory.calls;
        }
    }
    CHECK_MSG(queries == 0, "device operations are polled: %d queries", queries);
    CHECK(late_count.allocations == before.allocations && late_count.events == before.events);
    CHECK(late_count.streams == before.streams && steady_memory.calls == calls);
    buffer_free(&b);
    return 0;
}
static void test_steady_state(void)
{
    dtrain_launch_desc desc = nccl_desc(2, 20000);
    desc.options.allocator = counted_allocator(&steady_memory);
    CHECK_MSG(ranks_launch(&desc, rank_steady, NULL, NULL) == DTRAIN_OK, "%s", dtrain_last_error());
}

/* ---- graphs ---- */

static int rank_graph(dtrain_world *world, void *user)
{
    dtrain_comm *comm = dtrain_world_comm(world);
    dtrain_device *device = dtrain_world_device(world);
    const int rank = dtrain_world_rank(world), size = dtrain_world_size(world);
    buffer b = buffer_make(comm, IN_COMM, 400), c = buffer_make(comm, IN_COMM, 400);
    buffer d = buffer_make(comm, IN_COMM, 400);
    dtrain_graph *graph;
    dtrain_work *work, *sent, *got;
    dtrain_comm *split;
    float host[100], expected = 0;
    bool done;
    (void)user;
    RANKS_TRY(dtrain_all_reduce(comm, b.memory, b.memory, 100, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM,
                                NULL));
    RANKS_TRY(device->ops->synchronize(device));
    const int queries = late_count.queries;
    RANKS_TRY(device->ops->graph_begin(device));
    RANKS_TRY(scale(device, (float *)b.memory, 100, 2));
    RANKS_TRY(dtrain_all_reduce(comm, b.memory, b.memory, 100, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_MEAN,
                                &work));
    RANKS_TRY(dtrain_work_test(work, &done));
    RANKS_TRY(dtrain_work_wait(work));
    RANKS_TRY(dtrain_send(comm, b.memory, 100, DTRAIN_DTYPE_F32, (rank + 1) % size, &sent));
    RANKS_TRY(dtrain_recv(comm, c.memory, 100, DTRAIN_DTYPE_F32, (rank + size - 1) % size, &got));
    RANKS_TRY(dtrain_work_wait(sent));
    RANKS_TRY(dtrain_work_wait(got));
    RANKS_TRY(
        dtrain_all_to_all(comm, c.memory, d.memory, 100 / (size_t)size, DTRAIN_DTYPE_F32, &work));
    RANKS_TRY(dtrain_work_wait(work));
    CHECK(done && late_count.queries == queries);
    RANKS_TRY(device->ops->graph_end(device, &graph));
    for (int i = 0; i < 100; i++) host[i] = (float)rank;
    buffer_write(&b, host, sizeof host);
    for (int r = 0; r < size; r++) expected += (float)r / (float)size;
    for (int launch = 1; launch <= 3; launch++) {
        RANKS_TRY(device->ops->graph_launch(device, graph));
        RANKS_TRY(dtrain_broadcast(comm, b.memory, 100, DTRAIN_DTYPE_F32, 0,
                                   NULL)); /* after the graph, in order */
        buffer_read(&c, host, sizeof host);
        CHECK_CLOSE(host[0], expected * (float)(1 << launch), 0);
        CHECK_CLOSE(host[99], expected * (float)(1 << launch), 0);
        buffer_read(&d, host, sizeof host);
        CHECK_CLOSE(host[0], expected * (float)(1 << launch), 0);
        CHECK_CLOSE(host[99], expected * (float)(1 << launch), 0);
    }
    device->ops->graph_destroy(device, graph);
    buffer_free(&b);
    buffer_free(&c);
    buffer_free(&d);
    RANKS_TRY(device->ops->graph_begin(device)); /* what makes the host wait is refused */
    CHECK(dtrain_all_reduce(comm, host, host, 100, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, NULL) ==
          DTRAIN_ERROR_UNSUPPORTED);
    CHECK_MSG(strstr(dtrain_last_error(), "captured graph") != NULL, "%s", dtrain_last_error());
    CHECK(dtrain_barrier(comm) == DTRAIN_ERROR_UNSUPPORTED);
    CHECK(dtrain_comm_split(comm, 0, 0, &split) == DTRAIN_ERROR_UNSUPPORTED && !split);
    RANKS_TRY(device->ops->graph_end(device, &graph)); /* and nothing has failed */
    device->ops->graph_destroy(device, graph);
    RANKS_TRY(dtrain_barrier(comm));
    return 0;
}
static void test_graph(void)
{
    rank_controls[1].delay_steps = 2;
    nccl_run(4, rank_graph, NULL);
}

/* A graph is there when its communicator fails, when the world ends, when its communicator is destroyed. */
typedef enum { AT_FAILURE, AT_END, AT_DESTROY } left_graph;

static int rank_graph_left(dtrain_world *world, void *user)
{
    const left_graph kind = *(const left_graph *)user;
    dtrain_comm *comm = dtrain_world_comm(world), *used = comm;
    dtrain_device *device = dtrain_world_device(world);
    buffer b = buffer_make(comm, IN_COMM, 400);
    char *bytes = (char *)b.memory;
    dtrain_graph *graph;
    dtrain_work *work;
    if (kind == AT_DESTROY) RANKS_TRY(dtrain_comm_split(comm, 0, 0, &used));
    RANKS_TRY(device->ops->graph_begin(device));
    RANKS_TRY(
        dtrain_all_reduce(used, bytes, bytes, 100, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, &work));
    RANKS_TRY(dtrain_work_wait(work));
    RANKS_TRY(device->ops->graph_end(device, &graph));
    RANKS_TRY(device->ops->graph_launch(device, graph));
    RANKS_TRY(device->ops->synchronize(device));
    const double begin = dtrain_seconds();
    if (kind == AT_FAILURE) { /* a buffer that is not aligned */
        CHECK(dtrain_all_reduce(comm, bytes + 2, bytes + 2, 9, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM,
                                NULL) == DTRAIN_ERROR_ARGUMENT);
        CHECK_MSG(dtrain_seconds() - begin < RANKS_SOON, "it took %.1f s",
                  dtrain_seconds() - begin);
        CHECK(nccl_mock_count.aborts == 1 && nccl_mock_count.comms == 0);
        CHECK(device->ops->graph_launch(device, graph) != DTRAIN_OK);
    }
    if (kind == AT_DESTROY) {
        dtrain_comm_destroy(used); /* waits for the graph, and no longer than a second */
        const dtrain_result result = dtrain_barrier(comm);
        CHECK_MSG(result == DTRAIN_ERROR_PEER || result == DTRAIN_ERROR_TIMEOUT, "%s",
                  dtrain_result_text(result));
        CHECK_MSG(strstr(dtrain_last_error(), "until graphs with its operations are destroyed"),
                  "%s", dtrain_last_error());
    }
    if (kind != AT_END) device->ops->graph_destroy(device, graph);
    return 0;
}
static void test_graph_left(void)
{
    for (left_graph kind = AT_FAILURE; kind <= AT_DESTROY; kind = (left_graph)(kind + 1)) {
        const double begin = dtrain_seconds();
        dtrain_launch_desc desc = nccl_desc(2, kind == AT_DESTROY ? RANKS_SHORT_MS : 20000);
        const dtrain_result result = ranks_launch(&desc, rank_graph_left, &kind, NULL);
        CHECK_MSG(result == DTRAIN_OK, "%s", result == DTRAIN_OK ? "" : dtrain_last_error());
        CHECK_MSG(dtrain_seconds() - begin < RANKS_SOON, "it took %.1f s",
                  dtrain_seconds() - begin);
    }
}

/* ---- creation that cannot work ---- */

static int rank_unexpected(dtrain_world *world, void *user)
{
    (void)world;
    (void)user;
    CHECK_MSG(false, "the world should not have come to be");
    return 0;
}

static void check_refused(dtrain_launch_desc desc, const char *words)
{
    const double begin = dtrain_seconds();
    const dtrain_result result = ranks_launch(&desc, rank_unexpected, NULL, NULL);
    CHECK_MSG(result == DTRAIN_ERROR_RANK_FAILED, "%s", dtrain_result_text(result));
    CHECK_MSG(strstr(dtrain_last_error(), words) != NULL, "expected \"%s\" in: %s", words,
              dtrain_last_error());
    CHECK(dtrain_seconds() - begin < 15);
    memset(rank_controls, 0, sizeof rank_controls);
}

static void test_refusals(void)
{
    dtrain_launch_desc desc = nccl_desc(3, RANKS_SHORT_MS);
    for (int r = 0; r < MOST; r++) rank_controls[r].version = 21402;
    check_refused(desc, "the NCCL library found is version 2.14.2, but");
    rank_controls[1].version = 21402; /* the others hear of it */
    check_refused(desc, "on rank 1: the NCCL library found is version 2.14.2");
    rank_controls[2].version = 23007;
    check_refused(desc, "and rank 2 NCCL 2.30.7");
    rank_controls[0].no_id = true;
    check_refused(desc, "no socket interface");
    rank_controls[1].no_join = true;
    check_refused(desc, "ncclCommInitRankConfig: NCCL was still in progress after 2.5 s");
    desc.device_ops = NULL;
    check_refused(desc, "the device is \"cpu\"");
}

/* A library newer than the header is what NCCL promises to serve. */
static void test_newer_library(void)
{
    int step = 50;
    nccl_mock.version = 23007;
    for (int r = 0; r < MOST; r++) rank_controls[r].version = 23007;
    nccl_run(2, rank_collectives, &step);
}

/* ---- faults ---- */

typedef struct fault_case {
    bool blocking;           /* the host waits in the call; otherwise it waits for the device */
    bool wrong_count;        /* rank 1 asks for something else */
    bool wrong_kind;         /* rank 1 calls another collective */
    bool absent;             /* rank 1 does not come at all */
    dtrain_result *results;  /* (ranks), shared */
    char (*sentences)[1024]; /* (ranks), shared */
    double *seconds;         /* (ranks), shared */
    int *aborts;             /* (ranks), shared */
    int32_t *told;           /* how many have seen an error, shared */
} fault_case;

enum { FAULT_AT = 5 };

/* Trains a little, meets the fault, and then tries everything again. */
static int rank_fault(dtrain_world *world, void *user)
{
    const fault_case *f = (const fault_case *)user;
    dtrain_comm *comm = dtrain_world_comm(world), *half, *again;
    dtrain_device *device = dtrain_world_device(world);
    const int rank = dtrain_world_rank(world);
    buffer b = buffer_make(comm, IN_COMM, 400);
    float host[100] = {0}, other[100];
    dtrain_result result = dtrain_comm_split(comm, rank % 2, 0, &half);
    const double begin = dtrain_seconds();
    for (int i = 0; result == DTRAIN_OK && i < 8; i++) {
        const size_t count = f->wrong_count && rank == 1 && i == 2 ? 50 : 100;
        if (f->absent && rank == 1 && i == 2) ranks_await(f->told, 3);
        if (f->wrong_kind && rank == 1 && i == 2)
            result = dtrain_all_to_all(comm, host, other, 25, DTRAIN_DTYPE_F32, NULL);
        else if (f->blocking)
            result = dtrain_all_reduce(comm, host, host, count, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM,
                                       NULL);
        else
            result = dtrain_all_reduce(comm, b.memory, b.memory, count, DTRAIN_DTYPE_F32,
                                       DTRAIN_REDUCE_SUM, NULL);
        if (result == DTRAIN_OK && !f->blocking) result = device->ops->synchronize(device);
    }
    ranks_count(f->told);
    f->results[rank] = result;
    f->seconds[rank] = dtrain_seconds() - begin;
    snprintf(f->sentences[rank], sizeof f->sentences[rank], "%s", dtrain_last_error());
    CHECK(dtrain_all_reduce(comm, host, host, 100, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, NULL) ==
          result);
    CHECK_MSG(strcmp(dtrain_last_error(), f->sentences[rank]) == 0, "another sentence: %s",
              dtrain_last_error());
    CHECK(dtrain_barrier(half) == result && dtrain_comm_split(comm, 0, 0, &again) == result);
    CHECK(dtrain_comm_alloc(comm, 64, &b.memory) == result);
    dtrain_comm_destroy(half);
    CHECK(comm->in_flight == 0 && comm->outstanding == 0);
    f->aborts[rank] = nccl_mock_count.aborts;
    return 0;
}

static void run_fault(const char *name, fault_case f, const char *words, int dead)
{
    enum { RANKS = 4 };
    dtrain_launch_desc desc = nccl_desc(RANKS, RANKS_SHORT_MS);
    const double begin = dtrain_seconds();
    int told = 0;
    f.results = (dtrain_result *)ranks_shared(RANKS * sizeof *f.results);
    f.sentences = (char(*)[1024])ranks_shared(RANKS * sizeof *f.sentences);
    f.seconds = (double *)ranks_shared(RANKS * sizeof *f.seconds);
    f.aborts = (int *)ranks_shared(RANKS * sizeof *f.aborts);
    f.told = (int32_t *)ranks_shared(sizeof *f.told);
    const dtrain_result result = ranks_launch(&desc, rank_fault, &f, NULL);
    CHECK_MSG(dead < 0 || result == DTRAIN_ERROR_RANK_FAILED, "%s: %s", name,
              dtrain_result_text(result));
    CHECK_MSG(dtrain_seconds() - begin < 2 * RANKS_SOON, "%s took %.1f s", name,
              dtrain_seconds() - begin);
    for (int r = 0; r < RANKS; r++) {
        if (r == dead) continue;
        CHECK_MSG(f.results[r] != DTRAIN_OK, "%s: rank %d saw no error", name, r);
        CHECK_MSG(f.seconds[r] < RANKS_SOON, "%s: rank %d needed %.1f s", name, r, f.seconds[r]);
        CHECK_MSG(f.aborts[r] == 2, "%s: rank %d aborted %d communicators, expected 2", name, r,
                  f.aborts[r]);
        CHECK_MSG(strncmp(f.sentences[r], "rank ", 5) == 0, "%s: %s", name, f.sentences[r]);
        told += strstr(f.sentences[r], words) != NULL;
        if (getenv("DTRAIN_TEST_SHOW"))
            fprintf(stderr, "    %s: %s: %s\n", name, dtrain_result_text(f.results[r]),
                    f.sentences[r]);
    }
    CHECK_MSG(told > 0, "%s: no rank says \"%s\"; rank 0 says: %s", name, words, f.sentences[0]);
    memset(rank_controls, 0, sizeof rank_controls);
}

/* The first operations of a rank's NCCL are those of the split: so operation 5 is some way in. */
static void test_hang(void)
{
    fault_case host = {.blocking = true}, late = {.blocking = false};
    rank_controls[1].hang_at = FAULT_AT;
    run_fault("hang, host waits", host, "dtrain_all_reduce: not finished after 2.5 s", -1);
    rank_controls[2].hang_at = FAULT_AT;
    run_fault("hang, device waits", late, "collective 5 on world [all-reduce sum f32 count 100]",
              -1);
}

static void test_async_error(void)
{
    fault_case host = {.blocking = true}, late = {.blocking = false};
    rank_controls[3].error_at = FAULT_AT;
    rank_controls[3].error = ncclRemoteError;
    run_fault("async error, host waits", host, "remote process exited", -1);
    rank_controls[0].error_at = FAULT_AT;
    rank_controls[0].error = ncclSystemError;
    run_fault("async error, device waits", late, "unhandled system error", -1);
}

static void test_refused_call(void)
{
    fault_case late = {.blocking = false};
    rank_controls[2].refuse_at = FAULT_AT;
    rank_controls[2].error = ncclInvalidArgument;
    run_fault("refused call", late, "refused by the test", -1);
}

static void test_disagreement(void)
{
    fault_case host = {.blocking = true, .wrong_count = true}, late = {.wrong_count = true};
    run_fault("wrong count, host waits", host, "ranks disagree: this rank called collective", -1);
    run_fault("wrong count, device waits", late, "ranks disagree: this rank called collective", -1);
    fault_case kind = {.wrong_kind = true};
    run_fault("another collective", kind, "[all-to-all f32 count 25]", -1);
}

static void test_absent(void)
{
    fault_case late = {.absent = true};
    run_fault("a rank does not come", late,
              DTRAIN_NCCL_HAS_SPLIT ? "not finished, 4 collectives" : "not finished, 5 collectives",
              -1);
}

static void test_death(void)
{
    fault_case host = {.blocking = true}, late = {.blocking = false};
    rank_controls[1].die_at = FAULT_AT;
    run_fault("death, host waits", host, "rank 1 was killed by signal 9", 1);
    rank_controls[3].die_at = FAULT_AT;
    run_fault("death, device waits", late, "rank 3 was killed by signal 9", 3);
}

/* A child of a split that a peer never makes; a wrong argument; both are failures of the communicator. */
typedef struct mistake {
    int kind;
    int32_t told;
} mistake;

static int rank_bad_argument(dtrain_world *world, void *user)
{
    dtrain_comm *comm = dtrain_world_comm(world), *half;
    buffer b = buffer_make(comm, IN_COMM, 400);
    mistake *m = (mistake *)user;
    const int kind = m->kind, rank = dtrain_world_rank(world);
    dtrain_result result = DTRAIN_OK, expected = rank ? DTRAIN_ERROR_PEER : DTRAIN_ERROR_ARGUMENT;
    if (kind == 0 && rank == 0)
        result = dtrain_all_reduce(comm, b.memory, (char *)b.memory + 3, 10, DTRAIN_DTYPE_F32,
                                   DTRAIN_REDUCE_SUM, NULL);
    if (kind == 1 && rank == 0)
        result = dtrain_all_reduce(comm, (char *)b.memory + 2, (char *)b.memory + 202, 10,
                                   DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, NULL);
    if (kind == 2) {
        expected = DTRAIN_ERROR_TIMEOUT;
        if (rank == 0) {
            result = dtrain_comm_split(comm, 0, 0, &half);
            ranks_count(&m->told);
        } else ranks_await(&m->told, 1);
    }
    if (rank) result = dtrain_barrier(comm);
    if (rank && kind == 2) expected = DTRAIN_ERROR_PEER;
    CHECK_MSG(result == expected, "kind %d: %s: %s", kind, dtrain_result_text(result),
              dtrain_last_error());
    return 0;
}
static void test_bad_arguments(void)
{
    mistake *m = (mistake *)ranks_shared(sizeof *m);
    for (m->kind = 0; m->kind < 3; m->kind++) {
        dtrain_launch_desc desc = nccl_desc(2, RANKS_SHORT_MS);
        ranks_launch(&desc, rank_bad_argument, m, NULL);
    }
}

/* NCCL's own ends do not come back: ours do, and say so. */
static int rank_stuck(dtrain_world *world, void *user)
{
    dtrain_comm *comm = dtrain_world_comm(world);
    float host = 1;
    (void)user;
    expect_leftovers = true;
    if (nccl_mock.stuck_finalize) return 0;
    CHECK(dtrain_all_reduce(comm, &host, &host, 1, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, NULL) ==
              DTRAIN_ERROR_TIMEOUT ||
          dtrain_all_reduce(comm, &host, &host, 1, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, NULL) ==
              DTRAIN_ERROR_PEER);
    return 0;
}
static void test_stuck_ends(void)
{
    for (int kind = 0; kind < 2; kind++) {
        dtrain_launch_desc desc = nccl_desc(2, RANKS_SHORT_MS);
        const double begin = dtrain_seconds();
        for (int r = 0; r < 2; r++) {
            rank_controls[r].stuck_abort = kind == 0;
            rank_controls[r].hang_at = kind == 0;
            rank_controls[r].stuck_finalize = kind == 1;
        }
        CHECK_MSG(ranks_launch(&desc, rank_stuck, NULL, NULL) == DTRAIN_OK, "%s",
                  dtrain_last_error());
        CHECK_MSG(dtrain_seconds() - begin < RANKS_SOON, "took %.1f s", dtrain_seconds() - begin);
    }
}

/* ---- guests ---- */

/* What the host hands in, and what is wrong with it. */
typedef enum {
    GIVEN_NOTHING,
    GIVEN_ID,
    GIVEN_COMM,
    GIVEN_BOTH,
    GIVEN_BY_SOME,        /* rank 1 has no communicator */
    GIVEN_IN_OTHER_ORDER, /* ranks 0 and 1 are members 1 and 0 */
    GIVEN_ELSEWHERE,      /* rank 1 made it on another GPU */
    GIVEN_COUNT
} given_kind;

typedef struct guest_run {
    given_kind kind;
    bool ordered;
    host_group *group;
} guest_run;

static dtrain_result guest_join(const guest_run *run, int rank, const dtrain_nccl_given *given,
                                dtrain_world **world)
{
    host_member member = host_member_of(run->group, rank);
    dtrain_join_desc desc = host_desc(&member);
    if (run->kind == GIVEN_IN_OTHER_ORDER && rank < 2) member.rank = desc.rank = 1 - rank;
    desc.device_ops = test_ops();
    desc.comm_ops = dtrain_nccl_comm_ops();
    desc.comm_given = given;
    return dtrain_world_join(&desc, world);
}

static int guest_sum(dtrain_world *world)
{
    const int size = dtrain_world_size(world);
    dtrain_comm *comm = dtrain_world_comm(world), *half;
    buffer b = buffer_make(comm, IN_COMM, 400);
    float host[100];
    for (int i = 0; i < 100; i++) host[i] = (float)(dtrain_world_rank(world) + i);
    buffer_write(&b, host, sizeof host);
    RANKS_TRY(dtrain_all_reduce(comm, b.memory, b.memory, 100, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM,
                                NULL));
    RANKS_TRY(dtrain_comm_split(comm, 0, 0, &half));
    RANKS_TRY(dtrain_all_reduce(half, b.memory, b.memory, 100, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_MAX,
                                NULL));
    buffer_read(&b, host, sizeof host);
    for (int i = 0; i < 100; i++) CHECK(host[i] == (float)(size * (size - 1) / 2 + size * i));
    dtrain_comm_destroy(half);
    buffer_free(&b);
    return 0;
}

static int count_lanes(dtrain_world *world)
{
    int count = 0;
    for (late_stream *s = late_get(dtrain_world_device(world))->compute.next; s; s = s->next)
        count++;
    return count;
}

/* Join twice, the second time to fail. The host's communicator is none the wiser. */
static int guest_rank(int rank, void *user)
{
    const guest_run *run = (const guest_run *)user;
    const int size = run->group->size;
    host_member member = host_member_of(run->group, rank);
    const bool split = NCCL_MOCK_VERSION >= 21801;
    dtrain_nccl_given given = {NULL, NULL, run->ordered};
    ncclUniqueId id, ids[HOST_MOST];
    ncclComm_t comm = NULL;
    dtrain_world *world = NULL;
    cudaSetDevice(run->kind == GIVEN_ELSEWHERE && rank == 1 ? 5 : rank);
    setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", 1); /* which a guest does not read */
    if (run->kind >= GIVEN_COMM) {
        memset(&id, 0, sizeof id);
        if (rank == 0) CHECK(ncclGetUniqueId(&id) == ncclSuccess);
        CHECK(host_all_gather(&member, &id, ids, sizeof id) == 0);
        CHECK(ncclCommInitRank(&comm, size, ids[0], rank) == ncclSuccess);
        if (run->kind != GIVEN_BY_SOME || rank != 1) given.comm = comm;
        host_comms = 1;
    }
    cudaSetDevice(rank);
    for (int round = 0; round < 2; round++) {
        if (run->kind == GIVEN_ID || run->kind == GIVEN_BOTH) {
            if (rank == 0) CHECK(ncclGetUniqueId(&id) == ncclSuccess);
            if (rank == 0) given.id = &id;
            nccl_mock.no_id = true;
        }
        const int splits = nccl_mock_count.native_splits;
        const dtrain_result joined =
            guest_join(run, rank, run->kind == GIVEN_NOTHING ? NULL : &given, &world);
        nccl_mock.no_id = false;
        if (run->kind > GIVEN_COMM || (run->kind == GIVEN_COMM && !split)) {
            const char *words = !split && run->kind != GIVEN_BOTH ? "hand in a unique id"
                                : run->kind == GIVEN_BOTH         ? "hand in one of them"
                                : run->kind == GIVEN_BY_SOME
                                    ? "rank 0 hands in a communicator of NCCL, and rank 1 none"
                                : run->kind == GIVEN_ELSEWHERE ? "rank 1 of 3 on GPU 5, and joins "
                                                                 "as rank 1 of 3 on GPU 1"
                                                               : "rank 1 of 3 on GPU 1, and joins "
                                                                 "as rank 0 of 3";
            CHECK_MSG(joined != DTRAIN_OK && !world && strstr(dtrain_last_error(), words),
                      "kind %d: %s: %s", (int)run->kind, dtrain_result_text(joined),
                      dtrain_last_error());
            break;
        }
        RANKS_TRY(joined);
        CHECK(nccl_mock_count.native_splits == splits + (run->kind == GIVEN_COMM));
        CHECK(count_lanes(world) == 1 + (run->ordered && NCCL_MOCK_VERSION >= 22600));
        if (guest_sum(world)) return 1;
        if (round) {
            float unaligned[4];
            CHECK(dtrain_all_reduce(dtrain_world_comm(world), (char *)unaligned + 1, unaligned, 2,
                                    DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, NULL) != DTRAIN_OK);
        }
        CHECK((dtrain_world_leave(world) == DTRAIN_OK) == !round);
        world = NULL;
    }
    if (comm) {
        ncclResult_t asynchronous = ncclInternalError;
        cudaSetDevice(run->kind == GIVEN_ELSEWHERE && rank == 1 ? 5 : rank);
        CHECK(ncclCommGetAsyncError(comm, &asynchronous) == ncclSuccess && !asynchronous);
        CHECK(ncclCommDestroy(comm) == ncclSuccess);
    }
    CHECK(nccl_mock_count.comms == 0 && nccl_mock_count.misuses == 0);
    return 0;
}

/* Guests on several hosts, which only NCCL connects: the world's own all-gather goes over it. */
typedef struct apart_run {
    host_group *group;
    int end;
} apart_run;

enum { ALL_LEAVE, ONE_DIES, ONE_FAILS }; /* rank 2 */

static int apart_rank(int rank, void *user)
{
    const apart_run *run = (const apart_run *)user;
    const int size = run->group->size;
    static const size_t sizes[] = {0, 1, 5, 4, DTRAIN_WORLD_ALL_GATHER_BYTES};
    static char mine[DTRAIN_WORLD_ALL_GATHER_BYTES], all[8][DTRAIN_WORLD_ALL_GATHER_BYTES];
    char name[32];
    host_member member = host_member_of(run->group, rank);
    dtrain_join_desc desc = host_desc(&member);
    dtrain_world *world;
    dtrain_world_info info;
    snprintf(name, sizeof name, "dtrain-test-%d", rank);
    if (unshare(CLONE_NEWUTS) != 0 || sethostname(name, strlen(name)) != 0) return 77;
    cudaSetDevice(rank);
    desc.timeout_ms = run->end == ALL_LEAVE ? desc.timeout_ms : RANKS_SHORT_MS;
    desc.device_ops = test_ops();
    desc.comm_ops = dtrain_nccl_comm_ops();
    RANKS_TRY(dtrain_world_join(&desc, &world));
    dtrain_world_query(world, &info);
    CHECK_MSG(info.node_count == size && info.node == rank && info.local_size == 1, "%d hosts",
              info.node_count);
    if (guest_sum(world)) return 1;
    for (int round = 0; round < 3; round++)
        for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
            const size_t bytes = sizes[s];
            memset(mine, 1 + rank + round, sizeof mine);
            memset(all, 99, sizeof all);
            RANKS_TRY(dtrain_world_all_gather(world, mine, bytes, all));
            const char *got = &all[0][0];
            size_t wrong = got[(size_t)size * bytes] != 99;
            for (size_t i = 0; i < (size_t)size * bytes; i++)
                wrong += got[i] != 1 + (int)(i / bytes) + round;
            CHECK_MSG(wrong == 0, "%zu of %zu bytes are wrong", wrong, (size_t)size * bytes);
        }
    if (run->end == ONE_DIES && rank == 2) _exit(0);
    if (run->end == ONE_FAILS && rank == 2) dtrain_world_abort(world, DTRAIN_ERROR_DATA, "the end");
    const double begin = dtrain_seconds();
    const dtrain_result gathered = dtrain_world_all_gather(world, mine, 8, all);
    CHECK_MSG((gathered == DTRAIN_OK) == (run->end == ALL_LEAVE), "%s", dtrain_last_error());
    CHECK_MSG(dtrain_seconds() - begin < RANKS_SOON, "it took %.1f s", dtrain_seconds() - begin);
    CHECK((dtrain_world_leave(world) == DTRAIN_OK) == (run->end == ALL_LEAVE));
    CHECK_MSG(dtrain_seconds() - begin < RANKS_SOON, "it took %.1f s", dtrain_seconds() - begin);
    CHECK(nccl_mock_count.comms == 0 && nccl_mock_count.misuses == 0);
    return 0;
}

static void test_guests_apart(void)
{
    for (int end = ALL_LEAVE; end <= ONE_FAILS; end++) {
        apart_run run;
        int status[3];
        run.group = host_group_new(3);
        run.end = end;
        host_run(3, false, apart_rank, &run, status);
        if (status[0] == 77 && !end)
            SKIP(test_guests_apart, "needs root, to give each rank a host name");
        for (int r = 0; r < 3; r++)
            CHECK_MSG(status[r] == 0 || status[r] == 77, "end %d: rank %d: %d", end, r, status[r]);
    }
}

static void test_guests(void)
{
    for (int kind = 0; kind < GIVEN_COUNT; kind++) {
        const guest_run run = {(given_kind)kind, kind == GIVEN_ID || kind == GIVEN_COMM,
                               host_group_new(3)};
        int status[3];
        host_run(3, false, guest_rank, (void *)(uintptr_t)&run, status);
        for (int r = 0; r < 3; r++)
            CHECK_MSG(status[r] == 0, "kind %d: rank %d: %d", kind, r, status[r]);
    }
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    RUN(test_collectives);
    RUN(test_slow_calls);
    RUN(test_order);
    RUN(test_test_and_barrier);
    RUN(test_point_to_point);
    RUN(test_random_exchanges);
    RUN(test_pipelines);
    RUN(test_all_to_all);
    RUN(test_split);
    RUN_BESIDE(test_lanes);
    RUN(test_memory);
    RUN(test_steady_state);
    RUN(test_graph);
    RUN_BESIDE(test_graph_left);
    RUN_BESIDE(test_refusals);
    RUN(test_newer_library);
    RUN_BESIDE(test_hang);
    RUN(test_async_error);
    RUN(test_refused_call);
    RUN_BESIDE(test_disagreement);
    RUN_BESIDE(test_absent);
    RUN_BESIDE(test_death);
    RUN_BESIDE(test_bad_arguments);
    RUN_BESIDE(test_stuck_ends);
    RUN(test_guests);
    RUN_BESIDE(test_guests_apart);
    return test_summary();
}
