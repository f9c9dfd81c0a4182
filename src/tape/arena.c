/* The tape's memory
 *
 * Chunks of device or host memory, the arenas that they form, tensors in them. */

#include "core/platform_internal.h"
#include "comm/comm.h"
#include "tape/tape_internal.h"

#define DTRAIN__TAPE_HOST_BYTES 65536u /* some hundred nodes and tensors */

/* Return the communicator of the ranks that hold one model together: collectives and messages reach
 * its memory without a copy. NULL: no other rank reads the tape's memory. */
static dtrain_comm *dtrain__sharing(const dtrain_tape *tape)
{
    return tape->groups.tensor || tape->stages ? tape->groups.model : NULL;
}

DTRAIN__PRIVATE void dtrain__arena_add(dtrain_tape *tape, dtrain__bump *arena,
                                       dtrain_device *device)
{
    memset(arena, 0, sizeof *arena);
    arena->device = device;
    arena->next = tape->all_arenas;
    tape->all_arenas = arena;
}

/* Free the memory of all arenas, and the slots. */
DTRAIN__PRIVATE void dtrain__slots_free(dtrain_tape *tape)
{
    dtrain_comm *sharing = dtrain__sharing(tape);
    for (dtrain__bump *arena = tape->all_arenas; arena; arena = arena->next) {
        dtrain_device *device = arena->device;
        for (dtrain__chunk *chunk = arena->first, *next; chunk; chunk = next) {
            next = chunk->next;
            if (!device) dtrain__free(&tape->allocator, chunk->memory, 1, chunk->bytes);
            else if (sharing) dtrain_comm_free(sharing, chunk->memory, chunk->bytes);
            else device->ops->free(device, chunk->memory, chunk->bytes);
            dtrain__free(&tape->allocator, chunk, 1, sizeof *chunk);
        }
    }
    dtrain__free(&tape->allocator, tape->slots, tape->slot_count, sizeof *tape->slots);
    tape->all_arenas = NULL;
    tape->slots = tape->slot = NULL;
    tape->slot_count = 0;
}

DTRAIN__PRIVATE dtrain_result dtrain__slots_create(dtrain_tape *tape, uint32_t slot_count)
{
    dtrain__slots_free(tape);
    tape->slots = (dtrain__pass_slot *)dtrain__alloc(&tape->allocator, slot_count,
                                                     sizeof *tape->slots, "slots of passes");
    if (!tape->slots) return DTRAIN_ERROR_MEMORY;
    tape->slot_count = slot_count;
    tape->slot = tape->slots;
    for (int i = 0; i < DTRAIN__TAPE_ARENAS; i++)
        dtrain__arena_add(tape, &tape->arenas[i], i ? tape->device : NULL);
    for (uint32_t s = 0; s < slot_count; s++)
        for (int i = 0; i < DTRAIN__PASS_ARENAS; i++)
            dtrain__arena_add(tape, &tape->slots[s].arenas[i], i ? tape->device : NULL);
    return DTRAIN_OK;
}

/* Insert a chunk after the chunk in use. NULL when there is no memory; the error sticks. */
static dtrain__chunk *dtrain__chunk_create(dtrain_tape *tape, dtrain__bump *arena, size_t bytes)
{
    const dtrain_allocator *host = &tape->allocator;
    dtrain_device *device = arena->device;
    dtrain_result result = DTRAIN_ERROR_MEMORY;
    void *memory = NULL;
    dtrain__chunk *chunk = (dtrain__chunk *)dtrain__alloc(host, 1, sizeof *chunk, "the tape");
    dtrain_comm *sharing = dtrain__sharing(tape);
    if (chunk && device)
        result = sharing ? dtrain_comm_alloc(sharing, bytes, &memory)
                         : device->ops->alloc(device, bytes, &memory);
    else if (chunk) memory = dtrain__alloc(host, 1, bytes, "nodes of the tape");
    if (!memory) {
        dtrain__tape_stick(tape, result);
        dtrain__free(host, chunk, 1, sizeof *chunk);
        return NULL;
    }
    chunk->bytes = bytes;
    chunk->memory = (char *)memory;
    chunk->next = *arena->at;
    *arena->at = chunk;
    arena->bytes += bytes;
    arena->allocations++;
    return chunk;
}

/* Rewind an arena, whose contents will be overwritten. */
DTRAIN__PRIVATE void dtrain__bump_rewind(dtrain__bump *arena)
{
    arena->at = &arena->first;
    arena->used = 0;
}

/* Take bytes of an arena: from the chunk in use, from the next chunk that is large enough, or from
 * a new one. The rest of a chunk that is passed stays unused until the arena is rewound. */
