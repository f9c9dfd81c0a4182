/* test_mesh.c: meshes and cuts beside naive loops. The arithmetic of all factorisations of 1 to 64 ranks, every
 * communicator of every sum of axes, shares of random cuts, and initialisation: what the ranks of a tensor axis get are
 * the slices of the tensor that one rank has, to the bit. */
#include "test.h"

#include "parallel/mesh_internal.h"
#include "parallel/cut_internal.h"
#include "dtrain.h"
#include "ranks.h"

/* ---- the arithmetic ---- */

static dtrain_mesh_desc plan_desc(int tensor, int data, int pipeline, int ranks, int rank)
{
    dtrain_mesh_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.tensor = tensor, desc.data = data, desc.pipeline = pipeline;
    desc.ranks = ranks, desc.rank = rank;
    return desc;
}

/* Check the mesh of a desc, which stands for (t, d, p): this rank's place, and every rank's by counting. */
static void check_plan(const dtrain_mesh_desc *desc, int t, int d, int p)
{
    dtrain_mesh *mesh;
    dtrain_mesh_info info;
    int r = 0;
    if (!CHECK_MSG(dtrain_mesh_create(NULL, desc, &mesh) == DTRAIN_OK, "%s", dtrain_last_error()))
        return;
    dtrain_mesh_query(mesh, &info);
    CHECK(info.tensor == t && info.data == d && info.pipeline == p);
    CHECK(info.ranks == desc->ranks && info.rank == desc->rank);
    CHECK(info.sequence_parallel == (desc->sequence_parallel && t > 1));
    for (int k = 0; k < p; k++)
        for (int j = 0; j < d; j++)
            for (int i = 0; i < t; i++, r++) {
                if (r != desc->rank) continue;
                CHECK_MSG(info.tensor_rank == i && info.data_rank == j && info.pipeline_rank == k,
                          "rank %d of %d x %d x %d is at %d %d %d", r, t, d, p, info.tensor_rank,
                          info.data_rank, info.pipeline_rank);
            }
    CHECK(r == desc->ranks);
    for (uint32_t axes = 0; axes <= DTRAIN_AXIS_ALL; axes++)
        CHECK(dtrain_mesh_comm(mesh, axes) == NULL);
    const dtrain__groups groups = dtrain__mesh_groups(NULL, mesh, NULL);
    CHECK(groups.tensor_ranks == t && groups.tensor_rank == info.tensor_rank);
    dtrain_mesh_destroy(mesh);
}

/* Every way to say the same mesh: all axes, or one of them as the rest. */
static void check_factors(int t, int d, int p, int rank)
{
    const int ranks = t * d * p;
    dtrain_mesh_desc desc = plan_desc(t, d, p, ranks, rank);
    desc.sequence_parallel = rank % 2;
    check_plan(&desc, t, d, p);
    desc = plan_desc(-1, d, p, ranks, rank);
    check_plan(&desc, t, d, p);
    desc = plan_desc(t, -1, p, ranks, rank);
    check_plan(&desc, t, d, p);
    desc = plan_desc(t, d, -1, ranks, rank);
    check_plan(&desc, t, d, p);
    desc =
        plan_desc(t == 1 ? 0 : t, 0, p == 1 ? 0 : p, ranks, rank); /* data is the rest by default */
    check_plan(&desc, t, d, p);
}

static void test_factorisations(void)
{
    for (int ranks = 1; ranks <= 64; ranks++) {
        int ways = 0;
        for (int t = 1; t <= ranks; t++)
            for (int d = 1; d <= ranks / t; d++)
                if (ranks % t == 0 && ranks / t % d == 0) {
                    const int p = ranks / t / d;
                    ways++;
                    for (int rank = 0; rank < ranks; rank += ranks <= 8 || test_full() ? 1 : 7)
                        check_factors(t, d, p, rank);
                    check_factors(t, d, p, ranks - 1);
                }
        if (ranks == 8) CHECK(ways == 10);
    }
    const dtrain_mesh_desc large = plan_desc(8, 0, 64, 1 << 20, 123456); /* none of them is here */
    check_plan(&large, 8, 2048, 64);
    const dtrain_mesh_desc data = plan_desc(0, 100000, 0, 100000, 99999);
    check_plan(&data, 1, 100000, 1);
}

static void refuse_plan(const dtrain_mesh_desc *desc, const char *sentence)
{
    dtrain_mesh *mesh = (dtrain_mesh *)(void *)&mesh; /* to be cleared */
    CHECK(dtrain_mesh_create(NULL, desc, &mesh) == DTRAIN_ERROR_ARGUMENT && mesh == NULL);
    CHECK_MSG(strstr(dtrain_last_error(), sentence), "\"%s\" is not in: %s", sentence,
              dtrain_last_error());
}

