// Any processor. Rarely the one that runs, and with O3 it would take half of the compiler's time.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O2")
#if defined(__aarch64__)  // of these loops GCC 12 makes wrong code there: formats with two scales a group, KV in 4 bits
#pragma GCC optimize("no-tree-loop-vectorize")
#endif
#endif
#include "kernels.h"
#include "vec_portable.h"
#define KERNELS kernels_portable
#include "steps.h"
