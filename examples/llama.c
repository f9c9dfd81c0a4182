/* llama.c: a Llama (RMSNorm, rotary positions, SwiGLU, grouped-query attention) that starts from
 * weights of Hugging Face or from random ones, learns a text, and is saved in the format of Hugging Face.
 *
 *   build:   cc -O2 -I. examples/llama.c -o llama -lm -lpthread
 *   GPU:     nvcc -O3 -arch=native -I. -DDTRAIN_USE_CUDA examples/llama.c dtrain_cuda.cu -lcublasLt -o llama
 *   run:     ./llama                                        two ranks learn lines that the program makes, byte by byte
 *            ./llama --import DIR --data tokens.bin --export TUNED/model.safetensors
 *            ./llama --ranks 4 --strategy full_shard --precision bf16
 *            ./llama --ranks 2 --tensor 2
 *            ./llama --ranks 2 --pipeline 2 --accum 4 --batch 2
 *   flags:   --import DIR (config.json, model.safetensors or an index)  --export FILE  --data FILE
 *            --ranks N  --device cpu|cuda  --steps N  --batch N (samples of a rank)  --seq N
 *            --lr NUMBER  --precision fp32|bf16  --strategy ddp|zero1|shard_grad_op|full_shard|zero3
 *            --tensor N (ranks that share every layer of a replica)  --pipeline N (ranks that divide the layers)
 *            --pipeline-schedule 1f1b|gpipe|interleaved|zb_h1  --chunks N (stages of a rank)
 *            --accum N (micro-batches of --batch samples in a step)
 *   expect:  step     1  loss 5.5972
 *            step   100  loss 0.2484
 *            ...
 *
 * Parameters have the names of Hugging Face, so that import and export need no table. --data is a token
 * file of llm.c, made with the model's own tokenizer, or any file, whose bytes are the tokens. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

#include "examples/text.h"
#include "tools/hugging_face.h"

/* ---- model ------------------------------------------------------------------------------- */

enum { NORM1, QUERY, KEY, VALUE, OUT, NORM2, GATE, UP, DOWN, OF_LAYER };

typedef struct llama {
    int64_t layers, heads, kv_heads, channels, inner, vocab, seq; /* inner: of the MLP */
    float theta, epsilon;
    bool tied;            /* the head is the embedding */
    dtrain_param *params; /* embedding, OF_LAYER a layer, norm, head: in forward order */
    char (*names)[80];
    size_t count;
} llama;

/* How ranks of a tensor axis share a matrix: by its rows, which are outputs, or its columns, which are inputs. Matrices
 * with heads have as many parts as there are key heads, so that each rank has the query heads that share its keys. */
static dtrain_cut cut(uint32_t axis, int64_t parts)
{
    return (dtrain_cut){.axis = axis, .parts = parts};
}

/* Matrices start as N(0, 0.02^2), vectors as ones. A unit is what sharded strategies gather at a time. */
static dtrain_param *declare(llama *m, int64_t unit, const char *name, int64_t rows,
                             int64_t columns, dtrain_cut cut)
{
    dtrain_param *p = &m->params[m->count++];
    char *full = m->names[m->count - 1];
    const bool inside = unit > 0 && unit <= m->layers;
    if (inside) snprintf(full, 80, "model.layers.%d.%s.weight", (int)unit - 1, name);
    else snprintf(full, 80, "%s.weight", name);
    p->name = full;
    p->unit = (uint32_t)unit;
    p->shape[0] = rows;
    p->shape[1] = columns;
    p->init = columns ? DTRAIN_INIT_NORMAL : DTRAIN_INIT_CONSTANT;
    p->init_scale = columns ? 0.02f : 1;
    p->cut = cut;
    return p;
}

