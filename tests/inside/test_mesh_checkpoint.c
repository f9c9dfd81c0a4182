/* test_mesh_checkpoint.c: checkpoints and whole weights of a model that a tensor axis cuts. What t x d ranks of any
 * kind have saved is loaded by any other layout, and every element of values, moments, residuals and Q is compared
 * with what its place in the whole says; a loop over all elements of the whole finds the places, and memory is
 * reached through strategy and optimizer, not through the list that is tested. Whole weights are read and written
 * by every layout. Ranks that together do not have everything, or have something twice, are errors.
 *
 * Seen to fail for each of these, broken on purpose: components in the wrong order; columns taken for a run of
 * whole rows; pieces of a shard that all begin where it does, or at the beginning of their boxes; pieces of all
 * copies of what is not cut; residuals as the mean over all ranks; one piece compared with all that a rank has
 * saved; Q of one part for all of them; the first piece of a weight alone; transposed columns that begin at 0; a
 * part's length for that of the whole in a file; holes that are not looked for. */
#include "strategy/strategy_internal.h"
#include "strategy/view_internal.h"
#include "optim/optim_internal.h"
#include "state/state_internal.h"
#include "dtrain.h"

#include "test.h"
#include "ranks.h"

enum { MOST_RANKS = 8, PARAMS = 14, MOST = 4096 };

typedef struct job {
    /* what is set */
    int t, d;
    int p;             /* 0 = 1 */
    uint32_t schedule; /* dtrain_pipeline_kind */
    uint32_t kind, optimizer, compression;
    uint64_t shapes, seed; /* of the sizes of the model; of the buckets */
    const char *save, *load, *from, *to;
    bool renamed;   /* transposes, and a vocabulary without its padding, in files of weights */
    int64_t moved;  /* the loader's position, before a save */
    int lacks, has; /* not 0: ranks that list their state; a last one that has a mesh of its own */
    /* what came of it */
    dtrain_result ended[MOST_RANKS];
    char error[MOST_RANKS][1024];
    char note[MOST_RANKS][600];
    int64_t position[MOST_RANKS];
} job;

/* ---- the model ---- */

static int64_t between(uint64_t *random, int64_t least, int64_t most)
{
    return least + (int64_t)ranks_random(random, (uint64_t)(most - least + 1));
}

static dtrain_param *add(dtrain_param *p, uint32_t unit, const char *name, int64_t rows,
                         int64_t columns, uint32_t axis, uint32_t components, int64_t parts)
{
    p->name = name;
    p->unit = unit;
    p->shape[0] = rows;
    p->shape[1] = columns;
    p->cut.axis = axis;
    p->cut.components = components;
    p->cut.parts = parts;
    return p;
}

