/* The tables of checkpoints
 *
 *     dtrain__piece_on_disk   a piece of a tensor, and where it is in which file
 *     dtrain__manifest        what a checkpoint holds; made by state/manifest.c
 *     dtrain_checkpoint       a directory that is saved to; state/save.c */

#pragma once

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/log.h"
#include "comm/comm.h"
#include "state/checkpoint.h"
#include "state/json_internal.h"
#include "state/state.h"
#include "state/storage.h"

/* Checksums are of blocks of a piece, so that a rank that needs a part of it can check what it
 * reads without reading all of it. */
#define DTRAIN__BLOCK ((size_t)1 << 20)
#define DTRAIN__CRC_DIGITS 8
#define DTRAIN__PATH 768
#define DTRAIN__MANIFEST_VERSION 2 /* 1, of version 0.2, had no boxes; it is read as well */
#define DTRAIN__MANIFEST_MOST ((uint64_t)1 << 30)
#define DTRAIN__TEXT_MOST 65536 /* bytes of config */

/* A tensor of a checkpoint. */
typedef struct dtrain__saved_tensor {
    const char *name;
    uint32_t kind, dtype;
    int64_t shape[4], total;
    bool own;
    size_t first_piece, piece_count; /* in dtrain__manifest.pieces */
} dtrain__saved_tensor;

typedef struct dtrain__saved_piece {
    uint32_t tensor, file;
    int rank; /* that wrote it; -1: of a tensor that ranks share */
    dtrain_piece piece;
    uint64_t at;     /* of the first byte in the file */
    const char *crc; /* CRC_DIGITS hexadecimal digits for each block, in the text */
} dtrain__saved_piece;

typedef struct dtrain__saved_file {
    const char *name;
    uint64_t bytes;
} dtrain__saved_file;

typedef struct dtrain__saved_scalar {
    char name[64];
    uint64_t bits;
} dtrain__saved_scalar;

/* A manifest that was read. */
typedef struct dtrain__manifest {
    const dtrain_allocator *allocator;
    char *text; /* (text_bytes + 1) */
    size_t text_bytes;
    char *names; /* (text_bytes + 1), names_bytes in use: names of tensors and files */
    size_t names_bytes;
    uint64_t version;
    int64_t step;
    int ranks;
    char strategy[32];
    bool hierarchical;
    bool has_metric;
    double metric;
    const char *model, *settings; /* objects in the text; NULL: none ... */
    size_t model_bytes, settings_bytes;
    uint64_t run, job; /* 0: unknown */
    dtrain__saved_scalar scalars[32];
    size_t scalar_count;
    dtrain__saved_tensor *tensors;  /* (tensor_room) */
    dtrain__saved_tensor **by_name; /* (tensor_count), sorted by kind and name */
    dtrain__saved_piece *pieces;    /* (piece_room), by tensor, rank of own ones, offset */
    dtrain__saved_file *files;      /* (file_room) */
    size_t tensor_count, tensor_room, piece_count, piece_room, file_count, file_room;
} dtrain__manifest;

/* state/crc32c.c */
DTRAIN__PRIVATE uint32_t dtrain__crc32c(uint32_t crc, const void *data, size_t bytes);

/* state/manifest.c */
DTRAIN__PRIVATE void dtrain__seal(dtrain__text *text);
DTRAIN__PRIVATE dtrain_result dtrain__unseal(const char *path, char *text, size_t *bytes);
DTRAIN__PRIVATE void dtrain__manifest_head(dtrain__text *text, const dtrain_checkpoint *c);
DTRAIN__PRIVATE dtrain_result dtrain__manifest_read(const dtrain_storage *storage,
                                                    const dtrain_allocator *allocator,
                                                    const char *directory, dtrain__manifest *out);
DTRAIN__PRIVATE dtrain_result dtrain__manifest_parse(const char *path, char *text, size_t bytes,
                                                     dtrain__manifest *out);
DTRAIN__PRIVATE void dtrain__manifest_free(dtrain__manifest *manifest);
DTRAIN__PRIVATE const dtrain__saved_tensor *dtrain__manifest_find(const dtrain__manifest *manifest,
                                                                  uint32_t kind, const char *name);

/* The steps of a directory, newest first. */
typedef struct dtrain__steps {
    const dtrain_allocator *allocator;
    const char *suffix; /* of their directories */
    int64_t *steps;     /* (room), count in use */
    size_t count, room;
    bool remains; /* there are files of a checkpoint beside them */
    bool failed;  /* no memory */
} dtrain__steps;

/* state/directory.c */
DTRAIN__PRIVATE void dtrain__step_path(char path[DTRAIN__PATH], const char *directory, int64_t step,
                                       const char *suffix);
DTRAIN__PRIVATE dtrain_result dtrain__steps_list(const dtrain_storage *storage,
                                                 const dtrain_allocator *allocator,
                                                 const char *directory, const char *suffix,
                                                 dtrain__steps *out);
