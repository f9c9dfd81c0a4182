/* The tables of checkpoints
 *
 *     dtrain__folder       a directory of checkpoints, and how it is reached; state/directory.c
 *     dtrain__manifest     what a checkpoint holds; state/manifest.c
 *     dtrain__held         one rank's piece of a tensor; state/union.c
 *     dtrain_checkpoint    a directory that is saved to; state/save.c */

#pragma once

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/json_internal.h"
#include "core/log.h"
#include "comm/comm.h"
#include "state/checkpoint.h"
#include "state/state.h"
#include "state/storage.h"

/* Checksums are of blocks of a piece, so that a rank that needs a part of it can check what it
 * reads without reading all of it. */
#define DTRAIN__BLOCK ((size_t)1 << 20)
#define DTRAIN__CRC_DIGITS 8
#define DTRAIN__PATH 768
#define DTRAIN__MANIFEST_VERSION 2
#define DTRAIN__MANIFEST_MOST ((uint64_t)1 << 30)
#define DTRAIN__TEXT_MOST 65536 /* bytes of config */

/* A path that is long enough for all that a checkpoint names. */
typedef struct dtrain__file_path {
    char text[DTRAIN__PATH];
} dtrain__file_path;

/* A result with its sentence, kept from calls that leave others. */
typedef struct dtrain__outcome {
    dtrain_result result;
    char text[DTRAIN__ERROR_BYTES];
} dtrain__outcome;

/* ---- Manifests --------------------------------------------------------------------------------*/

typedef struct dtrain__saved_tensor {
    dtrain_state_tensor tensor;      /* without piece and memory */
    size_t first_piece, piece_count; /* in dtrain__manifest.pieces */
} dtrain__saved_tensor;

typedef struct dtrain__saved_piece {
    uint32_t tensor, file;
    int64_t rank; /* that wrote it; -1: of a tensor that ranks share */
    dtrain_piece piece;
    uint64_t at;     /* of the first byte in the file */
    const char *crc; /* CRC_DIGITS hexadecimal digits for each block, in the text */
} dtrain__saved_piece;

typedef struct dtrain__saved_file {
    const char *name;
    uint64_t bytes;
    int64_t rank; /* that wrote it */
} dtrain__saved_file;

/* The largest step or count that is saved or loaded: programs add to it and multiply it. */
#define DTRAIN__STEP_MOST (INT64_MAX / 4)

typedef struct dtrain__saved_scalar {
    const char *name;
    uint64_t bits;
} dtrain__saved_scalar;

/* An object in the text; NULL: there is none. */
typedef struct dtrain__object {
    const char *at;
    size_t bytes;
} dtrain__object;

/* A manifest that was read, or whose members are to be written. */
typedef struct dtrain__manifest {
    const dtrain_allocator *allocator;
    char *text; /* (text_bytes + 1), in which strings have been decoded */
    size_t text_bytes;
    const char *format, *library, *strategy, *config;
    uint64_t version, block, metric_bits, run, job; /* run, job: 0 = unknown */
    int64_t step, ranks;
    bool hierarchical;
    dtrain__object model, settings;
    dtrain__saved_scalar scalars[32];
    size_t scalar_count;
    dtrain__saved_tensor *tensors;  /* (tensor_room) */
    dtrain__saved_tensor **by_name; /* (tensor_count), sorted by kind and name */
    dtrain__saved_piece *pieces;    /* (piece_room), by tensor, rank of own ones, place */
    dtrain__saved_file *files;      /* (file_room) */
    size_t tensor_count, tensor_room, piece_count, piece_room, file_count, file_room;
} dtrain__manifest;

/* ---- Directories ------------------------------------------------------------------------------*/

/* A directory that has checkpoints in it. */
typedef struct dtrain__folder {
    const dtrain_storage *storage;
    const dtrain_allocator *allocator;
    const char *path;
} dtrain__folder;

/* The steps of a folder, newest first. */
typedef struct dtrain__steps {
    const dtrain_allocator *allocator;
    int64_t *steps; /* (room), count in use */
    size_t count, room;
    bool remains; /* there are files of a checkpoint beside them */
} dtrain__steps;