static dtrain_result declare_model(llama *m)
{
    const int64_t c = m->channels, kv = c / m->heads * m->kv_heads, end = m->layers + 1;
    m->params = calloc((size_t)m->layers * OF_LAYER + 3, sizeof *m->params);
    m->names = calloc((size_t)m->layers * OF_LAYER + 3, sizeof *m->names);
    if (!m->params || !m->names)
        return dtrain_fail(DTRAIN_ERROR_MEMORY, "no memory for a list of parameters");
    const dtrain_cut whole = {0}, rows = cut(DTRAIN_CUT_ROWS, 0),
                     columns = cut(DTRAIN_CUT_COLUMNS, 0);
    const dtrain_cut heads = cut(DTRAIN_CUT_ROWS, m->kv_heads);
    const dtrain_cut of_heads = cut(DTRAIN_CUT_COLUMNS, m->kv_heads);
    declare(m, 0, "model.embed_tokens", m->vocab, c, rows);
    for (int64_t unit = 1; unit <= m->layers; unit++) {
        declare(m, unit, "input_layernorm", c, 0, whole);
        declare(m, unit, "self_attn.q_proj", c, c, heads);
        declare(m, unit, "self_attn.k_proj", kv, c, heads);
        declare(m, unit, "self_attn.v_proj", kv, c, heads);
        declare(m, unit, "self_attn.o_proj", c, c, of_heads);
        declare(m, unit, "post_attention_layernorm", c, 0, whole);
        declare(m, unit, "mlp.gate_proj", m->inner, c, rows);
        declare(m, unit, "mlp.up_proj", m->inner, c, rows);
        declare(m, unit, "mlp.down_proj", c, m->inner, columns);
    }
    declare(m, end, "model.norm", c, 0, whole);
    dtrain_param *head =
        declare(m, end, "lm_head", m->tied ? 0 : m->vocab, m->tied ? 0 : c, m->tied ? whole : rows);
    if (m->tied) head->alias_of = &m->params[0];
    return DTRAIN_OK;
}

static void free_model(llama *m)
{
    free(m->params);
    free(m->names);
}

/* ---- forward ----------------------------------------------------------------------------- */

/* tokens (batch, seq) -> logits (batch * seq, vocab) */
static dtrain_tensor *forward(dtrain_tape *t, const llama *m, const int32_t *tokens, int64_t batch)
{
    const int64_t shape[2] = {batch, m->seq};
    const dtrain_activation none = DTRAIN_ACTIVATION_NONE;
    const dtrain_attention_desc causal = {
        .sequence = m->seq, .heads = m->heads, .kv_heads = m->kv_heads, .causal = true};
    dtrain_tensor *q, *k, *v, *h, *x = NULL; /* x: the residual stream, to which norms add h */
    dtrain_tape_unit(t, 0);
    h = dtrain_tape_input(t, DTRAIN_DTYPE_I32, 2, shape, tokens, false);
    h = dtrain_embedding(t, h, &m->params[0], NULL); /* (batch * seq, C) */
    for (int64_t l = 0; l < m->layers; l++) {
        dtrain_param *p = &m->params[1 + l * OF_LAYER];
        dtrain_tape_unit(t, (uint32_t)l + 1);
        h = dtrain_rms_norm(t, h, &x, &p[NORM1], m->epsilon);
        q = dtrain_rotary(t, dtrain_linear(t, h, &p[QUERY], NULL, none), m->seq, m->heads, 0,
                          m->theta);
        k = dtrain_rotary(t, dtrain_linear(t, h, &p[KEY], NULL, none), m->seq, m->kv_heads, 0,
                          m->theta);
        v = dtrain_linear(t, h, &p[VALUE], NULL, none);
        h = dtrain_attention(t, q, k, v, &causal);
        h = dtrain_linear(t, h, &p[OUT], NULL, none);
        h = dtrain_rms_norm(t, h, &x, &p[NORM2], m->epsilon);
        dtrain_tensor *gate = dtrain_linear(t, h, &p[GATE], NULL, none);
        h = dtrain_swiglu(t, gate, dtrain_linear(t, h, &p[UP], NULL, none)); /* (.., inner) */
        h = dtrain_linear(t, h, &p[DOWN], NULL, none);
    }
    dtrain_tape_unit(t, (uint32_t)m->layers + 1);
    h = dtrain_rms_norm(t, h, &x, &m->params[m->count - 2], m->epsilon);
    return dtrain_linear(t, h, &m->params[m->count - 1], NULL, none);
}

/* ---- config.json ------------------------------------------------------------------------- */

