/* test_export.c: whole weights. Every kind of strategy writes the same file, whatever the number of ranks, and every
 * kind reads it; rounding, transposes and padding against naive loops; several files and their index; what does not
 * fit; refusals; memory and disks that fail at every call; damaged files.
 *
 * Seen to fail for each of these, broken on purpose. Export: one element for all; a transpose that is none; bf16 by
 * truncation; rows of padding in the file; a .tmp left behind; a file or a directory that is not synced; no agreement
 * in the end. Import: nothing published; rows of padding left as they were, or not zero; 16-bit values read to the
 * wrong half, or widened from above; a piece that begins at 0; rows for columns; files outside the directory of an
 * index, tensors that are not where it says, or in two files; tied weights not compared; links not followed; names of
 * aliases that count as extra; a file in which nothing fits; leaks. */
#include "strategy/strategy_internal.h"
#include "state/safetensors_internal.h"
#include "state/storage_internal.h"
#include "dtrain.h"

#include "test.h"
#include <pthread.h>
#include "ranks.h"
#include "memory_storage.h"
#include "names.h"

/* ---- a model ---- */

enum {
    WTE,
    WPE,
    UP,
    UP_BIAS,
    DOWN,
    TINY,
    ONE,
    LARGE,
    NORM,
    HEAD,
    PARAMS,
    MOST_RANKS = 4,
    PADDED = 37,
    VOCAB = 29,
    WIDTH = 10,
    MOST_VALUES = 700000
};

/* Names as those of Hugging Face's models; of up.bias and up, tiny and one the first 40 bytes are the same. */
#define N_WTE "model.embed_tokens.weight"
#define N_WPE "model.decoder.embed_positions.weight"
#define N_UP "model.layers.10.mlp.experts.7.gate_up_proj.weight"
#define N_UP_BIAS "model.layers.10.mlp.experts.7.gate_up_proj.bias"
#define N_DOWN "encoder.block.23.layer.1.DenseReluDense.wi_0.weight"
#define N_TINY "layers.10.post_attention_layernorm.scale.0"
#define N_ONE "layers.10.post_attention_layernorm.scale.1"
#define N_LARGE \
    "base_model.model.model.layers.10.block_sparse_moe.experts.7.w1.lora_A.default.weight"
#define N_NORM "layers.27.post_attention_layernorm.weight"
#define N_HEAD "lm_head.weight"

static char folder[64];

typedef struct job {
    /* what is set */
    uint32_t kind, node_size, param_dtype;
    int ranks;
    uint64_t seed;
    bool hierarchical, large, adamw;
    const char *from, *to;
    dtrain_import_desc how_from;
    dtrain_export_desc how_to;
    dtrain_launch_desc launch;
    void (*fill)(float *values, int64_t offset, int64_t count); /* LARGE, before the export */
    int (*during)(dtrain_world *world, struct job *j, dtrain_strategy *strategy,
                  dtrain_state *state); /* in place of import and export */

    /* what came of it */
    dtrain_result ended[MOST_RANKS];
    char error[MOST_RANKS][1024];
    dtrain_import_info info[MOST_RANKS];
    uint64_t hash[MOST_RANKS];
    float values[MOST_VALUES]; /* of rank 0, one parameter behind the other, without HEAD */
    int64_t at[PARAMS];
    int64_t shape[PARAMS][4];
} job;

static job *job_new(uint32_t kind, int ranks)
{
    job *j = (job *)ranks_shared(sizeof *j);
    j->kind = kind;
    j->ranks = ranks;
    j->seed = 5;
    j->launch = ranks_desc(ranks, DTRAIN_LAUNCH_THREADS);
    return j;
}

static void model_param(dtrain_param *p, uint32_t unit, const char *name, int64_t rows,
                        int64_t columns)
{
    p->name = name;
    p->unit = unit;
    p->shape[0] = rows;
    p->shape[1] = columns;
    p->init = DTRAIN_INIT_NORMAL;
    p->init_scale = 0.5f;
}

/* Tied weights, a frozen tensor, two of one element, sizes that divide by nothing. */
static void model_create(dtrain_param params[PARAMS], bool large)
{
    memset(params, 0, PARAMS * sizeof *params);
    model_param(&params[WTE], 0, N_WTE, PADDED, WIDTH);
    model_param(&params[WPE], 0, N_WPE, 5, WIDTH);
    model_param(&params[UP], 1, N_UP, 18, WIDTH);
    model_param(&params[UP_BIAS], 1, N_UP_BIAS, 18, 0);
    model_param(&params[DOWN], 1, N_DOWN, WIDTH, 18);
    model_param(&params[TINY], 1, N_TINY, 1, 0);
    model_param(&params[ONE], 1, N_ONE, 1, 0);
    model_param(&params[LARGE], 2, N_LARGE, large ? 1103 : 11, large ? 601 : 6);
    model_param(&params[NORM], 2, N_NORM, WIDTH, 0);
    model_param(&params[HEAD], 2, N_HEAD, 0, 0);
    params[DOWN].flags = DTRAIN_PARAM_FROZEN;
    params[HEAD].alias_of = &params[WTE];
}

/* Read all values, which leaves those of gathered units where the next reader finds them. */
static dtrain_result job_read(job *j, dtrain_strategy *strategy, const dtrain_param *params,
                              int rank)
{
    int64_t at = 0;
    float *values = (float *)malloc(MOST_VALUES * sizeof *values);
    if (!values) return DTRAIN_ERROR_MEMORY;
    for (size_t i = 0; i < HEAD; i++) {
        TRY(dtrain_strategy_read(strategy, i, values));
        if (rank == 0) {
            memcpy(j->values + at, values, (size_t)params[i].count * sizeof *values);
            memcpy(j->shape[i], params[i].shape, sizeof params[i].shape);
            j->at[i] = at;
        }
        at += params[i].count;
    }
    free(values);
    return DTRAIN_OK;
}

static dtrain_result job_run(dtrain_world *world, job *j, dtrain_strategy *strategy,
                             dtrain_state *state, const dtrain_param *params)
{
    const int rank = dtrain_world_rank(world);
    const dtrain_state_tensor *tensors;
    size_t count;
    if (j->during) return j->during(world, j, strategy, state) ? DTRAIN_ERROR_USAGE : DTRAIN_OK;
    TRY(dtrain_state_tensors(state, &tensors, &count));
    for (size_t i = 0; i < count && j->fill; i++) {
        const dtrain_state_tensor *t = &tensors[i];
        float *values = (float *)malloc((size_t)t->total * sizeof *values + 1);
        if (!values) return DTRAIN_ERROR_MEMORY;
        j->fill(values, t->piece.offset, t->piece.count);
        dtrain_result filled = DTRAIN_OK;
        if (t->kind == DTRAIN_STATE_VALUE && strcmp(t->name, N_LARGE) == 0)
            filled = dtrain_device_copy(dtrain_world_device(world), t->memory, values,
                                        (size_t)t->piece.count * sizeof *values);
        free(values);
        TRY(filled);
    }
    if (j->fill) TRY(dtrain_state_changed(state));
    if (j->from) {
        TRY(job_read(j, strategy, params, rank));
        TRY(dtrain_checkpoint_import(state, j->from, &j->how_from, &j->info[rank]));
    }
    if (j->to) TRY(dtrain_checkpoint_export(strategy, j->to, &j->how_to));
    TRY(job_read(j, strategy, params, rank));
    return dtrain_strategy_verify(strategy, &j->hash[rank]);
}