static void test_wrong_meshes(void)
{
    static const struct {
        int tensor, data, pipeline, ranks, rank;
        const char *sentence;
    } wrong[] = {
        {3, 0, 0, 8, 0, "tensor 3 x data 0 x pipeline 0"},
        {3, 0, 0, 8, 0, "does not divide the 8 ranks"},
        {2, 2, 1, 8, 0, "tensor 2 x data 2 x pipeline 1"},
        {2, 2, 1, 8, 0, "are not the 8 ranks"},
        {2, 2, 4, 8, 0, "are not the 8 ranks"},
        {16, 0, 0, 8, 0, "does not divide the 8 ranks"},
        {65536, 65536, 65536, 8, 0, "are not the 8 ranks"},
        {-1, -1, 0, 8, 0, "two axes are -1"},
        {-1, 0, -1, 8, 0, "two axes are -1"},
        {-2, 0, 0, 8, 0, "an axis of -2 ranks"},
        {0, INT32_MAX, 0, 8, 0, "an axis of 2147483647 ranks"},
        {0, 0, 0, 8, 8, "rank 8 of 8"},
        {0, 0, 0, 8, -1, "rank -1 of 8"},
        {0, 0, 0, 0, 0, "rank 0 of 0"},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        const dtrain_mesh_desc desc = plan_desc(wrong[i].tensor, wrong[i].data, wrong[i].pipeline,
                                                wrong[i].ranks, wrong[i].rank);
        refuse_plan(&desc, wrong[i].sentence);
    }
    refuse_plan(NULL, "world is NULL");
    const dtrain_mesh_desc desc = plan_desc(2, 0, 0, 8, 0);
    CHECK(dtrain_mesh_create(NULL, &desc, NULL) == DTRAIN_ERROR_ARGUMENT);
    CHECK(strstr(dtrain_last_error(), "out is NULL"));
    dtrain_mesh_info info;
    memset(&info, 1, sizeof info);
    dtrain_mesh_query(NULL, &info);
    CHECK(info.ranks == 0 && info.tensor == 0 && !info.sequence_parallel);
    CHECK(dtrain_mesh_comm(NULL, DTRAIN_AXIS_ALL) == NULL);
    dtrain_mesh_destroy(NULL);
}

/* ---- communicators ---- */

typedef struct axes {
    int tensor, data, pipeline;
} axes;

/* The members of this rank's communicator along axes, by looking at every place of the mesh. */
static int naive_members(const axes *size, const dtrain_mesh_info *own, uint32_t along,
                         int *members)
{
    int count = 0, rank = 0;
    for (int k = 0; k < size->pipeline; k++)
        for (int j = 0; j < size->data; j++)
            for (int i = 0; i < size->tensor; i++, rank++)
                if ((i == own->tensor_rank || along & DTRAIN_AXIS_TENSOR) &&
                    (j == own->data_rank || along & DTRAIN_AXIS_DATA) &&
                    (k == own->pipeline_rank || along & DTRAIN_AXIS_PIPELINE))
                    members[count++] = rank;
    return count;
}

/* Compare every communicator of a mesh with the naive one; `first` and `step` lead from a rank of it to the world's. */
static int check_comms(const dtrain_mesh *mesh, const axes *size, int first, int step)
{
    dtrain_mesh_info own;
    int members[RANKS_MOST];
    dtrain_mesh_query(mesh, &own);
    for (uint32_t along = 0; along <= DTRAIN_AXIS_ALL; along++) {
        dtrain_comm *comm = dtrain_mesh_comm(mesh, along);
        const int count = naive_members(size, &own, along, members);
        int64_t sum = first + step * own.rank, expected = 0;
        if (!CHECK(comm && dtrain_comm_size(comm) == count)) return 1;
        for (int i = 0; i < count; i++) {
            CHECK_MSG(ranks_in_world(comm, i) == first + step * members[i],
                      "axes %u, place %d: rank %d, expected %d", along, i, ranks_in_world(comm, i),
                      first + step * members[i]);
            if (members[i] == own.rank) CHECK(dtrain_comm_rank(comm) == i);
            expected += first + step * members[i];
        }
        RANKS_TRY(
            dtrain_all_reduce(comm, &sum, &sum, 1, DTRAIN_DTYPE_I64, DTRAIN_REDUCE_SUM, NULL));
        CHECK(sum == expected);
    }
    return 0;
}

