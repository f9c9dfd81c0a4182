/* llmc.h: a GPT-2 as llm.c keeps it, in one .bin file: its sizes, import and export.
 *
 * The file is 256 int32, little-endian, and then all values without a gap:
 *
 *     header   20240326, version (3: F32, 5: BF16), positions, vocabulary, layers, heads, channels,
 *              rows of wte: the vocabulary and its padding
 *     values   wte, wpe, then each of a block's twelve parameters for all blocks, one behind the
 *              other, then the last norm's weight and bias
 *
 * Linear layers are (out, in) in both, so that nothing is transposed. Padding is written as zeros and
 * not read. Include it after gpt.h. */
#ifndef LLMC_H
#define LLMC_H

#include "gpt.h"

#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <unistd.h>

enum {
    LLMC_MAGIC = 20240326,
    LLMC_F32 = 3,
    LLMC_BF16 = 5,
    LLMC_HEADER = 256,    /* numbers */
    LLMC_OF_BLOCK = 12,   /* parameters */
    LLMC_BLOCK = 1 << 16, /* values that are read or written at a time */
};

typedef struct llmc_file {
    const char *path;
    FILE *file;
} llmc_file;

static inline dtrain_result llmc__fail(const llmc_file *f, const char *act)
{
    return dtrain_fail(DTRAIN_ERROR_FILE, "%s cannot be %s: %s", f->path, act, strerror(errno));
}

static inline dtrain_result llmc__open(llmc_file *f, const char *path, bool writes)
{
    const char *why = NULL;
    f->path = path;
    f->file = writes ? open_new(path) : open_to_read(path, &why);
    if (f->file) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_FILE, "%s cannot be opened: %s", path,
                       why ? why : strerror(errno));
}

static inline void llmc__close(llmc_file *f)
{
    if (f->file) (void)fclose(f->file);
    f->file = NULL;
}

static inline dtrain_result llmc__read(llmc_file *f, void *to, size_t bytes)
{
    if (fread(to, 1, bytes, f->file) == bytes) return DTRAIN_OK;
    if (ferror(f->file)) return llmc__fail(f, "read");
    return dtrain_fail(DTRAIN_ERROR_DATA, "%s ends at byte %ld, in the middle of its data", f->path,
                       ftell(f->file));
}

static inline dtrain_result llmc__write(llmc_file *f, const void *from, size_t bytes)
{
    return fwrite(from, 1, bytes, f->file) == bytes ? DTRAIN_OK : llmc__fail(f, "written");
}

/* ---- sizes ---------------------------------------------------------------------------------- */

typedef struct llmc_header {
    gpt_config config; /* seq 0, dropout 0; the rest is what llm.c computes */
    int64_t rows;      /* of wte */
    size_t each;       /* bytes of a value */
} llmc_header;

/* The place in params, and the elements in a file, of its number `index`; the head, which is wte
 * once more, is in none. */
static inline size_t llmc__param(const gpt_config *c, size_t index)
{
    const size_t of_blocks = LLMC_OF_BLOCK * (size_t)c->layers, k = index - 2;
    if (index < 2 || k >= of_blocks) return index;
    return 2 + k % (size_t)c->layers * LLMC_OF_BLOCK + k / (size_t)c->layers;
}

static inline int64_t llmc__count(const gpt *m, int64_t rows, size_t param)
{
    const dtrain_param *p = &m->params[param];
    const int64_t first = p == m->wte ? rows : p->shape[0];
    return first * (p->shape[1] ? p->shape[1] : 1);
}

/* The number of values of such a model, or -1 for more than a file can have. */
static inline int64_t llmc__total(const gpt_config *c, int64_t rows)
{
    const double channels = (double)c->channels;
    const double total = channels * ((double)rows + (double)c->positions + 2) +
                         (double)c->layers * channels * (12 * channels + 13);
    return total < 4e18 / sizeof(float) ? (int64_t)total : -1;
}

