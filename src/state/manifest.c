/* Manifests: what a checkpoint holds and where, as JSON
 *
 *     {"format": "dtrain checkpoint", "version": 2, "library": "0.2.0", "step": 1000, "ranks": 2,
 *      "strategy": "zero1", "hierarchical": false, "metric_bits": 4611686018427387904,
 *      "run": 83, "job": 83, "config": "...", "block": 1048576,
 *      "model": {"heads": "4", ...}, "settings": {"seed": "1337", ...},
 *      "scalars": [{"name": "optimizer.step", "value": 1000}, ...],
 *      "tensors": [{"name": "wte", "kind": "value", "dtype": "F32", "shape": [256, 128],
 *                   "own": false}, ...],
 *      "files": [{"name": "model-00000.safetensors", "bytes": 131192, "rank": 0,
 *                 "pieces": [[0, 0, 16384, 120, "8a9136aa"], ...]}, ...],
 *      "crc32c": "e3069283"}
 *
 * The tensors are those of all ranks. A piece is: the number of its tensor in that list, the first
 * element and the length of its run, its first byte in the file, the checksum of each block of
 * DTRAIN__BLOCK bytes and, where its box is not the whole tensor, a first index and a length for
 * each of four axes. A float is stored as its bits.
 *
 * "run" numbers the history that this checkpoint continues, and "job" one start of a launcher with
 * all its restarts; 0 = unknown.
 *
 * The last member is the seal: the checksum of all bytes before its comma. Each rank's part of the
 * list of files is sealed in the same way. A text with a correct seal is still checked like any
 * input.
 *
 * Names, dtypes and byte ranges stand in the headers of the data files as well, so that other
 * programs read those. They are repeated here, because a rank that loads then opens one manifest
 * and the files that it needs, not the files of all ranks. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/crc32c_internal.h"
#include "core/dtype.h"
#include "core/log.h"
#include "core/result.h"
#include "world/world_internal.h"
#include "comm/comm.h"
#include "strategy/query.h"
#include "strategy/view_internal.h"
#include "state/box_internal.h"
#include "state/checkpoint_internal.h"
#include "state/safetensors_internal.h"
#include "state/state_internal.h"
#include "state/storage_internal.h"

#define DTRAIN__MANIFEST_FORMAT "dtrain checkpoint"
#define DTRAIN__SEAL_FORM ", \"crc32c\": \"%08x\"}\n"
#define DTRAIN__SEAL_BYTES 24

/* ---- Seals ------------------------------------------------------------------------------------*/

/* End an object with the checksum of what there is of it. */
DTRAIN__PRIVATE void dtrain__seal(dtrain__text *text)
{
    if (!text->failed)
        dtrain__text_add(text, DTRAIN__SEAL_FORM, dtrain__crc32c(0, text->at, text->bytes));
}

/* Check the seal of a text, and close its object without it. */
DTRAIN__PRIVATE dtrain_result dtrain__unseal(const char *path, char *text, size_t *bytes)
{
    char expected[DTRAIN__SEAL_BYTES + 1];
    if (*bytes > DTRAIN__SEAL_BYTES) {
        const size_t rest = *bytes - DTRAIN__SEAL_BYTES;
        snprintf(expected, sizeof expected, DTRAIN__SEAL_FORM, dtrain__crc32c(0, text, rest));
        if (memcmp(text + rest, expected, DTRAIN__SEAL_BYTES) == 0) {
            text[rest] = '}';
            *bytes = rest + 1;
            return DTRAIN_OK;
        }
    }
    return dtrain_fail(DTRAIN_ERROR_DATA,
                       "%s does not have the checksum (CRC-32C) that it ends with: it is damaged, "
                       "or not all of it was written",
                       path);
}

/* ---- Members ----------------------------------------------------------------------------------*/

/* Reader and writer go through the same tables of members, which are in the order of writing. The
 * form of a member says what type holds it. */
typedef enum dtrain__form {
    DTRAIN__FORM_U64,
    DTRAIN__FORM_I64,
    DTRAIN__FORM_BOOL,
    DTRAIN__FORM_TEXT,   /* const char * */
    DTRAIN__FORM_KIND,   /* uint32_t */
    DTRAIN__FORM_DTYPE,  /* uint32_t */
    DTRAIN__FORM_SHAPE,  /* int64_t[4] */
    DTRAIN__FORM_OBJECT, /* dtrain__object */
    DTRAIN__FORM_LIST    /* of what `read` reads one of */
} dtrain__form;

