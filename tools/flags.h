/* flags.h: command line flags from one table, which drives the parser, its sentences and --help; config.h
 * reads and writes the same flags as a file. */
#ifndef FLAGS_H
#define FLAGS_H

#include "tools/say.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct flag {
    const char *name;
    char
        kind; /* s string, p path, w one of the words, i integer, f number, b switch; W, I several; a asks for
                    something else than a run: a switch that no file has */
    void *value; /* const char *, long (place in words), long, double, long; flag_list */
    double low, high;
    const char *help;
    const char *const *words; /* ends with NULL */
} flag;

/* A row that is no flag: --help prints it as a heading. */
#define FLAG_GROUP(heading)                \
    {                                      \
        NULL, 0, NULL, 0, 0, heading, NULL \
    }

enum { FLAGS_MOST = 128, FLAGS_LIST = 32, FLAGS_NAME = 64, FLAGS_SHOWN = 60 };
typedef struct flag_list {
    long count, items[FLAGS_LIST];
} flag_list;

static bool flags_given[FLAGS_MOST]; /* by place in the table */

enum { FLAGS_COLUMN = 40, FLAGS_WIDTH = 100 };

/* Print a word and the blank before it, on a new line where it would go beyond FLAGS_WIDTH. */
static inline void flags__print_word(const char *word, size_t length, size_t *column)
{
    if (*column + 1 + length > FLAGS_WIDTH) {
        printf("\n%*s", FLAGS_COLUMN - 1, "");
        *column = FLAGS_COLUMN - 1;
    }
    printf(" %.*s", (int)length, word);
    *column += 1 + length;
}

/* Print the help of one flag: its name, its value when it is not given, its meaning, its words. */
static inline void flags__print(const flag *f)
{
    char usual[32] = "";
    size_t column;
    if ((f->kind == 's' || f->kind == 'p') && *(const char **)f->value)
        snprintf(usual, sizeof usual, "%s", *(const char **)f->value);
    if (f->kind == 'w' && *(long *)f->value >= 0)
        snprintf(usual, sizeof usual, "%s", f->words[*(long *)f->value]);
    if (f->kind == 'i' && *(long *)f->value > 0)
        snprintf(usual, sizeof usual, "%ld", *(long *)f->value);
    if (f->kind == 'f' && *(double *)f->value >= f->low)
        snprintf(usual, sizeof usual, "%g", *(double *)f->value);
    column = (size_t)printf("  %-26s %-10s", f->name, usual);
    for (const char *at = f->help; *at; at += *at == ' ') {
        const size_t length = strcspn(at, " ");
        flags__print_word(at, length, &column);
        at += length;
    }
    for (int k = 0; f->words && f->words[k]; k++) {
        char word[64];
        snprintf(word, sizeof word, "%s%s%s", k ? "" : "(", f->words[k],
                 f->words[k + 1] ? "," : ")");
        flags__print_word(word, strlen(word), &column);
    }
    putchar('\n');
}

/* Print every flag, under the headings of the table where it has some. */
static inline void flags_help(const flag *table, int count)
{
    for (int i = 0; i < count; i++) {
        if (table[i].name) flags__print(&table[i]);
        else printf("%s%s\n", i ? "\n" : "", table[i].help);
    }
}

/* How much of a text of `length` characters a sentence quotes. */
static inline int flags__shown(size_t length)
{
    return length < FLAGS_SHOWN ? (int)length : FLAGS_SHOWN;
}

/* Read `length` characters of text: a whole value, or one entry of a list. Return 0, or 2 after a
 * sentence to stderr. */
static inline int flags__word(const char *program, const flag *f, const char *text, size_t length,
                              long *value)
{
    char list[160] = "";
    for (int i = 0; f->words[i]; i++) {
        if (strlen(f->words[i]) == length && memcmp(text, f->words[i], length) == 0)
            return *value = i, 0;
        snprintf(list + strlen(list), sizeof list - strlen(list), " %s", f->words[i]);
    }
    say(stderr, "%s: %s is \"%.*s\"; it takes %s of:%s\n", program, f->name, flags__shown(length),
        text, f->kind == 'W' ? "several, with commas," : "one", list);
    return 2;
}

static inline int flags__number(const char *program, const flag *f, const char *text, size_t length,
                                double *value)
{
    char *end = NULL;
    *value = strtod(text, &end);
    if (end == text || end != text + length || !(*value >= f->low && *value <= f->high))
        say(stderr, "%s: %s is \"%.*s\"; it takes a number from %g to %g\n", program, f->name,
            flags__shown(length), text, f->low, f->high);
    else if (f->kind != 'f' && *value != floor(*value))
        say(stderr, "%s: %s is \"%.*s\"; it takes a whole number\n", program, f->name,
            flags__shown(length), text);
    else return 0;
    return 2;
}

