/* The tables of checkpoints
 *
 *     dtrain__folder       a directory of checkpoints, and how it is reached; state/directory.c
 *     dtrain__manifest     what a checkpoint holds; state/manifest.c
 *     dtrain__held         a rank's piece of a tensor, listed or saved; state/union.c
 *     dtrain_checkpoint    a directory that is saved to; state/save.c */

#pragma once

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/json_internal.h"
#include "core/log.h"
#include "comm/comm.h"
#include "state/checkpoint.h"
#include "state/safetensors_internal.h"
#include "state/state.h"
#include "state/storage_internal.h"

/* Checksums are of blocks of a piece, so that a rank that needs a part of it can check what it
 * reads without reading all of it. */
#define DTRAIN__BLOCK ((size_t)1 << 20)
#define DTRAIN__CRC_DIGITS 8
static inline size_t dtrain__blocks_of(uint64_t bytes)
{
    return (size_t)((bytes + DTRAIN__BLOCK - 1) / DTRAIN__BLOCK);
}

#define DTRAIN__PIECE_KEY "piece:" /* before a piece's name in the metadata of its file */
#define DTRAIN__MANIFEST_MOST ((uint64_t)1 << 30)
#define DTRAIN__TEXT_MOST 65536 /* bytes of config */

/* A result with its sentence, kept from calls that leave others. */
typedef struct dtrain__outcome {
    dtrain_result result;
    char text[DTRAIN__ERROR_BYTES];
} dtrain__outcome;

/* ---- Pieces -----------------------------------------------------------------------------------*/

/* A rank's piece of a tensor: an entry of the rank's list of state, which all ranks gather as words
 * of 64 bits, or what one of its files holds. */
typedef struct dtrain__held {
    dtrain_state_tensor tensor; /* its memory is that of `rank` */
    int64_t rank;               /* whose list or file it is in; -1: none */
    int64_t at;                 /* of the name, in those gathered; of the first byte in the file */
    int64_t copy;               /* of what ranks of a tensor axis have each: whose; see union.c */
    char *copy_at;              /* of a rank that saves: in the snapshot; NULL: there is none */
    const char *crc;            /* of a file: CRC_DIGITS hexadecimal digits for each block */
} dtrain__held;

/* ---- Directories ------------------------------------------------------------------------------*/

/* A directory that has checkpoints in it. */
typedef struct dtrain__folder {
    const dtrain_storage *storage;
    const dtrain_allocator *allocator;
    const char *path;
} dtrain__folder;

/* The steps of a folder, newest first: twice the step of a directory that is being replaced (.old),
 * one more of any other. */
typedef struct dtrain__steps {
    const dtrain_allocator *allocator;
    const char *suffix; /* of the directories */
    int64_t *keys;      /* (room), count in use */
    size_t count, room;
    bool remains; /* there are files of a checkpoint beside them */
    bool failed;  /* no memory */
} dtrain__steps;

/* ---- Manifests --------------------------------------------------------------------------------*/

/* The largest step or count that is saved or loaded: programs add to it and multiply it. */
#define DTRAIN__STEP_MOST (INT64_MAX / 4)

typedef struct dtrain__saved_tensor {
    const dtrain__held *pieces; /* (count) */
    size_t count;
} dtrain__saved_tensor;

/* A manifest that was read, and the headers of the files. */
typedef struct dtrain__manifest {
    const dtrain__folder *folder;
    const char *directory; /* the checkpoint's */
    char *text;            /* (text_bytes + 1), in which strings have been decoded */
    size_t text_bytes;
    const char *strategy, *headers;
    uint64_t version, metric_bits, run, job; /* run, job: 0 = unknown */
    int64_t step, ranks;
    bool hierarchical;
    const char *model, *settings;  /* where their objects begin; NULL: there is none */
    dtrain__tensor_file *files;    /* (file_count) */
    dtrain__held *pieces;          /* (piece_room), by tensor, rank of own ones, place */
    dtrain__saved_tensor *tensors; /* (piece_count), by kind and name */
    size_t file_count, piece_count, piece_room, tensor_count;
} dtrain__manifest;

/* state/directory.c */
DTRAIN__PRIVATE dtrain__file_path dtrain__step_path(const dtrain__folder *folder, int64_t step,
                                                    const char *suffix);
DTRAIN__PRIVATE dtrain__file_path dtrain__key_path(const dtrain__folder *folder, int64_t key);
DTRAIN__PRIVATE dtrain_result dtrain__steps_list(const dtrain__folder *folder, const char *suffix,
                                                 dtrain__steps *out);
DTRAIN__PRIVATE void dtrain__steps_free(dtrain__steps *steps);
DTRAIN__PRIVATE dtrain_result dtrain__step_remove(const dtrain__folder *folder, int64_t step,
                                                  const char *suffix);
