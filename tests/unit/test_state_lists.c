/* test_state_lists.c: ranks that list different tensors: stages of a pipeline, each with a strategy of its own, and
 * arrays cut by columns, by components and into runs. What some ranks save others load, cut in another way. Lists
 * that contradict one another or leave elements out are errors that name them. A checkpoint of version 0.2. */
#include "test.h"
#include "dtrain.h"
#include "ranks.h"

enum { LAYERS = 7, ARRAYS = 3, ITEMS = 512 };

typedef struct run {
    int ranks, stages;
    uint64_t seed;   /* of the cuts */
    bool replicated; /* DDP: every rank holds all of its stage */
    bool load;
    int bad; /* 1: ranks contradict one another; 2: a piece that nobody has; 3: one that overlaps another */
    char directory[64];
    dtrain_result ended[8];
    char error[8][1024];
    uint64_t bytes[8]; /* written */
} run;

static const int64_t shapes[ARRAYS][4] = {{6, 20, 0, 0}, {4, 3, 10, 0}, {2, 3, 4, 5}};
static const char *const array_names[ARRAYS] = {"q|k|v", "experts", "cube"};

/* What an element must be, anywhere. */
static float value_of(uint32_t kind, const char *name, int64_t element)
{
    uint64_t hash = kind + 1;
    for (; *name; name++) hash = ranks_mix(hash ^ (uint64_t)(unsigned char)*name);
    return (float)(ranks_mix(hash ^ (uint64_t)element) % 100000);
}

/* The element of the whole tensor that is number i of a piece: naive, coordinate by coordinate. */
static int64_t element_of(const dtrain_state_tensor *t, int64_t i)
{
    int64_t rest = t->piece.offset + i, element = 0, stride = 1;
    for (int d = 3; d >= 0; d--) {
        const int64_t length = t->piece.length[d] ? t->piece.length[d] : 1;
        element += (t->piece.first[d] + rest % length) * stride;
        rest /= length;
        stride *= t->shape[d] ? t->shape[d] : 1;
    }
    return element;
}

/* Fill all that this rank lists, or compare it. */
static dtrain_result walk(dtrain_world *world, dtrain_state *state, bool compare)
{
    const dtrain_state_tensor *tensors;
    size_t count, wrong = 0;
    const dtrain_result result = dtrain_state_tensors(state, &tensors, &count);
    for (size_t i = 0; i < count && result == DTRAIN_OK; i++) {
        const dtrain_state_tensor *t = &tensors[i];
        for (int64_t k = 0; k < t->piece.count; k++) {
            const float expected = value_of(t->kind, t->name, element_of(t, k));
            if (t->dtype == DTRAIN_DTYPE_I64) {
                int64_t *at = (int64_t *)t->memory + k;
                wrong += compare && *at != (int64_t)expected;
                *at = compare ? *at : (int64_t)expected;
            } else {
                float *at = (float *)t->memory + k;
                wrong += compare && *at != expected;
                *at = compare ? *at : expected;
            }
        }
        CHECK_MSG(!wrong, "rank %d: kind %u of \"%s\": %zu elements are wrong",
                  dtrain_world_rank(world), t->kind, t->name, wrong);
        wrong = 0;
    }
    return result;
}