/* Check the numbers of a header, and the size of the file. */
static inline dtrain_result llmc__check(llmc_file *f, const int32_t *header, llmc_header *found)
{
    static const char *const names[] = {"positions", "vocabulary", "layers",
                                        "heads",     "channels",   "padded vocabulary"};
    const gpt_config config = {
        header[4], header[5], header[6], 0, header[2], header[3], 0, 1e-5f, DTRAIN_ACTIVATION_GELU};
    if (header[0] != LLMC_MAGIC)
        return dtrain_fail(DTRAIN_ERROR_DATA,
                           "%s begins with the number %d, expected %d, that of a model of llm.c",
                           f->path, (int)header[0], LLMC_MAGIC);
    if (header[1] != LLMC_F32 && header[1] != LLMC_BF16)
        return dtrain_fail(DTRAIN_ERROR_DATA,
                           "%s is of version %d, expected %d (F32) or %d (BF16), with a padded "
                           "vocabulary; llm.c's train_gpt2.py writes such files",
                           f->path, (int)header[1], LLMC_F32, LLMC_BF16);
    for (int i = 0; i < 6; i++)
        if (header[2 + i] < 1)
            return dtrain_fail(DTRAIN_ERROR_DATA, "%s: %s is %d, expected 1 or more", f->path,
                               names[i], (int)header[2 + i]);
    if (header[6] % header[5] || header[7] < header[3])
        return dtrain_fail(DTRAIN_ERROR_DATA,
                           "%s: %d channels, %d heads, %d symbols and %d with padding do not go "
                           "together",
                           f->path, (int)header[6], (int)header[5], (int)header[3], (int)header[7]);
    found->config = config;
    found->rows = header[7];
    found->each = header[1] == LLMC_BF16 ? sizeof(uint16_t) : sizeof(float);
    const int64_t total = llmc__total(&config, found->rows);
    const int64_t expected =
        (int64_t)(LLMC_HEADER * sizeof(int32_t)) + total * (int64_t)found->each;
    const long bytes = fseek(f->file, 0, SEEK_END) == 0 ? ftell(f->file) : -1;
    if (bytes < 0) return llmc__fail(f, "read");
    if (total > 0 && bytes == expected) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_DATA, "%s has %ld bytes, expected %lld after its header",
                       f->path, bytes, (long long)expected);
}

/* Open a file and read its header; whoever calls closes it, also after an error. */
static inline dtrain_result llmc__begin(llmc_file *f, const char *path, llmc_header *found)
{
    uint8_t bytes[LLMC_HEADER * sizeof(int32_t)];
    int32_t header[LLMC_HEADER];
    dtrain_result result = llmc__open(f, path, false);
    memset(found, 0, sizeof *found);
    if (result == DTRAIN_OK) result = llmc__read(f, bytes, sizeof bytes);
    if (result != DTRAIN_OK) return result;
    for (size_t i = 0; i < LLMC_HEADER; i++)
        header[i] = (int32_t)((uint32_t)bytes[4 * i] | (uint32_t)bytes[4 * i + 1] << 8 |
                              (uint32_t)bytes[4 * i + 2] << 16 | (uint32_t)bytes[4 * i + 3] << 24);
    return llmc__check(f, header, found);
}

/* Whether a file begins as one of llm.c's does. A file that cannot be opened does not. */
static inline bool llmc_is_model(const char *path)
{
    static const uint8_t magic[4] = {LLMC_MAGIC & 0xff, LLMC_MAGIC >> 8 & 0xff,
                                     LLMC_MAGIC >> 16 & 0xff, LLMC_MAGIC >> 24};
    uint8_t begin[4];
    llmc_file f;
    const bool is = llmc__open(&f, path, false) == DTRAIN_OK &&
                    llmc__read(&f, begin, sizeof begin) == DTRAIN_OK &&
                    memcmp(begin, magic, sizeof magic) == 0;
    llmc__close(&f);
    return is;
}

/* Read the sizes of a model; seq and dropout are 0. */
static inline dtrain_result llmc_read_config(const char *path, gpt_config *config)
{
    llmc_file f;
    llmc_header header;
    const dtrain_result result = llmc__begin(&f, path, &header);
    llmc__close(&f);
    if (result == DTRAIN_OK) *config = header.config;
    return result;
}

/* ---- import --------------------------------------------------------------------------------- */

/* Widen values in place, from the last to the first: the file's lie in the lower half of `block`. */
static inline void llmc__widen(float *block, int64_t count)
{
    for (int64_t i = count - 1; i >= 0; i--) {
        uint16_t low;
        memcpy(&low, (const char *)block + (size_t)i * sizeof low, sizeof low);
        block[i] = dtrain_half_to_f32(DTRAIN_DTYPE_BF16, low);
    }
}

