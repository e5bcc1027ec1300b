// The hardware interface of the kernels: types, loads, and the few instructions that C++ cannot
// express. tests/ops/cuda implements the same functions on the CPU, where the kernels are tested.
#pragma once

#ifndef EMULATED
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char i8;
typedef short i16;
typedef int i32;
typedef long long i64;

#define FN static __device__ __forceinline__
#define TABLE static __device__ const

// The bytes of a and b (numbered 0 to 7) selected by the four low nibbles of `which`; bit 3 of a
// nibble replicates its byte's sign instead.
FN u32 pick(u32 a, u32 b, u32 which) {
    u32 d;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(which));
    return d;
}

FN float half_to_float(u16 bits) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(bits));
    return f;
}

// The float16 of the lower and of the upper half.
FN float2 two_halves(u32 bits) {
    float2 f;
    asm("{.reg .f16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}" : "=f"(f.x), "=f"(f.y) : "r"(bits));
    return f;
}

// Two non-negative E4M3 of a word's lower bytes, as float16 divided by E4M3_UNIT.
#if __CUDA_ARCH__ >= 890
constexpr float E4M3_UNIT = 1;
FN u32 two_e4m3(u32 bits) {
    u32 d;
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %1; cvt.rn.f16x2.e4m3x2 %0, a;}" : "=r"(d) : "r"(bits));
    return d;
}
#else
constexpr float E4M3_UNIT = 256;
FN u32 two_e4m3(u32 bits) { return pick(bits, 0, 0x1404) >> 1 & 0x3F803F80u; }
#endif

// Rounds to two bf16, ties to even; `low` in the lower half.
FN u32 two_bf16(float low, float high) {
#if __CUDA_ARCH__ >= 800
    u32 d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
#else
    const u32 a = __float_as_uint(low), b = __float_as_uint(high);
    return (a + 0x7FFF + (a >> 16 & 1)) >> 16 | (b + 0x7FFF + (b >> 16 & 1) & 0xFFFF0000u);
#endif
}

// 2 to the power of f, to 22 bits; 0 for minus infinity.
FN float power_of_two(float f) {
    float d;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(f));
    return d;
}

FN float reciprocal(float f) {
    float d;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(f));
    return d;
}

FN u16 float_to_half(float f) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(f));
    return bits;
}

FN float as_float(u32 bits) { return __uint_as_float(bits); }
FN u32 as_bits(float f) { return __float_as_uint(f); }
FN float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }
FN float times(float a, float b) { return __fmul_rn(a, b); }
FN float plus(float a, float b) { return __fadd_rn(a, b); }
FN i32 nearest(float f) { return __float2int_rn(f); }
FN float from_int(i32 i) { return __int2float_rn(i); }
// Keeps loads from being moved across: a compiler that hoists them all runs out of registers.
FN void fence() { asm volatile("" ::: "memory"); }

// For words in mapped RAM that the host and a running kernel exchange.
FN void fence_host() { asm volatile("fence.sc.sys;" ::: "memory"); }
FN u32 load_host(const u32* p) {
    u32 word;
    asm volatile("ld.acquire.sys.u32 %0, [%1];" : "=r"(word) : "l"(p) : "memory");
    return word;
}
FN void store_host(u32* p, u32 word) { asm volatile("st.release.sys.u32 [%0], %1;" :: "l"(p), "r"(word) : "memory"); }
FN void pause() { asm volatile("nanosleep.u32 200;"); }
FN u64 nanoseconds() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

FN float shuffle_xor(float f, int lanes) { return __shfl_xor_sync(0xFFFFFFFFu, f, lanes); }
FN i32 shuffle_xor(i32 i, int lanes) { return __shfl_xor_sync(0xFFFFFFFFu, i, lanes); }

