// x86-64 with AVX-512 VNNI and bf16 products, for vision encoders; the other functions are those of kernels_avx512.
#define LRT_BF16_ONLY 1
#include "kernels.h"
#if LRT_BF16_COMPILES
// Standard headers first: their code must not be compiled for this instruction set.
#include <cmath>
#include <immintrin.h>
#include <type_traits>
TARGET_BEGIN(LRT_AVX512 ",avx512bf16")
#include "vec_avx512.h"
#include "steps.h"
TARGET_END

static const Kernels kernels_bf16 = [] {
    Kernels kernels = kernels_avx512;
    kernels.vision[VISION_LINEAR] = vision_linear;
    kernels.vision[VISION_ATTENTION] = vision_attention;
    return kernels;
}();
ADD_KERNELS("avx512bf16", kernels_bf16)
#endif
