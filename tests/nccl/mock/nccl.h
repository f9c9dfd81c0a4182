/* nccl.h: a stand-in for NVIDIA's header, with what dtrain_nccl.h uses, as of the version that
 * NCCL_MOCK_VERSION names (2.18.1 is 21801). What came later is not declared, so that a missing gate does not
 * compile. nccl_mock.c implements it. */
#ifndef DTRAIN_TEST_NCCL_H
#define DTRAIN_TEST_NCCL_H

#include <cuda_runtime_api.h>
#include <limits.h>
#include <stddef.h>

#ifndef NCCL_MOCK_VERSION
#define NCCL_MOCK_VERSION 22809
#endif

#define NCCL_MAJOR (NCCL_MOCK_VERSION / 10000)
#define NCCL_MINOR (NCCL_MOCK_VERSION % 10000 / 100)
#define NCCL_PATCH (NCCL_MOCK_VERSION % 100)
#define NCCL_VERSION_CODE NCCL_MOCK_VERSION
#define NCCL_VERSION(X, Y, Z) \
    (((X) <= 2 && (Y) <= 8) ? (X)*1000 + (Y)*100 + (Z) : (X)*10000 + (Y)*100 + (Z))

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ncclComm *ncclComm_t;

#define NCCL_UNIQUE_ID_BYTES 128
typedef struct {
    char internal[NCCL_UNIQUE_ID_BYTES];
} ncclUniqueId;

typedef enum {
    ncclSuccess = 0,
    ncclUnhandledCudaError = 1,
    ncclSystemError = 2,
    ncclInternalError = 3,
    ncclInvalidArgument = 4,
    ncclInvalidUsage = 5,
    ncclRemoteError = 6,
    ncclInProgress = 7,
    ncclNumResults = 8
} ncclResult_t;

#define NCCL_CONFIG_UNDEF_INT INT_MIN
#define NCCL_SPLIT_NOCOLOR -1

typedef struct ncclConfig {
    size_t size;
    unsigned int magic;
    unsigned int version;
    int blocking;
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 17, 1)
    int minCTAs, maxCTAs;
#endif
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 18, 1)
    int splitShare;
#endif
} ncclConfig_t;

#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 18, 1)
#define NCCL_CONFIG_NEWER , NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT
#elif NCCL_VERSION_CODE >= NCCL_VERSION(2, 17, 1)
#define NCCL_CONFIG_NEWER , NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT
#else
#define NCCL_CONFIG_NEWER
#endif
#define NCCL_CONFIG_INITIALIZER                              \
    {                                                        \
        sizeof(ncclConfig_t), 0xcafebeef, NCCL_VERSION_CODE, \
            NCCL_CONFIG_UNDEF_INT NCCL_CONFIG_NEWER          \
    }

typedef enum { ncclSum = 0, ncclProd = 1, ncclMax = 2, ncclMin = 3, ncclAvg = 4 } ncclRedOp_t;

typedef enum {
    ncclInt8 = 0,
    ncclUint8 = 1,
    ncclInt32 = 2,
    ncclUint32 = 3,
    ncclInt64 = 4,
    ncclUint64 = 5,
    ncclFloat16 = 6,
    ncclFloat32 = 7,
    ncclFloat64 = 8,
    ncclBfloat16 = 9
} ncclDataType_t;

ncclResult_t ncclGetVersion(int *version);
ncclResult_t ncclGetUniqueId(ncclUniqueId *id);
const char *ncclGetErrorString(ncclResult_t result);
const char *ncclGetLastError(ncclComm_t comm);

ncclResult_t ncclCommInitRank(ncclComm_t *comm, int nranks, ncclUniqueId id, int rank);
ncclResult_t ncclCommCount(const ncclComm_t comm, int *count);
ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *device);
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank);
ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int nranks, ncclUniqueId id, int rank,
                                    ncclConfig_t *config);
ncclResult_t ncclCommFinalize(ncclComm_t comm);
ncclResult_t ncclCommDestroy(ncclComm_t comm);
ncclResult_t ncclCommAbort(ncclComm_t comm);
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error);

ncclResult_t ncclAllReduce(const void *send, void *recv, size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclReduceScatter(const void *send, void *recv, size_t recvcount, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclAllGather(const void *send, void *recv, size_t sendcount, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclBroadcast(const void *send, void *recv, size_t count, ncclDataType_t type,
                           int root, ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclReduce(const void *send, void *recv, size_t count, ncclDataType_t type,
                        ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclSend(const void *send, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclRecv(void *recv, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream);
ncclResult_t ncclGroupStart(void);
ncclResult_t ncclGroupEnd(void);

#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 18, 1)
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *newcomm,
                           ncclConfig_t *config);
#endif
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 19, 1)
ncclResult_t ncclMemAlloc(void **memory, size_t bytes);
ncclResult_t ncclMemFree(void *memory);
ncclResult_t ncclCommRegister(const ncclComm_t comm, void *memory, size_t bytes, void **handle);
ncclResult_t ncclCommDeregister(const ncclComm_t comm, void *handle);
#endif

#ifdef __cplusplus
}
#endif

#endif
