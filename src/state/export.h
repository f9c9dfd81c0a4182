/* Whole weights
 *
 * Export writes a safetensors file with the whole value of every parameter and nothing else,
 * whatever the number of ranks and the strategy. PyTorch and transformers read it, and import reads
 * files that they write.
 *
 *     dtrain_export_desc how = {0};
 *     how.names = names;                 the names of Hugging Face; NULL: the names of this run
 *     dtrain_checkpoint_export(strategy, "model.safetensors", &how);
 *
 *     dtrain_import_desc from = {0};
 *     from.names = names;                the same table
 *     dtrain_checkpoint_import(state, "model.safetensors", &from, NULL);
 *
 * Only a checkpoint can continue a run: these files lack the state of the optimizer. */

#pragma once

#include "core/api.h"
#include "core/dtype.h"
#include "core/result.h"
#include "strategy/strategy.h"
#include "state/state.h"
#include "state/storage.h"

/* The name and layout of a parameter in a file. Every zero is the default. */
typedef struct dtrain_export_name {
    int64_t rows;     /* rows in the file, as of a padded vocabulary (1-D: elements); import sets
                         the rows after them to zero; 0 = all */
    const char *name; /* NULL = the parameter's name; "" = not in the file */
    bool transpose;   /* 2-D: the file has (columns, rows), as GPT-2's Conv1D */
} dtrain_export_name;

/* Every zero is the default written beside the field; the same on every rank. */
typedef struct dtrain_export_desc {
    uint32_t dtype;                  /* dtype of the file: 0 = F32; BF16, F16: rounded to nearest */
    const dtrain_export_name *names; /* (param_count), unused for aliases; NULL = zeros */
    const dtrain_storage *storage;   /* NULL = the file system */
} dtrain_export_desc;

/* Write the values of all parameters to a file, in the order of the parameters, tied parameters
 * once. Collective, between two steps. Every rank holds one whole parameter at a time in host
 * memory, and rank 0 writes. desc can be NULL.
 *
 * The file is written as path.tmp, synced to the disk, and renamed: a file named `path` is whole.
 * An error leaves an older file of this name as it was.
 *
 * DTRAIN_ERROR_ARGUMENT on all ranks for a wrong desc (a name that occurs twice, a transposed
 * parameter that is not 2-D, too many rows); DTRAIN_ERROR_FILE for a disk that fails. */
DTRAIN_API dtrain_result dtrain_checkpoint_export(dtrain_strategy *strategy, const char *path,
                                                  const dtrain_export_desc *desc);

/* Every zero is the default written beside the field; the same on every rank. */
typedef struct dtrain_import_desc {
    bool partial; /* keep parameters that the file lacks, or has in another shape or type, and skip
                     extra tensors; false: an error names them */
    const dtrain_export_name *names; /* (param_count), as in dtrain_export_desc; of an alias, only
                                        the name is used; NULL = zeros */
    const char *prefix;              /* prefix of names, such as "transformer.", tried for a name
                                  that the file lacks; NULL = none */
    const char *const *ignore; /* ends of names, such as ".attn.bias", then NULL: tensors that do
                                  not count as extra; NULL = none */
    const dtrain_storage *storage; /* NULL = the file system */
} dtrain_import_desc;

typedef struct dtrain_import_info {
    uint64_t values; /* parameters that were set */
    uint64_t bytes;  /* bytes of values that this rank read */
    double seconds;
    char note[600]; /* partial: parameters not set and tensors skipped; empty: none */
} dtrain_import_info;

/* Read the values of parameters from a file of F32, BF16 or F16, or from several files with an
 * index. Collective, between two steps. Every rank reads its pieces, block by block; of a
 * transposed parameter it reads all rows of its columns. Then import publishes the values and sets
 * the master copies of the state's optimizer, as dtrain_state_changed does. The moments and steps
 * of the optimizer stay. desc and info can be NULL.
 *
 * path: a safetensors file, or an index (a name that ends with ".json") beside its files. If the
 * file does not exist, "path.index.json" is tried. Every rank opens the files. Symbolic links are
 * followed, because the cache of Hugging Face consists of them. A name in an index that leads out
 * of the index's directory is refused.
 *
 * The file can have a parameter under the name of any of its aliases. If it has several of them,
 * they must have the same bytes.
 *
 * No value changes before all headers have been compared with the parameters. An error of the disk
 * after that leaves a mixture of old and new values, as in dtrain_checkpoint_load.
 * DTRAIN_ERROR_NOT_FOUND: neither the file nor its index exists. */
DTRAIN_API dtrain_result dtrain_checkpoint_import(dtrain_state *state, const char *path,
                                                  const dtrain_import_desc *desc,
                                                  dtrain_import_info *info);
