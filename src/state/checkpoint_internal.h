/* The structs of checkpoints
 *
 *     dtrain__folder       a directory that has checkpoints in it; state/directory.c
 *     dtrain__manifest     a checkpoint that is read: index, headers, pieces; state/manifest.c
 *     dtrain__held         a piece of a tensor that a rank lists or saved; state/pieces.c
 *     dtrain_checkpoint    a directory that a run saves to; state/save.c */

#pragma once

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/json_internal.h"
#include "core/log.h"
#include "comm/comm.h"
#include "device/device.h"
#include "state/checkpoint.h"
#include "state/safetensors_internal.h"
#include "state/state.h"
#include "state/storage_internal.h"

/* Each block of a piece has a checksum, so a rank can check the part that it reads. */
#define DTRAIN__BLOCK ((size_t)1 << 20)
#define DTRAIN__CRC_DIGITS 8
static inline size_t dtrain__blocks_of(uint64_t bytes)
{
    return (size_t)((bytes + DTRAIN__BLOCK - 1) / DTRAIN__BLOCK);
}

#define DTRAIN__HEX "0123456789abcdef"
#define DTRAIN__MANIFEST_MOST ((uint64_t)1 << 30)
#define DTRAIN__TEXT_MOST 65536 /* bytes of config */

/* A result and its error sentence, saved while other calls replace the last error. */
typedef struct dtrain__outcome {
    dtrain_result result;
    char text[DTRAIN__ERROR_BYTES];
} dtrain__outcome;

/* A piece of a tensor: an entry of a rank's list of state, or a piece in one of its files. All
 * ranks gather these structs as words of 64 bits. */
typedef struct dtrain__held {
    dtrain_state_tensor tensor; /* name and memory are addresses of `rank`, until gathered */
    int64_t rank;               /* rank whose list or file has the piece; -1: padding */
    int64_t at;                 /* offset in the file in bytes; while gathering, of the name */
    int64_t copy;               /* tensor rank, for parameters that the tensor axis does not cut */
    size_t count;               /* pieces of the tensor, in its first piece of a sorted list */
    char *copy_at;              /* place in the snapshot (save); NULL: no snapshot */
    const char *crc;            /* CRC_DIGITS hexadecimal digits for each block; NULL: none */
} dtrain__held;

/* ---- Directories ------------------------------------------------------------------------------*/

typedef struct dtrain__folder {
    const dtrain_storage *storage;
    const dtrain_allocator *allocator;
    const char *path;
} dtrain__folder;

/* The steps of a folder, newest first. A key is 2 * step + 1; of a directory that is being replaced
 * (.old) it is 2 * step. */
typedef struct dtrain__steps {
    const dtrain_allocator *allocator;
    const char *suffix; /* suffix of the listed directories */
    int64_t *keys;      /* (room), count in use */
    size_t count, room;
    bool remains; /* the folder itself has files that belong in a checkpoint */
    bool failed;  /* out of memory */
} dtrain__steps;

/* ---- Manifests --------------------------------------------------------------------------------*/

/* The largest step or count that is saved or loaded: programs add to it and multiply it. */
#define DTRAIN__STEP_MOST (INT64_MAX / 4)

