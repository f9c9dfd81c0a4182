/* dtrain itself, compiled as C and linked with the C++ program. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
