/* The structure of a state, for checkpoints. */

#pragma once

#include "core/core_internal.h"
#include "core/log.h"
#include "state/state.h"

#define DTRAIN__SETTING 256 /* bytes of a key or its text, the 0 included */

typedef enum dtrain__scalar_type {
    DTRAIN__SCALAR_U32 = 0,
    DTRAIN__SCALAR_U64 = 1,
    DTRAIN__SCALAR_I64 = 2,
    DTRAIN__SCALAR_F32 = 3,
    DTRAIN__SCALAR_TYPES = 4
} dtrain__scalar_type;

typedef struct dtrain__scalar {
    const char *name; /* "optimizer.step" */
    uint32_t type;    /* dtrain__scalar_type */
    void *memory;     /* (1) host memory */
} dtrain__scalar;

struct dtrain_state {
    dtrain_world *world;
    dtrain_allocator allocator;
    dtrain_state_desc desc;
    dtrain_comm *comm; /* the ranks that save and load together */
    dtrain_device *device;
    dtrain_state_tensor *tensors; /* (tensor_room), tensor_count in use */
    size_t tensor_count, tensor_room;
    dtrain__scalar scalars[16];
    size_t scalar_count;

    /* Its history, as rank 0 knows it: the run of the checkpoint that was loaded or saved last, 0 =
     * unknown, and the step, -1 = there was none. */
    uint64_t run;
    int64_t step;
};

/* state/state.c */
DTRAIN__PRIVATE size_t dtrain__state_bytes(uint32_t dtype);
DTRAIN__PRIVATE const char *dtrain__state_kind_name(uint32_t kind);
DTRAIN__PRIVATE dtrain_result dtrain__state_check(const dtrain_state *state, const char *call);
DTRAIN__PRIVATE const dtrain_state_tensor *dtrain__state_find(const dtrain_state *state,
                                                              uint32_t kind, const char *name);
DTRAIN__PRIVATE uint64_t dtrain__scalar_get(const dtrain__scalar *scalar);
DTRAIN__PRIVATE void dtrain__scalar_set(const dtrain__scalar *scalar, uint64_t bits);
