/* simulate_models.h: what simulate.c computes, layer by layer. Part of it: included behind its flags.
 *
 * A model is the library's array of parameters plus, for each, the work of one sample that belongs to
 * it: flops forward (backward: twice that), and bytes of activations written, which backward reads.
 *
 * Over a tensor axis (--tensor) parameters declare their cuts, and the work is what is left for the rank that has most:
 * of what is cut its part, of the rest everything, or with --sequence-parallel its rows. What ranks then send each
 * other is in simulate_tensor.h.
 *
 * How to read it: transformers, a line each -> convolutional networks -> their layers -> activations */
#ifndef SIMULATE_MODELS_H
#define SIMULATE_MODELS_H

typedef struct layer {
    double flops, activation_bytes; /* forward, one sample, of this rank's part */
    double around[2];               /* bytes that other kernels read and write, by pass */
    double attention[2];            /* flops of scores and their product with values, by pass */
    double scores[2];               /* bytes of scores that these products read and write */
    double product_bytes;           /* activations that the layer's product reads and writes */
    bool kept;                      /* activations that checkpointing does not drop */
} layer;

typedef struct model {
    dtrain_param *params;
    layer *layers; /* one a parameter */
    char (*names)[40];
    size_t count, room;
    uint32_t units;
    long blocks;        /* of a transformer, whose activations can be made again; 0: none */
    double samples;     /* per sample: tokens, or 1 */
    const char *things; /* "tokens", "images" */
} model;

