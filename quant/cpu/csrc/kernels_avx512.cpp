// x86-64 with AVX-512 VNNI.
#if defined(__x86_64__)
// Standard headers first: their code must not be compiled for this instruction set.
#include <cmath>
#include <immintrin.h>
#include <type_traits>
#include "kernels.h"
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")
#endif
#include "vec_avx512.h"
#define KERNELS kernels_avx512
#include "steps.h"
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