/* Return the place in its tensor of element i of a piece, and in *run how many from there on follow one another. */
static inline int64_t llmc__place(const dtrain_state_tensor *tensor, int64_t i, int64_t *run)
{
    const dtrain_piece *piece = &tensor->piece;
    const int64_t n = tensor->shape[1] ? tensor->shape[1] : 1; /* of a row */
    const int64_t first = tensor->shape[1] ? piece->first[1] : 0;
    const int64_t length = tensor->shape[1] ? piece->length[1] : 1;
    const int64_t at = piece->offset + i;
    *run = piece->count - i;
    if (length<n && * run> length - at % length) *run = length - at % length;
    return (piece->first[0] + at / length) * n + first + at % length;
}

/* Read a piece that this rank has of a parameter that begins at byte `at`, and set its padding to zero. */
static inline dtrain_result llmc__read_piece(llmc_file *f, const llmc_header *header,
                                             dtrain_device *device, const gpt *m,
                                             const dtrain_state_tensor *piece, uint64_t at,
                                             float *block)
{
    const bool padded = strcmp(piece->name, m->wte->name) == 0;
    const int64_t stored = padded ? m->config.vocab * m->config.channels : piece->total;
    dtrain_result result = DTRAIN_OK;
    for (int64_t done = 0, count; done < piece->piece.count && result == DTRAIN_OK; done += count) {
        const int64_t first = llmc__place(piece, done, &count);
        if (count > LLMC_BLOCK) count = LLMC_BLOCK;
        int64_t here = stored - first < count ? stored - first : count;
        if (here < 0) here = 0;
        if (fseek(f->file, (long)(at + (uint64_t)first * header->each), SEEK_SET) != 0)
            return llmc__fail(f, "read");
        result = llmc__read(f, block, (size_t)here * header->each);
        if (header->each < sizeof(float)) llmc__widen(block, here);
        memset(block + here, 0, (size_t)(count - here) * sizeof *block);
        if (result == DTRAIN_OK)
            result = dtrain_device_copy(device, (float *)piece->memory + done, block,
                                        (size_t)count * sizeof *block);
    }
    return result;
}

/* Refuse a file of another model than the one that is there. */
static inline dtrain_result llmc__compare(const char *path, const gpt_config *a,
                                          const gpt_config *b)
{
    if (a->layers == b->layers && a->heads == b->heads && a->channels == b->channels &&
        a->positions == b->positions && a->vocab == b->vocab)
        return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_DATA,
                       "%s has %ld layers, %ld heads, %ld channels, %ld positions and %ld symbols, "
                       "expected %ld, %ld, %ld, %ld and %ld",
                       path, a->layers, a->heads, a->channels, a->positions, a->vocab, b->layers,
                       b->heads, b->channels, b->positions, b->vocab);
}

/* Set the parameters to those of a file. Collective, between two steps: every rank reads what it
 * keeps, of whatever strategy. */
static inline dtrain_result llmc_import(dtrain_world *world, dtrain_state *state, const gpt *m,
                                        const char *path)
{
    const dtrain_state_tensor *pieces;
    llmc_file f;
    llmc_header header;
    size_t piece_count, end = m->param_count - 1;
    uint64_t at = LLMC_HEADER * sizeof(int32_t);
    float *block = (float *)malloc(LLMC_BLOCK * sizeof *block);
    dtrain_result result = llmc__begin(&f, path, &header);
    if (!block) result = dtrain_fail(DTRAIN_ERROR_MEMORY, "no memory for a block");
    if (result == DTRAIN_OK) result = llmc__compare(path, &header.config, &m->config);
    if (result == DTRAIN_OK) result = dtrain_state_tensors(state, &pieces, &piece_count);
    for (size_t i = 0; i < end && result == DTRAIN_OK; i++) {
        const size_t param = llmc__param(&m->config, i);
        for (size_t k = 0; k < piece_count && result == DTRAIN_OK; k++)
            if (pieces[k].kind == DTRAIN_STATE_VALUE &&
                strcmp(pieces[k].name, m->params[param].name) == 0)
                result = llmc__read_piece(&f, &header, dtrain_world_device(world), m, &pieces[k],
                                          at, block);
        at += (uint64_t)llmc__count(m, header.rows, param) * header.each;
    }
    llmc__close(&f);
    free(block);
    return result == DTRAIN_OK ? dtrain_state_changed(state) : result;
}

/* ---- export --------------------------------------------------------------------------------- */

