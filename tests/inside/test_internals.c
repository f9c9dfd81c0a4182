/* test_internals.c: what cannot be seen from outside: the layout of buckets, two reports at one moment, the
 * unit that a kernel runs in, the trainer's seeds, schedules and its books about stragglers, clocks that differ. One
 * program, because the implementation has to be compiled into it once more. */
#include "train/micro_batch.c"
#include "train/record.c"
#include "train/trainer.c"
#include "parallel/mesh_internal.h"
#include "strategy/layout_internal.h"
#include "dtrain.h"
#include "test.h"
#include "packed_attention.h"
#include "naive_device.h"
#include "ranks.h"
#include "names.h"

/* ---- copies ---- */

/* Of every length around some lines, from and to every alignment, past the cache or not; what lies beside stays. */
static void test_copy_lines(void)
{
    static char from[400], to[400], wanted[400];
    for (int i = 0; i < 400; i++) from[i] = (char)(i * 7 + 1);
    for (int shift = 0; shift < 32; shift++)
        for (size_t bytes = 0; bytes < 300; bytes += bytes < 140 ? 1 : 37)
            for (int past = 0; past < 2; past++) {
                memset(to, -1, sizeof to);
                memset(wanted, -1, sizeof wanted);
                memcpy(wanted + shift, from + shift * 5 % 32, bytes);
                dtrain__copy_lines(to + shift, from + shift * 5 % 32, bytes, past);
                CHECK_MSG(memcmp(to, wanted, sizeof to) == 0, "%zu bytes, %d, past %d", bytes,
                          shift, past);
            }
}

/* ---- buckets ---- */

/* DDP's buckets: one after the other, last parameter first, each gradient on a cache line. */
static void test_bucket_plan(void)
{
    static const int64_t counts[] = {100, 1, 0, 16, 17, 300, 5};
    enum { N = 7 };
    const dtrain_allocator allocator = dtrain__resolve_allocator(NULL);
    for (size_t cap = 1; cap < 4000; cap = cap * 3 + 1) {
        dtrain_param p[N];
        dtrain__layout layout;
        dtrain_strategy_desc desc = {0};
        int64_t next = 0, total = 0;
        size_t bucket = 0;
        desc.kind = DTRAIN_STRATEGY_DDP;
        desc.bucket_bytes = cap;
        for (size_t i = 0; i < N; i++) {
            p[i] = ranks_param("x", NULL, NULL, counts[i], 0);
            p[i].state.storage = &p[i];
            p[i].state.index = (uint32_t)i;
            p[i].count = counts[i];
        }
        p[3].flags = DTRAIN_PARAM_FROZEN;
        CHECK(dtrain__layout_make(&layout, &allocator, p, N, &desc, 1, 0) == DTRAIN_OK);
        for (size_t i = N; i-- > 0;) {
            const dtrain__entry *entry = &layout.entries[i];
            if (i == 3) continue;
            const size_t own = (size_t)(entry->bucket - layout.buckets);
            if (own != bucket) next = 0;
            CHECK(own == bucket || own == bucket + 1);
            CHECK(entry->offset == next && next % 16 == 0);
            bucket = own;
            next += (counts[i] + 15) / 16 * 16;
        }
        for (size_t b = 0; b < layout.bucket_count; b++) {
            const size_t limit = cap;
            size_t inside = 0;
            for (size_t k = 0; k < N; k++)
                inside += k != 3 && counts[k] && layout.entries[k].bucket == &layout.buckets[b];
            CHECK((size_t)layout.buckets[b].count * 4 <= limit || inside == 1);
            total += layout.buckets[b].count;
        }
        CHECK(total == 112 + 16 + 32 + 304 + 16 && !layout.entries[3].trainable);
        dtrain__layout_free(&layout, &allocator);
    }
}

/* ---- reports ---- */

/* Two ranks report at the same moment: rank 1 writes, as slowly as can be, and rank 0 comes second.
 * What rank 0 sees behind its own report must be rank 1's. */
static int rank_reports_second(dtrain_world *world, void *user)
{
    dtrain__abort_record *report = &world->control->aborted;
    char mine = 0, all[2];
    (void)user;
    if (dtrain_world_rank(world) == 1) dtrain__store(&report->state, 1);
    RANKS_TRY(dtrain_world_all_gather(world, &mine, 1, all));
    if (dtrain_world_rank(world) == 1) {
        ranks_sleep_us(20000);
        report->rank = 1;
        report->code = DTRAIN_ERROR_TIMEOUT;
        snprintf(report->text, sizeof report->text, "the first report");
        dtrain__store(&report->state, 2);
        return 0;
    }
    dtrain_world_abort(world, DTRAIN_ERROR_TIMEOUT, "the second report");
    CHECK(dtrain_world_poll(world) == DTRAIN_ERROR_PEER &&
          strstr(dtrain_last_error(), "the first report"));
    return 0;
}