/* Lengths that few numbers of ranks divide. Heads, of two or three rows each, stay whole. */
static void model_make(dtrain_param *p, uint64_t seed)
{
    const uint32_t rows = DTRAIN_CUT_ROWS, columns = DTRAIN_CUT_COLUMNS;
    const bool even = seed == 0; /* halves of everything */
    uint64_t random = seed;
    const int64_t width = even ? 8 : between(&random, 5, 9),
                  heads = even ? 6 : between(&random, 4, 7);
    const int64_t head = even ? 2 : between(&random, 1, 3),
                  grouped = even ? 4 : between(&random, 4, 5);
    const int64_t each = between(&random, 1, 3), inner = even ? 16 : between(&random, 8, 21);
    memset(p, 0, PARAMS * sizeof *p);
    add(&p[0], 0, "model.embed_tokens.weight", even ? 24 : between(&random, 17, 31), width, rows, 0,
        0);
    add(&p[1], 0, "model.decoder.embed_positions.weight", between(&random, 3, 9), width, 0, 0, 0);
    add(&p[2], 1, "model.layers.10.self_attention.query_key_value.weight", 3 * heads * head, width,
        rows, 3, heads);
    add(&p[3], 1, "model.layers.10.self_attention.query_key_value.bias", 3 * heads * head, 0, rows,
        3, heads);
    add(&p[4], 1, "model.layers.10.self_attn.o_proj.weight", width, heads * head, columns, 0,
        heads);
    add(&p[5], 1, "model.layers.10.post_attention_layernorm.weight", width, 0, 0, 0, 0);
    dtrain_param *q = add(&p[6], 2, "model.layers.11.self_attention.query_key_value.weight",
                          (each + 2) * grouped * head, width, rows, 3, grouped);
    q->cut.widths[0] = each * grouped * head;
    q->cut.widths[1] = q->cut.widths[2] = grouped * head;
    add(&p[7], 2, "gate|up", 2 * inner, width, rows, 2, 0);
    add(&p[8], 2,
        "base_model.model.model.layers.11.block_sparse_moe.experts.7.w1.lora_A.default.weight",
        width, inner, columns, 0, 0);
    p[8].flags = DTRAIN_PARAM_FROZEN;
    add(&p[9], 2, "cube", between(&random, 2, 4), between(&random, 4, 6), columns, 0, 0)->shape[2] =
        between(&random, 1, 3);
    p[9].shape[3] = between(&random, 1, 3);
    add(&p[10], 3, "up", 32, 32, rows, 0, 0);
    add(&p[11], 3,
        "base_model.model.model.layers.11.block_sparse_moe.experts.7.w2.lora_A.default.weight", 24,
        24, 0, 0, 0);
    add(&p[12], 3,
        "base_model.model.model.layers.11.block_sparse_moe.experts.7.w2.lora_B.default.weight", 32,
        40, columns, 0, 0);
    p[13].name = "lm_head.weight";
    p[13].unit = 3;
    p[13].alias_of = &p[0];
    for (int i = 0; i < PARAMS - 1; i++) {
        p[i].init = DTRAIN_INIT_NORMAL;
        p[i].init_scale = 1;
    }
}

/* List the places in the whole of a rank's part, by a look at every element: on which line of the axis it lies, and
 * whether that is the rank's. */
static int64_t places_of(const dtrain_param *p, int ranks, int rank, int64_t list[MOST])
{
    bool mine[MOST] = {false};
    int64_t total = 1, inner = 1, count = 0, begin = 0;
    const int axis = ranks > 1 ? (int)p->cut.axis - 1 : -1;
    const int components = p->cut.components ? (int)p->cut.components : 1;
    for (int d = 0; d < 4 && p->shape[d]; d++) {
        total *= p->shape[d];
        inner *= d > axis ? p->shape[d] : 1;
    }
    for (int c = 0; c < components && axis >= 0; c++) {
        const int64_t width = p->cut.widths[0] ? p->cut.widths[c] : p->shape[axis] / components;
        const int64_t parts = p->cut.parts ? p->cut.parts : width;
        for (int64_t line = 0; line < width; line++) {
            const int64_t part = line / (width / parts);
            mine[begin + line] = part >= parts * rank / ranks && part < parts * (rank + 1) / ranks;
        }
        begin += width;
    }
    for (int64_t i = 0; i < total; i++)
        if (axis < 0 || mine[i / inner % p->shape[axis]]) list[count++] = i;
    return count;
}

/* What an element must be, anywhere. */
static float value_of(uint32_t kind, const char *name, int64_t element)
{
    uint64_t hash = kind + 1;
    for (; *name; name++) hash = ranks_mix(hash ^ (uint64_t)(unsigned char)*name);
    return (float)(ranks_mix(hash ^ (uint64_t)element) % 100000);
}

/* ---- a rank ---- */

typedef struct rank_of {
    job *j;
    dtrain_param params[PARAMS];
    dtrain_comm *side;
    dtrain_mesh *mesh;
    dtrain_mesh_info at;
    dtrain_dataset *dataset;
    dtrain_loader *loader;
    dtrain_strategy *strategy;
    dtrain_optimizer *optimizer;
    dtrain_state *state;
    dtrain_checkpoint *checkpoint;
    int64_t places[MOST];
    int32_t tokens[64], targets[64];
} rank_of;

