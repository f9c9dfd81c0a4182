/* nvToolsExt.h: the two calls of NVTX that dtrain_cuda.cu makes; cuda_emulation.cpp counts them. */
#ifndef EMULATION_NVTX_H
#define EMULATION_NVTX_H
extern "C" {
int nvtxRangePushA(const char *name);
int nvtxRangePop(void);
}
#endif
