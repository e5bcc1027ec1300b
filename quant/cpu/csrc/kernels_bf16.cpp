// x86-64 with AVX-512 VNNI and bf16 products, for vision encoders; the other functions are those of kernels_avx512.
#define LRT_BF16_ONLY 1
#include "kernels.h"
#if LRT_BF16_COMPILES
// Standard headers first: their code must not be compiled for this instruction set.
#include <cmath>
#include <immintrin.h>
#include <type_traits>
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c,avx512bf16")
#include "vec_avx512.h"
#include "steps.h"
#pragma GCC pop_options

// Runs when the library is loaded, on any processor: needs instructions that all of them have.
extern const Kernels kernels_bf16;
const Kernels kernels_bf16 = [] {
    Kernels kernels = kernels_avx512;
    kernels.vision[VISION_LINEAR] = vision_linear;
    kernels.vision[VISION_ATTENTION] = vision_attention;
    return kernels;
}();
#endif
