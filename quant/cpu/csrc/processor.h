// Which instruction sets the processor and the operating system support.
#pragma once

// Compilers with the intrinsics of bf16 and AMX; only Linux grants AMX's registers.
#if defined(__x86_64__) && (defined(__clang__) ? __clang_major__ >= 16 : __GNUC__ >= 11)
#define LRT_BF16_COMPILES 1
#if defined(__linux__)
#define LRT_AMX_COMPILES 1
#endif
#endif
#if defined(__x86_64__) && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#define LRT_AVXVNNI_COMPILES 1
#endif

// Code between TARGET_BEGIN(features) and TARGET_END is compiled for these features.
#define LRT_PRAGMA(...) _Pragma(#__VA_ARGS__)
#if defined(__clang__)
#define TARGET_BEGIN(features) LRT_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define TARGET_END LRT_PRAGMA(clang attribute pop)
#else
#define TARGET_BEGIN(features) LRT_PRAGMA(GCC push_options) LRT_PRAGMA(GCC target(features))
#define TARGET_END LRT_PRAGMA(GCC pop_options)
#endif
#define LRT_AVX2 "avx2,fma,f16c"
#define LRT_AVX512 "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni," LRT_AVX2

struct Processor {
    bool avx2 = false;         // with FMA and F16C
    bool avxvnni = false;      // with avx2
    bool avx512 = false;       // F, BW, DQ, VL and VNNI, with avx2
    bool vbmi = false;         // with avx512
    bool bf16 = false;         // with avx512
    bool amx = false;          // tiles, integer and bf16 products, with bf16: tested by running it
    bool dot_product = false;  // AArch64
    bool i8mm = false;         // products of byte matrices and of bf16, with dot_product
    bool any = true;
};

const Processor& processor();