typedef struct dtrain__member {
    const char *name;
    dtrain__form form;
    size_t at; /* in the struct */
    bool (*read)(dtrain__manifest *m, dtrain__json *json);
} dtrain__member;

/* ---- Reading ----------------------------------------------------------------------------------*/

/* Make room for one more item of a list; otherwise the text has come to its end. */
static bool dtrain__one_more(dtrain__manifest *m, dtrain__json *json, void **array, size_t count,
                             size_t *room, size_t item_bytes)
{
    if (dtrain__grow(m->allocator, array, count, room, item_bytes, "a manifest's lists"))
        return true;
    json->result = DTRAIN_ERROR_MEMORY;
    json->at = json->end;
    return false;
}

/* Read a string that must be one of a list; *which is its place. */
static bool dtrain__read_word(dtrain__json *json, const char *what,
                              const char *(*word_of)(uint32_t), uint32_t count, uint32_t *which)
{
    char word[32];
    if (!dtrain__json_string(json, word, sizeof word)) return false;
    for (*which = 0; *which < count; ++*which)
        if (strcmp(word, word_of(*which)) == 0) return true;
    return dtrain__json_fail(json, "%s \"%s\" is unknown", what, word);
}

static bool dtrain__read_shape(dtrain__json *json, int64_t shape[4])
{
    int dims = 0;
    if (!dtrain__json_enter(json, '[')) return false;
    while (dtrain__json_item(json)) {
        if (dims == 4) return dtrain__json_fail(json, "a shape has more than 4 dimensions");
        if (!dtrain__json_count(json, &shape[dims])) return false;
        if (shape[dims] < (dims > 0)) return dtrain__json_fail(json, "a dimension is too small");
        dims++;
    }
    if (json->result == DTRAIN_OK && dims == 0) return dtrain__json_fail(json, "a shape is empty");
    return json->result == DTRAIN_OK;
}

/* Check those members on which the reading of lists depends: they are written before the lists. */
static bool dtrain__head_check(const dtrain__manifest *m, dtrain__json *json)
{
    if (!m->format || strcmp(m->format, DTRAIN__MANIFEST_FORMAT) != 0)
        return dtrain__json_fail(json, "the format is \"%.100s\", expected \"%s\"",
                                 m->format ? m->format : "", DTRAIN__MANIFEST_FORMAT);
    if (m->version != DTRAIN__MANIFEST_VERSION)
        return dtrain__json_fail(json,
                                 "it has version %llu of the format, and this is dtrain %s, which "
                                 "reads version %d",
                                 (unsigned long long)m->version, DTRAIN_VERSION_STRING,
                                 DTRAIN__MANIFEST_VERSION);
    if (m->block == DTRAIN__BLOCK && m->step >= 0 && m->step <= DTRAIN__STEP_MOST &&
        m->ranks >= 1 && m->ranks <= INT32_MAX)
        return true;
    return dtrain__json_fail(json, "step %lld, %lld ranks or blocks of %llu bytes cannot be",
                             (long long)m->step, (long long)m->ranks, (unsigned long long)m->block);
}

/* Read a member to its place in the struct. A string is decoded where it is in the text: it becomes
 * no longer by that. */
static bool dtrain__read_member(dtrain__manifest *m, dtrain__json *json,
                                const dtrain__member *member, void *at)
{
    dtrain__object object;
    char *string;
    switch (member->form) {
    case DTRAIN__FORM_U64: return dtrain__json_u64(json, (uint64_t *)at);
    case DTRAIN__FORM_I64: return dtrain__json_count(json, (int64_t *)at);
    case DTRAIN__FORM_BOOL: return dtrain__json_bool(json, (bool *)at);
    case DTRAIN__FORM_TEXT:
        (void)dtrain__json_peek(json);
        string = m->text + (json->at - json->text);
        if (!dtrain__json_string(json, string, (size_t)(json->end - json->at))) return false;
        *(const char **)at = string;
        return true;
    case DTRAIN__FORM_KIND:
        return dtrain__read_word(json, "kind", dtrain__state_kind_name, DTRAIN_STATE_KINDS,
                                 (uint32_t *)at);
    case DTRAIN__FORM_DTYPE:
        return dtrain__read_word(json, "dtype", dtrain__stored_name, DTRAIN_STATE_BYTES + 1,
                                 (uint32_t *)at);
    case DTRAIN__FORM_SHAPE: return dtrain__read_shape(json, (int64_t *)at);
    case DTRAIN__FORM_OBJECT:
        (void)dtrain__json_peek(json);
        object.at = json->at;
        if (!dtrain__json_skip(json)) return false;
        object.bytes = (size_t)(json->at - object.at);
        *(dtrain__object *)at = object;
        return true;
    case DTRAIN__FORM_LIST: break;
    }
    if (!dtrain__head_check(m, json) || !dtrain__json_enter(json, '[')) return false;
    while (dtrain__json_item(json)) member->read(m, json);
    return json->result == DTRAIN_OK;
}