/* A checkpoint that is read: its manifest, the headers of its files, and their pieces. */
typedef struct dtrain__manifest {
    const dtrain__folder *folder;
    const char *directory; /* path of the checkpoint */
    char *text;            /* (text_bytes + 1), strings are decoded in place */
    size_t text_bytes;
    const char *strategy, *headers;
    uint64_t version, metric_bits, run, job; /* run, job: 0 = unknown */
    int64_t step, ranks;
    bool hierarchical;
    const char *model, *settings; /* beginnings of their objects; NULL: none */
    dtrain__tensor_file *files;   /* (file_count) */
    dtrain__held *pieces;         /* (piece_room), piece_count in use, in dtrain__held_order */
    size_t file_count, piece_count, piece_room;
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
DTRAIN__PRIVATE void dtrain__manifest_free(dtrain__manifest *manifest);

/* ---- Saving -----------------------------------------------------------------------------------*/

/* One of the two files that a rank saves. */
typedef struct dtrain__write_file {
    size_t first, count; /* pieces */
    uint64_t bytes;      /* bytes of data */
    dtrain__text header;
} dtrain__write_file;

/* The phases of a save: a rank's files reach the disk, then rank 0 publishes the checkpoint. Each
 * phase ends with an outcome. */
enum { DTRAIN__SAVE_WRITE, DTRAIN__SAVE_PUBLISH, DTRAIN__SAVE_PHASES };

struct dtrain_checkpoint {
    dtrain_allocator allocator;
    dtrain_world *world;
    dtrain_checkpoint_desc desc; /* resolved */
    dtrain__folder folder;
    dtrain_comm *comm;
    int rank, ranks;
    int lock;     /* rank 0: open lock file; -1: none */
    uint64_t run; /* rank 0: run whose history the directory has */

    dtrain__held *held; /* (held_room) pieces that this rank writes, by file and place */
    char *held_names;   /* (held_names_bytes) */
    size_t held_count, held_room, held_names_bytes;
    char *crcs; /* (crc_bytes) checksums of all pieces, and a 0 */
    size_t crc_bytes;
    dtrain__write_file files[2]; /* values; all else */
    char *snapshot;              /* page-locked if the device is no CPU; NULL: none */
    char *bounce;                /* (BLOCK) bounce buffer for device memory; NULL: none */

    /* The save under way. */
    int64_t step;
    double metric;
    bool outstanding;      /* begun, and not settled */
    dtrain__text head;     /* rank 0: the manifest, up to the checksums of headers */
    double begun;          /* time in seconds */
    uint64_t bytes;        /* bytes that this rank has written */
    double written_at;     /* time in seconds when this rank's files were on the disk */
    uint64_t thread_ns[3]; /* trace: times when the thread began, had written, had published;
                              0: no thread */

    /* Shared with the thread that writes, under the mutex. */
    pthread_t thread;
    bool threaded;  /* the thread must be joined */
    bool abandoned; /* the thread never ended, so its memory is not freed */
    pthread_mutex_t mutex;
    pthread_cond_t moved;
    uint32_t ended;  /* phases that have ended */
    double deadline; /* rank 0: time in seconds until which it waits for the files of other ranks */
    dtrain__outcome outcomes[DTRAIN__SAVE_PHASES];

    uint32_t failures;    /* failed saves in a row */
    dtrain__outcome lost; /* outcome of the newest save, if it failed */
    dtrain_checkpoint_info info;
};

/* state/save.c */
DTRAIN__PRIVATE dtrain__outcome dtrain__outcome_of(dtrain_result result);
DTRAIN__PRIVATE dtrain_result dtrain__outcome_return(const dtrain__outcome *outcome);

/* state/pieces.c */
DTRAIN__PRIVATE uint64_t dtrain__held_bytes(const dtrain__held *held);
DTRAIN__PRIVATE int dtrain__held_order(const void *left, const void *right);
DTRAIN__PRIVATE dtrain_result dtrain__pieces_choose(dtrain_checkpoint *c);
DTRAIN__PRIVATE dtrain_result dtrain__file_header(const dtrain_checkpoint *c,
                                                  dtrain__write_file *file);
DTRAIN__PRIVATE dtrain__file_path dtrain__tensors_path(const char *checkpoint, int which,
                                                       int64_t rank);
DTRAIN__PRIVATE dtrain_result dtrain__pieces_read(dtrain__manifest *m, bool values_only);
DTRAIN__PRIVATE const dtrain__held *dtrain__pieces_find(const dtrain__manifest *m, uint32_t kind,
                                                        const char *name);

/* ---- Reading ----------------------------------------------------------------------------------*/

/* The reader keeps one open file and one block in memory. */
typedef struct dtrain__reader {
    const dtrain_storage *storage;
    dtrain_device *device;
    char *block;                   /* (BLOCK) */
    int64_t low, high;             /* elements of a piece that are in the block */
    int file;                      /* open file; -1: none */
    char opened[2 * DTRAIN__PATH]; /* its path */
    uint64_t bytes;                /* bytes read so far */
} dtrain__reader;

/* The first names of a list, as text. */
typedef struct dtrain__name_list {
    char text[400];
    int count; /* names; 7: the text ends with "..." */
} dtrain__name_list;

/* The kinds of differences between a file and a run. The kinds before DTRAIN__REFUSED are errors,
 * unless the load or import is partial. */
enum {
    DTRAIN__OTHER_MODEL,
    DTRAIN__MISSING,
    DTRAIN__DIFFERENT,
    DTRAIN__EXTRA,
    DTRAIN__REFUSED,
    DTRAIN__OTHER_SETTINGS = DTRAIN__REFUSED,
    DTRAIN__ANEW,
    DTRAIN__LEFT_OUT,
    DTRAIN__AVERAGED,
    DTRAIN__DIFFERENCES
};

/* state/load.c */
DTRAIN__PRIVATE dtrain_result dtrain__reader_begin(dtrain__reader *reader,
                                                   const dtrain_state *state,
                                                   const dtrain_storage *storage);
DTRAIN__PRIVATE void dtrain__reader_end(dtrain__reader *reader, const dtrain_state *state);
DTRAIN__PRIVATE dtrain_result dtrain__elements_read(dtrain__reader *reader, const char *path,
                                                    const dtrain__held *held, bool widen,
                                                    int64_t first, int64_t count, char *to);
DTRAIN__PRIVATE dtrain_result dtrain__piece_read(dtrain__reader *reader, const char *path,
                                                 const dtrain__held *held,
                                                 const dtrain_state_tensor *target, float scale);
DTRAIN__PRINTF(2, 3)
DTRAIN__PRIVATE void dtrain__name_add(dtrain__name_list *list, const char *format, ...);
DTRAIN__PRIVATE bool dtrain__difference_text(const dtrain__name_list *lists, int count, char *text,
                                             size_t room);