static void test_reports_together(void)
{
    dtrain_launch_desc desc = ranks_desc(2, DTRAIN_LAUNCH_THREADS);
    (void)ranks_launch(&desc, rank_reports_second, NULL, NULL);
    desc = ranks_desc(2, DTRAIN_LAUNCH_PROCESSES);
    (void)ranks_launch(&desc, rank_reports_second, NULL, NULL);
}

/* ---- units ---- */

enum { UNITS = 5, WIDTH = 8, TOKENS = 6 };

static const dtrain_tape *watched_tape;
static int64_t seen_units[64];
static int seen_count;
static dtrain_result watching_gemm(dtrain_device *device, const dtrain_gemm_args *args)
{
    seen_units[seen_count++ % 64] = watched_tape->unit;
    return naive_gemm(device, args);
}
static dtrain_result watching_attention(dtrain_device *device, const dtrain_attention_args *args)
{
    seen_units[seen_count++ % 64] = watched_tape->unit;
    return naive_attention(device, args);
}
static dtrain_result watching_embedding_backward(dtrain_device *device,
                                                 const dtrain_embedding_backward_args *args)
{
    seen_units[seen_count++ % 64] = watched_tape->unit;
    return naive_embedding_backward(device, args);
}

/* An embedding in unit 0, and a linear layer with attention in each of the others. */
typedef struct column {
    dtrain_param params[UNITS];
    float memory[2][UNITS][3 * WIDTH * WIDTH];
    int32_t tokens[TOKENS];
} column;

static dtrain_tensor *column_loss(dtrain_tape *tape, column *c)
{
    const int64_t shape[1] = {TOKENS};
    dtrain_tensor *x = dtrain_tape_input(tape, DTRAIN_DTYPE_I32, 1, shape, c->tokens, false);
    dtrain_tape_unit(tape, 0);
    x = dtrain_embedding(tape, x, &c->params[0], NULL);
    for (uint32_t u = 1; u < UNITS; u++) {
        dtrain_tape_unit(tape, u);
        x = dtrain_linear(tape, x, &c->params[u], NULL, DTRAIN_ACTIVATION_NONE);
        x = causal_attention(tape, x, TOKENS, 2);
    }
    return dtrain_mean(tape, x);
}

/* Trains one step on a device whose kernel `watch` is replaced, and compares the units it ran in. */
static void check_units(const dtrain_device_ops *ops, uint32_t recompute_every,
                        const int64_t *expected, int count)
{
    static column c;
    dtrain_device_desc desc;
    dtrain_device *device = NULL;
    dtrain_tape *tape = NULL;
    memset(&c, 0, sizeof c);
    for (int u = 0; u < UNITS; u++)
        c.params[u] = ranks_param("w", c.memory[0][u], c.memory[1][u], u ? 3 * WIDTH : 20, WIDTH);
    memset(&desc, 0, sizeof desc);
    CHECK(dtrain_device_create(ops, &desc, &device) == DTRAIN_OK);
    CHECK(dtrain_tape_create(NULL, NULL, device, &tape) == DTRAIN_OK);
    CHECK(dtrain_tape_recompute(tape, recompute_every, 0) == DTRAIN_OK);
    watched_tape = tape;
    seen_count = 0;
    dtrain_tape_begin(tape, 0, 1);
    CHECK(dtrain_tape_backward(tape, column_loss(tape, &c), 1) == DTRAIN_OK);
    CHECK_MSG(seen_count == count, "%d kernels, expected %d", seen_count, count);
    for (int i = 0; i < count; i++)
        CHECK_MSG(seen_units[i] == expected[i], "kernel %d ran in unit %d", i, (int)seen_units[i]);
    CHECK(tape->unit == -1);
    dtrain_tape_begin(tape, DTRAIN_TAPE_NO_GRAD, 0);
    column_loss(tape, &c);
    CHECK(tape->unit == UNITS - 1); /* only the next begin says that a forward pass has ended */
    dtrain_tape_begin(tape, 0, 0);
    CHECK(tape->unit == -1);
    dtrain_tape_destroy(tape);
    dtrain_device_destroy(device);
}

