/* Data: datasets, loaders
 *
 * A dataset is what files, or a source of the host's own, hold; a loader deals it out in batches.
 * Nothing here communicates: every rank reads its own share. */

#pragma once

#include "core/api.h"
#include "core/result.h"
#include "world/world.h"
#include "comm/comm.h"
#include "parallel/mesh.h"

typedef struct dtrain_dataset dtrain_dataset;

/* The format of a dataset's files. Their items are tokens, or samples: an image and its label. */
typedef enum dtrain_data_format {
    /* BIN by its magic, otherwise BYTES. A file that looks like something else is an error: tokens
     * of 2, 4 or 8 bytes, UTF-16, compressed data, .npy, other files of llm.c, and under a larger
     * vocabulary whatever is no text */
    DTRAIN_DATA_AUTO = 0,
    DTRAIN_DATA_BYTES = 1, /* any file; its bytes are the tokens, vocabulary 256 */
    /* llm.c's .bin: uint16 tokens (magic 20240520, version 1) or uint32 ones (20240801, 7) behind a
     * header that counts exactly the tokens that are there; vocabulary 50257 */
    DTRAIN_DATA_BIN = 2,
    DTRAIN_DATA_U16 = 3,      /* nanoGPT's .bin: uint16 tokens without a header; vocabulary 50257 */
    DTRAIN_DATA_CIFAR10 = 4,  /* the binary version: (3, 32, 32) bytes, red first; labels 0 to 9 */
    DTRAIN_DATA_CIFAR100 = 5, /* likewise; of its two labels the fine one, 0 to 99 */
    DTRAIN_DATA_IDX = 6, /* MNIST's: images of 2 to 4 axes of bytes, labels 0 to 9 beside them */
    DTRAIN_DATA_U32 = 7  /* as U16, for larger vocabularies: uint32 tokens without a header */
} dtrain_data_format;

/* Read `count` items from item `first` on: tokens (count) as int32_t, or samples (count,
 * item_bytes) and their labels (count). labels is NULL for tokens, and where nobody wants them.
 * Items depend on nothing but their number. Workers of a loader call it at the same time. */
typedef dtrain_result (*dtrain_read_fn)(void *user, int64_t first, int64_t count, void *items,
                                        int32_t *labels);

/* A dataset is one or many files, one behind the other: how tokens are cut into files changes no
 * sample. Or it is a source of the host's own: `read`, with path NULL. */
typedef struct dtrain_dataset_desc {
    uint32_t format;     /* dtrain_data_format */
    int64_t vocab_count; /* ids of tokens, or labels, from here on are errors; 0 = the format's, or
                            2^31 for a source of the host's own */
    /* A file; a folder: all files in it but hidden ones; a pattern, "shards/train_*.bin"; several
     * of these with commas between. Within a folder the order is that of names, by strcmp. */
    const char *path;
    const char *labels;  /* IDX: the files of labels, as many as path has of images */
    int64_t item_count;  /* of a source of the host's own */
    size_t item_bytes;   /* likewise: of a sample; 0: items are tokens */
    dtrain_read_fn read; /* likewise; not called during open */
    void *user;          /* of read */
} dtrain_dataset_desc;
/* Open a dataset. Headers and sizes of all its files are checked, ids and labels when they are
 * read. world may be NULL here and for loaders: one rank, malloc. */
DTRAIN_API dtrain_result dtrain_dataset_open(dtrain_world *world, const dtrain_dataset_desc *desc,
                                             dtrain_dataset **out);
/* Close a dataset; NULL is ignored. Loaders that read it are destroyed before. */
DTRAIN_API void dtrain_dataset_close(dtrain_dataset *dataset);

typedef struct dtrain_dataset_info {
    int64_t item_count, vocab_count; /* tokens or samples; ids or labels */
    size_t item_bytes;               /* of a sample; 0: items are tokens */
    int64_t shape[3];                /* of an image in a file: channels, rows, columns */
    size_t file_count;
    uint64_t file_bytes, file_sample; /* of all files, and a hash of pieces of them: for programs
                                         that compare what their ranks read */
} dtrain_dataset_info;
/* Tell the size of a dataset and of its vocabulary; all zero for a dataset of NULL. */
DTRAIN_API void dtrain_dataset_query(const dtrain_dataset *dataset, dtrain_dataset_info *info);

typedef struct dtrain_loader dtrain_loader;

