/* Manifests: the index of a checkpoint, as JSON
 *
 *     {"format": "dtrain checkpoint", "version": 3, "library": "1.2.3", "step": 1000, "ranks": 2,
 *      "strategy": "zero1", "hierarchical": false, "metric_bits": 4611686018427387904,
 *      "run": 83, "job": 83, "config": "...",
 *      "model": {"heads": "4", ...},
 *      "settings": {"seed": "1337", ...},
 *      "headers": "8a9136aa62a8ab4346dd794e113fdb5c", "crc32c": "e3069283"}
 *
 * A float is stored as its bits. "run" is the number of the history that this checkpoint continues.
 * "job" is the number of one start of a launcher, with all its restarts; 0 = unknown. The last
 * member is the checksum of all bytes before its comma. A text with a correct checksum is still
 * checked like any input.
 *
 * The headers of the files say what the files hold (state/pieces.c). "headers" has the checksums of
 * the headers of all ranks: model-00000, state-00000, model-00001 and so on. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/crc32c_internal.h"
#include "core/log.h"
#include "core/result.h"
#include "world/world_internal.h"
#include "strategy/query.h"
#include "strategy/view_internal.h"
#include "state/checkpoint_internal.h"
#include "state/safetensors_internal.h"
#include "state/state_internal.h"
#include "state/storage_internal.h"

#define DTRAIN__MANIFEST_VERSION 3
#define DTRAIN__SEAL_FORM ", \"crc32c\": \"%08x\"}\n"
#define DTRAIN__SEAL_BYTES 24

/* ---- Writing ----------------------------------------------------------------------------------*/

/* Write settings as an object of strings. */
static void dtrain__write_settings(dtrain__text *text, const char *name, const char *const *pairs)
{
    dtrain__text_add(text, ",\n \"%s\": {", name);
    for (size_t i = 0; pairs && pairs[i]; i++) {
        if (i) dtrain__text_add(text, i % 2 ? ": " : ", ");
        dtrain__text_add_string(text, pairs[i]);
    }
    dtrain__text_add(text, "}");
}

/* Write a manifest up to "headers", whose checksums follow. */
DTRAIN__PRIVATE void dtrain__manifest_head(dtrain__text *text, const dtrain_checkpoint *c)
{
    const dtrain_state *state = c->desc.state;
    dtrain_strategy_info info;
    uint64_t bits;
    dtrain__strategy_info(state->desc.strategy, &info);
    dtrain__text_add(
        text,
        "{\"format\": \"dtrain checkpoint\", \"version\": %d, \"library\": \"%s\", \"step\": %lld, "
        "\"ranks\": %d,\n \"strategy\": ",
        DTRAIN__MANIFEST_VERSION, DTRAIN_VERSION_STRING, (long long)c->step, c->ranks);
    dtrain__text_add_string(text, info.name);
    memcpy(&bits, &c->metric, sizeof bits);
    dtrain__text_add(text, ", \"hierarchical\": %s, \"metric_bits\": %llu,\n",
                     dtrain__goes_by_nodes(state->desc.strategy) ? "true" : "false",
                     (unsigned long long)bits);
    dtrain__text_add(text,
                     " \"run\": %llu, \"job\": %llu, \"config\": ", (unsigned long long)state->run,
                     (unsigned long long)state->world->job);
    dtrain__text_add_string(text, c->desc.config ? c->desc.config : "");
    dtrain__write_settings(text, "model", state->desc.model);
    dtrain__write_settings(text, "settings", state->desc.settings);
    dtrain__text_add(text, ",\n \"headers\": \"");
}

/* End "headers" and the manifest, with the checksum of its text. */
DTRAIN__PRIVATE void dtrain__manifest_seal(dtrain__text *text)
{
    dtrain__text_add(text, "\"");
    if (!text->failed)
        dtrain__text_add(text, DTRAIN__SEAL_FORM, dtrain__crc32c(0, text->at, text->bytes));
}

/* ---- Reading ----------------------------------------------------------------------------------*/

/* Decode a string in place: it gets no longer. */
static bool dtrain__read_text(dtrain__manifest *m, dtrain__json *json, const char **text)
{
    (void)dtrain__json_peek(json);
    char *here = m->text + (json->at - json->text);
    *text = here;
    return dtrain__json_string(json, here, (size_t)(json->end - json->at));
}

/* Skip an object, and remember where it begins. */
static bool dtrain__read_later(dtrain__json *json, const char **object)
{
    (void)dtrain__json_peek(json);
    *object = json->at;
    return dtrain__json_skip(json);
}

/* Check the checksum of a manifest, then read its members. Unknown members are skipped: people or a
 * later library can add some. */
