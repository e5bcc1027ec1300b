// x86-64 with AVX-VNNI.
#include "processor.h"
#if LRT_AVXVNNI_COMPILES
// Standard headers first: their code must not be compiled for this instruction set.
#include <cmath>
#include <immintrin.h>
#include <type_traits>
#define LRT_SPACE avxvnni
#include "kernels.h"
#if defined(LRT_EVEX)  // AVX-512's encoding of the same instructions, for tests: scripts/avxvnni
TARGET_BEGIN(LRT_AVX2 ",avx512vl,avx512vnni")
#define _mm256_dpbusd_avx_epi32 _mm256_dpbusd_epi32
#define _mm256_dpwssd_avx_epi32 _mm256_dpwssd_epi32
#else
TARGET_BEGIN(LRT_AVX2 ",avxvnni")
#endif
#define LRT_VNNI 1
#include "vec_avx2.h"
#define KERNELS kernels_avxvnni
#include "steps.h"
TARGET_END
ADD_KERNELS("avxvnni", kernels_avxvnni)
#endif