/* Read an object by the table of its members, and skip others: people, or a later library, may have
 * added some. */
static bool dtrain__read_members(dtrain__manifest *m, dtrain__json *json,
                                 const dtrain__member *members, void *object)
{
    char name[32];
    if (!dtrain__json_enter(json, '{')) return false;
    while (dtrain__json_member(json, name, sizeof name)) {
        const dtrain__member *member = members;
        while (member->name && strcmp(member->name, name) != 0) member++;
        if (member->name) dtrain__read_member(m, json, member, (char *)object + member->at);
        else dtrain__json_skip(json);
    }
    return json->result == DTRAIN_OK;
}

static const dtrain__member dtrain__scalar_members[] = {
    {"name", DTRAIN__FORM_TEXT, offsetof(dtrain__saved_scalar, name), NULL},
    {"value", DTRAIN__FORM_U64, offsetof(dtrain__saved_scalar, bits), NULL},
    {NULL, DTRAIN__FORM_U64, 0, NULL}};

static bool dtrain__read_scalar(dtrain__manifest *m, dtrain__json *json)
{
    dtrain__saved_scalar *scalar = &m->scalars[m->scalar_count];
    if (m->scalar_count + 1 == sizeof m->scalars / sizeof m->scalars[0])
        return dtrain__json_fail(json, "there are more scalars than any version has");
    if (!dtrain__read_members(m, json, dtrain__scalar_members, scalar)) return false;
    m->scalar_count++;
    return scalar->name || dtrain__json_fail(json, "a scalar has no name");
}

static const dtrain__member dtrain__tensor_members[] = {
    {"name", DTRAIN__FORM_TEXT, offsetof(dtrain_state_tensor, name), NULL},
    {"kind", DTRAIN__FORM_KIND, offsetof(dtrain_state_tensor, kind), NULL},
    {"dtype", DTRAIN__FORM_DTYPE, offsetof(dtrain_state_tensor, dtype), NULL},
    {"shape", DTRAIN__FORM_SHAPE, offsetof(dtrain_state_tensor, shape), NULL},
    {"own", DTRAIN__FORM_BOOL, offsetof(dtrain_state_tensor, own), NULL},
    {NULL, DTRAIN__FORM_U64, 0, NULL}};

/* Read a tensor, and multiply its shape out without overflow. */
static bool dtrain__read_tensor(dtrain__manifest *m, dtrain__json *json)
{
    if (!dtrain__one_more(m, json, (void **)&m->tensors, m->tensor_count, &m->tensor_room,
                          sizeof *m->tensors))
        return false;
    dtrain_state_tensor *tensor = &m->tensors[m->tensor_count].tensor;
    memset(&m->tensors[m->tensor_count++], 0, sizeof *m->tensors);
    tensor->shape[0] = -1;
    tensor->total = 1;
    if (!dtrain__read_members(m, json, dtrain__tensor_members, tensor)) return false;
    if (!tensor->name || !tensor->name[0] || tensor->shape[0] < 0)
        return dtrain__json_fail(json, "a tensor has no name or no shape");
    for (int d = 0; d < 4 && (d == 0 || tensor->shape[d]); d++) {
        if (tensor->shape[d] && tensor->total > INT64_MAX / 8 / tensor->shape[d])
            return dtrain__json_fail(json, "a shape is too large");
        tensor->total *= tensor->shape[d];
    }
    return true;
}