static void test_units(void)
{
    static const int64_t gemms[] = {1, 2, 3, 4, /* backward */ 4, 4, 3, 3, 2, 2, 1, 1, 0};
    static const int64_t attentions[] = {1, 2, 3, 4, /* made again in backward */ 2, 1};
    dtrain_device_ops ops = *naive_device_ops();
    ops.gemm = watching_gemm;
    ops.embedding_backward = watching_embedding_backward;
    check_units(&ops, 0, gemms, 13);
    ops = *naive_device_ops();
    ops.attention = watching_attention;
    check_units(&ops, 1, attentions, 6);
}

/* ---- the trainer ---- */

static void test_dropout_seeds_differ(void)
{
    uint64_t seeds[2 * 3 * 4];
    dtrain_trainer trainer;
    memset(&trainer, 0, sizeof trainer);
    trainer.desc.micro_batches = 3;
    int count = 0;
    for (trainer.data_rank = 0; trainer.data_rank < 2; trainer.data_rank++)
        for (trainer.step = 0; trainer.step < 4; trainer.step++)
            for (uint32_t micro = 0; micro < 3; micro++) {
                seeds[count++] = dtrain__pass_seed(&trainer, micro);
                for (int i = 0; i < count - 1; i++) CHECK(seeds[i] != seeds[count - 1]);
            }
}

/* The counting itself, without a clock: nine slow steps, a break, another rank, and so on. */
static void test_straggler_counting(void)
{
    dtrain__rank_words words[3];
    double compute[3];
    bool named[3] = {false, false, false};
    dtrain_trainer t;
    memset(words, 0, sizeof words);
    dtrain_comm nobody; /* without ranks: no name is looked up */
    dtrain_step_record record;
    memset(&t, 0, sizeof t);
    memset(&nobody, 0, sizeof nobody);
    memset(&record, 0, sizeof record);
    t.groups.all = &nobody;
    t.words = words, t.compute = compute, t.named = named, t.ranks = 3, t.slow_rank = -1;
    t.rank = 1; /* warnings are rank 0's; here only the books are looked at */
    for (int step = 0; step < 60; step++) {
        int slow = step < 9 ? 2 : step == 9 ? -1 : step < 25 ? 0 : step < 30 ? 2 : 0;
        for (int r = 0; r < 3; r++) {
            words[r][DTRAIN__WORD_STEP] = 1.0f;
            words[r][DTRAIN__WORD_EXPOSED_COMM] = r == slow ? 0.1f : 0.7f;
        }
        record.figure_count = 0;
        dtrain__straggler(&t, &record);
        CHECK_CLOSE(dtrain_record_value(&record, "straggler_score"), slow < 0 ? 1 : 3, 1e-5);
        if (slow >= 0) CHECK(t.slow_rank == slow);
        CHECK(named[0] == (step >= 19) && !named[1] && !named[2]);
    }
}

/* Two models of two parts each: ranks 1 and 3 end a pipeline, and see the losses that count. */
static int rank_of_a_model(dtrain_world *world, void *user)
{
    const int rank = dtrain_world_rank(world), size = dtrain_world_size(world);
    dtrain__rank_words words[4];
    float shares[4 * DTRAIN__FIGURE_WORDS];
    double own[DTRAIN__WORD_COUNT] = {0}, compute[4];
    bool named[4] = {false, false, false, false};
    dtrain__micro micros[3];
    dtrain_step_record record;
    dtrain_trainer t;
    dtrain_tape tape;
    (void)user;
    memset(&tape, 0, sizeof tape);
    memset(words, 0, sizeof words);
    memset(micros, 0, sizeof micros);
    memset(&t, 0, sizeof t);
    memset(&record, 0, sizeof record);
    t.groups = dtrain__mesh_groups(world, NULL, NULL);
    RANKS_TRY(dtrain_comm_split(t.groups.all, rank / 2, 0, &t.groups.model));
    RANKS_TRY(dtrain_comm_split(t.groups.all, rank % 2, 0, &t.groups.data));
    t.loss_counts = rank % 2 == 1;
    t.words = words, t.compute = compute, t.named = named, t.rank = rank, t.ranks = size;
    t.shares = shares;
    t.data_ranks = dtrain_comm_size(t.groups.data);
    t.desc.micro_batches = 3, t.desc.tokens = 5;
    t.tape = &tape, t.micros = micros;
    micros[0].loss = rank == 1 ? 8.0f : rank == 3 ? 2.0f : 100;
    micros[0].weight = rank == 1 ? 2 : 1;
    dtrain__put_loss(&t, own);
    RANKS_TRY(dtrain__record_complete(&t, own, &record));
    CHECK_CLOSE(record.loss, (2 * 8.0 + 1 * 2.0) / 3, 1e-6);
    CHECK(record.tokens == 2 * 3 * 5 && record.ranks == 4);
    dtrain_comm_destroy(t.groups.data);
    dtrain_comm_destroy(t.groups.model);
    return 0;
}