static int rank_meshes(dtrain_world *world, void *user)
{
    const axes *size = (const axes *)user;
    const dtrain_mesh_desc desc = plan_desc(size->tensor, size->data, size->pipeline, 0, 0);
    dtrain_mesh *mesh;
    RANKS_TRY(dtrain_mesh_create(world, &desc, &mesh));
    const int several = (size->tensor > 1) + (size->data > 1) + (size->pipeline > 1);
    const int model = several == 3, alone = several == 1 || several == 2;
    CHECK_MSG((int)dtrain_world_comm(world)->splits == (several > 1) * several + model + alone,
              "%d splits of %d x %d x %d", (int)dtrain_world_comm(world)->splits, size->tensor,
              size->data, size->pipeline);
    const int failed = check_comms(mesh, size, 0, 1);
    CHECK(dtrain_mesh_comm(mesh, DTRAIN_AXIS_ALL) == dtrain_world_comm(world));
    if (size->pipeline == 1) /* an axis of one rank does not count */
        CHECK(dtrain_mesh_comm(mesh, DTRAIN_AXIS_TENSOR + DTRAIN_AXIS_PIPELINE) ==
              dtrain_mesh_comm(mesh, DTRAIN_AXIS_TENSOR));
    const dtrain__groups groups = dtrain__mesh_groups(world, mesh, NULL);
    CHECK(groups.data == dtrain_mesh_comm(mesh, DTRAIN_AXIS_DATA));
    CHECK(groups.all == dtrain_world_comm(world) && groups.copy == NULL);
    CHECK((groups.tensor != NULL) == (size->tensor > 1));
    CHECK((groups.model != NULL) == (size->tensor * size->pipeline > 1));
    dtrain_mesh_destroy(mesh);
    return failed;
}

static void test_communicators(void)
{
    static const int worlds[] = {1, 2, 4, 6, 8, 12};
    for (size_t w = 0; w < sizeof worlds / sizeof *worlds; w++)
        for (int t = 1; t <= worlds[w]; t++)
            for (int d = 1; d <= worlds[w] / t; d++) {
                axes size = {t, d, worlds[w] / t / d};
                if (size.tensor * size.data * size.pipeline != worlds[w]) continue;
                if (TEST_RACES && worlds[w] != 8) continue;
                ranks_run(worlds[w], DTRAIN_LAUNCH_THREADS, rank_meshes, &size);
            }
    axes size = {2, 2, 2};
    ranks_run(8, DTRAIN_LAUNCH_PROCESSES, rank_meshes, &size);
}

/* Megatron's documentation has these groups: 16 ranks, tensor 2, pipeline 4. */
static int rank_megatron(dtrain_world *world, void *user)
{
    static const int data[8][2] = {{0, 2},  {1, 3},  {4, 6},   {5, 7},
                                   {8, 10}, {9, 11}, {12, 14}, {13, 15}};
    static const int pipeline[4][4] = {
        {0, 4, 8, 12}, {1, 5, 9, 13}, {2, 6, 10, 14}, {3, 7, 11, 15}};
    const dtrain_mesh_desc desc = plan_desc(2, 0, 4, 0, 0);
    dtrain_mesh *mesh;
    int found = 0;
    (void)user;
    RANKS_TRY(dtrain_mesh_create(world, &desc, &mesh));
    dtrain_comm *const comms[3] = {dtrain_mesh_comm(mesh, DTRAIN_AXIS_TENSOR),
                                   dtrain_mesh_comm(mesh, DTRAIN_AXIS_DATA),
                                   dtrain_mesh_comm(mesh, DTRAIN_AXIS_PIPELINE)};
    const int rank = dtrain_world_rank(world);
    CHECK(dtrain_comm_size(comms[0]) == 2 && ranks_in_world(comms[0], 0) == rank / 2 * 2);
    for (int g = 0; g < 8; g++)
        if (data[g][0] == rank || data[g][1] == rank)
            for (int i = 0; i < 2; i++, found++) CHECK(ranks_in_world(comms[1], i) == data[g][i]);
    for (int g = 0; g < 4; g++)
        for (int k = 0; k < 4; k++)
            if (pipeline[g][k] == rank)
                for (int i = 0; i < 4; i++, found++)
                    CHECK(ranks_in_world(comms[2], i) == pipeline[g][i]);
    CHECK(found == 6);
    dtrain_mesh_destroy(mesh);
    return 0;
}
static void test_megatron_groups(void)
{
    ranks_run(16, DTRAIN_LAUNCH_THREADS, rank_megatron, NULL);
}

/* Two meshes, of even and of odd ranks; the ranks of both are numbered within the split. */
static int rank_split(dtrain_world *world, void *user)
{
    const int rank = dtrain_world_rank(world);
    const axes size = {2, 2, 1};
    dtrain_mesh_desc desc = plan_desc(2, 0, 0, 0, 0);
    dtrain_mesh *mesh;
    (void)user;
    RANKS_TRY(dtrain_comm_split(dtrain_world_comm(world), rank % 2, rank, &desc.comm));
    RANKS_TRY(dtrain_mesh_create(world, &desc, &mesh));
    const int failed = check_comms(mesh, &size, rank % 2, 2);
    CHECK(dtrain_mesh_comm(mesh, DTRAIN_AXIS_ALL) == desc.comm);
    dtrain_mesh_destroy(mesh);
    int64_t one = 1; /* the split is still whose it was */
    RANKS_TRY(
        dtrain_all_reduce(desc.comm, &one, &one, 1, DTRAIN_DTYPE_I64, DTRAIN_REDUCE_SUM, NULL));
    CHECK(one == 4);
    dtrain_comm_destroy(desc.comm);
    return failed;
}
static void test_split_communicator(void) { ranks_run(8, DTRAIN_LAUNCH_THREADS, rank_split, NULL); }

