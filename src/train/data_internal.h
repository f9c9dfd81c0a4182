/* An open dataset and its files. */

#pragma once

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "train/data.h"

/* A file with its size and times at open: a read fails if they have changed. */
typedef struct dtrain__data_file {
    char *path; /* a copy, for errors after open */
    int file;   /* -1: opened for every read */
    struct stat opened;
    int64_t header_bytes, record_bytes; /* record_bytes: bytes of an item with its label */
    int64_t first_item, item_count;     /* numbered over the dataset */
} dtrain__data_file;

typedef struct dtrain__data_files {
    dtrain__data_file *files;
    size_t count, room;
} dtrain__data_files;

/* A row of the table of formats. */
typedef struct dtrain__format {
    const char *name;
    int64_t vocab_count;
    uint32_t record_bytes; /* bytes of an item with its labels, if the format fixes it */
    uint32_t label_bytes;  /* bytes of labels at the beginning of a record */
    /* Check the beginning of a file; set its header_bytes, record_bytes and item_count. */
    dtrain_result (*learn)(dtrain_dataset *dataset, dtrain__data_file *file);
    dtrain_read_fn read; /* user is the dataset; first and count are in range */
} dtrain__format;

struct dtrain_dataset {
    dtrain_allocator allocator;
    const dtrain__format *format; /* NULL: the program's source */
    dtrain_read_fn read;
    void *user;
    dtrain_dataset_info info;
    dtrain__data_files data, labels;
    char name[512]; /* first file and number of other files, for error sentences */
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
