/* Data: samplers, token files, loaders
 *
 * A sampler says which index comes when, a dataset what a file of tokens holds, a loader which
 * tokens make a sample. Nothing here communicates: every rank reads its own share. */

#pragma once

#include "core/api.h"
#include "core/result.h"
#include "world/world.h"

/* Says which of item_count items one rank gets: number by number those of
 * torch.utils.data.DistributedSampler. */
typedef struct dtrain_sampler_desc {
    uint32_t rank, rank_count; /* rank_count 0 = 1 */
    int64_t item_count;
    uint64_t seed; /* low 32 bits of seed + epoch are used */
    bool shuffle, drop_last;
} dtrain_sampler_desc;
/* Write the indices of one epoch: indices (*count), in the order of torch.randperm when shuffling.
 * With indices NULL only *count is written: it is the same on every rank and in every epoch.
 * scratch (item_count) is used when shuffling, which takes fewer than 2^32 / 20 items. */
DTRAIN_API dtrain_result dtrain_sampler_indices(const dtrain_sampler_desc *desc, uint64_t epoch,
                                                int64_t *scratch, int64_t *indices, int64_t *count);

typedef struct dtrain_dataset dtrain_dataset;

/* A stream of tokens: any file as bytes (vocabulary 256), or a llm.c .bin file (uint16 tokens,
 * magic 20240520 version 1; uint32 tokens, magic 20240801 version 7) whose header counts exactly
 * the tokens that are there. world may be NULL here and for loaders: one rank, malloc. */
typedef struct dtrain_dataset_desc {
    uint32_t format;     /* 0 = by magic: a .bin header, otherwise bytes; 1 = bytes; 2 = .bin */
    int64_t vocab_count; /* ids at or above are errors; 0 = 256 for bytes, 50257 for .bin */
    const char *path;
} dtrain_dataset_desc;
/* Open a token file. Only its header is read: ids are checked when they are read. */
DTRAIN_API dtrain_result dtrain_dataset_open(dtrain_world *world, const dtrain_dataset_desc *desc,
                                             dtrain_dataset **out);
/* Close a token file; NULL is ignored. Loaders that read it are destroyed before. */
DTRAIN_API void dtrain_dataset_close(dtrain_dataset *dataset);

typedef struct dtrain_dataset_info {
    int64_t token_count, vocab_count;
} dtrain_dataset_info;
/* Tell the size of a dataset and of its vocabulary; all zero for a dataset of NULL. */
DTRAIN_API void dtrain_dataset_query(const dtrain_dataset *dataset, dtrain_dataset_info *info);
/* Read tokens (count), from position first on. */
DTRAIN_API dtrain_result dtrain_dataset_read(dtrain_dataset *dataset, int64_t first, int64_t count,
                                             int32_t *tokens);

typedef struct dtrain_loader dtrain_loader;

/* A loader cuts n = token_count tokens from first_token on into windows of T = sequence + 1 and
 * deals them out. The whole state is one number: samples handed out so far by all ranks together.
 * Sample k is the same for every world size, so the same seed and global batch see the same data.
 * An epoch has (n - 1) / sequence windows in order, or max(1, n / sequence - 1) shuffled ones,
 * whose borders move from epoch to epoch. */
typedef struct dtrain_loader_desc {
    uint32_t batch;                   /* samples per call and rank */
    int64_t sequence;                 /* tokens per sample */
    int64_t first_token, token_count; /* 0, 0 = all */
    uint64_t seed;
    bool in_order; /* no shuffling: for evaluation */
    dtrain_dataset *dataset;
} dtrain_loader_desc;
/* Create a loader for one rank of the world; the dataset must outlive it. Local. */
DTRAIN_API dtrain_result dtrain_loader_create(dtrain_world *world, const dtrain_loader_desc *desc,
                                              dtrain_loader **out);
/* Free a loader; NULL is ignored. */
DTRAIN_API void dtrain_loader_destroy(dtrain_loader *loader);
/* Read the next batch of this rank: inputs and targets (batch, sequence). Targets are inputs one
 * token later. A call that failed can be repeated. */
DTRAIN_API dtrain_result dtrain_loader_next(dtrain_loader *loader, int32_t *inputs,
                                            int32_t *targets);

typedef struct dtrain_loader_info {
    int64_t samples_per_epoch;
    uint64_t position; /* samples handed out so far, by all ranks together */
} dtrain_loader_info;
/* Tell the samples of an epoch and the position; all zero for a loader of NULL. */
DTRAIN_API void dtrain_loader_query(const dtrain_loader *loader, dtrain_loader_info *info);
/* Continue from a position that dtrain_loader_query gave, in this run or an earlier one. */
DTRAIN_API void dtrain_loader_seek(dtrain_loader *loader, uint64_t position);
