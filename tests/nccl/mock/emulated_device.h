/* emulated_device.h: the mock of NCCL on the emulated CUDA device, where collectives are operations on its
 * streams. late_device.h is the other device that the mock runs on. */
#ifndef DTRAIN_TEST_EMULATED_DEVICE_H
#define DTRAIN_TEST_EMULATED_DEVICE_H

#include "cuda_emulation.h"
#include "nccl_mock.h"

bool nccl_mock_enqueue(cudaStream_t stream, bool (*step)(void *), const void *state, size_t bytes)
{
    return dtrain_emulation_enqueue_step(stream, step, state, bytes);
}

bool nccl_mock_retain(cudaStream_t stream, void (*release)(void *), void *user)
{
    return dtrain_emulation_retain(stream, release, user);
}

void nccl_mock_advance(void) { dtrain_emulation_advance(); }
bool nccl_mock_is_idle(void) { return dtrain_emulation_advance() == 0; }

/* Both ends; AddressSanitizer sees what lies in between. */
bool nccl_mock_is_device_memory(const void *memory, size_t bytes)
{
    struct cudaPointerAttributes first, last;
    return cudaPointerGetAttributes(&first, memory) == cudaSuccess &&
           cudaPointerGetAttributes(&last, (const char *)memory + bytes - 1) == cudaSuccess &&
           first.type == cudaMemoryTypeDevice && last.type == cudaMemoryTypeDevice;
}

void *nccl_mock_device_alloc(size_t bytes)
{
    void *memory = NULL;
    return cudaMalloc(&memory, bytes) == cudaSuccess ? memory : NULL;
}

void nccl_mock_device_free(void *memory) { cudaFree(memory); }

#endif
