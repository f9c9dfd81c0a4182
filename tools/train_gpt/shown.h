/* shown.h: text that a model wrote, as a terminal can show it: control characters and bytes that are not UTF-8 become
 * \x1b and the like, because a model that has learned little writes any byte. */
#ifndef SHOWN_H
#define SHOWN_H

#include "tools/say.h"

/* The bytes of a character that is not complete yet: a token may end within one. */
typedef struct shown_text {
    char bytes[4];
    size_t count;
} shown_text;

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