static void *dtrain__bump_take(dtrain_tape *tape, dtrain__bump *arena, size_t bytes)
{
    bytes = dtrain__round_up(bytes, DTRAIN__CACHE_LINE);
    while (*arena->at && (*arena->at)->bytes - arena->used < bytes) {
        arena->at = &(*arena->at)->next;
        arena->used = 0;
    }
    if (!*arena->at) {
        const bool small = !arena->device && bytes < DTRAIN__TAPE_HOST_BYTES;
        if (!dtrain__chunk_create(tape, arena, small ? DTRAIN__TAPE_HOST_BYTES : bytes))
            return NULL;
    }
    void *memory = (*arena->at)->memory + arena->used;
    arena->used += bytes;
    return memory;
}

/* Take zeroed host memory. */
DTRAIN__PRIVATE void *dtrain__take_host(dtrain_tape *tape, dtrain__bump *arena, size_t bytes)
{
    void *memory = dtrain__bump_take(tape, arena, bytes);
    if (memory) memset(memory, 0, bytes);
    return memory;
}

/* Return the bytes of values; 0 if they are too many, and the error sticks. */
static size_t dtrain__values_bytes(dtrain_tape *tape, int64_t count, uint32_t dtype)
{
    size_t bytes;
    if (dtrain__size_mul((size_t)count, dtrain_dtype_bytes((dtrain_dtype)dtype), &bytes) &&
        bytes <= PTRDIFF_MAX - DTRAIN__CACHE_LINE)
        return dtrain__round_up(bytes, DTRAIN__CACHE_LINE);
    dtrain__tape_stick(
        tape, dtrain_fail(DTRAIN_ERROR_MEMORY,
                          "a tensor of %lld elements is more than this machine can address",
                          (long long)count));
    return 0;
}

/* Take device memory for count values of an arena, contents undefined. */
DTRAIN__PRIVATE void *dtrain__take_values(dtrain_tape *tape, dtrain__bump *arena, int64_t count,
                                          uint32_t dtype)
{
    const size_t bytes = dtrain__values_bytes(tape, count, dtype);
    return bytes ? dtrain__bump_take(tape, arena, bytes) : NULL;
}

/* Take a free chunk of the pool, or make one. */
DTRAIN__PRIVATE dtrain__chunk *dtrain__scratch_take(dtrain_tape *tape, int64_t count,
                                                    uint32_t dtype)
{
    dtrain__bump *pool = &tape->arenas[DTRAIN__ARENA_GRADIENTS];
    dtrain__chunk *chunk = pool->first;
    const size_t bytes = dtrain__values_bytes(tape, count, dtype);
    if (!bytes) return NULL;
    while (chunk && (chunk->owners || chunk->bytes != bytes)) chunk = chunk->next;
    if (!chunk) chunk = dtrain__chunk_create(tape, pool, bytes);
    if (chunk) chunk->owners = 1;
    return chunk;
}

DTRAIN__PRIVATE void dtrain__scratch_give(dtrain__chunk *chunk)
{
    if (chunk) chunk->owners--;
}

/* Take memory for results of the node or, if node is NULL, memory that lasts until the next begin.
 * A remote node gets an address without memory. */
DTRAIN__PRIVATE void *dtrain__take_data(dtrain_tape *tape, const dtrain_node *node, int64_t count,
                                        uint32_t dtype)
{
    dtrain__bump *arena = &tape->slot->arenas[DTRAIN__ARENA_DATA];
    if (node && node->remote) return (void *)DTRAIN__REMOTE;
    if (node && node->dropped) arena = node->segment->region;
    dtrain__cost_keep(node, count, dtype);
    return dtrain__take_values(tape, arena, count, dtype);
}

/* Make a tensor of this pass: the node's result, or (NULL) an input without memory. NULL after an
 * error, which sticks. */
DTRAIN__PRIVATE dtrain_tensor *dtrain__tensor_new(dtrain_tape *tape, const dtrain_node *node,
                                                  dtrain_dtype dtype, uint32_t ndim,
                                                  const int64_t *shape)
{
    dtrain__tape_tensor *made =
        (dtrain__tape_tensor *)dtrain__take_host(tape, tape->slot->arenas, sizeof *made);
    if (!made) return NULL;
    dtrain_tensor *tensor = &made->tensor;
    size_t count = 1;
    for (uint32_t i = 0; i < ndim; i++) {
        /* a product that overflows stays the largest count, which take_data refuses */
        if (!dtrain__size_mul(count, (size_t)shape[i], &count) || count > PTRDIFF_MAX)
            count = PTRDIFF_MAX;
        tensor->shape[i] = shape[i];
    }
    tensor->dtype = dtype;
    tensor->ndim = ndim;
    tensor->count = (int64_t)count;
    tensor->samples = 1;
    tensor->data =
        node ? dtrain__take_data(tape, node, tensor->count, dtype) : (void *)DTRAIN__REMOTE;
    if (node && node->dropped) made->segment = node->segment;
    tape->pass.tensor_count++;
    if (tape->stages && tensor->data) dtrain__stage_made(tape, made, node);
    return tensor->data ? tensor : NULL;
}
