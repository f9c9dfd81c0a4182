/* shown.h: text that a model wrote, as a terminal can show it: control characters and bytes that are not UTF-8 become
 * \x1b and the like, because a model that has learned little writes any byte. */
#ifndef SHOWN_H
#define SHOWN_H

#include <stdbool.h>
#include <stdio.h>

/* The bytes of a character that is not complete yet: a token may end within one. */
typedef struct shown_text {
    char bytes[4];
    size_t count;
} shown_text;

/* Return the bytes that a character of UTF-8 has with this first one, 0 if none begins so. */
static size_t utf8_length(unsigned char first)
{
    return first < 0x80                     ? 1
           : first >= 0xc2 && first < 0xe0  ? 2
           : first >= 0xe0 && first < 0xf0  ? 3
           : first >= 0xf0 && first <= 0xf4 ? 4
                                            : 0;
}

/* Tell whether these bytes can be, or begin, a character that may be shown: not one of the controls 0 to 31 and 127
 * to 159, not a surrogate, not one written too long. */
static bool utf8_begins(const char *text, size_t count)
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

/* Print the bytes that wait, which are no character; at the end of a text, too. */
static void show_held(shown_text *held)
{
    for (size_t i = 0; i < held->count; i++) printf("\\x%02x", (unsigned char)held->bytes[i]);
    held->count = 0;
}

/* Print the next byte of a text: a character when it is complete. Lines after the first are indented. */
static void show_byte(shown_text *held, char byte)
{
    held->bytes[held->count++] = byte;
    if (held->count > 1 && !utf8_begins(held->bytes, held->count)) {
        held->count--; /* the byte begins something else */
        show_held(held);
        held->bytes[held->count++] = byte;
    }
    const bool line = byte == '\n' || byte == '\t';
    if (held->count == 1 && !line && !utf8_begins(held->bytes, 1)) show_held(held);
    if (!held->count || held->count < utf8_length((unsigned char)held->bytes[0])) return;
    if (byte == '\n') printf("\n  ");
    else fwrite(held->bytes, 1, held->count, stdout);
    held->count = 0;
}

#endif /* SHOWN_H */
