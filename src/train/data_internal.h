/* An open token file. */

#pragma once

#include "core/platform_internal.h"
#include "core/log.h"

/* The generator of the shuffle yields 32-bit numbers; from here on torch takes another
 * algorithm. */
#define DTRAIN__RANDPERM_LIMIT (INT64_C(0xffffffff) / 20)

/* train/sampler.c */
DTRAIN__PRIVATE void dtrain__randperm(uint64_t seed, int64_t n, int64_t *out);

struct dtrain_dataset {
    dtrain_allocator allocator;
    const char *path; /* a copy behind the struct: errors name it long after open */
    size_t bytes;     /* of both */
    int file;
    uint32_t token_bytes; /* 1, 2, 4 */
    int64_t file_bytes, header_bytes, token_count, vocab_count;
};
