// AArch64 with the dot product instructions.
#if defined(__aarch64__)
// Standard headers first: their code must not be compiled for this instruction set.
#include <arm_neon.h>
#include <cmath>
#include <type_traits>
#include "kernels.h"
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif
#include "vec_neon.h"
#define KERNELS kernels_neon
#include "steps.h"
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