/* Set elements, or count those that are wrong. */
static void meet(rank_of *s, bool compare, uint32_t kind, const dtrain_param *p, float *memory,
                 int64_t offset, int64_t count, float more)
{
    size_t wrong = 0;
    for (int64_t i = 0; i < count && memory; i++) {
        const float expected = value_of(kind, p->name, s->places[offset + i]) + more;
        if (!compare) memory[i] = expected;
        else wrong += memory[i] != expected;
    }
    CHECK_MSG(!wrong, "rank %d: kind %u of \"%s\": %zu of %lld elements are wrong", s->at.rank,
              kind, p->name, wrong, (long long)count);
}

/* Residuals differ between data ranks, and become the mean over two of them on another layout; Q of a part stays. */
static dtrain_result meet_compression(rank_of *s, bool compare, bool mean)
{
    size_t count;
    const dtrain__kept *kept = dtrain__kept_of(s->strategy, &count);
    for (size_t k = 0; k < count; k++) {
        const dtrain_param *p = kept[k].param;
        (void)places_of(p, s->at.tensor, s->at.tensor_rank, s->places);
        meet(s, compare, DTRAIN_STATE_RESIDUAL, p, kept[k].residual, kept[k].offset, kept[k].count,
             (float)(mean ? 5 : 8 * s->at.data_rank + 1));
    }
    return DTRAIN_OK;
}

/* Whether a rank has a parameter: unit u is stage u of four, or half as many; wte is the head's too. */
static bool stage_here(const rank_of *s, size_t i)
{
    const int p = s->j->p ? s->j->p : 1;
    const bool folded = s->j->schedule >= DTRAIN_PIPELINE_INTERLEAVED;
    for (size_t k = i;; k = PARAMS - 1) {
        const int unit = (int)s->params[k].unit, stage = p == 2 && !folded ? unit / 2 : unit;
        if (stage % p == s->at.pipeline_rank) return true;
        if (i || k) return false;
    }
}

/* All values and moments that this rank keeps. */
static void meet_params(rank_of *s, bool compare)
{
    const bool adamw = s->j->optimizer == DTRAIN_OPTIMIZER_ADAMW;
    for (size_t i = 0; i < PARAMS - 1; i++) {
        const dtrain_param *p = &s->params[i];
        const dtrain_optimizer_tensor *view = dtrain__moments_of(s->optimizer, p);
        dtrain_shard shard;
        const int64_t count = places_of(p, s->at.tensor, s->at.tensor_rank, s->places);
        if (!stage_here(s, i)) {
            CHECK_MSG(!p->count && !p->value && !view, "\"%s\" is another stage's", p->name);
            continue;
        }
        CHECK_MSG(count == p->count, "\"%s\": %lld elements, expected %lld", p->name,
                  (long long)p->count, (long long)count);
        if (!dtrain__shard_of(s->strategy, i, &shard)) continue;
        meet(s, compare, DTRAIN_STATE_VALUE, p, shard.value, shard.offset, shard.count, 0);
        if (!view) continue;
        meet(s, compare, adamw ? DTRAIN_STATE_EXP_AVG : DTRAIN_STATE_LION, p, view->m, shard.offset,
             shard.count, 0);
        meet(s, compare, DTRAIN_STATE_EXP_AVG_SQ, p, view->v, shard.offset, shard.count, 0);
    }
}

/* What the list says of each place: the memory of an element of the whole has the value of that one. */
static dtrain_result meet_list(const rank_of *s)
{
    const dtrain_state_tensor *tensors;
    size_t count, wrong = 0;
    TRY(dtrain_state_tensors(s->state, &tensors, &count));
    for (size_t i = 0; i < count; i++) {
        const dtrain_state_tensor *t = &tensors[i];
        const dtrain_piece *piece = &t->piece;
        if (t->own || t->kind == DTRAIN_STATE_STEPS || t->kind == DTRAIN_STATE_SCALAR) continue;
        for (int64_t k = 0; k < piece->count; k++) {
            int64_t rest = piece->offset + k, element = 0, stride = 1;
            for (int d = 3; d >= 0; d--) {
                const int64_t length = piece->length[d] ? piece->length[d] : 1;
                element += (piece->first[d] + rest % length) * stride;
                rest /= length;
                stride *= t->shape[d] ? t->shape[d] : 1;
            }
            wrong += ((const float *)t->memory)[k] != value_of(t->kind, t->name, element);
        }
        CHECK_MSG(!wrong, "rank %d lists kind %u of \"%s\" in wrong places", s->at.rank, t->kind,
                  t->name);
    }
    return DTRAIN_OK;
}

