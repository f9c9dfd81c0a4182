/* generate.h: text from a GPT, one token after the other. Include it after gpt.h. */
#ifndef GENERATE_H
#define GENERATE_H

#include "gpt.h"

/* How the next token is drawn from the logits. Zeros: the most likely one. */
typedef struct gpt_sampling {
    double temperature; /* 0: the most likely token */
    double top_p; /* of the most likely tokens that together have this probability; 0: of all */
    long top_k;   /* of so many of the most likely tokens; 0: of all */
    uint64_t seed;
    bool no_cache; /* compute every token from all before it, to compare */
} gpt_sampling;

static inline int gpt__falling(const void *a, const void *b)
{
    const float x = *(const float *)a, y = *(const float *)b;
    return (x < y) - (x > y);
}

/* Return the least logit that may be drawn. scratch (count) */
static inline float gpt__least(const float *logits, long count, const gpt_sampling *how,
                               float *scratch)
{
    const long most = how->top_k && how->top_k < count ? how->top_k : count;
    double all = 0, sum = 0;
    long last = 0;
    if (most == count && !(how->top_p > 0 && how->top_p < 1)) return -INFINITY;
    memcpy(scratch, logits, (size_t)count * sizeof *scratch);
    qsort(scratch, (size_t)count, sizeof *scratch, gpt__falling);
    if (!(how->top_p > 0 && how->top_p < 1)) return scratch[most - 1];
    for (long i = 0; i < most; i++) all += exp((scratch[i] - scratch[0]) / how->temperature);
    for (; last < most - 1; last++) {
        sum += exp((scratch[last] - scratch[0]) / how->temperature);
        if (sum >= how->top_p * all) break;
    }
    return scratch[last];
}

/* Draw from softmax(logits / temperature), of the logits that are not below the least. */
static inline int32_t gpt__draw(const float *logits, long count, const gpt_sampling *how,
                                uint64_t at, float *scratch)
{
    double sum = 0, pick = dtrain_random_uniform(how->seed, 77, at);
    long best = 0, token = 0;
    for (long i = 1; i < count; i++) best = logits[i] > logits[best] ? i : best;
    if (how->temperature <= 0) return (int32_t)best;
    const float least = gpt__least(logits, count, how, scratch), top = logits[best];
    for (long i = 0; i < count; i++)
        if (logits[i] >= least) sum += exp(((double)logits[i] - (double)top) / how->temperature);
    for (long i = 0; i < count && pick >= 0; i++) {
        if (!(logits[i] >= least)) continue;
        pick -= exp(((double)logits[i] - (double)top) / how->temperature) / sum;
        token = i;
    }
    return (int32_t)token;
}

/* What one pass of the model reads. */
typedef struct gpt__ahead {
    const gpt *model;
    const int32_t *tokens;
    int64_t count;
    gpt_cache *cache;
} gpt__ahead;

static inline dtrain_tensor *gpt__next_of(dtrain_tape *t, void *user)
{
    const gpt__ahead *ahead = (const gpt__ahead *)user;
    return gpt_next(t, ahead->model, ahead->tokens, ahead->count, ahead->cache);
}

/* Compute the logits (gpt_columns) of the next token, by the trainer, or on the tape where it is NULL. */
static inline dtrain_result gpt__logits(dtrain_trainer *trainer, dtrain_tape *t,
                                        uint32_t tape_flags, gpt__ahead *ahead, float *logits)
{
    const int64_t columns = gpt_columns(&ahead->model->config);
    if (trainer) return dtrain_trainer_forward(trainer, gpt__next_of, ahead, logits, columns);
    const dtrain_result result = dtrain_tape_begin(t, tape_flags | DTRAIN_TAPE_NO_GRAD, 0);
    if (result != DTRAIN_OK) return result;
    return dtrain_tensor_read(t, gpt__next_of(t, ahead), logits, NULL);
}

/* Continue a text: tokens (prompt + count), of which the first `prompt`, one at least, are given.
 * show, where it is not NULL, is called for each new token, and ends the text when it returns false.
 * A text that has filled the model's positions goes on from the later half of them.
 *
 * Passes run by the trainer, as a pipeline wants it, each of whose ranks keeps the keys and values of its own blocks;
 * or with a trainer of NULL on the tape, with its flags.
 * The heads are divided by the ranks of a tensor axis, 1 without one. Collective with such axes, and
 * where parameters have to be gathered: all ranks have the same values and draw the same
 * tokens, and show must return the same on all. */
static inline dtrain_result gpt_generate(dtrain_trainer *trainer, dtrain_tape *t,
                                         uint32_t tape_flags, dtrain_device *device, const gpt *m,
                                         int tensor_ranks, const gpt_sampling *how, int32_t *tokens,
                                         int64_t prompt, int64_t count,
                                         bool (*show)(void *user, int32_t token), void *user)
{
    const int64_t room = m->config.positions, end = prompt + count;
    const size_t columns = (size_t)gpt_columns(&m->config);
    const int64_t heads = m->config.heads / tensor_ranks;
    const int64_t channels = m->config.channels / tensor_ranks;
    int64_t first = 0; /* of the tokens that the model sees */
    gpt_cache cache;
    float *logits = (float *)calloc(2 * columns, sizeof *logits);
    dtrain_result result =
        gpt_cache_create(&cache, device, m->config.layers, channels, heads, room);
    if (!logits) result = DTRAIN_ERROR_MEMORY;
    for (int64_t at = prompt; at < end && result == DTRAIN_OK; at++) {
        const bool full = at - first > room;
        if (full) first = at - (room + 1) / 2;
        if (full || how->no_cache) cache.length = 0;
        const int64_t begin = first + cache.length;
        gpt__ahead ahead = {m, tokens + begin, at - begin, &cache};
        result = gpt__logits(trainer, t, tape_flags, &ahead, logits);
        if (result != DTRAIN_OK) break;
        cache.length = at - first;
        tokens[at] =
            gpt__draw(logits, m->config.vocab, how, (uint64_t)(at - prompt), logits + columns);
        if (show && !show(user, tokens[at])) break;
    }
    gpt_cache_free(&cache);
    free(logits);
    return result;
}

#endif /* GENERATE_H */
