/* gpt.h: a GPT written with dtrain: sizes, parameters, forward function, loss.
 *
 * For train_gpt.c and other programs of this folder: include it after dtrain.h. Backward is the
 * tape's. The pieces have the types that dtrain's callbacks have: gpt_set_batch and gpt_loss fit
 * dtrain_batch_search and dtrain_trainer_desc, with a gpt_batch as user. */
#ifndef GPT_H
#define GPT_H

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cache.h"
#include "tools/hugging_face.h"

typedef struct gpt_config {
    long layers, heads, channels, seq, positions, vocab; /* seq: tokens of a sample, <= positions */
    float dropout;                                       /* on the residual stream */
    float epsilon;                                       /* of the norms; 0 = 1e-5 */
    uint32_t activation;                                 /* of the MLP; 0 = GELU */
} gpt_config;

typedef struct gpt_preset {
    const char *name;
    gpt_config config; /* 0 positions: those of seq; 0 vocab: that of the data */
    long batch, sample;
    double lr;
} gpt_preset;

#define GPT_PRESETS "sums, tiny, baby, gpt2, gpt2_medium, gpt2_large or gpt2_xl"

/* Number `index` of them, or NULL after the last. */
static inline const gpt_preset *gpt_preset_at(size_t index)
{
    static const gpt_preset presets[] = {
        /* measured: what learns sums.h in the shortest time on a CPU, and with every seed */
        {"sums", {2, 4, 96, 40, 0, 0, 0, 0, 0}, 8, 300, 3e-3},
        /* 2 ranks x 6: nanoGPT's configuration for a CPU */
        {"tiny", {4, 4, 128, 64, 0, 0, 0, 0, 0}, 6, 300, 2e-3},
        {"baby", {6, 6, 384, 128, 0, 0, 0, 0, 0}, 8, 300, 1e-3},
        {"gpt2", {12, 12, 768, 1024, 1024, 50257, 0, 0, 0}, 4, 0, 6e-4},
        {"gpt2_medium", {24, 16, 1024, 1024, 1024, 50257, 0, 0, 0}, 4, 0, 3e-4},
        {"gpt2_large", {36, 20, 1280, 1024, 1024, 50257, 0, 0, 0}, 4, 0, 2.5e-4},
        {"gpt2_xl", {48, 25, 1600, 1024, 1024, 50257, 0, 0, 0}, 4, 0, 2e-4},
    };
    return index < sizeof presets / sizeof presets[0] ? &presets[index] : NULL;
}

/* Rows of the token embedding, columns of the logits: the vocabulary, and where it is larger than
 * that of bytes padding to a multiple of 128, 50257 to 50304, because GEMMs of a GPU are faster
 * with rows that begin at aligned addresses. The loss leaves padding out, so that its embedding has
 * no gradient and stays 0: losses, gradients and samples are those of a model without it. */
static inline long gpt_columns(const gpt_config *config)
{
    return config->vocab <= 256 ? config->vocab : (config->vocab + 127) / 128 * 128;
}

/* NULL: there is none of that name. */
static inline const gpt_preset *gpt_preset_find(const char *name)
{
    const gpt_preset *preset = gpt_preset_at(0);
    for (size_t i = 1; preset && strcmp(preset->name, name) != 0; i++) preset = gpt_preset_at(i);
    return preset;
}

/* ---- parameters ----------------------------------------------------------------------------- */

typedef struct gpt_block {
    dtrain_param *ln1_weight, *ln1_bias, *qkv_weight, *qkv_bias, *proj_weight, *proj_bias;
    dtrain_param *ln2_weight, *ln2_bias, *fc_weight, *fc_bias, *fcproj_weight, *fcproj_bias;
} gpt_block;

typedef struct gpt {
    gpt_config config;
    dtrain_param *params;
    size_t param_count;
    char (*names)[32];
    dtrain_param *wte, *wpe, *lnf_weight, *lnf_bias, *head;
    gpt_block *blocks;
} gpt;

/* What an MLP can compute between its layers, as transformers calls it: the first is GPT-2's. */
static const char *const gpt_activations[] = {"gelu_new", "relu", "silu", NULL};
static const uint32_t gpt_activation_kinds[] = {DTRAIN_ACTIVATION_GELU, DTRAIN_ACTIVATION_RELU,
                                                DTRAIN_ACTIVATION_SILU};