DTRAIN__PRIVATE dtrain_result dtrain__remove_unfinished(const dtrain__folder *folder);
DTRAIN__PRIVATE dtrain_result dtrain__set_aside(const dtrain__folder *folder, int64_t above,
                                                dtrain__file_path *aside);
DTRAIN__PRIVATE dtrain_result dtrain__publish_step(const dtrain__folder *folder, int64_t step);

/* state/manifest.c */
DTRAIN__PRIVATE void dtrain__manifest_head(dtrain__text *text, const dtrain_checkpoint *c);
DTRAIN__PRIVATE void dtrain__manifest_seal(dtrain__text *text);
DTRAIN__PRIVATE dtrain_result dtrain__manifest_read(const dtrain__folder *folder,
                                                    const char *checkpoint, dtrain__manifest *out);
DTRAIN__PRIVATE dtrain_result dtrain__manifest_tensors(dtrain__manifest *m, bool values_only);
DTRAIN__PRIVATE void dtrain__manifest_free(dtrain__manifest *manifest);
DTRAIN__PRIVATE const dtrain__saved_tensor *dtrain__manifest_find(const dtrain__manifest *manifest,
                                                                  uint32_t kind, const char *name);
DTRAIN__PRIVATE dtrain__file_path dtrain__tensors_path(const char *checkpoint, int which,
                                                       int64_t rank);

/* ---- Saving -----------------------------------------------------------------------------------*/

typedef struct dtrain__write_file {
    size_t first, count; /* pieces */
    uint64_t bytes;      /* of data */
    dtrain__text header;
} dtrain__write_file;

/* The phases of a save: this rank's files are brought to the disk; rank 0 publishes the checkpoint.
 * Each ends with an outcome. */
enum { DTRAIN__SAVE_WRITE, DTRAIN__SAVE_PUBLISH, DTRAIN__SAVE_PHASES };

struct dtrain_checkpoint {
    dtrain_allocator allocator;
    dtrain_world *world;
    dtrain_checkpoint_desc desc; /* resolved */
    dtrain__folder folder;
    dtrain_comm *comm;
    int rank, ranks;
    int lock;     /* rank 0: the file; -1: none */
    uint64_t run; /* rank 0: whose history the directory has */

    dtrain__held *held; /* (held_room) what this rank writes, by file and place */
    char *held_names;   /* (held_names_bytes) */
    size_t held_count, held_room, held_names_bytes;
    char *crcs; /* (crc_bytes) of all pieces, and a 0 */
    size_t crc_bytes;
    dtrain__write_file files[2]; /* values; all else */
    char *snapshot;              /* page-locked where the device is no CPU; NULL: there is none */
    char *bounce;                /* (BLOCK) for what is not in host memory; NULL: there is none */

    /* The save under way. */
    int64_t step;
    double metric;
    bool outstanding;  /* begun, and not settled */
    dtrain__text head; /* rank 0: the manifest, up to the checksums of headers */
    double begun;
    uint64_t bytes;        /* that this rank has written ... */
    double written_at;     /* ... until then */
    uint64_t thread_ns[3]; /* for a trace: its thread began, has written, has published; 0: none */

    /* Both threads', under the mutex. */
    pthread_t thread;
    bool threaded;  /* there is one to join */
    bool abandoned; /* one did not come to its end: nothing it uses is freed */
    pthread_mutex_t mutex;
    pthread_cond_t moved;
    uint32_t ended;  /* phases that have ended, and their outcomes */
    double deadline; /* for other ranks' files: nearer when all have written, past when one has
                        failed */
    dtrain__outcome outcomes[DTRAIN__SAVE_PHASES];

    uint32_t failures;    /* in a row */
    dtrain__outcome lost; /* of the newest save, where it has failed */
    dtrain_checkpoint_info info;
};

/* state/save.c */
DTRAIN__PRIVATE dtrain__outcome dtrain__outcome_of(dtrain_result result);
DTRAIN__PRIVATE dtrain_result dtrain__outcome_return(const dtrain__outcome *outcome);

/* state/union.c */
DTRAIN__PRIVATE dtrain_result dtrain__union_make(dtrain_checkpoint *c);
DTRAIN__PRIVATE dtrain_result dtrain__entries_count(const char *where, dtrain_result differ,
                                                    const dtrain__held *entries, size_t room,
                                                    size_t *count);
DTRAIN__PRIVATE dtrain_result dtrain__pieces_check(const char *where, const dtrain__held *pieces,
                                                   size_t count);
DTRAIN__PRIVATE int dtrain__tensor_order(const dtrain__held *a, const dtrain__held *b);
DTRAIN__PRIVATE int dtrain__held_order(const void *left, const void *right);