static int job_main(dtrain_world *world, void *user)
{
    job *j = (job *)user;
    const int rank = dtrain_world_rank(world);
    dtrain_param params[PARAMS];
    dtrain_strategy_desc desc;
    dtrain_optimizer_desc adamw = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_ADAMW);
    dtrain_strategy *strategy = NULL;
    dtrain_optimizer *optimizer = NULL;
    dtrain_state *state = NULL;
    dtrain_state_desc list;
    memset(&desc, 0, sizeof desc);
    memset(&list, 0, sizeof list);
    model_create(params, j->large);
    desc.kind = j->kind;
    desc.node_size = j->node_size;
    desc.param_dtype = j->param_dtype;
    desc.hierarchical = j->hierarchical;
    desc.keep_after_forward =
        j->kind >= DTRAIN_STRATEGY_FULL_SHARD; /* a read leaves units behind */
    desc.bucket_bytes = 2000;
    desc.init_seed = j->seed;
    dtrain_result result = dtrain_strategy_create(world, params, PARAMS, &desc, &strategy);
    if (result == DTRAIN_OK && j->adamw)
        result = dtrain_optimizer_create(world, strategy, &adamw, &optimizer);
    list.strategy = strategy;
    list.optimizer = optimizer;
    if (result == DTRAIN_OK) result = dtrain_state_create(world, &list, &state);
    if (result == DTRAIN_OK) result = job_run(world, j, strategy, state, params);
    j->ended[rank] = result;
    snprintf(j->error[rank], sizeof j->error[0], "%s",
             result == DTRAIN_OK ? "" : dtrain_last_error());
    dtrain_state_destroy(state);
    dtrain_optimizer_destroy(optimizer);
    dtrain_strategy_destroy(strategy);
    return result == DTRAIN_OK ? 0 : 1;
}

static bool job_go(job *j, const char *what)
{
    const dtrain_result result = ranks_launch(&j->launch, job_main, j, NULL);
    return CHECK_MSG(result == DTRAIN_OK, "%s: %s", what,
                     result == DTRAIN_OK ? "" : dtrain_last_error());
}

/* Every rank fails, with a sentence that has these words. */
static void job_fails(job *j, dtrain_result code, const char *words)
{
    const dtrain_result result = ranks_launch(&j->launch, job_main, j, NULL);
    CHECK_MSG(result != DTRAIN_OK, "expected \"%s\", and all went well", words);
    for (int r = 0; r < j->ranks; r++)
        CHECK_MSG(j->ended[r] == code && strstr(j->error[r], words),
                  "rank %d: %d, \"%s\", expected %d, \"%s\"", r, j->ended[r], j->error[r], code,
                  words);
}

/* ---- files ---- */

static void folder_make(void)
{
    snprintf(folder, sizeof folder, "/tmp/dtrain_export_XXXXXX");
    if (!mkdtemp(folder)) exit(3);
}