static const struct transformer {
    const char *name, *what;
    long layers, cross_layers; /* the last ones have a second attention */
    long heads, kv_heads, head_size, channels, ffn, gated, vocab, positions, seq,
        tied; /* vocab: with padding, GPT-2's 50257 as train_gpt's 50304 */
    long
        slices; /* of tensor parallelism: this is one of them, and its own communication is not simulated */
} transformers[] = {
    {"baby", "11 M, what a CPU trains", 6, 0, 6, 6, 64, 384, 1536, 0, 256, 128, 128, 1, 1},
    {"gpt2", "GPT-2, 124 M", 12, 0, 12, 12, 64, 768, 3072, 0, 50304, 1024, 1024, 1, 1},
    {"gpt2_medium", "GPT-2, 350 M", 24, 0, 16, 16, 64, 1024, 4096, 0, 50304, 1024, 1024, 1, 1},
    {"gpt2_large", "GPT-2, 774 M", 36, 0, 20, 20, 64, 1280, 5120, 0, 50304, 1024, 1024, 1, 1},
    {"gpt2_xl", "GPT-2, 1558 M", 48, 0, 25, 25, 64, 1600, 6400, 0, 50304, 1024, 1024, 1, 1},
    {"qwen0.5b", "Qwen 2.5, 0.5 B", 24, 0, 14, 2, 64, 896, 4864, 1, 151936, 0, 1024, 1, 1},
    {"qwen1.5b", "Qwen 2.5, 1.5 B", 28, 0, 12, 2, 128, 1536, 8960, 1, 151936, 0, 1024, 1, 1},
    {"qwen7b", "Qwen 2.5, 7 B", 28, 0, 28, 4, 128, 3584, 18944, 1, 152064, 0, 1024, 0, 1},
    {"qwen14b", "Qwen 2.5, 14 B", 48, 0, 40, 8, 128, 5120, 13824, 1, 152064, 0, 1024, 0, 1},
    {"llama7b", "Llama 2, 7 B", 32, 0, 32, 32, 128, 4096, 11008, 1, 32000, 0, 4096, 0, 1},
    {"llama8b", "Llama 3.1, 8 B", 32, 0, 32, 8, 128, 4096, 14336, 1, 128256, 0, 8192, 0, 1},
    {"llama70b", "Llama 3.1, 70 B", 80, 0, 64, 8, 128, 8192, 28672, 1, 128256, 0, 8192, 0, 1},
    {"t5_11b", "T5, 11 B; 24 + 24 layers", 48, 24, 128, 128, 128, 1024, 65536, 0, 32128, 0, 512, 1,
     1},
    {"gpt8.3b", "Megatron GPT-2, 8.3 B", 72, 0, 24, 24, 128, 3072, 12288, 0, 51200, 1024, 1024, 1,
     1},
    {"gpt8.3b_slice", "one of its 8 tensor-parallel slices", 72, 0, 24, 24, 128, 3072, 12288, 0,
     51200, 1024, 1024, 1, 8},
    {"gpt1.7b", "Megatron GPT, 1.7 B", 24, 0, 24, 24, 96, 2304, 9216, 0, 51200, 2048, 2048, 1, 1},
    {"gpt3.6b", "Megatron GPT, 3.6 B", 30, 0, 32, 32, 96, 3072, 12288, 0, 51200, 2048, 2048, 1, 1},
    {"gpt7.5b", "Megatron GPT, 7.5 B", 36, 0, 32, 32, 128, 4096, 16384, 0, 51200, 2048, 2048, 1, 1},
    {"gpt18b", "Megatron GPT, 18.4 B", 40, 0, 48, 48, 128, 6144, 24576, 0, 51200, 2048, 2048, 1, 1},
    {"core1.7b", "Megatron Core GPT, 1.7 B", 24, 0, 16, 16, 128, 2048, 8192, 0, 131072, 0, 4096, 0,
     1},
    {"core7b", "Megatron Core GPT, 7.1 B", 30, 0, 32, 32, 128, 4096, 16384, 0, 131072, 0, 4096, 0,
     1},
    {"core16b", "Megatron Core GPT, 16 B", 32, 0, 48, 48, 128, 6144, 24576, 0, 131072, 0, 4096, 0,
     1},
    {"core32b", "Megatron Core GPT, 32 B", 48, 0, 56, 56, 128, 7168, 28672, 0, 131072, 0, 4096, 0,
     1},
    {"gpt22b", "Megatron GPT, 22 B", 48, 0, 64, 64, 96, 6144, 24576, 0, 51200, 2048, 2048, 1, 1},
    {"gpt39b", "Megatron GPT, 39.1 B", 48, 0, 64, 64, 128, 8192, 32768, 0, 51200, 2048, 2048, 1, 1},
    {"gpt76b", "Megatron GPT, 76.1 B", 60, 0, 80, 80, 128, 10240, 40960, 0, 51200, 2048, 2048, 1,
     1},
    {"gpt145b", "Megatron GPT, 145.6 B", 80, 0, 96, 96, 128, 12288, 49152, 0, 51200, 2048, 2048, 1,
     1},
    {"gpt310b", "Megatron GPT, 310.1 B", 96, 0, 128, 128, 128, 16384, 65536, 0, 51200, 2048, 2048,
     1, 1},
    {"gpt530b", "Megatron GPT, 529.6 B", 105, 0, 128, 128, 160, 20480, 81920, 0, 51200, 2048, 2048,
     1, 1},
    {"gpt1t", "Megatron GPT, 1008 B", 128, 0, 160, 160, 160, 25600, 102400, 0, 51200, 2048, 2048, 1,
     1},
    {"core70b", "Megatron Core GPT, 70 B", 84, 0, 64, 64, 128, 8192, 32768, 0, 131072, 0, 4096, 0,
     1},
    {"core119b", "Megatron Core GPT, 119 B", 92, 0, 80, 80, 128, 10240, 40960, 0, 131072, 0, 4096,
     0, 1},
    {"core177b", "Megatron Core GPT, 177 B", 96, 0, 96, 96, 128, 12288, 49152, 0, 131072, 0, 4096,
     0, 1},
    {"core314b", "Megatron Core GPT, 314 B", 96, 0, 128, 128, 128, 16384, 65536, 0, 131072, 0, 4096,
     0, 1},
    {"core462b", "Megatron Core GPT, 462 B", 112, 0, 144, 144, 128, 18432, 73728, 0, 131072, 0,
     4096, 0, 1},
    {"llama405b", "Llama 3.1, 405 B", 126, 0, 128, 8, 128, 16384, 53248, 1, 128256, 0, 8192, 0, 1},
    {"gpt175b", "GPT-3, 175 B", 96, 0, 96, 96, 128, 12288, 49152, 0, 51200, 2048, 2048, 1, 1},
};
enum { TRANSFORMERS = sizeof transformers / sizeof transformers[0] };