/* Two stages on two ranks each, or four stages. */
static int rank_of_a_pipeline(dtrain_world *world, void *user)
{
    static const char *const names[4] = {"a", "b", "c", "d"};
    const uint32_t kind = *(const uint32_t *)user;
    const dtrain_pipeline_desc pipeline = {kind, 0, NULL};
    dtrain_strategy_desc desc = {0};
    dtrain_mesh_desc axes = {0};
    dtrain_mesh *mesh;
    dtrain_strategy *strategy;
    dtrain_param params[4];
    for (uint32_t u = 0; u < 4; u++) {
        params[u] = ranks_param(names[u], NULL, NULL, 2, 2);
        params[u].init = DTRAIN_INIT_CONSTANT;
        params[u].unit = u;
    }
    axes.tensor = axes.pipeline = 2;
    RANKS_TRY(dtrain_mesh_create(world, &axes, &mesh));
    desc.mesh = mesh, desc.pipeline = &pipeline;
    RANKS_TRY(dtrain_strategy_create(world, params, 4, &desc, &strategy));
    CHECK(dtrain__loss_counts(strategy) == (dtrain_world_rank(world) == 3));
    dtrain_strategy_destroy(strategy);
    dtrain_mesh_destroy(mesh);
    return 0;
}

static void test_whose_loss_counts(void)
{
    uint32_t kinds[] = {DTRAIN_PIPELINE_1F1B, DTRAIN_PIPELINE_INTERLEAVED};
    ranks_run(4, DTRAIN_LAUNCH_THREADS, rank_of_a_model, NULL);
    for (int k = 0; k < 2; k++) ranks_run(4, DTRAIN_LAUNCH_THREADS, rank_of_a_pipeline, &kinds[k]);
}

/* ---- clocks ---- */

/* Rank 1 leaves, and its clock turns out to be another one than rank 0's, far behind or ahead: what it has sent is
 * still waited for. */
static int rank_sees_the_other_leave(dtrain_world *world, void *user)
{
    dtrain__exit_record *record = &world->control->exits[1];
    (void)user;
    if (dtrain_world_rank(world) == 1) return 0;
    for (int i = 0; i < 10000 && dtrain__load(&record->how) != DTRAIN__LEFT; i++)
        ranks_sleep_us(1000);
    record->ended_ns -= UINT64_C(5000000000000);
    CHECK_MSG(dtrain_world_poll(world) == DTRAIN_OK, "%s", dtrain_last_error());
    record->ended_ns += UINT64_C(10000000000000);
    CHECK(!dtrain__left_for(world, 1, UINT64_C(60000000000)));
    CHECK(dtrain__left_for(world, 1, 0) && !dtrain__left_for(world, 0, 0));
    return 0;
}
static void test_clocks_differ(void)
{
    ranks_run(2, DTRAIN_LAUNCH_THREADS, rank_sees_the_other_leave, NULL);
}

/* ---- limits of control groups ---- */

