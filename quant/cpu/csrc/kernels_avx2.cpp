// x86-64 with AVX2, FMA and F16C.
#if defined(__x86_64__)
// Standard headers first: their code must not be compiled for this instruction set.
#include <cmath>
#include <immintrin.h>
#include <type_traits>
#define LRT_SPACE avx2
#include "kernels.h"
TARGET_BEGIN(LRT_AVX2)
#define LRT_VNNI 0
#include "vec_avx2.h"
#define KERNELS kernels_avx2
#include "steps.h"
TARGET_END
ADD_KERNELS("avx2", kernels_avx2)
#endif
