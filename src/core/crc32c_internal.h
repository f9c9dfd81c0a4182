/* CRC-32C: the checksum of checkpoints. */

#pragma once

#include "core/core_internal.h"

/* Continue the CRC-32C of earlier bytes (0 if there are none). "123456789" gives E3069283. */
DTRAIN__PRIVATE uint32_t dtrain__crc32c(uint32_t crc, const void *data, size_t bytes);
/* Compute the same without special instructions. */
DTRAIN__PRIVATE uint32_t dtrain__crc32c_portable(uint32_t crc, const void *data, size_t bytes);
