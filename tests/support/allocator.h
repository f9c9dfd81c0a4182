/* allocator.h: the allocator that tests give to the library. It counts, it fails where it is told to, and it
 * checks that memory comes back with the size that was asked for. Include it after dtrain.h and test.h.
 *
 *     counted_memory memory = {0};
 *     memory.fail_at = 3;                          // the third call returns NULL; 0: none does
 *     desc.allocator = counted_allocator(&memory);
 *     ...
 *     CHECK(memory.live == 0 && memory.wrong == 0);
 *
 * Threads may share one. Processes may, too, if it lies in shared memory (ranks_shared). */
#ifndef DTRAIN_TEST_ALLOCATOR_H
#define DTRAIN_TEST_ALLOCATOR_H

typedef struct counted_memory {
    long fail_at;     /* number of the call that fails, from 1; 0: none */
    bool fail_on;     /* and of every call after it */
    long limit_bytes; /* live_bytes at most; 0: no limit */
    long calls;       /* of alloc, failures included */
    long live;        /* blocks that have not come back */
    long live_bytes;  /* and their bytes */
    long wrong;       /* blocks that came back with another size, or twice */
} counted_memory;

typedef union test_block {
    struct {
        size_t bytes;
        uint64_t magic;
    } is;
    unsigned char align[64];
} test_block;

#define TEST_BLOCK_MAGIC 0x5ca1ab1e5ca1ab1eu

static inline void *counted_alloc(void *user, size_t bytes)
{
    counted_memory *m = (counted_memory *)user;
    const long call = __atomic_add_fetch(&m->calls, 1, __ATOMIC_ACQ_REL);
    test_block *block;
    if (m->fail_at && (call == m->fail_at || (m->fail_on && call > m->fail_at))) return NULL;
    if (__atomic_add_fetch(&m->live_bytes, (long)bytes, __ATOMIC_ACQ_REL) > m->limit_bytes &&
        m->limit_bytes) {
        __atomic_sub_fetch(&m->live_bytes, (long)bytes, __ATOMIC_ACQ_REL);
        return NULL;
    }
    block = (test_block *)malloc(sizeof *block + bytes);
    if (!block) abort();
    block->is.bytes = bytes;
    block->is.magic = TEST_BLOCK_MAGIC;
    memset(block + 1, 0xdb, bytes); /* fresh memory is not zero */
    __atomic_add_fetch(&m->live, 1, __ATOMIC_ACQ_REL);
    return block + 1;
}

static inline void counted_free(void *user, void *memory, size_t bytes)
{
    counted_memory *m = (counted_memory *)user;
    test_block *block = (test_block *)memory - 1;
    if (!memory) return;
    if (block->is.bytes != bytes || block->is.magic != TEST_BLOCK_MAGIC)
        __atomic_add_fetch(&m->wrong, 1, __ATOMIC_ACQ_REL);
    __atomic_sub_fetch(&m->live_bytes, (long)block->is.bytes, __ATOMIC_ACQ_REL);
    __atomic_sub_fetch(&m->live, 1, __ATOMIC_ACQ_REL);
    block->is.magic = 0;
    free(block);
}

static inline dtrain_allocator counted_allocator(counted_memory *m)
{
    dtrain_allocator allocator;
    allocator.alloc = counted_alloc;
    allocator.free = counted_free;
    allocator.user = m;
    return allocator;
}

#endif
