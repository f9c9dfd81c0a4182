/* Data: datasets, loaders
 *
 * A dataset is the items of files or of the program's source; a loader deals them out in batches.
 * Datasets and loaders do not communicate: every rank reads its share. */

#pragma once

#include "core/api.h"
#include "core/result.h"
#include "world/world.h"
#include "comm/comm.h"
#include "parallel/mesh.h"

typedef struct dtrain_dataset dtrain_dataset;

/* The format of a dataset's files. Items are tokens, or samples: an image and its label. */
typedef enum dtrain_data_format {
    /* BIN if the file has its magic, otherwise BYTES. A file that looks different is an error:
     * tokens of 2, 4 or 8 bytes, UTF-16, compressed data, .npy, other files of llm.c, and with a
     * larger vocabulary any file that is no text */
    DTRAIN_DATA_AUTO = 0,
    DTRAIN_DATA_BYTES = 1, /* any file; its bytes are the tokens, vocabulary 256 */
    /* llm.c's .bin: a header with the exact number of tokens, then uint16 tokens (magic 20240520,
     * version 1) or uint32 tokens (20240801, 7); vocabulary 50257 */
    DTRAIN_DATA_BIN = 2,
    DTRAIN_DATA_U16 = 3,      /* nanoGPT's .bin: uint16 tokens without a header; vocabulary 50257 */
    DTRAIN_DATA_CIFAR10 = 4,  /* the binary version: (3, 32, 32) bytes, red first; labels 0 to 9 */
    DTRAIN_DATA_CIFAR100 = 5, /* likewise, with the fine label, 0 to 99 */
    DTRAIN_DATA_IDX = 6, /* MNIST's: images of 2 to 4 axes of bytes, labels 0 to 9 in other files */
    DTRAIN_DATA_U32 = 7  /* uint32 tokens without a header, for larger vocabularies */
} dtrain_data_format;

/* Read `count` items from item `first` on: tokens (count) as int32_t, or samples (count,
 * item_bytes) and their labels (count). labels is NULL for tokens, and if the caller wants none.
 * Items depend only on their number. Workers of a loader call it concurrently. */
typedef dtrain_result (*dtrain_read_fn)(void *user, int64_t first, int64_t count, void *items,
                                        int32_t *labels);

/* A dataset is one file or several in a row: the borders of files change no sample. Or it is the
 * program's source: `read`, with path NULL. */
typedef struct dtrain_dataset_desc {
    uint32_t format;     /* dtrain_data_format */
    int64_t vocab_count; /* every token id or label is smaller; 0 = the format's, or 2^31 for a
                            source */
    /* A file; a folder: all its files but hidden ones; a pattern, "shards/train_*.bin"; several of
     * these with commas between. Files of a folder are in the order of their names, by strcmp. */
    const char *path;
    const char *labels;  /* IDX: files of labels, as many as path has files of images */
    int64_t item_count;  /* number of the source's items */
    size_t item_bytes;   /* bytes of the source's sample; 0: items are tokens */
    dtrain_read_fn read; /* the source; not called during open */
    void *user;          /* argument of read */
} dtrain_dataset_desc;
/* Open a dataset. It checks headers and sizes of all files; reads check ids and labels. world can
 * be NULL, also for loaders: one rank, malloc. */
DTRAIN_API dtrain_result dtrain_dataset_open(dtrain_world *world, const dtrain_dataset_desc *desc,
                                             dtrain_dataset **out);
/* Close a dataset; NULL is ignored. Destroy the loaders that read it first. */
DTRAIN_API void dtrain_dataset_close(dtrain_dataset *dataset);

typedef struct dtrain_dataset_info {
    int64_t item_count, vocab_count; /* tokens or samples; ids or labels */
    size_t item_bytes;               /* bytes of a sample; 0: items are tokens */
    int64_t shape[3];                /* channels, rows, columns of an image in a file */
    size_t file_count;
    uint64_t file_bytes, file_sample; /* bytes of all files, and a hash of pieces of them, by which
                                         programs compare the files of their ranks */
} dtrain_dataset_info;
/* Tell the size of a dataset and of its vocabulary; all zero for a dataset of NULL. */
DTRAIN_API void dtrain_dataset_query(const dtrain_dataset *dataset, dtrain_dataset_info *info);

typedef struct dtrain_loader dtrain_loader;

