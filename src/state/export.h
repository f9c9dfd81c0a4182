/* Whole weights
 *
 * The model as other programs know it: a safetensors file with the whole value of every parameter
 * and nothing else, whatever the number of ranks and the strategy. PyTorch and transformers read
 * it, and import reads what they write.
 *
 *     dtrain_export_desc how = {0};
 *     how.names = names;                 as Hugging Face calls them; NULL: as they are called here
 *     dtrain_checkpoint_export(strategy, "model.safetensors", &how);
 *
 *     dtrain_import_desc from = {0};
 *     from.names = names;                the same table, read the other way round
 *     dtrain_checkpoint_import(state, "model.safetensors", &from, NULL);
 *
 * These files do not continue a run: a checkpoint does, which has the optimizer's state as well. */

#pragma once

#include "core/api.h"
#include "core/dtype.h"
#include "core/result.h"
#include "strategy/strategy.h"
#include "state/state.h"
#include "state/storage.h"

/* The name and layout of a parameter in a file. Every zero is the default. */
typedef struct dtrain_export_name {
    int64_t rows;     /* the file has only the first rows, as of a padded vocabulary, and import
                         sets the others to zero; 0 = all. Elements of a 1-D parameter */
    const char *name; /* NULL = the parameter's own; "" = it is not in the file */
    bool transpose;   /* 2-D: (rows, columns) here is (columns, rows) there, as in GPT-2's Conv1D */
} dtrain_export_name;

/* Every zero is the default written beside the field; the same on every rank. */
typedef struct dtrain_export_desc {
    uint32_t dtype;                  /* of the file: 0 = F32, or BF16, F16, rounded to nearest */
    const dtrain_export_name *names; /* (param_count), unused for aliases; NULL = zeros */
    const dtrain_storage *storage;   /* NULL = the file system */
} dtrain_export_desc;

/* Write the values of all parameters to a file, tied ones once, in the order of the parameters.
 * Collective, between two steps. Every rank holds one whole parameter at a time in host memory, and
 * rank 0 writes. desc may be NULL.
 *
 * The file is written as path.tmp, brought to the disk, and renamed: what has the name is whole,
 * and an error leaves a file that was there before as it was.
 *
 * DTRAIN_ERROR_ARGUMENT on all ranks for a desc that cannot be followed (a name that occurs twice,
 * a transpose of what is not 2-D, too many rows), DTRAIN_ERROR_FILE for a disk that fails. */
DTRAIN_API dtrain_result dtrain_checkpoint_export(dtrain_strategy *strategy, const char *path,
                                                  const dtrain_export_desc *desc);

/* Every zero is the default written beside the field; the same on every rank. */
typedef struct dtrain_import_desc {
    bool partial; /* parameters that the file lacks, or has in another shape or type, stay as they
                     are, and extra tensors are left out; false: either is an error that names
                     them */
    const dtrain_export_name *names; /* (param_count), as in dtrain_export_desc, and of aliases the
                                        name; NULL = zeros */
    const char *prefix;              /* a name that is not in the file is tried with this before it:
                                  "transformer."; NULL = none */
    const char *const *ignore; /* ends of names, then NULL: tensors that have one do not count as
                                  extra: ".attn.bias"; NULL = none */
    const dtrain_storage *storage; /* NULL = the file system */
} dtrain_import_desc;

typedef struct dtrain_import_info {
    uint64_t values; /* parameters that were set */
    uint64_t bytes;  /* of values that this rank read */
    double seconds;
    char note[600]; /* with partial: what was not set, and what was left out; empty: nothing */
} dtrain_import_info;

/* Read the values of parameters from a file of F32, BF16 or F16, or from several with an index.
 * Collective, between two steps. Every rank reads what it keeps, block by block; of a transposed
 * one it reads all rows of its columns, and keeps its piece. Then values are published, and an
 * optimizer's master copies set, as dtrain_state_changed does: the state's desc has the optimizer
 * whose copies these are. Its moments and steps stay. desc and info may be NULL.
 *
 * path: a safetensors file, or an index (a name that ends with ".json") beside its files; where
 * there is no such file, "path.index.json" is tried. Every rank opens it. Symbolic links are
 * followed, as the cache of Hugging Face consists of them; a name in an index that leads out of its
 * directory is refused.
 *
 * A parameter with aliases may be there under the name of any of them; where several are there,
 * they must have the same bytes.
 *
 * Nothing is changed before everything in the headers was compared with the parameters. An error of
 * the disk after that leaves old and new values, as in dtrain_checkpoint_load.
 * DTRAIN_ERROR_NOT_FOUND: neither the file nor an index of it is there. */
DTRAIN_API dtrain_result dtrain_checkpoint_import(dtrain_state *state, const char *path,
                                                  const dtrain_import_desc *desc,
                                                  dtrain_import_info *info);
