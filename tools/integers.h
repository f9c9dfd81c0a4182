/* integers.h: integers of the JSON that dtrain writes about runs: a root or a rank that there is not is -1. */
#ifndef INTEGERS_H
#define INTEGERS_H

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

#endif /* INTEGERS_H */
