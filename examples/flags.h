/* flags.h: command line flags from one table, which makes the parser, its sentences and --help. */
#ifndef FLAGS_H
#define FLAGS_H

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct flag {
    const char *name;
    char kind;   /* s string, w one of the words, i integer, f number, b switch */
    void *value; /* const char *, long (place in words), long, double, long */
    double low, high;
    const char *help;
    const char *const *words; /* ended by NULL */
} flag;

enum { FLAGS_MOST = 100 };
static bool flags_given[FLAGS_MOST]; /* by place in the table */

/* A line for each; the second column shows what is used when the flag is not given. */
static inline void flags_help(const flag *table, int count)
{
    for (int i = 0; i < count; i++) {
        const flag *f = &table[i];
        char usual[32] = "";
        if (f->kind == 's' && *(const char **)f->value)
            snprintf(usual, sizeof usual, "%s", *(const char **)f->value);
        if (f->kind == 'w') snprintf(usual, sizeof usual, "%s", f->words[*(long *)f->value]);
        if (f->kind == 'i' && *(long *)f->value > 0)
            snprintf(usual, sizeof usual, "%ld", *(long *)f->value);
        if (f->kind == 'f' && *(double *)f->value >= 0)
            snprintf(usual, sizeof usual, "%g", *(double *)f->value);
        printf("  %-26s %-10s %s", f->name, usual, f->help);
        for (int k = 0; f->words && f->words[k]; k++) printf("%s%s", k ? ", " : ": ", f->words[k]);
        putchar('\n');
    }
}

static inline int flags__set(const char *program, const flag *f, const char *text)
{
    char *end = NULL, list[128] = "";
    const double number = strtod(text, &end);
    if (f->kind == 's') return *(const char **)f->value = text, 0;
    for (int i = 0; f->kind == 'w' && f->words[i]; i++) {
        if (strcmp(text, f->words[i]) == 0) return *(long *)f->value = i, 0;
        snprintf(list + strlen(list), sizeof list - strlen(list), " %s", f->words[i]);
    }
    const bool in_range = end != text && !*end && number >= f->low && number <= f->high;
    if (f->kind == 'w')
        fprintf(stderr, "%s: %s is \"%s\"; it takes one of:%s\n", program, f->name, text, list);
    else if (!in_range)
        fprintf(stderr, "%s: %s is \"%s\"; it takes a number from %g to %g\n", program, f->name,
                text, f->low, f->high);
    else if (f->kind == 'f') return *(double *)f->value = number, 0;
    else if (number == floor(number)) return *(long *)f->value = (long)number, 0;
    else fprintf(stderr, "%s: %s is \"%s\"; it takes a whole number\n", program, f->name, text);
    return 1;
}

/* The place of a name, or -1. */
static inline int flags_find(const flag *table, int count, const char *name)
{
    int at = count - 1;
    while (at >= 0 && strcmp(name, table[at].name) != 0) at--;
    return at;
}

/* 0, or 1 after a sentence to stderr. */
static inline int flags_parse(const char *program, const flag *table, int count, int argc,
                              char **argv)
{
    for (int a = 1; a < argc; a++) {
        const int at = flags_find(table, count, argv[a]);
        if (at < 0) {
            fprintf(stderr, "%s: unknown flag \"%s\"; --help lists them\n", program, argv[a]);
            return 1;
        }
        flags_given[at] = true;
        if (table[at].kind == 'b') *(long *)table[at].value = 1;
        else if (a + 1 == argc) {
            fprintf(stderr, "%s: %s needs a value\n", program, table[at].name);
            return 1;
        } else if (flags__set(program, &table[at], argv[++a])) return 1;
    }
    return 0;
}

#endif /* FLAGS_H */
