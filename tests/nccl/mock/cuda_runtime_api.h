/* cuda_runtime_api.h: the little of CUDA's header that dtrain_nccl.h and nccl.h need, for machines without
 * the toolkit. late_device.h implements the functions. */
#ifndef DTRAIN_TEST_CUDA_RUNTIME_API_H
#define DTRAIN_TEST_CUDA_RUNTIME_API_H

#ifdef __cplusplus
extern "C" {
#endif

typedef struct CUstream_st *cudaStream_t;

typedef enum cudaError { cudaSuccess = 0, cudaErrorInvalidValue = 1 } cudaError_t;

cudaError_t cudaGetDevice(int *device);
cudaError_t cudaSetDevice(int device);
const char *cudaGetErrorString(cudaError_t error);

#ifdef __cplusplus
}
#endif

#endif