/* A sample on its way into a batch. */
typedef struct dtrain_sample {
    int64_t item; /* of the dataset */
    uint64_t epoch;
    const void *data; /* (item_bytes) */
    int32_t label;
} dtrain_sample;
/* Turn a sample into `output`, by normalising or cropping for example. To draw at random, draw by
 * item and epoch: then neither ranks nor workers change what comes out. Workers call it at the same
 * time. */
typedef dtrain_result (*dtrain_transform_fn)(void *user, const dtrain_sample *sample, void *output);

#define DTRAIN_ONE_EPOCH (-1) /* dtrain_loader_desc.sample_limit: each sample of an epoch once */

/* A loader deals samples out, in the order of torch.randperm(seed + epoch). It cuts tokens, n =
 * item_count from first_item on, into windows of sequence + 1: (n - 1) / sequence of them an epoch
 * in order, or max(1, n / sequence - 1) shuffled ones, whose borders move from epoch to epoch. The
 * whole state is one number: samples dealt so far by all ranks together, or dropped by drop_last.
 * Sample k is the same for every world size, batch and number of workers. */
typedef struct dtrain_loader_desc {
    uint32_t batch;                 /* samples per call and rank */
    int64_t sequence;               /* tokens per sample; 0 for a dataset of samples */
    int64_t first_item, item_count; /* the part to read; 0, 0 = all */
    uint64_t seed;
    bool in_order;  /* no shuffling */
    bool drop_last; /* every epoch begins with a batch: what is left of one does not come */
    dtrain_dataset *dataset;
    const dtrain_mesh *mesh; /* the strategy's: replicas divide the samples among themselves, and
                                the ranks of one replica read the same. NULL = each rank is one */
    dtrain_comm *comm;       /* without a mesh, the strategy's ranks; NULL = all of the world */
    int64_t sample_limit; /* for evaluation: samples of an epoch that all ranks together read once,
                                before the loader ends; DTRAIN_ONE_EPOCH = all. 0 = epoch after
                                epoch without end; in_order then warns when samples come again */
    uint32_t workers;  /* threads that read ahead; 0 = none, the calling thread reads. At most 64 */
    uint32_t prefetch; /* batches that are read ahead; 0 = two a worker. That is all they hold */
    dtrain_transform_fn transform; /* of samples; NULL: as they are in the dataset */
    size_t output_bytes;           /* of a sample that is transformed */
    void *user;                    /* of transform */
} dtrain_loader_desc;
/* Create the loader of this rank; the dataset must outlive it. Local. Its threads belong
 * to this process: after a fork the child makes a loader of its own. */
DTRAIN_API dtrain_result dtrain_loader_create(dtrain_world *world, const dtrain_loader_desc *desc,
                                              dtrain_loader **out);
/* Free a loader, after the reads that its workers are in; NULL is ignored. */
DTRAIN_API void dtrain_loader_destroy(dtrain_loader *loader);
/* Read the next batch of this rank. A batch of tokens is inputs and targets (batch, sequence) as
 * int32_t, targets being inputs one token later; one of samples is inputs (batch, item_bytes or
 * output_bytes) and labels in targets (batch), which may be NULL.
 *
 * After the sample_limit every rank gets DTRAIN_ERROR_END, in the same call. The last batch can
 * have fewer samples, on some ranks none (dtrain_loader_info.batch_samples). It is padded by zeros
 * and targets of -1, which dtrain_cross_entropy ignores, so that its mean and weight are right; for
 * other losses a program makes tensors of batch_samples rows, and its next_batch returns
 * DTRAIN_ERROR_END if there are none.
 *
 * With workers the call copies what
 * they have read, after a wait of at most the world's timeout. A worker's error comes with the
 * batch it belongs to; a call that failed can be repeated. A file that was changed or cut since it
 * was opened is DTRAIN_ERROR_FILE, which names it; one that was replaced or deleted is read on. */
DTRAIN_API dtrain_result dtrain_loader_next(dtrain_loader *loader, void *inputs, int32_t *targets);

typedef struct dtrain_loader_info {
    int64_t samples_per_epoch;
    uint64_t position;      /* samples dealt or dropped so far, by all ranks together */
    uint32_t batch_samples; /* in this rank's last batch, without padding */
} dtrain_loader_info;
/* Tell the samples of an epoch, the position and the last batch; all zero for a loader of NULL. */
DTRAIN_API void dtrain_loader_query(const dtrain_loader *loader, dtrain_loader_info *info);
/* Continue from a position that dtrain_loader_query gave, in this run or an earlier one, once reads
 * under way have ended: what was read ahead is dropped. */
DTRAIN_API void dtrain_loader_seek(dtrain_loader *loader, uint64_t position);