/* All ranks refuse what one of them gives differently, and go on. */
static int rank_differs(dtrain_world *world, void *user)
{
    static const char *const sentences[] = {
        "rank 0 has tensor 4, the others have tensor 2",
        "rank 1 has data 4, the others have data 0",
        "rank 2 has pipeline -1, the others have pipeline 1",
        "rank 3 has sequence_parallel true, the others have sequence_parallel false",
        "rank 4 has tensor 3, the others have tensor 2"};
    dtrain_mesh *mesh;
    (void)user;
    for (int i = 0; i < 5; i++) {
        const bool odd = dtrain_world_rank(world) == i;
        dtrain_mesh_desc desc = plan_desc(2, 0, 0, 0, 0);
        if (i == 0) desc.tensor = odd ? 4 : 2;
        if (i == 1) desc.data = odd ? 4 : 0;
        if (i == 2) desc = plan_desc(2, 4, odd ? -1 : 1, 0, 0);
        if (i == 3) desc.sequence_parallel = odd;
        if (i == 4 && odd) desc.tensor = 3;
        const dtrain_result result = dtrain_mesh_create(world, &desc, &mesh);
        CHECK(result == DTRAIN_ERROR_MISMATCH && mesh == NULL);
        CHECK_MSG(strstr(dtrain_last_error(), sentences[i]), "%d: %s", i, dtrain_last_error());
    }
    const dtrain_mesh_desc desc = plan_desc(2, 0, 0, 0, 0);
    RANKS_TRY(dtrain_mesh_create(world, &desc, &mesh));
    dtrain_mesh_destroy(mesh);
    return 0;
}
static void test_descs_that_differ(void)
{
    ranks_run(8, DTRAIN_LAUNCH_THREADS, rank_differs, NULL);
}

/* ---- warnings, memory ---- */

static int32_t warnings;
static char warned[512];
static void count_warnings(void *user, dtrain_log_level level, int rank, const char *message)
{
    (void)user, (void)rank;
    if (level != DTRAIN_LOG_WARNING || !strstr(message, "crosses nodes")) return;
    ranks_count(&warnings);
    snprintf(warned, sizeof warned, "%s", message);
}

/* Nodes of two ranks: a tensor axis of 2 stays inside, one of 4 crosses, and data alone has none. */
static void test_crossing_nodes(void)
{
    static const axes sizes[] = {{2, 4, 1}, {4, 2, 1}, {8, 1, 1}, {1, 8, 1}, {2, 1, 4}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        axes size = sizes[i];
        dtrain_launch_desc desc = ranks_desc(8, DTRAIN_LAUNCH_THREADS);
        desc.options.node_ranks = 2;
        desc.options.log_level = DTRAIN_LOG_WARNING;
        desc.options.log = count_warnings;
        warnings = 0;
        CHECK(ranks_launch(&desc, rank_meshes, &size, NULL) == DTRAIN_OK);
        CHECK_MSG(warnings == (size.tensor > 2), "tensor %d: %d warnings", size.tensor, warnings);
        if (size.tensor == 4) CHECK_MSG(strstr(warned, "tensor axis of 4 ranks"), "%s", warned);
    }
}

/* The allocator fails at call n, for every n: an error on all ranks or none, and nothing is left. */
static int rank_short(dtrain_world *world, void *user)
{
    counted_memory *memory = (counted_memory *)user;
    const dtrain_mesh_desc desc = plan_desc(2, 0, 0, 0, 0);
    dtrain_mesh *mesh;
    const dtrain_result result = dtrain_mesh_create(world, &desc, &mesh);
    CHECK((result == DTRAIN_OK) == (mesh != NULL));
    if (!memory->fail_at) CHECK(result == DTRAIN_OK);
    dtrain_mesh_destroy(mesh);
    return result != DTRAIN_OK;
}
/* What a mesh has taken is given back when it is destroyed, not only at the end of the world. */
static int rank_again(dtrain_world *world, void *user)
{
    const counted_memory *memory = (const counted_memory *)user;
    const dtrain_mesh_desc desc = plan_desc(2, 0, 2, 0, 0);
    long live = 0;
    for (int i = 0; i < 4; i++) {
        dtrain_mesh *mesh;
        RANKS_TRY(dtrain_mesh_create(world, &desc, &mesh));
        RANKS_TRY(dtrain_barrier(dtrain_world_comm(world)));
        const long held = __atomic_load_n(&memory->live, __ATOMIC_ACQUIRE);
        dtrain_mesh_destroy(mesh);
        RANKS_TRY(dtrain_barrier(dtrain_world_comm(world)));
        const long now = __atomic_load_n(&memory->live, __ATOMIC_ACQUIRE);
        if (i > 0) CHECK_MSG(now == live, "%ld blocks, %ld before", now, live);
        live = now;
        CHECK(held > live);
        RANKS_TRY(dtrain_barrier(dtrain_world_comm(world)));
    }
    return 0;
}

