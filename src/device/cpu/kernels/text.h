/* What is compiled once for each instruction set. */

#include "device/cpu/kernels/vectors.h"
#include "device/cpu/kernels/elementwise.h"
#include "device/cpu/kernels/layernorm.h"
#include "device/cpu/kernels/tokens.h"
#include "device/cpu/kernels/sparse.h"
#include "device/cpu/kernels/attention.h"
#include "device/cpu/kernels/table.h"

#undef DTRAIN__SUFFIX
#undef DTRAIN__W
#undef DTRAIN__ON