static inline int flags__list(const char *program, const flag *f, const char *text)
{
    flag_list *all = (flag_list *)f->value;
    double number = 0;
    for (all->count = 0; all->count < FLAGS_LIST; text++) {
        const size_t length = strcspn(text, ",");
        long *item = &all->items[all->count++];
        if (f->kind == 'W' ? flags__word(program, f, text, length, item)
                           : flags__number(program, f, text, length, &number))
            return 2;
        if (f->kind == 'I') *item = (long)number;
        text += length;
        if (!*text) return 0;
    }
    say(stderr, "%s: %s has more than %d entries\n", program, f->name, FLAGS_LIST);
    return 2;
}

static inline int flags__switch(const char *program, const flag *f, const char *text)
{
    *(long *)f->value = *text == '1';
    if (strcmp(text, "0") == 0 || strcmp(text, "1") == 0) return 0;
    say(stderr, "%s: %s is \"%.*s\"; it takes 0 or 1\n", program, f->name, FLAGS_SHOWN, text);
    return 2;
}

static inline int flags__set(const char *program, const flag *f, const char *text)
{
    double number = 0;
    if (f->kind == 'b' || f->kind == 'a') return flags__switch(program, f, text);
    if (f->kind == 's' || f->kind == 'p') return *(const char **)f->value = text, 0;
    if (f->kind == 'w') return flags__word(program, f, text, strlen(text), (long *)f->value);
    if (f->kind == 'W' || f->kind == 'I') return flags__list(program, f, text);
    if (flags__number(program, f, text, strlen(text), &number)) return 2;
    if (f->kind == 'f') *(double *)f->value = number;
    else *(long *)f->value = (long)number;
    return 0;
}

/* The place of a flag in the table, or -1. Only the first `length` characters of the name count. */
static inline int flags__find(const flag *table, int count, const char *name, size_t length)
{
    int at = count - 1;
    while (at >= 0 && (!table[at].name || strlen(table[at].name) != length ||
                       memcmp(name, table[at].name, length) != 0))
        at--;
    return at;
}

static inline int flags_find(const flag *table, int count, const char *name)
{
    return flags__find(table, count, name, strlen(name));
}

/* Count the letters to insert, delete and replace that make one word of another (Levenshtein, 1966). */
static inline size_t flags__distance(const char *from, size_t length, const char *to)
{
    size_t row[FLAGS_NAME]; /* from the letters of `from` so far to the first j of `to` */
    const size_t columns = strlen(to);
    for (size_t j = 0; j <= columns; j++) row[j] = j;
    for (size_t i = 0; i < length; i++) {
        size_t corner = row[0];
        row[0] = i + 1;
        for (size_t j = 0; j < columns; j++) {
            const size_t replaced = corner + (from[i] != to[j]);
            const size_t changed = 1 + (row[j] < row[j + 1] ? row[j] : row[j + 1]);
            corner = row[j + 1];
            row[j + 1] = replaced < changed ? replaced : changed;
        }
    }
    return row[columns];
}

/* Find the flag that an unknown name may have meant, both without dashes: a third of its letters may differ. NULL:
 * none is that near. */
static inline const char *flags_nearest(const flag *table, int count, const char *name,
                                        size_t length)
{
    const char *nearest = NULL;
    size_t least = (length + 1) / 3 + 1;
    for (int i = 0; i < count && length < FLAGS_NAME; i++) {
        if (!table[i].name) continue;
        const size_t distance = flags__distance(name, length, table[i].name + 2);
        if (distance < least) least = distance, nearest = table[i].name;
    }
    return nearest;
}

static inline int flags__unknown(const char *program, const flag *table, int count,
                                 const char *name, size_t length)
{
    const size_t dashes = strspn(name, "-") < length ? strspn(name, "-") : length;
    const char *nearest = flags_nearest(table, count, name + dashes, length - dashes);
    say(stderr, "%s: unknown flag \"%.*s\"; ", program, flags__shown(length), name);
    if (nearest) say(stderr, "did you mean %s? ", nearest);
    say(stderr, "--help lists them\n");
    return 2;
}

/* Read what follows the program's name: "--flag value" or "--flag=value"; a switch is on by its name, and
 * "--switch=0" turns off what a file has turned on. Return 0, or 2 after a sentence to stderr. */
static inline int flags_parse(const char *program, const flag *table, int count, int given,
                              char **arguments)
{
    for (int a = 0; a < given; a++) {
        const char *name = arguments[a];
        const size_t length = strcspn(name, "=");
        const int at = flags__find(table, count, name, length);
        if (at < 0) return flags__unknown(program, table, count, name, length);
        const char *value = "1";
        if (name[length]) value = name + length + 1;
        else if (table[at].kind != 'b' && table[at].kind != 'a')
            value = ++a < given ? arguments[a] : NULL;
        if (!value) {
            say(stderr, "%s: %s needs a value\n", program, table[at].name);
            return 2;
        }
        if (flags__set(program, &table[at], value)) return 2;
        flags_given[at] = true;
    }
    return 0;
}

#endif /* FLAGS_H */