/* List this rank's pieces of the arrays. Every rank cuts all of them in the same way. */
static size_t list_arrays(const run *r, int rank, float *memory, dtrain_state_item *items)
{
    uint64_t random = r->seed;
    size_t count = 0;
    int number = 0;
    for (int a = 0; a < ARRAYS; a++) {
        const int dims = shapes[a][3] ? 4 : shapes[a][2] ? 3 : 2;
        const int axis = (int)ranks_random(&random, (uint64_t)dims);
        for (int64_t first = 0, length; first < shapes[a][axis]; first += length) {
            dtrain_state_item item;
            memset(&item, 0, sizeof item);
            length = 1 + (int64_t)ranks_random(&random, (uint64_t)(shapes[a][axis] - first));
            memcpy(item.piece.length, shapes[a], sizeof item.piece.length);
            item.piece.first[axis] = first;
            item.piece.length[axis] = length;
            int64_t elements = 1;
            for (int d = 0; d < dims; d++) elements *= item.piece.length[d];
            for (int64_t done = 0; done < elements; done += item.count, number++) {
                const int owner = (int)ranks_random(&random, (uint64_t)r->ranks);
                const int other = (int)ranks_random(&random, (uint64_t)r->ranks);
                item.count = 1 + (int64_t)ranks_random(&random, (uint64_t)(elements - done));
                if (number % 3 == 0) item.count = elements - done; /* a whole box, more often */
                item.name = array_names[a];
                memcpy(item.shape, shapes[a], sizeof item.shape);
                item.piece.offset = done;
                item.piece.count = item.count;
                item.memory = memory;
                if (r->bad == 1 && a == 1 && rank == 1) item.shape[0]++;
                if (rank != owner && rank != other) continue;
                memory += item.count;
                if (r->bad == 2 && a == 2 && !done && !first) continue;
                if (CHECK(count + 2 < ITEMS)) items[count++] = item;
                if (r->bad != 3 || a != 0 || done || first || item.count < 2) continue;
                dtrain_state_item again = item;
                again.piece.offset++;
                again.piece.count = --again.count;
                items[count++] = again;
            }
        }
    }
    return count;
}

typedef struct rank_of {
    dtrain_param params[LAYERS];
    char names[LAYERS][64];
    float memory[4096];
    dtrain_state_item items[ITEMS];
    dtrain_comm *comm;
    dtrain_strategy *strategy;
    dtrain_optimizer *optimizer;
    dtrain_state *state;
    dtrain_checkpoint *checkpoint;
} rank_of;

static dtrain_result rank_run(dtrain_world *world, run *r, rank_of *s)
{
    const int rank = dtrain_world_rank(world), stage = rank * r->stages / r->ranks;
    const int first = stage * LAYERS / r->stages, end = (stage + 1) * LAYERS / r->stages;
    dtrain_strategy_desc how;
    dtrain_state_desc state;
    dtrain_checkpoint_desc save;
    dtrain_checkpoint_info info;
    memset(&how, 0, sizeof how);
    memset(&state, 0, sizeof state);
    memset(&save, 0, sizeof save);
    for (int i = first; i < end; i++) {
        dtrain_param *p = &s->params[i - first];
        snprintf(s->names[i], sizeof s->names[i], "model.layers.%d.post_attention_layernorm.weight",
                 i);
        p->name = s->names[i];
        p->unit = (uint32_t)(i - first);
        p->shape[0] = 3 + i;
        p->shape[1] = i % 2 ? 5 : 0;
    }
    TRY(dtrain_comm_split(dtrain_world_comm(world), stage, 0, &s->comm));
    how.kind = r->replicated ? DTRAIN_STRATEGY_DDP
               : r->seed % 2 ? DTRAIN_STRATEGY_FULL_SHARD
                             : DTRAIN_STRATEGY_ZERO1;
    how.comm = s->comm;
    TRY(dtrain_strategy_create(world, s->params, (size_t)(end - first), &how, &s->strategy));
    dtrain_optimizer_desc adam = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_ADAMW);
    TRY(dtrain_optimizer_create(world, s->strategy, &adam, &s->optimizer));
    state.strategy = s->strategy;
    state.optimizer = s->optimizer;
    state.comm = dtrain_world_comm(world);
    state.items = s->items;
    state.item_count = list_arrays(r, rank, s->memory, s->items);
    TRY(dtrain_state_create(world, &state, &s->state));
    if (r->load) {
        dtrain_load_info loaded;
        TRY(dtrain_checkpoint_load(s->state, r->directory, NULL, &loaded));
        CHECK_MSG(!loaded.note[0], "%s", loaded.note);
        return walk(world, s->state, true);
    }
    TRY(walk(world, s->state, false));
    TRY(dtrain_state_changed(s->state));
    save.directory = r->directory;
    save.state = s->state;
    TRY(dtrain_checkpoint_open(world, &save, &s->checkpoint));
    for (int i = 1; i <= 2; i++) TRY(dtrain_checkpoint_save(s->checkpoint, i, 0));
    dtrain_checkpoint_query(s->checkpoint, &info);
    r->bytes[rank] = info.bytes;
    return DTRAIN_OK;
}