static void test_memory(void)
{
    counted_memory memory;
    dtrain_launch_desc desc = ranks_desc(8, DTRAIN_LAUNCH_THREADS);
    memset(&memory, 0, sizeof memory);
    desc.options.allocator = counted_allocator(&memory);
    CHECK(ranks_launch(&desc, rank_again, &memory, NULL) == DTRAIN_OK);
    for (long at = 0, last = 1; at <= last; at++) {
        memset(&memory, 0, sizeof memory);
        memory.fail_at = at;
        desc = ranks_desc(4, DTRAIN_LAUNCH_THREADS);
        desc.options.allocator = counted_allocator(&memory);
        const dtrain_result result = ranks_launch(&desc, rank_short, &memory, NULL);
        if (at == 0) last = memory.calls;
        CHECK((result == DTRAIN_OK) == (at == 0));
        CHECK_MSG(memory.live == 0 && memory.wrong == 0, "call %ld fails: %ld blocks are left", at,
                  memory.live);
    }
}

/* ---- shares of cuts ---- */

enum { MOST = 20000 };

static uint64_t random_state;
static int64_t below(int64_t limit)
{
    return (int64_t)ranks_random(&random_state, (uint64_t)limit);
}

/* The rank that has a place of the cut axis: the part of its component that it is in, counted off. */
static int naive_owner(const dtrain_cut *cut, int64_t whole, int ranks, int64_t place)
{
    const int64_t components = cut->components ? cut->components : 1;
    int64_t begin = 0, length = whole / components;
    for (int64_t i = 0; i < components; i++, begin += length) {
        if (cut->widths[0]) length = cut->widths[i];
        if (place < begin + length) break;
    }
    const int64_t parts = cut->parts ? cut->parts : length, part = (place - begin) * parts / length;
    int owner = 0;
    while (parts * (owner + 1) / ranks <= part) owner++;
    return owner;
}

/* All elements of the whole that a rank has, in order. */
static int64_t naive_share(const dtrain_cut *cut, const int64_t shape[4], int ranks, int rank,
                           int64_t *list)
{
    int64_t inner = 1, count = 1, n = 0;
    const int axis = (int)cut->axis - 1;
    for (int d = 0; d < 4 && shape[d]; d++) count *= shape[d];
    for (int d = 3; d > axis; d--) inner *= shape[d] ? shape[d] : 1;
    for (int64_t i = 0; i < count; i++)
        if (axis < 0 || naive_owner(cut, shape[axis], ranks, i / inner % shape[axis]) == rank)
            list[n++] = i;
    return n;
}

/* Draw a shape and a cut of it that fits `ranks`. */
static void draw_cut(dtrain_cut *cut, int64_t shape[4], int ranks)
{
    const int dims = 1 + (int)below(4);
    const bool heads = below(2), even = below(2);
    memset(cut, 0, sizeof *cut);
    for (int d = 0; d < 4; d++) shape[d] = d < dims ? 1 + below(5) : 0;
    cut->axis = dims == 1 ? (uint32_t)below(2) : (uint32_t)below(3);
    if (cut->axis == DTRAIN_CUT_NONE) return;
    cut->components = cut->axis == DTRAIN_CUT_COLUMNS ? (uint32_t)below(2) : (uint32_t)below(5);
    const int64_t components = cut->components ? cut->components : 1;
    if (heads) cut->parts = ranks + below(6);
    int64_t each = heads ? cut->parts * (1 + below(4)) : ranks + below(20), whole = 0;
    for (int64_t i = 0; i < components; i++) {
        if (!even) cut->widths[i] = each;
        whole += each;
        if (!even) each = heads ? cut->parts * (1 + below(4)) : ranks + below(20);
    }
    shape[cut->axis - 1] = whole;
}

