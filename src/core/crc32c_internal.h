/* CRC-32C: the checksum of checkpoints. */

#pragma once

#include "core/core_internal.h"

/* Return the CRC-32C of bytes that follow others of checksum `crc`; 0 where nothing goes before.
 * "123456789" has E3069283. */
DTRAIN__PRIVATE uint32_t dtrain__crc32c(uint32_t crc, const void *data, size_t bytes);
/* The same without special instructions. */
DTRAIN__PRIVATE uint32_t dtrain__crc32c_portable(uint32_t crc, const void *data, size_t bytes);