/* Convolutional networks: multiply-adds and outputs of each layer, 224 x 224 (Inception 299 x 299). */
static const struct convolution {
    const char *name;
    int inputs, outputs, kernel, size; /* size: of the output, in each direction */
} vgg16[] = {
    {"conv1_1", 3, 64, 3, 224},    {"conv1_2", 64, 64, 3, 224},  {"conv2_1", 64, 128, 3, 112},
    {"conv2_2", 128, 128, 3, 112}, {"conv3_1", 128, 256, 3, 56}, {"conv3_2", 256, 256, 3, 56},
    {"conv3_3", 256, 256, 3, 56},  {"conv4_1", 256, 512, 3, 28}, {"conv4_2", 512, 512, 3, 28},
    {"conv4_3", 512, 512, 3, 28},  {"conv5_1", 512, 512, 3, 14}, {"conv5_2", 512, 512, 3, 14},
    {"conv5_3", 512, 512, 3, 14},  {"fc6", 25088, 4096, 1, 1},   {"fc7", 4096, 4096, 1, 1},
    {"fc8", 4096, 1000, 1, 1},
};

/* Inception-v3 by its modules: thousands of parameters, millions of multiply-adds, thousands of outputs. */
static const struct module {
    const char *name;
    double kilo_params, mega_macs, kilo_outputs;
} inception3[] = {
    {"stem", 172, 1340, 5120},   {"mixed5b", 255, 312, 1000}, {"mixed5c", 277, 339, 1060},
    {"mixed5d", 285, 349, 1080}, {"mixed6a", 1150, 402, 700}, {"mixed6b", 1297, 375, 480},
    {"mixed6c", 1690, 489, 540}, {"mixed6d", 1690, 489, 540}, {"mixed6e", 2140, 618, 570},
    {"mixed7a", 1697, 291, 330}, {"mixed7b", 5040, 323, 230}, {"mixed7c", 6070, 388, 240},
    {"fc", 2049, 2, 1},
};

/* Attention in one kernel reaches 50 to 73 % of an A100 where products reach 80 to 90 %, and on an H100 35 % (Dao,
 * "FlashAttention-2", 2023; Shah et al., "FlashAttention-3", 2024): a share of 0.6 of their rate. Its backward has five
 * products, forward two. */
#define FUSED_RATE 0.6
#define FUSED_BACKWARD 2.5

/* Before that, scores were written. Elements read (r) and written (w) for each score, by kernels: causal softmax reads
 * half and w, dropout r w and a byte of mask; gradients of dropout r w and mask, of softmax two halves and w. By
 * products: w, r; r, w, r, r. Scores, what softmax and what dropout made of them, are kept. */
#define SCORES_FORWARD 4.0
#define SCORES_BACKWARD 4.5
#define SCORES_KEPT 2.5

/* The loss: elements of bf16 for each logit, by pass. One kernel a pass: r; r w. Kernels on fp32: to fp32, maximum,
 * difference, exp, sum, quotient; the gradient in place, from fp32. */
static const double loss_elements[2][2] = {{1, 2}, {1 + 2 * 9, 2 * 3 + 1}};

static double activation_unit(void) { return flags.precision ? 2.0 : 4.0; }

static void add_layer(model *m, const char *name, uint32_t unit, int64_t rows, int64_t columns,
                      double flops, double activations)
{
    if (m->count == m->room) return;
    dtrain_param *p = &m->params[m->count];
    layer *l = &m->layers[m->count];
    snprintf(m->names[m->count], sizeof m->names[0], "%u.%s", (unsigned)unit, name);
    memset(p, 0, sizeof *p);
    p->name = m->names[m->count++];
    p->shape[0] = rows;
    p->shape[1] = columns;
    p->unit = unit;
    l->flops = flops;
    l->activation_bytes = activations * activation_unit();
    l->product_bytes = 2 * l->activation_bytes;
    l->kept = false;
    if (unit >= m->units) m->units = unit + 1;
}

