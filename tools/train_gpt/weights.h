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

/* Read what the file of --import is, and take what no flag gives from it: sizes, unless --model says whose they are,
 * and what no shape shows. Return 0, or main's exit status after a sentence. */
static int import_sizes(settings *s)
{
    static char weights[4096];
    gpt_config *found = &s->found;
    dtrain_result result = DTRAIN_OK;
    if (!s->import_from) return 0;
    TRY(hf_weights(s->import_from, weights, sizeof weights));
    s->import_from = weights;
    if (llmc_is_model(weights)) TRY(llmc_read_config(weights, found));
    else {
        TRY(hf_open(&s->imported, weights));
        if (s->imported.text) TRY(gpt_read_config(&s->imported, found));
    }
cleanup:
    if (result != DTRAIN_OK) return BAD("--import: %s", dtrain_last_error());
    if (found->layers && s->activation < 0) s->activation = gpt_activation(found);
    if (found->layers && s->epsilon < 0) s->epsilon = (double)found->epsilon;
    if (given("--model")) return 0;
    if (!s->layers) s->layers = found->layers;
    if (!s->heads) s->heads = found->heads;
    if (!s->channels) s->channels = found->channels;
    if (!s->vocab) s->vocab = found->vocab;
    if (s->vocab == 256 && !s->tokenizer_path)
        s->end_token = hf_size(&s->imported, "eos_token_id", 0);
    s->positions = found->positions;
    return 0;
}

/* Refuse flags that say otherwise than the file of --import, where no shape would show it. */
static int check_import(const settings *s)
{
    const gpt_config *found = &s->found;
    if (!found->layers) return 0;
    if (s->heads != found->heads)
        return BAD("--heads is %ld, and %s was trained with %ld", s->heads, s->import_from,
                   found->heads);
    if (s->activation != gpt_activation(found))
        return BAD("--activation is %s, and %s was trained with %s", gpt_activations[s->activation],
                   s->import_from, gpt_activations[gpt_activation(found)]);
    if ((float)s->epsilon != found->epsilon)
        return BAD("--norm-epsilon is %g, and %s was trained with %g", s->epsilon, s->import_from,
                   (double)found->epsilon);
    return 0;
}

/* Set the parameters to those of --import. Collective. */
static dtrain_result import_weights(dtrain_world *world, const settings *s, const gpt *model,
                                    dtrain_state *state)
{
    dtrain_import_desc from;
    dtrain_result result = DTRAIN_OK;
    if (llmc_is_model(s->import_from)) return llmc_import(world, state, model, s->import_from);
    if (!s->found.layers && dtrain_world_rank(world) == 0)
        fprintf(stderr,
                RUN_NAME
                ": there is no %s: taken for a GPT-2 of %ld heads, %s and an epsilon of %g; "
                "--heads, --activation and --norm-epsilon say otherwise\n",
                s->imported.path, s->heads, gpt_activations[s->activation], s->epsilon);
    dtrain_export_name *names = gpt_hugging_face(model);
    memset(&from, 0, sizeof from);
    from.names = names;
    from.prefix = "transformer.";
    from.ignore = gpt_ignored();
    if (!names) TRY(dtrain_fail(DTRAIN_ERROR_MEMORY, "no memory for names"));
    result = dtrain_checkpoint_import(state, s->import_from, &from, NULL);
    if (result != DTRAIN_OK) result = name_error(result, "--import", "");
cleanup:
    free(names);
    return result;
}

/* Write the parameters to --export. Collective. */
static dtrain_result export_weights(dtrain_world *world, const settings *s, const gpt *model,
                                    dtrain_strategy *strategy)
{
    dtrain_export_desc to;
    const char *type = s->export_dtype == 1 ? "bfloat16" : s->export_dtype ? "float16" : "float32";
    const int end_of_text = s->tokenizer ? s->tokenizer->end_of_text
                            : s->sums    ? s->sums->new_line
                                         : -1;
    dtrain_result result = DTRAIN_OK;
    if (ends_with(s->export_to, ".bin"))
        return llmc_export(world, strategy, model, s->export_dtype == 1, s->export_to);
    dtrain_export_name *names = gpt_hugging_face(model);
    memset(&to, 0, sizeof to);
    to.dtype = float_type(s->export_dtype);
    to.names = names;
    if (!names) TRY(dtrain_fail(DTRAIN_ERROR_MEMORY, "no memory for names"));
    TRY(dtrain_checkpoint_export(strategy, s->export_to, &to));
    if (dtrain_world_rank(world) || !hf_is_model(s->export_to)) goto cleanup;
    if (s->imported.text) TRY(hf_write(&s->imported, s->export_to, type));
    else TRY(gpt_write_config(&model->config, end_of_text, s->export_to, type));
cleanup:
    free(names);
    return result;
}

#endif /* WEIGHTS_H */