static int rank_main(dtrain_world *world, void *user)
{
    run *r = (run *)user;
    const int rank = dtrain_world_rank(world);
    rank_of *s = (rank_of *)calloc(1, sizeof *s);
    if (!s) return 3;
    r->ended[rank] = rank_run(world, r, s);
    if (r->ended[rank] != DTRAIN_OK)
        snprintf(r->error[rank], sizeof r->error[0], "%s", dtrain_last_error());
    (void)dtrain_checkpoint_close(s->checkpoint);
    dtrain_state_destroy(s->state);
    dtrain_optimizer_destroy(s->optimizer);
    dtrain_strategy_destroy(s->strategy);
    dtrain_comm_destroy(s->comm);
    free(s);
    return 0;
}

static run *run_new(int ranks, int stages, uint64_t seed)
{
    run *r = (run *)ranks_shared(sizeof *r);
    r->ranks = ranks;
    r->stages = stages < ranks ? stages : ranks;
    r->seed = seed;
    return r;
}

static void directory_make(run *r)
{
    snprintf(r->directory, sizeof r->directory, "/tmp/dtrain_lists_XXXXXX");
    if (!mkdtemp(r->directory)) exit(3);
}

static void directory_remove(const run *r)
{
    char command[128];
    snprintf(command, sizeof command, "rm -rf %s", r->directory);
    CHECK(system(command) == 0);
}

static void go(run *r, const char *what, uint64_t seed)
{
    ranks_run(r->ranks, DTRAIN_LAUNCH_THREADS, rank_main, r);
    for (int i = 0; i < r->ranks; i++)
        CHECK_MSG(r->ended[i] == DTRAIN_OK, "seed %llu, %s, rank %d of %d in %d stages: %s",
                  (unsigned long long)seed, what, i, r->ranks, r->stages, r->error[i]);
}

static void test_lists_differ(void)
{
    const uint64_t first = test_seed(), count = test_full() ? 300 : 24;
    for (uint64_t seed = first; seed < first + count; seed++) {
        uint64_t random = seed;
        run *r[2];
        for (int i = 0; i < 2; i++) {
            const int ranks = 1 + (int)ranks_random(&random, 8);
            r[i] = run_new(ranks, 1 + (int)ranks_random(&random, 4), random);
        }
        directory_make(r[0]);
        memcpy(r[1]->directory, r[0]->directory, sizeof r[1]->directory);
        r[1]->load = true;
        go(r[0], "saving", seed);
        go(r[1], "loading", seed);
        directory_remove(r[0]);
        for (int i = 0; i < 2; i++) munmap(r[i], sizeof *r[i]);
    }
}

/* What all ranks hold is written once, by all of them in turn. */
static void test_writers_are_balanced(void)
{
    run *r = run_new(4, 1, 12);
    uint64_t least = UINT64_MAX, most = 0;
    r->replicated = true;
    directory_make(r);
    go(r, "saving", 0);
    for (int i = 0; i < 4; i++) {
        least = r->bytes[i] < least ? r->bytes[i] : least;
        most = r->bytes[i] > most ? r->bytes[i] : most;
    }
    CHECK_MSG(least > 0 && most < 2 * least, "ranks write %llu to %llu bytes",
              (unsigned long long)least, (unsigned long long)most);
    directory_remove(r);
}