static dtrain_result dtrain__manifest_parse(dtrain__manifest *m, const char *path)
{
    const size_t seal = (size_t)dtrain__max((int64_t)m->text_bytes - DTRAIN__SEAL_BYTES, 0);
    char expected[DTRAIN__SEAL_BYTES + 1], name[32];
    snprintf(expected, sizeof expected, DTRAIN__SEAL_FORM, dtrain__crc32c(0, m->text, seal));
    if (strcmp(m->text + seal, expected) != 0)
        return dtrain_fail(DTRAIN_ERROR_DATA,
                           "%s does not have the checksum (CRC-32C) that it ends with: it is "
                           "damaged, or not all of it was written",
                           path);
    dtrain__json json = dtrain__json_begin(path, m->text, m->text_bytes), *j = &json;
    (void)dtrain__json_enter(j, '{');
    while (dtrain__json_member(j, name, sizeof name))
        if (strcmp(name, "version") == 0) (void)dtrain__json_u64(j, &m->version);
        else if (strcmp(name, "step") == 0) (void)dtrain__json_count(j, &m->step);
        else if (strcmp(name, "ranks") == 0) (void)dtrain__json_count(j, &m->ranks);
        else if (strcmp(name, "strategy") == 0) (void)dtrain__read_text(m, j, &m->strategy);
        else if (strcmp(name, "hierarchical") == 0) (void)dtrain__json_bool(j, &m->hierarchical);
        else if (strcmp(name, "metric_bits") == 0) (void)dtrain__json_u64(j, &m->metric_bits);
        else if (strcmp(name, "run") == 0) (void)dtrain__json_u64(j, &m->run);
        else if (strcmp(name, "job") == 0) (void)dtrain__json_u64(j, &m->job);
        else if (strcmp(name, "model") == 0) (void)dtrain__read_later(j, &m->model);
        else if (strcmp(name, "settings") == 0) (void)dtrain__read_later(j, &m->settings);
        else if (strcmp(name, "headers") == 0) (void)dtrain__read_text(m, j, &m->headers);
        else (void)dtrain__json_skip(j);
    DTRAIN__TRY(dtrain__json_end(j));
    if (m->version != DTRAIN__MANIFEST_VERSION)
        return dtrain_fail(DTRAIN_ERROR_DATA,
                           "%s: it has version %llu of the format, and this is dtrain %s, which "
                           "reads version %d",
                           path, (unsigned long long)m->version, DTRAIN_VERSION_STRING,
                           DTRAIN__MANIFEST_VERSION);
    const size_t digits = m->headers ? strlen(m->headers) : 0;
    if (m->step >= 0 && m->step <= DTRAIN__STEP_MOST && m->ranks >= 1 && m->ranks <= INT32_MAX &&
        digits == 2 * DTRAIN__CRC_DIGITS * (size_t)m->ranks &&
        strspn(m->headers, DTRAIN__HEX) == digits)
        return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_DATA,
                       "%s: step %lld, %lld ranks or their headers' checksums (%zu digits) cannot "
                       "be",
                       path, (long long)m->step, (long long)m->ranks, digits);
}

/* Read the manifest of a checkpoint, but no headers. After an error it needs no free. */
DTRAIN__PRIVATE dtrain_result dtrain__manifest_read(const dtrain__folder *folder,
                                                    const char *checkpoint, dtrain__manifest *out)
{
    const dtrain__file_path path = dtrain__path_in(checkpoint, "manifest.json");
    memset(out, 0, sizeof *out);
    out->step = -1;
    out->metric_bits = (uint64_t)0x7ff8 << 48; /* NaN: none */
    DTRAIN__TRY(dtrain__storage_get(folder->storage, folder->allocator, path.text,
                                    DTRAIN__MANIFEST_MOST, &out->text, &out->text_bytes));
    out->folder = folder;
    out->directory = checkpoint;
    const dtrain_result result = dtrain__manifest_parse(out, path.text);
    if (result != DTRAIN_OK) dtrain__manifest_free(out);
    return result;
}

DTRAIN__PRIVATE void dtrain__manifest_free(dtrain__manifest *m)
{
    if (!m->folder) return;
    const dtrain_allocator *allocator = m->folder->allocator;
    for (size_t f = 0; f < m->file_count; f++) dtrain__safetensors_free(&m->files[f]);
    dtrain__free(allocator, m->files, m->file_count, sizeof *m->files);
    dtrain__free(allocator, m->pieces, m->piece_room, sizeof *m->pieces);
    dtrain__free(allocator, m->text, m->text_bytes + 1, 1);
    memset(m, 0, sizeof *m);
}
