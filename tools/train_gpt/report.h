/* report.h: what rank 0 prints of a GPT: the head before the first step, and what the model writes. */
#ifndef REPORT_H
#define REPORT_H

#include "generate.h"
#include "job.h"

#include <ctype.h>

static void show_gpt(dtrain_world *world, const run_job *j)
{
    const gpt_run *own = own_part(j);
    const settings *s = own->s;
    const int ranks = dtrain_world_size(world);
    const dtrain_dataset_info data = dataset_info(own->dataset);
    const int64_t tokens = data.item_count;
    const long batch = (long)j->batch;
    const long padding = gpt_columns(&own->model.config) - s->vocab;
    dtrain_strategy_info info;
    dtrain_strategy_query(j->strategy, &info);
    const uint64_t elements = info.total_elements - (uint64_t)(padding * s->channels);
    show_device(j->s, world);
    printf("model   %s: %ld layers, %ld heads, %ld channels, %ld tokens of context, %ld symbols: "
           "%.2f M parameters (%llu)\n",
           s->model, s->layers, s->heads, s->channels, s->seq, s->vocab, 1e-6 * (double)elements,
           (unsigned long long)elements);
    printf("data    %s: %lld tokens", s->data, (long long)tokens);
    if (data.file_count > 1) printf(" in %zu files", data.file_count);
    printf(", the last %lld held out\n", (long long)((double)tokens * s->val_split));
    printf("step    %ld x %ld tokens x %u micro-batches x %d ranks = %ld tokens\n", batch, s->seq,
           j->accum, ranks, batch * s->seq * (long)j->accum * ranks);
    show_resumed(j, ranks);
    show_strategy(j, ranks);
}

/* ---- what the model writes ------------------------------------------------------------------ */

/* Append the tokens of --prompt; without one, the end of text that a text follows in GPT-2's data, or
 * a new line where the tokens are bytes. */
static dtrain_result prompt_tokens(const settings *s, token_list *list)
{
    const char *at = s->prompt ? s->prompt : s->vocab == 256 ? "\n" : "";
    const size_t bytes = strlen(at);
    if (s->tokenizer && bytes) return tokenizer_encode(s->tokenizer, at, bytes, list);
    if (!token_list_grow(list, bytes + 1)) return tokenizer__memory();
    if (s->tokenizer && s->tokenizer->end_of_text >= 0)
        list->at[list->count++] = s->tokenizer->end_of_text;
    else if (!bytes) list->at[list->count++] = (int32_t)(s->vocab - 1);
    for (size_t i = 0; i < bytes && s->vocab == 256; i++) list->at[list->count++] = (uint8_t)at[i];
    for (char *end; s->vocab != 256 && *at; at = end) {
        const long token = strtol(at, &end, 10);
        if (end == at || token < 0 || token >= s->vocab)
            return dtrain_fail(
                DTRAIN_ERROR_ARGUMENT,
                "--prompt is \"%s\"; without --tokenizer it takes numbers of tokens, 0 "
                "to %ld",
                s->prompt, s->vocab - 1);
        list->at[list->count++] = (int32_t)token;
        end += strspn(end, " ");
    }
    return DTRAIN_OK;
}

/* Who writes tokens, and how. */
typedef struct writer {
    const settings *s;
    bool prints; /* rank 0 */
    bool raw;    /* as it is, not indented and printable */
    int64_t written;
} writer;

static void show_byte(unsigned char byte)
{
    if (byte == '\n') printf("\n  ");
    else putchar(isprint(byte) || byte == '\t' || byte >= 128 ? byte : '?');
}

/* Print a token. False ends the text: GPT-2's own end of it. */
static bool show_token(void *user, int32_t token)
{
    writer *w = (writer *)user;
    const char byte = (char)token, *text = &byte;
    const tokenizer *t = w->s->tokenizer;
    size_t bytes = 1;
    if (t && token == t->end_of_text) return false;
    w->written++;
    if (!w->prints) return true;
    if (t) text = tokenizer_text(t, token, &bytes);
    if (!t && w->s->vocab != 256) printf("%d ", (int)token);
    else if (w->raw) fwrite(text, 1, bytes, stdout);
    else
        for (size_t i = 0; i < bytes; i++) show_byte((unsigned char)text[i]);
    fflush(stdout);
    return true;
}

/* Go on from the prompt. Collective: every rank draws the tokens, and the first one prints them.
 * w->written becomes their number, without the prompt's. */
static dtrain_result write_tokens(dtrain_world *world, const run_job *j, dtrain_tape *tape,
                                  long count, writer *w, token_list *list)
{
    const settings *s = own_part(j)->s;
    const gpt_sampling how = {s->temperature, s->top_p, s->top_k, (uint64_t)s->run->seed,
                              s->no_cache != 0};
    dtrain_result result = prompt_tokens(s, list);
    const size_t prompt = list->count;
    if (result == DTRAIN_OK && !token_list_grow(list, (size_t)count)) result = tokenizer__memory();
    if (result != DTRAIN_OK) return result;
    for (size_t i = 0; i < prompt && w->raw && s->prompt; i++) (void)show_token(w, list->at[i]);
    w->written = 0;
    return gpt_generate(tape, dtrain_world_device(world), &own_part(j)->model, tape_flags(j->s),
                        &how, list->at, (int64_t)prompt, count, show_token, w);
}

/* Write --generate tokens behind the prompt, as they are, and to stderr how fast that went. */
static dtrain_result show_generated(dtrain_world *world, const run_job *j, bool first)
{
    writer w = {own_part(j)->s, first, true, 0};
    token_list list = {NULL, 0, 0};
    const double start = dtrain_seconds();
    const dtrain_result result =
        write_tokens(world, j, own_part(j)->tape, own_part(j)->s->generate, &w, &list);
    const double seconds = dtrain_seconds() - start;
    if (first) printf("\n"), fflush(stdout);
    if (first && result == DTRAIN_OK)
        fprintf(stderr, "  generated            %10lld tokens %s, %.1f tokens/s\n",
                (long long)w.written,
                own_part(j)->s->no_cache ? "without a cache" : "with a cache of keys and values",
                (double)w.written / seconds);
    free(list.at);
    return result;
}

static dtrain_result show_sample(dtrain_world *world, const run_job *j, bool first)
{
    writer w = {own_part(j)->s, first, false, 0};
    token_list list = {NULL, 0, 0};
    if (first) printf("\na sample, temperature %g:\n  ", own_part(j)->s->temperature);
    const dtrain_result result =
        write_tokens(world, j, dtrain_trainer_tape(j->trainer), own_part(j)->s->sample, &w, &list);
    if (first) printf("\n");
    free(list.at);
    return result;
}

#endif /* REPORT_H */
