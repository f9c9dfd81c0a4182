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

/* Probe the files of --export, before there is anything to lose. */
static int check_export(void)
{
    const char *path = flags.export_to, *slash = path ? strrchr(path, '/') : NULL;
    char config[4096];
    if (check_output("--export", path, true)) return 2;
    if (!path || !hf_is_model(path)) return 0;
    snprintf(config, sizeof config, "%.*sconfig.json", slash ? (int)(slash - path) + 1 : 0, path);
    return check_output("--export: beside it,", config, false);
}

/* Write the parameters to a file of --export's kind. Collective. */
static dtrain_result export_weights(dtrain_world *world, const settings *s, const gpt *model,
                                    dtrain_strategy *strategy, const char *path)
{
    dtrain_export_desc to;
    const char *type = s->export_dtype == 1 ? "bfloat16" : s->export_dtype ? "float16" : "float32";
    const int end_of_text = s->tokenizer ? s->tokenizer->end_of_text
                            : s->sums    ? s->sums->new_line
                                         : -1;
    dtrain_result result = DTRAIN_OK;
    if (ends_with(path, ".bin"))
        return llmc_export(world, strategy, model, s->export_dtype == 1, path);
    dtrain_export_name *names = gpt_hugging_face(model);
    memset(&to, 0, sizeof to);
    to.dtype = float_type(s->export_dtype);
    to.names = names;
    if (!names) TRY(dtrain_fail(DTRAIN_ERROR_MEMORY, "no memory for names"));
    TRY(dtrain_checkpoint_export(strategy, path, &to));
    if (dtrain_world_rank(world) || !hf_is_model(path)) goto cleanup;
    if (s->imported.text) TRY(hf_write(&s->imported, path, type));
    else TRY(gpt_write_config(&model->config, end_of_text, path, type));
cleanup:
    free(names);
    return result;
}

/* Write the parameters, and tell on every rank alike whether that was possible; the last error of rank 0 says why not.
 * Collective. */
static dtrain_result try_export(dtrain_world *world, const settings *s, const gpt *model,
                                dtrain_strategy *strategy, const char *path, bool *written)
{
    char all[DTRAIN_MAX_RANKS];
    const char good = export_weights(world, s, model, strategy, path) == DTRAIN_OK;
    const dtrain_result result = dtrain_world_all_gather(world, &good, 1, all);
    *written = memchr(all, 0, (size_t)dtrain_world_size(world)) == NULL;
    return result;
}

/* Make a new folder for weights that --export cannot have: with the checkpoints, beside the log, in the working
 * folder, or with temporary files. Write the path of the file in it; false: there is no such place. */
static bool spare_path(const settings *s, int place, char path[4096])
{
    const char *const temporary = getenv("TMPDIR"), *log = s->run->log;
    const char *const slash = log ? strrchr(log, '/') : NULL, *end = strrchr(s->export_to, '/');
    const char *const folders[] = {s->run->checkpoints, slash ? log : NULL, ".",
                                   temporary && *temporary ? temporary : "/tmp"};
    const char *const folder = folders[place];
    const int length = !folder ? 0 : place == 1 ? (int)(slash - log) : (int)strlen(folder);
    const int bytes = snprintf(path, 4096, "%.*s/export-XXXXXX", length, folder ? folder : "");
    if (!folder || bytes > 3000 || !mkdtemp(path)) return false;
    snprintf(path + bytes, 4096 - (size_t)bytes, "/%.1000s", end ? end + 1 : s->export_to);
    return true;
}

enum { SPARE_PLACES = 4 };

/* Write the parameters to --export; if that fails, to another place, so that no training is lost. *why is the sentence
 * about that, on rank 0, and "" after success. Collective. */
static dtrain_result export_or_spare(dtrain_world *world, const settings *s, const gpt *model,
                                     dtrain_strategy *strategy, char why[1024])
{
    const bool first = dtrain_world_rank(world) == 0;
    char path[4096], text[512];
    bool written;
    *why = 0;
    dtrain_result result = try_export(world, s, model, strategy, s->export_to, &written);
    if (result != DTRAIN_OK || written) return result;
    const char *error = dtrain_last_error(), *bare = strstr(error, ": "); /* after the rank */
    snprintf(text, sizeof text, "%s", bare ? bare + 2 : error);
    for (int i = 0; i < SPARE_PLACES && !written; i++) {
        snprintf(path, sizeof path, "%s", s->export_to);
        if (first && !spare_path(s, i, path)) path[0] = 0; /* which no export can write */
        result = try_export(world, s, model, strategy, path, &written);
        if (result != DTRAIN_OK) return result;
        if (first && !written && path[0]) *strrchr(path, '/') = 0, (void)rmdir(path);
    }
    if (!first) return DTRAIN_OK;
    if (written)
        snprintf(why, 1024, "--export %.200s: %.400s; the weights are in %.300s instead",
                 s->export_to, text, path);
    else
        snprintf(why, 1024, "--export %.200s: %.400s; nor could other folders be written%s%.200s",
                 s->export_to, text,
                 s->run->checkpoints ? "; the weights are in the last "
                                       "checkpoint of "
                                     : "",
                 s->run->checkpoints ? s->run->checkpoints : "");
    return DTRAIN_OK;
}

#endif /* WEIGHTS_H */
