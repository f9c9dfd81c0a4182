/* gpt_model.h: the model of gpt.c and parallel_3d.c, a GPT of 834,304 parameters that reads bytes: GPT-2's layout, with
 * output weights tied to the token embedding. Include it after dtrain.h. */
#ifndef GPT_MODEL_H
#define GPT_MODEL_H

#include "examples/text.h"

#include <math.h>

enum { LAYERS = 4, HEADS = 4, CHANNELS = 128, SEQ = 64, VOCAB = 256 };
enum { WTE, WPE, BLOCKS, BLOCK = 12, LNF_W = BLOCKS + LAYERS * BLOCK, LNF_B, HEAD, PARAMS };
enum { LN1_W, LN1_B, QKV_W, QKV_B, PROJ_W, PROJ_B, LN2_W, LN2_B, FC_W, FC_B, OUT_W, OUT_B };

/* How ranks of a tensor axis share a parameter: by its rows, which are outputs, or its columns,
 * inputs; q|k|v, and the matrix that reads their heads, in whole heads. */
enum { WHOLE, ROWS, COLUMNS, QKV_ROWS, HEAD_COLUMNS };
static const dtrain_cut cuts[] = {
    [ROWS] = {.axis = DTRAIN_CUT_ROWS},
    [COLUMNS] = {.axis = DTRAIN_CUT_COLUMNS},
    [QKV_ROWS] = {.axis = DTRAIN_CUT_ROWS, .components = 3, .parts = HEADS},
    [HEAD_COLUMNS] = {.axis = DTRAIN_CUT_COLUMNS, .parts = HEADS},
};

/* The parameters of a block: shapes in multiples of CHANNELS; 0 columns: a vector. */
static const struct {
    const char *name;
    int rows, columns, cut;
} block[BLOCK] = {
    {"ln1.weight", 1, 0, WHOLE},         {"ln1.bias", 1, 0, WHOLE},
    {"qkv.weight", 3, 1, QKV_ROWS},      {"qkv.bias", 3, 0, QKV_ROWS},
    {"proj.weight", 1, 1, HEAD_COLUMNS}, {"proj.bias", 1, 0, WHOLE},
    {"ln2.weight", 1, 0, WHOLE},         {"ln2.bias", 1, 0, WHOLE},
    {"fc.weight", 4, 1, ROWS},           {"fc.bias", 4, 0, ROWS},
    {"out.weight", 1, 4, COLUMNS},       {"out.bias", 1, 0, WHOLE},
};

typedef struct model {
    dtrain_param params[PARAMS]; /* in forward order; every rank declares all of them */
    char names[PARAMS][32];
} model;

/* Matrices start as N(0, scale^2), vectors as the constant scale. A unit is what sharded strategies
 * gather at a time, and what is divided among the stages of a pipeline: the embeddings, each block,
 * and the end. */
static void declare(model *m, int index, int unit, const char *name, int64_t rows, int64_t columns,
                    float scale, int cut)
{
    dtrain_param *p = &m->params[index];
    snprintf(m->names[index], sizeof m->names[index], "%d.%s", unit, name);
    p->name = m->names[index];
    p->unit = (uint32_t)unit;
    p->shape[0] = rows, p->shape[1] = columns;
    p->init = columns ? DTRAIN_INIT_NORMAL : DTRAIN_INIT_CONSTANT;
    p->init_scale = scale;
    p->cut = cuts[cut];
}

static void declare_model(model *m)
{
    const float narrow = 0.02f / sqrtf(2.0f * LAYERS); /* for what adds to the residual stream */
    memset(m, 0, sizeof *m);
    declare(m, WTE, 0, "wte", VOCAB, CHANNELS, 0.02f, ROWS); /* and so the loss's vocabulary */
    declare(m, WPE, 0, "wpe", SEQ, CHANNELS, 0.02f, WHOLE);
    for (int l = 0; l < LAYERS; l++)
        for (int i = 0; i < BLOCK; i++) {
            float scale = i == PROJ_W || i == OUT_W ? narrow : 0.02f;
            if (!block[i].columns) scale = i == LN1_W || i == LN2_W ? 1 : 0;
            declare(m, BLOCKS + l * BLOCK + i, l + 1, block[i].name, block[i].rows * CHANNELS,
                    block[i].columns * CHANNELS, scale, block[i].cut);
        }
    declare(m, LNF_W, LAYERS + 1, "lnf.weight", CHANNELS, 0, 1, WHOLE);
    declare(m, LNF_B, LAYERS + 1, "lnf.bias", CHANNELS, 0, 0, WHOLE);
    declare(m, HEAD, LAYERS + 1, "head", 0, 0, 0, WHOLE);
    m->params[HEAD].alias_of = &m->params[WTE]; /* first and last stage have a copy of it each */
}

/* tokens (batch, SEQ) -> logits (batch * SEQ, VOCAB) */
static dtrain_tensor *forward(dtrain_tape *t, model *m, const int32_t *tokens, int64_t batch)
{
    const int64_t shape[2] = {batch, SEQ};
    const dtrain_attention_desc causal = {.sequence = SEQ, .heads = HEADS, .causal = true};
    dtrain_param *p = m->params;
    dtrain_tape_unit(t, 0);
    dtrain_tensor *x = dtrain_embedding(
        t, dtrain_tape_input(t, DTRAIN_DTYPE_I32, 2, shape, tokens, false), &p[WTE], &p[WPE]);
    for (int l = 0; l < LAYERS; l++) {
        dtrain_tape_unit(t, (uint32_t)l + 1);
        p = m->params + BLOCKS + l * BLOCK;
        dtrain_tensor *h =
            dtrain_layernorm(t, x, NULL, &p[LN1_W], &p[LN1_B], 1e-5f); /* (batch * SEQ, C) */
        h = dtrain_linear(t, h, &p[QKV_W], &p[QKV_B], DTRAIN_ACTIVATION_NONE); /* (.., 3 C) */
        h = dtrain_attention(t, h, NULL, NULL, &causal);                       /* (.., C) */
        x = dtrain_add(t, x, dtrain_linear(t, h, &p[PROJ_W], &p[PROJ_B], DTRAIN_ACTIVATION_NONE));
        h = dtrain_layernorm(t, x, NULL, &p[LN2_W], &p[LN2_B], 1e-5f);
        h = dtrain_linear(t, h, &p[FC_W], &p[FC_B], DTRAIN_ACTIVATION_GELU); /* (.., 4 C) */
        x = dtrain_add(t, x, dtrain_linear(t, h, &p[OUT_W], &p[OUT_B], DTRAIN_ACTIVATION_NONE));
    }
    p = m->params;
    dtrain_tape_unit(t, LAYERS + 1);
    x = dtrain_layernorm(t, x, NULL, &p[LNF_W], &p[LNF_B], 1e-5f);
    return dtrain_linear(t, x, &p[HEAD], NULL, DTRAIN_ACTIVATION_NONE);
}

/* What the trainer hands to next_batch and loss. */
typedef struct batch {
    windows text;
    model *m;
} batch;

/* With a pipeline every rank builds the loss of the whole model: the tape runs only the units of the
 * stage whose turn it is, and takes inputs that other stages compute from messages. */
static dtrain_tensor *loss(dtrain_tape *t, void *user)
{
    batch *b = (batch *)user;
    return text_loss(t, forward(t, b->m, b->text.inputs, b->text.count), &b->text);
}

#endif
