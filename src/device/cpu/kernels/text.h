/* The text compiled once per instruction set. */

#include "device/cpu/kernels/vectors.h"
#include "device/cpu/kernels/mix.h"
#if DTRAIN__MODELS
#include "device/cpu/kernels/activation.h"
#include "device/cpu/kernels/gemm.h"
#include "device/cpu/kernels/pairs.h"
#include "device/cpu/kernels/convolution.h"
#include "device/cpu/kernels/winograd.h"
#include "device/cpu/kernels/attention.h"
#include "device/cpu/kernels/batchnorm.h"
#endif
#if DTRAIN__ISA != 3 /* AVX-512 takes these kernels from AVX2 */
#include "device/cpu/kernels/elementwise.h"
#include "device/cpu/kernels/sparse.h"
#if DTRAIN__MODELS
#include "device/cpu/kernels/dropout.h"
#include "device/cpu/kernels/muon.h"
#include "device/cpu/kernels/layernorm.h"
#include "device/cpu/kernels/pointwise.h"
#include "device/cpu/kernels/tokens.h"
#include "device/cpu/kernels/rows.h"
#include "device/cpu/kernels/pooling.h"
#endif
#endif
#include "device/cpu/kernels/table.h"

/* The other macros have the same text in every instance. */
#undef DTRAIN__SUFFIX
#undef DTRAIN__W
#undef DTRAIN__ON
#undef DTRAIN__HELPER
#undef DTRAIN__SHORT_MR
#undef DTRAIN__SHORT
#undef DTRAIN__MR
#undef DTRAIN__ROWS
#undef DTRAIN__NARROW_MR
#undef DTRAIN__NARROW_ROWS
#undef DTRAIN__LANES
#undef DTRAIN__UNROLL