static void test_contradictions(void)
{
    static const struct {
        dtrain_result result;
        const char *words[3];
    } cases[] = {
        {DTRAIN_ERROR_MISMATCH, {"\"experts\"", "rank 1: F32 [5, 3, 10, 0]", "F32 [4, 3, 10, 0]"}},
        {DTRAIN_ERROR_DATA, {"\"cube\"", "leave a hole", "of its 120 elements"}},
        {DTRAIN_ERROR_DATA, {"\"q|k|v\"", "overlap", "of its 120 elements"}}};
    for (int bad = 1; bad <= 3; bad++) {
        run *r = run_new(3, 2, 5);
        r->bad = bad;
        directory_make(r);
        ranks_run(r->ranks, DTRAIN_LAUNCH_THREADS, rank_main, r);
        for (int i = 0; i < 3; i++)
            for (int word = 0; word < 3; word++)
                CHECK_MSG(r->ended[i] == cases[bad - 1].result &&
                              strstr(r->error[i], "dtrain_checkpoint_open: ") &&
                              strstr(r->error[i], cases[bad - 1].words[word]),
                          "case %d, rank %d: %d, %s", bad, i, (int)r->ended[i], r->error[i]);
        directory_remove(r);
    }
}

/* Items that a state refuses, and an array of two pieces that it takes. */
static int items_main(dtrain_world *world, void *user)
{
    static const char *const says[] = {
        "items",          "with a name",    "and memory", "a dtype (found 99)",
        "no other piece", "no other piece", "expected 4", NULL};
    float values[4];
    dtrain_param p;
    dtrain_strategy *strategy;
    dtrain_strategy_desc how;
    (void)user;
    memset(&p, 0, sizeof p);
    memset(&how, 0, sizeof how);
    p.name = "w";
    p.shape[0] = 2;
    TRY(dtrain_strategy_create(world, &p, 1, &how, &strategy));
    for (int bad = 0; bad < 8; bad++) {
        dtrain_state_desc desc;
        dtrain_state_item items[2];
        dtrain_state *state;
        memset(&desc, 0, sizeof desc);
        memset(items, 0, sizeof items);
        desc.strategy = strategy;
        desc.items = bad == 0 ? NULL : items;
        desc.item_count = 2;
        for (int i = 0; i < 2; i++) { /* rows 2 i and 2 i + 1 of four */
            items[i].name = bad == 1 ? "" : "a";
            items[i].dtype = bad == 3 ? 99 : DTRAIN_DTYPE_F32;
            items[i].count = bad == 6 ? 4 : 2;
            items[i].memory = bad == 2 ? NULL : &values[2 * i];
            items[i].own = bad == 5 && i;
            items[i].shape[0] = 4;
            items[i].piece.first[0] = 2 * i;
            items[i].piece.length[0] = items[i].piece.count = bad == 4 ? 0 : 2;
        }
        if (bad == 4) items[0].count = items[1].count = 4;
        const dtrain_result result = dtrain_state_create(world, &desc, &state);
        CHECK_MSG(says[bad] ? result == DTRAIN_ERROR_ARGUMENT && !state &&
                                  strstr(dtrain_last_error(), says[bad])
                            : result == DTRAIN_OK,
                  "case %d: %d, %s", bad, (int)result, dtrain_last_error());
        dtrain_state_destroy(state);
    }
    dtrain_strategy_destroy(strategy);
    return 0;
}

static void test_items(void) { ranks_run(1, DTRAIN_LAUNCH_THREADS, items_main, NULL); }

/* ---- A program that stores the list by its own means ---- */

enum { MEANS_STEPS = 8, MEANS_AT = 4, MEANS_ENTRIES = 64, MEANS_BYTES = 8192 };

typedef struct means {
    uint32_t kind, optimizer;
    bool scaled, restores; /* from what an earlier run has left in `stored` */
    char stored[4][MEANS_ENTRIES][MEANS_BYTES];
    float values[4][640];
    double loss[MEANS_STEPS];
    uint64_t skipped;
} means;

typedef struct means_rank {
    dtrain_param params[3];
    int step, rank;
    bool scaled, biased;
    float input[12];
} means_rank;

