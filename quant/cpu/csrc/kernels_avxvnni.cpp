// x86-64 with AVX-VNNI, which GCC can ask a processor for from version 12 on.
#if defined(__x86_64__) && __GNUC__ >= 12 && !defined(__clang__)
// Standard headers first: nothing of theirs may be compiled for this instruction set alone.
#include <cmath>
#include <immintrin.h>
#include <type_traits>
#include "kernels.h"
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avxvnni")
#define LRT_VNNI 1
#include "vec_avx2.h"
#define KERNELS kernels_avxvnni
#include "steps.h"
#pragma GCC pop_options
#endif
