// x86-64 with AVX-512 VNNI.
#if defined(__x86_64__)
// Standard headers first: their code must not be compiled for this instruction set.
#include <cmath>
#include <immintrin.h>
#include <type_traits>
#define LRT_SPACE avx512
#include "kernels.h"
TARGET_BEGIN(LRT_AVX512)
#include "vec_avx512.h"
#define KERNELS kernels_avx512
#include "steps.h"
TARGET_END
ADD_KERNELS("avx512", kernels_avx512)
#endif