static bool check_share(const dtrain_cut *cut, const int64_t shape[4], int ranks, uint64_t seed)
{
    static int64_t list[MOST];
    int64_t total = 0, all = 1, smallest = INT64_MAX, largest = 0;
    dtrain__share first;
    const int axis = (int)cut->axis - 1;
    for (int d = 0; d < 4 && shape[d]; d++) all *= shape[d];
    if (all > MOST) return true;
    if (!CHECK_MSG(dtrain__cut_check(cut, shape, ranks) == DTRAIN_OK, "seed %llu: %s",
                   (unsigned long long)seed, dtrain_last_error()))
        return false;
    for (int rank = 0; rank < ranks; rank++) {
        dtrain__share share;
        bool right = true;
        const int64_t count = naive_share(cut, shape, ranks, rank, list);
        int64_t product = 1, run;
        dtrain__share_of(cut, shape, ranks, rank, &share);
        for (int d = 0; d < 4 && share.shape[d]; d++) product *= share.shape[d];
        for (int d = 0; d < 4; d++) right = right && (d == axis || share.shape[d] == shape[d]);
        right = right && share.count == count && product == count && count > 0;
        for (int64_t i = 0; i < count && right; i++) {
            int64_t next = i + 1;
            while (next < count && list[next] == list[next - 1] + 1) next++;
            right = dtrain__share_place(&share, i, &run) == list[i] && run == next - i;
        }
        if (rank == 0) first = share;
        right = right && dtrain__share_same(&share, &share) &&
                dtrain__share_same(&share, &first) == (rank == 0 || axis < 0);
        if (!CHECK_MSG(right, "seed %llu: rank %d of %d", (unsigned long long)seed, rank, ranks))
            return false;
        total += count;
        if (count < smallest) smallest = count;
        if (count > largest) largest = count;
    }
    const int64_t components = cut->components ? cut->components : 1;
    if (axis >= 0) CHECK_MSG(total == all, "seed %llu: not all", (unsigned long long)seed);
    if (axis >= 0 && !cut->parts) /* as even as can be: one row or column more of each component */
        CHECK((largest - smallest) * shape[axis] <= components * all);
    return true;
}

static void test_shares(void)
{
    const uint64_t first = test_seed(), count = test_draws(4000, 40000, 400000);
    bool good = true;
    for (uint64_t i = 0; i < count && good; i++) {
        dtrain_cut cut;
        int64_t shape[4];
        random_state = first + i;
        const int ranks = 1 + (int)below(8);
        draw_cut(&cut, shape, ranks);
        good = check_share(&cut, shape, ranks, first + i);
    }
    static const int64_t vocabulary[4] = {50257, 0, 0, 0};
    dtrain_cut cut;
    dtrain__share share;
    memset(&cut, 0, sizeof cut);
    cut.axis = DTRAIN_CUT_ROWS;
    for (int rank = 0; rank < 3; rank++) { /* 50257 over 3 */
        static const int64_t begin[4] = {0, 16752, 33504, 50257};
        dtrain__share_of(&cut, vocabulary, 3, rank, &share);
        CHECK(share.first[0] == begin[rank] && share.count == begin[rank + 1] - begin[rank]);
    }
}

static void test_wrong_cuts(void)
{
    static const struct {
        dtrain_cut cut;
        int64_t shape[4];
        int ranks;
        const char *sentence;
    } wrong[] = {
        {{3, 0, 0, {0}}, {8, 8, 0, 0}, 2, "cut.axis is 3"},
        {{DTRAIN_CUT_COLUMNS, 0, 0, {0}}, {8, 0, 0, 0}, 2, "columns of a shape of two axes"},
        {{DTRAIN_CUT_ROWS, 5, 0, {0}}, {10, 0, 0, 0}, 2, "cut.components is 5"},
        {{DTRAIN_CUT_COLUMNS, 2, 0, {0}}, {8, 8, 0, 0}, 2, "at most 1 components"},
        {{DTRAIN_CUT_ROWS, 0, -1, {0}}, {8, 0, 0, 0}, 2, "cut.parts -1"},
        {{DTRAIN_CUT_ROWS, 3, 0, {0}}, {10, 4, 0, 0}, 2, "have 9 of 10 rows"},
        {{DTRAIN_CUT_ROWS, 2, 0, {6, 6}}, {10, 4, 0, 0}, 2, "have 12 of 10 rows"},
        {{DTRAIN_CUT_ROWS, 2, 0, {6, 2}}, {10, 4, 0, 0}, 2, "have 8 of 10 rows"},
        {{DTRAIN_CUT_ROWS, 0, 0, {6, 4}}, {10, 4, 0, 0}, 2, "have 6 of 10 rows"},
        {{DTRAIN_CUT_COLUMNS, 0, 0, {6}}, {4, 10, 0, 0}, 2, "have 6 of 10 columns"},
        {{DTRAIN_CUT_ROWS, 2, 0, {10, 0}},
         {10, 4, 0, 0},
         2,
         "component 1 of its cut has a width of 0, expected 1 to 10"},
        {{DTRAIN_CUT_ROWS, 2, 0, {8, -2}},
         {10, 4, 0, 0},
         2,
         "component 1 of its cut has a width of -2, expected 1 to 10"},
        {{DTRAIN_CUT_ROWS, 2, 0, {0, 5}},
         {10, 4, 0, 0},
         2,
         "component 0 of its cut has a width of 0, expected 1 to 10"},
        {{DTRAIN_CUT_ROWS, 4, 0, {INT64_MAX, INT64_MAX, INT64_MAX, INT64_MAX}},
         {10, 4, 0, 0},
         2,
         "9223372036854775807, expected 1 to 10 (rows in all)"},
        {{DTRAIN_CUT_ROWS, 0, 3, {0}}, {10, 4, 0, 0}, 2, "10 long, which does not divide into 3"},
        {{DTRAIN_CUT_ROWS, 3, 4, {0}}, {36, 4, 0, 0}, 8, "has 4 parts"},
        {{DTRAIN_CUT_ROWS, 3, 4, {0}}, {36, 4, 0, 0}, 8, "axis 8 ranks"},
        {{DTRAIN_CUT_COLUMNS, 0, 0, {0}}, {36, 4, 0, 0}, 8, "4 parts (heads, or columns)"},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        CHECK_MSG(dtrain__cut_check(&wrong[i].cut, wrong[i].shape, wrong[i].ranks) != DTRAIN_OK,
                  "cut %zu is taken", i);
        CHECK_MSG(strstr(dtrain_last_error(), wrong[i].sentence), "%zu, \"%s\" is not in: %s", i,
                  wrong[i].sentence, dtrain_last_error());
    }
}

