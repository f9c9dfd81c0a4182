/* weights.h: --import and --export: a GPT-2 in files of Hugging Face (safetensors) or of llm.c (.bin),
 * and the sizes that such a file has. */
#ifndef WEIGHTS_H
#define WEIGHTS_H

#include "settings.h"
#include "llmc.h"

static bool ends_with(const char *text, const char *end)
{
    const size_t bytes = strlen(text), end_bytes = strlen(end);
    return bytes >= end_bytes && strcmp(text + bytes - end_bytes, end) == 0;
}

/* Write the path of config.json, which lies beside files of Hugging Face. */
static void config_path(const char *weights, char *path, size_t room)
{
    const char *slash = strrchr(weights, '/');
    snprintf(path, room, "%.*sconfig.json", slash ? (int)(slash - weights) + 1 : 0, weights);
}

/* Return the number behind "key": in the text of a config.json, or 0. It need not be read as JSON is:
 * import compares whatever is found here with the shapes in the file. */
static long config_number(const char *text, const char *key)
{
    char quoted[64];
    long number = 0;
    snprintf(quoted, sizeof quoted, "\"%s\"", key);
    const char *at = strstr(text, quoted);
    if (at && sscanf(at + strlen(quoted), " : %ld", &number) != 1) number = 0;
    return number > 0 ? number : 0;
}

/* Read the sizes of config.json; all zero when there is none. */
static void read_config(const char *weights, gpt_config *config)
{
    static char text[1 << 16];
    char path[4096];
    config_path(weights, path, sizeof path);
    FILE *file = fopen(path, "r");
    if (!file) return;
    text[fread(text, 1, sizeof text - 1, file)] = 0;
    fclose(file);
    config->layers = config_number(text, "n_layer");
    config->heads = config_number(text, "n_head");
    config->channels = config_number(text, "n_embd");
    config->positions = config_number(text, "n_positions");
    config->vocab = config_number(text, "vocab_size");
}

/* Take the sizes that no flag gives from the file of --import, unless --model says whose they are.
 * Return 0, or main's exit status after a sentence. */
static int import_sizes(settings *s)
{
    gpt_config config;
    memset(&config, 0, sizeof config);
    if (!s->import_from || given("--model")) return 0;
    if (llmc_is_model(s->import_from)) {
        if (llmc_read_config(s->import_from, &config) != DTRAIN_OK)
            return BAD("--import: %s", dtrain_last_error());
    } else read_config(s->import_from, &config);
    if (!s->layers) s->layers = config.layers;
    if (!s->heads) s->heads = config.heads;
    if (!s->channels) s->channels = config.channels;
    if (!s->vocab) s->vocab = config.vocab;
    s->positions = config.positions;
    return 0;
}

/* Set the parameters to those of --import. Collective. */
static dtrain_result import_weights(dtrain_world *world, const settings *s, const gpt *model,
                                    dtrain_state *state)
{
    dtrain_import_desc from;
    dtrain_result result = DTRAIN_OK;
    if (llmc_is_model(s->import_from)) return llmc_import(world, state, model, s->import_from);
    dtrain_export_name *names = gpt_hugging_face(model);
    memset(&from, 0, sizeof from);
    from.names = names;
    from.prefix = "transformer.";
    from.ignore = gpt_ignored();
    if (!names) TRY(dtrain_fail(DTRAIN_ERROR_MEMORY, "no memory for names"));
    TRY(dtrain_checkpoint_import(state, s->import_from, &from, NULL));
cleanup:
    free(names);
    return result;
}

/* Write the parameters to --export. Collective. */
static dtrain_result export_weights(dtrain_world *world, const settings *s, const gpt *model,
                                    dtrain_strategy *strategy)
{
    dtrain_export_desc to;
    dtrain_result result = DTRAIN_OK;
    char config[4096];
    if (ends_with(s->export_to, ".bin"))
        return llmc_export(world, strategy, model, s->export_dtype == 1, s->export_to);
    dtrain_export_name *names = gpt_hugging_face(model);
    memset(&to, 0, sizeof to);
    to.dtype = float_type(s->export_dtype);
    to.names = names;
    if (!names) TRY(dtrain_fail(DTRAIN_ERROR_MEMORY, "no memory for names"));
    TRY(dtrain_checkpoint_export(strategy, s->export_to, &to));
    if (dtrain_world_rank(world) || !ends_with(s->export_to, "model.safetensors")) goto cleanup;
    config_path(s->export_to, config, sizeof config);
    if (gpt_write_config(&model->config, config) != 0)
        TRY(dtrain_fail(DTRAIN_ERROR_FILE, "%s cannot be written: %s", config, strerror(errno)));
cleanup:
    free(names);
    return result;
}

#endif /* WEIGHTS_H */
