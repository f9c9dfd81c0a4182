/* fuzz_config.c: the reader of configuration files (tools/config.h) on hostile bytes.
 *
 *     clang -g -O1 -fsanitize=fuzzer,address,undefined -I. tests/fuzz/fuzz_config.c -o fuzz_config -lm -pthread
 *     ./fuzz_config -max_total_time=30
 *
 * Wrong is: a crash, a sanitizer report, a refusal without just one sentence, and a text that is accepted and whose
 * flags, written and read again, are others. */
#define _GNU_SOURCE 1
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

static int sentences; /* on stderr, which the fuzzer needs for itself */

__attribute__((format(printf, 2, 3))) static int count_sentences(FILE *file, const char *format,
                                                                 ...)
{
    char text[1024];
    va_list args;
    va_start(args, format);
    if (file != stderr) vfprintf(file, format, args);
    else {
        vsnprintf(text, sizeof text, format, args);
        sentences += strchr(text, '\n') != NULL;
    }
    va_end(args);
    return 0;
}
#include "tools/say.h"
#define say count_sentences
#define fprintf count_sentences
#include "tools/config.h"
#undef fprintf

static const char *const colours[] = {"red", "green", "blue", NULL};

static struct values {
    const char *name, *config;
    long count, colour, quiet;
    double rate;
    flag_list sizes, some;
} now;

static const flag table[] = {
    FLAG_GROUP("all kinds"),
    {"--name", 's', &now.name, 0, 0, "text", NULL},
    {"--config", 's', &now.config, 0, 0, "refused in a file", NULL},
    {"--count", 'i', &now.count, 1, 1e12, "integer", NULL},
    {"--colour", 'w', &now.colour, 0, 0, "word", colours},
    {"--quiet", 'b', &now.quiet, 0, 0, "switch", NULL},
    {"--rate", 'f', &now.rate, 0, 1e3, "number", NULL},
    {"--sizes", 'I', &now.sizes, 0, 100, "integers", NULL},
    {"--some", 'W', &now.some, 0, 0, "words", colours},
};
enum { COUNT = sizeof table / sizeof table[0] };

/* Set the flags to a text; write them, when it was good. */
static bool read_and_write(char *text, char **written)
{
    static const struct values none = {.colour = -1, .rate = -1};
    size_t bytes;
    now = none;
    memset(flags_given, 0, sizeof flags_given);
    sentences = 0;
    if (config_parse("fuzz", "text", table, COUNT, text)) return false;
    FILE *file = open_memstream(written, &bytes);
    config_write(file, table, COUNT);
    fclose(file);
    return true;
}

static const char *const seeds[] = {
    "# comment\nname = \"two # words\"\ncount = 12\ncolour = green # why\n",
    "quiet = 1\nrate = 3e-4\nsizes = 1,2,64\nsome = red,blue\nname=x", "coutn = 3",
    "config = other"};

size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t room);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t room, unsigned seed);
/* Begin from a good text when there is none, and now and then later. */
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t room, unsigned seed)
{
    const char *text = seeds[seed / 128 % (sizeof seeds / sizeof seeds[0])];
    if ((size < 3 || seed % 128 == 0) && strlen(text) <= room) {
        size = strlen(text);
        memcpy(data, text, size);
    }
    return LLVMFuzzerMutate(data, size, room);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char *text = (char *)malloc(size + 1), *first = NULL, *second = NULL;
    memcpy(text, data, size);
    text[size] = 0;
    if (read_and_write(text, &first)) {
        char *copy = strdup(first);
        if (sentences || !read_and_write(copy, &second) || strcmp(first, second) != 0) abort();
        free(copy);
    } else if (sentences != 1) abort();
    free(first);
    free(second);
    free(text);
    return 0;
}