/* Names of a file: matrices of two axes transposed, and the first rows of wte alone. */
static void names_make(const job *j, const dtrain_param *params, dtrain_export_name *names)
{
    memset(names, 0, PARAMS * sizeof *names);
    for (int i = 0; i < PARAMS - 1 && j->renamed; i++)
        names[i].transpose = i > 1 && params[i].shape[1] && !params[i].shape[2];
    if (j->renamed) names[0].rows = 11;
}

/* Read weights, and compare: rows that are not in the file are zero. */
static dtrain_result read_weights(rank_of *s)
{
    dtrain_import_desc from;
    dtrain_export_name names[PARAMS];
    memset(&from, 0, sizeof from);
    from.names = names;
    names_make(s->j, s->params, names);
    TRY(dtrain_checkpoint_import(s->state, s->j->from, &from, NULL));
    for (size_t i = 0; i < PARAMS - 1; i++) {
        const dtrain_param *p = &s->params[i];
        const int64_t stored = names[i].rows ? names[i].rows * p->shape[1] : MOST;
        dtrain_shard shard;
        size_t wrong = 0;
        (void)places_of(p, s->at.tensor, s->at.tensor_rank, s->places);
        if (!dtrain__shard_of(s->strategy, i, &shard)) continue;
        for (int64_t k = 0; k < shard.count; k++) {
            const int64_t place = s->places[shard.offset + k];
            wrong += shard.value[k] != (place < stored ? value_of(0, p->name, place) : 0);
        }
        CHECK_MSG(!wrong, "rank %d: %zu elements of \"%s\" are wrong", s->at.rank, wrong, p->name);
    }
    return DTRAIN_OK;
}

static dtrain_result write_weights(const rank_of *s)
{
    dtrain_export_desc to;
    dtrain_export_name names[PARAMS];
    memset(&to, 0, sizeof to);
    to.names = names;
    names_make(s->j, s->params, names);
    return dtrain_checkpoint_export(s->strategy, s->j->to, &to);
}

static dtrain_result rank_open(dtrain_world *world, rank_of *s)
{
    job *j = s->j;
    const int rank = dtrain_world_rank(world), ranks = dtrain_world_size(world);
    dtrain_mesh_desc mesh;
    dtrain_strategy_desc how;
    dtrain_compression_desc less;
    dtrain_pipeline_desc line;
    dtrain_state_desc state;
    dtrain_dataset_desc data;
    dtrain_loader_desc window;
    dtrain_optimizer_desc optimizer =
        dtrain_optimizer_defaults((dtrain_optimizer_kind)j->optimizer);
    memset(&mesh, 0, sizeof mesh);
    memset(&how, 0, sizeof how);
    memset(&less, 0, sizeof less);
    memset(&line, 0, sizeof line);
    memset(&state, 0, sizeof state);
    memset(&data, 0, sizeof data);
    memset(&window, 0, sizeof window);
    mesh.tensor = j->t;
    mesh.pipeline = j->p;
    line.kind = j->schedule;
    how.pipeline = j->p ? &line : NULL;
    if (j->lacks || j->has) { /* those who list, or the last one, beside the others */
        const bool side = j->has ? rank == ranks - 1 : rank < j->lacks;
        if (j->has) mesh.tensor = side ? 1 : j->t;
        TRY(dtrain_comm_split(dtrain_world_comm(world), side, 0, &s->side));
        if (j->has) mesh.comm = s->side;
    }
    TRY(dtrain_mesh_create(world, &mesh, &s->mesh));
    dtrain_mesh_query(s->mesh, &s->at);
    model_make(s->params, j->shapes);
    less.kind = j->compression;
    less.dense_below = 1;
    how.kind = j->kind;
    how.mesh = s->mesh;
    how.init_seed = 3;
    how.compression = j->compression ? &less : NULL;
    how.bucket_bytes = 400 + j->seed % 7 * 900;
    if (j->kind == DTRAIN_STRATEGY_HYBRID_SHARD)
        how.node_size = (uint32_t)(j->d > 2 ? j->d / 2 : 1);
    TRY(dtrain_strategy_create(world, s->params, PARAMS, &how, &s->strategy));
    TRY(dtrain_optimizer_create(world, s->strategy, &optimizer, &s->optimizer));
    data.path = "README.md";
    data.format = DTRAIN_DATA_BYTES;
    TRY(dtrain_dataset_open(world, &data, &s->dataset));
    window.dataset = s->dataset;
    window.batch = 2;
    window.sequence = 8;
    window.comm = dtrain_mesh_comm(s->mesh, DTRAIN_AXIS_DATA);
    TRY(dtrain_loader_create(world, &window, &s->loader));
    state.strategy = s->strategy;
    state.optimizer = s->optimizer;
    state.loader = s->loader;
    if (j->has) state.comm = dtrain_world_comm(world);
    if (j->lacks) state.comm = s->side;
    return dtrain_state_create(world, &state, &s->state);
}