#if defined(__GNUC__)
__attribute__((format(printf, 1, 2)))
#endif
static int
shell(const char *format, ...)
{
    char command[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(command, sizeof command, format, args);
    va_end(args);
    return system(command);
}

static void folder_remove(void) { CHECK(shell("rm -rf %s", folder) == 0); }

static const char *in_folder(const char *name)
{
    static char paths[8][200];
    static int turn;
    char *path = paths[turn++ % 8];
    snprintf(path, sizeof paths[0], "%s/%s", folder, name);
    return path;
}

static unsigned char *slurp(const char *path, size_t *bytes)
{
    unsigned char *text = NULL;
    FILE *file = fopen(path, "rb");
    *bytes = 0;
    if (!CHECK_MSG(file != NULL, "%s is not there", path)) return NULL;
    fseek(file, 0, SEEK_END);
    *bytes = (size_t)ftell(file);
    rewind(file);
    text = (unsigned char *)malloc(*bytes + 1);
    if (!text || fread(text, 1, *bytes, file) != *bytes) exit(3);
    text[*bytes] = 0;
    fclose(file);
    return text;
}

static void spill(const char *path, const void *from, size_t bytes)
{
    FILE *file = fopen(path, "wb");
    if (!file || fwrite(from, 1, bytes, file) != bytes) exit(3);
    fclose(file);
}

/* A file with a header of the test's own: 8 bytes of length, the text, zeros. */
static void file_of(const char *name, const char *header, size_t data)
{
    const uint64_t bytes = strlen(header);
    unsigned char *all = (unsigned char *)calloc(1, 8 + bytes + data);
    if (!all) exit(3);
    for (int i = 0; i < 8; i++) all[i] = (unsigned char)(bytes >> (8 * i));
    memcpy(all + 8, header, bytes);
    spill(in_folder(name), all, 8 + bytes + data);
    free(all);
}

/* One tensor of a file, as it is there; NULL: it is not. */
static unsigned char *tensor_of(const char *path, const char *name, dtrain__stored *stored)
{
    const dtrain_allocator allocator = dtrain__resolve_allocator(NULL);
    dtrain__tensor_file header;
    size_t bytes;
    unsigned char *all = slurp(path, &bytes), *found = NULL;
    uint64_t length = 0;
    for (int i = 0; i < 8 && all; i++) length |= (uint64_t)all[i] << (8 * i);
    if (!all || !CHECK(dtrain__safetensors_parse(path, (char *)all + 8, length, bytes, &allocator,
                                                 &header) == DTRAIN_OK))
        return NULL;
    const dtrain__stored *one = dtrain__safetensors_find(&header, name);
    if (one) {
        *stored = *one;
        stored->name = name;
        found = (unsigned char *)malloc(one->end - one->begin + 1);
        if (!found) exit(3);
        memcpy(found, all + header.data + one->begin, one->end - one->begin);
    }
    dtrain__safetensors_free(&header);
    free(all);
    return found;
}

/* Divide an export among files of one tensor each, and write their index, as Hugging Face does. */
static void divide(const dtrain_storage *given, const char *path)
{
    const dtrain_storage *storage = dtrain__storage_or_files(given);
    const dtrain_allocator allocator = dtrain__resolve_allocator(NULL);
    const int directory = (int)(strrchr(path, '/') - path);
    dtrain__tensor_file header;
    dtrain__text index, part;
    char name[300], *all;
    size_t bytes;
    uint64_t length;
    memset(&index, 0, sizeof index);
    memset(&part, 0, sizeof part);
    index.allocator = part.allocator = &allocator;
    if (dtrain__storage_get(storage, &allocator, path, 1 << 20, &all, &bytes) != DTRAIN_OK) exit(3);
    memcpy(&length, all, sizeof length);
    CHECK(dtrain__safetensors_parse(path, all + 8, length, bytes, &allocator, &header) ==
          DTRAIN_OK);
    for (size_t i = 0; i < header.count; i++) {
        dtrain__stored one = header.tensors[i];
        const size_t data = (size_t)(one.end - one.begin);
        one.begin = part.bytes = 0;
        one.end = data;
        dtrain__safetensors_add(&part, &one);
        CHECK(dtrain__safetensors_end(&part, "{}", one.end) == DTRAIN_OK);
        char *file = (char *)malloc(part.bytes + data);
        if (!file) exit(3);
        memcpy(file, part.at, part.bytes);
        memcpy(file + part.bytes, all + header.data + header.tensors[i].begin, data);
        snprintf(name, sizeof name, "%.*s/part-%zu", directory, path, i);
        CHECK(dtrain__storage_put(storage, name, file, part.bytes + data) == DTRAIN_OK);
        dtrain__text_add(&index, "%s\"%s\": \"part-%zu\"", i ? ", " : "{\"weight_map\": {",
                         one.name, i);
        free(file);
    }
    dtrain__text_add(&index, "}}");
    snprintf(name, sizeof name, "%s.index.json", path);
    CHECK(dtrain__storage_put(storage, name, index.at, index.bytes) == DTRAIN_OK);
    CHECK(dtrain__storage_remove(storage, path) == DTRAIN_OK);
    dtrain__safetensors_free(&header);
    dtrain__text_free(&part);
    dtrain__text_free(&index);
    free(all);
}

static float stored_at(const unsigned char *bytes, uint32_t dtype, int64_t i)
{
    uint16_t low;
    float x;
    if (dtype == DTRAIN_DTYPE_F32) {
        memcpy(&x, bytes + 4 * i, 4);
        return x;
    }
    memcpy(&low, bytes + 2 * i, 2);
    return dtrain_half_to_f32(dtype, low);
}

static float rounded(float x, uint32_t dtype)
{
    if (dtype == DTRAIN_DTYPE_F32) return x;
    return dtrain_half_to_f32(dtype, dtrain_half_from_f32(dtype, x));
}

static bool same_bits(float a, float b) { return memcmp(&a, &b, sizeof a) == 0; }

/* Naive: what stands at (row, column) of the file is what the model has there, rounded. */
static void check_file(const job *j, const char *path, const dtrain_export_name *names,
                       uint32_t dtype)
{
    static const char *const own[PARAMS] = {N_WTE,  N_WPE, N_UP,    N_UP_BIAS, N_DOWN,
                                            N_TINY, N_ONE, N_LARGE, N_NORM,    N_HEAD};
    for (int i = 0; i < HEAD; i++) {
        const dtrain_export_name *how = names ? &names[i] : NULL;
        const char *name = how && how->name ? how->name : own[i];
        const int64_t all = j->shape[i][0], columns = j->shape[i][1] ? j->shape[i][1] : 1;
        const int64_t rows = how && how->rows ? how->rows : all;
        dtrain__stored stored;
        unsigned char *bytes = tensor_of(path, name[0] ? name : own[i], &stored);
        CHECK_MSG((bytes != NULL) == (name[0] != 0), "\"%s\" is %sin %s", own[i],
                  bytes ? "" : "not ", path);
        if (!bytes || !name[0]) continue;
        const bool turn = how && how->transpose;
        CHECK_MSG(stored.dtype == dtype && stored.dims == (j->shape[i][1] ? 2 : 1) &&
                      stored.shape[0] == (turn ? columns : rows) &&
                      (stored.dims == 1 || stored.shape[1] == (turn ? rows : columns)),
                  "\"%s\" has type %u, %d dimensions, %lld x %lld", name, stored.dtype, stored.dims,
                  (long long)stored.shape[0], (long long)stored.shape[1]);
        for (int64_t r = 0; r < rows; r++)
            for (int64_t c = 0; c < columns; c++) {
                const float x = j->values[j->at[i] + r * columns + c];
                const float y = stored_at(bytes, dtype, turn ? c * rows + r : r * columns + c);
                if (!same_bits(rounded(x, dtype), y)) {
                    CHECK_MSG(false, "\"%s\" (%lld, %lld) is %g, expected %g", name, (long long)r,
                              (long long)c, (double)y, (double)x);
                    r = rows;
                    break;
                }
            }
        free(bytes);
    }
}

/* ---- every kind ---- */

typedef struct kind_case {
    const char *name;
    uint32_t kind, param_dtype;
    bool hierarchical, adamw;
} kind_case;

static const kind_case kinds[] = {
    {"ddp", DTRAIN_STRATEGY_DDP, 0, false, false},
    {"ddp with AdamW", DTRAIN_STRATEGY_DDP, 0, false, true},
    {"zero1", DTRAIN_STRATEGY_ZERO1, 0, false, true},
    {"zero1, hierarchical", DTRAIN_STRATEGY_ZERO1, 0, true, false},
    {"shard_grad_op", DTRAIN_STRATEGY_SHARD_GRAD_OP, 0, false, true},
    {"full_shard", DTRAIN_STRATEGY_FULL_SHARD, 0, false, false},
    {"full_shard, bf16", DTRAIN_STRATEGY_FULL_SHARD, DTRAIN_DTYPE_BF16, false, true},
    {"zero3", DTRAIN_STRATEGY_ZERO3, 0, false, true},
    {"hybrid_shard", DTRAIN_STRATEGY_HYBRID_SHARD, 0, false, false},
};
enum { KINDS = sizeof kinds / sizeof *kinds };

static job *kind_job(const kind_case *k, int ranks)
{
    job *j = job_new(k->kind, ranks);
    j->param_dtype = k->param_dtype;
    j->hierarchical = k->hierarchical && ranks == 4;
    j->adamw = k->adamw;
    if (j->hierarchical || k->kind == DTRAIN_STRATEGY_HYBRID_SHARD)
        j->node_size = ranks % 2 ? (uint32_t)ranks : 2;
    return j;
}

/* One file for all: who has written it cannot be told. What is read by every kind is then what any of them wrote. */
static void test_kinds(void)
{
    static const dtrain_export_name names[PARAMS] = {
        {VOCAB, NULL, false}, {0, NULL, false}, {0, "mlp.up", true}, {0, NULL, false},
        {7, NULL, true},      {0, NULL, false}, {0, NULL, false},    {0, "x.large", true},
        {4, NULL, false},     {0, NULL, false}};
    size_t bytes[2] = {0, 0};
    unsigned char *first[2] = {NULL, NULL};
    uint64_t hash = 0;
    folder_make();
    for (int k = 0; k < KINDS; k++)
        for (int ranks = 1; ranks <= MOST_RANKS; ranks++)
            for (int named = 0; named < 2; named++) {
                char what[100];
                size_t count;
                job *j = kind_job(&kinds[k], ranks), *to = kind_job(&kinds[k], ranks);
                snprintf(what, sizeof what, "%s, %d ranks", kinds[k].name, ranks);
                j->to = to->from = in_folder("model.safetensors");
                j->how_to.names = to->how_from.names = named ? names : NULL;
                to->seed = 77;
                if (job_go(j, what) && job_go(to, what)) {
                    unsigned char *all = slurp(j->to, &count);
                    if (!hash) hash = j->hash[0];
                    if (!first[named]) {
                        first[named] = all;
                        bytes[named] = count;
                        check_file(j, j->to, j->how_to.names, DTRAIN_DTYPE_F32);
                    }
                    CHECK_MSG(count == bytes[named] && memcmp(all, first[named], count) == 0,
                              "%s: another file than that of one rank", what);
                    CHECK_MSG(named || to->hash[0] == hash, "%s: other parameters after import",
                              what);
                    for (int i = 0; i < HEAD; i++) {
                        const int64_t columns = j->shape[i][1] ? j->shape[i][1] : 1;
                        const int64_t stored =
                            named && names[i].rows ? names[i].rows : j->shape[i][0];
                        for (int64_t e = 0; e < j->shape[i][0] * columns; e++) {
                            const float x = e < stored * columns ? j->values[j->at[i] + e] : 0;
                            CHECK_MSG(same_bits(to->values[j->at[i] + e], x),
                                      "%s: parameter %d, element %d: %g, expected %g", what, i,
                                      (int)e, (double)to->values[j->at[i] + e], (double)x);
                        }
                    }
                    CHECK(to->info[ranks - 1].values == HEAD && !to->info[0].note[0]);
                    if (all != first[named]) free(all);
                }
                munmap(j, sizeof *j);
                munmap(to, sizeof *to);
            }
    free(first[0]);
    free(first[1]);
    folder_remove();
}

/* ---- types and blocks ---- */

/* Ties, overflow, denormals, NaN and infinities among ordinary numbers. */
static void fill_edges(float *values, int64_t offset, int64_t count)
{
    static const uint32_t edges[] = {0x00000000, 0x80000000, 0x7f800000, 0xff800000, 0x7fc00000,
                                     0x7f7fffff, 0x00000001, 0x33000000, 0x33000001, 0x477fefff,
                                     0x477ff000, 0x3f808000, 0x3f818000, 0x3f801000, 0x38800000,
                                     0x387fffff, 0x3f803000, 0x7f7f8000, 0x80800000};
    for (int64_t i = 0; i < count; i++) {
        const uint64_t e = (uint64_t)(offset + i), draw = ranks_mix(e);
        const uint32_t bits =
            e % 7 ? 0x38000000u + (uint32_t)(draw % 0x10000000u) : edges[draw % 19];
        memcpy(&values[i], &bits, sizeof bits);
    }
}

/* A tensor of several blocks, as it lies here and turned, in every type, of one rank and of three. */
static void test_types(void)
{
    static const dtrain_export_name turned[PARAMS] = {
        {0, NULL, true},  {0, NULL, false}, {0, NULL, false}, {0, NULL, false}, {0, NULL, false},
        {0, NULL, false}, {0, NULL, false}, {977, "l", true}, {0, NULL, false}, {0, NULL, false}};
    folder_make();
    for (uint32_t dtype = 0; dtype <= DTRAIN_DTYPE_F16; dtype++)
        for (int turn = 0; turn < 2; turn++)
            for (int ranks = 1; ranks <= 3; ranks += 2) {
                job *j = job_new(DTRAIN_STRATEGY_FULL_SHARD, ranks);
                job *to = job_new(DTRAIN_STRATEGY_ZERO3, ranks);
                const dtrain_export_name *names = turn ? turned : NULL;
                j->large = to->large = true;
                j->fill = fill_edges;
                j->to = to->from = in_folder("w");
                j->how_to.dtype = dtype;
                j->how_to.names = to->how_from.names = names;
                to->seed = 9;
                if (job_go(j, "types") && job_go(to, "types")) {
                    const int64_t stored = turn ? 977 * 601 : 1103 * 601;
                    check_file(j, j->to, names, dtype);
                    for (int64_t e = 0; e < 1103 * 601; e++) {
                        const float x =
                            e < stored ? rounded(j->values[j->at[LARGE] + e], dtype) : 0;
                        if (!CHECK_MSG(
                                same_bits(to->values[to->at[LARGE] + e], x),
                                "type %u, turned %d, %d ranks: element %d is %g, expected %g",
                                dtype, turn, ranks, (int)e, (double)to->values[to->at[LARGE] + e],
                                (double)x))
                            break;
                    }
                }
                munmap(j, sizeof *j);
                munmap(to, sizeof *to);
            }
    folder_remove();
}

/* ---- several files ---- */

static void test_files(void)
{
    job *j = job_new(DTRAIN_STRATEGY_ZERO1, 2), *to = job_new(DTRAIN_STRATEGY_FULL_SHARD, 3);
    folder_make();
    j->to = in_folder("model.safetensors");
    job_go(j, "one file");
    divide(NULL, j->to);
    for (int i = 0; i < 3;
         i++) { /* the index, the name without, and a link to the index from elsewhere */
        to->from = i == 0   ? in_folder("model.safetensors.index.json")
                   : i == 1 ? in_folder("model.safetensors")
                            : in_folder("links/a.json");
        if (i == 2)
            CHECK(shell("cd %s && mkdir links && ln -s ../model.safetensors.index.json links/a.json"
                        " && for f in part-*; do ln -s ../$f links/$f; done",
                        folder) == 0);
        to->seed = 77;
        if (job_go(to, "an index")) CHECK(to->hash[0] == j->hash[0] && to->info[2].values == HEAD);
    }
    j->seed = 6;
    job_go(j, "one file again, which is read in place of the index");
    to->from = j->to;
    if (job_go(to, "one file again")) CHECK(to->hash[0] == j->hash[0]);
    CHECK(shell("cd %s && ln -s . here", folder) == 0); /* a directory by a link */
    j->to = to->from = in_folder("here/model.safetensors");
    if (job_go(j, "a linked directory") && job_go(to, "a linked directory"))
        CHECK(to->hash[0] == j->hash[0]);
    folder_remove();
}

static void test_header(void)
{
    static const char expected[] = "{\"__metadata__\":{\"format\":\"pt\"}}";
    static const dtrain_export_name none[PARAMS] = {
        {0, "", false}, {0, "", false}, {0, "", false}, {0, "", false}, {0, "", false},
        {0, "", false}, {0, "", false}, {0, "", false}, {0, "", false}, {0, "x", false}};
    job *j = job_new(DTRAIN_STRATEGY_DDP, 2);
    size_t bytes;
    folder_make();
    j->to = in_folder("a");
    j->how_to.names = none;
    job_go(j, "metadata");
    unsigned char *all = slurp(j->to, &bytes);
    CHECK_MSG(all && bytes % 8 == 0 && strncmp((char *)all + 8, expected, strlen(expected)) == 0,
              "%s", all ? (char *)all + 8 : "");
    free(all);
    folder_remove();
}

/* ---- what does not fit ---- */

/* Zeros in 37 x 10 and so on, in the model's order. */
#define HEADER_F32(name, shape, from, to) \
    "\"" name "\":{\"dtype\":\"F32\",\"shape\":[" shape "],\"data_offsets\":[" #from "," #to "]}"
#define HEADER_WTE HEADER_F32(N_WTE, "37,10", 0, 1480)
#define HEADER_NEXT(name, shape, from, to) HEADER_F32(name, shape, from, to) ","
/* clang-format off */
#define HEADER_REST                                                              \
    HEADER_NEXT(N_WPE, "5,10", 1480, 1680) HEADER_NEXT(N_UP, "18,10", 1680, 2400) \
    HEADER_NEXT(N_UP_BIAS, "18", 2400, 2472) HEADER_NEXT(N_DOWN, "10,18", 2472, 3192) \
    HEADER_NEXT(N_TINY, "1", 3192, 3196) HEADER_NEXT(N_ONE, "1", 3196, 3200) \
    HEADER_F32(N_LARGE, "11,6", 3200, 3464)
/* clang-format on */
#define HEADER_NORM "," HEADER_F32(N_NORM, "10", 3464, 3504)

static void test_fit(void)
{
    static const char *const masks[] = {"nothing", ".mask", NULL};
    static const char *const head[] = {N_HEAD, NULL};
    static const struct {
        const char *header;
        size_t data;
        const char *strict, *partial; /* sentence, note; NULL: goes well; "": no note */
        const char *prefix;
        const char *const *ignore;
    } list[] = {
        {"{" HEADER_WTE "," HEADER_REST HEADER_NORM "}", 3504, NULL, "", NULL, NULL},
        {"{" HEADER_WTE "," HEADER_REST "}", 3464,
         "does not fit this model: missing in it: \"" N_NORM "\"", "missing in it: \"" N_NORM "\"",
         NULL, NULL},
        {"{" HEADER_WTE "," HEADER_REST ",\"" N_NORM
         "\":{\"dtype\":\"F32\",\"shape\":[5,2],\"data_offsets\":[3464,3504]}}",
         3504,
         "of another shape or type: \"" N_NORM "\" is F32 [5, 2], expected F32, BF16 or F16 [10]",
         "\"" N_NORM "\" is F32 [5, 2], expected F32, BF16 or F16 [10]", NULL, NULL},
        {"{" HEADER_WTE "," HEADER_REST ",\"" N_NORM
         "\":{\"dtype\":\"F64\",\"shape\":[10],\"data_offsets\":[3464,3544]}}",
         3544, "\"" N_NORM "\" is F64 [10], expected F32, BF16 or F16 [10]",
         "\"" N_NORM "\" is F64 [10]", NULL, NULL},
        {"{" HEADER_WTE "," HEADER_REST ",\"" N_NORM
         "\":{\"dtype\":\"I16\",\"shape\":[10],\"data_offsets\":[3464,3484]}}",
         3484, "\"" N_NORM "\" is I16 [10], expected F32, BF16 or F16 [10]",
         "\"" N_NORM "\" is I16 [10]", NULL, NULL},
        {"{" HEADER_WTE "," HEADER_REST HEADER_NORM
         ",\"h.0.mask\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[3504,3508]}}",
         3508, "only in it: \"h.0.mask\"", "only in it: \"h.0.mask\"", NULL, NULL},
        {"{" HEADER_WTE "," HEADER_REST HEADER_NORM
         ",\"h.0.mask\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[3504,3508]}}",
         3508, NULL, "", NULL, masks},
        {"{" HEADER_WTE "," HEADER_REST ",\"model." N_NORM
         "\":{\"dtype\":\"F32\",\"shape\":[10],\"data_offsets\":[3464,3504]}}",
         3504, "missing in it: \"" N_NORM "\"; only in it: \"model." N_NORM "\"",
         "missing in it: \"" N_NORM "\"; only in it: \"model." N_NORM "\"", "other.", NULL},
        {"{" HEADER_WTE "," HEADER_REST ",\"model." N_NORM
         "\":{\"dtype\":\"F32\",\"shape\":[10],\"data_offsets\":[3464,3504]}}",
         3504, NULL, "", "model.", NULL},
        /* tied weights: by either name, and by both if they are the same */
        {"{\"" N_HEAD "\":{\"dtype\":\"F32\",\"shape\":[37,10],\"data_offsets\":[0,1480]}"
         "," HEADER_REST HEADER_NORM "}",
         3504, NULL, "", NULL, NULL},
        {"{" HEADER_WTE "," HEADER_REST HEADER_NORM ",\"" N_HEAD
         "\":{\"dtype\":\"F32\",\"shape\":[37,10],\"data_offsets\":[3504,4984]}}",
         4984, NULL, "", NULL, NULL},
        {"{" HEADER_WTE "," HEADER_REST HEADER_NORM ",\"" N_HEAD
         "\":{\"dtype\":\"F32\",\"shape\":[36,10],\"data_offsets\":[3504,4944]}}",
         4944, "\"" N_WTE "\" and \"" N_HEAD "\" differ", "!", NULL, head},
        {"{}", 0,
         "missing in it: \"" N_WTE "\", \"" N_WPE "\", \"" N_UP "\", \"" N_UP_BIAS "\", \"" N_DOWN
         "\", \"" N_TINY "\", ...",
         "!as no parameter is in it", NULL, NULL},
    };
    folder_make();
    for (size_t i = 0; i < sizeof list / sizeof *list; i++)
        for (int partial = 0; partial < 2; partial++) {
            job *j = job_new(DTRAIN_STRATEGY_FULL_SHARD, 2);
            const char *says = partial ? list[i].partial : list[i].strict;
            file_of("f", list[i].header, list[i].data);
            j->from = in_folder("f");
            j->how_from.partial = partial;
            j->how_from.prefix = list[i].prefix;
            j->how_from.ignore = list[i].ignore;
            if (says && (!partial || says[0] == '!')) {
                job_fails(j, DTRAIN_ERROR_DATA, says + (says[0] == '!'));
                continue;
            }
            if (!job_go(j, list[i].header)) continue;
            CHECK_MSG(partial && says[0] ? strstr(j->info[1].note, says) != NULL
                                         : !j->info[1].note[0],
                      "case %d: \"%s\"", (int)i, j->info[1].note);
            const bool kept = partial && strstr(j->info[0].note, "\"" N_NORM "\"");
            CHECK(j->values[j->at[WTE]] == 0 && (j->values[j->at[NORM]] != 0) == kept);
            CHECK(j->info[0].values == (kept ? HEAD - 1 : HEAD));
        }
    /* bytes of the head that are others than those of wte */
    size_t bytes;
    unsigned char *all;
    job *j = job_new(DTRAIN_STRATEGY_DDP, 2);
    file_of("f",
            "{" HEADER_WTE "," HEADER_REST HEADER_NORM ",\"" N_HEAD
            "\":{\"dtype\":\"F32\",\"shape\":[37,10],\"data_offsets\":[3504,4984]}}",
            4984);
    all = slurp(in_folder("f"), &bytes);
    all[bytes - 1] = 1;
    spill(in_folder("f"), all, bytes);
    free(all);
    j->from = in_folder("f");
    const dtrain_result result = ranks_launch(&j->launch, job_main, j, NULL);
    CHECK_MSG(result != DTRAIN_OK && strstr(j->error[1], "\"" N_WTE "\" and \"" N_HEAD "\" differ"),
              "%s", j->error[1]);
    folder_remove();
}

/* ---- refusals ---- */

static dtrain_export_name refused[PARAMS];

static void test_refusals(void)
{
    static char name[600], path[800];
    memset(name, 'n', sizeof name - 1);
    memset(path, 'p', sizeof path - 1);
    folder_make();
    for (int i = 0; i < 16; i++) {
        job *j = job_new(i % 2 ? DTRAIN_STRATEGY_ZERO3 : DTRAIN_STRATEGY_DDP, 2);
        const char *says = NULL;
        dtrain_result code = DTRAIN_ERROR_ARGUMENT;
        memset(refused, 0, sizeof refused);
        j->to = in_folder("x");
        j->how_to.names = refused;
        if (i == 0) says = "has two tensors \"" N_NORM "\"", refused[UP].name = N_NORM;
        if (i == 1) says = "is to be transposed and has 1 dim", refused[UP_BIAS].transpose = true;
        if (i == 2) says = "is to be transposed and has 1 dim", refused[TINY].transpose = true;
        if (i == 3) says = "38 rows of \"" N_WTE "\"", refused[WTE].rows = 38;
        if (i == 4) says = "expected 0 (all) to 37", refused[WTE].rows = -1;
        if (i == 5) says = "19 rows of \"" N_UP_BIAS "\"", refused[UP_BIAS].rows = 19;
        if (i == 6) says = "a string of more than 511 bytes", refused[ONE].name = name;
        if (i == 7)
            says = "\"a?b\", at byte 619 of the JSON: a name with control",
            refused[ONE].name = "a\nb";
        if (i == 8)
            says = "\"__metadata__\", at byte 650 of the JSON: expected a string",
            refused[ONE].name = "__metadata__";
        if (i == 9) says = "dtype is 3, expected F32", j->how_to.dtype = DTRAIN_DTYPE_I32;
        if (i == 10)
            says = "import: two parameters are called \"" N_WPE "\"", refused[UP].name = N_WPE;
        if (i == 10) file_of("f", "{" HEADER_WTE "," HEADER_REST HEADER_NORM "}", 3504);
        if (i == 10) j->how_from.names = refused, j->from = in_folder("f");
        if (i == 11) says = "path is NULL, empty or longer", j->to = "";
        if (i == 12) says = "path is NULL, empty or longer", j->to = path;
        if (i >= 13) code = DTRAIN_ERROR_FILE;
        if (i == 13) says = "cannot be created: No such file", j->to = in_folder("none/x");
        if (i == 14) says = "cannot be renamed", j->to = in_folder("directory");
        if (i == 15) says = "none cannot be opened: No such", j->from = in_folder("none");
        if (i == 15) code = DTRAIN_ERROR_NOT_FOUND;
        if (i == 14) CHECK(shell("mkdir -p %s/directory/a", folder) == 0);
        job_fails(j, code, says);
        CHECK_MSG(shell("cd %s && rm -rf directory f && test -z \"$(ls)\"", folder) == 0,
                  "%s leaves files", says);
        munmap(j, sizeof *j);
    }
    CHECK(dtrain_checkpoint_export(NULL, "x", NULL) == DTRAIN_ERROR_ARGUMENT);
    CHECK(dtrain_checkpoint_import(NULL, "x", NULL, NULL) == DTRAIN_ERROR_ARGUMENT);
    folder_remove();
}

/* Two names that differ in one byte, up to the longest that there can be, are two tensors: in the file, and where a
 * sentence shows them. */
static void test_names_that_differ_in_a_byte(void)
{
    static const size_t pairs[][2] = {{41, 40}, {64, 63}, {101, 100}, {511, 510}, {511, 200}};
    char name[2][NAMES_BYTES], shown[2][100];
    folder_make();
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        for (int swapped = 0; swapped < 2; swapped++) {
            job *j = job_new(DTRAIN_STRATEGY_FULL_SHARD, 2);
            memset(refused, 0, sizeof refused);
            for (int k = 0; k < 2; k++) {
                refused[(k ^ swapped) ? NORM : UP_BIAS].name =
                    names_of_pair(name[k], pairs[i][0], pairs[i][1], k);
                dtrain__name_cut(shown[k], sizeof shown[k], name[k]);
            }
            j->from = swapped ? in_folder("x") : NULL;
            j->to = swapped ? NULL : in_folder("x");
            j->how_from.names = j->how_to.names = refused;
            if (!swapped && job_go(j, name[0])) { /* and read again */
                job *again = job_new(DTRAIN_STRATEGY_DDP, 2);
                again->from = j->to;
                again->seed = 6;
                again->how_from.names = refused;
                if (job_go(again, name[1])) CHECK(again->hash[0] == j->hash[0]);
            }
            if (!swapped) continue;
            CHECK(ranks_launch(&j->launch, job_main, j, NULL) != DTRAIN_OK);
            CHECK_MSG(strcmp(shown[0], shown[1]) != 0 && strstr(j->error[1], shown[0]) &&
                          strstr(j->error[1], shown[1]),
                      "%s", j->error[1]);
        }
    }
    folder_remove();
}

