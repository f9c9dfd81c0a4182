/* sums.h: what train_gpt learns without --data: every sum of two numbers of two digits, with the answer in words,
 *
 *     42 plus 17 is fifty-nine.
 *
 * so that a person can judge what a small model has learned. The order of the sums is drawn from a fixed seed. The last
 * of them are held out, in either order of the two numbers, so that a right answer cannot have been remembered.
 *
 * A sample is one sum, filled up with new lines. The loss counts its answer alone, for nothing says which numbers come.
 * The tokens are bytes, or those of --tokenizer. */
#ifndef SUMS_H
#define SUMS_H

#include "tokenizer_files.h"

enum {
    SUMS_FIRST = 10,
    SUMS_LAST = 99,
    SUMS_NUMBERS = SUMS_LAST - SUMS_FIRST + 1,
    SUMS_PAIRS = SUMS_NUMBERS * (SUMS_NUMBERS + 1) / 2, /* a + b and b + a are one */
    SUMS_COUNT = SUMS_NUMBERS * SUMS_NUMBERS,
    /* the longest, "99 plus 79 is one hundred seventy-eight.\n", has 41, and a tokenizer makes no more of it */
    SUMS_BYTES = 48,
    SUMS_SEED = 1
};

typedef struct sum {
    int a, b;
    int asked, count; /* tokens of "42 plus 17 is", and of all */
    int32_t tokens[SUMS_BYTES];
} sum;

typedef struct sums {
    sum list[SUMS_COUNT];
    int longest; /* tokens */
    long seq;    /* of a sample */
    int32_t new_line;
} sums;

/* Write a number from 1 to 199 in words. */
static void number_in_words(char *text, size_t room, int n)
{
    static const char *const small[] = {"",        "one",     "two",       "three",    "four",
                                        "five",    "six",     "seven",     "eight",    "nine",
                                        "ten",     "eleven",  "twelve",    "thirteen", "fourteen",
                                        "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"};
    static const char *const tens[] = {"",      "",      "twenty",  "thirty", "forty",
                                       "fifty", "sixty", "seventy", "eighty", "ninety"};
    const int rest = n % 100, unit = rest < 20 ? rest : rest % 10;
    const char *const ten = rest < 20 ? "" : tens[rest / 10];
    snprintf(text, room, "%s%s%s%s%s", n < 100 ? "" : "one hundred", n > 100 ? " " : "", ten,
             *ten && unit ? "-" : "", small[unit]);
}

static void sum_texts(const sum *one, char question[SUMS_BYTES], char answer[SUMS_BYTES])
{
    char words[SUMS_BYTES - 4];
    number_in_words(words, sizeof words, one->a + one->b);
    snprintf(question, SUMS_BYTES, "%d plus %d is", one->a, one->b);
    snprintf(answer, SUMS_BYTES, " %s.\n", words);
}

/* Append the tokens of a text to those of a sum. */
static dtrain_result sum_encode(sum *one, const tokenizer *t, const char *text)
{
    token_list list = {NULL, 0, 0};
    const size_t bytes = strlen(text);
    dtrain_result result = DTRAIN_OK;
    if (t) result = tokenizer_encode(t, text, bytes, &list);
    const size_t count = t ? list.count : bytes;
    for (size_t i = 0; i < count && one->count < SUMS_BYTES; i++)
        one->tokens[one->count++] = t ? list.at[i] : (uint8_t)text[i];
    free(list.at);
    return result;
}

/* Make the tokens of a + b. */
static dtrain_result sum_make(sum *one, const tokenizer *t, int a, int b)
{
    char question[SUMS_BYTES], answer[SUMS_BYTES];
    one->a = a, one->b = b;
    sum_texts(one, question, answer);
    const dtrain_result result = sum_encode(one, t, question);
    one->asked = one->count;
    return result == DTRAIN_OK ? sum_encode(one, t, answer) : result;
}

/* Make all sums: pairs in the order of a shuffle, each followed by its mirror image. */
static dtrain_result sums_make(sums *all, const tokenizer *t, long seq)
{
    static int pairs[SUMS_PAIRS][2];
    dtrain_result result = DTRAIN_OK;
    int count = 0, made = 0;
    memset(all, 0, sizeof *all);
    for (int a = SUMS_FIRST; a <= SUMS_LAST; a++)
        for (int b = a; b <= SUMS_LAST; b++, count++) {
            const float draw = dtrain_random_uniform(SUMS_SEED, 0, (uint64_t)count);
            const int place = (int)(draw * (float)(count + 1)); /* of those so far */
            memcpy(pairs[count], pairs[place], sizeof pairs[0]);
            pairs[place][0] = a, pairs[place][1] = b;
        }
    for (int i = 0; i < count && result == DTRAIN_OK; i++) {
        const int a = pairs[i][0], b = pairs[i][1];
        result = sum_make(&all->list[made++], t, a, b);
        if (a != b && result == DTRAIN_OK) result = sum_make(&all->list[made++], t, b, a);
    }
    for (int i = 0; i < made; i++)
        if (all->list[i].count > all->longest) all->longest = all->list[i].count;
    all->new_line = all->list[0].tokens[all->list[0].count - 1];
    all->seq = seq;
    return result;
}

/* Return the first of the sums that are held out: a share of all, but one at least, and no pair is cut in two. */
static int64_t sums_held_out(const sums *all, double share)
{
    const int64_t count = (int64_t)(SUMS_COUNT * share), first = SUMS_COUNT - count - !count;
    const sum *one = &all->list[first];
    return first - (one[-1].a == one->b && one[-1].b == one->a);
}

/* Tell whether a sample has room for every answer. */
static bool sums_fit(const sums *all, long seq) { return seq + 1 >= all->longest; }

/* Write samples for a loader: inputs (seq), then targets (seq). A shorter sample than the longest sum has the
 * beginning of one, and learns all of that. user: sums. */
static dtrain_result sums_read(void *user, int64_t first, int64_t count, void *items,
                               int32_t *labels)
{
    const sums *all = (const sums *)user;
    const bool whole = !sums_fit(all, all->seq);
    int32_t *at = (int32_t *)items;
    (void)labels;
    for (const sum *one = &all->list[first]; count > 0; count--, one++, at += 2 * all->seq)
        for (long i = 0; i < all->seq; i++) {
            at[i] = i < one->count ? one->tokens[i] : all->new_line;
            const bool learned = i + 1 < one->count && (i + 1 >= one->asked || whole);
            at[all->seq + i] = learned ? one->tokens[i + 1] : -1;
        }
    return DTRAIN_OK;
}

#endif /* SUMS_H */