static dtrain_result rank_run(dtrain_world *world, rank_of *s)
{
    job *j = s->j;
    const int rank = dtrain_world_rank(world);
    dtrain_loader_info read;
    TRY(rank_open(world, s));
    if (j->load) {
        dtrain_load_info loaded;
        TRY(dtrain_checkpoint_load(s->state, j->load, NULL, &loaded));
        snprintf(j->note[rank], sizeof j->note[0], "%s", loaded.note);
        meet_params(s, true);
        TRY(meet_list(s));
        if (j->compression) TRY(meet_compression(s, true, loaded.note[0] != 0));
    } else if (j->from) {
        TRY(read_weights(s));
    } else {
        meet_params(s, false);
        if (j->compression) TRY(meet_compression(s, false, false));
        TRY(dtrain_state_changed(s->state));
        TRY(meet_list(s));
    }
    for (int64_t i = 0; i < j->moved; i += 2 * s->at.data)
        TRY(dtrain_loader_next(s->loader, s->tokens, s->targets));
    dtrain_loader_query(s->loader, &read);
    j->position[rank] = (int64_t)read.position;
    if (j->to) TRY(write_weights(s));
    if (!j->save || (j->lacks && rank >= j->lacks)) return DTRAIN_OK;
    dtrain_checkpoint_desc save;
    memset(&save, 0, sizeof save);
    save.directory = j->save;
    save.state = s->state;
    TRY(dtrain_checkpoint_open(world, &save, &s->checkpoint));
    return dtrain_checkpoint_save(s->checkpoint, 1, 0);
}

static int rank_main(dtrain_world *world, void *user)
{
    job *j = (job *)user;
    const int rank = dtrain_world_rank(world);
    rank_of *s = (rank_of *)calloc(1, sizeof *s);
    if (!s) return 3;
    s->j = j;
    j->ended[rank] = rank_run(world, s);
    if (j->ended[rank] != DTRAIN_OK)
        snprintf(j->error[rank], sizeof j->error[0], "%s", dtrain_last_error());
    (void)dtrain_checkpoint_close(s->checkpoint);
    dtrain_state_destroy(s->state);
    dtrain_loader_destroy(s->loader);
    dtrain_dataset_close(s->dataset);
    dtrain_optimizer_destroy(s->optimizer);
    dtrain_strategy_destroy(s->strategy);
    dtrain_mesh_destroy(s->mesh);
    dtrain_comm_destroy(s->side);
    free(s);
    return 0;
}

/* ---- jobs ---- */

static char folder[64];

static void folder_make(void)
{
    snprintf(folder, sizeof folder, "/tmp/dtrain_mesh_XXXXXX");
    if (!mkdtemp(folder)) exit(3);
}

static void folder_remove(void)
{
    char command[100];
    snprintf(command, sizeof command, "rm -rf %s", folder);
    CHECK(system(command) == 0);
}

