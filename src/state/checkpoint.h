/* Checkpoints
 *
 * Each checkpoint is a directory inside the one that a run saves to:
 *
 *     runs/gpt/latest                               the name of the newest, for people and scripts
 *     runs/gpt/lock                                 held (flock) by the run that saves to the
 *                                                   directory; DTRAIN_NO_LOCK=1 in the environment:
 *                                                   none, for file systems without flock
 *     runs/gpt/step-000000001000/manifest.json      settings, steps, and a CRC-32C of each header
 *                                model-00000.safetensors    values, of rank 0; in its header what
 *                                                           they are, and a CRC-32C of each MiB
 *                                state-00000.safetensors    everything else, of rank 0
 *                                model-00001.safetensors    ...
 *
 * Each rank writes what it keeps; of what several ranks keep, one writes it. The files are
 * safetensors (https://github.com/huggingface/safetensors): a tensor that one rank has whole is
 * there by its name, a box of it as "name[first:end,first:end]", and a run of the elements of
 * either, flattened, with "[first:end]" after that.
 *
 * All of it is written to step-N.tmp and brought to the disk, every rank's success is agreed on,
 * then one rename makes it a checkpoint: what has a manifest is whole. A crash at any moment leaves
 * the checkpoints before it as they were.
 *
 * Loading reads the manifest, all headers, and those pieces that this rank needs. Number of ranks,
 * axes of the mesh, strategy, node size, precision and offload may differ from the settings of the
 * run that saved. A load carries over:
 *
 *     values, moments, momentum, scalars    exactly
 *     residuals, velocities    exactly by as many ranks that cut buckets in the same way; otherwise
 *                              every rank begins with the mean over the old ranks that had the
 *                              element, so that the mean gradient gets what is owed to it; and with
 *                              zeros where either side is hierarchical, which owes it per node
 *     arrays of the program's own that differ from rank to rank    by the ranks that were there
 *
 * What was not carried over exactly is said in dtrain_load_info.note. */

#pragma once

#include "core/api.h"
#include "core/result.h"
#include "world/world.h"
#include "state/state.h"
#include "state/storage.h"

typedef struct dtrain_checkpoint dtrain_checkpoint;

#define DTRAIN_KEEP_ALL UINT32_MAX

/* Every zero is the default written beside the field; texts are kept by pointer. */
typedef struct dtrain_checkpoint_desc {
    uint32_t keep;         /* the newest n stay; 0 = 3, or DTRAIN_KEEP_ALL */
    uint32_t keep_best;    /* besides, the n with the least metric given to save, which is a loss;
                              0 = none */
    bool set_aside;        /* checkpoints of another run in the directory are moved to one below it,
                                aside-1; false: they are an error of open */
    bool background;       /* save copies to host memory, and a thread writes while training goes
                                on; false: save returns when the checkpoint is there */
    uint32_t failures;     /* saves in a row that may fail with a warning; dtrain_checkpoint_save
                                returns the error of the next one. If the newest save has failed,
                                dtrain_checkpoint_wait and _close return its error. 0 = none */
    const char *directory; /* shared by all ranks; made if it is not there */
    const char *config;    /* text for the manifest, such as the command line; NULL = none */
    const dtrain_storage *storage; /* must outlive the checkpoints; NULL = the file system */
    dtrain_state *state;           /* must outlive them too */
} dtrain_checkpoint_desc;

/* Open a directory to save to. Collective. Every rank writes and removes a small file, so that a
 * directory that is missing, read-only, full or not shared is an error before training starts. A
 * second run that saves to the same directory is refused. What an earlier run left half-written is
 * removed.
 *
 * A directory has one history: one run, from its first checkpoint to the newest. A state that was
 * loaded from one of its checkpoints continues it; checkpoints of later steps, if it was not the
 * newest, are moved to a directory aside-N, out of which nothing is removed and nothing is loaded
 * unless it is named. A save does the same, if an older checkpoint has been loaded since. A
 * directory with checkpoints of another run is DTRAIN_ERROR_DATA: load the newest of them before
 * and continue, save elsewhere, or set them aside. */