/* Find the checksums of a piece, which stay in the text. */
static bool dtrain__read_crc(dtrain__json *json, uint64_t bytes, const char **crc)
{
    const uint64_t blocks = bytes / DTRAIN__BLOCK + (bytes % DTRAIN__BLOCK != 0);
    if (dtrain__json_peek(json) != '"') return dtrain__json_fail(json, "a piece has no checksums");
    *crc = json->at + 1;
    if (!dtrain__json_skip(json)) return false;
    const size_t digits = (size_t)(json->at - 1 - *crc);
    if (digits == blocks * DTRAIN__CRC_DIGITS && strspn(*crc, "0123456789abcdef") >= digits)
        return true;
    return dtrain__json_fail(json, "expected %llu checksums of 8 hexadecimal digits",
                             (unsigned long long)blocks);
}

/* Read the numbers behind a piece's checksums: its box. */
static bool dtrain__read_box(dtrain__json *json, dtrain_piece *piece)
{
    if (!dtrain__json_item(json)) return json->result == DTRAIN_OK; /* the whole tensor */
    for (int d = 0; d < 4; d++)
        if ((d && !dtrain__json_item(json)) || !dtrain__json_count(json, &piece->first[d]) ||
            !dtrain__json_item(json) || !dtrain__json_count(json, &piece->length[d]))
            return dtrain__json_fail(json, "a box is not eight numbers");
    return !dtrain__json_item(json) || dtrain__json_fail(json, "a piece has too many items");
}

static bool dtrain__read_piece(dtrain__manifest *m, dtrain__json *json)
{
    const dtrain__saved_file *file = &m->files[m->file_count];
    dtrain__saved_piece piece;
    uint64_t number[4] = {0, 0, 0, 0}; /* tensor, offset, count, at */
    if (!dtrain__one_more(m, json, (void **)&m->pieces, m->piece_count, &m->piece_room,
                          sizeof piece) ||
        !dtrain__json_enter(json, '['))
        return false;
    for (int i = 0; i < 4; i++)
        if (!dtrain__json_item(json) || !dtrain__json_u64(json, &number[i]))
            return dtrain__json_fail(json, "a piece is not four numbers and checksums");
    if (number[0] >= m->tensor_count || file->rank < 0)
        return dtrain__json_fail(json, "there is no tensor %llu, or no rank that wrote it",
                                 (unsigned long long)number[0]);
    const dtrain_state_tensor *tensor = &m->tensors[number[0]].tensor;
    const uint64_t each = dtrain__state_bytes(tensor->dtype), total = (uint64_t)tensor->total;
    piece.tensor = (uint32_t)number[0];
    piece.file = (uint32_t)m->file_count;
    piece.rank = tensor->own ? file->rank : -1;
    piece.piece = dtrain__piece_whole(tensor->shape);
    piece.piece.offset = (int64_t)number[1];
    piece.piece.count = (int64_t)number[2];
    piece.at = number[3];
    if (!dtrain__json_item(json) || number[2] > total ||
        !dtrain__read_crc(json, number[2] * each, &piece.crc))
        return dtrain__json_fail(json, "a piece is not four numbers and checksums");
    if (!dtrain__read_box(json, &piece.piece)) return false;
    if (number[2] == 0 || !dtrain__piece_fits(&piece.piece, tensor->shape) ||
        number[3] > file->bytes || number[2] > (file->bytes - number[3]) / each)
        return dtrain__json_fail(json, "a piece of \"%s\" is not in it, or not in its file",
                                 dtrain__short(tensor->name));
    m->pieces[m->piece_count++] = piece;
    return json->result == DTRAIN_OK;
}

static const dtrain__member dtrain__file_members[] = {
    {"name", DTRAIN__FORM_TEXT, offsetof(dtrain__saved_file, name), NULL},
    {"bytes", DTRAIN__FORM_U64, offsetof(dtrain__saved_file, bytes), NULL},
    {"rank", DTRAIN__FORM_I64, offsetof(dtrain__saved_file, rank), NULL},
    {"pieces", DTRAIN__FORM_LIST, 0, dtrain__read_piece},
    {NULL, DTRAIN__FORM_U64, 0, NULL}};

/* Read a file's entry. Its size and rank come before its pieces; its name must be one of the
 * directory's own. */