static job *job_new(int t, int d, uint32_t kind, uint64_t shapes)
{
    job *j = (job *)ranks_shared(sizeof *j);
    j->t = t;
    j->d = d;
    j->kind = kind;
    j->shapes = shapes;
    j->seed = shapes;
    j->optimizer = DTRAIN_OPTIMIZER_ADAMW;
    return j;
}

static int ranks_of(const job *j) { return j->t * j->d * (j->p ? j->p : 1); }

/* A launch in which every rank must end well. */
static bool job_go(job *j, const char *what)
{
    bool well = true;
    ranks_run(ranks_of(j), DTRAIN_LAUNCH_THREADS, rank_main, j);
    for (int r = 0; r < ranks_of(j); r++)
        well = CHECK_MSG(j->ended[r] == DTRAIN_OK, "%s: rank %d of %d x %d x %d, kind %u: %s", what,
                         r, j->t, j->d, j->p, j->kind, j->error[r]) &&
               well;
    return well;
}

static const uint32_t kinds[] = {DTRAIN_STRATEGY_DDP,           DTRAIN_STRATEGY_ZERO1,
                                 DTRAIN_STRATEGY_SHARD_GRAD_OP, DTRAIN_STRATEGY_FULL_SHARD,
                                 DTRAIN_STRATEGY_ZERO3,         DTRAIN_STRATEGY_HYBRID_SHARD};
enum { KINDS = sizeof kinds / sizeof kinds[0] };

/* A layout of at most 8 ranks. */
static job *job_random(uint64_t *random, uint64_t shapes)
{
    const int t = 1 + (int)ranks_random(random, 4);
    const int d =
        1 + (int)ranks_random(random, (uint64_t)(MOST_RANKS / t > 4 ? 4 : MOST_RANKS / t));
    job *j = job_new(t, d, kinds[ranks_random(random, KINDS)], shapes);
    if (j->kind == DTRAIN_STRATEGY_HYBRID_SHARD && d % 2) j->kind = DTRAIN_STRATEGY_FULL_SHARD;
    j->seed = ranks_random(random, 1000);
    if (t * d <= MOST_RANKS / 2 && ranks_random(random, 2)) { /* stages, of units 0 to 3 */
        j->p = t * d <= MOST_RANKS / 4 && ranks_random(random, 2) ? 4 : 2;
        j->kind = kinds[ranks_random(random, 2)];
        j->schedule = (uint32_t)ranks_random(random, j->p == 2 ? 3 : 2);
    }
    return j;
}

static void job_free(job *j) { munmap(j, sizeof *j); }

/* What any layout saves any other loads: the same bits of values and moments, and the place in the data. */
static void test_layouts(void)
{
    const uint64_t first = test_seed(), count = test_draws(16, 60, 200);
    for (uint64_t i = first; i < first + count; i++) {
        uint64_t random = ranks_mix(i);
        const uint64_t shapes = ranks_random(&random, 1000);
        char what[60];
        job *from = job_random(&random, shapes), *to = NULL;
        snprintf(what, sizeof what, "seed %llu", (unsigned long long)i);
        folder_make();
        from->save = folder;
        from->moved = 24;
        from->optimizer = ranks_random(&random, 2) ? DTRAIN_OPTIMIZER_LION : DTRAIN_OPTIMIZER_ADAMW;
        bool well = job_go(from, what);
        for (int k = 0; k < 3 && well; k++) {
            to = job_random(&random, shapes);
            to->optimizer = from->optimizer;
            to->load = folder;
            well = job_go(to, what);
            for (int r = 0; r < ranks_of(to); r++)
                CHECK_MSG(!to->note[r][0] && to->position[r] == from->position[0],
                          "%s: \"%s\", position %lld, saved at %lld", what, to->note[r],
                          (long long)to->position[r], (long long)from->position[0]);
            job_free(to);
        }
        folder_remove();
        job_free(from);
    }
}

/* Where parts differ in length, ranks of the tensor axis shard at different places what is not cut. */
static void test_copies(void)
{
    for (int k = 1; k < KINDS - 1; k++) {
        job *from = job_new(3, 2, kinds[k], 11), *to = job_new(2, 3, kinds[k], 11);
        folder_make();
        from->seed = 999; /* large buckets, of several parameters */
        from->save = to->load = folder;
        if (job_go(from, "copies")) job_go(to, "copies");
        folder_remove();
        job_free(from);
        job_free(to);
    }
}