/* Return the place of a model's activation in these lists. */
static inline int gpt_activation(const gpt_config *config)
{
    int place = 2;
    while (place > 0 && gpt_activation_kinds[place] != config->activation) place--;
    return place;
}

/* Adds the next parameter: shape (rows, columns), or (rows) when columns is 0. */
static inline dtrain_param *gpt__declare(gpt *m, uint32_t unit, const char *name, int64_t rows,
                                         int64_t columns, uint32_t init, float scale)
{
    dtrain_param *p = &m->params[m->param_count];
    char *full = m->names[m->param_count++];
    if (unit > 0 && unit <= (uint32_t)m->config.layers)
        snprintf(full, 32, "h.%u.%s", unit - 1, name);
    else snprintf(full, 32, "%s", name);
    p->name = full;
    p->shape[0] = rows;
    p->shape[1] = columns;
    p->unit = unit;
    p->init = init;
    p->init_scale = scale;
    return p;
}

/* Let the tensor axis cut a matrix by its inputs, with the heads or features that are here, */
static inline void gpt__cut_columns(dtrain_param *weight, int64_t parts)
{
    weight->cut.axis = DTRAIN_CUT_COLUMNS;
    weight->cut.parts = parts;
}

/* ... or a layer by its outputs: each of the components of weight and bias (3 of q|k|v) in whole parts. */
static inline void gpt__cut_rows(dtrain_param *weight, dtrain_param *bias, uint32_t components,
                                 int64_t parts)
{
    weight->cut.axis = DTRAIN_CUT_ROWS;
    weight->cut.components = components;
    weight->cut.parts = parts;
    bias->cut = weight->cut;
}

/* GPT-2's initialisation: N(0, 0.02), projections into the residual stream by 1/sqrt(2 layers) less. */
static inline void gpt__declare_block(gpt *m, gpt_block *b, uint32_t unit)
{
    const int64_t c = m->config.channels;
    const uint32_t normal = DTRAIN_INIT_NORMAL, constant = DTRAIN_INIT_CONSTANT;
    const uint32_t zero = DTRAIN_INIT_ZERO;
    const float residual = 0.02f / sqrtf(2.0f * (float)m->config.layers);
    b->ln1_weight = gpt__declare(m, unit, "ln_1.weight", c, 0, constant, 1);
    b->ln1_bias = gpt__declare(m, unit, "ln_1.bias", c, 0, zero, 0);
    b->qkv_weight = gpt__declare(m, unit, "attn.c_attn.weight", 3 * c, c, normal, 0.02f);
    b->qkv_bias = gpt__declare(m, unit, "attn.c_attn.bias", 3 * c, 0, zero, 0);
    b->proj_weight = gpt__declare(m, unit, "attn.c_proj.weight", c, c, normal, residual);
    b->proj_bias = gpt__declare(m, unit, "attn.c_proj.bias", c, 0, zero, 0);
    b->ln2_weight = gpt__declare(m, unit, "ln_2.weight", c, 0, constant, 1);
    b->ln2_bias = gpt__declare(m, unit, "ln_2.bias", c, 0, zero, 0);
    b->fc_weight = gpt__declare(m, unit, "mlp.c_fc.weight", 4 * c, c, normal, 0.02f);
    b->fc_bias = gpt__declare(m, unit, "mlp.c_fc.bias", 4 * c, 0, zero, 0);
    b->fcproj_weight = gpt__declare(m, unit, "mlp.c_proj.weight", c, 4 * c, normal, residual);
    b->fcproj_bias = gpt__declare(m, unit, "mlp.c_proj.bias", c, 0, zero, 0);
    gpt__cut_rows(b->qkv_weight, b->qkv_bias, 3, m->config.heads);
    gpt__cut_columns(b->proj_weight, m->config.heads);
    gpt__cut_rows(b->fc_weight, b->fc_bias, 1, 0);
    gpt__cut_columns(b->fcproj_weight, 0);
}

/* Fills params for a strategy, and marks those that a tensor axis may cut: in forward order; one unit for the
 * embedding, one a block, one for the end. The classifier is the token embedding under another name: a sharded strategy
 * must know that two units use it. gpt_free frees the lists, also after a failure. */