static bool dtrain__read_file(dtrain__manifest *m, dtrain__json *json)
{
    if (!dtrain__one_more(m, json, (void **)&m->files, m->file_count, &m->file_room,
                          sizeof *m->files))
        return false;
    dtrain__saved_file *file = &m->files[m->file_count];
    memset(file, 0, sizeof *file);
    file->rank = -1;
    if (!dtrain__read_members(m, json, dtrain__file_members, file)) return false;
    if (file->rank < 0 || file->rank >= m->ranks || file->bytes > INT64_MAX)
        return dtrain__json_fail(json, "a file comes without the rank that wrote it");
    if (!file->name || !file->name[0] || file->name[0] == '.' || strchr(file->name, '/') ||
        strlen(file->name) >= 64)
        return dtrain__json_fail(json, "a file has no name, or one that is not in the directory");
    m->file_count++;
    return true;
}

#define DTRAIN__HEAD(member) offsetof(dtrain__manifest, member)
static const dtrain__member dtrain__head_members[] = {
    {"format", DTRAIN__FORM_TEXT, DTRAIN__HEAD(format), NULL},
    {"version", DTRAIN__FORM_U64, DTRAIN__HEAD(version), NULL},
    {"library", DTRAIN__FORM_TEXT, DTRAIN__HEAD(library), NULL},
    {"step", DTRAIN__FORM_I64, DTRAIN__HEAD(step), NULL},
    {"ranks", DTRAIN__FORM_I64, DTRAIN__HEAD(ranks), NULL},
    {"strategy", DTRAIN__FORM_TEXT, DTRAIN__HEAD(strategy), NULL},
    {"hierarchical", DTRAIN__FORM_BOOL, DTRAIN__HEAD(hierarchical), NULL},
    {"block", DTRAIN__FORM_U64, DTRAIN__HEAD(block), NULL},
    {"metric_bits", DTRAIN__FORM_U64, DTRAIN__HEAD(metric_bits), NULL},
    {"run", DTRAIN__FORM_U64, DTRAIN__HEAD(run), NULL},
    {"job", DTRAIN__FORM_U64, DTRAIN__HEAD(job), NULL},
    {"config", DTRAIN__FORM_TEXT, DTRAIN__HEAD(config), NULL},
    {"model", DTRAIN__FORM_OBJECT, DTRAIN__HEAD(model), NULL},
    {"settings", DTRAIN__FORM_OBJECT, DTRAIN__HEAD(settings), NULL},
    {"scalars", DTRAIN__FORM_LIST, 0, dtrain__read_scalar},
    {"tensors", DTRAIN__FORM_LIST, 0, dtrain__read_tensor},
    {"files", DTRAIN__FORM_LIST, 0, dtrain__read_file},
    {NULL, DTRAIN__FORM_U64, 0, NULL}};

/* ---- Writing ----------------------------------------------------------------------------------*/

/* Write the beginning of an object: its members up to the first list or object, which the caller
 * writes, as it does the end. */
static void dtrain__write_members(dtrain__text *text, const dtrain__member *member,
                                  const void *object)
{
    const char *separator = "{";
    for (; member->name && member->form < DTRAIN__FORM_OBJECT; member++, separator = ", ") {
        const void *at = (const char *)object + member->at;
        dtrain__text_add(text, "%s\"%s\": ", separator, member->name);
        if (member->form == DTRAIN__FORM_U64)
            dtrain__text_add(text, "%llu", (unsigned long long)*(const uint64_t *)at);
        else if (member->form == DTRAIN__FORM_I64)
            dtrain__text_add(text, "%lld", (long long)*(const int64_t *)at);
        else if (member->form == DTRAIN__FORM_BOOL)
            dtrain__text_add(text, "%s", *(const bool *)at ? "true" : "false");
        else if (member->form == DTRAIN__FORM_TEXT)
            dtrain__text_add_string(text, *(const char *const *)at);
        else if (member->form == DTRAIN__FORM_KIND)
            dtrain__text_add(text, "\"%s\"", dtrain__state_kind_name(*(const uint32_t *)at));
        else if (member->form == DTRAIN__FORM_DTYPE)
            dtrain__text_add(text, "\"%s\"", dtrain__stored_name(*(const uint32_t *)at));
        else {
            const int64_t *shape = (const int64_t *)at;
            for (int d = 0; d < 4 && (d == 0 || shape[d]); d++)
                dtrain__text_add(text, "%s%lld", d ? ", " : "[", (long long)shape[d]);
            dtrain__text_add(text, "]");
        }
    }
}

