/* config.h: the flags of a table as a file, one "key = value" a line, where a key is a flag without its dashes:
 *
 *     # a comment
 *     model = gpt2
 *     lr = 3e-4          # behind a value, too
 *     data = "two words.txt"
 *     graph = 1          # a switch is 0 or 1
 *
 * The command line wins: parse it, read the file, parse it again. What config_write writes can be read again. */
#ifndef CONFIG_H
#define CONFIG_H

#include "flags.h"
#include "open.h"

enum { CONFIG_BYTES = 1 << 20, CONFIG_VALUE = 4096 };

/* Write the value of a flag as a file has it. false: it holds none, or one that no line can say. */
static inline bool config__value(const flag *f, char *text, size_t room)
{
    const flag_list *list = (const flag_list *)f->value;
    size_t used = 0;
    long item;
    *text = 0;
    switch (f->kind) {
    case 's':
    case 'p': {
        const char *string = *(const char *const *)f->value;
        if (!string || strlen(string) + 3 > room || strpbrk(string, "\"\n\r")) return false;
        const bool plain = *string && !strpbrk(string, " \t#");
        snprintf(text, room, plain ? "%s" : "\"%s\"", string);
        return true;
    }
    case 'f':
        snprintf(text, room, "%.15g", *(const double *)f->value);
        if (strtod(text, NULL) != *(const double *)f->value)
            snprintf(text, room, "%.17g", *(const double *)f->value);
        return *(const double *)f->value >= f->low;
    case 'W':
    case 'I':
        for (long i = 0; i < list->count; i++) {
            item = list->items[i];
            if (f->kind == 'W') snprintf(text + used, room - used, "%s,", f->words[item]);
            else snprintf(text + used, room - used, "%ld,", item);
            used += strlen(text + used);
        }
        if (used) text[used - 1] = 0;
        return used > 0;
    case 'w':
        item = *(const long *)f->value;
        if (item >= 0) snprintf(text, room, "%s", f->words[item]);
        return item >= 0;
    default:
        item = *(const long *)f->value;
        snprintf(text, room, "%ld", item);
        return f->kind == 'b' || f->kind == 'a' || (double)item >= f->low;
    }
}

/* Whether a flag is one of a file: not those that name such a file, and not what to do in place of a run. */
static inline bool config__kept(const flag *f)
{
    return f->kind != 'a' && strcmp(f->name, "--config") != 0 &&
           strcmp(f->name, "--config-out") != 0;
}

/* Write every flag of a file that holds a value, under the headings of the table. */
static inline void config_write(FILE *file, const flag *table, int count)
{
    static char text[CONFIG_VALUE];
    for (int i = 0; i < count; i++) {
        if (!table[i].name) fprintf(file, "\n# %s\n", table[i].help);
        else if (config__kept(&table[i]) && config__value(&table[i], text, sizeof text))
            fprintf(file, "%s = %s\n", table[i].name + 2, text);
    }
}

/* Cut a text off behind its last character that is no blank; return its first one. */
static inline char *config__trim(char *text)
{
    text += strspn(text, " \t\r");
    for (size_t end = strlen(text); end > 0 && strchr(" \t\r", text[end - 1]); end--)
        text[end - 1] = 0;
    return text;
}

/* Find the value in what stands behind "=": without quotes, without a comment. NULL: there is none. */
static inline char *config__unquote(char *text)
{
    text = config__trim(text);
    if (*text == '"') {
        char *end = strchr(++text, '"');
        const char *behind = end ? end + 1 + strspn(end + 1, " \t") : "?";
        if (end) *end = 0;
        return *behind && *behind != '#' ? NULL : text;
    }
    for (char *at = text; *at; at++)
        if (*at == '#' && (at == text || at[-1] == ' ' || at[-1] == '\t')) *at-- = 0;
    text = config__trim(text);
    return *text ? text : NULL;
}

/* Set the flag of one line. A value that held before does not count as given: so a file may say what nobody has
 * changed, and what was written can be read again. Return 0, or 2 after a sentence that begins with `where`. */