/* state/directory.c */
DTRAIN__PRINTF(2, 3)
DTRAIN__PRIVATE dtrain__file_path dtrain__path_in(const char *directory, const char *format, ...);
DTRAIN__PRIVATE dtrain__file_path dtrain__step_path(const dtrain__folder *folder, int64_t step,
                                                    const char *suffix);
DTRAIN__PRIVATE dtrain_result dtrain__steps_list(const dtrain__folder *folder, const char *suffix,
                                                 dtrain__steps *out);
DTRAIN__PRIVATE void dtrain__steps_free(dtrain__steps *steps);
DTRAIN__PRIVATE dtrain_result dtrain__step_remove(const dtrain__folder *folder, int64_t step);
DTRAIN__PRIVATE dtrain_result dtrain__step_is_old(const dtrain__folder *folder, int64_t step,
                                                  bool *old);
DTRAIN__PRIVATE dtrain_result dtrain__remove_unfinished(const dtrain__folder *folder);
DTRAIN__PRIVATE dtrain_result dtrain__set_aside(const dtrain__folder *folder, int64_t above,
                                                dtrain__file_path *aside);
DTRAIN__PRIVATE dtrain_result dtrain__publish_step(const dtrain__folder *folder, int64_t step);

/* state/manifest.c */
DTRAIN__PRIVATE void dtrain__seal(dtrain__text *text);
DTRAIN__PRIVATE dtrain_result dtrain__unseal(const char *path, char *text, size_t *bytes);
DTRAIN__PRIVATE void dtrain__manifest_head(dtrain__text *text, const dtrain_checkpoint *c);
DTRAIN__PRIVATE void dtrain__manifest_file(dtrain__text *text, const dtrain__saved_file *file);
DTRAIN__PRIVATE dtrain_result dtrain__manifest_read(const dtrain__folder *folder,
                                                    const char *checkpoint, dtrain__manifest *out);
DTRAIN__PRIVATE void dtrain__manifest_free(dtrain__manifest *manifest);
DTRAIN__PRIVATE const dtrain__saved_tensor *dtrain__manifest_find(const dtrain__manifest *manifest,
                                                                  uint32_t kind, const char *name);

/* ---- Saving -----------------------------------------------------------------------------------*/

/* An entry of a rank's list of state, which all ranks gather as words of 64 bits. */
typedef struct dtrain__held {
    dtrain_state_tensor tensor; /* its memory is that of `rank` */
    int64_t rank;               /* whose list it is in; -1: none */
    int64_t name_at;            /* in the names that come with it */
    int64_t number;             /* of its tensor in the manifest */
    int64_t copy;               /* of what ranks of a tensor axis have each: whose; see union.c */
} dtrain__held;

/* One piece that this rank writes. */
typedef struct dtrain__write_piece {
    const dtrain__held *held;
    uint64_t bytes;
    uint64_t at; /* first byte, from the beginning of the file's data */
    char *copy;  /* in the snapshot; NULL: there is none */
} dtrain__write_piece;

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

    dtrain__held *held; /* (held_room) of every piece its writer, by tensor; see union.c */
    char *held_names;   /* (held_names_bytes) */
    size_t held_count, held_room, held_names_bytes;
    dtrain__write_piece *pieces; /* (piece_room) what this rank writes; see write.c */
    size_t piece_count, piece_room;
    dtrain__write_file files[2]; /* values; all else */
    char *snapshot;              /* page-locked where the device is no CPU; NULL: there is none */
    char *bounce;                /* (BLOCK) for what is not in host memory; NULL: there is none */

    /* The save under way. */
    int64_t step;
    double metric;
    bool outstanding;  /* begun, and not settled */
    dtrain__text head; /* rank 0: the manifest, up to its list of files */
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
    double deadline; /* for other ranks' lists: nearer when all have written, past when one has
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
DTRAIN__PRIVATE dtrain_result dtrain__pieces_check(const char *where,
                                                   const dtrain_state_tensor *tensor,
                                                   const dtrain_piece *pieces, size_t stride,
                                                   size_t count);

/* state/write.c */
DTRAIN__PRIVATE dtrain_result dtrain__save_plan(dtrain_checkpoint *c);
DTRAIN__PRIVATE dtrain_result dtrain__save_snapshot(dtrain_checkpoint *c);
DTRAIN__PRIVATE dtrain_result dtrain__save_write(dtrain_checkpoint *c);
