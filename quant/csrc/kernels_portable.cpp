// Any processor. Rarely the one that runs, and with O3 it would take half of the compiler's time.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O2")
#endif
#include "kernels.h"
#include "vec_portable.h"
#define KERNELS kernels_portable
#include "steps.h"