/* The values of config.json that this model computes, beside sizes, epsilon and the base of the rotation. */
static const hf_rule rules[] = {{"model_type", "llama"},
                                {"hidden_act", "silu|swish"},
                                {"attention_bias", "false"},
                                {"mlp_bias", "false"},
                                {"rope_scaling.rope_type", "default"},
                                {"rope_scaling.type", "default"},
                                {"rope_scaling.factor", ""},
                                {"rope_parameters.rope_type", "default"}, /* of transformers 5 */
                                {"rope_parameters.factor", ""},
                                {"rope_parameters.partial_rotary_factor", "1|1.0"},
                                {"partial_rotary_factor", "1|1.0"},
                                {"sliding_window", ""},
                                {"quantization_config", ""},
                                {NULL, NULL}};

/* Read the sizes of a model, and check what shapes do not show; import compares shapes. */
static dtrain_result read_config(llama *m, const hf_config *from)
{
    const double theta = hf_number(from, "rope_theta", 10000);
    const dtrain_result result = hf_check(from, rules);
    if (result != DTRAIN_OK) return result;
    m->layers = hf_size(from, "num_hidden_layers", 0);
    m->heads = hf_size(from, "num_attention_heads", 0);
    m->kv_heads = hf_size(from, "num_key_value_heads", (long)m->heads);
    m->channels = hf_size(from, "hidden_size", 0);
    m->inner = hf_size(from, "intermediate_size", 0);
    m->vocab = hf_size(from, "vocab_size", 0);
    m->theta = (float)hf_number(from, "rope_parameters.rope_theta", theta);
    m->epsilon = (float)hf_number(from, "rms_norm_eps", 1e-6);
    m->tied = hf_true(from, "tie_word_embeddings");
    if (m->layers < 1 || m->heads < 1 || m->kv_heads < 1 || m->inner < 1 || m->vocab < 1 ||
        m->channels < 1 || m->channels % m->heads || m->heads % m->kv_heads || !(m->theta > 0) ||
        !(m->epsilon > 0))
        return dtrain_fail(DTRAIN_ERROR_DATA, "%s: its sizes are not those of a Llama", from->path);
    const long head = hf_size(from, "head_dim", (long)(m->channels / m->heads));
    if (head * m->heads == m->channels) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                       "%s: \"head_dim\" is %ld, and this model computes nothing but "
                       "hidden_size / num_attention_heads",
                       from->path, head);
}

/* Find DIR/model.safetensors, and read the config.json beside it. */
static dtrain_result find_model(llama *m, const char *directory, char weights[4096],
                                hf_config *config)
{
    dtrain_result result = hf_weights(directory, weights, 4096);
    if (result == DTRAIN_OK) result = hf_open(config, weights);
    if (result == DTRAIN_OK && !config->text)
        result = dtrain_fail(DTRAIN_ERROR_FILE, "there is no %s", config->path);
    return result == DTRAIN_OK ? read_config(m, config) : result;
}

/* Read the parameters from model.safetensors, or from several files with an index. */
static dtrain_result import_model(dtrain_state *state, const char *weights)
{
    static const char *const tables[] = {".rotary_emb.inv_freq", NULL};
    const dtrain_import_desc from = {.ignore = tables};
    return dtrain_checkpoint_import(state, weights, &from, NULL);
}

/* Write the config.json of a model that was not imported. */
static dtrain_result write_config(const llama *m, const char *weights)
{
    char text[1024], epsilon[32], theta[32];
    const int bytes = snprintf(
        text, sizeof text,
        "{\"model_type\": \"llama\", \"architectures\": [\"LlamaForCausalLM\"],\n"
        " \"num_hidden_layers\": %d, \"num_attention_heads\": %d, \"num_key_value_heads\": %d,\n"
        " \"hidden_size\": %d, \"intermediate_size\": %d, \"vocab_size\": %d,\n"
        " \"hidden_act\": \"silu\", \"rms_norm_eps\": %s, \"rope_theta\": %s,\n"
        " \"tie_word_embeddings\": %s, \"bos_token_id\": null, \"eos_token_id\": null,\n"
        " \"dtype\": \"\"}\n",
        (int)m->layers, (int)m->heads, (int)m->kv_heads, (int)m->channels, (int)m->inner,
        (int)m->vocab, hf_float(m->epsilon, epsilon), hf_float(m->theta, theta),
        m->tied ? "true" : "false");
    const hf_config made = {.text = text, .bytes = (size_t)bytes};
    return hf_write(&made, weights, "float32");
}

