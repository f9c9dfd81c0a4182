/* An open token file, and a loader of one. */

#pragma once

#include "core/platform_internal.h"
#include "core/log.h"
#include "train/data.h"

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

struct dtrain_loader {
    dtrain_allocator allocator;
    dtrain_loader_desc desc; /* token_count resolved */
    uint64_t rank, ranks;
    uint64_t position;    /* samples handed out by all ranks */
    int64_t window_count; /* per epoch */
    int64_t shift_count;  /* shifts to choose from */
    int32_t *window;      /* (sequence + 1) */

    /* The epoch that `order` and `shift` belong to; both stay 0 when in_order. */
    bool entered;
    uint64_t epoch;
    int64_t shift;
    int64_t *order; /* (window_count), a permutation made anew every epoch */
};
