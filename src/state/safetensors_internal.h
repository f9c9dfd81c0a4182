/* safetensors: headers of tensor files, written and read. */

#pragma once

#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/json_internal.h"
#include "state/storage.h"

#define DTRAIN__TENSOR_DIMS 16
#define DTRAIN__TENSOR_NAME 512 /* bytes of a name, its 0 included */

/* Numbers of the format's types: the types of dtrain_dtype keep their numbers, others follow. */
enum { DTRAIN__STORED_U8 = 6, DTRAIN__STORED_F64 = 5, DTRAIN__STORED_TYPES = 22 };

/* One tensor of a file. */
typedef struct dtrain__stored {
    const char *name;
    uint32_t dtype; /* number of its type */
    int dims;
    int64_t shape[DTRAIN__TENSOR_DIMS];
    uint64_t begin, end; /* offsets in bytes, from the beginning of the data */
    const void *user;    /* reader of the tensor, set by the caller; NULL: none */
} dtrain__stored;

/* The tensors of a file. */
typedef struct dtrain__tensor_file {
    const dtrain_allocator *allocator;
    dtrain__stored *tensors; /* (room), count in use, sorted by name */
    size_t count, room;
    char *names; /* (names_bytes) */
    size_t names_bytes;
    const char *metadata, *metadata_end; /* key, 0, text, 0, ..., in names; NULL: none */
    uint64_t data;                       /* offset of the data in the file, in bytes */
    uint32_t crc;                        /* checksum of the header, if read from a file */
} dtrain__tensor_file;

/* Write the header of a file to an empty text: add each tensor in the order of its data, from byte
 * 0 on, then end. metadata is a JSON object of strings. End pads the header with blanks to a
 * multiple of 8 bytes and parses it: a header that no reader would accept, for example with a name
 * that occurs twice, is DTRAIN_ERROR_DATA. */
DTRAIN__PRIVATE void dtrain__safetensors_add(dtrain__text *text, const dtrain__stored *tensor);
DTRAIN__PRIVATE dtrain_result dtrain__safetensors_end(dtrain__text *text, const char *metadata,
                                                      uint64_t data_bytes);
/* Read the header of a file, check its checksum (crc: 8 digits; NULL: unknown), and parse it. This
 * takes at most six times the memory of the header. After an error, *out needs no free. */
DTRAIN__PRIVATE dtrain_result dtrain__safetensors_read(const dtrain_storage *storage,
                                                       const char *path, const char *crc,
                                                       const dtrain_allocator *allocator,
                                                       dtrain__tensor_file *out);
/* Parse and check a header in memory (bytes), which belongs to a file of file_bytes. */
DTRAIN__PRIVATE dtrain_result dtrain__safetensors_parse(const char *path, const char *header,
                                                        size_t bytes, uint64_t file_bytes,
                                                        const dtrain_allocator *allocator,
                                                        dtrain__tensor_file *out);
/* Find a tensor by name; NULL: none. */
DTRAIN__PRIVATE dtrain__stored *dtrain__safetensors_find(const dtrain__tensor_file *file,
                                                         const char *name);
DTRAIN__PRIVATE void dtrain__safetensors_free(dtrain__tensor_file *file);
/* Return the bytes of an element of a type, or 0 if it has fewer than 8 bits; and the type's name
 * in the format ("F32"). */
DTRAIN__PRIVATE size_t dtrain__stored_bytes(uint32_t dtype);
DTRAIN__PRIVATE const char *dtrain__stored_name(uint32_t dtype);
