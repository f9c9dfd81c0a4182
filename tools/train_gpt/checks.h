/* checks.h: what is refused before any rank starts, with one sentence each: sizes, text, data; what goes
 * for all programs is in tools/run/checks.h. Functions return 0, or main's exit status after the sentence. */
#ifndef CHECKS_H
#define CHECKS_H

#include "report.h"

/* Refuse a model that a tensor axis cannot share evenly: whole heads, features of the MLP, rows of a micro-batch. */
static int check_cut(const settings *s)
{
    const run_settings *run = s->run;
    const long rows = run->batch * s->seq;
    if (s->heads % run->tensor)
        return BAD("--heads is %ld, and --tensor %ld does not divide it: each rank has whole heads",
                   s->heads, run->tensor);
    if (!run->sequence_parallel || !trains(s) || s->seq % run->tensor == 0) return 0;
    if (run->auto_batch || run->global_batch || run->tune)
        return BAD("--sequence-parallel cuts the rows of any micro-batch: --seq is %ld, and "
                   "--tensor %ld does not divide it; or say --batch alone",
                   s->seq, run->tensor);
    if (rows % run->tensor == 0) return 0;
    return BAD("--sequence-parallel cuts the %ld rows of a micro-batch (--batch %ld x --seq %ld), "
               "and --tensor %ld does not divide them",
               rows, run->batch, s->seq, run->tensor);
}

static int check_sizes(const settings *s)
{
    if (s->channels % s->heads)
        return BAD("--heads is %ld; it must divide --channels %ld", s->heads, s->channels);
    if (check_cut(s)) return 2;
    if (s->run->keep_best && !s->eval_batches)
        return BAD("--keep-best compares validations, and --eval-batches is 0");
    return 0;
}

/* Open the tokenizer, which all ranks share. */
static int open_tokenizer(settings *s)
{
    static tokenizer opened;
    if (!s->tokenizer_path) return 0;
    if (tokenizer_open(&opened, s->tokenizer_path) != DTRAIN_OK)
        return BAD("--tokenizer: %s", dtrain_last_error());
    s->tokenizer = &opened;
    return 0;
}

/* Write tokens as llm.c does: a header, and then 16 bits for each, or 32 for a large vocabulary. */
static int write_token_file(FILE *file, const token_list *list, bool wide)
{
    const uint32_t header[3] = {wide ? 20240801 : 20240520, wide ? 7 : 1, (uint32_t)list->count};
    const int each = wide ? 4 : 2;
    for (int i = 0; i < 1024; i++)
        putc(i < 12 ? (int)(header[i / 4] >> 8 * (i % 4) & 0xff) : 0, file);
    for (size_t i = 0; i < list->count; i++)
        for (int k = 0; k < each; k++) putc(list->at[i] >> 8 * k & 0xff, file);
    return fflush(file) == 0 && !ferror(file) ? 0 : -1;
}

/* Tell by control characters at the beginning that something is no text. */
static bool is_binary(const char *text, size_t bytes)
{
    for (size_t i = 0; i < bytes && i < 4096; i++)
        if ((uint8_t)text[i] < 9 || (text[i] > 13 && text[i] < 27)) return true;
    return false;
}

/* Make the sums that are learned without --data. */
static int make_sums(settings *s)
{
    static sums made;
    if (given("--data-format")) return BAD("--data-format does nothing without --data");
    if (!s->vocab) s->vocab = 256;
    if (!s->tokenizer && s->vocab < 256)
        return BAD("--vocab is %ld, and the sums that are learned without --data are bytes: 256",
                   s->vocab);
    if (sums_make(&made, s->tokenizer, s->seq) != DTRAIN_OK)
        return BAD("--tokenizer: %s", dtrain_last_error());
    s->sums = &made;
    return 0;
}

/* Encode the text of --data once, to a file without a name, which goes with the process; ranks, which
 * are its children or have done the same, read that. Tokens stay what they are. */
