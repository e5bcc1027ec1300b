// Any processor. Rarely used, and at -O3 it would take half of the compile time.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O2")
#if defined(__aarch64__)  // GCC 12 miscompiles these loops: formats with two scales a group, 4-bit KV
#pragma GCC optimize("no-tree-loop-vectorize")
#endif
#endif
#define LRT_SPACE portable
#include "kernels.h"
#include "vec_portable.h"
#define KERNELS kernels_portable
#include "steps.h"
ADD_KERNELS("portable", kernels_portable)
