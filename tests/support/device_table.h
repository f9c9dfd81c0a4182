/* device_table.h: the table of a device by its name, for tests, whose names are known. */
#ifndef DEVICE_TABLE_H
#define DEVICE_TABLE_H

#include "dtrain.h"

static inline const dtrain_device_ops *device_table(const char *name)
{
    const dtrain_device_ops *ops;
    return dtrain_device_ops_by_name(name, &ops) == DTRAIN_OK ? ops : NULL;
}

#endif