// Loads weights, which are read once, without allocating them in L1.
FN uint4 load_streamed(const uint4* p) {
    uint4 v;
    asm("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

// Copies eight bytes to shared memory asynchronously; complete after `wait_copies` and a barrier.
FN void copy_eight(void* to, const void* from) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" :: "r"((u32)__cvta_generic_to_shared(to)), "l"(from) : "memory");
#else
    *(uint2*)to = *(const uint2*)from;
#endif
}
// Copies sixteen bytes likewise.
FN void copy_sixteen(void* to, const void* from) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"((u32)__cvta_generic_to_shared(to)), "l"(from) : "memory");
#else
    *(uint4*)to = *(const uint4*)from;
#endif
}
// Prefetches to L2.
FN void prefetch(const void* at) { asm volatile("prefetch.global.L2 [%0];" :: "l"(at)); }
FN void wait_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}
// Ends a group of copies; `wait_copies_but` waits until at most MOST groups are pending.
FN void end_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int MOST>
FN void wait_copies_but() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" :: "n"(MOST) : "memory");
#endif
}

// c (16 x 8, int32) += a (16 x 32, 8 bits) @ b (32 x 8, int8). With g = lane / 4 and t = lane % 4:
// a[0], a[2] are row g, columns from 4t and from 16 + 4t; a[1], a[3] row g + 8; b[0], b[1] column g,
// rows like a's columns; c[0], c[1] row g, columns 2t and 2t + 1; c[2], c[3] row g + 8.
template <bool SIGNED>
FN void multiply(i32 (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if __CUDA_ARCH__ >= 800
    if constexpr (SIGNED)
        asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else  // Turing multiplies 8 x 16 by 16 x 8; integer sums may be in any order
    const u32 a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
    for (int k = 0; k < 2; k++)
        for (int half = 0; half < 2; half++)
            if constexpr (SIGNED)
                asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
                    : "+r"(c[2 * half]), "+r"(c[2 * half + 1]) : "r"(a[2 * k + half]), "r"(b[k]));
            else
                asm("mma.sync.aligned.m8n8k16.row.col.s32.u8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
                    : "+r"(c[2 * half]), "+r"(c[2 * half + 1]) : "r"(a[2 * k + half]), "r"(b[k]));
#endif
}

// The same for 16 columns: a0 and b0 begin at column 4t.
template <bool SIGNED>
FN void multiply(i32 (&c)[4], u32 a0, u32 a1, u32 b0) {
#if __CUDA_ARCH__ >= 800
    if constexpr (SIGNED)
        asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
            : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a0), "r"(a1), "r"(b0));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
            : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a0), "r"(a1), "r"(b0));
#else
    const u32 a[2] = {a0, a1};
    for (int half = 0; half < 2; half++)
        if constexpr (SIGNED)
            asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
                : "+r"(c[2 * half]), "+r"(c[2 * half + 1]) : "r"(a[half]), "r"(b0));
        else
            asm("mma.sync.aligned.m8n8k16.row.col.s32.u8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
                : "+r"(c[2 * half]), "+r"(c[2 * half + 1]) : "r"(a[half]), "r"(b0));
#endif
}

#if __CUDA_ARCH__ < 800
// Two bf16 as float16, clamped to 65504.
FN u32 halves_of(u32 bits) {
    u32 d;
    asm("{.reg .f16 a, b; .reg .f32 x, y; min.f32 x, %1, 0f477FE000; max.f32 x, x, 0fC77FE000;"
        " min.f32 y, %2, 0f477FE000; max.f32 y, y, 0fC77FE000; cvt.rn.f16.f32 a, x; cvt.rn.f16.f32 b, y; mov.b32 %0, {a, b};}"
        : "=r"(d) : "f"(__uint_as_float(bits << 16)), "f"(__uint_as_float(bits & 0xFFFF0000u)));
    return d;
}
#endif

// c (16 x 8, float) += a (16 x 16, bf16) @ b (16 x 8, bf16). With g and t as above: a[0], a[2] are row
// g, two columns from 2t and from 8 + 2t; a[1], a[3] row g + 8; b[0], b[1] column g, rows like a's
// columns; c as above.
FN void multiply(float (&c)[4], const uint4& a, u32 b0, u32 b1) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
#else  // Turing multiplies float16, eight columns at a time
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(halves_of(a.x)), "r"(halves_of(a.y)), "r"(halves_of(b0)));
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(halves_of(a.z)), "r"(halves_of(a.w)), "r"(halves_of(b1)));
#endif
}
#endif

// Bits that sort by descending value, NaN before all; both zeros are equal.
FN u32 ordered(float value) {
    const u32 bits = as_bits(plus(value, 0.f));
    return value != value ? ~0u : bits >> 31 ? ~bits : bits | 1u << 31;
}
