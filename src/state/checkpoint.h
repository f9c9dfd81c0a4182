/* Checkpoints
 *
 * Each checkpoint is a directory inside the one that a run saves to:
 *
 *     runs/gpt/latest                               name of the newest, for people and scripts
 *     runs/gpt/lock                                 locked (flock) by the run that saves to the
 *                                                   directory; DTRAIN_NO_LOCK=1 in the environment:
 *                                                   no lock, for file systems without flock
 *     runs/gpt/step-000000001000/manifest.json      settings, step, and a CRC-32C of each header
 *                                model-00000.safetensors    values that rank 0 saved; the header
 *                                                           has a CRC-32C of each MiB
 *                                state-00000.safetensors    everything else that rank 0 saved
 *                                model-00001.safetensors    ...
 *
 * Each rank writes the pieces that it keeps; if several ranks keep a piece, one of them writes it.
 * The files are safetensors (https://github.com/huggingface/safetensors). A whole tensor has its
 * name, a box of a tensor is "name[first:end,first:end]", and a run of the elements of either,
 * flattened, adds "[first:end]".
 *
 * The ranks write their files to step-N.tmp, sync them to the disk, and agree that all succeeded.
 * Then one rename makes the directory a checkpoint. A crash at any moment leaves the earlier
 * checkpoints as they were.
 *
 * Loading reads the manifest, all headers, and the pieces that this rank needs. The number of
 * ranks, the axes of the mesh, strategy, node size, precision and offload can differ from the run
 * that saved. A load carries over:
 *
 *     values, moments, momentum, scalars    exactly
 *     residuals, velocities    exactly if as many ranks cut buckets in the same way. Otherwise
 *                              every rank begins with the mean over the old ranks that had the
 *                              element, which keeps the mean gradient right, or with zeros if
 *                              either run is hierarchical, which keeps residuals per node
 *     private arrays of a rank that the program added    exactly, on ranks that existed before
 *
 * dtrain_load_info.note names everything that was not carried over exactly. */

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
    uint32_t keep;         /* newest checkpoints to keep; 0 = 3, or DTRAIN_KEEP_ALL */
    uint32_t keep_best;    /* checkpoints to keep besides: those with the least metric, which is a
                              loss; 0 = none */
    bool set_aside;        /* open moves checkpoints of another run to the subdirectory aside-1;
                                false: they are an error of open */
    bool background;       /* save copies to host memory, and a thread writes while training
                                continues; false: save returns when the checkpoint is written */
    uint32_t failures;     /* failed saves in a row that are only warnings; dtrain_checkpoint_save
                                returns the error of the next one. If the newest save has failed,
                                dtrain_checkpoint_wait and _close return its error. 0 = none */
    const char *directory; /* directory that all ranks share; made if it does not exist */
    const char *config;    /* text for the manifest, such as the command line; NULL = none */
    const dtrain_storage *storage; /* must outlive the checkpoints; NULL = the file system */
    dtrain_state *state;           /* must outlive them too */
} dtrain_checkpoint_desc;

/* Open a directory to save to. Collective. Every rank writes and removes a small file, so a
 * directory that is missing, read-only, full or not shared is an error before training starts. A
 * second run that saves to the same directory is refused. Half-written files of an earlier run are
 * removed.
 *
 * A directory has one history: the checkpoints of one run, from the first to the newest. A state
 * that was loaded from one of them continues the history. If that was not the newest, open moves
 * the checkpoints of later steps to a subdirectory aside-N. The library removes nothing from it,
 * and loads from it only by path. A save does the same if an older checkpoint has been loaded since
 * open. A directory with checkpoints of another run is DTRAIN_ERROR_DATA: load their newest first
 * and continue, save elsewhere, or set them aside. */
DTRAIN_API dtrain_result dtrain_checkpoint_open(dtrain_world *world,
                                                const dtrain_checkpoint_desc *desc,
                                                dtrain_checkpoint **out);
/* Save the state as the checkpoint of a step (0 to 2^61 - 1), between two steps. Collective.
 * metric: for keep_best, the same on every rank; NaN: none. A checkpoint of the same step is
 * replaced. A directory that was removed after open is made again, with a warning.
 *
 * In the background, save first waits until the previous save is written, and reports its
 * failure. */
DTRAIN_API dtrain_result dtrain_checkpoint_save(dtrain_checkpoint *checkpoint, int64_t step,
                                                double metric);
/* Wait for a save in the background. Collective. DTRAIN_OK: the newest save is on the disk.
 * Otherwise the error says why not, even if desc.failures made it a warning, and what is lost. */
DTRAIN_API dtrain_result dtrain_checkpoint_wait(dtrain_checkpoint *checkpoint);
/* Wait, free, and return the result of dtrain_checkpoint_wait. Collective, unless the communicator
 * has failed; NULL is ignored. */
DTRAIN_API dtrain_result dtrain_checkpoint_close(dtrain_checkpoint *checkpoint);

typedef struct dtrain_checkpoint_info {
    int64_t last_step;       /* step of the newest checkpoint of this object; -1: none yet */
    uint64_t saved, failed;  /* saves */
    uint64_t bytes;          /* bytes that this rank wrote in the last save */
    double stall_seconds;    /* time that the last dtrain_checkpoint_save took on this rank */
    double write_seconds;    /* time of the last save until this rank's files were on the disk */
    uint64_t snapshot_bytes; /* host memory for saves in the background */
} dtrain_checkpoint_info;
/* Get counts and times of saves; zeros for NULL. Local. */
DTRAIN_API void dtrain_checkpoint_query(const dtrain_checkpoint *checkpoint,
                                        dtrain_checkpoint_info *info);

/* Every zero is the default written beside the field. */
typedef struct dtrain_load_desc {
    bool partial; /* keep values that the checkpoint lacks, or has in another shape, and skip extra
                     values; false: an error names them */
    bool values_only; /* load only the values of parameters; all else is as in a new run */
    bool this_job;    /* load only a checkpoint that this job saved before dtrain_launch or the
                         launcher around it restarted it: DTRAIN_ERROR_NOT_FOUND if the newest is
                         of another job, or a script restarted the run */
    const dtrain_storage *storage; /* NULL = the file system */
} dtrain_load_desc;

typedef struct dtrain_load_info {
    int64_t step;
    int ranks;         /* ranks that saved it */
    char strategy[32]; /* strategy of these ranks */
    char path[512];    /* directory of the checkpoint */
    uint64_t bytes;    /* bytes that this rank read */
    uint64_t values;   /* tensors of values that were loaded */
    double metric;     /* NaN: none */
    double seconds;
    char note[600]; /* state that was not carried over exactly, and newer checkpoints that could
                             not be read; empty: none */
} dtrain_load_info;

/* Load a checkpoint, between two steps. Collective. path: one checkpoint, or a directory that a run
 * saved to. From a directory, load takes the newest checkpoint that can be read whole, and warns of
 * newer ones that cannot. desc and info can be NULL.
 *
 * DTRAIN_ERROR_NOT_FOUND: the directory does not exist, or has no checkpoint, so a run can begin.
 * After any other error a run must not begin.
 *
 * No value changes before the headers have been compared with the state. An error after that leaves
 * a mixture of old and loaded values. Then every call of the strategy fails, until a whole
 * checkpoint has been loaded, or the program has set all values and called
 * dtrain_state_changed. */
DTRAIN_API dtrain_result dtrain_checkpoint_load(dtrain_state *state, const char *path,
                                                const dtrain_load_desc *desc,
                                                dtrain_load_info *info);
