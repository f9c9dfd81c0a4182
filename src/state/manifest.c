/* Manifests: what a checkpoint holds and where, as JSON
 *
 *     {"format": "dtrain checkpoint", "version": 2, "library": "0.3.0", "step": 1000, "ranks": 2,
 *      "strategy": "zero1", "hierarchical": false, "metric_bits": 4611686018427387904,
 *      "run": 83, "job": 83, "parent": 900, "commit": "...", "config": "...", "block": 1048576,
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
 * "run" numbers the history that this checkpoint continues, "parent" is the step that it continues
 * from (-1: none), and "job" numbers one start of a launcher with all its restarts; 0 = unknown.
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
#include "core/dtype.h"
#include "core/log.h"
#include "core/result.h"
#include "world/world_internal.h"
#include "comm/comm.h"
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

/* ---- Writing ----------------------------------------------------------------------------------*/

static void dtrain__write_scalars(dtrain__text *text, const dtrain_state *state)
{
    for (size_t i = 0; i < state->scalar_count; i++) {
        uint64_t bits = 0;
        memcpy(&bits, state->scalars[i].memory, state->scalars[i].bytes); /* little-endian */
        dtrain__text_add(text, "%s\n  {\"name\": \"%s\", \"value\": %llu}", i ? "," : "",
                         state->scalars[i].name, (unsigned long long)bits);
    }
}

static void dtrain__write_tensors(dtrain__text *text, const dtrain_checkpoint *c)
{
    for (size_t i = 0; i < c->held_count; i++) {
        const dtrain__held *held = &c->held[i];
        if (i && held->tensor == held[-1].tensor) continue;
        dtrain__text_add(text, "%s\n  {\"name\": ", i ? "," : "");
        dtrain__text_add_string(text, held->name);
        dtrain__text_add(text, ", \"kind\": \"%s\", \"dtype\": \"%s\", \"shape\": [",
                         dtrain__state_kind_name((uint32_t)held->kind),
                         dtrain__stored_name((uint32_t)held->dtype));
        for (int d = 0; d < 4 && (d == 0 || held->shape[d]); d++)
            dtrain__text_add(text, "%s%lld", d ? ", " : "", (long long)held->shape[d]);
        dtrain__text_add(text, "], \"own\": %s}", held->own ? "true" : "false");
    }
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
    const double metric = c->metric;
    const bool by_nodes = dtrain__goes_by_nodes(state->desc.strategy);
    dtrain_strategy_info info;
    uint64_t bits;
    dtrain_strategy_query(state->desc.strategy, &info);
    memcpy(&bits, &metric, sizeof bits);
    dtrain__text_add(text,
                     "{\"format\": \"%s\", \"version\": %d, \"library\": \"%s\", \"step\": %lld,"
                     "\n \"ranks\": %d, \"strategy\": \"%s\", \"hierarchical\": %s, \"block\": %zu",
                     DTRAIN__MANIFEST_FORMAT, DTRAIN__MANIFEST_VERSION, dtrain_version(),
                     (long long)c->step, dtrain_comm_size(state->comm), info.name,
                     by_nodes ? "true" : "false", DTRAIN__BLOCK);
    if (metric == metric) /* unknown otherwise; -ffast-math only makes one of it */
        dtrain__text_add(text, ", \"metric_bits\": %llu", (unsigned long long)bits);
    dtrain__text_add(text, ",\n \"run\": %llu, \"job\": %llu, \"parent\": %lld",
                     (unsigned long long)state->run, (unsigned long long)state->world->job,
                     (long long)state->step);
    dtrain__text_add(text, ",\n \"commit\": ");
    dtrain__text_add_string(text, c->desc.commit ? c->desc.commit : "");
    dtrain__text_add(text, ",\n \"config\": ");
    dtrain__text_add_string(text, c->desc.config ? c->desc.config : "");
    dtrain__write_settings(text, "model", state->desc.model);
    dtrain__write_settings(text, "settings", state->desc.settings);
    dtrain__text_add(text, ",\n \"scalars\": [");
    dtrain__write_scalars(text, state);
    dtrain__text_add(text, "],\n \"tensors\": [");
    dtrain__write_tensors(text, c);
    dtrain__text_add(text, "],\n \"files\": [");
}

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