/* On the same layout residuals continue exactly; on another each is the mean over the ranks that had the element. */
static void test_compression(void)
{
    static const struct {
        int t, d;
    } list[] = {{2, 2}, {2, 4}, {2, 3}, {3, 2}, {1, 4}, {4, 2}};
    job *from = job_new(2, 2, DTRAIN_STRATEGY_DDP, 7);
    folder_make();
    from->compression = DTRAIN_COMPRESSION_TOPK;
    from->save = folder;
    const bool saved = job_go(from, "compressed");
    for (size_t i = 0; i < sizeof list / sizeof list[0] && saved; i++) {
        job *to = job_new(list[i].t, list[i].d, DTRAIN_STRATEGY_DDP, from->shapes);
        to->compression = DTRAIN_COMPRESSION_TOPK;
        to->load = folder;
        if (!job_go(to, "compressed")) break;
        const bool same = list[i].t == 2 && list[i].d == 2;
        CHECK_MSG(same ? !to->note[0][0] : strstr(to->note[0], "the mean over") != NULL,
                  "%d x %d: \"%s\"", list[i].t, list[i].d, to->note[0]);
    }
    folder_remove();
}

static bool same_files(const char *a, const char *b)
{
    char command[256];
    snprintf(command, sizeof command, "cmp -s %s %s", a, b);
    return system(command) == 0;
}

/* Every layout reads whole weights, transposed ones and rows that the file lacks too, and writes the same file as one
 * rank that has everything. */
static void test_whole_weights(void)
{
    const uint64_t first = test_seed(), count = test_draws(8, 30, 100);
    char path[100], again[100];
    for (uint64_t i = first; i < first + count; i++) {
        uint64_t random = ranks_mix(i);
        job *from = job_new(1, 1, DTRAIN_STRATEGY_DDP, ranks_random(&random, 1000));
        folder_make();
        snprintf(path, sizeof path, "%s/model.safetensors", folder);
        snprintf(again, sizeof again, "%s/again.safetensors", folder);
        from->to = path;
        from->renamed = i % 2;
        bool well = job_go(from, "export");
        for (int k = 0; k < 4 && well; k++) {
            job *to = job_random(&random, from->shapes);
            to->renamed = from->renamed;
            if (k < 2) to->from = path;
            else to->to = again;
            well = job_go(to, k < 2 ? "import" : "export");
            if (k >= 2 && well)
                CHECK_MSG(same_files(path, again), "seed %llu: %d x %d ranks, kind %u",
                          (unsigned long long)i, to->t, to->d, to->kind);
            job_free(to);
        }
        folder_remove();
        job_free(from);
    }
}

/* Ranks that have one half of what is cut, and a rank that has all of it beside others that have the halves. */
static void test_contradictions(void)
{
    for (int i = 0; i < 2; i++) {
        job *j = job_new(2, 2, DTRAIN_STRATEGY_DDP, 3);
        folder_make();
        j->save = folder;
        if (i == 0) j->lacks = 1;
        else j->has = 1, j->d = 1;
        const int ranks = i ? 3 : 4;
        ranks_run(ranks, DTRAIN_LAUNCH_THREADS, rank_main, j);
        for (int r = 0; r < (i ? ranks : 1); r++)
            CHECK_MSG(j->ended[r] == DTRAIN_ERROR_DATA &&
                          strstr(j->error[r], "the pieces of the value of "
                                              "\"base_model.model.model.layers.11.block_sparse_moe."
                                              "experts.7.w1.lora_A.default.weight\"") &&
                          strstr(j->error[r], i ? "overlap" : "leave a hole"),
                      "rank %d: %d, \"%s\"", r, j->ended[r], j->error[r]);
        folder_remove();
        job_free(j);
    }
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    RUN(test_layouts);
    RUN(test_copies);
    RUN(test_compression);
    RUN(test_whole_weights);
    RUN(test_contradictions);
    return test_summary();
}
