/* An open token file. */

#pragma once

#include "core/platform_internal.h"
#include "core/log.h"

/* The generator yields 32-bit numbers; from here on torch takes another algorithm. */
#define DTRAIN__RANDPERM_LIMIT (INT64_C(0xffffffff) / 20)

struct dtrain_dataset {
    dtrain_allocator allocator;
    char *path; /* a copy: errors name it long after open */
    size_t path_bytes;
    int file;
    uint32_t token_bytes; /* 1, 2, 4 */
    int64_t file_bytes, header_bytes, token_count, vocab_count;
};
