/* An open dataset and its files. */

#pragma once

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "train/data.h"

/* A file, and its size and times when it was opened: a read fails when they have changed. */
typedef struct dtrain__data_file {
    char *path; /* a copy: errors name it long after open */
    int file;   /* -1: opened for every read */
    struct stat opened;
    int64_t header_bytes, record_bytes; /* of an item with its label */
    int64_t first_item, item_count;     /* in the numbering of the dataset */
} dtrain__data_file;

typedef struct dtrain__data_files {
    dtrain__data_file *files;
    size_t count, room;
} dtrain__data_files;

/* A row of the table of formats: how a file is understood, and items are read. */
typedef struct dtrain__format {
    const char *name;
    int64_t vocab_count;
    uint32_t record_bytes; /* of an item with its labels, where the format fixes it */
    uint32_t label_bytes;  /* at the beginning of a record */
    /* Check the beginning of a file; set its header_bytes, record_bytes and item_count. */
    dtrain_result (*learn)(dtrain_dataset *dataset, dtrain__data_file *file);
    dtrain_read_fn read; /* user: the dataset; first and count lie inside */
} dtrain__format;

struct dtrain_dataset {
    dtrain_allocator allocator;
    const dtrain__format *format; /* NULL: a source of the host's own */
    dtrain_read_fn read;
    void *user;
    dtrain_dataset_info info;
    dtrain__data_files data, labels;
    char name[512]; /* for error sentences: the first file, and how many more */
};

/* train/dataset.c */
DTRAIN__PRIVATE dtrain_result dtrain__dataset_read(dtrain_dataset *dataset, int64_t first,
                                                   int64_t count, void *items, int32_t *labels);

/* train/files.c */
DTRAIN__PRIVATE dtrain_result dtrain__data_files_open(const dtrain_allocator *allocator,
                                                      const char *paths, dtrain__data_files *files);
DTRAIN__PRIVATE void dtrain__data_files_close(const dtrain_allocator *allocator,
                                              dtrain__data_files *files);
DTRAIN__PRIVATE dtrain_result dtrain__data_file_read(const dtrain__data_file *file, int64_t offset,
                                                     void *buffer, size_t bytes);
DTRAIN__PRIVATE const dtrain__data_file *dtrain__data_file_of(const dtrain__data_files *files,
                                                              int64_t item);