/* In the middle of a backward neither begins; both take NULL for all that can be. */
static int inside_backward(dtrain_world *world, job *j, dtrain_strategy *strategy,
                           dtrain_state *state)
{
    const char *path = in_folder("x");
    (void)world;
    (void)j;
    RANKS_TRY(dtrain_strategy_ready(strategy, NORM));
    CHECK(dtrain_checkpoint_export(strategy, path, NULL) == DTRAIN_ERROR_USAGE);
    CHECK(dtrain_checkpoint_import(state, path, NULL, NULL) == DTRAIN_ERROR_USAGE);
    CHECK(strstr(dtrain_last_error(), "a backward is under way"));
    RANKS_TRY(dtrain_strategy_finish(strategy));
    RANKS_TRY(dtrain_checkpoint_export(strategy, path, NULL));
    RANKS_TRY(dtrain_checkpoint_import(state, path, NULL, NULL));
    CHECK(dtrain_checkpoint_export(strategy, NULL, NULL) == DTRAIN_ERROR_ARGUMENT);
    CHECK(dtrain_checkpoint_import(state, NULL, NULL, NULL) == DTRAIN_ERROR_ARGUMENT);
    return 0;
}

static void test_between_steps(void)
{
    job *j = job_new(DTRAIN_STRATEGY_DDP, 1);
    folder_make();
    j->during = inside_backward;
    job_go(j, "between steps");
    folder_remove();
}