static int encode_data(settings *s)
{
    static char path[32];
    static const uint32_t magics[] = {20240520, 20240801};
    token_list list = {NULL, 0, 0};
    char *text = NULL;
    size_t bytes = 0;
    uint32_t magic = 0;
    FILE *file = NULL;
    if (!s->data) return make_sums(s);
    if (!s->tokenizer || s->data_format >= 2) return 0; /* tokens already */
    dtrain_result result = read_file(s->data, &text, &bytes);
    if (result != DTRAIN_OK)
        return BAD("--data: %s; --tokenizer encodes one file of text, and files that have tokens "
                   "already need --data-format bin, u16 or u32",
                   dtrain_last_error());
    for (size_t i = 0; i < 4 && i < bytes; i++) magic |= (uint32_t)(uint8_t)text[i] << 8 * i;
    const bool encoded = magic == magics[0] || magic == magics[1];
    if (!encoded && !s->data_format && is_binary(text, bytes)) {
        free(text);
        return BAD("--data: %s is no text, which --tokenizer encodes; tokens of nanoGPT are "
                   "--data-format u16, and --data-format bytes means its bytes",
                   s->data);
    }
    if (result == DTRAIN_OK && !encoded)
        result = tokenizer_encode(s->tokenizer, text, bytes, &list);
    free(text);
    if (result == DTRAIN_OK && !encoded) {
        file = tmpfile(); /* closed by the end of the process */
        if (!file || list.count > INT32_MAX ||
            write_token_file(file, &list, s->tokenizer->count > 65536) != 0)
            result = dtrain_fail(DTRAIN_ERROR_FILE, "a temporary file for %zu tokens: %s",
                                 list.count, strerror(errno));
        else snprintf(path, sizeof path, "/dev/fd/%d", fileno(file)), s->tokens = path;
    }
    free(list.at);
    return result == DTRAIN_OK ? 0 : BAD("--data %s: %s", s->data, dtrain_last_error());
}

/* Refuse what would be found out only at the end: a text to go on from, a file to write. */
static int check_text(const settings *s)
{
    token_list list = {NULL, 0, 0};
    const bool writes = s->generate || s->sample;
    const dtrain_result result = writes ? prompt_tokens(s, &list) : DTRAIN_OK;
    free(list.at);
    if (result != DTRAIN_OK) return BAD("%s", dtrain_last_error());
    if (s->export_to && ends_with(s->export_to, ".bin") && s->export_dtype == 2)
        return BAD("--export-dtype fp16 and --export %s: llm.c has fp32 and bf16", s->export_to);
    if (s->export_to && ends_with(s->export_to, ".bin") &&
        (s->activation || (float)s->epsilon != 1e-5f))
        return BAD("--export %s: llm.c computes gelu_new with an epsilon of 1e-05, and this model "
                   "%s with %g; export to a name that does not end with .bin",
                   s->export_to, gpt_activations[s->activation], s->epsilon);
    if (given("--export-dtype") && !s->export_to)
        return BAD("--export-dtype does nothing without --export");
    return 0;
}

/* Refuse a run without training that has no model, or nothing to do. */
static int check_model(const settings *s)
{
    static const char *const of_training[] = {"--dry-run",     "--tune",        "--cluster",
                                              "--probe-links", "--config-out",  "--log",
                                              "--prometheus",  "--tensorboard", "--histograms"};
    for (int i = 0; i < COUNT(of_training); i++)
        if (given(of_training[i]))
            return BAD("%s does nothing with %s, which trains nothing", of_training[i],
                       s->generate ? "--generate" : "--steps 0");
    if (s->run->pipeline > 1)
        return BAD("--pipeline with %s: what trains nothing has no stages; leave it out, as a "
                   "checkpoint of a pipeline is read by any layout",
                   s->generate ? "--generate" : "--steps 0");
    if (!s->import_from == !s->run->resume)
        return BAD("%s needs a model: --import FILE or --resume CHECKPOINT",
                   s->generate ? "--generate" : "--steps 0");
    if (s->run->resume && strcmp(s->run->resume, "auto") == 0)
        return BAD("%s: --resume takes a checkpoint, or the directory of several",
                   s->generate ? "--generate" : "--steps 0");
    if (!s->generate && !s->export_to) return BAD("--steps 0 without --export does nothing");
    if (s->run->checkpoints) return BAD("--checkpoint: there is nothing to save without training");
    return 0;
}

/* Open the data once as the ranks will, so that a bad file is one sentence before any rank starts.
 * Sets the vocabulary to that of the file. */
static int check_data(settings *s)
{
    dtrain_dataset_desc desc = dataset_desc(s);
    dtrain_dataset *dataset = NULL;
    dtrain_loader *loader = NULL;
    dtrain_result result;
    TRY(dtrain_dataset_open(NULL, &desc, &dataset));
    s->vocab = (long)dataset_info(dataset).vocab_count;
    run_data = dataset_info(dataset).file_sample + dataset_info(dataset).file_bytes;
    for (int side = 0; side < 2; side++) {
        dtrain_loader_desc window = loader_desc(s, dataset, s->run->batch, side == 1);
        TRY(dtrain_loader_create(NULL, &window, &loader));
        dtrain_loader_destroy(loader);
    }
cleanup:
    if (!dataset)
        return name_error(result, "--data", ""),
               BAD("%s; --data-format bytes, bin, u16 or u32 says what it is", dtrain_last_error());
    dtrain_dataset_close(dataset);
    return result == DTRAIN_OK ? 0 : BAD("%s", dtrain_last_error());
}

#endif /* CHECKS_H */
