// AArch64 with the dot product instructions.
#if defined(__aarch64__)
// Standard headers first: their code must not be compiled for this instruction set.
#include <arm_neon.h>
#include <cmath>
#include <type_traits>
#define LRT_SPACE neon
#include "kernels.h"
TARGET_BEGIN("arch=armv8.2-a+dotprod")
#include "vec_neon.h"
#define KERNELS kernels_neon
#include "steps.h"
TARGET_END
ADD_KERNELS("neon", kernels_neon)
#endif