DTRAIN_API dtrain_result dtrain_checkpoint_open(dtrain_world *world,
                                                const dtrain_checkpoint_desc *desc,
                                                dtrain_checkpoint **out);
/* Save the state as the checkpoint of a step (0 to 2^61 - 1), between two steps. Collective.
 * metric: for keep_best, the same on every rank; NaN: none. A checkpoint of the same step is
 * replaced. A directory that was removed since it was opened is made again, with a warning.
 *
 * In the background, this waits for the save before, if that is still being written, and reports
 * its failure. */
DTRAIN_API dtrain_result dtrain_checkpoint_save(dtrain_checkpoint *checkpoint, int64_t step,
                                                double metric);
/* Wait for a save in the background. DTRAIN_OK: the newest save is on the disk; otherwise the error
 * says why not, also after a warning (desc.failures), and what is lost. Collective. */
DTRAIN_API dtrain_result dtrain_checkpoint_wait(dtrain_checkpoint *checkpoint);
/* Wait, with the result of dtrain_checkpoint_wait, and free. Collective, unless the communicator
 * has failed; NULL is ignored. */
DTRAIN_API dtrain_result dtrain_checkpoint_close(dtrain_checkpoint *checkpoint);

typedef struct dtrain_checkpoint_info {
    int64_t last_step;      /* of the newest checkpoint saved by this object, -1: none yet */
    uint64_t saved, failed; /* saves */
    uint64_t bytes;         /* that this rank wrote in the last save */
    double stall_seconds; /* of the last save: how long dtrain_checkpoint_save took on this rank */
    double write_seconds; /* of the last save: until this rank's files were on the disk */
    uint64_t snapshot_bytes; /* host memory held for saves in the background */
} dtrain_checkpoint_info;
/* Tell what has been saved; zeros for NULL. Local. */
DTRAIN_API void dtrain_checkpoint_query(const dtrain_checkpoint *checkpoint,
                                        dtrain_checkpoint_info *info);

/* Every zero is the default written beside the field. */
typedef struct dtrain_load_desc {
    bool partial; /* values that the checkpoint lacks, or has in another shape, stay as they are,
                     and extra ones are left out; false: either is an error that names them */
    bool values_only; /* nothing but values of parameters; the state is that of a new run */
    bool this_job;    /* a checkpoint that this run has saved, started again by dtrain_launch or
                         the launcher around it (not by a script): DTRAIN_ERROR_NOT_FOUND when the
                         newest is another's */
    const dtrain_storage *storage; /* NULL = the file system */
} dtrain_load_desc;

typedef struct dtrain_load_info {
    int64_t step;
    int ranks;         /* that saved it */
    char strategy[32]; /* of theirs */
    char path[512];    /* the checkpoint's directory */
    uint64_t bytes;    /* that this rank read */
    uint64_t values;   /* tensors of values that were loaded */
    double metric;     /* NaN: none */
    double seconds;
    char note[600]; /* what was not carried over exactly, and what was passed over on the way;
                             empty: nothing */
} dtrain_load_info;

/* Load a checkpoint, between two steps. Collective. path: one checkpoint, or a directory that a run
 * saved to, of which the newest is taken that can be read whole: one that cannot is passed over
 * with a warning. desc and info may be NULL.
 *
 * DTRAIN_ERROR_NOT_FOUND: the directory is not there, or has no checkpoint: a run may begin.
 * Whatever else goes wrong is another error, after which it must not.
 *
 * Nothing is changed before the headers have been checked against the state. An error after that
 * leaves a mixture of old and loaded values: every call of the strategy then fails, until a
 * checkpoint has been loaded whole, or the program has set all values and calls
 * dtrain_state_changed. */
DTRAIN_API dtrain_result dtrain_checkpoint_load(dtrain_state *state, const char *path,
                                                const dtrain_load_desc *desc,
                                                dtrain_load_info *info);