/* ---- an index that is wrong ---- */

static void test_index(void)
{
    static const struct {
        const char *text, *says;
        dtrain_result code;
    } list[] = {
        {"{\"weight_map\":{\"" N_WTE "\":\"../a\"}}", "expected the name of one beside the index",
         -13},
        {"{\"weight_map\":{\"" N_WTE "\":\"/etc/passwd\"}}",
         "its file is \"/etc/passwd\", expected", -13},
        {"{\"weight_map\":{\"" N_WTE "\":\"..\"}}", "expected the name of one beside the index",
         -13},
        {"{\"weight_map\":{\"" N_WTE "\":\".\"}}", "expected the name of one beside the index",
         -13},
        {"{\"weight_map\":{\"" N_WTE "\":\"\"}}", "expected the name of one beside the index", -13},
        {"{\"weight_map\":{\"" N_WTE "\":\"x/../a\"}}", "expected the name of one beside the index",
         -13},
        {"{\"weight_map\":{\"" N_WTE "\":\"none\"}}", "none cannot be opened: No such file", -12},
        {"{\"weight_map\":{\"" N_WTE "\":\"index.json\"}}", "index.json: its header has", -13},
        {"{\"weight_map\":{\"" N_WTE "\":\"b\"}}", "names 1 tensors, and its files have 2", -13},
        {"{\"weight_map\":{\"" N_WTE "\":\"a\",\"q\":\"b\"}}",
         "names 2 tensors, and its files have 3", -13},
        {"{\"weight_map\":{\"" N_WTE "\":\"a\",\"" N_WTE "\":\"a\"}}",
         "names 2 tensors, and its files have 1", -13},
        {"{\"weight_map\":{}}", "missing in it: \"" N_WTE "\"", -13},
        {"{}", "has no \"weight_map\"", -13},
        {"{\"weight_map\":{},\"weight_map\":{}}", "a second \"weight_map\"", -13},
        {"{\"weight_map\":{\"" N_WTE "\":3}}", "index.json", -13},
        {"{\"weight_map\":[]}", "index.json", -13},
        {"[]", "index.json", -13},
        {"", "index.json", -13},
        {"{\"weight_map\":{\"" N_WTE "\":\"a\"}}x", "index.json", -13},
    };
    folder_make();
    file_of("a", "{" HEADER_WTE "}", 1480);
    file_of("b",
            "{\"q\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
            "\"p\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}",
            8);
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        job *j = job_new(DTRAIN_STRATEGY_DDP, 2);
        spill(in_folder("index.json"), list[i].text, strlen(list[i].text));
        j->from = in_folder("index.json");
        job_fails(j, list[i].code, list[i].says);
        munmap(j, sizeof *j);
    }
    folder_remove();
}