static dtrain_result means_batch(void *user)
{
    means_rank *s = (means_rank *)user;
    for (int i = 0; i < 12; i++)
        s->input[i] =
            (float)(ranks_mix((uint64_t)(s->step * 4 + s->rank) * 99 + (uint64_t)i) % 100) / 50 - 1;
    return DTRAIN_OK;
}

/* In step 2 the loss is beyond fp32 where it is scaled: the scaler skips that step and the scale falls. */
static dtrain_tensor *means_loss(dtrain_tape *tape, void *user)
{
    means_rank *s = (means_rank *)user;
    const int64_t shape[2] = {2, 6};
    dtrain_tape_unit(tape, 0);
    dtrain_tensor *x = dtrain_tape_input(tape, DTRAIN_DTYPE_F32, 2, shape, s->input, false);
    x = dtrain_linear(tape, x, &s->params[0], s->biased ? &s->params[2] : NULL,
                      DTRAIN_ACTIVATION_GELU);
    dtrain_tape_unit(tape, 1);
    x = dtrain_linear(tape, x, &s->params[1], NULL, DTRAIN_ACTIVATION_NONE);
    x = dtrain_mean(tape, dtrain_multiply(tape, x, x));
    return s->scaled && s->step == 2 ? dtrain_scale(tape, x, 1e36f) : x;
}

/* Copy what is listed out of its memory, or into it. */
static dtrain_result means_copy(dtrain_state *state, char stored[][MEANS_BYTES], bool restores)
{
    const dtrain_state_tensor *t;
    size_t count;
    TRY(dtrain_state_tensors(state, &t, &count));
    CHECK(count <= MEANS_ENTRIES);
    for (size_t i = 0; i < count; i++) {
        const size_t bytes =
            (size_t)t[i].piece.count * dtrain_dtype_bytes((dtrain_dtype)t[i].dtype);
        CHECK(bytes <= MEANS_BYTES);
        if (bytes)
            memcpy(restores ? t[i].memory : stored[i], restores ? stored[i] : t[i].memory, bytes);
    }
    return DTRAIN_OK;
}

static dtrain_result means_train(dtrain_world *world, means *r, means_rank *s)
{
    static const int64_t shapes_of[3][2] = {{16, 6}, {5, 16}, {16, 0}};
    static const char *const names[3] = {"encoder.block.23.layer.1.DenseReluDense.wi_0.weight",
                                         "encoder.block.23.layer.1.DenseReluDense.wo.weight",
                                         "encoder.block.23.layer.1.DenseReluDense.wi_0.bias"};
    const int rank = s->rank = dtrain_world_rank(world);
    dtrain_strategy_desc how = {.kind = r->kind, .init_seed = r->restores ? 77 : 5};
    dtrain_optimizer_desc rule = dtrain_optimizer_defaults((dtrain_optimizer_kind)r->optimizer);
    dtrain_strategy *strategy;
    dtrain_optimizer *optimizer;
    dtrain_trainer *trainer;
    dtrain_state *state;
    s->scaled = r->scaled,
    s->biased = r->optimizer != DTRAIN_OPTIMIZER_MUON; /* which takes matrices only */
    const size_t count = s->biased ? 3 : 2;
    for (int i = 0; i < 3; i++) {
        dtrain_param *p = &s->params[i];
        p->name = names[i], p->unit = i == 1, p->init = DTRAIN_INIT_NORMAL, p->init_scale = 0.5f;
        memcpy(p->shape, shapes_of[i], sizeof shapes_of[i]);
    }
    if (r->optimizer == DTRAIN_OPTIMIZER_SGD) rule.momentum = 0.9f;
    TRY(dtrain_strategy_create(world, s->params, count, &how, &strategy));
    TRY(dtrain_optimizer_create(world, strategy, &rule, &optimizer));
    dtrain_trainer_desc desc = {.strategy = strategy,
                                .optimizer = optimizer,
                                .next_batch = means_batch,
                                .loss = means_loss,
                                .user = s,
                                .micro_batches = 1,
                                .tokens = 2};
    desc.schedule.lr = 0.01f, desc.schedule.warmup_steps = 6;
    if (r->scaled) desc.loss_scaling.scale = 4096, desc.loss_scaling.growth_interval = 2;
    TRY(dtrain_trainer_create(world, &desc, &trainer));
    const dtrain_state_desc of = {.strategy = strategy, .trainer = trainer};
    TRY(dtrain_state_create(world, &of, &state));
    if (r->restores) TRY(means_copy(state, r->stored[rank], true));
    if (r->restores) TRY(dtrain_state_changed(state));
    for (s->step = r->restores ? MEANS_AT : 0; s->step < MEANS_STEPS; s->step++) {
        dtrain_step_record record;
        if (s->step == MEANS_AT && !r->restores) TRY(means_copy(state, r->stored[rank], false));
        TRY(dtrain_trainer_step(trainer, &record));
        if (rank == 0) r->loss[s->step] = record.loss, r->skipped = record.skipped_steps;
    }
    float *to = r->values[rank];
    for (size_t i = 0; i < count; i++) {
        TRY(dtrain_strategy_read(strategy, i, to));
        to += shapes_of[i][0] * (shapes_of[i][1] ? shapes_of[i][1] : 1);
    }
    dtrain_state_destroy(state);
    dtrain_trainer_destroy(trainer);
    dtrain_optimizer_destroy(optimizer);
    dtrain_strategy_destroy(strategy);
    return DTRAIN_OK;
}

