/* An open dataset, its files, and a loader of one. */

#pragma once

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/log.h"
#include "state/source_internal.h"
#include "train/data.h"

/* The generator of the shuffle yields 32-bit numbers; from here on torch takes another
 * algorithm. */
#define DTRAIN__RANDPERM_LIMIT (INT64_C(0xffffffff) / 20)

/* A file, and its size and times when it was opened: a read fails when they have changed. */
typedef struct dtrain__data_file {
    char *path; /* a copy: errors name it long after open */
    int file;   /* -1: opened for every read */
    struct stat opened;
    int64_t header_bytes;
    int64_t first_item, item_count; /* in the numbering of the dataset */
} dtrain__data_file;

typedef struct dtrain__data_files {
    dtrain__data_file *files;
    size_t count, room;
} dtrain__data_files;

/* A row of the table of formats: how a file is understood, and items are read. */
typedef struct dtrain__format {
    const char *name;
    int64_t vocab_count;
    uint32_t item_bytes; /* of a record with its labels, where the format fixes it */
    uint32_t label_bytes;
    /* Check the beginning and the size of a file; set its header_bytes and item_count. */
    dtrain_result (*learn)(dtrain_dataset *dataset, dtrain__data_file *file);
    dtrain_read_fn read; /* user: the dataset; first and count lie inside */
} dtrain__format;

struct dtrain_dataset {
    dtrain_allocator allocator;
    const dtrain__format *format; /* NULL: a source of the host's own */
    dtrain_read_fn read;
    void *user;
    int64_t item_count, vocab_count;
    size_t item_bytes;    /* of a sample; 0: items are tokens */
    uint32_t token_bytes; /* of a token in files: 1, 2, 4 */
    int64_t shape[3];
    dtrain__data_files data, labels;
    uint64_t file_bytes, file_sample; /* of both */
    char name[512];                   /* for error sentences: the first file, and how many more */
};

/* Where a sample of a batch lies: its item, or the first token of its window. */
typedef struct dtrain__pick {
    int64_t item;
    uint64_t epoch;
} dtrain__pick;

/* A batch: which samples it has, scratch to read one of them, and with workers its own memory. */
typedef struct dtrain__batch {
    dtrain__pick *picks; /* (batch) */
    uint32_t count;      /* of picks that were dealt; the rest is padding */
    void *scratch;       /* one sample as the dataset stores it */
    void *inputs;        /* (batch, sample_bytes); NULL without workers, like targets */
    int32_t *targets;    /* (batch, sequence or 1) */
    uint64_t read_ns[2]; /* for a trace: when a worker began to read it, and when it ended */
    bool ready;          /* read, with the result and the error below */
    dtrain_result result;
    char error[DTRAIN__ERROR_BYTES];
} dtrain__batch;

struct dtrain_loader {
    dtrain__state_source state;
    dtrain_allocator allocator;
    dtrain_world *world;     /* its trace shows the workers; NULL: none */
    dtrain_loader_desc desc; /* resolved */
    uint64_t rank, ranks;
    uint64_t timeout_ns;
    uint64_t position;         /* samples dealt or dropped by all ranks */
    uint64_t epoch_samples;    /* window_count; during a load that of the saved run */
    int64_t window_count;      /* of an epoch before drop_last: windows of tokens, or samples */
    int64_t samples_per_epoch; /* after drop_last */
    uint32_t batch_samples;    /* of the last batch */
    bool warned;               /* that samples come again */
    int64_t shift_count;       /* shifts to choose from; 1: none */
    size_t sample_bytes, target_bytes, scratch_bytes;
    dtrain__batch *batches; /* (batch_count): one, or with workers the ring */
    size_t batch_count;
    struct dtrain__prefetch *prefetch; /* NULL: no workers */

    /* The epoch that order and shift belong to, and its seed. Without shuffling none is entered.
     * With workers only the one that deals uses them. */
    bool entered;
    uint64_t seed, epoch;
    int64_t shift;
    int64_t *order; /* (window_count), a permutation made anew every epoch */
};

/* train/dataset.c */
DTRAIN__PRIVATE dtrain_result dtrain__dataset_read(dtrain_dataset *dataset, int64_t first,
                                                   int64_t count, void *items, int32_t *labels);

/* train/batch.c */
/* Return where a batch begins that is wanted at `position`: with drop_last in the next epoch if
 * this one has fewer samples left. */
DTRAIN__PRIVATE uint64_t dtrain__loader_begin(const dtrain_loader *loader, uint64_t position);
DTRAIN__PRIVATE void dtrain__loader_deal(dtrain_loader *loader, uint64_t seed, uint64_t position,
                                         dtrain__batch *batch);
DTRAIN__PRIVATE dtrain_result dtrain__loader_read(const dtrain_loader *loader,
                                                  const dtrain__batch *batch, void *inputs,
                                                  int32_t *targets);

/* train/prefetch.c */
DTRAIN__PRIVATE dtrain_result dtrain__prefetch_create(dtrain_loader *loader);
DTRAIN__PRIVATE void dtrain__prefetch_destroy(dtrain_loader *loader);
DTRAIN__PRIVATE dtrain_result dtrain__prefetch_take(dtrain_loader *loader, void *inputs,
                                                    int32_t *targets);
DTRAIN__PRIVATE void dtrain__prefetch_pause(dtrain_loader *loader);

/* train/files.c */
DTRAIN__PRIVATE dtrain_result dtrain__data_files_open(const dtrain_allocator *allocator,
                                                      const char *paths, dtrain__data_files *files);
DTRAIN__PRIVATE void dtrain__data_files_close(const dtrain_allocator *allocator,
                                              dtrain__data_files *files);
DTRAIN__PRIVATE dtrain_result dtrain__data_file_read(const dtrain__data_file *file, int64_t offset,
                                                     void *buffer, size_t bytes);
DTRAIN__PRIVATE const dtrain__data_file *dtrain__data_file_of(const dtrain__data_files *files,
                                                              int64_t item);
DTRAIN__PRIVATE uint32_t dtrain__le(const unsigned char *bytes, uint32_t width);