/* ---- training ---------------------------------------------------------------------------- */

typedef struct settings {
    const char *data, *import_from, *export_to;
    uint32_t kind, tape_flags;
    int tensor, pipeline;
    dtrain_pipeline_desc line;
    long batch, steps, seq, accum;
    float lr;
} settings;

typedef struct batch {
    windows text;
    llama m;
} batch;

static dtrain_tensor *loss(dtrain_tape *t, void *user)
{
    batch *b = user;
    return text_loss(t, forward(t, &b->m, b->text.inputs, b->text.count), &b->text);
}

/* Every rank runs this function. */
static int train(dtrain_world *world, void *user)
{
    const settings *s = user;
    batch b = {.m = {.layers = 4,
                     .heads = 4,
                     .kv_heads = 2,
                     .channels = 128,
                     .inner = 352,
                     .vocab = 256,
                     .theta = 10000,
                     .epsilon = 1e-5f}};
    dtrain_strategy_desc where = {0};
    dtrain_optimizer_desc adamw = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_ADAMW);
    hf_config config = {0};
    char weights[4096];
    dtrain_mesh *mesh;
    dtrain_dataset *text;
    dtrain_strategy *strategy;
    dtrain_optimizer *optimizer;
    dtrain_state *state;
    dtrain_trainer *trainer;

    if (s->import_from) CHECK(find_model(&b.m, s->import_from, weights, &config));
    b.m.seq = s->seq;
    CHECK(declare_model(&b.m));
    const dtrain_mesh_desc axes = {.tensor = s->tensor,
                                   .pipeline = s->pipeline}; /* the rest is the data axis */
    CHECK(dtrain_mesh_create(world, &axes, &mesh));
    CHECK(open_text(world, s->data, 0, b.m.vocab, &text));
    const dtrain_loader_desc window = {
        .dataset = text, .batch = (uint32_t)s->batch, .sequence = s->seq, .mesh = mesh};
    CHECK(open_windows(world, &window, &b.text));

    where.kind = s->kind;
    where.mesh = mesh;
    where.pipeline = &s->line;
    adamw.beta2 = 0.95f;
    adamw.weight_decay = 0.1f;
    CHECK(dtrain_strategy_create(world, b.m.params, b.m.count, &where, &strategy));
    CHECK(dtrain_optimizer_create(world, strategy, &adamw, &optimizer));
    const dtrain_state_desc all = {.strategy = strategy, .optimizer = optimizer};
    CHECK(dtrain_state_create(world, &all, &state));
    if (s->import_from) CHECK(import_model(state, weights));
    const dtrain_trainer_desc how = {.tokens = (uint32_t)(s->batch * s->seq),
                                     .micro_batches = (uint32_t)s->accum,
                                     .clip = 1,
                                     .tape_flags = s->tape_flags,
                                     .schedule = {.kind = DTRAIN_SCHEDULE_COSINE,
                                                  .lr = s->lr,
                                                  .min_lr = s->lr / 10,
                                                  .warmup_steps = s->steps / 15,
                                                  .total_steps = s->steps},
                                     .strategy = strategy,
                                     .optimizer = optimizer,
                                     .next_batch = next_batch,
                                     .loss = loss,
                                     .user = &b};
    CHECK(dtrain_trainer_create(world, &how, &trainer));
    for (long step = 1; step <= s->steps; step++) {
        dtrain_step_record record;
        CHECK(dtrain_trainer_step(trainer, &record));
        if (dtrain_world_rank(world) == 0 && (step == 1 || step % 100 == 0 || step == s->steps)) {
            printf("step %5ld  loss %.4f\n", step, record.loss);
            fflush(stdout);
        }
    }
    if (s->export_to) CHECK(dtrain_checkpoint_export(strategy, s->export_to, NULL));
    if (s->export_to && dtrain_world_rank(world) == 0 && hf_is_model(s->export_to))
        CHECK(config.text ? hf_write(&config, s->export_to, "float32")
                          : write_config(&b.m, s->export_to));
    fflush(stdout);
    dtrain_trainer_destroy(trainer);
    dtrain_state_destroy(state);
    dtrain_optimizer_destroy(optimizer);
    dtrain_strategy_destroy(strategy);
    close_windows(&b.text);
    dtrain_dataset_close(text);
    dtrain_mesh_destroy(mesh);
    hf_close(&config);
    free_model(&b.m);
    return 0;
}