/* Add what kernels beside the product of the layer that was added last read and write, in elements of a sample. */
static void add_around(model *m, double forward, double backward)
{
    m->layers[m->count - 1].around[0] += forward * activation_unit();
    m->layers[m->count - 1].around[1] += backward * activation_unit();
}

/* A norm reads x and writes y; backward reads x and d_y and writes d_x. */
static void add_norm(model *m, const char *name, uint32_t unit, int64_t channels, double rows)
{
    const double elements = rows * (double)channels;
    add_layer(m, name, unit, channels, 0, 0, 2 * elements);
    add_around(m, 2 * elements, 3 * elements);
}

/* A residual adds what a layer made to the stream; backward adds the gradients of both ways. */
static void add_residual(model *m, double elements) { add_around(m, 3 * elements, 3 * elements); }

/* The largest share that a rank of the tensor axis has of so many parts. */
static double part_of(int64_t parts)
{
    return (double)((parts + flags.tensor - 1) / flags.tensor) / (double)parts;
}

/* What each rank has of rows that no layer divides. */
static double own_rows(void) { return flags.sequence_parallel ? 1.0 / (double)flags.tensor : 1; }

/* Declare how the parameter that was added last is cut. */
static dtrain_cut *cut_layer(model *m, uint32_t cut_axis, int64_t parts)
{
    dtrain_cut *cut = &m->params[m->count - 1].cut;
    cut->axis = cut_axis;
    cut->parts = parts;
    return cut;
}

/* Queries, keys and values; scores and their product with values; the projection. T tokens a sample. */
static void add_attention(model *m, const struct transformer *t, uint32_t unit, const char *prefix,
                          double T)
{
    const int64_t C = t->channels, inner = t->heads * t->head_size / t->slices;
    const int64_t keys = t->kv_heads * t->head_size / t->slices;
    const int64_t groups = t->kv_heads / t->slices; /* a head of keys, and its queries' */
    const double causal = t->cross_layers || flags.attention ? 1 : 0.5, part = part_of(groups);
    const double rotated = T * part * (double)(inner + keys);
    const double scores = T * T * part * (double)(t->heads / t->slices);
    char name[24];
    snprintf(name, sizeof name, "%s.norm", prefix);
    add_norm(m, name, unit, C, T * own_rows());
    snprintf(name, sizeof name, "%s.qkv", prefix);
    add_layer(m, name, unit, inner + 2 * keys, C, 2 * T * part * (double)((inner + 2 * keys) * C),
              T * part * (double)(inner + 2 * keys));
    dtrain_cut *cut = cut_layer(m, DTRAIN_CUT_ROWS, groups);
    cut->components = 3;
    cut->widths[0] = inner;
    cut->widths[1] = cut->widths[2] = keys;
    if (!t->positions && !t->cross_layers)
        add_around(m, 2 * rotated, 2 * rotated); /* angles turn queries and keys */
    snprintf(name, sizeof name, "%s.proj", prefix);
    add_layer(m, name, unit, C, inner, part * 2 * T * (double)(inner * C),
              T * (part * (double)inner + own_rows() * (double)C));
    cut_layer(m, DTRAIN_CUT_COLUMNS, groups);
    add_residual(m, T * (double)C * own_rows());
    layer *l = &m->layers[m->count - 1];
    l->attention[0] = part * causal * 4 * T * T * (double)inner;
    const int again = flags.attention == ATTENTION_AGAIN; /* forward's, in backward */
    l->attention[1] = (flags.attention ? 2 + again : FUSED_BACKWARD) * l->attention[0];
    if (!flags.attention) return;
    add_around(m, SCORES_FORWARD * scores, (SCORES_BACKWARD + again * SCORES_FORWARD) * scores);
    l->scores[0] = 2 * scores * activation_unit();
    l->scores[1] = (2 + again) * l->scores[0];
    if (!again) l->activation_bytes += SCORES_KEPT * scores * activation_unit();
}

