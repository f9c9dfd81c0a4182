/* The structure of a state, for checkpoints. */

#pragma once

#include "core/core_internal.h"
#include "core/log.h"
#include "state/source_internal.h"
#include "state/state.h"

#define DTRAIN__SETTING 256 /* bytes of a key or its text, the 0 included */

struct dtrain_state {
    dtrain_world *world;
    dtrain_allocator allocator;
    dtrain_state_desc desc;
    dtrain_comm *comm; /* the ranks that save and load together */
    dtrain_device *device;
    dtrain_state_tensor *tensors; /* (tensor_room), tensor_count in use */
    size_t tensor_count, tensor_room;

    /* Its history, as rank 0 knows it: the run of the checkpoint that was loaded or saved last, 0 =
     * unknown, and the step, -1 = there was none. */
    uint64_t run;
    int64_t step;
};

/* state/state.c */
DTRAIN__PRIVATE size_t dtrain__state_bytes(uint32_t dtype);
DTRAIN__PRIVATE const char *dtrain__state_kind_name(uint32_t kind);
/* Tell whether two ranks, or a rank and a file, describe the same tensor in the same way. */
DTRAIN__PRIVATE bool dtrain__state_alike(const dtrain_state_tensor *a,
                                         const dtrain_state_tensor *b);