/* ---- damage ---- */

/* A file that is cut anywhere, or changed anywhere in its header: an error on all ranks, or a file all the same. */
static void test_damage(void)
{
    job *j = job_new(DTRAIN_STRATEGY_FULL_SHARD, 2);
    size_t bytes, turns = test_full() ? 5000 : 400;
    uint64_t state = 1, errors = 0;
    folder_make();
    j->to = in_folder("good");
    job_go(j, "good");
    unsigned char *all = slurp(j->to, &bytes), *copy = (unsigned char *)malloc(bytes);
    j->to = NULL;
    j->from = in_folder("bad");
    for (size_t i = 0; i < turns; i++) {
        const bool cut = i % 4 == 0;
        const size_t end = cut ? (size_t)ranks_random(&state, bytes) : bytes;
        memcpy(copy, all, bytes);
        for (int k = 0; k < 1 + (int)(i % 3) && !cut; k++)
            copy[ranks_random(&state, 700)] = (unsigned char)ranks_random(&state, 256);
        spill(j->from, copy, end);
        const dtrain_result result = ranks_launch(&j->launch, job_main, j, NULL);
        errors += result != DTRAIN_OK;
        CHECK_MSG(cut ? result != DTRAIN_OK : j->ended[0] == j->ended[1], "turn %d: %d and %d",
                  (int)i, j->ended[0], j->ended[1]);
        for (int r = 0; r < 2 && result != DTRAIN_OK; r++)
            CHECK_MSG(j->ended[r] == DTRAIN_ERROR_DATA && strstr(j->error[r], "bad"), "%s",
                      j->error[r]);
    }
    CHECK_MSG(errors > turns / 2, "%d errors", (int)errors);
    free(all);
    free(copy);
    folder_remove();
}