/* Read a string that stays: decoded it is no longer than in the text. */
static bool dtrain__read_name(dtrain__manifest *m, dtrain__json *json, const char **name)
{
    char *at = m->names + m->names_bytes;
    *name = at;
    if (!dtrain__json_string(json, at, DTRAIN__TENSOR_NAME)) return false;
    m->names_bytes += strlen(at) + 1;
    return true;
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

static bool dtrain__read_scalar(dtrain__manifest *m, dtrain__json *json)
{
    char name[16];
    dtrain__saved_scalar *scalar = &m->scalars[m->scalar_count];
    memset(scalar, 0, sizeof *scalar);
    if (m->scalar_count + 1 == sizeof m->scalars / sizeof m->scalars[0])
        return dtrain__json_fail(json, "there are more scalars than any version has");
    if (!dtrain__json_enter(json, '{')) return false;
    while (dtrain__json_member(json, name, sizeof name)) {
        if (strcmp(name, "name") == 0) dtrain__json_string(json, scalar->name, sizeof scalar->name);
        else if (strcmp(name, "value") == 0) dtrain__json_u64(json, &scalar->bits);
        else dtrain__json_skip(json);
    }
    m->scalar_count++;
    return json->result == DTRAIN_OK;
}

/* Read a shape, and multiply it out without overflow. */
static bool dtrain__read_shape(dtrain__json *json, dtrain__saved_tensor *tensor)
{
    int dims = 0;
    tensor->total = 1;
    if (!dtrain__json_enter(json, '[')) return false;
    while (dtrain__json_item(json)) {
        uint64_t n;
        if (!dtrain__json_u64(json, &n)) return false;
        if (dims == 4 || n > INT64_MAX / 8 || (n && tensor->total > INT64_MAX / 8 / (int64_t)n))
            return dtrain__json_fail(json, "a shape has more than 4 dimensions or is too large");
        tensor->shape[dims++] = (int64_t)n;
        tensor->total *= (int64_t)n;
    }
    if (json->result == DTRAIN_OK && dims == 0) return dtrain__json_fail(json, "a shape is empty");
    return json->result == DTRAIN_OK;
}

static bool dtrain__read_tensor(dtrain__manifest *m, dtrain__json *json)
{
    char name[16];
    dtrain__saved_tensor tensor;
    memset(&tensor, 0, sizeof tensor);
    tensor.total = -1;
    if (!dtrain__one_more(m, json, (void **)&m->tensors, m->tensor_count, &m->tensor_room,
                          sizeof tensor) ||
        !dtrain__json_enter(json, '{'))
        return false;
    while (dtrain__json_member(json, name, sizeof name)) {
        if (strcmp(name, "name") == 0) dtrain__read_name(m, json, &tensor.name);
        else if (strcmp(name, "kind") == 0)
            dtrain__read_word(json, "kind", dtrain__state_kind_name, DTRAIN_STATE_KINDS,
                              &tensor.kind);
        else if (strcmp(name, "dtype") == 0)
            dtrain__read_word(json, "dtype", dtrain__stored_name, DTRAIN_STATE_BYTES + 1,
                              &tensor.dtype);
        else if (strcmp(name, "shape") == 0) dtrain__read_shape(json, &tensor);
        else if (strcmp(name, "own") == 0) dtrain__json_bool(json, &tensor.own);
        else dtrain__json_skip(json);
    }
    if (json->result != DTRAIN_OK) return false;
    if (!tensor.name || !tensor.name[0] || tensor.total < 0)
        return dtrain__json_fail(json, "a tensor has no name or no shape");
    m->tensors[m->tensor_count++] = tensor;
    return true;
}

/* Read the checksums of a piece: they stay where they are in the text. */
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

static bool dtrain__read_piece(dtrain__manifest *m, dtrain__json *json, int rank)
{
    dtrain__saved_piece piece;
    uint64_t number[4] = {0, 0, 0, 0}; /* tensor, offset, count, at */
    if (!dtrain__one_more(m, json, (void **)&m->pieces, m->piece_count, &m->piece_room,
                          sizeof piece) ||
        !dtrain__json_enter(json, '['))
        return false;
    for (int i = 0; i < 4; i++)
        if (!dtrain__json_item(json) || !dtrain__json_u64(json, &number[i]))
            return dtrain__json_fail(json, "a piece is not four numbers and checksums");
    if (number[0] >= m->tensor_count)
        return dtrain__json_fail(json, "there is no tensor %llu", (unsigned long long)number[0]);
    const dtrain__saved_tensor *tensor = &m->tensors[number[0]];
    const uint64_t each = dtrain__state_bytes(tensor->dtype), total = (uint64_t)tensor->total;
    const uint64_t end = m->files[m->file_count].bytes;
    piece.tensor = (uint32_t)number[0];
    piece.file = (uint32_t)m->file_count;
    piece.rank = tensor->own ? rank : -1;
    piece.piece = dtrain__piece_whole(tensor->shape);
    piece.piece.offset = (int64_t)number[1];
    piece.piece.count = (int64_t)number[2];
    piece.at = number[3];
    if (!dtrain__json_item(json) || number[2] > total ||
        !dtrain__read_crc(json, number[2] * each, &piece.crc))
        return dtrain__json_fail(json, "a piece is not four numbers and checksums");
    if (!dtrain__read_box(json, &piece.piece)) return false;
    if (number[2] == 0 || !dtrain__piece_fits(&piece.piece, tensor->shape) || number[3] > end ||
        number[2] > (end - number[3]) / each)
        return dtrain__json_fail(json, "a piece of \"%.100s\" is not in it, or not in its file",
                                 tensor->name);
    m->pieces[m->piece_count++] = piece;
    return json->result == DTRAIN_OK;
}

/* Tell whether a name is one of a file in the directory, and nothing else. */
static bool dtrain__plain_name(const char *name)
{
    return name[0] && name[0] != '.' && !strchr(name, '/') && strlen(name) < 64;
}

/* Read a file's entry. Its name, size and rank come before its pieces. */
static bool dtrain__read_file(dtrain__manifest *m, dtrain__json *json)
{
    char name[16];
    const uint64_t ranks = (uint64_t)m->ranks;
    uint64_t rank = ranks; /* not known yet */
    if (!dtrain__one_more(m, json, (void **)&m->files, m->file_count, &m->file_room,
                          sizeof *m->files) ||
        !dtrain__json_enter(json, '{'))
        return false;
    dtrain__saved_file *file = &m->files[m->file_count];
    memset(file, 0, sizeof *file);
    while (dtrain__json_member(json, name, sizeof name)) {
        if (strcmp(name, "name") == 0) dtrain__read_name(m, json, &file->name);
        else if (strcmp(name, "bytes") == 0) dtrain__json_u64(json, &file->bytes);
        else if (strcmp(name, "rank") == 0) dtrain__json_u64(json, &rank);
        else if (strcmp(name, "pieces") != 0) dtrain__json_skip(json);
        else if (rank < ranks && dtrain__json_enter(json, '['))
            while (dtrain__json_item(json)) dtrain__read_piece(m, json, (int)rank);
        else break;
    }
    if (json->result == DTRAIN_OK && (rank >= ranks || file->bytes > INT64_MAX))
        return dtrain__json_fail(json, "a file comes without the rank that wrote it");
    if (json->result == DTRAIN_OK && (!file->name || !dtrain__plain_name(file->name)))
        return dtrain__json_fail(json, "a file has no name, or one that is not in the directory");
    m->file_count++;
    return json->result == DTRAIN_OK;
}

/* Keep the place of an object in the text. */
static bool dtrain__read_object(dtrain__json *json, const char **object, size_t *bytes)
{
    (void)dtrain__json_peek(json);
    *object = json->at;
    if (!dtrain__json_skip(json)) return false;
    *bytes = (size_t)(json->at - *object);
    return true;
}

static bool dtrain__read_version(dtrain__manifest *m, dtrain__json *json)
{
    if (!dtrain__json_u64(json, &m->version)) return false;
    if (m->version >= 1 && m->version <= DTRAIN__MANIFEST_VERSION) return true;
    return dtrain__json_fail(
        json,
        "it has version %llu of the format, and this is dtrain %s, which reads "
        "versions up to %d",
        (unsigned long long)m->version, dtrain_version(), DTRAIN__MANIFEST_VERSION);
}

/* Read a list with one of its items' readers. */
static bool dtrain__read_list(dtrain__manifest *m, dtrain__json *json,
                              bool (*item)(dtrain__manifest *, dtrain__json *))
{
    if (!dtrain__json_enter(json, '[')) return false;
    while (dtrain__json_item(json)) item(m, json);
    return json->result == DTRAIN_OK;
}

/* Read one member. What is not known here is of people, or of a later library. */
static bool dtrain__read_member(dtrain__manifest *m, dtrain__json *json, const char *name)
{
    char word[32];
    uint64_t number = 0;
    if (strcmp(name, "format") == 0)
        return dtrain__json_string(json, word, sizeof word) &&
               (strcmp(word, DTRAIN__MANIFEST_FORMAT) == 0 ||
                dtrain__json_fail(json, "the format is \"%s\", expected \"%s\"", word,
                                  DTRAIN__MANIFEST_FORMAT));
    if (strcmp(name, "version") == 0) return dtrain__read_version(m, json);
    if (strcmp(name, "strategy") == 0)
        return dtrain__json_string(json, m->strategy, sizeof m->strategy);
    if (strcmp(name, "step") == 0) return dtrain__json_count(json, &m->step);
    if (strcmp(name, "run") == 0) return dtrain__json_u64(json, &m->run);
    if (strcmp(name, "job") == 0) return dtrain__json_u64(json, &m->job);
    if (strcmp(name, "hierarchical") == 0) return dtrain__json_bool(json, &m->hierarchical);
    if (strcmp(name, "model") == 0) return dtrain__read_object(json, &m->model, &m->model_bytes);
    if (strcmp(name, "settings") == 0)
        return dtrain__read_object(json, &m->settings, &m->settings_bytes);
    if (strcmp(name, "scalars") == 0) return dtrain__read_list(m, json, dtrain__read_scalar);
    if (strcmp(name, "tensors") == 0) return dtrain__read_list(m, json, dtrain__read_tensor);
    if (strcmp(name, "files") == 0) return dtrain__read_list(m, json, dtrain__read_file);
    if (strcmp(name, "metric_bits") == 0) {
        m->has_metric = dtrain__json_u64(json, &number);
        memcpy(&m->metric, &number, sizeof number);
    } else if (strcmp(name, "block") == 0) {
        if (dtrain__json_u64(json, &number) && number != DTRAIN__BLOCK)
            dtrain__json_fail(json, "blocks have %llu bytes, expected %zu",
                              (unsigned long long)number, DTRAIN__BLOCK);
    } else if (strcmp(name, "ranks") == 0) {
        if (dtrain__json_u64(json, &number) && (number < 1 || number > INT32_MAX))
            dtrain__json_fail(json, "ranks is %llu", (unsigned long long)number);
        m->ranks = (int)number;
    } else dtrain__json_skip(json);
    return json->result == DTRAIN_OK;
}

/* Read all members. Files need the ranks and the tensors before them; tensors that come twice are
 * found later. */
static bool dtrain__read_members(dtrain__manifest *m, dtrain__json *json)
{
    char name[32];
    m->step = -1;
    if (!dtrain__json_enter(json, '{')) return false;
    while (dtrain__json_member(json, name, sizeof name)) dtrain__read_member(m, json, name);
    if (json->result == DTRAIN_OK && (!m->version || !m->ranks || m->step < 0))
        return dtrain__json_fail(json, "there is no version, number of ranks or step");
    return json->result == DTRAIN_OK;
}

/* ---- What has been read, in order -------------------------------------------------------------*/

static int dtrain__by_kind_and_name(const void *left, const void *right)
{
    const dtrain__saved_tensor *a = *(const dtrain__saved_tensor *const *)left;
    const dtrain__saved_tensor *b = *(const dtrain__saved_tensor *const *)right;
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
        dtrain__saved_tensor *tensor = &m->tensors[m->pieces[i].tensor];
        if (tensor->piece_count++ == 0) tensor->first_piece = i;
    }
    m->by_name = (dtrain__saved_tensor **)dtrain__alloc(m->allocator, m->tensor_count,
                                                        sizeof *m->by_name, "names of tensors");
    if (!m->by_name) return DTRAIN_ERROR_MEMORY;
    for (size_t i = 0; i < m->tensor_count; i++) m->by_name[i] = &m->tensors[i];
    if (m->tensor_count)
        qsort(m->by_name, m->tensor_count, sizeof *m->by_name, dtrain__by_kind_and_name);
    for (size_t i = 0; i < m->tensor_count; i++) {
        if (i && dtrain__by_kind_and_name(&m->by_name[i - 1], &m->by_name[i]) == 0)
            return dtrain_fail(DTRAIN_ERROR_DATA, "%s: the %s of \"%.100s\" is there twice", path,
                               dtrain__state_kind_name(m->by_name[i]->kind), m->by_name[i]->name);
        const dtrain__saved_tensor *tensor = m->by_name[i];
        if (!tensor->own)
            DTRAIN__TRY(dtrain__pieces_check(
                path, tensor->kind, tensor->name, &m->pieces[tensor->first_piece].piece,
                sizeof *m->pieces, tensor->piece_count, tensor->total));
    }
    return DTRAIN_OK;
}