/* ---- initialisation ---- */

enum { PARAMS = 7, ELEMENTS = 1500 };

/* What a transformer has: a table of an odd vocabulary, packed q|k|v of grouped queries in heads, their bias, a weight
 * cut by columns, one that stays whole, and an alias. Each has at least 8 parts. */
static void make_params(dtrain_param params[PARAMS])
{
    static const char *const names[PARAMS] = {"wte",  "qkv",  "qkv.b", "proj",
                                              "norm", "four", "head"};
    static const int64_t shapes[PARAMS][4] = {{53, 12, 0, 0}, {96, 10, 0, 0}, {96, 0, 0, 0},
                                              {12, 67, 0, 0}, {12, 0, 0, 0},  {3, 19, 2, 5},
                                              {53, 12, 0, 0}};
    memset(params, 0, PARAMS * sizeof *params);
    for (int i = 0; i < PARAMS; i++) {
        dtrain_param *p = &params[i];
        p->name = names[i];
        memcpy(p->shape, shapes[i], sizeof p->shape);
        p->unit = (uint32_t)i / 2;
        p->init = i % 2 ? DTRAIN_INIT_UNIFORM : DTRAIN_INIT_NORMAL;
        p->init_scale = 0.25f;
        p->cut.axis = i == 4             ? DTRAIN_CUT_NONE
                      : i == 3 || i == 5 ? DTRAIN_CUT_COLUMNS
                                         : DTRAIN_CUT_ROWS;
    }
    for (int i = 1; i <= 2;
         i++) { /* 16 heads of 4 in 8 groups, whose keys and values have one of 2 each */
        params[i].cut.components = 3;
        params[i].cut.parts = 8;
        params[i].cut.widths[0] = 64;
        params[i].cut.widths[1] = params[i].cut.widths[2] = 16;
    }
    params[0].init_count = 50 * 12 + 5; /* rows of padding, and a row that is cut in two */
    params[2].init = DTRAIN_INIT_CONSTANT;
    params[6].alias_of = &params[0];
    params[6].unit = params[0].unit;
}

typedef struct initial {
    float whole[PARAMS][ELEMENTS]; /* as one rank has them, without a mesh */
    int tensor;                    /* 0: fill in whole */
    uint32_t kind;
} initial;