/* ---- memory ---- */

static counted_memory memory;

/* Fail at every call, first of an export and then of an import, in one launch: all ranks hear of it, and the next
 * attempt goes well. */
static int failing_memory(dtrain_world *world, job *j, dtrain_strategy *strategy,
                          dtrain_state *state)
{
    static int32_t calls[2];
    dtrain_comm *comm = dtrain_world_comm(world);
    const int rank = dtrain_world_rank(world);
    const char *path = j->to;
    for (int import = 0; import < 2; import++) {
        if (import && rank == 0) divide(NULL, path);
        for (int n = 1; n < 400; n++) {
            RANKS_TRY(dtrain_barrier(comm));
            const long live = memory.live;
            RANKS_TRY(dtrain_barrier(comm));
            if (rank == 0) memory.fail_at = memory.calls + n;
            RANKS_TRY(dtrain_barrier(comm));
            dtrain_result result = import
                                       ? dtrain_checkpoint_import(state, path, &j->how_from, NULL)
                                       : dtrain_checkpoint_export(strategy, path, &j->how_to);
            if (result != DTRAIN_OK)
                CHECK_MSG(result == DTRAIN_ERROR_MEMORY && strstr(dtrain_last_error(), "no memory"),
                          "call %d: %s", n, dtrain_last_error());
            int32_t failed = result != DTRAIN_OK, least, most;
            memory.fail_at = 0;
            RANKS_TRY(dtrain_all_reduce(comm, &failed, &least, 1, DTRAIN_DTYPE_I32,
                                        DTRAIN_REDUCE_MIN, NULL));
            RANKS_TRY(dtrain_all_reduce(comm, &failed, &most, 1, DTRAIN_DTYPE_I32,
                                        DTRAIN_REDUCE_MAX, NULL));
            CHECK_MSG(least == most, "call %d: some ranks failed, others did not", n);
            CHECK_MSG(memory.live == live, "call %d: %ld blocks before, %ld after", n, live,
                      memory.live);
            RANKS_TRY(dtrain_barrier(comm)); /* nobody frees more before all have looked */
            if (!most) {
                calls[import] = n;
                break;
            }
        }
    }
    CHECK_MSG(calls[0] > 6 && calls[1] > 10, "%d and %d calls", calls[0], calls[1]);
    return 0;
}