static int means_main(dtrain_world *world, void *user)
{
    means_rank s;
    memset(&s, 0, sizeof s);
    CHECK_MSG(means_train(world, (means *)user, &s) == DTRAIN_OK, "%s", dtrain_last_error());
    return 0;
}

/* A run goes on to the bit from a list that was copied by hand: moments, step counts, the loss scale. */
static void test_own_means(void)
{
    static const uint32_t kinds[] = {DTRAIN_STRATEGY_DDP, DTRAIN_STRATEGY_ZERO1,
                                     DTRAIN_STRATEGY_FULL_SHARD};
    static const uint32_t optimizers[] = {DTRAIN_OPTIMIZER_SGD, DTRAIN_OPTIMIZER_ADAMW,
                                          DTRAIN_OPTIMIZER_LION, DTRAIN_OPTIMIZER_MUON};
    for (uint32_t i = 0; i < 24; i++) {
        means *r = (means *)ranks_shared(sizeof *r), *goes_on = (means *)ranks_shared(sizeof *r);
        const int ranks = 1 + (int)((i + i / 12) % 3);
        r->kind = kinds[i / 4 % 3], r->optimizer = optimizers[i % 4], r->scaled = i >= 12;
        if (r->optimizer == DTRAIN_OPTIMIZER_MUON && r->kind) r->kind = DTRAIN_STRATEGY_ZERO3;
        ranks_run(ranks, DTRAIN_LAUNCH_THREADS, means_main, r);
        memcpy(goes_on, r, sizeof *r);
        memset(goes_on->loss, 0, sizeof r->loss), memset(goes_on->values, 0, sizeof r->values);
        goes_on->restores = true;
        ranks_run(ranks, DTRAIN_LAUNCH_THREADS, means_main, goes_on);
        CHECK_MSG(memcmp(r->values, goes_on->values, sizeof r->values) == 0,
                  "case %u: other values", (unsigned)i);
        CHECK_MSG(memcmp(r->loss + MEANS_AT, goes_on->loss + MEANS_AT, sizeof r->loss / 2) == 0,
                  "case %u: other losses", (unsigned)i);
        CHECK_MSG(r->skipped == goes_on->skipped && (r->skipped > 0) == r->scaled,
                  "case %u: %d and %d skipped", (unsigned)i, (int)r->skipped,
                  (int)goes_on->skipped);
        munmap(r, sizeof *r), munmap(goes_on, sizeof *r);
    }
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    RUN(test_lists_differ);
    RUN(test_writers_are_balanced);
    RUN(test_contradictions);
    RUN(test_items);
    RUN(test_own_means);
    return test_summary();
}