/* Begin the entry of a file, up to its pieces. */
DTRAIN__PRIVATE void dtrain__manifest_file(dtrain__text *text, const dtrain__saved_file *file)
{
    dtrain__text_add(text, "\n  ");
    dtrain__write_members(text, dtrain__file_members, file);
    dtrain__text_add(text, ", \"pieces\": [");
}

/* Write an object of strings. */
static void dtrain__write_settings(dtrain__text *text, const char *name, const char *const *pairs)
{
    dtrain__text_add(text, ",\n \"%s\": {", name);
    for (size_t i = 0; pairs && pairs[i]; i++) {
        if (i) dtrain__text_add(text, i % 2 ? ": " : ", ");
        dtrain__text_add_string(text, pairs[i]);
    }
    dtrain__text_add(text, "}");
}

/* Write a manifest up to its list of files. */
DTRAIN__PRIVATE void dtrain__manifest_head(dtrain__text *text, const dtrain_checkpoint *c)
{
    const dtrain_state *state = c->desc.state;
    dtrain__manifest m;
    dtrain_strategy_info info;
    memset(&m, 0, sizeof m);
    dtrain_strategy_query(state->desc.strategy, &info);
    m.format = DTRAIN__MANIFEST_FORMAT;
    m.version = DTRAIN__MANIFEST_VERSION;
    m.library = DTRAIN_VERSION_STRING;
    m.step = c->step;
    m.ranks = c->ranks;
    m.strategy = info.name;
    m.hierarchical = dtrain__goes_by_nodes(state->desc.strategy);
    m.block = DTRAIN__BLOCK;
    memcpy(&m.metric_bits, &c->metric, sizeof m.metric_bits);
    m.run = state->run;
    m.job = state->world->job;
    m.config = c->desc.config ? c->desc.config : "";
    dtrain__write_members(text, dtrain__head_members, &m);
    dtrain__write_settings(text, "model", state->desc.model);
    dtrain__write_settings(text, "settings", state->desc.settings);
    dtrain__text_add(text, ",\n \"scalars\": [");
    for (size_t i = 0; i < state->scalar_count; i++) {
        dtrain__saved_scalar scalar = {state->scalars[i].name, 0};
        memcpy(&scalar.bits, state->scalars[i].memory, state->scalars[i].bytes); /* little-endian */
        dtrain__text_add(text, "%s\n  ", i ? "," : "");
        dtrain__write_members(text, dtrain__scalar_members, &scalar);
        dtrain__text_add(text, "}");
    }
    dtrain__text_add(text, "],\n \"tensors\": [");
    for (size_t i = 0; i < c->held_count; i++) {
        if (i && c->held[i].number == c->held[i - 1].number) continue;
        dtrain__text_add(text, "%s\n  ", i ? "," : "");
        dtrain__write_members(text, dtrain__tensor_members, &c->held[i].tensor);
        dtrain__text_add(text, "}");
    }
    dtrain__text_add(text, "],\n \"files\": [");
}

/* ---- Sorting and checking ---------------------------------------------------------------------*/

static int dtrain__by_kind_and_name(const void *left, const void *right)
{
    const dtrain_state_tensor *a = &(*(const dtrain__saved_tensor *const *)left)->tensor;
    const dtrain_state_tensor *b = &(*(const dtrain__saved_tensor *const *)right)->tensor;
    if (a->kind != b->kind) return a->kind < b->kind ? -1 : 1;
    return strcmp(a->name, b->name);
}

/* Pieces of a tensor that all ranks share, whose rank is -1, come in the order of its elements,
 * others rank by rank. */
static int dtrain__by_place(const void *left, const void *right)
{
    const dtrain__saved_piece *a = (const dtrain__saved_piece *)left;
    const dtrain__saved_piece *b = (const dtrain__saved_piece *)right;
    if (a->tensor != b->tensor) return a->tensor < b->tensor ? -1 : 1;
    if (a->rank != b->rank) return a->rank < b->rank ? -1 : 1;
    return dtrain__piece_order(&a->piece, &b->piece);
}