static inline int config__line(const char *where, const flag *table, int count, char *line,
                               int *set_at, int number)
{
    static char before[CONFIG_VALUE], after[CONFIG_VALUE];
    char *equals = strchr(line, '='), name[FLAGS_NAME + 2] = "--";
    if (!equals) {
        say(stderr, "%s: \"%.*s\" is not of the form key = value\n", where, FLAGS_SHOWN, line);
        return 2;
    }
    *equals = 0;
    const char *key = config__trim(line), *value = config__unquote(equals + 1);
    snprintf(name + 2, sizeof name - 2, "%.*s", FLAGS_NAME - 1, key);
    const int at = flags_find(table, count, name);
    if (at < 0 || !config__kept(&table[at])) {
        const char *nearest = flags_nearest(table, count, key, strlen(key));
        if (at >= 0 && table[at].kind == 'a')
            say(stderr, "%s: --%s belongs on the command line\n", where, key);
        else if (at >= 0) say(stderr, "%s: a file cannot name another one\n", where);
        else
            say(stderr, "%s: unknown key \"%.*s\"%s%s%s\n", where, FLAGS_SHOWN, key,
                nearest ? "; did you mean " : "; keys are the flags that --help lists",
                nearest ? nearest + 2 : "", nearest ? "?" : ", without dashes");
        return 2;
    }
    if (!value || set_at[at]) {
        if (!value) say(stderr, "%s: %s needs a value\n", where, key);
        else say(stderr, "%s: %s was already set in line %d\n", where, key, set_at[at]);
        return 2;
    }
    set_at[at] = number;
    config__value(&table[at], before, sizeof before);
    if (flags__set(where, &table[at], value)) return 2;
    config__value(&table[at], after, sizeof after);
    if (strcmp(before, after) != 0) flags_given[at] = true;
    return 0;
}

/* Tell whether a line has characters that a terminal would obey when a run prints its flags: ASCII's but the tab, DEL,
 * and those from U+0080 to U+009F. */
static inline bool config__controls(const char *line)
{
    for (const unsigned char *at = (const unsigned char *)line; *at; at++)
        if ((*at < 32 && *at != '\t') || *at == 127 ||
            (*at == 0xc2 && at[1] >= 0x80 && at[1] < 0xa0))
            return true;
    return false;
}

/* Set the flags that a text names, which came from `path`. The text is cut into pieces, to which flags point
 * afterwards. Return 0, or 2 after a sentence to stderr. */
static inline int config_parse(const char *program, const char *path, const flag *table, int count,
                               char *text)
{
    int set_at[FLAGS_MOST] = {0}; /* the line in which each flag was set */
    for (int number = 1; text; number++) {
        char *end = strchr(text, '\n'), where[512];
        if (end) *end++ = 0;
        char *line = config__trim(text);
        snprintf(where, sizeof where, "%s: %.400s:%d", program, path, number);
        if (config__controls(line)) {
            say(stderr, "%s: there is a control character in this line\n", where);
            return 2;
        }
        if (*line && *line != '#' && config__line(where, table, count, line, set_at, number))
            return 2;
        text = end;
    }
    return 0;
}

/* Set the flags that a file names; its text stays in memory. Return 0, or 2 after a sentence to stderr. */
static inline int config_read(const char *program, const char *path, const flag *table, int count)
{
    static char text[CONFIG_BYTES];
    const char *why;
    FILE *file = open_to_read(path, &why);
    const size_t bytes = file ? fread(text, 1, sizeof text, file) : 0;
    if (file && ferror(file)) why = strerror(errno);
    if (file) fclose(file);
    if (why) say(stderr, "%s: --config: %s: %s\n", program, path, why);
    else if (bytes == sizeof text || memchr(text, 0, bytes))
        say(stderr, "%s: --config: %s is not a text of less than %d bytes\n", program, path,
            CONFIG_BYTES);
    else {
        const bool mark = bytes >= 3 && memcmp(text, "\xef\xbb\xbf", 3) == 0; /* of some editors */
        text[bytes] = 0;
        return config_parse(program, path, table, count, text + (mark ? 3 : 0));
    }
    return 2;
}

#endif /* CONFIG_H */
