// x86-64 with AVX2, FMA and F16C.
#if defined(__x86_64__)
// Standard headers first: their code must not be compiled for this instruction set.
#include <cmath>
#include <immintrin.h>
#include <type_traits>
#include "kernels.h"
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
#define LRT_VNNI 0
#include "vec_avx2.h"
#define KERNELS kernels_avx2
#include "steps.h"
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