/* Sort pieces by their places and tensors by their names, and check both. */
static dtrain_result dtrain__index(dtrain__manifest *m, const char *path)
{
    if (m->piece_count) qsort(m->pieces, m->piece_count, sizeof *m->pieces, dtrain__by_place);
    for (size_t i = 0; i < m->piece_count; i++) {
        dtrain__saved_tensor *saved = &m->tensors[m->pieces[i].tensor];
        if (saved->piece_count++ == 0) saved->first_piece = i;
    }
    m->by_name = (dtrain__saved_tensor **)dtrain__alloc(m->allocator, m->tensor_count,
                                                        sizeof *m->by_name, "names of tensors");
    if (!m->by_name) return DTRAIN_ERROR_MEMORY;
    for (size_t i = 0; i < m->tensor_count; i++) m->by_name[i] = &m->tensors[i];
    if (m->tensor_count)
        qsort(m->by_name, m->tensor_count, sizeof *m->by_name, dtrain__by_kind_and_name);
    for (size_t i = 0; i < m->tensor_count; i++) {
        const dtrain__saved_tensor *saved = m->by_name[i];
        if (i && dtrain__by_kind_and_name(&m->by_name[i - 1], &m->by_name[i]) == 0)
            return dtrain_fail(DTRAIN_ERROR_DATA, "%s: the %s of \"%s\" is there twice", path,
                               dtrain__state_kind_name(saved->tensor.kind),
                               dtrain__short(saved->tensor.name));
        const dtrain_piece *first = m->pieces ? &m->pieces[saved->first_piece].piece : NULL;
        if (!saved->tensor.own)
            DTRAIN__TRY(dtrain__pieces_check(path, &saved->tensor, first, sizeof *m->pieces,
                                             saved->piece_count));
    }
    return DTRAIN_OK;
}

/* Read the text of a manifest. */
static dtrain_result dtrain__manifest_parse(dtrain__manifest *m, const char *path)
{
    size_t bytes = m->text_bytes;
    m->step = -1;
    m->metric_bits = (uint64_t)0x7ff8 << 48; /* NaN: none */
    DTRAIN__TRY(dtrain__unseal(path, m->text, &bytes));
    dtrain__json json = dtrain__json_begin(path, m->text, bytes);
    if (dtrain__read_members(m, &json, dtrain__head_members, m)) dtrain__head_check(m, &json);
    DTRAIN__TRY(dtrain__json_end(&json));
    return dtrain__index(m, path);
}

/* Read the manifest of a checkpoint. After an error nothing is left to free. */
DTRAIN__PRIVATE dtrain_result dtrain__manifest_read(const dtrain__folder *folder,
                                                    const char *checkpoint, dtrain__manifest *out)
{
    const dtrain__file_path path = dtrain__path_in(checkpoint, "manifest.json");
    char *text;
    size_t bytes;
    memset(out, 0, sizeof *out);
    DTRAIN__TRY(dtrain__storage_get(folder->storage, folder->allocator, path.text,
                                    DTRAIN__MANIFEST_MOST, &text, &bytes));
    out->allocator = folder->allocator;
    out->text = text;
    out->text_bytes = bytes;
    const dtrain_result result = dtrain__manifest_parse(out, path.text);
    if (result != DTRAIN_OK) dtrain__manifest_free(out);
    return result;
}

DTRAIN__PRIVATE void dtrain__manifest_free(dtrain__manifest *m)
{
    if (!m->allocator) return;
    dtrain__free(m->allocator, m->by_name, m->tensor_count, sizeof *m->by_name);
    dtrain__free(m->allocator, m->tensors, m->tensor_room, sizeof *m->tensors);
    dtrain__free(m->allocator, m->pieces, m->piece_room, sizeof *m->pieces);
    dtrain__free(m->allocator, m->files, m->file_room, sizeof *m->files);
    dtrain__free(m->allocator, m->text, m->text_bytes + 1, 1);
    memset(m, 0, sizeof *m);
}

/* Find a tensor; NULL: there is none. */
DTRAIN__PRIVATE const dtrain__saved_tensor *dtrain__manifest_find(const dtrain__manifest *m,
                                                                  uint32_t kind, const char *name)
{
    dtrain__saved_tensor wanted, *key = &wanted;
    wanted.tensor.kind = kind;
    wanted.tensor.name = name;
    dtrain__saved_tensor **found = (dtrain__saved_tensor **)bsearch(
        &key, m->by_name, m->tensor_count, sizeof key, dtrain__by_kind_and_name);
    return found ? *found : NULL;
}
