/* say.h: what the programs print of names that come from outside: files, directories, the environment. A terminal is
 * shown no byte of these that it would obey. What the library says is clean: dtrain_fail and the log see to it. */
#ifndef SAY_H
#define SAY_H

#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

/* Return the bytes that a character of UTF-8 has with this first one, 0 if none begins so. */
static inline size_t utf8_length(unsigned char first)
{
    return first < 0x80                     ? 1
           : first >= 0xc2 && first < 0xe0  ? 2
           : first >= 0xe0 && first < 0xf0  ? 3
           : first >= 0xf0 && first <= 0xf4 ? 4
                                            : 0;
}

/* Tell whether these bytes can be, or begin, a character that may be shown: not one of the controls 0 to 31 and 127
 * to 159, not a surrogate, not one written too long. */
static inline bool utf8_begins(const char *text, size_t count)
{
    const unsigned char first = (unsigned char)text[0];
    if (count > utf8_length(first)) return false;
    if (count == 1) return first >= 32 && first != 127;
    const unsigned char second = (unsigned char)text[1];
    const unsigned char least = first == 0xc2   ? 0xa0
                                : first == 0xe0 ? 0xa0
                                : first == 0xf0 ? 0x90
                                                : 0x80;
    const unsigned char most = first == 0xed ? 0x9f : first == 0xf4 ? 0x8f : 0xbf;
    if (second < least || second > most) return false;
    for (size_t i = 2; i < count; i++)
        if (((unsigned char)text[i] & 0xc0) != 0x80) return false;
    return true;
}

/* Replace control characters, line ends too, and bytes that are not UTF-8 by '?'. Return text. */
static inline char *visible(char *text)
{
    for (size_t at = 0, end = strlen(text), bytes; at < end; at += bytes) {
        bytes = utf8_length((unsigned char)text[at]);
        if (bytes && bytes <= end - at && utf8_begins(text + at, bytes)) continue;
        text[at] = '?';
        bytes = 1;
    }
    return text;
}

/* Print as fprintf does, in one write, with '?' for control characters but the line end at the end. */
__attribute__((format(printf, 2, 3))) static inline void say(FILE *to, const char *format, ...)
{
    char text[8192];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    const size_t length = strlen(text);
    const bool ends = length && text[length - 1] == '\n';
    if (ends) text[length - 1] = 0;
    fprintf(to, ends ? "%s\n" : "%s", visible(text));
}

#endif /* SAY_H */
