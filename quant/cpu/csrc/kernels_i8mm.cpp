// AArch64 with products of byte matrices and of bf16.
#if defined(__aarch64__)
// Standard headers first: their code must not be compiled for this instruction set.
#include <arm_neon.h>
#include <cmath>
#include <type_traits>
#define LRT_SPACE i8mm
#define LRT_I8MM 1
#include "kernels.h"
TARGET_BEGIN("arch=armv8.2-a+dotprod+i8mm+bf16")
#include "vec_neon.h"
#define KERNELS kernels_i8mm
#include "steps.h"
TARGET_END
ADD_KERNELS("i8mm", kernels_i8mm)
#endif