/* A sample on its way into a batch. */
typedef struct dtrain_sample {
    int64_t item; /* number in the dataset */
    uint64_t epoch;
    const void *data; /* (item_bytes) */
    int32_t label;
} dtrain_sample;
/* Turn a sample into `output`, by normalising or cropping for example. Draw random numbers by item
 * and epoch: then the number of ranks and workers does not change the output. Workers call it
 * concurrently. */
typedef dtrain_result (*dtrain_transform_fn)(void *user, const dtrain_sample *sample, void *output);

#define DTRAIN_ONE_EPOCH (-1) /* dtrain_loader_desc.sample_limit: each sample of an epoch once */

/* A loader deals samples out, in the order of torch.randperm(seed + epoch). It cuts n = item_count
 * tokens, from first_item on, into windows of sequence + 1 tokens. An epoch has (n - 1) / sequence
 * windows in order, or max(1, n / sequence - 1) shuffled windows, whose borders move from epoch to
 * epoch. The whole state is one number: the samples that all ranks have dealt, or drop_last has
 * dropped. Sample k is the same for every world size, batch and number of workers. */
typedef struct dtrain_loader_desc {
    uint32_t batch;                 /* samples per call and rank */
    int64_t sequence;               /* tokens per sample; 0 for a dataset of samples */
    int64_t first_item, item_count; /* items to read; 0, 0 = all */
    uint64_t seed;
    bool in_order;  /* no shuffling */
    bool drop_last; /* drop the end of an epoch if it is less than a batch of all ranks */
    dtrain_dataset *dataset;
    const dtrain_mesh *mesh; /* mesh of the strategy: replicas divide the samples, and the ranks of
                                one replica read the same. NULL = each rank is a replica */
    dtrain_comm *comm;       /* ranks of the strategy without a mesh; NULL = all of the world */
    int64_t sample_limit;    /* for evaluation: samples that all ranks together read once before the
                                loader ends; DTRAIN_ONE_EPOCH = an epoch. 0 = no end; in_order then
                                warns when samples come again */
    uint32_t workers;        /* threads that read ahead, at most 64; 0 = the calling thread reads */
    uint32_t prefetch;       /* batches read ahead and kept in memory; 0 = two per worker */
    dtrain_transform_fn transform; /* transform of samples; NULL: none */
    size_t output_bytes;           /* bytes of a transformed sample */
    void *user;                    /* argument of transform */
} dtrain_loader_desc;
/* Create the loader of this rank; the dataset must outlive it. Local. Its threads belong to this
 * process: a forked child creates another loader. */
DTRAIN_API dtrain_result dtrain_loader_create(dtrain_world *world, const dtrain_loader_desc *desc,
                                              dtrain_loader **out);
/* Free a loader after its workers' current reads; NULL is ignored. */
DTRAIN_API void dtrain_loader_destroy(dtrain_loader *loader);
/* Read the next batch of this rank. A batch of tokens is inputs and targets (batch, sequence) as
 * int32_t; targets are inputs one token later. A batch of samples is inputs (batch, item_bytes or
 * output_bytes) and labels in targets (batch), which can be NULL.
 *
 * After the sample_limit every rank gets DTRAIN_ERROR_END, in the same call. The last batch can
 * have fewer samples, on some ranks none (dtrain_loader_info.batch_samples). Zeros and targets of
 * -1, which dtrain_cross_entropy ignores, fill it up: mean and weight are right. For other losses a
 * program makes tensors of batch_samples rows, and its next_batch returns DTRAIN_ERROR_END for an
 * empty batch.
 *
 * With workers the call waits for their batch, at most for the world's timeout, and copies it. A
 * worker's error comes with its batch; a failed call can be repeated. A file that was changed or
 * cut since it was opened is DTRAIN_ERROR_FILE, which names it; a replaced or deleted file stays
 * readable. */
DTRAIN_API dtrain_result dtrain_loader_next(dtrain_loader *loader, void *inputs, int32_t *targets);

typedef struct dtrain_loader_info {
    int64_t samples_per_epoch;
    uint64_t position;      /* samples that all ranks have dealt or dropped */
    uint32_t batch_samples; /* samples in this rank's last batch, without padding */
} dtrain_loader_info;
/* Tell the samples of an epoch, the position and the last batch; all zero for a loader of NULL. */
DTRAIN_API void dtrain_loader_query(const dtrain_loader *loader, dtrain_loader_info *info);
/* Continue from a position that dtrain_loader_query gave in this run or an earlier one. Waits for
 * current reads, and drops batches read ahead. */
DTRAIN_API void dtrain_loader_seek(dtrain_loader *loader, uint64_t position);
