/* What other files may use of device/ beside the public API. */

#pragma once

#include "core/platform_internal.h"
#include "device/backend.h"

/* device/device.c */
DTRAIN__PRIVATE bool dtrain__on_host(dtrain_device *device, const void *memory);
