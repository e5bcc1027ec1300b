// x86-64 with AVX-512 VNNI and AMX's products of integers and of bf16.
#define LRT_AMX 1
#define LRT_SPACE amx
#include "kernels.h"
#if LRT_AMX_COMPILES
// Standard headers first: their code must not be compiled for this instruction set.
#include <cmath>
#include <immintrin.h>
#include <type_traits>
TARGET_BEGIN(LRT_AVX512 ",amx-tile,amx-int8,amx-bf16,avx512bf16")
#include "vec_avx512.h"
#define KERNELS kernels_amx
#include "steps.h"
TARGET_END
ADD_KERNELS("amx", kernels_amx)
#endif