static void add_block(model *m, const struct transformer *t, uint32_t unit, bool cross, double T)
{
    const int64_t C = t->channels, F = t->ffn / t->slices, up = t->gated ? 2 * F : F;
    add_attention(m, t, unit, "attn", T);
    if (cross) add_attention(m, t, unit, "cross", T);
    const double part = part_of(F);
    add_norm(m, "mlp.norm", unit, C, T * own_rows());
    add_layer(m, "mlp.up", unit, up, C, 2 * T * part * (double)(up * C),
              T * part * (double)(up + F));
    cut_layer(m, DTRAIN_CUT_ROWS, 0)->components = t->gated ? 2 : 1;
    add_around(m, T * part * (double)(up + F), T * part * (double)(2 * up + F)); /* activation */
    add_layer(m, "mlp.down", unit, C, F, 2 * T * part * (double)(C * F),
              T * (double)C * own_rows());
    cut_layer(m, DTRAIN_CUT_COLUMNS, 0);
    add_residual(m, T * (double)C * own_rows());
}

/* Make the activations of every `every`-th block again in backward; 0: of none. */
static void checkpoint_blocks(model *m, long every)
{
    const uint32_t last = (uint32_t)m->blocks + 1;
    for (size_t i = 0; i < m->count; i++) {
        const uint32_t unit = m->params[i].unit;
        m->layers[i].kept =
            !m->blocks || unit == 0 || unit == last || !every || (unit - 1) % (uint32_t)every != 0;
    }
}

/* Unit 0 is the embedding, the last the final norm and the head. */
static void make_transformer(model *m, const struct transformer *t)
{
    const double T = (double)(flags.seq ? flags.seq : t->seq);
    const int64_t C = t->channels, V = t->vocab / t->slices;
    const uint32_t last = (uint32_t)t->layers + 1;
    m->samples = T;
    m->things = "tokens";
    add_layer(m, "wte", 0, V, C, 0, T * (double)C * own_rows());
    cut_layer(m, DTRAIN_CUT_ROWS, 0);
    add_around(m, 3 * T * (double)C, 5 * T * (double)C); /* rows of fp32, added to backward */
    if (t->positions)
        add_layer(m, "wpe", 0, t->positions > (int64_t)T ? t->positions : (int64_t)T, C, 0, 0);
    for (uint32_t unit = 1; unit < last; unit++)
        add_block(m, t, unit, (long)(last - unit) <= t->cross_layers, T);
    add_norm(m, "norm", last, C, T * own_rows());
    add_layer(m, "head", last, V, C, 2 * T * part_of(V) * (double)(V * C),
              T * part_of(V) * (double)V);
    cut_layer(m, DTRAIN_CUT_ROWS, 0);
    add_around(m, loss_elements[flags.loss][0] * T * part_of(V) * (double)V,
               loss_elements[flags.loss][1] * T * part_of(V) * (double)V);
    if (t->tied) m->params[m->count - 1].alias_of = &m->params[0];
    m->blocks = t->layers;
    checkpoint_blocks(m, flags.checkpointing);
}

static void add_convolution(model *m, const char *name, uint32_t unit, int inputs, int outputs,
                            int kernel, int size)
{
    const int64_t weights = (int64_t)inputs * kernel * kernel;
    const double positions = (double)size * size;
    add_layer(m, name, unit, outputs, weights, 2 * positions * (double)(weights * outputs),
              2 * positions * outputs);
    add_around(m, 2 * positions * outputs, 3 * positions * outputs); /* norm and activation */
}

/* He et al., 2015: bottleneck blocks 3, 4, 23, 3; each 1x1, 3x3, 1x1. */
static void make_resnet101(model *m)
{
    static const int blocks[4] = {3, 4, 23, 3};
    int inputs = 64;
    uint32_t unit = 0;
    add_convolution(m, "conv1", unit++, 3, 64, 7, 112);
    for (int stage = 0; stage < 4; stage++) {
        const int width = 64 << stage, size = 56 >> stage;
        for (int b = 0; b < blocks[stage]; b++, unit++) {
            const int before = b == 0 && stage ? 2 * size : size; /* the 3x3 has the stride */
            add_convolution(m, "conv1", unit, inputs, width, 1, before);
            add_convolution(m, "conv2", unit, width, width, 3, size);
            add_convolution(m, "conv3", unit, width, 4 * width, 1, size);
            if (b == 0) add_convolution(m, "short", unit, inputs, 4 * width, 1, size);
            inputs = 4 * width;
        }
    }
    add_convolution(m, "fc", unit, 2048, 1000, 1, 1);
}