static inline dtrain_result gpt_create(gpt *m, const gpt_config *config)
{
    const size_t layers = (size_t)config->layers, count = 5 + 12 * layers;
    const uint32_t end = (uint32_t)layers + 1;
    const int64_t c = config->channels;
    memset(m, 0, sizeof *m);
    m->config = *config;
    if (m->config.epsilon == 0) m->config.epsilon = 1e-5f;
    if (m->config.activation == 0) m->config.activation = DTRAIN_ACTIVATION_GELU;
    m->params = (dtrain_param *)calloc(count, sizeof *m->params);
    m->names = (char(*)[32])calloc(count, sizeof *m->names);
    m->blocks = (gpt_block *)calloc(layers, sizeof *m->blocks);
    if (!m->params || !m->names || !m->blocks) return DTRAIN_ERROR_MEMORY;
    m->wte = gpt__declare(m, 0, "wte.weight", gpt_columns(config), c, DTRAIN_INIT_NORMAL, 0.02f);
    m->wte->init_count = config->vocab * c;
    m->wte->cut.axis = DTRAIN_CUT_ROWS; /* the vocabulary */
    m->wpe = gpt__declare(m, 0, "wpe.weight", config->positions, c, DTRAIN_INIT_NORMAL, 0.02f);
    for (size_t l = 0; l < layers; l++) gpt__declare_block(m, &m->blocks[l], (uint32_t)l + 1);
    m->lnf_weight = gpt__declare(m, end, "ln_f.weight", c, 0, DTRAIN_INIT_CONSTANT, 1);
    m->lnf_bias = gpt__declare(m, end, "ln_f.bias", c, 0, DTRAIN_INIT_ZERO, 0);
    m->head = gpt__declare(m, end, "lm_head.weight", 0, 0, DTRAIN_INIT_ZERO, 0);
    m->head->alias_of = m->wte;
    return DTRAIN_OK;
}

static inline void gpt_free(gpt *m)
{
    free(m->params);
    free(m->names);
    free(m->blocks);
    memset(m, 0, sizeof *m);
}

/* ---- forward -------------------------------------------------------------------------------- */

/* Run a layer on h (B*T, C), which the norms add to the residual stream *x, and return what is still
 * to be added to it. With a cache, the rows are those of one text behind the tokens in it. */
static inline dtrain_tensor *gpt__block(dtrain_tape *t, const gpt *m, long layer, dtrain_tensor **x,
                                        dtrain_tensor *h, gpt_cache *cache)
{
    const gpt_config *config = &m->config;
    const gpt_block *p = &m->blocks[layer];
    const float drop = config->dropout;
    const dtrain_attention_desc causal = {config->seq, config->heads, 0, 0, true, NULL, NULL};
    h = dtrain_layernorm(t, h, x, p->ln1_weight, p->ln1_bias, config->epsilon);  /* (B*T, C) */
    h = dtrain_linear(t, h, p->qkv_weight, p->qkv_bias, DTRAIN_ACTIVATION_NONE); /* (B*T, 3C) */
    if (cache) h = gpt_cached_attention(t, h, cache, layer);                     /* (B*T, C) */
    else h = dtrain_attention(t, h, NULL, NULL, &causal);
    h = dtrain_linear(t, h, p->proj_weight, p->proj_bias, DTRAIN_ACTIVATION_NONE);
    h = dtrain_dropout(t, h, drop);
    h = dtrain_layernorm(t, h, x, p->ln2_weight, p->ln2_bias, config->epsilon);
    h = dtrain_linear(t, h, p->fc_weight, p->fc_bias,
                      (dtrain_activation)config->activation); /* (B*T, 4C) */
    h = dtrain_linear(t, h, p->fcproj_weight, p->fcproj_bias,
                      DTRAIN_ACTIVATION_NONE); /* (B*T, C) */
    return dtrain_dropout(t, h, drop);
}

/* Embedded tokens (B*T, C) -> what the classifier reads, (B*T, C) */
static inline dtrain_tensor *gpt__blocks(dtrain_tape *t, const gpt *m, dtrain_tensor *h,
                                         gpt_cache *cache)
{
    dtrain_tensor *x = NULL; /* the residual stream */
    for (long l = 0; l < m->config.layers; l++) {
        dtrain_tape_unit(t, (uint32_t)l + 1);
        h = gpt__block(t, m, l, &x, h, cache);
    }
    dtrain_tape_unit(t, (uint32_t)m->config.layers + 1);
    return dtrain_layernorm(t, h, &x, m->lnf_weight, m->lnf_bias, m->config.epsilon);
}

