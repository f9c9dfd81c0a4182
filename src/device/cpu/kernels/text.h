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
#include "device/cpu/kernels/layernorm.h"
#include "device/cpu/kernels/pointwise.h"
#include "device/cpu/kernels/tokens.h"
#include "device/cpu/kernels/rows.h"
#include "device/cpu/kernels/pooling.h"
#endif
#endif

/* The table of this instruction set. */
#define DTRAIN__ENTRY(name) DTRAIN__K(name),
#define DTRAIN__ABSENT(name) NULL,
#if DTRAIN__ISA == 3
#define DTRAIN__SHARED(name) dtrain__##name##_avx2,
#else
#define DTRAIN__SHARED DTRAIN__ENTRY
#endif
#if !DTRAIN__MODELS
#define DTRAIN__PRODUCTS NULL, NULL
#define DTRAIN__ENTRIES \
    DTRAIN__RANGES(DTRAIN__SHARED, DTRAIN__ABSENT, DTRAIN__ABSENT, DTRAIN__ABSENT)
#else
#define DTRAIN__PRODUCTS &DTRAIN__K(isa), &DTRAIN__K(convolutions)
#if DTRAIN__FAST
#define DTRAIN__ENTRIES DTRAIN__RANGES(DTRAIN__SHARED, DTRAIN__SHARED, DTRAIN__ENTRY, DTRAIN__ENTRY)
#else
#define DTRAIN__ENTRIES \
    DTRAIN__RANGES(DTRAIN__SHARED, DTRAIN__SHARED, DTRAIN__ENTRY, DTRAIN__ABSENT)
#endif
#endif
DTRAIN__UNUSED static const dtrain__kernels DTRAIN__K(kernels) = {
    DTRAIN__STRING(DTRAIN__SUFFIX), DTRAIN__PRODUCTS, DTRAIN__K(mix), DTRAIN__ENTRIES};
#undef DTRAIN__SHARED
#undef DTRAIN__PRODUCTS
#undef DTRAIN__ENTRIES

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