int main(int argc, char **argv)
{
    enum {
        DATA,
        IMPORT,
        EXPORT,
        RANKS,
        DEVICE,
        STEPS,
        BATCH,
        SEQ,
        LR,
        PRECISION,
        STRATEGY,
        TENSOR,
        PIPELINE,
        SCHEDULE,
        CHUNKS,
        ACCUM,
        FLAGS
    };
    static const char *const flags[] = {"--data",     "--import",
                                        "--export",   "--ranks",
                                        "--device",   "--steps",
                                        "--batch",    "--seq",
                                        "--lr",       "--precision",
                                        "--strategy", "--tensor",
                                        "--pipeline", "--pipeline-schedule",
                                        "--chunks",   "--accum",
                                        NULL};
    static const char *const schedules[] = {"1f1b", "gpipe", "interleaved", "zb_h1", NULL};
    static const char *const precisions[] = {"fp32", "bf16", NULL};
    static const char *const kinds[] = {"ddp",        "zero1", "shard_grad_op",
                                        "full_shard", "zero3", NULL};
    const char *value[FLAGS] = {NULL,   NULL,   NULL,  NULL, "cpu", "300",  "6", "64",
                                "2e-3", "fp32", "ddp", "1",  "1",   "1f1b", "0", "1"};
    if (!read_flags("llama", argc, argv, flags, value)) return 2;
    const int precision = find("llama", "--precision", value[PRECISION], precisions);
    const int kind = find("llama", "--strategy", value[STRATEGY], kinds);
    const int schedule = find("llama", "--pipeline-schedule", value[SCHEDULE], schedules);
    const long chunks = strtol(value[CHUNKS], NULL, 10);
    if (precision < 0 || kind < 0 || schedule < 0) return 2;
    settings s = {.data = value[DATA],
                  .import_from = value[IMPORT],
                  .export_to = value[EXPORT],
                  .kind = (uint32_t)kind + DTRAIN_STRATEGY_DDP,
                  .tape_flags = precision ? DTRAIN_TAPE_BF16 : 0,
                  .tensor = (int)strtol(value[TENSOR], NULL, 10),
                  .pipeline = (int)strtol(value[PIPELINE], NULL, 10),
                  .line = {.kind = (uint32_t)schedule, .chunks = (uint32_t)chunks},
                  .accum = strtol(value[ACCUM], NULL, 10),
                  .batch = strtol(value[BATCH], NULL, 10),
                  .steps = strtol(value[STEPS], NULL, 10),
                  .seq = strtol(value[SEQ], NULL, 10),
                  .lr = strtof(value[LR], NULL)};
    dtrain_launch_desc desc = {.default_rank_count = 2}; /* without a launcher */
    if (value[RANKS]) desc.rank_count = (uint32_t)strtoul(value[RANKS], NULL, 10);
    if (s.pipeline == 1 && (schedule || chunks)) {
        fprintf(stderr, "llama: --pipeline-schedule and --chunks do nothing without --pipeline\n");
        return 2;
    }
    if ((value[RANKS] && !desc.rank_count) || s.tensor < 1 || s.pipeline < 1 || s.accum < 1 ||
        s.accum > 100000 || chunks < 0 || chunks > 1000 || s.steps < 1 || s.batch < 1 ||
        s.batch > 100000 || s.seq < 1 || s.seq > 1000000 || !(s.lr > 0)) {
        fprintf(stderr, "llama: --ranks, --tensor, --pipeline, --chunks, --accum, --steps, "
                        "--batch, --seq and --lr "
                        "take positive numbers\n");
        return 2;
    }
    if (dtrain_device_ops_by_name(value[DEVICE], &desc.device_ops) == DTRAIN_OK &&
        dtrain_launch(&desc, train, &s, NULL) == DTRAIN_OK)
        return 0;
    fprintf(stderr, "llama: %s\n", dtrain_last_error());
    return 1;
}
