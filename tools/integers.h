/* integers.h: integers and labels of the JSON that dtrain writes about runs; -1: there is no such root or rank. */
#ifndef INTEGERS_H
#define INTEGERS_H

#include "tools/say.h"

#include <stdlib.h>
#include <string.h>

/* Read an integer whose magnitude is below 2^63. */
static inline bool json_i64(dtrain__json *json, int64_t *value)
{
    const bool negative = dtrain__json_peek(json) == '0' && *json->at == '-';
    *value = 0;
    json->at += negative;
    if (!dtrain__json_count(json, value)) return false;
    if (negative) *value = -*value;
    return true;
}

/* Read a string of any length into the room for it: the rest is left out, from a whole character on, and what a
 * terminal would obey is replaced. Names of parameters have no limit, and a label has one. */
static inline bool json_label(dtrain__json *json, char *text, size_t room)
{
    const size_t most = 1 << 16;
    char *whole = (char *)malloc(most);
    const bool read = whole && dtrain__json_string(json, whole, most);
    size_t length = read ? strlen(whole) : 0;
    if (length >= room)
        for (length = room - 1; length > 0 && ((unsigned char)whole[length] & 0xc0) == 0x80;)
            length--;
    if (read) {
        whole[length] = 0;
        memcpy(text, visible(whole), length + 1);
    }
    free(whole);
    return read;
}

#endif /* INTEGERS_H */