static int rank_initial(dtrain_world *world, void *user)
{
    initial *seen = (initial *)user;
    const dtrain_mesh_desc shape = plan_desc(seen->tensor, 0, 0, 0, 0);
    dtrain_param params[PARAMS];
    dtrain_strategy_desc desc;
    dtrain_mesh_info at;
    dtrain_mesh *mesh = NULL;
    dtrain_strategy *strategy;
    const dtrain_shard *shards;
    size_t shard_count;
    make_params(params);
    memset(&desc, 0, sizeof desc);
    memset(&at, 0, sizeof at);
    at.tensor = 1;
    if (seen->tensor) RANKS_TRY(dtrain_mesh_create(world, &shape, &mesh));
    if (mesh) dtrain_mesh_query(mesh, &at);
    desc.kind = seen->kind;
    desc.init_seed = 77;
    desc.mesh = mesh;
    if (desc.kind == DTRAIN_STRATEGY_HYBRID_SHARD) desc.node_size = 2;
    RANKS_TRY(dtrain_strategy_create(world, params, PARAMS, &desc, &strategy));
    RANKS_TRY(dtrain_strategy_shards(strategy, &shards, &shard_count));
    for (int i = 0; i < PARAMS; i++) {
        const dtrain_param *p = &params[i];
        int64_t places[ELEMENTS], wrong = 0, held = 0;
        const int64_t count = naive_share(&p->cut, p->shape, at.tensor, at.tensor_rank, places);
        if (!CHECK_MSG(p->count == count, "\"%s\": %lld, expected %lld", p->name,
                       (long long)p->count, (long long)count))
            return 1;
        if (!mesh) RANKS_TRY(dtrain_strategy_read(strategy, (size_t)i, seen->whole[i]));
        for (size_t k = 0; k < shard_count; k++) {
            if (shards[k].param != p) continue;
            held += shards[k].count;
            for (int64_t n = 0; n < shards[k].count; n++)
                wrong += memcmp(&shards[k].value[n], &seen->whole[i][places[shards[k].offset + n]],
                                sizeof(float)) != 0;
        }
        CHECK_MSG(wrong == 0, "kind %u, tensor %d x data %d: %lld of \"%s\" differ", seen->kind,
                  at.tensor, at.data, (long long)wrong, p->name);
        if (!mesh || p->alias_of) continue;
        RANKS_TRY(dtrain_all_reduce(dtrain_mesh_comm(mesh, DTRAIN_AXIS_DATA), &held, &held, 1,
                                    DTRAIN_DTYPE_I64, DTRAIN_REDUCE_SUM, NULL));
        CHECK(held == count * (seen->kind == DTRAIN_STRATEGY_DDP ? at.data : 1)); /* all of it */
    }
    dtrain_strategy_destroy(strategy);
    dtrain_mesh_destroy(mesh);
    return 0;
}

static void test_initial_values(void)
{
    static initial seen; /* shared: ranks are threads */
    seen.kind = DTRAIN_STRATEGY_DDP;
    ranks_run(1, DTRAIN_LAUNCH_THREADS, rank_initial, &seen);
    for (int64_t i = 0; i < 53 * 12; i++) { /* what one rank has is drawn by place */
        const float drawn = 0.25f * dtrain_random_normal(77, 0, (uint64_t)i);
        CHECK(seen.whole[0][i] == (i < 50 * 12 + 5 ? drawn : 0));
    }
    CHECK(seen.whole[2][95] == 0.25f && memcmp(seen.whole[6], seen.whole[0], 53 * 12 * 4) == 0);
    for (int t = 1; t <= 8; t++)
        for (int d = 1; d <= 2; d++)
            for (uint32_t kind = DTRAIN_STRATEGY_DDP; kind <= DTRAIN_STRATEGY_HYBRID_SHARD;
                 kind++) {
                if (kind == DTRAIN_STRATEGY_HYBRID_SHARD && d == 1) continue;
                if (TEST_RACES && t != 3) continue;
                seen.tensor = t;
                seen.kind = kind;
                ranks_run(t * d, DTRAIN_LAUNCH_THREADS, rank_initial, &seen);
            }
}

/* What cannot be cut is an error on every rank that names the parameter and both numbers. */
static int rank_cannot(dtrain_world *world, void *user)
{
    static const char *const sentences[] = {"its cut has 2 parts (heads, or rows) to share",
                                            "parameter 0 (\"wte\"): it has a cut",
                                            "an alias of \"wte\", which has a cut"};
    const dtrain_mesh_desc shape = plan_desc(4, 0, 0, 0, 0);
    dtrain_mesh *mesh;
    (void)user;
    RANKS_TRY(dtrain_mesh_create(world, &shape, &mesh));
    for (int i = 0; i < 3; i++) {
        dtrain_param params[PARAMS];
        dtrain_strategy_desc desc;
        dtrain_strategy *strategy;
        memset(&desc, 0, sizeof desc);
        desc.mesh = mesh;
        make_params(params);
        if (i == 0) params[1].cut.parts = 2;
        if (i == 1) params[0].shape[0] = params[0].shape[1] = 0, params[0].count = 53 * 12;
        if (i == 2) params[6].shape[0] = 12, params[6].shape[1] = 53;
        CHECK(dtrain_strategy_create(world, params, PARAMS, &desc, &strategy) != DTRAIN_OK);
        CHECK_MSG(strstr(dtrain_last_error(), sentences[i]), "%d: %s", i, dtrain_last_error());
    }
    dtrain_mesh_destroy(mesh);
    return 0;
}
static void test_params_that_cannot_be_cut(void)
{
    ranks_run(4, DTRAIN_LAUNCH_THREADS, rank_cannot, NULL);
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    RUN(test_factorisations);
    RUN(test_wrong_meshes);
    RUN(test_communicators);
    RUN(test_megatron_groups);
    RUN(test_split_communicator);
    RUN(test_descs_that_differ);
    RUN(test_crossing_nodes);
    RUN(test_memory);
    RUN_NUMBERS(test_shares);
    RUN_NUMBERS(test_wrong_cuts);
    RUN(test_initial_values);
    RUN(test_params_that_cannot_be_cut);
    return test_summary();
}
