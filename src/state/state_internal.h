/* The struct of a state, for checkpoints. */

#pragma once

#include "core/core_internal.h"
#include "core/log.h"
#include "state/source_internal.h"
#include "state/state.h"

#define DTRAIN__SETTING 256 /* bytes of a key or its text, with the 0 */

struct dtrain_state {
    dtrain_world *world;
    dtrain_allocator allocator;
    dtrain_state_desc desc;
    dtrain_comm *comm; /* ranks that save and load together */
    dtrain_device *device;
    dtrain_state_tensor *tensors; /* (tensor_room), tensor_count in use */
    size_t tensor_count, tensor_room;

    /* Rank 0: run and step of the checkpoint that was loaded or saved last; run 0 = unknown, step
     * -1 = none. */
    uint64_t run;
    int64_t step;
};

/* state/state.c */
DTRAIN__PRIVATE size_t dtrain__state_bytes(uint32_t dtype);
DTRAIN__PRIVATE const char *dtrain__state_kind_name(uint32_t kind);
/* Tell whether two descriptions of a tensor agree on dtype, shape and `own`. */
DTRAIN__PRIVATE bool dtrain__state_alike(const dtrain_state_tensor *a,
                                         const dtrain_state_tensor *b);
