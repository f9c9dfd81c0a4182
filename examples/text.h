/* text.h: what gpt.c, parallel_3d.c and llama.c share: a text, windows of it as batches, and flags. Include it after
 * dtrain.h. */
#ifndef TEXT_H
#define TEXT_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* End this rank when a call fails. dtrain_launch then ends the others, and its own error quotes the
 * sentence of this one; the memory of a rank goes with its process. */
#define CHECK(call)                        \
    do {                                   \
        if ((call) != DTRAIN_OK) return 1; \
    } while (0)

/* The text without --data: lines such as "seven comes before eight.", with numbers drawn at random. */
typedef struct lines {
    char text[120000];
    size_t length;
} lines;

static void make_lines(lines *made)
{
    static const char *const word[] = {"zero",    "one",     "two",       "three",    "four",
                                       "five",    "six",     "seven",     "eight",    "nine",
                                       "ten",     "eleven",  "twelve",    "thirteen", "fourteen",
                                       "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"};
    made->length = 0;
    for (uint64_t line = 0; made->length + 40 < sizeof made->text; line++) {
        const int n = (int)(19 * dtrain_random_uniform(7, 0, line));
        made->length += (size_t)snprintf(made->text + made->length, 40, "%s comes before %s.\n",
                                         word[n], word[n + 1]);
    }
}

/* A dtrain_read_fn: the bytes are the tokens. */
static dtrain_result read_lines(void *user, int64_t first, int64_t count, void *items,
                                int32_t *labels)
{
    const lines *made = (const lines *)user;
    (void)labels;
    for (int64_t i = 0; i < count; i++) ((int32_t *)items)[i] = made->text[first + i];
    return DTRAIN_OK;
}

/* Open the file at `path` as the format says (dtrain_data_format), or the lines if path is NULL. */
static dtrain_result open_text(dtrain_world *world, const char *path, uint32_t format,
                               int64_t vocab, dtrain_dataset **text)
{
    static lines made; /* ranks are processes */
    dtrain_dataset_desc source = {.path = path, .vocab_count = vocab};
    if (path) source.format = format;
    else {
        make_lines(&made);
        source.read = read_lines, source.user = &made;
        source.item_count = (int64_t)made.length;
    }
    return dtrain_dataset_open(world, &source, text);
}

/* A batch of windows of a text: the first member of what a trainer hands to next_batch. */
typedef struct windows {
    dtrain_loader *loader;
    int64_t count, sequence;
    int32_t *inputs, *targets; /* (count, sequence): the targets are the inputs one token later */
} windows;

static dtrain_result open_windows(dtrain_world *world, const dtrain_loader_desc *desc, windows *w)
{
    const size_t tokens = (size_t)desc->batch * (size_t)desc->sequence;
    w->count = desc->batch, w->sequence = desc->sequence;
    w->inputs = malloc(tokens * sizeof *w->inputs);
    w->targets = malloc(tokens * sizeof *w->targets);
    if (!w->inputs || !w->targets)
        return dtrain_fail(DTRAIN_ERROR_MEMORY, "no memory for a batch of %d samples",
                           (int)w->count);
    return dtrain_loader_create(world, desc, &w->loader);
}

static void close_windows(windows *w)
{
    dtrain_loader_destroy(w->loader);
    free(w->inputs);
    free(w->targets);
}

static dtrain_result next_batch(void *user)
{
    windows *w = (windows *)user;
    return dtrain_loader_next(w->loader, w->inputs, w->targets);
}

/* The loss of logits (count * sequence, vocabulary). */
static dtrain_tensor *text_loss(dtrain_tape *t, dtrain_tensor *logits, const windows *w)
{
    const int64_t rows = w->count * w->sequence;
    return dtrain_cross_entropy(
        t, logits, dtrain_tape_input(t, DTRAIN_DTYPE_I32, 1, &rows, w->targets, false), 0, 0);
}

/* Return the place of a word in a list that ends with NULL, or -1 after a sentence. */
static int find(const char *program, const char *what, const char *word, const char *const *list)
{
    for (int i = 0; list[i]; i++)
        if (strcmp(word, list[i]) == 0) return i;
    fprintf(stderr, "%s: %s \"%s\" is not one of:", program, what, word);
    for (int i = 0; list[i]; i++) fprintf(stderr, " %s", list[i]);
    fprintf(stderr, "\n");
    return -1;
}

/* Set value[i] to what follows flags[i] on the command line, or return false after a sentence. */
static bool read_flags(const char *program, int argc, char **argv, const char *const *flags,
                       const char **value)
{
    for (int a = 1; a < argc; a += 2) {
        const int i = find(program, "the flag", argv[a], flags);
        if (i < 0) return false;
        if (a + 1 == argc) {
            fprintf(stderr, "%s: %s needs a value\n", program, argv[a]);
            return false;
        }
        value[i] = argv[a + 1];
    }
    return true;
}

#endif
