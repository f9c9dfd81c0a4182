/* cuda_runtime_api.h, stand-in: CUDA's header for C programs, whose types and functions are in cuda_runtime.h
 * here. */
#ifndef DTRAIN_EMULATED_CUDA_RUNTIME_API_H
#define DTRAIN_EMULATED_CUDA_RUNTIME_API_H

#include "cuda_runtime.h"

#endif
