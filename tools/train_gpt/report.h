/* report.h: what rank 0 prints of a GPT: the head before the first step, and what the model writes. */
#ifndef REPORT_H
#define REPORT_H

#include "generate.h"
#include "job.h"
#include "shown.h"

static dtrain_result show_gpt(dtrain_world *world, const run_job *j)
{
    if (dtrain_world_rank(world)) return DTRAIN_OK;
    const gpt_run *own = own_part(j);
    const settings *s = own->s;
    const int ranks = dtrain_world_size(world), readers = job_ranks(world, j);
    const dtrain_dataset_info data = dataset_info(own->dataset);
    const int64_t tokens = data.item_count;
    const long batch = (long)j->batch;
    const long padding = gpt_columns(&own->model.config) - s->vocab;
    dtrain_strategy_info info;
    dtrain_strategy_query(j->strategy, &info);
    const uint64_t elements = info.total_elements - (uint64_t)(padding * s->channels);
    show_device(j->s, world);
    say(stdout,
        "model   %s: %ld layers, %ld heads, %ld channels, %ld tokens of context, %ld symbols: "
        "%.2f M parameters (%llu)\n",
        s->model, s->layers, s->heads, s->channels, s->seq, s->vocab, 1e-6 * (double)elements,
        (unsigned long long)elements);
    if (s->sums)
        printf(
            "data    sums: %lld like \"42 plus 17 is fifty-nine.\", of which %lld are held out\n",
            (long long)tokens, (long long)(tokens - sums_held_out(s->sums, s->val_split)));
    else {
        say(stdout, "data    %s: %lld tokens", s->data, (long long)tokens);
        if (data.file_count > 1) printf(" in %zu files", data.file_count);
        printf(", the last %lld held out\n", (long long)((double)tokens * s->val_split));
    }
    printf("step    %ld x %ld tokens x %u micro-batch%s x %d %s%s = %ld tokens\n", batch, s->seq,
           j->accum, j->accum == 1 ? "" : "es", readers, j->mesh ? "replica" : "rank",
           plural(readers), batch * s->seq * (long)j->accum * readers);
    show_resumed(j, ranks);
    show_strategy(j, readers);
    return DTRAIN_OK;
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
    shown_text held;
} writer;

/* Print a token. False ends the text: the token that means its end. */
static bool show_token(void *user, int32_t token)
{
    writer *w = (writer *)user;
    const char byte = (char)token, *text = &byte;
    const tokenizer *t = w->s->tokenizer;
    size_t bytes = 1;
    if (t ? token == t->end_of_text : w->s->end_token && token == w->s->end_token) return false;
    w->written++;
    if (!w->prints) return true;
    if (t) text = tokenizer_text(t, token, &bytes);
    if (!t && w->s->vocab != 256) printf("%d ", (int)token);
    else if (w->raw && !isatty(1)) fwrite(text, 1, bytes, stdout);
    else
        for (size_t i = 0; i < bytes; i++) {
            if (w->raw && text[i] == '\n') show_held(&w->held), putchar('\n');
            else show_byte(&w->held, text[i]);
        }
    fflush(stdout);
    return true;
}

/* Go on from the prompt. Collective: every rank draws the tokens, and the first one prints them.
 * w->written becomes their number, without the prompt's. */
static dtrain_result write_tokens(dtrain_world *world, const run_job *j, long count, writer *w,
                                  token_list *list)
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
    return gpt_generate(j->trainer, own_part(j)->tape, tape_flags(j->s), dtrain_world_device(world),
                        &own_part(j)->model, (int)j->s->tensor, &how, list->at, (int64_t)prompt,
                        count, show_token, w);
}

/* Write --generate tokens behind the prompt, as they are, and to stderr how fast that went. */
static dtrain_result show_generated(dtrain_world *world, const run_job *j, bool first)
{
    writer w = {own_part(j)->s, first, true, 0, {{0}, 0}};
    token_list list = {NULL, 0, 0};
    const double start = dtrain_seconds();
    const dtrain_result result = write_tokens(world, j, own_part(j)->s->generate, &w, &list);
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
    writer w = {own_part(j)->s, first, false, 0, {{0}, 0}};
    token_list list = {NULL, 0, 0};
    if (first) printf("\na sample, temperature %g:\n  ", own_part(j)->s->temperature);
    const dtrain_result result = write_tokens(world, j, own_part(j)->s->sample, &w, &list);
    show_held(&w.held);
    if (first) printf("\n");
    free(list.at);
    return result;
}

/* ---- sums ------------------------------------------------------------------------------------- */

/* An answer as it is written, without the blank before it and the new line behind. */
typedef struct answer {
    const settings *s;
    char text[4 * SUMS_BYTES];
    size_t bytes;
} answer;

/* Add a token to an answer. False ends it: a new line does. */
static bool add_token(void *user, int32_t token)
{
    answer *a = (answer *)user;
    const char byte = (char)token, *text = &byte;
    size_t bytes = 1;
    if (a->s->tokenizer) text = tokenizer_text(a->s->tokenizer, token, &bytes);
    for (size_t i = 0; i < bytes && a->bytes + 1 < sizeof a->text; i++) {
        if (text[i] == '\n') return false;
        if (a->bytes || text[i] != ' ') a->text[a->bytes++] = text[i];
    }
    return true;
}

/* Print an answer, and the right one where it is wrong; what a terminal cannot show is made visible. */
static void show_answer(const sum *one, const answer *given)
{
    char question[SUMS_BYTES], right[SUMS_BYTES];
    shown_text held = {{0}, 0};
    sum_texts(one, question, right);
    right[strlen(right) - 1] = 0; /* its new line */
    const bool good =
        strlen(right + 1) == given->bytes && memcmp(right + 1, given->text, given->bytes) == 0;
    printf("  %s  %s ", good ? "right" : "WRONG", question);
    for (size_t i = 0; i < given->bytes; i++) show_byte(&held, given->text[i]);
    show_held(&held);
    if (!good) printf("  (it is%s)", right);
    printf("\n");
}

/* Let the model answer ten of the sums that were held out, the likeliest token each time. Collective. */
static dtrain_result show_sums(dtrain_world *world, run_job *j, bool first)
{
    const gpt_run *own = own_part(j);
    const sums *all = own->s->sums;
    const int64_t held_out = sums_held_out(all, own->s->val_split), count = SUMS_COUNT - held_out;
    const gpt_sampling greedy = {0, 0, 0, 0, false};
    dtrain_result result = DTRAIN_OK;
    if (first) printf("\n");
    for (int64_t i = 0; i < 10 && i < count && result == DTRAIN_OK; i++) {
        const sum *one = &all->list[held_out + i * count / 10];
        int32_t tokens[SUMS_BYTES];
        answer given = {own->s, {0}, 0};
        memcpy(tokens, one->tokens, sizeof tokens);
        result = gpt_generate(j->trainer, NULL, 0, dtrain_world_device(world), &own->model,
                              (int)j->s->tensor, &greedy, tokens, one->asked,
                              SUMS_BYTES - one->asked, add_token, &given);
        if (first && result == DTRAIN_OK) show_answer(one, &given);
    }
    if (first && own->s->eval_batches)
        printf("\n  %.1f %% of all %lld held-out sums are right\n", 100 * own->right,
               (long long)count);
    return result;
}

#endif /* REPORT_H */