static void test_memory(void)
{
    for (int ranks = 1; ranks <= 3; ranks++) {
        job *j = job_new(DTRAIN_STRATEGY_FULL_SHARD, ranks);
        memset(&memory, 0, sizeof memory);
        folder_make();
        j->to = in_folder("model.safetensors");
        j->during = failing_memory;
        j->launch.options.allocator = counted_allocator(&memory);
        job_go(j, "failing memory");
        CHECK(memory.live == 0 && memory.wrong == 0);
        folder_remove();
    }
}

/* ---- disks ---- */

static job *disk_job(disk *d, int ranks, uint64_t seed)
{
    job *j = job_new(DTRAIN_STRATEGY_FULL_SHARD, ranks);
    j->seed = seed;
    j->how_to.storage = j->how_from.storage = &d->table;
    return j;
}

/* Which of two models is there; 0: none can be read, -1: another one. */
static int disk_model(disk *d, const uint64_t hashes[2])
{
    job *j = disk_job(d, 1, 77);
    int model = 0;
    j->from = "/w.safetensors";
    if (ranks_launch(&j->launch, job_main, j, NULL) == DTRAIN_OK)
        model = j->hash[0] == hashes[0] ? 1 : j->hash[0] == hashes[1] ? 2 : -1;
    munmap(j, sizeof *j);
    return model;
}

/* Every call of an export over an older one fails, once or for good, or is the last before power is lost: an error on
 * all ranks, and the old file or the new. */
static void test_failing_disk(void)
{
    uint64_t hashes[2];
    disk *good = disk_new();
    job *j = disk_job(good, 2, 1);
    j->to = "/w.safetensors";
    job_go(j, "a good disk");
    hashes[0] = j->hash[0];
    good->writes_only = true;
    good->calls = 0;
    disk *next = disk_copy(good);
    j = disk_job(next, 2, 2);
    j->to = "/w.safetensors";
    job_go(j, "a good disk");
    hashes[1] = j->hash[0];
    const long calls = next->calls;
    CHECK_MSG(calls > 12 && disk_model(next, hashes) == 2, "%ld calls", calls);
    for (long n = 1; n <= calls; n++)
        for (int how = 0; how < 4; how++) { /* once; for good; and then power is lost */
            disk *d = disk_copy(good);
            j = disk_job(d, 2, 2);
            j->to = "/w.safetensors";
            d->fail_at = n;
            d->fail_on = how > 0;
            const dtrain_result result = ranks_launch(&j->launch, job_main, j, NULL);
            CHECK_MSG(result == DTRAIN_OK ||
                          (j->ended[0] == DTRAIN_ERROR_FILE && j->ended[1] == DTRAIN_ERROR_FILE),
                      "call %ld (%s): %s; %s", n, d->last_failed, j->error[0], j->error[1]);
            if (how >= 2) disk_lose_power(d, (uint64_t)(how - 2) * (uint64_t)n);
            d->fail_at = 0;
            const int model = disk_model(d, hashes);
            CHECK_MSG(model == (result == DTRAIN_OK ? 2 : 1) ||
                          (result != DTRAIN_OK && model == 2 &&
                           n >= calls - 2), /* the new name was not synced */
                      "call %ld (%s), %d: model %d", n, d->last_failed, how, model);
            j->to = "/w.safetensors"; /* what is left is no hindrance */
            if (job_go(j, "the disk is well again")) CHECK(disk_model(d, hashes) == 2);
            munmap(j, sizeof *j);
            disk_free(d);
        }
    disk_free(good);
    disk_free(next);
}

/* Reading one file, and then several: every call fails; then transfers are short or interrupted. */
static void test_failing_reads(void)
{
    disk *d = disk_new();
    job *j = disk_job(d, 2, 2);
    j->to = "/w.safetensors";
    job_go(j, "a good disk");
    const uint64_t hashes[2] = {j->hash[0], 0};
    for (int several = 0; several < 2; several++) {
        if (several) divide(&d->table, "/w.safetensors");
        d->reads_only = true;
        for (long n = 1; n <= 2000; n++) {
            j = disk_job(d, 2, 77);
            j->from = "/w.safetensors";
            d->calls = 0;
            d->fail_at = n;
            const dtrain_result result = ranks_launch(&j->launch, job_main, j, NULL);
            const long made = d->calls;
            munmap(j, sizeof *j);
            d->fail_at = 0;
            if (made < n && CHECK(result == DTRAIN_OK)) break;
            CHECK_MSG(result != DTRAIN_OK || strcmp(d->last_failed, "close") == 0 ||
                          strcmp(d->last_failed, "open") == 0 /* to find out what is there */,
                      "call %ld (%s) fails, and all goes well", n, d->last_failed);
        }
        d->rough = true;
        CHECK(disk_model(d, hashes) == 1);
        d->rough = false;
    }
    d->rough = true;
    j = disk_job(d, 2, 1);
    j->to = "/w.safetensors";
    if (job_go(j, "a rough disk")) CHECK(disk_model(d, (uint64_t[2]){0, j->hash[0]}) == 2);
    disk_free(d);
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    RUN(test_kinds);
    RUN(test_types);
    RUN(test_files);
    RUN(test_header);
    RUN(test_fit);
    RUN(test_refusals);
    RUN(test_names_that_differ_in_a_byte);
    RUN(test_between_steps);
    RUN(test_index);
    RUN(test_damage);
    RUN(test_memory);
    RUN(test_failing_disk);
    RUN(test_failing_reads);
    return test_summary();
}