/* tokens (batch, seq) -> logits (batch*seq, gpt_columns), of which a rank of a tensor axis has its columns */
static inline dtrain_tensor *gpt_forward(dtrain_tape *t, const gpt *m, const int32_t *tokens,
                                         int64_t batch)
{
    const int64_t shape[2] = {batch, m->config.seq};
    dtrain_tensor *input = dtrain_tape_input(t, DTRAIN_DTYPE_I32, 2, shape, tokens, false), *x;
    dtrain_tape_unit(t, 0);
    x = dtrain_dropout(t, dtrain_embedding(t, input, m->wte, m->wpe), m->config.dropout);
    x = gpt__blocks(t, m, x, NULL);
    return dtrain_linear(t, x, m->head, NULL, DTRAIN_ACTIVATION_NONE);
}

/* tokens (count) of a text, behind those in the cache -> logits (1, gpt_columns), all of them on every
 * rank, of the one that comes next. Only the first tokens of a text may be several. */
static inline dtrain_tensor *gpt_next(dtrain_tape *t, const gpt *m, const int32_t *tokens,
                                      int64_t count, gpt_cache *cache)
{
    const int64_t shape[2] = {1, count};
    int32_t *positions = (int32_t *)malloc((size_t)count * sizeof *positions);
    if (!positions) return NULL;
    for (int64_t i = 0; i < count; i++) positions[i] = (int32_t)(cache->length + i);
    dtrain_tensor *input = dtrain_tape_input(t, DTRAIN_DTYPE_I32, 2, shape, tokens, false), *x;
    dtrain_tensor *places = dtrain_tape_input(t, DTRAIN_DTYPE_I32, 2, shape, positions, false);
    free(positions);
    dtrain_tape_unit(t, 0);
    x = dtrain_embedding(t, places, m->wpe, NULL);
    x = dtrain_add(t, dtrain_embedding(t, input, m->wte, NULL), x);
    x = dtrain_place(t, gpt__blocks(t, m, x, cache), DTRAIN_PLACEMENT_WHOLE);
    x = dtrain_linear(t, gpt_last_row(t, x), m->head, NULL, DTRAIN_ACTIVATION_NONE);
    return dtrain_place(t, x, DTRAIN_PLACEMENT_WHOLE);
}

/* ---- loss of a batch ------------------------------------------------------------------------ */

typedef struct gpt_batch {
    const gpt *model;
    int64_t batch;
    int32_t *inputs, *targets; /* (batch, seq) */
} gpt_batch;

/* Room for `batch` samples. user: gpt_batch. */
static inline dtrain_result gpt_set_batch(void *user, uint32_t batch)
{
    gpt_batch *b = (gpt_batch *)user;
    const size_t bytes = (size_t)batch * (size_t)b->model->config.seq * sizeof *b->inputs;
    free(b->inputs);
    free(b->targets);
    b->batch = batch;
    b->inputs = (int32_t *)calloc(1, bytes);
    b->targets = (int32_t *)calloc(1, bytes);
    return b->inputs && b->targets ? DTRAIN_OK : DTRAIN_ERROR_MEMORY;
}

static inline void gpt_batch_free(gpt_batch *b)
{
    free(b->inputs);
    free(b->targets);
    b->inputs = b->targets = NULL;
}

/* user: gpt_batch. */
static inline dtrain_tensor *gpt_loss(dtrain_tape *t, void *user)
{
    const gpt_batch *b = (const gpt_batch *)user;
    const int64_t rows = b->batch * b->model->config.seq;
    dtrain_tensor *logits = gpt_forward(t, b->model, b->inputs, b->batch);
    return dtrain_cross_entropy(t, logits,
                                dtrain_tape_input(t, DTRAIN_DTYPE_I32, 1, &rows, b->targets, false),
                                b->model->config.vocab, 0);
}

/* ---- Hugging Face ---- */

/* What import leaves out of a GPT-2 of theirs: masks. */
static inline const char *const *gpt_ignored(void)
{
    static const char *const masks[] = {".attn.bias", ".attn.masked_bias", NULL};
    return masks;
}

/* Fill in how parameters lie in a file of theirs: linear layers of blocks are Conv1D there, (in, out), and the
 * vocabulary has no padding. names (param_count), zeroed before; free it with free. NULL: no memory. */
