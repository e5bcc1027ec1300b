// x86-64 with AVX-VNNI, which GCC can detect from version 12 on.
#if defined(__x86_64__) && __GNUC__ >= 12 && !defined(__clang__)
// Standard headers first: their code must not be compiled for this instruction set.
#include <cmath>
#include <immintrin.h>
#include <type_traits>
#include "kernels.h"
#pragma GCC push_options
#if defined(LRT_EVEX)  // AVX-512's encoding of the same instructions, for tests: scripts/avxvnni
#pragma GCC target("avx2,fma,f16c,avx512vl,avx512vnni")
#define _mm256_dpbusd_avx_epi32 _mm256_dpbusd_epi32
#define _mm256_dpwssd_avx_epi32 _mm256_dpwssd_epi32
#else
#pragma GCC target("avx2,fma,f16c,avxvnni")
#endif
#define LRT_VNNI 1
#include "vec_avx2.h"
#define KERNELS kernels_avxvnni
#include "steps.h"
#pragma GCC pop_options
#endif