static int make_convolutional(model *m, const char *name)
{
    m->samples = 1;
    m->things = "images";
    if (strcmp(name, "resnet101") == 0) return make_resnet101(m), 0;
    for (size_t i = 0; strcmp(name, "vgg16") == 0 && i < sizeof vgg16 / sizeof vgg16[0]; i++)
        add_convolution(m, vgg16[i].name, (uint32_t)i, vgg16[i].inputs, vgg16[i].outputs,
                        vgg16[i].kernel, vgg16[i].size);
    for (size_t i = 0;
         strcmp(name, "inception3") == 0 && i < sizeof inception3 / sizeof inception3[0]; i++)
        add_layer(m, inception3[i].name, (uint32_t)i, (int64_t)(1e3 * inception3[i].kilo_params), 0,
                  2e6 * inception3[i].mega_macs, 2e3 * inception3[i].kilo_outputs);
    for (size_t i = 0; i < m->count; i++)
        m->layers[i].kept = true; /* checkpointing is for transformers */
    return m->count ? 0 : BAD("\"%s\" is no model; --help lists them", name);
}

static void free_model(model *m)
{
    free(m->params);
    free(m->layers);
    free(m->names);
    memset(m, 0, sizeof *m);
}

static int make_model(model *m)
{
    const struct transformer *t = NULL;
    memset(m, 0, sizeof *m);
    for (int i = 0; i < TRANSFORMERS; i++)
        if (strcmp(flags.model, transformers[i].name) == 0) t = &transformers[i];
    m->room = t ? 9 * (size_t)t->layers + 4 : 128;
    m->params = (dtrain_param *)calloc(m->room, sizeof *m->params);
    m->layers = (layer *)calloc(m->room, sizeof *m->layers);
    m->names = (char(*)[40])calloc(m->room, sizeof *m->names);
    if (!m->params || !m->layers || !m->names)
        return BAD("no memory for a model of %zu parameters", m->room);
    if (!t && flags.pipeline > 1)
        return BAD("--pipeline is %ld, and \"%s\" is no transformer", flags.pipeline, flags.model);
    if (!t && flags.tensor > 1)
        return BAD("--tensor is %ld, and \"%s\" is no transformer: nothing of it is cut",
                   flags.tensor, flags.model);
    if (!t) return make_convolutional(m, flags.model);
    if (flags.checkpointing > t->layers)
        return BAD("--checkpointing is %ld, %s has %ld blocks", flags.checkpointing, t->name,
                   t->layers);
    return make_transformer(m, t), 0;
}

/* What a pass keeps for its backward; of a block that is made again, its input. */
static double kept_bytes(const model *m, long batch)
{
    double bytes = 0;
    for (size_t i = 0; i < m->count; i++) {
        const layer *l = &m->layers[i];
        if (l->kept) bytes += l->activation_bytes;
        else if (i == 0 || m->params[i].unit != m->params[i - 1].unit)
            bytes += l->activation_bytes / 2;
    }
    return (double)batch * bytes;
}

/* What the largest block has once it has been made again. */
static double again_bytes(const model *m, long batch)
{
    double again = 0, largest = 0;
    for (size_t i = 0; i < m->count; i++) {
        if (i && m->params[i].unit != m->params[i - 1].unit) again = 0;
        if (!m->layers[i].kept) again += m->layers[i].activation_bytes;
        largest = again > largest ? again : largest;
    }
    return (double)batch * largest;
}

/* What goes from a stage of a transformer to the next. */
static double stage_bytes(const model *m, long batch)
{
    return (double)batch * m->samples * own_rows() * (double)m->params[0].shape[1] *
           activation_unit();
}

#endif