static inline dtrain_export_name *gpt_hugging_face(const gpt *m)
{
    static const char *const turned[] = {"attn.c_attn.weight", "attn.c_proj.weight",
                                         "mlp.c_fc.weight", "mlp.c_proj.weight"};
    dtrain_export_name *names = (dtrain_export_name *)calloc(m->param_count, sizeof *names);
    for (size_t i = 0; names && i < m->param_count; i++)
        for (size_t t = 0; t < sizeof turned / sizeof turned[0]; t++)
            if (strstr(m->params[i].name, turned[t])) names[i].transpose = true;
    if (names) names[m->wte - m->params].rows = m->config.vocab;
    return names;
}

/* What config.json may say of how to compute. Dropout is training's, and --dropout says it. */
static inline const hf_rule *gpt_rules(void)
{
    static const hf_rule rules[] = {
        {"model_type", "gpt2"},
        {"activation_function",
         "gelu_new|gelu_fast|gelu_accurate|gelu_pytorch_tanh|relu|silu|swish"}, /* tanh's GELU */
        {"scale_attn_weights", "true"},
        {"scale_attn_by_inverse_layer_idx", "false"},
        {"add_cross_attention", "false"},
        {"is_encoder_decoder", "false"},
        {"tie_word_embeddings", "true"},
        {"num_attention_heads", ""}, /* another name of n_head */
        {"quantization_config", ""},
        {NULL, NULL}};
    return rules;
}

/* Read config.json; sizes that it lacks are those of transformers' GPT2Config. */
static inline dtrain_result gpt_read_config(const hf_config *from, gpt_config *config)
{
    char activation[HF_VALUE] = "gelu_new";
    int place = 2;
    dtrain_result result = hf_check(from, gpt_rules());
    if (result != DTRAIN_OK) return result;
    memset(config, 0, sizeof *config);
    config->layers = hf_size(from, "n_layer", 12);
    config->heads = hf_size(from, "n_head", 12);
    config->channels = hf_size(from, "n_embd", 768);
    config->positions = hf_size(from, "n_positions", 1024);
    config->vocab = hf_size(from, "vocab_size", 50257);
    config->epsilon = (float)hf_number(from, "layer_norm_epsilon", 1e-5);
    (void)hf_value(from, "activation_function", activation);
    while (place > 0 && activation[0] != gpt_activations[place][0]) place--; /* g, r, or s */
    config->activation = gpt_activation_kinds[place];
    if (!config->layers || !config->heads || !config->channels || !config->positions ||
        !config->vocab || !(config->epsilon > 0))
        return dtrain_fail(DTRAIN_ERROR_DATA,
                           "%s: n_layer, n_head, n_embd, n_positions, vocab_size or "
                           "layer_norm_epsilon is no number above 0",
                           from->path);
    const long inner = hf_size(from, "n_inner", 4 * config->channels);
    if (inner == 4 * config->channels) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                       "%s: \"n_inner\" is %ld, and this model computes nothing but 4 n_embd",
                       from->path, inner);
}

/* Write the config.json that transformers wants beside a model. end_of_text: a token, or -1. */
static inline dtrain_result gpt_write_config(const gpt_config *c, int end_of_text,
                                             const char *weights, const char *type)
{
    char text[1024], epsilon[32], token[16] = "null";
    hf_config config;
    memset(&config, 0, sizeof config);
    if (end_of_text >= 0) snprintf(token, sizeof token, "%d", end_of_text);
    snprintf(
        text, sizeof text,
        "{\"model_type\": \"gpt2\", \"architectures\": [\"GPT2LMHeadModel\"], \"dtype\": \"\",\n"
        " \"vocab_size\": %ld, \"n_positions\": %ld, \"n_ctx\": %ld, \"n_embd\": %ld,\n"
        " \"n_layer\": %ld, \"n_head\": %ld, \"n_inner\": null, \"activation_function\": \"%s\",\n"
        " \"layer_norm_epsilon\": %s, \"initializer_range\": 0.02, \"resid_pdrop\": 0.1,\n"
        " \"embd_pdrop\": 0.1, \"attn_pdrop\": 0.1, \"bos_token_id\": %s, \"eos_token_id\": %s,\n"
        " \"tie_word_embeddings\": true}\n",
        c->vocab, c->positions, c->positions, c->channels, c->layers, c->heads,
        gpt_activations[gpt_activation(c)], hf_float(c->epsilon, epsilon), token, token);
    config.text = text;
    config.bytes = strlen(text);
    return hf_write(&config, weights, type);
}

#endif /* GPT_H */