/* Write values, or zeros where there are none (NULL), as fp32 or bf16. block (LLMC_BLOCK) */
static inline dtrain_result llmc__put(llmc_file *f, const float *values, int64_t count, bool bf16,
                                      float *block)
{
    dtrain_result result = DTRAIN_OK;
    for (int64_t done = 0; done < count && result == DTRAIN_OK; done += LLMC_BLOCK) {
        const int64_t some = count - done < LLMC_BLOCK ? count - done : LLMC_BLOCK;
        memset(block, 0, LLMC_BLOCK * sizeof *block);
        for (int64_t i = 0; i < some && values; i++) {
            const uint16_t low = dtrain_half_from_f32(DTRAIN_DTYPE_BF16, values[done + i]);
            if (bf16) memcpy((char *)block + (size_t)i * sizeof low, &low, sizeof low);
            else block[i] = values[done + i];
        }
        result = llmc__write(f, block, (size_t)some * (bf16 ? sizeof(uint16_t) : sizeof(float)));
    }
    return result;
}

static inline dtrain_result llmc__put_header(llmc_file *f, const gpt_config *c, int64_t rows,
                                             bool bf16)
{
    const long numbers[8] = {LLMC_MAGIC,   bf16 ? LLMC_BF16 : LLMC_F32,
                             c->positions, c->vocab,
                             c->layers,    c->heads,
                             c->channels,  (long)rows};
    uint8_t bytes[LLMC_HEADER * sizeof(int32_t)] = {0};
    for (size_t i = 0; i < 32; i++) bytes[i] = (uint8_t)(numbers[i / 4] >> 8 * (i % 4));
    return llmc__write(f, bytes, sizeof bytes);
}

/* Give the file its name, when all of it is on the disk; after an error, remove it. */
static inline dtrain_result llmc__publish(llmc_file *f, const char *path, dtrain_result result)
{
    if (result == DTRAIN_OK && (fflush(f->file) != 0 || fsync(fileno(f->file)) != 0))
        result = llmc__fail(f, "written");
    llmc__close(f);
    if (result == DTRAIN_OK && rename(f->path, path) != 0) result = llmc__fail(f, "renamed");
    if (result != DTRAIN_OK) (void)remove(f->path);
    return result;
}

/* Write the parameters to a file. Collective, between two steps: one whole parameter after the other
 * is in the memory of every rank, and rank 0 writes. An error of its disk is its own: the others go
 * on to the end. */
static inline dtrain_result llmc_export(dtrain_world *world, dtrain_strategy *strategy,
                                        const gpt *m, bool bf16, const char *path)
{
    const bool writes = dtrain_world_rank(world) == 0;
    const int64_t rows = (m->config.vocab + 127) / 128 * 128;
    int64_t most = 0;
    char name[4096];
    llmc_file f = {name, NULL};
    dtrain_result result = DTRAIN_OK, gathered = DTRAIN_OK;
    for (size_t i = 0; i + 1 < m->param_count; i++) {
        const int64_t all = llmc__count(m, m->wte->shape[0], i);
        if (all > most) most = all;
    }
    float *value = (float *)malloc((size_t)most * sizeof *value);
    float *block = (float *)malloc(LLMC_BLOCK * sizeof *block);
    if (!value || !block) result = dtrain_fail(DTRAIN_ERROR_MEMORY, "no memory for a parameter");
    snprintf(name, sizeof name, "%.4000s.tmp", path);
    if (result == DTRAIN_OK && writes) {
        result = llmc__open(&f, name, true);
        if (result == DTRAIN_OK) result = llmc__put_header(&f, &m->config, rows, bf16);
    }
    for (size_t i = 0; value && i + 1 < m->param_count && gathered == DTRAIN_OK; i++) {
        const size_t param = llmc__param(&m->config, i);
        const bool padded = &m->params[param] == m->wte;
        const int64_t all = llmc__count(m, rows, param);
        const int64_t stored = padded ? m->config.vocab * m->config.channels : all;
        gathered = dtrain_strategy_read(strategy, param, value);
        if (result == DTRAIN_OK) result = gathered;
        if (result != DTRAIN_OK || !writes) continue;
        result = llmc__put(&f, value, stored, bf16, block);
        if (result == DTRAIN_OK) result = llmc__put(&f, NULL, all - stored, bf16, block);
    }
    if (writes) result = llmc__publish(&f, path, result);
    free(value);
    free(block);
    return result;
}

#endif /* LLMC_H */