DTRAIN__PRIVATE void dtrain__steps_free(dtrain__steps *steps);
DTRAIN__PRIVATE dtrain_result dtrain__step_remove(const dtrain_storage *storage,
                                                  const dtrain_allocator *allocator,
                                                  const char *directory, int64_t step);
DTRAIN__PRIVATE dtrain_result dtrain__step_is_old(const dtrain_storage *storage,
                                                  const char *directory, int64_t step, bool *old);
DTRAIN__PRIVATE dtrain_result dtrain__remove_unfinished(const dtrain_storage *storage,
                                                        const dtrain_allocator *allocator,
                                                        const char *directory);
DTRAIN__PRIVATE dtrain_result dtrain__set_aside(const dtrain_storage *storage,
                                                const dtrain_allocator *allocator,
                                                const char *directory, int64_t above, char *folder);
DTRAIN__PRIVATE dtrain_result dtrain__directory_publish(const dtrain_storage *storage,
                                                        const dtrain_allocator *allocator,
                                                        const char *directory, int64_t step);

/* An entry of a rank's list of state, which all ranks gather as words of 64 bits. */
typedef struct dtrain__held {
    int64_t rank, index; /* whose list it is in, and where */
    int32_t kind, dtype;
    int64_t own;
    int64_t shape[4];
    dtrain_piece piece;
    int64_t name_at;  /* in the names that come with it */
    int64_t tensor;   /* its number in the manifest */
    const char *name; /* not sent */
} dtrain__held;

/* One piece that this rank writes. */
typedef struct dtrain__write_piece {
    const dtrain__held *held;
    uint64_t at;      /* first byte, from the beginning of the file's data */
    const void *from; /* the snapshot, or the state's memory */
} dtrain__write_piece;

typedef struct dtrain__write_file {
    size_t first, count; /* pieces */
    uint64_t bytes;      /* of data */
} dtrain__write_file;

/* The phase of a save, for the thread that writes and the one that trains. */
enum {
    DTRAIN__SAVE_IDLE,
    DTRAIN__SAVE_WRITING,
    DTRAIN__SAVE_WRITTEN, /* this rank's files are on the disk, or could not be brought there */
    DTRAIN__SAVE_DONE     /* rank 0: the checkpoint is published, or could not be */
};

struct dtrain_checkpoint {
    dtrain_allocator allocator;
    dtrain_world *world;
    dtrain_checkpoint_desc desc; /* resolved; its texts are copies */
    char *texts;                 /* (texts_bytes) */
    size_t texts_bytes;
    dtrain_comm *comm;
    int rank, ranks;
    int lock;     /* rank 0: the file; -1: none */
    uint64_t run; /* rank 0: whose history the directory has */

    dtrain__held *held; /* (held_room) of every piece its writer, by tensor; see union.c */
    char *held_names;   /* (held_names_bytes) */
    size_t held_count, held_room, held_names_bytes;

    /* The save under way. */
    int64_t step;
    double metric;
    bool outstanding; /* begun, and not settled */
    dtrain__write_piece *pieces;
    size_t piece_count, piece_room;
    dtrain__write_file files[2]; /* values; all else */
    char *snapshot;              /* page-locked where the device is no CPU */
    size_t snapshot_bytes;
    dtrain__text head; /* rank 0: the manifest, up to its list of files */
    double begun;
    uint64_t bytes;        /* that this rank has written ... */
    double written_at;     /* ... until then */
    uint64_t thread_ns[3]; /* for a trace: its thread began, has written, has published */

    /* Both threads', under the mutex. */
    pthread_t thread;
    bool threaded;  /* there is one to join */
    bool abandoned; /* one did not come to its end: nothing it uses is freed */
    pthread_mutex_t mutex;
    pthread_cond_t moved;
    uint32_t phase;
    double deadline; /* for other ranks' lists: nearer when all have written, past when one has
                        failed */
    dtrain_result written, published;
    char written_text[DTRAIN__ERROR_BYTES], published_text[DTRAIN__ERROR_BYTES];

    uint32_t failures;  /* in a row */
    dtrain_result lost; /* of the newest save, where it has failed, and why */
    char lost_text[DTRAIN__ERROR_BYTES];
    dtrain_checkpoint_info info;
};

/* state/union.c */
DTRAIN__PRIVATE dtrain_result dtrain__union_make(dtrain_checkpoint *c);
DTRAIN__PRIVATE void dtrain__union_free(dtrain_checkpoint *c);
DTRAIN__PRIVATE dtrain_result dtrain__pieces_check(const char *where, uint32_t kind,
                                                   const char *name, const dtrain_piece *pieces,
                                                   size_t stride, size_t count, int64_t total);

/* state/write.c */
DTRAIN__PRIVATE dtrain_result dtrain__save_plan(dtrain_checkpoint *c);
DTRAIN__PRIVATE dtrain_result dtrain__save_snapshot(dtrain_checkpoint *c);
DTRAIN__PRIVATE dtrain_result dtrain__save_write(dtrain_checkpoint *c);
