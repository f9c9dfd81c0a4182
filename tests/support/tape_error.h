/* tape_error.h: the error that sticks to a tape, whose sentence is then the last one. */
#ifndef TAPE_ERROR_H
#define TAPE_ERROR_H

#include "dtrain.h"

static inline dtrain_result tape_error(const dtrain_tape *tape)
{
    dtrain_tape_info info;
    dtrain_tape_query(tape, &info);
    return info.error;
}

#endif