/* Read a manifest from a text, sealed, which goes into the hands of *out in any case. */
DTRAIN__PRIVATE dtrain_result dtrain__manifest_parse(const char *path, char *text, size_t bytes,
                                                     dtrain__manifest *out)
{
    out->text = text;
    out->text_bytes = bytes;
    out->names = (char *)dtrain__alloc(out->allocator, bytes + 1, 1, "names of a manifest");
    if (!out->names) return DTRAIN_ERROR_MEMORY;
    DTRAIN__TRY(dtrain__unseal(path, text, &bytes));
    dtrain__json json = dtrain__json_begin(path, text, bytes);
    dtrain__read_members(out, &json);
    DTRAIN__TRY(dtrain__json_end(&json));
    return dtrain__index(out, path);
}

/* Read the manifest of a checkpoint's directory. After an error nothing is left to free. */
DTRAIN__PRIVATE dtrain_result dtrain__manifest_read(const dtrain_storage *storage,
                                                    const dtrain_allocator *allocator,
                                                    const char *directory, dtrain__manifest *out)
{
    char path[DTRAIN__PATH], *text;
    size_t bytes;
    memset(out, 0, sizeof *out);
    out->allocator = allocator;
    snprintf(path, sizeof path, "%s/manifest.json", directory);
    DTRAIN__TRY(
        dtrain__storage_get(storage, allocator, path, DTRAIN__MANIFEST_MOST, &text, &bytes));
    const dtrain_result result = dtrain__manifest_parse(path, text, bytes, out);
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
    dtrain__free(m->allocator, m->names, m->text_bytes + 1, 1);
    dtrain__free(m->allocator, m->text, m->text_bytes + 1, 1);
    memset(m, 0, sizeof *m);
}

/* Find a tensor; NULL: there is none. */
DTRAIN__PRIVATE const dtrain__saved_tensor *dtrain__manifest_find(const dtrain__manifest *m,
                                                                  uint32_t kind, const char *name)
{
    size_t low = 0, high = m->tensor_count;
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        const dtrain__saved_tensor *tensor = m->by_name[middle];
        const int order =
            tensor->kind != kind ? (tensor->kind < kind ? -1 : 1) : strcmp(tensor->name, name);
        if (order == 0) return tensor;
        if (order < 0) low = middle + 1;
        else high = middle;
    }
    return NULL;
}