/* Files as Slurm, systemd and Docker make them, at any height, of both versions. */
static void test_group_memory(void)
{
    static const struct {
        const char *make; /* commands in the folder that stands for /sys/fs/cgroup */
        const char *groups;
        uint64_t rest;
    } cases[] = {
        {"true", "0::/", UINT64_MAX},
        {"echo 1000 >memory.max; echo 300 >memory.current", "0::/", 700},
        {"echo 1000 >memory.max; echo 300 >memory.current", "0::/not/here", 700},
        {"mkdir -p a/b; echo max >a/b/memory.max; echo 3 >a/b/memory.current; echo 500 "
         ">a/memory.max; echo 100 >a/memory.current",
         "0::/a/b", 400},
        {"mkdir -p a/b; echo 50 >a/b/memory.max; echo 30 >a/b/memory.current; printf "
         "'inactive_file 5\\nactive_file 4\\n' >a/b/memory.stat; echo 500 >a/memory.max; echo 100 "
         ">a/memory.current",
         "0::/a/b", 29},
        {"mkdir -p memory/slurm/job; echo 900 >memory/slurm/memory.limit_in_bytes; echo 100 "
         ">memory/slurm/memory.usage_in_bytes",
         "5:cpu,cpuacct:/x\n4:hugetlb,memory:/slurm/job\n0::/", 800},
        {"mkdir -p memory; echo 10 >memory/memory.limit_in_bytes; echo 20 "
         ">memory/memory.usage_in_bytes",
         "3:memory:/docker/1\n", 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char folder[] = "/tmp/dtrain_groups_XXXXXX", command[700], groups[64];
        if (!CHECK(mkdtemp(folder))) return;
        snprintf(command, sizeof command, "cd %s && { %s; } && printf '%s' >groups", folder,
                 cases[i].make, cases[i].groups);
        CHECK(system(command) == 0);
        snprintf(groups, sizeof groups, "%s/groups", folder);
        const uint64_t rest = dtrain__group_memory(groups, folder);
        CHECK_MSG(rest == cases[i].rest, "case %zu: %llu bytes, expected %llu", i,
                  (unsigned long long)rest, (unsigned long long)cases[i].rest);
        snprintf(command, sizeof command, "rm -r %s", folder);
        CHECK(system(command) == 0);
    }
}

/* ---- names that are cut ---- */

/* Write a random name: ASCII, accents and Chinese, of 1 to 511 bytes. */
static void random_name(uint64_t *seed, char name[NAMES_BYTES])
{
    static const char *const parts[] = {
        "a", ".", "7", "\xc3\xa9", "\xc3\xa8", "\xe8\xaa\x9e", "\xf0\x9f\x98\x80"};
    const size_t most = 1 + (size_t)(ranks_mix((*seed)++) % 508);
    for (name[0] = 0; strlen(name) < most;)
        strcat(name, parts[ranks_mix((*seed)++) % (sizeof parts / sizeof *parts)]);
}

/* A name that fits stays; one that does not is cut to whole characters, with its begin and its end; and two that
 * differ in one character, wherever it is, differ afterwards. */
static void test_names_are_cut(void)
{
    uint64_t seed = test_seed();
    char name[2][NAMES_BYTES], to[2][NAMES_BYTES];
    for (int i = 0; i < 20000; i++) {
        const size_t room = 40 + (size_t)(ranks_mix(seed++) % 200);
        random_name(&seed, name[0]);
        const size_t bytes = strlen(name[0]), at = (size_t)(ranks_mix(seed++) % bytes);
        strcpy(name[1], name[0]);
        if ((unsigned char)name[1][at] >= 0x80) continue;
        name[1][at] = name[1][at] == 'x' ? 'y' : 'x';
        for (int k = 0; k < 2; k++) {
            memset(to[k], '!', sizeof to[k]);
            CHECK(dtrain__name_cut(to[k], room, name[k]) == to[k]);
            const size_t length = strlen(to[k]);
            CHECK_MSG(length < room && to[k][length + 1] == '!', "%zu bytes in %zu", length, room);
            for (size_t c = 0, n; c < length; c += n)
                if (!CHECK_MSG((n = dtrain__utf8_bytes(to[k] + c, length - c)) > 0, "%s", to[k]))
                    return;
            CHECK(bytes < room ? strcmp(to[k], name[k]) == 0 : length + 7 >= room);
            CHECK(to[k][length - 1] == name[k][bytes - 1] && to[k][0] == name[k][0]);
        }
        CHECK_MSG(strcmp(to[0], to[1]) != 0, "%s and %s are %s", name[0], name[1], to[0]);
    }
    for (int i = 0; i < NAMES_COUNT; i++)
        for (int k = 0; k < i; k++) {
            CHECK(strcmp(dtrain__short(names_all(i, name[0])),
                         dtrain__short(names_all(k, name[1]))) != 0);
        }
    CHECK(strcmp(dtrain__short(NULL), "") == 0);
    memset(name[0], 0x80, 300); /* no UTF-8 */
    name[0][300] = 0;
    CHECK(strncmp(dtrain__short(name[0]), "...", 3) == 0);
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    RUN(test_copy_lines);
    RUN(test_bucket_plan);
    RUN(test_reports_together);
    RUN(test_units);
    RUN(test_dropout_seeds_differ);
    RUN(test_straggler_counting);
    RUN(test_whose_loss_counts);
    RUN(test_clocks_differ);
    RUN(test_group_memory);
    RUN(test_names_are_cut);
    return test_summary();
}
