/* safetensors: headers of tensor files, written and read. */

#pragma once

#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/json_internal.h"
#include "state/storage.h"

#define DTRAIN__TENSOR_DIMS 16
#define DTRAIN__TENSOR_NAME 512 /* bytes of a name, its 0 included */

/* Types of the format: those of dtrain_dtype have the same numbers, others follow. */
enum { DTRAIN__STORED_U8 = 6, DTRAIN__STORED_F64 = 5, DTRAIN__STORED_TYPES = 22 };

/* One tensor of a file. */
typedef struct dtrain__stored {
    const char *name;
    uint32_t dtype; /* its number among the types of the format */
    int dims;
    int64_t shape[DTRAIN__TENSOR_DIMS];
    uint64_t begin, end; /* bytes, from the beginning of the data */
    const void *user;    /* who reads the tensor, for the caller; NULL: nobody */
} dtrain__stored;

/* The tensors of a file. */
typedef struct dtrain__tensor_file {
    const dtrain_allocator *allocator;
    dtrain__stored *tensors; /* (room), count in use, sorted by name */
    size_t count, room;
    char *names; /* (names_bytes) */
    size_t names_bytes;
    const char *metadata, *metadata_end; /* key, 0, text, 0, ...; in names; NULL: none */
    uint64_t data;                       /* where the data begins in the file */
    uint32_t crc;                        /* of the header, if it was read from a file */
} dtrain__tensor_file;

/* Write the header of a file to a text that is empty at first: add each tensor, in the order of
 * their data, from byte 0 on, then end. metadata is a JSON object of strings. The header is padded
 * with blanks to a multiple of 8 and read again at once: what would not be read later, a name that
 * occurs twice for example, is DTRAIN_ERROR_DATA. */
DTRAIN__PRIVATE void dtrain__safetensors_add(dtrain__text *text, const dtrain__stored *tensor);
DTRAIN__PRIVATE dtrain_result dtrain__safetensors_end(dtrain__text *text, const char *metadata,
                                                      uint64_t data_bytes);
/* Read the header of a file and check all of it, first its checksum (crc: 8 digits; NULL: it is not
 * known). This takes at most six times the memory of the header, and leaves nothing to free after
 * an error. */
DTRAIN__PRIVATE dtrain_result dtrain__safetensors_read(const dtrain_storage *storage,
                                                       const char *path, const char *crc,
                                                       const dtrain_allocator *allocator,
                                                       dtrain__tensor_file *out);
/* The same for a header that is in memory: header (bytes), of a file of file_bytes. */
DTRAIN__PRIVATE dtrain_result dtrain__safetensors_parse(const char *path, const char *header,
                                                        size_t bytes, uint64_t file_bytes,
                                                        const dtrain_allocator *allocator,
                                                        dtrain__tensor_file *out);
/* Find a tensor by name: NULL when there is none. */
DTRAIN__PRIVATE dtrain__stored *dtrain__safetensors_find(const dtrain__tensor_file *file,
                                                         const char *name);
DTRAIN__PRIVATE void dtrain__safetensors_free(dtrain__tensor_file *file);
/* Return the bytes of an element of a type, 0 if it is smaller than one; and the type's name in the
 * format ("F32"). */
DTRAIN__PRIVATE size_t dtrain__stored_bytes(uint32_t dtype);
DTRAIN__PRIVATE const char *dtrain__stored_name(uint32_t dtype);
